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

from ecomp.agent.host.claims import APART, ClaimKeeper
from ecomp.conf import EtcdConfig
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from tests.kit.audit import audit_clean
from tests.kit.commands import Command, Control, Ecompute
from tests.kit.invariants import check, everything
from tests.kit.process import is_stopped
from tests.kit.servers import b64, until
from tests.kit.story import log_of

BIG = 'VCPU:64,DISK_GB:64,MEMORY_MB:65536'
_numbers = itertools.count(1)


class Fired:
    """The file in which armed failpoints record that they were reached."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / f'fired-{next(_numbers)}'

    def environment(self, failpoint: str) -> dict[str, str]:
        """Return the variables that arm a failpoint (see ecomp.failpoints); none for ''."""
        return {'ECOMP_FAILPOINT': failpoint, 'ECOMP_FAILPOINT_FIRED': str(self._path)} if failpoint else {}

    @property
    def names(self) -> list[str]:
        return [line.split()[0] for line in self._path.read_text().splitlines()] if self._path.exists() else []


class Eschedule(Command):
    """A running eschedule, armed with `failpoint`; `with` kills it."""

    def __init__(self, control: Control, *words: str, failpoint: str = '', config: Path | None = None) -> None:
        self._fired = Fired(control.directory)
        command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(config or control.schedule_yaml), *words]
        super().__init__(command, control.directory, self._fired.environment(failpoint))

    def killed_at(self, failpoint: str) -> None:
        result = self.end()
        assert result.code == -signal.SIGKILL, result
        assert self._fired.names[-1:] == [failpoint], (self._fired.names, result)

    def stopped_at(self, failpoint: str) -> None:
        def is_frozen() -> bool:
            assert not self.has_ended, (failpoint, self.end())
            return self._fired.names[-1:] == [failpoint] and is_stopped(self.pid)

        until(is_frozen, 30, f'eschedule is frozen at {failpoint}')


class Armed(Ecompute):
    """An ecompute that dies or freezes at its failpoints, each time it is started with some."""

    failpoint = ''
    _fired: Fired

    def environment(self) -> dict[str, str]:
        """Arm the failpoint, with a separate record file for each start."""
        self._fired = Fired(self.directory)
        return {**super().environment(), **self._fired.environment(self.failpoint)}

    def stopped_at(self, failpoint: str) -> None:
        def is_frozen() -> bool:
            assert self.is_running, f'{failpoint} was not reached:\n{self.last_words()}'
            return self._fired.names[-1:] == [failpoint] and is_stopped(self.pid)

        until(is_frozen, 30, f'ecompute is frozen at {failpoint}; fired: {self._fired.names}')


def killed_at(compute: Armed, step: str, seconds: float = 30.0) -> None:
    until(lambda: not compute.is_running, seconds, f'it is killed at {step}; fired: {compute._fired.names}')
    assert compute._process is not None
    assert compute._process.returncode == -signal.SIGKILL, compute.last_words()
    assert compute._fired.names == [step]


def start_again(compute: Armed) -> None:
    compute.failpoint = ''
    compute.start()


def accept(compute: Ecompute) -> None:
    """Restart the compute once with --accept-new-etcd; the next start is an ordinary one."""
    if compute.is_running:
        assert compute.stop() == 0
    compute.options = ['--accept-new-etcd']
    compute.start()
    compute.options = []


def some(steps: Sequence[str], *quick: str) -> list[Any]:
    """Make test parameters of the steps; all but the quick ones are marked slow."""
    return [pytest.param(step, marks=[] if step in quick else [pytest.mark.slow]) for step in steps]


def settled(control: Control, *computes: Ecompute) -> None:
    check(control, *computes)
    audit_clean(control)


def lapse(control: Control, key: str) -> None:
    """Revoke the lease of a key, as if it had expired."""
    lease = everything(control)[key].lease
    assert lease, f'{key} is on no lease'
    control.etcd.call('lease/revoke', {'ID': lease})
    # A process that waited for the key's end may have recreated it on its own lease.
    assert lease not in {stored.lease for stored in everything(control).values()}


def lapse_requests(control: Control) -> None:
    """Revoke the lease of every attempt, whose owners have finished or are assumed to have."""
    for key in control.etcd.keys('/requests/'):
        lapse(control, key)


def look_twice(control: Control, compute: Ecompute, guests: Collection[str] = ()) -> None:
    """Run two consecutive checks of a compute's claim keeper, 60 s apart on a fake clock.

    Rule 4 requires both. The compute's own checks are a minute apart on the real clock: a slow test waits for them.
    """
    store, placement = Store(EtcdConfig((control.etcd.endpoint,))), Placement(control.placement.url)
    try:
        keeper = ClaimKeeper(compute.uuid, store, placement)
        for now in (0.0, APART):
            keeper.look(guests, now)
    finally:
        store.close()
        placement.close()


def losses(compute: Ecompute, what: str) -> tuple[int, int]:
    """Count the log lines that report `backend` lost, and those that report it back."""
    lines = [line for line in log_of(compute) if what in line]
    lost_count = sum('trying again until' in line for line in lines)
    back_count = sum('trying again' not in line and ('is back' in line or 'works again' in line) for line in lines)
    return lost_count, back_count


def cpu_seconds(pid: int) -> float:
    """Return a process's processor time, of all threads. See proc(5)."""
    fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


@contextlib.contextmanager
def idle(pid: int, share: float = 0.05) -> Iterator[None]:
    """Assert that a process takes at most this share of a core inside the context.

    It is measured for at least two seconds.
    """
    started, before = time.monotonic(), cpu_seconds(pid)
    yield
    time.sleep(max(started + 2.0 - time.monotonic(), 0.0))
    cpu_used, elapsed = cpu_seconds(pid) - before, time.monotonic() - started
    assert cpu_used <= share * elapsed + 0.02, f'{cpu_used:.2f} s of processor time in {elapsed:.1f} s'


def guests(compute: Ecompute) -> dict[str, dict[str, Any]]:
    path = compute.directory / 'state' / 'fake.json'
    all_guests = json.loads(path.read_text()) if path.exists() else []
    return {guest['instance']: guest for guest in all_guests}


def running(compute: Ecompute) -> set[str]:
    """The running guests of a fake compute."""
    return {name for name, guest in guests(compute).items() if guest['running']}


def revision(control: Control, key: str = '') -> int:
    """Return the revision that last wrote a key, or without a key etcd's current revision.

    While etcd's revision is unchanged, nothing has been written.
    """
    answer = control.etcd.call('kv/range', {'key': b64(key or 'x')})
    return int(answer['kvs'][0]['mod_revision'] if key else answer['header']['revision'])
