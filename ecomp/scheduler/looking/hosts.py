"""The computes, read from etcd and placement together; and the way to a guest: its address, and its host."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address
from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import Conflict, EcompError, NotFound, StillGoing, UsageError
from ecomp.model import keys, status
from ecomp.model.host import Computes, Host, InEtcd, InPlacement, computes_of, hosts
from ecomp.model.order import Invalid, Request, named, parse_request
from ecomp.model.reach import console_file, is_host_name
from ecomp.model.record import ACTIVE, BUILDING, QUEUED, SCHEDULED, Interface, Record, waits_for
from ecomp.model.text import did_you_mean, is_name, printable, some, uuid_prefix
from ecomp.scheduler.looking.find import QUOTED, living, read_record
from ecomp.store.client import Entry, Store
from ecomp.store.sharing import everywhere

if TYPE_CHECKING:
    from ecomp.placement.client import Placement


class Survey(NamedTuple):
    """What etcd says, the requests and records it says it with, by key, and what is wrong with those unreadable."""

    etcd: InEtcd
    entries: Mapping[str, Entry]
    errors: tuple[EcompError, ...]


def all_hosts(store: Store, placement: Placement) -> tuple[list[Host], tuple[EcompError, ...]]:
    """Every compute, and what is wrong with records that cannot be read (their instances are not counted)."""
    from ecomp.placement import providers  # here and below: most ask etcd alone

    seen = look(store)
    names = providers.names(placement)
    known = {*seen.etcd.alive, *seen.etcd.requests, *(uuid for uuid, name in names.items() if uuid == name)}
    shares = providers.shares(placement, known & names.keys())
    having = {trait: providers.having(placement, trait) for trait in status.STATUS}
    found = {
        uuid: InPlacement(uuid, names[uuid], each, frozenset(trait for trait in having if uuid in having[trait]))
        for uuid, each in shares.items()
    }
    return hosts(seen.etcd, found), seen.errors


def compute_of(store: Store, placement: Callable[[], Placement], word: str) -> str:
    """The uuid of the compute that is meant: by that, by its host's name, or by the only uuid that begins so.

    `placement` is asked where etcd does not know the compute. A whole uuid is taken at its word: see check_there().
    Errors: NotFound, Conflict (several hosts are called so, alive or not), UsageError (several uuids begin so).
    """
    whole = _whole(word)
    if whole is not None:
        return whole
    if not word:
        raise UsageError('no compute is named: give its host name or its uuid')
    known = computes(store)
    found = known.named(word)
    if len(found) > 1:
        raise Conflict(f'{word} is the host name of {len(found)} computes, say the uuid: {some(found, QUOTED)}')
    if found:
        return found[0]
    beginning = uuid_prefix(word)
    if beginning is not None:
        there = {*known.living, *known.remembered}
        from ecomp.placement import providers

        there |= {uuid for uuid, name in providers.names(placement()).items() if uuid == name}
        found = sorted(each for each in there if each.startswith(beginning))
    if len(found) > 1:
        raise UsageError(f'{word}: {len(found)} computes begin so: {some(found, QUOTED)}')
    if not found:
        raise no_such(word, known)
    return found[0]


def check_there(known: Computes, placement: Callable[[], Placement], word: str) -> None:
    """NotFound for the whole uuid of what is no compute: for who found nothing there, so that nobody else waits for it.

    `placement` is asked where etcd does not know it. Errors: those of placement.
    """
    whole = _whole(word)
    if whole is None or whole in known.living or whole in known.remembered:
        return
    from ecomp.placement import providers

    if providers.name(placement(), whole) != whole:
        raise no_such(word, known)


def no_such(word: str, known: Computes) -> NotFound:
    """What is said of a word that is no compute."""
    meant = did_you_mean(word, filter(None, map(known.host, {*known.living, *known.remembered})))
    told = f'no compute has this host name or uuid{meant}'
    return NotFound(f'{printable(word, 100)}: {told}: eschedule hosts shows all')


def _whole(word: str) -> str | None:
    """The uuid that a word is, in its canonical form; None for what is none."""
    import uuid

    try:
        return str(uuid.UUID(word))
    except ValueError:
        return None


def computes(store: Store) -> Computes:
    """Read which computes are alive, and what all of them are called. Who is alive says so on a lease."""
    # The names first: of one that is forgotten meanwhile there is then a name too many, and of none a name too few.
    names = store.snapshot(keys.HOSTNAMES).entries
    return computes_of(store.snapshot(keys.COMPUTES).entries, names)


def claimed_on_silent(store: Store, known: Computes, waiting: Collection[str]) -> dict[str, str]:
    """Say for which of the waiting instances a silent compute holds a claim, as far as placement answers (rule 13)."""
    said: dict[str, str] = {}
    with suppress(EcompError):
        for compute in sorted(known.remembered.keys() - known.living.keys()) if waiting and store.claims else ():
            held = store.claims(compute) if store.claims else ()
            said |= {each: f'claimed on {known.called(compute)}, which is silent' for each in waiting if each in held}
    return said


def look(store: Store) -> Survey:
    """Read what etcd has of computes and instances."""
    # Requests before records: what ends meanwhile is then seen twice rather than not at all.
    there = computes(store)
    requested, recorded = store.snapshot(keys.HOSTS).entries, store.snapshot(keys.INSTANCES).entries
    requests: dict[str, dict[str, Request | Invalid]] = {}
    junk: dict[str, list[str]] = {}
    for key, entry in requested.items():
        compute, _, name = key.removeprefix(keys.HOSTS).partition('/')
        if keys.is_uuid(name):
            requests.setdefault(compute, {})[name] = parse_request(compute, key, entry.value)
        else:
            junk.setdefault(compute, []).append(name)
    records: dict[str, Record] = {}
    errors: dict[str, EcompError] = {}
    for instance, at in everywhere(store, {**requested, **recorded}.items()).items():
        try:
            if at.record is not None:
                records[instance] = read_record(at.record)
        except EcompError as error:
            errors[instance] = error
    etcd = InEtcd(there, requests, records, frozenset(errors), junk)
    return Survey(etcd, {**requested, **recorded}, tuple(errors.values()))


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
