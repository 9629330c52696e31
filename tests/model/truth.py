"""Compare the messages of commands with the state at the end of the schedule.

`ROWS` has a predicate for each message: for each result, and for each class of error with a pattern of its message. The
first matching row decides. A message without a row is a violation, so a new message needs a row with its promise.
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
    """Return the messages of commands that are false. For `before` see list_prior_instances()."""
    end = End(cloud, before)
    return [
        violation
        for actor in end.commands
        if actor.done
        for sentence in _sentences(actor)
        for violation in _judge(end, sentence)
    ]


def _sentences(actor: Actor) -> Iterator[Told]:
    outcome = actor.outcome
    if isinstance(outcome, list):
        yield from (Told(actor, line, line) for line in outcome)
    else:
        yield Told(actor, outcome, outcome.said if isinstance(outcome, Acceptance) else str(outcome))


def _judge(end: End, told: Told) -> Iterator[str]:
    row = find_row(told)
    quoted = f'{told.actor.name} told its user "{end.called(told.text) or type(told.outcome).__name__}"'
    if row is None:
        yield f'{quoted}, a {type(told.outcome).__name__}: truth.py has no row for that'
    elif not row.holds(end, told):
        yield f'{quoted}, and that is not so: {" ".join((row.holds.__doc__ or "").split())}'


# Predicates. The docstring is printed as the condition that does not hold.


def promises_nothing(_end: End, _told: Told) -> bool:
    """The message promises nothing, or says that the outcome is unknown."""
    return True


def is_delivered(end: End, told: Told) -> bool:
    """Each instance is requested of the reported compute, or has ended."""
    assert isinstance(told.outcome, dict)
    return all(
        keys.request(delivery.compute, instance) in end.entries or end.has_ended(instance)
        for instance, delivery in told.outcome.items()
    )


def is_queued(end: End, told: Told) -> bool:
    """The instance is queued, a compute has taken it, or it has ended."""
    return all(end.has_entry(instance) or end.has_ended(instance) for instance in told.actor.about)


def exists(end: End, told: Told) -> bool:
    """The named instance exists or has ended, and this command placed nothing."""
    instance = told.text.partition(':')[0]
    return (end.has_entry(instance) or end.has_ended(instance)) and is_not_placed(end, told)


def is_not_placed(end: End, told: Told) -> bool:
    """No instance of the command is requested or queued, unless another command placed it."""
    return all(
        not (end.is_requested(instance) or end.waits(instance)) or end.may_be_another_s(told.actor, instance)
        for instance in told.actor.about
    )


def leaves_nothing(end: End, told: Told) -> bool:
    """No instance is requested, queued or claimed, unless by another command or after a loss."""
    return has_released(end, told) or (is_not_placed(end, told) and end.was_harmed(told.actor))


def has_released(end: End, told: Told) -> bool:
    """No instance is requested, queued or claimed, unless by another command."""
    others = end.others(told.actor, *PLACING)
    held = [
        instance for instance in told.actor.about if instance in end.cloud.model.held and instance not in end.before
    ]
    return is_not_placed(end, told) and (not held or bool(others))


def is_destroyed(end: End, told: Told) -> bool:
    """The instance is not queued, and no compute is requested to run it."""
    return all(
        not (end.is_requested(instance) or end.waits(instance))
        or (end.were_given('clear') and _is_asked_again(end, told))
        for instance in told.actor.about
    )


def _is_asked_again(end: End, told: Told) -> bool:
    return bool(end.others(told.actor, *PLACING))


def was_never_begun(end: End, told: Told) -> bool:
    """The instance is not queued, not requested of a compute, and has no domain."""
    return is_destroyed(end, told) and not any(map(end.is_domain, told.actor.about))


def is_unknown(end: End, told: Told) -> bool:
    """The instance is not requested or queued, unless it was created or published later."""
    is_published = any(machine.republishes for machine in end.cloud.machines)
    return is_published or is_destroyed(end, told) or _is_asked_again(end, told)


def is_not_destroyed(end: End, told: Told) -> bool:
    """The instance is queued or requested, unless another destroy was given or it has ended."""
    return all(
        end.is_requested(instance)
        or end.waits(instance)
        or bool(end.others(told.actor, 'destroy'))
        or end.has_ended(instance)
        for instance in told.actor.about
    )


def is_switched(end: End, told: Told) -> bool:
    """The request has this power action, unless another command changed it later."""
    assert isinstance(told.outcome, Acceptance)
    requested = (end.request(told.subject) or {}).get('power') or {}
    accepted = told.outcome.power
    return (accepted is not None and requested.get('id') == accepted.id) or bool(
        end.others(told.actor, 'power', 'destroy')
    )


def is_not_switched(end: End, told: Told) -> bool:
    """The request lacks this power action, unless the instance's keys were changed manually."""
    (instance,) = told.actor.about
    return instance in end.touched or ((end.request(instance) or {}).get('power') or {}).get('id') != told.actor.power


def is_forgotten(end: End, told: Told) -> bool:
    """The compute is in neither plane and nothing is claimed there, unless it has come back."""
    has_requests = any(key.startswith(keys.request_prefix(told.subject)) for key in end.entries)
    has_claims = any(told.subject in allocations for allocations in end.cloud.model.held.values())
    is_back = told.subject in end.touched or keys.compute(told.subject) in end.entries
    return is_back or not (has_requests or has_claims or told.subject in end.cloud.model.providers)


def is_not_forgotten(end: End, told: Told) -> bool:
    """The compute is in placement, unless another command has forgotten it."""
    return told.subject in end.cloud.model.providers or bool(end.others(told.actor, 'forget'))


def is_drained(end: End, told: Told) -> bool:
    """The compute has no requests and no claims, and it is disabled."""
    has_requests = any(key.startswith(keys.request_prefix(told.subject)) for key in end.entries)
    has_claims = any(told.subject in allocations for allocations in end.cloud.model.held.values())
    return not has_requests and not has_claims and is_disabled(end, told)


def is_disabled(end: End, told: Told) -> bool:
    """The compute is disabled, unless it was enabled later."""
    return end.has_trait(told.subject, status.DISABLED) or bool(end.others(told.actor, 'enable'))


def is_enabled(end: End, told: Told) -> bool:
    """No operator's trait keeps instances off the compute, unless it was disabled later."""
    return not end.has_trait(told.subject, status.BY_OPERATOR) or bool(end.others(told.actor, 'disable', 'drain'))


def is_no_compute(end: End, told: Told) -> bool:
    """The compute is not in placement, unless it has come back or was forgotten only later."""
    return told.subject not in end.cloud.model.providers or told.subject in end.touched or end.were_given('forget')


def has_limits(end: End, told: Told) -> bool:
    """The project has a quota, unless another command removed it."""
    return keys.quota(told.subject) in end.entries or bool(end.others(told.actor, 'quota'))


def has_no_limits(end: End, told: Told) -> bool:
    """The project has no quota, unless another command set one."""
    return keys.quota(told.subject) not in end.entries or bool(end.others(told.actor, 'quota'))


def is_cleared(end: End, told: Told) -> bool:
    """A removed record does not exist, unless its uuid was used again."""
    assert isinstance(told.outcome, Cleared)
    reused = {instance for actor in end.commands if actor.command in PLACING for instance in actor.about}
    return all(instance in reused or not end.has_entry(instance) for instance in told.outcome.removed)


def is_released(end: End, told: Told) -> bool:
    """The subject holds no claim, unless another actor claimed for it."""
    subject = _subject(told)
    return subject not in end.cloud.model.held or end.is_claimed_by_another(told.actor, subject)


def is_deleted(end: End, told: Told) -> bool:
    """The key does not exist, unless another command may have written it later."""
    (key,) = re.findall(r': (\S+) is deleted$', told.text)
    return key not in end.entries or end.were_given(*PLACING, 'destroy')


def is_claimed_again(end: End, told: Told) -> bool:
    """The instance holds a claim, unless it was destroyed later."""
    return _subject(told) in end.cloud.model.held or end.were_given('destroy')


def _subject(told: Told) -> str:
    return told.text.partition(': ')[0].partition(' ')[2]


class Row(NamedTuple):
    """The messages of these commands with this outcome and pattern, and their condition."""

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
    # The outcome is unknown, or the command was interrupted.
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
    # eschedule audit --fix, one line for each repair
    Row(FIX, str, ': (released on|is released already)', is_released),
    Row(FIX, str, ' found; looking again in ', promises_nothing),
    Row(FIX, str, '(left alone|not known to be mended)', promises_nothing),
    Row(FIX, str, ' is deleted$', is_deleted),
    Row(FIX, str, ': claimed again on ', is_claimed_again),
    Row(FIX, str, '(is its own again|is in group|taken out|counted anew|is on a lease)', promises_nothing),
    Row(FIX, Unreachable, '', promises_nothing),
]


def find_row(told: Told) -> Row | None:
    """Return the first row that matches, or None."""
    for row in ROWS:
        is_match = told.actor.command in row.commands and isinstance(told.outcome, row.outcome)
        if is_match and re.search(row.pattern, told.text):
            return row
    return None
