"""An image on a web server, by urllib3. All of it blocks: see transfer.py."""

from __future__ import annotations

import errno
import re
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from http import HTTPStatus
from urllib.parse import urldefrag, urljoin, urlsplit

from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, LocationValueError, NewConnectionError, ProxyError, TimeoutError

from ecomp.agent.images.connections import Connections, Refused
from ecomp.agent.images.reach import Reach
from ecomp.agent.images.sources import CHUNK, MOST_SUMS, SUMS, Away, Stream, Version
from ecomp.errors import BuildFailed
from ecomp.model.image import check_image

TIMEOUT = (5.0, 60.0)
"""Seconds to connect, and seconds between two bytes; a server that takes longer is away."""
HEAD_TIMEOUT = (2.0, 2.0)
"""The same of a HEAD; a server that takes longer is asked by GET, for which transfer.PATIENCE has to leave time."""
REDIRECTS = 5
"""How many redirects of one URL are followed; the next one is refused."""

TUNNEL = re.compile('Tunnel connection failed: ([0-9]{3}) ')
"""What http.client says of a proxy that does not lead on to an https server."""
CERTIFICATES = {
    9: 'its certificate is not valid yet: is the clock right?',
    10: 'its certificate has expired',
    62: 'its certificate is made out to another name',
    64: 'its certificate is made out to another address',
}
"""By OpenSSL's number: https://docs.openssl.org/master/man3/X509_STORE_CTX_get_error/"""


class Remote:
    """An image on a web server. `url` has no fragment."""

    def __init__(self, url: str, reach: Reach) -> None:
        self._url = url
        self._connections = Connections(reach)
        self._found_at = url

    def open(self, known: Version | None) -> Stream | None:
        return self._opened(self._url, known)

    def is_still(self, version: Version) -> bool:
        # Where it was found, for a redirect may lead to another mirror each time.
        try:
            newer = self._opened(self._found_at, version)
        except Away:
            raise
        except BuildFailed:
            if self._found_at == self._url:
                raise
            newer = self._opened(self._url, version)  # that place was named for a short time, as by a signature
        if newer is not None:
            newer.close()
        return newer is None

    def _opened(self, url: str, known: Version | None) -> Stream | None:
        # By its date alone nothing is asked: what is older than that is "not modified since", and may be another image.
        headers = {'if-none-match': known.etag} if known is not None and known.etag else {}
        if known is not None and known.modified and not known.etag and self._says_by_head(url, known):
            return None
        with _said(self._url):
            answer, self._found_at = self._ask('GET', url, headers)
            if known is not None and answer.status == 304:
                answer.close()
                return None
            if answer.status != 200:
                raise self._unwelcome(answer)
            stream = _Body(self._url, answer, _version(answer, self._found_at))
            # Not every server looks at what it is asked.
            if known is not None and known.is_same(stream.version):
                stream.close()
                return None
            return stream

    def _says_by_head(self, url: str, known: Version) -> bool:
        """Whether the server says to a HEAD that it has the known version; False where a GET has to tell.

        Not every server answers a HEAD, or as it would a GET.
        """
        with suppress(BuildFailed), _said(self._url):
            answer, found_at = self._ask('HEAD', url, {})
            answer.close()
            return answer.status == 200 and known.is_same(_version(answer, found_at))
        return False

    def sums(self) -> str | None:
        url = urljoin(self._url, SUMS)
        with _said(url):
            answer, _ = self._ask('GET', url, {})
            with closing(answer):
                if 400 <= answer.status < 500 and answer.status != 429:
                    return None  # many servers say 403 of what is not there
                if answer.status != 200:
                    raise self._unwelcome(answer, f'{url}: ')
                text = b''
                while len(text) <= MOST_SUMS and (chunk := answer.read1(CHUNK, decode_content=False)):
                    text += chunk
        if len(text) > MOST_SUMS:
            raise BuildFailed('image', f'{url}: is too long for checksums; put #sha256=… on the URL of the image')
        return text.decode(errors='replace')

    def stop(self) -> None:
        self._connections.stop()

    def close(self) -> None:
        self._connections.close()

    def _unwelcome(self, answer: BaseHTTPResponse, what: str = '') -> BuildFailed:
        answer.close()
        reason = f'{what or self._url + ": "}the server answers HTTP {_status(answer.status)}'
        passing = answer.status >= 500 or answer.status == 429
        return Away('image', reason) if passing else BuildFailed('image', reason)

    def _ask(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[BaseHTTPResponse, str]:
        """The answer, and the URL that gave it. Redirects are followed here: each is checked as the first."""
        here, timeout = url, HEAD_TIMEOUT if method == 'HEAD' else TIMEOUT
        for hop in range(REDIRECTS + 1):
            try:
                answer = self._connections.ask(method, here, timeout, headers)
            except Refused as refused:
                what = f'redirected to {refused.what}' if hop else f'{refused.where}, {refused.what}'
                raise BuildFailed('image', f'{url}: {what}: no image is taken from there') from refused
            except LocationValueError as error:
                raise BuildFailed('image', f'{url}: names no server that can be asked') from error
            except HTTPError as error:
                raise Away('image', f'{url}: {why_away(error)}') from error
            location = answer.get_redirect_location()
            if not location:
                if answer.headers.get('content-encoding', 'identity').lower() in ('', 'identity'):
                    return answer, here
                answer.close()
                what = 'the server sends it packed (Content-Encoding). Fix: have the server send the file as it is'
                raise BuildFailed('image', f'{url}: {what}')
            answer.close()
            here = _redirected(url, here, location)
        raise BuildFailed('image', f'{url}: more than {REDIRECTS} redirects')


class _Body:
    """The body of an answer."""

    def __init__(self, url: str, answer: BaseHTTPResponse, version: Version) -> None:
        self._url = url
        self._answer = answer
        self.version = version

    def read(self) -> bytes:
        with _said(self._url):
            # Decoded, what is transferred with gzip would be unpacked, bombs included. read1, or a slow drip would be
            # inside one read, deadline or not.
            return self._answer.read1(CHUNK, decode_content=False)

    def close(self) -> None:
        self._answer.close()


def _version(answer: BaseHTTPResponse, found_at: str) -> Version:
    """The version that an answer from this URL is of."""
    # In chunks it is as long as they are, whatever is said besides (RFC 9112, 6.3).
    length = '' if 'transfer-encoding' in answer.headers else answer.headers.get('content-length', '')
    return Version(
        answer.headers.get('etag', ''),
        answer.headers.get('last-modified', ''),
        int(length) if length.isdecimal() and length.isascii() else None,
        found_at.partition('?')[0],
    )


@contextmanager
def _said(url: str) -> Iterator[None]:
    """Turn each error of the block into BuildFailed, or Away, with a reason a person understands."""
    try:
        yield
    except HTTPError as error:
        raise Away('image', f'{url}: the connection broke: {type(error).__name__}') from error
    except OSError as error:
        raise BuildFailed('image', f'{url}: cannot be read: {error.strerror}') from error
    except (ValueError, RuntimeError) as error:
        # An answer is in the words.
        raise BuildFailed('image', f'{url}: what the server answers is not HTTP') from error


def why_away(error: HTTPError) -> str:
    """Why a server gives no answer: a sentence, in which nothing is what the server said."""
    who = 'the proxy' if isinstance(error, ProxyError) else 'the server'
    if isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError):
        return f'{who} gives no answer in time'
    causes: list[BaseException] = [error]
    for each in causes:  # grows as it goes: what urllib3 wraps may be wrapped again
        inner = (each.__cause__, *each.args, getattr(each, 'reason', None))
        causes += [cause for cause in inner if isinstance(cause, BaseException) and cause not in causes]
    if (answered := next(filter(None, (TUNNEL.match(str(each)) for each in causes)), None)) is not None:
        return f'the proxy answers HTTP {_status(int(answered[1]))}'
    return f'{who} cannot be reached' + next((f': {why}' for why in map(_cause, causes) if why), '')


def _cause(error: BaseException) -> str | None:
    if isinstance(error, socket.gaierror):
        known = error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        return 'there is no such name' if known else 'its name cannot be looked up: is there a name server?'
    if isinstance(error, ssl.SSLCertVerificationError):
        return CERTIFICATES.get(getattr(error, 'verify_code', 0), 'its certificate is not believed here')
    if isinstance(error, ssl.SSLError):
        return 'it does not speak TLS as this host does'
    if isinstance(error, ConnectionRefusedError):
        return 'it refuses the connection: nothing listens on that port'
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return 'there is no route to it'
    return 'the connection broke' if isinstance(error, ConnectionError) else None


def _status(code: int) -> str:
    """A status code with its name from HTTP: the one in the answer is the server's own text."""
    try:
        return f'{code} {HTTPStatus(code).phrase}'
    except ValueError:
        return str(code)


def _redirected(url: str, here: str, location: str) -> str:
    """The URL that `location`, the answer to `here`, names; `url` is where it began.

    BuildFailed for one that is not followed, which the reason does not quote.
    """
    try:
        there = check_image(urldefrag(urljoin(here, location)).url)
    except ValueError:
        what = 'what is no URL of an image, or has a user or a password'
        raise BuildFailed('image', f'{url}: redirected to {what}, which is not followed') from None
    if urlsplit(there).scheme == 'file':
        raise BuildFailed('image', f'{url}: redirected to a local file, which is not followed')
    return there
