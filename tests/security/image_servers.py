"""A server of hostile images, changing DNS answers, and an image cache for both."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ecomp.agent.images.cache import ImageCache
from ecomp.agent.images.sources import EgressPolicy
from ecomp.errors import BuildFailed
from tests.kit.image_server import ImageServer, serve_images
from tests.kit.images import LIMITS, get_base, inspect_image

BOOT_DISK = b'\0' * 510 + b'\x55\xaa'


@pytest.fixture
def web() -> Iterator[ImageServer]:
    with serve_images(BOOT_DISK) as server:
        yield server


def make_cache(directory: Path, reach: EgressPolicy) -> ImageCache:
    return ImageCache(directory / 'images', inspect_image, None, LIMITS, reach)


def fetch_refusal(cache: ImageCache, url: str) -> str:
    with pytest.raises(BuildFailed) as caught:
        get_base(cache, url)
    assert caught.value.stage == 'image'
    return caught.value.reason


@pytest.fixture
def dns_answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """The DNS answers of each name in their order, of which the last is repeated."""
    answers: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *arguments: Any, **options: Any) -> Any:
        if host not in answers or options.get('flags', 0) & socket.AI_NUMERICHOST:
            return real(host, port, *arguments, **options)
        addresses = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [info for address in addresses for info in real(address, port, *arguments, **options)]

    monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)
    return answers


def get_port(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port
