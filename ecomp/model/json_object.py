"""JSON that somebody wrote into etcd, read with care; and JSON of ours, which is written so that it can be read."""

from __future__ import annotations

import json
import math
from typing import Any

VALUE_LIMIT = 1280 * 1024
"""Bytes of a value; a longer one is refused. The record of the largest request, with its text escaped, is shorter."""
DIGITS = 500
"""Digits of a number; one with more is refused. Python writes none of more than 4,300, and sums of these have fewer."""
DEPTH = 64
"""Levels of objects and lists in each other; deeper ones are refused, for a reason could not quote them."""


def load_object(value: bytes) -> dict[str, Any]:
    """A JSON object from bytes; ValueError in plain words, as load()."""
    data = load(value)
    if not isinstance(data, dict):
        raise ValueError(f'expected a JSON object, not {type(data).__name__}')
    return data


def load_if_object(value: bytes) -> dict[str, Any]:
    """A JSON object from bytes; an empty one for what is none: what makes no sense says nothing."""
    try:
        return load_object(value)
    except ValueError:
        return {}


def is_version(version: object, known: int) -> bool:
    """True for a version that is read by who reads up to `known`. True is an int to Python, and none."""
    return type(version) is int and 1 <= version <= known


def load(value: bytes) -> Any:
    """JSON from bytes; ValueError in plain words.

    NaN, numbers that are no number to Python or have more than DIGITS, doubled keys and what is nested deeper than
    DEPTH are refused.
    """
    if len(value) > VALUE_LIMIT:
        raise ValueError(f'it has {len(value)} bytes; the limit is {VALUE_LIMIT}')
    try:
        data = _DECODER.decode(value.decode())
    except UnicodeDecodeError as error:
        raise ValueError('not text in UTF-8') from error
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON: {error}') from error
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    if isinstance(data, dict | list) and not _is_shallow(data):
        raise ValueError('it is nested too deeply')
    return data


def dump(data: Any, indent: int | None = None, separators: tuple[str, str] | None = None) -> str:
    """As JSON, of printable ASCII alone. ValueError for a number that JSON does not have."""
    return json.dumps(data, indent=indent, separators=separators, allow_nan=False)


def is_text(value: object) -> bool:
    """True for text that can be written in UTF-8: JSON has halves of surrogate pairs, too."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_shallow(data: dict[str, Any] | list[Any]) -> bool:
    level: list[Any] = [data]
    for _ in range(DEPTH):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return True
    return False


def _float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f'not JSON we take: {text[:40]} is too large a number')
    return number


def _int(text: str) -> int:
    if len(text) > DIGITS:
        raise ValueError(f'not JSON we take: a number of {len(text)} digits')
    return int(text)


def _no_constant(name: str) -> None:
    raise ValueError(f'not JSON: {name} is not a number')


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError('not JSON we take: a key stands twice')
    return data


_DECODER = json.JSONDecoder(
    parse_float=_float, parse_int=_int, parse_constant=_no_constant, object_pairs_hook=_no_doubles
)
