"""The state directory: one ecompute's lasting identity, and the lock that keeps it one.

<state>/uuid   the provider's uuid, made once, so that a restart never orphans a provider
<state>/token  who this state directory is, told to etcd with /computes/<uuid>
<state>/lock   flocked while an ecompute runs here; holds its pid

A start that is refused leaves all of it as it was: what is new is written by keep().
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from contextlib import suppress
from pathlib import Path

from ecomp.errors import Conflict, UsageError
from ecomp.files import write_durably
from ecomp.model import keys

PATIENCE = 2.0
"""Seconds in which the lock has to be free. One that was killed as it started a program leaves it to that one for the
moment until it runs: fork(2) hands it on, execve(2) closes it. So who starts anew at once is not refused. Those of
ecomp.agent.locks that are a process's are not handed on; this one is an earlier version's, too, which may run here."""
POLL = 0.02
"""Seconds between two tries to get it."""


class Identity:
    """Who an ecompute lastingly is, by its state directory, which is open and locked.

    Conflict if another ecompute has it, UsageError if it cannot be used.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            _make(directory)
            self._lock = os.open(directory / 'lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f'state directory {directory}: {error.strerror}: run as root, or set `state:` in compute.yaml'
            ) from error
        if not _take(self._lock):
            holder = os.pread(self._lock, 64, 0).decode(errors='replace').strip()
            os.close(self._lock)
            raise Conflict(
                f'state directory {directory} is used by the ecompute with pid {holder or "unknown"}: '
                'stop it, or set another `state:` and `uuid:`'
            )
        self._new: dict[str, str] = {}
        self._holder = os.pread(self._lock, 64, 0)
        self._say(f'{os.getpid()}\n'.encode())

    def compute_uuid(self, configured: str | None) -> str:
        """The provider's uuid: from compute.yaml, or the one kept here, or a new one."""
        if configured is None:
            return self._lasting('uuid')
        self._new['uuid'] = configured
        return configured

    def token(self) -> str:
        """A secret of this state directory, which a copy of its uuid elsewhere lacks."""
        return self._lasting('token')

    def keep(self) -> None:
        """From now on the next start finds this uuid and this token here. Called once nothing refuses this one."""
        # QEMU runs as another user and has to get through to its disks: x for all, r for nobody else.
        self.directory.chmod(0o711)
        # Of whoever was killed while writing: nobody else is at work in this state directory.
        for part in [*self.directory.glob('*.part'), *self.directory.glob('*/*.part')]:
            with suppress(OSError):
                part.unlink()
        for name, text in self._new.items():
            path = self.directory / name
            if not path.exists() or path.read_text().strip() != text:
                write_durably(path, text + '\n')

    def close(self) -> None:
        """Let the lock go; it says what it said before."""
        self._say(self._holder)
        os.close(self._lock)

    def _say(self, holder: bytes) -> None:
        with suppress(OSError):  # a full disk: who holds it is then not said, and all that matters is locked
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, holder, 0)

    def _lasting(self, name: str) -> str:
        if name in self._new:
            return self._new[name]
        path = self.directory / name
        try:
            text = path.read_text().strip()
        except FileNotFoundError:
            text = self._new[name] = str(uuid.uuid4())
        if not keys.is_uuid(text):
            raise UsageError(f'{path}: holds {text[:60]!r}, not a uuid: put the right one there, or remove the file')
        return text


def _take(lock: int) -> bool:
    """Lock an open file; False if somebody else has it for PATIENCE."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(POLL)
        else:
            return True


def _make(directory: Path) -> None:
    """Make it, and what is missing above it, so that any user gets through, whatever the umask is. OSError."""
    # QEMU's user has to, or this start is refused, and each later one too, for it finds the directory as it is.
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        each.chmod(each.stat().st_mode | 0o111)
