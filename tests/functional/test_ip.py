"""Addresses and neighbours of the host, queried from the kernel in a new network namespace."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.kit.servers import make_environment

pytestmark = pytest.mark.fast

PREAMBLE = """
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
MAC_A = '52:54:00:00:00:0a'
MAC_B = '52:54:00:00:00:0b'
MAC_C = '52:54:00:00:00:0c'


def run_in_namespace(program: str) -> Any:
    unshare = ['/usr/bin/unshare', '--net', *([] if os.geteuid() == 0 else ['--map-root-user'])]
    if (allowed := subprocess.run([*unshare, 'true'], capture_output=True, text=True, timeout=60)).returncode:
        pytest.skip(f'a network namespace needs root here: {allowed.stderr.strip()}')
    command = [*unshare, sys.executable, '-c', PREAMBLE + program]
    result = subprocess.run(command, env=make_environment(), capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_own_addresses_exclude_loopback() -> None:
    addresses = run_in_namespace("""
empty = ip.list_own_addresses()
do('link', 'set', 'lo', 'up')
do('link', 'add', 'br0', 'type', 'bridge')
for each in ('10.9.0.1/24', '10.9.0.2/24', 'fd00::1/64'):
    do('address', 'add', each, 'dev', 'br0')
print(json.dumps([list(map(str, empty)), list(map(str, ip.list_own_addresses()))]))
""")
    assert addresses == [[], ['10.9.0.1', '10.9.0.2', 'fd00::1']]


def test_metadata_address_is_added_to_and_removed_from_a_bridge() -> None:
    results = run_in_namespace("""
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
    missing = 'the bridge none does not exist. Fix: start its network with `virsh net-start`'
    assert results == [[False, False, *after_adding_twice, *after_removing_twice], missing]


def test_only_reliable_neighbours_are_returned() -> None:
    results = run_in_namespace(f"""
for bridge in ('br0', 'br1'):
    do('link', 'add', bridge, 'type', 'bridge')
    do('link', 'set', bridge, 'up')
for address, mac, state, bridge in (
    ('10.9.0.5', '{MAC_A}', 'permanent', 'br0'), ('10.9.0.6', '{MAC_B}', 'stale', 'br0'),
    ('10.9.0.7', '{MAC_C}', 'failed', 'br0'),
    ('169.254.3.4', '{MAC_C}', 'permanent', 'br0'), ('10.9.0.8', '52:54:00:00:00:ff', 'permanent', 'br0'),
    # A machine on another network claims the same MAC.
    ('10.9.0.9', '{MAC_A}', 'permanent', 'br1'), ('10.9.0.9', '{MAC_C}', 'permanent', 'br1'),
):
    do('neighbour', 'replace', address, 'lladdr', mac, 'dev', bridge, 'nud', state)
on = dict.fromkeys(['{MAC_A}', '{MAC_B}', '{MAC_C}'], 'br0')
said = [ip.read_neighbours(on), ip.read_neighbours({{}}), ip.read_neighbours({{'{MAC_A}': ''}})]
do('neighbour', 'replace', '10.9.0.10', 'lladdr', '{MAC_A}', 'dev', 'br0', 'nud', 'stale')
print(json.dumps([*said, ip.read_neighbours(on)]))
""")
    with_ambiguous_mac = {MAC_B: '10.9.0.6'}
    assert results == [{MAC_A: '10.9.0.5', MAC_B: '10.9.0.6'}, {}, {}, with_ambiguous_mac]


def test_missing_ip_program_is_reported() -> None:
    missing = run_in_namespace("""
ip.get_search_path = lambda: '/nowhere'
print(json.dumps(failed(ip.list_own_addresses)))
""")
    assert missing == 'the program `ip` is missing. Fix: install iproute2'


def test_interface_name_that_is_not_utf_8_and_ip_that_cannot_start() -> None:
    results = run_in_namespace("""
do('link', 'add', b'br\\xe9', 'type', 'bridge')
do('address', 'add', '10.9.0.1/24', 'dev', b'br\\xe9')
said = [list(map(str, ip.list_own_addresses()))]
ip.shutil.which = lambda *_, **__: '/'
said.append(failed(ip.list_own_addresses))
print(json.dumps(said))
""")
    assert results[0] == ['10.9.0.1']
    assert results[1] == '`/` cannot be started: Permission denied'
