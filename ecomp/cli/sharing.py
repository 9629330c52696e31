"""Commands for what instances share: flavors, images, groups and quotas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ecomp.cli import options
from ecomp.cli.command import DOCUMENT_OPTIONS, LISTING_OPTIONS, Command, Context, Outcomes
from ecomp.cli.suggestions import suggest_subcommand
from ecomp.cli.tables import UUID, Column, Listing, Row, make_sort_key
from ecomp.errors import NotFound
from ecomp.model import keys
from ecomp.model.facts import NO_FACTS, Facts
from ecomp.model.flavor import Flavor
from ecomp.model.group import Group
from ecomp.model.host import Computes
from ecomp.model.image import hash_image
from ecomp.model.quota import Quota, format_quota, list_classes
from ecomp.model.stored import to_dict
from ecomp.model.text import format_suggestion, join_some, make_printable
from ecomp.scheduler.operations import sharing
from ecomp.scheduler.queries.computes import read_names_by_instance
from ecomp.scheduler.queries.hosts import read_facts
from ecomp.shared.names import load_all, load_group, load_quota

if TYPE_CHECKING:
    from ecomp.store.client import Store

MAX_HOSTS_IN_CELL = 20


def _list_flavors(ctx: Context) -> int:
    flavors, unreadable = sharing.list_flavors(ctx.store)
    if not ctx.words:
        return ctx.show(make_flavor_listing(flavors), unreadable)
    missing = [name for name in ctx.words if name not in flavors]
    for name in missing:
        ctx.out.say(str(sharing.make_no_such_flavor(name, flavors)))
    selected = {name: item for name, item in flavors.items() if name in ctx.words}
    code = ctx.show(make_flavor_listing(selected), unreadable, is_single=len(ctx.words) == 1) if selected else 0
    return _print_hint(ctx, NotFound.exit_code) if missing else code


def _set_flavor(ctx: Context) -> int:
    return _apply_to_each(ctx, [ctx.words[0]], lambda _: sharing.put_flavor(ctx.store, ctx.placement, *ctx.words))


def _delete_flavors(ctx: Context) -> int:
    return _apply_to_each(ctx, ctx.words, lambda name: sharing.delete_flavor(ctx.store, name))


def _list_images(ctx: Context) -> int:
    return ctx.show(make_image_listing(ctx.config.images, ctx.computes, read_facts(ctx.store).facts))


def _list_groups(ctx: Context) -> int:
    if not ctx.words:
        groups, unreadable = load_all(ctx.store, keys.GROUPS, load_group)
        return ctx.show(make_group_listing(groups, ctx.computes, read_names_by_instance(ctx.store)), unreadable)
    shared_groups, code = ctx.find_each(lambda name: read_group(ctx.store, name))
    if shared_groups:
        names = read_names_by_instance(ctx.store)
        ctx.show(make_member_listing(shared_groups, ctx.computes, names, is_array=len(ctx.words) > 1))
    return code


def read_group(store: Store, name: str) -> Group:
    """Read a group, or raise NotFound, with a similar name if there is one."""
    group, _ = load_group(store, name)
    if group is None:
        hint = format_suggestion(name, map(keys.get_last_part, store.snapshot(keys.GROUPS, keys_only=True).entries))
        raise NotFound(f'{make_printable(name, 100)}: no such group{hint}. Try: eschedule group')
    return group


def _list_quotas(ctx: Context) -> int:
    if not ctx.words:
        listed, unreadable = load_all(ctx.store, keys.QUOTAS, load_quota)
        return ctx.show(make_quota_listing(listed), unreadable)
    quotas, code = ctx.find_each(lambda name: sharing.require_quota(ctx.store, name))
    if quotas:
        ctx.show(make_usage_listing(quotas, is_array=len(ctx.words) > 1))
    return _print_hint(ctx, code)


def _set_quota(ctx: Context) -> int:
    project, *limits = ctx.words
    remark = sharing.describe_new_classes(ctx.placement, limits)
    suffix = f'; {remark}' if remark else ''
    return _apply_to_each(ctx, [project], lambda project: sharing.set_limits(ctx.store, project, limits) + suffix)


def _print_hint(ctx: Context, code: int) -> int:
    """Print, if the code is NotFound, what was probably meant, and return the same code."""
    if code == NotFound.exit_code and (hint := suggest_subcommand(ctx.name, ctx.words)):
        ctx.out.say(hint)
    return code


def _find_name_problems(name: str, words: Sequence[str], _: options.Options) -> Iterator[str]:
    if words[0] in options.SUBCOMMANDS:
        yield f'{name}: {words[0]!r} is not a valid name: it is a subcommand. Fix: choose another name'


def _apply_to_each(ctx: Context, words: Sequence[str], change: Callable[[str], str]) -> int:
    outcomes = Outcomes(ctx, words)
    return outcomes.run(lambda word: outcomes.report(word, change(word)))


def make_flavor_listing(flavors: Mapping[str, Flavor]) -> Listing:
    rows = []
    for name, flavor in flavors.items():
        resources = ','.join(f'{resource_class}:{amount}' for resource_class, amount in flavor.resources.items())
        rows.append(Row((name, resources, flavor.traits or None), to_dict(flavor)))
    return Listing([Column('FLAVOR'), Column('RESOURCES', min_width=20), Column('TRAITS', 1, min_width=8)], rows)


def make_image_listing(images: Mapping[str, str], computes: Computes, facts: Mapping[str, Facts]) -> Listing:
    """List images by name, with the living computes that have or may have them."""
    rows = []
    for name, url in images.items():
        image_hash, hosts, names = hash_image(url), list[object](), dict[bool | None, list[str]]()
        for compute in sorted(computes.living):
            is_cached = facts.get(compute, NO_FACTS).has_image(image_hash)
            hosts.append({'compute': compute, 'host': computes.find_hostname(compute), 'cached': is_cached})
            names.setdefault(is_cached, []).append(computes.format_name(compute))
        texts = [join_some(names[True], MAX_HOSTS_IN_CELL)] if True in names else []
        texts += [f'unknown: {join_some(names[None], MAX_HOSTS_IN_CELL)}'] if None in names else []
        rows.append(Row((name, url, '; '.join(texts) or None), {'name': name, 'image': url, 'hosts': hosts}))
    return Listing([Column('NAME'), Column('IMAGE', 1, min_width=20), Column('HOSTS', min_width=20, folds=True)], rows)


def make_group_listing(groups: Sequence[Group], computes: Computes, names: Mapping[str, str]) -> Listing:
    """List groups and how many members and computes each has, in JSON with all members."""
    columns = [Column('GROUP'), Column('POLICY'), Column('MEMBERS', 1), Column('COMPUTES', 2)]
    values = (_group_to_dict(item, computes, names) for item in groups)
    cells = ((item.name, item.rule, len(item.members), len(item.member_counts)) for item in groups)
    return Listing(columns, list(map(Row, cells, values)))


def make_member_listing(groups: Sequence[Group], naming: Computes, names: Mapping[str, str], is_array: bool) -> Listing:
    """List the members of one group or more, in JSON the first group's object unless `is_array`."""
    columns = [Column('GROUP', wide=True), Column('INSTANCE', kind=UUID), Column('NAME', min_width=24)]
    columns += [Column('COMPUTE', 1, UUID), Column('HOST')]
    rows = []
    for group in groups:
        members = sorted(group.members.items(), key=lambda member: (make_sort_key(names.get(member[0])), member[0]))
        title = f'{group.name}: {group.rule}'
        for uuid, compute in members:
            cells = (group.name, uuid, names.get(uuid), compute or 'waits', naming.find_hostname(compute))
            rows.append(Row(cells, title=title))
    values = [_group_to_dict(group, naming, names) for group in groups]
    return Listing(columns, rows, values if is_array else values[0])


def _group_to_dict(group: Group, computes: Computes, names: Mapping[str, str]) -> dict[str, object]:
    rule = {'name': group.name, 'policy': group.policy, 'strict': group.strict}
    members = [
        {'instance': uuid, 'name': names.get(uuid), 'compute': on or None, 'host': computes.find_hostname(on)}
        for uuid, on in group.members.items()
    ]
    return {**rule, 'members': members}


def make_quota_listing(quotas: Sequence[Quota]) -> Listing:
    rows = [Row((make_printable(item.project, 100), format_quota(item)), _quota_to_dict(item)) for item in quotas]
    return Listing([Column('PROJECT', min_width=16), Column('USED/LIMIT', min_width=40, folds=True)], rows)


def make_usage_listing(quotas: Sequence[Quota], is_array: bool) -> Listing:
    """List limits and use by resource, in JSON the first project's object unless `is_array`."""
    rows = []
    for item in quotas:
        for name in list_classes(item):
            maximum, used = item.limits.get(name), item.used.get(name, 0)
            remaining = None if maximum is None else maximum - used
            rows.append(Row((item.project, name, maximum, used, remaining), title=item.project if is_array else ''))
    values = list(map(_quota_to_dict, quotas))
    columns = [Column('PROJECT', wide=True), *map(Column, ('RESOURCE', 'LIMIT', 'USED', 'LEFT'))]
    return Listing(columns, rows, values if is_array else values[0])


def _quota_to_dict(project_quota: Quota) -> dict[str, object]:
    return {'project': project_quota.project, 'limits': dict(project_quota.limits), 'used': dict(project_quota.used)}


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('flavor', 'flavor [NAME…]', 'list flavors, and what each requests',
            'List all flavors, or the given ones, and what each requests. `eschedule flavor set` and `flavor delete` '
            'change them.',
            options.parse_any_names, _list_flavors, LISTING_OPTIONS, (4,), example='eschedule flavor small'),
    Command('flavor set', "flavor set NAME 'resources=…'", 'store a flavor in etcd, for all users',
            'Store a flavor in etcd, for all users. An existing flavor of the same name is replaced; existing '
            'instances do not change. A flavor is a placement query in quotes, with resources= and optionally '
            'required=, and nothing else.',
            options.parse_flavor_and_query, _set_flavor, DOCUMENT_OPTIONS,
            example="eschedule flavor set small 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'",
            find_problems=_find_name_problems),
    Command('flavor delete', 'flavor delete NAME…', 'remove flavors from etcd',
            'Remove flavors from etcd. Existing instances do not change. Requests in the queue of a removed flavor '
            'wait until the flavor exists again.',
            options.parse_names, _delete_flavors, DOCUMENT_OPTIONS, (4,), example='eschedule flavor delete small'),
    Command('image', 'image', 'list named images, and which hosts have them',
            'List the names in `images:` of schedule.yaml, their URLs, and the living hosts that have the image in '
            'their caches: an instance there starts without a download. A host reports its cache a few seconds after '
            'it has changed; `unknown:` is before hosts that have more images than they report.',
            options.parse_nothing, _list_images, LISTING_OPTIONS, example='eschedule image'),
    Command('group', 'group [GROUP…]', 'list groups, or where their members are',
            'List all groups, one a line: name, policy, number of members, and number of computes they are on. For '
            'given groups: the policy, and each member with its compute, or with `waits` if the member is in a queue.',
            options.parse_any_names, _list_groups, LISTING_OPTIONS, (4,), example='eschedule group web'),
    Command('quota', 'quota [PROJECT…]', 'list the limits of projects and their use',
            'List the projects that have limits, and how much of each limit is used. A project that is not listed is '
            'not limited. For given projects: for each resource class, and for the number of instances, the limit, the '
            'use and what remains (memory in MiB, disk in GiB). `eschedule quota set` changes limits.',
            options.parse_any_names, _list_quotas, LISTING_OPTIONS, (4,), example='eschedule quota shop'),
    Command('quota set', 'quota set PROJECT CLASS=N…', 'set the limits of a project',
            'Set limits of a project: VCPU=10, MEMORY_MB=8192 (MiB), DISK_GB=100 (GiB), instances=5 or any other '
            'resource class. CLASS=none removes a limit. Other limits do not change. The current use is counted '
            'again; existing instances beyond a new limit are kept.',
            options.parse_project_and_limits, _set_quota, DOCUMENT_OPTIONS, (5,),
            example='eschedule quota set shop VCPU=10 instances=5', find_problems=_find_name_problems),
)
