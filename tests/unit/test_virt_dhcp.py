"""What a libvirt network's definition says of its DHCP, and which address is chosen in it."""

from __future__ import annotations

from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.virt.xml import Dhcp, Reservation, choose_address, host_xml, read_dhcp

NETWORK = """<network><name>default</name><forward mode='nat'/>
<ip address='10.0.0.1' netmask='255.255.255.0'><dhcp>
<range start='10.0.0.0' end='10.0.0.3'/><range start='10.0.0.254' end='10.0.0.255'/>
<host mac='52:54:00:AA:00:01' name='a' ip='10.0.0.2'/><host name='b' ip='10.0.0.9'/><host mac='52:54:00:aa:00:02'/>
</dhcp></ip>
<ip address='169.254.169.254' netmask='255.255.255.255'/>
<ip family='ipv6' address='fd00::1' prefix='64'><dhcp><range start='fd00::2' end='fd00::ff'/></dhcp></ip>
</network>"""
MAC = '52:54:00:00:00:01'
macs = st.integers(0, 2**24 - 1).map(lambda number: f'52:54:00:{number.to_bytes(3, "big").hex(":")}')


def addresses(*last: int) -> set[IPv4Address]:
    return {IPv4Address(f'10.0.0.{each}') for each in last}


def test_a_definition_is_read() -> None:
    found = read_dhcp(NETWORK)
    assert [(str(first), str(last)) for first, last in found.ranges] == [
        ('10.0.0.0', '10.0.0.3'),
        ('10.0.0.254', '10.0.0.255'),
    ]
    assert found.own == {*addresses(0, 1, 255), IPv4Address('169.254.169.254')}
    assert found.of('52:54:00:aa:00:01') == Reservation('52:54:00:aa:00:01', '10.0.0.2', 'a')
    assert found.of(MAC) is None
    assert found.served
    assert [last for last in range(256) if found.may_give(IPv4Address(f'10.0.0.{last}'))] == [2, 3, 254]


@pytest.mark.parametrize(
    ('forward', 'served'),
    [
        *(('', True), ('<forward/>', True), ("<forward mode='open'/>", True)),
        ("<forward mode='bridge'/><bridge name='br0'/>", False),
    ],
)
def test_a_bridge_of_somebody_else_s_is_not_served(forward: str, served: bool) -> None:
    assert read_dhcp(f'<network>{forward}</network>') == Dhcp((), frozenset(), (), served, ipv6=not served)


@pytest.mark.parametrize(
    ('definition', 'ipv6'),
    [(NETWORK, True), ("<network ipv6='yes'/>", True), ("<network ipv6='no'/>", False),
     ("<network><ip address='10.0.0.1' prefix='24'/></network>", False)],
)  # fmt: skip
def test_network_has_ipv6_where_libvirt_gives_it_an_address_or_allows_it(definition: str, ipv6: bool) -> None:
    assert read_dhcp(definition).ipv6 is ipv6


@pytest.mark.parametrize(
    ('inside', 'is_filterable'),
    [
        ("<portgroup name='a' default='yes'><virtualport type='openvswitch'/></portgroup>", False),
        ("<portgroup name='a'><virtualport type='openvswitch'/></portgroup>", True),
        ("<forward mode='hostdev' managed='yes'><pf dev='eth0'/></forward>", False),
        ("<forward mode='passthrough'><interface dev='eth0'/></forward>", False),
        ("<forward mode='bridge'/><bridge name='br0'/>", True),
        ("<forward mode='nat'/>", True),
    ],
)
def test_where_libvirt_can_filter(inside: str, is_filterable: bool) -> None:
    assert (read_dhcp(f'<network><name>a</name>{inside}</network>').unfit[0] == '') is is_filterable


@given(macs, st.sets(st.sampled_from([2, 3, 254])))
def test_one_that_is_free_is_chosen_and_always_the_same(mac: str, taken: set[int]) -> None:
    found = read_dhcp(NETWORK)
    chosen = choose_address(found, addresses(*taken), mac)
    assert chosen == choose_address(found, addresses(*taken), mac)
    if len(taken) == 3:
        assert chosen is None
    else:
        assert chosen in addresses(2, 3, 254) - addresses(*taken)
        first = choose_address(found, set(), mac)
        assert first in addresses(*taken) or chosen == first


def test_without_a_range_there_is_none() -> None:
    assert choose_address(read_dhcp('<network/>'), set(), MAC) is None


def test_a_wide_range_costs_no_more() -> None:
    wide = Dhcp(((IPv4Address('10.0.0.0'), IPv4Address('10.255.255.255')),), frozenset(), (), True)
    assert choose_address(wide, set(), MAC) is not None


def test_a_reservation_is_written_without_what_it_has_not() -> None:
    assert host_xml(Reservation(MAC, '10.0.0.2', '"x')) == f'<host mac="{MAC}" ip="10.0.0.2" name="&quot;x" />'
    assert host_xml(Reservation('', '10.0.0.2', 'b')) == '<host ip="10.0.0.2" name="b" />'
