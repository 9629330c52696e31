"""Follow prefixes: the whole of each, then every change, for as long as it takes.

An event is a nudge and the list is the truth: after any end of the stream, and once a minute in any case, the
prefixes are listed anew. So a lost connection, a compaction, a refused or a silent watch are one case (RELIABILITY.md
1.8; https://etcd.io/docs/v3.4/learning/api/#watch-api). What is kept of it has a limit.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, StrangeEtcd
from ecomp.model.backoff import Backoff
from ecomp.model.json_object import VALUE_LIMIT
from ecomp.model.text import printable
from ecomp.store.client import Entry, Guard, Store, after, entry_of, header_of
from ecomp.store.messages import DEADLINE_EXCEEDED, DELETED, CallFailure, WatchCreate

if TYPE_CHECKING:
    from ecomp.model.cluster import KnownCluster
    from ecomp.store.by_h2 import Watch

log = logging.getLogger(__name__)

MOST = 64 * 1024**2
"""Bytes of all that is kept. Ten thousand requests without user-data are 20 MB."""
PART = 64
"""Bytes that each comma of a value counts for besides: read, a part of it is an object, however short it is written."""
SMALL = 4096
"""Bytes of a value for which there is as much room again: a destroy is one of these, and is to be heard also where all
else is full."""
NAMED = 100
"""Keys that are named when they are dropped; of more it is said once that there are more."""
KEYS, LONGEST = 100_000, 16 * 1024
"""Keys that are kept, and bytes of one: beyond that there is no trace of it, for nobody of ours writes so many."""


class Cache:
    """What a follower keeps of what it reads: no value that is too large, and of all together as much as has room.

    Of what is dropped the key and its revision are kept: what is asked of whom is seen, and a smaller value counts
    again. Call keep() for all of a list, end(); then keep() and forget() for each event.

    What is kept by now, and is in the next list unchanged, stays: it does not matter where in the list it stands.
    """

    def __init__(self, largest: int, most: int) -> None:
        self._largest, self._most = largest, most
        self.entries: dict[str, Entry] = {}
        """All of that, by key."""
        self._size = 0
        self._told: set[str] = set()

    def end(self, listed: Iterable[str]) -> None:
        """End a list: drop what is not among these keys."""
        for key in self.entries.keys() - set(listed):
            self.forget(key)
        self._told &= self.entries.keys()

    def keep(self, entry: Entry) -> Entry | None:
        """The entry as it is kept; None if nothing of it is."""
        known = self.entries.get(entry.key)
        if known is not None and (known.revision, known.value) == (entry.revision, entry.value):
            return known
        size = len(entry.value)
        if known is not None:
            self._size -= _weight(known.value)
        elif self._has_no_room(entry.key):
            self._tell(entry.key, size)
            return None
        else:
            self._size += len(entry.key)
        room = self._most if size > SMALL else 2 * self._most
        fits = size <= self._largest and self._size + _weight(entry.value) <= room
        kept = entry if fits else replace(entry, value=b'', dropped=size)
        if not fits:
            self._tell(entry.key, size)
        self.entries[entry.key] = kept
        self._size += _weight(kept.value)
        return kept

    def forget(self, key: str) -> None:
        """Drop a key that was deleted."""
        known = self.entries.pop(key, None)
        if known is not None:
            self._size -= len(known.key) + _weight(known.value)

    def _has_no_room(self, key: str) -> bool:
        return len(self.entries) >= KEYS or len(key) > LONGEST or self._size + len(key) > 2 * self._most

    def _tell(self, key: str, size: int) -> None:
        if key in self._told or len(self._told) > NAMED:
            return
        self._told.add(key)
        if len(self._told) > NAMED:
            log.warning('more values than these %d are too large, and are not kept', NAMED)
        elif size > self._largest:
            log.warning('%s has %d bytes, and %d is the limit: not kept', printable(key, 200), size, self._largest)
        else:
            log.warning('%s has %d bytes, and there is no room for it: not kept', printable(key, 200), size)


def _weight(value: bytes) -> int:
    return len(value) + PART * value.count(b',')


State = Mapping[str, Entry]
Subscription = tuple[str, Callable[[State], None]]
"""A prefix, and what is called with the state of it."""
FIRST_DELAY, LAST_DELAY = 0.2, 5.0
"""Seconds until a lost etcd is tried again: at first, and at most."""


class _Resync(Exception):
    """The stream is over or cannot be trusted any more: list anew."""


class _Watch(NamedTuple):
    """One prefix, and what is kept of what is there."""

    prefix: str
    on_state: Callable[[State], None]
    kept: Cache


class Follower:
    """A thread that hands the state of each prefix to its callback: first whole, then at every change.

    A state maps keys to entries and is never changed afterwards. The callbacks are called in this thread and must be
    quick. All prefixes are listed before any state is handed on, and are watched on one stream.
    A lost etcd is told to on_lost once, tried again with growing delays, and told to on_back once when it is back; by
    default both are logged. With a guard it ends where an etcd begins that is not the one we knew (rule 10).

    Of a value larger than `largest`, and of one with which there would be more than `most` bytes of a prefix in all,
    only the key and the revision are kept (see Entry.dropped). That is logged once for each key.
    """

    def __init__(
        self,
        config: EtcdConfig,
        subscriptions: Iterable[Subscription],
        resync: float = 60.0,
        guard: Guard | None = None,
        on_lost: Callable[[EcompError], None] | None = None,
        on_back: Callable[[], None] | None = None,
        largest: int = VALUE_LIMIT,
        most: int = MOST,
    ) -> None:
        # A channel of its own: a long list must not hold up the stream, nor a frozen stream the writes.
        self._store = Store(config, guard)
        self._guard = guard
        self._on_lost = on_lost or self._log_loss
        self._on_back = on_back or self._log_return
        self._all = [_Watch(*each, Cache(largest, most)) for each in subscriptions]
        self._resync = resync
        self._backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        self._stopped = threading.Event()
        self._call: Watch | None = None
        self._thread = threading.Thread(target=self._run, name=f'follow {self._all[0].prefix}', daemon=True)

    def start(self) -> None:
        """Begin; on_state is called soon."""
        self._thread.start()

    def stop(self) -> None:
        """End, and wait for the thread."""
        self._stopped.set()
        if self._call is not None:
            self._call.cancel()
        if self._thread.is_alive():
            self._thread.join()
        self._store.close()

    def _run(self) -> None:
        lost = False
        while not self._stopped.is_set():
            try:
                known = self._guard.known if self._guard is not None else None
                revisions = self._list()
                if self._stopped.is_set():
                    return
                self._store.recognise()
                if lost:
                    self._on_back()
                lost = False
                for _, on_state, kept in self._all:
                    on_state(dict(kept.entries))
                if known is not None:
                    known = replace(known, revision=max(known.revision, max(revisions) - 1))
                self._watch(revisions, known)
                continue  # the planned end of a stream: list again at once
            except _Resync as reason:
                if self._stopped.is_set():
                    return
                log.debug('listing %s anew: %s', self._all[0].prefix, reason)
                self._store.move_on()
            except StrangeEtcd:
                return  # the guard has said so; there is nothing to follow here
            except EcompError as error:
                if not lost and not self._stopped.is_set():
                    self._on_lost(error)
                lost = True
            except Exception:  # without this thread ecompute would be deaf, and look as if it were well
                log.exception('unexpected error while following %s; trying again', self._all[0].prefix)
            self._stopped.wait(self._backoff.next() * random.uniform(0.5, 1.0))

    def _list(self) -> list[int]:
        """Read each prefix anew; from which revisions on to watch them. Fewer where stop() comes in between."""
        revisions = []
        for prefix, _, kept in self._all:
            if not self._stopped.is_set():
                snapshot = self._store.snapshot(prefix, keep=kept.keep)
                kept.end(snapshot.entries)
                revisions.append(snapshot.revision + 1)
        return revisions

    def _watch(self, revisions: Sequence[int], known: KnownCluster | None) -> None:
        """Apply the changes of each from its revision on, until the planned end; _Resync at any other.

        `known` is what etcd is held against, None without a guard: what was seen of it before the list, and the
        revision of that. Not what is seen by now: on a busy host another connection has been answered already by the
        time a change is heard of here, and then every change would look as if that member lagged.
        """
        wanted = []
        for each, revision in zip(self._all, revisions, strict=True):
            key = each.prefix.encode()
            wanted.append(WatchCreate(key, after(key), revision))
        self._call = self._store.watch(wanted, self._resync * random.uniform(0.8, 1.2))
        if self._stopped.is_set():  # stop() may have come before there was a call to cancel
            self._call.cancel()
        # etcd says which number a watch has in the order in which they were asked for, and before its first event.
        watched: dict[int, _Watch] = {}
        try:
            for reply in self._call:
                # A watch may be refused in the same message that says it was created.
                if reply.canceled or reply.compact_revision:
                    raise _Resync(f'etcd ended the watch: {reply.cancel_reason or "compacted"}')
                # A member that lags may answer a watch; so may an etcd without our history. The next list tells.
                if known is not None and self._guard is not None and not self._guard.observe(known, header_of(reply)):
                    raise _Resync('the watch is answered by an etcd that is behind')
                if reply.created:
                    watched[reply.watch_id] = self._all[len(watched)]
                if len(watched) == len(self._all):
                    self._backoff.reset()  # it lists and it watches: only now nothing is wrong any more
                if reply.events:
                    self._apply(reply.events, watched.get(reply.watch_id))
            raise _Resync('the stream ended')
        except CallFailure as error:
            if error.code == DEADLINE_EXCEEDED and not error.unsent:
                return
            raise _Resync(f'the stream broke: {error.code}') from error
        finally:
            self._call.cancel()

    def _apply(self, events: Iterable[Any], watch: _Watch | None) -> None:
        if watch is None:
            raise _Resync('a change came of what is not watched')
        for event in events:
            entry = entry_of(event.kv)
            if event.type == DELETED:
                watch.kept.forget(entry.key)
            else:
                watch.kept.keep(entry)
        watch.on_state(dict(watch.kept.entries))

    def _log_loss(self, error: EcompError) -> None:
        log.warning('%s; trying again until it is back', error)

    def _log_return(self) -> None:
        log.info('etcd at %s is back', self._store.where)
