"""F31: too few descriptors or too little memory: one clear line, or it works.

There is never a busy loop, nor a daemon that no longer responds.
"""

from __future__ import annotations

import subprocess
import time
import uuid
from collections.abc import Mapping

import pytest

from ecomp.agent import process
from ecomp.conf import EtcdConfig
from ecomp.store.client import Entry, Store
from ecomp.store.presence import Presence
from ecomp.store.watch import Follower
from tests.kit.commands import Control
from tests.kit.hands import assert_idle, read_guests
from tests.kit.invariants import check_invariants
from tests.kit.servers import SLOWDOWN_FACTOR, wait_until
from tests.kit.story import (
    SMALL_QUERY,
    boot,
    parse_notice,
    place,
    read_log,
    read_record,
    run_concurrently,
    wait_address,
)
from tests.kit.tuned import make_tuned


@pytest.mark.parametrize(
    ('limit', 'says'),
    [
        ('--nofile=8', '8 file descriptors'),
        ('--nofile=64', '64 file descriptors'),
        (f'--as={512 * 2**20}', f'{512 * 2**20} bytes of address space'),
        (f'--as={100 * 2**20}', f'{100 * 2**20} bytes of address space'),
    ],
)
def test_limits_below_the_minimum_are_refused(cluster: Control, limit: str, says: str) -> None:
    """F31: ecompute with 64 descriptors, or 512 MiB: one line names the limit, exit 2, nothing registered (fake)."""
    compute = make_tuned(cluster, prefix=['prlimit', limit, '--'], start=False)
    began = time.monotonic()
    compute.launch()
    assert compute._process is not None
    assert compute._process.wait(SLOWDOWN_FACTOR * 30) == 2
    assert time.monotonic() - began < SLOWDOWN_FACTOR * 15
    (line,) = read_log(compute)
    assert line.startswith(f'ecompute: this process is limited to {says}, but needs '), line
    assert cluster.placement.read_inventory(compute.uuid) == {}
    assert cluster.etcd.list_keys('/computes/') == []


def test_minimum_limits_are_enough(cluster: Control) -> None:
    """F31: ecompute with exactly its stated minimum works, for many requests too, and is idle afterwards (fake)."""
    words = {'RLIMIT_NOFILE': '--nofile', 'RLIMIT_AS': '--as'}
    minimums = {limit: minimum for limit, minimum, *_ in process.REQUIRED_LIMITS}
    import resource

    prefix = ['prlimit', *(f'{word}={minimums[getattr(resource, name)]}' for name, word in words.items()), '--']
    compute = make_tuned(cluster, 'VCPU:16,DISK_GB:16,MEMORY_MB:4096', prefix=prefix)
    instances = [parse_notice(result)[1] for result in run_concurrently(cluster, [[SMALL_QUERY]] * 12)]
    for instance in instances:
        wait_address(cluster, instance)
    destroyed = cluster.eschedule('destroy', '--wait', *instances)
    assert destroyed.code == 0, destroyed
    with assert_idle(compute.pid):
        time.sleep(3)  # the measuring period
    assert read_log(compute)
    check_invariants(cluster, compute)


def test_exhausted_descriptors_are_survived(cluster: Control) -> None:
    """F31: no free descriptor at run time: it survives idle, logs it, and completes all work afterwards (fake)."""
    compute = make_tuned(cluster)
    _, before = place(cluster)
    address = wait_address(cluster, before)
    # Open descriptors stay open; no number is free for another one.
    subprocess.run(['prlimit', f'--pid={compute.pid}', '--nofile=3:'], check=True)
    _, instance = place(cluster)
    wait_until(lambda: len(list_problems(compute.log.read_text())) > 1, 30, 'it says so')
    with assert_idle(compute.pid, 0.1):
        time.sleep(3)  # the measuring period
    assert compute.is_running
    subprocess.run(['prlimit', f'--pid={compute.pid}', '--nofile=1024:'], check=True)
    wait_until(
        lambda: (read_record(cluster, instance) or {}).get('state') in ('active', 'error'), 60, 'it has ended one way'
    )
    other = boot(cluster)
    assert wait_address(cluster, before) == address
    assert {before, other} <= set(read_guests(compute))
    compute.restart()
    check_invariants(cluster, compute)


def list_problems(log: str) -> list[str]:
    """Return the log lines that are warnings or errors, after one entry for the log itself."""
    return ['log', *(line for line in log.splitlines() if ' WARNING ' in line or ' ERROR ' in line)]


def test_threads_survive_unforeseen_exceptions(cluster: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """F31: unforeseen exceptions, such as MemoryError, end neither the follower nor the presence (fake)."""
    monkeypatch.setattr('ecomp.store.presence.LEASE_SECONDS', 1)
    key, config = f'/computes/{uuid.uuid4()}', EtcdConfig((cluster.etcd.endpoint,))
    store, states = Store(config), list[Mapping[str, Entry]]()
    failures = [MemoryError('none'), RuntimeError("can't start new thread")]

    def on_state(state: Mapping[str, Entry]) -> None:
        if failures:
            raise failures.pop()
        states.append(state)

    refresh, faults = store.keep_alive, [MemoryError('none'), RuntimeError("can't start new thread")]

    def keep_alive(lease: int) -> int:
        if faults:
            raise faults.pop()
        return refresh(lease)

    monkeypatch.setattr(store, 'keep_alive', keep_alive)
    follower, lost = Follower(config, [('/computes/', on_state)]), list[str]()
    presence = Presence(store, key, {'token': 'mine'}, lost.append)
    try:
        follower.start()
        presence.start()
        wait_until(lambda: states and key in states[-1], 20, 'it follows')
        wait_until(lambda: not faults, 20, 'it was refreshed again')
        cluster.etcd.delete(key)
        wait_until(lambda: cluster.etcd.get(key), 20, 'it is put again')
        assert (failures, lost) == ([], [])
    finally:
        follower.stop()
        presence.stop()
        store.close()
