"""look: eschedule's short questions, of 50 instances, against one curl call to etcd, all with certificates.

The floor reads all records by etcd's JSON gateway, in one curl process. Each question runs in turn with it, and with
`python -c 'import requests'`, which none of them should take as long as. Aim: at most 3 of the floor.

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
from bench.secured import Secured, in_turn, secured
from ecomp.model import keys
from ecomp.model.order import Request
from ecomp.model.order import to_json as request_to_json
from ecomp.model.record import ACTIVE, Interface, new_record, to_json
from ecomp.store.client import Put

COMPUTES, INSTANCES = 10, 50
NOW = '2026-01-01T00:00:00.000Z'


def furnish(there: Secured) -> str:
    """Instances that run, as their computes would have written them; the uuid of one."""
    computes = [keys.last(key) for key in there.store.snapshot(keys.COMPUTES).entries]
    instance = ''
    for number in range(INSTANCES):
        instance, compute = str(uuid.uuid4()), computes[number % len(computes)]
        has = {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}
        said = {'image': 'http://bench/x', 'name': f'web-{number}', 'stages': {'requested': NOW}}
        asked = Request(instance, {compute: has}, **said)
        there.store.commit([], [Put(keys.request(compute, instance), request_to_json(asked))])
        found = new_record(compute, asked, NOW).at(ACTIVE, NOW, 'started', 'addressed')
        address = Interface('default', f'52:54:00:00:00:{number:02x}', f'192.0.2.{number}')
        there.store.commit([], [Put(keys.record(compute, instance), to_json(replace(found, addresses=(address,))))])
        there.store.commit([], [Put(keys.name(f'web-{number}'), json.dumps({'version': 1, 'instance': instance}))])
    return instance


def main() -> None:
    """See the module."""
    options = asked(arguments(__doc__, 12))
    with secured(COMPUTES) as there:
        instance = furnish(there)
        start, end = (base64.b64encode(each).decode() for each in (b'/instances/', b'/instances0'))
        body = json.dumps({'key': start, 'range_end': end})
        python, eschedule = sys.executable, Path(sys.executable).with_name('eschedule')

        def run(*words: str) -> None:
            subprocess.run([eschedule, '--config', there.config, *words], check=True, capture_output=True)

        def floor() -> bytes:
            return there.ask('-X', 'POST', '-d', body, f'https://{there.etcd}/v3/kv/range')

        def requests() -> None:
            subprocess.run([python, '-c', 'import requests'], check=True)

        assert len(json.loads(floor())['kvs']) == INSTANCES
        questions = (['list'], ['show', 'web-7'], [instance], ['list', '-f', 'value', '-c', 'NAME'])
        for words in questions:
            said = ' '.join('UUID' if each == instance else each for each in words)
            for beside, floor_of, target in (('one curl', floor, 3.0), ('import requests', requests, 1.0)):
                taken = in_turn(partial(run, *words), floor_of, options.rounds)
                tell(paired('look', f'{said}, against {beside}', *taken, target), options.json)


if __name__ == '__main__':
    main()
