"""One instance's record, told by etcd as it changes, wherever that is: from a queue it comes to a compute."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import cached_property

from ecomp.conf import EtcdConfig
from ecomp.errors import Unreachable
from ecomp.model import keys
from ecomp.model.places import Claims
from ecomp.model.waits import IN_QUEUE
from ecomp.scheduler.looking.find import waiting_at
from ecomp.scheduler.looking.hosts import claimed_on_silent, computes
from ecomp.store.client import Entry, Store
from ecomp.store.places import Index, listed, near
from ecomp.store.watch import Follower


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
