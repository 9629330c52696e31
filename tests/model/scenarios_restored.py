"""A queue is restored with etcd after an instance was taken from it, which still runs."""

from __future__ import annotations

import copy

from ecomp.model import keys
from tests.model.acting import SHAKY, Bounds
from tests.model.cloud import A, B, Cloud, U
from tests.model.compute import Compute
from tests.model.explorer import Check, within
from tests.model.invariants import CLAIM
from tests.model.scenarios_losses import restore
from tests.model.scenarios_operators import forgetting


def _taken_since(cloud: Cloud, waited: bool = True, with_placement: bool = False) -> Compute:
    """Have A take U from a queue, then restore etcd, which A has not accepted yet.

    etcd is restored to when U was queued, or with `is_queued` False to before U was requested. `with_placement`
    restores placement to the same moment.
    """
    host = cloud.host(A)
    cloud.flavor()
    saved = dict(cloud.etcd.entries)
    cloud.waiting(U)
    if waited:
        saved = dict(cloud.etcd.entries)
    copied = copy.deepcopy((cloud.model.rows, cloud.model.held))
    host.take(3)
    restore(cloud, saved)
    if with_placement:
        cloud.model.rows, cloud.model.held = copied
        cloud.model.writes += 1
    host.is_read_only = True
    cloud.is_ample = False
    return host


def _take_on_b(cloud: Cloud, host: Compute) -> None:
    """Have B, which is new to this etcd, take from the queue before A accepts the etcd."""
    new = cloud.host(B)
    cloud.works(B, 'taking', new.rounds(3, new.take))
    _accept_after(cloud, host)


def new_compute_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, silent since a restore; B, new to this etcd, takes from the queue."""
    host = _taken_since(cloud)
    cloud.etcd.end(host.presence.lease)
    _take_on_b(cloud, host)


def new_compute_beside_a_living_one(cloud: Cloud) -> None:
    """The same where A's presence key is in the snapshot, and is back with its full lease."""
    host = _taken_since(cloud)
    _take_on_b(cloud, host)


def new_compute_after_restoring_both(cloud: Cloud) -> None:
    """The same as the first, with placement restored: no claim shows that A runs U."""
    host = _taken_since(cloud, with_placement=True)
    cloud.exempt(CLAIM, 'placement is restored to before U had its claim')
    cloud.etcd.end(host.presence.lease)
    _take_on_b(cloud, host)


def new_compute_beside_a_restored_key(cloud: Cloud) -> None:
    """The same where A's presence key is back, too."""
    host = _taken_since(cloud, with_placement=True)
    cloud.exempt(CLAIM, 'placement is restored to before U had its claim')
    _take_on_b(cloud, host)


def forgotten_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, silent since a restore and forgotten; B takes from the queue."""
    host = _taken_since(cloud)
    cloud.etcd.end(host.presence.lease)
    new = cloud.host(B)
    run_forget = forgetting(cloud, A, fenced=False)
    cloud.act('host forget', run_forget, again=run_forget, command='forget', about=(A,))
    cloud.works(B, 'taking', new.rounds(3, new.take))
    _accept_after(cloud, host)


def queued_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, silent since a restore; U is queued again with its uuid, and B takes."""
    host = _taken_since(cloud, waited=False)
    cloud.etcd.end(host.presence.lease)
    new = cloud.host(B)
    cloud.enqueues('eschedule --queue', U, resume=True)
    cloud.works(B, 'taking', new.rounds(3, new.take))
    _accept_after(cloud, host)


def refused_after_a_restore(cloud: Cloud) -> Check:
    """The same where placement refuses U: B does not end U in error, because A runs it."""
    host = _taken_since(cloud, waited=False)
    cloud.etcd.end(host.presence.lease)
    new = cloud.host(B)
    cloud.waiting(U, project='p' * 256)
    cloud.works(B, 'taking', new.rounds(3, new.take, lambda: cloud.world.sleep(1.0)))
    _accept_after(cloud, host)
    return lambda: ['B ends U in error, and A runs it'] if keys.record(B, U) in cloud.etcd.entries else []


def state_directory_lost_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, which has lost its state directory; A accepts a restored etcd."""
    host = _taken_since(cloud)
    host.disk.files = {'boot_id': 'first'}
    _accept_after(cloud, host)


def resumed_as_it_is_published(cloud: Cloud) -> None:
    """U runs on A; both planes are older than U; A publishes U during its create."""
    host = _taken_since(cloud, waited=False, with_placement=True)
    cloud.exempt(CLAIM, 'placement is restored to before U had its claim')
    cloud.host(B)
    host.is_read_only = False
    host.republishes = True
    create = cloud.creates('eschedule', U, resume=True)
    # truth.py has no row for an instance that its compute publishes after an eschedule reported that it is not placed.
    create.command = ''
    # If the create claims first, U is doubled, as docs/howto/after-a-loss.md says: neither plane knows of it. So the
    # create waits for A's claim.
    create.ready = lambda: U in cloud.model.held or not (create.call.where == 'placement' and create.call.writes)

    def accept() -> None:
        host.restart()
        host.take(2)

    cloud.act('A, accepting', accept, mortal=False)


def resumed_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, silent since a restore; the create with its uuid is repeated."""
    host = _taken_since(cloud, waited=False)
    cloud.etcd.end(host.presence.lease)
    cloud.host(B)
    cloud.creates('eschedule', U, resume=True)
    new = cloud.computes[B]
    cloud.works(B, '', new.rounds(2, new.plan))
    _accept_after(cloud, host)


def interrupted_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, whose key is back; an interrupted create leaves A's claim."""
    host = _taken_since(cloud, waited=False)
    cloud.creates('eschedule', U, resume=True)
    _accept_after(cloud, host)


def destroyed_in_a_restored_queue(cloud: Cloud) -> None:
    """U runs on A; in a restored queue U is destroyed: A publishes, U does not live."""
    host = _taken_since(cloud)
    cloud.destroys('destroy', U)
    _accept_after(cloud, host)


def _accept_after(cloud: Cloud, host: Compute) -> None:
    """Have an operator accept the etcd on A when all other actors have finished."""
    others = list(cloud.world.actors)

    def accept() -> None:
        cloud.world.wait('the others to end', lambda: not any(actor.is_at_it for actor in others))
        host.is_read_only = False
        host.republishes = True
        host.restart()
        host.take(3)

    cloud.act('A, accepting', accept, mortal=False)


SCENARIOS = [
    *within(
        SHAKY,
        *(new_compute_after_a_restore, new_compute_beside_a_living_one, new_compute_after_restoring_both),
        *(new_compute_beside_a_restored_key, forgotten_after_a_restore, queued_after_a_restore),
        *(refused_after_a_restore, state_directory_lost_after_a_restore, resumed_after_a_restore),
        destroyed_in_a_restored_queue,
    ),
    *within(Bounds(2, 0), resumed_as_it_is_published),
    *within(Bounds(2, 1, interrupts=1), interrupted_after_a_restore),
]
