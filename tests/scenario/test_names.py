"""Names of instances, and commands that use them."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants
from tests.kit.journal import JOURNAL
from tests.kit.lab import Lab, make_lab_name
from tests.kit.servers import make_environment, wait_until
from tests.kit.story import (
    SMALL_QUERY,
    assert_one_line,
    boot,
    find_log_lines,
    place,
    read_record,
    run_in_process,
    wait_address,
)
from tests.scenario.debian_image import get_debian_image

# Names, keys and user-data, from eschedule's options to the data that a compute gives its metadata server.


KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA me@here'
OTHER_KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB you@there'
CANARY = 'canary-of-the-user-data'
SCRIPT = f'#!/bin/sh\necho "{CANARY}" {{{{ x }}}}\n'


def read_guest_data(compute: Ecompute) -> dict[str, dict[str, Any]]:
    """Return the metadata on a compute by instance; check that only root may read the files."""
    data_by_instance = {}
    for path in (compute.directory / 'state' / 'metadata').glob('*.json'):
        assert path.stat().st_mode & 0o777 == 0o600
        data = json.loads(path.read_text())
        data_by_instance[data['instance']] = data
    return data_by_instance


def write_files(directory: Path, **files: str | bytes) -> dict[str, str]:
    """Write files and return their paths by name."""
    for name, content in files.items():
        (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return {name: str(directory / name) for name in files}


def test_two_instances_on_one_host_get_their_own_metadata(cluster: Control) -> None:
    compute = cluster.ecompute()
    packed = gzip.compress(b'#cloud-config\n', mtime=0)
    file = write_files(cluster.directory, one=f'# mine\n{KEY}\n', two=OTHER_KEY, script=SCRIPT, packed=packed)
    first = place(cluster, SMALL_QUERY, '--name', 'web1', '--ssh-key', file['one'], '--user-data', file['script'])[1]
    keys = ['--ssh-key', file['two'], '--ssh-key', file['one'], '--ssh-key', file['two']]
    second_instance = place(cluster, SMALL_QUERY, '--name', 'web2', *keys, '--user-data', file['packed'])[1]
    third = place(cluster)[1]
    for instance in (first, second_instance, third):
        wait_address(cluster, instance)
    data = read_guest_data(compute)
    assert [data[first][field] for field in ('hostname', 'public_keys', 'user_data')] == ['web1', [KEY], SCRIPT]
    assert [data[second_instance][field] for field in ('hostname', 'public_keys')] == ['web2', [OTHER_KEY, KEY]]
    assert data[second_instance]['user_data'].encode(errors='surrogateescape') == packed
    assert [data[third][field] for field in ('hostname', 'public_keys', 'user_data')] == [f'vm-{third[:8]}', None, None]
    # The data survives a kill of ecompute and is in no record and no log.
    compute.kill()
    compute.start()
    assert read_guest_data(compute) == data
    assert (read_record(cluster, first) or {})['name'] == 'web1'
    for text in (CANARY, KEY.split()[1]):
        assert text not in json.dumps([read_record(cluster, name_holder) for name_holder in (first, second_instance)])
        assert find_log_lines(compute, text) == []
    check_invariants(cluster, compute)
    assert cluster.eschedule('destroy', '--wait', 'web1', 'web2', third[:13]).code == 0
    assert read_guest_data(compute) == {}
    assert cluster.etcd.list_keys('/names/') == []
    for path in (compute.directory / 'state').rglob('*'):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path


@pytest.mark.usefixtures('compute')
def test_name_is_accepted_in_place_of_a_uuid(cluster: Control) -> None:
    _, instance = place(cluster, SMALL_QUERY, '--name', 'web1', '--wait=started')
    address = wait_address(cluster, instance)
    for word in ('web1', instance[:4], instance.replace('-', '')[:20].upper()):
        assert run_in_process(cluster, word).stdout == f'{address}\n'
    assert run_in_process(cluster, 'list').stdout.splitlines()[1].split()[:3] == [instance, 'web1', 'active']
    assert run_in_process(cluster, 'show', 'web1').stdout.splitlines()[1].split() == ['name', 'web1']
    (listed,) = json.loads(run_in_process(cluster, 'list', '-f', 'json').stdout)
    assert listed == json.loads(run_in_process(cluster, 'show', 'web1', '-f', 'json').stdout)
    assert listed['name'] == 'web1'
    # Each argument is tried and reported.
    done = run_in_process(cluster, 'destroy', '--wait', 'web2', 'web1')
    assert done.code == 4
    assert done.stderr.splitlines()[0].startswith('eschedule: web2: no living instance')
    assert done.stderr.splitlines()[-1] == 'eschedule: web1: gone'
    assert_one_line(run_in_process(cluster, 'web1'), 4, 'web1: is neither a command nor an instance')
    assert_one_line(run_in_process(cluster, instance[:4]), 4, f'{instance[:4]}: has been gone since')


def test_largest_keys_and_user_data_are_delivered(cluster: Control, compute: Ecompute) -> None:
    """Incompressible user-data of 256 KiB and 30 KiB of keys fit into etcd and the files."""
    keys = ''.join(f'ssh-rsa {base64.b64encode(_rsa(number)).decode()} é\n' for number in range(55))
    data = gzip.compress(os.urandom(262144 - 400), 0)
    file = write_files(cluster.directory, keys=keys, data=data)
    instance = boot(cluster, SMALL_QUERY, '--ssh-key', file['keys'], '--user-data', file['data'])
    metadata = read_guest_data(compute)[instance]
    assert metadata['user_data'].encode(errors='surrogateescape') == data
    assert len(metadata['public_keys']) == 55
    assert len(json.dumps(read_record(cluster, instance))) < 3000


def _rsa(number: int) -> bytes:
    parts = (b'ssh-rsa', b'\1\0\1', number.to_bytes(2, 'big') + bytes(400))
    return b''.join(len(part).to_bytes(4, 'big') + part for part in parts)


def test_schedule_yaml_gives_default_keys_and_user_data(cluster: Control, compute: Ecompute) -> None:
    (cluster.directory / 'files').mkdir()
    file = write_files(cluster.directory / 'files', key=KEY, script=SCRIPT)
    other = write_files(cluster.directory, other=OTHER_KEY, empty='')
    config = yaml.safe_load(cluster.schedule_yaml.read_text())
    config |= {'ssh_keys': ['files/key'], 'user_data': 'files/script'}
    cluster.schedule_yaml.write_text(yaml.safe_dump(config))
    first, second = place(cluster)[1], place(cluster, SMALL_QUERY, '--ssh-key', other['other'])[1]
    for instance, keys in ((first, [KEY]), (second, [OTHER_KEY])):
        wait_address(cluster, instance)
        metadata = read_guest_data(compute)[instance]
        assert (metadata['public_keys'], metadata['user_data']) == (keys, SCRIPT)
    # The files are read only when an instance is created.
    Path(file['key']).unlink()
    assert cluster.eschedule('list').code == 0
    assert_one_line(cluster.eschedule(SMALL_QUERY), 2, f'ssh keys {file["key"]}: cannot be read: No such file')
    assert_one_line(cluster.eschedule(SMALL_QUERY, '--ssh-key', other['empty']), 2, 'contains no key')


def test_user_data_from_standard_input(cluster: Control, compute: Ecompute) -> None:
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(cluster.schedule_yaml), SMALL_QUERY]
    for words, data in ((['--user-data', '-'], SCRIPT), ([], None)):
        started_at = time.monotonic()
        done = subprocess.run(
            [*command, *words],
            input=SCRIPT,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=make_environment(),
        )
        JOURNAL.add_run([SMALL_QUERY, *words], done.returncode, (done.stdout, done.stderr), started_at, 0)
        instance = done.stdout.split()[-1]
        wait_address(cluster, instance)
        assert read_guest_data(compute)[instance]['user_data'] == data
    assert find_log_lines(compute, CANARY) == []


# Three hosts and a terminal of 80 columns: guests are used by name, no uuid is typed and no line wraps.


QUERY = 'resources=VCPU:1,DISK_GB:3,MEMORY_MB:512'
# Seconds that an emulated Debian may take to the end of its cloud-init.
READY_SECONDS = 1200
COLUMNS = 80
# A Ctrl-C before the prompt leaves ^C on its line.
PROMPT = re.compile(r'(?:\^C)?\[(\d+)\] \$')
UUID = re.compile('[0-9a-f]{8}-[0-9a-f]{4}-')


class Terminal:
    """A shell in tmux.

    Attributes:
        typed: the commands that were typed. Their output is read from the screen and its history.
    """

    def __init__(self, work: Path, directory: Path, **variables: str) -> None:
        bin = work / 'bin'
        bin.mkdir()
        for command, module in (('eschedule', 'ecomp.schedule'), ('elab', 'ecomp.lab.elab')):
            (bin / command).write_text(f'#!/bin/sh\nexec {sys.executable} -m {module} "$@"\n')
            (bin / command).chmod(0o755)
        self.typed: list[str] = []
        self._tmux = ['tmux', '-S', str(work / 'tmux'), '-f', '/dev/null']
        env = {**make_environment(), 'HOME': str(work), 'TERM': 'xterm', 'SSH_AUTH_SOCK': '', **variables}
        env['PATH'] = f'{bin}:{env["PATH"]}'
        for unwanted in ('TMUX', 'COLUMNS', 'LINES', 'NO_COLOR'):
            env.pop(unwanted, None)
        (work / 'rc').write_text("PS1='[$?] $ '\n")  # not from the environment, from which tmux's own shell takes it
        shell = f'bash --noprofile --rcfile {work}/rc'
        subprocess.run(
            [*self._tmux, 'set-option', '-g', 'history-limit', '100000', ';',
             'new-session', '-d', '-x', str(COLUMNS), '-y', '24', '-c', str(directory), shell],
            env=env, check=True, timeout=60,
        )  # fmt: skip
        wait_until(lambda: self.read_lines() and PROMPT.fullmatch(self.read_lines()[-1]), 20, 'the shell')

    def close(self) -> None:
        """End the shell and everything that runs in it."""
        subprocess.run([*self._tmux, 'kill-server'], check=False, timeout=60)

    def read_lines(self, joined: bool = True) -> list[str]:
        """Return all lines that were written.

        Lines are `joined` as they were written, or else as wrapped by the terminal.
        """
        capture = [*self._tmux, 'capture-pane', '-p', '-S', '-', *(['-J'] if joined else [])]
        text = subprocess.run(capture, capture_output=True, text=True, check=True, timeout=60).stdout
        return [line.rstrip() for line in text.rstrip().splitlines()]

    def press(self, *keys: str) -> None:
        """Press keys, by tmux's names."""
        subprocess.run([*self._tmux, 'send-keys', *keys], check=True, timeout=60)

    def start_command(self, command: str) -> int:
        """Type a command; return the number of its line."""
        assert not UUID.search(command)
        self.typed.append(command)
        line = len(self.read_lines()) - 1
        subprocess.run([*self._tmux, 'send-keys', '-l', command], check=True, timeout=60)
        self.press('Enter')
        return line

    def wait_for_command(self, line: int, seconds: float = 60.0) -> tuple[int, list[str]]:
        """Wait until the command on a line has finished; return its exit code and output."""

        def find_prompt() -> re.Match[str] | None:
            lines = self.read_lines()
            return PROMPT.fullmatch(lines[-1]) if len(lines) > line + 1 else None

        prompt = wait_until(find_prompt, seconds, f'{self.typed[-1]} ends')
        return int(prompt[1]), self.read_lines()[line + 1 : -1]

    def run_command(self, command: str, seconds: float = 60.0) -> list[str]:
        """Run a successful command; check that the terminal wrapped no line, and return its output."""
        before = len(self.read_lines(joined=False)) - len(self.read_lines())
        code, lines = self.wait_for_command(self.start_command(command), seconds)
        assert code == 0, (command, lines)
        assert max(map(len, lines), default=0) <= COLUMNS, (command, lines)
        assert len(self.read_lines(joined=False)) - len(self.read_lines()) == before, (
            command,
            self.read_lines(joined=False),
        )
        return lines


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    """Provide a terminal in the directory of a lab of three hosts, whose images are Debians."""
    assert shutil.which('tmux'), 'apt install tmux'
    subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', tmp_path / 'key'], check=True, timeout=60)
    lab = Lab(make_lab_name('byname'), 3)
    try:
        shutil.copyfile(get_debian_image(), lab.directory / 'images/debian.qcow2')
        shell = Terminal(
            tmp_path, lab.directory, Q=QUERY, IMAGE=lab.make_url('debian.qcow2'), KEY=shlex.quote(str(tmp_path / 'key'))
        )
        try:
            yield shell
        finally:
            shell.close()
    finally:
        lab.close()


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.skipif(os.geteuid() != 0, reason='hypervisors in namespaces need root')
def test_guest_is_used_by_its_name_alone(terminal: Terminal) -> None:
    *_, location, address = terminal.run_command(
        'eschedule $Q $IMAGE --name web1 --ssh-key $KEY.pub --wait', READY_SECONDS
    )
    host = re.fullmatch(r'eschedule: web1 is on (hv[123])', location)
    assert host, location
    assert (
        terminal.run_command(f'eschedule wait web1 --for ready --timeout {READY_SECONDS}', READY_SECONDS)[-1] == address
    )

    heading, listed = terminal.run_command('eschedule list')
    assert heading.split()[:5] == ['INSTANCE', 'NAME', 'STATE', 'ADDRESS', 'HOST']
    assert listed.split()[1:5] == ['web1', 'active', address, host[1]]
    assert len(terminal.run_command('eschedule hosts')) == 4
    assert f'host         {host[1]}' in terminal.run_command('eschedule show web1')
    assert f'web1 is on {host[1]}, since' in ' '.join(terminal.run_command('eschedule why web1'))
    assert 'boot 1' not in ' '.join(terminal.run_command('eschedule timeline web1'))

    assert terminal.run_command('eschedule ssh web1 -i $KEY -- hostname', 120) == ['web1']
    assert terminal.run_command('eschedule ssh web1 -i $KEY -- sudo touch /var/kept', 120) == []

    following = terminal.start_command('eschedule log web1 -f -n 2')
    wait_until(lambda: len(terminal.read_lines()) > following + 2, 60, 'the last lines of its console')
    terminal.press('C-c')
    code, _ = terminal.wait_for_command(following)
    assert code == 0

    assert terminal.run_command('eschedule reboot web1') == [
        f'eschedule: web1: reboot accepted; {host[1]} carries it out'
    ]
    assert terminal.run_command(f'eschedule wait web1 --for ready --timeout {READY_SECONDS}', READY_SECONDS) == [
        address
    ]
    assert 'boot 2, reboot' in terminal.run_command('eschedule timeline web1')[0]
    assert terminal.run_command('eschedule ssh web1 -i $KEY -- ls /var/kept', 120) == ['/var/kept']
    assert any('web1: boot 2: reboot' in line for line in terminal.run_command('eschedule events web1'))
    assert terminal.run_command('eschedule events web1 -n 1')[-1].endswith('web1: ready')

    assert terminal.run_command('eschedule destroy web1 --wait') == [
        f'eschedule: web1: destroy accepted; {host[1]} carries it out',
        'eschedule: web1: gone',
    ]
    assert [line.split() for line in terminal.run_command('eschedule list')] == [heading.split()]
    assert terminal.run_command('elab status --name "$(basename "$PWD")"')[0].split() == ['PLACE', 'ADDRESS', 'STATE']
    assert not UUID.search('\n'.join(terminal.typed))
