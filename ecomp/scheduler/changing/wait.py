"""Wait for a stage of an instance, as etcd reports it, for at most the given time.

The record is followed wherever it goes: from a queue it comes to a compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ecomp.conf import EtcdConfig
from ecomp.errors import Conflict, EcompError, NotFound, StillGoing, Unreachable, Unreadable
from ecomp.model import boots, keys
from ecomp.model.host import Claims
from ecomp.model.order import ASKED, OFF, STOP, Power, action_id, phase
from ecomp.model.record import ACTIVE, DESTROYING, ERROR, GONE, IN_QUEUE, STOPPED, Record, failure, not_ready, waits_for
from ecomp.model.text import printable
from ecomp.scheduler.looking.find import read_record, waiting_at
from ecomp.scheduler.looking.hosts import claimed_on_silent, computes
from ecomp.store.client import Entry, Store
from ecomp.store.sharing import Index, listed, near
from ecomp.store.watch import Follower

if TYPE_CHECKING:
    from ecomp.scheduler.changing.change import Acceptance

class Whereabouts:
    """Follows one key: that of the record or, while it waits, that of its place in a queue.

    From the second look on, or wait(): of many that are looked at one after the other most are there by then. `among`:
    see find(); `claims`: see Store.
    """

    def __init__(
        self, config: EtcdConfig, instance: str, among: Index | None = None, claims: Claims | None = None
    ) -> None:
        self._config = config
        self._instance, self._among = instance, among
        self._store = Store(config)
        self._store.claims = claims
        self._changed = threading.Condition()
        self._follower: Follower | None = None
        self._key = ''
        self._state: Mapping[str, Entry] | None = None
        self._looked_at: Mapping[str, Entry] | None = None
        self._last: Entry | None = None
        self._is_followed = False
        self.silent = 'etcd'
        """What gave no answer, where the last look had none: etcd, or placement."""

    def __enter__(self) -> Whereabouts:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._store.close()

    def look(self) -> tuple[bool, Entry | None]:
        """Whether there is an answer, and the record's entry, None where there is none (yet)."""
        self._begin()
        with self._changed:
            state = self._looked_at = self._state
            key = self._key
        self._is_followed = bool(key) and state is not None
        if key and state is not None:
            before, self._last = self._last, state.get(key)
            if before is not None and self._last is None:
                self._end()  # it is not there any more: moved, or removed
                key, self._is_followed = '', False
        if not key:
            try:
                key, self._last = self._find()
            except Unreachable as error:
                self.silent = _silent(error)
                return False, None
            self._key = key
        is_record = self._last is not None and self._last.key.startswith(keys.INSTANCES)
        return True, self._last if is_record else None

    def is_believed(self) -> bool | None:
        """Whether no other compute than the one that is followed holds the claim; else the next look looks for it anew.

        What is followed may be the record of a compute that was asked by nobody: in a queue it was the only one. None
        where placement, which says so, does not answer; True where etcd does not, or nobody can tell.
        """
        try:
            if not self._is_followed or (key := self._find()[0]) == self._key:
                return True
            # Without a claim the other is not believed, either: the one that is followed releases its own as it ends.
            other, claims = keys.recorded(key)[0], self._store.claims
            if claims is None or not other or self._instance not in claims(other):
                return True
        except Unreachable as error:
            self.silent = _silent(error)
            return None if self.silent == 'placement' else True
        self._end()
        return False

    @property
    def is_queued(self) -> bool:
        """Whether the last look found it in a queue."""
        return self._key.startswith(keys.QUEUES)

    @property
    def is_nowhere(self) -> bool:
        """Whether the last look found neither a record nor a request nor a place in a queue."""
        return not self._key

    @cached_property
    def in_queue(self) -> str:
        """What it waits for in its queue, and which silent compute keeps it there, if one does."""
        said = claimed_on_silent(self._store, computes(self._store), [self._instance])
        return ': '.join([IN_QUEUE, *said.values()])

    def wait(self, seconds: float) -> None:
        """Until something has changed, so many seconds at most."""
        self._begin()
        with self._changed:
            self._changed.wait_for(lambda: self._state is not self._looked_at, seconds)

    def _find(self) -> tuple[str, Entry | None]:
        """The key to follow, '' for none, and what is there now."""
        at = near(self._store, self._instance, self._among)
        if at is None:
            waits = waiting_at(self._store, self._instance)
            if waits is not None:
                return waits.key, waits
            at = listed(self._store, self._instance)
        if at.record is not None:
            return at.record.key, at.record
        return keys.record(at.compute, self._instance) if at.request is not None else '', None

    def _begin(self) -> None:
        if self._key and self._follower is None:
            self._follower = Follower(self._config, [(self._key, self._on_state)])
            self._follower.start()

    def _end(self) -> None:
        if self._follower is not None:
            self._follower.stop()
            self._follower = None
        with self._changed:
            self._key, self._state, self._looked_at = '', None, None

    def _on_state(self, state: Mapping[str, Entry]) -> None:
        with self._changed:
            self._state = state
            self._changed.notify()


def _silent(error: Unreachable) -> str:
    """What gave no answer: etcd, or placement."""
    return 'placement' if error.backend.startswith('placement') else 'etcd'


TICK = 1.0
"""Seconds between two updates of the live line; the instance itself is watched, not polled."""


class Deadline:
    """When waiting ends, for all that is waited for one after the other: `seconds` from now."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        """Seconds that have passed."""
        return time.monotonic() - self._began


def wait_for_stage(wait: Wait, stage: str, asked: Power | None = None) -> Record:
    """The record once `stage` is reached.

    The stages of a boot are those of the one that goes on or, of a guest that is off, of the next; with an `asked`
    start or reboot that is not carried out, of the one that it brings.

    Errors: EcompError (it failed, or its cloud-init did; exit 1), NotFound (destroyed meanwhile), StillGoing (the time
    is up).
    """
    first: Record | None = None
    instance = wait.instance

    def reached(record: Record | None) -> bool:
        nonlocal first
        if record is None:
            if first is not None:
                raise NotFound(f'{instance}: its record was removed while waiting for it')
            return False
        first = first or record
        if record.state == ERROR:
            raise EcompError(failure(record))
        if record.state in (DESTROYING, GONE):
            raise NotFound(f'{instance}: destroyed while waiting for it')
        if is_before_boot(stage, first, record, asked):
            return False
        if stage == boots.READY and record.cloud_init is not None:
            raise EcompError(not_ready(instance, record.cloud_init))
        return stage in record.reached

    def what(record: Record | None) -> str:
        on_its_way = first is not None and record is not None and is_pending(asked, first, record)
        return _power_waits_for(record) if on_its_way else waits_for(record)

    def forget() -> None:
        nonlocal first
        first = None

    record = wait.until(reached, what, forget=forget)
    assert record is not None  # reached() is False for None
    return record


def is_before_boot(stage: str, first: Record, now: Record, asked: Power | None) -> bool:
    """Whether a stage's time is that of an earlier boot than the one that is waited for. Pure.

    `first` is the record as it was when waiting began; see wait_for_stage().
    """
    if stage not in boots.STAGES or now.boot is None:
        return False
    return is_pending(asked, first, now) or (first.state == STOPPED and first.boot == now.boot)


def is_pending(asked: Power | None, first: Record, now: Record) -> bool:
    """Whether the start or reboot that was `asked` is still to be carried out; one in its place brings its own."""
    if asked is None or asked.action == STOP or asked.is_done(now.power):
        return False
    return action_id(now.power) in (asked.id, action_id(first.power))


def wait_until_gone(wait: Wait) -> None:
    """Return once the instance is gone. StillGoing when the time is up: the destroy goes on."""

    def read(entry: Entry) -> Record:
        try:
            return read_record(entry)
        except Unreadable:  # its compute writes another one when it is gone
            return Record(wait.instance, '', DESTROYING)

    def reached(record: Record | None) -> bool:
        return record is not None and record.state == GONE

    wait.until(reached, lambda _: 'its compute to destroy it', read, ends=True)


def wait_for_power(wait: Wait, accepted: Acceptance) -> Record:
    """The record once an accepted stop, start or reboot is carried out.

    Errors: EcompError (it was to run, and does not), Conflict (another one came in its place), NotFound (destroyed
    meanwhile), StillGoing (the time is up).
    """
    instance, power = wait.instance, accepted.power
    assert power is not None  # else there is nothing to wait for

    def reached(record: Record | None) -> bool:
        if record is None or record.state in (DESTROYING, GONE):
            raise NotFound(f'{instance}: destroyed while waiting for it')
        if action_id(record.power) not in (power.id, *accepted.before):
            raise Conflict(f'{instance}: somebody has asked for something else meanwhile')
        if not power.is_done(record.power):
            return False
        if power.action != STOP and record.state != ACTIVE:
            raise EcompError(printable(f'{instance}: {record.fault or "it was started, and is off again"}'))
        return True

    record = wait.until(reached, _power_waits_for)
    assert record is not None  # reached() is False for None
    return record


def _power_waits_for(record: Record | None) -> str:
    how_far = phase(record.power if record else None)
    return {ASKED: 'the guest to turn itself off', OFF: 'its domain to start'}.get(how_far, 'its compute to take it')


@dataclass(frozen=True)
class Wait:
    """Waiting for one instance, and who is told of it: `tell` about once a second, of what is being waited for.

    `seen` gets each record that is read, `late` the last one, where there is one, when the time is up.
    `among`: see find(); `claims`: see Store.
    """

    config: EtcdConfig
    instance: str
    deadline: Deadline
    tell: Callable[[str], None]
    among: Index | None = None
    seen: Callable[[Record], None] = lambda _: None
    late: Callable[[Record], None] = lambda _: None
    claims: Claims | None = None

    def until(
        self,
        reached: Callable[[Record | None], bool],
        what: Callable[[Record | None], str],
        read: Callable[[Entry], Record] = read_record,
        ends: bool = False,
        forget: Callable[[], None] = lambda: None,
    ) -> Record | None:
        """The record that has reached it; `what` says of one that has not what it waits for.

        `ends`: an instance found nowhere counts as gone; `forget` is called where the records so far turn out to be of
        a compute that is not believed. Errors: StillGoing (the time is up), those of `reached`.
        """
        deadline, known = self.deadline, False
        with Whereabouts(self.config, self.instance, self.among, self.claims) as at:

            def waited(record: Record | None) -> str:
                return at.in_queue if at.is_queued else what(record)

            def is_believed() -> bool:
                nonlocal known
                believed = at.is_believed()
                known = believed is not None
                if believed is False:
                    forget()
                return bool(believed)

            # With nothing left of the time, each is looked at once.
            first_look = deadline.spent + self.config.timeout
            while True:
                known, entry = at.look()
                record = read(entry) if entry else None
                if record is not None:
                    self.seen(record)
                try:
                    if known and (reached(record) or (ends and at.is_nowhere)) and is_believed():
                        return record
                except EcompError:
                    if is_believed():
                        raise
                spent = deadline.spent
                limit = deadline.seconds if known else max(deadline.seconds, first_look)
                if spent >= limit:
                    if record is not None:
                        self.late(record)
                    how_far = f'still waiting for: {waited(record)}' if known else f'and {at.silent} did not answer'
                    raise StillGoing(f'{self.instance}: {deadline.seconds:g} s are up, {how_far}; it goes on')
                self.tell(f'waiting for: {waited(record) if known else f"{at.silent} to answer"}, {spent:.0f} s')
                at.wait(min(TICK, limit - spent))
