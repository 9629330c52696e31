"""Test that unsuitable libvirt networks are detected before a guest is made on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from ecomp.errors import BuildFailed, UsageError
from ecomp.model.guest import DEFAULT_NETWORKS, Attachment, GuestSpec
from tests.functional.libvirt_host import LibvirtHost

pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt.libvirt_host import Filters, Libvirt, probe_libvirt

MACVTAP_NETWORK = "<network><name>odd</name><forward mode='bridge'><interface dev='lo'/></forward></network>"
OPEN_VSWITCH_NETWORK = """<network><name>odd</name><forward mode='bridge'/><bridge name='ovsbr0'/>
<virtualport type='openvswitch'/></network>"""
STATIC_NETWORK = """<network><name>odd</name><bridge name='virbr5'/><ip address='10.79.1.1' netmask='255.255.255.0'>
<dhcp><host mac='52:54:00:00:00:99' name='printer' ip='10.79.1.9'/></dhcp></ip></network>"""
IPV6_NETWORK = """<network><name>odd</name><bridge name='virbr5'/><ip family='ipv6' address='fd00:77::1' prefix='64'>
<dhcp><range start='fd00:77::100' end='fd00:77::1ff'/></dhcp></ip></network>"""
IPV6_NETWORK_WITHOUT_DHCP = IPV6_NETWORK.partition('<dhcp>')[0] + '</ip></network>'
NETWORK_WITHOUT_DHCP = "<network><name>odd</name><bridge name='virbr5'/></network>"
ODD_ATTACHMENT = Attachment('network', 'odd')


@pytest.fixture
def define(connection: Any) -> Iterator[Any]:
    yield connection.networkDefineXML
    for network in connection.listAllNetworks():
        if network.name() == 'odd':
            if network.isActive():
                network.destroy()
            network.undefine()


def read_start_error(host: LibvirtHost, *attachments: Attachment) -> str:
    """Return the error of ecompute's check at start, or '' if there is none."""
    libvirt = Libvirt(host.root / 'state', attachments, host.uri)
    try:
        libvirt.check()
    except UsageError as error:
        return str(error)
    finally:
        libvirt.close()
    return ''


@pytest.mark.usefixtures('real_libvirt')
@pytest.mark.parametrize(
    ('definition', 'says', 'as_second'),
    [
        (MACVTAP_NETWORK, 'uses the network card itself (macvtap or hostdev), where libvirt cannot filter', True),
        (OPEN_VSWITCH_NETWORK, 'uses a port of openvswitch, where libvirt cannot filter', True),
        (STATIC_NETWORK, 'without a <range>', False),
        (IPV6_NETWORK, 'has only IPv6', False),
        (IPV6_NETWORK_WITHOUT_DHCP, 'has only IPv6', False),
    ],
)
def test_ecompute_does_not_start_with_an_unfit_network(
    host: LibvirtHost, define: Any, definition: str, says: str, as_second: bool
) -> None:
    define(definition)
    refused = read_start_error(host, ODD_ATTACHMENT)
    assert says in refused
    assert refused.count('. Fix: ') == 1
    assert probe_libvirt(host.root / 'state', [ODD_ATTACHMENT], host.uri).network_problems == (refused,)
    # A guest has its address on the first network: the second one may lack DHCP intentionally.
    assert read_start_error(host, *DEFAULT_NETWORKS, ODD_ATTACHMENT) == (refused if as_second else '')


@pytest.mark.usefixtures('real_libvirt')
def test_ecompute_starts_with_a_network_without_dhcp(host: LibvirtHost, define: Any) -> None:
    define(NETWORK_WITHOUT_DHCP)
    assert read_start_error(host, ODD_ATTACHMENT) == ''
    assert probe_libvirt(host.root / 'state', [ODD_ATTACHMENT, *DEFAULT_NETWORKS], host.uri).network_problems == ()


@pytest.mark.usefixtures('real_libvirt')
def test_suggested_fix_of_a_missing_range_works(host: LibvirtHost, define: Any) -> None:
    network = define(STATIC_NETWORK)
    network.create()
    cure = read_start_error(host, ODD_ATTACHMENT).partition('. Fix: ')[2]
    host.run_inside(['sh', '-e', '-c', cure.replace('FIRST', '10.79.1.100').replace('LAST', '10.79.1.199')])
    assert read_start_error(host, ODD_ATTACHMENT) == ''


def test_macvtap_guest_needs_a_host_without_filters(
    host: LibvirtHost, real_libvirt: Libvirt, spec: GuestSpec, define: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(MACVTAP_NETWORK).create()
    real_libvirt.create_disk(spec)
    with pytest.raises(BuildFailed, match='filterref'):
        real_libvirt.start(replace(spec, networks=(ODD_ATTACHMENT,)))
    monkeypatch.setattr(Filters, 'explain_missing', lambda _: 'ebtables is not installed')
    assert read_start_error(host, ODD_ATTACHMENT) == ''
    assert probe_libvirt(host.root / 'state', [ODD_ATTACHMENT], host.uri).network_problems == ()
