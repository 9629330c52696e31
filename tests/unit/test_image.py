"""Image URLs: which are valid, and the messages for servers that do not answer."""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.images.connections import EgressPolicy
from ecomp.agent.images.download import ServerUnavailable, make_source
from ecomp.errors import BuildFailed
from ecomp.model.image import check_image, find_sha256

# Valid and invalid URLs of images.


SUM = '0123456789abcdef' * 4


@given(st.text(alphabet=st.characters(exclude_categories=())) | st.text().map('http://'.__add__))
def test_any_url_is_accepted_or_refused(url: str) -> None:
    try:
        checked_url = check_image(url)
    except ValueError:
        return
    checked_url.encode()  # it is hashed for a file name


def test_sum_of_accepts_a_file_name_with_a_space() -> None:
    assert find_sha256(f'{SUM}  a disk.img', 'http://host/a%20disk.img') == SUM
    assert find_sha256(f'{SUM}  ', 'http://host/') is None


# The message says why a server does not answer, even if other exceptions wrap the cause.


@pytest.mark.parametrize(
    ('cause', 'reason'),
    [
        (socket.gaierror(socket.EAI_NONAME, 'Name or service not known'), 'its host name does not exist'),
        (socket.gaierror(socket.EAI_AGAIN, 'Temporary failure'), 'its host name cannot be resolved'),
        (ConnectionRefusedError(errno.ECONNREFUSED, 'x'), 'it refuses the connection: nothing listens on that port'),
        (OSError(errno.EHOSTUNREACH, 'x'), 'there is no route to it'),
        (OSError(errno.ENETUNREACH, 'x'), 'there is no route to it'),
        (ConnectionResetError(errno.ECONNRESET, 'x'), 'the connection broke'),
        (ssl.SSLCertVerificationError('self-signed'), 'its certificate is not trusted by this host'),
        (ssl.SSLError('wrong version number'), 'the TLS handshake failed'),
    ],
)
def test_unreachable_server_is_reported_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, cause: OSError, reason: str
) -> None:
    # A test must not depend on the answers of the machine's own network.
    def fail(*_: object, **__: object) -> None:
        raise cause

    resolves = isinstance(cause, socket.gaierror)
    monkeypatch.setattr(
        'ecomp.agent.images.connections.' + ('resolve_addresses' if resolves else 'create_connection'), fail
    )
    remote = make_source('http://192.0.2.1/x', None, EgressPolicy())
    with pytest.raises(ServerUnavailable) as away:
        remote.open(None)
    remote.close()
    assert str(away.value).startswith(f'image: http://192.0.2.1/x: the server cannot be reached: {reason}')


@pytest.mark.parametrize('content', [None, b'', b'no certificate'])
def test_unreadable_certificate_authorities_are_named(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / 'authorities'
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv('REQUESTS_CA_BUNDLE', str(file))
    remote = make_source('https://192.0.2.1/x', None, EgressPolicy())
    with pytest.raises(BuildFailed) as failed:
        remote.open(None)
    remote.close()
    assert not isinstance(failed.value, ServerUnavailable)
    message = str(failed.value)
    assert message.startswith(f'image: {file}: certificate authorities cannot be read: ')
    fix = 'set REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE to a readable file or directory of certificates'
    assert message.endswith(f'. Fix: {fix}')
    assert 'None' not in message
