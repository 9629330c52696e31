"""Addresses of real libvirt networks: what keeps those reserved, what they avoid, who gets any, how that is seen."""

from __future__ import annotations

import queue
import re
import subprocess
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from mdserver.conf import Config
from mdserver.files import Files
from mdserver.guests import Forged

from ecomp.errors import BuildFailed
from ecomp.model.audit import CODES
from ecomp.model.guest import DEFAULT_NETWORKS, Address, Attachment, GuestSpec, ReservedAddress, all_macs, mac_address
from tests.functional.guest import build
from tests.functional.libvirt_host import LibvirtHost
from tests.kit.servers import until

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt.connection import Connection  # noqa: E402
from ecomp.virt.libvirt_host import Libvirt  # noqa: E402
from ecomp.virt.networks import Networks  # noqa: E402

SMALL = """<network><name>small</name><forward mode='open'/><bridge name='virbr1' stp='off'/>
<ip address='10.78.0.1' netmask='255.255.255.0'><dhcp><range start='10.78.0.1' end='10.78.0.9'/></dhcp></ip>
</network>"""
ROOM = 8
"""How many guests have an address there: .1 is the host's."""
INACTIVE = libvirt.VIR_NETWORK_XML_INACTIVE
ADD, DELETE = libvirt.VIR_NETWORK_UPDATE_COMMAND_ADD_LAST, libvirt.VIR_NETWORK_UPDATE_COMMAND_DELETE
BOTH = libvirt.VIR_NETWORK_UPDATE_AFFECT_LIVE | libvirt.VIR_NETWORK_UPDATE_AFFECT_CONFIG
BRIDGED = (*DEFAULT_NETWORKS, Attachment('bridge', 'br0'))


@pytest.fixture
def small(host: LibvirtHost, real: Libvirt, connection: Any) -> Iterator[Any]:
    """A network with little room, as libvirt has it."""
    del host, real
    network = connection.networkDefineXML(SMALL)

    def created() -> bool:
        # libvirt does not wait for the dnsmasq of the test before to end.
        try:
            network.create()
        except libvirt.libvirtError as error:
            if 'Address already in use' not in str(error):
                raise
            return False
        return True

    until(created, 5, 'the dnsmasq of the network before has ended')
    yield network
    if network.isActive():
        network.destroy()
    network.undefine()


def take(real: Libvirt, instance: str, wanted: str | None = None) -> str | None:
    return real.reserve(instance, mac_address(instance, 0), 'small', wanted)


def hosts(network: Any, flags: int = 0) -> dict[str, tuple[str, str]]:
    found = ET.fromstring(network.XMLDesc(flags)).iterfind('ip/dhcp/host')
    return {each.get('mac', ''): (each.get('ip', ''), each.get('name', '')) for each in found}


def plant(network: Any, command: int, text: str, flags: int) -> None:
    network.update(command, libvirt.VIR_NETWORK_SECTION_IP_DHCP_HOST, -1, text, flags)


def test_it_is_in_the_running_network_and_in_its_definition(real: Libvirt, small: Any) -> None:
    instance = str(uuid4())
    address = take(real, instance)
    wanted = {mac_address(instance, 0): (address, instance)}
    assert hosts(small) == hosts(small, INACTIVE) == wanted
    small.destroy()
    assert take(real, instance) == address
    small.create()
    assert hosts(small) == wanted
    real.release(instance)
    assert hosts(small) == hosts(small, INACTIVE) == {}


def test_a_name_that_somebody_gave_another_mac(real: Libvirt, small: Any) -> None:
    instance, other = str(uuid4()), '52:54:00:99:00:01'
    address = take(real, instance)
    host = "<host mac='{}' ip='{}' name='{}'/>"
    plant(small, DELETE, host.format(mac_address(instance, 0), address, instance), BOTH)
    plant(small, ADD, host.format(other, address, instance), BOTH)
    with pytest.raises(BuildFailed) as caught:
        take(real, instance)
    assert caught.value.stage == 'scheduled'
    for said in ('network small', other, mac_address(instance, 0), 'virsh net-update small delete'):
        assert said in caught.value.reason
    assert hosts(small) == {other: (address, instance)}


def test_many_at_once_get_each_their_own_until_the_range_is_full(host: LibvirtHost, real: Libvirt, small: Any) -> None:
    instances = [str(uuid4()) for _ in range(ROOM)]
    with ExitStack() as undo:
        # Each a connection of its own, as other processes have.
        others = [Libvirt(host.root / 'state', uri=host.uri) for _ in range(4)]
        for each in others:
            undo.callback(each.close)
        with ThreadPoolExecutor(ROOM) as threads:
            taken = list(threads.map(lambda pair: take(others[pair[0] % 4], pair[1]), enumerate(instances)))
    assert sorted(map(str, taken)) == [f'10.78.0.{last}' for last in range(2, 10)]
    with pytest.raises(BuildFailed, match=r'scheduled: network small has no free address: 10.78.0.1 to 10.78.0.9 are'):
        take(real, str(uuid4()))
    real.release(instances[0])
    assert take(real, str(uuid4())) == taken[0]
    assert set(hosts(small)) == set(hosts(small, INACTIVE))


def test_half_a_reservation_is_made_whole_and_removed(real: Libvirt, small: Any) -> None:
    """What is only in the running network, or only in the definition, or another in each."""
    for live, config in (('10.78.0.5', None), (None, '10.78.0.5'), ('10.78.0.5', '10.78.0.6')):
        instance = str(uuid4())
        mac = mac_address(instance, 0)
        for address, flag in ((live, libvirt.VIR_NETWORK_UPDATE_AFFECT_LIVE), (config, 2)):
            if address:
                text = f"<host mac='{mac}' ip='{address}' name='{instance}'/>"
                plant(small, ADD, text, flag)
        assert real.reservations() == {mac: ReservedAddress(instance, live or config or '')}
        assert take(real, instance) == '10.78.0.5'
        assert hosts(small) == hosts(small, INACTIVE) == {mac: ('10.78.0.5', instance)}
        plant(small, DELETE, f"<host mac='{mac}'/>", 1)
        real.release(instance)
        assert hosts(small) == hosts(small, INACTIVE) == {}


def test_what_others_have_is_avoided_and_left_alone(host: LibvirtHost, real: Libvirt, small: Any) -> None:
    instance, tenant = str(uuid4()), str(uuid4())
    theirs = {
        '52:54:00:99:00:01': ('10.78.0.2', ''),
        '52:54:00:99:00:02': ('10.78.0.3', 'printer'),
        # Our form, and not a MAC of that instance.
        '52:54:00:99:00:03': ('10.78.0.4', instance),
    }
    for mac, (address, name) in theirs.items():
        text = f"<host mac='{mac}' ip='{address}'{f' name={name!r}' if name else ''}/>"
        plant(small, ADD, text, 3)
    # A lease of somebody who came without a reservation: all the rest but four.
    leased = {lease(host, f'52:54:00:99:01:0{number}', small) for number in range(3)}
    free = {f'10.78.0.{last}' for last in range(5, 10)} - leased
    assert {take(real, each) for each in (str(uuid4()), tenant)} == free
    with pytest.raises(BuildFailed, match='no free address'):
        take(real, instance)
    for each in real.reservations().values():
        real.release(each.instance)
    real.release(instance)
    assert hosts(small) == hosts(small, INACTIVE) == theirs


def test_what_it_has_is_kept_and_what_is_wanted_given(host: LibvirtHost, real: Libvirt, small: Any) -> None:
    instance, other = str(uuid4()), str(uuid4())
    has = lease(host, mac_address(instance, 0), small)
    others = {address for _, address in leases(small)}  # of the tests before
    wanted = next(each for each in (f'10.78.0.{last}' for last in range(2, 10)) if each not in others)
    assert take(real, other, wanted) == wanted
    assert take(real, instance, wanted) == has
    # Outside the range, somebody's, or no address: one that is free.
    for nothing in ('10.78.0.200', '10.78.0.1', wanted, 'x'):
        assert take(real, third := str(uuid4()), nothing) not in (nothing, has, wanted)
        real.release(third)


@pytest.mark.usefixtures('real')
def test_where_libvirt_gives_out_none(prepared: Libvirt, connection: Any) -> None:
    instance = str(uuid4())
    plain = "<network><name>{0}</name>{1}<bridge name='{2}'/>{3}</network>"
    definitions = (
        plain.format('lan', "<forward mode='bridge'/>", 'br9', ''),
        plain.format('static', '', 'virbr9', "<ip address='10.79.0.1' netmask='255.255.255.0'/>"),
    )
    for name, text in zip(('lan', 'static'), definitions, strict=True):
        network = connection.networkDefineXML(text)
        try:
            assert prepared.reserve(instance, mac_address(instance, 0), name) is None
        finally:
            network.undefine()
    with pytest.raises(BuildFailed, match='scheduled: network gone: Network not found'):
        prepared.reserve(instance, mac_address(instance, 0), 'gone')


def test_a_network_that_is_gone_gives_and_gave_nobody_anything(host: LibvirtHost) -> None:
    """Its guests may be there still, with addresses that the host sees or an agent tells."""
    with closing(Connection(host.uri)) as own:
        networks = Networks(own)
        assert networks.gives('default', first_address(own)) is True
        assert networks.gives('gone', '10.78.0.2') is False
        assert networks.leases('gone', ['52:54:00:99:01:00']) == {}


def first_address(own: Connection) -> str:
    """The first address that the default network gives out."""
    with own.use('reading the default network') as opened:
        text = opened.networkLookupByName('default').XMLDesc()
    return str(ET.fromstring(text).find('ip/dhcp/range').attrib['start'])  # type: ignore[union-attr]


def test_every_interface_s_goes_with_its_instance(real: Libvirt, small: Any) -> None:
    instance = str(uuid4())
    first, *_, last = all_macs(instance)
    there = {
        first: ReservedAddress(instance, str(real.reserve(instance, first, 'default'))),
        last: ReservedAddress(instance, str(real.reserve(instance, last, 'small'))),
    }
    assert real.reservations() == there
    real.release(instance)
    assert real.reservations() == {}
    assert hosts(small) == {}


def lease(host: LibvirtHost, mac: str, network: Any, options: Sequence[str] = ()) -> str:
    """The address somebody with this MAC is given, once libvirt knows of it."""
    host.inside(['ip', 'link', 'add', 'evt0', 'address', mac, 'type', 'veth', 'peer', 'name', 'evt1'])
    try:
        host.inside(['ip', 'link', 'set', 'evt1', 'master', network.bridgeName(), 'up'])
        host.inside(['ip', 'link', 'set', 'evt0', 'up'])
        client = ['busybox', 'udhcpc', '-i', 'evt0', '-f', '-q', '-n', '-t', '20', '-T', '1', '-s', '/bin/true']
        said = host.inside([*client, *options])
        found = re.search(r'lease of (\S+) obtained', said.stdout + said.stderr)
        assert found, said
        # By its MAC: libvirt may still have the lease of somebody before, with the same address.
        until(lambda: (mac, found[1]) in leases(network), 60, 'the lease is known')
        return found[1]
    finally:
        host.inside(['ip', 'link', 'del', 'evt0'])


def test_two_that_send_one_client_identifier_are_known_by_their_reservations(
    host: LibvirtHost, real: Libvirt, small: Any, tmp_path: Path
) -> None:
    """As guests of an image that was cloned with its machine-id. dnsmasq drops the lease of the first."""
    taken = {instance: take(real, instance) for instance in (str(uuid4()), str(uuid4()))}
    for instance, address in taken.items():
        assert lease(host, mac_address(instance, 0), small, ['-C', '-x', '0x3d:ff0011223344']) == address
    first, second = taken.values()

    until(lambda: first not in {address for _, address in leases(small)}, 60, 'the first one has no lease any more')
    entries = [f'{taken[each]} 0x1 0x2 {mac_address(each, 0)} * virbr1' for each in taken]
    (tmp_path / 'arp').write_text('\n'.join(entries))
    known = Files(Config(leases=f'{host.root}/lib/dnsmasq/*.status', neighbours=tmp_path / 'arp'))
    assert [known.leased_to(address, time.time()) for address in taken.values()] == [
        mac_address(instance, 0) for instance in taken
    ]
    assert all(known.has_lease(address, time.time()) for address in (first, second))
    # Another machine that takes the address is still refused.
    (tmp_path / 'arp').write_text(f'{first} 0x1 0x2 52:54:00:99:00:01 * virbr1')
    with pytest.raises(Forged):
        known.leased_to(first, time.time())


def leases(network: Any) -> set[tuple[str, str]]:
    """The leases that libvirt knows of: (MAC, address)."""
    return {(each['mac'], each['ipaddr']) for each in network.DHCPLeases()}


def inside_the_host(state: str, instance: str) -> None:
    """What ecompute's parent does on its own host: the metadata address, and leases as they are given."""
    hypervisor = Libvirt(Path(state))
    told: queue.Queue[str] = queue.Queue()
    hypervisor.on_change(told.put)
    assert not hypervisor.metadata_address_present()
    for present in (True, True, False, False):
        hypervisor.set_metadata_address(present)
        assert hypervisor.metadata_address_present() == present

    # The guest itself has nothing to boot: somebody with its MAC asks for its address.
    leased, bridged = mac_address(instance, 0), mac_address(instance, 1)
    add = ['ip', 'link', 'add', 'evt0', 'address', leased, 'type', 'veth', 'peer', 'name', 'evt1']
    up = [['ip', 'link', 'set', 'evt1', 'master', 'virbr0', 'up'], ['ip', 'link', 'set', 'evt0', 'up']]
    client = ['busybox', 'udhcpc', '-i', 'evt0', '-f', '-q', '-n', '-t', '20', '-T', '1', '-s', '/bin/true']
    for command in (add, *up):
        subprocess.run(command, check=True)
    assert hypervisor.addresses(instance) == {}
    # Offered and not leased yet, which dnsmasq writes there, or one the guest gave itself.
    for known, seen in (('10.77.0.50', {}), ('10.77.0.200', {leased: Address('10.77.0.200', 'arp')})):
        entry = [known, 'lladdr', leased, 'dev', 'virbr0']
        subprocess.run(['ip', 'neigh', 'add', *entry, 'nud', 'stale'], check=True)
        assert hypervisor.addresses(instance) == seen
        subprocess.run(['ip', 'neigh', 'del', *entry], check=True)
    asked = threading.Thread(target=subprocess.run, args=(client,), kwargs={'capture_output': True})
    asked.start()
    until(lambda: 'leases: virbr0.status' in told.get(timeout=60), 60, 'the lease is told')
    until(lambda: hypervisor.addresses(instance), 60, 'the lease is seen')
    address = hypervisor.addresses(instance)[leased]
    assert address.source == 'lease'
    assert address.address.startswith('10.77.0.')
    asked.join()
    subprocess.run(['ip', 'link', 'del', 'evt0'], check=True)

    for known in ('10.88.0.5', '169.254.7.7'):
        subprocess.run(['ip', 'neigh', 'add', known, 'lladdr', bridged, 'dev', 'br0', 'nud', 'stale'], check=True)
    subprocess.run(['ip', 'neigh', 'add', '10.88.0.6', 'dev', 'br0', 'nud', 'failed'], check=True)
    # Somebody on another network, and then a second one on its own, who says that it is he.
    for dev, seen in (('virbr0', {bridged: Address('10.88.0.5', 'arp')}), ('br0', {})):
        subprocess.run(['ip', 'neigh', 'add', '10.88.0.7', 'lladdr', bridged, 'dev', dev, 'nud', 'stale'], check=True)
        assert hypervisor.addresses(instance) == {leased: address, **seen}
    assert hypervisor.addresses(str(uuid4())) == {}
    hypervisor.close()


def test_leases_and_the_metadata_address(host: LibvirtHost, real: Libvirt, spec: GuestSpec) -> None:
    host.inside(['ip', 'link', 'add', 'br0', 'up', 'type', 'bridge'])
    build(real, replace(spec, networks=BRIDGED))
    try:
        host.call('tests.functional.test_reservations', 'inside_the_host', spec.instance)
    finally:
        host.inside(['ip', 'link', 'del', 'br0'])


SHUT = """<network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'><name>shut</name>
<forward mode='open'/><bridge name='virbr8'/>
<ip address='10.78.0.1' netmask='255.255.255.0'><dhcp><range start='10.78.0.2' end='10.78.0.9'/></dhcp></ip>
<dnsmasq:options><dnsmasq:option value='dhcp-ignore=tag:!known'/></dnsmasq:options></network>"""


@pytest.mark.usefixtures('real')
def test_networks_whose_dhcp_answers_anybody(host: LibvirtHost) -> None:
    """On libvirt's own a guest took all addresses; with the line that the audit says it gets none (ENEMY 3)."""
    (host.root / 'shut.xml').write_text(SHUT)
    host.inside(['virsh', '-q', 'net-define', str(host.root / 'shut.xml')])
    networks = [Attachment('network', name) for name in ('default', 'shut', 'nowhere')]
    some = Libvirt(host.root / 'state', [*networks, Attachment('bridge', 'br0')], host.uri)
    try:
        assert some.open_dhcp() == {'default'}
    finally:
        some.close()
        host.inside(['virsh', '-q', 'net-undefine', 'shut'])
    assert "<dnsmasq:option value='dhcp-ignore=tag:!known'/>" in CODES['dhcp-open'].how
