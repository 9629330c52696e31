"""The audit's comparison: each defect yields one finding, and a consistent cluster none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys, record
from ecomp.model.audit import CODES, Finding, audit, confirmed
from ecomp.model.group import AFFINITY, ANTI_AFFINITY
from ecomp.model.guest import PAUSED, REFUSED_METADATA, UNLIKE, UNPLUGGED
from ecomp.model.host import to_json as computes_to_json
from ecomp.model.order import Request, to_json
from ecomp.model.planes import Digest, Planes, World, involved
from ecomp.model.quota import Quota, times
from ecomp.model.quota import to_json as quota_to_json
from ecomp.store.client import Entry
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


def test_a_world_in_which_all_agree(world: Making) -> None:
    assert audit(world.planes()) == []
    assert audit(Planes({}, {}, {})) == []


# One defect each: the finding's code, its subject, and the change that causes it.


def _two_of_a_name(world: Making) -> None:
    world.lives(TWO, NOBODY, name='web1')


def _digest(**changed: dict[str, str]) -> Callable[[Making], None]:
    return lambda world: world.digests.update({ONE: replace(world.digests[ONE], **changed)})


def _fault(fault: str) -> Callable[[Making], None]:
    def plant(world: Making) -> None:
        key = keys.record(ONE, ACTIVE)
        entry = world.etcd[key]
        changed = replace(record.from_json(entry.value), fault=fault)
        world.etcd[key] = replace(entry, value=record.to_json(changed).encode())

    return plant


def _mute(world: Making) -> None:
    world.mute[TWO] = 'it does not answer'
    del world.digests[TWO]


def _unreserved(world: Making) -> None:
    reservations = {mac: text for mac, text in world.digests[ONE].reservations.items() if ACTIVE not in text}
    world.digests[ONE] = replace(world.digests[ONE], reservations=reservations)


PLANTED: list[tuple[str, str, Callable[[Making], object]]] = [
    ('provider-missing', TWO, lambda w: w.names.pop(TWO)),
    ('inventory-missing', TWO, lambda w: w.provider(TWO, {})),
    ('capacity-exceeded', ONE, lambda w: w.provider(ONE, {**TOTALS, 'VCPU': 1})),
    ('compute-silent', AWAY, lambda w: w.inventories[AWAY]['VCPU'].update(reserved=0)),
    ('allocation-orphaned', NOBODY, lambda w: w.held[TWO].update({NOBODY: SIZE})),
    ('allocation-orphaned', GONE, lambda w: w.held[TWO].update({GONE: SIZE})),
    ('allocation-missing', ACTIVE, lambda w: w.held[ONE].pop(ACTIVE)),
    ('allocation-missing', ELSEWHERE, lambda w: w.held[AWAY].pop(ELSEWHERE)),
    ('allocation-differs', ACTIVE, lambda w: w.held[ONE].update({ACTIVE: {**SIZE, 'MEMORY_MB': 32}})),
    ('allocation-doubled', ACTIVE, lambda w: w.held[TWO].update({ACTIVE: SIZE})),
    ('request-doubled', ACTIVE, lambda w: w.ask(TWO, ACTIVE)),
    ('request-doubled', NOBODY, lambda w: (w.ask(TWO, NOBODY), w.ask(AWAY, NOBODY))),
    ('request-misplaced', ACTIVE, lambda w: (
        w.etcd.pop(keys.request(ONE, ACTIVE)), w.ask(TWO, ACTIVE, name='web1'),
    )),
    ('request-misplaced', GONE, lambda w: w.ask(TWO, GONE)),
    ('request-missing', ACTIVE, lambda w: w.etcd.pop(keys.request(ONE, ACTIVE))),
    ('request-ended', GONE, lambda w: w.ask(ONE, GONE)),
    ('request-ended', FAILED, lambda w: w.ask(ONE, FAILED)),
    ('request-unreadable', NOBODY, lambda w: w.put(keys.request(ONE, NOBODY), 'no request')),
    ('request-unreadable', 'a/b', lambda w: w.put(f'{keys.HOSTS}{ONE}/a/b', '{}')),
    ('request-unreadable', '', lambda w: w.put(f'{keys.HOSTS}nothing', '{}')),
    ('queued-unreadable', NOBODY, lambda w: w.put(keys.queue('small', NOBODY), 'no request')),
    ('queued-unreadable', 'b', lambda w: w.put(f'{keys.QUEUES}small/a/b', '{}')),
    ('queued-flavorless', NOBODY, lambda w: w.wait(NOBODY, flavor='none')),
    ('queued-doubled', ACTIVE, lambda w: w.wait(ACTIVE, name='web1')),
    ('queued-doubled', GONE, lambda w: w.wait(GONE)),
    ('queued-doubled', NOBODY, lambda w: (w.wait(NOBODY), w.ask(TWO, NOBODY))),
    ('taker-unleased', NOBODY, lambda w: (
        w.wait(NOBODY), w.put(keys.taker(keys.queue('small', NOBODY)), '{}'),
    )),
    ('record-doubled', ACTIVE, lambda w: w.write(ACTIVE, record.STOPPED, TWO)),
    ('record-doubled', GONE, lambda w: w.write(GONE, record.ACTIVE, TWO)),
    ('record-missing', ACTIVE, lambda w: w.etcd.pop(keys.record(ONE, ACTIVE))),
    ('record-unreadable', ACTIVE, lambda w: w.put(keys.record(ONE, ACTIVE), '{"version": 99}')),
    ('record-unreadable', 'no-uuid', lambda w: w.put(keys.record(ONE, 'no-uuid'), '{}')),
    ('record-unleased', GONE, lambda w: w.write(GONE, record.GONE)),
    ('record-unleased', FAILED, lambda w: w.write(FAILED, record.ERROR, name='failed')),
    ('record-leased', ACTIVE, lambda w: w.write(
        ACTIVE, record.ACTIVE, lease=LEASE, address='10.0.0.1', name='web1'
    )),
    ('booted-orphaned', NOBODY, lambda w: w.put(keys.booted(NOBODY), '10.0.0.1')),
    ('booted-orphaned', GONE, lambda w: w.put(keys.booted(GONE), '10.0.0.1')),
    ('booted-differs', ACTIVE, lambda w: w.put(keys.booted(ACTIVE), '10.0.0.2')),
    ('booted-differs', ACTIVE, lambda w: w.etcd.pop(keys.booted(ACTIVE))),
    ('name-orphaned', 'web2', lambda w: w.call('web2', NOBODY)),
    ('name-orphaned', 'web2', lambda w: w.call('web2', ACTIVE)),
    ('name-orphaned', 'web2', lambda w: w.call('web2', OFF)),
    ('name-orphaned', 'web2', lambda w: w.call('web2', GONE)),
    ('name-orphaned', 'failed', lambda w: w.call('failed', FAILED)),
    ('hostname-orphaned', NOBODY, lambda w: w.put(keys.hostname(NOBODY), computes_to_json('hv9'))),
    ('name-orphaned', 'x/y', lambda w: w.put(keys.name('x/y'), 'no JSON')),
    ('name-missing', ACTIVE, lambda w: w.etcd.pop(keys.name('web1'))),
    ('name-missing', ACTIVE, lambda w: w.call('web1', ACTIVE, LEASE)),
    ('name-missing', ACTIVE, _two_of_a_name),
    ('name-reserved', NOBODY, lambda w: w.lives(TWO, NOBODY, name='rename')),
    ('group-unreadable', 'web', lambda w: w.put(keys.group('web'), '{}')),
    ('group-broken', 'web', lambda w: w.join('web', ANTI_AFFINITY, {ACTIVE: ONE, OFF: ONE})),
    ('group-broken', 'web', lambda w: w.join('web', AFFINITY, {ACTIVE: ONE, ELSEWHERE: AWAY})),
    ('group-orphaned', 'web', lambda w: w.join('web', AFFINITY, {ACTIVE: ONE, NOBODY: ONE})),
    ('group-orphaned', 'web', lambda w: w.join('web', AFFINITY, {GONE: ONE})),
    ('group-missing', ACTIVE, lambda w: w.belong(ACTIVE, 'web')),
    ('group-missing', ACTIVE, lambda w: (
        w.belong(ACTIVE, 'web'), w.join('web', ANTI_AFFINITY, {ACTIVE: TWO}),
    )),
    ('quota-unreadable', 'a/b', lambda w: w.put(keys.quota('a/b'), '{}')),
    ('quota-differs', 'web', lambda w: w.put(keys.quota('web'), quota_to_json(Quota('web', {}, {'VCPU': 1})))),
    ('usage-differs', 'web', lambda w: (
        w.put(keys.quota('web'), quota_to_json(Quota('web', {'VCPU': 9}))),
        w.usages.update(web={'VCPU': 1, 'instances': 1}),
    )),
    ('attempt-unleased', NOBODY, lambda w: w.put(keys.attempt(NOBODY), json.dumps({'instances': [NOBODY]}))),
    ('presence-unleased', TWO, lambda w: w.alive(TWO, lease=0)),
    ('compute-mute', TWO, _mute),
    ('domain-missing', ACTIVE, lambda w: w.no_guest(ONE, ACTIVE)),
    ('domain-missing', OFF, lambda w: w.guest(ONE, OFF, False, compute=None, defined=False)),
    ('domain-off', ACTIVE, lambda w: w.guest(ONE, ACTIVE, running=False)),
    ('domain-running', OFF, lambda w: w.guest(ONE, OFF)),
    ('domain-running', GONE, lambda w: w.guest(ONE, GONE)),
    ('domain-running', FAILED, lambda w: w.guest(TWO, FAILED)),
    ('domain-undefined', ACTIVE, lambda w: w.guest(ONE, ACTIVE, defined=False)),
    ('domain-orphaned', NOBODY, lambda w: w.guest(ONE, NOBODY)),
    ('domain-orphaned', NOBODY, lambda w: w.guest(ONE, NOBODY, running=False)),
    ('domain-orphaned', FAILED, lambda w: w.guest(TWO, FAILED, running=False)),
    ('domain-orphaned', ELSEWHERE, lambda w: w.guest(TWO, ELSEWHERE)),
    ('domain-misplaced', ACTIVE, lambda w: w.guest(ONE, ACTIVE, compute=AWAY)),
    ('domain-misplaced', NOBODY, lambda w: w.guest(ONE, NOBODY, compute=TWO)),
    ('domain-doubled', ACTIVE, lambda w: w.guest(TWO, ACTIVE)),
    ('domain-doubled', NOBODY, lambda w: (w.guest(ONE, NOBODY), w.guest(TWO, NOBODY))),
    ('disk-missing', ACTIVE, lambda w: w.guest(ONE, ACTIVE, disk=False)),
    ('base-missing', ACTIVE, _digest(without_base={ACTIVE: '/images/base-x.qcow2'})),
    ('disk-orphaned', NOBODY, lambda w: w.guest(ONE, NOBODY, compute=None, defined=False, running=False)),
    ('disk-orphaned', GONE, lambda w: w.guest(ONE, GONE, compute=None, defined=False, running=False)),
    ('seed-orphaned', NOBODY, lambda w: w.seed(ONE, NOBODY)),
    ('seed-orphaned', ACTIVE, lambda w: w.seed(TWO, ACTIVE)),
    ('iso-orphaned', NOBODY, lambda w: w.iso(ONE, NOBODY)),
    ('iso-orphaned', GONE, lambda w: w.iso(TWO, GONE)),
    ('iso-orphaned', ACTIVE, lambda w: w.iso(TWO, ACTIVE)),
    ('reservation-orphaned', NOBODY, lambda w: w.reserve(ONE, NOBODY, '10.0.0.9')),
    ('reservation-orphaned', GONE, lambda w: w.reserve(ONE, GONE, '10.0.0.9')),
    ('reservation-orphaned', ACTIVE, lambda w: w.reserve(TWO, ACTIVE, '10.0.0.1')),
    ('reservation-missing', ACTIVE, _unreserved),
    ('reservation-differs', OFF, lambda w: w.reserve(ONE, OFF, '10.0.0.9')),
    ('domain-differs', ACTIVE, _fault(f'{UNPLUGGED} (vnet0): network default is off')),
    ('domain-differs', ACTIVE, _fault(PAUSED)),
    ('domain-differs', ACTIVE, _fault(f'{PAUSED}; {UNLIKE}: VCPU:3 for 2')),
    ('metadata-refused', ACTIVE, _fault(f'{REFUSED_METADATA}: no current DHCP lease for 10.0.0.9')),
    ('dhcp-open', ONE, _digest(open_dhcp={'default': ''})),
    ('base-differs', ONE, _digest(bad_bases={'ab12': ''})),
    ('part-orphaned', ONE, _digest(parts={'images/x.part': '1'})),
]


@pytest.mark.parametrize(('code', 'subject', 'plant'), PLANTED)
def test_each_defect_yields_its_code_and_no_other(
    world: Making, code: str, subject: str, plant: Callable[[Making], object]
) -> None:
    plant(world)
    findings = audit(world.planes())
    assert [(finding.code, finding.subject) for finding in findings] == [(code, subject)]
    assert '\n' not in findings[0].sentence
    assert findings[0].fix or findings[0].how, 'either --fix mends it or a person does'
    # An etcdctl command can be typed as it is printed, and names existing keys.
    assert '<key>' not in findings[0].how
    assert 'etcdctl' not in findings[0].how or set(findings[0].keys) <= {*world.etcd, keys.booted(findings[0].subject)}


def test_what_a_person_deletes_is_named_with_its_key(world: Making) -> None:
    """Both keys of a pair are named when only one of them is wrong."""
    def said(instance: str) -> list[str]:
        return [finding.how for finding in audit(world.planes()) if finding.subject == instance]

    world.ask(TWO, ACTIVE)
    candidates = f'{keys.request(ONE, ACTIVE)} or {keys.request(TWO, ACTIVE)}'
    assert said(ACTIVE) == [f'delete the wrong one: etcdctl del {candidates}']
    world.write(OFF, record.ACTIVE, TWO)
    assert said(OFF) == [f'delete the wrong one: etcdctl del {keys.record(ONE, OFF)} or {keys.record(TWO, OFF)}']
    world.ask(TWO, GONE)
    wrong = f'{keys.request(TWO, GONE)} or {keys.record(ONE, GONE)}'
    assert said(GONE) == [f'delete the wrong one: etcdctl del {wrong}']
    # Records of ecomp 1.0 have another key. A key with a blank is quoted for the shell.
    world.etcd[keys.old_record(GONE)] = world.etcd.pop(keys.record(ONE, GONE))
    assert said(GONE) == [
        f'delete the wrong one: etcdctl del {keys.request(TWO, GONE)} or {keys.old_record(GONE)}'
    ]
    world.put(keys.quota('a b'), '{}')
    assert said('a b') == ["if no newer ecomp wrote it, delete the key: etcdctl del '/quotas/a b'"]


def test_every_code_is_planted_and_only_those_there_are() -> None:
    assert {code for code, _, _ in PLANTED} == set(CODES)


def test_what_another_has_is_not_given_back_by_rule(world: Making) -> None:
    _two_of_a_name(world)
    (finding,) = audit(world.planes())
    assert (finding.fix, bool(finding.how)) == ('', True)
    assert f'/names/web1 is of instance {NOBODY}' in finding.sentence


# A finding must be seen by two consecutive checks


def test_a_finding_needs_two_looks_and_unchanged_keys() -> None:
    first, other = Finding('booted-orphaned', NOBODY, 'x'), Finding('booted-orphaned', NOBODY, 'y')
    unchanged = {NOBODY: {keys.booted(NOBODY): 5}}
    assert confirmed([first], [first], [unchanged, unchanged, unchanged]) == [first]
    assert confirmed([first], [], [unchanged, unchanged]) == []
    assert confirmed([], [first], [unchanged, unchanged]) == []
    assert confirmed([first], [other], [unchanged, unchanged]) == []
    assert confirmed([first], [first], [unchanged, {NOBODY: {keys.booted(NOBODY): 6}}, unchanged]) == []
    assert confirmed([first], [first], [unchanged, {}]) == []
    assert confirmed([first], [first], [{}, {}]) == [first]


def test_what_is_involved_in_an_instance(world: Making) -> None:
    world.put(keys.attempt(NOBODY), json.dumps({'instances': [ACTIVE, GONE]}), LEASE)
    revisions = involved(world.etcd)
    assert set(revisions[ACTIVE]) == {
        keys.request(ONE, ACTIVE), keys.record(ONE, ACTIVE), keys.booted(ACTIVE), keys.attempt(NOBODY)
    }  # fmt: skip
    assert set(revisions[ONE]) == {keys.compute(ONE)}
    assert revisions[NOBODY] == {keys.attempt(NOBODY): world.etcd[keys.attempt(NOBODY)].revision}


def test_what_a_compute_says_of_its_room_changes_nothing_about_it(world: Making) -> None:
    """A busy compute updates its hints every ten seconds and can still get a confirmed finding."""
    before = involved(world.etcd)
    presence = world.etcd[keys.compute(ONE)]
    world.put(keys.compute(ONE), json.dumps({'room': {'VCPU': [4, 50]}}), presence.lease)
    assert world.etcd[keys.compute(ONE)].revision != presence.revision
    assert involved(world.etcd) == before
    world.put(keys.compute(ONE), json.dumps({}), presence.lease + 1)  # its process died and a new one started
    assert involved(world.etcd) != before


# Arbitrary input


@given(st.data())
def test_several_defects_are_each_found_and_nothing_raises(data: st.DataObject) -> None:
    world = Making()
    for compute in (ONE, TWO):
        world.provider(compute, dict.fromkeys(TOTALS, 10**6))
        world.alive(compute)
        world.digests[compute] = Digest()
    # Independent defects: each has an instance of its own.
    plants: dict[str, Callable[[str], object]] = {
        'allocation-orphaned': lambda i: world.held[TWO].update({i: SIZE}),
        'booted-orphaned': lambda i: world.put(keys.booted(i), 'x'),
        'disk-orphaned': lambda i: world.guest(ONE, i, compute=None, defined=False, running=False),
        'domain-orphaned': lambda i: world.guest(TWO, i),
        'seed-orphaned': lambda i: world.seed(ONE, i),
        'iso-orphaned': lambda i: world.iso(ONE, i),
        'record-unleased': lambda i: world.write(i, record.GONE),
        'request-unreadable': lambda i: world.put(keys.request(ONE, i), ''),
    }
    expected = set()
    for code in data.draw(st.lists(st.sampled_from(sorted(plants)), max_size=12)):
        instance = str(data.draw(st.uuids(version=4)))
        plants[code](instance)
        expected.add((code, instance))
    assert {(finding.code, finding.subject) for finding in audit(world.planes())} == expected


@given(st.dictionaries(
    st.builds(
        lambda family, rest: family + rest,
        st.sampled_from(
            [keys.HOSTS, keys.INSTANCES, keys.BOOTED, keys.ATTEMPTS, keys.QUEUES, keys.NAMES, keys.COMPUTES]
        ),
        st.text(max_size=80) | st.sampled_from([ACTIVE, f'{ONE}/{ACTIVE}', f'/{ONE}//', '']),
    ),
    st.builds(
        Entry, st.just('/'), st.binary(max_size=60) | st.sampled_from([b'{}', b'[]']), st.just(1), st.integers(0, 1)
    ),
))  # fmt: skip
def test_whatever_stands_in_etcd_is_compared(etcd: dict[str, Entry]) -> None:
    for finding in audit(Planes({}, etcd, {ONE: Digest()}, {TWO: 'x'})):
        assert finding.code in CODES
    involved(etcd)


# No finding: work in progress, what a state explains, and what does not belong to ecomp.


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
    # An attempt in flight has claimed and not delivered yet.
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
def test_a_power_that_is_being_switched(
    world: Making, said: str | None, state: str, running: bool
) -> None:
    key = keys.request(ONE, ACTIVE)
    request = json.loads(world.etcd[key].value) | {'power': {'action': 'reboot', 'id': GONE}}
    world.put(key, json.dumps(request))
    world.write(ACTIVE, state, address='10.0.0.1')
    instance_record = json.loads(world.etcd[keys.record(ONE, ACTIVE)].value)
    world.put(keys.record(ONE, ACTIVE), json.dumps(instance_record | {'power': said}))
    world.guest(ONE, ACTIVE, running=running)
    assert audit(world.planes()) == []
    # After the switch is complete, the record must match the guest.
    world.put(keys.record(ONE, ACTIVE), json.dumps(instance_record | {'power': GONE}))
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
    # The claim of its taker, whether the taker key still exists or not.
    world.held[TWO][NOBODY] = SIZE
    assert audit(world.planes()) == []
    world.put(keys.taker(keys.queue('small', NOBODY)), '{}', LEASE)
    assert audit(world.planes()) == []
    # A request destroyed while queued has a record without a compute.
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
    for compute in (ONE, AWAY):
        world.put(keys.hostname(compute), '{"version": 1, "hostname": "hv1"}')
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
    allocations = {ONE: {'VCPU': 1, 'MEMORY_MB': 64}, storage: {'DISK_GB': 1}}
    world.put(keys.request(ONE, ACTIVE), to_json(Request(ACTIVE, allocations, image=IMAGE)))
    world.held[ONE][ACTIVE], world.held[storage][ACTIVE] = allocations[ONE], allocations[storage]
    assert audit(world.planes()) == []


def test_a_reserved_inventory_is_no_lack(world: Making) -> None:
    for inventory in world.inventories[ONE].values():
        inventory['reserved'] = inventory['total']
    assert audit(world.planes()) == []


def test_two_computes_on_one_libvirt_see_each_others_domains(world: Making) -> None:
    world.guest(TWO, ACTIVE, compute=ONE)
    assert audit(world.planes()) == []


def test_a_disk_beside_a_living_instances_is_not_removed_by_rule(world: Making) -> None:
    world.guest(TWO, ACTIVE, compute=None, defined=False, running=False)
    (finding,) = audit(world.planes())
    assert (finding.code, finding.fix) == ('disk-orphaned', '')
    assert finding.how


@pytest.mark.parametrize('defined', [True, False])
def test_a_seed_goes_with_its_disk(world: Making, defined: bool) -> None:
    world.guest(ONE, NOBODY, compute=ONE if defined else None, defined=defined, running=False)
    world.iso(ONE, NOBODY)
    assert world.codes() == ['domain-orphaned' if defined else 'disk-orphaned']
