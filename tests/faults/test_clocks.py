"""F30: clocks that are wrong, differ or jump: no wait or expiry depends on the time of day."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.kit.by_hand import put_claim
from tests.kit.commands import Command, Control, write_config
from tests.kit.hands import LARGE_INVENTORY, Eschedule, read_guests
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.many import ManyComputes
from tests.kit.servers import make_environment, wait_until
from tests.kit.stacks import list_instances, write_stack
from tests.kit.story import SMALL_QUERY, boot, find_log_lines, place, read_record, wait_address, wait_state
from tests.kit.tuned import TunedEcompute, make_tuned

# https://github.com/wolfcw/libfaketime: a jump of the real clock does not move monotonic timers either.
FAKETIME_OPTIONS = {'FAKETIME_DONT_FAKE_MONOTONIC': '1', 'FAKETIME_NO_CACHE': '1'}


@pytest.fixture(scope='module')
def faketime_library() -> str:
    """The path of libfaketime's library for programs with threads."""
    if shutil.which('dpkg') is None:
        pytest.skip('not a Debian machine: where libfaketime is, is not known')
    files = subprocess.run(['dpkg', '-L', 'libfaketime'], capture_output=True, text=True, check=False).stdout
    libraries = [path for path in files.split() if path.endswith('/libfaketimeMT.so.1')]
    if not libraries:
        pytest.skip('libfaketime is not installed: apt-get install libfaketime')
    return libraries[0]


# libfaketime's clock_nanosleep, on which time.sleep is built, fails with "Invalid argument" whenever the clock is off.
SLEEP_PATCH = """
import threading, time
time.sleep = lambda seconds: None if threading.Event().wait(seconds) else None
"""


@pytest.fixture
def faketime_environment(faketime_library: str, tmp_path: Path) -> dict[str, str]:
    """The environment that every process with its own clock has."""
    (tmp_path / 'python').mkdir()
    (tmp_path / 'python' / 'sitecustomize.py').write_text(SLEEP_PATCH)
    path = os.pathsep.join([str(tmp_path / 'python'), make_environment()['PYTHONPATH']])
    return {**FAKETIME_OPTIONS, 'LD_PRELOAD': faketime_library, 'PYTHONPATH': path}


@pytest.fixture
def set_command_clock(faketime_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that sets the clock of the commands started afterwards."""

    def set_offset(offset: str) -> None:
        for name, value in {**faketime_environment, 'FAKETIME': offset}.items():
            monkeypatch.setenv(name, value)

    return set_offset


class Clock:
    """The clock of one process, set by a file that can be rewritten at any time."""

    def __init__(self, always: dict[str, str], path: Path) -> None:
        self._path = path
        self.set_offset('+0')
        self.environment = {**always, 'FAKETIME_TIMESTAMP_FILE': str(path)}

    def set_offset(self, offset: str) -> None:
        """Set the clock's offset, such as -1h."""
        new_file = self._path.with_suffix('.new')
        new_file.write_text(f'{offset}\n')
        new_file.rename(self._path)


def measure_clock_difference(control: Control, instance: str) -> timedelta:
    """Return how far ecompute's clock is ahead of eschedule's, according to the record."""
    stages = (read_record(control, instance) or {})['stages']
    return datetime.fromisoformat(stages['started']) - datetime.fromisoformat(stages['requested'])


@pytest.mark.slow
@pytest.mark.parametrize(('compute_at', 'command_at'), [('+1h', '-1h'), ('-1h', '+1h')])
def test_commands_work_with_different_clocks(
    cluster: Control,
    faketime_environment: dict[str, str],
    set_command_clock: Callable[[str], None],
    compute_at: str,
    command_at: str,
) -> None:
    """F30: ecompute's and eschedule's clocks two hours apart: nothing changes (fake)."""
    compute = make_tuned(cluster, extra={**faketime_environment, 'FAKETIME': compute_at})
    set_command_clock(command_at)
    created = cluster.eschedule('--wait', '--timeout', '60', SMALL_QUERY)
    assert created.code == 0, created
    (instance,) = read_guests(compute)
    hours = timedelta(hours=int(compute_at[:2]) - int(command_at[:2]))
    assert abs(measure_clock_difference(cluster, instance) - hours) < timedelta(minutes=5), 'the clocks were not moved'
    for words in (['list'], ['show', instance], ['hosts'], [instance]):
        result = cluster.eschedule(*words)
        assert (result.code, result.stderr) == (0, ''), result
    assert cluster.eschedule('destroy', '--wait', '--timeout', '60', instance).code == 0
    wait_address(cluster, place(cluster)[1])
    check_invariants(cluster, compute)


@pytest.mark.slow
@pytest.mark.parametrize('jump', ['+1h', '-400d'])
def test_clock_jump_releases_nothing_early(
    cluster: Control, faketime_environment: dict[str, str], tmp_path: Path, jump: str
) -> None:
    """F30: ecompute's clock jumps: it stays alive, and releases nothing early (fake)."""
    clock = Clock(faketime_environment, tmp_path / 'clock')
    compute = make_tuned(cluster, numbers={'PLAN_INTERVAL_SECONDS': 0.3}, extra=clock.environment)
    _, before = place(cluster)
    address = wait_address(cluster, before)
    # A claim without a request: it is released after two checks a minute apart, and not earlier.
    orphan = str(uuid.uuid4())
    put_claim(cluster, orphan, compute.uuid)
    presence = read_lasting_keys(cluster)[f'/computes/{compute.uuid}'].lease
    run_one_instance(cluster, compute)
    clock.set_offset(jump)
    for _ in range(3):
        run_one_instance(cluster, compute)
    assert cluster.placement.read_allocations(orphan)
    assert read_lasting_keys(cluster)[f'/computes/{compute.uuid}'].lease == presence
    assert wait_address(cluster, before) == address
    clock.set_offset('+0')  # and back
    run_one_instance(cluster, compute)
    assert cluster.placement.read_allocations(orphan)
    assert find_log_lines(compute, 'released the claim') == []
    cluster.placement.call('DELETE', f'/allocations/{orphan}')
    assert cluster.eschedule('destroy', '--wait', before).code == 0
    assert read_guests(compute) == {}
    check_invariants(cluster, compute)


def run_one_instance(control: Control, compute: TunedEcompute) -> None:
    # ecompute checks its claims in this time.
    instance = boot(control)
    assert control.eschedule('destroy', '--wait', instance).code == 0
    assert instance not in read_guests(compute)


@pytest.mark.slow
def test_clock_jump_during_build_does_not_end_the_wait(
    cluster: Control, faketime_environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F30: both clocks go back a day during a build: both finish as usual (fake)."""
    clock = Clock(faketime_environment, tmp_path / 'clock')
    compute = make_tuned(cluster, failpoint='seeded:stop:1', extra=clock.environment)
    instance = str(uuid.uuid4())
    with monkeypatch.context() as patch:
        for name, value in clock.environment.items():
            patch.setenv(name, value)
        waiting = Eschedule(cluster, '--uuid', instance, '--wait', '--timeout', '60', SMALL_QUERY)
    with waiting:
        compute.wait_frozen_at('seeded')
        clock.set_offset('-1d')
        compute.resume()
        result = waiting.wait()
    assert result.code == 0, result
    assert result.stdout.splitlines()[1] == wait_address(cluster, instance)
    active = wait_state(cluster, instance, 'active')
    assert active['stages']['started'] < active['stages']['requested'], 'the clock was not moved'
    wait_until(lambda: cluster.eschedule(instance).code == 0, 20, 'its address can be asked for')
    details = cluster.eschedule('show', instance)
    assert (details.code, details.stderr) == (0, '')
    compute.failpoint = ''
    compute.restart()
    run_one_instance(cluster, compute)
    check_invariants(cluster, compute)


@pytest.mark.slow
def test_concurrent_applies_with_different_clocks_create_one_set(
    cluster: Control, faketime_environment: dict[str, str], tmp_path: Path
) -> None:
    """F30: two applies of one file with clocks five seconds apart: one set (fake)."""
    commands = []
    for user, offset in (('ahead', '+5s'), ('behind', '+0')):
        home = tmp_path / user
        home.mkdir()
        config = write_config(home / 'schedule.yaml', cluster.etcd.endpoint, cluster.placement.url)
        environment = {**faketime_environment, 'FAKETIME': offset, 'HOME': str(home), 'XDG_CACHE_HOME': str(home)}
        commands.append(([sys.executable, '-m', 'ecomp.schedule', '--config', str(config)], home, environment))
    _, home, environment = commands[0]
    with Command([sys.executable, '-c', 'import time; print(time.time())'], home, environment) as clock:
        before, shown = time.time(), float(clock.wait().stdout)
    assert before + 4 < shown < time.time() + 6, 'the clock was not moved'
    with ManyComputes(cluster, 4, LARGE_INVENTORY):
        for number in range(20):
            path = write_stack(cluster, {'db': {}, 'web': {'count': 9}}, f'shop{number}')
            running = [Command([*command, 'apply', path], home, extra) for command, home, extra in commands]
            with running[0] as first, running[1] as second:
                results = [first.wait(), second.wait()]
            assert 0 in [result.code for result in results], results
            assert {result.code for result in results} <= {0, 5}, results
            instances = list_instances(cluster)
            names = [f'shop{number}-db', *(f'shop{number}-web-{each}' for each in range(1, 10))]
            assert sorted(instances) == sorted(names), results
            assert read_allocations(cluster).keys() == set(instances.values())
            again = cluster.eschedule('apply', path)
            assert (again.code, again.stdout) == (0, ''), again
            assert list_instances(cluster) == instances
            assert cluster.eschedule('destroy', '--file', path, '--yes', '--wait').code == 0
            assert read_allocations(cluster) == {}
        check_invariants(cluster)
