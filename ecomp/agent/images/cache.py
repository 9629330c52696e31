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

from ecomp.agent.images.bases import BaseHold, Bases
from ecomp.agent.images.connections import Reach
from ecomp.agent.images.sources import Away, Version, source
from ecomp.agent.images.transfer import Download, Tell, Transfer
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.allocation import GIB
from ecomp.model.guest import BaseImage
from ecomp.model.image import check_image, pinned

log = logging.getLogger(__name__)

AWAY = 30.0
"""Seconds after a server gave no answer in which its cached image is used without asking; then it is asked again."""

Checkpoint = Callable[[], None]


@dataclass(frozen=True)
class CacheLimits:
    """In bytes: `cache` of all base volumes and downloads together, `disk` of the largest disk of this host.

    An image above either is refused.
    """

    cache: int
    disk: int


@dataclass(eq=False)
class ImageCache:
    """The base volumes in `directory`. `inspect` reads a file's format and size, with a checkpoint it calls meanwhile.

    `local` is the directory that file:// URLs may point into, None for none; `reach` is where other URLs may.
    Errors: BuildFailed('image', reason), and what a checkpoint raises.
    """

    directory: Path
    inspect: Callable[[Path, Checkpoint], BaseImage]
    local: Path | None
    limits: CacheLimits
    reach: Reach

    def __post_init__(self) -> None:
        self._bases = Bases(self.directory, self.limits.cache)
        self._away: dict[str, float] = {}

    @contextmanager
    def held(self, url: str, checkpoint: Checkpoint, tell: Tell) -> Iterator[BaseImage]:
        """The base volume of the image at a URL, fetched if it is not there, and not evicted before the block ends.

        `checkpoint` is called at least once a second until it is there; `tell` gets how far a download is.
        """
        try:
            bare, pin = pinned(check_image(url))
        except ValueError as error:
            raise BuildFailed('image', str(error)) from error
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            held = self._get(bare, pin, checkpoint, tell)
        except OSError as error:
            raise BuildFailed('image', f'{bare}: cannot be kept in {self.directory}: {error.strerror}') from error
        try:
            yield held.image
        finally:
            held.close()

    def sweep(self) -> None:
        """Remove what is left of downloads and evictions whose worker was killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._bases.sweep()

    def _get(self, url: str, pin: str | None, checkpoint: Checkpoint, tell: Tell) -> BaseHold:
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

    def _newer(self, url: str, entry: Download, checkpoint: Checkpoint, tell: Tell) -> BaseHold | None:
        """The URL's image if it is another one than the entry's; None if it is the same, or its server is away."""
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

    def _fetched(self, url: str, pin: str | None, checkpoint: Checkpoint, tell: Tell) -> BaseHold:
        with self._transferred(url, pin, None, checkpoint, tell) as fetched:
            assert fetched is not None  # with nothing known, nothing can be the same
            return self._kept(url, fetched, checkpoint)

    @contextmanager
    def _transferred(
        self, url: str, pin: str | None, known: Version | None, checkpoint: Checkpoint, tell: Tell
    ) -> Iterator[Download | None]:
        """What was downloaded, under its temporary name until the block ends; None if the image is the known one."""
        part = self._bases.part(url)
        where = source(url, self.local, self.reach)
        try:
            yield Transfer(url, where, known, pin, lambda: part.open('wb'), self._bases.reserve).run(checkpoint, tell)
        finally:
            part.unlink(missing_ok=True)

    def _kept(self, url: str, fetched: Download, checkpoint: Checkpoint) -> BaseHold:
        part = self._bases.part(url)
        image = self.inspect(part, checkpoint)
        if image.virtual_size > self.limits.disk:
            size, most = image.virtual_size / GIB, self.limits.disk / GIB
            raise BuildFailed('image', f'the image is {size:.1f} GiB, and this host has {most:.1f} GiB for disks')
        failpoint('image-part')
        held = self._bases.keep(part, fetched.sha256, image.format)
        failpoint('image-kept')
        try:
            self._bases.learn(url, fetched)
        except OSError as error:
            log.warning('%s: %s: where an image is from is not remembered', self.directory, error.strerror)
        return held
