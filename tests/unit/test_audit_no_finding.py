"""What the audit's comparison calls no finding: what is in work, explained by a state, or somebody else's."""

from __future__ import annotations

import json

import pytest

from ecomp.model import keys, record
from ecomp.model.audit import audit
from ecomp.model.group import ANTI_AFFINITY
from ecomp.model.order import Request, to_json
from ecomp.model.planes import Digest, World
from ecomp.model.quota import Quota, times
from ecomp.model.quota import to_json as quota_to_json
from tests.unit.audit_world import (
    ACTIVE,
    AWAY,
    ELSEWHERE,
    FAILED,
    GONE,
    IMAGE,
    LEASE,
    NOBODY,
    OFF,
    ONE,
    SIZE,
    TOTALS,
    TWO,
    Making,
)


@pytest.mark.parametrize('state', [record.SCHEDULED, record.BUILDING, record.DESTROYING])
@pytest.mark.parametrize('holds', [True, False])
@pytest.mark.parametrize('guest', ['none', 'disk', 'defined', 'running'])
def test_what_a_state_explains(world: Making, state: str, holds: bool, guest: str) -> None:
    world.ask(TWO, NOBODY, tombstone=state == record.DESTROYING)
    world.write(NOBODY, state, TWO)
    if holds:
        world.held[TWO][NOBODY] = SIZE
    if guest == 'disk':
        world.guest(TWO, NOBODY, compute=None, defined=False, running=False)
    elif guest != 'none':
        world.guest(TWO, NOBODY, running=guest == 'running')
    world.seed(TWO, NOBODY)
    world.iso(TWO, NOBODY)
    world.reserve(TWO, NOBODY, '10.0.0.9')
    assert audit(world.planes()) == []


def test_groups_and_quotas_that_agree(world: Making) -> None:
    world.belong(ACTIVE, 'web')
    world.join('web', ANTI_AFFINITY, {ACTIVE: ONE, ELSEWHERE: AWAY})
    world.put(keys.request(ONE, OFF), to_json(Request(OFF, {ONE: SIZE}, image=IMAGE, user_id='', project_id='p')))
    world.put(keys.quota('p'), quota_to_json(Quota('p', {'VCPU': 1}, {**SIZE, 'instances': 1})))
    world.usages['p'] = {**SIZE, 'instances': 1}
    assert audit(world.planes()) == []
    # Somebody has claimed, and not delivered yet.
    world.put(keys.attempt(NOBODY), json.dumps({'instances': [NOBODY]}), LEASE)
    world.usages['p'] = {**times(SIZE, 2), 'instances': 2}
    assert audit(world.planes()) == []


def test_one_that_no_compute_has_seen_yet(world: Making) -> None:
    world.ask(TWO, NOBODY, name='web2')
    world.call('web2', NOBODY)
    assert audit(world.planes()) == []
    world.held[TWO][NOBODY] = SIZE
    assert audit(world.planes()) == []


@pytest.mark.parametrize('record_there', [True, False])
def test_a_destroy_its_compute_has_not_seen_yet(world: Making, record_there: bool) -> None:
    world.ask(ONE, ACTIVE, tombstone=True)
    if not record_there:
        del world.etcd[keys.record(ONE, ACTIVE)], world.etcd[keys.booted(ACTIVE)]
    assert audit(world.planes()) == []


def test_the_name_of_what_cannot_be_understood(world: Making) -> None:
    world.call('web2', NOBODY)
    for key in (keys.record(TWO, NOBODY), keys.request(TWO, NOBODY)):
        world.put(key, '{"version": 99, "name": "web2"}')
        assert world.codes() == ['record-unreadable' if key.startswith(keys.INSTANCES) else 'request-unreadable']
        del world.etcd[key]


def test_a_name_an_older_ecompute_does_not_write_down(world: Making) -> None:
    world.write(ACTIVE, record.ACTIVE, address='10.0.0.1')
    assert world.codes() == []
    del world.etcd[keys.name('web1')]
    assert world.codes() == ['name-missing']


def test_a_failed_one_gives_its_name_up_without_a_word(world: Making) -> None:
    world.lives(TWO, NOBODY, name='failed')
    assert world.codes() == []


@pytest.mark.parametrize('said', [None, f'{GONE}:asked', f'{GONE}:off'])
@pytest.mark.parametrize('state', [record.ACTIVE, record.STOPPED])
@pytest.mark.parametrize('running', [True, False])
def test_a_power_that_is_being_switched(world: Making, said: str | None, state: str, running: bool) -> None:
    key = keys.request(ONE, ACTIVE)
    asked = json.loads(world.etcd[key].value) | {'power': {'action': 'reboot', 'id': GONE}}
    world.put(key, json.dumps(asked))
    world.write(ACTIVE, state, address='10.0.0.1')
    told = json.loads(world.etcd[keys.record(ONE, ACTIVE)].value)
    world.put(keys.record(ONE, ACTIVE), json.dumps(told | {'power': said}))
    world.guest(ONE, ACTIVE, running=running)
    assert audit(world.planes()) == []
    # Once it is done, the record has to be right.
    world.put(keys.record(ONE, ACTIVE), json.dumps(told | {'power': GONE}))
    differs = {(record.ACTIVE, False): ['domain-off'], (record.STOPPED, True): ['domain-running']}
    assert world.codes() == differs.get((state, running), [])


def test_an_eschedule_that_is_at_it(world: Making) -> None:
    for key, value in (
        (keys.attempt(NOBODY), json.dumps({'instances': [NOBODY]})),
        (keys.attempt(GONE), json.dumps({'instances': [GONE, NOBODY]})),
        (keys.taker(keys.queue('small', NOBODY)), '{}'),
    ):
        world.put(key, value, LEASE)
        world.held[TWO][NOBODY] = SIZE
        assert audit(world.planes()) == [], key
        del world.etcd[key]
        assert world.codes() == ['allocation-orphaned'], key


def test_what_waits_is_no_finding(world: Making) -> None:
    world.wait(NOBODY, name='web2')
    world.call('web2', NOBODY)
    # Its taker's claim, living or dead.
    world.held[TWO][NOBODY] = SIZE
    assert audit(world.planes()) == []
    world.put(keys.taker(keys.queue('small', NOBODY)), '{}', LEASE)
    assert audit(world.planes()) == []
    # What was gone before a compute took it is no compute's.
    world.write(FAILED, record.GONE, compute='', lease=LEASE)
    del world.etcd[keys.name('failed')]
    assert audit(world.planes()) == []
    assert World(world.planes()).away() == {AWAY: 'closed'}


def test_who_was_not_compared_is_closed_or_silent_and_who_was_forgotten_is_not_named(world: Making) -> None:
    world.write(GONE, record.GONE, compute=NOBODY, lease=LEASE)
    world.write(FAILED, record.ERROR, compute=NOBODY, lease=LEASE, name='failed')
    assert World(world.planes()).away() == {AWAY: 'closed'}
    world.inventories[AWAY]['VCPU']['reserved'] = 0
    assert World(world.planes()).away() == {AWAY: 'silent'}
    world.inventories[AWAY]['VCPU']['reserved'] = TOTALS['VCPU']
    world.write(NOBODY, record.STOPPED, compute=NOBODY)
    assert World(world.planes()).away() == {AWAY: 'closed', NOBODY: 'silent'}


def test_the_name_of_a_host_is_kept_for_who_is_known(world: Making) -> None:
    for each in (ONE, AWAY):
        world.put(keys.hostname(each), '{"version": 1, "hostname": "hv1"}')
    assert audit(world.planes()) == []
    world.put(keys.hostname(NOBODY), 'rubbish')
    world.write(GONE, record.GONE, compute=NOBODY, lease=LEASE)
    assert world.codes() == ['hostname-orphaned']
    world.ask(NOBODY, ACTIVE)
    assert 'hostname-orphaned' not in world.codes()


def test_a_silent_compute_that_holds_nothing_is_no_finding(world: Making) -> None:
    world.inventories[AWAY]['VCPU']['reserved'] = 0
    world.held[AWAY].clear()
    assert 'compute-silent' not in world.codes()


def test_a_compute_that_is_away_is_not_compared(world: Making) -> None:
    world.held[AWAY][NOBODY] = SIZE
    assert audit(world.planes()) == []
    world.alive(AWAY)
    world.digests[AWAY] = Digest()
    assert world.codes() == ['domain-missing', 'allocation-orphaned']


def test_a_guest_stands_behind_its_claim(world: Making) -> None:
    world.held[TWO][NOBODY] = SIZE
    world.guest(TWO, NOBODY)
    assert world.codes() == ['domain-orphaned']


def test_what_holds_nothing_of_a_compute_is_somebody_elses(world: Making) -> None:
    storage = 'dddddddd-0000-4000-8000-000000000000'
    world.provider(storage, {'DISK_GB': 1}, 'a storage pool')
    world.held[storage][NOBODY] = {'DISK_GB': 5}
    assert audit(world.planes()) == []


def test_a_shared_provider_may_give_the_disk(world: Making) -> None:
    storage = 'dddddddd-0000-4000-8000-000000000000'
    world.provider(storage, {'DISK_GB': 100}, 'a storage pool')
    wanted = {ONE: {'VCPU': 1, 'MEMORY_MB': 64}, storage: {'DISK_GB': 1}}
    world.put(keys.request(ONE, ACTIVE), to_json(Request(ACTIVE, wanted, image=IMAGE)))
    world.held[ONE][ACTIVE], world.held[storage][ACTIVE] = wanted[ONE], wanted[storage]
    assert audit(world.planes()) == []


def test_a_reserved_inventory_is_no_lack(world: Making) -> None:
    for each in world.inventories[ONE].values():
        each['reserved'] = each['total']
    assert audit(world.planes()) == []


def test_two_computes_on_one_libvirt_see_each_others_domains(world: Making) -> None:
    world.guest(TWO, ACTIVE, compute=ONE)
    assert audit(world.planes()) == []


def test_a_disk_beside_a_living_instances_is_not_removed_by_rule(world: Making) -> None:
    world.guest(TWO, ACTIVE, compute=None, defined=False, running=False)
    (found,) = audit(world.planes())
    assert (found.code, found.fix) == ('disk-orphaned', '')
    assert found.how


@pytest.mark.parametrize('defined', [True, False])
def test_a_seed_goes_with_its_disk(world: Making, defined: bool) -> None:
    world.guest(ONE, NOBODY, compute=ONE if defined else None, defined=defined, running=False)
    world.iso(ONE, NOBODY)
    assert world.codes() == ['domain-orphaned' if defined else 'disk-orphaned']
