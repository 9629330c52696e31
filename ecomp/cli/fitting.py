"""How text is made to fit a terminal: widths, cuts, short uuids, colours; and what cells are sorted by. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

GAP = '  '
"""What is between two columns."""
SHORTEST = 8
"""Characters of a uuid that are shown at least."""
LEAST = 4
"""Characters that a column has left at least where a line is cut for a narrow terminal."""


class Room(NamedTuple):
    """What a column needs, in characters, and what it can do without.

    `full` is its width as it is, `short` that with the short heading, `least` that to which its cells may be cut;
    where that is not enough, the columns with the largest `rank` are left out, those of rank 0 never.
    """

    full: int
    short: int
    least: int
    rank: int


def fitted(rooms: Sequence[Room], width: int) -> dict[int, int]:
    """The columns that stay, by their numbers, and how wide each is, so that they fit beside each other into `width`.

    Of equal rank the last is left out first. Where even those of rank 0 are too wide, the widest are cut.
    """
    kept = list(range(len(rooms)))
    while True:
        now = {at: rooms[at].full for at in kept}
        spare = width - len(GAP) * (len(kept) - 1)
        if sum(now.values()) > spare:  # all of them or none: a heading says what the next one leaves out
            now = {at: rooms[at].short for at in kept}
        for at in kept:
            if (over := sum(now.values()) - spare) > 0:
                now[at] = max(now[at] - over, min(rooms[at].least, now[at]))
        if sum(now.values()) <= spare:
            return now
        left = [at for at in kept if rooms[at].rank]
        if not left:
            break
        kept.remove(max(left, key=lambda at: (rooms[at].rank, at)))
    while sum(now.values()) > spare and max(now.values()) > LEAST:
        now[max(now, key=lambda at: now[at])] -= 1
    return now


def across(text: str) -> int:
    """How many places of a terminal's line a text takes."""
    return len(text) if text.isascii() else sum(map(_places, text))


def _places(character: str) -> int:
    import unicodedata  # names of hosts and projects may be of any script, and seldom are

    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in 'WF' else 1


def _room(text: str, width: int) -> int:
    """How many characters of the text this width has room for."""
    if text.isascii():
        return min(len(text), max(width, 0))
    for number, each in enumerate(text):
        width -= _places(each)
        if width < 0:
            return number
    return len(text)


def fill(text: str, width: int) -> str:
    """The text with spaces behind it, up to this width."""
    return text + ' ' * (width - across(text))


def cut(text: str, width: int) -> str:
    """The text, or as much of its beginning as this width has room for, with `…` behind it."""
    return text if _room(text, width) == len(text) else f'{text[: _room(text, width - 1)]}…'


def folded(text: str, width: int) -> list[str]:
    """The text in lines no wider than this: broken at spaces where there are some, else anywhere."""
    lines = []
    while (end := max(_room(text, width), 1)) < len(text):
        space = text.rfind(' ', 0, end + 1)
        end = space if space > 0 else end
        lines.append(text[:end].rstrip())
        text = text[end:].lstrip()
    return [*lines, text]


def natural(cell: str | int | float | None) -> tuple[object, ...]:
    """What cells are sorted by: numbers in a text are numbers, so set-2 is before set-10; what is not there is last."""
    if cell is None:
        return (1,)
    parts = re.split(r'(\d{1,300})', str(cell))
    return 0, tuple((0, int(part), '') if part.isdecimal() else (1, 0, part.casefold()) for part in parts if part)


def short_uuids(texts: Iterable[str]) -> Mapping[str, str]:
    """For each uuid its shortest beginning that no other of them has, of SHORTEST characters or more."""
    found = sorted({text for text in texts if _UUID.fullmatch(text)})
    short = {}
    for number, each in enumerate(found):
        near = [*found[max(number - 1, 0) : number], *found[number + 1 : number + 2]]
        length = max([SHORTEST, *(_alike(each, other) + 1 for other in near)])
        length += each[length - 1] == '-'
        short[each] = each[:length]
    return short


def _alike(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def short_times(texts: Iterable[str]) -> Mapping[str, str]:
    """Times to the minute."""
    return {text: f'{text[:10]} {text[11:16]}' for text in texts if _TIMESTAMP.fullmatch(text)}


def coloured(cell: str) -> str:
    """A state in its colour: green is well, yellow on its way or off, red wants somebody. Others stay as they are."""
    text = cell.rstrip()
    colour = next((colour for colour, states in _COLOURS.items() if text.partition(',')[0] in states), '')
    return f'\x1b[{colour}m{text}\x1b[0m{cell[len(text):]}' if colour else cell


_UUID = re.compile('[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}')
_TIMESTAMP = re.compile(r'\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z')
_COLOURS = {
    '32': {'active', 'up'},
    '33': {'queued', 'scheduled', 'building', 'stopped', 'destroying', 'disabled', 'closed'},
    '31': {'error', 'silent', 'orphaned'},
}
