"""The state directory: one ecompute at a time, and one identity for ever."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ecomp.agent.host.state import Identity
from ecomp.errors import Conflict, UsageError
from ecomp.files import write_durably
from ecomp.model import keys
from ecomp.virt.libvirt_host import ENTER, User, can

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
    made = state.compute_uuid(None)
    token = state.token()
    assert (state.compute_uuid(None), state.token()) == (made, token)
    state.keep()
    assert keys.is_uuid(made)
    assert keys.is_uuid(token)
    assert made != token
    state.close()
    again = Identity(tmp_path / 'a/b')
    assert (again.compute_uuid(None), again.token()) == (made, token)
    again.close()


def test_a_configured_uuid_is_kept_when_it_is_configured_no_more(tmp_path: Path) -> None:
    state = Identity(tmp_path)
    assert state.compute_uuid(GIVEN) == GIVEN
    state.keep()
    state.close()
    again = Identity(tmp_path)
    assert again.compute_uuid(None) == GIVEN
    again.close()


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
    """A program that it was starting has its lock, until that program runs."""
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
    """Before keep() too: whether QEMU gets there is looked at first."""
    before = os.umask(umask)
    try:
        state = Identity(tmp_path / 'a/b')
        qemu = User('qemu', 4711, frozenset())
        assert [can(ENTER, each, qemu) for each in (tmp_path / 'a', tmp_path / 'a/b')] == [True, True]
        made = state.compute_uuid(None), state.token()
        state.keep()
        state.close()
        assert [(tmp_path / 'a/b' / name).read_text().strip() for name in ('uuid', 'token')] == [*made]
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

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr('os.fsync', full)
    with pytest.raises(OSError, match='No space left on device') as caught:
        write_durably(tmp_path / 'file', 'after')
    assert caught.value.filename == str(tmp_path / 'file')
    assert [path.name for path in tmp_path.iterdir()] == ['file']
    assert (tmp_path / 'file').read_text() == 'before'
