"""Follow prefixes: deliver the whole state of each, and again after every change."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, StrangeEtcd, put_before_fix
from ecomp.model.backoff import Backoff
from ecomp.model.json_object import MAX_VALUE_BYTES
from ecomp.model.text import make_printable
from ecomp.store.client import Entry, Guard, Store, get_prefix_range_end, parse_entry, parse_header
from ecomp.store.messages import DEADLINE_EXCEEDED, EVENT_DELETE, CallFailure, WatchCreate

if TYPE_CHECKING:
    from ecomp.model.cluster import KnownCluster
    from ecomp.store.http2_client import WatchStream

log = logging.getLogger(__name__)
# Maximum bytes that are kept of a prefix. Ten thousand requests without user-data are 20 MB.
MAX_TOTAL_BYTES = 64 * 1024**2
# Bytes that each comma of a value counts for: once parsed, each part is an object, however short its text.
BYTES_PER_PART = 64
# Values up to this may use as much room again: a request to destroy is one, and must get through when all is full.
SMALL_VALUE_BYTES = 4096
# Dropped keys that are logged by name; then one line tells that there are more.
MAX_NAMED_KEYS = 100
# Maximum keys that are kept, and bytes of one: ecomp writes neither as many nor as long ones, so others leave no trace.
MAX_KEYS = 100_000
MAX_KEY_BYTES = 16 * 1024
State = Mapping[str, Entry]
# A prefix and the callback for its state.
Subscription = tuple[str, Callable[[State], None]]
# Seconds until a lost etcd is tried again: at first, and at most.
FIRST_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 5.0


class EntryCache:
    """The entries that a follower keeps: no value that is too large, and a limited size in all.

    Call store() for each entry of a list, then end_list(), and after that store() and forget() for each event.
    """

    def __init__(self, max_value_bytes: int, max_total_bytes: int) -> None:
        self._max_value_bytes = max_value_bytes
        self._max_total_bytes = max_total_bytes
        self.entries: dict[str, Entry] = {}
        self._size = 0
        self._reported_keys: set[str] = set()

    def end_list(self, listed_keys: Iterable[str]) -> None:
        """Drop the entries of all keys that a list, which has just ended, did not have."""
        for key in self.entries.keys() - set(listed_keys):
            self.forget(key)
        self._reported_keys &= self.entries.keys()

    def store(self, entry: Entry) -> Entry | None:
        """Store and return an entry, without a value that is too large, or return None if full."""
        previous = self.entries.get(entry.key)
        if previous is not None and (previous.revision, previous.value) == (entry.revision, entry.value):
            return previous  # stays, even if there is no room for others
        size, key_size, small_room = len(entry.value), len(entry.key), 2 * self._max_total_bytes
        if previous is not None:
            self._size -= _estimate_bytes(previous.value)
        elif len(self.entries) >= MAX_KEYS or key_size > MAX_KEY_BYTES or self._size + key_size > small_room:
            self._report_dropped(entry.key, size)
            return None
        else:
            self._size += key_size
        room = self._max_total_bytes if size > SMALL_VALUE_BYTES else small_room
        fits = size <= self._max_value_bytes and self._size + _estimate_bytes(entry.value) <= room
        # A dropped value's key and revision stay, so it is visible which compute has a request.
        stored = entry if fits else replace(entry, value=b'', dropped_bytes=size)
        if not fits:
            self._report_dropped(entry.key, size)
        self.entries[entry.key] = stored
        self._size += _estimate_bytes(stored.value)
        return stored

    def forget(self, key: str) -> None:
        """Drop the entry of a key that was deleted, if it is kept."""
        entry = self.entries.pop(key, None)
        if entry is not None:
            self._size -= len(entry.key) + _estimate_bytes(entry.value)

    def _report_dropped(self, key: str, size: int) -> None:
        if key in self._reported_keys or len(self._reported_keys) > MAX_NAMED_KEYS:
            return
        self._reported_keys.add(key)
        name, limit = make_printable(key, 200), self._max_value_bytes
        if len(self._reported_keys) > MAX_NAMED_KEYS:
            log.warning('the values of more than %d keys are ignored; further ones are not logged', MAX_NAMED_KEYS)
        elif size > limit:
            log.warning('the value of %s is ignored: it has %d bytes, but the limit is %d', name, size, limit)
        else:
            log.warning('the value of %s is ignored: its %d bytes exceed the limit of its prefix', name, size)


def _estimate_bytes(value: bytes) -> int:
    return len(value) + BYTES_PER_PART * value.count(b',')


class _Resync(Exception):
    """The stream has ended or cannot be trusted: list again."""


class _PrefixWatch(NamedTuple):
    prefix: str
    on_state: Callable[[State], None]
    cache: EntryCache


class Follower:
    """A thread that passes the state of each prefix to its callback: first, and after changes.

    A state, {key: Entry}, is never changed afterwards. The callbacks run in this thread and must be quick.
    All prefixes are listed before any state is passed on. This is repeated about every `resync_seconds`, and after an
    exception of a callback. A lost etcd is reported once to `on_lost`, with when the failed list began (monotonic), and
    its return to `on_back`. With a guard, the thread ends in an etcd that is not the one we knew. A value above
    `max_value_bytes`, or that would bring a prefix above `max_total_bytes`, is dropped (see Entry) and logged.
    """

    def __init__(  # noqa: PLR0913
        self,
        config: EtcdConfig,
        subscriptions: Iterable[Subscription],
        resync_seconds: float = 60.0,
        guard: Guard | None = None,
        on_lost: Callable[[EcompError, float], None] | None = None,
        on_back: Callable[[], None] | None = None,
        max_value_bytes: int = MAX_VALUE_BYTES,
        max_total_bytes: int = MAX_TOTAL_BYTES,
    ) -> None:
        # A connection of its own: a long list must not block the stream, nor a frozen stream the writes.
        self._store = Store(config, guard)
        self._guard = guard
        self._on_lost = on_lost or _log_loss
        self._on_back = on_back or partial(log.info, 'etcd at %s is back', self._store.endpoints)
        self._watches = [_PrefixWatch(*each, EntryCache(max_value_bytes, max_total_bytes)) for each in subscriptions]
        self._resync_seconds = resync_seconds
        self._backoff = Backoff(FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS)
        self._stop_event = threading.Event()
        self._call: WatchStream | None = None
        self._thread = threading.Thread(target=self._run, name=f'follow {self._watches[0].prefix}', daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, wait for the thread and close the connection, which no callback may do."""
        self._stop_event.set()
        if self._call is not None:
            self._call.cancel()
        if self._thread.is_alive():
            self._thread.join()
        self._store.close()

    def _run(self) -> None:
        is_lost = False
        while not self._stop_event.is_set():
            began = time.monotonic()
            try:
                cluster_before = self._guard.known_cluster if self._guard is not None else None
                revisions = self._list()
                if self._stop_event.is_set():
                    return
                self._store.require_identity()
                if is_lost:
                    self._on_back()
                is_lost = False
                for _, on_state, cache in self._watches:
                    on_state(dict(cache.entries))
                if cluster_before is not None:
                    cluster_before = cluster_before._replace(revision=max(cluster_before.revision, max(revisions) - 1))
                self._watch(revisions, cluster_before)
                # The planned end of the stream: list again immediately. As all is listed after any end, a compaction, a
                # lost connection and a silent watch are one case (https://etcd.io/docs/v3.4/learning/api/#watch-api).
                continue
            except _Resync as reason:
                if self._stop_event.is_set():
                    return
                log.debug('listing %s again: %s', self._watches[0].prefix, reason)
                self._store.reconnect()
            except StrangeEtcd:
                return  # the guard has reported it; there is nothing to follow here
            except EcompError as error:
                if not is_lost and not self._stop_event.is_set():
                    self._on_lost(error, began)
                is_lost = True
            except Exception:  # without this thread ecompute would miss all changes and look healthy
                log.exception('unexpected error while following %s; trying again', self._watches[0].prefix)
            self._stop_event.wait(self._backoff.next() * random.uniform(0.5, 1.0))

    def _list(self) -> list[int]:
        """Read all prefixes into their caches, and return the revision to watch each from."""
        revisions = []
        for prefix, _, cache in self._watches:
            if not self._stop_event.is_set():
                snapshot = self._store.snapshot(prefix, transform=cache.store)
                cache.end_list(snapshot.entries)
                revisions.append(snapshot.revision + 1)
        return revisions

    def _watch(self, revisions: Sequence[int], cluster_before: KnownCluster | None) -> None:
        """Apply the changes of each prefix until the planned end, or raise _Resync."""
        starts = [each.prefix.encode() for each in self._watches]
        ends = map(get_prefix_range_end, starts)
        requests = list(map(WatchCreate, starts, ends, revisions))
        self._call = self._store.watch(requests, self._resync_seconds * random.uniform(0.8, 1.2))
        if self._stop_event.is_set():  # stop() may have come before there was a call to cancel
            self._call.cancel()
        # etcd numbers the watches in the order of the requests, and reports each number before its first event.
        watched: dict[int, _PrefixWatch] = {}
        try:
            for reply in self._call:
                # One message may report that a watch was created and that it is refused.
                if reply.canceled or reply.compact_revision:
                    raise _Resync(f'etcd ended the watch: {reply.cancel_reason or "compacted"}')
                # A member that lags may answer a watch, as may an etcd with another history: the next list shows which.
                # The cluster is that before the list, because another connection may have seen newer revisions since.
                if cluster_before and self._guard and not self._guard.observe(cluster_before, parse_header(reply)):
                    raise _Resync('an etcd member that lags behind answered the watch')
                if reply.created:
                    watched[reply.watch_id] = self._watches[len(watched)]
                if len(watched) == len(self._watches):
                    self._backoff.reset()  # only now both the list and the watches have worked
                if reply.events:
                    self._apply(reply.events, watched.get(reply.watch_id))
            raise _Resync('the stream ended')
        except CallFailure as error:
            if error.code == DEADLINE_EXCEEDED and not error.unsent:
                return
            raise _Resync(f'the stream broke: {error.code}') from error
        finally:
            self._call.cancel()

    def _apply(self, events: Iterable[Any], watch: _PrefixWatch | None) -> None:
        if watch is None:
            raise _Resync('a change arrived for an unknown watch')
        for event in events:
            entry = parse_entry(event.kv)
            if event.type == EVENT_DELETE:
                watch.cache.forget(entry.key)
            else:
                watch.cache.store(entry)
        watch.on_state(dict(watch.cache.entries))


def _log_loss(error: EcompError, _began: float) -> None:
    log.warning('%s', put_before_fix(str(error), '; trying again until it is back'))
