"""The choice among the DHCP leases of a libvirt network."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.model.guest import Address
from ecomp.virt.networks import pick_newest_leases
from ecomp.virt.xml import read_dhcp

RANGE = "<network><ip address='10.0.0.1'><dhcp><range start='10.0.0.2' end='10.0.0.9'/></dhcp></ip></network>"
NETWORK = read_dhcp(RANGE)
MAC = '52:54:00:00:00:01'
OTHER = '52:54:00:00:00:02'


def make_lease(mac: str | None, address: str, expiry: int, kind: int = 0) -> dict[str, object]:
    return {'mac': mac, 'ipaddr': address, 'expirytime': expiry, 'type': kind}


def test_newest_lease_of_each_mac() -> None:
    leases = [
        make_lease(MAC, '10.0.0.2', 200),
        make_lease(MAC, '10.0.0.1', 100),
        make_lease(MAC, 'fd00::1', 900, kind=1),
        make_lease(None, 'fd00::2', 900, kind=1),
        make_lease(OTHER.upper(), '10.0.0.3', 50),
        make_lease('52:54:00:00:00:99', '10.0.0.4', 999),
    ]
    addresses = pick_newest_leases(leases, [MAC, OTHER], NETWORK)
    assert {mac: (address.address, address.source) for mac, address in addresses.items()} == {
        MAC: ('10.0.0.2', 'lease'),
        OTHER: ('10.0.0.3', 'lease'),
    }
    assert pick_newest_leases(leases, [], NETWORK) == {}
    assert pick_newest_leases([], [MAC], NETWORK) == {}


@pytest.mark.parametrize(
    ('lasts', 'since'),
    [
        ('', '2026-01-31T11:00:00.000Z'),
        ('<lease expiry="2" unit="hours"/>', '2026-01-31T10:00:00.000Z'),
        ('<lease expiry="10"/>', '2026-01-31T11:50:00.000Z'),
        ('<lease expiry="90" unit="seconds"/>', '2026-01-31T11:58:30.000Z'),
        ('<lease expiry="0"/>', ''),
        ('<lease expiry="999999999" unit="hours"/>', ''),
    ],
)
def test_start_time_of_a_lease(lasts: str, since: str) -> None:
    noon = int(datetime(2026, 1, 31, 12, tzinfo=UTC).timestamp())
    network = read_dhcp(RANGE.replace('/></dhcp>', f'>{lasts}</range></dhcp>'))
    assert pick_newest_leases([make_lease(MAC, '10.0.0.2', noon)], [MAC], network) == {
        MAC: Address('10.0.0.2', 'lease', since)
    }
    # An address outside every range has a static lease of unknown duration.
    assert pick_newest_leases([make_lease(MAC, '10.0.9.2', noon)], [MAC], network)[MAC].since == ''
