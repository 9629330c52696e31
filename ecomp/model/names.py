"""What instances, and what groups and flavors may be called. Pure, and light to import.

An instance's name is its guest's host name and stands wherever its uuid may: so it is an RFC 1123 label in lower case,
never a command, and never as long as a uuid and hexadecimal alone. A shorter name may look like the beginning of a uuid
(db1, cafe): then the name is meant.
"""

from __future__ import annotations

import re

from ecomp.model.command_names import RESERVED

PREFIX = 4
"""Digits of a uuid that stand for all of it, at least; fewer mean none."""

_LABEL = re.compile('[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?')
_PLAIN = re.compile('[A-Za-z0-9][A-Za-z0-9._-]{0,62}')
_UUID = re.compile('[0-9a-f]{32,}')


def is_label(text: str) -> bool:
    """True for an RFC 1123 label in lower case."""
    return _LABEL.fullmatch(text) is not None


def is_name(text: str) -> bool:
    """True for a text that may be an instance's name."""
    return is_label(text) and not _UUID.fullmatch(text.replace('-', '')) and text not in RESERVED


def check_name(text: str) -> str:
    """The name as it is; ValueError with the reason why it is none."""
    shown = repr(text[:80])
    if not is_label(text):
        if is_label(text.lower()):
            raise ValueError(f'{shown} is no name: use lower case')
        rule = '1 to 63 letters, digits and -, and no - at either end'
        raise ValueError(f'{shown} is no name: it becomes a host name, which has {rule}')
    if _UUID.fullmatch(text.replace('-', '')):
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
