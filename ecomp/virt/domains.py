"""Our domains: those whose metadata carries our mark. No other is ever touched."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Set
from concurrent.futures import Future
from ipaddress import IPv4Address
from queue import SimpleQueue
from typing import Any

from ecomp.errors import BuildFailed, Conflict, EcompError
from ecomp.failpoints import failpoint
from ecomp.model.guest import CRASHED, NO_SPACE, PAUSED, Guest, GuestSpec
from ecomp.virt import xml
from ecomp.virt.connection import Connection, Ignored, building, is_broken, libvirt, reason

log = logging.getLogger(__name__)

PATIENCE = 1
"""Seconds an agent has for each answer, then it has given none; libvirt's default is to wait for ever."""


class Agents:
    """Asks guests' agents one by one, in a thread and on a connection of its own, so a silent one delays no caller."""

    def __init__(self, uri: str) -> None:
        self._connection = Connection(uri)
        self._thread: threading.Thread | None = None
        self._to_ask: SimpleQueue[tuple[str, Future[Mapping[str, Any]]] | None] = SimpleQueue()
        self._asked: dict[str, Future[Mapping[str, Any]]] = {}

    def addresses(self, instance: str, macs: Iterable[str]) -> Mapping[str, str]:
        """{MAC: IPv4 address} of these MACs by the agent's last answer; it is asked again for the next call."""
        asked = self._asked.get(instance)
        if asked is not None and not asked.done():
            return {}
        if self._thread is None:
            # Not an executor's: those are waited for at the end of the process, and libvirtd may be frozen.
            thread = threading.Thread(target=self._ask_each, name='agents', daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                log.debug('agents are asked later: %s', error)
                return {}
            self._thread = thread
        self._asked[instance] = Future()
        self._to_ask.put((instance, self._asked[instance]))
        return said(asked.result(), macs) if asked is not None else {}

    def forget(self, instance: str) -> None:
        """Drop the answer of an instance that has ended."""
        self._asked.pop(instance, None)

    def close(self) -> None:
        self._to_ask.put(None)
        self._connection.close()

    def _ask_each(self) -> None:
        while (each := self._to_ask.get()) is not None:
            instance, answer = each
            answer.set_result(self._ask(instance))

    def _ask(self, instance: str) -> Mapping[str, Any]:
        try:
            with self._connection.use(f'asking the agent of {instance}') as connection:
                domain = connection.lookupByUUIDString(instance)
                if not xml.has_agent(domain.XMLDesc()):
                    return {}
                domain.agentSetResponseTimeout(PATIENCE)
                answer: Mapping[str, Any] = domain.interfaceAddresses(libvirt.VIR_DOMAIN_INTERFACE_ADDRESSES_SRC_AGENT)
                return answer
        except (EcompError, ValueError) as error:  # ValueError: a name in the answer that is no text
            log.debug('the agent of %s: %s', instance, error)
            return {}


def said(answer: Mapping[str, Any], macs: Iterable[str]) -> dict[str, str]:
    """{MAC: address}: of each of these MACs the first in virDomainInterfaceAddresses' answer that others can reach."""
    wanted = set(macs)
    found: dict[str, str] = {}
    for interface in answer.values():
        mac = str(interface['hwaddr'] or '').lower()
        usable = [str(each['addr']) for each in interface['addrs'] or () if _usable(str(each['addr']))]
        if mac in wanted and usable:
            found.setdefault(mac, usable[0])
    return found


def _usable(text: str) -> bool:
    try:
        address = IPv4Address(text)
    except ValueError:
        return False
    others = address.is_loopback or address.is_link_local or address.is_multicast
    return not others and not address.is_reserved and not address.is_unspecified


DESTROY_DEADLINE = 60.0
"""Seconds a domain has to end; then EcompError, and the caller tries again."""
ASK_DEADLINE = 5.0
"""Seconds a QEMU has to take a press of the power button; then it is left to answer or not."""
RETRY_FIRST, RETRY_MOST = 0.05, 2.0
"""Seconds between two looks at a domain that is to end: the first, and the longest, of the doubled ones after it."""

# What would keep a domain from being undefined. Not every driver knows every flag: at last none is given.
UNDEFINE_FLAGS = (
    libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE
    | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA
    | libvirt.VIR_DOMAIN_UNDEFINE_NVRAM
    | libvirt.VIR_DOMAIN_UNDEFINE_CHECKPOINTS_METADATA,
    libvirt.VIR_DOMAIN_UNDEFINE_MANAGED_SAVE | libvirt.VIR_DOMAIN_UNDEFINE_SNAPSHOTS_METADATA,
)
READ_AGAIN = (
    # "Is it there already, is it off already": the state is read again, and may well be the wanted one.
    *(libvirt.VIR_ERR_NO_DOMAIN, libvirt.VIR_ERR_OPERATION_INVALID),
    # QEMU did not end in time. It may yet.
    *(libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_ERR_INTERNAL_ERROR),
    *(libvirt.VIR_ERR_OPERATION_TIMEOUT, libvirt.VIR_ERR_OPERATION_FAILED),
)
# For other reasons libvirt pauses a guest itself, and soon goes on with it.
PAUSED_BY_OTHERS = libvirt.VIR_DOMAIN_PAUSED_USER, libvirt.VIR_DOMAIN_PAUSED_FROM_SNAPSHOT


class Domains:
    """The domains of one libvirt. Errors: Conflict, Unreachable, EcompError; BuildFailed from start and resume."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def ours(self) -> Mapping[str, Guest]:
        """{instance: Guest} of every domain with our mark, as if it had no disk."""
        found = {}
        with self._connection.use('listing domains') as connection:
            for domain in connection.listAllDomains():
                with Ignored(libvirt.VIR_ERR_NO_DOMAIN):  # gone between the list and the question
                    mark = _mark(domain)
                    if mark is not None and mark.instance == domain.UUIDString():
                        _, most_kib, now_kib, vcpus, _ = domain.info()
                        size = {'VCPU': vcpus, 'MEMORY_MB': most_kib // 1024, 'MEMORY_MB now': now_kib // 1024}
                        is_defined, is_active = bool(domain.isPersistent()), bool(domain.isActive())
                        presence, trouble = (is_defined, is_active, False), _trouble(*domain.state())
                        found[mark.instance] = Guest(mark.instance, mark.compute, *presence, trouble, size)
        return found

    def computes(self) -> frozenset[str]:
        """The computes that the domains here belong to."""
        return frozenset(each.compute for each in self.ours().values() if each.compute)

    def runs(self, instance: str) -> bool:
        """Whether a domain of this instance, with our mark, runs. Not by guests(): that waits for all that start."""
        use = self._connection.use(f'looking for domain {instance}')
        with use as connection, Ignored(libvirt.VIR_ERR_NO_DOMAIN):
            domain = connection.lookupByUUIDString(instance)
            mark = _mark(domain)
            return mark is not None and mark.instance == instance and bool(domain.isActive())
        return False

    def users(self, disk: str) -> Set[str]:
        """The names of the domains, ours or not, that have this file for a disk, now or at their next start."""
        found = set()
        with self._connection.use(f'looking for who has {disk}') as connection:
            for domain in connection.listAllDomains():
                with Ignored(libvirt.VIR_ERR_NO_DOMAIN):
                    if disk in _disks(domain):
                        found.add(domain.name())
        return found

    def is_running(self, instance: str) -> bool:
        """Whether a domain of this name or uuid runs, ours or not."""
        with self._connection.use(f'looking for domain {instance}') as connection:
            return any(_runs(domain) for domain in _named(connection, instance))

    def check_free(self, instance: str, files: Collection[str]) -> None:
        """Conflict if a domain of this name or uuid may need these files of the instance's.

        That is ours while it runs, and somebody else's that has one of them for a disk.
        """
        with self._connection.use(f'looking for domain {instance}') as connection:
            for domain in _named(connection, instance):
                which = f'{domain.name()} ({domain.UUIDString()})'
                if _is_ours(_mark(domain), domain, instance):
                    if domain.isActive():
                        raise Conflict(f'domain {instance} is running: its disk is not removed')
                elif used := _disks(domain) & set(files):
                    raise Conflict(f'domain {which}, not made by ecompute, has {min(used)}: that is not removed')

    def start(self, spec: GuestSpec, description: str) -> None:
        """Define the domain from the XML in `description` and start it; do nothing if it runs.

        One that is defined and off is left from an interrupted build, and is defined anew.
        """
        with self._connection.use(f'starting domain {spec.instance}') as connection, building('started'):
            for domain in _named(connection, spec.instance):
                _check_ours(domain, spec.instance, spec.compute)
                if domain.isActive():
                    return
                _undefine(domain)
            domain = connection.defineXML(description)
            failpoint('domain-defined')
            domain.create()

    def resume(self, instance: str, compute: str) -> None:
        """Start our domain as it is defined; do nothing if it runs."""
        with self._connection.use(f'starting domain {instance}') as connection, building('started'):
            domains = _named(connection, instance)
            for domain in domains:
                _check_ours(domain, instance, compute)
                if not domain.isActive():
                    domain.create()
            if not domains:
                raise BuildFailed('started', 'its domain is gone')

    def shutdown(self, instance: str, compute: str) -> None:
        """Press the power button of our domain if it runs, without waiting for what the guest does."""
        asking: Future[None] = Future()

        def ask() -> None:
            # libvirt waits for a frozen QEMU for ever, and serves only a few calls of one connection at a time.
            own = Connection(self._connection.uri)
            try:
                _press(own, instance, compute)
                asking.set_result(None)
            except Exception as error:  # whatever it is, it belongs to whoever waits for the result
                asking.set_exception(error)
            finally:
                own.close()

        # If it does not end before, it ends with that QEMU, which is switched off when its time is up.
        threading.Thread(target=ask, name='libvirt-ask', daemon=True).start()
        try:
            asking.result(ASK_DEADLINE)
        except TimeoutError:
            self.is_running(instance)  # Unreachable if it is not QEMU that does not answer

    def end(self, instance: str, compute: str, undefine: bool) -> None:
        """End our domain and wait until it is off; with `undefine` remove its definition, and wait until it is gone.

        One of this name or uuid that somebody else made is then left alone: nothing of ours is in it (rule 9).
        """
        last, strangers = 'no error', set[str]()
        for _ in _until(time.monotonic() + DESTROY_DEADLINE):
            with self._connection.use(f'destroying domain {instance}') as connection:
                for domain in _named(connection, instance):
                    try:
                        if not _check_ours(domain, instance, compute, or_stranger=undefine):
                            strangers.add(domain.UUIDString())
                            continue
                        # First destroy: undefine would make a running domain transient, and leave it running.
                        if domain.isActive():
                            domain.destroy()
                        failpoint('domain-destroyed')
                        if undefine and domain.isPersistent():
                            _undefine(domain)
                    except libvirt.libvirtError as error:
                        if is_broken(error) or error.get_error_code() not in READ_AGAIN:
                            raise
                        last = reason(error)
                left = [each for each in _named(connection, instance) if each.UUIDString() not in strangers]
                if not any(undefine or _runs(domain) for domain in left):
                    return
        raise EcompError(f'domain {instance} is still there after {DESTROY_DEADLINE:g} s of destroying it: {last}')

    def interfaces(self, instance: str) -> Mapping[str, xml.Plug]:
        """{MAC: what it is plugged into} of our domain's interfaces, in order; empty if there is no domain."""
        use = self._connection.use(f'asking for the interfaces of {instance}')
        with use as connection, Ignored(libvirt.VIR_ERR_NO_DOMAIN):
            return xml.interfaces(connection.lookupByUUIDString(instance).XMLDesc())
        return {}


def _named(connection: libvirt.virConnect, instance: str) -> list[libvirt.virDomain]:
    """The domains with this uuid or this name: none, one, or two different ones."""
    found: dict[str, libvirt.virDomain] = {}
    for lookup in (connection.lookupByUUIDString, connection.lookupByName):
        with Ignored(libvirt.VIR_ERR_NO_DOMAIN):
            domain = lookup(instance)
            found[domain.UUIDString()] = domain
    return list(found.values())


def _runs(domain: libvirt.virDomain) -> bool:
    """Whether it does; what was made without a definition is gone once it does not."""
    with Ignored(libvirt.VIR_ERR_NO_DOMAIN):
        return bool(domain.isActive())
    return False


def _press(connection: Connection, instance: str, compute: str) -> None:
    with connection.use(f'shutting domain {instance} down') as opened:
        for domain in _named(opened, instance):
            _check_ours(domain, instance, compute)
            # A QEMU that ends at that very moment does not answer; one that goes on is asked again.
            with Ignored(*READ_AGAIN):
                if domain.isActive():
                    # Not by way of its agent, which libvirt would try first, and wait for.
                    domain.shutdownFlags(libvirt.VIR_DOMAIN_SHUTDOWN_ACPI_POWER_BTN)


def _mark(domain: libvirt.virDomain) -> xml.Mark | None:
    with Ignored(libvirt.VIR_ERR_NO_DOMAIN_METADATA):
        return xml.mark(domain.metadata(libvirt.VIR_DOMAIN_METADATA_ELEMENT, xml.MARK_NAMESPACE))
    return None


def _disks(domain: libvirt.virDomain) -> Set[str]:
    """The files that it has for disks, now or at its next start."""
    return {disk for flags in (0, libvirt.VIR_DOMAIN_XML_INACTIVE) for disk in xml.disks(domain.XMLDesc(flags))}


def _is_ours(mark: xml.Mark | None, domain: libvirt.virDomain, instance: str) -> bool:
    """Whether some ecompute made it for this instance; `mark` is the domain's."""
    return mark is not None and mark.instance == instance and domain.UUIDString() == instance


def _check_ours(domain: libvirt.virDomain, instance: str, compute: str, or_stranger: bool = False) -> bool:
    """Conflict if it is another compute's, or somebody else's; with `or_stranger` False for somebody else's."""
    mark = _mark(domain)
    if mark is None or not _is_ours(mark, domain, instance):
        if or_stranger:
            return False
        which = f'{domain.name()} ({domain.UUIDString()})'
        raise Conflict(f'domain {which} is here and was not made by ecompute: not touched')
    if mark.compute != compute:
        raise Conflict(f'domain {instance} is here and belongs to compute {mark.compute}, not {compute}: not touched')
    return True


def _trouble(state: int, why: int) -> str:
    # https://libvirt.org/html/libvirt-libvirt-domain.html#virDomainState and the reasons below it
    # One that could not be started (SHUTOFF_FAILED) has not crashed: why is what its start said.
    if state == libvirt.VIR_DOMAIN_CRASHED or (
        state == libvirt.VIR_DOMAIN_SHUTOFF and why == libvirt.VIR_DOMAIN_SHUTOFF_CRASHED
    ):
        return CRASHED
    if state == libvirt.VIR_DOMAIN_PAUSED and why == libvirt.VIR_DOMAIN_PAUSED_IOERROR:
        return NO_SPACE
    is_paused = state == libvirt.VIR_DOMAIN_PAUSED and why in PAUSED_BY_OTHERS
    return PAUSED if is_paused or state == libvirt.VIR_DOMAIN_PMSUSPENDED else ''


def _undefine(domain: libvirt.virDomain) -> None:
    for flags in UNDEFINE_FLAGS:
        with Ignored(libvirt.VIR_ERR_INVALID_ARG):
            domain.undefineFlags(flags)
            return
    domain.undefineFlags(0)


def _until(deadline: float) -> Iterator[None]:
    """Turns of a loop, at once and then ever further apart, until time.monotonic() has passed the deadline."""
    delay = RETRY_FIRST
    yield
    while time.monotonic() < deadline:
        time.sleep(delay)
        delay = min(2 * delay, RETRY_MOST)
        yield
