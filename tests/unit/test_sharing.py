"""State shared by instances: groups, quotas and flavors."""

from __future__ import annotations

import random
import uuid
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ecomp.errors import Conflict, UsageError
from ecomp.model.allocation import Room, sum_resources
from ecomp.model.assign import Lot, Planner
from ecomp.model.choose import SPREAD, STRATEGIES, Candidate, Offer
from ecomp.model.flavor import Flavor, merge_query, parse_flavor
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, POLICIES, Group, Membership, filter_admitted, resolve_group
from ecomp.model.quota import Quota, describe_excesses, make_charge, multiply_amounts
from ecomp.model.stored import decode, encode

# Groups: what their policies allow, prefer and exclude, and their format.


HOSTS = [str(uuid.uuid5(uuid.NAMESPACE_DNS, f'host-{number}')) for number in range(5)]
MEMBERS = [str(uuid.uuid5(uuid.NAMESPACE_DNS, f'member-{number}')) for number in range(8)]
ANTI_AFFINITY_GROUP = Group('web', ANTI_AFFINITY)
AFFINITY_GROUP = Group('db', AFFINITY)

policies = st.sampled_from(POLICIES)
hosts = st.sampled_from(HOSTS)
groups = st.builds(
    Group, st.just('web'), policies, st.booleans(), st.dictionaries(st.sampled_from(MEMBERS), hosts | st.just(''))
)


def test_first_member_defines_the_group() -> None:
    assert resolve_group(None, Membership('web', ANTI_AFFINITY)) == ANTI_AFFINITY_GROUP
    assert resolve_group(None, Membership('web', AFFINITY, False)) == Group('web', AFFINITY, False)
    for later in (Membership('web'), Membership('web', ANTI_AFFINITY), Membership('web', None, True)):
        assert resolve_group(ANTI_AFFINITY_GROUP, later) is ANTI_AFFINITY_GROUP
    with pytest.raises(
        UsageError, match=r'group web does not exist. Fix: give its policy \(--policy\), affinity or anti-affinity'
    ):
        resolve_group(None, Membership('web'))
    for other in (Membership('web', AFFINITY), Membership('web', None, False)):
        with pytest.raises(Conflict, match='group web has the policy strict anti-affinity, which cannot change'):
            resolve_group(ANTI_AFFINITY_GROUP, other)


def test_strict_groups_exclude_computes() -> None:
    members = {MEMBERS[0]: HOSTS[0], MEMBERS[1]: ''}
    apart, together = ANTI_AFFINITY_GROUP.with_members(members), AFFINITY_GROUP.with_members(members)
    assert apart.explain_exclusion(HOSTS[0]) == 'group web has a member there (strict anti-affinity)'
    assert apart.explain_exclusion(HOSTS[1]) is None
    assert together.explain_exclusion(HOSTS[0]) is None
    assert together.explain_exclusion(HOSTS[1]) == f'the members of group db are on {HOSTS[0]} (strict affinity)'
    for empty in (ANTI_AFFINITY_GROUP, AFFINITY_GROUP, ANTI_AFFINITY_GROUP.with_members({MEMBERS[1]: ''})):
        assert [empty.explain_exclusion(host) for host in HOSTS] == [None] * 5
    for soft in (Group('web', ANTI_AFFINITY, False, members), Group('db', AFFINITY, False, members)):
        assert [soft.explain_exclusion(host) for host in HOSTS] == [None] * 5
    # A queued member is on no compute yet.
    assert apart.explain_exclusion('') is None
    assert together.explain_exclusion('') is None


@given(groups, st.dictionaries(st.sampled_from(MEMBERS), hosts))
def test_allowed_members_never_break_a_group(group: Group, places: dict[str, str]) -> None:
    admitted = filter_admitted(group, places)
    assert [member for member in places if member in admitted] == admitted
    others = group.without_members(*places)
    now = others.with_members({member: places[member] for member in admitted})
    if not others.list_breaches():
        assert now.list_breaches() == []
    # Each member that is not allowed would have broken the group.
    for member in places.keys() - set(admitted):
        assert now.strict
        assert now.with_members({member: places[member]}).list_breaches()


# Sets in groups


def make_offer(*vcpus: int) -> Offer:
    rooms = {host: {'VCPU': Room(number, 0)} for host, number in zip(HOSTS, vcpus, strict=False)}
    return Offer([{host: {'VCPU': 1}} for host in rooms], rooms)


def distribute_set(
    offer: Offer, group: Group | None, count: int, weigh: str = SPREAD, seed: int = 1
) -> list[Candidate]:
    groups = {} if group is None else {group.name: group}
    membership = None if group is None else group.membership
    lot = Lot('', membership, weigh, tuple(map(str, range(count))), minimum=0)
    return list(Planner({'': offer}, groups, HOSTS, random.Random(seed)).assign([lot]).candidates.values())


def test_soft_anti_affinity_spreads_and_soft_affinity_fills() -> None:
    offer = make_offer(9, 9, 1)
    spread = Counter(candidate.compute for candidate in distribute_set(offer, Group('web', ANTI_AFFINITY, False), 5))
    assert spread == {HOSTS[0]: 2, HOSTS[1]: 2, HOSTS[2]: 1}
    full = Counter(candidate.compute for candidate in distribute_set(offer, Group('db', AFFINITY, False), 10))
    assert sorted(full.values()) == [1, 9]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    policies,
    st.integers(1, 10),
    st.sampled_from(STRATEGIES),
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
def test_strict_set_is_as_large_as_its_group_allows(
    rooms: list[int], policy: str, count: int, weigh: str, members: dict[str, str], seed: int
) -> None:
    group = Group('web', policy, True, members if policy == ANTI_AFFINITY else dict(list(members.items())[:1]))
    candidates = distribute_set(make_offer(*rooms), group, count, weigh, seed)
    counts = Counter(candidate.compute for candidate in candidates)
    free = dict(zip(HOSTS, rooms, strict=False))
    assert all(number <= free[host] for host, number in counts.items())
    if policy == ANTI_AFFINITY:
        assert set(counts.values()) <= {1}
        assert not counts.keys() & group.member_counts.keys()
        assert len(candidates) == min(
            count, sum(1 for host, room in free.items() if room and host not in group.member_counts)
        )
    else:
        assert len(counts) <= 1
        assert not group.member_counts or counts.keys() <= group.member_counts.keys()
        homes = group.member_counts.keys() & free.keys() if group.member_counts else free.keys()
        assert len(candidates) == min(count, max((free[host] for host in homes), default=0))


# Quotas: what they allow and count, their arguments and their format.


SMALL = make_charge({'VCPU': 2, 'MEMORY_MB': 128})
amounts = st.dictionaries(st.sampled_from(['VCPU', 'MEMORY_MB', 'CUSTOM_X', 'instances']), st.integers(0, 50))


def test_excess_names_limit_used_and_requested() -> None:
    quota = Quota('web', {'VCPU': 10, 'instances': 5, 'DISK_GB': 0}, {'VCPU': 9, 'instances': 4})
    (excess,) = quota.list_excesses(SMALL)
    assert str(excess) == 'VCPU: limit 10, used 9, requested 2'
    assert describe_excesses('web', [excess]).startswith(
        'the quota of project web does not allow this request: VCPU: limit 10'
    )
    # A class that is not requested is not refused, even if its use exceeds a limit that was set later.
    assert Quota('web', {'DISK_GB': 1}, {'DISK_GB': 9}).list_excesses(SMALL) == []
    assert quota.list_excesses(make_charge({})) == []
    assert [str(item) for item in quota.list_excesses(multiply_amounts(make_charge({}), 2))] == [
        'instances: limit 5, used 4, requested 2'
    ]


@given(amounts, amounts, amounts, st.integers(1, 20))
def test_quota_room_is_exact(
    limits: dict[str, int], used: dict[str, int], instance_charge: dict[str, int], count: int
) -> None:
    quota = Quota('web', limits, used)
    room = quota.count_allowed(instance_charge, count)
    assert 0 <= room <= count
    assert quota.list_excesses(multiply_amounts(instance_charge, room)) == []
    assert room == count or quota.list_excesses(multiply_amounts(instance_charge, room + 1))


@given(amounts, st.lists(amounts))
def test_charging_and_releasing_restores_the_quota(used: dict[str, int], charges: list[dict[str, int]]) -> None:
    quota = Quota('web', {}, {name: amount for name, amount in used.items() if amount})
    more = quota.add_used(sum_resources(charges))
    for charged in charges:
        more = more.add_used(charged, -1)
    assert more == quota


def test_use_is_never_negative() -> None:
    assert Quota('web', {}, {'VCPU': 1}).add_used(SMALL, -1).used == {}


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
def test_flavor_round_trips_as_json_and_as_query(flavor: Flavor) -> None:
    assert decode(Flavor, encode(flavor).encode(), name=flavor.name) == flavor
    assert parse_flavor(flavor.name, flavor.query) == flavor


def test_query_on_top_of_a_flavor() -> None:
    traits = 'required=HW_CPU_X86_AVX2,!COMPUTE_STATUS_DISABLED'
    assert merge_query(SMALL_FLAVOR, '') == SMALL_FLAVOR.query == f'resources=VCPU:1,MEMORY_MB:512&{traits}'
    added = 'resources=VCPU:4,DISK_GB:9&required=STORAGE_DISK_SSD&member_of=in:a,b'
    assert merge_query(SMALL_FLAVOR, added) == (
        f'resources=VCPU:4,MEMORY_MB:512,DISK_GB:9&{traits}&required=STORAGE_DISK_SSD&member_of=in:a,b'
    )
    # Placement reports an invalid amount; a class without an amount would be lost among the flavor's resources.
    assert 'VCPU:one' in merge_query(SMALL_FLAVOR, 'resources=VCPU:one')
    with pytest.raises(ValueError, match="'VCPU' is not CLASS:AMOUNT"):
        merge_query(SMALL_FLAVOR, 'resources=VCPU')
