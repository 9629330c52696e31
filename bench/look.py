"""look: eschedule's short queries about 50 instances, against one curl call to etcd.

All use certificates. The floor reads all records by etcd's JSON gateway in one curl process. Each query runs in turn
with it, and with `python -c 'import requests'`, which should take longer. Target: at most 3 times the floor.

    python bench/look.py [ROUNDS] [--quick] [--json]       12 rounds
"""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import uuid
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.result import arguments, asked, paired, tell
from bench.secured import SecuredServers, measure_in_turn, start_secured
from ecomp.model import keys
from ecomp.model.order import Request
from ecomp.model.record import Interface, make_record
from ecomp.model.states import ACTIVE
from ecomp.model.stored import encode
from ecomp.store.client import Put

COMPUTES, INSTANCES = 10, 50
NOW = '2026-01-01T00:00:00.000Z'


def write_instances(servers: SecuredServers) -> str:
    """Write running instances as their computes would, and return the uuid of one."""
    computes = [keys.get_last_part(key) for key in servers.store.snapshot(keys.COMPUTES).entries]
    instance = ''
    for number in range(INSTANCES):
        instance, compute = str(uuid.uuid4()), computes[number % len(computes)]
        resources = {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}
        fields = {'image': 'http://bench/x', 'name': f'web-{number}', 'stages': {'requested': NOW}}
        request = Request(instance, {compute: resources}, **fields)
        servers.store.commit([], [Put(keys.request(compute, instance), encode(request))])
        record = make_record(compute, request, NOW).enter_state(ACTIVE, NOW, 'started', 'addressed')
        address = Interface('default', f'52:54:00:00:00:{number:02x}', f'192.0.2.{number}')
        servers.store.commit([], [Put(keys.record(compute, instance), encode(replace(record, addresses=(address,))))])
        servers.store.commit([], [Put(keys.name(f'web-{number}'), json.dumps({'version': 1, 'instance': instance}))])
    return instance


def main() -> None:
    options = asked(arguments(__doc__, 12))
    with start_secured(COMPUTES) as servers:
        instance = write_instances(servers)
        start, end = (base64.b64encode(word).decode() for word in (b'/instances/', b'/instances0'))
        body = json.dumps({'key': start, 'range_end': end})
        python, eschedule = sys.executable, Path(sys.executable).with_name('eschedule')

        def run(*words: str) -> None:
            subprocess.run([eschedule, '--config', servers.config, *words], check=True, capture_output=True)

        def floor() -> bytes:
            return servers.run_curl('-X', 'POST', '-d', body, f'https://{servers.etcd}/v3/kv/range')

        def requests() -> None:
            subprocess.run([python, '-c', 'import requests'], check=True)

        assert len(json.loads(floor())['kvs']) == INSTANCES
        questions = (['list'], ['show', 'web-7'], [instance], ['list', '-f', 'value', '-c', 'NAME'])
        for words in questions:
            query = ' '.join('UUID' if word == instance else word for word in words)
            for floor_name, floor_of, target in (('one curl', floor, 3.0), ('import requests', requests, 1.0)):
                seconds = measure_in_turn(partial(run, *words), floor_of, options.rounds)
                tell(paired('look', f'{query}, against {floor_name}', *seconds, target), options.json)


if __name__ == '__main__':
    main()
