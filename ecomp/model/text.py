"""Text from outside, made fit for a person's terminal."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_UUID = re.compile('(?<![/0-9a-z-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![/0-9a-z-])')


def printable(text: str, limit: int = 2000) -> str:
    """One line of what can be printed: all else is escaped, and what is longer ends in `…`."""
    safe = escaped(text[:limit])
    return safe if len(text) <= limit else f'{safe}…'


def printable_lines(text: str) -> str:
    """The text with each line as printable() makes it: a configuration's mistakes are a line each."""
    return '\n'.join(printable(line) for line in text.split('\n'))


def printable_whole(text: str) -> str:
    """The text with what cannot be printed escaped in each line, and no line cut: it is data."""
    return '\n'.join(map(escaped, text.split('\n')))


def escaped(line: str) -> str:
    """One line, with what moves a terminal's cursor and halves of surrogate pairs escaped, too."""
    if line.isprintable():
        return line
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in line)


def some(names: Sequence[str], most: int, between: str = ', ') -> str:
    """`X, Y and 3 more`: the first `most` of the names, with `between` between them, and how many more there are."""
    more = f' and {len(names) - most} more' if len(names) > most else ''
    return between.join(names[:most]) + more


def renamed(text: str, called: Mapping[str, str]) -> str:
    """The text with what people call it in place of each uuid in `called`; the path of a key stays as it is.

    Where it is called so already, as `hv1 (<uuid>)` of a name that two computes share, that stays, too.
    """

    def name(found: re.Match[str]) -> str:
        new = called.get(found[0], found[0])
        before, _, behind = new.partition(found[0])
        around = text.endswith(before, 0, found.start()) and text.startswith(behind, found.end())
        return found[0] if around and (before or behind) and found[0] in new else new

    return _UUID.sub(name, text) if called else text
