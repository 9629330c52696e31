"""The metadata server asked by two guests, in network namespaces of the test's own."""

from __future__ import annotations

import gzip
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecomp.agent.host.metadata import GuestData
from ecomp.model.guest import USER_DATA_LIMIT
from tests.functional.mdservers import (
    KEY,
    MAC_A,
    MAC_B,
    SECRET,
    USER_DATA,
    UUID_A,
    UUID_B,
    Server,
    asked,
    describe,
    serving,
)
from tests.kit.servers import until

IP_A, IP_B = '192.168.122.11', '192.168.122.12'
# In a guest: a request for each "METHOD URL source-address" line of its input, the answers on one line of JSON each.
ASK = '''
import http.client, json, sys, urllib.parse
for line in sys.stdin:
    method, url, source = line.split()
    parts = urllib.parse.urlsplit(url)
    asked = http.client.HTTPConnection(parts.netloc, timeout=20, source_address=(source, 0))
    asked.request(method, parts.path, 'instance_id=x' if method == 'POST' else None)
    answer = asked.getresponse()
    print(json.dumps([answer.status, answer.read().decode('latin-1')]), flush=True)
'''

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which('ip') is None, reason='network namespaces need root and iproute2',
)


class Bridge:
    """Three namespaces: `host` with the bridge and 169.254.169.254, `a` and `b` the guests, joined by veth."""

    def __init__(self) -> None:
        self.host, self.a, self.b = (f'emd{os.getpid()}{which}' for which in 'hab')
        self.askers: dict[str, subprocess.Popen[str]] = {}

    def ip(self, namespace: str, *arguments: str) -> None:
        done = subprocess.run(['ip', '-n', namespace, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f'ip {arguments}: {done.stderr}'

    def up(self) -> None:
        for namespace in (self.host, self.a, self.b):
            subprocess.run(['ip', 'netns', 'add', namespace], check=True, timeout=60)
            self.ip(namespace, 'link', 'set', 'lo', 'up')
        self.ip(self.host, 'link', 'add', 'virbr0', 'type', 'bridge')
        self.ip(self.host, 'link', 'set', 'virbr0', 'up')
        self.ip(self.host, 'addr', 'add', '192.168.122.1/24', 'dev', 'virbr0')
        self.ip(self.host, 'addr', 'add', '169.254.169.254/32', 'dev', 'virbr0')
        for namespace, port, mac, address in ((self.a, 'vnet0', MAC_A, IP_A), (self.b, 'vnet1', MAC_B, IP_B)):
            self.ip(self.host, 'link', 'add', port, 'type', 'veth', 'peer', 'name', 'eth0', 'address', mac,
                    'netns', namespace)
            self.ip(self.host, 'link', 'set', port, 'master', 'virbr0', 'up')
            self.ip(namespace, 'link', 'set', 'eth0', 'up')
            self.ip(namespace, 'addr', 'add', f'{address}/24', 'dev', 'eth0')
            self.ip(namespace, 'route', 'add', 'default', 'via', '192.168.122.1')
            self.askers[namespace] = subprocess.Popen(
                ['ip', 'netns', 'exec', namespace, sys.executable, '-c', ASK],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )

    def ask(self, guest: str, path: str, source: str, method: str = 'GET') -> tuple[int, str]:
        asker = self.askers[guest]
        assert asker.stdin is not None
        assert asker.stdout is not None
        asker.stdin.write(f'{method} http://169.254.169.254{path} {source}\n')
        asker.stdin.flush()
        status, body = json.loads(asker.stdout.readline())
        return status, body

    def down(self) -> None:
        for asker in self.askers.values():
            asker.communicate(timeout=20)
        for namespace in (self.host, self.a, self.b):
            subprocess.run(['ip', 'netns', 'del', namespace], capture_output=True, timeout=60)


@pytest.fixture
def bridge() -> Iterator[Bridge]:
    made = Bridge()
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture
def on_bridge(bridge: Bridge, tmp_path: Path) -> Iterator[Server]:
    conf = describe(tmp_path, {IP_A: MAC_A, IP_B: MAC_B})
    with serving(tmp_path, str(conf), prefix=('ip', 'netns', 'exec', bridge.host)) as running:
        assert (running.address, running.port) == ('169.254.169.254', 80)
        yield running


@pytest.mark.usefixtures('on_bridge')
def test_two_guests_each_see_their_own(bridge: Bridge) -> None:
    for guest, source, instance, name, keys in (
        (bridge.a, IP_A, UUID_A, 'web1', [KEY]), (bridge.b, IP_B, UUID_B, 'web2', ['ssh-rsa B1', 'ssh-rsa B2']),
    ):
        for tree in ('/2009-04-04/meta-data', '/latest/meta-data'):
            assert bridge.ask(guest, f'{tree}/instance-id', source) == (200, instance)
            assert bridge.ask(guest, f'{tree}/local-hostname/', source) == (200, name)
            assert bridge.ask(guest, f'{tree}/local-ipv4', source) == (200, source)
            for number, key in enumerate(keys):
                assert bridge.ask(guest, f'{tree}/public-keys/{number}/openssh-key', source) == (200, key)
        status, body = bridge.ask(guest, f'/seed/{instance}/meta-data', source)
        assert status == 200
        assert json.loads(body) == {
            'instance-id': instance, 'local-hostname': name, 'public-keys': keys, 'dsmode': 'net',
        }
    assert bridge.ask(bridge.b, '/latest/meta-data/public-keys/', IP_B) == (200, '0=default\n1=key-1')
    assert bridge.ask(bridge.a, '/latest/user-data', IP_A) == (200, USER_DATA.decode('latin-1'))
    assert bridge.ask(bridge.b, '/latest/user-data', IP_B) == (200, f'#!/bin/sh\necho {SECRET}\n')


@pytest.mark.usefixtures('on_bridge')
def test_who_takes_its_address_on_the_lan_keeps_a_guest_from_nothing(bridge: Bridge) -> None:
    """Linux believes ARP of any address on any interface."""
    bridge.ip(bridge.host, 'link', 'add', 'lan', 'type', 'bridge')
    bridge.ip(bridge.host, 'link', 'set', 'lan', 'up')
    bridge.ip(bridge.host, 'neigh', 'replace', IP_A, 'lladdr', MAC_B, 'dev', 'lan', 'nud', 'permanent')
    assert bridge.ask(bridge.a, '/latest/meta-data/instance-id', IP_A) == (200, UUID_A)
    bridge.ip(bridge.host, 'neigh', 'replace', IP_A, 'lladdr', MAC_B, 'dev', 'virbr0', 'nud', 'permanent')
    assert bridge.ask(bridge.b, '/latest/meta-data/instance-id', IP_B) == (200, UUID_B)
    bridge.ip(bridge.b, 'addr', 'add', f'{IP_A}/32', 'dev', 'eth0')
    assert bridge.ask(bridge.b, '/latest/meta-data/instance-id', IP_A)[0] == 404


@pytest.mark.usefixtures('on_bridge')
def test_two_guests_each_get_what_ecompute_was_asked_for(bridge: Bridge, tmp_path: Path) -> None:
    """From the request to the guest: a name, keys and user-data of each one's own, as large and odd as they may be."""
    key = 'ssh-rsa AAAA mé@home: 100 %'
    most = gzip.compress(random.Random(1).randbytes(USER_DATA_LIMIT - 400), 0, mtime=0)
    assert USER_DATA_LIMIT - 400 < len(most) <= USER_DATA_LIMIT
    script = '#!/bin/sh\necho "$(hostname)": \'ä\' {{ x }} \\u0041\x01\n'.encode()
    data = GuestData(tmp_path / 'metadata')
    given = {'name': 'db-1', 'ssh_keys': (KEY, key), 'user_data': most}
    data.write(asked(UUID_A, **given), [MAC_A])
    data.write(asked(UUID_B, ssh_keys=(), user_data=script), [MAC_B])
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / 'metadata').iterdir()} == {0o600}
    for guest, source, instance, name, keys, user_data in (
        (bridge.a, IP_A, UUID_A, 'db-1', [KEY, key], most), (bridge.b, IP_B, UUID_B, f'vm-{UUID_B[:8]}', [], script),
    ):
        assert bridge.ask(guest, '/latest/meta-data/local-hostname', source) == (200, name)
        status, body = bridge.ask(guest, f'/seed/{instance}/meta-data', source)
        seed = json.loads(body.encode('latin-1'))
        assert (status, seed['local-hostname'], seed['public-keys']) == (200, name, keys)
        for path in ('/2009-04-04/user-data', '/latest/user-data', f'/seed/{instance}/user-data'):
            assert bridge.ask(guest, path, source) == (200, user_data.decode('latin-1'))
        for number, each in enumerate(keys):
            path = f'/latest/meta-data/public-keys/{number}/openssh-key'
            assert bridge.ask(guest, path, source) == (200, each.encode().decode('latin-1'))
    # None at all was asked for: not those of mdserver.conf.
    assert 'public-keys' not in bridge.ask(bridge.b, '/latest/meta-data/', IP_B)[1]
    data.remove(UUID_A, [MAC_A])
    assert bridge.ask(bridge.a, '/latest/user-data', IP_A)[0] == 404
    data.write(asked(UUID_A), [MAC_A])
    assert bridge.ask(bridge.a, '/latest/user-data', IP_A) == (200, USER_DATA.decode('latin-1'))


@pytest.mark.usefixtures('on_bridge')
def test_a_guest_says_that_it_is_ready_for_itself_alone(bridge: Bridge, tmp_path: Path) -> None:
    data = GuestData(tmp_path / 'metadata')
    assert bridge.ask(bridge.a, f'/phone-home/{UUID_B}/', IP_A, 'POST')[0] == 404
    assert bridge.ask(bridge.a, '/phone-home/..%2f..%2fetc/', IP_A, 'POST')[0] in (404, 405)
    assert bridge.ask(bridge.a, f'/phone-home/{UUID_A}/', IP_A)[0] == 404  # to look is not to say
    assert data.ready() == set()
    heard: list[str] = []
    stop = data.on_ready(heard.append)
    for _ in range(2):
        assert bridge.ask(bridge.a, f'/phone-home/{UUID_A}/', IP_A, 'POST') == (200, 'ok')
    assert data.ready() == {UUID_A}
    until(lambda: any(UUID_A in each for each in heard), 10, 'it is noticed')
    stop()
    assert data.all() == {MAC_A: UUID_A, MAC_B: UUID_B, UUID_A: UUID_A}
    # Somebody else at this guest's address is not this guest.
    bridge.ip(bridge.b, 'link', 'set', 'eth0', 'down')
    bridge.ip(bridge.a, 'addr', 'add', f'{IP_B}/32', 'dev', 'eth0')
    assert bridge.ask(bridge.a, f'/phone-home/{UUID_B}/', IP_B, 'POST')[0] == 404
    assert data.ready() == {UUID_A}
    # Made again, it has not said so yet; and it leaves nothing.
    data.write(asked(UUID_A), [MAC_A])
    assert data.ready() == set()
    assert bridge.ask(bridge.a, f'/phone-home/{UUID_A}', IP_A, 'POST') == (200, 'ok')
    data.remove(UUID_A, [MAC_A])
    assert data.ready() == set()


@pytest.mark.usefixtures('on_bridge')
def test_the_others_seed_is_not_there(bridge: Bridge) -> None:
    for name in ('', 'meta-data', 'user-data', 'vendor-data'):
        assert bridge.ask(bridge.a, f'/seed/{UUID_B}/{name}', IP_A)[0] == 404
        assert bridge.ask(bridge.b, f'/seed/{UUID_B}/{name}', IP_B)[0] == 200


def test_a_forged_address_is_refused_and_logged(bridge: Bridge, on_bridge: Server) -> None:
    """A takes B's address while B is down, as a guest with a lease and no filter could."""
    bridge.ip(bridge.b, 'link', 'set', 'eth0', 'down')
    bridge.ip(bridge.a, 'addr', 'add', f'{IP_B}/32', 'dev', 'eth0')
    for path in ('/latest/user-data', f'/seed/{UUID_B}/user-data'):
        status, body = bridge.ask(bridge.a, path, IP_B)
        assert (status, body) == (404, f'404 Not Found: {IP_B} is leased to another machine\n')
    assert f'REFUSED {IP_B}: {IP_B} is leased to another machine: leased to {MAC_B}, used by {MAC_A}' in (
        on_bridge.log.read_text())
    # An address nobody leased says nothing either.
    bridge.ip(bridge.a, 'addr', 'add', '192.168.122.99/32', 'dev', 'eth0')
    assert bridge.ask(bridge.a, '/latest/meta-data/', '192.168.122.99') == (
        404, '404 Not Found: no current DHCP lease for 192.168.122.99\n')
    assert bridge.ask(bridge.a, '/', '192.168.122.99')[0] == 200
