"""Watch files of other programs, write our own atomically, and lock instances and images."""

from __future__ import annotations

import errno
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
# Seconds to wait for another process's work on an instance; then the job fails, and is retried.
INSTANCE_LOCK_TIMEOUT_SECONDS = 60.0
# Seconds between two attempts to get a lock.
LOCK_POLL_SECONDS = 0.05


def read_boot_id(path: Path = BOOT_ID) -> str:
    """Return the id of this machine's boot: proc_sys_kernel(5)."""
    return path.read_text().strip()


def watch_files(directory: Path, suffix: str, on_written: Callable[[Path], None]) -> Callable[[], None]:
    """Call `on_written(path)` in another thread when a file with this suffix is written.

    One write may cause several calls. The returned function stops watching, and waits for the thread.
    """
    # Imported late: only an ecompute with libvirt watches files.
    from watchdog.events import FileSystemEvent, FileSystemEventHandler
    from watchdog.observers import Observer

    class Handler(FileSystemEventHandler):
        def on_any_event(self, event: FileSystemEvent) -> None:
            # Most programs write a new file and rename it; some write in place.
            path = Path(str(event.dest_path or event.src_path))
            if event.event_type in ('moved', 'modified', 'created') and path.name.endswith(suffix):
                on_written(path)

    observer = Observer()
    observer.schedule(Handler(), str(directory))
    observer.start()

    def stop() -> None:
        observer.stop()
        observer.join()

    return stop


def write_durably(path: Path, content: str | bytes, mode: int = 0o600) -> None:
    """Write a file atomically and durably, so that an OSError leaves no partial file.

    The file, even a replaced one, gets `mode`, less the umask, and this process's owner.
    """
    temporary = get_part_path(path)
    try:
        if temporary.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        if temporary.exists():  # a killed process's, or another name of some other file
            temporary.unlink()
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with os.fdopen(descriptor, 'wb') as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    sync_directory(path.parent)


def get_part_path(path: Path) -> Path:
    """Return the path of a file while it is written, which a killed process leaves behind."""
    return path.with_name(f'.{path.name}.part')


def sync_directory(directory: Path) -> None:
    """Make the entries of a directory durable across a power cut."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def get_search_path() -> str:
    """Return PATH and Debian's directories for root's programs, which a user's PATH may lack."""
    return os.pathsep.join((os.environ.get('PATH', os.defpath), '/usr/local/sbin', '/usr/sbin', '/sbin'))


# Instances are locked, because a worker of a killed ecompute may end only after the next ecompute has started its own
# workers. The kernel releases a lock when its holder ends, and no lock file is removed under its holder.
class InstanceLocks:
    """Locks on instances, each a byte of <state>/instances.lock.

    A lock belongs to the process, not to its threads (fcntl(2), F_SETLK). So a process has one object for a directory.
    """

    def __init__(self, state: Path) -> None:
        self._file = os.open(state / 'instances.lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def hold(self, instance: str, checkpoint: Callable[[], None]) -> Iterator[None]:
        """Hold the lock of an instance, or raise EcompError after INSTANCE_LOCK_TIMEOUT_SECONDS."""
        seconds, offset, flags = INSTANCE_LOCK_TIMEOUT_SECONDS, _hash_to_offset(instance), fcntl.LOCK_EX | fcntl.LOCK_NB
        if not wait_for_lock(seconds, lambda: fcntl.lockf(self._file, flags, 1, offset), checkpoint):
            raise EcompError(f'another process has been working on this instance for {seconds:g} s')
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, offset)


def wait_for_lock(seconds: float, acquire: Callable[[], object], checkpoint: Callable[[], None] = lambda: None) -> bool:
    """Call `acquire` and `checkpoint` until the first succeeds, or return False after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            acquire()
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        checkpoint()
        time.sleep(LOCK_POLL_SECONDS)


def _hash_to_offset(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


def try_lock(path: Path, name: str, create: bool = True) -> int | None:
    """Return a descriptor that holds a lock until it is closed, or None if the lock is held.

    One file, which is never removed, serves all names.
    The lock belongs to the open file, not to the process, so threads exclude each other, too.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        # struct flock: type, whence, start, length, pid.
        lock = struct.pack('hhqqi', fcntl.F_WRLCK, os.SEEK_SET, _hash_to_offset(name), 1, 0)
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    except OSError as error:
        os.close(descriptor)
        if not isinstance(error, BlockingIOError):
            raise
        return None
    return descriptor
