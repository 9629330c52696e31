"""The program that downloads one image for a worker, within limits of size, rate and time."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import IO

from ecomp.agent.images.cache import BaseVolumes, make_source
from ecomp.agent.images.child import answer, answer_finally, read_job
from ecomp.agent.images.remote import RemoteSource
from ecomp.agent.images.sources import SUMS_FILE, Download, LocalSource, ServerUnavailable, Stream, Version
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.image import find_sha256

# Time for a whole download: a timeout between two reads alone would let a slow server drip for ever.
MAX_DOWNLOAD_SECONDS = 3600.0
# Time for an answer of a server, including redirects, and again for SHA256SUMS; then the download fails.
MAX_ANSWER_SECONDS = 60.0
# A download that is slower than this rate for this period fails.
MIN_BYTES_PER_SECOND = 64 * 2**10
SLOW_PERIOD_SECONDS = 60.0
# Room reserved in advance if a server sends no length: reads are small, and a reservation lists the whole directory.
RESERVE_AHEAD_BYTES = 64 * 2**20
REPORT_SECONDS = 1.0  # seconds between two reports of progress


def main() -> None:
    """Download the image of the job, and answer with the Download or a reason against it."""
    url, pin, part, limit_bytes, local_directory, egress = read_job()
    bases = BaseVolumes(part.parent, limit_bytes)
    try:
        # A new file: a program whose worker was killed may still write to an earlier one for a moment.
        with part.open('xb') as file, closing(make_source(url, local_directory, egress)) as source:
            answer(download=asdict(Fetch(url, source, pin, file, bases.reserve).run()))
    except BuildFailed as error:
        is_temporary = isinstance(error, ServerUnavailable)
        answer(reason=error.reason, is_temporary=is_temporary, is_host_fault=error.is_host_fault)
    except OSError as error:
        reason = f'{url}: cannot be stored in {part.parent}: {error.strerror}'
        answer(reason=reason, is_temporary=False, is_host_fault=True)


@dataclass(eq=False)
class Fetch:
    url: str
    source: LocalSource | RemoteSource
    # The SHA-256 of the content, None for any.
    pin: str | None
    file: IO[bytes]
    # reserve(descriptor, size, ahead) lets the file grow, and returns to how much: from `size` to `size + ahead` bytes.
    reserve: Callable[[int, int, int], int]
    _done_bytes: int = 0
    _total_bytes: int | None = None
    _ends_at: float = field(default_factory=lambda: time.monotonic() + MAX_DOWNLOAD_SECONDS)

    def run(self) -> Download:
        """Download and check the image, or raise BuildFailed, as ServerUnavailable after a timeout."""
        threading.Thread(target=self._report_progress, name='progress', daemon=True).start()
        try:
            with self._limit_wait('answer'):
                stream = self.source.open()
            sha256 = self.pin
            if sha256 is None:
                with self._limit_wait(SUMS_FILE):
                    sums = self.source.read_sums()
                sha256 = None if sums is None else find_sha256(sums, self.url)
            result = self._store(stream, sha256)
            if sha256 is None and not self._is_unchanged(result.version):
                fix = 'create the instance again, or add #sha256=… to the URL of the image'
                raise BuildFailed('image', f'{self.url}: changed during the download. Fix: {fix}')
            return result
        except ServerUnavailable as error:
            if time.monotonic() < self._ends_at:
                raise
            late = f'not complete after {MAX_DOWNLOAD_SECONDS:g} s, {self._done_bytes} bytes so far'
            raise ServerUnavailable('image', f'{self.url}: the download is {late}') from error

    def _store(self, stream: Stream, sha256: str | None) -> Download:
        """Write the stream durably to the file, or raise BuildFailed and leave what was written."""
        length = self._total_bytes = stream.version.length
        digest = hashlib.sha256()
        reserved = self.reserve(self.file.fileno(), length, 0) if length else 0
        failpoint('image-begun')
        period_start, period_bytes = time.monotonic(), 0
        read = self._limit_wait('data')(stream.read)  # it may take long: a chunk's extension is no data
        with closing(stream):
            while chunk := read():
                if self._done_bytes + len(chunk) > reserved:
                    if length is not None:
                        reason = f'longer than the {length} bytes that the server announced'
                        raise BuildFailed('image', f'{self.url}: {reason}')
                    reserved = self.reserve(self.file.fileno(), self._done_bytes + len(chunk), RESERVE_AHEAD_BYTES)
                if chunk == bytes(len(chunk)):
                    self.file.seek(len(chunk), os.SEEK_CUR)  # leaves a hole: a sparse image stays sparse
                else:
                    self.file.write(chunk)
                digest.update(chunk)
                self._done_bytes += len(chunk)
                now = time.monotonic()
                if now >= self._ends_at:
                    raise ServerUnavailable('image', 'late')
                if (seconds := now - period_start) >= SLOW_PERIOD_SECONDS:
                    if self._done_bytes - period_bytes < MIN_BYTES_PER_SECOND * seconds:
                        slow = f'slower than {MIN_BYTES_PER_SECOND // 2**10} KiB/s for {SLOW_PERIOD_SECONDS:g} s'
                        reason = f'the download is {slow}, {self._done_bytes} bytes so far'
                        raise ServerUnavailable('image', f'{self.url}: {reason}')
                    period_start, period_bytes = now, self._done_bytes
        if length is not None and length != self._done_bytes:
            raise BuildFailed('image', f'{self.url}: cut off after {self._done_bytes} of {length} bytes')
        if not self._done_bytes:
            raise BuildFailed('image', f'{self.url}: is empty')
        if sha256 not in (None, digest.hexdigest()):
            origin = 'its URL' if self.pin else f'{SUMS_FILE} in its directory'
            raise BuildFailed('image', f'{self.url}: its SHA-256 is {digest.hexdigest()}, but {origin} has {sha256}')
        self.file.truncate(self._done_bytes)  # release what was reserved in advance
        self.file.flush()
        os.fsync(self.file.fileno())
        return Download(digest.hexdigest(), self._done_bytes, stream.version)

    def _is_unchanged(self, version: Version) -> bool:
        """Return False if the server has another version now, True also if it does not answer."""
        with suppress(ServerUnavailable), self._limit_wait('answer'):
            return not (version.etag or version.modified) or self.source.has_version(version)
        return True

    @contextmanager
    def _limit_wait(self, subject: str) -> Iterator[None]:
        ends_at = time.monotonic() + MAX_ANSWER_SECONDS
        self.source.deadline = min(ends_at, self._ends_at)
        try:
            yield
        except ServerUnavailable as error:
            if time.monotonic() < ends_at:
                raise
            raise ServerUnavailable('image', f'{self.url}: no {subject} after {MAX_ANSWER_SECONDS:g} s') from error
        finally:
            self.source.deadline = self._ends_at

    def _report_progress(self) -> None:
        """Report progress until the program ends, and end it if a wait exceeds its deadline."""
        reported_bytes = 0
        while True:
            time.sleep(REPORT_SECONDS)
            if time.monotonic() > self.source.deadline + REPORT_SECONDS:  # as of a resolver, or of TLS within TLS
                reason = f'{self.url}: the server does not answer in time'
                answer_finally(reason=reason, is_temporary=True, is_host_fault=False)
            if self._done_bytes != reported_bytes:
                reported_bytes = self._done_bytes
                answer(done=reported_bytes, total=self._total_bytes)


if __name__ == '__main__':
    main()
