"""Story 1 of the hands: three hosts and a terminal of 80 columns; all by name, no uuid typed and no line wrapped."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.lab import Lab, lab_name
from tests.kit.servers import environment, until
from tests.scenario.debian_image import debian_image

QUERY = 'resources=VCPU:1,DISK_GB:3,MEMORY_MB:512'
READY = 1200
"""Seconds an emulated Debian may take to the end of its cloud-init."""
COLUMNS = 80
PROMPT = re.compile(r'(?:\^C)?\[(\d+)\] \$')
"""With what a Ctrl-C before it leaves on its line."""
UUID = re.compile('[0-9a-f]{8}-[0-9a-f]{4}-')

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(os.geteuid() != 0, reason='hypervisors in namespaces need root'),
]


class Terminal:
    """A shell in tmux. What was typed is kept in `typed`; what it wrote is read off the screen and above it."""

    def __init__(self, work: Path, directory: Path, **variables: str) -> None:
        bin = work / 'bin'
        bin.mkdir()
        for command, module in (('eschedule', 'ecomp.schedule'), ('elab', 'ecomp.lab.elab')):
            (bin / command).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (bin / command).chmod(0o755)
        self.typed: list[str] = []
        self._tmux = ['tmux', '-S', str(work / 'tmux'), '-f', '/dev/null']
        env = {**environment(), 'HOME': str(work), 'TERM': 'xterm', 'SSH_AUTH_SOCK': '', **variables}
        env['PATH'] = f'{bin}:{env["PATH"]}'
        for unwanted in ('TMUX', 'COLUMNS', 'LINES', 'NO_COLOR'):
            env.pop(unwanted, None)
        (work / 'rc').write_text("PS1='[$?] $ '\n")  # not from the environment, of which tmux's own shell takes it
        shell = f'bash --noprofile --rcfile {work}/rc'
        subprocess.run(
            [*self._tmux, 'set-option', '-g', 'history-limit', '100000', ';',
             'new-session', '-d', '-x', str(COLUMNS), '-y', '24', '-c', str(directory), shell],
            env=env, check=True, timeout=60,
        )  # fmt: skip
        until(lambda: self.shown() and PROMPT.fullmatch(self.shown()[-1]), 20, 'the shell')

    def close(self) -> None:
        """End it, and what runs in it."""
        subprocess.run([*self._tmux, 'kill-server'], check=False, timeout=60)

    def shown(self, joined: bool = True) -> list[str]:
        """Every line that was written, `joined` as it was; else as the terminal has it, which wraps what is longer."""
        capture = [*self._tmux, 'capture-pane', '-p', '-S', '-', *(['-J'] if joined else [])]
        text = subprocess.run(capture, capture_output=True, text=True, check=True, timeout=60).stdout
        return [line.rstrip() for line in text.rstrip().splitlines()]

    def press(self, *keys: str) -> None:
        """Press keys, as tmux calls them."""
        subprocess.run([*self._tmux, 'send-keys', *keys], check=True, timeout=60)

    def begin(self, command: str) -> int:
        """Type a command; the number of its line."""
        assert not UUID.search(command)
        self.typed.append(command)
        line = len(self.shown()) - 1
        subprocess.run([*self._tmux, 'send-keys', '-l', command], check=True, timeout=60)
        self.press('Enter')
        return line

    def end(self, line: int, seconds: float = 60.0) -> tuple[int, list[str]]:
        """The exit code of the command that was typed on this line, and what it wrote, once it has ended."""

        def ended() -> re.Match[str] | None:
            lines = self.shown()
            return PROMPT.fullmatch(lines[-1]) if len(lines) > line + 1 else None

        found = until(ended, seconds, f'{self.typed[-1]} ends')
        return int(found[1]), self.shown()[line + 1 : -1]

    def says(self, command: str, seconds: float = 60.0) -> list[str]:
        """What a command writes that succeeds, no line of which the terminal had to wrap."""
        before = len(self.shown(joined=False)) - len(self.shown())
        code, lines = self.end(self.begin(command), seconds)
        assert code == 0, (command, lines)
        assert max(map(len, lines), default=0) <= COLUMNS, (command, lines)
        assert len(self.shown(joined=False)) - len(self.shown()) == before, (command, self.shown(joined=False))
        return lines


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """A terminal in the directory of a lab of three hosts, whose guests are Debians that take our key."""
    assert shutil.which('tmux'), 'apt install tmux'
    subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', tmp_path / 'key'], check=True, timeout=60)
    lab = Lab(lab_name('byname'), 3)
    try:
        shutil.copyfile(debian_image(), lab.directory / 'images/debian.qcow2')
        shown = Terminal(
            tmp_path, lab.directory, Q=QUERY, IMAGE=lab.url('debian.qcow2'), KEY=shlex.quote(str(tmp_path / 'key'))
        )
        try:
            yield shown
        finally:
            shown.close()
    finally:
        lab.close()


def test_a_guest_is_used_by_its_name_alone(terminal: Terminal) -> None:
    """create, list, show, ssh, log -f, reboot and ready again, destroy; no uuid typed, no line wrapped"""
    *_, on, address = terminal.says('eschedule $Q $IMAGE --name web1 --ssh-key $KEY.pub --wait', READY)
    host = re.fullmatch(r'eschedule: web1 is on (hv[123])', on)
    assert host, on
    assert terminal.says(f'eschedule wait web1 --for ready --timeout {READY}', READY)[-1] == address

    heading, listed = terminal.says('eschedule list')
    assert heading.split()[:5] == ['INSTANCE', 'NAME', 'STATE', 'ADDRESS', 'HOST']
    assert listed.split()[1:5] == ['web1', 'active', address, host[1]]
    assert len(terminal.says('eschedule hosts')) == 4
    assert f'host         {host[1]}' in terminal.says('eschedule show web1')
    assert f'web1 is on {host[1]}, since' in ' '.join(terminal.says('eschedule why web1'))
    assert 'boot 1' not in ' '.join(terminal.says('eschedule timeline web1'))

    assert terminal.says('eschedule ssh web1 -i $KEY -- hostname', 120) == ['web1']
    assert terminal.says('eschedule ssh web1 -i $KEY -- sudo touch /var/kept', 120) == []

    following = terminal.begin('eschedule log web1 -f -n 2')
    until(lambda: len(terminal.shown()) > following + 2, 60, 'the last lines of its console')
    terminal.press('C-c')
    code, _ = terminal.end(following)
    assert code == 0

    assert terminal.says('eschedule reboot web1') == [f'eschedule: web1: reboot accepted, {host[1]} carries it out']
    assert terminal.says(f'eschedule wait web1 --for ready --timeout {READY}', READY) == [address]
    assert 'boot 2, reboot' in terminal.says('eschedule timeline web1')[0]
    assert terminal.says('eschedule ssh web1 -i $KEY -- ls /var/kept', 120) == ['/var/kept']
    assert any('web1: boot 2: reboot' in line for line in terminal.says('eschedule events web1'))
    assert terminal.says('eschedule events web1 -n 1')[-1].endswith('web1: ready')

    assert terminal.says('eschedule destroy web1 --wait') == [
        f'eschedule: web1: destroy accepted, {host[1]} carries it out',
        'eschedule: web1: gone',
    ]
    assert [line.split() for line in terminal.says('eschedule list')] == [heading.split()]
    assert terminal.says('elab status --name "$(basename "$PWD")"')[0].split() == ['PLACE', 'ADDRESS', 'STATE']
    assert not UUID.search('\n'.join(terminal.typed))
