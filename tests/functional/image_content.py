"""What images of tests consist of, and what the cache has of them."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path


def raw(size: int, fill: int = 0) -> bytes:
    """A raw disk of this size; another one for each `fill`."""
    return (bytes([fill]) * 510 + b'\x55\xaa').ljust(size, bytes([fill]))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def base(content: bytes, format: str = 'raw') -> str:
    """The name of this content's base volume."""
    return f'base-{sha256(content)}.{format}'


def overlay(directory: Path, name: str, below: str, format: str) -> None:
    """A disk that lies on a file beside it."""
    command = ['qemu-img', 'create', '-q', '-f', 'qcow2', '-F', format, '-b', str(directory / below)]
    subprocess.run([*command, str(directory / name), '4M'], check=True)


def entries(directory: Path) -> list[Path]:
    """What is known of URLs."""
    return list(directory.glob('.url-*.json'))
