"""Queued requests: computes take them, users destroy them, and computes die with them."""

from __future__ import annotations

from functools import partial

from ecomp.model import keys
from ecomp.store.client import Delete
from tests.model.acting import SINGLE_FAULT, Bounds
from tests.model.cloud import ANTI_AFFINITY, A, B, C, Cloud, U, V
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios


def two_takers(cloud: Cloud) -> None:
    """Two computes take one request: a lease may expire, one may die, a message may be lost."""
    cloud.add_hosts(A, B)
    cloud.may_freeze_computes = True
    place = cloud.enqueue_request(U)
    for compute in (A, B):
        cloud.add_take(compute, place)


def taken_and_destroyed(cloud: Cloud) -> None:
    """A queued request is destroyed while it is taken."""
    cloud.add_host(A)
    place = cloud.enqueue_request(U)
    cloud.add_take(A, place)
    cloud.add_destroy('destroy', U)


def queued_and_direct(cloud: Cloud) -> None:
    """One uuid is created through the queue and directly: a quota counts it once."""
    cloud.set_instance_limit(2)
    host = cloud.add_host(A)
    cloud.add_enqueue('eschedule --queue', U, resume=True)
    cloud.add_create('eschedule', U, resume=True)
    cloud.add_compute_actor(A, 'taking', host.repeat(1, host.read_queues, host.pull))


def overtaken_by_a_queue(cloud: Cloud) -> None:
    """A queued request is taken while an eschedule that lost its uuid to it releases its claim."""
    cloud.add_host(A)
    cloud.claim(U, A)
    cloud.add_take(A, cloud.enqueue_request(U))
    cloud.add_abandon('eschedule', U, U)


def queue_orphan_consumer(cloud: Cloud) -> None:
    """The placement server crashes in the middle of the claim of a queued request."""
    cloud.add_host(A)
    cloud.add_take(A, cloud.enqueue_request(U))


def restarted_taker(cloud: Cloud) -> None:
    """A compute with one place left dies with a claim for a queued request, and is restarted."""
    host = cloud.add_host(A, room=2)
    cloud.deliver(V, A)
    host.plan()
    cloud.enqueue_request(U)
    # The compute was killed after its claim, and its taker key has expired with its lease.
    cloud.claim(U, A)
    cloud.etcd.end_lease(host.presence.lease)
    host.start()
    changes: list[str] = []

    def hear_hosts() -> None:
        if host.read_requests():
            changes.append('hosts')

    def hear_queues() -> None:
        if host.read_queues():
            changes.append('queues')

    cloud.add_actor('A, following /hosts', hear_hosts, mortal=False)
    cloud.add_actor('A, following /queues', hear_queues, mortal=False)

    def pull() -> None:
        for number in (1, 2):
            cloud.world.wait('something to be worth a step', lambda number=number: len(changes) >= number)  # type: ignore[misc]
            host.run_all(host.pull)

    cloud.add_actor('A, taking', pull, mortal=False)


def anti_affinity_and_cancelled(cloud: Cloud) -> None:
    """Strict anti-affinity between a queued instance, which is destroyed, and a direct one."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(3)
    cloud.has_ample_room = False
    place = cloud.enqueue_request(U, 'web', ANTI_AFFINITY)
    for compute in (A, B):
        cloud.add_take(compute, place)
    cloud.add_create('eschedule', V, group=ANTI_AFFINITY)
    cloud.add_destroy('destroy', U)


def taker_killed(cloud: Cloud) -> None:
    """A compute takes and builds a queued request, may die anywhere and is restarted."""
    host = cloud.add_host(A, room=1)
    cloud.enqueue_request(U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.read_queues, host.pull, host.plan))


def frozen_taker(cloud: Cloud) -> None:
    """A taker is frozen beyond its lease, another one takes, and a user destroys."""
    two_takers(cloud)
    cloud.add_destroy('destroy', U)


def dead_taker(cloud: Cloud) -> Check:
    """A taker dies for good at any moment: another one takes the request."""
    cloud.add_hosts(A, B)
    taker = cloud.add_take(A, cloud.enqueue_request(U))

    def check() -> list[str]:
        host = cloud.computes[A]
        host.is_dead = taker.dead
        if taker.dead:
            cloud.etcd.end_lease(host.presence.lease)
        return []

    return check


def late_move(cloud: Cloud) -> None:
    """A taker's write may reach etcd after the taker has given up, and another one takes, too."""
    cloud.add_hosts(A, B)
    place = cloud.enqueue_request(U)
    for compute in (A, B):
        cloud.add_take(compute, place)


def refused_by_placement(cloud: Cloud) -> None:
    """A queued request whose claim placement refuses ends, and the next one is taken."""
    host = cloud.add_host(A)
    cloud.enqueue_request(U, project='p' * 256)
    cloud.enqueue_request(V)
    cloud.allowed_to_fail.add(U)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.read_queues, host.pull, lambda: cloud.world.sleep(1.0)))


def late_release_by_taker(cloud: Cloud) -> None:
    """A compute and its previous process release a dead attempt's claim, and another takes it."""
    cloud.add_hosts(A, B)
    place = cloud.enqueue_request(U)
    cloud.claim(U, A)
    release = cloud.computes[A].taker.release_claim
    cloud.add_actor('A before', lambda: release(U), mortal=False)
    cloud.add_compute_actor(A, 'clearing up', lambda: release(U))
    cloud.add_take(B, place)


def three_takers(cloud: Cloud) -> None:
    """Three computes take one queued request, and two of them may lose a message."""
    cloud.add_hosts(A, B, C)
    place = cloud.enqueue_request(U)
    for compute in (A, B, C):
        cloud.add_take(compute, place)


def flavor_removed(cloud: Cloud) -> None:
    """A flavor is deleted and set again while its queued request is taken."""
    cloud.add_host(A)
    cloud.add_take(A, cloud.enqueue_request(U))
    store = ModelStore(cloud.etcd)

    def remove() -> None:
        store.commit([], [Delete(keys.flavor('small'))])
        cloud.set_flavor()

    cloud.add_actor('flavor unset, and set', remove, mortal=False)


def two_pullers(cloud: Cloud) -> None:
    """Two computes choose one request and take it, and either may die or freeze."""
    cloud.may_freeze_computes = True
    hosts = {compute: cloud.add_host(compute) for compute in (A, B)}
    cloud.enqueue_request(U)
    for compute, host in hosts.items():
        cloud.add_compute_actor(compute, 'taking', host.repeat(2, host.read_queues, host.pull))


def dead_taker_beside_another(cloud: Cloud) -> Check:
    """A taker dies for good as it takes the request, and another one still takes it."""
    check = dead_taker(cloud)
    host = cloud.computes[B]
    wait = partial(cloud.world.sleep, 1.0)
    cloud.add_actor('B, taking', host.repeat(2, host.read_queues, host.pull, wait), mortal=False)
    return check


SCENARIOS = [
    *make_scenarios(Bounds(2, 2, kills=1, requests=1, answers=1, expiries=1), two_takers),
    *make_scenarios(
        SINGLE_FAULT,
        *(taken_and_destroyed, queued_and_direct, overtaken_by_a_queue, taker_killed, refused_by_placement),
        flavor_removed,
    ),
    *make_scenarios(Bounds(1, 2, halves=1, kills=1), queue_orphan_consumer),
    *make_scenarios(Bounds(2, 0), restarted_taker, anti_affinity_and_cancelled),
    *make_scenarios(Bounds(2, 2, expiries=1, answers=1), frozen_taker),
    *make_scenarios(Bounds(1, 1, kills=1), dead_taker, dead_taker_beside_another),
    *make_scenarios(Bounds(2, 1, late=1), late_move),
    *make_scenarios(Bounds(2, 1, requests=1), late_release_by_taker),
    *make_scenarios(Bounds(1, 2, requests=2), three_takers),
    *make_scenarios(Bounds(2, 1, kills=1, expiries=1), two_pullers),
]
