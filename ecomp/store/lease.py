"""The lease of the keys by which a process says who of it is alive, and the thread that renews it and looks after them.

One for all computes of a process: an idle thousand costs etcd what one does.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from contextlib import suppress
from typing import Protocol

from ecomp.errors import EcompError
from ecomp.model import keys
from ecomp.store.client import Store

log = logging.getLogger(__name__)


class Member(Protocol):
    """A key on the lease."""

    def is_kept(self) -> bool:
        """False once it is not to be looked after any more."""

    def keep(self) -> None:
        """See that the key is there, as it is to be. Errors: those of etcd; it is done again."""

    def lapse(self, reason: str) -> None:
        """Take note that its lease has ended and cannot be renewed, though etcd answers. keep() puts the key again."""


class Lease:
    """Granted for the first key, renewed as long as there is any, revoked after the last; of so many `seconds`."""

    def __init__(self, store: Store, seconds: int) -> None:
        self._store, self._seconds = store, seconds
        self._granting, self._lock = threading.Lock(), threading.Lock()
        self._woken = threading.Event()
        self._members: dict[Member, None] = {}
        # Those of which it is to be seen whether their keys are as they are to be.
        self._due: dict[Member, None] = {}
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

    def join(self, member: Member) -> None:
        """Look after its key, which has been put, until leave()."""
        with self._lock:
            self._members[member] = None
            if self._thread is None:
                self._thread = self._begin()

    def look(self, member: Member, soon: bool = True) -> None:
        """See whether its key is as it is to be, `soon` or with the next renewal. From any thread."""
        with self._lock:
            if member in self._members:
                self._due[member] = None
        if soon:
            self._woken.set()

    def leave(self, member: Member) -> bool:
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

    def _has_lapsed(self, members: list[Member]) -> bool:
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

    def _put_off(self, members: dict[Member, None], error: Exception) -> None:
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
