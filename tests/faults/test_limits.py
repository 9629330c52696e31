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
from tests.kit.hands import guests, idle
from tests.kit.invariants import check
from tests.kit.servers import PATIENCE, until
from tests.kit.story import SMALL, addressed, at_once, boot, log_of, notified, place, record
from tests.kit.tuned import tuned


@pytest.mark.parametrize(
    ('limit', 'says'),
    [
        ('--nofile=8', '8 file descriptors'),
        ('--nofile=64', '64 file descriptors'),
        (f'--as={512 * 2**20}', f'{512 * 2**20} bytes of address space'),
        (f'--as={100 * 2**20}', f'{100 * 2**20} bytes of address space'),
    ],
)
def test_too_little(cluster: Control, limit: str, says: str) -> None:
    """F31: ecompute with 64 descriptors, or 512 MiB: one line names the limit, exit 2, nothing registered (fake)."""
    compute = tuned(cluster, prefix=['prlimit', limit, '--'], start=False)
    began = time.monotonic()
    compute.launch()
    assert compute._process is not None
    assert compute._process.wait(PATIENCE * 30) == 2
    assert time.monotonic() - began < PATIENCE * 15
    (line,) = log_of(compute)
    assert line.startswith(f'ecompute: limited to {says}, and '), line
    assert cluster.placement.inventory(compute.uuid) == {}
    assert cluster.etcd.keys('/computes/') == []


def test_just_enough(cluster: Control) -> None:
    """F31: ecompute with exactly its stated minimum works, for many requests too, and is idle afterwards (fake)."""
    words = {'RLIMIT_NOFILE': '--nofile', 'RLIMIT_AS': '--as'}
    minimums = {limit: minimum for limit, minimum, *_ in process.NEEDED}
    import resource

    prefix = ['prlimit', *(f'{word}={minimums[getattr(resource, name)]}' for name, word in words.items()), '--']
    compute = tuned(cluster, 'VCPU:16,DISK_GB:16,MEMORY_MB:4096', prefix=prefix)
    instances = [notified(result)[1] for result in at_once(cluster, [[SMALL]] * 12)]
    for instance in instances:
        addressed(cluster, instance)
    destroyed = cluster.eschedule('destroy', '--wait', *instances)
    assert destroyed.code == 0, destroyed
    with idle(compute.pid):
        time.sleep(3)  # the measuring period
    assert log_of(compute)
    check(cluster, compute)


def test_descriptors_run_out(cluster: Control) -> None:
    """F31: no free descriptor at run time: it survives idle, logs it, and completes all work afterwards (fake)."""
    compute = tuned(cluster)
    _, before = place(cluster)
    address = addressed(cluster, before)
    # Open descriptors stay open; no number is free for another one.
    subprocess.run(['prlimit', f'--pid={compute.pid}', '--nofile=3:'], check=True)
    _, instance = place(cluster)
    until(lambda: len(words(compute.log.read_text())) > 1, 30, 'it says so')
    with idle(compute.pid, 0.1):
        time.sleep(3)  # the measuring period
    assert compute.is_running
    subprocess.run(['prlimit', f'--pid={compute.pid}', '--nofile=1024:'], check=True)
    until(lambda: (record(cluster, instance) or {}).get('state') in ('active', 'error'), 60, 'it has ended one way')
    other = boot(cluster)
    assert addressed(cluster, before) == address
    assert {before, other} <= set(guests(compute))
    compute.restart()
    check(cluster, compute)


def words(log: str) -> list[str]:
    """Return the log lines that are warnings or errors, after one entry for the log itself."""
    return ['log', *(line for line in log.splitlines() if ' WARNING ' in line or ' ERROR ' in line)]


def test_no_thread_dies_unheard(cluster: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """F31: unforeseen exceptions, such as MemoryError, end neither the follower nor the presence (fake)."""
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
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
        until(lambda: states and key in states[-1], 20, 'it follows')
        until(lambda: not faults, 20, 'it was refreshed again')
        cluster.etcd.delete(key)
        until(lambda: cluster.etcd.get(key), 20, 'it is put again')
        assert (failures, lost) == ([], [])
    finally:
        follower.stop()
        presence.stop()
        store.close()
