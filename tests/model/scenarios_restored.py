"""A queue is restored with etcd after an instance was taken from it, which still runs."""

from __future__ import annotations

import copy

from ecomp.model import keys
from tests.model.acting import SINGLE_FAULT, Bounds
from tests.model.cloud import A, B, Cloud, U
from tests.model.compute import Compute
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import CLAIM
from tests.model.scenarios_losses import restore_etcd
from tests.model.scenarios_operators import make_forget


def _take_and_restore(cloud: Cloud, is_queued: bool = True, with_placement: bool = False) -> Compute:
    """Have A take U from a queue, then restore etcd, which A has not accepted yet.

    etcd is restored to when U was queued, or with `is_queued` False to before U was requested.
    `with_placement` restores placement to the same moment.
    """
    host = cloud.add_host(A)
    cloud.set_flavor()
    saved = dict(cloud.etcd.entries)
    cloud.enqueue_request(U)
    if is_queued:
        saved = dict(cloud.etcd.entries)
    copied = copy.deepcopy((cloud.model.rows, cloud.model.held))
    host.take_and_build(3)
    restore_etcd(cloud, saved)
    if with_placement:
        cloud.model.rows, cloud.model.held = copied
        cloud.model.writes += 1
    host.is_read_only = True
    cloud.has_ample_room = False
    return host


def _add_take_on_b(cloud: Cloud, host: Compute) -> None:
    """Have B, which is new to this etcd, take from the queue before A accepts the etcd."""
    new = cloud.add_host(B)
    cloud.add_compute_actor(B, 'taking', new.repeat(3, new.take_and_build))
    _add_acceptance(cloud, host)


def new_compute_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, silent since a restore, and B, new to this etcd, takes from the queue."""
    host = _take_and_restore(cloud)
    cloud.etcd.end_lease(host.presence.lease)
    _add_take_on_b(cloud, host)


def new_compute_beside_a_living_one(cloud: Cloud) -> None:
    """The same where A's presence key is in the snapshot, and is back with its full lease."""
    host = _take_and_restore(cloud)
    _add_take_on_b(cloud, host)


def new_compute_after_restoring_both(cloud: Cloud) -> None:
    """The same as the first, with placement restored: no claim shows that A runs U."""
    host = _take_and_restore(cloud, with_placement=True)
    cloud.exempt(CLAIM, 'placement is restored to before U had its claim')
    cloud.etcd.end_lease(host.presence.lease)
    _add_take_on_b(cloud, host)


def new_compute_beside_a_restored_key(cloud: Cloud) -> None:
    """The same where A's presence key is back, too."""
    host = _take_and_restore(cloud, with_placement=True)
    cloud.exempt(CLAIM, 'placement is restored to before U had its claim')
    _add_take_on_b(cloud, host)


def forgotten_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, silent since a restore and forgotten, and B takes from the queue."""
    host = _take_and_restore(cloud)
    cloud.etcd.end_lease(host.presence.lease)
    new = cloud.add_host(B)
    run_forget = make_forget(cloud, A, fenced=False)
    cloud.add_actor('host forget', run_forget, retry=run_forget, command='forget', subjects=(A,))
    cloud.add_compute_actor(B, 'taking', new.repeat(3, new.take_and_build))
    _add_acceptance(cloud, host)


def queued_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, silent since a restore, U is queued again with its uuid, and B takes."""
    host = _take_and_restore(cloud, is_queued=False)
    cloud.etcd.end_lease(host.presence.lease)
    new = cloud.add_host(B)
    cloud.add_enqueue('eschedule --queue', U, resume=True)
    cloud.add_compute_actor(B, 'taking', new.repeat(3, new.take_and_build))
    _add_acceptance(cloud, host)


def refused_after_a_restore(cloud: Cloud) -> Check:
    """The same where placement refuses U: B does not end U in error, because A runs it."""
    host = _take_and_restore(cloud, is_queued=False)
    cloud.etcd.end_lease(host.presence.lease)
    new = cloud.add_host(B)
    cloud.enqueue_request(U, project='p' * 256)
    cloud.add_compute_actor(B, 'taking', new.repeat(3, new.take_and_build, lambda: cloud.world.sleep(1.0)))
    _add_acceptance(cloud, host)
    return lambda: ['B ends U in error, and A runs it'] if keys.record(B, U) in cloud.etcd.entries else []


def state_directory_lost_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, which has lost its state directory, and A accepts a restored etcd."""
    host = _take_and_restore(cloud)
    host.disk.files = {'boot_id': 'first'}
    _add_acceptance(cloud, host)


def resumed_as_it_is_published(cloud: Cloud) -> None:
    """U runs on A, both planes are older than U, and A publishes U during its create."""
    host = _take_and_restore(cloud, is_queued=False, with_placement=True)
    cloud.exempt(CLAIM, 'placement is restored to before U had its claim')
    cloud.add_host(B)
    host.is_read_only = False
    host.republishes = True
    create = cloud.add_create('eschedule', U, resume=True)
    # truth.py has no row for an instance that its compute publishes after an eschedule reported that it is not placed.
    create.command = ''
    # If the create claims first, U is doubled, as docs/howto/after-a-loss.md says: neither plane knows of it. So the
    # create waits for A's claim.
    create.is_ready = lambda: U in cloud.model.held or not (create.call.service == 'placement' and create.call.writes)

    def accept() -> None:
        host.restart()
        host.take_and_build(2)

    cloud.add_actor('A, accepting', accept, mortal=False)


def resumed_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, silent since a restore, and the create with its uuid is repeated."""
    host = _take_and_restore(cloud, is_queued=False)
    cloud.etcd.end_lease(host.presence.lease)
    cloud.add_host(B)
    cloud.add_create('eschedule', U, resume=True)
    new = cloud.computes[B]
    cloud.add_compute_actor(B, '', new.repeat(2, new.plan))
    _add_acceptance(cloud, host)


def interrupted_after_a_restore(cloud: Cloud) -> None:
    """U runs on A, whose key is back, and an interrupted create leaves A's claim."""
    host = _take_and_restore(cloud, is_queued=False)
    cloud.add_create('eschedule', U, resume=True)
    _add_acceptance(cloud, host)


def destroyed_in_a_restored_queue(cloud: Cloud) -> None:
    """U runs on A, and in a restored queue U is destroyed: A publishes, U does not live."""
    host = _take_and_restore(cloud)
    cloud.add_destroy('destroy', U)
    _add_acceptance(cloud, host)


def _add_acceptance(cloud: Cloud, host: Compute) -> None:
    """Have an operator accept the etcd on A when all other actors have finished."""
    others = list(cloud.world.actors)

    def accept() -> None:
        cloud.world.wait('the others to end', lambda: not any(actor.is_active for actor in others))
        host.is_read_only = False
        host.republishes = True
        host.restart()
        host.take_and_build(3)

    cloud.add_actor('A, accepting', accept, mortal=False)


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        *(new_compute_after_a_restore, new_compute_beside_a_living_one, new_compute_after_restoring_both),
        *(new_compute_beside_a_restored_key, forgotten_after_a_restore, queued_after_a_restore),
        *(refused_after_a_restore, state_directory_lost_after_a_restore, resumed_after_a_restore),
        destroyed_in_a_restored_queue,
    ),
    *make_scenarios(Bounds(2, 0), resumed_as_it_is_published),
    *make_scenarios(Bounds(2, 1, interrupts=1), interrupted_after_a_restore),
]
