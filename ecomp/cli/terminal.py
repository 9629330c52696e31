"""Where words go, what the terminal is like, one line that is written over, and a table that is drawn anew."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, TextIO

from ecomp.cli.options import TABLE, Options
from ecomp.errors import EcompError, Unreachable
from ecomp.model.record import timestamp
from ecomp.model.text import printable

if TYPE_CHECKING:
    from ecomp.cli.tables import Look
    from ecomp.conf import EtcdConfig

WIDTH = 80
"""Columns of a terminal that does not say how many it has."""
PAUSE = 0.2
"""Seconds between two drawings of what is watched at least: what changes meanwhile is drawn together."""
HOME = '\x1b[H\x1b[2J'
"""What has a terminal begin again at its top. https://www.xfree86.org/current/ctlseqs.html"""


class Terminal(NamedTuple):
    """Where words go: `put` is for data, to stdout at once, `say` for everything else.

    Both let through what can be printed, and line breaks: whoever puts a line sees that there is none in it. `draw` is
    for what ecomp.cli.tables made: it has colours and tabs, too, and all else in it is printable already. `told` says
    which file has the addresses of etcd and placement.
    """

    put: Callable[[str], None]
    draw: Callable[[str], None]
    say: Callable[[str], None]
    told: str = ''

    def words(self, error: EcompError) -> str:
        """What to say of an error: of a backend that gives no answer also which file it was told by."""
        away = isinstance(error, Unreachable) and error.backend and self.told
        return f'{error} ({printable(self.told)})' if away else str(error)


def look(options: Options) -> Look:
    """How the answer is to look, by the options, and by stdout where that is a terminal."""
    from ecomp.cli.tables import Look

    shown = options.format or TABLE
    columns = tuple(name for each in options.columns or () for name in each.split(','))
    given = Look(shown, columns, not options.no_header, options.sort or '', options.wide)
    if shown != TABLE or not sys.stdout.isatty():
        return given
    # https://no-color.org
    colour = not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'
    return given._replace(width=None if options.wide else width(), colour=colour)


def width(stream: TextIO | None = None) -> int | None:
    """Columns of the terminal that a stream, stdout if None, is; None where it is none. COLUMNS comes first."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return None
    told = os.environ.get('COLUMNS', '')
    if told.isdecimal() and int(told[:6]) > 0:
        return int(told[:6])
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except OSError:
        return WIDTH


def broken(text: str, columns: int | None) -> str:
    """The text with each line broken at spaces where it is longer than so many columns; None: as it is."""
    if columns is None or all(len(line) <= columns for line in text.split('\n')):
        return text
    from ecomp.cli.tables import folded

    return '\n'.join(part for line in text.split('\n') for part in folded(line, columns))


class Live:
    """One line on the terminal that is written over; nothing at all where stderr is no terminal."""

    def __init__(self) -> None:
        self._shown = False

    def __enter__(self) -> Callable[[str], None]:
        return self._tell

    def __exit__(self, *_: object) -> None:
        if self._shown:
            sys.stderr.write('\r\x1b[K')
            sys.stderr.flush()

    def _tell(self, text: str) -> None:
        columns = width(sys.stderr)
        if columns is not None:
            from ecomp.cli.tables import cut

            self._shown = True
            # What is broken by the terminal is several lines, of which the last one alone is written over.
            sys.stderr.write(f'\r\x1b[K{cut(printable(text), max(columns - 1, 1))}')
            sys.stderr.flush()


def now() -> str:
    """The time of day, as records have it."""
    return timestamp(datetime.now(UTC))


class Drawing(NamedTuple):
    """A table as text, and what there is to say below it, a line each."""

    table: str
    below: Sequence[str] = ()


def watch(config: EtcdConfig, prefixes: Sequence[str], see: Callable[[], Drawing], draw: Callable[[str], None]) -> None:
    """Draw what `see` finds, now and whenever anything below one of the prefixes has changed, until Ctrl-C.

    While etcd is away the last drawing stays, with a line below it. Errors: those of `see`, the first time.
    """
    from ecomp.store.watch import Follower  # for those who watch

    changed, lost = threading.Event(), list[str]()

    def told(trouble: str = '') -> None:
        lost[:] = [trouble] if trouble else []
        changed.set()

    # An event is a nudge and the list is the truth, as everywhere.
    subscriptions = [(prefix, lambda _: told()) for prefix in prefixes]
    follower = Follower(config, subscriptions, on_lost=lambda error: told(str(error)), on_back=told)
    shown = see()
    try:
        follower.start()
        draw(screen(shown, lost))
        while changed.wait():
            changed.clear()
            try:
                shown = shown if lost else see()
            except Unreachable as error:
                lost[:] = [str(error)]
            draw(screen(shown, lost))
            time.sleep(PAUSE)
    except KeyboardInterrupt:
        pass
    finally:
        follower.stop()


def screen(shown: Drawing, lost: Sequence[str]) -> str:
    """The drawing as a terminal is to show it, from its top and no longer than it; elsewhere with an empty line behind.

    Of a table that is too long for it the end is left out, and not what is said below.
    """
    said = [*map(printable, shown.below), *(f'{printable(each)}; it is tried again' for each in lost)]
    lines, below = shown.table.split('\n'), [part for each in said for part in broken(each, width()).split('\n')]
    try:
        height = os.get_terminal_size(sys.stdout.fileno()).lines if sys.stdout.isatty() else 0
    except OSError:
        height = 0
    if not height:
        return '\n'.join([*lines, *below, ''])
    below = below[: max(height - 3, 0)]
    most = max(height - 1 - len(below), 2)  # the last line is the cursor's
    if len(lines) > most:
        lines = [*lines[: most - 1], f'{len(lines) - most + 1} more']
    return HOME + '\n'.join([*lines, *below])
