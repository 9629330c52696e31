"""The process that keeps root's rights for mdserver: privilege separation as in sshd.

mdserver parses what guests send, so it must not be root. The files it reads are root's, in root's directories.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import pwd
import re
import signal
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from mdserver import conf
from mdserver.files import ReadFile, carry_out

# Bytes of a request; a longer one ends the monitor. A guest's report has 4 KiB, up to six times that in JSON's escapes.
MAX_REQUEST_BYTES = 32768
PR_SET_NO_NEW_PRIVS = 38
MAX_UID = 2**32 - 2  # uid; the next one means "unchanged"


class Monitor:
    """A process that keeps root's rights, to be forked before this one starts threads."""

    def __init__(self, config: conf.Config) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = multiprocessing.Pipe()
        self._process = multiprocessing.get_context('fork').Process(target=_serve, args=(config, theirs, self._channel))
        self._process.start()
        theirs.close()

    def ask(self, request: str) -> list[ReadFile]:
        """Return what carry_out(request) returns in the monitor, or raise OSError if it has ended."""
        with self._lock:
            try:
                # Bytes, not an object: whoever unpickles runs what the sender chooses, and the monitor is root.
                self._channel.send_bytes(request.encode())
                answer: list[ReadFile] = self._channel.recv()
            except EOFError as error:
                raise OSError(errno.EPIPE, 'the monitor process has ended') from error
            except BaseException:
                # An interrupted answer would be read as the answer to the next request.
                self._channel.close()
                raise
        return answer

    def close(self) -> None:
        with self._lock:
            self._channel.close()
        self._process.join()


def _serve(config: conf.Config, channel: Connection, other_end: Connection) -> None:
    # Ends only after mdserver: a Ctrl-C goes to both.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    other_end.close()
    with suppress(EOFError, OSError):  # mdserver has ended
        while True:
            channel.send(carry_out(config, channel.recv_bytes(MAX_REQUEST_BYTES).decode(errors='replace')))


class UserIds(NamedTuple):
    uid: int
    gid: int


def find_user(user: str) -> UserIds:
    """Return the ids of a user (name, or any number), or raise ValueError, also for root."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        if not re.fullmatch('[0-9]{1,10}', user) or int(user) > MAX_UID:
            raise ValueError(f'user {user!r} does not exist. Fix: give an existing user or a number') from error
        ids = UserIds(int(user), int(user))
        with suppress(KeyError):
            ids = UserIds(ids.uid, pwd.getpwuid(ids.uid).pw_gid)
    else:
        ids = UserIds(entry.pw_uid, entry.pw_gid)
    if ids.uid == 0:
        raise ValueError(f'{user!r} is root, which keeps all rights. Fix: give another user')
    return ids


def drop_privileges(ids: UserIds) -> None:
    """Become this user irrevocably, in a process of one thread, or raise OSError."""
    # See setresuid(2), capabilities(7) on leaving uid 0, prctl(2) for PR_SET_NO_NEW_PRIVS, proc(5) for the status
    os.setgroups([])
    os.setresgid(ids.gid, ids.gid, ids.gid)
    os.setresuid(ids.uid, ids.uid, ids.uid)
    # Programs that it runs cannot regain rights, either.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), 'no_new_privs cannot be set')
    # Securebits can keep capabilities across a change of user.
    if re.search(r'^Cap(Prm|Eff|Amb):\s*0*[1-9a-f]', Path('/proc/self/status').read_text(), re.MULTILINE):
        raise OSError(errno.EPERM, 'capabilities are kept')
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise OSError(errno.EPERM, 'the process can become root again')
