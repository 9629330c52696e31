"""`host forget` on real etcd and placement."""

from __future__ import annotations

import os
import subprocess
import uuid

import pytest

from ecomp.errors import Conflict, NotFound
from ecomp.model import keys
from ecomp.scheduler.operations.decommission import forget
from ecomp.store.client import Put
from tests.functional.cloud import Cloud


def run_etcdctl(cloud: Cloud, *words: str | bytes) -> bytes:
    command = ['etcdctl', f'--endpoints={cloud.etcd.endpoint}', *words]
    environment = {**os.environ, 'ETCDCTL_API': '3'}
    return subprocess.run(command, env=environment, check=True, capture_output=True, timeout=60).stdout


@pytest.mark.real_servers
def test_forget_advises_etcdctl_for_a_key_that_is_not_utf_8(cloud: Cloud) -> None:
    compute = cloud.make_compute(alive=False)
    prefix, messages = keys.request_prefix(compute), list[str]()
    # One key ends in three bytes that are not UTF-8, the other in the replacement character, which is valid UTF-8.
    cloud.store.commit([], [Put(f'{prefix}\udcff', 'x'), Put(f'{prefix}\ufffd', 'x')])

    def forget_compute() -> None:
        forget(cloud.store, cloud.placement, compute, 'hv1', lambda: 'now', messages.append, fenced=True)

    with pytest.raises(
        Conflict, match=f'compute hv1 is not forgotten: a key below {prefix} is not UTF-8 .* Fix: remove'
    ):
        forget_compute()
    key = run_etcdctl(cloud, 'get', '--keys-only', '--prefix', prefix)
    run_etcdctl(cloud, 'del', key.strip())
    forget_compute()
    assert messages == [
        f'{prefix}\ufffd: removed: no compute carries out this request',
        'hv1: its resource provider is removed',
    ]


def test_forget_needs_fenced_while_a_request_waits_in_a_queue(cloud: Cloud) -> None:
    """After a restore of etcd and placement, the compute may run a queued guest unclaimed."""
    compute, unknown = cloud.make_compute(alive=False), str(uuid.uuid4())
    cloud.etcd.put(keys.queue('small', str(uuid.uuid4())), '{}')

    def forget_compute(which: str, fenced: bool) -> None:
        forget(cloud.store, cloud.placement, which, which, lambda: 'now', lambda _: None, fenced)

    message = f'it may run queued requests. Fix: .* host forget {compute} --fenced'
    with pytest.raises(Conflict, match=message):
        forget_compute(compute, fenced=False)
    with pytest.raises(NotFound):
        forget_compute(unknown, fenced=False)
    forget_compute(compute, fenced=True)
    with pytest.raises(NotFound):
        forget_compute(compute, fenced=True)
