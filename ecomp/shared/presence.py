"""Presence: a key on a lease, and the thread that renews the lease and watches over the key.

A key is a hint, not a lock: a silent owner may be healthy. But each commit of its store compares the key: an owner
that was frozen for longer than its lease writes nothing before it has read who owns the key.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ecomp.errors import Conflict, Denied, EcompError, NoSpace, UnknownOutcome
from ecomp.model import keys
from ecomp.model.host import StoredHostname
from ecomp.model.json_object import dump, load_object_or_empty
from ecomp.model.stored import decode_lenient
from ecomp.store.client import Delete, Entry, Fence, Put, Store, Unchanged

log = logging.getLogger(__name__)


# Seconds that a lease lasts without a renewal; then its owner counts as dead.
LEASE_SECONDS = 30
# Seconds that the life leases last, on which no key is: ten years.
LIFE_SECONDS = 10 * 365 * 86_400
# Seconds by which a lease may expire late.
MAX_EXPIRY_DELAY_SECONDS = 5
# Seconds after a start of etcd until each presence has been renewed since, or has expired: after a restore all are back
# with their full leases, and a compute may renew its own once before it sees that the etcd is another one.
MAX_UNPROVEN_SECONDS = 2 * (LEASE_SECONDS + MAX_EXPIRY_DELAY_SECONDS)
IMPOSSIBLE_REVISION = 2**63 - 1
COPY_REMEDY = (
    ': one state directory is a copy of the other. Fix: stop one of the two ecomputes, remove `uuid` and `token` from '
    'its state directory, and start it again'
)
OTHER_OWNER_REMEDY = '. Fix: stop that ecompute, or set another `uuid:` for this one'
EARLIER_BOOT = '%s was written before a reboot, or by a copy of this compute: waiting until its lease expires'


class Presence:
    """Holds `key`, on a lease, with a JSON object as its value until stop().

    The object has a "token", of which etcd gets the hash, and "boot", the machine's boot id. A key without a lease has
    no owner. A process with the same token takes the key over: after a restart immediately, after a reboot when the old
    lease expires. `on_lost` is called when the key has another owner, or when its lease expired and cannot be renewed.
    Once the key is free it is put again in one transaction, and `on_back` is called.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        value: Mapping[str, Any],
        on_lost: Callable[[str], None],
        on_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._key = key
        self._value = {**value, 'token': hash_token(str(value['token']))}
        # The values of other keys on our lease (None: no key), and those of these keys that etcd's roles deny.
        self._attached: dict[str, str | None] = {}
        self._attached_lock = threading.Lock()
        self._denied: set[str] = set()
        self._on_lost = on_lost
        self._on_back = on_back
        self._is_lost = False
        self._grant_lock = threading.Lock()
        # The lease that is renewed, 0 if none is granted or it expired, and that of the key as it was put.
        self._granted = self._lease_id = 0
        self._renewed_at = -math.inf
        self._is_lapsed = False
        self._life_leases: tuple[int, ...] = ()
        self._revision = 0
        # Set if the key is to be checked, by now or with the next renewal.
        self._is_due = threading.Event()
        self._wake_event = threading.Event()
        self._thread: threading.Thread | None = None
        self._stop_event = threading.Event()

    def check(self) -> None:
        """Wait and raise errors as start() would, except NoSpace, but do not write the key."""
        self._wait_for_earlier_boot()
        with suppress(NoSpace):
            # A put that is not permitted is refused although its condition cannot hold.
            self._store.commit([Unchanged(self._key, IMPOSSIBLE_REVISION)], [Put(self._key, '')], use_fence=False)

    def add_fields(self, **fields: object) -> None:
        """Add fields to the key's value, before start(): later they would look like another owner's."""
        self._value = {**self._value, **fields}

    def publish(self, key: str, value: str | None, is_urgent: bool = False) -> None:
        """Keep a value at another key on our lease or, if it is None, keep that key absent.

        Any thread may call this. A change is written with the next renewal, or now if it `is_urgent`.
        """
        with self._attached_lock:
            if key in self._attached and self._attached[key] == value:
                return
            self._attached = {**self._attached, key: value}
        if self._revision:
            self.schedule_check(is_urgent)

    def start(self) -> None:
        """Put and keep the key, once an earlier boot's has expired, and have Store.fence require it.

        Raises:
            Conflict: the key has another owner.
        """
        self._wait_for_earlier_boot()
        self._put_key()
        self._start_thread()

    @property
    def lease(self) -> int:
        return self._lease_id

    def schedule_check(self, is_urgent: bool = True) -> None:
        """Have the key checked with the next renewal, or now if it `is_urgent`, from any thread."""
        self._is_due.set()
        if is_urgent:
            self._wake_event.set()

    def on_computes(self, state: Mapping[str, Entry]) -> None:
        """Schedule a check if a follower's `state` has not the revision that was put."""
        entry = state.get(self._key)
        if self._revision and (entry is None or entry.revision != self._revision):
            self.schedule_check()

    def stop(self) -> None:
        """Stop the thread, and delete the keys with their lease unless etcd is away."""
        self._stop_event.set()
        self._wake_event.set()
        if self._thread is not None:
            self._thread.join()
        with self._grant_lock:
            lease, self._granted = self._granted, 0
        try:
            if lease:
                self._store.revoke(lease)
        except EcompError as error:
            log.warning('%s could not be deleted, but expires in %d s: %s', self._key, LEASE_SECONDS, error)

    def renew_and_check(self, is_renewal_due: bool = True) -> None:
        """Renew the lease, and check the key if that is due, without raising an error."""
        if self._stop_event.is_set():
            return
        start, is_due = time.monotonic(), self._is_due.is_set()
        if is_due:  # else a set() in the meantime would be lost
            self._is_due.clear()
        try:
            if not self._store.keep_alive(self._granted):
                with self._grant_lock:
                    self._granted = 0  # granted again when the key is put
                is_due = True
            self._renewed_at = start
        except Exception as error:
            self._defer(self._detect_lapse() or is_due, error)
            return
        self._is_lapsed = False
        try:
            if is_due or is_renewal_due:
                self.ensure_published()
        except Exception as error:
            self._defer(True, error)
        # A copy of a compute, whose presence is lost, must not seem to be that compute.
        if self._life_leases and not self._is_lost:
            try:
                if not self._store.keep_alive(self._life_leases[0]):
                    self._life_leases = ()  # granted again when the host's name is checked
            except Exception as error:
                self._defer(False, error)

    def ensure_life_leases(self, known_leases: tuple[int, ...]) -> tuple[int, ...]:
        """Return the leases whose ages show when this process was alive, `known_leases` or new."""
        with self._grant_lock:
            if not self._life_leases:
                # The first is renewed with the presence's lease, the second never (ecomp.model.host).
                ages = [self._store.read_lease_age(lease) for lease in known_leases]
                # Renewed at once, so that no time before this start is shown.
                exist = bool(ages) and None not in ages and self._store.keep_alive(known_leases[0]) > 0
                self._life_leases = known_leases if exist else tuple(map(self._store.grant, [LIFE_SECONDS] * 2))
            return self._life_leases

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._run, name='presence', daemon=True)
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        next_renewal = time.monotonic() + LEASE_SECONDS / 3
        while not self._stop_event.is_set():
            self._wake_event.wait(max(next_renewal - time.monotonic(), 0.0))
            self._wake_event.clear()
            is_due = time.monotonic() >= next_renewal
            next_renewal = time.monotonic() + LEASE_SECONDS / 3
            self.renew_and_check(is_due)

    def _detect_lapse(self) -> bool:
        """Return whether etcd answers but lets the lease expire, and report that loss once."""
        if time.monotonic() - self._renewed_at <= LEASE_SECONDS or self._is_lapsed:
            return self._is_lapsed
        with suppress(Exception):  # or the thread would end
            self._store.get(keys.CLUSTER)
            try:
                self._store.keep_alive(self._granted)
            except EcompError as error:
                self._is_lapsed = True
                reason = f'etcd answers, but has not renewed the lease of this compute for {LEASE_SECONDS} s: {error}'
                self._report_loss(f'{reason}. Fix: name members of etcd in `etcd:`, or a proxy that renews leases')
        return self._is_lapsed

    def _defer(self, is_due: bool, error: Exception) -> None:
        # The follower logs once that etcd is away. After an unknown outcome the next check reads the key.
        if not isinstance(error, EcompError):
            log.error('unexpected error while keeping a key alive; trying again', exc_info=error)
        if is_due:
            self._is_due.set()

    def _ensure_lease(self) -> int:
        with self._grant_lock:
            now = time.monotonic()
            is_old = now - self._renewed_at > LEASE_SECONDS / 2
            if self._granted and is_old and not self._store.keep_alive(self._granted):
                self._granted = 0  # it expired: etcd was away while the key was put
            self._granted = self._granted or self._store.grant(LEASE_SECONDS)
            self._renewed_at = now
            return self._granted

    def ensure_published(self) -> None:
        """Put the key and the others if changed, and report another owner, and its end, to on_…()."""
        attached = self._attached
        # Also what was published, because a write whose answer was lost may arrive after a later one.
        entries = self._store.read([self._key, *attached])
        try:
            entry = self._require_ours(entries.get(self._key))
            if entry is None or entry.revision != self._revision:
                log.info('%s was deleted or overwritten: writing it again', self._key)
                self._put_key()
        except Conflict as error:
            self._report_loss(str(error))
        else:
            if self._is_lost:
                self._is_lost = False
                self._on_back()
            self._write_attached(attached, entries)

    def _report_loss(self, reason: str) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._on_lost(reason)

    def _write_attached(self, attached: Mapping[str, str | None], entries: Mapping[str, Entry]) -> None:
        for key, value in attached.items():
            entry = entries.get(key)
            if (entry and (entry.value, entry.lease)) == (None if value is None else (value.encode(), self._lease_id)):
                continue
            operation = Delete(key) if value is None else Put(key, value, self._lease_id)
            try:
                with suppress(NoSpace, UnknownOutcome):
                    self._store.commit([Unchanged(self._key, self._revision)], [operation], use_fence=False)
                self._denied.discard(key)
            except Denied as error:
                if key not in self._denied:
                    log.warning('%s is not published: %s', key, error)
                self._denied.add(key)

    def _set_fence(self, revision: int) -> None:
        self._revision = revision
        self._store.fence = Fence(Unchanged(self._key, revision), self.schedule_check)

    def _wait_for_earlier_boot(self) -> None:
        deadline = 0.0
        while (entry := self._require_ours(self._store.get(self._key))) and self._is_of_another_boot(entry):
            if not deadline:
                log.info(EARLIER_BOOT, self._key)
                deadline = time.monotonic() + LEASE_SECONDS + MAX_EXPIRY_DELAY_SECONDS
            # A lease that does not expire belongs to a copy of the state directory.
            if time.monotonic() >= deadline:
                raise self._make_conflict(entry, COPY_REMEDY)
            self._stop_event.wait(LEASE_SECONDS / 30)

    def _require_ours(self, entry: Entry | None) -> Entry | None:
        """Return the entry, or raise Conflict if another ecompute owns it."""
        if entry is None:
            return None
        holder = _parse_holder(entry)
        if holder is None or not entry.lease:
            return entry  # no ecompute wrote it, or it would not expire: no owner
        if holder['token'] != self._value['token']:
            raise self._make_conflict(entry, OTHER_OWNER_REMEDY)
        # Our token in another value: a copy of the state directory wrote it.
        if self._revision and {name: holder.get(name) for name in self._value} != self._value:
            raise self._make_conflict(entry, COPY_REMEDY)
        return entry

    def _is_of_another_boot(self, entry: Entry) -> bool:
        holder = _parse_holder(entry) if entry.lease else None
        return holder is not None and holder.get('boot', self._value.get('boot')) != self._value.get('boot')

    def _make_conflict(self, entry: Entry, remedy: str) -> Conflict:
        holder = _parse_holder(entry) or {}
        owner = f'on {_format_field(holder, "hostname")} since {_format_field(holder, "since")}'
        return Conflict(f'{self._key} is held by another ecompute, {owner}{remedy}')

    def _put_key(self) -> None:
        self._store.require_identity()
        # Twice at most: a race is lost to another owner's put, and the second read shows whose.
        for _ in range(2):
            entry = self._require_ours(self._store.get(self._key))
            condition = Unchanged(self._key, entry.revision if entry else 0)
            try:
                lease = self._ensure_lease()
                put = Put(self._key, dump(self._value), lease)
                written = self._store.commit([condition], [put], use_fence=False)
            except NoSpace:
                if self._revision:
                    # etcd is full, so no other owner can put the key. While it is as read, deletes may make room.
                    self._store.fence = Fence(Unchanged(self._key, self._revision), self.schedule_check, condition)
                raise
            if written:
                self._lease_id = lease
                self._set_fence(written)
                return
        problem = f'{self._key}: another process changed it in each of 2 tries'
        raise Conflict(f'{problem}. Try: stop other ecomputes with this uuid')


def are_presences_proven(store: Store) -> bool:
    """Return whether etcd has run for so long that no presence is left from before a restore."""
    hostnames = store.snapshot(keys.HOSTNAMES).entries.values()
    leases = (decode_lenient(StoredHostname, entry.value).leases for entry in hostnames)
    ages = (store.read_lease_age(each[1]) for each in leases if each)
    # A life lease of this age shows that etcd has run for long enough.
    return any(age is not None and age > MAX_UNPROVEN_SECONDS for age in ages)


def hash_token(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _parse_holder(entry: Entry) -> dict[str, Any] | None:
    holder = load_object_or_empty(entry.value)
    return holder if 'token' in holder else None


def _format_field(holder: Mapping[str, Any], name: str) -> str:
    text = str(holder.get(name, '?'))
    return text if len(text) < 256 and text.isprintable() else '?'
