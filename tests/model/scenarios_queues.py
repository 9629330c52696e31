"""Requests that wait in a queue: who takes them, who destroys them, and what is left of those that died."""

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
    """Two computes at one waiting request; a mark's lease may end, either may die, a message may be lost."""
    cloud.hosts(A, B)
    cloud.computes_freeze = True
    place = cloud.waiting(U)
    for each in (A, B):
        cloud.takes(each, place)


def taken_and_destroyed(cloud: Cloud) -> None:
    """A waiting request is destroyed while it is taken."""
    cloud.host(A)
    place = cloud.waiting(U)
    cloud.takes(A, place)
    cloud.destroys('destroy', U)


def queued_and_direct(cloud: Cloud) -> None:
    """One uuid, asked for through the queue and directly, and a taker; a quota counts it once."""
    cloud.limited(2)
    host = cloud.host(A)
    cloud.enqueues('eschedule --queue', U, resume=True)
    cloud.creates('eschedule', U, resume=True)
    cloud.works(A, 'taking', host.rounds(1, host.hear_queues, host.pull))


def overtaken_by_a_queue(cloud: Cloud) -> None:
    """What waits is taken while an eschedule that was overtaken at its uuid undoes its claim."""
    cloud.host(A)
    cloud.claimed(U, A)
    cloud.takes(A, cloud.waiting(U))
    cloud.abandons('eschedule', U, U)


def queue_orphan_consumer(cloud: Cloud) -> None:
    """placement ends between its two transactions while a waiting request is claimed."""
    cloud.host(A)
    cloud.takes(A, cloud.waiting(U))


def restarted_taker(cloud: Cloud) -> None:
    """A compute of one place dies with a claim for what waits; it has another instance, and is started again."""
    host = cloud.host(A, room=2)
    cloud.delivered(V, A)
    host.plan()
    cloud.waiting(U)
    # Killed at `taken`, and its mark has ended with its lease.
    cloud.claimed(U, A)
    cloud.etcd.end(host.presence.lease)
    host.start()
    told: list[str] = []

    def hear_hosts() -> None:
        if host.hear_hosts():
            told.append('hosts')

    def hear_queues() -> None:
        if host.hear_queues():
            told.append('queues')

    cloud.act('A, following /hosts', hear_hosts, mortal=False)
    cloud.act('A, following /queues', hear_queues, mortal=False)

    def pull() -> None:
        for number in (1, 2):
            cloud.world.wait('something to be worth a step', lambda number=number: len(told) >= number)  # type: ignore[misc]
            host.do(host.pull)

    cloud.act('A, taking', pull, mortal=False)


def apart_and_cancelled(cloud: Cloud) -> None:
    """Strict anti-affinity: one waits and is taken by A or B, one is placed directly; the waiting one is destroyed."""
    cloud.hosts(A, B)
    cloud.limited(3)
    cloud.is_ample = False
    place = cloud.waiting(U, 'web', APART)
    for each in (A, B):
        cloud.takes(each, place)
    cloud.creates('eschedule', V, group=APART)
    cloud.destroys('destroy', U)


def taker_killed(cloud: Cloud) -> None:
    """A compute takes and builds what waits; it may die anywhere and is started again."""
    host = cloud.host(A, room=1)
    cloud.waiting(U)
    cloud.works(A, '', host.rounds(2, host.hear_queues, host.pull, host.plan))


def frozen_taker(cloud: Cloud) -> None:
    """A taker is frozen for longer than its lease, the other one takes it meanwhile, and it is destroyed."""
    two_takers(cloud)
    cloud.destroys('destroy', U)


def dead_taker(cloud: Cloud) -> Check:
    """A taker dies for good, at any moment: another one takes what waits."""
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
    """Whatever a taker sends to etcd may arrive after it has given up; another one takes, too."""
    cloud.hosts(A, B)
    place = cloud.waiting(U)
    for each in (A, B):
        cloud.takes(each, place)


def refused_by_placement(cloud: Cloud) -> None:
    """What waits first is nothing that placement takes a claim for: it ends with the reason, and the next is taken."""
    host = cloud.host(A)
    cloud.waiting(U, project='p' * 256)
    cloud.waiting(V)
    cloud.may_fail.add(U)
    cloud.works(A, 'taking', host.rounds(2, host.hear_queues, host.pull, lambda: cloud.world.sleep(1.0)))


def late_let_go(cloud: Cloud) -> None:
    """A compute releases what its dead attempt claimed, and so does, late, its process before; another one takes."""
    cloud.hosts(A, B)
    place = cloud.waiting(U)
    cloud.claimed(U, A)
    let_go = cloud.computes[A].taker.let_go
    cloud.act('A before', lambda: let_go(U), mortal=False)
    cloud.works(A, 'clearing up', lambda: let_go(U))
    cloud.takes(B, place)


def three_takers(cloud: Cloud) -> None:
    """Three computes at one waiting request, of which two may lose what they send."""
    cloud.hosts(A, B, C)
    place = cloud.waiting(U)
    for each in (A, B, C):
        cloud.takes(each, place)


def flavor_removed(cloud: Cloud) -> None:
    """A flavor goes while what waits for it is taken, and comes back."""
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
    """So many that are dead, and seen alive: in the order of this request before some computes, and `after` others.

    What ends the lease they are seen alive on.
    """
    found: list[str] = []
    for each in map(name_uuid, range(1000, 9000)):
        takers = Takers({name: point(name) for name in (each, *before, *after)})
        place = order(instance, {}, takers)
        if all(place[other] < place[each] for other in after) and all(place[each] < place[other] for other in before):
            found.append(each)
        if len(found) == number:
            break
    assert len(found) == number
    lease = cloud.store.grant(60)
    cloud.world.names |= {each: f'D{which}' for which, each in enumerate(found)}
    cloud.store.commit([], [Put(keys.compute(each), '{"queues": true}', lease) for each in found])
    for compute in cloud.computes.values():  # before anything waits: then they are asked in their order
        compute.hear_computes()
        compute.hear_queues()
    return lambda: cloud.etcd.end(lease)


def _asked(host: Compute, times: int = 3) -> Callable[[], None]:
    """It hears what waits, and takes what it may by now, from circle to circle."""
    return host.rounds(times, host.hear_computes, host.hear_queues, host.pull, lambda: host.world.sleep(WIDER))


def chosen_are_dead(cloud: Cloud) -> Check:
    """Those that are to take it first are all dead: the next one takes it a moment later."""
    host = cloud.host(A)
    end = _stale(cloud, U, FIRST, [A])
    cloud.waiting(U)
    cloud.act('A, taking', _asked(host), mortal=False)

    def check() -> list[str]:
        end()
        wrong = keys.request(A, U) not in cloud.etcd.entries
        return ['it was not taken although the second circle had come'] if wrong else []

    return check


def two_circles(cloud: Cloud) -> Check:
    """A may take it at once and B a moment later, of which either may die or sleep for longer than its lease."""
    hosts = {each: cloud.host(each) for each in (A, B)}
    first, second = sorted(hosts, key=lambda each: order(U, {}, Takers({name: point(name) for name in hosts}))[each])
    end = _stale(cloud, U, FIRST - 1, [second], [first])
    cloud.computes_freeze = True
    cloud.waiting(U)
    for each, host in hosts.items():
        cloud.works(each, 'taking', _asked(host))

    def check() -> list[str]:
        end()
        return []

    return check


def chosen_gone_stale(cloud: Cloud) -> Check:
    """One of the first dies for good in the middle of taking it; who sees it alive still takes it all the same."""
    hosts = {each: cloud.host(each) for each in (A, B)}
    first, second = sorted(hosts, key=lambda each: order(U, {}, Takers({name: point(name) for name in hosts}))[each])
    end = _stale(cloud, U, FIRST - 1, [second], [first])
    place = cloud.waiting(U)
    taker = cloud.takes(first, place)
    cloud.act('the other, taking', _asked(hosts[second], 2), mortal=False)

    def check() -> list[str]:
        end()
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
