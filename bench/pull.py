"""Requests taken from a queue in clusters of several sizes, each against the smallest.

    python bench/pull.py [ROUNDS] [--quick] [--json] [--computes 10,100,1000] [--requesters 1,8,32] [--each 4]

The clusters run side by side, each with its own etcd, placement and fake computes with queues, and each round asks all
of them: the rates of a size and of the smallest in a round are a pair. A rate covers the time from the start of the
first request until a watch sees the last one at a compute. A lone request is put when a compute has the previous one.
Nothing is destroyed between rounds: there is room for all. Needs '.[lab,test]', psycopg2-binary and PostgreSQL.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.cluster import Cluster  # noqa: E402
from bench.comparison import FLAVOR, QUERY, UUID, Requesters, parse_numbers  # noqa: E402
from bench.result import Result, arguments, asked, make_result, paired, tell  # noqa: E402
from tests.kit.commands import run_eschedule_process  # noqa: E402

# Minimum of the rate, relative to the smallest, at a thousand computes.
TARGET = 0.5
# Maximum of seconds for a lone request.
MAX_LONE_SECONDS = 0.5
# Room for requests, relative to their number.
ROOM_FACTOR = 2
TIMEOUT_SECONDS = 600.0


def measure_once(cluster: Cluster, requesters: Requesters, count: int) -> tuple[float, list[float]]:
    """Make `count` concurrent requests; return the rate a second and the seconds of each."""
    results = requesters.place(count)
    placed = [(began, UUID.findall(output)) for began, _, code, output in results if code == 0]
    instances = {instance for _, uuids in placed for instance in uuids}
    assert len(instances) == count, results
    cluster.wait_for(instances, TIMEOUT_SECONDS)
    seconds = max(cluster.seen[uuid][0] for uuid in instances) - min(began for began, _ in placed)
    return count / seconds, [cluster.seen[instance][0] - began for began, uuids in placed for instance in uuids]


def measure_cells(clusters: dict[int, Cluster], requesters: int, options: argparse.Namespace) -> Iterator[Result]:
    """Measure each cluster with these requesters."""
    asking = {size: Requesters(requesters, cluster.schedule_yaml, 'pull') for size, cluster in clusters.items()}
    try:
        for size, cluster in clusters.items():
            measure_once(cluster, asking[size], requesters)  # opens connections and learns the sizes
        rates: dict[int, list[float]] = {size: [] for size in clusters}
        durations: dict[int, list[float]] = {size: [] for size in clusters}
        before = {size: cluster.placement.read_counts() for size, cluster in clusters.items()}
        for turn in range(options.rounds):
            for size in sorted(clusters, reverse=bool(turn % 2)):
                rate, seconds = measure_once(clusters[size], asking[size], options.each * requesters)
                rates[size].append(rate)
                durations[size] += seconds
        placed = options.rounds * options.each * requesters
        for size, cluster in clusters.items():
            counts = {}
            for client, kinds in cluster.placement.read_counts().items():
                new_calls = {f'{client} {kind}': now - before[size][client][kind] for kind, now in kinds.items()}
                counts |= {kind: round(calls / placed, 2) for kind, calls in new_calls.items() if calls}
            late = sorted(durations[size])[len(durations[size]) * 95 // 100]
            counts |= {'p50 s': round(median(durations[size]), 3), 'p95 s': round(late, 3)}
            target = TARGET if size >= 1000 else None
            workload = f'{size:,} computes, {requesters} requesters'
            yield paired('pull', workload, rates[size], rates[min(rates)], target, unit='a second', at_least=True,
                         counts=counts)  # fmt: skip
    finally:
        for group in asking.values():
            group.close()


def measure_lone_request(size: int, cluster: Cluster, rounds: int) -> Result:
    """Measure one request at a time, each after a compute has the previous one."""
    asking = Requesters(1, cluster.schedule_yaml, 'pull')
    try:
        seconds = []
        for _ in range(rounds + 1):
            seconds += measure_once(cluster, asking, 1)[1]
            time.sleep(0.2)
    finally:
        asking.close()
    return make_result('pull', f'{size:,} computes, a lone request', seconds[1:], MAX_LONE_SECONDS)


def main() -> None:
    parser = arguments(__doc__, 12)
    parser.add_argument('--computes', type=parse_numbers, default=[10, 100, 1000])
    parser.add_argument('--requesters', type=parse_numbers, default=[1, 8, 32])
    parser.add_argument('--each', type=int, default=4, help='requests of each requester in a round')
    options = asked(parser)
    if options.quick:
        options.computes, options.requesters = [10, 100], options.requesters[:2]
    requests = sum((options.rounds * options.each + 1) * each for each in options.requesters) + options.rounds + 1
    with ExitStack() as at_exit:
        clusters = {}
        for size in options.computes:
            places = max(4, ROOM_FACTOR * requests // size)
            clusters[size] = at_exit.enter_context(Cluster(size, places, queues=True))
            done = run_eschedule_process(clusters[size].schedule_yaml, 'flavor', 'set', FLAVOR, QUERY)
            assert done.code == 0, done
        for size, each in clusters.items():
            tell(measure_lone_request(size, each, options.rounds), options.json)
        for requesters in options.requesters:
            for result in measure_cells(clusters, requesters, options):
                tell(result, options.json)


if __name__ == '__main__':
    main()
