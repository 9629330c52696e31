"""The audit's comparison: each defect yields one finding, and a consistent cluster none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from ecomp.model import keys, record, states
from ecomp.model.audit import CHECKS, REPAIR_WRONG_KEY, confirm_findings, find_all
from ecomp.model.finding import Finding
from ecomp.model.group import AFFINITY, ANTI_AFFINITY
from ecomp.model.guest import (
    CRASHED,
    INTERFACE_DOWN,
    PAUSED,
    REFUSED_METADATA,
    UNFILTERED,
    UNLIKE,
    UNPLUGGED,
    GuestTrouble,
)
from ecomp.model.host import StoredHostname
from ecomp.model.order import Request
from ecomp.model.quota import Quota, multiply_amounts
from ecomp.model.stack import Stack
from ecomp.model.stored import encode
from ecomp.model.world import HostFacts, Planes, World, index_revisions
from tests.unit.audit_world import (
    ACTIVE,
    AWAY_COMPUTE,
    ELSEWHERE,
    FAILED,
    FIRST,
    GONE,
    IMAGE,
    LEASE,
    OFF,
    ONE,
    REPLACEMENT,
    SIZE,
    STACK,
    TOTALS,
    TWO,
    UNKNOWN,
    WorldBuilder,
)


def test_consistent_cluster_has_no_finding(world: WorldBuilder) -> None:
    assert world.audit() == []
    assert find_all(World(Planes({}, {}))) == []


def empty_address(world: WorldBuilder) -> None:
    world.put_record(ACTIVE, states.ACTIVE, name='web1')
    world.put(keys.address(ACTIVE), '')


def add_namesake(world: WorldBuilder) -> None:
    world.add_instance(TWO, UNKNOWN, name='web1')


def make_facts_change(**changed: object) -> Callable[[WorldBuilder], None]:
    return lambda world: world.facts.update({ONE: replace(world.facts[ONE], **changed)})


def make_trouble_change(*troubles: GuestTrouble, **size: int) -> Callable[[WorldBuilder], None]:
    return lambda world: world.add_guest(ONE, ACTIVE, troubles=troubles, size=size)


def make_compute_mute(world: WorldBuilder) -> None:
    world.mute[TWO] = 'it does not answer'
    del world.facts[TWO]


def remove_reservation(world: WorldBuilder) -> None:
    reserved = world.facts[ONE].reservations
    reservations = {mac: each for mac, each in reserved.items() if each.instance != ACTIVE}
    world.facts[ONE] = replace(world.facts[ONE], reservations=reservations)


DEFECTS: list[tuple[str, str, Callable[[WorldBuilder], object]]] = [
    ('provider-missing', TWO, lambda w: w.names.pop(TWO)),
    ('inventory-missing', TWO, lambda w: w.add_provider(TWO, {})),
    ('capacity-exceeded', ONE, lambda w: w.add_provider(ONE, {**TOTALS, 'VCPU': 1})),
    ('compute-silent', AWAY_COMPUTE, lambda w: w.inventories[AWAY_COMPUTE]['VCPU'].update(reserved=0)),
    ('allocation-orphaned', UNKNOWN, lambda w: w.allocations[TWO].update({UNKNOWN: SIZE})),
    ('allocation-orphaned', GONE, lambda w: w.allocations[TWO].update({GONE: SIZE})),
    ('allocation-missing', ACTIVE, lambda w: w.allocations[ONE].pop(ACTIVE)),
    ('allocation-missing', ELSEWHERE, lambda w: w.allocations[AWAY_COMPUTE].pop(ELSEWHERE)),
    ('allocation-differs', ACTIVE, lambda w: w.allocations[ONE].update({ACTIVE: {**SIZE, 'MEMORY_MB': 32}})),
    ('allocation-doubled', ACTIVE, lambda w: w.allocations[TWO].update({ACTIVE: SIZE})),
    ('request-doubled', ACTIVE, lambda w: w.put_request(TWO, ACTIVE)),
    ('request-doubled', UNKNOWN, lambda w: (w.put_request(TWO, UNKNOWN), w.put_request(AWAY_COMPUTE, UNKNOWN))),
    ('request-misplaced', ACTIVE,
     lambda w: (w.etcd.pop(keys.request(ONE, ACTIVE)), w.put_request(TWO, ACTIVE, name='web1'))),
    ('request-misplaced', GONE, lambda w: w.put_request(TWO, GONE)),
    ('request-missing', ACTIVE, lambda w: w.etcd.pop(keys.request(ONE, ACTIVE))),
    ('request-ended', GONE, lambda w: w.put_request(ONE, GONE)),
    ('request-ended', FAILED, lambda w: w.put_request(ONE, FAILED)),
    ('replaced-lives', ELSEWHERE, lambda w: w.put_replacement(ACTIVE, ELSEWHERE)),
    ('replaced-lives', OFF, lambda w: w.put_replacement(ACTIVE, OFF)),
    ('malformed', UNKNOWN, lambda w: w.put(keys.request(ONE, UNKNOWN), 'no request')),
    ('malformed', 'a/b', lambda w: w.put(f'{keys.HOSTS}{ONE}/a/b', '{}')),
    ('malformed', '', lambda w: w.put(f'{keys.HOSTS}nothing', '{}')),
    ('malformed', UNKNOWN, lambda w: w.put(keys.queue('small', UNKNOWN), 'no request')),
    ('malformed', 'b', lambda w: w.put(f'{keys.QUEUES}small/a/b', '{}')),
    ('queued-flavorless', UNKNOWN, lambda w: w.put_queued(UNKNOWN, flavor='none')),
    ('queued-doubled', ACTIVE, lambda w: w.put_queued(ACTIVE, name='web1')),
    ('queued-doubled', GONE, lambda w: w.put_queued(GONE)),
    ('queued-doubled', UNKNOWN, lambda w: (w.put_queued(UNKNOWN), w.put_request(TWO, UNKNOWN))),
    ('unleased', UNKNOWN, lambda w: (w.put_queued(UNKNOWN), w.put(keys.taker(keys.queue('small', UNKNOWN)), '{}'))),
    ('record-doubled', ACTIVE, lambda w: w.put_record(ACTIVE, states.STOPPED, TWO)),
    ('record-doubled', GONE, lambda w: w.put_record(GONE, states.ACTIVE, TWO)),
    ('record-missing', ACTIVE, lambda w: w.etcd.pop(keys.record(ONE, ACTIVE))),
    ('malformed', ACTIVE, lambda w: w.put(keys.record(ONE, ACTIVE), '{"version": 99}')),
    ('malformed', 'no-uuid', lambda w: w.put(keys.record(ONE, 'no-uuid'), '{}')),
    ('unleased', GONE, lambda w: w.put_record(GONE, states.GONE)),
    ('unleased', FAILED, lambda w: w.put_record(FAILED, states.ERROR, name='failed')),
    ('record-leased', ACTIVE,
     lambda w: w.put_record(ACTIVE, states.ACTIVE, lease=LEASE, address='10.0.0.1', name='web1')),
    ('booted-orphaned', UNKNOWN, lambda w: w.put(keys.address(UNKNOWN), '10.0.0.1')),
    ('booted-orphaned', GONE, lambda w: w.put(keys.address(GONE), '10.0.0.1')),
    ('booted-differs', ACTIVE, lambda w: w.put(keys.address(ACTIVE), '10.0.0.2')),
    ('booted-differs', ACTIVE, lambda w: w.etcd.pop(keys.address(ACTIVE))),
    ('booted-differs', ACTIVE, empty_address),
    ('name-orphaned', 'web2', lambda w: w.put_name('web2', UNKNOWN)),
    ('name-orphaned', 'web2', lambda w: w.put_name('web2', ACTIVE)),
    ('name-orphaned', 'web2', lambda w: w.put_name('web2', OFF)),
    ('name-orphaned', 'web2', lambda w: w.put_name('web2', GONE)),
    ('name-orphaned', 'failed', lambda w: w.put_name('failed', FAILED)),
    ('hostname-orphaned', UNKNOWN, lambda w: w.put(keys.hostname(UNKNOWN), encode(StoredHostname('hv9')))),
    ('malformed', 'x/y', lambda w: w.put(keys.name('x/y'), 'no JSON')),
    ('name-missing', ACTIVE, lambda w: w.etcd.pop(keys.name('web1'))),
    ('name-missing', ACTIVE, lambda w: w.put_name('web1', ACTIVE, LEASE)),
    ('name-missing', ACTIVE, add_namesake),
    ('name-reserved', UNKNOWN, lambda w: w.add_instance(TWO, UNKNOWN, name='rename')),
    ('malformed', 'web', lambda w: w.put(keys.group('web'), '{}')),
    ('group-broken', 'web', lambda w: w.put_group('web', ANTI_AFFINITY, {ACTIVE: ONE, OFF: ONE})),
    ('group-broken', 'web', lambda w: w.put_group('web', AFFINITY, {ACTIVE: ONE, ELSEWHERE: AWAY_COMPUTE})),
    ('group-orphaned', 'web', lambda w: w.put_group('web', AFFINITY, {ACTIVE: ONE, UNKNOWN: ONE})),
    ('group-orphaned', 'web', lambda w: w.put_group('web', AFFINITY, {GONE: ONE})),
    ('group-missing', ACTIVE, lambda w: w.put_grouped_request(ACTIVE, 'web')),
    ('group-missing', ACTIVE,
     lambda w: (w.put_grouped_request(ACTIVE, 'web'), w.put_group('web', ANTI_AFFINITY, {ACTIVE: TWO}))),
    ('malformed', 'a/b', lambda w: w.put(keys.quota('a/b'), '{}')),
    ('quota-differs', 'web', lambda w: w.put(keys.quota('web'), encode(Quota('web', {}, {'VCPU': 1})))),
    ('usage-differs', 'web', lambda w: (
        w.put(keys.quota('web'), encode(Quota('web', {'VCPU': 9}))),
        w.usages.update(web={'VCPU': 1, 'instances': 1}))),
    ('malformed', 'shop', lambda w: w.put(keys.stack('shop'), '{}')),
    ('malformed', 'a/b', lambda w: w.put(keys.stack('a/b'), '{}')),
    ('stack-entry', 'shop', lambda w: w.put_stack(STACK.with_delivered({FIRST: ONE}))),
    ('stack-entry', 'shop', lambda w: (
        w.put_stack(STACK.with_delivered({FIRST: ONE})),
        w.put_record(FIRST.instance, states.GONE, lease=LEASE))),
    ('stack-mismatch', 'shop', lambda w: w.put_stacked_request(TWO, FIRST)),
    ('stack-mismatch', 'shop', lambda w: (w.put_stack(STACK), w.put_stacked_request(TWO, FIRST))),
    ('stack-mismatch', FIRST.instance, lambda w: (
        w.put_stack(STACK.with_delivered({REPLACEMENT: ONE}).with_ended(['web/1'])),
        w.put_stacked_request(TWO, FIRST))),
    ('stack-mismatch', FIRST.instance, lambda w: (
        w.put_stack(Stack('shop', UNKNOWN).with_delivered({FIRST: ONE}).with_ended(['web/1'])),
        w.put_stacked_request(TWO, FIRST))),
    ('stack-mismatch', UNKNOWN, lambda w: (
        w.put_stack(STACK.with_delivered({FIRST: ONE}).with_ended(['web/1'])),
        w.put_stacked_request(TWO, FIRST, UNKNOWN))),
    ('unleased', UNKNOWN, lambda w: w.put(keys.attempt(UNKNOWN), json.dumps({'instances': [UNKNOWN]}))),
    ('unleased', TWO, lambda w: w.put_presence(TWO, lease=0)),
    ('compute-mute', TWO, make_compute_mute),
    ('host-trouble', TWO, lambda w: w.put(keys.troubles(TWO), '{"reasons": ["network default is off"]}', LEASE)),
    ('host-trouble', TWO, lambda w: w.put(keys.troubles(TWO), 'x' * 2000, LEASE)),
    ('domain-missing', ACTIVE, lambda w: w.remove_guest(ONE, ACTIVE)),
    ('domain-missing', OFF, lambda w: w.add_guest(ONE, OFF, False, compute=None, defined=False)),
    ('domain-off', ACTIVE, lambda w: w.add_guest(ONE, ACTIVE, running=False)),
    ('domain-running', OFF, lambda w: w.add_guest(ONE, OFF)),
    ('domain-running', GONE, lambda w: w.add_guest(ONE, GONE)),
    ('domain-running', FAILED, lambda w: w.add_guest(TWO, FAILED)),
    ('domain-undefined', ACTIVE, lambda w: w.add_guest(ONE, ACTIVE, defined=False)),
    ('domain-orphaned', UNKNOWN, lambda w: w.add_guest(ONE, UNKNOWN)),
    ('domain-orphaned', UNKNOWN, lambda w: w.add_guest(ONE, UNKNOWN, running=False)),
    ('domain-orphaned', FAILED, lambda w: w.add_guest(TWO, FAILED, running=False)),
    ('domain-misplaced', ACTIVE, lambda w: w.add_guest(ONE, ACTIVE, compute=AWAY_COMPUTE)),
    ('domain-misplaced', UNKNOWN, lambda w: w.add_guest(ONE, UNKNOWN, compute=TWO)),
    ('adoption-misplaced', UNKNOWN, lambda w: w.add_guest(ONE, UNKNOWN, compute=TWO, is_adopted=True)),
    ('domain-doubled', ACTIVE, lambda w: w.add_guest(TWO, ACTIVE)),
    ('domain-doubled', ELSEWHERE, lambda w: w.add_guest(TWO, ELSEWHERE)),
    ('disk-missing', ACTIVE, lambda w: w.add_guest(ONE, ACTIVE, disk=False)),
    ('base-missing', ACTIVE, make_facts_change(without_base={ACTIVE: '/images/base-x.qcow2'})),
    ('disk-orphaned', UNKNOWN, lambda w: w.add_guest(ONE, UNKNOWN, compute=None, defined=False, running=False)),
    ('disk-orphaned', GONE, lambda w: w.add_guest(ONE, GONE, compute=None, defined=False, running=False)),
    ('seed-orphaned', UNKNOWN, lambda w: w.add_metadata(ONE, UNKNOWN)),
    ('seed-orphaned', ACTIVE, lambda w: w.add_metadata(TWO, ACTIVE)),
    ('iso-orphaned', UNKNOWN, lambda w: w.add_iso(ONE, UNKNOWN)),
    ('iso-orphaned', GONE, lambda w: w.add_iso(TWO, GONE)),
    ('iso-orphaned', ACTIVE, lambda w: w.add_iso(TWO, ACTIVE)),
    ('reservation-orphaned', UNKNOWN, lambda w: w.add_reservation(ONE, UNKNOWN, '10.0.0.9')),
    ('reservation-orphaned', GONE, lambda w: w.add_reservation(ONE, GONE, '10.0.0.9')),
    ('reservation-orphaned', ACTIVE, lambda w: w.add_reservation(TWO, ACTIVE, '10.0.0.1')),
    ('reservation-missing', ACTIVE, remove_reservation),
    ('reservation-differs', OFF, lambda w: w.add_reservation(ONE, OFF, '10.0.0.9')),
    ('domain-differs', ACTIVE, make_trouble_change(GuestTrouble(UNPLUGGED, ' (vnet0): network default is off'))),
    ('domain-differs', ACTIVE, make_trouble_change(GuestTrouble(INTERFACE_DOWN, ' (vnet0)'))),
    ('domain-differs', ACTIVE, make_trouble_change(GuestTrouble(PAUSED))),
    ('domain-differs', ACTIVE, make_trouble_change(VCPU=3)),
    ('domain-differs', OFF, lambda w: w.add_guest(ONE, OFF, running=False, size={'VCPU': 2})),
    ('filter-missing', ACTIVE, make_trouble_change(GuestTrouble(UNFILTERED, ' (vnet0): RULE_DELETE failed'))),
    ('metadata-refused', ACTIVE, make_trouble_change(GuestTrouble(REFUSED_METADATA, ': no current DHCP lease'))),
    ('dhcp-open', ONE, make_facts_change(open_dhcp=frozenset({'default'}))),
    ('base-differs', ONE, make_facts_change(bad_bases=frozenset({'ab12'}))),
    ('part-orphaned', ONE, make_facts_change(parts={'images/x.part': '1'})),
]  # fmt: skip


@pytest.mark.parametrize(('code', 'subject', 'plant'), DEFECTS)
def test_each_defect_yields_its_code_alone(
    world: WorldBuilder, code: str, subject: str, plant: Callable[[WorldBuilder], object]
) -> None:
    plant(world)
    findings = world.audit()
    assert [(finding.code, finding.subject) for finding in findings] == [(code, subject)]
    assert '\n' not in findings[0].sentence
    assert findings[0].fix or findings[0].how, 'either --fix mends it or a person does'
    # An etcdctl command can be typed as it is printed, and names existing keys.
    assert '<key>' not in findings[0].how
    assert 'etcdctl' not in findings[0].how or set(findings[0].keys) <= {*world.etcd, keys.address(findings[0].subject)}


def test_each_trouble_of_a_guest_is_reported(world: WorldBuilder) -> None:
    make_trouble_change(GuestTrouble(PAUSED), GuestTrouble(CRASHED), GuestTrouble(UNFILTERED, ' (vnet0)'), VCPU=3)(
        world
    )
    summary = f'its record has state active on compute {ONE}, but'
    expected = [f'{summary} {PAUSED}', f'{summary} {UNFILTERED} (vnet0)', f'{summary} {UNLIKE}: VCPU:3 for 1']
    assert [finding.sentence for finding in world.audit()] == expected


@pytest.mark.parametrize('size', [{}, SIZE, {**SIZE, 'DISK_GB': 0}, {'CUSTOM_GPU': 1, '': 5}])
def test_size_that_is_as_claimed_or_unknown_has_no_finding(world: WorldBuilder, size: dict[str, int]) -> None:
    world.add_guest(ONE, ACTIVE, size=size)
    assert world.audit() == []


def test_manual_fix_names_the_keys_to_delete(world: WorldBuilder) -> None:
    """Both keys of a pair are named when only one of them is wrong."""

    def list_fixes(instance: str) -> list[str]:
        return [finding.how for finding in world.audit() if finding.subject == instance]

    world.put_request(TWO, ACTIVE)
    candidates = f'{keys.request(ONE, ACTIVE)} or {keys.request(TWO, ACTIVE)}'
    assert list_fixes(ACTIVE) == [REPAIR_WRONG_KEY.replace('<key>', candidates)]
    world.put_record(OFF, states.ACTIVE, TWO)
    records = f'{keys.record(ONE, OFF)} or {keys.record(TWO, OFF)}'
    assert list_fixes(OFF) == [REPAIR_WRONG_KEY.replace('<key>', records)]
    world.put_request(TWO, GONE)
    wrong = f'{keys.request(TWO, GONE)} or {keys.record(ONE, GONE)}'
    assert list_fixes(GONE) == [REPAIR_WRONG_KEY.replace('<key>', wrong)]
    # A key with a blank is quoted for the shell.
    world.put(keys.quota('a b'), '{}')
    (fix,) = list_fixes('a b')
    assert fix.startswith("if no newer ecomp wrote it: `etcdctl del '/quotas/a b'`, or ")


# Stacks


def test_consistent_stack_has_no_finding(world: WorldBuilder) -> None:
    world.put_stack(STACK.with_delivered({FIRST: TWO}))
    world.put_stacked_request(TWO, FIRST)
    assert world.audit() == []


@pytest.mark.parametrize('stack', [STACK, STACK.with_delivered({FIRST: ONE})], ids=['first', 'replacement'])
def test_stack_with_an_apply_in_flight_has_no_finding(world: WorldBuilder, stack: Stack) -> None:
    world.put_stack(stack)
    world.put_stacked_request(TWO, REPLACEMENT)
    assert set(world.audit_codes()) == {'stack-mismatch', *(['stack-entry'] if stack.entries else [])}
    world.put(keys.attempt(stack.attempt), json.dumps({'instances': []}), LEASE)
    assert world.audit() == []


def test_destroyed_and_failed_instances_of_a_stack_have_no_finding(world: WorldBuilder) -> None:
    failed, ended = STACK.make_place('db/1'), STACK.make_place('db/2')
    world.put_stack(STACK.with_delivered({FIRST: ONE, failed: ONE, ended: ONE}).with_ended(['db/2']))
    world.put_request(ONE, FIRST.instance, tombstone=True)
    world.put_record(FIRST.instance, states.DESTROYING)
    world.put_record(failed.instance, states.ERROR, lease=LEASE)
    assert world.audit() == []


def test_tombstone_of_a_replaced_instance_is_no_mismatch(world: WorldBuilder) -> None:
    world.put_stack(STACK.with_delivered({REPLACEMENT: TWO}))
    world.put_stacked_request(TWO, REPLACEMENT)
    request = Request(FIRST.instance, {}, image=None, stack=FIRST)
    world.put(keys.request(ONE, FIRST.instance), encode(request))
    assert world.audit() == []


def test_only_a_missing_stack_is_restored_automatically(world: WorldBuilder) -> None:
    world.put_stacked_request(TWO, FIRST)
    (finding,) = world.audit()
    assert (finding.fix, finding.how) == ('restores the stack from the requests', '')
    assert FIRST.instance in finding.sentence
    world.put_stack(STACK.with_delivered({REPLACEMENT: ONE}).with_ended(['web/1']))
    (finding,) = world.audit()
    assert (finding.fix, '`eschedule apply`' in finding.how) == ('', True)
    assert f'/stacks/shop has {REPLACEMENT.instance} there' in finding.sentence


def test_lost_stack_without_a_valid_uuid_has_no_finding(world: WorldBuilder) -> None:
    world.put_stacked_request(TWO, FIRST, UNKNOWN)
    assert world.audit() == []


def test_stack_entry_that_is_delivered_between_two_reads_is_not_confirmed(world: WorldBuilder) -> None:
    world.put_stack(STACK.with_delivered({FIRST: TWO}))
    first, before = world.audit(), index_revisions(world.etcd)
    world.put_stack(STACK.with_delivered({REPLACEMENT: TWO}))
    second, after = world.audit(), index_revisions(world.etcd)
    assert first == second != []
    assert confirm_findings(first, second, [before, after, after]) == []
    assert confirm_findings(second, second, [after, after, after]) == second


def test_defects_cover_exactly_all_codes() -> None:
    assert {code for code, _, _ in DEFECTS} == set(CHECKS)


def test_name_of_another_instance_is_not_fixed_automatically(world: WorldBuilder) -> None:
    add_namesake(world)
    (finding,) = world.audit()
    assert (finding.fix, bool(finding.how)) == ('', True)
    assert f'/names/web1 belongs to instance {UNKNOWN}' in finding.sentence


# A finding must be seen by two consecutive checks


def test_finding_is_confirmed_by_two_checks_with_unchanged_keys() -> None:
    first, other = Finding('booted-orphaned', UNKNOWN, 'x'), Finding('booted-orphaned', UNKNOWN, 'y')
    unchanged = {UNKNOWN: {keys.address(UNKNOWN): 5}}
    assert confirm_findings([first], [first], [unchanged, unchanged, unchanged]) == [first]
    assert confirm_findings([first], [], [unchanged, unchanged]) == []
    assert confirm_findings([], [first], [unchanged, unchanged]) == []
    assert confirm_findings([first], [other], [unchanged, unchanged]) == []
    assert confirm_findings([first], [first], [unchanged, {UNKNOWN: {keys.address(UNKNOWN): 6}}, unchanged]) == []
    assert confirm_findings([first], [first], [unchanged, {}]) == []
    assert confirm_findings([first], [first], [{}, {}]) == [first]


def test_involved_lists_the_keys_of_each_subject(world: WorldBuilder) -> None:
    world.put(keys.attempt(UNKNOWN), json.dumps({'instances': [ACTIVE, GONE]}), LEASE)
    revisions = index_revisions(world.etcd)
    assert set(revisions[ACTIVE]) == {
        keys.request(ONE, ACTIVE), keys.record(ONE, ACTIVE), keys.address(ACTIVE), keys.attempt(UNKNOWN)
    }  # fmt: skip
    assert set(revisions[ONE]) == {keys.compute(ONE)}
    assert revisions[UNKNOWN] == {keys.attempt(UNKNOWN): world.etcd[keys.attempt(UNKNOWN)].revision}


def test_new_hints_do_not_change_the_keys_involved(world: WorldBuilder) -> None:
    """A busy compute updates its hints every ten seconds and can still get a confirmed finding."""
    before = index_revisions(world.etcd)
    presence = world.etcd[keys.compute(ONE)]
    world.put(keys.compute(ONE), json.dumps({'room': {'VCPU': [4, 50]}}), presence.lease)
    assert world.etcd[keys.compute(ONE)].revision != presence.revision
    assert index_revisions(world.etcd) == before
    world.put(keys.compute(ONE), json.dumps({}), presence.lease + 1)  # its process died and a new one started
    assert index_revisions(world.etcd) != before


# No finding: work in progress, what a state explains, and what does not belong to ecomp.


@pytest.mark.parametrize('state', [states.SCHEDULED, states.BUILDING, states.DESTROYING])
@pytest.mark.parametrize('holds', [True, False])
@pytest.mark.parametrize('guest', ['none', 'disk', 'defined', 'running'])
def test_unfinished_state_explains_its_leftovers(world: WorldBuilder, state: str, holds: bool, guest: str) -> None:
    world.put_request(TWO, UNKNOWN, tombstone=state == states.DESTROYING)
    world.put_record(UNKNOWN, state, TWO)
    if holds:
        world.allocations[TWO][UNKNOWN] = SIZE
    if guest == 'disk':
        world.add_guest(TWO, UNKNOWN, compute=None, defined=False, running=False)
    elif guest != 'none':
        world.add_guest(TWO, UNKNOWN, running=guest == 'running')
    world.add_metadata(TWO, UNKNOWN)
    world.add_iso(TWO, UNKNOWN)
    world.add_reservation(TWO, UNKNOWN, '10.0.0.9')
    assert world.audit() == []


def test_consistent_groups_and_quotas_have_no_finding(world: WorldBuilder) -> None:
    world.put_grouped_request(ACTIVE, 'web')
    world.put_group('web', ANTI_AFFINITY, {ACTIVE: ONE, ELSEWHERE: AWAY_COMPUTE})
    world.put(keys.request(ONE, OFF), encode(Request(OFF, {ONE: SIZE}, image=IMAGE, user_id='', project_id='p')))
    world.put(keys.quota('p'), encode(Quota('p', {'VCPU': 1}, {**SIZE, 'instances': 1})))
    world.usages['p'] = {**SIZE, 'instances': 1}
    assert world.audit() == []
    # An attempt in flight has claimed and not delivered yet.
    world.put(keys.attempt(UNKNOWN), json.dumps({'instances': [UNKNOWN]}), LEASE)
    world.usages['p'] = {**multiply_amounts(SIZE, 2), 'instances': 2}
    assert world.audit() == []


def test_evacuated_instance_with_its_tombstone_has_no_finding(world: WorldBuilder) -> None:
    """Its charge has moved, so its tombstone does not count in the quota."""
    world.put_replacement(ACTIVE, ELSEWHERE, project_id='p')
    world.put_tombstone(AWAY_COMPUTE, ELSEWHERE, ACTIVE, project_id='p')
    world.put(keys.quota('p'), encode(Quota('p', {}, {**SIZE, 'instances': 1})))
    assert world.audit() == []
    # The charge is missing.
    world.put(keys.quota('p'), encode(Quota('p', {'VCPU': 9}, {})))
    (finding,) = world.audit()
    assert (finding.code, finding.subject, finding.fix) == ('quota-differs', 'p', 'counts the usage again')
    world.put(keys.quota('p'), encode(Quota('p', {'VCPU': 9}, {**SIZE, 'instances': 1})))
    # Its request is gone, and its record says so.
    del world.etcd[keys.request(AWAY_COMPUTE, ELSEWHERE)]
    world.put_record(ELSEWHERE, states.GONE, AWAY_COMPUTE, lease=LEASE)
    del world.allocations[AWAY_COMPUTE][ELSEWHERE], world.etcd[keys.address(ELSEWHERE)]
    assert world.audit() == []


def test_nothing_is_destroyed_because_an_instance_says_that_it_replaces_another(world: WorldBuilder) -> None:
    """Any compute may write that into its own request or record (S1), so no repair follows."""

    def list_replaced() -> list[tuple[str, str]]:
        findings = world.audit()
        return [(finding.subject, finding.fix) for finding in findings if finding.code == 'replaced-lives']

    world.put_replacement(ACTIVE, ELSEWHERE)
    assert list_replaced() == [(ELSEWHERE, '')]
    (finding,) = world.audit()
    assert 'eschedule destroy <instance>' in finding.how
    world.put_presence(AWAY_COMPUTE)
    assert list_replaced() == [(ELSEWHERE, '')]
    # A record without a request lives, too. What is in a queue or being placed is not judged.
    del world.etcd[keys.request(AWAY_COMPUTE, ELSEWHERE)]
    assert list_replaced() == [(ELSEWHERE, '')]
    world.put(keys.attempt(ELSEWHERE), json.dumps({'instances': [ELSEWHERE]}), LEASE)
    assert list_replaced() == []


def test_replacement_is_known_by_its_record_until_it_is_destroyed(world: WorldBuilder) -> None:
    stored = record.from_json(world.etcd[keys.record(ONE, OFF)].value)
    world.put(keys.record(ONE, OFF), encode(replace(stored, replaces=ELSEWHERE)))
    assert world.audit_codes() == ['replaced-lives']
    world.put_request(ONE, OFF, tombstone=True)
    assert world.audit() == []


def test_request_without_record_yet_has_no_finding(world: WorldBuilder) -> None:
    world.put_request(TWO, UNKNOWN, name='web2')
    world.put_name('web2', UNKNOWN)
    assert world.audit() == []
    world.allocations[TWO][UNKNOWN] = SIZE
    assert world.audit() == []


@pytest.mark.parametrize('has_record', [True, False])
def test_unseen_tombstone_has_no_finding(world: WorldBuilder, has_record: bool) -> None:
    world.put_request(ONE, ACTIVE, tombstone=True)
    if not has_record:
        del world.etcd[keys.record(ONE, ACTIVE)], world.etcd[keys.address(ACTIVE)]
    assert world.audit() == []


def test_name_of_malformed_value_is_not_orphaned(world: WorldBuilder) -> None:
    world.put_name('web2', UNKNOWN)
    for key in (keys.record(TWO, UNKNOWN), keys.request(TWO, UNKNOWN)):
        world.put(key, '{"version": 99, "name": "web2"}')
        assert world.audit_codes() == ['malformed' if key.startswith(keys.INSTANCES) else 'malformed']
        del world.etcd[key]


def test_name_of_failed_instance_may_be_reused(world: WorldBuilder) -> None:
    world.add_instance(TWO, UNKNOWN, name='failed')
    assert world.audit_codes() == []


@pytest.mark.parametrize('recorded_power', [None, f'{GONE}:asked', f'{GONE}:off'])
@pytest.mark.parametrize('state', [states.ACTIVE, states.STOPPED])
@pytest.mark.parametrize('running', [True, False])
def test_unfinished_power_action_has_no_finding(
    world: WorldBuilder, recorded_power: str | None, state: str, running: bool
) -> None:
    key = keys.request(ONE, ACTIVE)
    request = json.loads(world.etcd[key].value) | {'power': {'action': 'reboot', 'id': GONE}}
    world.put(key, json.dumps(request))
    world.put_record(ACTIVE, state, address='10.0.0.1')
    instance_record = json.loads(world.etcd[keys.record(ONE, ACTIVE)].value)
    world.put(keys.record(ONE, ACTIVE), json.dumps(instance_record | {'power': recorded_power}))
    world.add_guest(ONE, ACTIVE, running=running)
    assert world.audit() == []
    # After the switch is complete, the record must match the guest.
    world.put(keys.record(ONE, ACTIVE), json.dumps(instance_record | {'power': GONE}))
    differs = {(states.ACTIVE, False): ['domain-off'], (states.STOPPED, True): ['domain-running']}
    assert world.audit_codes() == differs.get((state, running), [])


def test_claim_of_attempt_in_flight_has_no_finding(world: WorldBuilder) -> None:
    for key, value in (
        (keys.attempt(UNKNOWN), json.dumps({'instances': [UNKNOWN]})),
        (keys.attempt(GONE), json.dumps({'instances': [GONE, UNKNOWN]})),
        (keys.taker(keys.queue('small', UNKNOWN)), '{}'),
    ):
        world.put(key, value, LEASE)
        world.allocations[TWO][UNKNOWN] = SIZE
        assert world.audit() == [], key
        del world.etcd[key]
        assert world.audit_codes() == ['allocation-orphaned'], key


def test_queued_request_has_no_finding(world: WorldBuilder) -> None:
    world.put_queued(UNKNOWN, name='web2')
    world.put_name('web2', UNKNOWN)
    # The claim of its taker, whether the taker key still exists or not.
    world.allocations[TWO][UNKNOWN] = SIZE
    assert world.audit() == []
    world.put(keys.taker(keys.queue('small', UNKNOWN)), '{}', LEASE)
    assert world.audit() == []
    # A request destroyed while queued has a record without a compute.
    world.put_record(FAILED, states.GONE, compute='', lease=LEASE)
    del world.etcd[keys.name('failed')]
    assert world.audit() == []
    assert World(world.build_planes()).absent_computes == {AWAY_COMPUTE: 'closed'}


def test_away_lists_closed_and_silent_but_no_forgotten_computes(world: WorldBuilder) -> None:
    world.put_record(GONE, states.GONE, compute=UNKNOWN, lease=LEASE)
    world.put_record(FAILED, states.ERROR, compute=UNKNOWN, lease=LEASE, name='failed')
    assert World(world.build_planes()).absent_computes == {AWAY_COMPUTE: 'closed'}
    world.inventories[AWAY_COMPUTE]['VCPU']['reserved'] = 0
    assert World(world.build_planes()).absent_computes == {AWAY_COMPUTE: 'silent'}
    world.inventories[AWAY_COMPUTE]['VCPU']['reserved'] = TOTALS['VCPU']
    world.put_record(UNKNOWN, states.STOPPED, compute=UNKNOWN)
    assert World(world.build_planes()).absent_computes == {AWAY_COMPUTE: 'closed', UNKNOWN: 'silent'}


def test_hostname_is_orphaned_only_without_provider_and_requests(world: WorldBuilder) -> None:
    for compute in (ONE, AWAY_COMPUTE):
        world.put(keys.hostname(compute), '{"version": 1, "hostname": "hv1"}')
    assert world.audit() == []
    world.put(keys.hostname(UNKNOWN), 'rubbish')
    world.put_record(GONE, states.GONE, compute=UNKNOWN, lease=LEASE)
    assert world.audit_codes() == ['hostname-orphaned']
    world.put_request(UNKNOWN, ACTIVE)
    assert 'hostname-orphaned' not in world.audit_codes()


def test_silent_compute_without_allocations_has_no_finding(world: WorldBuilder) -> None:
    world.inventories[AWAY_COMPUTE]['VCPU']['reserved'] = 0
    world.allocations[AWAY_COMPUTE].clear()
    assert 'compute-silent' not in world.audit_codes()


def test_compute_away_is_compared_after_it_returns(world: WorldBuilder) -> None:
    world.allocations[AWAY_COMPUTE][UNKNOWN] = SIZE
    assert world.audit() == []
    world.put_presence(AWAY_COMPUTE)
    world.facts[AWAY_COMPUTE] = HostFacts()
    assert sorted(world.audit_codes()) == ['allocation-orphaned', 'domain-missing']


def test_claim_with_guest_is_not_orphaned(world: WorldBuilder) -> None:
    world.allocations[TWO][UNKNOWN] = SIZE
    world.add_guest(TWO, UNKNOWN)
    assert world.audit_codes() == ['domain-orphaned']


def test_consumer_of_shared_provider_alone_is_ignored(world: WorldBuilder) -> None:
    storage = 'dddddddd-0000-4000-8000-000000000000'
    world.add_provider(storage, {'DISK_GB': 1}, 'a storage pool')
    world.allocations[storage][UNKNOWN] = {'DISK_GB': 5}
    assert world.audit() == []


def test_disk_from_shared_provider_has_no_finding(world: WorldBuilder) -> None:
    storage = 'dddddddd-0000-4000-8000-000000000000'
    world.add_provider(storage, {'DISK_GB': 100}, 'a storage pool')
    allocations = {ONE: {'VCPU': 1, 'MEMORY_MB': 64}, storage: {'DISK_GB': 1}}
    world.put(keys.request(ONE, ACTIVE), encode(Request(ACTIVE, allocations, image=IMAGE)))
    world.allocations[ONE][ACTIVE], world.allocations[storage][ACTIVE] = allocations[ONE], allocations[storage]
    assert world.audit() == []


def test_reserved_inventory_has_no_finding(world: WorldBuilder) -> None:
    for inventory in world.inventories[ONE].values():
        inventory['reserved'] = inventory['total']
    assert world.audit() == []


def test_two_computes_on_one_libvirt_have_no_finding(world: WorldBuilder) -> None:
    world.add_guest(TWO, ACTIVE, compute=ONE)
    assert world.audit() == []


def test_disk_of_instance_running_elsewhere_is_not_fixed_automatically(world: WorldBuilder) -> None:
    world.add_guest(TWO, ACTIVE, compute=None, defined=False, running=False)
    (finding,) = world.audit()
    assert (finding.code, finding.fix) == ('disk-orphaned', '')
    assert finding.how


@pytest.mark.parametrize('defined', [True, False])
def test_seed_beside_its_disk_has_no_own_finding(world: WorldBuilder, defined: bool) -> None:
    world.add_guest(ONE, UNKNOWN, compute=ONE if defined else None, defined=defined, running=False)
    world.add_iso(ONE, UNKNOWN)
    assert world.audit_codes() == ['domain-orphaned' if defined else 'disk-orphaned']
