"""What every part of the tests may ask for: real servers, shared by a session or a test's own.

`etcd`, `placement` and `control` are shared: tests on them keep apart by fresh uuids and prefixes, ask for candidates
with in_tree=, and leave the servers running. Who kills or freezes one takes `own_etcd`, `own_placement` or
`own_control`.

How the tests are spread over pytest-xdist's processes, what a skip means, and which tests have not been run for a while
is in tests/kit/plan.py.
"""

from __future__ import annotations

import base64
import importlib.util
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.kit.audit import audit_clean
from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check
from tests.kit.kept import kept
from tests.kit.lab_fixtures import host, hypervisors, lab, slow_images, small_host, whole
from tests.kit.servers import TOP, Etcd, PlacementServer

pytest_plugins = ['tests.kit.plan', 'tests.kit.judging']

__all__ = ['host', 'hypervisors', 'lab', 'slow_images', 'small_host', 'whole']

CONTROLS = ('own_control', 'several', 'secured', 'small')
"""Fixtures that are a Control, beside `cluster`."""

# No test asserts a time, and that would be one: beside other work an example may take any.
LENIENT = {'deadline': None, 'suppress_health_check': [HealthCheck.too_slow]}
settings.register_profile('usual', max_examples=30, **LENIENT)
settings.register_profile('all', max_examples=200, **LENIENT)
settings.load_profile('usual')  # with --all the other: tests/run says so


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
    yield from _control(own_etcd, own_placement, tmp_path, mortal=True)


def _control(
    etcd: Etcd, placement: PlacementServer, directory: Path, mortal: bool = False
) -> Iterator[Control]:
    control = Control(etcd, placement, directory, mortal=mortal)
    try:
        yield control
    finally:
        control.close()


@pytest.fixture(scope='session')
def guest_image() -> Path:
    """The small guest, kept. How it is made is tried by the README's commands and by functional/test_lab_hosts.py."""
    sources = [(TOP / f'ecomp/lab/{name}.py').read_text() for name in ('guest',)]

    def make(work: Path) -> Path:
        image = work / 'guest.qcow2'
        command = [sys.executable, '-m', 'ecomp.lab.elab', 'guest', str(image)]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        return image

    return kept('guest.qcow2', sources, make)


@pytest.fixture(scope='session')
def backends() -> Iterator[tuple[Etcd, PlacementServer]]:
    """An etcd and a placement for `cluster` alone, which empties them."""
    pytest.importorskip('placement', reason="openstack-placement is not installed: pip install '.[lab]'")
    with Etcd() as etcd, PlacementServer() as placement:
        yield etcd, placement


@pytest.fixture
def cluster(
    request: pytest.FixtureRequest, backends: tuple[Etcd, PlacementServer], tmp_path: Path
) -> Iterator[Control]:
    """etcd and placement with nothing in them, without the cost of starting them: no in_tree= is needed.

    If the test has not asked, the audit is asked in the end, unless the test is marked `unaudited` with a reason.
    """
    control = Control(*backends, tmp_path)
    failed = request.session.testsfailed
    try:
        yield control
        unaudited = control.audited or request.node.get_closest_marker('unaudited')
        if not unaudited and request.session.testsfailed == failed:
            audit_clean(control)
    finally:
        control.close()
        _empty(*backends)


@pytest.fixture
def compute(request: pytest.FixtureRequest) -> Iterator[Ecompute]:
    """A fake ecompute of the control that the test takes; check() is the end of a test that has passed."""
    taken = [name for name in CONTROLS if name in request.fixturenames]
    control: Control = request.getfixturevalue(taken[0] if taken else 'cluster')
    made, failed = control.ecompute(), request.session.testsfailed
    yield made
    if request.session.testsfailed == failed:
        check(control, made)


@pytest.fixture
def instance() -> str:
    """A uuid that nobody has used."""
    return str(uuid.uuid4())


def _empty(etcd: Etcd, placement: PlacementServer) -> None:
    every = base64.b64encode(b'\0').decode()
    etcd.call('kv/deleterange', {'key': every, 'range_end': every})
    placement.database.empty()
