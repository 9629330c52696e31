"""NO ALLOCATIONS LEFT with every reason, in clusters of several sizes: calls and time.

    python bench/refusal.py [ROUNDS] [--quick] [--json] [--computes 10,1000]

`all`: nothing is free, and the facts show it; `vcpu`: another client took all VCPU, and the facts are wrong. The floor
is one GET /allocation_candidates of the same query, in turn with the refusals.
"""

from __future__ import annotations

import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.comparison import QUERY, Requesters, parse_numbers  # noqa: E402
from bench.result import Result, arguments, asked, make_result, paired, tell  # noqa: E402
from bench.singles import INSTANCE_RESOURCES, FakeCluster  # noqa: E402


def take_vcpu(cluster: FakeCluster) -> list[str]:
    """Take all VCPU without an update of facts, and return the consumers."""
    held = []
    for start in range(0, cluster.size, 100):
        claims = {
            str(uuid.uuid4()): {
                'allocations': {each: {'resources': {'VCPU': INSTANCE_RESOURCES['VCPU'] * cluster.places}}},
                **{'user_id': 'u', 'project_id': 'p', 'consumer_generation': None, 'consumer_type': 'INSTANCE'},
            }
            for each in cluster.computes[start : start + 100]
        }
        cluster.placement.call('POST', '/allocations', claims)
        held += claims
    return held


def measure(cluster: FakeCluster, what: str, rounds: int) -> Iterator[Result]:
    """Measure the refusals."""
    requesters = Requesters(1, cluster.config, 'one')
    url = f'{cluster.placement.url}/allocation_candidates?{QUERY}'
    headers = {'x-auth-token': 'admin', 'openstack-api-version': 'placement 1.39'}
    try:
        requesters.place(2)
        durations, floors, calls = [], [], []
        for _ in range(rounds):
            start = time.monotonic()
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as response:
                response.read()
            floors.append(time.monotonic() - start)
            before = cluster.placement.read_counts()['asking']
            ((start, ended, code, output),) = requesters.place(1)
            assert (code, output) == (3, 'NO ALLOCATIONS LEFT\n'), (code, output)
            durations.append(ended - start)
            after = cluster.placement.read_counts()['asking']
            calls.append(sum(after[kind] - before[kind] for kind in ('candidates', 'claims', 'held', 'upkeep')))
        workload = f'{cluster.size:,} computes, {what}'
        counted = {'calls': max(calls)}
        yield paired('refusal', f'{workload}, against one question', durations, floors, None, counts=counted)
        yield make_result('refusal', f'{workload}, whole', durations, 1.0, unit='s')
        yield make_result('refusal', f'{workload}, calls', calls, 6, unit='calls')
    finally:
        requesters.close()


def main() -> None:
    parser = arguments(__doc__, 12)
    parser.add_argument('--computes', type=parse_numbers, default=[10, 1000])
    options = asked(parser)
    for size in options.computes:
        for kind in ('vcpu', 'all'):
            with FakeCluster(size) as cluster:
                cluster.fill(100) if kind == 'all' else take_vcpu(cluster)
                for result in measure(cluster, kind, options.rounds):
                    tell(result, options.json)


if __name__ == '__main__':
    main()
