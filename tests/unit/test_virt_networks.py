"""A libvirt network's DHCP, the choice among its leases, its closing, and guest agents."""

from __future__ import annotations

import os
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.agent import checking  # noqa: E402
from ecomp.agent.host.state import Identity  # noqa: E402
from ecomp.compute_conf import ComputeConfig  # noqa: E402
from ecomp.errors import Conflict  # noqa: E402
from ecomp.model.guest import Address, Attachment  # noqa: E402
from ecomp.virt import domains  # noqa: E402
from ecomp.virt.connection import Connection  # noqa: E402
from ecomp.virt.domains import Domains, pick_addresses  # noqa: E402
from ecomp.virt.networks import Networks, pick_newest_leases  # noqa: E402
from ecomp.virt.xml import close_dhcp, parse_dhcp  # noqa: E402
from tests.kit.servers import wait_until  # noqa: E402

RANGE = "<network><ip address='10.0.0.1'><dhcp><range start='10.0.0.2' end='10.0.0.9'/></dhcp></ip></network>"
NETWORK = parse_dhcp(RANGE)
MAC = '52:54:00:00:00:01'
OTHER = '52:54:00:00:00:02'


def make_lease(mac: str | None, address: str, expiry: int, kind: int = 0) -> dict[str, object]:
    return {'mac': mac, 'ipaddr': address, 'expirytime': expiry, 'type': kind}


def test_newest_lease_of_each_mac() -> None:
    leases = [
        make_lease(MAC, '10.0.0.2', 200), make_lease(MAC, '10.0.0.1', 100), make_lease(MAC, 'fd00::1', 900, kind=1),
        make_lease(None, 'fd00::2', 900, kind=1), make_lease(OTHER.upper(), '10.0.0.3', 50),
        make_lease('52:54:00:00:00:99', '10.0.0.4', 999),
    ]  # fmt: skip
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
    network = parse_dhcp(RANGE.replace('/></dhcp>', f'>{lasts}</range></dhcp>'))
    assert pick_newest_leases([make_lease(MAC, '10.0.0.2', noon)], [MAC], network) == {
        MAC: Address('10.0.0.2', 'lease', since)
    }
    # An address outside every range has a static lease of unknown duration.
    assert pick_newest_leases([make_lease(MAC, '10.0.9.2', noon)], [MAC], network)[MAC].since == ''


# Closing the DHCP of a network, on a libvirt whose network is in memory.


OPEN = (
    "<network><name>default</name><bridge name='virbr0'/><ip address='10.0.0.1' netmask='255.255.255.0'>"
    "<dhcp><range start='10.0.0.2' end='10.0.0.9'/><host mac='52:54:00:00:00:01' name='a' ip='10.0.0.2'/></dhcp></ip>"
    '</network>'
)
CLOSED = close_dhcp(OPEN)
LIVE_DOMAIN = (
    "<domain><devices><interface type='network'><mac address='52:54:00:00:00:01'/>"
    "<source network='default' bridge='{}'/><target dev='vnet0'/></interface></devices></domain>"
)


class MemoryDomain:
    def __init__(self, bridge: str) -> None:
        self._bridge = bridge

    def name(self) -> str:
        return 'web1'

    def XMLDesc(self) -> str:  # noqa: N802
        return LIVE_DOMAIN.format(self._bridge)


class MemoryLibvirt:
    """A connection to libvirt and its one network, with what was done to it in `changes`."""

    def __init__(self, live: str | None, config: str | None, bridges: Sequence[str] = ()) -> None:
        self.live, self.config = live, config
        self.domains = [MemoryDomain(bridge) for bridge in bridges]
        self.changes: list[str] = []

    @contextmanager
    def use(self, _: str) -> Iterator[MemoryLibvirt]:
        yield self

    def networkLookupByName(self, name: str) -> MemoryLibvirt:  # noqa: N802
        assert name == 'default'
        return self

    def networkDefineXML(self, definition: str) -> None:  # noqa: N802
        self.config = definition
        self.changes.append('define')

    def listAllDomains(self, flags: int) -> list[MemoryDomain]:  # noqa: N802
        assert flags == libvirt.VIR_CONNECT_LIST_DOMAINS_ACTIVE
        return self.domains

    def isActive(self) -> bool:  # noqa: N802
        return self.live is not None

    def isPersistent(self) -> bool:  # noqa: N802
        return self.config is not None

    def bridgeName(self) -> str:  # noqa: N802
        return 'virbr0'

    def XMLDesc(self, flags: int = 0) -> str | None:  # noqa: N802
        return self.config if flags == libvirt.VIR_NETWORK_XML_INACTIVE or self.live is None else self.live

    def destroy(self) -> None:
        self.live = None
        self.changes.append('destroy')

    def create(self) -> None:
        self.live = self.config
        self.changes.append('create')


@pytest.fixture
def ports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr('ecomp.virt.networks.INTERFACES_DIRECTORY', tmp_path)
    (tmp_path / 'virbr0/brif').mkdir(parents=True)
    return tmp_path / 'virbr0/brif'


def close_network(memory: MemoryLibvirt) -> str:
    networks = Networks(cast('Connection', memory))
    found = networks.find_open_dhcp('default')
    return networks.close_dhcp('default', found) if found else ''


RESTARTED = 'network default: its DHCP now serves only MACs with a reservation; the network was restarted'


@pytest.mark.usefixtures('ports')
@pytest.mark.parametrize(
    ('live', 'config', 'changes', 'done'),
    [
        (OPEN, OPEN, ['define', 'destroy', 'create'], RESTARTED),
        (OPEN, CLOSED, ['destroy', 'create'], RESTARTED),  # edited without a restart
        (CLOSED, OPEN, ['define'], RESTARTED.partition(';')[0]),
        (None, OPEN, ['define'], RESTARTED.partition(';')[0]),
        (CLOSED, CLOSED, [], ''),
        (None, CLOSED, [], ''),
    ],
)
def test_dhcp_is_closed_once(live: str | None, config: str, changes: list[str], done: str) -> None:
    memory = MemoryLibvirt(live, config)
    assert close_network(memory) == done
    assert memory.changes == changes
    assert memory.isActive() == (live is not None)
    assert close_network(memory) == ''
    assert memory.changes == changes, 'it is idempotent'


def test_network_without_dhcp_and_foreign_bridge_are_not_open() -> None:
    for text in ('<network/>', OPEN.replace('<bridge', "<forward mode='bridge'/><bridge")):
        assert close_network(MemoryLibvirt(text, text)) == ''


def test_closed_network_keeps_its_other_options_and_reservations() -> None:
    namespace = "xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'"
    option = "<dnsmasq:options><dnsmasq:option value='log-dhcp'/></dnsmasq:options>"
    text = OPEN.replace('<network>', f'<network {namespace}>').replace('</network>', f'{option}</network>')
    closed = close_dhcp(text)
    assert parse_dhcp(closed) == replace(parse_dhcp(text), reserved_only=True)
    assert [each.get('value') for each in ET.fromstring(closed).iter() if each.tag.endswith('}option')] == [
        'log-dhcp',
        'dhcp-ignore=tag:!known',
    ]


@pytest.mark.parametrize(
    ('bridges', 'interfaces', 'users'),
    [
        (['virbr0'], ['vnet0'], 'guest web1'),
        (['virbr0'], ['vnet0', 'veth5'], 'guest web1, veth5'),
        (['virbr0'], [], 'guest web1'),
        ([], ['veth5'], 'veth5'),
    ],
)
def test_network_in_use_is_not_restarted(
    ports: Path, bridges: Sequence[str], interfaces: Sequence[str], users: str
) -> None:
    for name in interfaces:
        (ports / name).touch()
    memory = MemoryLibvirt(OPEN, OPEN, bridges)
    with pytest.raises(Conflict) as caught:
        close_network(memory)
    assert str(caught.value) == (
        f'network default is unchanged: it connects {users}, which a restart would cut off. '
        'Fix: shut them down, and repeat the command'
    )
    assert memory.changes == []
    memory.live = CLOSED  # no restart is necessary, so nobody is disconnected
    assert close_network(memory) == RESTARTED.partition(';')[0]


@pytest.mark.usefixtures('ports')
def test_guest_on_another_network_does_not_matter() -> None:
    assert close_network(MemoryLibvirt(OPEN, OPEN, ['virbr1'])) == RESTARTED


@pytest.mark.usefixtures('ports')
def test_transient_network_is_not_removed() -> None:
    memory = MemoryLibvirt(OPEN, None)
    with pytest.raises(Conflict, match=r'is transient, so a restart would remove it\. Fix: define it with virsh'):
        close_network(memory)
    assert memory.changes == []


@pytest.mark.usefixtures('ports')
def test_interrupted_restart_leaves_the_network_running(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MemoryLibvirt(OPEN, OPEN)

    def destroy() -> None:
        memory.live = None
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, 'destroy', destroy)
    with pytest.raises(KeyboardInterrupt):
        close_network(memory)
    assert not parse_dhcp(str(memory.live)).is_open


def test_closing_is_refused_while_ecompute_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.agent.host.state.LOCK_WAIT_SECONDS', 0)
    monkeypatch.setattr(Networks, 'find_open_dhcp', lambda *_: [0])
    monkeypatch.setattr(Networks, 'close_dhcp', lambda _, name, found: f'{name} {found}')
    config = ComputeConfig(state=tmp_path, networks=(Attachment('network', 'a'), Attachment('bridge', 'b')))
    with closing(Identity(tmp_path)), pytest.raises(Conflict) as caught:
        list(checking.close_dhcp(config))
    problem = f'state directory {tmp_path} is used by the ecompute with pid {os.getpid()}, which may start a guest'
    assert str(caught.value) == (
        f'{problem} while a network is restarted. Fix: systemctl stop ecompute, and repeat the command'
    )
    assert list(checking.close_dhcp(config)) == ['a [0]']


def test_nothing_to_do_needs_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Networks, 'find_open_dhcp', lambda *_: [])
    config = ComputeConfig(state=tmp_path / 'absent')
    expected = ['nothing to do: no network in `networks:` has DHCP that serves unknown MACs']
    assert list(checking.close_dhcp(config)) == expected
    assert not config.state.exists()


# The guest agent's answer, which the guest controls.


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

    agents = Domains(Connection('test:///default'))
    monkeypatch.setattr(domains, '_query_agent', lambda *_: {'eth0': make_interface(MAC, '10.0.0.5')})
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, 'start', refuse_start)
        assert agents.query_agent('one', [MAC]) == {}
    wait_until(lambda: agents.query_agent('one', [MAC]) == {MAC: '10.0.0.5'}, 20, 'it was asked')


def test_guest_that_ends_at_the_end_of_the_time_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    domain = SimpleNamespace(isActive=lambda: domain.is_active, destroy=lambda: fail_late(), is_active=True)

    def fail_late() -> None:
        domain.is_active = False  # it ended by itself while libvirt waited
        error = libvirt.libvirtError('late')
        error.err = (libvirt.VIR_ERR_OPERATION_INVALID, libvirt.VIR_FROM_QEMU, 'late', *[None] * 6)
        raise error

    monkeypatch.setattr(domains, 'DESTROY_TIMEOUT_SECONDS', 0.0)
    monkeypatch.setattr(domains, '_find_own_domain', lambda *_, **__: domain)
    connection: Any = SimpleNamespace(uri='test:///default', use=nullcontext)
    domains.Domains(connection).force_off('one', 'own', undefine=False)
    assert not domain.is_active
