"""Answers of placement that were good ones, and what HTTP may not even know: each is an answer, or refused in one line.

A case is known by its number, as in test_fuzz_values.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ecomp.cli.operators import as_findings, as_hosts
from ecomp.model.allocation import difference
from ecomp.model.audit import audit
from ecomp.model.choose import WEIGHS, choose, distribute
from ecomp.model.explain import miss, nearest
from ecomp.model.host import Computes, InEtcd, InPlacement, Living, hosts
from ecomp.model.planes import Planes, ProviderState
from ecomp.model.query import parse
from ecomp.placement import allocations, providers
from ecomp.placement.by_http import Answer, AnswerLimits
from ecomp.placement.client import Placement
from ecomp.store.client import Entry
from tests.kit.forms import texts
from tests.kit.hostile import COMPUTE, INSTANCE, OTHER
from tests.security.mutants import mutant
from tests.security.readers import PLACES, READERS, case, cases, shown
from tests.security.wire import whole, wire


class Canned(Placement):
    body = b''
    status = 200

    def _send(self, *given: Any) -> Answer:
        answer = Answer(self.status, self.body, {})
        if self.status == 200:
            return answer
        raise self._error(answer, given[-1])


STOCK = {'total': 4, 'reserved': 0, 'allocation_ratio': 1.5, 'min_unit': 1, 'max_unit': 4, 'step_size': 1}
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
    found = providers.shares(client, [COMPUTE, OTHER])
    there = {uuid: InPlacement(uuid, uuid, each) for uuid, each in found.items()}
    shown(*texts(as_hosts(hosts(InEtcd(Computes({COMPUTE: Living('h')})), there))))


def take_look(client: Placement) -> None:
    found = providers.look(client, COMPUTE, True, traits=True, aggregates=True)
    if found is None:
        return
    for query in (QUERY, 'resources=VCPU:1', f'resources=VCPU:{10**4000}'):
        for each in nearest([miss(parse(query), found)]):
            assert all(failure.why for failure in each.failures)


def take_free(client: Placement) -> None:
    found = providers.with_free(client, 'VCPU')
    for query in (QUERY, 'resources=VCPU:1'):
        for each in nearest([miss(parse(query), provider) for provider in found.values()]):
            assert all(failure.why for failure in each.failures)


def take_plane(client: Placement) -> None:
    provider = ProviderState(COMPUTE, providers.inventory(client, COMPUTE), allocations.of_provider(client, COMPUTE))
    etcd = {key: Entry(key, json.dumps(READERS[name][1]).encode(), 1, 1) for name, key in PLACES.items()}
    _, used = providers.project_usages(client, 'p')
    shown(*texts(as_findings(audit(Planes({COMPUTE: provider}, etcd, {}, {}, {'p': used})))))


def take_claim(client: Placement) -> None:
    held = allocations.consumer(client, INSTANCE)
    allocations.claim(client, {INSTANCE: {COMPUTE: {'VCPU': 1}}}, 'u', 'p', lambda: None)
    difference({COMPUTE: {'VCPU': 1}}, held.allocations)
    allocations.release_once(client, INSTANCE, held)


CALLS: dict[str, tuple[Callable[[Placement], object], Any]] = {
    'candidates': (
        take_candidates, {'allocation_requests': [{'allocations': HELD}], 'provider_summaries': {COMPUTE: ROOMS}}
    ),
    'consumer': (take_claim, {'allocations': HELD, 'consumer_generation': 1, 'user_id': 'u', 'project_id': 'p'}),
    'of provider': (lambda client: allocations.of_provider(client, COMPUTE), {'allocations': HELD}),
    'inventory': (
        lambda client: providers.is_as(client, COMPUTE, {'VCPU': {'total': 4.0}}), {'inventories': {'VCPU': STOCK}}
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
        take_shares, {'provider_summaries': {COMPUTE: ROOMS}, 'usages': {'VCPU': 1}, 'inventories': {'VCPU': STOCK}}
    ),
    'look': (
        take_look,
        {
            **{'inventories': {'VCPU': STOCK, 'DISK_GB': STOCK}, 'usages': {'VCPU': 1}},
            **{'traits': ['T'], 'aggregates': [], 'resource_provider_generation': 1},
        },
    ),
    'free': (take_free, {'provider_summaries': {COMPUTE: {**ROOMS, 'traits': ['T']}}}),
    'traits': (
        lambda client: providers.change_names(client, COMPUTE, providers.TRAITS, lambda names: names | {'T'}),
        {'traits': ['U'], 'resource_provider_generation': 1},
    ),
    'audit': (
        take_plane, {'inventories': {'VCPU': STOCK}, 'allocations': HELD, 'usages': {'INSTANCE': {'consumer_count': 1}}}
    ),
}


@cases(35)
@pytest.mark.parametrize('name', CALLS)
def test_an_answer_is_placement_s_or_is_none(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.placement.allocations.EMPTY_PAUSE', 0.0)
    monkeypatch.setattr('ecomp.placement.allocations.EMPTY_SECONDS', 0.0)
    take, good = CALLS[name]
    client = Canned('http://nowhere.invalid')
    error = {'errors': [{'detail': 'x', 'code': 'placement.concurrent_update'}]}
    for each in range(number):
        rng = random.Random(f'{name}/{each}')
        client.status = rng.choice((200, 200, 200, 200, 200, 400, 404, 406, 500)) if each else 200
        client.body = mutant(good if client.status == 200 else error, rng) if each else json.dumps(good).encode()
        with case(name, each, client.body):
            take(client)


def broken(rng: random.Random) -> bytes:
    """An answer that HTTP may not even know."""
    status = rng.choice(('200 OK', '200', '409 Conflict', '999 x', ''))
    answer = whole(mutant(CALLS['candidates'][1], rng)[:3000], status)
    deed = rng.randrange(8)
    if deed == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(200)))
    if deed == 1:
        return answer[: rng.randrange(len(answer))]
    heads = [b'content-length: -1', b'content-length: 99999', b'content-length: x', b'transfer-encoding: chunked']
    heads += [b'content-encoding: gzip', b'x: ' + b'y' * 70_000, b'no colon', b'\x00: \xff', b' z: 1']
    heads += [b'connection: close']
    heads += [b'location: http://127.0.0.1:1/', b'retry-after: 9999', b'content-type: application/json; charset=utf-7']
    at = answer.index(b'\r\n') + 2
    for _ in range(rng.randrange(1, 4)):
        answer = answer[:at] + rng.choice(heads) + rng.choice((b'\r\n', b'\n', b'\r')) + answer[at:]
    return answer


@cases(130)
def test_what_comes_over_the_wire_is_an_answer_or_one_line(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.placement.by_http.RETRY_PAUSES', (0.0, 0.0))
    current = [b'']

    def pieces() -> Iterator[bytes]:
        yield current[0]
        raise ConnectionError  # it is at its end

    with wire(pieces) as server:
        client = Placement(server.url, (2.0, 2.0), AnswerLimits(10**6, 5.0))
        for each in range(number):
            current[0] = broken(random.Random(f'wire/{each}'))
            with case('wire', each, current[0]):
                allocations.candidates(client, QUERY)
            with case('wire, written', each, current[0]):
                client.write('PUT', '/x', {})
        client.close()
