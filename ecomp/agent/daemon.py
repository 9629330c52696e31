"""The daemon: follow what is asked for, look at what is there, plan, and carry the plan out.

Three kinds of threads: the caller's (the main thread) tends the workers; one plans, at every nudge and once a minute;
a few carry out tasks, one an instance at a time. An event only ever nudges the planner.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor

from ecomp.agent.claims import APART, ClaimKeeper, due
from ecomp.agent.complaints import Complaints
from ecomp.agent.instances import Instances
from ecomp.agent.memory import Memory
from ecomp.agent.plan import Kind, Task, Wish, pending, plan, unready
from ecomp.agent.pool import Runner
from ecomp.agent.power import Shutdowns
from ecomp.agent.records import Superseded
from ecomp.errors import EcompError, Unreachable
from ecomp.model import keys
from ecomp.model.guest import Address, Guest
from ecomp.model.instance import Invalid, Request, parse_request
from ecomp.model.record import ACTIVE, STOPPED, Record
from ecomp.store.client import Entry
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)

EVERY = 60.0
"""Seconds between two plans when nothing happens."""
POLL = 2.0
"""Seconds between two looks for addresses while one is pending and no lease was announced: a bridge has none."""
FIRST_DELAY, LAST_DELAY = 0.5, 15.0
MOST = 10_000
"""Requests a compute takes: what is beyond is refused, so that nobody can fill its memory."""
BUILDS = 32
"""Builds that are begun, most of which may wait for one image. A thread each, made when it is needed."""
RECHECKED = 200
"""Records read again each minute, in turn: one that was removed by hand is then written again."""
GRACE, ASK_AGAIN = 60.0, 10.0
"""Seconds a guest has to turn itself off before it is switched off, and between two times it is asked to."""
LOOKING = 'looking at claims'


class Daemon:
    """The loop of one compute: run() until stop() is called, then drain()."""

    def __init__(
        self,
        compute: str,
        instances: Instances,
        hypervisor: Hypervisor,
        runner: Runner,
        claims: ClaimKeeper,
        memory: Memory,
        complaints: Complaints,
        every_minute: Callable[[], None],
        threads: int,
    ) -> None:
        self._compute = compute
        self._instances = instances
        self._hypervisor = hypervisor
        self._runner = runner
        self._claims = claims
        self._memory = memory
        self._complaints = complaints
        self._every_minute = every_minute
        # Builds wait for images; nothing else is to wait for builds, nor those of other images for a few.
        self._builds = ThreadPoolExecutor(max(threads, BUILDS), thread_name_prefix='build')
        self._others = ThreadPoolExecutor(threads, thread_name_prefix='task')
        self._planner = threading.Thread(target=self._plan_for_ever, name='planner', daemon=True)
        self._changed = threading.Condition()
        self._nudged = True
        self._look = False
        self._stopping = False
        self.read_only = False
        self._state: Mapping[str, Entry] | None = None
        self._wishes: dict[str, tuple[int, Wish]] = {}
        self._busy: dict[str, Task] = {}
        self._later: dict[str, tuple[float, float]] = {}
        self._reported: set[str] = set()
        self._refused: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        self._before_reboot = memory.before_reboot()
        self._shutdowns = Shutdowns(GRACE, ASK_AGAIN)
        self._planned = 0.0
        self._look_delay = 0.0
        self._to_recheck: list[str] = []

    def begin(self) -> None:
        """Work, as far as nobody need tend the workers. run() is to follow, unless another one's does for both."""
        self._hypervisor.on_change(self.nudge, self.look_soon)
        self._planner.start()

    def run(self) -> None:
        """Work, until stop(). Called by the main thread after begin()."""
        while not self._stopping:
            self._runner.tend(EVERY)

    def wake_on_signals(self) -> None:
        """From now on a signal ends the wait in run() at once. The main thread's work."""
        self._runner.wake_on_signals()

    def drain(self) -> None:
        """Begin nothing more, and return when what is in work has ended."""
        self._stopping = True
        self.nudge('stop')
        # Builds stop at their next step and undo themselves; the next start makes them again.
        for instance, task in list(self._busy.items()):
            if task.kind is Kind.BUILD:
                self._runner.cancel(instance)
        while self._planner.is_alive() or self._busy:
            self._runner.tend(0.2)
        self._builds.shutdown()
        self._others.shutdown()

    def stop(self) -> None:
        """End soon. Safe in a signal handler."""
        self._stopping = True
        self._runner.wake()

    def become_read_only(self, reason: str) -> None:
        """Begin nothing more, for good: somebody else is this compute now (rule 9). What runs goes on."""
        self.read_only = True
        log.error('%s. From now on this one only watches; what runs goes on', reason)

    def on_state(self, state: Mapping[str, Entry]) -> None:
        """What is asked of this compute, whole: the follower's callback."""
        with self._changed:
            self._state = state
            self._nudged = True
            self._changed.notify()

    def nudge(self, reason: str) -> None:
        """Plan soon: something may have changed. From any thread."""
        log.debug('nudged: %s', reason)
        with self._changed:
            self._nudged = True
            self._changed.notify()

    def look_soon(self, reason: str) -> None:
        """The same, and do what is done once a minute."""
        with self._changed:
            self._look = True
        self.nudge(reason)

    def _plan_for_ever(self) -> None:
        next_minute = time.monotonic()
        waiting_for_addresses = False
        while not self._stopping and not self.read_only:
            with self._changed:
                # One in work is not due: its end nudges. (A copy: the tasks' threads change it.)
                due = [when for name, (when, _) in list(self._later.items()) if name not in self._busy]
                due += [first + APART for first in self._missing.values()]
                due += self._shutdowns.next(after=self._planned)
                wake = min([next_minute, *due, *([time.monotonic() + POLL] if waiting_for_addresses else [])])
                if not self._nudged:
                    self._changed.wait(max(wake - time.monotonic(), 0.01))
                look, self._nudged, self._look = self._look, False, False
                state = self._state
            if self._stopping or self.read_only or state is None:
                next_minute = time.monotonic() + POLL  # the first list nudges; until then there is nothing to plan
                continue
            doing, began = 'planning', time.monotonic()
            self._planned = began
            try:
                minute = look or time.monotonic() >= next_minute
                if minute:
                    next_minute = time.monotonic() + EVERY * random.uniform(0.9, 1.1)
                # Taken before anything is looked at: whose task ends while we look is planned at its end's nudge.
                busy = set(self._busy)
                guests = self._hypervisor.guests()
                waiting_for_addresses = self._plan_once(state, guests, busy)
                self._settled(doing)
                if minute and not self._look_around(guests):
                    self._look_delay = min(max(self._look_delay * 2, FIRST_DELAY), LAST_DELAY)
                    next_minute = time.monotonic() + self._look_delay * random.uniform(0.5, 1.0)
                elif minute:
                    self._look_delay = 0.0
                continue
            except EcompError as error:
                self._complaints.complain(doing, error, began)
            except Exception:
                log.exception('planning failed in a way nobody thought of; trying again')
            next_minute = min(next_minute, time.monotonic() + LAST_DELAY * random.uniform(0.5, 1.0))

    def _look_around(self, guests: Mapping[str, Guest]) -> bool:
        """What is done once a minute; what fails of it hinders nothing else. True if all of it worked."""
        looks: dict[str, Callable[[], None]] = {
            LOOKING: lambda: self._claims.look(guests, time.monotonic()),
            'reading records again': self._recheck,
            'looking after the metadata server': self._every_minute,
        }
        worked = True
        for doing, look in looks.items():
            began = time.monotonic()
            try:
                look()
                self._settled(doing)
            except EcompError as error:
                worked = False
                self._complaints.complain(doing, error, began)
        return worked

    def _recheck(self) -> None:
        self._to_recheck = self._to_recheck or list(self._wishes)
        now, self._to_recheck = self._to_recheck[:RECHECKED], self._to_recheck[RECHECKED:]
        changed = self._instances.recheck([each for each in now if each not in self._busy])
        if changed:
            self.nudge(f'the records of {", ".join(changed)} were changed by somebody else')

    def _plan_once(self, state: Mapping[str, Entry], guests: Mapping[str, Guest], busy: Set[str]) -> bool:
        """Plan and hand out what is not in work; True while some guest has no address yet."""
        self._read_wishes(state)
        records, unreadable = self._records(busy)
        without = [each.instance for each in records.values() if pending(each)]
        addresses = {instance: self._hypervisor.addresses(instance) for instance in without}
        # What is written of these is not known, so nothing is done about them.
        wishes = {instance: wish for instance, (_, wish) in self._wishes.items() if instance not in unreadable}
        known = {instance: guest for instance, guest in guests.items() if instance not in unreadable}
        now = time.monotonic()
        self._missing, vanished = due(self._missing, self._without_trace(records, guests), now)
        self._shutdowns.keep({name for name, each in guests.items() if each.running and name in self._wishes})
        asked = self._shutdowns.patience(now)
        ready = self._instances.ready_now() if any(map(unready, records.values())) else set()
        tasks = plan(self._compute, wishes, records, known, addresses, vanished, self._before_reboot, asked, ready)
        if self._before_reboot and not unreadable and not busy and not any(each.kind is Kind.RESUME for each in tasks):
            self._before_reboot = frozenset()
            self._memory.dealt_with()
        open_still = {task.instance for task in tasks}
        for instance in [each for each in list(self._later) if each not in open_still and each not in self._busy]:
            self._later.pop(instance, None)  # nothing is to be done any more
            self._complaints.hand_over(instance, LOOKING)
        for task in tasks:
            if task.kind is Kind.REPORT:
                self._report(task)
                continue
            working_at = self._busy.get(task.instance)
            if working_at is not None and task.kind is Kind.DESTROY and working_at.kind is Kind.BUILD:
                self._runner.cancel(task.instance)
            if working_at is not None or task.instance in busy:
                continue
            if self._later.get(task.instance, (0.0, 0.0))[0] > now:
                continue
            revision, wish = self._wishes[task.instance]
            if task.kind is Kind.REFUSE and self._refused.get(task.instance) == revision:
                continue  # said once; it is still there because nobody may take it away
            if task.kind is Kind.VANISHED and task.instance in self._hypervisor.guests():
                continue  # it came back this moment
            self._busy[task.instance] = task
            # With its wish as planned: by the time a thread is free, the key may have been deleted.
            threads = self._builds if task.kind is Kind.BUILD else self._others
            threads.submit(
                self._carry_out, task, revision, wish, guests.get(task.instance), addresses.get(task.instance, {})
            )
        return bool(without)

    def _without_trace(self, records: Mapping[str, Record], guests: Mapping[str, Guest]) -> set[str]:
        return {name for name, each in records.items() if each.state in (ACTIVE, STOPPED) and name not in guests}

    def _read_wishes(self, state: Mapping[str, Entry]) -> None:
        before = self._wishes
        self._wishes = {}
        prefix = keys.host_prefix(self._compute)
        for key, entry in state.items():
            name = key.removeprefix(prefix)
            known = before.get(name)
            if known is not None and known[0] == entry.revision:
                self._wishes[name] = known
                continue
            if known is not None:
                self._later.pop(name, None)  # a new request need not wait out an old one's delay
            parsed = parse_request(self._compute, key, entry.value)
            destroy = isinstance(parsed, Request) and parsed.is_tombstone
            if known is None and len(self._wishes) >= MOST and not destroy:
                parsed = Invalid(name, f'this compute has {MOST} instances, and takes no more')
            self._wishes[name] = entry.revision, parsed

    def _records(self, busy: Set[str]) -> tuple[dict[str, Record], set[str]]:
        """The records by instance, and the instances whose record cannot be read: theirs must not stop the others."""
        found, unreadable = {}, set()
        for instance in self._wishes:
            # An instance in work has its record in that thread's hands.
            if instance in busy or instance in self._busy or not keys.is_uuid(instance):
                continue
            reading = f'reading {instance}'
            try:
                record = self._instances.record(instance)
            except Unreachable:
                raise
            except EcompError as error:
                self._complaints.complain(reading, error)
                unreadable.add(instance)
                continue
            self._settled(reading)
            if record is not None:
                found[instance] = record
        return found, unreadable

    def _carry_out(
        self, task: Task, revision: int, wish: Wish, guest: Guest | None, addresses: Mapping[str, Address]
    ) -> None:
        instance, began = task.instance, time.monotonic()
        log.debug('%s %s: %s', task.kind.value, instance, task.reason)
        try:
            if task.kind is Kind.REFUSE:
                self._instances.refuse(instance, revision, task.reason, guest)
                self._refused[instance] = revision
            elif task.kind is Kind.CLEAR:
                self._instances.clear(instance, revision, task.reason)
            elif task.kind is Kind.POWER:
                self._instances.switch.note(instance, revision, guest)
            elif task.kind is Kind.RESUME:
                self._instances.switch.resume(instance, revision)
                self._before_reboot -= {instance}
            elif task.kind is Kind.VANISHED:
                self._instances.vanished(instance, revision)
            elif task.kind is Kind.READY:
                self._instances.ready(instance, revision)
            elif task.kind is Kind.ADDRESS:
                self._instances.address(instance, revision, addresses)
            else:
                assert isinstance(wish, Request)  # plan() refuses what is Invalid
                self._carry_out_wish(task.kind, wish, revision, guest)
            self._later.pop(instance, None)
            self._settled(instance)
        except Superseded:
            self._instances.forget(instance)
            self._complaints.hand_over(instance, LOOKING)
            if task.kind is Kind.BUILD:
                self._end_without_request(instance)
        except EcompError as error:
            self._complaints.complain(instance, error, began)
            self._put_off(instance)
        except Exception:
            log.exception('%s of instance %s failed in a way nobody thought of', task.kind.value, instance)
            self._put_off(instance)
        finally:
            del self._busy[instance]
            self.nudge(f'{task.kind.value} of {instance} ended')

    def _carry_out_wish(self, kind: Kind, wish: Request, revision: int, guest: Guest | None) -> None:
        instances, switch = self._instances, self._instances.switch
        if kind is Kind.BUILD:
            instances.build(wish, revision, guest)
        elif kind is Kind.SHUTDOWN:
            switch.shut_down(wish, revision)
            self._shutdowns.asked(wish.instance, time.monotonic())
        elif kind is Kind.SWITCH_OFF:
            switch.switch_off(wish, revision)
        elif kind is Kind.START:
            switch.start(wish, revision)
        elif kind is Kind.DONE:
            switch.done(wish, revision, guest)
        else:
            instances.destroy(wish, revision)

    def _end_without_request(self, instance: str) -> None:
        """If a stopped build's request was deleted by hand, its record says so; a guest that got there is kept."""
        try:
            if instance not in self._hypervisor.guests():
                self._instances.end_without_request(instance)
        except Superseded:
            self._instances.forget(instance)
        except EcompError as error:
            self._complaints.complain(instance, error)

    def _put_off(self, instance: str) -> None:
        _, before = self._later.get(instance, (0.0, 0.0))
        delay = min(max(before * 2, FIRST_DELAY), LAST_DELAY)
        self._later[instance] = time.monotonic() + delay * random.uniform(0.5, 1.0), delay

    def _report(self, task: Task) -> None:
        if task.instance not in self._reported:
            self._reported.add(task.instance)
            log.warning('instance %s %s', task.instance, task.reason)

    def _settled(self, doing: str) -> None:
        if self._complaints.settle(doing):
            self.works_again()

    def works_again(self) -> None:
        """What failed may work now: nothing waits out its delay. From any thread."""
        self._later.clear()
        self.nudge('what failed works again')
