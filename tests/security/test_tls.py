"""TLS is used whenever it is configured, and verified."""

from __future__ import annotations

import socket
import ssl
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import pytest

from ecomp.agent.process import _warn_of_insecure_setup
from ecomp.backends import probe_backends
from ecomp.compute_conf import ComputeConfig
from ecomp.conf import EtcdConfig, PlacementConfig
from ecomp.errors import Unreachable
from ecomp.lab.certs import enable_roles
from ecomp.model.health import check_backends
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from tests.kit.certificates import Authority
from tests.kit.listening import ThreadedServer
from tests.kit.servers import free_port


class RecordingServer(ThreadedServer):
    """Records the first bytes of each connection, inside TLS if there is a context."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.context, self.received = context, list[bytes]()
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        if self.context is None:
            self.received.append(connection.recv(24))
        else:
            with self.context.wrap_socket(connection, server_side=True) as secured:
                self.received.append(secured.recv(24))


def receive_first_bytes(**settings: Path) -> bytes:
    with (
        closing(RecordingServer()) as server,
        closing(Store(EtcdConfig((server.address,), timeout=2.0, **settings))) as store,
    ):  # type: ignore[arg-type]
        with pytest.raises(Unreachable):
            store.get('/x')
        return server.received[0]


def test_client_certificate_without_authority_enables_tls(tmp_path: Path) -> None:
    """A client certificate alone is enough for TLS."""
    authority = Authority(tmp_path)
    certificate, key = authority.issue(tmp_path / 'own', 'ecomp')
    assert receive_first_bytes().startswith(b'PRI * HTTP/2.0')
    assert receive_first_bytes(ca_cert=authority.certificate).startswith(b'\x16\x03')
    assert receive_first_bytes(cert_cert=certificate, cert_key=key).startswith(b'\x16\x03')


@pytest.mark.parametrize('named', [(), ('other.example',)])
@pytest.mark.parametrize('server', ['etcd', 'placement', 'etcd by elab certs --enable'])
def test_server_is_not_accepted_by_its_common_name(server: str, named: tuple[str, ...], tmp_path: Path) -> None:
    """RFC 9525 6.3: only the alternative names count."""
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(['h2'])
    context.load_cert_chain(*authority.issue(tmp_path / 'server', 'localhost', *named))
    with closing(RecordingServer(context)) as listener:
        endpoint = f'localhost:{listener.address.rpartition(":")[2]}'
        store = Store(EtcdConfig((endpoint,), ca_cert=authority.certificate, timeout=2.0))
        client = Placement(PlacementConfig(f'https://{endpoint}', ca_cert=authority.certificate))
        operator = tmp_path / 'certs/operator-ann'
        operator.mkdir(parents=True)
        (operator / 'client.crt').touch()
        etcd = f"etcd: {{endpoints: ['{endpoint}'], ca_cert: {authority.certificate}}}"
        (operator / 'schedule.yaml').write_text(f"{etcd}\nplacement: {{endpoint: 'http://localhost'}}\n")
        connect = {
            'etcd': lambda: store.get('/x'),
            'placement': lambda: client.get('/x'),
            'etcd by elab certs --enable': lambda: enable_roles(operator.parent, datetime.now(UTC), print),
        }[server]
        try:
            with pytest.raises(Unreachable, match='name'):
                connect()
        finally:
            store.close()
            client.close()
    assert [data for data in listener.received if data] == []


@pytest.mark.parametrize(('mode', 'is_open'), [(0o600, False), (0o640, False), (0o644, True), (0o602, True)])
def test_doctor_and_ecompute_name_secrets_open_to_all_users(
    mode: int, is_open: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority, closed_endpoint = Authority(tmp_path), f'127.0.0.1:{free_port()}'
    certificate, key = authority.issue(tmp_path / 'own', 'client')
    token = tmp_path / 'token'
    token.write_text('secret\n')
    for path in (key, token):
        path.chmod(mode)
    etcd = EtcdConfig((closed_endpoint,), authority.certificate, key, certificate)
    placement = PlacementConfig(f'https://{closed_endpoint}', authority.certificate, key, certificate, token)
    expected = [str(key), str(token)] if is_open else []
    ailments = [item for item in check_backends(probe_backends(etcd, placement, None, '')) if item.check == 'secret']
    assert [(item.what.split()[0], item.cure) for item in ailments] == [(path, f'chmod o= {path}') for path in expected]
    store = Store(etcd)
    _warn_of_insecure_setup(ComputeConfig(etcd=etcd, placement=placement), store)
    store.close()
    assert [item.getMessage().split()[0] for item in caplog.records if 'chmod' in item.getMessage()] == expected


def test_doctor_ignores_a_key_that_it_cannot_stat(tmp_path: Path) -> None:
    key = tmp_path / ('x' * 300)  # ENAMETOOLONG, as EACCES is for others than root
    ailments = check_backends(
        probe_backends(EtcdConfig((f'127.0.0.1:{free_port()}',), cert_key=key), PlacementConfig(), None, '')
    )
    assert 'secret' not in [ailment.check for ailment in ailments]
