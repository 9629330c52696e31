"""The audit of what instances share: groups and quotas, against the requests and records there are. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ecomp.model import keys
from ecomp.model.findings import Finding
from ecomp.model.group import Group
from ecomp.model.order import Request
from ecomp.model.planes import World
from ecomp.model.quota import Quota, counted, counts
from ecomp.model.text import some

QUOTED = 3
"""How many instances a finding names at most; it says how many more there are."""


def groups(world: World) -> Iterator[Finding]:
    """Groups whose key cannot be read, whose rule is broken, or that have members that are no living instances."""
    for name, found in world.groups.items():
        if not isinstance(found, Group):
            key = keys.group(name)
            yield Finding('group-unreadable', name, f'{key} cannot be understood: {found}', keys=(key,))
            continue
        for line in found.broken():
            yield Finding('group-broken', name, f'it is {found.rule}, and {line}')
        gone = [each for each in sorted(found.members) if not _is_there(world, each)]
        if gone:
            told = f'{keys.group(name)} has members that neither a request nor a living record speaks of'
            yield Finding('group-orphaned', name, f'{told}: {some(gone, QUOTED)}')


def _is_there(world: World, instance: str) -> bool:
    asked = instance in world.at_it or instance in world.unreadable or bool(world.wishes.get(instance))
    return asked or world.is_living(instance)


def membership(world: World, instance: str) -> Iterator[Finding]:
    """Requests of a living instance whose group does not have it on their compute."""
    for compute, wish in world.wishes.get(instance, {}).items():
        if not isinstance(wish, Request) or wish.is_tombstone or wish.group is None:
            continue
        found = world.groups.get(wish.group.name)
        if found is None:
            said = 'is not there'
        elif not isinstance(found, Group) or found.members.get(instance) == compute:
            continue
        else:
            on = found.members.get(instance)
            said = f'has it on compute {on}' if on else 'does not have it'
        name = wish.group.name
        told = f'it is in group {name} on compute {compute}, and {keys.group(name)} {said}'
        yield Finding('group-missing', instance, told, compute)


def quotas(world: World) -> Iterator[Finding]:
    """Quotas that cannot be read, or that count other than the project's requests, or than placement, do."""
    for project, found in world.quotas.items():
        if not isinstance(found, Quota):
            key = keys.quota(project)
            yield Finding('quota-unreadable', project, f'{key} cannot be understood: {found}', keys=(key,))
            continue
        requested = _requested(world, project)
        differs = _differs(found.used, requested)
        if differs:
            told = f'{keys.quota(project)} counts {differs[0]}, its requests {differs[1]}'
            yield Finding('quota-differs', project, told)
            continue
        claimed = world.planes.usages.get(project)
        # Who is at it claims first and delivers then; what a compute is at has its claim, or soon none.
        in_work = world.at_it or any(map(world.is_in_work, world.wishes))
        differs = None if claimed is None or in_work else _differs(found.used, claimed)
        if differs:
            told = f'{keys.quota(project)} counts {differs[0]}, placement {differs[1]}'
            yield Finding('usage-differs', project, told)


def _requested(world: World, project: str) -> dict[str, int]:
    waits = (waiting for places in world.queued.values() for waiting in places.values())
    wishes = (
        each
        for instance, asked in world.wishes.items()
        for wish in asked.values()
        for each in counts(wish, world.records.get(instance))
    )
    return counted(project, (*waits, *wishes))


def _differs(one: Mapping[str, int], other: Mapping[str, int]) -> tuple[str, str] | None:
    """The amounts that differ, in words, of the one and of the other; None if none does."""
    names = sorted(name for name in {*one, *other} if one.get(name, 0) != other.get(name, 0))
    if not names:
        return None
    words = [', '.join(f'{name} {each.get(name, 0)}' for name in names) for each in (one, other)]
    return words[0], words[1]
