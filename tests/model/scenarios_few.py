"""Creates in a large cluster that query sampled computes first, by wrong hints."""

from __future__ import annotations

from ecomp.model import keys
from ecomp.placement.client import Placement
from ecomp.scheduler.operating.decommission import disable
from tests.model.acting import SHAKY, Bounds
from tests.model.cloud import A, B, C, Cloud, S, U, V
from tests.model.explorer import Check, within
from tests.model.scenarios_claims import has_last_place

EMPTY = {'VCPU': [4, 100], 'MEMORY_MB': [9, 100], 'DISK_GB': [9, 100]}
HALF = {'VCPU': [4, 50], 'MEMORY_MB': [9, 50], 'DISK_GB': [9, 50]}
FULL = {'VCPU': [4, 0], 'MEMORY_MB': [9, 0], 'DISK_GB': [9, 0]}


def few_against_all(cloud: Cloud) -> Check:
    """Two creates compete for the last place; only one of them samples computes."""
    cloud.host(A, room=1)
    cloud.hints(A, EMPTY)
    cloud.is_ample = False
    commands = cloud.creates('eschedule 1', U, seed=1, large=0), cloud.creates('eschedule 2', V, seed=2)
    return lambda: has_last_place(cloud, *commands)


def few_by_stale_hints(cloud: Cloud) -> Check:
    """One hint shows a full compute as empty, the other the reverse: the room is found."""
    cloud.hosts(A, B, room=1)
    cloud.delivered(V, A)
    cloud.hints(A, EMPTY)
    cloud.hints(B, FULL)
    command = cloud.creates('eschedule', U, large=0)
    return lambda: _is_placed_on(cloud, command.outcome, B)


def few_by_rubbish(cloud: Cloud) -> None:
    """One of three computes has a malformed hint, one has no hint, and one is half full."""
    cloud.hosts(A, B)
    cloud.host(C)
    cloud.hints(A, {'VCPU': 'much'})
    cloud.hints(B, HALF)
    cloud.creates('eschedule', U, large=0)


def few_and_the_dead(cloud: Cloud) -> None:
    """The queried compute may die at any moment; the same --uuid is created again."""
    cloud.computes_freeze = True
    for compute in (A, B):
        host = cloud.host(compute)
        cloud.hints(compute, EMPTY)
        cloud.works(compute, '', host.rounds(2, host.plan))
    cloud.creates('eschedule', U, large=0)


def few_and_disable(cloud: Cloud) -> Check:
    """The compute with the best hint is disabled: a later query about it places nothing there."""
    cloud.hosts(A, B)
    cloud.hints(A, EMPTY)
    cloud.hints(B, HALF)
    placement: Placement = cloud.placement
    disable(placement, A, 'A')
    command = cloud.creates('eschedule', U, large=0)
    return lambda: _is_placed_on(cloud, command.outcome, B)


def few_beside_a_set(cloud: Cloud) -> None:
    """A create that samples computes and a set compete for two places; the quota is two."""
    for compute in (A, B):
        cloud.host(compute, room=1)
        cloud.hints(compute, EMPTY)
    cloud.limited(2)
    cloud.is_ample = False
    cloud.creates('the set', S, seed=1, count=2, minimum=1)
    cloud.creates('the single one', U, seed=2, large=0)


def few_while_hints_are_put(cloud: Cloud) -> Check:
    """A compute publishes hints while it builds and etcd's answers may be lost.

    Its fence stays valid.
    """
    host = cloud.host(A)
    problems: set[str] = set()

    def check_fence() -> None:
        entry = cloud.etcd.entries.get(keys.compute(A))
        fence_revision = host.store.fence.condition.revision if host.store.fence else 0
        if cloud.is_unharmed and (entry is None or entry.revision != fence_revision):
            problems.add('its fence is not as it put it')

    def publish(room: object) -> None:
        cloud.hints(A, room)
        check_fence()  # immediately, because the next publication may repair it

    publish(EMPTY)
    cloud.creates('eschedule', U, large=0)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.works(A, 'saying what is left', lambda: publish(HALF))

    def check() -> list[str]:
        check_fence()
        return sorted(problems)

    return check


def _is_placed_on(cloud: Cloud, outcome: object, compute: str) -> list[str]:
    if not cloud.is_unharmed:
        return []
    is_placed = isinstance(outcome, dict) and outcome[U].compute == compute
    return [] if is_placed else [f'it is not placed where there is room: {outcome}']


SCENARIOS = [
    *within(SHAKY, few_against_all, few_by_stale_hints, few_by_rubbish, few_and_disable, few_beside_a_set),
    *within(Bounds(2, 2, kills=1, expiries=1), few_and_the_dead),
    *within(Bounds(2, 1, answers=1), few_while_hints_are_put),
]
