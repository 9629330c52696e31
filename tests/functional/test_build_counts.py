"""What a set, a build and a destroy cost, exactly: questions to placement, operations at etcd.

A figure here is changed with what makes it cheaper or dearer, and with the reason in the commit.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ecomp.model import keys
from ecomp.model.order import Request, SetOrder, to_json
from ecomp.model.record import ACTIVE
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import BLOCK
from ecomp.store.client import Delete, Put, Store
from tests.functional.cloud import IMAGE, RESOURCES, Cloud, new
from tests.functional.toy import Toy

ETCD = ('get', 'read', 'snapshot', 'count', 'revision', 'commit', 'grant', 'keep_alive', 'revoke')
"""What asks etcd, once each."""


def said(name: str, *_: object) -> str:
    return name


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each thing was asked since the counter was cleared: `etcd get`, `placement PUT /allocations`."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def counted(of: str, kind: type, name: str, what: Callable[..., str]) -> None:
        real = getattr(kind, name)

        @functools.wraps(real)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            with lock:
                counts[f'{of} {what(*given)}'] += 1
            return real(self, *given, **named)

        monkeypatch.setattr(kind, name, call)

    counted('placement', Placement, 'get', lambda path: f'GET /{path.split("/")[1].split("?")[0]}')
    counted('placement', Placement, 'write', lambda method, path, _: f'{method} /{path.split("/")[1]}')
    for name in ETCD:
        counted('etcd', Store, name, partial(said, name))
    return counts


def carried_out(one: Toy, asked: Counter[str]) -> Counter[str]:
    """What was asked for what is to be done now, planning left out: that is once for all there is."""
    work = one.planned()
    asked.clear()
    for each in work:
        one.planner.begin(each)
        one.planner.carry_out(each)
    assert work
    return Counter(asked)


@pytest.mark.parametrize(('count', 'claims'), [(BLOCK, 1), (2 * BLOCK, 2)])
def test_a_set_asks_this_much(cloud: Cloud, asked: Counter[str], count: int, claims: int) -> None:
    computes = {cloud.compute(VCPU=16, MEMORY_MB=1024, DISK_GB=16) for _ in range(10)}
    aggregate = new()  # of these alone: others' computes are in the same placement
    for each in computes:
        path = f'/resource_providers/{each}'
        body = {'aggregates': [aggregate], 'resource_provider_generation': cloud.placement.get(path)['generation']}
        cloud.placement.write('PUT', f'{path}/aggregates', body)
    who = {'user_id': 'a', 'project_id': 'b', 'count': count, 'minimum': count}
    wanted = SetOrder(new(), query=f'{RESOURCES}&member_of={aggregate}', image=IMAGE, **who)
    asked.clear()
    placed = cloud.create_all(wanted)
    assert Counter(each.compute for each in placed.values()) == dict.fromkeys(computes, count // 10)
    # The quota, a lease, the attempt, the computes, who else is at it, the quota once more, the delivery, the lease.
    assert asked == {
        **{'placement GET /allocation_candidates': 1, 'placement POST /allocations': claims},
        **{'etcd get': 2, 'etcd grant': 1, 'etcd snapshot': 2, 'etcd commit': 2, 'etcd revoke': 1},
    }


def test_a_build_and_a_destroy_ask_this_much(one: Toy, cloud: Cloud, asked: Counter[str]) -> None:
    instance = one.place()
    # Rule 2's question; the record: there is none, building with its addresses, its image, its disk, active.
    assert carried_out(one, asked) == {'placement GET /allocations': 1, 'etcd read': 1, 'etcd commit': 4}
    assert one.record(instance).state == 'active'
    tombstone = Request(instance, {}, image=None, user_id='me', project_id='us')
    assert cloud.store.commit([], [Put(keys.request(one.compute, instance), to_json(tombstone))])
    # The claim's generation and its release; the record: destroying, and gone, on a lease; its project's quota.
    assert carried_out(one, asked) == {
        **{'placement GET /allocations': 1, 'placement PUT /allocations': 1},
        **{'etcd get': 1, 'etcd grant': 1, 'etcd commit': 2},
    }
    assert cloud.store.get(keys.request(one.compute, instance)) is None


def test_records_that_are_read_again_ask_once_for_all_of_them(one: Toy, cloud: Cloud, asked: Counter[str]) -> None:
    instances = {one.place() for _ in range(5)}
    for _ in range(2):
        one.step()
    asked.clear()
    one.planner.recheck()
    assert asked == {'etcd snapshot': 1}
    removed = instances.pop()
    cloud.store.commit([], [Delete(keys.record(one.compute, removed))])
    one.planner.recheck()
    asked.clear()
    # It is as if nothing of it had been written: so it is written again.
    assert one.step() == [f'build {removed}']
    assert one.record(removed).state == ACTIVE
