"""One image asked for and, if it is new, downloaded: in a thread of its own, so that its asker is free to give up.

Reading from a server cannot be interrupted, nor can a look at DNS; a destroy must not wait for either.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from ecomp.agent.images.sources import SUMS, Away, Source, Stream, Version
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.image import sum_of

DEADLINE = 3600.0
"""Seconds all of it may take. A time-out between two bytes alone lets a slow drip go on for ever."""
ANSWER = 60.0
"""Seconds a server has to answer, redirects and all, and as many for the SHA256SUMS beside the image."""
RATE = 64 * 2**10
SPELL = 60.0
"""Bytes a second, and for how many seconds it may be fewer: that long, and no longer, an image may drip."""
PATIENCE = 10.0
"""Seconds a server has for its first word on an image that is cached."""
TICK = 0.2
TOLD_EVERY = 1.0

Tell = Callable[[int, int | None], None]
"""Gets how many bytes are here, and of how many if that is known: at most once a second, and only what is new."""


@dataclass(frozen=True)
class Fetched:
    """What was downloaded."""

    sha256: str
    size: int
    version: Version


class Transfer:
    """One look at the image of `url` (without fragment), and its download into `file()` if it is not what is known.

    `pin` is the SHA-256 it must have, or None. `reserve(descriptor, bytes)` is called before that many are written.
    """

    def __init__(
        self,
        url: str,
        source: Source,
        known: Version | None,
        pin: str | None,
        file: Callable[[], IO[bytes]],
        reserve: Callable[[int, int], None],
    ) -> None:
        self._url = url
        self._source = source
        self._known = known
        self._pin = pin
        self._file = file
        self._reserve = reserve
        self._given_up = False
        self._giving_up = threading.Lock()
        self._ended = threading.Event()
        self._result: Fetched | BaseException | None = None
        self._waits_for: tuple[str, float] | None = None
        self._downloads = False
        self._answered = False
        self._done = 0
        self._total: int | None = None

    def run(self, checkpoint: Callable[[], None], tell: Tell) -> Fetched | None:
        """None if the image is the known one. Errors: BuildFailed, OSError of the file, and the checkpoint's."""
        threading.Thread(target=self._run, name='download', daemon=True).start()
        began = told_at = time.monotonic()
        told = 0
        pace = _Pace()
        try:
            while not self._ended.wait(TICK):
                checkpoint()
                now = time.monotonic()
                if self._known is not None and not self._answered and now - began > PATIENCE:
                    raise Away('image', f'{self._url}: the server gives no answer in time')
                if (waits := self._waits_for) is not None and now - waits[1] > ANSWER:
                    raise Away('image', f'{self._url}: no {waits[0]} after {ANSWER:g} s')
                if self._downloads and pace.is_slow(now, self._done):
                    slow = f'less than {RATE // 2**10} KiB/s for {SPELL:g} s'
                    raise Away('image', f'{self._url}: {slow}, {self._done} bytes so far')
                if now - began > DEADLINE:
                    raise Away('image', f'{self._url}: not here after {DEADLINE:g} s, {self._done} bytes so far')
                if now - told_at >= TOLD_EVERY and self._done != told:
                    told, told_at = self._done, now
                    tell(told, self._total)
        finally:
            with self._giving_up:
                # Whatever the thread waits for, from here on it opens no file, and what it writes is nobody's.
                self._given_up = True
                if not self._ended.is_set():
                    self._source.stop()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._fetch()
        except BaseException as error:
            self._result = error
        finally:
            self._source.close()
            self._ended.set()

    def _fetch(self) -> Fetched | None:
        with self._waiting('answer'):
            stream = self._source.open(self._known)
        self._answered = True
        if stream is None:
            return None
        with closing(stream), self._open() as file:
            expected = self._pin
            if expected is None:
                with self._waiting(SUMS):
                    sums = self._source.sums()
                expected = None if sums is None else sum_of(sums, self._url)
            found = self._download(stream, file, expected)
        if expected is None and not self._is_still(found.version):
            raise BuildFailed('image', f'{self._url}: changed while it was downloaded: ask again')
        return found

    def _open(self) -> IO[bytes]:
        with self._giving_up:
            if self._given_up:
                raise _GivenUp
            return self._file()

    def _download(self, stream: Stream, file: IO[bytes], expected: str | None) -> Fetched:
        length = self._total = stream.version.length
        digest = hashlib.sha256()
        if length:
            self._reserve(file.fileno(), length)
        failpoint('image-begun')
        self._downloads = True
        while chunk := stream.read():
            if self._given_up:
                raise _GivenUp
            if length is None:
                self._reserve(file.fileno(), self._done + len(chunk))
            file.write(chunk)
            digest.update(chunk)
            self._done += len(chunk)
        self._downloads = False
        if length is not None and length != self._done:
            raise BuildFailed('image', f'{self._url}: cut off after {self._done} of {length} bytes')
        if not self._done:
            raise BuildFailed('image', f'{self._url}: is empty')
        if expected not in (None, digest.hexdigest()):
            where = 'its URL' if self._pin else f'the {SUMS} beside it'
            raise BuildFailed('image', f'{self._url}: its SHA-256 is {digest.hexdigest()}, and {where} says {expected}')
        file.flush()
        os.fsync(file.fileno())
        return Fetched(digest.hexdigest(), self._done, stream.version)

    def _is_still(self, version: Version) -> bool:
        """Whether the server has still what it began to send. If it cannot be asked, nothing says otherwise."""
        if not version.etag and not version.modified:
            return True
        with suppress(Away), self._waiting('answer'):
            if (newer := self._source.open(version)) is not None:
                newer.close()
                return False
        return True


    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Inside, it has a time of its own."""
        self._waits_for = what, time.monotonic()
        yield
        self._waits_for = None


class _Pace:
    """Whether a download is too slow, spell by spell, the first of which begins with the first question."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._done = 0

    def is_slow(self, now: float, done: int) -> bool:
        """Asked now and then; `done` is how many bytes are here."""
        if self._since is not None and now - self._since < SPELL:
            return False
        slow = self._since is not None and done - self._done < RATE * (now - self._since)
        self._since, self._done = now, done
        return slow


class _GivenUp(Exception):
    """Nobody waits for it any more."""
