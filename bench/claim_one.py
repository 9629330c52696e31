"""claim-one: the whole eschedule command, against three curl calls doing the same HTTP.

The floor asks placement for candidates, claims the first and puts the request into etcd (its JSON gateway), one curl
process each. Both sides run in turn, in one run, so that a slow moment hits both; the figure is the median of
the pairs' ratios. Aim: at most 4.

    python bench/claim_one.py [PAIRS]
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.kit.commands import Ecompute, write_config
from tests.kit.servers import Etcd, PlacementServer

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:1'
ROOM = 'VCPU:100000,DISK_GB:100000,MEMORY_MB:100000'
HEADERS = ['-H', 'x-auth-token: admin', '-H', 'openstack-api-version: placement 1.39']
HEADERS += ['-H', 'content-type: application/json']


def curl(*words: str) -> bytes:
    """One curl process; it must succeed."""
    return subprocess.run(['curl', '-sS', '--fail', *words], check=True, capture_output=True).stdout


def floor(placement: str, etcd: str, compute: str) -> None:
    """Candidates, claim, put."""
    found = json.loads(curl(*HEADERS, f'{placement}/allocation_candidates?{QUERY}'))
    instance = str(uuid.uuid4())
    claim = {
        'allocations': found['allocation_requests'][0]['allocations'],
        'user_id': 'bench',
        'project_id': 'bench',
        'consumer_generation': None,
        'consumer_type': 'INSTANCE',
    }
    curl(*HEADERS, '-X', 'PUT', '-d', json.dumps(claim), f'{placement}/allocations/{instance}')
    # Not under /hosts/, so that no ecompute does work for the floor.
    key, value = f'/bench/{compute}/{instance}', json.dumps({**claim, 'instance': instance, 'image': 'http://bench/x'})
    body = {'key': base64.b64encode(key.encode()).decode(), 'value': base64.b64encode(value.encode()).decode()}
    curl('-X', 'POST', '-d', json.dumps(body), f'http://{etcd}/v3/kv/put')


def timed(what: Callable[[], None]) -> float:
    """Seconds that a call took."""
    began = time.monotonic()
    what()
    return time.monotonic() - began


def main(pairs: int) -> None:
    """Print each side's median and the median of the pairs' ratios."""
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with Etcd() as etcd, PlacementServer() as placement, Ecompute(etcd.endpoint, placement.url, ROOM) as compute:
            write_config(directory / 'schedule.yaml', etcd.endpoint, placement.url)
            eschedule = Path(sys.executable).with_name('eschedule')

            def ours() -> None:
                subprocess.run([eschedule, QUERY], check=True, capture_output=True, cwd=directory)

            def theirs() -> None:
                floor(placement.url, etcd.endpoint, compute.uuid)

            ours(), theirs()  # the first of each reads modules and pages from the disk
            taken = [(timed(ours), timed(theirs)) for _ in range(pairs)]
    mine, floors = [pair[0] for pair in taken], [pair[1] for pair in taken]
    ratio = median(a / b for a, b in taken)
    print(f'claim-one, {pairs} pairs: eschedule {median(mine) * 1000:.0f} ms (least {min(mine) * 1000:.0f}),', end=' ')
    print(f'three curl calls {median(floors) * 1000:.0f} ms (least {min(floors) * 1000:.0f}),', end=' ')
    print(f'ratio {ratio:.2f} (aim: at most 4)')


if __name__ == '__main__':
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
