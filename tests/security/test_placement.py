"""A server that misbehaves instead of placement: answers are accepted or refused."""

from __future__ import annotations

import gzip
import itertools
import json
import logging
import random
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from ecomp.errors import EcompError, UnknownOutcome, Unreachable
from ecomp.model.choose import SPREAD, choose
from ecomp.model.explain import find_miss
from ecomp.model.facts import encode_facts, parse_facts
from ecomp.model.query import Amount
from ecomp.model.query import parse_query as parse_query
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement, parse_object
from ecomp.placement.http_client import AnswerLimits
from tests.kit.listening import ThreadedServer
from tests.security.answers import CALLS_AND_ANSWERS, QUERY, CannedPlacement
from tests.security.mutants import make_mutant
from tests.security.readers import check_case, parametrize_cases

MakePieces = Callable[[], Iterable[bytes]]


def make_response(body: bytes, status: str = '200 OK', *headers: str) -> bytes:
    lines = [f'HTTP/1.1 {status}', 'content-type: application/json', f'content-length: {len(body)}', *headers]
    return '\r\n'.join(lines).encode() + b'\r\n\r\n' + body


def make_json_response(value: object) -> bytes:
    return make_response(json.dumps(value).encode())


class WireServer(ThreadedServer):
    """Answers each request with the pieces of `answer`, where an empty piece is a short pause."""

    def __init__(self, answer: MakePieces) -> None:
        self.answer = answer
        self.request_count = 0
        self._open = True
        super().__init__()
        self.url = f'http://{self.address}'

    def close(self) -> None:
        self._open = False
        super().close()

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        while self._open and self._read(connection):
            self.request_count += 1
            for piece in self.answer():
                if not self._open:
                    return
                if piece:
                    connection.sendall(piece)
                else:
                    time.sleep(0.05)

    def _read(self, connection: socket.socket) -> bool:
        data = b''
        while b'\r\n\r\n' not in data:
            chunk = connection.recv(65536)
            if not chunk:
                return False
            data += chunk
        head, _, body = data.partition(b'\r\n\r\n')
        lengths = [line.split(b':')[1] for line in head.lower().split(b'\r\n') if line.startswith(b'content-length')]
        length = int(lengths[0]) if lengths else 0
        while len(body) < length:
            body += connection.recv(65536)
        return True


def start_wire_server(answer: MakePieces) -> closing[WireServer]:
    return closing(WireServer(answer))


PROVIDER = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
SHORT_LIMITS = AnswerLimits(200_000, 1.0)


@contextmanager
def open_client(server: WireServer, limits: AnswerLimits = SHORT_LIMITS) -> Iterator[Placement]:
    with closing(Placement(server.url, (2.0, 0.6), limits)) as placement:
        yield placement


def assert_refused(pieces: Callable[[], Iterable[bytes]], message: str, limits: AnswerLimits = SHORT_LIMITS) -> float:
    """Assert that a GET fails in one line, and a write with an unknown outcome.

    Returns:
        The seconds that the slower one took.
    """
    longest = 0.0
    with start_wire_server(pieces) as server:
        for call, kind in (
            (lambda placement: placement.get('/x'), Unreachable),
            (lambda placement: placement.write('PUT', '/x', {}), UnknownOutcome),
        ):
            with open_client(server, limits) as placement:
                started = time.monotonic()
                with pytest.raises(kind, match=message) as caught:
                    call(placement)
                longest = max(longest, time.monotonic() - started)
                assert str(caught.value).isprintable()
                assert len(str(caught.value)) < 1500
    return longest


HEAD = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n'
CHUNKED = HEAD + b'transfer-encoding: chunked\r\n\r\n'


def make_drip(head: bytes, piece: bytes = b' ') -> Callable[[], Iterator[bytes]]:
    def pieces() -> Iterator[bytes]:
        yield head
        while True:
            yield b''
            yield piece

    return pieces


DRIPS = [
    make_drip(HEAD + b'content-length: 1000000\r\n\r\n{'), make_drip(HEAD + b'\r\n{'),
    make_drip(CHUNKED, b'1\r\nx\r\n'), make_drip(HEAD + b'x-a: ', b'a'), make_drip(b'HTTP/1.1 200 ', b'O'),
    make_drip(b'HTTP/1.1 100 Continue\r\n', b'\r\nHTTP/1.1 100 Continue\r\n'),
]  # fmt: skip


@pytest.mark.parametrize('pieces', DRIPS, ids=range(len(DRIPS)))
def test_slow_answer_times_out(pieces: Callable[[], Iterator[bytes]]) -> None:
    """An endless answer of a byte a second blocked ecompute's planner thread (ENEMY 13)."""
    assert assert_refused(pieces, 'gave no complete answer within 1 s|not as placement does') < 5


@pytest.mark.parametrize('length', [b'-1', b'-1e999', b'-' + 20 * b'f', 20 * b'f', b'x', b''])
def test_invalid_chunk_length_is_refused(length: bytes) -> None:
    """A negative or huge chunk length caused a traceback, in the fuzzer's case 10,902."""
    pieces = [CHUNKED + length + b'\r\n{}\r\n0\r\n\r\n']
    assert_refused(lambda: pieces, 'not as placement does|no answer within')


def make_flood(head: bytes, piece: bytes) -> Callable[[], Iterator[bytes]]:
    return lambda: itertools.chain([head], itertools.repeat(piece))


PACKED = gzip.compress(b' ' * 100_000_000)
FLOODS = [
    make_flood(HEAD + b'\r\n', b' ' * 65536),
    make_flood(HEAD + b'content-length: 100000000000\r\n\r\n', b' ' * 65536),
    make_flood(CHUNKED, b'10000\r\n' + b' ' * 65536 + b'\r\n'),
    make_flood(b'', b'HTTP/1.1 100 Continue\r\n\r\n' * 1000),
    lambda: [make_response(PACKED, '200 OK', 'content-encoding: gzip')],
    lambda: [make_response(gzip.compress(b'{}'), '404 Not Found', 'content-encoding: gzip')],
    lambda: [make_response(b'{}', '200 OK', 'content-encoding: x')],
]


@pytest.mark.parametrize('pieces', FLOODS, ids=range(len(FLOODS)))
def test_endless_answer_is_refused(pieces: Callable[[], Iterable[bytes]]) -> None:
    """Such an answer used 3.6 GiB within 20 s, and more afterwards (ENEMY 13)."""
    tracemalloc.start()
    try:
        # Far from the limit of time: with tracemalloc a flood of short lines takes seconds for each megabyte.
        assert_refused(pieces, 'not as placement does', AnswerLimits(500_000, 120.0))
        assert tracemalloc.get_traced_memory()[1] < 40_000_000
    finally:
        tracemalloc.stop()


def test_connection_is_reused_with_a_new_time_limit() -> None:
    with (
        start_wire_server(lambda: [make_json_response({'a': 1})]) as server,
        open_client(server, AnswerLimits(1000, 0.8)) as placement,
    ):
        for _ in range(5):
            assert placement.get('/x') == {'a': 1}
            time.sleep(0.3)
    assert (server.request_count, server.connection_count) == (5, 1)


def test_threads_have_separate_limits() -> None:
    with start_wire_server(lambda: [make_json_response({'a': 1})]) as server, open_client(server) as placement:
        answers: list[dict[str, Any]] = []
        threads = [threading.Thread(target=lambda: answers.append(placement.get('/x'))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [{'a': 1}] * 4


INVALID_JSON = [
    b'[' * 100_000, b'{"a":' * 100_000, b'{"allocations": ' + b'[' * 900 + b']' * 900 + b'}',
    b'{"a": ' + b'9' * 5000 + b'}', b'{"a": NaN}', b'\xff\xfe{}', b'7', b'',
]  # fmt: skip


@pytest.mark.parametrize('body', INVALID_JSON)
@pytest.mark.parametrize('status', ['200 OK', '400 Bad Request', '409 Conflict', '404 Not Found'])
def test_invalid_json_is_refused_in_one_line(body: bytes, status: str) -> None:
    """Deep JSON and integers of more than 4,300 digits caused a traceback (ENEMY 17)."""
    with start_wire_server(lambda: [make_response(body, status)]) as server, open_client(server) as placement:
        for call in (lambda: allocations.read_consumer(placement, PROVIDER), lambda: placement.write('PUT', '/x', {})):
            with pytest.raises(EcompError) as caught:
                call()
            assert '\n' not in str(caught.value)
            assert 'not as placement does' in str(caught.value)


@pytest.mark.parametrize('part', ['[]', '{}', '0', '{"a":0}'])
def test_answer_with_too_many_parts_is_refused_unparsed(part: str) -> None:
    """48 MiB of empty lists took 1.3 GiB and 52 s to parse, though they arrived in time."""
    body = f'{{"allocations":[{",".join([part] * 2_100_000)}]}}'.encode()
    with (
        start_wire_server(lambda: [make_response(body)]) as server,
        open_client(server, AnswerLimits(10**8, 20.0)) as placement,
    ):
        tracemalloc.start()
        try:
            with pytest.raises(EcompError, match='not as placement does'):
                allocations.read_consumer(placement, PROVIDER)
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
    assert len(parse_object(body)['provider_summaries']) == 10_000


def test_error_message_of_placement_is_truncated() -> None:
    body = json.dumps({'errors': [{'detail': 'x ' * 50_000, 'code': 'y'}]}).encode()
    with (
        start_wire_server(lambda: [make_response(body, '400 Bad Request')]) as server,
        open_client(server) as placement,
    ):
        with pytest.raises(EcompError) as caught:
            placement.get('/x')
        assert len(str(caught.value)) <= 1000


INVENTORY = {'total': 4, 'reserved': 0, 'allocation_ratio': 1.0, 'min_unit': 1, 'max_unit': 4, 'step_size': 1}


def test_largest_numbers_do_not_overflow() -> None:
    largest = 10**50
    allocation = {PROVIDER: {'resources': {'VCPU': 1}}}
    for capacity, used in ((largest, largest), (largest, 0), (1, largest), (-largest, largest), (0, largest)):
        share = {'capacity': capacity, 'used': used}
        stock = {**INVENTORY, 'total': largest, 'max_unit': largest, 'allocation_ratio': 1e49}
        answer = {
            'allocation_requests': [{'allocations': allocation}],
            'provider_summaries': {PROVIDER: {'resources': {'VCPU': share}, 'traits': []}},
            'inventories': {'VCPU': stock},
            'usages': {'VCPU': used},
        }
        with (
            start_wire_server(lambda answer=answer: [make_json_response(answer)]) as server,
            open_client(server) as placement,
        ):  # type: ignore[misc]
            offer = allocations.read_candidates(placement, 'resources=VCPU:1')
            assert choose(offer, [PROVIDER], SPREAD, random.Random(0)).candidates
            provider = providers.read_provider(placement, PROVIDER, traits=False, aggregates=False)
            assert provider is not None
            assert provider.inventories['VCPU'].free >= 0
            assert providers.read_rooms(placement, [PROVIDER])
            too_much = provider.inventories['VCPU'].capacity + 1
            assert find_miss([Amount('VCPU', too_much)], provider).failures
            assert 'malformed facts' in parse_facts(encode_facts(provider, {}, ()).encode()).problem


def test_malformed_head_logs_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    heads = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nno colon\r\n x: y\r\ncontent-length: 2\r\n\r\n{}'
    with start_wire_server(lambda: [heads]) as server, open_client(server) as placement, pytest.raises(Unreachable):
        placement.get('/x')
    assert [record.message for record in caplog.records if record.exc_info] == []


# Mutated valid answers of placement, and invalid HTTP: each is accepted, or refused in one line. A case is identified
# by its number, as in test_values.py.


@parametrize_cases(35)
@pytest.mark.parametrize('name', CALLS_AND_ANSWERS)
def test_mutated_answer_is_accepted_or_refused(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.placement.allocations.EMPTY_CONSUMER_PAUSE_SECONDS', 0.0)
    monkeypatch.setattr('ecomp.placement.allocations.EMPTY_CONSUMER_SECONDS', 0.0)
    call, good = CALLS_AND_ANSWERS[name]
    client = CannedPlacement('http://nowhere.invalid')
    error = {'errors': [{'detail': 'x', 'code': 'placement.concurrent_update'}]}
    for index in range(number):
        rng = random.Random(f'{name}/{index}')
        client.status = rng.choice((200, 200, 200, 200, 200, 400, 404, 406, 500)) if index else 200
        client.body = make_mutant(good if client.status == 200 else error, rng) if index else json.dumps(good).encode()
        with check_case(name, index, client.body):
            call(client)


def make_broken_answer(rng: random.Random) -> bytes:
    status = rng.choice(('200 OK', '200', '409 Conflict', '999 x', ''))
    answer = make_response(make_mutant(CALLS_AND_ANSWERS['candidates'][1], rng)[:3000], status)
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


@parametrize_cases(130)
def test_broken_http_is_accepted_or_refused_in_one_line(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.placement.http_client.RETRY_PAUSES_SECONDS', (0.0, 0.0))
    current = [b'']

    def pieces() -> Iterator[bytes]:
        yield current[0]
        raise ConnectionError  # ends the connection

    with start_wire_server(pieces) as server:
        client = Placement(server.url, (2.0, 2.0), AnswerLimits(10**6, 5.0))
        for index in range(number):
            current[0] = make_broken_answer(random.Random(f'wire/{index}'))
            with check_case('wire', index, current[0]):
                allocations.read_candidates(client, QUERY)
            with check_case('wire, written', index, current[0]):
                client.write('PUT', '/x', {})
        client.close()
