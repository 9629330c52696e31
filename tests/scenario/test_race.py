"""Many processes after the last slots: each slot is taken once, nothing fails, and hardly a claim is made in vain."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.commands import Control, eschedule, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.invariants import allocations, check
from tests.kit.many import Many
from tests.kit.servers import until
from tests.kit.story import NOTIFIED, SMALL, SOON, reached


class Watched(FaultyPlacement):
    """A proxy that fails nothing, and remembers what was asked and answered."""

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self.calls: list[tuple[str, str, int]] = []

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        """Ask the real placement."""
        answer = super().pass_on(method, path, headers, body)
        self.calls.append((method, path.split('?')[0], answer[0]))
        return answer


@pytest.mark.parametrize(
    ('computes', 'slots', 'racing'),
    [(3, 7, 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((5, 12, 8), (20, 50, 32)))],
)
def test_the_last_slots(cluster: Control, computes: int, slots: int, racing: int) -> None:
    """So many slots are left on so many computes, and twice as many are asked for than there are racing.

    Two commands that looked while others were claiming may still meet: about one in three races for 7 slots, and on a
    busy machine two times in one race now and then. So claims are counted over several races; without an order among
    those who race there are 1.33 for a slot.
    """
    rounds = 4 if slots < 10 else 1
    many = Many(cluster, computes)
    many.start()
    uneven = 4 * computes - slots
    done = cluster.eschedule(SMALL, '--count', str(uneven))
    assert done.code == 0, done
    before = {instance for _, instance in NOTIFIED.findall(done.stdout)}
    with Watched(cluster.placement.port) as placement:
        config = write_config(cluster.directory / 'watched.yaml', cluster.etcd.endpoint, placement.url)
        for _ in range(rounds):
            placed = race(config, slots, racing)
            held = allocations(cluster)
            assert held.keys() == before | placed.keys()
            assert Counter(compute for each in held.values() for compute in each) == dict.fromkeys(many.computes, 4)
            for instance, compute in placed.items():
                assert reached(cluster, instance, 'active')['compute'] == compute
            check(cluster)
            for instance in placed:
                assert cluster.eschedule('destroy', instance).code == 0
            until(lambda: allocations(cluster).keys() == before, SOON, 'the slots of this race are free')
    assert [call for call in placement.calls if call[2] >= 500] == []
    claims = [call for call in placement.calls if call[0] in ('PUT', 'POST') and call[1].startswith('/allocations')]
    assert len(claims) <= 1.2 * slots * rounds, Counter(claims)


def race(config: Path, slots: int, racing: int) -> dict[str, str]:
    """Twice as many commands as there are `racing`, so many at a time: {instance: compute} of the slots' number."""
    with ThreadPoolExecutor(racing) as threads:
        results = list(threads.map(lambda _: eschedule(config, SMALL), range(2 * racing)))
    assert Counter(each.code for each in results) == {0: slots, 3: 2 * racing - slots}
    placed = {instance: compute for each in results for compute, instance in NOTIFIED.findall(each.stdout)}
    assert len(placed) == slots
    return placed
