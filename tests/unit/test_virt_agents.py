"""The guest agent's answer, which the guest controls."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt.domains import GuestAgents, pick_addresses
from tests.kit.servers import wait_until

MAC = '52:54:00:00:00:01'
OTHER = '52:54:00:00:00:02'


def make_interface(mac: str | None, *addresses: str) -> dict[str, object]:
    return {'hwaddr': mac, 'addrs': [{'addr': address, 'prefix': 24, 'type': 0} for address in addresses] or None}


def test_first_reachable_address_is_used() -> None:
    answer = {
        'lo': make_interface('00:00:00:00:00:00', '127.0.0.1'),
        'eth0': make_interface(MAC.upper(), 'fe80::1', '169.254.3.4', '10.0.0.5', '10.0.0.6'),
        'eth0.5': make_interface(MAC, '10.5.0.5'),
        'eth1': make_interface(OTHER),
        'tap0': make_interface(None, '10.9.0.1'),
    }
    assert pick_addresses(answer, [MAC, OTHER]) == {MAC: '10.0.0.5'}
    assert pick_addresses(answer, [OTHER]) == {}
    assert pick_addresses({}, [MAC]) == {}
    for text in ('', '0.0.0.0', '127.0.0.1', '169.254.1.1', '224.0.0.1', '255.255.255.255', '1', 'x'):
        assert pick_addresses({'eth0': make_interface(MAC, text)}, [MAC]) == {}, text


def test_failed_thread_start_is_retried_by_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    agents = GuestAgents('test:///default')
    monkeypatch.setattr(GuestAgents, '_query', lambda *_: {'eth0': make_interface(MAC, '10.0.0.5')})
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, 'start', refuse_start)
        assert agents.query_addresses('one', [MAC]) == {}
    wait_until(lambda: agents.query_addresses('one', [MAC]) == {MAC: '10.0.0.5'}, 20, 'it was asked')
    agents.close()
