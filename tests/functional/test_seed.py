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

from ecomp.agent.host.metadata import GuestData, seed
from ecomp.errors import BuildFailed
from ecomp.model.guest import all_macs, network_config
from ecomp.model.order import Request
from ecomp.virt.volumes import Seeds

pycdlib = pytest.importorskip('pycdlib', reason="pycdlib is not installed: pip install '.[hypervisor]'")

INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
MACS = all_macs(INSTANCE)
KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA mé@here: 100%'
OPS = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB ops'
PACKED = gzip.compress(b'#cloud-config\n', mtime=0)
FILES = {
    'meta-data': json.dumps({'instance-id': INSTANCE, 'local-hostname': 'web1', 'public-keys': [KEY]}).encode(),
    'user-data': PACKED,
    'vendor-data': b'#cloud-config\n' + b'x' * 5000,
    'network-config': json.dumps(network_config(MACS[:2])).encode(),
}


@pytest.fixture
def data(tmp_path: Path) -> GuestData:
    (tmp_path / 'user-data').write_text('#!/bin/sh\n')
    (tmp_path / 'mdserver.conf').write_text(f'[mdserver]\nuser-data = user-data\n[public-keys]\nops = {OPS}\n')
    return GuestData(tmp_path / 'metadata')


def told(data: GuestData, request: Request, macs: int = 1, phones_home: bool = True) -> dict[str, bytes]:
    """Return the seed's files of a guest with this number of interfaces."""
    data.write(request, MACS[:macs])
    return dict(seed(data.directory, data.directory.parent, MACS[0], phones_home))


def test_its_own(data: GuestData) -> None:
    files = told(data, Request(INSTANCE, {}, name='web1', ssh_keys=(KEY,), user_data=PACKED), macs=2)
    meta_data = {'instance-id': INSTANCE, 'local-hostname': 'web1', 'public-keys': [KEY]}
    assert json.loads(files['meta-data']) == meta_data, 'without dsmode: it is there before there is a network'
    assert files['user-data'] == PACKED
    assert f'http://169.254.169.254/phone-home/{INSTANCE}/'.encode() in files['vendor-data']
    assert json.loads(files['network-config']) == network_config(MACS[:2])


def test_what_it_was_not_given_is_mdserver_confs(data: GuestData) -> None:
    files = told(data, Request(INSTANCE, {}), phones_home=False)
    assert files.keys() == {'meta-data', 'user-data'}
    assert json.loads(files['meta-data'])['public-keys'] == [OPS]
    assert files['user-data'] == b'#!/bin/sh\n'
    (data.directory.parent / 'mdserver.conf').unlink()
    files = told(data, Request(INSTANCE, {}), phones_home=False)
    assert json.loads(files['meta-data'])['public-keys'] == []
    assert files['user-data'] == b''


def test_what_cannot_be_told_fails_its_build_in_one_line(data: GuestData) -> None:
    directories = data.directory, data.directory.parent
    with pytest.raises(BuildFailed, match=f'mdserver: no instance with the MAC address {MACS[0]}') as failed:
        seed(*directories, MACS[0], True)
    assert failed.value.stage == 'scheduled'
    data.write(Request(INSTANCE, {}), MACS[:1])
    (directories[1] / 'user-data').unlink()
    with pytest.raises(BuildFailed, match='mdserver.conf: line 2: "user-data": .*No such file') as failed:
        seed(*directories, MACS[0], True)
    assert '\n' not in failed.value.reason
    (data.directory / f'{MACS[0]}.json').write_text('{')
    (directories[1] / 'mdserver.conf').unlink()
    with pytest.raises(BuildFailed, match='is not JSON$'):
        seed(*directories, MACS[0], True)


def test_the_exit_codes_of_the_program(data: GuestData) -> None:
    command = [sys.executable, '-m', 'mdserver.seed', '--guests', str(data.directory)]
    conf = data.directory.parent / 'mdserver.conf'

    def run_seed(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], capture_output=True, text=True, timeout=60)

    assert run_seed(MACS[0]).returncode == 1
    data.write(Request(INSTANCE, {}), MACS[:1])
    assert json.loads(run_seed(MACS[0], str(conf)).stdout)['user-data'] == '#!/bin/sh\n'
    conf.write_text('[x]\n')
    result = run_seed(MACS[0], str(conf))
    assert (result.returncode, result.stdout) == (2, '')
    assert result.stderr == f'mdserver: {conf}: line 1: unknown section [x]: known are [mdserver] and [public-keys]\n'


# The disk


@pytest.fixture
def seeds(tmp_path: Path) -> Seeds:
    (tmp_path / 'seeds').mkdir()
    return Seeds(tmp_path / 'seeds')


def read(path: Path, **tree: str) -> dict[str, bytes]:
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
def test_what_is_written_is_read_again(seeds: Seeds, files: dict[str, bytes], tree: str) -> None:
    seeds.create(INSTANCE, files)
    path = seeds.path(INSTANCE)
    assert read(path, **{tree: '/'}) == files
    status = path.stat()
    assert (status.st_mode & 0o777, status.st_size % 2048) == (0o600, 0)
    assert list(seeds.directory.iterdir()) == [path]


@pytest.mark.skipif(shutil.which('blkid') is None, reason='blkid is not installed: apt-get install util-linux')
def test_blkid_finds_it_as_cloud_init_asks(seeds: Seeds) -> None:
    seeds.create(INSTANCE, FILES)
    command = ['blkid', '-p', '-o', 'export', str(seeds.path(INSTANCE))]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    assert {'LABEL=cidata', 'TYPE=iso9660', 'USAGE=filesystem'} <= set(lines)


def test_it_is_made_anew_and_removed(seeds: Seeds) -> None:
    assert seeds.present() == set()
    seeds.delete(INSTANCE)
    for content in (b'old', b'new'):
        seeds.create(INSTANCE, {'meta-data': content, 'user-data': b''})
    (seeds.directory / f'.{INSTANCE}.iso.part').write_bytes(b'of one that was killed')
    (seeds.directory / 'readme.iso').touch()
    assert read(seeds.path(INSTANCE), rr_path='/')['meta-data'] == b'new'
    assert seeds.present() == {INSTANCE}
    seeds.create(INSTANCE, FILES)
    for _ in range(2):
        seeds.delete(INSTANCE)
        assert [path.name for path in seeds.directory.iterdir()] == ['readme.iso']


def test_where_it_cannot_be_written_the_build_fails(seeds: Seeds) -> None:
    seeds.directory.rmdir()
    with pytest.raises(BuildFailed, match=rf'seeds/{INSTANCE}\.iso: No such file or directory') as failed:
        seeds.create(INSTANCE, FILES)
    assert failed.value.stage == 'disk'
