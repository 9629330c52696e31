"""Readers of all that others write, on values that were good ones: what is understood is written, read again and shown.

A case is known by its number: the same number makes the same value. Anything that is raised but the product's own
errors is a defect, and so is what does not end. Answers of placement are in test_fuzz_placement.py.
"""

from __future__ import annotations

import json
import random
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys, planes
from ecomp.schedule import terminal
from ecomp.store.client import Entry
from tests.kit.hostile import COMPUTE, INSTANCE
from tests.security.mutants import NASTY, mutant
from tests.security.readers import PLACES, READERS, case, cases, compared


@cases(60)
@pytest.mark.parametrize('name', READERS)
def test_a_value_is_understood_or_refused_in_words(name: str, number: int) -> None:
    read, good = READERS[name]
    read(json.dumps(good).encode())
    for each in range(number):
        value = mutant(good, random.Random(f'{name}/{each}'))
        with case(name, each, value):
            read(value)


@given(
    st.sampled_from(sorted(READERS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(NASTY),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ),
)
def test_any_json_at_all(name: str, value: Any) -> None:
    text = json.dumps(value).encode()
    with case(name, 0, text):
        READERS[name][0](text)


@cases(150)
def test_an_audit_of_it_all_comes_to_its_end(number: int) -> None:
    for each in range(number):
        rng = random.Random(f'audit/{each}')
        etcd = {}
        for name, key in PLACES.items():
            good = READERS[name][1]
            value = mutant(good, rng) if rng.random() < 0.4 else json.dumps(good).encode()
            if name == 'record' and rng.random() < 0.2:
                etcd[keys.old_record(INSTANCE)] = Entry('/', value, rng.randrange(3), rng.randrange(2))
            if rng.random() < 0.8:
                etcd[key] = Entry(key, value, rng.randrange(3), rng.randrange(2))
        digests = {}
        with suppress(ValueError):
            digests[COMPUTE] = planes.from_pages([mutant(READERS['digest'][1], rng)])
        with case('audit', each, etcd):
            compared(etcd, digests)


@cases(60)
def test_what_is_put_on_a_terminal_is_printable(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    for each in range(number):
        rng = random.Random(f'terminal/{each}')
        codes = (rng.randrange(rng.choice((32, 256, 0x110000))) for _ in range(80))
        text = ''.join(map(chr, codes))
        terminal().put(text)
        terminal().say(text)
    for said in capsys.readouterr():
        assert said.replace('\n', '').isprintable()
