"""The audit's comparison: a world in which everything agrees yields nothing, and each defect its own code.

What is in work, or somebody else's, is in test_audit_no_finding.py; the world is in audit_world.py.
"""

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
from ecomp.model.planes import Digest, Planes, involved
from ecomp.model.quota import Quota
from ecomp.model.quota import to_json as quota_to_json
from ecomp.store.client import Entry
from tests.unit.audit_world import (
    ACTIVE,
    AWAY,
    ELSEWHERE,
    FAILED,
    GONE,
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


# One defect each: the code, whom it is about, and how it is planted.


def _two_of_a_name(world: Making) -> None:
    world.lives(TWO, NOBODY, name='web1')


def _digest(**changed: dict[str, str]) -> Callable[[Making], None]:
    return lambda world: world.digests.update({ONE: replace(world.digests[ONE], **changed)})


def _fault(fault: str) -> Callable[[Making], None]:
    def plant(world: Making) -> None:
        key = keys.record(ONE, ACTIVE)
        kept = world.etcd[key]
        changed = replace(record.from_json(kept.value), fault=fault)
        world.etcd[key] = replace(kept, value=record.to_json(changed).encode())

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
    ('taker-unleased', NOBODY, lambda w: (w.wait(NOBODY), w.put(keys.taker(keys.queue('small', NOBODY)), '{}'))),
    ('record-doubled', ACTIVE, lambda w: w.write(ACTIVE, record.STOPPED, TWO)),
    ('record-doubled', GONE, lambda w: w.write(GONE, record.ACTIVE, TWO)),
    ('record-missing', ACTIVE, lambda w: w.etcd.pop(keys.record(ONE, ACTIVE))),
    ('record-unreadable', ACTIVE, lambda w: w.put(keys.record(ONE, ACTIVE), '{"version": 99}')),
    ('record-unreadable', 'no-uuid', lambda w: w.put(keys.record(ONE, 'no-uuid'), '{}')),
    ('record-unleased', GONE, lambda w: w.write(GONE, record.GONE)),
    ('record-unleased', FAILED, lambda w: w.write(FAILED, record.ERROR, name='failed')),
    ('record-leased', ACTIVE, lambda w: w.write(ACTIVE, record.ACTIVE, lease=LEASE, address='10.0.0.1', name='web1')),
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
    ('group-missing', ACTIVE, lambda w: (w.belong(ACTIVE, 'web'), w.join('web', ANTI_AFFINITY, {ACTIVE: TWO}))),
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
    found = audit(world.planes())
    assert [(each.code, each.subject) for each in found] == [(code, subject)]
    assert '\n' not in found[0].sentence
    assert found[0].fix or found[0].how, 'either --fix mends it or a person does'
    # What etcdctl is to be told can be typed, and names what is there.
    assert '<key>' not in found[0].how
    assert 'etcdctl' not in found[0].how or set(found[0].keys) <= {*world.etcd, keys.booted(found[0].subject)}


def test_what_a_person_deletes_is_named_with_its_key(world: Making) -> None:
    """Where one of two is wrong, both are there to choose from."""

    def said(instance: str) -> list[str]:
        return [each.how for each in audit(world.planes()) if each.subject == instance]

    world.ask(TWO, ACTIVE)
    both = f'{keys.request(ONE, ACTIVE)} or {keys.request(TWO, ACTIVE)}'
    assert said(ACTIVE) == [f'delete the wrong one: etcdctl del {both}']
    world.write(OFF, record.ACTIVE, TWO)
    assert said(OFF) == [f'delete the wrong one: etcdctl del {keys.record(ONE, OFF)} or {keys.record(TWO, OFF)}']
    world.ask(TWO, GONE)
    wrong = f'{keys.request(TWO, GONE)} or {keys.record(ONE, GONE)}'
    assert said(GONE) == [f'delete the wrong one: etcdctl del {wrong}']
    # An earlier ecompute's lies elsewhere; and a shell gets the key whole.
    world.etcd[keys.old_record(GONE)] = world.etcd.pop(keys.record(ONE, GONE))
    assert said(GONE) == [f'delete the wrong one: etcdctl del {keys.request(TWO, GONE)} or {keys.old_record(GONE)}']
    world.put(keys.quota('a b'), '{}')
    assert said('a b') == ["if no newer ecomp wrote it, delete the key: etcdctl del '/quotas/a b'"]


def test_every_code_is_planted_and_only_those_there_are() -> None:
    assert {code for code, _, _ in PLANTED} == set(CODES)


def test_what_another_has_is_not_given_back_by_rule(world: Making) -> None:
    _two_of_a_name(world)
    (found,) = audit(world.planes())
    assert (found.fix, bool(found.how)) == ('', True)
    assert f'/names/web1 is of instance {NOBODY}' in found.sentence


# Two looks


def test_a_finding_needs_two_looks_and_unchanged_keys() -> None:
    one, other = Finding('booted-orphaned', NOBODY, 'x'), Finding('booted-orphaned', NOBODY, 'y')
    still = {NOBODY: {keys.booted(NOBODY): 5}}
    assert confirmed([one], [one], [still, still, still]) == [one]
    assert confirmed([one], [], [still, still]) == []
    assert confirmed([], [one], [still, still]) == []
    assert confirmed([one], [other], [still, still]) == []
    assert confirmed([one], [one], [still, {NOBODY: {keys.booted(NOBODY): 6}}, still]) == []
    assert confirmed([one], [one], [still, {}]) == []
    assert confirmed([one], [one], [{}, {}]) == [one]


def test_what_is_involved_in_an_instance(world: Making) -> None:
    world.put(keys.attempt(NOBODY), json.dumps({'instances': [ACTIVE, GONE]}), LEASE)
    found = involved(world.etcd)
    assert set(found[ACTIVE]) == {
        keys.request(ONE, ACTIVE), keys.record(ONE, ACTIVE), keys.booted(ACTIVE), keys.attempt(NOBODY)
    }  # fmt: skip
    assert set(found[ONE]) == {keys.compute(ONE)}
    assert found[NOBODY] == {keys.attempt(NOBODY): world.etcd[keys.attempt(NOBODY)].revision}


def test_what_a_compute_says_of_its_room_changes_nothing_about_it(world: Making) -> None:
    """Else a busy one, which says so every ten seconds, would never be found anything of, nor mended."""
    before = involved(world.etcd)
    life = world.etcd[keys.compute(ONE)]
    world.put(keys.compute(ONE), json.dumps({'room': {'VCPU': [4, 50]}}), life.lease)
    assert world.etcd[keys.compute(ONE)].revision != life.revision
    assert involved(world.etcd) == before
    world.put(keys.compute(ONE), json.dumps({}), life.lease + 1)  # it died, and another process is it
    assert involved(world.etcd) != before


# Anything at all


@given(st.data())
def test_several_defects_are_each_found_and_nothing_raises(data: st.DataObject) -> None:
    world = Making()
    for compute in (ONE, TWO):
        world.provider(compute, dict.fromkeys(TOTALS, 10**6))
        world.alive(compute)
        world.digests[compute] = Digest()
    # Independent ones: each about an instance of its own.
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
    wanted = set()
    for code in data.draw(st.lists(st.sampled_from(sorted(plants)), max_size=12)):
        instance = str(data.draw(st.uuids(version=4)))
        plants[code](instance)
        wanted.add((code, instance))
    assert {(each.code, each.subject) for each in audit(world.planes())} == wanted


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
    for each in audit(Planes({}, etcd, {ONE: Digest()}, {TWO: 'x'})):
        assert each.code in CODES
    involved(etcd)
