"""One worker an instance, whoever started it: a lock that the kernel drops with its holder.

A killed ecompute's worker dies with it, but not before the next ecompute may have started its own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ecomp.errors import EcompError

PATIENCE = 60.0
POLL = 0.05


class InstanceLocks:
    """A byte of <state>/instances.lock for each instance: no file is left over, and none is removed under a holder.

    The locks are the process's (fcntl(2), F_SETLK): one for each, opened in it, and never a second at one state.
    """

    def __init__(self, state: Path) -> None:
        self._file = os.open(state / 'instances.lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @contextmanager
    def held(self, instance: str, checkpoint: Callable[[], None]) -> Iterator[None]:
        """Nobody else is at the instance inside. EcompError after a minute of waiting; the checkpoint's errors."""
        byte = int.from_bytes(hashlib.sha256(instance.encode()).digest()[:7])
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise EcompError(f'another process has been at work on it for {PATIENCE:g} s') from error
            checkpoint()
            time.sleep(POLL)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)
