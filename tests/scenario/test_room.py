"""The room that an ecompute publishes in its presence key."""

from __future__ import annotations

import json
from typing import Any

from tests.kit.commands import Control, Ecompute
from tests.kit.servers import wait_until
from tests.kit.story import SMALL_QUERY, parse_notice, wait_address

# Seconds in which a compute renews its lease more than once.
RENEWAL_SECONDS = 45


def read_room(cluster: Control, compute: str) -> dict[str, Any] | None:
    """Return the room that a compute publishes."""
    published: dict[str, Any] | None = json.loads(cluster.etcd.get(f'/computes/{compute}') or b'{}').get('room')
    return published


def test_published_room_follows_the_requests(cluster: Control, compute: Ecompute) -> None:
    wait_until(lambda: read_room(cluster, compute.uuid), RENEWAL_SECONDS, 'it says what it has')
    initial = read_room(cluster, compute.uuid)
    assert initial is not None
    assert {amount[1] for amount in initial.values()} == {100}
    place = parse_notice(cluster.eschedule(SMALL_QUERY))
    assert place[0] == compute.uuid
    wait_address(cluster, place[1])
    wait_until(
        lambda: read_room(cluster, compute.uuid) not in (initial, None),
        RENEWAL_SECONDS,
        'it says that something is used',
    )
    current = read_room(cluster, compute.uuid)
    assert current is not None
    assert {name: amount[0] for name, amount in current.items()} == {
        name: amount[0] for name, amount in initial.items()
    }
    assert all(amount[1] < 100 for amount in current.values())
    assert cluster.eschedule('destroy', '--wait', place[1]).code == 0
    wait_until(
        lambda: read_room(cluster, compute.uuid) == initial, RENEWAL_SECONDS, 'it says that nothing is used any more'
    )
