"""`elab control`: etcd and placement on localhost, for as long as it runs and no longer."""

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
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pytest

from ecomp.lab import certs, elab, machine
from ecomp.lab.control import LOCALHOST
from ecomp.lab.control import etcd_server as etcd_server
from tests.kit.servers import PLACEMENT_HEADERS, environment, free_port, until

pytestmark = [
    pytest.mark.skipif(shutil.which('etcd') is None, reason='etcd is not installed: apt-get install etcd-server'),
    pytest.mark.skipif(importlib.util.find_spec('placement') is None, reason="pip install '.[lab]'"),
]


@contextmanager
def control(data: Path, etcd: int, placement: int, *more: str) -> Iterator[subprocess.Popen[str]]:
    words = ['--etcd-port', str(etcd), '--placement-port', str(placement), '--data', str(data), *more]
    process = subprocess.Popen(
        [sys.executable, '-m', 'ecomp.lab.elab', 'control', *words],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ready(process: subprocess.Popen[str]) -> list[str]:
    """Its two lines on stdout, which come when both are ready."""
    assert process.stdout is not None
    return [process.stdout.readline().strip(), process.stdout.readline().strip()]


def call(url: str, body: object = None, method: str = 'GET') -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    headers = {**PLACEMENT_HEADERS, 'content-type': 'application/json'}
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=30) as answer:
        return dict(json.loads(answer.read() or b'{}'))


def etcdctl(port: int, *words: str) -> str:
    command = ['etcdctl', f'--endpoints=localhost:{port}', *words]
    return subprocess.run(command, check=True, env=environment(), capture_output=True, text=True, timeout=30).stdout


def status(url: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str]]:
    """The status and the headers of the answer to a page in somebody's browser."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
            return answer.status, {name.lower(): value for name, value in answer.headers.items()}
    except urllib.error.HTTPError as error:
        return error.code, {name.lower(): value for name, value in error.headers.items()}


def open_to_others(directory: Path) -> list[str]:
    """What of it, and in it, other users of the machine could read."""
    return [path.name for path in (directory, *directory.iterdir()) if path.stat().st_mode & 0o077]


def children(process: subprocess.Popen[str]) -> list[int]:
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
def test_both_answer_end_with_it_and_remember(tmp_path: Path, number: int) -> None:
    etcd, placement = free_port(), free_port()
    with control(tmp_path / 'data', etcd, placement) as process:
        assert ready(process) == [f'etcd localhost:{etcd}', f'placement http://localhost:{placement}']
        etcdctl(etcd, 'put', 'key', 'value')
        call(f'http://localhost:{placement}/resource_providers', {'name': 'one'}, 'POST')
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 0
    assert 'every user of this machine can write to both. Fix: elab control --certs certs' in said
    names = {path.name for path in (tmp_path / 'data').iterdir()}
    assert {'placement.sqlite', 'placement.log', 'etcd.log', 'etcd'} <= names
    assert open_to_others(tmp_path / 'data') == []
    assert is_free(etcd)
    assert is_free(placement)

    with control(tmp_path / 'data', etcd, placement) as process:
        ready(process)
        assert etcdctl(etcd, 'get', 'key') == 'key\nvalue\n'
        providers = call(f'http://localhost:{placement}/resource_providers')['resource_providers']
        assert isinstance(providers, list)
        assert [each['name'] for each in providers] == ['one']


def test_an_etcd_that_ended_before_it_was_a_member_comes_back(tmp_path: Path) -> None:
    """On its own it would wait for a leader for ever: what it has written says that it has begun, and no more."""
    data, port = Path(), free_port()

    def begun_and_no_more(number: int) -> bool:
        nonlocal data
        data = tmp_path / str(number)
        data.mkdir()
        process = etcd_server(data, [LOCALHOST], port).start([])
        wal = data / 'etcd/member/wal'
        # One that ended before that has not begun.
        until(lambda: [*wal.glob('*.wal')] or not machine.alive(process), 10, 'it has begun')
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # at once: a millisecond later it has written more
        machine.end([process])
        written = [*wal.glob('*.wal')]
        if not written:
            return False
        with written[0].open('rb') as file:
            return len(file.read(4096).rstrip(b'\0')) < 100  # its first entry, that it is a member, is longer

    assert any(begun_and_no_more(number) for number in range(200))
    for words in (['--force-new-cluster'], []):
        with control(data, port, free_port()) as process:
            ready(process)
            (pid,) = (each for each in children(process) if Path(f'/proc/{each}/comm').read_text() == 'etcd\n')
            command = Path(f'/proc/{pid}/cmdline').read_text().split('\0')
            # Once it has been healthy it is not told so again: that would cost what it wrote last.
            assert [each for each in command if each == '--force-new-cluster'] == words
            assert etcdctl(port, 'get', 'key') == ('' if words else 'key\nvalue\n')
            etcdctl(port, 'put', 'key', 'value')
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0


def test_a_page_in_a_browser_reads_and_writes_nothing(tmp_path: Path) -> None:
    """Any page read and wrote a cluster on localhost by etcd's JSON gateway, whose CORS is `*` (FACTS 46)."""
    ports = free_port(), free_port()
    foreign = {'Origin': 'http://evil.example', 'Content-Type': 'text/plain'}  # so that no browser asks beforehand
    with control(tmp_path / 'data', *ports) as process:
        ready(process)
        etcd, placement = (f'http://localhost:{port}' for port in ports)
        body = json.dumps({'key': 'a2V5', 'value': 'dmFsdWU='}).encode()
        for path in ('/v3/kv/put', '/v3/kv/range', '/v3/watch', '/v3beta/kv/put', '/v2/keys/key'):
            assert status(etcd + path, body, **foreign)[0] == 404, path
        assert etcdctl(ports[0], 'get', 'key') == ''
        provider = json.dumps({'name': 'one'}).encode()
        # The token and the kind of its body are asked for beforehand, and nobody says yes.
        assert status(f'{placement}/resource_providers', provider, **foreign)[0] == 401
        assert status(f'{placement}/resource_providers', provider, **foreign, **{'X-Auth-Token': 'admin'})[0] == 415
        for url in (f'{etcd}/version', f'{etcd}/health', f'{placement}/', f'{placement}/resource_providers'):
            code, headers = status(url, Origin='http://evil.example', **{'X-Auth-Token': 'admin'})
            assert (code, [each for each in headers if each.startswith('access-control')]) == (200, []), url
            # By another name that leads here it would be the page's own origin.
            for host in ('evil.example', 'evil.example:80', 'localhost.evil.example', '[', '127.0.0.1.evil.example'):
                assert status(url, Host=host, **{'X-Auth-Token': 'admin'})[0] in (421, 400), (url, host)
            for host in ('localhost', 'localhost:8080', '127.0.0.1', '127.0.0.1:2379'):
                assert status(url, Host=host, **{'X-Auth-Token': 'admin'})[0] == 200, (url, host)


def test_when_it_is_killed_both_end_too(tmp_path: Path) -> None:
    etcd, placement = free_port(), free_port()
    with control(tmp_path / 'data', etcd, placement) as process:
        ready(process)
        process.kill()
    until(lambda: is_free(etcd) and is_free(placement), 20, 'both ports are free')


def test_when_one_ends_the_other_is_ended_and_it_says_which(tmp_path: Path) -> None:
    etcd, placement = free_port(), free_port()
    with control(tmp_path / 'data', etcd, placement) as process:
        ready(process)
        ours = children(process)
        victim = next(pid for pid in ours if 'placement_server' in Path(f'/proc/{pid}/cmdline').read_text())
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert 'placement ended' in errors
    assert is_free(etcd)


def test_when_nobody_reads_what_it_says_both_are_ended(tmp_path: Path) -> None:
    etcd, placement = free_port(), free_port()
    with control(tmp_path / 'data', etcd, placement) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.wait(60) == 1
        assert process.stderr is not None
        said = process.stderr.read()
    assert 'Traceback' not in said
    assert is_free(etcd)
    assert is_free(placement)


@pytest.mark.parametrize('which', ['etcd', 'placement'])
def test_a_taken_port_is_one_line(tmp_path: Path, which: str) -> None:
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        listener.listen()
        taken = listener.getsockname()[1]
        ports = (taken, free_port()) if which == 'etcd' else (free_port(), taken)
        with control(tmp_path / 'data', *ports) as process:
            out, errors = process.communicate(timeout=20)
    assert process.returncode == 2
    assert out == ''
    assert errors.splitlines() == [
        f'elab: port {taken} for {which} cannot be had (Address already in use): say another with --{which}-port'
    ]


# Behind certificates


class Secured(NamedTuple):
    """A control plane that takes nobody without a certificate: where its parts are, and the directory of elab certs."""

    etcd: int
    placement: int
    certs: Path

    def asked(self, who: str, token: str | None = None, **headers: str) -> tuple[int, str]:
        """What placement answers to who has this one's certificate and token, and its certificate's number."""
        own = self.certs / who
        context = ssl.create_default_context(cafile=str(own / 'ca.crt'))
        if (own / 'client.crt').exists():
            context.load_cert_chain(own / 'client.crt', own / 'client.key')
        connection = http.client.HTTPSConnection('localhost', self.placement, timeout=20, context=context)
        try:
            said = (own / 'token').read_text().strip() if token is None else token
            connection.request('GET', '/resource_providers', headers={**headers, 'x-auth-token': said})
            found = connection.sock.getpeercert()
            answer = connection.getresponse()
            answer.read()
            return answer.status, str(found['serialNumber'])
        finally:
            connection.close()


@pytest.fixture(scope='module')
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    if shutil.which('stunnel4') is None:
        pytest.skip('stunnel4 is not installed: apt-get install stunnel4')
    top = tmp_path_factory.mktemp('secured')
    made = Secured(free_port(), free_port(), top / 'certs')
    issue(made)
    with control(top / 'data', made.etcd, made.placement, '--certs', str(made.certs)) as process:
        assert ready(process) == [f'etcd localhost:{made.etcd}', f'placement https://localhost:{made.placement}']
        yield made
        process.terminate()
        _, said = process.communicate(timeout=20)
        assert process.returncode == 0
    assert 'every user of this machine' not in said
    assert is_free(made.etcd)
    assert is_free(made.placement)


def issue(made: Secured) -> None:
    """What elab certs does."""
    names = {'servers': ('localhost', '127.0.0.1'), 'computes': ('hv1',), 'schedulers': (), 'operators': ('ann',)}
    cluster = certs.Cluster(**names, etcd_port=made.etcd, placement_port=made.placement)
    certs.make(made.certs, cluster, datetime.now(UTC).replace(microsecond=0), lambda _: None)


def test_a_compute_and_an_operator_with_certificates_are_a_cluster(secured: Secured, tmp_path: Path) -> None:
    words = ['--fake', 'VCPU:4,DISK_GB:10,MEMORY_MB:1024']
    with (tmp_path / 'log').open('w') as log:
        compute = subprocess.Popen(
            [sys.executable, '-m', 'ecomp.compute', *words],
            cwd=secured.certs / 'compute-hv1', env=environment(), stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until(lambda: ' ready: ' in (tmp_path / 'log').read_text(), 30, 'the compute is ready')
        done = subprocess.run(
            [sys.executable, '-m', 'ecomp.schedule', 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64', '--wait'],
            cwd=secured.certs / 'operator-ann', env=environment(), capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, '')
        assert done.stdout.startswith('NOTIFIED TARGET, ')
    finally:
        compute.terminate()
        compute.wait(60)


def test_who_has_no_certificate_or_not_the_word_is_told_nothing(secured: Secured) -> None:
    assert secured.asked('operator-ann')[0] == 200
    for token in ('admin', '', 'x', 'é'):
        assert secured.asked('operator-ann', token, **{'X-Roles': 'admin', 'X-User-Id': 'admin'})[0] == 401
    (secured.certs / 'nobody').mkdir()
    for name in ('ca.crt', 'token'):
        shutil.copy(secured.certs / 'operator-ann' / name, secured.certs / 'nobody')
    with pytest.raises(OSError, match='(?i)certificate required|closed|reset|EOF'):
        secured.asked('nobody')
    refused = subprocess.run(
        ['etcdctl', f'--endpoints=https://localhost:{secured.etcd}', f'--cacert={secured.certs}/ca.crt', 'get', 'x'],
        env=environment(), capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert refused.returncode != 0


def test_a_certificate_that_is_exchanged_counts_without_a_restart(secured: Secured) -> None:
    before = secured.asked('operator-ann')[1]
    (secured.certs / 'placement/server.crt').unlink()
    issue(secured)

    def shown() -> bool:
        # As stunnel reads it, who has just connected and was not taken yet is cut off: a client asks again.
        with contextlib.suppress(ConnectionError, ssl.SSLEOFError):
            return secured.asked('operator-ann')[1] != before
        return False

    until(shown, 20, 'the new certificate is shown')


def test_on_an_address_that_others_reach_it_makes_certificates(tmp_path: Path) -> None:
    """In a network of its own, which has one such address."""
    start = 'ip link set lo up; ip address add 10.77.0.1/32 dev lo; exec "$@"'
    command = [sys.executable, '-m', 'ecomp.lab.elab', 'control', '--bind', '10.77.0.1']
    process = subprocess.Popen(
        ['unshare', '--net', 'sh', '-c', start, 'sh', *command],
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert ready(process) == ['etcd 10.77.0.1:2379', 'placement https://10.77.0.1:8080']
        made = tmp_path / 'certs'
        assert elab.main(['certs', str(made), '--operator', 'ann']) == 0
        eschedule = ['nsenter', '--net', f'--target={process.pid}', sys.executable, '-m', 'ecomp.schedule', 'hosts']
        for place, code in ((made / 'operator-ann', 0), (tmp_path, 7)):
            done = subprocess.run(
                eschedule, cwd=place, env=environment(), capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == code, done
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 0
    assert 'elab certs certs --compute HOST...' in errors


def test_certificates_that_are_not_whole_are_named(
    secured: Secured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(secured.certs, tmp_path / 'certs')
    (tmp_path / 'certs/etcd/server.key').unlink()
    ports = ['--etcd-port', str(free_port()), '--placement-port', str(free_port())]
    words = ['control', '--data', str(tmp_path / 'data'), '--certs', str(tmp_path / 'certs'), *ports]
    assert elab.main(words) == 2
    said = f'elab: {tmp_path}/certs/etcd/server.key cannot be read: elab certs makes it\n'
    assert capsys.readouterr().err == said


@pytest.mark.fast
@pytest.mark.parametrize(
    ('words', 'said'),
    [
        (['--bind', '0.0.0.0'], '--bind 0.0.0.0: say which address'),
        (['--bind', 'ds1'], '--bind ds1: must be an address'),
        (['--bind', '192.0.2.1'], '--bind 192.0.2.1: must be an address of this machine: ip address lists them'),
    ],
)
def test_what_it_refuses_is_one_line(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert elab.main(['control', '--data', 'data', *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count('\n') == 1
    assert not Path('data').exists()
