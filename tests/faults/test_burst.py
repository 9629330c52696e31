"""F33: many at once. The soak is apart; this is its burst: more requests than fit, destroys, and etcd killed once."""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.kit.commands import Control, Result
from tests.kit.hands import guests, lapse_requests, look_twice, settled
from tests.kit.invariants import allocations
from tests.kit.servers import until
from tests.kit.story import SMALL, at_once, notified, reached

REQUESTS, AT_ONCE, COMPUTES, EACH, DESTROYS = 60, 12, 3, 15, 12
RESUME = re.compile(r'--uuid ([0-9a-f-]{36})')


@pytest.mark.slow
def test_a_burst(own_control: Control) -> None:
    """F33: 60 creates by 12 eschedules, room for 45, random destroys, and kill -9 of etcd in the middle (fake)"""
    control, rng = own_control, random.Random(33)
    inventory = f'VCPU:{EACH},DISK_GB:100,MEMORY_MB:65536'
    computes = [control.ecompute(inventory) for _ in range(COMPUTES)]
    placed: list[str] = []
    destroyed: set[str] = set()
    lock = threading.Lock()
    done = threading.Semaphore(0)

    def create(_: int) -> Result:
        result = control.eschedule(SMALL)
        if result.code == 7 and (again := RESUME.search(result.stderr)):
            # Whether it was claimed or delivered is not known: the same command says, or goes on.
            result = answered(control, SMALL, '--uuid', again[1])
        if result.code == 0:
            with lock:
                placed.append(notified(result)[1])
        done.release()
        return result

    def destroy(_: int) -> Result | None:
        with lock:
            candidates = [each for each in placed if each not in destroyed]
            if not candidates:
                return None
            instance = rng.choice(candidates)
            destroyed.add(instance)
        return answered(control, 'destroy', instance)

    with ThreadPoolExecutor(AT_ONCE) as creators, ThreadPoolExecutor(2) as destroyers:
        creating = [creators.submit(create, number) for number in range(REQUESTS)]
        for _ in range(REQUESTS // 3):
            done.acquire()
        destroying = [destroyers.submit(destroy, number) for number in range(DESTROYS)]
        control.etcd.kill()
        control.etcd.start()
        created = [each.result() for each in creating]
        removed = [each.result() for each in destroying]
    for result in created:
        # 7 or 5: etcd was away, and it was told so; what had been claimed is released, or is by the computes.
        assert result.code in (0, 3, 5, 7), result
        assert all(line.startswith('eschedule: ') for line in result.stderr.splitlines()), result
    for each in removed:
        assert each is None or each.code in (0, 4), each  # 4: it was accepted before etcd went away
    codes = Counter(each.code for each in created)
    assert codes[0] == len(placed) == len(set(placed))
    lapse_requests(control)  # of those that could not take theirs back
    for compute in computes:
        look_twice(control, compute, guests(compute))
    for instance in placed:
        reached(control, instance, 'gone' if instance in destroyed else 'active')
    living = [each for each in placed if each not in destroyed]
    assert allocations(control).keys() == set(living)
    assert sum(len(guests(each)) for each in computes) == len(living)
    settled(control, *computes)

    # Nothing has leaked: what is left of the room can be had to the last VCPU, and no more.
    room = COMPUTES * EACH - len(living)
    last = at_once(control, [[SMALL]] * (room + 3), width=4)
    assert Counter(each.code for each in last) == Counter({0: room, 3: 3}), codes
    for result in last:
        if result.code == 0:
            reached(control, notified(result)[1], 'active')
    assert [len(guests(each)) for each in computes] == [EACH] * COMPUTES
    settled(control, *computes)


def answered(control: Control, *words: str) -> Result:
    """How an eschedule ends that can reach what it has to."""

    def ended() -> Result | None:
        result = control.eschedule(*words)
        return None if result.code == 7 else result

    result = until(ended, 60, 'etcd is back')
    assert result is not None
    return result
