"""What an ecompute says of the room it has left: what its requests hold of it."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.commands import Control, Ecompute
from tests.kit.servers import until
from tests.kit.story import SMALL, addressed, notified

RENEWALS = 45
"""Seconds in which it has renewed its lease more than once."""


def room(cluster: Control, compute: str) -> dict[str, Any] | None:
    """What it says."""
    found: dict[str, Any] | None = json.loads(cluster.etcd.get(f'/computes/{compute}') or b'{}').get('room')
    return found


def test_a_compute_says_what_it_has_left_and_a_create_by_that_finds_it(cluster: Control, compute: Ecompute) -> None:
    until(lambda: room(cluster, compute.uuid), RENEWALS, 'it says what it has')
    whole = room(cluster, compute.uuid)
    assert whole is not None
    assert {each[1] for each in whole.values()} == {100}
    place = notified(cluster.eschedule(SMALL))
    assert place[0] == compute.uuid
    addressed(cluster, place[1])
    until(lambda: room(cluster, compute.uuid) not in (whole, None), RENEWALS, 'it says that something is used')
    now = room(cluster, compute.uuid)
    assert now is not None
    assert {name: each[0] for name, each in now.items()} == {name: each[0] for name, each in whole.items()}
    assert all(each[1] < 100 for each in now.values())
    assert cluster.eschedule('destroy', '--wait', place[1]).code == 0
    until(lambda: room(cluster, compute.uuid) == whole, RENEWALS, 'it says that nothing is used any more')
