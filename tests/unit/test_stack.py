"""Stacks: file, key, uuids, what an apply has to do, and how instances are distributed."""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.cli.command import Context, Invocation
from ecomp.cli.options import Options
from ecomp.cli.stack_file import MAX_FILE_BYTES, StackFile, load_stack_file
from ecomp.cli.terminal import Terminal
from ecomp.conf import load_schedule
from ecomp.errors import UsageError
from ecomp.model import apply, stack
from ecomp.model.allocation import Room
from ecomp.model.apply import ALL_MEMBERS, Action, Current, Desired, find_exit_code, keep_names, plan_steps
from ecomp.model.assign import Lot, Planner
from ecomp.model.choose import PACK, SPREAD, Candidate, Offer
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group, Membership
from ecomp.model.order import ORDER_FIELDS, USER_TEXTS, Order, Request, Resize, parse_request
from ecomp.model.record import Failure, Record
from ecomp.model.stack import Place, Stack, StackEntry, restore_stack
from ecomp.model.stored import decode, encode
from ecomp.model.user_data import MAX_USER_DATA_BYTES, SharedUserData
from ecomp.store.client import Entry as StoredEntry
from ecomp.store.client import Snapshot
from ecomp.yaml_file import shorten
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE, OTHER_UUID, RESOURCES

EPOCH = 'b8756be5-a30d-4311-920c-0ad996367a8e'
QUERY = 'resources=VCPU:1,MEMORY_MB:64,DISK_GB:1'

uuids = st.uuids().map(str)
names = st.from_regex(stack._STACK_NAME, fullmatch=True)
entries = st.builds(StackEntry, st.integers(1, stack.MAX_INCARNATION), uuids, st.booleans())
all_entries = st.dictionaries(st.from_regex(stack._ENTRY_NAME, fullmatch=True), entries, max_size=5)


@given(st.builds(Stack, names, uuids, all_entries, st.integers(0, stack.MAX_FLOOR), st.text()))
def test_stack_is_read_as_written(value: Stack) -> None:
    assert decode(Stack, encode(value).encode(), name=value.name) == value


def test_each_place_and_incarnation_has_its_own_uuid() -> None:
    shop = Stack('shop', EPOCH, {'web/1': StackEntry(3, COMPUTE), 'db/1': StackEntry(1, COMPUTE, True)})
    places = [shop.make_place(name) for name in ('web/1', 'web/2', 'db/1')]
    assert [place.incarnation for place in places] == [4, 1, 2]
    floored = shop._replace(floor=10)
    assert [floored.make_place(name).incarnation for name in ('web/1', 'web/2')] == [11, 11]
    assert floored.make_place('web/1', 3).instance == shop.list_instances()['web/1']
    others = [shop._replace(epoch=OTHER_UUID).make_place('web/1'), floored.make_place('web/1')]
    uuids = {place.instance for place in (*places, *others)} | {*shop.list_instances().values(), shop.attempt}
    assert len(uuids) == 8
    assert places[0].instance == str(uuid.uuid5(uuid.UUID(EPOCH), 'web/1/4'))
    request = Request(places[0].instance, image=IMAGE, allocations={COMPUTE: RESOURCES}, stack=places[0])
    assert parse_request(COMPUTE, f'/hosts/{COMPUTE}/{request.instance}', encode(request).encode()) == request
    # It is a hash of the entry's name, so two members cannot be mistaken for one.
    assert shop.make_place('a/11').instance != shop.make_place('a-1/1').instance
    delivered = shop.with_delivered({places[0]: OTHER_UUID, places[2]: COMPUTE})
    assert delivered.entries == {'web/1': StackEntry(4, OTHER_UUID), 'db/1': StackEntry(2, COMPUTE)}
    ended = delivered.with_ended(['web/1'])
    assert (ended.entries['web/1'], ended.make_place('web/1').incarnation) == (StackEntry(4, OTHER_UUID, True), 5)


def test_restored_stack_has_the_epoch_of_most_requests_and_the_newest_instances() -> None:
    def place(entry: str, incarnation: int = 1, epoch: str = EPOCH) -> Place:
        return Stack('shop', epoch).make_place(entry, incarnation)

    places = {place('web/1', 3): 'c3', place('web/1', 2): 'c2', place('web/2'): 'c1', place('db/1', 9, OTHER_UUID): 'x'}
    restored = restore_stack('shop', places, 70_000)
    assert restored == Stack('shop', EPOCH, {'web/1': StackEntry(3, 'c3'), 'web/2': StackEntry(1, 'c1')}, 70_000)
    assert restored.make_place('web/1').incarnation == 70_001
    assert restore_stack('shop', dict(reversed(places.items())), 70_000) == restored
    assert restore_stack('shop', {}, 70_000) is None


def make_order(**fields: Any) -> Order:
    defaults = {'image': IMAGE, 'project_id': 'p', 'query': QUERY, 'name': 'shop-web', 'ssh_keys': ('ssh-rsa A',)}
    return Order(INSTANCE, **(defaults | fields))


def make_existing(state: str, has_request: bool = True, is_tombstone: bool = False, **fields: Any) -> Current:
    """Return an instance of make_order() with other fields, or as if its request were malformed."""
    values = make_order(**fields).copy_fields()
    recorded = values | {'ssh_keys': None, 'user_data_sha256': None}
    if group := values['group']:
        recorded['group'] = Membership(group.name)
    error = Failure('image', 'no such file', 'removed') if state == 'error' else None
    record = Record(**recorded, compute=COMPUTE, state=state, error=error)
    if is_tombstone:
        values['image'] = None
    allocations = {} if is_tombstone else {COMPUTE: {'VCPU': 1}}
    return Current(record, Request(**values, allocations=allocations) if has_request else None)


def plan(desired: Desired | None, existing: Current | None, owner: str | None = None, *options: Any) -> list[Action]:
    owners = {'shop-web': owner} if owner else {}
    return plan_steps({'web/1': desired} if desired else {}, {'web/1': existing} if existing else {}, owners, *options)


SAME = Desired(make_order(), SPREAD)
OTHER = Desired(make_order(image='http://other/'), SPREAD)
# (existing, wanted by the file, as it is, with --replace web, with --prune)
PLANS = [
    (None, SAME, 'create', 'create', 'create'),
    *((make_existing(each), SAME, 'keep', 'keep', 'keep') for each in ('active', 'stopped', 'building', 'scheduled')),
    (make_existing('active', has_request=False), SAME, 'keep', 'keep', 'keep'),
    (make_existing('active'), OTHER, 'differs', 'replace', 'differs'),
    (make_existing('error'), SAME, 'failed', 'replace', 'failed'),
    (make_existing('error'), OTHER, 'failed', 'replace', 'failed'),
    (make_existing('queued'), SAME, 'differs', 'replace', 'differs'),
    *((make_existing(each), SAME, 'destroying', 'destroying', 'destroying') for each in ('destroying', 'gone')),
    (make_existing('active', is_tombstone=True), OTHER, 'destroying', 'destroying', 'destroying'),
    (make_existing('active'), None, 'surplus', 'surplus', 'destroy'),
    (make_existing('error'), None, 'surplus', 'surplus', 'destroy'),
    (make_existing('destroying'), None, 'destroying', 'destroying', 'destroying'),
]


@pytest.mark.parametrize(('existing', 'desired', 'usual', 'replaced', 'pruned'), PLANS)
def test_step_by_state_and_option(
    existing: Current | None, desired: Desired | None, usual: str, replaced: str, pruned: str
) -> None:
    owner = existing.record.instance if existing else None
    actions = [
        [step.action for step in plan(desired, existing, owner, *options)]
        for options in (((),), (['web'],), (ALL_MEMBERS,), (['other'],), ((), True))
    ]
    assert actions == [[usual], [replaced], [replaced], [usual], [pruned]]
    # Another instance's name is never taken, by no option.
    if desired:
        (taken,) = plan(desired, existing, OTHER_UUID, ALL_MEMBERS, True)
        assert (taken.action, taken.instance, OTHER_UUID in taken.reasons[0]) == ('taken', '', True)


GROUP = Membership('web', ANTI_AFFINITY, True)
ANTI, STRICT = {'group': GROUP}, 'web anti-affinity strict'
DATA = {'user_data_sha256': 'ab' * 32}
# (field, what exists, what the file asks for, both as text); the last five cannot be found without a valid request.
DIFFERENCES: list[tuple[str, dict[str, Any], dict[str, Any], str, str]] = [
    ('image', {}, {'image': 'http://x/'}, IMAGE, 'http://x/'),
    ('project', {}, {'project_id': 'q'}, 'p', 'q'),
    ('group', {}, {'group': Membership('web')}, 'none', 'web'),
    ('group', ANTI, {}, STRICT, 'none'),
    ('group', ANTI, {'group': Membership('db')}, 'web', 'db'),
    ('group', ANTI, {'group': GROUP._replace(strict=False)}, STRICT, 'web anti-affinity soft'),
    ('group', ANTI, {'group': Membership('web', AFFINITY)}, 'web anti-affinity', 'web affinity'),
    ('ssh_keys', {}, {'ssh_keys': None}, '1 with the hash 39b925a15ca6', 'none'),
    ('user_data', {}, DATA, 'none', 'sha256 abababababab'),
    ('user_data', DATA, {}, 'sha256 abababababab', 'none'),
]


@pytest.mark.parametrize(('field', 'old', 'new', 'old_text', 'new_text'), DIFFERENCES)
def test_difference_has_both_values_and_their_origin(
    field: str, old: dict[str, Any], new: dict[str, Any], old_text: str, new_text: str
) -> None:
    is_recorded = (field, old, new, old_text, new_text) in DIFFERENCES[:-5]
    for origins, suffix in (({}, ''), ({field: 'flavor small', 'other': 'x'}, ' (flavor small)')):
        desired = Desired(make_order(**new), SPREAD, origins)
        (step,) = plan(desired, make_existing('active', **old))
        reason = f'{field}: {old_text} → {new_text}{suffix}'
        assert (step.action, step.reasons) == ('differs', [reason])
        (step,) = plan(desired, make_existing('active', has_request=False, **old))
        assert step.action == ('differs' if is_recorded else 'keep'), step


@pytest.mark.parametrize(
    ('old', 'new', 'reason'),
    [
        ('resources=VCPU:1,MEMORY_MB:256', 'resources=VCPU:1,MEMORY_MB:320', 'MEMORY_MB 256 → 320'),
        ('resources=VCPU:1,MEMORY_MB:256', 'resources=MEMORY_MB:320,VCPU:2', 'VCPU 1 → 2, MEMORY_MB 256 → 320'),
        ('resources=VCPU:1,MEMORY_MB:256', 'resources=MEMORY_MB:256,VCPU:1', ''),
        ('resources=VCPU:1&required=A', 'required=A&resources=VCPU:1', ''),
        ('resources=VCPU:1&required=A', 'resources=VCPU:1&required=B&in_tree=x', 'required A → B, in_tree none → x'),
        ('resources=VCPU:1&required=A&required=B', 'resources=VCPU:1', 'required A&B → none'),
        ('resources=VCPU:1', 'resources=VCPU:1,VGPU:1', 'VGPU none → 1'),
        ('resources1=VCPU:1&resources2=VCPU:1', 'resources1=VCPU:1&resources2=VCPU:2', 'VCPU2 1 → 2'),
        (None, 'resources=VCPU:1', 'VCPU none → 1'),
    ],
)
def test_of_a_query_only_what_differs_is_named(old: str | None, new: str, reason: str) -> None:
    desired = Desired(make_order(query=new), SPREAD, {'query': 'flavor small'})
    (step,) = plan(desired, make_existing('active', query=old))
    expected = ('differs', [f'{reason} (flavor small)']) if reason else ('keep', ())
    assert (step.action, step.reasons) == expected


def test_all_reasons_are_listed_and_other_differences_ignored() -> None:
    (failed,), (queued,) = plan(SAME, make_existing('error')), plan(OTHER, make_existing('queued'))
    assert failed == Action('web/1', 'shop-web', 'failed', INSTANCE, 'error', failed.reasons)
    assert (failed.reasons, queued.reasons) == (
        ['failed at stage image: no such file (removed)'],
        ['it waits in a queue'],
    )
    (ending,) = plan(SAME, make_existing('active', is_tombstone=True))
    assert (ending.state, ending.member, ending.reasons) == ('destroying', 'web', ())
    new = Desired(make_order(name='n', query='q', image='i', project_id='q', group=GROUP, ssh_keys=None), PACK)
    (step,) = plan(new, make_existing('stopped'))
    names = [reason.partition(':')[0] for reason in step.reasons]
    assert names == ['name', step.reasons[1], 'image', 'project', 'group', 'ssh_keys']
    same = make_order(group=Membership('web'), user_id='another', stages={'requested': 'later'})
    existing = make_existing('active', group=GROUP)
    assert [step.action for step in plan(Desired(same, PACK), existing)] == ['keep']


@pytest.mark.parametrize(
    ('given', 'unnumbered', 'action', 'name'),
    [
        ('', '', 'keep', 'front'),
        ('', 'shop-web', 'keep', 'front'),  # a member that got a count
        ('shop-web', 'front', 'keep', 'front'),
        ('shop-web', '', 'differs', 'shop-web'),
        ('front', '', 'keep', 'front'),
    ],
)
def test_instance_that_was_renamed_keeps_its_entry(given: str, unnumbered: str, action: str, name: str) -> None:
    # Its compute has not copied the new name into the record.
    record, request = make_existing('active')
    assert request is not None
    renamed = Current(record, replace(request, name='front'))
    order = make_order(name=given or 'shop-web')
    existing = {'web/1': renamed}
    for changes, options, changed in (({}, ALL_MEMBERS, action), ({'image': 'http://x/'}, ALL_MEMBERS, 'replace')):
        desired = Desired(replace(order, **changes), SPREAD, {}, unnumbered, bool(given))
        kept = keep_names({'web/1': desired}, existing)
        # Another instance has the old name by now, which matters only if the file gives it.
        owners = {} if name == 'shop-web' else {'shop-web': OTHER_UUID, 'front': INSTANCE}
        (step,) = plan_steps(kept, existing, owners, options)
        assert (step.action, step.name, kept['web/1'].order.name) == (changed, 'front', name)
    (step,) = plan_steps(keep_names({'web/1': desired}, existing), existing, {})
    renaming = 'name: front → shop-web. Try: eschedule rename front shop-web'
    assert step.reasons == [*([renaming] if action == 'differs' else []), f'image: {IMAGE} → http://x/']
    (taken,) = plan_steps({'web/1': desired}, existing, {desired.order.name or '': OTHER_UUID})
    assert taken.action == 'taken'
    (surplus,) = plan_steps({}, existing, {})
    assert (surplus.action, surplus.name) == ('surplus', 'front')


def test_instance_without_a_name_gets_that_of_the_file_only_by_rename() -> None:
    (step,) = plan(SAME, make_existing('active', name=None), None, ALL_MEMBERS)
    reason = f'name: none → shop-web. Try: eschedule rename {INSTANCE} shop-web'
    assert (step.action, step.reasons) == ('differs', [reason])


@pytest.mark.parametrize(
    ('old', 'new', 'fields', 'state', 'action'),
    [
        ('VCPU:1,DISK_GB:2', 'VCPU:2,DISK_GB:2', {}, 'active', 'resize'),
        ('VCPU:1,DISK_GB:2', 'DISK_GB:3,VCPU:2', {}, 'stopped', 'resize'),
        ('VCPU:1,DISK_GB:2', 'VCPU:2,DISK_GB:2', {}, 'building', 'differs'),
        ('VCPU:1,DISK_GB:2', 'VCPU:1,DISK_GB:1', {}, 'active', 'differs'),  # a disk only grows
        ('VCPU:1,DISK_GB:2', 'VCPU:1,DISK_GB:2,VGPU:1', {}, 'active', 'differs'),
        ('VCPU:1,DISK_GB:2', 'VCPU:2,DISK_GB:2', {'image': 'http://other/'}, 'active', 'replace'),
        ('VCPU:1,DISK_GB:2&required=A', 'VCPU:2,DISK_GB:2&required=B', {}, 'active', 'replace'),
        ('VCPU:1,DISK_GB:2&required=A', 'VCPU:2,DISK_GB:2&required=A', {}, 'active', 'resize'),
    ],
)
def test_other_amounts_alone_can_be_given_to_the_guest(
    old: str, new: str, fields: dict[str, Any], state: str, action: str
) -> None:
    record, request = make_existing(state, query=f'resources={old}')
    assert request is not None
    existing = Current(record, replace(request, allocations={COMPUTE: {'VCPU': 1, 'DISK_GB': 2}}))
    desired = Desired(make_order(query=f'resources={new}', **fields), SPREAD)
    (offered,) = plan(desired, existing)
    assert (offered.action, offered.can_resize) == ('differs', action == 'resize')
    replaced = ALL_MEMBERS if action in ('resize', 'replace') else ()
    (step,) = plan(desired, existing, None, replaced, False, True)
    assert step.action == action


def test_resize_that_failed_is_a_difference_which_resize_repeats() -> None:
    record, request = make_existing('active')
    assert request is not None
    for resources, options, action, reasons in (
        ({}, (), 'differs', ['resize failed: why']),
        ({}, (ALL_MEMBERS, False, True), 'resize', ['resize failed: why']),
        ({'VCPU': 1}, (ALL_MEMBERS, False, True), 'keep', ()),  # it waits for a start
    ):
        record = replace(record, resize=Resize(3, resources), fault='resize failed: why')
        existing = Current(record, replace(request, resize=Resize(3, {'VCPU': 1})))
        (step,) = plan(SAME, existing, None, *options)
        assert (step.action, step.reasons) == (action, reasons)


def test_one_instance_of_a_member_is_replaced() -> None:
    desired = dict.fromkeys(('web/1', 'web/2', 'db/1'), OTHER)
    existing = dict.fromkeys(desired, make_existing('active'))
    for replaced, actions in (
        (['web/2'], ['differs', 'replace', 'differs']),
        (['web', 'db/2'], ['replace', 'replace', 'differs']),
    ):
        assert [step.action for step in plan_steps(desired, existing, {}, replaced)] == actions
    created = [step.action for step in plan_steps(desired, {'web/1': existing['web/1']}, {})]
    assert created == ['differs', 'create', 'create']


def test_exit_code_of_a_plan() -> None:
    expected = {'': (0, 0), 'keep surplus': (0, 0), 'failed keep': (5, 5), 'failed create': (5, 5), 'stays': (5, 5)}
    expected |= dict.fromkeys(('create keep', 'replace', 'destroy', 'destroying'), (0, 8))
    expected |= dict.fromkeys(('taken create', 'differs failed destroy'), (5, 5))
    expected['keep resize'] = (0, 8)
    for actions, codes in expected.items():
        steps = [Action('web/1', 'shop-web', action) for action in actions.split()]
        assert (find_exit_code(steps), find_exit_code(steps, dry_run=True)) == codes, actions


def test_order_of_a_stack_is_limited_by_the_size_of_a_transaction() -> None:
    shop = Stack('shop', EPOCH, {'web/1': StackEntry(4, COMPUTE)})

    def order(count: int, key_bytes: int) -> Any:
        each = Desired(make_order(ssh_keys=('ssh-rsa ' + 'A' * key_bytes,)), SPREAD)
        return apply.make_stack_order(
            shop, {f'web/{number}': each for number in range(1, count + 1)}, {'requested': 'now'}
        )

    made = order(300, 3000)
    assert (made.instance, made.count, made.minimum, made.shared_user_data) == (shop.attempt, 300, 300, None)
    assert made.orders.keys() == {shop.make_place(f'web/{number}').instance for number in range(1, 301)}
    first = made.orders[shop.make_place('web/1').instance]
    place = shop.make_place('web/1', 5)
    assert (first.stack, first.instance, first.stages) == (place, place.instance, {'requested': 'now'})
    with pytest.raises(UsageError, match=r'^the 300 new instances have \d{7} bytes, .* Fix: give fewer ssh keys'):
        order(300, 4000)


def assign(
    lots: list[Lot], rooms: dict[str, int], groups: tuple[Group, ...] = (), held: Mapping[str, str] | None = None
) -> tuple[dict[str, str], set[str]]:
    """Assign lots, whose query is a number of VCPU, and return places and unplaced instances."""
    room = {compute: {'VCPU': Room(free + 1, 1)} for compute, free in rooms.items()}
    offers = {lot.query: Offer([{each: {'VCPU': int(lot.query)}} for each in rooms], room) for lot in lots}
    claims = {instance: Candidate(compute, {}, None) for instance, compute in (held or {}).items()}
    planner = Planner(offers, {group.name: group for group in groups}, rooms, random.Random(1))
    assignment = planner.assign(lots, claims)
    chosen = assignment.candidates
    for compute, free in rooms.items():
        assert sum(each.allocations[compute]['VCPU'] for each in chosen.values() if each.compute == compute) <= free
    return {instance: candidate.compute for instance, candidate in chosen.items()}, set(assignment.reasons)


def test_larger_instances_are_placed_first_in_one_table_of_room() -> None:
    small, large = Lot('1', None, SPREAD, ('s1', 's2', 's3')), Lot('3', None, SPREAD, ('l1',))
    for lots in ([small, large], [large, small]):
        places, missing = assign(lots, {'a': 3, 'b': 3})
        assert not missing
        assert {places[each] for each in ('s1', 's2', 's3')} == {'a', 'b'} - {places['l1']}
        assert len(places) == 4
        assert assign(lots, {'a': 3, 'b': 2}) == ({'l1': 'a'}, {'s1', 's2', 's3'})
    places, missing = assign([small, large], {'a': 3, 'b': 2}, held={'s1': 'a', 'l1': 'b'})
    assert (set(places), missing) == ({'s2', 's3'}, set())


def test_groups_are_kept_over_the_lots_of_a_stack() -> None:
    anti, near = Group('anti', ANTI_AFFINITY), Group('near', AFFINITY)
    two = [Lot('1', anti.membership, SPREAD, ('a1', 'a2')), Lot('2', anti.membership, SPREAD, ('b1',))]
    places, missing = assign(two, {'a': 9, 'b': 9, 'c': 9}, (anti,))
    assert (set(places.values()), missing) == ({'a', 'b', 'c'}, set())
    assert assign(two, {'a': 9, 'b': 9}, (anti,))[1]
    places, missing = assign(two, {'a': 9, 'b': 9, 'c': 9}, (anti,), held={'a1': 'a'})
    assert (set(places.values()), set(places), missing) == ({'b', 'c'}, {'a2', 'b1'}, set())
    # All of a strict affinity group are on one compute, also those of another query, and those of no group fit in.
    lots = [Lot('1', None, SPREAD, ('x1', 'x2'))]
    lots += [Lot('1', near.membership, SPREAD, ('n1', 'n2')), Lot('2', near.membership, SPREAD, ('m1',))]
    places, missing = assign(lots, {'a': 2, 'b': 4}, (near,))
    assert (places, missing) == (dict.fromkeys(('n1', 'n2', 'm1'), 'b') | dict.fromkeys(('x1', 'x2'), 'a'), set())
    assert assign(lots[1:], {'a': 3, 'b': 3}, (near,)) == ({}, {'n1', 'n2', 'm1'})
    # A member that is held decides for the members of each query.
    places, missing = assign(lots[1:], {'a': 9, 'b': 4}, (near,), held={'m1': 'b'})
    assert (places, missing) == (dict.fromkeys(('n1', 'n2'), 'b'), set())
    # That compute has room for all of them.
    lots = [Lot('3', near.membership, PACK, ('m1',)), Lot('1', near.membership, PACK, ('n1', 'n2'))]
    for rooms in ({'a': 4, 'b': 5}, {'a': 5, 'b': 4}):
        places, missing = assign(lots, rooms, (near,))
        assert (missing, len(set(places.values())), len(places)) == (set(), 1, 3)


def test_soft_affinity_does_not_take_the_places_of_strict_anti_affinity() -> None:
    anti, soft = Group('anti', ANTI_AFFINITY), Group('soft', AFFINITY, strict=False)
    lots = [Lot('1', soft.membership, SPREAD, ('s1', 's2')), Lot('2', anti.membership, SPREAD, ('a1', 'a2'))]
    places, missing = assign(lots, {'a': 3, 'b': 3}, (anti, soft))
    assert (places['a1'] != places['a2'], len(places), missing) == (True, 4, set())


# The file of `eschedule apply`: what it may contain, and every mistake with its line.


HASH = 'ab' * 32
SCHEDULE = f"""
image: http://images/trixie.qcow2#sha256={HASH}
images: {{trixie: 'http://images/trixie.qcow2#sha256={HASH}', bookworm: http://images/bookworm.qcow2}}
project_id: shop
"""
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIJ4Gl6f0tBkXwz0v4kUJQ1u0q8fD0oYl1h2d3c4b5a6Z ann'
FILE_QUERY = 'resources=VCPU:2,MEMORY_MB:512,DISK_GB:4'


class FlavorStore:
    def __init__(self) -> None:
        self.reads: list[str] = []

    def get(self, key: str) -> StoredEntry | None:
        self.reads.append(key)
        amounts = {'/flavors/shared': b'"VCPU": 8, "MEMORY_MB": 512', '/flavors/small': b'"VCPU": 1, "MEMORY_MB": 256'}
        value = b'{"version": 1, "resources": {%s, "DISK_GB": 1}}' % amounts.get(key, b'')
        return StoredEntry(key, value, 1) if key in amounts else None

    def snapshot(self, *_: object, **__: object) -> Snapshot:
        return Snapshot(1, {'/flavors/shared': StoredEntry('/flavors/shared', b'', 1)})


@pytest.fixture
def store() -> FlavorStore:
    return FlavorStore()


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: FlavorStore) -> Iterator[Callable[..., StackFile]]:
    """A function that loads a text as shop.yaml, beside a key, user-data and schedule.yaml."""
    (tmp_path / 'schedule.yaml').write_text(SCHEDULE)
    files = tmp_path / 'files'
    files.mkdir()
    (files / 'id.pub').write_text(KEY + '\n')
    (files / 'web.yaml').write_text('#cloud-config\n{}\n')
    monkeypatch.setenv('HOME', str(files))

    def load(content: str | bytes, path: str = 'files/shop.yaml', more: str = '') -> StackFile:
        if more:
            (tmp_path / 'schedule.yaml').write_text(SCHEDULE + more)
        monkeypatch.chdir(tmp_path)
        data = content if isinstance(content, bytes) else content.encode()
        Path('files/shop.yaml').write_bytes(data)
        terminal = Terminal(print, print, print)
        ctx = Context(terminal, load_schedule(tmp_path / 'schedule.yaml'), Invocation('apply', (path,), Options()))
        vars(ctx)['store'] = store
        if path == '-':
            read_end, write_end = os.pipe()
            os.write(write_end, data)
            os.close(write_end)
            os.dup2(read_end, 0)
            os.close(read_end)
        return load_stack_file(ctx, path)

    standard_input = os.dup(0)
    yield load
    os.dup2(standard_input, 0)
    os.close(standard_input)


@pytest.fixture
def mistakes(load: Callable[..., StackFile]) -> Callable[..., list[str]]:
    def read(content: str | bytes, path: str = 'files/shop.yaml') -> list[str]:
        with pytest.raises(UsageError) as error:
            load(content, path)
        assert error.value.exit_code == 2
        return [line.replace('files/shop.yaml:', '') for line in str(error.value).split('\n')]

    return read


@pytest.mark.parametrize(
    ('content', 'reason'),
    [
        (b'stack: \xff\n', '1: is not UTF-8 text'),
        (' ' * (MAX_FILE_BYTES + 1), ' has 1048577 bytes; the limit is 1048576 (1024 KiB). Fix: divide the stack'),
        ('stack: a\ninstances:\n' + '  b:\n' * 10_000, '5000:5: has more than 10000 values'),
        (f'stack: a\ninstances: [{"b, " * 10_000}]\n', ': has more than 10000 values'),
        (f'b: &b {{{", ".join(f"k{n}: 1" for n in range(900))}}}\nc: {{<<: [{"*b, " * 12}]}}\n', 'more than 10000'),
        ('stack: a\n'.encode('utf-16'), '1: is not UTF-8 text'),
        (b'\xef\xbb\xbfstak: a\ninstances: {}\n', '1: stack: is missing'),
    ],
)
def test_large_or_binary_file_is_refused(mistakes: Callable[..., list[str]], content: str | bytes, reason: str) -> None:
    """Other mistakes are in tests/golden/texts/files.txt."""
    assert any(reason in line for line in mistakes(content)), mistakes(content)


GOOD = 'stack: a\ninstances:\n  web: {flavor: small}\n'


@pytest.mark.parametrize('content', [
    b'\xef\xbb\xbf' + GOOD.encode(), GOOD.replace('\n', '\r\n'),
    GOOD.rstrip(), f'%YAML 1.2\n---\n{GOOD}...\n',
    json.dumps({'stack': 'a', 'instances': {'web': {'flavor': 'small'}}}),
    json.dumps({'stack': 'a', 'instances': {'web': {'flavor': 'small'}}}, indent='\t'),
    '{"stack": "\\u0061", "instances": {"w\\u0065b": {"flavor": "small"}}}',
])  # fmt: skip
def test_same_stack_in_other_encodings(load: Callable[..., StackFile], content: str | bytes) -> None:
    assert load(content).instances == load(GOOD).instances


# What a file of a stack does not give: the places in a set, in a stack and of an evacuation, and the data of a hash.
NOT_IN_A_FILE = {'stages', 'count', 'stack', 'replaces', 'replaced_by', 'is_adopted', 'is_protected', 'user_data'}


def test_no_field_of_an_order_is_forgotten_by_a_file(load: Callable[..., StackFile]) -> None:
    member = {'flavor': 'small', 'image': 'bookworm', 'group': {'name': 'g', 'policy': 'affinity'}}
    member |= {'ssh_keys': ['id.pub'], 'user_data': 'web.yaml'} | dict.fromkeys(USER_TEXTS, 'x1')
    [desired] = load(json.dumps({'stack': 'a', 'project': 'p', 'instances': {'web': member}})).instances.values()
    given = {name for name in ORDER_FIELDS if getattr(desired.order, name) != getattr(Order(''), name)}
    assert ORDER_FIELDS.keys() - given == NOT_IN_A_FILE


def test_file_that_is_a_device_or_a_pipe(mistakes: Callable[..., list[str]], tmp_path: Path) -> None:
    assert [line.split(': ')[1] for line in mistakes('', '/dev/null')] == ['instances', 'stack']
    (line,) = mistakes('', '/dev/zero')
    assert line == '/dev/zero: has more than 1048576 bytes; the limit is 1048576 (1024 KiB). Fix: divide the stack'
    fifo = tmp_path / 'fifo'
    os.mkfifo(fifo)
    with ThreadPoolExecutor(1) as threads:
        writing = threads.submit(fifo.write_text, 'stack: a\n')  # as of a command in <(...)
        assert len(mistakes('', str(fifo))) == 1
        assert writing.result() == 9


def test_unreadable_file_is_named(mistakes: Callable[..., list[str]]) -> None:
    for path, reason in (('none/x.yaml', 'No such file or directory'), ('files', 'Is a directory'), ('a\0', 'null')):
        (line,) = mistakes('', path)
        assert (': cannot be read: ' in line, reason in line) == (True, True), line


def test_members_with_aliases_flavors_and_image_names(load: Callable[..., StackFile]) -> None:
    stack = load(f"""\
stack: shop
instances:
  db: &db {{flavor: small, image: bookworm, weigh: pack, group: {{name: g, policy: affinity, strict: false}}}}
  web: &web
    <<: *db
    count: 2
    query: resources=VCPU:2
    group: g
  api: {{<<: *web, count: 1, image: http://other/x.qcow2, name: front}}
  all: {{<<: [*web, *db], weigh: spread, count: }}
  own: {{query: '{FILE_QUERY}'}}
""")
    bookworm, small = 'http://images/bookworm.qcow2', 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'
    double = small.replace('VCPU:1', 'VCPU:2')
    orders = {entry: (desired.order, desired.weigh) for entry, desired in stack.instances.items()}
    assert {entry: (each.name, each.query, each.image, weigh) for entry, (each, weigh) in orders.items()} == {
        'db/1': ('shop-db', small, bookworm, 'pack'),
        'web/1': ('shop-web-1', double, bookworm, 'pack'),
        'web/2': ('shop-web-2', double, bookworm, 'pack'),
        'api/1': ('front-1', double, 'http://other/x.qcow2', 'pack'),
        'all/1': ('shop-all', double, bookworm, 'spread'),
        'own/1': ('shop-own', FILE_QUERY, f'http://images/trixie.qcow2#sha256={HASH}', 'spread'),
    }
    assert (stack.name, stack.members) == ('shop', ['db', 'web', 'api', 'all', 'own'])
    # A policy holds for all members that name the group, wherever it is given.
    groups = {entry: desired.order.group for entry, desired in stack.instances.items()}
    assert groups == dict.fromkeys(stack.instances, Membership('g', 'affinity', False)) | {'own/1': None}
    assert {desired.order.project_id for desired in stack.instances.values()} == {'shop'}
    assert stack.instances['db/1'].origins == {
        'project': 'the default of schedule.yaml',
        'image': 'image bookworm of schedule.yaml',
        'query': 'flavor small',
    }
    assert stack.instances['own/1'].origins['image'] == 'the default of schedule.yaml'
    assert load('stack: a\nproject: p\ninstances: {}\n').instances == {}
    assert len(load('stack: a\ninstances: {b: {flavor: small, count: 300}}\n').instances) == 300


def test_flavor_of_etcd_is_read_once(load: Callable[..., StackFile], store: FlavorStore) -> None:
    stack = load('stack: a\ninstances: {b: {flavor: shared, count: 3}, c: {flavor: shared, query: resources=VCPU:9}}\n')
    queries = {entry: desired.order.query or '' for entry, desired in stack.instances.items()}
    assert {entry: query.partition(',')[0] for entry, query in queries.items()} == {
        **dict.fromkeys(('b/1', 'b/2', 'b/3'), 'resources=VCPU:8'),
        'c/1': 'resources=VCPU:9',
    }
    assert store.reads == ['/flavors/shared']


def test_paths_are_relative_to_the_file_or_the_current_directory(
    load: Callable[..., StackFile], tmp_path: Path
) -> None:
    files, digest = tmp_path / 'files', hashlib.sha256(b'#cloud-config\n{}\n').hexdigest()
    member = '{flavor: small, ssh_keys: [%s], user_data: %s}'
    texts = {
        prefix: f'stack: a\ninstances: {{b: {member % (prefix + "id.pub", prefix + "web.yaml")}}}\n'
        for prefix in ('', '~/', f'{files}/', '../files/', 'files/')
    }

    def check(stack: StackFile) -> None:
        (desired,) = stack.instances.values()
        assert desired.order.ssh_keys == (KEY,)
        assert desired.order.user_data_sha256 == digest
        assert stack.user_data.keys() == {digest}
        assert 'ssh_keys' not in desired.origins

    for prefix in ('', '~/', f'{files}/', '../files/'):
        check(load(texts[prefix]))
    for prefix in ('files/', '~/', f'{files}/'):
        check(load(texts[prefix], '-'))
    # Defaults of schedule.yaml, and a list that overrides them.
    more = 'ssh_keys: [files/id.pub]\nuser_data: files/web.yaml\n'
    stack = load('stack: a\ninstances: {b: {flavor: small, ssh_keys: []}, c: {flavor: small}}\n', more=more)
    b, c = stack.instances.values()
    assert (b.order.ssh_keys, c.order.ssh_keys, b.order.user_data_sha256) == (None, (KEY,), digest)
    assert ('ssh_keys' in b.origins, 'ssh_keys' in c.origins, 'user_data' in b.origins) == (False, True, True)


@pytest.mark.parametrize('path', ['../schedule.yaml', '{outside}', '~/../schedule.yaml', 'link', '/etc/hostname'])
def test_user_data_outside_the_directory_of_the_file_is_refused(
    path: str, mistakes: Callable[..., list[str]], tmp_path: Path
) -> None:
    """The file may be somebody else's, and every guest of it can read its user-data."""
    (tmp_path / 'files/link').symlink_to(tmp_path / 'schedule.yaml')
    text = path.format(outside=tmp_path / 'schedule.yaml')
    (mistake,) = mistakes(f'stack: a\ninstances:\n  b: {{flavor: small, user_data: "{text}"}}\n')
    reason = 'is outside the directory of this file. Fix: copy it there'
    assert mistake == f'3: instances.b.user_data: {shorten(text)} {reason}'


def test_user_data_and_keys_may_stand_in_the_file(load: Callable[..., StackFile]) -> None:
    stack = load(f"""\
stack: a
instances:
  web:
    flavor: small
    user_data: |
      #!/bin/sh
      echo hello
    ssh_keys:
    - {KEY}
    - id.pub
""")
    (desired,) = stack.instances.values()
    script = b'#!/bin/sh\necho hello\n'
    assert desired.order.user_data_sha256 == hashlib.sha256(script).hexdigest()
    assert list(stack.user_data.values()) == [SharedUserData.from_bytes(script)]
    assert desired.order.ssh_keys == (KEY,)


def test_inline_user_data_has_the_limit_of_a_file(mistakes: Callable[..., list[str]]) -> None:
    data = json.dumps('#!/bin/sh\n' + '#' * MAX_USER_DATA_BYTES)
    (line,) = mistakes(f'stack: a\ninstances: {{b: {{flavor: small, user_data: {data}}}}}\n')
    assert line.startswith(f'2: instances.b.user_data: user-data: has {MAX_USER_DATA_BYTES + 10} bytes; the limit is')


def test_mistakes_on_standard_input_name_it(mistakes: Callable[..., list[str]]) -> None:
    found = mistakes('stack: A\ninstances: {b: {flavour: small, user_data: web.yaml}}\n', '-')
    assert not sys.stdin.closed  # it is asked later whether it is a terminal
    assert [line.split(': ')[0] for line in found] == ['standard input:1', *['standard input:2'] * 3], found
