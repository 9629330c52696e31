"""One connection to etcd, replaced by one to the next member if it fails, and long lists."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ecomp.conf import EtcdConfig
from ecomp.errors import Denied, EcompError, NoSpace, TooManyOperations, Unreachable, UsageError
from ecomp.store import messages

if TYPE_CHECKING:  # h2 is slow to load
    from ecomp.store.http2_client import EtcdMember

MAX_PAGE_KEYS = 500
# Keys of the smallest page: 10 of any size fit into an answer.
MIN_PAGE_KEYS = 10
# Maximum keys of a page without values. Long pages are cheaper: etcd counts all keys of the range for each page.
MAX_PAGE_KEYS_WITHOUT_VALUES = 5000
TARGET_PAGE_BYTES = 4 * 1024**2
# Seconds between two tries while etcd has no leader or its roles change; also the shortest timeout of a call.
MIN_INTERVAL_SECONDS = 0.2


class AnswerTooLong(EcompError):
    """etcd's answer is longer than the longest that is accepted."""


def read_pages(ask: Callable[[Any], Any], start: bytes, end: bytes, keys_only: bool) -> Iterator[Any]:
    """Yield the pages of the keys from `start` to before `end`, one or more, at one revision."""
    sizes = (MAX_PAGE_KEYS, MAX_PAGE_KEYS_WITHOUT_VALUES) if keys_only else (MIN_PAGE_KEYS, MAX_PAGE_KEYS)
    (limit, max_limit), revision = sizes, 0
    while True:
        try:
            reply = ask(messages.Range(start, end, limit, revision, keys_only))
        except AnswerTooLong:
            if limit == MIN_PAGE_KEYS:
                raise
            limit = MIN_PAGE_KEYS
            continue
        yield reply
        if not reply.more:
            return
        revision, start = revision or reply.header.revision, reply.kvs[-1].key + b'\0'
        # The first page has few keys, the next ones more while they are small: a value may have 1.5 MiB (etcd's
        # --max-request-bytes), and etcd limits a page by its number of keys alone.
        size = sum(len(kv.key) + len(kv.value) for kv in reply.kvs)
        limit = max(min(limit * 4, limit * TARGET_PAGE_BYTES // max(size, 1), max_limit), MIN_PAGE_KEYS)


class Connection:
    """One process's connection to etcd, which moves on to the next endpoint if one fails."""

    def __init__(self, config: EtcdConfig) -> None:
        self.endpoints = ','.join(config.endpoints)
        self.config = config
        self._lock = threading.Lock()
        self._endpoint_index = 0
        # Connections that are still being made, by the index of their endpoint.
        self._pending: dict[int, EtcdMember] = {}
        self._is_closed = False
        self._connected_at = time.monotonic()
        # The certificate that prevents a new connection, and its error.
        self._certificate_error = ''
        try:
            self.client = self._connect()
        except OSError as error:
            raise UsageError(f'etcd {_describe_certificate_error(error)}') from error

    def ask(self, request: messages.Request, no_answer_error: type[Unreachable], about: Sequence[str] = ()) -> Any:
        """Return the answer of the first endpoint that gives one, within the config's timeout.

        If the request did not arrive, Unreachable is raised. If it may have arrived, `no_answer_error` is raised.
        A request that may have arrived is repeated only if that error is Unreachable. `about` has its keys, for errors.
        """
        deadline = time.monotonic() + self.config.timeout
        has_others = len(self.config.endpoints) > 1
        repeatable = no_answer_error is Unreachable
        # One try more than endpoints: a closed connection may be noticed only when it is used.
        remaining_tries = len(self.config.endpoints) + 1
        while True:
            client, remaining_tries = self.client, remaining_tries - 1
            # A member that hangs must leave time for the others; a request to a dying leader is lost without an error.
            time_share = self.config.timeout / 2 if has_others else self.config.timeout
            try:
                answer = client.call(request, max(min(time_share, deadline - time.monotonic()), MIN_INTERVAL_SECONDS))
                self._pending.clear()
                return answer
            except messages.CallFailure as error:
                is_pending = has_others and error.details == messages.CONNECTING
                # A single endpoint that connects slowly gets two timeouts before the connection is begun again.
                is_young = time.monotonic() - self._connected_at < 2 * self.config.timeout
                if has_others or not is_young or error.code != messages.DEADLINE_EXCEEDED:
                    self.reconnect(client, is_pending)
                is_late = time.monotonic() > deadline - MIN_INTERVAL_SECONDS
                if messages.is_transient(error) and not is_late:
                    # One more round: others may be electing too, and a member that saw the dead leader's end refuses.
                    remaining_tries = max(remaining_tries, len(self.config.endpoints))
                    time.sleep(MIN_INTERVAL_SECONDS)
                elif is_pending and not is_late:
                    remaining_tries += 1  # in turn, until one of the connections is made
                elif remaining_tries <= 0 or is_late or not messages.can_retry_elsewhere(error, repeatable):
                    error_type = no_answer_error if not messages.is_unsent(error) else Unreachable
                    raise self._translate_error(error, error_type, about, repeatable) from error

    def reconnect(self, failed_member: EtcdMember | None = None, is_pending: bool = False) -> None:
        """Connect to the next endpoint without an error, unless `failed_member` is replaced already.

        If `is_pending`, the failed one is still being connected, and is kept until it is its endpoint's turn again.
        """
        with self._lock:
            if self._is_closed or (failed_member is not None and failed_member is not self.client):
                return
            if is_pending:
                self._pending[self._endpoint_index] = self.client
            self._endpoint_index = (self._endpoint_index + 1) % len(self.config.endpoints)
            # The old connection is not closed: other threads may be using it. It closes when the last one drops it.
            self._connected_at = time.monotonic()
            # Certificates may be missing or empty while they are exchanged, and there may be no thread left to start.
            # Then the old connection stays, and later errors name the reason.
            with contextlib.suppress(RuntimeError):
                try:
                    self.client, self._certificate_error = self._connect(), ''
                except OSError as error:
                    self._certificate_error = _describe_certificate_error(error)

    def close(self) -> None:
        """Close the connection for good, so that reconnect() does nothing."""
        with self._lock:
            self._is_closed = True
            self._pending.clear()
            self.client.close()

    def _connect(self) -> EtcdMember:
        from ecomp.store.http2_client import EtcdMember  # late, because h2 is slow to load

        pending = self._pending.pop(self._endpoint_index, None)
        return pending or EtcdMember(self.config, self.config.endpoints[self._endpoint_index])

    def _translate_error(
        self, error: messages.CallFailure, no_answer_error: type[Unreachable], about: Sequence[str], is_read: bool
    ) -> EcompError:
        name = f'etcd at {self.endpoints}'
        if messages.is_full(error):
            cure = 'compact and defragment etcd, and disarm its alarm'
            return NoSpace(f'{name} accepts no writes ({error.details}). Fix: {cure}')
        if messages.is_too_long(error) and no_answer_error is Unreachable:
            return AnswerTooLong(f'{name}: {error.details}')
        if messages.is_denied(error):
            certificate = str(self.config.cert_cert or '')
            return Denied(f'{name} does not let {messages.describe_denial(certificate, about, is_read)}')
        if error.details == messages.TOO_MANY_OPERATIONS:
            cure = 'start etcd with --max-txn-ops=2048, or change fewer instances at a time'
            return TooManyOperations(f'{name} refuses: {error.details}. Fix: {cure}')
        if messages.is_refusal(error) and not messages.is_too_long(error):
            return EcompError(f'{name} refuses: {error.details}{messages.suggest_remedy(error)}')
        if (why := self._certificate_error) and messages.is_unsent(error) and not messages.is_transient(error):
            # With a `backend` of its own: else a caller that has logged the loss of etcd would not log this reason.
            return no_answer_error(f'{name} cannot be reached: {why}', f'{name} ({why})')
        why = 'no answer in time' if error.code == messages.DEADLINE_EXCEEDED else error.details
        return no_answer_error(f'{name} cannot be reached: {why}', name, error.tls_failure)


def _describe_certificate_error(error: OSError) -> str:
    return f'certificate {error.filename}: {error.strerror}'
