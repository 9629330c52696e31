"""A command line's words and options, read by the rows of options.py. Pure, and light to import."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ecomp.cli.options import OPTIONS, Option, Options
from ecomp.errors import UsageError
from ecomp.model.text import did_you_mean

HELP, VERSION = 'help', 'version'
"""What may be asked in place of a command, by an option that goes with every line."""

FLAGS: Mapping[str, tuple[str, Option]] = {
    flag: (field, option)
    for field, rows in {
        HELP: [Option(('-h', '--help'), '', '')],
        VERSION: [Option(('--version',), '', '')],
        **OPTIONS,
    }.items()
    for option in rows
    for flag in option.flags
}
"""How each option is written: its field and its row."""

NUMBERS: Mapping[Callable[[str], Any], str] = {int: 'whole number', float: 'number of seconds'}
"""What a text is not that these cannot read."""

MOST_QUOTED = 80
"""Characters of a value that an error quotes."""

_NEGATIVE = re.compile(r'-\d*\.?\d+')


def find_info_option(argv: Sequence[str]) -> str:
    """Return HELP or VERSION if the line asks for it anywhere, whatever else is in it; else ''."""
    for word in _before_end(argv):
        flags = _flags_like(word)
        if len(flags) == 1 and (field := FLAGS[flags[0]][0]) in (HELP, VERSION):
            return field
    return ''


def read(argv: Sequence[str]) -> tuple[list[str], Options]:
    """Return the words and the options of a line. UsageError.

    Options may stand anywhere before `--`; what follows that are words. An option's long name may be cut short, as
    long as no other begins so.
    """
    words: list[str] = []
    found: dict[str, Any] = {}
    before = _before_end(argv)
    rest = iter(before)
    for word in rest:
        if not _is_option(word):
            words.append(word)
            continue
        flag, value = _split(word)
        if (flag, value, words[:1]) == ('-f', None, ['log']):
            flag = '--follow'
        field, option = FLAGS[flag]
        if not option.metavar:
            _set_const(found, flag, value)
            continue
        if value is None:
            value = '' if option.metavar.startswith('[') else next(rest, None)
            if value is None or _is_option(value):
                raise UsageError(f'{flag} needs a value. Fix: write {flag} {option.metavar}')
        parsed = _parse(flag, option, value)
        if option.repeats:
            found.setdefault(field, []).append(parsed)
        elif field in found:
            raise UsageError(f'{option.flags[-1]} is given twice')
        else:
            found[field] = parsed
    return [*words, *argv[len(before) + 1 :]], Options(**found)


def _before_end(argv: Sequence[str]) -> Sequence[str]:
    return argv[: argv.index('--')] if '--' in argv else argv


def _is_option(word: str) -> bool:
    return word.startswith('-') and word != '-' and not _NEGATIVE.fullmatch(word)


def _flags_like(word: str) -> list[str]:
    """The flag that a word begins with, or the long ones that begin as it does."""
    typed = word.partition('=')[0]
    if typed in FLAGS:
        return [typed]
    return [flag for flag in FLAGS if len(typed) > 2 and typed.startswith('--') and flag.startswith(typed)]


def _split(word: str) -> tuple[str, str | None]:
    """The flag of a word, written out, and the value in the same word, None if there is none."""
    flags = _flags_like(word)
    typed, equals, value = word.partition('=')
    if len(flags) > 1:
        known = f'{", ".join(flags[:-1])} or {flags[-1]}'
        raise UsageError(f'{typed} is ambiguous: it may be {known}. Fix: write the whole option')
    if flags:
        return flags[0], value if equals else None
    short, attached = word[:2], word[2:]
    if short in FLAGS and FLAGS[short][1].metavar:
        return short, attached
    raise UsageError(f'{typed} is no option{did_you_mean(typed, FLAGS)}; --help shows all')


def _set_const(found: dict[str, Any], flag: str, value: str | None) -> None:
    """Note an option that has no value."""
    field, option = FLAGS[flag]
    if value is not None:
        raise UsageError(f'{flag} takes no value. Fix: leave out ={value[:MOST_QUOTED]}')
    if found.setdefault(field, option.const) != option.const:
        other = next(each.flags[-1] for each in OPTIONS[field] if each.const == found[field])
        raise UsageError(f'{flag} cannot be combined with {other}. Fix: give one of them')


def _parse(flag: str, option: Option, text: str) -> Any:
    """The value that the text of an option means."""
    try:
        value = option.parse(text)
    except ValueError as error:
        raise UsageError(f'{option.flags[0]}: {text[:MOST_QUOTED]!r} is no {NUMBERS[option.parse]}') from error
    if option.choices and value not in option.choices:
        like, known = did_you_mean(text, option.choices), ', '.join(option.choices)
        wrong = f'{flag}: {text[:MOST_QUOTED]!r} is not a valid {option.metavar}{like}'
        raise UsageError(f'{wrong}. Fix: give one of {known}')
    return value
