"""`elab control`: etcd and placement on localhost, which end when it ends."""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from ecomp.lab import certs, control, elab, machine
from ecomp.lab.control import LOCALHOST
from ecomp.lab.control import make_etcd_server as make_etcd_server
from tests.kit.listening import CannedServer
from tests.kit.servers import PLACEMENT_HEADERS, free_port, make_environment, wait_until

pytestmark = [
    pytest.mark.skipif(shutil.which('etcd') is None, reason='etcd is not installed: apt-get install etcd-server'),
    pytest.mark.skipif(importlib.util.find_spec('placement') is None, reason="pip install '.[lab]'"),
]


@contextmanager
def run_control(data: Path, etcd: int, placement: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    words = ['--etcd-port', str(etcd), '--placement-port', str(placement), '--data', str(data), *options]
    process = subprocess.Popen(
        [sys.executable, '-m', 'ecomp.lab.elab', 'control', *words],
        env=make_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_ready_lines(process: subprocess.Popen[str]) -> list[str]:
    assert process.stdout is not None
    return [process.stdout.readline().strip(), process.stdout.readline().strip()]


def call(url: str, body: object = None, method: str = 'GET') -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    headers = {**PLACEMENT_HEADERS, 'content-type': 'application/json'}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=30) as answer:
        return dict(json.loads(answer.read() or b'{}'))


def run_etcdctl(port: int, *words: str) -> str:
    command = ['etcdctl', f'--endpoints=localhost:{port}', *words]
    return subprocess.run(
        command, check=True, env=make_environment(), capture_output=True, text=True, timeout=30
    ).stdout


def request_as_page(url: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str]]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}
    except urllib.error.HTTPError as error:
        return error.code, {name.lower(): value for name, value in error.headers.items()}


def list_children(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()]


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(('127.0.0.1', port))
        except OSError:
            return False
    return True


@pytest.mark.parametrize('number', [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_servers_answer_stop_with_elab_and_keep_their_data(tmp_path: Path, number: int) -> None:
    etcd, placement = free_port(), free_port()
    with run_control(tmp_path / 'data', etcd, placement) as process:
        assert read_ready_lines(process) == [f'etcd localhost:{etcd}', f'placement http://localhost:{placement}']
        run_etcdctl(etcd, 'put', 'key', 'value')
        call(f'http://localhost:{placement}/resource_providers', {'name': 'one'}, 'POST')
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
    assert 'every user of this machine can write to etcd and placement. Fix: elab control --certs certs' in errors
    names = {path.name for path in (tmp_path / 'data').iterdir()}
    assert {'placement.sqlite', 'placement.log', 'etcd.log', 'etcd'} <= names
    for path in (tmp_path / 'data', *(tmp_path / 'data').iterdir()):
        assert path.stat().st_mode & 0o077 == 0, path
    assert is_free(etcd)
    assert is_free(placement)

    with run_control(tmp_path / 'data', etcd, placement) as process:
        read_ready_lines(process)
        assert run_etcdctl(etcd, 'get', 'key') == 'key\nvalue\n'
        providers = call(f'http://localhost:{placement}/resource_providers')['resource_providers']
        assert isinstance(providers, list)
        assert [provider['name'] for provider in providers] == ['one']


def test_etcd_killed_before_it_was_a_member_starts_again(tmp_path: Path) -> None:
    """Its log shows only that it has started: on its own it would wait for a leader for ever."""
    data, port = Path(), free_port()

    def kill_before_membership(number: int) -> bool:
        nonlocal data
        data = tmp_path / str(number)
        data.mkdir()
        process = make_etcd_server(data, [LOCALHOST], port).start([])
        wal = data / 'etcd/member/wal'
        # An etcd that ended before it wrote its log has not started.
        wait_until(lambda: [*wal.glob('*.wal')] or not machine.is_alive(process), 10, 'it has begun')
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # immediately: it writes more within a millisecond
        machine.terminate([process])
        log_files = [*wal.glob('*.wal')]
        if not log_files:
            return False
        with log_files[0].open('rb') as file:
            return len(file.read(4096).rstrip(b'\0')) < 100  # the entry that makes it a member is longer

    assert any(kill_before_membership(number) for number in range(200))
    for options in (['--force-new-cluster'], []):
        with run_control(data, port, free_port()) as process:
            read_ready_lines(process)
            (pid,) = (item for item in list_children(process) if Path(f'/proc/{item}/comm').read_text() == 'etcd\n')
            command = Path(f'/proc/{pid}/cmdline').read_text().split('\0')
            # After it was healthy, the option must not be repeated: that would lose its last writes.
            assert [item for item in command if item == '--force-new-cluster'] == options
            assert run_etcdctl(port, 'get', 'key') == ('' if options else 'key\nvalue\n')
            run_etcdctl(port, 'put', 'key', 'value')
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def test_malicious_web_page_reads_and_writes_nothing(tmp_path: Path) -> None:
    """By default, any web page can use etcd on localhost: its JSON gateway allows all origins."""
    ports = free_port(), free_port()
    foreign = {'Origin': 'http://evil.example', 'Content-Type': 'text/plain'}  # needs no CORS preflight request
    with run_control(tmp_path / 'data', *ports) as process:
        read_ready_lines(process)
        etcd, placement = (f'http://localhost:{port}' for port in ports)
        body = json.dumps({'key': 'a2V5', 'value': 'dmFsdWU='}).encode()
        for path in ('/v3/kv/put', '/v3/kv/range', '/v3/watch', '/v3beta/kv/put', '/v2/keys/key'):
            assert request_as_page(etcd + path, body, **foreign)[0] == 404, path
        assert run_etcdctl(ports[0], 'get', 'key') == ''
        provider = json.dumps({'name': 'one'}).encode()
        # A page cannot send the token or a JSON body without a preflight request, which is never granted.
        assert request_as_page(f'{placement}/resource_providers', provider, **foreign)[0] == 401
        assert (
            request_as_page(f'{placement}/resource_providers', provider, **foreign, **{'X-Auth-Token': 'admin'})[0]
            == 415
        )
        for url in (f'{etcd}/version', f'{etcd}/health', f'{placement}/', f'{placement}/resource_providers'):
            code, headers = request_as_page(url, Origin='http://evil.example', **{'X-Auth-Token': 'admin'})
            assert (code, [name for name in headers if name.startswith('access-control')]) == (200, []), url
            # DNS rebinding: a host name that resolves to this server would make it the page's own origin.
            for host in ('evil.example', 'evil.example:80', 'localhost.evil.example', '[', '127.0.0.1.evil.example'):
                assert request_as_page(url, Host=host, **{'X-Auth-Token': 'admin'})[0] in (421, 400), (url, host)
            for host in ('localhost', 'localhost:8080', '127.0.0.1', '127.0.0.1:2379'):
                assert request_as_page(url, Host=host, **{'X-Auth-Token': 'admin'})[0] == 200, (url, host)


def test_killed_elab_ends_both_servers(tmp_path: Path) -> None:
    etcd, placement = free_port(), free_port()
    with run_control(tmp_path / 'data', etcd, placement) as process:
        read_ready_lines(process)
        process.kill()
    wait_until(lambda: is_free(etcd) and is_free(placement), 20, 'both ports are free')


def test_death_of_one_server_is_reported_and_ends_the_other(tmp_path: Path) -> None:
    etcd, placement = free_port(), free_port()
    with run_control(tmp_path / 'data', etcd, placement) as process:
        read_ready_lines(process)
        pids = list_children(process)
        victim = next(pid for pid in pids if 'placement_server' in Path(f'/proc/{pid}/cmdline').read_text())
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert 'placement ended' in errors
    assert is_free(etcd)


def test_closed_stdout_ends_both_servers(tmp_path: Path) -> None:
    etcd, placement = free_port(), free_port()
    with run_control(tmp_path / 'data', etcd, placement) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr is not None
        errors = process.stderr.read()
    assert 'Traceback' not in errors
    assert is_free(etcd)
    assert is_free(placement)


@pytest.mark.parametrize('which', ['etcd', 'placement'])
def test_used_port_is_reported_on_one_line(tmp_path: Path, which: str) -> None:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen()
        used_port = listener.getsockname()[1]
        ports = (used_port, free_port()) if which == 'etcd' else (free_port(), used_port)
        with run_control(tmp_path / 'data', *ports) as process:
            out, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert out == ''
    assert errors.splitlines() == [f'elab: --{which}-port {used_port}: Address already in use. Fix: use another port']


# Behind certificates


class SecuredControl(NamedTuple):
    etcd: int
    placement: int
    certs: Path

    def query_placement(self, user: str, token: str | None = None, **headers: str) -> tuple[int, str]:
        """Return the status, and the serial number of placement's certificate."""
        own = self.certs / user
        context = ssl.create_default_context(cafile=str(own / 'ca.crt'))
        if (own / 'client.crt').exists():
            context.load_cert_chain(own / 'client.crt', own / 'client.key')
        with closing(
            http.client.HTTPSConnection('localhost', self.placement, timeout=20, context=context)
        ) as connection:
            sent_token = (own / 'token').read_text().strip() if token is None else token
            connection.request('GET', '/resource_providers', headers={**headers, 'x-auth-token': sent_token})
            certificate = connection.sock.getpeercert()
            answer = connection.getresponse()
            answer.read()
            return answer.status, str(certificate['serialNumber'])


@pytest.fixture(scope='module')
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredControl]:
    if shutil.which('stunnel4') is None:
        pytest.skip('stunnel4 is not installed: apt-get install stunnel4')
    top = tmp_path_factory.mktemp('secured')
    plane = SecuredControl(free_port(), free_port(), top / 'certs')
    issue_certs(plane)
    with run_control(top / 'data', plane.etcd, plane.placement, '--certs', str(plane.certs)) as process:
        assert read_ready_lines(process) == [
            f'etcd localhost:{plane.etcd}',
            f'placement https://localhost:{plane.placement}',
        ]
        yield plane
        process.terminate()
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0
    assert 'every user of this machine' not in errors
    assert is_free(plane.etcd)
    assert is_free(plane.placement)


def issue_certs(control_plane: SecuredControl) -> None:
    names = {'servers': ('localhost', '127.0.0.1'), 'computes': ('hv1',), 'schedulers': (), 'operators': ('ann',)}
    cluster = certs.Cluster(**names, etcd_port=control_plane.etcd, placement_port=control_plane.placement)
    certs.make_certificates(control_plane.certs, cluster, datetime.now(UTC).replace(microsecond=0), lambda _: None)


def test_compute_and_operator_with_certificates_work_together(secured: SecuredControl, tmp_path: Path) -> None:
    words = ['--fake', 'VCPU:4,DISK_GB:10,MEMORY_MB:1024']
    with (tmp_path / 'log').open('w') as log:
        compute = subprocess.Popen(
            [sys.executable, '-m', 'ecomp.compute', *words],
            cwd=secured.certs / 'compute-hv1', env=make_environment(), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        wait_until(lambda: ' ready: ' in (tmp_path / 'log').read_text(), 30, 'the compute is ready')
        result = subprocess.run(
            [sys.executable, '-m', 'ecomp.schedule', 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64', '--wait'],
            cwd=secured.certs / 'operator-ann', env=make_environment(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (result.returncode, result.stderr) == (0, '')
        assert result.stdout.startswith('NOTIFIED TARGET, ')
    finally:
        compute.terminate()
        compute.wait(60)


def test_client_without_certificate_or_token_is_refused(secured: SecuredControl) -> None:
    assert secured.query_placement('operator-ann')[0] == 200
    for token in ('admin', '', 'x', 'é'):
        assert secured.query_placement('operator-ann', token, **{'X-Roles': 'admin', 'X-User-Id': 'admin'})[0] == 401
    (secured.certs / 'nobody').mkdir()
    for name in ('ca.crt', 'token'):
        shutil.copy(secured.certs / 'operator-ann' / name, secured.certs / 'nobody')
    with pytest.raises(OSError, match='(?i)certificate required|closed|reset|EOF'):
        secured.query_placement('nobody')
    result = subprocess.run(
        ['etcdctl', f'--endpoints=https://localhost:{secured.etcd}', f'--cacert={secured.certs}/ca.crt', 'get', 'x'],
        env=make_environment(), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert result.returncode != 0


def test_replaced_certificate_is_used_without_a_restart(secured: SecuredControl) -> None:
    before = secured.query_placement('operator-ann')[1]
    (secured.certs / 'placement/server.crt').unlink()
    issue_certs(secured)

    def is_new_certificate_shown() -> bool:
        # While stunnel reloads, it drops connections that it has not accepted yet: try again.
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
            return secured.query_placement('operator-ann')[1] != before
        return False

    wait_until(is_new_certificate_shown, 20, 'the new certificate is shown')


def test_control_on_a_reachable_address_makes_certificates(tmp_path: Path) -> None:
    """It runs in a new network namespace that has one such address."""
    start = 'ip link set lo up; ip address add 10.77.0.1/32 dev lo; exec "$@"'
    command = [sys.executable, '-m', 'ecomp.lab.elab', 'control', '--bind', '10.77.0.1']
    process = subprocess.Popen(
        ['unshare', '--net', 'sh', '-c', start, 'sh', *command],
        cwd=tmp_path, env=make_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert read_ready_lines(process) == ['etcd 10.77.0.1:2379', 'placement https://10.77.0.1:8080']
        certs_directory = tmp_path / 'certs'
        assert elab.main(['certs', str(certs_directory), '--operator', 'ann']) == 0
        eschedule = ['nsenter', '--net', f'--target={process.pid}', sys.executable, '-m', 'ecomp.schedule', 'hosts']
        for directory, code in ((certs_directory / 'operator-ann', 0), (tmp_path, 7)):
            result = subprocess.run(
                eschedule,
                cwd=directory,
                env=make_environment(),
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert result.returncode == code, result
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert 'elab certs certs --compute HOST...' in errors


def test_incomplete_certificates_are_reported(
    secured: SecuredControl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(secured.certs, tmp_path / 'certs')
    (tmp_path / 'certs/etcd/server.key').unlink()
    ports = ['--etcd-port', str(free_port()), '--placement-port', str(free_port())]
    words = ['control', '--data', str(tmp_path / 'data'), '--certs', str(tmp_path / 'certs'), *ports]
    assert elab.main(words) == 2
    message = f'elab: {tmp_path}/certs/etcd/server.key cannot be read. Try: elab certs {tmp_path}/certs\n'
    assert capsys.readouterr().err == message


@pytest.mark.fast
@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['--bind', '0.0.0.0'], '--bind 0.0.0.0: no certificate can be made for this address'),
        (['--bind', 'ds1'], '--bind ds1: must be an address'),
        (['--bind', '192.0.2.1'], '--bind 192.0.2.1: must be an address of this machine. Try: ip address'),
    ],
)
def test_refusal_is_reported_on_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert elab.main(['control', '--data', 'data', *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count('\n') == 1
    assert not Path('data').exists()


def test_server_of_another_protocol_is_not_ready() -> None:
    with contextlib.closing(CannedServer(b'SSH-2.0-OpenSSH_9.2\r\n')) as server:
        assert not control.is_etcd_healthy(server.url)
        assert not control.is_url_available(server.url)
        assert len(server.requests) == 2
