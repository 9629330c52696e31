"""What is published to an etcd that was accepted, and what is not: from what we remember and what it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ecomp.agent.host.state import MemoryEntry
from ecomp.agent.instance.records import Drop, EtcdView, Publish, ended, running
from ecomp.model.order import Invalid, Power, Request
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, STOPPED, new_record

COMPUTE, OTHER = 'b8756be5-a30d-4311-920c-0ad996367a8e', '5ca1ab1e-0000-4000-8000-000000000000'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
REQUEST = Request(INSTANCE, {COMPUTE: {'VCPU': 1}}, image='http://h/i', user_id='u', project_id='p')
TOMBSTONE = replace(REQUEST, allocations={}, image=None)
SCHEDULED = new_record(COMPUTE, REQUEST, 'T1')
RECORD = SCHEDULED.at(ACTIVE, 'T2', 'image', 'disk', 'started')
NOW = 'T9'


def remembered(state: str = ACTIVE) -> MemoryEntry:
    record = SCHEDULED.at(BUILDING, 'T2') if state == BUILDING else RECORD.at(state, 'T3')
    return MemoryEntry(REQUEST, record)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED])
def test_what_is_here_is_published_and_claimed(state: str) -> None:
    record = remembered(state).record
    assert running(COMPUTE, remembered(state), True, EtcdView()) == Publish(REQUEST, record, REQUEST)


@pytest.mark.parametrize('older', [None, SCHEDULED, SCHEDULED.at(BUILDING, 'T2'), RECORD.at(STOPPED, 'T2')])
def test_an_older_record_is_brought_up_to_date(older: object) -> None:
    said = EtcdView(REQUEST, older)  # type: ignore[arg-type]
    assert running(COMPUTE, remembered(), True, said) == Publish(None, RECORD, REQUEST)


STOP, START = Power('stop', OTHER), Power('start', COMPUTE)


@pytest.mark.parametrize('power', [None, OTHER, f'{OTHER}:asked'])
def test_what_was_asked_of_its_power_is_published_as_far_as_it_was(power: str | None) -> None:
    known = MemoryEntry(replace(REQUEST, power=STOP), replace(RECORD, power=power))
    assert running(COMPUTE, known, True, EtcdView()) == Publish(known.request, known.record, known.request)
    said = EtcdView(known.request, RECORD)
    assert running(COMPUTE, known, True, said) == Publish(None, known.record, known.request)


def test_what_was_asked_of_its_power_before_is_not_done_again() -> None:
    known = MemoryEntry(replace(REQUEST, power=STOP), replace(RECORD, power=OTHER))
    for older in (None, START):
        of_2019 = replace(REQUEST, user_id='2019', power=older)
        step = running(COMPUTE, known, True, EtcdView(of_2019, RECORD))
        assert step == Publish(replace(of_2019, power=STOP), known.record, known.request)
    # What was never begun here is: nobody can have done it.
    unseen = MemoryEntry(REQUEST, RECORD)
    asked = EtcdView(replace(REQUEST, power=START), RECORD)
    assert running(COMPUTE, unseen, True, asked) == Publish(None, RECORD, REQUEST)


def test_what_vanished_is_not_built_anew_but_ends_by_its_record() -> None:
    assert running(COMPUTE, remembered(), False, EtcdView(REQUEST, SCHEDULED)) == Publish(None, RECORD, None)
    assert running(COMPUTE, remembered(), False, EtcdView()) == Drop()


def test_a_build_under_way_goes_on() -> None:
    record = remembered(BUILDING).record
    assert running(COMPUTE, remembered(BUILDING), False, EtcdView()) == Publish(REQUEST, record, None)
    assert running(COMPUTE, remembered(BUILDING), True, EtcdView(REQUEST)) == Publish(None, record, REQUEST)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED])
def test_what_etcd_says_of_a_later_moment_than_the_build_stands(state: str) -> None:
    later = replace(RECORD, state=state)
    assert running(COMPUTE, remembered(BUILDING), True, EtcdView(REQUEST, later)) == Publish(None, later, REQUEST)


@pytest.mark.parametrize('is_here', [True, False])
@pytest.mark.parametrize('said', [EtcdView(), EtcdView(REQUEST, RECORD), EtcdView(REQUEST, SCHEDULED)])
def test_a_destroy_under_way_goes_on(is_here: bool, said: EtcdView) -> None:
    record = remembered(DESTROYING).record
    # What it counts for until it has ended it says itself, as a destroy of eschedule's does.
    tombstone = replace(TOMBSTONE, left=REQUEST.resources)
    assert running(COMPUTE, remembered(DESTROYING), is_here, said) == Publish(tombstone, record, None)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED, BUILDING, DESTROYING])
@pytest.mark.parametrize('is_here', [True, False])
@pytest.mark.parametrize(
    'said',
    [
        EtcdView(TOMBSTONE, RECORD),
        EtcdView(TOMBSTONE),
        EtcdView(Invalid(INSTANCE, 'no'), RECORD),
        EtcdView(None, RECORD.at(GONE, 'T4')),
        EtcdView(REQUEST, RECORD.at(ERROR, 'T4')),
        EtcdView(REQUEST, replace(RECORD, compute=OTHER)),
    ],
)
def test_what_is_left_to_the_plan(state: str, is_here: bool, said: EtcdView) -> None:
    assert running(COMPUTE, remembered(state), is_here, said) is None


@pytest.mark.parametrize('older', [None, SCHEDULED, RECORD])
def test_what_ended_is_not_built_again(older: object) -> None:
    last = ended(COMPUTE, EtcdView(REQUEST, older), NOW)  # type: ignore[arg-type]
    assert last is not None
    assert last.state == GONE
    assert last.stages['gone'] == NOW
    assert last.fault == 'it had ended before etcd forgot that'


@pytest.mark.parametrize(
    'said',
    [
        EtcdView(),
        EtcdView(None, RECORD),
        EtcdView(TOMBSTONE, RECORD),
        EtcdView(Invalid(INSTANCE, 'no')),
        EtcdView(REQUEST, RECORD.at(GONE, 'T4')),
        EtcdView(REQUEST, replace(RECORD, compute=OTHER)),
    ],
)
def test_an_end_that_needs_no_word(said: EtcdView) -> None:
    assert ended(COMPUTE, said, NOW) is None
