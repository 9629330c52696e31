"""How etcd and placement are met from this machine: what `eschedule doctor` and `ecompute --check` know of them."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from ecomp.conf import EtcdConfig, PlacementConfig, open_secrets
from ecomp.errors import EcompError, NoSpace
from ecomp.model.health import Backends, Certificate, ends
from ecomp.placement.client import Placement
from ecomp.store.client import Store

LEASE_SECONDS = 10
"""Seconds of the lease that is granted, renewed and revoked to see that this works."""


def look(etcd: EtcdConfig, placement: PlacementConfig, told: Path | None, usual: str) -> Backends:
    """Ask both once. `told` is the configuration that names them, `usual` what that is called."""
    no_etcd = no_placement = etcd_version = placement_version = ''
    ahead: float | None = None
    try:
        store = Store(etcd)
        try:
            store.count('/computes/')
            etcd_version = store.version()
            _check_lease(store)
        finally:
            store.close()
    except EcompError as error:
        no_etcd = str(error)
    client = Placement(placement)
    try:
        about = client.about()
        placement_version = about.version
        if about.clock is not None:
            ahead = (datetime.now(UTC) - about.clock).total_seconds()
        # What it is for is in its database, which the page above does not ask.
        client.get('/traits?name=in:COMPUTE_STATUS_DISABLED')
    except EcompError as error:
        no_placement = str(error)
    finally:
        client.close()
    shown = (etcd.ca_cert, etcd.cert_cert, placement.ca_cert, placement.cert_cert)
    return Backends(
        etcd=f'etcd at {",".join(etcd.endpoints)}',
        placement=f'placement at {placement.endpoint}',
        told=None if told is None else str(told),
        now=datetime.now(UTC),
        usual=usual,
        no_etcd=no_etcd,
        no_placement=no_placement,
        etcd_version=etcd_version,
        placement_version=placement_version,
        ahead=ahead,
        open_secrets=tuple(map(str, open_secrets(etcd, placement))),
        certificates=tuple(Certificate(str(path), _until(path)) for path in dict.fromkeys(shown) if path is not None),
    )


def _check_lease(store: Store) -> None:
    """Renew a lease once: a compute is alive as long as that works. EcompError: it does not, behind a proxy, say."""
    with suppress(NoSpace):
        lease = store.grant(LEASE_SECONDS)
        try:
            store.keep_alive(lease)
        except EcompError as error:
            raise EcompError(f'{store.where} answers, but renews no lease, so no compute can live: {error}') from error
        finally:
            store.revoke(lease)


def _until(path: Path) -> datetime | None:
    try:
        return ends(path.read_bytes())
    except (OSError, ValueError):
        return None
