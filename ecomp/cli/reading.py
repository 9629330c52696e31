"""A command line's words and options: read here where it is plainly written, and by argparse in all other cases.

Whatever is wrong, abbreviated, or asks for help is argparse's. Loading it and telling it of every option takes a short
command longer than reading what was typed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ecomp.cli.options import OPTIONS, Option, Options
from ecomp.errors import UsageError
from ecomp.model.near import did_you_mean

if TYPE_CHECKING:
    import argparse

Read = tuple[list[str], Options]

WAIT = '--wait'
"""The option whose value may only stand behind a =."""


def read(asked: Sequence[str], argv: Sequence[str], help_of: Callable[[Sequence[str]], str]) -> Read:
    """The words and the options of `argv`, which stands for what was `asked`. UsageError.

    --help and --version print, the one what `help_of` has for the words typed, and raise SystemExit.
    """
    return plainly(argv) or by_argparse(asked, argv, help_of)


def plainly(argv: Sequence[str]) -> Read | None:
    """The words and the options where each is written out, once, and has a value that it takes; else None."""
    rows = {flag: (field, each) for field, options in OPTIONS.items() for each in options for flag in each.flags}
    words: list[str] = []
    found: dict[str, Any] = {}
    rest = iter(argv)
    for word in rest:
        if not word or not word.startswith('-'):
            words.append(word)
            continue
        flag, equals, value = word.partition('=')
        if flag not in rows or word == '-':
            return None
        field, row = rows[flag]
        if row.more.get('action') in ('store_true', 'store_const'):
            if equals or field in found:
                return None
            found[field] = row.more.get('const', True)
            continue
        if not equals and flag != WAIT:
            value = next(rest, '')
            if value.startswith('-') and value != '-':
                return None
        if not value and (equals or flag != WAIT):
            return None
        try:
            _take(found, field, row, value)
        except (ValueError, UsageError):
            return None
    # `log` has an -f of its own.
    return None if 'log' in words else (words, Options(**found))


def _take(found: dict[str, Any], field: str, row: Option, text: str) -> None:
    """ValueError, UsageError for a value that argparse has something to say about."""
    value = row.more.get('type', str)(text)
    if 'choices' in row.more and value not in row.more['choices']:
        raise ValueError
    if row.more.get('action') == 'append':
        found.setdefault(field, []).append(value)
    elif field in found:
        raise ValueError
    else:
        found[field] = value


def by_argparse(asked: Sequence[str], argv: Sequence[str], help_of: Callable[[Sequence[str]], str]) -> Read:
    """See read()."""
    from ecomp.cli.by_argparse import parser

    # What is behind -- are words, of a guest's command say, and never options.
    end = argv.index('--') if '--' in argv else len(argv)
    # argparse would take the word after a bare --wait for its value.
    short = {WAIT: f'{WAIT}=', **({'-f': '--follow'} if _first_word(argv[:end]) == 'log' else {})}
    reader: argparse.ArgumentParser = parser(lambda: help_of(asked))
    given, unknown = reader.parse_known_intermixed_args([short.get(word, word) for word in argv[:end]])
    if unknown:
        flags = ['--help', '--version', *(flag for rows in OPTIONS.values() for each in rows for flag in each.flags)]
        typed = unknown[0].partition('=')[0]
        raise UsageError(f'{typed} is no option{did_you_mean(typed, flags)}; --help shows all')
    found = vars(given)
    return [*found.pop('words'), *argv[end + 1 :]], Options(**found)


def _first_word(argv: Sequence[str]) -> str:
    """The first word that is neither an option nor the value of one; '' where there is none."""
    valued = {flag for rows in OPTIONS.values() for each in rows if each.metavar[:1].isalpha() for flag in each.flags}
    words = iter(argv)
    for word in words:
        if word in valued:
            next(words, None)
        elif not word.startswith('-'):
            return word
    return ''
