"""A connection to libvirt that is opened when needed, and again when it broke; libvirt's errors are translated here.

A broken connection never heals, and a new one knows no callbacks. libvirt.org/html/libvirt-libvirt-host.html.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import cache

from ecomp.errors import EcompError, Unreachable, UsageError

try:
    import libvirt
except ImportError as error:
    raise UsageError(
        "libvirt-python is missing: pip install 'ecomp[hypervisor]' (it needs libvirt-dev, pkg-config and gcc)"
    ) from error

__all__ = ['Connection', 'libvirt', 'reason']

LOG = logging.getLogger(__name__)

# A dead daemon is seen after interval * (count + 1) seconds. Without this a call to a frozen one never returns.
KEEPALIVE_INTERVAL, KEEPALIVE_COUNT = 5, 3
OPEN_TIMEOUT = 20.0
REOPEN_FIRST, REOPEN_MOST = 0.2, 5.0

BROKEN_CODES = frozenset({libvirt.VIR_ERR_SYSTEM_ERROR, libvirt.VIR_ERR_INTERNAL_ERROR, libvirt.VIR_ERR_NO_CONNECT})
BROKEN_DOMAINS = frozenset({libvirt.VIR_FROM_REMOTE, libvirt.VIR_FROM_RPC})


def reason(error: libvirt.libvirtError) -> str:
    """libvirt's message as one line."""
    return ' '.join((error.get_error_message() or str(error)).split())


def is_broken(error: libvirt.libvirtError) -> bool:
    """Whether the error is the connection's own, not an answer."""
    return error.get_error_code() in BROKEN_CODES and error.get_error_domain() in BROKEN_DOMAINS


class Connection:
    """One process's connection to libvirt at `uri`, shared by its threads.

    Errors: Unreachable when it cannot be opened or breaks (the next use opens a new one).
    """

    def __init__(self, uri: str) -> None:
        self.uri = uri
        self._name = f'libvirt {uri}'
        self._lock = threading.Lock()
        self._open: libvirt.virConnect | None = None
        self._opening: Future[libvirt.virConnect] | None = None
        self._notify: Callable[[str], None] | None = None
        self._look: Callable[[str], None] | None = None
        self._registered: tuple[libvirt.virConnect, int, int | None] | None = None
        self._lost = threading.Event()
        self._closed = threading.Event()

    @contextmanager
    def use(self, doing: str) -> Iterator[libvirt.virConnect]:
        """The open connection, for a block that says what it is `doing`, as in 'listing domains'.

        What the block does not handle of libvirt's errors is raised as Unreachable or EcompError.
        """
        connection = self._get()
        try:
            yield connection
        except libvirt.libvirtError as error:
            if is_broken(error):
                self._drop(connection)
                raise Unreachable(f'{self._name} is gone while {doing}: {reason(error)}', self._name) from error
            raise EcompError(f'libvirt: {doing}: {reason(error)}') from error

    def watch(self, notify: Callable[[str], None], look: Callable[[str], None] | None = None) -> None:
        """From now on notify(reason) when a domain's state changes, or the connection is lost or back.

        look(reason) when a network was started: nothing of what was put on its bridge before is there.
        A lost connection is then opened again without anybody asking, as soon as libvirt answers.
        """
        first, self._notify, self._look = self._notify is None, notify, look
        with self.use('registering for events') as connection:
            self._register(connection)
        if first:
            threading.Thread(target=self._keep_open, name='libvirt-reopen', daemon=True).start()

    def close(self) -> None:
        self._closed.set()
        self._lost.set()
        with self._lock:
            connection, self._open = self._open, None
        if connection is not None:
            self._release(connection)
            with suppress(libvirt.libvirtError):
                connection.close()

    def _get(self) -> libvirt.virConnect:
        with self._lock:
            if self._closed.is_set():
                raise EcompError(f'libvirt {self.uri}: the connection was closed by us')
            # isAlive asks nobody: the event loop saw the socket close, or the keepalive fail.
            if self._open is not None and self._open.isAlive():
                return self._open
            if self._open is not None:
                self._release(self._open)
                self._open = None
            if self._opening is None:
                _run_event_loop()
                self._opening = Future()
                threading.Thread(target=self._connect, args=(self._opening,), name='libvirt-open', daemon=True).start()
            opening = self._opening
        # libvirt waits for a frozen daemon for ever: the thread is left to it, the next call waits for the same one.
        try:
            return opening.result(OPEN_TIMEOUT)
        except TimeoutError as error:
            raise Unreachable(f'{self._name} does not answer: is libvirtd overloaded?', self._name) from error
        except libvirt.libvirtError as error:
            raise Unreachable(f'{self._name}: {reason(error)} (is libvirtd running?)', self._name) from error

    def _connect(self, result: Future[libvirt.virConnect]) -> None:
        connection = None
        try:
            connection = libvirt.open(self.uri)
            connection.setKeepAlive(KEEPALIVE_INTERVAL, KEEPALIVE_COUNT)
            connection.registerCloseCallback(self._on_close, None)
            if self._notify is not None:
                self._register(connection)
        except Exception as error:
            # Whatever it is, it belongs to those who wait for the result.
            if connection is not None:
                self._release(connection)
                # Nobody else has it. Not left to the last reference: the error has one, and is in a circle with us.
                with suppress(libvirt.libvirtError):
                    connection.close()
            with self._lock:
                self._opening = None
            result.set_exception(error)
        else:
            with self._lock:
                self._open, self._opening = connection, None
            result.set_result(connection)

    def _drop(self, connection: libvirt.virConnect) -> None:
        with self._lock:
            if self._open is connection:
                self._open = None
        self._release(connection)
        self._lost.set()

    def _register(self, connection: libvirt.virConnect) -> None:
        # Asked by watch, and by the open that watch itself may have caused.
        if self._registered is None or self._registered[0] is not connection:
            lifecycle = libvirt.VIR_DOMAIN_EVENT_ID_LIFECYCLE
            number = connection.domainEventRegisterAny(None, lifecycle, self._on_lifecycle, None)
            self._registered = (connection, number, None)  # so that it is taken off, whatever comes
            self._registered = (connection, number, self._register_networks(connection))

    def _register_networks(self, connection: libvirt.virConnect) -> int | None:
        try:
            lifecycle = libvirt.VIR_NETWORK_EVENT_ID_LIFECYCLE
            return int(connection.networkEventRegisterAny(None, lifecycle, self._on_network, None))
        except libvirt.libvirtError as error:
            if is_broken(error):
                raise
            # Without their driver, on a host of bridges.
            LOG.debug('libvirt tells nothing of networks: %s', reason(error))
            return None

    def _release(self, connection: libvirt.virConnect) -> None:
        """Take our callbacks off: libvirt holds the connection, and its socket, as long as they are on.

        It is not closed here, for another thread may be in a call on it: the last reference does that.
        """
        with suppress(libvirt.libvirtError):
            connection.unregisterCloseCallback()
        if self._registered is not None and self._registered[0] is connection:
            (_, domains, networks), self._registered = self._registered, None
            with suppress(libvirt.libvirtError):
                connection.domainEventDeregisterAny(domains)
            with suppress(libvirt.libvirtError):
                if networks is not None:
                    connection.networkEventDeregisterAny(networks)

    # The callbacks run in the event loop's thread, where a call to libvirt could wait for itself.
    def _on_lifecycle(
        self, _connection: object, domain: libvirt.virDomain, event: int, detail: int, _opaque: object
    ) -> None:
        if self._notify is not None:
            self._notify(f'libvirt: domain {domain.name()}: event {event}.{detail}')

    def _on_network(
        self, _connection: object, network: libvirt.virNetwork, event: int, _detail: int, _opaque: object
    ) -> None:
        if self._look is not None and event == libvirt.VIR_NETWORK_EVENT_STARTED:
            self._look(f'libvirt: network {network.name()} was started')

    def _on_close(self, _connection: object, why: int, _opaque: object) -> None:
        self._lost.set()
        if self._notify is not None and not self._closed.is_set():
            self._notify(f'libvirt: connection lost (reason {why})')

    def _keep_open(self) -> None:
        while not self._closed.is_set():
            self._lost.wait()
            self._lost.clear()
            delay = REOPEN_FIRST
            while not self._closed.is_set():
                try:
                    self._get()
                except EcompError as error:
                    LOG.debug('%s', error)
                    self._closed.wait(delay)
                    delay = min(2 * delay, REOPEN_MOST)
                else:
                    if self._notify is not None:
                        # Events in the gap are gone: whoever listens must look at everything again.
                        self._notify('libvirt: connection is back')
                    break


@cache
def _run_event_loop() -> None:
    """Once for each process, before its first open; the loop runs as long as the process (libvirt cannot end one)."""
    # libvirt prints every error to stderr by itself; ours are raised.
    libvirt.registerErrorHandler(lambda _context, _error: None, None)
    libvirt.virEventRegisterDefaultImpl()

    def loop() -> None:
        while True:
            libvirt.virEventRunDefaultImpl()

    threading.Thread(target=loop, name='libvirt-events', daemon=True).start()
