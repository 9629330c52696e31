"""Those who ask no leave: a client of 2019, etcdctl, power switched by several, an etcd that is exchanged."""

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
    """Somebody with etcdctl, who compares nothing; each key is a call of its own."""
    store = ModelStore(cloud.etcd)

    def go() -> None:
        for each in operations:
            store.commit([], [each])

    touched = {keys.last(each.key.removesuffix(keys.TAKER)) for each in operations}
    return cloud.act(name, go, mortal=False, about=tuple(touched))


def switched_by_many(cloud: Cloud) -> None:
    """A stop, a start and a reboot at once, and ecompute may be killed."""
    host = active(cloud)
    cloud.works(A, '', host.rounds(5, host.plan))
    for each in ('stop', 'start', 'reboot'):
        cloud.powers(each, U, each)


def _power_fails(cloud: Cloud, host: Compute, first: Actor) -> None:
    """All power fails when `first` has ended, and the host comes back."""

    def comes_back() -> None:
        cloud.world.wait('the power to fail', lambda: not first.is_at_it)
        fails(host)
        host.rounds(4, host.plan)()

    cloud.act('the host', comes_back, mortal=False)


def stopped_and_power_fails(cloud: Cloud) -> Check:
    """A stop and a start while ecompute is at it, and then all power fails: it is as was asked last."""
    host = active(cloud)
    first = cloud.works(A, '', host.rounds(2, host.plan))
    cloud.powers('stop', U, 'stop')
    _power_fails(cloud, host, first)
    cloud.powers('start', U, 'start')

    def check() -> list[str]:
        for _ in range(4):
            host.do(host.planner.works_again, host.plan)
        asked = json.loads(cloud.etcd.entries[keys.request(A, U)].value).get('power')
        wanted = asked is None or asked['action'] != 'stop'
        runs = host.hypervisor.guests()[U].running
        return [] if runs == wanted else [f'asked last: {asked}, and it runs: {runs}']

    return check


def destroyed_and_power_fails(cloud: Cloud) -> None:
    """A destroy, and all power fails in it; another one that ran is started again."""
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
    """A client of 2019 claims and asks, destroys, and destroys again, whatever others do."""
    host = cloud.host(A)
    store = ModelStore(cloud.etcd)

    def asks() -> None:
        cloud.claimed(U, A)
        store.commit([], [_of_2019(U, A)])

    def destroys() -> None:
        cloud.world.wait('it to be asked for', lambda: not asked.is_at_it)
        store.commit([], [_of_2019(U, A, is_destroy=True)])
        store.commit([], [_of_2019(U, A, is_destroy=True)])

    asked = cloud.act('2019', asks, mortal=False)
    cloud.act('2019 destroy', destroys, mortal=False)
    cloud.works(A, '', host.rounds(3, host.plan, host.keep_claims))
    cloud.destroys('destroy', U)


def destroyed_as_in_2019(cloud: Cloud) -> None:
    """One of ours is destroyed by a client of 2019, stopped and destroyed by ours: what it shared is free again."""
    cloud.limited(5)
    host = active(cloud, group=TOGETHER)
    by_hand(cloud, '2019 destroy', _of_2019(U, A, is_destroy=True))
    cloud.works(A, '', host.rounds(3, host.plan))
    cloud.powers('stop', U, 'stop')
    cloud.destroys('destroy', U)


# By hand, in etcd


def presence_removed(cloud: Cloud) -> None:
    """The key that says that a compute is alive is deleted while it builds, takes, and is asked for more."""
    host = cloud.host(A)
    cloud.waiting(V)
    cloud.delivered(U, A, 'web')
    by_hand(cloud, 'somebody', Delete(keys.compute(A)))
    cloud.works(A, '', host.rounds(2, host.plan, host.hear_queues, host.pull))
    cloud.works(A, 'its presence', host.rounds(4, host.look_after_presence, lambda: cloud.world.sleep(1.0)))
    cloud.destroys('destroy', U)


def mark_removed(cloud: Cloud) -> None:
    """The mark of a taker, or what it takes, is deleted by hand; another compute takes, too."""
    cloud.hosts(A, B)
    place = cloud.waiting(U)
    by_hand(cloud, 'somebody', Delete(keys.taker(place.waiting.key)))
    for each in (A, B):
        cloud.takes(each, place)


def waiting_removed(cloud: Cloud) -> None:
    """What waits is deleted by hand while it is taken, and its uuid is asked for again."""
    host = cloud.host(A)
    place = cloud.waiting(U)
    cloud.takes(A, place)
    by_hand(cloud, 'somebody', Delete(place.waiting.key))
    cloud.creates('eschedule', U, resume=True)
    cloud.works(A, 'looking at claims', host.rounds(2, host.keep_claims, lambda: cloud.world.sleep(61.0)))


def attempt_removed(cloud: Cloud) -> None:
    """The key of who is at a set is deleted by hand, in the middle of it; it is asked again."""
    cloud.hosts(A, B)
    cloud.limited(4)
    by_hand(cloud, 'somebody', Delete(keys.attempt(U)))
    cloud.creates('eschedule 1', U, resume=True, name='web', group=APART)
    cloud.creates('eschedule 2', U, resume=True, name='web', group=APART)


def group_turned(cloud: Cloud) -> None:
    """A group's rule is edited by hand, and back, while a member ends, one comes, and one is taken."""
    host = active(cloud, group=APART)
    other = cloud.host(B)
    cloud.is_ample = False
    cloud.waiting(V, 'db', APART)
    store = ModelStore(cloud.etcd)

    def turns() -> None:
        for policy in ('affinity', 'anti-affinity'):
            while (entry := store.get(keys.group('g'))) is not None:
                turned = {**json.loads(entry.value), 'policy': policy}
                if store.commit([Unchanged(entry.key, entry.revision)], [Put(entry.key, json.dumps(turned))]):
                    break

    cloud.act('somebody', turns, mortal=False)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.act('B', other.rounds(2, other.hear_queues, other.pull), process=other.process)
    cloud.destroys('destroy', U)


def quota_spoilt(cloud: Cloud) -> None:
    """A quota becomes unreadable, and is put right by hand, while one is created, one ends, and it is set."""
    cloud.limited(5)
    host = active(cloud)
    cloud.is_astray = True
    cloud.is_ample = False
    store = ModelStore(cloud.etcd)

    def spoils() -> None:
        store.commit([], [Put(keys.quota('p'), '{')])
        store.commit([], [Put(keys.quota('p'), quota_json(Quota('p', {'instances': 5}, {})))])

    cloud.act('somebody', spoils, mortal=False)
    cloud.creates('eschedule', V, name='db')
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.act('later', lambda: None, again=lambda: limit(cloud.store, 'p', ['instances=5']))


def _accepts(host: Compute, number: int, *work: Callable[[], object]) -> Callable[[], None]:
    def go() -> None:
        host.start(republishes=True)
        host.rounds(number, *work)()

    return go


def accepted_and_destroyed(cloud: Cloud) -> None:
    """etcd is restored to before U was made; U is published, destroyed, and another takes its name, all at once."""
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
    """The same of two computes whose instances share a group and a quota, which is set at that moment."""
    cloud.limited(5)
    hosts = {each: cloud.host(each) for each in (A, B)}
    saved = dict(cloud.etcd.entries)
    cloud.delivered(U, A, 'web')
    cloud.store.commit([], [Put(keys.quota('p'), quota_json(Quota('p', {'instances': 5}, {})))])
    cloud.delivered(V, B, 'db')
    two = {name: 2 * amount for name, amount in SIZE.items()}
    cloud.store.commit([], [Put(keys.quota('p'), quota_json(Quota('p', {'instances': 5}, {**two, 'instances': 2})))])
    for each in hosts.values():
        each.plan(3)
    restore(cloud, saved)
    for name, each in hosts.items():
        each.republishes = True
        cloud.works(name, '', _accepts(each, 2, each.plan))
    sets(cloud, 'quota set', 'instances=4')


def accepted_beside_operators(cloud: Cloud) -> None:
    """etcd is empty again; A publishes what it runs while `audit --fix` looks and its claim is asked about."""
    host = active(cloud)
    cloud.store.commit([], [Delete(key) for key in cloud.etcd.entries])
    host.republishes = True
    cloud.works(A, '', _accepts(host, 2, host.plan, host.keep_claims))
    fixes_all(cloud)
    cloud.creates('eschedule', U, resume=True, name='web')
    cloud.is_ample = False


def accepted_and_switched(cloud: Cloud) -> None:
    """U is stopped; etcd is restored to before that; U is published, started, and its host may be killed."""
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
