"""Stacks: their key and uuids, what an apply has to do, and how its instances are distributed."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.errors import UsageError
from ecomp.model import stack
from ecomp.model.allocation import Room
from ecomp.model.apply import ALL_MEMBERS, Desired, Existing, Step, find_exit_code, make_stack_order, plan_steps
from ecomp.model.choose import PACK, SPREAD, Offer
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group, Membership
from ecomp.model.order import Order, Request, parse_request
from ecomp.model.order import to_json as request_to_json
from ecomp.model.record import Failure, Record
from ecomp.model.stack import Entry, Place, Stack, from_json, restore_stack, to_json
from ecomp.scheduler.placing.stack import Lot, distribute_lots
from tests.kit.hostile import COMPUTE, IMAGE, INSTANCE, OTHER_UUID, RESOURCES

EPOCH = 'b8756be5-a30d-4311-920c-0ad996367a8e'
QUERY = 'resources=VCPU:1,MEMORY_MB:64,DISK_GB:1'

uuids = st.uuids().map(str)
names = st.from_regex(stack._STACK_NAME, fullmatch=True)
entries = st.builds(Entry, st.integers(1, stack.MAX_INCARNATION), uuids, st.booleans())
all_entries = st.dictionaries(st.from_regex(stack._ENTRY_NAME, fullmatch=True), entries, max_size=5)


@given(st.builds(Stack, names, uuids, all_entries, st.integers(0, stack.MAX_FLOOR), st.text()))
def test_stack_is_read_as_written(value: Stack) -> None:
    assert from_json(value.name, to_json(value).encode()) == value


def test_each_place_and_incarnation_has_its_own_uuid() -> None:
    shop = Stack('shop', EPOCH, {'web/1': Entry(3, COMPUTE), 'db/1': Entry(1, COMPUTE, True)})
    places = [shop.make_place(name) for name in ('web/1', 'web/2', 'db/1')]
    assert [place.incarnation for place in places] == [4, 1, 2]
    floored = replace(shop, floor=10)
    assert [floored.make_place(name).incarnation for name in ('web/1', 'web/2')] == [11, 11]
    assert floored.make_place('web/1', 3).instance == shop.list_instances()['web/1']
    others = [replace(shop, epoch=OTHER_UUID).make_place('web/1'), floored.make_place('web/1')]
    uuids = {place.instance for place in (*places, *others)} | {*shop.list_instances().values(), shop.attempt}
    assert len(uuids) == 8
    assert places[0].instance == str(uuid.uuid5(uuid.UUID(EPOCH), 'web/1/4'))
    request = Request(places[0].instance, image=IMAGE, allocations={COMPUTE: RESOURCES}, stack=places[0])
    assert parse_request(COMPUTE, f'/hosts/{COMPUTE}/{request.instance}', request_to_json(request).encode()) == request
    # It is a hash of the entry's name, so two members cannot be mistaken for one.
    assert shop.make_place('a/11').instance != shop.make_place('a-1/1').instance
    delivered = shop.with_delivered({places[0]: OTHER_UUID, places[2]: COMPUTE})
    assert delivered.entries == {'web/1': Entry(4, OTHER_UUID), 'db/1': Entry(2, COMPUTE)}
    ended = delivered.with_ended(['web/1'])
    assert (ended.entries['web/1'], ended.make_place('web/1').incarnation) == (Entry(4, OTHER_UUID, True), 5)


def test_restored_stack_has_the_epoch_of_most_requests_and_the_newest_instances() -> None:
    def place(entry: str, incarnation: int = 1, epoch: str = EPOCH) -> Place:
        return Stack('shop', epoch).make_place(entry, incarnation)

    places = {place('web/1', 3): 'c3', place('web/1', 2): 'c2', place('web/2'): 'c1', place('db/1', 9, OTHER_UUID): 'x'}
    restored = restore_stack('shop', places, 70_000)
    assert restored == Stack('shop', EPOCH, {'web/1': Entry(3, 'c3'), 'web/2': Entry(1, 'c1')}, 70_000)
    assert restored.make_place('web/1').incarnation == 70_001
    assert restore_stack('shop', dict(reversed(places.items())), 70_000) == restored
    assert restore_stack('shop', {}, 70_000) is None


def make_order(**fields: Any) -> Order:
    defaults = {'image': IMAGE, 'project_id': 'p', 'query': QUERY, 'name': 'shop-web', 'ssh_keys': ('ssh-rsa A',)}
    return Order(INSTANCE, **(defaults | fields))


def make_existing(state: str, has_request: bool = True, is_tombstone: bool = False, **fields: Any) -> Existing:
    """Return an instance as made for make_order(), with other fields; without a request as if that were malformed."""
    values = make_order(**fields).copy_fields()
    recorded = values | {'ssh_keys': None, 'user_data_sha256': None}
    if group := values['group']:
        recorded['group'] = Membership(group.name)
    error = Failure('image', 'no such file', 'removed') if state == 'error' else None
    record = Record(**recorded, compute=COMPUTE, state=state, error=error)
    if is_tombstone:
        values['image'] = None
    allocations = {} if is_tombstone else {COMPUTE: {'VCPU': 1}}
    return Existing(record, Request(**values, allocations=allocations) if has_request else None)


def plan(desired: Desired | None, existing: Existing | None, owner: str | None = None, *options: Any) -> list[Step]:
    """Return the step of one entry, with its owner and options as plan_steps() has them."""
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
    existing: Existing | None, desired: Desired | None, usual: str, replaced: str, pruned: str
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
    ('name', {}, {'name': 'other'}, 'shop-web', 'other'),
    ('name', {'name': None}, {}, 'none', 'shop-web'),
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
    assert failed == Step('web/1', 'shop-web', 'failed', INSTANCE, 'error', failed.reasons)
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


def test_exit_code_of_a_plan() -> None:
    expected = {'': (0, 0), 'keep surplus': (0, 0), 'failed keep': (1, 1), 'failed create': (1, 8)}
    expected |= dict.fromkeys(('create keep', 'replace', 'destroy', 'destroying'), (0, 8))
    expected |= dict.fromkeys(('taken create', 'differs failed destroy'), (5, 5))
    for actions, codes in expected.items():
        steps = [Step('web/1', 'shop-web', action) for action in actions.split()]
        assert (find_exit_code(steps), find_exit_code(steps, dry_run=True)) == codes, actions


def test_order_of_a_stack_is_limited_by_the_size_of_a_transaction() -> None:
    shop = Stack('shop', EPOCH, {'web/1': Entry(4, COMPUTE)})

    def order(count: int, key_bytes: int) -> Any:
        each = Desired(make_order(ssh_keys=('ssh-rsa ' + 'A' * key_bytes,)), SPREAD)
        return make_stack_order(shop, {f'web/{number}': each for number in range(1, count + 1)}, {'requested': 'now'})

    made = order(300, 3000)
    assert (made.instance, made.count, made.minimum, made.shared_user_data) == (shop.attempt, 300, 300, None)
    assert made.orders.keys() == {shop.make_place(f'web/{number}').instance for number in range(1, 301)}
    first = made.orders[shop.make_place('web/1').instance]
    place = shop.make_place('web/1', 5)
    assert (first.stack, first.instance, first.stages) == (place, place.instance, {'requested': 'now'})
    with pytest.raises(UsageError, match=r'^the 300 new instances have \d{7} bytes, .* Fix: give fewer ssh keys'):
        order(300, 4000)


def distribute(
    lots: list[Lot], rooms: dict[str, int], groups: tuple[Group, ...] = (), held: tuple[str, ...] = ()
) -> tuple[dict[str, str], Lot | None]:
    """Distribute lots, whose query is their number of VCPU, over computes with this free room."""
    room = {compute: {'VCPU': Room(free + 1, 1)} for compute, free in rooms.items()}
    offers = {lot.query: Offer([{each: {'VCPU': int(lot.query)}} for each in rooms], room) for lot in lots}
    chosen, failed = distribute_lots(
        lots, offers, {group.name: group for group in groups}, rooms, held, random.Random(1)
    )
    for compute, free in rooms.items():
        assert sum(each.allocations[compute]['VCPU'] for each in chosen.values() if each.compute == compute) <= free
    return {instance: candidate.compute for instance, candidate in chosen.items()}, failed


def test_larger_instances_are_placed_first_in_one_table_of_room() -> None:
    small, large = Lot('1', None, SPREAD, ('s1', 's2', 's3')), Lot('3', None, SPREAD, ('l1',))
    for lots in ([small, large], [large, small]):
        places, failed = distribute(lots, {'a': 3, 'b': 3})
        assert failed is None
        assert {places[each] for each in ('s1', 's2', 's3')} == {'a', 'b'} - {places['l1']}
        assert len(places) == 4
        _, failed = distribute(lots, {'a': 3, 'b': 2})
        assert failed == small
    places, failed = distribute([small, large], {'a': 3, 'b': 2}, held=('s1', 'l1'))
    assert (set(places), failed) == ({'s2', 's3'}, None)


def test_groups_are_kept_over_the_lots_of_a_stack() -> None:
    anti, near = Group('anti', ANTI_AFFINITY), Group('near', AFFINITY)
    two = [Lot('1', anti.membership, SPREAD, ('a1', 'a2')), Lot('2', anti.membership, SPREAD, ('b1',))]
    places, failed = distribute(two, {'a': 9, 'b': 9, 'c': 9}, (anti,))
    assert (set(places.values()), failed) == ({'a', 'b', 'c'}, None)
    assert distribute(two, {'a': 9, 'b': 9}, (anti,))[1] is not None
    held = anti.with_members({'a1': 'a'})
    places, failed = distribute(two, {'a': 9, 'b': 9, 'c': 9}, (held,), held=('a1',))
    assert (set(places.values()), set(places), failed) == ({'b', 'c'}, {'a2', 'b1'}, None)
    # All of a strict affinity group are on one compute, also those of another query, and those of no group fit in.
    lots = [Lot('1', None, SPREAD, ('x1', 'x2'))]
    lots += [Lot('1', near.membership, SPREAD, ('n1', 'n2')), Lot('2', near.membership, SPREAD, ('m1',))]
    places, failed = distribute(lots, {'a': 2, 'b': 4}, (near,))
    assert (places, failed) == (dict.fromkeys(('n1', 'n2', 'm1'), 'b') | dict.fromkeys(('x1', 'x2'), 'a'), None)
    assert distribute(lots[1:], {'a': 3, 'b': 3}, (near,))[1] is not None
    # That compute has room for all of them.
    lots = [Lot('3', near.membership, PACK, ('m1',)), Lot('1', near.membership, PACK, ('n1', 'n2'))]
    for rooms in ({'a': 4, 'b': 5}, {'a': 5, 'b': 4}):
        places, failed = distribute(lots, rooms, (near,))
        assert (failed, len(set(places.values())), len(places)) == (None, 1, 3)
