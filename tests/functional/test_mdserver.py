"""The metadata server, its guests, and their ready reports."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mdserver import guests, metadata
from mdserver.server import MAX_BODY_BYTES

from ecomp.agent.host.metadata import GuestData
from ecomp.model.guest import make_network_config
from ecomp.model.user_data import MAX_USER_DATA_BYTES, GuestFailure, GuestReport
from ecomp.virt.xml import make_seed_url
from tests.functional.mdservers import (
    AS_MODULE,
    KEY,
    MAC_A,
    MAC_B,
    SECRET,
    USER_DATA,
    UUID_A,
    UUID_B,
    Server,
    make_request,
    run_refused,
    start_server,
    write_host_files,
)
from tests.kit.lab import make_lab_name
from tests.kit.servers import wait_until

# The metadata server itself, started as users start it.


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    conf = str(write_host_files(tmp_path, {'127.0.0.1': MAC_A}))
    with start_server(tmp_path, conf, '--listen', '127.0.0.1:0', '--verbose') as started:
        yield started


def test_root_identifies_a_metadata_server_to_all_clients(tmp_path: Path) -> None:
    with start_server(tmp_path, '--listen', '127.0.0.1:0', '--guests', str(tmp_path), command=AS_MODULE) as started:
        answer = started.get('/')
        assert (answer.status, answer.read()) == (200, b'2009-04-04\nlatest')
        assert re.fullmatch(r'mdserver/\d[\w.]+', answer.getheader('Server') or '')
        answer = started.get('/latest/meta-data/')
        assert (answer.status, answer.read()) == (404, b'404 Not Found: no current DHCP lease for 127.0.0.1\n')


def test_guest_gets_its_own_metadata_and_the_defaults(server: Server) -> None:
    def body(path: str) -> bytes:
        answer = server.get(path)
        assert answer.status == 200, path
        return answer.read()

    assert body('/2009-04-04/meta-data/instance-id') == UUID_A.encode()
    assert body('/latest/meta-data/public-keys/0/openssh-key') == KEY.encode()
    assert body('/latest/user-data') == body(f'/seed/{UUID_A}/user-data') == USER_DATA
    assert json.loads(body(f'/seed/{UUID_A}/meta-data'))['local-hostname'] == 'web1'
    assert body(f'/seed/{UUID_A}/vendor-data').startswith(b'#!/bin/sh\n')


def test_guest_with_several_interfaces_gets_a_network_config(server: Server, tmp_path: Path) -> None:
    path, data = f'/seed/{UUID_A}/network-config', GuestData(tmp_path / 'metadata')
    assert server.get(path).read() == b'', 'it has one interface'
    data.write(make_request(UUID_A), [MAC_A, MAC_B])
    assert json.loads(server.get(path).read()) == make_network_config([MAC_A, MAC_B])
    data.write(make_request(UUID_A), [MAC_A])
    assert server.get(path).read() == b''


def test_changed_files_count_from_the_next_request(server: Server, tmp_path: Path) -> None:
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
        assert (answer.status, answer.read()) == (403, b'403 Forbidden: requests through a proxy are refused\n')


def test_dns_rebinding_by_a_malicious_web_page_is_refused(server: Server) -> None:
    own = f'{server.address}:{server.port}'
    for host in ('evil.example', 'evil.example:80', '169.254.169.254.evil.example', f'{own}.evil.example',
                 f'{own}, evil.example', f'evil.example@{own}', '[evil]', 'localhost', ''):  # fmt: skip
        for path in ('/latest/user-data', '/'):
            answer = server.get(path, headers={'Host': host})
            assert (answer.status, SECRET in answer.read().decode(errors='replace')) == (421, False), host
        assert server.get(f'/phone-home/{UUID_A}', 'POST', {'Host': host}).status == 421
    # An address in Host cannot come from DNS rebinding. A server on all addresses may be reached by any of them.
    for host in (own, server.address, '169.254.169.254', '169.254.169.254:80', '10.0.0.1', '[fe80::1]:80'):
        assert server.get('/latest/meta-data/hostname', headers={'Host': host}).status == 200, host
    with socket.create_connection((server.address, server.port), timeout=20) as client:
        client.sendall(b'GET /latest/meta-data/hostname HTTP/1.0\r\n\r\n')  # without a Host, as busybox's wget may ask
        assert client.recv(100).startswith(b'HTTP/1.0 200')


def test_sizes_of_requests_are_limited(server: Server) -> None:
    assert server.get('/', headers={'X-Long': 'x' * 10_000}).status == 431
    assert server.get('/', 'PUT', headers={'Content-Length': '100000'}).status == 413
    assert server.get('/').status == 200


def test_log_contains_clients_and_paths_but_no_secrets(server: Server, tmp_path: Path) -> None:
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


@pytest.mark.parametrize('name', ['SIGINT', 'SIGTERM'])
def test_signal_ends_it_with_0(server: Server, name: str) -> None:
    server.process.send_signal(signal.Signals[name])
    assert server.process.wait(20) == 0


def test_it_ends_with_its_parent(tmp_path: Path) -> None:
    with start_server(tmp_path, '--with-parent', '--listen', '127.0.0.1:0', stdin=subprocess.PIPE) as started:
        assert started.get('/').status == 200
        assert started.process.poll() is None
        assert started.process.stdin is not None
        started.process.stdin.close()
        assert started.process.wait(20) == 0


def test_failure_to_listen_is_reported(server: Server) -> None:
    address = f'{server.address}:{server.port}'
    assert run_refused('--listen', address) == (
        1,
        f'mdserver: cannot listen on {address}: another process listens there, perhaps an mdserver. '
        'Fix: end it or use another port\n',
    )
    # No machine has an address of TEST-NET-1 (RFC 5737).
    assert run_refused('--listen', '192.0.2.254:0') == (
        1,
        'mdserver: cannot listen on 192.0.2.254:0: no interface has this address. '
        'Fix: ip addr add 192.0.2.254/32 dev virbr0\n',
    )


def test_invalid_arguments_are_reported_on_one_line(tmp_path: Path) -> None:
    conf = tmp_path / 'mdserver.conf'
    conf.write_text('[mdserver]\npassword = password\n[x]\n')
    code, message = run_refused(str(conf))
    assert code == 2
    assert re.fullmatch(rf'mdserver: {conf}: line 2: "password": .*; line 3: unknown section \[x\]: .*\n', message)
    assert run_refused('--listen', 'localhost') == (2, "mdserver: --listen: 'localhost' is not an IPv4 address\n")
    assert run_refused(str(tmp_path / 'none'))[0] == 2


# The metadata server and two guests that query it, in network namespaces.


IP_A = '192.168.122.11'
IP_B = '192.168.122.12'
# Runs in a guest: sends a request for each "METHOD URL source-address" line of its input, prints each answer as JSON.
ASK_SCRIPT = """
import http.client, json, sys, urllib.parse
for line in sys.stdin:
    method, url, source = line.split()
    parts = urllib.parse.urlsplit(url)
    asked = http.client.HTTPConnection(parts.netloc, timeout=20, source_address=(source, 0))
    asked.request(method, parts.path, 'instance_id=x' if method == 'POST' else None)
    answer = asked.getresponse()
    print(json.dumps([answer.status, answer.read().decode('latin-1')]), flush=True)
"""


class Bridge:
    """Network namespaces connected by veth: guests `a` and `b`, and `host` with the bridge."""

    def __init__(self) -> None:
        self.host, self.a, self.b = (make_lab_name(f'md{which}') for which in 'hab')
        self.askers: dict[str, subprocess.Popen[str]] = {}

    def run_ip(self, namespace: str, *arguments: str) -> None:
        result = subprocess.run(['ip', '-n', namespace, *arguments], capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, f'ip {arguments}: {result.stderr}'

    def start(self) -> None:
        for namespace in (self.host, self.a, self.b):
            subprocess.run(['ip', 'netns', 'add', namespace], check=True, timeout=60)
            self.run_ip(namespace, 'link', 'set', 'lo', 'up')
        self.run_ip(self.host, 'link', 'add', 'virbr0', 'type', 'bridge')
        self.run_ip(self.host, 'link', 'set', 'virbr0', 'up')
        self.run_ip(self.host, 'addr', 'add', '192.168.122.1/24', 'dev', 'virbr0')
        self.run_ip(self.host, 'addr', 'add', '169.254.169.254/32', 'dev', 'virbr0')
        for namespace, port, mac, address in ((self.a, 'vnet0', MAC_A, IP_A), (self.b, 'vnet1', MAC_B, IP_B)):
            ends = f'{port} type veth peer name eth0 address {mac} netns {namespace}'
            self.run_ip(self.host, 'link', 'add', *ends.split())
            self.run_ip(self.host, 'link', 'set', port, 'master', 'virbr0', 'up')
            self.run_ip(namespace, 'link', 'set', 'eth0', 'up')
            self.run_ip(namespace, 'addr', 'add', f'{address}/24', 'dev', 'eth0')
            self.run_ip(namespace, 'route', 'add', 'default', 'via', '192.168.122.1')
            self.askers[namespace] = subprocess.Popen(
                ['ip', 'netns', 'exec', namespace, sys.executable, '-c', ASK_SCRIPT],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )

    def ask(self, guest: str, path: str, source: str, method: str = 'GET') -> tuple[int, str]:
        asker = self.askers[guest]
        assert asker.stdin is not None
        assert asker.stdout is not None
        asker.stdin.write(f'{method} http://169.254.169.254{path} {source}\n')
        asker.stdin.flush()
        status, body = json.loads(asker.stdout.readline())
        return status, body

    def stop(self) -> None:
        for asker in self.askers.values():
            asker.communicate(timeout=20)
        for namespace in (self.host, self.a, self.b):
            subprocess.run(['ip', 'netns', 'del', namespace], capture_output=True, timeout=60)


@pytest.fixture
def guest_bridge() -> Iterator[Bridge]:
    if os.geteuid() != 0 or shutil.which('ip') is None:
        pytest.skip('network namespaces need root and iproute2')
    two_guests = Bridge()
    try:
        two_guests.start()
        yield two_guests
    finally:
        two_guests.stop()


@pytest.fixture
def bridge_server(guest_bridge: Bridge, tmp_path: Path) -> Iterator[Server]:
    conf = write_host_files(tmp_path, {IP_A: MAC_A, IP_B: MAC_B})
    with start_server(tmp_path, str(conf), prefix=('ip', 'netns', 'exec', guest_bridge.host)) as started:
        assert (started.address, started.port) == ('169.254.169.254', 80)
        yield started


def test_lan_host_with_a_guests_address_does_not_affect_the_guest(guest_bridge: Bridge, bridge_server: Server) -> None:
    """Linux accepts ARP for any address on any interface."""
    guest_bridge.run_ip(guest_bridge.host, 'link', 'add', 'lan', 'type', 'bridge')
    guest_bridge.run_ip(guest_bridge.host, 'link', 'set', 'lan', 'up')
    guest_bridge.run_ip(guest_bridge.host, 'neigh', 'replace', IP_A, 'lladdr', MAC_B, 'dev', 'lan', 'nud', 'permanent')
    assert guest_bridge.ask(guest_bridge.a, '/latest/meta-data/instance-id', IP_A) == (200, UUID_A)
    guest_bridge.run_ip(
        guest_bridge.host, 'neigh', 'replace', IP_A, 'lladdr', MAC_B, 'dev', 'virbr0', 'nud', 'permanent'
    )
    assert guest_bridge.ask(guest_bridge.b, '/latest/meta-data/instance-id', IP_B) == (200, UUID_B)
    guest_bridge.run_ip(guest_bridge.b, 'addr', 'add', f'{IP_A}/32', 'dev', 'eth0')
    assert guest_bridge.ask(guest_bridge.b, '/latest/meta-data/instance-id', IP_A)[0] == 404
    assert f'REFUSED {IP_A}: {IP_A} is leased to another machine: leased to {MAC_A}, ' in bridge_server.log.read_text()


@pytest.mark.usefixtures('bridge_server')
def test_each_guest_gets_the_metadata_of_its_request(guest_bridge: Bridge, tmp_path: Path) -> None:
    key = 'ssh-rsa AAAA mé@home: 100 %'
    largest = gzip.compress(random.Random(1).randbytes(MAX_USER_DATA_BYTES - 400), 0, mtime=0)
    assert MAX_USER_DATA_BYTES - 400 < len(largest) <= MAX_USER_DATA_BYTES
    script = '#!/bin/sh\necho "$(hostname)": \'ä\' {{ x }} \\u0041\x01\n'.encode()
    data = GuestData(tmp_path / 'metadata')
    fields = {'name': 'db-1', 'ssh_keys': (KEY, key), 'user_data': largest}
    data.write(make_request(UUID_A, **fields), [MAC_A])
    data.write(make_request(UUID_B, ssh_keys=(), user_data=script), [MAC_B])
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / 'metadata').iterdir()} == {0o600}
    for guest, source, instance, name, keys, user_data in (
        (guest_bridge.a, IP_A, UUID_A, 'db-1', [KEY, key], largest),
        (guest_bridge.b, IP_B, UUID_B, f'vm-{UUID_B[:8]}', [], script),
    ):
        assert guest_bridge.ask(guest, '/latest/meta-data/local-hostname', source) == (200, name)
        status, body = guest_bridge.ask(guest, f'/seed/{instance}/meta-data', source)
        seed = json.loads(body.encode('latin-1'))
        assert (status, seed['local-hostname'], seed['public-keys']) == (200, name, keys)
        for path in ('/2009-04-04/user-data', '/latest/user-data', f'/seed/{instance}/user-data'):
            assert guest_bridge.ask(guest, path, source) == (200, user_data.decode('latin-1'))
        for number, expected in enumerate(keys):
            path = f'/latest/meta-data/public-keys/{number}/openssh-key'
            assert guest_bridge.ask(guest, path, source) == (200, expected.encode().decode('latin-1'))
    # The request has an empty list of keys, so the keys of mdserver.conf are not added.
    assert 'public-keys' not in guest_bridge.ask(guest_bridge.b, '/latest/meta-data/', IP_B)[1]
    data.remove(UUID_A, [MAC_A])
    assert guest_bridge.ask(guest_bridge.a, '/latest/user-data', IP_A)[0] == 404
    data.write(make_request(UUID_A), [MAC_A])
    assert guest_bridge.ask(guest_bridge.a, '/latest/user-data', IP_A) == (200, USER_DATA.decode('latin-1'))


@pytest.mark.usefixtures('bridge_server')
def test_guest_reports_ready_only_for_itself(guest_bridge: Bridge, tmp_path: Path) -> None:
    data = GuestData(tmp_path / 'metadata')
    assert guest_bridge.ask(guest_bridge.a, f'/phone-home/{UUID_B}/', IP_A, 'POST')[0] == 404
    assert guest_bridge.ask(guest_bridge.a, '/phone-home/..%2f..%2fetc/', IP_A, 'POST')[0] in (404, 405)
    assert guest_bridge.ask(guest_bridge.a, f'/phone-home/{UUID_A}/', IP_A)[0] == 404  # a GET is not a report
    assert data.find_ready() == set()
    notices: list[str] = []
    stop = data.watch_reports(notices.append)
    for _ in range(2):
        assert guest_bridge.ask(guest_bridge.a, f'/phone-home/{UUID_A}/', IP_A, 'POST') == (200, 'ok')
    assert data.find_ready() == {UUID_A}
    wait_until(lambda: any(UUID_A in notice for notice in notices), 10, 'it is noticed')
    stop()
    assert data.read_instances() == {MAC_A: UUID_A, MAC_B: UUID_B, UUID_A: UUID_A}
    # Another guest that takes this guest's address cannot report for it.
    guest_bridge.run_ip(guest_bridge.b, 'link', 'set', 'eth0', 'down')
    guest_bridge.run_ip(guest_bridge.a, 'addr', 'add', f'{IP_B}/32', 'dev', 'eth0')
    assert guest_bridge.ask(guest_bridge.a, f'/phone-home/{UUID_B}/', IP_B, 'POST')[0] == 404
    assert data.find_ready() == {UUID_A}
    # A recreated guest is not ready yet, and its removal deletes the report.
    data.write(make_request(UUID_A), [MAC_A])
    assert data.find_ready() == set()
    assert guest_bridge.ask(guest_bridge.a, f'/phone-home/{UUID_A}', IP_A, 'POST') == (200, 'ok')
    data.remove(UUID_A, [MAC_A])
    assert data.find_ready() == set()


@pytest.mark.usefixtures('bridge_server')
def test_seed_of_another_guest_is_not_served(guest_bridge: Bridge) -> None:
    for name in ('', 'meta-data', 'user-data', 'vendor-data'):
        assert guest_bridge.ask(guest_bridge.a, f'/seed/{UUID_B}/{name}', IP_A)[0] == 404
        assert guest_bridge.ask(guest_bridge.b, f'/seed/{UUID_B}/{name}', IP_B)[0] == 200


# The ready report of a guest: vendor-data's script, the metadata server and ecompute.


INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
MAC = '52:54:00:aa:00:01'
ADDRESS = '127.0.0.1'
STAGES = ('init-local', 'init', 'modules-config', 'modules-final')


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Provide the port of a metadata server that takes this machine for the guest."""
    (tmp_path / 'metadata').mkdir()
    (tmp_path / f'metadata/{MAC}.json').write_text(json.dumps({'instance': INSTANCE, 'mac': MAC}))
    leases = [{'ip-address': ADDRESS, 'mac-address': MAC, 'expiry-time': 0}]
    (tmp_path / 'virbr0.status').write_text(json.dumps(leases))
    (tmp_path / 'mdserver.conf').write_text('[mdserver]\nguests = metadata\nleases = *.status\n')
    with start_server(tmp_path, 'mdserver.conf', '--listen', f'{ADDRESS}:0', command=AS_MODULE) as process:
        yield process.port


class ScriptGuest:
    """A guest's directories that the script reads, and the script."""

    def __init__(self, root: Path, port: int) -> None:
        self.run = root / 'run'
        self.ssh = root / 'ssh'
        self.bin = root / 'bin'
        self.per_boot = root / 'per-boot'
        self.instance = root / 'instances' / INSTANCE
        for directory in (self.run, self.ssh, self.bin, self.instance):
            directory.mkdir(parents=True)
        self.serial = root / 'product_serial'
        self.serial.write_text(f'ds=nocloud-net;s={make_seed_url(INSTANCE)}\n')
        (self.bin / 'cloud-init').write_text(f'#!{sys.executable}\n')
        (self.bin / 'cloud-init').chmod(0o755)
        self.script = root / 'part-001'
        text = metadata.find_body(f'/seed/{INSTANCE}/vendor-data', guests.KnownGuest(INSTANCE, 'web1', address=ADDRESS))
        assert text is not None
        script = text.decode().replace('/run/cloud-init/', f'{self.run}/').replace('/etc/ssh/', f'{self.ssh}/')
        script = script.replace('/var/lib/cloud/scripts/per-boot/', f'{self.per_boot}/')
        script = script.replace('/var/lib/cloud/instances/', f'{self.instance.parent}/')
        script = script.replace('/sys/class/dmi/id/product_serial', f'{self.serial}')
        self.script.write_text(script.replace('http://169.254.169.254/phone', f'http://{ADDRESS}:{port}/phone'))
        self.script.chmod(0o755)

    def make_host_key(self, kind: str) -> str:
        path = self.ssh / f'ssh_host_{kind}_key'
        subprocess.run(['ssh-keygen', '-q', '-t', kind, '-N', '', '-f', path], check=True, timeout=60)
        return ' '.join(path.with_suffix('.pub').read_text().split()[:2])

    def reboot(self) -> None:
        for path in self.run.iterdir():
            path.unlink()
        (self.script,) = self.per_boot.iterdir()
        self.start()

    def start(self) -> None:
        path = f'{self.bin}:{os.environ["PATH"]}'
        result = subprocess.run([self.script], env={'PATH': path}, capture_output=True, timeout=20)
        assert (result.returncode, result.stdout, result.stderr) == (0, b'', b'')

    def finish_cloud_init(self, **errors: list[str]) -> None:
        stages = {stage: {'errors': errors.get(stage.replace('-', '_'), [])} for stage in STAGES}
        (self.run / 'status.json').write_text(json.dumps({'v1': {'datasource': 'x', 'stage': None, **stages}}))
        (self.run / 'result.json').write_text('{}')


def test_successful_boot_reports_the_host_keys(tmp_path: Path, port: int) -> None:
    data, guest = GuestData(tmp_path / 'metadata'), ScriptGuest(tmp_path, port)
    keys = tuple(guest.make_host_key(kind) for kind in ('ed25519', 'ecdsa', 'rsa'))
    guest.start()
    assert data.find_ready() == set(), 'cloud-init has not ended'
    guest.finish_cloud_init()
    wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
    assert data.read_report(INSTANCE) == GuestReport(keys)
    assert data.read_instances() == {MAC: INSTANCE, INSTANCE: INSTANCE}


def test_guest_reports_again_at_each_boot(tmp_path: Path, port: int) -> None:
    data, guest = GuestData(tmp_path / 'metadata'), ScriptGuest(tmp_path, port)
    guest.finish_cloud_init(modules_final=['the first time'])
    guest.start()
    for _ in range(2):
        wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
        data.remove_report(INSTANCE)
        assert data.find_ready() == set()
        guest.reboot()
        assert data.find_ready() == set(), 'cloud-init has not ended'
        guest.finish_cloud_init()
    wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
    assert data.read_report(INSTANCE) == GuestReport(())


def test_network_guest_keeps_its_instance_cache(tmp_path: Path, port: int) -> None:
    """Without manual-clean, a guest that boots without a metadata server makes new host keys."""
    data, guest = GuestData(tmp_path / 'metadata'), ScriptGuest(tmp_path, port)
    marker = guest.instance / 'manual-clean'
    guest.finish_cloud_init()
    guest.start()
    wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
    assert marker.exists()
    # The instance that cloud-init assumes when no server answers is never kept.
    assert [path.name for path in guest.instance.parent.iterdir()] == [INSTANCE]
    # A copy of the disk belongs to another instance, which boots for the first time.
    for serial in (f'ds=nocloud-net;s={make_seed_url(INSTANCE[::-1])}', ''):
        guest.serial.write_text(serial)
        data.remove_report(INSTANCE)
        guest.reboot()
        guest.finish_cloud_init()
        wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
        assert not marker.exists()
        marker.touch()


def test_failure_is_reported_with_cloud_init_s_message(tmp_path: Path, port: int) -> None:
    data, guest = GuestData(tmp_path / 'metadata'), ScriptGuest(tmp_path, port)
    error = "('scripts-user', RuntimeError('Runparts: 1 failures (part-001) in 1 attempted commands'))"
    guest.finish_cloud_init(modules_final=[error])
    guest.start()
    wait_until(lambda: data.find_ready() == {INSTANCE}, 30, 'it has said so')
    assert data.read_report(INSTANCE) == GuestReport((), GuestFailure('modules-final', error))


def post(port: int, body: bytes) -> int:
    connection = http.client.HTTPConnection(ADDRESS, port, timeout=20)
    with contextlib.closing(connection):
        connection.request('POST', f'/phone-home/{INSTANCE}/', body)
        return connection.getresponse().status


def test_first_report_counts_and_its_length_is_limited(tmp_path: Path, port: int) -> None:
    data = GuestData(tmp_path / 'metadata')
    assert post(port, b'stage=' + b'x' * (MAX_BODY_BYTES - 5)) == 413
    assert post(port, b'&'.join(b'a=b' for _ in range(metadata.MAX_FORM_FIELDS + 1))) == 400
    assert data.find_ready() == set()
    assert post(port, b'stage=init&error=' + 'ü'.encode() * 2039) == 200
    report = data.read_report(INSTANCE)
    assert report.failure is not None
    assert report.failure.stage == 'init'
    assert post(port, b'pub_key_ed25519=none') == 200
    assert data.read_report(INSTANCE) == report
    # remove() deletes a truncated report, too.
    (tmp_path / f'metadata/{INSTANCE}.said').write_text('{')
    data.remove(INSTANCE, [MAC])
    assert list((tmp_path / 'metadata').iterdir()) == []
