"""Send real frames through libvirt's filters on a test interface, and check a guest's rules."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import pytest

from ecomp.errors import BuildFailed
from ecomp.model.guest import DEFAULT_NETWORKS, INTERFACE_DOWN, UNFILTERED, Attachment, GuestSpec
from tests.functional.guest import COMPUTE, build
from tests.functional.libvirt_host import LibvirtHost
from tests.kit.servers import wait_until

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt import xml  # noqa: E402
from ecomp.virt.connection import Connection  # noqa: E402
from ecomp.virt.domains import MAX_START_TRIES  # noqa: E402
from ecomp.virt.libvirt_host import Filters, Libvirt, explain_no_filters  # noqa: E402
from ecomp.virt.networks import INTERFACES_DIRECTORY  # noqa: E402
from ecomp.virt.xml import ClosedService  # noqa: E402

MAC = '52:54:00:00:00:0a'
NEIGHBOUR = '52:54:00:00:00:0b'
IP = '10.88.0.66'
CONTROL = ClosedService(IPv4Address('10.88.0.1'), 2379)
# Sends each frame of its input from the guest's end of the link; prints the numbers of the frames the bridge receives.
# Before that it repeats the last frame until it arrives. libvirt applies an address that it has learned after the guest
# has got it, and removes its earlier rules, which let through only DHCP, when the new ones are complete.
SEND_SCRIPT = """
import json, socket, sys, time
frames = json.load(sys.stdin)
guest = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
guest.bind(('evf0', 0))
bridge = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
bridge.bind(('brf', 0))
bridge.settimeout(0.1)
deadline = time.monotonic() + 60
while True:
    guest.send(bytes.fromhex(frames[-1]) + b'is ready')
    try:
        if bridge.recv(2000).endswith(b'is ready'):
            break
    except TimeoutError:
        if time.monotonic() > deadline:
            raise
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
BROADCAST = 'ff' * 6
ZERO = '00' * 6
TAGS = {'vlan 0': '81000000', 'vlan 7': '81000007', '802.1ad': '88a80000', 'two': '88a8000081000000'}
BRIDGED_NETWORKS = (*DEFAULT_NETWORKS, Attachment('bridge', 'br0'))
DRIVER_DIRECTORY = '/usr/lib/x86_64-linux-gnu/libvirt/connection-driver'
# Debian's link to the ebtables that libvirt runs.
EBTABLES_LINK = '/etc/alternatives/ebtables'
RACE_ERROR = 'RULE_DELETE failed (No such file or directory): rule in chain libvirt-J-vnet0'
# Fails as ebtables-nft does if other rules of the host change while it adds one; once for each line of a file.
RACING_EBTABLES = f"""#!/bin/sh
case "$*" in *' -A libvirt-J-'*)
    if [ -s {{races}} ]; then
        sed -i 1d {{races}}
        echo 'ebtables v1.8.9 (nf_tables):  {RACE_ERROR}' >&2
        exit 4
    fi
esac
exec {{program}} "$@"
"""


def strip_colons(mac: str) -> str:
    return mac.replace(':', '')


def make_tcp_frame(source: str, port: int = 9, tag: str = '', mac: str = MAC) -> str:
    before, after = '45000030000100004006', f'{IPv4Address(source).packed.hex()}{CONTROL.address.packed.hex()}'
    # A bridge may drop packets with a wrong checksum (RFC 1071).
    words = sum(int((before + after)[at : at + 4], 16) for at in range(0, 36, 4))
    checksum = 0xFFFF - (words % 0xFFFF)
    return (
        f'{BROADCAST}{strip_colons(mac)}{tag}0800{before}{checksum:04x}{after}a029{port:04x}{"00" * 8}5002faf000000000'
    )


def make_arp_frame(
    mac: str = MAC, address: str = IP, operation: int = 1, target: str = '10.88.0.1', hardware: int = 1
) -> str:
    sender, target_fields = (
        strip_colons(mac) + IPv4Address(address).packed.hex(),
        ZERO + IPv4Address(target).packed.hex(),
    )
    return f'{BROADCAST}{strip_colons(MAC)}0806{hardware:04x}08000604{operation:04x}{sender}{target_fields}'


NEIGHBOUR_SOLICITATION = (
    f'3333ff000001{strip_colons(MAC)}86dd6000000000203aff{"fe80" + "00" * 12}000a{"ff02" + "00" * 9}01ff000001'
    f'87000000{"00" * 4}{"fe80" + "00" * 13}01'
)
ARPS = {
    'request': make_arp_frame(),
    'reply': make_arp_frame(operation=2),
    'gratuitous': make_arp_frame(target=IP),
    'probe': make_arp_frame(address='0.0.0.0', target=IP),
}
LEGITIMATE = {'own': make_tcp_frame(IP), **ARPS, 'ipv6': NEIGHBOUR_SOLICITATION}
FORGED = {
    'as a neighbour': make_tcp_frame(IP, mac=NEIGHBOUR),
    'etcd': make_tcp_frame(IP, CONTROL.port),
    **{f'{name} etcd': make_tcp_frame(IP, CONTROL.port, tag) for name, tag in TAGS.items()},
    **{f'{name} own': make_tcp_frame(IP, tag=tag) for name, tag in TAGS.items()},
    # Linux accepts ARP of both hardware types.
    **{f'arp {kind}': make_arp_frame(NEIGHBOUR, hardware=kind) for kind in (1, 6)},
    'arp reply': make_arp_frame(NEIGHBOUR, operation=2),
    # Frames that a switch interprets: spanning tree, LLDP, a tag that it takes as a VLAN tag, RARP, PPPoE.
    'spanning tree': f'0180c2000000{strip_colons(MAC)}0026424203{"00" * 35}',
    **{
        f'protocol {kind}': f'{BROADCAST}{strip_colons(MAC)}{kind}{"00" * 46}'
        for kind in ('88cc', '9100', '8035', '8863')
    },
}
NEIGHBOUR_ADVERTISEMENT = (
    f'333300000001{strip_colons(MAC)}86dd6000000000203aff{"fe80" + "00" * 12}000a{"ff02" + "00" * 13}01'
    f'88000000a0000000{"fe80" + "00" * 12}000b'
)


@pytest.fixture
def link(host: LibvirtHost, real_libvirt: Libvirt) -> Iterator[LibvirtHost]:
    del real_libvirt
    for command in (
        'link add brf type bridge', f'link add evf0 address {MAC} type veth peer name evf1',
        'link set evf1 master brf up', 'link set evf0 up', 'link set brf up',
    ):  # fmt: skip
        host.run_inside(['ip', *command.split()])
    wait_until(lambda: 'state forwarding' in host.run_inside(['bridge', 'link']).stdout, 20, 'the bridge forwards')
    yield host
    for device in ('evf0', 'brf'):
        host.run_inside(['ip', 'link', 'del', device])


def make_binding() -> ET.Element:
    interface = ET.Element('filterbinding')
    owner = ET.SubElement(interface, 'owner')
    ET.SubElement(owner, 'name').text = 'evf'
    ET.SubElement(owner, 'uuid').text = 'f2a3b0ce-4d2b-4a3e-8f25-6b1d2b1f3c11'
    ET.SubElement(interface, 'portdev', name='evf1')
    ET.SubElement(interface, 'mac', address=MAC)
    return interface


def send_frames(
    link: LibvirtHost,
    address: str | None,
    frames: dict[str, str],
    ipv6: bool = True,
    by_dhcp: bool = False,
    before: Callable[[], object] = lambda: None,
) -> set[str]:
    """Return the names of the frames that get from the guest to the bridge.

    With `by_dhcp`, `before` must make the guest request its address.
    """
    interface = make_binding()
    xml.add_filter_reference(interface, address, [CONTROL], MAC if ipv6 else None, by_dhcp)
    with closing(libvirt.open(link.uri)) as connection:
        binding = connection.nwfilterBindingCreateXML(ET.tostring(interface, 'unicode'))
        try:
            before()
            # The last frame is always let through: when it arrives, all earlier ones have been handled.
            frames_json = json.dumps([*frames.values(), make_tcp_frame(IP)])
            numbers = json.loads(link.run_inside([sys.executable, '-c', SEND_SCRIPT], input=frames_json).stdout)
        finally:
            binding.delete()
    return {list(frames)[number] for number in numbers[:-1]}


def test_forged_frames_are_dropped_on_a_lan_bridge(link: LibvirtHost) -> None:
    """Frames of VLAN 0 bypassed all rules, and forged ARP made ecompute record a wrong address."""
    assert send_frames(link, None, {**LEGITIMATE, **FORGED}) == LEGITIMATE.keys()


def test_guest_with_reserved_address_can_use_no_other(link: LibvirtHost) -> None:
    others = {
        'another address': make_tcp_frame('10.88.0.67'),
        'arp another address': make_arp_frame(address='10.88.0.67'),
    }
    passed = send_frames(link, IP, {**LEGITIMATE, **FORGED, **others})
    assert passed == LEGITIMATE.keys() - {'probe'}, 'it asks for no address but this one'


@pytest.mark.parametrize('address', [None, IP])
def test_guest_sends_no_ipv6_on_a_network_without_ipv6(link: LibvirtHost, address: str | None) -> None:
    ipv6 = {'ipv6': NEIGHBOUR_SOLICITATION, 'a neighbour by IPv6': NEIGHBOUR_ADVERTISEMENT}
    from_nobody = {f'{name} from nobody': frame[:12] + ZERO + frame[24:] for name, frame in ipv6.items()}
    frames = {'own': make_tcp_frame(IP), **ipv6, **from_nobody}
    assert send_frames(link, address, frames, ipv6=False) == {'own'}


@pytest.fixture
def lan(link: LibvirtHost) -> Iterator[LibvirtHost]:
    link.run_inside(['ip', 'address', 'add', f'{CONTROL.address}/24', 'dev', 'brf'])
    server = ['dnsmasq', '--conf-file=/dev/null', '--port=0', '--interface=brf', '--bind-interfaces']
    # Without --no-ping dnsmasq waits three seconds before it offers an address.
    server += ['--no-ping', f'--dhcp-range={IP},{IP},1h', f'--dhcp-leasefile={link.root}/lan.leases']
    link.run_inside([*server, f'--pid-file={link.root}/lan.pid'])
    yield link
    link.run_inside(['kill', (link.root / 'lan.pid').read_text().strip()])


def test_guest_on_a_bridge_can_be_limited_to_its_dhcp_address(lan: LibvirtHost) -> None:
    others = {
        'another address': make_tcp_frame('10.88.0.67'),
        'arp another address': make_arp_frame(address='10.88.0.67'),
    }

    def request_address() -> None:
        # Once: libvirt listens when it has created the filter. ebtables must not run now, see list_rules.
        lan.run_inside(['busybox', 'udhcpc', '-i', 'evf0', '-n', '-q', '-t', '30', '-T', '2', '-s', '/bin/true'])

    passed = send_frames(lan, None, {**LEGITIMATE, **FORGED, **others}, by_dhcp=True, before=request_address)
    assert passed == LEGITIMATE.keys() - {'probe'}


def list_rules(host: LibvirtHost) -> str:
    # ebtables-nft deletes and adds rules even to list them. Of two that run concurrently, one may fail ("RULE_DELETE
    # failed"). If libvirt's fails while it applies a learned address, libvirt sets the guest's interface down for good.
    # --concurrent: an older ebtables has a lock, which the libvirt of another test host may hold.
    return host.run_inside(['ebtables', '--concurrent', '-t', 'nat', '-L']).stdout


@pytest.fixture
def races(host: LibvirtHost) -> Iterator[Path]:
    """A file: for each line in it, one ebtables of the host's libvirt loses a race."""
    file, directory = host.root / 'races', host.root / 'alternatives'
    shutil.copytree(Path(EBTABLES_LINK).parent, directory, symlinks=True)
    program = directory / Path(EBTABLES_LINK).name
    program.unlink()
    program.write_text(RACING_EBTABLES.format(races=file, program=os.readlink(EBTABLES_LINK)))
    program.chmod(0o755)
    host.run_inside(['mount', '--bind', str(directory), str(Path(EBTABLES_LINK).parent)])
    yield file
    host.run_inside(['umount', str(Path(EBTABLES_LINK).parent)])
    shutil.rmtree(directory)


def flush_ruleset() -> None:
    """Remove all tables, as `nft flush ruleset` in Debian's /etc/nftables.conf does."""

    def make_message(kind: int, resource: int) -> bytes:
        return struct.pack('=IHHIIBBH', 20, kind, 1, 0, 0, socket.AF_UNSPEC, 0, resource)

    # linux/netfilter/nfnetlink.h: a batch for the subsystem nftables, with NFT_MSG_DELTABLE for every table.
    subsystem, begin, end, delete_table = 10, 16, 17, 2
    messages = (begin, socket.htons(subsystem)), (subsystem << 8 | delete_table, 0), (end, socket.htons(subsystem))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as netlink:
        netlink.send(b''.join(make_message(*message) for message in messages))


def run_ebtables(*arguments: str) -> None:
    subprocess.run(['ebtables', '--concurrent', '-t', 'nat', *arguments], check=True)


def read_rules() -> list[str]:
    saved = subprocess.run(['ebtables-save'], check=True, capture_output=True, text=True).stdout
    return sorted(line for line in saved.splitlines() if line.startswith('-A') and 'libvirt-' in line)


def remove_chain(tap: str) -> None:
    for arguments in ('-D PREROUTING -i {0} -j libvirt-I-{0}', '-F libvirt-I-{0}', '-X libvirt-I-{0}'):
        run_ebtables(*arguments.format(tap).split())


# What removes rules: all of them, those of all chains, and those of one interface, or a part of these.
REMOVALS: dict[str, Callable[[str], None]] = {
    'nft flush ruleset': lambda _: flush_ruleset(),
    'ebtables -F': lambda _: run_ebtables('-F'),
    'its chain': remove_chain,
    'its jump': lambda tap: run_ebtables('-D', 'PREROUTING', '-i', tap, '-j', f'libvirt-I-{tap}'),
    'its rules': lambda tap: run_ebtables('-F', f'libvirt-I-{tap}'),
}


class LogLines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger('ecomp').addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def check_restoring(state: str, instance: str) -> None:
    """Check that each removal is found and repaired, and that intact rules cost no call."""
    log, before = LogLines(), read_rules()
    taps = sorted({line.split()[3] for line in before if line.startswith('-A PREROUTING')})
    assert len(taps) == 2
    with closing(Libvirt(Path(state), uri='qemu+unix:///system?socket=/nowhere', has_filters=True)) as hypervisor:
        hypervisor.restore_filters()
    with closing(Libvirt(Path(state), has_filters=True)) as hypervisor:
        hypervisor.replug_interfaces()
        for name, remove in REMOVALS.items():
            remove(taps[1])
            assert read_rules() != before, name
            hypervisor.restore_filters()
            assert read_rules() == before, name
            assert hypervisor.list_guests()[instance].describe_trouble({}) == '', name
            removed = taps if name in ('nft flush ruleset', 'ebtables -F') else taps[1:]
            restored = [f'instance {instance}: the filter rules of {tap} were gone: restored them' for tap in removed]
            assert sorted(log.lines) == restored, name
            log.lines.clear()
            hypervisor.restore_filters()
            assert (read_rules(), log.lines) == (before, []), 'nothing is repeated'


def check_trouble(state: str, instance: str) -> None:
    """Check a filter that libvirt cannot restore: the next check tries again."""
    before = read_rules()
    with closing(Libvirt(Path(state), has_filters=True)) as hypervisor:
        flush_ruleset()
        hypervisor.restore_filters()
        trouble = hypervisor.list_guests()[instance].describe_trouble({})
        assert trouble.startswith(f'{UNFILTERED} (vnet'), trouble
        assert RACE_ERROR in trouble
        assert trouble.endswith('. Fix: systemctl reload libvirtd')
        hypervisor.restore_filters()
        assert (hypervisor.list_guests()[instance].describe_trouble({}), read_rules()) == ('', before)


def check_interface_down(state: str, instance: str) -> None:
    with closing(Libvirt(Path(state))) as hypervisor:
        hypervisor.replug_interfaces()
        assert hypervisor.list_guests()[instance].troubles == ()
        tap = min(path.name for path in INTERFACES_DIRECTORY.glob('vnet*'))
        subprocess.run(['ip', 'link', 'set', tap, 'down'], check=True)
        hypervisor.replug_interfaces()
        trouble = hypervisor.list_guests()[instance].describe_trouble({})
        assert trouble == f'{INTERFACE_DOWN} ({tap}). Fix: stop the guest, and start it'


def test_guest_has_these_filter_rules(
    real_libvirt: Libvirt, spec: GuestSpec, host: LibvirtHost, connection: Any, races: Path
) -> None:
    """Its rules are the same after a restart, during foreign changes and after removals."""
    host.run_inside(['ip', 'link', 'add', 'br0', 'type', 'bridge'])
    control = [('10.88.0.9', 2379), ('10.88.0.9', 8080), ('10.88.0.10', 2379), ('fd00:88::9', 8080)]
    real_libvirt = Libvirt(host.root / 'state', uri=host.uri, control_endpoints=control)
    spec = replace(spec, networks=BRIDGED_NETWORKS, reserved_addresses=('10.77.0.50', None))
    first, second = spec.macs
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

    def check_rules() -> None:
        bindings = {binding.portDev(): binding.filterName() for binding in connection.listAllNWFilterBindings()}
        assert sorted(bindings.values()) == [xml.ADDRESS_FILTER, xml.MAC_FILTER]
        reserved_port, bridged_port = sorted(bindings, key=bindings.__getitem__)
        chains = {text.split(',')[0]: text.splitlines()[1:] for text in list_rules(host).split('Bridge chain: ')}
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

    try:
        races.write_text('lost\n' * (MAX_START_TRIES - 1))
        build(real_libvirt, spec)
        assert races.read_text() == ''
        check_rules()
        host.call_function('tests.functional.test_filters', 'check_interface_down', spec.instance)
        real_libvirt.switch_off(spec.instance, COMPUTE)
        assert 'libvirt-I' not in list_rules(host)
        # The filters are unused now and can be removed manually; they are defined again when they are needed.
        for name in xml.FILTERS:
            connection.nwfilterLookupByName(name).undefine()
        races.write_text('lost\n' * MAX_START_TRIES)
        with pytest.raises(BuildFailed, match=re.escape(RACE_ERROR)):
            real_libvirt.start_existing(spec.instance, COMPUTE)
        real_libvirt.start_existing(spec.instance, COMPUTE)
        check_rules()
        host.call_function('tests.functional.test_filters', 'check_restoring', spec.instance)
        # The first check loses them all on both interfaces, and the second one all but one.
        races.write_text('lost\n' * (3 * MAX_START_TRIES - 1))
        host.call_function('tests.functional.test_filters', 'check_trouble', spec.instance)
        assert races.read_text() == ''
    finally:
        real_libvirt.destroy(spec.instance, COMPUTE)
        host.run_inside(['ip', 'link', 'del', 'br0'])
    assert 'libvirt-I' not in list_rules(host)


def check_learned_address(_state: str, _instance: str) -> None:
    """Check that a restored filter lets the guest use the address that it was given."""
    interface = make_binding()
    xml.add_filter_reference(interface, None, [CONTROL], MAC, by_dhcp=True)
    link = xml.InterfaceLink(
        Attachment('bridge', 'brf'), 'brf', 'evf1', filter_binding=ET.tostring(interface, 'unicode')
    )
    own_address = f'-A libvirt-I-evf1 -p IPv4 -s {MAC} --ip-src {IP} -j ACCEPT'
    with closing(Connection('qemu:///system')) as connection:
        filters = Filters(connection, ())
        filters.restore(link)
        client = ['busybox', 'udhcpc', '-i', 'evf0', '-n', '-q', '-t', '30', '-T', '2', '-s', '/bin/true']
        subprocess.run(client, check=True, capture_output=True)
        wait_until(lambda: own_address in read_rules(), 60, 'libvirt has learned the address')
        flush_ruleset()
        filters.restore(link)
        wait_until(lambda: own_address in read_rules(), 60, 'the rules are those of the learned address')
        # The binding of a tap that is removed at this moment does not stay.
        subprocess.run(['ip', 'link', 'del', 'evf1'], check=True)
        filters.restore(link)
        with connection.use('listing bindings') as opened:
            assert opened.listAllNWFilterBindings() == []
    for command in (f'add evf0 address {MAC} type veth peer name evf1', 'set evf1 master brf up'):
        subprocess.run(['ip', 'link', *command.split()], check=True)


def test_restored_filter_keeps_the_learned_address(lan: LibvirtHost) -> None:
    lan.call_function('tests.functional.test_filters', 'check_learned_address', '')


def test_existing_filters_are_kept(real_libvirt: Libvirt, connection: object) -> None:
    uuids = {name: connection.nwfilterLookupByName(name).UUIDString() for name in xml.FILTERS}
    for name, uuid in uuids.items():
        libvirt_filter = connection.nwfilterLookupByName(name)
        libvirt_filter.undefine()
        connection.nwfilterDefineXML(f"<filter name='{name}' chain='root'/>")
        own_uuid = connection.nwfilterLookupByName(name).UUIDString()
        real_libvirt.prepare()
        assert connection.nwfilterLookupByName(name).UUIDString() == own_uuid != uuid
        connection.nwfilterLookupByName(name).undefine()
    real_libvirt.prepare()
    assert {name: connection.nwfilterLookupByName(name).UUIDString() for name in xml.FILTERS} == uuids


def list_filter_messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if 'filter' in record.getMessage()]


@pytest.mark.slow
def test_guest_has_no_filters_without_ebtables(
    real_libvirt: Libvirt,
    spec: GuestSpec,
    connection: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr('ecomp.virt.libvirt_host.get_search_path', lambda: '/nowhere')
    real_libvirt.prepare()
    build(real_libvirt, replace(spec, reserved_addresses=('10.77.0.50',)))
    assert list_filter_messages(caplog) == [str(explain_no_filters('ebtables is not installed'))]
    assert 'filterref' not in connection.lookupByUUIDString(spec.instance).XMLDesc()


@pytest.mark.slow
def test_guest_has_no_filters_if_libvirtd_lacks_the_driver(
    host: LibvirtHost, real_libvirt: Libvirt, spec: GuestSpec, caplog: pytest.LogCaptureFixture
) -> None:
    drivers = host.root / 'drivers'
    shutil.copytree(DRIVER_DIRECTORY, drivers, ignore=shutil.ignore_patterns('*nwfilter*'))
    host.kill_libvirtd()
    start = f'mount --bind {drivers} {DRIVER_DIRECTORY}; libvirtd -d --pid-file {host.root}/libvirtd.pid'
    host.run_inside(['unshare', '-m', 'sh', '-e', '-c', start])
    try:
        real_libvirt.prepare()
        build(real_libvirt, replace(spec, reserved_addresses=('10.77.0.50',)))
    finally:
        host.kill_libvirtd()
        host.start_libvirtd()
    why = 'this function is not supported by the connection driver: virNWFilterLookupByName'
    assert list_filter_messages(caplog) == [str(explain_no_filters(why))]
    new_connection = libvirt.open(host.uri)
    assert 'filterref' not in new_connection.lookupByUUIDString(spec.instance).XMLDesc()
    new_connection.close()
