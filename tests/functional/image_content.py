"""What images of tests consist of, and what the cache has of them."""

from __future__ import annotations

import hashlib
from pathlib import Path


def raw(size: int, fill: int = 0) -> bytes:
    """A raw disk of this size; another one for each `fill`."""
    return (bytes([fill]) * 510 + b'\x55\xaa').ljust(size, bytes([fill]))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def base(content: bytes, format: str = 'raw') -> str:
    """The name of this content's base volume."""
    return f'base-{sha256(content)}.{format}'


def entries(directory: Path) -> list[Path]:
    """What is known of URLs."""
    return list(directory.glob('.url-*.json'))
