"""Actions of the fault tests on eschedules and ecomputes, and observations of them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ecomp.agent.host.claims import CONFIRMATION_SECONDS, ClaimKeeper
from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from tests.kit.audit import wait_audit_clean
from tests.kit.commands import Command, Control, Ecompute
from tests.kit.invariants import check_invariants, read_lasting_keys
from tests.kit.process import is_stopped
from tests.kit.servers import b64, wait_until
from tests.kit.story import read_log

LARGE_INVENTORY = 'VCPU:64,DISK_GB:64,MEMORY_MB:65536'
_numbers = itertools.count(1)


class FailpointRecord:
    def __init__(self, directory: Path) -> None:
        self._path = directory / f'fired-{next(_numbers)}'

    def make_environment(self, failpoint: str) -> dict[str, str]:
        """Return the variables that arm a failpoint (see ecomp.failpoints), or none for ''."""
        return {'ECOMP_FAILPOINT': failpoint, 'ECOMP_FAILPOINT_FIRED': str(self._path)} if failpoint else {}

    @property
    def names(self) -> list[str]:
        return [line.split()[0] for line in self._path.read_text().splitlines()] if self._path.exists() else []


class Eschedule(Command):
    """A running eschedule, armed with `failpoint`. `with` kills it."""

    def __init__(self, control: Control, *words: str, failpoint: str = '', config: Path | None = None) -> None:
        self._record = FailpointRecord(control.directory)
        command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(config or control.schedule_yaml), *words]
        super().__init__(command, control.directory, self._record.make_environment(failpoint))

    def assert_killed_at(self, failpoint: str) -> None:
        result = self.wait()
        assert result.code == -signal.SIGKILL, result
        assert self._record.names[-1:] == [failpoint], (self._record.names, result)

    def wait_frozen_at(self, failpoint: str) -> None:
        def is_frozen() -> bool:
            assert not self.has_ended, (failpoint, self.wait())
            return self._record.names[-1:] == [failpoint] and is_stopped(self.pid)

        wait_until(is_frozen, 30, f'eschedule is frozen at {failpoint}')


class ArmedEcompute(Ecompute):
    failpoint = ''
    _record: FailpointRecord

    def environment(self) -> dict[str, str]:
        # Each start has a separate record file.
        self._record = FailpointRecord(self.directory)
        return {**super().environment(), **self._record.make_environment(self.failpoint)}

    def wait_frozen_at(self, failpoint: str) -> None:
        def is_frozen() -> bool:
            assert self.is_running, f'{failpoint} was not reached:\n{self.tail_log()}'
            return self._record.names[-1:] == [failpoint] and is_stopped(self.pid)

        wait_until(is_frozen, 30, f'ecompute is frozen at {failpoint}; fired: {self._record.names}')

    def wait_frozen(self, number: int) -> str:
        """Wait for the `number`th freeze at a failpoint, and return that failpoint."""

        def is_frozen() -> bool:
            assert self.is_running, f'no failpoint was reached:\n{self.tail_log()}'
            return len(self._record.names) == number and is_stopped(self.pid)

        wait_until(is_frozen, 30, f'ecompute is frozen; fired: {self._record.names}')
        return self._record.names[-1]


def wait_killed_at(compute: ArmedEcompute, step: str, seconds: float = 30.0) -> None:
    wait_until(lambda: not compute.is_running, seconds, f'it is killed at {step}; fired: {compute._record.names}')
    assert compute._process is not None
    assert compute._process.returncode == -signal.SIGKILL, compute.tail_log()
    # Another thread may arrive between the first one's note and its signal.
    assert set(compute._record.names) == {step}, compute._record.names


def restart_unarmed(compute: ArmedEcompute) -> None:
    compute.failpoint = ''
    compute.start()


def restart_accepting_etcd(compute: Ecompute) -> None:
    if compute.is_running:
        assert compute.stop() == 0
    compute.options = ['--accept-new-etcd']
    compute.start()
    compute.options = []


def mark_slow_steps(steps: Sequence[str], *quick: str) -> list[Any]:
    return [pytest.param(step, marks=[] if step in quick else [pytest.mark.slow]) for step in steps]


def check_settled(control: Control, *computes: Ecompute) -> None:
    check_invariants(control, *computes)
    wait_audit_clean(control)


def expire_key(control: Control, key: str) -> None:
    lease = read_lasting_keys(control)[key].lease
    assert lease, f'{key} is on no lease'
    control.etcd.call('lease/revoke', {'ID': lease})
    # A process that waited for the key's end may have recreated it on its own lease.
    assert lease not in {stored.lease for stored in read_lasting_keys(control).values()}


def expire_attempts(control: Control) -> None:
    # The owners of the attempts have finished, or are assumed to have.
    for key in control.etcd.list_keys('/requests/'):
        expire_key(control, key)


def check_claims_twice(control: Control, compute: Ecompute, guests: Collection[str] = ()) -> None:
    """Run two consecutive checks of a compute's claim keeper, 60 s apart on a fake clock.

    Both are required (rule: orphaned-claim). The compute's own checks are a minute apart on the real clock.
    """
    store, placement = Store(EtcdConfig((control.etcd.endpoint,))), Placement(control.placement.url)
    try:
        keeper = ClaimKeeper(compute.uuid, store, placement)
        entries = store.snapshot(keys.request_prefix(compute.uuid)).entries.values()
        held = {keys.get_last_part(each.key): json.loads(each.value)['allocations'] for each in entries}
        wanted = {name: each[compute.uuid]['resources'] for name, each in held.items() if each}
        for now in (0.0, CONFIRMATION_SECONDS):
            keeper.reconcile(guests, now, targets=wanted)
    finally:
        store.close()
        placement.close()


def count_losses(compute: Ecompute, backend: str) -> tuple[int, int]:
    lines = [line for line in read_log(compute) if backend in line]
    lost_count = sum('trying again until' in line for line in lines)
    back_count = sum(
        'trying again' not in line and ('is back' in line or 'this failure has ended' in line) for line in lines
    )
    return lost_count, back_count


def read_cpu_seconds(pid: int) -> float:
    # See proc(5).
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


@contextlib.contextmanager
def assert_idle(pid: int, share: float = 0.05) -> Iterator[None]:
    """Assert that a process takes at most this share of a core inside the context."""
    started, before = time.monotonic(), read_cpu_seconds(pid)
    yield
    time.sleep(max(started + 2.0 - time.monotonic(), 0.0))
    cpu_used, elapsed = read_cpu_seconds(pid) - before, time.monotonic() - started
    assert cpu_used <= share * elapsed + 0.02, f'{cpu_used:.2f} s of processor time in {elapsed:.1f} s'


def read_guests(compute: Ecompute) -> dict[str, dict[str, Any]]:
    path = compute.directory / 'state' / 'fake.json'
    all_guests = json.loads(path.read_text()) if path.exists() else []
    return {guest['instance']: guest for guest in all_guests}


def list_running_guests(compute: Ecompute) -> set[str]:
    return {name for name, guest in read_guests(compute).items() if guest['running']}


def read_revision(control: Control, key: str = '') -> int:
    """Return the revision that last wrote a key, or without a key etcd's current revision."""
    answer = control.etcd.call('kv/range', {'key': b64(key or 'x')})
    return int(answer['kvs'][0]['mod_revision'] if key else answer['header']['revision'])
