"""The checks of `eschedule doctor` and `ecompute --check`: problems and their cures. Pure.

A check is a row of a table: its name, and a function that yields (problem, cure), two texts, for each wrong fact.
"""

from __future__ import annotations

import base64
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from ecomp.errors import Unreachable, split_fix
from ecomp.model import level
from ecomp.model.allocation import MICROVERSION
from ecomp.model.cluster import describe_vulnerabilities
from ecomp.model.guest import Attachment
from ecomp.model.host import CLOSED, ORPHANED, SILENT, Host

_PEM = re.compile(rb'-----BEGIN CERTIFICATE-----([A-Za-z0-9+/=\s]+)-----END CERTIFICATE-----')
VERSION_TAG = 0xA0
UTC_TIME_TAG = 0x17
GENERALIZED_TIME_TAG = 0x18


def read_certificate_end(content: bytes) -> datetime:
    """Return when (UTC) the first certificate in a PEM file expires; ValueError if it is absent or malformed.

    RFC 5280, 4.1: a Certificate contains a TBSCertificate: (version), serial, signature, issuer, validity, ...
    """
    match = _PEM.search(content)
    if match is None:
        raise ValueError('it contains no certificate')
    try:
        _, certificate, _ = _read_element(base64.b64decode(match[1]))
        _, rest, _ = _read_element(certificate)
        tag, _, following = _read_element(rest)
        rest = following if tag == VERSION_TAG else rest
        for _ in ('serial', 'signature', 'issuer'):
            _, _, rest = _read_element(rest)
        _, validity, _ = _read_element(rest)
        _, _, following = _read_element(validity)
        tag, time, _ = _read_element(following)
        date_format = {UTC_TIME_TAG: '%y%m%d%H%M%SZ', GENERALIZED_TIME_TAG: '%Y%m%d%H%M%SZ'}[tag]
        return datetime.strptime(time.decode('ascii'), date_format).replace(tzinfo=UTC)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError('its certificate is malformed') from error


def _read_element(der: bytes) -> tuple[int, bytes, bytes]:
    """Return tag and content, maybe cut off, of the first DER element, and the rest; IndexError without a length."""
    tag, length, start = der[0], der[1], 2
    if length > 0x7F:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(der[2:start], 'big')
    return tag, der[start : start + length], der[start + length :]


# The states of a network or bridge in LibvirtFacts.networks.
USABLE = 'there'
OFF = 'off'
MISSING = 'missing'


@dataclass(frozen=True, kw_only=True)
class LibvirtFacts:
    """Facts about libvirt on this host; a reason or directory is '' if there is no problem.

    `version` is the daemon's, `library_version` ours, both as libvirt counts. QEMU, run by `qemu_user`, cannot enter
    `blocked_directory` above the disks, or open /dev/kvm if `is_kvm_closed`. `foreign_pool_directory` is of a pool with
    our name that is not ours. `networks` is {attachment: USABLE, OFF or MISSING}; `has_bridge`: libvirt made the bridge
    of one. `no_qemu_reason` and `network_problems`, for guests, end in `. Fix: …`. `computes` are the owners of guests
    on this host.
    """

    version: int
    library_version: int
    no_qemu_reason: str = ''
    qemu_user: str = ''
    has_kvm_device: bool = False
    is_kvm_closed: bool = False
    no_kvm_reason: str = ''
    blocked_directory: str = ''
    foreign_pool_directory: str = ''
    networks: Mapping[Attachment, str] = field(default_factory=dict)
    has_bridge: bool = True
    no_filters_reason: str = ''
    network_problems: tuple[str, ...] = ()
    computes: frozenset[str] = frozenset()


class StateDirectory(NamedTuple):
    """The state directory; `owner_uid` None: not accessible, `uuid`: the stored text or '', `caller_uid`: ours."""

    path: str
    caller_uid: int
    owner_uid: int | None
    uuid: str
    has_valid_uuid: bool
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts about this machine; a reason or directory is '' if there is no problem.

    `no_library_reason` says that libvirt-python is missing, and the cure (see _parse_problem()). `has_libvirtd`: its
    program is installed. `configured_uuid`, `virt_type`, `metadata_mode`, `has_image_proxy`, `missing_image_directory`
    and `metrics_problem` are about settings in compute.yaml; `refused_settings` are the errors in it that prevent a
    start, a sentence each. `is_metadata_port_taken`: another kind of server listens there.
    """

    state: StateDirectory
    libvirt: LibvirtFacts | None
    no_libvirt_reason: str = ''
    no_library_reason: str = ''
    has_libvirtd: bool = True
    configured_uuid: str | None = None
    virt_type: str = 'auto'
    metadata_mode: str = 'network'
    proxy_variables: tuple[str, ...] = ()
    has_image_proxy: bool = False
    is_metadata_port_taken: bool = False
    refused_settings: tuple[str, ...] = ()
    missing_image_directory: str = ''
    metrics_problem: str = ''


def _check_root(facts: MachineFacts) -> Iterator[Problem]:
    if facts.state.caller_uid != 0:
        yield 'ecompute needs root', 'sudo ecompute --check'


def _check_directory(facts: MachineFacts) -> Iterator[Problem]:
    """Report a state directory that belongs to another user; an unknown owner is accepted."""
    state = facts.state
    if state.owner_uid not in (None, state.caller_uid):
        text = (
            f'state directory {state.path} belongs to user {state.owner_uid}, '
            f'but ecompute runs as user {state.caller_uid}'
        )
        yield text, f'chown {state.caller_uid} {shlex.quote(state.path)}'


def _check_disk(facts: MachineFacts) -> Iterator[Problem]:
    """Report less than MIN_FREE_BYTES free in the file system of the state directory."""
    if facts.state.free_bytes < MIN_FREE_BYTES:
        free, needed = (size // 1024**2 for size in (facts.state.free_bytes, MIN_FREE_BYTES))
        problem = f'the file system of {facts.state.path} has {free} MiB free, less than {needed} MiB'
        yield problem, 'free space there, or set another `state:`'


def _check_uuid(facts: MachineFacts) -> Iterator[Problem]:
    """Report a malformed stored uuid, unless one is configured; else guests of other computes."""
    state = facts.state
    if state.uuid and not state.has_valid_uuid and facts.configured_uuid is None:
        cure = f'write the right uuid to this file, or run `rm {shlex.quote(state.path)}/uuid`'
        yield f'{state.path}/uuid contains no uuid', cure
        return
    ours = facts.configured_uuid or state.uuid
    for other in sorted((facts.libvirt.computes if facts.libvirt else frozenset()) - {ours}):
        own_uuid = f'this is compute {ours}' if ours else 'this compute has no uuid yet'
        problem = f'guests of compute {other} are on this host, but {own_uuid}'
        yield (
            problem,
            f'set `uuid: {other}` in compute.yaml to continue as that compute, or remove the domains of that compute',
        )


def _check_proxy(facts: MachineFacts) -> Iterator[Problem]:
    """Report proxy variables in the environment, unless compute.yaml sets a proxy."""
    if facts.proxy_variables and not facts.has_image_proxy:
        names = ', '.join(facts.proxy_variables)
        problem = f'ecompute does not use the proxy in the environment ({names}), not even for images'
        unset = f'`unset {" ".join(facts.proxy_variables)}`'
        yield problem, f'set `image_proxy: http://…` in compute.yaml to fetch images through it; otherwise: {unset}'


def _check_refused_settings(facts: MachineFacts) -> Iterator[Problem]:
    """Yield a problem for each setting of compute.yaml that ecompute refuses."""
    for error in facts.refused_settings:
        problem, _, cure = error.partition('. Fix: ')
        yield f'ecompute cannot start: {problem}', cure or 'correct the setting in compute.yaml'


def _check_images(facts: MachineFacts) -> Iterator[Problem]:
    """Yield a problem if the directory for file:// images is missing."""
    if facts.missing_image_directory:
        problem = f'`images:` {facts.missing_image_directory} is not a directory: each file:// image fails'
        mkdir = f'`mkdir -p {shlex.quote(facts.missing_image_directory)}`'
        yield problem, f'run {mkdir}, or correct `images:` in compute.yaml'


def _parse_problem(text: str) -> Problem:
    """Split `problem. Fix: cure`."""
    problem, cure = split_fix(text)
    return problem, cure.removeprefix('. Fix: ')


def _parse_problems(*texts: str | None) -> list[Problem]:
    """Split each text, `problem. Fix: cure`, that is not empty."""
    return [_parse_problem(text) for text in texts if text]


def _check_libvirt(facts: MachineFacts) -> Iterator[Problem]:
    """Report that libvirt-python is missing, or else why libvirt gives no facts, without the cure in that reason."""
    if facts.no_library_reason:
        yield _parse_problem(facts.no_library_reason)
    elif facts.no_libvirt_reason:
        cure = 'systemctl start libvirtd' if facts.has_libvirtd else 'apt-get install libvirt-daemon-system'
        yield facts.no_libvirt_reason.partition('. Fix: ')[0], cure


MACHINE_CHECKS: Mapping[str, Callable[[MachineFacts], Iterable[Problem]]] = {
    'root': _check_root,
    'state': _check_directory,
    'disk': _check_disk,
    'uuid': _check_uuid,
    'proxy': _check_proxy,
    'configuration': _check_refused_settings,
    'images': _check_images,
    'metrics': lambda facts: _parse_problems(facts.metrics_problem),
    'libvirt': _check_libvirt,
}


def _check_libvirt_version(libvirt: LibvirtFacts, _: MachineFacts) -> Iterator[Problem]:
    """Report a daemon and a library that are older than MIN_LIBVIRT_VERSION."""
    if max(libvirt.version, libvirt.library_version) < MIN_LIBVIRT_VERSION:
        problem = f'libvirt {_format_version(libvirt.version)} is older than the versions that ecomp was tested with'
        yield problem, f'install libvirt {_format_version(MIN_LIBVIRT_VERSION)} or newer'


def _check_libvirt_restart(libvirt: LibvirtFacts, _: MachineFacts) -> Iterator[Problem]:
    """Report a daemon that is older than our library."""
    if libvirt.version < libvirt.library_version:
        problem = (
            f'libvirtd still runs version {_format_version(libvirt.version)}, '
            f'but {_format_version(libvirt.library_version)} is installed'
        )
        yield problem, 'systemctl restart libvirtd'


def _format_version(version: int) -> str:
    """Format a version as libvirt counts: 9000000 is 9.0.0."""
    return f'{version // 10**6}.{version // 1000 % 1000}.{version % 1000}'


def _check_kvm(libvirt: LibvirtFacts, facts: MachineFacts) -> Iterator[Problem]:
    """Report /dev/kvm that QEMU cannot open, or else that the configured `kvm` is impossible."""
    if libvirt.has_kvm_device and libvirt.is_kvm_closed:
        problem = (
            f'{libvirt.qemu_user} cannot open /dev/kvm: guests are emulated, and each start of a guest or of ecompute '
            'takes up to a minute longer'
        )
        yield problem, 'chgrp kvm /dev/kvm; chmod 660 /dev/kvm'
    elif libvirt.no_kvm_reason and facts.virt_type == 'kvm':
        yield f'virt_type: kvm is not available: {libvirt.no_kvm_reason}', 'set `virt_type: auto` in compute.yaml'


def _check_path_to_disks(libvirt: LibvirtFacts, _: MachineFacts) -> Iterator[Problem]:
    if libvirt.blocked_directory:
        problem = f'QEMU runs as {libvirt.qemu_user}, which cannot enter {libvirt.blocked_directory} above the disks'
        yield problem, f'chmod o+x {shlex.quote(libvirt.blocked_directory)}'


def _check_pool(libvirt: LibvirtFacts, _: MachineFacts) -> Iterator[Problem]:
    """Report the pool `ecompute` in a directory that is not ours."""
    if libvirt.foreign_pool_directory:
        problem = (
            f'the storage pool ecompute is in {libvirt.foreign_pool_directory}: '
            'it belongs to another ecompute, or `state:` in compute.yaml was changed'
        )
        commands = '`virsh pool-destroy ecompute; virsh pool-undefine ecompute`'
        yield problem, f'correct `state:`, or, if no ecompute needs the pool, {commands}'


def _check_networks(libvirt: LibvirtFacts, _facts: MachineFacts) -> Iterator[Problem]:
    """Report bridges and networks that are missing or off, and `network_problems`."""
    for (kind, name), state in libvirt.networks.items():
        if kind == 'bridge' and state == MISSING:
            yield f'this host has no bridge {name}', f'ip link add {name} type bridge; ip link set {name} up'
        elif state == MISSING and name == 'default':
            commands = 'virsh net-define /usr/share/libvirt/networks/default.xml; virsh net-autostart default'
            yield 'libvirt has no network named default', f'{commands}; virsh net-start default'
        elif state == MISSING:
            yield (
                f'libvirt has no network named {name}',
                'correct `networks:`; `virsh net-list --all` shows the networks',
            )
        elif state == OFF:
            yield f'network {name} is not active', f'virsh net-start {name}; virsh net-autostart {name}'
    yield from _parse_problems(*libvirt.network_problems)


def _check_metadata(libvirt: LibvirtFacts, facts: MachineFacts) -> Iterator[Problem]:
    """Report, for metadata mode `network`, a taken port, or no network with libvirt's bridge."""
    if facts.metadata_mode == 'network' and facts.is_metadata_port_taken and libvirt.has_bridge:
        problem = 'another service, not a metadata server, listens on port 80, also at 169.254.169.254'
        cure = "bind it to another address (`ss -ltnp 'sport = :80'` shows its name), or set `metadata: iso`"
        yield problem, f'{cure} in compute.yaml'
    if facts.metadata_mode == 'network' and not libvirt.has_bridge:
        problem = 'libvirt manages no bridge in `networks:`, so no metadata can be served at 169.254.169.254'
        yield problem, 'set `metadata: iso` in compute.yaml'


def _check_filters(libvirt: LibvirtFacts, _: MachineFacts) -> Iterator[Problem]:
    """Report that libvirt cannot filter what guests send."""
    if libvirt.no_filters_reason:
        text = (
            f'libvirt cannot filter what guests send ({libvirt.no_filters_reason}): '
            'a guest can take the address of another guest'
        )
        yield text, 'apt-get install iptables libvirt-daemon-system; systemctl restart libvirtd'


LIBVIRT_CHECKS: Mapping[str, Callable[[LibvirtFacts, MachineFacts], Iterable[Problem]]] = {
    'libvirt-version': _check_libvirt_version,
    'libvirt-restart': _check_libvirt_restart,
    'qemu': lambda libvirt, _: _parse_problems(libvirt.no_qemu_reason),
    'kvm': _check_kvm,
    'way': _check_path_to_disks,
    'pool': _check_pool,
    'network': _check_networks,
    'metadata': _check_metadata,
    'filters': _check_filters,
}


def check_machine(facts: MachineFacts) -> list[Ailment]:
    """Run the checks of this machine, and those of libvirt if there are facts about it."""
    of_libvirt = run_checks(LIBVIRT_CHECKS, facts.libvirt, facts) if facts.libvirt is not None else []
    return [*run_checks(MACHINE_CHECKS, facts), *of_libvirt]


# Seconds by which two clocks may differ.
MAX_CLOCK_DIFFERENCE_SECONDS = 5.0
# A certificate that expires within this time is reported.
CERTIFICATE_WARNING_TIME = timedelta(days=14)
# Enough for an image and for the first writes of its guest.
MIN_FREE_BYTES = 2 * 1024**3
# 9.0.0 as libvirt counts, the version of Debian 12; no older one has been tested.
MIN_LIBVIRT_VERSION = 9_000_000


class Ailment(NamedTuple):
    """A problem, its cure (a command, or what to do), and the name of the check that found it."""

    check: str
    what: str
    cure: str


# The problem and its cure.
Problem = tuple[str, str]


@dataclass(frozen=True)
class Certificate:
    """A certificate file and the end of its validity, UTC; None: unreadable or malformed."""

    path: str
    expires_at: datetime | None


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Facts about etcd and placement, as this machine reaches them.

    `etcd` and `placement` are their names with address, `config_path` is the file with them or None. A failure says why
    a server does not answer properly, or is ''. A version is '' if unknown. `ahead_seconds` is our clock minus
    placement's, None if it sends no time. `now` has a time zone. `open_secrets` are files that are open to every user.
    """

    etcd: str
    placement: str
    config_path: str | None
    now: datetime
    default_config_name: str = 'schedule.yaml'
    etcd_failure: str = ''
    placement_failure: str = ''
    etcd_version: str = ''
    placement_version: str = ''
    ahead_seconds: float | None = None
    certificates: tuple[Certificate, ...] = ()
    open_secrets: tuple[str, ...] = ()

    @property
    def is_unavailable(self) -> bool:
        """True if etcd or placement does not answer properly."""
        return bool(self.etcd_failure or self.placement_failure)


@dataclass(frozen=True)
class ComputeFacts:
    """The computes, the version of each living one, and Computes.describe_unserved() of what is queued."""

    hosts: tuple[Host, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    own_version: str = ''
    unserved_reason: str | None = None


def _check_answer(section: str, reason: str, facts: Backends) -> Iterator[Problem]:
    """Report the failure of a section unless `reason` is ''; _find_cure() replaces any fix that `reason` contains."""
    if reason:
        yield reason.partition('. Fix: ')[0], _find_cure(section, reason, facts)


def _find_cure(section: str, reason: str, facts: Backends) -> str:
    """Return the cure of a failure of `section`, `etcd` or `placement`, chosen by words in `reason`."""
    # These texts are from ecomp/store/connection.py and ecomp/tls.py: the server runs, at this address.
    if 'the clock may be wrong' in reason:
        return 'run `timedatectl set-ntp true` here and on the control host'
    if 'its certificate has expired' in reason:
        return 'run `elab certs DIR` on the control host, and check that the clock of this machine is right'
    # A text that our certificate may be refused must not match: the server may be shutting down.
    if any(text in reason for text in ('refuses our certificate', 'that our certificate', 'a certificate of ours')):
        return f'run `elab certs DIR` on the control host, copy the new files here, and name them in `{section}:`'
    if facts.config_path is None:
        return (
            f'name a configuration file with --config or in ECOMP_CONFIG: no {facts.default_config_name} was found, so '
            'the address is localhost'
        )
    return f'start {section} at this address, or correct `{section}:` in {facts.config_path}'


def _check_placement_version(facts: Backends) -> Iterator[Problem]:
    """Report a microversion that is malformed or below MICROVERSION; nothing for '', an unknown one."""
    if not facts.placement_version:
        return
    try:
        major, minor = (int(part) for part in facts.placement_version.split('.'))
    except ValueError:
        major, minor = 0, 0
    if (major, minor) < MICROVERSION:
        needed = '.'.join(map(str, MICROVERSION))
        problem = f'{facts.placement} has microversion {facts.placement_version}, but ecomp needs {needed}'
        yield problem, "run `pip install 'openstack-placement>=7.0.0'` on its host, then restart placement"


def _check_clock(facts: Backends) -> Iterator[Problem]:
    """Report a difference of more than MAX_CLOCK_DIFFERENCE_SECONDS, ahead or behind."""
    if facts.ahead_seconds is not None and abs(facts.ahead_seconds) > MAX_CLOCK_DIFFERENCE_SECONDS:
        direction = 'ahead of' if facts.ahead_seconds > 0 else 'behind'
        problem = f"this machine's clock is {abs(facts.ahead_seconds):.0f} s {direction} that of {facts.placement}"
        yield problem, 'run `timedatectl set-ntp true` on the machine whose clock is wrong'


def _check_certificates(facts: Backends) -> Iterator[Problem]:
    """Report certificates that are unreadable, expired, or expire soon."""
    for certificate in facts.certificates:
        cure = 'run `elab certs DIR` on the control host, and copy the new certificate to this machine'
        if certificate.expires_at is None:
            yield f'{certificate.path} is not a readable certificate', cure
        elif certificate.expires_at <= facts.now:
            yield f'{certificate.path} expired at {certificate.expires_at:%Y-%m-%d %H:%M} UTC', cure
        elif certificate.expires_at <= facts.now + CERTIFICATE_WARNING_TIME:
            yield f'{certificate.path} expires soon, at {certificate.expires_at:%Y-%m-%d %H:%M} UTC', cure


def _check_secrets(facts: Backends) -> Iterator[Problem]:
    for path in facts.open_secrets:
        yield f'{path} can be read or changed by every user of this machine', f'chmod o= {shlex.quote(path)}'


def _check_computes(facts: ComputeFacts) -> Iterator[Problem]:
    """Report silent, closed and orphaned computes."""
    for host in facts.hosts:
        name = host.hostname or host.compute
        forget = f'if the machine never comes back: `eschedule host forget {host.compute}`'
        if host.state == SILENT:
            cure = f'run `systemctl restart ecompute` on its host; {forget}'
            yield f'compute {name} is silent: its ecompute does not report', cure
        elif host.state == CLOSED:
            reason = 'its ecompute was stopped, or changes nothing because etcd is not the one that it knows'
            cure = 'run `systemctl start ecompute` on its host; if it runs, `journalctl -u ecompute` shows the reason'
            yield f'compute {name} is closed: {reason}', cure
        elif host.state == ORPHANED:
            cure = f'start ecompute on its host (after a restore of etcd: `ecompute --accept-new-etcd`); {forget}'
            yield f'compute {name} is orphaned: only placement knows it', cure


def _check_versions(facts: ComputeFacts) -> Iterator[Problem]:
    """Report computes of another version, and where to upgrade; an unknown one counts as ours."""
    for host in facts.hosts:
        version = facts.versions.get(host.compute, facts.own_version)
        if not _are_same_version(version, facts.own_version):
            ours = f'this eschedule is of version {facts.own_version}'
            problem = f'compute {host.hostname or host.compute} runs ecomp {version}, but {ours}'
            # Installed from a clone: the package that pip finds under the name ecomp is another one.
            if _parse_version(version) == _parse_version(facts.own_version):  # two commits of a release
                yield problem, 'install the same commit on its host and here, as docs/howto/upgrade.md describes'
            elif _parse_version(version) < _parse_version(facts.own_version):
                place = f'on its host, in a clone of ecomp {facts.own_version}'
                # Stopped before the installation, because a running ecompute would start workers of the new version.
                install = "/opt/ecomp/bin/pip uninstall -y ecomp; /opt/ecomp/bin/pip install '.[hypervisor]'"
                steps = f'systemctl stop ecompute; {install}; systemctl start ecompute'
                yield problem, f'{place}: `{steps}`, or its package ecomp-compute, as docs/howto/upgrade.md describes'
            else:
                place = f'here, in a clone of ecomp {version}'
                steps = 'pipx install --force .`, `pip install .` in its virtual environment'
                yield problem, f'{place}: `{steps}, or its package ecomp-client, as docs/howto/upgrade.md describes'


def _are_same_version(one: str, other: str) -> bool:
    """Return True for equal releases and commits; a commit that only one has is ignored."""
    # A wheel's version has no commit (ecomp.read_version): it may have been built from the other's.
    (release, _, commit), (other_release, _, other_commit) = one.partition('+'), other.partition('+')
    return release == other_release and (commit == other_commit or not commit or not other_commit)


def _parse_version(version: str) -> list[int]:
    """Return the decimal parts before '+': [1, 2, 0] for 1.2.0+abc or 1.2.0.rc1."""
    return [int(part) for part in version.partition('+')[0].split('.') if part.isdecimal()]


BACKEND_CHECKS: Mapping[str, Callable[[Backends], Iterable[Problem]]] = {
    'etcd': lambda facts: _check_answer('etcd', facts.etcd_failure, facts),
    'placement': lambda facts: _check_answer('placement', facts.placement_failure, facts),
    'etcd-version': lambda facts: _parse_problems(describe_vulnerabilities(facts.etcd_version)),
    'placement-version': _check_placement_version,
    'clock': _check_clock,
    'certificate': _check_certificates,
    'secret': _check_secrets,
}
COMPUTE_CHECKS: Mapping[str, Callable[[ComputeFacts], Iterable[Problem]]] = {
    'compute': _check_computes,
    'version': _check_versions,
    'queue': lambda facts: _parse_problems(facts.unserved_reason),
}


def run_checks(checks: Mapping[str, Callable[..., Iterable[Problem]]], *facts: object) -> list[Ailment]:
    """Run all checks of a table on its facts; the list is empty if nothing is wrong."""
    return [Ailment(name, *problem) for name, check in checks.items() for problem in check(*facts)]


def format_lines(ailments: Sequence[Ailment]) -> list[str]:
    """Format each problem as one line: the check, the problem, and the cure."""
    return [f'{check}: {level.mark_warning(check, what)}. Fix: {cure}' for check, what, cure in ailments]


def summarize(facts: Backends, ailments: Sequence[Ailment]) -> str:
    """Return one line: the numbers of problems, etcd's and placement's versions, and the configuration file."""
    etcd = 'no answer' if facts.etcd_failure else facts.etcd_version
    placement = 'no answer' if facts.placement_failure else f'microversion {facts.placement_version}'
    count = level.count_findings([ailment.check for ailment in ailments])
    configuration = facts.config_path or f'no {facts.default_config_name}'
    return f'{count}; {facts.etcd} ({etcd}), {facts.placement} ({placement}); configuration: {configuration}'


def get_exit_code(facts: Backends, ailments: Sequence[Ailment]) -> int:
    """Return 7 if etcd or placement does not answer properly, else 8 for a problem that is no warning, else 0."""
    return Unreachable.exit_code if facts.is_unavailable else level.get_exit_code([each.check for each in ailments])
