"""Plan what `eschedule apply` does to make a stack like its file. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from ecomp.errors import EcompError, UsageError
from ecomp.model.group import Membership
from ecomp.model.json_object import dump
from ecomp.model.order import MAX_SET_BYTES, USER_TEXTS, Order, Request, SetOrder
from ecomp.model.query import UnsupportedQueryError, read_amounts, replace_amounts, split_query
from ecomp.model.record import Record, describe_failure
from ecomp.model.stack import Stack
from ecomp.model.states import ACTIVE, DESTROYING, ERROR, GONE, QUEUED, STOPPED
from ecomp.model.stored import to_dict

# What a step does. The last six are not carried out: apply refuses (TAKEN), waits (ENDING) or only reports.
CREATE = 'create'
KEEP = 'keep'
REPLACE = 'replace'
RESIZE = 'resize'
DESTROY = 'destroy'
SURPLUS = 'surplus'
DIFFERS = 'differs'
FAILED = 'failed'
TAKEN = 'taken'
ENDING = 'destroying'
# It would be replaced or pruned, but may still run on a silent host.
STAYS = 'stays'
ACTIONS = (CREATE, KEEP, REPLACE, RESIZE, DESTROY, SURPLUS, DIFFERS, FAILED, TAKEN, ENDING, STAYS)
# What leaves the stack unlike its file.
DIFFERENCES = (DIFFERS, FAILED, STAYS)
CHANGES = (CREATE, REPLACE, DESTROY)
# Stands for all members in --replace-all.
ALL_MEMBERS = None


class Desired(NamedTuple):
    """An instance that a file asks for, without a uuid yet."""

    order: Order
    weigh: str
    origins: Mapping[str, str] = {}  # {field of the order: where its value is from, if not from the file}
    unnumbered_name: str = ''  # kept by an instance that was made before its member had a count
    has_own_name: bool = False  # whether the file gives the member a name


class Current(NamedTuple):
    """The last delivered instance of an entry, which is not gone, and its valid request."""

    record: Record
    request: Request | None  # None if missing or malformed

    @property
    def name(self) -> str | None:
        return (self.request and self.request.name) or self.record.name

    @property
    def is_ending(self) -> bool:
        return self.record.state in (DESTROYING, GONE) or (self.request is not None and self.request.is_tombstone)


class Action(NamedTuple):
    """What is to be done for one entry of the stack."""

    entry: str
    name: str | None
    action: str
    instance: str = ''  # the uuid that exists, '' for CREATE and TAKEN
    state: str | None = None
    reasons: Sequence[str] = ()  # what differs, why it failed, or who has the name
    can_resize: bool = False  # whether only amounts differ, which its guest can get

    @property
    def member(self) -> str:
        return self.entry.rpartition('/')[0]


def keep_names(desired: Mapping[str, Desired], current: Mapping[str, Current]) -> dict[str, Desired]:
    """Return `desired`, with its current name for each instance that the file does not name."""
    kept = dict(desired)
    for entry in desired.keys() & current.keys():
        target, name = desired[entry], current[entry].name
        if name and not current[entry].is_ending and (not target.has_own_name or name == target.unnumbered_name):
            kept[entry] = target._replace(order=replace(target.order, name=name))
    return kept


def plan_steps(
    desired: Mapping[str, Desired],
    current: Mapping[str, Current],
    owners: Mapping[str, str],
    replaced: Collection[str] | None = (),
    prune: bool = False,
    resize: bool = False,
) -> list[Action]:
    """Return a step for each desired entry, in their order, then one for each other entry.

    `owners` maps each name to the living instance that has it. An instance that differs or failed is replaced if its
    member or its entry is in `replaced`, or if that is None. With `prune`, surplus instances are destroyed. With
    `resize`, an instance is resized if only its amounts differ. Protected ones are neither replaced nor destroyed.
    """
    steps = [_plan_entry(entry, target, current.get(entry), owners, replaced) for entry, target in desired.items()]
    steps = [step._replace(action=RESIZE) if resize and step.can_resize else step for step in steps]
    for entry, surplus in current.items():
        if entry not in desired:
            action = ENDING if surplus.is_ending else DESTROY if prune else SURPLUS
            state = DESTROYING if surplus.is_ending else surplus.record.state
            steps.append(Action(entry, surplus.name, action, surplus.record.instance, state))
    return [_spare_protected(step, current[step.entry]) if step.entry in current else step for step in steps]


def _spare_protected(step: Action, current: Current) -> Action:
    request = current.request
    if step.action not in (REPLACE, DESTROY) or request is None or not request.is_protected:
        return step
    reason = f'it is protected. Fix: eschedule unprotect {request.name or request.instance}'
    return step._replace(action=DIFFERS if step.action == REPLACE else SURPLUS, reasons=[*step.reasons, reason])


def _plan_entry(
    entry: str, desired: Desired, current: Current | None, owners: Mapping[str, str], replaced: Collection[str] | None
) -> Action:
    """Plan an entry, replaced only if it or its member is in `replaced`, or if that is None."""
    name = desired.order.name
    owner = owners.get(name or '')
    if owner is not None and (current is None or current.record.instance != owner):
        return Action(entry, name, TAKEN, reasons=[f'its name belongs to instance {owner}, which is not of this entry'])
    if current is None:
        return Action(entry, name, CREATE)
    (record, request), shown_name = current, current.name or name
    if current.is_ending:
        return Action(entry, shown_name, ENDING, record.instance, DESTROYING)
    can_resize = False
    may_replace = replaced is ALL_MEMBERS or not {entry, entry.rpartition('/')[0]}.isdisjoint(replaced)
    if record.state == ERROR:
        action, reasons = FAILED, [describe_failure(record).partition(': ')[2]]
    else:
        action, reasons = DIFFERS, list_differences(record, request, desired)
        if record.state == QUEUED:
            reasons = ['it waits in a queue']
        elif current.name != name and not (reasons and may_replace):
            # Another name alone is no reason to lose a disk.
            renaming = f'name: {current.name or "none"} → {name}'
            reasons.insert(0, f'{renaming}. Try: eschedule rename {current.name or record.instance} {name}')
            may_replace = False
        elif not reasons and not (request and record.has_resize_failed(request.resize)):
            return Action(entry, shown_name, KEEP, record.instance, record.state)
        elif not reasons:
            reasons, can_resize, may_replace = [record.fault or 'its resize has failed'], True, False
        else:
            can_resize = _can_resize(record, request, desired)
    action = REPLACE if may_replace else action
    return Action(entry, shown_name, action, record.instance, record.state, reasons, can_resize)


def _can_resize(record: Record, request: Request | None, desired: Desired) -> bool:
    """Return whether only the amounts differ, and the guest can get those of the file."""
    if request is not None and record.state in (ACTIVE, STOPPED):
        with suppress(EcompError, UnsupportedQueryError):
            amounts = read_amounts(desired.order.query or '')
            request.plan_size(amounts)
            query = replace_amounts(request.query or '', amounts)
            return not list_differences(record, replace(request, query=query), desired)
    return False


def list_differences(record: Record, request: Request | None, desired: Desired) -> list[str]:
    """Return `field: old → new (origin)` for each field that differs, except the name."""
    order = desired.order
    differences = []
    for name, read, is_recorded in _COMPARED:
        current: Order = request if request is not None else record
        if request is None and not is_recorded:
            continue
        old, new = read(current), read(order)
        if name == 'group' and order.group is not None and current.group is not None:
            # A policy that the file does not give is that of the existing group.
            old, new = (_describe_group(_drop_unset_rule(current.group, order.group)), _describe_group(order.group))
        if old != new:
            changes = _list_changed_parts(old, new) if name == 'query' else [f'{name}: {old} → {new}']
            origin = f' ({desired.origins[name]})' if name in desired.origins else ''
            differences += [', '.join(changes) + origin] if changes else []
    return differences


def _list_changed_parts(old: str, new: str) -> list[str]:
    before, after = split_query(old), split_query(new)
    parts = [part for part in before | after if before.get(part) != after.get(part)]
    return [f'{part} {before.get(part, "none")} → {after.get(part, "none")}' for part in parts]


def _drop_unset_rule(current: Membership, target: Membership) -> Membership:
    # A record has no policy.
    policy = None if target.policy is None else current.policy or target.policy
    strict = target.strict if target.strict is None or current.strict is None else current.strict
    return Membership(current.name, policy, strict)


def _describe_group(group: Membership | None) -> str:
    if group is None:
        return 'none'
    rule = [group.policy, None if group.strict is None else 'strict' if group.strict else 'soft']
    return ' '.join([group.name, *filter(None, rule)])


def _describe_keys(order: Order) -> str:
    import hashlib  # imported here because only this needs it

    if order.ssh_keys is None:
        return 'none'
    digest = hashlib.sha256('\n'.join(order.ssh_keys).encode()).hexdigest()
    return f'{len(order.ssh_keys)} with the hash {digest[:12]}'


# The compared fields of an order: their names in the file, their values as text, and whether a record has them.
_COMPARED: Sequence[tuple[str, Callable[[Order], str], bool]] = (
    *((name, lambda order, name=name: getattr(order, name) or 'none', True) for name in USER_TEXTS if name != 'name'),
    ('query', lambda order: order.query or '', True),
    ('image', lambda order: order.image or 'none', True),
    ('project', lambda order: order.project_id, True),
    ('group', lambda order: _describe_group(order.group), True),
    ('ssh_keys', _describe_keys, False),
    ('user_data', lambda order: f'sha256 {order.user_data_hash[:12]}' if order.user_data_hash else 'none', False),
)


def find_exit_code(steps: Sequence[Action], dry_run: bool = False) -> int:
    """Return 5 for DIFFERENCES or TAKEN (not SURPLUS), 8 for changes of a dry run, else 0."""
    actions = {step.action for step in steps}
    if actions.intersection((*DIFFERENCES, TAKEN)):
        return 5
    return 8 if dry_run and actions.intersection((*CHANGES, RESIZE, ENDING)) else 0


@dataclass(frozen=True)
class StackOrder(SetOrder):
    """The order of one apply, whose instances are all placed, or none."""

    members: Mapping[str, Desired] = field(default_factory=dict, kw_only=True)

    @cached_property
    def orders(self) -> dict[str, Order]:
        return {instance: desired.order for instance, desired in self.members.items()}

    @property
    def shared_user_data(self) -> None:
        """None, because the user-data of a stack is stored before its delivery."""


def make_stack_order(stack: Stack, desired: Mapping[str, Desired], stages: Mapping[str, str]) -> StackOrder:
    """Make the order of new instances, or raise UsageError if it is too large for etcd."""
    members = {}
    for entry, target in desired.items():
        place = stack.make_place(entry)
        fields = target.order.copy_fields(instance=place.instance, stack=place, stages=stages)
        members[place.instance] = target._replace(order=Order(**fields))
    size = sum(len(dump(to_dict(target.order))) + 1000 for target in members.values())
    if size > MAX_SET_BYTES:
        problem = f'the {len(members)} new instances have {size} bytes, more than a transaction of etcd can have'
        raise UsageError(f'{problem}. Fix: give fewer ssh keys, or split the stack')
    common, count = next(iter(members.values())).order, len(members)
    owner: dict[str, Any] = {'user_id': common.user_id, 'project_id': common.project_id}
    return StackOrder(stack.attempt, **owner, stages=stages, count=count, minimum=count, members=members)
