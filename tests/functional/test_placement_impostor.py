"""The placement client against everything that may stand where placement should be, and errors made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from ecomp.errors import (
    Conflict,
    EcompError,
    GenerationConflict,
    NoCapacity,
    NotFound,
    PlacementRefusal,
    UnknownOutcome,
    Unreachable,
)
from ecomp.placement import allocations, providers
from ecomp.placement.by_http import HEADERS
from ecomp.placement.client import Placement
from tests.functional.placement_client import claim, connected, new
from tests.kit.listening import CannedServer, make_answer


@contextmanager
def impostor(*answers: tuple[int, str, bytes]) -> Iterator[CannedServer]:
    """Whoever answers everything so."""
    more = {302: ('location: /elsewhere',), 503: ('retry-after: 3600',)}  # for which nobody waits
    with closing(CannedServer(*(make_answer(*each, *more.get(each[0], ())) for each in answers))) as server:
        yield server


HTML = b'<html><body>Welcome to the proxy</body></html>'


def error(
    status: int, code: str = 'placement.undefined_code', detail: str = 'a\n\n   reason '
) -> tuple[int, str, bytes]:
    body = {'errors': [{'status': status, 'title': 't', 'detail': detail, 'code': code, 'request_id': 'r'}]}
    return status, 'application/json', json.dumps(body).encode()


NOT_PLACEMENT = [
    (200, 'text/html', HTML),
    (200, 'application/json', b'[]'),
    (200, 'application/json', b'"text"'),
    (200, 'application/json', b'{"a": '),
    (200, 'application/json', b''),
    (200, 'application/json', b'\xff\xfe'),
    (302, 'text/html', HTML),
    (400, 'text/html', HTML),
    (401, 'text/html', HTML),
    (404, 'text/html', HTML),
    (403, 'application/json', b'{"errors": []}'),
    (409, 'text/html', HTML),
    (409, 'application/json', b'{"errors": "x"}'),
    (418, 'application/json', b'[7]'),
]


@pytest.mark.parametrize('says', NOT_PLACEMENT)
def test_what_is_not_placement_is_said_to_be_none(says: tuple[int, str, bytes]) -> None:
    with impostor(says) as server, connected(server.url) as client:
        with pytest.raises(Unreachable, match='not as placement does: is `placement:` right'):
            client.get('/resource_providers')
        assert server.asked == ['GET /resource_providers']


def expect_no_answer(body: object, *asks: Callable[[Placement], object]) -> None:
    """Expect each of these questions to refuse this JSON as no answer of placement."""
    with impostor((200, 'application/json', json.dumps(body).encode())) as server, connected(server.url) as client:
        for ask in asks:
            with pytest.raises(Unreachable, match='not as placement does'):
                ask(client)


def look(client: Placement, traits: bool = False) -> object:
    """Ask for all that there is to know of a provider."""
    return providers.look(client, new(), True, traits=traits, aggregates=False)


@pytest.mark.parametrize('says', [each for each in NOT_PLACEMENT if each[1] == 'text/html' or each[0] == 200])
def test_a_page_that_welcomes_us_is_no_claim(says: tuple[int, str, bytes]) -> None:
    with impostor(says) as server, connected(server.url) as client:
        with pytest.raises(Unreachable, match='not as placement does'):
            claim(client, new(), new())
        assert len(server.asked) == 1


INF = float('inf')


@pytest.mark.parametrize(
    'body',
    [
        {},
        {'allocation_requests': 7},
        {'allocation_requests': [{}]},
        {'allocation_requests': [7]},
        {'allocation_requests': [{'allocations': {'p': {}}}]},
        {'allocation_requests': []},
        {'allocation_requests': [], 'provider_summaries': []},
        {'allocation_requests': [], 'provider_summaries': {'p': {}}},
        {'allocation_requests': [], 'provider_summaries': {'p': {'resources': {'VCPU': {'capacity': 1}}}}},
        {'allocation_requests': [], 'provider_summaries': {'p': {'resources': {'VCPU': {'capacity': 'x', 'used': 0}}}}},
        {'allocation_requests': [], 'provider_summaries': {'p': {'resources': {'VCPU': {'capacity': INF, 'used': 0}}}}},
    ],
)
def test_other_json_than_candidates(body: dict[str, Any]) -> None:
    expect_no_answer(body, lambda client: allocations.candidates(client, 'resources=VCPU:1'))


@pytest.mark.parametrize(
    'body', [{}, {'allocations': 7}, {'allocations': {'p': {'resources': {'VCPU': 1}}}}, {'allocations': [1]}]
)
def test_other_json_than_a_consumer(body: dict[str, Any]) -> None:
    expect_no_answer(body, lambda client: allocations.consumer(client, new()))
    if body != {'allocations': {'p': {'resources': {'VCPU': 1}}}}:
        expect_no_answer(body, lambda client: allocations.of_provider(client, new()))


@pytest.mark.parametrize(
    'usages',
    [
        None,
        7,
        [],
        {'INSTANCE': 7},
        {'INSTANCE': ['VCPU']},
        {'INSTANCE': {'consumer_count': 'many'}},
        {'INSTANCE': {'consumer_count': 1, 'VCPU': 'x'}},
        {'INSTANCE': {'consumer_count': 1, 'VCPU': INF}},
        {'unknown': {'VCPU': None}},
    ],
)
def test_other_json_than_a_project_s_usages(usages: Any) -> None:
    body = {} if usages is None else {'usages': usages}
    expect_no_answer(body, lambda client: providers.project_usages(client, 'web'))


GOOD = {'total': 4, 'reserved': 0, 'allocation_ratio': 1.0, 'min_unit': 1, 'max_unit': 4, 'step_size': 1}


@pytest.mark.parametrize(
    'inventories',
    [
        {'VCPU': 7},
        {'VCPU': []},
        {'VCPU': {**GOOD, 'total': 'many'}},
        {'VCPU': {**GOOD, 'total': None}},
        {'VCPU': {**GOOD, 'allocation_ratio': INF}},
        {'VCPU': {**GOOD, 'allocation_ratio': True}},
        {'VCPU': {**GOOD, 'step_size': 0}},
        {'VCPU': {each: GOOD[each] for each in GOOD if each != 'max_unit'}},
    ],
)
def test_other_json_than_an_inventory(inventories: Any) -> None:
    expect_no_answer({'inventories': inventories, 'usages': {}}, look, lambda client: providers.shares(client, [new()]))


@pytest.mark.parametrize('usages', [{'VCPU': 'x'}, {'VCPU': None}, {'VCPU': INF}, {'VCPU': 0.5}, {'VCPU': {}}])
def test_other_json_than_usages(usages: Any) -> None:
    body = {'inventories': {'VCPU': GOOD}, 'usages': usages}
    expect_no_answer(body, look, lambda client: providers.usages(client, new()))


@pytest.mark.parametrize('traits', [7, 'abc', [7], [['x']], {'x': 1}])
def test_other_json_than_traits(traits: Any) -> None:
    body = {'inventories': {}, 'usages': {}, 'traits': traits, 'resource_provider_generation': 1}
    expect_no_answer(body, lambda client: look(client, traits=True))


ERRORS = [
    (error(400), PlacementRefusal),
    (error(401), EcompError),
    (error(403), EcompError),
    (error(404), NotFound),
    (error(406), EcompError),
    (error(409), NoCapacity),
    (error(409, 'placement.concurrent_update'), GenerationConflict),
    (error(409, 'placement.duplicate_name'), Conflict),
    (error(409, 'placement.inventory.inuse'), Conflict),
    (error(409, 'placement.resource_provider.inuse'), Conflict),
    (error(409, 'a code of tomorrow'), NoCapacity),
]


@pytest.mark.parametrize(('says', 'kind'), ERRORS)
def test_an_error_is_told_by_its_code_and_in_one_line(says: tuple[int, str, bytes], kind: type[EcompError]) -> None:
    with impostor(says) as server, connected(server.url) as client:
        for call in (lambda: client.get('/x'), lambda: client.write('PUT', '/x', {})):
            with pytest.raises(kind) as caught:
                call()
            assert type(caught.value) is kind
            assert '\n' not in str(caught.value)
            if says[0] != 406:
                assert 'a reason' in str(caught.value)
        assert len(server.asked) == 2  # none of these is tried again


def test_a_storm_of_500_is_not_made_worse() -> None:
    with impostor((500, 'text/html', HTML)) as server, connected(server.url) as client:
        with pytest.raises(Unreachable, match='fails with HTTP 500') as caught:
            client.get('/x')
        assert not isinstance(caught.value, UnknownOutcome)
        with pytest.raises(UnknownOutcome, match='fails with HTTP 500'):
            client.write('PUT', '/x', {})
        assert server.asked == ['GET /x', 'PUT /x']


def test_a_gateway_s_busy_is_asked_again_but_never_written_again() -> None:
    busy = (503, 'text/html', HTML)
    with impostor(busy, busy, (200, 'application/json', b'{"a": 1}')) as server, connected(server.url) as client:
        assert client.get('/x') == {'a': 1}
        assert len(server.asked) == 3
    with impostor(busy) as server, connected(server.url) as client:
        with pytest.raises(Unreachable, match='HTTP 503'):
            client.get('/x')
        assert len(server.asked) == 3
        with pytest.raises(UnknownOutcome, match='HTTP 503'):
            client.write('PUT', '/x', {})
        assert len(server.asked) == 4


def test_what_http_does_not_allow_in_a_path_is_quoted_and_what_is_quoted_stays() -> None:
    with impostor((200, 'application/json', b'{}')) as server, connected(server.url + '/a b') as client:
        client.get('/x?name=é #\ud800&y=%41:1,!z')
        assert server.asked == ['GET /a%20b/x?name=%C3%A9%20%23%5Cud800&y=%41:1,!z']


def test_one_microversion_is_named() -> None:
    # Named in the code rather than `latest`: placement's next version must not change our requests.
    assert HEADERS['openstack-api-version'] == 'placement 1.39'
