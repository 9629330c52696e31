"""Creates in a large cluster that query sampled computes first, by wrong hints."""

from __future__ import annotations

from ecomp.model import keys
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.decommission import disable
from tests.model.acting import SINGLE_FAULT, Bounds
from tests.model.cloud import A, B, C, Cloud, S, U, V
from tests.model.explorer import Check, make_scenarios
from tests.model.scenarios_claims import check_last_place

EMPTY_HINT = {'VCPU': [4, 100], 'MEMORY_MB': [9, 100], 'DISK_GB': [9, 100]}
HALF_HINT = {'VCPU': [4, 50], 'MEMORY_MB': [9, 50], 'DISK_GB': [9, 50]}
FULL_HINT = {'VCPU': [4, 0], 'MEMORY_MB': [9, 0], 'DISK_GB': [9, 0]}


def sample_against_all(cloud: Cloud) -> Check:
    """Two creates compete for the last place; only one of them samples computes."""
    cloud.add_host(A, room=1)
    cloud.publish_hints(A, EMPTY_HINT)
    cloud.has_ample_room = False
    commands = cloud.add_create('eschedule 1', U, seed=1, large=0), cloud.add_create('eschedule 2', V, seed=2)
    return lambda: check_last_place(cloud, *commands)


def sample_by_stale_hints(cloud: Cloud) -> Check:
    """One hint shows a full compute as empty, the other the reverse: the room is found."""
    cloud.add_hosts(A, B, room=1)
    cloud.deliver(V, A)
    cloud.publish_hints(A, EMPTY_HINT)
    cloud.publish_hints(B, FULL_HINT)
    command = cloud.add_create('eschedule', U, large=0)
    return lambda: _check_placement(cloud, command.outcome, B)


def sample_by_malformed_hints(cloud: Cloud) -> None:
    """One of three computes has a malformed hint, one has no hint, and one is half full."""
    cloud.add_hosts(A, B)
    cloud.add_host(C)
    cloud.publish_hints(A, {'VCPU': 'much'})
    cloud.publish_hints(B, HALF_HINT)
    cloud.add_create('eschedule', U, large=0)


def sample_and_dead_compute(cloud: Cloud) -> None:
    """The queried compute may die at any moment; the same --uuid is created again."""
    cloud.may_freeze_computes = True
    for compute in (A, B):
        host = cloud.add_host(compute)
        cloud.publish_hints(compute, EMPTY_HINT)
        cloud.add_compute_actor(compute, '', host.repeat(2, host.plan))
    cloud.add_create('eschedule', U, large=0)


def sample_and_disable(cloud: Cloud) -> Check:
    """The compute with the best hint is disabled: a later query about it places nothing there."""
    cloud.add_hosts(A, B)
    cloud.publish_hints(A, EMPTY_HINT)
    cloud.publish_hints(B, HALF_HINT)
    placement: Placement = cloud.placement
    disable(placement, A, 'A')
    command = cloud.add_create('eschedule', U, large=0)
    return lambda: _check_placement(cloud, command.outcome, B)


def sample_beside_a_set(cloud: Cloud) -> None:
    """A create that samples computes and a set compete for two places; the quota is two."""
    for compute in (A, B):
        cloud.add_host(compute, room=1)
        cloud.publish_hints(compute, EMPTY_HINT)
    cloud.set_instance_limit(2)
    cloud.has_ample_room = False
    cloud.add_create('the set', S, seed=1, count=2, minimum=1)
    cloud.add_create('the single one', U, seed=2, large=0)


def sample_while_hints_are_published(cloud: Cloud) -> Check:
    """A compute publishes hints while it builds and etcd's answers may be lost.

    Its fence stays valid.
    """
    host = cloud.add_host(A)
    problems: set[str] = set()

    def check_fence() -> None:
        entry = cloud.etcd.entries.get(keys.compute(A))
        fence_revision = host.store.fence.condition.revision if host.store.fence else 0
        if cloud.is_unharmed and (entry is None or entry.revision != fence_revision):
            problems.add('its fence is not as it put it')

    def publish(room: object) -> None:
        cloud.publish_hints(A, room)
        check_fence()  # immediately, because the next publication may repair it

    publish(EMPTY_HINT)
    cloud.add_create('eschedule', U, large=0)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_compute_actor(A, 'saying what is left', lambda: publish(HALF_HINT))

    def check() -> list[str]:
        check_fence()
        return sorted(problems)

    return check


def _check_placement(cloud: Cloud, outcome: object, compute: str) -> list[str]:
    if not cloud.is_unharmed:
        return []
    is_placed = isinstance(outcome, dict) and outcome[U].compute == compute
    return [] if is_placed else [f'it is not placed where there is room: {outcome}']


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        sample_against_all,
        sample_by_stale_hints,
        sample_by_malformed_hints,
        sample_and_disable,
        sample_beside_a_set,
    ),
    *make_scenarios(Bounds(2, 2, kills=1, expiries=1), sample_and_dead_compute),
    *make_scenarios(Bounds(2, 1, answers=1), sample_while_hints_are_published),
]
