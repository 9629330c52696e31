"""Commands that show instances and commands that wait for them; none changes an instance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ecomp.cli.command import DOCUMENT, LISTED, QUERY, REACHED, Command, Context, Outcomes, known_of, plain
from ecomp.cli.near import hint, suggest
from ecomp.cli.options import TABLE, instances, nothing, one_instance
from ecomp.cli.tables import STATE, TIME, UUID, Cell, Column, Details, Listing, Row, natural, rendered, rendered_details
from ecomp.cli.terminal import Drawing, look, watch
from ecomp.errors import EcompError, NotFound, StillGoing, Unreachable
from ecomp.model import boots, keys
from ecomp.model.host import NOBODY, Computes, Pick
from ecomp.model.order import ASKED, OFF, Power, phase
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
    from ecomp.scheduler.looking.find import InstanceEntries

FILTERS = {
    **plain('all state host'),
    'watch': 'draw the table anew whenever anything changes, until Ctrl-C, which is exit 0',
    'name': 'only those called so: * stands for any text and ? for any character, in quotes',
    'group': 'only the members of this group',
    'project': 'only those of this project',
}


def _query(do: Context) -> int:
    do.connect()

    from ecomp.scheduler.looking.find import living

    word = do.words[0]
    try:
        instance = do.instance(word)
    except (NotFound, Unreachable) as error:
        if isinstance(error, NotFound):
            raise NotFound(f'{error}; it is no command either{hint([word])}') from error
        suggestion = suggest([word])
        raise type(error)(f'{error}; {word} is not a command: {suggestion}' if suggestion else str(error)) from error
    # Do not use /booted: every compute may write there about every instance.
    record = living(do.store, instance).record
    if record.state == QUEUED:
        (record,) = _with_claims(do, [record], do.computes)
    remark: str | None = no_address(record)
    if record.address:
        off_text = f'{record.name or record.instance}: {is_off(record)}; it has this address again once it runs'
        remark = off_text if record.state == STOPPED else None
    do.show_document([{**known_of(record), 'said': remark}], printable(record.address or ''))
    if remark is not None:
        do.out.say(remark)
    if record.address:
        return 0
    for line in _unserved([record], lambda: do.computes):
        do.out.say(line)
    return EcompError.exit_code if record.state == ERROR else StillGoing.exit_code


def _unserved(records: Sequence[Record], known: Callable[[], Computes]) -> list[str]:
    """Return one line if no compute takes the queued ones of these instances, else []."""
    waiting = [record.name or record.instance for record in records if record.state == QUEUED]
    sentence = known().unserved(waiting) if waiting else None
    return [] if sentence is None else [sentence]


def _list(do: Context) -> int:
    do.connect()

    from ecomp.scheduler.looking.find import all_records
    from ecomp.scheduler.looking.hosts import check_there, computes

    record_filter = _pick(do)
    with_gone = do.options.all or GONE in (record_filter.states or ())

    def read() -> tuple[list[Record], Computes, list[EcompError]]:
        every, unreadable = all_records(do.store, with_gone)
        known_computes = computes(do.store)
        return _with_claims(do, record_filter.of(every), known_computes), known_computes, unreadable

    def drawing() -> Drawing:
        records, known_computes, unreadable = read()
        # Computed for each drawing, as the terminal may have been resized.
        table = rendered(as_list(records, known_computes), look(do.options))
        return Drawing(table, [*map(str, unreadable), *_unserved(records, lambda: known_computes)])

    if do.options.watch:
        watch(do.config.etcd, (keys.INSTANCES, keys.HOSTS, keys.QUEUES), drawing, do.out.draw)
        return 0
    records, known, unreadable = read()
    if not records and do.options.host is not None:
        with suppress(Unreachable):  # the empty table is printed even without placement
            check_there(known, lambda: do.placement, do.options.host)
    if not records and do.options.group is not None:
        from ecomp.cli.sharing import read_group

        read_group(do.store, do.options.group)
    code = do.show(as_list(records, known), unreadable)
    for line in _unserved(records, lambda: known):
        do.out.say(line)
    return code


def _with_claims(do: Context, records: Sequence[Record], known: Computes) -> list[Record]:
    """Set the fault of queued instances that are claimed on a silent compute, if known."""
    from ecomp.scheduler.looking.hosts import claimed_on_silent

    faults = claimed_on_silent(do.store, known, [record.instance for record in records if record.state == QUEUED])
    return [
        replace(record, fault=faults[record.instance]) if record.instance in faults else record for record in records
    ]


def _pick(do: Context) -> Pick:
    options = do.options
    compute = None if options.host is None else do.compute(options.host)
    return Pick(options.states, compute, options.project, options.group, options.name)


def _show(do: Context) -> int:
    do.connect()

    def detail(word: str) -> Details:
        (record,) = _with_claims(do, [_found(do, word).record], do.computes)
        return as_detail(record, do.computes)

    details, code = do.find_each(detail)
    if details:
        do.draw(rendered_details(details, do.look, several=len(do.words) > 1))
    return code


def _why(do: Context) -> int:
    from ecomp.cli.history import explanation_to_dict, in_sentences, why

    explanations, code = do.find_each(lambda word: why(do.store, lambda: do.placement, _found(do, word)))
    text = '\n'.join(map(in_sentences, explanations))
    do.show_document(list(map(explanation_to_dict, explanations)), text, several=len(do.words) > 1)
    return code


def _timeline(do: Context) -> int:
    from ecomp.cli.history import drawn, timeline_to_dict

    number = do.options.boot

    def with_boot(word: str) -> Record:
        record = _found(do, word).record
        numbers = [boot.number for boot in record.known_boots]
        if number is not None and number not in numbers:
            stored_text = _are(numbers) if numbers else 'it was not started yet, and none is'
            raise NotFound(f'{word}: boot {number} is not kept: {stored_text}')
        return record

    records, code = do.find_each(with_boot)
    if records and do.form == TABLE:
        do.draw(drawn(records, do.look, number))
    elif records:
        do.show_document([timeline_to_dict(records, number)])
    return code


def _are(kept: Sequence[int]) -> str:
    return f'{kept[0]} to {kept[-1]} are' if len(kept) > 1 else f'{kept[0]} alone is'


def _found(do: Context, word: str) -> InstanceEntries:
    from ecomp.scheduler.looking.find import find

    entries = find(do.store, do.instance(word))
    if entries is None:
        raise NotFound(f'{word}: no such instance')
    return entries


def _wait(do: Context) -> int:
    from ecomp.cli.change import reach
    from ecomp.scheduler.looking.find import living

    outcomes = Outcomes(do, do.words, **REACHED)
    power_by_instance: dict[str, Power | None] = {}

    def instance_of(word: str) -> str:
        instance = do.instance(word, do.among)
        outcomes.tell(word, instance=instance)
        entries = living(do.store, instance, do.among)
        outcomes.tell(word, '', **known_of(entries.record))
        if entries.is_destroying:
            raise NotFound(f'{instance}: is being destroyed')
        power_by_instance[instance] = entries.request.power if entries.request else None
        for line in _unserved([entries.record], lambda: do.computes):
            do.out.say(line)
        return instance

    reach(do, outcomes, instance_of, do.among, power_by_instance)
    return outcomes.end()


# Listings and details of instances


MIDWAY = {ASKED: 'its guest was asked to turn itself off', OFF: 'it is off, and about to be started'}
INSTANCE = Column('INSTANCE', kind=UUID)
COLUMNS = (
    INSTANCE,
    Column('NAME', least=24),
    Column('STATE', kind=STATE),
    Column('ADDRESS', rank=2),
    Column('HOST', rank=1, least=8),
    Column('COMPUTE', rank=3, kind=UUID, wide=True),
    Column('REQUESTED', rank=4, kind=TIME),
)
REASON = Column('REASON', rank=1, least=20)
MORE = (Column('PROJECT', wide=True), Column('GROUP', wide=True), Column('IMAGE', wide=True))

# The name of each stage's time in details, where `image` is the URL.
STAGE_FIELDS = {stage: 'image ready' if stage == 'image' else stage for stage in (*STAGES, GONE, ERROR)}
# The fields that the details of an instance may have; interfaces and boots are numbered.
FIELDS = (
    *('instance', 'name', 'state', 'since', 'address', 'host', 'compute', 'image', 'resources', 'query', 'project'),
    *('user', 'group', 'interface 0', 'console', *STAGE_FIELDS.values(), 'boot 1', 'waits', 'progress', 'reason'),
    *('cleaned up', 'power', 'fault', 'cloud-init', 'host key'),
)


def as_list(records: Sequence[Record], known: Computes = NOBODY) -> Listing:
    """List records by the time of request, those of a set by name, with errors and faults."""
    records = sorted(records, key=lambda each: (each.stages.get('requested', ''), natural(each.name), each.instance))
    # Usually no record has a reason; then the table has no such column.
    reason = REASON._replace(wide=not any(map(_reason, records)))
    # If all instances have names, the uuid is the first column that a narrow terminal omits.
    instance = INSTANCE._replace(rank=5 if all(item.name for item in records) else 0)
    rows = []
    for record in records:
        cells = [record.instance, record.name or None, record.state, record.address or None]
        cells += [known.called(record.compute) or None, record.compute or None, record.stages.get('requested') or None]
        cells += [_reason(record), record.project_id or None, record.group_name, record.image or None]
        rows.append(Row(cells, _record(record, known)))
    return Listing([instance, *COLUMNS[1:], reason, *MORE], rows)


def _reason(record: Record) -> str | None:
    """Return the error or fault with the cause first, as a narrow column cuts the subject."""
    if record.error is None:
        return record.fault
    subject, _, cause = record.error.reason.partition(': ')
    if cause and '/' in subject and ' ' not in subject:  # a URL or a file
        return f'{cause} (stage {record.error.stage}: {subject})'
    return f'{record.error.reason} (stage {record.error.stage})'


def as_detail(record: Record, known: Computes = NOBODY) -> Details:
    """Return all details of a record; `waits` says if no compute takes it from its queue."""
    resources = ', '.join(f'{name}:{amount}' for name, amount in record.resources.items())
    rows: list[tuple[str, Cell]]
    rows = [(name, getattr(record, name) or None) for name in ('instance', 'name', 'state')]
    rows += [('since', since)] if (since := _since(record)) else []
    rows += [('address', record.address), ('host', known.host(record.compute))]
    rows += [(name, getattr(record, name) or None) for name in ('compute', 'image')]
    rows += [('resources', resources or None), ('query', record.query or None)]
    rows += [('project', record.project_id or None), ('user', record.user_id or None)]
    rows += [('group', record.group.name)] if record.group else []
    rows += [(f'interface {number}', _interface(interface)) for number, interface in enumerate(record.addresses)]
    rows += [('console', record.console)] if record.console and record.state not in KEPT else []
    times = sorted(record.stages.items(), key=lambda each: each[1])
    rows += [(STAGE_FIELDS.get(stage, stage), time) for stage, time in times if time]
    rows += [(f'boot {boot.number}', _boot(boot)) for boot in record.boots if len(record.boots) > 1]
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
    rows += [('host key', key) for key in record.host_keys]
    return Details(rows, _record(record, known), FIELDS, ('interface', 'boot'))


def no_address(record: Record) -> str:
    """Return one line with the reason why an instance has no address."""
    if record.state == ERROR:
        return failure(record)
    reserved = record.addresses[0].expected if record.addresses else None
    expected = f' ({reserved} is expected)' if reserved and record.state in (BUILDING, ACTIVE) else ''
    return f'{record.instance}: no address yet: {record.state}, waiting for: {waits_for(record)}{expected}'


def is_off(record: Record) -> str:
    since = _since(record)
    return printable(f'it is stopped, since {since}') if since else 'it is stopped'


def _since(record: Record) -> str:
    """Return since when a guest runs or is off, or '' if that is unknown."""
    stage = {ACTIVE: boots.STARTED, STOPPED: boots.STOPPED}.get(record.state)
    return record.boot.stages.get(stage, '') if record.boot and stage else ''


def _boot(boot: boots.Boot) -> str:
    end_text = f' to {boot.stages[boots.STOPPED]}' if boots.STOPPED in boot.stages else ''
    return f'{boot.reason}, {boot.stages.get(boots.STARTED, "-")}{end_text}'


def _interface(each: Interface) -> str:
    where = f'{each.mac} on {each.network}' + (f', by {each.source}' if each.source else '')
    address_text = each.address or (f'{each.expected} expected' if each.expected else 'no address yet')
    return f'{address_text} ({where})'


def _record(record: Record, known: Computes) -> dict[str, object]:
    return {**to_dict(record), 'host': known.host(record.compute)}


# fmt: off
COMMANDS: Sequence[Command] = (
    Command(QUERY, '<id>', "print the instance's address",
            "Print the address of an instance, its first interface's. While it has none, nothing is printed, a line on "
            'stderr says what it waits for, and the exit code is 6; of one that failed it says why (exit 1). One '
            'that is stopped keeps its address: it is printed, and stderr says that the guest is off.',
            one_instance, _query, DOCUMENT, (4, 5, 6), example='eschedule web1'),
    Command('list', 'list', 'all instances, a line each',
            'Print all instances, a line each, by the time they were asked for: uuid, name, state, address, compute '
            'and that time. Those that wait in a queue are listed too.',
            nothing, _list, {**LISTED, **FILTERS}, (4, 5), example='eschedule list'),
    Command('show', 'show <id>…', 'all that is known of an instance',
            'Print all that is known of an instance: what was asked for, where it is, its interfaces, when it reached '
            'each stage, and what is wrong with it, if anything is. With -f json: its record, as etcd has it.',
            instances, _show, plain('format columns no_header wide'), (4, 5), example='eschedule show web1 -f json'),
    Command('why', 'why <id>…', 'why an instance is on its compute',
            'Say why an instance is on its compute: what it asked for, how many computes could have taken it, in which '
            'order they were tried, and where the other members of its group are. Of one that waits in a queue: since '
            'when, behind how many, and what each compute lacks that takes from queues.',
            instances, _why, DOCUMENT, (4, 5), example='eschedule why web1'),
    Command('timeline', 'timeline <id>…', 'how long each stage of a boot took',
            'Draw how long each stage of an instance took, in seconds, as bars on one scale: of its last boot, or with '
            '--boot of another one. A later boot than the first has the stages started, addressed and ready. Of '
            'several instances it adds the median (p50) and the 95th percentile of each stage. The first two stages '
            "are told by the clock of the machine that asked, the others by the compute's.",
            instances, _timeline, plain('boot format wide'), (4, 5), example='eschedule timeline web1 web2'),
    Command('wait', 'wait <id>…', 'wait until an instance has its address',
            'Wait until each instance has its address, and print it; or, with --for, until it has reached that stage. '
            'After a start or a reboot that is the stage of the boot it brings; of a guest that is off, of its next. '
            'A line on the terminal says what is waited for. It ends early where that can never be: exit 1 if the '
            'instance failed, 4 if it is being destroyed.',
            instances, _wait, plain('stage timeout format'), (4, 5, 6),
            example='eschedule wait web1 --for ready --timeout 120'),
)
