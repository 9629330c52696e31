"""The connections that images come over: each name is resolved once, its addresses are checked, and one of these is
connected to; and all of them can be shut by another thread, whatever waits on them.

urllib3 makes a connection in `_new_conn`, for http and https alike: TLS, with the name in SNI and against the
certificate, and HTTP are above it. A check before the request would be of another answer of the name server.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.adapters import HTTPAdapter
from requests.utils import default_headers
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError
from urllib3.util.connection import create_connection

from ecomp.addresses import addresses, is_own
from ecomp.agent.images.reach import Reach, port_of
from ecomp.model.image_sources import Address, all_of, why_not, why_not_name

CONTROL = 'etcd or placement'


class Refused(Exception):
    """No image is fetched from `where`, an address or a host, which is `what`."""

    def __init__(self, where: str, what: str) -> None:
        super().__init__(where, what)
        self.where = where
        self.what = what


class Connections:
    """All connections to the server of one image. After stop() none is opened."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        # An adapter alone: a session merges the settings of all its requests into each, which is half of what asking
        # costs, follows redirects, and would take a proxy and ~/.netrc from the environment: the one resolves names
        # unchecked, the other is root's own. Only its certificate authorities are taken.
        self._adapter: _Adapter | None = None
        self._verify = os.environ.get('REQUESTS_CA_BUNDLE') or os.environ.get('CURL_CA_BUNDLE') or True
        self._proxies = {} if reach.proxy is None else {'http': reach.proxy, 'https': reach.proxy}
        self._lock = threading.Lock()
        self._stopped = False
        self._open: list[socket.socket] = []

    def get(self, url: str, timeout: tuple[float, float], headers: Mapping[str, str]) -> requests.Response:
        """The answer to a GET, its body not read, redirects not followed. Refused, RequestException."""
        parts = urlsplit(url)
        if self._reach.proxy is not None:
            self._check_for_proxy(parts.hostname or '', port_of(parts))
        request = requests.Request('GET', url, {**default_headers(), **headers}).prepare()
        # Made here, where a thread of its own waits for the server: its asker is at work meanwhile.
        self._adapter = self._adapter or _Adapter(self)
        return self._adapter.send(request, stream=True, timeout=timeout, verify=self._verify, proxies=self._proxies)

    def stop(self) -> None:
        """End every wait for an answer, a byte or a handshake soon, and open nothing more; for another thread."""
        with self._lock:
            self._stopped = True
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection."""
        self.stop()
        if self._adapter is not None:
            self._adapter.close()
        with self._lock:
            for each in self._open:
                each.close()
            self._open.clear()

    def opened(self, connection: HTTPConnection) -> socket.socket:
        """A socket connected to the first address of the connection's host that answers. Refused, HTTPError."""
        host, port = connection.host.strip('[]'), connection.port
        failure: Exception = NewConnectionError(connection, 'nobody waits for it any more')
        for address in self._resolved(connection, host, port):
            if self._stopped:
                break
            try:
                made = create_connection(
                    (str(address), port), connection.timeout, socket_options=connection.socket_options
                )
            except TimeoutError:
                failure = ConnectTimeoutError(connection, f'{address} gives no answer')
            except OSError as error:
                failure = NewConnectionError(connection, f'{address}: {error}')
                failure.__cause__ = error
            else:
                return self._noted(connection, made)
        raise failure

    def _resolved(self, connection: HTTPConnection, host: str, port: int) -> list[Address]:
        try:
            found = addresses(host)
        except socket.gaierror as error:
            raise NameResolutionError(host, connection, error) from error
        except (OSError, ValueError) as error:
            raise NewConnectionError(connection, f'{type(error).__name__}') from error
        if self._reach.proxy is None:
            for address in found:
                self._check(host, port, address)
        return found

    def _check(self, host: str, port: int, address: Address) -> None:
        what = why_not(host, address, self._reach.sources)
        if what is None and self._is_control(port, address):
            what = CONTROL
        if what is not None:
            raise Refused(f'{host} is {address}', what)

    def _is_control(self, port: int, address: Address) -> bool:
        ours = set(all_of(address))
        for host, theirs in self._reach.control:
            if theirs == port:
                with suppress(OSError, ValueError):  # what has no address now is not reached by its address
                    found = {each for address in addresses(host) for each in all_of(address)}
                    here = any(each.is_loopback for each in found)
                    if ours & found or (here and any(map(is_own, ours))):
                        return True
        return False

    def _check_for_proxy(self, host: str, port: int) -> None:
        """Refused for a host that may not be asked, as far as its text says: the proxy resolves the name."""
        try:
            there = addresses(host, socket.AI_NUMERICHOST)
        except (OSError, ValueError):
            what = why_not_name(host, self._reach.sources)
            if what is None and (host.lower().rstrip('.'), port) in self._reach.control:
                what = CONTROL
            if what is not None:
                raise Refused(host, what) from None
        else:
            for address in there:
                self._check(host, port, address)

    def _noted(self, connection: HTTPConnection, made: socket.socket) -> socket.socket:
        # A duplicate: TLS takes the socket itself away, and in the middle of a handshake there is no other yet.
        with self._lock:
            if self._stopped:
                made.close()
                raise NewConnectionError(connection, 'nobody waits for it any more')
            self._open.append(made.dup())
        return made


class _Http(HTTPConnection):
    def __init__(self, *given: Any, connections: Connections, **named: Any) -> None:
        super().__init__(*given, **named)
        self._connections = connections

    def _new_conn(self) -> socket.socket:
        return self._connections.opened(self)


class _Https(_Http, HTTPSConnection):
    pass


class _Adapter(HTTPAdapter):
    """The adapter of requests, with connections that Connections.opened() opens."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        super().__init__()

    def get_connection_with_tls_context(self, *given: Any, **named: Any) -> Any:
        """A urllib3.HTTPConnectionPool whose connections are ours."""
        pool: Any = super().get_connection_with_tls_context(*given, **named)
        made = _Https if pool.scheme == 'https' else _Http
        pool.ConnectionCls = partial(made, connections=self._connections)
        return pool
