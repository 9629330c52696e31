"""Fixtures for all parts of the tests: real servers, shared or private to one test.

On the shared ones tests use fresh uuids and prefixes, ask for candidates with in_tree=, and leave the servers running.
A test that kills or freezes a server takes `own_etcd`, `own_placement` or `own_control`.
"""

from __future__ import annotations

import base64
import importlib.util
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from ecomp.agent.images import child
from tests.kit import forked
from tests.kit.audit import wait_audit_clean
from tests.kit.boot_sectors import DHCP_SOURCE, make_dhcp_image
from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants
from tests.kit.kept import cache_file
from tests.kit.lab_fixtures import host, hypervisors, lab, shared_lab, slow_images, small_host
from tests.kit.light_placement import LightPlacement
from tests.kit.servers import TOP, Etcd, PlacementServer

# What a shell starts in the background ignores it, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ['tests.kit.plan', 'tests.kit.judging']

__all__ = ['host', 'hypervisors', 'lab', 'slow_images', 'small_host', 'shared_lab']

# Fixtures that provide a Control, besides `cluster`.
CONTROL_FIXTURES = ('own_control', 'cluster_control', 'secured', 'small_etcd_control')

# A deadline would assert a time, which no test does: on a busy machine an example may take any time.
LENIENT = {'deadline': None, 'suppress_health_check': [HealthCheck.too_slow]}
settings.register_profile('usual', max_examples=30, **LENIENT)
settings.register_profile('all', max_examples=200, **LENIENT)
settings.load_profile('usual')  # tests/run --all selects the other profile


@pytest.fixture(autouse=True)
def forked_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    # The programs of other processes are the real ones.
    monkeypatch.setattr(child, 'start_program', forked.start_program)


def _require_program(program: str, package: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f'{program} is not installed: apt-get install {package}')


def _require_module(name: str, skip_reason: str) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(skip_reason)


@pytest.fixture(scope='session')
def etcd() -> Iterator[Etcd]:
    _require_program('etcd', 'etcd-server')
    with Etcd() as server:
        yield server


@pytest.fixture(scope='session')
def placement() -> Iterator[PlacementServer]:
    _require_module('placement', "openstack-placement is not installed: pip install '.[lab]'")
    with PlacementServer() as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Etcd]:
    _require_program('etcd', 'etcd-server')
    with Etcd(tmp_path / 'etcd') as server:
        yield server


@pytest.fixture(scope='session')
def usual_placement(pytestconfig: pytest.Config) -> type[PlacementServer]:
    """The placement for tests that are not about it."""
    return PlacementServer if pytestconfig.getoption('real_servers') else LightPlacement


@pytest.fixture
def own_placement(
    request: pytest.FixtureRequest, usual_placement: type[PlacementServer], tmp_path: Path
) -> Iterator[PlacementServer]:
    is_real = request.node.get_closest_marker('real_servers')
    with (PlacementServer if is_real else usual_placement)(tmp_path / 'placement') as server:
        yield server


@pytest.fixture(scope='session')
def shared_placement(usual_placement: type[PlacementServer]) -> Iterator[PlacementServer]:
    with usual_placement() as server:
        yield server


@pytest.fixture
def control(request: pytest.FixtureRequest, etcd: Etcd, tmp_path: Path) -> Iterator[Control]:
    """The session's etcd and placement, with the test's own configuration and ecomputes.

    The placement is the real one if the test uses that, too.
    """
    placement = 'placement' if 'placement' in request.fixturenames else 'shared_placement'
    yield from _open_control(etcd, request.getfixturevalue(placement), tmp_path)


@pytest.fixture
def own_control(own_etcd: Etcd, own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    yield from _open_control(own_etcd, own_placement, tmp_path, is_mortal=True)


def _open_control(
    etcd: Etcd, placement: PlacementServer, directory: Path, is_mortal: bool = False
) -> Iterator[Control]:
    with closing(Control(etcd, placement, directory, is_mortal=is_mortal)) as control:
        yield control


@pytest.fixture(scope='session')
def guest_image() -> Path:
    """The small guest image, cached between runs. The README's commands test its build."""
    sources = [(TOP / f'ecomp/lab/{name}.py').read_text() for name in ('guest',)]

    def make(work: Path) -> Path:
        image = work / 'guest.qcow2'
        command = [sys.executable, '-m', 'ecomp.lab.elab', 'guest', str(image)]
        completed = subprocess.run(command, capture_output=True, text=True)
        assert completed.returncode == 0, completed.stderr
        return image

    return cache_file('guest.qcow2', sources, make)


@pytest.fixture(scope='session')
def dhcp_image() -> Path:
    """A guest that only gets itself an address, and hardly uses the processor."""
    return cache_file('dhcp.qcow2', DHCP_SOURCE.read_text(), make_dhcp_image)


@pytest.fixture(scope='session')
def backends(usual_placement: type[PlacementServer]) -> Iterator[tuple[Etcd, PlacementServer]]:
    """An etcd and a placement for `cluster` alone, which empties them."""
    with Etcd() as etcd, usual_placement() as placement:
        yield etcd, placement


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, backends: tuple[Etcd, PlacementServer], tmp_path: Path
) -> Iterator[Control]:
    """An empty etcd and placement, without the cost of starting them. No in_tree= is needed.

    At the end the audit must be clean, unless the test has already checked that or is marked `unaudited` with a reason.
    """
    control = Control(*backends, tmp_path)
    failed = request.session.testsfailed
    try:
        yield control
        unaudited = control.is_audited or request.node.get_closest_marker('unaudited')
        if not unaudited and request.session.testsfailed == failed:
            wait_audit_clean(control)
    finally:
        control.close()
        _empty_backends(*backends)


@pytest.fixture
def compute(request: pytest.FixtureRequest) -> Iterator[Ecompute]:
    controls = [name for name in CONTROL_FIXTURES if name in request.fixturenames]
    control: Control = request.getfixturevalue(controls[0] if controls else 'cluster')
    ecompute, failed = control.ecompute(), request.session.testsfailed
    yield ecompute
    if request.session.testsfailed == failed:
        check_invariants(control, ecompute)


@pytest.fixture
def instance() -> str:
    return str(uuid.uuid4())


def _empty_backends(etcd: Etcd, placement: PlacementServer) -> None:
    all_keys = base64.b64encode(b'\0').decode()
    etcd.call('kv/deleterange', {'key': all_keys, 'range_end': all_keys})
    placement.database.empty()
