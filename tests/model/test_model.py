"""The guarantees under every interleaving: each scenario runs a number of schedules.

A finding is printed as a story that `python -m tests.model --replay` repeats.
"""

from __future__ import annotations

from functools import partial

import pytest

from ecomp.model import keys
from ecomp.model.group import Group
from ecomp.model.group import to_json as group_json
from ecomp.model.order import name_to_json
from ecomp.model.quota import Quota
from ecomp.model.quota import to_json as quota_json
from ecomp.placement import allocations
from ecomp.scheduler.operating.audit import audit
from ecomp.store.client import Delete, Put
from tests.model.acting import Bounds
from tests.model.cloud import A, Cloud, U, V
from tests.model.explorer import Check, Explored, Follow, Scenario, decode, encode, explore, look_for, replay
from tests.model.rest import left_alone
from tests.model.scenarios import SCENARIOS
from tests.model.scenarios_pairs import active
from tests.model.virtual import inside, virtual
from tests.model.world import World

# Schedules of each scenario in every run: about 20 seconds for all scenarios.
SCHEDULES = 30
# Schedules of each scenario with --all: about ten minutes for all scenarios.
MANY = 2_000


@pytest.mark.parametrize('name', SCENARIOS)
def test_nothing_is_lost_doubled_or_leaked(name: str) -> None:
    judge(name, look_for(SCENARIOS[name], SCHEDULES))


@pytest.mark.slow
@pytest.mark.parametrize('name', SCENARIOS)
def test_nor_in_many_more(name: str) -> None:
    judge(name, look_for(SCENARIOS[name], MANY, seed=2))


def judge(name: str, found: Explored) -> None:
    for finding in found.findings:
        violations = '\n'.join(f'WRONG: {violation}' for violation in finding.wrong)
        pytest.fail(
            f'{SCENARIOS[name].title}\n{finding.story}\n{violations}\n{finding.replay(SCENARIOS[name])}', pytrace=False
        )


def test_every_scenario_has_a_title() -> None:
    assert all(scenario.title for scenario in SCENARIOS.values())


# A leak that is planted in the state is found by the product's audit, and by the properties at rest


def _put(key: str, value: str) -> object:
    return lambda cloud: cloud.store.commit([], [Put(key, value)])


def _delete(key: str) -> object:
    return lambda cloud: cloud.store.commit([], [Delete(key)])


def _domain(cloud: Cloud) -> None:
    hypervisor = cloud.computes[A].hypervisor
    guest = hypervisor.guests()[U]
    hypervisor._guests[V] = type(guest)(V, A, defined=True, running=True, disk=True)


def _domain_gone(cloud: Cloud) -> None:
    cloud.computes[A].hypervisor.destroy(U, A)
    cloud.computes[A].hypervisor.delete_disk(U)


LEAKS = {
    'a claim': lambda cloud: cloud.claimed(V, A),
    'a claim that is gone': lambda cloud: allocations.release_once(
        cloud.placement, U, allocations.consumer(cloud.placement, U)
    ),
    'a name': _put(keys.name('other'), name_to_json(V)),
    'a name that is gone': _delete(keys.name('web')),
    'a member of a group': _put(keys.group('h'), group_json(Group('h', 'affinity', True, {V: A}))),
    'a quota that counts too much': _put(keys.quota('p'), quota_json(Quota('p', {'instances': 5}, {'instances': 2}))),
    'an address': _put(keys.booted(V), '10.0.0.1'),
    'an address that is gone': _delete(keys.booted(U)),
    'a request that is gone': _delete(keys.request(A, U)),
    'a domain': _domain,
    'a domain that is gone': _domain_gone,
    'a reservation': lambda cloud: cloud.computes[A].hypervisor.reserve(V, '52:54:00:00:00:01', 'default'),
}


@pytest.mark.fast
@pytest.mark.parametrize('leak', LEAKS)
def test_a_planted_leak_is_found(leak: str) -> None:
    world = World(Bounds(), Follow())
    with virtual(), inside(world):
        cloud = Cloud(world)
        cloud.limited(5)
        active(cloud)
        assert audit(cloud.store, cloud.placement).findings == []
        LEAKS[leak](cloud)  # type: ignore[operator]
        assert audit(cloud.store, cloud.placement).findings != []


def test_a_planted_leak_is_found_at_rest() -> None:
    def scene(cloud: Cloud) -> None:
        """A claim of an unknown consumer, on a compute that never checks claims."""
        host = cloud.host(A)
        host.keep_claims = lambda: None  # type: ignore[method-assign]
        cloud.claimed(V, A)
        cloud.creates('eschedule', U)

    result = explore(Scenario(scene, Bounds(0, 0)))
    assert [finding.wrong[0] for finding in result.findings] == [
        "the claim of V is leaked: {'A': {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}}"
    ]


# The explorer itself


@pytest.mark.fast
def test_every_end_that_can_be_is_met() -> None:
    final_values: set[bytes] = set()

    def scene(cloud: Cloud) -> Check:
        """Two actors each read a key and write it back with a letter appended, without comparing."""

        def append_letter(letter: str) -> None:
            before = cloud.store.get('/x')
            cloud.store.commit([], [Put('/x', (before.value.decode() if before else '') + letter)])

        for letter in 'ab':
            cloud.act(letter, partial(append_letter, letter), mortal=False)

        def check() -> list[str]:
            final_values.add(cloud.etcd.entries['/x'].value)
            return ['it is not left alone']

        return check

    assert explore(Scenario(scene, Bounds(9, 0)), first=False).exhausted
    assert final_values == {b'a', b'b', b'ab', b'ba'}


@pytest.mark.fast
def test_what_is_found_is_replayed() -> None:
    scenario = SCENARIOS['set_against_single']
    world = World(scenario.bounds, chooser := Follow())
    with virtual(), inside(world):
        cloud = Cloud(world)
        scenario.scene(cloud)
        world.run()
        assert left_alone(cloud) == []
    name, choices = decode(encode(scenario.name, chooser.choices))
    assert (name, choices) == (scenario.name, list(chooser.choices))
    violations, story = replay(scenario, choices)
    assert violations == []
    assert len(story.splitlines()) == len(world.steps)
