"""Plan the tasks that bring a compute's instances to the requested state. Pure.

Each plan is made from the whole state, so a restart, a lost watch and a compaction need no special case.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from ecomp.model import order
from ecomp.model.guest import CRASHED, TROUBLE_KINDS, UNDEFINED, Address, Guest
from ecomp.model.order import InvalidRequest, PowerAction, Request, Resize, parse_phase
from ecomp.model.record import Record, copy_changes
from ecomp.model.states import ACTIVE, ERROR, GONE, STOPPED

ParsedRequest = Request | InvalidRequest


class Kind(Enum):
    """The kinds of tasks for an instance, whose values appear in the log."""

    BUILD = 'build'
    REBUILD = 'rebuild'
    ADOPT = 'adopt'
    DESTROY = 'destroy'
    DESTROY_FORGOTTEN = 'destroy as accepted'
    REFUSE = 'refuse'
    CLEAR = 'clear'
    POWER = 'power'
    START_AFTER_REBOOT = 'resume'
    SHUTDOWN = 'shutdown'
    SWITCH_OFF = 'switch off'
    START = 'start'
    DONE = 'done'
    VANISHED = 'vanished'
    ADDRESS = 'address'
    READY = 'ready'
    CHANGED = 'changed'
    RESIZE = 'resize'
    RESIZED = 'resized'

    @property
    def is_build(self) -> bool:
        return self in (Kind.BUILD, Kind.REBUILD)


@dataclass(frozen=True)
class Task:
    kind: Kind
    instance: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Observations:
    """The state of this host that a plan is based on, by instance."""

    guests: Mapping[str, Guest]
    # {MAC: address} of those that were queried.
    addresses: Mapping[str, Mapping[str, Address]]
    shutdown_actions: Mapping[str, Kind | None]
    # Their domain and disk were missing in two checks at least CONFIRMATION_SECONDS (host/claims.py) apart.
    vanished: Collection[str]
    # They were here when the host went down, and are not handled yet.
    before_reboot: Collection[str]
    # Their cloud-init has finished.
    ready: Collection[str]
    # ISO 8601, '' if unknown.
    now: str


def plan(
    parsed_requests: Mapping[str, ParsedRequest], records: Mapping[str, Record], observations: Observations
) -> list[Task]:
    """Return the tasks to do now, at most one for each instance."""
    tasks = []
    for instance, parsed in parsed_requests.items():
        record, guest = records.get(instance), observations.guests.get(instance)
        task = _plan_end(parsed, record)
        if task is None and record is not None and record.state in (ACTIVE, STOPPED):
            assert isinstance(parsed, Request)  # _plan_end() has returned a task for an InvalidRequest
            shutdown_action = observations.shutdown_actions.get(instance, Kind.SHUTDOWN)
            # A rebuild first: an interrupted one may have left neither domain nor disk.
            task = _plan_rebuild(parsed, record) or _plan_resize(parsed.resize, record, guest)
            task = task or _plan_power(parsed.power, record, guest, shutdown_action)
        task = task or _plan_upkeep(parsed, record, observations)
        if task is not None and isinstance(parsed, Request) and parsed.is_adopted:
            task = (_OF_ADOPTED.get(task[0], task[0]), task[1])
        if task is not None:
            tasks.append(Task(task[0], instance, task[1]))
    return tasks


# Tasks of an adopted instance that differ. After a reboot libvirt's autostart decides, so only its state is recorded.
_OF_ADOPTED = {Kind.BUILD: Kind.ADOPT, Kind.START_AFTER_REBOOT: Kind.POWER}


def _plan_end(parsed: ParsedRequest, record: Record | None) -> tuple[Kind, str] | None:
    """Return the task that ends an instance or its request, or None if it lives."""
    if record is not None and record.state == GONE:
        return Kind.CLEAR, 'the instance is gone, and a uuid is never used twice'
    if isinstance(parsed, InvalidRequest):
        return Kind.REFUSE, parsed.reason
    if parsed.is_tombstone:
        return Kind.DESTROY, 'its destroy was requested'
    if record is not None and record.state == ERROR:
        return Kind.CLEAR, 'the instance failed, and a uuid is never used twice'
    return None


def _plan_rebuild(request: Request, record: Record) -> tuple[Kind, str] | None:
    is_due = not record.has_rebuilt(request.rebuild) and not request.is_adopted
    return (Kind.REBUILD, 'its rebuild was requested') if is_due else None


def _plan_resize(resize: Resize | None, record: Record, guest: Guest | None) -> tuple[Kind, str] | None:
    """Return RESIZE for a new change, RESIZED once the guest runs with that size, or None."""
    if resize is None or guest is None:
        return None
    if record.resize is None or record.resize.number != resize.number:
        return Kind.RESIZE, 'its resize was requested'
    # What runs is the evidence: a guest that boots again by itself keeps the size that its domain had at its start.
    is_done = record.resize == resize and guest.runs_with(resize.resources)
    return (Kind.RESIZED, 'its guest has started with the new size') if is_done else None


def _plan_power(
    power: PowerAction | None, record: Record, guest: Guest | None, shutdown_action: Kind | None
) -> tuple[Kind, str] | None:
    """Return the next step of a requested power action, or None if there is none now."""
    if power is None or power.is_done(record.power) or guest is None:
        return None
    reason = f'its {power.action} was requested'
    if not guest.running:
        return (Kind.DONE, f'it is off: {reason}') if power.action == order.STOP else (Kind.START, reason)
    # A guest that was asked to shut down may do so late, so a newer request waits until it is off.
    goes_off = power.action == order.STOP or parse_phase(record.power) == order.SHUTDOWN_REQUESTED
    if not goes_off and (power.action == order.START or record.power == power.format_phase(order.SHUT_OFF)):
        return Kind.DONE, f'it runs: {reason}'
    if shutdown_action is Kind.SWITCH_OFF:
        reason = f'{reason}, but the guest did not shut down in time'
    return (shutdown_action, reason) if shutdown_action is not None else None


def _plan_upkeep(parsed: ParsedRequest, record: Record | None, observations: Observations) -> tuple[Kind, str] | None:
    """Return the task that makes guest, request and record agree, power actions aside."""
    instance = parsed.instance
    guest = observations.guests.get(instance)
    if record is None or record.state not in (ACTIVE, STOPPED):
        return Kind.BUILD, 'it was requested, but does not exist yet'
    if guest is None and instance in observations.vanished:
        return Kind.VANISHED, DOMAIN_AND_DISK_GONE
    running = guest is not None and guest.running
    is_off = guest is not None and guest.is_built and not running
    if is_off and record.state == ACTIVE and instance in observations.before_reboot:
        return Kind.START_AFTER_REBOOT, 'it ran when the host went down'
    fault = find_fault(record, guest)
    if running != (record.state == ACTIVE) or fault != record.fault:
        return Kind.POWER, fault or ('it runs' if running else 'it is off')
    if has_new_address(record, observations.addresses.get(instance, {}), observations.now):
        return Kind.ADDRESS, 'its address is known'
    if instance in observations.ready and is_unready(record):
        return Kind.READY, 'its cloud-init has finished'
    if isinstance(parsed, Request) and copy_changes(record, parsed) is not record:
        return Kind.CHANGED, 'its user changed it'
    return None


def has_new_address(record: Record, addresses: Mapping[str, Address], now: str = '') -> bool:
    """Return whether there is an address to record: a new one, or the first since a boot."""
    pairs = [(each.address, addresses[each.mac].address) for each in record.addresses if each.mac in addresses]
    if any(old != new for old, new in pairs):
        return True
    # The first address since a boot must be of the first interface, and its lease not older than the last stop.
    first_address = addresses.get(record.addresses[0].mac) if record.addresses else None
    if first_address is None or not _is_unaddressed(record):
        return False
    off_time = record.last_boot.previous_stop if record.last_boot else ''
    # The clock may have been set back since: until it has caught up, every new lease looks older than the last boot.
    if now and off_time > now:
        return True
    # A lease's time is a whole second.
    return not (first_address.since and off_time) or first_address.since[:19] >= off_time[:19]


def is_unready(record: Record) -> bool:
    """Return whether the guest runs and its cloud-init has not reported an end in this boot."""
    return record.state == ACTIVE and 'ready' not in record.reached_stages and record.cloud_init is None


def is_address_pending(record: Record) -> bool:
    """Return whether a running guest lacks an address, or its first one since its last boot."""
    is_missing = any(each.address is None for each in record.addresses)
    return record.state == ACTIVE and (is_missing or _is_unaddressed(record))


def _is_unaddressed(record: Record) -> bool:
    return record.last_boot is not None and bool(record.addresses) and 'addressed' not in record.last_boot.stages


RESIZE_FAILED = 'its size could not be changed'
DOMAIN_AND_DISK_GONE = 'its domain and its disk are gone'
DOMAIN_GONE = 'its domain is gone, its disk is there'
UNMARKED = 'its domain was undefined, or lost the adoption mark'
DISK_GONE = 'its disk is gone'
# The beginnings of the faults that end by themselves, once they are no longer observed.
OBSERVED_FAULTS = (DOMAIN_AND_DISK_GONE, DOMAIN_GONE, DISK_GONE, UNDEFINED, *TROUBLE_KINDS)


def find_fault(record: Record, guest: Guest | None) -> str | None:
    """Return the fault that the record of a once active guest gets, or None to clear it."""
    fault, running = record.fault or '', guest is not None and guest.running
    if fault.startswith(order.REBUILD_FAILED) and not running:
        return fault  # it is why the disk is gone, for example
    observed = _find_observed_fault(record, guest)
    ended_by_start = order.START_FAILED if record.state == ACTIVE else (order.START_FAILED, order.REBUILD_FAILED)
    if observed is None and running and fault.startswith(ended_by_start):
        return None
    if observed is not None or not all(part.startswith(OBSERVED_FAULTS) for part in fault.split('; ')):
        return observed or record.fault
    # libvirtd forgets why a domain went off when it restarts, so the recorded crash is kept.
    if record.fault == CRASHED and guest is not None and not guest.running:
        return record.fault
    return None


def _find_observed_fault(record: Record, guest: Guest | None) -> str | None:
    if guest is None:
        return DOMAIN_AND_DISK_GONE
    if not guest.disk:
        return DISK_GONE
    if not guest.defined:
        return UNDEFINED if guest.running else DOMAIN_GONE
    return guest.describe_trouble(*record.sizes) or None
