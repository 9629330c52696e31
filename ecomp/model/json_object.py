"""JSON that somebody wrote into etcd, read with care."""

from __future__ import annotations

import json
from typing import Any

VALUE_LIMIT = 1024**2
"""Bytes of a value looked at."""


def load_object(value: bytes) -> dict[str, Any]:
    """A JSON object from bytes; ValueError in plain words. NaN and doubled keys are refused."""
    if len(value) > VALUE_LIMIT:
        raise ValueError(f'it has {len(value)} bytes; the limit is {VALUE_LIMIT}')
    try:
        data = json.loads(value.decode(), parse_constant=_no_constant, object_pairs_hook=_no_doubles)
    except UnicodeDecodeError as error:
        raise ValueError('not text in UTF-8') from error
    except json.JSONDecodeError as error:
        raise ValueError(f'not JSON: {error}') from error
    except RecursionError as error:
        raise ValueError('it is nested too deeply') from error
    if not isinstance(data, dict):
        raise ValueError(f'expected a JSON object, not {type(data).__name__}')
    return data


def _no_constant(name: str) -> None:
    raise ValueError(f'not JSON: {name} is not a number')


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) != len(pairs):
        raise ValueError('not JSON we take: a key stands twice')
    return data
