"""Follow a prefix: the whole of it, then every change, for as long as it takes.

An event is a nudge and the list is the truth: after any end of a stream, and once a minute in any case, the
prefix is listed anew. So a lost connection, a compaction, a refused or a silent watch are one case
(RELIABILITY.md 1.8; https://etcd.io/docs/v3.4/learning/api/#watch-api).
"""

from __future__ import annotations

import logging
import queue
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from etcd3 import etcdrpc
from etcd3.utils import increment_last_byte

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, StrangeEtcd
from ecomp.model.backoff import Backoff
from ecomp.model.json_object import VALUE_LIMIT
from ecomp.store.client import Entry, Store, header_of
from ecomp.store.guard import Guard
from ecomp.store.kept import MOST, Kept

log = logging.getLogger(__name__)

State = Mapping[str, Entry]
FIRST_DELAY, LAST_DELAY = 0.2, 5.0


class _Resync(Exception):
    """The stream is over or cannot be trusted any more: list anew."""


class Follower:
    """A thread that hands the state of a prefix to on_state(state): first whole, then at every change.

    `state` maps keys to entries and is never changed afterwards. on_state is called in this thread and must be quick.
    A lost etcd is told to on_lost once, tried again with growing delays, and told to on_back once when it is back; by
    default both are logged. With a guard it ends where an etcd begins that is not the one we knew (rule 10).

    Of a value larger than `largest`, and of one with which there would be more than `most` bytes in all, only the key
    and the revision are kept (see Entry.dropped). That is logged once for each key.
    """

    def __init__(
        self,
        config: EtcdConfig,
        prefix: str,
        on_state: Callable[[State], None],
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
        self._prefix = prefix
        self._on_state = on_state
        self._resync = resync
        self._kept = Kept(largest, most)
        self._backoff = Backoff(FIRST_DELAY, LAST_DELAY)
        self._stopped = threading.Event()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f'follow {prefix}', daemon=True)

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
                snapshot = self._store.snapshot(self._prefix, keep=self._kept.keep)
                self._kept.end(snapshot.entries)
                self._store.recognise()
                if lost:
                    self._on_back()
                lost = False
                state = dict(snapshot.entries)
                self._on_state(dict(state))
                self._watch(snapshot.revision + 1, state)
                continue  # the planned end of a stream: list again at once
            except _Resync as reason:
                log.debug('listing %s anew: %s', self._prefix, reason)
                self._store.move_on()
            except StrangeEtcd:
                return  # the guard has said so; there is nothing to follow here
            except EcompError as error:
                if not lost and not self._stopped.is_set():
                    self._on_lost(error)
                lost = True
            except Exception:  # without this thread ecompute would be deaf, and look as if it were well
                log.exception('unexpected error while following %s; trying again', self._prefix)
            self._stopped.wait(self._backoff.next() * random.uniform(0.5, 1.0))

    def _watch(self, revision: int, state: dict[str, Entry]) -> None:
        """Apply changes from `revision` on until the planned end; _Resync at any other."""
        key = self._prefix.encode()
        wanted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        create = etcdrpc.WatchCreateRequest(key=key, range_end=increment_last_byte(key), start_revision=revision)
        wanted.put(etcdrpc.WatchRequest(create_request=create))
        self._call = self._store.watch(iter(wanted.get, None), self._resync * random.uniform(0.8, 1.2))
        if self._stopped.is_set():  # stop() may have come before there was a call to cancel
            self._call.cancel()
        try:
            for reply in self._call:
                # A watch may be refused in the same message that says it was created.
                if reply.canceled or reply.compact_revision:
                    raise _Resync(f'etcd ended the watch: {reply.cancel_reason or "compacted"}')
                # A member that lags may answer a watch; so may an etcd without our history. The next list tells.
                if self._guard is not None and not self._guard.observe(header_of(reply)):
                    raise _Resync('the watch is answered by an etcd that is behind')
                self._backoff.reset()  # it lists and it watches: only now nothing is wrong any more
                for event in reply.events:
                    self._apply(event, state)
                if reply.events:
                    self._on_state(dict(state))
            raise _Resync('the stream ended')
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                return
            raise _Resync(f'the stream broke: {error.code().name}') from error
        finally:
            wanted.put(None)
            self._call.cancel()

    def _apply(self, event: Any, state: dict[str, Entry]) -> None:
        key = event.kv.key.decode(errors='replace')
        if event.type == event.DELETE:
            state.pop(key, None)
            self._kept.forget(key)
        else:
            kept = self._kept.keep(Entry(key, event.kv.value, event.kv.mod_revision, event.kv.lease))
            if kept is not None:
                state[key] = kept

    def _log_loss(self, error: EcompError) -> None:
        log.warning('%s; trying again until it is back', error)

    def _log_return(self) -> None:
        log.info('etcd at %s is back', self._store.where)


