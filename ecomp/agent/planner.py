"""One compute's planning without a thread of its own: list, plan, and carry out what the plan says.

A step says what is to be done; whoever calls it begins that and has it carried out, in whatever threads there are, one
task an instance at a time. The daemon does, and so may a test.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Set

from ecomp.agent.claims import APART, due
from ecomp.agent.complaints import Complaints
from ecomp.agent.instances import Instances
from ecomp.agent.memory import Memory
from ecomp.agent.plan import Kind, Task, Wish, pending, plan, unready
from ecomp.agent.pool import Runner
from ecomp.agent.power import Shutdowns
from ecomp.agent.records import Superseded
from ecomp.agent.tasks import CARRIED_OUT, Work
from ecomp.errors import EcompError, Unreachable, Unreadable
from ecomp.model import keys
from ecomp.model.backoff import Backoff
from ecomp.model.guest import Address, Guest
from ecomp.model.instance import Invalid, Request, parse_request, shares
from ecomp.model.record import ACTIVE, STOPPED, Record
from ecomp.store.client import Entry
from ecomp.virt import Hypervisor

log = logging.getLogger(__name__)

FIRST_DELAY, LAST_DELAY = 0.5, 15.0
MOST = 10_000
"""Requests a compute takes: what is beyond is refused, so that nobody can fill its memory."""
RECHECKED = 200
"""Records read again each minute, in turn: one that was removed by hand is then written again."""
GRACE, ASK_AGAIN = 60.0, 10.0
"""Seconds a guest has to turn itself off before it is switched off, and between two times it is asked to."""
LOOKING = 'looking at claims'


class Planner:
    """What is asked of one compute, and what of it is in work or put off.

    step(), due() and recheck() are one thread's, or one's after the other; begin() is that thread's too. carry_out() is
    any thread's, settled() and works_again() anybody's. `nudge` is called when it is worth another step.
    """

    def __init__(
        self,
        compute: str,
        instances: Instances,
        hypervisor: Hypervisor,
        runner: Runner,
        memory: Memory,
        complaints: Complaints,
        nudge: Callable[[str], None],
    ) -> None:
        self._compute = compute
        self._instances = instances
        self._hypervisor = hypervisor
        self._runner = runner
        self._memory = memory
        self._complaints = complaints
        self._nudge = nudge
        self.guests: Mapping[str, Guest] = {}
        """What was here at the last step."""
        self.awaits_addresses = False
        """Whether some guest had no address yet at the last step."""
        self._wishes: dict[str, tuple[int, Wish]] = {}
        self._lock = threading.Lock()
        self._busy: dict[str, Work] = {}
        self._under_way: set[str] = set()
        self._later: dict[str, tuple[float, Backoff]] = {}
        self._reported: set[str] = set()
        self._refused: dict[str, int] = {}
        self._missing: dict[str, float] = {}
        self._before_reboot = memory.before_reboot()
        self._shutdowns = Shutdowns(GRACE, ASK_AGAIN)
        self._planned = 0.0
        self._to_recheck: list[str] = []

    def step(self, state: Mapping[str, Entry]) -> list[Work]:
        """List, and plan: what is to be done now, and is not in work. `state` is what is asked of this compute, whole.

        Errors: those of the hypervisor and of reading records; nothing is lost, the next step says it too.
        """
        self._planned = time.monotonic()
        # Taken before anything is looked at: whose task ends while we look is planned at its end's nudge.
        busy = set(self._busy)
        self.guests = self._hypervisor.guests()
        return self._plan(state, self.guests, busy)

    def begin(self, work: Work) -> None:
        """From now on its instance is in work, until carry_out() returns: no step says anything of it."""
        self._busy[work.task.instance] = work

    def hand_back(self, work: Work, reason: str) -> None:
        """Nobody may ever come to carry it out: a step says it again, later. Whoever comes yet does nothing of it."""
        instance = work.task.instance
        with self._lock:
            if self._busy.get(instance) is not work or instance in self._under_way:
                return
            del self._busy[instance]
        self._complaints.complain(instance, EcompError(reason))
        self._put_off(instance)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in work."""
        return not self._busy

    def due(self) -> list[float]:
        """When, on the monotonic clock, a step will find something to do even if nothing happens."""
        # One in work is not due: its end nudges. (A copy: the tasks' threads change it.)
        later = [when for name, (when, _) in list(self._later.items()) if name not in self._busy]
        missing = [first + APART for first in self._missing.values()]
        return [*later, *missing, *self._shutdowns.next(after=self._planned)]

    def stop_builds(self) -> None:
        """Let the builds in work stop at their next step and undo themselves; the next start makes them again."""
        for instance, work in list(self._busy.items()):
            if work.task.kind is Kind.BUILD:
                self._runner.cancel(instance)

    def recheck(self) -> None:
        """Read some records again, the next ones each time."""
        self._to_recheck = self._to_recheck or list(self._wishes)
        now, self._to_recheck = self._to_recheck[:RECHECKED], self._to_recheck[RECHECKED:]
        changed = self._instances.recheck([each for each in now if each not in self._busy])
        if changed:
            self._nudge(f'the records of {", ".join(changed)} were changed by somebody else')

    def settled(self, doing: str) -> None:
        """This works."""
        if self._complaints.settle(doing):
            self.works_again()

    def carry_out(self, work: Work) -> None:
        """Do what was begun, and tell of what fails. The next step says what is left to do."""
        task, instance, began = work.task, work.instance, time.monotonic()
        with self._lock:
            if self._busy.get(instance) is not work:
                return  # it was handed back
            self._under_way.add(instance)
        log.debug('%s %s: %s', task.kind.value, instance, task.reason)
        try:
            CARRIED_OUT[task.kind](self._instances, work)
            if task.kind is Kind.REFUSE:
                self._refused[instance] = work.revision
            elif task.kind is Kind.RESUME:
                self._before_reboot -= {instance}
            elif task.kind is Kind.SHUTDOWN:
                self._shutdowns.asked(instance, time.monotonic())
            self._later.pop(instance, None)
            self.settled(instance)
        except Superseded:
            self._instances.forget(instance)
            self._complaints.hand_over(instance, LOOKING)
            if task.kind is Kind.BUILD:
                self._end_without_request(instance)
        except EcompError as error:
            self._complaints.complain(instance, error, began)
            self._put_off(instance)
        except Exception:
            log.exception('unexpected error in the %s of instance %s', task.kind.value, instance)
            self._put_off(instance)
        finally:
            with self._lock:
                self._under_way.discard(instance)
                del self._busy[instance]
            self._nudge(f'{task.kind.value} of {instance} ended')

    def works_again(self) -> None:
        """What failed may work now: nothing waits out its delay. From any thread."""
        self._later.clear()
        self._nudge('what failed works again')

    def _plan(self, state: Mapping[str, Entry], guests: Mapping[str, Guest], busy: Set[str]) -> list[Work]:
        self._read_wishes(state)
        records, unreadable = self._records(busy)
        without = [each.instance for each in records.values() if pending(each)]
        addresses = {instance: self._addresses(instance) for instance in without}
        # What is written of these is not known, so nothing is done about them.
        wishes = {instance: wish for instance, (_, wish) in self._wishes.items() if instance not in unreadable}
        known = {instance: guest for instance, guest in guests.items() if instance not in unreadable}
        now = time.monotonic()
        self._missing, vanished = due(self._missing, self._without_trace(records, guests), now)
        self._shutdowns.keep({name for name, each in guests.items() if each.running and name in self._wishes})
        asked = self._shutdowns.patience(now)
        ready = self._instances.ready_now() if any(map(unready, records.values())) else set()
        tasks = plan(wishes, records, known, addresses, vanished, self._before_reboot, asked, ready)
        if self._before_reboot and not unreadable and not busy and not any(each.kind is Kind.RESUME for each in tasks):
            self._before_reboot = frozenset()
            self._memory.dealt_with()
        open_still = {task.instance for task in tasks}
        for instance in [each for each in list(self._later) if each not in open_still and each not in self._busy]:
            self._later.pop(instance, None)  # nothing is to be done any more
            self._complaints.hand_over(instance, LOOKING)
        self.awaits_addresses = bool(without)
        found = []
        self._reported &= {task.instance for task in tasks if task.kind is Kind.REPORT}
        for task in tasks:
            if task.kind is Kind.REPORT:
                self._report(task)
                continue
            working_at = self._busy.get(task.instance)
            if working_at is not None and task.kind is Kind.DESTROY and working_at.task.kind is Kind.BUILD:
                self._runner.cancel(task.instance)
            if working_at is not None or task.instance in busy:
                continue
            put_off = self._later.get(task.instance)
            if put_off is not None and put_off[0] > now:
                continue
            revision, wish = self._wishes[task.instance]
            refused = self._refused.get(task.instance)
            if task.kind is Kind.REFUSE and (refused == revision or (refused and not keys.is_uuid(task.instance))):
                continue  # said once, however often it is written; it is there because nobody may take it away
            if task.kind is Kind.VANISHED and task.instance in self._hypervisor.guests():
                continue  # it came back this moment
            found.append(Work(task, revision, wish, guests.get(task.instance), addresses.get(task.instance, {})))
        return found

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
            parsed = parse_request(self._compute, key, entry.value, entry.dropped)
            destroy = isinstance(parsed, Request) and parsed.is_tombstone
            if known is None and len(self._wishes) >= MOST and not destroy:
                parsed = Invalid(name, f'this compute has {MOST} instances, and takes no more', shares(parsed))
            self._wishes[name] = entry.revision, parsed
        for name in before.keys() - self._wishes.keys():
            self._refused.pop(name, None)
            for doing in (_reading(name), _asking(name)):
                self._complaints.hand_over(doing, LOOKING)

    def _records(self, busy: Set[str]) -> tuple[dict[str, Record], set[str]]:
        """The records by instance, and the instances whose record cannot be read: theirs must not stop the others."""
        found, unreadable = {}, set()
        for instance, (_, wish) in self._wishes.items():
            # An instance in work has its record in that thread's hands.
            if instance in busy or instance in self._busy or not keys.is_uuid(instance):
                continue
            reading = _reading(instance)
            try:
                record = self._instances.record(instance)
            except Unreachable:
                raise
            except EcompError as error:
                # A destroy goes by its request, which names all there is to know; and it says what it could not read.
                if not (isinstance(error, Unreadable) and isinstance(wish, Request) and wish.is_tombstone):
                    self._complaints.complain(reading, error)
                    unreadable.add(instance)
                continue
            self.settled(reading)
            if record is not None:
                found[instance] = record
        return found, unreadable

    def _addresses(self, instance: str) -> Mapping[str, Address]:
        """Those a guest has; none where that cannot be told of it: it must not stop the others."""
        asking = _asking(instance)
        try:
            found = self._hypervisor.addresses(instance)
        except Unreachable:
            raise
        except EcompError as error:
            self._complaints.complain(asking, error)
            return {}
        self.settled(asking)
        return found

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
        _, backoff = self._later.get(instance, (0.0, Backoff(FIRST_DELAY, LAST_DELAY)))
        self._later[instance] = time.monotonic() + backoff.next() * random.uniform(0.5, 1.0), backoff

    def _report(self, task: Task) -> None:
        if task.instance not in self._reported:
            self._reported.add(task.instance)
            log.warning('instance %s %s', task.instance, task.reason)


# What a failure of one instance is known by among the complaints.


def _reading(instance: str) -> str:
    return f'reading {instance}'


def _asking(instance: str) -> str:
    return f'asking for the addresses of {instance}'
