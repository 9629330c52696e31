"""The image cache: one base volume for each content, downloaded once for all workers.

A download goes to a `.part` file, is hashed as it arrives, checked, made durable and renamed, so a file with a base
volume's name is complete. Overlays share base volumes, so each is read again once a day.

base-<SHA-256 of its content>.<format>  a base volume; mtime: last use. Users flock it until an overlay refers to it
base-<hash of its URL>.part             a download; as long as it will be, or as room is reserved for it
.url-<hash of its URL>.json             the image that the URL had when its server was last asked
.asked-<hash of its URL>                when the server was last asked, and whether it answered; until the next sweep
.read-<SHA-256>, .bad-<SHA-256>         when it was last read as a whole; that its content has changed
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
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ecomp.agent.images.child import CHECKPOINT_SECONDS, run_program
from ecomp.agent.images.sources import Download, EgressPolicy, LocalSource, ServerUnavailable, Version
from ecomp.agent.jobs import Loop, run_aside
from ecomp.errors import BuildFailed, EcompError
from ecomp.failpoints import failpoint
from ecomp.files import sync_directory, try_lock, write_durably
from ecomp.model.allocation import GIB, MIB
from ecomp.model.facts import MAX_CACHED_IMAGES
from ecomp.model.guest import BaseImage
from ecomp.model.image import IMAGE_HASH_DIGITS, check_image, hash_image, hash_url, split_pin
from ecomp.model.json_object import load_object
from ecomp.virt.image import read_backing_chain, read_base_volume

if TYPE_CHECKING:
    from ecomp.agent.images.remote import RemoteSource

VERSION = 1
FORMATS = ('qcow2', 'raw')
LOCK_FILE = '.lock'
QUESTION_PREFIX = '.asked-'
SCRUB_PREFIX = '.read-'
BAD_PREFIX = '.bad-'


@dataclass(frozen=True)
class BaseHold:
    """A base volume, and an open file whose flock prevents its eviction until close()."""

    image: BaseImage
    descriptor: int

    def close(self) -> None:
        os.close(self.descriptor)


class BaseVolumes:
    """Base volumes in `directory`, evicted to keep them and all downloads below `limit_bytes`."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self._directory, self._limit_bytes = directory, limit_bytes

    def lock_url(self, url: str, checkpoint: Callable[[], None]) -> AbstractContextManager[None]:
        # Not a blocking lock: a destroy must not wait for another instance's download.
        return self._hold_lock(self.get_part_path(url).stem, CHECKPOINT_SECONDS, checkpoint)

    def get_part_path(self, url: str) -> Path:
        return self._directory / f'base-{hash_url(url)}.part'

    def read_url_entry(self, url: str) -> Download | None:
        """Return what record_url() wrote last about the URL, or None if nothing valid is there."""
        try:
            named, entry = _read_url_file(self._get_note_path('.url-', f'{hash_url(url)}.json'))
        except (OSError, ValueError, KeyError, TypeError):
            return None  # its server is asked again
        return entry if named == url else None

    def record_url(self, url: str, entry: Download, asked_at: float) -> None:
        """Write the URL's image, and note for all processes when (monotonic) its server was asked."""
        text = json.dumps({'version': VERSION, 'url': url, 'found': asdict(entry)})
        write_durably(self._get_note_path('.url-', f'{hash_url(url)}.json'), text + '\n')
        self.note_question(url, asked_at, is_answered=True)

    def note_question(self, url: str, asked_at: float, is_answered: bool) -> None:
        """Note for all processes, if possible, when (monotonic) the URL's server was asked."""
        with suppress(OSError):
            self._get_note_path(QUESTION_PREFIX, hash_url(url)).write_text(json.dumps([asked_at, is_answered]))

    def must_ask(self, url: str, requested_at: float) -> bool:
        """Return whether a build requested at `requested_at` (monotonic) must ask the server."""
        try:
            asked_at, is_answered = json.loads(self._get_note_path(QUESTION_PREFIX, hash_url(url)).read_bytes())
            # An answer counts for builds that were requested before the question, as a pool starts builds one by one.
            # Silence counts for all builds of UNREACHABLE_SECONDS: their timeouts would add up.
            is_served = asked_at > requested_at if is_answered else time.monotonic() - asked_at < UNREACHABLE_SECONDS
            return not is_served or asked_at > time.monotonic()
        except (OSError, ValueError, TypeError):
            return True

    def read_scrub_time(self, sha256: str) -> float:
        """Return when (epoch) a base volume was last read as a whole, or 0."""
        with suppress(FileNotFoundError):
            return self._get_note_path(SCRUB_PREFIX, sha256).stat().st_mtime
        return 0.0

    def note_scrub(self, sha256: str, is_good: bool) -> None:
        """Note that a base volume was read now, and whether hold() may still use it."""
        if is_good:
            self._get_note_path(BAD_PREFIX, sha256).unlink(missing_ok=True)
        else:
            self._get_note_path(BAD_PREFIX, sha256).touch()
        self._get_note_path(SCRUB_PREFIX, sha256).touch()

    def hold(self, sha256: str, size: int | None = None) -> BaseHold | None:
        """Hold and touch the base volume of this content, or return None if it is missing or bad."""
        with self._hold_lock():
            if self._get_note_path(BAD_PREFIX, sha256).exists():
                return None
            for path in (self._get_base_path(sha256, suffix) for suffix in FORMATS):
                with suppress(FileNotFoundError):
                    if size in (None, path.stat().st_size):
                        return _hold_file(path)
        return None

    def add(self, part: Path, sha256: str, image_format: str) -> BaseHold:
        """Rename a download to its base volume, unless a good one exists, and hold the volume."""
        path = self._get_base_path(sha256, image_format)
        with self._hold_lock():
            is_bad = self._get_note_path(BAD_PREFIX, sha256).exists()
            if is_bad or not path.exists() or path.stat().st_size != part.stat().st_size:
                # QEMU's user reads it. Overlays are secret, images are not.
                part.chmod(0o644)
                # A bad one is replaced: its guests have the good one from their next start.
                part.rename(path)
                sync_directory(self._directory)
                self._get_note_path(BAD_PREFIX, sha256).unlink(missing_ok=True)
                with suppress(OSError):  # otherwise it is only read again sooner
                    self._get_note_path(SCRUB_PREFIX, sha256).touch()
            return _hold_file(path)

    def reserve(self, descriptor: int, size_bytes: int, ahead_bytes: int) -> int:
        """Evict, extend a download to `size_bytes` or more, and return that, or raise BuildFailed."""
        with self._hold_lock():
            free = self._make_room(size_bytes - os.fstat(descriptor).st_size, size_bytes)
            size_bytes += min(ahead_bytes, free // 4)  # other downloads count the added bytes as used
            os.ftruncate(descriptor, size_bytes)
            return size_bytes

    def sweep(self) -> None:
        """Remove the downloads of killed workers, and outdated notes."""
        with self._hold_lock():
            self._remove_stale_notes()
        for note in self._directory.glob(f'{QUESTION_PREFIX}*'):
            note.unlink(missing_ok=True)
        for part in self._directory.glob('base-*.part'):
            with suppress(OSError), lock_if_idle(part) as is_idle:
                if is_idle:
                    part.unlink(missing_ok=True)

    def _make_room(self, more_bytes: int, image_bytes: int) -> int:
        """Evict until `more_bytes` fit, and return the bytes free beyond them, or raise BuildFailed."""
        size, limit = _format_size(image_bytes), _format_size(self._limit_bytes)
        fix = 'Fix: increase `image_cache:` in compute.yaml of this host'
        if image_bytes > self._limit_bytes:
            raise BuildFailed('image', f'the image is {size}, but `image_cache:` allows {limit}. {fix}')
        files = {path: _stat(path) for kind in (*FORMATS, 'part') for path in self._directory.glob(f'base-*.{kind}')}
        used = sum(size for _, size in files.values())
        if used + more_bytes <= self._limit_bytes:
            return self._limit_bytes - used - more_bytes
        in_use = self._list_bases_in_use()
        evicted: dict[Path, int] = {}
        for path in sorted(files, key=lambda each: files[each]):
            if path.suffix == '.part' or os.path.realpath(path) in in_use:
                continue
            if used + more_bytes <= self._limit_bytes:
                break
            with suppress(BlockingIOError):
                evicted[path] = _open_flocked(path, fcntl.LOCK_EX)
                used -= files[path][1]
        try:
            if used + more_bytes > self._limit_bytes:
                others = f'{_format_size(used + more_bytes - image_bytes)} of the {limit} that `image_cache:` allows'
                reason = f'the image is {size}, but base volumes and downloads that are in use take {others}. {fix}'
                raise BuildFailed('image', reason)
            for path in evicted:
                path.unlink(missing_ok=True)
                failpoint('image-evicted')
        finally:
            for descriptor in evicted.values():
                os.close(descriptor)
        self._remove_stale_notes()
        return self._limit_bytes - used - more_bytes

    def _list_bases_in_use(self) -> set[str]:
        base_files: set[str] = set()
        for path in self._directory.iterdir():
            with suppress(FileNotFoundError):  # another worker has just removed it, and it lies on nothing any more
                if path.is_file():
                    base_files.update(read_backing_chain(path))
        return base_files

    def _remove_stale_notes(self) -> None:
        for path in self._directory.glob('.url-*.json'):
            with suppress(OSError, ValueError, KeyError, TypeError):
                _, entry = _read_url_file(path)
                if not self._is_cached(entry.sha256):
                    path.unlink()
        for path in [*self._directory.glob(f'{SCRUB_PREFIX}*'), *self._directory.glob(f'{BAD_PREFIX}*')]:
            if not self._is_cached(path.name.partition('-')[2]):
                path.unlink(missing_ok=True)

    @contextmanager
    def _hold_lock(
        self, name: str = 'bases', pause_seconds: float = 0.002, checkpoint: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        # `bases` is held to find, add and evict base volumes.
        while (lock := try_lock(self._directory / LOCK_FILE, name)) is None:
            checkpoint()
            time.sleep(pause_seconds)
        try:
            yield
        finally:
            os.close(lock)

    def _get_base_path(self, sha256: str, image_format: str) -> Path:
        return self._directory / f'base-{sha256}.{image_format}'

    def _is_cached(self, sha256: str) -> bool:
        return any(self._get_base_path(sha256, suffix).exists() for suffix in FORMATS)

    def _get_note_path(self, prefix: str, name: str) -> Path:
        return self._directory / f'{prefix}{name}'


def measure_cache(directory: Path) -> dict[str, int]:
    """Return the numbers of `images` and `bad_images`, and the `bytes` of all, with downloads."""
    sizes = {path: _stat(path)[1] for path in directory.glob('base-*')}
    images = sum(path.suffix != '.part' for path in sizes)
    return {'images': images, 'bad_images': len(list_bad(directory)), 'bytes': sum(sizes.values())}


def list_bad(directory: Path) -> list[str]:
    """Return the SHA-256s of the base volumes whose content has changed: no new disk uses them."""
    return sorted(path.name.removeprefix(BAD_PREFIX) for path in directory.glob(f'{BAD_PREFIX}*'))


def list_image_hashes(directory: Path) -> list[str]:
    """List cached images as hash_image() does, by content and URL, up to MAX_CACHED_IMAGES."""
    found = (BASE_NAME.fullmatch(path.name) for path in directory.glob('base-*'))
    contents = {match[1] for match in found if match}.difference(list_bad(directory))
    hashes = {sha256[:IMAGE_HASH_DIGITS] for sha256 in contents}
    for path in directory.glob('.url-*.json'):
        with suppress(OSError, ValueError, KeyError, TypeError):
            url, entry = _read_url_file(path)
            if entry.sha256 in contents:
                hashes.add(hash_image(url))
    return sorted(hashes)[:MAX_CACHED_IMAGES]


@contextmanager
def lock_if_idle(part: Path) -> Iterator[bool]:
    """Yield whether the download has no writer, and let none begin during the block."""
    try:
        lock = try_lock(part.parent / LOCK_FILE, part.stem, create=False)
    except FileNotFoundError:
        yield True  # no downloads are made in this directory
        return
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _read_url_file(path: Path) -> tuple[str, Download]:
    data = load_object(path.read_bytes())
    entry = _parse_download(data['found'])
    texts = entry.version.etag, entry.version.modified, entry.version.answered
    is_valid = type(entry.size) is int and all(isinstance(text, str) for text in texts)
    if data['version'] != VERSION or not re.fullmatch('[0-9a-f]{64}', entry.sha256) or not is_valid:
        raise ValueError(f'{path}: is malformed')
    return data['url'], entry


def _parse_download(data: dict[str, Any]) -> Download:
    return Download(data['sha256'], data['size'], Version(**data['version']))


def _hold_file(path: Path) -> BaseHold:
    descriptor = _open_flocked(path, fcntl.LOCK_SH)
    try:
        os.utime(descriptor)
        return BaseHold(read_base_volume(path), descriptor)
    except BaseException:
        os.close(descriptor)
        raise


def _open_flocked(path: Path, lock_type: int) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, lock_type | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _stat(path: Path) -> tuple[int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:  # a download has just finished
        return 0, 0
    return status.st_mtime_ns, status.st_size


def _format_size(size: int) -> str:
    return f'{size / GIB:.1f} GiB' if size >= GIB / 10 else f'{size / MIB:.1f} MiB'


log = logging.getLogger(__name__)

DAY_SECONDS = 86_400.0
HOUR_SECONDS = 3_600.0
CHUNK_BYTES = 4 * 2**20  # bytes of one read
SCRUB_BYTES_PER_SECOND = 64 * 2**20  # few enough not to disturb guests
BASE_NAME = re.compile(rf'base-([0-9a-f]{{64}})\.(?:{"|".join(FORMATS)})')


class Scrubber:
    """A thread that reads each base volume once a day, at `bytes_per_second`."""

    def __init__(self, directory: Path, bytes_per_second: float = SCRUB_BYTES_PER_SECOND) -> None:
        self._directory = directory
        self._bases = BaseVolumes(directory, 0)
        self._bytes_per_second = bytes_per_second
        self._stop_event = threading.Event()
        self._loop = Loop('scrub', self._run)
        self.start = self._loop.schedule

    def stop(self) -> None:
        self._stop_event.set()
        self._loop.join()

    def scrub(self, now: float) -> None:
        """Read each volume that was not read for a day, or since the boot, and note changed ones."""
        booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
        for path in sorted(self._directory.glob('base-*')):
            if (match := BASE_NAME.fullmatch(path.name)) is None:
                continue
            # A read in the future is of a clock that was set back since; beyond a day it counts as old. A power cut may
            # have left zeros, so what was read before the boot counts as old, too.
            read = self._bases.read_scrub_time(match[1])
            if abs(now - read) < DAY_SECONDS and read >= booted:
                continue
            try:
                if (sha256 := self._hash_file(path)) is None:
                    return
                self._bases.note_scrub(match[1], is_good=sha256 == match[1])
            except FileNotFoundError:
                continue  # evicted since the listing
            except OSError as error:
                log.error('%s: cannot be read, or the result of its check cannot be saved: %s', path, error.strerror)
                continue
            if sha256 != match[1]:
                users = ', '.join(self._list_users(path)) or 'none'
                effect = f'no new disk uses it; guests that depend on it: {users}'
                log.error('%s: the content of this base volume has changed since its download: %s', path, effect)

    def _hash_file(self, path: Path) -> str | None:
        """Return a file's SHA-256, or None after stop()."""
        digest = hashlib.sha256()
        with path.open('rb', buffering=0) as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                if self._stop_event.wait(len(chunk) / self._bytes_per_second):
                    return None
        return digest.hexdigest()

    def _list_users(self, path: Path) -> list[str]:
        users = []
        for overlay in sorted(self._directory.glob('*.qcow2')):
            try:
                if os.path.realpath(path) in read_backing_chain(overlay):
                    users.append(overlay.stem)
            except OSError:
                continue  # removed, or incomplete
        return users

    def _run(self) -> float:
        self.scrub(time.time())
        return time.monotonic() + HOUR_SECONDS


# Time for which the cached image is used without asking, after its server gave no worker an answer.
UNREACHABLE_SECONDS = 30.0
# Time for an answer about a cached image; then the cached one is used.
MAX_CHECK_SECONDS = 10.0

Checkpoint = Callable[[], None]
# Called with the bytes downloaded and the total (None: unknown), at most once a second and if there are more.
ReportProgress = Callable[[int, int | None], None]


@dataclass(frozen=True)
class CacheLimits:
    """Images are refused above `cache_bytes` (the whole cache) or `disk_bytes` (a disk here)."""

    cache_bytes: int
    disk_bytes: int


def make_source(url: str, local_directory: Path | None, egress: EgressPolicy) -> LocalSource | RemoteSource:
    """Make the source for `url`, which check_image() accepted and which has no fragment."""
    if urlsplit(url).scheme == 'file':
        return LocalSource(url, local_directory)
    # Imported late: it loads requests, which takes 0.1 s and 12 MiB, and is needed only where an image is asked for.
    from ecomp.agent.images.remote import RemoteSource

    return RemoteSource(url, egress)


@dataclass(eq=False)
class ImageCache:
    """The base volumes in `directory`, and their download."""

    directory: Path
    # Reads a file's format and size, and calls the checkpoint.
    inspect: Callable[[Path, Checkpoint], BaseImage]
    # Where file:// URLs may point into (None: nowhere).
    local_directory: Path | None
    limits: CacheLimits
    egress: EgressPolicy

    def __post_init__(self) -> None:
        self._bases = BaseVolumes(self.directory, self.limits.cache_bytes)

    @contextmanager
    def hold(
        self, url: str, checkpoint: Checkpoint, report_progress: ReportProgress, requested_at: float = math.inf
    ) -> Iterator[BaseImage]:
        """Yield the base volume of the URL's image, which is not evicted during the block.

        Unless the URL has #sha256=, the server of a cached image is asked whether the image has changed. It is not
        asked if it gave no answer lately, or answered a question asked after `requested_at` (monotonic). The cached
        image is used if there is no answer. `checkpoint` is called at least once a second.
        """
        try:
            bare, pin = split_pin(check_image(url))
        except ValueError as error:
            raise BuildFailed('image', str(error)) from error
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            hold = self._bases.hold(pin) if pin else None
            if hold is None:
                with self._bases.lock_url(bare, checkpoint):
                    if pin is None:
                        hold = self._find_current(bare, checkpoint, report_progress, requested_at)
                    else:
                        hold = self._bases.hold(pin) or self._fetch(bare, pin, checkpoint, report_progress)
        except OSError as error:
            reason = f'{bare}: cannot be stored in {self.directory}: {error.strerror}'
            raise BuildFailed('image', reason, is_host_fault=True) from error
        with closing(hold):
            yield hold.image

    def sweep(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._bases.sweep()

    def _find_current(self, url: str, checkpoint: Checkpoint, report: ReportProgress, requested_at: float) -> BaseHold:
        """Hold the URL's image: the cached one, unless its server has a newer one to download."""
        entry = self._bases.read_url_entry(url)
        hold = self._bases.hold(entry.sha256, entry.size) if entry else None
        if entry is None or hold is None:
            return self._fetch(url, None, checkpoint, report)
        try:
            if not self._bases.must_ask(url, requested_at) or self._is_current(url, entry.version, checkpoint):
                return hold
            hold.close()  # the newer image may need its room
            hold = None
            return self._fetch(url, None, checkpoint, report)
        except ServerUnavailable as error:
            if (hold := hold or self._bases.hold(entry.sha256, entry.size)) is None:
                raise
            self._bases.note_question(url, time.monotonic(), is_answered=False)
            log.warning('the cached image is used without a check for a newer one: %s', error.reason)
            return hold
        except BaseException:
            if hold is not None:
                hold.close()
            raise

    def _is_current(self, url: str, version: Version, checkpoint: Checkpoint) -> bool:
        """Ask the server whether it still has this version, or raise ServerUnavailable."""
        asked_at = time.monotonic()

        def ask() -> bool:
            with closing(make_source(url, self.local_directory, self.egress)) as source:
                source.deadline = asked_at + MAX_CHECK_SECONDS
                return source.has_version(version)

        # In a thread, because a destroy must not wait for a server or a DNS lookup. It ends at its deadline.
        future = run_aside('question', ask)
        while time.monotonic() < asked_at + MAX_CHECK_SECONDS:
            with suppress(TimeoutError):
                answer = future.result(CHECKPOINT_SECONDS)
                if answer:
                    self._bases.note_question(url, asked_at, is_answered=True)
                return answer
            checkpoint()
        raise ServerUnavailable('image', f'{url}: the server does not answer in time')

    def _fetch(self, url: str, pin: str | None, checkpoint: Checkpoint, report: ReportProgress) -> BaseHold:
        """Download and inspect an image, make it a base volume, and hold that."""
        began_at, part = time.monotonic(), self._bases.get_part_path(url)
        part.unlink(missing_ok=True)  # of a worker that was killed
        try:
            download = self._download(url, pin, part, checkpoint, report)
            image = self.inspect(part, checkpoint)
            if image.virtual_size > self.limits.disk_bytes:
                size, limit = image.virtual_size / GIB, self.limits.disk_bytes / GIB
                reason = f'the image needs {size:.1f} GiB, but this host has {limit:.1f} GiB for disks'
                raise BuildFailed('image', reason)
            failpoint('image-part')
            hold = self._bases.add(part, download.sha256, image.format)
        finally:
            part.unlink(missing_ok=True)
        failpoint('image-kept')
        try:
            self._bases.record_url(url, download, began_at)
        except OSError as error:
            log.warning('%s: cannot note in %s which file is its image: %s', url, self.directory, error.strerror)
        return hold

    def _download(
        self, url: str, pin: str | None, part: Path, checkpoint: Checkpoint, report: ReportProgress
    ) -> Download:
        result: dict[str, Any] = {}

        def handle_answer(answer: dict[str, Any]) -> None:
            if 'done' in answer:
                report(answer['done'], answer['total'])
            else:
                result.update(answer)

        local_directory = self.local_directory and self.local_directory.absolute()
        job = url, pin, part.absolute(), self.limits.cache_bytes, local_directory, self.egress
        code = run_program('ecomp.agent.images.fetch', job, checkpoint, handle_answer)
        if 'reason' in result:
            kind = ServerUnavailable if result['is_temporary'] else BuildFailed
            raise kind('image', result['reason'], result['is_host_fault'])
        if 'download' not in result:
            raise EcompError(f'{url}: the download ended with exit code {code}')
        return _parse_download(result['download'])


class FakeImages:
    """Images for the fake hypervisor: every URL has an empty image, cached once it was held."""

    def __init__(self) -> None:
        self._hashes: dict[str, None] = {}

    def list_image_hashes(self) -> list[str]:
        return list(self._hashes)

    @contextmanager
    def hold(self, url: str, checkpoint: Checkpoint, *_: object) -> Iterator[BaseImage]:
        checkpoint()
        if len(self._hashes) < MAX_CACHED_IMAGES:
            self._hashes[hash_image(url)] = None
        yield BaseImage(url, 'qcow2', 0)


Images = ImageCache | FakeImages
