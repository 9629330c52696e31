"""What waits in a queue of pretended computes, who takes it, and what they are overheard asking."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.servers import until
from tests.kit.story import SMALL, called

QUEUED = re.compile(r'QUEUED INSTANCE ([0-9a-f-]{36})\n')
TOY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


@pytest.fixture
def small(cluster: Control) -> Control:
    """The cluster, with the flavor small: four of them fill a toy."""
    assert cluster.eschedule('flavor', 'set', 'small', SMALL).code == 0
    return cluster


def queue(control: Control, *words: str) -> str:
    """Put one into the queue of the flavor small, unless `words` say otherwise; its uuid."""
    done = called(control, '--queue', *(words if '--flavor' in words else ('--flavor', 'small', *words)))
    assert done.code == 0, done
    found = QUEUED.match(done.stdout)
    assert found, done
    return found[1]


def waiting(control: Control) -> list[str]:
    """The instances that wait."""
    return [key.rsplit('/', 1)[1] for key in control.etcd.keys('/queues/') if not key.endswith('/taker')]


@contextmanager
def overheard(control: Control) -> Iterator[tuple[str, list[str]]]:
    """Placement at another URL, and the paths it has been asked for there."""
    asked: list[str] = []
    with FaultyPlacement(control.placement.port) as placement:
        placement.fail('broken', lambda _, path: bool(asked.append(path)))
        yield placement.url, asked
        control.at_exit.close()  # before their placement goes


def leaves_it(control: Control, asked: list[str], compute: Ecompute, instance: str) -> None:
    """The compute finds out that it is disabled, lets go of the instance if it was at it, and has not taken it."""
    traits = f'/resource_providers/{compute.uuid}/traits'
    until(lambda: traits in asked, 20, 'it has asked what it is')
    until(lambda: control.etcd.get(f'/queues/small/{instance}/taker') is None, 20, 'it is not at it')
    assert waiting(control) == [instance]
    assert instance not in control.placement.consumers(compute.uuid)
