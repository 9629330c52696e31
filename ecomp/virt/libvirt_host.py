"""The Hypervisor of this host's libvirt, its probe, and the network filters for guests."""

from __future__ import annotations

import logging
import os
import pwd
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

from ecomp.addresses import is_own_address, resolve_addresses
from ecomp.errors import BuildFailed, Conflict, EcompError, Problem, Unreachable, UsageError, explain_error
from ecomp.files import get_search_path
from ecomp.model import guest as model
from ecomp.model import health
from ecomp.model.allocation import GIB
from ecomp.model.foreign import ForeignGuest
from ecomp.model.guest import DEFAULT_NETWORKS, Address, Attachment, Guest, GuestSpec, GuestTrouble
from ecomp.model.image import Address as IpAddress
from ecomp.virt import networks, xml
from ecomp.virt.connection import Connection, IgnoredErrors, describe_error, is_broken, libvirt
from ecomp.virt.domains import Domains, apply_filter
from ecomp.virt.networks import Networks
from ecomp.virt.volumes import Seeds, Volumes
from ecomp.virt.xml import ClosedService


def probe_libvirt(
    state: Path, attachments: Sequence[Attachment], uri: str = 'qemu:///system', virt_type: str = 'auto'
) -> health.LibvirtFacts:
    with closing(Connection(uri)) as connection:
        with connection.use('reading its version') as opened:
            version = opened.getLibVersion()
        capabilities, no_qemu = read_capabilities(connection, timeout_seconds=0)
        qemu = find_user(capabilities)
        images, host_networks = state.absolute() / 'images', Networks(connection)
        no_kvm = explain_no_kvm(qemu, capabilities.domain_types)
        why = Filters(connection, ()).explain_missing()
        problems: health.Problems = {
            'qemu': [no_qemu],
            'kvm': [explain_closed_kvm(qemu) or explain_error(partial(choose_virt_type, virt_type, no_kvm))],
            'way': [explain_blocked(images, qemu)],
            'pool': [explain_error(Volumes(connection, images).check)],
            'network': [problem for each in attachments for problem in host_networks.find_problems(each, not why)],
            'filters': [explain_no_filters(why)] if why else [],
        }
        return health.LibvirtFacts(
            version=version,
            library_version=libvirt.getVersion(),
            has_bridge=any(_has_bridge(host_networks, attachment) for attachment in attachments),
            computes=Domains(connection).list_computes(),
            problems=problems,
        )


def _has_bridge(host_networks: Networks, attachment: Attachment) -> bool:
    with suppress(EcompError):  # a network that is missing, or without a bridge
        return attachment.kind == 'network' and host_networks.find_own_bridge(attachment.name) is not None
    return False


log = logging.getLogger(__name__)

EMULATOR = 'qemu-system-x86_64'
# libvirt's probe starts QEMU, which the kernel may kill, or a busy machine may delay beyond libvirt's own limit.
PROBE_SECONDS = 120.0
PROBE_PAUSE_SECONDS = 5.0
INSTALL_QEMU = 'apt-get install qemu-system-x86; systemctl restart libvirtd'
NO_QEMU = Problem(f'libvirt has no QEMU for {xml.ARCHITECTURE} guests', INSTALL_QEMU)


def read_capabilities(connection: Connection, timeout_seconds: float) -> tuple[xml.Capabilities, Problem | None]:
    """Read libvirt's capabilities, and why they lack QEMU even after `timeout_seconds`."""
    deadline = time.monotonic() + timeout_seconds
    while True:
        with connection.use('reading its capabilities') as opened:
            capabilities = xml.parse_capabilities(opened.getCapabilities())
            if 'qemu' in capabilities.domain_types:
                return capabilities, None
            emulator = shutil.which(EMULATOR, path=get_search_path())
            if emulator is None:
                return capabilities, NO_QEMU
            why = _explain_failed_probe(opened, emulator)
        if time.monotonic() >= deadline:
            return capabilities, Problem(f'libvirt cannot use {emulator}: {why}', 'systemctl restart libvirtd')
        log.warning('libvirt cannot use %s: %s; asking it again in %.0f s', emulator, why, PROBE_PAUSE_SECONDS)
        time.sleep(PROBE_PAUSE_SECONDS)


def _explain_failed_probe(connection: libvirt.virConnect, emulator: str) -> str:
    # getCapabilities() leaves out a QEMU whose probe failed. It does not tell why.
    try:
        connection.getDomainCapabilities(emulator, xml.ARCHITECTURE, xml.MACHINE, 'qemu')
    except libvirt.libvirtError as error:
        if is_broken(error):
            raise
        return describe_error(error)
    return 'its probe failed, and succeeded when it was repeated'


def explain_no_filters(why: str) -> Problem:
    problem = f'libvirt cannot filter what guests send ({why}): a guest can take the address of another guest'
    cure = 'apt-get install iptables libvirt-daemon-system; systemctl restart libvirtd'
    return Problem(f'{problem}, and reach etcd and placement', cure)


class Libvirt:
    """The Hypervisor for the libvirt at `uri`, with all files below the directory `state`.

    Args:
        attachments: networks that prepare() starts. A guest's own networks are in its spec.
        control_endpoints: host and port of etcd and of placement, which guests cannot reach.
        has_filters: prepare(), in any process, found filters to work. Then no guest starts without them.
        hold_addresses: guests on bridges may use only the address that DHCP gives them.
    """

    def __init__(
        self,
        state: Path,
        attachments: Sequence[Attachment] = DEFAULT_NETWORKS,
        uri: str = 'qemu:///system',
        control_endpoints: Sequence[tuple[str, int]] = (),
        has_filters: bool = False,
        hold_addresses: bool = False,
    ) -> None:
        self._state, self._attachments = state.absolute(), attachments
        self._connection = Connection(uri)
        self._domains, self._networks = Domains(self._connection), Networks(self._connection)
        self._filters = Filters(self._connection, control_endpoints)
        self.has_filters, self._hold_addresses = has_filters, hold_addresses
        self._volumes = Volumes(self._connection, self._state / 'images')
        self._seeds = Seeds(self._state / 'seeds')
        self._console_directory = self._state / 'console'
        self._is_probed = False
        self._unplugged: dict[str, GuestTrouble] = {}
        self._unfiltered: dict[str, GuestTrouble] = {}
        self._lease_watch = ExitStack()
        # Operations that one part implements alone.
        self.shutdown, self.list_missing_bases = self._domains.shutdown, self._volumes.list_missing_bases
        self.switch_off = partial(self._domains.force_off, undefine=False)
        self.destroy = partial(self._domains.force_off, undefine=True)
        self.disable_autostart, self.set_adoption = self._domains.disable_autostart, self._domains.set_adoption
        self.is_running, self.list_computes = self._domains.is_guest_running, self._domains.list_computes
        self.read_usage = self._domains.read_usage
        self.reserve_address, self.list_reservations = self._networks.reserve_address, self._networks.list_reservations
        self.list_seeds = self._seeds.list_instances

    def check(self) -> None:
        """Raise UsageError if this host cannot run guests as configured, without changing it."""
        started_at, is_first, self._is_probed = time.monotonic(), not self._is_probed, True
        if is_first:  # libvirt probes every installed QEMU for its first client
            log.info('asking libvirt for the capabilities of QEMU: this takes seconds, or a minute on a busy machine')
        qemu = find_user(self._read_capabilities())
        if is_first:
            log.info('libvirt answered after %.1f s', time.monotonic() - started_at)
        if blocked := explain_blocked(self._volumes.directory, qemu):
            raise UsageError(str(blocked))
        has_filters = not self._filters.explain_missing()
        for number, attachment in enumerate(self._attachments):
            self._networks.check(attachment)
            build_problem, address_problem = self._networks.explain_unfit(attachment, has_filters)
            # Only the first interface's address is waited for.
            if build_problem or (address_problem and number == 0):
                raise UsageError(str(build_problem or address_problem))
        self._volumes.check()

    def prepare(self) -> None:
        self.check()
        directory_modes = dict.fromkeys((self._state, self._volumes.directory, self._seeds.directory), 0o711)
        for directory, mode in {**directory_modes, self._console_directory: 0o700}.items():
            try:
                directory.mkdir(parents=True, exist_ok=True)
                directory.chmod(mode)
            except OSError as error:
                problem = f'{directory} cannot be created or made accessible: {error.strerror}'
                raise UsageError(f'{problem}. Fix: correct `state:`, or repair that directory') from error
        qemu = find_user(self._read_capabilities())
        if blocked := explain_blocked(self._volumes.directory, qemu):  # again: a new directory may have a default ACL
            raise UsageError(str(blocked))
        if closed := explain_closed_kvm(qemu):
            log.warning('%s', closed)
        for attachment in self._attachments:
            self._networks.prepare(attachment)
        self._volumes.prepare()
        problem = self._filters.prepare()
        self.has_filters = not problem
        if problem:
            log.warning('%s', explain_no_filters(problem))
        # libvirt's first probe of QEMU takes seconds: do it here, not when the first guest starts.
        with self._connection.use('probing QEMU') as connection:
            connection.getDomainCapabilities(None, xml.ARCHITECTURE, xml.MACHINE, self.choose_virt_type('auto'))

    def choose_virt_type(self, setting: str) -> str:
        capabilities = self._read_capabilities()
        return choose_virt_type(setting, explain_no_kvm(find_user(capabilities), capabilities.domain_types))

    def read_cpu_features(self, virt_type: str) -> Set[str]:
        target = (xml.ARCHITECTURE, xml.MACHINE, virt_type)
        try:
            with self._connection.use('reading the CPU of guests') as connection:
                cpu = xml.parse_guest_cpu(connection.getDomainCapabilities(None, *target))
                if cpu is None:
                    return frozenset()
                expand = libvirt.VIR_CONNECT_BASELINE_CPU_EXPAND_FEATURES
                expanded = connection.baselineHypervisorCPU(None, *target, [xml.make_cpu_xml(cpu.model)], expand)
        except Unreachable:
            raise
        except EcompError as error:
            log.warning('no CPU traits are published to placement: %s', error)
            return frozenset()
        return (xml.parse_cpu_features(expanded) | cpu.extra_features) - cpu.missing_features

    def get_image_directory(self) -> Path:
        return self._volumes.directory

    def list_guests(self) -> Mapping[str, Guest]:
        # List disks first: a guest removed in between then seems to have a disk, not to lack one.
        disks = self._volumes.list_instances()
        guests = {uuid: Guest(uuid, None, defined=False, running=False, disk=True) for uuid in disks}
        for instance, guest_domain in self._domains.list_guests().items():
            if guest_domain.is_adopted:
                guests[instance] = replace(guest_domain, disk=True)
                continue
            size = {**guest_domain.size, 'DISK_GB': self._volumes.measure_disk_gb(instance)}
            guest = replace(guest_domain, disk=instance in disks, size=size)
            guest = guest.with_trouble(self._unplugged.get(instance))
            guests[instance] = guest.with_trouble(self._unfiltered.get(instance))
        return guests

    def list_foreign(self, instance: str = '') -> Mapping[str, ForeignGuest]:
        return self._domains.list_foreign(self._volumes.directory, instance)

    def list_open_dhcp(self) -> Set[str]:
        names = {name for kind, name in self._attachments if kind == 'network'}
        return {name for name in names if self._networks.read_dhcp(name).is_open}

    def find_troubles(self) -> list[str]:
        found = [*map(self._networks.find_trouble, dict.fromkeys(self._attachments)), *self._volumes.find_troubles()]
        return list(filter(None, found))

    def list_disk_users(self, instance: str) -> Set[str]:
        return self._domains.list_disk_users(str(self._volumes.get_path(instance)))

    def create_disk(self, spec: GuestSpec) -> None:
        # Without a disk no domain runs on it, so the query to libvirt is skipped.
        if self._volumes.get_path(spec.instance).exists() and self._domains.is_domain_running(spec.instance):
            raise BuildFailed('disk', f'domain {spec.instance} is running: its disk is not replaced')
        self._volumes.create(spec)

    def create_seed(self, instance: str, files: Mapping[str, bytes]) -> None:
        if self._domains.is_domain_running(instance):
            raise BuildFailed('disk', f'domain {instance} is running: its seed is not replaced')
        self._seeds.create(instance, files)

    def delete_seed(self, instance: str) -> None:
        if self._domains.is_domain_running(instance):
            raise Conflict(f'domain {instance} is running: its seed is not removed')
        self._seeds.delete(instance)

    def start(self, spec: GuestSpec) -> None:
        seed = str(self._seeds.get_path(spec.instance)) if spec.seed is not None else None
        disk, console = str(self._volumes.get_path(spec.instance)), str(self.get_console_path(spec.instance))
        # Prepared each time: filters may have been removed, or missing packages installed.
        problem = self._filters.prepare()
        if problem and self.has_filters:
            lost = f'libvirt can no longer filter what guests send ({problem})'
            fix = 'systemctl restart libvirtd; or restart ecompute, which then starts guests without filters'
            message = f'{lost}: ecompute starts no guest until libvirt can again. Fix: {fix}'
            raise Unreachable(message, "libvirt's network filters")
        control = None if problem else self._filters.resolve_services()
        served, hold = [each for each in spec.networks if each.kind == 'network'], self._hold_addresses
        no_ipv6 = [each for each in served if not self._networks.read_dhcp(each.name).has_ipv6]
        description = xml.make_domain_xml(
            spec, disk, console, seed=seed, blocked_services=control, without_ipv6=no_ipv6, hold_addresses=hold
        )
        self._domains.start(spec, description)

    def start_existing(self, instance: str, compute: str) -> None:
        self._filters.prepare()
        self._domains.start_existing(instance, compute)

    def resize(self, spec: GuestSpec) -> None:
        if spec.disk_gb is not None and spec.disk_gb > self._volumes.measure_disk_gb(spec.instance):
            if snapshots := self._volumes.list_snapshots(spec.instance):
                raise BuildFailed('disk', f'its disk has a snapshot, {snapshots[0]}, and cannot grow')
            path = str(self._volumes.get_path(spec.instance))
            if not self._domains.grow_disk(spec.instance, spec.compute, path, spec.disk_gb * GIB):
                self._volumes.grow(spec.instance, spec.disk_gb * GIB)
        self._domains.resize(spec)

    def delete_disk(self, instance: str) -> None:
        paths = [str(files.get_path(instance)) for files in (self._volumes, self._seeds)]
        self._domains.require_unused_files(instance, paths)
        self._seeds.delete(instance)  # first: the overlay shows that the instance exists here
        # `virsh snapshot-create-as --disk-only` makes them. A domain that still names one was made outside ecompute.
        for path in self._volumes.list_snapshots(instance):
            if not self._domains.list_disk_users(str(path)) - {instance}:  # its own domain, before a rebuild
                path.unlink()
        self._volumes.delete(instance)
        # virtlogd rotates the log: older files are .log.0 and so on.
        for path in self._console_directory.glob(f'{instance}.log*'):
            path.unlink(missing_ok=True)

    def release_addresses(self, instance: str) -> None:
        self._networks.release_addresses(instance)
        self._domains.forget_agent(instance)

    def find_addresses(self, instance: str) -> Mapping[str, Address]:
        definition = self._domains.read_definition(instance)
        interfaces = xml.parse_interfaces(definition)
        known_addresses: dict[str, Address] = {}
        for network in {link.attachment.name for link in interfaces.values() if link.attachment.kind == 'network'}:
            known_addresses |= self._networks.read_leases(network, interfaces)
        # On a bridge another DHCP server assigns the address: the host sees it when the guest talks to it.
        sources: dict[str, Callable[[Mapping[str, str]], Mapping[str, str]]] = {'arp': networks.read_neighbours}
        if xml.has_agent(definition):
            sources['agent'] = partial(self._domains.query_agent, instance)
        for source, find in sources.items():
            missing = {mac: port.bridge for mac, port in interfaces.items() if mac not in known_addresses}
            for mac, address in (find(missing) if missing else {}).items():
                # dnsmasq adds mere offers to the ARP table, and an agent may report anything: only the lease counts.
                kind, name = interfaces[mac].attachment
                if kind != 'network' or not self._networks.read_dhcp(name).can_give(IPv4Address(address)):
                    known_addresses[mac] = Address(address, source)
        return known_addresses

    def replug_interfaces(self) -> None:
        unplugged: dict[str, GuestTrouble] = {}
        for instance, link in self._find_links(networks.find_loose_taps):
            kind, name = link.attachment
            try:
                bridge = (self._networks.find_own_bridge(name) if kind == 'network' else None) or link.bridge
                networks.plug_tap(link.tap, bridge, link.is_isolated)
                log.warning('instance %s: %s was on no bridge: plugged it into %s', instance, link.tap, bridge)
            except EcompError as error:
                fix = f'Fix: start {kind} {name} again'
                unplugged[instance] = GuestTrouble(model.UNPLUGGED, f' ({link.tap}): {error}. {fix}')
        # With `hold_addresses` libvirt sets an interface down if it cannot apply the address that it has learned, and
        # learns no other. To set it up again is not enough.
        for instance, link in self._find_links(networks.find_downed_taps):
            down = GuestTrouble(model.INTERFACE_DOWN, f' ({link.tap}). Fix: stop the guest, and start it')
            unplugged.setdefault(instance, down)
        self._unplugged = unplugged

    def restore_filters(self) -> None:
        unfiltered: dict[str, GuestTrouble] = {}
        for instance, link in self._find_links(networks.find_unfiltered_taps) if self.has_filters else ():
            try:
                if link.filter_binding:
                    self._filters.restore(link)
                    log.warning('instance %s: the filter rules of %s were gone: restored them', instance, link.tap)
            except EcompError as error:
                fix = 'Fix: systemctl reload libvirtd'
                unfiltered[instance] = GuestTrouble(model.UNFILTERED, f' ({link.tap}): {error}. {fix}')
        self._unfiltered = unfiltered

    def _find_links(self, find_taps: Callable[[], Set[str]]) -> Iterator[tuple[str, xml.InterfaceLink]]:
        """Yield (instance, interface) of our guests for the taps that `find_taps` returns."""
        taps = find_taps()
        guests = self._domains.list_guests() if taps else {}
        for instance in (name for name, guest in guests.items() if not guest.is_adopted):
            for link in xml.parse_interfaces(self._domains.read_definition(instance)).values():
                # List them again: libvirt describes a starting guest only after its tap is on its bridge.
                if link.tap in taps and link.tap in find_taps():
                    yield instance, link

    def watch_changes(self, notify: Callable[[str], None], on_network: Callable[[str], None] | None = None) -> None:
        self._connection.watch(notify, on_network)
        self._lease_watch.close()
        directory = networks.LEASES_DIRECTORY
        try:
            self._lease_watch.callback(networks.watch_leases(directory, notify))
        except OSError as error:
            log.warning('%s cannot be watched (%s): a new lease is noticed at the next check', directory, error)

    def has_metadata_address(self) -> bool:
        bridge = self.find_bridge()
        return bridge is not None and networks.has_metadata_address(bridge)

    def set_metadata_address(self, present: bool) -> None:
        if (bridge := self.find_bridge()) is not None:
            networks.set_metadata_address(bridge, present)

    def find_bridge(self) -> str | None:
        """Return the first bridge that libvirt made for one of our networks, or None."""
        names = (name for kind, name in self._attachments if kind == 'network')
        return next(filter(None, map(self._networks.find_own_bridge, names)), None)

    def close(self) -> None:
        self._lease_watch.close()
        self._connection.close()

    def get_console_path(self, instance: str) -> Path:
        return self._console_directory / f'{instance}.log'

    def _read_capabilities(self) -> xml.Capabilities:
        capabilities, problem = read_capabilities(self._connection, PROBE_SECONDS)
        if problem:
            raise UsageError(str(problem))
        return capabilities


class Filters:
    def __init__(self, connection: Connection, control_endpoints: Sequence[tuple[str, int]]) -> None:
        self._connection, self._control_endpoints = connection, control_endpoints
        self._last_addresses: dict[str, list[IpAddress]] = {}

    def prepare(self) -> str:
        """Define our filters where missing, and return '' or why this host cannot have any."""
        return self._try_operation('defining network filters', _define_filters)

    def explain_missing(self) -> str:
        return self._try_operation('looking for network filters', lambda connection: connection.listAllNWFilters())

    def restore(self, link: xml.InterfaceLink) -> None:
        """Apply the filter of a guest's interface again, keeping an address that libvirt learned."""
        with self._connection.use(f'restoring the filter of {link.tap}') as connection:
            _delete_binding(connection, link.tap)
            apply = partial(connection.nwfilterBindingCreateXML, link.filter_binding)
            apply_filter(apply, f'the filter of {link.tap} is applied')
            # Kept for a tap that was just removed, the binding would prevent the start of a guest with that tap.
            if not (networks.INTERFACES_DIRECTORY / link.tap).exists():
                _delete_binding(connection, link.tap)

    def _try_operation(self, activity: str, operation: Callable[[libvirt.virConnect], object]) -> str:
        """Call `operation`, and return '' or why this host cannot have filters."""
        if shutil.which('ebtables', path=get_search_path()) is None:
            return 'ebtables is not installed'
        with self._connection.use(activity) as connection:
            try:
                operation(connection)
            except libvirt.libvirtError as error:
                # NO_SUPPORT: libvirtd has no nwfilter driver. With modular daemons and no virtnwfilterd, our daemon
                # reports a broken connection to it, while our own connection stays alive.
                is_unsupported = error.get_error_code() == libvirt.VIR_ERR_NO_SUPPORT
                if not is_unsupported and not (is_broken(error) and connection.isAlive()):
                    raise
                return describe_error(error)
        return ''

    def resolve_services(self) -> list[ClosedService]:
        """List etcd's and placement's services at their last known addresses, or raise Unreachable."""
        services: dict[ClosedService, None] = {}
        for host, port in self._control_endpoints:
            host_addresses = self._resolve(host)
            # A guest could reach a service of this host at any address of the host.
            if any(map(is_own_address, host_addresses)):
                host_addresses = networks.list_own_addresses()
            services |= {ClosedService(address, port): None for address in host_addresses}
        return list(services)

    def _resolve(self, host: str) -> list[IpAddress]:
        try:
            self._last_addresses[host] = resolve_addresses(host)
        except (OSError, ValueError) as error:
            if host not in self._last_addresses:
                name = f'the address of {host}'
                raise Unreachable(f'{name}, which guests must not reach, cannot be resolved: {error}', name) from error
            log.warning('%s cannot be resolved (%s): its last known addresses stay blocked for guests', host, error)
        return self._last_addresses[host]


def _delete_binding(connection: libvirt.virConnect, tap: str) -> None:
    with IgnoredErrors(libvirt.VIR_ERR_NO_NWFILTER_BINDING):
        connection.nwfilterBindingLookupByPortDev(tap).delete()


def _define_filters(connection: libvirt.virConnect) -> None:
    for name, definition in xml.FILTERS.items():
        with IgnoredErrors(libvirt.VIR_ERR_NO_NWFILTER):
            connection.nwfilterLookupByName(name)
            continue
        # Another process may do the same concurrently: harmless, because the uuid is the same.
        connection.nwfilterDefineXML(definition)


# libvirt grants QEMU's user only the disks, not the directories above them or KVM.
# What test(1) is asked about a path: whether a directory can be entered, whether a device can be used.
ENTER = ('-x',)
READ_WRITE = ('-r', '-w')

CPUINFO = Path('/proc/cpuinfo')
KVM_DEVICE = Path('/dev/kvm')


@dataclass(frozen=True)
class QemuUser:
    name: str
    uid: int
    groups: frozenset[int]  # the gids of all its groups


def find_user(capabilities: xml.Capabilities) -> QemuUser:
    uid, gid = capabilities.qemu_uid, capabilities.qemu_gid
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return QemuUser(str(uid), uid, frozenset({gid}))
    # libvirt may run QEMU in another group than the user's own: it then has both.
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return QemuUser(entry.pw_name, uid, frozenset({*groups, gid}))


def explain_blocked(directory: Path, qemu: QemuUser) -> Problem | None:
    """Return why QEMU cannot enter a directory on the path to the disks, or None."""
    real = directory.resolve()
    for step in (*reversed(real.parents), real):
        # ecompute creates missing ones accessible. Unlike Path.exists(), this is False below what we may not enter.
        if os.path.exists(step) and not has_access(ENTER, step, qemu):
            quoted = shlex.quote(str(step))
            cure = f'setfacl -m u:{qemu.name}:x {quoted} || chmod o+x {quoted}'
            return Problem(f'QEMU runs as {qemu.name}, which cannot enter {step} above the disks', cure)
    return None


def has_access(tests: Iterable[str], path: Path, qemu: QemuUser) -> bool:
    """Return whether QEMU passes `tests` by the path's own mode and ACL, or True without root."""
    group, *groups = qemu.groups
    handle = os.open(path, os.O_PATH)
    try:
        # Named by its descriptor, so that the directories above it do not count.
        subject = f'/proc/self/fd/{handle}'
        with suppress(PermissionError):  # only root can become another user
            as_qemu: Any = {'user': qemu.uid, 'group': group, 'extra_groups': groups, 'pass_fds': [handle]}
            for test in tests:
                if subprocess.run(['/usr/bin/test', test, subject], check=False, **as_qemu).returncode:
                    return False
        return True
    finally:
        os.close(handle)


def explain_closed_kvm(qemu: QemuUser) -> Problem | None:
    if not KVM_DEVICE.exists() or has_access(READ_WRITE, KVM_DEVICE, qemu):
        return None
    # libvirt then considers its cache of QEMU's capabilities outdated on every use.
    effect = 'guests are emulated, and each start of a guest or of ecompute takes up to a minute longer'
    return Problem(f'{qemu.name} cannot open /dev/kvm: {effect}', 'chgrp kvm /dev/kvm; chmod 660 /dev/kvm')


def explain_no_kvm(qemu: QemuUser, domain_types: Collection[str]) -> str:
    # /dev/kvm alone proves nothing: it may exist although the CPU cannot virtualize, and guests then hang.
    flags = CPUINFO.read_text(errors='replace').split()
    needed = {
        'the CPU has neither vmx nor svm': 'vmx' in flags or 'svm' in flags,
        'QEMU cannot open /dev/kvm': KVM_DEVICE.exists() and not explain_closed_kvm(qemu),
        'libvirt does not offer KVM': 'kvm' in domain_types,
    }
    return '; '.join(problem for problem, is_met in needed.items() if not is_met)


def choose_virt_type(setting: str, no_kvm: str) -> str:
    if setting == 'qemu' or (setting == 'auto' and no_kvm):
        return 'qemu'
    if setting not in ('auto', 'kvm'):
        raise UsageError(f'virt_type: must be auto, kvm or qemu, not {setting!r}')
    if no_kvm:
        raise UsageError(f'virt_type: kvm is not available: {no_kvm}. Fix: set `virt_type: auto` in compute.yaml')
    return 'kvm'
