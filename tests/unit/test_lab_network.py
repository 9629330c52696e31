"""A lab's names and addresses, and the choice of a network nobody has."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.errors import EcompError, UsageError
from ecomp.lab.network import (
    CONTROL,
    DNSMASQ,
    MOST_HOSTS,
    SECOND_OCTETS,
    Layout,
    check_name,
    choose_network,
    host_names,
    network_xml,
    routed_networks,
    share,
)
from ecomp.model.guest import METADATA_ADDRESS

UUID = '8f14e45f-ceea-567f-a2b1-6d2b3c4d5e6f'


def test_everything_follows_from_the_name_and_the_network() -> None:
    layout = Layout('lab', IPv4Network('10.200.0.0/16'))

    assert layout.link == 'elab200'
    assert layout.namespace('hv2') == 'elab-lab-hv2'
    assert layout.machine == IPv4Address('10.200.0.1')
    assert layout.etcd == '10.200.0.2:2379'
    assert layout.placement == 'https://10.200.0.2:8080'
    assert layout.images == 'http://10.200.0.2/'
    assert layout.address('hv2') == IPv4Address('10.200.0.12')
    assert layout.guests('hv2') == IPv4Network('10.200.2.0/24')
    assert layout.mac(CONTROL) == '02:e1:ab:c8:00:00'
    assert layout.mac('hv2') == '02:e1:ab:c8:00:02'


@pytest.mark.parametrize('number', [min(SECOND_OCTETS), 200, max(SECOND_OCTETS)])
def test_nothing_of_a_full_lab_overlaps_and_names_fit_the_kernel(number: int) -> None:
    layout = Layout('x' * 32, IPv4Network(f'10.{number}.0.0/16'))
    hosts = host_names(MOST_HOSTS)

    networks = [layout.lan, *map(layout.guests, hosts)]
    assert len(set(networks)) == len(networks)
    assert all(network.subnet_of(layout.network) for network in networks)
    # The LAN's DHCP gives out .100 to .250.
    taken = [layout.machine, layout.control, *map(layout.address, hosts)]
    assert len(set(taken)) == len(taken)
    assert all(address in layout.lan and int(address) & 255 < 100 for address in taken)
    assert all(len(name) <= 15 for name in (layout.link, *hosts))
    assert len(layout.namespace(hosts[-1])) <= 255


@pytest.mark.parametrize('name', ['lab', 'a', '0', 'a-b', 'x' * 32])
def test_names_of_labs(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize('name', ['', '-a', 'a-', 'A', 'a/b', '..', 'a b', 'a.b', 'ä', 'x' * 33, 'a\n'])
def test_what_is_no_name_of_a_lab(name: str) -> None:
    with pytest.raises(UsageError, match='a lab is named'):
        check_name(name)


def test_the_first_free_network_is_chosen() -> None:
    taken = [IPv4Network('10.200.0.0/16'), IPv4Network('10.201.7.0/24'), IPv4Network('192.168.0.0/16')]

    assert choose_network([]) == IPv4Network('10.200.0.0/16')
    assert choose_network(taken) == IPv4Network('10.202.0.0/16')


@given(st.sets(st.sampled_from(SECOND_OCTETS), max_size=len(SECOND_OCTETS) - 1))
def test_a_chosen_network_is_nobodys(numbers: set[int]) -> None:
    taken = [IPv4Network(f'10.{number}.3.0/24') for number in numbers]

    chosen = choose_network(taken)

    assert not any(chosen.overlaps(other) for other in taken)


def test_a_machine_that_routes_all_there_is_has_no_room_for_a_lab() -> None:
    with pytest.raises(EcompError, match='no free network'):
        choose_network([IPv4Network(f'10.{number}.0.0/16') for number in SECOND_OCTETS])


def test_a_vpn_to_everywhere_leaves_room_for_a_lab() -> None:
    wide = ('0.0.0.0/1', '128.0.0.0/1', '8.0.0.0/5', '10.0.0.0/8', '10.200.0.0/15', '10.202.9.0/24')
    routes: list[dict[str, object]] = [{'dst': each, 'dev': 'tun0'} for each in wide]

    assert choose_network(routed_networks(routes)) == IPv4Network('10.203.0.0/16')


def test_routes_as_iproute2_writes_them() -> None:
    routes: list[dict[str, object]] = [
        {'dst': 'default', 'gateway': '192.0.2.1', 'dev': 'eth0'},
        {'dst': '0.0.0.0/0', 'dev': 'tun0'},
        {'dst': '10.8.0.0/24', 'dev': 'tun0'},
        {'type': 'local', 'dst': '10.9.0.1', 'dev': 'eth1'},
    ]

    assert routed_networks(routes) == [IPv4Network('10.8.0.0/24'), IPv4Network('10.9.0.1/32')]


def test_the_network_of_a_host_is_open_and_carries_the_metadata_address() -> None:
    root = ET.fromstring(network_xml(IPv4Network('10.200.3.0/24'), UUID))

    assert [(child.tag, child.text, child.attrib) for child in root] == [
        ('name', 'default', {}),
        ('uuid', UUID, {}),
        ('forward', None, {'mode': 'open'}),
        ('bridge', None, {'name': 'virbr0', 'stp': 'off', 'delay': '0'}),
        ('dns', None, {'enable': 'no'}),
        ('ip', None, {'address': '10.200.3.1', 'netmask': '255.255.255.0'}),
        ('ip', None, {'address': METADATA_ADDRESS, 'netmask': '255.255.255.255'}),
        (f'{{{DNSMASQ}}}options', None, {}),
    ]
    assert [each.attrib for each in root.iter(f'{{{DNSMASQ}}}option')] == [{'value': 'dhcp-ignore=tag:!known'}]
    ranges = root.findall('ip/dhcp/range')
    assert [each.attrib for each in ranges] == [{'start': '10.200.3.2', 'end': '10.200.3.254'}]


def test_a_host_gets_its_share_and_never_nothing() -> None:
    assert share(16, 65536, 300, 2) == {'VCPU': 8, 'MEMORY_MB': 32768, 'DISK_GB': 150}
    assert share(2, 2048, 5, 8) == {'VCPU': 4, 'MEMORY_MB': 512, 'DISK_GB': 1}
