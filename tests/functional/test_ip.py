"""Addresses and neighbours of the host, queried from the kernel in a new network namespace."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.kit.servers import environment

pytestmark = pytest.mark.fast

PREPARED = """
import json, subprocess, sys
from ecomp.errors import EcompError
from ecomp.virt import networks as ip

def do(*words):
    subprocess.run(('ip', *words), check=True)

def failed(call, *words):
    try:
        call(*words)
    except EcompError as error:
        return str(error)
"""
A = '52:54:00:00:00:0a'
B = '52:54:00:00:00:0b'
C = '52:54:00:00:00:0c'


def inside(program: str) -> Any:
    """Run a program in a new network namespace; return what it prints as JSON."""
    command = ['/usr/bin/unshare', '--net', sys.executable, '-c', PREPARED + program]
    result = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_a_host_knows_its_own_addresses_without_its_loopback() -> None:
    addresses = inside("""
empty = ip.own_addresses()
do('link', 'set', 'lo', 'up')
do('link', 'add', 'br0', 'type', 'bridge')
for each in ('10.9.0.1/24', '10.9.0.2/24', 'fd00::1/64'):
    do('address', 'add', each, 'dev', 'br0')
print(json.dumps([list(map(str, empty)), list(map(str, ip.own_addresses()))]))
""")
    assert addresses == [[], ['10.9.0.1', '10.9.0.2', 'fd00::1']]


def test_the_metadata_address_is_put_on_a_bridge_and_taken_off() -> None:
    results = inside("""
do('link', 'add', 'br0', 'type', 'bridge')
do('link', 'add', 'br1', 'type', 'bridge')
said = [ip.has_metadata_address('br0'), ip.has_metadata_address('none')]
for each in (True, True):
    ip.set_metadata_address('br0', each)
    said += [ip.has_metadata_address('br0'), ip.has_metadata_address('br1')]
for each in (False, False):
    ip.set_metadata_address('br0', each)
    said += [ip.has_metadata_address('br0')]
ip.set_metadata_address('none', False)
print(json.dumps([said, failed(ip.set_metadata_address, 'none', True)]))
""")
    after_adding_twice, after_removing_twice = [True, False] * 2, [False] * 2
    missing = 'the bridge none is not there: is the network started?'
    assert results == [[False, False, *after_adding_twice, *after_removing_twice], missing]


def test_the_neighbours_that_are_believed_and_asked_for() -> None:
    results = inside(f"""
for bridge in ('br0', 'br1'):
    do('link', 'add', bridge, 'type', 'bridge')
    do('link', 'set', bridge, 'up')
for address, mac, state, bridge in (
    ('10.9.0.5', '{A}', 'permanent', 'br0'), ('10.9.0.6', '{B}', 'stale', 'br0'), ('10.9.0.7', '{C}', 'failed', 'br0'),
    ('169.254.3.4', '{C}', 'permanent', 'br0'), ('10.9.0.8', '52:54:00:00:00:ff', 'permanent', 'br0'),
    # Somebody on another network says that it is he.
    ('10.9.0.9', '{A}', 'permanent', 'br1'), ('10.9.0.9', '{C}', 'permanent', 'br1'),
):
    do('neighbour', 'replace', address, 'lladdr', mac, 'dev', bridge, 'nud', state)
on = dict.fromkeys(['{A}', '{B}', '{C}'], 'br0')
said = [ip.neighbours(on), ip.neighbours({{}}), ip.neighbours({{'{A}': ''}})]
do('neighbour', 'replace', '10.9.0.10', 'lladdr', '{A}', 'dev', 'br0', 'nud', 'stale')
print(json.dumps([*said, ip.neighbours(on)]))
""")
    with_ambiguous_mac = {B: '10.9.0.6'}
    assert results == [{A: '10.9.0.5', B: '10.9.0.6'}, {}, {}, with_ambiguous_mac]


def test_what_cannot_be_done_is_said() -> None:
    missing = inside("ip.search_path = lambda: '/nowhere'; print(json.dumps(failed(ip.own_addresses)))")
    assert missing == 'the program `ip` is not there: install iproute2'


def test_an_interface_whose_name_is_no_utf_8_and_an_ip_that_cannot_be_started() -> None:
    results = inside("""
do('link', 'add', b'br\\xe9', 'type', 'bridge')
do('address', 'add', '10.9.0.1/24', 'dev', b'br\\xe9')
said = [list(map(str, ip.own_addresses()))]
ip.shutil.which = lambda *_, **__: '/'
said.append(failed(ip.own_addresses))
print(json.dumps(said))
""")
    assert results[0] == ['10.9.0.1']
    assert results[1] == '`/` cannot be started: Permission denied'
