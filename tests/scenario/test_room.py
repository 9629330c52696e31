"""The room that an ecompute publishes in its presence key."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.commands import Control, Ecompute
from tests.kit.servers import until
from tests.kit.story import SMALL, addressed, notified

# Seconds in which a compute renews its lease more than once.
RENEWALS = 45


def room(cluster: Control, compute: str) -> dict[str, Any] | None:
    """Return the room that a compute publishes."""
    published: dict[str, Any] | None = json.loads(cluster.etcd.get(f'/computes/{compute}') or b'{}').get('room')
    return published


def test_a_compute_says_what_it_has_left_and_a_create_by_that_finds_it(cluster: Control, compute: Ecompute) -> None:
    until(lambda: room(cluster, compute.uuid), RENEWALS, 'it says what it has')
    initial = room(cluster, compute.uuid)
    assert initial is not None
    assert {amount[1] for amount in initial.values()} == {100}
    place = notified(cluster.eschedule(SMALL))
    assert place[0] == compute.uuid
    addressed(cluster, place[1])
    until(lambda: room(cluster, compute.uuid) not in (initial, None), RENEWALS, 'it says that something is used')
    current = room(cluster, compute.uuid)
    assert current is not None
    assert {name: amount[0] for name, amount in current.items()} == {
        name: amount[0] for name, amount in initial.items()
    }
    assert all(amount[1] < 100 for amount in current.values())
    assert cluster.eschedule('destroy', '--wait', place[1]).code == 0
    until(lambda: room(cluster, compute.uuid) == initial, RENEWALS, 'it says that nothing is used any more')
