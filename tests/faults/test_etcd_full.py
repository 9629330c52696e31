"""F12: an etcd that is out of space."""

from __future__ import annotations

import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.etcd_away import frozen, said
from tests.faults.etcds import fill, make_room
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, lapse, running, settled
from tests.kit.invariants import allocations
from tests.kit.servers import Etcd, PlacementServer, until
from tests.kit.story import SMALL, SOON, addressed, at_once, boot_all, logged, logs, notified, one_line, record


@pytest.fixture
def small(own_placement: PlacementServer, tmp_path: Path) -> Iterator[Control]:
    """With an etcd that is soon full."""
    with Etcd(tmp_path / 'etcd', '--quota-backend-bytes=8388608') as etcd:
        control = Control(etcd, own_placement, tmp_path, mortal=True)
        try:
            yield control
        finally:
            control.close()


def test_no_space(small: Control, compute: Ecompute) -> None:
    """F12: etcd full: accepted destroys complete, new requests are refused and leave nothing, no build begins (fake)"""
    kept, destroyed = boot_all(small, 2)
    wanted = str(uuid.uuid4())

    def accepted() -> None:
        assert small.eschedule('destroy', destroyed).code == 0
        notified(small.eschedule(SMALL, '--uuid', wanted))
        fill(small.etcd)

    frozen(compute, accepted)
    until(lambda: running(compute) == {kept}, SOON, 'the destroy is carried out')
    until(lambda: small.etcd.get(f'/hosts/{compute.uuid}/{destroyed}') is None, SOON, 'its request is gone')
    assert small.placement.allocations(destroyed) == {}
    assert record(small, destroyed) is None
    one_line(small.eschedule(destroyed), 4, destroyed)
    assert logs(compute, destroyed, 'is gone')
    assert logs(compute, 'no record of its end is kept', 'defragment')
    before = allocations(small)
    keys = small.etcd.keys('/')
    for words in ((SMALL,), ('destroy', kept)):
        one_line(small.eschedule(*words), 7, 'takes no writes', 'compact and defragment it, and disarm its alarm')
    assert allocations(small) == before
    assert small.etcd.keys('/') == keys
    assert running(compute) == {kept}
    assert not logged(compute, 'INSTANTIATE', wanted)
    assert said(compute, 'takes no writes', 'trying again') == 1
    make_room(small.etcd)
    addressed(small, wanted)
    assert small.eschedule('destroy', '--wait', kept).code == 0


def test_no_space_and_frozen_past_the_lease(small: Control, compute: Ecompute) -> None:
    """F12: etcd full, and a compute frozen for longer than its lease: a destroy that was accepted completes (fake)"""
    kept, destroyed = boot_all(small, 2)

    def accepted() -> None:
        assert small.eschedule('destroy', destroyed).code == 0
        fill(small.etcd)
        lapse(small, f'/computes/{compute.uuid}')

    frozen(compute, accepted)
    until(lambda: small.etcd.get(f'/hosts/{compute.uuid}/{destroyed}') is None, SOON, 'its request is gone')
    assert running(compute) == {kept}
    assert small.placement.allocations(destroyed) == {}
    assert small.etcd.get(f'/computes/{compute.uuid}') is None
    make_room(small.etcd)
    until(lambda: small.etcd.get(f'/computes/{compute.uuid}'), SOON, 'it says again that it is alive')
    assert small.eschedule('destroy', '--wait', kept).code == 0


@pytest.mark.usefixtures('compute')
def test_full_between_claim_and_delivery(small: Control, instance: str) -> None:
    """F12: etcd is full when the request is to be delivered: exit 7, and the claim is released (fake)"""
    with Eschedule(small, SMALL, '--uuid', instance, failpoint='claimed:stop') as eschedule:
        eschedule.stopped_at('claimed')
        assert small.placement.allocations(instance)
        fill(small.etcd)
        eschedule.go_on()
        one_line(eschedule.end(), 7, 'takes no writes')
    assert small.placement.allocations(instance) == {}
    assert small.etcd.keys('/requests/') == []
    make_room(small.etcd)
    notified(small.eschedule(SMALL, '--uuid', instance))
    addressed(small, instance)


@pytest.mark.slow
def test_full_while_a_guest_is_destroyed(small: Control) -> None:
    """F12: full between the record that says destroying and the end: no difference; several at once (fake)"""
    compute = small.ecompute()
    instances = boot_all(small, 4)

    def all_destroyed() -> None:
        assert {done.code for done in at_once(small, [('destroy', each) for each in instances], 2)} == {0}
        fill(small.etcd)

    frozen(compute, all_destroyed)
    until(lambda: running(compute) == set(), SOON, 'all are destroyed')
    until(lambda: small.etcd.keys('/hosts/') == [], SOON, 'no request is left')
    assert allocations(small) == {}
    assert small.etcd.keys('/instances/') == []
    make_room(small.etcd)
    assert compute.stop(signal.SIGTERM) == 0
    settled(small)
