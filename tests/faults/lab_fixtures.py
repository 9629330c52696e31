"""Fixtures of the fault rows on real libvirt: two hosts of one lab, made once a session."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from tests.boot_sectors import HALT, boot_disk
from tests.faults.hypervisor import ROOM, Hypervisor
from tests.faults.slow_images import SlowImages
from tests.scenario.lab import ROOT, Lab

SMALL_MB = 8
"""The size of the second host's file system of images."""


@pytest.fixture(scope='session')
def hypervisors() -> Iterator[tuple[Hypervisor, Hypervisor]]:
    """Two hosts. The second has its images on a small file system of their own, which grows if it is told to."""
    if os.geteuid() != 0:
        pytest.skip('hypervisors in namespaces need root')
    name = f'ecflv{os.getpid()}'
    # Before the host is made: its daemons get their view of the machine's file systems when they start.
    small = ROOT / name / 'hv2/state/images'
    small.mkdir(parents=True)
    with ExitStack() as undo:
        undo.callback(subprocess.run, ['umount', str(small)], check=True)
        subprocess.run(['mount', '-t', 'tmpfs', '-o', f'size={SMALL_MB}m', 'tmpfs', str(small)], check=True)
        lab = Lab(name, 2)
        undo.pop_all()
        undo.callback(lab.close)
        undo.callback(subprocess.run, ['umount', str(small)], check=True)
        (lab.directory / 'images/idle.raw').write_bytes(boot_disk(HALT))
        found = Hypervisor(lab, 'hv1'), Hypervisor(lab, 'hv2')
        for each in found:
            each.compute = lab.compute(each.name)
            config = each.directory / 'compute.yaml'
            config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), 'inventory': ROOM}))
            each.kill()
            each.launch()
        for each in found:
            each.wait_ready()
        yield found


@pytest.fixture
def host(hypervisors: tuple[Hypervisor, Hypervisor]) -> Iterator[Hypervisor]:
    """A host, empty before and after."""
    hypervisors[0].mark()
    yield hypervisors[0]
    hypervisors[0].clear()
    hypervisors[0].lab.check()


@pytest.fixture
def small_host(hypervisors: tuple[Hypervisor, Hypervisor]) -> Iterator[Hypervisor]:
    """A host with little room for disks, empty before and after."""
    hypervisors[1].mark()
    yield hypervisors[1]
    hypervisors[1].clear()
    hypervisors[1].lab.check()


@pytest.fixture
def slow_images(hypervisors: tuple[Hypervisor, Hypervisor], tmp_path: Path) -> Iterator[SlowImages]:
    """The lab's images, of which only half comes before go_on()."""
    with SlowImages(hypervisors[0].lab, tmp_path) as server:
        yield server
