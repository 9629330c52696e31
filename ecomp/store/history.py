"""The changes of all keys that etcd still has, and then each new one as it happens.

Follower delivers the current state and may skip changes; History skips none that etcd still has. A watch from a
compacted revision reports the first one that is kept (https://etcd.io/docs/v3.4/learning/api/#watch-streams).
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

# The prefix of all keys of ecomp. The keys of others are not read: a role might forbid it.
PREFIX = b'/'
# Seconds of silence after which etcd is asked for its progress, when reading the past.
ASKING = 0.4
# Seconds after which another progress answer counts as a new one.
SPACED = 0.75 * ASKING
# Progress answers, PROGRESS_INTERVAL_SECONDS apart, without a change between, that prove that the past has none.
ANSWERS = 4
# Maximum revisions in one answer of etcd (its watchBatchMaxRevs): after a full one there may be more.
FULL = 1000
# Seconds after which a watch is restarted.
STREAM = 3600.0
# Answers that are buffered before they are processed.
WAITING = 8
# Repetitions after broken streams, when reading the past.
TRIES = 5


class History:
    """Iterates over the changes of all keys since `first_revision`, as one list per revision.

    Without `follow` it ends with the changes made before it began. With `follow`, `report` gets a line when etcd is
    lost, is back, or has compacted unread revisions. `oldest_revision` is the first one that etcd keeps.

    Iteration raises EcompError if etcd refuses, or was restored or replaced; without `follow` also Unreachable.
    """

    def __init__(self, config: EtcdConfig, follow: bool, tell: Callable[[str], None], first: int = 1) -> None:
        self._config = config
        self._store = Store(config)
        self._follow = follow
        self._tell = tell
        self._now = 0
        self._next = first
        self._last = 0  # revision of the last change that was yielded; 0 if etcd keeps none
        self._part: list[Any] = []  # events of a revision that may be incomplete
        self._lost = self._deaf = False
        self.since = 1

    @property
    def is_past(self) -> bool:
        """True if the last list that was yielded had happened before the iteration began."""
        return self._next <= self._now + 1

    @property
    def upcoming(self) -> int:
        """The first revision that was not yielded yet."""
        return self._next

    def close(self) -> None:
        self._store.close()

    def __iter__(self) -> Iterator[list[Change]]:
        self._now = self._store.revision()
        tries, backoff = 0, Backoff(0.2, 5.0)
        while True:
            previous_next = self._next
            failure: _Broken | None = None
            try:
                if (yield from self._stream()):
                    self._next = max(self._next, self._now + 1)
                    return
            except _Broken as error:
                failure = error
            if self._next > previous_next:  # a stream without a change is no progress
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
        """Yield the changes of one stream; return True once all of the past was read."""
        # Begin with a change that is known: then there is an answer with changes, whose header tells up to where.
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
        """Return whether a key was changed that the stream has not reported."""
        store = Store(self._config)  # the other connection is busy with the stream
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
        revisions = [list(group) for _, group in groupby([*self._part, *reply.events], _revision)]
        # A part may end within a revision, which only the next part shows.
        self._part = revisions.pop() if reply.fragment else []
        for events in revisions:
            revision = _revision(events[0])
            if revision >= self._next:
                self._next, self._last = revision + 1, revision
                yield [_change(event) for event in events]

    def _bear(self, failure: _Broken, tries: int) -> None:
        """Handle failure number `tries` since the last change; raise Unreachable for one too many.

        When following, the first one is not reported: etcd may just have restarted, and _check_etcd() reports a loss.
        """
        where = f'etcd at {self._store.where}'
        if not self._follow and tries > TRIES:
            raise Unreachable(f'{where}: {failure}', 'etcd') from failure
        if self._follow and tries > 1 and not self._lost and not self._deaf:
            self._deaf = True
            self._tell(f'{where}: {failure}; asking again for what is from revision {self._next} on')

    def _look(self) -> None:
        """Raise EcompError if etcd is behind what it sent, or, without `follow`, does not answer."""
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
    """The stream ended early."""


class _Past:
    """Tracks whether a stream has delivered all changes up to `end_revision`.

    Silence proves nothing: etcd may be frozen. etcd shows its progress in two ways, each unreliable with some versions,
    so both are required:

    - The header of an answer with changes. With fewer than MAX_ANSWER_REVISIONS revisions, the answer is complete up to
      the header's revision. Every version so far does this; none promises it.
    - Its answer to WatchProgress. This is a promise, which old versions break: they ignore the changes that are not
      sent yet.

    Without a change to deliver there is no such header: then only the second is left, and has to arrive several times,
    for the old versions.

    `starts_at_known`: the stream begins with a change that is known, so it is not quiet before that has arrived.
    """

    def __init__(self, now: int, known: bool) -> None:
        self._now = now
        self._is_due = known
        self._whole = 0  # revision up to which the changes are complete
        self._answers = 0  # answers to WatchProgress since the last change
        self._counted = float('-inf')
        self._revisions: set[int] = set()  # of an answer whose parts are still arriving

    @property
    def is_told(self) -> bool:
        """True if all was delivered, by both signs."""
        return self._whole >= self._now and self._answers > 0

    @property
    def is_quiet(self) -> bool:
        """True if etcd answers, reports that it has sent all, and had time to send more."""
        return self._answers >= ANSWERS and not self._is_due

    def go_on(self) -> None:
        """Restart the count of progress answers: more changes are expected."""
        self._answers = 0

    def hear(self, reply: Any, moment: float) -> None:
        """Record an answer that arrived at this monotonic time."""
        if reply.events:
            self._answers, self._is_due = 0, False
            self._revisions |= {_revision(event) for event in reply.events}
            if not reply.fragment:
                if len(self._revisions) < FULL:
                    self._whole = int(reply.header.revision)
                self._revisions = set()
        # After a freeze etcd answers all progress requests together, before anything else: they count as one answer.
        elif _says_how_far(reply) and reply.header.revision >= self._now and moment >= self._counted + SPACED:
            self._answers += 1
            self._counted = moment


def _answers(store: Store, first: int, now: int | None, patience: float) -> Iterator[Any]:
    """Yield the answers to one watch for at most STREAM_SECONDS.

    With an `end_revision` (None: follow) etcd is asked for its progress while it is silent, and _StreamError is raised
    after `max_silence_seconds` without a useful answer. A thread of its own reads them, so that the consumer can be
    interrupted.
    """
    request = WatchCreate(PREFIX, after(PREFIX), first, previous=True, fragment=True)
    call = store.watch([request], STREAM, None if now is None else ASKING)
    replies: queue.Queue[Any] = queue.Queue(WAITING)
    stopped = threading.Event()
    threading.Thread(target=_take, args=(call, replies, stopped), name='history', daemon=True).start()
    try:
        last_useful = time.monotonic()
        while True:
            if now is not None and time.monotonic() >= last_useful + patience:
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
            # A member that stays behind answers, too.
            if reply.events or now is None or reply.header.revision >= now:
                last_useful = time.monotonic()
    finally:
        stopped.set()
        call.cancel()


def _take(call: Watch, replies: queue.Queue[Any], ended: threading.Event) -> None:
    """Put each answer into `replies` until `stopped`, and last None or why the stream broke."""
    last: Any = _Broken('the stream ended')
    try:
        for reply in call:
            _put(replies, reply, ended)
            if ended.is_set():
                return
    except CallFailure as error:
        is_timeout = error.code == DEADLINE_EXCEEDED and not error.unsent
        last = None if is_timeout else _Broken(f'the stream broke: {error.code}')
    except Exception as error:  # without it the consumer would wait for ever
        last = error
    _put(replies, last, ended)


def _put(replies: queue.Queue[Any], reply: Any, ended: threading.Event) -> None:
    while not ended.is_set():
        with suppress(queue.Full):
            replies.put(reply, timeout=0.5)
            return


def _says_how_far(reply: Any) -> bool:
    """Return whether it answers WatchProgress."""
    return not (reply.events or reply.created or reply.canceled)


def _revision(event: Any) -> int:
    return int(event.kv.mod_revision)


def _change(event: Any) -> Change:
    kv, deleted = event.kv, event.type == DELETED
    is_new = not deleted and kv.create_revision == kv.mod_revision
    # For a missing prev_kv protobuf has an empty message.
    before = bytes(event.prev_kv.value) if event.prev_kv.mod_revision else None
    key = kv.key.decode(errors='replace')
    return Change(key, before, None if deleted else bytes(kv.value), int(kv.mod_revision), before is not None or is_new)
