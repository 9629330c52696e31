"""The packages for the Python index and for Debian: their names, needs and contents."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import HeaderParser
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ecomp
from tests.kit.servers import TOP
from tests.kit.tree import copy_tree

pytestmark = pytest.mark.long


@pytest.fixture(scope='module')
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
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
    assert names >= {'ecomp/cli/help.txt', 'ecomp/units/ecompute.service', 'md_server/mdserver/mdserver.service'}
    assert not any('..' in name or 'tmp' in name for name in names)


# Debian's packages. What is installed from them is in tests/scenario/test_debian_packages.py.


def find_dependencies(extra: str) -> set[str]:
    """Find all packages that ecomp with an extra needs, in this environment's metadata."""
    names: set[str] = set()
    pending = [('etcd-compute', {extra})]
    while pending:
        package, extras = pending.pop()
        for requirement in map(Requirement, requires(package) or []):
            marker, name = requirement.marker, canonicalize_name(requirement.name)
            if (not marker or any(marker.evaluate({'extra': each}) for each in extras | {''})) and name not in names:
                names.add(name)
                pending.append((name, requirement.extras))
    return names


@pytest.mark.parametrize(('variable', 'extra'), [('CLIENT', ''), ('COMPUTE', 'hypervisor')])
def test_environment_of_a_debian_package_has_what_setup_requires(variable: str, extra: str) -> None:
    rules = (TOP / 'packaging/debian/rules').read_text().replace('\\\n', ' ')
    lists = {name: value.split() for name, value in re.findall(r'(?m)^(CLIENT|COMPUTE) = (.*)$', rules)}
    names = {name for word in lists[variable] for name in (lists['CLIENT'] if word == '$(CLIENT)' else [word])}
    # Only to be built does pbr need setuptools.
    assert names == find_dependencies(extra) - {'setuptools'}
