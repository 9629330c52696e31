"""systemd: what it is told of a service that it has started, and the units by which it starts ours.

The words are datagrams to the socket that NOTIFY_SOCKET names: sd_notify(3), sd_watchdog_enabled(3). Started by anybody
else, nothing is said.
"""

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
COMMAND = '@command@'
"""What stands in a unit of UNITS for the command that it runs."""
PATIENCE = 5.0
"""Seconds in which systemd has to take a word; then it is left unsaid."""


class Service:
    """This process as systemd's service. `socket_path` '' means that it is none; `watchdog` is in seconds."""

    def __init__(self, socket_path: str = '', watchdog: float = math.inf) -> None:
        self._address = re.sub('^@', '\0', socket_path)
        self._every = watchdog / 2
        self._next = -math.inf

    @classmethod
    def of(cls, environment: MutableMapping[str, str]) -> Service:
        """Take systemd's variables out of `environment`, so that no child of ours speaks for us."""
        path = environment.pop('NOTIFY_SOCKET', '')
        watchdog, pid = environment.pop('WATCHDOG_USEC', ''), environment.pop('WATCHDOG_PID', '')
        ours = watchdog.isdecimal() and pid in ('', str(os.getpid()))
        return cls(path, int(watchdog) / 1e6 if ours and int(watchdog) else math.inf)

    def ready(self, status: str) -> None:
        """Say that it is ready, and what it does, in a line."""
        self._say('READY=1', f'STATUS={status}')

    def stopping(self, status: str) -> None:
        """Say that it ends. From now on systemd waits for that alone, and no longer for alive()."""
        self._say('STOPPING=1', f'STATUS={status}')

    def alive(self) -> float:
        """Say that it lives, if that is due; after how many seconds it is due again, math.inf without a watchdog."""
        now = time.monotonic()
        if self._every < math.inf and now >= self._next:
            self._say('WATCHDOG=1')
            self._next = now + self._every
        return max(0.0, self._next - now) if self._every < math.inf else math.inf

    def _say(self, *lines: str) -> None:
        if not self._address:
            return
        # Nothing of our work is lost where systemd does not hear: it acts on that by itself.
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as said:
            said.settimeout(PATIENCE)
            text = '\n'.join(' '.join(line.splitlines()) for line in lines)
            said.sendto(text.encode(errors='replace'), self._address)


def unit(name: str, command: Sequence[str]) -> str:
    """The unit of this name, which runs this command."""
    first, *others = command
    # Variables are those of the words behind the program alone.
    words = [quoted(first), *(quoted(each).replace('$', '$$') for each in others)]
    return (UNITS / name).read_text(encoding='utf-8').replace(COMMAND, ' '.join(words))


def program(called: str, python: str, module: str) -> list[str]:
    """The first words of a command that runs what was `called` (sys.argv[0]) from any directory.

    Where that is no program, but a module's file, it is run by `python`.
    """
    if os.access(called, os.X_OK):
        return [os.path.abspath(called)]
    # -P: what lies in the directory that it is started in is not root's to run.
    return [python, '-P', '-m', module]


def in_root_s_way(path: Path) -> Path | None:
    """The directory, `path` or one above it, that keeps root without capabilities from it; None if none does.

    That is one that is another user's: root may be shut out and writes nothing in it, and that user could put another
    program there. What is not there yet is in nobody's way.
    """
    for way in (Path(os.path.abspath(path)), Path(os.path.realpath(path))):
        for each in (*reversed(way.parents), way):
            try:
                found = each.stat()
            except OSError:
                break  # not there yet, or root's alone
            if stat.S_ISDIR(found.st_mode) and (found.st_uid != 0 or not found.st_mode & stat.S_IXUSR):
                return each
    return None


def quoted(word: str) -> str:
    """A word as ExecStart= takes it, but for `$`. systemd.syntax(7), systemd.service(5) on command lines."""
    word = word.replace('%', '%%')
    if re.fullmatch(r'[\w@%$+=:,./-]+', word, re.ASCII):
        return word
    escaped = word.replace('\\', '\\\\').replace('"', '\\"').replace('\n', '\\n')
    return f'"{escaped}"'
