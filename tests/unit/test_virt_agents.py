"""The guest agent's answer, which the guest controls."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt import xml
from ecomp.virt.domains import Agents, said
from tests.kit.servers import until

MAC = '52:54:00:00:00:01'
OTHER = '52:54:00:00:00:02'


def interface(mac: str | None, *addresses: str) -> dict[str, object]:
    return {'hwaddr': mac, 'addrs': [{'addr': address, 'prefix': 24, 'type': 0} for address in addresses] or None}


def test_the_first_address_others_could_reach() -> None:
    answer = {
        'lo': interface('00:00:00:00:00:00', '127.0.0.1'),
        'eth0': interface(MAC.upper(), 'fe80::1', '169.254.3.4', '10.0.0.5', '10.0.0.6'),
        'eth0.5': interface(MAC, '10.5.0.5'),
        'eth1': interface(OTHER),
        'tap0': interface(None, '10.9.0.1'),
    }
    assert said(answer, [MAC, OTHER]) == {MAC: '10.0.0.5'}
    assert said(answer, [OTHER]) == {}
    assert said({}, [MAC]) == {}
    for text in ('', '0.0.0.0', '127.0.0.1', '169.254.1.1', '224.0.0.1', '255.255.255.255', '1', 'x'):
        assert said({'eth0': interface(MAC, text)}, [MAC]) == {}, text


@pytest.mark.parametrize(('target', 'there'), [
    ("type='virtio' name='org.qemu.guest_agent.0' state='connected'", True),
    ("type='virtio' name='org.qemu.guest_agent.0' state='disconnected'", False),
    ("type='virtio' name='org.qemu.guest_agent.0'", False),
    ("type='virtio' name='com.redhat.spice.0' state='connected'", False),
])
def test_who_has_an_agent(target: str, there: bool) -> None:
    channel = f"<channel type='unix'><target {target}/></channel>"
    assert xml.has_agent(f'<domain><devices>{channel}</devices></domain>') is there


def test_a_thread_that_cannot_be_started_is_started_for_a_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    agents = Agents('test:///default')
    monkeypatch.setattr(Agents, '_ask', lambda *_: {'eth0': interface(MAC, '10.0.0.5')})
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, 'start', refuse_start)
        assert agents.addresses('one', [MAC]) == {}
    until(lambda: agents.addresses('one', [MAC]) == {MAC: '10.0.0.5'}, 20, 'it was asked')
    agents.close()
