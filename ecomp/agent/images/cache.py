"""The image cache: one base volume for each content, downloaded once however many builds ask for it, in any worker.

A download goes to a `.part` file, is hashed as it arrives, checked, made durable and renamed, so whatever has a base
volume's name is whole. For a URL whose image is cached the server is asked whether it still has the same; for one
with #sha256= only once. Base volumes are read again once a day, because all overlays share them: one whose content is
not what its name says is used for no new disk.

base-<SHA-256 of its content>.<format>  a base volume. Its time of modification is that of its last use. Whoever uses it
                                        has an flock of it, until an overlay refers to it
base-<of its URL>.part                  a download; as long as it will be, or is sure to find room for
.url-<of its URL>.json                  what a URL had when it was last asked
.asked-<of its URL>                     when its server was asked what it answered last, and in which boot
.away-<of its URL>                      when its server was last asked and gave no answer, and in which boot
.read-<SHA-256>, .bad-<SHA-256>         when it was last read as a whole; that its content has changed
base-<of its URL>.<format>              a base volume with its earlier name: good for the overlays that are on it
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ecomp.agent.images.connections import Reach
from ecomp.agent.images.download import Away, Download, Tell, Transfer, Version, source
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.files import boot_id, sync, try_lock, write_durably
from ecomp.model.allocation import GIB, MIB
from ecomp.model.guest import BaseImage
from ecomp.model.image import check_image, pinned
from ecomp.model.json_object import load_object
from ecomp.virt.image import chain, inspected

VERSION = 1
FORMATS = ('qcow2', 'raw')
LOCK = '.lock'
ASKED = '.asked-'
UNANSWERED = '.away-'
READ = '.read-'
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
            named, entry = _read(self._file('.url-', f'{_key(url)}.json'))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # it is asked again, and then known
        return entry if named == url else None

    def learn(self, url: str, entry: Download, began: float) -> None:
        """Write down what image the URL has, as its server said when asked at `began`, of time.monotonic(). OSError."""
        text = json.dumps({'version': VERSION, 'url': url, 'found': asdict(entry)})
        write_durably(self._file('.url-', f'{_key(url)}.json'), text + '\n')
        self.note(ASKED, url, began)

    def note(self, what: str, url: str, when: float) -> None:
        """Write down a time.monotonic(), which all processes of a boot have in common.

        ASKED: when that began which the URL's server answered; UNANSWERED: when it gave no answer, and its image is
        here.
        """
        with suppress(OSError):
            self._file(what, _key(url)).write_text(f'{boot_id()} {when}')

    def noted(self, what: str, url: str) -> float:
        """What note() wrote last in this boot, by whatever process; -inf for none, or for what cannot be so."""
        with suppress(OSError, ValueError):
            boot, when = self._file(what, _key(url)).read_text().split()
            if boot == boot_id() and float(when) <= time.monotonic():
                return float(when)
        return -math.inf

    def scrubbed(self, sha256: str) -> float:
        """When the base volume with this content was last read as a whole, in seconds since the epoch; 0: never."""
        with suppress(FileNotFoundError):
            return self._file(READ, sha256).stat().st_mtime
        return 0.0

    def note_read(self, sha256: str, good: bool) -> None:
        """Note that the base volume was read as a whole now; one that is not `good` is not taken again. OSError."""
        if good:
            self._file(BAD, sha256).unlink(missing_ok=True)
        else:
            self._file(BAD, sha256).touch()
        self._file(READ, sha256).touch()

    def take(self, sha256: str, size: int | None = None) -> BaseHold | None:
        """Hold the base volume with this content, of `size` bytes (None: of any size); None if it is not here."""
        with self._locked():
            if self._file(BAD, sha256).exists():
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
            bad = self._file(BAD, sha256).exists()
            if bad or not path.exists() or path.stat().st_size != part.stat().st_size:
                # Readable by QEMU's user; an image is no secret, the overlays are.
                part.chmod(0o644)
                # In the place of a bad one: guests that are on it have the good one from their next start on.
                part.rename(path)
                sync(self._directory)
                self._file(BAD, sha256).unlink(missing_ok=True)
                with suppress(OSError):  # it is read once more, then
                    self._file(READ, sha256).touch()
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
        for path in [*self._directory.glob(f'{UNANSWERED}*'), *self._directory.glob(f'{ASKED}*')]:
            if not path.with_name(f'.url-{path.name.rpartition("-")[2]}.json').exists():
                path.unlink(missing_ok=True)
        for path in [*self._directory.glob(f'{READ}*'), *self._directory.glob(f'{BAD}*')]:
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

    def _file(self, kind: str, name: str) -> Path:
        return self._directory / f'{kind}{name}'


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


log = logging.getLogger(__name__)

DAY, HOUR = 86_400.0, 3_600.0
CHUNK = 4 * 2**20  # bytes of one read
RATE = 64 * 2**20
"""Bytes a second that are read: few enough that guests hardly see it."""
NAME = re.compile(rf'base-([0-9a-f]{{64}})\.(?:{"|".join(FORMATS)})')


class Scrubber:
    """A thread that reads each base volume once a day, from start() to stop(). `rate` is in bytes a second."""

    def __init__(self, directory: Path, rate: float = RATE) -> None:
        self._directory = directory
        self._bases = Bases(directory, 0)
        self._rate = rate
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name='scrub', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a file it is in the middle of is read from its beginning the next time."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def scrub(self, now: float) -> None:
        """Read each base volume that was not read in the day before `now`, in seconds since the epoch."""
        for path in sorted(self._directory.glob('base-*')):
            named = NAME.fullmatch(path.name)
            # What was read later than now was read by a clock that is put back since: by more than a little it is old.
            if named is None or abs(now - self._bases.scrubbed(named[1])) < DAY:
                continue
            try:
                found = self._read(path)
                if found is None:
                    return
                self._bases.note_read(named[1], good=found == named[1])
            except FileNotFoundError:
                continue  # evicted meanwhile
            except OSError as error:
                log.error('%s cannot be read, or what came of it noted: %s', path, error.strerror)
                continue
            if found != named[1]:
                log.error(
                    '%s is not what it was when it was fetched: no disk is made of it any more, and the guests on it'
                    ' read what is there now: %s', path, ', '.join(self._users(path)) or 'none',
                )  # fmt: skip

    def _read(self, path: Path) -> str | None:
        """The SHA-256 of a file's content; None if stop() was called meanwhile."""
        digest = hashlib.sha256()
        with path.open('rb', buffering=0) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                if self._stopped.wait(len(chunk) / self._rate):
                    return None
        return digest.hexdigest()

    def _users(self, path: Path) -> list[str]:
        found = []
        for overlay in sorted(self._directory.glob('*.qcow2')):
            try:
                if os.path.realpath(path) in chain(overlay):
                    found.append(overlay.stem)
            except OSError:
                continue  # gone, or half made
        return found

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.scrub(time.time())
            self._stopped.wait(HOUR)


AWAY = 30.0
"""Seconds after a server gave no answer to any worker in which its cached image is used without asking."""

Checkpoint = Callable[[], None]


@dataclass(frozen=True)
class CacheLimits:
    """In bytes: `cache` of all base volumes and downloads together, `disk` of the largest disk of this host.

    An image above either is refused.
    """

    cache: int
    disk: int


@dataclass(eq=False)
class ImageCache:
    """The base volumes in `directory`. `inspect` reads a file's format and size, with a checkpoint it calls meanwhile.

    `local` is the directory that file:// URLs may point into, None for none; `reach` is where other URLs may.
    Errors: BuildFailed('image', reason), and what a checkpoint raises.
    """

    directory: Path
    inspect: Callable[[Path, Checkpoint], BaseImage]
    local: Path | None
    limits: CacheLimits
    reach: Reach

    def __post_init__(self) -> None:
        self._bases = Bases(self.directory, self.limits.cache)

    @contextmanager
    def held(
        self, url: str, checkpoint: Checkpoint, tell: Tell, since: float = math.inf
    ) -> Iterator[Iterator[BaseImage | None]]:
        """The base volumes to make a disk on of the image at a URL: each is there until the next is asked for.

        The last is the URL's image. Before it may come the one that is cached, to be used while its server
        is asked whether it is still that; if it is not, None comes: what was made on it is to be removed, for the new
        one may need the room. `checkpoint` is called at least once a second while one is asked for or fetched;
        `tell` gets how far a download is. A question of another's that began after `since`, of time.monotonic(), is
        this one's, too: the server is not asked again.
        """
        try:
            bare, pin = pinned(check_image(url))
        except ValueError as error:
            raise BuildFailed('image', str(error)) from error
        with closing(self._found(bare, pin, checkpoint, tell, since)) as found:
            yield found

    def sweep(self) -> None:
        """Remove what is left of downloads and evictions whose worker was killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._bases.sweep()

    def _found(
        self, url: str, pin: str | None, checkpoint: Checkpoint, tell: Tell, since: float
    ) -> Generator[BaseImage | None, None, None]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if pin is not None:
                held = self._bases.take(pin)
                if held is None:
                    with self._bases.locked_url(url, checkpoint):
                        held = self._bases.take(pin) or self._fetched(url, pin, checkpoint, tell)
            else:
                before = self._bases.noted(ASKED, url)
                with self._bases.locked_url(url, checkpoint):
                    entry = self._bases.entry(url)
                    held = self._bases.take(entry.sha256, entry.size) if entry else None
                    # Whoever had to wait here for another one's download has not to ask once more, nor has who had to
                    # wait for a server that is away: a build of each worker would come after a time-out of its own.
                    # Nor has a build that was asked for before somebody began to ask: a pool has them come one by one.
                    asked_at = self._bases.noted(ASKED, url)
                    is_away = time.monotonic() - self._bases.noted(UNANSWERED, url) < AWAY
                    asks = asked_at == before and asked_at <= since and not is_away
                    if entry and held and asks:
                        if (yield from self._asked(url, entry, held, checkpoint, tell)):
                            return
                        held = self._bases.take(entry.sha256, entry.size)  # the newer one could not be had
                    held = held or self._fetched(url, None, checkpoint, tell)
            with closing(held):
                yield held.image
        except OSError as error:
            raise BuildFailed('image', f'{url}: cannot be kept in {self.directory}: {error.strerror}') from error

    def _asked(
        self, url: str, entry: Download, held: BaseHold, checkpoint: Checkpoint, tell: Tell
    ) -> Generator[BaseImage | None, None, bool]:
        """The cached image while its server is asked; if that has another one, None and that. True if one is it."""
        with self._transfer(url, None, entry.version) as transfer:
            with closing(held):
                transfer.ask()
                yield held.image
                try:
                    known = transfer.is_known(checkpoint)
                except Away as error:
                    self._is_away(url, error)
                    return True
                if known:
                    self._bases.note(ASKED, url, transfer.began)
                    return True
            # Not held any more: the newer one may need its room.
            yield None
            try:
                newer = self._kept(url, transfer, checkpoint, tell)
            except Away as error:
                self._is_away(url, error)
                return False
            with closing(newer):
                yield newer.image
            return True

    def _is_away(self, url: str, error: Away) -> None:
        self._bases.note(UNANSWERED, url, time.monotonic())
        log.warning('%s; its image is cached, and used as it was', error.reason)

    def _fetched(self, url: str, pin: str | None, checkpoint: Checkpoint, tell: Tell) -> BaseHold:
        with self._transfer(url, pin, None) as transfer:
            transfer.ask()
            return self._kept(url, transfer, checkpoint, tell)

    @contextmanager
    def _transfer(self, url: str, pin: str | None, known: Version | None) -> Iterator[Transfer]:
        """A Transfer to the URL's temporary name. It is given up, and that name removed, when the block ends."""
        part = self._bases.part(url)
        where = source(url, self.local, self.reach)
        transfer = Transfer(url, where, known, pin, part, self._bases.reserve)
        try:
            yield transfer
        finally:
            transfer.give_up()
            part.unlink(missing_ok=True)

    def _kept(self, url: str, transfer: Transfer, checkpoint: Checkpoint, tell: Tell) -> BaseHold:
        fetched = transfer.run(checkpoint, tell)
        part = self._bases.part(url)
        image = self.inspect(part, checkpoint)
        if image.virtual_size > self.limits.disk:
            size, most = image.virtual_size / GIB, self.limits.disk / GIB
            raise BuildFailed('image', f'the image is {size:.1f} GiB, and this host has {most:.1f} GiB for disks')
        failpoint('image-part')
        held = self._bases.keep(part, fetched.sha256, image.format)
        failpoint('image-kept')
        try:
            self._bases.learn(url, fetched, transfer.began)
        except OSError as error:
            log.warning('%s: %s: where an image is from is not remembered', self.directory, error.strerror)
        return held


class FakeImages:
    """Images for the fake hypervisor: every URL is there, and empty."""

    @contextmanager
    def held(self, url: str, checkpoint: Checkpoint, tell: Tell, since: float) -> Iterator[Iterator[BaseImage | None]]:
        """A base image of no size."""
        del tell, since
        checkpoint()
        yield iter([BaseImage(url, 'qcow2', 0)])


Images = ImageCache | FakeImages
"""Where base volumes come from."""
