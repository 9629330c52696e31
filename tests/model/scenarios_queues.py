"""Queued requests: computes take them, users destroy them, and computes die with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecomp.model import keys
from ecomp.model.queue import FIRST, WIDER, Takers, order, point
from ecomp.store.client import Delete, Put
from tests.model.acting import SHAKY, Bounds
from tests.model.cloud import APART, A, B, C, Cloud, U, V, name_uuid
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, within


def two_takers(cloud: Cloud) -> None:
    """Two computes take one request; a lease may expire, one may die, a message may be lost."""
    cloud.hosts(A, B)
    cloud.computes_freeze = True
    place = cloud.waiting(U)
    for compute in (A, B):
        cloud.takes(compute, place)


def taken_and_destroyed(cloud: Cloud) -> None:
    """A queued request is destroyed while it is taken."""
    cloud.host(A)
    place = cloud.waiting(U)
    cloud.takes(A, place)
    cloud.destroys('destroy', U)


def queued_and_direct(cloud: Cloud) -> None:
    """One uuid is created through the queue and directly; a quota counts it once."""
    cloud.limited(2)
    host = cloud.host(A)
    cloud.enqueues('eschedule --queue', U, resume=True)
    cloud.creates('eschedule', U, resume=True)
    cloud.works(A, 'taking', host.rounds(1, host.hear_queues, host.pull))


def overtaken_by_a_queue(cloud: Cloud) -> None:
    """A queued request is taken while an eschedule that lost its uuid to it releases its claim."""
    cloud.host(A)
    cloud.claimed(U, A)
    cloud.takes(A, cloud.waiting(U))
    cloud.abandons('eschedule', U, U)


def queue_orphan_consumer(cloud: Cloud) -> None:
    """The placement server crashes in the middle of the claim of a queued request."""
    cloud.host(A)
    cloud.takes(A, cloud.waiting(U))


def restarted_taker(cloud: Cloud) -> None:
    """A compute with one place left dies with a claim for a queued request, and is restarted."""
    host = cloud.host(A, room=2)
    cloud.delivered(V, A)
    host.plan()
    cloud.waiting(U)
    # The compute was killed after its claim, and its taker key has expired with its lease.
    cloud.claimed(U, A)
    cloud.etcd.end(host.presence.lease)
    host.start()
    changes: list[str] = []

    def hear_hosts() -> None:
        if host.hear_hosts():
            changes.append('hosts')

    def hear_queues() -> None:
        if host.hear_queues():
            changes.append('queues')

    cloud.act('A, following /hosts', hear_hosts, mortal=False)
    cloud.act('A, following /queues', hear_queues, mortal=False)

    def pull() -> None:
        for number in (1, 2):
            cloud.world.wait('something to be worth a step', lambda number=number: len(changes) >= number)  # type: ignore[misc]
            host.do(host.pull)

    cloud.act('A, taking', pull, mortal=False)


def apart_and_cancelled(cloud: Cloud) -> None:
    """Strict anti-affinity between a queued instance, which is destroyed, and a direct one."""
    cloud.hosts(A, B)
    cloud.limited(3)
    cloud.is_ample = False
    place = cloud.waiting(U, 'web', APART)
    for compute in (A, B):
        cloud.takes(compute, place)
    cloud.creates('eschedule', V, group=APART)
    cloud.destroys('destroy', U)


def taker_killed(cloud: Cloud) -> None:
    """A compute takes and builds a queued request; it may die anywhere and is restarted."""
    host = cloud.host(A, room=1)
    cloud.waiting(U)
    cloud.works(A, '', host.rounds(2, host.hear_queues, host.pull, host.plan))


def frozen_taker(cloud: Cloud) -> None:
    """A taker is frozen for longer than its lease; another one takes, and a user destroys."""
    two_takers(cloud)
    cloud.destroys('destroy', U)


def dead_taker(cloud: Cloud) -> Check:
    """A taker dies for good at any moment: another one takes the request."""
    cloud.hosts(A, B)
    taker = cloud.takes(A, cloud.waiting(U))

    def check() -> list[str]:
        host = cloud.computes[A]
        host.is_dead = taker.dead
        if taker.dead:
            cloud.etcd.end(host.presence.lease)
        return []

    return check


def late_move(cloud: Cloud) -> None:
    """A taker's write may reach etcd after the taker has given up; another one takes, too."""
    cloud.hosts(A, B)
    place = cloud.waiting(U)
    for compute in (A, B):
        cloud.takes(compute, place)


def refused_by_placement(cloud: Cloud) -> None:
    """A queued request whose claim placement refuses ends; the next one is taken."""
    host = cloud.host(A)
    cloud.waiting(U, project='p' * 256)
    cloud.waiting(V)
    cloud.may_fail.add(U)
    cloud.works(A, 'taking', host.rounds(2, host.hear_queues, host.pull, lambda: cloud.world.sleep(1.0)))


def late_let_go(cloud: Cloud) -> None:
    """A compute and its previous process release a dead attempt's claim; another takes it."""
    cloud.hosts(A, B)
    place = cloud.waiting(U)
    cloud.claimed(U, A)
    release = cloud.computes[A].taker.let_go
    cloud.act('A before', lambda: release(U), mortal=False)
    cloud.works(A, 'clearing up', lambda: release(U))
    cloud.takes(B, place)


def three_takers(cloud: Cloud) -> None:
    """Three computes take one queued request; two of them may lose a message."""
    cloud.hosts(A, B, C)
    place = cloud.waiting(U)
    for compute in (A, B, C):
        cloud.takes(compute, place)


def flavor_removed(cloud: Cloud) -> None:
    """A flavor is deleted and set again while its queued request is taken."""
    cloud.host(A)
    cloud.takes(A, cloud.waiting(U))
    store = ModelStore(cloud.etcd)

    def remove() -> None:
        store.commit([], [Delete(keys.flavor('small'))])
        cloud.flavor()

    cloud.act('flavor unset, and set', remove, mortal=False)


def _stale(
    cloud: Cloud, instance: str, number: int, before: Sequence[str], after: Sequence[str] = ()
) -> Callable[[], None]:
    """Add dead computes that still have a presence key; return what ends their lease.

    In the request's order of computes all `number` of them come before all of `before` and after all of `after`.
    """
    stale: list[str] = []
    for compute in map(name_uuid, range(1000, 9000)):
        takers = Takers({name: point(name) for name in (compute, *before, *after)})
        position = order(instance, {}, takers)
        if all(position[other] < position[compute] for other in after) and all(
            position[compute] < position[other] for other in before
        ):
            stale.append(compute)
        if len(stale) == number:
            break
    assert len(stale) == number
    lease = cloud.store.grant(60)
    cloud.world.names |= {compute: f'D{which}' for which, compute in enumerate(stale)}
    cloud.store.commit([], [Put(keys.compute(compute), '{"queues": true}', lease) for compute in stale])
    for host in cloud.computes.values():  # before anything is queued, so that computes are offered it in their order
        host.hear_computes()
        host.hear_queues()
    return lambda: cloud.etcd.end(lease)


def _asked(host: Compute, times: int = 3) -> Callable[[], None]:
    """Return the work of reading the queues and taking what is due, from circle to circle."""
    return host.rounds(times, host.hear_computes, host.hear_queues, host.pull, lambda: host.world.sleep(WIDER))


def chosen_are_dead(cloud: Cloud) -> Check:
    """All computes of the first circle are dead: the next one takes the request a moment later."""
    host = cloud.host(A)
    end_lease = _stale(cloud, U, FIRST, [A])
    cloud.waiting(U)
    cloud.act('A, taking', _asked(host), mortal=False)

    def check() -> list[str]:
        end_lease()
        is_untaken = keys.request(A, U) not in cloud.etcd.entries
        return ['it was not taken although the second circle had come'] if is_untaken else []

    return check


def two_circles(cloud: Cloud) -> Check:
    """One compute is offered a request first, another a moment later; either may die or freeze."""
    hosts = {compute: cloud.host(compute) for compute in (A, B)}
    first, second = sorted(hosts, key=lambda each: order(U, {}, Takers({name: point(name) for name in hosts}))[each])
    end_lease = _stale(cloud, U, FIRST - 1, [second], [first])
    cloud.computes_freeze = True
    cloud.waiting(U)
    for compute, host in hosts.items():
        cloud.works(compute, 'taking', _asked(host))

    def check() -> list[str]:
        end_lease()
        return []

    return check


def chosen_gone_stale(cloud: Cloud) -> Check:
    """The first taker dies for good as it takes the request; the next one still takes it."""
    hosts = {compute: cloud.host(compute) for compute in (A, B)}
    first, second = sorted(hosts, key=lambda each: order(U, {}, Takers({name: point(name) for name in hosts}))[each])
    end_lease = _stale(cloud, U, FIRST - 1, [second], [first])
    place = cloud.waiting(U)
    taker = cloud.takes(first, place)
    cloud.act('the other, taking', _asked(hosts[second], 2), mortal=False)

    def check() -> list[str]:
        end_lease()
        host = cloud.computes[first]
        host.is_dead = taker.dead
        if taker.dead:
            cloud.etcd.end(host.presence.lease)
        return []

    return check


SCENARIOS = [
    *within(Bounds(2, 2, kills=1, requests=1, answers=1, expiries=1), two_takers),
    *within(
        SHAKY,
        *(taken_and_destroyed, queued_and_direct, overtaken_by_a_queue, taker_killed, refused_by_placement),
        flavor_removed,
    ),
    *within(Bounds(1, 2, halves=1, kills=1), queue_orphan_consumer),
    *within(Bounds(2, 0), restarted_taker, apart_and_cancelled),
    *within(Bounds(2, 2, expiries=1, answers=1), frozen_taker),
    *within(Bounds(1, 1, kills=1), dead_taker, chosen_gone_stale),
    *within(Bounds(2, 1, late=1), late_move),
    *within(Bounds(2, 1, requests=1), late_let_go),
    *within(Bounds(1, 2, requests=2), three_takers),
    *within(Bounds(0, 2), chosen_are_dead),
    *within(Bounds(2, 1, kills=1, expiries=1), two_circles),
]
