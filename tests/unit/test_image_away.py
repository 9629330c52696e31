"""Why the server of an image gives no answer is said, whatever wrapped the reason."""

from __future__ import annotations

import errno
import socket
import ssl

import pytest

from ecomp.agent.images.reach import Reach
from ecomp.agent.images.sources import Away, source


@pytest.mark.parametrize(
    ('cause', 'says'),
    [
        (socket.gaierror(socket.EAI_NONAME, 'Name or service not known'), 'there is no such name'),
        (socket.gaierror(socket.EAI_AGAIN, 'Temporary failure'), 'its name cannot be looked up'),
        (ConnectionRefusedError(errno.ECONNREFUSED, 'x'), 'it refuses the connection: nothing listens on that port'),
        (OSError(errno.EHOSTUNREACH, 'x'), 'there is no route to it'),
        (OSError(errno.ENETUNREACH, 'x'), 'there is no route to it'),
        (ConnectionResetError(errno.ECONNRESET, 'x'), 'the connection broke'),
        (ssl.SSLCertVerificationError('self-signed'), 'its certificate is not believed here'),
        (ssl.SSLError('wrong version number'), 'it does not speak TLS as this host does'),
    ],
)
def test_why_a_server_is_away_is_said(monkeypatch: pytest.MonkeyPatch, cause: OSError, says: str) -> None:
    # What the machine's own network answers to each of them is not for a test to depend on.
    def fail(*_: object, **__: object) -> None:
        raise cause

    resolves = isinstance(cause, socket.gaierror)
    monkeypatch.setattr('ecomp.agent.images.connections.' + ('addresses' if resolves else 'create_connection'), fail)
    remote = source('http://192.0.2.1/x', None, Reach())
    with pytest.raises(Away) as away:
        remote.open(None)
    remote.close()
    assert str(away.value).startswith(f'image: http://192.0.2.1/x: the server cannot be reached: {says}')
