"""Read computes from etcd and placement; find a guest's address, host and console."""

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
    """The parsed contents of etcd, the entries by key, and the errors of malformed records."""

    etcd: InEtcd
    entries: Mapping[str, Entry]
    errors: tuple[EcompError, ...]


def all_hosts(store: Store, placement: Placement) -> tuple[list[Host], tuple[EcompError, ...]]:
    """Read all computes, and the errors of malformed records, whose instances are not counted."""
    from ecomp.placement import providers  # imported late here and below: most commands use etcd only

    survey = look(store)
    names = providers.names(placement)
    uuids = {*survey.etcd.alive, *survey.etcd.requests, *(uuid for uuid, name in names.items() if uuid == name)}
    shares = providers.shares(placement, uuids & names.keys())
    having = {trait: providers.having(placement, trait) for trait in status.STATUS}
    in_placement = {
        uuid: InPlacement(uuid, names[uuid], each, frozenset(trait for trait in having if uuid in having[trait]))
        for uuid, each in shares.items()
    }
    return hosts(survey.etcd, in_placement), survey.errors


def compute_of(store: Store, placement: Callable[[], Placement], word: str) -> str:
    """Return the uuid of the compute that an argument (uuid, host name or prefix) means.

    A whole uuid is not checked: see check_compute_exists(). Placement is needed for a prefix only. Raises NotFound,
    UsageError (no argument, or several uuids), Conflict (several computes with this host name).
    """
    full_uuid = _whole(word)
    if full_uuid is not None:
        return full_uuid
    if not word:
        raise UsageError('no compute is named: give its host name or its uuid')
    known_computes = computes(store)
    matches = known_computes.named(word)
    if len(matches) > 1:
        raise Conflict(f'{word} is the host name of {len(matches)} computes, say the uuid: {some(matches, QUOTED)}')
    if matches:
        return matches[0]
    prefix = uuid_prefix(word)
    if prefix is not None:
        candidates = {*known_computes.living, *known_computes.remembered}
        from ecomp.placement import providers

        candidates |= {uuid for uuid, name in providers.names(placement()).items() if uuid == name}
        matches = sorted(candidate for candidate in candidates if candidate.startswith(prefix))
    if len(matches) > 1:
        raise UsageError(f'{word}: {len(matches)} computes begin so: {some(matches, QUOTED)}')
    if not matches:
        raise no_such(word, known_computes)
    return matches[0]


def check_there(known: Computes, placement: Callable[[], Placement], word: str) -> None:
    """Raise NotFound if the argument is a uuid that neither etcd nor placement knows.

    It may query placement, and raises its errors: call it only after a lookup found nothing.
    """
    full_uuid = _whole(word)
    if full_uuid is None or full_uuid in known.living or full_uuid in known.remembered:
        return
    from ecomp.placement import providers

    if providers.name(placement(), full_uuid) != full_uuid:
        raise no_such(word, known)


def no_such(word: str, known: Computes) -> NotFound:
    """Make the error for an argument that means no compute."""
    suggestion = did_you_mean(word, filter(None, map(known.host, {*known.living, *known.remembered})))
    problem = f'no compute has this host name or uuid{suggestion}'
    return NotFound(f'{printable(word, 100)}: {problem}: eschedule hosts shows all')


def _whole(word: str) -> str | None:
    """Return an argument as a uuid in canonical form; None if it is no uuid."""
    import uuid

    try:
        return str(uuid.UUID(word))
    except ValueError:
        return None


def computes(store: Store) -> Computes:
    """Read which computes are alive (by a key on a lease), and the names of all computes."""
    # Names first: a compute that is forgotten in between then leaves a name too many, and no name is missing.
    names = store.snapshot(keys.HOSTNAMES).entries
    return computes_of(store.snapshot(keys.COMPUTES).entries, names)


def claimed_on_silent(store: Store, known: Computes, waiting: Collection[str]) -> dict[str, str]:
    """Return {instance: text} for claims on silent computes (rule 13), while placement answers."""
    claims: dict[str, str] = {}
    with suppress(EcompError):
        for compute in sorted(known.remembered.keys() - known.living.keys()) if waiting and store.claims else ():
            held = store.claims(compute) if store.claims else ()
            claims |= {name: f'claimed on {known.called(compute)}, which is silent' for name in waiting if name in held}
    return claims


def look(store: Store) -> Survey:
    """Read all computes, requests and records from etcd; malformed records become errors."""
    # Requests before records: an instance that ends in between is then read twice, not missed.
    known_computes = computes(store)
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
    for instance, places in everywhere(store, {**requested, **recorded}.items()).items():
        try:
            if places.record is not None:
                records[instance] = read_record(places.record)
        except EcompError as error:
            errors[instance] = error
    etcd = InEtcd(known_computes, requests, records, frozenset(errors), junk)
    return Survey(etcd, {**requested, **recorded}, tuple(errors.values()))


@dataclass(frozen=True)
class WayIn:
    """The address of a guest's sshd; `host` is the host to go through, None if it is reachable."""

    record: Record
    address: str
    host: str | None

    @property
    def called(self) -> str:
        """The name of the instance, or its uuid."""
        return self.record.name or self.record.instance


def way_in(store: Store, instance: str) -> WayIn:
    """Find how to reach a running guest.

    Raises StillGoing without an address, EcompError if the address is malformed or the host's name is not known, and
    the errors of find_running().
    """
    record = running(store, instance)
    interfaces = [interface for interface in record.addresses if interface.address]
    if not interfaces:
        raise make_not_ready(record)
    # Any machine on the LAN reaches an interface on its bridge.
    best = next((interface for interface in interfaces if not _is_behind_its_host(interface)), interfaces[0])
    try:
        address = str(IPv4Address(best.address))
    except AddressValueError as error:
        raise EcompError(f'{instance}: its record has no address that is one: {printable(str(error), 100)}') from error
    return WayIn(record, address, host_of(store, record) if _is_behind_its_host(best) else None)


def names(store: Store) -> Mapping[str, str]:
    """Read {name: instance}, without malformed keys."""
    instances = {}
    for key, entry in store.snapshot(keys.NAMES).entries.items():
        with suppress(ValueError):
            if is_name(name := key.removeprefix(keys.NAMES)):
                instances[name] = named(entry.value)
    return instances


def read_names_by_instance(store: Store) -> Mapping[str, str]:
    """Read {instance: name}."""
    return {instance: name for name, instance in names(store).items()}


def running(store: Store, instance: str) -> Record:
    """Return the record of a running guest.

    Raises StillGoing if it has not started yet, Conflict if it runs no more, NotFound, Unreadable.
    """
    record = living(store, instance).record
    if record.state in (QUEUED, SCHEDULED, BUILDING):
        raise make_not_ready(record)
    if record.state != ACTIVE:
        raise Conflict(f'{instance}: is {record.state}: nobody can enter a guest that does not run')
    return record


def make_not_ready(record: Record) -> StillGoing:
    """Make the error for a guest that has not started, or has no address, yet."""
    lack = 'not started' if record.state != ACTIVE else 'not ready' if record.address else 'no address'
    problem = f'{record.instance}: {lack} yet: {record.state}, waiting for: {waits_for(record)}'
    return StillGoing(f'{problem}. Try: eschedule wait {record.instance} --for ready')


def console(store: Store, instance: str) -> tuple[str, str]:
    """Return the host of an instance's console and the file there.

    Raises NotFound if there is none yet, EcompError for an invalid file or an unknown host, Unreadable.
    """
    record = living(store, instance).record
    if record.console is None:
        raise NotFound(f'{instance}: has no console yet: it is {record.state}')
    try:
        return host_of(store, record), console_file(instance, record.console)
    except ValueError as error:
        raise EcompError(f'{instance}: {error}') from error


def host_of(store: Store, record: Record) -> str:
    """Return an instance's host name, from its compute or its console; EcompError without any."""
    name = computes(store).host(record.compute) or (record.console or '').partition(':')[0]
    if not is_host_name(name):
        raise EcompError(f'{record.instance}: the name of its host is not known: compute {record.compute} is not up')
    return name


def _is_behind_its_host(interface: Interface) -> bool:
    """True if a libvirt network gave the address, so that only its host reaches it."""
    return interface.source == 'lease' or interface.expected is not None
