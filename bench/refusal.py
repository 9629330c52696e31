"""NO ALLOCATIONS LEFT with every reason, in clusters of several sizes: its calls, its time, and that of one question.

    python bench/refusal.py [--computes 10,1000] [--rounds 12] [--results FILE]

`all`: nothing is left of anything, and the computes say so; `vcpu`: somebody took all VCPU behind their backs, so what
they say is not so. The floor is one GET /allocation_candidates of the same query, asked by turns with the refusals.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import urllib.request
import uuid
from contextlib import ExitStack
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.comparison import QUERY, Requesters, numbers  # noqa: E402
from bench.singles import EACH, Pretended  # noqa: E402


def take_vcpu(cluster: Pretended) -> list[str]:
    """Take all VCPU, for nobody, and have no compute say so; who was made to hold it."""
    held = []
    for start in range(0, cluster.size, 100):
        claims = {
            str(uuid.uuid4()): {
                'allocations': {each: {'resources': {'VCPU': EACH['VCPU'] * cluster.places}}},
                **{'user_id': 'u', 'project_id': 'p', 'consumer_generation': None, 'consumer_type': 'INSTANCE'},
            }
            for each in cluster.computes[start : start + 100]
        }
        cluster.placement.call('POST', '/allocations', claims)
        held += claims
    return held


def measure(cluster: Pretended, rounds: int) -> dict[str, Any]:
    """What a refusal takes."""
    asking = Requesters(1, cluster.config, 'one')
    url = f'{cluster.placement.url}/allocation_candidates?{QUERY}'
    headers = {'x-auth-token': 'admin', 'openstack-api-version': 'placement 1.39'}
    try:
        asking.ask(2)
        took, floors, calls = [], [], []
        for _ in range(rounds):
            began = time.monotonic()
            with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as answer:
                answer.read()
            floors.append(time.monotonic() - began)
            before = cluster.placement.counts()['asking']
            ((began, ended, code, said),) = asking.ask(1)
            assert (code, said) == (3, 'NO ALLOCATIONS LEFT\n'), (code, said)
            took.append(ended - began)
            after = cluster.placement.counts()['asking']
            calls.append(sum(after[kind] - before[kind] for kind in ('candidates', 'claims', 'held', 'upkeep')))
        return {
            'computes': cluster.size,
            'seconds': round(statistics.median(took), 3),
            'of_one_question': round(statistics.median(a / b for a, b in zip(took, floors, strict=True)), 1),
            'one_question': round(statistics.median(floors), 3),
            'calls': max(calls),
        }
    finally:
        asking.close()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--computes', type=numbers, default=[10, 1000])
    parser.add_argument('--rounds', type=int, default=12)
    parser.add_argument('--results', type=Path)
    options = parser.parse_args()
    for size in options.computes:
        for what in ('vcpu', 'all'):
            with ExitStack() as at_exit:
                cluster = at_exit.enter_context(Pretended(size))
                cluster.fill(100) if what == 'all' else take_vcpu(cluster)
                load = round(os.getloadavg()[0])
                line = json.dumps({'full': what, **measure(cluster, options.rounds), 'load': load})
                print(line, flush=True)
                if options.results:
                    with options.results.open('a') as results:
                        results.write(line + '\n')


if __name__ == '__main__':
    main()
