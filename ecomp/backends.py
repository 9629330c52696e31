"""Probe etcd and placement from this machine, for `eschedule doctor` and `ecompute --check`."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ecomp.conf import EtcdConfig, PlacementConfig, list_exposed_secrets
from ecomp.errors import EcompError, NoSpace
from ecomp.model.health import Backends, Certificate, read_certificate_end
from ecomp.placement.client import Placement
from ecomp.store.client import Store

# Seconds of the lease that is granted, renewed and revoked as a test.
TEST_LEASE_SECONDS = 10


def probe_backends(
    etcd: EtcdConfig, placement: PlacementConfig, config_path: Path | None, config_name: str
) -> Backends:
    """Query etcd and placement, test a lease, check our secrets and certificates; EcompErrors are part of the result.

    `config_path` is the configuration that names both, or None; `config_name` is the usual name of its file.
    """
    no_etcd = no_placement = etcd_version = placement_version = ''
    clock_ahead: float | None = None
    try:
        store = Store(etcd)
        try:
            store.count('/computes/')
            etcd_version = store.read_version()
            _check_lease(store)
        finally:
            store.close()
    except EcompError as error:
        no_etcd = str(error)
    client = Placement(placement)
    try:
        about = client.read_server_info()
        placement_version = about.version
        if about.clock is not None:
            clock_ahead = (datetime.now(UTC) - about.clock).total_seconds()
        # The version page does not use placement's database, so query that, too.
        client.get('/traits?name=in:COMPUTE_STATUS_DISABLED')
    except EcompError as error:
        no_placement = str(error)
    finally:
        client.close()
    paths = (etcd.ca_cert, etcd.cert_cert, placement.ca_cert, placement.cert_cert)
    return Backends(
        etcd=f'etcd at {",".join(etcd.endpoints)}',
        placement=f'placement at {placement.endpoint}',
        config_path=None if config_path is None else str(config_path),
        now=datetime.now(UTC),
        default_config_name=config_name,
        etcd_failure=no_etcd,
        placement_failure=no_placement,
        etcd_version=etcd_version,
        placement_version=placement_version,
        ahead_seconds=clock_ahead,
        open_secrets=tuple(map(str, list_exposed_secrets(etcd, placement))),
        certificates=tuple(
            Certificate(str(path), _read_expiry(path)) for path in dict.fromkeys(paths) if path is not None
        ),
    )


def _check_lease(store: Store) -> None:
    """Grant, renew and revoke a lease; EcompError if that fails, but nothing if etcd is full."""
    with suppress(NoSpace):
        lease = store.grant(TEST_LEASE_SECONDS)
        try:
            store.keep_alive(lease)
        except EcompError as error:
            raise EcompError(
                f'{store.endpoints} answers, but does not renew leases, so no compute can stay alive: {error}'
            ) from error
        finally:
            store.revoke(lease)


def _read_expiry(path: Path) -> datetime | None:
    """Return when the certificate expires (UTC); None if the file is unreadable or malformed."""
    try:
        return read_certificate_end(path.read_bytes())
    except (OSError, ValueError):
        return None
