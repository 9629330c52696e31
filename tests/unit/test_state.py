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
from ecomp.agent.instance.records import Drop, EtcdView, Publish, decide_republish, make_end_record
from ecomp.errors import Conflict, UsageError
from ecomp.files import write_durably
from ecomp.model import keys
from ecomp.model.order import InvalidRequest, PowerAction, Request
from ecomp.model.record import Failure, make_record
from ecomp.model.states import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, STOPPED
from ecomp.model.text import format_time
from ecomp.virt.libvirt_host import ENTER, QemuUser, has_access

# Identity: one ecompute at a time, and one uuid forever.


OTHER = '5ca1ab1e-0000-4000-8000-000000000000'
CONFIGURED_UUID = 'b8756be5-a30d-4311-920c-0ad996367a8e'
HOLDER = """
import sys
from pathlib import Path
from ecomp.agent.host.state import Identity
Identity(Path(sys.argv[1]))
print('held', flush=True)
sys.stdin.read()
"""


def test_uuid_and_token_are_created_once(tmp_path: Path) -> None:
    state = Identity(tmp_path / 'a/b')
    compute_uuid = state.choose_uuid(None)
    token = state.choose_token()
    assert (state.choose_uuid(None), state.choose_token()) == (compute_uuid, token)
    state.save()
    assert keys.is_uuid(compute_uuid)
    assert keys.is_uuid(token)
    assert compute_uuid != token
    state.close()
    restarted = Identity(tmp_path / 'a/b')
    assert (restarted.choose_uuid(None), restarted.choose_token()) == (compute_uuid, token)
    restarted.close()


def test_configured_uuid_stays_when_it_is_no_longer_configured(tmp_path: Path) -> None:
    state = Identity(tmp_path)
    assert state.choose_uuid(CONFIGURED_UUID) == CONFIGURED_UUID
    state.save()
    state.close()
    restarted = Identity(tmp_path)
    assert restarted.choose_uuid(None) == CONFIGURED_UUID
    restarted.close()


def test_refused_start_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / 'images').mkdir(mode=0o750)
    contents = {'uuid': OTHER, 'token': OTHER, 'lock': '4711\n', '.boot.part': 'x', 'images/base-00.part': 'x'}
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    tmp_path.chmod(0o750)
    state = Identity(tmp_path)
    assert (tmp_path / 'lock').read_text() == f'{os.getpid()}\n'
    assert (state.choose_uuid(CONFIGURED_UUID), state.choose_token()) == (CONFIGURED_UUID, OTHER)
    state.close()
    assert {name: (tmp_path / name).read_text() for name in contents} == contents
    assert sorted(os.listdir(tmp_path)) == ['.boot.part', 'images', 'lock', 'token', 'uuid']
    assert tmp_path.stat().st_mode & 0o777 == 0o750


def test_malformed_uuid_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'uuid').write_text('../../etc\n')
    state = Identity(tmp_path)
    with pytest.raises(UsageError, match='not a uuid'):
        state.choose_uuid(None)
    state.close()


def test_other_process_is_named_and_its_end_frees_the_directory(tmp_path: Path) -> None:
    command = [sys.executable, '-c', HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == 'held\n'
            with pytest.raises(Conflict, match=f'pid {holder.pid}\\.'):
                Identity(tmp_path)
        finally:
            holder.kill()
            holder.wait()
    Identity(tmp_path).close()


def test_partial_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    (tmp_path / 'images').mkdir()
    halves = [tmp_path / '.boot.part', tmp_path / 'images/base-00.part']
    whole = [tmp_path / 'boot', tmp_path / 'images/base-00.qcow2']
    for path in [*halves, *whole]:
        path.touch()
    state = Identity(tmp_path)
    state.save()
    assert not any(path.exists() for path in halves)
    assert all(path.exists() for path in whole)
    halves[1].touch()
    with pytest.raises(Conflict):
        Identity(tmp_path)
    assert halves[1].exists(), 'it is the living one that is writing it'
    state.close()


def test_start_waits_for_a_lock_held_by_a_starting_child(tmp_path: Path) -> None:
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


def test_impossible_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / 'file').touch()
    with pytest.raises(UsageError, match='state directory'):
        Identity(tmp_path / 'file')


@pytest.mark.parametrize('umask', [0o022, 0o027, 0o077])
def test_modes_do_not_depend_on_the_umask(umask: int, tmp_path: Path) -> None:
    """QEMU's access is checked first, so it must be there before keep(), too."""
    before = os.umask(umask)
    try:
        state = Identity(tmp_path / 'a/b')
        qemu = QemuUser('qemu', 4711, frozenset({4711}))
        assert [has_access(ENTER, directory, qemu) for directory in (tmp_path / 'a', tmp_path / 'a/b')] == [True, True]
        identity = state.choose_uuid(None), state.choose_token()
        state.save()
        state.close()
        assert [(tmp_path / 'a/b' / name).read_text().strip() for name in ('uuid', 'token')] == [*identity]
        assert (tmp_path / 'a/b').stat().st_mode & 0o777 == 0o711
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / 'a/b').iterdir()}
        assert modes == {'lock': 0o600, 'uuid': 0o600, 'token': 0o600}
    finally:
        os.umask(before)


def test_symbolic_link_at_the_partial_file_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / 'victim'
    victim.write_text('mine')
    (tmp_path / '.x.part').symlink_to(victim)
    with pytest.raises(OSError, match='symbolic'):
        write_durably(tmp_path / 'x', 'theirs')
    assert victim.read_text() == 'mine'


def test_hard_link_at_the_partial_file_is_not_written_to(tmp_path: Path) -> None:
    victim = tmp_path / 'victim'
    victim.write_text('mine')
    (tmp_path / '.x.part').hardlink_to(victim)
    write_durably(tmp_path / 'x', 'theirs')
    assert (victim.read_text(), (tmp_path / 'x').read_text()) == ('mine', 'theirs')


def test_failed_write_names_the_file_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
RECORD = make_record(COMPUTE, REQUEST, 'T1').enter_state(BUILDING, 'T2')
DAY = timedelta(days=1)


class Machine:
    def __init__(self, directory: Path) -> None:
        self.state = directory / 'state'
        self._boot_id = directory / 'boot_id'
        self.clock = datetime(2026, 1, 1, tzinfo=UTC)
        self.boot('first')

    def boot(self, name: str) -> None:
        self._boot_id.write_text(f'{name}\n')

    def load_memory(self) -> Memory:
        return Memory(self.state, COMPUTE, lambda: format_time(self.clock), self._boot_id)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    new_machine = Machine(tmp_path)
    new_machine.load_memory().load_unhandled()  # the first start
    return new_machine


def test_ends_are_remembered_for_a_day(machine: Machine) -> None:
    memory = machine.load_memory()
    memory.remember(REQUEST, RECORD)
    memory.record_end(INSTANCE)
    machine.clock += DAY / 2
    memory.record_end(ANOTHER)
    assert machine.load_memory().get_ended() == {INSTANCE, ANOTHER}
    machine.clock += DAY * 0.75
    memory.record_end(COMPUTE)
    assert machine.load_memory().get_ended() == {ANOTHER, COMPUTE}


def test_reused_uuid_is_remembered_while_it_lives(machine: Machine) -> None:
    """The instance failed, its record was destroyed, and the same --uuid was created again."""
    memory = machine.load_memory()
    memory.remember(REQUEST, RECORD)
    memory.record_end(INSTANCE)
    memory.remember(REQUEST, RECORD.enter_state(ACTIVE, 'T3'))
    assert memory.get_ended() == frozenset()
    machine.clock += DAY * 1.1
    memory.record_end(ANOTHER)  # this also forgets what ended more than a day ago
    machine.boot('second')
    reloaded = machine.load_memory()
    assert reloaded.get_entries()[INSTANCE].record.state == ACTIVE
    assert reloaded.load_unhandled() == {INSTANCE}


def test_repeated_end_does_not_keep_older_ends(machine: Machine) -> None:
    memory = machine.load_memory()
    for instance in (INSTANCE, ANOTHER):
        memory.record_end(instance)
    machine.clock += DAY / 2
    memory.record_end(INSTANCE)
    machine.clock += DAY * 0.75
    memory.record_end(COMPUTE)
    assert memory.get_ended() == machine.load_memory().get_ended() == {INSTANCE, COMPUTE}


def test_end_is_recorded_if_an_older_one_cannot_be_removed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only file system, for example, refuses to remove a file."""

    def refuse_unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, 'Read-only file system', str(path), missing_ok)

    memory = machine.load_memory()
    memory.record_end(INSTANCE)
    machine.clock += DAY * 1.1
    with monkeypatch.context() as patched:
        patched.setattr(Path, 'unlink', refuse_unlink)
        memory.record_end(ANOTHER)
    assert memory.get_ended() == {ANOTHER}
    machine.load_memory().record_end(COMPUTE)
    assert machine.load_memory().get_ended() == {ANOTHER, COMPUTE}


def test_instances_not_yet_handled_after_a_reboot_are_remembered(machine: Machine) -> None:
    memory = machine.load_memory()
    memory.remember(REQUEST, RECORD)
    memory.remember(replace(REQUEST, instance=ANOTHER), replace(RECORD, instance=ANOTHER))
    machine.boot('second')
    assert machine.load_memory().load_unhandled() == machine.load_memory().load_unhandled() == {INSTANCE, ANOTHER}
    machine.load_memory().save_unhandled({ANOTHER})
    reloaded = machine.load_memory()
    assert reloaded.load_unhandled() == {ANOTHER}
    reloaded.save_unhandled(frozenset())
    assert machine.load_memory().load_unhandled() == frozenset()
    (machine.state / 'boot').write_text('')
    assert machine.load_memory().load_unhandled() == {INSTANCE, ANOTHER}, 'nobody knows'


def test_entry_refused_by_a_full_disk_is_written_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure is logged once, and entries already written or with a failure stay."""

    def raise_no_space(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device', str(path))

    memory, lives = machine.load_memory(), RECORD.enter_state(ACTIVE, 'T3')
    with monkeypatch.context() as patched:
        patched.setattr('ecomp.agent.host.state.write_durably', raise_no_space)
        memory.remember(REQUEST, lives)
        memory.repair(REQUEST, lives)
        assert machine.load_memory().get_entries() == {}
    assert len([text for text in caplog.messages if 'No space left' in text]) == 1
    memory.repair(REQUEST, lives)
    assert machine.load_memory().get_entries()[INSTANCE].record == lives
    memory.repair(replace(REQUEST, user_id='v'), lives)
    assert machine.load_memory().get_entries()[INSTANCE].request == REQUEST
    memory.remember(REQUEST, RECORD, Failure('disk', 'full', ''))
    memory.repair(REQUEST, lives)
    assert memory.get_entries()[INSTANCE].failure is not None


def test_missing_or_building_entry_is_repaired(machine: Machine) -> None:
    lives = RECORD.enter_state(ACTIVE, 'T3')
    machine.load_memory().remember(REQUEST, RECORD)
    machine.load_memory().repair(REQUEST, lives)
    machine.load_memory().repair(replace(REQUEST, instance=ANOTHER), replace(lives, instance=ANOTHER))
    states = {name: entry.record.state for name, entry in machine.load_memory().get_entries().items()}
    assert states == {INSTANCE: ACTIVE, ANOTHER: ACTIVE}


def run_during_first_write(patch: pytest.MonkeyPatch, action: Callable[[], None], seconds: float) -> threading.Thread:
    """Run `action` in the returned thread during the first write, for `seconds` at most."""
    thread, began = threading.Thread(target=action, daemon=True), threading.Lock()

    def write_slowly(path: Path, text: str) -> None:
        if began.acquire(blocking=False):
            thread.start()
            thread.join(seconds)
        write_durably(path, text)

    patch.setattr('ecomp.agent.host.state.write_durably', write_slowly)
    return thread


def test_readers_do_not_wait_for_another_instances_write(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds, the planner and audits read the memory as it was before the write in flight."""
    memory, results, other = machine.load_memory(), list[object](), replace(RECORD, instance=ANOTHER)
    memory.remember(REQUEST, RECORD)

    def use_memory() -> None:
        memory.remember(replace(REQUEST, instance=ANOTHER), other)
        results.extend((memory.get_entries(), memory.get_ended()))

    run_during_first_write(monkeypatch, use_memory, seconds=30)
    memory.record_end(INSTANCE)
    lives = MemoryEntry(REQUEST, RECORD), MemoryEntry(replace(REQUEST, instance=ANOTHER), other)
    assert results == [dict(zip((INSTANCE, ANOTHER), lives, strict=True)), frozenset()]
    assert (memory.get_entries().keys(), memory.get_ended()) == ({ANOTHER}, {INSTANCE})


@pytest.mark.parametrize('old', [True, False])
def test_file_holds_the_last_change(machine: Machine, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    """The later change may come during the write of the earlier one."""
    memory = machine.load_memory()
    if old:
        memory.record_end(INSTANCE)
        machine.clock += DAY * 1.1
    thread = run_during_first_write(monkeypatch, lambda: memory.record_end(ANOTHER if old else INSTANCE), seconds=0.3)
    memory.remember(REQUEST, RECORD)
    thread.join()
    assert memory.get_entries().keys() == machine.load_memory().get_entries().keys() == ({INSTANCE} if old else set())
    assert memory.get_ended() == machine.load_memory().get_ended() == {ANOTHER if old else INSTANCE}


def test_unreadable_entry_stays(machine: Machine) -> None:
    machine.load_memory()
    path = machine.state / 'instances' / f'{INSTANCE}.json'
    path.write_text('{"version": 99}')
    machine.load_memory().repair(REQUEST, RECORD.enter_state(ACTIVE, 'T3'))
    assert path.read_text() == '{"version": 99}'


# Republishing to an accepted etcd, decided from the memory and from what etcd contains.


HERE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
OTHER_COMPUTE = '5ca1ab1e-0000-4000-8000-000000000000'
GUEST = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
REQUESTED = Request(GUEST, {HERE: {'VCPU': 1}}, image='http://h/i', user_id='u', project_id='p')
TOMBSTONE = replace(REQUESTED, allocations={}, image=None)
SCHEDULED = make_record(HERE, REQUESTED, 'T1')
WRITTEN = SCHEDULED.enter_state(ACTIVE, 'T2', 'image', 'disk', 'started')
NOW = 'T9'


def make_entry(state: str = ACTIVE) -> MemoryEntry:
    record = SCHEDULED.enter_state(BUILDING, 'T2') if state == BUILDING else WRITTEN.enter_state(state, 'T3')
    return MemoryEntry(REQUESTED, record)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED])
def test_present_instance_is_published_and_claimed(state: str) -> None:
    record = make_entry(state).record
    assert decide_republish(HERE, make_entry(state), True, EtcdView()) == Publish(REQUESTED, record, REQUESTED)


@pytest.mark.parametrize(
    'older', [None, SCHEDULED, SCHEDULED.enter_state(BUILDING, 'T2'), WRITTEN.enter_state(STOPPED, 'T2')]
)
def test_older_record_is_updated(older: object) -> None:
    etcd_view = EtcdView(REQUESTED, older)  # type: ignore[arg-type]
    assert decide_republish(HERE, make_entry(), True, etcd_view) == Publish(None, WRITTEN, REQUESTED)


STOP = PowerAction('stop', OTHER_COMPUTE)
START = PowerAction('start', HERE)


@pytest.mark.parametrize('power', [None, OTHER_COMPUTE, f'{OTHER_COMPUTE}:asked'])
def test_power_action_is_published_with_its_phase(power: str | None) -> None:
    entry = MemoryEntry(replace(REQUESTED, power=STOP), replace(WRITTEN, power=power))
    assert decide_republish(HERE, entry, True, EtcdView()) == Publish(entry.request, entry.record, entry.request)
    etcd_view = EtcdView(entry.request, WRITTEN)
    assert decide_republish(HERE, entry, True, etcd_view) == Publish(None, entry.record, entry.request)


def test_earlier_power_action_is_not_repeated() -> None:
    entry = MemoryEntry(replace(REQUESTED, power=STOP), replace(WRITTEN, power=OTHER_COMPUTE))
    for older in (None, START):
        of_2019 = replace(REQUESTED, user_id='2019', power=older)
        step = decide_republish(HERE, entry, True, EtcdView(of_2019, WRITTEN))
        assert step == Publish(replace(of_2019, power=STOP), entry.record, entry.request)
    # An action that never began here is carried out, since no other process can have done it.
    unseen = MemoryEntry(REQUESTED, WRITTEN)
    etcd_view = EtcdView(replace(REQUESTED, power=START), WRITTEN)
    assert decide_republish(HERE, unseen, True, etcd_view) == Publish(None, WRITTEN, REQUESTED)


def test_rebuild_that_was_begun_goes_on_after_a_change_in_an_older_etcd() -> None:
    changed = replace(REQUESTED, name='renamed', change_number=300)
    remembered = replace(REQUESTED, rebuild=200, change_number=200, image='http://new/')
    for rebuilt, published in (('200:begun', replace(changed, rebuild=200, image='http://new/')), ('200', None)):
        entry = MemoryEntry(remembered, replace(WRITTEN, rebuilt=rebuilt))
        step = decide_republish(HERE, entry, True, EtcdView(changed, WRITTEN))
        assert isinstance(step, Publish)
        assert (step.request, step.record.name) == (published, 'renamed')


def test_vanished_instance_is_not_rebuilt() -> None:
    assert decide_republish(HERE, make_entry(), False, EtcdView(REQUESTED, SCHEDULED)) == Publish(None, WRITTEN, None)
    assert decide_republish(HERE, make_entry(), False, EtcdView()) == Drop()


def test_build_in_flight_continues() -> None:
    record = make_entry(BUILDING).record
    assert decide_republish(HERE, make_entry(BUILDING), False, EtcdView()) == Publish(REQUESTED, record, None)
    assert decide_republish(HERE, make_entry(BUILDING), True, EtcdView(REQUESTED)) == Publish(None, record, REQUESTED)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED])
def test_newer_record_in_etcd_replaces_a_build(state: str) -> None:
    later = replace(WRITTEN, state=state)
    assert decide_republish(HERE, make_entry(BUILDING), True, EtcdView(REQUESTED, later)) == Publish(
        None, later, REQUESTED
    )


@pytest.mark.parametrize('is_here', [True, False])
@pytest.mark.parametrize('etcd_view', [EtcdView(), EtcdView(REQUESTED, WRITTEN), EtcdView(REQUESTED, SCHEDULED)])
def test_destroy_in_flight_continues(is_here: bool, etcd_view: EtcdView) -> None:
    record = make_entry(DESTROYING).record
    # The tombstone itself contains the resources that count until the end, as a destroy of eschedule does.
    tombstone = replace(TOMBSTONE, former_resources=REQUESTED.resources)
    assert decide_republish(HERE, make_entry(DESTROYING), is_here, etcd_view) == Publish(tombstone, record, None)


@pytest.mark.parametrize('state', [ACTIVE, STOPPED, BUILDING, DESTROYING])
@pytest.mark.parametrize('is_here', [True, False])
@pytest.mark.parametrize('etcd_view', [
    EtcdView(TOMBSTONE, WRITTEN), EtcdView(TOMBSTONE),
    EtcdView(InvalidRequest(GUEST, 'no'), WRITTEN), EtcdView(None, WRITTEN.enter_state(GONE, 'T4')),
    EtcdView(REQUESTED, WRITTEN.enter_state(ERROR, 'T4')),
    EtcdView(REQUESTED, replace(WRITTEN, compute=OTHER_COMPUTE)),
])  # fmt: skip
def test_cases_left_to_the_planner(state: str, is_here: bool, etcd_view: EtcdView) -> None:
    assert decide_republish(HERE, make_entry(state), is_here, etcd_view) is None


@pytest.mark.parametrize('older', [None, SCHEDULED, WRITTEN])
def test_ended_instance_is_not_built_again(older: object) -> None:
    last = make_end_record(HERE, EtcdView(REQUESTED, older), NOW)  # type: ignore[arg-type]
    assert last is not None
    assert last.state == GONE
    assert last.stages['gone'] == NOW
    assert last.fault == 'it had finished before etcd was restored'


@pytest.mark.parametrize('etcd_view', [
    EtcdView(), EtcdView(None, WRITTEN),
    EtcdView(TOMBSTONE, WRITTEN), EtcdView(InvalidRequest(GUEST, 'no')),
    EtcdView(REQUESTED, WRITTEN.enter_state(GONE, 'T4')),
    EtcdView(REQUESTED, replace(WRITTEN, compute=OTHER_COMPUTE)),
])  # fmt: skip
def test_end_known_to_etcd_is_not_published(etcd_view: EtcdView) -> None:
    assert make_end_record(HERE, etcd_view, NOW) is None
