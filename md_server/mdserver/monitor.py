"""The process beside mdserver that keeps root's rights, once mdserver itself has given them up.

mdserver reads what guests send and so has to be nobody; its files are root's, below directories that are root's. So a
child that stays root opens them, and hands the descriptors over: it is asked in one of the five ways of files, writes
down what a guest said without reading it, and ends with mdserver. This is privilege separation as sshd has it (Provos,
Friedl, Honeyman 2003,
https://www.usenix.org/conference/12th-usenix-security-symposium/preventing-privilege-escalation).

A request is a packet of text, the answer one for each file, `ERRNO NAME`, with its descriptor where ERRNO is 0, and one
that is `.` at the end (unix(7): SOCK_SEQPACKET, SCM_RIGHTS).
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import threading
from contextlib import suppress

from mdserver import conf
from mdserver.files import Opened, carry_out

REQUEST_LIMIT = 32768
"""Bytes of a request, which is cut off there; the longest has what a guest said: 4 KiB, in JSON's escapes six times."""
NAME_LIMIT = 8192
"""Bytes of an answer, which is cut off there; the kernel takes paths of up to 4096."""
END = b'.'


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
