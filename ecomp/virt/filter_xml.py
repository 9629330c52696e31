"""PURE: what a guest may send, as libvirt's network filters. https://libvirt.org/formatnwfilter.html

Few rules: each is a program that libvirt runs at every start, some 20 ms. Other rules need another name: what is
defined under a name is taken as it is.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address

GUEST_MAC, GUEST_ADDRESS = 'ecompute-guest-mac-3', 'ecompute-guest-address-3'

# All on Ethernet's level: what two guests of one bridge send each other is not seen on that of IP.
_NO_SERVER = """\
  <rule action='drop' direction='out' priority='10'><ip protocol='udp' srcportstart='67'/></rule>
  <rule action='drop' direction='out' priority='20'><ipv6 protocol='udp' srcportstart='547'/></rule>
  <rule action='drop' direction='out' priority='30'><ipv6 protocol='icmpv6' type='134'/></rule>
  <rule action='drop' direction='out' priority='40'><ipv6 protocol='icmpv6' type='137'/></rule>
"""
_NO_CONTROL = """\
  <rule action='drop' direction='out' priority='50'>
    <ip protocol='tcp' dstipaddr='$CONTROL4[@1]' dstportstart='$PORT4[@1]'/>
  </rule>
  <rule action='drop' direction='out' priority='60'>
    <ipv6 protocol='tcp' dstipaddr='$CONTROL6[@1]' dstportstart='$PORT6[@1]'/>
  </rule>
"""

FILTERS = {
    # Only what is seen to be its own passes. A VLAN tag hides from ebtables what is in a frame, and what is neither IP
    # nor ARP may be for the switch. Of ARP for other kinds of hardware ebtables sees nothing, and Linux believes it.
    GUEST_MAC: f"""\
<filter name='{GUEST_MAC}' chain='root'>
  <uuid>d25464e4-1908-4f05-afa1-acd9b6b44141</uuid>
{_NO_SERVER}{_NO_CONTROL}\
  <rule action='accept' direction='out' priority='100'><ip srcmacaddr='$MAC'/></rule>
  <rule action='accept' direction='out' priority='200'><arp srcmacaddr='$MAC' arpsrcmacaddr='$MAC'/></rule>
  <rule action='accept' direction='out' priority='300'><ipv6 srcmacaddr='$MAC6'/></rule>
  <rule action='drop' direction='out' priority='500'><mac/></rule>
</filter>
""",
    GUEST_ADDRESS: f"""\
<filter name='{GUEST_ADDRESS}' chain='root'>
  <uuid>1e2e5c91-3a39-419c-915b-b9adad333217</uuid>
{_NO_SERVER}{_NO_CONTROL}\
  <rule action='accept' direction='out' priority='100'><ip srcmacaddr='$MAC' srcipaddr='$IP'/></rule>
  <rule action='accept' direction='out' priority='200'><ip srcmacaddr='$MAC' dstipaddr='255.255.255.255'/></rule>
  <rule action='accept' direction='out' priority='300'>
    <arp srcmacaddr='$MAC' arpsrcmacaddr='$MAC' arpsrcipaddr='$IP'/>
  </rule>
  <rule action='accept' direction='out' priority='400'><ipv6 srcmacaddr='$MAC6'/></rule>
  <rule action='drop' direction='out' priority='500'><mac/></rule>
</filter>
""",
}
"""By name. On each interface: a guest is no DHCP server (its port is 67, DHCPv6's 547) and no router (router
advertisements and redirects are ICMPv6 134 and 137) of its neighbours, and reaches neither etcd nor placement. It sends
IPv4, ARP and, where the network has it, IPv6, all from its own MAC, and nothing else; where it has a reserved address,
IPv4 and ARP are from that alone, or to all, as it asks for one. $MAC6 is its MAC where the network has IPv6.
"""


@dataclass(frozen=True)
class Service:
    """A TCP service that no guest reaches."""

    address: IPv4Address | IPv6Address
    port: int


# A variable of libvirt's has at least one value; nobody listens there.
_NOWHERE = (Service(IPv4Address('0.0.0.0'), 1), Service(IPv6Address('::'), 1))
_NOBODY = '00:00:00:00:00:00'  # Linux's bridge drops what is from it


def reference(
    interface: ET.Element, address: str | None, control: Collection[Service], mac6: str | None, by_dhcp: bool = False
) -> None:
    """Add the filter to a domain's `<interface>`; `address` is its reserved IPv4 address, None for none.

    `control` are the services that the guest may not reach, `mac6` the MAC that it sends IPv6 from, None for no IPv6.
    `by_dhcp`: without a reserved address it sends nothing but DHCP before libvirt has seen which one it is given.
    """
    filtered = ET.SubElement(interface, 'filterref', filter=GUEST_ADDRESS if address or by_dhcp else GUEST_MAC)
    ET.SubElement(filtered, 'parameter', name='MAC6', value=mac6 or _NOBODY)
    if address:
        ET.SubElement(filtered, 'parameter', name='IP', value=address)
    elif by_dhcp:
        ET.SubElement(filtered, 'parameter', name='CTRL_IP_LEARNING', value='dhcp')
    for version, nowhere in zip((4, 6), _NOWHERE, strict=True):
        for each in [each for each in control if each.address.version == version] or [nowhere]:
            ET.SubElement(filtered, 'parameter', name=f'CONTROL{version}', value=str(each.address))
            ET.SubElement(filtered, 'parameter', name=f'PORT{version}', value=str(each.port))
