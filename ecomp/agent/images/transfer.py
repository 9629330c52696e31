"""One image asked for and, if it is new, downloaded: in a thread of its own, so that its asker is free to give up.

Reading from a server cannot be interrupted, nor can a look at DNS; a destroy must not wait for either.
"""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import IO

from ecomp.agent.images.sources import SUMS, Away, Source, Stream, Version
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.image import sum_of

log = logging.getLogger(__name__)

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


@dataclass(frozen=True)
class Download:
    """An image that was downloaded from a URL: its SHA-256, its size in bytes, and the server's version of it."""

    sha256: str
    size: int
    version: Version


@dataclass(eq=False)
class Transfer:
    """One question for the image of `url`, and its download into `file()` unless it is the `known` one (None: none is).

    `pin` is the SHA-256 the content must have, None for any; `reserve(descriptor, size, ahead)` is called before the
    file becomes `size` bytes long; its answer is how long it may become, which is `ahead` more at most.
    """

    url: str
    source: Source
    known: Version | None
    pin: str | None
    file: Callable[[], IO[bytes]]
    reserve: Callable[[int, int, int], int]

    def __post_init__(self) -> None:
        self._given_up = False
        self._giving_up = threading.Lock()
        self._has_answered = threading.Event()
        self._may_download = threading.Event()
        self._ended = threading.Event()
        self.began = 0.0
        self._result: Download | BaseException | None = None
        self._waits_for: tuple[str, float] | None = None
        self._downloads = False
        self._answered = False
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
        if isinstance(self._result, BaseException):
            raise self._result
        return self._ended.is_set()

    def run(self, checkpoint: Callable[[], None], tell: Tell) -> Download | None:
        """What was downloaded; None if the image is the known one. BuildFailed, OSError, what the checkpoint raises."""
        self._may_download.set()
        self._wait(self._ended, checkpoint, tell)
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def give_up(self) -> None:
        """End it, if it has not ended."""
        with self._giving_up:
            # Whatever the thread waits for, from here on it opens no file, and what it writes is nobody's.
            self._given_up = True
            self._may_download.set()
            if not self._ended.is_set():
                self.source.stop()

    def _wait(self, event: threading.Event, checkpoint: Callable[[], None], tell: Tell) -> None:
        told_at = time.monotonic()
        told = 0
        pace = _Pace()
        while not event.wait(TICK):
            checkpoint()
            now = time.monotonic()
            if self.known is not None and not self._answered and now - self.began > PATIENCE:
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
        self._answered = True
        if stream is None:
            return None
        self._has_answered.set()
        self._may_download.wait()
        with closing(stream), self._open() as file:
            expected = self.pin
            if expected is None:
                with self._waiting(SUMS):
                    sums = self.source.sums()
                expected = None if sums is None else sum_of(sums, self.url)
            found = self._download(stream, file, expected)
        return found if expected is not None or self._is_still(found.version) else self._fetch_again(found)

    def _fetch_again(self, first: Download) -> Download:
        """Download once more what has another version: of servers behind one name each may say its own. BuildFailed."""
        with self._waiting('answer'):
            stream = self.source.open(None)
        assert stream is not None  # nothing is known
        self._done = 0
        with closing(stream), self._open() as file:
            again = self._download(stream, file, None)
        cure = 'put #sha256=… on its URL, and its server is asked once'
        if again.sha256 != first.sha256:
            raise BuildFailed('image', f'{self.url}: changed while it was downloaded: ask again, or {cure}')
        log.warning('%s: downloaded twice, for its server names another version each time. Fix: %s', self.url, cure)
        modified = again.version.modified if again.version.modified == first.version.modified else ''
        return replace(again, version=replace(again.version, etag='', modified=modified))

    def _open(self) -> IO[bytes]:
        with self._giving_up:
            if self._given_up:
                raise _GivenUp
            return self.file()

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
