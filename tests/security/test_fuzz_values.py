"""Readers of all that others write, on values that were good ones: what is understood is written, read again and shown.

A case is known by its number: the same number makes the same value. Anything that is raised but the product's own
errors is a defect, and so is what does not end.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.shares import as_flavors, as_groups, as_members, as_quota, as_quotas
from ecomp.cli.show import as_detail, as_findings, as_hosts, as_list, no_address
from ecomp.cli.timeline import drawn
from ecomp.cli.timeline import to_dict as timeline_to_dict
from ecomp.cli.why import Explanation, in_sentences
from ecomp.cli.why import to_dict as why_to_dict
from ecomp.errors import EcompError
from ecomp.model import cluster, digest, flavor, group, keys, quota
from ecomp.model import instance as requesting
from ecomp.model import queue as queues
from ecomp.model import record as records
from ecomp.model.allocation import MOST, difference
from ecomp.model.audit import audit
from ecomp.model.choose import WEIGHS, choose, distribute
from ecomp.model.computes import NOBODY, Computes, Living, living_in
from ecomp.model.explain import miss, nearest
from ecomp.model.group import Group, Membership
from ecomp.model.guest import Guest
from ecomp.model.guest_data import SharedUserData, shared_user_data
from ecomp.model.host import InEtcd, InPlacement, hosts
from ecomp.model.instance import SIZE_LIMIT, Invalid, Request
from ecomp.model.planes import KeyValue, Planes, ProviderState, involved
from ecomp.model.power import Power
from ecomp.model.query import parse
from ecomp.model.record import Failure, Interface, Progress, Record
from ecomp.placement import allocations, claiming, providers, room, traits
from ecomp.placement.client import Placement
from ecomp.placement.limited import AnswerLimits
from ecomp.schedule import terminal
from ecomp.store import released
from ecomp.store.client import Entry
from ecomp.store.presence import _holder, _word
from tests.kit.forms import LOOKS, documents, texts
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE, OTHER, request
from tests.security.mutants import NASTY, mutant
from tests.security.wire import whole, wire

NOW = '2026-01-31T12:00:00.000Z'
SHARED = SharedUserData.of(b'#cloud-config\n')


def shown(*told: str) -> None:
    """It can be shown: what is JSON is JSON, and the terminal's own escape would change nothing of it."""
    for text in told:
        lines = text.split('\n')
        assert all(line.isprintable() for line in lines), text
        if text.startswith(('{', '[{')):
            json.loads(text, parse_constant=lambda name: pytest.fail(name))


def shown_record(found: Record) -> None:
    told = Explanation(found, NOBODY, found.why, Group('g', 'affinity', True, {found.instance: found.compute}))
    for each in (as_list([found]), as_detail(found)):
        shown(*texts(each))
    shown(in_sentences(told), *documents(why_to_dict(told)))
    for look in LOOKS:
        shown(drawn([found, found], look))
    shown(*documents(timeline_to_dict([found, found])))
    assert no_address(replace(found, state=records.BUILDING))


class Refused(Exception):
    """It was refused in these words."""


def taken(read: Callable[..., Any], *given: Any) -> Any:
    """What it reads; Refused for the error that it says it raises: a ValueError with words in it."""
    try:
        return read(*given)
    except UnicodeEncodeError:
        raise  # a text that was taken, and cannot be written
    except ValueError as error:
        raise Refused(str(error)) from error


def read_request(value: bytes) -> None:
    found = requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), value)
    if isinstance(found, Invalid):
        assert len(found.reason) <= requesting.REASON_LIMIT
        read_record(records.to_json(records.refused_record(COMPUTE, found._replace(instance=INSTANCE), NOW)).encode())
        return
    again = requesting.to_json(found).encode()
    if len(again) <= SIZE_LIMIT:
        assert requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), again) == found
    record = records.new_record(COMPUTE, found, NOW)
    assert records.from_json(records.to_json(record).encode(), INSTANCE) == record
    shown_record(record)
    difference(found.allocations, {OTHER: {'VCPU': 1}})


def read_record(value: bytes) -> None:
    found = taken(records.from_json, value, INSTANCE)
    assert records.from_json(records.to_json(found).encode(), INSTANCE) == found
    shown_record(found)


def read_waiting(value: bytes) -> None:
    key = keys.queue('f', INSTANCE)
    shown_record(queues.record_of(key, value))
    found = queues.parse_waiting(key, value)
    if isinstance(found, Invalid):
        return
    assert queues.parse_waiting(key, queues.to_json(found).encode()) == found
    asked = requesting.to_json(found.request(COMPUTE, NOW)).encode()
    taken = requesting.parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), asked)
    assert isinstance(taken, Request) or len(asked) > SIZE_LIMIT


def read_group(value: bytes) -> None:
    found = taken(group.from_json, 'g', value)
    assert group.from_json('g', group.to_json(found).encode()) == found
    found.excludes(COMPUTE)
    found.broken()
    shown(*texts(as_groups([found])), *texts(as_members([found], Computes({}, {COMPUTE: 'hv1'}), several=False)))


def read_quota(value: bytes) -> None:
    found = taken(quota.from_json, 'p', value)
    more = found.with_used(quota.charge({'VCPU': 7})).without_used({'VCPU': 1})
    assert quota.from_json('p', quota.to_json(more).encode()) == more
    quota.refusal('p', found.excess(quota.charge({'VCPU': MOST})))
    shown(*texts(as_quotas([found])), *texts(as_quota([found], several=True)))


def read_flavor(value: bytes) -> None:
    found = taken(flavor.from_json, 'f', value)
    assert flavor.from_json('f', flavor.to_json(found).encode()) == found
    parse(flavor.on_top(found, 'resources=VCPU:2&required=T'))
    shown(*texts(as_flavors({'f': (found, 'etcd')})))


def compared(etcd: dict[str, KeyValue], digests: dict[str, digest.Digest]) -> None:
    involved(etcd)
    shown(*texts(as_findings(audit(Planes({COMPUTE: ProviderState(COMPUTE)}, etcd, digests)))))


def read_digest(value: bytes) -> None:
    found = taken(digest.from_pages, [value])
    assert digest.from_pages([each.encode() for each in digest.to_pages(found)]) == found
    compared({}, {COMPUTE: found})


def read_clearance(value: bytes) -> None:
    found = taken(digest.clearance_from_json, value)
    assert digest.clearance_from_json(digest.clearance_to_json(found).encode()) == found


def read_compute(value: bytes) -> None:
    entry = Entry(keys.compute(COMPUTE), value, 1, 1)
    said, holder = living_in(entry.value), _holder(entry)
    for each in ('hostname', 'since'):
        assert _word(holder or {}, each).isprintable()
    found = hosts(InEtcd(Computes({COMPUTE: said})), {})
    shown(*texts(as_hosts(found)))


def read_announced(value: bytes) -> None:
    assert INSTANCE in requesting.announced(keys.attempt(INSTANCE), value)
    compared({keys.attempt(INSTANCE): KeyValue(value, 1, 7)}, {})


def read_known(value: bytes) -> None:
    found = taken(cluster.from_json, value)
    assert cluster.from_json(cluster.to_json(found).encode()) == found
    cluster.unlike(found, value)


RECORD = Record(
    *(INSTANCE, COMPUTE, 'active'),
    image=IMAGE,
    resources={'VCPU': 1, 'DISK_GB': 2},
    query='resources=VCPU:1',
    user_id='u',
    project_id='p',
    addresses=(Interface('default', '52:54:00:00:00:01', '10.0.0.1', 'lease', '10.0.0.1'),),
    console='h:/c',
    stages={'requested': NOW, 'scheduled': NOW, 'started': '2026-01-31T12:00:01.000Z'},
    error=Failure('image', 'x', 'y'),
    fault='z',
    name='web1',
    power=f'{OTHER}:off',
    progress=Progress('image', 1, 2),
    group=Membership('web'),
    why=requesting.why_from({'weigh': 'spread', 'weight': 0.5, 'of': 3}),
)
WHOLE = request(
    query='resources=VCPU:1',
    stages={'requested': NOW},
    name='web1',
    ssh_keys=['ssh-ed25519 AAAA x'],
    user_data='eA==',
    count=3,
    group={'name': 'web', 'policy': 'affinity', 'strict': True},
    why={'weigh': 'spread', 'weight': 0.5, 'of': 3},
    power=Power('stop', OTHER)._asdict(),
    resources={'VCPU': 1},
)
TOMBSTONE = {**WHOLE, 'allocations': {}, 'image': None}
WAITING = {
    **{name: WHOLE[name] for name in ('version', 'instance', 'image', 'user_id', 'project_id')},
    **{name: WHOLE[name] for name in ('stages', 'name', 'group')},
    **{'flavor': 'f', 'query': 'resources=VCPU:1,MEMORY_MB:1,DISK_GB:1&required=T', 'ssh_keys': ['x'], 'count': 1},
}
DIGEST = digest.Digest(
    {INSTANCE: Guest(INSTANCE, COMPUTE, True, True, True)},
    *({INSTANCE: '/base'}, {'52:54:00:00:00:01': INSTANCE}, {INSTANCE: ''}),
    {'52:54:00:00:00:01': f'{INSTANCE} 10.0.0.1'},
    {'x.part': '1/2'},
)
ALIVE = {'version': '1', 'hostname': 'h', 'since': NOW, 'token': 't', 'boot': 'b', 'pid': '7'}

READERS: dict[str, tuple[Callable[[bytes], object], Any]] = {
    'request': (read_request, WHOLE),
    'tombstone': (read_request, TOMBSTONE),
    'record': (read_record, json.loads(records.to_json(RECORD))),
    'waiting': (read_waiting, WAITING),
    'group': (
        read_group, {'version': 1, 'policy': 'affinity', 'strict': True, 'members': {INSTANCE: COMPUTE, OTHER: ''}}
    ),
    'quota': (read_quota, {'version': 1, 'limits': {'VCPU': 10, 'instances': 3}, 'used': {'VCPU': 1, 'instances': 1}}),
    'flavor': (read_flavor, {'version': 1, 'resources': {'VCPU': 1}, 'required': ['T'], 'forbidden': ['U']}),
    'digest': (read_digest, json.loads(digest.to_pages(DIGEST)[0])),
    'clearance': (read_clearance, {'version': 1, 'leftovers': [{'kind': 'disk', 'name': INSTANCE, 'mark': 'x'}]}),
    'cleared': (lambda value: taken(digest.cleared_from_json, value), ['disk x: removed']),
    'user-data': (lambda value: taken(shared_user_data, value, SHARED.sha256), json.loads(SHARED.text)),
    'announced': (read_announced, {'version': 1, 'instances': [INSTANCE, OTHER], 'query': 'x', 'host': 'h', 'pid': 1}),
    'compute': (read_compute, ALIVE),
    'name': (lambda value: taken(requesting.named, value), {'version': 1, 'instance': INSTANCE}),
    'taker': (queues.marked_by, {'version': 1, 'compute': COMPUTE}),
    'cluster': (lambda value: taken(cluster.identity, value), {'version': 1, 'identity': OTHER, 'since': NOW}),
    'known': (read_known, {'version': 1, 'identity': OTHER, 'cluster': 2**63, 'revision': 7, 'term': 2}),
    'released': (lambda value: released.to_json(released.from_json(value)), {'generations': {INSTANCE: 3}}),
}


def cases(few: int) -> Any:
    """So many always, and 20,000 with --all."""
    return pytest.mark.parametrize('number', [few, pytest.param(20_000, marks=pytest.mark.slow)])


@contextmanager
def case(name: str, number: int, value: object) -> Iterator[None]:
    """One case; AssertionError that names it for anything but the product's own errors."""
    try:
        yield
    except Refused as error:
        said = str(error)
    except EcompError as error:
        said = str(error)
    except Exception as error:
        raise AssertionError(f'case {number} of {name}: {type(error).__name__}: {error}; {value!r:.2000}') from error
    else:
        said = 'understood'
    assert said, (name, number, value)
    assert '\n' not in said, (name, number, value)


@cases(60)
@pytest.mark.parametrize('name', READERS)
def test_a_value_is_understood_or_refused_in_words(name: str, number: int) -> None:
    read, good = READERS[name]
    if name != 'address':
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


PLACES = {
    'request': keys.request(COMPUTE, INSTANCE),
    'tombstone': keys.request(OTHER, INSTANCE),
    'record': keys.record(COMPUTE, INSTANCE),
    'waiting': keys.queue('f', INSTANCE),
    'group': keys.group('web'),
    'quota': keys.quota('p'),
    'flavor': keys.flavor('f'),
    'announced': keys.attempt(OTHER),
    'compute': keys.compute(COMPUTE),
    'name': keys.name('web1'),
    'taker': keys.taker(keys.queue('f', INSTANCE)),
}


@cases(150)
def test_an_audit_of_it_all_comes_to_its_end(number: int) -> None:
    for each in range(number):
        rng = random.Random(f'audit/{each}')
        etcd = {}
        for name, key in PLACES.items():
            good = READERS[name][1]
            value = mutant(good, rng) if rng.random() < 0.4 else json.dumps(good).encode()
            if name == 'record' and rng.random() < 0.2:
                etcd[keys.old_record(INSTANCE)] = KeyValue(value, rng.randrange(3), rng.randrange(2))
            if rng.random() < 0.8:
                etcd[key] = KeyValue(value, rng.randrange(3), rng.randrange(2))
        digests = {}
        with suppress(ValueError):
            digests[COMPUTE] = digest.from_pages([mutant(READERS['digest'][1], rng)])
        with case('audit', each, etcd):
            compared(etcd, digests)


# Placement


class Canned(Placement):
    """Answers everything with the same bytes."""

    body = b''
    status = 200

    def _send(self, *given: Any) -> requests.Response:
        answer = requests.Response()
        answer.status_code, answer._content = self.status, self.body
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
    found = room.look(client, COMPUTE, True, traits=True, aggregates=True)
    if found is None:
        return
    for query in (QUERY, 'resources=VCPU:1', f'resources=VCPU:{10**4000}'):
        for each in nearest([miss(parse(query), found)]):
            assert all(failure.why for failure in each.failures)


def take_free(client: Placement) -> None:
    found = room.with_free(client, 'VCPU')
    for query in (QUERY, 'resources=VCPU:1'):
        for each in nearest([miss(parse(query), provider) for provider in found.values()]):
            assert all(failure.why for failure in each.failures)


def take_plane(client: Placement) -> None:
    provider = ProviderState(COMPUTE, providers.inventory(client, COMPUTE), allocations.of_provider(client, COMPUTE))
    etcd = {key: KeyValue(json.dumps(READERS[name][1]).encode(), 1, 1) for name, key in PLACES.items()}
    _, used = providers.project_usages(client, 'p')
    shown(*texts(as_findings(audit(Planes({COMPUTE: provider}, etcd, {}, {}, {'p': used})))))


def take_claim(client: Placement) -> None:
    held = allocations.consumer(client, INSTANCE)
    claiming.claim(client, {INSTANCE: {COMPUTE: {'VCPU': 1}}}, 'u', 'p', lambda: None)
    difference({COMPUTE: {'VCPU': 1}}, held.allocations)
    allocations.release(client, INSTANCE, held)


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
    'names': (lambda client: (providers.names(client), room.everyone(client)), {'resource_providers': [WHOSE, WHOSE]}),
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
        lambda client: traits.change(client, COMPUTE, traits.TRAITS, lambda names: names | {'T'}),
        {'traits': ['U'], 'resource_provider_generation': 1},
    ),
    'audit': (
        take_plane, {'inventories': {'VCPU': STOCK}, 'allocations': HELD, 'usages': {'INSTANCE': {'consumer_count': 1}}}
    ),
}


@cases(35)
@pytest.mark.parametrize('name', CALLS)
def test_an_answer_is_placement_s_or_is_none(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.placement.claiming.EMPTY_PAUSE', 0.0)
    monkeypatch.setattr('ecomp.placement.claiming.EMPTY_SECONDS', 0.0)
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
    monkeypatch.setattr('ecomp.placement.by_requests._Retry.sleep', lambda *_: None)
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
