"""Three concurrent commands: a third one acts on what the other two leave to each other."""

from __future__ import annotations

from ecomp.model.group import Membership
from tests.model.acting import SINGLE_FAULT, Bounds
from tests.model.cloud import ANTI_AFFINITY, A, B, Cloud, U, V, W
from tests.model.explorer import make_scenarios
from tests.model.scenarios_operators import add_compute_end, add_drain, add_fix, add_forget, add_quota_set


def keeper_drain_and_create(cloud: Cloud) -> None:
    """An orphaned claim on A is due; A is drained, and the claim's --uuid created again."""
    host = cloud.add_host(A)
    cloud.add_host(B)
    cloud.claim(U, A)
    host.check_claims()
    cloud.world.clock += 61.0
    cloud.add_compute_actor(A, 'looking at claims', host.check_claims)
    cloud.add_create('eschedule', U, resume=True)
    add_drain(cloud, A)


def keeper_drain_and_other_create(cloud: Cloud) -> None:
    """The same where another uuid is created; the keeper checks twice."""
    host = cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.claim(V, A)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(2, host.check_claims))
    cloud.add_create('eschedule', U, asks_first=True)
    add_drain(cloud, A)


def fix_destroy_and_resume(cloud: Cloud) -> None:
    """`audit --fix` releases a claim while its uuid is created again and destroyed."""
    host = cloud.add_host(A)
    cloud.claim(U, A)
    add_fix(cloud)
    cloud.add_create('eschedule', U, resume=True)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def fix_taking_and_destroy(cloud: Cloud) -> None:
    """`audit --fix` releases the claim of a now queued instance; it is taken and destroyed."""
    cloud.add_host(A)
    cloud.claim(U, A)
    add_fix(cloud)
    cloud.add_take(A, cloud.enqueue_request(U))
    cloud.add_destroy('destroy', U)


def quota_two_creates_and_destroy(cloud: Cloud) -> None:
    """A project's first quota is set during two creates and a destroy."""
    host = cloud.add_host(A)
    cloud.has_ample_room, cloud.has_quota_from_start = False, False
    cloud.deliver(W, A)
    host.plan(3)
    add_quota_set(cloud, 'quota set', 'instances=5')
    for number, instance in enumerate((U, V), 1):
        cloud.add_create(f'eschedule {number}', instance, seed=number)
    cloud.add_destroy('destroy', W)
    cloud.add_compute_actor(A, '', host.repeat(1, host.plan))


def group_forget_and_drain(cloud: Cloud) -> None:
    """A member's dead host is forgotten, the other host drained, while one joins the group."""
    cloud.add_hosts(A, B)
    cloud.has_ample_room = False
    cloud.deliver(V, A, group=ANTI_AFFINITY)
    silent = add_compute_end(cloud, A)
    cloud.add_destroy('destroy', V)
    add_forget(cloud, A, silent)
    cloud.add_create('eschedule', U, group=ANTI_AFFINITY)
    add_drain(cloud, B)


def group_with_two_policies(cloud: Cloud) -> None:
    """Two creates make one group with different policies, and one of the hosts is drained."""
    cloud.add_hosts(A, B)
    cloud.has_ample_room = False
    cloud.add_create('eschedule 1', U, seed=1, group=ANTI_AFFINITY)
    cloud.add_create('eschedule 2', V, seed=2, group=Membership('g', 'affinity', True))
    add_drain(cloud, A)


def forget_and_taker(cloud: Cloud) -> None:
    """A taker ends with a claim and is forgotten; another one takes, and is restarted."""
    cloud.add_hosts(A, B)
    place = cloud.enqueue_request(U)
    cloud.claim(U, A)
    add_forget(cloud, A, add_compute_end(cloud, A))
    other = cloud.computes[B]
    taker = cloud.add_take(B, place)

    def restart() -> None:
        cloud.world.wait('the taker to be killed', lambda: taker.dead)
        other.restart()
        other.repeat(2, other.read_queues, other.pull)()

    cloud.add_actor('B again', restart, process=B)


def late_release_keeper_and_resume(cloud: Cloud) -> None:
    """An eschedule and the keeper release a claim as its uuid is created again."""
    host = cloud.add_host(A)
    cloud.claim(U, A)
    host.check_claims()
    cloud.world.clock += 61.0
    cloud.add_abandon('eschedule 2', U, U)
    cloud.add_compute_actor(A, 'looking at claims', host.check_claims)
    cloud.add_create('eschedule 3', U, resume=True)


SCENARIOS = [
    *make_scenarios(
        Bounds(2, 0),
        keeper_drain_and_create,
        group_forget_and_drain,
        group_with_two_policies,
        late_release_keeper_and_resume,
    ),
    *make_scenarios(Bounds(2, 2, minutes=2), keeper_drain_and_other_create),
    *make_scenarios(SINGLE_FAULT, fix_destroy_and_resume, fix_taking_and_destroy, forget_and_taker),
    *make_scenarios(Bounds(2, 1, answers=1), quota_two_creates_and_destroy),
]
