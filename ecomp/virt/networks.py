"""The networks of guests, their DHCP leases and reservations, and this host's addresses."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any

from ecomp.errors import BuildFailed, Conflict, EcompError, Problem, UsageError
from ecomp.files import get_search_path, watch_files
from ecomp.model import keys
from ecomp.model.guest import METADATA_ADDRESS, Address, Attachment, ReservedAddress, list_macs, make_mac_conflict
from ecomp.model.text import format_time, join_some
from ecomp.virt import xml
from ecomp.virt.connection import Connection, IgnoredErrors, describe_error, is_broken, libvirt, raise_build_failed
from ecomp.virt.xml import Dhcp, Reservation

log = logging.getLogger(__name__)

# The states of a network or bridge.
USABLE = 'there'
OFF = 'off'
MISSING = 'missing'

INTERFACES_DIRECTORY = Path('/sys/class/net')
# States of a neighbour entry in which its MAC is trusted.
TRUSTED_STATES = {'REACHABLE', 'STALE', 'DELAY', 'PROBE', 'PERMANENT'}
# The bit of an interface's flags that is set while it is up: netdevice(7).
IFF_UP = 1
# Timeout of a program, which only queries the kernel.
TIMEOUT_SECONDS = 10
# The Debian package of each program.
PACKAGES = {'ip': 'iproute2', 'ebtables-save': 'iptables'}


def read_neighbours(bridges: Mapping[str, str]) -> dict[str, str]:
    """Return {MAC: IPv4 address} by this host's ARP table, for {MAC: bridge}."""
    # libvirt 9.0's own query fails ("wrong nlmsg len"), even for a guest without an address.
    entries = [entry for entry in _query_ip('-4', 'neighbour', 'show') if TRUSTED_STATES & {*entry.get('state', ())}]
    addresses_of: dict[str, set[str]] = {}
    for entry in entries:
        mac, address = entry.get('lladdr', ''), entry['dst']
        # An address that a guest without DHCP gives itself is not usable.
        if bridges.get(mac) == entry['dev'] and not address.startswith(('169.254.', '0.')):
            addresses_of.setdefault(mac, set()).add(address)
    for mac, addresses in addresses_of.items():
        if len(addresses) > 1:  # one of these claims is false
            _warn_once(mac, bridges[mac], ', '.join(sorted(addresses)))
    return {mac: addresses.pop() for mac, addresses in addresses_of.items() if len(addresses) == 1}


@lru_cache(maxsize=1024)  # each warning once: the table is queried again and again
def _warn_once(mac: str, bridge: str, addresses: str) -> None:
    fix = f'`ip neighbour del ADDRESS dev {bridge}` for each address that the guest does not have'
    log.warning('%s has several addresses by ARP on %s, so none is trusted: %s. Fix: %s', mac, bridge, addresses, fix)


def list_own_addresses() -> list[IPv4Address | IPv6Address]:
    own = {ip_address(entry['local']) for entry in _list_address_entries()}
    return sorted((address for address in own if not address.is_loopback), key=str)


def find_loose_taps() -> frozenset[str]:
    return frozenset(tap.name for tap in INTERFACES_DIRECTORY.glob('vnet*') if not (tap / 'master').exists())


def find_downed_taps() -> frozenset[str]:
    names = set()
    for interface in INTERFACES_DIRECTORY.glob('vnet*'):
        with suppress(OSError):  # removed after it was listed
            if not int((interface / 'flags').read_text(), 16) & IFF_UP:
                names.add(interface.name)
    return frozenset(names)


def find_unfiltered_taps() -> frozenset[str]:
    """Return the names of libvirt's tap devices for which no filter of ours is in force."""
    taps = [interface.name for interface in INTERFACES_DIRECTORY.glob('vnet*')]
    # Not `ebtables -L`: that changes rules in order to list them, and makes a concurrent change by libvirt fail.
    rules = [line.split() for line in _run('ebtables-save').splitlines() if line.startswith('-A ')] if taps else []
    ends = {f'{words[1]} {words[-1]}' for words in rules}
    # The filters of every release drop something, also before libvirt has learned an address.
    return frozenset(tap for tap in taps if not {f'PREROUTING libvirt-I-{tap}', f'libvirt-I-{tap} DROP'} <= ends)


def plug_tap(tap: str, bridge: str, isolated: bool) -> None:
    _run('ip', 'link', 'set', 'dev', tap, 'master', bridge)
    if isolated:
        _run('ip', 'link', 'set', 'dev', tap, 'type', 'bridge_slave', 'isolated', 'on')


def has_metadata_address(bridge: str) -> bool:
    return any(entry['local'] == METADATA_ADDRESS for entry in _list_address_entries(bridge))


def set_metadata_address(bridge: str, present: bool) -> None:
    # Only the network's own bridge has it, so that its guests cannot ask another machine.
    if has_metadata_address(bridge) == present:
        return
    if all(interface['ifname'] != bridge for interface in _query_ip('address', 'show')):
        raise EcompError(f'the bridge {bridge} does not exist. Fix: start its network with `virsh net-start`')
    try:
        # Not `add`, which fails if mdserver's unit adds it concurrently.
        _run('ip', 'address', 'replace' if present else 'del', f'{METADATA_ADDRESS}/32', 'dev', bridge)
    except EcompError as error:
        verb = 'added to' if present else 'removed from'
        raise EcompError(f'{METADATA_ADDRESS} cannot be {verb} {bridge}: {error}') from error


def _list_address_entries(interface: str | None = None) -> list[dict[str, Any]]:
    links = [link for link in _query_ip('address', 'show') if interface in (None, link['ifname'])]
    return [entry for link in links for entry in link['addr_info'] if 'local' in entry]


def _query_ip(*arguments: str) -> list[dict[str, Any]]:
    # Not pyroute2, which would permanently occupy 8 MiB of this process. See ip(8).
    # `ip` prints nothing if a namespace has no entries, and {} for an interface that was just removed.
    return [entry for entry in json.loads(_run('ip', '-json', *arguments) or '[]') if entry]


def _run(name: str, *arguments: str) -> str:
    if (program := shutil.which(name, path=get_search_path())) is None:
        raise EcompError(f'the program `{name}` is missing. Fix: install {PACKAGES[name]}')
    command = ' '.join((name, *arguments))
    try:
        process = subprocess.run(
            (program, *arguments), stdin=subprocess.DEVNULL, capture_output=True, timeout=TIMEOUT_SECONDS, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise EcompError(f'`{command}` does not end within {TIMEOUT_SECONDS} s') from error
    except OSError as error:
        raise EcompError(f'`{program}` cannot be started: {error.strerror}') from error
    except subprocess.CalledProcessError as error:
        raise EcompError(' '.join(error.stderr.decode(errors='replace').split()) or f'`{command}` failed') from error
    return process.stdout.decode(errors='replace')  # an interface's name is bytes


# The stage at which an instance without an address fails: before anything of it is created.
RESERVE_STAGE = 'scheduled'
# Attempts, when other processes take the chosen address first; then BuildFailed or EcompError.
MAX_TRIES = 20
DHCP_HOST_SECTION = libvirt.VIR_NETWORK_SECTION_IP_DHCP_HOST
ADD = libvirt.VIR_NETWORK_UPDATE_COMMAND_ADD_LAST
DELETE = libvirt.VIR_NETWORK_UPDATE_COMMAND_DELETE
LIVE = libvirt.VIR_NETWORK_UPDATE_AFFECT_LIVE
CONFIG = libvirt.VIR_NETWORK_UPDATE_AFFECT_CONFIG
DHCP_SERVER_PORT = 67
DHCP_MAGIC = bytes.fromhex('63825363')
# "A matching entry exists", "no matching entry exists": read the definition again.
RETRYABLE_ERROR = libvirt.VIR_ERR_OPERATION_INVALID


class UnreadableLeases(EcompError):
    """libvirt's file of a network's leases is malformed."""


class Networks:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def reserve_address(self, instance: str, mac: str, network: str, preferred: str | None = None) -> str | None:
        use = self._connection.use(f'reserving an address on network {network}')
        with use as connection, raise_build_failed(RESERVE_STAGE, f'network {network}: '):
            libvirt_network = connection.networkLookupByName(network)
            for _ in range(MAX_TRIES):
                definitions = _read_live_and_config(libvirt_network)
                if not definitions:
                    raise BuildFailed(RESERVE_STAGE, f'network {network} was removed')
                reservations = [entry for dhcp in definitions.values() for entry in dhcp.reservations]
                for existing in reservations:
                    if existing.mac == mac and existing.name != instance and _is_ours(existing):
                        raise make_mac_conflict(mac, existing.name)
                effective = definitions[min(definitions)]
                if not effective.ranges or not effective.is_served:
                    return None
                address = _choose_address(libvirt_network, definitions, mac, preferred)
                if address is None:
                    reason = _explain_exhausted(libvirt_network, definitions)
                    raise BuildFailed(RESERVE_STAGE, f'network {network} has no free address: {reason}')
                for existing in reservations:
                    # libvirt rejects a second entry of one name. This one was edited, or `networks:` was reordered.
                    if existing.name == instance and existing.mac != mac:
                        raise BuildFailed(RESERVE_STAGE, _explain_other_mac(network, existing.mac, mac))
                if _write_reservation(libvirt_network, definitions, Reservation(mac, address, instance)):
                    return address
        raise BuildFailed(RESERVE_STAGE, f'network {network}: other processes took all {MAX_TRIES} tried addresses')

    def list_reservations(self) -> Mapping[str, ReservedAddress]:
        reserved: dict[str, ReservedAddress] = {}
        with self._connection.use('listing DHCP reservations') as connection:
            for _, definitions in _iterate_networks(connection):
                for _, definition in sorted(definitions.items(), reverse=True):  # the running definition wins
                    for reservation in definition.reservations:
                        if _is_ours(reservation):
                            reserved[reservation.mac] = ReservedAddress(reservation.name, reservation.address)
        return reserved

    def release_addresses(self, instance: str) -> None:
        macs = frozenset(list_macs(instance))
        for _ in range(MAX_TRIES):
            with self._connection.use(f'releasing the addresses of {instance}') as connection:
                is_incomplete = False
                for network, definitions in _iterate_networks(connection):
                    if LIVE in definitions:
                        _release_leases(network, definitions[LIVE], macs)
                    reservations = {entry for dhcp in definitions.values() for entry in dhcp.reservations}
                    for reservation in reservations:
                        if reservation.mac in macs and reservation.name == instance:
                            flags = sum(flag for flag, dhcp in definitions.items() if reservation in dhcp.reservations)
                            is_incomplete |= not _update(network, DELETE, reservation, flags)
                if not is_incomplete:
                    return
        raise EcompError(f'other processes changed the DHCP reservations of {instance} during {MAX_TRIES} tries')

    def read_state(self, attachment: Attachment) -> str:
        """Return USABLE if guests can be plugged in, OFF if libvirt's network is off, or MISSING."""
        kind, name = attachment
        if kind == 'bridge':
            return USABLE if (INTERFACES_DIRECTORY / name / 'bridge').is_dir() else MISSING
        use = self._connection.use(f'looking for the network {name}')
        with use as connection, IgnoredErrors(libvirt.VIR_ERR_NO_NETWORK):
            return USABLE if connection.networkLookupByName(name).isActive() else OFF
        return MISSING

    def find_trouble(self, attachment: Attachment) -> str:
        """Return why no guest gets a port or address there now, or '', or raise EcompError."""
        kind, name = attachment
        if (state := self.read_state(attachment)) != USABLE or kind != 'network':
            return '' if state == USABLE else f'{kind} {name} is {state}'
        with self._connection.use(f'looking for a free address on network {name}') as connection:
            network = connection.networkLookupByName(name)
            dhcp = xml.parse_dhcp(network.XMLDesc())
            has_dhcp = dhcp.ranges and dhcp.is_served
            is_full = has_dhcp and _choose_address(network, {LIVE: dhcp}, '', None) is None
            return f'no free address on network {name}' if is_full else ''

    def check(self, attachment: Attachment) -> str:
        """Return the state of an attachment, or raise UsageError if it is MISSING."""
        if (state := self.read_state(attachment)) == MISSING:
            raise UsageError(str(explain_state(attachment, state)))
        return state

    def prepare(self, attachment: Attachment) -> None:
        if self.check(attachment) == OFF:
            with self._connection.use(f'starting the network {attachment.name}') as connection:
                connection.networkLookupByName(attachment.name).create()

    def find_own_bridge(self, name: str) -> str | None:
        """Return the network's bridge, or None if libvirt did not make it."""
        with self._connection.use(f'reading the bridge of network {name}') as connection:
            network = connection.networkLookupByName(name)
            return str(network.bridgeName()) if xml.parse_dhcp(network.XMLDesc()).is_served else None

    def find_open_dhcp(self, name: str) -> list[int]:
        """Return the definitions, LIVE or CONFIG, whose DHCP serves unknown MACs, too."""
        self.check(Attachment('network', name))
        with self._connection.use(f'reading the DHCP of network {name}') as connection:
            definitions = _read_live_and_config(connection.networkLookupByName(name))
        return [flag for flag, definition in definitions.items() if definition.is_open]

    def close_dhcp(self, name: str, open_definitions: Collection[int]) -> str:
        """Serve only reserved MACs, restart the network if LIVE is open, and return what was done."""
        with self._connection.use(f'closing the DHCP of network {name}') as connection:
            network = connection.networkLookupByName(name)
            if LIVE in open_definitions and (obstacle := _explain_no_restart(connection, network)):
                raise Conflict(f'network {name} is unchanged: it {obstacle}, and repeat the command')
            if CONFIG in open_definitions:
                connection.networkDefineXML(xml.close_dhcp(network.XMLDesc(libvirt.VIR_NETWORK_XML_INACTIVE)))
            if LIVE in open_definitions:
                try:
                    network.destroy()
                finally:  # also after Ctrl-C
                    if not network.isActive():
                        network.create()
        restart = '; the network was restarted' if LIVE in open_definitions else ''
        return f'network {name}: its DHCP now serves only MACs with a reservation{restart}'

    def explain_unfit(self, attachment: Attachment, has_filters: bool) -> tuple[Problem | None, Problem | None]:
        """Return why no guest can run on this attachment, and why none gets an IPv4 address."""
        if attachment.kind != 'network':
            return None, None
        build_problem, address_problem = self.read_dhcp(attachment.name).problems
        return build_problem if has_filters else None, address_problem  # libvirt runs guests there without filters

    def find_problems(self, attachment: Attachment, has_filters: bool) -> Iterator[Problem]:
        """Yield why no guest can be plugged in or run there, or gets or shows an address."""
        found = explain_state(attachment, self.read_state(attachment)), *self.explain_unfit(attachment, has_filters)
        yield from filter(None, found)
        try:
            if attachment.kind == 'network':
                self.read_leases(attachment.name, ())
        except UnreadableLeases as error:
            yield error.problem

    def read_dhcp(self, name: str) -> Dhcp:
        """Return the DHCP of the running network, or an empty one if it is missing."""
        use = self._connection.use(f'reading the DHCP of network {name}')
        with use as connection, IgnoredErrors(libvirt.VIR_ERR_NO_NETWORK):
            return xml.parse_dhcp(connection.networkLookupByName(name).XMLDesc())
        return Dhcp((), frozenset(), (), is_served=False)

    def read_leases(self, name: str, macs: Iterable[str]) -> Mapping[str, Address]:
        """Return {MAC: newest leased IPv4 address} for `macs` (in lower case), {} if missing or off."""
        absent = IgnoredErrors(libvirt.VIR_ERR_NO_NETWORK, libvirt.VIR_ERR_OPERATION_INVALID)
        with self._connection.use(f'reading the leases of network {name}') as connection, absent:
            network = connection.networkLookupByName(name)
            return pick_newest_leases(_list_leases(network), macs, xml.parse_dhcp(network.XMLDesc()))
        return {}


def explain_state(attachment: Attachment, state: str) -> Problem | None:
    kind, name = attachment
    if state == USABLE:
        return None
    if state == OFF:
        return Problem(f'network {name} is not active', f'virsh net-start {name}; virsh net-autostart {name}')
    if kind == 'bridge':
        return Problem(f'this host has no bridge {name}', f'ip link add {name} type bridge; ip link set {name} up')
    cure = 'correct `networks:`; `virsh net-list --all` shows the networks'
    if name == 'default':
        define = 'virsh net-define /usr/share/libvirt/networks/default.xml; virsh net-autostart default'
        cure = f'{define}; virsh net-start default'
    return Problem(f'libvirt has no network named {name}', cure)


def _list_leases(network: libvirt.virNetwork) -> list[dict[str, Any]]:
    try:
        return list(network.DHCPLeases())
    except libvirt.libvirtError as error:
        if is_broken(error) or error.get_error_code() != libvirt.VIR_ERR_INTERNAL_ERROR:
            raise
        problem = f'libvirt cannot read its leases of network {network.name()}, so it knows no address of a guest there'
        # dnsmasq has the leases, too, and passes all of them to libvirt's helper, which writes the file.
        pid_file = shlex.quote(f'/run/libvirt/network/{network.name()}.pid')
        cure = f'rm {LEASES_DIRECTORY}/{network.bridgeName()}.status; kill -HUP $(cat {pid_file})'
        raise UnreadableLeases(f'{problem}: {describe_error(error)}. Fix: {cure}') from error


def _explain_other_mac(network: str, reserved_mac: str, mac: str) -> str:
    command = f'delete ip-dhcp-host "<host mac=\'{reserved_mac}\'/>" --live --config'
    problem = f'network {network} reserves its address for {reserved_mac}, not for {mac}'
    return f'{problem}. Fix: virsh net-update {network} {command}'


def _is_ours(reservation: Reservation) -> bool:
    return keys.is_uuid(reservation.name) and reservation.mac in list_macs(reservation.name)


def _iterate_networks(connection: libvirt.virConnect) -> Iterator[tuple[libvirt.virNetwork, Mapping[int, Dhcp]]]:
    for network in connection.listAllNetworks():
        with IgnoredErrors(libvirt.VIR_ERR_NO_NETWORK):  # removed after it was listed
            yield network, _read_live_and_config(network)


def _read_live_and_config(network: libvirt.virNetwork) -> dict[int, Dhcp]:
    """Return the DHCP of the running network as LIVE, of the persistent definition as CONFIG."""
    definitions = {}
    if network.isActive():
        definitions[LIVE] = xml.parse_dhcp(network.XMLDesc())
    if network.isPersistent():
        definitions[CONFIG] = xml.parse_dhcp(network.XMLDesc(libvirt.VIR_NETWORK_XML_INACTIVE))
    return definitions


def _explain_no_restart(connection: libvirt.virConnect, network: libvirt.virNetwork) -> str:
    bridge = network.bridgeName()
    users = {port.name for port in (INTERFACES_DIRECTORY / bridge / 'brif').glob('*')}
    for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE):
        with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):  # removed after it was listed
            links = xml.parse_interfaces(domain.XMLDesc()).values()
            taps = {link.tap for link in links if link.bridge == bridge}
            users = users - taps | ({f'guest {domain.name()}'} if taps else set())
    if users:
        return f'connects {join_some(sorted(users), 5)}, which a restart would cut off. Fix: shut them down'
    return '' if network.isPersistent() else 'is transient, so a restart would remove it. Fix: define it with virsh'


def _choose_address(
    network: libvirt.virNetwork, definitions: Mapping[int, Dhcp], mac: str, preferred: str | None
) -> str | None:
    """Choose the MAC's reserved address, else its leased one, `preferred` or a free one."""
    for _, definition in sorted(definitions.items()):
        if (existing := definition.find_reservation(mac)) is not None:
            return existing.address
    mac_of = {IPv4Address(lease['ipaddr']): (lease['mac'] or '').lower() for lease in _list_ipv4_leases(network)}
    reserved = [reservation.address for dhcp in definitions.values() for reservation in dhcp.reservations]
    reserved_addresses = {address for text in reserved for address in _parse_address(text)}
    effective = definitions[min(definitions)]
    for address in (*(candidate for candidate, holder in mac_of.items() if holder == mac), *_parse_address(preferred)):
        if address not in reserved_addresses and mac_of.get(address, mac) == mac and effective.can_give(address):
            return str(address)
    free = xml.choose_address(effective, reserved_addresses | mac_of.keys(), mac)
    return str(free) if free is not None else None


def _write_reservation(network: libvirt.virNetwork, definitions: Mapping[int, Dhcp], reservation: Reservation) -> bool:
    """Write the reservation where needed, or return False if another process interfered."""
    missing = 0
    for flag, definition in definitions.items():
        existing = definition.find_reservation(reservation.mac)
        if existing is not None and existing != reservation and not _update(network, DELETE, existing, flag):
            return False
        if existing != reservation:
            missing |= flag
    return not missing or _update(network, ADD, reservation, missing)


def _update(network: libvirt.virNetwork, command: int, reservation: Reservation, flags: int) -> bool:
    with IgnoredErrors(RETRYABLE_ERROR):
        network.update(command, DHCP_HOST_SECTION, -1, xml.make_host_xml(reservation), flags)
        return True
    return False


def _parse_address(address: str | None) -> Iterator[IPv4Address]:
    """Yield the address, or nothing if it is None or malformed."""
    with suppress(ValueError):
        if address is not None:
            yield IPv4Address(address)


def _list_ipv4_leases(network: libvirt.virNetwork) -> list[Mapping[str, Any]]:
    leases: list[dict[str, Any]] = []
    with suppress(UnreadableLeases):  # the reading of addresses reports them
        leases = _list_leases(network) if network.isActive() else []
    return [lease for lease in leases if lease['type'] == libvirt.VIR_IP_ADDR_TYPE_IPV4]


def _explain_exhausted(network: libvirt.virNetwork, definitions: Mapping[int, Dhcp]) -> str:
    reserved = {entry.address: entry.name or entry.mac for dhcp in definitions.values() for entry in dhcp.reservations}
    leases = sorted(_list_ipv4_leases(network), key=lambda lease: int(lease['expirytime']))
    unreserved = [lease for lease in leases if lease['ipaddr'] not in reserved]
    ends = [(lease, _format_lease_time(lease) or 'it is released') for lease in unreserved]
    holders = [f'{lease["ipaddr"]} is leased to {lease["mac"]} until {end}' for lease, end in ends]
    holders += [f'{address} is reserved for {holder}' for address, holder in reserved.items()]
    ranges = ' and '.join(f'{first} to {last}' for first, last in definitions[min(definitions)].ranges)
    cure = 'enlarge the range with `virsh net-edit`, and restart the network, which disconnects guests for a second'
    return f'all of {ranges} are leased or reserved: {join_some(holders, 4)}. Fix: destroy an instance there, or {cure}'


# Seconds that dnsmasq has to end a lease: its helper also tells libvirt about each other lease that has changed.
RELEASE_TIMEOUT_SECONDS = 5.0


def _release_leases(network: libvirt.virNetwork, dhcp: Dhcp, macs: Collection[str]) -> None:
    def list_leases() -> list[Mapping[str, Any]]:
        return [lease for lease in _list_ipv4_leases(network) if (lease['mac'] or '').lower() in macs]

    if dhcp.server is None:
        return
    # A new lease is not listed yet, but it is of the reserved address. dnsmasq then finds it by the MAC alone.
    clients = {entry.address: (entry.mac, '') for entry in dhcp.reservations if entry.mac in macs and entry.address}
    leases = list_leases()
    clients |= {lease['ipaddr']: (lease['mac'], lease['clientid'] or '') for lease in leases}
    problem, deadline = 'dnsmasq does not end the lease', time.monotonic() + RELEASE_TIMEOUT_SECONDS
    try:
        for address, (mac, client_id) in clients.items():
            _send_release(network.bridgeName(), dhcp.server, address, mac, client_id)
    except (OSError, ValueError) as error:  # no socket, or a client id in libvirt's file that is not hexadecimal
        problem, deadline = f'dnsmasq cannot be asked to end the lease: {error}', 0.0
    while leases and time.monotonic() < deadline:
        time.sleep(0.02)
        leases = list_leases()
    for lease in leases:
        end = _format_lease_time(lease) or 'never'
        log.warning('%s stays leased to %s (expires %s): %s', lease['ipaddr'], lease['mac'], end, problem)


def _send_release(bridge: str, server: IPv4Address, address: str, mac: str, client_id: str) -> None:
    mac_bytes, client_bytes = (bytes.fromhex(text.replace(':', '')) for text in (mac, client_id))
    # RFC 2131, figure 1, and RFC 2132: the message type DHCPRELEASE, the server and, if it is known, the client id.
    header = struct.pack('!4B8x4s12x16s192x', 1, 1, len(mac_bytes), 0, IPv4Address(address).packed, mac_bytes)
    options = {53: b'\x07', 54: server.packed, 61: client_bytes}
    body = b''.join(bytes((code, len(value))) + value for code, value in options.items() if value)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        # dnsmasq listens only on the bridge, but a message to our own address arrives on `lo`. With this option Linux
        # names the bridge instead, which dnsmasq's own dhcp_release relies on, too.
        client.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, bridge.encode())
        client.sendto(header + DHCP_MAGIC + body + b'\xff', (str(server), DHCP_SERVER_PORT))


# Here libvirt's helper for dnsmasq rewrites `<bridge>.status` on each lease.
LEASES_DIRECTORY = Path('/var/lib/libvirt/dnsmasq')


def pick_newest_leases(leases: Iterable[Mapping[str, Any]], macs: Iterable[str], network: Dhcp) -> dict[str, Address]:
    """Return {MAC: leased IPv4 address that expires last} for those of `macs` (in lower case)."""
    wanted_macs = set(macs)
    by_expiry = sorted(leases, key=lambda lease: int(lease['expirytime']))
    ipv4 = [lease for lease in by_expiry if lease['type'] == libvirt.VIR_IP_ADDR_TYPE_IPV4 and lease['mac']]
    newest = {mac: lease for lease in ipv4 if (mac := lease['mac'].lower()) in wanted_macs}
    return {mac: Address(each['ipaddr'], 'lease', _derive_lease_start(each, network)) for mac, each in newest.items()}


def _derive_lease_start(lease: Mapping[str, Any], network: Dhcp) -> str:
    lease_seconds = network.get_lease_seconds(IPv4Address(lease['ipaddr']))
    return _format_lease_time(lease, lease_seconds) if lease_seconds else ''


def _format_lease_time(lease: Mapping[str, Any], seconds_before_expiry: int = 0) -> str:
    with suppress(ValueError, OverflowError, OSError):  # libvirt accepts even a lease of a million years
        if expiry_seconds := int(lease['expirytime']):
            return format_time(datetime.fromtimestamp(expiry_seconds - seconds_before_expiry, UTC))
    return ''


def read_lease_file(path: Path) -> frozenset[tuple[str, ...]] | None:
    names = 'mac-address', 'ip-address', 'expiry-time'
    with suppress(OSError, ValueError, TypeError, KeyError):
        return frozenset(tuple(str(lease[name]) for name in names) for lease in json.loads(path.read_bytes()))
    return None


def watch_leases(directory: Path, notify: Callable[[str], None]) -> Callable[[], None]:
    """Call notify(reason) in a thread at each new or renewed lease, and return what stops that."""
    last_leases: dict[Path, object] = {}

    def on_written(path: Path) -> None:
        # Ignore unchanged files: on each changed reservation dnsmasq runs the helper for every lease.
        leases = read_lease_file(path)
        if leases is None or leases != last_leases.get(path):
            last_leases[path] = leases
            notify(f'leases: {path.name} was written')

    return watch_files(directory, '.status', on_written)
