"""Each planted bug is found. One that is not shows an unchecked behaviour."""

from __future__ import annotations

import importlib

import pytest

from tests.model.mutations import MUTATIONS, detect
from tests.model.planting import Misplaced, Plant, becomes, drops, never, planted, returns, without
from tests.model.scenarios import SCENARIOS


@pytest.mark.parametrize('name', MUTATIONS)
def test_a_planted_bug_is_found(name: str) -> None:
    assert detect(name, SCENARIOS) is not None, f'nothing finds: {name}'


@pytest.mark.fast
@pytest.mark.parametrize('name', MUTATIONS)
def test_each_has_its_place_and_its_scenarios(name: str) -> None:
    bug = MUTATIONS[name]
    assert [scenario for scenario in bug.scenarios if scenario not in SCENARIOS] == []
    codes = [_code(plant) for plant in bug.plants]
    with planted(bug.plants):
        assert [_code(plant) for plant in bug.plants] != codes
    assert [_code(plant) for plant in bug.plants] == codes


def _code(plant: Plant) -> object:
    """Return what a plant exchanges: the code of a function, or the value of a constant."""
    module, _, name = plant.where.partition(':')
    value: object = importlib.import_module(module)
    for part in name.split('.'):
        value = getattr(value, part)
    return getattr(value, '__code__', value)


@pytest.mark.fast
@pytest.mark.parametrize(
    ('where', 'change'),
    [
        ('ecomp.placement.allocations:no_such_function', returns(None)),
        ('ecomp.placement.allocations:release', drops('no_such_name')),
        ('ecomp.placement.allocations:release', never('no_such_name')),
        ('ecomp.placement.allocations:release', without('no_such_name')),
        ('ecomp.placement.allocations:claim', becomes('consumer_of', 'None')),
        ('ecomp.scheduler.operating.decommission:drained', without('placing')),
    ],
)
def test_a_plant_without_its_one_place_says_so(where: str, change: object) -> None:
    with pytest.raises(Misplaced, match=where.rpartition('.')[2]), planted([Plant(where, change)]):  # type: ignore[arg-type]
        pass
