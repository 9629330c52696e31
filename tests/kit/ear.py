"""systemd's end of a service's NOTIFY_SOCKET."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import tempfile
import time
from pathlib import Path
from typing import Self

from tests.kit.servers import SLOWDOWN_FACTOR


class NotifySocket:
    """Receives the notifications of a service, and the pids of their senders."""

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix='ecomp-ear-'))
        self.path = str(self._directory / 'notify')
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._socket.bind(self.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        os.unlink(self.path)
        self._directory.rmdir()

    def make_environment(self, watchdog: float | None = None) -> dict[str, str]:
        """Return what systemd puts in a service's environment. `watchdog` is in seconds."""
        watchdog_variable = {} if watchdog is None else {'WATCHDOG_USEC': str(round(watchdog * 1e6))}
        return {'NOTIFY_SOCKET': self.path, **watchdog_variable}

    def receive(self, seconds: float = 30.0) -> tuple[int, list[str]]:
        """Return the pid of the next notification's sender, and its lines."""
        ready, _, _ = select.select([self._socket], [], [], SLOWDOWN_FACTOR * seconds)
        assert ready, f'nothing was said for {seconds:g} s'
        message, credentials, _, _ = self._socket.recvmsg(4096, socket.CMSG_SPACE(12))
        return int.from_bytes(credentials[0][2][:4], 'little'), message.decode().splitlines()

    def receive_until(self, line: str, seconds: float = 60.0) -> tuple[int, list[str]]:
        deadline = time.monotonic() + SLOWDOWN_FACTOR * seconds
        while True:
            notification = self.receive(max(0.0, deadline - time.monotonic()) / SLOWDOWN_FACTOR)
            if line in notification[1]:
                return notification

    def discard(self) -> None:
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                self._socket.recv(4096)
        self._socket.setblocking(True)

    def is_silent(self, seconds: float) -> bool:
        return not select.select([self._socket], [], [], seconds)[0]
