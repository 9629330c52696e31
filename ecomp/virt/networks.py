"""What guests are plugged into: that it is there, and to whom it gave which address.

The addresses of this host and of its neighbours are asked of iproute2's `ip`, whose answers are JSON:
https://man7.org/linux/man-pages/man8/ip.8.html. pyroute2 would do it in this process, and takes 8 MiB of it for good.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from ecomp.errors import BuildFailed, EcompError, UsageError
from ecomp.files import search_path, watch
from ecomp.model import keys
from ecomp.model.guest import METADATA_ADDRESS, Address, Attachment, ReservedAddress, all_macs, same_mac
from ecomp.model.health import MISSING, OFF, THERE
from ecomp.model.record import timestamp
from ecomp.virt import xml
from ecomp.virt.connection import Connection, Ignored, building, libvirt
from ecomp.virt.xml import Dhcp, Reservation

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
    found = [each for each in _asked('address', 'show') if interface in (None, each['ifname'])]
    return [entry for each in found for entry in each['addr_info'] if 'local' in entry]


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


STAGE = 'scheduled'
"""The stage of an instance that gets no address: nothing of it is made before."""
TRIES = 20
"""How often an address is chosen that another process takes at that moment; then BuildFailed."""
HOST = libvirt.VIR_NETWORK_SECTION_IP_DHCP_HOST
ADD, DELETE = libvirt.VIR_NETWORK_UPDATE_COMMAND_ADD_LAST, libvirt.VIR_NETWORK_UPDATE_COMMAND_DELETE
LIVE, CONFIG = libvirt.VIR_NETWORK_UPDATE_AFFECT_LIVE, libvirt.VIR_NETWORK_UPDATE_AFFECT_CONFIG
# "There is one that matches", "there is none that matches": what is there is looked at again.
READ_AGAIN = libvirt.VIR_ERR_OPERATION_INVALID


class Networks:
    """The networks of one libvirt. Errors: UsageError, Unreachable, EcompError; BuildFailed from reserve."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def reserve(self, instance: str, mac: str, network: str, wanted: str | None = None) -> str | None:
        """Reserve an address for the interface with this MAC: the one it has, else `wanted`, else a free one.

        None where libvirt gives out no addresses. Processes and threads may do this at once: libvirt takes no address
        twice, and who comes second chooses anew.
        """
        use = self._connection.use(f'reserving an address on network {network}')
        with use as connection, building(STAGE, f'network {network}: '):
            found = connection.networkLookupByName(network)
            for _ in range(TRIES):
                definitions = _definitions(found)
                if not definitions:
                    raise BuildFailed(STAGE, f'network {network} was stopped and is gone')
                for held in filter(None, (each.of(mac) for each in definitions.values())):
                    if held.name != instance and _is_ours(held):
                        raise same_mac(mac, held.name)
                first = definitions[min(definitions)]
                if not first.ranges or not first.served:
                    return None
                address = _chosen(found, definitions, mac, wanted)
                if address is None:
                    raise BuildFailed(STAGE, f'network {network} has no free address: {_words(first)}')
                for held in (each for definition in definitions.values() for each in definition.reservations):
                    # libvirt takes no name twice: changed by hand, or of when `networks:` had another order.
                    if held.name == instance and held.mac != mac:
                        entry = f'network {network} has {held.mac} under its name, and not its own {mac}'
                        words = f'delete ip-dhcp-host "<host mac=\'{held.mac}\'/>" --live --config'
                        raise BuildFailed(STAGE, f'{entry}. Fix: virsh net-update {network} {words}')
                if _written(found, definitions, Reservation(mac, address, instance)):
                    return address
        raise BuildFailed(STAGE, f'network {network}: each of {TRIES} addresses was taken by somebody else meanwhile')

    def reservations(self) -> Mapping[str, ReservedAddress]:
        """What is reserved for instances, {MAC: ReservedAddress}."""
        found: dict[str, ReservedAddress] = {}
        with self._connection.use('listing DHCP reservations') as connection:
            for _, definitions in _networks(connection):
                for _, definition in sorted(definitions.items(), reverse=True):  # what is running counts
                    for each in definition.reservations:
                        if _is_ours(each):
                            found[each.mac] = ReservedAddress(each.name, each.address)
        return found

    def release(self, instance: str) -> None:
        """Remove every reservation of the instance, on any network."""
        macs = frozenset(all_macs(instance))
        for _ in range(TRIES):
            with self._connection.use(f'releasing the addresses of {instance}') as connection:
                left = False
                for network, definitions in _networks(connection):
                    held: dict[Reservation, int] = {}
                    for flag, definition in definitions.items():
                        for each in definition.reservations:
                            if each.mac in macs and each.name == instance:
                                held[each] = held.get(each, 0) | flag
                    for each, flags in held.items():
                        left = not _update(network, DELETE, each, flags) or left
                if not left:
                    return
        raise EcompError(f'the DHCP reservations of {instance} are changed by somebody else all the time')

    def state(self, attachment: Attachment) -> str:
        """Whether guests can be plugged into it now, THERE, or it is OFF (libvirt's network) or MISSING."""
        kind, name = attachment
        if kind == 'bridge':
            return THERE if (INTERFACES / name / 'bridge').is_dir() else MISSING
        use = self._connection.use(f'looking for the network {name}')
        with use as connection, Ignored(libvirt.VIR_ERR_NO_NETWORK):
            return THERE if connection.networkLookupByName(name).isActive() else OFF
        return MISSING

    def check(self, attachment: Attachment) -> str:
        """What state() says, but UsageError for MISSING."""
        if (state := self.state(attachment)) != MISSING:
            return state
        kind, name = attachment
        if kind == 'bridge':
            raise UsageError(f'this host has no bridge {name}: make it (see docs/howto/bridge.md) or leave it out')
        usual = 'virsh net-define /usr/share/libvirt/networks/default.xml; virsh net-autostart default'
        cure = usual if name == 'default' else 'virsh net-list --all has those there are'
        raise UsageError(f'libvirt has no network {name!r}: {cure}')

    def prepare(self, attachment: Attachment) -> None:
        """Start libvirt's network if it is off. UsageError as check() has it."""
        if self.check(attachment) == OFF:
            with self._connection.use(f'starting the network {attachment.name}') as connection:
                connection.networkLookupByName(attachment.name).create()

    def own_bridge(self, name: str) -> str | None:
        """The bridge that libvirt made for the network; None if the network uses one made by others."""
        with self._connection.use(f'asking for the bridge of network {name}') as connection:
            network = connection.networkLookupByName(name)
            return str(network.bridgeName()) if xml.read_dhcp(network.XMLDesc()).served else None

    def gives(self, name: str, address: str) -> bool:
        """Whether the network's DHCP may give out the address; False if the network is not there."""
        return self._dhcp(name).may_give(IPv4Address(address))

    def answers_anybody(self, name: str) -> bool:
        """Whether the network's DHCP gives an address to any MAC that asks; False if the network is not there."""
        definition = self._dhcp(name)
        return bool(definition.ranges) and definition.served and not definition.known_only

    def without_ipv6(self, attachments: Iterable[Attachment]) -> list[Attachment]:
        """Those that are networks of libvirt's own on which it has no IPv6."""
        asked = dict.fromkeys(each for each in attachments if each.kind == 'network')
        return [each for each in asked if not self._dhcp(each.name).ipv6]

    def explain_unfit(self, attachment: Attachment, has_filters: bool) -> tuple[str, str]:
        """Return why no guest can be made there, and why none gets an IPv4 address, each with its fix, or ''."""
        unmade, unaddressed = self._dhcp(attachment.name).unfit if attachment.kind == 'network' else ('', '')
        return unmade if has_filters else '', unaddressed

    def _dhcp(self, name: str) -> Dhcp:
        """What the network gives out: nothing if it is not there."""
        use = self._connection.use(f'asking for the DHCP of network {name}')
        with use as connection, Ignored(libvirt.VIR_ERR_NO_NETWORK):
            return xml.read_dhcp(connection.networkLookupByName(name).XMLDesc())
        return Dhcp((), frozenset(), (), served=False)

    def leases(self, name: str, macs: Iterable[str]) -> Mapping[str, Address]:
        """{MAC: the IPv4 address leased to it last} of these MACs; empty if the network is not there, or off."""
        absent = Ignored(libvirt.VIR_ERR_NO_NETWORK, libvirt.VIR_ERR_OPERATION_INVALID)
        with self._connection.use(f'asking for the leases of network {name}') as connection, absent:
            network = connection.networkLookupByName(name)
            return newest(network.DHCPLeases(), macs, xml.read_dhcp(network.XMLDesc()))
        return {}


def _is_ours(reservation: Reservation) -> bool:
    return keys.is_uuid(reservation.name) and reservation.mac in all_macs(reservation.name)


def _networks(connection: libvirt.virConnect) -> Iterator[tuple[libvirt.virNetwork, Mapping[int, Dhcp]]]:
    for network in connection.listAllNetworks():
        with Ignored(libvirt.VIR_ERR_NO_NETWORK):  # gone between the list and the question
            yield network, _definitions(network)


def _definitions(network: libvirt.virNetwork) -> dict[int, Dhcp]:
    """The network's DHCP now, at LIVE, if it runs, and after its next start, at CONFIG, if it is persistent."""
    found = {}
    if network.isActive():
        found[LIVE] = xml.read_dhcp(network.XMLDesc())
    if network.isPersistent():
        found[CONFIG] = xml.read_dhcp(network.XMLDesc(libvirt.VIR_NETWORK_XML_INACTIVE))
    return found


def _chosen(network: libvirt.virNetwork, definitions: Mapping[int, Dhcp], mac: str, wanted: str | None) -> str | None:
    """The address the MAC has reserved, else the one leased to it, else `wanted`, else a free one; None: all taken."""
    for _, definition in sorted(definitions.items()):
        if (held := definition.of(mac)) is not None:
            return held.address
    leases = network.DHCPLeases() if network.isActive() else []
    of_ipv4 = [each for each in leases if each['type'] == libvirt.VIR_IP_ADDR_TYPE_IPV4]
    leased = {IPv4Address(each['ipaddr']): (each['mac'] or '').lower() for each in of_ipv4}
    reserved = [each.address for found in definitions.values() for each in found.reservations]
    taken = {address for each in reserved for address in _parsed(each)}
    first = definitions[min(definitions)]
    for address in (*(each for each, whose in leased.items() if whose == mac), *_parsed(wanted)):
        if address not in taken and leased.get(address, mac) == mac and first.may_give(address):
            return str(address)
    free = xml.choose_address(first, taken | leased.keys(), mac)
    return str(free) if free is not None else None


def _written(network: libvirt.virNetwork, definitions: Mapping[int, Dhcp], reservation: Reservation) -> bool:
    """Write the reservation into each definition that lacks it; False if another process changed one meanwhile."""
    missing = 0
    for flag, definition in definitions.items():
        held = definition.of(reservation.mac)
        if held is not None and held != reservation and not _update(network, DELETE, held, flag):
            return False
        if held != reservation:
            missing |= flag
    return not missing or _update(network, ADD, reservation, missing)


def _update(network: libvirt.virNetwork, command: int, reservation: Reservation, flags: int) -> bool:
    with Ignored(READ_AGAIN):
        network.update(command, HOST, -1, xml.host_xml(reservation), flags)
        return True
    return False


def _parsed(address: str | None) -> Iterator[IPv4Address]:
    with suppress(ValueError):
        if address is not None:
            yield IPv4Address(address)


def _words(definition: Dhcp) -> str:
    ranges = ' and '.join(f'{first} to {last}' for first, last in definition.ranges)
    return f'{ranges} are all leased or reserved. Fix: virsh net-edit; its restart cuts guests off for a second'


LEASES = Path('/var/lib/libvirt/dnsmasq')
"""The directory where libvirt's helper for dnsmasq writes `<bridge>.status`, anew for each lease."""


def newest(leases: Iterable[Mapping[str, Any]], macs: Iterable[str], network: Dhcp) -> dict[str, Address]:
    """{MAC: IPv4 address} of these MACs, by the lease in virNetworkGetDHCPLeases' answer that expires last."""
    wanted = set(macs)
    by_expiry = sorted(leases, key=lambda lease: int(lease['expirytime']))
    return {
        lease['mac'].lower(): Address(lease['ipaddr'], 'lease', _given(lease, network))
        for lease in by_expiry
        if lease['type'] == libvirt.VIR_IP_ADDR_TYPE_IPV4 and lease['mac'] and lease['mac'].lower() in wanted
    }


def _given(lease: Mapping[str, Any], network: Dhcp) -> str:
    """When a lease was given, or given again, by when it expires; '' where that is no time."""
    lasts = network.lasts(IPv4Address(lease['ipaddr']))
    with suppress(ValueError, OverflowError, OSError):  # libvirt takes a lease of a million years, too
        return timestamp(datetime.fromtimestamp(int(lease['expirytime']) - lasts, UTC)) if lasts else ''
    return ''


def leased(path: Path) -> frozenset[tuple[str, ...]] | None:
    """The (MAC, address, expiry) of each lease in a file of the helper's; None if it cannot be read."""
    parts = 'mac-address', 'ip-address', 'expiry-time'
    with suppress(OSError, ValueError, TypeError, KeyError):
        return frozenset(tuple(str(each[part]) for part in parts) for each in json.loads(path.read_bytes()))
    return None


def watch_leases(directory: Path, notify: Callable[[str], None]) -> Callable[[], None]:
    """From now on call notify(reason) within milliseconds of a lease being given, or given again; returns what ends it.

    OSError if the directory cannot be watched.
    """
    known: dict[Path, object] = {}

    def written(path: Path) -> None:
        # Each change of a reservation has dnsmasq run the helper once for every lease there is.
        leases = leased(path)
        if leases is None or leases != known.get(path):
            known[path] = leases
            notify(f'leases: {path.name} was written')

    return watch(directory, '.status', written)
