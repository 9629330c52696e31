"""A compromised guest on a lab: what it can reach, and what its neighbours receive."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import IPv4Network
from pathlib import Path

import pytest

from ecomp.lab.network import ETCD_PORT, FENCE_CHAINS, PLACEMENT_PORT, Layout
from tests.kit.lab import Lab, make_lab_name
from tests.kit.orders import Guest, place_guest

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason='hypervisors in namespaces need root')]


@pytest.fixture(scope='module')
def lab(guest_image: Path) -> Iterator[Lab]:
    with closing(Lab(make_lab_name('guests'), 1)) as started:
        (started.directory / 'images/guest.qcow2').write_bytes(guest_image.read_bytes())
        yield started


@pytest.fixture(scope='module')
def guest(lab: Lab) -> Iterator[Guest]:
    """One guest tells all stories, because it takes a minute to boot."""
    placed = place_guest(lab, 'one')
    yield placed
    lab.destroy(placed.instance)
    lab.check()


class Page(BaseHTTPRequestHandler):
    """A private web server of a developer."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'private')

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serve_page(address: str) -> Iterator[int]:
    with ThreadingHTTPServer((address, 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def fetch(guest: Guest, url: str) -> str:
    return guest.run(f'timeout 5 wget -q -O - {url} </dev/null 2>&1 || echo nothing')


def test_guest_reaches_only_the_services_for_guests(lab: Lab, guest: Guest) -> None:
    """A guest once had full access to the cluster and to the developer's machine (ENEMY 1)."""
    layout = Layout(lab.name, IPv4Network(lab.facts['network']))
    control, machine, host = str(layout.control), str(layout.machine), str(layout.get_address('hv1'))
    gateway = layout.get_guest_network('hv1')[1]
    (lab.directory / 'images/hello').write_text('hello')
    assert fetch(guest, f'http://{control}/hello') == 'hello'
    assert fetch(guest, 'http://169.254.169.254/latest/meta-data/instance-id') == guest.instance
    with serve_page(machine) as port:
        for target in (
            *(f'{control}:{ETCD_PORT}/version', f'{control}:{PLACEMENT_PORT}/', f'{machine}:{port}/'),
            *(f'{host}:{closed_port}/' for closed_port in (22, 111, port)),
            *(f'{gateway}:{closed_port}/' for closed_port in (22, 53, 111)),
        ):
            output = fetch(guest, f'http://{target}')
            # In particular no server answers that the client should have used TLS.
            assert output.endswith('nothing\n'), (target, output)
            assert 'error' not in output, (target, output)
    # Without the lab's own firewall rules the guest's filter still blocks etcd and placement.
    for hook, chain in FENCE_CHAINS.items():
        lab.run_on('hv1', 'iptables', '--delete', hook, '-i', 'virbr0', '-j', chain)
    with serve_page(machine) as port:
        assert fetch(guest, f'http://{machine}:{port}/') == 'private'
    for port in (ETCD_PORT, PLACEMENT_PORT):
        output = fetch(guest, f'http://{control}:{port}/version')
        assert 'nothing' in output, output
        assert 'error' not in output, output
    # elab up restores the rules.
    lab.run_elab('up')
    with serve_page(machine) as port:
        assert 'nothing' in fetch(guest, f'http://{machine}:{port}/')


# Sends DHCPDISCOVERs from forged MACs, and prints the offered addresses.
DISCOVER_SCRIPT = """\
import os, socket, struct, time
sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b'eth0')
sock.bind(('0.0.0.0', 68))
sock.settimeout(4)
for mac in [bytes.fromhex(known)] + [bytes((2, 0, 0, 0, 0, number)) for number in range(20)]:
    head = struct.pack('!4BIHH4s4s4s4s', 1, 1, 6, 0, int.from_bytes(mac[2:], 'big'), 0, 0x8000, *[bytes(4)] * 4)
    sock.sendto(head + mac + bytes(10 + 64 + 128) + bytes((99, 130, 83, 99, 53, 1, 1, 255)), ('255.255.255.255', 67))
    time.sleep(0.1)
try:
    while True:
        said = sock.recv(2000)
        print(said[28:34].hex(':'), socket.inet_ntoa(said[16:20]))
except TimeoutError:
    pass
"""


def test_dhcp_answers_only_macs_with_a_reservation(lab: Lab, guest: Guest) -> None:
    """One guest once took all 252 addresses in 1.7 s, with forged hardware addresses (ENEMY 4)."""
    name, host = make_lab_name('many'), f'elab-{lab.name}-hv1'

    def ip(*words: str) -> str:
        return subprocess.run(['ip', *words], check=True, timeout=60, capture_output=True, text=True).stdout

    ip('netns', 'add', name)
    try:
        ip('-n', host, 'link', 'add', 'many', 'type', 'veth', 'peer', 'name', 'eth0', 'netns', name)
        ip('-n', host, 'link', 'set', 'many', 'master', 'virbr0', 'up')
        ip('-n', name, 'link', 'set', 'eth0', 'up')
        script = f"known = '{guest.mac.replace(':', '')}'\n{DISCOVER_SCRIPT}"
        offered = ip('netns', 'exec', name, sys.executable, '-c', script).split('\n')
    finally:
        ip('netns', 'del', name)
    assert offered == [f'{guest.mac} {guest.address}', '']
