"""All scenarios."""

from __future__ import annotations

from tests.model import (
    scenarios_adopted,
    scenarios_changed,
    scenarios_claims,
    scenarios_evacuated,
    scenarios_losses,
    scenarios_once,
    scenarios_operators,
    scenarios_pairs,
    scenarios_queues,
    scenarios_registered,
    scenarios_resized,
    scenarios_restored,
    scenarios_returning,
    scenarios_shared,
    scenarios_stacks,
    scenarios_strangers,
    scenarios_threads,
    scenarios_unanswered,
)
from tests.model.explorer import Scenario

MODULES = (
    *(scenarios_claims, scenarios_operators, scenarios_queues, scenarios_shared, scenarios_registered),
    *(scenarios_pairs, scenarios_strangers, scenarios_losses, scenarios_threads, scenarios_returning),
    *(scenarios_restored, scenarios_stacks, scenarios_evacuated, scenarios_once, scenarios_unanswered),
    scenarios_adopted,
    scenarios_changed,
    scenarios_resized,
)
SCENARIOS: dict[str, Scenario] = {each.name: each for room in MODULES for each in room.SCENARIOS}
