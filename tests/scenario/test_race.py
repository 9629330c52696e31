"""Many processes after the last slots: each slot is taken once, nothing fails, and hardly a claim is made in vain."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.commands import Control, eschedule, write_config
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.invariants import allocations, check
from tests.kit.many import Many
from tests.kit.story import NOTIFIED, SMALL, reached


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
    """So many slots are left on so many computes, and twice as many are asked for than there are racing."""
    many = Many(cluster, computes)
    many.start()
    uneven = 4 * computes - slots
    done = cluster.eschedule(SMALL, '--count', str(uneven))
    assert done.code == 0, done
    before = [instance for _, instance in NOTIFIED.findall(done.stdout)]
    with Watched(cluster.placement.port) as placement, ThreadPoolExecutor(racing) as threads:
        config = write_config(cluster.directory / 'watched.yaml', cluster.etcd.endpoint, placement.url)
        asked = [threads.submit(eschedule, config, SMALL) for _ in range(2 * racing)]
        results = [each.result() for each in asked]
    assert Counter(each.code for each in results) == {0: slots, 3: 2 * racing - slots}
    placed = [pair for each in results for pair in NOTIFIED.findall(each.stdout)]
    assert len({instance for _, instance in placed}) == slots
    assert [call for call in placement.calls if call[2] >= 500] == []
    claims = [call for call in placement.calls if call[0] in ('PUT', 'POST') and call[1].startswith('/allocations')]
    assert len(claims) <= 1.2 * slots, Counter(claims)
    held = allocations(cluster)
    assert held.keys() == {*before, *(instance for _, instance in placed)}
    assert Counter(compute for each in held.values() for compute in each) == dict.fromkeys(many.computes, 4)
    for compute, instance in placed:
        assert reached(cluster, instance, 'active')['compute'] == compute
    check(cluster)
