"""Presence: a key on a lease, and the thread that renews the lease and watches over the key.

A key is a hint, not a lock: a silent owner may be healthy (RELIABILITY.md 1.7). But each commit of its store compares
it: an owner that was frozen for longer than its lease writes nothing before it has read whose the key is.
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

from ecomp.errors import Conflict, EcompError, NoSpace, UnknownOutcome
from ecomp.model import keys
from ecomp.model.json_object import dump, load_if_object
from ecomp.store.client import Delete, Entry, Fence, Put, Store, Unchanged

log = logging.getLogger(__name__)


class Lease:
    """The lease of a process's presences: a thousand idle ones cost etcd what one does.

    It is granted for the first key, renewed every third of its `seconds` while there is a key, and revoked after the
    last.
    """

    def __init__(self, store: Store, seconds: int) -> None:
        self._store = store
        self._seconds = seconds
        self._granting = threading.Lock()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._members: dict[Presence, None] = {}
        # Members whose keys are to be checked.
        self._due: dict[Presence, None] = {}
        self._turn = 0
        self._thread: threading.Thread | None = None
        self._lease = 0
        self._renewed = -math.inf
        self._lapsed = False

    def granted(self) -> int:
        """Return the lease to put a key on, granting one if needed; raise the store's errors."""
        with self._granting:
            now = time.monotonic()
            if self._lease and now - self._renewed > self._seconds / 2 and not self._store.keep_alive(self._lease):
                self._lease = 0  # it expired: etcd was away while the first keys were put
            if not self._lease:
                self._lease = self._store.grant(self._seconds)
            self._renewed = now
            return self._lease

    def join(self, member: Presence) -> None:
        """Watch over the key of `member`, which has been put, until leave()."""
        with self._lock:
            self._members[member] = None
            if self._thread is None:
                self._thread = self._begin()

    def look(self, member: Presence, soon: bool = True) -> None:
        """Check the member's key, `is_urgent` or with the next renewal; from any thread."""
        with self._lock:
            if member in self._members:
                self._due[member] = None
        if soon:
            self._woken.set()

    def leave(self, member: Presence) -> bool:
        """Stop watching over a key; return False if it was the last and is deleted with the lease.

        Raises the store's errors; then lease and key expire.
        """
        with self._lock:
            self._members.pop(member, None)
            self._due.pop(member, None)
            if self._members:
                return True
            thread, self._thread = self._thread, None
        self._woken.set()
        if thread is not None:
            thread.join()
        with self._granting:
            lease, self._lease = self._lease, 0
            if lease:
                self._store.revoke(lease)
        return False

    def round(self, due_for_renewal: bool = True) -> None:
        """Renew the lease and check the keys that are due; with a renewal one more, in turn.

        That one may have changed without an event. Never raises: failed checks are repeated with the next renewal.
        """
        with self._lock:
            due, self._due, members = self._due, {}, list(self._members)
        if not any(presence.is_kept() for presence in members):
            return  # all are stopped
        start = time.monotonic()
        try:
            if not self._store.keep_alive(self._lease):
                with self._granting:
                    self._lease = 0  # granted again when the next key is put
                due = dict.fromkeys(members)
            self._renewed = start
        except Exception as error:
            self._put_off(dict.fromkeys(members) if self._has_lapsed(members) else due, error)
            return
        self._lapsed = False
        if due_for_renewal:
            self._turn = (self._turn + 1) % len(members)
            due[members[self._turn]] = None
        pending = list(due)
        while pending and time.monotonic() < start + self._seconds / 3:
            member = pending.pop(0)
            try:
                if member.is_kept():
                    member.keep()
            except Exception as error:
                self._put_off({member: None}, error)
        if pending:
            with self._lock:
                self._due |= dict.fromkeys(pending)
            self._woken.set()

    def _has_lapsed(self, members: list[Presence]) -> bool:
        """Return whether the lease has expired because renewals alone fail; report that once.

        If etcd is away altogether, its follower logs that, and it ends by itself.
        """
        if time.monotonic() - self._renewed <= self._seconds or self._lapsed:
            return self._lapsed
        with suppress(EcompError):
            self._store.get(keys.CLUSTER)
            try:
                self._store.keep_alive(self._lease)
            except EcompError as error:
                self._lapsed = True
                reason = f'etcd answers, and has not renewed the lease of this compute for {self._seconds} s: {error}'
                for member in members:
                    member.lapse(
                        f'{reason}. Fix: see that `etcd:` names members of etcd, or a proxy that renews leases'
                    )
        return self._lapsed

    def _put_off(self, members: dict[Presence, None], error: Exception) -> None:
        # The follower logs once that etcd is away. After an unknown outcome the next check reads the key.
        if not isinstance(error, EcompError):
            log.error('unexpected error while keeping a key alive; trying again', exc_info=error)
        with self._lock:
            self._due |= {member: None for member in members if member in self._members}

    def _begin(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, name='presence', daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        next_renewal = time.monotonic() + self._seconds / 3
        while True:
            self._woken.wait(max(next_renewal - time.monotonic(), 0.0))
            self._woken.clear()
            with self._lock:
                if not self._members:
                    return
            is_due = time.monotonic() >= next_renewal
            next_renewal = time.monotonic() + self._seconds / 3
            self.round(is_due)


# Seconds that a lease lasts without a renewal; then its owner counts as dead.
SECONDS = 30
# Seconds by which a lease may expire late.
LATE = 5
# A revision that no key has.
NEVER = 2**63 - 1
COPY = (
    'one state directory is a copy of the other: stop one of them, and remove `uuid` and `token` from its directory '
    'before it is started again'
)


class Presence:
    """Holds `key`, on a lease, with a JSON object as its value until stop().

    The object has a "token", of which etcd gets the hash, and "boot", the machine's boot id. A key without a lease has
    no owner. With the same token a restart takes its key over immediately; after a reboot it waits until the old lease
    expires: one that does not is a copy's, of the state directory with the token.

    `on_lost` is called when the key has another owner (another token, or ours in a value that is not ours, as a copy
    puts it), or when its lease has expired and cannot be renewed. Once the key is free it is put again in one
    transaction, and `on_back` is called. `lease` is shared with other presences of the process; None: one of its own.
    """

    def __init__(
        self,
        store: Store,
        key: str,
        value: Mapping[str, Any],
        on_lost: Callable[[str], None],
        lease: Lease | None = None,
        on_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._store = store
        self._key = key
        self._token = str(value['token'])
        self._who = {**value, 'token': hashed(self._token)}
        # The value to publish, and the one published last.
        self._value = self._who
        self._put = self._who
        self._on_lost = on_lost
        self._on_back = on_back
        self._is_lost = False
        self._kept_on = lease or Lease(store, SECONDS)
        self._lease = 0
        self._revision = 0
        self._stopped = threading.Event()

    def check(self) -> None:
        """Raise what start() would: Conflict, or Denied if the key is not ours (ecomp.model.roles)."""
        self._wait()
        with suppress(NoSpace):
            # A put that is not permitted is refused although its condition cannot hold.
            self._store.commit([Unchanged(self._key, NEVER)], [Put(self._key, '')], fenced=False)

    def say(self, **more: object) -> None:
        """Add fields to the value: from start() on, or from the next renewal on; from any thread."""
        value = {**self._value, **more}
        if value == self._value:
            return
        self._value = value
        if self._revision:
            self._kept_on.look(self, soon=False)

    def start(self) -> None:
        """Put the key and keep it; raise the store's errors, and Conflict if it has another owner."""
        self._wait()
        self._publish()
        self._kept_on.join(self)

    @property
    def lease(self) -> int:
        """The lease of the key, for keys that are to expire with it; 0 before start()."""
        return self._lease

    def look(self) -> None:
        """Check the key now, since its lease may have expired; from any thread."""
        self._kept_on.look(self)

    def on_computes(self, state: Mapping[str, Entry]) -> None:
        """Check the key if it is not as it was put; a follower's callback for the keys around it."""
        entry = state.get(self._key)
        if self._revision and (entry is None or entry.revision != self._revision):
            self.look()

    def stop(self) -> None:
        """Delete the key and stop. If etcd is away, log it: the lease expires."""
        self._stopped.set()
        try:
            if self._kept_on.leave(self) and self._revision:
                self._store.commit([Unchanged(self._key, self._revision)], [Delete(self._key)], fenced=False)
        except EcompError as error:
            log.warning('%s: %s is gone in %d s by itself', error, self._key, SECONDS)

    def is_kept(self) -> bool:
        return not self._stopped.is_set()

    def keep(self) -> None:
        """Put the key again if needed; pass a Conflict to `on_lost`, raise other store errors."""
        try:
            if self._put == self._value or not self._says_so():
                entry = self._entry()
                if entry is None or entry.revision != self._revision:
                    log.info('%s was gone or overwritten: putting it again', self._key)
                    self._publish()
        except Conflict as error:
            self.lapse(str(error))
        else:
            if self._is_lost:
                self._is_lost = False
                self._on_back()

    def lapse(self, reason: str) -> None:
        """Report once that the key has another owner, or that its lease cannot be renewed."""
        if not self._is_lost:
            self._is_lost = True
            self._on_lost(reason)

    def _says_so(self) -> bool:
        """Publish the current value; return False if the key is not as it was put, or etcd is full."""
        value = self._value
        put = Put(self._key, dump(value), self._lease)
        try:
            written = self._store.commit([Unchanged(self._key, self._revision)], [put], fenced=False)
        except (NoSpace, UnknownOutcome):
            return False  # the value can wait; who owns the key, and whether it exists, cannot
        if written:
            self._hold(written, value)
        return bool(written)

    def _hold(self, revision: int, value: dict[str, Any]) -> None:
        """Let commits compare this revision; those that were refused in flight are sent again."""
        self._revision, self._put = revision, value
        self._store.fence = Fence(Unchanged(self._key, revision), self.look)

    def _wait(self) -> None:
        """Wait while the key of an earlier boot has a lease; raise Conflict for another owner.

        Conflict, too, if that key is still there when its lease must have expired.
        """
        deadline = 0.0
        while (entry := self._entry()) is not None and entry.lease and self._is_of_another_boot(entry):
            if not deadline:
                log.info('%s is that of an earlier boot, or of a copy: waiting until it has ended', self._key)
            deadline = deadline or time.monotonic() + SECONDS + LATE
            if time.monotonic() >= deadline:
                raise self._conflict(entry, COPY)
            self._stopped.wait(SECONDS / 30)

    def _entry(self) -> Entry | None:
        """Read the key; raise Conflict if it has another owner."""
        entry = self._store.get(self._key)
        if entry is None:
            return None
        holder = _holder(entry)
        if holder is None or not entry.lease:
            return entry  # no ecompute wrote it, or it would not expire: no owner
        # ecompute 1.0 wrote the token itself.
        if holder['token'] not in (self._value['token'], self._token):
            raise self._conflict(entry, 'stop that one, or give this one a `uuid:` of its own')
        if self._revision and {name: holder.get(name) for name in self._who} != self._who:
            raise self._conflict(entry, COPY)
        return entry

    def _is_of_another_boot(self, entry: Entry) -> bool:
        holder = _holder(entry)
        return holder is not None and holder.get('boot', self._value.get('boot')) != self._value.get('boot')

    def _conflict(self, entry: Entry, cure: str) -> Conflict:
        holder = _holder(entry) or {}
        owner = f'on {_word(holder, "hostname")} since {_word(holder, "since")}'
        return Conflict(f'{self._key} is held by another ecompute, {owner}: {cure}')

    def _publish(self) -> None:
        self._store.recognise()
        # Twice at most: a race is lost to another owner's put, and the second read shows whose.
        for _ in range(2):
            entry = self._entry()
            condition = Unchanged(self._key, entry.revision if entry else 0)
            try:
                lease, value = self._kept_on.granted(), self._value
                put = Put(self._key, dump(value), lease)
                written = self._store.commit([condition], [put], fenced=False)
            except NoSpace:
                if self._revision:
                    # etcd is full, so no other owner can put the key. While it is as read, deletes are allowed: they
                    # make room.
                    self._store.fence = Fence(Unchanged(self._key, self._revision), self.look, condition)
                raise
            if written:
                self._lease = lease
                self._hold(written, value)
                return
        raise Conflict(f'{self._key} is changed by somebody else all the time: is another ecompute starting?')


def hashed(token: str) -> str:
    """Return the hash of a token, which is what etcd gets."""
    return hashlib.sha256(token.encode()).hexdigest()


def _holder(entry: Entry) -> dict[str, Any] | None:
    """Return the value that an ecompute wrote, or None if no ecompute wrote it."""
    holder = load_if_object(entry.value)
    return holder if 'token' in holder else None


def _word(holder: Mapping[str, Any], name: str) -> str:
    """Return a field of a foreign value for a one-line message; '?' if it is missing or unfit."""
    text = str(holder.get(name, '?'))
    return text if len(text) < 256 and text.isprintable() else '?'
