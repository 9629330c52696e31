"""The addresses of this host and of its neighbours, by iproute2's `ip`, whose answers are JSON.

https://man7.org/linux/man-pages/man8/ip.8.html. pyroute2 would do it in this process, and takes 8 MiB of it for good.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from ecomp.errors import EcompError
from ecomp.files import search_path
from ecomp.model.guest import METADATA_ADDRESS

log = logging.getLogger(__name__)

INTERFACES = Path('/sys/class/net')
KNOWN = {'REACHABLE', 'STALE', 'DELAY', 'PROBE', 'PERMANENT'}
"""States of a neighbour in which the MAC is believed."""
SECONDS = 10
"""In which it is to answer; it asks the kernel."""


def neighbours(bridges: Mapping[str, str]) -> dict[str, str]:
    """{MAC: IPv4 address} of those of these MACs, each on its bridge, that this host's ARP table has. EcompError.

    One that has several there has none: any machine may say so of any MAC, and one of them is wrong.

    libvirt 9.0's own look at the table fails ("wrong nlmsg len"), and says so of a guest without an address as well.
    """
    believed = [each for each in _asked('-4', 'neighbour', 'show') if KNOWN & {*each.get('state', ())}]
    found: dict[str, set[str]] = {}
    for each in believed:
        mac, address = each.get('lladdr', ''), each['dst']
        # What a guest without DHCP gives itself is no address anybody can use.
        if bridges.get(mac) == each['dev'] and not address.startswith(('169.254.', '0.')):
            found.setdefault(mac, set()).add(address)
    for mac, addresses in found.items():
        if len(addresses) > 1:
            _tell(mac, bridges[mac], ', '.join(sorted(addresses)))
    return {mac: addresses.pop() for mac, addresses in found.items() if len(addresses) == 1}


@lru_cache(maxsize=1024)  # once of each, for it is asked again and again
def _tell(mac: str, bridge: str, addresses: str) -> None:
    cure = f'`ip neighbour del ADDRESS dev {bridge}` for what is not its own'
    log.warning('%s has several addresses by ARP on %s, and none is believed: %s; %s', mac, bridge, addresses, cure)


def own_addresses() -> list[IPv4Address | IPv6Address]:
    """The addresses that this host has now, without its loopback ones. EcompError."""
    found = {ip_address(each['local']) for each in _addresses()}
    return sorted((each for each in found if not each.is_loopback), key=str)


def find_loose_taps() -> frozenset[str]:
    """Return the names of libvirt's tap devices that are on no bridge."""
    return frozenset(each.name for each in INTERFACES.glob('vnet*') if not (each / 'master').exists())


def plug_tap(tap: str, bridge: str, isolated: bool) -> None:
    """Put a tap device on a bridge; `isolated` keeps it from the other isolated ones there. EcompError."""
    _run('link', 'set', 'dev', tap, 'master', bridge)
    if isolated:
        _run('link', 'set', 'dev', tap, 'type', 'bridge_slave', 'isolated', 'on')


def has_metadata_address(bridge: str) -> bool:
    """Whether the bridge itself carries 169.254.169.254. EcompError."""
    return any(each['local'] == METADATA_ADDRESS for each in _addresses(bridge))


def set_metadata_address(bridge: str, present: bool) -> None:
    """Put 169.254.169.254/32 on the bridge, or take it off, if it is not so already. A missing bridge has it not.

    On the network's own bridge and nowhere else: its guests can then ask no other machine. EcompError.
    """
    if has_metadata_address(bridge) == present:
        return
    if all(each['ifname'] != bridge for each in _asked('address', 'show')):
        raise EcompError(f'the bridge {bridge} is not there: is the network started?')
    try:
        # Not add: mdserver's unit may put it there at this moment.
        _run('address', 'replace' if present else 'del', f'{METADATA_ADDRESS}/32', 'dev', bridge)
    except EcompError as error:
        verb = 'put on' if present else 'taken off'
        raise EcompError(f'{METADATA_ADDRESS} cannot be {verb} {bridge}: {error}') from error


def _addresses(interface: str | None = None) -> list[dict[str, Any]]:
    """The entries of all interfaces, or of this one; none where it is not there."""
    found = _asked('address', 'show')
    wanted = [each for each in found if interface in (None, each['ifname'])]
    return [entry for each in wanted for entry in each['addr_info'] if 'local' in entry]


def _asked(*words: str) -> list[dict[str, Any]]:
    # A namespace without any answers with nothing at all, and an interface that has just gone with an empty object.
    return [each for each in json.loads(_run('-json', *words) or '[]') if each]


def _run(*words: str) -> str:
    """What `ip` prints. EcompError in its own words."""
    program = shutil.which('ip', path=search_path())
    if program is None:
        raise EcompError('the program `ip` is not there: install iproute2')
    try:
        done = subprocess.run(
            (program, *words),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=True,
            encoding='utf-8',
            errors='replace',  # an interface's name is bytes
        )
    except subprocess.TimeoutExpired as error:
        raise EcompError(f'`ip {" ".join(words)}` does not end') from error
    except OSError as error:
        raise EcompError(f'`{program}` cannot be started: {error.strerror}') from error
    except subprocess.CalledProcessError as error:
        raise EcompError(' '.join(error.stderr.split()) or f'`ip {" ".join(words)}` failed') from error
    return done.stdout
