"""What users read: tables and JSON. Pure: values to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ecomp.model.allocation import NEEDED
from ecomp.model.host import DISABLED, Host, Share
from ecomp.model.json_object import dump
from ecomp.model.power import ASKED, OFF, phase
from ecomp.model.record import ACTIVE, BUILDING, ERROR, Interface, Record, to_dict
from ecomp.model.text import printable
from ecomp.scheduler.wait import failure, waits_for

if TYPE_CHECKING:
    from ecomp.model.findings import Finding
    from ecomp.scheduler.audit import Report
    from ecomp.scheduler.plan import Ranked

MIDWAY = {ASKED: 'its guest was asked to turn itself off', OFF: 'it is off, and about to be started'}
COLUMNS = ('INSTANCE', 'NAME', 'STATE', 'ADDRESS', 'COMPUTE', 'REQUESTED')


def as_list(records: Sequence[Record], form: str) -> str:
    """All records: a table with one line each, or a JSON array of records."""
    if form == 'json':
        return dump([to_dict(each) for each in records], indent=2)
    rows = [
        (
            *(each.instance, each.name or '-', each.state, each.address or '-', each.compute or '-'),
            each.stages.get('requested') or '-',
        )
        for each in records
    ]
    return table([COLUMNS, *rows])


def as_detail(record: Record, form: str) -> str:
    """One record whole: a line a field, or the JSON object."""
    if form == 'json':
        return dump(to_dict(record), indent=2)
    rows = [
        ('instance', record.instance),
        ('name', record.name or '-'),
        ('state', record.state),
        ('compute', record.compute or '-'),
        ('image', record.image or '-'),
        ('resources', ', '.join(f'{name}:{amount}' for name, amount in record.resources.items()) or '-'),
        ('query', record.query or '-'),
        ('project', record.project_id or '-'),
        ('user', record.user_id or '-'),
    ]
    rows += [('group', record.group)] if record.group else []
    rows += [(f'interface {number}', _interface(each)) for number, each in enumerate(record.addresses)]
    rows += [('console', record.console)] if record.console else []
    rows += [(stage, time) for stage, time in sorted(record.stages.items(), key=lambda each: each[1]) if time]
    if record.progress:
        rows.append(('progress', str(record.progress)))
    if record.error:
        rows.append(('error', f'at stage {record.error.stage}: {record.error.reason}'))
        rows.append(('cleaned up', record.error.cleaned))
    if phase(record.power):
        rows.append(('power', MIDWAY.get(phase(record.power), record.power or '')))
    if record.fault:
        rows.append(('fault', record.fault))
    return table(rows)


def as_hosts(hosts: Sequence[Host], form: str) -> str:
    """All computes: a table with one line each, or a JSON array."""
    if form == 'json':
        return dump([_host(each) for each in hosts], indent=2)
    # What every guest needs, and then what only some computes have.
    classes = [*NEEDED, *sorted({name for each in hosts for name in each.resources} - set(NEEDED))]
    head = ('COMPUTE', 'HOST', 'STATE', 'INSTANCES', *(f'{name} USED/FREE' for name in classes))
    rows = [
        (
            *(each.compute, each.hostname or '-', _state(each), str(each.instances)),
            *(_share(each.resources.get(name)) for name in classes),
        )
        for each in hosts
    ]
    return table([head, *rows])


def as_plan(ranked: Sequence[Ranked], form: str) -> str:
    """The computes that would be tried, in order: a table with one line each, or a JSON array."""
    if form == 'json':
        return dump([_ranked(each) for each in ranked], indent=2)
    classes = [*NEEDED, *sorted({name for each in ranked for name in each.asked} - set(NEEDED))]
    head = ('COMPUTE', 'HOST', 'WEIGHT', *(f'{name} USED/CAPACITY' for name in classes), 'INSTANCES')
    rows = [
        (
            *(each.compute, each.hostname or '-', '-' if each.weight is None else f'{each.weight:.2f}'),
            *(f'{room.used}/{room.capacity}' if (room := each.rooms.get(name)) else '-' for name in classes),
            str(each.instances),
        )
        for each in ranked
    ]
    return table([head, *rows])


def as_findings(findings: Sequence[Finding], form: str) -> str:
    """What an audit found: a table with one line each, '' for nothing; or a JSON array."""
    if form == 'json':
        return dump([each.to_dict() for each in findings], indent=2)
    rows = [(each.code, each.subject, each.sentence) for each in findings]
    return table([('CODE', 'SUBJECT', 'FINDING'), *rows]) if rows else ''


def summary(report: Report) -> list[str]:
    """What is said beside an audit's findings: who was silent, what mends them, and how much was compared."""
    silent = [f'compute {each} is silent: what it has was not compared' for each in report.silent]
    cures = (
        f'{each.code}: ' + (f'--fix {each.fix}' if each.fix else f'by hand: {each.how}') for each in report.findings
    )
    count = len(report.findings)
    return [*silent, *dict.fromkeys(cures), f'{report.compared}: {count or "no"} finding' + 's' * (count != 1)]


def no_address(record: Record) -> str:
    """Why an instance has no address (yet), in one line."""
    if record.state == ERROR:
        return failure(record)
    reserved = record.addresses[0].expected if record.addresses else None
    expected = f' ({reserved} is expected)' if reserved and record.state in (BUILDING, ACTIVE) else ''
    return f'{record.instance}: no address yet: {record.state}, waiting for: {waits_for(record)}{expected}'


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows in columns as wide as their widest cell, a line each whatever is in them."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return '\n'.join(
        '  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _interface(each: Interface) -> str:
    where = f'{each.mac} on {each.network}' + (f', by {each.source}' if each.source else '')
    has = each.address or (f'{each.expected} expected' if each.expected else 'no address yet')
    return f'{has} ({where})'


def _share(share: Share | None) -> str:
    if share is None:
        return '-'
    return f'{share.used}/{share.free}' + (f' ({share.over} too many)' if share.over else '')


def _ranked(each: Ranked) -> dict[str, object]:
    rooms = {name: {'used': room.used, 'capacity': room.capacity} for name, room in sorted(each.rooms.items())}
    asked = dict(sorted(each.asked.items()))
    return {
        **{'compute': each.compute, 'hostname': each.hostname, 'weight': each.weight},
        **{'asked': asked, 'resources': rooms, 'instances': each.instances},
    }


def _state(host: Host) -> str:
    return f'{host.state}, disabled' if host.disabled and host.state != DISABLED else host.state


def _host(host: Host) -> dict[str, object]:
    shares = {
        name: {'used': each.used, 'free': each.free, 'capacity': each.capacity, 'over': each.over}
        for name, each in sorted(host.resources.items())
    }
    return {
        'compute': host.compute,
        'hostname': host.hostname,
        'state': host.state,
        'disabled': host.disabled,
        'instances': host.instances,
        'resources': shares,
    }
