"""Connections to placement that are kept, and that somebody on the way has forgotten meanwhile."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from ecomp.errors import Unreachable
from ecomp.placement import by_http
from ecomp.placement.client import Placement
from tests.kit.listening import Listening

pytestmark = pytest.mark.fast

AT_ONCE = 3
BODY = b'{"traits": []}'
ANSWER = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n' % len(BODY) + BODY


class Forgetful(Listening):
    """Answers over its connections; over those that it has forgotten, nothing, and they stay."""

    def __init__(self) -> None:
        self.together: threading.Barrier | None = None
        self._forgotten = 0
        super().__init__()
        self.url = f'http://{self.address}'

    def forget(self) -> None:
        """All that there are."""
        self.together, self._forgotten = None, self.made

    def serve(self, connection: socket.socket, number: int) -> None:
        """See Listening."""
        heard = b''
        while data := connection.recv(65536):
            heard += data
            if heard.endswith(b'\r\n\r\n') and number > self._forgotten:
                heard = b''
                if self.together is not None:
                    self.together.wait(20)
                connection.sendall(ANSWER)


@pytest.fixture
def server() -> Iterator[Forgetful]:
    with closing(Forgetful()) as made:
        yield made


def test_those_that_were_forgotten_on_the_way_cost_one_time_limit(server: Forgetful) -> None:
    server.together = threading.Barrier(AT_ONCE)
    with closing(Placement(server.url, (3.0, 1.0))) as client:
        threads = [threading.Thread(target=client.get, args=('/traits',)) for _ in range(AT_ONCE)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        assert server.made == AT_ONCE
        server.forget()
        with pytest.raises(Unreachable, match='gave no answer in 1 s'):
            client.get('/traits')
        assert client.get('/traits') == {'traits': []}
        assert server.made == AT_ONCE + 1


def test_one_is_not_kept_until_somebody_forgets_it(server: Forgetful, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Placement(server.url)) as client:
        for _ in range(3):
            client.get('/traits')
        assert server.made == 1
        monkeypatch.setattr(by_http, 'KEPT', 0.01)
        time.sleep(0.02)
        client.get('/traits')
        assert server.made == 2
