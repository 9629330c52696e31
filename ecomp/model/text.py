"""Text from outside, made fit for a person's terminal, and names. Pure.

An instance's name is its guest's host name and stands wherever its uuid may: so it is an RFC 1123 label in lower
case, never a command, and never as long as a uuid and hexadecimal alone. A shorter name may look like the beginning
of a uuid (db1, cafe): then the name is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ecomp.model.command_names import RESERVED

LONGEST = 60
"""Characters of a word that are compared; what is longer is no typing error."""
LIKE = 0.7
"""How much of two words has to be the same, from 0 to 1: hv9 is no hv2."""


NEGATION = '^(un|dis|de|non?|in)-?'
"""The beginnings that turn the meaning of a word round."""


def near(word: str, known: Iterable[str], like: float = LIKE) -> str | None:
    """The known word that is most like this one, whatever the case of its letters; None if none is.

    It is never the opposite: not `drain` for undrain, and not `--wait` for --no-wait.
    """
    import difflib  # only for a mistake

    typed = word[:LONGEST].lower()
    by_lower = {each.lower(): each for each in known if not _are_opposites(typed, each.lower())}
    swapped = [each for each in by_lower if sorted(each) == sorted(typed)]
    close = swapped or difflib.get_close_matches(typed, by_lower, 1, like)
    return by_lower[close[0]] if close else None


def _are_opposites(one: str, other: str) -> bool:
    """True if they are more alike once one of them has lost a beginning that turns its meaning round."""
    from difflib import SequenceMatcher

    def compare(left: str, right: str) -> float:
        return SequenceMatcher(None, left, right.lstrip('-')).ratio()

    pairs = ((one.lstrip('-'), other), (other.lstrip('-'), one))
    return any(compare(re.sub(NEGATION, '', left), right) > compare(left, right) for left, right in pairs)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean …?)`, to stand behind the word, or nothing where no known word is like it."""
    close = near(word, known)
    return f' (did you mean {close}?)' if close is not None else ''


PREFIX = 4
"""Digits of a uuid that stand for all of it, at least; fewer mean none."""

_LABEL = re.compile('[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?')
_PLAIN = re.compile('[A-Za-z0-9][A-Za-z0-9._-]{0,62}')
_HEXADECIMAL = re.compile('[0-9a-f]{32,}')


def is_label(text: str) -> bool:
    """True for an RFC 1123 label in lower case."""
    return _LABEL.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """True for a text that may be an instance's name."""
    return is_label(text) and not _HEXADECIMAL.fullmatch(text.replace('-', '')) and text not in RESERVED


def check_name(text: str) -> str:
    """The name as it is; ValueError with the reason why it is none."""
    shown = repr(text[:80])
    if not is_label(text):
        if is_label(text.lower()):
            raise ValueError(f'{shown} is no name: use lower case')
        rule = '1 to 63 letters, digits and -, and no - at either end'
        raise ValueError(f'{shown} is no name: it becomes a host name, which has {rule}')
    if _HEXADECIMAL.fullmatch(text.replace('-', '')):
        raise ValueError(f'{shown} is no name: of 32 digits or more, 0-9 and a-f alone, it looks like a uuid')
    if text in RESERVED:
        raise ValueError(f'{shown} is no name: it is reserved for a command')
    return text


def check_plain(text: str, what: str) -> str:
    """The name of a group or a flavor as it is; ValueError if it is none. `what` is `a group`."""
    if not _PLAIN.fullmatch(text):
        raise ValueError(f'{text[:80]!r} is no name of {what}: it has 1 to 63 letters, digits, ., _ and -')
    return text


def uuid_prefix(text: str) -> str | None:
    """The beginning of a uuid that a text, with or without dashes, is; written as uuids are, None if it is none."""
    digits = text.lower().replace('-', '')
    if not PREFIX <= len(digits) < 32 or not re.fullmatch('[0-9a-f]+', digits):
        return None
    parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
    dashed = '-'.join(part for part in parts if part)
    written = text.lower()
    if len(dashed) in (8, 13, 18, 23):
        written = written.removesuffix('-')
    return dashed if written in (digits, dashed) else None


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
