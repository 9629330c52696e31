"""The metadata server itself, started as users start it. Guests that ask it are in test_mdserver_guests.py."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecomp.agent.host.metadata import GuestData
from ecomp.model.guest import network_config
from tests.functional.mdservers import (
    AS_MODULE,
    KEY,
    MAC_A,
    MAC_B,
    SECRET,
    USER_DATA,
    UUID_A,
    Server,
    asked,
    describe,
    fails,
    serving,
)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """One that takes 127.0.0.1 for guest A."""
    conf = str(describe(tmp_path, {'127.0.0.1': MAC_A}))
    with serving(tmp_path, conf, '--listen', '127.0.0.1:0', '--verbose') as running:
        yield running


def test_the_root_tells_anybody_that_a_metadata_server_answers(tmp_path: Path) -> None:
    with serving(tmp_path, '--listen', '127.0.0.1:0', '--guests', str(tmp_path), command=AS_MODULE) as running:
        answer = running.get('/')
        assert (answer.status, answer.read()) == (200, b'2009-04-04\nlatest')
        assert re.fullmatch(r'mdserver/[\d.]+', answer.getheader('Server') or '')
        answer = running.get('/latest/meta-data/')
        assert (answer.status, answer.read()) == (404, b'404 Not Found: no current DHCP lease for 127.0.0.1\n')


def test_a_guest_gets_its_own_and_the_defaults(server: Server) -> None:
    def body(path: str) -> bytes:
        answer = server.get(path)
        assert answer.status == 200, path
        return answer.read()

    assert body('/2009-04-04/meta-data/instance-id') == UUID_A.encode()
    assert body('/latest/meta-data/public-keys/0/openssh-key') == KEY.encode()
    assert body('/latest/user-data') == body(f'/seed/{UUID_A}/user-data') == USER_DATA
    assert json.loads(body(f'/seed/{UUID_A}/meta-data'))['local-hostname'] == 'web1'
    assert body(f'/seed/{UUID_A}/vendor-data').startswith(b'#!/bin/sh\n')


def test_a_guest_with_several_interfaces_is_told_of_them(server: Server, tmp_path: Path) -> None:
    path, data = f'/seed/{UUID_A}/network-config', GuestData(tmp_path / 'metadata')
    assert server.get(path).read() == b'', 'an older ecompute says nothing of it'
    data.write(asked(UUID_A), [MAC_A, MAC_B])
    assert json.loads(server.get(path).read()) == network_config([MAC_A, MAC_B])
    data.write(asked(UUID_A), [MAC_A])
    assert server.get(path).read() == b''


def test_edits_count_from_the_next_request(server: Server, tmp_path: Path) -> None:
    (tmp_path / 'default-user-data').write_bytes(b'new')
    assert server.get('/latest/user-data').read() == b'new'
    (tmp_path / 'default-user-data').unlink()
    assert server.get('/latest/user-data').status == 500
    (tmp_path / 'virbr0.status').write_text('')
    assert server.get('/latest/user-data').status == 404


def test_other_methods_and_proxies_are_refused(server: Server) -> None:
    assert server.get('/latest/api/token', 'PUT').status == 405
    assert server.get('/latest/meta-data/hostname', 'POST').status == 405
    answer = server.get('/latest/user-data', 'HEAD')
    assert (answer.status, answer.read()) == (200, b'')
    for header in ('X-Forwarded-For', 'Forwarded', 'x-forwarded-for', 'Via', 'X-Forwarded-Host', 'X-Real-IP'):
        answer = server.get('/latest/meta-data/hostname', headers={header: '192.168.122.12'})
        assert (answer.status, answer.read()) == (403, b'403 Forbidden: not through a proxy\n')


def test_page_in_a_guest_s_browser_is_told_nothing_by_a_name_that_leads_here(server: Server) -> None:
    own = f'{server.address}:{server.port}'
    for host in ('evil.example', 'evil.example:80', '169.254.169.254.evil.example', f'{own}.evil.example',
                 f'{own}, evil.example', f'evil.example@{own}', '[evil]', 'localhost', ''):  # fmt: skip
        for path in ('/latest/user-data', '/'):
            answer = server.get(path, headers={'Host': host})
            assert (answer.status, SECRET in answer.read().decode(errors='replace')) == (421, False), host
        assert server.get(f'/phone-home/{UUID_A}', 'POST', {'Host': host}).status == 421
    # No name leads a browser here by an address: where it listens on all of them, any may be asked.
    for host in (own, server.address, '169.254.169.254', '169.254.169.254:80', '10.0.0.1', '[fe80::1]:80'):
        assert server.get('/latest/meta-data/hostname', headers={'Host': host}).status == 200, host
    with socket.create_connection((server.address, server.port), timeout=20) as old:
        old.sendall(b'GET /latest/meta-data/hostname HTTP/1.0\r\n\r\n')  # without a Host, as busybox's wget may ask
        assert old.recv(100).startswith(b'HTTP/1.0 200')


def test_sizes_are_bounded(server: Server) -> None:
    assert server.get('/', headers={'X-Long': 'x' * 10_000}).status == 431
    assert server.get('/', 'PUT', headers={'Content-Length': '100000'}).status == 413
    assert server.get('/').status == 200


def test_the_log_names_who_and_what_and_no_secret(server: Server, tmp_path: Path) -> None:
    (tmp_path / 'default-user-data').write_text(SECRET)
    assert SECRET in server.get('/latest/user-data').read().decode()
    server.get('/latest/a%0Ab%e9%20c')
    server.process.terminate()
    assert server.process.wait(20) == 0
    log = server.log.read_text()
    when, line = r'\S+T\S+[+-]\d\d:\d\d', rf'GET /latest/user-data 200 client=127\.0\.0\.1 instance={UUID_A}'
    assert re.search(rf'^{when} DEBUG \d+ {line}$', log, re.MULTILINE)
    assert re.match(rf'{when} INFO \d+ LISTENING ', log)
    assert re.search(r'GET /latest/a%0Ab\S*%20c 404 client=127\.0\.0\.1 ', log)
    assert SECRET not in log
    assert KEY not in log


def test_clients_that_say_nothing_hold_up_nobody(server: Server) -> None:
    with contextlib.ExitStack() as silent:
        for number in range(200):
            sock = silent.enter_context(socket.create_connection((server.address, server.port)))
            if number % 2:
                sock.sendall(b'GET / HTTP/1.1\r\nHost: ')
        assert server.get('/latest/meta-data/hostname').read() == b'web1'


@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_a_signal_ends_it_with_0(server: Server, name: str) -> None:
    server.process.send_signal(signal.Signals[name])
    assert server.process.wait(20) == 0


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    with serving(tmp_path, '--with-parent', '--listen', '127.0.0.1:0', stdin=subprocess.PIPE) as running:
        assert running.get('/').status == 200
        assert running.process.poll() is None
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert running.process.wait(20) == 0


def test_where_it_cannot_listen_it_says_why(server: Server) -> None:
    where = f'{server.address}:{server.port}'
    assert fails('--listen', where) == (
        1, f'mdserver: cannot listen on {where}: something listens there already, another mdserver perhaps: '
           'end it or take another port\n')
    # TEST-NET-1 of RFC 5737 is no machine's.
    assert fails('--listen', '192.0.2.254:0') == (
        1, 'mdserver: cannot listen on 192.0.2.254:0: no interface here has that address: '
           'ip addr add 192.0.2.254/32 dev virbr0\n')


def test_what_is_wrong_with_its_arguments_is_one_line(tmp_path: Path) -> None:
    conf = tmp_path / 'mdserver.conf'
    conf.write_text('[mdserver]\npassword = password\n[x]\n')
    code, said = fails(str(conf))
    assert code == 2
    assert re.fullmatch(rf'mdserver: {conf}: line 2: "password": .*; line 3: unknown section \[x\]: .*\n', said)
    assert fails('--listen', 'localhost') == (2, "mdserver: --listen: 'localhost' is not an IPv4 address\n")
    assert fails(str(tmp_path / 'none'))[0] == 2
