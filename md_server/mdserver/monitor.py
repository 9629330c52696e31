"""The process beside mdserver that keeps root's rights, once mdserver itself has given them up.

mdserver reads what guests send and so has to be nobody; its files are root's, below directories that are root's. So a
child that stays root opens them, and hands the descriptors over: it is asked in one of the five ways of files, writes
down what a guest said without reading it, and ends with mdserver. This is privilege separation as sshd has it (Provos,
Friedl, Honeyman 2003,
https://www.usenix.org/conference/12th-usenix-security-symposium/preventing-privilege-escalation).

A request is a packet of text, the answer one for each file, `ERRNO NAME`, with its descriptor where ERRNO is 0, and one
that is `.` at the end (unix(7): SOCK_SEQPACKET, SCM_RIGHTS).

Sources for giving them up, for good: setresuid(2), capabilities(7) on what leaving uid 0 does, prctl(2) and
PR_SET_NO_NEW_PRIVS, proc(5) for /proc/PID/status.
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
from mdserver.files import Opened, carry_out

REQUEST_LIMIT = 32768
"""Bytes of a request, which is cut off there; the longest has what a guest said: 4 KiB, in JSON's escapes six times."""
NAME_LIMIT = 8192
"""Bytes of an answer, which is cut off there; the kernel takes paths of up to 4096."""
END = b'.'
PR_SET_NO_NEW_PRIVS = 38
LARGEST = 2**32 - 2  # of a uid: the one above means "as it is"


class Monitor:
    """A monitor process, from now until close(). It is forked, so make it while this process has one thread."""

    def __init__(self, config: conf.Config) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = multiprocessing.get_context('fork').Process(target=_serve, args=(config, theirs, self._channel))
        self._process.start()
        theirs.close()

    def ask(self, request: str) -> list[Opened]:
        """What files.carry_out() returns for `request`, opened by the monitor. OSError if that is gone. Thread-safe."""
        found: list[Opened] = []
        with self._lock:
            try:
                self._channel.send(request.encode())
                while (said := self._hear())[0] != END:
                    number, _, name = said[0].partition(b' ')
                    path = os.fsdecode(name)
                    opened = said[1] if number == b'0' else OSError(int(number), os.strerror(int(number)), path)
                    found.append((path, opened))
            except BaseException:
                # Cut off in the middle: whoever asks next would be given this one's answer.
                self._hang_up()
                raise
        return found

    def close(self) -> None:
        """End the monitor, and wait until it is gone."""
        self._hang_up()
        self._channel.close()
        self._process.join()

    def _hear(self) -> tuple[bytes, int]:
        said, descriptors, _, _ = socket.recv_fds(self._channel, NAME_LIMIT, 1, socket.MSG_CMSG_CLOEXEC)
        if not said:
            raise OSError(errno.EPIPE, 'its monitor is gone')
        return said, descriptors[0] if descriptors else -1

    def _hang_up(self) -> None:
        with suppress(OSError):  # hung up before, or the other end did
            self._channel.shutdown(socket.SHUT_RDWR)


def _serve(config: conf.Config, channel: socket.socket, other_end: socket.socket) -> None:
    # It ends when mdserver does, and not before: a Ctrl-C goes to both.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    other_end.close()
    try:
        while request := channel.recv(REQUEST_LIMIT):
            for name, opened in carry_out(config, request.decode(errors='replace')):
                _tell(channel, os.fsencode(name), opened)
            channel.send(END)
    except OSError:
        return  # nobody hears any more


def _tell(channel: socket.socket, name: bytes, opened: int | OSError) -> None:
    if isinstance(opened, OSError):
        channel.send(b'%d %s' % (opened.errno or errno.EIO, name))
        return
    try:
        socket.send_fds(channel, [b'0 ' + name], [opened])
    finally:
        os.close(opened)


class Ids(NamedTuple):
    """The number of a user and of its group."""

    uid: int
    gid: int


def find_user(user: str) -> Ids:
    """The numbers of a user by name or, as chown(1) takes it, by a number that no user need have. Raises ValueError."""
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        if not re.fullmatch('[0-9]{1,10}', user) or int(user) > LARGEST:
            raise ValueError(f'there is no user {user!r} here: name one that is, or give a number') from error
        ids = Ids(int(user), int(user))
        with suppress(KeyError):
            ids = Ids(ids.uid, pwd.getpwuid(ids.uid).pw_gid)
    else:
        ids = Ids(entry.pw_uid, entry.pw_gid)
    if ids.uid == 0:
        raise ValueError(f'{user!r} is root, who gives up nothing: name another user')
    return ids


def drop_rights(ids: Ids) -> None:
    """Make this process that user, of that group alone, without any capability, for good. Raises OSError.

    Called while the process has one thread.
    """
    os.setgroups([])
    os.setresgid(ids.gid, ids.gid, ids.gid)
    os.setresuid(ids.uid, ids.uid, ids.uid)
    # Nor by running a program that would change them.
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), 'no_new_privs cannot be set')
    # Securebits can have them kept, across a change of user.
    if re.search(r'^Cap(Prm|Eff|Amb):\s*0*[1-9a-f]', Path('/proc/self/status').read_text(), re.MULTILINE):
        raise OSError(errno.EPERM, 'capabilities are kept')
    try:
        os.setuid(0)
    except PermissionError:
        return
    raise OSError(errno.EPERM, 'it can become root again')
