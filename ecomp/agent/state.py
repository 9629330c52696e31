"""The state directory: one ecompute's lasting identity, and the lock that keeps it one.

<state>/uuid   the provider's uuid, made once, so that a restart never orphans a provider
<state>/token  who this state directory is, told to etcd with /computes/<uuid>
<state>/lock   flocked while an ecompute runs here; holds its pid
"""

from __future__ import annotations

import fcntl
import os
import uuid
from contextlib import suppress
from pathlib import Path

from ecomp.errors import Conflict, UsageError
from ecomp.model import keys


class State:
    """An open, locked state directory. Conflict if another ecompute has it, UsageError if it cannot be used."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            # QEMU runs as another user and has to get through to its disks: x for all, r for nobody else.
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o711)
            self._lock = os.open(directory / 'lock', os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(
                f'state directory {directory}: {error.strerror}: run as root, or set `state:` in compute.yaml'
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(self._lock, 64, 0).decode(errors='replace').strip()
            os.close(self._lock)
            raise Conflict(
                f'state directory {directory} is used by the ecompute with pid {holder or "unknown"}: '
                'stop it, or set another `state:` and `uuid:`'
            ) from error
        with suppress(OSError):  # a full disk: who holds it is then not said, and all that matters is locked
            os.ftruncate(self._lock, 0)
            os.pwrite(self._lock, f'{os.getpid()}\n'.encode(), 0)
        # Of whoever was killed while writing: nobody else is at work in this state directory.
        for part in [*directory.glob('*.part'), *directory.glob('*/*.part')]:
            with suppress(OSError):
                part.unlink()

    def compute_uuid(self, configured: str | None) -> str:
        """The provider's uuid: from compute.yaml, or the one kept here, or a new one that is kept from now on."""
        if configured is None:
            return self._lasting('uuid')
        write_durably(self.directory / 'uuid', configured + '\n')
        return configured

    def token(self) -> str:
        """What tells this state directory from a copy of its uuid elsewhere."""
        return self._lasting('token')

    def close(self) -> None:
        """Let the lock go."""
        os.close(self._lock)

    def _lasting(self, name: str) -> str:
        path = self.directory / name
        try:
            text = path.read_text().strip()
        except FileNotFoundError:
            text = str(uuid.uuid4())
            write_durably(path, text + '\n')
        if not keys.is_uuid(text):
            raise UsageError(f'{path}: holds {text[:60]!r}, not a uuid: put the right one there, or remove the file')
        return text


def write_durably(path: Path, text: str, mode: int = 0o600) -> None:
    """Write a file whole or not at all, also across a power cut. OSError names it; nothing half written stays."""
    temporary = path.with_name(f'.{path.name}.part')
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
        with os.fdopen(descriptor, 'w') as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
