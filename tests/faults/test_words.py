"""F32, F37: any arguments, configuration and output: a documented exit code and one line.

The words of wrong arguments are in tests/golden/commands, contents of files in tests/unit/test_conf.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ecomp import schedule
from ecomp.cli.commands import COMMANDS
from tests.kit.commands import Control, Ecompute, Result, write_config
from tests.kit.hands import check_settled, mark_slow_steps
from tests.kit.invariants import read_allocations
from tests.kit.journal import JOURNAL
from tests.kit.servers import free_port, make_environment, wait_until
from tests.kit.story import (
    NOTIFIED_PATTERN,
    SMALL_QUERY,
    UNKNOWN_UUID,
    assert_one_line,
    boot_all,
    place,
    read_reserved,
    wait_address,
    wait_state,
)

# The documented exit codes: 0 (done) to 8 (audit findings).
EXIT_CODES = range(9)

NAMES = [word for name in COMMANDS for word in name.split()]
OPTIONS = ['--uuid', '--wait', '--timeout', '--wait=', '--wait=addressed', '--format', '-f', '--all', '--fix', '--for']
OPTIONS += ['--name', '--ssh-key', '--user-data']
VALUES = [
    *('1', '0', '-1', 'nan', 'inf', '1e400', '10' * 50, 'json', 'table', UNKNOWN_UUID, UNKNOWN_UUID.upper(), '', ' '),
]
QUERIES = [
    *(SMALL_QUERY, 'resources=', 'resources', '=', 'resources=VCPU', 'resources=VCPU:', 'resourcesVCPU:1'),
    'a=b&c=d#e',
]
HARD_STRINGS = [
    *('\0', '\n', '\x1b[2J', '\ud800', 'é', '\u202e', '-', '--', '@file', '%s', '{}', '$(id)', '../etc', 'x' * 5000),
]
WORDS = st.sampled_from([*NAMES, *OPTIONS, *VALUES, *QUERIES, *HARD_STRINGS]) | st.text(max_size=12)
OPTION_VALUES = st.tuples(st.sampled_from([*OPTIONS[:3], *OPTIONS[-3:]]), WORDS).map('='.join)


def run_in_process(*words: str) -> Result:
    """Run eschedule in this process. Its output may contain any characters."""
    out, err, began = StringIO(), StringIO(), time.monotonic()
    with redirect_stdout(out), redirect_stderr(err):
        code = schedule.main(words)
    JOURNAL.add_run(words, code, (out.getvalue(), err.getvalue()), began, os.getpid())
    return Result(code, out.getvalue(), err.getvalue())


@pytest.fixture(scope='module')
def unreachable_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    etcd, placement = f'127.0.0.1:{free_port()}', f'http://127.0.0.1:{free_port()}'
    return write_config(tmp_path_factory.mktemp('nowhere') / 'schedule.yaml', etcd, placement)


@settings(max_examples=250)
@given(words=st.lists(WORDS | OPTION_VALUES, max_size=5))
@example(words=[SMALL_QUERY, '--uuid', UNKNOWN_UUID, '--wait', '--timeout', '0'])
@example(words=['destroy', UNKNOWN_UUID, '--wait'])
@example(words=['host', 'forget', UNKNOWN_UUID])
@example(words=['--', SMALL_QUERY])
@example(words=['-f', 'json', 'list'])
@example(words=['destroy', UNKNOWN_UUID, '-f', 'json'])
@example(words=['help'])
@example(words=['check'])
@example(words=['hosts', '\n'])
@example(words=['--flavor', '\n'])
@example(words=['flavor', 'set', '\n', '\n'])
def test_any_arguments_end_with_a_code_and_a_line(unreachable_config: Path, words: list[str]) -> None:
    """F32: any arguments, without servers: a documented exit code and one printable line (fake)."""
    if any(word.startswith(('--c', '-h', '--h')) for word in words):
        words = [word for word in words if not word.startswith(('--c', '-h', '--h'))]
    result = run_in_process('--config', str(unreachable_config), *words)
    assert result.code in EXIT_CODES, (words, result)
    is_local = any(word in ('help', 'completion') or word.startswith('--v') for word in words)  # needs no server
    assert result.code != 0 or is_local, (words, result)
    if result.stdout and result.code not in (0, 2):
        # `check` prints a table of unreachable servers, and JSON output contains the result of each argument.
        assert 'check' in words or json.loads(result.stdout), (words, result)
    if result.code not in (0, 2) or result.stderr:
        lines = result.stderr.splitlines()
        # A command of several uuids prints a line for each; `check` prints the fixes of both servers, too.
        assert 1 <= len(lines) <= max(len(words), 1) + 2 * ('check' in words), (words, result)
        for line in lines:
            assert line.startswith('eschedule: '), (words, result)
            assert line.isprintable(), (words, result)


def test_invalid_configurations_are_refused(tmp_path: Path) -> None:
    """F32: a configuration missing, a directory, malformed, huge or a bomb: exit 2 (fake)."""
    bomb = 'a: &a [x,x,x,x,x,x,x,x,x]\n' + ''.join(
        f'{name}: &{name} [{",".join([f"*{chr(ord(name) - 1)}"] * 9)}]\n' for name in 'bcdefghi'
    )
    files: dict[str, bytes | None] = {
        'missing.yaml': None,
        'bomb.yaml': bomb.encode(),
        'deep.yaml': b'[' * 60_000,
        'huge.yaml': b'a: ' + b'x' * 10**6,
        'binary.yaml': bytes(range(256)),
        'nul.yaml': b'uuid: "\0"\n',
        'tag.yaml': b'uuid: !!python/object/apply:os.system ["touch executed"]\n',
        'unknown.yaml': b'etdc: {}\n',
        'list.yaml': b'- etcd\n',
    }
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
    (tmp_path / 'directory.yaml').mkdir()
    os.mkfifo(tmp_path / 'pipe.yaml')
    (tmp_path / 'loop.yaml').symlink_to('loop.yaml')
    paths = [*files, 'directory.yaml', 'loop.yaml', 'x' * 300, 'nul\0']
    for name in paths:
        result = run_in_process('--config', str(tmp_path / name), 'list')
        message = assert_one_line(result, 2)
        assert name.rstrip('\0')[:100] in message, message
    assert not (tmp_path / 'executed').exists()
    assert not Path('executed').exists()


@pytest.mark.parametrize('module', ['ecomp.compute', 'ecomp.schedule'])
def test_unreadable_configuration_is_refused(tmp_path: Path, module: str) -> None:
    """F32: a configuration or a directory closed to the user: exit 2, one line (fake)."""
    if os.geteuid() != 0:
        pytest.skip('it takes root to become somebody else')
    import subprocess
    import sys

    from tests.kit.servers import make_environment

    home = tmp_path / 'home'
    home.mkdir(mode=0o700)
    (home / 'conf.yaml').write_text('{}\n')
    open_to_all = tmp_path / 'secret.yaml'
    open_to_all.write_text('{}\n')
    open_to_all.chmod(0o600)
    for path in (home / 'conf.yaml', open_to_all):
        # As root, without its right to read everything: only root may be able to read the tree and its Python.
        words = ['setpriv', '--bounding-set=-dac_override,-dac_read_search', '--inh-caps=-all', '--reuid=0', '--']
        os.chown(path, 65534, 65534)
        os.chown(home, 65534, 65534)
        proc = subprocess.run(
            [*words, sys.executable, '-m', module, '--config', str(path), *(['list'] if 'schedule' in module else [])],
            capture_output=True,
            text=True,
            env=make_environment(),
            check=False,
            timeout=60,
        )
        command = 'eschedule' if 'schedule' in module else 'ecompute'
        assert_one_line(
            Result(proc.returncode, proc.stdout, proc.stderr), 2, path.name, 'Permission denied', command=command
        )


def test_uuid_spellings_name_the_same_instance(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F32: a uuid in another spelling is the same instance, others are exit 2 (fake)."""
    config = ['--config', str(cluster.schedule_yaml)]
    writings = (instance.upper(), '{' + instance + '}', instance.replace('-', ''), f'urn:uuid:{instance}')
    for number, writing in enumerate(writings):
        result = run_in_process(*config, '--uuid', writing, SMALL_QUERY)
        assert result.code == 0, result
        assert result.stdout == f'NOTIFIED TARGET, {compute.uuid}, OF INSTANCE {instance}\n'
        assert ('this command changed nothing' in result.stderr) == (number > 0)
    for wrong in (instance[:-1], instance + '0', f' {instance}x', '../' + instance):
        assert_one_line(run_in_process(*config, '--uuid', wrong, SMALL_QUERY), 2, 'uuid')
    assert list(read_allocations(cluster)) == [instance]


# F37: stdout and stderr of ecompute or eschedule are not read or cannot be written: they keep working.


REDIRECTIONS = {
    'closed': '>&- 2>&-',
    'all closed': '<&- >&- 2>&-',
    'a full disk': '>/dev/full 2>/dev/full',
    # The reader ends after one line; each later write fails with a broken pipe.
    'a reader that goes': '> >(head -n 1 >/dev/null) 2> >(head -n 1 >/dev/null)',
}


class RedirectedEcompute(Ecompute):
    redirection = ''

    def command(self) -> list[str]:
        return ['bash', '-c', f'exec "$0" "$@" {self.redirection}', *super().command()]

    def is_ready(self) -> bool:
        # There is no log.
        return bool(self.list_presence_keys())

    def list_presence_keys(self) -> list[str]:
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
    """F37: eschedule with stdout or stderr closed or full: its work is done (fake)."""
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
    """F37: help or a unit that cannot be printed: a line, and exit 1 (fake)."""
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
