"""Address to guest: leases, neighbours and guest files, rubbish among them."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mdserver import conf, files, guests
from mdserver.files import Files
from mdserver.guests import Broken, Forged, Guest, Lease, Unknown, current, parse_guest, parse_leases

UUID = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
A, B = '52:54:00:aa:00:01', '52:54:00:bb:00:02'
IP, IP2 = '192.168.122.7', '192.168.122.8'
NOW = 1_000_000.0
NEVER = float('inf')
ARP = 'IP address       HW type     Flags       HW address            Mask     Device\n'
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(
        ['ip-address', 'mac-address', 'expiry-time', 'instance', 'hostname', 'public_keys', 'user_data']), inner),
)


def entry(address: object = IP, mac: object = A, expiry: object = 1_000_100, **more: object) -> dict[str, object]:
    return {'ip-address': address, 'mac-address': mac, 'expiry-time': expiry, **more}


def arp(*entries: tuple[str, str, str], device: str = 'virbr0') -> str:
    return ARP + ''.join(f'{ip:16} 0x1    {flags}    {mac}     *        {device}\n' for ip, mac, flags in entries)


@pytest.mark.parametrize(('leases', 'expected'), [
    ([], {}),
    ([Lease(IP, A, NOW + 1)], {IP: A}),
    ([Lease(IP, A, NOW)], {}),
    ([Lease(IP, A, NEVER)], {IP: A}),
    ([Lease(IP, A, NOW + 1), Lease(IP2, B, NOW + 1)], {IP: A, IP2: B}),
    ([Lease(IP, B, NOW + 9), Lease(IP, A, NOW + 1)], {IP: B}),
    ([Lease(IP, A, NOW + 1), Lease(IP, B, NOW + 1)], {IP: B}),
    ([Lease(IP, A, NOW + 1), Lease(IP2, A, NOW + 9)], {IP2: A}),
    ([Lease(IP, A, NOW - 1), Lease(IP, B, NOW + 9)], {IP: B}),
    # A moved to IP2 and B took IP, then A's old entry lost both ways.
    ([Lease(IP, A, NOW + 1), Lease(IP2, A, NOW + 2), Lease(IP, B, NOW + 3)], {IP2: A, IP: B}),
])
def test_which_leases_count(leases: list[Lease], expected: dict[str, str]) -> None:
    assert {address: lease.mac for address, lease in current(leases, NOW).items()} == expected


@pytest.mark.parametrize(('entries', 'leases'), [
    ([entry(hostname='web1', **{'client-id': '01:52:54:00'}), entry(IP2, B.upper(), 0)],
     [Lease(IP, A, 1_000_100, 'br0'), Lease(IP2, B, NEVER, 'br0')]),
    ([], []),
    # A senseless entry spoils no other.
    *(([bad, entry()], [Lease(IP, A, 1_000_100, 'br0')]) for bad in (
        None, 7, 'text', [], {}, entry(address=None), entry('fe80::1'), entry('192.168.122.300'),
        entry('0192.168.122.7'), entry(mac='../../etc/passwd'), entry(mac=A + '\n'), entry(mac=['x']),
        entry(expiry='soon'), entry(expiry=True), entry(expiry=None), entry(expiry=1.5),
    )),
])
def test_leases_as_libvirt_writes_them(entries: list[object], leases: list[Lease]) -> None:
    assert parse_leases(json.dumps(entries).encode(), 'br0') == leases


@pytest.mark.parametrize('data', [b'', b'  \n'])
def test_no_leases_yet(data: bytes) -> None:
    assert parse_leases(data) == []


@pytest.mark.parametrize('data', [
    b'{', b'[{"ip-address": "192.168', b'{}', b'7', b'\xff\xfe', b'[' * 100_000, b'1' * 9999,
])
def test_half_written(data: bytes) -> None:
    with pytest.raises(ValueError, match='is not'):
        parse_leases(data)


@given(st.lists(json_values))
def test_rubbish_leases(rubbish: list[Any]) -> None:
    assert all(isinstance(lease, Lease) for lease in parse_leases(json.dumps(rubbish).encode()))


@given(st.binary() | json_values.map(lambda value: json.dumps(value).encode()))
def test_rubbish_files(data: bytes) -> None:
    for parse in (parse_leases, lambda text: parse_guest(text, A)):
        with contextlib.suppress(ValueError):
            parse(data)


@given(st.text())
def test_rubbish_neighbours(text: str) -> None:
    guests.parse_neighbours(text, 'virbr0')


def test_neighbours() -> None:
    text = arp((IP, A, '0x2'), (IP, B.upper(), '0x6'), (IP2, '00:00:00:00:00:00', '0x0')) + 'short\n'
    assert guests.parse_neighbours(text + arp((IP2, A, '0x2'), device='br0'), 'virbr0') == {IP: frozenset({A, B})}


def test_a_guest_file() -> None:
    record = {'version': 1, 'instance': UUID, 'mac': A, 'hostname': 'web1', 'public_keys': ['ssh-rsa A\n', ' '],
              'user_data': '#!/bin/sh\necho \udc8bü', 'network_config': {'version': 2}, 'new': 1}
    expected = Guest(UUID, 'web1', (('default', 'ssh-rsa A'),), b'#!/bin/sh\necho \x8b\xc3\xbc', {'version': 2})
    assert parse_guest(json.dumps(record).encode(), A) == expected


def test_a_guest_file_that_leaves_much_to_the_defaults() -> None:
    record = {'instance': UUID, 'public_keys': None, 'user_data': None}
    assert parse_guest(json.dumps(record).encode(), A) == Guest(UUID, UUID, None, None)


@pytest.mark.parametrize('change', [
    {'version': 2}, {'version': '1'}, {'mac': B}, {'instance': None}, {'instance': 'web1'}, {'instance': UUID.upper()},
    {'hostname': ''}, {'hostname': 'a\nb'}, {'hostname': 7}, {'public_keys': 'ssh-rsa A'}, {'public_keys': [7]},
    {'public_keys': ['a\nb']}, {'user_data': ['x']}, {'user_data': '\ud800'},
    {'network_config': 'version: 2'}, {'network_config': [2]},
])
def test_a_guest_file_that_cannot_be_used(change: dict[str, object]) -> None:
    record = {'version': 1, 'instance': UUID, 'mac': A, 'hostname': 'web1', 'public_keys': None, 'user_data': None}
    with pytest.raises(ValueError, match=r'\S'):
        parse_guest(json.dumps(record | change).encode(), A)


class Host:
    """A host's files in a directory of the test's."""

    def __init__(self, root: Path) -> None:
        self.guests, self.arp, self.status = root / 'metadata', root / 'arp', root / 'virbr0.status'
        self.guests.mkdir()
        self.file = self.guests / f'{A}.json'
        self.file.write_text(json.dumps({'instance': UUID, 'hostname': 'web1'}))
        self.arp.write_text(arp((IP, A, '0x2')))
        self.status.write_text(json.dumps([entry()]))

    def find(self, address: str = IP, now: float = NOW) -> Guest:
        found = Files(conf.Config(leases=str(self.status.parent / '*.status'), neighbours=self.arp, guests=self.guests))
        return found.guest(found.leased_to(address, now))


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_found_though_another_status_file_is_broken(host: Host) -> None:
    (host.status.parent / 'a.status').write_text('{')
    assert host.find().instance == UUID


@pytest.mark.parametrize('text', [
    arp((IP, A, '0x2')), ARP, '', arp((IP, A, '0x2'), (IP2, B, '0x2')), arp((IP, B, '0x0')),
])
def test_neighbours_that_do_not_contradict(host: Host, text: str) -> None:
    host.arp.write_text(text)
    assert host.find() == Guest(UUID, 'web1', None, None)


def test_who_has_its_address_elsewhere_is_not_asked(host: Host) -> None:
    """One ARP packet from the LAN kept a guest from what it is told."""
    host.arp.write_text(arp((IP, A, '0x2')) + arp((IP, B, '0x2'), device='eth0'))
    assert host.find().instance == UUID


@pytest.mark.parametrize('text', [arp((IP, B, '0x2')), arp((IP, A, '0x2'), (IP, B, '0x2'))])
def test_another_machine_with_its_address(host: Host, text: str) -> None:
    host.arp.write_text(text)
    with pytest.raises(Forged, match='leased to another machine') as caught:
        host.find()
    assert A not in str(caught.value)
    assert A in caught.value.detail
    assert B in caught.value.detail


def reserve(host: Host, *lines: str, network: str = 'default', bridge: str = 'virbr0') -> None:
    """Write what libvirt writes for the dnsmasq of a network."""
    (host.status.parent / f'{network}.conf').write_text(f'strict-order\ninterface={bridge}\ndhcp-no-override\n')
    (host.status.parent / f'{network}.hostsfile').write_text('\n'.join(lines))


LOST = [[], [entry(expiry=999_999)], [entry(IP2, B)], [entry(IP2, A)]]
"""Leases after dnsmasq has dropped that of A, as it does when B sends the same client identifier."""


@pytest.mark.parametrize('leases', LOST)
def test_a_reservation_proves_whose_its_address_is_without_a_lease(host: Host, leases: list[object]) -> None:
    host.status.write_text(json.dumps(leases))
    reserve(host, f'{A},{IP},{UUID}', f'{B},{IP2},{UUID},3600', 'id:00:01,web6,[fd00::5]', 'rubbish', f'{A.upper()},no')
    assert host.find().instance == UUID
    config = conf.Config(leases=str(host.status.parent / '*.status'), neighbours=host.arp, guests=host.guests)
    assert Files(config).has_lease(IP2, NOW)


@pytest.mark.parametrize(('text', 'error'), [
    (arp((IP, B, '0x2')), Forged), (arp((IP, A, '0x2'), (IP, B, '0x2')), Forged),
    (ARP, Unknown), (arp((IP, A, '0x0')), Unknown), (arp((IP, A, '0x2'), device='br-lan'), Unknown),
])
def test_a_reservation_without_a_lease_is_for_the_machine_that_the_kernel_sees(
    host: Host, text: str, error: type[Unknown]
) -> None:
    host.status.write_text('[]')
    reserve(host, f'{A},{IP},{UUID}')
    host.arp.write_text(text)
    with pytest.raises(Unknown) as caught:
        host.find()
    assert type(caught.value) is error


def test_a_reservation_on_a_network_that_is_off_takes_no_lease_away(host: Host) -> None:
    """Two networks may have the same addresses, if one of them is off."""
    reserve(host, f'{B},{IP},{UUID}', network='old', bridge='virbr9')
    assert host.find().instance == UUID
    host.status.write_text('[]')
    with pytest.raises(Unknown):
        host.find()


def test_no_lease(host: Host) -> None:
    with pytest.raises(Unknown, match=f'no current DHCP lease for {IP2}$'):
        host.find(IP2)
    with pytest.raises(Unknown, match='no current DHCP lease'):
        host.find(now=NOW + 1000)
    host.status.unlink()
    with pytest.raises(Unknown, match='no current DHCP lease'):
        host.find()


def test_no_lease_because_its_file_is_half_written(host: Host) -> None:
    host.status.write_text('[{')
    with pytest.raises(Unknown, match='no current DHCP lease') as caught:
        host.find()
    assert caught.value.detail == f'{host.status}: is not JSON'


def test_who_may_ask_is_read_once_a_second(host: Host) -> None:
    """750 connections a second of one machine, each of which had all leases read, held every guest up."""
    asked: list[str] = []
    config = conf.Config(leases=str(host.status.parent / '*.status'))
    found = Files(config, lambda what: asked.append(what) or files.carry_out(config, what))
    for _ in range(50):
        assert [found.has_lease(each, NOW + 0.9) for each in (IP, IP2, IP, '10.0.0.1')] == [True, False, True, False]
    assert asked == ['leases']
    # A guest that has just got its lease asks again; and a clock that was put back is no reason to wait for it.
    host.status.write_text(json.dumps([entry(), entry(IP2, B)]))
    assert not found.has_lease(IP2, NOW + 1.8)
    assert found.has_lease(IP2, NOW + 1.9)
    host.status.write_text('[]')
    assert not found.has_lease(IP2, NOW - 3600)
    assert asked == ['leases'] * 3


def test_no_guest_file(host: Host) -> None:
    host.file.unlink()
    with pytest.raises(Unknown, match=f'no instance with the MAC address {A}'):
        host.find()


def test_what_a_guest_was_not_given_is_mdserver_confs(tmp_path: Path) -> None:
    (tmp_path / 'data').write_bytes(b'#!default')
    config = conf.Config(user_data=tmp_path / 'data', public_keys=(('ops', 'ssh-rsa O'),))
    network = {'version': 2}
    filled_in = Files(config).filled_in
    assert filled_in(Guest(UUID, 'web1', None, None, network), IP) == Guest(
        UUID, 'web1', (('ops', 'ssh-rsa O'),), b'#!default', network, IP
    )
    own = parse_guest(json.dumps({'instance': UUID, 'public_keys': ['A', 'B'], 'user_data': '#!mine'}).encode(), A)
    assert filled_in(own) == Guest(UUID, UUID, (('default', 'A'), ('key-1', 'B')), b'#!mine')
    assert filled_in(Guest(UUID, 'web1', (), b'')) == Guest(UUID, 'web1', (), b'')


def test_a_guest_file_that_is_none(host: Host) -> None:
    secret = host.guests / 'elsewhere'
    host.file.rename(secret)
    host.file.symlink_to(secret)
    with pytest.raises(Broken, match=r'aa:00:01\.json: Too many levels of symbolic links'):
        host.find()
    host.file.unlink()
    os.mkfifo(host.file)
    with pytest.raises(Broken, match='is not a regular file'):
        host.find()
    host.file.unlink()
    host.file.write_bytes(b' ' * (files.LIMIT + 1))
    with pytest.raises(Broken, match='is larger than'):
        host.find()
    host.file.write_text('{"instance"')
    with pytest.raises(Broken, match='is not JSON'):
        host.find()
