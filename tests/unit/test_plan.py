"""The planner's decision table: what is requested against what exists."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ecomp.agent.instance.instances import Shutdowns
from ecomp.agent.instance.plan import (
    GONE_BOTH,
    GONE_DISK,
    GONE_DOMAIN,
    UNDEFINED,
    Kind,
    Patience,
    Sightings,
    Task,
    Wish,
    fault_of,
    news,
    pending,
    plan,
)
from ecomp.model.guest import (
    CRASHED,
    MOST_INTERFACES,
    NO_SPACE,
    PAUSED,
    REFUSED_METADATA,
    UNLIKE,
    UNPLUGGED,
    Address,
    Attachment,
    Guest,
    GuestFailure,
    GuestSpec,
    all_macs,
    mac_address,
)
from ecomp.model.guest import BaseImage as Base
from ecomp.model.order import (
    ACTIONS,
    ASKED,
    NOT_STARTED,
    OFF,
    REBOOT,
    START,
    STOP,
    Invalid,
    Power,
    Request,
    action_id,
    phase,
)
from ecomp.model.record import (
    ACTIVE,
    BUILDING,
    DESTROYING,
    ERROR,
    GONE,
    SCHEDULED,
    STOPPED,
    Interface,
    Record,
)

# The whole decision table: every state of the record, with every guest, for every wish.


HERE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
ELSEWHERE = '0a1b2c3d-0000-4000-8000-000000000001'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
NEIGHBOUR = 'e9bedb97-917a-4f4e-9a69-8ad21840267f'
MAC = mac_address(INSTANCE, 0)

ASKED_STATES = Request(
    INSTANCE, {HERE: {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}}, image='http://h/i', user_id='u', project_id='p'
)
TOMBSTONE = Request(INSTANCE, {}, image=None, user_id='u', project_id='p')
UNREADABLE = Invalid(INSTANCE, 'not JSON')
WISHES: dict[str, Wish] = {'asked': ASKED_STATES, 'tombstone': TOMBSTONE, 'unreadable': UNREADABLE}

GUESTS = {
    'nothing': None,
    'runs': Guest(INSTANCE, HERE, defined=True, running=True, disk=True),
    'runs without a disk': Guest(INSTANCE, HERE, defined=True, running=True, disk=False),
    'is off': Guest(INSTANCE, HERE, defined=True, running=False, disk=True),
    'is off without a disk': Guest(INSTANCE, HERE, defined=True, running=False, disk=False),
    'only a disk': Guest(INSTANCE, None, defined=False, running=False, disk=True),
    'runs without a definition': Guest(INSTANCE, HERE, defined=False, running=True, disk=True),
    'runs no more, it is paused': Guest(INSTANCE, HERE, defined=True, running=True, disk=True, trouble=NO_SPACE),
    'is off, killed': Guest(INSTANCE, HERE, defined=True, running=False, disk=True, trouble=CRASHED),
}
NOTHING = Sightings(guests={}, addresses={}, patience={}, vanished=(), before_reboot=(), ready=(), now='')
STATES = (None, SCHEDULED, BUILDING, ACTIVE, STOPPED, DESTROYING, GONE, ERROR)

# {state: task for a request, with any guest}. ACTIVE and STOPPED depend on the guest, see get_expected_kind().
OF_A_REQUEST = {
    None: Kind.BUILD,
    SCHEDULED: Kind.BUILD,
    BUILDING: Kind.BUILD,
    DESTROYING: Kind.BUILD,
    GONE: Kind.CLEAR,
    ERROR: Kind.CLEAR,
}


def record(state: str, compute: str = HERE, address: str | None = '10.0.0.1') -> Record:
    return Record(INSTANCE, compute, state, image='http://h/i', addresses=(Interface('default', MAC, address),))


def planned(
    wish: Wish, known: Record | None, guest: Guest | None, addresses: dict[str, Address] | None = None
) -> list[Task]:
    observations = replace(NOTHING, guests={INSTANCE: guest} if guest else {})
    observations = replace(observations, addresses={INSTANCE: addresses} if addresses else {})
    return plan({INSTANCE: wish}, {INSTANCE: known} if known else {}, observations)


def expected(wish: str, state: str | None, guest: str) -> Kind | None:
    if state == GONE:
        return Kind.CLEAR  # a uuid is never used twice, not even to be destroyed
    if wish == 'unreadable':
        return Kind.REFUSE
    if wish == 'tombstone':
        return Kind.DESTROY
    if state in (ACTIVE, STOPPED):
        # The records of both have no fault yet.
        fine = guest == {ACTIVE: 'runs', STOPPED: 'is off'}[state]
        return None if fine else Kind.POWER
    return OF_A_REQUEST[state]


@pytest.mark.parametrize(('wish', 'state', 'guest'), list(product(WISHES, STATES, GUESTS)))
def test_the_table(wish: str, state: str | None, guest: str) -> None:
    tasks = planned(WISHES[wish], record(state) if state else None, GUESTS[guest])
    kind = expected(wish, state, guest)
    assert [task.kind for task in tasks] == ([kind] if kind else [])
    for task in tasks:
        assert task.instance == INSTANCE
        assert task.reason


@pytest.mark.parametrize('guest', GUESTS.values())
def test_a_guest_nobody_asks_for_is_kept(guest: Guest | None) -> None:
    assert plan({}, {}, replace(NOTHING, guests={INSTANCE: guest} if guest else {})) == []


@pytest.mark.parametrize(('wish', 'state', 'guest'), list(product(['asked', 'unreadable'], (None, *STATES), GUESTS)))
def test_only_a_tombstone_destroys(wish: str, state: str | None, guest: str) -> None:
    tasks = planned(WISHES[wish], record(state) if state else None, GUESTS[guest])
    assert Kind.DESTROY not in [task.kind for task in tasks]


def test_instances_are_planned_each_by_itself() -> None:
    neighbour = Request(NEIGHBOUR, ASKED_STATES.allocations, image='http://h/i', user_id='u', project_id='p')
    observations = replace(NOTHING, guests={INSTANCE: GUESTS['runs']})
    tasks = plan({INSTANCE: TOMBSTONE, NEIGHBOUR: neighbour}, {INSTANCE: record(ACTIVE)}, observations)
    assert [(task.instance, task.kind) for task in tasks] == [(INSTANCE, Kind.DESTROY), (NEIGHBOUR, Kind.BUILD)]


def test_power_says_what_is_wrong() -> None:
    reasons = {name: planned(ASKED_STATES, record(ACTIVE), guest) for name, guest in GUESTS.items()}
    assert {name: tasks[0].reason for name, tasks in reasons.items() if tasks} == {
        'nothing': 'its domain and its disk are gone',
        'is off': 'it is off',
        'runs without a disk': 'its disk is gone',
        'runs without a definition': UNDEFINED,
        'runs no more, it is paused': NO_SPACE,
        'is off, killed': CRASHED,
        'is off without a disk': 'its disk is gone',
        'only a disk': 'its domain is gone, its disk is there',
    }
    assert planned(ASKED_STATES, record(STOPPED), GUESTS['runs'])[0].reason == 'it runs'


def test_a_guest_that_is_merely_off_or_runs_has_no_fault() -> None:
    assert fault_of(record(ACTIVE), GUESTS['is off']) is None
    assert fault_of(record(ACTIVE), GUESTS['runs']) is None


# Faults that end once their cause is gone.
ENDING = (PAUSED, f'{UNPLUGGED} (vnet0): network default is off', f'{NO_SPACE}; {REFUSED_METADATA}: no lease')


@pytest.mark.parametrize('known', [None, GONE_BOTH, GONE_DISK, GONE_DOMAIN, UNDEFINED, NO_SPACE, *ENDING, 'another'])
def test_a_fault_says_what_is_seen_now(known: str | None) -> None:
    before = replace(record(STOPPED), fault=known)
    assert fault_of(before, None) == GONE_BOTH
    assert fault_of(before, GUESTS['only a disk']) == GONE_DOMAIN
    # A repaired fault is removed; one that cannot be observed in a guest (an adopted one's claim) stays.
    assert fault_of(before, GUESTS['runs']) == (known if known == 'another' else None)


SIZE = {'VCPU': 2, 'MEMORY_MB': 256, 'MEMORY_MB now': 256, 'DISK_GB': 4}


@pytest.mark.parametrize(
    ('changed', 'differs'),
    [
        ({}, None),
        ({'DISK_GB': 1}, None),  # as large as its image, by `resize: False`
        ({'DISK_GB': 0}, None),
        ({'DISK_GB': 5}, 'DISK_GB:5 for 4'),
        ({'VCPU': 1}, 'VCPU:1 for 2'),
        ({'VCPU': 3, 'MEMORY_MB': 512}, 'VCPU:3 for 2, MEMORY_MB:512 for 256'),
        ({'MEMORY_MB now': 128}, 'MEMORY_MB now:128 for 256'),
        ({'MEMORY_MB': 512, 'MEMORY_MB now': 512}, 'MEMORY_MB:512 for 256, MEMORY_MB now:512 for 256'),
    ],
)
@pytest.mark.parametrize('guest', ['runs', 'is off'])
def test_a_domain_that_differs_from_its_claim_is_a_fault(
    guest: str, changed: dict[str, int], differs: str | None
) -> None:
    resources = {'VCPU': 2, 'MEMORY_MB': 256, 'DISK_GB': 4, 'CUSTOM_GPU': 1}
    before = replace(record(ACTIVE), resources=resources, fault='its domain differs from its claim: VCPU:9 for 2')
    observed = GUESTS[guest]
    assert observed is not None
    expected = differs and f'{UNLIKE}: {differs}'
    assert fault_of(before, replace(observed, size={**SIZE, **changed})) == expected
    # An older record contains no resources to compare with.
    assert fault_of(replace(before, resources={}), replace(observed, size={**SIZE, **changed})) is None
    paused = replace(observed, size={**SIZE, **changed}, trouble=PAUSED)
    assert fault_of(before, paused) == '; '.join(filter(None, (PAUSED, expected)))


def test_that_a_guest_was_killed_is_remembered_while_it_is_off() -> None:
    killed = replace(record(STOPPED), fault=CRASHED)
    assert fault_of(killed, GUESTS['is off']) == CRASHED
    assert fault_of(killed, GUESTS['runs']) is None
    assert planned(ASKED_STATES, killed, GUESTS['is off']) == []


def test_what_vanished_ends_and_what_was_merely_missed_does_not() -> None:
    stopped = replace(record(STOPPED), fault=GONE_BOTH)
    wishes, records = {INSTANCE: ASKED_STATES}, {INSTANCE: stopped}
    assert plan(wishes, records, NOTHING) == []
    observations = replace(NOTHING, vanished=[INSTANCE])
    assert [task.kind for task in plan(wishes, records, observations)] == [Kind.VANISHED]
    for guest in filter(None, GUESTS.values()):
        tasks = plan(wishes, records, replace(observations, guests={INSTANCE: guest}))
        assert Kind.VANISHED not in [task.kind for task in tasks]


def test_what_ran_before_a_reboot_is_started_again_and_nothing_else() -> None:
    for state, guest in product((ACTIVE, STOPPED), GUESTS):
        guests = {INSTANCE: observed} if (observed := GUESTS[guest]) else {}
        for before in ([], [INSTANCE]):
            observations = replace(NOTHING, guests=guests, before_reboot=before)
            tasks = plan({INSTANCE: ASKED_STATES}, {INSTANCE: record(state)}, observations)
            resumed = Kind.RESUME in [task.kind for task in tasks]
            ran = bool(before) and state == ACTIVE
            assert resumed == (ran and guest in ('is off', 'is off, killed')), (state, guest)
    off = GUESTS['is off']
    assert off is not None
    observations = replace(NOTHING, guests={INSTANCE: off}, before_reboot=[INSTANCE])
    tasks = plan({INSTANCE: TOMBSTONE}, {INSTANCE: record(ACTIVE)}, observations)
    assert [task.kind for task in tasks] == [Kind.DESTROY]


ADDRESSES = [
    (None, {}, False),
    (None, {MAC: Address('10.0.0.1', 'lease')}, True),
    (None, {'52:54:00:00:00:00': Address('10.0.0.9', 'arp')}, False),
    ('10.0.0.1', {}, False),
    ('10.0.0.1', {MAC: Address('10.0.0.1', 'arp')}, False),
    ('10.0.0.1', {MAC: Address('10.0.0.2', 'lease')}, True),
]


@pytest.mark.parametrize(('known', 'found', 'new'), ADDRESSES)
def test_an_address_is_written_down_when_it_is_new(known: str | None, found: dict[str, Address], new: bool) -> None:
    active = record(ACTIVE, address=known)
    assert news(active, found) is new
    tasks = planned(ASKED_STATES, active, GUESTS['runs'], found)
    assert [task.kind for task in tasks] == ([Kind.ADDRESS] if new else [])
    # A guest that is off is first recorded as off.
    assert planned(ASKED_STATES, active, GUESTS['is off'], found)[0].kind is Kind.POWER


def test_cloud_init_is_through_once() -> None:
    active, wishes = record(ACTIVE), {INSTANCE: ASKED_STATES}
    runs = replace(NOTHING, guests={INSTANCE: GUESTS['runs']}, ready=[INSTANCE])
    tasks = plan(wishes, {INSTANCE: active}, runs)
    assert [task.kind for task in tasks] == [Kind.READY]
    ready_record = active.at(ACTIVE, '2026-01-01T00:00:00.000Z', 'ready')
    assert plan(wishes, {INSTANCE: ready_record}, runs) == []
    failed = replace(active, cloud_init=GuestFailure('init', 'it broke'))
    assert plan(wishes, {INSTANCE: failed}, runs) == []
    # A guest that is off is first recorded as off; its ready report changes nothing.
    off = plan(wishes, {INSTANCE: active}, replace(runs, guests={INSTANCE: GUESTS['is off']}))
    assert [task.kind for task in off] == [Kind.POWER]


def test_an_address_is_waited_for_only_while_the_guest_runs() -> None:
    assert pending(record(ACTIVE, address=None))
    assert not pending(record(ACTIVE))
    assert not any(pending(record(state, address=None)) for state in STATES if state and state != ACTIVE)
    assert not pending(Record(INSTANCE, HERE, ACTIVE))


def test_macs_are_those_the_guest_is_made_with() -> None:
    for count in (1, 2, MOST_INTERFACES):
        networks = tuple(Attachment('bridge', f'br{number}') for number in range(count))
        spec = GuestSpec(INSTANCE, HERE, 1, 256, 1, Base('', '', 0), 'qemu', networks)
        assert spec.macs == all_macs(INSTANCE)[:count]
    assert len({*all_macs(INSTANCE), *all_macs(NEIGHBOUR)}) == 2 * MOST_INTERFACES


# Stop, start and reboot: every step, for every state of the guest and of its record.


SHOWN = 'b8756be5-a30d-4311-920c-0ad996367a8e'
SUBJECT = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
THIS = '0a1b2c3d-0000-4000-8000-000000000001'
EARLIER = '0a1b2c3d-0000-4000-8000-000000000002'
RUNS = Guest(SUBJECT, SHOWN, defined=True, running=True, disk=True)
IS_OFF = replace(RUNS, running=False)
FROZEN = replace(RUNS, trouble=NO_SPACE)
SAID = (None, EARLIER, f'{EARLIER}:{ASKED}', f'{EARLIER}:{OFF}', THIS, f'{THIS}:{ASKED}', f'{THIS}:{OFF}')

# Tasks for a running guest by its record's power. A guest that is off gets the same task for each of them.
RUNNING: dict[str, dict[str | None, Kind]] = {
    STOP: dict.fromkeys(SAID, Kind.SHUTDOWN),
    START: {**dict.fromkeys(SAID, Kind.DONE), f'{EARLIER}:{ASKED}': Kind.SHUTDOWN, f'{THIS}:{ASKED}': Kind.SHUTDOWN},
    REBOOT: {**dict.fromkeys(SAID, Kind.SHUTDOWN), f'{THIS}:{OFF}': Kind.DONE},
}
IN_TURN = {None: Kind.SHUTDOWN, Patience.ASK_AGAIN: Kind.SHUTDOWN, Patience.NO_MORE: Kind.SWITCH_OFF}

def planned_power(
    power: Power | None,
    said: str | None,
    guest: Guest | None,
    patience: Patience | None = None,
    state: str = '',
    fault: str | None = None,
    before_reboot: bool = False,
    vanished: bool = False,
) -> list[Kind]:
    request = Request(
        SUBJECT,
        {SHOWN: {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}},
        image='http://h/i',
        user_id='u',
        project_id='p',
        power=power,
    )
    state = state or (ACTIVE if guest is not None and guest.running else STOPPED)
    record = Record(SUBJECT, SHOWN, state, image='http://h/i', power=said, fault=fault)
    observations = replace(
        NOTHING,
        guests={SUBJECT: guest} if guest else {},
        patience={SUBJECT: patience} if patience else {},
        before_reboot=[SUBJECT] if before_reboot else [],
        vanished=[SUBJECT] if vanished else [],
    )
    tasks = plan({SUBJECT: request}, {SUBJECT: record}, observations)
    assert all(task.reason for task in tasks)
    return [task.kind for task in tasks]


@pytest.mark.parametrize(('action', 'said', 'patience'), list(product(ACTIONS, SAID, (None, *Patience))))
def test_the_table_of_power(action: str, said: str | None, patience: Patience | None) -> None:
    power = Power(action, THIS)
    is_done = said == THIS
    planned = planned_power(power, said, IS_OFF, patience)
    assert planned == ([] if is_done else [Kind.DONE if action == STOP else Kind.START])
    expected: Kind | None = RUNNING[action][said]
    if expected is Kind.SHUTDOWN:
        expected = IN_TURN.get(patience)
    assert planned_power(power, said, RUNS, patience) == ([] if is_done or expected is None else [expected])


@pytest.mark.parametrize('said', SAID)
def test_what_was_not_asked_for_is_not_done(said: str | None) -> None:
    """A guest that powers itself off stays off; a finished action changes nothing."""
    for power in (None, *(Power(action, said) for action in ACTIONS if said)):
        assert planned_power(power, said, RUNS) == []
        assert planned_power(power, said, IS_OFF) == []
        assert planned_power(power, said, IS_OFF, state=ACTIVE) == [Kind.POWER]
        assert planned_power(power, said, RUNS, state=STOPPED) == [Kind.POWER]


@pytest.mark.parametrize('state', [SCHEDULED, BUILDING])
def test_what_is_not_built_is_built_first(state: str) -> None:
    for action, guest in product(ACTIONS, (RUNS, IS_OFF, None)):
        assert planned_power(Power(action, THIS), None, guest, state=state) == [Kind.BUILD]


def test_what_is_waited_for_hinders_nothing_else() -> None:
    recorded_power, stop = f'{THIS}:{ASKED}', Power(STOP, THIS)
    assert planned_power(stop, recorded_power, RUNS, Patience.WAIT) == []
    assert planned_power(stop, recorded_power, FROZEN, Patience.WAIT) == [Kind.POWER]  # its fault is recorded


def test_what_was_stopped_stays_so_after_a_reboot_of_its_host() -> None:
    assert planned_power(Power(STOP, THIS), THIS, IS_OFF, state=STOPPED, before_reboot=True) == []
    # The host's reboot turned it off before the stop did, so the stop is done.
    assert planned_power(Power(STOP, THIS), f'{THIS}:{ASKED}', IS_OFF, state=ACTIVE, before_reboot=True) == [Kind.DONE]
    for action in (START, REBOOT):
        assert planned_power(Power(action, THIS), EARLIER, IS_OFF, state=ACTIVE, before_reboot=True) == [Kind.START]
    assert planned_power(Power(STOP, EARLIER), EARLIER, IS_OFF, state=ACTIVE, before_reboot=True) == [Kind.RESUME]


@pytest.mark.parametrize('action', ACTIONS)
def test_of_whom_nothing_is_seen_nothing_is_done(action: str) -> None:
    """A missed guest gets its action when it is seen again; a vanished one ends."""
    power = Power(action, THIS)
    assert planned_power(power, None, None, fault=GONE_BOTH) == []
    assert planned_power(power, None, None, fault=GONE_BOTH, vanished=True) == [Kind.VANISHED]


def test_a_start_that_failed_is_a_fault_until_the_guest_runs() -> None:
    for fault in (f'{NOT_STARTED}: no room', f'{NOT_STARTED} after the host was rebooted: no room'):
        record = Record(SUBJECT, SHOWN, STOPPED, image='http://h/i', fault=fault)
        assert fault_of(record, IS_OFF) == fault
        assert fault_of(record, RUNS) is None
        assert fault_of(record, FROZEN) == NO_SPACE
        assert fault_of(record, replace(IS_OFF, trouble=CRASHED)) == CRASHED


def test_which_and_how_far() -> None:
    assert [phase(power) for power in (None, THIS, f'{THIS}:{ASKED}', f'{THIS}:{OFF}')] == ['', '', ASKED, OFF]
    assert [action_id(power) for power in (None, THIS, f'{THIS}:{OFF}')] == ['', THIS, THIS]


# Patience with a guest that shuts down


def test_a_guest_is_asked_again_and_then_no_more() -> None:
    shutdowns = Shutdowns(grace=60, again=10)
    assert shutdowns.patience(100) == {}
    assert shutdowns.next(after=0) == []
    shutdowns.note_asked(SUBJECT, 100)
    assert shutdowns.patience(109.9) == {SUBJECT: Patience.WAIT}
    assert sorted(shutdowns.next(after=100)) == [110, 160]
    assert shutdowns.patience(110) == {SUBJECT: Patience.ASK_AGAIN}
    shutdowns.note_asked(SUBJECT, 110)
    assert shutdowns.patience(115) == {SUBJECT: Patience.WAIT}
    assert sorted(shutdowns.next(after=110)) == [120, 160]
    # A time that was due at the last check is no reason to wake up again.
    assert shutdowns.next(after=120) == [160]
    assert shutdowns.patience(160) == {SUBJECT: Patience.NO_MORE}
    assert shutdowns.next(after=160) == []
    shutdowns.keep([SUBJECT])
    assert shutdowns.patience(160) == {SUBJECT: Patience.NO_MORE}
    shutdowns.keep([])
    assert shutdowns.patience(160) == {}
