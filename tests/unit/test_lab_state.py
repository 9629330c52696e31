"""What a lab remembers of itself, its processes and its locks."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest

from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.lab import machine, state
from ecomp.lab.machine import Process
from tests.unit.lab_root import make_lab


def ended(directory: Path, script: str) -> Process:
    """A server that a shell script stood for."""
    process = machine.start('server', ['sh', '-c', script], directory / 'log')
    while machine.alive(process):
        pass
    return process


def test_a_lab_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, hosts=2, etcd=Process('etcd', 4711, 99))

    assert state.load('one', tmp_path) == lab
    assert [each.layout.name for each in state.all_labs(tmp_path)] == ['one']
    assert lab.places == ['control', 'hv1', 'hv2']


def test_no_lab(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no lab 'other'"):
        state.load('other', tmp_path)


def test_processes_of_another_boot_are_forgotten(tmp_path: Path) -> None:
    make_lab(tmp_path, hosts=2, etcd=Process('etcd', 4711, 99))
    written = tmp_path / 'one/lab.json'
    written.write_text(json.dumps({**json.loads(written.read_text()), 'boot': 'another'}))

    assert state.load('one', tmp_path).processes == {}


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    make_lab(tmp_path)
    written = tmp_path / 'one/lab.json'
    written.write_text(json.dumps({**json.loads(written.read_text()), 'version': 99}))

    assert state.all_labs(tmp_path) == []
    with pytest.raises(EcompError, match='version 99'):
        state.load('one', tmp_path)


def test_a_pid_that_was_used_again_is_not_ours() -> None:
    me = os.getpid()
    started = machine.started_at(me)
    assert started is not None

    assert machine.alive(Process('me', me, started))
    assert not machine.alive(Process('an earlier one', me, started - 1))
    machine.end([Process('an earlier one', me, started - 1)])  # and so this test goes on


def test_a_process_that_only_waits_to_be_reaped_has_ended() -> None:
    child = subprocess.Popen(['true'])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert machine.started_at(child.pid) is None
    child.wait()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = 'trap "" TERM; echo ready; while :; do sleep 0.1; done'
    process = machine.start('stubborn', ['sh', '-c', script], tmp_path / 'log')
    machine.wait_for('stubborn', lambda: 'ready' in machine.last_line(tmp_path / 'log'), process, tmp_path / 'log', 10)

    machine.end([process], patience=0.1)

    assert not machine.alive(process)


def test_a_server_that_ends_while_starting_is_reported_with_its_last_word(tmp_path: Path) -> None:
    log = tmp_path / 'log'
    process = machine.start('server', ['sh', '-c', 'echo no such port >&2; sleep 0.1'], log)

    with pytest.raises(EcompError, match='server ended while starting: no such port'):
        machine.wait_for('server', lambda: False, process, log, 10)


def test_a_server_that_ended_is_none_whoever_answers_in_its_place(tmp_path: Path) -> None:
    process = ended(tmp_path, 'echo port is taken')

    with pytest.raises(EcompError, match=r'has its place \(elab down ends that\): port is taken'):
        machine.wait_for('server', lambda: True, process, tmp_path / 'log', 10)


def test_no_server_runs_that_nobody_has_written_down(tmp_path: Path) -> None:
    """As where elab up is killed in between: an orphan would have the place of the one that is started next."""
    told: list[Process] = []

    def interrupted(_: str, process: Process) -> None:
        told.append(process)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.start('server', ['touch', 'file'], tmp_path / 'log', remember=interrupted)
    while machine.alive(told[0]):
        pass
    assert not (tmp_path / 'file').exists()


def test_a_server_reads_nothing_of_who_started_it(tmp_path: Path) -> None:
    ended(tmp_path, 'cat; readlink /proc/$$/fd/0')
    assert machine.last_line(tmp_path / 'log') == '/dev/null'


def test_a_failing_program_is_reported_with_its_last_word() -> None:
    with pytest.raises(EcompError, match=r'failed \(3\): second'):
        machine.run(['sh', '-c', 'echo first >&2; echo second >&2; exit 3'])
    with pytest.raises(EcompError, match='cannot be run'):
        machine.run(['/no/such/program'])


def test_a_program_that_does_not_end_is_given_up() -> None:
    with pytest.raises(EcompError, match=r'sleep 600 has not ended after 0.1 s'):
        machine.run(['sleep', '600'], seconds=0.1)


def test_everything_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(UsageError, match='apt-get install --no-install-recommends a b; missing in .*: no_such_module'):
        machine.require({'no-such-1': 'b', 'no-such-2': 'a', 'no-such-3': 'b', 'sh': 'dash'}, ['no_such_module', 'os'])
    machine.require({'sh': 'dash'}, ['os'])
    # libvirt's package is built where it is installed, which is no matter of who runs etcd and placement alone.
    for modules, extras in ((['no_placement'], 'lab'), (['no_placement', 'libvirt'], 'hypervisor,lab')):
        with pytest.raises(UsageError) as caught:
            machine.require({}, modules)
        assert str(caught.value).endswith(f"; pip install '.[{extras}]'")


def test_one_at_a_time_has_a_directory_also_when_it_is_removed_meanwhile(tmp_path: Path) -> None:
    directory, order = tmp_path / 'lab', []

    def other() -> None:
        with state.locked(directory):
            order.append('second')
            assert directory.is_dir()

    with state.locked(directory):
        thread = threading.Thread(target=other)
        thread.start()
        order.append('first')
        directory.rmdir()
    thread.join(10)

    assert order == ['first', 'second']
