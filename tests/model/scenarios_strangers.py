"""Writers that bypass eschedule: a client of 2019, etcdctl, and a replaced etcd."""

from __future__ import annotations

import json
from collections.abc import Callable

from ecomp.model import keys
from ecomp.model.order import PowerAction
from ecomp.model.quota import Quota
from ecomp.model.stored import encode
from ecomp.scheduler.changes.change import change_power
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.store.client import Delete, Exists, Put, Unchanged
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.cloud import AFFINITY, ANTI_AFFINITY, IMAGE, SIZE, A, B, Cloud, U, V, make_numbered_uuid
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.scenarios_losses import fail_power, restore_etcd
from tests.model.scenarios_operators import add_quota_set
from tests.model.scenarios_pairs import add_complete_fix, make_active


def add_manual_writes(cloud: Cloud, name: str, *operations: Put | Delete) -> Actor:
    """Add manual writes with etcdctl, without conditions. Each key is a call of its own."""
    store = ModelStore(cloud.etcd)

    def write_all() -> None:
        for operation in operations:
            store.commit([], [operation])

    touched = {keys.get_last_part(operation.key.removesuffix(keys.TAKER)) for operation in operations}
    return cloud.add_actor(name, write_all, mortal=False, subjects=tuple(touched))


def switched_concurrently(cloud: Cloud) -> None:
    """A stop, a start and a reboot run concurrently, and ecompute may be killed."""
    host = make_active(cloud)
    cloud.add_compute_actor(A, '', host.repeat(5, host.plan))
    for action in ('stop', 'start', 'reboot'):
        cloud.add_power(action, U, action)


def _add_power_failure(cloud: Cloud, host: Compute, first: Actor) -> None:
    """Add a power failure of the host, which begins when `first` has finished."""

    def come_back() -> None:
        cloud.world.wait('the power to fail', lambda: not first.is_active)
        fail_power(host)
        host.repeat(4, host.plan)()

    cloud.add_actor('the host', come_back, mortal=False)


def stopped_and_power_fails(cloud: Cloud) -> Check:
    """A stop and a start while ecompute works, then all power fails: the last action decides."""
    host = make_active(cloud)
    first = cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_power('stop', U, 'stop')
    _add_power_failure(cloud, host, first)
    cloud.add_power('start', U, 'start')

    def check() -> list[str]:
        for _ in range(4):
            host.run_all(host.planner.retry_now, host.plan)
        requested = json.loads(cloud.etcd.entries[keys.request(A, U)].value).get('power')
        should_run = requested is None or requested['action'] != 'stop'
        is_running = host.hypervisor.list_guests()[U].running
        return [] if is_running == should_run else [f'asked last: {requested}, and it runs: {is_running}']

    return check


def destroyed_and_power_fails(cloud: Cloud) -> None:
    """All power fails during a destroy, and another instance that ran is started again."""
    host = make_active(cloud)
    make_active(cloud, V, 'db')
    first = cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_destroy('destroy', U)
    cloud.add_power('reboot', V, 'reboot')
    _add_power_failure(cloud, host, first)


def _make_2019_request(instance: str, compute: str, is_destroy: bool = False) -> Put:
    value = {
        'allocations': {} if is_destroy else {compute: {'resources': SIZE}}, 'instance': instance,
        'image': None if is_destroy else IMAGE, 'user_id': 'u', 'project_id': 'old', 'consumer_generation': None,
    }  # fmt: skip
    return Put(keys.request(compute, instance), json.dumps(value))


def requested_as_in_2019(cloud: Cloud) -> None:
    """A client of 2019 claims, requests, and destroys twice, during a destroy of ours."""
    host = cloud.add_host(A)
    store = ModelStore(cloud.etcd)

    def request() -> None:
        cloud.claim(U, A)
        store.commit([], [_make_2019_request(U, A)])

    def destroy_twice() -> None:
        cloud.world.wait('it to be asked for', lambda: not requester.is_active)
        store.commit([], [_make_2019_request(U, A, is_destroy=True)])
        store.commit([], [_make_2019_request(U, A, is_destroy=True)])

    requester = cloud.add_actor('2019', request, mortal=False)
    cloud.add_actor('2019 destroy', destroy_twice, mortal=False)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan, host.reconcile))
    cloud.add_destroy('destroy', U)


def destroyed_as_in_2019(cloud: Cloud) -> None:
    """A client of 2019 and ours destroy an instance: what it shared is released."""
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    add_manual_writes(cloud, '2019 destroy', _make_2019_request(U, A, is_destroy=True))
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_power('stop', U, 'stop')
    cloud.add_destroy('destroy', U)


# Manual changes in etcd


def presence_removed(cloud: Cloud) -> None:
    """A compute's presence key is deleted while it builds, takes and destroys."""
    host = cloud.add_host(A)
    cloud.enqueue_request(V)
    cloud.deliver(U, A, 'web')
    add_manual_writes(cloud, 'somebody', Delete(keys.compute(A)))
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, host.read_queues, host.pull))
    cloud.add_compute_actor(A, 'its presence', host.repeat(4, host.keep_presence, lambda: cloud.world.sleep(1.0)))
    cloud.add_destroy('destroy', U)


def taker_key_removed(cloud: Cloud) -> None:
    """A taker key is deleted manually while two computes take the request."""
    cloud.add_hosts(A, B)
    place = cloud.enqueue_request(U)
    add_manual_writes(cloud, 'somebody', Delete(keys.taker(place.entry.key)))
    for compute in (A, B):
        cloud.add_take(compute, place)


def queue_entry_removed(cloud: Cloud) -> None:
    """A queued request is deleted manually while it is taken, and its uuid is created again."""
    host = cloud.add_host(A)
    place = cloud.enqueue_request(U)
    cloud.add_take(A, place)
    add_manual_writes(cloud, 'somebody', Delete(place.entry.key))
    cloud.add_create('eschedule', U, resume=True)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(2, host.reconcile, lambda: cloud.world.sleep(61.0)))


def attempt_removed(cloud: Cloud) -> None:
    """The key of an attempt is deleted manually while two eschedules create its instance."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(4)
    add_manual_writes(cloud, 'somebody', Delete(keys.attempt(U)))
    cloud.add_create('eschedule 1', U, resume=True, name='web', group=ANTI_AFFINITY)
    cloud.add_create('eschedule 2', U, resume=True, name='web', group=ANTI_AFFINITY)


def group_policy_changed(cloud: Cloud) -> None:
    """A group's policy is changed manually, and back, beside a destroy and a take."""
    host = make_active(cloud, group=ANTI_AFFINITY)
    other = cloud.add_host(B)
    cloud.has_ample_room = False
    cloud.enqueue_request(V, 'db', ANTI_AFFINITY)
    store = ModelStore(cloud.etcd)

    def change_policy() -> None:
        for policy in ('affinity', 'anti-affinity'):
            while (entry := store.get(keys.group('g'))) is not None:
                changed = {**json.loads(entry.value), 'policy': policy}
                if store.commit([Unchanged(entry.key, entry.revision)], [Put(entry.key, json.dumps(changed))]):
                    break

    cloud.add_actor('somebody', change_policy, mortal=False)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_actor('B', other.repeat(2, other.read_queues, other.pull), process=other.process)
    cloud.add_destroy('destroy', U)


def quota_malformed(cloud: Cloud) -> None:
    """A quota becomes malformed and is repaired manually, during a create and a destroy."""
    cloud.set_instance_limit(5)
    host = make_active(cloud)
    cloud.starts_inconsistent = True
    cloud.has_ample_room = False
    store = ModelStore(cloud.etcd)

    def spoil() -> None:
        store.commit([], [Put(keys.quota('p'), '{')])
        store.commit([], [Put(keys.quota('p'), encode(Quota('p', {'instances': 5}, {})))])

    cloud.add_actor('somebody', spoil, mortal=False)
    cloud.add_create('eschedule', V, name='db')
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_actor('later', lambda: None, retry=lambda: set_limits(cloud.store, 'p', ['instances=5']))


def _make_acceptance(host: Compute, rounds: int, *functions: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        host.start(republishes=True)
        host.repeat(rounds, *functions)()

    return run


def accepted_and_destroyed(cloud: Cloud) -> None:
    """After a restore U is published and destroyed while V joins its group."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    saved = dict(cloud.etcd.entries)
    make_active(cloud, group=AFFINITY)
    restore_etcd(cloud, saved)
    host.republishes = True
    cloud.has_ample_room = False
    cloud.add_compute_actor(A, '', _make_acceptance(host, 2, host.plan))
    cloud.add_destroy('destroy', U)
    cloud.add_create('eschedule', V, group=AFFINITY)
    add_quota_set(cloud, 'quota set', 'instances=4')


def accepted_by_two(cloud: Cloud) -> None:
    """The same for two computes whose instances share a quota, which is set at that moment."""
    cloud.set_instance_limit(5)
    hosts = {compute: cloud.add_host(compute) for compute in (A, B)}
    saved = dict(cloud.etcd.entries)
    cloud.deliver(U, A, 'web')
    cloud.store.commit([], [Put(keys.quota('p'), encode(Quota('p', {'instances': 5}, {})))])
    cloud.deliver(V, B, 'db')
    amounts_of_two = {name: 2 * amount for name, amount in SIZE.items()}
    cloud.store.commit(
        [], [Put(keys.quota('p'), encode(Quota('p', {'instances': 5}, {**amounts_of_two, 'instances': 2})))]
    )
    for host in hosts.values():
        host.plan(3)
    restore_etcd(cloud, saved)
    for name, host in hosts.items():
        host.republishes = True
        cloud.add_compute_actor(name, '', _make_acceptance(host, 2, host.plan))
    add_quota_set(cloud, 'quota set', 'instances=4')


def accepted_beside_operators(cloud: Cloud) -> None:
    """A publishes to an emptied etcd during `check --fix` and a create of the same uuid."""
    host = make_active(cloud)
    cloud.store.commit([], [Delete(key) for key in cloud.etcd.entries])
    host.republishes = True
    cloud.add_compute_actor(A, '', _make_acceptance(host, 2, host.plan, host.reconcile))
    add_complete_fix(cloud)
    cloud.add_create('eschedule', U, resume=True, name='web')
    cloud.has_ample_room = False


def accepted_and_switched(cloud: Cloud) -> None:
    """U is stopped, etcd is restored to before that, and U is published and rebooted."""
    host = make_active(cloud)
    saved = dict(cloud.etcd.entries)
    change_power(cloud.store, U, PowerAction('stop', make_numbered_uuid(78)))
    host.plan(3)
    restore_etcd(cloud, saved)
    host.republishes = True
    cloud.add_compute_actor(A, '', _make_acceptance(host, 3, host.plan))
    cloud.add_power('reboot', U, 'reboot')


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        *(switched_concurrently, stopped_and_power_fails, destroyed_and_power_fails, requested_as_in_2019),
        *(
            destroyed_as_in_2019,
            presence_removed,
            taker_key_removed,
            attempt_removed,
            group_policy_changed,
            quota_malformed,
        ),
        *(accepted_and_destroyed, accepted_by_two, accepted_beside_operators, accepted_and_switched),
    ),
    *make_scenarios(Bounds(2, 0), queue_entry_removed),
]


# Manual changes at any moment: a record is deleted or overwritten, a guest is deleted.


def _add_key_removal(cloud: Cloud, *removed_keys: str) -> None:
    manual_store = ModelStore(cloud.etcd)
    cloud.add_actor('somebody', lambda: manual_store.commit([], list(map(Delete, removed_keys))), mortal=False)


def _add_guest_removal(cloud: Cloud, host: Compute, name: str) -> None:
    def remove() -> None:
        host.hypervisor.destroy(U, A)
        host.hypervisor.delete_disk(U)

    cloud.add_actor(name, remove, mortal=False)


def record_removed(cloud: Cloud) -> None:
    """The record and address of an instance are deleted while it is built and destroyed."""
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    cloud.add_compute_actor(A, '', host.repeat(4, host.plan, host.planner.recheck))
    _add_key_removal(cloud, keys.record(A, U))
    cloud.add_destroy('destroy', U)


def record_removed_of_half_a_guest(cloud: Cloud) -> None:
    """The record is deleted in a build that may be killed: half a guest is not complete."""
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    _add_key_removal(cloud, keys.record(A, U))


def record_removed_of_active(cloud: Cloud) -> None:
    """The record of an active instance is deleted and written again."""
    host = make_active(cloud)
    _add_key_removal(cloud, keys.record(A, U))
    cloud.add_compute_actor(A, '', host.repeat(3, host.planner.recheck, host.plan))
    cloud.add_destroy('destroy', U)


def record_and_guest_removed(cloud: Cloud) -> None:
    """Record, domain and disk of an active instance are deleted: it is built again."""
    host = make_active(cloud)
    _add_key_removal(cloud, keys.record(A, U))
    _add_guest_removal(cloud, host, 'somebody else')
    cloud.add_compute_actor(A, '', host.repeat(3, host.planner.recheck, host.plan))
    cloud.add_destroy('destroy', U)


def record_spoilt(cloud: Cloud) -> None:
    """An active instance's record is malformed and deleted, then the instance is destroyed."""
    host = make_active(cloud)
    manual_store, record = ModelStore(cloud.etcd), keys.record(A, U)

    def spoil() -> None:
        if manual_store.commit([Exists(keys.request(A, U))], [Put(record, 'no record')]):
            manual_store.commit([], [Delete(record)])

    cloud.add_actor('somebody', spoil, mortal=False, subjects=(U,))
    cloud.add_compute_actor(A, '', host.repeat(3, host.planner.recheck, host.plan))
    cloud.add_power('stop', U, 'stop')
    cloud.add_destroy('destroy', U)


def guest_removed(cloud: Cloud) -> None:
    """An active instance's domain and disk are deleted, so it ends, and another is created."""
    host = make_active(cloud)
    _add_guest_removal(cloud, host, 'somebody')
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    cloud.add_destroy('destroy', U)
    cloud.add_create('eschedule', V, name='web2')


SCENARIOS += [
    *make_scenarios(
        SINGLE_FAULT,
        *(record_removed, record_removed_of_half_a_guest, record_removed_of_active, record_and_guest_removed),
        record_spoilt,
    ),
    *make_scenarios(SINGLE_FAULT._replace(minutes=1), guest_removed),
]
