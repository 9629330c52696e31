"""F13 with real guests: the etcd of a lab is wiped, and accepted."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator

import pytest
import yaml

from ecomp.lab import elab, state
from ecomp.lab.machine import CONTROL
from tests.kit.boot_sectors import HALT, boot_disk
from tests.kit.hypervisor import ROOM, Hypervisor
from tests.kit.lab import Lab, lab_name, running
from tests.kit.servers import until


@pytest.fixture
def own_host() -> Iterator[Hypervisor]:
    """A host of a lab of this test's own, for its etcd is everybody's."""
    if os.geteuid() != 0:
        pytest.skip('hypervisors in namespaces need root')
    lab = Lab(lab_name('etcd'), 1)
    try:
        (lab.directory / 'images/idle.raw').write_bytes(boot_disk(HALT))
        host = Hypervisor(lab, 'hv1')
        host.compute = lab.compute('hv1')
        config = host.directory / 'compute.yaml'
        config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), 'inventory': ROOM}))
        host.restart()
        yield host
    finally:
        lab.close()


def wipe(lab: Lab) -> None:
    """Take everything from the lab's etcd."""
    found = state.load(lab.name)
    assert found is not None
    pid = found.processes['etcd'].pid
    os.kill(pid, signal.SIGKILL)
    until(lambda: not running(pid), 20, 'etcd ends')
    shutil.rmtree(lab.directory / CONTROL / 'etcd')
    elab.start_control(found)


@pytest.mark.slow
@pytest.mark.history_broken('etcd is wiped')
def test_wiped_under_guests(own_host: Hypervisor) -> None:
    """F13: etcd wiped while guests run: they run on, through a restart and the acceptance (libvirt)"""
    one, two = own_host.running(), own_host.running()
    qemus = {each: own_host.qemu(each) for each in (one, two)}
    assert all(qemus.values())
    destroyed = own_host.running()
    own_host.ask_destroy(destroyed)
    own_host.reached(destroyed, 'gone')
    wipe(own_host.lab)
    until(lambda: own_host.lines('is not the one this compute knew'), 30, 'it is loud')
    assert own_host.is_running
    own_host.kill(signal.SIGTERM)
    own_host.launch()
    until(lambda: own_host.lines('is not the one this compute knew'), 30, 'it is loud again')
    assert {each: own_host.qemu(each) for each in qemus} == qemus
    assert own_host.lab.etcd('/') == {}
    own_host.kill(signal.SIGTERM)
    own_host.launch('', '--accept-new-etcd')
    own_host.wait_ready()
    for instance in qemus:
        own_host.reached(instance, 'active', fault=None)
    assert {each: own_host.qemu(each) for each in qemus} == qemus
    own_host.settled()
    own_host.restart()
    own_host.ask_destroy(one, two)
    for instance in qemus:
        own_host.reached(instance, 'gone')
        own_host.nothing_of(instance)
    own_host.settled()
