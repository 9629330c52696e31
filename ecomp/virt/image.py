"""Inspect a disk image from its file alone, and determine the size of an instance's disk."""

from __future__ import annotations

import os
import struct
import sys
import zlib
from array import array
from pathlib import Path
from typing import BinaryIO

from ecomp.errors import BuildFailed
from ecomp.model.allocation import GIB, MIB
from ecomp.model.guest import BaseImage, GuestSpec

# docs/interop/qcow2.txt of QEMU
QCOW2_MAGIC = b'QFI\xfb'
# The first bytes of a compressed file, and the name of its format.
COMPRESSION_MAGIC = {b'\xfd7zXZ\0': 'xz', b'\x1f\x8b': 'gzip', b'(\xb5/\xfd': 'zstd', b'BZh': 'bzip2', b'PK\3\4': 'zip'}
OFFSET_MASK = 0x00FFFFFFFFFFFE00
COMPRESSED_FLAG = 1 << 62
MAX_L1_BYTES = 32 * MIB  # QEMU reads no larger table
MAX_BACKING_NAME_BYTES = 1023  # bytes of the name of a backing file, by the format
MAX_CLUSTER_BYTES = 2**21  # bytes of a cluster, by the format
# The boot sector, GPT's header, and its table of 128 entries.
PARTITION_TABLE_BYTES = 34 * 512
# Types of GPT partitions as stored: the EFI system partition, and the one in which GRUB's BIOS part is installed.
GPT_ESP, GPT_BIOS_BOOT = bytes.fromhex('28732ac11ff8d211ba4b00a0c93ec93b'), b'Hah!IdontNeedEFI'
MBR_PROTECTIVE, MBR_ESP = 0xEE, 0xEF


def determine_capacity(spec: GuestSpec) -> int:
    """Return DISK_GB, else the image's size, in bytes, or raise BuildFailed if it is too small."""
    if spec.disk_gb is None:
        return spec.base.virtual_size
    if spec.base.virtual_size > spec.disk_gb * GIB:
        # qemu-img would truncate the file system. Rounded up, or an image a few bytes larger would seem to fit.
        size = -(-spec.base.virtual_size * 10 // GIB) / 10
        fix = f'request DISK_GB:{-(-spec.base.virtual_size // GIB)} or more'
        raise BuildFailed('image', f'the image is {size} GiB, but DISK_GB is {spec.disk_gb}. Fix: {fix}')
    return spec.disk_gb * GIB


def inspect(path: Path) -> BaseImage:
    """Return the format and size of a complete, standalone qcow2 or a bootable raw disk.

    The file determines how much time and memory this takes. Inspect untrusted ones in a limited child.

    Raises:
        BuildFailed: it is any other file. The error does not quote the file, because that may be secret.
        OSError: the file was removed concurrently.
    """
    # oslo.utils recognizes formats, but calls an HTML error page "raw", and reads only the header of a qcow2. So this
    # module checks that a file is whole and can boot. Imported late: it takes 110 ms, and is needed once per image.
    from oslo_utils.imageutils import format_inspector

    try:
        inspector = format_inspector.detect_file_format(str(path))
        format_name = str(inspector) if inspector else 'raw'
        if format_name == 'qcow2' and inspector:
            _refuse_features(path)
            inspector.safety_check()
    except format_inspector.SafetyCheckFailed as error:
        reasons = '; '.join(str(failure) for failure in error.failures.values())
        raise _make_refusal(f'is a qcow2 that is not safe to use: {reasons}') from error
    except format_inspector.ImageFormatError as error:
        raise _make_refusal(f'is not a valid disk image: {error}') from error
    except OSError as error:
        raise BuildFailed('image', f'{path} cannot be read: {error.strerror}') from error

    with path.open('rb') as file:
        if format_name == 'qcow2':
            return BaseImage(str(path), 'qcow2', _read_qcow2_size(file))
        # Only the inspector distinguishes a partition table from a raw disk.
        if format_name not in ('raw', 'gpt'):
            raise _make_refusal(f'is in {format_name} format')
        return BaseImage(str(path), 'raw', _read_raw_size(file))


def read_base_volume(path: Path) -> BaseImage:
    """Read a base volume's size, and its format by suffix."""
    if path.suffix == '.raw':
        return BaseImage(str(path), 'raw', path.stat().st_size)
    with path.open('rb') as file:
        # struct.error if it is cut off
        return BaseImage(str(path), 'qcow2', struct.unpack('>24xQ', file.read(32))[0])


def find_backing_file(path: Path) -> str | None:
    """Return the backing file that a qcow2's header names, whether that exists or not."""
    try:
        return _read_backing_file(path)
    except OSError:
        return None


def read_backing_chain(path: Path) -> list[str]:
    """Return the real paths of a qcow2's backing files, top down, up to a missing one."""
    files: list[str] = []
    below = _read_backing_file(path)
    while below is not None and (below := os.path.realpath(below)) not in files:
        files.append(below)
        try:
            below = _read_backing_file(Path(below))
        except FileNotFoundError:
            break
    return files


def _read_backing_file(path: Path) -> str | None:
    try:
        with path.open('rb') as file:
            magic, _, offset, length = struct.unpack('>4sIQI', file.read(20))
            # The name is in the first cluster, which has at most 2 MiB.
            if magic != QCOW2_MAGIC or not 0 < offset < MAX_CLUSTER_BYTES:
                return None
            file.seek(offset)
            name = file.read(min(length, MAX_BACKING_NAME_BYTES))
    except struct.error:
        return None
    return os.path.join(path.parent, os.fsdecode(name)) if name else None


def _make_refusal(problem: str, cure: str = 'use a qcow2 or raw image') -> BuildFailed:
    return BuildFailed('image', f'the image {problem}. Fix: {cure}')


def _refuse_features(path: Path) -> None:
    with path.open('rb') as file:
        header = file.read(96).ljust(96, b'\0')
    version, snapshots = struct.unpack_from('>4xI52xI', header)
    incompatible, autoclear = struct.unpack_from('>Q8xQ', header, 72) if version >= 3 else (0, 0)
    features = {
        'dirty bitmaps': autoclear & 1,  # QEMU loads all of them, up to 65,535, if this bit is set
        'internal snapshots': snapshots,
        'extended L2 entries (extended_l2)': incompatible & 0b10000,
    }
    if present := ', '.join(name for name, bits in features.items() if bits):
        present = ' and '.join(present.rsplit(', ', 1))
        raise BuildFailed('image', f'the image is a qcow2 with {present}. Fix: qemu-img convert -O qcow2 OLD NEW')


def _read_raw_size(file: BinaryIO) -> int:
    """Return the size of a whole, bootable raw disk, or raise BuildFailed."""
    start = file.read(PARTITION_TABLE_BYTES)
    size = os.fstat(file.fileno()).st_size
    if not start:
        raise _make_refusal('is empty')
    if start.startswith(QCOW2_MAGIC):
        raise _make_refusal('is a qcow2 that is cut off within its header')
    if start[510:512] != b'\x55\xaa':
        if packed := [name for magic, name in COMPRESSION_MAGIC.items() if start.startswith(magic)]:
            raise _make_refusal(f'is not a disk image: it is compressed with {packed[0]}', 'unpack it first')
        raise _make_refusal('is not a disk image: it has no boot signature')
    if size % 512:
        raise _make_refusal(f'is a cut-off raw disk: its {size} bytes are not a multiple of 512')
    _require_bios(start)
    return size


def _require_bios(start: bytes) -> None:
    in_mbr, in_gpt = {*start[450:512:16]}, {start[offset : offset + 16] for offset in range(1024, len(start), 128)}
    has_esp = MBR_ESP in in_mbr or (MBR_PROTECTIVE in in_mbr and GPT_ESP in in_gpt and GPT_BIOS_BOOT not in in_gpt)
    if has_esp and in_mbr <= {0, MBR_PROTECTIVE, MBR_ESP} and not any(start[:440]):
        raise _make_refusal('boots by UEFI only', 'use an image that also boots by BIOS')


def _read_qcow2_size(file: BinaryIO) -> int:
    """Return the disk size of a whole, bootable qcow2, or raise BuildFailed."""
    file_bytes = os.fstat(file.fileno()).st_size
    header = struct.unpack('>4sIQIIQIIQQII', file.read(64)[:64])
    _, version, _, _, cluster_bits, size, encryption, l1_entries, l1_offset, refcounts, refcount_clusters, _ = header
    incompatible = struct.unpack('>Q', file.read(16)[8:])[0] if version >= 3 else 0
    if encryption:
        raise _make_refusal('is an encrypted qcow2')
    if incompatible & 0b10:
        raise _make_refusal('is a qcow2 marked corrupt')
    if not 9 <= cluster_bits <= 21 or not 0 < size < 2**63:
        raise _make_refusal('is a qcow2 with an invalid size, or an invalid cluster size')
    cluster_bytes = 1 << cluster_bits
    if l1_entries * 8 > MAX_L1_BYTES:
        raise _make_refusal('is a qcow2 with a table larger than QEMU accepts')
    if l1_entries * (cluster_bytes // 8) * cluster_bytes < size:
        raise _make_refusal('is a qcow2 whose tables do not cover its size')

    def require_range(offset: int, size_bytes: int) -> None:
        if offset + size_bytes > file_bytes:
            raise _make_refusal(f'is a cut-off qcow2: it refers to data beyond its {file_bytes} bytes')

    def require_table(offset: int, size_bytes: int) -> None:
        if offset % cluster_bytes:
            raise _make_refusal('is a qcow2 with a table that does not begin at a cluster, which QEMU refuses')
        require_range(offset, size_bytes)

    require_table(l1_offset, l1_entries * 8)
    require_table(refcounts, refcount_clusters * cluster_bytes)
    compressed_mask = (1 << (62 - (cluster_bits - 8))) - 1
    previous = 0
    # Sorted to skip duplicates: all four million entries may refer to one table.
    for table in sorted(map(OFFSET_MASK.__and__, _read_table(file, l1_offset, l1_entries))):
        if table == previous:
            continue
        previous = table
        require_table(table, cluster_bytes)
        entries = _read_table(file, table, cluster_bytes // 8)
        # Only the first byte of a data cluster is required: the last cluster of a file may be truncated.
        last = max(entry & (compressed_mask if entry & COMPRESSED_FLAG else OFFSET_MASK) for entry in entries)
        require_range(last, 1)
    _require_bios(_read_guest_start(file, l1_offset, cluster_bits, size))
    return size


def _read_guest_start(file: BinaryIO, l1_offset: int, cluster_bits: int, size: int) -> bytes:
    """Return a checked qcow2's first PARTITION_TABLE_BYTES, or b'' if zstd compressed them."""
    cluster_bytes, clusters = 1 << cluster_bits, list[bytes]()
    for cluster in range(-(-min(size, PARTITION_TABLE_BYTES) >> cluster_bits)):
        l1_index, l2_index = divmod(cluster, cluster_bytes // 8)
        table = _read_table(file, l1_offset + l1_index * 8, 1)[0] & OFFSET_MASK
        entry = _read_table(file, table + l2_index * 8, 1)[0] if table else 0
        data = b''
        if entry & COMPRESSED_FLAG:
            file.seek(entry & ((1 << (70 - cluster_bits)) - 1))
            try:
                data = zlib.decompressobj(-15).decompress(file.read(cluster_bytes), cluster_bytes)
            except zlib.error:
                return b''
        elif entry & OFFSET_MASK and not entry & 1:  # 1: reads as zeros
            file.seek(entry & OFFSET_MASK)
            data = file.read(cluster_bytes)
        clusters.append(data.ljust(cluster_bytes, b'\0'))
    return b''.join(clusters)[:PARTITION_TABLE_BYTES]


def _read_table(file: BinaryIO, offset: int, entries: int) -> array[int]:
    file.seek(offset)
    table = array('Q', file.read(entries * 8))
    if sys.byteorder == 'little':
        table.byteswap()
    return table
