"""What etcd remembers of its keys: every change, as far back as it keeps them, and then each as it happens.

etcd keeps what it has not compacted. A watch from a revision that it has forgotten is answered by the first one that it
keeps (https://etcd.io/docs/v3.4/learning/api/#watch-streams). Unlike Follower, which hands on what is there now and may
pass over what came between, this passes over nothing that etcd still has.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, Unreachable
from ecomp.model.backoff import Backoff
from ecomp.model.events import Change
from ecomp.store.client import Store, after
from ecomp.store.messages import DEADLINE_EXCEEDED, DELETED, CallFailure, WatchCreate

if TYPE_CHECKING:
    from ecomp.store.by_h2 import Watch

PREFIX = b'/'
"""Before every key of ours. Others' keys are not asked for: a role of etcd's would refuse that."""
ASKING = 0.4
"""Seconds of silence after which etcd is asked how far it has told, where the past is to end."""
SPACED = 0.75 * ASKING
"""Seconds after which another answer to that counts as one more."""
ANSWERS = 4
"""How often it says so, ASKING seconds apart and with no change between, of a past of which no change has come."""
FULL = 1000
"""Revisions in an answer of etcd's, at most: of one with so many there may be more to come (its watchBatchMaxRevs)."""
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
        self._config, self._store = config, Store(config)
        self._follow, self._tell = follow, tell
        self._now = 0
        self._next = first
        self._last = 0  # the revision of the last change that was handed on, 0 where there is none that etcd keeps
        self._part: list[Any] = []  # the events of a revision that may not be all of it yet
        self._lost = self._deaf = False
        self.since = 1

    @property
    def is_past(self) -> bool:
        """Whether what was handed on last had happened before this began."""
        return self._next <= self._now + 1

    @property
    def upcoming(self) -> int:
        """The first revision that was not handed on yet, if there is one already."""
        return self._next

    def close(self) -> None:
        """Let go of etcd."""
        self._store.close()

    def __iter__(self) -> Iterator[list[Change]]:
        self._now = self._store.revision()
        tries, backoff = 0, Backoff(0.2, 5.0)
        while True:
            before = self._next
            failure: _Broken | None = None
            try:
                if (yield from self._stream()):
                    self._next = max(self._next, self._now + 1)
                    return
            except _Broken as error:
                failure = error
            if self._next > before:  # a stream that was begun and brought nothing is no step ahead
                tries, self._deaf = 0, False
                backoff.reset()
            if failure is not None:
                tries += 1
                self._bear(failure, tries)
                self._store.move_on()
            if tries:
                time.sleep(backoff.next())
            self._look()

    def _stream(self) -> Generator[list[Change], None, bool]:
        """What one stream brings; whether all of the past has been told, else there is to be another."""
        # From a change that is known on: so there is an answer with a change, and it says how far it tells.
        first = self._next if self._follow else self._last or self._next
        past = _Past(self._now, first == self._last)
        self._part = []
        for reply in _answers(self._store, first, None if self._follow else self._now, self._config.timeout):
            yield from self._changes(reply)
            if self._follow:
                continue
            past.hear(reply, time.monotonic())
            if past.is_told or self._next > self._now:
                return True
            if past.is_quiet:
                if self._last not in (0, first):
                    return False
                if not self._is_owed():
                    return True
                past.go_on()
        return False

    def _is_owed(self) -> bool:
        """Whether there is certainly something that was not told: a key that is there, and was changed since."""
        store = Store(self._config)  # the other is busy with the stream
        try:
            return store.has_changed(PREFIX.decode(), self._next)
        finally:
            store.close()

    def _changes(self, reply: Any) -> Iterator[list[Change]]:
        if reply.compact_revision:
            if 1 < self._next < reply.compact_revision:
                self._tell(f'etcd forgot what was before revision {reply.compact_revision} while it could not be heard')
            self._next = self.since = int(reply.compact_revision)
            self._last = 0
        elif reply.canceled:
            raise EcompError(f'etcd at {self._store.where} refuses: {reply.cancel_reason or "no reason given"}')
        if not reply.events:
            return
        revisions = [list(each) for _, each in groupby([*self._part, *reply.events], _revision)]
        # A piece may end within a revision, and only the next one tells.
        self._part = revisions.pop() if reply.fragment else []
        for events in revisions:
            revision = _revision(events[0])
            if revision >= self._next:
                self._next, self._last = revision + 1, revision
                yield [_change(each) for each in events]

    def _bear(self, failure: _Broken, tries: int) -> None:
        """Go on after a failure, so many of which came since the last change; Unreachable where that is one too many.

        Where changes are followed a first one is left to _look(): etcd may just have been started again.
        """
        where = f'etcd at {self._store.where}'
        if not self._follow and tries > TRIES:
            raise Unreachable(f'{where}: {failure}', 'etcd') from failure
        if self._follow and tries > 1 and not self._lost and not self._deaf:
            self._deaf = True
            self._tell(f'{where}: {failure}; asking again for what is from revision {self._next} on')

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


class _Past:
    """Whether all up to the revision `now` has been told on a stream. Silence says nothing: etcd may be frozen.

    etcd says in two ways how far it has told. Each may be wrong with some etcds, so it is told where both say so:

    - The header of an answer with changes. Of FULL revisions in it there may be more; with fewer it has all up to the
      revision in its header. So every etcd does it so far, and none promises it.
    - Its answer to WatchProgress. That is a promise, which old ones break: they answer without a look at what they have
      still to tell.

    Where there is no change to tell there is no such header either. Then only the second is left, and for the old ones
    it has to come several times.

    `known`: the stream begins with a change that is known, so it is not quiet before that has come.
    """

    def __init__(self, now: int, known: bool) -> None:
        self._now, self._is_due = now, known
        self._whole = 0  # up to which revision the changes say that they are all
        self._answers = 0  # to WatchProgress since the last change
        self._counted = float('-inf')
        self._revisions: set[int] = set()  # of an answer, as far as its pieces have come

    @property
    def is_told(self) -> bool:
        """It has been told, and etcd says so."""
        return self._whole >= self._now and self._answers > 0

    @property
    def is_quiet(self) -> bool:
        """etcd is there, says that it has told all, and was given time to tell more."""
        return self._answers >= ANSWERS and not self._is_due

    def go_on(self) -> None:
        """Take it for as quiet as at the beginning: there is more to come."""
        self._answers = 0

    def hear(self, reply: Any, moment: float) -> None:
        """Take an answer that came at this moment, in seconds."""
        if reply.events:
            self._answers, self._is_due = 0, False
            self._revisions |= {_revision(each) for each in reply.events}
            if not reply.fragment:
                if len(self._revisions) < FULL:
                    self._whole = int(reply.header.revision)
                self._revisions = set()
        # What was asked while etcd was frozen is answered all at once, and before anything else: that is one answer.
        elif _says_how_far(reply) and reply.header.revision >= self._now and moment >= self._counted + SPACED:
            self._answers += 1
            self._counted = moment


def _answers(store: Store, first: int, now: int | None, patience: float) -> Iterator[Any]:
    """The answers to one watch, until STREAM seconds are over.

    With a past to be told up to the revision `now` (None: there is none) etcd is asked how far it is as long as it says
    nothing, and it is _Broken once it has said nothing of use for `patience` seconds. Taken in a thread of its own, so
    that whoever reads them can be interrupted.
    """
    wanted = WatchCreate(PREFIX, after(PREFIX), first, previous=True, fragment=True)
    call = store.watch([wanted], STREAM, None if now is None else ASKING)
    replies: queue.Queue[Any] = queue.Queue(WAITING)
    ended = threading.Event()
    threading.Thread(target=_take, args=(call, replies, ended), name='history', daemon=True).start()
    try:
        heard = time.monotonic()
        while True:
            if now is not None and time.monotonic() >= heard + patience:
                raise _Broken(f'nothing came for {patience:g} s')
            try:
                reply = replies.get(timeout=0.5)
            except queue.Empty:
                continue
            if isinstance(reply, Exception):
                raise reply
            if reply is None:
                return
            yield reply
            if reply.canceled:
                return
            # A member that is behind and stays there answers, too.
            if reply.events or now is None or reply.header.revision >= now:
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
    except CallFailure as error:
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


def _says_how_far(reply: Any) -> bool:
    """Whether it answers WatchProgress."""
    return not (reply.events or reply.created or reply.canceled)


def _revision(event: Any) -> int:
    return int(event.kv.mod_revision)


def _change(event: Any) -> Change:
    kv, deleted = event.kv, event.type == DELETED
    is_new = not deleted and kv.create_revision == kv.mod_revision
    # Of one that is not there protobuf has an empty one.
    before = bytes(event.prev_kv.value) if event.prev_kv.mod_revision else None
    key = kv.key.decode(errors='replace')
    return Change(key, before, None if deleted else bytes(kv.value), int(kv.mod_revision), before is not None or is_new)
