"""F33: the burst: more requests than fit, destroys, and etcd killed once. The soak is in test_soak.py."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.commands import Control, Result
from tests.kit.hands import check_claims_twice, check_settled, expire_attempts, read_guests
from tests.kit.invariants import read_allocations
from tests.kit.servers import wait_until
from tests.kit.story import SMALL_QUERY, parse_notice, run_concurrently, wait_state

CREATE_COUNT = 60
CREATOR_COUNT = 12
COMPUTE_COUNT = 3
VCPUS_PER_COMPUTE = 15
DESTROY_COUNT = 12
UUID_OPTION = re.compile(r'--uuid ([0-9a-f-]{36})')


@pytest.mark.slow
def test_burst_places_destroys_and_leaks_nothing(own_control: Control) -> None:
    """F33: 60 creates by 12 eschedules, room for 45, random destroys, and one kill -9 of etcd (fake)."""
    control, rng = own_control, random.Random(33)
    inventory = f'VCPU:{VCPUS_PER_COMPUTE},DISK_GB:100,MEMORY_MB:65536'
    computes = [control.ecompute(inventory) for _ in range(COMPUTE_COUNT)]
    placed: list[str] = []
    destroyed: set[str] = set()
    lock = threading.Lock()
    finished = threading.Semaphore(0)

    def create(_: int) -> Result:
        result = control.eschedule(SMALL_QUERY)
        if result.code == 7 and (match := UUID_OPTION.search(result.stderr)):
            # The claim or delivery has an unknown outcome: the same command reports it or continues.
            result = run_until_answered(control, SMALL_QUERY, '--uuid', match[1])
        if result.code == 0:
            with lock:
                placed.append(parse_notice(result)[1])
        finished.release()
        return result

    def destroy(_: int) -> Result | None:
        with lock:
            candidates = [item for item in placed if item not in destroyed]
            if not candidates:
                return None
            instance = rng.choice(candidates)
            destroyed.add(instance)
        return run_until_answered(control, 'destroy', instance)

    with ThreadPoolExecutor(CREATOR_COUNT) as creators, ThreadPoolExecutor(2) as destroyers:
        creating = [creators.submit(create, number) for number in range(CREATE_COUNT)]
        for _ in range(CREATE_COUNT // 3):
            finished.acquire()
        destroying = [destroyers.submit(destroy, number) for number in range(DESTROY_COUNT)]
        control.etcd.kill()
        control.etcd.start()
        created = [item.result() for item in creating]
        removed = [item.result() for item in destroying]
    for result in created:
        # 7 or 5: etcd was away; the command or a compute releases the claim.
        assert result.code in (0, 3, 5, 7), result
        assert all(line.startswith('eschedule: ') for line in result.stderr.splitlines()), result
    for item in removed:
        assert item is None or item.code in (0, 4), item  # 4: it was accepted before etcd was killed
    codes = Counter(item.code for item in created)
    assert codes[0] == len(placed) == len(set(placed))
    expire_attempts(control)  # of attempts that could not release their claims
    for compute in computes:
        check_claims_twice(control, compute, read_guests(compute))
    for instance in placed:
        wait_state(control, instance, 'gone' if instance in destroyed else 'active')
    living = [item for item in placed if item not in destroyed]
    assert read_allocations(control).keys() == set(living)
    assert sum(len(read_guests(item)) for item in computes) == len(living)
    check_settled(control, *computes)

    # No leak: the remaining room can be used to the last VCPU, and not beyond.
    room = COMPUTE_COUNT * VCPUS_PER_COMPUTE - len(living)
    results = run_concurrently(control, [[SMALL_QUERY]] * (room + 3), width=4)
    assert Counter(item.code for item in results) == Counter({0: room, 3: 3}), codes
    for result in results:
        if result.code == 0:
            wait_state(control, parse_notice(result)[1], 'active')
    assert [len(read_guests(item)) for item in computes] == [VCPUS_PER_COMPUTE] * COMPUTE_COUNT
    check_settled(control, *computes)


def run_until_answered(control: Control, *words: str) -> Result:
    """Repeat the command until it reaches etcd; return its result."""

    def run() -> Result | None:
        result = control.eschedule(*words)
        return None if result.code == 7 else result

    result = wait_until(run, 60, 'etcd is back')
    assert result is not None
    return result
