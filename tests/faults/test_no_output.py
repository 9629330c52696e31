"""F37: stdout and stderr of ecompute or eschedule are not read or cannot be written: they keep working."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import check_settled, mark_slow_steps
from tests.kit.journal import JOURNAL
from tests.kit.servers import make_environment, wait_until
from tests.kit.story import NOTIFIED_PATTERN, SMALL_QUERY, boot_all, place, read_reserved, wait_address, wait_state

REDIRECTIONS = {
    'closed': '>&- 2>&-',
    'all closed': '<&- >&- 2>&-',
    'a full disk': '>/dev/full 2>/dev/full',
    # The reader ends after one line; each later write fails with a broken pipe.
    'a reader that goes': '> >(head -n 1 >/dev/null) 2> >(head -n 1 >/dev/null)',
}


class RedirectedEcompute(Ecompute):
    """A fake ecompute whose stdout and stderr a shell redirects."""

    redirection = ''

    def command(self) -> list[str]:
        """Return the command of a shell that becomes ecompute."""
        return ['bash', '-c', f'exec "$0" "$@" {self.redirection}', *super().command()]

    def is_ready(self) -> bool:
        """Return True once its presence key exists: there is no log."""
        return bool(self.list_presence_keys())

    def list_presence_keys(self) -> list[str]:
        """Return its presence key, if it is alive."""
        return [key for key in self.control.etcd.list_keys('/computes/') if self.uuid in key]

    control: Control


@pytest.mark.parametrize('how', mark_slow_steps(list(REDIRECTIONS), 'all closed', 'a full disk'))
def test_ecompute_without_output(cluster: Control, tmp_path: Path, how: str) -> None:
    """F37: ecompute with stdout and stderr closed, on a full disk, or without a reader (fake)."""
    compute = RedirectedEcompute(cluster.etcd.endpoint, cluster.placement.url, directory=tmp_path / 'compute')
    compute.redirection = REDIRECTIONS[how]
    compute.control = cluster
    with compute:
        first, second = boot_all(cluster, 2)
        # Its sockets must not have descriptors 0 to 2, which a stray line would be written to.
        for number in (0, 1, 2):
            assert re.match('/dev/|pipe:|.*log$', os.readlink(f'/proc/{compute.pid}/fd/{number}')), number
        assert cluster.eschedule('destroy', first).code == 0
        wait_state(cluster, first, 'gone')
        check_settled(cluster, compute)
        assert compute.stop() == 0
        assert read_reserved(cluster, compute.uuid) == 4
        assert compute.list_presence_keys() == []
        compute.start()
        wait_address(cluster, second)
        check_settled(cluster, compute)


def run_in_shell(control: Control, words: str, redirection: str) -> Result:
    """Run an eschedule in a shell with its output redirected."""
    command = shlex.join([sys.executable, '-m', 'ecomp.schedule', '--config', str(control.schedule_yaml)])
    began = time.monotonic()
    process = subprocess.run(
        ['bash', '-c', f'{command} {words} {redirection}'],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=make_environment(),
        timeout=60,
        check=False,
    )
    JOURNAL.add_run(shlex.split(words), None, ('', ''), began, 0)  # its answer may be lost
    return Result(process.returncode, process.stdout, process.stderr)


@pytest.mark.parametrize(
    ('how', 'code'),
    [
        ('<&- >&- 2>&-', 0),
        ('2>/dev/full', 0),
        ('>/dev/full', 1),
        pytest.param('>&- 2>&-', 0, marks=pytest.mark.slow),
        pytest.param('2>&-', 0, marks=pytest.mark.slow),
    ],
)
@pytest.mark.usefixtures('compute')
def test_eschedule_without_output(cluster: Control, how: str, code: int) -> None:
    """F37: eschedule with stdout or stderr closed or full: its work is done, and its exit code is right (fake)."""
    result = run_in_shell(cluster, f"'{SMALL_QUERY}'", how)
    assert result.code == code, result
    if how.startswith('2'):
        assert NOTIFIED_PATTERN.fullmatch(result.stdout), result
    # If stdout cannot be written, stderr names the new instance.
    assert ('was placed on' in result.stderr) == (code == 1), result
    assert 'Traceback' not in result.stderr
    (key,) = wait_until(lambda: cluster.etcd.list_keys('/instances/'), 20, 'it is placed')
    instance = key.rsplit('/', 1)[1]
    wait_address(cluster, instance)
    result = run_in_shell(cluster, f'destroy {instance}', how)
    assert result.code == 0, result
    wait_state(cluster, instance, 'gone')


@pytest.mark.usefixtures('compute')
def test_eschedule_without_reader(cluster: Control) -> None:
    """F37: eschedule list into a pipe whose reader has ended: no traceback, and exit 1 (fake)."""
    wait_address(cluster, place(cluster)[1])
    result = run_in_shell(cluster, 'list', '| true; exit ${PIPESTATUS[0]}')
    assert 'Traceback' not in result.stderr
    assert (result.code, result.stderr) == (1, '')


@pytest.mark.parametrize('unbuffered', ['', pytest.param('1', marks=pytest.mark.slow)])
@pytest.mark.parametrize('how', ['a full disk', pytest.param('a reader that has gone', marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ('name', 'module', 'options'),
    [
        ('eschedule', 'ecomp.schedule', ['', '--help', '--version']),
        ('ecompute', 'ecomp.compute', ['--help', '--unit']),
        ('elab', 'ecomp.lab.elab', ['--help']),
        ('mdserver', 'mdserver.server', ['--help', '--unit']),
    ],
)
def test_help_or_unit_that_cannot_be_printed(
    name: str, module: str, options: list[str], how: str, unbuffered: str, tmp_path: Path
) -> None:
    """F37: help or a unit that cannot be printed: a line and exit 1, without a line if the reader ended (fake)."""
    reading, writing = os.pipe()
    os.close(reading)
    expected = f'{name}: failed: No space left on device\n' if how == 'a full disk' else ''
    for words in options:
        with open('/dev/full', 'w') if how == 'a full disk' else os.fdopen(os.dup(writing), 'w') as stdout:
            process = subprocess.run(
                [sys.executable, '-m', module, *words.split()], stdout=stdout, stderr=subprocess.PIPE, text=True,
                cwd=tmp_path, env={**make_environment(), 'PYTHONUNBUFFERED': unbuffered}, timeout=60, check=False,
            )  # fmt: skip
        assert (process.returncode, process.stderr) == (1, expected), words
    os.close(writing)
