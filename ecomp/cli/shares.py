"""How flavors, groups and quotas are shown. Pure: values to listings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ecomp.cli.tables import UUID, Column, Listing, Row, natural
from ecomp.model.flavor import Flavor, to_dict
from ecomp.model.group import Group
from ecomp.model.host import Computes
from ecomp.model.quota import Quota, classes, in_words
from ecomp.model.text import printable


def as_flavors(flavors: Mapping[str, tuple[Flavor, str]]) -> Listing:
    """Each flavor, and where it is kept, a line each."""
    def asked(each: Flavor) -> str:
        return ','.join(f'{part}:{amount}' for part, amount in each.resources.items())

    rows = [
        Row((name, asked(each), each.traits or None, source), {**to_dict(each), 'source': source})
        for name, (each, source) in flavors.items()
    ]
    columns = [Column('FLAVOR'), Column('RESOURCES', least=20), Column('TRAITS', 1, least=8), Column('IN', 2)]
    return Listing(columns, rows)


def as_groups(groups: Sequence[Group], known: Computes, names: Mapping[str, str]) -> Listing:
    """All groups, a line each. `names` are those of instances, by uuid."""
    columns = [Column('GROUP'), Column('POLICY'), Column('MEMBERS', 1), Column('COMPUTES', 2)]
    rows = [Row((each.name, each.rule, len(each.members), len(each.on)), _group(each, known, names)) for each in groups]
    return Listing(columns, rows)


def as_members(groups: Sequence[Group], known: Computes, names: Mapping[str, str], several: bool) -> Listing:
    """Who of each group is where, a line a member. `known` is what computes are called, `names` what instances are."""
    columns = [Column('GROUP', wide=True), Column('INSTANCE', kind=UUID), Column('NAME', least=24)]
    columns += [Column('COMPUTE', 1, UUID), Column('HOST')]
    rows = []
    for each in groups:
        by_name = sorted(each.members.items(), key=lambda member: (natural(names.get(member[0])), member[0]))
        title = f'{each.name}: {each.rule}'
        for instance, compute in by_name:
            cells = (each.name, instance, names.get(instance), compute or 'waits', known.host(compute))
            rows.append(Row(cells, title=title))
    values = [_group(each, known, names) for each in groups]
    return Listing(columns, rows, values if several else values[0])


def _group(found: Group, known: Computes, names: Mapping[str, str]) -> dict[str, object]:
    rule = {'name': found.name, 'policy': found.policy, 'strict': found.strict}
    members = [
        {'instance': each, 'name': names.get(each), 'compute': on or None, 'host': known.host(on)}
        for each, on in found.members.items()
    ]
    return {**rule, 'members': members}


def as_quotas(quotas: Sequence[Quota]) -> Listing:
    """The projects that have limits, a line each."""
    rows = [Row((printable(each.project, 100), in_words(each)), _quota(each)) for each in quotas]
    return Listing([Column('PROJECT', least=16), Column('USED/LIMIT', least=40, folds=True)], rows)


def as_quota(quotas: Sequence[Quota], several: bool) -> Listing:
    """What each project may have, and has, a line a class."""
    rows = []
    for each in quotas:
        for name in classes(each):
            most, used = each.limits.get(name), each.used.get(name, 0)
            left = None if most is None else most - used
            rows.append(Row((each.project, name, most, used, left), title=each.project if several else ''))
    values = list(map(_quota, quotas))
    columns = [Column('PROJECT', wide=True), *map(Column, ('RESOURCE', 'LIMIT', 'USED', 'LEFT'))]
    return Listing(columns, rows, values if several else values[0])


def _quota(found: Quota) -> dict[str, object]:
    return {'project': found.project, 'limits': dict(found.limits), 'used': dict(found.used)}
