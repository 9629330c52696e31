"""`elab certs DIR`: an authority, and a directory with certificates for everybody who speaks with etcd and placement.

    DIR/ca.crt, DIR/ca.key    the authority; its key stays where it was made
    DIR/etcd, DIR/placement   server.crt and server.key, beside a copy of ca.crt; placement's has `token`, too
    DIR/compute-NAME, DIR/scheduler-NAME, DIR/operator-NAME
                              client.crt and client.key, ca.crt, token, and the compute.yaml or schedule.yaml that names
                              them by relative paths: /etc/ecomp of that machine, as it is. A compute.yaml says the
                              compute's uuid, too, for its certificate's role in etcd

What is there and holds for a month more stays as it is, and one process at a time makes what is not. Without a name it
looks at everybody in DIR.

With --enable etcd asks who writes what, by the certificates that are in DIR. What there is to change is looked up each
time, so what was killed on the way is run again, and so is what was done before a new machine had its certificate.
Nothing is changed before all is read that may be refused.
https://cryptography.io/en/latest/x509/reference/
"""

from __future__ import annotations

import re
import secrets
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ecomp.compute_conf import load_compute
from ecomp.conf import load_schedule
from ecomp.errors import Conflict, Denied, EcompError, UnknownOutcome, UsageError
from ecomp.files import write_durably
from ecomp.lab import state
from ecomp.lab.network import backends_yaml, bracketed
from ecomp.model import cluster as cluster_model
from ecomp.model import keys, roles
from ecomp.model.record import timestamp
from ecomp.model.text import printable
from ecomp.store.client import Put, Snapshot, Store, Unchanged

if TYPE_CHECKING:
    from ecomp.store.roles import Accounts

AUTHORITY_DAYS = 3650  # that the authority is valid
DAYS = 730  # that each other certificate is valid
CLIENT = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.-]{0,49}')
"""The name of a machine or person: with `scheduler-` before it a certificate's common name, which RFC 5280
(ub-common-name) limits to 64 characters."""
SERVER = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}')
NONE_OF_OURS = (ValueError, TypeError, InvalidSignature, UnsupportedAlgorithm, x509.InvalidVersion)
"""What cryptography raises for a file that is no certificate or key, or that another authority signed."""
LEFT_DAYS = 30
"""Days: a certificate that is valid for fewer than these is made anew."""
COMPUTE, SCHEDULER, OPERATOR = roles.KINDS
NAMED = 5
"""How many records, or computes, a message names at most; `…` stands for the others."""


@dataclass(frozen=True)
class Cluster:
    """Whom the certificates are for: `computes` and `schedulers` are names of machines, `operators` of people.

    `servers` are the names and addresses of the host that etcd and placement are on, first the one that clients are
    given; none means those in etcd's certificate. `uuids` has the uuid of each compute that has one already, by name.
    """

    servers: tuple[str, ...]
    computes: tuple[str, ...]
    schedulers: tuple[str, ...]
    operators: tuple[str, ...]
    etcd_port: int
    placement_port: int
    uuids: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Signer:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(directory: Path, cluster: Cluster, now: datetime, say: Callable[[str], None], *, others: bool = False) -> None:
    """Make each certificate that is missing or ends soon; `say` gets a line for each directory.

    With `others` also those of clients that are in `directory`, whoever they are. EcompError; UsageError for a name or
    uuid that cannot be taken.
    """
    for name in cluster.servers:
        if not SERVER.fullmatch(name) and not _is_address(name):
            raise UsageError(f'{name!r} is no name of a machine, and no address')
    for name in (*cluster.computes, *cluster.schedulers, *cluster.operators):
        if not CLIENT.fullmatch(name):
            raise UsageError(f'{name!r} is no name of a machine or a person of at most 50 characters')
    for name, compute in cluster.uuids.items():
        _check_uuid(name, compute, directory / f'compute-{name}/compute.yaml')
    try:
        cluster = replace(cluster, servers=cluster.servers or _names(directory / 'etcd/server.crt'))
        if not cluster.servers:
            raise UsageError('--control NAME: by which name or address do others reach etcd and placement?')
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with state.locked(directory):
            _make(directory, cluster, others, now, say)
    except OSError as error:
        raise EcompError(f'{error.filename or directory}: {error.strerror}') from error


def _make(directory: Path, cluster: Cluster, others: bool, now: datetime, say: Callable[[str], None]) -> None:
    signer = _authority(directory, now, say)
    token = directory / 'placement' / 'token'
    for server in ('etcd', 'placement'):
        (directory / server).mkdir(mode=0o700, exist_ok=True)
        _certificate(directory / server, 'server', f'ecomp {server}', cluster.servers, signer, now, say)
    if not token.exists():
        write_durably(token, f'{secrets.token_urlsafe(32)}\n'.encode())
    for kind, names in zip(roles.KINDS, (cluster.computes, cluster.schedulers, cluster.operators), strict=True):
        for name in names:
            place = directory / f'{kind}{name}'
            place.mkdir(mode=0o700, exist_ok=True)
            _client(place, token, signer, now, say)
            if kind == COMPUTE:
                _configuration(place / 'compute.yaml', cluster, f'uuid: {cluster.uuids.get(name) or uuid.uuid4()}\n')
            else:
                _configuration(place / 'schedule.yaml', cluster)
    if others:
        # Without a configuration where there is none: it would say that this compute is another one.
        for name in (each for kind in roles.KINDS for each in named(directory, kind)):
            # Whose key was moved away has it elsewhere, with the certificate that belongs to it.
            if CLIENT.fullmatch(name.partition('-')[2]) and (directory / name / 'client.key').exists():
                _client(directory / name, token, signer, now, say)


def _client(place: Path, token: Path, signer: _Signer, now: datetime, say: Callable[[str], None]) -> None:
    _certificate(place, 'client', place.name, (), signer, now, say)
    _write(place / 'token', token.read_bytes())


def _check_uuid(name: str, compute: str, path: Path) -> None:
    """UsageError if `compute` is no uuid, or not the one in the compute.yaml at `path`, which is written once."""
    if not keys.is_uuid(compute):
        raise UsageError(f'--compute {name}={compute}: a uuid is like 3d9a1c9e-8f0b-4b62-9a53-5a8f0c1e7d24')
    if path.exists() and (said := load_compute(path).uuid) != compute:
        raise UsageError(f'{path} is there, with {f"uuid {said}" if said else "no uuid"}: say `uuid: {compute}` in it')


def _authority(directory: Path, now: datetime, say: Callable[[str], None]) -> _Signer:
    certificate, key = directory / 'ca.crt', directory / 'ca.key'
    if certificate.exists():
        try:
            found = x509.load_pem_x509_certificate(certificate.read_bytes())
            loaded, public = serialization.load_pem_private_key(key.read_bytes(), None), found.public_key()
        except NONE_OF_OURS as error:
            raise EcompError(f'{certificate} and {key} are no authority of elab certs: {error}') from error
        if not isinstance(loaded, ec.EllipticCurvePrivateKey) or loaded.public_key() != public:
            raise EcompError(f'{key} does not belong to {certificate}, or is none of elab certs')
        if not found.not_valid_before_utc <= now < found.not_valid_after_utc:
            valid = f'{found.not_valid_before_utc:%F %R} to {found.not_valid_after_utc:%F %R}'
            why = f'{certificate} is valid from {valid}, and it is {now:%F %R} here (UTC)'
            raise EcompError(f'{why}: set the clock right, or move {directory} away and make all certificates anew')
        return _Signer(found, loaded)
    made = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, 'ecomp authority')])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    signed = (
        _builder(name, name, made, now, now + timedelta(days=AUTHORITY_DAYS))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(made.public_key()), critical=False)
        .sign(made, hashes.SHA256())
    )
    # The key first: killed in between, a key without a certificate is made anew, and has signed nothing.
    write_durably(key, _pem(made))
    write_durably(certificate, signed.public_bytes(serialization.Encoding.PEM))
    say(f'{certificate}: until {_until(signed)}')
    return _Signer(signed, made)


def _certificate(
    place: Path, kind: str, name: str, names: Sequence[str], signer: _Signer, now: datetime, say: Callable[[str], None]
) -> None:
    """Make `kind`.crt and `kind`.key in `place` for these names or addresses, unless those there will do."""
    path = place / f'{kind}.crt'
    authority = signer.certificate.public_bytes(serialization.Encoding.PEM)
    _write(place / 'ca.crt', authority)
    general = (x509.IPAddress(ip_address(each)) if _is_address(each) else x509.DNSName(each) for each in names)
    wanted = x509.SubjectAlternativeName(general)
    kept, found = tuple(str(each.value) for each in wanted), _names(path)
    if found == kept and path.exists() and (place / f'{kind}.key').exists() and _will_do(place, kind, signer, now):
        return
    lost = [each for each in found if each not in kept]
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    # Whoever looks whether a server is ready shows the server's own.
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if names else [])]
    end = min(now + timedelta(days=DAYS), signer.certificate.not_valid_after_utc)
    builder = (
        _builder(subject, signer.certificate.subject, key, now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.key.public_key()), critical=False)
    )
    if names:
        builder = builder.add_extension(wanted, critical=False)
    signed = builder.sign(signer.key, hashes.SHA256())
    # Whoever reads them between these two finds a pair that does not belong together, says so, and reads them again;
    # killed between them, the next run makes both anew.
    write_durably(place / f'{kind}.key', _pem(key))
    write_durably(path, signed.public_bytes(serialization.Encoding.PEM))
    say(f'{place}: until {_until(signed)}')
    if lost:
        say(f'{place}: no more for {", ".join(lost)}')


def _names(path: Path) -> tuple[str, ...]:
    """The names and addresses in a certificate; none where it is none of ours, or not there."""
    try:
        found = x509.load_pem_x509_certificate(path.read_bytes())
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (FileNotFoundError, x509.ExtensionNotFound, *NONE_OF_OURS):
        return ()
    return tuple(str(each.value) for each in names)


def _will_do(place: Path, kind: str, signer: _Signer, now: datetime) -> bool:
    try:
        found = x509.load_pem_x509_certificate((place / f'{kind}.crt').read_bytes())
        key = serialization.load_pem_private_key((place / f'{kind}.key').read_bytes(), None)
        found.verify_directly_issued_by(signer.certificate)
    except NONE_OF_OURS:
        return False
    # What ends with the authority ends no later when it is made anew.
    wanted_until = min(now + timedelta(days=LEFT_DAYS), signer.certificate.not_valid_after_utc)
    if key.public_key() != found.public_key() or found.not_valid_after_utc < wanted_until:
        return False
    return bool(found.not_valid_before_utc <= now)  # or the clock has been put back since


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, end: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # An hour ago: the clocks of the others may be behind.
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(end)
    )


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return '%' not in name


def _configuration(path: Path, cluster: Cluster, more: str = '') -> None:
    if not path.exists():
        host = cluster.servers[0]
        placement = f'https://{bracketed(host)}:{cluster.placement_port}'
        backends = backends_yaml(f"'{host}'", cluster.etcd_port, placement)
        write_durably(path, f'# Written once by elab certs.\n{backends}{more}'.encode())


def _write(path: Path, content: bytes) -> None:
    """Write a file, unless that is in it: whose it is stays so."""
    if not path.exists() or path.read_bytes() != content:
        write_durably(path, content)


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _until(certificate: x509.Certificate) -> str:
    return certificate.not_valid_after_utc.date().isoformat()


def enable(directory: Path, now: datetime, say: Callable[[str], None]) -> None:
    """Have etcd let each certificate in `directory` write what its role may; `say` gets a line for each step.

    UsageError where a compute's certificate has no uuid beside it, Conflict where computes of an earlier version run,
    EcompError.
    """
    wanted = roles.wanted(_computes(directory), named(directory, SCHEDULER), named(directory, OPERATOR))
    with _operator(directory) as (accounts, store):
        if warning := cluster_model.holes(store.version()):
            say(f'warning: {warning}. Roles hold mistakes off there, and not attackers')
        if earlier := _old_places(store.snapshot(keys.INSTANCES, keys_only=True)):
            cure = 'start those computes with this version first; `eschedule audit` says of what stays why'
            raise Conflict(f'{_listed(earlier)}: written by an earlier ecompute; {cure}')
        found = accounts.roles()
        alive = [keys.last(key) for key, each in store.snapshot(keys.COMPUTES).entries.items() if each.lease]
        if left_out := roles.without_role(alive, found, wanted):
            cure = 'say `uuid: …` in its compute.yaml there, and run this again'
            say(f'warning: no certificate in {directory} is for a compute that lives, {_listed(left_out)}: {cure}')
        for change in roles.changes(found, wanted):
            accounts.apply(change)
            say(roles.described(change))
        if _put_cluster(store, now):
            say(f'{keys.CLUSTER}: written, for no compute may')
        if not accounts.is_on():
            accounts.turn_on()
            end = f'elab certs {directory} --disable ends that'
            say(f'etcd at {accounts.where} holds each certificate to its role; {end}')
        if others := roles.unknown(found, wanted):
            names = [printable(each, 200) for each in others]
            cure = f'whose certificate is to count no more: etcdctl user delete {names[0]}'
            say(f'in etcd, and not in {directory}: {", ".join(names)}; {cure}')


def disable(directory: Path, say: Callable[[str], None]) -> None:
    """Have etcd let every certificate do everything again. Users and roles stay. EcompError."""
    with _operator(directory) as (accounts, _):
        was_on = accounts.is_on()
        if was_on:
            accounts.turn_off()
        now = 'lets every certificate do everything' + ('' if was_on else ', as it did')
        say(f'etcd at {accounts.where} {now}; its users and roles stay')


def named(directory: Path, kind: str) -> list[str]:
    """The names of the directories of a kind, `compute-` for one: they are also the certificates' common names."""
    return sorted(path.name for path in directory.glob(f'{kind}*') if (path / 'client.crt').exists())


def _computes(directory: Path) -> dict[str, str]:
    """The uuid of each compute by its user in etcd. UsageError for a compute.yaml without one, or with another's."""
    found: dict[str, str] = {}
    for name in named(directory, COMPUTE):
        path = directory / name / 'compute.yaml'
        if not path.exists():
            raise UsageError(f'{path} is not there: it has to say which compute this is, as `uuid: …`')
        compute = load_compute(path).uuid
        if compute is None:
            line = "`uuid: …`, with what is in that compute's /var/lib/ecompute/uuid"
            raise UsageError(f'{path} does not say which compute this is: add the line {line}')
        if compute in found.values():
            other = next(each for each, theirs in found.items() if theirs == compute)
            raise UsageError(f'{path}: uuid {compute} is that of {other}, too: each compute has one of its own')
        found[name] = compute
    return found


@contextmanager
def _operator(directory: Path) -> Iterator[tuple[Accounts, Store]]:
    """Connect to etcd with the certificate of the first operator whose role may do everything. UsageError."""
    from ecomp.store.roles import Accounts  # here, because the other commands run without etcd3

    paths = [directory / name / 'schedule.yaml' for name in named(directory, OPERATOR)]
    configs = [load_schedule(path).etcd for path in paths]
    if not configs:
        raise UsageError(f'{directory} has no certificate that may do this: elab certs {directory} --operator NAME')
    for number, config in enumerate(configs):
        with closing(Store(config)) as store, closing(Accounts(config)) as accounts:
            store.version()  # refuses a server that has only a common name, which gRPC would accept
            try:
                accounts.check()
            except Denied:  # of one who is new
                if number + 1 < len(configs):
                    continue
                raise
            yield accounts, store
            return


def _old_places(records: Snapshot) -> list[str]:
    """The keys of records right below /instances/, where earlier versions wrote them, of instances that live."""
    found = sorted(records.entries.items())
    return [key for key, entry in found if not entry.lease and '/' not in key.removeprefix(keys.INSTANCES)]


def _listed(words: list[str]) -> str:
    return ', '.join(printable(each, 200) for each in words[:NAMED]) + (' …' if len(words) > NAMED else '')


def _put_cluster(store: Store, now: datetime) -> bool:
    """Write /cluster if it is missing; whether it was."""
    value = cluster_model.new(str(uuid.uuid4()), timestamp(now))
    while store.get(keys.CLUSTER) is None:
        try:
            if store.commit([Unchanged(keys.CLUSTER, 0)], [Put(keys.CLUSTER, value)]) is not None:
                return True
        except UnknownOutcome:
            continue  # the next look says what became of it
    return False
