"""Fixtures of the stories: what those with pretended guests stand on, and the image of the small real one."""

from __future__ import annotations

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.commands import Control
from tests.faults.audit import audit_clean
from tests.servers import Etcd, PlacementServer


@pytest.fixture(scope='session')
def guest_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small guest, made once."""
    image = tmp_path_factory.mktemp('guest') / 'guest.qcow2'
    made = subprocess.run(
        [sys.executable, '-m', 'ecomp.lab.elab', 'guest', str(image)], capture_output=True, text=True, timeout=240
    )
    assert made.returncode == 0, made.stderr
    return image


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


def _empty(etcd: Etcd, placement: PlacementServer) -> None:
    every = base64.b64encode(b'\0').decode()
    etcd.call('kv/deleterange', {'key': every, 'range_end': every})
    for provider in placement.call('GET', '/resource_providers')['resource_providers']:
        for consumer in placement.consumers(provider['uuid']):
            placement.call('DELETE', f'/allocations/{consumer}')
        placement.call('DELETE', f'/resource_providers/{provider["uuid"]}')
