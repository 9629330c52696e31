"""One compute's planning without a thread of its own: list, plan, and carry out what the plan says.

A step says what is to be done. Its caller starts that and has it carried out, in whatever threads it has, at most one
task an instance at a time: the daemon, or a test.
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
    """A task with its wish as planned: by the time a thread is free, the key may have been deleted.

    `revision` is that of the request's key, `guest` what is there of it, `addresses` are by MAC.
    """

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
        """The wish, of a kind of task that plan() makes of nothing else."""
        assert isinstance(self.wish, Request)
        return self.wish

    @property
    def refused(self) -> Invalid:
        """The wish, of a task that refuses it."""
        assert isinstance(self.wish, Invalid)
        return self.wish


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
"""Errors: those of Instances."""


log = logging.getLogger(__name__)

MOST = 10_000
"""Requests a compute takes: what is beyond is refused, so that nobody can fill its memory."""
ENDING = 1.0
"""Seconds after which no further build is ended whose request was deleted: the next minute goes on."""
GRACE, ASK_AGAIN = 60.0, 10.0
"""Seconds a guest has to turn itself off before it is switched off, and between two times it is asked to."""
EVERY = 60.0
"""Seconds between two plans when nothing happens."""
POLL = 2.0
"""Seconds between two looks for addresses while one is pending and no lease was announced: a bridge has none."""
POLLS = 30
"""After POLL * POLLS seconds without an address the pause is 1/POLLS of the time waited, EVERY at most: some never have
one."""
LOOKING, NOTING = 'looking at claims', 'noting what runs again since the reboot'
READING, ASKING = 'reading %s', 'asking for the addresses of %s'
"""What a failure of one instance is known by among the complaints."""


class Planner:
    """What is asked of one compute, and what of it is in work or put off.

    step(), due() and recheck() are one thread's, or one's after the other; all else is any thread's. The caller of
    step() calls begin() for each work before a thread carries it out. A nudge asks for another step.
    """

    def __init__(self, instances: Instances, complaints: Complaints) -> None:
        self._instances = instances
        self.on_nudge: Callable[[], None] = lambda: None
        """Called after each nudge, in whatever thread that is."""
        self.delays = Delays()
        self.complaints = complaints
        complaints.on_return = self.works_again
        self._changed = threading.Lock()
        self._in_work: dict[str, Work] = {}
        self.without_addresses: tuple[frozenset[str], float] = frozenset(), 0.0
        """The guests that had no address yet at the last step, and since when, on the monotonic clock, just these."""
        # What was carried out, and when, from whoever did it to the next step: all else is the planning thread's.
        self._done: queue.SimpleQueue[tuple[Work, float]] = queue.SimpleQueue()
        self._wishes: dict[str, tuple[int, Wish]] = {}
        self.given: Resources | None = None
        """What its requests hold of this compute; None before they were read."""
        self._strangers: set[str] = set()
        self._refused: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        self._before_reboot = self._instances.memory.before_reboot()
        self._shutdowns = Shutdowns(GRACE, ASK_AGAIN)
        self._planned = 0.0
        self._ends_builds = False

    def nudge(self, reason: str) -> None:
        """Ask for a step: something may have changed."""
        log.debug('nudged: %s', reason)
        self.on_nudge()

    def begin(self, work: Work) -> None:
        """Note that the instance is in work, until carry_out() or hand_back() ends that."""
        with self._changed:
            self._in_work[work.instance] = work

    def in_work(self) -> dict[str, Work]:
        """Return the work in flight, by instance."""
        with self._changed:
            return dict(self._in_work)

    def step(self, state: Mapping[str, Entry]) -> list[Work]:
        """List, and plan: what is to be done now, and is not in work. `state` is what is asked of this compute, whole.

        Errors: those of the hypervisor and of reading records; nothing is lost, the next step says it too.
        """
        self._planned = time.monotonic()
        # Taken before anything is looked at: whose task ends while we look is planned at its end's nudge.
        busy = self.in_work().keys()
        self._note_done()
        return self._plan(state, self._instances.guests(), busy)

    def hand_back(self, work: Work, reason: str) -> None:
        """Give back work that was begun: no worker thread was available. A later step schedules it again."""
        self._end(work)
        self.complaints.complain(work.instance, EcompError(reason))
        self.delays.put_off(work.instance)

    def due(self) -> list[float]:
        """When, on the monotonic clock, a step will find something to do even if nothing happens."""
        now, (without, since) = time.monotonic(), self.without_addresses
        missing = [first + APART for first in self._missing.values()]
        polls = [now + poll_after(now - since)] if without else []
        return [self.delays.next(self.in_work()), *missing, *polls, *self._shutdowns.next(after=self._planned)]

    def stop_builds(self) -> None:
        """Begin no build any more; those in work stop at their next step and undo themselves.

        The next start makes them again.
        """
        self._ends_builds = True
        self._instances.runner.cancel(None)

    def allow_builds(self) -> None:
        """Make builds again after stop_builds()."""
        self._ends_builds = False
        self._instances.runner.allow()
        self.works_again()

    def recheck(self) -> None:
        """See whether the records are as we know them: one that was removed by hand is written again.

        And end what was begun and is not asked for any more.
        """
        busy = self.in_work()
        wishes = {each: wish for each, (_, wish) in self._wishes.items() if each not in busy}
        changed = self._instances.records.recheck(wishes)
        if changed:
            self.nudge(f'the records of {", ".join(changed)} were changed by somebody else')
        if self.given is None:
            return  # nothing was read yet of what is asked for
        # A build that was put off, or stopped with this compute, and whose request was deleted by hand meanwhile, is in
        # no plan any more.
        begun = (name for name, each in self._instances.memory.all().items() if each.record.state == BUILDING)
        until = time.monotonic() + ENDING
        for instance in [each for each in begun if each not in busy and each not in self._wishes]:
            self._end_without_request(instance)
            if time.monotonic() > until:
                break  # placement is slow, or away: nothing else is to wait for it

    def carry_out(self, work: Work) -> None:
        """Do what was begun, and tell of what fails. The next step says what is left to do."""
        task, instance, began = work.task, work.instance, time.monotonic()
        log.debug('%s %s: %s', task.kind.value, instance, task.reason)
        try:
            if self._ends_builds and task.kind is Kind.BUILD:
                return  # it waited for a thread: nothing of it is begun
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
            self.complaints.complain(instance, _told(error), began)
            self.delays.put_off(instance)
        except Exception:
            log.exception('unexpected error in the %s of instance %s', task.kind.value, instance)
            self.delays.put_off(instance)
        finally:
            self._end(work)
            self.nudge(f'{task.kind.value} of {instance} ended')

    def works_again(self) -> None:
        """What failed may work now: nothing waits out its delay. From any thread."""
        self.delays.clear()
        self.nudge('what failed works again')

    def _end(self, work: Work) -> None:
        with self._changed:
            del self._in_work[work.instance]

    def _note_done(self) -> None:
        while not self._done.empty():
            work, when = self._done.get()
            if work.task.kind is Kind.REFUSE:
                self._refused[work.instance] = work.revision
            elif work.task.kind is Kind.RESUME:
                self._before_reboot -= {work.instance}
            elif work.task.kind is Kind.SHUTDOWN:
                self._shutdowns.note_asked(work.instance, when)

    def _plan(self, state: Mapping[str, Entry], guests: Mapping[str, Guest], busy: Set[str]) -> list[Work]:
        self._read_wishes(state)
        records, unreadable = self._records(busy)
        without = [each.instance for each in records.values() if pending(each)]
        addresses = {instance: self._addresses(instance) for instance in without}
        # What is written of these is not known, so nothing is done about them.
        wishes = {instance: wish for instance, (_, wish) in self._wishes.items() if instance not in unreadable}
        known = {instance: guest for instance, guest in guests.items() if instance not in unreadable}
        now = time.monotonic()
        lived = {name for name, each in records.items() if each.state in (ACTIVE, STOPPED)}
        self._missing, vanished = due(self._missing, lived - guests.keys(), now)
        self._shutdowns.keep({name for name, each in guests.items() if each.running and name in self._wishes})
        self._note_dealt_with(records, guests, busy)
        before, self._strangers = self._strangers, guests.keys() - self._wishes.keys()
        for stranger in sorted(self._strangers - before):
            log.warning('instance %s is here but nobody asks for it: kept, and unmanaged', stranger)
        seen = Sightings(
            guests=known,
            addresses=addresses,
            patience=self._shutdowns.patience(now),
            vanished=vanished,
            before_reboot=self._before_reboot,
            ready=self._instances.guest_data.ready() if any(map(unready, records.values())) else set(),
            now=self._instances.now(),
        )
        tasks = plan(wishes, records, seen)
        for instance in self.delays.forget_all_but({each.instance for each in tasks} | self.in_work().keys()):
            self.complaints.hand_over(instance, LOOKING)
        put_off = self.delays.put_off_now(now)
        if self.without_addresses[0] != frozenset(without):
            self.without_addresses = frozenset(without), now
        found = []
        for task in tasks:
            if task.instance in busy:
                working_at = self.in_work().get(task.instance) if task.kind is Kind.DESTROY else None
                if working_at is not None and working_at.task.kind is Kind.BUILD:
                    self._instances.runner.cancel(task.instance)
                continue
            if task.instance in put_off:
                continue
            revision, wish = self._wishes[task.instance]
            refused = self._refused.get(task.instance)
            if task.kind is Kind.REFUSE and (refused == revision or (refused and not keys.is_uuid(task.instance))):
                continue  # said once, however often it is written; it is there because nobody may take it away
            if task.kind is Kind.VANISHED and task.instance in self._instances.hypervisor.guests():
                continue  # it came back this moment
            found.append(Work(task, revision, wish, guests.get(task.instance), addresses.get(task.instance, {})))
        return found

    def _note_dealt_with(self, records: Mapping[str, Record], guests: Mapping[str, Guest], busy: Set[str]) -> None:
        """Note what of before the reboot is not to be started any more: whoever turns it off now means it.

        Each by itself: one whose record nobody can read, or that cannot be started yet, holds up no other.
        """
        done = {name for name, each in guests.items() if each.running}
        done |= {name for name, each in records.items() if each.state != ACTIVE}
        self._before_reboot = self._before_reboot.intersection(self._wishes) - (done - busy)
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
            known = before.get(name)
            if known is not None and known[0] == entry.revision:
                self._wishes[name] = known
                continue
            if known is not None:
                self.delays.forget(name)  # a new request need not wait out an old one's delay
            parsed = parse_request(self._instances.compute, key, entry.value, entry.dropped)
            destroy = isinstance(parsed, Request) and parsed.is_tombstone
            if known is None and len(self._wishes) >= MOST and not destroy:
                parsed = Invalid(name, f'this compute has {MOST} instances, and takes no more', shares(parsed))
            self._wishes[name] = entry.revision, parsed
        wishes = [wish for _, wish in self._wishes.values() if isinstance(wish, Request)]
        self.given = summed(each.allocations.get(self._instances.compute, each.left) for each in wishes)
        for name in before.keys() - self._wishes.keys():
            self._refused.pop(name, None)
            for doing in (READING % name, ASKING % name):
                self.complaints.hand_over(doing, LOOKING)

    def _records(self, busy: Set[str]) -> tuple[dict[str, Record], set[str]]:
        """The records by instance, and the instances whose record cannot be read: theirs must not stop the others."""
        found, unreadable = {}, set()
        for instance, (_, wish) in self._wishes.items():
            # An instance in work has its record in that thread's hands.
            if instance in busy or not keys.is_uuid(instance):
                continue
            reading = READING % instance
            try:
                record = self._instances.records.get(instance)
            except Unreachable:
                raise
            except EcompError as error:
                # A destroy goes by its request, which names all there is to know; and it says what it could not read.
                if not (isinstance(error, Unreadable) and isinstance(wish, Request) and wish.is_tombstone):
                    self.complaints.complain(reading, error)
                    unreadable.add(instance)
                continue
            self.complaints.settle(reading)
            if record is not None:
                found[instance] = record
        return found, unreadable

    def _addresses(self, instance: str) -> Mapping[str, Address]:
        """Those a guest has; none where that cannot be told of it: it must not stop the others."""
        asking = ASKING % instance
        try:
            found = self._instances.hypervisor.addresses(instance)
        except Unreachable:
            raise
        except EcompError as error:
            self.complaints.complain(asking, error)
            return {}
        self.complaints.settle(asking)
        return found

    def _end_without_request(self, instance: str) -> None:
        """If a stopped build's request was deleted by hand, its record says so; a guest that got there is kept."""
        try:
            self._instances.end_without_request(instance, self._instances.hypervisor.guests().get(instance))
        except Superseded:
            self._instances.records.forget(instance)
        except (EcompError, OSError) as error:
            self.complaints.complain(instance, _told(error))


def poll_after(waited: float) -> float:
    """Seconds until the next look for addresses that the same guests have been without for so many seconds."""
    return min(max(POLL, waited / POLLS), EVERY)


def _told(error: EcompError | OSError) -> EcompError:
    if isinstance(error, EcompError):
        return error
    return EcompError(f'{error.filename or "failed"}: {error.strerror or error}')  # the state directory's, mostly
