"""The image cache, and assertions about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.images.cache import CacheLimits, ImageCache
from ecomp.agent.images.connections import Reach
from ecomp.errors import BuildFailed
from ecomp.model.guest import BaseImage
from ecomp.model.image import image_sources
from ecomp.virt import image

MIB = 2**20
# The addresses of the tests' servers. Addresses that are not listed are refused: see tests/security/test_images.py.
LOOPBACK = Reach(image_sources(['127.0.0.0/8']))
LIMITS = CacheLimits(cache=2**30, disk=100 * 2**30)


def inspect(path: Path, checkpoint: Callable[[], None]) -> BaseImage:
    """Inspect an image in this process, which the product does in a child process.

    The child takes a third of a second; security/test_images.py tests it.
    """
    checkpoint()
    return image.inspect(path)


def cache(directory: Path, local: Path | None = None, limit: int = LIMITS.cache) -> ImageCache:
    return ImageCache(directory, inspect, local, replace(LIMITS, cache=limit), LOOPBACK)


def get(
    cache: ImageCache,
    url: str,
    checkpoint: Callable[[], None] = lambda: None,
    tell: Callable[[int, int | None], None] = lambda *_: None,
    since: float = math.inf,
) -> BaseImage:
    """Return the base volume of an image, and release it immediately."""
    with cache.held(url, checkpoint, tell, since) as bases:
        base = list(bases)[-1]
        assert base is not None
        return base


def kept(directory: Path) -> list[str]:
    return (
        sorted(path.name for path in directory.iterdir() if not path.name.startswith('.')) if directory.exists() else []
    )


def refused(directory: Path, url: str, reason: str, local: Path | None = None) -> None:
    """Assert that the image is refused for this reason and leaves nothing in the cache."""
    before = kept(directory)
    with pytest.raises(BuildFailed, match=reason) as caught:
        get(cache(directory, local), url)
    assert caught.value.stage == 'image'
    assert '\n' not in str(caught.value)
    assert kept(directory) == before
