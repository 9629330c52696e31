"""How long to wait before something is tried again."""

from __future__ import annotations

from ecomp.model.backoff import Backoff


def test_it_doubles_up_to_its_last_and_begins_anew() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.next() == 0.5
