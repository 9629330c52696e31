"""The checks of `eschedule doctor` and `ecompute --check`: problems and their cures. Pure.

A check is a row of a table: its name, and a function from facts to problems, each with its cure.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from ecomp.errors import Unreachable
from ecomp.model.allocation import MICROVERSION
from ecomp.model.audit import FOUND
from ecomp.model.cluster import holes
from ecomp.model.guest import Attachment
from ecomp.model.host import CLOSED, ORPHANED, SILENT, Host

_PEM = re.compile(rb'-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----')
VERSION = 0xA0
UTC_TIME = 0x17
GENERALIZED_TIME = 0x18


def ends(content: bytes) -> datetime:
    """Return when the first certificate in a PEM file expires; raise ValueError if malformed.

    RFC 5280, 4.1: a Certificate contains a TBSCertificate: (version), serial, signature, issuer, validity, ...
    """
    match = _PEM.search(content)
    if match is None:
        raise ValueError('there is no certificate in it')
    try:
        _, certificate, _ = _next(base64.b64decode(match[1]))
        _, rest, _ = _next(certificate)
        tag, _, following = _next(rest)
        rest = following if tag == VERSION else rest
        for _ in ('serial', 'signature', 'issuer'):
            _, _, rest = _next(rest)
        _, validity, _ = _next(rest)
        _, _, following = _next(validity)
        tag, time, _ = _next(following)
        date_format = {UTC_TIME: '%y%m%d%H%M%SZ', GENERALIZED_TIME: '%Y%m%d%H%M%SZ'}[tag]
        return datetime.strptime(time.decode('ascii'), date_format).replace(tzinfo=UTC)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError('what is in it is no certificate') from error


def _next(der: bytes) -> tuple[int, bytes, bytes]:
    """Return the tag and content of the first DER element, and the bytes after it."""
    tag, length, start = der[0], der[1], 2
    if length > 0x7F:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(der[2:start], 'big')
    return tag, der[start : start + length], der[start + length :]


THERE = 'there'
OFF = 'off'
MISSING = 'missing'


@dataclass(frozen=True, kw_only=True)
class Libvirt:
    """Facts about libvirt on this host; a reason or directory is '' if there is no problem.

    `version` is the daemon's, `library_version` ours, both as libvirt counts. `qemu_user` is the user that runs QEMU.
    `blocked_directory` is on the path to the disks, and QEMU cannot enter it. `foreign_pool_directory` is that of a
    pool with our name that is not ours. `network_problems` say, with the fix, why guests cannot be made or addressed on
    a network. `computes` are the owners of guests on this host.
    """

    version: int
    library: int
    qemu: bool
    qemu_user: str = ''
    kvm_device: bool = False
    kvm_closed: bool = False
    kvm: str = ''
    blocked: str = ''
    pool: str = ''
    networks: Mapping[Attachment, str] = field(default_factory=dict)
    has_bridge: bool = True
    filters: str = ''
    unfit: tuple[str, ...] = ()
    computes: frozenset[str] = frozenset()


class StateDirectory(NamedTuple):
    """The state directory; `owner_uid` None: not accessible, `uuid` '': none is stored.

    The stored text is a uuid only if `has_valid_uuid`. `caller_uid` is our own user.
    """

    path: str
    caller: int
    owner: int | None
    uuid: str
    uuid_is_right: bool
    free: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about this machine; a reason or directory is '' if there is no problem.

    `no_library_reason` says that libvirt-python is missing, then a colon and the cure. `has_libvirtd`: its program is
    installed. `configured_uuid`, `virt_type` and `metadata_mode` are `uuid:`, `virt_type:` and `metadata:` in
    compute.yaml. `proxy_variables` are names of environment variables; `has_image_proxy`: compute.yaml sets one.
    `is_metadata_port_taken`: another kind of server listens there. `refused_settings` are the errors in compute.yaml
    that would stop a start, a sentence each. `missing_image_directory` is that of `images:`.
    """

    state: StateDirectory
    libvirt: Libvirt | None
    no_libvirt: str = ''
    no_library: str = ''
    has_libvirtd: bool = True
    configured: str | None = None
    wanted: str = 'auto'
    metadata: str = 'network'
    proxies: tuple[str, ...] = ()
    image_proxy: bool = False
    is_taken: bool = False
    refused: tuple[str, ...] = ()
    no_images: str = ''


def _root(facts: Machine) -> Iterator[Found]:
    if facts.state.caller != 0:
        yield 'ecompute needs root', 'sudo ecompute --check'


def _directory(facts: Machine) -> Iterator[Found]:
    state = facts.state
    if state.owner not in (None, state.caller):
        text = f'state directory {state.path} belongs to user {state.owner}, and ecompute runs as user {state.caller}'
        yield text, f'chown {state.caller} {shlex.quote(state.path)}'


def _disk(facts: Machine) -> Iterator[Found]:
    if facts.state.free < LEAST_DISK:
        free = f'{facts.state.free // 1024**2} MiB free'
        yield f'the disk of {facts.state.path} is full ({free})', 'make room there, or set another `state:`'


def _uuid(facts: Machine) -> Iterator[Found]:
    state = facts.state
    if state.uuid and not state.uuid_is_right and facts.configured is None:
        yield f'{state.path}/uuid holds no uuid', f'put the right one there, or rm {shlex.quote(state.path)}/uuid'
        return
    ours = facts.configured or state.uuid
    for other in sorted((facts.libvirt.computes if facts.libvirt else frozenset()) - {ours}):
        problem = f'guests of compute {other} are on this host, and this is compute {ours or "of no uuid yet"}'
        yield problem, f'put `uuid: {other}` into compute.yaml to go on as that one, or remove its domains'


def _proxy(facts: Machine) -> Iterator[Found]:
    if facts.proxies and not facts.image_proxy:
        names = ', '.join(facts.proxies)
        problem = f'{names} is in the environment, and ecompute asks nobody by it, not even for images'
        yield problem, f'`image_proxy: http://…` in compute.yaml has images fetched by it; else: unset {names}'


def _refused(facts: Machine) -> Iterator[Found]:
    for error in facts.refused:
        yield f'ecompute would not start: {error}', 'correct it in compute.yaml'


def _images(facts: Machine) -> Iterator[Found]:
    if facts.no_images:
        problem = f'`images:` {facts.no_images} is no directory: whatever is asked for by file:// fails'
        yield problem, f'mkdir -p {shlex.quote(facts.no_images)}, or correct it in compute.yaml'


def _no_libvirt(facts: Machine) -> Iterator[Found]:
    if facts.no_library:
        problem, _, cure = facts.no_library.partition(': ')
        yield problem, cure
    elif facts.no_libvirt:
        cure = 'systemctl start libvirtd' if facts.has_libvirtd else 'apt install libvirt-daemon-system'
        yield facts.no_libvirt, cure


OF_MACHINE: Mapping[str, Callable[[Machine], Iterable[Found]]] = {
    'root': _root,
    'state': _directory,
    'disk': _disk,
    'uuid': _uuid,
    'proxy': _proxy,
    'configuration': _refused,
    'images': _images,
    'libvirt': _no_libvirt,
}


def _version(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.version < OLDEST_LIBVIRT:
        problem = f'libvirt {_as_text(there.version)} is older than any that ecomp was tried with'
        yield problem, f'install {_as_text(OLDEST_LIBVIRT)} or a newer one'
    elif there.version < there.library:
        problem = f'libvirtd is {_as_text(there.version)} still, and {_as_text(there.library)} is installed'
        yield problem, 'systemctl restart libvirtd'


def _as_text(version: int) -> str:
    return f'{version // 10**6}.{version // 1000 % 1000}.{version % 1000}'


def _qemu(there: Libvirt, _: Machine) -> Iterator[Found]:
    if not there.qemu:
        yield 'libvirt knows no QEMU for x86_64 guests', 'apt install qemu-system-x86; systemctl restart libvirtd'


def _kvm(there: Libvirt, facts: Machine) -> Iterator[Found]:
    if there.kvm_device and there.kvm_closed:
        problem = (
            f'/dev/kvm cannot be opened by {there.qemu_user}: guests are emulated, and every start of one, and of '
            'ecompute, takes up to a minute longer'
        )
        yield problem, 'chgrp kvm /dev/kvm; chmod 660 /dev/kvm'
    elif there.kvm and facts.wanted == 'kvm':
        yield f'virt_type kvm cannot be had: {there.kvm}', 'say `virt_type: auto` in compute.yaml'


def _way(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.blocked:
        problem = f'QEMU runs as {there.qemu_user}, who cannot enter {there.blocked}, on the way to the disks'
        yield problem, f'chmod o+x {shlex.quote(there.blocked)}'


def _pool(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.pool:
        problem = f"the storage pool ecompute is over {there.pool}: another ecompute's, or `state:` was changed"
        yield problem, 'virsh pool-destroy ecompute; virsh pool-undefine ecompute'


def _networks(there: Libvirt, _facts: Machine) -> Iterator[Found]:
    for (kind, name), state in there.networks.items():
        if kind == 'bridge' and state == MISSING:
            yield f'this host has no bridge {name}', f'ip link add {name} type bridge; ip link set {name} up'
        elif state == MISSING and name == 'default':
            commands = 'virsh net-define /usr/share/libvirt/networks/default.xml; virsh net-autostart default'
            yield 'libvirt has no network default', f'{commands}; virsh net-start default'
        elif state == MISSING:
            yield f'libvirt has no network {name}', 'virsh net-list --all has those there are: correct `networks:`'
        elif state == OFF:
            yield f'the network {name} is not active', f'virsh net-start {name}; virsh net-autostart {name}'
    for reason in there.unfit:
        problem, _, cure = reason.partition('. Fix: ')
        yield problem, cure


def _metadata(there: Libvirt, facts: Machine) -> Iterator[Found]:
    if facts.metadata == 'network' and facts.is_taken and there.has_bridge:
        problem = 'what listens on port 80 is no metadata server, and takes 169.254.169.254 too'
        yield problem, "bind it to an address of its own (ss -ltnp 'sport = :80' has its name), or `metadata: iso`"
    if facts.metadata == 'network' and not there.has_bridge:
        problem = 'none of `networks:` is one whose bridge libvirt made: no metadata can be served at 169.254.169.254'
        yield problem, 'say `metadata: iso` in compute.yaml'


def _filters(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.filters:
        text = f'libvirt cannot filter what guests send ({there.filters}): each can take the address of another one'
        yield text, 'apt install iptables libvirt-daemon-system; systemctl restart libvirtd'


OF_LIBVIRT: Mapping[str, Callable[[Libvirt, Machine], Iterable[Found]]] = {
    'libvirt-version': _version,
    'qemu': _qemu,
    'kvm': _kvm,
    'way': _way,
    'pool': _pool,
    'network': _networks,
    'metadata': _metadata,
    'filters': _filters,
}


def of_machine(facts: Machine) -> list[Ailment]:
    """Run the checks of this machine, and those of libvirt if there are facts about it."""
    ailments = [Ailment(name, *problem) for name, check in OF_MACHINE.items() for problem in check(facts)]
    libvirt = facts.libvirt
    if libvirt is not None:
        ailments += [Ailment(name, *problem) for name, check in OF_LIBVIRT.items() for problem in check(libvirt, facts)]
    return ailments


# Seconds by which two clocks may differ.
LATE = 5.0
# A certificate that expires within this time is reported.
SOON = timedelta(days=14)
# Enough for an image and for the first writes of its guest.
LEAST_DISK = 2 * 1024**3
# 9.0.0 as libvirt counts, the version of Debian 12; no older one has been tested.
OLDEST_LIBVIRT = 9_000_000


class Ailment(NamedTuple):
    """A problem, its cure (a command, or what to do), and the name of the check that found it."""

    check: str
    what: str
    cure: str


Found = tuple[str, str]


@dataclass(frozen=True)
class Certificate:
    """A certificate file and the end of its validity; None: unreadable or malformed."""

    path: str
    until: datetime | None


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Facts about etcd and placement, as this machine reaches them.

    `etcd` and `placement` are their names with address. `config_path` is the file that configures them, None if there
    is none. `etcd_failure` and `placement_failure` say why one does not answer properly, '' if it does. `ahead_seconds`
    is our clock minus placement's, None if placement sends no time.
    """

    etcd: str
    placement: str
    told: str | None
    now: datetime
    usual: str = 'schedule.yaml'
    no_etcd: str = ''
    no_placement: str = ''
    etcd_version: str = ''
    placement_version: str = ''
    ahead: float | None = None
    certificates: tuple[Certificate, ...] = ()
    open_secrets: tuple[str, ...] = ()

    @property
    def away(self) -> bool:
        """True if etcd or placement does not answer properly."""
        return bool(self.no_etcd or self.no_placement)


@dataclass(frozen=True)
class ComputeFacts:
    """The computes, and the version of ecomp that each living one runs.

    `unserved_reason` says that requests wait in a queue from which no compute takes: the problem, a colon, the cure.
    """

    hosts: tuple[Host, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    ours: str = ''
    unserved: str | None = None


def _away(section: str, why: str, facts: Backends) -> Iterator[Found]:
    if why:
        yield why, _right(section, why, facts)


def _right(section: str, why: str, facts: Backends) -> str:
    # These texts are from ecomp/store/connection.py and ecomp/tls.py: the server runs, at this address.
    if 'is the clock right?' in why:
        return 'timedatectl set-ntp true, here and on the control host'
    if 'its certificate has expired' in why:
        return 'elab certs DIR, on the control host; and see that this clock is right'
    # A text that only asks whether our certificate is accepted does not match: the server may just be shutting down.
    if any(text in why for text in ('refuses our certificate', 'that our certificate', 'a certificate of ours')):
        return f'elab certs DIR, on the control host; copy what it makes here, and name it in `{section}:`'
    if facts.told is None:
        return f'no {facts.usual} was found, so localhost was guessed: name one with --config or in ECOMP_CONFIG'
    return f'{facts.told} told where it is: start it there, or correct `{section}:`'


def _etcd_version(facts: Backends) -> Iterator[Found]:
    warning = holes(facts.etcd_version)
    if warning is not None:
        problem, _, cure = warning.partition(': ')
        yield problem, f'install one that is mended: {cure}'


def _placement_version(facts: Backends) -> Iterator[Found]:
    if not facts.placement_version:
        return
    try:
        major, minor = (int(part) for part in facts.placement_version.split('.'))
    except ValueError:
        major, minor = 0, 0
    if (major, minor) < MICROVERSION:
        needed = '.'.join(map(str, MICROVERSION))
        problem = f'{facts.placement} has microversion {facts.placement_version}, and {needed} is asked for'
        yield problem, "pip install 'openstack-placement>=7.0.0' where it runs, and restart it"


def _clock(facts: Backends) -> Iterator[Found]:
    if facts.ahead is not None and abs(facts.ahead) > LATE:
        direction = 'ahead of' if facts.ahead > 0 else 'behind'
        problem = f"this machine's clock is {abs(facts.ahead):.0f} s {direction} that of {facts.placement}"
        yield problem, 'timedatectl set-ntp true, on the one that is wrong'


def _certificates(facts: Backends) -> Iterator[Found]:
    for certificate in facts.certificates:
        cure = 'have it made anew: elab certs DIR, on the control host, and copy it here'
        if certificate.until is None:
            yield f'{certificate.path} cannot be read as a certificate', cure
        elif certificate.until <= facts.now:
            yield f'{certificate.path} has expired, {certificate.until:%Y-%m-%d %H:%M} UTC', cure
        elif certificate.until <= facts.now + SOON:
            yield f'{certificate.path} expires soon, {certificate.until:%Y-%m-%d %H:%M} UTC', cure


def _secrets(facts: Backends) -> Iterator[Found]:
    for path in facts.open_secrets:
        yield f'{path} can be read or changed by every user of this machine', f'chmod o= {path}'


def _computes(facts: ComputeFacts) -> Iterator[Found]:
    for host in facts.hosts:
        name = host.hostname or host.compute
        if host.state == SILENT:
            cure = f'systemctl restart ecompute on its host; gone for good: eschedule host forget {host.compute}'
            yield f'compute {name} is silent: nothing says that its ecompute lives', cure
        elif host.state == CLOSED:
            reason = 'its ecompute was stopped, or it only watches, for etcd is not the one that it knew'
            cure = 'systemctl start ecompute on its host; where that runs, journalctl -u ecompute says why'
            yield f'compute {name} is closed: {reason}', cure
        elif host.state == ORPHANED:
            forget = f'gone for good: eschedule host forget {host.compute}'
            cure = f'start its ecompute (after a restore of etcd: ecompute --accept-new-etcd); {forget}'
            yield f'compute {name} is orphaned: placement knows it alone', cure


def _versions(facts: ComputeFacts) -> Iterator[Found]:
    for host in facts.hosts:
        version = facts.versions.get(host.compute, facts.ours)
        if not _are_same_version(version, facts.ours):
            problem = f'compute {host.hostname or host.compute} runs ecomp {version}, and this is {facts.ours}'
            # Installed from a clone: the package that pip finds under the name ecomp is another one.
            if _parts(version) == _parts(facts.ours):  # two commits of a release
                yield problem, 'install the same commit on its host and here (docs/howto/upgrade.md)'
            elif _parts(version) < _parts(facts.ours):
                place = f'on its host, in a clone of ecomp {facts.ours}'
                # Stopped before the installation, because a running ecompute would start workers of the new version.
                steps = "systemctl stop ecompute; /opt/ecomp/bin/pip install '.[hypervisor]'; systemctl start ecompute"
                yield problem, f'{place}: {steps} (docs/howto/upgrade.md)'
            else:
                place = f'here, in a clone of ecomp {version}'
                yield problem, f'{place}: pipx install --force ., or pip install . in its virtual environment'


def _queue(facts: ComputeFacts) -> Iterator[Found]:
    if facts.unserved is not None:
        problem, _, cure = facts.unserved.partition(': ')
        yield problem, cure or '`queues: True` in the compute.yaml of one, and restart its ecompute'


def _are_same_version(one: str, other: str) -> bool:
    # A wheel's version has no commit (ecomp.read_version), so it may have been built from the other's.
    (release, _, commit), (other_release, _, other_commit) = one.partition('+'), other.partition('+')
    return release == other_release and (commit == other_commit or not commit or not other_commit)


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.partition('+')[0].split('.') if part.isdecimal()]


OF_BACKENDS: Mapping[str, Callable[[Backends], Iterable[Found]]] = {
    'etcd': lambda facts: _away('etcd', facts.no_etcd, facts),
    'placement': lambda facts: _away('placement', facts.no_placement, facts),
    'etcd-version': _etcd_version,
    'placement-version': _placement_version,
    'clock': _clock,
    'certificate': _certificates,
    'secret': _secrets,
}
OF_COMPUTES: Mapping[str, Callable[[ComputeFacts], Iterable[Found]]] = {
    'compute': _computes,
    'version': _versions,
    'queue': _queue,
}


def of_backends(facts: Backends) -> list[Ailment]:
    return [Ailment(name, *problem) for name, check in OF_BACKENDS.items() for problem in check(facts)]


def of_computes(facts: ComputeFacts) -> list[Ailment]:
    return [Ailment(name, *problem) for name, check in OF_COMPUTES.items() for problem in check(facts)]


def lines(found: Sequence[Ailment]) -> list[str]:
    """Format each problem as one line: the check, the problem, and the cure."""
    return [f'{ailment.check}: {ailment.what}. Mend it: {ailment.cure}' for ailment in found]


def summary(facts: Backends, found: Sequence[Ailment]) -> str:
    """Return one line with the number of problems, and etcd's and placement's versions."""
    etcd = 'no answer' if facts.no_etcd else facts.etcd_version
    placement = 'no answer' if facts.no_placement else f'microversion {facts.placement_version}'
    count = f'{len(found)} finding{"" if len(found) == 1 else "s"}' if found else 'nothing is wrong'
    configuration = facts.told or f'no {facts.usual}'
    return f'{count}; {facts.etcd} ({etcd}), {facts.placement} ({placement}), by {configuration}'


def exit_code(facts: Backends, found: Sequence[Ailment]) -> int:
    """Return 7 if etcd or placement does not answer properly, 8 for other problems, else 0."""
    return Unreachable.exit_code if facts.away else FOUND if found else 0
