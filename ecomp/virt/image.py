"""What a disk image is, read from the file alone, and how large the disk of an instance must be.

oslo.utils' inspector recognizes the formats. It calls all else "raw", an HTML error page too, and reads no qcow2 beyond
its header: whether a file can boot and is whole is looked at here. qcow2's layout: docs/interop/qcow2.txt of QEMU.
"""

from __future__ import annotations

import os
import struct
import sys
from array import array
from pathlib import Path
from typing import BinaryIO

from ecomp.errors import BuildFailed
from ecomp.model.allocation import GIB, MIB
from ecomp.model.guest import BaseImage, GuestSpec

QCOW2_MAGIC = b'QFI\xfb'
PACKED = {b'\xfd7zXZ\0': 'xz', b'\x1f\x8b': 'gzip', b'(\xb5/\xfd': 'zstd', b'BZh': 'bzip2', b'PK\3\4': 'zip'}
"""How a file begins that was packed, and what it was packed with."""
OFFSET_BITS = 0x00FFFFFFFFFFFE00
COMPRESSED = 1 << 62
L1_MOST = 32 * MIB
BACKING_MOST = 1023  # bytes of the name of a base file, by the format
CLUSTER_MOST = 2**21  # bytes of a cluster, by the format


def capacity(spec: GuestSpec) -> int:
    """The size of the instance's disk in bytes. BuildFailed('disk', …) if the image is larger.

    qemu-img itself would make the smaller overlay, and the guest would find its file system cut off.
    """
    if spec.disk_gb is None:
        return spec.base.virtual_size
    if spec.base.virtual_size > spec.disk_gb * GIB:
        # Rounded up, else one of a few bytes more is as large as the disk.
        size = -(-spec.base.virtual_size * 10 // GIB) / 10
        raise BuildFailed('disk', f'the image is {size} GiB, DISK_GB is {spec.disk_gb}: ask for more DISK_GB')
    return spec.disk_gb * GIB


def inspect(path: Path) -> BaseImage:
    """The format and size of the file at `path`: a whole qcow2 that names no other file, or a raw disk that boots.

    BuildFailed('image', …) for any other; its reason quotes no byte of the file, which may be secret. The file decides
    how much time and memory this takes, so one from outside is looked at in a child with limits
    (agent/images/inspection.py).
    """
    # 110 ms, and needed once per image only.
    from oslo_utils.imageutils import format_inspector

    try:
        found = format_inspector.detect_file_format(str(path))
        name = str(found) if found else 'raw'
        if name == 'qcow2' and found:
            _check_features(path)
            found.safety_check()
    except format_inspector.SafetyCheckFailed as error:
        reasons = '; '.join(str(failure) for failure in error.failures.values())
        raise _refused(f'is a qcow2 that is not safe to use: {reasons}') from error
    except format_inspector.ImageFormatError as error:
        raise _refused(f'is not a plain disk image: {error}') from error
    except OSError as error:
        raise BuildFailed('image', f'{path} cannot be read: {error.strerror}') from error

    with path.open('rb') as file:
        if name == 'qcow2':
            return BaseImage(str(path), 'qcow2', _check_qcow2(file))
        # A partition table is raw to everybody but the inspector.
        if name not in ('raw', 'gpt'):
            raise _refused(f'is in {name} format')
        return BaseImage(str(path), 'raw', _check_raw(file))


def inspected(path: Path) -> BaseImage:
    """The same of a base volume, which inspect() accepted, by its name and its header alone. OSError."""
    if path.suffix == '.raw':
        return BaseImage(str(path), 'raw', path.stat().st_size)
    with path.open('rb') as file:
        return BaseImage(str(path), 'qcow2', struct.unpack('>24xQ', file.read(32))[0])


def backing(path: Path) -> str | None:
    """The file that a qcow2's header names as its base; None if it names none, is no qcow2 or cannot be read."""
    try:
        return _backing(path)
    except OSError:
        return None


def chain(path: Path) -> list[str]:
    """The base of a qcow2, that one's base, and so on. OSError for one that is there and cannot be read."""
    found: list[str] = []
    below = _backing(path)
    while below is not None and (below := os.path.realpath(below)) not in found:
        found.append(below)
        try:
            below = _backing(Path(below))
        except FileNotFoundError:
            break
    return found


def _backing(path: Path) -> str | None:
    try:
        with path.open('rb') as file:
            magic, _, offset, length = struct.unpack('>4sIQI', file.read(20))
            # It is in the first cluster, of which none is above 2 MiB.
            if magic != QCOW2_MAGIC or not 0 < offset < CLUSTER_MOST:
                return None
            file.seek(offset)
            name = file.read(min(length, BACKING_MOST))
    except struct.error:
        return None
    return os.path.join(path.parent, os.fsdecode(name)) if name else None


def _refused(what: str) -> BuildFailed:
    return BuildFailed('image', f'the image {what}; qcow2 and raw are taken')


def _check_features(path: Path) -> None:
    """Refuse a qcow2 with features that cost QEMU memory or that are not supported, and that a conversion removes.

    QEMU loads all dirty bitmaps, up to 65,535, when it opens an image.
    """
    with path.open('rb') as file:
        header = file.read(96).ljust(96, b'\0')
    version, snapshots = struct.unpack_from('>4xI52xI', header)
    incompatible, autoclear = struct.unpack_from('>Q8xQ', header, 72) if version >= 3 else (0, 0)
    features = {
        'dirty bitmaps': autoclear & 1,  # without this bit QEMU ignores the bitmaps
        'internal snapshots': snapshots,
        'extended L2 entries (extended_l2)': incompatible & 0b10000,
    }
    found = ', '.join(name for name, bits in features.items() if bits)
    if found:
        found = ' and '.join(found.rsplit(', ', 1))
        raise BuildFailed('image', f'the image is a qcow2 with {found}. Fix: qemu-img convert -O qcow2 OLD NEW')


def _check_raw(file: BinaryIO) -> int:
    """The size of a raw disk in bytes. Only the boot signature tells one from any other file."""
    start = file.read(512)
    size = os.fstat(file.fileno()).st_size
    if not start:
        raise _refused('is empty')
    if start.startswith(QCOW2_MAGIC):
        raise _refused('is a qcow2 cut off in its header')
    if start[510:] != b'\x55\xaa':
        packed = [name for magic, name in PACKED.items() if start.startswith(magic)]
        why = f'it is packed with {packed[0]}, unpack it first' if packed else 'it has no boot signature'
        raise _refused(f'is not a disk image: {why}')
    if size % 512:
        raise _refused(f'is a raw disk of {size} bytes, not a multiple of 512: it is cut off')
    return size


def _check_qcow2(file: BinaryIO) -> int:
    """The virtual size in bytes, if every table and cluster that the file names is inside it.

    Reads no more than the file is long: every table is where a cluster begins, so no two of them overlap.
    """
    length = os.fstat(file.fileno()).st_size
    header = struct.unpack('>4sIQIIQIIQQII', file.read(64)[:64])
    _, version, _, _, cluster_bits, size, encryption, l1_entries, l1_offset, refcounts, refcount_clusters, _ = header
    incompatible = struct.unpack('>Q', file.read(16)[8:])[0] if version >= 3 else 0
    if encryption:
        raise _refused('is an encrypted qcow2')
    if incompatible & 0b10:
        raise _refused('is a qcow2 marked corrupt')
    if not 9 <= cluster_bits <= 21 or not 0 < size < 2**63:
        raise _refused('is a qcow2 with a size, or a size of its clusters, that cannot be')
    cluster = 1 << cluster_bits
    if l1_entries * 8 > L1_MOST:
        raise _refused('is a qcow2 with a larger table than QEMU reads')
    if l1_entries * (cluster // 8) * cluster < size:
        raise _refused('is a qcow2 whose tables do not cover its size')

    def whole(offset: int, needed: int) -> None:
        if offset + needed > length:
            raise _refused(f'is a cut-off qcow2: {length} bytes, and it names what is behind them')

    def whole_table(offset: int, needed: int) -> None:
        if offset % cluster:
            raise _refused('is a qcow2 with a table that is not where a cluster begins, which QEMU refuses as well')
        whole(offset, needed)

    whole_table(l1_offset, l1_entries * 8)
    whole_table(refcounts, refcount_clusters * cluster)
    compressed_mask = (1 << (62 - (cluster_bits - 8))) - 1
    before = 0
    # Sorted, for a table may be named by all four million entries.
    for table in sorted(map(OFFSET_BITS.__and__, _table(file, l1_offset, l1_entries))):
        if table == before:
            continue
        before = table
        whole_table(table, cluster)
        entries = _table(file, table, cluster // 8)
        # Of a data cluster only the beginning must be there: the last one of a file may end early.
        last = max(entry & (compressed_mask if entry & COMPRESSED else OFFSET_BITS) for entry in entries)
        whole(last, 1)
    return size


def _table(file: BinaryIO, offset: int, entries: int) -> array[int]:
    file.seek(offset)
    found = array('Q', file.read(entries * 8))
    if sys.byteorder == 'little':
        found.byteswap()
    return found
