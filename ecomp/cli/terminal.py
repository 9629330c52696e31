"""Output to stdout and stderr, the width of the terminal, a live line, and a watched table."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, ClassVar, NamedTuple, TextIO

from ecomp.cli.options import TABLE, Options
from ecomp.errors import EcompError, UnknownOutcome, Unreachable, put_before_fix
from ecomp.model.text import format_time, make_printable

if TYPE_CHECKING:
    from ecomp.cli.tables import OutputStyle
    from ecomp.conf import EtcdConfig

DEFAULT_WIDTH = 80
# Seconds between two drawings of a watched table, at least; changes in between are drawn together.
MIN_REDRAW_SECONDS = 0.2
# Moves the cursor to the top and clears the screen. https://www.xfree86.org/current/ctlseqs.html
CLEAR_SCREEN = '\x1b[H\x1b[2J'


class Terminal(NamedTuple):
    """The outputs of a command: `put` writes data to stdout, `say` writes messages to stderr.

    Both add a line break, and escape unprintable characters except line breaks.
    `draw` is for output of ecomp.cli.tables, which is already escaped and has colours and tabs.
    `config_source` says which file has the backends' addresses.
    A caller that prints external text as one line escapes its line breaks.
    """

    put: Callable[[str], None]
    draw: Callable[[str], None]
    say: Callable[[str], None]
    config_source: str = ''

    def format_error(self, error: EcompError) -> str:
        """Return the text of an error, with `config_source` if a backend is unreachable."""
        text = str(error)
        if isinstance(error, UnknownOutcome):
            text = put_before_fix(text, '. Try: the same command again')
        if not (isinstance(error, Unreachable) and error.backend and self.config_source):
            return text
        return put_before_fix(text, f' ({make_printable(self.config_source)}). Try: eschedule check')


def make_style(options: Options) -> OutputStyle:
    """Return the style that the options ask for, on a terminal with its width and colours."""
    from ecomp.cli.tables import OutputStyle

    form = options.format or TABLE
    columns = tuple(name for text in options.columns or () for name in text.split(','))
    style = OutputStyle(form, columns, not options.no_header, options.sort or '', options.wide)
    if form != TABLE or not sys.stdout.isatty():
        return style
    # https://no-color.org
    colour = not os.environ.get('NO_COLOR') and os.environ.get('TERM') != 'dumb'
    return style._replace(width=None if options.wide else find_width(), colour=colour)


def find_width(stream: TextIO | None = None) -> int | None:
    """Return $COLUMNS or the columns of a terminal, None for a stream that is no terminal."""
    stream = sys.stdout if stream is None else stream
    if not stream.isatty():
        return None
    columns = os.environ.get('COLUMNS', '')
    if columns.isdecimal() and int(columns[:6]) > 0:
        return int(columns[:6])
    try:
        return os.get_terminal_size(stream.fileno()).columns or DEFAULT_WIDTH
    except OSError:
        return DEFAULT_WIDTH


def wrap_lines(text: str, columns: int | None) -> str:
    """Fold lines to this many columns, unless it is None, at spaces where possible."""
    if columns is None or all(len(line) <= columns for line in text.split('\n')):
        return text
    from ecomp.cli.tables import fold

    return '\n'.join(part for line in text.split('\n') for part in fold(line, columns))


class LiveLine:
    """A status on stderr, if that is a terminal, which is erased at the end of the block."""

    _current: ClassVar[LiveLine | None] = None

    def __init__(self) -> None:
        self._text = ''

    def __enter__(self) -> Callable[[str], None]:
        return self._show

    def __exit__(self, *_: object) -> None:
        self._draw('')

    @classmethod
    @contextmanager
    def hide(cls) -> Iterator[None]:
        """Erase the status, if there is one, and draw it again below what the block prints."""
        current = cls._current or cls()
        text = current._text
        current._draw('')
        try:
            yield
        finally:
            current._draw(text)

    def _show(self, text: str) -> None:
        columns = find_width(sys.stderr)
        if columns is not None:
            from ecomp.cli.tables import cut

            self._draw(cut(make_printable(text), max(columns - 1, 1)))

    def _draw(self, text: str) -> None:
        if self._text or text:
            sys.stderr.write(f'\r\x1b[K{text}')
            sys.stderr.flush()
            self._text, LiveLine._current = text, self


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal, or False for None, a stream that was closed."""
    return stream is not None and stream.isatty()


def ask(question: str) -> str:
    """Print a question on stderr, and return a line of stdin, '' if stdin has ended."""
    sys.stderr.write(make_printable(question))
    sys.stderr.flush()
    return sys.stdin.readline().strip()


def make_timestamp() -> str:
    """Return the current time in the format of records: ISO 8601, UTC, milliseconds."""
    return format_time(datetime.now(UTC))


class Drawing(NamedTuple):
    """A table as text, and messages to print below it, a line each."""

    table: str
    messages: Sequence[str] = ()


def watch(etcd: EtcdConfig, prefixes: Sequence[str], make: Callable[[], Drawing], draw: Callable[[str], None]) -> None:
    """Draw a table now and after each change below a prefix, until Ctrl-C."""
    from ecomp.store.watch import Follower  # needed only with --watch

    changed, trouble = threading.Event(), ['']

    def note_change(text: str = '') -> None:
        trouble[:] = [text]
        changed.set()

    def wait() -> str:
        time.sleep(MIN_REDRAW_SECONDS)
        changed.wait()
        changed.clear()
        return trouble[0]

    # An event is only a wake-up; the table is always read in full.
    subscriptions = [(prefix, lambda _: note_change()) for prefix in prefixes]
    follower = Follower(etcd, subscriptions, on_lost=lambda error, _: note_change(str(error)), on_back=note_change)
    follower.start()
    try:
        redraw(make, draw, wait)
    finally:
        follower.stop()


def redraw(make: Callable[[], Drawing], draw: Callable[[str], None], wait: Callable[[], str] = lambda: '') -> None:
    """Draw a table now and after each `wait`, until Ctrl-C.

    If `wait` returns a reason, or a later drawing is Unreachable, the last drawing stays with that reason below it.
    """
    with suppress(KeyboardInterrupt):
        drawing, trouble = make(), ''
        while True:
            draw(compose_screen(drawing, trouble))
            trouble = wait()
            try:
                drawing = drawing if trouble else make()
            except Unreachable as error:
                trouble = str(error)


def compose_screen(drawing: Drawing, trouble: str) -> str:
    """Return a drawing with any trouble below it, cut to the height of the terminal."""
    messages = list(map(make_printable, drawing.messages))
    if trouble:
        messages.append(f'the table is out of date because reading failed; retrying: {make_printable(trouble)}')
    lines = drawing.table.split('\n')
    below = [part for text in messages for part in wrap_lines(text, find_width()).split('\n')]
    try:
        height = os.get_terminal_size(sys.stdout.fileno()).lines if sys.stdout.isatty() else 0
    except OSError:
        height = 0
    if not height:
        return '\n'.join([*lines, *below, ''])
    below = below[: max(height - 3, 0)]
    max_lines = max(height - 1 - len(below), 2)  # the cursor takes the last line
    if len(lines) > max_lines:
        lines = [*lines[: max_lines - 1], f'{len(lines) - max_lines + 1} more lines']
    return CLEAR_SCREEN + '\n'.join([*lines, *below])
