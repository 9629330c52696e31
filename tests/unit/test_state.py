"""The state directory: its identity, its memory of instances, and what is republished."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ecomp.agent.host.state import Identity, Memory, MemoryEntry
from ecomp.agent.instance.records import Drop, EtcdView, Publish, ended, running
from ecomp.errors import Conflict, UsageError
from ecomp.files import write_durably
from ecomp.model import keys
from ecomp.model.order import Invalid, Power, Request
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, STOPPED, Failure, new_record, timestamp
from ecomp.virt.libvirt_host import ENTER, User, can

# Identity: one ecompute at a time, and one uuid forever.


OTHER = '5ca1ab1e-0000-4000-8000-000000000000'
GIVEN = 'b8756be5-a30d-4311-920c-0ad996367a8e'
HOLDER = """
import sys
from pathlib import Path
from ecomp.agent.host.state import Identity
Identity(Path(sys.argv[1]))
print('held', flush=True)
sys.stdin.read()
"""


def test_the_uuid_is_made_once(tmp_path: Path) -> None:
    state = Identity(tmp_path / 'a/b')
    compute_uuid = state.compute_uuid(None)
    token = state.token()
    assert (state.compute_uuid(None), state.token()) == (compute_uuid, token)
    state.keep()
    assert keys.is_uuid(compute_uuid)
    assert keys.is_uuid(token)
    assert compute_uuid != token
    state.close()
    restarted = Identity(tmp_path / 'a/b')
    assert (restarted.compute_uuid(None), restarted.token()) == (compute_uuid, token)
    restarted.close()


def test_a_configured_uuid_is_kept_when_it_is_configured_no_more(tmp_path: Path) -> None:
    state = Identity(tmp_path)
    assert state.compute_uuid(GIVEN) == GIVEN
    state.keep()
    state.close()
    restarted = Identity(tmp_path)
    assert restarted.compute_uuid(None) == GIVEN
    restarted.close()


def test_a_start_that_is_refused_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / 'images').mkdir(mode=0o750)
    contents = {'uuid': OTHER, 'token': OTHER, 'lock': '4711\n', '.boot.part': 'x', 'images/base-00.part': 'x'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    tmp_path.chmod(0o750)
    state = Identity(tmp_path)
    assert (tmp_path / 'lock').read_text() == f'{os.getpid()}\n'
    assert (state.compute_uuid(GIVEN), state.token()) == (GIVEN, OTHER)
    state.close()
    assert {name: (tmp_path / name).read_text() for name in contents} == contents
    assert sorted(os.listdir(tmp_path)) == ['.boot.part', 'images', 'lock', 'token', 'uuid']
    assert tmp_path.stat().st_mode & 0o777 == 0o750


def test_what_is_no_uuid_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / 'uuid').write_text('../../etc\n')
    state = Identity(tmp_path)
    with pytest.raises(UsageError, match='not a uuid'):
        state.compute_uuid(None)
    state.close()


def test_another_process_is_named_and_its_end_frees_the_directory(tmp_path: Path) -> None:
    command = [sys.executable, '-c', HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == 'held\n'
            with pytest.raises(Conflict, match=f'pid {holder.pid}:'):
                Identity(tmp_path)
        finally:
            holder.kill()
            holder.wait()
    Identity(tmp_path).close()


def test_what_a_killed_one_left_half_written_goes(tmp_path: Path) -> None:
    (tmp_path / 'images').mkdir()
    halves = [tmp_path / '.boot.part', tmp_path / 'images/base-00.part']
    whole = [tmp_path / 'boot', tmp_path / 'images/base-00.qcow2']
    for path in [*halves, *whole]:
        path.touch()
    state = Identity(tmp_path)
    state.keep()
    assert not any(path.exists() for path in halves)
    assert all(path.exists() for path in whole)
    halves[1].touch()
    with pytest.raises(Conflict):
        Identity(tmp_path)
    assert halves[1].exists(), 'it is the living one that is writing it'
    state.close()


def test_what_a_killed_one_was_starting_is_waited_for(tmp_path: Path) -> None:
    """A program that the killed process was starting holds its lock until that program runs."""
    Identity(tmp_path).close()
    with (tmp_path / 'lock').open() as lock, (tmp_path / 'lock').open() as other:
        fcntl.flock(lock, fcntl.LOCK_EX)
        starting = subprocess.Popen(['sleep', '0.3'], pass_fds=[lock.fileno()])
        lock.close()
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        Identity(tmp_path).close()
    finally:
        starting.wait()


def test_a_directory_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(UsageError, match='state directory'):
        Identity(tmp_path / 'file')


@pytest.mark.parametrize('umask', [0o022, 0o027, 0o077])
def test_qemu_gets_through_and_nobody_reads_whatever_the_umask_is(umask: int, tmp_path: Path) -> None:
    """QEMU's access is checked first, so it must be there before keep(), too."""
    before = os.umask(umask)
    try:
        state = Identity(tmp_path / 'a/b')
        qemu = User('qemu', 4711, frozenset())
        assert [can(ENTER, directory, qemu) for directory in (tmp_path / 'a', tmp_path / 'a/b')] == [True, True]
        identity = state.compute_uuid(None), state.token()
        state.keep()
        state.close()
        assert [(tmp_path / 'a/b' / name).read_text().strip() for name in ('uuid', 'token')] == [*identity]
        assert (tmp_path / 'a/b').stat().st_mode & 0o777 == 0o711
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / 'a/b').iterdir()}
        assert modes == {'lock': 0o600, 'uuid': 0o600, 'token': 0o600}
    finally:
        os.umask(before)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / 'x'
    path.write_text('long before')
    write_durably(path, 'new')
    assert path.read_text() == 'new'
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ['x']


def test_a_link_that_waits_in_the_way_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / 'victim'
    victim.write_text('mine')
    (tmp_path / '.x.part').symlink_to(victim)
    with pytest.raises(OSError, match='symbolic'):
        write_durably(tmp_path / 'x', 'theirs')
    assert victim.read_text() == 'mine'


def test_what_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_durably(tmp_path / 'file', 'before')

    def raise_no_space(_: int) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr('os.fsync', raise_no_space)
    with pytest.raises(OSError, match='No space left on device') as caught:
        write_durably(tmp_path / 'file', 'after')
    assert caught.value.filename == str(tmp_path / 'file')
    assert [path.name for path in tmp_path.iterdir()] == ['file']
    assert (tmp_path / 'file').read_text() == 'before'


# Memory of the instances here, across days, restarts and reboots.


COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
ANOTHER = '5ca1ab1e-0000-4000-8000-000000000000'
REQUEST = Request(
    INSTANCE, {COMPUTE: {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}}, image='http://h/i', user_id='u', project_id='p'
)
RECORD = new_record(COMPUTE, REQUEST, 'T1').at(BUILDING, 'T2')
DAY = timedelta(days=1)


class Machine:
    """A machine with a state directory, a clock and a boot id."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / 'state'
        self._boot_id = directory / 'boot_id'
        self.clock = datetime(2026, 1, 1, tzinfo=UTC)
        self.boot('first')

    def boot(self, name: str) -> None:
        self._boot_id.write_text(f'{name}\n')

    def memory(self) -> Memory:
        """Read the memory as a start does."""
        return Memory(self.state, COMPUTE, lambda: timestamp(self.clock), self._boot_id)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    new_machine = Machine(tmp_path)
    new_machine.memory().before_reboot()  # the first start
    return new_machine


def test_what_ended_is_remembered_for_a_day(machine: Machine) -> None:
    memory = machine.memory()
    memory.remember(REQUEST, RECORD)
    memory.ended(INSTANCE)
    machine.clock += DAY / 2
    memory.ended(ANOTHER)
    assert machine.memory().all_ended() == {INSTANCE, ANOTHER}
    machine.clock += DAY * 0.75
    memory.ended(COMPUTE)
    assert machine.memory().all_ended() == {ANOTHER, COMPUTE}


def test_a_uuid_that_is_used_again_is_remembered_for_as_long_as_it_lives(machine: Machine) -> None:
    """The instance failed, its record was destroyed, and the same --uuid was created again."""
    memory = machine.memory()
    memory.remember(REQUEST, RECORD)
    memory.ended(INSTANCE)
    memory.remember(REQUEST, RECORD.at(ACTIVE, 'T3'))
    assert memory.all_ended() == frozenset()
    machine.clock += DAY * 1.1
    memory.ended(ANOTHER)  # this also forgets what ended more than a day ago
    machine.boot('second')
    reloaded = machine.memory()
    assert reloaded.all()[INSTANCE].record.state == ACTIVE
    assert reloaded.before_reboot() == {INSTANCE}


def test_what_ends_twice_does_not_keep_older_ends_from_being_forgotten(machine: Machine) -> None:
    memory = machine.memory()
    for instance in (INSTANCE, ANOTHER):
        memory.ended(instance)
    machine.clock += DAY / 2
    memory.ended(INSTANCE)
    machine.clock += DAY * 0.75
    memory.ended(COMPUTE)
    assert memory.all_ended() == machine.memory().all_ended() == {INSTANCE, COMPUTE}


def test_what_cannot_be_forgotten_hinders_no_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system, for example, refuses to remove a file."""

    def refuse_unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, 'Read-only file system', str(path), missing_ok)

    memory = machine.memory()
    memory.ended(INSTANCE)
    machine.clock += DAY * 1.1
    with monkeypatch.context() as patched:
        patched.setattr(Path, 'unlink', refuse_unlink)
        memory.ended(ANOTHER)
    assert memory.all_ended() == {ANOTHER}
    machine.memory().ended(COMPUTE)
    assert machine.memory().all_ended() == {ANOTHER, COMPUTE}


def test_what_is_not_dealt_with_after_a_reboot_is_remembered_until_it_is(machine: Machine) -> None:
    memory = machine.memory()
    memory.remember(REQUEST, RECORD)
    memory.remember(replace(REQUEST, instance=ANOTHER), replace(RECORD, instance=ANOTHER))
    machine.boot('second')
    assert machine.memory().before_reboot() == machine.memory().before_reboot() == {INSTANCE, ANOTHER}
    machine.memory().dealt_with_all_but({ANOTHER})
    reloaded = machine.memory()
    assert reloaded.before_reboot() == {ANOTHER}
    reloaded.dealt_with_all_but(frozenset())
    assert machine.memory().before_reboot() == frozenset()
    (machine.state / 'boot').write_text('')
    assert machine.memory().before_reboot() == {INSTANCE, ANOTHER}, 'nobody knows'


def test_what_a_full_disk_kept_from_it_is_written_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is logged once; entries already written or with a failure stay unchanged."""

    def raise_no_space(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device', str(path))

    memory, lives = machine.memory(), RECORD.at(ACTIVE, 'T3')
    with monkeypatch.context() as patched:
        patched.setattr('ecomp.agent.host.state.write_durably', raise_no_space)
        memory.remember(REQUEST, lives)
        memory.put_right(REQUEST, lives)
        assert machine.memory().all() == {}
    assert len([text for text in caplog.messages if 'No space left' in text]) == 1
    memory.put_right(REQUEST, lives)
    assert machine.memory().all()[INSTANCE].record == lives
    memory.put_right(replace(REQUEST, user_id='v'), lives)
    assert machine.memory().all()[INSTANCE].request == REQUEST
    memory.remember(REQUEST, RECORD, Failure('disk', 'full', ''))
    memory.put_right(REQUEST, lives)
    assert memory.all()[INSTANCE].failure is not None


def test_what_an_older_copy_lacks_or_has_as_being_built_is_written(machine: Machine) -> None:
    lives = RECORD.at(ACTIVE, 'T3')
    machine.memory().remember(REQUEST, RECORD)
    machine.memory().put_right(REQUEST, lives)
    machine.memory().put_right(replace(REQUEST, instance=ANOTHER), replace(lives, instance=ANOTHER))
    states = {name: entry.record.state for name, entry in machine.memory().all().items()}
    assert states == {INSTANCE: ACTIVE, ANOTHER: ACTIVE}


def at_its_first_write(patch: pytest.MonkeyPatch, meanwhile: Callable[[], None], seconds: float) -> threading.Thread:
    """Run `action` in the returned thread during the first write, for `seconds` at most."""
    thread, began = threading.Thread(target=meanwhile, daemon=True), threading.Lock()

    def write_slowly(path: Path, text: str) -> None:
        if began.acquire(blocking=False):
            thread.start()
            thread.join(seconds)
        write_durably(path, text)

    patch.setattr('ecomp.agent.host.state.write_durably', write_slowly)
    return thread


def test_nobody_waits_for_the_disk_of_another_instance(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds, the planner and audits read the memory as it was before the write in flight."""
    memory, results, other = machine.memory(), list[object](), replace(RECORD, instance=ANOTHER)
    memory.remember(REQUEST, RECORD)

    def use_memory() -> None:
        memory.remember(replace(REQUEST, instance=ANOTHER), other)
        results.extend((memory.all(), memory.all_ended()))

    at_its_first_write(monkeypatch, use_memory, seconds=30)
    memory.ended(INSTANCE)
    lives = MemoryEntry(REQUEST, RECORD), MemoryEntry(replace(REQUEST, instance=ANOTHER), other)
    assert results == [dict(zip((INSTANCE, ANOTHER), lives, strict=True)), frozenset()]
    assert (memory.all().keys(), memory.all_ended()) == ({ANOTHER}, {INSTANCE})


@pytest.mark.parametrize('old', [True, False])
def test_a_file_holds_what_was_said_last(machine: Machine, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    """The later change may come during the write of the earlier one."""
    memory = machine.memory()
    if old:
        memory.ended(INSTANCE)
        machine.clock += DAY * 1.1
    thread = at_its_first_write(monkeypatch, lambda: memory.ended(ANOTHER if old else INSTANCE), seconds=0.3)
    memory.remember(REQUEST, RECORD)
    thread.join()
    assert memory.all().keys() == machine.memory().all().keys() == ({INSTANCE} if old else set())
    assert memory.all_ended() == machine.memory().all_ended() == {ANOTHER if old else INSTANCE}


def test_what_is_not_understood_stays(machine: Machine) -> None:
    machine.memory()
    path = machine.state / 'instances' / f'{INSTANCE}.json'
    path.write_text('{"version": 99}')
    machine.memory().put_right(REQUEST, RECORD.at(ACTIVE, 'T3'))
    assert path.read_text() == '{"version": 99}'


# Republishing to an accepted etcd, decided from the memory and from what etcd contains.


HERE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
THERE = '5ca1ab1e-0000-4000-8000-000000000000'
GUEST = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
ASKED = Request(GUEST, {HERE: {'VCPU': 1}}, image='http://h/i', user_id='u', project_id='p')
TOMBSTONE = replace(ASKED, allocations={}, image=None)
SCHEDULED = new_record(HERE, ASKED, 'T1')
WRITTEN = SCHEDULED.at(ACTIVE, 'T2', 'image', 'disk', 'started')
NOW = 'T9'


def remembered(state: str = ACTIVE) -> MemoryEntry:
    record = SCHEDULED.at(BUILDING, 'T2') if state == BUILDING else WRITTEN.at(state, 'T3')
    return MemoryEntry(ASKED, record)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED])
def test_what_is_here_is_published_and_claimed(state: str) -> None:
    record = remembered(state).record
    assert running(HERE, remembered(state), True, EtcdView()) == Publish(ASKED, record, ASKED)


@pytest.mark.parametrize('older', [None, SCHEDULED, SCHEDULED.at(BUILDING, 'T2'), WRITTEN.at(STOPPED, 'T2')])
def test_an_older_record_is_brought_up_to_date(older: object) -> None:
    etcd_view = EtcdView(ASKED, older)  # type: ignore[arg-type]
    assert running(HERE, remembered(), True, etcd_view) == Publish(None, WRITTEN, ASKED)


STOP = Power('stop', THERE)
START = Power('start', HERE)


@pytest.mark.parametrize('power', [None, THERE, f'{THERE}:asked'])
def test_what_was_asked_of_its_power_is_published_as_far_as_it_was(power: str | None) -> None:
    entry = MemoryEntry(replace(ASKED, power=STOP), replace(WRITTEN, power=power))
    assert running(HERE, entry, True, EtcdView()) == Publish(entry.request, entry.record, entry.request)
    etcd_view = EtcdView(entry.request, WRITTEN)
    assert running(HERE, entry, True, etcd_view) == Publish(None, entry.record, entry.request)


def test_what_was_asked_of_its_power_before_is_not_done_again() -> None:
    entry = MemoryEntry(replace(ASKED, power=STOP), replace(WRITTEN, power=THERE))
    for older in (None, START):
        of_2019 = replace(ASKED, user_id='2019', power=older)
        step = running(HERE, entry, True, EtcdView(of_2019, WRITTEN))
        assert step == Publish(replace(of_2019, power=STOP), entry.record, entry.request)
    # An action that never began here is carried out, since no other process can have done it.
    unseen = MemoryEntry(ASKED, WRITTEN)
    etcd_view = EtcdView(replace(ASKED, power=START), WRITTEN)
    assert running(HERE, unseen, True, etcd_view) == Publish(None, WRITTEN, ASKED)


def test_what_vanished_is_not_built_anew_but_ends_by_its_record() -> None:
    assert running(HERE, remembered(), False, EtcdView(ASKED, SCHEDULED)) == Publish(None, WRITTEN, None)
    assert running(HERE, remembered(), False, EtcdView()) == Drop()


def test_a_build_under_way_goes_on() -> None:
    record = remembered(BUILDING).record
    assert running(HERE, remembered(BUILDING), False, EtcdView()) == Publish(ASKED, record, None)
    assert running(HERE, remembered(BUILDING), True, EtcdView(ASKED)) == Publish(None, record, ASKED)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED])
def test_what_etcd_says_of_a_later_moment_than_the_build_stands(state: str) -> None:
    later = replace(WRITTEN, state=state)
    assert running(HERE, remembered(BUILDING), True, EtcdView(ASKED, later)) == Publish(None, later, ASKED)


@pytest.mark.parametrize('is_here', [True, False])
@pytest.mark.parametrize('said', [EtcdView(), EtcdView(ASKED, WRITTEN), EtcdView(ASKED, SCHEDULED)])
def test_a_destroy_under_way_goes_on(is_here: bool, said: EtcdView) -> None:
    record = remembered(DESTROYING).record
    # The tombstone itself contains the resources that count until the end, as a destroy of eschedule does.
    tombstone = replace(TOMBSTONE, left=ASKED.resources)
    assert running(HERE, remembered(DESTROYING), is_here, said) == Publish(tombstone, record, None)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED, BUILDING, DESTROYING])
@pytest.mark.parametrize('is_here', [True, False])
@pytest.mark.parametrize(
    'said',
    [
        EtcdView(TOMBSTONE, WRITTEN),
        EtcdView(TOMBSTONE),
        EtcdView(Invalid(GUEST, 'no'), WRITTEN),
        EtcdView(None, WRITTEN.at(GONE, 'T4')),
        EtcdView(ASKED, WRITTEN.at(ERROR, 'T4')),
        EtcdView(ASKED, replace(WRITTEN, compute=THERE)),
    ],
)
def test_what_is_left_to_the_plan(state: str, is_here: bool, said: EtcdView) -> None:
    assert running(HERE, remembered(state), is_here, said) is None


@pytest.mark.parametrize('older', [None, SCHEDULED, WRITTEN])
def test_what_ended_is_not_built_again(older: object) -> None:
    last = ended(HERE, EtcdView(ASKED, older), NOW)  # type: ignore[arg-type]
    assert last is not None
    assert last.state == GONE
    assert last.stages['gone'] == NOW
    assert last.fault == 'it had ended before etcd forgot that'


@pytest.mark.parametrize(
    'said',
    [
        EtcdView(),
        EtcdView(None, WRITTEN),
        EtcdView(TOMBSTONE, WRITTEN),
        EtcdView(Invalid(GUEST, 'no')),
        EtcdView(ASKED, WRITTEN.at(GONE, 'T4')),
        EtcdView(ASKED, replace(WRITTEN, compute=THERE)),
    ],
)
def test_an_end_that_needs_no_word(said: EtcdView) -> None:
    assert ended(HERE, said, NOW) is None
