"""F30: clocks that are wrong, differ or jump: no wait and no expiry depends on the time of day."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.kit.by_hand import claim
from tests.kit.commands import Control
from tests.kit.hands import Eschedule, guests
from tests.kit.invariants import check, everything
from tests.kit.servers import environment, until
from tests.kit.story import SMALL, addressed, boot, logged, place, reached, record
from tests.kit.tuned import Tuned, tuned

# https://github.com/wolfcw/libfaketime: a jump of the real clock does not move monotonic timers either.
ALWAYS = {'FAKETIME_DONT_FAKE_MONOTONIC': '1', 'FAKETIME_NO_CACHE': '1'}


@pytest.fixture(scope='module')
def library() -> str:
    """The path of libfaketime's library for programs with threads."""
    if shutil.which('dpkg') is None:
        pytest.skip('not a Debian machine: where libfaketime is, is not known')
    files = subprocess.run(['dpkg', '-L', 'libfaketime'], capture_output=True, text=True, check=False).stdout
    libraries = [path for path in files.split() if path.endswith('/libfaketimeMT.so.1')]
    if not libraries:
        pytest.skip('libfaketime is not installed: apt-get install libfaketime')
    return libraries[0]


# libfaketime's clock_nanosleep, on which time.sleep is built, fails with "Invalid argument" whenever the clock is off.
SLEEP = """
import threading, time
time.sleep = lambda seconds: None if threading.Event().wait(seconds) else None
"""


@pytest.fixture
def always(library: str, tmp_path: Path) -> dict[str, str]:
    """The environment that every process with its own clock has."""
    (tmp_path / 'python').mkdir()
    (tmp_path / 'python' / 'sitecustomize.py').write_text(SLEEP)
    path = os.pathsep.join([str(tmp_path / 'python'), environment()['PYTHONPATH']])
    return {**ALWAYS, 'LD_PRELOAD': library, 'PYTHONPATH': path}


@pytest.fixture
def eschedule_at(always: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that sets the clock of the commands started afterwards."""

    def set_offset(offset: str) -> None:
        for name, value in {**always, 'FAKETIME': offset}.items():
            monkeypatch.setenv(name, value)

    return set_offset


class Clock:
    """The clock of one process, set by a file that can be rewritten at any time."""

    def __init__(self, always: dict[str, str], path: Path) -> None:
        self._path = path
        self.jump('+0')
        self.environment = {**always, 'FAKETIME_TIMESTAMP_FILE': str(path)}

    def jump(self, offset: str) -> None:
        """Set the clock's offset, such as -1h."""
        new_file = self._path.with_suffix('.new')
        new_file.write_text(f'{offset}\n')
        new_file.rename(self._path)


def apart(control: Control, instance: str) -> timedelta:
    """Return how far ecompute's clock is ahead of eschedule's, according to the record."""
    stages = (record(control, instance) or {})['stages']
    return datetime.fromisoformat(stages['started']) - datetime.fromisoformat(stages['requested'])


@pytest.mark.slow
@pytest.mark.parametrize(('compute_at', 'command_at'), [('+1h', '-1h'), ('-1h', '+1h')])
def test_clocks_that_differ(
    cluster: Control, always: dict[str, str], eschedule_at: Callable[[str], None], compute_at: str, command_at: str
) -> None:
    """F30: ecompute's clock an hour ahead and eschedule's one behind, or the reverse: nothing changes (fake)."""
    compute = tuned(cluster, extra={**always, 'FAKETIME': compute_at})
    eschedule_at(command_at)
    created = cluster.eschedule('--wait', '--timeout', '60', SMALL)
    assert created.code == 0, created
    (instance,) = guests(compute)
    hours = timedelta(hours=int(compute_at[:2]) - int(command_at[:2]))
    assert abs(apart(cluster, instance) - hours) < timedelta(minutes=5), 'the clocks were not moved'
    for words in (['list'], ['show', instance], ['hosts'], [instance]):
        result = cluster.eschedule(*words)
        assert (result.code, result.stderr) == (0, ''), result
    assert cluster.eschedule('destroy', '--wait', '--timeout', '60', instance).code == 0
    addressed(cluster, place(cluster)[1])
    check(cluster, compute)


@pytest.mark.slow
@pytest.mark.parametrize('jump', ['+1h', '-400d'])
def test_a_clock_that_jumps(cluster: Control, always: dict[str, str], tmp_path: Path, jump: str) -> None:
    """F30: ecompute's clock jumps while it runs: it stays alive, keeps working and releases nothing early (fake)."""
    clock = Clock(always, tmp_path / 'clock')
    compute = tuned(cluster, numbers={'EVERY': 0.3}, extra=clock.environment)
    _, before = place(cluster)
    address = addressed(cluster, before)
    # A claim without a request: it is released after two checks a minute apart, and not earlier.
    orphan = str(uuid.uuid4())
    claim(cluster, orphan, compute.uuid)
    presence = everything(cluster)[f'/computes/{compute.uuid}'].lease
    looked(cluster, compute)
    clock.jump(jump)
    for _ in range(3):
        looked(cluster, compute)
    assert cluster.placement.allocations(orphan)
    assert everything(cluster)[f'/computes/{compute.uuid}'].lease == presence
    assert addressed(cluster, before) == address
    clock.jump('+0')  # and back
    looked(cluster, compute)
    assert cluster.placement.allocations(orphan)
    assert logged(compute, 'released the claim') == []
    cluster.placement.call('DELETE', f'/allocations/{orphan}')
    assert cluster.eschedule('destroy', '--wait', before).code == 0
    assert guests(compute) == {}
    check(cluster, compute)


def looked(control: Control, compute: Tuned) -> None:
    """Create and destroy an instance; ecompute checks its claims in that time."""
    instance = boot(control)
    assert control.eschedule('destroy', '--wait', instance).code == 0
    assert instance not in guests(compute)


@pytest.mark.slow
def test_a_clock_that_jumps_in_a_build(
    cluster: Control, always: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F30: both clocks go back a day while eschedule waits for a build: both finish as usual (fake)."""
    clock = Clock(always, tmp_path / 'clock')
    compute = tuned(cluster, failpoint='seeded:stop:1', extra=clock.environment)
    instance = str(uuid.uuid4())
    with monkeypatch.context() as patch:
        for name, value in clock.environment.items():
            patch.setenv(name, value)
        waiting = Eschedule(cluster, '--uuid', instance, '--wait', '--timeout', '60', SMALL)
    with waiting:
        compute.stopped_at('seeded')
        clock.jump('-1d')
        compute.resume()
        result = waiting.end()
    assert result.code == 0, result
    assert result.stdout.splitlines()[1] == addressed(cluster, instance)
    active = reached(cluster, instance, 'active')
    assert active['stages']['started'] < active['stages']['requested'], 'the clock was not moved'
    until(lambda: cluster.eschedule(instance).code == 0, 20, 'its address can be asked for')
    details = cluster.eschedule('show', instance)
    assert (details.code, details.stderr) == (0, '')
    compute.failpoint = ''
    compute.restart()
    looked(cluster, compute)
    check(cluster, compute)
