"""Alive: a key on a lease, and the thread that renews it for as long as its owner lives and looks after the keys.

One lease for all computes of a process: an idle thousand costs etcd what one does. A key is a hint and no lock: a
silent owner may be healthy (RELIABILITY.md 1.7). What it does guarantee is that of two owners with different tokens
only the one whose key it is can write: every commit of its store compares the key, so one that was frozen for longer
than its lease writes nothing before it has looked whose the key is now.
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
    """Granted for the first key, renewed as long as there is any, revoked after the last; of so many `seconds`."""

    def __init__(self, store: Store, seconds: int) -> None:
        self._store, self._seconds = store, seconds
        self._granting, self._lock = threading.Lock(), threading.Lock()
        self._woken = threading.Event()
        self._members: dict[Presence, None] = {}
        # Those of which it is to be seen whether their keys are as they are to be.
        self._due: dict[Presence, None] = {}
        self._turn = 0
        self._thread: threading.Thread | None = None
        self._lease, self._renewed = 0, -math.inf
        self._lapsed = False

    def granted(self) -> int:
        """The lease to put a key on. Errors: those of etcd."""
        with self._granting:
            now = time.monotonic()
            if self._lease and now - self._renewed > self._seconds / 2 and not self._store.keep_alive(self._lease):
                self._lease = 0  # etcd was away while the first keys were put
            if not self._lease:
                self._lease = self._store.grant(self._seconds)
            self._renewed = now
            return self._lease

    def join(self, member: Presence) -> None:
        """Look after its key, which has been put, until leave()."""
        with self._lock:
            self._members[member] = None
            if self._thread is None:
                self._thread = self._begin()

    def look(self, member: Presence, soon: bool = True) -> None:
        """See whether its key is as it is to be, `soon` or with the next renewal. From any thread."""
        with self._lock:
            if member in self._members:
                self._due[member] = None
        if soon:
            self._woken.set()

    def leave(self, member: Presence) -> bool:
        """Look after its key no more; False if it was the last: then the lease is gone, and its key with it.

        Errors: those of etcd; then both are gone some time.
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
        """Renew it, and look at the keys that are due; at one more in turn, of which nobody may have told anything.

        Never raises: what cannot be told is looked at with the next renewal.
        """
        with self._lock:
            due, self._due, members = self._due, {}, list(self._members)
        if not any(each.is_kept() for each in members):
            return  # they are nobody's to renew
        began = time.monotonic()
        try:
            if not self._store.keep_alive(self._lease):
                with self._granting:
                    self._lease = 0  # whose key is put next has it granted
                due = dict.fromkeys(members)
            self._renewed = began
        except Exception as error:
            self._put_off(dict.fromkeys(members) if self._has_lapsed(members) else due, error)
            return
        self._lapsed = False
        if due_for_renewal:
            self._turn = (self._turn + 1) % len(members)
            due[members[self._turn]] = None
        left = list(due)
        while left and time.monotonic() < began + self._seconds / 3:
            member = left.pop(0)
            try:
                if member.is_kept():
                    member.keep()
            except Exception as error:
                self._put_off({member: None}, error)
        if left:
            with self._lock:
                self._due |= dict.fromkeys(left)
            self._woken.set()

    def _has_lapsed(self, members: list[Presence]) -> bool:
        """Return whether the lease has ended by now because renewals alone fail; the members hear of that once.

        That etcd is away altogether is logged by whoever follows it, and ends by itself.
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
                for each in members:
                    each.lapse(f'{reason}. Fix: see that `etcd:` names members of etcd, or a proxy that renews leases')
        return self._lapsed

    def _put_off(self, members: dict[Presence, None], error: Exception) -> None:
        # That etcd is away the follower says, once; of an unknown outcome the next look reads what became of it.
        if not isinstance(error, EcompError):
            log.error('unexpected error while keeping a key alive; trying again', exc_info=error)
        with self._lock:
            self._due |= {each: None for each in members if each in self._members}

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


SECONDS = 30
"""How long a lease lasts without a renewal; then its owner counts as dead."""
LATE = 5
"""Seconds by which a lease may end late."""
NEVER = 2**63 - 1
"""A revision that no key has."""
COPY = (
    'one state directory is a copy of the other: stop one of them, and remove `uuid` and `token` from its directory '
    'before it is started again'
)


class Presence:
    """Holds `key` with `value` (a JSON object with a "token", and "boot", the machine's boot id) until stop().

    The token is put as hashed(): whoever reads etcd is not told it. A key without a lease is nobody's. The same token
    takes its own key over at once, so a restart need not wait for the old lease; where the machine was booted since, it
    waits until the lease ends: one that does not is a copy's, of the state directory with the token.
    on_lost is called when the key is found to be somebody else's (of another token, or of ours in a value that is not
    ours, as a copy of the state directory puts it), or when its lease has ended and is not renewed. As soon as the key
    is free it is put again in one transaction, and on_back is called.
    `lease` is what it shares with others of the process; None: it has one of its own.
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
        # What it is to say, and what it said last.
        self._value, self._put = self._who, self._who
        self._on_lost, self._on_back = on_lost, on_back
        self._is_lost = False
        self._kept_on = lease or Lease(store, SECONDS)
        self._lease = 0
        self._revision = 0
        self._stopped = threading.Event()

    def check(self) -> None:
        """Raise what start() would: Conflict, and Denied where the key is another's to write (ecomp.model.roles)."""
        self._wait()
        with suppress(NoSpace):
            # What may not be put is refused whatever is compared.
            self._store.commit([Unchanged(self._key, NEVER)], [Put(self._key, '')], fenced=False)

    def say(self, **more: object) -> None:
        """Have the value say this as well: from start() on, or from the next renewal of the lease. From any thread."""
        value = {**self._value, **more}
        if value == self._value:
            return
        self._value = value
        if self._revision:
            self._kept_on.look(self, soon=False)

    def start(self) -> None:
        """Put the key and keep it. Conflict if another owner holds it."""
        self._wait()
        self._publish()
        self._kept_on.join(self)

    @property
    def lease(self) -> int:
        """The lease the key is on now, for what is to go with it; 0 before start()."""
        return self._lease

    def look(self) -> None:
        """Refresh it now: etcd was away for a while, and the lease may have ended. From any thread."""
        self._kept_on.look(self)

    def on_computes(self, state: Mapping[str, Entry]) -> None:
        """Look if the key is not there as we put it, by all that is where it belongs: a follower's callback."""
        entry = state.get(self._key)
        if self._revision and (entry is None or entry.revision != self._revision):
            self.look()

    def stop(self) -> None:
        """Take the key away and end. A lost etcd only means that the lease runs out by itself."""
        self._stopped.set()
        try:
            if self._kept_on.leave(self) and self._revision:
                self._store.commit([Unchanged(self._key, self._revision)], [Delete(self._key)], fenced=False)
        except EcompError as error:
            log.warning('%s: %s is gone in %d s by itself', error, self._key, SECONDS)

    def is_kept(self) -> bool:
        """False once it is stopped."""
        return not self._stopped.is_set()

    def keep(self) -> None:
        """Put it again if it is not as it is to be. Errors: those of etcd."""
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
        """Take note that the key is somebody else's, or that its lease has ended and cannot be renewed."""
        if not self._is_lost:
            self._is_lost = True
            self._on_lost(reason)

    def _says_so(self) -> bool:
        """Have the key say what it is to say now; False if it is not as we put it last, or etcd is full."""
        value = self._value
        put = Put(self._key, dump(value), self._lease)
        try:
            written = self._store.commit([Unchanged(self._key, self._revision)], [put], fenced=False)
        except (NoSpace, UnknownOutcome):
            return False  # what there is to say can wait; whose the key is, and whether it is there, cannot
        if written:
            self._hold(written, value)
        return bool(written)

    def _hold(self, revision: int, value: dict[str, Any]) -> None:
        """From now on our commits compare this revision; those under way that were refused for it are sent again."""
        self._revision, self._put = revision, value
        self._store.fence = Fence(Unchanged(self._key, revision), self.look)

    def _wait(self) -> None:
        """Raise Conflict if another living owner holds the key. May wait for as long as a lease lasts."""
        until = 0.0
        while (entry := self._entry()) is not None and entry.lease and self._is_of_another_boot(entry):
            if not until:
                log.info('%s is that of an earlier boot, or of a copy: waiting until it has ended', self._key)
            until = until or time.monotonic() + SECONDS + LATE
            if time.monotonic() >= until:
                raise self._conflict(entry, COPY)
            self._stopped.wait(SECONDS / 30)

    def _entry(self) -> Entry | None:
        """The key as it is now. Conflict if another owner holds it."""
        entry = self._store.get(self._key)
        if entry is None:
            return None
        holder = _holder(entry)
        if holder is None or not entry.lease:
            return entry  # nothing an ecompute wrote, or nothing that would end with it: not an owner
        # As it is also what an ecompute of 1.0 put.
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
        where = f'on {_word(holder, "hostname")} since {_word(holder, "since")}'
        return Conflict(f'{self._key} is held by another ecompute, {where}: {cure}')

    def _publish(self) -> None:
        self._store.recognise()
        # Twice at most: a lost race is somebody else's put, and the second read says whose.
        for _ in range(2):
            entry = self._entry()
            condition = Unchanged(self._key, entry.revision if entry else 0)
            try:
                lease, value = self._kept_on.granted(), self._value
                put = Put(self._key, dump(value), lease)
                written = self._store.commit([condition], [put], fenced=False)
            except NoSpace:
                if self._revision:
                    # Nobody else can put it now. As long as nobody has, what makes room again may go.
                    self._store.fence = Fence(Unchanged(self._key, self._revision), self.look, condition)
                raise
            if written:
                self._lease = lease
                self._hold(written, value)
                return
        raise Conflict(f'{self._key} is changed by somebody else all the time: is another ecompute starting?')


def hashed(token: str) -> str:
    """The hash of a token, which is what etcd gets of it."""
    return hashlib.sha256(token.encode()).hexdigest()


def _holder(entry: Entry) -> dict[str, Any] | None:
    """What an ecompute wrote; None if none did."""
    holder = load_if_object(entry.value)
    return holder if 'token' in holder else None


def _word(holder: Mapping[str, Any], name: str) -> str:
    """What somebody else wrote, fit for an error's one line."""
    text = str(holder.get(name, '?'))
    return text if len(text) < 256 and text.isprintable() else '?'
