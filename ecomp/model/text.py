"""Text from outside, made fit for a person's terminal."""

from __future__ import annotations


def printable(text: str, limit: int = 2000) -> str:
    """One line of what can be printed: all else is escaped, and what is longer ends in `…`."""
    safe = ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in text[:limit])
    return safe if len(text) <= limit else f'{safe}…'


def printable_lines(text: str) -> str:
    """The same with its line breaks kept: a configuration's mistakes are a line each."""
    return '\n'.join(printable(line) for line in text.split('\n'))
