"""Writers that bypass eschedule: a client of 2019, etcdctl; and a replaced etcd."""

from __future__ import annotations

import json
from collections.abc import Callable

from ecomp.model import keys
from ecomp.model.order import Power
from ecomp.model.quota import Quota
from ecomp.model.quota import to_json as quota_json
from ecomp.scheduler.changing.change import power
from ecomp.scheduler.operating.sharing import limit
from ecomp.store.client import Delete, Put, Unchanged
from tests.model.acting import SHAKY, Actor, Bounds
from tests.model.cloud import APART, IMAGE, SIZE, TOGETHER, A, B, Cloud, U, V, name_uuid
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, within
from tests.model.scenarios_losses import fails, restore
from tests.model.scenarios_operators import sets
from tests.model.scenarios_pairs import active, fixes_all


def by_hand(cloud: Cloud, name: str, *operations: Put | Delete) -> Actor:
    """Add manual writes with etcdctl, without conditions; each key is a call of its own."""
    store = ModelStore(cloud.etcd)

    def write_all() -> None:
        for operation in operations:
            store.commit([], [operation])

    touched = {keys.last(operation.key.removesuffix(keys.TAKER)) for operation in operations}
    return cloud.act(name, write_all, mortal=False, about=tuple(touched))


def switched_by_many(cloud: Cloud) -> None:
    """A stop, a start and a reboot run concurrently, and ecompute may be killed."""
    host = active(cloud)
    cloud.works(A, '', host.rounds(5, host.plan))
    for action in ('stop', 'start', 'reboot'):
        cloud.powers(action, U, action)


def _power_fails(cloud: Cloud, host: Compute, first: Actor) -> None:
    """Add a power failure of the host, which begins when `first` has finished."""

    def come_back() -> None:
        cloud.world.wait('the power to fail', lambda: not first.is_at_it)
        fails(host)
        host.rounds(4, host.plan)()

    cloud.act('the host', come_back, mortal=False)


def stopped_and_power_fails(cloud: Cloud) -> Check:
    """A stop and a start while ecompute works, then all power fails: the last action decides."""
    host = active(cloud)
    first = cloud.works(A, '', host.rounds(2, host.plan))
    cloud.powers('stop', U, 'stop')
    _power_fails(cloud, host, first)
    cloud.powers('start', U, 'start')

    def check() -> list[str]:
        for _ in range(4):
            host.do(host.planner.works_again, host.plan)
        requested = json.loads(cloud.etcd.entries[keys.request(A, U)].value).get('power')
        should_run = requested is None or requested['action'] != 'stop'
        is_running = host.hypervisor.guests()[U].running
        return [] if is_running == should_run else [f'asked last: {requested}, and it runs: {is_running}']

    return check


def destroyed_and_power_fails(cloud: Cloud) -> None:
    """All power fails during a destroy; another instance that ran is started again."""
    host = active(cloud)
    active(cloud, V, 'db')
    first = cloud.works(A, '', host.rounds(2, host.plan))
    cloud.destroys('destroy', U)
    cloud.powers('reboot', V, 'reboot')
    _power_fails(cloud, host, first)


def _of_2019(instance: str, compute: str, is_destroy: bool = False) -> Put:
    value = {
        'allocations': {} if is_destroy else {compute: {'resources': SIZE}},
        'instance': instance,
        'image': None if is_destroy else IMAGE,
        'user_id': 'u',
        'project_id': 'old',
        'consumer_generation': None,
    }
    return Put(keys.request(compute, instance), json.dumps(value))


def asked_as_in_2019(cloud: Cloud) -> None:
    """A client of 2019 claims, requests, and destroys twice, during a destroy of ours."""
    host = cloud.host(A)
    store = ModelStore(cloud.etcd)

    def request() -> None:
        cloud.claimed(U, A)
        store.commit([], [_of_2019(U, A)])

    def destroy_twice() -> None:
        cloud.world.wait('it to be asked for', lambda: not requester.is_at_it)
        store.commit([], [_of_2019(U, A, is_destroy=True)])
        store.commit([], [_of_2019(U, A, is_destroy=True)])

    requester = cloud.act('2019', request, mortal=False)
    cloud.act('2019 destroy', destroy_twice, mortal=False)
    cloud.works(A, '', host.rounds(3, host.plan, host.keep_claims))
    cloud.destroys('destroy', U)


def destroyed_as_in_2019(cloud: Cloud) -> None:
    """A client of 2019 and ours destroy an instance: what it shared is released."""
    cloud.limited(5)
    host = active(cloud, group=TOGETHER)
    by_hand(cloud, '2019 destroy', _of_2019(U, A, is_destroy=True))
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.powers('stop', U, 'stop')
    cloud.destroys('destroy', U)


# Manual changes in etcd


def presence_removed(cloud: Cloud) -> None:
    """A compute's presence key is deleted while it builds, takes and destroys."""
    host = cloud.host(A)
    cloud.waiting(V)
    cloud.delivered(U, A, 'web')
    by_hand(cloud, 'somebody', Delete(keys.compute(A)))
    cloud.works(A, '', host.rounds(2, host.plan, host.hear_queues, host.pull))
    cloud.works(A, 'its presence', host.rounds(4, host.look_after_presence, lambda: cloud.world.sleep(1.0)))
    cloud.destroys('destroy', U)


def mark_removed(cloud: Cloud) -> None:
    """A taker key is deleted manually while two computes take the request."""
    cloud.hosts(A, B)
    place = cloud.waiting(U)
    by_hand(cloud, 'somebody', Delete(keys.taker(place.waiting.key)))
    for compute in (A, B):
        cloud.takes(compute, place)


def waiting_removed(cloud: Cloud) -> None:
    """A queued request is deleted manually while it is taken, and its uuid is created again."""
    host = cloud.host(A)
    place = cloud.waiting(U)
    cloud.takes(A, place)
    by_hand(cloud, 'somebody', Delete(place.waiting.key))
    cloud.creates('eschedule', U, resume=True)
    cloud.works(A, 'looking at claims', host.rounds(2, host.keep_claims, lambda: cloud.world.sleep(61.0)))


def attempt_removed(cloud: Cloud) -> None:
    """The key of an attempt is deleted manually while two eschedules create its instance."""
    cloud.hosts(A, B)
    cloud.limited(4)
    by_hand(cloud, 'somebody', Delete(keys.attempt(U)))
    cloud.creates('eschedule 1', U, resume=True, name='web', group=APART)
    cloud.creates('eschedule 2', U, resume=True, name='web', group=APART)


def group_turned(cloud: Cloud) -> None:
    """A group's policy is changed manually, and back, beside a destroy and a take."""
    host = active(cloud, group=APART)
    other = cloud.host(B)
    cloud.is_ample = False
    cloud.waiting(V, 'db', APART)
    store = ModelStore(cloud.etcd)

    def change_policy() -> None:
        for policy in ('affinity', 'anti-affinity'):
            while (entry := store.get(keys.group('g'))) is not None:
                changed = {**json.loads(entry.value), 'policy': policy}
                if store.commit([Unchanged(entry.key, entry.revision)], [Put(entry.key, json.dumps(changed))]):
                    break

    cloud.act('somebody', change_policy, mortal=False)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.act('B', other.rounds(2, other.hear_queues, other.pull), process=other.process)
    cloud.destroys('destroy', U)


def quota_spoilt(cloud: Cloud) -> None:
    """A quota becomes malformed and is repaired manually, during a create and a destroy."""
    cloud.limited(5)
    host = active(cloud)
    cloud.is_astray = True
    cloud.is_ample = False
    store = ModelStore(cloud.etcd)

    def spoil() -> None:
        store.commit([], [Put(keys.quota('p'), '{')])
        store.commit([], [Put(keys.quota('p'), quota_json(Quota('p', {'instances': 5}, {})))])

    cloud.act('somebody', spoil, mortal=False)
    cloud.creates('eschedule', V, name='db')
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.act('later', lambda: None, again=lambda: limit(cloud.store, 'p', ['instances=5']))


def _accepts(host: Compute, number: int, *work: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        host.start(republishes=True)
        host.rounds(number, *work)()

    return run


def accepted_and_destroyed(cloud: Cloud) -> None:
    """After a restore U is published and destroyed while V joins its group."""
    cloud.limited(5)
    host = cloud.host(A)
    saved = dict(cloud.etcd.entries)
    active(cloud, group=TOGETHER)
    restore(cloud, saved)
    host.republishes = True
    cloud.is_ample = False
    cloud.works(A, '', _accepts(host, 2, host.plan))
    cloud.destroys('destroy', U)
    cloud.creates('eschedule', V, group=TOGETHER)
    sets(cloud, 'quota set', 'instances=4')


def accepted_by_two(cloud: Cloud) -> None:
    """The same for two computes whose instances share a quota, which is set at that moment."""
    cloud.limited(5)
    hosts = {compute: cloud.host(compute) for compute in (A, B)}
    saved = dict(cloud.etcd.entries)
    cloud.delivered(U, A, 'web')
    cloud.store.commit([], [Put(keys.quota('p'), quota_json(Quota('p', {'instances': 5}, {})))])
    cloud.delivered(V, B, 'db')
    amounts_of_two = {name: 2 * amount for name, amount in SIZE.items()}
    cloud.store.commit(
        [], [Put(keys.quota('p'), quota_json(Quota('p', {'instances': 5}, {**amounts_of_two, 'instances': 2})))]
    )
    for host in hosts.values():
        host.plan(3)
    restore(cloud, saved)
    for name, host in hosts.items():
        host.republishes = True
        cloud.works(name, '', _accepts(host, 2, host.plan))
    sets(cloud, 'quota set', 'instances=4')


def accepted_beside_operators(cloud: Cloud) -> None:
    """A publishes to an emptied etcd during `audit --fix` and a create of the same uuid."""
    host = active(cloud)
    cloud.store.commit([], [Delete(key) for key in cloud.etcd.entries])
    host.republishes = True
    cloud.works(A, '', _accepts(host, 2, host.plan, host.keep_claims))
    fixes_all(cloud)
    cloud.creates('eschedule', U, resume=True, name='web')
    cloud.is_ample = False


def accepted_and_switched(cloud: Cloud) -> None:
    """U is stopped; etcd is restored to before that; U is published and rebooted."""
    host = active(cloud)
    saved = dict(cloud.etcd.entries)
    power(cloud.store, U, Power('stop', name_uuid(78)))
    host.plan(3)
    restore(cloud, saved)
    host.republishes = True
    cloud.works(A, '', _accepts(host, 3, host.plan))
    cloud.powers('reboot', U, 'reboot')


SCENARIOS = [
    *within(
        SHAKY,
        *(switched_by_many, stopped_and_power_fails, destroyed_and_power_fails, asked_as_in_2019),
        *(destroyed_as_in_2019, presence_removed, mark_removed, attempt_removed, group_turned, quota_spoilt),
        *(accepted_and_destroyed, accepted_by_two, accepted_beside_operators, accepted_and_switched),
    ),
    *within(Bounds(2, 0), waiting_removed),
]
