"""What the metadata server knows of guests: one file each, mode 0600, named by MAC. Neither side imports the other.

The server ends with ecompute, however that ends: it watches the pipe that is its stdin.
"""

from __future__ import annotations

import errno
import http.client
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ecomp.compute_conf import ComputeConfig
from ecomp.errors import BuildFailed, EcompError, UsageError
from ecomp.files import watch, write_durably
from ecomp.model.guest import METADATA_ADDRESS, GuestWord, network_config, parse_word, same_mac
from ecomp.model.order import REASON_LIMIT, Request
from ecomp.model.text import printable
from ecomp.yaml_file import check_owner

if TYPE_CHECKING:
    from ecomp.virt.libvirt_host import Libvirt

SECONDS = 60.0
"""How long mdserver may take to say it: beyond that the build fails."""


def nocloud(config: ComputeConfig, is_served: Callable[[], bool]) -> Callable[[str], Mapping[str, bytes]] | None:
    """What says what is on a guest's NoCloud disk; None where guests get none. `is_served`: metadata is served here."""
    if config.metadata == 'network':
        return None
    return lambda mac: seed(config.state / 'metadata', config.directory, mac, phones_home=is_served())


def seed(guests: Path, directory: Path, mac: str, phones_home: bool) -> Mapping[str, bytes]:
    """The files of the NoCloud disk of the guest with this MAC, by name. BuildFailed('scheduled', reason).

    `guests` is GuestData's directory, `directory` may have an mdserver.conf. With `phones_home` a metadata server is
    there to hear of it when its cloud-init is through.
    """
    try:
        options = [] if phones_home else ['--no-phone-home']
        with configuration(directory) as (words, opened):
            command = [*mdserver('seed', guests), *options, mac, *words]
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, cwd='/', pass_fds=opened
            )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed('scheduled', f'its seed is not known within {SECONDS:g} s') from error
    except UsageError as error:
        raise BuildFailed('scheduled', str(error)) from error
    said = done.stderr.decode(errors='replace').strip().splitlines() or [f'mdserver.seed ended with {done.returncode}']
    if done.returncode:
        raise BuildFailed('scheduled', said[-1])
    return {name: text.encode(errors='surrogateescape') for name, text in json.loads(done.stdout).items()}


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
            libvirt.set_metadata_address(True)
            log.info("put %s on the guests' bridge", METADATA_ADDRESS)
        server.ensure()

    def take_off() -> None:
        if ours:
            libvirt.set_metadata_address(False)
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
        check_owner(str(path), os.fstat(opened))
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


VERSION = 1
READY = '.ready'
REFUSED = '.refused'
"""The suffix of the file, named by MAC, in which the metadata server says why it refused a guest."""
BEING_TOLD = '.said'
"""Where the metadata server writes a guest's word, before that is whole; one that is killed leaves it."""
WORD_LIMIT = 32 * 1024
"""Bytes of a guest's word; what is longer cannot be read, and says no more than that the guest is ready."""


class GuestData:
    """What the metadata server is told of guests: files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Never held while a file is written: a disk may take seconds, and it is one instance's.
        self._lock = threading.Lock()
        self._being_told: dict[str, str] = {}
        """Of each MAC whose file is being written, the instance."""
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, request: Request, macs: Sequence[str], here: Callable[[], Container[str]] = tuple) -> None:
        """Tell the metadata server of an instance. Keys and user-data null: those of mdserver.conf.

        BuildFailed where a MAC is that of another instance that is `here`; what another one has left is overwritten.
        """
        with self._lock:  # two that have one MAC may come at once, so who is here is asked under it
            for mac in macs:
                other = self._being_told.get(mac) or self._whose(mac)
                # Whoever is being told of is here, too.
                if other not in (None, request.instance) and (mac in self._being_told or other in here()):
                    raise same_mac(mac, other)
            self._being_told.update(dict.fromkeys(macs, request.instance))
        try:
            self._write(request, macs)
        finally:
            with self._lock:
                for mac in macs:
                    self._being_told.pop(mac, None)

    def _write(self, request: Request, macs: Sequence[str]) -> None:
        self.off(request.instance)  # a guest that was undone may have said that it is ready
        keys, user_data = request.ssh_keys, request.user_data
        for mac in macs:
            data = {
                'version': VERSION,
                'instance': request.instance,
                'mac': mac,
                'hostname': request.name or f'vm-{request.instance[:8]}',
                'public_keys': None if keys is None else list(keys),
                # What is no UTF-8 (gzip) survives as halves of surrogate pairs, which JSON can say.
                'user_data': None if user_data is None else user_data.decode(errors='surrogateescape'),
                'network_config': network_config(macs),
            }
            write_durably(self.directory / f'{mac}.json', json.dumps(data) + '\n')

    def all(self) -> dict[str, str]:
        """Whose data is there: the instance of each MAC, and of each word that one is ready, by the instance itself.

        A file that is none of ours is passed over.
        """
        words = (path for suffix in (READY, BEING_TOLD) for path in self.directory.glob(f'*{suffix}'))
        found = {path.stem: path.stem for path in words}
        for path in self.directory.glob('*.json'):
            if (instance := self._whose(path.stem)) is not None:
                found[path.stem] = instance
        return found

    def ready(self) -> set[str]:
        """The instances whose cloud-init has said that it is through: the metadata server leaves a file for each."""
        try:
            return {path.stem for path in self.directory.glob(f'*{READY}')}
        except OSError as error:
            # It is seen at the next look; nothing that is planned may wait for it.
            log.debug('%s cannot be read: %s', self.directory, error)
            return set()

    def read_refusals(self) -> dict[str, str]:
        """Return why the metadata server refuses guests, {MAC: reason}."""
        with suppress(OSError):  # one is removed this moment, for it was answered: the next look has the others
            paths = self.directory.glob(f'*{REFUSED}')
            return {path.stem: printable(path.read_text(errors='replace')[:REASON_LIMIT]) for path in paths}
        return {}

    def forget_refusals(self, macs: Iterable[str]) -> None:
        """Remove what the metadata server said of refused guests, by MAC."""
        for mac in macs:
            with suppress(OSError):  # it is tried again at the next look
                (self.directory / f'{mac}{REFUSED}').unlink(missing_ok=True)

    def word(self, instance: str) -> GuestWord:
        """What a guest said when its cloud-init was through. OSError."""
        with self._ready(instance).open('rb') as file:
            return parse_word(file.read(WORD_LIMIT))

    def on_ready(self, notify: Callable[[str], None]) -> Callable[[], None]:
        """From now on notify(reason) when one says so; returns what ends it."""
        try:
            return watch(self.directory, READY, lambda path: notify(f'{path.name} was written'))
        except OSError as error:
            log.warning('%s cannot be watched (%s): a guest is seen ready when next looked at', self.directory, error)
            return lambda: None

    def off(self, instance: str) -> None:
        """Forget that the instance was ready: its guest is off, and is to say so again when it was started."""
        try:
            self._take_back(instance)
        except OSError as error:
            # What is written of a guest that went off does not wait for this; and where the file system is read-only,
            # what is not there cannot be removed either.
            if instance in self.ready():
                told = f'{error.filename}: {error.strerror}'
                log.warning('%s: instance %s will be called ready as soon as it is started again', told, instance)

    def remove(self, instance: str, macs: Sequence[str]) -> None:
        """Forget an instance. Nothing there is success."""
        self.forget_refusals(macs)
        for mac in macs:
            with self._lock:  # else it may be another's, that has the MAC, too, by the time that it is removed
                if (self._being_told.get(mac) or self._whose(mac)) in (None, instance):
                    (self.directory / f'{mac}.json').unlink(missing_ok=True)
        self._take_back(instance)  # last: without the others the metadata server takes its word back

    def _take_back(self, instance: str) -> None:
        """Remove the instance's word. OSError."""
        (self.directory / f'{instance}{BEING_TOLD}').unlink(missing_ok=True)
        self._ready(instance).unlink(missing_ok=True)

    def _whose(self, mac: str) -> str | None:
        """The instance in the MAC's file; None where there is none, or it is none of ours."""
        try:
            return str(json.loads((self.directory / f'{mac}.json').read_bytes())['instance'])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _ready(self, instance: str) -> Path:
        return self.directory / f'{instance}{READY}'
