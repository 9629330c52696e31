"""External text made safe for a terminal, names, and suggestions for mistyped words. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

from ecomp.model.command_names import RESERVED

# Characters of a typed word that are compared; no word that it could mean is longer.
MAX_COMPARED_CHARACTERS = 60
# The share of two words that must be equal, from 0 to 1: hv9 does not resemble hv2.
MIN_SIMILARITY = 0.7
# Prefixes that reverse the meaning of a word.
NEGATION_PATTERN = '^(un|dis|de|non?|in)-?'


def find_similar(word: str, candidates: Iterable[str], min_similarity: float = MIN_SIMILARITY) -> str | None:
    """Return the most similar candidate, except opposites of the word, or None if none is close."""
    import difflib  # imported here because only a mistyped word needs it

    typed = word[:MAX_COMPARED_CHARACTERS].lower()
    by_lower = {name.lower(): name for name in candidates if not _are_opposites(typed, name.lower())}
    transposed = [name for name in by_lower if sorted(name) == sorted(typed)]
    close = transposed or difflib.get_close_matches(typed, by_lower, 1, min_similarity)
    return by_lower[close[0]] if close else None


def _are_opposites(one: str, other: str) -> bool:
    """Return whether two words are more alike without a negating prefix: --wait, --no-wait."""
    from difflib import SequenceMatcher

    def measure(first: str, second: str) -> float:
        return SequenceMatcher(None, first, second.lstrip('-')).ratio()

    pairs = ((one.lstrip('-'), other), (other.lstrip('-'), one))
    return any(measure(re.sub(NEGATION_PATTERN, '', left), right) > measure(left, right) for left, right in pairs)


def format_suggestion(word: str, candidates: Iterable[str]) -> str:
    """Return ` (did you mean …?)` to append to the word, or '' if no candidate is similar."""
    close = find_similar(word, candidates)
    return f' (did you mean {close}?)' if close is not None else ''


# An instance's name is its guest's host name and is accepted wherever its uuid is. So it is an RFC 1123 label in lower
# case, never a command, and never as long as a uuid and only hexadecimal. A shorter name may look like the start of a
# uuid (db1, cafe). Then the name is meant.

# Digits that a prefix of a uuid has at least.
MIN_PREFIX_DIGITS = 4

_LABEL_PATTERN = '[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?'
_PLAIN_NAME_PATTERN = '[A-Za-z0-9][A-Za-z0-9._-]{0,62}'
_HEXADECIMAL_PATTERN = '[0-9a-f]{32,}'


def is_label(text: str) -> bool:
    return re.fullmatch(_LABEL_PATTERN, text) is not None


def is_name(text: str) -> bool:
    return is_label(text) and not re.fullmatch(_HEXADECIMAL_PATTERN, text.replace('-', '')) and text not in RESERVED


def check_name(text: str) -> str:
    """Return the name of an instance, or raise ValueError with the reason why it is invalid."""
    shown = repr(text[:80])
    if not is_label(text):
        if is_label(text.lower()):
            raise ValueError(f'{shown} is not a valid name. Fix: use lower case')
        rule = '1 to 63 letters, digits and -, and no - at either end'
        raise ValueError(f'{shown} is not a valid name: it becomes a host name, which has {rule}')
    if re.fullmatch(_HEXADECIMAL_PATTERN, text.replace('-', '')):
        raise ValueError(f'{shown} is not a valid name: with 32 or more digits, all 0-9 and a-f, it looks like a uuid')
    if text in RESERVED:
        raise ValueError(f'{shown} is not a valid name: it is reserved for a command')
    return text


def check_plain_name(text: str, kind: str) -> str:
    if not re.fullmatch(_PLAIN_NAME_PATTERN, text):
        raise ValueError(f'{text[:80]!r} is not a valid {kind} name: a name has 1 to 63 letters, digits, ., _ and -')
    return text


def parse_uuid_prefix(text: str) -> str | None:
    """Return a prefix of a uuid in lower case with dashes, or None if the text is not one."""
    digits = text.lower().replace('-', '')
    if not MIN_PREFIX_DIGITS <= len(digits) < 32 or not re.fullmatch('[0-9a-f]+', digits):
        return None
    dashed = '-'.join(filter(None, (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])))
    lower_text = text.lower()
    if len(dashed) in (8, 13, 18, 23):
        lower_text = lower_text.removesuffix('-')
    return dashed if lower_text in (digits, dashed) else None


_UUID_PATTERN = '(?<![/0-9a-z-])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?![/0-9a-z-])'


def make_printable(text: str, limit: int = 2000) -> str:
    """Return the beginning of a text as one line, with unprintable characters escaped."""
    safe = escape_characters(text[:limit])
    return safe if len(text) <= limit else f'{safe}…'


def make_lines_printable(text: str) -> str:
    return '\n'.join(make_printable(line) for line in text.split('\n'))


def escape_lines(text: str) -> str:
    """Return the text with unprintable characters escaped, and its lines uncut."""
    return '\n'.join(map(escape_characters, text.split('\n')))


def escape_characters(line: str) -> str:
    """Escape unprintable characters of a line as Python does, but not a backslash."""
    if line.isprintable():
        return line
    return ''.join(c if c.isprintable() else c.encode('unicode_escape').decode('ascii') for c in line)


def join_some(names: Sequence[str], max_count: int, separator: str = ', ') -> str:
    """Join the first `max_count` names, and add ` and 3 more` if there are more."""
    more = f' and {len(names) - max_count} more' if len(names) > max_count else ''
    return separator.join(names[:max_count]) + more


def replace_uuids(text: str, display_names: Mapping[str, str]) -> str:
    """Replace each uuid by its display name, except in paths of keys."""

    def format_match(match: re.Match[str]) -> str:
        display_name = display_names.get(match[0], match[0])
        before, _, after = display_name.partition(match[0])
        is_expanded = text.endswith(before, 0, match.start()) and text.startswith(after, match.end())
        return match[0] if is_expanded and (before or after) and match[0] in display_name else display_name

    return re.sub(_UUID_PATTERN, format_match, text) if display_names else text


def format_time(now: datetime) -> str:
    """Format a time in ISO 8601, in UTC, with milliseconds, taking a naive one as local."""
    return now.astimezone(UTC).isoformat(timespec='milliseconds').replace('+00:00', 'Z')
