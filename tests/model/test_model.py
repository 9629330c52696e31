"""The guarantees under every interleaving: each scenario runs a number of schedules.

A finding is printed as a story that `python -m tests.model --replay` repeats.
"""

from __future__ import annotations

import datetime
import subprocess
import sys
from functools import partial

import pytest

from ecomp.model import keys
from ecomp.model.group import Group
from ecomp.model.order import NameOwner
from ecomp.model.quota import Quota
from ecomp.model.stored import encode
from ecomp.placement import allocations
from ecomp.scheduler.operations.audit import audit
from ecomp.store.client import Delete, Put
from tests.kit.servers import TOP, make_environment
from tests.model import explorer
from tests.model.acting import Bounds
from tests.model.cloud import A, Cloud, U, V
from tests.model.explorer import Check, Exploration, RecordingChooser, Scenario, encode_choices, explore, replay, search
from tests.model.rest import check_left_alone
from tests.model.scenarios import SCENARIOS
from tests.model.scenarios_pairs import make_active
from tests.model.virtual import enter_world, patch_environment
from tests.model.world import World

# Schedules of each scenario in every run, always the same; the seed of the day explores others.
SCHEDULES_OF_EACH = 8
# The seed of the day gets two minutes in every run, in parts that run beside each other.
PARTS_OF_THE_DAY = 6
SECONDS_OF_A_PART = 20
# Schedules of each scenario with --all: about ten minutes for all scenarios.
SCHEDULES_OF_EACH_SLOW = 2_000


@pytest.mark.parametrize('name', SCENARIOS)
def test_scenario_keeps_the_guarantees(name: str) -> None:
    fail_on_findings(name, search(SCENARIOS[name], SCHEDULES_OF_EACH))


@pytest.mark.slow
@pytest.mark.parametrize('name', SCENARIOS)
def test_scenario_keeps_the_guarantees_for_long(name: str) -> None:
    fail_on_findings(name, search(SCENARIOS[name], SCHEDULES_OF_EACH_SLOW, seed=2))


def fail_on_findings(name: str, result: Exploration) -> None:
    for finding in result.findings:
        violations = '\n'.join(f'WRONG: {violation}' for violation in finding.violations)
        pytest.fail(
            f'{SCENARIOS[name].title}\n{finding.story}\n{violations}\n{finding.encode(SCENARIOS[name])}', pytrace=False
        )


@pytest.mark.parametrize('part', range(PARTS_OF_THE_DAY))
def test_scenarios_keep_the_guarantees_with_the_seed_of_the_day(part: int) -> None:
    """Explore other schedules each day, with one more of everything than a scenario's bounds."""
    seed = datetime.datetime.now(datetime.UTC).date().toordinal()
    scenarios = list(SCENARIOS)[part::PARTS_OF_THE_DAY]
    command = [
        sys.executable,
        '-m',
        'tests.model',
        '--seconds',
        str(SECONDS_OF_A_PART),
        '--seed',
        str(seed),
        *scenarios,
    ]
    completed = subprocess.run(command, cwd=TOP, env=make_environment(), capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stdout + completed.stderr


def test_every_scenario_has_a_title() -> None:
    assert all(scenario.title for scenario in SCENARIOS.values())


# A leak that is planted in the state is found by the product's audit, and by the properties at rest


def make_put(key: str, value: str) -> object:
    return lambda cloud: cloud.store.commit([], [Put(key, value)])


def make_delete(key: str) -> object:
    return lambda cloud: cloud.store.commit([], [Delete(key)])


def add_domain(cloud: Cloud) -> None:
    hypervisor = cloud.computes[A].hypervisor
    guest = hypervisor.list_guests()[U]
    hypervisor._guests[V] = type(guest)(V, A, defined=True, running=True, disk=True)


def remove_domain(cloud: Cloud) -> None:
    cloud.computes[A].hypervisor.destroy(U, A)
    cloud.computes[A].hypervisor.delete_disk(U)


LEAKS = {
    'a claim': lambda cloud: cloud.claim(V, A),
    'a claim that is gone': lambda cloud: allocations.release_once(
        cloud.placement, U, allocations.read_consumer(cloud.placement, U)
    ),
    'a name': make_put(keys.name('other'), encode(NameOwner(V))),
    'a name that is gone': make_delete(keys.name('web')),
    'a member of a group': make_put(keys.group('h'), encode(Group('h', 'affinity', True, {V: A}))),
    'a quota that counts too much': make_put(keys.quota('p'), encode(Quota('p', {'instances': 5}, {'instances': 2}))),
    'an address': make_put(keys.address(V), '10.0.0.1'),
    'an address that is gone': make_delete(keys.address(U)),
    'a request that is gone': make_delete(keys.request(A, U)),
    'a domain': add_domain,
    'a domain that is gone': remove_domain,
    'a reservation': lambda cloud: cloud.computes[A].hypervisor.reserve_address(V, '52:54:00:00:00:01', 'default'),
}


@pytest.mark.fast
@pytest.mark.parametrize('leak', LEAKS)
def test_a_planted_leak_is_found(leak: str) -> None:
    world = World(Bounds(), RecordingChooser())
    with patch_environment(), enter_world(world):
        cloud = Cloud(world)
        cloud.set_instance_limit(5)
        make_active(cloud)
        assert audit(cloud.store, cloud.placement, is_now=True).findings == []
        LEAKS[leak](cloud)  # type: ignore[operator]
        assert audit(cloud.store, cloud.placement, is_now=True).findings != []


def test_a_planted_leak_is_found_at_rest() -> None:
    def scene(cloud: Cloud) -> None:
        """A claim of an unknown consumer, on a compute that never checks claims."""
        host = cloud.add_host(A)
        host.reconcile = lambda: None  # type: ignore[method-assign]
        cloud.claim(V, A)
        cloud.add_create('eschedule', U)

    result = explore(Scenario(scene, Bounds(0, 0)))
    assert [finding.violations[0] for finding in result.findings] == [
        "the claim of V is leaked: {'A': {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}}"
    ]


# The explorer itself


@pytest.mark.fast
def test_explore_reaches_every_final_state() -> None:
    final_values: set[bytes] = set()

    def scene(cloud: Cloud) -> Check:
        """Two actors each read a key and write it back with a letter appended, without comparing."""

        def append_letter(letter: str) -> None:
            before = cloud.store.get('/x')
            cloud.store.commit([], [Put('/x', (before.value.decode() if before else '') + letter)])

        for letter in 'ab':
            cloud.add_actor(letter, partial(append_letter, letter), mortal=False)

        def check() -> list[str]:
            final_values.add(cloud.etcd.entries['/x'].value)
            return ['it is not left alone']

        return check

    assert explore(Scenario(scene, Bounds(9, 0)), stop_at_first=False).exhausted
    assert final_values == {b'a', b'b', b'ab', b'ba'}


@pytest.mark.fast
def test_replay_repeats_an_encoded_schedule() -> None:
    scenario = SCENARIOS['set_against_single']
    world = World(scenario.bounds, chooser := RecordingChooser())
    with patch_environment(), enter_world(world):
        cloud = Cloud(world)
        scenario.scene(cloud)
        world.run()
        assert check_left_alone(cloud) == []
    name, choices = explorer.decode_choices(encode_choices(scenario.name, chooser.choices))
    assert (name, choices) == (scenario.name, list(chooser.choices))
    violations, story = replay(scenario, choices)
    assert violations == []
    assert len(story.splitlines()) == len(world.steps)
