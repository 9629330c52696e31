"""Probe etcd and placement from this machine, for `eschedule check` and `ecompute --check`."""

from __future__ import annotations

from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from ssl import cert_time_to_seconds

from ecomp.conf import EtcdConfig, PlacementConfig, list_exposed_secrets
from ecomp.errors import EcompError, NoSpace, Problem, Unreachable
from ecomp.model.health import Backends
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from ecomp.tls import CURES, decode_certificate

TEST_LEASE_SECONDS = 10


def probe_backends(etcd: EtcdConfig, placement: PlacementConfig, config_path: Path | None, file_name: str) -> Backends:
    """Probe both backends and inspect our secrets, and return problems instead of raising them."""
    no_etcd = no_placement = None
    etcd_version = placement_version = ''
    clock_ahead: float | None = None
    try:
        with closing(Store(etcd)) as store:
            store.count('/computes/')
            etcd_version = store.read_version()
            _probe_lease(store)
    except EcompError as error:
        no_etcd = explain_failure('etcd', error, config_path, file_name)
    try:
        with closing(Placement(placement)) as client:
            about = client.read_server_info()
            placement_version = about.version
            if about.clock is not None:
                clock_ahead = (datetime.now(UTC) - about.clock).total_seconds()
            # The version page does not use placement's database, so query that, too.
            client.get('/traits?name=in:COMPUTE_STATUS_DISABLED')
    except EcompError as error:
        no_placement = explain_failure('placement', error, config_path, file_name)
    paths = (etcd.ca_cert, etcd.cert_cert, placement.ca_cert, placement.cert_cert)
    return Backends(
        etcd=f'etcd at {",".join(etcd.endpoints)}',
        placement=f'placement at {placement.endpoint}',
        configuration=str(config_path or f'no {file_name}'),
        now=datetime.now(UTC),
        etcd_failure=no_etcd,
        placement_failure=no_placement,
        etcd_version=etcd_version,
        placement_version=placement_version,
        ahead_seconds=clock_ahead,
        open_secrets=tuple(map(str, list_exposed_secrets(etcd, placement))),
        certificates={str(path): read_certificate_end(path) for path in paths if path is not None},
    )


def explain_failure(section: str, error: EcompError, config_path: Path | None, file_name: str) -> Problem:
    """Return the error's problem, with a cure for this section (etcd or placement) of the file."""
    cure = f'start {section} at this address, or correct `{section}:` in {config_path}'
    if isinstance(error, Unreachable) and error.tls_failure in CURES:
        cure = CURES[error.tls_failure].format(section=section)
    elif config_path is None:
        reason = f'no {file_name} was found, so the address is localhost'
        cure = f'name a configuration file with --config or in ECOMP_CONFIG: {reason}'
    return Problem(error.problem.what, cure)


def _probe_lease(store: Store) -> None:
    """Raise EcompError unless etcd renews a test lease, or is full."""
    with suppress(NoSpace):
        lease = store.grant(TEST_LEASE_SECONDS)
        try:
            store.keep_alive(lease)
        except EcompError as error:
            problem = 'answers, but does not renew leases, so no compute can stay alive'
            raise EcompError(f'{store.endpoints} {problem}: {error}') from error
        finally:
            store.revoke(lease)


def read_certificate_end(path: Path) -> datetime | None:
    """Return when the first certificate in a PEM file expires, None without a valid one."""
    end = decode_certificate(path).get('notAfter')
    return end and datetime.fromtimestamp(cert_time_to_seconds(end), UTC)
