"""The process that keeps root's rights for mdserver, which drops its own: privilege separation as in sshd.

mdserver parses what guests send, so it must not be root; the files it reads are root's, in root's directories. A child
that stays root opens them and passes the descriptors. A request is one of the five of `files`, a packet of text. The
answer is a packet `ERRNO NAME` for each file, with its descriptor if ERRNO is 0, and a final `.` (unix(7):
SOCK_SEQPACKET, SCM_RIGHTS). On dropping rights permanently see setresuid(2), capabilities(7) on leaving uid 0, prctl(2)
for PR_SET_NO_NEW_PRIVS, and proc(5) for /proc/PID/status.
"""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import pwd
import re
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from mdserver import conf
from mdserver.files import OpenedFile, carry_out

# Bytes of a request; a longer one is truncated. A guest's report has 4 KiB, up to six times that in JSON's escapes.
MAX_REQUEST_BYTES = 32768
# Bytes of an answer; a longer one is truncated. The kernel accepts paths of up to 4096.
MAX_ANSWER_BYTES = 8192
END_OF_ANSWER = b'.'
PR_SET_NO_NEW_PRIVS = 38
MAX_UID = 2**32 - 2  # uid; the next one means "unchanged"


class Monitor:
    """A monitor process, which runs until close(). It is forked: create it before any other thread."""

    def __init__(self, config: conf.Config) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = multiprocessing.get_context('fork').Process(target=_serve, args=(config, theirs, self._channel))
        self._process.start()
        theirs.close()

    def ask(self, request: str) -> list[OpenedFile]:
        """Return the answer of carry_out(request) by the monitor; OSError if that is gone. Thread-safe."""
        files: list[OpenedFile] = []
        with self._lock:
            try:
                self._channel.send(request.encode())
                while (packet := self._receive())[0] != END_OF_ANSWER:
                    number, _, name = packet[0].partition(b' ')
                    path = os.fsdecode(name)
                    opened = packet[1] if number == b'0' else OSError(int(number), os.strerror(int(number)), path)
                    files.append((path, opened))
            except BaseException:
                # An interrupted answer would be read as the answer to the next request.
                self._disconnect()
                raise
        return files

    def close(self) -> None:
        """End the monitor, and wait until it is gone."""
        self._disconnect()
        self._channel.close()
        self._process.join()

    def _receive(self) -> tuple[bytes, int]:
        packet, descriptors, _, _ = socket.recv_fds(self._channel, MAX_ANSWER_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            raise OSError(errno.EPIPE, 'the monitor process has ended')
        return packet, descriptors[0] if descriptors else -1

    def _disconnect(self) -> None:
        with suppress(OSError):  # already shut down by either end
            self._channel.shutdown(socket.SHUT_RDWR)


def _serve(config: conf.Config, channel: socket.socket, other_end: socket.socket) -> None:
    # Ends only after mdserver: a Ctrl-C goes to both.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    other_end.close()
    try:
        while request := channel.recv(MAX_REQUEST_BYTES):
            for name, opened in carry_out(config, request.decode(errors='replace')):
                _send_file(channel, os.fsencode(name), opened)
            channel.send(END_OF_ANSWER)
    except OSError:
        return  # mdserver has ended


def _send_file(channel: socket.socket, name: bytes, opened: int | OSError) -> None:
    if isinstance(opened, OSError):
        channel.send(b'%d %s' % (opened.errno or errno.EIO, name))
        return
    try:
        socket.send_fds(channel, [b'0 ' + name], [opened])
    finally:
        os.close(opened)


class UserIds(NamedTuple):
    """The uid of a user and the gid of its group."""

    uid: int
    gid: int


def find_user(user: str) -> UserIds:
    """Return the ids of a user name or number; an unused number is its own gid. ValueError if unknown or root."""
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
    """Become that user with only that group and no capabilities, permanently, while there is one thread.

    Raises OSError, also if root or a capability could be regained.
    """
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
