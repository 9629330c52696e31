"""Groups: what their policies allow, prefer and exclude, and how they are written down."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ecomp.errors import Conflict, UsageError
from ecomp.model.allocation import Room
from ecomp.model.choose import SPREAD, WEIGHS, Candidate, Offer, choose, distribute
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

HOSTS = [str(uuid.uuid5(uuid.NAMESPACE_DNS, f'host-{number}')) for number in range(5)]
MEMBERS = [str(uuid.uuid5(uuid.NAMESPACE_DNS, f'member-{number}')) for number in range(8)]
APART, TOGETHER = Group('web', ANTI_AFFINITY), Group('db', AFFINITY)

policies, hosts = st.sampled_from(POLICIES), st.sampled_from(HOSTS)
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
    there = {MEMBERS[0]: HOSTS[0], MEMBERS[1]: ''}
    apart, together = APART.with_members(there), TOGETHER.with_members(there)
    assert apart.excludes(HOSTS[0]) == 'group web has a member there (strict anti-affinity)'
    assert apart.excludes(HOSTS[1]) is None
    assert together.excludes(HOSTS[0]) is None
    assert together.excludes(HOSTS[1]) == f'group db is on {HOSTS[0]} (strict affinity)'
    for empty in (APART, TOGETHER, APART.with_members({MEMBERS[1]: ''})):
        assert [empty.excludes(each) for each in HOSTS] == [None] * 5
    for soft in (Group('web', ANTI_AFFINITY, False, there), Group('db', AFFINITY, False, there)):
        assert [soft.excludes(each) for each in HOSTS] == [None] * 5
    # Whoever waits in a queue is nowhere yet.
    assert apart.excludes('') is None
    assert together.excludes('') is None


@given(groups, st.dictionaries(st.sampled_from(MEMBERS), hosts))
def test_what_is_allowed_breaks_nothing_that_was_whole(group: Group, places: dict[str, str]) -> None:
    kept = allowed(group, places)
    assert [each for each in places if each in kept] == kept
    others = group.without(*places)
    now = others.with_members({each: places[each] for each in kept})
    if not others.broken():
        assert now.broken() == []
    # And whoever is not allowed would have broken it.
    for each in places.keys() - set(kept):
        assert now.strict
        assert now.with_members({each: places[each]}).broken()


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


# A set of them


def roomy(*each: int) -> Offer:
    """Computes with room for so many of one VCPU."""
    rooms = {host: {'VCPU': Room(number, 0)} for host, number in zip(HOSTS, each, strict=False)}
    return Offer([{host: {'VCPU': 1}} for host in rooms], rooms)


def solved(offer: Offer, group: Group | None, count: int, weigh: str = SPREAD, seed: int = 1) -> list[Candidate]:
    rng = random.Random(seed)
    choice = choose(offer, HOSTS, weigh, rng, group)
    return distribute(choice.tries, offer.rooms, count, weigh, rng, group)


def test_softly_apart_is_even_and_softly_together_is_full() -> None:
    offer = roomy(9, 9, 1)
    spread = Counter(each.compute for each in solved(offer, Group('web', ANTI_AFFINITY, False), 5))
    assert spread == {HOSTS[0]: 2, HOSTS[1]: 2, HOSTS[2]: 1}
    full = Counter(each.compute for each in solved(offer, Group('db', AFFINITY, False), 10))
    assert sorted(full.values()) == [1, 9]


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    policies,
    st.integers(1, 10),
    st.sampled_from(WEIGHS),
    st.dictionaries(st.sampled_from(MEMBERS), hosts),
    st.integers(),
)
# One at a time, the first would go to the emptiest by share, and the third would not fit there.
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
    taken = solved(roomy(*rooms), group, count, weigh, seed)
    on = Counter(each.compute for each in taken)
    free = dict(zip(HOSTS, rooms, strict=False))
    assert all(number <= free[host] for host, number in on.items())
    if policy == ANTI_AFFINITY:
        assert set(on.values()) <= {1}
        assert not on.keys() & group.on.keys()
        assert len(taken) == min(count, sum(1 for host, room in free.items() if room and host not in group.on))
    else:
        assert len(on) <= 1
        assert not group.on or on.keys() <= group.on.keys()
        homes = group.on.keys() & free.keys() if group.on else free.keys()
        assert len(taken) == min(count, max((free[host] for host in homes), default=0))
