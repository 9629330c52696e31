"""Explain placements, draw how long stages took, and print events and commands of requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ecomp.cli.command import Command, Context, select_options
from ecomp.cli.options import JSON, TABLE, is_image, parse_any_instances
from ecomp.cli.tables import MIN_COLUMN_WIDTH, OutputStyle, shorten_uuids
from ecomp.errors import Conflict, EcompError, NotFound, UsageError
from ecomp.model import keys
from ecomp.model.boots import STAGES as BOOT_STAGES
from ecomp.model.choose import FIRST, FROM_QUEUE, PACK, RANDOM, SPREAD, PlacementReason
from ecomp.model.group import Group
from ecomp.model.host import Computes, describe_silent_fix, is_hostname
from ecomp.model.json_object import dump, load_object_or_empty
from ecomp.model.order import Order, make_create_words
from ecomp.model.record import Record
from ecomp.model.states import ERROR, STAGES
from ecomp.model.stored import to_dict
from ecomp.model.text import escape_characters, format_time, make_printable, parse_uuid_prefix
from ecomp.model.user_data import parse_shared_user_data
from ecomp.scheduler.queries.computes import read_computes, read_names_by_instance
from ecomp.scheduler.queries.find import InstanceEntries
from ecomp.shared.names import load_group

if TYPE_CHECKING:
    from ecomp.model.events import Event
    from ecomp.placement.client import Placement
    from ecomp.scheduler.placing.enqueue import QueuePosition
    from ecomp.store.client import Store
    from ecomp.store.history import History

WEIGH_MEANINGS = {SPREAD: 'the emptiest first', PACK: 'the fullest first', RANDOM: 'in random order'}
WEIGH_MEANINGS |= {FIRST: "in placement's own order"}
MAX_BAR_WIDTH = 60
# Characters of a line beside its bar: the stage, the seconds, and a | on either side.
BAR_MARGIN = 23
# Instances whose names are remembered at most: events of others without a name show their uuid. With --since, also the
# events without a time that may precede the first one with a time.
MAX_REMEMBERED = 10_000
# The endings of the files that `show --command` writes, by option.
SUFFIXES = {'--ssh-key': '.pub', '--user-data': '.user-data'}


@dataclass(frozen=True)
class Explanation:
    """Why an instance is on its compute or, with a `position`, why it is still in its queue."""

    record: Record
    computes: Computes
    choice: PlacementReason | None
    group: Group | None
    position: QueuePosition | None = None
    instance_names: Mapping[str, str] = field(default_factory=dict)

    @property
    def other_members(self) -> Mapping[str, str]:
        """The compute of each other member of its group."""
        return self.group.without_members(self.record.instance).members if self.group else {}


def explain_placement(store: Store, placement: Callable[[], Placement], entries: InstanceEntries) -> Explanation:
    """Read why the instance is on its compute or, if it is in a queue, why none takes it."""
    record, request, name = entries.record, entries.request, entries.record.group_name
    choice = record.why or (request.why if request else None)
    group, computes = load_group(store, name)[0] if name else None, read_computes(store)
    position = None
    if entries.queue_entry is not None:
        from ecomp.scheduler.placing.enqueue import read_queue_position

        other_members = None if group is None else group.without_members(record.instance)
        position = read_queue_position(store, placement(), entries.queue_entry, record.query, computes, other_members)
    names = read_names_by_instance(store) if group is not None else {}
    return Explanation(record, computes, choice, group, position, names)


def explanation_to_dict(explanation: Explanation) -> dict[str, Any]:
    record, choice, group, naming = explanation.record, explanation.choice, explanation.group, explanation.computes
    membership = group and {**group.membership._asdict(), 'others': explanation.other_members}
    document = {field: getattr(record, field) for field in ('instance', 'compute', 'query')}
    document |= {'host': naming.find_hostname(record.compute), 'why': choice and to_dict(choice), 'group': membership}
    position = explanation.position
    if position is None:
        return {**document, 'waits': None}
    lacks = [{'compute': key, 'host': naming.find_hostname(key), 'lacks': text} for key, text in position.lacks.items()]
    fields = {name: getattr(position, name) for name in ('flavor', 'before', 'taker', 'claimed_on')}
    return {**document, 'waits': {**fields, 'since': record.stages.get('requested'), 'computes': lacks}}


def format_explanation(explanation: Explanation) -> str:
    """Return an explanation as text for a terminal, a sentence a line."""
    record, choice, its_group, naming = explanation.record, explanation.choice, explanation.group, explanation.computes
    name, position = record.name or record.instance, explanation.position
    since_text = f'since {record.stages.get("requested" if position else "scheduled", "an unknown time")}'
    if (error := record.error) is not None:
        where = f'on {naming.format_name(record.compute)} ' if record.compute else ''
        lines = [f'{name} is in error {where}at stage {error}']
    elif position is None:
        lines = [f'{name} is on {naming.format_name(record.compute)}, {since_text}']
    else:
        before = position.before
        behind = f'behind {before} other{"s" * (before > 1)}' if before else 'and is next'
        lines = [f'{name} has waited in the queue of flavor {position.flavor} {since_text}, {behind}']
    if record.query:
        lines.append(f'it requested {record.query}')
    lines += [_explain_choice(choice)] if position is None else _explain_position(position, naming)
    if its_group is not None:
        others = (
            (explanation.instance_names.get(key, key), f'on {naming.format_name(on)}' if on else 'in a queue')
            for key, on in explanation.other_members.items()
        )
        where = ', '.join(f'{name} {place}' for name, place in others) or 'none'
        lines.append(f'it is in group {its_group.name} ({its_group.rule}); the other members: {where}')
    return '\n'.join(map(make_printable, lines))


def _explain_position(position: QueuePosition, naming: Computes) -> list[str]:
    if position.taker is not None:
        return [f'{naming.format_name(position.taker)} is taking the request']
    if position.is_flavorless:
        problem = f'flavor {position.flavor} does not exist, so no compute takes the request'
        return [f'{problem}. Fix: create the flavor again with `eschedule flavor set`, or destroy the instance']
    if position.claimed_on is not None:
        host = naming.format_name(position.claimed_on)
        if position.claimed_on in naming.living:
            outcome = f'within 2 minutes {host} takes the request or releases the claim'
            return [f'an earlier attempt to take the request left a claim on {host}: {outcome}']
        return [f'it is claimed on {host}, which is silent and may be running it. Fix: {describe_silent_fix(host)}']
    lines = [f'{naming.format_name(compute)}: {shortage}' for compute, shortage in position.lacks.items()]
    for host in sorted(map(naming.format_name, naming.stored_hostnames.keys() - naming.living.keys())):
        condition = 'that began to use this etcd (first contact or --accept-new-etcd) after the request was queued'
        lines.append(f'{host} is silent: until {host} is back or forgotten, no compute {condition} takes the request')
    if position.unknown_reason is not None:
        lines.append(f'it is unknown what each compute lacks: {position.unknown_reason}')
    return [str(naming.no_taker_reason)] if naming.no_taker_reason else lines


def _explain_choice(choice: PlacementReason | None) -> str:
    if choice is None:
        return 'it is unknown how its compute was chosen: the request came from an older eschedule or another client'
    if choice.weigh == FROM_QUEUE:
        rule = 'of the computes with room, the least used one takes a request first'
        return f'it waited in a queue, and this compute took the request: {rule}'
    meaning = WEIGH_MEANINGS.get(choice.weigh, '')
    had = f'{choice.of} compute{"" if choice.of == 1 else "s"} had room'
    prefix = f'when it was placed, {had}; the order was {choice.weigh} ({meaning})'
    if choice.troubled:
        prefix = f'{prefix}; the chosen compute reported that it could not build, and no other one had room'
    if choice.weight is None:
        return prefix
    image = '; it was preferred to equal ones, because it had the image' if choice.has_image else ''
    return f'{prefix}, and the chosen compute had weight {choice.weight:g} (0 to 1, the highest is best){image}'


def timeline_to_dict(record: Record) -> dict[str, Any]:
    """Return the last boot and its stages for JSON.

    Boot 1 includes the stages before it. Without a boot, the stages are those of the record.
    """
    boot = record.last_boot
    stages = record.stages if boot is None else boot.stages
    if boot is not None and boot.number == 1:
        stages = {**{name: time for name, time in record.stages.items() if name not in BOOT_STAGES}, **stages}
    candidates = [(stage, _parse_epoch_seconds(stages[stage])) for stage in (*STAGES, ERROR) if stage in stages]
    times = [(stage, seconds) for stage, seconds in candidates if seconds is not None]
    # eschedule's clock times the first two stages, the compute's clock the others: a duration may be negative.
    rows = [
        {
            'stage': stage,
            'time': stages[stage],
            'at': round(seconds - times[0][1], 3),
            'seconds': round(seconds - times[index - 1][1], 3) if index else None,
        }
        for index, (stage, seconds) in enumerate(times)
    ]
    boot_fields = {'boot': boot.number if boot else None, 'reason': boot.reason if boot else None}
    return {'instance': record.instance, 'state': record.state, **boot_fields, 'stages': rows}


def draw_timeline(record: Record, style: OutputStyle) -> str:
    """Draw the last boot: a heading with its first stage, and a line for each other stage."""
    timeline = timeline_to_dict(record)
    stages = {stage['stage']: stage for stage in timeline['stages']}
    scale_seconds = max((stage['at'] for stage in stages.values()), default=0.0)
    width = MAX_BAR_WIDTH if style.width is None else max(style.width - BAR_MARGIN, MIN_COLUMN_WIDTH)
    label = record.instance if style.width is None else shorten_uuids([record.instance])[record.instance]
    is_later = (timeline['boot'] or 0) > 1
    heading = [f'{label}  {record.state}', f'boot {timeline["boot"]}, {timeline["reason"]}' if is_later else '']
    heading += [f'{stage["stage"]} {stage["time"]}' for stage in timeline['stages'][:1]]
    lines = [make_printable('  '.join(filter(None, heading)))]
    expected_stages = [stage for stage in STAGES[1:] if not is_later or stage in BOOT_STAGES[1:]]
    for name in (*expected_stages, *([ERROR] if ERROR in stages else [])):
        if name not in stages:
            lines.append(f'{name:9}{"-":>10}')
        elif (took := stages[name]['seconds']) is not None:
            bar = _draw_bar(stages[name]['at'] - took, stages[name]['at'], scale_seconds, width)
            lines.append(f'{name:9}{took:>8.3f} s  |{bar:{width}}|')
    lines.append(f'{"":21}0 s{scale_seconds:>{width - 3}.3f} s')
    return '\n'.join(lines)


def _draw_bar(begin: float, end: float, scale_seconds: float, width: int) -> str:
    if end < begin or scale_seconds <= 0:
        return ''
    left = min(max(int(round(begin / scale_seconds * width, 3)), 0), width - 1)  # the seconds are rounded
    return ' ' * left + '=' * (min(max(round(end / scale_seconds * width), left + 1), width) - left)


def _parse_epoch_seconds(time: str) -> float | None:
    try:
        when = datetime.fromisoformat(time)
    except ValueError:
        return None  # the client that wrote the request can write anything here
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def print_timeline(ctx: Context, record: Record) -> int:
    if ctx.form == TABLE:
        ctx.draw(draw_timeline(record, ctx.style))
    ctx.show_document([timeline_to_dict(record)])  # nothing for a table
    return 0


def _print_events(ctx: Context) -> int:
    from ecomp.model.events import event_to_dict
    from ecomp.store.history import History

    if ctx.form not in (TABLE, JSON):
        problem = f'-f {ctx.form} is not accepted by this command: events are printed one by one'
        raise UsageError(f'{problem}. Fix: give -f table or -f json')
    selection = _Selection(ctx.words, ctx.resolve_compute(ctx.options.host) if ctx.options.host else '')
    last, watches, since = ctx.options.lines, ctx.options.watch, ctx.options.since
    put = ctx.out.put if ctx.form == JSON else lambda line: ctx.put_lines([line])
    formatter = EventFormatter()
    next_revision = 1

    def read_events(follow: bool, first: int = 1) -> Iterator[tuple[str, str]]:
        """Yield the time and the line of each selected event."""
        nonlocal next_revision
        history = History(ctx.config.etcd, follow, ctx.out.say, first)
        try:
            for event in _read_events(ctx, history):
                if selection.match(event, formatter.remember_name(event)):
                    yield event.time, dump(event_to_dict(event)) if ctx.form == JSON else formatter.format_line(event)
            next_revision = history.next_revision
        finally:
            history.close()

    try:
        # The last lines are known once the whole past was read.
        past = read_events(False)
        if since is not None:
            past = _select_since(past, format_time(datetime.now(UTC) - timedelta(seconds=since)))
        for _, line in past if last is None else deque(past, last):
            put(line)
        for _, line in read_events(True, next_revision) if watches else ():
            put(line)
    except KeyboardInterrupt:
        if not watches:
            raise
        return 0
    if selection.unmatched_words:
        raise NotFound(', '.join(sorted(selection.unmatched_words)) + ': no event in the history that etcd keeps')
    return 0


class _Selection:
    """A selection of events by `words`, unless there are none, and by `host`, unless it is ''."""

    def __init__(self, words: Sequence[str], host: str) -> None:
        self._prefixes = {word: parse_uuid_prefix(word) or '-' for word in words}  # no uuid begins with -
        self._host = host
        self.unmatched_words = set(words)

    def match(self, event: Event, name: str) -> bool:
        """Return whether an event is selected, and remove its words from `unmatched_words`."""
        uuid = event.instance
        words = {word for word, start in self._prefixes.items() if word in (name, uuid) or uuid.startswith(start)}
        self.unmatched_words -= words
        return bool(words or not self._prefixes) and self._host in ('', event.compute)


def _select_since(events: Iterator[tuple[str, str]], since: str) -> Iterator[tuple[str, str]]:
    """Yield the events from an ISO time on, and events without a time just before them."""
    undated = deque[tuple[str, str]](maxlen=MAX_REMEMBERED)
    for event in events:
        if event[0] and event[0] < since:
            undated.clear()
            continue
        undated.append(event)
        if event[0]:
            break
    yield from undated
    yield from events


def _read_events(ctx: Context, history: History) -> Iterator[Event]:
    """Yield the events of a history, and first print how far back it goes."""
    from ecomp.model.events import make_events

    computes = read_computes(ctx.store)
    is_reported = history.next_revision > 1  # the events before these were printed already
    for changes in history:
        if not is_reported:
            _print_extent(ctx, history.oldest_revision)
            is_reported = True
        presences = {keys.get_last_part(each.key): each.after for each in changes if each.key.startswith(keys.COMPUTES)}
        if presences and not history.is_past:
            computes = read_computes(ctx.store)
        computes = _add_hostnames(computes, presences)
        yield from make_events(changes, computes.format_name)
    if not is_reported:
        _print_extent(ctx, history.oldest_revision)


def _add_hostnames(computes: Computes, presences: Mapping[str, bytes | None]) -> Computes:
    names = {compute: load_object_or_empty(value or b'').get('hostname') for compute, value in presences.items()}
    new = {key: str(name) for key, name in names.items() if is_hostname(name) and not computes.find_hostname(key)}
    return replace(computes, stored_hostnames={**computes.stored_hostnames, **new}) if new else computes


def _print_extent(ctx: Context, oldest_revision: int) -> None:
    part = '' if ctx.options.lines is None else f'the last {ctx.options.lines} of '
    extent = f'the events since revision {oldest_revision}; etcd keeps no older ones'
    ctx.out.say(f'printing {part}{"all events" if oldest_revision == 1 else extent}')


class EventFormatter:
    """Formats events in their order, each with the last known name of its instance."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._instances: dict[str, set[str]] = {}

    def remember_name(self, event: Event) -> str:
        """Remember and return the name of an event's instance, '' if it is unknown.

        Call it for each event, in their order, even for events that are not printed.
        """
        name, instance = event.name, event.instance
        if name and instance and (instance in self._names or len(self._names) < MAX_REMEMBERED):
            self._names[instance] = name
            self._instances.setdefault(name, set()).add(instance)
        return name or self._names.get(instance, '')

    def format_line(self, event: Event) -> str:
        name, when = self.remember_name(event), event.time or f'revision {event.revision}'
        is_ambiguous = len(self._instances.get(name, ())) > 1 and event.instance[:8] not in event.says
        subject = f'{name} ({event.instance[:8]})' if is_ambiguous else name or event.instance
        by = f', by {event.by}' if event.by else ''
        return make_printable(f'{when:24} {subject}: {event.says}{by}' if subject else f'{when:24} {event.says}{by}')


def print_command(ctx: Context, entries: InstanceEntries) -> int:
    """Print the command that creates an instance again, and write its keys and user-data."""
    import shlex  # imported here, as the next one: seldom needed

    instance = entries.record.instance
    order, why = entries.order or entries.record, entries.record.why
    query, image = order.query or '', order.image or ''
    if order.is_adopted:
        raise Conflict(f'{instance}: was adopted, and no command creates it')
    # Pasted, another query would be an option or a command: their writer may have written anything.
    if '=' not in query or not is_image(image) or '-' in (query[0], image[0]):
        raise Conflict(f'{instance}: etcd has no valid query and image of it, so no command can create it again')
    contents, unknown = _read_guest_data(ctx.store, entries, order)
    files = {option: Path(f'again-{order.name or instance[:8]}{SUFFIXES[option]}') for option in contents}
    command = [*shlex.split(ctx.command_prefix), *_list_order_words(ctx, order)]
    command += [word for option, path in files.items() for word in (option, str(path))]
    if why is not None and why.weigh in WEIGH_MEANINGS:
        command += ['--weigh', why.weigh]
    else:
        unknown.append('--weigh is unknown: it is recorded only if eschedule has chosen the compute')
    _write_new_files({path: contents[option] for option, path in files.items()})
    set_note = f'it is one of a set of {order.count}: the command creates one instance' if order.count > 1 else ''
    stack_note = f'`eschedule apply` recreates it in its stack {order.stack.name}' if order.stack else ''
    for line in filter(None, [*unknown, set_note, stack_note]):
        ctx.out.say(make_printable(f'{instance}: {line}'))
    if ctx.form == TABLE:
        ctx.out.put(escape_characters(shlex.join(command)))  # not folded, so that a shell can read it
    ctx.show_document([{'command': command, 'files': list(map(str, files.values())), 'unknown': unknown}])
    return 0


def _list_order_words(ctx: Context, order: Order) -> list[str]:
    from ecomp.model.query import split_restriction

    query, compute = split_restriction(order.query or '')
    project = '' if order.project_id == ctx.config.project_id else order.project_id
    words = make_create_words(Order(**order.copy_fields(query=query, project_id=project)))
    host = ctx.name_computes().format_name(compute) if compute else ''
    return [*words, '--on', compute if ' ' in host else host] if compute else words


def _write_new_files(contents: Mapping[Path, bytes]) -> None:
    from ecomp.files import write_durably

    try:
        for path, content in contents.items():
            if path.exists() and path.read_bytes() != content:
                raise Conflict(f'{path} exists with other content. Fix: move it away, or change to another directory')
            write_durably(path, content)
    except OSError as error:
        raise EcompError(f'{error.filename}: {error.strerror}. Fix: change to a directory of your own') from error


def _read_guest_data(store: Store, entries: InstanceEntries, order: Order) -> tuple[dict[str, bytes], list[str]]:
    """Return ssh keys and user-data by option, and a sentence on each fact that is unknown."""
    is_requested = entries.order is not None and not entries.is_destroying
    why = 'the mdserver.conf of its host gives the defaults' if is_requested else 'its request is gone'
    ssh_keys, user_data = ''.join(f'{key}\n' for key in order.ssh_keys or ()).encode(), order.user_data
    unknown = [] if ssh_keys else [f'its ssh keys are unknown: {why}']
    if user_data is None and order.user_data_sha256 is not None:
        entry, why = store.get(keys.user_data(order.user_data_sha256)), 'etcd does not have it any more'
        with suppress(ValueError):
            user_data = parse_shared_user_data(entry.value, order.user_data_sha256) if entry else None
    unknown += [] if user_data else [f'its user-data is unknown: {why}']
    if order.group and not order.group.policy:
        unknown.append('the policy of its group is unknown: add --policy unless the group still exists')
    return {option: data for option, data in zip(SUFFIXES, (ssh_keys, user_data), strict=True) if data}, unknown


_FORMAT_HELP = 'output format: table, or json (one JSON object per line). Default: table'

# fmt: off
COMMANDS: Sequence[Command] = (
    Command('events', 'events [<id>…]', 'print past events and, with --watch, new ones',
            'Print what happened to all instances, computes, queues, names, groups, quotas, flavors and stacks, or '
            'only to the given instances, also those that are gone: one event per line, the oldest first, with who '
            'asked for it. Instances of the same name are told apart by the first digits of their uuids. etcd keeps '
            'the events of the last hour or two, depending on the etcd option --auto-compaction-retention; stderr '
            'prints the oldest revision that etcd still has. etcd stores no times: if an event contains no time, its '
            'revision is printed. With -f json each line is one JSON object.',
            parse_any_instances, _print_events,
            {**select_options('watch since'), 'lines': 'print only the last N events',
             'host': 'print only the events on this compute: its uuid or host name', 'format': _FORMAT_HELP}, (4, 5),
            example='eschedule events web1 --since 1h'),
)
