"""Images on web servers, by requests."""

from __future__ import annotations

import math
import os
import re
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from functools import lru_cache, partial
from http.client import responses
from pathlib import Path
from typing import Any
from urllib.parse import urldefrag, urljoin, urlsplit

import certifi
import requests
from requests.adapters import HTTPAdapter
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NameResolutionError, NewConnectionError
from urllib3.util.connection import create_connection
from urllib3.util.ssl_ import create_urllib3_context

from ecomp import __version__
from ecomp.agent.images import sources
from ecomp.agent.images.sources import CHUNK_BYTES, AddressRefused, EgressPolicy, ServerUnavailable, Stream, Version
from ecomp.errors import BuildFailed
from ecomp.model.image import UNLISTED, check_image

# Time to connect, and between two reads; a server that takes longer is unavailable.
TIMEOUT_SECONDS = (5.0, 60.0)
MAX_REDIRECTS = 5
# Environment variables that may name a file or directory of certificate authorities.
CA_VARIABLES = ('REQUESTS_CA_BUNDLE', 'CURL_CA_BUNDLE')
# http.client's error for a proxy that opens no tunnel to an https server.
TUNNEL_FAILURE = re.compile('Tunnel connection failed: ([0-9]{3}) ')
HEADERS = {'user-agent': f'ecomp/{__version__}', 'accept': '*/*', 'accept-encoding': 'identity'}


class RemoteSource:
    """An image on a web server, each wait for which ends at `deadline` (monotonic).

    No redirect is followed unchecked, and nothing is retried. Its methods raise ServerUnavailable if there is no answer
    (also HTTP 5xx and 429), and else BuildFailed. No reason quotes a server's answer.
    """

    def __init__(self, url: str, egress: EgressPolicy) -> None:
        self.deadline, self._url, self.egress = math.inf, url, egress
        # Not a requests.Session, which sends cookies, and reads the body of a redirect, which may be endless. It takes
        # a proxy and ~/.netrc from the environment: that proxy would resolve names unchecked, and ~/.netrc is root's.
        self._adapter = _Adapter(self)
        self._proxies = dict.fromkeys(('http', 'https'), egress.proxy_url) if egress.proxy_url else {}

    def open(self) -> Stream:
        with self._translate_errors():
            answer = self._expect_ok(self._request(self._url))
            # Undecoded: gzip could be a bomb. read1: a slow server could keep one read waiting past the deadline.
            read = self._translate_errors()(partial(answer.raw.read1, CHUNK_BYTES, decode_content=False))
            return Stream(_parse_version(answer), read, answer.close)

    def has_version(self, version: Version) -> bool:
        # No if-modified-since: an older image is "not modified since" as well, and may be another one.
        headers = {'if-none-match': version.etag} if version.etag else {}
        with self._translate_errors(), closing(self._request(self._url, headers)) as answer:
            return answer.status_code == 304 or version.is_same(_parse_version(self._expect_ok(answer)))

    def read_sums(self) -> str | None:
        """Return SHA256SUMS in the image's directory, or None if there is none."""
        url, max_bytes = urljoin(self._url, sources.SUMS_FILE), sources.MAX_SUMS_BYTES
        with self._translate_errors(url), closing(self._request(url)) as answer:
            if 400 <= answer.status_code < 500 and answer.status_code != 429:
                return None  # many servers answer 403 for a missing file
            self._expect_ok(answer, url)
            text = b''
            while len(text) <= max_bytes and (chunk := answer.raw.read1(CHUNK_BYTES, decode_content=False)):
                text += chunk
        if len(text) > max_bytes:
            reason = f'is longer than {max_bytes // 2**20} MiB. Fix: add #sha256=… to the URL of the image'
            raise BuildFailed('image', f'{url}: {reason}')
        return text.decode(errors='replace')

    def close(self) -> None:
        self._adapter.close()

    def _expect_ok(self, answer: requests.Response, url: str = '') -> requests.Response:
        if answer.status_code == 200:
            return answer
        answer.close()
        phrase = responses.get(answer.status_code, '')  # the server's own may be anything
        reason = f'{url or self._url}: the server returned HTTP {answer.status_code} {phrase}'.rstrip()
        is_temporary = answer.status_code >= 500 or answer.status_code == 429
        raise ServerUnavailable('image', reason) if is_temporary else BuildFailed('image', reason)

    def _request(self, url: str, headers: Mapping[str, str] | None = None) -> requests.Response:
        """Follow redirects to an unread answer of any status, or raise BuildFailed."""
        current_url = url
        for hop in range(MAX_REDIRECTS + 1):
            if urlsplit(current_url).scheme == 'https':
                load_tls_context()  # reports bad authorities before the server is asked
            try:
                request = requests.Request('GET', current_url, {**HEADERS, **(headers or {})}).prepare()
                answer = self._adapter.send(request, stream=True, timeout=TIMEOUT_SECONDS, proxies=self._proxies)
            except AddressRefused as refused:
                direct = f'{refused.target}, {refused.reason}: images from there are refused'
                reason = f'redirected to a refused address ({refused.reason})' if hop else direct
                raise BuildFailed('image', f'{url}: {reason}', not hop and refused.reason == UNLISTED) from refused
            except requests.exceptions.InvalidHeader as error:  # of an ETag in several lines, or a length
                raise BuildFailed('image', f'{url}: the server sends malformed HTTP') from error
            except requests.exceptions.InvalidURL as error:
                raise BuildFailed('image', f'{url}: the host name is malformed') from error
            except (requests.RequestException, HTTPError) as error:
                raise ServerUnavailable('image', f'{url}: {describe_failure(error)}') from error
            if answer.is_redirect:
                answer.close()
                current_url = _resolve_redirect(url, current_url, answer.headers['location'])
                continue
            if answer.headers.get('content-encoding', 'identity').lower() in ('', 'identity'):
                return answer
            answer.close()
            reason = 'the server compresses it (Content-Encoding). Fix: have the server send the file as it is'
            raise BuildFailed('image', f'{url}: {reason}')
        raise BuildFailed('image', f'{url}: more than {MAX_REDIRECTS} redirects')

    @contextmanager
    def _translate_errors(self, url: str = '') -> Iterator[None]:
        try:
            yield
        except (HTTPError, OSError) as error:
            reason = f'the connection broke: {type(error).__name__}'
            raise ServerUnavailable('image', f'{url or self._url}: {reason}') from error
        except (ValueError, RuntimeError) as error:  # such an error may quote the server's answer
            raise BuildFailed('image', f'{url or self._url}: the server sends malformed HTTP') from error

    def open_socket(self, connection: HTTPConnection) -> socket.socket:
        """Connect to the first address of the host that answers or, with a proxy, of the proxy."""
        host, port = connection.host.strip('[]'), connection.port
        try:
            addresses = self.egress.resolve(host, port)
        except socket.gaierror as error:
            raise NameResolutionError(host, connection, error) from error
        except (OSError, ValueError) as error:
            raise NewConnectionError(connection, type(error).__name__) from error
        failure: Exception = NewConnectionError(connection, 'no address')
        for address in addresses:
            try:
                timeout = self.limit(TIMEOUT_SECONDS[0])
                connected = create_connection((str(address), port), timeout, socket_options=connection.socket_options)
            except TimeoutError:
                failure = ConnectTimeoutError(connection, f'{address} does not answer')
            except OSError as error:
                failure = NewConnectionError(connection, f'{address}: {error}')
                failure.__cause__ = error
            else:
                timed = _TimedSocket(fileno=connected.detach())
                timed.settimeout(timeout)
                timed.source = self
                return timed
        raise failure

    def limit(self, seconds: float) -> float:
        """Return at most `seconds`, as the deadline allows, or raise TimeoutError after it."""
        if (remaining := self.deadline - time.monotonic()) <= 0:
            raise TimeoutError
        return min(seconds, remaining)


class _Timed:
    """A socket whose reads end at the deadline of its source, however slowly bytes come."""

    source: RemoteSource | None = None

    def recv_into(self, *args: Any, **kwargs: Any) -> int:
        if self.source is not None:
            self.settimeout(self.source.limit(TIMEOUT_SECONDS[1]))  # type: ignore[attr-defined]
        return super().recv_into(*args, **kwargs)  # type: ignore[misc,no-any-return]


class _TimedSocket(_Timed, socket.socket):
    pass


class _TimedTlsSocket(_Timed, ssl.SSLSocket):
    pass


class _Adapter(HTTPAdapter):
    """Sends requests by connections that `source` opens, if the policy allows them."""

    def __init__(self, source: RemoteSource) -> None:
        super().__init__()
        self._source = source

    def get_connection_with_tls_context(self, request: requests.PreparedRequest, *args: Any, **kwargs: Any) -> Any:
        self._source.egress.require_allowed_url(request.url or '')
        pool: Any = super().get_connection_with_tls_context(request, *args, **kwargs)
        pool.ConnectionCls = partial(_Https if pool.scheme == 'https' else _Http, source=self._source)
        return pool

    def cert_verify(self, *_: Any) -> None:
        """No-op: load_tls_context() has the authorities, and requests would add its own."""


class _Http(HTTPConnection):
    def __init__(self, *args: Any, source: RemoteSource, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._source = source

    def _new_conn(self) -> socket.socket:
        # A host name is resolved once, here, below HTTP and TLS: an earlier check could get another answer from DNS.
        return self._source.open_socket(self)


class _Https(_Http, HTTPSConnection):
    def connect(self) -> None:
        self.ssl_context = load_tls_context()
        super().connect()  # the handshake ends within the timeout of the socket
        setattr(self.sock, 'source', self._source)  # noqa: B010  (a socket has no such attribute)


def load_tls_context() -> ssl.SSLContext:
    """Return the TLS context with the authorities of CA_VARIABLES or, without these, certifi's."""
    path = next(filter(None, map(os.environ.get, CA_VARIABLES)), None) or certifi.where()
    try:
        return _load_tls_context(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        reason = f'{path}: certificate authorities cannot be read: {error.strerror or error}'
        fix = f'set {" or ".join(CA_VARIABLES)} to a readable file or directory of certificates'
        raise BuildFailed('image', f'{reason}. Fix: {fix}', is_host_fault=True) from error


@lru_cache(maxsize=1)  # only the current one: a file that is rewritten every hour must not fill the cache
def _load_tls_context(path: str, _modified_ns: int) -> ssl.SSLContext:
    context = create_urllib3_context()
    context.sslsocket_class = _TimedTlsSocket
    context.load_verify_locations(**{'capath' if os.path.isdir(path) else 'cafile': path})
    return context


def _parse_version(answer: requests.Response) -> Version:
    # A chunked response is as long as its chunks, whatever its content-length (RFC 9112, 6.3).
    length = '' if 'transfer-encoding' in answer.headers else answer.headers.get('content-length', '')
    size = int(length) if length.isdecimal() and length.isascii() else None
    etag, modified = (answer.headers.get(name, '') for name in ('etag', 'last-modified'))
    return Version(etag, modified, size, answer.url.partition('?')[0])


def describe_failure(error: Exception) -> str:
    """Describe why a server gives no answer, without quoting the server."""
    if isinstance(error, requests.Timeout):
        return 'the server does not answer in time'
    causes: list[BaseException] = [error]
    for cause in causes:  # grows during the loop: urllib3 and requests wrap errors repeatedly
        inner = (cause.__cause__, *cause.args, getattr(cause, 'reason', None))
        causes += [each for each in inner if isinstance(each, BaseException) and each not in causes]
    # Of a certificate `verify_message` is the text alone, without OpenSSL's code and place.
    texts = (getattr(each, 'verify_message', '') or each.strerror for each in causes if isinstance(each, OSError))
    detail = next((f': {text}' for text in texts if text), '')
    if isinstance(error, requests.exceptions.ProxyError):
        answer = next(filter(None, (TUNNEL_FAILURE.match(str(each)) for each in causes)), None)
        return f'the proxy returned HTTP {answer[1]}' if answer else f'the proxy gives no connection{detail}'
    return f'the server cannot be reached{detail}'


def _resolve_redirect(url: str, current_url: str, location: str) -> str:
    try:
        target = check_image(urldefrag(urljoin(current_url, location)).url)
    except ValueError:
        reason = 'an invalid image URL, or one with a user or a password'
        raise BuildFailed('image', f'{url}: redirected to {reason}') from None
    if urlsplit(target).scheme == 'file':
        raise BuildFailed('image', f'{url}: redirected to a local file, which is refused')
    return target
