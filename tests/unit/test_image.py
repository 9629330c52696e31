"""Image URLs: which are valid, and the messages for servers that do not answer."""

from __future__ import annotations

import errno
import socket
import ssl
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from urllib3.exceptions import SSLError

from ecomp.agent.images.connections import EgressPolicy
from ecomp.agent.images.download import ServerUnavailable, describe_failure, make_source
from ecomp.errors import BuildFailed
from ecomp.model.image import check_image, find_sha256, split_pin

# Valid and invalid URLs of images.


SUM = '0123456789abcdef' * 4
OTHER = 'f' * 64

VALID_URLS = [
    'http://download.cirros-cloud.net/0.3.6/cirros-0.3.6-x86_64-disk.img',
    'https://cloud-images.ubuntu.com/bionic/current/bionic-server-cloudimg-amd64.img',
    'HTTP://host/x',
    'http://host',
    'http://host:8080/x?y=z',
    f'http://host:8080/x?y=z#sha256={SUM}',
    f'http://host/x#SHA256={SUM.upper()}',
    f'file:///var/images/x.qcow2#sha256={SUM}',
    'http://host/x#',
    'http://host/@x',
    'file:/images/@x',
    'http://host/?user@x',
    'http://[::1]:80/x',
    'http://127.0.0.1/x',
    'http://host/%20',
    'file:///var/images/x.qcow2',
]
INVALID_URLS = [
    ('', 'must be a URL that starts with'),
    ('image.img', 'must be a URL that starts with'),
    ('/var/images/x', 'must be a URL that starts with'),
    ('-f', 'must be a URL that starts with'),
    ('ftp://host/x', 'must be a URL that starts with'),
    ('nbd://host/x', 'must be a URL that starts with'),
    ('json:{"file.filename":"/etc/shadow"}', 'must be a URL that starts with'),
    ('javascript:x', 'must be a URL that starts with'),
    ('file:x', 'must name an absolute path'),
    ('file://x', 'must name an absolute path'),
    ('file://host/x', 'must name an absolute path'),
    ('file:', 'must name an absolute path'),
    ('http:', 'must name a host'),
    ('http://', 'must name a host'),
    ('http:///x', 'must name a host'),
    ('http://:80/x', 'must name a host'),
    ('http://host:port/x', 'is not a URL'),
    ('http://host:99999/x', 'is not a URL'),
    ('http://[::1/x', 'is not a URL'),
    ('http://host/a b', 'space or a control character'),
    (' http://host/', 'space or a control character'),
    ('http://host/\n', 'space or a control character'),
    ('http://host/\r\nX: y', 'space or a control character'),
    ('http://host/\x00', 'space or a control character'),
    ('http://host/\x7f', 'space or a control character'),
    ('http://host/\udcff', 'is not a URL'),
    ('http://host/' + 'x' * 2048, 'more than 2048'),
    *(
        (url, '^the image has a user or a password in its URL')
        for url in (
            'http://user:hunter2@host/x',
            'https://user@host/x',
            'http://:hunter2@host/x',
            'http://@host/x',
            'http://user:hun@ter2@host/x',
            'file://user:hunter2@host/x',
            'ftp://user:hunter2@host/x',
            'hunter2@host',
            'http:user:hunter2@host/x',
            'http://user:hunter2@[host/x',
            'http://user:hunter2@host:port/x',
            f'http://user:hunter2@host/x#sha256={SUM}',
            'http://host\\@user:hunter2@host/x',
        )
    ),
    ('http://host/x?y=z#f', 'has a #fragment that is not #sha256='),
    (f'http://host/x#sha256={SUM[1:]}', 'has a #fragment that is not'),
    (f'http://host/x#sha256={SUM}0', 'has a #fragment that is not'),
    (f'http://host/x#sha256={SUM}#', 'has a #fragment that is not'),
    (f'http://host/x#sha256:{SUM}', 'has a #fragment that is not'),
    (f'http://host/x#sha512={SUM}{SUM}', 'has a #fragment that is not'),
    ('http://host/x#md5=d41d8cd98f00b204e9800998ecf8427e', 'has a #fragment that is not'),
]


@pytest.mark.parametrize('url', VALID_URLS)
def test_valid_url_is_accepted(url: str) -> None:
    assert check_image(url) == url


@pytest.mark.parametrize(('url', 'reason'), INVALID_URLS)
def test_invalid_url_is_refused(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        check_image(url)
    assert 'hunter2' not in str(refused.value)


@given(st.text(alphabet=st.characters(exclude_categories=())) | st.text().map('http://'.__add__))
def test_any_url_is_accepted_or_refused(url: str) -> None:
    try:
        checked_url = check_image(url)
    except ValueError:
        return
    checked_url.encode()  # it is hashed for a file name


def test_pinned_splits_url_and_digest() -> None:
    assert split_pin('http://host/x?y=z') == ('http://host/x?y=z', None)
    assert split_pin('http://host/x#') == ('http://host/x', None)
    assert split_pin(f'http://host/x?y=z#sha256={SUM}') == ('http://host/x?y=z', SUM)
    assert split_pin(f'http://host/x#SHA256={SUM.upper()}') == ('http://host/x', SUM)


@pytest.mark.parametrize(
    ('line', 'digest'),
    [
        (f'{SUM}  disk.img', SUM),
        (f'{SUM} *disk.img', SUM),
        (f'{SUM.upper()}  ./disk.img\r', SUM),
        (f'SHA256 (disk.img) = {SUM}', SUM),
        (f'{SUM}  other.img', None),
        (f'{SUM}  sub/disk.img', None),
        (f'{SUM}', None),
        (f'{SUM[1:]}  disk.img', None),
        (f'SHA1 (disk.img) = {SUM[:40]}', None),
        ('<html>disk.img</html>', None),
        ('', None),
    ],
)
def test_sum_of_finds_the_digest_of_the_file(line: str, digest: str | None) -> None:
    assert find_sha256(line, 'http://host/a/disk.img?x=/y') == digest
    assert find_sha256(f'# sums\n{OTHER}  another.img\n{line}\n', 'http://host/a/disk.img') == digest


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


@pytest.mark.parametrize(
    ('code', 'reason'),
    [
        (9, 'its certificate is not valid yet (the clock may be wrong)'),
        (10, 'its certificate has expired'),
        (18, 'its certificate is not trusted by this host'),
        (62, 'its certificate is for another name'),
        (64, 'its certificate is for another address'),
    ],
)
def test_invalid_certificate_is_reported_with_its_reason(code: int, reason: str) -> None:
    error = ssl.SSLCertVerificationError('whatever the server says')
    error.verify_code = code
    assert describe_failure(SSLError(error)) == f'the server cannot be reached: {reason}'


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
