"""Test the seed: the files that mdserver.seed prints for a guest, on an ISO file system."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest

from ecomp.agent.host.metadata import GuestData, make_seed
from ecomp.errors import BuildFailed
from ecomp.model.guest import list_macs, make_network_config
from ecomp.model.order import Request
from ecomp.virt.volumes import Seeds

pycdlib = pytest.importorskip('pycdlib', reason="pycdlib is not installed: pip install '.[hypervisor]'")

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
MACS = list_macs(INSTANCE)
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA mé@here: 100%'
OPS = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB ops'
PACKED = gzip.compress(b'#cloud-config\n', mtime=0)
FILES = {
    'meta-data': json.dumps({'instance-id': INSTANCE, 'local-hostname': 'web1', 'public-keys': [KEY]}).encode(),
    'user-data': PACKED,
    'vendor-data': b'#cloud-config\n' + b'x' * 5000,
    'network-config': json.dumps(make_network_config(MACS[:2])).encode(),
}


@pytest.fixture
def data(tmp_path: Path) -> GuestData:
    (tmp_path / 'user-data').write_text('#!/bin/sh\n')
    (tmp_path / 'mdserver.conf').write_text(f'[mdserver]\nuser-data = user-data\n[public-keys]\nops = {OPS}\n')
    return GuestData(tmp_path / 'metadata')


def read_guest_seed(data: GuestData, request: Request, macs: int = 1, phones_home: bool = True) -> dict[str, bytes]:
    data.write(request, MACS[:macs])
    return dict(make_seed(data.directory, data.directory.parent, MACS[0], phones_home))


def test_seed_contains_the_instance_s_data(data: GuestData) -> None:
    files = read_guest_seed(data, Request(INSTANCE, {}, name='web1', ssh_keys=(KEY,), user_data=PACKED), macs=2)
    meta_data = {'instance-id': INSTANCE, 'local-hostname': 'web1', 'public-keys': [KEY]}
    assert json.loads(files['meta-data']) == meta_data, 'without dsmode: it is there before there is a network'
    assert files['user-data'] == PACKED
    assert f'http://169.254.169.254/phone-home/{INSTANCE}/'.encode() in files['vendor-data']
    assert json.loads(files['network-config']) == make_network_config(MACS[:2])


def test_seed_defaults_come_from_mdserver_conf(data: GuestData) -> None:
    files = read_guest_seed(data, Request(INSTANCE, {}), phones_home=False)
    assert files.keys() == {'meta-data', 'user-data'}
    assert json.loads(files['meta-data'])['public-keys'] == [OPS]
    assert files['user-data'] == b'#!/bin/sh\n'
    (data.directory.parent / 'mdserver.conf').unlink()
    files = read_guest_seed(data, Request(INSTANCE, {}), phones_home=False)
    assert json.loads(files['meta-data'])['public-keys'] == []
    assert files['user-data'] == b''


def test_invalid_metadata_fails_the_build_in_one_line(data: GuestData) -> None:
    directories = data.directory, data.directory.parent
    with pytest.raises(BuildFailed, match=f'mdserver: no instance with the MAC address {MACS[0]}') as failed:
        make_seed(*directories, MACS[0], True)
    assert failed.value.stage == 'scheduled'
    data.write(Request(INSTANCE, {}), MACS[:1])
    (directories[1] / 'user-data').unlink()
    with pytest.raises(BuildFailed, match='mdserver.conf: line 2: "user-data": .*No such file') as failed:
        make_seed(*directories, MACS[0], True)
    assert '\n' not in failed.value.reason
    (data.directory / f'{MACS[0]}.json').write_text('{')
    (directories[1] / 'mdserver.conf').unlink()
    with pytest.raises(BuildFailed, match='is not JSON$'):
        make_seed(*directories, MACS[0], True)


def test_exit_codes_of_mdserver_seed(data: GuestData) -> None:
    command = [sys.executable, '-m', 'mdserver.seed', '--guests', str(data.directory)]
    conf = data.directory.parent / 'mdserver.conf'

    def run_seed(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *args], capture_output=True, text=True, timeout=60)

    assert run_seed(MACS[0]).returncode == 1
    data.write(Request(INSTANCE, {}), MACS[:1])
    assert json.loads(run_seed(MACS[0], str(conf)).stdout)['user-data'] == '#!/bin/sh\n'
    conf.write_text('[x]\n')
    result = run_seed(MACS[0], str(conf))
    assert (result.returncode, result.stdout) == (2, '')
    assert result.stderr == f'mdserver: {conf}: line 1: unknown section [x]: must be [mdserver] or [public-keys]\n'


# The disk


@pytest.fixture
def seeds(tmp_path: Path) -> Seeds:
    (tmp_path / 'seeds').mkdir()
    return Seeds(tmp_path / 'seeds')


def read_disk(path: Path, **tree: str) -> dict[str, bytes]:
    """Return the files of a disk by their names in one of its directory trees."""
    files = {}
    with contextlib.ExitStack() as undo:
        disk = pycdlib.PyCdlib()
        disk.open(str(path))
        undo.callback(disk.close)
        (kind,) = tree
        for child in disk.list_children(**tree):
            if not child.is_dir():
                is_rock_ridge = kind == 'rr_path'
                name = (child.rock_ridge.name() if is_rock_ridge else child.file_identifier()[1::2]).decode()
                out = BytesIO()
                disk.get_file_from_iso_fp(out, **{kind: f'/{name}'})
                files[name] = out.getvalue()
    return files


@pytest.mark.parametrize('tree', ['rr_path', 'joliet_path'])
@pytest.mark.parametrize('files', [FILES, {'meta-data': b'{}', 'user-data': b''}, FILES | {'user-data': bytes(262144)}])
def test_written_seed_is_read_unchanged(seeds: Seeds, files: dict[str, bytes], tree: str) -> None:
    seeds.create(INSTANCE, files)
    path = seeds.get_path(INSTANCE)
    assert read_disk(path, **{tree: '/'}) == files
    status = path.stat()
    assert (status.st_mode & 0o777, status.st_size % 2048) == (0o600, 0)
    assert list(seeds.directory.iterdir()) == [path]


@pytest.mark.skipif(shutil.which('blkid') is None, reason='blkid is not installed: apt-get install util-linux')
def test_blkid_identifies_the_seed_for_cloud_init(seeds: Seeds) -> None:
    seeds.create(INSTANCE, FILES)
    command = ['blkid', '-p', '-o', 'export', str(seeds.get_path(INSTANCE))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert {'LABEL=cidata', 'TYPE=iso9660', 'USAGE=filesystem'} <= set(lines)


def test_seed_is_replaced_and_removed(seeds: Seeds) -> None:
    assert seeds.list_instances() == set()
    seeds.delete(INSTANCE)
    for content in (b'old', b'new'):
        seeds.create(INSTANCE, {'meta-data': content, 'user-data': b''})
    (seeds.directory / f'.{INSTANCE}.iso.part').write_bytes(b'of one that was killed')
    (seeds.directory / 'readme.iso').touch()
    assert read_disk(seeds.get_path(INSTANCE), rr_path='/')['meta-data'] == b'new'
    assert seeds.list_instances() == {INSTANCE}
    seeds.create(INSTANCE, FILES)
    for _ in range(2):
        seeds.delete(INSTANCE)
        assert [path.name for path in seeds.directory.iterdir()] == ['readme.iso']


def test_unwritable_seed_fails_the_build(seeds: Seeds) -> None:
    seeds.directory.rmdir()
    with pytest.raises(BuildFailed, match=rf'seeds/{INSTANCE}\.iso: No such file or directory') as failed:
        seeds.create(INSTANCE, FILES)
    assert failed.value.stage == 'disk'
