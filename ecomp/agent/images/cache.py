"""The image cache: a base volume for each content, downloaded once however many ask for it, whichever worker asks.

A download goes to a `.part` file, is hashed meanwhile, checked, made durable and renamed, so what has a base volume's
name is whole. A URL whose image is cached is asked whether it has still the same; one with #sha256= only once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ecomp.agent.images.bases import Bases, Entry, Held
from ecomp.agent.images.connections import Reach
from ecomp.agent.images.sources import Away, Version, source
from ecomp.agent.images.transfer import Fetched, Tell, Transfer
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.guest import BaseImage
from ecomp.model.image import check_image, pinned

log = logging.getLogger(__name__)

GIB = 2**30
AWAY = 30.0
"""Seconds in which a server that gave no answer is not asked again about an image that is cached."""

Checkpoint = Callable[[], None]


@dataclass(frozen=True)
class Limits:
    """Bytes: of all base volumes and downloads together, and of the largest disk that this host could ever give."""

    cache: int
    disk: int


class ImageCache:
    """Base volumes in `directory`. `inspect` says what a file is; `local` is where file:// URLs may point, if anywhere,
    and `reach` where http and https URLs may.

    Errors: BuildFailed('image', reason), and whatever the checkpoint raises.
    """

    def __init__(
        self,
        directory: Path,
        inspect: Callable[[Path, Checkpoint], BaseImage],
        local: Path | None,
        limits: Limits,
        reach: Reach,
    ) -> None:
        self._directory = directory
        self._inspect = inspect
        self._local = local
        self._limits = limits
        self._reach = reach
        self._bases = Bases(directory, limits.cache)
        self._away: dict[str, float] = {}

    @contextmanager
    def held(self, url: str, checkpoint: Checkpoint, tell: Tell) -> Iterator[BaseImage]:
        """The base volume of an image, fetched if it is not there; it stays there inside, whatever room is needed.

        `checkpoint` is called all the while, at least once a second; `tell` gets how far a download is.
        """
        try:
            bare, pin = pinned(check_image(url))
        except ValueError as error:
            raise BuildFailed('image', str(error)) from error
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            held = self._get(bare, pin, checkpoint, tell)
        except OSError as error:
            raise BuildFailed('image', f'{bare}: cannot be kept in {self._directory}: {error.strerror}') from error
        try:
            yield held.image
        finally:
            held.close()

    def sweep(self) -> None:
        """Remove what a killed worker left."""
        self._directory.mkdir(parents=True, exist_ok=True)
        self._bases.sweep()

    def _get(self, url: str, pin: str | None, checkpoint: Checkpoint, tell: Tell) -> Held:
        before = self._bases.asked(url)
        if pin is not None and (held := self._bases.take(pin)):
            return held
        with self._bases.asking(url, checkpoint):
            if pin is not None:
                return self._bases.take(pin) or self._fetched(url, pin, checkpoint, tell)
            entry = self._bases.entry(url)
            if entry is not None and self._bases.has(entry):
                # Whoever had to wait here for another one's download has not to ask once more.
                newer = self._newer(url, entry, checkpoint, tell) if self._bases.asked(url) == before else None
                # Not held while asking: a newer one may need its room.
                if held := newer or self._bases.take(entry.sha256, entry.size):
                    return held
            return self._fetched(url, None, checkpoint, tell)

    def _newer(self, url: str, entry: Entry, checkpoint: Checkpoint, tell: Tell) -> Held | None:
        """The image, if the URL has another one than the entry's; None if it has not, or nobody can say."""
        if time.monotonic() < self._away.get(url, 0.0):
            return None
        try:
            with self._transferred(url, None, entry.version, checkpoint, tell) as fetched:
                if fetched is not None:
                    return self._kept(url, fetched, checkpoint)
        except Away as error:
            self._away[url] = time.monotonic() + AWAY
            log.warning('%s; its image is cached, and used as it was', error.reason)
        else:
            self._bases.still(url)
        return None

    def _fetched(self, url: str, pin: str | None, checkpoint: Checkpoint, tell: Tell) -> Held:
        with self._transferred(url, pin, None, checkpoint, tell) as fetched:
            assert fetched is not None  # with nothing known, nothing can be the same
            return self._kept(url, fetched, checkpoint)

    @contextmanager
    def _transferred(
        self, url: str, pin: str | None, known: Version | None, checkpoint: Checkpoint, tell: Tell
    ) -> Iterator[Fetched | None]:
        """Inside, a download is there under its temporary name; None if the image is the one known."""
        part = self._bases.part(url)
        where = source(url, self._local, self._reach)
        try:
            yield Transfer(url, where, known, pin, lambda: part.open('wb'), self._bases.reserve).run(checkpoint, tell)
        finally:
            part.unlink(missing_ok=True)

    def _kept(self, url: str, fetched: Fetched, checkpoint: Checkpoint) -> Held:
        part = self._bases.part(url)
        image = self._inspect(part, checkpoint)
        if image.virtual_size > self._limits.disk:
            size, most = image.virtual_size / GIB, self._limits.disk / GIB
            raise BuildFailed('image', f'the image is {size:.1f} GiB, and this host has {most:.1f} GiB for disks')
        failpoint('image-part')
        held = self._bases.keep(part, fetched.sha256, image.format)
        failpoint('image-kept')
        try:
            self._bases.learn(url, Entry(fetched.sha256, fetched.size, fetched.version))
        except OSError as error:
            log.warning('%s: %s: where an image is from is not remembered', self._directory, error.strerror)
        return held
