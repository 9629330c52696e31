"""Ask for an image and download it if it is new: from a web server (urllib3), or from a directory of this host.

A source is asked with the version that is cached, and answers with a stream of the image, or with None if it still
has that version. All of it blocks: reading from a server cannot be interrupted, nor can a DNS lookup, and a destroy
must not wait for either. So it runs in a thread of its own, which its caller may abandon.
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
"""Bytes of a file of checksums; a longer one on a server is refused."""

TIMEOUT = (5.0, 60.0)
"""Seconds to connect, and seconds between two bytes; a server that takes longer is away."""
HEAD_TIMEOUT = (2.0, 2.0)
"""The same of a HEAD; a server that takes longer is asked by GET, for which PATIENCE has to leave time."""
REDIRECTS = 5
"""How many redirects of one URL are followed; the next one is refused."""

TUNNEL = re.compile('Tunnel connection failed: ([0-9]{3}) ')
"""What http.client says of a proxy that does not lead on to an https server."""
IMAGE_SERVER_SENTENCES = {
    **{each: SENTENCES[each] for each in (TlsFailure.EXPIRED, TlsFailure.NOT_YET_VALID, TlsFailure.OTHER_NAME)},
    TlsFailure.OTHER_ADDRESS: 'its certificate is made out to another address',
    TlsFailure.TOO_WEAK: SENTENCES[TlsFailure.TOO_WEAK],
    TlsFailure.NO_KEY_IDENTIFIER: 'its certificate is not believed here',
    TlsFailure.UNTRUSTED: 'its certificate is not believed here',
}
"""What users read of an image server's certificate, which no ca_cert of ours is about."""

DEADLINE = 3600.0
"""Seconds a download may take in all, then it fails: a time-out between two bytes alone lets a slow drip go on."""
ANSWER = 60.0
"""Seconds a server has to answer, redirects included, and again for SHA256SUMS; then the download fails."""
RATE = 64 * 2**10
SPELL = 60.0
"""Bytes a second, and seconds: a download that is slower than RATE for as long as SPELL fails."""
AHEAD = 64 * 2**20
"""Bytes for which room is made at once where a server does not say how long an image is: its reads are small, and to
make room takes a look at the whole directory."""
PATIENCE = 10.0
"""Seconds a server has to answer about an image that is cached; then the cached one is used."""
HEAD_START = 0.001
"""Seconds in which whoever has the known image gets on before its server is asked: a disk takes libvirt longer than the
question takes, and two threads that both want to run have one processor between them in Python."""
TICK = 0.2  # seconds between two calls of the checkpoint
TOLD_EVERY = 1.0  # seconds between two calls of Tell

Tell = Callable[[int, int | None], None]
"""Gets the bytes downloaded so far and those in all, None if not known; at most once a second, and only if more."""


class Away(BuildFailed):
    """The server gives no answer now and may later; until then its cached image is used."""


@dataclass(frozen=True)
class Version:
    """What tells an image at a URL from a later one: the server's ETag, its date, and the length in bytes.

    '' and None mean that the server does not say. `answered` is the URL that it is of, after redirects and without its
    query, which may be a signature; '' in what an older ecomp wrote down.
    """

    etag: str = ''
    modified: str = ''
    length: int | None = None
    answered: str = ''

    def is_same(self, other: Version) -> bool:
        """Whether they are the same by their ETags; without those by date and length, if either is known.

        Of two places, such as the mirrors that one URL is redirected to, different ETags say nothing (RFC 9110, 8.8.3):
        then date and length do, if both are known. The same goes where only one of the two has an ETag.
        """
        moved = bool(self.answered and other.answered) and self.answered != other.answered
        if self.etag and other.etag and (self.etag == other.etag or not moved):
            return self.etag == other.etag
        said = (bool(self.modified), self.length is not None)
        is_known = all(said) if moved or self.etag or other.etag else any(said)
        return is_known and (self.modified, self.length) == (other.modified, other.length)


@dataclass(frozen=True)
class Download:
    """An image that was downloaded from a URL: its SHA-256, its size in bytes, and the server's version of it."""

    sha256: str
    size: int
    version: Version


@dataclass(frozen=True)
class Stream:
    """The bytes of an image from its first on, and the version they are of."""

    version: Version
    read: Callable[[], bytes]
    """The next bytes, at most CHUNK; none at the end."""
    close: Callable[[], None]


class Local:
    """An image on this host in `directory`, which file:// URLs may point into; None: every one is refused."""

    def __init__(self, url: str, directory: Path | None) -> None:
        self._url = url
        self._directory = directory

    def open(self, known: Version | None) -> Stream | None:
        with _translate_errors(self._url):
            path = self._path()
            if not path.is_file():
                raise BuildFailed('image', f'{self._url}: no such file on this compute')
            file = path.open('rb')
            found = os.fstat(file.fileno())  # of what is read: another file may be there by that name now
            version = Version(f'{found.st_ino}-{found.st_size}-{found.st_mtime_ns}', '', found.st_size)
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
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""

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
    """An image on a web server. `url` has no fragment."""

    def __init__(self, url: str, reach: Reach) -> None:
        self._url = url
        self._connections = Connections(reach)
        self._found_at = url

    def open(self, known: Version | None) -> Stream | None:
        """A stream of the image; None if it is the `known` one. `known` None: no image of this URL is cached."""
        return self._opened(self._url, known)

    def is_still(self, version: Version) -> bool:
        """Whether it is this one at the place that open() has found it at."""
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
        with _translate_errors(self._url):
            answer, self._found_at = self._ask('GET', url, headers)
            if known is not None and answer.status == 304:
                answer.close()
                return None
            if answer.status != 200:
                raise self._unwelcome(answer)
            # Decoded, what is transferred with gzip would be unpacked, bombs included. read1, or a slow drip would be
            # inside one read, deadline or not.
            read = _translate_errors(self._url)(partial(answer.read1, CHUNK, decode_content=False))
            return _unless_known(known, Stream(_version(answer, self._found_at), read, answer.close))

    def _says_by_head(self, url: str, known: Version) -> bool:
        """Whether the server says to a HEAD that it has the known version; False where a GET has to tell.

        Not every server answers a HEAD, or as it would a GET.
        """
        with suppress(BuildFailed), _translate_errors(self._url):
            answer, found_at = self._ask('HEAD', url, {})
            answer.close()
            return answer.status == 200 and known.is_same(_version(answer, found_at))
        return False

    def sums(self) -> str | None:
        """The text of SHA256SUMS in the image's directory; None if there is none."""
        url = urljoin(self._url, SUMS)
        with _translate_errors(url):
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
        """End every wait, here and in a stream's read(), soon, and ask nothing more; for another thread."""
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


Source = Local | Remote
"""A place an image comes from. Errors: BuildFailed('image', reason), Away; no reason quotes a server's answer."""


def source(url: str, local: Path | None, reach: Reach) -> Source:
    """The Source of the image at `url`, which check_image() accepted and which has no fragment."""
    return Local(url, local) if urlsplit(url).scheme == 'file' else Remote(url, reach)


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


def _unless_known(known: Version | None, stream: Stream) -> Stream | None:
    """The stream; None, and it is closed, if it is of the known version: not every server looks at what it is asked."""
    if known is not None and known.is_same(stream.version):
        stream.close()
        return None
    return stream


@contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """Turn each error of the block into BuildFailed, or Away, with a reason a person understands."""
    try:
        yield
    except HTTPError as error:
        raise Away('image', f'{url}: the connection broke: {type(error).__name__}') from error
    except OSError as error:
        raise BuildFailed('image', f'{url}: cannot be read: {error.strerror}') from error
    except (ValueError, RuntimeError) as error:  # of a file: a zero byte in a path, a link that leads to itself
        is_local = urlsplit(url).scheme == 'file'
        # What a server answered is in the words of its error.
        raise BuildFailed('image', f'{url}: {error if is_local else "what the server answers is not HTTP"}') from error


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
    if isinstance(error, ssl.SSLError):
        return IMAGE_SERVER_SENTENCES.get(tls_failure(error), 'it does not speak TLS as this host does')
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


@dataclass(eq=False)
class Transfer:
    """One question for the image of `url`, and its download into `part` unless it is the `known` one (None: none is).

    `pin` is the SHA-256 the content must have, None for any; `reserve(descriptor, size, ahead)` is called before the
    file becomes `size` bytes long; its answer is how long it may become, which is `ahead` more at most.
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
        """Begin, at `began`: the server is asked. is_known() and run() are to follow, and give_up() in any case."""
        self.began = time.monotonic()
        threading.Thread(target=self._run, name='download', daemon=True).start()

    def is_known(self, checkpoint: Callable[[], None]) -> bool:
        """Whether the image is the known one, once the server has said so; nothing is downloaded before run().

        BuildFailed, OSError, what the checkpoint raises.
        """
        self._wait(self._has_answered, checkpoint, lambda *_: None)
        return self._ended.is_set()

    def run(self, checkpoint: Callable[[], None], tell: Tell) -> Download:
        """Download the image, which is not the known one. BuildFailed, OSError, what the checkpoint raises."""
        self._wait(self._has_answered, checkpoint, lambda *_: None)
        # Not in the thread, which may be given up and go on when the name is another's.
        self._file = self.part.open('wb')
        self._may_download.set()
        self._wait(self._ended, checkpoint, tell)
        assert isinstance(self._result, Download)  # else it was raised
        return self._result

    def give_up(self) -> None:
        """End it, if it has not ended. What its thread still writes, whatever it waits for, is nobody's."""
        self._given_up = True
        self._may_download.set()
        self.source.stop()

    def _wait(self, event: threading.Event, checkpoint: Callable[[], None], tell: Tell) -> None:
        told_at = time.monotonic()
        told = 0
        pace = _Pace()
        while not event.wait(TICK):
            checkpoint()
            now = time.monotonic()
            if self.known is not None and not self._has_answered.is_set() and now - self.began > PATIENCE:
                raise Away('image', f'{self.url}: the server gives no answer in time')
            if (waits := self._waits_for) is not None and now - waits[1] > ANSWER:
                raise Away('image', f'{self.url}: no {waits[0]} after {ANSWER:g} s')
            if self._downloads and pace.is_slow(now, self._done):
                slow = f'less than {RATE // 2**10} KiB/s for {SPELL:g} s'
                raise Away('image', f'{self.url}: {slow}, {self._done} bytes so far')
            if now - self.began > DEADLINE:
                raise Away('image', f'{self.url}: not here after {DEADLINE:g} s, {self._done} bytes so far')
            if now - told_at >= TOLD_EVERY and self._done != told:
                told, told_at = self._done, now
                tell(told, self._total)
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
        found = self._download(stream, file, expected)
        return found if expected is not None or self._is_still(found.version) else self._fetch_again(file, found)

    def _fetch_again(self, file: IO[bytes], first: Download) -> Download:
        """Download again, for the version differs: several servers of one name may each have their own. BuildFailed."""
        with self._waiting('answer'):
            stream = self.source.open(None)
        assert stream is not None  # nothing is known
        with closing(stream):
            self._done = file.seek(0)
            file.truncate()
            again = self._download(stream, file, None)
        cure = 'put #sha256=… on its URL, and its server is asked once'
        if again.sha256 != first.sha256:
            raise BuildFailed('image', f'{self.url}: changed while it was downloaded: ask again, or {cure}')
        log.warning('%s: downloaded twice, for its server names another version each time. Fix: %s', self.url, cure)
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
            where = 'its URL' if self.pin else f'the {SUMS} beside it'
            raise BuildFailed('image', f'{self.url}: its SHA-256 is {digest.hexdigest()}, and {where} says {expected}')
        file.truncate(self._done)  # what was reserved ahead is nobody's
        file.flush()
        os.fsync(file.fileno())
        return Download(digest.hexdigest(), self._done, stream.version)

    def _is_still(self, version: Version) -> bool:
        """Whether the server still has the version it began to send; True if it cannot be asked."""
        if not version.etag and not version.modified:
            return True
        with suppress(Away), self._waiting('answer'):
            return self.source.is_still(version)
        return True

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Allow ANSWER seconds for the block, which waits for `what`."""
        self._waits_for = what, time.monotonic()
        try:
            yield
        finally:
            self._waits_for = None


class _Pace:
    """Whether a download is too slow, looked at once in each SPELL; the first begins at the first is_slow()."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._done = 0

    def is_slow(self, now: float, done: int) -> bool:
        """Whether fewer than RATE bytes a second came in the SPELL that ends at `now`; `done` is the bytes so far."""
        if self._since is not None and now - self._since < SPELL:
            return False
        # Less than before is the beginning of a second download.
        slow = self._since is not None and 0 <= done - self._done < RATE * (now - self._since)
        self._since, self._done = now, done
        return slow


class _GivenUp(Exception):
    """The asker of a Transfer has given up."""
