"""The real servers of tests and benchmarks: etcd and placement as child processes.

They die with the thread that started them, so start them in the main thread.
Of ecomp only stateless modules are imported: tests of the store must not rely on the store.
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
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, Self, TypeVar

from tests.kit.journal import JOURNAL
from tests.kit.placement_database import PlacementDatabase
from tests.kit.process import Process, is_stopped, start_process

TOP = Path(__file__).resolve().parents[2]
PLACEMENT_HEADERS = {'x-auth-token': 'admin', 'openstack-api-version': 'placement 1.39'}
READY_SECONDS = 60.0
FIRST_PAUSE_SECONDS = 0.02
MAX_PAUSE_SECONDS = 0.25
# Not the global generator: hypothesis seeds that identically in every process that runs tests.
SYSTEM_RANDOM = random.SystemRandom()
# How many times slower a machine may be that is busy with other tests.
SLOWDOWN_FACTOR = 4
PORTS_PER_BLOCK = 50

Value = TypeVar('Value')


def wait_until(condition: Callable[[], Value], seconds: float, description: str) -> Value:
    """Poll until `condition()` is true, and return its value.

    `seconds` is the time it takes on an idle machine. SLOWDOWN_FACTOR times as long is allowed.
    """
    deadline = time.monotonic() + seconds * SLOWDOWN_FACTOR
    pause = FIRST_PAUSE_SECONDS
    while True:
        started = time.monotonic()
        if value := condition():
            return value
        assert time.monotonic() < deadline, f'not within {SLOWDOWN_FACTOR} x {seconds:g} s: {description}'
        # Polling takes processor time from what it waits for: expensive and late conditions are polled less often.
        time.sleep(max(pause, 2 * (time.monotonic() - started)))
        pause = min(1.2 * pause, MAX_PAUSE_SECONDS)


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1 outside of the kernel's dynamic range.

    No process of any test run returns a port twice: it must stay free while its server is down.
    """
    with PORTS_LOCK:
        return next(port for port in PORTS if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.bind(('127.0.0.1', port))
        return True
    return False


def _generate_ports() -> Iterator[int]:
    dynamic, _ = Path('/proc/sys/net/ipv4/ip_local_port_range').read_text().split()
    blocks = list(range(10_000, int(dynamic) - PORTS_PER_BLOCK, PORTS_PER_BLOCK))
    SYSTEM_RANDOM.shuffle(blocks)
    for block in blocks:
        # The abstract address stands for the block until this process ends.
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f'\0ecomp-tests-ports-{block}')
        except OSError:
            holder.close()
        else:
            HELD_BLOCKS.append(holder)
            yield from range(block, block + PORTS_PER_BLOCK)
    raise AssertionError('test runs have all ports below the dynamic range. Fix: end other test runs')


PORTS = _generate_ports()
PORTS_LOCK = threading.Lock()
HELD_BLOCKS: list[socket.socket] = []


def make_environment() -> dict[str, str]:
    paths = [str(TOP), str(TOP / 'md_server'), os.environ.get('PYTHONPATH', '')]
    return {**os.environ, 'PYTHONPATH': os.pathsep.join(filter(None, paths))}


class Server:
    """A process with a directory. `with` starts it, then kills it and removes the directory."""

    name = 'server'

    def __init__(self, directory: Path | None = None) -> None:
        self._owns_directory = directory is None
        self.directory = directory or Path(tempfile.mkdtemp(prefix=f'ecomp-test-{self.name}-'))
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log = self.directory / f'{self.name}.log'
        self._process: Process | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def environment(self) -> dict[str, str]:
        return make_environment()

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
            self._process = start_process(
                self.command(), self.directory, self.environment(), output.fileno(), output.fileno()
            )
        return self

    def start(self) -> Self:
        self.launch()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        def check_ready() -> bool:
            assert self.is_running, f'{self.name} ended while starting:\n{self.tail_log()}'
            return self.is_ready()

        wait_until(check_ready, READY_SECONDS, f'{self.name} is ready (see {self.log})')

    def stop(self, number: int = signal.SIGTERM, patience: float = 20.0) -> int:
        """Stop it with a signal, which must suffice. Return its exit code."""
        assert self._process is not None, f'{self.name} is not running'
        self._signal(signal.SIGCONT)
        self._signal(number)
        try:
            return self._process.wait(SLOWDOWN_FACTOR * patience)
        except subprocess.TimeoutExpired:
            self.kill()
            log = self.tail_log()
            raise AssertionError(f'{self.name} did not end within {SLOWDOWN_FACTOR} x {patience:g} s:\n{log}') from None

    def kill(self) -> None:
        assert self._process is not None, f'{self.name} is not running'
        self._signal(signal.SIGKILL)
        self._process.wait()

    def pause(self) -> None:
        # Its connections stay open, and nothing answers.
        self._signal(signal.SIGSTOP)
        wait_until(lambda: is_stopped(self.pid), 30, f'{self.name} is frozen')

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def restart(self) -> None:
        self.stop()
        self.start()

    def close(self) -> None:
        if self.is_running:
            self.kill()
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def tail_log(self, lines: int = 20) -> str:
        try:
            return '\n'.join(self.log.read_text(errors='replace').splitlines()[-lines:])
        except FileNotFoundError:
            return '(no log)'

    def _signal(self, number: int) -> None:
        # send_signal first checks that the process has not ended, so that it hits no other process with that pid.
        assert self._process is not None, f'{self.name} is not running'
        self._process.send_signal(number)


def is_healthy(url: str) -> bool:
    # An etcd without a leader reports itself unhealthy.
    try:
        with urllib.request.urlopen(f'{url}/health', timeout=2) as answer:
            return bool(json.load(answer)['health'] == 'true')
    except (OSError, ValueError, KeyError):
        return False


class Etcd(Server):
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
        # Fewer garbage collections save a seventh of etcd's processor time.
        return {**make_environment(), 'GOGC': '400'}

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
            # An idle etcd takes half of the processor time with these.
            '--backend-batch-interval=1s',
            '--heartbeat-interval=200',
            *self._options,
        ]

    def is_ready(self) -> bool:
        return is_healthy(self.client)

    def ask(self, path: str, body: Mapping[str, Any], timeout: float = 10.0) -> HTTPResponse:
        request = urllib.request.Request(f'{self.client}/v3/{path}', json.dumps(body).encode())
        answer: HTTPResponse = urllib.request.urlopen(request, timeout=timeout)
        return answer

    def call(self, path: str, body: Mapping[str, Any], timeout: float = 10.0) -> dict[str, Any]:
        # https://etcd.io/docs/v3.4/dev-guide/api_grpc_gateway/
        JOURNAL.record_write(path, body)
        with self.ask(path, body, timeout) as answer:
            return dict(json.load(answer))

    def get(self, key: str) -> bytes | None:
        entries = self.call('kv/range', {'key': b64(key)}).get('kvs')
        return base64.b64decode(entries[0].get('value', '')) if entries else None

    def put(self, key: str, value: str | bytes, lease: int = 0) -> int:
        body = {'key': b64(key), 'value': b64(value), 'lease': lease}
        return int(self.call('kv/put', body)['header']['revision'])

    def grant(self, seconds: int = 600) -> int:
        return int(self.call('lease/grant', {'TTL': seconds})['ID'])

    def find_record_key(self, instance: str) -> str:
        keys = [key for key in self.list_keys('/instances/') if key.endswith(f'/{instance}')]
        own = [key for key in keys if len(keys) > 1 and self.get(key.replace('/instances/', '/hosts/')) is not None]
        return (own or keys or [f'/instances/{instance}'])[0]

    def read_record(self, instance: str) -> bytes | None:
        return self.get(self.find_record_key(instance))

    def put_record(self, value: str) -> int:
        record = json.loads(value)
        return self.put(f'/instances/{record["compute"] or "none"}/{record["instance"]}', value)

    def delete(self, key: str) -> None:
        self.call('kv/deleterange', {'key': b64(key)})

    def list_keys(self, prefix: str) -> list[str]:
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        entries = self.call('kv/range', {'key': b64(prefix), 'range_end': b64(end), 'keys_only': True}).get('kvs', [])
        return [base64.b64decode(entry['key']).decode(errors='replace') for entry in entries]

    def compact(self) -> None:
        revision = self.call('kv/range', {'key': b64('x')})['header']['revision']
        self.call('kv/compaction', {'revision': revision, 'physical': True})


class PlacementServer(Server):
    name = 'placement'

    def __init__(self, directory: Path | None = None) -> None:
        super().__init__(directory)
        # The file must exist and may be empty: all settings are in the environment.
        (self.directory / 'placement.conf').touch()
        self.port = free_port()
        self.url = f'http://127.0.0.1:{self.port}'
        self.database = PlacementDatabase(self.directory / 'placement.sqlite')

    def command(self) -> list[str]:
        return [sys.executable, '-m', 'ecomp.lab.placement_server', '127.0.0.1', str(self.port)]

    def environment(self) -> dict[str, str]:
        return {
            **make_environment(),
            'OS_PLACEMENT_CONFIG_DIR': str(self.directory),
            'OS_PLACEMENT_DATABASE__CONNECTION': f'sqlite:///{self.database.path}',
            'OS_PLACEMENT_DATABASE__SYNC_ON_STARTUP': 'True',
            'OS_API__AUTH_STRATEGY': 'noauth2',
        }

    def start(self) -> Self:
        with self.database.prepare_start():
            return super().start()

    def is_ready(self) -> bool:
        # GET / would answer even without its database.
        try:
            self.call('GET', '/resource_providers')
        except OSError:
            return False
        return True

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request, and return the JSON object of the answer, or {} if it is empty."""
        JOURNAL.record_claim(method, path, body)
        headers = {**PLACEMENT_HEADERS, 'content-type': 'application/json', 'accept': 'application/json'}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.loads(answer.read() or b'{}'))

    def read_allocations(self, consumer: str) -> dict[str, dict[str, int]]:
        return self.database.read_allocations_of(consumer)

    def read_consumers(self, provider: str) -> dict[str, dict[str, int]]:
        return self.database.read_consumers(provider)

    def read_inventory(self, provider: str) -> dict[str, dict[str, Any]]:
        return self.database.read_inventory(provider)

    def make_provider(self, **totals: int) -> str:
        provider = str(uuid.uuid4())
        self.call('POST', '/resource_providers', {'uuid': provider, 'name': provider})
        inventories = {name: {'total': total} for name, total in totals.items()}
        body = {'resource_provider_generation': 0, 'inventories': inventories}
        self.call('PUT', f'/resource_providers/{provider}/inventories', body)
        return provider


def b64(text: str | bytes) -> str:
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()
