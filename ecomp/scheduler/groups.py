"""The groups there are, and who is in them, as users read them."""

from __future__ import annotations

from collections.abc import Sequence

from ecomp.errors import NotFound
from ecomp.model.group import Group
from ecomp.model.json_object import dump
from ecomp.model.text import printable
from ecomp.scheduler.hosts import alive
from ecomp.scheduler.show import table
from ecomp.store.client import Store
from ecomp.store.sharing import group


def one_group(store: Store, name: str) -> Group:
    """The group of this name; NotFound."""
    found, _ = group(store, name)
    if found is None:
        raise NotFound(f'{printable(name, 100)}: no such group: eschedule group list shows all')
    return found


def as_groups(groups: Sequence[Group], form: str) -> str:
    """A table with one line each, or a JSON array."""
    if form == 'json':
        return dump([_as_dict(each) for each in groups], indent=2)
    rows: list[Sequence[str]] = [('GROUP', 'POLICY', 'MEMBERS', 'COMPUTES')]
    rows += [(each.name, each.rule, str(len(each.members)), str(len(each.on))) for each in groups]
    return table(rows)


def as_members(store: Store, found: Group, form: str) -> str:
    """Who is where: a table with one line each, or a JSON object."""
    if form == 'json':
        return dump(_as_dict(found), indent=2)
    names = alive(store)
    rows: list[Sequence[str]] = [('INSTANCE', 'COMPUTE', 'HOST')]
    by_compute = sorted(found.members.items(), key=lambda each: (each[1], each[0]))
    rows += [(instance, compute or 'waits', names.get(compute) or '-') for instance, compute in by_compute]
    return f'{found.name}: {found.rule}\n{table(rows)}'


def _as_dict(found: Group) -> dict[str, object]:
    rule = {'name': found.name, 'policy': found.policy, 'strict': found.strict}
    return {**rule, 'members': [{'instance': each, 'compute': on or None} for each, on in found.members.items()]}
