"""Units of systemd, and notifications to it: sd_notify(3), sd_watchdog_enabled(3)."""

from __future__ import annotations

import math
import os
import re
import socket
import stat
import time
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

PACKAGE = Path(__file__).parent
UNITS = PACKAGE / 'units'
COMMAND_PLACEHOLDER = '@command@'
# Seconds for systemd to accept a notification; then it is dropped.
NOTIFY_TIMEOUT_SECONDS = 5.0


class Service:
    """This process as a systemd service, which sends nothing if `socket_path` is ''."""

    def __init__(self, socket_path: str = '', watchdog_seconds: float = math.inf) -> None:
        self._address = re.sub('^@', '\0', socket_path)
        self._interval_seconds = watchdog_seconds / 2
        self._next_notification = -math.inf

    @classmethod
    def from_environment(cls, environment: MutableMapping[str, str]) -> Service:
        """Make the service from systemd's variables, and remove these from `environment`."""
        path = environment.pop('NOTIFY_SOCKET', '')  # so that no child notifies
        watchdog, pid = environment.pop('WATCHDOG_USEC', ''), environment.pop('WATCHDOG_PID', '')
        is_ours = watchdog.isdecimal() and pid in ('', str(os.getpid()))
        return cls(path, int(watchdog) / 1e6 if is_ours and int(watchdog) else math.inf)

    def notify_ready(self, status: str) -> None:
        self._notify('READY=1', f'STATUS={status}')

    def notify_stopping(self, status: str) -> None:
        """Report the stop: systemd then waits for the exit and ignores the watchdog."""
        self._notify('STOPPING=1', f'STATUS={status}')

    def notify_alive(self) -> float:
        """Send the keep-alive if it is due, and return the seconds to the next, inf for none."""
        now = time.monotonic()
        if self._interval_seconds < math.inf and now >= self._next_notification:
            self._notify('WATCHDOG=1')
            self._next_notification = now + self._interval_seconds
        return max(0.0, self._next_notification - now) if self._interval_seconds < math.inf else math.inf

    def _notify(self, *lines: str) -> None:
        if not self._address:
            return
        # A lost notification does not affect our work: systemd acts on it itself.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notify_socket:
            notify_socket.settimeout(NOTIFY_TIMEOUT_SECONDS)
            text = '\n'.join(' '.join(line.splitlines()) for line in lines)
            notify_socket.sendto(text.encode(errors='replace'), self._address)


def render_unit(name: str, command: Sequence[str]) -> str:
    """Render the unit `name` ('ecompute.service'), which runs `command`."""
    executable, *arguments = command
    # systemd expands variables only in the arguments, not in the program.
    words = [quote_argument(executable), *(quote_argument(argument).replace('$', '$$') for argument in arguments)]
    return (UNITS / name).read_text(encoding='utf-8').replace(COMMAND_PLACEHOLDER, ' '.join(words))


def make_command(argv0: str, python: str, module: str) -> list[str]:
    """Make a command that runs in any directory: `argv0` if executable, else `python -m module`."""
    if os.access(argv0, os.X_OK):
        return [os.path.abspath(argv0)]
    # -P: root must not import code from the working directory.
    return [python, '-P', '-m', module]


def find_unsafe_directory(path: Path) -> Path | None:
    """Find the first directory on a path, or behind its links, that root does not own or search."""
    for variant in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        for place in (*reversed(variant.parents), variant):
            try:
                status = place.stat()
            except OSError:
                break  # it does not exist yet, or only root can enter it
            if stat.S_ISDIR(status.st_mode) and (status.st_uid != 0 or not status.st_mode & stat.S_IXUSR):
                return place  # its owner may replace programs in it, or root needs capabilities to enter it
    return None


def quote_argument(word: str) -> str:
    """Quote a word for ExecStart=, except `$`: systemd.syntax(7), systemd.service(5)."""
    word = word.replace('%', '%%')
    if re.fullmatch(r'[\w@%$+=:,./-]+', word, re.ASCII):
        return word
    escaped = word.replace('\\', '\\\\').replace('"', '\\"').replace('\n', '\\n')
    return f'"{escaped}"'
