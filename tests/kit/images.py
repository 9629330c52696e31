"""The image cache, and assertions about it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ecomp.agent.images.cache import CacheLimits, ImageCache
from ecomp.agent.images.sources import EgressPolicy
from ecomp.errors import BuildFailed
from ecomp.model.guest import BaseImage
from ecomp.model.image import parse_image_sources
from ecomp.virt import image

MIB = 2**20
# The addresses of the tests' servers. Addresses that are not listed are refused: see tests/security/test_images.py.
LOOPBACK_REACH = EgressPolicy(parse_image_sources(['127.0.0.0/8']))
LIMITS = CacheLimits(cache_bytes=2**30, disk_bytes=100 * 2**30)


def inspect_image(path: Path, checkpoint: Callable[[], None]) -> BaseImage:
    # The product's child process takes a third of a second, and security/test_images.py tests it.
    checkpoint()
    return image.inspect(path)


def make_cache(directory: Path, local: Path | None = None, limit: int = LIMITS.cache_bytes) -> ImageCache:
    return ImageCache(directory, inspect_image, local, replace(LIMITS, cache_bytes=limit), LOOPBACK_REACH)


def get_base(
    cache: ImageCache,
    url: str,
    checkpoint: Callable[[], None] = lambda: None,
    report_progress: Callable[[int, int | None], None] = lambda *_: None,
    since: float = math.inf,
) -> BaseImage:
    with cache.hold(url, checkpoint, report_progress, since) as base:
        return base


def list_cached(directory: Path) -> list[str]:
    return (
        sorted(path.name for path in directory.iterdir() if not path.name.startswith('.')) if directory.exists() else []
    )


def assert_refused(directory: Path, url: str, reason: str, local: Path | None = None) -> None:
    before = list_cached(directory)
    with pytest.raises(BuildFailed, match=reason) as caught:
        get_base(make_cache(directory, local), url)
    assert caught.value.stage == 'image'
    assert '\n' not in str(caught.value)
    assert list_cached(directory) == before
