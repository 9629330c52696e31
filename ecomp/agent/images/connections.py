"""The connections that images come over: each name is resolved once, its addresses are checked, and one of these is
connected to; and all of them can be shut by another thread, whatever waits on them.

urllib3 makes a connection in `_new_conn`, for http and https alike: TLS, with the name in SNI and against the
certificate, and HTTP are above it. A check before the request would be of another answer of the name server.
"""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

import certifi
from urllib3 import BaseHTTPResponse, PoolManager, ProxyManager, Timeout, make_headers
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import ConnectTimeoutError, NameResolutionError, NewConnectionError
from urllib3.util.connection import create_connection
from urllib3.util.ssl_ import create_urllib3_context

from ecomp import __version__
from ecomp.addresses import addresses, is_own
from ecomp.compute_conf import ComputeConfig
from ecomp.errors import BuildFailed
from ecomp.model.image import Address, ImageSources, all_of, image_sources, is_listed_alone, why_not, why_not_name

CONTROL = 'etcd or placement'
OWN = 'an address of this host that `image_sources:` does not list by itself'
AUTHORITIES = ('REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE')
"""Variables of the environment that may name a file, or a directory, of certificate authorities."""
HEADERS = {'user-agent': f'ecomp/{__version__}', 'accept': '*/*', 'accept-encoding': 'identity'}


@dataclass(frozen=True)
class Reach:
    """Where images may be fetched from. `sources` None means any address that is nowhere refused.

    `control` is host and port of etcd and of placement, from which no image is fetched. `proxy` is the URL of an HTTP
    proxy, None for none: it resolves names itself, so of a name only its text is checked.
    """

    sources: ImageSources | None = None
    proxy: str | None = None
    control: tuple[tuple[str, int], ...] = ()


def reach_of(config: ComputeConfig) -> Reach:
    """The Reach that compute.yaml describes."""
    named = [urlsplit(f'//{each}') for each in config.etcd.endpoints] + [urlsplit(config.placement.endpoint)]
    control = tuple((each.hostname or '', port_of(each)) for each in named)
    sources = None if config.image_sources is None else image_sources(config.image_sources)
    return Reach(sources, config.image_proxy, control)


def port_of(parts: SplitResult) -> int:
    """The port that a URL names, or the one of its scheme."""
    return parts.port or (443 if parts.scheme == 'https' else 80)


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
        # Not requests: it is a third of the processor time that asking costs, and would take a proxy and ~/.netrc from
        # the environment: the one resolves names unchecked, the other is root's own.
        self._manager: PoolManager | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._open: list[socket.socket] = []

    def ask(self, method: str, url: str, timeout: tuple[float, float], headers: Mapping[str, str]) -> BaseHTTPResponse:
        """The answer, its body not read, redirects not followed. Refused, BuildFailed, urllib3's HTTPError."""
        parts = urlsplit(url)
        if self._reach.proxy is not None:
            self._check_for_proxy(parts.hostname or '', port_of(parts))
        if parts.scheme == 'https':
            trusted()  # what is wrong with it is said before a server is asked
        # Made here, where a thread of its own waits for the server: its asker is at work meanwhile.
        self._manager = self._manager or self._made()
        return self._manager.urlopen(
            method, url, headers={**HEADERS, **headers}, timeout=Timeout(*timeout), retries=False, redirect=False,
            preload_content=False, decode_content=False,
        )  # fmt: skip

    def stop(self) -> None:
        """End every wait for an answer, a byte or a handshake soon, and open nothing more; for another thread."""
        with self._lock:
            self._stopped = True
            while self._open:
                with suppress(OSError), self._open.pop() as waits:
                    waits.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close every connection."""
        self.stop()
        if self._manager is not None:
            self._manager.clear()

    def _made(self) -> PoolManager:
        """A manager of urllib3's, with connections that opened() opens."""
        proxy = self._reach.proxy
        made = PoolManager() if proxy is None else ProxyManager(proxy, proxy_headers=_proxy_headers(urlsplit(proxy)))
        pools: Any = {
            'http': partial(self._pool, HTTPConnectionPool, _Http),
            'https': partial(self._pool, HTTPSConnectionPool, _Https),
        }
        made.pool_classes_by_scheme = pools  # it calls them, and no more
        return made

    def _pool(self, kind: type[HTTPConnectionPool], connection: type[_Http], *given: Any, **named: Any) -> Any:
        pool: Any = kind(*given, **named)
        pool.ConnectionCls = partial(connection, connections=self)
        return pool

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
        # By its other addresses a host reaches itself past its own firewall, as it does by loopback.
        if what is None and not is_listed_alone(address, self._reach.sources):
            what = OWN if any(is_own(each) and not each.is_loopback for each in all_of(address)) else None
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
    def connect(self) -> None:
        self.ssl_context = trusted()
        super().connect()


def trusted() -> ssl.SSLContext:
    """What certificates of servers are checked by. BuildFailed where the authorities cannot be read."""
    place = next(filter(None, map(os.environ.get, AUTHORITIES)), None) or certifi.where()
    try:
        return _trusted(place, Path(place).stat().st_mtime_ns)
    except OSError as error:
        why = f'{place}: certificate authorities cannot be read: {error.strerror or error}'
        raise BuildFailed('image', f'{why}; {" or ".join(AUTHORITIES)} may name others') from error


@lru_cache(maxsize=1)  # of what is there now: a file that is written anew each hour does not make it grow
def _trusted(place: str, changed: int) -> ssl.SSLContext:
    """As the file or directory was when it was `changed`, in ns: to read a hundred authorities takes 20 ms."""
    del changed
    context = create_urllib3_context()
    context.load_verify_locations(**{'capath' if os.path.isdir(place) else 'cafile': place})
    return context


def _proxy_headers(proxy: SplitResult) -> Mapping[str, str]:
    """The user and password of the proxy's URL, if it has them."""
    if proxy.username is None:
        return {}
    return make_headers(proxy_basic_auth=f'{unquote(proxy.username)}:{unquote(proxy.password or "")}')
