"""The command that tells what happened, as far back as etcd keeps it, and what happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ecomp.cli.command import Command, Context, plain
from ecomp.cli.options import JSON, TABLE, any_instances
from ecomp.cli.terminal import now
from ecomp.errors import NotFound, UsageError
from ecomp.model.json_object import dump
from ecomp.model.text import printable

if TYPE_CHECKING:
    from ecomp.model.events import Event
    from ecomp.store.history import History

NAMES = 10_000
"""Instances whose names are remembered, at most: what is told of others has their uuid where it says no name."""


def _events(do: Context) -> int:
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
                    yield _as_json(event) if do.form == JSON else in_words.line(event)
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



def _as_json(event: Event) -> str:
    from ecomp.model.events import as_object

    return dump(as_object(event))


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
