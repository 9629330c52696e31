"""A cluster for benchmarks: etcd, placement on PostgreSQL, and many fake computes."""

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
from tests.kit.many import ManyServer
from tests.kit.servers import TOP, Etcd, PlacementServer, Server, free_port, wait_until

# Of placement: one process a core, as in docker.sh.
PLACEMENT_PROCESSES = 2
PLACEMENT_THREADS = 2
# A compute calls placement several times a second while it starts, and at rest not once in ten minutes.
SETTLED_SECONDS = 3.0
POSTGRES = ('postgres', 'initdb')
# Started cold from its installation: processes that the tests start share memory and have done their imports.
ECOMPUTE = str(Path(sys.executable).parent / 'ecompute')
# Of the computes' leases. A thousand hosts would renew theirs on processors of their own.
LEASE_SECONDS = 600


class Use(NamedTuple):
    """The use of one part: processor seconds so far, and current memory in MB (PSS)."""

    cpu: float
    memory: float


def measure_use(*pids: int) -> Use:
    """Sum the use of these processes and their children; those that have ended count as 0."""
    cpu, memory = 0.0, 0.0
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):
                    times = member.cpu_times()
                    cpu += times.user + times.system
                    memory += member.memory_full_info().pss / 2**20
    return Use(cpu, memory)


class Postgres(Server):
    """PostgreSQL on a socket, as its own user, without fsync: the disk is not measured."""

    name = 'postgres'

    def __init__(self) -> None:
        super().__init__()
        self.url = f'postgresql+psycopg2://postgres@/postgres?host={self.directory}'
        programs = [shutil.which(program, path=f'{os.environ["PATH"]}:{_debian_path()}') for program in POSTGRES]
        if None in programs:
            sys.exit('PostgreSQL is not installed: apt-get install postgresql')
        self._postgres, self._initdb = map(str, programs)
        if os.geteuid() == 0:  # PostgreSQL does not run as root
            shutil.chown(self.directory, 'postgres')
        subprocess.run(
            self._as_postgres(self._initdb, '-D', 'data', '-U', 'postgres', '-A', 'trust', '--no-sync'),
            cwd=self.directory,
            check=True,
            stdout=subprocess.DEVNULL,
        )

    def command(self) -> list[str]:
        """The server, without a network address."""
        settings = ['listen_addresses=', f'unix_socket_directories={self.directory}', 'fsync=off']
        return self._as_postgres(self._postgres, '-D', 'data', *[word for line in settings for word in ('-c', line)])

    def is_ready(self) -> bool:
        return 'ready to accept connections' in self.tail_log()

    def close(self) -> None:
        """Stop it with SIGINT: after a kill it leaves shared memory behind."""
        if self.is_running:
            self.stop(signal.SIGINT)
        super().close()

    def _as_postgres(self, *words: str) -> list[str]:
        if os.geteuid() != 0:
            return list(words)
        user = ['--reuid=postgres', '--regid=postgres', '--init-groups']
        return ['setpriv', *user, '--pdeathsig', 'KILL', '--', *words]


def _debian_path() -> str:
    return ':'.join(str(path) for path in sorted(Path('/usr/lib/postgresql').glob('*/bin'), reverse=True))


class CountedPlacement(PlacementServer):
    """Placement at two ports on a database: `url` for requesters, `computes_url` for computes."""

    def __init__(self, database: str) -> None:
        super().__init__()
        self._database = database
        self.computes_port = free_port()
        self.computes_url = f'http://127.0.0.1:{self.computes_port}'

    def command(self) -> list[str]:
        script = str(TOP / 'bench/counted_placement.py')
        return [
            sys.executable,
            script,
            str(PLACEMENT_PROCESSES),
            str(PLACEMENT_THREADS),
            str(self.port),
            str(self.computes_port),
        ]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), 'OS_PLACEMENT_DATABASE__CONNECTION': self._database}

    def close(self) -> None:
        """Stop it, so that its child processes end too."""
        if self.is_running:
            self.stop()
        super().close()

    def read_counts(self) -> dict[str, dict[str, int]]:
        """Read the calls so far, by kind, of requesters (`asking`) and of computes."""
        with urllib.request.urlopen(f'{self.url}/counts', timeout=30) as response:
            counts = json.load(response)
        return {'asking': counts[str(self.port)], 'computes': counts[str(self.computes_port)]}


class Computes(ManyServer):
    """Many fake computes in one process."""

    name = 'computes'

    def wait_ready(self) -> None:
        """Wait for the log line; a thousand computes take a minute on a busy machine."""

        def ready() -> bool:
            assert self.is_running, f'{self.name} ended while starting:\n{self.tail_log()}'
            return self.is_ready()

        wait_until(ready, 900, f'{self.count} computes are ready (see {self.log})')


class Cluster:
    """The whole cluster.

    `seen` has the time (monotonic seconds) and compute of each request when it was first seen.
    """

    def __init__(self, computes: int, vcpus: int, **settings: Any) -> None:
        self.vcpus = vcpus
        self._count, self._settings = computes, settings
        self._at_exit = ExitStack()
        self.seen: dict[str, tuple[float, str]] = {}
        self.current_requests: frozenset[str] = frozenset()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        enter = self._at_exit.enter_context
        try:
            self.directory = Path(enter(tempfile.TemporaryDirectory(prefix='ecomp-bench-')))
            os.environ['XDG_CACHE_HOME'] = str(self.directory)  # requesters cache the size of the cluster there
            self.etcd = enter(Etcd())
            self.placement = enter(CountedPlacement(enter(Postgres()).url))
            etcd = self.etcd.endpoint
            self.schedule_yaml = write_config(self.directory / 'schedule.yaml', etcd, self.placement.url)
            config = write_config(self.directory / 'compute.yaml', etcd, self.placement.computes_url, **self._settings)
            inventory = f'VCPU:{self.vcpus},DISK_GB:{self.vcpus},MEMORY_MB:{self.vcpus * 128}'
            enter(Computes(config, self._count, inventory, lease_seconds=LEASE_SECONDS))
            self._wait_until_settled()
            self.computes = sorted(keys.get_last_part(key) for key in self.etcd.list_keys(keys.COMPUTES))
            follower = Follower(EtcdConfig((etcd,)), [(keys.HOSTS, self._on_state)])
            follower.start()
            self._at_exit.callback(follower.stop)
        except BaseException:
            self._at_exit.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit.close()

    def _wait_until_settled(self) -> None:
        """Wait until computes have not called placement for SETTLED_SECONDS: their start goes on once they are up."""
        counts: list[object] = []

        def settled() -> bool:
            time.sleep(SETTLED_SECONDS)
            counts.append(self.placement.read_counts()['computes'])
            return counts[-2:-1] == counts[-1:]

        wait_until(settled, 900, 'the computes have started')

    def fill(self) -> list[str]:
        """Claim all free VCPU for unused consumers, and return their uuids."""
        fillers = []
        free_vcpus = {compute: self.vcpus - self._read_used_vcpu(compute) for compute in self.computes}
        claims = []
        for compute, amount in free_vcpus.items():
            if amount:
                body = {'allocations': {compute: {'resources': {'VCPU': amount}}}, 'user_id': 'u', 'project_id': 'p'}
                claims.append((str(uuid.uuid4()), {**body, 'consumer_generation': None, 'consumer_type': 'INSTANCE'}))
        for start in range(0, len(claims), 100):
            batch = dict(claims[start : start + 100])
            self.placement.call('POST', '/allocations', batch)
            fillers += batch
        return fillers

    def release(self, consumers: list[str]) -> None:
        """Release these consumers; the computes may have released some of them as unrequested."""
        for consumer in consumers:
            try:
                self.placement.call('DELETE', f'/allocations/{consumer}')
            except urllib.error.HTTPError as error:
                if error.code != 404:
                    raise

    def wait_for(self, instances: set[str], seconds: float) -> None:
        """Wait until a compute has each of these requests."""
        wait_until(lambda: instances <= self.seen.keys(), seconds, 'all requests are with a compute')

    def calculate_imbalance(self, instances: set[str]) -> float:
        """Return the range of the VCPU shares used by `instances`, each of which has one VCPU."""
        used = dict.fromkeys(self.computes, 0)
        for instance in instances:
            used[self.seen[instance][1]] += 1
        return (max(used.values()) - min(used.values())) / self.vcpus

    def _read_used_vcpu(self, compute: str) -> int:
        return int(self.placement.call('GET', f'/resource_providers/{compute}/usages')['usages'].get('VCPU', 0))

    def _on_state(self, state: State) -> None:
        now = time.monotonic()
        for key in state.keys() - self.current_requests:
            compute, instance = key.removeprefix(keys.HOSTS).split('/')
            self.seen.setdefault(instance, (now, compute))
        self.current_requests = frozenset(state)
