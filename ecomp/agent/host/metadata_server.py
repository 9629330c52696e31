"""The metadata server at 169.254.169.254: somebody's, or one that is started here and ends with ecompute.

However ecompute ends: the server watches the pipe that is its stdin.
"""

from __future__ import annotations

import errno
import http.client
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ecomp import config_path
from ecomp.errors import EcompError, UsageError
from ecomp.model.network import METADATA_ADDRESS

if TYPE_CHECKING:
    from ecomp.virt.libvirt_host import Libvirt

log = logging.getLogger(__name__)

START_SECONDS = 10.0
IP_FREEBIND = 15
"""Binds to an address that this host may get later: ip(7). Python 3.11 has no name for it."""
USER = '65520'
"""Who ours is once it listens: a number that is nobody's, and so owns no file and no other process.

`nobody` has files on NFS and is what other daemons are; dnsmasq's users are on some distributions only, and a DHCP
server's. systemd's table of uids has 65520 to 65533 as unused, Debian's policy (9.2.2) as reserved; below 65536 a
container has them too. Two of one machine are in a lab alone: either may end the other there, and can do no more to it
(ptrace(2): not dumpable).
"""


def keep_served(libvirt: Libvirt, state: Path, directory: Path, wanted: bool, at_exit: ExitStack) -> Callable[[], None]:
    """See that a metadata server answers; what keeps it so. `directory` may have its mdserver.conf.

    Where no bridge is libvirt's none can be served, which is said if it is `wanted`.
    """
    bridge = libvirt.bridge_name()
    if bridge is None:
        if wanted:
            none = 'networks: none of them is a network whose bridge libvirt made'
            log.warning('%s: no metadata is served; `metadata: iso` puts it on a disk', none)
        return lambda: None
    server = MetadataServer(state / 'metadata', directory, bridge)
    # One that was killed left the address where it was: with this file it is ours to take off.
    mark = state / 'metadata-address'
    ours = mark.exists()

    def ensure() -> None:
        nonlocal ours
        if not libvirt.metadata_address_present():
            ours = True
            with suppress(OSError):  # a full disk
                mark.touch()
            libvirt.ensure_metadata_address()
            log.info("put %s on the guests' bridge", METADATA_ADDRESS)
        server.ensure()

    def take_off() -> None:
        if ours:
            libvirt.remove_metadata_address()
            mark.unlink(missing_ok=True)

    at_exit.callback(take_off)
    at_exit.callback(server.stop)
    ensure()
    return ensure


class MetadataServer:
    """The server at 169.254.169.254: somebody's, or ours."""

    def __init__(self, guests: Path, directory: Path, bridge: str) -> None:
        """Ours answers this host, whoever is on the guests' `bridge` and whoever has a lease, and no machine else.

        Of root's it is USER once it listens.
        """
        self._guests = guests
        self._directory = directory
        self._bridge = bridge
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """See that one answers; start one if not. EcompError if it does not come up.

        Only to be called when this host itself has the address: elsewhere it may be a cloud's own service.
        """
        if self._process is not None:
            code = self._process.poll()
            if code is None:
                return
            log.warning('the metadata server ended with %s; starting another', code)
            self._process = None
        elif (page := answer()) is not None:
            if is_metadata(page):
                log.info('a metadata server answers at %s', METADATA_ADDRESS)
                return
            at = f'{METADATA_ADDRESS}:80'
            raise EcompError(f'what listens on {at} is no metadata server: stop it, or bind it elsewhere')
        own = ['--bridge', self._bridge, '--with-parent']
        if os.geteuid() == 0:
            own += ['--user', USER]
        with configuration(self._directory) as (words, opened):
            command = [*mdserver('server', self._guests), *own, *words]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd='/', pass_fds=opened)
        end = time.monotonic() + START_SECONDS
        while not is_metadata(answer()):
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                conf = self._directory / 'mdserver.conf'
                raise EcompError(f'the metadata server did not start, for the reason above; is {conf} right?')
            time.sleep(0.05)
        log.info('started a metadata server at %s, pid %d', METADATA_ADDRESS, self._process.pid)

    def stop(self) -> None:
        """End the one we started."""
        if self._process is None:
            return
        assert self._process.stdin is not None  # it was made with a pipe
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None


def mdserver(front_door: str, guests: Path) -> list[str]:
    """The command of one of mdserver's programs, with the directory of GuestData."""
    # -P: what lies in the directory that ecompute is started in is not root's to run.
    return [sys.executable, '-P', '-m', f'mdserver.{front_door}', '--guests', str(guests.resolve())]


@contextmanager
def configuration(directory: Path) -> Iterator[tuple[list[str], list[int]]]:
    """The mdserver.conf in this directory, if there is one: as a word of that command, and what is open for it.

    UsageError: somebody else could have written it, or it cannot be looked at.
    """
    path = directory / 'mdserver.conf'
    try:
        # Looked at, and not opened for reading: a pipe would wait, and a device do whatever it does.
        opened = os.open(path, os.O_PATH)
    except FileNotFoundError:
        yield [], []
        return
    except OSError as error:
        raise UsageError(f'{path}: {error.strerror}: have it readable, or remove it') from error
    try:
        # What was looked at is what is read: by its name the child could find another file there.
        config_path.check(str(path), os.fstat(opened))
        yield [f'/proc/self/fd/{opened}'], [opened]
    finally:
        os.close(opened)


def is_metadata(page: bytes | None) -> bool:
    """True for what a metadata server of EC2's kind lists at its root: its versions."""
    return page is not None and {b'2009-04-04', b'latest'} <= {line.strip(b'/') for line in page.split()}


def is_taken() -> bool:
    """Whether another server than one for metadata listens where ours would, on that address or on all.

    Where this host has not got the address, nothing is sent there: in a cloud it is the cloud's own service.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what was closed a minute ago is in nobody's way
        try:
            probe.bind((METADATA_ADDRESS, 0))
            listener = METADATA_ADDRESS
        except OSError:
            listener = '127.0.0.1'  # who listens on all addresses answers here too
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        try:
            probe.bind((METADATA_ADDRESS, 80))
        except OSError as error:
            return error.errno == errno.EADDRINUSE and not is_metadata(answer(listener))
    return False


def answer(address: str = METADATA_ADDRESS) -> bytes | None:
    """What an HTTP server says at the root of an address, the metadata's; None if none answers."""
    connection = http.client.HTTPConnection(address, timeout=2)
    try:
        connection.request('GET', '/')
        return connection.getresponse().read(4096)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
