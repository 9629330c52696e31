"""An etcd that takes nobody without a certificate of `elab certs`, and those certificates."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from ecomp.conf import EtcdConfig, load_compute, load_schedule
from ecomp.lab import certs
from tests.kit.servers import Etcd


class Secured(Etcd):
    """etcd with the certificates in `certs`; Etcd's own calls of the JSON gateway do not reach it.

    `asks` are the options by which it asks its clients for theirs.
    """

    def __init__(self, directory: Path, certs: Path) -> None:
        own = certs / 'etcd'
        super().__init__(directory, f'--cert-file={own}/server.crt', f'--key-file={own}/server.key')
        self.asks = [f'--trusted-ca-file={own}/ca.crt', '--client-cert-auth']

    def command(self) -> list[str]:
        """Its clients speak TLS."""
        words = [each.replace(f'http://{self.endpoint}', f'https://{self.endpoint}') for each in super().command()]
        return [*words, *self.asks]

    def is_ready(self) -> bool:
        """Somebody listens: what it serves is asked with a certificate."""
        with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', self.port)):
            return True
        return False


def certify(
    directory: Path, port: int, computes: Mapping[str, str] | tuple[str, ...] = (), schedulers: tuple[str, ...] = (),
    operators: tuple[str, ...] = (),
) -> None:
    """What `elab certs` makes for an etcd on localhost at this port; of `computes` with their uuids, if told."""
    uuids = dict(computes) if isinstance(computes, Mapping) else {}
    cluster = certs.Cluster(('localhost', '127.0.0.1'), tuple(computes), schedulers, operators, port, 8080, uuids)
    certs.make(directory, cluster, datetime.now(UTC).replace(microsecond=0), lambda _: None)


def etcd_of(directory: Path, user: str) -> EtcdConfig:
    """How the bearer of this certificate asks etcd."""
    if user.startswith('compute-'):
        return load_compute(directory / user / 'compute.yaml').etcd
    return load_schedule(directory / user / 'schedule.yaml').etcd
