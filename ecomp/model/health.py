"""The checks of etcd and placement, of the computes, and of this machine. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import NamedTuple

from ecomp.errors import Problem
from ecomp.model.allocation import MICROVERSION
from ecomp.model.cluster import describe_vulnerabilities
from ecomp.model.finding import COMPUTES, MACHINE, SERVERS, Check, Finding, add_checks, count_findings
from ecomp.model.host import CLOSED, ORPHANED, SILENT, Host
from ecomp.model.keys import is_uuid

# Seconds by which two clocks may differ.
MAX_CLOCK_DIFFERENCE_SECONDS = 5.0
# A certificate that expires within this time is reported.
CERTIFICATE_WARNING_TIME = timedelta(days=14)
# Enough for an image and for the first writes of its guest.
MIN_FREE_BYTES = 2 * 1024**3
# 9.0.0 as libvirt counts, the version of Debian 12; no older one has been tested.
MIN_LIBVIRT_VERSION = 9_000_000

# {code: what a probe found, None for nothing}
Problems = Mapping[str, Sequence[Problem | None]]


def _make_findings(problems: Problems) -> Iterator[Finding]:
    for code, found in problems.items():
        yield from (Finding(code, '', problem.what, cure=problem.cure) for problem in found if problem)


# Etcd and placement


@dataclass(frozen=True, kw_only=True)
class Backends:
    """Facts about etcd and placement, as this machine reaches them."""

    etcd: str  # its name with address
    placement: str  # its name with address
    configuration: str  # the file that names both, or that there is none
    now: datetime  # with a time zone
    etcd_failure: Problem | None = None  # why it does not answer properly
    placement_failure: Problem | None = None  # why it does not answer properly
    etcd_version: str = ''  # '' if unknown
    placement_version: str = ''  # '' if unknown
    ahead_seconds: float | None = None  # our clock minus placement's; None if it sends no time
    # The end of each (UTC), by file; None if it is unreadable or malformed.
    certificates: Mapping[str, datetime | None] = field(default_factory=dict)
    open_secrets: tuple[str, ...] = ()  # files that are open to every user

    def summarize(self, findings: Sequence[Finding]) -> str:
        """Return one line with the numbers of findings, the servers and the configuration file."""
        etcd = 'no answer' if self.etcd_failure else self.etcd_version
        placement = 'no answer' if self.placement_failure else f'microversion {self.placement_version}'
        servers = f'{self.etcd} ({etcd}), {self.placement} ({placement})'
        return f'{count_findings(findings)}; {servers}; configuration: {self.configuration}'


def _find_server_problems(facts: Backends) -> Iterator[Finding]:
    vulnerabilities = describe_vulnerabilities(facts.etcd_version)
    found = {'etcd': facts.etcd_failure, 'placement': facts.placement_failure, 'etcd-version': vulnerabilities}
    yield from _make_findings({code: [problem] for code, problem in found.items()})
    if facts.placement_version:
        try:
            major, minor = map(int, facts.placement_version.split('.'))
        except ValueError:
            major, minor = 0, 0
        if (major, minor) < MICROVERSION:
            needed = '.'.join(map(str, MICROVERSION))
            sentence = f'{facts.placement} has microversion {facts.placement_version}, but ecomp needs {needed}'
            yield Finding('placement-version', facts.placement, sentence)
    if facts.ahead_seconds is not None and abs(facts.ahead_seconds) > MAX_CLOCK_DIFFERENCE_SECONDS:
        direction = 'ahead of' if facts.ahead_seconds > 0 else 'behind'
        sentence = f"this machine's clock is {abs(facts.ahead_seconds):.0f} s {direction} that of {facts.placement}"
        yield Finding('clock', facts.placement, sentence)
    for path, end in facts.certificates.items():
        if end is None:
            yield Finding('certificate', path, f'{path} is not a readable certificate')
        elif end <= facts.now + CERTIFICATE_WARNING_TIME:
            expires = 'expired at' if end <= facts.now else 'expires soon, at'
            yield Finding('certificate', path, f'{path} {expires} {end:%Y-%m-%d %H:%M} UTC')
    for path in facts.open_secrets:
        sentence = f'{path} can be read or changed by every user of this machine'
        yield Finding('secret', path, sentence, cure=f'chmod o= {shlex.quote(path)}')


# Computes


@dataclass(frozen=True)
class ComputeFacts:
    """The hosts, the version of this eschedule, and a problem if no compute takes from queues."""

    hosts: tuple[Host, ...] = ()
    own_version: str = ''
    unserved: Problem | None = None


def _find_compute_problems(facts: ComputeFacts) -> Iterator[Finding]:
    ours = facts.own_version
    for host in facts.hosts:
        name = f'compute {host.hostname or host.compute}'
        forget = f'if the machine never comes back: `eschedule host forget {host.compute}`'
        if host.state == SILENT:
            cure = f'run `systemctl restart ecompute` on its host; {forget}'
            yield Finding('compute', host.compute, f'{name} is silent: its ecompute does not report', cure=cure)
        elif host.state == CLOSED:
            reason = 'its ecompute was stopped, or changes nothing because etcd is not the one that it knows'
            cure = 'run `systemctl start ecompute` on its host; if it runs, `journalctl -u ecompute` shows the reason'
            yield Finding('compute', host.compute, f'{name} is closed: {reason}', cure=cure)
        elif host.state == ORPHANED:
            cure = f'start ecompute on its host (after a restore of etcd: `ecompute --accept-new-etcd`); {forget}'
            yield Finding('compute', host.compute, f'{name} is orphaned: only placement knows it', cure=cure)
        version = host.facts.version
        if version is not None and (cure := _suggest_upgrade(version, ours)):
            sentence = f'{name} runs ecomp {version}, but this eschedule is of version {ours}'
            yield Finding('version', host.compute, sentence, cure=f'{cure}, as docs/howto/upgrade.md describes')
    yield from _make_findings({'queue': [facts.unserved]})


def _suggest_upgrade(version: str, ours: str) -> str:
    """Return which version to install where, or '' if both may be of the same commit."""
    # A wheel's version has no commit (ecomp.read_version): it may have been built from the other's.
    (release, _, commit), (our_release, _, our_commit) = version.partition('+'), ours.partition('+')
    if release == our_release and (commit == our_commit or not commit or not our_commit):
        return ''
    parts, our_parts = ([int(part) for part in each.split('.') if part.isdecimal()] for each in (release, our_release))
    # Installed from a clone: the package that pip finds under the name ecomp is another one.
    if parts == our_parts:  # two commits of a release, or a candidate for it
        return 'install the same commit on its host and here'
    if parts > our_parts:
        steps = '`pipx install --force .`, or `pip install .` in its virtual environment'
        return f'install {version} here: its package ecomp-client or, in a clone of it, {steps}'
    # Stopped before the installation, because a running ecompute would start workers of the new version.
    install = "/opt/ecomp/bin/pip uninstall -y ecomp; /opt/ecomp/bin/pip install '.[hypervisor]'"
    steps = f'systemctl stop ecompute; {install}; systemctl start ecompute'
    return f'on its host, in a clone of ecomp {ours}: `{steps}`, or its package ecomp-compute'


# This machine


@dataclass(frozen=True, kw_only=True)
class LibvirtFacts:
    version: int  # the daemon's, as libvirt counts
    library_version: int  # ours, as libvirt counts
    has_bridge: bool = True  # libvirt made the bridge of one of our networks
    computes: frozenset[str] = frozenset()  # the owners of guests on this host
    problems: Problems = field(default_factory=dict)  # of QEMU, KVM, the path to the disks, pool, networks and filters


class StateDirectory(NamedTuple):
    path: str
    caller_uid: int  # ours
    owner_uid: int | None  # None if not accessible
    uuid: str  # the stored text, or ''
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    state: StateDirectory
    libvirt: LibvirtFacts | None
    configured_uuid: str | None = None  # `uuid:` of compute.yaml
    metadata_mode: str = 'network'  # `metadata:` of compute.yaml
    proxy_variables: tuple[str, ...] = ()
    has_image_proxy: bool = False  # `image_proxy:` is in compute.yaml
    is_metadata_port_taken: bool = False  # another kind of server listens there
    problems: Problems = field(default_factory=dict)  # of other codes, and that libvirt gives no facts


def _find_state_problems(facts: MachineFacts) -> Iterator[Finding]:
    state = facts.state
    if state.caller_uid != 0:
        yield Finding('root', state.path, 'ecompute needs root')
    if state.owner_uid not in (None, state.caller_uid):
        users = f'belongs to user {state.owner_uid}, but ecompute runs as user {state.caller_uid}'
        sentence = f'state directory {state.path} {users}'
        yield Finding('state', state.path, sentence, cure=f'chown {state.caller_uid} {shlex.quote(state.path)}')
    if state.free_bytes < MIN_FREE_BYTES:
        free, needed = (size // 1024**2 for size in (state.free_bytes, MIN_FREE_BYTES))
        sentence = f'the file system of {state.path} has {free} MiB free, less than {needed} MiB'
        yield Finding('disk', state.path, sentence)
    if state.uuid and not is_uuid(state.uuid) and facts.configured_uuid is None:
        cure = f'write the right uuid to this file, or run `rm {shlex.quote(state.path)}/uuid`'
        yield Finding('uuid', state.path, f'{state.path}/uuid contains no uuid', cure=cure)
        return
    ours = facts.configured_uuid or state.uuid
    own_uuid = f'this is compute {ours}' if ours else 'this compute has no uuid yet'
    for other in sorted((facts.libvirt.computes if facts.libvirt else frozenset()) - {ours}):
        sentence = f'guests of compute {other} are on this host, but {own_uuid}'
        proceed = f'set `uuid: {other}` in compute.yaml to continue as that compute'
        yield Finding('uuid', other, sentence, cure=f'{proceed}, or remove the domains of that compute')


def _find_machine_problems(facts: MachineFacts) -> Iterator[Finding]:
    if facts.proxy_variables and not facts.has_image_proxy:
        names, unset = ', '.join(facts.proxy_variables), f'`unset {" ".join(facts.proxy_variables)}`'
        sentence = f'ecompute does not use the proxy in the environment ({names}), not even for images'
        cure = f'set `image_proxy: http://…` in compute.yaml to fetch images through it; otherwise: {unset}'
        yield Finding('proxy', names, sentence, cure=cure)
    yield from _make_findings(facts.problems)
    if (libvirt := facts.libvirt) is None:
        return
    version, library_version = _format_version(libvirt.version), _format_version(libvirt.library_version)
    if max(libvirt.version, libvirt.library_version) < MIN_LIBVIRT_VERSION:
        sentence = f'libvirt {version} is older than the versions that ecomp was tested with'
        yield Finding('libvirt-version', 'libvirt', sentence)
    if libvirt.version < libvirt.library_version:
        sentence = f'libvirtd still runs version {version}, but {library_version} is installed'
        yield Finding('libvirt-restart', 'libvirt', sentence)
    yield from _make_findings(libvirt.problems)
    if facts.metadata_mode == 'network' and not libvirt.has_bridge:
        sentence = 'libvirt manages no bridge in `networks:`, so no metadata can be served at 169.254.169.254'
        yield Finding('metadata', 'libvirt', sentence)
    elif facts.metadata_mode == 'network' and facts.is_metadata_port_taken:
        sentence = 'another service, not a metadata server, listens on port 80, also at 169.254.169.254'
        cure = "bind it to another address (`ss -ltnp 'sport = :80'` shows its name), or set `metadata: iso`"
        yield Finding('metadata', 'port 80', sentence, cure=f'{cure} in compute.yaml')


def _format_version(version: int) -> str:
    return f'{version // 10**6}.{version // 1000 % 1000}.{version % 1000}'


# fmt: off
CHECKS = add_checks({
    # of etcd and placement
    'etcd': Check(SERVERS, _find_server_problems, 'etcd does not answer properly'),
    'placement': Check(SERVERS, _find_server_problems, 'placement does not answer properly'),
    'etcd-version': Check(SERVERS, _find_server_problems, 'etcd has known vulnerabilities'),
    'placement-version': Check(SERVERS, _find_server_problems, 'placement is too old',
        "run `pip install 'openstack-placement>=7.0.0'` on its host, then restart placement"),
    'clock': Check(SERVERS, _find_server_problems, 'the clocks of this machine and of placement differ',
        'run `timedatectl set-ntp true` on the machine whose clock is wrong'),
    'certificate': Check(SERVERS, _find_server_problems, 'a certificate is unreadable, or expires within two weeks',
        'run `elab certs DIR` on the control host, and copy the new certificate to this machine'),
    'secret': Check(SERVERS, _find_server_problems, 'a key or token is open to every user'),
    # of computes, by eschedule
    'compute': Check(COMPUTES, _find_compute_problems, 'a compute is silent, closed or orphaned'),
    'version': Check(COMPUTES, _find_compute_problems, 'a compute runs another version of ecomp'),
    'queue': Check(COMPUTES, _find_compute_problems, 'no compute takes what is queued'),
    # of a machine, by its ecompute
    'root': Check(MACHINE, _find_state_problems, 'ecompute does not run as root', 'sudo ecompute --check'),
    'state': Check(MACHINE, _find_state_problems, 'the state directory belongs to another user'),
    'disk': Check(MACHINE, _find_state_problems, 'too little space is free for the state directory',
        'free space there, or set another `state:`'),
    'uuid': Check(MACHINE, _find_state_problems, 'the uuid of this compute is malformed, or guests have another one'),
    'proxy': Check(MACHINE, _find_machine_problems, 'the proxy in the environment is not used'),
    'configuration': Check(MACHINE, _find_machine_problems, 'ecompute refuses a setting',
        'correct the setting in compute.yaml'),
    'images': Check(MACHINE, _find_machine_problems, 'the directory for file:// images is missing'),
    'metrics': Check(MACHINE, _find_machine_problems, 'metrics must not be written to their file'),
    'libvirt': Check(MACHINE, _find_machine_problems, 'libvirt-python is missing, or libvirt does not answer'),
    'libvirt-version': Check(MACHINE, _find_machine_problems, 'libvirt is older than any that was tested',
        f'install libvirt {_format_version(MIN_LIBVIRT_VERSION)} or newer'),
    'libvirt-restart': Check(MACHINE, _find_machine_problems, 'libvirtd is older than its library',
        'systemctl restart libvirtd'),
    'qemu': Check(MACHINE, _find_machine_problems, 'libvirt has no usable QEMU'),
    'kvm': Check(MACHINE, _find_machine_problems, 'QEMU cannot use KVM'),
    'way': Check(MACHINE, _find_machine_problems, 'QEMU cannot enter a directory above the disks'),
    'pool': Check(MACHINE, _find_machine_problems, 'the storage pool is in another directory'),
    'network': Check(MACHINE, _find_machine_problems, 'guests cannot use a network or bridge'),
    'filters': Check(MACHINE, _find_machine_problems, 'libvirt cannot filter what guests send'),
    'metadata': Check(MACHINE, _find_machine_problems, 'metadata cannot be served',
        'set `metadata: iso` in compute.yaml'),
})
# fmt: on
