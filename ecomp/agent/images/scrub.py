"""Base volumes are read again once a day: one whose content is not what its name says is used for no new disk.

It is everybody's below their overlays, so what changed it changes all of their disks, and nobody is told by reading.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
import time
from pathlib import Path

from ecomp.agent.images.bases import FORMATS, Bases
from ecomp.virt.image import chain

log = logging.getLogger(__name__)

DAY, HOUR = 86_400.0, 3_600.0
CHUNK = 4 * 2**20  # bytes of one read
RATE = 64 * 2**20
"""Bytes a second that are read: few enough that guests hardly see it."""
NAME = re.compile(rf'base-([0-9a-f]{{64}})\.(?:{"|".join(FORMATS)})')


class Scrubber:
    """A thread that reads each base volume once a day, from start() to stop(). `rate` is in bytes a second."""

    def __init__(self, directory: Path, rate: float = RATE) -> None:
        self._directory = directory
        self._bases = Bases(directory, 0)
        self._rate = rate
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name='scrub', daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a file it is in the middle of is read from its beginning the next time."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def scrub(self, now: float) -> None:
        """Read each base volume that was not read in the day before `now`, in seconds since the epoch."""
        for path in sorted(self._directory.glob('base-*')):
            named = NAME.fullmatch(path.name)
            # What was read later than now was read by a clock that is put back since: by more than a little it is old.
            if named is None or abs(now - self._bases.scrubbed(named[1])) < DAY:
                continue
            try:
                found = self._read(path)
                if found is None:
                    return
                self._bases.note_read(named[1], good=found == named[1])
            except FileNotFoundError:
                continue  # evicted meanwhile
            except OSError as error:
                log.error('%s cannot be read, or what came of it noted: %s', path, error.strerror)
                continue
            if found != named[1]:
                log.error(
                    '%s is not what it was when it was fetched: no disk is made of it any more, and the guests on it'
                    ' read what is there now: %s', path, ', '.join(self._users(path)) or 'none',
                )  # fmt: skip

    def _read(self, path: Path) -> str | None:
        """The SHA-256 of a file's content; None if stop() was called meanwhile."""
        digest = hashlib.sha256()
        with path.open('rb', buffering=0) as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
                if self._stopped.wait(len(chunk) / self._rate):
                    return None
        return digest.hexdigest()

    def _users(self, path: Path) -> list[str]:
        found = []
        for overlay in sorted(self._directory.glob('*.qcow2')):
            try:
                if os.path.realpath(path) in chain(overlay):
                    found.append(overlay.stem)
            except OSError:
                continue  # gone, or half made
        return found

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.scrub(time.time())
            self._stopped.wait(HOUR)
