"""Parsers of JSON values. Pure.

A parser returns the value, or raises ValueError that says what it expects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container
from typing import Any

from ecomp.model import keys
from ecomp.model.json_object import is_utf8_text
from ecomp.model.text import make_printable

Parser = Callable[[Any], Any]

MAX_QUOTED_CHARACTERS = 80
# A reason, which may quote a whole value, is cut off after this number of characters.
MAX_REASON_CHARACTERS = 500


def format_reason(error: object) -> str:
    """Return the text of an error, which may quote what others wrote, as one printable line."""
    return make_printable(str(error))[:MAX_REASON_CHARACTERS]


def parse_part(name: str, parse: Parser, value: Any) -> Any:
    """Parse a part of a value, and begin the text of any ValueError with its name."""
    try:
        return parse(value)
    except ValueError as error:
        raise ValueError(f'{name[:MAX_QUOTED_CHARACTERS]}: {error}') from None


def check(noun: str, is_valid: Callable[[Any], object], *, is_secret: bool = False) -> Parser:
    """Make a parser that returns a valid value, or raises `expected <noun>, not <value>`."""

    def parse(value: Any) -> Any:
        if not is_valid(value):
            raise ValueError(f'expected {noun}{"" if is_secret else f", not {quote(value)}"}')
        return value

    return parse


def quote(value: object) -> str:
    return repr(value)[:MAX_QUOTED_CHARACTERS]


TEXT = check('text', lambda value: isinstance(value, str))
NONEMPTY = check('non-empty text in UTF-8', lambda value: value and is_utf8_text(value))
FLAG = check('true or false', lambda value: isinstance(value, bool))
UUID = check('a uuid', keys.is_uuid)
OBJECT = check('an object', lambda value: isinstance(value, dict))


def nullable(parse: Parser) -> Parser:
    return lambda value: None if value is None else parse(value)


def text(convert: Callable[[str], Any]) -> Parser:
    """Make a parser of a text that `convert` checks or converts."""
    return lambda value: convert(TEXT(value))


def one_of(choices: Collection[str]) -> Parser:
    return check(f'one of {", ".join(choices)}', lambda value: isinstance(value, str) and value in choices)


def number(lowest: int, highest: int) -> Parser:
    """Make a parser of an int, not a bool, in this range."""
    noun = f'a whole number from {lowest} to {highest}'
    return check(noun, lambda value: type(value) is int and lowest <= value <= highest)


def list_of(parse: Parser, lengths: Container[int] | None = None) -> Parser:
    """Make a parser that returns a list of one of these lengths (None: any) as a tuple."""
    parse_list = check('a list', lambda value: isinstance(value, list) and (lengths is None or len(value) in lengths))
    return lambda value: tuple(parse_part(str(place), parse, item) for place, item in enumerate(parse_list(value)))


def dict_of(parse: Parser, parse_key: Parser = TEXT) -> Parser:
    return lambda value: {
        parse_part(name, parse_key, name): parse_part(name, parse, item) for name, item in OBJECT(value).items()
    }
