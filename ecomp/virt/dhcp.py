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
"""Forward modes in which libvirt gives out no addresses: the network is made by others."""
UNITS = {'seconds': 1, 'minutes': 60, 'hours': 3600}
DNSMASQ = 'http://libvirt.org/schemas/network/dnsmasq/1.0'


@dataclass(frozen=True)
class Reservation:
    """One `<host>`: dnsmasq gives this address to this MAC and to no other. `name` is its `name`, '' for none."""

    mac: str
    address: str
    name: str


@dataclass(frozen=True)
class Dhcp:
    """What a network gives out: `ranges` of IPv4 addresses, (first, last), but none of its `own`.

    `seconds` is how long the leases of each range last, 0 for ever. `served` False means that the bridge is not
    libvirt's; `known_only` that only MACs with a reservation are answered; `ipv6` False that the bridge is libvirt's
    and has no IPv6. `unfit`: see Networks.explain_unfit().
    """

    ranges: tuple[tuple[IPv4Address, IPv4Address], ...]
    own: frozenset[IPv4Address]
    reservations: tuple[Reservation, ...]
    served: bool
    known_only: bool = False
    seconds: tuple[int, ...] = ()
    ipv6: bool = True
    unfit: tuple[str, str] = ('', '')

    def lasts(self, address: IPv4Address) -> int:
        """The seconds for which a lease of this address lasts; 0 for ever, or where that is not known."""
        ranges = zip(self.ranges, self.seconds, strict=True)
        return next((seconds for (first, last), seconds in ranges if first <= address <= last), 0)

    def of(self, mac: str) -> Reservation | None:
        """The reservation of a MAC, None if it has none."""
        return next((each for each in self.reservations if each.mac == mac), None)


def read(xml: str) -> Dhcp:
    """The DHCP of a network by its definition in XML; without `<dhcp>` it has no ranges."""
    root = ET.fromstring(xml)
    forward = root.find('forward')
    ranges, seconds, own, reservations = [], [], set(), []
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
        seconds += [_lasts(each.find('lease')) for each in element.iterfind('dhcp/range')]
        reservations += [
            Reservation(each.get('mac', '').lower(), each.get('ip', ''), each.get('name', ''))
            for each in element.iterfind('dhcp/host')
        ]
    mode = forward.get('mode', 'nat') if forward is not None else ''
    # https://libvirt.org/formatnetwork.html#network-namespaces, and dnsmasq(8): a reservation sets the tag.
    options = {each.get('value') for each in root.iterfind(f'{{{DNSMASQ}}}options/{{{DNSMASQ}}}option')}
    known_only = 'dhcp-ignore=tag:!known' in options
    served = mode not in NOT_SERVED
    ipv6 = not served or root.get('ipv6') == 'yes' or root.find("ip[@family='ipv6']") is not None
    unfit = _explain_unfit(root, served, not ranges)
    return Dhcp(tuple(ranges), frozenset(own), tuple(reservations), served, known_only, tuple(seconds), ipv6, unfit)


def _explain_unfit(root: ET.Element, served: bool, rangeless: bool) -> tuple[str, str]:
    name, unfilterable, unaddressed = f'network {root.findtext("name")}', '', ''
    ports = [*root.iterfind('virtualport[@type]'), *root.iterfind("portgroup[@default='yes']/virtualport[@type]")]
    # virDomainActualNetDefValidate() in libvirt's src/conf/domain_conf.c takes a filter for a tap on a Linux bridge.
    if ports or not (served or root.find('bridge') is not None):
        kind = f'a port of {ports[0].get("type")}' if ports else 'the network card itself (macvtap or hostdev)'
        cure = 'name a Linux bridge in its place under `networks:` (docs/howto/bridge.md), as in `{bridge: br0}`'
        unfilterable = f'{name} is {kind}, where libvirt cannot filter guests, so none is made. Fix: {cure}'
    of_ipv4 = [each for each in root.iterfind('ip') if each.get('family', 'ipv4') == 'ipv4']
    if served and rangeless and any(each.find('dhcp') is not None for each in of_ipv4):
        cure = f'virsh net-update {root.findtext("name")} add ip-dhcp-range "<range start=\'FIRST\' end=\'LAST\'/>"'
        unaddressed = f'{name} has DHCP without a <range>: guests wait for ever. Fix: {cure} --live --config'
    elif served and not of_ipv4 and root.find('ip') is not None:
        cure = 'give it an <ip> of IPv4 with a <dhcp><range> by virsh net-edit, and restart it'
        unaddressed = f'{name} has IPv6 alone: a guest waits for an IPv4 address for ever. Fix: {cure}'
    return unfilterable, unaddressed


def _lasts(lease: ET.Element | None) -> int:
    """The seconds that a range's `<lease>` says; without one dnsmasq's own hour."""
    if lease is None:
        return 3600
    return int(lease.get('expiry', '0')) * UNITS[lease.get('unit', 'minutes')]


def choose(dhcp: Dhcp, taken: Set[IPv4Address], mac: str) -> IPv4Address | None:
    """An address in the ranges that is not in `taken`, for one MAC always the same while it is free; None: all are."""
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
    """Whether the network may give out the address."""
    return address not in dhcp.own and any(first <= address <= last for first, last in dhcp.ranges)


def host_xml(reservation: Reservation) -> str:
    """The reservation as virNetworkUpdate takes it. dnsmasq tells the guest the name, as its host name."""
    attributes = {'mac': reservation.mac, 'ip': reservation.address, 'name': reservation.name}
    return ET.tostring(ET.Element('host', {key: value for key, value in attributes.items() if value}), 'unicode')
