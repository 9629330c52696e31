"""Test that guests are plugged in again after their bridge was removed, on a real libvirt."""

from __future__ import annotations

import queue
import re
import subprocess
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.model.guest import UNPLUGGED, Attachment, GuestSpec
from tests.functional.guest import COMPUTE, build
from tests.functional.libvirt_host import LibvirtHost

pytest.importorskip('libvirt', reason="libvirt-python is not installed: pip install '.[hypervisor]'")
from ecomp.virt.libvirt_host import Libvirt
from ecomp.virt.networks import INTERFACES

BOTH = (Attachment('network', 'default'), Attachment('bridge', 'br0'))


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def masters() -> list[str]:
    """Return the bridge of each tap, '' for a tap without one."""
    taps = sorted(INTERFACES.glob('vnet*'))
    return [(tap / 'master').resolve().name if (tap / 'master').exists() else '' for tap in taps]


def is_isolated() -> bool:
    return any(flag.read_text() == '1\n' for flag in INTERFACES.glob('vnet*/brport/isolated'))


def inside_the_host(state: str, instance: str) -> None:
    """Check the reconnection in the host's namespaces, where ecompute's parent process runs."""
    with closing(Libvirt(Path(state))) as hypervisor:
        notices: queue.Queue[str] = queue.Queue()
        hypervisor.on_change(str, notices.put)

        def restart_network(bridge: str) -> None:
            edited = re.sub("bridge name='[^']*'", f"bridge name='{bridge}'", run('virsh', 'net-dumpxml', 'default'))
            Path(state, 'network.xml').write_text(edited)
            run('virsh', '-q', 'net-destroy', 'default')
            assert notices.get(timeout=60) == 'libvirt: network default was started or stopped'
            run('virsh', '-q', 'net-define', f'{state}/network.xml')
            assert masters() == ['', 'br0']
            hypervisor.plug_in()
            trouble = hypervisor.guests()[instance].trouble
            assert trouble.startswith(f'{UNPLUGGED} (vnet0): ')
            assert trouble.endswith('. Fix: start network default again')
            run('virsh', '-q', 'net-start', 'default')
            assert notices.get(timeout=60) == 'libvirt: network default was started or stopped'
            hypervisor.plug_in()
            assert hypervisor.guests()[instance].trouble == ''

        assert masters() == ['virbr0', 'br0']
        hypervisor.plug_in()
        for bridge in ('virbr0', 'virbr7', 'virbr0'):
            restart_network(bridge)
            assert masters() == [bridge, 'br0']
        # libvirt sends no event for a bridge that the host itself manages.
        run('ip', 'link', 'del', 'br0')
        hypervisor.plug_in()
        assert hypervisor.guests()[instance].trouble.endswith('. Fix: start bridge br0 again')
        run('ip', 'link', 'add', 'br0', 'up', 'type', 'bridge')
        hypervisor.plug_in()
        assert (masters(), hypervisor.guests()[instance].trouble) == (['virbr0', 'br0'], '')
        # A tap that was moved to another bridge manually stays there.
        run('ip', 'link', 'set', 'vnet1', 'master', 'virbr0')
        hypervisor.plug_in()
        assert masters() == ['virbr0', 'virbr0']


def inside_the_host_isolated(state: str, instance: str) -> None:
    """Check inside the host's namespaces that a replugged tap is isolated again."""
    with closing(Libvirt(Path(state))) as hypervisor:
        assert is_isolated()
        run('virsh', '-q', 'net-destroy', 'alone')
        run('virsh', '-q', 'net-start', 'alone')
        assert not is_isolated()
        hypervisor.plug_in()
        assert (masters(), is_isolated(), hypervisor.guests()[instance].trouble) == (['virbr6'], True, '')


def test_guests_are_on_their_bridges_again_or_their_trouble_says_why(
    host: LibvirtHost, real: Libvirt, spec: GuestSpec
) -> None:
    host.inside(['ip', 'link', 'add', 'br0', 'up', 'type', 'bridge'])
    build(real, replace(spec, networks=BOTH))
    try:
        host.call('tests.functional.test_plugged', 'inside_the_host', spec.instance)
    finally:
        real.destroy(spec.instance, COMPUTE)
        host.inside(['ip', 'link', 'del', 'br0'])


def test_guests_that_their_network_keeps_apart_are_kept_apart_again(
    host: LibvirtHost, real: Libvirt, spec: GuestSpec
) -> None:
    network = "<network><name>alone</name><bridge name='virbr6'/><port isolated='yes'/></network>"
    (host.root / 'alone.xml').write_text(network)
    for command in (['net-define', str(host.root / 'alone.xml')], ['net-start', 'alone']):
        host.inside(['virsh', '-q', *command])
    build(real, replace(spec, networks=(Attachment('network', 'alone'),)))
    try:
        host.call('tests.functional.test_plugged', 'inside_the_host_isolated', spec.instance)
    finally:
        real.destroy(spec.instance, COMPUTE)
        for command_name in ('net-destroy', 'net-undefine'):
            host.inside(['virsh', '-q', command_name, 'alone'])
