"""F37: nobody reads what ecompute and eschedule say, or nobody can: they live and work all the same."""

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
from tests.kit.hands import settled, some
from tests.kit.journal import JOURNAL
from tests.kit.servers import environment, until
from tests.kit.story import NOTIFIED, SMALL, addressed, boot_all, place, reached, reserved

WITHOUT = {
    'closed': '>&- 2>&-',
    'all closed': '<&- >&- 2>&-',
    'a full disk': '>/dev/full 2>/dev/full',
    # What reads ends after one line: all that is said later is a broken pipe.
    'a reader that goes': '> >(head -n 1 >/dev/null) 2> >(head -n 1 >/dev/null)',
}


class Mute(Ecompute):
    """A fake ecompute whose stdout and stderr are as a shell makes them."""

    redirection = ''

    def command(self) -> list[str]:
        """Through a shell that becomes it."""
        return ['bash', '-c', f'exec "$0" "$@" {self.redirection}', *super().command()]

    def is_ready(self) -> bool:
        """There is no log to say so: its key is there."""
        return bool(self.keys())

    def keys(self) -> list[str]:
        """Its key in etcd, if it is alive."""
        return [key for key in self.control.etcd.keys('/computes/') if self.uuid in key]

    control: Control


@pytest.mark.parametrize('how', some(list(WITHOUT), 'all closed', 'a full disk'))
def test_ecompute_without_output(cluster: Control, tmp_path: Path, how: str) -> None:
    """F37: ecompute with stdout and stderr closed, on a full disk, or read by nobody any more (fake)"""
    compute = Mute(cluster.etcd.endpoint, cluster.placement.url, directory=tmp_path / 'compute')
    compute.redirection, compute.control = WITHOUT[how], cluster
    with compute:
        first, second = boot_all(cluster, 2)
        # What it is connected to is not what a stray line on descriptor 1 or 2 would go into.
        for number in (0, 1, 2):
            assert re.match('/dev/|pipe:|.*log$', os.readlink(f'/proc/{compute.pid}/fd/{number}')), number
        assert cluster.eschedule('destroy', first).code == 0
        reached(cluster, first, 'gone')
        settled(cluster, compute)
        assert compute.stop() == 0
        assert reserved(cluster, compute.uuid) == 4
        assert compute.keys() == []
        compute.start()
        addressed(cluster, second)
        settled(cluster, compute)


def in_shell(control: Control, words: str, redirection: str) -> Result:
    """An eschedule in a shell, with its output redirected."""
    command = shlex.join([sys.executable, '-m', 'ecomp.schedule', '--config', str(control.schedule_yaml)])
    began = time.monotonic()
    done = subprocess.run(
        ['bash', '-c', f'{command} {words} {redirection}'],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=environment(),
        timeout=60,
        check=False,
    )
    JOURNAL.ended(shlex.split(words), None, ('', ''), began, 0)  # nobody may have heard its answer
    return Result(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    ('how', 'code'), [
        ('<&- >&- 2>&-', 0),
        ('2>/dev/full', 0),
        ('>/dev/full', 1),
        pytest.param('>&- 2>&-', 0, marks=pytest.mark.slow),
        pytest.param('2>&-', 0, marks=pytest.mark.slow),
    ]
)
@pytest.mark.usefixtures('compute')
def test_eschedule_without_output(cluster: Control, how: str, code: int) -> None:
    """F37: eschedule with stdout or stderr closed or full: what it did is done, and its code says so (fake)"""
    done = in_shell(cluster, f"'{SMALL}'", how)
    assert done.code == code, done
    if how.startswith('2'):
        assert NOTIFIED.fullmatch(done.stdout), done
    # stdout that cannot be written: the one who asked is told on stderr which instance there is.
    assert ('was placed on' in done.stderr) == (code == 1), done
    assert 'Traceback' not in done.stderr
    (key,) = until(lambda: cluster.etcd.keys('/instances/'), 20, 'it is placed')
    instance = key.rsplit('/', 1)[1]
    addressed(cluster, instance)
    done = in_shell(cluster, f'destroy {instance}', how)
    assert done.code == 0, done
    reached(cluster, instance, 'gone')


@pytest.mark.usefixtures('compute')
def test_eschedule_whose_reader_goes(cluster: Control) -> None:
    """F37: eschedule list into a pipe whose reader has gone: no traceback, and exit 1 (fake)"""
    addressed(cluster, place(cluster)[1])
    done = in_shell(cluster, 'list', '| true; exit ${PIPESTATUS[0]}')
    assert 'Traceback' not in done.stderr
    assert (done.code, done.stderr) == (1, '')


@pytest.mark.parametrize('unbuffered', ['', '1'])
@pytest.mark.parametrize('how', ['a full disk', 'a reader that has gone'])
@pytest.mark.parametrize(
    ('name', 'module', 'options'), [
        ('eschedule', 'ecomp.schedule', ['', '--help', '--version']),
        ('ecompute', 'ecomp.compute', ['--help', '--unit']),
        ('elab', 'ecomp.lab.elab', ['--help']),
        ('mdserver', 'mdserver.server', ['--help', '--unit']),
    ]
)
def test_what_is_asked_of_the_command_itself(
    name: str, module: str, options: list[str], how: str, unbuffered: str, tmp_path: Path
) -> None:
    """F37: help or a unit that cannot be printed: a line and exit 1, none where the reader has gone (fake)"""
    reading, writing = os.pipe()
    os.close(reading)
    said = f'{name}: failed: No space left on device\n' if how == 'a full disk' else ''
    for words in options:
        with open('/dev/full', 'w') if how == 'a full disk' else os.fdopen(os.dup(writing), 'w') as stdout:
            done = subprocess.run(
                [sys.executable, '-m', module, *words.split()], stdout=stdout, stderr=subprocess.PIPE, text=True,
                cwd=tmp_path, env={**environment(), 'PYTHONUNBUFFERED': unbuffered}, timeout=60, check=False,
            )  # fmt: skip
        assert (done.returncode, done.stderr) == (1, said), words
    os.close(writing)
