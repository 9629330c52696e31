"""A create in a large cluster asks about a few computes first, by hints that are stale, rubbish or a dead one's."""

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
    """Two for the last place, of which one asks about a few computes and one about all: one of them has it."""
    cloud.host(A, room=1)
    cloud.hints(A, EMPTY)
    cloud.is_ample = False
    both = cloud.creates('eschedule 1', U, seed=1, large=0), cloud.creates('eschedule 2', V, seed=2)
    return lambda: has_last_place(cloud, *both)


def few_by_stale_hints(cloud: Cloud) -> Check:
    """The one that says it is empty is full, and the other way round: there is room, and it is found."""
    cloud.hosts(A, B, room=1)
    cloud.delivered(V, A)
    cloud.hints(A, EMPTY)
    cloud.hints(B, FULL)
    command = cloud.creates('eschedule', U, large=0)
    return lambda: _is_placed_on(cloud, command.outcome, B)


def few_by_rubbish(cloud: Cloud) -> None:
    """Of three computes one says what makes no sense, one says nothing, and one is half full."""
    cloud.hosts(A, B)
    cloud.host(C)
    cloud.hints(A, {'VCPU': 'much'})
    cloud.hints(B, HALF)
    cloud.creates('eschedule', U, large=0)


def few_and_the_dead(cloud: Cloud) -> None:
    """The compute that is asked about may die at any moment; the same --uuid is asked again."""
    cloud.computes_freeze = True
    for each in (A, B):
        host = cloud.host(each)
        cloud.hints(each, EMPTY)
        cloud.works(each, '', host.rounds(2, host.plan))
    cloud.creates('eschedule', U, large=0)


def few_and_disable(cloud: Cloud) -> Check:
    """The best by its hint is disabled: what is asked about it after that is not placed there."""
    cloud.hosts(A, B)
    cloud.hints(A, EMPTY)
    cloud.hints(B, HALF)
    placement: Placement = cloud.placement
    disable(placement, A, 'A')
    command = cloud.creates('eschedule', U, large=0)
    return lambda: _is_placed_on(cloud, command.outcome, B)


def few_beside_a_set(cloud: Cloud) -> None:
    """A single one that asks about a few, and a set of which one will do, for two places; a quota of two."""
    for each in (A, B):
        cloud.host(each, room=1)
        cloud.hints(each, EMPTY)
    cloud.limited(2)
    cloud.is_ample = False
    cloud.creates('the set', S, seed=1, count=2, minimum=1)
    cloud.creates('the single one', U, seed=2, large=0)


def few_while_hints_are_put(cloud: Cloud) -> Check:
    """A compute says what it has left while it builds, and while etcd may give no answer: it stays this compute."""
    host = cloud.host(A)
    wrong: set[str] = set()

    def look() -> None:
        entry = cloud.etcd.entries.get(keys.compute(A))
        held = host.store.fence.condition.revision if host.store.fence else 0
        if cloud.is_unharmed and (entry is None or entry.revision != held):
            wrong.add('its fence is not as it put it')

    def say(room: object) -> None:
        cloud.hints(A, room)
        look()  # at once: what it says next may mend it

    say(EMPTY)
    cloud.creates('eschedule', U, large=0)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.works(A, 'saying what is left', lambda: say(HALF))

    def check() -> list[str]:
        look()
        return sorted(wrong)

    return check


def _is_placed_on(cloud: Cloud, outcome: object, compute: str) -> list[str]:
    if not cloud.is_unharmed:
        return []
    placed = isinstance(outcome, dict) and outcome[U].compute == compute
    return [] if placed else [f'it is not placed where there is room: {outcome}']


SCENARIOS = [
    *within(SHAKY, few_against_all, few_by_stale_hints, few_by_rubbish, few_and_disable, few_beside_a_set),
    *within(Bounds(2, 2, kills=1, expiries=1), few_and_the_dead),
    *within(Bounds(2, 1, answers=1), few_while_hints_are_put),
]
