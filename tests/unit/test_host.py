"""A compute as both planes tell of it: its state, what lives there, and what may be removed with it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ecomp.cli.operators import as_hosts
from ecomp.model.allocation import Room
from ecomp.model.host import (
    Computes,
    Host,
    InEtcd,
    InPlacement,
    Leftovers,
    Living,
    hosts,
    leftovers,
    living,
    refusal,
    there,
)
from ecomp.model.order import Invalid, Request
from ecomp.model.record import Failure, Record
from ecomp.model.status import BY_OPERATOR, DISABLED
from tests.kit.forms import text

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


# What eschedule hosts shows


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
        assert {each.compute: each.state for each in hosts(etcd, providers)} == {HOST: 'orphaned', OTHER: 'silent'}
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
    # Unless etcd knows it: then it is shown with what placement says of it.
    (shown,) = hosts(InEtcd(up({HOST: 'hv1'})), foreign)
    assert shown == Host(HOST, 'hv1', 'up', 0, foreign[HOST].shares, said=Living('hv1'))


def test_what_is_no_uuid_is_no_compute() -> None:
    assert hosts(InEtcd(up({'x': 'y'}), junk={'': ['z']}), {}) == []
    assert hosts(InEtcd(records={A: record(A, 'active', 'x')}), {}) == []


def test_hosts_are_sorted_by_name_and_those_without_come_last() -> None:
    third = 'c' + OTHER[1:]
    shown = hosts(InEtcd(up({third: 'hv1', OTHER: 'hv2'})), provider())
    assert [each.compute for each in shown] == [third, OTHER, HOST]


def test_a_host_that_is_away_is_shown_by_its_name() -> None:
    known = Computes({OTHER: Living('hv2', '1.1.0', 'kvm', True)}, {HOST: 'hv1', 'c' + OTHER[1:]: 'hv3'})
    away, here = hosts(InEtcd(known), provider(SHUT))
    assert (away.compute, away.hostname, away.state, away.said) == (HOST, 'hv1', 'closed', Living())
    assert (here.hostname, here.said.version, here.said.kind) == ('hv2', '1.1.0', 'kvm')


def test_free_is_never_negative_and_what_is_too_much_is_said() -> None:
    assert (Room(4, 1).free, Room(4, 1).over) == (3, 0)
    assert (Room(2, 3).free, Room(2, 3).over) == (0, 1)
    assert (Room(0, 3, shut=True).free, Room(0, 3, shut=True).over) == (0, 0)
    shown = text(as_hosts([Host(HOST, None, 'up', 2, {'VCPU': Room(2, 3), 'PCPU': Room(8, 0)})]))
    head, line = (each.split('  ') for each in shown.splitlines())
    cells = dict(zip([each.strip() for each in head if each], [each.strip() for each in line if each], strict=True))
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
    said = Living('hv1', '1.1.0', 'kvm', False)
    shown = text(as_hosts([Host(HOST, 'hv1', 'closed', 1, {'VCPU': Room(0, 1, shut=True)}, said=said)]), 'json')
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


# What lives there


def test_living() -> None:
    etcd = InEtcd(
        requests={HOST: {A: wish(A), B: tombstone(B), C: Invalid(C, 'not JSON')}, OTHER: {D: wish(D)}},
        records={
            B: record(B, 'active'),  # its destroy was accepted
            D: record(D, 'active', OTHER),
            E: record(E, 'stopped'),  # its request key was deleted by hand
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


# Whether it may be forgotten


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
        (InEtcd(up({OTHER: 'hv2'}), {OTHER: {A: wish(A)}}), (A,), (), f'instance {A} of compute hv2 holds'),
    ],
)
def test_refusal(etcd: InEtcd, held: tuple[str, ...], at_it: tuple[str, ...], says: str) -> None:
    reason = refusal(HOST, etcd, held, at_it)
    assert reason is not None
    assert says in reason


@pytest.mark.parametrize(
    ('etcd', 'held', 'at_it', 'left'),
    [
        (InEtcd(), (), (), Leftovers()),
        (InEtcd(up({OTHER: 'hv2'}), requests={OTHER: {A: wish(A)}}, unreadable={B}), (), (B,), Leftovers()),
        (InEtcd(), (A,), (B,), Leftovers(orphans=(A,))),
        (InEtcd(records={A: record(A, 'gone'), B: record(B, 'error')}), (A, B), (), Leftovers(orphans=(A, B))),
        (
            InEtcd(requests={HOST: {A: tombstone(A), B: tombstone(B)}}, records={B: record(B, 'active')}),
            *((A, B, C), (), Leftovers(ended=(A, B), orphans=(C,))),
        ),
        (InEtcd(records={A: record(A, 'destroying')}), (A,), (), Leftovers(ended=(A,))),
        (InEtcd(junk={HOST: ['x/y']}), (), (), Leftovers(stray=('x/y',))),
    ],
)
def test_leftovers(etcd: InEtcd, held: tuple[str, ...], at_it: tuple[str, ...], left: Leftovers) -> None:
    assert refusal(HOST, etcd, held, at_it) is None
    assert leftovers(HOST, etcd, held) == left


@pytest.mark.parametrize(
    ('alive', 'traits', 'shares', 'wanted', 'shown'),
    [
        (True, {DISABLED, BY_OPERATOR}, ROOM, ('disabled', True), 'disabled'),
        (True, {DISABLED}, ROOM, ('disabled', True), 'disabled'),
        (True, set(), ROOM, ('up', False), 'up'),
        (False, {DISABLED}, SHUT, ('closed', False), 'closed'),  # its ecompute said so when it stopped
        (False, {DISABLED, BY_OPERATOR}, SHUT, ('closed', True), 'closed, disabled'),
        (False, {DISABLED, BY_OPERATOR}, ROOM, ('orphaned', True), 'orphaned, disabled'),
    ],
)
def test_disabled(
    alive: bool, traits: set[str], shares: dict[str, Room], wanted: tuple[str, bool], shown: str
) -> None:
    etcd = InEtcd(up({HOST: 'hv1'} if alive else {}))
    found = hosts(etcd, {HOST: InPlacement(HOST, HOST, shares, frozenset(traits))})
    assert [(each.state, each.disabled) for each in found] == [wanted]
    assert shown in [cell.strip() for cell in text(as_hosts(found)).splitlines()[1].split('  ')]


def test_what_is_still_there() -> None:
    records = {A: record(A, 'active'), B: record(B, 'destroying'), C: record(C, 'gone'), D: record(D, 'active', OTHER)}
    etcd = InEtcd(requests={HOST: {A: wish(A), B: tombstone(B), C: wish(C)}}, records=records)
    assert there(HOST, etcd) == {A, B}
