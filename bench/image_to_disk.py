"""image-to-disk: from a cached image to a disk, against `qemu-img create -b` and a copy.

Our side is a worker's part of a build: look the image up in the cache, hold it, and make an overlay on it by libvirt.
`asked` checks with the image's server for a newer one; `pinned` has a URL with #sha256= and asks no server. All sides
run in turn on one lab host. Targets: at most 1.8 times qemu-img if asked, 1.5 times if pinned; the copy has none.

    python bench/image_to_disk.py [ROUNDS] [--quick] [--json]      (as root; it makes a lab of its own and removes it)
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from lab import Lab, main
from result import Result, make_result, paired

from ecomp.agent.images import inspection
from ecomp.agent.images.cache import CacheLimits, ImageCache
from ecomp.agent.images.sources import make_egress_policy
from ecomp.compute_conf import load_compute
from ecomp.model.guest import GuestSpec
from ecomp.virt.libvirt_host import Libvirt

LAB = Lab('benchi')
MIB = 2**20
SIZES = (13, 600)
TARGETS = {'asked': 1.8, 'pinned': 1.5}
MAX_COPIES = 4


def measure_seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.monotonic()
    call()
    return time.monotonic() - start


def measure_all(rounds: int, server: str) -> Iterator[Result]:
    """Measure on the lab host."""
    config = load_compute(LAB.compute_yaml)
    state = config.state
    libvirt = Libvirt(state)
    cache = ImageCache(
        state / 'images', inspection.inspect, None, CacheLimits(2**40, 2**40), make_egress_policy(config)
    )
    for size in SIZES:
        yield from measure(size, rounds, server, libvirt, cache, state / 'images')
    libvirt.close()


def measure(
    size: int, rounds: int, server: str, libvirt: Libvirt, cache: ImageCache, directory: Path
) -> Iterator[Result]:
    """Measure all sides in turn."""
    url = f'{server}{size}.qcow2'
    content = hashlib.sha256(LAB.get_image(f'{size}.qcow2').read_bytes()).hexdigest()
    base, copy = directory / f'base-{content}.qcow2', directory / 'copy'
    disk = directory / f'{uuid.uuid4()}.qcow2'

    def ours(url: str) -> None:
        with cache.hold(url, lambda: None, lambda *_: None) as image:
            libvirt.create_disk(GuestSpec(disk.stem, 'bench', 1, 64, 1, image, 'qemu'))

    def overlay() -> None:
        command = ['qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'qcow2', '-b', str(base), str(disk), '1G']
        subprocess.run(command, check=True)

    def copied() -> None:
        subprocess.run(['cp', '--sparse=never', '--reflink=never', str(base), str(copy)], check=True)

    def once(make: Callable[[], object]) -> float:
        seconds = measure_seconds(make)
        libvirt.delete_disk(disk.stem)
        for path in (disk, copy):
            path.unlink(missing_ok=True)
        return seconds

    sides = {'asked': lambda: ours(url), 'pinned': lambda: ours(f'{url}#sha256={content}'), 'qemu-img': overlay}
    names = list(sides)
    for name in names:
        once(sides[name])  # the first of each fetches the image and warms caches
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        # Each side comes first in turn, and follows each other side.
        for name in names[number % 3 :] + names[: number % 3]:
            times[name].append(once(sides[name]))
    # Separately, because its writes keep the disk busy afterwards.
    copies = [once(copied) for _ in range(min(rounds, MAX_COPIES))]
    for name, target in TARGETS.items():
        yield paired('image-to-disk', f'{name}, {size} MB', times[name], times['qemu-img'], target)
    yield make_result('image-to-disk', f'a plain copy, {size} MB', copies, None)


def make_image(path: Path, size: int) -> None:
    """Make a qcow2 of `size` MiB of random bytes."""
    raw = path.with_suffix('.raw')
    with raw.open('wb') as file:
        for _ in range(size):
            file.write(os.urandom(MIB))
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(path)], check=True)
    raw.unlink()


def prepare() -> None:
    """Make the images of the lab's web server."""
    for size in SIZES:
        make_image(LAB.get_image(f'{size}.qcow2'), size)


if __name__ == '__main__':
    main(LAB, measure_all, prepare, 60, quick=15)
