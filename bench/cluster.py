"""A cluster for a benchmark: etcd, placement on PostgreSQL with its calls counted, and many pretended computes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.store.watch import Follower, State
from tests.kit.commands import write_config
from tests.kit.servers import TOP, Etcd, PlacementServer, Server, free_port, until

PROCESSES, THREADS = 2, 2
"""Placement's: one process a core, as docker.sh has it."""
POSTGRES = ('postgres', 'initdb')
ECOMPUTE = str(Path(sys.executable).parent / 'ecompute')
"""Started cold, as it is installed: what the tests start shares its memory, and has its imports done."""


class Use(NamedTuple):
    """Of one part: processor so far, in seconds, and memory now, in MB (PSS)."""

    cpu: float
    memory: float


def use_of(*pids: int) -> Use:
    """What these processes take with all their children; one that has ended takes nothing."""
    cpu, memory = 0.0, 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for each in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = each.cpu_times()
                    cpu += times.user + times.system
                    memory += each.memory_full_info().pss / 2**20
    return Use(cpu, memory)


class Postgres(Server):
    """PostgreSQL on a socket in its directory, as its own user, without fsync: the disk is not what is measured."""

    name = 'postgres'

    def __init__(self) -> None:
        super().__init__()
        self.url = f'postgresql+psycopg2://postgres@/postgres?host={self.directory}'
        found = [shutil.which(each, path=f'{os.environ["PATH"]}:{_debian()}') for each in POSTGRES]
        if None in found:
            sys.exit('PostgreSQL is not installed: apt-get install postgresql')
        self._postgres, self._initdb = map(str, found)
        if os.geteuid() == 0:  # PostgreSQL does not run as root
            shutil.chown(self.directory, 'postgres')
        subprocess.run(self._as_postgres(self._initdb, '-D', 'data', '-U', 'postgres', '-A', 'trust', '--no-sync'),
                       cwd=self.directory, check=True, stdout=subprocess.DEVNULL)

    def command(self) -> list[str]:
        """The server, and nothing on the network."""
        settings = ['listen_addresses=', f'unix_socket_directories={self.directory}', 'fsync=off']
        return self._as_postgres(self._postgres, '-D', 'data', *[word for each in settings for word in ('-c', each)])

    def is_ready(self) -> bool:
        """It says so."""
        return 'ready to accept connections' in self.last_words()

    def close(self) -> None:
        """End it in good order: killed, it leaves shared memory behind."""
        if self.is_running:
            self.stop(signal.SIGINT)
        super().close()

    def _as_postgres(self, *words: str) -> list[str]:
        if os.geteuid() != 0:
            return list(words)
        user = ['--reuid=postgres', '--regid=postgres', '--init-groups']
        return ['setpriv', *user, '--pdeathsig', 'KILL', '--', *words]


def _debian() -> str:
    return ':'.join(str(each) for each in sorted(Path('/usr/lib/postgresql').glob('*/bin'), reverse=True))


class Counting(PlacementServer):
    """Placement at two ports, on a database: `url` for those who ask, `computes_url` for the computes."""

    def __init__(self, database: str) -> None:
        super().__init__()
        self._database = database
        self.computes_port = free_port()
        self.computes_url = f'http://127.0.0.1:{self.computes_port}'

    def command(self) -> list[str]:
        """Several processes."""
        script = str(TOP / 'bench/counted_placement.py')
        return [sys.executable, script, str(PROCESSES), str(THREADS), str(self.port), str(self.computes_port)]

    def environment(self) -> dict[str, str]:
        """The same, on the database."""
        return {**super().environment(), 'OS_PLACEMENT_DATABASE__CONNECTION': self._database}

    def close(self) -> None:
        """Its processes end with it."""
        if self.is_running:
            self.stop()
        super().close()

    def counts(self) -> dict[str, dict[str, int]]:
        """Calls so far, by kind: of those who ask, and of the computes."""
        with urllib.request.urlopen(f'{self.url}/counts', timeout=30) as answer:
            found = json.load(answer)
        return {'asking': found[str(self.port)], 'computes': found[str(self.computes_port)]}


class Computes(Server):
    """`ecompute --fake … --count N`."""

    name = 'computes'

    def __init__(self, config: Path, count: int, inventory: str) -> None:
        super().__init__()
        self._config, self._count, self._inventory = config, count, inventory

    def command(self) -> list[str]:
        """One process."""
        return [ECOMPUTE, '--config', str(self._config), '--fake', self._inventory, '--count', str(self._count)]

    def environment(self) -> dict[str, str]:
        """Its throw-away state goes with it."""
        return {**super().environment(), 'TMPDIR': str(self.directory)}

    def wait_ready(self) -> None:
        """A thousand take a minute where others are at work, too."""

        def ready() -> bool:
            assert self.is_running, f'{self.name} ended while starting:\n{self.last_words()}'
            # What it was asked meanwhile it does at once, and says so behind it; and an earlier one said the same.
            return f' {self.pid} {self._count} computes are ready' in self.log.read_text(errors='replace')

        until(ready, 900, f'{self._count} computes are ready (see {self.log})')


class Cluster:
    """All of it. `seen` has when each request was first seen with a compute (monotonic seconds), and where."""

    def __init__(self, computes: int, vcpus: int, **settings: Any) -> None:
        self.vcpus = vcpus
        self._count, self._settings = computes, settings
        self._at_exit = ExitStack()
        self.seen: dict[str, tuple[float, str]] = {}
        self.there: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        enter = self._at_exit.enter_context
        try:
            self.directory = Path(enter(tempfile.TemporaryDirectory(prefix='ecomp-bench-')))
            os.environ['XDG_CACHE_HOME'] = str(self.directory)  # where requesters remember how large it is
            self.etcd = enter(Etcd())
            self.placement = enter(Counting(enter(Postgres()).url))
            at = self.etcd.endpoint
            self.schedule_yaml = write_config(self.directory / 'schedule.yaml', at, self.placement.url)
            config = write_config(self.directory / 'compute.yaml', at, self.placement.computes_url, **self._settings)
            plenty = f'VCPU:{self.vcpus},DISK_GB:{self.vcpus},MEMORY_MB:{self.vcpus * 128}'
            enter(Computes(config, self._count, plenty))
            self.computes = sorted(keys.last(key) for key in self.etcd.keys(keys.COMPUTES))
            follower = Follower(EtcdConfig((at,)), [(keys.HOSTS, self._on_state)])
            follower.start()
            self._at_exit.callback(follower.stop)
        except BaseException:
            self._at_exit.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit.close()

    def fill(self) -> list[str]:
        """Take all VCPU that is left, for nobody; who was made to hold it."""
        fillers = []
        left = {compute: self.vcpus - self._used(compute) for compute in self.computes}
        claims = []
        for compute, amount in left.items():
            if amount:
                body = {'allocations': {compute: {'resources': {'VCPU': amount}}}, 'user_id': 'u', 'project_id': 'p'}
                claims.append((str(uuid.uuid4()), {**body, 'consumer_generation': None, 'consumer_type': 'INSTANCE'}))
        for start in range(0, len(claims), 100):
            some = dict(claims[start : start + 100])
            self.placement.call('POST', '/allocations', some)
            fillers += some
        return fillers

    def empty(self, consumers: list[str]) -> None:
        """Release what was made to be held, and the computes have not released meanwhile: nobody asked for it."""
        for each in consumers:
            try:
                self.placement.call('DELETE', f'/allocations/{each}')
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise

    def wait_for(self, instances: set[str], seconds: float) -> None:
        """Return when each of them is with a compute."""
        until(lambda: instances <= self.seen.keys(), seconds, 'all requests are with a compute')

    def balance(self, instances: set[str]) -> float:
        """The largest share of its VCPU that is used of a compute, less the smallest; each instance has one."""
        used = dict.fromkeys(self.computes, 0)
        for instance in instances:
            used[self.seen[instance][1]] += 1
        return (max(used.values()) - min(used.values())) / self.vcpus

    def _used(self, compute: str) -> int:
        return int(self.placement.call('GET', f'/resource_providers/{compute}/usages')['usages'].get('VCPU', 0))

    def _on_state(self, state: State) -> None:
        now = time.monotonic()
        for key in state.keys() - self.there:
            compute, instance = key.removeprefix(keys.HOSTS).split('/')
            self.seen.setdefault(instance, (now, compute))
        self.there = frozenset(state)
