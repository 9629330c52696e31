"""An etcd that requires a certificate of `elab certs`, and those certificates."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ecomp.compute_conf import load_compute
from ecomp.conf import EtcdConfig, load_schedule
from ecomp.lab import certs
from tests.kit.servers import Etcd, free_port, is_healthy


class SecuredEtcd(Etcd):
    """An etcd with the certificates in `certs`, which the JSON gateway's calls do not reach."""

    def __init__(self, directory: Path, certs: Path) -> None:
        etcd_certs = certs / 'etcd'
        super().__init__(directory, f'--cert-file={etcd_certs}/server.crt', f'--key-file={etcd_certs}/server.key')
        self.client = f'https://{self.endpoint}'
        self.client_auth_options = [f'--trusted-ca-file={etcd_certs}/ca.crt', '--client-cert-auth']
        self._health = f'http://127.0.0.1:{free_port()}'

    def command(self) -> list[str]:
        return [*super().command(), *self.client_auth_options, f'--listen-metrics-urls={self._health}']

    def is_ready(self) -> bool:
        """True if the metrics URL reports it healthy, which includes having a leader.

        A member killed before it ever had a leader may never get one: it has not stored its cluster yet.
        """
        return is_healthy(self._health)


def certify(
    directory: Path,
    port: int,
    computes: Mapping[str, str] | tuple[str, ...] = (),
    schedulers: tuple[str, ...] = (),
    operators: tuple[str, ...] = (),
) -> None:
    """Make the certificates of `elab certs`. `computes` may map names to uuids."""
    uuids = dict(computes) if isinstance(computes, Mapping) else {}
    cluster = certs.Cluster(('localhost', '127.0.0.1'), tuple(computes), schedulers, operators, port, 8080, uuids)
    certs.make_certificates(directory, cluster, datetime.now(UTC).replace(microsecond=0), lambda _: None)


def load_etcd_config(directory: Path, user: str) -> EtcdConfig:
    if user.startswith('compute-'):
        return load_compute(directory / user / 'compute.yaml').etcd
    return load_schedule(directory / user / 'schedule.yaml').etcd
