"""The base volumes in the storage pool's directory, what is known of the URLs they came from, and the room they take.

base-<SHA-256 of its content>.<format>  a base volume. Its time of modification is that of its last use. Whoever uses it
                                        has an flock of it, until an overlay refers to it
base-<of its URL>.part                  a download; as long as it will be, or is sure to find room for
.url-<of its URL>.json                  what a URL had when it was last asked
.asked-<of its URL>                     when its server was asked what it answered last, and in which boot
.away-<of its URL>                      when its server was last asked and gave no answer
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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ecomp.agent.images.sources import Version
from ecomp.agent.images.transfer import Download
from ecomp.agent.locks import try_lock
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.files import boot_id, sync, write_durably
from ecomp.model.allocation import GIB, MIB
from ecomp.model.guest import BaseImage
from ecomp.model.json_object import load_object
from ecomp.virt.image import chain, inspected

VERSION = 1
FORMATS = ('qcow2', 'raw')
LOCK = '.lock'
BAD = '.bad-'


@dataclass(frozen=True)
class BaseHold:
    """A base volume, and the open file whose flock keeps it from being evicted until close()."""

    image: BaseImage
    descriptor: int

    def close(self) -> None:
        """Allow that the base volume is evicted."""
        os.close(self.descriptor)


class Bases:
    """The base volumes in `directory`. `limit` is in bytes, of them and downloads together: the oldest are evicted."""

    def __init__(self, directory: Path, limit: int) -> None:
        self._directory = directory
        self._limit = limit

    def locked_url(self, url: str, checkpoint: Callable[[], None]) -> AbstractContextManager[None]:
        """Keep other processes and threads from asking for this URL; `checkpoint` is called while one of them does."""
        # Not a blocking lock: a destroy must not wait for another instance's download.
        return self._locked(self.part(url).stem, 0.1, checkpoint)

    def part(self, url: str) -> Path:
        """The path a download of this URL is written to."""
        return self._directory / f'base-{_key(url)}.part'

    def entry(self, url: str) -> Download | None:
        """What learn() wrote down last for the URL; None if nothing is there, or it cannot be read."""
        try:
            named, entry = _read(self._entry_file(url))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # it is asked again, and then known
        return entry if named == url else None

    def learn(self, url: str, entry: Download, began: float) -> None:
        """Write down what image the URL has, as its server said when asked at `began`, of time.monotonic(). OSError."""
        text = json.dumps({'version': VERSION, 'url': url, 'found': asdict(entry)})
        write_durably(self._entry_file(url), text + '\n')
        self._note_asked(url, began)

    def note_unchanged(self, url: str, began: float) -> None:
        """Write down that the URL has the same image as when learn() was called, as its server said when so asked."""
        with suppress(OSError):
            os.utime(self._entry_file(url))
        self._note_asked(url, began)

    def is_answered(self, url: str, since: float) -> bool:
        """Whether the server of the URL answered what it was asked after `since`, by whatever process of this boot.

        Another boot's time.monotonic() is another clock.
        """
        try:
            boot, began = self._asked_file(url).read_text().split()
            return boot == boot_id() and float(began) > since
        except (OSError, ValueError):
            return False

    def _note_asked(self, url: str, began: float) -> None:
        with suppress(OSError):
            self._asked_file(url).write_text(f'{boot_id()} {began}')

    def stamp(self, url: str) -> object:
        """A value that is another one after each learn() or note_unchanged() of the URL, by whatever process."""
        try:
            found = self._entry_file(url).stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def note_away(self, url: str) -> None:
        """Write down that the URL's server gave no answer now; its image is here."""
        with suppress(OSError):
            self._away_file(url).write_text(str(time.monotonic()))  # all processes of a boot have the same

    def is_away(self, url: str, seconds: float) -> bool:
        """Whether that was written down in the last `seconds`, by whatever process."""
        try:
            since = time.monotonic() - float(self._away_file(url).read_text())
        except (OSError, ValueError):
            return False
        return 0 <= since < seconds  # what is of an earlier boot may be later

    def scrubbed(self, sha256: str) -> float:
        """When the base volume with this content was last read as a whole, in seconds since the epoch; 0: never."""
        with suppress(FileNotFoundError):
            return self._read_file(sha256).stat().st_mtime
        return 0.0

    def note_read(self, sha256: str, good: bool) -> None:
        """Note that the base volume was read as a whole now; one that is not `good` is not taken again. OSError."""
        if good:
            self._bad(sha256).unlink(missing_ok=True)
        else:
            self._bad(sha256).touch()
        self._read_file(sha256).touch()

    def take(self, sha256: str, size: int | None = None) -> BaseHold | None:
        """Hold the base volume with this content, of `size` bytes (None: of any size); None if it is not here."""
        with self._locked():
            if self._bad(sha256).exists():
                return None
            for path in (self._path(sha256, each) for each in FORMATS):
                with suppress(FileNotFoundError):
                    if size in (None, path.stat().st_size):
                        return _held(path)
        return None

    def keep(self, part: Path, sha256: str, format: str) -> BaseHold:
        """Make the whole download `part` a base volume, unless its content is one already, and hold it. OSError."""
        path = self._path(sha256, format)
        with self._locked():
            bad = self._bad(sha256).exists()
            if bad or not path.exists() or path.stat().st_size != part.stat().st_size:
                # Readable by QEMU's user; an image is no secret, the overlays are.
                part.chmod(0o644)
                # In the place of a bad one: guests that are on it have the good one from their next start on.
                part.rename(path)
                sync(self._directory)
                self._bad(sha256).unlink(missing_ok=True)
                with suppress(OSError):  # it is read once more, then
                    self._read_file(sha256).touch()
            return _held(path)

    def reserve(self, descriptor: int, size: int, ahead: int) -> int:
        """Make the open download `size` bytes long, evicting what must go for it; its length. BuildFailed: too much.

        It is up to `ahead` bytes longer, and a quarter of what is free at most: nothing is evicted for them.
        """
        with self._locked():
            free = self._make_room(size - os.fstat(descriptor).st_size, size)
            size += min(ahead, free // 4)  # what is ahead counts as used for other downloads
            os.ftruncate(descriptor, size)
            return size

    def sweep(self) -> None:
        """Remove what is left of downloads and evictions whose worker was killed."""
        with self._locked():
            self._forget_evicted()
        for part in self._directory.glob('base-*.part'):
            with suppress(OSError), idle(part) as nobody:
                if nobody:
                    part.unlink(missing_ok=True)

    def _make_room(self, more: int, size: int) -> int:
        """Evict what must go for `more` bytes of a download of `size`; the bytes that are free beside them."""
        if size > self._limit:
            raise BuildFailed('image', f'the image is {_gib(size)}, and `image_cache:` here is {_gib(self._limit)}')
        found = {path: _status(path) for each in (*FORMATS, 'part') for path in self._directory.glob(f'base-*.{each}')}
        used = sum(size for _, size in found.values())
        if used + more <= self._limit:
            return self._limit - used - more
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
                    f'the image is {_gib(size)}; of the {_gib(self._limit)} that `image_cache:` is here, '
                    f'{_gib(used + more - size)} are base volumes of disks or being downloaded, and cannot go',
                )
            for path in doomed:
                path.unlink(missing_ok=True)
                failpoint('image-evicted')
        finally:
            for descriptor in doomed.values():
                os.close(descriptor)
        self._forget_evicted()
        return self._limit - used - more

    def _in_use(self) -> set[str]:
        """Every file that a qcow2 in the pool lies on. OSError for one that cannot be read: it may lie on any."""
        found: set[str] = set()
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # another worker has just removed it, and it lies on nothing any more
                if path.is_file():
                    found.update(chain(path))
        return found

    def _forget_evicted(self) -> None:
        for path in self._directory.glob('.url-*.json'):
            with suppress(OSError, ValueError, KeyError, TypeError):
                _, entry = _read(path)
                if not self._is_there(entry.sha256):
                    path.unlink()
        for path in [*self._directory.glob('.away-*'), *self._directory.glob('.asked-*')]:
            if not path.with_name(f'.url-{path.name.rpartition("-")[2]}.json').exists():
                path.unlink(missing_ok=True)
        for path in [*self._directory.glob('.read-*'), *self._directory.glob(f'{BAD}*')]:
            if not self._is_there(path.name.partition('-')[2]):
                path.unlink(missing_ok=True)

    @contextmanager
    def _locked(
        self, what: str = 'bases', pause: float = 0.002, checkpoint: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """Hold the lock of this name, tried every `pause` seconds; `bases` is for finding, making and evicting them."""
        while (lock := try_lock(self._directory / LOCK, what)) is None:
            checkpoint()
            time.sleep(pause)
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

    def _asked_file(self, url: str) -> Path:
        return self._directory / f'.asked-{_key(url)}'

    def _away_file(self, url: str) -> Path:
        return self._directory / f'.away-{_key(url)}'

    def _entry_file(self, url: str) -> Path:
        return self._directory / f'.url-{_key(url)}.json'


def bad(directory: Path) -> list[str]:
    """The SHA-256s of the base volumes whose content has changed, which are used for no new disk."""
    return sorted(path.name.removeprefix(BAD) for path in directory.glob(f'{BAD}*'))


@contextmanager
def idle(part: Path) -> Iterator[bool]:
    """True if no process is downloading to this .part file, and none can begin before the block ends.

    Always true of other files.
    """
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


def _read(path: Path) -> tuple[str, Download]:
    """The URL and the entry in a file of learn()'s. OSError, ValueError, KeyError or TypeError for any other file."""
    data = load_object(path.read_bytes())
    found, version = data['found'], Version(**data['found']['version'])
    texts = version.etag, version.modified, version.answered
    sane = type(found['size']) is int and all(isinstance(each, str) for each in texts)
    if data['version'] != VERSION or not re.fullmatch('[0-9a-f]{64}', found['sha256']) or not sane:
        raise ValueError(f'{path}: not what is known of a URL')
    return data['url'], Download(found['sha256'], found['size'], version)


def _held(path: Path) -> BaseHold:
    descriptor = _flocked(path, fcntl.LOCK_SH)
    try:
        os.utime(descriptor)
        if os.fstat(descriptor).st_uid != os.geteuid():  # libvirt gave it to QEMU, at an earlier ecomp's start
            os.fchown(descriptor, os.geteuid(), os.getegid())
        return BaseHold(inspected(path), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _flocked(path: Path, how: int) -> int:
    """A descriptor of the file, with an flock of this kind. BlockingIOError if another process holds one against it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _status(path: Path) -> tuple[int, int]:
    """When a file was last used, in ns since the epoch, and its size in bytes; 0 and 0 if it is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:  # a download has just ended
        return 0, 0
    return found.st_mtime_ns, found.st_size


def _key(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def _gib(size: int) -> str:
    return f'{size / GIB:.1f} GiB' if size >= GIB / 10 else f'{size / MIB:.1f} MiB'
