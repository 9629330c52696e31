"""claim-one: the whole eschedule command, against three curl calls doing the same HTTP, both with certificates.

The floor asks placement for candidates, claims the first and puts the request into etcd (its JSON gateway), one curl
process each. Both sides run in turn, in one run, so that a slow moment hits both; the figure is the median of
the pairs' ratios. Aim: at most 2 at 10 computes, 1.4 at 1,000.

    python bench/claim_one.py [PAIRS [COMPUTES]…]       30 pairs at 10 and at 1,000
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import uuid
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.secured import Secured, compare, secured

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:1'


def floor(there: Secured) -> None:
    """Candidates, claim, put."""
    headers = ['-H', f'x-auth-token: {there.token}', '-H', 'openstack-api-version: placement 1.39']
    headers += ['-H', 'content-type: application/json']
    found = json.loads(there.ask(*headers, f'{there.placement}/allocation_candidates?{QUERY}'))
    instance = str(uuid.uuid4())
    claim = {
        'allocations': found['allocation_requests'][0]['allocations'],
        'user_id': 'bench',
        'project_id': 'bench',
        'consumer_generation': None,
        'consumer_type': 'INSTANCE',
    }
    there.ask(*headers, '-X', 'PUT', '-d', json.dumps(claim), f'{there.placement}/allocations/{instance}')
    key, value = f'/bench/{instance}', json.dumps({**claim, 'instance': instance, 'image': 'http://bench/x'})
    body = {'key': base64.b64encode(key.encode()).decode(), 'value': base64.b64encode(value.encode()).decode()}
    there.ask('-X', 'POST', '-d', json.dumps(body), f'https://{there.etcd}/v3/kv/put')


def main(pairs: int, computes: int) -> None:
    """Print each side's median and the median of the pairs' ratios."""
    with secured(computes) as there:
        command = [Path(sys.executable).with_name('eschedule'), '--config', there.config, QUERY]
        ratio, ours, theirs = compare(
            lambda: subprocess.run(command, check=True, capture_output=True), lambda: floor(there), pairs
        )
    print(f'claim-one, {computes} computes, {pairs} pairs: eschedule {ours:.0f} ms,', end=' ')
    print(f'three curl calls {theirs:.0f} ms, ratio {ratio:.2f} (aim: {2 if computes < 1000 else 1.4})', flush=True)


if __name__ == '__main__':
    for number in [int(each) for each in sys.argv[2:]] or [10, 1000]:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else 30, number)
