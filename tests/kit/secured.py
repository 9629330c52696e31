"""An etcd that takes nobody without a certificate of `elab certs`, and those certificates."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ecomp.compute_conf import load_compute
from ecomp.conf import EtcdConfig, load_schedule
from ecomp.lab import certs
from tests.kit.servers import Etcd, free_port, is_healthy


class Secured(Etcd):
    """etcd with the certificates in `certs`; Etcd's own calls of the JSON gateway do not reach it.

    `asks` are the options by which it asks its clients for theirs.
    """

    def __init__(self, directory: Path, certs: Path) -> None:
        own = certs / 'etcd'
        super().__init__(directory, f'--cert-file={own}/server.crt', f'--key-file={own}/server.key')
        self.client = f'https://{self.endpoint}'
        self.asks = [f'--trusted-ca-file={own}/ca.crt', '--client-cert-auth']
        self._health = f'http://127.0.0.1:{free_port()}'

    def command(self) -> list[str]:
        return [*super().command(), *self.asks, f'--listen-metrics-urls={self._health}']

    def is_ready(self) -> bool:
        """It has a leader. One that is ended before it ever had may never get any: it has written that it is a member
        of something, and not yet of what."""
        return is_healthy(self._health)


def certify(
    directory: Path, port: int, computes: Mapping[str, str] | tuple[str, ...] = (), schedulers: tuple[str, ...] = (),
    operators: tuple[str, ...] = (),
) -> None:
    """What `elab certs` makes for an etcd on localhost at this port; of `computes` with their uuids, if told."""
    uuids = dict(computes) if isinstance(computes, Mapping) else {}
    cluster = certs.Cluster(('localhost', '127.0.0.1'), tuple(computes), schedulers, operators, port, 8080, uuids)
    certs.make(directory, cluster, datetime.now(UTC).replace(microsecond=0), lambda _: None)


def etcd_of(directory: Path, user: str) -> EtcdConfig:
    if user.startswith('compute-'):
        return load_compute(directory / user / 'compute.yaml').etcd
    return load_schedule(directory / user / 'schedule.yaml').etcd
