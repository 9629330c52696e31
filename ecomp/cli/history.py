"""What became of instances: why each is on its compute, how long its stages took, and all that happened.

A stage takes from the one before it to itself, by the times in the record. Of a later boot than the first there are
only those that come with each. The first two are told by the clock of eschedule's machine and the others by the
compute's: where those differ a time may be negative, and is shown so.
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
"""Characters of the longest bar where there is no terminal."""
BESIDE = 23
"""Characters of a line beside its bar: the stage, the seconds, and a | on either side."""
PERCENTILES = {'p50': 0.5, 'p95': 0.95}
TOTAL = 'total'
NAMES = 10_000
"""Instances whose names are remembered, at most: what is told of others has their uuid where it says no name."""


# Why an instance is where it is: what was asked for, what was weighed, and who it is with or apart from


@dataclass(frozen=True)
class Explanation:
    """What is known of it. `known` is what computes are called, `names` what instances are, `group` the group now."""

    record: Record
    known: Computes
    weighed: Why | None
    group: Group | None
    waiting: Waiting | None = None
    names: Mapping[str, str] = field(default_factory=dict)


def why(store: Store, placement: Callable[[], Placement], found: InstanceEntries) -> Explanation:
    """Why the instance is on its compute or, while it waits in a queue, on none: then `placement` is asked.

    Errors: those of etcd.
    """
    from ecomp.scheduler.looking.hosts import computes, read_names_by_instance
    from ecomp.store.sharing import group

    record, request, name = found.record, found.request, found.group
    weighed = record.why or (request.why if request else None)
    theirs, known = group(store, name)[0] if name else None, computes(store)
    waits = None
    if found.queue_entry is not None:
        from ecomp.scheduler.placing.enqueue import waiting

        others = None if theirs is None else theirs.without(record.instance)
        waits = waiting(store, placement(), found.queue_entry, record.query, known, others)
    names = read_names_by_instance(store) if theirs is not None else {}
    return Explanation(record, known, weighed, theirs, waits, names)


def explanation_to_dict(found: Explanation) -> dict[str, Any]:
    """What is known of it, as users see it in JSON."""
    record, weighed, theirs = found.record, found.weighed, found.group
    told = {field: getattr(record, field) for field in ('instance', 'compute', 'query')}
    told['host'] = found.known.host(record.compute)
    membership = None if theirs is None else {**theirs.membership._asdict(), 'others': _others(found)}
    waits = _waits(found) if found.waiting else None
    return {**told, 'why': weighed._asdict() if weighed else None, 'group': membership, 'waits': waits}


def _others(found: Explanation) -> dict[str, str]:
    """The other members of its group, and where each is."""
    members = {} if found.group is None else found.group.members
    return {each: on for each, on in members.items() if each != found.record.instance}


def in_sentences(found: Explanation) -> str:
    """What is known of it, in sentences, a line each."""
    record, weighed, theirs, known = found.record, found.weighed, found.group, found.known
    name, since = record.name or record.instance, 'requested' if found.waiting else 'scheduled'
    at = f'since {record.stages.get(since, "some time")}'
    if record.error is not None:
        error = record.error
        where = f'on {known.called(record.compute)} ' if record.compute else ''
        lines = [f'{name} is in error {where}at stage {error.stage}: {error.reason} ({error.cleaned})']
    elif found.waiting is None:
        lines = [f'{name} is on {known.called(record.compute)}, {at}']
    else:
        before = found.waiting.before
        behind = f'behind {before} other{"s" * (before > 1)}' if before else 'and is the next of it'
        lines = [f'{name} waits in the queue of flavor {found.waiting.flavor} {at}, {behind}']
    if record.query:
        lines.append(f'it asked for {record.query}')
    lines += [_weighed(weighed)] if found.waiting is None else _lacking(found.waiting, known)
    if theirs is not None:
        rule = 'with' if theirs.policy == AFFINITY else 'apart from'
        others = ((found.names.get(each, each), known.called(on) or 'none yet') for each, on in _others(found).items())
        where = ', '.join(f'{name} on {host}' for name, host in others) or 'nobody else is in it'
        lines.append(f'it is in group {theirs.name} ({theirs.rule}), {rule} its others: {where}')
    return '\n'.join(map(printable, lines))


def _lacking(waits: Waiting, known: Computes) -> list[str]:
    """Who could take it, and why nobody does."""
    if waits.taker is not None:
        return [f'{known.called(waits.taker)} is taking it']
    if waits.is_flavorless:
        return ['its flavor is not there, and nobody takes it: eschedule flavor set it again, or eschedule destroy it']
    if waits.claimed_on is not None:
        host = known.called(waits.claimed_on)
        if waits.claimed_on in known.living:
            return [f'{host} has the claim of a dead attempt: in 2 minutes {host} takes this, or releases that claim']
        return [f'claimed on {host}, which is silent and may be running it. Fix: {silent_cure(host)}']
    lines = [f'{known.called(compute)}: {lacks}' for compute, lacks in waits.lacks.items()]
    for host in sorted(map(known.called, known.remembered.keys() - known.living.keys())):
        left = 'until it is back or forgotten, a compute that did not see this request come leaves it alone'
        lines.append(f'{host} is silent: {left}')
    if waits.unknown is not None:
        lines.append(f'what each compute that takes from queues lacks could not be found out: {waits.unknown}')
    return [known.no_taker] if known.no_taker else lines


def _waits(found: Explanation) -> dict[str, object]:
    waits, known = found.waiting, found.known
    assert waits is not None
    lacks = [{'compute': each, 'host': known.host(each), 'lacks': said} for each, said in waits.lacks.items()]
    since = found.record.stages.get('requested')
    told = {name: getattr(waits, name) for name in ('flavor', 'before', 'taker', 'claimed_on')}
    return {**told, 'since': since, 'computes': lacks}


def _weighed(weighed: Why | None) -> str:
    if weighed is None:
        return 'how its compute was chosen is not known: an older or another client asked for it'
    if weighed.weigh == QUEUE:
        return 'it waited in a queue, and this compute took it by itself: of those with room the idlest goes first'
    meaning = MEANINGS.get(weighed.weigh, '')
    could = f'{weighed.of} compute{" could" if weighed.of == 1 else "s could"} have taken it then'
    if weighed.weight is None:
        return f'{could}; {weighed.weigh} ({meaning}) was asked for'
    return f'{could}; {weighed.weigh} ({meaning}) was asked for, and this one weighed {weighed.weight:g}'


# How long each stage of an instance took: bars on one scale, and percentiles


class StageTime(NamedTuple):
    """A stage: when, seconds after the first one, and seconds it took (None: it is the first)."""

    stage: str
    time: str
    at: float
    took: float | None


class Timeline(NamedTuple):
    """The stages of one boot of an instance in their order; last, if it failed, `error`. `boot` None: it has none."""

    record: Record
    boot: Boot | None
    stages: Sequence[StageTime]


def timeline(record: Record, number: int | None = None) -> Timeline:
    """The timeline of an instance's boot of this number, the last one for None."""
    boot = numbered(record.known_boots, number)
    stages = record.stages if boot is None else boot.stages
    if boot is not None and boot.number == 1:
        stages = {**{name: time for name, time in record.stages.items() if name not in BOOT_STAGES}, **stages}
    known = [(stage, _seconds(stages[stage])) for stage in (*STAGES, ERROR) if stage in stages]
    times = [(stage, when) for stage, when in known if when is not None]
    first = before = times[0][1] if times else 0.0
    found = []
    for number, (stage, when) in enumerate(times):
        found.append(StageTime(stage, stages[stage], when - first, when - before if number else None))
        before = when
    return Timeline(record, boot, found)


def percentiles(timelines: Sequence[Timeline]) -> dict[str, dict[str, float]]:
    """{stage: {'instances': how many reached it, 'p50': seconds, …}}, by nearest rank.

    `total` is from the first stage to the last one that any of them has reached.
    """
    samples: dict[str, list[float]] = {stage: [] for stage in (*STAGES, ERROR)}
    for each in timelines:
        for stage in each.stages:
            if stage.took is not None:
                samples[stage.stage].append(stage.took)
    last = next((stage for stage in reversed(STAGES) if samples[stage]), None)
    samples[TOTAL] = [stage.at for each in timelines for stage in each.stages if stage.stage == last]
    return {
        stage: {'instances': len(took), **{name: _percentile(took, part) for name, part in PERCENTILES.items()}}
        for stage, took in samples.items()
        if took
    }


def drawn(records: Sequence[Record], look: Look, number: int | None = None) -> str:
    """The stages of each instance's boot of this number, the last one for None, as bars on one scale.

    It is as wide as the terminal. Of several also the percentiles.
    """
    timelines = [timeline(each, number) for each in records]
    longest = max((stage.at for each in timelines for stage in each.stages), default=0.0)
    width = WIDTH if look.width is None else max(look.width - BESIDE, LEAST)
    short = {} if look.width is None else short_uuids(record.instance for record in records)
    called = [short.get(record.instance, record.instance) for record in records]
    parts = [_bars(name, each, longest, width) for name, each in zip(called, timelines, strict=True)]
    end = _words(longest)
    parts[-1] += f'\n{"":21}0 s{end:>{width - 1}}'
    if len(records) > 1:
        columns = [Column(name) for name in ('STAGE', 'INSTANCES', *(name.upper() for name in PERCENTILES))]
        rows = [
            Row((stage, int(each['instances']), *(_words(each[name]) for name in PERCENTILES)))
            for stage, each in percentiles(timelines).items()
        ]
        parts.append(rendered(Listing(columns, rows), Look(width=look.width)))
    return '\n\n'.join(parts)


def _bars(called: str, shown: Timeline, longest: float, width: int) -> str:
    record, boot, stages = shown
    first = printable(f'  {stages[0].stage} {stages[0].time}') if stages else ''
    is_later = boot is not None and boot.number > 1
    which = printable(f'  boot {boot.number}, {boot.reason}') if boot is not None and is_later else ''
    lines = [f'{called}  {record.state}{which}{first}']
    at = {each.stage: each for each in stages}
    of_all = [stage for stage in STAGES[1:] if not is_later or stage in BOOT_STAGES[1:]]
    for stage in (*of_all, *([ERROR] if ERROR in at else [])):
        if stage not in at:
            lines.append(f'{stage:9}{"-":>10}')
        elif (took := at[stage].took) is not None:
            bar = _bar(at[stage].at - took, at[stage].at, longest, width)
            lines.append(f'{stage:9}{_words(took):>10}  |{bar:{width}}|')
    return '\n'.join(lines)


def _bar(begin: float, end: float, longest: float, width: int) -> str:
    """At least one character, where it belongs on the scale; none for what ended before it began."""
    if end < begin or longest <= 0:
        return ''
    left = min(max(int(begin / longest * width), 0), width - 1)
    right = min(max(round(end / longest * width), left + 1), width)
    return ' ' * left + '=' * (right - left)


def timeline_to_dict(records: Sequence[Record], number: int | None = None) -> dict[str, Any]:
    """The same, as users see it in JSON: seconds to the millisecond."""
    timelines = [timeline(each, number) for each in records]

    def as_dict(each: StageTime) -> dict[str, object]:
        took = None if each.took is None else round(each.took, 3)
        return {'stage': each.stage, 'time': each.time, 'at': round(each.at, 3), 'seconds': took}

    instances = []
    for record, boot, stages in timelines:
        about = {'instance': record.instance, 'state': record.state}
        which = {'boot': boot.number if boot else None, 'reason': boot.reason if boot else None}
        instances.append({**about, **which, 'stages': list(map(as_dict, stages))})
    rounded = {
        stage: {name: round(value, 3) for name, value in each.items()} for stage, each in percentiles(timelines).items()
    }
    return {'instances': instances, 'percentiles': rounded}


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]


def _seconds(time: str) -> float | None:
    try:
        when = datetime.fromisoformat(time)
    except ValueError:
        return None  # whoever wrote the request wrote that, too
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _words(seconds: float) -> str:
    return f'{seconds:.3f} s'


# What happened, as far back as etcd keeps it, and what happens


def _events(do: Context) -> int:
    from ecomp.model.events import as_object
    from ecomp.scheduler.looking.find import resolve
    from ecomp.store.history import History

    if do.form not in (TABLE, JSON):
        raise UsageError(f'-f {do.form} is one document, and events are told one by one: say table or json')
    wanted = {resolve(do.store, word): word for word in do.words}
    silent = set(wanted)
    last, watches = do.options.lines, do.options.watch
    in_words, seen = Lines(), 1

    def lines(follow: bool, first: int = 1) -> Iterator[str]:
        nonlocal seen
        history = History(do.config.etcd, follow, do.out.say, first)
        try:
            for event in _told(do, history):
                if not wanted or event.instance in wanted:
                    silent.discard(event.instance)
                    yield dump(as_object(event)) if do.form == JSON else in_words.line(event)
            seen = history.upcoming
        finally:
            history.close()

    try:
        if last is not None:  # which are the last is known once all of the past has come
            _put(do, deque(lines(False), last))
        if watches or last is None:
            _put(do, lines(watches, seen))
    except KeyboardInterrupt:
        if not watches:
            raise
        return 0
    if silent:
        raise NotFound(', '.join(wanted[each] for each in sorted(silent)) + ': nothing of it is in what etcd keeps')
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

    known = computes(do.store)

    def host(compute: str) -> str:
        return known.called(compute)

    is_said = history.upcoming > 1  # of what follows on a past that was told
    for changes in history:
        if not is_said:
            _say_since(do, history.since)
            is_said = True
        if not history.is_past and any(each.key.startswith(keys.COMPUTES) for each in changes):
            known = computes(do.store)
        yield from told(changes, host, '' if history.is_past else now())
    if not is_said:
        _say_since(do, history.since)


def _say_since(do: Context, since: int) -> None:
    part = '' if do.options.lines is None else f'the last {do.options.lines} of '
    told = 'all that ever happened' if since == 1 else f'what happened since revision {since}; etcd keeps no more'
    do.out.say(part + told)


class Lines:
    """Events as lines: when, of whom, what. Of an instance whose name was told before the name is said."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._last = ''

    def line(self, event: Event) -> str:
        """One line. A time with a ~ is that of the event before: nobody wrote down when this was."""
        is_known = bool(event.time)
        self._last = event.time or self._last
        if event.name and (event.instance in self._names or len(self._names) < NAMES):
            self._names[event.instance] = event.name
        who = event.name or self._names.get(event.instance) or event.instance
        when = f'{self._last:24}' + (' ' if is_known else '~')
        return printable(f'{when} {who}: {event.says}' if who else f'{when} {event.says}')


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
