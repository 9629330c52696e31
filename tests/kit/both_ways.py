"""Each test of a module once by each of the two ways to placement: import `each_way` into the module."""

from __future__ import annotations

from functools import partialmethod

import pytest

from ecomp.placement.client import Placement


@pytest.fixture(autouse=True, params=[False, True], ids=['by requests', 'light'])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every Placement that the test makes goes this way."""
    monkeypatch.setattr(Placement, '__init__', partialmethod(Placement.__init__, light=request.param))
