"""What etcd remembers of its keys: every change, as far back as it keeps them, and then each as it happens.

etcd keeps what it has not compacted. A watch from a revision that it has forgotten is answered by the first one that it
keeps (https://etcd.io/docs/v3.4/learning/api/#watch-streams). Unlike Follower, which hands on what is there now and may
pass over what came between, this passes over nothing that etcd still has.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, Unreachable
from ecomp.model.backoff import Backoff
from ecomp.model.events import Change
from ecomp.store.client import Store, after
from ecomp.store.messages import DELETED, WatchCreate
from ecomp.store.reasons import DEADLINE_EXCEEDED, Failure

if TYPE_CHECKING:
    from ecomp.store.connection import Watch

PREFIX = b'/'
"""Before every key of ours. Others' keys are not asked for: a role of etcd's would refuse that."""
QUIET = 2.0
"""Seconds without a word after which all of the past is taken to have come, if the last change was another's key."""
STREAM = 3600.0
"""Seconds after which a watch is asked for anew."""
WAITING = 8
"""Answers that are taken before those before them were dealt with."""
TRIES = 5
"""How often the past is asked for whose stream breaks."""


class History:
    """The changes of all keys, a list a revision, oldest first. `since` is the first revision that etcd keeps.

    Without `follow` it ends with what is past; else `tell` hears when etcd is lost and back, and what it forgot
    meanwhile. It begins with revision `first`. Errors while it is read: Unreachable, EcompError where etcd refuses, or
    is another than it was.
    """

    def __init__(self, config: EtcdConfig, follow: bool, tell: Callable[[str], None], first: int = 1) -> None:
        self._store = Store(config)
        self._follow, self._tell = follow, tell
        self._now = 0
        self._next = first
        self._lost = False
        self.since = 1

    @property
    def is_past(self) -> bool:
        """Whether what was handed on last had happened before this began."""
        return self._next <= self._now + 1

    @property
    def upcoming(self) -> int:
        """The first revision that was not handed on yet, if there is one already."""
        return max(self._next, self._now + 1) if self._now else self._next

    def close(self) -> None:
        """Let go of etcd."""
        self._store.close()

    def __iter__(self) -> Iterator[list[Change]]:
        self._now = self._store.revision()
        tries, backoff = 0, Backoff(0.2, 5.0)
        while True:
            forgotten = False
            try:
                for reply in _Stream(self._store, self._next, None if self._follow else QUIET):
                    forgotten = bool(reply.compact_revision)
                    yield from self._changes(reply)
                    tries = 0
                    if not self._follow and self._next > self._now:
                        return
                if not self._follow and not forgotten:
                    return
            except _Broken as error:
                tries += 1
                if not self._follow and tries > TRIES:
                    raise Unreachable(f'etcd at {self._store.where}: {error}', 'etcd') from error
                self._store.move_on()
            if tries:
                time.sleep(backoff.next())
            self._look()

    def _changes(self, reply: Any) -> Iterator[list[Change]]:
        if reply.compact_revision:
            if self._next > 1:
                self._tell(f'etcd forgot what was before revision {reply.compact_revision} while it could not be heard')
            self._next = self.since = int(reply.compact_revision)
        elif reply.canceled:
            raise EcompError(f'etcd at {self._store.where} refuses: {reply.cancel_reason or "no reason given"}')
        for revision, events in groupby(reply.events, lambda each: int(each.kv.mod_revision)):
            if revision >= self._next:
                self._next = revision + 1
                yield [_change(each) for each in events]

    def _look(self) -> None:
        """See that etcd answers, and is the one that it was."""
        try:
            revision = self._store.revision()
        except EcompError as error:
            if not self._follow:
                raise
            if not self._lost:
                self._tell(f'{error}; trying again until it is back')
            self._lost = True
            return
        if revision < self._next - 1:
            where = f'etcd at {self._store.where}'
            raise EcompError(f'{where} is behind what it said before: it was restored, or is another; ask again')
        if self._lost:
            self._tell('etcd is back')
        self._lost = False


class _Broken(Exception):
    """The stream ended before its time."""


class _Stream:
    """The answers to one watch, until STREAM seconds are over, or for `quiet` seconds none has come.

    Taken in a thread of its own, so that whoever reads them can be interrupted.
    """

    def __init__(self, store: Store, first: int, quiet: float | None) -> None:
        self._store, self._first, self._quiet = store, first, quiet

    def __iter__(self) -> Iterator[Any]:
        call = self._store.watch([WatchCreate(PREFIX, after(PREFIX), self._first, previous=True)], STREAM)
        replies: queue.Queue[Any] = queue.Queue(WAITING)
        ended = threading.Event()
        threading.Thread(target=_take, args=(call, replies, ended), name='history', daemon=True).start()
        try:
            heard = time.monotonic()
            while True:
                try:
                    reply = replies.get(timeout=0.5)
                except queue.Empty:
                    if self._quiet is not None and time.monotonic() >= heard + self._quiet:
                        return
                    continue
                if isinstance(reply, Exception):
                    raise reply
                if reply is None:
                    return
                yield reply
                if reply.canceled:
                    return
                heard = time.monotonic()
        finally:
            ended.set()
            call.cancel()


def _take(call: Watch, replies: queue.Queue[Any], ended: threading.Event) -> None:
    """Put each answer into `replies`, and at the end None, or why it ended before its time; until `ended`."""
    last: Any = _Broken('the stream ended')
    try:
        for reply in call:
            _put(replies, reply, ended)
            if ended.is_set():
                return
    except Failure as error:
        late = error.code == DEADLINE_EXCEEDED and not error.unsent
        last = None if late else _Broken(f'the stream broke: {error.code}')
    except Exception as error:  # whoever reads would wait for a last word for ever
        last = error
    _put(replies, last, ended)


def _put(replies: queue.Queue[Any], reply: Any, ended: threading.Event) -> None:
    while not ended.is_set():
        with suppress(queue.Full):
            replies.put(reply, timeout=0.5)
            return


def _change(event: Any) -> Change:
    kv, deleted = event.kv, event.type == DELETED
    is_new = not deleted and kv.create_revision == kv.mod_revision
    # Of one that is not there protobuf has an empty one.
    before = bytes(event.prev_kv.value) if event.prev_kv.mod_revision else None
    key = kv.key.decode(errors='replace')
    return Change(key, before, None if deleted else bytes(kv.value), int(kv.mod_revision), before is not None or is_new)
