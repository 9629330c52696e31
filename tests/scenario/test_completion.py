"""Completion in real shells: commands, options, and names from etcd."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ecomp.schedule import main
from tests.kit.commands import Control
from tests.kit.invariants import check_invariants
from tests.kit.servers import SLOWDOWN_FACTOR, make_environment
from tests.kit.story import SMALL_QUERY, boot, run_in_process

LINES_OF_OTHER_SHELLS = {
    *('eschedule sho', 'eschedule we', 'eschedule host ', 'eschedule quota '),
    *('eschedule create --flavor small ', 'eschedule resources=VCPU:1 --wait=addr', 'eschedule list --uu'),
    *('eschedule help flavor ', 'eschedule list --state s', 'eschedule --config /nowhere show we'),
}
# What prints the candidates for the last word of a line, without a terminal.
CALLS = {
    'bash': 'source SCRIPT; COMP_WORDBREAKS=; COMP_WORDS=(LINE); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); '
    '_eschedule; printf "%s\\n" "${COMPREPLY[@]}"',
    'zsh': 'compdef() { :; }; compadd() { shift; print -l -- "$@" }; source SCRIPT; '
    'words=(LINE); CURRENT=$#words; _eschedule',
    'fish': 'source SCRIPT; complete -C LINE',
}
SHELLS = {'bash': ['bash', '--norc', '--noprofile', '-i'], 'zsh': ['zsh', '-f', '-i'], 'fish': ['fish', '--no-config']}


@pytest.fixture
def env(cluster: Control) -> Iterator[dict[str, str]]:
    """Provide an environment with an `eschedule` command for the cluster and an instance web1."""
    command = cluster.directory / 'bin/eschedule'
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m ecomp.schedule "$@"\n')
    command.chmod(0o755)
    compute = cluster.ecompute()
    instance = boot(cluster, SMALL_QUERY, '--name', 'web1', '--group', 'apart', '--policy', 'affinity')
    assert run_in_process(cluster, 'flavor', 'set', 'small', SMALL_QUERY).code == 0
    assert run_in_process(cluster, 'quota', 'set', 'shop', 'instances=4').code == 0
    with cluster.schedule_yaml.open('a') as file:
        file.write('images: {trixie: "http://images.invalid/trixie.qcow2"}\n')
    path = f'{command.parent}:{os.environ["PATH"]}'
    home = {'ECOMP_CONFIG': str(cluster.directory), 'HOME': str(cluster.directory), 'TERM': 'dumb', 'PS1': '> '}
    yield {**make_environment(), **home, 'PATH': path, 'COMPUTE': compute.uuid, 'INSTANCE': instance}
    check_invariants(cluster, compute)


def write_completion_script(directory: Path, shell: str, env: dict[str, str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f'apt-get install {shell}')
    path = directory / f'completion.{shell}'
    path.write_text(subprocess.run(['eschedule', 'completion', shell], env=env, capture_output=True, text=True).stdout)
    assert subprocess.run([shell, '-n', path]).returncode == 0
    return path


def list_candidates(shell: str, script: Path, env: dict[str, str], line: str) -> list[str]:
    words = shlex.quote(line) if shell == 'fish' else shlex.join(line.split(' '))
    call = CALLS[shell].replace('SCRIPT', str(script)).replace('LINE', words)
    command = [*(word for word in SHELLS[shell] if word != '-i'), '-c', call]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=SLOWDOWN_FACTOR * 60)
    assert done.stderr == ''
    candidates = (row.split('\t')[0] for row in done.stdout.splitlines())
    return sorted(word for word in candidates if word and word.startswith(line.split(' ')[-1]))


def complete_on_terminal(shell: str, script: Path, env: dict[str, str], line: str) -> str:
    """Return the line that a TAB makes of `line` in an interactive shell on a terminal."""
    pid, terminal = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack('HHHH', 50, 500, 0, 0))  # wide enough for any line
        os.execvpe(shell, SHELLS[shell], env)
    try:
        prepare = 'autoload -Uz compinit; compinit -u -D; ' if shell == 'zsh' else ''
        os.write(terminal, f'{prepare}source {script}; echo rea""dy\n'.encode())
        read_until(terminal, 'ready\r')
        # Then turn the line into an argument of echo, which prints the current line.
        os.write(terminal, f'{line}\t'.encode())
        read_until(terminal, line)
        os.write(terminal, b'\x01echo "<\x05>"\n')
        return read_until(terminal, '>\r').rpartition('<')[2].partition('>')[0].strip()
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(terminal)


def read_until(terminal: int, expected: str) -> str:
    text, end = '', time.monotonic() + SLOWDOWN_FACTOR * 30
    while expected not in text:
        assert time.monotonic() < end, text
        if select.select([terminal], [], [], 0.1)[0]:
            text += os.read(terminal, 65536).decode(errors='replace')
    return text


@pytest.mark.parametrize('shell', ['bash', pytest.param('zsh', marks=pytest.mark.slow), 'fish'])
def test_candidates_of_each_command(cluster: Control, env: dict[str, str], shell: str) -> None:
    script = write_completion_script(cluster.directory, shell, env)
    # A name that a shell would execute is not offered.
    cluster.etcd.put('/groups/$(touch x)', '{"version":1,"policy":"affinity","strict":true,"members":{}}')
    cluster.etcd.put('/groups/a;b', '{"version":1,"policy":"affinity","strict":true,"members":{}}')
    try:
        hosts = list_candidates(shell, script, env, 'eschedule host drain ')
        assert env['COMPUTE'] in hosts
        for line, expected in {
            'eschedule sho': ['show'],
            'eschedule wai': ['wait'],
            'eschedule we': ['web1'],
            'eschedule show we': ['web1'],
            f'eschedule destroy --wait {env["INSTANCE"][:6]}': [env['INSTANCE']],
            'eschedule host ': ['drain', 'enable', 'forget'],
            'eschedule host forget ': sorted([env['COMPUTE'], socket.gethostname()]),
            'eschedule flavor delete ': ['small'],
            'eschedule group ': ['apart'],
            'eschedule resources=VCPU:1 tri': ['trixie'],
            'eschedule create --flavor small ': ['trixie'],
            'eschedule quota ': ['set', 'shop'],
            'eschedule resources=VCPU:1 --flavor ': ['small'],
            'eschedule resources=VCPU:1 --weigh s': ['spread'],
            'eschedule show web1 --form': ['--format'],
            'eschedule list --al': ['--all'],
            'eschedule destroy --al': [],
            'eschedule list --uu': [],
            'eschedule resources=VCPU:1 --uu': ['--uuid'],
            'eschedule wait web1 --for addr': ['addressed'],
            'eschedule resources=VCPU:1 --wait=addr': ['--wait=addressed'],
            'eschedule help flav': ['flavor'],
            'eschedule help flavor ': ['delete', 'set'],
            'eschedule help flavor delete ': [],
            'eschedule help list ': [],
            'eschedule log web1 -f --fol': ['--follow'],
            'eschedule list -f js': ['json'],
            'eschedule list --state s': ['scheduled', 'stopped'],
            'eschedule list --state=que': ['--state=queued'],
            'eschedule list -c re': ['reason', 'requested'],
            'eschedule list --column i': ['image', 'instance'],
            'eschedule list --sort na': ['name'],
            'eschedule completion ': ['bash', 'fish', 'zsh'],
            f'eschedule --config {cluster.schedule_yaml} show we': ['web1'],
            'eschedule --config /nowhere show we': [],
        }.items():
            # All shells ask the same command.
            if shell == 'bash' or line in LINES_OF_OTHER_SHELLS:
                assert list_candidates(shell, script, env, line) == expected, line
    finally:
        cluster.etcd.delete('/groups/$(touch x)')
        cluster.etcd.delete('/groups/a;b')
    assert not (cluster.directory / 'x').exists()


def test_no_name_is_awaited_for_long_from_an_etcd_that_does_not_answer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(('127.0.0.1', 0)) as server:
        path = tmp_path / 'schedule.yaml'
        path.write_text(f'etcd:\n  port: {server.getsockname()[1]}\n  timeout: 3600\n')
        assert main(['__complete', 'we', 'show', '--config', str(path)]) == 0
    assert capfd.readouterr() == ('', '')


@pytest.mark.parametrize('shell', [pytest.param('bash', marks=pytest.mark.slow), 'zsh'])
def test_tab_completes_the_line_on_a_terminal(cluster: Control, env: dict[str, str], shell: str) -> None:
    script = write_completion_script(cluster.directory, shell, env)
    for line, expected in {
        'eschedule evac': 'eschedule evacuate',
        'eschedule show we': 'eschedule show web1',
        'eschedule host dr': 'eschedule host drain',
        'eschedule resources=VCPU:1 --wait=addr': 'eschedule resources=VCPU:1 --wait=addressed',
        f'eschedule list --config {cluster.directory}/sched': f'eschedule list --config {cluster.schedule_yaml}',
    }.items():
        assert complete_on_terminal(shell, script, env, line) == expected
