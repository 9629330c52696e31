"""The planner's decision table: what is requested against what exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest

from ecomp.agent.instance.instances import Shutdowns
from ecomp.agent.instance.plan import (
    DISK_GONE,
    DOMAIN_AND_DISK_GONE,
    DOMAIN_GONE,
    UNDEFINED,
    Kind,
    Observations,
    ParsedRequest,
    Task,
    find_fault,
    has_new_address,
    is_address_pending,
    plan,
)
from ecomp.model import order
from ecomp.model.guest import (
    CRASHED,
    INTERFACE_DOWN,
    MAX_INTERFACES,
    NO_SPACE,
    PAUSED,
    REFUSED_METADATA,
    UNFILTERED,
    UNLIKE,
    UNPLUGGED,
    Address,
    Attachment,
    Guest,
    GuestSpec,
    GuestTrouble,
    list_macs,
    make_mac_address,
)
from ecomp.model.guest import BaseImage as Base
from ecomp.model.order import ACTIONS, REBOOT, SHUT_OFF, SHUTDOWN_REQUESTED, START_FAILED, STOP, PowerAction, Request
from ecomp.model.record import Interface, Record
from ecomp.model.states import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, SCHEDULED, STOPPED
from ecomp.model.user_data import GuestFailure

# The whole decision table: every state of the record, with every guest, for every parsed.


HERE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
NEIGHBOUR = 'e9bedb97-917a-4f4e-9a69-8ad21840267f'
MAC = make_mac_address(INSTANCE, 0)

REQUEST = Request(
    INSTANCE, {HERE: {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}}, image='http://h/i', user_id='u', project_id='p'
)
TOMBSTONE = Request(INSTANCE, {}, image=None, user_id='u', project_id='p')
MALFORMED = order.InvalidRequest(INSTANCE, 'not JSON')
WISHES: dict[str, ParsedRequest] = {'asked': REQUEST, 'tombstone': TOMBSTONE, 'unreadable': MALFORMED}

GUESTS = {
    'nothing': None,
    'runs': Guest(INSTANCE, HERE, defined=True, running=True, disk=True),
    'runs without a disk': Guest(INSTANCE, HERE, defined=True, running=True, disk=False),
    'is off': Guest(INSTANCE, HERE, defined=True, running=False, disk=True),
    'is off without a disk': Guest(INSTANCE, HERE, defined=True, running=False, disk=False),
    'only a disk': Guest(INSTANCE, None, defined=False, running=False, disk=True),
    'runs without a definition': Guest(INSTANCE, HERE, defined=False, running=True, disk=True),
    'runs no more, it is paused': Guest(
        INSTANCE, HERE, defined=True, running=True, disk=True, troubles=(GuestTrouble(NO_SPACE),)
    ),
    'is off, killed': Guest(INSTANCE, HERE, defined=True, running=False, disk=True, troubles=(GuestTrouble(CRASHED),)),
}
NO_OBSERVATIONS = Observations(
    guests={}, addresses={}, shutdown_actions={}, vanished=(), before_reboot=(), ready=(), now=''
)
STATES = (None, SCHEDULED, BUILDING, ACTIVE, STOPPED, DESTROYING, GONE, ERROR)

# {state: task for a request, with any guest}. ACTIVE and STOPPED depend on the guest, see get_expected_kind().
KIND_BY_STATE = {
    None: Kind.BUILD, SCHEDULED: Kind.BUILD, BUILDING: Kind.BUILD, DESTROYING: Kind.BUILD, GONE: Kind.CLEAR,
    ERROR: Kind.CLEAR,
}  # fmt: skip


def make_record(state: str, compute: str = HERE, address: str | None = '10.0.0.1') -> Record:
    return Record(INSTANCE, compute, state, image='http://h/i', addresses=(Interface('default', MAC, address),))


def plan_instance(
    parsed: ParsedRequest, record: Record | None, guest: Guest | None, addresses: dict[str, Address] | None = None
) -> list[Task]:
    observations = replace(NO_OBSERVATIONS, guests={INSTANCE: guest} if guest else {})
    observations = replace(observations, addresses={INSTANCE: addresses} if addresses else {})
    return plan({INSTANCE: parsed}, {INSTANCE: record} if record else {}, observations)


def get_expected_kind(parsed: str, state: str | None, guest: str) -> Kind | None:
    if state == GONE:
        return Kind.CLEAR  # a uuid is never used twice, not even to be destroyed
    if parsed == 'unreadable':
        return Kind.REFUSE
    if parsed == 'tombstone':
        return Kind.DESTROY
    if state in (ACTIVE, STOPPED):
        # The records of both have no fault yet.
        fine = guest == {ACTIVE: 'runs', STOPPED: 'is off'}[state]
        return None if fine else Kind.POWER
    return KIND_BY_STATE[state]


def test_plan_table() -> None:
    for parsed, state, guest in product(WISHES, STATES, GUESTS):
        tasks = plan_instance(WISHES[parsed], make_record(state) if state else None, GUESTS[guest])
        kind = get_expected_kind(parsed, state, guest)
        assert [task.kind for task in tasks] == ([kind] if kind else []), (parsed, state, guest)
        assert all(task.instance == INSTANCE and task.reason for task in tasks), (parsed, state, guest)


# {(the number in the request, `rebuilt` of the record): whether it is due}
REBUILDS = {
    (0, None): False, (7, None): True, (7, '5'): True, (7, '5:begun'): True, (7, '7:begun'): True, (7, '7'): False,
    (7, '9'): False, (7, '9:begun'): False,
}  # fmt: skip


@pytest.mark.parametrize('state', [ACTIVE, STOPPED])
@pytest.mark.parametrize('guest', GUESTS.values())
@pytest.mark.parametrize(('number', 'rebuilt'), REBUILDS)
def test_rebuild_is_planned_before_anything_else_until_its_number_is_recorded(
    number: int, rebuilt: str | None, guest: Guest | None, state: str
) -> None:
    request = replace(REQUEST, rebuild=number, power=PowerAction(REBOOT, THIS_ACTION))
    record = replace(make_record(state), rebuilt=rebuilt)
    observations = replace(NO_OBSERVATIONS, guests={INSTANCE: guest} if guest else {}, vanished={INSTANCE})
    kinds = [task.kind for task in plan({INSTANCE: request}, {INSTANCE: record}, observations)]
    assert (kinds == [Kind.REBUILD]) is REBUILDS[number, rebuilt]
    adopted = replace(request, is_adopted=True, image=None)
    assert Kind.REBUILD not in {task.kind for task in plan({INSTANCE: adopted}, {INSTANCE: record}, observations)}
    tombstone = replace(TOMBSTONE, rebuild=number)
    assert [task.kind for task in plan({INSTANCE: tombstone}, {INSTANCE: record}, observations)] == [Kind.DESTROY]


def test_fault_of_a_rebuild_stays_until_the_guest_is_started() -> None:
    fault = f'{order.REBUILD_FAILED}: answers 404'
    off, runs = GUESTS['is off without a disk'], GUESTS['runs']
    for guest in (off, None, GUESTS['is off, killed']):
        assert find_fault(replace(make_record(STOPPED), fault=fault), guest) == fault
    assert find_fault(replace(make_record(ACTIVE), fault=fault), runs) == fault, 'it was not touched'
    assert find_fault(replace(make_record(STOPPED), fault=fault), runs) is None


@pytest.mark.parametrize('guest', GUESTS.values())
def test_guest_without_a_request_is_kept(guest: Guest | None) -> None:
    assert plan({}, {}, replace(NO_OBSERVATIONS, guests={INSTANCE: guest} if guest else {})) == []


def test_instances_are_planned_independently() -> None:
    neighbour = Request(NEIGHBOUR, REQUEST.allocations, image='http://h/i', user_id='u', project_id='p')
    observations = replace(NO_OBSERVATIONS, guests={INSTANCE: GUESTS['runs']})
    tasks = plan({INSTANCE: TOMBSTONE, NEIGHBOUR: neighbour}, {INSTANCE: make_record(ACTIVE)}, observations)
    assert [(task.instance, task.kind) for task in tasks] == [(INSTANCE, Kind.DESTROY), (NEIGHBOUR, Kind.BUILD)]


def test_power_task_names_the_fault() -> None:
    reasons = {name: plan_instance(REQUEST, make_record(ACTIVE), guest) for name, guest in GUESTS.items()}
    assert {name: tasks[0].reason for name, tasks in reasons.items() if tasks} == {
        'nothing': 'its domain and its disk are gone', 'is off': 'it is off', 'runs without a disk': 'its disk is gone',
        'runs without a definition': UNDEFINED, 'runs no more, it is paused': NO_SPACE, 'is off, killed': CRASHED,
        'is off without a disk': 'its disk is gone', 'only a disk': 'its domain is gone, its disk is there',
    }  # fmt: skip
    assert plan_instance(REQUEST, make_record(STOPPED), GUESTS['runs'])[0].reason == 'it runs'


# Faults that end once their cause is gone.
TRANSIENT_FAULTS = (
    PAUSED, f'{UNPLUGGED} (vnet0): network default is off', f'{INTERFACE_DOWN} (vnet0)',
    f'{UNFILTERED} (vnet0): RULE_DELETE failed', f'{NO_SPACE}; {REFUSED_METADATA}: no lease',
)  # fmt: skip


@pytest.mark.parametrize(
    'recorded_fault',
    [None, DOMAIN_AND_DISK_GONE, DISK_GONE, DOMAIN_GONE, UNDEFINED, NO_SPACE, *TRANSIENT_FAULTS, 'another'],
)
def test_fault_is_what_is_observed_now(recorded_fault: str | None) -> None:
    before = replace(make_record(STOPPED), fault=recorded_fault)
    assert find_fault(before, None) == DOMAIN_AND_DISK_GONE
    assert find_fault(before, GUESTS['only a disk']) == DOMAIN_GONE
    # A repaired fault is removed; one that cannot be observed in a guest (an adopted one's claim) stays.
    assert find_fault(before, GUESTS['runs']) == (recorded_fault if recorded_fault == 'another' else None)


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
def test_domain_that_differs_from_its_claim_is_a_fault(
    guest: str, changed: dict[str, int], differs: str | None
) -> None:
    resources = {'VCPU': 2, 'MEMORY_MB': 256, 'DISK_GB': 4, 'CUSTOM_GPU': 1}
    before = replace(make_record(ACTIVE), resources=resources, fault='its domain differs from its claim: VCPU:9 for 2')
    observed = GUESTS[guest]
    assert observed is not None
    expected = differs and f'{UNLIKE}: {differs}'
    assert find_fault(before, replace(observed, size={**SIZE, **changed})) == expected
    # An older record contains no resources to compare with.
    assert find_fault(replace(before, resources={}), replace(observed, size={**SIZE, **changed})) is None
    paused = replace(observed, size={**SIZE, **changed}, troubles=(GuestTrouble(PAUSED),))
    assert find_fault(before, paused) == '; '.join(filter(None, (PAUSED, expected)))


def test_crash_is_remembered_while_the_guest_is_off() -> None:
    killed = replace(make_record(STOPPED), fault=CRASHED)
    assert find_fault(killed, GUESTS['is off']) == CRASHED
    assert find_fault(killed, GUESTS['runs']) is None
    assert plan_instance(REQUEST, killed, GUESTS['is off']) == []


def test_vanished_instance_ends_and_missed_one_does_not() -> None:
    stopped = replace(make_record(STOPPED), fault=DOMAIN_AND_DISK_GONE)
    parsed_requests, records = {INSTANCE: REQUEST}, {INSTANCE: stopped}
    assert plan(parsed_requests, records, NO_OBSERVATIONS) == []
    observations = replace(NO_OBSERVATIONS, vanished=[INSTANCE])
    assert [task.kind for task in plan(parsed_requests, records, observations)] == [Kind.VANISHED]
    for guest in filter(None, GUESTS.values()):
        tasks = plan(parsed_requests, records, replace(observations, guests={INSTANCE: guest}))
        assert Kind.VANISHED not in [task.kind for task in tasks]


def test_reboot_resumes_only_guests_that_ran() -> None:
    for state, guest in product((ACTIVE, STOPPED), GUESTS):
        guests = {INSTANCE: observed} if (observed := GUESTS[guest]) else {}
        for before in ([], [INSTANCE]):
            observations = replace(NO_OBSERVATIONS, guests=guests, before_reboot=before)
            tasks = plan({INSTANCE: REQUEST}, {INSTANCE: make_record(state)}, observations)
            resumed = Kind.START_AFTER_REBOOT in [task.kind for task in tasks]
            ran = bool(before) and state == ACTIVE
            assert resumed == (ran and guest in ('is off', 'is off, killed')), (state, guest)
    off = GUESTS['is off']
    assert off is not None
    observations = replace(NO_OBSERVATIONS, guests={INSTANCE: off}, before_reboot=[INSTANCE])
    tasks = plan({INSTANCE: TOMBSTONE}, {INSTANCE: make_record(ACTIVE)}, observations)
    assert [task.kind for task in tasks] == [Kind.DESTROY]


ADDRESSES = [
    (None, {}, False),
    (None, {MAC: Address('10.0.0.1', 'lease')}, True),
    (None, {'52:54:00:00:00:00': Address('10.0.0.9', 'arp')}, False),
    ('10.0.0.1', {}, False),
    ('10.0.0.1', {MAC: Address('10.0.0.1', 'arp')}, False),
    ('10.0.0.1', {MAC: Address('10.0.0.2', 'lease')}, True),
]


@pytest.mark.parametrize(('recorded', 'observed', 'new'), ADDRESSES)
def test_only_a_new_address_is_recorded(recorded: str | None, observed: dict[str, Address], new: bool) -> None:
    active = make_record(ACTIVE, address=recorded)
    assert has_new_address(active, observed) is new
    tasks = plan_instance(REQUEST, active, GUESTS['runs'], observed)
    assert [task.kind for task in tasks] == ([Kind.ADDRESS] if new else [])
    # A guest that is off is first recorded as off.
    assert plan_instance(REQUEST, active, GUESTS['is off'], observed)[0].kind is Kind.POWER


def test_ready_report_is_recorded_once() -> None:
    active, parsed_requests = make_record(ACTIVE), {INSTANCE: REQUEST}
    runs = replace(NO_OBSERVATIONS, guests={INSTANCE: GUESTS['runs']}, ready=[INSTANCE])
    tasks = plan(parsed_requests, {INSTANCE: active}, runs)
    assert [task.kind for task in tasks] == [Kind.READY]
    ready_record = active.enter_state(ACTIVE, '2026-01-01T00:00:00.000Z', 'ready')
    assert plan(parsed_requests, {INSTANCE: ready_record}, runs) == []
    failed = replace(active, cloud_init=GuestFailure('init', 'it broke'))
    assert plan(parsed_requests, {INSTANCE: failed}, runs) == []
    # A guest that is off is first recorded as off; its ready report changes nothing.
    off = plan(parsed_requests, {INSTANCE: active}, replace(runs, guests={INSTANCE: GUESTS['is off']}))
    assert [task.kind for task in off] == [Kind.POWER]


def test_address_is_awaited_only_while_the_guest_runs() -> None:
    assert is_address_pending(make_record(ACTIVE, address=None))
    assert not is_address_pending(make_record(ACTIVE))
    assert not any(is_address_pending(make_record(each, address=None)) for each in STATES if each and each != ACTIVE)
    assert not is_address_pending(Record(INSTANCE, HERE, ACTIVE))


def test_macs_of_the_spec_are_those_of_the_instance() -> None:
    for count in (1, 2, MAX_INTERFACES):
        networks = tuple(Attachment('bridge', f'br{number}') for number in range(count))
        spec = GuestSpec(INSTANCE, HERE, 1, 256, 1, Base('', '', 0), 'qemu', networks)
        assert spec.macs == list_macs(INSTANCE)[:count]
    assert len({*list_macs(INSTANCE), *list_macs(NEIGHBOUR)}) == 2 * MAX_INTERFACES


# Stop, start and reboot: every step, for every state of the guest and of its record.


THIS_ACTION = '0a1b2c3d-0000-4000-8000-000000000001'
EARLIER_ACTION = '0a1b2c3d-0000-4000-8000-000000000002'
RUNS = Guest(INSTANCE, HERE, defined=True, running=True, disk=True)
IS_OFF = replace(RUNS, running=False)
FROZEN = replace(RUNS, troubles=(GuestTrouble(NO_SPACE),))
RECORDED_POWERS = (
    None, EARLIER_ACTION, f'{EARLIER_ACTION}:{SHUTDOWN_REQUESTED}', f'{EARLIER_ACTION}:{SHUT_OFF}', THIS_ACTION,
    f'{THIS_ACTION}:{SHUTDOWN_REQUESTED}', f'{THIS_ACTION}:{SHUT_OFF}',
)  # fmt: skip

# Tasks for a running guest by its record's power. A guest that is off gets the same task for each of them.
RUNNING_KINDS: dict[str, dict[str | None, Kind]] = {
    STOP: dict.fromkeys(RECORDED_POWERS, Kind.SHUTDOWN),
    order.START: {
        **dict.fromkeys(RECORDED_POWERS, Kind.DONE),
        f'{EARLIER_ACTION}:{SHUTDOWN_REQUESTED}': Kind.SHUTDOWN,
        f'{THIS_ACTION}:{SHUTDOWN_REQUESTED}': Kind.SHUTDOWN,
    },
    REBOOT: {**dict.fromkeys(RECORDED_POWERS, Kind.SHUTDOWN), f'{THIS_ACTION}:{SHUT_OFF}': Kind.DONE},
}
# Not asked yet; to be asked again, to be switched off, to be waited for.
SHUTDOWN_ACTIONS = ({}, {INSTANCE: Kind.SHUTDOWN}, {INSTANCE: Kind.SWITCH_OFF}, {INSTANCE: None})


def plan_power(  # noqa: PLR0913
    power: PowerAction | None,
    recorded_power: str | None,
    guest: Guest | None,
    actions: Mapping[str, Kind | None] | None = None,
    state: str = '',
    fault: str | None = None,
    before_reboot: bool = False,
    vanished: bool = False,
) -> list[Kind]:
    request = replace(REQUEST, power=power)
    state = state or (ACTIVE if guest is not None and guest.running else STOPPED)
    record = Record(INSTANCE, HERE, state, image='http://h/i', power=recorded_power, fault=fault)
    observations = replace(
        NO_OBSERVATIONS,
        guests={INSTANCE: guest} if guest else {},
        shutdown_actions=actions or {},
        before_reboot=[INSTANCE] if before_reboot else [],
        vanished=[INSTANCE] if vanished else [],
    )
    tasks = plan({INSTANCE: request}, {INSTANCE: record}, observations)
    assert all(task.reason for task in tasks)
    return [task.kind for task in tasks]


@pytest.mark.parametrize('action', ACTIONS)
def test_power_table(action: str) -> None:
    power = PowerAction(action, THIS_ACTION)
    for recorded_power, actions in product(RECORDED_POWERS, SHUTDOWN_ACTIONS):
        is_done = recorded_power == THIS_ACTION
        planned = plan_power(power, recorded_power, IS_OFF, actions)
        expected: Kind | None = Kind.DONE if action == STOP else Kind.START
        assert planned == ([] if is_done else [expected]), (recorded_power, actions)
        expected = RUNNING_KINDS[action][recorded_power]
        if expected is Kind.SHUTDOWN:
            expected = actions.get(INSTANCE, Kind.SHUTDOWN)
        planned = plan_power(power, recorded_power, RUNS, actions)
        assert planned == ([] if is_done or expected is None else [expected]), (recorded_power, actions)


@pytest.mark.parametrize('recorded_power', RECORDED_POWERS)
def test_finished_or_missing_action_changes_nothing(recorded_power: str | None) -> None:
    """A guest that powers itself off stays off."""
    for power in (None, *(PowerAction(action, recorded_power) for action in ACTIONS if recorded_power)):
        assert plan_power(power, recorded_power, RUNS) == []
        assert plan_power(power, recorded_power, IS_OFF) == []
        assert plan_power(power, recorded_power, IS_OFF, state=ACTIVE) == [Kind.POWER]
        assert plan_power(power, recorded_power, RUNS, state=STOPPED) == [Kind.POWER]


@pytest.mark.parametrize('state', [SCHEDULED, BUILDING])
def test_unbuilt_instance_is_built_before_any_power_action(state: str) -> None:
    for action, guest in product(ACTIONS, (RUNS, IS_OFF, None)):
        assert plan_power(PowerAction(action, THIS_ACTION), None, guest, state=state) == [Kind.BUILD]


def test_pending_shutdown_does_not_block_a_fault() -> None:
    recorded_power, stop = f'{THIS_ACTION}:{SHUTDOWN_REQUESTED}', PowerAction(STOP, THIS_ACTION)
    assert plan_power(stop, recorded_power, RUNS, {INSTANCE: None}) == []
    assert plan_power(stop, recorded_power, FROZEN, {INSTANCE: None}) == [Kind.POWER]  # its fault is recorded


def test_stopped_guest_stays_off_after_a_host_reboot() -> None:
    assert plan_power(PowerAction(STOP, THIS_ACTION), THIS_ACTION, IS_OFF, state=STOPPED, before_reboot=True) == []
    # The host's reboot turned it off before the stop did, so the stop is done.
    assert plan_power(
        PowerAction(STOP, THIS_ACTION), f'{THIS_ACTION}:{SHUTDOWN_REQUESTED}', IS_OFF, state=ACTIVE, before_reboot=True
    ) == [Kind.DONE]
    for action in (order.START, REBOOT):
        assert plan_power(
            PowerAction(action, THIS_ACTION), EARLIER_ACTION, IS_OFF, state=ACTIVE, before_reboot=True
        ) == [Kind.START]
    assert plan_power(PowerAction(STOP, EARLIER_ACTION), EARLIER_ACTION, IS_OFF, state=ACTIVE, before_reboot=True) == [
        Kind.START_AFTER_REBOOT
    ]


@pytest.mark.parametrize('action', ACTIONS)
def test_unseen_guest_gets_no_power_task(action: str) -> None:
    """A missed guest gets its action when it is seen again, and a vanished one ends."""
    power = PowerAction(action, THIS_ACTION)
    assert plan_power(power, None, None, fault=DOMAIN_AND_DISK_GONE) == []
    assert plan_power(power, None, None, fault=DOMAIN_AND_DISK_GONE, vanished=True) == [Kind.VANISHED]


def test_failed_start_is_a_fault_until_the_guest_runs() -> None:
    for fault in (f'{START_FAILED}: no room', f'{START_FAILED} after the host was rebooted: no room'):
        record = Record(INSTANCE, HERE, STOPPED, image='http://h/i', fault=fault)
        assert find_fault(record, IS_OFF) == fault
        assert find_fault(record, RUNS) is None
        assert find_fault(record, FROZEN) == NO_SPACE
        assert find_fault(record, replace(IS_OFF, troubles=(GuestTrouble(CRASHED),))) == CRASHED


# Patience with a guest that shuts down


def test_shutdown_is_requested_again_until_the_grace_period_ends() -> None:
    shutdowns = Shutdowns(grace_seconds=60, retry_seconds=10)
    assert shutdowns.find_actions(100) == {}
    assert shutdowns.find_times(after=0) == []
    shutdowns.note_request(INSTANCE, 100)
    assert shutdowns.find_actions(109.9) == {INSTANCE: None}
    assert sorted(shutdowns.find_times(after=100)) == [110, 160]
    assert shutdowns.find_actions(110) == {INSTANCE: Kind.SHUTDOWN}
    shutdowns.note_request(INSTANCE, 110)
    assert shutdowns.find_actions(115) == {INSTANCE: None}
    assert sorted(shutdowns.find_times(after=110)) == [120, 160]
    # A time that was due at the last check is no reason to wake up again.
    assert shutdowns.find_times(after=120) == [160]
    assert shutdowns.find_actions(160) == {INSTANCE: Kind.SWITCH_OFF}
    assert shutdowns.find_times(after=160) == []
    shutdowns.forget_all_but([INSTANCE])
    assert shutdowns.find_actions(160) == {INSTANCE: Kind.SWITCH_OFF}
    shutdowns.forget_all_but([])
    assert shutdowns.find_actions(160) == {}
