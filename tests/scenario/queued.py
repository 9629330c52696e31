"""Helpers for tests of queues."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.kit.audit import wait_audit_clean
from tests.kit.commands import Control
from tests.kit.faulty_placement import FaultyPlacement
from tests.kit.story import SMALL_QUERY, run_in_process

QUEUED_LINE = re.compile(r'QUEUED INSTANCE ([0-9a-f-]{36})\n')
TOY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


@pytest.fixture
def small_cluster(cluster: Control) -> Control:
    """Provide the cluster with the flavor small, four of which fill a toy compute."""
    assert cluster.eschedule('flavor', 'set', 'small', SMALL_QUERY).code == 0
    return cluster


def enqueue_request(control: Control, *words: str) -> str:
    done = run_in_process(control, '--queue', *(words if '--flavor' in words else ('--flavor', 'small', *words)))
    assert done.code == 0, done
    match = QUEUED_LINE.match(done.stdout)
    assert match, done
    return match[1]


def list_waiting(control: Control) -> list[str]:
    return [key.rsplit('/', 1)[1] for key in control.etcd.list_keys('/queues/') if not key.endswith('/taker')]


@contextmanager
def record_placement_calls(control: Control) -> Iterator[tuple[str, list[str]]]:
    """Yield the URL of a proxy of placement, and the paths that are requested through it."""
    requested_paths: list[str] = []
    with FaultyPlacement(control.placement.port) as placement:
        placement.fail('broken', lambda _, path: bool(requested_paths.append(path)))
        yield placement.url, requested_paths
        wait_audit_clean(control)  # for computes that have just ended, an audit waits
        control.at_exit.close()  # before the proxy ends
