"""A server of hostile images, changing DNS answers, and an image cache for both."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from ecomp.agent.images.cache import ImageCache
from ecomp.agent.images.connections import Reach
from ecomp.errors import BuildFailed
from tests.kit.image_server import Web, serving
from tests.kit.images import LIMITS, get, inspect

BOOT = b'\0' * 510 + b'\x55\xaa'


@pytest.fixture
def web() -> Iterator[Web]:
    """A server with a raw disk that can misbehave in every way."""
    with serving(BOOT) as server:
        yield server


def everywhere(directory: Path, reach: Reach) -> ImageCache:
    return ImageCache(directory / 'images', inspect, None, LIMITS, reach)


def refusal(cache: ImageCache, url: str) -> str:
    with pytest.raises(BuildFailed) as caught:
        get(cache, url)
    assert caught.value.stage == 'image'
    return caught.value.reason


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """The DNS answers: for each name its answers in order; the last one is repeated."""
    answers: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *given: Any, **named: Any) -> Any:
        if host not in answers or named.get('flags', 0) & socket.AI_NUMERICHOST:
            return real(host, port, *given, **named)
        addresses = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [info for address in addresses for info in real(address, port, *given, **named)]

    monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)
    return answers


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port
