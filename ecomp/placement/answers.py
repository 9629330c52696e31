"""What placement answers, or whoever is in its place: JSON, of which all that is taken has its kind and its bounds.

Looked at where it is taken, and not while it is parsed: that would cost as much again.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from ecomp.model.json_object import is_text

MOST = 10**50
"""More than placement can say, which multiplies 2**31 by a ratio of single precision; any float holds it squared."""

PARTS = 2_000_000
"""Commas and brackets of an answer; what has more is not parsed: each may become an object, of up to 230 bytes.

Ten thousand candidates with 150 traits each have 1.8 million.
"""

WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)
"""What taking things out of an answer of another shape raises: each is an answer that is none of placement's."""


def parse(body: bytes) -> dict[str, Any]:
    """Parse an answer's body as a JSON object. ValueError for anything else."""
    if sum(map(body.count, (b',', b'[', b'{'))) > PARTS:
        raise ValueError(f'it has more than {PARTS} parts')
    try:
        data = _DECODER.decode(body.decode())
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    if not isinstance(data, dict):
        raise ValueError(f'expected a JSON object, not {type(data).__name__}')
    return data


def whole(value: object) -> int:
    """Return the value if it is a whole number from -MOST to MOST; ValueError if not."""
    if type(value) is not int or not -MOST <= value <= MOST:
        raise ValueError('not a whole number')
    return value


def number(value: object) -> float:
    """Return the value if it is a number from -MOST to MOST, whole or not; ValueError if not."""
    if type(value) is float and math.isfinite(value) and -MOST <= value <= MOST:
        return value
    return whole(value)


def text(value: object) -> str:
    """Return the value if it is text that may become part of a key or a path; ValueError if not."""
    if not isinstance(value, str) or not is_text(value):
        raise ValueError('not a text')
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is not a number')


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
