"""What users read of instances, computes and findings. Pure: values to listings and sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ecomp.cli.tables import STATE, TIME, UUID, Cell, Column, Details, Listing, Row, natural
from ecomp.model import boots
from ecomp.model.allocation import NEEDED, Room
from ecomp.model.host import NOBODY, Computes
from ecomp.model.order import ASKED, OFF, phase
from ecomp.model.record import (
    ACTIVE,
    BUILDING,
    ERROR,
    GONE,
    KEPT,
    QUEUED,
    STAGES,
    STOPPED,
    Interface,
    Record,
    failure,
    to_dict,
    waits_for,
)
from ecomp.model.text import printable

if TYPE_CHECKING:
    from ecomp.model.findings import Finding
    from ecomp.model.host import Host
    from ecomp.scheduler.operating.audit import Report
    from ecomp.scheduler.placing.place import RankedCompute

MIDWAY = {ASKED: 'its guest was asked to turn itself off', OFF: 'it is off, and about to be started'}
INSTANCE = Column('INSTANCE', kind=UUID)
COMPUTE = Column('COMPUTE', rank=3, kind=UUID)
COLUMNS = (
    INSTANCE,
    Column('NAME', least=24),
    Column('STATE', kind=STATE),
    Column('ADDRESS', rank=2),
    Column('HOST', rank=1, least=8),
    COMPUTE._replace(wide=True),
    Column('REQUESTED', rank=4, kind=TIME),
)
REASON = Column('REASON', rank=1, least=20)
MORE = (Column('PROJECT', wide=True), Column('GROUP', wide=True), Column('IMAGE', wide=True))

STAGE_FIELDS = {stage: 'image ready' if stage == 'image' else stage for stage in (*STAGES, GONE, ERROR)}
"""What the time of each stage is called in details: `image` is the URL there."""
FIELDS = (
    *('instance', 'name', 'state', 'since', 'address', 'host', 'compute', 'image', 'resources', 'query', 'project'),
    *('user', 'group', 'interface 0', 'console', *STAGE_FIELDS.values(), 'boot 1', 'waits', 'progress', 'reason'),
    *('cleaned up', 'power', 'fault', 'cloud-init', 'host key'),
)
"""What an instance may have of details. It has several interfaces, and boots, which have numbers."""


def as_list(records: Sequence[Record], known: Computes = NOBODY) -> Listing:
    """All records, a line each, by the time of their request, those of a set by name; what is wrong with one, too.

    `known` is what computes are called, here and below.
    """
    records = sorted(records, key=lambda each: (each.stages.get('requested', ''), natural(each.name), each.instance))
    # Mostly there is nothing to say, and then no column for it in a table.
    reason = REASON._replace(wide=not any(map(_reason, records)))
    # Whatever has a name can do without its uuid.
    instance = INSTANCE._replace(rank=5 if all(each.name for each in records) else 0)
    rows = [
        Row(
            [
                *(each.instance, each.name or None, each.state, each.address or None),
                *(known.called(each.compute) or None, each.compute or None),
                *(each.stages.get('requested') or None, _reason(each)),
                *(each.project_id or None, each.group_name, each.image or None),
            ],
            _record(each, known),
        )
        for each in records
    ]
    return Listing([instance, *COLUMNS[1:], reason, *MORE], rows)


def _reason(record: Record) -> str | None:
    """What is wrong, the cause first: a narrow column cuts what it is about."""
    if record.error is None:
        return record.fault
    about, _, cause = record.error.reason.partition(': ')
    if cause and '/' in about and ' ' not in about:  # a URL or a file
        return f'{cause} (stage {record.error.stage}: {about})'
    return f'{record.error.reason} (stage {record.error.stage})'


def as_detail(record: Record, known: Computes = NOBODY) -> Details:
    """One record whole, and of one in a queue, where that is so, that nobody takes from it."""
    asked = ', '.join(f'{name}:{amount}' for name, amount in record.resources.items())
    rows: list[tuple[str, Cell]]
    rows = [(name, getattr(record, name) or None) for name in ('instance', 'name', 'state')]
    rows += [('since', since)] if (since := _since(record)) else []
    rows += [('address', record.address), ('host', known.host(record.compute))]
    rows += [(name, getattr(record, name) or None) for name in ('compute', 'image')]
    rows += [('resources', asked or None), ('query', record.query or None)]
    rows += [('project', record.project_id or None), ('user', record.user_id or None)]
    rows += [('group', record.group.name)] if record.group else []
    rows += [(f'interface {number}', _interface(each)) for number, each in enumerate(record.addresses)]
    rows += [('console', record.console)] if record.console and record.state not in KEPT else []
    times = sorted(record.stages.items(), key=lambda each: each[1])
    rows += [(STAGE_FIELDS.get(stage, stage), time) for stage, time in times if time]
    rows += [(f'boot {each.number}', _boot(each)) for each in record.boots if len(record.boots) > 1]
    if record.state == QUEUED and (unserved := known.unserved(['it'])):
        rows.append(('waits', unserved))
    if record.progress:
        rows.append(('progress', str(record.progress)))
    if record.error:
        rows.append(('reason', f'at stage {record.error.stage}: {record.error.reason}'))
        rows.append(('cleaned up', record.error.cleaned))
    if phase(record.power):
        rows.append(('power', MIDWAY.get(phase(record.power), record.power or '')))
    if record.fault:
        rows.append(('fault', record.fault))
    if record.cloud_init:
        rows.append(('cloud-init', f'failed at stage {record.cloud_init.stage}: {record.cloud_init.reason}'))
    rows += [('host key', each) for each in record.host_keys]
    return Details(rows, _record(record, known), FIELDS, ('interface', 'boot'))


def as_hosts(hosts: Sequence[Host]) -> Listing:
    """All computes, a line each."""
    # What every guest needs, and then what only some computes have.
    classes = [*NEEDED, *sorted({name for each in hosts for name in each.resources} - set(NEEDED))]
    columns = [COMPUTE._replace(rank=2), Column('HOST', least=8), Column('STATE', kind=STATE), Column('INSTANCES', 1)]
    rows = [
        Row(
            [
                *(each.compute, each.hostname or None, _state(each), each.instances),
                *(_share(each.resources.get(name)) for name in classes),
                *(each.said.version, each.said.kind),
            ],
            _host(each),
        )
        for each in hosts
    ]
    return Listing([*columns, *_shares(classes), Column('VERSION', 4), Column('KIND', 3)], rows)


def as_plan(ranked: Sequence[RankedCompute]) -> Listing:
    """The computes that would be tried, in order, a line each."""
    classes = [*NEEDED, *sorted({name for each in ranked for name in each.asked} - set(NEEDED))]
    columns = [COMPUTE._replace(rank=2), Column('HOST', least=8), Column('WEIGHT', 1)]
    rows = [
        Row(
            [
                *(each.compute, each.hostname or None, None if each.weight is None else f'{each.weight:.2f}'),
                *(_share(each.rooms.get(name)) for name in classes),
                each.instances,
            ],
            _ranked(each),
        )
        for each in ranked
    ]
    return Listing([*columns, *_shares(classes), Column('INSTANCES')], rows)


def _shares(classes: Sequence[str]) -> list[Column]:
    return [Column(f'{name} USED/CAPACITY', rank=1 if name in NEEDED else 3, short=name) for name in classes]


def as_findings(findings: Sequence[Finding], known: Computes = NOBODY, names: Mapping[str, str] = {}) -> Listing:
    """What an audit found, a line each. `names` are those of instances, by uuid."""
    columns = [Column('CODE'), Column('SUBJECT', rank=1, kind=UUID), Column('NAME', rank=2, least=24)]
    columns.append(Column('FINDING', least=40, folds=True))
    rows = [
        Row(
            [each.code, known.translated(each.subject), names.get(each.subject), known.translated(each.sentence)],
            {**each.to_dict(), 'host': known.host(each.compute), 'name': names.get(each.subject)},
        )
        for each in findings
    ]
    return Listing(columns, rows)


def summary(report: Report) -> list[str]:
    """What is said beside an audit's findings: who was silent, what mends them, and how much was compared."""
    called = report.known.called
    away = [f'compute {called(each)} is {how}: what it has was not compared' for each, how in report.away.items()]
    cures = (
        f'{each.code}: ' + (f'--fix {each.fix}' if each.fix else f'by hand: {each.how}') for each in report.findings
    )
    count = len(report.findings)
    unserved = [] if report.unserved is None else [report.unserved]
    return [*away, *unserved, *dict.fromkeys(cures), f'{report.compared}: {count or "no"} finding' + 's' * (count != 1)]


def no_address(record: Record) -> str:
    """Why an instance has no address (yet), in one line."""
    if record.state == ERROR:
        return failure(record)
    reserved = record.addresses[0].expected if record.addresses else None
    expected = f' ({reserved} is expected)' if reserved and record.state in (BUILDING, ACTIVE) else ''
    return f'{record.instance}: no address yet: {record.state}, waiting for: {waits_for(record)}{expected}'


def is_off(record: Record) -> str:
    """That an instance is stopped, and since when."""
    since = _since(record)
    return printable(f'it is stopped, since {since}') if since else 'it is stopped'


def _since(record: Record) -> str:
    """Since when a guest runs or is off, '' where that is not known."""
    stage = {ACTIVE: boots.STARTED, STOPPED: boots.STOPPED}.get(record.state)
    return record.boot.stages.get(stage, '') if record.boot and stage else ''


def _boot(boot: boots.Boot) -> str:
    until = f' to {boot.stages[boots.STOPPED]}' if boots.STOPPED in boot.stages else ''
    return f'{boot.reason}, {boot.stages.get(boots.STARTED, "-")}{until}'


def _interface(each: Interface) -> str:
    where = f'{each.mac} on {each.network}' + (f', by {each.source}' if each.source else '')
    has = each.address or (f'{each.expected} expected' if each.expected else 'no address yet')
    return f'{has} ({where})'


def _share(share: Room | None) -> str | None:
    if share is None:
        return None
    return f'{share.used}/{share.capacity}' + (f' ({share.over} too many)' if share.over else '')


def _ranked(each: RankedCompute) -> dict[str, object]:
    rooms = {name: {'used': room.used, 'capacity': room.capacity} for name, room in sorted(each.rooms.items())}
    there = {'asked': dict(sorted(each.asked.items())), 'resources': rooms, 'instances': each.instances}
    return {'compute': each.compute, 'host': each.hostname, 'hostname': each.hostname, 'weight': each.weight, **there}


def _state(host: Host) -> str:
    from ecomp.model.host import DISABLED

    return f'{host.state}, disabled' if host.disabled and host.state != DISABLED else host.state


def _host(host: Host) -> dict[str, object]:
    shares = {
        name: {field: getattr(each, field) for field in ('used', 'free', 'capacity', 'over')}
        for name, each in sorted(host.resources.items())
    }
    said = {field: getattr(host, field) for field in ('compute', 'hostname', 'state', 'disabled', 'instances')}
    of_itself = {field: getattr(host.said, field) for field in ('version', 'kind', 'queues')}
    return {**said, 'host': host.hostname, **of_itself, 'resources': shares}


def _record(record: Record, known: Computes) -> dict[str, object]:
    """The record as etcd has it, and what its compute's host is called."""
    return {**to_dict(record), 'host': known.host(record.compute)}
