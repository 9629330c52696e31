"""What keeps a cluster, or a host, from working, and what mends it: `eschedule doctor`, `ecompute --check`. Pure.

A check is a row: its name, and a function from the facts to what is wrong, each with its cure.
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
VERSION, UTC_TIME, GENERALIZED_TIME = 0xA0, 0x17, 0x18


def ends(content: bytes) -> datetime:
    """When the first certificate in a PEM file is not valid any more. ValueError if there is none.

    RFC 5280, 4.1: Certificate, in it TBSCertificate, in it (version), serial, signature, issuer and validity.
    """
    found = _PEM.search(content)
    if found is None:
        raise ValueError('there is no certificate in it')
    try:
        _, certificate, _ = _next(base64.b64decode(found[1]))
        _, rest, _ = _next(certificate)
        tag, _, after = _next(rest)
        rest = after if tag == VERSION else rest
        for _ in ('serial', 'signature', 'issuer'):
            _, _, rest = _next(rest)
        _, validity, _ = _next(rest)
        _, _, after = _next(validity)
        tag, when, _ = _next(after)
        form = {UTC_TIME: '%y%m%d%H%M%SZ', GENERALIZED_TIME: '%Y%m%d%H%M%SZ'}[tag]
        return datetime.strptime(when.decode('ascii'), form).replace(tzinfo=UTC)
    except (IndexError, KeyError, ValueError) as error:
        raise ValueError('what is in it is no certificate') from error


def _next(der: bytes) -> tuple[int, bytes, bytes]:
    """The tag and the content of the first element, and what comes after it."""
    tag, length, start = der[0], der[1], 2
    if length > 0x7F:
        start = 2 + (length & 0x7F)
        length = int.from_bytes(der[2:start], 'big')
    return tag, der[start : start + length], der[start + length :]


THERE, OFF, MISSING = 'there', 'off', 'missing'
"""What a network or a bridge can be."""


@dataclass(frozen=True, kw_only=True)
class Libvirt:
    """What libvirt says. `version` is the daemon's and `library` ours, as libvirt counts; `qemu_user` runs QEMU.

    `kvm` is why guests cannot have it, in words, '' if they can. `blocked` is the directory on the way to the disks
    that QEMU cannot enter, `pool` the directory of a pool of our name that is not ours; '' for none. `filters` is why
    there can be none, '' if there can. `unfit` is why guests cannot be made or addressed on a network, with the fix.
    `computes` are those that guests here belong to.
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
    """The state directory: its owner and who asks, as numbers, the uuid kept in it, and the bytes that are free there.

    `owner` is None where it is not there yet; `uuid` is '' where none is kept, and may be no uuid at all.
    """

    path: str
    caller: int
    owner: int | None
    uuid: str
    uuid_is_right: bool
    free: int


@dataclass(frozen=True, kw_only=True)
class Machine:
    """All that is looked at. `no_libvirt` says why there is no libvirt, '' if there is one.

    `no_library` says that libvirt-python is missing, a colon, and what mends that; '' where it is there. `has_libvirtd`
    says whether its program is installed.
    `configured` is `uuid:`, `wanted` is `virt_type:`, `metadata` is `metadata:`. `proxies` are the environment's, by
    variable; `image_proxy` says that compute.yaml has one. `is_taken` says that a server of another kind listens where
    the metadata server would. `refused` is what of compute.yaml a start would refuse, a sentence each; `no_images` is
    the directory of `images:` where that is none, '' otherwise.
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
        what = f'state directory {state.path} belongs to user {state.owner}, and ecompute runs as user {state.caller}'
        yield what, f'chown {state.caller} {shlex.quote(state.path)}'


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
        what = f'guests of compute {other} are on this host, and this is compute {ours or "of no uuid yet"}'
        yield what, f'put `uuid: {other}` into compute.yaml to go on as that one, or remove its domains'


def _proxy(facts: Machine) -> Iterator[Found]:
    if facts.proxies and not facts.image_proxy:
        names = ', '.join(facts.proxies)
        what = f'{names} is in the environment, and ecompute asks nobody by it, not even for images'
        yield what, f'`image_proxy: http://…` in compute.yaml has images fetched by it; else: unset {names}'


def _refused(facts: Machine) -> Iterator[Found]:
    for each in facts.refused:
        yield f'ecompute would not start: {each}', 'correct it in compute.yaml'


def _images(facts: Machine) -> Iterator[Found]:
    if facts.no_images:
        what = f'`images:` {facts.no_images} is no directory: whatever is asked for by file:// fails'
        yield what, f'mkdir -p {shlex.quote(facts.no_images)}, or correct it in compute.yaml'


def _no_libvirt(facts: Machine) -> Iterator[Found]:
    if facts.no_library:
        what, _, cure = facts.no_library.partition(': ')
        yield what, cure
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
        what = f'libvirt {_as_text(there.version)} is older than any that ecomp was tried with'
        yield what, f'install {_as_text(OLDEST_LIBVIRT)} or a newer one'
    elif there.version < there.library:
        what = f'libvirtd is {_as_text(there.version)} still, and {_as_text(there.library)} is installed'
        yield what, 'systemctl restart libvirtd'


def _as_text(version: int) -> str:
    return f'{version // 10**6}.{version // 1000 % 1000}.{version % 1000}'


def _qemu(there: Libvirt, _: Machine) -> Iterator[Found]:
    if not there.qemu:
        yield 'libvirt knows no QEMU for x86_64 guests', 'apt install qemu-system-x86; systemctl restart libvirtd'


def _kvm(there: Libvirt, facts: Machine) -> Iterator[Found]:
    if there.kvm_device and there.kvm_closed:
        what = (
            f'/dev/kvm cannot be opened by {there.qemu_user}: guests are emulated, and every start of one, and of '
            'ecompute, takes up to a minute longer'
        )
        yield what, 'chgrp kvm /dev/kvm; chmod 660 /dev/kvm'
    elif there.kvm and facts.wanted == 'kvm':
        yield f'virt_type kvm cannot be had: {there.kvm}', 'say `virt_type: auto` in compute.yaml'


def _way(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.blocked:
        what = f'QEMU runs as {there.qemu_user}, who cannot enter {there.blocked}, on the way to the disks'
        yield what, f'chmod o+x {shlex.quote(there.blocked)}'


def _pool(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.pool:
        what = f"the storage pool ecompute is over {there.pool}: another ecompute's, or `state:` was changed"
        yield what, 'virsh pool-destroy ecompute; virsh pool-undefine ecompute'


def _networks(there: Libvirt, _facts: Machine) -> Iterator[Found]:
    for (kind, name), state in there.networks.items():
        if kind == 'bridge' and state == MISSING:
            yield f'this host has no bridge {name}', f'ip link add {name} type bridge; ip link set {name} up'
        elif state == MISSING and name == 'default':
            usual = 'virsh net-define /usr/share/libvirt/networks/default.xml; virsh net-autostart default'
            yield 'libvirt has no network default', f'{usual}; virsh net-start default'
        elif state == MISSING:
            yield f'libvirt has no network {name}', 'virsh net-list --all has those there are: correct `networks:`'
        elif state == OFF:
            yield f'the network {name} is not active', f'virsh net-start {name}; virsh net-autostart {name}'
    for why in there.unfit:
        what, _, cure = why.partition('. Fix: ')
        yield what, cure


def _metadata(there: Libvirt, facts: Machine) -> Iterator[Found]:
    if facts.metadata == 'network' and facts.is_taken and there.has_bridge:
        what = 'what listens on port 80 is no metadata server, and takes 169.254.169.254 too'
        yield what, "bind it to an address of its own (ss -ltnp 'sport = :80' has its name), or `metadata: iso`"
    if facts.metadata == 'network' and not there.has_bridge:
        what = 'none of `networks:` is one whose bridge libvirt made: no metadata can be served at 169.254.169.254'
        yield what, 'say `metadata: iso` in compute.yaml'


def _filters(there: Libvirt, _: Machine) -> Iterator[Found]:
    if there.filters:
        what = f'libvirt cannot filter what guests send ({there.filters}): each can take the address of another one'
        yield what, 'apt install iptables libvirt-daemon-system; systemctl restart libvirtd'


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
    """What is wrong with this machine."""
    found = [Ailment(name, *each) for name, look in OF_MACHINE.items() for each in look(facts)]
    there = facts.libvirt
    if there is not None:
        found += [Ailment(name, *each) for name, look in OF_LIBVIRT.items() for each in look(there, facts)]
    return found


LATE = 5.0
"""Seconds by which two clocks may differ."""
SOON = timedelta(days=14)
"""Before its end a certificate is spoken of."""
LEAST_DISK = 2 * 1024**3
"""Bytes that are free where disks are made, at least: an image and what its guest writes first."""
OLDEST_LIBVIRT = 9_000_000
"""As libvirt says 9.0.0, Debian 12's: no older one was tried."""


class Ailment(NamedTuple):
    """What is wrong, and the command that mends it, or what to do. Found by the check of this name."""

    check: str
    what: str
    cure: str


Found = tuple[str, str]


@dataclass(frozen=True)
class Certificate:
    """One that we show: its file, and when it ends; None where that cannot be read."""

    path: str
    until: datetime | None


@dataclass(frozen=True, kw_only=True)
class Backends:
    """etcd and placement as this machine meets them. `told` is the file that says where they are, None without one.

    `etcd` and `placement` are their names; `no_etcd` and `no_placement` say why one gives no right answer, '' if it
    does. `ahead` is by how many seconds our clock is ahead of placement's, None where it does not say.
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
        """Whether one of them gives no right answer."""
        return bool(self.no_etcd or self.no_placement)


@dataclass(frozen=True)
class ComputeFacts:
    """The computes, and which version of ecomp each living one runs.

    `unserved` says that something waits in a queue, and nobody takes from it: what is wrong, a colon, and its cure.
    """

    hosts: tuple[Host, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    ours: str = ''
    unserved: str | None = None


def _away(section: str, why: str, facts: Backends) -> Iterator[Found]:
    if why:
        yield why, _right(section, why, facts)


def _right(section: str, why: str, facts: Backends) -> str:
    # The words of ecomp/store/connection.py and ecomp/tls.py: it is there, and found.
    if 'is the clock right?' in why:
        return 'timedatectl set-ntp true, here and on the control host'
    if 'its certificate has expired' in why:
        return 'elab certs DIR, on the control host; and see that this clock is right'
    # Not where it is asked whether ours is taken: whoever hangs up may as well be on its way down.
    if any(each in why for each in ('refuses our certificate', 'that our certificate', 'a certificate of ours')):
        return f'elab certs DIR, on the control host; copy what it makes here, and name it in `{section}:`'
    if facts.told is None:
        return f'no {facts.usual} was found, so localhost was guessed: name one with --config or in ECOMP_CONFIG'
    return f'{facts.told} told where it is: start it there, or correct `{section}:`'


def _etcd_version(facts: Backends) -> Iterator[Found]:
    said = holes(facts.etcd_version)
    if said is not None:
        what, _, cure = said.partition(': ')
        yield what, f'install one that is mended: {cure}'


def _placement_version(facts: Backends) -> Iterator[Found]:
    if not facts.placement_version:
        return
    try:
        major, minor = (int(part) for part in facts.placement_version.split('.'))
    except ValueError:
        major, minor = 0, 0
    if (major, minor) < MICROVERSION:
        needed = '.'.join(map(str, MICROVERSION))
        what = f'{facts.placement} has microversion {facts.placement_version}, and {needed} is asked for'
        yield what, "pip install 'openstack-placement>=7.0.0' where it runs, and restart it"


def _clock(facts: Backends) -> Iterator[Found]:
    if facts.ahead is not None and abs(facts.ahead) > LATE:
        which = 'ahead of' if facts.ahead > 0 else 'behind'
        what = f"this machine's clock is {abs(facts.ahead):.0f} s {which} that of {facts.placement}"
        yield what, 'timedatectl set-ntp true, on the one that is wrong'


def _certificates(facts: Backends) -> Iterator[Found]:
    for each in facts.certificates:
        cure = 'have it made anew: elab certs DIR, on the control host, and copy it here'
        if each.until is None:
            yield f'{each.path} cannot be read as a certificate', cure
        elif each.until <= facts.now:
            yield f'{each.path} has expired, {each.until:%Y-%m-%d %H:%M} UTC', cure
        elif each.until <= facts.now + SOON:
            yield f'{each.path} expires soon, {each.until:%Y-%m-%d %H:%M} UTC', cure


def _secrets(facts: Backends) -> Iterator[Found]:
    for path in facts.open_secrets:
        yield f'{path} can be read or changed by every user of this machine', f'chmod o= {path}'


def _computes(facts: ComputeFacts) -> Iterator[Found]:
    for each in facts.hosts:
        name = each.hostname or each.compute
        if each.state == SILENT:
            where = f'systemctl restart ecompute on its host; gone for good: eschedule host forget {each.compute}'
            yield f'compute {name} is silent: nothing says that its ecompute lives', where
        elif each.state == CLOSED:
            why = 'its ecompute was stopped, or it only watches, for etcd is not the one that it knew'
            where = 'systemctl start ecompute on its host; where that runs, journalctl -u ecompute says why'
            yield f'compute {name} is closed: {why}', where
        elif each.state == ORPHANED:
            gone = f'gone for good: eschedule host forget {each.compute}'
            where = f'start its ecompute (after a restore of etcd: ecompute --accept-new-etcd); {gone}'
            yield f'compute {name} is orphaned: placement knows it alone', where


def _versions(facts: ComputeFacts) -> Iterator[Found]:
    for each in facts.hosts:
        version = facts.versions.get(each.compute, facts.ours)
        if version != facts.ours:
            what = f'compute {each.hostname or each.compute} runs ecomp {version}, and this is {facts.ours}'
            # Not by its name: the ecomp that pip finds by that is not this one.
            if _parts(version) < _parts(facts.ours):
                clone = f'on its host, in a clone of ecomp {facts.ours}'
                # Stopped first: workers that it begins meanwhile would be of the new version, and it of the old one.
                steps = "systemctl stop ecompute; /opt/ecomp/bin/pip install '.[hypervisor]'; systemctl start ecompute"
                yield what, f'{clone}: {steps} (docs/howto/upgrade.md)'
            else:
                clone = f'here, in a clone of ecomp {version}'
                yield what, f'{clone}: pipx install --force ., or pip install . in its virtual environment'


def _queue(facts: ComputeFacts) -> Iterator[Found]:
    if facts.unserved is not None:
        what, _, cure = facts.unserved.partition(': ')
        yield what, cure or '`queues: True` in the compute.yaml of one, and restart its ecompute'


def _parts(version: str) -> list[int]:
    return [int(part) for part in version.split('.') if part.isdecimal()]


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
    """What is wrong with etcd and placement, or with the way to them."""
    return [Ailment(name, *found) for name, look in OF_BACKENDS.items() for found in look(facts)]


def of_computes(facts: ComputeFacts) -> list[Ailment]:
    """What is wrong with computes, as far as it is seen from here."""
    return [Ailment(name, *found) for name, look in OF_COMPUTES.items() for found in look(facts)]


def lines(found: Sequence[Ailment]) -> list[str]:
    """Each as one line: the check, what is wrong, and what mends it."""
    return [f'{each.check}: {each.what}. Mend it: {each.cure}' for each in found]


def summary(facts: Backends, found: Sequence[Ailment]) -> str:
    """Who was asked, and how much was found, as one line."""
    etcd = 'no answer' if facts.no_etcd else facts.etcd_version
    placement = 'no answer' if facts.no_placement else f'microversion {facts.placement_version}'
    how_many = f'{len(found)} finding{"" if len(found) == 1 else "s"}' if found else 'nothing is wrong'
    told = facts.told or f'no {facts.usual}'
    return f'{how_many}; {facts.etcd} ({etcd}), {facts.placement} ({placement}), by {told}'


def exit_code(facts: Backends, found: Sequence[Ailment]) -> int:
    """0 where nothing is wrong, 7 where etcd or placement is away, 8 for any other finding."""
    return Unreachable.exit_code if facts.away else FOUND if found else 0
