"""What users read of instances, computes and findings. Pure: values to listings and sentences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ecomp.cli.tables import STATE, TIME, UUID, Cell, Column, Details, Listing, Row, natural
from ecomp.model import boots
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
    pass

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


def _record(record: Record, known: Computes) -> dict[str, object]:
    """The record as etcd has it, and what its compute's host is called."""
    return {**to_dict(record), 'host': known.host(record.compute)}
