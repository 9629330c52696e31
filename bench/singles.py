"""One instance at a time in clusters of several sizes, each against the smallest.

    python bench/singles.py [ROUNDS] [--quick] [--json] [--computes 10,100,1000] [--requesters 1,8,32] [--full 0,75,97]
                            [--each 4]

The clusters run side by side, each with its own etcd and placement, and each round asks all of them: the rates of a
size and of the smallest in a round are a pair. `full` is the percentage of places taken. The computes are only keys and
providers, whose facts are renewed every ten seconds, as by an ecompute. Needs '.[lab,test]', psycopg2-binary and
PostgreSQL.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import threading
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.cluster import CountedPlacement, Postgres  # noqa: E402
from bench.comparison import Requesters, parse_numbers  # noqa: E402
from bench.result import Result, arguments, asked, paired, tell  # noqa: E402
from ecomp.agent.host.provider import parse_inventory  # noqa: E402
from ecomp.conf import EtcdConfig  # noqa: E402
from ecomp.model import keys  # noqa: E402
from ecomp.model.allocation import Provider  # noqa: E402
from ecomp.model.facts import encode_facts  # noqa: E402
from ecomp.model.json_object import dump  # noqa: E402
from ecomp.store.client import Put, Store  # noqa: E402
from tests.kit.commands import write_config  # noqa: E402
from tests.kit.servers import Etcd  # noqa: E402

INSTANCE_RESOURCES = {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}
# Seconds between two renewals of a compute's facts.
FACTS_SECONDS = 10
# Minimum of the rate, relative to the smallest cluster, by size.
TARGETS = {1000: 0.8, 10_000: 0.6}
# The ids of the first classes in placement's database.
CLASS_IDS = {'VCPU': 0, 'MEMORY_MB': 1, 'DISK_GB': 2}


class FakeCluster:
    """A cluster of keys and providers, without ecomputes."""

    def __init__(self, computes: int, *etcd_options: str) -> None:
        self._etcd_options = etcd_options
        self.size = computes
        self.places = max(8, 2000 // computes)  # of each compute
        self.inventory = {name: {'total': self.places * amount} for name, amount in INSTANCE_RESOURCES.items()}
        self.computes = sorted(str(uuid.uuid4()) for _ in range(computes))
        self.used = dict.fromkeys(self.computes, 0)
        self._published: dict[str, int] = {}
        self._at_exit = ExitStack()
        self._stop = threading.Event()

    def __enter__(self) -> Self:
        enter = self._at_exit.enter_context
        self.etcd = enter(Etcd(None, *self._etcd_options))
        self._postgres = enter(Postgres())
        self.placement = enter(CountedPlacement(self._postgres.url))
        directory = Path(enter(TemporaryDirectory(prefix='ecomp-bench-')))
        os.environ['XDG_CACHE_HOME'] = str(directory)  # requesters cache the size of the cluster there
        self.config = write_config(directory / 'schedule.yaml', self.etcd.endpoint, self.placement.url)
        self._store = Store(EtcdConfig((self.etcd.endpoint,)))
        self._at_exit.callback(self._store.close)
        self._register()
        self._lease = self._store.grant(3600)
        self.publish_facts(self.computes)
        thread = threading.Thread(target=self._renew, daemon=True)
        thread.start()
        self._at_exit.callback(thread.join)
        self._at_exit.callback(self._stop.set)
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit.close()

    def fill(self, hundredths: int) -> None:
        """Take a percentage of all places for unused consumers, unevenly among the computes."""
        missing = self.size * self.places * hundredths // 100 - sum(self.used.values())
        places = [each for each in self.computes for _ in range(self.places - self.used[each])]
        random.Random(1).shuffle(places)
        counts: dict[str, int] = {}
        for each in places[: max(missing, 0)]:
            counts[each] = counts.get(each, 0) + 1
        claims = {}
        for compute, count in counts.items():
            resources = {name: amount * count for name, amount in INSTANCE_RESOURCES.items()}
            body = {'allocations': {compute: {'resources': resources}}, 'user_id': 'u', 'project_id': 'p'}
            claims[str(uuid.uuid4())] = {**body, 'consumer_generation': None, 'consumer_type': 'INSTANCE'}
            self.used[compute] += count
        consumers = list(claims)
        for start in range(0, len(consumers), 100):
            self.placement.call('POST', '/allocations', {each: claims[each] for each in consumers[start : start + 100]})
        self.publish_facts(self.computes)

    def publish_facts(self, computes: list[str]) -> None:
        """Publish the facts of those computes whose room has changed, with their presence."""
        changed = [compute for compute in computes if self._published.get(compute) != self.used[compute]]
        for start in range(0, len(changed), 50):
            puts = []
            for compute in changed[start : start + 50]:
                allocated = {name: amount * self.used[compute] for name, amount in INSTANCE_RESOURCES.items()}
                provider = Provider(compute, parse_inventory(self.inventory))
                puts.append(Put(keys.facts(compute), encode_facts(provider, allocated, ()), self._lease))
                if compute not in self._published:
                    puts.append(Put(keys.compute(compute), dump({'token': 'x', 'hostname': compute[:8]}), self._lease))
                self._published[compute] = self.used[compute]
            self._store.commit([], puts)

    def calculate_imbalance(self) -> float:
        """Return the percentage points between the fullest and the emptiest compute."""
        return round(100 * (max(self.used.values()) - min(self.used.values())) / self.places, 1)

    def record_placed(self, answers: list[list[Any]]) -> list[float]:
        """Count the placed instances, and return the seconds of each request."""
        for _, _, code, output in answers:
            if code == 0:
                self.used[output.split('TARGET, ')[1][:36]] += 1
        return [ended - began for began, ended, *_ in answers]

    def _renew(self) -> None:
        for number in range(10**9):
            if self._stop.wait(1):
                return
            self.publish_facts(self.computes[number % FACTS_SECONDS :: FACTS_SECONDS])

    def _register(self) -> None:
        """Register providers in the database: ten thousand take half an hour by requests."""
        import psycopg2
        from psycopg2.extras import execute_values

        path = self._postgres.url.partition('host=')[2]
        with psycopg2.connect(user='postgres', dbname='postgres', host=path) as database, database.cursor() as cursor:
            rows = [(compute, compute, 0) for compute in self.computes]
            execute_values(cursor, 'INSERT INTO resource_providers (uuid, name, generation) VALUES %s', rows)
            cursor.execute('UPDATE resource_providers SET root_provider_id = id')
            cursor.execute('SELECT id FROM resource_providers')
            inventories = [
                (number, CLASS_IDS[name], compute['total'], 0, 1, compute['total'], 1, 1.0)
                for (number,) in cursor.fetchall()
                for name, compute in self.inventory.items()
            ]
            execute_values(cursor, 'INSERT INTO inventories (resource_provider_id, resource_class_id, total, reserved, '
                           'min_unit, max_unit, step_size, allocation_ratio) VALUES %s', inventories)  # fmt: skip


def run(options: argparse.Namespace) -> None:
    """Measure, and print a line for each cell."""
    with ExitStack() as at_exit:
        clusters = [at_exit.enter_context(FakeCluster(cluster)) for cluster in options.computes]
        for full in options.full:
            for cluster in clusters:
                cluster.fill(full)
            for requesters in options.requesters:
                for result in measure_cells(clusters, full, requesters, options):
                    tell(result, options.json)


def measure_cells(clusters: list[FakeCluster], full: int, requesters: int, options: argparse.Namespace) -> list[Result]:
    """Measure the rate of each cluster with these requesters against that of the smallest."""
    requester_groups = [Requesters(requesters, cluster.config, 'one') for cluster in clusters]
    try:
        for cluster, ask in zip(clusters, requester_groups, strict=True):
            cluster.record_placed(ask.place(requesters))  # opens connections and learns the sizes
        rates: list[list[float]] = [[] for _ in clusters]
        before = [cluster.placement.read_counts()['asking'] for cluster in clusters]
        count, failed = options.each * requesters, [0] * len(clusters)
        for turn in range(options.rounds):
            for number in sorted(range(len(clusters)), reverse=bool(turn % 2)):
                start = time.monotonic()
                answers = requester_groups[number].place(count)
                rates[number].append(count / (time.monotonic() - start))
                clusters[number].record_placed(answers)
                failed[number] += sum(code != 0 for *_, code, _ in answers)
        results = []
        for number, cluster in enumerate(clusters):
            calls = {
                kind: now - before[number][kind] for kind, now in cluster.placement.read_counts()['asking'].items()
            }
            placed = count * options.rounds - failed[number]
            workload = f'{cluster.size:,} computes, {full} % full, {requesters} requesters'
            counts = {kind: round(more / max(placed, 1), 3) for kind, more in calls.items() if more}
            counts |= {
                'failed': failed[number],
                'points between the fullest and the emptiest': cluster.calculate_imbalance(),
            }
            # Without room these are refusals, which bench/refusal.py measures.
            target = None if any(failed) else TARGETS.get(cluster.size)
            results.append(paired('singles', workload, rates[number], rates[0], target, unit='a second',
                                at_least=True, counts=counts))  # fmt: skip
        return results
    finally:
        for processes in requester_groups:
            processes.close()


def main() -> None:
    parser = arguments(__doc__, 12)
    parser.add_argument('--computes', type=parse_numbers, default=[10, 100, 1000])
    parser.add_argument('--requesters', type=parse_numbers, default=[1, 8])
    parser.add_argument('--full', type=parse_numbers, default=[0, 75, 97])
    parser.add_argument('--each', type=int, default=4, help='instances of each requester in a round')
    options = asked(parser)
    if options.quick:
        options.full, options.computes = options.full[:1], [options.computes[0], options.computes[-1]]
    run(options)


if __name__ == '__main__':
    main()
