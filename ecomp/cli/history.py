"""Explain placements (`why`), draw how long stages took (`timeline`), and print `events`.

A stage lasts from the time of the stage before it to its own; later boots have only the stages of a boot. The first two
stages are timed by the clock of eschedule's machine, the others by the compute's, so a duration may be negative.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from ecomp.cli.command import Command, Context, plain
from ecomp.cli.options import JSON, TABLE, any_instances
from ecomp.cli.tables import LEAST, Column, Listing, Look, Row, rendered, short_uuids
from ecomp.cli.terminal import now
from ecomp.errors import NotFound, UsageError
from ecomp.model.boots import STAGES as BOOT_STAGES
from ecomp.model.boots import Boot, numbered
from ecomp.model.choose import FIRST, PACK, QUEUE, RANDOM, SPREAD, Why
from ecomp.model.group import AFFINITY, Group
from ecomp.model.host import Computes, silent_cure
from ecomp.model.json_object import dump
from ecomp.model.record import ERROR, STAGES, Record
from ecomp.model.text import printable

if TYPE_CHECKING:
    from ecomp.model.events import Event
    from ecomp.placement.client import Placement
    from ecomp.scheduler.looking.find import InstanceEntries
    from ecomp.scheduler.placing.enqueue import Waiting
    from ecomp.store.client import Store
    from ecomp.store.history import History

MEANINGS = {
    SPREAD: 'the emptiest first',
    PACK: 'the fullest that it fits on first',
    RANDOM: 'any of them',
    FIRST: "in placement's own order",
}
WIDTH = 60
# Characters of a line beside its bar: the stage, the seconds, and a | on either side.
BESIDE = 23
PERCENTILES = {'p50': 0.5, 'p95': 0.95}
TOTAL = 'total'
# Instances whose names are remembered at most; events of others without a name show their uuid.
NAMES = 10_000


# Why an instance is on its compute: its query, how the compute was chosen, and its group


@dataclass(frozen=True)
class Explanation:
    """Why an instance is on its compute; `group` is its current group, None without one."""

    record: Record
    known: Computes
    weighed: Why | None
    group: Group | None
    waiting: Waiting | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def why(store: Store, placement: Callable[[], Placement], found: InstanceEntries) -> Explanation:
    """Read why the instance is on its compute or, if it waits in a queue, why none takes it.

    Only the latter calls `placement` and asks it. Raises Unreadable for the group, and the errors of etcd.
    """
    from ecomp.scheduler.looking.hosts import computes, read_names_by_instance
    from ecomp.store.sharing import group

    record, request, name = found.record, found.request, found.group
    choice = record.why or (request.why if request else None)
    its_group, known_computes = group(store, name)[0] if name else None, computes(store)
    queue_wait = None
    if found.queue_entry is not None:
        from ecomp.scheduler.placing.enqueue import waiting

        other_members = None if its_group is None else its_group.without(record.instance)
        queue_wait = waiting(store, placement(), found.queue_entry, record.query, known_computes, other_members)
    names = read_names_by_instance(store) if its_group is not None else {}
    return Explanation(record, known_computes, choice, its_group, queue_wait, names)


def explanation_to_dict(found: Explanation) -> dict[str, Any]:
    record, choice, its_group = found.record, found.weighed, found.group
    document = {field: getattr(record, field) for field in ('instance', 'compute', 'query')}
    document['host'] = found.known.host(record.compute)
    membership = None if its_group is None else {**its_group.membership._asdict(), 'others': _others(found)}
    queue_wait = _waits(found) if found.waiting else None
    return {**document, 'why': choice._asdict() if choice else None, 'group': membership, 'waits': queue_wait}


def _others(found: Explanation) -> dict[str, str]:
    """Return the other members of the group, each with its compute."""
    members = {} if found.group is None else found.group.members
    return {instance: compute for instance, compute in members.items() if instance != found.record.instance}


def in_sentences(found: Explanation) -> str:
    """Return an explanation as printable text, a sentence a line."""
    record, choice, its_group, naming = found.record, found.weighed, found.group, found.known
    name, stage = record.name or record.instance, 'requested' if found.waiting else 'scheduled'
    since_text = f'since {record.stages.get(stage, "some time")}'
    if record.error is not None:
        error = record.error
        where = f'on {naming.called(record.compute)} ' if record.compute else ''
        lines = [f'{name} is in error {where}at stage {error.stage}: {error.reason} ({error.cleaned})']
    elif found.waiting is None:
        lines = [f'{name} is on {naming.called(record.compute)}, {since_text}']
    else:
        before = found.waiting.before
        behind = f'behind {before} other{"s" * (before > 1)}' if before else 'and is the next of it'
        lines = [f'{name} waits in the queue of flavor {found.waiting.flavor} {since_text}, {behind}']
    if record.query:
        lines.append(f'it asked for {record.query}')
    lines += [_weighed(choice)] if found.waiting is None else _lacking(found.waiting, naming)
    if its_group is not None:
        rule = 'with' if its_group.policy == AFFINITY else 'apart from'
        others = ((found.names.get(key, key), naming.called(on) or 'none yet') for key, on in _others(found).items())
        where = ', '.join(f'{name} on {host}' for name, host in others) or 'nobody else is in it'
        lines.append(f'it is in group {its_group.name} ({its_group.rule}), {rule} its others: {where}')
    return '\n'.join(map(printable, lines))


def _lacking(waits: Waiting, known: Computes) -> list[str]:
    """Return why no compute has taken the instance from its queue, a sentence each."""
    if waits.taker is not None:
        return [f'{known.called(waits.taker)} is taking it']
    if waits.is_flavorless:
        return ['its flavor is not there, and nobody takes it: eschedule flavor set it again, or eschedule destroy it']
    if waits.claimed_on is not None:
        host = known.called(waits.claimed_on)
        if waits.claimed_on in known.living:
            return [f'{host} has the claim of a dead attempt: in 2 minutes {host} takes this, or releases that claim']
        return [f'claimed on {host}, which is silent and may be running it. Fix: {silent_cure(host)}']
    lines = [f'{known.called(compute)}: {shortage}' for compute, shortage in waits.lacks.items()]
    for host in sorted(map(known.called, known.remembered.keys() - known.living.keys())):
        restriction = 'until it is back or forgotten, a compute that did not see this request come leaves it alone'
        lines.append(f'{host} is silent: {restriction}')
    if waits.unknown is not None:
        lines.append(f'what each compute that takes from queues lacks could not be found out: {waits.unknown}')
    return [known.no_taker] if known.no_taker else lines


def _waits(found: Explanation) -> dict[str, object]:
    waits, naming = found.waiting, found.known
    assert waits is not None
    lacks = [{'compute': key, 'host': naming.host(key), 'lacks': text} for key, text in waits.lacks.items()]
    since = found.record.stages.get('requested')
    fields = {name: getattr(waits, name) for name in ('flavor', 'before', 'taker', 'claimed_on')}
    return {**fields, 'since': since, 'computes': lacks}


def _weighed(weighed: Why | None) -> str:
    if weighed is None:
        return 'how its compute was chosen is not known: an older or another client asked for it'
    if weighed.weigh == QUEUE:
        return 'it waited in a queue, and this compute took it by itself: of those with room the idlest goes first'
    meaning = MEANINGS.get(weighed.weigh, '')
    prefix = f'{weighed.of} compute{" could" if weighed.of == 1 else "s could"} have taken it then'
    if weighed.weight is None:
        return f'{prefix}; {weighed.weigh} ({meaning}) was asked for'
    return f'{prefix}; {weighed.weigh} ({meaning}) was asked for, and this one weighed {weighed.weight:g}'


# How long each stage of an instance took: bars on one scale, and percentiles


class StageTime(NamedTuple):
    """A stage: its time, seconds since the first stage, seconds it took or None for the first."""

    stage: str
    time: str
    at: float
    took: float | None


class Timeline(NamedTuple):
    """The stages of one boot, `error` last after a failure; `boot` is None if there is none."""

    record: Record
    boot: Boot | None
    stages: Sequence[StageTime]


def timeline(record: Record, number: int | None = None) -> Timeline:
    """Return the timeline of an instance for the boot with this number, by default the last."""
    boot = numbered(record.known_boots, number)
    stages = record.stages if boot is None else boot.stages
    if boot is not None and boot.number == 1:
        stages = {**{name: time for name, time in record.stages.items() if name not in BOOT_STAGES}, **stages}
    candidates = [(stage, _seconds(stages[stage])) for stage in (*STAGES, ERROR) if stage in stages]
    times = [(stage, seconds) for stage, seconds in candidates if seconds is not None]
    first = previous = times[0][1] if times else 0.0
    stage_times = []
    for number, (stage, seconds) in enumerate(times):
        stage_times.append(StageTime(stage, stages[stage], seconds - first, seconds - previous if number else None))
        previous = seconds
    return Timeline(record, boot, stage_times)


def percentiles(timelines: Sequence[Timeline]) -> dict[str, dict[str, float]]:
    """Return by stage {"instances": how many reached it, "p50": seconds, …}, by nearest rank.

    `total` is the time from the first stage to the last one that any instance has reached.
    """
    samples: dict[str, list[float]] = {stage: [] for stage in (*STAGES, ERROR)}
    for boot_timeline in timelines:
        for stage in boot_timeline.stages:
            if stage.took is not None:
                samples[stage.stage].append(stage.took)
    last = next((stage for stage in reversed(STAGES) if samples[stage]), None)
    samples[TOTAL] = [stage.at for boot_timeline in timelines for stage in boot_timeline.stages if stage.stage == last]
    return {
        stage: {'instances': len(times), **{name: _percentile(times, part) for name, part in PERCENTILES.items()}}
        for stage, times in samples.items()
        if times
    }


def drawn(records: Sequence[Record], look: Look, number: int | None = None) -> str:
    """Draw the stages of each record's boot (default: the last) as bars, and percentiles."""
    timelines = [timeline(item, number) for item in records]
    longest = max((stage.at for boot_timeline in timelines for stage in boot_timeline.stages), default=0.0)
    width = WIDTH if look.width is None else max(look.width - BESIDE, LEAST)
    short_names = {} if look.width is None else short_uuids(record.instance for record in records)
    labels = [short_names.get(record.instance, record.instance) for record in records]
    parts = [_bars(label, item, longest, width) for label, item in zip(labels, timelines, strict=True)]
    end = _words(longest)
    parts[-1] += f'\n{"":21}0 s{end:>{width - 1}}'
    if len(records) > 1:
        columns = [Column(name) for name in ('STAGE', 'INSTANCES', *(name.upper() for name in PERCENTILES))]
        rows = [
            Row((stage, int(values['instances']), *(_words(values[name]) for name in PERCENTILES)))
            for stage, values in percentiles(timelines).items()
        ]
        parts.append(rendered(Listing(columns, rows), Look(width=look.width)))
    return '\n\n'.join(parts)


def _bars(called: str, shown: Timeline, longest: float, width: int) -> str:
    record, boot, stages = shown
    first = printable(f'  {stages[0].stage} {stages[0].time}') if stages else ''
    is_later = boot is not None and boot.number > 1
    boot_text = printable(f'  boot {boot.number}, {boot.reason}') if boot is not None and is_later else ''
    lines = [f'{called}  {record.state}{boot_text}{first}']
    times = {time.stage: time for time in stages}
    expected_stages = [stage for stage in STAGES[1:] if not is_later or stage in BOOT_STAGES[1:]]
    for stage in (*expected_stages, *([ERROR] if ERROR in times else [])):
        if stage not in times:
            lines.append(f'{stage:9}{"-":>10}')
        elif (took := times[stage].took) is not None:
            bar = _bar(times[stage].at - took, times[stage].at, longest, width)
            lines.append(f'{stage:9}{_words(took):>10}  |{bar:{width}}|')
    return '\n'.join(lines)


def _bar(begin: float, end: float, longest: float, width: int) -> str:
    """Return at least one '=' at its place on the scale, or '' if it ends before it begins."""
    if end < begin or longest <= 0:
        return ''
    left = min(max(int(begin / longest * width), 0), width - 1)
    right = min(max(round(end / longest * width), left + 1), width)
    return ' ' * left + '=' * (right - left)


def timeline_to_dict(records: Sequence[Record], number: int | None = None) -> dict[str, Any]:
    """Return the timelines and percentiles for JSON, with seconds rounded to milliseconds."""
    timelines = [timeline(item, number) for item in records]

    def as_dict(each: StageTime) -> dict[str, object]:
        took = None if each.took is None else round(each.took, 3)
        return {'stage': each.stage, 'time': each.time, 'at': round(each.at, 3), 'seconds': took}

    instances = []
    for record, boot, stages in timelines:
        fields = {'instance': record.instance, 'state': record.state}
        boot_fields = {'boot': boot.number if boot else None, 'reason': boot.reason if boot else None}
        instances.append({**fields, **boot_fields, 'stages': list(map(as_dict, stages))})
    rounded = {
        stage: {name: round(value, 3) for name, value in row.items()} for stage, row in percentiles(timelines).items()
    }
    return {'instances': instances, 'percentiles': rounded}


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]


def _seconds(time: str) -> float | None:
    try:
        when = datetime.fromisoformat(time)
    except ValueError:
        return None  # the client that wrote the request can write anything here
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _words(seconds: float) -> str:
    return f'{seconds:.3f} s'


# Past events, as far back as etcd keeps them, and new ones


def _events(do: Context) -> int:
    from ecomp.model.events import as_object
    from ecomp.scheduler.looking.find import resolve
    from ecomp.store.history import History

    if do.form not in (TABLE, JSON):
        raise UsageError(f'-f {do.form} is one document, and events are told one by one: say table or json')
    words = {resolve(do.store, word): word for word in do.words}
    unseen = set(words)
    last, watches = do.options.lines, do.options.watch
    formatter = Lines()
    next_revision = 1

    def lines(follow: bool, first: int = 1) -> Iterator[str]:
        nonlocal next_revision
        history = History(do.config.etcd, follow, do.out.say, first)
        try:
            for event in _told(do, history):
                if not words or event.instance in words:
                    unseen.discard(event.instance)
                    yield dump(as_object(event)) if do.form == JSON else formatter.line(event)
            next_revision = history.upcoming
        finally:
            history.close()

    try:
        if last is not None:  # the last lines are known only after the whole past was read
            _put(do, deque(lines(False), last))
        if watches or last is None:
            _put(do, lines(watches, next_revision))
    except KeyboardInterrupt:
        if not watches:
            raise
        return 0
    if unseen:
        raise NotFound(', '.join(words[uuid] for uuid in sorted(unseen)) + ': nothing of it is in what etcd keeps')
    return 0


def _put(do: Context, lines: Iterable[str]) -> None:
    for line in lines:
        if do.form == JSON:
            do.out.put(line)
        else:
            do.put_lines([line])


def _told(do: Context, history: History) -> Iterator[Event]:
    from ecomp.model import keys
    from ecomp.model.events import told
    from ecomp.scheduler.looking.hosts import computes

    known_computes = computes(do.store)

    def host(compute: str) -> str:
        return known_computes.called(compute)

    is_reported = history.upcoming > 1  # the events before these were printed already
    for changes in history:
        if not is_reported:
            _say_since(do, history.since)
            is_reported = True
        if not history.is_past and any(change.key.startswith(keys.COMPUTES) for change in changes):
            known_computes = computes(do.store)
        yield from told(changes, host, '' if history.is_past else now())
    if not is_reported:
        _say_since(do, history.since)


def _say_since(do: Context, since: int) -> None:
    part = '' if do.options.lines is None else f'the last {do.options.lines} of '
    extent = 'all that ever happened' if since == 1 else f'what happened since revision {since}; etcd keeps no more'
    do.out.say(part + extent)


class Lines:
    """Formats events; an event without a name shows the last known name of its instance."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._last = ''

    def line(self, event: Event) -> str:
        """Return the line of an event; a time with a ~ is the previous event's, as this has none."""
        has_time = bool(event.time)
        self._last = event.time or self._last
        if event.name and (event.instance in self._names or len(self._names) < NAMES):
            self._names[event.instance] = event.name
        subject = event.name or self._names.get(event.instance) or event.instance
        time_text = f'{self._last:24}' + (' ' if has_time else '~')
        return printable(f'{time_text} {subject}: {event.says}' if subject else f'{time_text} {event.says}')


_FORM = 'table or json, which is one JSON object a line. Without: table'

# fmt: off
COMMANDS: Sequence[Command] = (
    Command('events', 'events [<id>…]', 'what happened, and with --watch what happens',
            'Tell what happened, a line each, oldest first: of all instances, computes, queues, names, groups, quotas '
            'and flavors, or of these instances alone. etcd keeps an hour or two of it, as its '
            '--auto-compaction-retention says; stderr says from which revision on. A time with a ~ is that of the line '
            'before, for etcd writes down no times. With -f json each line is one JSON object, with its revision.',
            any_instances, _events, {**plain('watch'), 'lines': 'the last N changes alone', 'format': _FORM}, (4, 5),
            example='eschedule events web1 -n 20 --watch'),
)
