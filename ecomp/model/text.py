"""Text from outside, made fit for a person's terminal."""

from __future__ import annotations


def printable(text: str, limit: int = 2000) -> str:
    """One line of what can be printed: all else is escaped, and what is longer ends in `…`."""
    safe = _escaped(text[:limit])
    return safe if len(text) <= limit else f'{safe}…'


def printable_lines(text: str) -> str:
    """The same with its line breaks kept: a configuration's mistakes are a line each."""
    return '\n'.join(printable(line) for line in text.split('\n'))


def printable_whole(text: str) -> str:
    """All of it, with its line breaks and however long its lines are: what is data is not cut."""
    return '\n'.join(map(_escaped, text.split('\n')))


def _escaped(line: str) -> str:
    if line.isprintable():
        return line
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in line)
