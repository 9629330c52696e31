"""A hostile guest or LAN machine does not keep the metadata server from serving others."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.servers import wait_until
from tests.security.rights import ENVIRONMENT, LOOPBACK, MAC, UUID, MetadataServer, write_files

ENEMY = '127.0.0.66'
VICTIM = '127.0.0.9'


def connect(server: MetadataServer, source: str) -> socket.socket:
    return socket.create_connection((LOOPBACK, server.port), 20, (source, 0))


def get(server: MetadataServer, source: str, path: str = '/latest/meta-data/instance-id') -> tuple[int, bytes]:
    return server.request(path, source=source)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[MetadataServer]:
    """A server on loopback, where each address is a client, and VICTIM has a lease."""
    write_files(tmp_path, {VICTIM: (MAC, UUID)})
    with contextlib.closing(MetadataServer(tmp_path)) as running:
        yield running


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) != b''
    except BlockingIOError:
        return True
    except OSError:
        return False


def test_many_connections_of_one_client_do_not_block_others(server: MetadataServer) -> None:
    """ENEMY: 520 connections of one guest blocked all others."""
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(server, ENEMY)) for _ in range(520)]
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.sendall(b'GET / HT')
        for _ in range(10):
            assert get(server, VICTIM) == (200, UUID.encode())
        wait_until(lambda: sum(map(is_open, connections)) == 16, 20, 'the oldest are ended')
        assert all(map(is_open, connections[-16:]))
    lines = [line for line in server.log.read_text().splitlines() if 'has more than 16 connections' in line]
    assert 1 <= len(lines) <= 20, lines


def test_slow_request_is_cut_off(server: MetadataServer) -> None:
    with connect(server, ENEMY) as drip:
        started = time.monotonic()
        drip.sendall(b'GET / HTTP/1.1\r\n')
        while is_open(drip):
            with contextlib.suppress(OSError):
                drip.setblocking(True)
                drip.sendall(b'X')
            time.sleep(0.5)
            assert time.monotonic() - started < 60
        assert time.monotonic() - started > 9
    assert get(server, VICTIM) == (200, UUID.encode())


def test_burst_is_served_and_flood_is_throttled(server: MetadataServer) -> None:
    """The burst is of thirty requests, as of cloud-init."""
    started = time.monotonic()
    assert [get(server, VICTIM)[0] for _ in range(30)] == 30 * [200]
    assert time.monotonic() - started < 15
    before, started, answered = len(server.log.read_text()), time.monotonic(), 0
    while time.monotonic() - started < 5:
        with contextlib.suppress(OSError, http.client.HTTPException):
            answered += get(server, ENEMY, '/')[0] == 200
    seconds = time.monotonic() - started
    assert 20 <= answered <= 20 + 10 * (seconds + 1)
    lines = server.log.read_text()[before:].splitlines()
    assert len(lines) <= 20 + 2 * seconds, lines


def test_pipelined_requests_are_not_answered(server: MetadataServer) -> None:
    """419 pipelined requests a second used half a core, so each connection serves one."""
    with connect(server, VICTIM) as connection:
        connection.sendall(200 * b'GET /latest/meta-data/instance-id HTTP/1.1\r\nHost: x\r\n\r\n')
        answer = b''
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65536):
                answer += piece
    assert answer.count(b'HTTP/1.1 ') == 1
    assert b'Connection: close' in answer


def test_machine_of_the_lan_is_not_answered(tmp_path: Path) -> None:
    """The host has 169.254.169.254 on all interfaces, so machines with a route reach it."""
    script = """
set -e
ip link set lo up
ip link add lan type veth peer name there
ip netns add "$1"; ip link set there netns "$1"
ip addr add 10.9.0.1/24 dev lan; ip link set lan up; ip addr add 169.254.169.254/32 dev lo
ip -n "$1" addr add 10.9.0.2/24 dev there; ip -n "$1" link set there up
ip -n "$1" route add 169.254.169.254 via 10.9.0.1
"$2" -P -m mdserver.server --guests "$3" --bridge virbr0 --with-parent <"$3/stdin" 2>"$3/log" & server=$!
exec 3>"$3/stdin"
for _ in $(seq 100); do grep -q LISTENING "$3/log" && break; sleep 0.1; done
curl -s -m 10 -o "$3/local" -w '%{http_code} ' http://169.254.169.254/
ip netns exec "$1" curl -s -m 10 -o "$3/lan" -w '%{http_code}' http://169.254.169.254/ || true
ip netns del "$1"; exec 3>&-; wait $server
"""
    os.mkfifo(tmp_path / 'stdin')
    name = f'emdlan{os.getpid()}'
    result = subprocess.run(
        ['unshare', '--net', '--mount', 'bash', '-c', script, 'bash', name, sys.executable, str(tmp_path)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    subprocess.run(['ip', 'netns', 'del', name], capture_output=True)
    assert result.stdout == '200 000', (result, (tmp_path / 'log').read_text())
    assert 'client=10.9.0.2 is not a guest of this host: not answered' in (tmp_path / 'log').read_text()


def test_modules_in_the_working_directory_are_not_imported(tmp_path: Path) -> None:
    """The ecompute of root ran a bottle.py of its working directory."""
    from ecomp.agent.host.metadata import make_seed

    (tmp_path / 'bottle.py').write_text('open("ran", "w")\n')
    (tmp_path / 'mdserver').mkdir()
    (tmp_path / 'mdserver/__init__.py').write_text('open("ran", "w")\n')
    guests = tmp_path / 'metadata'
    guests.mkdir()
    guest = {'version': 1, 'instance': UUID, 'mac': MAC, 'hostname': 'web1', 'public_keys': [], 'user_data': 'x'}
    (guests / f'{MAC}.json').write_text(json.dumps(guest))
    with contextlib.chdir(tmp_path):
        assert json.loads(make_seed(guests, tmp_path, MAC, False)['meta-data'])['instance-id'] == UUID
    assert not (tmp_path / 'ran').exists()
