"""what-if: eschedule's own processor time for the death of each of many hosts.

`eschedule evacuate --dry-run --each` with its process start. The computes and guests are keys in a real etcd; a server
in this process answers for placement, with what it would answer: room for each query on every compute. The guests have
five queries; a tenth are in strict anti-affinity groups, a tenth in soft ones, a tenth in strict affinity groups.
Target: 1 s for 1,000 computes and 10,000 guests.

    python bench/what_if.py [ROUNDS] [--quick] [--json]       12 rounds
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.result import arguments, asked, make_result, tell
from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.model.allocation import to_wire
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group, Membership
from ecomp.model.order import Request
from ecomp.model.query import parse_query
from ecomp.model.record import Interface, make_record
from ecomp.model.states import ACTIVE
from ecomp.model.stored import encode
from ecomp.store.client import Put, Store
from tests.kit.commands import write_config
from tests.kit.servers import Etcd

SIZES = ((20, 200), (1000, 10_000))
TARGET_SECONDS = {1000: 1.0}
NOW = '2026-01-01T00:00:00.000Z'
QUERIES = [f'resources=VCPU:1,DISK_GB:1,MEMORY_MB:{memory}' for memory in range(256, 261)]
CAPACITIES = {'VCPU': 64, 'DISK_GB': 1000, 'MEMORY_MB': 256_000}


def make_membership(number: int, computes: int) -> Membership | None:
    """Return the group of a guest; guests `computes` apart are on one compute."""
    kinds = {0: ('anti', ANTI_AFFINITY, True), 1: ('soft', ANTI_AFFINITY, False), 2: ('near', AFFINITY, True)}
    if number // computes not in kinds:
        return None
    name, policy, strict = kinds[number // computes]
    return Membership(f'{name}-{number % computes if policy == AFFINITY else number % computes // 10}', policy, strict)


def write_cluster(store: Store, computes: list[str], guests: int) -> None:
    """Write presences, requests, records and groups."""
    lease, members = store.grant(3600), dict[Membership, dict[str, str]]()
    names = {compute: json.dumps({'token': 'x', 'hostname': f'hv{number}'}) for number, compute in enumerate(computes)}
    puts = [Put(keys.compute(compute), value, lease) for compute, value in names.items()]
    for number in range(guests):
        instance, compute = str(uuid.uuid4()), computes[number % len(computes)]
        group = make_membership(number, len(computes))
        if group is not None:
            members.setdefault(group, {})[instance] = compute
        query = QUERIES[number // len(computes) % len(QUERIES)]
        amounts = {each.name: each.amount for each in parse_query(query)}
        request = Request(
            instance, {compute: amounts}, image='http://bench/x', name=f'web-{number}', query=query, group=group,
            stages={'requested': NOW, 'scheduled': NOW}, ssh_keys=(f'ssh-ed25519 {"A" * 68} user@host',),
        )  # fmt: skip
        record = make_record(compute, request, NOW).enter_state(ACTIVE, NOW, 'started', 'addressed', 'ready')
        address = Interface('default', '52:54:00:00:00:01', '192.0.2.1')
        puts.append(Put(keys.request(compute, instance), encode(request)))
        puts.append(Put(keys.record(compute, instance), encode(replace(record, addresses=(address,)))))
    puts += [Put(keys.group(group.name), encode(Group(*group, places))) for group, places in members.items()]
    for start in range(0, len(puts), 100):
        assert store.commit([], puts[start : start + 100]) is not None


@contextmanager
def serve_candidates(computes: list[str]) -> Iterator[str]:
    """Answer each query with all computes, used unevenly, and yield the URL."""
    rng, used = random.Random(1), {}
    for compute in computes:
        share = rng.uniform(0.2, 0.6)
        used[compute] = {name: {'capacity': total, 'used': int(total * share)} for name, total in CAPACITIES.items()}
    summaries = {
        compute: {'resources': resources, 'traits': ['COMPUTE_NODE'], 'root_provider_uuid': compute}
        for compute, resources in used.items()
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def do_GET(self) -> None:
            query = self.path.partition('?')[2].partition('&')[0]
            amounts = {each.name: each.amount for each in parse_query(query)}
            requests = [
                {'allocations': to_wire({compute: amounts}), 'mappings': {'': [compute]}} for compute in computes
            ]
            body = json.dumps({'allocation_requests': requests, 'provider_summaries': summaries}).encode()
            self.send_response(200)
            self.send_header('content-type', 'application/json')
            self.send_header('content-length', str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(('127.0.0.1', 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{server.server_port}'
        server.shutdown()


def measure_processor_seconds(command: list[str]) -> float:
    """Run a command that succeeds, and return its processor time."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, process.returncode
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    options = asked(arguments(__doc__, 12))
    for size, guests in SIZES:
        computes = sorted(str(uuid.uuid4()) for _ in range(size))
        with Etcd() as etcd, serve_candidates(computes) as placement, TemporaryDirectory() as directory:
            store = Store(EtcdConfig((etcd.endpoint,)))
            write_cluster(store, computes, guests)
            config = write_config(Path(directory) / 'schedule.yaml', etcd.endpoint, placement)
            command = [str(Path(sys.executable).with_name('eschedule')), '--config', str(config)]
            command += ['evacuate', '--dry-run', '--each', '-f', 'json']
            seconds = [measure_processor_seconds(command) for _ in range(options.rounds)]
            workload = f'processor time, {size} computes, {guests} guests'
            tell(make_result('what-if', workload, seconds, TARGET_SECONDS.get(size)), options.json)
            store.close()


if __name__ == '__main__':
    main()
