"""Placement behind a front that asks who is there: certificates, a token, and what is said where one is wrong."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import ssl
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from ecomp.conf import PlacementConfig
from ecomp.errors import EcompError, UnknownOutcome, Unreachable
from ecomp.placement import providers
from ecomp.placement.client import Placement
from tests.kit.certificates import Authority
from tests.kit.commands import Control, Ecompute
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.servers import PlacementServer
from tests.kit.story import SMALL, log_of, logged, logs, place, reached, record

NAMES = ('localhost', '127.0.0.1')
OURS = re.compile('our certificate|certificate of ours')


class Front(FaultyPlacement):
    """Takes those alone who have a certificate and know the token, and passes on what they ask.

    `breaks` is how many of the next calls are read, and then the connection is cut; `heard` are all calls.
    """

    def __init__(self, behind: PlacementServer, directory: Path) -> None:
        self.authority = Authority(directory / 'ca')
        self.directory = directory
        self.token, self.says = 'the-token', b'{"errors": [{"detail": "who are you?"}]}'
        self.breaks = 0
        self.heard: list[str] = []
        self.issue()
        super().__init__(behind.port)
        self.url = f'https://127.0.0.1:{self.port}'

    def issue(self, *names: str, days: int = 10) -> None:
        """Its own certificate, from the next connection on."""
        self.authority.issue(self.directory, 'server', *(names or NAMES), days=days)

    def wrap(self, connection: socket.socket) -> socket.socket:
        """Over TLS, which begins in the connection's own thread."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.directory / 'server.crt', self.directory / 'server.key')
        context.load_verify_locations(self.authority.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        connection.settimeout(10)
        return context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)

    def fails(self, method: str, path: str) -> str:
        """See FaultyPlacement."""
        self.heard.append(f'{method} {path}')
        if not self.breaks:
            return ''
        self.breaks -= 1
        return 'broken'

    def pass_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> tuple[int, str, bytes]:
        """Ask for who knows the token."""
        told = {name.lower(): value for name, value in headers.items()}
        if told.get('x-auth-token') != self.token:
            return 401, 'application/json', self.says
        plain = {name: value for name, value in told.items() if not name.startswith('x-')}
        return super().pass_on(method, path, {**plain, 'x-auth-token': 'admin'}, body)


@pytest.fixture
def front(placement: PlacementServer, tmp_path: Path) -> Iterator[Front]:
    with Front(placement, tmp_path / 'front') as made:
        yield made


@pytest.fixture
def config(front: Front, tmp_path: Path) -> PlacementConfig:
    certificate, key = front.authority.issue(tmp_path / 'own', 'client')
    token = tmp_path / 'token'
    token.write_text('the-token\n')
    return PlacementConfig(front.url, front.authority.certificate, key, certificate, token)


def without(config: PlacementConfig, **changed: object) -> PlacementConfig:
    return PlacementConfig(**{**config._asdict(), **changed})


@pytest.fixture
def client(config: PlacementConfig) -> Iterator[Placement]:
    with closing(Placement(config, (2.0, 5.0))) as made:
        yield made


def test_who_has_a_certificate_and_the_token_reads_and_writes(client: Placement) -> None:
    compute = str(uuid.uuid4())
    providers.ensure(client, compute)
    assert client.get(f'/resource_providers/{compute}')['name'] == compute
    client.write('DELETE', f'/resource_providers/{compute}', None)


def test_a_token_is_read_anew_for_each_call(client: Placement, config: PlacementConfig, front: Front) -> None:
    front.token = 'another'
    with pytest.raises(EcompError, match='refuses with HTTP 401: who are you'):
        client.get('/resource_providers')
    front.says = b'<html>'
    with pytest.raises(EcompError, match='answers HTTP 401.* is token_file, cert_cert and `placement:` right'):
        client.get('/resource_providers')
    assert config.token_file is not None
    config.token_file.write_text('another')
    assert 'resource_providers' in client.get('/resource_providers')
    for content, said in ((b'', 'one word'), (b'two words', 'one word'), (b'\xff', 'not ASCII'), (b'a\nb', 'one word')):
        config.token_file.write_bytes(content)
        with pytest.raises(Unreachable, match=f'token_file {config.token_file}: .*{said}'):
            client.get('/resource_providers')
    config.token_file.unlink()
    with pytest.raises(Unreachable, match='No such file'):
        client.get('/resource_providers')


def refused(config: PlacementConfig) -> str:
    """What is said to who asks so: one line, and a write fails as a read does."""
    with closing(Placement(config, (2.0, 5.0))) as made:
        with pytest.raises(Unreachable) as read:
            made.get('/resource_providers')
        # Of what they say after it was sent nobody knows whether it was carried out.
        with pytest.raises((Unreachable, UnknownOutcome)):
            made.write('POST', '/resource_providers', {'name': 'never'})
    assert str(read.value).isprintable()
    assert str(read.value).startswith(f'placement at {config.endpoint} cannot be reached: ')
    return str(read.value)


def test_a_client_without_a_certificate_is_told_which_it_needs(config: PlacementConfig, front: Front) -> None:
    assert OURS.search(refused(without(config, cert_cert=None, cert_key=None)))
    assert front.heard == []


def test_a_certificate_of_another_authority_is_none(config: PlacementConfig, front: Front, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path / 'other').issue(tmp_path / 'other', 'client')
    assert OURS.search(refused(without(config, cert_cert=certificate, cert_key=key)))
    assert 'not signed by the authority in ca_cert' in refused(without(config, ca_cert=tmp_path / 'other/ca.crt'))
    assert 'not signed by the authority in ca_cert' in refused(without(config, ca_cert=None))
    assert front.heard == []


def test_without_an_authority_of_its_own_the_system_s_count(
    config: PlacementConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.ca_cert is not None
    monkeypatch.setenv('SSL_CERT_FILE', str(config.ca_cert))
    with contextlib.closing(Placement(without(config, ca_cert=None), (2.0, 5.0))) as client:
        assert 'resource_providers' in client.get('/resource_providers')


def test_an_expired_certificate_is_one_line_and_exchanged_on_disk(
    client: Placement, config: PlacementConfig, front: Front, tmp_path: Path
) -> None:
    front.authority.issue(tmp_path / 'own', 'client', days=-1)
    assert OURS.search(refused(config))
    front.authority.issue(tmp_path / 'own', 'client')
    front.issue(days=-1)
    assert refused(config).endswith('its certificate has expired')
    front.issue('elsewhere')
    assert refused(config).endswith('its certificate is made out to another name')
    with pytest.raises(Unreachable):
        client.get('/resource_providers')
    front.issue()
    assert 'resource_providers' in client.get('/resource_providers')  # the same client as before


def test_files_that_are_no_certificates(config: PlacementConfig, tmp_path: Path) -> None:
    empty = tmp_path / 'empty'
    empty.write_text('')
    other = Authority(tmp_path / 'pair').issue(tmp_path / 'pair', 'client')
    for changed in ({'cert_cert': empty}, {'cert_key': empty}, {'cert_key': other[1]}, {'ca_cert': empty}):
        with pytest.raises(EcompError) as said:
            Placement(without(config, **changed), (2.0, 5.0)).get('/resource_providers')
        assert str(said.value).isprintable(), changed
        assert 'ca_cert' in str(said.value), changed
        with pytest.raises(Unreachable) as unsent:
            Placement(without(config, **changed), (2.0, 5.0)).write('POST', '/resource_providers', {'name': 'never'})
        assert type(unsent.value) is Unreachable, changed
    shutil.rmtree(tmp_path / 'own')
    with pytest.raises(Unreachable, match=str(tmp_path / 'own')):
        Placement(config, (2.0, 5.0)).get('/resource_providers')


def test_one_that_does_not_speak_tls(config: PlacementConfig, placement: PlacementServer) -> None:
    with FaultyPlacement(placement.port) as plain:
        assert 'does not speak TLS' in refused(without(config, endpoint=f'https://127.0.0.1:{plain.port}'))


def test_a_write_is_never_sent_twice(client: Placement, front: Front) -> None:
    client.get('/resource_providers')
    front.heard.clear()
    front.breaks = 1
    with pytest.raises(UnknownOutcome):
        client.write('POST', '/resource_providers', {'name': str(uuid.uuid4())})
    assert front.heard == ['POST /resource_providers']


def test_an_ecompute_outlives_an_exchange(control: Control, front: Front, config: PlacementConfig) -> None:
    """What is missing or does not fit for a moment delays what it has to ask, and fails nothing."""
    assert config.token_file is not None
    assert config.cert_key is not None
    compute = Ecompute(control.etcd.endpoint, front.url)
    settings = yaml.safe_load(compute.config.read_text())
    settings['placement'] = {name: str(value) for name, value in config._asdict().items()}
    compute.config.write_text(yaml.safe_dump(settings))
    wanted = f'{SMALL}&in_tree={compute.uuid}'
    with compute:
        reached(control, place(control, wanted)[1], 'active')
        for path, content in ((config.token_file, b''), (config.token_file, None), (config.cert_key, None)):
            before = path.read_bytes()
            # What is wrong with a file of ours is said although placement was lost already, for another reason.
            lost = len(logged(compute, 'the connection broke'))
            front.breaks = 1000
            _, instance = place(control, wanted)
            logs(compute, 'the connection broke', number=lost + 1)
            if content is None:
                path.unlink()
            else:
                path.write_bytes(content)
            # A connection that is open was made with the certificate of before.
            front.cut()
            front.breaks = 0
            logs(compute, str(path), 'trying again')
            assert (record(control, instance) or {}).get('state') not in ('error', 'active')
            path.write_bytes(before)
            reached(control, instance, 'active')
            assert control.eschedule('destroy', instance, '--wait').code == 0
        log_of(compute)


def test_nobody_s_netrc_is_sent(config: PlacementConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / 'netrc'
    netrc.write_text('machine 127.0.0.1 login me password secret\n')
    netrc.chmod(0o600)
    monkeypatch.setenv('NETRC', str(netrc))
    said: list[str | None] = []
    pass_on = Front.pass_on

    def listened(front: Front, method: str, path: str, headers: dict[str, str], body: bytes) -> Any:
        said.append({name.lower(): value for name, value in headers.items()}.get('authorization'))
        return pass_on(front, method, path, headers, body)

    monkeypatch.setattr(Front, 'pass_on', listened)
    with closing(Placement(config, (2.0, 5.0))) as client:
        client.get('/resource_providers')
    assert said == [None]
