"""What the state directory remembers of the instances here, over days, restarts and reboots."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from ecomp.agent.host.state import Memory, MemoryEntry
from ecomp.files import write_durably
from ecomp.model.order import Request
from ecomp.model.record import ACTIVE, BUILDING, Failure, new_record, timestamp

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE, OTHER = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a', '5ca1ab1e-0000-4000-8000-000000000000'
REQUEST = Request(
    INSTANCE, {COMPUTE: {'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1}}, image='http://h/i', user_id='u', project_id='p'
)
RECORD = new_record(COMPUTE, REQUEST, 'T1').at(BUILDING, 'T2')
DAY = timedelta(days=1)


class Machine:
    """A state directory, a clock and a boot."""

    def __init__(self, directory: Path) -> None:
        self.state = directory / 'state'
        self._boot_id = directory / 'boot_id'
        self.clock = datetime(2026, 1, 1, tzinfo=UTC)
        self.boot('first')

    def boot(self, name: str) -> None:
        self._boot_id.write_text(f'{name}\n')

    def memory(self) -> Memory:
        """As a start reads it."""
        return Memory(self.state, COMPUTE, lambda: timestamp(self.clock), self._boot_id)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.memory().before_reboot()  # the first start
    return made


def test_what_ended_is_remembered_for_a_day(machine: Machine) -> None:
    memory = machine.memory()
    memory.remember(REQUEST, RECORD)
    memory.ended(INSTANCE)
    machine.clock += DAY / 2
    memory.ended(OTHER)
    assert machine.memory().all_ended() == {INSTANCE, OTHER}
    machine.clock += DAY * 0.75
    memory.ended(COMPUTE)
    assert machine.memory().all_ended() == {OTHER, COMPUTE}


def test_a_uuid_that_is_used_again_is_remembered_for_as_long_as_it_lives(machine: Machine) -> None:
    """It failed, its record was destroyed, and the same command with the same --uuid made it once more."""
    memory = machine.memory()
    memory.remember(REQUEST, RECORD)
    memory.ended(INSTANCE)
    memory.remember(REQUEST, RECORD.at(ACTIVE, 'T3'))
    assert memory.all_ended() == frozenset()
    machine.clock += DAY * 1.1
    memory.ended(OTHER)  # which sweeps what ended more than a day ago
    machine.boot('second')
    again = machine.memory()
    assert again.all()[INSTANCE].record.state == ACTIVE
    assert again.before_reboot() == {INSTANCE}


def test_what_ends_twice_does_not_keep_older_ends_from_being_forgotten(machine: Machine) -> None:
    memory = machine.memory()
    for each in (INSTANCE, OTHER):
        memory.ended(each)
    machine.clock += DAY / 2
    memory.ended(INSTANCE)
    machine.clock += DAY * 0.75
    memory.ended(COMPUTE)
    assert memory.all_ended() == machine.memory().all_ended() == {INSTANCE, COMPUTE}


def test_what_cannot_be_forgotten_hinders_no_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system is read-only, say."""

    def removed(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, 'Read-only file system', str(path), missing_ok)

    memory = machine.memory()
    memory.ended(INSTANCE)
    machine.clock += DAY * 1.1
    with monkeypatch.context() as patched:
        patched.setattr(Path, 'unlink', removed)
        memory.ended(OTHER)
    assert memory.all_ended() == {OTHER}
    machine.memory().ended(COMPUTE)
    assert machine.memory().all_ended() == {OTHER, COMPUTE}


def test_what_is_not_dealt_with_after_a_reboot_is_remembered_until_it_is(machine: Machine) -> None:
    memory = machine.memory()
    memory.remember(REQUEST, RECORD)
    memory.remember(replace(REQUEST, instance=OTHER), replace(RECORD, instance=OTHER))
    machine.boot('second')
    assert machine.memory().before_reboot() == machine.memory().before_reboot() == {INSTANCE, OTHER}
    machine.memory().dealt_with_all_but({OTHER})
    again = machine.memory()
    assert again.before_reboot() == {OTHER}
    again.dealt_with_all_but(frozenset())
    assert machine.memory().before_reboot() == frozenset()
    (machine.state / 'boot').write_text('')
    assert machine.memory().before_reboot() == {INSTANCE, OTHER}, 'nobody knows'


def test_what_a_full_disk_kept_from_it_is_written_later(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, however often it is tried; what is written already, or is to end with a failure, is not touched."""

    def full(path: Path, _: str) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device', str(path))

    memory, lives = machine.memory(), RECORD.at(ACTIVE, 'T3')
    with monkeypatch.context() as patched:
        patched.setattr('ecomp.agent.host.state.write_durably', full)
        memory.remember(REQUEST, lives)
        memory.put_right(REQUEST, lives)
        assert machine.memory().all() == {}
    assert len([each for each in caplog.messages if 'No space left' in each]) == 1
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
    machine.memory().put_right(replace(REQUEST, instance=OTHER), replace(lives, instance=OTHER))
    states = {name: each.record.state for name, each in machine.memory().all().items()}
    assert states == {INSTANCE: ACTIVE, OTHER: ACTIVE}


def at_its_first_write(patch: pytest.MonkeyPatch, meanwhile: Callable[[], None], seconds: float) -> threading.Thread:
    """The first file is as slow to write as `meanwhile` takes, in a thread that is returned, `seconds` at most."""
    beside, began = threading.Thread(target=meanwhile, daemon=True), threading.Lock()

    def slow(path: Path, text: str) -> None:
        if began.acquire(blocking=False):
            beside.start()
            beside.join(seconds)
        write_durably(path, text)

    patch.setattr('ecomp.agent.host.state.write_durably', slow)
    return beside


def test_nobody_waits_for_the_disk_of_another_instance(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds, the planner and audits ask what is here; they hear what was so before that write."""
    memory, seen, other = machine.memory(), list[object](), replace(RECORD, instance=OTHER)
    memory.remember(REQUEST, RECORD)

    def ask() -> None:
        memory.remember(replace(REQUEST, instance=OTHER), other)
        seen.extend((memory.all(), memory.all_ended()))

    at_its_first_write(monkeypatch, ask, seconds=30)
    memory.ended(INSTANCE)
    lives = MemoryEntry(REQUEST, RECORD), MemoryEntry(replace(REQUEST, instance=OTHER), other)
    assert seen == [dict(zip((INSTANCE, OTHER), lives, strict=True)), frozenset()]
    assert (memory.all().keys(), memory.all_ended()) == ({OTHER}, {INSTANCE})


@pytest.mark.parametrize('old', [True, False])
def test_a_file_holds_what_was_said_last(machine: Machine, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    """Also where that came while the one before was being written, and where an older end is forgotten meanwhile."""
    memory = machine.memory()
    if old:
        memory.ended(INSTANCE)
        machine.clock += DAY * 1.1
    beside = at_its_first_write(monkeypatch, lambda: memory.ended(OTHER if old else INSTANCE), seconds=0.3)
    memory.remember(REQUEST, RECORD)
    beside.join()
    assert memory.all().keys() == machine.memory().all().keys() == ({INSTANCE} if old else set())
    assert memory.all_ended() == machine.memory().all_ended() == {OTHER if old else INSTANCE}


def test_what_is_not_understood_stays(machine: Machine) -> None:
    machine.memory()
    path = machine.state / 'instances' / f'{INSTANCE}.json'
    path.write_text('{"version": 99}')
    machine.memory().put_right(REQUEST, RECORD.at(ACTIVE, 'T3'))
    assert path.read_text() == '{"version": 99}'
