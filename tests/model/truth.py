"""Compare the messages of commands with the state at the end of the schedule.

`ROWS` has a predicate for each message: for each result, and for each class of error with a pattern of its message. The
first matching row decides. A message without a row is a violation, so a new message needs a row with its promise.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ecomp import errors
from ecomp.errors import Conflict, EcompError, NotFound, StillGoing, UnknownOutcome, Unreachable, Unreadable, UsageError
from ecomp.model import keys, status
from ecomp.scheduler.changes.change import Acceptance
from tests.kit.removal import ClearResult
from tests.model.acting import Actor
from tests.model.cloud import Cloud
from tests.model.end import PLACEMENT_COMMANDS, FinalState, Sentence


def find_false_sentences(cloud: Cloud, before: frozenset[str]) -> list[str]:
    end = FinalState(cloud, before)
    return [
        violation
        for actor in end.commands
        if actor.done
        for sentence in _list_sentences(actor)
        for violation in _check_sentence(end, sentence)
    ]


def _list_sentences(actor: Actor) -> Iterator[Sentence]:
    outcome = actor.outcome
    if isinstance(outcome, list):
        yield from (Sentence(actor, line, line) for line in outcome)
    else:
        yield Sentence(actor, outcome, outcome.message if isinstance(outcome, Acceptance) else str(outcome))


def _check_sentence(end: FinalState, sentence: Sentence) -> Iterator[str]:
    row = find_row(sentence)
    quoted = (
        f'{sentence.actor.name} told its user "{end.replace_uuids(sentence.text) or type(sentence.outcome).__name__}"'
    )
    if row is None:
        yield f'{quoted}, a {type(sentence.outcome).__name__}: truth.py has no row for that'
    elif not row.holds(end, sentence):
        yield f'{quoted}, and that is not so: {" ".join((row.holds.__doc__ or "").split())}'


# Predicates. The docstring is printed as the condition that does not hold.


def promises_nothing(_end: FinalState, _told: Sentence) -> bool:
    """The message promises nothing, or says that the outcome is unknown."""
    return True


def is_delivered(end: FinalState, sentence: Sentence) -> bool:
    """Each instance is requested of the reported compute, or has ended."""
    assert isinstance(sentence.outcome, dict)
    return all(
        keys.request(delivery.compute, instance) in end.entries or end.has_ended(instance)
        for instance, delivery in sentence.outcome.items()
    )


def is_evacuated(end: FinalState, sentence: Sentence) -> bool:
    """Each new instance is requested of the reported compute, or has ended, and no old one is."""
    assert isinstance(sentence.outcome, tuple)
    return all(
        keys.request(each.compute, each.replaced_by) in end.entries or end.has_ended(each.replaced_by)
        for each in sentence.outcome
        if each.replaced_by
    ) and not any(each.replaced_by and end.is_requested(each.instance) for each in sentence.outcome)


def has_evacuated(end: FinalState, sentence: Sentence) -> bool:
    """At least as many of the new instances as the message says are requested or have ended."""
    (count,) = re.findall(r'([0-9]+) instances were evacuated before', sentence.text)
    instances = set(sentence.actor.subjects)
    if end.find_related_commands(sentence.actor, 'evacuate') and not end.has_lost_write(sentence.actor):
        instances = end.list_delivered_by(sentence.actor)
    return sum(end.is_requested(each) or end.has_ended(each) for each in instances) >= int(count)


def has_evacuated_nothing(end: FinalState, sentence: Sentence) -> bool:
    """The evacuation requested no new instance."""
    return not end.list_delivered_by(sentence.actor) and is_not_placed(end, sentence)


def has_released_all(end: FinalState, sentence: Sentence) -> bool:
    """The evacuation requested no new instance, and none is claimed, unless by another command."""
    return has_evacuated_nothing(end, sentence) and has_released(end, sentence)


def was_alive(end: FinalState, sentence: Sentence) -> bool:
    """The compute is alive, unless its lease expired later."""
    compute = sentence.actor.subjects[0]
    return keys.compute(compute) in end.entries or end.may_have_been_silenced(compute)


def is_unregistered(end: FinalState, sentence: Sentence) -> bool:
    """The compute is not in placement, unless it has come back."""
    compute = sentence.actor.subjects[0]
    return compute not in end.cloud.model.providers or compute in end.touched


def is_queued(end: FinalState, sentence: Sentence) -> bool:
    """The instance is queued, a compute has taken it, or it has ended."""
    return all(end.has_entry(instance) or end.has_ended(instance) for instance in sentence.actor.subjects)


def is_existing(end: FinalState, sentence: Sentence) -> bool:
    """The named instance exists or has ended, and this command placed nothing."""
    instance = sentence.text.partition(':')[0]
    return (end.has_entry(instance) or end.has_ended(instance)) and is_not_placed(end, sentence)


def is_not_placed(end: FinalState, sentence: Sentence) -> bool:
    """No instance of the command is requested or queued, unless another command placed it."""
    return all(
        not (end.is_requested(instance) or end.is_queued(instance))
        or end.may_be_placed_by_another(sentence.actor, instance)
        for instance in sentence.actor.subjects
    )


def has_left_nothing(end: FinalState, sentence: Sentence) -> bool:
    """No instance is requested, queued or claimed, unless by another command or after a loss."""
    return has_released(end, sentence) or (is_not_placed(end, sentence) and end.was_harmed(sentence.actor))


def has_released(end: FinalState, sentence: Sentence) -> bool:
    """No instance is requested, queued or claimed, unless by another command."""
    others = end.find_related_commands(sentence.actor, *PLACEMENT_COMMANDS)
    held = [each for each in sentence.actor.subjects if each in end.cloud.model.held and each not in end.before]
    return is_not_placed(end, sentence) and (not held or bool(others))


def is_destroyed(end: FinalState, sentence: Sentence) -> bool:
    """The instance is not queued, and no compute is requested to run it."""
    return all(
        not (end.is_requested(instance) or end.is_queued(instance))
        or (end.has_command('clear') and _is_requested_again(end, sentence))
        for instance in sentence.actor.subjects
    )


def is_given_back(end: FinalState, sentence: Sentence) -> bool:
    """The same, unless it is adopted again."""
    return is_destroyed(end, sentence) or not end.touched.isdisjoint(sentence.actor.subjects)


def _is_requested_again(end: FinalState, sentence: Sentence) -> bool:
    return bool(end.find_related_commands(sentence.actor, *PLACEMENT_COMMANDS))


def was_never_begun(end: FinalState, sentence: Sentence) -> bool:
    """The instance is not queued, not requested of a compute, and has no domain."""
    return is_destroyed(end, sentence) and not any(map(end.is_domain, sentence.actor.subjects))


def is_unknown(end: FinalState, sentence: Sentence) -> bool:
    """The instance is not requested or queued, unless it was created or published later."""
    is_published = any(machine.republishes for machine in end.cloud.machines)
    return is_published or is_destroyed(end, sentence) or _is_requested_again(end, sentence)


def is_not_destroyed(end: FinalState, sentence: Sentence) -> bool:
    """The instance is queued or requested, unless another destroy was given or it has ended."""
    return all(
        end.is_requested(instance)
        or end.is_queued(instance)
        or bool(end.find_related_commands(sentence.actor, 'destroy'))
        or end.has_ended(instance)
        for instance in sentence.actor.subjects
    )


def is_switched(end: FinalState, sentence: Sentence) -> bool:
    """The request has this power action, unless another command changed it later."""
    assert isinstance(sentence.outcome, Acceptance)
    requested = (end.read_request(sentence.subject) or {}).get('power') or {}
    accepted = sentence.outcome.power
    return (accepted is not None and requested.get('id') == accepted.id) or bool(
        end.find_related_commands(sentence.actor, 'power', 'destroy')
    )


def is_not_switched(end: FinalState, sentence: Sentence) -> bool:
    """The request lacks this power action, unless the instance's keys were changed manually."""
    (instance,) = sentence.actor.subjects
    return (
        instance in end.touched
        or ((end.read_request(instance) or {}).get('power') or {}).get('id') != sentence.actor.power
    )


def is_changed(end: FinalState, sentence: Sentence) -> bool:
    """The instance is protected, or has the name, unless it was renamed again or has ended."""
    request, others = end.read_request(sentence.subject) or {}, end.find_related_commands(sentence.actor, 'rename')
    if 'protected' in sentence.text:
        return end.is_requested(sentence.subject) and bool(request.get('protected'))
    return request.get('name') in sentence.text.split() or bool(others) or end.has_ended(sentence.subject)


def is_resized(end: FinalState, sentence: Sentence) -> bool:
    """The request has this size, or asks for it, unless another resize followed or it has ended."""
    request, others = end.read_request(sentence.subject) or {}, end.find_related_commands(sentence.actor, 'resize')
    sizes = [(request.get('resize') or held)['resources'] for held in request.get('allocations', {}).values()]
    return bool(others) or all(size['VCPU'] == int(sentence.actor.name[-1]) for size in sizes)


def is_rebuilt(end: FinalState, sentence: Sentence) -> bool:
    """The request has this rebuild or a later one, unless another command ended the instance."""
    assert isinstance(sentence.outcome, tuple)
    if not end.is_requested(sentence.subject):
        return end.has_command('destroy', 'evacuate', 'apply')
    return int((end.read_request(sentence.subject) or {}).get('rebuild', 0)) >= sentence.outcome[1]


def has_changed_nothing(end: FinalState, sentence: Sentence) -> bool:
    """The command wrote no request, unless an answer to it was lost."""
    return end.was_harmed(sentence.actor) or not end.list_delivered_by(sentence.actor)


def is_forgotten(end: FinalState, sentence: Sentence) -> bool:
    """The compute is in neither plane and nothing is claimed there, unless it has come back."""
    has_requests = any(key.startswith(keys.request_prefix(sentence.subject)) for key in end.entries)
    has_claims = any(sentence.subject in allocations for allocations in end.cloud.model.held.values())
    is_back = sentence.subject in end.touched or keys.compute(sentence.subject) in end.entries
    return is_back or not (has_requests or has_claims or sentence.subject in end.cloud.model.providers)


def is_not_forgotten(end: FinalState, sentence: Sentence) -> bool:
    """The compute is in placement, unless another command has forgotten it."""
    return sentence.subject in end.cloud.model.providers or bool(end.find_related_commands(sentence.actor, 'forget'))


def is_drained(end: FinalState, sentence: Sentence) -> bool:
    """The compute has no requests and no claims, and it is disabled."""
    has_requests = any(key.startswith(keys.request_prefix(sentence.subject)) for key in end.entries)
    has_claims = any(sentence.subject in allocations for allocations in end.cloud.model.held.values())
    return not has_requests and not has_claims and is_disabled(end, sentence)


def is_disabled(end: FinalState, sentence: Sentence) -> bool:
    """The compute is disabled, unless it was enabled later."""
    return end.has_trait(sentence.subject, status.DISABLED) or bool(end.find_related_commands(sentence.actor, 'enable'))


def is_enabled(end: FinalState, sentence: Sentence) -> bool:
    """No operator's trait keeps instances off the compute, unless it was disabled later."""
    return not end.has_trait(sentence.subject, status.DISABLED_BY_OPERATOR) or bool(
        end.find_related_commands(sentence.actor, 'disable', 'drain')
    )


def is_no_compute(end: FinalState, sentence: Sentence) -> bool:
    """The compute is not in placement, unless it has come back or was forgotten only later."""
    return (
        sentence.subject not in end.cloud.model.providers
        or sentence.subject in end.touched
        or end.has_command('forget')
    )


def has_limits(end: FinalState, sentence: Sentence) -> bool:
    """The project has a quota, unless another command removed it."""
    return keys.quota(sentence.subject) in end.entries or bool(end.find_related_commands(sentence.actor, 'quota'))


def has_no_limits(end: FinalState, sentence: Sentence) -> bool:
    """The project has no quota, unless another command set one."""
    return keys.quota(sentence.subject) not in end.entries or bool(end.find_related_commands(sentence.actor, 'quota'))


def is_cleared(end: FinalState, sentence: Sentence) -> bool:
    """A removed record does not exist, unless its uuid was used again."""
    assert isinstance(sentence.outcome, ClearResult)
    reused = {instance for actor in end.commands if actor.command in PLACEMENT_COMMANDS for instance in actor.subjects}
    return all(instance in reused or not end.has_entry(instance) for instance in sentence.outcome.removed)


def is_released(end: FinalState, sentence: Sentence) -> bool:
    """The subject holds no claim, unless another actor claimed for it."""
    subject = _parse_subject(sentence)
    return subject not in end.cloud.model.held or end.is_claimed_by_another(sentence.actor, subject)


def is_deleted(end: FinalState, sentence: Sentence) -> bool:
    """The key does not exist, unless another command may have written it later."""
    (key,) = re.findall(r': (\S+) is deleted$', sentence.text)
    return key not in end.entries or end.has_command(*PLACEMENT_COMMANDS, 'destroy')


def is_ending(end: FinalState, sentence: Sentence) -> bool:
    """No compute is requested to run the subject."""
    return not end.is_requested(_parse_subject(sentence))


def is_claimed_again(end: FinalState, sentence: Sentence) -> bool:
    """The instance holds a claim, unless it was destroyed later."""
    return _parse_subject(sentence) in end.cloud.model.held or end.has_command('destroy')


def _parse_subject(sentence: Sentence) -> str:
    return sentence.text.partition(': ')[0].partition(' ')[2]


class Row(NamedTuple):
    commands: tuple[str, ...]
    outcome: type
    pattern: str
    holds: Callable[[FinalState, Sentence], bool]


CREATE, QUEUE, APPLY, DESTROY, POWER, FORGET, DRAIN, DISABLE, ENABLE, QUOTA, CLEAR, FIX = (
    *(('create',), ('queue',), ('apply',), ('destroy',), ('power',), ('forget',), ('drain',)),
    *(('disable',), ('enable',), ('quota',), ('clear',), ('fix',)),
)
EVACUATE, CHANGE, RESIZE, REBUILD = ('evacuate',), ('rename', 'protect'), ('resize',), ('rebuild',)
PLACE = PLACEMENT_COMMANDS
CHANGES = (*POWER, *CHANGE, *RESIZE, *REBUILD)
ANY = (*PLACEMENT_COMMANDS, *DESTROY, *CHANGES, *FORGET, *DRAIN, *DISABLE, *ENABLE, *QUOTA, *CLEAR, *FIX)
LEASE_LOST = 'requested lease not found: the lease expired .*, and nothing was written'
UNDONE = '(nothing was changed|nothing was placed, and the claim in placement is released)$'
ROWS = [
    # The outcome is unknown, or the command was interrupted.
    Row(ANY, UnknownOutcome, '', promises_nothing),
    Row(ANY, KeyboardInterrupt, '', promises_nothing),
    # eschedule evacuate
    Row(EVACUATE, tuple, '', is_evacuated),
    Row(EVACUATE, EcompError, '[0-9]+ instances were evacuated before', has_evacuated),
    Row(EVACUATE, Unreachable, UNDONE, has_released_all),
    Row(EVACUATE, Unreachable, '(its claim stays|the computes release its claim)', has_evacuated_nothing),
    # It failed before its attempt began, or after the attempt had ended.
    Row(EVACUATE, Unreachable, '', promises_nothing),
    Row(EVACUATE, Conflict, 'another evacuation is running, .*; nothing was changed', has_evacuated_nothing),
    Row(EVACUATE, Conflict, 'its ecompute is alive, and its guests may run', was_alive),
    Row(EVACUATE, NotFound, 'No resource provider', is_unregistered),
    # "nothing was written" is said of one write, which may have come after others.
    Row(EVACUATE, EcompError, 'requested lease not found', promises_nothing),
    # eschedule QUERY, eschedule apply
    Row(CREATE + APPLY, dict, '', is_delivered),
    Row(CREATE + APPLY, Unreachable, 'its claim (stays|within)', is_not_placed),
    Row(CREATE + APPLY, Unreachable, UNDONE, has_released),
    Row(CREATE + APPLY, Unreachable, 'is not placed: the computes release its claim', is_not_placed),
    # eschedule apply
    Row(APPLY, Unreachable, '', is_not_placed),
    Row(APPLY, Conflict, 'is older than its instance', has_left_nothing),
    Row(APPLY, Conflict, 'another eschedule changed it; nothing was (changed|placed, and the claim)', has_left_nothing),
    Row(APPLY, Conflict, 'another eschedule changed it; .*(its claim stays|release its claim)', promises_nothing),
    Row(APPLY, Conflict, '(apply is running, .*|other instances: [0-9]+); nothing was changed', has_left_nothing),
    Row(APPLY, Conflict, 'which etcd does not know: .*; nothing was changed', has_left_nothing),
    Row(APPLY, Conflict, '^stack .*: [0-9]+ on a silent host, unchanged$', has_left_nothing),
    Row(APPLY, Conflict, '^stack .*: [0-9]+ different\n', has_left_nothing),
    Row(APPLY, Conflict, '[0-9]+ different\n', promises_nothing),
    Row(APPLY, Conflict, '[0-9]+ on a silent host, unchanged$', promises_nothing),
    Row(APPLY, StillGoing, 'still being destroyed; nothing was changed', has_left_nothing),
    Row(APPLY, StillGoing, r'timed out after .* \(the operation continues\)', has_left_nothing),
    Row(APPLY, StillGoing, '^interrupted: the change of stack .* may be carried out', promises_nothing),
    Row(PLACE, Conflict, 'not delivered: .*; nothing was placed, and the claim .* is released$', has_left_nothing),
    Row(PLACE, Conflict, 'not delivered: .*(its claim stays|the computes release its claim)', is_not_placed),
    Row(PLACE, Conflict, 'took over this uuid', has_left_nothing),
    Row(PLACE, Conflict, ': exists, (but was requested|and waits in a queue)', is_existing),
    Row(PLACE, Conflict, 'never used twice', is_existing),
    Row(PLACE, Conflict, 'is in error. Fix: destroy the instance', is_existing),
    Row(PLACE, Conflict, 'is still being placed. Fix: repeat the command when the older request', has_left_nothing),
    Row(PLACE, Conflict, 'this name belongs to instance', has_left_nothing),
    Row(PLACE, Conflict, 'which cannot change while the group has members', has_left_nothing),
    Row(PLACE, Conflict, 'other (processes keep changing|eschedules keep taking over)', has_left_nothing),
    Row(PLACE, Conflict, '(is the uuid of|members, and the limit is [0-9]+)', has_left_nothing),
    Row(PLACE, errors.ClaimedElsewhere, 'claimed on .* (by another|which is silent)', is_not_placed),
    Row(PLACE, errors.NoCapacity, '', has_left_nothing),
    Row(PLACE, UsageError, '', has_left_nothing),
    Row(PLACE, Unreadable, '', has_left_nothing),
    Row(PLACE, EcompError, LEASE_LOST, has_left_nothing),
    # eschedule --queue
    Row(QUEUE, bool, '', is_queued),
    Row(QUEUE, Conflict, 'not queued', is_not_placed),
    Row(QUEUE, Unreachable, '', is_not_placed),
    # eschedule destroy
    Row(DESTROY, str, 'nothing was started$', was_never_begun),
    Row(DESTROY, str, 'removed from its queue; .* holds a claim for it, and releases', is_destroyed),
    Row(DESTROY, str, 'removed from its queue; it is unknown whether a compute holds a claim ', is_destroyed),
    Row(DESTROY, str, '(destroy accepted|is already being destroyed|its record is removed|: gone$)', is_destroyed),
    Row(DESTROY, str, 'release accepted', is_given_back),
    Row(DESTROY, NotFound, '', is_unknown),
    Row(DESTROY, Unreachable, 'is not accepted$', is_not_destroyed),
    Row(DESTROY, Conflict, '(other processes keep changing it|is protected, and is kept)', is_not_destroyed),
    Row(DESTROY, Unreadable, '', is_not_destroyed),
    Row(DESTROY, EcompError, LEASE_LOST, is_not_destroyed),
    # eschedule stop, start, reboot
    Row(POWER, Acceptance, '( accepted; |requested before|is already (stopped|active)$)', is_switched),
    Row(POWER, NotFound, '', is_not_switched),
    Row(POWER, Conflict, '', is_not_switched),
    Row(POWER, Unreadable, '', is_not_switched),
    Row(POWER, Unreachable, 'is not accepted$', is_not_switched),
    # eschedule rename, protect, resize, rebuild
    Row(CHANGE, str, '', is_changed),
    Row(RESIZE, Acceptance, '', is_resized),
    Row(REBUILD, tuple, '', is_rebuilt),
    Row(CHANGE + RESIZE + REBUILD, EcompError, '', has_changed_nothing),
    # eschedule host forget
    Row(FORGET, type(None), '', is_forgotten),
    Row(FORGET, Conflict, 'was started while', promises_nothing),
    Row(FORGET, Conflict, '(is not forgotten|stays|other processes keep changing it)', is_not_forgotten),
    Row(FORGET, NotFound, '', promises_nothing),
    Row(FORGET, Unreachable, '', promises_nothing),
    Row(FORGET, EcompError, LEASE_LOST, promises_nothing),
    # eschedule host drain --wait, disable, enable
    Row(DRAIN, type(None), '', is_drained),
    Row(DRAIN, StillGoing, 'the host stays disabled', is_disabled),
    Row(DRAIN + DISABLE + ENABLE, Unreachable, '', promises_nothing),
    Row(DRAIN + DISABLE + ENABLE, NotFound, '', is_no_compute),
    Row(DRAIN + DISABLE + ENABLE, Conflict, '', promises_nothing),
    Row(DISABLE, str, 'disabled', is_disabled),
    Row(ENABLE, str, 'enabled', is_enabled),
    # eschedule quota set
    Row(QUOTA, str, 'the project no longer has limits$', has_no_limits),
    Row(QUOTA, str, '^quota of project', has_limits),
    Row(QUOTA, Conflict, '', promises_nothing),
    Row(QUOTA, Unreachable, '', promises_nothing),
    # eschedule destroy --state gone,error
    Row(CLEAR, ClearResult, '', is_cleared),
    Row(CLEAR, Unreachable, '', promises_nothing),
    # eschedule check --fix, one line for each repair
    Row(FIX, str, ': (released on|is already released)', is_released),
    Row(FIX, str, ' findings?; the check is repeated in ', promises_nothing),
    Row(FIX, str, '(not repaired|it is unknown whether (the repair was made|it was repaired))', promises_nothing),
    Row(FIX, str, ' is deleted$', is_deleted),
    Row(FIX, str, ': claimed again on ', is_claimed_again),
    Row(FIX, str, ': destroy accepted; ', is_ending),
    Row(FIX, str, '(is restored|is in group|(is|are) removed|recounted|is on a lease)', promises_nothing),
    Row(FIX, Unreachable, '', promises_nothing),
]


def find_row(sentence: Sentence) -> Row | None:
    for row in ROWS:
        is_match = sentence.actor.command in row.commands and isinstance(sentence.outcome, row.outcome)
        if is_match and re.search(row.pattern, sentence.text):
            return row
    return None
