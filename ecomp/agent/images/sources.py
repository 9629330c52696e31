"""Where an image comes from: a web server, or a directory of this host. All of it blocks: see transfer.py.

A source is asked with the version that is cached, and answers with a stream of the image, or None: it is still that.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import requests
from urllib3.exceptions import HTTPError

from ecomp.errors import BuildFailed
from ecomp.model.image import check_image

CHUNK = 1024**2
TIMEOUT = (5.0, 60.0)
"""Seconds to connect, and between two bytes."""
REDIRECTS = 5
SUMS = 'SHA256SUMS'
MOST_SUMS = 1024**2


class Away(BuildFailed):
    """The server cannot say anything now: it may do so later, and till then what is cached is good."""


@dataclass(frozen=True)
class Version:
    """What tells an image at a URL from the next one there. '' and None: the server does not say."""

    etag: str = ''
    modified: str = ''
    length: int | None = None

    def is_same(self, other: Version) -> bool:
        """Whether there is any reason to call them the same: without any other, their length is one."""
        if self.etag or other.etag:
            return self.etag == other.etag
        said = bool(self.modified) or self.length is not None
        return said and (self.modified, self.length) == (other.modified, other.length)


class Stream(Protocol):
    """An image's bytes, from the first on."""

    version: Version

    def read(self) -> bytes:
        """The next bytes, at most CHUNK; none at the end."""

    def stop(self) -> None:
        """From another thread: a read() that waits ends soon."""

    def close(self) -> None:
        """Let go of it."""


class Source(Protocol):
    """Errors of all: BuildFailed('image', reason), and of them Away."""

    def open(self, known: Version | None) -> Stream | None:
        """The image, or None if it is the one that is known."""

    def sums(self) -> str | None:
        """The SHA256SUMS in the same directory; None if there is none."""


class Remote:
    """An image on a web server. `url` has no fragment."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = requests.Session()

    def open(self, known: Version | None) -> Stream | None:
        """See Source."""
        headers = {}
        if known is not None and known.etag:
            headers['if-none-match'] = known.etag
        if known is not None and known.modified:
            headers['if-modified-since'] = known.modified
        with _said(self._url):
            answer = self._get(self._url, headers)
            if known is not None and answer.status_code == 304:
                answer.close()
                return None
            if answer.status_code != 200:
                raise self._unwelcome(answer)
            stream = _Body(self._url, answer)
            # Not every server looks at what it is asked.
            if known is not None and known.is_same(stream.version):
                stream.close()
                return None
            return stream

    def sums(self) -> str | None:
        """See Source."""
        url = urljoin(self._url, SUMS)
        with _said(url):
            answer = self._get(url, {})
            with answer:
                if 400 <= answer.status_code < 500 and answer.status_code != 429:
                    return None  # many servers say 403 of what is not there
                if answer.status_code != 200:
                    raise self._unwelcome(answer, f'{url}: ')
                text = b''
                while len(text) <= MOST_SUMS and (chunk := answer.raw.read1(CHUNK, decode_content=False)):
                    text += chunk
        if len(text) > MOST_SUMS:
            raise BuildFailed('image', f'{url}: is too long for checksums; put #sha256=… on the URL of the image')
        return text.decode(errors='replace')

    def _unwelcome(self, answer: requests.Response, what: str = '') -> BuildFailed:
        answer.close()
        reason = f'{what or self._url + ": "}the server answers HTTP {answer.status_code} {answer.reason}'
        passing = answer.status_code >= 500 or answer.status_code == 429
        return Away('image', reason) if passing else BuildFailed('image', reason)

    def _get(self, url: str, headers: Mapping[str, str]) -> requests.Response:
        """The answer to a GET, redirects followed by us: each hop is checked like the first URL."""
        here = url
        headers = {'accept-encoding': 'identity', **headers}
        for _ in range(REDIRECTS + 1):
            _check_host(url, here)
            answer = self._session.get(here, stream=True, timeout=TIMEOUT, allow_redirects=False, headers=headers)
            if not answer.is_redirect:
                return answer
            answer.close()
            here = urldefrag(urljoin(here, answer.headers['location'])).url
            try:
                check_image(here)
            except ValueError as error:
                raise BuildFailed('image', f'{url}: redirected: {error}') from error
            if urlsplit(here).scheme == 'file':
                raise BuildFailed('image', f'{url}: redirected to a local file, which is not followed')
        raise BuildFailed('image', f'{url}: more than {REDIRECTS} redirects')


class _Body:
    """The body of an answer."""

    def __init__(self, url: str, answer: requests.Response) -> None:
        self._url = url
        self._answer = answer
        length = answer.headers.get('content-length', '')
        self.version = Version(
            answer.headers.get('etag', ''),
            answer.headers.get('last-modified', ''),
            int(length) if length.isdecimal() and length.isascii() else None,
        )

    def read(self) -> bytes:
        """See Stream."""
        with _said(self._url):
            # Not iter_content: it would unpack what is transferred with gzip, bombs included. read1, or a slow drip
            # would be inside one read, deadline or not.
            return bytes(self._answer.raw.read1(CHUNK, decode_content=False))

    def stop(self) -> None:
        """See Stream."""
        with suppress(ValueError, RuntimeError, OSError):  # it has ended already
            self._answer.raw.shutdown()

    def close(self) -> None:
        """See Stream."""
        self._answer.close()


class Local:
    """An image in `directory`, the only one that file:// URLs may point into; None: they may not at all."""

    def __init__(self, url: str, directory: Path | None) -> None:
        self._url = url
        self._directory = directory

    def open(self, known: Version | None) -> Stream | None:
        """See Source."""
        with _said(self._url):
            path = self._path()
            if not path.is_file():
                raise BuildFailed('image', f'{self._url}: no such file on this compute')
            stream = _File(self._url, path)
            if known is not None and known.is_same(stream.version):
                stream.close()
                return None
            return stream

    def sums(self) -> str | None:
        """See Source."""
        with _said(self._url):
            path = self._path().with_name(SUMS)
            if not path.is_file():
                return None
            with path.open('rb') as file:
                return file.read(MOST_SUMS).decode(errors='replace')

    def _path(self) -> Path:
        if self._directory is None:
            raise BuildFailed(
                'image', f'{self._url}: this compute takes no local images: set `images:` in its compute.yaml'
            )
        path = Path(unquote(urlsplit(self._url).path)).resolve()
        if not path.is_relative_to(self._directory.resolve()):
            raise BuildFailed('image', f'{self._url}: only images under {self._directory} are taken here')
        return path


class _File:
    """A file that is read."""

    def __init__(self, url: str, path: Path) -> None:
        self._url = url
        self._file = path.open('rb')
        found = path.stat()
        self.version = Version(f'{found.st_ino}-{found.st_size}-{found.st_mtime_ns}', '', found.st_size)

    def read(self) -> bytes:
        """See Stream."""
        with _said(self._url):
            return self._file.read(CHUNK)

    def stop(self) -> None:
        """See Stream."""

    def close(self) -> None:
        """See Stream."""
        self._file.close()


def source(url: str, local: Path | None) -> Source:
    """Where the image at a URL that check_image() let through, without its fragment, comes from."""
    return Local(url, local) if urlsplit(url).scheme == 'file' else Remote(url)


@contextmanager
def _said(url: str) -> Iterator[None]:
    """What goes wrong inside, in words."""
    try:
        yield
    except (requests.Timeout, requests.ConnectionError) as error:
        silent = isinstance(error, requests.Timeout)
        reason = 'the server gives no answer in time' if silent else 'the server cannot be reached'
        raise Away('image', f'{url}: {reason}') from error
    except HTTPError as error:
        raise Away('image', f'{url}: the connection broke: {type(error).__name__}') from error
    except requests.RequestException as error:
        raise BuildFailed('image', f'{url}: {type(error).__name__}') from error
    except OSError as error:
        raise BuildFailed('image', f'{url}: cannot be read: {error.strerror}') from error
    except (ValueError, RuntimeError) as error:
        # A redirect to what is no URL, a zero byte in a path, a link that leads to itself.
        raise BuildFailed('image', f'{url}: {error}') from error


def _check_host(url: str, here: str) -> None:
    """Nothing is fetched from a link-local address: there are metadata services, and what they say is a secret."""
    host = urlsplit(here).hostname
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return  # the request that follows says it
    for *_, (address, *_) in found:
        ip = ipaddress.ip_address(str(address).partition('%')[0])
        if (getattr(ip, 'ipv4_mapped', None) or ip).is_link_local:
            raise BuildFailed('image', f'{url}: {host} is {ip}, a link-local address: no image is taken from there')
