"""Wait until an instance, as etcd reports it, reaches a stage or power state, or is gone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from ecomp.conf import EtcdConfig
from ecomp.errors import Conflict, EcompError, NotFound, StillGoing, Unreachable, Unreadable
from ecomp.model import boots, keys
from ecomp.model.host import ConsumerLookup
from ecomp.model.listing import is_on_host
from ecomp.model.order import SHUT_OFF, SHUTDOWN_REQUESTED, STOP, PowerAction, parse_action_id, parse_phase
from ecomp.model.record import QUEUE_WAIT_REASON, Record, describe_cloud_init_failure, describe_failure, describe_wait
from ecomp.model.states import ACTIVE, DESTROYING, ERROR, GONE, STOPPED
from ecomp.model.text import make_printable
from ecomp.scheduler.queries.computes import find_claims_on_silent, read_computes
from ecomp.scheduler.queries.find import find_keys, read_record
from ecomp.shared.places import KeyIndex
from ecomp.store.client import Entry, Store

if TYPE_CHECKING:
    from ecomp.scheduler.changes.change import Acceptance


class InstanceReader:
    """Reads an instance's record again and again, with a Store that the context closes."""

    def __init__(
        self, config: EtcdConfig, instance: str, key_index: KeyIndex | None = None, claims: ConsumerLookup | None = None
    ) -> None:
        self._instance = instance
        self._key_index = key_index
        self._store = Store(config)
        self._store.claims = claims
        self._key = ''
        # True if the last read was of the key that an earlier search found.
        self._is_followed = False
        # The backend that did not answer the last read, if one did not: etcd or placement.
        self.silent_backend = 'etcd'

    def __enter__(self) -> InstanceReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._store.close()

    def read(self) -> tuple[bool, Entry | None]:
        """Return whether the backends answered, and the record's entry.

        Without an answer `silent_backend` is set. Without a record there is no entry: see is_queued and is_missing.
        """
        try:
            entry = self._store.get(self._key) if self._key else None
            self._is_followed = entry is not None
            if entry is None:  # perhaps the instance moved, or its record was removed
                self._key, entry = self._find_key()
        except Unreachable as error:
            self._key, self.silent_backend = '', _name_backend(error)
            return False, None
        return True, entry if self._key.startswith(keys.INSTANCES) else None

    def is_trusted(self) -> bool | None:
        """Return False, and forget the key, if another compute has the instance and its claim.

        None means that placement, which knows the claims, does not answer.
        """
        try:
            # The record may be of a compute without a request, the only one while the instance was queued.
            if not self._is_followed or (key := self._find_key()[0]) == self._key:
                return True
            # Without a claim the other compute is not trusted either: the followed one releases its claim as it ends.
            other_compute, claims = keys.parse_record_key(key)[0], self._store.claims
            if claims is None or not other_compute or self._instance not in claims(other_compute):
                return True
        except Unreachable as error:
            self.silent_backend = _name_backend(error)
            return None if self.silent_backend == 'placement' else True
        self._key = ''
        return False

    @property
    def is_queued(self) -> bool:
        return self._key.startswith(keys.QUEUES)

    @property
    def is_missing(self) -> bool:
        """True unless the last read found a record, a request or a queue entry."""
        return not self._key

    @property
    def compute(self) -> str:
        return keys.parse_record_key(self._key)[0] if self._key.startswith(keys.INSTANCES) else ''

    @cached_property
    def queue_reason(self) -> str:
        """QUEUE_WAIT_REASON and, if there is one, the instance's claim on a silent compute."""
        claims = find_claims_on_silent(self._store, read_computes(self._store), [self._instance])
        return ': '.join([QUEUE_WAIT_REASON, *claims.values()])

    def _find_key(self) -> tuple[str, Entry | None]:
        queue_entry, places = find_keys(self._store, self._instance, self._key_index)
        if queue_entry is not None:
            return queue_entry.key, queue_entry
        if places.record is not None:
            return places.record.key, places.record
        return keys.record(places.compute, self._instance) if places.request is not None else '', None


def _name_backend(error: Unreachable) -> str:
    return 'placement' if error.backend.startswith('placement') else 'etcd'


# Seconds between two reads, and updates of the live line: a tenth of what was waited, at least and at most these.
MIN_TICK_SECONDS = 0.05
MAX_TICK_SECONDS = 1.0
# Seconds between the two checks after which a host counts as silent: one that starts has no presence for a moment.
SILENCE_CHECK_SECONDS = 5.0


class SilenceDetector:
    """Ends the waits for a host for which `describe_if_silent` keeps returning a text."""

    def __init__(self, describe_if_silent: Callable[[str], str | None]) -> None:
        self._describe_if_silent = describe_if_silent
        # {compute: (the time of the last check, of the first one that found it silent, its answer)}
        self._checks: dict[str, tuple[float, float, str | None]] = {}

    def check(self, instance: str, compute: str, awaited: str) -> None:
        """Raise StillGoing if two consecutive checks have found the compute silent."""
        now = time.monotonic()
        checked_at, began_at, host = self._checks.get(compute, (-math.inf, now, None))
        if now >= checked_at + SILENCE_CHECK_SECONDS:
            checked_at, began_at, host = now, now if host is None else began_at, self._describe_if_silent(compute)
            self._checks[compute] = checked_at, began_at, host
        if host is not None and checked_at > began_at:
            problem = f'its host {host} (the operation continues once the host is back)'
            raise StillGoing(f'{instance}: {problem}, still waiting for {awaited}. Try: eschedule hosts')


class Deadline:
    """The end of a wait that several instances share: `seconds` from its creation."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._began


def wait_for_stage(wait: Wait, stage: str, power_change: PowerAction | None = None) -> Record:
    """Wait until an instance, which may not exist yet, reaches `stage`, and return its record.

    A stage of an earlier boot does not count. If the guest was stopped at the start of the wait, or `power_change` is
    pending, a stage of the current boot does not count either.
    """
    first: Record | None = None
    instance = wait.instance

    def is_reached(record: Record | None) -> bool:
        nonlocal first
        if record is None:
            if first is not None:
                raise NotFound(f'{instance}: its record was removed during the wait')
            return False
        first = first or record
        if record.state == ERROR:
            raise EcompError(describe_failure(record))
        if record.state in (DESTROYING, GONE):
            raise NotFound(f'{instance}: destroyed during the wait')
        if is_before_boot(stage, first, record, power_change):
            return False
        if stage == boots.READY and record.cloud_init is not None:
            raise EcompError(describe_cloud_init_failure(instance, record.cloud_init))
        return stage in record.reached_stages

    def describe(record: Record | None) -> str:
        is_power_pending = first is not None and record is not None and is_pending(power_change, first, record)
        return _describe_power_wait(record) if is_power_pending else describe_wait(record)

    def reset() -> None:
        nonlocal first
        first = None

    record = wait.wait_until(is_reached, describe, reset=reset)
    assert record is not None  # is_reached() is False for None
    return record


def is_before_boot(stage: str, first: Record, current: Record, power_change: PowerAction | None) -> bool:
    """Return whether `current` has this stage of a boot only from a boot before the awaited one."""
    if stage not in boots.STAGES or current.last_boot is None:
        return False
    return is_pending(power_change, first, current) or (first.state == STOPPED and first.last_boot == current.last_boot)


def is_pending(power_change: PowerAction | None, first: Record, current: Record) -> bool:
    """Return whether a start or reboot is neither done nor replaced."""
    if power_change is None or power_change.action == STOP or power_change.is_done(current.power):
        return False
    return parse_action_id(current.power) in (power_change.id, parse_action_id(first.power))


def wait_until_gone(wait: Wait) -> None:
    """Wait until the instance is gone or has no key, or raise StillGoing at the deadline."""

    def read(entry: Entry) -> Record:
        try:
            return read_record(entry)
        except Unreadable:  # its compute overwrites it when the instance is gone
            return Record(wait.instance, '', DESTROYING)

    def is_reached(record: Record | None) -> bool:
        return record is not None and record.state == GONE

    wait.wait_until(is_reached, lambda _: 'its compute to destroy it', read, accepts_missing=True)


def wait_for_power(wait: Wait, acceptance: Acceptance) -> Record:
    """Wait until an accepted stop, start or reboot is carried out, and return the record."""
    instance, power = wait.instance, acceptance.power
    assert power is not None  # otherwise there is nothing to wait for

    def is_reached(record: Record | None) -> bool:
        if record is None or record.state in (DESTROYING, GONE):
            raise NotFound(f'{instance}: destroyed during the wait')
        if parse_action_id(record.power) not in (power.id, *acceptance.previous_ids):
            raise Conflict(f'{instance}: another power change was requested during the wait')
        if not power.is_done(record.power):
            return False
        if power.action != STOP and record.state != ACTIVE:
            raise EcompError(make_printable(f'{instance}: {record.fault or "it was started and is off again"}'))
        return True

    record = wait.wait_until(is_reached, _describe_power_wait)
    assert record is not None  # is_reached() raises for None
    return record


def wait_for_rebuild(wait: Wait, number: int) -> None:
    """Wait until the rebuild of this number is done, or raise EcompError if it has failed."""

    def is_reached(record: Record | None) -> bool:
        if record is None or record.state in (DESTROYING, GONE):
            raise NotFound(f'{wait.instance}: destroyed during the wait')
        if record.has_rebuilt(number) and (record.fault or record.state != ACTIVE):
            raise EcompError(make_printable(f'{wait.instance}: {record.fault or "it was rebuilt and is off again"}'))
        return record.has_rebuilt(number)

    wait.wait_until(is_reached, lambda _: 'its compute to rebuild it')


def _describe_power_wait(record: Record | None) -> str:
    awaited = {SHUTDOWN_REQUESTED: 'the guest to shut down', SHUT_OFF: 'its domain to start'}
    return awaited.get(parse_phase(record.power if record else None), 'its compute to accept the request')


@dataclass(frozen=True)
class Wait:
    config: EtcdConfig
    instance: str
    deadline: Deadline
    # Called at least once a second with what is awaited.
    report: Callable[[str], None]
    key_index: KeyIndex | None = None
    # Gets each record that is read.
    on_record: Callable[[Record], None] = lambda _: None
    # Gets the last record at the deadline, if there is one.
    on_timeout: Callable[[Record], None] = lambda _: None
    claims: ConsumerLookup | None = None
    # With it the wait ends when the host of the instance is silent.
    silence: SilenceDetector | None = None

    def wait_until(
        self,
        is_reached: Callable[[Record | None], bool],
        describe: Callable[[Record | None], str],
        read: Callable[[Entry], Record] = read_record,
        accepts_missing: bool = False,
        reset: Callable[[], None] = lambda: None,
    ) -> Record | None:
        """Return the first record for which `is_reached` is true and whose compute is trusted.

        Without a record, `is_reached` and `describe`, which says what is awaited, get None. With `accepts_missing`,
        None is returned for an instance without any key. If the compute is not trusted, `reset` is called, and an error
        of `is_reached` is ignored. Each instance is read at least once.

        Raises:
            StillGoing: the deadline has passed, or the host is silent.
        """
        with InstanceReader(self.config, self.instance, self.key_index, self.claims) as reader:
            first_read_limit = self.deadline.elapsed + self.config.timeout
            while True:
                has_answer, entry = reader.read()
                record = read(entry) if entry else None
                if record is not None:
                    self.on_record(record)
                error = None
                try:
                    is_over = has_answer and (is_reached(record) or (accepts_missing and reader.is_missing))
                except EcompError as refusal:
                    is_over, error = True, refusal
                trust = reader.is_trusted() if is_over else None
                if trust and error is not None:
                    raise error
                if trust:
                    return record
                if trust is False:
                    reset()
                if has_answer and (trust is False or not is_over):
                    awaited = reader.queue_reason if reader.is_queued else describe(record)
                    self._tick(reader.compute, record, awaited, f'still waiting for {awaited}', self.deadline.seconds)
                else:
                    backend, limit = reader.silent_backend, max(self.deadline.seconds, first_read_limit)
                    self._tick(reader.compute, record, f'{backend} to answer', f'and {backend} did not answer', limit)

    def _tick(self, compute: str, record: Record | None, awaited: str, progress: str, limit: float) -> None:
        """Report what is awaited and sleep, or raise StillGoing after `limit` seconds."""
        if self.silence is not None and compute and (record is None or is_on_host(record)):
            self.silence.check(self.instance, compute, awaited)
        spent = self.deadline.elapsed
        if spent >= limit:
            if record is not None:
                self.on_timeout(record)
            reached = f'timed out after {self.deadline.seconds:g} s (the operation continues)'
            raise StillGoing(f'{self.instance}: {reached}, {progress}')
        self.report(f'waiting for {awaited}, {spent:.0f} s')
        time.sleep(min(max(spent / 10, MIN_TICK_SECONDS), MAX_TICK_SECONDS, limit - spent))
