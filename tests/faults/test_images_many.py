"""F23: an image that changes, and many builds of one: one download for all, and guests keep the base they have."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from tests.kit.boot_sectors import HALT, boot_disk
from tests.kit.hypervisor import SMALL, SOON, Hypervisor
from tests.kit.images import MIB
from tests.kit.lab import Lab, lab_name
from tests.kit.servers import PATIENCE, until
from tests.kit.slow_images import SlowImages

pytestmark = [
    pytest.mark.skipif(
        shutil.which('qemu-img') is None, reason='qemu-img makes the images: apt-get install qemu-utils'
    ),
]


def test_an_image_that_changes(host: Hypervisor) -> None:
    """F23: another image at the same URL: it is built from now on; guests keep the base they have (libvirt)"""
    served = host.lab.directory / 'images' / 'changes.raw'
    try:
        served.write_bytes(boot_disk(HALT))
        first = host.place('changes.raw')
        host.reached(first, 'active')
        pid = host.qemu(first)
        base = backing(host, first)
        before = base.read_bytes()
        again = host.place('changes.raw')
        host.reached(again, 'active')
        assert backing(host, again) == base
        changed = boot_disk(b'\xf4\xeb\xfd\x90')
        served.write_bytes(changed)
        later = served.stat().st_mtime + 10
        os.utime(served, (later, later))  # the server says it in seconds, and we are quicker
        second = host.place('changes.raw')
        host.reached(second, 'active')
        assert (backing(host, first), base.read_bytes()) == (base, before)
        assert backing(host, second).read_bytes() == changed
        assert host.qemu(first) == pid
    finally:
        served.unlink(missing_ok=True)


def backing(host: Hypervisor, instance: str) -> Path:
    """The base volume under an instance's disk."""
    shown = subprocess.run(
        ['qemu-img', 'info', '-U', str(host.disk(instance))], check=True, capture_output=True, text=True
    ).stdout
    return next(Path(line.partition(': ')[2]) for line in shown.splitlines() if line.startswith('backing file: '))


def test_two_builds_of_one_image(host: Hypervisor, slow_images: SlowImages) -> None:
    """F23: two builds of one image at once are one download; its worker killed in it: another downloads it (libvirt)"""
    host.plain()
    url = slow_images.url('idle.raw?two-builds')
    both = [host.place(url), host.place(url)]
    worker = host.downloader()
    parts = list((host.state / 'images').glob('*.part'))
    assert len(parts) == 1
    os.kill(worker, signal.SIGKILL)
    # The other one has waited for the lock, and now downloads; what was half there is not taken for whole.
    until(lambda: host.downloader() != worker, SOON, 'another worker downloads')
    slow_images.go_on()
    for instance in both:
        host.reached(instance, 'active')
    assert backing(host, both[0]) == backing(host, both[1])
    assert list((host.state / 'images').glob('*.part')) == []
    assert backing(host, both[0]).read_bytes() == (host.lab.directory / 'images/idle.raw').read_bytes()


SIZE = 8 * MIB


def padded(path: Path, size: int) -> Path:
    """A disk that boots and halts, filled up with random bytes."""
    with path.open('wb') as file:
        file.write(boot_disk(HALT))
        for _ in range(size // MIB - 1):
            file.write(os.urandom(MIB))
    return path


@pytest.mark.slow
def test_many_builds_of_one_cold_image(host: Hypervisor, slow_images: SlowImages) -> None:
    """F23: eight builds of a cold image at once: one download, overlays for all, and others do not wait (libvirt)"""
    host.plain()
    served = padded(host.lab.directory / 'images/big.raw', SIZE)
    try:
        with ThreadPoolExecutor(4) as threads:
            instances = list(threads.map(lambda _: host.place(slow_images.url('big.raw')), range(5)))
        for instance in instances:
            host.reached(instance, 'building')
        # More builds than workers wait for the server, and one of them does so in a worker.
        host.running()
        progress = {'stage': 'image', 'done': SIZE // 2, 'total': SIZE}
        seen = until(lambda: [each for each in instances if host.record(each)['progress'] == progress], SOON, 'is told')
        for doomed in (seen[0], next(each for each in instances if each != seen[0])):
            instances.remove(doomed)
            host.ask_destroy(doomed)
            began = time.monotonic()
            host.reached(doomed, 'gone')
            assert time.monotonic() - began < PATIENCE * 10, 'a silent server keeps nobody'
            host.nothing_of(doomed)
        slow_images.go_on()
        for instance in instances:
            assert host.reached(instance, 'active')['progress'] is None
        assert len(slow_images.sent()) == 1
        bases = {backing(host, instance) for instance in instances}
        assert [each.name for each in bases] == [f'base-{hashlib.sha256(served.read_bytes()).hexdigest()}.raw']
        host.settled()
    finally:
        served.unlink()


@pytest.mark.slow
def test_thirty_builds_on_three_hosts(tmp_path: Path) -> None:
    """F23: thirty builds of a cold image of 500 MB on three hosts: one download a host, thirty overlays (libvirt)"""
    if os.geteuid() != 0:
        pytest.skip('hypervisors in namespaces need root')
    lab = Lab(lab_name('thirty'), 3)
    try:
        hosts = [Hypervisor(lab, name) for name in lab.hosts]
        for each in hosts:
            each.compute = lab.compute(each.name)
            config = each.directory / 'compute.yaml'
            # Ten each: wherever placement's order puts them, thirty fit in no other way.
            room = {'VCPU': 10, 'MEMORY_MB': 640, 'DISK_GB': 10}
            config.write_text(yaml.safe_dump({**yaml.safe_load(config.read_text()), 'inventory': room}))
            each.restart()
        padded(lab.directory / 'images/big.raw', 500 * MIB)
        with SlowImages(lab, tmp_path) as server:
            server.go_on()
            with ThreadPoolExecutor(8) as threads:
                placed = list(threads.map(lambda _: lab.place(SMALL, server.url('big.raw')), range(30)))
            bases = set()
            for name, instance in placed:
                host = next(each for each in hosts if each.name == name)
                host.reached(instance, 'active', 300)
                bases.add(backing(host, instance))
            assert len(bases) == 3
            assert len(server.sent()) == len(set(server.sent())) == 3
            assert all(len([where for where, _ in placed if where == each.name]) == 10 for each in hosts)
        lab.check()
    finally:
        lab.close()
