"""State shared by instances: groups, quotas and flavors."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ecomp.errors import Conflict, UsageError
from ecomp.model.allocation import Room, summed
from ecomp.model.choose import SPREAD, WEIGHS, Candidate, Offer, choose, distribute
from ecomp.model.flavor import Flavor, on_top, parse_flavor
from ecomp.model.flavor import from_json as read_flavor
from ecomp.model.flavor import to_json as write_flavor
from ecomp.model.group import (
    AFFINITY,
    ANTI_AFFINITY,
    POLICIES,
    Group,
    Membership,
    allowed,
    check_group_name,
    from_json,
    membership_from,
    settle,
    to_json,
)
from ecomp.model.quota import Quota, charge, parse_limits, refusal, times
from ecomp.model.quota import from_json as read_quota
from ecomp.model.quota import to_json as write_quota

# Groups: what their policies allow, prefer and exclude, and their format.


HOSTS = [str(uuid.uuid5(uuid.NAMESPACE_DNS, f'host-{number}')) for number in range(5)]
MEMBERS = [str(uuid.uuid5(uuid.NAMESPACE_DNS, f'member-{number}')) for number in range(8)]
APART = Group('web', ANTI_AFFINITY)
TOGETHER = Group('db', AFFINITY)

policies = st.sampled_from(POLICIES)
hosts = st.sampled_from(HOSTS)
groups = st.builds(
    Group, st.just('web'), policies, st.booleans(), st.dictionaries(st.sampled_from(MEMBERS), hosts | st.just(''))
)


def test_what_a_group_is_its_first_member_says() -> None:
    assert settle(None, Membership('web', ANTI_AFFINITY)) == APART
    assert settle(None, Membership('web', AFFINITY, False)) == Group('web', AFFINITY, False)
    for later in (Membership('web'), Membership('web', ANTI_AFFINITY), Membership('web', None, True)):
        assert settle(APART, later) is APART
    with pytest.raises(UsageError, match='no group web yet: --policy affinity or anti-affinity'):
        settle(None, Membership('web'))
    for other in (Membership('web', AFFINITY), Membership('web', None, False)):
        with pytest.raises(Conflict, match='group web is strict anti-affinity, as its first member said'):
            settle(APART, other)


def test_strict_groups_exclude() -> None:
    members = {MEMBERS[0]: HOSTS[0], MEMBERS[1]: ''}
    apart, together = APART.with_members(members), TOGETHER.with_members(members)
    assert apart.excludes(HOSTS[0]) == 'group web has a member there (strict anti-affinity)'
    assert apart.excludes(HOSTS[1]) is None
    assert together.excludes(HOSTS[0]) is None
    assert together.excludes(HOSTS[1]) == f'group db is on {HOSTS[0]} (strict affinity)'
    for empty in (APART, TOGETHER, APART.with_members({MEMBERS[1]: ''})):
        assert [empty.excludes(host) for host in HOSTS] == [None] * 5
    for soft in (Group('web', ANTI_AFFINITY, False, members), Group('db', AFFINITY, False, members)):
        assert [soft.excludes(host) for host in HOSTS] == [None] * 5
    # A queued member is on no compute yet.
    assert apart.excludes('') is None
    assert together.excludes('') is None


@given(groups, st.dictionaries(st.sampled_from(MEMBERS), hosts))
def test_what_is_allowed_breaks_nothing_that_was_whole(group: Group, places: dict[str, str]) -> None:
    admitted = allowed(group, places)
    assert [member for member in places if member in admitted] == admitted
    others = group.without(*places)
    now = others.with_members({member: places[member] for member in admitted})
    if not others.broken():
        assert now.broken() == []
    # Each member that is not allowed would have broken the group.
    for member in places.keys() - set(admitted):
        assert now.strict
        assert now.with_members({member: places[member]}).broken()


@given(groups)
def test_it_is_read_as_it_was_written(group: Group) -> None:
    assert from_json(group.name, to_json(group).encode()) == group
    assert membership_from(group.membership._asdict()) == group.membership


@pytest.mark.parametrize(
    'change',
    [
        {'version': 2},
        {'version': True},
        {'policy': 'near'},
        {'policy': None},
        {'strict': 1},
        {'members': []},
        {'members': {'x': HOSTS[0]}},
        {'members': {MEMBERS[0]: 'x'}},
        {'members': {MEMBERS[0]: None}},
    ],
)
def test_anything_else_is_no_group(change: dict[str, object]) -> None:
    value = {**json.loads(to_json(APART)), **change}
    with pytest.raises(ValueError, match='group'):
        from_json('web', json.dumps(value).encode())


@pytest.mark.parametrize('data', [[], 'web', {}, {'name': 1}, {'name': 'a/b', 'policy': AFFINITY, 'strict': True}])
def test_a_request_names_a_group_or_none(data: object) -> None:
    assert membership_from(None) is None
    with pytest.raises(ValueError, match='group'):
        membership_from(data)


@pytest.mark.parametrize('name', ['', '-a', 'a/b', 'a b', 'é', 'x' * 64])
def test_names(name: str) -> None:
    assert check_group_name('web-1.A_b') == 'web-1.A_b'
    with pytest.raises(ValueError, match='no name of a group'):
        check_group_name(name)


# Sets in groups


def roomy(*each: int) -> Offer:
    """Offer computes with room for these numbers of instances of one VCPU."""
    rooms = {host: {'VCPU': Room(number, 0)} for host, number in zip(HOSTS, each, strict=False)}
    return Offer([{host: {'VCPU': 1}} for host in rooms], rooms)


def solved(offer: Offer, group: Group | None, count: int, weigh: str = SPREAD, seed: int = 1) -> list[Candidate]:
    """Choose and distribute `count` instances, and return their candidates."""
    rng = random.Random(seed)
    choice = choose(offer, HOSTS, weigh, rng, group)
    return distribute(choice.tries, offer.rooms, count, weigh, rng, group)


def test_softly_apart_is_even_and_softly_together_is_full() -> None:
    offer = roomy(9, 9, 1)
    spread = Counter(candidate.compute for candidate in solved(offer, Group('web', ANTI_AFFINITY, False), 5))
    assert spread == {HOSTS[0]: 2, HOSTS[1]: 2, HOSTS[2]: 1}
    full = Counter(candidate.compute for candidate in solved(offer, Group('db', AFFINITY, False), 10))
    assert sorted(full.values()) == [1, 9]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    policies,
    st.integers(1, 10),
    st.sampled_from(WEIGHS),
    st.dictionaries(st.sampled_from(MEMBERS), hosts),
    st.integers(),
)
# Placed one at a time, the first would go to the emptiest by share, where the third would not fit.
@example([2, 3, 2], AFFINITY, 3, SPREAD, {}, 1)
@example([2, 3, 2], AFFINITY, 4, SPREAD, {}, 1)
@example([2, 3, 2], AFFINITY, 3, SPREAD, {MEMBERS[0]: HOSTS[2]}, 1)
@example([9, 9, 9], ANTI_AFFINITY, 3, SPREAD, {}, 1)
@example([9, 9, 9], ANTI_AFFINITY, 4, SPREAD, {}, 1)
@example([9, 9, 9], ANTI_AFFINITY, 1, SPREAD, dict(zip(MEMBERS, HOSTS[:3], strict=False)), 1)
def test_a_strict_set_never_breaks_its_group_and_is_as_large_as_it_can_be(
    rooms: list[int], policy: str, count: int, weigh: str, members: dict[str, str], seed: int
) -> None:
    group = Group('web', policy, True, members if policy == ANTI_AFFINITY else dict(list(members.items())[:1]))
    candidates = solved(roomy(*rooms), group, count, weigh, seed)
    counts = Counter(candidate.compute for candidate in candidates)
    free = dict(zip(HOSTS, rooms, strict=False))
    assert all(number <= free[host] for host, number in counts.items())
    if policy == ANTI_AFFINITY:
        assert set(counts.values()) <= {1}
        assert not counts.keys() & group.on.keys()
        assert len(candidates) == min(count, sum(1 for host, room in free.items() if room and host not in group.on))
    else:
        assert len(counts) <= 1
        assert not group.on or counts.keys() <= group.on.keys()
        homes = group.on.keys() & free.keys() if group.on else free.keys()
        assert len(candidates) == min(count, max((free[host] for host in homes), default=0))


# Quotas: what they allow and count, their arguments and their format.


SMALL = charge({'VCPU': 2, 'MEMORY_MB': 128})
amounts = st.dictionaries(st.sampled_from(['VCPU', 'MEMORY_MB', 'CUSTOM_X', 'instances']), st.integers(0, 50))


def test_what_exceeds_is_named_with_its_numbers() -> None:
    quota = Quota('web', {'VCPU': 10, 'instances': 5, 'DISK_GB': 0}, {'VCPU': 9, 'instances': 4})
    (excess,) = quota.excess(SMALL)
    assert str(excess) == 'VCPU: limit 10, used 9, asked 2'
    assert refusal('web', [excess]).startswith('the quota of project web does not allow it: VCPU: limit 10')
    # A class that is not requested is not refused, even if its use exceeds a limit that was set later.
    assert Quota('web', {'DISK_GB': 1}, {'DISK_GB': 9}).excess(SMALL) == []
    assert quota.excess(charge({})) == []
    assert [str(item) for item in quota.excess(times(charge({}), 2))] == ['instances: limit 5, used 4, asked 2']


@given(amounts, amounts, amounts, st.integers(1, 20))
def test_there_is_room_for_just_so_many(
    limits: dict[str, int], used: dict[str, int], each: dict[str, int], count: int
) -> None:
    quota = Quota('web', limits, used)
    room = quota.room(each, count)
    assert 0 <= room <= count
    assert quota.excess(times(each, room)) == []
    assert room == count or quota.excess(times(each, room + 1))


@given(amounts, st.lists(amounts))
def test_what_comes_and_goes_leaves_nothing(used: dict[str, int], charges: list[dict[str, int]]) -> None:
    quota = Quota('web', {}, {name: amount for name, amount in used.items() if amount})
    more = quota.with_used(summed(charges))
    for charged in charges:
        more = more.without_used(charged)
    assert more == quota


def test_never_less_than_nothing() -> None:
    assert Quota('web', {}, {'VCPU': 1}).without_used(SMALL).used == {}


@given(amounts, amounts)
def test_a_quota_is_read_as_it_was_written(limits: dict[str, int], used: dict[str, int]) -> None:
    quota = Quota('web', limits, used)
    assert read_quota('web', write_quota(quota).encode()) == quota


@pytest.mark.parametrize(
    'change', [{'version': 2}, {'limits': []}, {'limits': {'VCPU': -1}}, {'used': {'VCPU': True}}, {'used': None}]
)
def test_anything_else_is_no_quota(change: dict[str, object]) -> None:
    value = {**json.loads(write_quota(Quota('web'))), **change}
    with pytest.raises(ValueError, match='quota'):
        read_quota('web', json.dumps(value).encode())


def test_limits_as_they_are_typed() -> None:
    assert parse_limits(['VCPU=10', 'instances=0', 'DISK_GB=none']) == {'VCPU': 10, 'instances': 0, 'DISK_GB': None}
    for arguments, message in (
        (['vcpu=1'], r'is no limit \(did you mean VCPU\?\): give '),
        (['instnaces=5'], r'is no limit \(did you mean instances\?\): give '),
        (['VCPU'], 'a whole number from 0'),
        (['VCPU='], 'a whole number'),
        (['VCPU=-1'], 'a whole number'),
        (['VCPU=1.5'], 'a whole number'),
        (['VCPU=\u00b2'], 'a whole number'),
        (['VCPU=2147483648'], 'from 0 to 2147483647'),
        (['VCPU=1', 'VCPU=2'], 'VCPU is given twice'),
    ):
        with pytest.raises(ValueError, match=message):
            parse_limits(arguments)


# Flavors: their format, and their queries.


SMALL_FLAVOR = Flavor('m1.small', {'VCPU': 1, 'MEMORY_MB': 512}, ('HW_CPU_X86_AVX2',), ('COMPUTE_STATUS_DISABLED',))

names = st.text('ABCXYZ019_', min_size=1, max_size=8)
flavors = st.builds(
    Flavor,
    st.text('abcXYZ019', min_size=1, max_size=10),
    st.dictionaries(names, st.integers(1, 2**31 - 1), min_size=1, max_size=4),
    st.lists(names.map('R_{}'.format), unique=True, max_size=3).map(tuple),
    st.lists(names.map('F_{}'.format), unique=True, max_size=3).map(tuple),
)


@given(flavors)
def test_what_is_kept_and_what_is_asked_is_the_same_flavor(flavor: Flavor) -> None:
    assert read_flavor(flavor.name, write_flavor(flavor).encode()) == flavor
    assert parse_flavor(flavor.name, flavor.query) == flavor


def test_a_query_on_top() -> None:
    traits = 'required=HW_CPU_X86_AVX2,!COMPUTE_STATUS_DISABLED'
    assert on_top(SMALL_FLAVOR, '') == SMALL_FLAVOR.query == f'resources=VCPU:1,MEMORY_MB:512&{traits}'
    added = 'resources=VCPU:4,DISK_GB:9&required=STORAGE_DISK_SSD&member_of=in:a,b'
    assert on_top(SMALL_FLAVOR, added) == (
        f'resources=VCPU:4,MEMORY_MB:512,DISK_GB:9&{traits}&required=STORAGE_DISK_SSD&member_of=in:a,b'
    )
    # Placement reports an invalid amount; a class without an amount would be lost among the flavor's resources.
    assert 'VCPU:one' in on_top(SMALL_FLAVOR, 'resources=VCPU:one')
    with pytest.raises(ValueError, match="'VCPU' is not CLASS:AMOUNT"):
        on_top(SMALL_FLAVOR, 'resources=VCPU')


@pytest.mark.parametrize(
    ('name', 'text', 'why'),
    [
        ('a b', 'resources=VCPU:1', "'a b' is no name of a flavor"),
        ('', 'resources=VCPU:1', 'is no name of a flavor'),
        ('a/b', 'resources=VCPU:1', 'is no name of a flavor'),
        ('small', '', 'it asks for no resources'),
        ('small', 'required=A', 'it asks for no resources'),
        ('small', 'resources=VCPU', "'VCPU' is not CLASS:AMOUNT"),
        ('small', 'resources=VCPU:0', "VCPU: '0' is not a whole number from 1"),
        ('small', 'resources=VCPU:-1', 'is not a whole number'),
        ('small', 'resources=VCPU:1.5', 'is not a whole number'),
        ('small', 'resources=vcpu:1', "'vcpu' is no resource class"),
        ('small', 'resources=VCPU:1&required=a', "'a' is no trait"),
        ('small', 'resources=VCPU:1&required=in:A,B', 'and nothing else'),
        ('small', 'resources=VCPU:1&in_tree=x', 'and nothing else'),
        ('small', 'resources=VCPU:1&required=A,!A', 'A: required and forbidden at once'),
    ],
)
def test_what_is_none(name: str, text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_flavor(name, text)


@pytest.mark.parametrize(
    ('value', 'why'),
    [
        ('', 'not JSON'),
        ('[]', 'expected a JSON object'),
        ('{}', 'expected resources'),
        ('{"resources": []}', 'expected resources'),
        ('{"resources": {}}', 'is not CLASS:AMOUNT'),
        ('{"resources": {"VCPU": 0}}', 'not a whole number'),
        ('{"resources": {"VCPU": "x"}}', 'not a whole number'),
        ('{"resources": {"VCPU": 1}, "required": "A"}', 'expected resources, required and forbidden'),
        ('{"resources": {"VCPU": 1}, "required": [1.5]}', 'is no trait'),
        ('{"version": 2, "resources": {"VCPU": 1}}', 'version 2 of a flavor is not known here'),
    ],
)
def test_what_cannot_be_read(value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_flavor('small', value.encode())
