"""Accepted disk images and image URLs, and the size of the disks made from the images."""

from __future__ import annotations

import bz2
import errno
import json
import lzma
import os
import shutil
import socket
import ssl
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.images.cache import make_source
from ecomp.agent.images.sources import EgressPolicy, ServerUnavailable
from ecomp.errors import BuildFailed
from ecomp.files import get_search_path
from ecomp.model.allocation import GIB
from ecomp.model.guest import BaseImage, GuestSpec
from ecomp.model.image import check_image, find_sha256
from ecomp.virt import image

MIB = 2**20
BOOT = b'\0' * 510 + b'\x55\xaa'
PARTITION = struct.pack('<B3BB3BII', 0x80, 0, 2, 0, 0x83, 0, 0, 0, 2048, 2048)
# The partition of an ISO 9660 image that begins with a partition table.
HYBRID = struct.pack('<B3BB3BII', 0x80, 0, 2, 0, 0x17, 0, 0, 0, 0, 200)
ISO = b'\x01CD001\x01' + b'\0' * 4096
needs_qemu_img = pytest.mark.skipif(shutil.which('qemu-img') is None, reason='qemu-img (qemu-utils) is not installed')


def qemu_img(*arguments: str | Path) -> None:
    subprocess.run(['qemu-img', *arguments], check=True, capture_output=True)


def get_refusal(path: Path) -> str:
    with pytest.raises(BuildFailed) as refused:
        image.inspect(path)
    assert refused.value.stage == 'image'
    assert '\n' not in refused.value.reason
    return refused.value.reason


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    path = tmp_path / 'disk.raw'
    path.write_bytes(BOOT + b'\0' * (MIB - 512) + os.urandom(MIB) + b'\0' * (2 * MIB))
    return path


@pytest.fixture
def qcow2(raw: Path) -> Path:
    path = raw.with_name('disk.qcow2')
    qemu_img('convert', '-f', 'raw', '-O', 'qcow2', raw, path)
    return path


def test_raw_image_is_accepted(raw: Path) -> None:
    # A boot sector, then one with a partition table, then one whose code begins like a packed file.
    for offset, content in ((510, BOOT[510:]), (446, PARTITION), (0, b'\x1f\x8b')):
        with raw.open('r+b') as file:
            file.seek(offset)
            file.write(content)
        assert image.inspect(raw) == BaseImage(str(raw), 'raw', 4 * MIB)


@pytest.mark.parametrize(
    ('content', 'words'),
    [
        (b'', 'is empty'),
        (b'<!DOCTYPE html><html>Not found</html>', 'is not a disk image'),
        (b'\0' * MIB, 'is not a disk image'),
        (b'\x1f\x8b\x08' + b'z' * 2000, 'it is compressed with gzip. Fix: unpack it first'),
        (lzma.compress(b'QFI\xfb' + bytes(MIB)), 'it is compressed with xz. Fix: unpack it first'),
        (bz2.compress(bytes(2000)), 'it is compressed with bzip2. Fix: unpack it first'),
        (b'(\xb5/\xfd' + bytes(2000), 'it is compressed with zstd. Fix: unpack it first'),
        (b'PK\3\4' + bytes(2000), 'it is compressed with zip. Fix: unpack it first'),
        (BOOT[:300], 'not a disk image'),
        (BOOT + b'\0' * 100, 'not a multiple of 512'),
        (b'QFI\xfb' + b'\0' * 296, 'cut off within its header'),
        (b'QFI\xfb\0\0\0\1' + b'\0' * 1016, 'Unsupported qcow2 version'),
        (b'LUKS\xba\xbe\0\1' + b'\0' * MIB, 'luks'),
        (b'QED\0' + b'\0' * MIB, 'in qed format'),
        (b'\0' * 32768 + ISO, 'in iso format'),
        (b'\0' * 446 + HYBRID + b'\0' * 48 + b'\x55\xaa' + b'\0' * 32256 + ISO, 'iso'),
    ],
)
def test_other_files_are_refused(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / 'x'
    path.write_bytes(content)
    assert words in get_refusal(path)


# Boot code, as of GRUB. Where an image has none, a BIOS finds nothing to run.
BOOT_CODE = b'\xeb\x63\x90' + b'\0' * 443
ESP, BIOS_BOOT = 'type=uefi, size=1MiB', 'type=21686148-6449-6E6F-744E-656564454649, size=1MiB'
MBR_ESP = 'type=ef, size=1MiB'
# A hybrid MBR: the protective partition, and one that another program boots.
HYBRID_MBR = struct.pack('<B3BB3BII', 0, 0, 2, 0, 0xEE, 0, 0, 0, 1, 2047) + PARTITION


@pytest.fixture(params=['raw', 'qcow2', 'qcow2 -c', 'qcow2 -o cluster_size=512', 'qcow2 -c -o cluster_size=4k'])
def make_partitioned(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, dict[int, bytes]], Path]:
    """Provide a function that makes an image with a partition table and content at offsets."""
    sfdisk = shutil.which('sfdisk', path=get_search_path())
    if sfdisk is None or shutil.which('qemu-img') is None:
        pytest.skip('sfdisk (fdisk) or qemu-img (qemu-utils) is not installed')

    def make(table: str, content: dict[int, bytes]) -> Path:
        disk, path = tmp_path / 'disk', tmp_path / 'converted'
        disk.write_bytes(b'')
        os.truncate(disk, 8 * MIB)
        subprocess.run([sfdisk, '-q', disk], input=table.replace(';', '\n'), text=True, check=True)
        with disk.open('r+b') as file:
            for offset, data in content.items():
                file.seek(offset)
                file.write(data)
        qemu_img('convert', '-f', 'raw', '-O', *request.param.split(), disk, path)
        return path

    return make


@pytest.mark.parametrize(
    'table', [f'label: gpt; {ESP}', f'label: gpt; type=linux, size=1MiB; {ESP}', f'label: dos; {MBR_ESP}']
)
def test_image_that_boots_by_uefi_only_is_refused(
    table: str, make_partitioned: Callable[[str, dict[int, bytes]], Path]
) -> None:
    refusal = get_refusal(make_partitioned(table, {}))
    assert refusal == 'the image boots by UEFI only. Fix: use an image that also boots by BIOS'


@pytest.mark.parametrize(('table', 'content'), [
    (f'label: gpt; {BIOS_BOOT}; {ESP}', {0: BOOT_CODE}), (f'label: gpt; {BIOS_BOOT}; {ESP}', {}),
    (f'label: gpt; {ESP}', {0: BOOT_CODE}), (f'label: gpt; {ESP}', {446: HYBRID_MBR}),
    ('label: gpt; type=linux, size=1MiB', {}), (f'label: dos; {MBR_ESP}; type=linux, bootable', {0: BOOT_CODE}),
    ('label: dos; type=linux, bootable', {}),
])  # fmt: skip
def test_image_that_may_boot_by_bios_is_accepted(
    table: str, content: dict[int, bytes], make_partitioned: Callable[[str, dict[int, bytes]], Path]
) -> None:
    assert image.inspect(make_partitioned(table, content)).virtual_size == 8 * MIB


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert 'No such file' in get_refusal(tmp_path / 'x')


@needs_qemu_img
@pytest.mark.parametrize(
    'options',
    [(), ('-c',), ('-o', 'compat=0.10'), ('-o', 'cluster_size=512'), ('-o', 'cluster_size=2M'),
     ('-o', 'preallocation=metadata'), ('-o', 'compression_type=zstd', '-c'), ('-o', 'refcount_bits=1')],
)  # fmt: skip
def test_qcow2_variants_are_accepted(options: tuple[str, ...], raw: Path) -> None:
    path = raw.with_name('disk.qcow2')
    qemu_img('convert', '-f', 'raw', '-O', 'qcow2', *options, raw, path)
    assert image.inspect(path) == BaseImage(str(path), 'qcow2', 4 * MIB)


@needs_qemu_img
def test_qcow2_written_in_place_is_accepted(tmp_path: Path) -> None:
    """The file is written in place, as by a guest, and not in one conversion."""
    path = tmp_path / 'x.qcow2'
    qemu_img('create', '-f', 'qcow2', path, '5G')
    commands = ['-c', 'write 1G 3000', '-c', 'write 4G 1k']
    subprocess.run(['qemu-io', '-f', 'qcow2', *commands, str(path)], check=True, capture_output=True)
    assert image.inspect(path).virtual_size == 5 * GIB


@needs_qemu_img
@pytest.mark.parametrize(
    ('compat', 'add', 'named'),
    [
        ('0.10', [('snapshot', '-c', 'one')], 'internal snapshots'),
        ('1.1', [('snapshot', '-c', 'one')], 'internal snapshots'),
        ('1.1', [('bitmap', '--add', 'b0')], 'dirty bitmaps'),
        ('1.1', [('bitmap', '--add', f'b{number}') for number in range(3)], 'dirty bitmaps'),
    ],
)
def test_qcow2_with_snapshots_or_bitmaps_is_refused(
    compat: str, add: list[tuple[str, ...]], named: str, tmp_path: Path
) -> None:
    path, converted = tmp_path / 'x.qcow2', tmp_path / 'converted'
    qemu_img('create', '-f', 'qcow2', '-o', f'compat={compat}', path, '5G')
    for command, option, name in add:
        qemu_img(command, option, *((name, path) if command == 'snapshot' else (path, name)))
    assert f'a qcow2 with {named}. Fix: qemu-img convert -O qcow2 OLD NEW' in get_refusal(path)
    qemu_img('convert', '-O', 'qcow2', path, converted)
    assert image.inspect(converted).virtual_size == 5 * GIB


@needs_qemu_img
def test_refusal_of_a_qcow2_names_every_feature_to_remove(raw: Path) -> None:
    path = raw.with_name('x.qcow2')
    qemu_img('convert', '-f', 'raw', '-O', 'qcow2', '-o', 'extended_l2=on,cluster_size=128k', raw, path)
    assert 'a qcow2 with extended L2 entries (extended_l2). Fix: qemu-img convert -O' in get_refusal(path)
    qemu_img('bitmap', '--add', path, 'b')
    qemu_img('snapshot', '-c', 'one', path)
    assert 'with dirty bitmaps, internal snapshots and extended L2 entries (extended_l2). Fix: ' in get_refusal(path)


@needs_qemu_img
@pytest.mark.parametrize('part', [0.1, 0.5, 0.9])
def test_truncated_qcow2_is_refused(part: float, qcow2: Path) -> None:
    os.truncate(qcow2, int(qcow2.stat().st_size * part))
    assert 'cut' in get_refusal(qcow2)


@needs_qemu_img
@pytest.mark.parametrize(('offset', 'value', 'words'), [
    (20, struct.pack('>I', 60), 'an invalid size'), (24, struct.pack('>Q', 0), 'an invalid size'),
    (24, struct.pack('>Q', 60 * 2**40), 'do not cover'), (32, struct.pack('>I', 1), 'encrypted'),
    (36, struct.pack('>I', 2**32 - 1), 'table larger than QEMU accepts'), (36, struct.pack('>I', 2**21), 'cut-off'),
    (40, struct.pack('>Q', 2**60), 'cut-off'), (72, struct.pack('>Q', 0b10), 'corrupt'),
    (72, struct.pack('>Q', 0b10000), 'extended_l2'), (72, struct.pack('>Q', 0b100000), 'nknown'),
])  # fmt: skip
def test_qcow2_with_a_hostile_header_is_refused(offset: int, value: bytes, words: str, qcow2: Path) -> None:
    with qcow2.open('r+b') as file:
        file.seek(offset)
        file.write(value)
    assert words in get_refusal(qcow2)


@needs_qemu_img
def test_qcow2_with_references_to_other_files_is_refused(raw: Path) -> None:
    backed, as_json, split = (raw.with_name(name) for name in ('backed', 'json', 'split'))
    qemu_img('create', '-f', 'qcow2', '-F', 'raw', '-b', raw, backed)
    name = 'json:' + json.dumps({'driver': 'raw', 'file': {'driver': 'file', 'filename': str(raw)}})
    qemu_img('create', '-f', 'qcow2', '-F', 'raw', '-b', name, as_json)
    qemu_img('create', '-f', 'qcow2', '-o', f'data_file={raw.with_name("data")}', split, '4M')
    assert 'backing file' in get_refusal(backed)
    assert 'backing file' in get_refusal(as_json)
    assert 'data_file' in get_refusal(split)


@needs_qemu_img
@pytest.mark.parametrize('format', ['vmdk', 'qed', 'vdi', 'vhdx', 'vpc'])
def test_other_formats_are_refused(format: str, raw: Path) -> None:
    path = raw.with_name('x')
    qemu_img('convert', '-f', 'raw', '-O', format, raw, path)
    assert f'in {"vhd" if format == "vpc" else format} format' in get_refusal(path)


def make_spec(disk_gb: int | None, size: int) -> GuestSpec:
    return GuestSpec('i', 'c', 1, 1, disk_gb, BaseImage('/x', 'qcow2', size), 'qemu')


def test_capacity() -> None:
    assert image.determine_capacity(make_spec(3, 100 * MIB)) == 3 * GIB
    assert image.determine_capacity(make_spec(1, GIB)) == GIB
    assert image.determine_capacity(make_spec(None, 100 * MIB)) == 100 * MIB
    with pytest.raises(BuildFailed, match=r'image: the image is 2.2 GiB, but DISK_GB is 1. Fix: request DISK_GB:3 '):
        image.determine_capacity(make_spec(1, 2_361_393_152))
    # A fixed VHD is a raw disk with 512 more bytes.
    with pytest.raises(BuildFailed, match=r'image: the image is 30.1 GiB, but DISK_GB is 30. Fix: request DISK_GB:31 '):
        image.determine_capacity(make_spec(30, 30 * GIB + 512))


@needs_qemu_img
def test_backing_file_of_a_disk(qcow2: Path) -> None:
    overlay, beside = qcow2.with_name('overlay.qcow2'), qcow2.with_name('beside.qcow2')
    qemu_img('create', '-f', 'qcow2', '-F', 'qcow2', '-b', qcow2, overlay)
    qemu_img('create', '-f', 'qcow2', '-F', 'qcow2', '-b', qcow2.name, beside)
    assert image.find_backing_file(overlay) == image.find_backing_file(beside) == str(qcow2)
    assert image.find_backing_file(qcow2) is None


@needs_qemu_img
def test_chain_of_backing_files(qcow2: Path) -> None:
    middle, top, gone = (qcow2.with_name(f'{name}.qcow2') for name in ('middle', 'top', 'gone'))
    qemu_img('create', '-f', 'qcow2', '-F', 'qcow2', '-b', qcow2.name, middle)
    qemu_img('create', '-f', 'qcow2', '-F', 'qcow2', '-b', middle, top)
    assert image.read_backing_chain(top) == [str(middle), str(qcow2)]
    middle.rename(gone)
    assert image.read_backing_chain(top) == [str(middle)]
    qemu_img('create', '-f', 'qcow2', '-F', 'qcow2', '-b', gone, middle)
    qemu_img('rebase', '-u', '-F', 'qcow2', '-b', middle, gone)  # a cycle
    assert image.read_backing_chain(top) == [str(middle), str(gone)]
    with pytest.raises(OSError, match='Is a directory'):
        image.read_backing_chain(qcow2.parent)


@needs_qemu_img
def test_inspected_equals_inspect(qcow2: Path, raw: Path) -> None:
    assert image.read_base_volume(qcow2) == image.inspect(qcow2)
    assert image.read_base_volume(raw) == image.inspect(raw)


def test_file_without_a_backing_file(raw: Path, tmp_path: Path) -> None:
    for text in (b'', b'QFI\xfb', b'QFI\xfb' + b'\xff' * 16, b'QFI\xfb\0\0\0\x03' + b'\0' * 100, b'x' * 100):
        (tmp_path / 'x.qcow2').write_bytes(text)
        assert image.find_backing_file(tmp_path / 'x.qcow2') is None
    assert image.find_backing_file(raw) is None
    assert image.find_backing_file(tmp_path / 'nothing') is None


# Image URLs: which are valid, and the messages for servers that do not answer.


# Valid and invalid URLs of images.


SUM = '0123456789abcdef' * 4


@given(st.text(alphabet=st.characters(exclude_categories=())) | st.text().map('http://'.__add__))
def test_any_url_is_accepted_or_refused(url: str) -> None:
    try:
        checked_url = check_image(url)
    except ValueError:
        return
    checked_url.encode()  # it is hashed for a file name


def test_sum_of_accepts_a_file_name_with_a_space() -> None:
    assert find_sha256(f'{SUM}  a disk.img', 'http://host/a%20disk.img') == SUM
    assert find_sha256(f'{SUM}  ', 'http://host/') is None


# The message says why a server does not answer, even if other exceptions wrap the cause.


@pytest.mark.parametrize(
    ('cause', 'reason'),
    [
        (socket.gaierror(socket.EAI_NONAME, 'Name or service not known'), 'Name or service not known'),
        (ConnectionRefusedError(errno.ECONNREFUSED, 'Connection refused'), 'Connection refused'),
        (OSError(errno.EHOSTUNREACH, 'No route to host'), 'No route to host'),
        (ssl.SSLCertVerificationError(1, 'certificate verify failed'), 'certificate verify failed'),
    ],
)
def test_unreachable_server_is_reported_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, cause: OSError, reason: str
) -> None:
    # A test must not depend on the answers of the machine's own network.
    def fail(*_: object, **__: object) -> None:
        raise cause

    resolves = isinstance(cause, socket.gaierror)
    monkeypatch.setattr(
        'ecomp.agent.images.' + ('sources.resolve_addresses' if resolves else 'remote.create_connection'), fail
    )
    remote = make_source('http://192.0.2.1/x', None, EgressPolicy())
    with pytest.raises(ServerUnavailable) as away:
        remote.open()
    remote.close()
    assert str(away.value).startswith(f'image: http://192.0.2.1/x: the server cannot be reached: {reason}')


@pytest.mark.parametrize('content', [None, b'', b'no certificate'])
def test_unreadable_certificate_authorities_are_named(
    content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / 'authorities'
    if content is not None:
        file.write_bytes(content)
    monkeypatch.setenv('REQUESTS_CA_BUNDLE', str(file))
    remote = make_source('https://192.0.2.1/x', None, EgressPolicy())
    with pytest.raises(BuildFailed) as failed:
        remote.open()
    remote.close()
    assert not isinstance(failed.value, ServerUnavailable)
    message = str(failed.value)
    assert message.startswith(f'image: {file}: certificate authorities cannot be read: ')
    fix = 'set REQUESTS_CA_BUNDLE or CURL_CA_BUNDLE to a readable file or directory of certificates'
    assert message.endswith(f'. Fix: {fix}')
    assert 'None' not in message
