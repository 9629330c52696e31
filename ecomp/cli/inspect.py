"""Commands that show instances or wait for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ecomp.cli import options as cli_options
from ecomp.cli.command import (
    DOCUMENT_OPTIONS,
    EMPTY_STATUS,
    LISTING_OPTIONS,
    QUERY,
    Command,
    Context,
    Outcomes,
    extract_status,
    select_options,
)
from ecomp.cli.selection import SELECTORS, find_conflicts, make_filter, select_instances, select_records, sort_records
from ecomp.cli.suggestions import make_hint, suggest
from ecomp.cli.tables import STATE, TIME, UUID, Column, Details, Listing, Row, render_details, render_listing
from ecomp.cli.terminal import Drawing, make_style, watch
from ecomp.errors import EcompError, NotFound, StillGoing, Unreachable, put_before_fix
from ecomp.model import boots, keys
from ecomp.model.allocation import format_resources
from ecomp.model.host import NO_COMPUTES, SILENT, Computes
from ecomp.model.listing import NO_ABSENCES, Absences, RecordFilter, is_on_host
from ecomp.model.order import SHUT_OFF, SHUTDOWN_REQUESTED, USER_TEXTS, PowerAction, parse_phase
from ecomp.model.record import Interface, Record, describe_failure, describe_wait
from ecomp.model.stack import Stack
from ecomp.model.states import ACTIVE, BUILDING, ERROR, GONE, QUEUED, RETENTION_SECONDS, STAGES, STOPPED, UNKNOWN
from ecomp.model.stored import to_dict
from ecomp.model.text import MIN_PREFIX_DIGITS, format_suggestion, make_printable

if TYPE_CHECKING:
    from ecomp.scheduler.queries.find import InstanceEntries

FILTERS = {
    **select_options('all foreign state host stack'),
    'watch': 'redraw the table after each change, until Ctrl-C (exit 0)',
    'name': 'list only instances whose name matches this quoted pattern: * is any text, ? any one character',
    'group': 'list only the members of this group',
    'project': 'list only instances of this project',
}
# What one might do next with {0}, an instance on host {1}, by its state.
NEXT_COMMANDS = {
    QUEUED: ('why {0}', 'destroy {0}'),
    ACTIVE: ('ssh {0}', 'log {0}', 'reboot {0}', 'stop {0}', 'destroy {0}'),
    STOPPED: ('start {0}', 'destroy {0}'),
    ERROR: ('show {0} --command', 'destroy {0}'),
    UNKNOWN: ('hosts {1}', 'evacuate {1} --dry-run'),
}
PHASE_TEXTS = {SHUTDOWN_REQUESTED: 'the guest was asked to shut down', SHUT_OFF: 'the guest is off and about to start'}
INSTANCE_COLUMN = Column('INSTANCE', kind=UUID)
# The name of each stage's time in details, where `image` is the URL.
STAGE_FIELDS = {stage: 'image ready' if stage == 'image' else stage for stage in (*STAGES, GONE, ERROR)}
MORE_TEXTS = [name for name in USER_TEXTS if name != 'name']
# Details that are shown even without a value.
ALWAYS_SHOWN = {'name', 'address', 'host', 'compute', 'image', 'resources', 'query', 'project', 'user'}


def _print_address(ctx: Context) -> int:
    ctx.connect()

    from ecomp.scheduler.queries.find import find_living

    word = ctx.words[0]
    try:
        instance = ctx.resolve_instance(word)
    except NotFound as error:
        advice = f' (give at least the first {MIN_PREFIX_DIGITS} digits of a uuid)'
        problem = f'is neither a command nor an instance{advice if len(word) < MIN_PREFIX_DIGITS else ""}'
        raise NotFound(f'{word}: {problem}{make_hint([word])}') from error
    except Unreachable as error:
        suggestion = suggest([word])
        problem = f'{word} is not a command ({suggestion}), and cannot be looked up as an instance'
        raise type(error)(f'{problem}: {error}' if suggestion else str(error)) from error
    # Do not use /booted: every compute may write there about every instance.
    record = find_living(ctx.store, instance).record
    if record.state == QUEUED:
        (record,) = _add_claim_faults(ctx, [record], ctx.computes)
    remark: str | None = explain_no_address(record)
    if record.address:
        subject = record.name or record.instance
        since = f' since {_find_since(record)}' if _find_since(record) else ''
        off_text = f'{subject}: {make_printable(f"stopped{since}")}; the guest has this address again once it runs'
        remark = off_text if record.state == STOPPED else None
    _, line = ctx.report_age(record, remark)
    ctx.show_document([{**extract_status(record), 'said': line}], make_printable(record.address or ''))
    if record.address:
        return 0
    for line in _explain_unserved([record], lambda: ctx.computes):
        ctx.out.say(line)
    return EcompError.exit_code if record.state == ERROR else StillGoing.exit_code


def _explain_unserved(records: Sequence[Record], read_computes: Callable[[], Computes]) -> list[str]:
    """Return a line if any record is queued and no compute takes queued requests, else []."""
    waiting = [record.name or record.instance for record in records if record.state == QUEUED]
    unserved = read_computes().describe_unserved(waiting) if waiting else None
    return [] if unserved is None else [str(unserved)]


def _list_instances(ctx: Context) -> int:
    ctx.connect()
    if ctx.options.foreign:
        from ecomp.cli.adopt import print_foreign_guests

        return print_foreign_guests(ctx, sorted(ctx.computes.living, key=ctx.computes.format_name))

    from ecomp.scheduler.queries.computes import read_computes, require_compute
    from ecomp.scheduler.queries.find import list_records

    record_filter = make_filter(ctx)
    with_gone = ctx.options.all or GONE in (record_filter.states or ())

    def read() -> tuple[list[Record], Computes, Absences, list[EcompError]]:
        every, errors = list_records(ctx.store, with_gone)
        computes = read_computes(ctx.store)
        chosen, absences = select_records(ctx, record_filter, every, computes, errors)
        return _add_claim_faults(ctx, chosen, computes), computes, absences, errors

    def make_drawing() -> Drawing:
        records, computes, absences, unreadable = read()
        # Computed for each drawing, as the terminal may have been resized.
        table = render_listing(make_record_listing(records, computes, absences), make_style(ctx.options))
        return Drawing(table, [*map(str, unreadable), *_explain_unserved(records, lambda: computes)])

    if ctx.options.watch:
        watch(ctx.config.etcd, (keys.INSTANCES, keys.HOSTS, keys.QUEUES, keys.COMPUTES), make_drawing, ctx.out.draw)
        return 0
    records, known, absences, unreadable = read()
    if not records and ctx.options.host is not None:
        with suppress(Unreachable):  # the empty table is printed even without placement
            require_compute(known, lambda: ctx.placement, ctx.options.host)
    if not records and ctx.options.group is not None:
        from ecomp.cli.sharing import read_group

        read_group(ctx.store, ctx.options.group)
    code = ctx.show(make_record_listing(records, known, absences), unreadable)
    for line in _explain_unserved(records, lambda: known):
        ctx.out.say(line)
    return code


def _list_stacks(ctx: Context) -> int:
    from ecomp.scheduler.queries.find import list_records
    from ecomp.scheduler.queries.stacks import read_key
    from ecomp.shared.names import load_all

    listed, errors = load_all(ctx.store, keys.STACKS, read_key)
    (every, unreadable), stacks = list_records(ctx.store, with_gone=False), {stack.name: stack for stack in listed}
    records, absences = select_records(ctx, RecordFilter(), every, ctx.computes, errors)
    of_stacks: dict[str, list[Record]] = {name: [] for name in stacks}
    for record in records:
        if record.stack is not None:  # the key of its stack may be lost
            of_stacks.setdefault(record.stack.name, []).append(record)

    def make_row(name: str) -> Row:
        if name not in of_stacks:
            raise NotFound(f'{name}: no such stack{format_suggestion(name, of_stacks)}. Try: eschedule stack')
        return _make_stack_row(stacks.get(name, Stack(name, '')), of_stacks[name], absences)

    rows, code = ctx.find_each(make_row, ctx.words or list(of_stacks))
    if rows or not ctx.words:
        columns = [Column('STACK'), Column('INSTANCES'), Column('MEMBERS', wide=True)]
        columns += [Column('APPLIED FROM', 1, min_width=20), Column('APPLIED AT', 2, TIME)]
        code = ctx.show(Listing(columns, rows), [*errors, *unreadable], is_single=len(ctx.words) == 1) or code
    return code


def _make_stack_row(stack: Stack, records: Sequence[Record], absences: Absences) -> Row:
    counts = sorted(Counter(map(absences.get_state, records)).items())
    members = sorted({record.stack.member for record in records if record.stack})
    applied = {'applied_from': stack.applied_from or None, 'applied_at': stack.written_at or None}
    texts = [', '.join(f'{count} {state}' for state, count in counts), ', '.join(members)]
    value = {'name': stack.name, 'instances': dict(counts), 'members': members, **applied}
    return Row([stack.name, *(text or None for text in texts), *applied.values()], value)


def _find_list_problems(name: str, _: Sequence[str], options: cli_options.Options) -> Iterator[str]:
    if options.foreign and any(getattr(options, field) not in (None, False) for field in FILTERS if field != 'foreign'):
        yield f'{name}: --foreign cannot be combined with filters'


def _add_claim_faults(ctx: Context, records: Sequence[Record], computes: Computes) -> list[Record]:
    """Return the records, with a fault in each queued one that a silent compute has claimed."""
    from ecomp.scheduler.queries.computes import find_claims_on_silent

    waiting = [record.instance for record in records if record.state == QUEUED]
    faults = find_claims_on_silent(ctx.store, computes, waiting)
    return [replace(item, fault=faults[item.instance]) if item.instance in faults else item for item in records]


def _show(ctx: Context) -> int:
    ctx.connect()
    if ctx.options.view is not None:
        from ecomp.cli.history import print_command, print_timeline

        entries = _require_instance(ctx, ctx.words[0])
        return print_timeline(ctx, entries.record) if ctx.options.view == 'timeline' else print_command(ctx, entries)

    def read_details(word: str) -> Details:
        (record,) = _add_claim_faults(ctx, [_require_instance(ctx, word).record], ctx.computes)
        return make_record_details(record, ctx.computes, ctx.report_age(record)[0])

    details, code = ctx.find_each(read_details)
    if details:
        ctx.draw(render_details(details, ctx.style, is_array=len(ctx.words) > 1))
    return code


def _find_view_problems(name: str, words: Sequence[str], options: cli_options.Options) -> Iterator[str]:
    if options.view is not None:
        if len(words) > 1:
            yield f'{name}: --{options.view} needs exactly one instance'
        problem = f'is not accepted with --{options.view}'
        yield from cli_options.find_table_problems(options._replace(wide=False), problem)


def _print_why(ctx: Context) -> int:
    from ecomp.cli.history import Explanation, explain_placement, explanation_to_dict, format_explanation

    def explain(word: str) -> Explanation:
        entries = _require_instance(ctx, word)
        ctx.report_age(entries.record)
        return explain_placement(ctx.store, lambda: ctx.placement, entries)

    explanations, code = ctx.find_each(explain)
    text = '\n'.join(map(format_explanation, explanations))
    ctx.show_document(list(map(explanation_to_dict, explanations)), text, is_array=len(ctx.words) > 1)
    return code


def _require_instance(ctx: Context, word: str) -> InstanceEntries:
    from ecomp.scheduler.queries.find import find

    entries = find(ctx.store, ctx.resolve_instance(word))
    if entries is None:
        raise NotFound(f'{word}: no such instance')
    return entries


def _wait(ctx: Context) -> int:
    from ecomp.cli.waiting import wait_and_report
    from ecomp.scheduler.queries.find import find_living

    select_instances(ctx)
    outcomes = Outcomes(ctx, ctx.words, **EMPTY_STATUS)

    def resolve(word: str) -> tuple[str, PowerAction | None]:
        instance = ctx.resolve_instance(word, ctx.instance_index)
        outcomes.report(word, instance=instance)
        entries = find_living(ctx.store, instance, ctx.instance_index)
        outcomes.report(word, '', **extract_status(entries.record))
        if entries.is_destroying:
            raise NotFound(f'{instance}: is being destroyed')
        for line in _explain_unserved([entries.record], lambda: ctx.computes):
            ctx.out.say(line)
        return instance, entries.request.power if entries.request else None

    wait_and_report(ctx, outcomes, resolve, ctx.instance_index)
    return outcomes.finish()


def _serve_page(ctx: Context) -> int:
    import signal

    try:
        from ecomp.ui.server import serve
    except ImportError as error:
        raise EcompError(f'{error.name} is missing, which serves the page. Fix: pip install {error.name}') from error
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    ctx.store.claims = None  # placement is not asked
    ctx.store.read_revision()
    page = serve(ctx.etcd_config, ctx.options.port or 0, ctx.command_prefix, partial(_describe, ctx))
    with suppress(KeyboardInterrupt), page as url:
        ctx.out.put(url)
        ctx.out.say('open this address in a browser on this machine. Ctrl-C ends the page')
        signal.pause()
    return 0


def _describe(ctx: Context, instance: str) -> Mapping[str, object]:
    """Return details, reasons, stages and next commands of an instance, or only an error."""
    from ecomp.cli.history import explain_placement, format_explanation, timeline_to_dict
    from ecomp.scheduler.queries.computes import read_computes

    try:
        entries, computes = _require_instance(ctx, instance), read_computes(ctx.store)
        record = entries.record
        why = f'it waits in a queue: `{ctx.command_prefix} why {instance}` asks placement what each host lacks'
        if entries.queue_entry is None:
            why = format_explanation(explain_placement(ctx.store, lambda: ctx.placement, entries))
    except EcompError as error:
        return {'error': make_printable(str(error))}
    is_silent = is_on_host(record) and record.compute not in computes.living
    absences = Absences({record.compute: SILENT} if is_silent else {}, [instance] * entries.is_destroying)
    fields = make_record_details(record, computes, absences).fields
    # When the command is typed, its name may have another owner. A false request may name a host that is none.
    words = instance, computes.format_name(record.compute).rpartition('(')[2].rstrip(')')
    state = absences.get_state(record) if keys.is_uuid(record.compute or instance) else ''
    commands = NEXT_COMMANDS.get(state, ('events {0} --watch',))
    return {
        'show': [[field, make_printable(str(text))] for field, text in fields if text],
        'why': why.split('\n'),
        'timeline': timeline_to_dict(record)['stages'],
        'commands': [f'{ctx.command_prefix} {command.format(*words)}' for command in commands],
    }


def make_record_listing(
    records: Sequence[Record], computes: Computes = NO_COMPUTES, absences: Absences = NO_ABSENCES
) -> Listing:
    """List records by the time of their request, and by name those of one request."""
    records = sort_records(records)
    reasons = [_describe_problem(record, computes, absences) for record in records]
    columns = [
        # If all instances have names, the uuid is the first column that a narrow terminal omits.
        INSTANCE_COLUMN._replace(rank=5 if all(item.name for item in records) else 0),
        Column('NAME', min_width=24),
        Column('STATE', kind=STATE),
        Column('ADDRESS', rank=2),
        Column('HOST', rank=1, min_width=8),
        Column('COMPUTE', rank=3, kind=UUID, wide=True),
        Column('REQUESTED', rank=4, kind=TIME),
        # Usually no record has a reason or is protected; then the table has no such columns.
        Column('PROTECTED', rank=2, wide=not any(record.is_protected for record in records)),
        Column('REASON', rank=1, min_width=20, wide=not any(reasons)),
        *(Column(name.upper(), wide=True) for name in ('project', 'group', 'image', *MORE_TEXTS)),
    ]
    rows = []
    for record, problem in zip(records, reasons, strict=True):
        cells = [record.instance, record.name, absences.get_state(record), record.address]
        cells += [computes.format_name(record.compute), record.compute, record.stages.get('requested')]
        cells += ['yes' if record.is_protected else None, problem, record.project_id, record.group_name, record.image]
        cells += [getattr(record, name) for name in MORE_TEXTS]
        rows.append(Row([cell or None for cell in cells], _record_to_dict(record, computes, absences)))
    return Listing(columns, rows)


def _describe_problem(record: Record, computes: Computes, absences: Absences) -> str | None:
    if record.error is None:
        age = absences.explain_state(record, computes.format_name(record.compute))
        return '; '.join(filter(None, (age, record.fault))) or None
    cause, subject = record.error.cause_and_subject
    return put_before_fix(cause, f' (stage {": ".join(filter(None, (record.error.stage, subject)))})')


def make_record_details(record: Record, computes: Computes = NO_COMPUTES, absences: Absences = NO_ABSENCES) -> Details:
    fields = _list_fields(record, computes, absences)
    shown = [(name, cell or None) for name, cell in fields if cell or name in ALWAYS_SHOWN]
    possible_fields = dict.fromkeys(name for name, _ in _list_fields(Record('', '', ''), NO_COMPUTES, NO_ABSENCES))
    return Details(shown, _record_to_dict(record, computes, absences), tuple(possible_fields), ('interface',))


def _list_fields(record: Record, computes: Computes, absences: Absences) -> Iterator[tuple[str, str | None]]:
    """Yield each field that an instance may have, '' or None without a value."""
    state = absences.get_state(record)
    yield 'instance', record.instance
    yield 'name', record.name
    yield 'state', state
    yield 'since', _find_since(record) if state == record.state else ''
    yield 'address', record.address
    yield 'host', computes.find_hostname(record.compute)
    yield 'compute', record.compute
    yield 'image', record.image
    yield 'resources', ', '.join(f'{name}:{amount}' for name, amount in record.resources.items())
    yield 'query', record.query
    yield 'project', record.project_id
    yield 'user', record.user_id
    yield 'group', record.group_name
    yield 'stack', _fill('{0.name} ({0.entry_name})', record.stack)
    for name in ('replaces', 'replaced_by', *MORE_TEXTS):
        yield name.replace('_', ' '), getattr(record, name)
    yield 'adopted', 'yes' if record.is_adopted else ''
    yield 'protected', 'yes' if record.is_protected else ''
    yield 'at its next start', format_resources(record.resize.resources) if record.resize else ''
    for number, interface in enumerate([*map(_format_interface, record.addresses)] or ['']):
        yield f'interface {number}', interface
    yield 'console', '' if record.state in RETENTION_SECONDS else record.console
    for stage, time in sorted({**dict.fromkeys(STAGE_FIELDS, ''), **record.stages}.items(), key=lambda each: each[1]):
        yield STAGE_FIELDS.get(stage, stage), time
    boot = record.last_boot
    yield 'boot', f'{boot.number}: {_format_boot(boot)}' if boot and boot.number > 1 else ''
    yield 'waits', _fill('{0}', computes.describe_unserved(['it']) if record.state == QUEUED else None)
    yield 'progress', _fill('{0}', record.progress)
    yield 'reason', absences.explain_state(record, computes.format_name(record.compute))
    yield 'reason', _fill('at stage {0.stage}: {0.reason}', record.error)
    yield 'cleaned up', _fill('{0.cleaned}', record.error)
    phase = parse_phase(record.power)
    yield 'power', phase and PHASE_TEXTS.get(phase, record.power)
    yield 'fault', record.fault
    yield 'cloud-init', _fill('failed at stage {0.stage}: {0.reason}', record.cloud_init)
    for key in record.host_keys or ['']:
        yield 'host key', key


def _fill(form: str, value: object) -> str:
    return '' if value is None else form.format(value)


def explain_no_address(record: Record) -> str:
    """Return why an instance has no address: its failure, or what it waits for."""
    if record.state == ERROR:
        return describe_failure(record)
    reserved = record.addresses[0].reservation if record.addresses else None
    expected = f' ({reserved} is expected)' if reserved and record.state in (BUILDING, ACTIVE) else ''
    return f'{record.instance}: no address yet: {record.state}, waiting for {describe_wait(record)}{expected}'


def _find_since(record: Record) -> str:
    stage = {ACTIVE: boots.STARTED, STOPPED: boots.STOPPED}.get(record.state)
    return record.last_boot.stages.get(stage, '') if record.last_boot and stage else ''


def _format_boot(boot: boots.Boot) -> str:
    end_text = f' to {boot.stages[boots.STOPPED]}' if boots.STOPPED in boot.stages else ''
    return f'{boot.reason}, {boot.stages.get(boots.STARTED, "-")}{end_text}'


def _format_interface(interface: Interface) -> str:
    where = f'{interface.mac} on {interface.network}' + (f', by {interface.source}' if interface.source else '')
    expectation = f'{interface.reservation} expected' if interface.reservation else 'no address yet'
    return f'{interface.address or expectation} ({where})'


def _record_to_dict(record: Record, computes: Computes, absences: Absences) -> dict[str, object]:
    """Return the record as JSON: `state` as recorded, with its host, and whether it is stale."""
    host = {'host': computes.find_hostname(record.compute), 'host_state': absences.get_host_state(record)}
    stale = absences.is_stale(record)
    host['host_last_seen'] = absences.last_seen.get(record.compute) if stale else None
    return {'version': 1, **to_dict(record), **host, 'stale': stale}


# fmt: off
COMMANDS: Sequence[Command] = (
    Command(QUERY, '<id>', "print the instance's address",
            "Print the address of an instance's first interface. If it has none yet, stdout stays empty, stderr "
            'reports what the instance waits for, and the exit code is 6. If the instance failed, stderr reports why, '
            'and the exit code is 1. A stopped instance keeps its address: the address is printed, and stderr reports '
            'that the guest is off, or that the host is silent.',
            cli_options.parse_bare_instance, _print_address, DOCUMENT_OPTIONS, (4, 5, 6), example='eschedule web1'),
    Command('list', 'list', 'list all instances',
            'List all instances, one per line, in the order of their requests: uuid, name, state, address, compute '
            'and time of the request. Instances that wait in a queue are included. An instance whose host is silent is '
            'shown as `unknown`, with the state that the host reported last.',
            cli_options.parse_nothing, _list_instances, {**LISTING_OPTIONS, **FILTERS}, (4, 5),
            example='eschedule list', find_problems=_find_list_problems),
    Command('show', 'show <id>…', 'show all details of an instance',
            'Show all details of an instance: what was requested, where it is, its interfaces, when it reached each '
            'stage, and any problem. With -f json: its record, as stored in etcd. --timeline draws the duration of '
            'each stage of its last boot as a bar, in seconds. Boots after the first have only the stages started, '
            'addressed and ready. The times of the first two stages come from the clock of the machine that ran '
            'eschedule, all others from the clock of the compute. --command prints the command that creates the '
            'instance again, whether it lives, failed or is gone. Its ssh keys and its user-data are written to files '
            'in the current directory that only you can read; a file with other content is not replaced. stderr lists '
            'what the command lacks: what the configuration of its host decided and, once the request is gone, the '
            'ssh keys, the user-data and the policy of the group.',
            cli_options.parse_instances, _show, select_options('format columns no_header wide view'), (4, 5),
            example='eschedule show web1 -f json', find_problems=_find_view_problems),
    Command('why', 'why <id>…', 'explain why an instance is on its compute',
            'Explain why an instance is on its compute: what was requested, how many computes had room, in which order '
            'they were tried, and where the other members of its group are. For an instance in a queue: since when it '
            'has waited, how many requests are before it, and what each compute that takes queued requests lacks.',
            cli_options.parse_instances, _print_why, DOCUMENT_OPTIONS, (4, 5), example='eschedule why web1'),
    Command('wait', 'wait [<id>…]', 'wait until an instance has its address',
            'Wait until each instance has its address, and print the address. With --for, wait for another stage. '
            'After a start or a reboot, the command waits for the stage of the new boot; while a guest is off, for the '
            'stage of its next boot. A line on the terminal shows what the instance waits for. If the stage can no '
            'longer be reached, the command returns early: with 1 if the instance failed, with 4 if it is being '
            'destroyed, with 6 if its host is silent.',
            cli_options.parse_any_instances, _wait, {**select_options('stage timeout format'), **SELECTORS}, (4, 5, 6),
            find_problems=find_conflicts, example='eschedule wait web1 --for ready --timeout 120'),
    Command('stack', 'stack [STACK…]', 'list stacks, and who applied them',
            'List all stacks, or the given ones: how many of their instances are in which state, and which file was '
            'applied last, by whom, where and when. An apply that changed nothing does not count. `eschedule apply` '
            'makes a stack, and `eschedule list --stack` lists its instances.',
            cli_options.parse_any_names, _list_stacks, LISTING_OPTIONS, (4,), example='eschedule stack shop'),
    Command('ui', 'ui', 'show a live page of the cluster in a browser',
            'Serve a live page of hosts, instances, findings, queues and the last events, on this machine only, and '
            'print its address, which has a random token. The page changes nothing. It ends with this command: at '
            'Ctrl-C, or when the terminal is closed (exit 0).',
            cli_options.parse_nothing, _serve_page, select_options('port'), example='eschedule ui --port 8000'),
)
