"""A server that misbehaves instead of placement: answers are accepted or refused."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ecomp.cli.operators import as_findings, as_hosts
from ecomp.errors import EcompError, UnknownOutcome, Unreachable
from ecomp.model.allocation import difference
from ecomp.model.audit import audit
from ecomp.model.choose import SPREAD, WEIGHS, choose, distribute
from ecomp.model.explain import miss, nearest
from ecomp.model.host import Computes, InEtcd, InPlacement, Living, hosts
from ecomp.model.planes import Planes, ProviderState
from ecomp.model.query import Amount
from ecomp.model.query import parse as parse_query
from ecomp.placement import allocations, providers
from ecomp.placement.by_http import Answer, AnswerLimits
from ecomp.placement.client import Placement, parse
from ecomp.store.client import Entry
from tests.kit.forms import texts
from tests.kit.hostile import COMPUTE, INSTANCE, OTHER
from tests.security.mutants import mutant
from tests.security.readers import PLACES, READERS, case, cases, shown
from tests.security.wire import Wire, said, whole, wire

# A server in place of placement: its answer ends, and is a valid answer or an error in one line.


NAME = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
SHORT = AnswerLimits(200_000, 1.0)


@contextmanager
def client(server: Wire, limits: AnswerLimits = SHORT) -> Iterator[Placement]:
    placement = Placement(server.url, (2.0, 0.6), limits)
    try:
        yield placement
    finally:
        placement.close()


def refused(pieces: Callable[[], Iterable[bytes]], says: str, limits: AnswerLimits = SHORT) -> float:
    """Assert that a GET fails in one line, and a write with an unknown outcome.

    Returns:
        The seconds that the slower one took.
    """
    longest = 0.0
    with wire(pieces) as server:
        for call, kind in (
            (lambda placement: placement.get('/x'), Unreachable),
            (lambda placement: placement.write('PUT', '/x', {}), UnknownOutcome),
        ):
            with client(server, limits) as placement:
                started = time.monotonic()
                with pytest.raises(kind, match=says) as caught:
                    call(placement)
                longest = max(longest, time.monotonic() - started)
                assert str(caught.value).isprintable()
                assert len(str(caught.value)) < 1500
    return longest


HEAD = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n'
CHUNKED = HEAD + b'transfer-encoding: chunked\r\n\r\n'


def drip(head: bytes, each: bytes = b' ') -> Callable[[], Iterator[bytes]]:
    """Make an answer that sends its head, then a few bytes at a time forever."""

    def pieces() -> Iterator[bytes]:
        yield head
        while True:
            yield b''
            yield each

    return pieces


DRIPS = [
    drip(HEAD + b'content-length: 1000000\r\n\r\n{'),
    drip(HEAD + b'\r\n{'),
    drip(CHUNKED, b'1\r\nx\r\n'),
    drip(HEAD + b'x-a: ', b'a'),
    drip(b'HTTP/1.1 200 ', b'O'),
    drip(b'HTTP/1.1 100 Continue\r\n', b'\r\nHTTP/1.1 100 Continue\r\n'),
]


@pytest.mark.parametrize('pieces', DRIPS, ids=range(len(DRIPS)))
def test_an_answer_that_drips_ends(pieces: Callable[[], Iterator[bytes]]) -> None:
    """An endless answer of a byte a second blocked ecompute's planner thread (ENEMY 13)."""
    assert refused(pieces, 'gave no whole answer in 1 s|not as placement does') < 5


@pytest.mark.parametrize('length', [b'-1', b'-1e999', b'-' + 20 * b'f', 20 * b'f', b'x', b''])
def test_a_piece_of_a_length_that_is_none(length: bytes) -> None:
    """A negative or huge chunk length caused a traceback; the fuzzer's case 10,902 found it."""
    pieces = [CHUNKED + length + b'\r\n{}\r\n0\r\n\r\n']
    refused(lambda: pieces, 'not as placement does|no answer in')


def flood(head: bytes, each: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.chain([head], itertools.repeat(each))


PACKED = gzip.compress(b' ' * 100_000_000)
FLOODS = [
    flood(HEAD + b'\r\n', b' ' * 65536),
    flood(HEAD + b'content-length: 100000000000\r\n\r\n', b' ' * 65536),
    flood(CHUNKED, b'10000\r\n' + b' ' * 65536 + b'\r\n'),
    flood(b'', b'HTTP/1.1 100 Continue\r\n\r\n' * 1000),
    lambda: [whole(PACKED, '200 OK', 'content-encoding: gzip')],
    lambda: [whole(gzip.compress(b'{}'), '404 Not Found', 'content-encoding: gzip')],
    lambda: [whole(b'{}', '200 OK', 'content-encoding: x')],
]


@pytest.mark.parametrize('pieces', FLOODS, ids=range(len(FLOODS)))
def test_an_answer_without_an_end_ends(pieces: Callable[[], Iterable[bytes]]) -> None:
    """Such an answer used 3.6 GiB within 20 s, and more afterwards (ENEMY 13)."""
    tracemalloc.start()
    try:
        refused(pieces, 'not as placement does', AnswerLimits(2_000_000, 20.0))
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_a_connection_is_kept_for_the_next_call() -> None:
    """The time limit starts again with each call."""
    with wire(lambda: [said({'a': 1})]) as server, client(server, AnswerLimits(1000, 0.8)) as placement:
        for _ in range(5):
            assert placement.get('/x') == {'a': 1}
            time.sleep(0.3)
    assert (server.asked, server.made) == (5, 1)


def test_what_is_silent_for_too_long_is_given_up_as_before() -> None:
    assert refused(lambda: itertools.chain([HEAD], itertools.repeat(b'', 40)), 'gave no answer in 0.6 s') < 2


def test_threads_have_their_limits_each() -> None:
    with wire(lambda: [said({'a': 1})]) as server, client(server) as placement:
        answers: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda: answers.append(placement.get('/x'))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [{'a': 1}] * 4


UNREADABLE = [
    b'[' * 100_000,
    b'{"a":' * 100_000,
    b'{"allocations": ' + b'[' * 900 + b']' * 900 + b'}',
    b'{"a": ' + b'9' * 5000 + b'}',
    b'{"a": NaN}',
    b'\xff\xfe{}',
    b'7',
    b'',
]


@pytest.mark.parametrize('body', UNREADABLE)
@pytest.mark.parametrize('status', ['200 OK', '400 Bad Request', '409 Conflict', '404 Not Found'])
def test_what_is_no_json_is_one_line(body: bytes, status: str) -> None:
    """Deep JSON and integers of more than 4,300 digits caused a traceback (ENEMY 17)."""
    with wire(lambda: [whole(body, status)]) as server, client(server) as placement:
        for call in (
            lambda: allocations.consumer(placement, NAME),
            lambda: placement.write('PUT', '/x', {}),
        ):
            with pytest.raises(EcompError) as caught:
                call()
            assert '\n' not in str(caught.value)
            assert 'not as placement does' in str(caught.value)


@pytest.mark.parametrize('part', ['[]', '{}', '0', '{"a":0}'])
def test_an_answer_of_many_small_parts_is_not_parsed(part: str) -> None:
    """48 MiB of empty lists took 1.3 GiB and 52 s to parse, though they arrived in time."""
    body = f'{{"allocations":[{",".join([part] * 2_100_000)}]}}'.encode()
    with wire(lambda: [whole(body)]) as server, client(server, AnswerLimits(10**8, 20.0)) as placement:
        tracemalloc.start()
        try:
            with pytest.raises(EcompError, match='not as placement does'):
                allocations.consumer(placement, NAME)
            assert tracemalloc.get_traced_memory()[1] < 4 * len(body)
        finally:
            tracemalloc.stop()


def test_ten_thousand_candidates_are_parsed() -> None:
    """Each has as many traits as a processor and its hypervisor have."""
    amounts = dict.fromkeys(('VCPU', 'MEMORY_MB', 'DISK_GB'), 1)
    computes = [f'{number:032x}' for number in range(10_000)]
    offers = [{'allocations': {uid: {'resources': amounts}}, 'mappings': {'': [uid]}} for uid in computes]
    resources = {name: {'capacity': 1, 'used': 0} for name in amounts}
    summary = {'resources': resources, 'traits': [f'HW_CPU_{number}' for number in range(150)]}
    summary |= dict.fromkeys(('parent_provider_uuid', 'root_provider_uuid'))
    body = json.dumps({'allocation_requests': offers, 'provider_summaries': dict.fromkeys(computes, summary)}).encode()
    assert len(parse(body)['provider_summaries']) == 10_000


def test_what_placement_says_is_wrong_is_not_endless() -> None:
    body = json.dumps({'errors': [{'detail': 'x ' * 50_000, 'code': 'y'}]}).encode()
    with wire(lambda: [whole(body, '400 Bad Request')]) as server, client(server) as placement:
        with pytest.raises(EcompError) as caught:
            placement.get('/x')
        assert len(str(caught.value)) <= 1000


DIGITS = 10**4299
INFINITE = float('inf')
NUMBERS = [DIGITS, -DIGITS, 10**400, True, '1', None, 1.5, [1], {}, '\ud800']
TEXTS = [7, None, ['x'], {}, '\ud800', True]
STOCK = {'total': 4, 'reserved': 0, 'allocation_ratio': 1.0, 'min_unit': 1, 'max_unit': 4, 'step_size': 1}


def bodies() -> Iterator[tuple[str, Callable[[Placement], Any], object]]:
    """Yield (name, call, answer), each answer with one thing wrong in it."""
    for wrong in NUMBERS:
        for name in ('capacity', 'used'):
            share = {'capacity': 4, 'used': 1, name: wrong}
            offer = {'allocation_requests': [], 'provider_summaries': {NAME: {'resources': {'VCPU': share}}}}
            yield 'candidates', lambda client: allocations.candidates(client, 'resources=VCPU:1'), offer
            yield 'shares', lambda client: providers.shares(client, [NAME]), offer
            free = {'provider_summaries': {NAME: {'resources': {'VCPU': share}, 'traits': []}}}
            yield 'free', lambda client: providers.with_free(client, 'VCPU'), free
        by_provider = {NAME: {'resources': {'VCPU': wrong}}}
        yield 'held', lambda client: allocations.of_provider(client, NAME), {'allocations': by_provider}
        consumer = {'allocations': by_provider, 'consumer_generation': 1}
        yield 'consumer', lambda client: allocations.consumer(client, NAME), consumer
        good = {NAME: {'resources': {'VCPU': 1}}}
        for generation in ({'consumer_generation': wrong}, {}):
            yield 'generation', lambda client: allocations.consumer(client, NAME), {'allocations': good, **generation}
        for name in STOCK:
            if (name, wrong) != ('allocation_ratio', 1.5):
                stock = {'inventories': {'VCPU': {**STOCK, name: wrong}}}
                yield name, lambda client: providers.inventory(client, NAME), stock
        yield 'usages', lambda client: providers.usages(client, NAME), {'usages': {'VCPU': wrong}}
        used = {'usages': {'INSTANCE': {'consumer_count': 1, 'VCPU': wrong}}}
        yield 'project', lambda client: providers.project_usages(client, 'p'), used
        names = {'traits': [], 'resource_provider_generation': wrong}
        yield 'traits', lambda client: providers.names_of(client, NAME, providers.TRAITS), names
        yield 'set', lambda client: providers.set_inventory(client, NAME, {'VCPU': {'total': 1}}), {'generation': wrong}
    for wrong in TEXTS:
        provider = {'uuid': NAME, 'name': NAME, 'root_provider_uuid': NAME}
        for name in provider:
            listed = {'resource_providers': [{**provider, name: wrong}]}
            yield 'everyone', providers.everyone, listed
        yield 'names', providers.names, {'resource_providers': [{**provider, 'uuid': wrong}]}
        yield 'matching', lambda client: providers.matching(client, 'x'), {'resource_providers': [{'uuid': wrong}]}
        yield 'name', lambda client: providers.name(client, NAME), {'name': wrong}
        summary = {'resources': {'VCPU': {'capacity': 4, 'used': 1}}, 'traits': [wrong]}
        yield 'had', lambda client: providers.with_free(client, 'VCPU'), {'provider_summaries': {NAME: summary}}
        owned = {'allocations': {NAME: {'resources': {'VCPU': 1}}}, 'consumer_generation': 1, 'user_id': wrong}
        yield 'owner', lambda client: allocations.consumer(client, NAME), owned
    for shape in ([], 'ab', 7, {NAME: 7}, {NAME: 'ab'}, {NAME: {'resources': 'ab'}}, {NAME: {'resources': ['ab']}}):
        yield 'held', lambda client: allocations.of_provider(client, NAME), {'allocations': shape}


def test_what_is_taken_has_its_kind_and_its_bounds() -> None:
    """The ten places of ENEMY 17: a number of 4,300 digits, 1e999, another shape."""
    current: list[object] = [None]
    accepted = []
    with wire(lambda: [said(current[0])]) as server, client(server, AnswerLimits(10**6, 20.0)) as placement:
        for name, call, answer in bodies():
            current[0] = answer
            try:
                call(placement)
            except Unreachable as error:
                if 'not as placement does' not in str(error):
                    raise
            else:
                accepted.append((name, str(answer)[:300]))
    assert accepted == []


@pytest.mark.parametrize('number', ['1e999', '-1e999', '1e400'])
def test_a_number_that_is_none(number: str) -> None:
    share = {'capacity': 'HERE', 'used': 1}
    offer = {'allocation_requests': [], 'provider_summaries': {NAME: {'resources': {'VCPU': share}}}}
    stock = {'inventories': {'VCPU': {**STOCK, 'allocation_ratio': 'HERE'}}}
    for answer, call in (
        (offer, lambda client: allocations.candidates(client, 'resources=VCPU:1')),
        (stock, lambda client: providers.inventory(client, NAME)),
    ):
        body = whole(json.dumps(answer).replace('"HERE"', number).encode())
        with (
            wire(lambda body=body: [body]) as server,  # type: ignore[misc]
            client(server) as placement,
            pytest.raises(Unreachable, match='not as placement does'),
        ):
            call(placement)


def test_the_largest_numbers_are_reckoned_with() -> None:
    """Calculations with the largest numbers that placement can send do not overflow."""
    largest = 10**50
    allocation = {NAME: {'resources': {'VCPU': 1}}}
    for capacity, used in ((largest, largest), (largest, 0), (1, largest), (-largest, largest), (0, largest)):
        share = {'capacity': capacity, 'used': used}
        stock = {**STOCK, 'total': largest, 'max_unit': largest, 'allocation_ratio': 1e49}
        answer = {
            'allocation_requests': [{'allocations': allocation}],
            'provider_summaries': {NAME: {'resources': {'VCPU': share}, 'traits': []}},
            'inventories': {'VCPU': stock},
            'usages': {'VCPU': used},
        }
        with wire(lambda answer=answer: [said(answer)]) as server, client(server) as placement:  # type: ignore[misc]
            offer = allocations.candidates(placement, 'resources=VCPU:1')
            assert choose(offer, [NAME], SPREAD, random.Random(0)).tries
            provider = providers.look(placement, NAME, True, traits=False, aggregates=False)
            assert provider is not None
            assert provider.inventories['VCPU'].free >= 0
            assert providers.shares(placement, [NAME])
            free = providers.with_free(placement, 'VCPU')[NAME]
            assert miss([Amount('VCPU', largest)], free).failures or capacity == largest


def test_no_library_logs_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The head of the answer is malformed."""
    caplog.set_level(logging.WARNING)
    heads = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nno colon\r\n x: y\r\ncontent-length: 2\r\n\r\n{}'
    with wire(lambda: [heads]) as server, client(server) as placement, pytest.raises(Unreachable):
        placement.get('/x')
    assert [record.message for record in caplog.records if record.exc_info] == []


# Mutated valid answers of placement, and invalid HTTP: each is accepted, or refused in one line. A case is identified
# by its number, as in test_values.py.


class Canned(Placement):
    body = b''
    status = 200

    def _send(self, *given: Any) -> Answer:
        answer = Answer(self.status, self.body, {})
        if self.status == 200:
            return answer
        raise self._error(answer, given[-1])


GOOD_STOCK = {'total': 4, 'reserved': 0, 'allocation_ratio': 1.5, 'min_unit': 1, 'max_unit': 4, 'step_size': 1}
HELD = {COMPUTE: {'resources': {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}}}
ROOMS = {'resources': {'VCPU': {'capacity': 4, 'used': 1}, 'DISK_GB': {'capacity': 4, 'used': 1}}}
WHOSE = {'uuid': COMPUTE, 'name': COMPUTE, 'root_provider_uuid': COMPUTE}
QUERY = 'resources=VCPU:2,DISK_GB:9&required=T'


def take_candidates(client: Placement) -> None:
    offer = allocations.candidates(client, QUERY)
    for weigh in WEIGHS:
        choice = choose(offer, [COMPUTE], weigh, random.Random(0))
        distribute(choice.tries, offer.rooms, 3, weigh, random.Random(0))


def take_shares(client: Placement) -> None:
    shares = providers.shares(client, [COMPUTE, OTHER])
    in_placement = {uuid: InPlacement(uuid, uuid, share) for uuid, share in shares.items()}
    shown(*texts(as_hosts(hosts(InEtcd(Computes({COMPUTE: Living('h')})), in_placement))))


def take_look(client: Placement) -> None:
    provider = providers.look(client, COMPUTE, True, traits=True, aggregates=True)
    if provider is None:
        return
    for query in (QUERY, 'resources=VCPU:1', f'resources=VCPU:{10**4000}'):
        for result in nearest([miss(parse_query(query), provider)]):
            assert all(failure.why for failure in result.failures)


def take_free(client: Placement) -> None:
    providers_by_uuid = providers.with_free(client, 'VCPU')
    for query in (QUERY, 'resources=VCPU:1'):
        for result in nearest([miss(parse_query(query), provider) for provider in providers_by_uuid.values()]):
            assert all(failure.why for failure in result.failures)


def take_plane(client: Placement) -> None:
    provider = ProviderState(COMPUTE, providers.inventory(client, COMPUTE), allocations.of_provider(client, COMPUTE))
    etcd = {key: Entry(key, json.dumps(READERS[name][1]).encode(), 1, 1) for name, key in PLACES.items()}
    _, used = providers.project_usages(client, 'p')
    shown(*texts(as_findings(audit(Planes({COMPUTE: provider}, etcd, {}, {}, {'p': used})))))


def take_claim(client: Placement) -> None:
    consumer = allocations.consumer(client, INSTANCE)
    allocations.claim(client, {INSTANCE: {COMPUTE: {'VCPU': 1}}}, 'u', 'p', lambda: None)
    difference({COMPUTE: {'VCPU': 1}}, consumer.allocations)
    allocations.release_once(client, INSTANCE, consumer)


CALLS: dict[str, tuple[Callable[[Placement], object], Any]] = {
    'candidates': (
        take_candidates, {'allocation_requests': [{'allocations': HELD}], 'provider_summaries': {COMPUTE: ROOMS}}
    ),
    'consumer': (take_claim, {'allocations': HELD, 'consumer_generation': 1, 'user_id': 'u', 'project_id': 'p'}),
    'of provider': (lambda client: allocations.of_provider(client, COMPUTE), {'allocations': HELD}),
    'inventory': (
        lambda client: providers.is_as(client, COMPUTE, {'VCPU': {'total': 4.0}}), {'inventories': {'VCPU': GOOD_STOCK}}
    ),
    'set inventory': (lambda client: providers.set_inventory(client, COMPUTE, {}), {'generation': 1}),
    'usages': (lambda client: providers.usages(client, COMPUTE), {'usages': {'VCPU': 1}}),
    'project': (
        lambda client: providers.project_usages(client, 'p'), {'usages': {'INSTANCE': {'consumer_count': 1, 'VCPU': 1}}}
    ),
    'names': (
        *(lambda client: (providers.names(client), providers.everyone(client)), {'resource_providers': [WHOSE, WHOSE]}),
    ),
    'name': (lambda client: (providers.name(client, COMPUTE), providers.ensure(client, COMPUTE)), WHOSE),
    'shares': (
        take_shares,
        {'provider_summaries': {COMPUTE: ROOMS}, 'usages': {'VCPU': 1}, 'inventories': {'VCPU': GOOD_STOCK}},
    ),
    'look': (
        take_look,
        {
            **{'inventories': {'VCPU': GOOD_STOCK, 'DISK_GB': GOOD_STOCK}, 'usages': {'VCPU': 1}},
            **{'traits': ['T'], 'aggregates': [], 'resource_provider_generation': 1},
        },
    ),
    'free': (take_free, {'provider_summaries': {COMPUTE: {**ROOMS, 'traits': ['T']}}}),
    'traits': (
        lambda client: providers.change_names(client, COMPUTE, providers.TRAITS, lambda names: names | {'T'}),
        {'traits': ['U'], 'resource_provider_generation': 1},
    ),
    'audit': (
        take_plane,
        {'inventories': {'VCPU': GOOD_STOCK}, 'allocations': HELD, 'usages': {'INSTANCE': {'consumer_count': 1}}},
    ),
}


@cases(35)
@pytest.mark.parametrize('name', CALLS)
def test_an_answer_is_placement_s_or_is_none(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.placement.allocations.EMPTY_PAUSE', 0.0)
    monkeypatch.setattr('ecomp.placement.allocations.EMPTY_SECONDS', 0.0)
    call, good = CALLS[name]
    client = Canned('http://nowhere.invalid')
    error = {'errors': [{'detail': 'x', 'code': 'placement.concurrent_update'}]}
    for index in range(number):
        rng = random.Random(f'{name}/{index}')
        client.status = rng.choice((200, 200, 200, 200, 200, 400, 404, 406, 500)) if index else 200
        client.body = mutant(good if client.status == 200 else error, rng) if index else json.dumps(good).encode()
        with case(name, index, client.body):
            call(client)


def broken(rng: random.Random) -> bytes:
    """Make an answer that may not even be valid HTTP."""
    status = rng.choice(('200 OK', '200', '409 Conflict', '999 x', ''))
    answer = whole(mutant(CALLS['candidates'][1], rng)[:3000], status)
    action = rng.randrange(8)
    if action == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    if action == 1:
        return answer[: rng.randrange(len(answer))]
    heads = [b'content-length: -1', b'content-length: 99999', b'content-length: x', b'transfer-encoding: chunked']
    heads += [b'content-encoding: gzip', b'x: ' + b'y' * 70_000, b'no colon', b'\x00: \xff', b' z: 1']
    heads += [b'connection: close']
    heads += [b'location: http://127.0.0.1:1/', b'retry-after: 9999', b'content-type: application/json; charset=utf-7']
    position = answer.index(b'\r\n') + 2
    for _ in range(rng.randrange(1, 4)):
        answer = answer[:position] + rng.choice(heads) + rng.choice((b'\r\n', b'\n', b'\r')) + answer[position:]
    return answer


@cases(130)
def test_what_comes_over_the_wire_is_an_answer_or_one_line(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.placement.by_http.RETRY_PAUSES', (0.0, 0.0))
    current = [b'']

    def pieces() -> Iterator[bytes]:
        yield current[0]
        raise ConnectionError  # ends the connection

    with wire(pieces) as server:
        client = Placement(server.url, (2.0, 2.0), AnswerLimits(10**6, 5.0))
        for index in range(number):
            current[0] = broken(random.Random(f'wire/{index}'))
            with case('wire', index, current[0]):
                allocations.candidates(client, QUERY)
            with case('wire, written', index, current[0]):
                client.write('PUT', '/x', {})
        client.close()
