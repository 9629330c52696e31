"""Contents of test images, and the files that the image cache makes of them."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path


def make_raw_image(size: int, fill: int = 0) -> bytes:
    return (bytes([fill]) * 510 + b'\x55\xaa').ljust(size, bytes([fill]))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def get_base_name(content: bytes, format: str = 'raw') -> str:
    return f'base-{sha256(content)}.{format}'


def create_overlay(directory: Path, name: str, backing_name: str, format: str) -> None:
    command = ['qemu-img', 'create', '-q', '-f', 'qcow2', '-F', format, '-b', str(directory / backing_name)]
    subprocess.run([*command, str(directory / name), '4M'], check=True)


def list_url_entries(directory: Path) -> list[Path]:
    return list(directory.glob('.url-*.json'))
