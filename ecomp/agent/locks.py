"""One worker an instance, and one download an image: locks that the kernel drops with their holder, however it ends.

A killed ecompute's worker dies with it, but not before the next ecompute may have started its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ecomp.errors import EcompError

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
