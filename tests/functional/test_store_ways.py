"""Test connections to etcd: addresses, members, certificates and flooding servers."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection

import ecomp.conf
from ecomp.conf import EtcdConfig
from ecomp.errors import UnknownOutcome, Unreachable
from ecomp.placement.client import Placement
from ecomp.store.client import Put, Store, Unchanged
from ecomp.store.connection import Connection
from ecomp.store.http2_client import EtcdMember as H2Member
from ecomp.store.messages import (
    DEADLINE_EXCEEDED,
    FAILED_PRECONDITION,
    UNAVAILABLE,
    CallFailure,
    Status,
    WatchCreate,
    can_retry_elsewhere,
    is_unsent,
)
from ecomp.tls import ETCD_SENTENCES, TlsFailure
from tests.kit.certificates import Authority
from tests.kit.etcd_member import Member, Tls
from tests.kit.listening import ThreadedServer
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd, PlacementServer, wait_until

# Connections that are never accepted: with the shortest queue the kernel drops all that follow.
FILLING_CONNECTIONS = 4


@contextmanager
def open_hole(port: int, *addresses: str) -> Iterator[None]:
    with ExitStack() as stack:
        for address in addresses:
            listener = stack.enter_context(socket.socket())
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((address, port))
            listener.listen(0)
            for _ in range(FILLING_CONNECTIONS):
                filler = stack.enter_context(socket.socket())
                filler.setblocking(False)
                with suppress(BlockingIOError):
                    filler.connect((address, port))
            wait_until(lambda address=address: _is_silent(address, port), 5, f'nobody answers at {address}')
        yield


def _is_silent(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(0.2)
        try:
            probe.connect((address, port))
        except TimeoutError:
            return True
    return False


UNREACHABLE_ADDRESSES = ('127.0.0.2', '127.0.0.3')
HOST_NAME = 'localhost'


@pytest.fixture
def resolver_with_dead_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(host: Any, port: Any, *given: Any, **named: Any) -> Any:
        if host not in (HOST_NAME, HOST_NAME.encode()):
            return real(host, port, *given, **named)
        return [
            info for address in (*UNREACHABLE_ADDRESSES, '127.0.0.1') for info in real(address, port, *given, **named)
        ]

    real = socket.getaddrinfo
    monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)


def make_config(*endpoints: str, timeout: float = 5.0) -> EtcdConfig:
    return EtcdConfig(endpoints, timeout=timeout)


@pytest.mark.usefixtures('resolver_with_dead_addresses')
def test_unreachable_first_addresses_of_a_name_are_skipped(etcd: Etcd, prefix: str) -> None:
    with open_hole(etcd.port, *UNREACHABLE_ADDRESSES):
        for endpoints in ((f'{HOST_NAME}:{etcd.port}',), (f'{HOST_NAME}:{etcd.port}',) * 3):
            with closing(Store(make_config(*endpoints))) as store:
                assert store.commit([Unchanged(prefix, 0)], [Put(prefix, 'x')])
                assert store.get(prefix) is not None
            prefix += 'x'


@pytest.mark.usefixtures('resolver_with_dead_addresses')
def test_placement_is_reached_at_the_answering_address(placement: PlacementServer) -> None:
    with (
        open_hole(placement.port, *UNREACHABLE_ADDRESSES),
        closing(Placement(f'http://{HOST_NAME}:{placement.port}')) as client,
    ):
        began = time.monotonic()
        assert client.get('/traits')['traits']
        assert time.monotonic() - began < 3


def test_two_unreachable_members_of_five_are_skipped(etcd: Etcd, prefix: str) -> None:
    endpoints = [*(f'{address}:{etcd.port}' for address in UNREACHABLE_ADDRESSES), *(etcd.endpoint,) * 3]
    with open_hole(etcd.port, *UNREACHABLE_ADDRESSES):
        with closing(Store(make_config(*endpoints))) as store:
            assert store.get(prefix) is None
        with closing(Store(make_config(*endpoints))) as store:
            assert store.commit([Unchanged(prefix, 0)], [Put(prefix, 'x')])


@pytest.mark.parametrize('hanging_members', [1, 2])
def test_hanging_members_delay_a_command_by_a_third_of_a_second_each(
    hanging_members: int, etcd: Etcd, prefix: str
) -> None:
    """A frozen member's kernel accepts connections, and nothing answers."""
    with ExitStack() as stack:
        frozen = [stack.enter_context(socket.create_server(('127.0.0.1', 0))) for _ in range(hanging_members)]
        endpoints = [f'127.0.0.1:{each.getsockname()[1]}' for each in frozen] + [etcd.endpoint] * (3 - hanging_members)
        for revision in (0, 1):
            began = time.monotonic()
            with closing(Store(make_config(*endpoints))) as store:
                assert (store.get(prefix) is None) == (revision == 0)
                assert store.commit([], [Put(prefix, 'x')])
            # Less than the half of the timeout that a call waits for one answer.
            assert time.monotonic() - began < 2


def test_hanging_members_alone_are_reported_within_the_timeout() -> None:
    with socket.create_server(('127.0.0.1', 0)) as one, socket.create_server(('127.0.0.1', 0)) as other:
        endpoints = [f'127.0.0.1:{each.getsockname()[1]}' for each in (one, other)]
        with closing(Store(make_config(*endpoints, timeout=2.0))) as store:
            for call, error in ((lambda: store.get('/x'), Unreachable), (lambda: store.grant(5), Unreachable)):
                began = time.monotonic()
                with pytest.raises(error, match='cannot be reached: no answer in time'):
                    call()
                assert time.monotonic() - began < SLOWDOWN_FACTOR * 2.5


class ElectingMembers:
    """Members whose leader has just died, so that they have none for `calls` calls."""

    def __init__(self, calls: int) -> None:
        self.remaining_calls = calls

    def begin(self, _: EtcdConfig, endpoint: str) -> SimpleNamespace:
        def call(*_: object) -> str:
            if endpoint == 'dead:1':
                raise CallFailure(UNAVAILABLE, 'Connection refused', unsent=True)
            self.remaining_calls -= 1
            if self.remaining_calls > 0:
                raise CallFailure(UNAVAILABLE, 'etcdserver: no leader')
            return endpoint

        return SimpleNamespace(call=call, close=lambda: None)


@pytest.mark.parametrize('unanswered', [Unreachable, UnknownOutcome])
def test_call_waits_for_the_election_of_a_new_leader(
    unanswered: type[Unreachable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.store.http2_client.EtcdMember', ElectingMembers(6).begin)
    connection = Connection(make_config('dead:1', 'alive:2', 'alive:3'))
    assert connection.ask(Status(), unanswered).startswith('alive')


def test_slow_connections_succeed_within_the_timeout(etcd: Etcd, prefix: str) -> None:
    """Check members that each take longer than a fifth of the timeout, as on a slow link."""
    with (
        closing(SlowProxy(etcd.port, 1.4)) as slow_proxy,
        closing(Store(make_config(*(slow_proxy.address,) * 5))) as store,
    ):
        assert store.get(prefix) is None


class SlowProxy(ThreadedServer):
    def __init__(self, port: int, seconds: float) -> None:
        self._port = port
        self._seconds = seconds
        super().__init__()

    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        time.sleep(self._seconds)
        with socket.create_connection(('127.0.0.1', self._port)) as upstream:
            threading.Thread(target=_pump, args=(connection, upstream), daemon=True).start()
            _pump(upstream, connection)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_slow_address_is_retried_if_the_last_one_refuses() -> None:
    attempts: list[tuple[str, float]] = []

    def connect(address: str, limit: float, timeout: float) -> socket.socket:
        attempts.append((address, limit))
        if address == 'refuses':
            raise ConnectionRefusedError
        if limit < timeout:
            raise TimeoutError
        return socket.socket()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, 'getaddrinfo', lambda *_, **__: ['slow', 'refuses'])
        patch.setattr(ecomp.conf, '_connect', connect)
        sock = ecomp.conf.connect_tcp('x', 1, 5.0, 5.0)
    sock.close()
    assert attempts == [('slow', 1.0), ('refuses', 5.0), ('slow', 5.0)]


@pytest.fixture
def with_learner(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Provide the endpoints of a learner and of its voting member."""
    with Member(tmp_path / 'voter', 'voter') as voter:
        learner = Member(tmp_path / 'learner', 'learner')
        voter.call('cluster/member/add', {'peerURLs': [learner.peer], 'isLearner': True})
        learner.initial, learner.state = f'{voter.initial},{learner.initial}', 'existing'
        try:
            learner.launch()
            wait_until(lambda: _is_learner(learner), 20, 'it learns')
            yield learner.endpoint, voter.endpoint
        finally:
            learner.close()


def _is_learner(member: Member) -> bool:
    try:
        member.get('/x')
    except HTTPError as error:
        return b'rpc not supported for learner' in error.read()
    except OSError:
        return False
    return False


def test_call_refused_by_a_learner_is_sent_to_another_member(with_learner: tuple[str, str]) -> None:
    def run_call(call: Callable[[Store], Any]) -> Any:
        with closing(Store(make_config(*with_learner))) as store:  # each store tries the learner first
            return call(store)

    assert run_call(lambda store: store.commit([Unchanged('/x', 0)], [Put('/x', 'y')]))
    assert run_call(lambda store: store.get('/x')) is not None
    lease = run_call(lambda store: store.grant(60))
    assert run_call(lambda store: store.keep_alive(lease)) == 60
    run_call(lambda store: store.revoke(lease))
    assert run_call(lambda store: store.keep_alive(lease)) == 0


@pytest.mark.parametrize('code', [UNAVAILABLE, FAILED_PRECONDITION])
def test_refusal_by_a_learner_is_recognised_by_its_message(code: str) -> None:
    error = CallFailure(code, 'etcdserver: rpc not supported for learner')
    assert is_unsent(error)
    assert can_retry_elsewhere(error, is_repeatable=True)
    assert can_retry_elsewhere(error, is_repeatable=False)


class SecuredEtcd:
    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory / 'authority')
        server = self.authority.issue(directory, 'server', '127.0.0.1')
        own = self.authority.issue(directory / 'tests', 'tests')
        self.etcd = Member(directory / 'etcd', 'm0', Tls(*server, self.authority.certificate, own))
        certificate, key = self.authority.issue(directory, 'client')
        self.config = EtcdConfig((self.etcd.endpoint,), self.authority.certificate, key, certificate)

    def hide_file(self, path: Path | None) -> Path:
        assert path is not None
        return path.rename(path.with_suffix('.hidden'))


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[SecuredEtcd]:
    server = SecuredEtcd(tmp_path)
    with server.etcd:
        yield server


def test_unreadable_certificate_is_named_until_it_is_restored(secured: SecuredEtcd) -> None:
    key = secured.config.cert_key
    with closing(Store(secured.config)) as store:
        assert store.get('/x') is None
        hidden = secured.hide_file(key)
        secured.etcd.restart()
        for _ in range(2):
            with pytest.raises(Unreachable, match=f'cannot be reached: certificate {key}: No such file') as caught:
                store.get('/x')
            assert caught.value.backend.endswith(f'(certificate {key}: No such file or directory)')
        with pytest.raises(Unreachable, match=f'certificate {key}') as caught:
            store.commit([], [Put('/x', 'y')])
        assert type(caught.value) is Unreachable
        shutil.move(hidden, str(key))
        assert store.get('/x') is None
        secured.etcd.stop()
        with pytest.raises(Unreachable, match='Connection refused'):
            store.get('/x')


def test_error_has_the_failure_of_tls(secured: SecuredEtcd, tmp_path: Path) -> None:
    """The cure of `eschedule check` depends on it."""
    stranger = Authority(tmp_path / 'stranger').certificate
    own_failures = {TlsFailure.OWN_MISSING, TlsFailure.OWN_REFUSED}
    for config, failures in (
        (secured.config._replace(cert_cert=None, cert_key=None), own_failures),
        (secured.config._replace(ca_cert=stranger), {TlsFailure.UNTRUSTED}),
    ):
        with closing(Store(config)) as store, pytest.raises(Unreachable) as caught:
            store.get('/x')
        assert caught.value.tls_failure in failures


@pytest.mark.parametrize(
    ('says', 'why'),
    [
        (b'HTTP/1.1 400 Bad Request\r\n\r\n', ETCD_SENTENCES[TlsFailure.OTHER]),
        (b'', ETCD_SENTENCES[TlsFailure.HUNG_UP]),
        (None, 'it does not speak HTTP/2'),
    ],
)
def test_server_behind_tls_that_is_not_etcd_is_reported(tmp_path: Path, says: bytes | None, why: str) -> None:
    """Check a server that sends clear text, or (None) speaks only HTTP/1.1 over TLS."""
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue(tmp_path / 'server', 'server', '127.0.0.1'))

    class Other(ThreadedServer):
        def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
            with suppress(OSError):
                if says is None:
                    context.wrap_socket(connection, server_side=True).recv(1)
                elif says:
                    connection.recv(1)
                    connection.sendall(says)

    with closing(Other()) as server:
        store = Store(EtcdConfig((server.address,), authority.certificate, timeout=3.0))
        with closing(store), pytest.raises(Unreachable) as caught:
            store.commit([], [Put('/x', 'y')])
        assert type(caught.value) is Unreachable
        assert str(caught.value) == f'etcd at {server.address} cannot be reached: {why}'


def test_certificates_being_replaced_raise_unreachable(secured: SecuredEtcd, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / 'stranger')
    shutil.copy(stranger.certificate, secured.authority.certificate)
    with closing(Store(secured.config)) as store:
        wait_until(lambda: not store._connection.client._connect_thread.is_alive(), 10, 'it has no connection')
        secured.hide_file(secured.config.cert_cert)
        with pytest.raises(CallFailure):
            list(store.watch([WatchCreate(b'/', b'0', 1)], 5))
        for call in (lambda: store.get('/x'), lambda: store.revoke(1), lambda: store.commit([], [Put('/x', 'y')])):
            with pytest.raises(Unreachable, match=f'certificate {secured.config.cert_cert}: No such file') as caught:
                call()
            assert not isinstance(caught.value, UnknownOutcome)


# A server in etcd's place that speaks HTTP/2, never answers, and never stops sending.


# The flood ends after this time.
FLOOD_SECONDS = 20
# Frames of an unknown type, which a receiver must ignore (RFC 9113, section 4.1). The client never reads the last one.
UNKNOWN_FRAMES = b'\0\0\0\x42\0\0\0\0\0' * 10_000


class FloodingServer(ThreadedServer):
    def serve(self, connection: socket.socket, number: int) -> None:  # noqa: ARG002
        http = H2Connection(H2Configuration(client_side=False))
        http.initiate_connection()
        deadline = time.monotonic() + FLOOD_SECONDS * SLOWDOWN_FACTOR
        connection.sendall(http.data_to_send())
        while time.monotonic() < deadline:
            connection.sendall(UNKNOWN_FRAMES)  # requests are never read


@pytest.fixture
def endpoint() -> Iterator[str]:
    with closing(FloodingServer()) as flood:
        yield flood.address


def test_call_to_a_flooding_server_times_out(endpoint: str) -> None:
    began = time.monotonic()
    with closing(Store(EtcdConfig((endpoint,), timeout=1.0))) as store, pytest.raises(Unreachable):
        store.get('/x')
    assert time.monotonic() - began < FLOOD_SECONDS


def test_watch_of_a_flooding_server_times_out(endpoint: str) -> None:
    began = time.monotonic()
    with (
        closing(H2Member(EtcdConfig((endpoint,), timeout=1.0), endpoint)) as member,
        pytest.raises(CallFailure) as caught,
    ):
        list(member.watch([WatchCreate(b'/x', b'/y', 1)], 1.0))
    assert caught.value.code in (DEADLINE_EXCEEDED, UNAVAILABLE)
    assert time.monotonic() - began < FLOOD_SECONDS
