"""What is asked for against what is there, and the tasks that are the difference. Pure.

A restart, a lost watch, a compaction and a nudge are the same case: the plan is made anew from the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from ecomp.model.boots import off_until
from ecomp.model.guest import CRASHED, NO_SPACE, PAUSED, REFUSED_METADATA, UNLIKE, UNPLUGGED, Address, Guest
from ecomp.model.order import ASKED, NOT_STARTED, OFF, START, STOP, Invalid, Power, Request, phase
from ecomp.model.record import ACTIVE, ERROR, GONE, STOPPED, Record

Wish = Request | Invalid


class Kind(Enum):
    """What a task does."""

    BUILD = 'build'
    DESTROY = 'destroy'
    REFUSE = 'refuse'
    CLEAR = 'clear'
    POWER = 'power'
    RESUME = 'resume'
    SHUTDOWN = 'shutdown'
    SWITCH_OFF = 'switch off'
    START = 'start'
    DONE = 'done'
    VANISHED = 'vanished'
    ADDRESS = 'address'
    READY = 'ready'


class Patience(Enum):
    """What is due of a guest that was asked to turn itself off, and has not yet."""

    WAIT = 'wait'
    ASK_AGAIN = 'ask again'
    NO_MORE = 'no more'


@dataclass(frozen=True)
class Task:
    """One thing to do for one instance, and why, in plain words."""

    kind: Kind
    instance: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Sightings:
    """What was seen on this host by `now`, the time of day, '' where that is not known. All by instance.

    `addresses` are by MAC, of those that were asked for them; `patience` is what is due of those that were asked to
    turn themselves off. `vanished`: domain and disk were missing in two looks at least APART s apart; `before_reboot`:
    here when the host went down; `ready`: their cloud-init is through.
    """

    guests: Mapping[str, Guest]
    addresses: Mapping[str, Mapping[str, Address]]
    patience: Mapping[str, Patience]
    vanished: Collection[str]
    before_reboot: Collection[str]
    ready: Collection[str]
    now: str


def plan(wishes: Mapping[str, Wish], records: Mapping[str, Record], seen: Sightings) -> list[Task]:
    """The tasks, at most one an instance."""
    tasks = []
    for instance, wish in wishes.items():
        record, guest = records.get(instance), seen.guests.get(instance)
        task = _ending(wish, record)
        if task is None and record is not None and record.state in (ACTIVE, STOPPED):
            assert isinstance(wish, Request)  # _ending() has refused the others
            task = _power(wish.power, record, guest, seen.patience.get(instance))
        task = task or _living(instance, record, seen)
        if task is not None:
            tasks.append(Task(task[0], instance, task[1]))
    return tasks


def _ending(wish: Wish, record: Record | None) -> tuple[Kind, str] | None:
    if record is not None and record.state == GONE:
        return Kind.CLEAR, 'it is gone, and a uuid is never used twice'
    if isinstance(wish, Invalid):
        return Kind.REFUSE, wish.reason
    if wish.is_tombstone:
        return Kind.DESTROY, 'its destroy was asked for'
    if record is not None and record.state == ERROR:
        return Kind.CLEAR, 'it failed, and a uuid is never used twice'
    return None


def _power(
    power: Power | None, record: Record, guest: Guest | None, patience: Patience | None
) -> tuple[Kind, str] | None:
    """The next step of what was asked of a guest's power; None: it is done, or the guest is at it, or it is missed."""
    if power is None or power.is_done(record.power) or guest is None:
        return None
    asked = f'its {power.action} was asked for'
    if not guest.running:
        return (Kind.DONE, f'it is off: {asked}') if power.action == STOP else (Kind.START, asked)
    # One that was asked to turn itself off may do so late: what came after that waits for it.
    goes_off = power.action == STOP or phase(record.power) == ASKED
    if not goes_off and (power.action == START or record.power == power.at(OFF)):
        return Kind.DONE, f'it runs: {asked}'
    if patience is Patience.NO_MORE:
        return Kind.SWITCH_OFF, f'{asked}, and it did not turn itself off'
    return None if patience is Patience.WAIT else (Kind.SHUTDOWN, asked)


def _living(instance: str, record: Record | None, seen: Sightings) -> tuple[Kind, str] | None:
    guest = seen.guests.get(instance)
    if record is None or record.state not in (ACTIVE, STOPPED):
        return Kind.BUILD, 'it was asked for and is not there yet'
    if guest is None and instance in seen.vanished:
        return Kind.VANISHED, GONE_BOTH
    running = guest is not None and guest.running
    ran = instance in seen.before_reboot and record.state == ACTIVE
    if ran and guest is not None and guest.defined and guest.disk and not running:
        return Kind.RESUME, 'it ran when the host went down'
    fault = fault_of(record, guest)
    if running != (record.state == ACTIVE) or fault != record.fault:
        return Kind.POWER, fault or ('it runs' if running else 'it is off')
    if news(record, seen.addresses.get(instance, {}), seen.now):
        return Kind.ADDRESS, 'its address is known'
    if instance in seen.ready and unready(record):
        return Kind.READY, 'its cloud-init is through'
    return None


def news(record: Record, addresses: Mapping[str, Address], now: str = '') -> bool:
    """True when an interface has an address now that the record does not say, or has it again after a new boot.

    `now` is as in Sightings.
    """
    if any(each.mac in addresses and addresses[each.mac].address != each.address for each in record.addresses):
        return True
    first = addresses.get(record.addresses[0].mac) if record.addresses else None
    if first is None or not _unaddressed(record):
        return False
    off = off_until(record.known_boots)
    # The clock may have been put back since: until it has caught up, no lease would be later.
    if now and off > now:
        return True
    # A lease's time is a whole second.
    return not (first.since and off) or first.since[:19] >= off[:19]


def unready(record: Record) -> bool:
    """True while cloud-init of a running guest has not said that it is through, nor that it failed, in this boot."""
    return record.state == ACTIVE and 'ready' not in record.reached and record.cloud_init is None


def pending(record: Record) -> bool:
    """True while an interface of a running guest has no address yet, or the first one not since it was started."""
    return record.state == ACTIVE and (any(each.address is None for each in record.addresses) or _unaddressed(record))


def _unaddressed(record: Record) -> bool:
    return record.boot is not None and bool(record.addresses) and 'addressed' not in record.boot.stages


GONE_BOTH = 'its domain and its disk are gone'
GONE_DOMAIN = 'its domain is gone, its disk is there'
GONE_DISK = 'its disk is gone'
UNDEFINED = 'its domain runs and is not defined any more: once it stops it is gone'
SEEN = (GONE_BOTH, GONE_DOMAIN, GONE_DISK, UNDEFINED, CRASHED, NO_SPACE, PAUSED, UNLIKE, UNPLUGGED, REFUSED_METADATA)
"""How faults begin that end by themselves, once what they say is not so any more."""


def fault_of(record: Record, guest: Guest | None) -> str | None:
    """What is wrong with a guest that was active once; None if nothing is, off or running."""
    seen = _seen(record, guest)
    if seen is None and guest is not None and guest.running and (record.fault or '').startswith(NOT_STARTED):
        return None
    if seen is not None or not all(part.startswith(SEEN) for part in (record.fault or '').split('; ')):
        return seen or record.fault
    # libvirt forgets with each restart of its own why a domain went off.
    if record.fault == CRASHED and guest is not None and not guest.running:
        return record.fault
    return None


def _seen(record: Record, guest: Guest | None) -> str | None:
    if guest is None:
        return GONE_BOTH
    if not guest.disk:
        return GONE_DISK
    if not guest.defined:
        return UNDEFINED if guest.running else GONE_DOMAIN
    claims = [(name, has, record.resources.get(name.split()[0], has)) for name, has in guest.size.items()]
    # A disk may be smaller: without `resize` it is as large as its image.
    unlike = [f'{name}:{has} for {due}' for name, has, due in claims if has > due or (has < due and name != 'DISK_GB')]
    return guest.with_trouble(f'{UNLIKE}: {", ".join(unlike)}' if unlike else '').trouble or None
