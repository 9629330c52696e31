"""The way to etcd: to one of its members, to the next after any failure, and what gRPC is told for it."""

from __future__ import annotations

import contextlib
import errno
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import etcd3
import grpc
from google.protobuf.internal import api_implementation

from ecomp.conf import EtcdConfig
from ecomp.errors import Denied, EcompError, NoSpace, Unreachable, UsageError
from ecomp.store import reasons
from ecomp.store.pages import TooLong

# A frozen peer is noticed in 10 s only with all four; etcd itself cuts clients that ping faster.
KEEPALIVE = (
    ('grpc.keepalive_time_ms', 10_000),
    ('grpc.keepalive_timeout_ms', 5_000),
    ('grpc.http2.ping_timeout_ms', 5_000),
    ('grpc.http2.max_pings_without_data', 0),
    # A page or a watch is no longer: see ecomp.store.pages.
    ('grpc.max_receive_message_length', 64 * 1024**2),
    # http_proxy is for the way out of the building; etcd is in it.
    ('grpc.enable_http_proxy', 0),
    ('grpc.initial_reconnect_backoff_ms', 200),
    # How long a connection may take to be made: a call's own time limit is to end it, not this.
    ('grpc.min_reconnect_backoff_ms', 10_000),
    ('grpc.max_reconnect_backoff_ms', 3_000),
)

SHORTEST = 0.2
"""Seconds between two tries while etcd takes nothing for a moment, and the least a call is given."""

PUBLIC = Path('the authorities that gRPC knows')
"""In place of ca_cert where there is none: etcd3 speaks in clear text to an etcd without one, certificates or not."""


class Client(etcd3.Etcd3Client):  # type: ignore[misc]
    """etcd3's, but an OSError for a certificate or key that is empty: gRPC ends the whole process over one."""

    def _get_secure_creds(self, ca_cert: Path, cert_key: Path | None = None, cert_cert: Path | None = None) -> Any:
        given = (None if ca_cert is PUBLIC else ca_cert, cert_key, cert_cert)
        files = [None if each is None else (each, each.read_bytes()) for each in given]
        for each in files:
            if each is not None and not each[1]:
                raise OSError(errno.ENODATA, 'is empty', str(each[0]))
        return grpc.ssl_channel_credentials(*(each and each[1] for each in files))


class Connection:
    """One process's connection to etcd: to one of the endpoints, and after any failure to the next, over a new one.

    So each member is met under its own name, for certificates are made out to that, and those on disk are read again.
    """

    def __init__(self, config: EtcdConfig) -> None:
        if api_implementation.Type() != 'python':
            raise UsageError(
                'etcd3 needs PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=python, and it is set to '
                f'{api_implementation.Type()!r}: unset it'
            )
        self.where = ','.join(config.endpoints)
        self.config = config
        self._lock = threading.Lock()
        self._next = 0
        self._closed = False
        self._since = time.monotonic()
        try:
            self.client = self._connected()
        except OSError as error:
            raise UsageError(f'etcd certificate {error.filename}: {error.strerror}') from error

    def ask(self, ask: Callable[[Any, float], Any], unanswered: type[Unreachable], about: Sequence[str] = ()) -> Any:
        """What one endpoint answers within the time limit, of the keys `about`; `unanswered` if none does.

        Only where that is Unreachable is `ask` called again after it may have arrived.
        """
        deadline = time.monotonic() + self.config.timeout
        several = len(self.config.endpoints) > 1
        repeatable = unanswered is Unreachable
        # Once more also with one endpoint: just after a cut gRPC hands one call in five to the connection that broke.
        left = len(self.config.endpoints) + 1
        while True:
            client, left = self.client, left - 1
            # A member that hangs is not to use up the time of those that do not; and what is sent to a leader that
            # dies is lost without a word.
            share = self.config.timeout / 2 if several else self.config.timeout
            try:
                return ask(client, max(min(share, deadline - time.monotonic()), SHORTEST))
            except grpc.RpcError as error:
                # A connection that is being made slowly is not begun anew for ever, unless there are others to try.
                young = time.monotonic() - self._since < 2 * self.config.timeout
                if several or not young or error.code() != grpc.StatusCode.DEADLINE_EXCEEDED:
                    self.move_on(client)
                late = time.monotonic() > deadline - SHORTEST
                if reasons.is_passing(error) and not late:
                    left = max(left, 1)
                    time.sleep(SHORTEST)
                elif left <= 0 or late or not reasons.may_work_elsewhere(error, repeatable):
                    sent = unanswered if not reasons.was_not_sent(error) else Unreachable
                    raise self.translated(error, sent, about, repeatable) from error

    def move_on(self, failed: Any = None) -> None:
        """Use a new connection, to the next endpoint, in place of the present one (of `failed`, if it still is)."""
        with self._lock:
            if self._closed or (failed is not None and failed is not self.client):
                return
            self._next = (self._next + 1) % len(self.config.endpoints)
            # The old one is not closed: others may be using it, and it goes when they let go of it.
            self._since = time.monotonic()
            with contextlib.suppress(OSError):  # certificates may be missing, or empty, while they are exchanged
                self.client = self._connected()

    def close(self) -> None:
        """Let the connection go."""
        with self._lock:
            self._closed = True
            # Not etcd3's close(): it ends the watcher thread, and we never start one.
            self.client.channel.close()

    def _connected(self) -> Client:
        """OSError for a certificate that cannot be read."""
        config, (host, _, port) = self.config, self.config.endpoints[self._next].rpartition(':')
        return Client(
            host=host,
            port=port,
            ca_cert=config.ca_cert or (PUBLIC if config.cert_cert else None),
            cert_key=config.cert_key,
            cert_cert=config.cert_cert,
            timeout=config.timeout,
            grpc_options=[*KEEPALIVE, *config.grpc_options],
        )

    def translated(
        self, error: grpc.RpcError, unanswered: type[Unreachable], about: Sequence[str] = (), read: bool = False
    ) -> EcompError:
        """What a failure means, in our words; `unanswered` is it where no answer came."""
        name = f'etcd at {self.where}'
        if reasons.is_full(error):
            cure = 'compact and defragment it, and disarm its alarm'
            return NoSpace(f'{name} takes no writes ({reasons.details(error)}): {cure}')
        if reasons.is_too_long(error):
            return TooLong(f'{name}: {reasons.details(error)}')
        if reasons.is_denied(error):
            return Denied(f'{name} does not let {reasons.denied(self.config.cert_cert, about, read)}')
        if reasons.is_refusal(error):
            return EcompError(f'{name} refuses: {reasons.details(error)}')
        secure = self.config.ca_cert is not None or self.config.cert_cert is not None
        return unanswered(f'{name} cannot be reached: {reasons.why(error, secure)}', name)
