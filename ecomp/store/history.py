"""The changes of all keys that etcd still has, and then each new one as it happens.

Follower delivers the current state and may skip changes. History skips none that etcd still has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from itertools import groupby
from typing import Any

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, Unreachable, put_before_fix
from ecomp.model.backoff import Backoff
from ecomp.model.events import Change
from ecomp.store.client import Store, get_prefix_range_end
from ecomp.store.messages import DEADLINE_EXCEEDED, EVENT_DELETE, CallFailure, WatchCreate

# The prefix of all keys of ecomp. The keys of others are not read: a role might forbid it.
PREFIX = b'/'
# Seconds of silence after which etcd is asked for its progress, when reading the past.
PROGRESS_INTERVAL_SECONDS = 0.4
# Seconds after which another progress answer counts as a new one.
MIN_PROGRESS_SPACING_SECONDS = 0.75 * PROGRESS_INTERVAL_SECONDS
# Progress answers, PROGRESS_INTERVAL_SECONDS apart, without a change between, that prove that the past has none.
REQUIRED_PROGRESS_ANSWERS = 4
# Maximum revisions in one answer of etcd (its watchBatchMaxRevs): after a full one there may be more.
MAX_ANSWER_REVISIONS = 1000
# Seconds after which a watch is restarted.
STREAM_SECONDS = 3600.0
# Repetitions after broken streams, when reading the past.
MAX_TRIES = 5


class History:
    """Iterates over the changes of all keys since revision `first`, one list per revision.

    Without `follow` it ends with the changes made before it began. With `follow` it never ends.
    `report` gets a line when etcd has compacted unread revisions, unless it starts from 1.
    With `follow` it also gets one when etcd is lost or back, or keeps ending the stream.
    `next_revision` is the first that was not read yet, `oldest_revision` the first that etcd keeps, if known, or 1.

    Raises:
        EcompError: etcd refuses, or was restored or replaced.
        Unreachable: etcd does not answer at first. Without `follow`: nor later, or the stream keeps breaking.
    """

    def __init__(self, config: EtcdConfig, follow: bool, report: Callable[[str], None], first: int = 1) -> None:
        self._config = config
        self._store = Store(config)
        self._follow = follow
        self._report = report
        self._past_end = 0
        self.next_revision = first
        self._last_revision = 0  # revision of the last change that was yielded; 0 if etcd keeps none
        self._partial_events: list[Any] = []  # events of a revision that may be incomplete
        self._is_lost = self._is_failure_reported = False
        self.oldest_revision = 1

    @property
    def is_past(self) -> bool:
        """True if the changes yielded last had been made before the iteration began."""
        return self.next_revision <= self._past_end + 1

    def close(self) -> None:
        self._store.close()

    def __iter__(self) -> Iterator[list[Change]]:
        self._past_end = self._store.read_revision()
        tries, backoff = 0, Backoff(0.2, 5.0)
        while True:
            previous_next = self.next_revision
            failure: _StreamError | None = None
            try:
                if (yield from self._read_stream()):
                    self.next_revision = max(self.next_revision, self._past_end + 1)
                    return
            except _StreamError as error:
                failure = error
            if self.next_revision > previous_next:  # a stream without a change is no progress
                tries, self._is_failure_reported = 0, False
                backoff.reset()
            if failure is not None:
                tries += 1
                self._raise_or_report(failure, tries)
                self._store.reconnect()
            if tries:
                time.sleep(backoff.next())
            self._probe_etcd()

    def _read_stream(self) -> Generator[list[Change], None, bool]:
        """Yield a stream's changes. Return if the past was read, raise _StreamError if it broke."""
        # Begin with a change that is known: then there is an answer with changes, whose header tells up to where.
        first = self.next_revision if self._follow else self._last_revision or self.next_revision
        past = _PastProgress(self._past_end, first == self._last_revision)
        self._partial_events = []
        request = WatchCreate(PREFIX, get_prefix_range_end(PREFIX), first, with_previous=True, fragment=True)
        call = self._store.watch([request], STREAM_SECONDS, None if self._follow else PROGRESS_INTERVAL_SECONDS)
        try:
            for reply in call:
                yield from self._extract_changes(reply)
                if not self._follow:
                    past.record_reply(reply, time.monotonic())
                    if (is_read := self._has_read_past(past, first)) is not None:
                        return is_read
                if reply.canceled:
                    return False
        except CallFailure as error:
            if error.code == DEADLINE_EXCEEDED and not error.unsent:
                return False
            raise _StreamError(f'the stream broke: {error.code}') from error
        finally:
            call.cancel()
        raise _StreamError('the stream ended')

    def _has_read_past(self, past: _PastProgress, first: int) -> bool | None:
        """Return True if all of the past is read, False if a new stream has to, or None to go on."""
        if past.is_complete or self.next_revision > self._past_end:
            return True
        if past.is_quiet:
            if self._last_revision not in (0, first):
                return False
            with closing(Store(self._config)) as store:  # the other connection is busy with the stream
                if not store.has_changed(PREFIX.decode(), self.next_revision):
                    return True
            past.progress_answers = 0
        if time.monotonic() >= past.answered_at + self._config.timeout:
            raise _StreamError(f'no answer for {self._config.timeout:g} s')
        return None

    def _extract_changes(self, reply: Any) -> Iterator[list[Change]]:
        """Yield each whole revision's changes once, and report those that etcd compacted."""
        # From a compacted revision a watch reports the first one kept: etcd.io/docs/v3.4/learning/api/#watch-streams
        if reply.compact_revision:
            if 1 < self.next_revision < reply.compact_revision:
                missing = f'revisions {self.next_revision} to {reply.compact_revision - 1}'
                self._report(f'etcd compacted {missing} before they were read: their changes are missing here')
            self.next_revision = self.oldest_revision = int(reply.compact_revision)
            self._last_revision = 0
        elif reply.canceled:
            reason = reply.cancel_reason or 'no reason given'
            raise EcompError(f'etcd at {self._store.endpoints} refuses to report changes: {reason}')
        if not reply.events:
            return
        revisions = [list(group) for _, group in groupby([*self._partial_events, *reply.events], _get_revision)]
        # A part may end within a revision, which only the next part shows.
        self._partial_events = revisions.pop() if reply.fragment else []
        for events in revisions:
            revision = _get_revision(events[0])
            if revision >= self.next_revision:
                self.next_revision, self._last_revision = revision + 1, revision
                yield [_make_change(event) for event in events]

    def _raise_or_report(self, failure: _StreamError, tries: int) -> None:
        where = f'etcd at {self._store.endpoints}'
        if not self._follow and tries > MAX_TRIES:
            raise Unreachable(f'{where}: {failure}', 'etcd') from failure
        if self._follow and tries > 1 and not self._is_lost and not self._is_failure_reported:
            self._is_failure_reported = True
            self._report(f'{where}: {failure}; reading again from revision {self.next_revision}')

    def _probe_etcd(self) -> None:
        """Report that etcd is lost or back, or raise EcompError if its revision has decreased."""
        try:
            revision = self._store.read_revision()
        except EcompError as error:
            if not self._follow:
                raise
            if not self._is_lost:
                self._report(put_before_fix(str(error), '; trying again until it is back'))
            self._is_lost = True
            return
        if revision < self.next_revision - 1:
            behind = f'etcd at {self._store.endpoints} is at revision {revision}, but reported a later one before'
            raise EcompError(f'{behind}: it was restored or replaced. Try: the same command again')
        if self._is_lost:
            self._report('etcd is back')
        self._is_lost = False


class _StreamError(Exception):
    """The stream ended early."""


class _PastProgress:
    """Tracks whether a stream has delivered all changes up to `end_revision`.

    With `starts_at_known` the stream begins with a change that is known, and is not quiet before that has arrived.
    """

    # Silence proves nothing: etcd may be frozen. etcd shows its progress in two ways. Each is unreliable with some
    # versions, so both are required. First, an answer with changes of fewer than MAX_ANSWER_REVISIONS revisions is
    # complete up to the revision in its header. Every version so far does this, none promises it. Second, an answer to
    # WatchProgress promises that all is sent. Old versions ignore changes that are not sent yet. Without a change to
    # deliver there is only the second way: then several such answers have to arrive.
    def __init__(self, end_revision: int, starts_at_known: bool) -> None:
        self._end_revision = end_revision
        self._is_known_change_due = starts_at_known
        self._complete_revision = 0  # revision up to which the changes are complete
        self.progress_answers = 0  # answers to WatchProgress since the last change
        self._counted_at = float('-inf')
        self.answered_at = time.monotonic()  # when the last change or an answer about `end_revision` arrived
        self._revisions: set[int] = set()  # of an answer whose parts are still arriving

    @property
    def is_complete(self) -> bool:
        return self._complete_revision >= self._end_revision and self.progress_answers > 0

    @property
    def is_quiet(self) -> bool:
        """True if etcd answers, reports that it has sent all, and had time to send more."""
        return self.progress_answers >= REQUIRED_PROGRESS_ANSWERS and not self._is_known_change_due

    def record_reply(self, reply: Any, now_seconds: float) -> None:
        has_end = reply.header.revision >= self._end_revision  # a member that stays behind answers, too
        is_spaced = now_seconds >= self._counted_at + MIN_PROGRESS_SPACING_SECONDS
        if reply.events or has_end:
            self.answered_at = now_seconds
        if reply.events:
            self.progress_answers, self._is_known_change_due = 0, False
            self._revisions |= {_get_revision(event) for event in reply.events}
            if not reply.fragment:
                if len(self._revisions) < MAX_ANSWER_REVISIONS:
                    self._complete_revision = int(reply.header.revision)
                self._revisions = set()
        # After a freeze etcd answers all progress requests together, before anything else: they count as one answer.
        elif has_end and is_spaced and not (reply.created or reply.canceled):
            self.progress_answers += 1
            self._counted_at = now_seconds


def _get_revision(event: Any) -> int:
    return int(event.kv.mod_revision)


def _make_change(event: Any) -> Change:
    kv, deleted = event.kv, event.type == EVENT_DELETE
    is_new = not deleted and kv.create_revision == kv.mod_revision
    # For a missing prev_kv protobuf has an empty message.
    before = bytes(event.prev_kv.value) if event.prev_kv.mod_revision else None
    key = kv.key.decode(errors='replace')
    after = None if deleted else bytes(kv.value)
    return Change(key, before, after, int(kv.mod_revision), before is not None or is_new)
