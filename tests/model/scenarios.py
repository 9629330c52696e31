"""All scenarios, and which of them show a defect that is known and not mended yet."""

from __future__ import annotations

from tests.model import (
    scenarios_claims,
    scenarios_hosts,
    scenarios_life,
    scenarios_operators,
    scenarios_queues,
    scenarios_shared,
    scenarios_three,
)
from tests.model.explorer import Scenario

ROOMS = (
    *(scenarios_claims, scenarios_operators, scenarios_queues, scenarios_shared, scenarios_life, scenarios_hosts),
    scenarios_three,
)
SCENARIOS: dict[str, Scenario] = {each.name: each for room in ROOMS for each in room.SCENARIOS}

EXPECTED: dict[str, str] = {'two_resumes_and_a_late_release': 'A20', 'forget_and_taker': 'A20'}
"""The letter of the defect each of these finds: who mends it takes it out, and from then on it must find nothing.

A20: placement counts a claim's generation from 1 again once it was released, and a release that read its number before
that and is sent after the next claim but one has the same meets it. ABOVE of ecomp.scheduler.create and the takers'
marks keep apart what is likely, and nobody releases by what he read more than STALE seconds before
(ecomp.placement.allocations). These need somebody who stands still for less than that, while two others come and go.
Time stands still here.
"""
