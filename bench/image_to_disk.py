"""image-to-disk: from a cached image to a disk ready to attach, against `qemu-img create -b`, and against a plain copy.

Ours is what a worker does of a build: the image is looked up in the cache, held, and an overlay volume is made on it
by libvirt. `asked`: its server is asked whether it has still the same; `pinned`: its URL has #sha256=, and nobody is
asked. All sides run in turn on one lab host. Targets: at most 1.5 times qemu-img. The copy is there to be looked at.

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
from result import Result, figure, paired

from ecomp.agent.images import inspection
from ecomp.agent.images.cache import CacheLimits, ImageCache
from ecomp.agent.images.connections import reach_of
from ecomp.compute_conf import load_compute
from ecomp.model.guest import GuestSpec
from ecomp.virt.libvirt_host import Libvirt

LAB = Lab('benchi')
MIB = 2**20
SIZES = (13, 600)
TARGET = 1.5
COPIES = 4


def timed(do: Callable[[], object]) -> float:
    """Seconds it takes."""
    began = time.monotonic()
    do()
    return time.monotonic() - began


def inside(rounds: int, server: str) -> Iterator[Result]:
    """The measuring itself, on the lab host."""
    config = load_compute(LAB.compute_yaml)
    state = config.state
    libvirt = Libvirt(state)
    cache = ImageCache(state / 'images', inspection.inspect, None, CacheLimits(2**40, 2**40), reach_of(config))
    for size in SIZES:
        yield from measure(size, rounds, server, libvirt, cache, state / 'images')
    libvirt.close()


def measure(
    size: int, rounds: int, server: str, libvirt: Libvirt, cache: ImageCache, directory: Path
) -> Iterator[Result]:
    """All sides in turn."""
    url = f'{server}{size}.qcow2'
    content = hashlib.sha256(LAB.image(f'{size}.qcow2').read_bytes()).hexdigest()
    base, copy = directory / f'base-{content}.qcow2', directory / 'copy'
    disk = directory / f'{uuid.uuid4()}.qcow2'

    def ours(url: str) -> None:
        with cache.held(url, lambda: None, lambda *_: None) as images:
            for image in images:
                assert image is not None, 'the server has no newer one'
                libvirt.create_disk(GuestSpec(disk.stem, 'bench', 1, 64, 1, image, 'qemu'))

    def overlay() -> None:
        command = ['qemu-img', 'create', '-q', '-f', 'qcow2', '-F', 'qcow2', '-b', str(base), str(disk), '1G']
        subprocess.run(command, check=True)

    def copied() -> None:
        subprocess.run(['cp', '--sparse=never', '--reflink=never', str(base), str(copy)], check=True)

    def once(make: Callable[[], object]) -> float:
        seconds = timed(make)
        libvirt.delete_disk(disk.stem)
        for left in (disk, copy):
            left.unlink(missing_ok=True)
        return seconds

    sides = {'asked': lambda: ours(url), 'pinned': lambda: ours(f'{url}#sha256={content}'), 'qemu-img': overlay}
    names = list(sides)
    for name in names:
        once(sides[name])  # the first of each fetches the image and warms caches
    taken: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        # Each side comes first in turn, and after each other.
        for name in names[number % 3 :] + names[: number % 3]:
            taken[name].append(once(sides[name]))
    # By itself, for what it writes keeps the machine busy behind it.
    copies = [once(copied) for _ in range(min(rounds, COPIES))]
    for name in ('asked', 'pinned'):
        yield paired('image-to-disk', f'{name}, {size} MB', taken[name], taken['qemu-img'], TARGET)
    yield figure('image-to-disk', f'a plain copy, {size} MB', copies, None)


def make_image(path: Path, size: int) -> None:
    """A qcow2 of that many MB of random bytes."""
    raw = path.with_suffix('.raw')
    with raw.open('wb') as file:
        for _ in range(size):
            file.write(os.urandom(MIB))
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(path)], check=True)
    raw.unlink()


def prepare() -> None:
    """The images, on the lab's web server."""
    for size in SIZES:
        make_image(LAB.image(f'{size}.qcow2'), size)


if __name__ == '__main__':
    main(LAB, inside, prepare, 60, quick=15)
