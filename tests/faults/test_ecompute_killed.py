"""F2: ecompute killed at every step of a build, a destroy, its start and its end; the next start goes on."""

from __future__ import annotations

import json
import os
import re
import signal

import pytest

from tests.kit.commands import Control
from tests.kit.hands import Armed, killed_at, settled, some, start_again
from tests.kit.hypervisor import Hypervisor
from tests.kit.servers import until
from tests.kit.story import addressed, boot, place, reached, reserved
from tests.kit.tuned import tuned

BUILD_FAILPOINTS = (
    *('remembered', 'reserved', 'seeded', 'confirmed', 'building', 'image-ready', 'disk-created', 'domain-started'),
    *('built', 'active', 'addressed'),
)
DESTROY_FAILPOINTS = (
    *('destroying', 'domain-undefined', 'disk-deleted', 'removed', 'forgotten', 'unreserved', 'released', 'ended'),
)
START_FAILPOINTS = ('registered', 'described', 'published')
END_FAILPOINTS = ('closing', 'closed')


@pytest.fixture
def compute(cluster: Control) -> Armed:
    """A fake ecompute that is not started yet."""
    return tuned(cluster, start=False)


@pytest.mark.parametrize('step', some(BUILD_FAILPOINTS, 'confirmed', 'seeded', 'disk-created', 'built', 'addressed'))
def test_killed_while_building(cluster: Control, compute: Armed, step: str) -> None:
    """F2: kill -9 of ecompute at a step of a build: the next start ends it, once (fake)"""
    compute.failpoint = f'{step}:kill'
    compute.start()
    _, instance = place(cluster)
    killed_at(compute, step)
    start_again(compute)
    addressed(cluster, instance)
    assert reached(cluster, instance, 'active')['attempts'] == 0
    settled(cluster, compute)


@pytest.mark.parametrize('step', some(DESTROY_FAILPOINTS, 'destroying', 'removed', 'released', 'ended'))
def test_killed_while_destroying(cluster: Control, compute: Armed, step: str) -> None:
    """F2: kill -9 of ecompute at a step of a destroy: the next start ends it (fake)"""
    compute.failpoint = f'{step}:kill'
    compute.start()
    (_, instance), (_, other) = place(cluster), place(cluster)
    address = addressed(cluster, other)
    addressed(cluster, instance)
    assert cluster.eschedule('destroy', instance).code == 0
    killed_at(compute, step)
    start_again(compute)
    reached(cluster, instance, 'gone')
    assert addressed(cluster, other) == address
    settled(cluster, compute)


@pytest.mark.parametrize('by_hand', [False, True])
def test_killed_before_the_state_directory_hears_of_an_end(cluster: Control, by_hand: bool) -> None:
    """F2: kill -9 of ecompute between an end in etcd and in its directory: the next start frees the address (fake)"""
    quick = {'host.claims.APART': 0.5, 'planner.APART': 0.5}  # between two looks for what vanished
    compute = tuned(cluster, numbers=quick)
    instance = boot(cluster)
    compute.kill()
    if by_hand:
        (compute.directory / 'state/fake.json').write_text('[]')
    compute.failpoint = 'ended:kill'
    compute.start()
    if not by_hand:
        assert cluster.eschedule('destroy', instance).code == 0
    killed_at(compute, 'ended')
    start_again(compute)
    assert reached(cluster, instance, 'gone')
    state = compute.directory / 'state'
    assert json.loads((state / 'fake-reserved.json').read_text()) == {}
    assert 'ended' in json.loads((state / f'instances/{instance}.json').read_text())
    settled(cluster, compute)


@pytest.mark.parametrize('step', START_FAILPOINTS)
def test_killed_while_starting(cluster: Control, compute: Armed, step: str) -> None:
    """F2: kill -9 of ecompute while it starts, three times, the first time ever and with work waiting (fake)"""
    compute.failpoint = f'{step}:kill'
    for _ in range(2):
        compute.launch()
        killed_at(compute, step)
    start_again(compute)
    _, instance = place(cluster)
    address = addressed(cluster, instance)
    compute.kill()
    assert cluster.eschedule('destroy', place(cluster)[1]).code == 0
    compute.failpoint = f'{step}:kill'
    compute.launch()
    killed_at(compute, step)
    start_again(compute)
    assert addressed(cluster, instance) == address
    assert reserved(cluster, compute.uuid) == 0
    settled(cluster, compute)


@pytest.mark.parametrize('step', END_FAILPOINTS)
def test_killed_while_ending(cluster: Control, compute: Armed, step: str) -> None:
    """F2: kill -9 of ecompute while it ends: the next start is as after any other (fake)"""
    compute.failpoint = f'{step}:kill'
    compute.start()
    _, instance = place(cluster)
    address = addressed(cluster, instance)
    os.kill(compute.pid, signal.SIGTERM)
    killed_at(compute, step)
    start_again(compute)
    assert addressed(cluster, instance) == address
    assert reserved(cluster, compute.uuid) == 0
    settled(cluster, compute)


def test_killed_with_the_metadata_address_put(host: Hypervisor) -> None:
    """F2: kill -9 of ecompute that put 169.254.169.254: the next start takes it off at its end, as its own (libvirt)"""
    address, bridge = '169.254.169.254/32', ('dev', 'virbr0')

    def there() -> bool:
        return address in host.lab.elab('exec', host.name, 'ip', 'addr', 'show', *bridge)

    def ends() -> None:
        host.kill(signal.SIGTERM)

    # The lab's network has the address itself.
    ends()
    assert there(), 'what is not ours stays'
    host.lab.elab('exec', host.name, 'ip', 'addr', 'del', address, *bridge)
    try:
        host.restart()
        assert there()
        host.kill()
        assert there()
        host.restart()
        ends()
        assert not there()
        assert not (host.state / 'metadata-address').exists()
    finally:
        host.lab.elab('exec', host.name, 'ip', 'addr', 'replace', address, *bridge)


def test_the_network_is_started_again(host: Hypervisor) -> None:
    """F28: the network stopped and started by hand: 169.254.169.254 is put on its new bridge at once (libvirt)"""
    address, bridge = '169.254.169.254/32', ('dev', 'virbr0')

    def there() -> bool:
        return address in host.lab.elab('exec', host.name, 'ip', 'addr', 'show', *bridge)

    definition = host.lab.virsh(host.name, 'net-dumpxml', 'default')
    without = re.sub(r"<ip address='169\.254\.169\.254'.*?</ip>", '', definition, flags=re.DOTALL)
    assert without != definition
    xml = host.state / 'network.xml'
    try:
        xml.write_text(without)
        host.lab.virsh(host.name, 'net-define', str(xml))
        host.lab.virsh(host.name, 'net-destroy', 'default')
        host.lab.virsh(host.name, 'net-start', 'default')
        until(there, 10, 'the address is there again')
    finally:
        host.kill(signal.SIGTERM)
        xml.write_text(definition)
        host.lab.virsh(host.name, 'net-define', str(xml))
        host.lab.virsh(host.name, 'net-destroy', 'default')
        host.lab.virsh(host.name, 'net-start', 'default')
        xml.unlink()
        host.restart()


REAL = ('building', 'reserved', 'built', 'removed', 'forgotten')


@pytest.mark.parametrize('step', some(REAL, 'built'))
def test_killed_on_a_real_host(host: Hypervisor, step: str) -> None:
    """F2: kill -9 of ecompute at a step of a build or a destroy: the next start ends it; one QEMU or none (libvirt)"""
    destroyed = step in DESTROY_FAILPOINTS
    host.restart(f'{step}:kill')
    instance = host.running() if destroyed else host.place()
    if destroyed:
        host.ask_destroy(instance)
    host.ended()
    assert host.fired == [step]
    before = host.qemu(instance)
    assert bool(before) == (step == 'built')
    host.restart()
    host.reached(instance, 'gone' if destroyed else 'active')
    assert host.qemus() == ([] if destroyed else [instance])
    assert before in (0, host.qemu(instance)), 'one that runs is taken as it is'
    if destroyed:
        host.nothing_of(instance)
    host.settled()


FAIL_FAILPOINTS = ('failing', 'removed', 'forgotten', 'unreserved', 'released', 'ended')


@pytest.mark.parametrize('step', some(FAIL_FAILPOINTS, 'failing', 'released'))
def test_killed_while_a_build_fails(host: Hypervisor, step: str) -> None:
    """F2: kill -9 of ecompute at a step of a failed build: the next start ends it, and says why it failed (libvirt)"""
    host.restart(f'{step}:kill')
    instance = host.place('missing.raw')
    host.ended()
    assert host.fired == [step]
    host.restart()
    failed = host.reached(instance, 'error')['error']
    assert (failed['stage'], 'HTTP 404' in failed['reason']) == ('image', True), failed
    assert host.held(instance) == {}
    assert not host.disk(instance).exists()
    host.settled()
