"""A libvirt connection that opens on demand, reopens after a failure, and translates errors."""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache

from ecomp.errors import BuildFailed, EcompError, Unreachable, UsageError
from ecomp.model.backoff import Backoff

try:
    import libvirt
except ImportError as error:
    raise UsageError(
        'libvirt-python is missing. Fix: install libvirt-dev, pkg-config and gcc, then run '
        f"`{sys.executable} -m pip install '.[hypervisor]'` in a clone of ecomp"
    ) from error

__all__ = ['Connection', 'libvirt', 'describe_error']

log = logging.getLogger(__name__)

# Seconds between probes, and how many may go unanswered: a libvirtd that is silent for interval * (count + 1) is
# considered dead. Without keepalive a call to a frozen one would never return.
KEEPALIVE_INTERVAL = 5
KEEPALIVE_COUNT = 3
# Seconds without an answer after which libvirtd is Unreachable. The last ones of a lost connection count.
OPEN_TIMEOUT = 20.0
# Seconds for which each call waits at least: libvirtd may answer again.
MIN_OPEN_TIMEOUT = 1.0
# Seconds between two attempts to reopen a lost connection. The delay doubles from the first to the second value.
MIN_REOPEN_DELAY_SECONDS = 0.2
MAX_REOPEN_DELAY_SECONDS = 5.0

BROKEN_CODES = frozenset({libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_ERR_NO_CONNECT})
BROKEN_DOMAINS = frozenset({libvirt.VIR_FROM_REMOTE, libvirt.VIR_FROM_RPC})


def describe_error(error: libvirt.libvirtError) -> str:
    return ' '.join((error.get_error_message() or str(error)).split())


def is_broken(error: libvirt.libvirtError) -> bool:
    """Return whether the connection broke, rather than libvirtd answered with an error."""
    return error.get_error_code() in BROKEN_CODES and error.get_error_domain() in BROKEN_DOMAINS


class IgnoredErrors:
    """Suppresses libvirt errors with one of these codes, unless the connection broke."""

    def __init__(self, *codes: int) -> None:
        self._codes = codes

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        code = error.get_error_code() if isinstance(error, libvirt.libvirtError) and not is_broken(error) else None
        return code in self._codes


@contextmanager
def raise_build_failed(stage: str, prefix: str = '') -> Iterator[None]:
    """Raise libvirt's errors as BuildFailed, unless the connection broke."""
    try:
        yield
    except libvirt.libvirtError as error:
        if is_broken(error):
            raise
        raise BuildFailed(stage, prefix + describe_error(error)) from error


class Connection:
    """One process's connection to libvirt at `uri`, shared by its threads."""

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._name = f'libvirt {uri}'
        self._lock = threading.Lock()
        self._current: libvirt.virConnect | None = None
        self._pending: Future[libvirt.virConnect] | None = None
        # Since when (monotonic) libvirtd has not answered, if a connection was lost by that or is being opened.
        self._silent_since = math.inf
        self._notify: Callable[[str], None] | None = None
        self._on_network_change: Callable[[str], None] | None = None
        self._registration: tuple[libvirt.virConnect, int, int | None] | None = None
        self._lost = threading.Event()
        self._closed = threading.Event()

    @contextmanager
    def use(self, activity: str) -> Iterator[libvirt.virConnect]:
        """Yield the open connection, for an activity such as 'listing domains'.

        Raises:
            Unreachable: the connection cannot be opened within OPEN_TIMEOUT seconds, or breaks in the block.
            EcompError: libvirt reports another error in the block, or close() was called.
        """
        connection = self._get_connection()
        try:
            yield connection
        except libvirt.libvirtError as error:
            if is_broken(error):
                self._discard(connection)
                message = f'{self._name}: the connection broke while {activity}: {describe_error(error)}'
                raise Unreachable(message, self._name) from error
            raise EcompError(f'libvirt failed while {activity}: {describe_error(error)}') from error

    def watch(self, notify: Callable[[str], None], on_network_change: Callable[[str], None] | None = None) -> None:
        """Call notify(reason) at each change of a domain or the connection. Raise if it is down now.

        Both callbacks run in threads of this module and must not call libvirt. A later watch() replaces them.
        From the first watch() on, a lost connection is reopened as soon as libvirtd answers.
        """
        is_first, self._notify, self._on_network_change = self._notify is None, notify, on_network_change
        with self.use('registering for events') as connection:
            self._register_callbacks(connection)
        if is_first:
            threading.Thread(target=self._keep_open, name='libvirt-reopen', daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._lost.set()
        with self._lock:
            connection, self._current = self._current, None
        if connection is not None:
            self._remove_callbacks(connection)
            with suppress(libvirt.libvirtError):
                connection.close()

    def _get_connection(self, timeout: float | None = None) -> libvirt.virConnect:
        with self._lock:
            if self._closed.is_set():
                raise EcompError(f'{self._name}: this process has closed the connection')
            # A broken connection never recovers: libvirt.org/html/libvirt-libvirt-host.html
            # isAlive() sends nothing: the event loop has noticed a closed socket or a failed keepalive.
            if self._current is not None and self._current.isAlive():
                return self._current
            if self._current is not None:
                self._remove_callbacks(self._current)
                self._current = None
            opening = self._pending or self._begin_opening()
            wait = max(self._silent_since + OPEN_TIMEOUT - time.monotonic(), MIN_OPEN_TIMEOUT)
        # libvirt waits forever for a frozen daemon. The opening thread stays blocked; later calls fail soon.
        try:
            return opening.result(wait if timeout is None else timeout)
        except TimeoutError as error:
            raise Unreachable(f'{self._name} does not answer within {OPEN_TIMEOUT:g} s', self._name) from error
        except libvirt.libvirtError as error:
            message = f'{self._name}: {describe_error(error)} (libvirtd may not be running)'
            raise Unreachable(message, self._name) from error

    def _begin_opening(self) -> Future[libvirt.virConnect]:
        # The caller holds the lock.
        opening: Future[libvirt.virConnect] = Future()
        now = time.monotonic()
        # A silence of long ago, when nothing used the connection, may have ended since.
        if not now - 2 * OPEN_TIMEOUT < self._silent_since < now:
            self._silent_since = now
        try:
            _start_event_loop()
            threading.Thread(target=self._connect, args=(opening,), name='libvirt-open', daemon=True).start()
        except RuntimeError as error:
            raise Unreachable(f'{self._name}: cannot start a thread to connect: {error}', self._name) from error
        self._pending = opening
        return opening

    def _connect(self, result: Future[libvirt.virConnect]) -> None:
        connection = None
        try:
            connection = libvirt.open(self.uri)
            connection.setKeepAlive(KEEPALIVE_INTERVAL, KEEPALIVE_COUNT)
            connection.registerCloseCallback(self._on_close, None)
            if self._notify is not None:
                self._register_callbacks(connection)
        except Exception as error:
            if connection is not None:
                self._remove_callbacks(connection)
                # Close it here: the exception references it and forms a cycle with this frame, so it would stay open.
                with suppress(libvirt.libvirtError):
                    connection.close()
            with self._lock:
                self._pending, self._silent_since = None, math.inf
            result.set_exception(error)
        else:
            with self._lock:
                self._current, self._pending, self._silent_since = connection, None, math.inf
            result.set_result(connection)

    def _discard(self, connection: libvirt.virConnect) -> None:
        with self._lock:
            if self._current is connection:
                self._current = None
        self._remove_callbacks(connection)
        self._lost.set()

    def _register_callbacks(self, connection: libvirt.virConnect) -> None:
        # Called by watch(), and by the opening that watch() may have caused.
        if self._registration is None or self._registration[0] is not connection:
            lifecycle = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
            number = connection.domainEventRegisterAny(None, lifecycle, self._on_lifecycle, None)
            self._registration = (connection, number, None)  # so that it is removed even if the next line raises
            self._registration = (connection, number, self._register_network_callback(connection))

    def _register_network_callback(self, connection: libvirt.virConnect) -> int | None:
        try:
            lifecycle = libvirt.VIR_NETWORK_EVENT_ID_LIFECYCLE
            return int(connection.networkEventRegisterAny(None, lifecycle, self._on_network, None))
        except libvirt.libvirtError as error:
            if is_broken(error):
                raise
            # A host that only uses bridges may lack libvirt's network driver.
            log.debug('libvirt reports no changes of networks: %s', describe_error(error))
            return None

    def _remove_callbacks(self, connection: libvirt.virConnect) -> None:
        # Our callbacks would keep the socket open.
        # Not closed here: another thread may be in a call on it. Its last reference closes it.
        with suppress(libvirt.libvirtError):
            connection.unregisterCloseCallback()
        if self._registration is not None and self._registration[0] is connection:
            (_, domains, networks), self._registration = self._registration, None
            with suppress(libvirt.libvirtError):
                connection.domainEventDeregisterAny(domains)
            with suppress(libvirt.libvirtError):
                if networks is not None:
                    connection.networkEventDeregisterAny(networks)

    # The callbacks run in the event loop's thread, where a call to libvirt could deadlock.
    def _on_lifecycle(self, _: object, domain: libvirt.virDomain, event: int, detail: int, *_rest: object) -> None:
        if self._notify is not None:
            self._notify(f'libvirt: domain {domain.name()}: event {event}.{detail}')

    def _on_network(self, _: object, network: libvirt.virNetwork, event: int, *_rest: object) -> None:
        changes = libvirt.VIR_NETWORK_EVENT_STARTED, libvirt.VIR_NETWORK_EVENT_STOPPED
        if self._on_network_change is not None and event in changes:
            self._on_network_change(f'libvirt: network {network.name()} was started or stopped')

    def _on_close(self, _connection: object, reason_code: int, _opaque: object) -> None:
        if reason_code == libvirt.VIR_CONNECT_CLOSE_REASON_KEEPALIVE:
            self._silent_since = time.monotonic() - KEEPALIVE_INTERVAL * (KEEPALIVE_COUNT + 1)
        self._lost.set()
        if self._notify is not None and not self._closed.is_set():
            self._notify(f'libvirt: connection lost (reason {reason_code})')

    def _keep_open(self) -> None:
        while not self._closed.is_set():
            self._lost.wait()
            self._lost.clear()
            backoff = Backoff(MIN_REOPEN_DELAY_SECONDS, MAX_REOPEN_DELAY_SECONDS)
            while not self._closed.is_set():
                try:
                    self._get_connection(OPEN_TIMEOUT)
                except EcompError as error:
                    log.debug('%s', error)
                    self._closed.wait(backoff.next())
                else:
                    if self._notify is not None:
                        # Events during the gap are lost, so the listener has to check everything again.
                        self._notify('libvirt: connection is back')
                    break


@cache
def _start_event_loop() -> None:
    # By default libvirt prints every error to stderr; we raise them.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=loop, name='libvirt-events', daemon=True).start()
