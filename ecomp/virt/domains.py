"""Domains with our owner mark, and adopted ones, of which only mark and power change."""

from __future__ import annotations

import logging
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, TypeVar

from ecomp.errors import BuildFailed, Conflict, EcompError
from ecomp.failpoints import failpoint
from ecomp.metrics import TALLY
from ecomp.model.allocation import GIB
from ecomp.model.backoff import Backoff
from ecomp.model.foreign import ForeignGuest
from ecomp.model.guest import CRASHED, NO_SPACE, PAUSED, UNDEFINED, Guest, GuestSpec, GuestTrouble, Usage
from ecomp.virt import xml
from ecomp.virt.connection import Connection, IgnoredErrors, describe_error, is_broken, libvirt, raise_build_failed

log = logging.getLogger(__name__)

# libvirt runs ebtables for each rule of a guest's filter. ebtables-nft fails with "RULE_DELETE failed" if another rule
# of the host changes while it runs, for example because Docker starts a container. Then the guest does not start.
MAX_START_TRIES = 5
FILTER_ERROR_DOMAINS = frozenset({libvirt.VIR_FROM_FIREWALL, libvirt.VIR_FROM_NWFILTER})

# Seconds that a guest agent has for each answer; libvirt's default is to wait forever.
AGENT_TIMEOUT_SECONDS = 1


def pick_addresses(answer: Mapping[str, Any], macs: Iterable[str]) -> dict[str, str]:
    """Return the first usable IPv4 address of each MAC in virDomainInterfaceAddresses' answer."""
    wanted_macs = set(macs)
    addresses: dict[str, str] = {}
    for interface in answer.values():
        mac = str(interface['hwaddr'] or '').lower()
        usable = [str(entry['addr']) for entry in interface['addrs'] or () if _is_reachable(str(entry['addr']))]
        if mac in wanted_macs and usable:
            addresses.setdefault(mac, usable[0])
    return addresses


def _is_reachable(text: str) -> bool:
    try:
        address = IPv4Address(text)
    except ValueError:
        return False
    is_unreachable = address.is_loopback or address.is_link_local or address.is_multicast
    return not is_unreachable and not address.is_reserved and not address.is_unspecified


Result = TypeVar('Result')

# Seconds a domain has to end; then EcompError, and the caller tries again.
DESTROY_TIMEOUT_SECONDS = 60.0
# Seconds that a QEMU has to accept a press of the power button, and all QEMUs to tell their usage.
QEMU_TIMEOUT_SECONDS = 5.0
# Seconds between two checks of a domain that is to end. The delay doubles from the first to the second value.
RETRY_DELAYS_SECONDS = 0.05, 2.0

# What these flags remove prevents undefining.
UNDEFINE_FLAGS = libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
UNDEFINE_FLAGS |= libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA
RETRYABLE_ERRORS = (
    # "Already exists", "already off": the state is read again and may be the intended one.
    *(libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID),
    # QEMU did not end in time, but may still end.
    *(libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_ERR_INTERNAL_ERROR),
    *(libvirt.VIR_ERR_OPERATION_TIMEOUT, libvirt.VIR_ERR_OPERATION_FAILED),
)
# For other reasons libvirt itself pauses a guest, and soon resumes it.
EXTERNAL_PAUSE_REASONS = libvirt.VIR_DOMAIN_PAUSED_USER, libvirt.VIR_DOMAIN_PAUSED_FROM_SNAPSHOT

USAGE_STATISTICS = libvirt.VIR_DOMAIN_STATS_VCPU | libvirt.VIR_DOMAIN_STATS_BALLOON | libvirt.VIR_DOMAIN_STATS_BLOCK
USAGE_STATISTICS |= libvirt.VIR_DOMAIN_STATS_CPU_TOTAL
# Do not wait for a job on a domain that another call holds.
USAGE_FLAGS = libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_ACTIVE | libvirt.VIR_CONNECT_GET_ALL_DOMAINS_STATS_NOWAIT


def parse_usage(statistics: Mapping[str, int]) -> Usage:
    times = [statistics.get(f'vcpu.{number}.time') for number in range(statistics['vcpu.current'])]
    # The vCPUs of an emulated guest, which may share one thread, have no times: take the time of its whole QEMU.
    vcpu_ns = statistics.get('cpu.time') if None in times else sum(filter(None, times))
    disks = range(statistics['block.count'])
    traffic = (sum(statistics[f'block.{number}.{way}.bytes'] for number in disks) for way in ('rd', 'wr'))
    return Usage(None if vcpu_ns is None else vcpu_ns / 1e9, statistics['balloon.rss'] * 1024, *traffic)


class Domains:
    """The domains of one libvirt. Hypervisor describes the methods of the same names."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._usage: Future[dict[str, Usage]] | None = None
        self._agent_answers: dict[str, Future[Mapping[str, Any]]] = {}

    def list_guests(self) -> Mapping[str, Guest]:
        guests = {}
        with self._connection.use('listing domains') as connection:
            for domain in connection.listAllDomains():
                with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):  # removed after it was listed
                    owner, rebuilt = _read_mark(domain, xml.MARK_NAMESPACE)
                    if compute := owner or _read_adopter(domain):
                        instance = domain.UUIDString()
                        _, max_kib, now_kib, vcpus, _ = domain.info()
                        # libvirt starts a guest with whole MiB.
                        size = {'VCPU': vcpus, 'MEMORY_MB': -(-max_kib // 1024)}
                        size |= {'MEMORY_MB now': now_kib // 1024} if owner else {}
                        is_defined, is_active = bool(domain.isPersistent()), bool(domain.isActive())
                        presence, troubles = (is_defined, is_active, False), _find_troubles(*domain.state())
                        guests[instance] = Guest(instance, compute, *presence, troubles, size, owner is None, rebuilt)
        return guests

    def list_foreign(self, pool: Path, instance: str = '') -> dict[str, ForeignGuest]:
        foreign = {}
        with self._connection.use('listing the domains that ecomp did not create') as connection:
            for domain in _find_domains(connection, instance) if instance else connection.listAllDomains():
                with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):  # removed after it was listed
                    if _read_compute(domain) is None:
                        foreign[domain.UUIDString()] = _describe_foreign(domain, pool)
        return foreign

    def set_adoption(self, instance: str, compute: str | None) -> None:
        with self._connection.use(f'marking domain {instance}') as connection:
            with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):
                domain = connection.lookupByUUIDString(instance)
                if _read_compute(domain) is not None:
                    raise Conflict(f'domain {instance} was created by ecompute: it is not adopted')
                mark = None if compute is None else xml.make_adoption_mark(instance, compute)
                flags = libvirt.VIR_DOMAIN_AFFECT_CONFIG if domain.isPersistent() else 0
                flags |= libvirt.VIR_DOMAIN_AFFECT_LIVE if domain.isActive() else 0
                element = libvirt.VIR_DOMAIN_METADATA_ELEMENT
                domain.setMetadata(element, mark, 'ecomp-adopted', xml.ADOPTION_NAMESPACE, flags)
                return
            if compute is not None:
                raise BuildFailed('started', 'its domain is gone')

    def read_usage(self) -> dict[str, Usage]:
        """Return the usage of all running domains, ours or not, that libvirt is not busy with."""
        if self._usage is None or self._usage.done():  # concurrent callers share one call
            self._usage = self._call_aside(_read_usage)
        try:
            return self._usage.result(QEMU_TIMEOUT_SECONDS)
        except TimeoutError as error:
            raise EcompError('libvirt does not return the usage of guests; a QEMU process may be frozen') from error

    def disable_autostart(self) -> None:
        with self._connection.use('removing autostart') as connection:
            for domain in connection.listAllDomains(libvirt.VIR_CONNECT_LIST_DOMAINS_AUTOSTART):
                with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):  # removed after it was listed
                    if _read_compute(domain):
                        domain.setAutostart(False)
                        log.warning('instance %s: removed the autostart of its domain', domain.UUIDString())

    def list_computes(self) -> frozenset[str]:
        return frozenset(each.compute for each in self.list_guests().values() if each.compute and not each.is_adopted)

    def is_guest_running(self, instance: str) -> bool:
        """Return whether the guest, of any compute, runs or is paused, without waiting for a start."""
        use = self._connection.use(f'looking for domain {instance}')
        with use as connection, IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):
            domain = connection.lookupByUUIDString(instance)
            return _read_compute(domain) is not None and bool(domain.isActive())
        return False

    def list_disk_users(self, disk: str) -> Set[str]:
        names = set()
        with self._connection.use(f'looking for the domains with {disk}') as connection:
            for domain in connection.listAllDomains():
                with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):
                    if disk in _read_disk_paths(domain):
                        names.add(domain.name())
        return names

    def is_domain_running(self, instance: str) -> bool:
        with self._connection.use(f'looking for domain {instance}') as connection:
            return any(_is_active(domain) for domain in _find_domains(connection, instance))

    def require_unused_files(self, instance: str, files: Collection[str]) -> None:
        """Raise Conflict if our domain runs, or a foreign one of this name or uuid uses `files`."""
        with self._connection.use(f'looking for domain {instance}') as connection:
            for domain in _find_domains(connection, instance):
                label = f'{domain.name()} ({domain.UUIDString()})'
                if _read_compute(domain) and domain.UUIDString() == instance:
                    if domain.isActive():
                        raise Conflict(f'domain {instance} is running: its disk is not removed')
                elif used := _read_disk_paths(domain) & set(files):
                    raise Conflict(f'domain {label}, not created by ecompute, uses {min(used)}: the file is kept')

    def start(self, spec: GuestSpec, description: str) -> None:
        with self._connection.use(f'starting domain {spec.instance}') as connection, raise_build_failed('started'):
            domain = _find_own_domain(connection, spec.instance, spec.compute)
            if domain is not None:
                if domain.isActive():
                    return
                _undefine(domain)  # left from an interrupted build
            domain = connection.defineXML(description)
            failpoint('domain-defined')
            _create(domain)

    def resize(self, spec: GuestSpec) -> None:
        """Change the definition of a domain, which keeps whatever else was changed in it."""
        use = self._connection.use(f'changing domain {spec.instance}')
        with use as connection, raise_build_failed('started'):
            domain = _find_own_domain(connection, spec.instance, spec.compute)
            if domain is None or not domain.isPersistent():
                raise BuildFailed('started', 'its domain is gone' if domain is None else UNDEFINED)
            config, limit = libvirt.VIR_DOMAIN_AFFECT_CONFIG, libvirt.VIR_DOMAIN_VCPU_MAXIMUM
            # Neither number may exceed the maximum at any time.
            if spec.vcpus < domain.vcpusFlags(config):
                domain.setVcpusFlags(spec.vcpus, config)
            domain.setVcpusFlags(spec.vcpus, config | limit)
            domain.setVcpusFlags(spec.vcpus, config)
            domain.setMemoryFlags(spec.memory_mb * 1024, config | libvirt.VIR_DOMAIN_MEM_MAXIMUM)
            domain.setMemoryFlags(spec.memory_mb * 1024, config)

    def grow_disk(self, instance: str, compute: str, path: str, size: int) -> bool:
        """Let the disk of a running guest grow to `size` bytes, or return False if it is off."""
        use = self._connection.use(f'resizing the disk of {instance}')
        with use as connection, raise_build_failed('disk'):
            domain = _find_own_domain(connection, instance, compute)
            if domain is None or not domain.isActive():
                return False
            domain.blockResize(path, size, libvirt.VIR_DOMAIN_BLOCK_RESIZE_BYTES)
            return True

    def start_existing(self, instance: str, compute: str) -> None:
        with self._connection.use(f'starting domain {instance}') as connection, raise_build_failed('started'):
            domain = _find_own_domain(connection, instance, compute, or_adopted=True)
            if domain is None:
                raise BuildFailed('started', 'its domain is gone')
            if not domain.isActive():
                _create(domain)

    def shutdown(self, instance: str, compute: str) -> None:
        # A QEMU that is silent or just ending is no error.
        # A thread that blocks ends with its QEMU, which is forced off when the shutdown times out.
        pressed = self._call_aside(lambda connection: _press_power_button(connection, instance, compute))
        try:
            pressed.result(QEMU_TIMEOUT_SECONDS)
        except TimeoutError:
            self.is_domain_running(instance)  # raises Unreachable if libvirtd does not answer, either

    def _call_aside(self, call: Callable[[Connection], Result]) -> Future[Result]:
        """Make the call in a thread of its own, with a connection of its own."""
        result: Future[Result] = Future()

        def run() -> None:
            # libvirt waits forever for a frozen QEMU, and serves only a few calls of one connection concurrently.
            own_connection = Connection(self._connection.uri)
            try:
                result.set_result(call(own_connection))
            except Exception as error:  # delivered to the caller by result.result()
                result.set_exception(error)
            finally:
                own_connection.close()

        threading.Thread(target=run, name='libvirt-ask', daemon=True).start()
        return result

    def force_off(self, instance: str, compute: str, undefine: bool) -> None:
        """Force our domain off or, with `undefine`, remove it unless foreign, and wait for that."""
        failure, activity = 'libvirt reports no error', 'destroying' if undefine else 'switching off'
        deadline, backoff = time.monotonic() + DESTROY_TIMEOUT_SECONDS, Backoff(*RETRY_DELAYS_SECONDS)
        while True:
            with self._connection.use(f'{activity} domain {instance}') as connection:
                try:
                    if (domain := _find_own_domain(connection, instance, compute, undefine, not undefine)) is None:
                        return
                    # Destroy first: undefining makes a running domain transient and leaves it running.
                    if domain.isActive():
                        domain.destroy()
                    failpoint('domain-destroyed')
                    if undefine and domain.isPersistent():
                        _undefine(domain)
                except libvirt.libvirtError as error:
                    if is_broken(error) or error.get_error_code() not in RETRYABLE_ERRORS:
                        raise
                    failure = describe_error(error)
                with IgnoredErrors(*RETRYABLE_ERRORS):  # for example, it is removed just now
                    domain = _find_own_domain(connection, instance, compute, undefine, not undefine)
                    if domain is None or not (undefine or _is_active(domain)):
                        return
            if time.monotonic() >= deadline:
                break
            time.sleep(backoff.next())
        state = 'still exists' if undefine else 'still runs'
        raise EcompError(f'domain {instance} {state} after {DESTROY_TIMEOUT_SECONDS:g} s: {failure}')

    def read_definition(self, instance: str) -> str:
        """Return the domain's XML, or that of an empty domain if it does not exist."""
        use = self._connection.use(f'reading the interfaces of {instance}')
        with use as connection, IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):
            return str(connection.lookupByUUIDString(instance).XMLDesc())
        return '<domain/>'

    def query_agent(self, instance: str, macs: Iterable[str]) -> Mapping[str, str]:
        """Return {MAC: address} of the last query and begin another, or {} while one is in flight."""
        answer = self._agent_answers.get(instance)
        if answer is not None and not answer.done():
            return {}
        with suppress(RuntimeError):  # no thread can start: a later call queries
            self._agent_answers[instance] = self._call_aside(partial(_query_agent, instance))
        return pick_addresses(answer.result(), macs) if answer is not None else {}

    def forget_agent(self, instance: str) -> None:
        self._agent_answers.pop(instance, None)


def _create(domain: libvirt.virDomain) -> None:
    apply_filter(domain.create, f'domain {domain.name()} is started')


def apply_filter(operation: Callable[[], object], description: str) -> None:
    """Run an operation that applies a filter, and repeat it if the filter fails."""
    for remaining_tries in reversed(range(MAX_START_TRIES)):
        try:
            operation()
            return
        except libvirt.libvirtError as error:
            if error.get_error_domain() not in FILTER_ERROR_DOMAINS or not remaining_tries:
                raise
            log.warning('%s again, because libvirt failed to filter it: %s', description, describe_error(error))


def _find_domains(connection: libvirt.virConnect, instance: str) -> list[libvirt.virDomain]:
    domains_by_uuid: dict[str, libvirt.virDomain] = {}
    for lookup in (connection.lookupByUUIDString, connection.lookupByName):
        with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):
            domain = lookup(instance)
            domains_by_uuid[domain.UUIDString()] = domain
    return list(domains_by_uuid.values())


def _find_own_domain(
    connection: libvirt.virConnect, instance: str, own_compute: str, or_none: bool = False, or_adopted: bool = False
) -> libvirt.virDomain | None:
    """Return the instance's domain, or raise Conflict if it is not ours.

    With `or_none`, domains that ecompute did not create are ignored.
    With `or_adopted`, a domain with our adoption mark is ours, too, unless it is transient, which raises Conflict.
    """
    own = None
    for domain in _find_domains(connection, instance):
        compute = _read_compute(domain)
        if compute is None and or_adopted:
            compute = _read_adopter(domain)
            if compute is not None and not domain.isPersistent():
                raise Conflict(f'domain {instance} is transient: switched off, it would be gone')
        if compute is None or domain.UUIDString() != instance:
            if or_none:
                continue
            label = f'{domain.name()} ({domain.UUIDString()})'
            raise Conflict(f'domain {label} exists, but was not created by ecompute: it is left as it is')
        if compute != own_compute:
            raise Conflict(f'domain {instance} belongs to compute {compute}, not {own_compute}: it is left as it is')
        own = domain
    return own


def _is_active(domain: libvirt.virDomain) -> bool:
    with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):
        return bool(domain.isActive())
    return False


def _read_usage(connection: Connection) -> dict[str, Usage]:
    usage = {}
    with TALLY.measure('libvirt'), connection.use('reading the usage of domains') as opened:
        for domain, statistics in opened.getAllDomainStats(USAGE_STATISTICS, USAGE_FLAGS):
            with suppress(KeyError):  # libvirt left some statistics out
                usage[domain.UUIDString()] = parse_usage(statistics)
    return usage


def _query_agent(instance: str, connection: Connection) -> Mapping[str, Any]:
    try:
        with connection.use(f'querying the guest agent of {instance}') as opened:
            domain = opened.lookupByUUIDString(instance)
            domain.agentSetResponseTimeout(AGENT_TIMEOUT_SECONDS)
            answer: Mapping[str, Any] = domain.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT)
            return answer
    except (EcompError, ValueError) as error:  # ValueError: a name in the answer is not text
        log.debug('guest agent of %s: %s', instance, error)
        return {}


def _press_power_button(connection: Connection, instance: str, compute: str) -> None:
    with connection.use(f'shutting domain {instance} down') as opened:
        domain = _find_own_domain(opened, instance, compute, or_adopted=True)
        # A QEMU that is just ending does not answer; one that keeps running is asked again.
        with IgnoredErrors(*RETRYABLE_ERRORS):
            if domain is not None and domain.isActive():
                # By default libvirt would try the guest agent first, and wait for it.
                domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN)


def _read_compute(domain: libvirt.virDomain) -> str | None:
    return _read_mark(domain, xml.MARK_NAMESPACE)[0]


def _read_adopter(domain: libvirt.virDomain) -> str | None:
    return _read_mark(domain, xml.ADOPTION_NAMESPACE)[0]


def _read_mark(domain: libvirt.virDomain, namespace: str) -> tuple[str | None, int]:
    with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN_METADATA):
        mark = domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, namespace)
        return xml.parse_owner_mark(mark, domain.UUIDString())
    return None, 0


def _describe_foreign(domain: libvirt.virDomain, pool: Path) -> ForeignGuest:
    description, device = domain.XMLDesc(), pool.stat().st_dev
    disks, counted_bytes = xml.parse_disks(description), 0
    for target, path in disks.items():
        # A disk that is missing, or on a network, has no size here.
        with suppress(OSError), IgnoredErrors(*RETRYABLE_ERRORS, libvirt.VIR_ERR_INVALID_ARG):
            status = Path(path).stat()
            # libvirt waits forever to open a FIFO.
            if stat.S_ISREG(status.st_mode) and status.st_dev == device:
                counted_bytes += domain.blockInfo(target)[0]
    _, max_kib, _, vcpus, _ = domain.info()
    size = {'VCPU': vcpus, 'MEMORY_MB': -(-max_kib // 1024)}
    size |= {'DISK_GB': -(-counted_bytes // GIB)} if counted_bytes else {}
    attachments = {mac: link.attachment for mac, link in xml.parse_interfaces(description).items()}
    interfaces = tuple((name, mac) for mac, (kind, name) in attachments.items() if kind in ('network', 'bridge'))
    return ForeignGuest(
        *(domain.UUIDString(), domain.name(), bool(domain.isActive()), not domain.isPersistent(), size),
        *(tuple(disks.values()), _read_adopter(domain) or '', interfaces, xml.has_console(description)),
    )


def _read_disk_paths(domain: libvirt.virDomain) -> Set[str]:
    definitions = map(domain.XMLDesc, (0, libvirt.VIR_DOMAIN_XML_INACTIVE))
    return {disk for definition in definitions for disk in xml.parse_disk_paths(definition)}


def _find_troubles(state: int, reason_code: int) -> tuple[GuestTrouble, ...]:
    # https://libvirt.org/html/libvirt-libvirt-domain.html#virDomainState and the reasons below it
    # A domain that failed to start (SHUTOFF_FAILED) has not crashed: its start raised the reason.
    is_off_by_crash = state == libvirt.VIR_DOMAIN_SHUTOFF and reason_code == libvirt.VIR_DOMAIN_SHUTOFF_CRASHED
    if is_off_by_crash or state == libvirt.VIR_DOMAIN_CRASHED:
        return (GuestTrouble(CRASHED),)
    if state == libvirt.VIR_DOMAIN_PAUSED and reason_code == libvirt.VIR_DOMAIN_PAUSED_IOERROR:
        return (GuestTrouble(NO_SPACE),)
    is_paused = state == libvirt.VIR_DOMAIN_PAUSED and reason_code in EXTERNAL_PAUSE_REASONS
    return (GuestTrouble(PAUSED),) if is_paused or state == libvirt.VIR_DOMAIN_PMSUSPENDED else ()


def _undefine(domain: libvirt.virDomain) -> None:
    with IgnoredErrors(libvirt.VIR_ERR_INVALID_ARG):  # a driver that does not know them all
        domain.undefineFlags(UNDEFINE_FLAGS)
        return
    domain.undefineFlags(0)
