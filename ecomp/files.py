"""Files: those that somebody else writes, seen as they are written; our own, written whole or not at all.

And locks, which the kernel drops with their holder, however it ends: of one worker for each instance, and one download
for each image. A killed ecompute's worker dies with it, but not before the next ecompute may have started its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ecomp.errors import EcompError

BOOT_ID = Path('/proc/sys/kernel/random/boot_id')


def boot_id(path: Path = BOOT_ID) -> str:
    """Which boot of this machine this is. proc_sys_kernel(5)"""
    return path.read_text().strip()


def watch(directory: Path, suffix: str, written: Callable[[Path], None]) -> Callable[[], None]:
    """From now on written(path) within milliseconds of a file that ends so being written; returns what ends it.

    OSError if the directory cannot be watched.
    """
    # Late: only an ecompute with a real hypervisor watches.
    from watchdog.events import FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    class Handler(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            # Most write a new file and rename it; some write in place.
            path = Path(str(event.dest_path or event.src_path))
            if event.event_type in ('moved', 'modified', 'created') and path.name.endswith(suffix):
                written(path)

    observer = Observer()
    observer.schedule(Handler(), str(directory))
    observer.start()

    def stop() -> None:
        observer.stop()
        observer.join()

    return stop


def write_durably(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Write a file whole or not at all, also across a power cut. OSError names it; nothing half written stays."""
    temporary = part_of(path)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, 'wb') as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync(path.parent)


def part_of(path: Path) -> Path:
    """Where a file is while it is written; whoever is killed then leaves it there."""
    return path.with_name(f'.{path.name}.part')


def sync(directory: Path) -> None:
    """See that what was made or renamed in a directory is there after a power cut. OSError."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def search_path() -> str:
    """PATH, and where Debian keeps root's programs: sudo's or a plain user's PATH may lack those."""
    return os.pathsep.join((os.environ.get('PATH', os.defpath), '/usr/local/sbin', '/usr/sbin', '/sbin'))


PATIENCE = 60.0
"""Seconds for which another process's work on an instance is waited for; then the job fails, and is tried again."""
POLL = 0.05
"""Seconds between two tries to get a lock."""


class InstanceLocks:
    """A byte of <state>/instances.lock for each instance: no file is left over, and none is removed under a holder.

    The locks are the process's (fcntl(2), F_SETLK): one for each, opened in it, and never a second at one state.
    """

    def __init__(self, state: Path) -> None:
        self._file = os.open(state / 'instances.lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def held(self, instance: str, checkpoint: Callable[[], None]) -> Iterator[None]:
        """Hold the instance's lock inside the block. EcompError after a minute of waiting; the checkpoint's errors."""
        byte, exclusive = _byte(instance), fcntl.LOCK_EX | fcntl.LOCK_NB
        if not wait_for_lock(PATIENCE, lambda: fcntl.lockf(self._file, exclusive, 1, byte), checkpoint):
            raise EcompError(f'another process has been at work on it for {PATIENCE:g} s')
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


def wait_for_lock(seconds: float, lock: Callable[[], object], checkpoint: Callable[[], None] = lambda: None) -> bool:
    """Retry a lock that does not block; return False after so many seconds. Errors: those of the checkpoint."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            lock()
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        checkpoint()
        time.sleep(POLL)


def _byte(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


def try_lock(path: Path, name: str, create: bool = True) -> int | None:
    """A descriptor that has the lock `name` of the file at `path` until it is closed; None while somebody else has.

    One lock file is good for all names, and stays. The lock is the open file's, not the process's as above: threads
    keep each other out too. OSError of the file.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        # struct flock: type, whence, start, length, pid.
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack('hhqqi', fcntl.F_WRLCK, os.SEEK_SET, _byte(name), 1, 0))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        os.close(descriptor)
        raise
    return descriptor
