"""Numbers, depth and text of values in etcd, chosen and random."""

from __future__ import annotations

import ast
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import flavor, keys, queue, quota
from ecomp.model.allocation import MAX_AMOUNT, MAX_SUM
from ecomp.model.audit import MAX_REPORT_BYTES, parse_report
from ecomp.model.choose import PlacementReason
from ecomp.model.json_object import MAX_DEPTH, MAX_VALUE_BYTES, dump, load_object
from ecomp.model.order import MAX_REQUEST_BYTES, InvalidRequest, Request, parse_request
from ecomp.model.record import Record, make_record
from ecomp.model.record import from_json as record_from_json
from ecomp.model.states import ACTIVE
from ecomp.model.stored import decode, encode
from ecomp.model.user_data import parse_shared_user_data
from ecomp.schedule import make_terminal
from ecomp.store.client import Delete, Entry, Put, Unchanged
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE, OTHER_UUID, make_request
from tests.kit.servers import TOP, Etcd
from tests.kit.store_client import open_store
from tests.security.mutants import HOSTILE_VALUES, make_mutant, make_nested
from tests.security.readers import FACTS, KEYS_BY_KIND, READERS, audit_values, check_case, parametrize_cases

KEY = keys.request(COMPUTE, INSTANCE)
LONG_NUMBER = '9' * 4300
HALF_CHARACTER = '\ud800'


TOO_DEEP = make_nested(MAX_DEPTH + 1)


def insert_number(value: dict[str, Any], text: str) -> bytes:
    return json.dumps(value).replace('"HERE"', text).encode()


@pytest.mark.fast
def test_values_that_no_reader_accepts_are_not_written() -> None:
    with pytest.raises(ValueError, match='not JSON compliant|Out of range'):
        encode(Record(INSTANCE, COMPUTE, ACTIVE, image=IMAGE, why=PlacementReason('spread', float('inf'), 3)))
    with pytest.raises(ValueError, match='not JSON compliant|Out of range'):
        dump({'weight': float('nan')})
    shown = dump(['\x7f\x9b\u202e' + HALF_CHARACTER], indent=0)
    assert shown.replace('\n', '').isprintable()
    assert json.loads(shown) == ['\x7f\x9b\u202e' + HALF_CHARACTER]


def find_json_dumps(source: str) -> list[int]:
    if 'json.dump' not in source:
        return []
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [node.lineno for node in calls if ast.unparse(node.func) in ('json.dumps', 'json.dump')]


@pytest.mark.fast
def test_one_function_writes_json() -> None:
    paths = ['model', 'scheduler', 'store', 'agent/host/upkeep.py', 'agent/host/state.py', 'schedule.py', 'compute.py']
    lines_by_file = {}
    for name in paths:
        top = TOP / 'ecomp' / name
        assert top.exists()
        for path in [top] if top.is_file() else sorted(top.rglob('*.py')):
            lines_by_file[str(path.relative_to(TOP))] = find_json_dumps(Path(path).read_text())
    assert [file for file in lines_by_file if lines_by_file[file]] == ['ecomp/model/json_object.py']


@pytest.mark.fast
def test_quota_at_its_bound_can_be_charged() -> None:
    full = decode(
        quota.Quota, insert_number({'version': 1, 'limits': {}, 'used': {'VCPU': 'HERE'}}, str(MAX_SUM)), project='p'
    )
    more = full.add_used({'VCPU': MAX_AMOUNT})
    assert decode(quota.Quota, encode(more).encode(), project='p') == more


@pytest.mark.fast
def test_json_that_is_nested_too_deeply_is_refused() -> None:
    for deep in (TOO_DEEP, {'a': TOO_DEEP}, make_nested(MAX_DEPTH)):
        with pytest.raises(ValueError, match='nested too deeply'):
            load_object(json.dumps({'version': deep}).encode())
    assert repr(load_object(json.dumps({'a': make_nested(MAX_DEPTH - 1)}).encode()))
    for depth in (500, 900, 100_000):
        value = b'{"version": 1, "error": ' + b'[' * depth + b']' * depth + b'}'
        with pytest.raises(ValueError, match='nested too deeply' if depth < MAX_REPORT_BYTES / 2 else 'the limit is'):
            parse_report(COMPUTE, value)
        with pytest.raises(ValueError, match='nested too deeply'):
            parse_shared_user_data(value, 'x')


@pytest.mark.fast
def test_key_with_half_a_character_can_be_used(etcd: Etcd) -> None:
    """A guest of such a project or group could be built, but its end never recorded."""
    key = keys.quota(f'{INSTANCE}{HALF_CHARACTER}')
    with open_store(etcd.endpoint) as store:
        assert store.get(key) is None
        assert store.commit([Unchanged(key, 0)], [Put(key, '7')])
        entry = store.get(key)
        assert entry is not None
        assert entry.value == b'7'
        assert len(store.snapshot(key).entries) == store.count(key) == 1
        assert store.commit([Unchanged(key, entry.revision)], [Delete(key)])
        assert store.get(key) is None


@pytest.mark.fast
@pytest.mark.parametrize('character', ['é', 'x', '中', '\U0001f600', '"', '\x7f'])
def test_record_of_the_largest_request_can_be_read(character: str) -> None:
    """Escaping text, as ecomp does when it writes, may triple its length."""
    room = MAX_REQUEST_BYTES - len(json.dumps(make_request(query='')).encode())
    escaped_size = 6 if character == '\x7f' else len(json.dumps(character, ensure_ascii=False).encode()) - 2
    value = json.dumps(make_request(query=character * (room // escaped_size)), ensure_ascii=False).encode()
    parsed = parse_request(COMPUTE, KEY, value)
    assert isinstance(parsed, Request), parsed
    assert isinstance(parse_request(COMPUTE, KEY, value.replace(b'"}', character.encode() * 7 + b'"}')), InvalidRequest)
    record = make_record(COMPUTE, parsed, 'now')
    written = encode(record).encode()
    assert len(written) <= MAX_VALUE_BYTES
    assert record_from_json(written) == record


@pytest.mark.fast
def test_numbers_with_thousands_of_digits_are_refused() -> None:
    with pytest.raises(ValueError, match='not a whole number from 1'):
        flavor.parse_flavor('f', f'resources=VCPU:{LONG_NUMBER}9')
    with pytest.raises(ValueError, match='a limit is a whole number'):
        quota.parse_limits([f'VCPU={LONG_NUMBER}9'])
    waiting = {
        'version': 1,
        'flavor': 'f',
        'instance': INSTANCE,
        'query': f'resources=VCPU:{LONG_NUMBER}9',
        'image': IMAGE,
    }
    parsed = queue.parse_queue_entry(keys.queue('f', INSTANCE), json.dumps(waiting).encode())
    assert isinstance(parsed, InvalidRequest)


@pytest.mark.fast
def test_provider_in_allocations_must_be_text() -> None:
    """The name of another provider can be part of a key only if it is valid text."""
    resources = {'resources': {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}}
    read = parse_request(
        COMPUTE, KEY, json.dumps(make_request(allocations={COMPUTE: resources, HALF_CHARACTER: resources})).encode()
    )
    assert isinstance(read, InvalidRequest)
    fine = parse_request(
        COMPUTE, KEY, json.dumps(make_request(allocations={COMPUTE: resources, OTHER_UUID: resources})).encode()
    )
    assert isinstance(fine, Request)


# Readers of all values that others write, on mutated valid values: what is accepted is written, read again and shown. A
# case is identified by its number, which always makes the same value. Any error but the product's own is a defect, and
# so is a case that does not end. Answers of placement are in test_placement.py.


@parametrize_cases(60)
@pytest.mark.parametrize('name', READERS)
def test_mutated_value_is_accepted_or_refused_with_a_reason(name: str, number: int) -> None:
    read, good = READERS[name]
    read(json.dumps(good).encode())
    for index in range(number):
        value = make_mutant(good, random.Random(f'{name}/{index}'))
        with check_case(name, index, value):
            read(value)


@given(
    st.sampled_from(sorted(READERS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(HOSTILE_VALUES),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=12,
    ),
)
def test_random_json_is_accepted_or_refused(name: str, value: Any) -> None:
    text = json.dumps(value).encode()
    with check_case(name, 0, text):
        READERS[name][0](text)


@parametrize_cases(75)
def test_audit_of_mutated_values_finishes(number: int) -> None:
    for index in range(number):
        rng = random.Random(f'audit/{index}')
        etcd = {}
        for name, key in KEYS_BY_KIND.items():
            good = READERS[name][1]
            value = make_mutant(good, rng) if rng.random() < 0.4 else json.dumps(good).encode()
            if rng.random() < 0.8:
                etcd[key] = Entry(key, value, rng.randrange(3), rng.randrange(2))
        with check_case('audit', index, etcd):
            audit_values(etcd)
            audit_values(etcd, FACTS)


@parametrize_cases(60)
def test_terminal_prints_only_printable_text(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(number):
        rng = random.Random(f'terminal/{index}')
        codes = (rng.randrange(rng.choice((32, 256, 0x110000))) for _ in range(80))
        text = ''.join(map(chr, codes))
        make_terminal().put(text)
        make_terminal().say(text)
    for output in capsys.readouterr():
        assert output.replace('\n', '').isprintable()
