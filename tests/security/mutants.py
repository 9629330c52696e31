"""Values that were good ones: with something else in a place, or nothing, or more; cut off, or with other bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
# What json.dumps does not write, by what stands for it until then.
RAW = {
    'RAW-HUGE': '1e999',
    'RAW-HUGER': '-1e999',
    'RAW-NAN': 'NaN',
    'RAW-ENDLESS': '9' * 5000,
    'RAW-LONG': '9' * 4299,
    'RAW-DEEP': '[' * 3000 + ']' * 3000,
    'RAW-DEEPER': '{"a":' * 700 + '1' + '}' * 700,
    'RAW-HALF': '[1, {"a": ',
    'RAW-DOUBLE': '{"a": 1, "a": 2}',
}


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth - 1):
        found = [found]
    return found


NASTY: list[Any] = [
    *RAW,
    *(None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**62, 2**63, 10**50, 10**51, 10**400, -(10**400)),
    *(0.5, -0.0, 1e-300, 1e49, 1e300, 1.5),
    *([], {}, [[]], [{}], {'': ''}, nested(51), [1, 'x', None], {'a': {'b': [1]}}),
    *('', 'x', '1', '-1', '0', 'x' * 300, 'é' * 3000, '\ud800', '\x00', 'a\nb\r\n'),
    '\x1b]0;x\x07\x1b[2J\x9b\u202e\x7f',
    *('../../x', '/', '%s{}{0}', '2026-01-31T12:00:00.000Z', '0001-01-01T00:00:00+14:00', '9999-12-31\n23:59:59-14:00'),
    *(UUID, UUID.upper(), 'active', 'gone', 'error', 'queued', 'spread', 'queue', 'affinity', 'f', 'VCPU'),
    'resources=VCPU:1',
]


def mutant(good: Any, rng: random.Random) -> bytes:
    value = json.loads(json.dumps(good))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        value = _changed(value, rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.7)
    for name, raw in RAW.items():
        text = text.replace(f'"{name}"', raw)
    found = text.encode(errors='surrogatepass')
    return _damaged(found, rng) if rng.random() < 0.12 else found


def _nasty(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(NASTY))  # else the next change would be one of NASTY itself


def _changed(value: Any, rng: random.Random) -> Any:
    if not isinstance(value, dict | list) or not value or rng.random() < 0.02:
        return _nasty(rng)
    places = list(value) if isinstance(value, dict) else list(range(len(value)))
    place = rng.choice(places)
    if isinstance(value[place], dict | list) and value[place] and rng.random() < 0.75:
        value[place] = _changed(value[place], rng)
        return value
    deed = rng.randrange(10)
    if deed == 0:
        del value[place]
    elif deed == 1 and isinstance(value, dict):
        name = rng.choice([each for each in NASTY if isinstance(each, str) and each not in RAW])
        value[name] = value.pop(place)
    elif deed == 2 and isinstance(value, dict):
        value[rng.choice(['x', 'version', 'instance', 'error', 'pages', ''])] = _nasty(rng)
    elif deed == 2:
        value.append(_nasty(rng))
    elif deed == 3:
        value[place] = rng.choice([[value[place]], {'x': value[place]}, str(value[place]), dict(enumerate('ab'))])
    else:
        value[place] = _nasty(rng)
    return value


def _damaged(value: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(value) + 1)
    deed = rng.randrange(4)
    if deed == 0:
        return value[:at]
    if deed == 1:
        return value[:at] + bytes(rng.randrange(256) for _ in range(rng.randrange(1, 4))) + value[at + 1 :]
    if deed == 2:
        return value[:at] + value[at : at + 40] * 3 + value[at:]
    return bytes(rng.randrange(256) for _ in range(rng.randrange(60)))
