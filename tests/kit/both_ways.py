"""Each test of a module once by each of the two ways to placement: import `each_way` into the module."""

from __future__ import annotations

import pytest

from ecomp.placement.client import Placement


@pytest.fixture(autouse=True, params=[False, True], ids=['by requests', 'light'])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Placement that the test makes goes this way."""
    if not request.param:
        monkeypatch.setattr(Placement, '_light', Placement._by_requests)
