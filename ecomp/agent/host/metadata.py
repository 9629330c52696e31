"""The metadata server's process, and the files that it and ecompute exchange, named by MAC."""

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

from ecomp.errors import BuildFailed, EcompError, UsageError
from ecomp.files import watch_files, write_durably
from ecomp.model.guest import METADATA_ADDRESS, make_mac_conflict, make_network_config
from ecomp.model.order import Request
from ecomp.model.parsers import MAX_REASON_CHARACTERS
from ecomp.model.text import make_printable
from ecomp.model.user_data import GuestReport, parse_guest_report
from ecomp.yaml_file import require_trusted

if TYPE_CHECKING:
    from ecomp.virt.libvirt_host import Libvirt

# How long mdserver may take to print a seed; then the build fails.
SEED_SECONDS = 60.0


def make_seed(guest_directory: Path, config_directory: Path, mac: str, phones_home: bool) -> Mapping[str, bytes]:
    """Return {name: content} of a guest's NoCloud disk, from mdserver, or raise BuildFailed."""
    try:
        # Without this option cloud-init reports its end to the metadata server.
        options = [] if phones_home else ['--no-phone-home']
        with open_configuration(config_directory) as (conf_arguments, opened):
            command = [*make_command('seed', guest_directory), *options, mac, *conf_arguments]
            result = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SEED_SECONDS, cwd='/', pass_fds=opened
            )
    except subprocess.TimeoutExpired as error:
        raise BuildFailed('scheduled', f'mdserver.seed made no metadata within {SEED_SECONDS:g} s') from error
    except UsageError as error:
        raise BuildFailed('scheduled', str(error)) from error
    if result.returncode:
        lines = result.stderr.decode(errors='replace').strip().splitlines()
        raise BuildFailed('scheduled', lines[-1] if lines else f'mdserver.seed exited with code {result.returncode}')
    return {name: text.encode(errors='surrogateescape') for name, text in json.loads(result.stdout).items()}


log = logging.getLogger(__name__)

START_TIMEOUT_SECONDS = 10.0
# Allows binding to an address that this host does not have yet: ip(7). Python 3.11 has no name for it.
IP_FREEBIND = 15
# The uid of our server once it listens: unassigned, so it owns no file and no other process. `nobody` has files on NFS
# and runs other daemons; dnsmasq's users exist on some distributions only, and belong to a DHCP server. systemd's table
# of uids lists 65520 to 65533 as unused, Debian's policy (9.2.2) as reserved; containers have uids below 65536, too.
# Only a lab runs two servers on one machine: either can end the other, and no more (ptrace(2): not dumpable).
SERVER_UID = '65520'


def serve_metadata(
    libvirt: Libvirt, state: Path, config_directory: Path, warns_without_bridge: bool, at_exit: ExitStack
) -> Callable[[], None]:
    """Give a bridge the address, start a server if none answers, and return what repeats both."""
    bridge = libvirt.find_bridge()
    if bridge is None:
        if warns_without_bridge:
            reason = 'no network in `networks:` has a bridge that libvirt manages'
            log.warning('no metadata is served: %s. Fix: set `metadata: iso` in compute.yaml', reason)
        return lambda: None
    server = MetadataServer(state / 'metadata', config_directory, bridge)
    # A killed ecompute leaves the address on the bridge. This file says that ecompute added it, and may remove it.
    marker = state / 'metadata-address'
    is_ours = marker.exists()

    def ensure() -> None:
        nonlocal is_ours
        if not libvirt.has_metadata_address():
            is_ours = True
            with suppress(OSError):  # the disk is full
                marker.touch()
            libvirt.set_metadata_address(True)
            log.info('assigned %s to bridge %s, for the metadata server', METADATA_ADDRESS, bridge)
        server.ensure()

    def remove_address() -> None:
        if is_ours:
            libvirt.set_metadata_address(False)
            marker.unlink(missing_ok=True)

    at_exit.callback(remove_address)
    at_exit.callback(server.stop)
    ensure()
    return ensure


class MetadataServer:
    """The metadata server at 169.254.169.254: ours, or one that was started outside ecomp."""

    def __init__(self, guest_directory: Path, config_directory: Path, bridge: str) -> None:
        self._guest_directory, self._config_directory, self._bridge = guest_directory, config_directory, bridge
        self._process: subprocess.Popen[bytes] | None = None

    def ensure(self) -> None:
        """Start our server, unless it runs or another one answers, and wait until ours answers.

        Call it only when this host has the address, which may otherwise be a cloud's own service.
        """
        if self._process is not None:
            if (code := self._process.poll()) is None:
                return
            log.warning('the metadata server ended with exit code %s: starting it again', code)
            self._process = None
        elif (page := fetch_root_page()) is not None:
            if is_metadata(page):
                log.info('a metadata server already answers at %s: not starting another', METADATA_ADDRESS)
                return
            endpoint = f'{METADATA_ADDRESS}:80'
            raise EcompError(f'{endpoint}: another service listens there. Fix: stop it, or bind it to another address')
        # The server answers only this host, the bridge and holders of DHCP leases.
        options = ['--bridge', self._bridge, '--with-parent']
        if os.geteuid() == 0:
            options += ['--user', SERVER_UID]
        with open_configuration(self._config_directory) as (conf_arguments, opened):
            command = [*make_command('server', self._guest_directory), *options, *conf_arguments]
            # Its stdin is a pipe from ecompute, so that it ends with ecompute, even with a killed one.
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, cwd='/', pass_fds=opened)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not is_metadata(fetch_root_page()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                conf = self._config_directory / 'mdserver.conf'
                raise EcompError(f'the metadata server did not start: the reason is logged above. Try: correct {conf}')
            time.sleep(0.05)
        log.info('started a metadata server at %s, pid %d', METADATA_ADDRESS, self._process.pid)

    def stop(self) -> None:
        """Stop our server, if it runs, and kill it if it does not end within 5 s."""
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


def make_command(program: str, guest_directory: Path) -> list[str]:
    # -P: root must not import files from the directory in which ecompute is started.
    return [sys.executable, '-P', '-m', f'mdserver.{program}', '--guests', str(guest_directory.resolve())]


@contextmanager
def open_configuration(directory: Path) -> Iterator[tuple[list[str], list[int]]]:
    """Open mdserver.conf, if any, and yield arguments for mdserver and descriptors to pass on."""
    path = directory / 'mdserver.conf'
    try:
        # O_PATH, because opening a pipe for reading blocks, and opening a device may have side effects.
        opened = os.open(path, os.O_PATH)
    except FileNotFoundError:
        yield [], []
        return
    except OSError as error:
        raise UsageError(f'{path}: {error.strerror}. Fix: make the file readable, or remove it') from error
    try:
        # The child gets the checked file's descriptor, because its name might lead to another file by then.
        require_trusted(str(path), os.fstat(opened))
        yield [f'/proc/self/fd/{opened}'], [opened]
    finally:
        os.close(opened)


def is_metadata(page: bytes | None) -> bool:
    """Return whether a page is the root of an EC2 metadata server, which lists versions."""
    return page is not None and {b'2009-04-04', b'latest'} <= {line.strip(b'/') for line in page.split()}


def is_address_taken() -> bool:
    """Probe whether a server that serves no metadata listens where ours would."""
    # Nothing is sent to the address unless this host has it, because in a cloud it is the cloud's own service.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore recently closed connections
        try:
            probe.bind((METADATA_ADDRESS, 0))
            listener = METADATA_ADDRESS
        except OSError:
            listener = '127.0.0.1'  # a server on all addresses answers here, too
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
        try:
            probe.bind((METADATA_ADDRESS, 80))
        except OSError as error:
            return error.errno == errno.EADDRINUSE and not is_metadata(fetch_root_page(listener))
    return False


def fetch_root_page(address: str = METADATA_ADDRESS) -> bytes | None:
    """Fetch the first 4 KiB of the root page, or None if no server answers within 2 s."""
    connection = http.client.HTTPConnection(address, timeout=2)
    try:
        connection.request('GET', '/')
        return connection.getresponse().read(4096)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


DATA_VERSION = 1
READY_SUFFIX = '.ready'
# Suffix of the file, named by MAC, in which the metadata server writes why it refused a guest.
REFUSAL_SUFFIX = '.refused'
# Suffix of the file in which the metadata server writes a guest's report, until it is complete or the server is killed.
PARTIAL_REPORT_SUFFIX = '.said'
# Size limit of a guest's report: a longer one is malformed, and means only that the guest is ready.
REPORT_LIMIT_BYTES = 32 * 1024


class GuestData:
    """The directory of files that ecompute and the metadata server write for each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Not held while a file is written, which may take seconds and concerns one instance.
        self._lock = threading.Lock()
        self._pending_writes: dict[str, str] = {}  # the instances whose files are being written, by MAC
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, request: Request, macs: Sequence[str], list_current: Callable[[], Container[str]] = tuple) -> None:
        """Write a file for each MAC of an instance, and remove an earlier report.

        A MAC of another instance in `list_current()`, or of one that is written now, raises BuildFailed.
        """
        with self._lock:  # two instances with one MAC may be built concurrently
            for mac in macs:
                other = self._pending_writes.get(mac) or self._read_owner(mac)
                if other not in (None, request.instance) and (mac in self._pending_writes or other in list_current()):
                    raise make_mac_conflict(mac, other)
            self._pending_writes.update(dict.fromkeys(macs, request.instance))
        try:
            self._write(request, macs)
        finally:
            with self._lock:
                for mac in macs:
                    self._pending_writes.pop(mac, None)

    def _write(self, request: Request, macs: Sequence[str]) -> None:
        self.remove_report(request.instance)  # the guest of an undone build may have reported
        ssh_keys, user_data = request.ssh_keys, request.user_data
        for mac in macs:
            data = {
                'version': DATA_VERSION,
                'instance': request.instance,
                'mac': mac,
                'hostname': request.name or f'vm-{request.instance[:8]}',
                # Keys or user-data of None mean those of mdserver.conf.
                'public_keys': None if ssh_keys is None else list(ssh_keys),
                # Bytes that are not UTF-8 (gzip) become lone surrogates, which JSON can represent.
                'user_data': None if user_data is None else user_data.decode(errors='surrogateescape'),
                'network_config': make_network_config(macs),
            }
            write_durably(self.directory / f'{mac}.json', json.dumps(data) + '\n')

    def read_instances(self) -> dict[str, str]:
        """Return {MAC: instance} of the files for guests, and {instance: instance} of reports."""
        suffixes = READY_SUFFIX, PARTIAL_REPORT_SUFFIX
        reporters = {path.stem for suffix in suffixes for path in self.directory.glob(f'*{suffix}')}
        owners = {path.stem: self._read_owner(path.stem) for path in self.directory.glob('*.json')}
        return {each: each for each in reporters} | {mac: owner for mac, owner in owners.items() if owner is not None}

    def read_user_data(self, mac: str) -> bytes | None:
        """Return the user-data in a MAC's file, or None if it has none or is unreadable."""
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            text = json.loads((self.directory / f'{mac}.json').read_bytes())['user_data']
            return bytes(text.encode(errors='surrogateescape'))
        return None

    def find_ready(self) -> set[str]:
        try:
            return {path.stem for path in self.directory.glob(f'*{READY_SUFFIX}')}
        except OSError as error:
            # The next plan reads it again; this one must not fail.
            log.debug('%s cannot be read: %s', self.directory, error)
            return set()

    def read_refusals(self) -> dict[str, str]:
        """Return {MAC: reason} of the guests that the metadata server refused."""
        with suppress(OSError):  # a file was just removed because its guest was answered: the next plan reads the rest
            texts = {path.stem: path.read_text(errors='replace') for path in self.directory.glob(f'*{REFUSAL_SUFFIX}')}
            return {mac: make_printable(text[:MAX_REASON_CHARACTERS]) for mac, text in texts.items()}
        return {}

    def remove_refusals(self, macs: Iterable[str]) -> None:
        for mac in macs:
            with suppress(OSError):  # the next plan tries again
                (self.directory / f'{mac}{REFUSAL_SUFFIX}').unlink(missing_ok=True)

    def read_report(self, instance: str) -> GuestReport:
        """Read a guest's report of cloud-init's end, which is empty if malformed or too long."""
        with self.get_report_path(instance).open('rb') as file:
            return parse_guest_report(file.read(REPORT_LIMIT_BYTES))

    def watch_reports(self, notify: Callable[[str], None]) -> Callable[[], None]:
        """Call notify(reason) at each report, from any thread, and return what stops that."""
        try:
            return watch_files(self.directory, READY_SUFFIX, lambda path: notify(f'{path.name} was written'))
        except OSError as error:
            log.warning('%s cannot be watched (%s): guest reports are noticed at the next check', self.directory, error)
            return lambda: None

    def remove_report(self, instance: str) -> None:
        """Remove the report of a guest that went off, or log that it stays."""
        try:
            self._unlink_report(instance)
        except OSError as error:
            # The record of its end must not wait. A read-only file system refuses to remove even a missing file.
            if instance in self.find_ready():
                failure = f'{error.filename} cannot be removed ({error.strerror})'
                log.warning('%s: instance %s will seem ready too early, right after its next start', failure, instance)

    def remove(self, instance: str, macs: Sequence[str]) -> None:
        """Remove all files of an instance, but not a MAC's file that is another instance's."""
        self.remove_refusals(macs)
        for mac in macs:
            with self._lock:  # or another instance with this MAC may write the file between check and removal
                if (self._pending_writes.get(mac) or self._read_owner(mac)) in (None, instance):
                    (self.directory / f'{mac}.json').unlink(missing_ok=True)
        self._unlink_report(instance)  # last: once the other files are gone the metadata server writes no report

    def _unlink_report(self, instance: str) -> None:
        (self.directory / f'{instance}{PARTIAL_REPORT_SUFFIX}').unlink(missing_ok=True)
        self.get_report_path(instance).unlink(missing_ok=True)

    def _read_owner(self, mac: str) -> str | None:
        try:
            return str(json.loads((self.directory / f'{mac}.json').read_bytes())['instance'])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def get_report_path(self, instance: str) -> Path:
        return self.directory / f'{instance}{READY_SUFFIX}'
