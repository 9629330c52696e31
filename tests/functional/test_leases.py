"""The addresses of destroyed guests are free at once, on real networks with dnsmasq."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ecomp.errors import BuildFailed
from ecomp.model.guest import make_mac_address
from tests.functional.libvirt_host import LibvirtHost
from tests.kit.servers import wait_until

libvirt = pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt.libvirt_host import Libvirt  # noqa: E402

# It answers only MACs with a reservation: dnsmasq may read a new reservation after a request that comes right after it.
NETWORK = """<network xmlns:dnsmasq='http://libvirt.org/schemas/network/dnsmasq/1.0'><name>leases</name>
<forward mode='open'/><bridge name='virbr5' stp='off'/><ip address='169.254.169.254' netmask='255.255.255.255'/>
<ip address='10.76.0.1' netmask='255.255.255.0'><dhcp><range start='10.76.0.2' end='10.76.0.{last}'/></dhcp></ip>
<dnsmasq:options><dnsmasq:option value='dhcp-ignore=tag:!known'/></dnsmasq:options></network>"""
FOREIGN_MAC, FOREIGN_ADDRESS = '52:54:00:99:00:01', '10.76.0.4'
FOREIGN_HOST = f"<host mac='{FOREIGN_MAC}' ip='{FOREIGN_ADDRESS}'/>"
HOSTS, LIVE = libvirt.VIR_NETWORK_SECTION_IP_DHCP_HOST, libvirt.VIR_NETWORK_UPDATE_AFFECT_LIVE
# udhcpc's own client id is its MAC. systemd sends a DUID instead, and others send nothing.
CLIENT_IDS: tuple[list[str], ...] = [], ['-C', '-x', '0x3d:ff{number:08x}00020000ab11'], ['-C']


@contextmanager
def start_network(last: int) -> Iterator[Any]:
    """Provide a network of 10.76.0.2 to 10.76.0.<last>, and a client's link to it.

    This runs in the host's namespaces, as ecompute does: dnsmasq is asked over the network.
    """
    with closing(libvirt.open('qemu:///system')) as connection:
        network = connection.networkCreateXML(NETWORK.format(last=last))
        for command in ('add evt0 type veth peer name evt1', 'set evt1 master virbr5 up', 'set evt0 up'):
            subprocess.run(['ip', 'link', *command.split()], check=True)
        try:
            yield network
        finally:
            subprocess.run(['ip', 'link', 'del', 'evt0'], check=True)
            network.destroy()


def acquire_lease(mac: str, options: list[str]) -> str:
    subprocess.run(['ip', 'link', 'set', 'evt0', 'address', mac], check=True)
    client = ['busybox', 'udhcpc', '-i', 'evt0', '-f', '-q', '-n', '-t', '20', '-T', '1', '-s', '/bin/true', *options]
    output = subprocess.run(client, check=True, capture_output=True, text=True).stderr
    match = re.search(r'lease of (\S+) obtained', output)
    assert match, output
    return match[1]


def is_leased(network: Any, mac: str) -> bool:
    return mac in [lease['mac'] for lease in network.DHCPLeases()]


def create_and_destroy(hypervisor: Libvirt, network: Any, count: int) -> None:
    """Create guests one after the other, each with a lease, and destroy each.

    Every tenth is destroyed before libvirt lists its lease: dnsmasq's helper writes the list a moment later.
    If the next one can be given the same address, dnsmasq has ended that lease.
    """
    unlisted_address = None
    for number, options in enumerate(islice(cycle(CLIENT_IDS), count)):
        instance, is_listed = str(uuid4()), number % 10 != 0
        mac = make_mac_address(instance, 0)
        address = hypervisor.reserve_address(instance, mac, 'leases', unlisted_address)
        assert acquire_lease(mac, [option.format(number=number) for option in options]) == address, f'guest {number}'
        if is_listed:
            wait_until(partial(is_leased, network, mac), 60, f'libvirt lists the lease of guest {number}')
        hypervisor.release_addresses(instance)
        assert not (is_listed and is_leased(network, mac)), f'guest {number}'
        unlisted_address = None if is_listed else address


def check_small_network(state: str, instance: str) -> None:
    """One address is kept, one is a foreign machine's, and the third is used again."""
    with closing(Libvirt(Path(state))) as hypervisor, start_network(last=4) as network:
        create_and_destroy(hypervisor, network, 9)
        wait_until(lambda: not network.DHCPLeases(), 60, 'libvirt lists no lease')
        update = partial(network.update, section=HOSTS, parentIndex=-1, xml=FOREIGN_HOST, flags=LIVE)
        update(libvirt.VIR_NETWORK_UPDATE_COMMAND_ADD_LAST)
        assert acquire_lease(FOREIGN_MAC, []) == FOREIGN_ADDRESS
        wait_until(partial(is_leased, network, FOREIGN_MAC), 60, 'libvirt lists the lease of the foreign machine')
        update(libvirt.VIR_NETWORK_UPDATE_COMMAND_DELETE)  # the lease stays
        mac = make_mac_address(instance, 0)
        address = hypervisor.reserve_address(instance, mac, 'leases')
        assert acquire_lease(mac, []) == address
        wait_until(partial(is_leased, network, mac), 60, 'libvirt lists the lease of the guest')
        last_instance = str(uuid4())
        last = hypervisor.reserve_address(last_instance, make_mac_address(last_instance, 0), 'leases')
        with pytest.raises(BuildFailed) as caught:
            hypervisor.reserve_address(str(uuid4()), make_mac_address(str(uuid4()), 0), 'leases')
        reason = re.sub(r'until [-0-9T:.]+Z', 'until TIME', caught.value.reason)
        taken = 'network leases has no free address: all of 10.76.0.2 to 10.76.0.4 are leased or reserved'
        assert reason.startswith(f'{taken}: {FOREIGN_ADDRESS} is leased to {FOREIGN_MAC} until TIME, '), reason
        for holder in (f'{address} is reserved for {instance}', f'{last} is reserved for {last_instance}'):
            assert holder in reason
        assert '. Fix: destroy an instance there, or enlarge the range' in reason
        hypervisor.release_addresses(last_instance)
        hypervisor.release_addresses(instance)
        assert [lease['mac'] for lease in network.DHCPLeases()] == [FOREIGN_MAC]
        assert hypervisor.list_reservations() == {}
        # A client id that is not hexadecimal does not prevent the destroy.
        hypervisor.reserve_address(instance, mac, 'leases')
        acquire_lease(mac, [])
        wait_until(partial(is_leased, network, mac), 60, 'libvirt lists the lease of the guest again')
        file = Path('/var/lib/libvirt/dnsmasq/virbr5.status')
        file.write_text(re.sub('"client-id": "[^"]*"', '"client-id": "zz"', file.read_text()))
        hypervisor.release_addresses(instance)
        assert (hypervisor.list_reservations(), is_leased(network, mac)) == ({}, True)


def check_many_guests(state: str, _instance: str) -> None:
    """Check 300 guests on a network of 253 addresses, like libvirt's own."""
    with closing(Libvirt(Path(state))) as hypervisor, start_network(last=254) as network:
        create_and_destroy(hypervisor, network, 300)


def test_destroy_releases_the_lease(host: LibvirtHost) -> None:
    host.call_function('tests.functional.test_leases', 'check_small_network', str(uuid4()))


@pytest.mark.slow
def test_a_network_of_253_addresses_serves_300_guests(host: LibvirtHost) -> None:
    host.call_function('tests.functional.test_leases', 'check_many_guests', '', timeout=600)
