"""A state directory in memory, with what the product's Memory and GuestData use of it."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from tests.model.acting import Call
from tests.model.world import World


class Disk:
    """The files of one host. A write is atomic and durable."""

    def __init__(self, world: World, whose: str) -> None:
        self.world = world
        self.owner = whose
        self.files: dict[str, str] = {}
        world.state_parts.append(lambda: tuple(self.files.items()))

    def make_path(self, path: str) -> VirtualPath:
        return VirtualPath(self, path)


class VirtualPath(PurePosixPath):
    disk: Disk

    def __new__(cls, disk: Disk, path: str) -> VirtualPath:
        virtual = super().__new__(cls, path)
        virtual.disk = disk
        return virtual

    def __truediv__(self, name: Any) -> VirtualPath:
        return VirtualPath(self.disk, f'{self}/{name}')

    def mkdir(self, *_: object, **__: object) -> None:
        """Do nothing: there are no directories, only file names."""

    def glob(self, pattern: str) -> Iterator[VirtualPath]:
        paths = [VirtualPath(self.disk, file) for file in sorted(self.disk.files)]
        return (path for path in paths if str(path.parent) == str(self) and fnmatch(path.name, pattern))

    def read_text(self) -> str:
        if str(self) not in self.disk.files:
            raise FileNotFoundError(2, 'No such file or directory', str(self))
        return self.disk.files[str(self)]

    def read_bytes(self) -> bytes:
        return self.read_text().encode()

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok:
            self.read_text()
        self.disk.files.pop(str(self), None)


def write_within_step(path: VirtualPath, text: str) -> None:
    """Write a file within the current step, so that no other actor acts before it."""
    path.disk.files[str(path)] = text


def write_as_step(path: VirtualPath, text: str) -> None:
    """Write a file in a step of its own: the writer may be killed before it."""

    def write() -> None:
        path.disk.files[str(path)] = text

    path.disk.world.call(Call('disk', ('write', path.disk.owner, path.name, text), writes=True), write)
