"""The Hypervisor that is real: this host's libvirt. Each process makes its own; threads may share one.

Beside it are what libvirt and the networks of this host are like, for `ecompute --check` (nothing is made, started or
defined), the network filters that say what a guest may send, and what it is kept from, and what the user QEMU runs as
can get at: directories above the disks (libvirt gives it the disks alone), and KVM.
"""

from __future__ import annotations

import logging
import os
import pwd
import shlex
import shutil
import struct
import time
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from ecomp.addresses import addresses, is_own
from ecomp.errors import BuildFailed, Conflict, EcompError, Unreachable, UsageError
from ecomp.files import search_path
from ecomp.model import health
from ecomp.model.guest import DEFAULT_NETWORKS, UNPLUGGED, Address, Attachment, Guest, GuestSpec
from ecomp.model.health import MISSING
from ecomp.model.image import Address as IpAddress
from ecomp.virt import networks, xml
from ecomp.virt.connection import Connection, Ignored, is_broken, libvirt, reason
from ecomp.virt.domains import Agents, Domains
from ecomp.virt.networks import Networks
from ecomp.virt.volumes import POOL, Seeds, Volumes
from ecomp.virt.xml import Service


def look(state: Path, attachments: Sequence[Attachment], uri: str = 'qemu:///system') -> health.Libvirt:
    """What there is. Errors: Unreachable where libvirt does not answer, EcompError."""
    with closing(Connection(uri)) as connection:
        with connection.use('asking for its version') as open_one:
            version, capabilities = open_one.getLibVersion(), xml.capabilities(open_one.getCapabilities())
        qemu = user(capabilities.qemu_uid, capabilities.qemu_gid)
        states = {each: Networks(connection).state(each) for each in attachments}
        filters = Filters(connection, ()).missing()
        unfit = [Networks(connection).explain_unfit(each, not filters) for each in attachments]
        closed = blocked(state.absolute() / 'images', qemu)
        return health.Libvirt(
            version=version,
            library=libvirt.getVersion(),
            qemu='qemu' in capabilities.domain_types,
            qemu_user=qemu.name,
            kvm_device=KVM.exists(),
            kvm_closed=is_kvm_closed(qemu),
            kvm=explain_no_kvm(qemu, capabilities.domain_types),
            blocked='' if closed is None else str(closed),
            pool=_others_pool(connection, state.absolute() / 'images'),
            networks=states,
            has_bridge=any(_has_bridge(connection, each) for each, found in states.items() if found != MISSING),
            filters=filters,
            unfit=tuple(why for each in unfit for why in each if why),
            computes=Domains(connection).computes(),
        )


def _has_bridge(connection: Connection, attachment: Attachment) -> bool:
    with suppress(EcompError):  # one without a bridge
        return attachment.kind == 'network' and Networks(connection).own_bridge(attachment.name) is not None
    return False


def _others_pool(connection: Connection, directory: Path) -> str:
    with connection.use(f'looking for the storage pool {POOL}') as open_one:
        targets = [xml.pool_target(each.XMLDesc()) for each in open_one.listAllStoragePools() if each.name() == POOL]
    return next((str(each) for each in targets if os.path.realpath(each) != os.path.realpath(directory)), '')


log = logging.getLogger(__name__)

NO_FILTERS = (
    "libvirt cannot filter what guests send ({why}), so each can take another one's address and speak to etcd and "
    "placement: it takes libvirt's nwfilter driver, and ebtables, which is in Debian's package iptables"
)
NO_FILTERS_NOW = (
    'libvirt cannot filter what guests send any more ({why}): no guest is made until it can, or until ecompute is '
    'started again without'
)


class Libvirt:
    """Guests on libvirt at `uri`, disks in `state`/images (the pool `ecompute`), NoCloud disks in `state`/seeds,
    consoles in `state`/console.

    `attachments` are the networks that prepare() starts; a guest's own are in its spec. `control` is host and port of
    etcd and of placement, which no guest reaches. `filters`: this host had filters when prepare() looked, in whichever
    process that was, and no guest is made without. `hold_addresses`: on bridges their guests have the addresses alone
    that DHCP gives them.
    """

    def __init__(
        self,
        state: Path,
        attachments: Sequence[Attachment] = DEFAULT_NETWORKS,
        uri: str = 'qemu:///system',
        control: Sequence[tuple[str, int]] = (),
        filters: bool = False,
        hold_addresses: bool = False,
    ) -> None:
        self._state = state.absolute()
        self._attachments = attachments
        self._connection = Connection(uri)
        self._agents = Agents(uri)
        self._domains = Domains(self._connection)
        self._filters = Filters(self._connection, control)
        self.filters, self._hold_addresses = filters, hold_addresses
        self._volumes = Volumes(self._connection, self._state / 'images')
        self._seeds = Seeds(self._state / 'seeds')
        self._networks = Networks(self._connection)
        self._is_probed = False
        self._unplugged: dict[str, str] = {}
        self._watching = ExitStack()
        # What one part does by itself.
        self.shutdown, self.without_base = self._domains.shutdown, self._volumes.without_base
        self.switch_off = partial(self._domains.end, undefine=False)
        self.destroy = partial(self._domains.end, undefine=True)
        self.runs, self.computes = self._domains.runs, self._domains.computes
        self.reserve, self.reservations = self._networks.reserve, self._networks.reservations
        self.seeds = self._seeds.present

    def check(self) -> None:
        """Raise what prepare() would of this host as it is; nothing is changed."""
        began, is_first, self._is_probed = time.monotonic(), not self._is_probed, True
        if is_first:  # libvirt probes every QEMU there is for who asks first
            log.info('libvirt is asked what QEMU can do here: seconds at first, up to a minute of a busy machine')
        qemu = self._qemu()
        if is_first:
            log.info('libvirt has said so, after %.1f s', time.monotonic() - began)
        check_reachable(self._volumes.directory, qemu)
        has_filters = not self._filters.missing()
        for number, attachment in enumerate(self._attachments):
            self._networks.check(attachment)
            unmade, unaddressed = self._networks.explain_unfit(attachment, has_filters)
            # Nobody waits for an address on any but the first.
            if unmade or (unaddressed and number == 0):
                raise UsageError(unmade or unaddressed)
        self._volumes.check()

    def prepare(self) -> None:
        self.check()
        entered = dict.fromkeys((self._state, self._volumes.directory, self._seeds.directory), 0o711)
        for directory, mode in {**entered, self._consoles: 0o700}.items():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(mode)
            except OSError as error:
                raise UsageError(f'{directory} cannot be made or opened up: {error.strerror} (see `state:`)') from error
        qemu = self._qemu()
        check_reachable(self._volumes.directory, qemu)  # again: what was just made may have an ACL of its own
        if is_kvm_closed(qemu):
            log.warning('%s %s', KVM, UNUSABLE_KVM.format(name=qemu.name))
        for attachment in self._attachments:
            self._networks.prepare(attachment)
        self._volumes.prepare()
        why = self._filters.prepare()
        self.filters = not why
        if why:
            log.warning(NO_FILTERS.format(why=why))
        # What libvirt probes of QEMU for this takes seconds once: here, and not in the first guest's start.
        with self._connection.use('probing QEMU') as connection:
            connection.getDomainCapabilities(None, xml.ARCHITECTURE, xml.MACHINE, self.virt_type('auto'))

    def virt_type(self, wanted: str) -> str:
        capabilities = self._capabilities()
        qemu = user(capabilities.qemu_uid, capabilities.qemu_gid)
        return choose_virt_type(wanted, explain_no_kvm(qemu, capabilities.domain_types))

    def cpu_features(self, virt_type: str) -> Set[str]:
        asked = (xml.ARCHITECTURE, xml.MACHINE, virt_type)
        try:
            with self._connection.use('asking what guests can do') as connection:
                cpu = xml.guest_cpu(connection.getDomainCapabilities(None, *asked))
                if cpu is None:
                    return frozenset()
                expand = libvirt.VIR_CONNECT_BASELINE_CPU_EXPAND_FEATURES
                model = connection.baselineHypervisorCPU(None, *asked, [xml.cpu_xml(cpu.model)], expand)
        except Unreachable:
            raise
        except EcompError as error:
            log.warning('no traits of the processor: %s', error)
            return frozenset()
        return (xml.cpu_features(model) | cpu.more) - cpu.fewer

    def image_directory(self) -> Path | None:
        return self._volumes.directory

    def guests(self) -> Mapping[str, Guest]:
        # Disks first: a guest removed between the two questions is then seen with too much, not with too little.
        disks = self._volumes.present()
        guests = {each: Guest(each, None, defined=False, running=False, disk=True) for each in disks}
        for instance, found in self._domains.ours().items():
            size = {**found.size, 'DISK_GB': self._volumes.measure_disk_gb(instance)}
            guest = replace(found, disk=instance in disks, size=size)
            guests[instance] = guest.with_trouble(self._unplugged.get(instance, ''))
        return guests

    def open_dhcp(self) -> Set[str]:
        names = {name for kind, name in self._attachments if kind == 'network'}
        return {name for name in names if self._networks.answers_anybody(name)}

    def users(self, instance: str) -> Set[str]:
        return self._domains.users(str(self._volumes.path(instance)))

    def create_disk(self, spec: GuestSpec) -> None:
        # Without a disk no domain runs on it, and libvirt need not be asked.
        if self._volumes.path(spec.instance).exists() and self._domains.is_running(spec.instance):
            raise BuildFailed('disk', f'domain {spec.instance} is running: its disk is not made again')
        self._volumes.create(spec)

    def create_seed(self, instance: str, files: Mapping[str, bytes]) -> None:
        if self._domains.is_running(instance):
            raise BuildFailed('disk', f'domain {instance} is running: its seed is not made again')
        self._seeds.create(instance, files)

    def delete_seed(self, instance: str) -> None:
        if self._domains.is_running(instance):
            raise Conflict(f'domain {instance} is running: its seed is not removed')
        self._seeds.delete(instance)

    def start(self, spec: GuestSpec) -> None:
        seed = str(self._seeds.path(spec.instance)) if spec.seed is not None else None
        disk, console = self._volumes.path(spec.instance), self.console(spec.instance)
        # Asked each time: somebody may have removed the filters, or installed what was missing.
        why = self._filters.prepare()
        if why and self.filters:
            raise Unreachable(NO_FILTERS_NOW.format(why=why), "libvirt's network filters")
        control = None if why else self._filters.services()
        description = xml.domain_xml(
            spec,
            str(disk),
            str(console),
            seed=seed,
            control=control,
            without_ipv6=self._networks.without_ipv6(spec.networks),
            hold_addresses=self._hold_addresses,
        )
        self._domains.start(spec, description)

    def resume(self, instance: str, compute: str) -> None:
        self._filters.prepare()
        self._domains.resume(instance, compute)

    def delete_disk(self, instance: str) -> None:
        self._domains.check_free(instance, [str(each.path(instance)) for each in (self._volumes, self._seeds)])
        self._seeds.delete(instance)  # first: by its overlay an instance is known to be here
        self._volumes.delete(instance)
        # virtlogd begins a new file now and then: the ones before are .log.0 and so on.
        for path in self._consoles.glob(f'{instance}.log*'):
            path.unlink(missing_ok=True)

    def release(self, instance: str) -> None:
        self._networks.release(instance)
        self._agents.forget(instance)

    def addresses(self, instance: str) -> Mapping[str, Address]:
        interfaces = self._domains.interfaces(instance)
        found: dict[str, Address] = {}
        for network in {each.attachment.name for each in interfaces.values() if each.attachment.kind == 'network'}:
            found |= self._networks.leases(network, interfaces)
        # On a bridge somebody else's server gives the address: the host sees it when the guest talks to it.
        for source, ask in (('arp', networks.neighbours), ('agent', partial(self._agents.addresses, instance))):
            left = {mac: plug.bridge for mac, plug in interfaces.items() if mac not in found}
            for mac, address in (ask(left) if left else {}).items():
                # dnsmasq puts what it only offers into the table, and an agent may say what it likes: the lease counts.
                kind, name = interfaces[mac].attachment
                if kind != 'network' or not self._networks.gives(name, address):
                    found[mac] = Address(address, source)
        return found

    def plug_in(self) -> None:
        loose, unplugged = networks.find_loose_taps(), dict[str, str]()
        for instance in self._domains.ours() if loose else ():
            for plug in self._domains.interfaces(instance).values():
                # Asked again: libvirt answers for a guest that is starting once its tap is on its bridge.
                if plug.tap not in loose & networks.find_loose_taps():
                    continue
                kind, name = plug.attachment
                try:
                    bridge = (self._networks.own_bridge(name) if kind == 'network' else None) or plug.bridge
                    networks.plug_tap(plug.tap, bridge, plug.isolated)
                    log.warning('instance %s: %s was on no bridge, plugged it into %s', instance, plug.tap, bridge)
                except EcompError as error:
                    unplugged[instance] = f'{UNPLUGGED} ({plug.tap}): {error}. Fix: start {kind} {name} again'
        self._unplugged = unplugged

    def on_change(self, notify: Callable[[str], None], look: Callable[[str], None] | None = None) -> None:
        self._connection.watch(notify, look)
        self._watching.close()
        try:
            self._watching.callback(networks.watch_leases(networks.LEASES, notify))
        except OSError as error:
            log.warning('%s cannot be watched (%s): a lease is seen when next asked for', networks.LEASES, error)

    def metadata_address_present(self) -> bool:
        """Whether the network's bridge has 169.254.169.254."""
        bridge = self.bridge_name()
        return bridge is not None and networks.has_metadata_address(bridge)

    def set_metadata_address(self, present: bool) -> None:
        """Put 169.254.169.254 on the network's bridge, or take it off, for the process that put it there."""
        if (bridge := self.bridge_name()) is not None:
            networks.set_metadata_address(bridge, present)

    def bridge_name(self) -> str | None:
        """The first bridge that libvirt made for one of the networks, None for none: metadata is not for LANs."""
        names = (name for kind, name in self._attachments if kind == 'network')
        return next(filter(None, map(self._networks.own_bridge, names)), None)

    def close(self) -> None:
        self._watching.close()
        self._agents.close()
        self._connection.close()

    @property
    def _consoles(self) -> Path:
        return self._state / 'console'

    def console(self, instance: str) -> Path:
        return self._consoles / f'{instance}.log'

    def _qemu(self) -> User:
        """Who QEMU runs as. UsageError where libvirt knows none."""
        capabilities = self._capabilities()
        if 'qemu' not in capabilities.domain_types:
            raise UsageError(
                f'libvirt knows no QEMU for {xml.ARCHITECTURE} guests: install qemu-system-x86 and restart libvirtd'
            )
        return user(capabilities.qemu_uid, capabilities.qemu_gid)

    def _capabilities(self) -> xml.Capabilities:
        with self._connection.use('asking for its capabilities') as connection:
            return xml.capabilities(connection.getCapabilities())


class Filters:
    """The filters of one libvirt. `control` is host and port of etcd and of placement. Unreachable, EcompError."""

    def __init__(self, connection: Connection, control: Sequence[tuple[str, int]]) -> None:
        self._connection = connection
        self._control = control
        self._found: dict[str, list[IpAddress]] = {}

    def prepare(self) -> str:
        """Define our filters where libvirt does not have them; '', or in words why this host can have none."""
        return self._try('defining network filters', _define_all)

    def missing(self) -> str:
        """What prepare() would say, and nothing is defined."""
        return self._try('looking for network filters', lambda connection: connection.listAllNWFilters())

    def _try(self, doing: str, call: Callable[[libvirt.virConnect], object]) -> str:
        if shutil.which('ebtables', path=search_path()) is None:
            return 'ebtables is not installed'
        with self._connection.use(doing) as connection:
            try:
                call(connection)
            except libvirt.libvirtError as error:
                # One daemon for all says the first; where each driver has its own, and this one is not there, the
                # daemon that was asked passes on that it cannot be reached, and lives.
                missing = error.get_error_code() == libvirt.VIR_ERR_NO_SUPPORT
                if not missing and not (is_broken(error) and connection.isAlive()):
                    raise
                return reason(error)
        return ''

    def services(self) -> list[Service]:
        """The services no guest may reach: etcd and placement, at each address that their names have now.

        A service on this host is listed with all of the host's addresses, for a guest could reach it by any.
        Unreachable where a name never had an address in this process.
        """
        found: dict[Service, None] = {}
        for host, port in self._control:
            there = self._addresses(host)
            if any(map(is_own, there)):
                there = networks.own_addresses()
            found |= {Service(address, port): None for address in there}
        return list(found)

    def _addresses(self, host: str) -> list[IpAddress]:
        try:
            self._found[host] = addresses(host)
        except (OSError, ValueError) as error:
            if host not in self._found:
                name = f'the address of {host}'
                raise Unreachable(f'{name}, which no guest is to reach, cannot be found: {error}', name) from error
            log.warning('%s has no address now (%s): guests are kept from those it had', host, error)
        return self._found[host]


def _define_all(connection: libvirt.virConnect) -> None:
    for name, definition in xml.FILTERS.items():
        with Ignored(libvirt.VIR_ERR_NO_NWFILTER):
            connection.nwfilterLookupByName(name)
            continue
        # Another process that does the same at this moment is no trouble: the uuid is the same, too.
        connection.nwfilterDefineXML(definition)


ACL = 'system.posix_acl_access'
ACL_USER, ACL_GROUP_OBJ, ACL_GROUP, ACL_MASK = 0x02, 0x04, 0x08, 0x10
ENTER, READ_WRITE = 0o1, 0o6

CPUINFO = Path('/proc/cpuinfo')
KVM = Path('/dev/kvm')
# libvirt then holds its own cache of what QEMU can do for outdated whenever it looks.
UNUSABLE_KVM = (
    'cannot be opened by {name}: every start of a guest, and this one of ecompute, takes up to a minute longer, while '
    'libvirt probes QEMU again. chgrp kvm /dev/kvm; chmod 660 /dev/kvm'
)


@dataclass(frozen=True)
class User:
    """The user QEMU runs as: its name, its number, and the numbers of all its groups."""

    name: str
    uid: int
    groups: frozenset[int]


def user(uid: int, gid: int) -> User:
    """The user of this host with these numbers."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return User(str(uid), uid, frozenset({gid}))
    # libvirt's group for QEMU need not be the user's own: it has both.
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return User(entry.pw_name, uid, frozenset({*groups, gid}))


def check_reachable(directory: Path, qemu: User) -> None:
    """UsageError, with the command that helps, for the first directory on the way that QEMU cannot enter.

    One that is not there is made by ecompute, so that it can.
    """
    if (step := blocked(directory, qemu)) is not None:
        raise UsageError(
            f'QEMU runs as {qemu.name}, who cannot enter {step}, on the way to the disks in {directory}: '
            f'setfacl -m u:{qemu.name}:x {shlex.quote(str(step))} (or chmod o+x, or another `state:`)'
        )


def blocked(directory: Path, qemu: User) -> Path | None:
    """The first directory that is there on the way, and that QEMU cannot enter."""
    real = directory.resolve()
    steps = (*reversed(real.parents), real)
    # os.path's is false, and no error, below what we may not enter.
    return next((step for step in steps if os.path.exists(step) and not can(ENTER, step, qemu)), None)


def can(wanted: int, path: Path, qemu: User) -> bool:
    """Whether QEMU may use an existing file or directory in the `wanted` way, ENTER or READ_WRITE.

    By that file's own mode and ACL; the directories above it are not looked at.
    """
    status = path.stat()
    try:
        acl = os.getxattr(path, ACL)
    except OSError:
        # None set, or a file system without them: the mode alone counts.
        acl = b''
    permissions = granted(status.st_mode, status.st_uid, status.st_gid, acl, qemu)
    return permissions & wanted == wanted


def granted(mode: int, owner: int, group: int, acl: bytes, qemu: User) -> int:
    """The rwx bits a user has on a file with this owner, group, mode and ACL (b'' is none): acl(5)'s algorithm."""
    if qemu.uid == 0:
        return 0o7
    if owner == qemu.uid:
        return mode >> 6 & 0o7
    if not acl:
        return mode >> 3 & 0o7 if group in qemu.groups else mode & 0o7
    # A version number, then (tag, permissions, id) for each entry.
    entries = list(struct.iter_unpack('<HHI', acl[4:]))
    mask = next((permissions for tag, permissions, _ in entries if tag == ACL_MASK), 0o7)
    for tag, permissions, number in entries:
        if tag == ACL_USER and number == qemu.uid:
            return permissions & mask
    by_group = [
        permissions
        for tag, permissions, number in entries
        if (tag == ACL_GROUP and number in qemu.groups) or (tag == ACL_GROUP_OBJ and group in qemu.groups)
    ]
    if by_group:
        # One entry must grant all that is wanted, says acl(5); we want one bit, or two that are given together.
        return max(by_group) & mask
    return mode & 0o7


def is_kvm_closed(qemu: User) -> bool:
    """Whether /dev/kvm is there, and QEMU may not open it."""
    return KVM.exists() and not can(READ_WRITE, KVM, qemu)


def explain_no_kvm(qemu: User, domain_types: Collection[str]) -> str:
    """Why guests cannot have KVM here, in words; '' if they can. libvirt offers `domain_types`.

    /dev/kvm alone proves nothing: it may be there where the CPU cannot do it, and a guest then hangs for ever.
    """
    flags = CPUINFO.read_text(errors='replace').split()
    needed = {
        'the CPU has neither vmx nor svm': 'vmx' in flags or 'svm' in flags,
        '/dev/kvm is not there for QEMU to open': KVM.exists() and not is_kvm_closed(qemu),
        'libvirt does not offer it': 'kvm' in domain_types,
    }
    return '; '.join(what for what, there in needed.items() if not there)


def choose_virt_type(wanted: str, no_kvm: str) -> str:
    """`kvm` or `qemu` for a `wanted` auto, kvm or qemu. UsageError where kvm is wanted and `no_kvm` says why not."""
    if wanted == 'qemu' or (wanted == 'auto' and no_kvm):
        return 'qemu'
    if wanted not in ('auto', 'kvm'):
        raise UsageError(f'virt_type {wanted!r} is not known: auto, kvm or qemu')
    if no_kvm:
        raise UsageError(f'virt_type kvm cannot be had: {no_kvm}. Use virt_type: auto or qemu')
    return 'kvm'
