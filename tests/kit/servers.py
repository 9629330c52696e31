"""The real servers of tests and benchmarks: etcd and placement as processes of the caller's own.

Each has a directory for its data and its log, and a free port that it keeps over a restart. It is ready when it says so
itself, and it dies with the thread that started it, however that ends (so start it in the main thread). Nothing of
ecomp is imported here but what has no state: a test of the store must not lean on the store.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.kit.journal import JOURNAL
from tests.kit.placement_database import PlacementDatabase
from tests.kit.process import Process, begin, is_stopped

TOP = Path(__file__).resolve().parents[2]
PLACEMENT_HEADERS = {'x-auth-token': 'admin', 'openstack-api-version': 'placement 1.39'}
READY_SECONDS = 60.0
FIRST_PAUSE, LAST_PAUSE = 0.02, 0.25
SYSTEM = random.SystemRandom()
"""Not hypothesis's, which begins at the same number in each of the processes that run tests."""
PATIENCE = 4
"""How many times slower a machine may be that is busy with others."""
WORKERS = 16
"""Each of the processes of a run has every sixteenth port for its own."""
GIVEN: set[int] = set()

Value = TypeVar('Value')


def until(condition: Callable[[], Value], seconds: float, what: str) -> Value:
    """Poll until `condition()` is true, and return it; AssertionError saying what was waited for.

    `seconds` is what it takes at most where nothing else runs; PATIENCE times as long is waited.
    """
    deadline = time.monotonic() + seconds * PATIENCE
    pause = FIRST_PAUSE
    while True:
        began = time.monotonic()
        if value := condition():
            return value
        assert time.monotonic() < deadline, f'not within {PATIENCE} x {seconds:g} s: {what}'
        # Who asks takes processor from what is asked about: a dear question is asked less often, and so is a late one.
        time.sleep(max(pause, 2 * (time.monotonic() - began)))
        pause = min(1.2 * pause, LAST_PAUSE)


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody had a moment ago, and that the kernel gives to nobody who asks for any.

    No process of a run gives one twice, and none gives another's: between the question and the use it may be anybody's,
    and a server that is down for a moment must find its own again.
    """
    dynamic, _ = Path('/proc/sys/net/ipv4/ip_local_port_range').read_text().split()
    worker = int(os.environ.get('PYTEST_XDIST_WORKER', 'gw0')[2:]) % WORKERS
    while True:
        port = SYSTEM.randrange(10_000 + worker, int(dynamic), WORKERS)
        if port in GIVEN:
            continue
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(('127.0.0.1', port))
            GIVEN.add(port)
            return port


def environment() -> dict[str, str]:
    """This process's environment, in which ecomp and mdserver can be imported from the tree."""
    paths = [str(TOP), str(TOP / 'md_server'), os.environ.get('PYTHONPATH', '')]
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}


class Server:
    """A process with a directory; `with` starts it, and ends it with all it left.

    After kill(), pause() or stop() it can be started (or resumed) again with its data.
    """

    name = 'server'

    def __init__(self, directory: Path | None = None) -> None:
        self._owned = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix=f'ecomp-test-{self.name}-'))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log = self.directory / f'{self.name}.log'
        self._process: Process | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return environment()

    def is_ready(self) -> bool:
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None, f'{self.name} is not running'
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def launch(self) -> Self:
        assert not self.is_running, f'{self.name} runs already'
        with self.log.open('ab') as output:
            self._process = begin(self.command(), self.directory, self.environment(), output.fileno(), output.fileno())
        return self

    def start(self) -> Self:
        self.launch()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.is_running, f'{self.name} ended while starting:\n{self.last_words()}'
            return self.is_ready()

        until(ready, READY_SECONDS, f'{self.name} is ready (see {self.log})')

    def stop(self, number: int = signal.SIGTERM, patience: float = 20.0) -> int:
        """End it by a signal, which has to do; its exit code."""
        assert self._process is not None, f'{self.name} is not running'
        self._signal(signal.SIGCONT)
        self._signal(number)
        try:
            return self._process.wait(PATIENCE * patience)
        except subprocess.TimeoutExpired:
            self.kill()
            said = self.last_words()
            raise AssertionError(f'{self.name} did not end within {PATIENCE} x {patience:g} s:\n{said}') from None

    def kill(self) -> None:
        assert self._process is not None, f'{self.name} is not running'
        self._signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        """Freeze it (SIGSTOP): its connections stay, and nothing answers."""
        self._signal(signal.SIGSTOP)
        until(lambda: is_stopped(self.pid), 30, f'{self.name} is frozen')

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        """End it, whatever state it is in, and remove its directory if it made that itself."""
        if self.is_running:
            self.kill()
        if self._owned:
            shutil.rmtree(self.directory, ignore_errors=True)

    def last_words(self, lines: int = 20) -> str:
        try:
            return '\n'.join(self.log.read_text(errors='replace').splitlines()[-lines:])
        except FileNotFoundError:
            return '(no log)'

    def _signal(self, number: int) -> None:
        # send_signal looks first whether it has ended, so that no other process of that pid is hit.
        assert self._process is not None, f'{self.name} is not running'
        self._process.send_signal(number)


def is_healthy(url: str) -> bool:
    """Whether the etcd there says so itself: it has a leader."""
    try:
        with urllib.request.urlopen(f'{url}/health', timeout=2) as answer:
            return bool(json.load(answer)['health'] == 'true')
    except (OSError, ValueError, KeyError):
        return False


class Etcd(Server):
    """One etcd member."""

    name = 'etcd'

    def __init__(self, directory: Path | None = None, *options: str) -> None:
        super().__init__(directory)
        self.port = free_port()
        self.endpoint = f'127.0.0.1:{self.port}'
        self.client = f'http://{self.endpoint}'
        self.peer = f'http://127.0.0.1:{free_port()}'
        self.initial = f'default={self.peer}'
        self._options = options

    def environment(self) -> dict[str, str]:
        """Less often looking for garbage: a seventh of what it does."""
        return {**environment(), 'GOGC': '400'}

    def command(self) -> list[str]:
        return [
            'etcd',
            f'--data-dir={self.directory / "data"}',
            f'--listen-client-urls={self.client}',
            f'--advertise-client-urls={self.client}',
            f'--listen-peer-urls={self.peer}',
            f'--initial-advertise-peer-urls={self.peer}',
            f'--initial-cluster={self.initial}',
            '--log-level=warn',
            *self._options,
        ]

    def is_ready(self) -> bool:
        return is_healthy(self.client)

    def ask(self, path: str, body: Mapping[str, Any], timeout: float = 10.0) -> HTTPResponse:
        """The answer of one call of the JSON gateway, to be read and closed."""
        request = urllib.request.Request(f'{self.client}/v3/{path}', json.dumps(body).encode())
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        return answer

    def call(self, path: str, body: Mapping[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        """One call of the JSON gateway: etcd without our client. https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/"""
        JOURNAL.wrote(path, body)
        with self.ask(path, body, timeout) as answer:
            return dict(json.load(answer))

    def get(self, key: str) -> bytes | None:
        found = self.call('kv/range', {'key': b64(key)}).get('kvs')
        return base64.b64decode(found[0].get('value', '')) if found else None

    def put(self, key: str, value: str | bytes, lease: int = 0) -> int:
        """Write a key; the revision."""
        body = {'key': b64(key), 'value': b64(value), 'lease': lease}
        return int(self.call('kv/put', body)['header']['revision'])

    def grant(self, seconds: int = 600) -> int:
        return int(self.call('lease/grant', {'TTL': seconds})['ID'])

    def record_key(self, instance: str) -> str:
        """Where an instance's record is, below whichever compute."""
        found = [key for key in self.keys('/instances/') if key.endswith(f'/{instance}')]
        asked = [key for key in found if len(found) > 1 and self.get(key.replace('/instances/', '/hosts/')) is not None]
        return (asked or found or [f'/instances/{instance}'])[0]

    def record(self, instance: str) -> bytes | None:
        return self.get(self.record_key(instance))

    def put_record(self, value: str) -> int:
        """Write a record, where its own compute would; the revision."""
        told = json.loads(value)
        return self.put(f'/instances/{told["compute"] or "none"}/{told["instance"]}', value)

    def delete(self, key: str) -> None:
        self.call('kv/deleterange', {'key': b64(key)})

    def keys(self, prefix: str) -> list[str]:
        """The keys under a prefix that ends with a slash."""
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        found = self.call('kv/range', {'key': b64(prefix), 'range_end': b64(end), 'keys_only': True}).get('kvs', [])
        return [base64.b64decode(each['key']).decode(errors='replace') for each in found]

    def compact(self) -> None:
        revision = self.call('kv/range', {'key': b64('x')})['header']['revision']
        self.call('kv/compaction', {'revision': revision, 'physical': True})


class PlacementServer(Server):
    """Placement over SQLite, one thread."""

    name = 'placement'

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(directory)
        # It has to be there, and may be empty: all settings are in the environment.
        (self.directory / 'placement.conf').touch()
        self.port = free_port()
        self.url = f'http://127.0.0.1:{self.port}'
        self.database = PlacementDatabase(self.directory / 'placement.sqlite')

    def command(self) -> list[str]:
        return [sys.executable, '-m', 'ecomp.lab.placement_server', '127.0.0.1', str(self.port)]

    def environment(self) -> dict[str, str]:
        return {
            **environment(),
            'OS_PLACEMENT_CONFIG_DIR': str(self.directory),
            'OS_PLACEMENT_DATABASE__CONNECTION': f'sqlite:///{self.database.path}',
            'OS_PLACEMENT_DATABASE__SYNC_ON_STARTUP': 'True',
            'OS_API__AUTH_STRATEGY': 'noauth2',
        }

    def start(self) -> Self:
        with self.database.beginning():
            return super().start()

    def is_ready(self) -> bool:
        """It lists providers: GET / answers with the database down, too."""
        try:
            self.call('GET', '/resource_providers')
        except OSError:
            return False
        return True

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One request; its JSON object, {} if there is none. urllib.error.HTTPError for 400 and above."""
        JOURNAL.claimed(method, path, body)
        headers = {**PLACEMENT_HEADERS, 'content-type': 'application/json', 'accept': 'application/json'}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.loads(answer.read() or b'{}'))

    def allocations(self, consumer: str) -> dict[str, dict[str, int]]:
        return self.database.allocations_of(consumer)

    def consumers(self, provider: str) -> dict[str, dict[str, int]]:
        """Who holds what of a provider: {consumer: {class: amount}}."""
        return self.database.consumers(provider)

    def inventory(self, provider: str) -> dict[str, dict[str, Any]]:
        return self.database.inventory(provider)

    def make_provider(self, **totals: int) -> str:
        """A new provider with this inventory, such as VCPU=4; its uuid."""
        provider = str(uuid.uuid4())
        self.call('POST', '/resource_providers', {'uuid': provider, 'name': provider})
        inventories = {name: {'total': total} for name, total in totals.items()}
        body = {'resource_provider_generation': 0, 'inventories': inventories}
        self.call('PUT', f'/resource_providers/{provider}/inventories', body)
        return provider


def b64(text: str | bytes) -> str:
    """As the JSON gateway wants keys and values."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
