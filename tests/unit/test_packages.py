"""The packages for the Python index: what they are called, what they need, and what they contain."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ecomp
from tests.kit.tree import copy_tree


@pytest.fixture(scope='module')
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Provide the directory with what `python -m build` makes: an sdist, and a wheel of that sdist."""
    directory = tmp_path_factory.mktemp('packages')
    copy_tree(directory / 'clone')
    # With this environment's setuptools: an isolated build would need the index.
    build = [sys.executable, '-m', 'build', '--no-isolation', '--outdir', str(directory / 'dist')]
    done = subprocess.run(build, cwd=directory / 'clone', capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / 'dist'


def read_metadata(packages: Path) -> Message:
    (path,) = packages.glob('*.whl')
    with zipfile.ZipFile(path) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith('.dist-info/METADATA'))
        return HeaderParser().parsestr(wheel.read(name).decode())


def test_index_accepts_both(packages: Path) -> None:
    paths = sorted(packages.iterdir())
    stem = f'etcd_compute-{ecomp.__version__}'
    assert [path.name for path in paths] == [f'{stem}-py3-none-any.whl', f'{stem}.tar.gz']
    check = [sys.executable, '-m', 'twine', 'check', '--strict', *map(str, paths)]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_eschedule_needs_neither_grpc_nor_libvirt(packages: Path) -> None:
    metadata = read_metadata(packages)
    assert (metadata['Name'], metadata['Version']) == ('etcd-compute', ecomp.__version__)
    assert set(metadata.get_all('Provides-Extra')) == {'hypervisor', 'lab', 'test'}
    requirements = [Requirement(line) for line in metadata.get_all('Requires-Dist')]
    names = {each.name.lower() for each in requirements if not each.marker or each.marker.evaluate({'extra': ''})}
    assert 'h2' in names
    assert names & {'etcd3', 'grpcio', 'libvirt-python', 'openstack-placement', 'protobuf'} == set()


def test_sdist_has_what_the_wheel_is_made_of(packages: Path) -> None:
    (path,) = packages.glob('*.tar.gz')
    with tarfile.open(path) as sdist:
        names = {name.partition('/')[2] for name in sdist.getnames()}
    assert names >= {'LICENSE', 'README.md', 'setup.py', 'pyproject.toml', 'docs/man/eschedule.1'}
    assert names >= {'ecomp/units/ecompute.service', 'md_server/mdserver/mdserver.service'}
    assert not any('..' in name or 'tmp' in name for name in names)
