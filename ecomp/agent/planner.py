"""Reconcile the requests of one compute with its guests, as work for the caller's threads."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Set
from functools import partial
from typing import NamedTuple

from ecomp.agent.host.claims import CONFIRMATION_SECONDS, confirm_sightings
from ecomp.agent.instance.instances import Instances, Shutdowns
from ecomp.agent.instance.plan import Kind, Observations, ParsedRequest, Task, is_address_pending, is_unready, plan
from ecomp.agent.instance.records import Superseded
from ecomp.agent.jobs import Deferrals, FailureLog
from ecomp.errors import EcompError, Unreachable, Unreadable
from ecomp.model import keys
from ecomp.model.allocation import Resources
from ecomp.model.facts import sum_usage
from ecomp.model.guest import Address, Guest
from ecomp.model.order import InvalidRequest, Request, get_holdings, parse_request
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE, BUILDING, STOPPED
from ecomp.store.client import Entry


class Work(NamedTuple):
    """A planned task, with the request, guest and addresses by MAC that the plan saw."""

    task: Task
    revision: int  # of the request, whose key may be gone
    parsed_request: ParsedRequest
    guest: Guest | None
    addresses: Mapping[str, Address]

    @property
    def instance(self) -> str:
        return self.task.instance

    @property
    def request(self) -> Request:
        assert isinstance(self.parsed_request, Request)  # its tasks are planned for valid requests only
        return self.parsed_request

    @property
    def invalid_request(self) -> InvalidRequest:
        assert isinstance(self.parsed_request, InvalidRequest)
        return self.parsed_request


# The methods raise what those of Instances do.
TASK_METHODS: Mapping[Kind, Callable[[Instances, Work], None]] = {
    Kind.BUILD: lambda instances, work: instances.build(work.request, work.revision, work.guest),
    Kind.REBUILD: lambda instances, work: instances.rebuild(work.request, work.revision, work.guest),
    Kind.ADOPT: lambda instances, work: instances.adopt(work.request, work.revision),
    Kind.DESTROY: lambda instances, work: instances.destroy(work.request, work.revision),
    Kind.DESTROY_FORGOTTEN: lambda instances, work: instances.destroy_forgotten(work.instance),
    Kind.REFUSE: lambda instances, work: instances.refuse(work.invalid_request, work.revision, work.guest),
    Kind.CLEAR: lambda instances, work: instances.drop_request(work.instance, work.revision, work.task.reason),
    Kind.VANISHED: lambda instances, work: instances.end_vanished(work.request, work.revision),
    Kind.ADDRESS: lambda instances, work: instances.record_addresses(work.instance, work.revision, work.addresses),
    Kind.READY: lambda instances, work: instances.record_ready(work.instance, work.revision),
    Kind.POWER: lambda instances, work: instances.record_power(work.instance, work.revision, work.guest),
    Kind.START_AFTER_REBOOT: lambda instances, work: instances.start_after_reboot(work.instance, work.revision),
    Kind.SHUTDOWN: lambda instances, work: instances.shut_down(work.request, work.revision),
    Kind.SWITCH_OFF: lambda instances, work: instances.switch_off(work.request, work.revision),
    Kind.START: lambda instances, work: instances.start(work.request, work.revision),
    Kind.RESIZE: lambda instances, work: instances.resize(work.request, work.revision, work.guest),
    Kind.RESIZED: lambda instances, work: instances.end_resize(work.request, work.revision),
    Kind.CHANGED: lambda instances, work: instances.record_changes(work.request, work.revision),
    Kind.DONE: lambda instances, work: instances.record_power_done(work.request, work.revision, work.guest),
}

log = logging.getLogger(__name__)

# Requests of one compute; more are refused, so that no scheduler can fill its memory.
MAX_REQUESTS = 10_000
# Time a recheck may spend on builds whose request was deleted; the next one continues.
MAX_CLEANUP_SECONDS = 1.0
# A guest is asked again to turn itself off at an interval, and is switched off after the grace period.
SHUTDOWN_GRACE_SECONDS = 60.0
SHUTDOWN_REPEAT_SECONDS = 10.0
# Time between two plans if nothing wakes the planner.
PLAN_INTERVAL_SECONDS = 60.0
# Addresses are polled, because a bridge announces no leases; ever more rarely, because some guests never have one.
FIRST_POLL_SECONDS = 2.0
POLL_DIVISOR = 30
CHECKING_CLAIMS = 'checking claims'
SAVING_UNHANDLED = 'saving which instances have not been started since the reboot'
READING_RECORD = 'reading the record of %s'
READING_ADDRESSES = 'reading the addresses of %s'


class Planner:
    """The requests of one compute, and the tasks that are in flight or deferred.

    step(), list_due_times() and recheck() must not run concurrently. All other methods are thread-safe.
    """

    def __init__(self, instances: Instances, failures: FailureLog) -> None:
        self._instances = instances
        # Called at each wake-up, in its thread.
        self.on_wake_up: Callable[[], None] = lambda: None
        self.deferrals = Deferrals()
        self.failures = failures
        failures.on_recovery = self.retry_now
        self._lock = threading.Lock()
        self._in_flight: dict[str, Work] = {}
        # The instances without an address at the last step, and since when (monotonic) this set is unchanged.
        self.without_addresses: tuple[frozenset[str], float] = frozenset(), 0.0
        # The work that succeeded, with its time, from workers to the next step. Fields below are the planner's.
        self._completions: queue.SimpleQueue[tuple[Work, float]] = queue.SimpleQueue()
        self._parsed_requests: dict[str, tuple[int, ParsedRequest]] = {}
        # The resources that the requests hold on this compute; None before they were read.
        self.usage: Resources | None = None
        # What each request that is no tombstone claims here.
        self.targets: Mapping[str, Resources] = {}
        # The guests without a request; of these, those whose destroy `host forget` completed, with their last request.
        self._unmanaged: set[str] = set()
        self._forgotten: dict[str, Request] = {}
        self._refused_revisions: dict[str, int] = {}
        self._missing_since: dict[str, float] = {}
        self._before_reboot = self._instances.memory.load_unhandled()
        self._shutdowns = Shutdowns(SHUTDOWN_GRACE_SECONDS, SHUTDOWN_REPEAT_SECONDS)
        self._planned_at = 0.0

    def wake_up(self, reason: str) -> None:
        """Call on_wake_up() for a step soon, and log the reason at level debug."""
        log.debug('woken: %s', reason)
        self.on_wake_up()

    def begin(self, work: Work) -> None:
        """Note, before a thread gets it, that work is in flight until carry_out() or hand_back()."""
        with self._lock:
            self._in_flight[work.instance] = work

    def get_in_flight(self) -> dict[str, Work]:
        with self._lock:
            return dict(self._in_flight)

    def step(self, state: Mapping[str, Entry]) -> list[Work]:
        """Return the work that is due, for the caller to begin(), and cancel builds before destroys."""
        self._planned_at = time.monotonic()
        # Read first: a task that finishes during this step wakes the planner, and the next step plans its instance.
        busy = self.get_in_flight().keys()
        self._process_completions()
        return self._plan(state, self._instances.list_guests(), busy)

    def hand_back(self, work: Work, reason: str) -> None:
        """Defer work for which no thread could be started after begin(), and log `reason`."""
        self._finish(work)
        self.failures.report_failure(work.instance, EcompError(reason))
        self.deferrals.defer(work.instance)

    def list_due_times(self) -> list[float]:
        """Return the times (monotonic) at which a step is due without a wake-up."""
        now, (instances, since), after = time.monotonic(), self.without_addresses, self._planned_at
        missing = (first + CONFIRMATION_SECONDS for first in self._missing_since.values())
        due_times = [*self.deferrals.get_deferred(after).values(), *(due for due in missing if due > after)]
        polls = [now + choose_poll_interval(now - since)] if instances else []
        return [*due_times, *polls, *self._shutdowns.find_times(after=after)]

    def stop_builds(self) -> None:
        self._instances.runner.cancel(None)

    def allow_builds(self) -> None:
        self._instances.runner.allow_builds()
        self.retry_now()

    def recheck(self) -> None:
        """Forget records that other processes changed, and end builds whose request was deleted."""
        busy = self.get_in_flight()
        parsed_requests = {name: parsed for name, (_, parsed) in self._parsed_requests.items() if name not in busy}
        changed = self._instances.records.recheck(parsed_requests)
        if changed:
            self.wake_up(f'another process changed the records of {", ".join(changed)}')
        if self.usage is None:
            return  # the requests were not read yet
        # No plan contains a deferred or stopped build whose request was deleted manually.
        entries, deadline = self._instances.memory.get_entries(), time.monotonic() + MAX_CLEANUP_SECONDS
        unfinished = (name for name, entry in entries.items() if entry.record.state == BUILDING)
        for instance in [name for name in unfinished if name not in busy and name not in self._parsed_requests]:
            self._end_without_request(instance)
            if time.monotonic() > deadline:
                break  # placement is slow or unreachable, and plans must not wait for it

    def carry_out(self, work: Work) -> None:
        """Do the work, log and defer failures, and wake the planner."""
        task, instance, started_at = work.task, work.instance, time.monotonic()
        log.debug('%s %s: %s', task.kind.value, instance, task.reason)
        try:
            TASK_METHODS[task.kind](self._instances, work)
            self._completions.put((work, time.monotonic()))
            self.deferrals.cancel(instance)
            self.failures.report_success(instance)
        except Superseded:
            self._instances.records.forget(instance)
            self.failures.transfer(instance, CHECKING_CLAIMS)
            if task.kind is Kind.BUILD:
                self._end_without_request(instance)
        except (EcompError, OSError) as error:
            self.failures.report_failure(instance, error, started_at)
            self.deferrals.defer(instance)
        except Exception:
            log.exception('unexpected error in the %s of instance %s', task.kind.value, instance)
            self.deferrals.defer(instance)
        finally:
            self._finish(work)
            self.wake_up(f'{task.kind.value} of {instance} finished')

    def retry_now(self) -> None:
        self.deferrals.clear()
        self.wake_up('trying deferred tasks again')

    def _finish(self, work: Work) -> None:
        with self._lock:
            del self._in_flight[work.instance]

    def _process_completions(self) -> None:
        """Note for plans which refusals, starts after a reboot and shutdown requests succeeded."""
        while not self._completions.empty():
            work, finished_at = self._completions.get()
            if work.task.kind is Kind.REFUSE:
                self._refused_revisions[work.instance] = work.revision
            elif work.task.kind is Kind.START_AFTER_REBOOT:
                self._before_reboot -= {work.instance}
            elif work.task.kind is Kind.SHUTDOWN:
                self._shutdowns.note_request(work.instance, finished_at)

    def _plan(self, state: Mapping[str, Entry], guests: Mapping[str, Guest], busy: Set[str]) -> list[Work]:
        """Return the work that is due, and cancel builds of instances to be destroyed."""
        self._update_requests(state)
        records, unreadable = self._read_records(busy)
        self._save_unhandled(records, guests, busy)
        self._update_unmanaged(guests)
        # Nothing is done about an instance whose record is unknown.
        requests = {name: parsed for name, (_, parsed) in self._parsed_requests.items() if name not in unreadable}
        seen = self._observe(records, guests)
        reason = 'its destroy was accepted before this host was forgotten'
        forgotten = [Task(Kind.DESTROY_FORGOTTEN, name, reason) for name in sorted(self._forgotten)]
        tasks = plan(requests, records, seen) + forgotten
        for instance in self.deferrals.cancel_all_but({task.instance for task in tasks} | self.get_in_flight().keys()):
            self.failures.transfer(instance, CHECKING_CLAIMS)
        destroyed = {task.instance for task in tasks if task.kind is Kind.DESTROY}
        for instance, in_flight in self.get_in_flight().items():
            if in_flight.task.kind.is_build and instance in destroyed:
                self._instances.runner.cancel(instance)
        not_due = busy | self.deferrals.get_deferred(time.monotonic()).keys()
        work = []
        for task in tasks:
            name = task.instance
            revision, parsed = self._parsed_requests.get(name) or (0, self._forgotten[name])
            if name not in not_due and not self._is_obsolete(task, revision):
                work.append(Work(task, revision, parsed, guests.get(name), seen.addresses.get(name, {})))
        return work

    def _observe(self, records: Mapping[str, Record], guests: Mapping[str, Guest]) -> Observations:
        pending = frozenset(record.instance for record in records.values() if is_address_pending(record))
        find, attempt = self._instances.hypervisor.find_addresses, self.failures.attempt
        addresses = {name: attempt(READING_ADDRESSES % name, partial(find, name), Unreachable) for name in pending}
        now = time.monotonic()
        if self.without_addresses[0] != pending:
            self.without_addresses = pending, now
        active = {name for name, record in records.items() if record.state in (ACTIVE, STOPPED)}
        self._missing_since, vanished = confirm_sightings(self._missing_since, active - guests.keys(), now)
        running = {name for name, guest in guests.items() if guest.running}
        self._shutdowns.forget_all_but(running & self._parsed_requests.keys())
        return Observations(
            guests=guests,
            addresses={name: found for name, found in addresses.items() if found},
            shutdown_actions=self._shutdowns.find_actions(now),
            vanished=vanished,
            before_reboot=self._before_reboot,
            ready=self._instances.guest_data.find_ready() if any(map(is_unready, records.values())) else set(),
            now=self._instances.now(),
        )

    def _update_unmanaged(self, guests: Mapping[str, Guest]) -> None:
        """Note the guests without a request, and log each new one that is kept."""
        unmanaged = guests.keys() - self._parsed_requests.keys()
        strangers = unmanaged - self._unmanaged
        self._forgotten |= self._instances.find_forgotten(strangers) if strangers else {}
        self._forgotten = {name: request for name, request in self._forgotten.items() if name in unmanaged}
        self._unmanaged = unmanaged
        for name in sorted(strangers - self._forgotten.keys()):
            reason = 'has a guest but no request: the guest is kept, but not managed. Try: eschedule check'
            log.warning('instance %s %s', name, reason)

    def _is_obsolete(self, task: Task, revision: int) -> bool:
        if task.kind is Kind.REFUSE:
            # Logged once, even if it is written again; ecompute must not delete a key without a uuid.
            refusal = self._refused_revisions.get(task.instance)
            return refusal == revision or bool(refusal and not keys.is_uuid(task.instance))
        # It may have just come back.
        return task.kind is Kind.VANISHED and task.instance in self._instances.hypervisor.list_guests()

    def _save_unhandled(self, records: Mapping[str, Record], guests: Mapping[str, Guest], busy: Set[str]) -> None:
        handled = {name for name, guest in guests.items() if guest.running}
        handled |= {name for name, record in records.items() if record.state != ACTIVE}
        self._before_reboot = self._before_reboot.intersection(self._parsed_requests) - (handled - busy)
        save = partial(self._instances.memory.save_unhandled, self._before_reboot)
        self.failures.attempt(SAVING_UNHANDLED, save)

    def _update_requests(self, state: Mapping[str, Entry]) -> None:
        """Parse new requests, refuse those beyond MAX_REQUESTS, and sum what all of them use."""
        before, self._parsed_requests = self._parsed_requests, {}
        prefix = keys.request_prefix(self._instances.compute)
        for key, entry in state.items():
            name = key.removeprefix(prefix)
            previous = before.get(name)
            if previous is not None and previous[0] == entry.revision:
                self._parsed_requests[name] = previous
                continue
            if previous is not None:
                self.deferrals.cancel(name)  # the failure of an older request does not defer a new one
            parsed = parse_request(self._instances.compute, key, entry.value, entry.dropped_bytes)
            is_destroy = isinstance(parsed, Request) and parsed.is_tombstone
            if previous is None and len(self._parsed_requests) >= MAX_REQUESTS and not is_destroy:
                reason = f'this compute already has {MAX_REQUESTS} instances, the maximum'
                parsed = InvalidRequest(name, reason, get_holdings(parsed))
            self._parsed_requests[name] = entry.revision, parsed
        requests, compute = [each for _, each in self._parsed_requests.values()], self._instances.compute
        self.usage = sum_usage(compute, requests)
        valid = [each for each in requests if isinstance(each, Request)]
        self.targets = {each.instance: each.allocations[compute] for each in valid if each.allocations}
        for name in before.keys() - self._parsed_requests.keys():
            self._refused_revisions.pop(name, None)
            for activity in (READING_RECORD % name, READING_ADDRESSES % name):
                self.failures.transfer(activity, CHECKING_CLAIMS)

    def _read_records(self, busy: Set[str]) -> tuple[dict[str, Record], set[str]]:
        """Return the records by instance, and the instances whose record is unreadable."""
        records, unreadable = {}, set()
        for instance, (_, parsed) in self._parsed_requests.items():
            # The worker thread of an instance in flight changes its record.
            if instance in busy or not keys.is_uuid(instance):
                continue
            activity = READING_RECORD % instance
            try:
                record = self._instances.records.get(instance)
            except Unreachable:
                raise
            except EcompError as error:
                # A destroy needs only its request, and logs an unreadable record itself.
                if not (isinstance(error, Unreadable) and isinstance(parsed, Request) and parsed.is_tombstone):
                    self.failures.report_failure(activity, error)
                    unreadable.add(instance)
                continue
            self.failures.report_success(activity)
            if record is not None:
                records[instance] = record
        return records, unreadable

    def _end_without_request(self, instance: str) -> None:
        try:
            self._instances.end_without_request(instance, self._instances.hypervisor.list_guests().get(instance))
        except Superseded:
            self._instances.records.forget(instance)
        except (EcompError, OSError) as error:
            self.failures.report_failure(instance, error)


def choose_poll_interval(waited_seconds: float) -> float:
    """Return the seconds until addresses are read again: longer, the longer they are missing."""
    return min(max(FIRST_POLL_SECONDS, waited_seconds / POLL_DIVISOR), PLAN_INTERVAL_SECONDS)
