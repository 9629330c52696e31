"""Somebody in etcd's place who speaks HTTP/2, never answers, and never stops sending either."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

from ecomp.conf import EtcdConfig
from ecomp.errors import Unreachable
from ecomp.store.by_h2 import Member
from ecomp.store.client import Store
from ecomp.store.messages import DEADLINE_EXCEEDED, UNAVAILABLE, CallFailure, WatchCreate
from tests.kit.listening import Listening
from tests.kit.servers import PATIENCE

SECONDS = 20
"""Until the flood ends by itself."""
UNKNOWN = b'\0\0\0\x42\0\0\0\0\0' * 10_000
"""Frames of a kind that nobody knows, which are passed over (RFC 9113, 4.1): always one more than is read."""


class Flood(Listening):
    """Never stops sending."""

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        """See Listening."""
        http = H2Connection(H2Configuration(client_side=False))
        http.initiate_connection()
        until = time.monotonic() + SECONDS * PATIENCE
        connection.sendall(http.data_to_send())
        while time.monotonic() < until:
            connection.sendall(UNKNOWN)  # what is asked is never looked at


@pytest.fixture
def endpoint() -> Iterator[str]:
    with closing(Flood()) as flood:
        yield flood.address


def test_who_never_stops_sending_is_no_longer_waited_for_than_who_is_silent(endpoint: str) -> None:
    began = time.monotonic()
    with closing(Store(EtcdConfig((endpoint,), timeout=1.0))) as store, pytest.raises(Unreachable):
        store.get('/x')
    assert time.monotonic() - began < SECONDS


def test_a_watch_of_it_ends_with_its_time(endpoint: str) -> None:
    began = time.monotonic()
    member = Member(EtcdConfig((endpoint,), timeout=1.0), endpoint)
    try:
        with pytest.raises(CallFailure) as caught:
            list(member.watch([WatchCreate(b'/x', b'/y', 1)], 1.0))
    finally:
        member.close()
    assert caught.value.code in (DEADLINE_EXCEEDED, UNAVAILABLE)
    assert time.monotonic() - began < SECONDS
