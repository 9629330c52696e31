"""What libvirt's filters let through of real frames: its rules on an interface that is ours, and not a guest's."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from ipaddress import IPv4Address

import pytest

from tests.functional.libvirt_host import LibvirtHost
from tests.kit.servers import until

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt import filter_xml  # noqa: E402
from ecomp.virt.filter_xml import Service  # noqa: E402
from ecomp.virt.libvirt_host import Libvirt  # noqa: E402

MAC, NEIGHBOUR = '52:54:00:00:00:0a', '52:54:00:00:00:0b'
IP = '10.88.0.66'
CONTROL = Service(IPv4Address('10.88.0.1'), 2379)
# Sends each frame of its input from the guest's end of the link; prints the numbers of those the bridge has received.
SEND = """
import json, socket, sys
frames = json.load(sys.stdin)
guest = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
guest.bind(('evf0', 0))
bridge = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
bridge.bind(('brf', 0))
bridge.settimeout(20)
for number, frame in enumerate(frames):
    guest.send(bytes.fromhex(frame) + b'number%02d' % number)
seen = []
while not seen or seen[-1] != len(frames) - 1:
    said = bridge.recv(2000)[-8:]
    if said.startswith(b'number'):
        seen.append(int(said[6:]))
print(json.dumps(seen))
"""
ALL, ZERO = 'ff' * 6, '00' * 6
TAGS = {'vlan 0': '81000000', 'vlan 7': '81000007', '802.1ad': '88a80000', 'two': '88a8000081000000'}


def hexed(mac: str) -> str:
    return mac.replace(':', '')


def ipv4(source: str, port: int = 9, tag: str = '', mac: str = MAC) -> str:
    """A TCP segment with eight bytes, to come, for the address of etcd."""
    before, after = '45000030000100004006', f'{IPv4Address(source).packed.hex()}{CONTROL.address.packed.hex()}'
    # A bridge may drop what has a wrong checksum: RFC 1071.
    words = sum(int((before + after)[at : at + 4], 16) for at in range(0, 36, 4))
    checksum = 0xFFFF - (words % 0xFFFF)
    return f'{ALL}{hexed(mac)}{tag}0800{before}{checksum:04x}{after}a029{port:04x}{"00" * 8}5002faf000000000'


def arp(mac: str = MAC, address: str = IP, operation: int = 1, target: str = '10.88.0.1', hardware: int = 1) -> str:
    """ARP from the guest's own MAC; `mac` is what it says."""
    sender, whom = hexed(mac) + IPv4Address(address).packed.hex(), ZERO + IPv4Address(target).packed.hex()
    return f'{ALL}{hexed(MAC)}0806{hardware:04x}08000604{operation:04x}{sender}{whom}'


NEIGHBOUR_SOLICITATION = (
    f'3333ff000001{hexed(MAC)}86dd6000000000203aff{"fe80" + "00" * 12}000a{"ff02" + "00" * 9}01ff000001'
    f'87000000{"00" * 4}{"fe80" + "00" * 13}01'
)
ARPS = {
    'request': arp(),
    'reply': arp(operation=2),
    'gratuitous': arp(target=IP),
    'probe': arp(address='0.0.0.0', target=IP),
}
LEGITIMATE = {'own': ipv4(IP), **ARPS, 'ipv6': NEIGHBOUR_SOLICITATION}
FORGED = {
    'as a neighbour': ipv4(IP, mac=NEIGHBOUR),
    'etcd': ipv4(IP, CONTROL.port),
    **{f'{name} etcd': ipv4(IP, CONTROL.port, tag) for name, tag in TAGS.items()},
    **{f'{name} own': ipv4(IP, tag=tag) for name, tag in TAGS.items()},
    # Linux believes ARP of both kinds of hardware.
    **{f'arp {kind}': arp(NEIGHBOUR, hardware=kind) for kind in (1, 6)},
    'arp reply': arp(NEIGHBOUR, operation=2),
}


@pytest.fixture
def link(host: LibvirtHost, real: Libvirt) -> Iterator[LibvirtHost]:
    """A host with a bridge and a link to it, evf0 to evf1."""
    del real
    for command in (
        'link add brf type bridge', f'link add evf0 address {MAC} type veth peer name evf1',
        'link set evf1 master brf up', 'link set evf0 up', 'link set brf up',
    ):  # fmt: skip
        host.inside(['ip', *command.split()])
    until(lambda: 'state forwarding' in host.inside(['bridge', 'link']).stdout, 20, 'the bridge forwards')
    yield host
    for each in ('evf0', 'brf'):
        host.inside(['ip', 'link', 'del', each])


def let_through(link: LibvirtHost, address: str | None, frames: dict[str, str]) -> set[str]:
    """Which of the frames a guest gets out, with this reserved address or none."""
    interface = ET.Element('filterbinding')
    owner = ET.SubElement(interface, 'owner')
    ET.SubElement(owner, 'name').text = 'evf'
    ET.SubElement(owner, 'uuid').text = 'f2a3b0ce-4d2b-4a3e-8f25-6b1d2b1f3c11'
    ET.SubElement(interface, 'portdev', name='evf1')
    ET.SubElement(interface, 'mac', address=MAC)
    filter_xml.reference(interface, address, [CONTROL])
    connection = libvirt.open(link.uri)
    try:
        binding = connection.nwfilterBindingCreateXML(ET.tostring(interface, 'unicode'))
        try:
            # What comes last is let through: then all before it has been.
            sent = json.dumps([*frames.values(), ipv4(IP)])
            seen = json.loads(link.inside([sys.executable, '-c', SEND], input=sent).stdout)
        finally:
            binding.delete()
    finally:
        connection.close()
    return {list(frames)[number] for number in seen[:-1]}


def test_on_a_lan_s_bridge(link: LibvirtHost) -> None:
    """VLAN 0 led past all rules to etcd, and ARP in a neighbour's name had ecompute write down a wrong address."""
    assert let_through(link, None, {**LEGITIMATE, **FORGED}) == LEGITIMATE.keys()


def test_with_a_reserved_address(link: LibvirtHost) -> None:
    others = {'another address': ipv4('10.88.0.67'), 'arp another address': arp(address='10.88.0.67')}
    found = let_through(link, IP, {**LEGITIMATE, **FORGED, **others})
    assert found == LEGITIMATE.keys() - {'probe'}, 'it asks for no address but this one'
