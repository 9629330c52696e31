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
from ecomp.virt.libvirt_host import Filters, Libvirt, look

MACVTAP = "<network><name>odd</name><forward mode='bridge'><interface dev='lo'/></forward></network>"
OPEN_VSWITCH = """<network><name>odd</name><forward mode='bridge'/><bridge name='ovsbr0'/>
<virtualport type='openvswitch'/></network>"""
STATIC = """<network><name>odd</name><bridge name='virbr5'/><ip address='10.79.1.1' netmask='255.255.255.0'>
<dhcp><host mac='52:54:00:00:00:99' name='printer' ip='10.79.1.9'/></dhcp></ip></network>"""
IPV6 = """<network><name>odd</name><bridge name='virbr5'/><ip family='ipv6' address='fd00:77::1' prefix='64'>
<dhcp><range start='fd00:77::100' end='fd00:77::1ff'/></dhcp></ip></network>"""
IPV6_BY_ROUTER = IPV6.partition('<dhcp>')[0] + '</ip></network>'
NO_DHCP = "<network><name>odd</name><bridge name='virbr5'/></network>"
ODD = Attachment('network', 'odd')


@pytest.fixture
def define(connection: Any) -> Iterator[Any]:
    yield connection.networkDefineXML
    for network in connection.listAllNetworks():
        if network.name() == 'odd':
            if network.isActive():
                network.destroy()
            network.undefine()


def at_start(host: LibvirtHost, *attachments: Attachment) -> str:
    """Return the error of ecompute's check at start, or '' if there is none."""
    libvirt = Libvirt(host.root / 'state', attachments, host.uri)
    try:
        libvirt.check()
    except UsageError as error:
        return str(error)
    finally:
        libvirt.close()
    return ''


@pytest.mark.usefixtures('real')
@pytest.mark.parametrize(
    ('definition', 'says', 'as_second'),
    [
        (MACVTAP, 'is the network card itself (macvtap or hostdev), where libvirt cannot filter', True),
        (OPEN_VSWITCH, 'is a port of openvswitch, where libvirt cannot filter', True),
        (STATIC, 'without a <range>', False),
        (IPV6, 'has IPv6 alone', False),
        (IPV6_BY_ROUTER, 'has IPv6 alone', False),
    ],
)
def test_a_host_does_not_start_with_it(
    host: LibvirtHost, define: Any, definition: str, says: str, as_second: bool
) -> None:
    define(definition)
    refused = at_start(host, ODD)
    assert says in refused
    assert refused.count('. Fix: ') == 1
    assert look(host.root / 'state', [ODD], host.uri).unfit == (refused,)
    # A guest has its address on the first network: the second one may lack DHCP intentionally.
    assert at_start(host, *DEFAULT_NETWORKS, ODD) == (refused if as_second else '')


@pytest.mark.usefixtures('real')
def test_a_host_starts_with_what_somebody_else_may_serve(host: LibvirtHost, define: Any) -> None:
    define(NO_DHCP)
    assert at_start(host, ODD) == ''
    assert look(host.root / 'state', [ODD, *DEFAULT_NETWORKS], host.uri).unfit == ()


@pytest.mark.usefixtures('real')
def test_the_fix_of_a_network_without_a_range_mends_it(host: LibvirtHost, define: Any) -> None:
    network = define(STATIC)
    network.create()
    cure = at_start(host, ODD).partition('. Fix: ')[2]
    host.inside(['sh', '-e', '-c', cure.replace('FIRST', '10.79.1.100').replace('LAST', '10.79.1.199')])
    assert at_start(host, ODD) == ''


def test_a_guest_on_the_network_card_itself_is_made_without_filters_alone(
    host: LibvirtHost, real: Libvirt, spec: GuestSpec, define: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(MACVTAP).create()
    real.create_disk(spec)
    with pytest.raises(BuildFailed, match='filterref'):
        real.start(replace(spec, networks=(ODD,)))
    monkeypatch.setattr(Filters, 'missing', lambda _: 'ebtables is not installed')
    assert at_start(host, ODD) == ''
    assert look(host.root / 'state', [ODD], host.uri).unfit == ()
