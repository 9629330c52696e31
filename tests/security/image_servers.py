"""A server of hostile images, names that change their address, and an image cache that may fetch from there."""

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
    """A raw disk, and every wrong way to answer."""
    with serving(BOOT) as server:
        yield server


def everywhere(directory: Path, reach: Reach) -> ImageCache:
    return ImageCache(directory / 'images', inspect, None, LIMITS, reach)


def refusal(cache: ImageCache, url: str) -> str:
    with pytest.raises(BuildFailed) as refused:
        get(cache, url)
    assert refused.value.stage == 'image'
    return refused.value.reason


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[list[str]]]:
    """What a name server says: for each name the answers it gives, one after another, the last one for ever."""
    answers: dict[str, list[list[str]]] = {}
    real = socket.getaddrinfo

    def getaddrinfo(host: Any, port: Any, *given: Any, **named: Any) -> Any:
        if host not in answers or named.get('flags', 0) & socket.AI_NUMERICHOST:
            return real(host, port, *given, **named)
        said = answers[host].pop(0) if len(answers[host]) > 1 else answers[host][0]
        return [each for address in said for each in real(address, port, *given, **named)]

    monkeypatch.setattr(socket, 'getaddrinfo', getaddrinfo)
    return answers


def port_of(url: str) -> int:
    found = urlsplit(url).port
    assert found is not None
    return found
