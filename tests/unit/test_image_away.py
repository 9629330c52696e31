"""Why the server of an image gives no answer is said, whatever wrapped the reason."""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path

import pytest
from urllib3.exceptions import SSLError

from ecomp.agent.images.connections import Reach
from ecomp.agent.images.download import Away, source, why_away
from ecomp.errors import BuildFailed


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


@pytest.mark.parametrize(
    ('code', 'says'),
    [
        (9, 'its certificate is not valid yet: is the clock right?'),
        (10, 'its certificate has expired'),
        (18, 'its certificate is not believed here'),
        (62, 'its certificate is made out to another name'),
        (64, 'its certificate is made out to another address'),
    ],
)
def test_what_is_wrong_with_a_certificate_is_said(code: int, says: str) -> None:
    error = ssl.SSLCertVerificationError('whatever the server says')
    error.verify_code = code
    assert why_away(SSLError(error)) == f'the server cannot be reached: {says}'


@pytest.mark.parametrize('content', [None, b'', b'no certificate'])
def test_authorities_that_cannot_be_read_are_named(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / 'authorities'
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv('REQUESTS_CA_BUNDLE', str(file))
    remote = source('https://192.0.2.1/x', None, Reach())
    with pytest.raises(BuildFailed) as failed:
        remote.open(None)
    remote.close()
    assert not isinstance(failed.value, Away)
    said = str(failed.value)
    assert said.startswith(f'image: {file}: certificate authorities cannot be read: ')
    assert said.endswith('; REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE may name others')
    assert 'None' not in said
