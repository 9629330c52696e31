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
from ecomp.virt.networks import INTERFACES_DIRECTORY

ALL_NETWORKS = Attachment('network', 'default'), Attachment('bridge', 'br0'), Attachment('network', 'alone')
ISOLATED_NETWORK = "<network><name>alone</name><bridge name='virbr6'/><port isolated='yes'/></network>"


def run_command(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def list_bridges() -> list[str]:
    taps = sorted(INTERFACES_DIRECTORY.glob('vnet*'))
    return [(tap / 'master').resolve().name if (tap / 'master').exists() else '' for tap in taps]


def is_isolated() -> bool:
    return any(flag.read_text() == '1\n' for flag in INTERFACES_DIRECTORY.glob('vnet*/brport/isolated'))


def check_reconnection(state: str, instance: str) -> None:
    """Check the reconnection in the host's namespaces, where ecompute's parent process runs."""
    with closing(Libvirt(Path(state))) as hypervisor:
        notices: queue.Queue[str] = queue.Queue()
        hypervisor.watch_changes(str, notices.put)

        def restart_network(bridge: str) -> None:
            edited = re.sub(
                "bridge name='[^']*'", f"bridge name='{bridge}'", run_command('virsh', 'net-dumpxml', 'default')
            )
            Path(state, 'network.xml').write_text(edited)
            run_command('virsh', '-q', 'net-destroy', 'default')
            assert notices.get(timeout=60) == 'libvirt: network default was started or stopped'
            run_command('virsh', '-q', 'net-define', f'{state}/network.xml')
            assert list_bridges() == ['', 'br0', 'virbr6']
            hypervisor.replug_interfaces()
            trouble = hypervisor.list_guests()[instance].describe_trouble({})
            assert trouble.startswith(f'{UNPLUGGED} (vnet0): ')
            assert trouble.endswith('. Fix: start network default again')
            run_command('virsh', '-q', 'net-start', 'default')
            assert notices.get(timeout=60) == 'libvirt: network default was started or stopped'
            hypervisor.replug_interfaces()
            assert hypervisor.list_guests()[instance].describe_trouble({}) == ''

        assert list_bridges() == ['virbr0', 'br0', 'virbr6']
        hypervisor.replug_interfaces()
        for bridge in ('virbr0', 'virbr7', 'virbr0'):
            restart_network(bridge)
            assert list_bridges() == [bridge, 'br0', 'virbr6']
        # libvirt sends no event for a bridge that the host itself manages.
        run_command('ip', 'link', 'del', 'br0')
        hypervisor.replug_interfaces()
        assert hypervisor.list_guests()[instance].describe_trouble({}).endswith('. Fix: start bridge br0 again')
        run_command('ip', 'link', 'add', 'br0', 'up', 'type', 'bridge')
        hypervisor.replug_interfaces()
        assert (list_bridges(), hypervisor.list_guests()[instance].troubles) == (['virbr0', 'br0', 'virbr6'], ())
        # A replugged tap is isolated again.
        assert is_isolated()
        for command in ('net-destroy', 'net-start'):
            run_command('virsh', '-q', command, 'alone')
        assert not is_isolated()
        hypervisor.replug_interfaces()
        assert (list_bridges()[2], is_isolated(), hypervisor.list_guests()[instance].troubles) == ('virbr6', True, ())
        # A tap that was moved to another bridge manually stays there.
        run_command('ip', 'link', 'set', 'vnet1', 'master', 'virbr0')
        hypervisor.replug_interfaces()
        assert list_bridges()[:2] == ['virbr0', 'virbr0']


def test_guest_is_replugged_or_its_trouble_gives_the_reason(
    host: LibvirtHost, real_libvirt: Libvirt, spec: GuestSpec
) -> None:
    host.run_inside(['ip', 'link', 'add', 'br0', 'up', 'type', 'bridge'])
    (host.root / 'alone.xml').write_text(ISOLATED_NETWORK)
    for command in (['net-define', str(host.root / 'alone.xml')], ['net-start', 'alone']):
        host.run_inside(['virsh', '-q', *command])
    build(real_libvirt, replace(spec, networks=ALL_NETWORKS))
    try:
        host.call_function('tests.functional.test_plugged', 'check_reconnection', spec.instance)
    finally:
        real_libvirt.destroy(spec.instance, COMPUTE)
        host.run_inside(['ip', 'link', 'del', 'br0'])
        for command_name in ('net-destroy', 'net-undefine'):
            host.run_inside(['virsh', '-q', command_name, 'alone'])
