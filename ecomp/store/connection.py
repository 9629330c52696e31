"""One connection to one member of etcd, and what gRPC is told for it."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import etcd3
import grpc

from ecomp.conf import EtcdConfig

# A frozen peer is noticed in 10 s only with all four; etcd itself cuts clients that ping faster.
KEEPALIVE = (
    ('grpc.keepalive_time_ms', 10_000),
    ('grpc.keepalive_timeout_ms', 5_000),
    ('grpc.http2.ping_timeout_ms', 5_000),
    ('grpc.http2.max_pings_without_data', 0),
    # A page or a watch is no longer: see ecomp.store.pages.
    ('grpc.max_receive_message_length', 64 * 1024**2),
    # http_proxy is for the way out of the building; etcd is in it.
    ('grpc.enable_http_proxy', 0),
    ('grpc.initial_reconnect_backoff_ms', 200),
    # How long a connection may take to be made: a call's own time limit is to end it, not this.
    ('grpc.min_reconnect_backoff_ms', 10_000),
    ('grpc.max_reconnect_backoff_ms', 3_000),
)

PUBLIC = Path('the authorities that gRPC knows')
"""In place of ca_cert where there is none: etcd3 speaks in clear text to an etcd without one, certificates or not."""


class Client(etcd3.Etcd3Client):  # type: ignore[misc]
    """etcd3's, but an OSError for a certificate or key that is empty: gRPC ends the whole process over one."""

    def _get_secure_creds(self, ca_cert: Path, cert_key: Path | None = None, cert_cert: Path | None = None) -> Any:
        given = (None if ca_cert is PUBLIC else ca_cert, cert_key, cert_cert)
        files = [None if each is None else (each, each.read_bytes()) for each in given]
        for each in files:
            if each is not None and not each[1]:
                raise OSError(errno.ENODATA, 'is empty', str(each[0]))
        return grpc.ssl_channel_credentials(*(each and each[1] for each in files))


def connect(config: EtcdConfig, endpoint: str) -> Client:
    """A connection to the member at `endpoint` (host:port); OSError for a certificate that cannot be read."""
    host, _, port = endpoint.rpartition(':')
    return Client(
        host=host,
        port=port,
        ca_cert=config.ca_cert or (PUBLIC if config.cert_cert else None),
        cert_key=config.cert_key,
        cert_cert=config.cert_cert,
        timeout=config.timeout,
        grpc_options=[*KEEPALIVE, *config.grpc_options],
    )
