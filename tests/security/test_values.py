"""Numbers, depth and text of values in etcd, chosen and random."""

from __future__ import annotations

import ast
import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import flavor, group, keys, order, planes, queue, quota
from ecomp.model.allocation import LARGEST, MOST
from ecomp.model.choose import Why
from ecomp.model.guest import SharedUserData, shared_user_data
from ecomp.model.json_object import DEPTH, VALUE_LIMIT, dump, load_object
from ecomp.model.order import SIZE_LIMIT, Invalid, Request, parse_request
from ecomp.model.record import ACTIVE, Record, new_record
from ecomp.model.record import from_json as record_from_json
from ecomp.model.record import to_json as record_to_json
from ecomp.schedule import terminal
from ecomp.store.client import Delete, Entry, Put, Unchanged
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE, OTHER, request
from tests.kit.servers import TOP, Etcd
from tests.kit.store_client import connected
from tests.security.mutants import NASTY, mutant, nested
from tests.security.readers import PLACES, READERS, case, cases, compared

# Numbers, depth and text of values in etcd: a reader either refuses them with a reason, or what it accepts can be
# written again.


KEY = keys.request(COMPUTE, INSTANCE)
HUGE = '1e999'
HUGER = '-1e999'
VAST = '9' * 4300
HALF = '\ud800'


DEEP = nested(DEPTH + 1)
SHALLOW = nested(DEPTH - 5)


def with_number(value: dict[str, Any], text: str) -> bytes:
    """Encode the value with `text` as the number at "HERE"."""
    return json.dumps(value).replace('"HERE"', text).encode()


def stored(**changed: Any) -> dict[str, Any]:
    return {**json.loads(record_to_json(Record(INSTANCE, COMPUTE, ACTIVE, image=IMAGE))), **changed}


WHY = {'weigh': 'spread', 'weight': 'HERE', 'of': 3}


@pytest.mark.fast
@pytest.mark.parametrize('number', [HUGE, HUGER, VAST, '1e400', '-' + VAST])
def test_a_number_that_is_none_stands_in_no_value(number: str) -> None:
    """`"weight": 1e999` made an instance that could be neither shown nor destroyed (ENEMY 6)."""
    with pytest.raises(ValueError, match='too large a number|a number of 430. digits'):
        load_object(with_number({'why': WHY}, number))
    parsed = parse_request(COMPUTE, KEY, with_number(request(why=WHY), number))
    assert isinstance(parsed, Invalid)
    with pytest.raises(ValueError, match='number'):
        record_from_json(with_number(stored(why=WHY), number))


@pytest.mark.fast
@pytest.mark.parametrize('number', ['1e300', '-1e300', '9' * 400, str(LARGEST + 1), 'true', '"x"', '[1]'])
def test_a_weight_that_nobody_weighed_is_none(number: str) -> None:
    parsed = parse_request(COMPUTE, KEY, with_number(request(why=WHY), number))
    assert isinstance(parsed, Request)
    assert parsed.why is None
    parsed_again = parse_request(COMPUTE, KEY, order.to_json(parsed).encode())
    assert parsed_again == parsed
    record = new_record(COMPUTE, parsed, 'now')
    assert record_from_json(record_to_json(record).encode()) == record


@pytest.mark.fast
def test_a_weight_is_kept() -> None:
    parsed = parse_request(COMPUTE, KEY, with_number(request(why=WHY), '0.75'))
    assert isinstance(parsed, Request)
    assert parsed.why == Why('spread', 0.75, 3)


@pytest.mark.fast
def test_nothing_is_written_that_nobody_reads() -> None:
    with pytest.raises(ValueError, match='not JSON compliant|Out of range'):
        record_to_json(Record(INSTANCE, COMPUTE, ACTIVE, image=IMAGE, why=Why('spread', float('inf'), 3)))
    with pytest.raises(ValueError, match='not JSON compliant|Out of range'):
        dump({'weight': float('nan')})
    shown = dump(['\x7f\x9b\u202e' + HALF], indent=0)
    assert shown.replace('\n', '').isprintable()
    assert json.loads(shown) == ['\x7f\x9b\u202e' + HALF]


def dumped_elsewhere(source: str) -> list[int]:
    """List the lines that call json.dump or json.dumps."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [node.lineno for node in calls if ast.unparse(node.func) in ('json.dumps', 'json.dump')]


@pytest.mark.fast
def test_one_function_writes_json() -> None:
    """JSON for etcd, state files and terminals is written in one place."""
    paths = ['model', 'scheduler', 'store', 'agent/host/digest.py', 'agent/host/state.py', 'schedule.py', 'compute.py']
    lines_by_file = {}
    for name in paths:
        top = TOP / 'ecomp' / name
        assert top.exists()
        for path in [top] if top.is_file() else sorted(top.rglob('*.py')):
            lines_by_file[str(path.relative_to(TOP))] = dumped_elsewhere(Path(path).read_text())
    assert [file for file in lines_by_file if lines_by_file[file]] == ['ecomp/model/json_object.py']


AMOUNTS: list[tuple[Callable[[bytes], Any], dict[str, Any]]] = [
    (lambda value: quota.from_json('p', value), {'version': 1, 'limits': {}, 'used': {'VCPU': 'HERE'}}),
    (lambda value: quota.from_json('p', value), {'version': 1, 'limits': {'VCPU': 'HERE'}, 'used': {}}),
    (record_from_json, stored(resources={'VCPU': 'HERE'})),
    (record_from_json, stored(attempts='HERE')),
]


@pytest.mark.fast
@pytest.mark.parametrize('number', [str(MOST + 1), '9' * 400, '-1', '1.5', 'true', VAST])
@pytest.mark.parametrize(('read', 'value'), AMOUNTS)
def test_an_amount_has_bounds(read: Callable[[bytes], Any], value: dict[str, Any], number: str) -> None:
    """A quota's `used` of 4,300 digits blocked every new instance of the project (ENEMY 17)."""
    with pytest.raises(ValueError, match='record|quota|number'):
        read(with_number(value, number))


@pytest.mark.fast
def test_a_quota_counts_to_its_bound() -> None:
    full = quota.from_json('p', with_number({'version': 1, 'limits': {}, 'used': {'VCPU': 'HERE'}}, str(MOST)))
    more = full.with_used({'VCPU': LARGEST})
    assert quota.from_json('p', quota.to_json(more).encode()) == more


VERSIONS: list[Callable[[Any], Any]] = [
    lambda version: planes.from_pages([json.dumps({'version': version, 'pages': 1}).encode()]),
    lambda version: planes.clearance_from_json(json.dumps({'version': version, 'leftovers': []}).encode()),
    lambda version: flavor.from_json('f', json.dumps({'version': version, 'resources': {'VCPU': 1}}).encode()),
    lambda version: group.from_json('g', json.dumps({'version': version, 'members': {}}).encode()),
    lambda version: quota.from_json('p', json.dumps({'version': version, 'limits': {}, 'used': {}}).encode()),
    lambda version: record_from_json(json.dumps(stored(version=version)).encode()),
]


@pytest.mark.fast
@pytest.mark.parametrize('version', [[1], {'a': 1}, True, 1.0, '1', None, 10**400, 'x' * 100_000, SHALLOW])
@pytest.mark.parametrize('read', VERSIONS)
def test_a_version_is_a_whole_number(read: Callable[[Any], Any], version: Any) -> None:
    """An unhashable version in one compute's digest broke `eschedule audit` for all (ENEMY 17)."""
    with pytest.raises(ValueError, match='version') as caught:
        read(version)
    assert len(str(caught.value)) < 2000


@pytest.mark.fast
def test_what_is_too_deep_is_refused_and_what_is_not_can_be_quoted() -> None:
    for deep in (DEEP, {'a': DEEP}, nested(DEPTH)):
        with pytest.raises(ValueError, match='nested too deeply'):
            load_object(json.dumps({'version': deep}).encode())
    assert repr(load_object(json.dumps({'a': nested(DEPTH - 1)}).encode()))
    for depth in (500, 900, 100_000):
        value = b'{"version": 1, "pages": 1, "error": ' + b'[' * depth + b']' * depth + b'}'
        with pytest.raises(ValueError, match='nested too deeply'):
            planes.from_pages([value])
        with pytest.raises(ValueError, match='cannot be read'):
            shared_user_data(value, 'x')


@pytest.mark.fast
@pytest.mark.parametrize(
    'guest',
    [
        {'instance': ['x'], 'compute': None, 'defined': True, 'running': True, 'disk': True},
        {'instance': 'x', 'compute': 7, 'defined': True, 'running': True, 'disk': True},
        {'instance': 'x', 'compute': None, 'defined': 'yes', 'running': True, 'disk': True},
        {'instance': 'x', 'compute': None, 'defined': True, 'running': True, 'disk': True, 'trouble': {}},
        {'instance': 'x'},
        7,
    ],
)
def test_a_guest_of_a_digest_is_one(guest: Any) -> None:
    with pytest.raises(ValueError, match='not a digest'):
        planes.from_pages([json.dumps({'version': 1, 'pages': 1, 'guests': [guest]}).encode()])


@pytest.mark.fast
@pytest.mark.parametrize('value', [7, None, {'a': 1}, ['x']])
def test_what_a_digest_names_is_text(value: Any) -> None:
    for name in ('without_base', 'seeds', 'isos', 'reservations', 'parts'):
        with pytest.raises(ValueError, match='not a digest'):
            planes.from_pages([json.dumps({'version': 1, 'pages': 1, name: {'x': value}}).encode()])
    leftover = {'kind': 'disk', 'name': value, 'mark': ''}
    with pytest.raises(ValueError, match='not a clearance'):
        planes.clearance_from_json(json.dumps({'version': 1, 'leftovers': [leftover]}).encode())


@pytest.mark.fast
@pytest.mark.parametrize('value', [b'7', b'{}', b'["x", 7]', b'[' * 100_000, b'[' + b'9' * 5000 + b']', b'\xff', b''])
def test_what_a_compute_says_that_it_removed_is_lines(value: bytes) -> None:
    with pytest.raises(ValueError, match='.'):
        planes.cleared_from_json(value)
    assert planes.cleared_from_json(b'["disk x: removed"]') == ['disk x: removed']


@pytest.mark.fast
@pytest.mark.parametrize('name', ['user_id', 'project_id'])
def test_half_of_a_character_waits_in_no_queue(name: str) -> None:
    """Placement fails to claim for it, and every taker of the queue would retry it forever."""
    fields = {'flavor': 'f', 'instance': INSTANCE, 'query': 'resources=VCPU:1,MEMORY_MB:1,DISK_GB:1', 'image': IMAGE}
    value = {'version': 1, **fields, 'user_id': 'u', 'project_id': 'p'}
    assert isinstance(queue.parse_waiting(keys.queue('f', INSTANCE), json.dumps(value).encode()), queue.QueueEntry)
    parsed = queue.parse_waiting(keys.queue('f', INSTANCE), json.dumps({**value, name: HALF}).encode())
    assert isinstance(parsed, Invalid)
    assert parsed.reason.startswith(f'{name}: ')


@pytest.mark.fast
def test_half_of_a_character_is_a_key_like_any_other(etcd: Etcd) -> None:
    """A guest of such a project or group could be built, but its end never recorded."""
    key = keys.quota(f'{INSTANCE}{HALF}')
    with connected(etcd.endpoint) as store:
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
def test_the_record_of_the_largest_request_is_read_again(character: str) -> None:
    """Escaping text, as ecomp does when it writes, may triple its length."""
    room = SIZE_LIMIT - len(json.dumps(request(query='')).encode())
    escaped_size = 6 if character == '\x7f' else len(json.dumps(character, ensure_ascii=False).encode()) - 2
    value = json.dumps(request(query=character * (room // escaped_size)), ensure_ascii=False).encode()
    parsed = parse_request(COMPUTE, KEY, value)
    assert isinstance(parsed, Request), parsed
    assert isinstance(parse_request(COMPUTE, KEY, value.replace(b'"}', character.encode() * 7 + b'"}')), Invalid)
    record = new_record(COMPUTE, parsed, 'now')
    written = record_to_json(record).encode()
    assert len(written) <= VALUE_LIMIT
    assert record_from_json(written) == record


@pytest.mark.fast
@pytest.mark.parametrize('amount', [{}, [], None, 1.5, {'a': SHALLOW}])
def test_a_flavor_s_amounts_are_numbers(amount: Any) -> None:
    with pytest.raises(ValueError, match='expected amounts'):
        flavor.from_json('f', json.dumps({'version': 1, 'resources': {'VCPU': amount}}).encode())


@pytest.mark.fast
def test_digits_without_end() -> None:
    with pytest.raises(ValueError, match='not a whole number from 1'):
        flavor.parse_flavor('f', f'resources=VCPU:{VAST}9')
    with pytest.raises(ValueError, match='a limit is a whole number'):
        quota.parse_limits([f'VCPU={VAST}9'])
    waiting = {'version': 1, 'flavor': 'f', 'instance': INSTANCE, 'query': f'resources=VCPU:{VAST}9', 'image': IMAGE}
    parsed = queue.parse_waiting(keys.queue('f', INSTANCE), json.dumps(waiting).encode())
    assert isinstance(parsed, Invalid)


@pytest.mark.fast
def test_user_data_in_etcd_is_read_with_care() -> None:
    shared = SharedUserData.of(b'#cloud-config\n')
    assert shared_user_data(shared.text.encode(), shared.sha256) == b'#cloud-config\n'
    doubled = shared.text.replace('{', '{"user_data": "x", ', 1)
    for value in (doubled.encode(), b'[' * 100_000, b'{"user_data": ' + b'9' * 5000 + b'}', b' ' * (VALUE_LIMIT + 1)):
        with pytest.raises(ValueError, match='it cannot be read'):
            shared_user_data(value, shared.sha256)


@pytest.mark.fast
def test_a_count_has_a_bound() -> None:
    for count in (LARGEST + 1, 10**400):
        parsed = parse_request(COMPUTE, KEY, json.dumps(request(count=count)).encode())
        assert isinstance(parsed, Invalid)
        assert 'is no number of instances' in parsed.reason


@pytest.mark.fast
def test_a_place_in_allocations_names_a_provider() -> None:
    """The name of another provider can be part of a key only if it is valid text."""
    resources = {'resources': {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}}
    read = parse_request(COMPUTE, KEY, json.dumps(request(allocations={COMPUTE: resources, HALF: resources})).encode())
    assert isinstance(read, Invalid)
    fine = parse_request(COMPUTE, KEY, json.dumps(request(allocations={COMPUTE: resources, OTHER: resources})).encode())
    assert isinstance(fine, Request)


# Readers of all values that others write, on mutated valid values: what is accepted is written, read again and shown. A
# case is identified by its number, which always makes the same value. Any error but the product's own is a defect, and
# so is a case that does not end. Answers of placement are in test_placement.py.


@cases(60)
@pytest.mark.parametrize('name', READERS)
def test_a_value_is_understood_or_refused_in_words(name: str, number: int) -> None:
    read, good = READERS[name]
    read(json.dumps(good).encode())
    for index in range(number):
        value = mutant(good, random.Random(f'{name}/{index}'))
        with case(name, index, value):
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
    for index in range(number):
        rng = random.Random(f'audit/{index}')
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
        with case('audit', index, etcd):
            compared(etcd, digests)


@cases(60)
def test_what_is_put_on_a_terminal_is_printable(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    for index in range(number):
        rng = random.Random(f'terminal/{index}')
        codes = (rng.randrange(rng.choice((32, 256, 0x110000))) for _ in range(80))
        text = ''.join(map(chr, codes))
        terminal().put(text)
        terminal().say(text)
    for output in capsys.readouterr():
        assert output.replace('\n', '').isprintable()
