"""All scenarios, and which of them show a defect that is known and not mended yet."""

from __future__ import annotations

from tests.model import (
    scenarios_claims,
    scenarios_hosts,
    scenarios_life,
    scenarios_operators,
    scenarios_queues,
    scenarios_shared,
)
from tests.model.explorer import Scenario

ROOMS = (scenarios_claims, scenarios_operators, scenarios_queues, scenarios_shared, scenarios_life, scenarios_hosts)
SCENARIOS: dict[str, Scenario] = {each.name: each for room in ROOMS for each in room.SCENARIOS}

EXPECTED: dict[str, str] = {}
"""The letter of the defect each of these finds: who mends it takes it out, and from then on it must find nothing."""
