"""Which of a network's leases counts."""

from __future__ import annotations

import pytest

pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt.networks import newest

MAC, OTHER = '52:54:00:00:00:01', '52:54:00:00:00:02'


def lease(mac: str | None, address: str, expiry: int, kind: int = 0) -> dict[str, object]:
    return {'mac': mac, 'ipaddr': address, 'expirytime': expiry, 'type': kind}


def test_the_newest_of_each_mac() -> None:
    leases = [
        lease(MAC, '10.0.0.2', 200),
        lease(MAC, '10.0.0.1', 100),
        lease(MAC, 'fd00::1', 900, kind=1),
        lease(None, 'fd00::2', 900, kind=1),
        lease(OTHER.upper(), '10.0.0.3', 50),
        lease('52:54:00:00:00:99', '10.0.0.4', 999),
    ]
    assert newest(leases, [MAC, OTHER]) == {MAC: '10.0.0.2', OTHER: '10.0.0.3'}
    assert newest(leases, []) == {}
    assert newest([], [MAC]) == {}
