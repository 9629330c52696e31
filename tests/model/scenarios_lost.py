"""Lost messages and expired leases under each command: its report stays true (truth.py)."""

from __future__ import annotations

from tests.model.acting import Bounds
from tests.model.cloud import AFFINITY, ANTI_AFFINITY, A, B, Cloud, S, U, V
from tests.model.explorer import make_scenarios
from tests.model.scenarios_operators import add_drain, add_quota_set, fix_and_create, forget_during_destroy
from tests.model.scenarios_pairs import make_active


def create_with_losses(cloud: Cloud) -> None:
    """An instance with a name, a group and a quota is created, built and its claim checked."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.add_create('eschedule', U, name='web', group=ANTI_AFFINITY)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, host.check_claims))


def resume_with_losses(cloud: Cloud) -> None:
    """The same uuid is created twice, with --uuid."""
    cloud.add_host(A)
    cloud.set_instance_limit(5)
    for number in (1, 2):
        cloud.add_create(f'eschedule {number}', U, resume=True, seed=number, name='web')


def set_with_losses(cloud: Cloud) -> None:
    """A set of two is created."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(5)
    cloud.add_create('the set', S, count=2, minimum=2)


def queue_with_losses(cloud: Cloud) -> None:
    """An instance is queued, taken and built."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.add_enqueue('eschedule --queue', U)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.take_and_build))


def destroy_with_losses(cloud: Cloud) -> None:
    """An active instance is destroyed."""
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def destroy_of_queued_with_losses(cloud: Cloud) -> None:
    """A queued instance is destroyed while it is taken."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.take_and_build))


def stop_with_losses(cloud: Cloud) -> None:
    """An active instance is stopped."""
    host = make_active(cloud)
    cloud.add_power('stop', U, 'stop')
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))


def forget_with_losses(cloud: Cloud) -> None:
    """A dead compute is forgotten while its last instance is destroyed."""
    forget_during_destroy(cloud)


def fix_with_losses(cloud: Cloud) -> None:
    """`audit --fix` releases an orphaned claim while its uuid is created again."""
    fix_and_create(cloud)


def drain_with_losses(cloud: Cloud) -> None:
    """A compute is drained during a create."""
    cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.add_create('eschedule', U)
    add_drain(cloud, A)


def quota_with_losses(cloud: Cloud) -> None:
    """A project's first quota is set beside a create."""
    cloud.add_host(A)
    add_quota_set(cloud, 'quota set', 'instances=5')
    cloud.add_create('eschedule', U)


def keeper_with_losses(cloud: Cloud) -> None:
    """The claim keeper checks a claim twice, a minute apart, while its uuid is created again."""
    host = cloud.add_host(A)
    cloud.claim(V, A)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(2, host.check_claims, lambda: cloud.world.sleep(61.0)))
    cloud.add_create('eschedule', V, resume=True)


LOSSY = Bounds(1, 3, requests=1, answers=2, expiries=1, reads=2)
SCENARIOS = [
    *make_scenarios(
        LOSSY,
        *(create_with_losses, resume_with_losses, set_with_losses, queue_with_losses, destroy_with_losses),
        *(destroy_of_queued_with_losses, stop_with_losses, forget_with_losses, fix_with_losses, drain_with_losses),
        *(quota_with_losses, keeper_with_losses),
    ),
]
