"""F15: eschedule has its claim, and loses etcd. No claim is left for good, and it is told how to go on."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.commands import Control, Result, write_config
from tests.kit.hands import Eschedule, lapse, look_twice, settled
from tests.kit.invariants import everything
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE
from tests.kit.story import SMALL, addressed, notified, one_line

IN_TIME = 40.0


@pytest.fixture
def etcd_proxy(cluster: Control) -> Iterator[Proxy]:
    """A proxy before the cluster's etcd."""
    with Proxy(cluster.etcd.port) as proxy:
        yield proxy


def cut_off(control: Control, proxy: Proxy, directory: Path, instance: str, back: bool = False) -> Result:
    """How an eschedule ends that loses etcd for good (or for a moment) once it has its claim."""
    config = write_config(directory / 'cut.yaml', proxy.address, control.placement.url)
    words = (SMALL, '--uuid', instance)
    with Eschedule(control, *words, failpoint='claimed:stop', config=config) as eschedule:
        eschedule.stopped_at('claimed')
        assert len(control.placement.allocations(instance)) == 1
        proxy.go_away()
        if back:
            proxy.come_back()
        began = time.monotonic()
        eschedule.go_on()
        result = eschedule.end()
        assert time.monotonic() - began < PATIENCE * IN_TIME
        return result


@pytest.mark.parametrize('then', ['the same again', 'nobody comes back'])
def test_it_loses_etcd_for_good(cluster: Control, etcd_proxy: Proxy, tmp_path: Path, then: str) -> None:
    """F15: eschedule loses etcd after its claim: exit 7 with its uuid; resumed, or released by the computes (fake)"""
    compute, instance = cluster.ecompute(), str(uuid.uuid4())
    result = cut_off(cluster, etcd_proxy, tmp_path, instance)
    assert result.stdout == ''
    one_line(result, 7, 'etcd', etcd_proxy.address, f'--uuid {instance}')
    assert cluster.etcd.get(f'/requests/{instance}') is not None, 'somebody is at it, for as long as the lease lives'
    if then == 'the same again':
        assert notified(cluster.eschedule(SMALL, '--uuid', instance)) == (compute.uuid, instance)
        addressed(cluster, instance)
    else:
        look_twice(cluster, compute)
        assert len(cluster.placement.allocations(instance)) == 1
        lapse(cluster, f'/requests/{instance}')
        look_twice(cluster, compute)
        assert cluster.placement.allocations(instance) == {}
        assert [key for key in everything(cluster) if instance in key] == []
    settled(cluster, compute)


def test_it_loses_etcd_for_a_moment(cluster: Control, etcd_proxy: Proxy, tmp_path: Path) -> None:
    """F15: eschedule's connection to etcd breaks after its claim, and etcd is there: placed, or undone whole (fake)"""
    compute, instance = cluster.ecompute(), str(uuid.uuid4())
    result = cut_off(cluster, etcd_proxy, tmp_path, instance, back=True)
    if result.code == 0:
        assert notified(result) == (compute.uuid, instance)
        addressed(cluster, instance)
    else:
        assert result.code == 5, result
        assert 'undone' in result.stderr
        assert cluster.placement.allocations(instance) == {}
        assert [key for key in everything(cluster) if instance in key] == []
    settled(cluster, compute)
