"""claim-one: the whole eschedule command, against three curl calls doing the same HTTP, both with certificates.

The floor asks placement for candidates, claims the first and puts the request into etcd (its JSON gateway), one curl
process each. Both sides run in turn, in one run, so that a slow moment hits both; the figure is the median of
the pairs' ratios. Aim: at most 2 at 10 computes, 1.4 at 1,000.

    python bench/claim_one.py [ROUNDS] [--quick] [--json]       30 rounds at 10 and at 1,000
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.result import arguments, asked, paired, tell
from bench.secured import Secured, in_turn, secured

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:1'
TARGETS = {10: 2.0, 1000: 1.4}
"""Times the floor, by how many computes there are."""


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


def main() -> None:
    """See the module."""
    options = asked(arguments(__doc__, 30))
    for computes, target in TARGETS.items():
        with secured(computes) as there:
            command = [Path(sys.executable).with_name('eschedule'), '--config', there.config, QUERY]

            def ours(command: Sequence[str | Path] = command) -> None:
                subprocess.run(command, check=True, capture_output=True)

            def theirs(there: Secured = there) -> None:
                floor(there)

            taken = in_turn(ours, theirs, options.rounds)
        tell(paired('claim-one', f'{computes:,} computes', *taken, target), options.json)


if __name__ == '__main__':
    main()
