"""The environment of a command: etcd and placement with certificates, fake computes.

etcd also serves its JSON gateway, for the floor. Placement runs on SQLite behind stunnel, as in a lab.
"""

from __future__ import annotations

import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ecomp.agent.host.provider import parse_inventory
from ecomp.conf import EtcdConfig, PlacementConfig
from ecomp.lab import control
from ecomp.lab.machine import terminate
from ecomp.model import keys
from ecomp.model.allocation import Provider
from ecomp.model.facts import encode_facts
from ecomp.model.json_object import dump
from ecomp.placement import providers
from ecomp.placement.client import Placement
from ecomp.store.client import Put, Store
from tests.kit.certificates import Authority
from tests.kit.commands import write_config
from tests.kit.etcd_member import Member, Tls
from tests.kit.servers import free_port

HOST = '127.0.0.1'
LARGE_INVENTORY = {name: {'total': 100_000} for name in ('VCPU', 'MEMORY_MB', 'DISK_GB')}
# Seconds of the fake computes' lease.
LEASE_SECONDS = 3600


class SecuredServers(NamedTuple):
    """The addresses of etcd and placement, a configuration for them, and curl's credentials."""

    etcd: str
    placement: str
    config: Path
    store: Store
    curl: Sequence[str]
    token: str

    def run_curl(self, *words: str) -> bytes:
        """Run curl with our certificate, which must succeed, and return its output."""
        return subprocess.run(['curl', '-sS', '--fail', *self.curl, *words], check=True, capture_output=True).stdout


@contextmanager
def start_secured(computes: int) -> Iterator[SecuredServers]:
    """Start both servers and register live computes with room; remove all at the end."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # else the servers would outlive a terminated benchmark
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='ecomp-secured-')))
        certs = directory / 'certs'
        authority = Authority(directory / 'authority')
        authority.issue(certs, 'server', HOST)
        client = authority.issue(certs, 'client')
        shutil.copy(authority.certificate, certs / 'ca.crt')
        (certs / 'token').write_text(secrets.token_urlsafe(16))
        tls = Tls(certs / 'server.crt', certs / 'server.key', authority.certificate, client)
        etcd = stack.enter_context(Member(directory / 'etcd', 'm0', tls))
        data, port = directory / 'placement', free_port()
        data.mkdir()
        for server in control.make_placement_servers(data, HOST, port, certs):
            process = server.start([])
            stack.callback(terminate, [process])
            server.wait(process)
        url = f'https://{HOST}:{port}'
        config = write_config(directory / 'schedule.yaml', etcd.endpoint, url, certs)
        files = {'ca_cert': certs / 'ca.crt', 'cert_cert': client[0], 'cert_key': client[1]}
        store = Store(EtcdConfig((etcd.endpoint,), **files))
        stack.callback(store.close)
        placement = Placement(PlacementConfig(url, token_file=certs / 'token', **files))
        stack.callback(placement.close)
        lease = store.grant(LEASE_SECONDS)
        for _ in range(computes):
            compute = str(uuid.uuid4())
            providers.ensure_provider(placement, compute)
            providers.set_inventory(placement, compute, LARGE_INVENTORY)
            presence = {'version': '1.0.0', 'hostname': 'pretended'}
            facts = encode_facts(Provider(compute, parse_inventory(LARGE_INVENTORY)), {}, ())
            puts = [Put(keys.compute(compute), dump(presence), lease), Put(keys.facts(compute), facts, lease)]
            store.commit([], puts)
        credentials = ['--cacert', str(certs / 'ca.crt'), '--cert', str(client[0]), '--key', str(client[1])]
        yield SecuredServers(etcd.endpoint, url, config, store, credentials, (certs / 'token').read_text())


def measure_seconds(call: Callable[[], object]) -> float:
    """Return the seconds that a call takes."""
    start = time.monotonic()
    call()
    return time.monotonic() - start


def measure_in_turn(
    ours: Callable[[], object], floor: Callable[[], object], rounds: int
) -> tuple[list[float], list[float]]:
    """Return the seconds of each side in each round, in turn, so that both meet a slow moment."""
    ours(), floor()  # the first of each reads modules and pages from the disk
    pairs = [(measure_seconds(ours), measure_seconds(floor)) for _ in range(rounds)]
    return [mine for mine, _ in pairs], [theirs for _, theirs in pairs]
