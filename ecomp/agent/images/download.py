"""Check and download images, from a web server (urllib3) or a directory of this host.

A source is asked with the cached version; it returns a stream of the image, or None if it still has that version. Reads
from a server and DNS lookups block and cannot be interrupted, but a destroy must not wait for them. So a thread of its
own does both, and its caller may abandon that thread.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from urllib3 import BaseHTTPResponse
from urllib3.exceptions import HTTPError, LocationValueError, NewConnectionError, ProxyError, TimeoutError

from ecomp.agent.images.connections import Connections, Reach, Refused
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.image import check_image, sum_of
from ecomp.tls import SENTENCES, TlsFailure, tls_failure

log = logging.getLogger(__name__)

CHUNK = 1024**2  # bytes of one read, at most
SUMS = 'SHA256SUMS'
MOST_SUMS = 1024**2

# Time to connect, and between two reads; a server that takes longer is unavailable.
TIMEOUT = (5.0, 60.0)
# The same for a HEAD: after it a GET must fit into MAX_CHECK_SECONDS.
HEAD_TIMEOUT = (2.0, 2.0)
REDIRECTS = 5

# http.client's error for a proxy that opens no tunnel to an https server.
TUNNEL = re.compile('Tunnel connection failed: ([0-9]{3}) ')
# Messages about an image server's certificate, to which `ca_cert` does not apply.
IMAGE_SERVER_SENTENCES = {
    **{each: SENTENCES[each] for each in (TlsFailure.EXPIRED, TlsFailure.NOT_YET_VALID, TlsFailure.OTHER_NAME)},
    TlsFailure.OTHER_ADDRESS: 'its certificate is made out to another address',
    TlsFailure.TOO_WEAK: SENTENCES[TlsFailure.TOO_WEAK],
    TlsFailure.NO_KEY_IDENTIFIER: 'its certificate is not believed here',
    TlsFailure.UNTRUSTED: 'its certificate is not believed here',
}

# Time for a whole download: a timeout between two reads alone would let a slow server drip for ever.
DEADLINE = 3600.0
# Time for an answer of a server, including redirects, and again for SHA256SUMS; then the download fails.
ANSWER = 60.0
# A download that is slower than this rate for this period fails.
RATE = 64 * 2**10
SPELL = 60.0
# Room that is reserved in advance if a server sends no length: reads are small, and each reservation lists the whole
# directory.
AHEAD = 64 * 2**20
# Time for an answer about a cached image; then the cached one is used.
PATIENCE = 10.0
# Head start of the thread that uses the cached image: libvirt takes longer for a disk than the check takes, and in
# Python two busy threads share one processor.
HEAD_START = 0.001
TICK = 0.2  # seconds between two calls of the checkpoint
TOLD_EVERY = 1.0  # seconds between two calls of Tell

# Called with the bytes downloaded and the total (None: unknown), at most once a second and if there are more.
Tell = Callable[[int, int | None], None]


class Away(BuildFailed):
    """The server does not answer now, but may later; until then its cached image is used."""


@dataclass(frozen=True)
class Version:
    """A version of the image at a URL: its server's ETag, its date, and the length in bytes.

    '' and None: the server does not say. `answered` is the URL after redirects, without its query, which may be a
    signature; '' in files of an older ecomp.
    """

    etag: str = ''
    modified: str = ''
    length: int | None = None
    answered: str = ''

    def is_same(self, other: Version) -> bool:
        """Compare the ETags; without ETags compare date and length, if either is known.

        ETags of two URLs, such as the mirrors that a URL is redirected to, cannot be compared (RFC 9110, 8.8.3). Then,
        and if only one version has an ETag, date and length must be known and the same.
        """
        moved = bool(self.answered and other.answered) and self.answered != other.answered
        if self.etag and other.etag and (self.etag == other.etag or not moved):
            return self.etag == other.etag
        known_fields = (bool(self.modified), self.length is not None)
        is_known = all(known_fields) if moved or self.etag or other.etag else any(known_fields)
        return is_known and (self.modified, self.length) == (other.modified, other.length)


@dataclass(frozen=True)
class Download:
    """A downloaded image: SHA-256, size in bytes, and the server's version."""

    sha256: str
    size: int
    version: Version


@dataclass(frozen=True)
class Stream:
    """The bytes of an image from the first one, and their version."""

    version: Version
    # The next bytes, at most CHUNK_BYTES; none at the end.
    read: Callable[[], bytes]
    close: Callable[[], None]


class Local:
    """An image of this host in `directory`, where file:// URLs may point; None refuses them."""

    def __init__(self, url: str, directory: Path | None) -> None:
        self._url = url
        self._directory = directory

    def open(self, known: Version | None) -> Stream | None:
        with _translate_errors(self._url):
            path = self._path()
            if not path.is_file():
                raise BuildFailed('image', f'{self._url}: no such file on this compute')
            file = path.open('rb')
            status = os.fstat(file.fileno())  # of the open file: its name may have another one now
            version = Version(f'{status.st_ino}-{status.st_size}-{status.st_mtime_ns}', '', status.st_size)
            read = _translate_errors(self._url)(partial(file.read, CHUNK))
            return _unless_known(known, Stream(version, read, file.close))

    def is_still(self, version: Version) -> bool:
        if (newer := self.open(version)) is not None:
            newer.close()
        return newer is None

    def sums(self) -> str | None:
        with _translate_errors(self._url):
            path = self._path().with_name(SUMS)
            if not path.is_file():
                return None
            with path.open('rb') as file:
                return file.read(MOST_SUMS).decode(errors='replace')

    def stop(self) -> None:
        """No-op: nothing waits."""

    def close(self) -> None:
        """No-op: nothing is open."""

    def _path(self) -> Path:
        if self._directory is None:
            raise BuildFailed(
                'image', f'{self._url}: this compute takes no local images: set `images:` in its compute.yaml'
            )
        path = Path(unquote(urlsplit(self._url).path)).resolve()
        if not path.is_relative_to(self._directory.resolve()):
            raise BuildFailed('image', f'{self._url}: only images under {self._directory} are taken here')
        return path


class Remote:
    """An image on a web server; `url` has no fragment."""

    def __init__(self, url: str, reach: Reach) -> None:
        self._url = url
        self._connections = Connections(reach)
        self._found_at = url

    def open(self, known: Version | None) -> Stream | None:
        """Return a stream of the image, or None if the server still has `cached_version`."""
        return self._opened(self._url, known)

    def is_still(self, version: Version) -> bool:
        """Return whether the server still has this version, at the URL that open() was answered by."""
        # Ask that URL, because a redirect may lead to another mirror each time.
        try:
            newer = self._opened(self._found_at, version)
        except Away:
            raise
        except BuildFailed:
            if self._found_at == self._url:
                raise
            newer = self._opened(self._url, version)  # that URL was valid for a short time, such as a signed one
        if newer is not None:
            newer.close()
        return newer is None

    def _opened(self, url: str, known: Version | None) -> Stream | None:
        # No if-modified-since: an older image is "not modified since" as well, and may be another one.
        headers = {'if-none-match': known.etag} if known is not None and known.etag else {}
        if known is not None and known.modified and not known.etag and self._says_by_head(url, known):
            return None
        with _translate_errors(self._url):
            answer, self._found_at = self._ask('GET', url, headers)
            if known is not None and answer.status == 304:
                answer.close()
                return None
            if answer.status != 200:
                raise self._unwelcome(answer)
            # Undecoded: gzip could be a bomb. read1, because a slow server could keep one read waiting past the
            # deadline.
            read = _translate_errors(self._url)(partial(answer.read1, CHUNK, decode_content=False))
            return _unless_known(known, Stream(_version(answer, self._found_at), read, answer.close))

    def _says_by_head(self, url: str, known: Version) -> bool:
        """Return whether a HEAD confirms the cached version: not every server answers it as a GET."""
        with suppress(BuildFailed), _translate_errors(self._url):
            answer, found_at = self._ask('HEAD', url, {})
            answer.close()
            return answer.status == 200 and known.is_same(_version(answer, found_at))
        return False

    def sums(self) -> str | None:
        """Return the text of SHA256SUMS in the image's directory; None if there is none."""
        url = urljoin(self._url, SUMS)
        with _translate_errors(url):
            answer, _ = self._ask('GET', url, {})
            with closing(answer):
                if 400 <= answer.status < 500 and answer.status != 429:
                    return None  # many servers answer 403 for a missing file
                if answer.status != 200:
                    raise self._unwelcome(answer, f'{url}: ')
                text = b''
                while len(text) <= MOST_SUMS and (chunk := answer.read1(CHUNK, decode_content=False)):
                    text += chunk
        if len(text) > MOST_SUMS:
            raise BuildFailed('image', f'{url}: is too long for checksums; put #sha256=… on the URL of the image')
        return text.decode(errors='replace')

    def stop(self) -> None:
        """Interrupt every wait, also that of read(), and ask no more. For another thread."""
        self._connections.stop()

    def close(self) -> None:
        self._connections.close()

    def _unwelcome(self, answer: BaseHTTPResponse, what: str = '') -> BuildFailed:
        answer.close()
        reason = f'{what or self._url + ": "}the server answers HTTP {_status(answer.status)}'
        is_temporary = answer.status >= 500 or answer.status == 429
        return Away('image', reason) if is_temporary else BuildFailed('image', reason)

    def _ask(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[BaseHTTPResponse, str]:
        """Return the response and the URL that sent it; each redirect is checked like a first URL."""
        current_url, timeout = url, HEAD_TIMEOUT if method == 'HEAD' else TIMEOUT
        for hop in range(REDIRECTS + 1):
            try:
                answer = self._connections.ask(method, current_url, timeout, headers)
            except Refused as refused:
                reason = f'redirected to {refused.what}' if hop else f'{refused.where}, {refused.what}'
                raise BuildFailed('image', f'{url}: {reason}: no image is taken from there') from refused
            except LocationValueError as error:
                raise BuildFailed('image', f'{url}: names no server that can be asked') from error
            except HTTPError as error:
                raise Away('image', f'{url}: {why_away(error)}') from error
            location = answer.get_redirect_location()
            if not location:
                if answer.headers.get('content-encoding', 'identity').lower() in ('', 'identity'):
                    return answer, current_url
                answer.close()
                reason = 'the server sends it packed (Content-Encoding). Fix: have the server send the file as it is'
                raise BuildFailed('image', f'{url}: {reason}')
            answer.close()
            current_url = _redirected(url, current_url, location)
        raise BuildFailed('image', f'{url}: more than {REDIRECTS} redirects')


# A place that images come from. Raises ServerUnavailable and BuildFailed('image', reason); no reason quotes a server's
# answer.
Source = Local | Remote


def source(url: str, local: Path | None, reach: Reach) -> Source:
    """Make the source for `url`, which check_image() accepted and which has no fragment."""
    return Local(url, local) if urlsplit(url).scheme == 'file' else Remote(url, reach)


def _version(answer: BaseHTTPResponse, found_at: str) -> Version:
    # A chunked response is as long as its chunks, whatever its content-length (RFC 9112, 6.3).
    length = '' if 'transfer-encoding' in answer.headers else answer.headers.get('content-length', '')
    return Version(
        answer.headers.get('etag', ''),
        answer.headers.get('last-modified', ''),
        int(length) if length.isdecimal() and length.isascii() else None,
        found_at.partition('?')[0],
    )


def _unless_known(known: Version | None, stream: Stream) -> Stream | None:
    """Close the stream, and return None, if it has the cached version: some servers send it."""
    if known is not None and known.is_same(stream.version):
        stream.close()
        return None
    return stream


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Turn errors of the block into BuildFailed or ServerUnavailable with a reason for users."""
    try:
        yield
    except HTTPError as error:
        raise Away('image', f'{url}: the connection broke: {type(error).__name__}') from error
    except OSError as error:
        raise BuildFailed('image', f'{url}: cannot be read: {error.strerror}') from error
    except (ValueError, RuntimeError) as error:  # from a file: a zero byte in its path, or a cyclic link
        is_local = urlsplit(url).scheme == 'file'
        # Such an error may quote the server's answer.
        raise BuildFailed('image', f'{url}: {error if is_local else "what the server answers is not HTTP"}') from error


def why_away(error: HTTPError) -> str:
    """Describe why a server gives no answer, without quoting it."""
    server = 'the proxy' if isinstance(error, ProxyError) else 'the server'
    if isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError):
        return f'{server} gives no answer in time'
    causes: list[BaseException] = [error]
    for cause_error in causes:  # grows during the loop: urllib3 wraps errors repeatedly
        inner = (cause_error.__cause__, *cause_error.args, getattr(cause_error, 'reason', None))
        causes += [cause for cause in inner if isinstance(cause, BaseException) and cause not in causes]
    if (answered := next(filter(None, (TUNNEL.match(str(cause_error)) for cause_error in causes)), None)) is not None:
        return f'the proxy answers HTTP {_status(int(answered[1]))}'
    return f'{server} cannot be reached' + next((f': {detail}' for detail in map(_cause, causes) if detail), '')


def _cause(error: BaseException) -> str | None:
    if isinstance(error, socket.gaierror):
        is_missing = error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        return 'there is no such name' if is_missing else 'its name cannot be looked up: is there a name server?'
    if isinstance(error, ssl.SSLError):
        return IMAGE_SERVER_SENTENCES.get(tls_failure(error), 'it does not speak TLS as this host does')
    if isinstance(error, ConnectionRefusedError):
        return 'it refuses the connection: nothing listens on that port'
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return 'there is no route to it'
    return 'the connection broke' if isinstance(error, ConnectionError) else None


def _status(code: int) -> str:
    """Format a status code with HTTP's name: the one in the response is the server's text."""
    try:
        return f'{code} {HTTPStatus(code).phrase}'
    except ValueError:
        return str(code)


def _redirected(url: str, here: str, location: str) -> str:
    """Return the URL to follow to `location`; BuildFailed, not quoting it, if it is refused."""
    try:
        target = check_image(urldefrag(urljoin(here, location)).url)
    except ValueError:
        reason = 'what is no URL of an image, or has a user or a password'
        raise BuildFailed('image', f'{url}: redirected to {reason}, which is not followed') from None
    if urlsplit(target).scheme == 'file':
        raise BuildFailed('image', f'{url}: redirected to a local file, which is not followed')
    return target


@dataclass(eq=False)
class Transfer:
    """A check of the image of `url`, and its download to `part` if the cached one is outdated.

    `pin` is the SHA-256 that the content must have, None for any. `reserve(descriptor, size, ahead)` is called before
    the file grows to `size` bytes, and returns to how many it may grow, at most `ahead` more.
    """

    url: str
    source: Source
    known: Version | None
    pin: str | None
    part: Path
    reserve: Callable[[int, int, int], int]

    def __post_init__(self) -> None:
        self._given_up = False
        self._has_answered = threading.Event()
        self._may_download = threading.Event()
        self._ended = threading.Event()
        self.began = 0.0
        self._file: IO[bytes] | None = None
        self._result: Download | BaseException | None = None
        self._waits_for: tuple[str, float] | None = None
        self._downloads = False
        self._done = 0
        self._total: int | None = None

    def ask(self) -> None:
        """Start the check. is_current() and run() follow it, and abandon() in any case."""
        self.began = time.monotonic()
        threading.Thread(target=self._run, name='download', daemon=True).start()

    def is_known(self, checkpoint: Callable[[], None]) -> bool:
        """Wait until it is known whether the cached image is current. Raises what run() raises."""
        self._wait(self._has_answered, checkpoint, lambda *_: None)
        return self._ended.is_set()

    def run(self, checkpoint: Callable[[], None], tell: Tell) -> Download:
        """Download the new image. Raises BuildFailed, OSError and what the checkpoint raises."""
        self._wait(self._has_answered, checkpoint, lambda *_: None)
        # Not in the thread: an abandoned one could open the file when it is another download's.
        self._file = self.part.open('wb')
        self._may_download.set()
        self._wait(self._ended, checkpoint, tell)
        assert isinstance(self._result, Download)  # an error was raised by _wait()
        return self._result

    def give_up(self) -> None:
        """Abandon the transfer, if unfinished: what its thread still writes is discarded."""
        self._given_up = True
        self._may_download.set()
        self.source.stop()

    def _wait(self, event: threading.Event, checkpoint: Callable[[], None], tell: Tell) -> None:
        reported_at = time.monotonic()
        reported = 0
        pace = _Pace()
        while not event.wait(TICK):
            checkpoint()
            now = time.monotonic()
            if self.known is not None and not self._has_answered.is_set() and now - self.began > PATIENCE:
                raise Away('image', f'{self.url}: the server gives no answer in time')
            if (wait := self._waits_for) is not None and now - wait[1] > ANSWER:
                raise Away('image', f'{self.url}: no {wait[0]} after {ANSWER:g} s')
            if self._downloads and pace.is_slow(now, self._done):
                slow = f'less than {RATE // 2**10} KiB/s for {SPELL:g} s'
                raise Away('image', f'{self.url}: {slow}, {self._done} bytes so far')
            if now - self.began > DEADLINE:
                raise Away('image', f'{self.url}: not here after {DEADLINE:g} s, {self._done} bytes so far')
            if now - reported_at >= TOLD_EVERY and self._done != reported:
                reported, reported_at = self._done, now
                tell(reported, self._total)
        if isinstance(self._result, BaseException):
            raise self._result

    def _run(self) -> None:
        if self.known is not None:
            time.sleep(HEAD_START)
        try:
            self._result = self._fetch()
        except BaseException as error:
            self._result = error
        finally:
            self.source.close()
            self._ended.set()
            self._has_answered.set()

    def _fetch(self) -> Download | None:
        with self._waiting('answer'):
            stream = self.source.open(self.known)
        if stream is None:
            return None
        self._has_answered.set()
        with closing(stream):
            self._may_download.wait()
            if self._file is None:
                raise _GivenUp
            with self._file as file:
                return self._fetch_into(file, stream)

    def _fetch_into(self, file: IO[bytes], stream: Stream) -> Download:
        expected = self.pin
        if expected is None:
            with self._waiting(SUMS):
                sums = self.source.sums()
            expected = None if sums is None else sum_of(sums, self.url)
        result = self._download(stream, file, expected)
        return result if expected is not None or self._is_still(result.version) else self._fetch_again(file, result)

    def _fetch_again(self, file: IO[bytes], first: Download) -> Download:
        """Download again: servers of one name may differ in version. BuildFailed if in content."""
        with self._waiting('answer'):
            stream = self.source.open(None)
        assert stream is not None  # without a cached version there is a stream
        with closing(stream):
            self._done = file.seek(0)
            file.truncate()
            again = self._download(stream, file, None)
        fix = 'put #sha256=… on its URL, and its server is asked once'
        if again.sha256 != first.sha256:
            raise BuildFailed('image', f'{self.url}: changed while it was downloaded: ask again, or {fix}')
        log.warning('%s: downloaded twice, for its server names another version each time. Fix: %s', self.url, fix)
        modified = again.version.modified if again.version.modified == first.version.modified else ''
        return replace(again, version=replace(again.version, etag='', modified=modified))

    def _download(self, stream: Stream, file: IO[bytes], expected: str | None) -> Download:
        length = self._total = stream.version.length
        digest = hashlib.sha256()
        reserved = self.reserve(file.fileno(), length, 0) if length else 0
        failpoint('image-begun')
        self._downloads = True
        while chunk := stream.read():
            if self._given_up:
                raise _GivenUp
            if self._done + len(chunk) > reserved:
                if length is not None:
                    raise BuildFailed('image', f'{self.url}: sends more than the {length} bytes that it has announced')
                reserved = self.reserve(file.fileno(), self._done + len(chunk), AHEAD)
            if chunk == bytes(len(chunk)):
                file.seek(len(chunk), os.SEEK_CUR)  # leaves a hole: a sparse image stays sparse
            else:
                file.write(chunk)
            digest.update(chunk)
            self._done += len(chunk)
        self._downloads = False
        if length is not None and length != self._done:
            raise BuildFailed('image', f'{self.url}: cut off after {self._done} of {length} bytes')
        if not self._done:
            raise BuildFailed('image', f'{self.url}: is empty')
        if expected not in (None, digest.hexdigest()):
            origin = 'its URL' if self.pin else f'the {SUMS} beside it'
            raise BuildFailed('image', f'{self.url}: its SHA-256 is {digest.hexdigest()}, and {origin} says {expected}')
        file.truncate(self._done)  # release what was reserved in advance
        file.flush()
        os.fsync(file.fileno())
        return Download(digest.hexdigest(), self._done, stream.version)

    def _is_still(self, version: Version) -> bool:
        """Return whether the server still has this version; True if unversioned or unavailable."""
        if not version.etag and not version.modified:
            return True
        with suppress(Away), self._waiting('answer'):
            return self.source.is_still(version)
        return True

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Allow MAX_ANSWER_SECONDS for the block, which waits for `awaited`."""
        self._waits_for = what, time.monotonic()
        try:
            yield
        finally:
            self._waits_for = None


class _Pace:
    """Finds whether a download is too slow, once in each SLOW_PERIOD_SECONDS."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._done = 0

    def is_slow(self, now: float, done: int) -> bool:
        """Return whether the period that ends at `now` was too slow; `done_bytes` came in all."""
        if self._since is not None and now - self._since < SPELL:
            return False
        # Fewer bytes than before mean that a second download began.
        slow = self._since is not None and 0 <= done - self._done < RATE * (now - self._since)
        self._since, self._done = now, done
        return slow


class _GivenUp(Exception):
    """The caller of a Transfer has abandoned it."""
