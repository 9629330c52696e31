"""Read all planes from the servers as JSON values, and find the work in progress.

It uses none of ecomp's own reading code, so that a defect there cannot hide itself.
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

from bench.soak.cluster import Cluster
from bench.soak.history import History
from tests.kit.gateway import Reply
from tests.kit.history import Change
from tests.kit.servers import b64
from tests.kit.witness import RevisionReader

HEADERS = {'x-auth-token': 'admin', 'openstack-api-version': 'placement 1.39'}
# Seconds for a call of etcd.
ETCD_TIMEOUT_SECONDS = 3.0
# Seconds between two readings of etcd's changes.
POLL_SECONDS = 0.5
BAD_WORDS = re.compile('Traceback|unexpected error')

Planes = dict[str, Any]


def read_prefix(endpoint: str, prefix: str) -> list[dict[str, str]]:
    """Return the entries under a prefix in etcd: key and value."""
    start = prefix.encode()
    end = start[:-1] + bytes([start[-1] + 1])
    with Reply(endpoint, 'kv/range', {'key': b64(start), 'range_end': b64(end)}, ETCD_TIMEOUT_SECONDS) as answer:
        response = json.loads(answer.read())
    return [
        {
            'key': base64.b64decode(entry['key']).decode(),
            'value': base64.b64decode(entry.get('value', '')).decode(errors='replace'),
        }
        for entry in response.get('kvs', [])
    ]


def collect_planes(cluster: Cluster) -> Planes:
    """Read all planes: etcd, placement, guests, files and logs."""
    planes = collect_control_planes(cluster)
    planes['guests'], planes['left'] = {}, {}
    planes['capacity'] = {
        compute: {
            name: int(facts['total'] * facts['allocation_ratio'])
            for name, facts in _read_placement(cluster.direct[1], f'/resource_providers/{compute}/inventories').items()
        }
        for compute in cluster.get_computes()
    }
    for fake in cluster.fakes:
        path = fake.server.directory / 'state/fake.json'
        guests = json.loads(path.read_text()) if path.exists() else []
        planes['guests'][fake.server.uuid] = {
            facts['instance']: {'running': facts['running'], 'disk': facts['disk']} for facts in guests
        }
    for host in cluster.hosts:
        compute, state = cluster.lab_driver.read_compute(host.name), cluster.lab_driver.get_state_directory(host.name)
        domains, disks = cluster.lab_driver.list_domains(host.name), cluster.lab_driver.list_disks(host.name)
        planes['guests'][compute] = {
            name: {'running': domains.get(name) == 'running', 'disk': name in disks} for name in {*domains, *disks}
        }
        data = [json.loads(path.read_text())['instance'] for path in (state / 'metadata').glob('*.json')]
        parts = [path.name for path in (state / 'images').glob('*.part')]
        planes['left'][compute] = {'guest data': sorted(data), 'parts': parts}
    planes['logs'] = {
        uuid: _find_bad_lines(part.log.read_text(errors='replace').splitlines())
        for uuid, part in cluster.get_compute_parts().items()
    }
    return planes


def collect_control_planes(cluster: Cluster) -> Planes:
    """Read the contents of etcd and placement."""
    etcd_endpoint, placement = cluster.direct
    everything = {
        name: read_prefix(etcd_endpoint, f'/{name}/') for name in ('hosts', 'instances', 'requests', 'booted')
    }
    allocations: dict[str, dict[str, Any]] = {}
    for compute in cluster.get_computes():
        for consumer, entry in _read_placement(placement, f'/resource_providers/{compute}/allocations').items():
            allocations.setdefault(consumer, {})[compute] = entry['resources']
    return {
        'records': {_last_segment(entry['key']): json.loads(entry['value']) for entry in everything['instances']},
        'hosts': [
            [*entry['key'].split('/')[2:4], bool(json.loads(entry['value'])['allocations'])]
            for entry in everything['hosts']
        ],
        'requests': sorted(_last_segment(entry['key']) for entry in everything['requests']),
        'booted': {_last_segment(entry['key']): entry['value'] for entry in everything['booted']},
        'allocations': allocations,
    }


def find_pending_work(planes: Planes) -> list[str]:
    """List the instances that are not in a final state and the claims to be released."""
    pending = [f'{name}: an eschedule is or was at it' for name in planes['requests']]
    for compute, name, is_wanted in planes['hosts']:
        record = planes['records'].get(name)
        if record is None or not is_wanted or record['state'] not in ('active', 'stopped'):
            pending.append(f'{name}: {record["state"] if record else "not seen"} on {compute}, wanted: {is_wanted}')
    requested = {name for _, name, _ in planes['hosts']}
    return pending + [f'{name}: a claim without a request' for name in planes['allocations'].keys() - requested]


class ChangeWatcher(threading.Thread):
    """Writes every change of etcd into the history before a compaction can remove it."""

    def __init__(self, where: str, history: History) -> None:
        super().__init__(name='watcher', daemon=True)
        self._history = history
        self._revisions = RevisionReader(lambda path, body: Reply(where, path, body, ETCD_TIMEOUT_SECONDS))
        self._states: dict[str, str] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            with suppress(OSError, ValueError, KeyError):
                self.write_new_changes()

    def write_new_changes(self) -> int:
        """Write all new changes; return the last revision that the history includes.

        Raises OSError, ValueError or KeyError while etcd is ending.
        """
        with self._lock:
            try:
                return self._revisions.read_new()
            finally:
                for change in self._revisions.changes:
                    self._write(change)
                self._revisions.changes.clear()

    def stop(self) -> None:
        """End the thread after writing all changes that etcd has."""
        self._stopped.set()
        self.join()
        self.write_new_changes()

    def _write(self, change: Change) -> None:
        entry = change.stored
        value, lease = (None, 0) if entry is None else (entry.value.decode(errors='replace'), entry.lease)
        self._history.write('change', revision=change.revision, key=change.key, value=value, lease=lease)
        if value is not None and change.key.startswith('/instances/'):
            record = json.loads(value)
            name, state = record['instance'], record['state']
            if self._states.get(name) != state:
                self._states[name] = state
                self._history.write('state', instance=name, state=state, compute=record['compute'])


def record_processes(cluster: Cluster, when: str) -> None:
    """Write the open files, threads and memory of each ecompute into the history."""
    for uuid, part in cluster.get_compute_parts().items():
        pid = part.pid()
        with suppress(OSError):
            status = dict(
                line.split(':', 1) for line in Path(f'/proc/{pid}/status').read_text().splitlines() if ':' in line
            )
            cluster.history.write(
                'process',
                compute=uuid,
                pid=pid,
                when=when,
                fds=len(list(Path(f'/proc/{pid}/fd').iterdir())),
                threads=int(status['Threads']),
                rss=int(status['VmRSS'].split()[0]) // 1024,
            )


def _read_placement(endpoint: str, path: str) -> dict[str, Any]:
    request = urllib.request.Request(endpoint + path, headers=HEADERS)
    with urllib.request.urlopen(request, timeout=30) as answer:
        members: dict[str, Any] = json.load(answer)[path.rpartition('/')[2]]
    return members


def _find_bad_lines(lines: list[str]) -> list[str]:
    """Return the lines that no log may have, each with the lines that follow it."""
    return [' | '.join(lines[number : number + 12]) for number, line in enumerate(lines) if BAD_WORDS.search(line)]


def _last_segment(key: str) -> str:
    return key.rsplit('/', 1)[1]
