"""apply: a stack of a hundred unlike members against four sets of 25, and an unchanged stack against `list`.

All are `eschedule` commands with their process start, in turn. The members have four queries, and half of them two
groups; the sets have the same queries, groups and names. The computes are keys and providers, so nothing is built. The
etcd takes a delivery of a hundred in one transaction, as that of docker.sh. Needs PostgreSQL. Targets: at most 1.2
times the sets, and 1.2 times `list` of the same hundred instances.

    python bench/apply.py [ROUNDS] [--quick] [--json]       12 rounds at 20 computes
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.comparison import IMAGE  # noqa: E402
from bench.result import arguments, asked, paired, tell  # noqa: E402
from bench.secured import measure_in_turn, measure_seconds  # noqa: E402
from bench.singles import FakeCluster  # noqa: E402
from ecomp.conf import EtcdConfig  # noqa: E402
from ecomp.model import keys  # noqa: E402
from ecomp.model.order import Request, parse_request  # noqa: E402
from ecomp.model.record import make_record  # noqa: E402
from ecomp.model.states import ACTIVE  # noqa: E402
from ecomp.model.stored import encode  # noqa: E402
from ecomp.store.client import Delete, Put, Store  # noqa: E402

COMPUTES, INSTANCES = 20, 100
ETCD_OPTION = '--max-txn-ops=2048'
NOW = '2026-01-01T00:00:00.000Z'
# The queries, and the policy of the group of the instances with each, '' for none.
KINDS = {
    'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64': '',
    'resources=VCPU:1,DISK_GB:1,MEMORY_MB:65': '',
    'resources=VCPU:1,DISK_GB:1,MEMORY_MB:66': 'anti-affinity',
    'resources=VCPU:1,DISK_GB:1,MEMORY_MB:67': 'affinity',
}


class Bench:
    """The commands, on one cluster."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._command = [str(Path(sys.executable).with_name('eschedule')), '--config', str(cluster.config)]
        self.store = Store(EtcdConfig((cluster.etcd.endpoint,)))
        self._file = cluster.config.with_name('stack.yaml')
        self._file.write_text(self._make_file())

    def _make_file(self) -> str:
        """Make the file of the stack, each member with one instance."""
        members = []
        for number in range(INSTANCES):
            query, policy = list(KINDS.items())[number % len(KINDS)]
            group = f', group: {{name: {policy}, policy: {policy}, strict: false}}' if policy else ''
            members.append(f"  member-{number}: {{query: '{query}', image: '{IMAGE}'{group}}}\n")
        return f'stack: bench\ninstances:\n{"".join(members)}'

    def run(self, *words: str) -> str:
        completed = subprocess.run([*self._command, *words], check=True, capture_output=True, text=True)
        return completed.stdout

    def apply(self) -> None:
        self.run('apply', str(self._file))

    def create_sets(self) -> None:
        """Create one set of each kind."""
        for number, (query, policy) in enumerate(KINDS.items()):
            group = ['--group', policy, '--policy', policy, '--soft'] if policy else []
            count = str(INSTANCES // len(KINDS))
            self.run(query, IMAGE, '--count', count, '--name', f'set-{number}', *group)

    def measure(self, create: Callable[[], None]) -> float:
        """Return how long a creation takes; check the number of instances, and remove them."""
        seconds = measure_seconds(create)
        requests = self._list_requests()
        assert len(requests) == INSTANCES, len(requests)
        families = ('/names/', '/groups/', '/stacks/')
        shared = [key for family in families for key in self.store.snapshot(family, keys_only=True).entries]
        removed = [*(keys.request(next(iter(each.allocations)), each.instance) for each in requests), *shared]
        assert self.store.commit([], [Delete(key) for key in removed]) is not None
        for request in requests:
            self._cluster.placement.call('DELETE', f'/allocations/{request.instance}')
        return seconds

    def write_records(self) -> None:
        """Write the record of each instance, as its compute would."""
        puts = []
        for request in self._list_requests():
            (compute,) = request.allocations
            record = make_record(compute, request, NOW).enter_state(ACTIVE, NOW, 'started', 'addressed')
            puts.append(Put(keys.record(compute, request.instance), encode(record)))
        assert self.store.commit([], puts) is not None

    def _list_requests(self) -> list[Request]:
        entries = self.store.snapshot(keys.HOSTS).entries
        requests = [parse_request(key.split('/')[2], key, entry.value) for key, entry in entries.items()]
        return [request for request in requests if isinstance(request, Request)]


def main() -> None:
    options = asked(arguments(__doc__, 12))
    with FakeCluster(COMPUTES, ETCD_OPTION) as cluster:
        bench = Bench(cluster)
        bench.measure(bench.apply), bench.measure(bench.create_sets)  # reads modules and pages from the disk
        stacks, sets = [], []
        for _ in range(options.rounds):
            stacks.append(bench.measure(bench.apply))
            sets.append(bench.measure(bench.create_sets))
        workload = f'{INSTANCES} unlike members, against {len(KINDS)} sets, {COMPUTES} computes'
        tell(paired('apply', workload, stacks, sets, 1.2), options.json)
        bench.apply()
        bench.write_records()
        assert len(bench.run('list', '-f', 'value', '-c', 'NAME').split()) == INSTANCES
        seconds = measure_in_turn(bench.apply, lambda: bench.run('list'), options.rounds)
        tell(paired('apply', f'{INSTANCES} members unchanged, against list', *seconds, 1.2), options.json)
        bench.store.close()


if __name__ == '__main__':
    main()
