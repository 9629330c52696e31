"""Commands for what instances share: flavors, groups and quotas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from ecomp.cli.command import DOCUMENT, LISTED, Command, Context, Outcomes
from ecomp.cli.options import flavor_and_query, names, nothing, project_and_limits
from ecomp.cli.tables import UUID, Column, Listing, Row, natural
from ecomp.errors import NotFound
from ecomp.model import keys
from ecomp.model.flavor import Flavor, to_dict
from ecomp.model.group import Group
from ecomp.model.host import Computes
from ecomp.model.quota import Quota, classes, in_words
from ecomp.model.text import did_you_mean, printable

if TYPE_CHECKING:
    from ecomp.store.client import Store


def _flavor_list(do: Context) -> int:
    from ecomp.scheduler.operating.sharing import all_flavors

    flavors, unreadable = all_flavors(do.config, do.store)
    return do.show(as_flavors(flavors), unreadable)


def _flavor_show(do: Context) -> int:
    from ecomp.scheduler.operating.sharing import all_flavors, no_such_flavor

    flavors, unreadable = all_flavors(do.config, do.store)
    missing = [name for name in do.words if name not in flavors]
    for name in missing:
        do.out.say(str(no_such_flavor(name, flavors)))
    selected = {name: item for name, item in flavors.items() if name in do.words}
    code = do.show(as_flavors(selected), unreadable, one=len(do.words) == 1) if selected else 0
    return NotFound.exit_code if missing else code


def _flavor_set(do: Context) -> int:
    from ecomp.scheduler.operating.sharing import put_flavor

    return _told(do, [do.words[0]], lambda _: put_flavor(do.store, do.placement, *do.words))


def _flavor_delete(do: Context) -> int:
    from ecomp.scheduler.operating.sharing import delete_flavor

    return _told(do, do.words, lambda name: delete_flavor(do.store, name))


def _group_list(do: Context) -> int:
    from ecomp.scheduler.looking.hosts import read_names_by_instance
    from ecomp.store.sharing import every, group

    groups, unreadable = every(do.store, keys.GROUPS, group)
    return do.show(as_groups(groups, do.computes, read_names_by_instance(do.store)), unreadable)


def _group_show(do: Context) -> int:
    from ecomp.scheduler.looking.hosts import read_names_by_instance

    shared_groups, code = do.find_each(lambda name: read_group(do.store, name))
    if shared_groups:
        do.show(as_members(shared_groups, do.computes, read_names_by_instance(do.store), several=len(do.words) > 1))
    return code


def read_group(store: Store, name: str) -> Group:
    """Return a group; raise NotFound, which suggests a similar name, or Unreadable."""
    from ecomp.store.sharing import group

    shared_group, _ = group(store, name)
    if shared_group is None:
        suggestion = did_you_mean(name, map(keys.last, store.snapshot(keys.GROUPS, keys_only=True).entries))
        raise NotFound(f'{printable(name, 100)}: no such group{suggestion}: eschedule group list shows all')
    return shared_group


def _quota_list(do: Context) -> int:
    from ecomp.store.sharing import every, quota

    quotas, unreadable = every(do.store, keys.QUOTAS, quota)
    return do.show(as_quotas(quotas), unreadable)


def _quota_show(do: Context) -> int:
    from ecomp.scheduler.operating.sharing import one_quota

    quotas, code = do.find_each(lambda name: one_quota(do.store, name))
    if quotas:
        do.show(as_quota(quotas, several=len(do.words) > 1))
    return code


def _quota_set(do: Context) -> int:
    from ecomp.scheduler.operating.sharing import check_limits, limit

    remark = check_limits(do.placement, do.words[1:])
    suffix = f'; {remark}' if remark else ''
    return _told(do, [do.words[0]], lambda project: limit(do.store, project, do.words[1:]) + suffix)


def _told(do: Context, words: Sequence[str], change: Callable[[str], str]) -> int:
    """Call `change` for each word, print the sentences that it returns, return the exit code."""
    outcomes = Outcomes(do, words)
    return outcomes.run(lambda word: outcomes.tell(word, change(word)))


def as_flavors(flavors: Mapping[str, tuple[Flavor, str]]) -> Listing:
    """List each flavor and where it is stored."""
    rows = []
    for name, (flavor, source) in flavors.items():
        resources = ','.join(f'{resource_class}:{amount}' for resource_class, amount in flavor.resources.items())
        rows.append(Row((name, resources, flavor.traits or None, source), {**to_dict(flavor), 'source': source}))
    columns = [Column('FLAVOR'), Column('RESOURCES', least=20), Column('TRAITS', 1, least=8), Column('IN', 2)]
    return Listing(columns, rows)


def as_groups(groups: Sequence[Group], known: Computes, names: Mapping[str, str]) -> Listing:
    columns = [Column('GROUP'), Column('POLICY'), Column('MEMBERS', 1), Column('COMPUTES', 2)]
    rows = [Row((item.name, item.rule, len(item.members), len(item.on)), _group(item, known, names)) for item in groups]
    return Listing(columns, rows)


def as_members(groups: Sequence[Group], known: Computes, names: Mapping[str, str], several: bool) -> Listing:
    """List the members of groups with their computes; `names` are of instances, by uuid."""
    columns = [Column('GROUP', wide=True), Column('INSTANCE', kind=UUID), Column('NAME', least=24)]
    columns += [Column('COMPUTE', 1, UUID), Column('HOST')]
    rows = []
    for shared_group in groups:
        members = sorted(shared_group.members.items(), key=lambda member: (natural(names.get(member[0])), member[0]))
        title = f'{shared_group.name}: {shared_group.rule}'
        for instance, compute in members:
            cells = (shared_group.name, instance, names.get(instance), compute or 'waits', known.host(compute))
            rows.append(Row(cells, title=title))
    values = [_group(shared_group, known, names) for shared_group in groups]
    return Listing(columns, rows, values if several else values[0])


def _group(found: Group, known: Computes, names: Mapping[str, str]) -> dict[str, object]:
    rule = {'name': found.name, 'policy': found.policy, 'strict': found.strict}
    members = [
        {'instance': instance, 'name': names.get(instance), 'compute': compute or None, 'host': known.host(compute)}
        for instance, compute in found.members.items()
    ]
    return {**rule, 'members': members}


def as_quotas(quotas: Sequence[Quota]) -> Listing:
    rows = [Row((printable(item.project, 100), in_words(item)), _quota(item)) for item in quotas]
    return Listing([Column('PROJECT', least=16), Column('USED/LIMIT', least=40, folds=True)], rows)


def as_quota(quotas: Sequence[Quota], several: bool) -> Listing:
    """List the limits and use of projects, a row for each resource class."""
    rows = []
    for item in quotas:
        for name in classes(item):
            maximum, used = item.limits.get(name), item.used.get(name, 0)
            remaining = None if maximum is None else maximum - used
            rows.append(Row((item.project, name, maximum, used, remaining), title=item.project if several else ''))
    values = list(map(_quota, quotas))
    columns = [Column('PROJECT', wide=True), *map(Column, ('RESOURCE', 'LIMIT', 'USED', 'LEFT'))]
    return Listing(columns, rows, values if several else values[0])


def _quota(found: Quota) -> dict[str, object]:
    return {'project': found.project, 'limits': dict(found.limits), 'used': dict(found.used)}


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('flavor list', 'flavor list', 'the flavors of schedule.yaml and of etcd',
            'Print the flavors: what each asks for, and whether it is kept in schedule.yaml or in etcd. One of '
            "schedule.yaml comes before etcd's of the same name.",
            nothing, _flavor_list, LISTED, example='eschedule flavor list'),
    Command('flavor show', 'flavor show NAME…', 'what a flavor asks for',
            'Print of a flavor, or of several, what `eschedule flavor list` prints of all.',
            names, _flavor_show, LISTED, (4,), example='eschedule flavor show small'),
    Command('flavor set', "flavor set NAME 'resources=…'", 'keep a flavor in etcd, for everybody',
            'Keep a flavor in etcd, for everybody, in place of one of that name: a placement query with resources= and '
            'perhaps required= and nothing else, in quotes. What is placed already stays as it is.',
            flavor_and_query, _flavor_set, DOCUMENT,
            example="eschedule flavor set small 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'"),
    Command('flavor delete', 'flavor delete NAME…', 'remove flavors from etcd',
            'Remove flavors from etcd. What is placed already stays as it is; what still waits in the queue of such a '
            'flavor is taken by nobody.',
            names, _flavor_delete, DOCUMENT, (4,), example='eschedule flavor delete small'),
    Command('group list', 'group list', 'all groups and their policies',
            'Print all groups, a line each: name, policy, number of members, and on how many computes they are.',
            nothing, _group_list, LISTED, example='eschedule group list'),
    Command('group show', 'group show GROUP…', 'where the members of a group are',
            "Print a group's policy, and each member with its compute; `waits` is one that is in a queue.",
            names, _group_show, LISTED, (4,), example='eschedule group show web'),
    Command('quota list', 'quota list', 'the projects that have limits',
            'Print the projects that have limits, and how much of each limit is used. A project that is not listed has '
            'none.',
            nothing, _quota_list, LISTED, example='eschedule quota list'),
    Command('quota show', 'quota show PROJECT…', 'what a project may have, and has',
            'Print of a project, for each resource class and for the number of instances, the limit, how much is used, '
            'and how much is left (memory in MiB, disk in GiB).',
            names, _quota_show, LISTED, (4,), example='eschedule quota show shop'),
    Command('quota set', 'quota set PROJECT CLASS=N…', 'limit what a project may have',
            'Limit what a project may have in all: VCPU=10, MEMORY_MB=8192 (MiB), DISK_GB=100 (GiB), instances=5 or '
            'any other resource class; =none is no limit any more. Limits that are not named stay. What it has already '
            'is counted anew and stays, even if it is more.',
            project_and_limits, _quota_set, DOCUMENT, (5,), example='eschedule quota set shop VCPU=10 instances=5'),
)
