"""F31: too few descriptors or too little memory: one clear line, or it works; never a loop or a deaf daemon."""

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
    """F31: ecompute with 64 descriptors, or 512 MiB: one line names the limit, exit 2, nothing was registered (fake)"""
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
    """F31: ecompute with no more than what it says it needs works, many at once too, and is idle after (fake)"""
    words = {'RLIMIT_NOFILE': '--nofile', 'RLIMIT_AS': '--as'}
    least = {limit: least for limit, least, *_ in process.NEEDED}
    import resource

    prefix = ['prlimit', *(f'{word}={least[getattr(resource, name)]}' for name, word in words.items()), '--']
    compute = tuned(cluster, 'VCPU:16,DISK_GB:16,MEMORY_MB:4096', prefix=prefix)
    made = [notified(each)[1] for each in at_once(cluster, [[SMALL]] * 12)]
    for instance in made:
        addressed(cluster, instance)
    done = cluster.eschedule('destroy', '--wait', *made)
    assert done.code == 0, done
    with idle(compute.pid):
        time.sleep(3)  # what is measured is time
    assert log_of(compute)
    check(cluster, compute)


def test_descriptors_run_out(cluster: Control) -> None:
    """F31: no descriptor is left while it runs: it lives, is not busy, says so, and ends all of it afterwards (fake)"""
    compute = tuned(cluster)
    _, before = place(cluster)
    address = addressed(cluster, before)
    # What is open stays open; there is no number left for anything more.
    subprocess.run(['prlimit', f'--pid={compute.pid}', '--nofile=3:'], check=True)
    _, instance = place(cluster)
    until(lambda: len(words(compute.log.read_text())) > 1, 30, 'it says so')
    with idle(compute.pid, 0.1):
        time.sleep(3)  # what is measured is time
    assert compute.is_running
    subprocess.run(['prlimit', f'--pid={compute.pid}', '--nofile=1024:'], check=True)
    until(lambda: (record(cluster, instance) or {}).get('state') in ('active', 'error'), 60, 'it has ended one way')
    other = boot(cluster)
    assert addressed(cluster, before) == address
    assert {before, other} <= set(guests(compute))
    compute.restart()
    check(cluster, compute)


def words(log: str) -> list[str]:
    """The lines of a log that are warnings or worse, and one more for that there is a log."""
    return ['log', *(line for line in log.splitlines() if ' WARNING ' in line or ' ERROR ' in line)]


def test_no_thread_dies_unheard(cluster: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    """F31: what nobody thought of, such as no memory for a moment, ends neither the follower nor the presence (fake)"""
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
    key, config = f'/computes/{uuid.uuid4()}', EtcdConfig((cluster.etcd.endpoint,))
    store, seen = Store(config), list[Mapping[str, Entry]]()
    failures = [MemoryError('none'), RuntimeError("can't start new thread")]

    def on_state(state: Mapping[str, Entry]) -> None:
        if failures:
            raise failures.pop()
        seen.append(state)

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
        until(lambda: seen and key in seen[-1], 20, 'it follows')
        until(lambda: not faults, 20, 'it was refreshed again')
        cluster.etcd.delete(key)
        until(lambda: cluster.etcd.get(key), 20, 'it is put again')
        assert (failures, lost) == ([], [])
    finally:
        follower.stop()
        presence.stop()
        store.close()
