"""All scenarios, and which of them show a defect that is known and not mended yet."""

from __future__ import annotations

from tests.model import (
    scenarios_claims,
    scenarios_life,
    scenarios_operators,
    scenarios_queues,
    scenarios_shared,
)
from tests.model.explorer import Scenario

ROOMS = (scenarios_claims, scenarios_operators, scenarios_queues, scenarios_shared, scenarios_life)
SCENARIOS: dict[str, Scenario] = {each.name: each for room in ROOMS for each in room.SCENARIOS}

EXPECTED = {
    'orphan_consumer': 'A1',
    'orphan_consumer_taken_over': 'A1',
    'queue_orphan_consumer': 'A1',
    'late_release': 'A2',
    'interrupted': 'A2',
    'late_release_ample': 'A3',
    'claim_keeper': 'A4',
    'restarted_taker': 'A5',
    'drain_and_create': 'A6',
    'forget_and_create': 'A7',
    'forget_with_another': 'A7',
    'fix_and_create': 'A8',
    'first_quota_twice': 'A12',
    # Exit 3, "no allocations left", and another eschedule of the same uuid holds or has delivered it: exit 0, or 5.
    'one_place_twice': 'A19',
}
"""The letter of the defect each of these finds: who mends it takes it out, and from then on it must find nothing."""
