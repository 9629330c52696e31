"""The image cache: a base volume for each content, downloaded once however many ask for it, whichever worker asks.

A download goes to a `.part` file, is hashed meanwhile, checked, made durable and renamed, so what has a base volume's
name is whole. A URL whose image is cached is asked whether it has still the same; one with #sha256= only once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ecomp.agent.images.bases import BaseHold, Bases
from ecomp.agent.images.reach import Reach
from ecomp.agent.images.sources import Away, Version, source
from ecomp.agent.images.transfer import Download, Tell, Transfer
from ecomp.errors import BuildFailed
from ecomp.failpoints import failpoint
from ecomp.model.allocation import GIB
from ecomp.model.guest import BaseImage
from ecomp.model.image import check_image, pinned

log = logging.getLogger(__name__)

AWAY = 30.0
"""Seconds after a server gave no answer to any worker in which its cached image is used without asking."""

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

    @contextmanager
    def held(
        self, url: str, checkpoint: Checkpoint, tell: Tell, since: float = math.inf
    ) -> Iterator[Iterator[BaseImage | None]]:
        """The base volumes to make a disk on of the image at a URL: each is there until the next is asked for.

        The last is the URL's image. Before it may come the one that is cached, to be used while its server
        is asked whether it is still that; if it is not, None comes: what was made on it is to be removed, for the new
        one may need the room. `checkpoint` is called at least once a second while one is asked for or fetched;
        `tell` gets how far a download is. A question of another's that began after `since`, of time.monotonic(), is
        this one's, too: the server is not asked again.
        """
        try:
            bare, pin = pinned(check_image(url))
        except ValueError as error:
            raise BuildFailed('image', str(error)) from error
        with closing(self._found(bare, pin, checkpoint, tell, since)) as found:
            yield found

    def sweep(self) -> None:
        """Remove what is left of downloads and evictions whose worker was killed."""
        self.directory.mkdir(parents=True, exist_ok=True)
        self._bases.sweep()

    def _found(
        self, url: str, pin: str | None, checkpoint: Checkpoint, tell: Tell, since: float
    ) -> Generator[BaseImage | None, None, None]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            if pin is not None:
                held = self._bases.take(pin)
                if held is None:
                    with self._bases.locked_url(url, checkpoint):
                        held = self._bases.take(pin) or self._fetched(url, pin, checkpoint, tell)
            else:
                before = self._bases.stamp(url)
                with self._bases.locked_url(url, checkpoint):
                    entry = self._bases.entry(url)
                    held = self._bases.take(entry.sha256, entry.size) if entry else None
                    # Whoever had to wait here for another one's download has not to ask once more, nor has who had to
                    # wait for a server that is away: a build of each worker would come after a time-out of its own.
                    # Nor has a build that was asked for before somebody began to ask: a pool has them come one by one.
                    answered = self._bases.stamp(url) != before or self._bases.is_answered(url, since)
                    asks = not answered and not self._bases.is_away(url, AWAY)
                    if entry and held and asks:
                        if (yield from self._asked(url, entry, held, checkpoint, tell)):
                            return
                        held = self._bases.take(entry.sha256, entry.size)  # the newer one could not be had
                    held = held or self._fetched(url, None, checkpoint, tell)
            with closing(held):
                yield held.image
        except OSError as error:
            raise BuildFailed('image', f'{url}: cannot be kept in {self.directory}: {error.strerror}') from error

    def _asked(
        self, url: str, entry: Download, held: BaseHold, checkpoint: Checkpoint, tell: Tell
    ) -> Generator[BaseImage | None, None, bool]:
        """The cached image while its server is asked; if that has another one, None and that. True if one is it."""
        with self._transfer(url, None, entry.version) as transfer:
            with closing(held):
                transfer.ask()
                yield held.image
                try:
                    known = transfer.is_known(checkpoint)
                except Away as error:
                    self._is_away(url, error)
                    return True
                if known:
                    self._bases.note_unchanged(url, transfer.began)
                    return True
            # Not held any more: the newer one may need its room.
            yield None
            try:
                newer = self._kept(url, transfer, checkpoint, tell)
            except Away as error:
                self._is_away(url, error)
                return False
            with closing(newer):
                yield newer.image
            return True

    def _is_away(self, url: str, error: Away) -> None:
        self._bases.note_away(url)
        log.warning('%s; its image is cached, and used as it was', error.reason)

    def _fetched(self, url: str, pin: str | None, checkpoint: Checkpoint, tell: Tell) -> BaseHold:
        with self._transfer(url, pin, None) as transfer:
            transfer.ask()
            return self._kept(url, transfer, checkpoint, tell)

    @contextmanager
    def _transfer(self, url: str, pin: str | None, known: Version | None) -> Iterator[Transfer]:
        """A Transfer to the URL's temporary name. It is given up, and that name removed, when the block ends."""
        part = self._bases.part(url)
        where = source(url, self.local, self.reach)
        transfer = Transfer(url, where, known, pin, lambda: part.open('wb'), self._bases.reserve)
        try:
            yield transfer
        finally:
            transfer.give_up()
            part.unlink(missing_ok=True)

    def _kept(self, url: str, transfer: Transfer, checkpoint: Checkpoint, tell: Tell) -> BaseHold:
        fetched = transfer.run(checkpoint, tell)
        assert fetched is not None  # with nothing known, or another one, nothing can be the same
        part = self._bases.part(url)
        image = self.inspect(part, checkpoint)
        if image.virtual_size > self.limits.disk:
            size, most = image.virtual_size / GIB, self.limits.disk / GIB
            raise BuildFailed('image', f'the image is {size:.1f} GiB, and this host has {most:.1f} GiB for disks')
        failpoint('image-part')
        held = self._bases.keep(part, fetched.sha256, image.format)
        failpoint('image-kept')
        try:
            self._bases.learn(url, fetched, transfer.began)
        except OSError as error:
            log.warning('%s: %s: where an image is from is not remembered', self.directory, error.strerror)
        return held
