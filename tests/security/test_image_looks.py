"""Whoever may name an image may name a hostile one: looking at it has an end, and what is said of it shows nothing.

The many ways to answer badly are in functional/test_images.py, stories of hostile images in faults/test_images.py.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
import time
from array import array
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ecomp.agent.images import inspection
from ecomp.agent.images.cache import ImageCache
from ecomp.agent.instance.build import Cancelled
from ecomp.errors import BuildFailed, EcompError
from tests.kit.image_server import Web
from tests.kit.images import LIMITS, LOOPBACK, MIB, get, kept
from tests.kit.servers import PATIENCE
from tests.security.image_servers import BOOT

needs_qemu_img = pytest.mark.skipif(shutil.which('qemu-img') is None, reason='qemu-img (qemu-utils) is not installed')


def nothing() -> None:
    """A checkpoint that nobody stops at."""


def assert_refused(image: Path, words: str) -> None:
    with pytest.raises(BuildFailed, match=words):
        inspection.inspect(image, nothing)


def lookers() -> list[int]:
    """The children of this process that look at an image; what else runs in it may have others."""
    found = []
    for each in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if inspection.__name__ in each.cmdline():
                found.append(each.pid)
    return found


def big_endian(entries: array[int]) -> bytes:
    if sys.byteorder == 'little':
        entries.byteswap()
    return entries.tobytes()


def qcow2(path: Path, bits: int, tables: array[int], length: int) -> Path:
    """A qcow2 of `length` bytes in clusters of 2^bits, whose L1 table, in the second cluster, names these L2 tables."""
    cluster = 1 << bits
    size = len(tables) * (cluster // 8) * cluster
    header = (b'QFI\xfb', 3, 0, 0, bits, min(size, 2**62), 0, len(tables), cluster, 0, 1, 0, 0, 0, 0, 0, 4, 104)
    with path.open('wb') as file:
        file.write(struct.pack('>4sIQIIQIIQQIIQQQQII', *header))
        file.seek(cluster)
        file.write(big_endian(tables))
        file.truncate(length)
    return path


@needs_qemu_img
@pytest.mark.parametrize('which', ['L1', 'L2', 'refcount'])
def test_a_table_that_is_not_where_a_cluster_begins_is_refused_as_qemu_does(which: str, tmp_path: Path) -> None:
    raw, path = tmp_path / 'raw', tmp_path / 'x.qcow2'
    raw.write_bytes(BOOT + os.urandom(MIB))
    subprocess.run(['qemu-img', 'convert', '-f', 'raw', '-O', 'qcow2', str(raw), str(path)], check=True)
    assert inspection.inspect(path, nothing).format == 'qcow2'
    os.truncate(path, path.stat().st_size + 2 * MIB)
    with path.open('r+b') as file:
        file.seek(40)
        l1, _ = struct.unpack('>QQ', file.read(16))
        at = {'L1': 40, 'L2': l1, 'refcount': 48}[which]
        file.seek(at)
        (offset,) = struct.unpack('>Q', file.read(8))
        file.seek(at)
        file.write(struct.pack('>Q', offset + 512))
    assert_refused(path, 'a table that is not where a cluster begins')
    assert subprocess.run(['qemu-img', 'check', '-q', str(path)], capture_output=True, check=False).returncode


def test_tables_on_top_of_each_other_cost_no_more_than_the_file_is_long(tmp_path: Path) -> None:
    """16 MiB that name 20,480 tables of 2 MiB each, at every 512 bytes: that took nine minutes."""
    tables = array('Q', (4 * MIB + 512 * number for number in range(20480)))
    path = qcow2(tmp_path / 'x', 21, tables, 16 * MIB)
    began = time.process_time()
    assert_refused(path, 'a table that is not where a cluster begins')
    assert time.process_time() - began < PATIENCE


def made(path: Path, *options: str) -> Path:
    subprocess.run(['qemu-img', 'create', '-q', '-f', 'qcow2', *options, str(path), '128G'], check=True)
    return path


@needs_qemu_img
def test_image_that_takes_qemu_more_memory_than_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest table that QEMU reads, 32 MiB, is no more than it may take."""
    image = made(tmp_path / 'x', '-o', 'cluster_size=512')
    assert inspection.inspect(image, nothing).virtual_size == 128 * 2**30
    monkeypatch.setattr(inspection, 'QEMU_MEMORY', 40 * MIB)
    assert_refused(image, r'needs more than 40 MiB for it\. Fix: qemu-img convert')


@needs_qemu_img
def test_image_that_qemu_itself_refuses_is_refused(tmp_path: Path) -> None:
    image = made(tmp_path / 'x')
    with image.open('r+b') as file:
        file.seek(96)
        file.write(struct.pack('>I', 7))  # reference counts of 128 bits; QEMU knows 64
    assert_refused(image, 'QEMU cannot open the image')


def test_host_without_qemu_img_takes_no_qcow2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = qcow2(tmp_path / 'x', 16, array('Q', [0]), MIB)
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(EcompError, match=r'qemu-img was not found on this host\. Fix: install qemu-utils'):
        inspection.inspect(image, nothing)


def slow_image(directory: Path) -> Path:
    """4 GiB of tables, each where a cluster begins: a minute's work. The file itself is a hole."""
    tables = array('Q', (2 * MIB * number for number in range(3, 2000)))
    return qcow2(directory / 'slow', 21, tables, 4 * 2**30)


def test_looking_at_an_image_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspection, 'SECONDS', 1)
    assert_refused(slow_image(tmp_path), 'the image takes more than 1 s to be looked at: it is not taken')
    assert lookers() == []


def test_looking_at_an_image_has_an_end_in_processor_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy may take any time for it; who looks at a file uses the limit up himself."""
    monkeypatch.setattr(inspection, '_too_long', lambda: BuildFailed('image', 'by its processor time'))
    monkeypatch.setattr(inspection, 'time', SimpleNamespace(monotonic=lambda: 0.0))
    monkeypatch.setattr(inspection, 'SECONDS', 1)
    assert_refused(slow_image(tmp_path), 'by its processor time')


def test_looking_at_an_image_has_a_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four million tables, each elsewhere: what QEMU would read at most."""
    path = qcow2(tmp_path / 'x', 16, array('Q', range(0, 2**22 * 65536, 65536)), 64 * MIB)
    monkeypatch.setattr(inspection, 'MEMORY', 160 * MIB)
    assert_refused(path, 'the image takes more than 160 MiB of memory to be looked at')
    monkeypatch.undo()
    assert_refused(path, 'cut-off')


@pytest.mark.parametrize('stopped', [Cancelled, KeyboardInterrupt])
def test_a_destroy_or_a_signal_ends_the_looking_at_once(
    web: Web, tmp_path: Path, stopped: type[BaseException]
) -> None:
    shelf = tmp_path / 'shelf'
    shelf.mkdir()
    slow_image(shelf).rename(shelf / 'slow')
    looking: list[float] = []

    def checkpoint() -> None:
        if lookers():
            looking.append(time.monotonic())
        if len(looking) > 3:
            raise stopped

    cache = ImageCache(tmp_path / 'images', lambda _, check: inspection.inspect(hostile, check), None, LIMITS, LOOPBACK)
    hostile = shelf / 'slow'
    with pytest.raises(stopped):
        get(cache, web.url + 'good', checkpoint)
    assert time.monotonic() - looking[-1] < PATIENCE
    assert lookers() == []
    assert kept(tmp_path / 'images') == []


# What is said of it


@pytest.mark.parametrize(
    'page', [b'TOKEN=hunter2-and-more', b'{"etcdserver":"3.4.23"}', b'QFI\xfb\0\0\0\x03' + b'hunter2-' * 200]
)
def test_a_refusal_shows_no_byte_of_what_was_fetched(web: Web, tmp_path: Path, page: bytes) -> None:
    web.image = page
    cache = ImageCache(tmp_path / 'images', inspection.inspect, None, LIMITS, LOOPBACK)
    with pytest.raises(BuildFailed) as refused:
        get(cache, web.url + 'good')
    said = refused.value.reason
    assert 'image' in said
    numbers = {str(int.from_bytes(page[at : at + size], 'big')) for size in (4, 8) for at in range(min(len(page), 64))}
    for secret in ('hunter2', 'TOKEN', 'etcdserver', '3.4.23', '68 75 6e', page[:8].hex(' '), *(numbers - {'0', '3'})):
        assert secret not in said
