"""Stop, start and reboot: every step of each, from everything a guest and its record may say."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from ecomp.agent.instance.instances import Shutdowns
from ecomp.agent.instance.plan import GONE_BOTH, Kind, Patience, Sightings, fault_of, plan
from ecomp.model.guest import CRASHED, NO_SPACE, Guest
from ecomp.model.order import ACTIONS, ASKED, NOT_STARTED, OFF, REBOOT, START, STOP, Power, Request, action_id, phase
from ecomp.model.record import ACTIVE, BUILDING, SCHEDULED, STOPPED, Record

HERE, INSTANCE = 'b8756be5-a30d-4311-920c-0ad996367a8e', 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
THIS, EARLIER = '0a1b2c3d-0000-4000-8000-000000000001', '0a1b2c3d-0000-4000-8000-000000000002'
RUNS = Guest(INSTANCE, HERE, defined=True, running=True, disk=True)
IS_OFF = replace(RUNS, running=False)
PAUSED = replace(RUNS, trouble=NO_SPACE)
SAID = (None, EARLIER, f'{EARLIER}:{ASKED}', f'{EARLIER}:{OFF}', THIS, f'{THIS}:{ASKED}', f'{THIS}:{OFF}')

# What is done of a guest that runs, by how far the record says it is: of one that is off it is always the same.
RUNNING: dict[str, dict[str | None, Kind]] = {
    STOP: dict.fromkeys(SAID, Kind.SHUTDOWN),
    START: {**dict.fromkeys(SAID, Kind.DONE), f'{EARLIER}:{ASKED}': Kind.SHUTDOWN, f'{THIS}:{ASKED}': Kind.SHUTDOWN},
    REBOOT: {**dict.fromkeys(SAID, Kind.SHUTDOWN), f'{THIS}:{OFF}': Kind.DONE},
}
IN_TURN = {None: Kind.SHUTDOWN, Patience.ASK_AGAIN: Kind.SHUTDOWN, Patience.NO_MORE: Kind.SWITCH_OFF}

NOTHING = Sightings(guests={}, addresses={}, patience={}, vanished=(), before_reboot=(), ready=(), now='')


def planned(
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
        INSTANCE,
        {HERE: {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}},
        image='http://h/i',
        user_id='u',
        project_id='p',
        power=power,
    )
    state = state or (ACTIVE if guest is not None and guest.running else STOPPED)
    record = Record(INSTANCE, HERE, state, image='http://h/i', power=said, fault=fault)
    seen = replace(
        NOTHING,
        guests={INSTANCE: guest} if guest else {},
        patience={INSTANCE: patience} if patience else {},
        before_reboot=[INSTANCE] if before_reboot else [],
        vanished=[INSTANCE] if vanished else [],
    )
    tasks = plan({INSTANCE: request}, {INSTANCE: record}, seen)
    assert all(task.reason for task in tasks)
    return [task.kind for task in tasks]


@pytest.mark.parametrize(('action', 'said', 'patience'), list(product(ACTIONS, SAID, (None, *Patience))))
def test_the_table(action: str, said: str | None, patience: Patience | None) -> None:
    power = Power(action, THIS)
    done = said == THIS
    assert planned(power, said, IS_OFF, patience) == ([] if done else [Kind.DONE if action == STOP else Kind.START])
    expected: Kind | None = RUNNING[action][said]
    if expected is Kind.SHUTDOWN:
        expected = IN_TURN.get(patience)
    assert planned(power, said, RUNS, patience) == ([] if done or expected is None else [expected])


@pytest.mark.parametrize('said', SAID)
def test_what_was_not_asked_for_is_not_done(said: str | None) -> None:
    """A guest that powers itself off stays off; what the last action's record says of it changes nothing."""
    for power in (None, *(Power(action, said) for action in ACTIONS if said)):
        assert planned(power, said, RUNS) == []
        assert planned(power, said, IS_OFF) == []
        assert planned(power, said, IS_OFF, state=ACTIVE) == [Kind.POWER]
        assert planned(power, said, RUNS, state=STOPPED) == [Kind.POWER]


@pytest.mark.parametrize('state', [SCHEDULED, BUILDING])
def test_what_is_not_built_is_built_first(state: str) -> None:
    for action, guest in product(ACTIONS, (RUNS, IS_OFF, None)):
        assert planned(Power(action, THIS), None, guest, state=state) == [Kind.BUILD]


def test_what_is_waited_for_hinders_nothing_else() -> None:
    said, stop = f'{THIS}:{ASKED}', Power(STOP, THIS)
    assert planned(stop, said, RUNS, Patience.WAIT) == []
    assert planned(stop, said, PAUSED, Patience.WAIT) == [Kind.POWER]  # its fault is written down


def test_what_was_stopped_stays_so_after_a_reboot_of_its_host() -> None:
    assert planned(Power(STOP, THIS), THIS, IS_OFF, state=STOPPED, before_reboot=True) == []
    # Off by the reboot, and not yet by the stop: it is as was asked.
    assert planned(Power(STOP, THIS), f'{THIS}:{ASKED}', IS_OFF, state=ACTIVE, before_reboot=True) == [Kind.DONE]
    for action in (START, REBOOT):
        assert planned(Power(action, THIS), EARLIER, IS_OFF, state=ACTIVE, before_reboot=True) == [Kind.START]
    assert planned(Power(STOP, EARLIER), EARLIER, IS_OFF, state=ACTIVE, before_reboot=True) == [Kind.RESUME]


@pytest.mark.parametrize('action', ACTIONS)
def test_of_whom_nothing_is_seen_nothing_is_done(action: str) -> None:
    """It may have been missed: then it is done when it is seen again; else it ends."""
    power = Power(action, THIS)
    assert planned(power, None, None, fault=GONE_BOTH) == []
    assert planned(power, None, None, fault=GONE_BOTH, vanished=True) == [Kind.VANISHED]


def test_a_start_that_failed_is_a_fault_until_the_guest_runs() -> None:
    for fault in (f'{NOT_STARTED}: no room', f'{NOT_STARTED} after the host was rebooted: no room'):
        record = Record(INSTANCE, HERE, STOPPED, image='http://h/i', fault=fault)
        assert fault_of(record, IS_OFF) == fault
        assert fault_of(record, RUNS) is None
        assert fault_of(record, PAUSED) == NO_SPACE
        assert fault_of(record, replace(IS_OFF, trouble=CRASHED)) == CRASHED


def test_which_and_how_far() -> None:
    assert [phase(said) for said in (None, THIS, f'{THIS}:{ASKED}', f'{THIS}:{OFF}')] == ['', '', ASKED, OFF]
    assert [action_id(said) for said in (None, THIS, f'{THIS}:{OFF}')] == ['', THIS, THIS]


# How long a guest may take


def test_a_guest_is_asked_again_and_then_no_more() -> None:
    shutdowns = Shutdowns(grace=60, again=10)
    assert shutdowns.patience(100) == {}
    assert shutdowns.next(after=0) == []
    shutdowns.note_asked(INSTANCE, 100)
    assert shutdowns.patience(109.9) == {INSTANCE: Patience.WAIT}
    assert sorted(shutdowns.next(after=100)) == [110, 160]
    assert shutdowns.patience(110) == {INSTANCE: Patience.ASK_AGAIN}
    shutdowns.note_asked(INSTANCE, 110)
    assert shutdowns.patience(115) == {INSTANCE: Patience.WAIT}
    assert sorted(shutdowns.next(after=110)) == [120, 160]
    # What was due at the last look is no reason to wake up: whoever looked had its chance.
    assert shutdowns.next(after=120) == [160]
    assert shutdowns.patience(160) == {INSTANCE: Patience.NO_MORE}
    assert shutdowns.next(after=160) == []
    shutdowns.keep([INSTANCE])
    assert shutdowns.patience(160) == {INSTANCE: Patience.NO_MORE}
    shutdowns.keep([])
    assert shutdowns.patience(160) == {}
