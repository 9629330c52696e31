"""`elab control`: etcd and placement on localhost, for as long as it runs and no longer."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.kit.servers import PLACEMENT_HEADERS, environment, free_port, until

pytestmark = [
    pytest.mark.skipif(shutil.which('etcd') is None, reason='etcd is not installed: apt-get install etcd-server'),
    pytest.mark.skipif(importlib.util.find_spec('placement') is None, reason="pip install '.[lab]'"),
]


@contextmanager
def control(data: Path, etcd: int, placement: int) -> Iterator[subprocess.Popen[str]]:
    words = ['--etcd-port', str(etcd), '--placement-port', str(placement), '--data', str(data)]
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
        assert process.wait(20) == 0
    assert is_free(etcd)
    assert is_free(placement)

    with control(tmp_path / 'data', etcd, placement) as process:
        ready(process)
        assert etcdctl(etcd, 'get', 'key') == 'key\nvalue\n'
        providers = call(f'http://localhost:{placement}/resource_providers')['resource_providers']
        assert isinstance(providers, list)
        assert [each['name'] for each in providers] == ['one']


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
        children = Path(f'/proc/{process.pid}/task/{process.pid}/children').read_text().split()
        victim = next(int(pid) for pid in children if 'placement_server' in Path(f'/proc/{pid}/cmdline').read_text())
        os.kill(victim, signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert 'placement ended' in errors
    assert is_free(etcd)


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
