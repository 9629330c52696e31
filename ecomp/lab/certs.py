"""`elab certs DIR` makes an authority in DIR, and certificates for servers and clients."""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ecomp.compute_conf import load_compute
from ecomp.conf import load_schedule
from ecomp.errors import Denied, EcompError, UsageError, put_before_fix
from ecomp.files import write_durably
from ecomp.lab import machine
from ecomp.lab.network import bracket_address, render_backends
from ecomp.model import cluster as cluster_model
from ecomp.model import keys, roles
from ecomp.model.stored import encode
from ecomp.model.text import format_time, make_printable
from ecomp.store.client import Put, Settlement, Store, Unchanged
from ecomp.store.roles import Accounts

AUTHORITY_DAYS = 3650  # validity of the authority
CERTIFICATE_DAYS = 730  # validity of each other certificate
# A name of a machine or person; with `scheduler-` a common name of at most 64 characters (RFC 5280, ub-common-name).
CLIENT_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.-]{0,49}')
SERVER_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}')
# cryptography's errors for a file that is not a certificate or key, or that another authority signed.
INVALID_CERTIFICATE_ERRORS = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion)
# A certificate valid for fewer days is replaced.
MIN_REMAINING_DAYS = 30
COMPUTE, SCHEDULER, OPERATOR = roles.USER_PREFIXES
MAX_LISTED_NAMES = 5
# Extensions of a certificate; each is critical if True.
Extensions = Sequence[tuple[x509.ExtensionType, bool]]
PrivateKey = ec.EllipticCurvePrivateKey
Say = Callable[[str], None]


@dataclass(frozen=True)
class Cluster:
    """The owners of certificates: `computes` and `schedulers` are machines, `operators` people.

    `servers` are names and addresses of the control host. Clients use the first one. If there are none, those in etcd's
    certificate are used. `uuids` is {compute's name: uuid}, of the computes that have a uuid already.
    """

    servers: tuple[str, ...]
    computes: tuple[str, ...]
    schedulers: tuple[str, ...]
    operators: tuple[str, ...]
    etcd_port: int
    placement_port: int
    uuids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Authority:
    """The authority, whose `certificate` is None until it has signed its own."""

    key: PrivateKey
    now: datetime
    say: Say
    certificate: x509.Certificate | None = None

    def issue(self, path: Path, name: str, key: PrivateKey, days: int, extensions: Extensions) -> x509.Certificate:
        """Sign and return a certificate, and write it to `path` and its key beside it."""
        subject = issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        end = self.now + timedelta(days=days)
        if self.certificate is not None:
            issuer, end = self.certificate.subject, min(end, self.certificate.not_valid_after_utc)
        # An hour ago: other machines' clocks may be behind.
        builder = x509.CertificateBuilder().not_valid_before(self.now - timedelta(hours=1)).not_valid_after(end)
        builder = builder.subject_name(subject).issuer_name(issuer).serial_number(x509.random_serial_number())
        for extension, is_critical in extensions:
            builder = builder.add_extension(extension, is_critical)
        signed = builder.public_key(key.public_key()).sign(self.key, hashes.SHA256())
        # The key first: after a kill here a key without its certificate has signed nothing, and the next run makes both
        # again. A reader between these writes finds a mismatched pair and reads again.
        encoding, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
        encoded_key = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, no_password)
        write_durably(path.with_suffix('.key'), encoded_key)
        write_durably(path, signed.public_bytes(encoding))
        return signed


def make_certificates(directory: Path, cluster: Cluster, now: datetime, say: Say, include_others: bool = False) -> None:
    """Make the missing or unusable certificates of `cluster`, with tokens and configurations.

    A certificate is unusable if it expires within MIN_REMAINING_DAYS of `now` (UTC) or does not fit its key, names or
    authority. `include_others` adds all other clients in `directory`. Existing configurations stay.
    """
    for name in cluster.servers:
        if not SERVER_NAME.fullmatch(name) and not _is_address(name):
            raise UsageError(f'{name!r} is not a valid host name or address')
    for name in (*cluster.computes, *cluster.schedulers, *cluster.operators):
        if not CLIENT_NAME.fullmatch(name):
            form = 'a name has at most 50 letters, digits and . _ -, and does not begin with . or -'
            raise UsageError(f'{name!r} is not a valid name of a host or a person: {form}')
    for name, compute in cluster.uuids.items():
        _require_uuid(name, compute, directory / f'compute-{name}/compute.yaml')
    try:
        cluster = replace(cluster, servers=cluster.servers or _read_names(directory / 'etcd/server.crt'))
        if not cluster.servers:
            raise UsageError('missing argument: --control NAME, by which others reach etcd and placement')
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with machine.hold_lock(directory):
            _make_all_certificates(directory, cluster, include_others, now, say)
    except OSError as error:
        raise EcompError(f'{error.filename or directory}: {error.strerror}') from error


def _make_all_certificates(directory: Path, cluster: Cluster, include_others: bool, now: datetime, say: Say) -> None:
    authority = _load_or_make_authority(directory, now, say)
    token = directory / 'placement' / 'token'
    for server in ('etcd', 'placement'):
        (directory / server).mkdir(mode=0o700, exist_ok=True)
        _make_certificate(directory / server, 'server', f'ecomp {server}', cluster.servers, authority)
    if not token.exists():
        write_durably(token, f'{secrets.token_urlsafe(32)}\n'.encode())
    for kind, names in zip(roles.USER_PREFIXES, (cluster.computes, cluster.schedulers, cluster.operators), strict=True):
        for name in names:
            place = directory / f'{kind}{name}'
            place.mkdir(mode=0o700, exist_ok=True)
            _make_client(place, token, authority)
            own = f'uuid: {cluster.uuids.get(name) or uuid.uuid4()}\n' if kind == COMPUTE else ''
            _write_configuration(place / ('compute.yaml' if kind == COMPUTE else 'schedule.yaml'), cluster, own)
    if include_others:
        # No new configuration: a new uuid would name another compute.
        for name in (client for kind in roles.USER_PREFIXES for client in list_clients(directory, kind)):
            # A client whose key was moved away has its certificate elsewhere, too.
            if CLIENT_NAME.fullmatch(name.partition('-')[2]) and (directory / name / 'client.key').exists():
                _make_client(directory / name, token, authority)


def _make_client(place: Path, token: Path, authority: _Authority) -> None:
    _make_certificate(place, 'client', place.name, (), authority)
    _write_if_changed(place / 'token', token.read_bytes())


def _require_uuid(name: str, compute: str, path: Path) -> None:
    """Raise UsageError if `compute` is not a uuid, or `path` exists without it."""
    if not keys.is_uuid(compute):
        raise UsageError(f'--compute {name}={compute}: must be a uuid, like 3d9a1c9e-8f0b-4b62-9a53-5a8f0c1e7d24')
    if path.exists() and (own := load_compute(path).uuid) != compute:
        conflict = f'has {f"uuid {own}" if own else "no uuid"}, but --compute gives {compute}'
        raise UsageError(f'{path}: {conflict}. Fix: write `uuid: {compute}` into it')


def _load_or_make_authority(directory: Path, now: datetime, say: Say) -> _Authority:
    """Load the authority, or raise EcompError if it is unusable, or make a missing one."""
    certificate, key = directory / 'ca.crt', directory / 'ca.key'
    fix = f'move {directory} away and make all certificates again'
    if certificate.exists():
        try:
            authority = x509.load_pem_x509_certificate(certificate.read_bytes())
            private_key, public_key = serialization.load_pem_private_key(key.read_bytes(), None), authority.public_key()
        except INVALID_CERTIFICATE_ERRORS as error:
            problem = f'{certificate} and {key} are not an authority of elab certs: {error}'
            raise EcompError(f'{problem}. Fix: restore both, or {fix}') from error
        if not isinstance(private_key, PrivateKey) or private_key.public_key() != public_key:
            problem = f'{key} does not belong to {certificate}, or elab certs did not make it'
            raise EcompError(f'{problem}. Fix: restore both, or {fix}')
        if not authority.not_valid_before_utc <= now < authority.not_valid_after_utc:
            validity = f'{authority.not_valid_before_utc:%F %R} to {authority.not_valid_after_utc:%F %R}'
            problem = f'{certificate} is valid from {validity}, but the time here is {now:%F %R} (UTC)'
            raise EcompError(f'{problem}. Fix: correct the clock, or {fix}')
        return _Authority(private_key, now, say, authority)
    new_key = ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    extensions: Extensions = [
        (x509.BasicConstraints(ca=True, path_length=0), True),
        (usage, True),
        (x509.SubjectKeyIdentifier.from_public_key(new_key.public_key()), False),
    ]
    unsigned = _Authority(new_key, now, say)
    signed = unsigned.issue(certificate, 'ecomp authority', new_key, AUTHORITY_DAYS, extensions)
    say(f'{certificate}: valid until {signed.not_valid_after_utc:%F}')
    return replace(unsigned, certificate=signed)


def _make_certificate(place: Path, kind: str, name: str, names: Sequence[str], authority: _Authority) -> None:
    """Make `kind`.crt and `kind`.key in `place`, unless they are usable and for these names."""
    path = place / f'{kind}.crt'
    assert authority.certificate is not None
    _write_if_changed(place / 'ca.crt', authority.certificate.public_bytes(serialization.Encoding.PEM))
    general_names = (x509.IPAddress(ip_address(host)) if _is_address(host) else x509.DNSName(host) for host in names)
    alternatives = x509.SubjectAlternativeName(general_names)
    new, old = tuple(str(host.value) for host in alternatives), _read_names(path)
    if old == new and _is_usable(path, authority.certificate, authority.now):
        return
    # A server's readiness check presents the server's own certificate as client.
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if names else [])]
    extensions: Extensions = [
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (x509.ExtendedKeyUsage(purposes), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key()), False),
        *([(alternatives, False)] if names else []),
    ]
    signed = authority.issue(path, name, ec.generate_private_key(ec.SECP256R1()), CERTIFICATE_DAYS, extensions)
    authority.say(f'{place}: valid until {signed.not_valid_after_utc:%F}')
    if dropped := [host for host in old if host not in new]:
        authority.say(f'{place}: no longer valid for {", ".join(dropped)}')


def _read_names(path: Path) -> tuple[str, ...]:
    """Read the hosts of a certificate, () if it is missing, malformed or without any."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (FileNotFoundError, x509.ExtensionNotFound, *INVALID_CERTIFICATE_ERRORS):
        return ()
    return tuple(str(name.value) for name in names)


def _is_usable(path: Path, authority: x509.Certificate, now: datetime) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        key = serialization.load_pem_private_key(path.with_suffix('.key').read_bytes(), None)
        certificate.verify_directly_issued_by(authority)
    except (FileNotFoundError, *INVALID_CERTIFICATE_ERRORS):
        return False
    # A certificate that expires with the authority cannot last longer by renewal.
    required_until = min(now + timedelta(days=MIN_REMAINING_DAYS), authority.not_valid_after_utc)
    if key.public_key() != certificate.public_key() or certificate.not_valid_after_utc < required_until:
        return False
    return bool(certificate.not_valid_before_utc <= now)  # else the clock has been set back since


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        return '%' not in str(ip_address(name))
    return False


def _write_configuration(path: Path, cluster: Cluster, extra_lines: str) -> None:
    if not path.exists():
        host = cluster.servers[0]
        placement = f'https://{bracket_address(host)}:{cluster.placement_port}'
        backends = render_backends(f"'{host}'", cluster.etcd_port, placement)
        write_durably(path, f'# Written once by elab certs.\n{backends}{extra_lines}'.encode())


def _write_if_changed(path: Path, content: bytes) -> None:
    if not path.exists() or path.read_bytes() != content:
        write_durably(path, content)


def enable_roles(directory: Path, now: datetime, say: Say) -> None:
    """Write etcd's users, roles and /cluster for these certificates, enable authentication."""
    schedulers, operators = (list_clients(directory, kind) for kind in (SCHEDULER, OPERATOR))
    target_roles = roles.make_roles(_read_computes(directory), schedulers, operators)
    with _connect_as_operator(directory) as (accounts, store):
        if warning := cluster_model.describe_vulnerabilities(store.read_version()):
            say(put_before_fix(f'warning: {warning}', '. Roles prevent mistakes in this etcd, but not attacks'))
        current_roles = accounts.read_roles()
        entries = store.snapshot(keys.COMPUTES).entries.values()
        live_computes = [keys.get_last_part(entry.key) for entry in entries if entry.lease]
        if left_out := roles.list_computes_without_role(live_computes, current_roles, target_roles):
            fix = 'write the uuid of each, as `uuid: …`, into its compute.yaml in this directory'
            names = [make_printable(name, 200) for name in left_out[:MAX_LISTED_NAMES]]
            more = ' …' if len(left_out) > MAX_LISTED_NAMES else ''
            problem = f'computes that are alive, but have no certificate in {directory}: {", ".join(names)}{more}'
            say(f'warning: {problem}. Fix: {fix}, and repeat the command')
        for change in roles.plan_changes(current_roles, target_roles):
            accounts.apply(change)
            say(roles.describe_change(change))
        if _ensure_cluster_key(store, now):
            say(f'{keys.CLUSTER}: written now, because computes with roles may not write it')
        if not accounts.is_enabled():
            accounts.enable()
            undo = f'`elab certs {directory} --disable` undoes this'
            say(f'etcd at {accounts.endpoints} restricts each certificate to its role; {undo}')
        if unknown_users := roles.list_unknown_users(current_roles, target_roles):
            names = [make_printable(user, 200) for user in unknown_users]
            fix = f'to revoke a certificate, run `etcdctl user delete {names[0]}`'
            say(f'users of etcd without a certificate in {directory}: {", ".join(names)}. Fix: {fix}')


def disable_roles(directory: Path, say: Say) -> None:
    """Have etcd allow every certificate everything, and keep its users and roles."""
    with _connect_as_operator(directory) as (accounts, _):
        if was_on := accounts.is_enabled():
            accounts.disable()
        result = 'lets every certificate write everything' + ('' if was_on else ', as before')
        say(f'etcd at {accounts.endpoints} {result}; its users and roles remain')


def list_clients(directory: Path, kind: str) -> list[str]:
    """List the clients that begin with `kind`, as compute-hv1, and have a certificate."""
    return sorted(path.name for path in directory.glob(f'{kind}*') if (path / 'client.crt').exists())


def _read_computes(directory: Path) -> dict[str, str]:
    """Return {client: uuid}, or raise UsageError if a uuid is missing or used twice."""
    uuids: dict[str, str] = {}
    for name in list_clients(directory, COMPUTE):
        path = directory / name / 'compute.yaml'
        if not path.exists():
            raise UsageError(f'{path}: this file is missing. Fix: create it with the line `uuid: …` of its compute')
        if (compute := load_compute(path).uuid) is None:
            fix = "add the line `uuid: …` with the content of that compute's /var/lib/ecompute/uuid"
            raise UsageError(f'{path}: has no uuid. Fix: {fix}')
        if compute in uuids.values():
            other = next(user for user, value in uuids.items() if value == compute)
            raise UsageError(f'{path}: {other} has uuid {compute}, too. Fix: give each compute its own uuid')
        uuids[name] = compute
    return uuids


@contextmanager
def _connect_as_operator(directory: Path) -> Iterator[tuple[Accounts, Store]]:
    """Connect as the first operator who may manage roles, or raise UsageError or Denied."""
    paths = [directory / name / 'schedule.yaml' for name in list_clients(directory, OPERATOR)]
    if not (configs := [load_schedule(path).etcd for path in paths]):
        raise UsageError(f'{directory} has no operator certificate. Fix: elab certs {directory} --operator NAME')
    for number, config in enumerate(configs):
        with closing(Store(config)) as store, closing(Accounts(config)) as accounts:
            try:
                accounts.require_access()
            except Denied:  # a new operator has no role yet
                if number + 1 < len(configs):
                    continue
                raise
            yield accounts, store
            return


def _ensure_cluster_key(store: Store, now: datetime) -> bool:
    """Write the identity of the cluster, unless it exists, and return True if it was written."""
    value = encode(cluster_model.ClusterIdentity(str(uuid.uuid4()), format_time(now)))
    while store.get(keys.CLUSTER) is None:
        if store.commit([Unchanged(keys.CLUSTER, 0)], [Put(keys.CLUSTER, value)], Settlement()) is not None:
            return True
    return False
