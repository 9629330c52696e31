"""The connections for image downloads; each address is checked when it is connected to.

A host name is resolved once, in urllib3's `_new_conn`, which is below HTTP and TLS. A check before the request could
get another answer from the name server. Another thread can close all connections.
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
from ecomp.addresses import is_own_address, resolve_addresses
from ecomp.compute_conf import ComputeConfig
from ecomp.errors import BuildFailed
from ecomp.model.image import (
    Address,
    ImageSources,
    expand_address,
    find_address_refusal,
    find_host_refusal,
    is_listed_exactly,
    parse_image_sources,
)

CONTROL_PLANE = 'etcd or placement'
OWN_ADDRESS = 'an address of this host that `image_sources:` does not list exactly'
# Environment variables that may name a file or directory of certificate authorities.
CA_VARIABLES = ('REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE')
HEADERS = {'user-agent': f'ecomp/{__version__}', 'accept': '*/*', 'accept-encoding': 'identity'}


@dataclass(frozen=True)
class EgressPolicy:
    """The hosts that images may be fetched from; none at `control_endpoints` (etcd, placement).

    `sources` None allows what no general rule refuses. A proxy resolves names, so only their text is checked.
    """

    sources: ImageSources | None = None
    proxy_url: str | None = None
    control_endpoints: tuple[tuple[str, int], ...] = ()


def make_egress_policy(config: ComputeConfig) -> EgressPolicy:
    """Make the policy of compute.yaml; deny etcd and placement to images."""
    endpoints = [urlsplit(f'//{url}') for url in config.etcd.endpoints] + [urlsplit(config.placement.endpoint)]
    control = tuple((endpoint.hostname or '', get_port(endpoint)) for endpoint in endpoints)
    sources = None if config.image_sources is None else parse_image_sources(config.image_sources)
    return EgressPolicy(sources, config.image_proxy, control)


def get_port(parts: SplitResult) -> int:
    """Return the port in a URL, or the default port of its scheme."""
    return parts.port or (443 if parts.scheme == 'https' else 80)


class AddressRefused(Exception):
    """No image is fetched from `target`, an address or a host, because it is `reason`."""

    def __init__(self, target: str, reason: str) -> None:
        super().__init__(target, reason)
        self.target = target
        self.reason = reason


class Connections:
    """All connections to one image's server. After stop() none is opened."""

    def __init__(self, egress: EgressPolicy) -> None:
        self._egress = egress
        # requests is not used: it costs a third of a check's processor time, and takes a proxy and ~/.netrc from the
        # environment. The proxy would resolve names unchecked, and ~/.netrc is root's.
        self._manager: PoolManager | None = None
        self._lock = threading.Lock()
        self._stopped = False
        self._open: list[socket.socket] = []

    def request(
        self, method: str, url: str, timeouts: tuple[float, float], headers: Mapping[str, str]
    ) -> BaseHTTPResponse:
        """Send a request, without retries; return any response, its body unread, also a redirect.

        `timeouts`: seconds to connect, to read. Raises AddressRefused, HTTPError, BuildFailed (unreadable authorities).
        """
        parts = urlsplit(url)
        if self._egress.proxy_url is not None:
            self._check_for_proxy(parts.hostname or '', get_port(parts))
        if parts.scheme == 'https':
            load_tls_context()  # reports bad authorities before the server is asked
        # Made in the download thread, so that its caller works in the meantime.
        self._manager = self._manager or self._make_manager()
        return self._manager.urlopen(
            method, url, headers={**HEADERS, **headers}, timeout=Timeout(*timeouts), retries=False, redirect=False,
            preload_content=False, decode_content=False,
        )  # fmt: skip

    def stop(self) -> None:
        """Interrupt every wait for a server, and open no more connections. For another thread."""
        with self._lock:
            self._stopped = True
            while self._open:
                with suppress(OSError), self._open.pop() as connection:
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Interrupt every wait, as stop() does, and drop the idle connections; none is opened later."""
        self.stop()
        if self._manager is not None:
            self._manager.clear()

    def _make_manager(self) -> PoolManager:
        """Make a manager, of the proxy if there is one, whose connections open_socket() opens."""
        proxy = self._egress.proxy_url
        manager = (
            PoolManager() if proxy is None else ProxyManager(proxy, proxy_headers=_make_proxy_headers(urlsplit(proxy)))
        )
        pools: Any = {
            'http': partial(self._make_pool, HTTPConnectionPool, _HttpConnection),
            'https': partial(self._make_pool, HTTPSConnectionPool, _HttpsConnection),
        }
        manager.pool_classes_by_scheme = pools  # urllib3 only calls these
        return manager

    def _make_pool(
        self, kind: type[HTTPConnectionPool], connection: type[_HttpConnection], *args: Any, **kwargs: Any
    ) -> Any:
        """Make a urllib3 pool of the class `kind` whose connections are of the class `connection`."""
        pool: Any = kind(*args, **kwargs)
        pool.ConnectionCls = partial(connection, connections=self)
        return pool

    def open_socket(self, connection: HTTPConnection) -> socket.socket:
        """Connect to the first address of the host that answers; with a proxy, of the proxy.

        AddressRefused if any address is refused, otherwise HTTPError: the last failure, or that stop() was called.
        """
        host, port = connection.host.strip('[]'), connection.port
        failure: Exception = NewConnectionError(connection, 'the download was abandoned')
        for address in self._resolve(connection, host, port):
            if self._stopped:
                break
            try:
                connected = create_connection(
                    (str(address), port), connection.timeout, socket_options=connection.socket_options
                )
            except TimeoutError:
                failure = ConnectTimeoutError(connection, f'{address} does not answer')
            except OSError as error:
                failure = NewConnectionError(connection, f'{address}: {error}')
                failure.__cause__ = error
            else:
                return self._register(connection, connected)
        raise failure

    def _resolve(self, connection: HTTPConnection, host: str, port: int) -> list[Address]:
        """Resolve a host, and check each address unless it is the proxy's. Raises AddressRefused or HTTPError."""
        try:
            resolved = resolve_addresses(host)
        except socket.gaierror as error:
            raise NameResolutionError(host, connection, error) from error
        except (OSError, ValueError) as error:
            raise NewConnectionError(connection, f'{type(error).__name__}') from error
        if self._egress.proxy_url is None:
            for address in resolved:
                self._check_address(host, port, address)
        return resolved

    def _check_address(self, host: str, port: int, address: Address) -> None:
        """Raise AddressRefused if a rule or `image_sources:` refuses the address, or etcd or placement is there.

        Those two are refused at `port` only. Our own address is refused unless `image_sources:` lists exactly this one.
        """
        reason = find_address_refusal(host, address, self._egress.sources)
        if reason is None and self._resolves_to_control(port, address):
            reason = CONTROL_PLANE
        # A host reaches itself past its firewall by its own addresses, as it does by loopback.
        if reason is None and not is_listed_exactly(address, self._egress.sources):
            is_own = any(is_own_address(part) and not part.is_loopback for part in expand_address(address))
            reason = OWN_ADDRESS if is_own else None
        if reason is not None:
            raise AddressRefused(f'{host} is {address}', reason)

    def _resolves_to_control(self, port: int, address: Address) -> bool:
        """Resolve etcd and placement; return whether one with this port is there (on loopback: at any own address)."""
        target_addresses = set(expand_address(address))
        for host, control_port in self._egress.control_endpoints:
            if control_port == port:
                with suppress(OSError, ValueError):  # a name that has no address now has none to compare
                    control_addresses = {
                        embedded for address in resolve_addresses(host) for embedded in expand_address(address)
                    }
                    is_local = any(embedded.is_loopback for embedded in control_addresses)
                    if target_addresses & control_addresses or (
                        is_local and any(map(is_own_address, target_addresses))
                    ):
                        return True
        return False

    def _check_for_proxy(self, host: str, port: int) -> None:
        """Raise AddressRefused if the host's text or numeric address is refused: the proxy resolves names."""
        try:
            numeric_addresses = resolve_addresses(host, socket.AI_NUMERICHOST)
        except (OSError, ValueError):
            reason = find_host_refusal(host, self._egress.sources)
            if reason is None and (host.lower().rstrip('.'), port) in self._egress.control_endpoints:
                reason = CONTROL_PLANE
            if reason is not None:
                raise AddressRefused(host, reason) from None
        else:
            for address in numeric_addresses:
                self._check_address(host, port, address)

    def _register(self, connection: HTTPConnection, new_socket: socket.socket) -> socket.socket:
        """Return the socket, and let stop() shut it down; if stop() was called, close it and raise HTTPError."""
        # A duplicate, because TLS detaches the original: during a handshake there would be none to shut down.
        with self._lock:
            if self._stopped:
                new_socket.close()
                raise NewConnectionError(connection, 'the download was abandoned')
            self._open.append(new_socket.dup())
        return new_socket


class _HttpConnection(HTTPConnection):
    """A connection whose socket is opened, and may be interrupted, by `connections`."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._connections = connections

    def _new_conn(self) -> socket.socket:
        return self._connections.open_socket(self)


class _HttpsConnection(_HttpConnection, HTTPSConnection):
    """An _HttpConnection with TLS; connect() calls load_tls_context(), whose BuildFailed it raises."""

    def connect(self) -> None:
        self.ssl_context = load_tls_context()
        super().connect()


def load_tls_context() -> ssl.SSLContext:
    """Return the TLS context with the authorities of CA_VARIABLES, or certifi's; BuildFailed if unreadable."""
    path = next(filter(None, map(os.environ.get, CA_VARIABLES)), None) or certifi.where()
    try:
        return _load_tls_context(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        reason = f'{path}: certificate authorities cannot be read: {error.strerror or error}'
        fix = f'set {" or ".join(CA_VARIABLES)} to a readable file or directory of certificates'
        raise BuildFailed('image', f'{reason}. Fix: {fix}', is_host_fault=True) from error


@lru_cache(maxsize=1)  # only the current one: a file that is rewritten every hour must not fill the cache
def _load_tls_context(path: str, modified_ns: int) -> ssl.SSLContext:
    """Load the authorities at `path`, cached until `modified_ns` changes: to read a hundred takes 20 ms."""
    del modified_ns
    context = create_urllib3_context()
    context.load_verify_locations(**{'capath' if os.path.isdir(path) else 'cafile': path})
    return context


def _make_proxy_headers(proxy: SplitResult) -> Mapping[str, str]:
    """Return the header with the user and password of the proxy's URL; {} without a user."""
    if proxy.username is None:
        return {}
    return make_headers(proxy_basic_auth=f'{unquote(proxy.username)}:{unquote(proxy.password or "")}')
