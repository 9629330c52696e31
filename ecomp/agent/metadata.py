"""What the metadata server is told, and that there is one.

Each guest's data is handed over as a file, 0600, named by MAC; neither side imports the other. If no metadata server
answers, one is started; it ends with ecompute, however that ends, for it watches the pipe that is its stdin. Where a
guest gets what it would serve on a disk instead, the same program says what that is.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from ecomp import config_path
from ecomp.agent.state import write_durably
from ecomp.errors import BuildFailed, EcompError, UsageError
from ecomp.files import watch
from ecomp.model.instance import Request
from ecomp.model.network import network_config

log = logging.getLogger(__name__)

ADDRESS = '169.254.169.254'
VERSION = 1
READY = '.ready'
START_SECONDS = 10.0
SEED_SECONDS = 60.0
USER = '65520'
"""Who ours is once it listens: a number that is nobody's, and so owns no file and no other process.

`nobody` has files on NFS and is what other daemons are; dnsmasq's users are on some distributions only, and a DHCP
server's. systemd's table of uids has 65520 to 65533 as unused, Debian's policy (9.2.2) as reserved; below 65536 a
container has them too. Two of one machine are in a lab alone: either may end the other there, and can do no more to it
(ptrace(2): not dumpable).
"""


class GuestData:
    """The files in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def write(self, request: Request, macs: Sequence[str]) -> None:
        """Tell the metadata server of an instance. Keys and user-data null: those of mdserver.conf."""
        self._ready(request.instance).unlink(missing_ok=True)  # a guest that was undone said so
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
        found = {path.stem: path.stem for path in self.directory.glob(f'*{READY}')}
        for path in self.directory.glob('*.json'):
            try:
                found[path.stem] = str(json.loads(path.read_bytes())['instance'])
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return found

    def ready(self) -> set[str]:
        """The instances whose cloud-init has said that it is through: the metadata server leaves a file for each."""
        try:
            return {path.stem for path in self.directory.glob(f'*{READY}')}
        except OSError as error:
            # It is seen at the next look; nothing that is planned may wait for it.
            log.debug('%s cannot be read: %s', self.directory, error)
            return set()

    def on_ready(self, notify: Callable[[str], None]) -> Callable[[], None]:
        """From now on notify(reason) when one says so; returns what ends it."""
        try:
            return watch(self.directory, READY, lambda path: notify(f'{path.name} was written'))
        except OSError as error:
            log.warning('%s cannot be watched (%s): a guest is seen ready when next looked at', self.directory, error)
            return lambda: None

    def remove(self, instance: str, macs: Iterable[str]) -> None:
        """Forget an instance. Nothing there is success."""
        for mac in macs:
            (self.directory / f'{mac}.json').unlink(missing_ok=True)
        # Last: without the others the metadata server takes its word back.
        self._ready(instance).unlink(missing_ok=True)

    def _ready(self, instance: str) -> Path:
        return self.directory / f'{instance}{READY}'


def seed(guests: Path, directory: Path, mac: str, phones_home: bool) -> Mapping[str, bytes]:
    """The files of the NoCloud disk of the guest with this MAC, by name. BuildFailed('scheduled', reason).

    `guests` is GuestData's directory, `directory` may have an mdserver.conf. With `phones_home` a metadata server is
    there to hear of it when its cloud-init is through.
    """
    try:
        command = [*_mdserver('seed', guests), *([] if phones_home else ['--no-phone-home']), mac, *_conf(directory)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SEED_SECONDS, cwd='/')
    except subprocess.TimeoutExpired as error:
        raise BuildFailed('scheduled', f'its seed is not known within {SEED_SECONDS:g} s') from error
    except UsageError as error:
        raise BuildFailed('scheduled', str(error)) from error
    said = done.stderr.decode(errors='replace').strip().splitlines() or [f'mdserver.seed ended with {done.returncode}']
    if done.returncode:
        raise BuildFailed('scheduled', said[-1])
    return {name: text.encode(errors='surrogateescape') for name, text in json.loads(done.stdout).items()}


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
        elif is_metadata(answer()):
            log.info('a metadata server answers at %s', ADDRESS)
            return
        elif answer() is not None:
            raise EcompError(f'what listens on {ADDRESS}:80 is no metadata server: stop it, or bind it elsewhere')
        own = ['--bridge', self._bridge, '--with-parent', *_conf(self._directory)]
        if os.geteuid() == 0:
            own += ['--user', USER]
        self._process = subprocess.Popen([*_mdserver('server', self._guests), *own], stdin=subprocess.PIPE, cwd='/')
        end = time.monotonic() + START_SECONDS
        while not is_metadata(answer()):
            if self._process.poll() is not None or time.monotonic() > end:
                self.stop()
                conf = self._directory / 'mdserver.conf'
                raise EcompError(f'the metadata server did not start, for the reason above; is {conf} right?')
            time.sleep(0.05)
        log.info('started a metadata server at %s, pid %d', ADDRESS, self._process.pid)

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


def _mdserver(front_door: str, guests: Path) -> list[str]:
    # -P: what lies in the directory that ecompute is started in is not root's to run.
    return [sys.executable, '-P', '-m', f'mdserver.{front_door}', '--guests', str(guests.resolve())]


def _conf(directory: Path) -> list[str]:
    """UsageError: somebody else could have written it."""
    path = directory / 'mdserver.conf'
    if not path.exists():
        return []
    config_path.check(str(path), path.stat())
    return [str(path.resolve())]


def is_metadata(page: bytes | None) -> bool:
    """True for what a metadata server of EC2's kind lists at its root: its versions."""
    return page is not None and {b'2009-04-04', b'latest'} <= {line.strip(b'/') for line in page.split()}


def answer() -> bytes | None:
    """What an HTTP server says at the root of the metadata address; None if none answers."""
    connection = http.client.HTTPConnection(ADDRESS, timeout=2)
    try:
        connection.request('GET', '/')
        return connection.getresponse().read(4096)
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
