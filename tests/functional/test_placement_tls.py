"""Test placement behind TLS, and servers that answer in its place."""

from __future__ import annotations

import contextlib
import json
import operator
import re
import shutil
import socket
import ssl
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from ecomp.conf import PlacementConfig
from ecomp.errors import (
    Conflict,
    EcompError,
    GenerationConflict,
    NoCapacity,
    NotFound,
    PlacementRefusal,
    UnknownOutcome,
    Unreachable,
)
from ecomp.placement.client import Placement
from ecomp.placement.http_client import HEADERS
from ecomp.tls import SENTENCES
from tests.functional.placement_client import claim, make_uuid, open_client
from tests.kit.certificates import Authority
from tests.kit.commands import Control, Ecompute
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.hands import count_losses
from tests.kit.listening import CannedServer, make_answer
from tests.kit.servers import PlacementServer, wait_until
from tests.kit.story import SMALL_QUERY, find_log_lines, place, read_log, read_record, wait_log_lines, wait_state

SERVER_NAMES = ('localhost', '127.0.0.1')
CLIENT_CERTIFICATE_ERROR = re.compile('our certificate|certificate of ours')


class TlsFront(FaultyPlacement):
    """A TLS front end of placement that requires a client certificate and a token.

    The next `breaks` calls are read and then cut off.
    """

    def __init__(self, behind: PlacementServer, directory: Path) -> None:
        self.authority = Authority(directory / 'ca')
        self.directory = directory
        self.token = 'the-token'
        self.denial = b'{"errors": [{"detail": "who are you?"}]}'
        self.breaks = 0
        self.heard: list[str] = []
        self.issue()
        super().__init__(behind.port)
        self.url = f'https://127.0.0.1:{self.port}'

    def issue(self, *names: str, days: int = 10) -> None:
        self.authority.issue(self.directory, 'server', *(names or SERVER_NAMES), days=days)

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Wrap a connection, whose own thread makes the handshake."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / 'server.crt', self.directory / 'server.key')
        context.load_verify_locations(self.authority.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        connection.settimeout(10)
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def fails(self, method: str, path: str) -> str:
        self.heard.append(f'{method} {path}')
        if not self.breaks:
            return ''
        self.breaks -= 1
        return 'broken'

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        received = {name.lower(): value for name, value in headers.items()}
        if received.get('x-auth-token') != self.token:
            return 401, 'application/json', self.denial
        forwarded = {name: value for name, value in received.items() if not name.startswith('x-')}
        return super().pass_on(method, path, {**forwarded, 'x-auth-token': 'admin'}, body)


@pytest.fixture
def front(shared_placement: PlacementServer, tmp_path: Path) -> Iterator[TlsFront]:
    with TlsFront(shared_placement, tmp_path / 'front') as tls_front:
        yield tls_front


@pytest.fixture
def config(front: TlsFront, tmp_path: Path) -> PlacementConfig:
    certificate, key = front.authority.issue(tmp_path / 'own', 'client')
    token = tmp_path / 'token'
    token.write_text('the-token\n')
    return PlacementConfig(front.url, front.authority.certificate, key, certificate, token)


def replace_settings(config: PlacementConfig, **changed: object) -> PlacementConfig:
    return PlacementConfig(**{**config._asdict(), **changed})


@pytest.fixture
def tls_client(config: PlacementConfig) -> Iterator[Placement]:
    with closing(Placement(config, (2.0, 5.0))) as client:
        yield client


def test_token_file_is_read_for_each_call(tls_client: Placement, config: PlacementConfig, front: TlsFront) -> None:
    front.token = 'another'
    with pytest.raises(EcompError, match='returned HTTP 401: who are you'):
        tls_client.get('/resource_providers')
    front.denial = b'<html>'
    with pytest.raises(
        EcompError, match=r'returned HTTP 401.* \(token_file, cert_cert and `placement:` may be wrong\)'
    ):
        tls_client.get('/resource_providers')
    assert config.token_file is not None
    config.token_file.write_text('another')
    assert 'resource_providers' in tls_client.get('/resource_providers')
    for content, hint in (
        (b'', 'one token'),
        (b'two words', 'one token'),
        (b'\xff', 'not ASCII'),
        (b'a\nb', 'one token'),
    ):
        config.token_file.write_bytes(content)
        with pytest.raises(Unreachable, match=f'token_file {config.token_file}: .*{hint}'):
            tls_client.get('/resource_providers')
    config.token_file.unlink()
    with pytest.raises(Unreachable, match='No such file'):
        tls_client.get('/resource_providers')


def read_refusal(config: PlacementConfig) -> str:
    with closing(Placement(config, (2.0, 5.0))) as client:
        with pytest.raises(Unreachable) as refusal:
            client.get('/resource_providers')
        # An error after the write was sent leaves its outcome unknown.
        with pytest.raises((Unreachable, UnknownOutcome)):
            client.write('POST', '/resource_providers', {'name': 'never'})
    assert str(refusal.value).isprintable()
    prefix, failure = f'placement at {config.endpoint} cannot be reached: ', refusal.value.tls_failure
    assert str(refusal.value).startswith(prefix)
    # The cure of `eschedule check` depends on it.
    sentence = str(refusal.value).removeprefix(prefix)
    assert failure in ([each for each, text in SENTENCES.items() if text == sentence] or [None])
    return str(refusal.value)


def test_missing_client_certificate_is_reported(config: PlacementConfig, front: TlsFront) -> None:
    assert CLIENT_CERTIFICATE_ERROR.search(read_refusal(replace_settings(config, cert_cert=None, cert_key=None)))
    assert front.heard == []


def test_certificate_of_another_authority_is_refused(config: PlacementConfig, front: TlsFront, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / 'other').issue(tmp_path / 'other', 'client')
    assert CLIENT_CERTIFICATE_ERROR.search(read_refusal(replace_settings(config, cert_cert=certificate, cert_key=key)))
    assert 'not signed by the authority in ca_cert' in read_refusal(
        replace_settings(config, ca_cert=tmp_path / 'other/ca.crt')
    )
    assert 'not signed by the authority in ca_cert' in read_refusal(replace_settings(config, ca_cert=None))
    assert front.heard == []


def test_system_authorities_apply_without_ca_cert(config: PlacementConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config.ca_cert is not None
    monkeypatch.setenv('SSL_CERT_FILE', str(config.ca_cert))
    with contextlib.closing(Placement(replace_settings(config, ca_cert=None), (2.0, 5.0))) as tls_client:
        assert 'resource_providers' in tls_client.get('/resource_providers')


def test_expired_certificate_is_replaced_without_a_restart(
    tls_client: Placement, config: PlacementConfig, front: TlsFront, tmp_path: Path
) -> None:
    front.authority.issue(tmp_path / 'own', 'client', days=-1)
    assert CLIENT_CERTIFICATE_ERROR.search(read_refusal(config))
    front.authority.issue(tmp_path / 'own', 'client')
    front.issue(days=-1)
    assert read_refusal(config).endswith('its certificate has expired')
    front.issue('elsewhere')
    assert read_refusal(config).endswith('its certificate is for another name')
    with pytest.raises(Unreachable):
        tls_client.get('/resource_providers')
    front.issue()
    assert 'resource_providers' in tls_client.get('/resource_providers')  # the same client as before


def test_invalid_certificate_files_are_reported(config: PlacementConfig, tmp_path: Path) -> None:
    empty = tmp_path / 'empty'
    empty.write_text('')
    other = Authority(tmp_path / 'pair').issue(tmp_path / 'pair', 'client')
    for changed in ({'cert_cert': empty}, {'cert_key': empty}, {'cert_key': other[1]}, {'ca_cert': empty}):
        with pytest.raises(EcompError) as failure:
            Placement(replace_settings(config, **changed), (2.0, 5.0)).get('/resource_providers')
        assert str(failure.value).isprintable(), changed
        assert 'ca_cert' in str(failure.value), changed
        with pytest.raises(Unreachable) as unsent:
            Placement(replace_settings(config, **changed), (2.0, 5.0)).write(
                'POST', '/resource_providers', {'name': 'never'}
            )
        assert type(unsent.value) is Unreachable, changed
    shutil.rmtree(tmp_path / 'own')
    with pytest.raises(Unreachable, match=str(tmp_path / 'own')):
        Placement(config, (2.0, 5.0)).get('/resource_providers')


def test_server_without_tls_is_reported(config: PlacementConfig, placement: PlacementServer) -> None:
    with FaultyPlacement(placement.port) as http_server:
        assert 'does not speak TLS' in read_refusal(
            replace_settings(config, endpoint=f'https://127.0.0.1:{http_server.port}')
        )


def test_write_is_never_sent_twice(tls_client: Placement, front: TlsFront) -> None:
    tls_client.get('/resource_providers')
    front.heard.clear()
    front.breaks = 1
    with pytest.raises(UnknownOutcome):
        tls_client.write('POST', '/resource_providers', {'name': str(uuid.uuid4())})
    assert front.heard == ['POST /resource_providers']


def test_ecompute_survives_replaced_credential_files(
    control: Control, front: TlsFront, config: PlacementConfig
) -> None:
    """Check that a missing or invalid credential file delays requests but fails none."""
    assert config.token_file is not None
    assert config.cert_key is not None
    compute = Ecompute(control.etcd.endpoint, front.url)
    settings = yaml.safe_load(compute.config.read_text())
    settings['placement'] = {name: str(value) for name, value in config._asdict().items()}
    compute.config.write_text(yaml.safe_dump(settings))
    query = f'{SMALL_QUERY}&in_tree={compute.uuid}'
    with compute:
        wait_state(control, place(control, query)[1], 'active')
        for path, content in ((config.token_file, b''), (config.token_file, None), (config.cert_key, None)):
            before = path.read_bytes()
            # An invalid file of ours is reported even if placement was unreachable before, for another reason.
            lost = len(find_log_lines(compute, 'the connection broke'))
            front.breaks = 1000
            _, instance = place(control, query)
            wait_log_lines(compute, 'the connection broke', number=lost + 1)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            # An open connection still uses the previous certificate.
            front.cut()
            front.breaks = 0
            wait_log_lines(compute, str(path), 'trying again')
            assert (read_record(control, instance) or {}).get('state') not in ('error', 'active')
            path.write_bytes(before)
            wait_state(control, instance, 'active')
            assert control.eschedule('destroy', instance, '--wait').code == 0
            # A check of once a minute may have met the same loss, which is logged again only after its end.
            wait_until(lambda: operator.eq(*count_losses(compute, '')), 60, 'each return is logged')
        read_log(compute)


def test_netrc_credentials_are_not_sent(
    config: PlacementConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / 'netrc'
    netrc.write_text('machine 127.0.0.1 login me password secret\n')
    netrc.chmod(0o600)
    monkeypatch.setenv('NETRC', str(netrc))
    authorizations: list[str | None] = []
    pass_on = TlsFront.pass_on

    def record_authorization(front: TlsFront, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        authorizations.append({name.lower(): value for name, value in headers.items()}.get('authorization'))
        return pass_on(front, method, path, headers, body)

    monkeypatch.setattr(TlsFront, 'pass_on', record_authorization)
    with closing(Placement(config, (2.0, 5.0))) as tls_client:
        tls_client.get('/resource_providers')
    assert authorizations == [None]


# The placement client against other servers at placement's address, and against made-up errors.


@contextmanager
def serve_answers(*answers: tuple[int, str, bytes]) -> Iterator[CannedServer]:
    extra = {302: ('location: /elsewhere',), 503: ('retry-after: 3600',)}  # the client does not wait that long
    with closing(CannedServer(*(make_answer(*answer, *extra.get(answer[0], ())) for answer in answers))) as server:
        yield server


HTML = b'<html><body>Welcome to the proxy</body></html>'


def make_error(
    status: int, code: str = 'placement.undefined_code', detail: str = 'a\n\n   reason '
) -> tuple[int, str, bytes]:
    body = {'errors': [{'status': status, 'title': 't', 'detail': detail, 'code': code, 'request_id': 'r'}]}
    return status, 'application/json', json.dumps(body).encode()


NOT_PLACEMENT = [
    (200, 'text/html', HTML),
    (200, 'application/json', b'[]'),
    (200, 'application/json', b'"text"'),
    (200, 'application/json', b'{"a": '),
    (200, 'application/json', b''),
    (200, 'application/json', b'\xff\xfe'),
    (302, 'text/html', HTML),
    (400, 'text/html', HTML),
    (401, 'text/html', HTML),
    (404, 'text/html', HTML),
    (403, 'application/json', b'{"errors": []}'),
    (409, 'text/html', HTML),
    (409, 'application/json', b'{"errors": "x"}'),
    (418, 'application/json', b'[7]'),
]


@pytest.mark.parametrize('says', NOT_PLACEMENT)
def test_read_from_another_server_is_unreachable(says: tuple[int, str, bytes]) -> None:
    with serve_answers(says) as server, open_client(server.url) as client:
        with pytest.raises(Unreachable, match=r'not as placement does \(`placement:` may be wrong\)'):
            client.get('/resource_providers')
        assert server.requests == ['GET /resource_providers']


@pytest.mark.parametrize('says', [each for each in NOT_PLACEMENT if each[1] == 'text/html' or each[0] == 200])
def test_claim_is_not_confirmed_by_another_server(says: tuple[int, str, bytes]) -> None:
    with serve_answers(says) as server, open_client(server.url) as client:
        with pytest.raises(Unreachable, match='not as placement does'):
            claim(client, make_uuid(), make_uuid())
        assert len(server.requests) == 1


ERRORS = [
    (make_error(400), PlacementRefusal),
    (make_error(401), EcompError),
    (make_error(403), EcompError),
    (make_error(404), NotFound),
    (make_error(406), EcompError),
    (make_error(409), NoCapacity),
    (make_error(409, 'placement.concurrent_update'), GenerationConflict),
    (make_error(409, 'placement.duplicate_name'), Conflict),
    (make_error(409, 'placement.inventory.inuse'), Conflict),
    (make_error(409, 'placement.resource_provider.inuse'), Conflict),
    (make_error(409, 'a code of tomorrow'), NoCapacity),
]


@pytest.mark.parametrize(('says', 'kind'), ERRORS)
def test_error_code_determines_exception_and_one_line_message(
    says: tuple[int, str, bytes], kind: type[EcompError]
) -> None:
    with serve_answers(says) as server, open_client(server.url) as client:
        for call in (lambda: client.get('/x'), lambda: client.write('PUT', '/x', {})):
            with pytest.raises(kind) as caught:
                call()
            assert type(caught.value) is kind
            assert '\n' not in str(caught.value)
            if says[0] != 406:
                assert 'a reason' in str(caught.value)
        assert len(server.requests) == 2  # none of these is tried again


def test_http_500_is_not_retried() -> None:
    with serve_answers((500, 'text/html', HTML)) as server, open_client(server.url) as client:
        with pytest.raises(Unreachable, match='returned HTTP 500') as caught:
            client.get('/x')
        assert not isinstance(caught.value, UnknownOutcome)
        with pytest.raises(UnknownOutcome, match='returned HTTP 500'):
            client.write('PUT', '/x', {})
        assert server.requests == ['GET /x', 'PUT /x']


def test_http_503_is_retried_for_reads_but_not_for_writes() -> None:
    busy = (503, 'text/html', HTML)
    with serve_answers(busy, busy, (200, 'application/json', b'{"a": 1}')) as server, open_client(server.url) as client:
        assert client.get('/x') == {'a': 1}
        assert len(server.requests) == 3
    with serve_answers(busy) as server, open_client(server.url) as client:
        with pytest.raises(Unreachable, match='HTTP 503'):
            client.get('/x')
        assert len(server.requests) == 3
        with pytest.raises(UnknownOutcome, match='HTTP 503'):
            client.write('PUT', '/x', {})
        assert len(server.requests) == 4


def test_path_is_quoted_once() -> None:
    with serve_answers((200, 'application/json', b'{}')) as server, open_client(server.url + '/a b') as client:
        client.get('/x?name=é #\ud800\r\nb: c\0&y=%41:1,!z')
        assert server.requests == ['GET /a%20b/x?name=%C3%A9%20%23%5Cud800%0D%0Ab:%20c%00&y=%41:1,!z']


def test_requests_name_a_fixed_microversion() -> None:
    # A fixed version rather than `latest`: a newer placement must not change our requests.
    assert HEADERS['openstack-api-version'] == 'placement 1.39'
