"""One connection to etcd: to one of its members, and after any failure to the next; a long list comes in pages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ecomp.conf import EtcdConfig
from ecomp.errors import Denied, EcompError, NoSpace, Unreachable, UsageError
from ecomp.store.messages import (
    DEADLINE_EXCEEDED,
    CallFailure,
    Range,
    Request,
    advice,
    denied,
    is_denied,
    is_full,
    is_passing,
    is_refusal,
    is_too_long,
    may_work_elsewhere,
    was_not_sent,
)

if TYPE_CHECKING:  # h2 is slow to load
    from ecomp.store.by_h2 import Member

MOST, FEWEST = 500, 10
"""Keys of a page. FEWEST fit into a message, whatever they are."""
MOST_NAMES = 5000
"""Keys of a page that has no values. etcd counts all keys of the range at each page, however few it is to tell."""
EASY = 4 * 1024**2
"""Bytes of a page that is not meant to be longer."""


class TooLong(EcompError):
    """What etcd answers is longer than the longest message that is taken."""


def pages(ask: Callable[[Any], Any], start: bytes, end: bytes, keys_only: bool) -> Iterator[Any]:
    """Each page of what is from `start` to `end`, all at one revision. Errors: those of `ask`.

    The first is of few keys, then they are of more as long as they are small: etcd takes 1.5 MiB for each key (its
    --max-request-bytes), and limits a page by the number of its keys alone.
    """
    limit, most, revision = (MOST, MOST_NAMES, 0) if keys_only else (FEWEST, MOST, 0)
    while True:
        try:
            reply = ask(Range(start, end, limit, revision, keys_only))
        except TooLong:
            if limit == FEWEST:
                raise
            limit = FEWEST
            continue
        yield reply
        if not reply.more:
            return
        revision, start = revision or reply.header.revision, reply.kvs[-1].key + b'\0'
        size = sum(len(kv.key) + len(kv.value) for kv in reply.kvs)
        limit = max(min(limit * 4, limit * EASY // max(size, 1), most), FEWEST)


Answer = TypeVar('Answer')

SHORTEST = 0.2
"""Seconds between two tries while etcd takes nothing for a moment, and the least a call is given."""


class Connection:
    """One process's connection to etcd: to one of the endpoints, and after any failure to the next, over a new one.

    So each member is met under its own name, for certificates are made out to that, and those on disk are read again.
    """

    def __init__(self, config: EtcdConfig, open_member: Callable[[EtcdConfig, str], Any] | None = None) -> None:
        """`open_member` begins a connection to an endpoint; None: that of by_h2."""
        self._open_member = open_member
        self.where = ','.join(config.endpoints)
        self.config = config
        self._lock = threading.Lock()
        self._next = 0
        self._closed = False
        self._since = time.monotonic()
        self._unreadable = ''
        """The certificate for want of which there is no new connection, and what is wrong with it."""
        try:
            self.client = self._connect()
        except OSError as error:
            raise UsageError(f'etcd {_certificate(error)}') from error

    def ask(
        self, ask: Callable[[Member, float], Answer], unanswered: type[Unreachable], about: Sequence[str] = ()
    ) -> Answer:
        """What one endpoint answers within the time limit, of the keys `about`; `unanswered` if none does.

        Only where that is Unreachable is `ask` called again after it may have arrived.
        """
        deadline = time.monotonic() + self.config.timeout
        several = len(self.config.endpoints) > 1
        repeatable = unanswered is Unreachable
        # Once more also with one endpoint: that a connection has ended may show only when it is used.
        left = len(self.config.endpoints) + 1
        while True:
            client, left = self.client, left - 1
            # A member that hangs is not to use up the time of those that do not; and what is sent to a leader that
            # dies is lost without a word.
            share = self.config.timeout / 2 if several else self.config.timeout
            try:
                return ask(client, max(min(share, deadline - time.monotonic()), SHORTEST))
            except CallFailure as error:
                # A connection that is being made slowly is not begun anew for ever, unless there are others to try.
                young = time.monotonic() - self._since < 2 * self.config.timeout
                if several or not young or error.code != DEADLINE_EXCEEDED:
                    self.move_on(client)
                late = time.monotonic() > deadline - SHORTEST
                if is_passing(error) and not late:
                    # A round more: the others may be electing, too, and the one whose end they have seen refuses.
                    left = max(left, len(self.config.endpoints))
                    time.sleep(SHORTEST)
                elif left <= 0 or late or not may_work_elsewhere(error, repeatable):
                    sent = unanswered if not was_not_sent(error) else Unreachable
                    raise self.translated(error, sent, about, repeatable) from error

    def ask_once(self, request: Request) -> Any:
        """What the present member answers or, where that hung up before it was asked or has no vote, the next one.

        CallFailure, and then it is left for the one after.
        """
        client = self.client
        try:
            return client.call(request, self.config.timeout)
        except CallFailure as error:
            self.move_on(client)
            if error.code == DEADLINE_EXCEEDED or not was_not_sent(error):
                raise
        client = self.client
        try:
            return client.call(request, self.config.timeout)
        except CallFailure:
            self.move_on(client)
            raise

    def move_on(self, failed: Member | None = None) -> None:
        """Use a new connection, to the next endpoint, in place of the present one (of `failed`, if it still is)."""
        with self._lock:
            if self._closed or (failed is not None and failed is not self.client):
                return
            self._next = (self._next + 1) % len(self.config.endpoints)
            # The old one is not closed: others may be using it, and it goes when they let go of it.
            self._since = time.monotonic()
            # Certificates may be missing, or empty, while they are exchanged; there may be as many threads as may be.
            with contextlib.suppress(RuntimeError):
                try:
                    self.client, self._unreadable = self._connect(), ''
                except OSError as error:
                    self._unreadable = _certificate(error)

    def close(self) -> None:
        """Let the connection go."""
        with self._lock:
            self._closed = True
            self.client.close()

    def _connect(self) -> Any:
        """Begin a connection to the endpoint whose turn it is. OSError for a certificate that cannot be read."""
        from ecomp.store.by_h2 import Member  # late, because h2 is slow to load

        return (self._open_member or Member)(self.config, self.config.endpoints[self._next])

    def translated(
        self, error: CallFailure, unanswered: type[Unreachable], about: Sequence[str] = (), read: bool = False
    ) -> EcompError:
        """What a failure means, in our words; `unanswered` is it where no answer came."""
        name = f'etcd at {self.where}'
        if is_full(error):
            cure = 'compact and defragment it, and disarm its alarm'
            return NoSpace(f'{name} takes no writes ({error.details}): {cure}')
        if is_too_long(error) and unanswered is Unreachable:
            return TooLong(f'{name}: {error.details}')
        if is_denied(error):
            who = str(self.config.cert_cert or '')
            return Denied(f'{name} does not let {denied(who, about, read)}')
        if is_refusal(error) and not is_too_long(error):
            return EcompError(f'{name} refuses: {error.details}{advice(error)}')
        if self._unreadable and was_not_sent(error) and not is_passing(error):
            # A loss of its own: who has logged that etcd is away would never say what it is now.
            return unanswered(f'{name} cannot be reached: {self._unreadable}', f'{name} ({self._unreadable})')
        why = 'no answer in time' if error.code == DEADLINE_EXCEEDED else error.details
        return unanswered(f'{name} cannot be reached: {why}', name)


def _certificate(error: OSError) -> str:
    return f'certificate {error.filename}: {error.strerror}'
