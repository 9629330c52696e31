"""Mutations of valid values: replaced, removed or added parts, cut-off or damaged bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
# JSON that json.dumps cannot write, by its placeholder.
RAW_JSON = {
    'RAW-HUGE': '1e999', 'RAW-HUGER': '-1e999', 'RAW-NAN': 'NaN',
    'RAW-ENDLESS': '9' * 5000, 'RAW-LONG': '9' * 4299, 'RAW-DEEP': '[' * 3000 + ']' * 3000,
    'RAW-DEEPER': '{"a":' * 700 + '1' + '}' * 700, 'RAW-HALF': '[1, {"a": ', 'RAW-DOUBLE': '{"a": 1, "a": 2}',
}  # fmt: skip


def make_nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


HOSTILE_VALUES: list[Any] = [
    *RAW_JSON,
    *(None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**62, 2**63, 10**50, 10**51, 10**400, -(10**400)),
    *(0.5, -0.0, 1e-300, 1e49, 1e300, 1.5),
    *([], {}, [[]], [{}], {'': ''}, make_nested(51), [1, 'x', None], {'a': {'b': [1]}}),
    *('', 'x', '1', '-1', '0', 'x' * 300, 'é' * 3000, '\ud800', '\x00', 'a\nb\r\n'),
    '\x1b]0;x\x07\x1b[2J\x9b\u202e\x7f',
    *('../../x', '/', '%s{}{0}', '2026-01-31T12:00:00.000Z', '0001-01-01T00:00:00+14:00', '9999-12-31\n23:59:59-14:00'),
    *(UUID, UUID.upper(), 'active', 'gone', 'error', 'queued', 'spread', 'queue', 'affinity', 'f', 'VCPU'),
    'resources=VCPU:1',
]


def make_mutant(valid: Any, rng: random.Random) -> bytes:
    value = json.loads(json.dumps(valid))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        value = _change(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.7)
    for name, raw in RAW_JSON.items():
        text = text.replace(f'"{name}"', raw)
    encoded = text.encode(errors='surrogatepass')
    return _damage(encoded, rng) if rng.random() < 0.12 else encoded


def _pick_hostile(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(HOSTILE_VALUES))  # a copy, because the next change must not alter HOSTILE_VALUES


def _change(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.02:
        return _pick_hostile(rng)
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    place = rng.choice(places)
    if isinstance(value[place], dict | list) and value[place] and rng.random() < 0.75:
        value[place] = _change(value[place], rng)
        return value
    action = rng.randrange(10)
    if action == 0:
        del value[place]
    elif action == 1 and isinstance(value, dict):
        name = rng.choice([each for each in HOSTILE_VALUES if isinstance(each, str) and each not in RAW_JSON])
        value[name] = value.pop(place)
    elif action == 2 and isinstance(value, dict):
        value[rng.choice(['x', 'version', 'instance', 'error', 'pages', ''])] = _pick_hostile(rng)
    elif action == 2:
        value.append(_pick_hostile(rng))
    elif action == 3:
        value[place] = rng.choice([[value[place]], {'x': value[place]}, str(value[place]), dict(enumerate('ab'))])
    else:
        value[place] = _pick_hostile(rng)
    return value


def _damage(value: bytes, rng: random.Random) -> bytes:
    position = rng.randrange(len(value) + 1)
    action = rng.randrange(4)
    if action == 0:
        return value[:position]
    if action == 1:
        return value[:position] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 4))) + value[position + 1 :]
    if action == 2:
        return value[:position] + value[position : position + 40] * 3 + value[position:]
    return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
