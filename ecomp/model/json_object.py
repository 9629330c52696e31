"""JSON: strict parsing of values from etcd, which may be malformed, and writing."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

# A longer value is refused, in bytes. The record of the largest request, with its text escaped, is shorter.
MAX_VALUE_BYTES = 1280 * 1024
# A number with more digits is refused. Python writes at most 4,300, and sums of numbers of this size have fewer.
MAX_DIGITS = 500
# More levels of nested objects and lists are refused: an error message could not quote them.
MAX_DEPTH = 64


def load_object(value: bytes) -> dict[str, Any]:
    data = load(value)
    if not isinstance(data, dict):
        raise ValueError(f'expected a JSON object, not {type(data).__name__}')
    return data


def load_object_or_empty(value: bytes) -> dict[str, Any]:
    try:
        return load_object(value)
    except ValueError:
        return {}


def load(value: bytes) -> Any:
    """Parse JSON, or raise ValueError, also for NaN, duplicate keys and excessive size or depth."""
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f'it has {len(value)} bytes; the limit is {MAX_VALUE_BYTES}')
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
    """Return JSON in ASCII, or raise ValueError for NaN and infinities."""
    return json.dumps(data, indent=indent, separators=separators, allow_nan=False)


# The fields with the time at which eschedule wrote a value, and by whom. `events` reads them, other readers do not.
WRITTEN_AT = 'written_at'
WRITTEN_BY = 'by'


def is_utf8_text(value: object) -> bool:
    if not isinstance(value, str):
        return False
    try:
        value.encode()  # JSON has half surrogate pairs, too
    except UnicodeEncodeError:
        return False
    return True


def _is_shallow(data: dict[str, Any] | list[Any]) -> bool:
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        inner = (node.values() if isinstance(node, dict) else node for node in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return True
    return False


def _parse_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f'unsupported JSON: the number {text[:40]} is too large')
    return number


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f'unsupported JSON: a number of {len(text)} digits; the limit is {MAX_DIGITS}')
    return int(text)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f'not JSON: {name} is not a JSON number')


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError('unsupported JSON: a duplicate key')
    return data


_DECODER = json.JSONDecoder(
    parse_float=_parse_float,
    parse_int=_parse_int,
    parse_constant=_refuse_constant,
    object_pairs_hook=_refuse_duplicates,
)
