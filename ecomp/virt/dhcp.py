"""PURE: the DHCP of a libvirt network: what it may give out, what is reserved, and which address to reserve.

https://libvirt.org/formatnetwork.html#addressing
"""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ET
from collections.abc import Set
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

NOT_SERVED = frozenset({'bridge', 'private', 'vepa', 'passthrough', 'hostdev'})
"""Forward modes in which libvirt only plugs guests into what others look after."""
DNSMASQ = 'http://libvirt.org/schemas/network/dnsmasq/1.0'


@dataclass(frozen=True)
class Reservation:
    """One `<host>`: libvirt's dnsmasq gives this address to this MAC and to no other; `name` is '' if it has none."""

    mac: str
    address: str
    name: str


@dataclass(frozen=True)
class Dhcp:
    """What a network gives out: `ranges` of IPv4 addresses, first and last; `own` are the network's, never a guest's.

    `served` is false where the bridge is not libvirt's own; `known_only`: who has no reservation is not answered.
    """

    ranges: tuple[tuple[IPv4Address, IPv4Address], ...]
    own: frozenset[IPv4Address]
    reservations: tuple[Reservation, ...]
    served: bool
    known_only: bool = False

    def of(self, mac: str) -> Reservation | None:
        """What is reserved for a MAC."""
        return next((each for each in self.reservations if each.mac == mac), None)


def read(xml: str) -> Dhcp:
    """The DHCP in a network's definition; one without has no ranges."""
    root = ET.fromstring(xml)
    forward = root.find('forward')
    ranges, own, reservations = [], set(), []
    for element in root.iterfind('ip'):
        if element.get('family', 'ipv4') != 'ipv4':
            continue
        mask = element.get('prefix') or element.get('netmask') or '32'
        network = IPv4Network((element.get('address', '0.0.0.0'), mask), strict=False)
        own |= {IPv4Address(element.get('address', '0.0.0.0')), network.network_address, network.broadcast_address}
        ranges += [
            (IPv4Address(each.get('start', '')), IPv4Address(each.get('end', '')))
            for each in element.iterfind('dhcp/range')
        ]
        reservations += [
            Reservation(each.get('mac', '').lower(), each.get('ip', ''), each.get('name', ''))
            for each in element.iterfind('dhcp/host')
        ]
    mode = forward.get('mode', 'nat') if forward is not None else ''
    # https://libvirt.org/formatnetwork.html#network-namespaces, and dnsmasq(8): a reservation sets the tag.
    options = {each.get('value') for each in root.iterfind(f'{{{DNSMASQ}}}options/{{{DNSMASQ}}}option')}
    known_only = 'dhcp-ignore=tag:!known' in options
    return Dhcp(tuple(ranges), frozenset(own), tuple(reservations), mode not in NOT_SERVED, known_only)


def choose(dhcp: Dhcp, taken: Set[IPv4Address], mac: str) -> IPv4Address | None:
    """An address in the ranges that is not taken, the same for a MAC while it is free; None if all are taken."""
    taken = taken | dhcp.own
    sizes = [int(last) - int(first) + 1 for first, last in dhcp.ranges]
    start = int.from_bytes(hashlib.sha256(mac.encode()).digest()[:8], 'big')
    # One more look than there are addresses that could be in the way.
    for step in range(min(sum(sizes), len(taken) + 1)):
        index = (start + step) % sum(sizes)
        for (first, _), size in zip(dhcp.ranges, sizes, strict=True):
            if index < size:
                if (found := first + index) not in taken:
                    return found
                break
            index -= size
    return None


def is_in(dhcp: Dhcp, address: IPv4Address) -> bool:
    """Whether it is one the network may give out."""
    return address not in dhcp.own and any(first <= address <= last for first, last in dhcp.ranges)


def host_xml(reservation: Reservation) -> str:
    """The reservation for virNetworkUpdate. dnsmasq tells the name to the guest, which is its host name by DHCP."""
    attributes = {'mac': reservation.mac, 'ip': reservation.address, 'name': reservation.name}
    return ET.tostring(ET.Element('host', {key: value for key, value in attributes.items() if value}), 'unicode')
