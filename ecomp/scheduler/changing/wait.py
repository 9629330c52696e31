"""Wait until an instance, as etcd reports it, reaches a stage or power state, or is gone."""

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
    """Follows an instance's record or, while it waits in a queue, its queue entry.

    The watch starts with the second read() or with wait(): of many instances read in turn, most are finished at the
    first. `key_index`: see find(); `claims`: see Store.
    """

    def __init__(
        self, config: EtcdConfig, instance: str, among: Index | None = None, claims: Claims | None = None
    ) -> None:
        self._config = config
        self._instance = instance
        self._among = among
        self._store = Store(config)
        self._store.claims = claims
        self._changed = threading.Condition()
        self._follower: Follower | None = None
        self._key = ''
        self._state: Mapping[str, Entry] | None = None
        self._looked_at: Mapping[str, Entry] | None = None
        self._last: Entry | None = None
        self._is_followed = False
        # The backend that did not answer the last read, if one did not: etcd or placement.
        self.silent = 'etcd'

    def __enter__(self) -> Whereabouts:
        return self

    def __exit__(self, *error: object) -> None:
        self._end()
        self._store.close()

    def look(self) -> tuple[bool, Entry | None]:
        """Read the instance: whether etcd and placement answered, and the record's entry, if any."""
        self._begin()
        with self._changed:
            state = self._looked_at = self._state
            key = self._key
        self._is_followed = bool(key) and state is not None
        if key and state is not None:
            previous, self._last = self._last, state.get(key)
            if previous is not None and self._last is None:
                self._end()  # the key was deleted: the instance moved, or its record was removed
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
        """False if another compute holds the claim: the next read() then searches again.

        The followed record may be of a compute without a request: while the instance was in a queue, it was the only
        record. None if placement, which knows the claims, does not answer; True if etcd does not, or the store has no
        `claims`.
        """
        try:
            if not self._is_followed or (key := self._find()[0]) == self._key:
                return True
            # Without a claim the other compute is not trusted either: the followed one releases its claim as it ends.
            other_compute, claims = keys.recorded(key)[0], self._store.claims
            if claims is None or not other_compute or self._instance not in claims(other_compute):
                return True
        except Unreachable as error:
            self.silent = _silent(error)
            return None if self.silent == 'placement' else True
        self._end()
        return False

    @property
    def is_queued(self) -> bool:
        """True if the last read found the instance in a queue."""
        return self._key.startswith(keys.QUEUES)

    @property
    def is_nowhere(self) -> bool:
        """True if the last read found no record, no request and no queue entry."""
        return not self._key

    @cached_property
    def in_queue(self) -> str:
        """The reason why the instance is queued, with any silent compute that holds its claim."""
        claims = claimed_on_silent(self._store, computes(self._store), [self._instance])
        return ': '.join([IN_QUEUE, *claims.values()])

    def wait(self, seconds: float) -> None:
        """Return once the followed key has changed, after `seconds` at the latest."""
        self._begin()
        with self._changed:
            self._changed.wait_for(lambda: self._state is not self._looked_at, seconds)

    def _find(self) -> tuple[str, Entry | None]:
        """Find the key to follow ('' if there is none) and its entry."""
        places = near(self._store, self._instance, self._among)
        if places is None:
            queue_entry = waiting_at(self._store, self._instance)
            if queue_entry is not None:
                return queue_entry.key, queue_entry
            places = listed(self._store, self._instance)
        if places.record is not None:
            return places.record.key, places.record
        return keys.record(places.compute, self._instance) if places.request is not None else '', None

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
    return 'placement' if error.backend.startswith('placement') else 'etcd'


# Seconds between two updates of the live line. The instance itself is watched, not polled.
TICK = 1.0


class Deadline:
    """The end of a wait that several instances share: `seconds` from its creation."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began


def wait_for_stage(wait: Wait, stage: str, asked: Power | None = None) -> Record:
    """Return the record once `stage` is reached.

    A boot's stages are those of the current boot; of a stopped guest, of the next one; with a start or reboot in
    `power_change` that is pending, of the boot that it causes. Raises EcompError if the instance or its cloud-init
    failed, NotFound if it is destroyed or its record removed, StillGoing at the deadline.
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
        is_power_pending = first is not None and record is not None and is_pending(asked, first, record)
        return _power_waits_for(record) if is_power_pending else waits_for(record)

    def forget() -> None:
        nonlocal first
        first = None

    record = wait.until(reached, what, forget=forget)
    assert record is not None  # is_reached() is False for None
    return record


def is_before_boot(stage: str, first: Record, now: Record, asked: Power | None) -> bool:
    """True if a stage is of a boot before the awaited one; `first` is the initial record. Pure."""
    if stage not in boots.STAGES or now.boot is None:
        return False
    return is_pending(asked, first, now) or (first.state == STOPPED and first.boot == now.boot)


def is_pending(asked: Power | None, first: Record, now: Record) -> bool:
    """True until the start or reboot is carried out, or another change replaces it."""
    if asked is None or asked.action == STOP or asked.is_done(now.power):
        return False
    return action_id(now.power) in (asked.id, action_id(first.power))


def wait_until_gone(wait: Wait) -> None:
    """Return once the instance is gone; StillGoing at the deadline: the destroy continues."""

    def read(entry: Entry) -> Record:
        try:
            return read_record(entry)
        except Unreadable:  # its compute overwrites it when the instance is gone
            return Record(wait.instance, '', DESTROYING)

    def reached(record: Record | None) -> bool:
        return record is not None and record.state == GONE

    wait.until(reached, lambda _: 'its compute to destroy it', read, ends=True)


def wait_for_power(wait: Wait, accepted: Acceptance) -> Record:
    """Return the record once an accepted stop, start or reboot is carried out.

    Raises EcompError if a started guest does not run, Conflict if another change replaced this one, NotFound if the
    instance is destroyed, StillGoing at the deadline.
    """
    instance, power = wait.instance, accepted.power
    assert power is not None  # otherwise there is nothing to wait for

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
    assert record is not None  # is_reached() raises for None
    return record


def _power_waits_for(record: Record | None) -> str:
    how_far = phase(record.power if record else None)
    return {ASKED: 'the guest to turn itself off', OFF: 'its domain to start'}.get(how_far, 'its compute to take it')


@dataclass(frozen=True)
class Wait:
    """The wait for one instance; `report` is called about once a second with what it waits for.

    `on_record` is called with each record that is read, `on_timeout` at the deadline with the last one, if there is
    one. `key_index`: see find(); `claims`: see Store.
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
        """Return the first record for which `is_reached` is true, if its compute is trusted.

        None stands for an instance without any key, if `accepts_missing`. `describe` says what a record waits for.
        `reset` is called when the records so far prove to be of a compute that is not trusted; errors of `is_reached`
        are then ignored, and raised otherwise. Also raises StillGoing at the deadline, and the errors of `read`.
        """
        deadline, has_answer = self.deadline, False
        with Whereabouts(self.config, self.instance, self.among, self.claims) as follower:

            def waited(record: Record | None) -> str:
                return follower.in_queue if follower.is_queued else what(record)

            def is_believed() -> bool:
                nonlocal has_answer
                trust = follower.is_believed()
                has_answer = trust is not None
                if trust is False:
                    forget()
                return bool(trust)

            # Even after the deadline each instance is read once.
            first_read_limit = deadline.spent + self.config.timeout
            while True:
                has_answer, entry = follower.look()
                record = read(entry) if entry else None
                if record is not None:
                    self.seen(record)
                try:
                    if has_answer and (reached(record) or (ends and follower.is_nowhere)) and is_believed():
                        return record
                except EcompError:
                    if is_believed():
                        raise
                spent = deadline.spent
                limit = deadline.seconds if has_answer else max(deadline.seconds, first_read_limit)
                if spent >= limit:
                    if record is not None:
                        self.late(record)
                    progress = (
                        f'still waiting for: {waited(record)}'
                        if has_answer
                        else f'and {follower.silent} did not answer'
                    )
                    raise StillGoing(f'{self.instance}: {deadline.seconds:g} s are up, {progress}; it goes on')
                self.tell(
                    f'waiting for: {waited(record) if has_answer else f"{follower.silent} to answer"}'
                    f', {spent:.0f} s'
                )
                follower.wait(min(TICK, limit - spent))
