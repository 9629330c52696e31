"""The commands of those who run the computes: hosts, flavors, groups, quotas and the audit, each wired to its use case.

What is imported late is imported late on purpose: each command loads what it needs and no more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ecomp.conf import ScheduleConfig
from ecomp.errors import Unreachable
from ecomp.model import keys
from ecomp.scheduler.arguments import Command
from ecomp.scheduler.terminal import Terminal, each_of, now, shown

if TYPE_CHECKING:
    from ecomp.store.client import Store


def _hosts(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.placement.client import Placement
    from ecomp.scheduler.hosts import all_hosts
    from ecomp.scheduler.show import as_hosts

    hosts, unreadable = all_hosts(store, Placement(config.placement))
    return shown(out, as_hosts(hosts, command.options.format or 'table'), unreadable)


def _host_status(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.placement.client import Placement
    from ecomp.scheduler.drain import change_status, drained
    from ecomp.scheduler.live import Live
    from ecomp.scheduler.wait import Deadline

    placement, deadline = Placement(config.placement), Deadline(command.options.patience)
    compute = change_status(store, placement, command.name, command.words[0], out.say)
    if command.options.wait is not None:
        with Live() as tell:
            drained(store, placement, compute, deadline, tell)
        out.say(f'{compute}: nothing lives there any more')
    return 0


def _host_forget(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.placement.client import Placement
    from ecomp.scheduler.forget import forget

    try:
        forget(store, Placement(config.placement), command.words[0], now, out.say)
    except Unreachable as error:
        out.say(f'{error}; nothing was removed but what is said above, and the same command again goes on')
        return error.exit_code
    return 0


def _audit(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.placement.client import Placement
    from ecomp.scheduler.audit import FOUND, audit
    from ecomp.scheduler.show import as_findings, summary

    options, placement = command.options, Placement(config.placement)
    if options.fix:
        from ecomp.scheduler.repair import fix

        report = fix(store, placement, out.say)
    else:
        report = audit(store, placement)
    shown = as_findings(report.findings, options.format or 'table')
    if shown:
        out.put(shown)
    for line in summary(report):
        out.say(line)
    return FOUND if report.findings else 0


def _flavor_list(out: Terminal, config: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.flavors import all_flavors, as_flavors

    flavors, unreadable = all_flavors(config, store)
    return shown(out, as_flavors(flavors, command.options.format or 'table'), unreadable)


def _flavor_set(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.flavors import put

    out.say(put(store, *command.words))
    return 0


def _flavor_delete(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.flavors import delete

    return each_of(out, command.words, lambda name: out.say(delete(store, name)))


def _group_list(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.groups import as_groups
    from ecomp.store.sharing import every, group

    groups, unreadable = every(store, keys.GROUPS, group)
    return shown(out, as_groups(groups, command.options.format or 'table'), unreadable)


def _group_show(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.groups import as_members, one_group

    form = command.options.format or 'table'
    return each_of(out, command.words, lambda name: out.put(as_members(store, one_group(store, name), form)))


def _quota_list(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.quotas import as_quotas
    from ecomp.store.sharing import every, quota

    quotas, unreadable = every(store, keys.QUOTAS, quota)
    return shown(out, as_quotas(quotas, command.options.format or 'table'), unreadable)


def _quota_show(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.quotas import as_quota, one_quota

    form = command.options.format or 'table'
    return each_of(out, command.words, lambda name: out.put(as_quota(one_quota(store, name), form)))


def _quota_set(out: Terminal, _: ScheduleConfig, store: Store, command: Command) -> int:
    from ecomp.scheduler.quotas import limit

    out.say(limit(store, command.words[0], command.words[1:]))
    return 0


RUNS: dict[str, Callable[[Terminal, ScheduleConfig, Store, Command], int]] = {
    'hosts': _hosts,
    **dict.fromkeys(('host disable', 'host drain', 'host enable'), _host_status),
    'host forget': _host_forget,
    'audit': _audit,
    'flavor list': _flavor_list,
    'flavor set': _flavor_set,
    'flavor delete': _flavor_delete,
    'group list': _group_list,
    'group show': _group_show,
    'quota list': _quota_list,
    'quota show': _quota_show,
    'quota set': _quota_set,
}
