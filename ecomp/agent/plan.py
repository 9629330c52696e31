"""What is asked for against what is there, and the tasks that are the difference. Pure.

A restart, a lost watch, a compaction and a nudge are the same case: the plan is made anew from the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from ecomp.model.guest import CRASHED, NO_SPACE, Address, Guest
from ecomp.model.instance import Invalid, Request
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
    VANISHED = 'vanished'
    ADDRESS = 'address'
    REPORT = 'report'


@dataclass(frozen=True)
class Task:
    """One thing to do for one instance, and why, in plain words."""

    kind: Kind
    instance: str
    reason: str


def plan(
    compute: str,
    wishes: Mapping[str, Wish],
    records: Mapping[str, Record],
    guests: Mapping[str, Guest],
    addresses: Mapping[str, Mapping[str, Address]],
    vanished: Collection[str] = (),
    before_reboot: Collection[str] = (),
) -> list[Task]:
    """The tasks, at most one an instance. `addresses` is {instance: {mac: address}}, where they were asked for.

    `vanished` are those of whom nothing was seen long enough apart; `before_reboot` those that were here when the host
    went down.
    """
    tasks = []
    for instance, wish in wishes.items():
        record, guest = records.get(instance), guests.get(instance)
        task = _ending(compute, wish, record) or _living(
            record, guest, addresses.get(instance, {}), instance in vanished, instance in before_reboot
        )
        if task is not None:
            tasks.append(Task(task[0], instance, task[1]))
    for instance in guests:
        if instance not in wishes:
            tasks.append(Task(Kind.REPORT, instance, 'is here but nobody asks for it: kept, and unmanaged'))
    return tasks


def _ending(compute: str, wish: Wish, record: Record | None) -> tuple[Kind, str] | None:
    if record is not None and record.compute != compute:
        return Kind.CLEAR, f'it is the instance of compute {record.compute}'
    if record is not None and record.state == GONE:
        return Kind.CLEAR, 'it is gone, and a uuid is never used twice'
    if isinstance(wish, Invalid):
        return Kind.REFUSE, wish.reason
    if wish.is_tombstone:
        return Kind.DESTROY, 'its destroy was asked for'
    if record is not None and record.state == ERROR:
        return Kind.CLEAR, 'it failed, and a uuid is never used twice'
    return None


def _living(
    record: Record | None, guest: Guest | None, addresses: Mapping[str, Address], vanished: bool, before_reboot: bool
) -> tuple[Kind, str] | None:
    if record is None or record.state not in (ACTIVE, STOPPED):
        return Kind.BUILD, 'it was asked for and is not there yet'
    if guest is None and vanished:
        return Kind.VANISHED, GONE_BOTH
    running = guest is not None and guest.running
    ran = before_reboot and record.state == ACTIVE
    if ran and guest is not None and guest.defined and guest.disk and not running:
        return Kind.RESUME, 'it ran when the host went down'
    fault = fault_of(record, guest)
    if running != (record.state == ACTIVE) or fault != record.fault:
        return Kind.POWER, fault or ('it runs' if running else 'it is off')
    if news(record, addresses):
        return Kind.ADDRESS, 'its address is known'
    return None


def news(record: Record, addresses: Mapping[str, Address]) -> bool:
    """True when an interface has an address now that the record does not say."""
    return any(each.mac in addresses and addresses[each.mac].address != each.address for each in record.addresses)


def pending(record: Record) -> bool:
    """True while an interface of a running guest has no address yet."""
    return record.state == ACTIVE and any(each.address is None for each in record.addresses)


GONE_BOTH = 'its domain and its disk are gone'
GONE_DOMAIN = 'its domain is gone, its disk is there'
GONE_DISK = 'its disk is gone'
UNDEFINED = 'its domain runs and is not defined any more: once it stops it is gone'
SEEN = frozenset({GONE_BOTH, GONE_DOMAIN, GONE_DISK, UNDEFINED, CRASHED, NO_SPACE})


def fault_of(record: Record, guest: Guest | None) -> str | None:
    """What is wrong with a guest that was active once; None if nothing is, off or running."""
    seen = _seen(guest)
    if seen is not None or record.fault not in SEEN:
        return seen or record.fault
    # libvirt forgets with each restart of its own why a domain went off.
    if record.fault == CRASHED and guest is not None and not guest.running:
        return record.fault
    return None


def _seen(guest: Guest | None) -> str | None:
    if guest is None:
        return GONE_BOTH
    if not guest.disk:
        return GONE_DISK
    if not guest.defined:
        return UNDEFINED if guest.running else GONE_DOMAIN
    return guest.trouble or None
