"""Each planted bug is found. One that is not shows an unchecked behaviour."""

from __future__ import annotations

import importlib

import pytest

from tests.model.mutations import MUTATIONS, detect
from tests.model.planting import (
    Misplaced,
    Plant,
    drop_operand,
    drop_statement,
    never,
    plant_bugs,
    replace_call,
    return_constant,
)
from tests.model.scenarios import SCENARIOS


@pytest.mark.parametrize('name', MUTATIONS)
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


@pytest.mark.fast
@pytest.mark.parametrize(
    ('where', 'change'),
    [
        ('ecomp.placement.allocations:no_such_function', return_constant(None)),
        ('ecomp.placement.allocations:release', drop_statement('no_such_name')),
        ('ecomp.placement.allocations:release', never('no_such_name')),
        ('ecomp.placement.allocations:release', drop_operand('no_such_name')),
        ('ecomp.placement.allocations:claim', replace_call('consumer_of', 'None')),
        ('ecomp.scheduler.operations.decommission:drained', drop_operand('placing')),
    ],
)
def test_plant_without_a_unique_place_is_misplaced(where: str, change: object) -> None:
    with pytest.raises(Misplaced, match=where.rpartition('.')[2]), plant_bugs([Plant(where, change)]):  # type: ignore[arg-type]
        pass
