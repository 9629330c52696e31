"""Fixtures with real libvirt: the labs of scenario and fault tests. See plan.LAB_GROUPS."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import yaml

from tests.kit.boot_sectors import HALT, make_boot_disk
from tests.kit.hypervisor import HOST_INVENTORY, Hypervisor
from tests.kit.lab import Lab, make_lab_name
from tests.kit.slow_images import SlowImages

# The ssh key that hosts give to guests of the scenario lab.
SSH_KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGOd6V0cVCYrYWIwTNsw7vbFLXN1Fy9CZtGLdpB1YP1q story@lab'
# The size of the file system for images of the second host.
SMALL_IMAGES_MB = 8


@contextmanager
def start_lab(
    name: str, size: int, guest_image: Path, prepare: Callable[[Path], None] = lambda _: None
) -> Iterator[Lab]:
    with closing(Lab(name, size, prepare)) as lab:
        (lab.directory / 'images/guest.qcow2').write_bytes(guest_image.read_bytes())
        (lab.directory / 'images/idle.raw').write_bytes(make_boot_disk(HALT))
        yield lab


@pytest.fixture(scope='session')
def shared_lab(guest_image: Path) -> Iterator[Lab]:
    """Three hosts whose guests get our ssh key and user-data."""
    if os.geteuid() != 0:
        pytest.skip('hypervisors in namespaces need root')

    def write_metadata(directory: Path) -> None:
        # elab keeps files that exist already.
        for number in (1, 2, 3):
            conf = directory / f'hv{number}/mdserver.conf'
            conf.parent.mkdir(parents=True)
            conf.write_text(f'[mdserver]\nuser-data = user-data\n\n[public-keys]\ndefault = {SSH_KEY}\n')

    with start_lab(make_lab_name('stories'), 3, guest_image, write_metadata) as lab:
        yield lab


@pytest.fixture
def lab(shared_lab: Lab) -> Iterator[Lab]:
    yield shared_lab
    shared_lab.start_ecomputes()
    requested = [key.rsplit('/', 1)[1] for key in shared_lab.read_etcd('/hosts/')]
    shared_lab.destroy(*requested)
    for key, value in shared_lab.read_etcd('/instances/').items():
        if json.loads(value)['state'] == 'error':
            shared_lab.destroy(key.rsplit('/', 1)[1])
    shared_lab.check()


@pytest.fixture(scope='session')
def hypervisors() -> Iterator[tuple[Hypervisor, Hypervisor]]:
    """Two hosts. The second has a small file system for images, which a test may enlarge."""
    if os.geteuid() != 0:
        pytest.skip('hypervisors in namespaces need root')

    def mount_small(directory: Path) -> None:
        # Before the host is made: its daemons get their view of the file systems when they start.
        small = directory / 'hv2/state/images'
        small.mkdir(parents=True)
        subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={SMALL_IMAGES_MB}m', 'tmpfs', str(small)], check=True)

    with closing(Lab(make_lab_name('faults'), 2, mount_small)) as lab:
        (lab.directory / 'images/idle.raw').write_bytes(make_boot_disk(HALT))
        pair = Hypervisor(lab, 'hv1'), Hypervisor(lab, 'hv2')
        for hypervisor in pair:
            hypervisor.compute = lab.read_compute(hypervisor.name)
            config = hypervisor.directory / 'compute.yaml'
            config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), 'inventory': HOST_INVENTORY}))
            hypervisor.kill()
            hypervisor.launch()
        for hypervisor in pair:
            hypervisor.wait_ready()
        yield pair


@pytest.fixture
def host(hypervisors: tuple[Hypervisor, Hypervisor]) -> Iterator[Hypervisor]:
    yield from _use_host(hypervisors[0])


@pytest.fixture
def small_host(hypervisors: tuple[Hypervisor, Hypervisor]) -> Iterator[Hypervisor]:
    yield from _use_host(hypervisors[1])


def _use_host(host: Hypervisor) -> Iterator[Hypervisor]:
    host.mark_log()
    yield host
    host.reset()
    host.lab.check()


@pytest.fixture
def slow_images(hypervisors: tuple[Hypervisor, Hypervisor], tmp_path: Path) -> Iterator[SlowImages]:
    """The lab's images, of which only half is sent before release()."""
    with SlowImages(hypervisors[0].lab, tmp_path) as server:
        yield server
