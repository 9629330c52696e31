"""Placement queries, why one failed, and where the guests of dead hosts would go.

The rules are compared with placement in tests/functional/test_scheduler_explain.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import explain
from ecomp.model.allocation import MAX_AMOUNT, Allocations, Inventory, Provider, Room
from ecomp.model.assign import Planner
from ecomp.model.choose import FIRST, PACK, SPREAD, Offer, PlacementReason
from ecomp.model.explain import Cure, Miss, explain_uncovered, find_miss, find_smallest_miss, format_cures, sort_misses
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group
from ecomp.model.order import InvalidRequest, Request
from ecomp.model.query import (
    Amount,
    Exclusion,
    QueryNames,
    Requirement,
    check_query,
    exclude_disabled,
    format_query,
    list_trees,
    parse_names,
    parse_query,
    resolve_trees,
    restrict_to_compute,
    split_restriction,
)
from ecomp.model.status import DISABLED
from ecomp.scheduler.placing.evacuate import Evacuee, Move, plan_moves

GUEST = 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1'
AGGREGATE, OTHER = 'a66e9a7e-0000-4000-8000-000000000001', 'a66e9a7e-0000-4000-8000-000000000002'
ROOMY = {'VCPU': Inventory(4), 'MEMORY_MB': Inventory(7800), 'DISK_GB': Inventory(25)}


def make_provider(name: str = 'p', **inventories: Inventory) -> Provider:
    return Provider(name, {**ROOMY, **inventories})


def list_failures(query: str, candidate: Provider) -> list[str]:
    return [failure.reason for failure in find_miss(parse_query(query), candidate).failures]


def suggest_change(query: str, *providers: Provider) -> str | None:
    change = find_smallest_miss(find_miss(parse_query(query), candidate) for candidate in providers)
    return format_cures(change.cures, change.provider) if change is not None and change.cures else None


# Failures of one provider


def test_amounts_of_the_same_set_are_not_reported_as_used() -> None:
    """`free 0 of 4` looks wrong for a host that is shown as 3/4 used."""
    on = make_provider(VCPU=Inventory(4, used=3)).with_usage([{'VCPU': 1, 'MEMORY_MB': 256}])
    assert list_failures(GUEST, on) == ['VCPU is short by 1']
    assert list_failures(GUEST, make_provider(VCPU=Inventory(4, used=4)).with_usage([])) == [
        'VCPU short by 1 (free 0 of 4)'
    ]


# The nearest miss


def test_nearest_has_the_fewest_then_the_smallest_failures() -> None:
    query = parse_query(f'{GUEST}&required=A')
    two = Provider('two', {**ROOMY, 'MEMORY_MB': Inventory(255)})
    far = Provider('far', {**ROOMY, 'MEMORY_MB': Inventory(16)}, {'A'})
    near = Provider('near', {**ROOMY, 'MEMORY_MB': Inventory(200)}, {'A'})
    order = [each.provider for each in sort_misses([find_miss(query, each) for each in (two, far, near)])]
    assert order == ['near', 'far', 'two']


# The smallest change


def test_change_needs_as_few_cures_as_possible() -> None:
    small = make_provider('small', MEMORY_MB=Inventory(7800, used=7288))
    query = GUEST.replace('256', '1741')
    assert suggest_change(query, small) == 'request MEMORY_MB:512'
    assert suggest_change(f'{query}&required=A', small) == 'request MEMORY_MB:512, remove required=A'
    # A provider that needs one change is preferred to one that needs two.
    assert suggest_change(f'{query}&required=A', small, make_provider('other')) == 'remove required=A'


def test_optional_resource_may_be_dropped() -> None:
    query = GUEST + ',VGPU:1'
    assert suggest_change(query, make_provider()) == 'remove VGPU'
    assert suggest_change(query, make_provider(VGPU=Inventory(1, used=1))) == 'remove VGPU'
    # A query must keep at least one resource.
    assert suggest_change('resources=VGPU:1', make_provider()) is None


def test_changing_the_query_is_preferred_to_freeing_resources() -> None:
    full, far = make_provider('full', VCPU=Inventory(4, used=4)), make_provider('far', VCPU=Inventory(4, used=3))
    query = GUEST.replace('VCPU:1', 'VCPU:2') + '&required=A,B'
    assert suggest_change(query, full) == 'free 2 VCPU on full, remove required=A and required=B'
    assert suggest_change(query, full, far) == 'request VCPU:1, remove required=A and required=B'


def test_no_change_without_any_inventory() -> None:
    assert find_smallest_miss([]) is None
    assert find_smallest_miss([find_miss(parse_query(GUEST), Provider('p'))]) is None
    assert Miss('p', ()).is_candidate


def test_changed_applies_the_cures() -> None:
    before = parse_query(f'{GUEST}&required=A&root_required=!B')
    cures = [Cure(Amount('VCPU', 1), Amount('VCPU', 2)), Cure(Requirement('required', ('A',)), None)]
    after = explain.apply_cures(before, cures)
    assert after == (Amount('VCPU', 2), *before[1:3], Exclusion('root_required', 'B'))
    assert format_query(after) == 'resources=VCPU:2,MEMORY_MB:256,DISK_GB:1&root_required=!B'


limits = st.builds(
    Inventory,
    total=st.integers(1, 30),
    allocation_ratio=st.sampled_from([0.5, 1.0, 1.5]),
    min_unit=st.integers(1, 8),
    max_unit=st.integers(1, 30) | st.just(MAX_AMOUNT),
    step_size=st.integers(1, 7),
    used=st.integers(0, 40),
)


@given(limits, st.integers(1, 60))
def test_suggestion_is_the_closest_possible_amount(have: Inventory, amount: int) -> None:
    def is_possible(number: int) -> bool:
        return find_miss([Amount('X', number)], Provider('p', {'X': have})).is_candidate

    suggestion = have.find_nearest_amount(amount, have.free)
    possible = [number for number in range(1, 128) if is_possible(number)]
    if suggestion is None:
        assert possible == []
    else:
        assert is_possible(suggestion)
        assert abs(suggestion - amount) == min(abs(number - amount) for number in possible)


# Providers that cannot be explained


def test_class_that_another_provider_may_share_is_unexplained() -> None:
    query = parse_query(f'{GUEST},VGPU:1')
    assert explain_uncovered(query, Provider('p', ROOMY)) is None
    text = 'not explained: another provider of its aggregates may share VGPU with it'
    assert explain_uncovered(query, Provider('p', ROOMY, (), {AGGREGATE})) == text
    assert explain_uncovered(parse_query(GUEST), Provider('p', ROOMY, (), {AGGREGATE})) is None


@pytest.mark.parametrize(
    ('have', 'closed'), [(Inventory(4), False), (Inventory(4, 3), False), (Inventory(4, 4), True), (None, False)]
)
def test_provider_with_all_cpus_reserved_is_closed(have: Inventory | None, closed: bool) -> None:
    assert Provider('p', {} if have is None else {'VCPU': have}).is_closed is closed


@pytest.mark.parametrize('query', [exclude_disabled(GUEST), f'{GUEST}&required=!{DISABLED}'])
def test_no_change_is_suggested_for_a_disabled_provider(query: str) -> None:
    disabled = Provider('d', {**ROOMY, 'VCPU': Inventory(4, used=4)}, {DISABLED})
    assert list_failures(query, disabled) == ['is disabled', 'VCPU short by 1 (free 0 of 4)']
    assert suggest_change(query, disabled) is None
    # A change for another provider is proposed, even if that provider lacks more.
    full = make_provider(VCPU=Inventory(4, used=4), DISK_GB=Inventory(1, used=1))
    assert suggest_change(query, Provider('d', ROOMY, {DISABLED}), full) == 'free 1 VCPU and 1 DISK_GB on p'
    # A query may require the trait of disabled providers.
    assert list_failures(exclude_disabled(f'{GUEST}&required={DISABLED}'), Provider('d', ROOMY, {DISABLED})) == []
    assert suggest_change(f'{GUEST}&required={DISABLED}', make_provider()) == f'remove required={DISABLED}'


# Placement queries: checked for errors, and the names in them.


# Errors are found before placement is asked. Queries and their parts are in tests/golden/texts/requests.txt.


SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
SOME_AGGREGATE = 'a66e9a7e-0000-4000-8000-000000000001'


def test_query_beside_a_flavor_needs_no_resources() -> None:
    assert check_query('required=A', needs_resources=False) == 'required=A'
    assert check_query('', needs_resources=False) == ''


@pytest.mark.parametrize('parameter', ['in_tree', 'in_tree1'])
def test_in_tree_cannot_be_combined_with_on(parameter: str) -> None:
    query = f'{SMALL}&{parameter}={SOME_AGGREGATE}'
    assert check_query(query) == query
    with pytest.raises(ValueError, match=f'--on cannot be combined with {parameter}='):
        check_query(query, has_on_option=True)


@pytest.mark.parametrize('query', [SMALL, 'resources1=VCPU:1&resources_2=MEMORY_MB:1', f'{SMALL}&required=A&limit=1'])
def test_restriction_of_on_is_found_again(query: str) -> None:
    assert split_restriction(restrict_to_compute(query, SOME_AGGREGATE)) == (query, SOME_AGGREGATE)
    assert split_restriction(query) == (query, '')


@pytest.mark.parametrize('part', ['in_tree1={0}', 'in_tree={0}&required=A', 'in_tree={0}&in_tree1={0}'])
def test_other_restrictions_are_kept(part: str) -> None:
    query = f'{SMALL}&{part.format(SOME_AGGREGATE)}'
    assert split_restriction(query) == (query, '')


@pytest.mark.parametrize('name', ['hv1', 'HV1', 'hv%31', ' hv1', 'hv1+'])
@pytest.mark.parametrize('parameter', ['in_tree', 'in_tree1', 'in_tree_A-b'])
def test_host_names_become_uuids(name: str, parameter: str) -> None:
    hosts = {'hv1': SOME_AGGREGATE, 'HV1': SOME_AGGREGATE}
    query = f'{SMALL}&{parameter}={name}&required=in_tree=x'
    assert resolve_trees(query, hosts.__getitem__) == query.replace(f'={name}&', f'={SOME_AGGREGATE}&')


def test_only_host_names_are_replaced() -> None:
    query = f'in_tree={SOME_AGGREGATE}&in_tree=&{SMALL}&xin_tree=hv1&required=in_tree'
    assert resolve_trees(query, {}.__getitem__) == query


def test_named_lists_classes_and_traits() -> None:
    query = f'{SMALL}&required=A,!B&root_required=C&required1=in:D,E&resources1=CUSTOM_G:1&member_of={SOME_AGGREGATE}'
    assert parse_names(query) == QueryNames(frozenset(['VCPU', 'DISK_GB', 'MEMORY_MB', 'CUSTOM_G']), frozenset('ABCDE'))


# Where the guests of dead hosts would go.


def make_guest(name: str, compute: str, query: str = '1', group: Group | None = None, weigh: str = SPREAD) -> Evacuee:
    """Make a guest whose query is its number of VCPU."""
    why = PlacementReason(weigh, None, 1)
    membership = group.membership if group else None
    return Evacuee(compute, Request(name, {compute: {'VCPU': 1}}, name=name, query=query, group=membership, why=why))


def make_planner(
    free: Mapping[str, int],
    queries: Iterable[str] = ('1', '2'),
    groups: Sequence[Group] = (),
    refusals: Mapping[str, str] = {},
) -> Planner:
    """Make a planner for computes of ten VCPU with this many free, which offer what fits."""
    rooms = {compute: {'VCPU': Room(10, 10 - amount)} for compute, amount in free.items()}
    offers = {
        query: Offer([{each: {'VCPU': int(query[0])}} for each in free if free[each] >= int(query[0])], rooms)
        for query in queries
    }
    named = {group.name: group for group in groups}
    return Planner(offers, named, free, random.Random(1), refusals)


def read_places(plan: Iterable[Move]) -> dict[str, str | None]:
    return {move.guest.request.instance: move.candidate and move.candidate.compute for move in plan}


def read_reasons(plan: Iterable[Move]) -> dict[str, str]:
    return {move.guest.request.instance: move.reason for move in plan if move.candidate is None}


def test_the_emptiest_host_comes_first_and_larger_guests_before_smaller_ones() -> None:
    planner = make_planner({'a': 10, 'b': 3, 'c': 2})
    guests = [make_guest('s1', 'a'), make_guest('s2', 'a'), make_guest('large', 'a', '2')]
    assert read_places(plan_moves(planner, guests, {'a'})) == {'large': 'b', 's1': 'c', 's2': 'b'}
    assert read_places(plan_moves(planner, guests[:1], {'a', 'b'})) == {'s1': 'c'}
    packed = [make_guest('p1', 'a', weigh=PACK), make_guest('p2', 'a', weigh=PACK)]
    assert read_places(plan_moves(planner, packed, {'a'})) == {'p1': 'c', 'p2': 'c'}
    assert read_places(plan_moves(planner, [make_guest('f1', 'a', weigh=FIRST)], {'a'})) == {'f1': 'b'}


def test_a_plan_leaves_the_room_of_the_next_plan_alone() -> None:
    planner = make_planner({'a': 1, 'b': 1})
    for _ in range(2):
        assert read_places(plan_moves(planner, [make_guest('x', 'a')], {'a'})) == {'x': 'b'}
        assert read_places(plan_moves(planner, [make_guest('y', 'b')], {'b'})) == {'y': 'a'}


def test_guests_without_room_have_the_words_of_a_refusal() -> None:
    planner = make_planner({'a': 5, 'b': 2, 'c': 1})
    few = [make_guest(f's{number}', 'a') for number in range(5)]
    plan = plan_moves(planner, few, {'a'})
    assert read_reasons(plan) == dict.fromkeys(('s3', 's4'), 'there is room for 3 of 5')
    assert Counter(read_places(plan).values()) == {'b': 2, 'c': 1, None: 2}
    none = plan_moves(planner, [make_guest('large', 'a', '2')], {'a', 'b'})
    assert read_reasons(none) == {'large': 'no compute satisfies the whole query'}
    taken = plan_moves(planner, [make_guest('large', 'a', '2'), make_guest('s', 'a')], {'a', 'c'})
    assert read_reasons(taken) == {'s': 'other guests took all the room first'}
    last = plan_moves(make_planner({'a': 5}), [make_guest('s', 'a')], {'a'})
    assert read_reasons(last) == {'s': 'no compute is alive. Fix: start ecompute on a host'}


def test_what_has_no_answer_has_no_place_and_may_be_unknown() -> None:
    on_a, on_b = '1&in_tree=a', '1&in_tree=b'
    planner = make_planner({'a': 5, 'b': 5}, ('1&limit=2', '1&limit=3', on_b), refusals={'odd': 'placement refuses it'})
    guests = [make_guest(query, 'a', query) for query in ('odd', on_a, on_b, '1&limit=2', '1&limit=3', '')]
    guests.append(Evacuee('a', InvalidRequest('malformed', 'it is no JSON')))
    plan = plan_moves(planner, guests, {'a'})
    assert {move.guest.request.instance: move.is_known for move in plan if move.candidate is None} == {
        'odd': True, on_a: True, '1&limit=2': False, '': False, 'malformed': False,
    }  # fmt: skip
    reasons = read_reasons(plan)
    assert (reasons['odd'], reasons[on_a]) == ('placement refuses it', 'its query allows only a (in_tree=, or --on)')
    assert reasons['malformed'] == 'not known: it is no JSON'
    assert {name for name, place in read_places(plan).items() if place} == {on_b, '1&limit=3'}


def test_dead_members_do_not_count_and_others_exclude_their_hosts() -> None:
    anti = Group('anti', ANTI_AFFINITY, True, {'x': 'a', 'y': 'b', 'dead': 'a'})
    planner = make_planner({'a': 5, 'b': 9, 'c': 1, 'd': 1}, groups=[anti])
    guests = [make_guest('x', 'a', group=anti), make_guest('dead', 'a', group=anti)]
    assert set(read_places(plan_moves(planner, guests, {'a'})).values()) == {'c', 'd'}
    both = plan_moves(planner, [*guests, make_guest('y', 'b', group=anti)], {'a', 'b'})
    assert read_reasons(both) == {'y': 'there is room for 2 of 3 in group anti (strict anti-affinity)'}
    alone = plan_moves(make_planner({'a': 5, 'b': 9}, groups=[anti]), guests[:1], {'a'})
    excluded = 'there is room, but not where group anti allows it (strict anti-affinity)'
    assert read_reasons(alone) == {'x': excluded}
    soft, near = (
        Group('soft', ANTI_AFFINITY, False, {'x': 'a', 'y': 'b'}),
        Group('near', AFFINITY, False, {'x': 'a', 'y': 'c'}),
    )
    planner = make_planner({'a': 5, 'b': 9, 'c': 2}, groups=[soft, near])
    assert read_places(plan_moves(planner, [make_guest('x', 'a', group=soft)], {'a'})) == {'x': 'c'}
    assert read_places(plan_moves(planner, [make_guest('x', 'a', group=soft)], {'a', 'c'})) == {'x': 'b'}
    assert read_places(plan_moves(planner, [make_guest('x', 'a', group=near)], {'a'})) == {'x': 'c'}


def test_a_group_of_one_host_moves_as_a_whole_or_not() -> None:
    near = Group('near', AFFINITY, True, {'n1': 'a', 'n2': 'a', 'm': 'a'})
    guests = [make_guest('n1', 'a', group=near), make_guest('n2', 'a', group=near), make_guest('m', 'a', '2', near)]
    planner = make_planner({'a': 9, 'b': 4, 'c': 3, 'd': 3}, groups=[near])
    assert set(read_places(plan_moves(planner, guests, {'a'})).values()) == {'b'}
    plan = plan_moves(planner, guests, {'a', 'b'})
    reason = 'there is room for 2 of 3 in group near (strict affinity)'
    assert read_reasons(plan) == dict.fromkeys(('n1', 'n2', 'm'), reason)
    # The room that it did not take is left to others.
    places = read_places(plan_moves(planner, [*guests, make_guest('s1', 'a'), make_guest('s2', 'a')], {'a', 'b', 'd'}))
    assert places == {'n1': None, 'n2': None, 'm': None, 's1': 'c', 's2': 'c'}
    pinned = [*guests[:2], make_guest('m', 'a', '2&in_tree=a', near)]
    plan = plan_moves(planner, pinned, {'a'})
    stays = 'group near has to stay together, and its member m does not move'
    assert read_reasons(plan) == {'m': 'its query allows only a (in_tree=, or --on)', 'n1': stays, 'n2': stays}


def test_what_a_dead_host_shares_is_no_candidate() -> None:
    candidates: list[Allocations] = [
        {'b': {'VCPU': 1}, 'a': {'DISK_GB': 1}},
        {'b': {'VCPU': 1}, 'store': {'DISK_GB': 1}},
        {'c': {'VCPU': 1, 'DISK_GB': 1}},
    ]
    rooms = {
        'a': {'DISK_GB': Room(9, 0)},
        'b': {'VCPU': Room(9, 0)},
        'c': {'VCPU': Room(9, 8)},
        'store': {'DISK_GB': Room(1, 0)},
    }
    planner = Planner({'1': Offer(candidates, rooms)}, {}, {'b', 'c'}, random.Random(1))
    guests = [make_guest('x', 'a'), make_guest('y', 'a'), make_guest('z', 'a')]
    plan = plan_moves(planner, guests, {'a'})
    # The shared disk has room for one guest.
    assert Counter(read_places(plan).values()) == {'b': 1, 'c': 1, None: 1}
    assert all('a' not in move.candidate.allocations for move in plan if move.candidate)


def make_cluster(rng: random.Random) -> tuple[Planner, dict[str, list[Evacuee]]]:
    """Make a random cluster of twelve hosts with 60 guests of six kinds and three queries."""
    hosts = [f'h{number}' for number in range(12)]
    weigh = rng.choice([SPREAD, PACK, FIRST])
    policies = [(policy, strict) for policy in (AFFINITY, ANTI_AFFINITY) for strict in (True, False)]
    kinds = [None, None, *(Group(f'{policy}-{strict}', policy, strict) for policy, strict in policies)]
    members: dict[str, dict[str, str]] = {kind.name: {} for kind in kinds if kind}
    guests: dict[str, list[Evacuee]] = {host: [] for host in hosts}
    home = rng.choice(hosts)
    for number in range(60):
        kind, host = rng.choice(kinds), rng.choice(hosts)
        if kind is not None and kind.strict:
            host = home if kind.policy == AFFINITY else host
            if kind.policy == ANTI_AFFINITY and host in members[kind.name].values():
                kind = None
        if kind is not None:
            members[kind.name][f'g{number}'] = host
        guests[host].append(make_guest(f'g{number}', host, rng.choice('123'), kind, weigh))
    groups = [Group(kind.name, kind.policy, kind.strict, members[kind.name]) for kind in kinds if kind]
    free = {host: rng.randrange(7) for host in hosts}
    return make_planner(free, '123', groups), guests


@pytest.mark.parametrize('seed', range(40))
def test_plans_keep_to_the_room_and_the_groups(seed: int) -> None:
    planner, guests = make_cluster(random.Random(seed))
    for dead in [[host] for host in guests] + [['h1', 'h2'], ['h3', 'h4', 'h5']]:
        moves = plan_moves(planner, [guest for host in dead for guest in guests[host]], dead)
        plan = read_places(moves)
        used = Counter[str]()
        for host in dead:
            for guest in guests[host]:
                place = plan[guest.request.instance]
                assert place not in dead
                if place is not None:
                    assert isinstance(guest.request, Request)
                    used[place] += int(guest.request.query or '')
        assert all(amount <= 10 - planner.rooms[host]['VCPU'].used for host, amount in used.items())
        for group in planner.groups.values():
            moved = {name: plan[name] or '' for name, host in group.members.items() if host in dead}
            living = {name: host for name, host in group.members.items() if host not in dead}
            assert Group(group.name, group.policy, group.strict, living | moved).list_breaches() == []


def test_list_trees_reads_each_in_tree_of_a_query() -> None:
    assert list_trees('resources=VCPU:1') == set()
    assert list_trees('resources=VCPU:1&in_tree=a&resources1=CUSTOM_GPU:1&in_tree1= b') == {'a', 'b'}
