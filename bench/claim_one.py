"""claim-one: the eschedule command against three curl calls with the same HTTP.

Both sides use certificates. The floor asks placement for candidates, claims the first one and puts the request into
etcd (by its JSON gateway), one curl process each. Both sides run in turn, so that a slow moment affects both; the
result is the median ratio of the pairs. Target: at most 2 with 10 computes, 1.4 with 1,000.

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
from bench.secured import SecuredServers, measure_in_turn, start_secured

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:1'
# Maximum ratio to the floor, by number of computes.
TARGETS = {10: 2.0, 1000: 1.4}


def run_floor(servers: SecuredServers) -> None:
    """Get candidates, claim the first one and put the request."""
    headers = ['-H', f'x-auth-token: {servers.token}', '-H', 'openstack-api-version: placement 1.39']
    headers += ['-H', 'content-type: application/json']
    answer = json.loads(servers.run_curl(*headers, f'{servers.placement}/allocation_candidates?{QUERY}'))
    instance = str(uuid.uuid4())
    claim = {
        'allocations': answer['allocation_requests'][0]['allocations'],
        'user_id': 'bench',
        'project_id': 'bench',
        'consumer_generation': None,
        'consumer_type': 'INSTANCE',
    }
    servers.run_curl(*headers, '-X', 'PUT', '-d', json.dumps(claim), f'{servers.placement}/allocations/{instance}')
    key, value = f'/bench/{instance}', json.dumps({**claim, 'instance': instance, 'image': 'http://bench/x'})
    body = {'key': base64.b64encode(key.encode()).decode(), 'value': base64.b64encode(value.encode()).decode()}
    servers.run_curl('-X', 'POST', '-d', json.dumps(body), f'https://{servers.etcd}/v3/kv/put')


def main() -> None:
    options = asked(arguments(__doc__, 30))
    for computes, target in TARGETS.items():
        with start_secured(computes) as there:
            command = [Path(sys.executable).with_name('eschedule'), '--config', there.config, QUERY]

            def ours(command: Sequence[str | Path] = command) -> None:
                subprocess.run(command, check=True, capture_output=True)

            def theirs(servers: SecuredServers = there) -> None:
                run_floor(servers)

            seconds = measure_in_turn(ours, theirs, options.rounds)
        tell(paired('claim-one', f'{computes:,} computes', *seconds, target), options.json)


if __name__ == '__main__':
    main()
