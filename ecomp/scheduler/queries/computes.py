"""Which computes there are, which of them are silent, and how to reach a guest."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from ipaddress import AddressValueError, IPv4Address
from typing import TYPE_CHECKING

from ecomp.errors import Conflict, EcompError, NotFound, StillGoing, UsageError, put_before_fix
from ecomp.model import keys
from ecomp.model.host import (
    SILENT,
    Computes,
    StoredHostname,
    describe_silence,
    find_last_seen,
    get_absent_state,
    parse_computes,
)
from ecomp.model.listing import NO_ABSENCES, Absences, is_on_host
from ecomp.model.order import NameOwner, Request, parse_request
from ecomp.model.reach import is_host_name, parse_console_path
from ecomp.model.record import Interface, Record, describe_wait
from ecomp.model.states import ACTIVE, BUILDING, ERROR, QUEUED, SCHEDULED, STOPPED
from ecomp.model.stored import decode, decode_lenient
from ecomp.model.text import format_suggestion, is_name, join_some, make_printable, parse_uuid_prefix
from ecomp.model.trouble import Trouble, parse_trouble
from ecomp.scheduler.queries.find import MAX_NAMES_IN_ERROR, find_living
from ecomp.shared.attempts import is_alive
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.placement.client import Placement


def resolve_compute(store: Store, get_placement: Callable[[], Placement], argument: str) -> str:
    """Return the uuid of the compute that an argument (uuid, host name or prefix) means.

    Raises:
        NotFound: there is no such compute. A whole uuid is not checked: see require_compute().
    """
    full_uuid = _parse_uuid(argument)
    if full_uuid is not None:
        return full_uuid
    if not argument:
        raise UsageError('missing argument: a host, by name or uuid')
    known_computes = read_computes(store)
    matches = known_computes.find_by_hostname(argument)
    some = join_some(matches, MAX_NAMES_IN_ERROR)
    if len(matches) > 1:
        raise Conflict(f'{argument}: {len(matches)} computes have this host name: {some}. Fix: give the uuid')
    if matches:
        return matches[0]
    prefix = parse_uuid_prefix(argument)
    if prefix is not None:
        candidates = {*known_computes.living, *known_computes.stored_hostnames}
        from ecomp.placement import providers

        candidates |= {uuid for uuid, name in providers.read_provider_names(get_placement()).items() if uuid == name}
        matches = sorted(candidate for candidate in candidates if candidate.startswith(prefix))
    if len(matches) > 1:
        some = join_some(matches, MAX_NAMES_IN_ERROR)
        raise UsageError(f'{argument}: {len(matches)} uuids of computes begin with it: {some}. Fix: give more digits')
    if not matches:
        raise _make_no_such_compute(argument, known_computes)
    return matches[0]


def require_compute(known_computes: Computes, get_placement: Callable[[], Placement], argument: str) -> None:
    """Raise NotFound if the argument is a uuid that neither etcd nor placement knows."""
    full_uuid = _parse_uuid(argument)
    if full_uuid is None or full_uuid in known_computes.living or full_uuid in known_computes.stored_hostnames:
        return
    from ecomp.placement import providers

    if providers.read_provider_name(get_placement(), full_uuid) != full_uuid:
        raise _make_no_such_compute(argument, known_computes)


def _make_no_such_compute(argument: str, known_computes: Computes) -> NotFound:
    hosts = filter(None, map(known_computes.find_hostname, {*known_computes.living, *known_computes.stored_hostnames}))
    problem = f'no host has this name or uuid{format_suggestion(argument, hosts)}'
    return NotFound(f'{make_printable(argument, 100)}: {problem}. Try: eschedule hosts')


def _parse_uuid(argument: str) -> str | None:
    import uuid

    try:
        return str(uuid.UUID(argument))
    except ValueError:
        return None


def read_computes(store: Store) -> Computes:
    # Names first: a compute that is forgotten in between then leaves a name too many, and no name is missing.
    names = store.snapshot(keys.HOSTNAMES).entries
    return parse_computes(store.snapshot(keys.COMPUTES).entries, names)


def read_troubles(store: Store) -> dict[str, Trouble]:
    entries = store.snapshot(keys.TROUBLES).entries
    return {keys.get_last_part(key): parse_trouble(entry.value) for key, entry in entries.items() if entry.lease}


def find_claims_on_silent(store: Store, known_computes: Computes, instances: Collection[str]) -> dict[str, str]:
    """Return {instance: text} for claims on silent computes (rule: claim-stays)."""
    claims: dict[str, str] = {}
    if not instances or store.claims is None:
        return claims
    with suppress(EcompError):
        for compute in sorted(known_computes.stored_hostnames.keys() - known_computes.living.keys()):
            held = store.claims(compute)
            text = f'it is claimed on {known_computes.format_name(compute)}, which is silent'
            claims |= {name: text for name in instances if name in held}
    return claims


def read_absences(
    store: Store,
    get_placement: Callable[[], Placement],
    known_computes: Computes,
    records: Sequence[Record],
    report: Callable[[str], object],
) -> Absences:
    """Find out which hosts of these records are absent, and which destroys wait for them."""
    old_records = [record for record in records if is_on_host(record) and record.compute not in known_computes.living]
    if not old_records:
        return NO_ABSENCES
    states = dict.fromkeys((record.compute for record in old_records), SILENT)
    try:
        states |= read_absent_states(get_placement(), states)
    except EcompError as error:
        report(put_before_fix(str(error), '; a host that was stopped cleanly is shown as silent, too'))
    request_keys = {keys.request(record.compute, record.instance): record for record in old_records}
    tombstones = set()
    for key, entry in store.read(sorted(request_keys)).items():
        request = parse_request(request_keys[key].compute, key, entry.value)
        if isinstance(request, Request) and request.is_tombstone:
            tombstones.add(request.instance)
    last_seen = read_last_seen(store, [compute for compute, state in states.items() if state == SILENT])
    return Absences(states, tombstones, last_seen, datetime.now(UTC).date().isoformat())


def read_last_seen(store: Store, silent: Collection[str]) -> dict[str, str]:
    """Return {compute: ISO time} of the last signs of life, as far as etcd knows them."""
    last_seen = dict[str, str]()
    with suppress(EcompError):
        for entry in store.read(list(map(keys.hostname, silent))).values():
            compute = keys.get_last_part(entry.key)
            if ages := [store.read_lease_age(lease) for lease in decode_lenient(StoredHostname, entry.value).leases]:
                time = find_last_seen(ages, datetime.now(UTC))
                last_seen |= {compute: time} if time else {}
    return last_seen


def describe_if_silent(store: Store, placement: Placement, compute: str) -> str | None:
    """Return `hv2 is silent since 16:35:54`, or None if it is not known to be silent."""
    with suppress(EcompError):
        if not is_alive(store, compute) and read_absent_states(placement, [compute]).get(compute, SILENT) == SILENT:
            last_seen = read_last_seen(store, [compute]).get(compute)
            silence = describe_silence(last_seen, datetime.now(UTC).date().isoformat())
            return f'{read_computes(store).format_name(compute)} is {silence}'
    return None


def read_absent_states(placement: Placement, computes: Collection[str]) -> dict[str, str]:
    """Ask placement whether these computes, which have no presence, are CLOSED or SILENT."""
    from ecomp.placement import providers

    states = {}
    # Other text from a key is not a compute, and would become part of a URL path.
    for compute in filter(keys.is_uuid, computes):
        with suppress(NotFound):
            # One small call each: few hosts are absent, and read_rooms() lists the whole cluster.
            states[compute] = get_absent_state(providers.read_inventory(placement, compute, {}))
    return states


@dataclass(frozen=True)
class GuestAccess:
    """The address of a guest's sshd, and the host to go through, if that is needed."""

    record: Record
    address: str
    host: str | None

    @property
    def display_name(self) -> str:
        return self.record.name or self.record.instance


def find_guest_access(store: Store, instance: str) -> GuestAccess:
    """Find how to reach a running guest, or raise StillGoing while it has no address."""
    record = find_running(store, instance)
    interfaces = [interface for interface in record.addresses if interface.address]
    if not interfaces:
        raise make_not_ready(record)
    # Any machine on the LAN reaches an interface on its bridge.
    best = next((interface for interface in interfaces if not _is_behind_host(interface)), interfaces[0])
    try:
        address = str(IPv4Address(best.address))
    except AddressValueError as error:
        reason = make_printable(str(error), 100)
        raise EcompError(f'{instance}: the address in its record is malformed: {reason}') from error
    return GuestAccess(record, address, find_host_name(store, record) if _is_behind_host(best) else None)


def read_names(store: Store) -> Mapping[str, str]:
    """Read {name: instance}, without malformed names and values."""
    instances = {}
    for key, entry in store.snapshot(keys.NAMES).entries.items():
        with suppress(ValueError):
            if is_name(name := key.removeprefix(keys.NAMES)):
                instances[name] = decode(NameOwner, entry.value).instance
    return instances


def read_names_by_instance(store: Store) -> Mapping[str, str]:
    return {instance: name for name, instance in read_names(store).items()}


def find_running(store: Store, instance: str) -> Record:
    """Return the record of a running guest, or raise StillGoing while it has not started."""
    record = find_living(store, instance).record
    if record.state in (QUEUED, SCHEDULED, BUILDING):
        raise make_not_ready(record)
    if record.state != ACTIVE:
        cure = f'. Fix: eschedule start {instance}' if record.state == STOPPED else ''
        raise Conflict(f'{instance}: is {record.state}: only a guest that runs accepts a login{cure}')
    return record


def make_not_ready(record: Record) -> StillGoing:
    lack = 'not started' if record.state != ACTIVE else 'not ready' if record.address else 'no address'
    problem = f'{record.instance}: {lack} yet: {record.state}, waiting for {describe_wait(record)}'
    return StillGoing(f'{problem}. Try: eschedule wait {record.instance} --for ready')


def find_console(store: Store, instance: str) -> tuple[str, str]:
    """Return the host name and the path of an instance's console, or raise NotFound."""
    record = find_living(store, instance).record
    if record.console is None:
        if record.state in (ACTIVE, STOPPED):
            raise NotFound(f'{instance}: has no console: its guest is fake')
        yet = '' if record.state == ERROR else ' yet'
        raise NotFound(f'{instance}: has no console{yet}: its state is {record.state}')
    try:
        return find_host_name(store, record), parse_console_path(instance, record.console)
    except ValueError as error:
        raise EcompError(f'{instance}: {error}') from error


def find_host_name(store: Store, record: Record) -> str:
    """Return an instance's host name, from its compute or else from its console."""
    name = read_computes(store).find_hostname(record.compute) or (record.console or '').partition(':')[0]
    if not is_host_name(name):
        raise EcompError(f'{record.instance}: the name of its host is unknown: compute {record.compute} is not alive')
    return name


def _is_behind_host(interface: Interface) -> bool:
    return interface.source == 'lease' or interface.reservation is not None
