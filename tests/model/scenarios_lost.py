"""Lost messages and expired leases under each command: its report stays true (truth.py)."""

from __future__ import annotations

from tests.model.acting import Bounds
from tests.model.cloud import APART, TOGETHER, A, B, Cloud, S, U, V
from tests.model.explorer import within
from tests.model.scenarios_operators import drains, fix_and_create, forget_what_is_destroyed, sets
from tests.model.scenarios_pairs import active


def create_with_losses(cloud: Cloud) -> None:
    """An instance with a name, a group and a quota is created, built and its claim checked."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.creates('eschedule', U, name='web', group=APART)
    cloud.works(A, '', host.rounds(2, host.plan, host.keep_claims))


def resume_with_losses(cloud: Cloud) -> None:
    """The same uuid is created twice, with --uuid."""
    cloud.host(A)
    cloud.limited(5)
    for number in (1, 2):
        cloud.creates(f'eschedule {number}', U, resume=True, seed=number, name='web')


def set_with_losses(cloud: Cloud) -> None:
    """A set of two is created."""
    cloud.hosts(A, B)
    cloud.limited(5)
    cloud.creates('the set', S, count=2, minimum=2)


def queue_with_losses(cloud: Cloud) -> None:
    """An instance is queued, taken and built."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.enqueues('eschedule --queue', U)
    cloud.works(A, 'taking', host.rounds(2, host.take))


def destroy_with_losses(cloud: Cloud) -> None:
    """An active instance is destroyed."""
    cloud.limited(5)
    host = active(cloud, group=TOGETHER)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))


def destroy_of_waiting_with_losses(cloud: Cloud) -> None:
    """A queued instance is destroyed while it is taken."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.waiting(U, 'web', TOGETHER)
    cloud.destroys('destroy', U)
    cloud.works(A, 'taking', host.rounds(2, host.take))


def stop_with_losses(cloud: Cloud) -> None:
    """An active instance is stopped."""
    host = active(cloud)
    cloud.powers('stop', U, 'stop')
    cloud.works(A, '', host.rounds(3, host.plan))


def forget_with_losses(cloud: Cloud) -> None:
    """A dead compute is forgotten while its last instance is destroyed."""
    forget_what_is_destroyed(cloud)


def fix_with_losses(cloud: Cloud) -> None:
    """`audit --fix` releases an orphaned claim while its uuid is created again."""
    fix_and_create(cloud)


def drain_with_losses(cloud: Cloud) -> None:
    """A compute is drained during a create."""
    cloud.host(A)
    cloud.is_ample = False
    cloud.creates('eschedule', U)
    drains(cloud, A)


def quota_with_losses(cloud: Cloud) -> None:
    """A project's first quota is set beside a create."""
    cloud.host(A)
    sets(cloud, 'quota set', 'instances=5')
    cloud.creates('eschedule', U)


def keeper_with_losses(cloud: Cloud) -> None:
    """The claim keeper checks a claim twice, a minute apart, while its uuid is created again."""
    host = cloud.host(A)
    cloud.claimed(V, A)
    cloud.works(A, 'looking at claims', host.rounds(2, host.keep_claims, lambda: cloud.world.sleep(61.0)))
    cloud.creates('eschedule', V, resume=True)


LOSSY = Bounds(1, 3, requests=1, answers=2, expiries=1, reads=2)
SCENARIOS = [
    *within(
        LOSSY,
        *(create_with_losses, resume_with_losses, set_with_losses, queue_with_losses, destroy_with_losses),
        *(destroy_of_waiting_with_losses, stop_with_losses, forget_with_losses, fix_with_losses, drain_with_losses),
        *(quota_with_losses, keeper_with_losses),
    ),
]
