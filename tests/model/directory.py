"""A state directory in memory, as far as the product's Memory and GuestData ask for one."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import PurePosixPath
from typing import Any

from tests.model.acting import Call
from tests.model.world import World


class Disk:
    """The files of one host: what is written is there, whole, from then on."""

    def __init__(self, world: World, whose: str) -> None:
        self.world = world
        self.whose = whose
        self.files: dict[str, str] = {}
        world.prints.append(lambda: tuple(self.files.items()))

    def at(self, path: str) -> VirtualPath:
        return VirtualPath(self, path)


class VirtualPath(PurePosixPath):
    """What the product asks of a pathlib.Path."""

    disk: Disk

    def __new__(cls, disk: Disk, path: str) -> VirtualPath:
        made = super().__new__(cls, path)
        made.disk = disk
        return made

    def __truediv__(self, name: Any) -> VirtualPath:
        return VirtualPath(self.disk, f'{self}/{name}')

    def mkdir(self, *_: object, **__: object) -> None:
        """There are no directories, only names."""

    def glob(self, pattern: str) -> Iterator[VirtualPath]:
        there = [VirtualPath(self.disk, each) for each in sorted(self.disk.files)]
        return (each for each in there if str(each.parent) == str(self) and fnmatch(each.name, pattern))

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


def write_quietly(path: VirtualPath, text: str) -> None:
    """Written, and nobody may come between."""
    path.disk.files[str(path)] = text


def write_durably(path: VirtualPath, text: str) -> None:
    """The same as a step of its own: whoever writes may be killed before."""

    def write() -> None:
        path.disk.files[str(path)] = text

    path.disk.world.call(Call('disk', ('write', path.disk.whose, path.name, text), writes=True), write)
