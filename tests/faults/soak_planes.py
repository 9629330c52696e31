"""All planes as the servers themselves show them, as plain JSON values; and whether anything is still in work.

Nothing of ecomp's own reading code: its mistakes must not hide themselves.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.faults.history import History
from tests.faults.soak_cluster import Cluster
from tests.kit.gateway import Reply
from tests.kit.history import Change
from tests.kit.servers import b64
from tests.kit.witness import Revisions

HEADERS = {'x-auth-token': 'admin', 'openstack-api-version': 'placement 1.39'}
LIMIT = 3.0
"""Seconds for a call of etcd."""
LOOK = 0.5
"""Seconds between two looks at the records."""
BAD_WORDS = re.compile('Traceback|unexpected error')

Planes = dict[str, Any]


def under(where: str, prefix: str) -> list[dict[str, str]]:
    """What is under a prefix in etcd: key, value."""
    start = prefix.encode()
    end = start[:-1] + bytes([start[-1] + 1])
    with Reply(where, 'kv/range', {'key': b64(start), 'range_end': b64(end)}, LIMIT) as answer:
        found = json.loads(answer.read())
    return [
        {
            'key': base64.b64decode(each['key']).decode(),
            'value': base64.b64decode(each.get('value', '')).decode(errors='replace'),
        }
        for each in found.get('kvs', [])
    ]


def collect(cluster: Cluster) -> Planes:
    """Everything that is anywhere."""
    planes = control_planes(cluster)
    planes['guests'], planes['left'] = {}, {}
    planes['capacity'] = {
        compute: {
            name: int(each['total'] * each['allocation_ratio'])
            for name, each in _placement(cluster.direct[1], f'/resource_providers/{compute}/inventories').items()
        }
        for compute in cluster.computes()
    }
    for fake in cluster.fakes:
        path = fake.server.directory / 'state/fake.json'
        there = json.loads(path.read_text()) if path.exists() else []
        planes['guests'][fake.server.uuid] = {
            each['instance']: {'running': each['running'], 'disk': each['disk']} for each in there
        }
    for host in cluster.hosts:
        compute, state = cluster.whole.compute(host.name), cluster.whole.state(host.name)
        domains, disks = cluster.whole.domains(host.name), cluster.whole.disks(host.name)
        planes['guests'][compute] = {
            name: {'running': domains.get(name) == 'running', 'disk': name in disks} for name in {*domains, *disks}
        }
        data = [json.loads(path.read_text())['instance'] for path in (state / 'metadata').glob('*.json')]
        parts = [path.name for path in (state / 'images').glob('*.part')]
        planes['left'][compute] = {'guest data': sorted(data), 'parts': parts}
    planes['logs'] = {
        uuid: _bad(part.log.read_text(errors='replace').splitlines()) for uuid, part in cluster.compute_parts().items()
    }
    return planes


def control_planes(cluster: Cluster) -> Planes:
    """What etcd and placement hold."""
    where, placement = cluster.direct
    everything = {name: under(where, f'/{name}/') for name in ('hosts', 'instances', 'requests', 'booted')}
    held: dict[str, dict[str, Any]] = {}
    for compute in cluster.computes():
        for consumer, each in _placement(placement, f'/resource_providers/{compute}/allocations').items():
            held.setdefault(consumer, {})[compute] = each['resources']
    return {
        'records': {_last(each['key']): json.loads(each['value']) for each in everything['instances']},
        'hosts': [
            [*each['key'].split('/')[2:4], bool(json.loads(each['value'])['allocations'])]
            for each in everything['hosts']
        ],
        'requests': sorted(_last(each['key']) for each in everything['requests']),
        'booted': {_last(each['key']): each['value'] for each in everything['booted']},
        'allocations': held,
    }


def in_work(planes: Planes) -> list[str]:
    """What is not at its end yet, or is for somebody to release."""
    found = [f'{name}: an eschedule is or was at it' for name in planes['requests']]
    for compute, name, wanted in planes['hosts']:
        record = planes['records'].get(name)
        if record is None or not wanted or record['state'] not in ('active', 'stopped'):
            found.append(f'{name}: {record["state"] if record else "not seen"} on {compute}, wanted: {wanted}')
    asked = {name for _, name, _ in planes['hosts']}
    return found + [f'{name}: a claim without a request' for name in planes['allocations'].keys() - asked]


class Watcher(threading.Thread):
    """Writes down every change of etcd, soon after it: before anybody may have etcd forget it."""

    def __init__(self, where: str, history: History) -> None:
        super().__init__(name='watcher', daemon=True)
        self._history = history
        self._revisions = Revisions(lambda path, body: Reply(where, path, body, LIMIT))
        self._states: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(LOOK):
            with suppress(OSError, ValueError, KeyError):
                self.read_on()

    def read_on(self) -> int:
        """Write down what is new; the revision up to which all is. OSError, or its like while etcd is ending."""
        with self._lock:
            try:
                return self._revisions.read_on()
            finally:
                for each in self._revisions.changes:
                    self._write(each)
                self._revisions.changes.clear()

    def stop(self) -> None:
        """End, with all that etcd has."""
        self._stopped.set()
        self.join()
        self.read_on()

    def _write(self, change: Change) -> None:
        kept = change.kept
        value, lease = (None, 0) if kept is None else (kept.value.decode(errors='replace'), kept.lease)
        self._history.write('change', revision=change.revision, key=change.key, value=value, lease=lease)
        if value is not None and change.key.startswith('/instances/'):
            record = json.loads(value)
            name, state = record['instance'], record['state']
            if self._states.get(name) != state:
                self._states[name] = state
                self._history.write('state', instance=name, state=state, compute=record['compute'])


def processes(cluster: Cluster, when: str) -> None:
    """Write down what each ecompute has open."""
    for uuid, part in cluster.compute_parts().items():
        pid = part.pid()
        with suppress(OSError):
            status = dict(
                line.split(':', 1) for line in Path(f'/proc/{pid}/status').read_text().splitlines() if ':' in line
            )
            cluster.history.write(
                'process', compute=uuid, pid=pid, when=when, fds=len(list(Path(f'/proc/{pid}/fd').iterdir())),
                threads=int(status['Threads']), rss=int(status['VmRSS'].split()[0]) // 1024,
            )


def _placement(endpoint: str, path: str) -> dict[str, Any]:
    request = urllib.request.Request(endpoint + path, headers=HEADERS)
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)[path.rpartition('/')[2]]
    return found


def _bad(lines: list[str]) -> list[str]:
    """The lines no log may have, each with what comes after it."""
    return [' | '.join(lines[number : number + 12]) for number, line in enumerate(lines) if BAD_WORDS.search(line)]


def _last(key: str) -> str:
    return key.rsplit('/', 1)[1]
