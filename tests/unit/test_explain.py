"""Placement queries, and explanations of a failed one: each provider's failures and the smallest change.

The rules are compared with placement in tests/functional/test_scheduler_explain.py.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model.allocation import MAX_AMOUNT, Inventory
from ecomp.model.explain import (
    Cure,
    Miss,
    Provider,
    apply_cures,
    explain_uncovered,
    find_miss,
    find_smallest_miss,
    format_cures,
    sort_misses,
)
from ecomp.model.query import (
    Amount,
    Exclusion,
    QueryNames,
    Requirement,
    check_query,
    exclude_disabled,
    format_query,
    parse_names,
    parse_query,
    resolve_trees,
    restrict_to_compute,
    split_restriction,
)
from ecomp.model.status import DISABLED

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
    order = [
        candidate.provider for candidate in sort_misses([find_miss(query, candidate) for candidate in (two, far, near)])
    ]
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
    after = apply_cures(before, cures)
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


def test_nested_and_sharing_providers_are_unexplained() -> None:
    query = parse_query(GUEST)
    near = Provider('p', ROOMY, (), {AGGREGATE})
    shares = Provider('s', {'DISK_GB': Inventory(1)}, (), {AGGREGATE, OTHER})
    assert explain_uncovered(query, near, []) is None
    assert explain_uncovered(query, near, [shares]) == 'provider s shares resources with it'
    assert explain_uncovered(query, Provider('p', ROOMY, (), {'elsewhere'}), [shares]) is None
    assert explain_uncovered(query, near, [Provider('s', {'VGPU': Inventory(1)}, (), {AGGREGATE})]) is None
    assert explain_uncovered(query, shares, [shares]) == 'it shares resources with other providers'
    assert (
        explain_uncovered(query, Provider('p', ROOMY, is_standalone=False), []) == 'its resource providers are nested'
    )


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
