"""Where eschedule's words go, and what several commands do with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from ecomp.errors import EcompError
from ecomp.model.record import timestamp


class Terminal(NamedTuple):
    """Where words go: `put` is for data, to stdout at once, `say` for everything else.

    Both let through what can be printed, and line breaks: whoever puts a line sees that there is none in it.
    """

    put: Callable[[str], None]
    say: Callable[[str], None]


def now() -> str:
    """The time of day, as records have it."""
    return timestamp(datetime.now(UTC))


def each_of(out: Terminal, words: Sequence[str], do: Callable[[str], None]) -> int:
    """Do it for every word, whatever became of the others; the first failure's exit code."""
    code = 0
    for word in words:
        try:
            do(word)
        except EcompError as error:
            out.say(str(error))
            code = code or error.exit_code
    return code


def shown(out: Terminal, table: str, unreadable: Sequence[EcompError]) -> int:
    """Put a table, and say what could not be read for it; the exit code."""
    out.put(table)
    for error in unreadable:
        out.say(str(error))
    return EcompError.exit_code if unreadable else 0
