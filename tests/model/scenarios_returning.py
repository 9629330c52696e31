"""Passing time, returning and new computes, and etcd restored in the middle of a destroy."""

from __future__ import annotations

from collections.abc import Callable

from ecomp.model import keys
from ecomp.model.group import Group
from ecomp.model.queue import WaitingEntry
from ecomp.model.stored import encode
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.scheduler.placing.modify import rename
from ecomp.store.client import Entry, Put
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.cloud import AFFINITY, A, B, Cloud, U, V
from tests.model.compute import Compute
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import CLAIM
from tests.model.scenarios_losses import restore_etcd
from tests.model.scenarios_operators import add_compute_end, add_drain, add_forget, forget_and_create, make_forget
from tests.model.scenarios_pairs import make_active

# Passing time


def drain_and_slow_create(cloud: Cloud) -> None:
    """A create is frozen between query and announcement until the drain has finished."""
    cloud.add_host(A)
    cloud.has_ample_room = False
    create = cloud.add_create('eschedule', U, asks_first=True)
    drain = add_drain(cloud, A)
    create.is_ready = lambda: create.call.operation[0] == 'begins' or not drain.is_active


def drain_beside_a_frozen_create(cloud: Cloud) -> None:
    """A create is frozen between announcement and claim until the drain has finished."""
    cloud.add_host(A)
    cloud.has_ample_room = False
    create = cloud.add_create('eschedule', U)
    _freeze_before_claim(create, add_drain(cloud, A))


def drain_beside_a_frozen_claim(cloud: Cloud) -> None:
    """A taker is frozen between taker key and claim until the drain has finished."""
    cloud.add_host(A)
    cloud.has_ample_room = False
    taker = cloud.add_take(A, cloud.enqueue_request(U))
    _freeze_before_claim(taker, add_drain(cloud, A))


def _freeze_before_claim(actor: Actor, drain: Actor) -> None:
    def is_free() -> bool:
        is_claim = actor.call.service == 'placement' and actor.call.writes
        return not (is_claim and drain.is_active)

    actor.is_ready = is_free


def drain_beside_orphans(cloud: Cloud) -> None:
    """`host drain --wait` of a compute with an orphaned claim, which its keeper releases."""
    host = cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.claim(V, A)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(3, host.reconcile))
    add_drain(cloud, A)


def drain_beside_a_taker(cloud: Cloud) -> None:
    """`host drain --wait` of a compute that takes from a queue."""
    host = cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.enqueue_request(U)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.take_and_build))
    add_drain(cloud, A)


def drain_beside_a_frozen_taker(cloud: Cloud) -> None:
    """The same where the taker is frozen between its choice and its taker key."""
    host = cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.enqueue_request(U)
    drain = add_drain(cloud, A)
    take = host.taker.take

    def take_late(place: WaitingEntry, still_fits: Callable[[], bool] = lambda: True) -> bool:
        if drain.is_active:
            cloud.world.wait('the drain to end', lambda: not drain.is_active)
        return take(place, still_fits)

    host.taker.take = take_late  # type: ignore[method-assign]
    cloud.add_compute_actor(A, 'taking', host.take_and_build)


def forget_and_slow_create(cloud: Cloud) -> None:
    """A compute ends and is forgotten during a create that may be slow."""
    forget_and_create(cloud)


def forget_and_slow_taker(cloud: Cloud) -> None:
    """A taker ends with a claim and is forgotten, and another compute, perhaps slow, takes it."""
    cloud.add_hosts(A, B)
    place = cloud.enqueue_request(U)
    cloud.claim(U, A)
    add_forget(cloud, A, add_compute_end(cloud, A))
    cloud.add_take(B, place)


# Computes that come back, and new computes


def forgotten_while_taking(cloud: Cloud) -> Check:
    """A silent compute with a claim comes back while it is forgotten as fenced, and takes."""
    host = cloud.add_host(A)
    cloud.enqueue_request(U, 'web')
    cloud.claim(U, A)
    cloud.etcd.end_lease(host.presence.lease)
    cloud.has_ample_room = False
    provider = cloud.model.providers[A]

    def register() -> None:
        cloud.model.providers.setdefault(A, provider)

    def come_back() -> None:
        register()
        host.restart()
        host.take_and_build(2)
        for _ in range(2):
            register()
            cloud.world.sleep(75.0)
            host.take_and_build()

    def check() -> list[str]:
        register()
        return []

    forgotten = cloud.add_actor('host forget', make_forget(cloud, A), command='forget', subjects=(A,))
    # `host forget` has read that A is silent, and is frozen before it releases the claim until A is back.
    releases = 'GET', f'/allocations/{U}'
    forgotten.is_ready = lambda: forgotten.call.operation != releases or keys.compute(A) in cloud.etcd.entries
    cloud.add_actor('A again', come_back, mortal=False, subjects=(A,))
    return check


def forgotten_and_back(cloud: Cloud) -> None:
    """A forgotten compute starts, registers, and competes with another taker."""
    host, other = cloud.add_host(A), cloud.add_host(B)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    cloud.etcd.end_lease(host.presence.lease)
    provider = cloud.model.providers[A]
    run_forget = make_forget(cloud, A, fenced=False)
    forgotten = cloud.add_actor('host forget', run_forget, command='forget', subjects=(A,), mortal=False)

    def come_back() -> None:
        cloud.world.wait('the compute to be forgotten', lambda: not forgotten.is_active)
        cloud.model.providers.setdefault(A, provider)
        cloud.model.writes += 1
        host.restart()
        host.take_and_build(2)

    cloud.add_actor('A again', come_back, process=A, subjects=(A,))
    cloud.add_compute_actor(B, 'taking', other.repeat(2, other.take_and_build))


def new_compute_takes(cloud: Cloud) -> None:
    """A compute that is new to this etcd starts and competes with another taker."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    new = cloud.add_host(B)
    cloud.etcd.end_lease(new.presence.lease)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.take_and_build))

    def start() -> None:
        new.start()
        new.take_and_build(2)

    cloud.add_actor('B, new', start, process=B)
    cloud.add_destroy('destroy', U)


def new_compute_behind_acceptance(cloud: Cloud) -> None:
    """U runs on A, and after a restore A publishes U before a new compute starts."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    saved = dict(cloud.etcd.entries)
    host.take_and_build(3)
    restore_etcd(cloud, saved)
    cloud.has_ample_room = False
    host.start(republishes=True)
    new = cloud.add_host(B)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_compute_actor(B, 'taking', new.repeat(2, new.take_and_build))
    cloud.add_destroy('destroy', U)


def forgotten_with_a_guest(cloud: Cloud) -> Check:
    """A silent compute is forgotten after a destroy, and comes back: it removes the guest."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web')
    host.plan(4)
    cloud.exempt(CLAIM, 'a forgotten compute has no claims, and its guests are removed when it is back')
    cloud.etcd.end_lease(host.presence.lease)
    destroy(cloud.store, U)
    provider = cloud.model.providers[A]
    run_forget = make_forget(cloud, A)
    forgotten = cloud.add_actor('host forget', run_forget, command='forget', subjects=(A,))

    def come_back() -> None:
        cloud.world.wait('the compute to be forgotten', lambda: not forgotten.is_active)
        cloud.model.providers.setdefault(A, provider)
        cloud.model.writes += 1
        host.restart()
        host.repeat(2, host.planner.retry_now, host.plan)()

    cloud.add_actor('A again', come_back, process=A, subjects=(A,))

    def check() -> list[str]:
        host.restart()
        host.repeat(3, host.planner.retry_now, host.plan)()
        return ['U was destroyed, and is a guest'] if U in host.hypervisor.list_guests() else []

    return check


# Room that is free again, and quotas


def refused_and_room_freed(cloud: Cloud) -> None:
    """An instance takes the last place and is destroyed: a queued one gets the room."""
    host = cloud.add_host(A, room=1)
    cloud.has_ample_room = False
    cloud.enqueue_request(U)
    cloud.add_compute_actor(A, 'taking', host.repeat(4, host.take_and_build, lambda: cloud.world.sleep(1.0)))
    cloud.add_create('eschedule', V)
    cloud.add_destroy('destroy', V)


def queued_in_a_quota(cloud: Cloud) -> None:
    """A quota of one: one instance is queued and taken, another one is created directly."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(1)
    cloud.has_ample_room = False
    cloud.add_enqueue('eschedule --queue', U)
    cloud.add_create('eschedule', V)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.take_and_build))


def destroyed_twice_beside_another(cloud: Cloud) -> None:
    """Two destroys of one instance while V lives in the same quota: the share is released once."""
    cloud.set_instance_limit(5)
    host = make_active(cloud)
    make_active(cloud, V, 'db')
    set_limits(cloud.store, 'p', ['instances=5'])
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    for number in (1, 2):
        cloud.add_destroy(f'destroy {number}', U)


# An etcd that is restored in the middle of a destroy


def destroyed_half_and_restored(cloud: Cloud) -> Check:
    """An ecompute is killed as it destroys a renamed U, and publishes U in an older etcd.

    V shares U's group and quota, and lives: names, groups and quotas are compared at rest.
    """
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    make_active(cloud, V, 'db', AFFINITY)
    group = Group('g', 'affinity', True, {U: A, V: A})  # deliver() writes a group with one member
    cloud.store.commit([], [Put(keys.group('g'), encode(group))])
    set_limits(cloud.store, 'p', ['instances=5'])
    saved = dict(cloud.etcd.entries)
    rename(cloud.store, U, 'cache')
    destroy(cloud.store, U)
    first = cloud.add_compute_actor(A, '', host.repeat(1, host.plan))
    return _add_publish(cloud, host, first, saved)


def destroyed_half_in_a_restored_queue(cloud: Cloud) -> Check:
    """The same where etcd is restored to when U was queued."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    saved = dict(cloud.etcd.entries)
    host.take_and_build(3)
    destroy(cloud.store, U)
    first = cloud.add_compute_actor(A, '', host.repeat(1, host.plan))
    return _add_publish(cloud, host, first, saved)


def _add_publish(cloud: Cloud, host: Compute, destroyer: Actor, saved: dict[str, Entry]) -> Check:
    is_begun: list[bool] = []

    def come_back() -> None:
        cloud.world.wait('ecompute to end', lambda: not destroyer.is_active)
        is_begun.append('destroying' in host.disk.files.get(f'state/instances/{U}.json', ''))
        restore_etcd(cloud, saved)
        host.republishes = True
        host.restart()
        host.repeat(4, host.planner.retry_now, host.plan)()

    cloud.add_actor('A again', come_back, mortal=False)

    def check() -> list[str]:
        host.repeat(4, host.planner.retry_now, host.plan)()
        is_living = is_begun == [True] and U in host.hypervisor.list_guests()
        return ['its compute had begun to destroy U, and U lives'] if is_living else []

    return check


SCENARIOS = [
    *make_scenarios(SINGLE_FAULT._replace(minutes=1), drain_and_slow_create, drain_beside_a_frozen_taker),
    *make_scenarios(
        SINGLE_FAULT,
        *(drain_beside_a_frozen_create, drain_beside_a_frozen_claim, forgotten_and_back, new_compute_takes),
        *(new_compute_behind_acceptance, queued_in_a_quota),
    ),
    *make_scenarios(Bounds(2, 2, minutes=2), drain_beside_orphans),
    *make_scenarios(Bounds(2, 1, minutes=1), drain_beside_a_taker, forget_and_slow_create, forget_and_slow_taker),
    *make_scenarios(Bounds(2, 0), forgotten_while_taking, refused_and_room_freed, destroyed_twice_beside_another),
    *make_scenarios(SINGLE_FAULT, forgotten_with_a_guest),
    *make_scenarios(Bounds(1, 1, kills=1), destroyed_half_and_restored, destroyed_half_in_a_restored_queue),
]
