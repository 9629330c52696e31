"""Check and download images, from a web server (urllib3) or a directory of this host.

A source is asked with the cached version; it returns a stream, or None if it still has that version. Reads and DNS
lookups cannot be interrupted, but a destroy must not wait for them: a thread does both, and its caller may abandon it.
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

from ecomp.agent.images.connections import AddressRefused, Connections, EgressPolicy
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.image import UNLISTED, check_image, find_sha256
from ecomp.tls import SENTENCES, TlsFailure, classify_tls_error

log = logging.getLogger(__name__)

CHUNK_BYTES = 1024**2  # bytes of one read, at most
SUMS_FILE = 'SHA256SUMS'
MAX_SUMS_BYTES = 1024**2

# Time to connect, and between two reads; a server that takes longer is unavailable.
TIMEOUT_SECONDS = (5.0, 60.0)
# The same for a HEAD: after it a GET must fit into MAX_CHECK_SECONDS.
HEAD_TIMEOUT_SECONDS = (2.0, 2.0)
MAX_REDIRECTS = 5

# http.client's error for a proxy that opens no tunnel to an https server.
TUNNEL_FAILURE = re.compile('Tunnel connection failed: ([0-9]{3}) ')
# Messages about an image server's certificate, to which `ca_cert` does not apply.
IMAGE_SERVER_SENTENCES = {
    **{each: SENTENCES[each] for each in (TlsFailure.EXPIRED, TlsFailure.NOT_YET_VALID, TlsFailure.OTHER_NAME)},
    TlsFailure.OTHER_ADDRESS: 'its certificate is for another address',
    TlsFailure.TOO_WEAK: SENTENCES[TlsFailure.TOO_WEAK],
    TlsFailure.NO_KEY_IDENTIFIER: 'its certificate is not trusted by this host',
    TlsFailure.UNTRUSTED: 'its certificate is not trusted by this host',
}

# Time for a whole download: a timeout between two reads alone would let a slow server drip for ever.
MAX_DOWNLOAD_SECONDS = 3600.0
# Time for an answer of a server, including redirects, and again for SHA256SUMS; then the download fails.
MAX_ANSWER_SECONDS = 60.0
# A download that is slower than this rate for this period fails.
MIN_BYTES_PER_SECOND = 64 * 2**10
SLOW_PERIOD_SECONDS = 60.0
# Room reserved in advance if a server sends no length: reads are small, and a reservation lists the whole directory.
RESERVE_AHEAD_BYTES = 64 * 2**20
# Time for an answer about a cached image; then the cached one is used.
MAX_CHECK_SECONDS = 10.0
# Head start of the thread that uses the cached image: libvirt takes longer than the check, and threads share the GIL.
HEAD_START_SECONDS = 0.001
CHECKPOINT_SECONDS = 0.2  # seconds between two calls of the checkpoint
REPORT_SECONDS = 1.0  # seconds between two calls of a ProgressCallback

# Called with the bytes downloaded and the total (None: unknown), at most once a second and if there are more.
ProgressCallback = Callable[[int, int | None], None]


class ServerUnavailable(BuildFailed):
    """The server does not answer now, but may later; until then its cached image is used."""


@dataclass(frozen=True)
class Version:
    """A version of the image at a URL: its server's ETag, its date, and the length in bytes.

    '' and None mean unknown. `answered` is the URL after redirects, without its query, which may be a signature.
    """

    etag: str = ''
    modified: str = ''
    length: int | None = None
    answered: str = ''

    def is_same(self, other: Version) -> bool:
        """Compare the ETags; without ETags compare date and length, if either is known.

        ETags of two URLs, as of mirrors after redirects, cannot be compared (RFC 9110, 8.8.3). Then, and if only one
        version has an ETag, date and length must be known and the same.
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


class LocalSource:
    """An image of this host in `directory`, where file:// URLs may point; None refuses them."""

    def __init__(self, url: str, directory: Path | None) -> None:
        self._url = url
        self._directory = directory

    def open(self, cached_version: Version | None) -> Stream | None:
        """Return a stream, or None if it still is `cached_version`; BuildFailed if refused, missing or unreadable."""
        with _translate_errors(self._url):
            path = self._resolve_path()
            if not path.is_file():
                raise BuildFailed('image', f'{self._url}: no such file on this host')
            file = path.open('rb')
            status = os.fstat(file.fileno())  # of the open file: its name may have another one now
            version = Version(f'{status.st_ino}-{status.st_size}-{status.st_mtime_ns}', '', status.st_size)
            read = _translate_errors(self._url)(partial(file.read, CHUNK_BYTES))
            return _close_if_cached(cached_version, Stream(version, read, file.close))

    def confirm_version(self, version: Version) -> bool:
        """Return whether the file still has this version. Raises BuildFailed as open() does."""
        if (newer := self.open(version)) is not None:
            newer.close()
        return newer is None

    def read_sums(self) -> str | None:
        """Return the first MAX_SUMS_BYTES of SHA256SUMS beside the file; None if absent. Raises BuildFailed."""
        with _translate_errors(self._url):
            path = self._resolve_path().with_name(SUMS_FILE)
            if not path.is_file():
                return None
            with path.open('rb') as file:
                return file.read(MAX_SUMS_BYTES).decode(errors='replace')

    def stop(self) -> None:
        """No-op: nothing waits."""

    def close(self) -> None:
        """No-op: nothing is open."""

    def _resolve_path(self) -> Path:
        """Return the file's path, links resolved; BuildFailed if it is not under `directory`."""
        if self._directory is None:
            raise BuildFailed(
                'image', f'{self._url}: this host accepts no local images. Fix: set `images:` in its compute.yaml'
            )
        path = Path(unquote(urlsplit(self._url).path)).resolve()
        if not path.is_relative_to(self._directory.resolve()):
            raise BuildFailed('image', f'{self._url}: this host accepts only local images under {self._directory}')
        return path


class RemoteSource:
    """An image on a web server; `url` has no fragment."""

    def __init__(self, url: str, egress: EgressPolicy) -> None:
        self._url = url
        self._connections = Connections(egress)
        self._found_at = url

    def open(self, cached_version: Version | None) -> Stream | None:
        """Return a stream of the image, or None if the server still has `cached_version`.

        Follows up to MAX_REDIRECTS. Raises ServerUnavailable (no answer, HTTP 5xx, 429) or BuildFailed; no retries.
        """
        return self._open_url(self._url, cached_version)

    def confirm_version(self, version: Version) -> bool:
        """Return whether the URL that answered open(), or else the image's own, has this version. Raises as open()."""
        # Ask that URL, because a redirect may lead to another mirror each time.
        try:
            newer = self._open_url(self._found_at, version)
        except ServerUnavailable:
            raise
        except BuildFailed:
            if self._found_at == self._url:
                raise
            newer = self._open_url(self._url, version)  # that URL was valid for a short time, such as a signed one
        if newer is not None:
            newer.close()
        return newer is None

    def _open_url(self, url: str, cached_version: Version | None) -> Stream | None:
        """Do as open() from `url`; store the URL that answered. If a date but no ETag is cached, send a HEAD first."""
        # No if-modified-since: an older image is "not modified since" as well, and may be another one.
        headers = {'if-none-match': cached_version.etag} if cached_version is not None and cached_version.etag else {}
        if (
            cached_version is not None
            and cached_version.modified
            and not cached_version.etag
            and self._confirm_by_head(url, cached_version)
        ):
            return None
        with _translate_errors(self._url):
            answer, self._found_at = self._request('GET', url, headers)
            if cached_version is not None and answer.status == 304:
                answer.close()
                return None
            if answer.status != 200:
                raise self._make_status_error(answer)
            # Undecoded: gzip could be a bomb. read1: a slow server could keep one read waiting past the deadline.
            read = _translate_errors(self._url)(partial(answer.read1, CHUNK_BYTES, decode_content=False))
            return _close_if_cached(cached_version, Stream(_parse_version(answer, self._found_at), read, answer.close))

    def _confirm_by_head(self, url: str, cached_version: Version) -> bool:
        """Return whether a HEAD confirms the cached version; False on failure: some servers treat it unlike a GET."""
        with suppress(BuildFailed), _translate_errors(self._url):
            answer, found_at = self._request('HEAD', url, {})
            answer.close()
            return answer.status == 200 and cached_version.is_same(_parse_version(answer, found_at))
        return False

    def read_sums(self) -> str | None:
        """Return SHA256SUMS in the image's directory; None if absent (HTTP 4xx but 429).

        Raises what open() raises, and BuildFailed if it is longer than MAX_SUMS_BYTES.
        """
        url = urljoin(self._url, SUMS_FILE)
        with _translate_errors(url):
            answer, _ = self._request('GET', url, {})
            with closing(answer):
                if 400 <= answer.status < 500 and answer.status != 429:
                    return None  # many servers answer 403 for a missing file
                if answer.status != 200:
                    raise self._make_status_error(answer, f'{url}: ')
                text = b''
                while len(text) <= MAX_SUMS_BYTES and (chunk := answer.read1(CHUNK_BYTES, decode_content=False)):
                    text += chunk
        if len(text) > MAX_SUMS_BYTES:
            reason = f'is longer than {MAX_SUMS_BYTES // 2**20} MiB. Fix: add #sha256=… to the URL of the image'
            raise BuildFailed('image', f'{url}: {reason}')
        return text.decode(errors='replace')

    def stop(self) -> None:
        """Interrupt every wait, also that of read(), and ask no more. For another thread."""
        self._connections.stop()

    def close(self) -> None:
        """Interrupt every wait, as stop() does, and drop the idle connections."""
        self._connections.close()

    def _make_status_error(self, answer: BaseHTTPResponse, prefix: str = '') -> BuildFailed:
        """Close the answer; make ServerUnavailable for 5xx and 429, else BuildFailed. `prefix` replaces the URL."""
        answer.close()
        reason = f'{prefix or self._url + ": "}the server returned HTTP {_format_status(answer.status)}'
        is_temporary = answer.status >= 500 or answer.status == 429
        return ServerUnavailable('image', reason) if is_temporary else BuildFailed('image', reason)

    def _request(self, method: str, url: str, headers: Mapping[str, str]) -> tuple[BaseHTTPResponse, str]:
        """Return the response, of any status, and the URL that sent it, after up to MAX_REDIRECTS.

        Redirects are checked like a first URL. Raises ServerUnavailable (no answer), BuildFailed (refused, compressed).
        """
        current_url, timeout = url, HEAD_TIMEOUT_SECONDS if method == 'HEAD' else TIMEOUT_SECONDS
        for hop in range(MAX_REDIRECTS + 1):
            try:
                answer = self._connections.request(method, current_url, timeout, headers)
            except AddressRefused as refused:
                direct = f'{refused.target}, {refused.reason}: images from there are refused'
                reason = f'redirected to a refused address ({refused.reason})' if hop else direct
                raise BuildFailed('image', f'{url}: {reason}', not hop and refused.reason == UNLISTED) from refused
            except LocationValueError as error:
                raise BuildFailed('image', f'{url}: the host name is malformed') from error
            except HTTPError as error:
                raise ServerUnavailable('image', f'{url}: {describe_failure(error)}') from error
            location = answer.get_redirect_location()
            if not location:
                if answer.headers.get('content-encoding', 'identity').lower() in ('', 'identity'):
                    return answer, current_url
                answer.close()
                reason = 'the server compresses it (Content-Encoding). Fix: have the server send the file as it is'
                raise BuildFailed('image', f'{url}: {reason}')
            answer.close()
            current_url = _resolve_redirect(url, current_url, location)
        raise BuildFailed('image', f'{url}: more than {MAX_REDIRECTS} redirects')


# Raises ServerUnavailable and BuildFailed('image', reason); no reason quotes a server's answer.
Source = LocalSource | RemoteSource


def make_source(url: str, local_directory: Path | None, egress: EgressPolicy) -> Source:
    """Make the source for `url`, which check_image() accepted and which has no fragment."""
    return LocalSource(url, local_directory) if urlsplit(url).scheme == 'file' else RemoteSource(url, egress)


def _parse_version(answer: BaseHTTPResponse, found_at: str) -> Version:
    """Return the version in a response's headers; its length is None if unknown or chunked."""
    # A chunked response is as long as its chunks, whatever its content-length (RFC 9112, 6.3).
    length = '' if 'transfer-encoding' in answer.headers else answer.headers.get('content-length', '')
    return Version(
        answer.headers.get('etag', ''),
        answer.headers.get('last-modified', ''),
        int(length) if length.isdecimal() and length.isascii() else None,
        found_at.partition('?')[0],
    )


def _close_if_cached(cached_version: Version | None, stream: Stream) -> Stream | None:
    """Return the stream; close it and return None if it has the cached version, which some servers send."""
    if cached_version is not None and cached_version.is_same(stream.version):
        stream.close()
        return None
    return stream


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Turn HTTPErrors into ServerUnavailable; OSError, ValueError and RuntimeError into BuildFailed."""
    try:
        yield
    except HTTPError as error:
        raise ServerUnavailable('image', f'{url}: the connection broke: {type(error).__name__}') from error
    except OSError as error:
        raise BuildFailed('image', f'{url}: cannot be read: {error.strerror}') from error
    except (ValueError, RuntimeError) as error:  # from a file: a zero byte in its path, or a cyclic link
        is_local = urlsplit(url).scheme == 'file'
        # Such an error may quote the server's answer.
        raise BuildFailed('image', f'{url}: {error if is_local else "the server sends malformed HTTP"}') from error


def describe_failure(error: HTTPError) -> str:
    """Describe why a server gives no answer, without quoting it."""
    server = 'the proxy' if isinstance(error, ProxyError) else 'the server'
    if isinstance(error, TimeoutError) and not isinstance(error, NewConnectionError):
        return f'{server} does not answer in time'
    causes: list[BaseException] = [error]
    for cause_error in causes:  # grows during the loop: urllib3 wraps errors repeatedly
        inner = (cause_error.__cause__, *cause_error.args, getattr(cause_error, 'reason', None))
        causes += [cause for cause in inner if isinstance(cause, BaseException) and cause not in causes]
    if (
        answered := next(filter(None, (TUNNEL_FAILURE.match(str(cause_error)) for cause_error in causes)), None)
    ) is not None:
        return f'the proxy returned HTTP {_format_status(int(answered[1]))}'
    return f'{server} cannot be reached' + next(
        (f': {detail}' for detail in map(_describe_cause, causes) if detail), ''
    )


def _describe_cause(error: BaseException) -> str | None:
    """Describe this one error, not those it wraps; None if it is of another kind."""
    if isinstance(error, socket.gaierror):
        is_missing = error.errno in (socket.EAI_NONAME, socket.EAI_NODATA)
        if is_missing:
            return 'its host name does not exist'
        return 'its host name cannot be resolved. Try: check the name server of this host'
    if isinstance(error, ssl.SSLError):
        return IMAGE_SERVER_SENTENCES.get(classify_tls_error(error), 'the TLS handshake failed')
    if isinstance(error, ConnectionRefusedError):
        return 'it refuses the connection: nothing listens on that port'
    if isinstance(error, OSError) and error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return 'there is no route to it'
    return 'the connection broke' if isinstance(error, ConnectionError) else None


def _format_status(code: int) -> str:
    """Format a status code with HTTP's name: the one in the response is the server's text."""
    try:
        return f'{code} {HTTPStatus(code).phrase}'
    except ValueError:
        return str(code)


def _resolve_redirect(url: str, current_url: str, location: str) -> str:
    """Return the URL to follow to `location`; BuildFailed, not quoting it, if it is refused."""
    try:
        target = check_image(urldefrag(urljoin(current_url, location)).url)
    except ValueError:
        reason = 'an invalid image URL, or one with a user or a password'
        raise BuildFailed('image', f'{url}: redirected to {reason}') from None
    if urlsplit(target).scheme == 'file':
        raise BuildFailed('image', f'{url}: redirected to a local file, which is refused')
    return target


@dataclass(eq=False)
class Transfer:
    """A check of the image of `url`, and its download to `part` if the cached one is outdated.

    `pin` is the SHA-256 of the content, None for any. `reserve(descriptor, size, ahead)` is called before the file
    grows to `size` bytes; it returns the size allowed, from `size` to `size + ahead`. `asked_at` is the time of start()
    (monotonic). Without a `cached_version` it always downloads.
    """

    url: str
    source: Source
    cached_version: Version | None
    pin: str | None
    part: Path
    reserve: Callable[[int, int, int], int]

    def __post_init__(self) -> None:
        self._is_abandoned = False
        self._has_answered = threading.Event()
        self._may_download = threading.Event()
        self._finished = threading.Event()
        self.asked_at = 0.0
        self._file: IO[bytes] | None = None
        self._result: Download | BaseException | None = None
        self._waits_for: tuple[str, float] | None = None
        self._is_downloading = False
        self._done_bytes = 0
        self._total_bytes: int | None = None

    def start(self) -> None:
        """Start the check; run() starts the download. await_check() and run() follow, and abandon() in any case."""
        self.asked_at = time.monotonic()
        threading.Thread(target=self._run, name='download', daemon=True).start()

    def await_check(self, checkpoint: Callable[[], None]) -> bool:
        """Wait for the server's answer; return whether the cached image is current. Raises what run() does."""
        self._wait(self._has_answered, checkpoint, lambda *_: None)
        return self._finished.is_set()

    def run(self, checkpoint: Callable[[], None], report_progress: ProgressCallback) -> Download:
        """Download the new image; call it only if await_check() is False or nothing is cached.

        Raises ServerUnavailable at a time limit, BuildFailed, OSError and what the checkpoint raises.
        """
        self._wait(self._has_answered, checkpoint, lambda *_: None)
        # Not in the thread: an abandoned one could open the file when it is another download's.
        self._file = self.part.open('wb')
        self._may_download.set()
        self._wait(self._finished, checkpoint, report_progress)
        assert isinstance(self._result, Download)  # an error was raised by _wait()
        return self._result

    def abandon(self) -> None:
        """Have the thread end soon, without waiting for that; what it still writes is discarded."""
        self._is_abandoned = True
        self._may_download.set()
        self.source.stop()

    def _wait(self, event: threading.Event, checkpoint: Callable[[], None], report_progress: ProgressCallback) -> None:
        """Wait for `event` and raise the thread's error; ServerUnavailable at a limit of this module.

        `checkpoint` is called every CHECKPOINT_SECONDS (its errors are raised), `report_progress` every REPORT_SECONDS.
        """
        reported_at = time.monotonic()
        reported = 0
        pace = _PaceMonitor()
        while not event.wait(CHECKPOINT_SECONDS):
            checkpoint()
            now = time.monotonic()
            if (
                self.cached_version is not None
                and not self._has_answered.is_set()
                and now - self.asked_at > MAX_CHECK_SECONDS
            ):
                raise ServerUnavailable('image', f'{self.url}: the server does not answer in time')
            if (wait := self._waits_for) is not None and now - wait[1] > MAX_ANSWER_SECONDS:
                raise ServerUnavailable('image', f'{self.url}: no {wait[0]} after {MAX_ANSWER_SECONDS:g} s')
            if self._is_downloading and pace.check_pace(now, self._done_bytes):
                slow = f'slower than {MIN_BYTES_PER_SECOND // 2**10} KiB/s for {SLOW_PERIOD_SECONDS:g} s'
                raise ServerUnavailable('image', f'{self.url}: the download is {slow}, {self._done_bytes} bytes so far')
            if now - self.asked_at > MAX_DOWNLOAD_SECONDS:
                late = f'not complete after {MAX_DOWNLOAD_SECONDS:g} s'
                raise ServerUnavailable('image', f'{self.url}: the download is {late}, {self._done_bytes} bytes so far')
            if now - reported_at >= REPORT_SECONDS and self._done_bytes != reported:
                reported, reported_at = self._done_bytes, now
                report_progress(reported, self._total_bytes)
        if isinstance(self._result, BaseException):
            raise self._result

    def _run(self) -> None:
        """Run _fetch(), after a pause with a cached image: keep its result or error, close the source, end waits."""
        if self.cached_version is not None:
            time.sleep(HEAD_START_SECONDS)
        try:
            self._result = self._fetch()
        except BaseException as error:
            self._result = error
        finally:
            self.source.close()
            self._finished.set()
            self._has_answered.set()

    def _fetch(self) -> Download | None:
        """Return None if the cached image is current, else wait for run() and download. _Abandoned after abandon()."""
        with self._limit_wait('answer'):
            stream = self.source.open(self.cached_version)
        if stream is None:
            return None
        self._has_answered.set()
        with closing(stream):
            self._may_download.wait()
            if self._file is None:
                raise _Abandoned
            with self._file as file:
                return self._fetch_into(file, stream)

    def _fetch_into(self, file: IO[bytes], stream: Stream) -> Download:
        """Download into `file`; check the pin or SHA256SUMS. Without these, download again if the version changed."""
        expected = self.pin
        if expected is None:
            with self._limit_wait(SUMS_FILE):
                sums = self.source.read_sums()
            expected = None if sums is None else find_sha256(sums, self.url)
        result = self._download(stream, file, expected)
        return result if expected is not None or self._recheck(result.version) else self._fetch_again(file, result)

    def _fetch_again(self, file: IO[bytes], first: Download) -> Download:
        """Download again, as servers of one name may report different versions; BuildFailed if the content differs.

        The returned version has no ETag, and a date only if it is the same in both. Logs a warning.
        """
        with self._limit_wait('answer'):
            stream = self.source.open(None)
        assert stream is not None  # without a cached version there is a stream
        with closing(stream):
            self._done_bytes = file.seek(0)
            file.truncate()
            again = self._download(stream, file, None)
        fix = 'add #sha256=… to the URL of the image'
        if again.sha256 != first.sha256:
            raise BuildFailed(
                'image', f'{self.url}: changed during the download. Fix: create the instance again, or {fix}'
            )
        log.warning('%s: downloaded twice: its server reports another version each time. Fix: %s', self.url, fix)
        modified = again.version.modified if again.version.modified == first.version.modified else ''
        return replace(again, version=replace(again.version, etag='', modified=modified))

    def _download(self, stream: Stream, file: IO[bytes], expected: str | None) -> Download:
        """Write the stream to `file`, durably; `expected` is its SHA-256, or None for any.

        Raises BuildFailed if empty, not as long as announced or not `expected`, _Abandoned, and what `reserve` raises.
        """
        length = self._total_bytes = stream.version.length
        digest = hashlib.sha256()
        reserved = self.reserve(file.fileno(), length, 0) if length else 0
        failpoint('image-begun')
        self._is_downloading = True
        while chunk := stream.read():
            if self._is_abandoned:
                raise _Abandoned
            if self._done_bytes + len(chunk) > reserved:
                if length is not None:
                    raise BuildFailed('image', f'{self.url}: longer than the {length} bytes that the server announced')
                reserved = self.reserve(file.fileno(), self._done_bytes + len(chunk), RESERVE_AHEAD_BYTES)
            if chunk == bytes(len(chunk)):
                file.seek(len(chunk), os.SEEK_CUR)  # leaves a hole: a sparse image stays sparse
            else:
                file.write(chunk)
            digest.update(chunk)
            self._done_bytes += len(chunk)
        self._is_downloading = False
        if length is not None and length != self._done_bytes:
            raise BuildFailed('image', f'{self.url}: cut off after {self._done_bytes} of {length} bytes')
        if not self._done_bytes:
            raise BuildFailed('image', f'{self.url}: is empty')
        if expected not in (None, digest.hexdigest()):
            origin = 'its URL' if self.pin else f'{SUMS_FILE} in its directory'
            raise BuildFailed('image', f'{self.url}: its SHA-256 is {digest.hexdigest()}, but {origin} has {expected}')
        file.truncate(self._done_bytes)  # release what was reserved in advance
        file.flush()
        os.fsync(file.fileno())
        return Download(digest.hexdigest(), self._done_bytes, stream.version)

    def _recheck(self, version: Version) -> bool:
        """Ask if the server has this version; True if unknown (no ETag and date, or no answer). Raises BuildFailed."""
        if not version.etag and not version.modified:
            return True
        with suppress(ServerUnavailable), self._limit_wait('answer'):
            return self.source.confirm_version(version)
        return True

    @contextmanager
    def _limit_wait(self, awaited: str) -> Iterator[None]:
        """Limit the block, which waits for `awaited`: _wait() raises after MAX_ANSWER_SECONDS."""
        self._waits_for = awaited, time.monotonic()
        try:
            yield
        finally:
            self._waits_for = None


class _PaceMonitor:
    """Finds whether a download is too slow, once in each SLOW_PERIOD_SECONDS."""

    def __init__(self) -> None:
        self._period_start: float | None = None
        self._done_bytes = 0

    def check_pace(self, now: float, done_bytes: int) -> bool:
        """End the period if it is over at `now` (monotonic); return whether it was too slow, False if not over."""
        if self._period_start is not None and now - self._period_start < SLOW_PERIOD_SECONDS:
            return False
        # Fewer bytes than before mean that a second download began.
        slow = self._period_start is not None and 0 <= done_bytes - self._done_bytes < MIN_BYTES_PER_SECOND * (
            now - self._period_start
        )
        self._period_start, self._done_bytes = now, done_bytes
        return slow


class _Abandoned(Exception):
    """The caller of a Transfer has abandoned it."""
