"""Passing time, returning and new computes, and etcd restored in the middle of a destroy."""

from __future__ import annotations

from ecomp.model import keys
from ecomp.model.group import Group
from ecomp.model.group import to_json as group_json
from ecomp.model.queue import Place
from ecomp.scheduler.changing.change import destroy
from ecomp.scheduler.operating.sharing import limit
from ecomp.store.client import Entry, Put
from tests.model.acting import SHAKY, Actor, Bounds
from tests.model.cloud import TOGETHER, A, B, Cloud, U, V
from tests.model.compute import Compute
from tests.model.explorer import Check, within
from tests.model.scenarios_losses import restore
from tests.model.scenarios_operators import drains, ends, forgets, forgetting
from tests.model.scenarios_pairs import active

# Passing time


def drain_and_slow_create(cloud: Cloud) -> None:
    """A create is frozen between query and announcement until the drain has finished."""
    cloud.host(A)
    cloud.is_ample = False
    create = cloud.creates('eschedule', U, asks_first=True)
    drain = drains(cloud, A)
    create.ready = lambda: create.call.what[0] == 'begins' or not drain.is_at_it


def drain_beside_a_frozen_create(cloud: Cloud) -> None:
    """A create is frozen between announcement and claim until the drain has finished."""
    cloud.host(A)
    cloud.is_ample = False
    create = cloud.creates('eschedule', U)
    _freeze_before_claim(create, drains(cloud, A))


def drain_beside_a_frozen_claim(cloud: Cloud) -> None:
    """A taker is frozen between taker key and claim until the drain has finished."""
    cloud.host(A)
    cloud.is_ample = False
    taker = cloud.takes(A, cloud.waiting(U))
    _freeze_before_claim(taker, drains(cloud, A))


def _freeze_before_claim(actor: Actor, drain: Actor) -> None:
    def is_free() -> bool:
        is_claim = actor.call.where == 'placement' and actor.call.writes
        return not (is_claim and drain.is_at_it)

    actor.ready = is_free


def drain_beside_orphans(cloud: Cloud) -> None:
    """`host drain --wait` of a compute with an orphaned claim, which its keeper releases."""
    host = cloud.host(A)
    cloud.is_ample = False
    cloud.claimed(V, A)
    cloud.works(A, 'looking at claims', host.rounds(3, host.keep_claims))
    drains(cloud, A)


def drain_beside_a_taker(cloud: Cloud) -> None:
    """`host drain --wait` of a compute that takes from a queue."""
    host = cloud.host(A)
    cloud.is_ample = False
    cloud.waiting(U)
    cloud.works(A, 'taking', host.rounds(2, host.take))
    drains(cloud, A)


def drain_beside_a_frozen_taker(cloud: Cloud) -> None:
    """The same where the taker is frozen between its choice and its taker key."""
    host = cloud.host(A)
    cloud.is_ample = False
    cloud.waiting(U)
    drain = drains(cloud, A)
    begin = host.offers.begin

    def begin_late(place: Place) -> bool:
        if drain.is_at_it:
            cloud.world.wait('the drain to end', lambda: not drain.is_at_it)
        return begin(place)

    host.offers.begin = begin_late  # type: ignore[method-assign]
    cloud.works(A, 'taking', host.take)


def forget_and_slow_create(cloud: Cloud) -> None:
    """A compute ends and is forgotten during a create that may be slow."""
    cloud.host(A)
    cloud.is_ample = False
    cloud.creates('eschedule', U)
    forgets(cloud, A, ends(cloud, A))


def forget_and_slow_taker(cloud: Cloud) -> None:
    """A taker ends with a claim and is forgotten; another compute, perhaps slow, takes it."""
    cloud.hosts(A, B)
    place = cloud.waiting(U)
    cloud.claimed(U, A)
    forgets(cloud, A, ends(cloud, A))
    cloud.takes(B, place)


# Computes that come back, and new computes


def forgotten_as_it_takes(cloud: Cloud) -> Check:
    """A silent compute with a claim comes back while it is forgotten as fenced, and takes."""
    host = cloud.host(A)
    cloud.waiting(U, 'web')
    cloud.claimed(U, A)
    cloud.etcd.end(host.presence.lease)
    cloud.is_ample = False
    provider = cloud.model.providers[A]

    def register() -> None:
        cloud.model.providers.setdefault(A, provider)

    def come_back() -> None:
        register()
        host.restart()
        host.take(2)
        for _ in range(2):
            register()
            cloud.world.sleep(75.0)
            host.take()

    def check() -> list[str]:
        register()
        return []

    forgotten = cloud.act('host forget', forgetting(cloud, A), command='forget', about=(A,))
    # `host forget` has read that A is silent, and is frozen before it releases the claim until A is back.
    releases = 'GET', f'/allocations/{U}'
    forgotten.ready = lambda: forgotten.call.what != releases or keys.compute(A) in cloud.etcd.entries
    cloud.act('A again', come_back, mortal=False, about=(A,))
    return check


def forgotten_and_back(cloud: Cloud) -> None:
    """A forgotten compute starts, registers, and competes with another taker."""
    host, other = cloud.host(A), cloud.host(B)
    cloud.limited(5)
    cloud.waiting(U, 'web', TOGETHER)
    cloud.etcd.end(host.presence.lease)
    provider = cloud.model.providers[A]
    run_forget = forgetting(cloud, A, fenced=False)
    forgotten = cloud.act('host forget', run_forget, command='forget', about=(A,), mortal=False)

    def come_back() -> None:
        cloud.world.wait('the compute to be forgotten', lambda: not forgotten.is_at_it)
        cloud.model.providers.setdefault(A, provider)
        cloud.model.writes += 1
        host.restart()
        host.take(2)

    cloud.act('A again', come_back, process=A, about=(A,))
    cloud.works(B, 'taking', other.rounds(2, other.take))


def new_compute_takes(cloud: Cloud) -> None:
    """A compute that is new to this etcd starts and competes with another taker."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.waiting(U, 'web', TOGETHER)
    new = cloud.host(B)
    cloud.etcd.end(new.presence.lease)
    cloud.works(A, 'taking', host.rounds(2, host.take))

    def start() -> None:
        new.start()
        new.take(2)

    cloud.act('B, new', start, process=B)
    cloud.destroys('destroy', U)


def new_compute_behind_acceptance(cloud: Cloud) -> None:
    """U runs on A; after a restore A publishes U before a new compute starts."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.waiting(U, 'web', TOGETHER)
    saved = dict(cloud.etcd.entries)
    host.take(3)
    restore(cloud, saved)
    cloud.is_ample = False
    host.start(republishes=True)
    new = cloud.host(B)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.works(B, 'taking', new.rounds(2, new.take))
    cloud.destroys('destroy', U)


# Room that is free again, and quotas


def refused_and_room_again(cloud: Cloud) -> None:
    """An instance takes the last place and is destroyed: a queued one gets the room."""
    host = cloud.host(A, room=1)
    cloud.is_ample = False
    cloud.waiting(U)
    cloud.works(A, 'taking', host.rounds(4, host.take, lambda: cloud.world.sleep(1.0)))
    cloud.creates('eschedule', V)
    cloud.destroys('destroy', V)


def queued_in_a_quota(cloud: Cloud) -> None:
    """A quota of one: one instance is queued and taken, another one is created directly."""
    host = cloud.host(A)
    cloud.limited(1)
    cloud.is_ample = False
    cloud.enqueues('eschedule --queue', U)
    cloud.creates('eschedule', V)
    cloud.works(A, 'taking', host.rounds(2, host.take))


def destroyed_twice_beside_another(cloud: Cloud) -> None:
    """Two destroys of one instance while V lives in the same quota: the share is released once."""
    cloud.limited(5)
    host = active(cloud)
    active(cloud, V, 'db')
    limit(cloud.store, 'p', ['instances=5'])
    cloud.works(A, '', host.rounds(2, host.plan))
    for number in (1, 2):
        cloud.destroys(f'destroy {number}', U)


# An etcd that is restored in the middle of a destroy


def destroyed_half_and_restored(cloud: Cloud) -> Check:
    """An ecompute is killed in a destroy; etcd is restored to before it.

    The compute publishes. V shares U's group and quota, and lives: names, groups and quotas are compared at rest.
    """
    cloud.limited(5)
    host = active(cloud, group=TOGETHER)
    active(cloud, V, 'db', TOGETHER)
    group = Group('g', 'affinity', True, {U: A, V: A})  # deliver() writes a group with one member
    cloud.store.commit([], [Put(keys.group('g'), group_json(group))])
    limit(cloud.store, 'p', ['instances=5'])
    saved = dict(cloud.etcd.entries)
    destroy(cloud.store, U)
    first = cloud.works(A, '', host.rounds(1, host.plan))
    return _publishes_after(cloud, host, first, saved)


def destroyed_half_in_a_restored_queue(cloud: Cloud) -> Check:
    """The same where etcd is restored to when U was queued."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.waiting(U, 'web', TOGETHER)
    saved = dict(cloud.etcd.entries)
    host.take(3)
    destroy(cloud.store, U)
    first = cloud.works(A, '', host.rounds(1, host.plan))
    return _publishes_after(cloud, host, first, saved)


def _publishes_after(cloud: Cloud, host: Compute, first: Actor, saved: dict[str, Entry]) -> Check:
    is_begun: list[bool] = []

    def come_back() -> None:
        cloud.world.wait('ecompute to end', lambda: not first.is_at_it)
        is_begun.append('destroying' in host.disk.files.get(f'state/instances/{U}.json', ''))
        restore(cloud, saved)
        host.republishes = True
        host.restart()
        host.rounds(4, host.planner.works_again, host.plan)()

    cloud.act('A again', come_back, mortal=False)

    def check() -> list[str]:
        host.rounds(4, host.planner.works_again, host.plan)()
        is_living = is_begun == [True] and U in host.hypervisor.guests()
        return ['its compute had begun to destroy U, and U lives'] if is_living else []

    return check


SCENARIOS = [
    *within(SHAKY._replace(minutes=1), drain_and_slow_create, drain_beside_a_frozen_taker),
    *within(
        SHAKY,
        *(drain_beside_a_frozen_create, drain_beside_a_frozen_claim, forgotten_and_back, new_compute_takes),
        *(new_compute_behind_acceptance, queued_in_a_quota),
    ),
    *within(Bounds(2, 2, minutes=2), drain_beside_orphans),
    *within(Bounds(2, 1, minutes=1), drain_beside_a_taker, forget_and_slow_create, forget_and_slow_taker),
    *within(Bounds(2, 0), forgotten_as_it_takes, refused_and_room_again, destroyed_twice_beside_another),
    *within(Bounds(1, 1, kills=1), destroyed_half_and_restored, destroyed_half_in_a_restored_queue),
]
