"""Each planted bug is found. One that is not shows an unchecked behaviour."""

from __future__ import annotations

import importlib

import pytest

from tests.model.mutations import MUTATIONS, detect
from tests.model.planting import Plant, plant_bugs
from tests.model.scenarios import SCENARIOS

# Found only after more than 40 schedules, which take nine tenths of the time of all: `--planted` prints the numbers.
LATE = {
    "a change of a stack does not compare the stack's key", 'a change compares no request',
    'a compute that publishes does not restore groups', 'a create that was slow does not ask placement again',
    'a delivery does not compare its attempt', 'a destroy out of a queue does not compare the entry',
    'a destroy whose answer is lost is called not accepted', 'a first quota is counted once',
    'a group is not compared', 'a killed apply is never taken over',
    'a mark read back compares neither its lease nor its compute, and a claim is moved to another compute',
    'a name is not compared', 'a name of a new member is not compared',
    'a queued request does not compare its attempt', 'a quota is not compared',
    'a quota that is not there is not compared', 'a record is trusted wherever it is',
    'a claim is set to a request read before its generation',
    'a guest that has started with the resize before is unlike its record', 'a release is noted after it',
    'a rename compares no names', 'a request is left alone for ever once another compute held a claim for it',
    'a start does not ask what has ended', 'a taker does not exceed the generations released',
    'a taker does not note what it releases', 'a taker does not read its traits before it takes',
    'a taker that gives up does not ask for attempts',
    "an apply compares the stack's key neither after it announced nor as it delivers",
    "an apply does not check the stack's key after it announced",
    'an apply does not take over the claims of a killed one',
    'an adoption has its host leave guests out before it is disabled',
    'an adoption names guests that it has adopted before', 'an apply takes a refused claim for granted',
    'an apply that is refused keeps its claims', 'an attempt does not look for a delivery once it is announced',
    'an attempt that releases nothing calls its claim released', 'an equal claim is taken for ours',
    'an evacuation does not compare that the host is silent', 'an evacuation does not compare the old request',
    'an evacuation does not plan again after a lost race for room', 'an evacuation overwrites a request with its uuid',
    'an evacuation that is overtaken says that it changed nothing', 'a resize does not compare its attempt',
    'attempts are not read before a claim is corrected', 'attempts are read after requests',
    'the first key of a stack is written without a check', 'the incarnation does not rise',
    'undo does not ask who takes it from a queue', 'undo releases claims that the attempt did not make',
}  # fmt: skip
QUICK_OR_SLOW = [pytest.param(name, marks=[pytest.mark.slow] if name in LATE else []) for name in MUTATIONS]


def test_late_bugs_exist() -> None:
    assert MUTATIONS.keys() >= LATE


@pytest.mark.parametrize('name', QUICK_OR_SLOW)
def test_a_planted_bug_is_found(name: str) -> None:
    assert detect(name, SCENARIOS) is not None, f'nothing finds: {name}'


@pytest.mark.fast
@pytest.mark.parametrize('name', MUTATIONS)
def test_bug_has_its_place_and_scenarios(name: str) -> None:
    bug = MUTATIONS[name]
    assert [scenario for scenario in bug.scenarios if scenario not in SCENARIOS] == []
    codes = [read_code(plant) for plant in bug.plants]
    with plant_bugs(bug.plants):
        assert [read_code(plant) for plant in bug.plants] != codes
    assert [read_code(plant) for plant in bug.plants] == codes


def read_code(plant: Plant) -> object:
    """Return what a plant exchanges: the code of a function, or the value of a constant."""
    module, _, name = plant.target.partition(':')
    value: object = importlib.import_module(module)
    for part in name.split('.'):
        value = getattr(value, part)
    return getattr(value, '__code__', value)
