"""Send real frames through libvirt's filters on a test interface; check a guest's rules."""

from __future__ import annotations

import json
import shutil
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from dataclasses import replace
from ipaddress import IPv4Address

import pytest

from ecomp.model.guest import DEFAULT_NETWORKS, Attachment, GuestSpec
from tests.functional.guest import COMPUTE, build
from tests.functional.libvirt_host import LibvirtHost
from tests.kit.servers import until

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt import xml  # noqa: E402
from ecomp.virt.libvirt_host import NO_FILTERS, Libvirt  # noqa: E402
from ecomp.virt.xml import Service  # noqa: E402

MAC = '52:54:00:00:00:0a'
NEIGHBOUR = '52:54:00:00:00:0b'
IP = '10.88.0.66'
CONTROL = Service(IPv4Address('10.88.0.1'), 2379)
# Sends each frame of its input from the guest's end of the link; prints the numbers of the frames the bridge receives.
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
ALL = 'ff' * 6
ZERO = '00' * 6
TAGS = {'vlan 0': '81000000', 'vlan 7': '81000007', '802.1ad': '88a80000', 'two': '88a8000081000000'}
BRIDGED = (*DEFAULT_NETWORKS, Attachment('bridge', 'br0'))
DRIVERS = '/usr/lib/x86_64-linux-gnu/libvirt/connection-driver'


def hexed(mac: str) -> str:
    return mac.replace(':', '')


def ipv4(source: str, port: int = 9, tag: str = '', mac: str = MAC) -> str:
    """Return a TCP segment to etcd's address, ready for eight bytes of payload."""
    before, after = '45000030000100004006', f'{IPv4Address(source).packed.hex()}{CONTROL.address.packed.hex()}'
    # A bridge may drop packets with a wrong checksum (RFC 1071).
    words = sum(int((before + after)[at : at + 4], 16) for at in range(0, 36, 4))
    checksum = 0xFFFF - (words % 0xFFFF)
    return f'{ALL}{hexed(mac)}{tag}0800{before}{checksum:04x}{after}a029{port:04x}{"00" * 8}5002faf000000000'


def arp(mac: str = MAC, address: str = IP, operation: int = 1, target: str = '10.88.0.1', hardware: int = 1) -> str:
    """Return an ARP frame from the guest's own MAC that announces `mac`."""
    sender, target_fields = hexed(mac) + IPv4Address(address).packed.hex(), ZERO + IPv4Address(target).packed.hex()
    return f'{ALL}{hexed(MAC)}0806{hardware:04x}08000604{operation:04x}{sender}{target_fields}'


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
    # Linux accepts ARP of both hardware types.
    **{f'arp {kind}': arp(NEIGHBOUR, hardware=kind) for kind in (1, 6)},
    'arp reply': arp(NEIGHBOUR, operation=2),
    # Frames that a switch interprets: spanning tree, LLDP, a tag that it takes as a VLAN tag, RARP, PPPoE.
    'spanning tree': f'0180c2000000{hexed(MAC)}0026424203{"00" * 35}',
    **{f'protocol {kind}': f'{ALL}{hexed(MAC)}{kind}{"00" * 46}' for kind in ('88cc', '9100', '8035', '8863')},
}
NEIGHBOUR_ADVERTISEMENT = (
    f'333300000001{hexed(MAC)}86dd6000000000203aff{"fe80" + "00" * 12}000a{"ff02" + "00" * 13}01'
    f'88000000a0000000{"fe80" + "00" * 12}000b'
)


@pytest.fixture
def link(host: LibvirtHost, real: Libvirt) -> Iterator[LibvirtHost]:
    """A host with a bridge and a veth pair to it, evf0 to evf1."""
    del real
    for command in (
        'link add brf type bridge', f'link add evf0 address {MAC} type veth peer name evf1',
        'link set evf1 master brf up', 'link set evf0 up', 'link set brf up',
    ):  # fmt: skip
        host.inside(['ip', *command.split()])
    until(lambda: 'state forwarding' in host.inside(['bridge', 'link']).stdout, 20, 'the bridge forwards')
    yield host
    for device in ('evf0', 'brf'):
        host.inside(['ip', 'link', 'del', device])


def let_through(
    link: LibvirtHost,
    address: str | None,
    frames: dict[str, str],
    ipv6: bool = True,
    by_dhcp: bool = False,
    before: Callable[[], object] = lambda: None,
) -> set[str]:
    """Return the names of the frames that get from the guest to the bridge.

    `before` is called before the frames are sent; with `by_dhcp` it must make the guest request its address.
    """
    interface = ET.Element('filterbinding')
    owner = ET.SubElement(interface, 'owner')
    ET.SubElement(owner, 'name').text = 'evf'
    ET.SubElement(owner, 'uuid').text = 'f2a3b0ce-4d2b-4a3e-8f25-6b1d2b1f3c11'
    ET.SubElement(interface, 'portdev', name='evf1')
    ET.SubElement(interface, 'mac', address=MAC)
    xml.reference(interface, address, [CONTROL], MAC if ipv6 else None, by_dhcp)
    connection = libvirt.open(link.uri)
    try:
        binding = connection.nwfilterBindingCreateXML(ET.tostring(interface, 'unicode'))
        try:
            before()
            # The last frame is always let through: when it arrives, all earlier ones have been handled.
            frames_json = json.dumps([*frames.values(), ipv4(IP)])
            numbers = json.loads(link.inside([sys.executable, '-c', SEND], input=frames_json).stdout)
        finally:
            binding.delete()
    finally:
        connection.close()
    return {list(frames)[number] for number in numbers[:-1]}


def test_on_a_lan_s_bridge(link: LibvirtHost) -> None:
    """Frames of VLAN 0 bypassed all rules, and forged ARP made ecompute record a wrong address."""
    assert let_through(link, None, {**LEGITIMATE, **FORGED}) == LEGITIMATE.keys()


def test_with_a_reserved_address(link: LibvirtHost) -> None:
    others = {'another address': ipv4('10.88.0.67'), 'arp another address': arp(address='10.88.0.67')}
    passed = let_through(link, IP, {**LEGITIMATE, **FORGED, **others})
    assert passed == LEGITIMATE.keys() - {'probe'}, 'it asks for no address but this one'


@pytest.mark.parametrize('address', [None, IP])
def test_guest_sends_no_ipv6_where_the_network_has_none(link: LibvirtHost, address: str | None) -> None:
    ipv6 = {'ipv6': NEIGHBOUR_SOLICITATION, 'a neighbour by IPv6': NEIGHBOUR_ADVERTISEMENT}
    from_nobody = {f'{name} from nobody': frame[:12] + ZERO + frame[24:] for name, frame in ipv6.items()}
    frames = {'own': ipv4(IP), **ipv6, **from_nobody}
    assert let_through(link, address, frames, ipv6=False) == {'own'}


@pytest.fixture
def lan(link: LibvirtHost) -> Iterator[LibvirtHost]:
    """The same link, with a DHCP server on its bridge that has one address."""
    link.inside(['ip', 'address', 'add', f'{CONTROL.address}/24', 'dev', 'brf'])
    server = ['dnsmasq', '--conf-file=/dev/null', '--port=0', '--interface=brf', '--bind-interfaces']
    server += [f'--dhcp-range={IP},{IP},1h', f'--dhcp-leasefile={link.root}/lan.leases']
    link.inside([*server, f'--pid-file={link.root}/lan.pid'])
    yield link
    link.inside(['kill', (link.root / 'lan.pid').read_text().strip()])


def test_guest_on_a_bridge_is_held_to_the_address_that_dhcp_gave_it_where_the_operator_says_so(
    lan: LibvirtHost,
) -> None:
    others = {'another address': ipv4('10.88.0.67'), 'arp another address': arp(address='10.88.0.67')}

    def has_learned() -> bool:
        # Request it each time: libvirt may not listen yet, or its ebtables may conflict with ours on the table's lock.
        lan.inside(['busybox', 'udhcpc', '-i', 'evf0', '-n', '-q', '-t', '30', '-T', '2', '-s', '/bin/true'])
        rule_list = rules(lan)
        return f'--ip-src {IP}' in rule_list and 'libvirt-J' not in rule_list

    def ask_dhcp() -> None:
        until(has_learned, 20, 'libvirt has learned it')

    passed = let_through(lan, None, {**LEGITIMATE, **FORGED, **others}, by_dhcp=True, before=ask_dhcp)
    assert passed == LEGITIMATE.keys() - {'probe'}


def rules(host: LibvirtHost) -> str:
    """Return all frame filters of the host, as ebtables prints them."""
    # --concurrent: the libvirt of another test host may hold the lock.
    return host.inside(['ebtables', '--concurrent', '-t', 'nat', '-L']).stdout


def test_what_a_guest_may_send(real: Libvirt, spec: GuestSpec, host: LibvirtHost, connection: object) -> None:
    host.inside(['ip', 'link', 'add', 'br0', 'type', 'bridge'])
    control = [('10.88.0.9', 2379), ('10.88.0.9', 8080), ('10.88.0.10', 2379), ('fd00:88::9', 8080)]
    real = Libvirt(host.root / 'state', uri=host.uri, control=control)
    for_all = [
        '-p IPv4 --ip-proto udp --ip-sport 67 -j DROP',
        '-p IPv6 --ip6-proto udp --ip6-sport 547 -j DROP',
        '-p IPv6 --ip6-proto ipv6-icmp --ip6-icmp-type router-advertisement -j DROP',
        '-p IPv6 --ip6-proto ipv6-icmp --ip6-icmp-type redirect -j DROP',
        '-p IPv4 --ip-dst 10.88.0.9 --ip-proto tcp --ip-dport 2379 -j DROP',
        '-p IPv4 --ip-dst 10.88.0.9 --ip-proto tcp --ip-dport 8080 -j DROP',
        '-p IPv4 --ip-dst 10.88.0.10 --ip-proto tcp --ip-dport 2379 -j DROP',
        '-p IPv6 --ip6-dst fd00:88::9 --ip6-proto tcp --ip6-dport 8080 -j DROP',
    ]
    try:
        build(real, replace(spec, networks=BRIDGED, reserved=('10.77.0.50', None)))
        for _ in range(2):
            bindings = {binding.portDev(): binding.filterName() for binding in connection.listAllNWFilterBindings()}
            assert sorted(bindings.values()) == [xml.GUEST_ADDRESS, xml.GUEST_MAC]
            reserved_port, bridged_port = sorted(bindings, key=bindings.__getitem__)
            first, second = replace(spec, networks=BRIDGED).macs
            chains = {text.split(',')[0]: text.splitlines()[1:] for text in rules(host).split('Bridge chain: ')}
            assert [line.strip() for line in chains[f'libvirt-I-{reserved_port}'] if line.strip()] == [
                *for_all,
                f'-p IPv4 -s {first} --ip-src 10.77.0.50 -j ACCEPT',
                f'-p IPv4 -s {first} --ip-dst 255.255.255.255 -j ACCEPT',
                f'-p ARP -s {first} --arp-ip-src 10.77.0.50 --arp-mac-src {first} -j ACCEPT',
                '-p IPv6 -s 00:00:00:00:00:00 -j ACCEPT',  # the network has no IPv6
                '-j DROP',
            ]
            assert [line.strip() for line in chains[f'libvirt-I-{bridged_port}'] if line.strip()] == [
                *for_all,
                f'-p IPv4 -s {second} -j ACCEPT',
                f'-p ARP -s {second} --arp-mac-src {second} -j ACCEPT',
                f'-p IPv6 -s {second} -j ACCEPT',
                '-j DROP',
            ]
            real.switch_off(spec.instance, COMPUTE)
            assert 'libvirt-I' not in rules(host)
            # The filters are unused now and can be removed manually; they are defined again when they are needed.
            for name in xml.FILTERS:
                connection.nwfilterLookupByName(name).undefine()
            real.resume(spec.instance, COMPUTE)
    finally:
        real.destroy(spec.instance, COMPUTE)
        host.inside(['ip', 'link', 'del', 'br0'])
    assert 'libvirt-I' not in rules(host)


def test_filters_that_are_there_stay(real: Libvirt, connection: object) -> None:
    uuids = {name: connection.nwfilterLookupByName(name).UUIDString() for name in xml.FILTERS}
    for name, uuid in uuids.items():
        libvirt_filter = connection.nwfilterLookupByName(name)
        libvirt_filter.undefine()
        connection.nwfilterDefineXML(f"<filter name='{name}' chain='root'/>")
        own_uuid = connection.nwfilterLookupByName(name).UUIDString()
        real.prepare()
        assert connection.nwfilterLookupByName(name).UUIDString() == own_uuid != uuid
        connection.nwfilterLookupByName(name).undefine()
    real.prepare()
    assert {name: connection.nwfilterLookupByName(name).UUIDString() for name in xml.FILTERS} == uuids


def unfiltered(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if 'filter' in record.getMessage()]


def test_without_ebtables(
    real: Libvirt,
    spec: GuestSpec,
    connection: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr('ecomp.virt.libvirt_host.search_path', lambda: '/nowhere')
    real.prepare()
    build(real, replace(spec, reserved=('10.77.0.50',)))
    assert unfiltered(caplog) == [NO_FILTERS.format(why='ebtables is not installed')]
    assert 'filterref' not in connection.lookupByUUIDString(spec.instance).XMLDesc()


def test_a_libvirtd_without_the_driver(
    host: LibvirtHost, real: Libvirt, spec: GuestSpec, caplog: pytest.LogCaptureFixture
) -> None:
    drivers = host.root / 'drivers'
    shutil.copytree(DRIVERS, drivers, ignore=shutil.ignore_patterns('*nwfilter*'))
    host.kill_libvirtd()
    start = f'mount --bind {drivers} {DRIVERS}; libvirtd -d --pid-file {host.root}/libvirtd.pid'
    host.inside(['unshare', '-m', 'sh', '-e', '-c', start])
    try:
        real.prepare()
        build(real, replace(spec, reserved=('10.77.0.50',)))
    finally:
        host.kill_libvirtd()
        host.start_libvirtd()
    why = 'this function is not supported by the connection driver: virNWFilterLookupByName'
    assert unfiltered(caplog) == [NO_FILTERS.format(why=why)]
    new_connection = libvirt.open(host.uri)
    assert 'filterref' not in new_connection.lookupByUUIDString(spec.instance).XMLDesc()
    new_connection.close()
