"""One compute's planning: compare requests with guests, and carry out the difference.

The caller of step() has the returned work carried out in its threads, at most one task an instance at a time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from ecomp.agent.host.claims import APART, due
from ecomp.agent.instance.instances import Instances, Shutdowns
from ecomp.agent.instance.plan import Kind, Sightings, Task, Wish, pending, plan, unready
from ecomp.agent.instance.records import Superseded
from ecomp.agent.turns import Complaints, Delays
from ecomp.errors import EcompError, Unreachable, Unreadable
from ecomp.model import keys
from ecomp.model.allocation import Resources, summed
from ecomp.model.guest import Address, Guest
from ecomp.model.order import Invalid, Request, parse_request, shares
from ecomp.model.record import ACTIVE, BUILDING, STOPPED, Record
from ecomp.store.client import Entry


class Work(NamedTuple):
    """A task with its request and that key's revision, as planned; the key may be gone since."""

    task: Task
    revision: int
    wish: Wish
    guest: Guest | None
    addresses: Mapping[str, Address]

    @property
    def instance(self) -> str:
        return self.task.instance

    @property
    def request(self) -> Request:
        """The wish of a task that plan() makes for valid requests only."""
        assert isinstance(self.wish, Request)
        return self.wish

    @property
    def refused(self) -> Invalid:
        """The wish of a task that refuses an invalid request."""
        assert isinstance(self.wish, Invalid)
        return self.wish


# The methods raise what those of Instances do.
CARRIED_OUT: Mapping[Kind, Callable[[Instances, Work], None]] = {
    Kind.BUILD: lambda instances, work: instances.build(work.request, work.revision, work.guest),
    Kind.DESTROY: lambda instances, work: instances.destroy(work.request, work.revision),
    Kind.REFUSE: lambda instances, work: instances.refuse(work.refused, work.revision, work.guest),
    Kind.CLEAR: lambda instances, work: instances.clear(work.instance, work.revision, work.task.reason),
    Kind.VANISHED: lambda instances, work: instances.vanished(work.instance, work.revision),
    Kind.ADDRESS: lambda instances, work: instances.address(work.instance, work.revision, work.addresses),
    Kind.READY: lambda instances, work: instances.ready(work.instance, work.revision),
    Kind.POWER: lambda instances, work: instances.note_power(work.instance, work.revision, work.guest),
    Kind.RESUME: lambda instances, work: instances.resume(work.instance, work.revision),
    Kind.SHUTDOWN: lambda instances, work: instances.shut_down(work.request, work.revision),
    Kind.SWITCH_OFF: lambda instances, work: instances.switch_off(work.request, work.revision),
    Kind.START: lambda instances, work: instances.start(work.request, work.revision),
    Kind.DONE: lambda instances, work: instances.power_done(work.request, work.revision, work.guest),
}

log = logging.getLogger(__name__)

# Requests of one compute; more are refused, so that no scheduler can fill its memory.
MOST = 10_000
# Time a recheck may spend on builds whose request was deleted; the next one continues.
ENDING = 1.0
# A guest is asked again to turn itself off at an interval, and is switched off after the grace period.
GRACE = 60.0
ASK_AGAIN = 10.0
# Time between two plans if nothing wakes the planner.
EVERY = 60.0
# Addresses are polled at this interval at first, because a bridge announces no leases. Some guests never have one, so
# the interval grows to 1/POLL_DIVISOR of the time waited, but not above PLAN_INTERVAL_SECONDS.
POLL = 2.0
POLLS = 30
# Names of activities whose failures are logged.
LOOKING = 'looking at claims'
NOTING = 'noting what runs again since the reboot'
READING = 'reading %s'
ASKING = 'asking for the addresses of %s'


class Planner:
    """The requests of one compute, and the tasks that are in flight or deferred.

    step(), due() and recheck() must not run concurrently; all else is thread-safe. The caller of step() calls begin()
    for each work before a thread carries it out. A wake-up asks for another step.
    """

    def __init__(self, instances: Instances, complaints: Complaints) -> None:
        self._instances = instances
        # Called at each wake-up, in its thread.
        self.on_nudge: Callable[[], None] = lambda: None
        self.delays = Delays()
        self.complaints = complaints
        complaints.on_return = self.works_again
        self._changed = threading.Lock()
        self._in_work: dict[str, Work] = {}
        # The instances without an address at the last step, and since when (monotonic) this set is unchanged.
        self.without_addresses: tuple[frozenset[str], float] = frozenset(), 0.0
        # The finished work with its time, from the worker threads to the next step. Fields below are the planner's.
        self._done: queue.SimpleQueue[tuple[Work, float]] = queue.SimpleQueue()
        self._wishes: dict[str, tuple[int, Wish]] = {}
        # The resources that the requests hold on this compute; None before they were read.
        self.given: Resources | None = None
        self._strangers: set[str] = set()
        self._refused: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        self._before_reboot = self._instances.memory.before_reboot()
        self._shutdowns = Shutdowns(GRACE, ASK_AGAIN)
        self._planned = 0.0
        self._ends_builds = False

    def nudge(self, reason: str) -> None:
        """Ask for a step, because something may have changed. From any thread."""
        log.debug('nudged: %s', reason)
        self.on_nudge()

    def begin(self, work: Work) -> None:
        """Note that the work is in flight, until carry_out() or hand_back() finishes it."""
        with self._changed:
            self._in_work[work.instance] = work

    def in_work(self) -> dict[str, Work]:
        with self._changed:
            return dict(self._in_work)

    def step(self, state: Mapping[str, Entry]) -> list[Work]:
        """Return the work that is due and not in flight. `state` has all requests of this compute.

        Errors of the hypervisor pass, and Unreachable from reading records; the next step returns the same work.
        """
        self._planned = time.monotonic()
        # Read first: a task that finishes during this step wakes the planner, and the next step plans its instance.
        busy = self.in_work().keys()
        self._note_done()
        return self._plan(state, self._instances.guests(), busy)

    def hand_back(self, work: Work, reason: str) -> None:
        """Defer work that was begun, because no thread is available. A later step returns it again."""
        self._end(work)
        self.complaints.complain(work.instance, EcompError(reason))
        self.delays.put_off(work.instance)

    def due(self) -> list[float]:
        """Return the times (monotonic) at which a step has something to do without a wake-up."""
        now, (instances, since) = time.monotonic(), self.without_addresses
        missing = [first + APART for first in self._missing.values()]
        polls = [now + poll_after(now - since)] if instances else []
        return [self.delays.next(self.in_work()), *missing, *polls, *self._shutdowns.next(after=self._planned)]

    def stop_builds(self) -> None:
        """Start no builds until allow_builds(); those in flight stop and undo themselves."""
        self._ends_builds = True
        self._instances.runner.cancel(None)

    def allow_builds(self) -> None:
        """Start builds again after stop_builds()."""
        self._ends_builds = False
        self._instances.runner.allow()
        self.works_again()

    def recheck(self) -> None:
        """Reread records that others changed, and end builds without a request; etcd's errors pass."""
        busy = self.in_work()
        wishes = {name: wish for name, (_, wish) in self._wishes.items() if name not in busy}
        changed = self._instances.records.recheck(wishes)
        if changed:
            self.nudge(f'the records of {", ".join(changed)} were changed by somebody else')
        if self.given is None:
            return  # the requests were not read yet
        # No plan contains a deferred or stopped build whose request was deleted manually.
        unfinished = (key for key, entry in self._instances.memory.all().items() if entry.record.state == BUILDING)
        deadline = time.monotonic() + ENDING
        for instance in [other for other in unfinished if other not in busy and other not in self._wishes]:
            self._end_without_request(instance)
            if time.monotonic() > deadline:
                break  # placement is slow or unreachable, and plans must not wait for it

    def carry_out(self, work: Work) -> None:
        """Do the work, log and defer failures, and wake the planner."""
        task, instance, started_at = work.task, work.instance, time.monotonic()
        log.debug('%s %s: %s', task.kind.value, instance, task.reason)
        try:
            if self._ends_builds and task.kind is Kind.BUILD:
                return  # stopped while it waited for a thread
            CARRIED_OUT[task.kind](self._instances, work)
            self._done.put((work, time.monotonic()))
            self.delays.forget(instance)
            self.complaints.settle(instance)
        except Superseded:
            self._instances.records.forget(instance)
            self.complaints.hand_over(instance, LOOKING)
            if task.kind is Kind.BUILD:
                self._end_without_request(instance)
        except (EcompError, OSError) as error:
            self.complaints.complain(instance, _told(error), started_at)
            self.delays.put_off(instance)
        except Exception:
            log.exception('unexpected error in the %s of instance %s', task.kind.value, instance)
            self.delays.put_off(instance)
        finally:
            self._end(work)
            self.nudge(f'{task.kind.value} of {instance} ended')

    def works_again(self) -> None:
        """Retry deferred tasks now. From any thread."""
        self.delays.clear()
        self.nudge('what failed works again')

    def _end(self, work: Work) -> None:
        with self._changed:
            del self._in_work[work.instance]

    def _note_done(self) -> None:
        while not self._done.empty():
            work, finished_at = self._done.get()
            if work.task.kind is Kind.REFUSE:
                self._refused[work.instance] = work.revision
            elif work.task.kind is Kind.RESUME:
                self._before_reboot -= {work.instance}
            elif work.task.kind is Kind.SHUTDOWN:
                self._shutdowns.note_asked(work.instance, finished_at)

    def _plan(self, state: Mapping[str, Entry], guests: Mapping[str, Guest], busy: Set[str]) -> list[Work]:
        self._read_wishes(state)
        records, unreadable = self._records(busy)
        without_address = [record.instance for record in records.values() if pending(record)]
        addresses = {instance: self._addresses(instance) for instance in without_address}
        # Nothing is done about an instance whose record is unknown.
        wishes = {instance: wish for instance, (_, wish) in self._wishes.items() if instance not in unreadable}
        guests_with_record = {instance: guest for instance, guest in guests.items() if instance not in unreadable}
        now = time.monotonic()
        active = {name for name, record in records.items() if record.state in (ACTIVE, STOPPED)}
        self._missing, vanished = due(self._missing, active - guests.keys(), now)
        self._shutdowns.keep({name for name, domain in guests.items() if domain.running and name in self._wishes})
        self._note_dealt_with(records, guests, busy)
        unmanaged_before, self._strangers = self._strangers, guests.keys() - self._wishes.keys()
        for stranger in sorted(self._strangers - unmanaged_before):
            log.warning('instance %s is here but nobody asks for it: kept, and unmanaged', stranger)
        sightings = Sightings(
            guests=guests_with_record,
            addresses=addresses,
            patience=self._shutdowns.patience(now),
            vanished=vanished,
            before_reboot=self._before_reboot,
            ready=self._instances.guest_data.ready() if any(map(unready, records.values())) else set(),
            now=self._instances.now(),
        )
        tasks = plan(wishes, records, sightings)
        for instance in self.delays.forget_all_but({planned.instance for planned in tasks} | self.in_work().keys()):
            self.complaints.hand_over(instance, LOOKING)
        deferred = self.delays.put_off_now(now)
        if self.without_addresses[0] != frozenset(without_address):
            self.without_addresses = frozenset(without_address), now
        work = []
        for task in tasks:
            if task.instance in busy:
                in_flight = self.in_work().get(task.instance) if task.kind is Kind.DESTROY else None
                if in_flight is not None and in_flight.task.kind is Kind.BUILD:
                    self._instances.runner.cancel(task.instance)
                continue
            if task.instance in deferred:
                continue
            revision, wish = self._wishes[task.instance]
            refusal = self._refused.get(task.instance)
            if task.kind is Kind.REFUSE and (refusal == revision or (refusal and not keys.is_uuid(task.instance))):
                continue  # logged once, even if it is written again; ecompute must not delete such a key
            if task.kind is Kind.VANISHED and task.instance in self._instances.hypervisor.guests():
                continue  # it has just come back
            work.append(Work(task, revision, wish, guests.get(task.instance), addresses.get(task.instance, {})))
        return work

    def _note_dealt_with(self, records: Mapping[str, Record], guests: Mapping[str, Guest], busy: Set[str]) -> None:
        """Save which instances were handled since the reboot: if they go off now, that is intended."""
        handled = {name for name, guest in guests.items() if guest.running}
        handled |= {name for name, record in records.items() if record.state != ACTIVE}
        self._before_reboot = self._before_reboot.intersection(self._wishes) - (handled - busy)
        try:
            self._instances.memory.dealt_with_all_but(self._before_reboot)
        except OSError as error:
            self.complaints.complain(NOTING, _told(error))
        else:
            self.complaints.settle(NOTING)

    def _read_wishes(self, state: Mapping[str, Entry]) -> None:
        before = self._wishes
        self._wishes = {}
        prefix = keys.request_prefix(self._instances.compute)
        for key, entry in state.items():
            name = key.removeprefix(prefix)
            previous = before.get(name)
            if previous is not None and previous[0] == entry.revision:
                self._wishes[name] = previous
                continue
            if previous is not None:
                self.delays.forget(name)  # the failure of an older request does not defer a new one
            parsed = parse_request(self._instances.compute, key, entry.value, entry.dropped)
            is_destroy = isinstance(parsed, Request) and parsed.is_tombstone
            if previous is None and len(self._wishes) >= MOST and not is_destroy:
                parsed = Invalid(name, f'this compute has {MOST} instances, and takes no more', shares(parsed))
            self._wishes[name] = entry.revision, parsed
        wishes = [wish for _, wish in self._wishes.values() if isinstance(wish, Request)]
        self.given = summed(request.allocations.get(self._instances.compute, request.left) for request in wishes)
        for name in before.keys() - self._wishes.keys():
            self._refused.pop(name, None)
            for activity in (READING % name, ASKING % name):
                self.complaints.hand_over(activity, LOOKING)

    def _records(self, busy: Set[str]) -> tuple[dict[str, Record], set[str]]:
        """Return the records, and the instances whose record cannot be read; Unreachable passes."""
        records, unreadable = {}, set()
        for instance, (_, wish) in self._wishes.items():
            # The worker thread of an instance in flight changes its record.
            if instance in busy or not keys.is_uuid(instance):
                continue
            activity = READING % instance
            try:
                record = self._instances.records.get(instance)
            except Unreachable:
                raise
            except EcompError as error:
                # A destroy needs only its request, and logs an unreadable record itself.
                if not (isinstance(error, Unreadable) and isinstance(wish, Request) and wish.is_tombstone):
                    self.complaints.complain(activity, error)
                    unreadable.add(instance)
                continue
            self.complaints.settle(activity)
            if record is not None:
                records[instance] = record
        return records, unreadable

    def _addresses(self, instance: str) -> Mapping[str, Address]:
        """Return a guest's addresses by MAC; log errors other than Unreachable, and return {}."""
        activity = ASKING % instance
        try:
            addresses = self._instances.hypervisor.addresses(instance)
        except Unreachable:
            raise
        except EcompError as error:
            self.complaints.complain(activity, error)
            return {}
        self.complaints.settle(activity)
        return addresses

    def _end_without_request(self, instance: str) -> None:
        """End a stopped build whose request was deleted; keep a finished guest; log errors."""
        try:
            self._instances.end_without_request(instance, self._instances.hypervisor.guests().get(instance))
        except Superseded:
            self._instances.records.forget(instance)
        except (EcompError, OSError) as error:
            self.complaints.complain(instance, _told(error))


def poll_after(waited: float) -> float:
    """Return the seconds until the next poll, for guests without address for `waited_seconds`."""
    return min(max(POLL, waited / POLLS), EVERY)


def _told(error: EcompError | OSError) -> EcompError:
    if isinstance(error, EcompError):
        return error
    return EcompError(f'{error.filename or "failed"}: {error.strerror or error}')  # mostly of the state directory
