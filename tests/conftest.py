"""What every part of the tests may ask for: real servers, shared by a session or a test's own.

`etcd`, `placement` and `control` are shared: tests on them keep apart by fresh uuids and prefixes, ask for candidates
with in_tree=, and leave the servers running. Who kills or freezes one takes `own_etcd`, `own_placement` or
`own_control`.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.commands import Control
from tests.servers import Etcd, PlacementServer

# No test asserts a time, and that would be one: beside other work an example may take any.
settings.register_profile('ecomp', deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile('ecomp')


def _needed(program: str, package: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f'{program} is not installed: apt-get install {package}')


def _needed_module(name: str, otherwise: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(otherwise)


@pytest.fixture(scope='session')
def etcd() -> Iterator[Etcd]:
    """The session's etcd."""
    _needed('etcd', 'etcd-server')
    with Etcd() as server:
        yield server


@pytest.fixture(scope='session')
def placement() -> Iterator[PlacementServer]:
    """The session's placement."""
    _needed_module('placement', "openstack-placement is not installed: pip install '.[lab]'")
    with PlacementServer() as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Etcd]:
    """An etcd that the test may kill."""
    _needed('etcd', 'etcd-server')
    with Etcd(tmp_path / 'etcd') as server:
        yield server


@pytest.fixture
def own_placement(tmp_path: Path) -> Iterator[PlacementServer]:
    """A placement that the test may kill, with nothing in it."""
    _needed_module('placement', "openstack-placement is not installed: pip install '.[lab]'")
    with PlacementServer(tmp_path / 'placement') as server:
        yield server


@pytest.fixture
def control(etcd: Etcd, placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """The session's etcd and placement, with configuration files and ecomputes of the test's own."""
    yield from _control(etcd, placement, tmp_path)


@pytest.fixture
def own_control(own_etcd: Etcd, own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """An etcd and a placement that are empty and may be killed."""
    yield from _control(own_etcd, own_placement, tmp_path)


def _control(etcd: Etcd, placement: PlacementServer, directory: Path) -> Iterator[Control]:
    control = Control(etcd, placement, directory)
    try:
        yield control
    finally:
        control.close()


def pytest_configure(config: pytest.Config) -> None:
    """Generated code of etcd3, from before protobuf's present ways: one warning for each of its hundreds of fields."""
    config.addinivalue_line('filterwarnings', 'ignore:Call to deprecated create function:DeprecationWarning')
