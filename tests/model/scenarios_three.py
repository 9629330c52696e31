"""Three concurrent commands: a third one acts on what the other two leave to each other."""

from __future__ import annotations

from ecomp.model.group import Membership
from tests.model.acting import SHAKY, Bounds
from tests.model.cloud import APART, A, B, Cloud, U, V, W
from tests.model.explorer import within
from tests.model.scenarios_operators import drains, ends, fixes, forgets, sets


def keeper_drain_and_create(cloud: Cloud) -> None:
    """An orphaned claim on A is due; A is drained, and the claim's --uuid created again."""
    host = cloud.host(A)
    cloud.host(B)
    cloud.claimed(U, A)
    host.keep_claims()
    cloud.world.clock += 61.0
    cloud.works(A, 'looking at claims', host.keep_claims)
    cloud.creates('eschedule', U, resume=True)
    drains(cloud, A)


def keeper_drain_and_create_anew(cloud: Cloud) -> None:
    """The same where another uuid is created; the keeper checks twice."""
    host = cloud.host(A)
    cloud.is_ample = False
    cloud.claimed(V, A)
    cloud.works(A, 'looking at claims', host.rounds(2, host.keep_claims))
    cloud.creates('eschedule', U, asks_first=True)
    drains(cloud, A)


def fix_destroy_and_resume(cloud: Cloud) -> None:
    """`audit --fix` releases a claim while its uuid is created again and destroyed."""
    host = cloud.host(A)
    cloud.claimed(U, A)
    fixes(cloud)
    cloud.creates('eschedule', U, resume=True)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))


def fix_taking_and_destroy(cloud: Cloud) -> None:
    """`audit --fix` releases the claim of a now queued instance; it is taken and destroyed."""
    cloud.host(A)
    cloud.claimed(U, A)
    fixes(cloud)
    cloud.takes(A, cloud.waiting(U))
    cloud.destroys('destroy', U)


def quota_two_creates_and_destroy(cloud: Cloud) -> None:
    """A project's first quota is set during two creates and a destroy."""
    host = cloud.host(A)
    cloud.is_ample, cloud.is_limited = False, False
    cloud.delivered(W, A)
    host.plan(3)
    sets(cloud, 'quota set', 'instances=5')
    for number, instance in enumerate((U, V), 1):
        cloud.creates(f'eschedule {number}', instance, seed=number)
    cloud.destroys('destroy', W)
    cloud.works(A, '', host.rounds(1, host.plan))


def group_forget_and_drain(cloud: Cloud) -> None:
    """A member's dead host is forgotten, the other host drained, while one joins the group."""
    cloud.hosts(A, B)
    cloud.is_ample = False
    cloud.delivered(V, A, group=APART)
    silent = ends(cloud, A)
    cloud.destroys('destroy', V)
    forgets(cloud, A, silent)
    cloud.creates('eschedule', U, group=APART)
    drains(cloud, B)


def policy_of_two(cloud: Cloud) -> None:
    """Two creates make one group with different policies, and one of the hosts is drained."""
    cloud.hosts(A, B)
    cloud.is_ample = False
    cloud.creates('eschedule 1', U, seed=1, group=APART)
    cloud.creates('eschedule 2', V, seed=2, group=Membership('g', 'affinity', True))
    drains(cloud, A)


def forget_and_taker(cloud: Cloud) -> None:
    """A taker ends with a claim and is forgotten; another one takes, and is restarted."""
    cloud.hosts(A, B)
    place = cloud.waiting(U)
    cloud.claimed(U, A)
    forgets(cloud, A, ends(cloud, A))
    other = cloud.computes[B]
    taker = cloud.takes(B, place)

    def restart() -> None:
        cloud.world.wait('the taker to be killed', lambda: taker.dead)
        other.restart()
        other.rounds(2, other.hear_queues, other.pull)()

    cloud.act('B again', restart, process=B)


def late_release_keeper_and_resume(cloud: Cloud) -> None:
    """An eschedule and the keeper release a claim as its uuid is created again."""
    host = cloud.host(A)
    cloud.claimed(U, A)
    host.keep_claims()
    cloud.world.clock += 61.0
    cloud.abandons('eschedule 2', U, U)
    cloud.works(A, 'looking at claims', host.keep_claims)
    cloud.creates('eschedule 3', U, resume=True)


SCENARIOS = [
    *within(
        Bounds(2, 0),
        keeper_drain_and_create, group_forget_and_drain, policy_of_two, late_release_keeper_and_resume,
    ),
    *within(Bounds(2, 2, minutes=2), keeper_drain_and_create_anew),
    *within(SHAKY, fix_destroy_and_resume, fix_taking_and_destroy, forget_and_taker),
    *within(Bounds(2, 1, answers=1), quota_two_creates_and_destroy),
]
