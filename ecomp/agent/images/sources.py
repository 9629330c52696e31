"""Where an image comes from: a web server, or a directory of this host. All of it blocks: see transfer.py.

A source is asked with the version that is cached, and answers with a stream of the image, or None: it is still that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from ecomp.agent.images.reach import Reach
from ecomp.errors import BuildFailed

CHUNK = 1024**2  # bytes of one read, at most
SUMS = 'SHA256SUMS'
MOST_SUMS = 1024**2
"""Bytes of a file of checksums; a longer one on a server is refused."""


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
        then date and length do, if both are known. So also where one of the two has no ETag, or none to go by.
        """
        moved = bool(self.answered and other.answered) and self.answered != other.answered
        if self.etag and other.etag and (self.etag == other.etag or not moved):
            return self.etag == other.etag
        said = (bool(self.modified), self.length is not None)
        is_known = all(said) if moved or self.etag or other.etag else any(said)
        return is_known and (self.modified, self.length) == (other.modified, other.length)


class Stream(Protocol):
    """The bytes of an image from its first on, and the version they are of."""

    version: Version

    def read(self) -> bytes:
        """The next bytes, at most CHUNK; none at the end."""

    def close(self) -> None:
        """Close the file or the connection."""


class Source(Protocol):
    """A place an image comes from. Errors: BuildFailed('image', reason), Away; no reason quotes a server's answer."""

    def open(self, known: Version | None) -> Stream | None:
        """A stream of the image; None if it is the `known` one. `known` None: no image of this URL is cached."""

    def is_still(self, version: Version) -> bool:
        """Whether it is this one at the place that open() has found it at."""

    def sums(self) -> str | None:
        """The text of SHA256SUMS in the image's directory; None if there is none."""

    def stop(self) -> None:
        """End every wait, here and in a stream's read(), soon, and ask nothing more; for another thread."""

    def close(self) -> None:
        """Close every connection."""


class Local:
    """An image on this host in `directory`, which file:// URLs may point into; None: every one is refused."""

    def __init__(self, url: str, directory: Path | None) -> None:
        self._url = url
        self._directory = directory

    def open(self, known: Version | None) -> Stream | None:
        with _said(self._url):
            path = self._path()
            if not path.is_file():
                raise BuildFailed('image', f'{self._url}: no such file on this compute')
            stream = _File(self._url, path)
            if known is not None and known.is_same(stream.version):
                stream.close()
                return None
            return stream

    def is_still(self, version: Version) -> bool:
        if (newer := self.open(version)) is not None:
            newer.close()
        return newer is None

    def sums(self) -> str | None:
        with _said(self._url):
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


class _File:
    """A file that is read."""

    def __init__(self, url: str, path: Path) -> None:
        self._url = url
        self._file = path.open('rb')
        found = os.fstat(self._file.fileno())  # of what is read: another file may be there by that name now
        self.version = Version(f'{found.st_ino}-{found.st_size}-{found.st_mtime_ns}', '', found.st_size)

    def read(self) -> bytes:
        with _said(self._url):
            return self._file.read(CHUNK)

    def close(self) -> None:
        self._file.close()


def source(url: str, local: Path | None, reach: Reach) -> Source:
    """The Source of the image at `url`, which check_image() accepted and which has no fragment."""
    if urlsplit(url).scheme == 'file':
        return Local(url, local)
    from ecomp.agent.images.remote import Remote  # and urllib3, which only workers need

    return Remote(url, reach)


@contextmanager
def _said(url: str) -> Iterator[None]:
    """Turn each error of the block into BuildFailed with a reason a person understands."""
    try:
        yield
    except OSError as error:
        raise BuildFailed('image', f'{url}: cannot be read: {error.strerror}') from error
    except (ValueError, RuntimeError) as error:  # a zero byte in a path, a link that leads to itself
        raise BuildFailed('image', f'{url}: {error}') from error
