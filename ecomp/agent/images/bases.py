"""The base volumes in the storage pool's directory, what is known of the URLs they came from, and the room they take.

base-<SHA-256 of its content>.<format>  a base volume. Its time of modification is that of its last use. Whoever uses it
                                        has an flock of it, until an overlay refers to it
base-<of its URL>.part                  a download; as long as it will be
.url-<of its URL>.json                  what a URL had when it was last asked
.read-<SHA-256>, .bad-<SHA-256>         when it was last read as a whole; that it is not what it was (scrub.py)
base-<of its URL>.<format>              a base volume as they were named before: good for the overlays that are on it
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ecomp.agent.images.sources import Version
from ecomp.agent.locks import try_lock
from ecomp.agent.state import write_durably
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.guest import BaseImage
from ecomp.model.json_object import load_object
from ecomp.virt.image import chain, inspected

VERSION = 1
FORMATS = ('qcow2', 'raw')
LOCK = '.lock'
BAD = '.bad-'
GB = 2**30


@dataclass(frozen=True)
class Entry:
    """What a URL had when it was last asked: the content, how many bytes, and the server's version of it."""

    sha256: str
    size: int
    version: Version


@dataclass(frozen=True)
class Held:
    """A base volume that is not evicted until close()."""

    image: BaseImage
    descriptor: int

    def close(self) -> None:
        """Let it go."""
        os.close(self.descriptor)


class Bases:
    """The files in `directory`. `limit` is how many bytes base volumes and downloads may take together."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit

    @contextmanager
    def asking(self, url: str, checkpoint: Callable[[], None]) -> Iterator[None]:
        """Nobody else asks for this URL inside. `checkpoint` is called while somebody does."""
        # Not a blocking lock: a destroy must not wait for another instance's download.
        while (lock := try_lock(self._directory / LOCK, self.part(url).stem)) is None:
            checkpoint()
            time.sleep(0.1)
        try:
            yield
        finally:
            os.close(lock)

    def part(self, url: str) -> Path:
        """Where a download of this URL is written."""
        return self._directory / f'base-{_key(url)}.part'

    def entry(self, url: str) -> Entry | None:
        """What the URL had when it was last asked; None if that is not known, or cannot be read."""
        try:
            named, entry = _read(self._entry_file(url))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # it is asked again, and then known
        return entry if named == url else None

    def learn(self, url: str, entry: Entry) -> None:
        """Write down what the URL has now. OSError."""
        text = json.dumps({'version': VERSION, 'url': url, 'found': asdict(entry)})
        write_durably(self._entry_file(url), text + '\n')

    def still(self, url: str) -> None:
        """Write down that the URL has still the same, as of now."""
        with suppress(OSError):
            os.utime(self._entry_file(url))

    def asked(self, url: str) -> object:
        """What changes whenever somebody learns what the URL has."""
        try:
            found = self._entry_file(url).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def has(self, entry: Entry) -> bool:
        """Whether that content is here, whole."""
        sizes = [_status(self._path(entry.sha256, each))[1] for each in FORMATS]
        return entry.size in sizes and not self._bad(entry.sha256).exists()

    def scrubbed(self, sha256: str) -> float:
        """When the base volume with this content was last read as a whole, in seconds since the epoch; 0: never."""
        with suppress(FileNotFoundError):
            return self._read_file(sha256).stat().st_mtime
        return 0.0

    def judge(self, sha256: str, good: bool) -> None:
        """It was read as a whole just now: if it is not `good`, it is not taken any more. OSError."""
        if good:
            self._bad(sha256).unlink(missing_ok=True)
        else:
            self._bad(sha256).touch()
        self._read_file(sha256).touch()

    def take(self, sha256: str, size: int | None = None) -> Held | None:
        """The base volume with this content (and of this size, if it is known) and a hold of it; None if not here."""
        with self._locked():
            if self._bad(sha256).exists():
                return None
            for path in (self._path(sha256, each) for each in FORMATS):
                with suppress(FileNotFoundError):
                    if size in (None, path.stat().st_size):
                        return _held(path)
        return None

    def keep(self, part: Path, sha256: str, format: str) -> Held:
        """Make a download that is whole a base volume, unless its content is one already; a hold of it. OSError."""
        path = self._path(sha256, format)
        with self._locked():
            bad = self._bad(sha256).exists()
            if bad or not path.exists() or path.stat().st_size != part.stat().st_size:
                # Readable by QEMU's user; an image is no secret, the overlays are.
                part.chmod(0o644)
                # In the place of a bad one: guests that are on it have the good one from their next start on.
                part.rename(path)
                _sync(self._directory)
                self._bad(sha256).unlink(missing_ok=True)
                with suppress(OSError):  # it is read once more, then
                    self._read_file(sha256).touch()
            return _held(path)

    def reserve(self, descriptor: int, size: int) -> None:
        """See that a download may become `size` bytes long, and make it so. BuildFailed if it may not."""
        with self._locked():
            self._make_room(size - os.fstat(descriptor).st_size, size)
            os.ftruncate(descriptor, size)

    def sweep(self) -> None:
        """Remove what a worker left that was killed in the middle of a download, or while it made room for one."""
        with self._locked():
            self._forget_evicted()
        for part in self._directory.glob('base-*.part'):
            with suppress(OSError), idle(part) as nobody:
                if nobody:
                    part.unlink(missing_ok=True)

    def _make_room(self, more: int, size: int) -> None:
        if size > self._limit:
            raise BuildFailed('image', f'the image is {_gb(size)}, and `image_cache:` here is {_gb(self._limit)}')
        found = {path: _status(path) for each in (*FORMATS, 'part') for path in self._directory.glob(f'base-*.{each}')}
        used = sum(size for _, size in found.values())
        if used + more <= self._limit:
            return
        in_use = self._in_use()
        doomed: dict[Path, int] = {}
        for path in sorted(found, key=lambda each: found[each]):
            if path.suffix == '.part' or os.path.realpath(path) in in_use:
                continue
            if used + more <= self._limit:
                break
            with suppress(BlockingIOError):
                doomed[path] = _flocked(path, fcntl.LOCK_EX)
                used -= found[path][1]
        try:
            if used + more > self._limit:
                raise BuildFailed(
                    'image',
                    f'the image is {_gb(size)}; of the {_gb(self._limit)} that `image_cache:` is here, '
                    f'{_gb(used + more - size)} are base volumes of disks or being downloaded, and cannot go',
                )
            for path in doomed:
                path.unlink(missing_ok=True)
                failpoint('image-evicted')
        finally:
            for descriptor in doomed.values():
                os.close(descriptor)
        self._forget_evicted()

    def _in_use(self) -> set[str]:
        """Every file that a qcow2 in the pool lies on. What cannot be read may lie on anything: OSError."""
        return {str(below) for path in self._directory.iterdir() if path.is_file() for below in chain(path)}

    def _forget_evicted(self) -> None:
        for path in self._directory.glob('.url-*.json'):
            with suppress(OSError, ValueError, KeyError, TypeError):
                _, entry = _read(path)
                if not self._is_there(entry.sha256):
                    path.unlink()
        for path in [*self._directory.glob('.read-*'), *self._directory.glob(f'{BAD}*')]:
            if not self._is_there(path.name.partition('-')[2]):
                path.unlink(missing_ok=True)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else looks for a base volume, makes one or evicts one inside; that is short."""
        while (lock := try_lock(self._directory / LOCK, 'bases')) is None:
            time.sleep(0.002)
        try:
            yield
        finally:
            os.close(lock)

    def _path(self, sha256: str, format: str) -> Path:
        return self._directory / f'base-{sha256}.{format}'

    def _is_there(self, sha256: str) -> bool:
        return any(self._path(sha256, each).exists() for each in FORMATS)

    def _read_file(self, sha256: str) -> Path:
        return self._directory / f'.read-{sha256}'

    def _bad(self, sha256: str) -> Path:
        return self._directory / f'{BAD}{sha256}'

    def _entry_file(self, url: str) -> Path:
        return self._directory / f'.url-{_key(url)}.json'


def bad(directory: Path) -> list[str]:
    """The SHA-256s of the base volumes there that are not what they were, and are taken for no new disk."""
    return sorted(path.name.removeprefix(BAD) for path in directory.glob(f'{BAD}*'))


@contextmanager
def idle(part: Path) -> Iterator[bool]:
    """Whether nobody is downloading to this .part file; if so, nobody begins inside. Always true of other files."""
    try:
        lock = try_lock(part.parent / LOCK, part.stem, create=False)
    except FileNotFoundError:
        yield True
        return
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _read(path: Path) -> tuple[str, Entry]:
    """The URL and what it had. OSError, ValueError, KeyError or TypeError if that is not what is in the file."""
    data = load_object(path.read_bytes())
    found, version = data['found'], Version(**data['found']['version'])
    sane = type(found['size']) is int and isinstance(version.etag, str) and isinstance(version.modified, str)
    if data['version'] != VERSION or not re.fullmatch('[0-9a-f]{64}', found['sha256']) or not sane:
        raise ValueError(f'{path}: not what is known of a URL')
    return data['url'], Entry(found['sha256'], found['size'], version)


def _held(path: Path) -> Held:
    descriptor = _flocked(path, fcntl.LOCK_SH)
    try:
        os.utime(descriptor)
        if os.fstat(descriptor).st_uid != os.geteuid():  # libvirt gave it to QEMU, at an earlier ecomp's start
            os.fchown(descriptor, os.geteuid(), os.getegid())
        return Held(inspected(path), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _flocked(path: Path, how: int) -> int:
    """The file, open with an flock. BlockingIOError if others have it locked otherwise."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _status(path: Path) -> tuple[int, int]:
    """When a file was last used, and its size."""
    try:
        found = path.stat()
    except FileNotFoundError:  # a download has just ended
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _key(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def _gb(size: int) -> str:
    return f'{size / GB:.1f} GB' if size >= GB / 10 else f'{size / 2**20:.1f} MB'
