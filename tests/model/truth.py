"""What a command told its user, compared with what is true at the end of the schedule.

`ROWS` has a predicate for each sentence: for each result, and for each class of error and pattern of its message. The
first row that matches decides. A sentence without a row is wrong, too: whoever adds one says here what it promises.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ecomp.errors import (
    ClaimedElsewhere,
    Conflict,
    EcompError,
    NoCapacity,
    NotFound,
    StillGoing,
    UnknownOutcome,
    Unreachable,
    Unreadable,
    UsageError,
)
from ecomp.model import keys, status
from ecomp.scheduler.changing.change import Acceptance, Cleared
from tests.model.acting import Actor
from tests.model.cloud import Cloud
from tests.model.end import PLACING, End, Told


def untrue(cloud: Cloud, before: frozenset[str]) -> list[str]:
    """Return what commands told their users and is not so. `before`: see prior()."""
    end = End(cloud, before)
    return [wrong for actor in end.commands if actor.done for told in _sentences(actor) for wrong in _judge(end, told)]


def _sentences(actor: Actor) -> Iterator[Told]:
    outcome = actor.outcome
    if isinstance(outcome, list):
        yield from (Told(actor, each, each) for each in outcome)
    else:
        yield Told(actor, outcome, outcome.said if isinstance(outcome, Acceptance) else str(outcome))


def _judge(end: End, told: Told) -> Iterator[str]:
    row = find_row(told)
    sentence = f'{told.actor.name} told its user "{end.called(told.text) or type(told.outcome).__name__}"'
    if row is None:
        yield f'{sentence}, a {type(told.outcome).__name__}: truth.py has no row for that'
    elif not row.holds(end, told):
        yield f'{sentence}, and that is not so: {" ".join((row.holds.__doc__ or "").split())}'


# Predicates. The docstring says what has to be true.


def promises_nothing(_end: End, _told: Told) -> bool:
    """It says that the outcome is not known, or nothing about the end."""
    return True


def is_delivered(end: End, told: Told) -> bool:
    """Each instance is requested of the compute that was named, or has ended."""
    assert isinstance(told.outcome, dict)
    return all(
        keys.request(each.compute, instance) in end.entries or end.has_ended(instance)
        for instance, each in told.outcome.items()
    )


def is_queued(end: End, told: Told) -> bool:
    """It waits, a compute took it, or it has ended."""
    return all(end.has_entry(each) or end.has_ended(each) for each in told.actor.about)


def exists(end: End, told: Told) -> bool:
    """The instance that it names exists, or has ended, and this command placed nothing."""
    instance = told.text.partition(':')[0]
    return (end.has_entry(instance) or end.has_ended(instance)) and is_not_placed(end, told)


def is_not_placed(end: End, told: Told) -> bool:
    """None of its instances is requested or waits, unless another command placed it."""
    return all(
        not (end.is_requested(each) or end.waits(each)) or end.may_be_another_s(told.actor, each)
        for each in told.actor.about
    )


def leaves_nothing(end: End, told: Told) -> bool:
    """None of its instances is requested, waits or holds a claim, unless another command is the reason."""
    return has_released(end, told) or (is_not_placed(end, told) and end.was_harmed(told.actor))


def has_released(end: End, told: Told) -> bool:
    """None of its instances is requested, waits or holds a claim, unless another command is about it, too."""
    others = end.others(told.actor, *PLACING)
    held = [each for each in told.actor.about if each in end.cloud.model.held and each not in end.before]
    return is_not_placed(end, told) and (not held or bool(others))


def is_destroyed(end: End, told: Told) -> bool:
    """It does not wait, and no compute is asked to have it."""
    return all(
        not (end.is_requested(each) or end.waits(each)) or (end.were_given('clear') and _is_asked_again(end, told))
        for each in told.actor.about
    )


def _is_asked_again(end: End, told: Told) -> bool:
    return bool(end.others(told.actor, *PLACING))


def was_never_begun(end: End, told: Told) -> bool:
    """It does not wait, no compute is asked to have it, and no host has a domain of it."""
    return is_destroyed(end, told) and not any(map(end.is_domain, told.actor.about))


def is_unknown(end: End, told: Told) -> bool:
    """It has ended, or nothing of it is there, unless it was created since, or its compute published it since."""
    is_published = any(each.republishes for each in end.cloud.machines)
    return is_published or is_destroyed(end, told) or _is_asked_again(end, told)


def is_not_destroyed(end: End, told: Told) -> bool:
    """It still waits or is requested, unless another destroy was given, or it ended by itself."""
    return all(
        end.is_requested(each) or end.waits(each) or bool(end.others(told.actor, 'destroy')) or end.has_ended(each)
        for each in told.actor.about
    )


def is_switched(end: End, told: Told) -> bool:
    """Its request says so, unless another command changed it since."""
    assert isinstance(told.outcome, Acceptance)
    asked = (end.request(told.subject) or {}).get('power') or {}
    wanted = told.outcome.power
    return (wanted is not None and asked.get('id') == wanted.id) or bool(end.others(told.actor, 'power', 'destroy'))


def is_not_switched(end: End, told: Told) -> bool:
    """Its request does not say so, unless its keys were changed manually while the answer to a write was lost."""
    (instance,) = told.actor.about
    return instance in end.touched or ((end.request(instance) or {}).get('power') or {}).get('id') != told.actor.power


def is_forgotten(end: End, told: Told) -> bool:
    """Neither plane knows the compute, and nothing is claimed there, unless it has come back."""
    asked = any(key.startswith(keys.request_prefix(told.subject)) for key in end.entries)
    held = any(told.subject in each for each in end.cloud.model.held.values())
    is_back = told.subject in end.touched or keys.compute(told.subject) in end.entries
    return is_back or not (asked or held or told.subject in end.cloud.model.providers)


def is_not_forgotten(end: End, told: Told) -> bool:
    """Placement knows the compute, unless it was forgotten by another command."""
    return told.subject in end.cloud.model.providers or bool(end.others(told.actor, 'forget'))


def is_drained(end: End, told: Told) -> bool:
    """Nothing is requested of the compute, nothing is claimed there, and it is disabled."""
    asked = any(key.startswith(keys.request_prefix(told.subject)) for key in end.entries)
    held = any(told.subject in each for each in end.cloud.model.held.values())
    return not asked and not held and is_disabled(end, told)


def is_disabled(end: End, told: Told) -> bool:
    """The compute is disabled, unless it was enabled since."""
    return end.has_trait(told.subject, status.DISABLED) or bool(end.others(told.actor, 'enable'))


def is_enabled(end: End, told: Told) -> bool:
    """No operator's trait keeps instances off the compute, unless it was disabled since."""
    return not end.has_trait(told.subject, status.BY_OPERATOR) or bool(end.others(told.actor, 'disable', 'drain'))


def is_no_compute(end: End, told: Told) -> bool:
    """Placement does not know the compute, unless it has come back."""
    return told.subject not in end.cloud.model.providers or told.subject in end.touched or end.were_given('forget')


def has_limits(end: End, told: Told) -> bool:
    """The project has a quota, unless another command removed it."""
    return keys.quota(told.subject) in end.entries or bool(end.others(told.actor, 'quota'))


def has_no_limits(end: End, told: Told) -> bool:
    """The project has no quota, unless another command set one."""
    return keys.quota(told.subject) not in end.entries or bool(end.others(told.actor, 'quota'))


def is_cleared(end: End, told: Told) -> bool:
    """No record of what was removed is there, unless the uuid was used again."""
    assert isinstance(told.outcome, Cleared)
    again = {each for actor in end.commands if actor.command in PLACING for each in actor.about}
    return all(each in again or not end.has_entry(each) for each in told.outcome.removed)


def is_released(end: End, told: Told) -> bool:
    """It holds nothing where it was released, unless somebody else claimed for it."""
    subject = _subject(told)
    return subject not in end.cloud.model.held or end.is_claimed_by_another(told.actor, subject)


def is_deleted(end: End, told: Told) -> bool:
    """The key is not there, unless a command wrote it since."""
    (key,) = re.findall(r': (\S+) is deleted$', told.text)
    return key not in end.entries or end.were_given(*PLACING, 'destroy')


def is_claimed_again(end: End, told: Told) -> bool:
    """The instance holds a claim, unless it was destroyed since."""
    return _subject(told) in end.cloud.model.held or end.were_given('destroy')


def _subject(told: Told) -> str:
    return told.text.partition(': ')[0].partition(' ')[2]


class Row(NamedTuple):
    """The sentences of these commands with this outcome and pattern, and what has to be true then."""

    commands: tuple[str, ...]
    outcome: type
    pattern: str
    holds: Callable[[End, Told], bool]


CREATE, QUEUE, DESTROY, POWER, FORGET, DRAIN, DISABLE, ENABLE, QUOTA, CLEAR, FIX = (
    *(('create',), ('queue',), ('destroy',), ('power',), ('forget',), ('drain',)),
    *(('disable',), ('enable',), ('quota',), ('clear',), ('fix',)),
)
ANY = (*PLACING, *DESTROY, *POWER, *FORGET, *DRAIN, *DISABLE, *ENABLE, *QUOTA, *CLEAR, *FIX)
ROWS = [
    # The outcome is not known, or the command was interrupted.
    Row(ANY, UnknownOutcome, '', promises_nothing),
    Row(ANY, KeyboardInterrupt, '', promises_nothing),
    # eschedule QUERY
    Row(CREATE, dict, '', is_delivered),
    Row(CREATE, Unreachable, 'its claim (stays|within)', is_not_placed),
    Row(CREATE, Unreachable, '(nothing was changed|nothing was placed, and its claim is released)$', has_released),
    Row(CREATE, Unreachable, 'is not placed: the computes release its claim', is_not_placed),
    Row(PLACING, Conflict, 'not delivered: .*; nothing was placed, and its claim is released$', leaves_nothing),
    Row(PLACING, Conflict, 'not delivered: .*(its claim stays|the computes release its claim)', promises_nothing),
    Row(PLACING, Conflict, 'took it over', leaves_nothing),
    Row(PLACING, Conflict, ': exists, ', exists),
    Row(PLACING, Conflict, 'never used twice', exists),
    Row(PLACING, Conflict, 'it failed; destroy it', exists),
    Row(PLACING, Conflict, 'is at it: try again when that has ended', leaves_nothing),
    Row(PLACING, Conflict, 'is the name of instance', leaves_nothing),
    Row(PLACING, Conflict, 'as its first member said', leaves_nothing),
    Row(PLACING, Conflict, '(changed by somebody else|at this uuid) all the time', leaves_nothing),
    Row(PLACING, Conflict, '(is the uuid of|members, and [0-9]+ at most)', leaves_nothing),
    Row(PLACING, ClaimedElsewhere, 'claimed on .* (by another|which is silent)', is_not_placed),
    Row(PLACING, NoCapacity, '', leaves_nothing),
    Row(PLACING, UsageError, '', leaves_nothing),
    Row(PLACING, Unreadable, '', leaves_nothing),
    Row(PLACING, EcompError, 'requested lease not found: this is not written', leaves_nothing),
    # eschedule --queue
    Row(QUEUE, bool, '', is_queued),
    Row(QUEUE, Conflict, 'not queued', is_not_placed),
    Row(QUEUE, Unreachable, '', is_not_placed),
    # eschedule destroy
    Row(DESTROY, str, 'nothing of it was begun$', was_never_begun),
    Row(DESTROY, str, 'taken out of its queue; .* holds a claim for it, and ', is_destroyed),
    Row(DESTROY, str, 'taken out of its queue; whether a compute holds a claim .* is not known', is_destroyed),
    Row(DESTROY, str, '(destroy accepted|is being destroyed|its record is removed|: gone$)', is_destroyed),
    Row(DESTROY, NotFound, '', is_unknown),
    Row(DESTROY, Unreachable, 'is not accepted$', is_not_destroyed),
    Row(DESTROY, Conflict, 'changed by somebody else all the time', is_not_destroyed),
    Row(DESTROY, Unreadable, '', is_not_destroyed),
    Row(DESTROY, EcompError, 'requested lease not found: this is not written', is_not_destroyed),
    # eschedule stop, start, reboot
    Row(POWER, Acceptance, '( accepted, |asked for before| already$)', is_switched),
    Row(POWER, NotFound, '', is_not_switched),
    Row(POWER, Conflict, '', is_not_switched),
    Row(POWER, Unreadable, '', is_not_switched),
    Row(POWER, Unreachable, 'is not accepted$', is_not_switched),
    # eschedule host forget
    Row(FORGET, type(None), '', is_forgotten),
    Row(FORGET, Conflict, 'came back while', promises_nothing),
    Row(FORGET, Conflict, '(is not forgotten|stays|changed by somebody else)', is_not_forgotten),
    Row(FORGET, NotFound, '', promises_nothing),
    Row(FORGET, Unreachable, '', promises_nothing),
    Row(FORGET, EcompError, 'requested lease not found: this is not written', promises_nothing),
    # eschedule host drain --wait, disable, enable
    Row(DRAIN, type(None), '', is_drained),
    Row(DRAIN, StillGoing, 'it stays disabled', is_disabled),
    Row(DRAIN + DISABLE + ENABLE, Unreachable, '', promises_nothing),
    Row(DRAIN + DISABLE + ENABLE, NotFound, '', is_no_compute),
    Row(DRAIN + DISABLE + ENABLE, Conflict, '', promises_nothing),
    Row(DISABLE, str, 'disabled', is_disabled),
    Row(ENABLE, str, 'enabled', is_enabled),
    # eschedule quota set
    Row(QUOTA, str, 'it has no limits any more$', has_no_limits),
    Row(QUOTA, str, '^quota of project', has_limits),
    Row(QUOTA, Conflict, '', promises_nothing),
    Row(QUOTA, Unreachable, '', promises_nothing),
    # eschedule clear
    Row(CLEAR, Cleared, '', is_cleared),
    Row(CLEAR, Unreachable, '', promises_nothing),
    # eschedule audit --fix, a line for each repair
    Row(FIX, str, ': (released on|is released already)', is_released),
    Row(FIX, str, ' found; looking again in ', promises_nothing),
    Row(FIX, str, '(left alone|not known to be mended)', promises_nothing),
    Row(FIX, str, ' is deleted$', is_deleted),
    Row(FIX, str, ': claimed again on ', is_claimed_again),
    Row(FIX, str, '(is its own again|is in group|taken out|counted anew|is on a lease)', promises_nothing),
    Row(FIX, Unreachable, '', promises_nothing),
]


def find_row(told: Told) -> Row | None:
    """Return the first row that matches; None for a sentence without one."""
    for row in ROWS:
        is_one = told.actor.command in row.commands and isinstance(told.outcome, row.outcome)
        if is_one and re.search(row.pattern, told.text):
            return row
    return None
