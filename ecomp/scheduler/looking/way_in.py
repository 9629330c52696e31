"""The way to a guest: its address, and the host that leads there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address

from ecomp.errors import Conflict, EcompError, NotFound, StillGoing
from ecomp.model import keys
from ecomp.model.order import named
from ecomp.model.reach import console_file, is_host_name
from ecomp.model.record import ACTIVE, BUILDING, QUEUED, SCHEDULED, Interface, Record, waits_for
from ecomp.model.text import is_name, printable
from ecomp.scheduler.looking.find import living
from ecomp.scheduler.looking.hosts import computes
from ecomp.store.client import Store


@dataclass(frozen=True)
class WayIn:
    """Where a guest's sshd is. `host` is its hypervisor's name, None where it is reached as any machine is."""

    record: Record
    address: str
    host: str | None

    @property
    def called(self) -> str:
        """What people call it: its name, or else its uuid."""
        return self.record.name or self.record.instance


def way_in(store: Store, instance: str) -> WayIn:
    """The way to a guest that runs.

    Errors: Conflict (it does not run), StillGoing (it has no address yet), EcompError (its host's name is not known),
    NotFound, Unreadable.
    """
    record = running(store, instance)
    known = [each for each in record.addresses if each.address]
    if not known:
        raise make_not_ready(record)
    # On a LAN's bridge it is everybody's neighbour.
    best = next((each for each in known if not _is_behind_its_host(each)), known[0])
    try:
        address = str(IPv4Address(best.address))
    except AddressValueError as error:
        raise EcompError(f'{instance}: its record has no address that is one: {printable(str(error), 100)}') from error
    return WayIn(record, address, host_of(store, record) if _is_behind_its_host(best) else None)


def names(store: Store) -> Mapping[str, str]:
    """Which instance each name leads to; what is no name (a uuid), or leads nowhere, is left out."""
    found = {}
    for key, entry in store.snapshot(keys.NAMES).entries.items():
        with suppress(ValueError):
            if is_name(name := key.removeprefix(keys.NAMES)):
                found[name] = named(entry.value)
    return found


def read_names_by_instance(store: Store) -> Mapping[str, str]:
    """The name that leads to each instance, by the instance's uuid."""
    return {instance: name for name, instance in names(store).items()}


def running(store: Store, instance: str) -> Record:
    """The record of a guest that runs. Errors: StillGoing (not yet), Conflict (not any more), NotFound, Unreadable."""
    record = living(store, instance).record
    if record.state in (QUEUED, SCHEDULED, BUILDING):
        raise make_not_ready(record)
    if record.state != ACTIVE:
        raise Conflict(f'{instance}: is {record.state}: nobody can enter a guest that does not run')
    return record


def make_not_ready(record: Record) -> StillGoing:
    """Make the error for a guest that is on its way."""
    lacks = 'not started' if record.state != ACTIVE else 'not ready' if record.address else 'no address'
    waits = f'{record.instance}: {lacks} yet: {record.state}, waiting for: {waits_for(record)}'
    return StillGoing(f'{waits}. Try: eschedule wait {record.instance} --for ready')


def console(store: Store, instance: str) -> tuple[str, str]:
    """The host that an instance's console is on, and the file there.

    Errors: NotFound (it has none yet), EcompError (its record says what cannot be), Unreadable.
    """
    record = living(store, instance).record
    if record.console is None:
        raise NotFound(f'{instance}: has no console yet: it is {record.state}')
    try:
        return host_of(store, record), console_file(instance, record.console)
    except ValueError as error:
        raise EcompError(f'{instance}: {error}') from error


def host_of(store: Store, record: Record) -> str:
    """The name of the host that an instance is on: what its compute says, alive or, of its console, when it was.

    EcompError if it is not known, or cannot be a host's.
    """
    name = computes(store).host(record.compute) or (record.console or '').partition(':')[0]
    if not is_host_name(name):
        raise EcompError(f'{record.instance}: the name of its host is not known: compute {record.compute} is not up')
    return name


def _is_behind_its_host(interface: Interface) -> bool:
    """Whether a network of libvirt's gave the address: then only its host reaches it."""
    return interface.source == 'lease' or interface.expected is not None
