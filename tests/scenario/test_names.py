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
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kit.commands import Control, Ecompute
from tests.kit.invariants import check_invariants, read_allocations, read_lasting_keys
from tests.kit.journal import JOURNAL
from tests.kit.lab import Lab, make_lab_name
from tests.kit.servers import make_environment, wait_until
from tests.kit.story import (
    SMALL_QUERY,
    assert_one_line,
    boot,
    find_log_lines,
    parse_notice,
    place,
    read_record,
    run_concurrently,
    run_in_process,
    wait_address,
    wait_state,
)
from tests.scenario.debian_image import get_debian_image

# Names, keys and user-data, from eschedule's options to the data that a compute gives its metadata server.


KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA me@here'
OTHER_KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB you@there'
CANARY = 'canary-of-the-user-data'
SCRIPT = f'#!/bin/sh\necho "{CANARY}" {{{{ x }}}}\n'
FAILS = 'http://images.invalid/fails'
BIG_INVENTORY = 'VCPU:64,DISK_GB:640,MEMORY_MB:65536'


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
    assert_one_line(run_in_process(cluster, 'web2'), 4, 'web2: is neither a command nor an instance')
    assert_one_line(
        run_in_process(cluster, 'lists'),
        4,
        'lists: is neither a command nor an instance',
        'did you mean eschedule list?',
    )
    assert_one_line(
        run_in_process(cluster, '5ca'),
        4,
        '5ca: is neither a command nor an instance (give at least the first 4 digits of a uuid)',
    )
    beginning = 'ffff' if not instance.startswith('ffff') else 'eeee'
    assert_one_line(
        run_in_process(cluster, 'show', beginning), 4, f'{beginning}: no living instance', 'no uuid begins with it'
    )
    # Each argument is tried and reported.
    done = run_in_process(cluster, 'destroy', '--wait', 'web2', 'web1')
    assert done.code == 4
    assert done.stderr.splitlines()[0].startswith('eschedule: web2: no living instance')
    assert done.stderr.splitlines()[-1] == 'eschedule: web1: gone'
    assert_one_line(run_in_process(cluster, 'web1'), 4, 'web1: is neither a command nor an instance')
    assert_one_line(run_in_process(cluster, instance[:4]), 4, f'{instance[:4]}: has been gone since')


def test_name_has_one_holder_and_is_free_after_its_destroy(cluster: Control) -> None:
    compute = cluster.ecompute(BIG_INVENTORY)
    results = run_concurrently(cluster, [[SMALL_QUERY, '--name', 'web1']] * 4, width=4)
    (winner,) = [parse_notice(result)[1] for result in results if result.code == 0]
    for result in results:
        if result.code:
            assert_one_line(result, 5, f'web1: name taken by instance {winner}')
    assert list(read_allocations(cluster)) == [winner]
    wait_address(cluster, winner)
    assert cluster.eschedule('destroy', '--wait', 'web1').code == 0
    second = place(cluster, SMALL_QUERY, '--name', 'web1')[1]
    assert second != winner
    wait_address(cluster, second)
    check_invariants(cluster, compute)


@pytest.mark.usefixtures('compute')
def test_repeated_request_with_other_data_is_refused(cluster: Control) -> None:
    file = write_files(cluster.directory, key=KEY, other=OTHER_KEY, script=SCRIPT)
    words = [SMALL_QUERY, '--uuid', str(uuid.uuid4()), '--name', 'web1', '--ssh-key', file['key'], '--user-data']
    first = place(cluster, *words, file['script'])
    before = read_lasting_keys(cluster)
    repeated = run_in_process(cluster, *words, file['script'])
    assert parse_notice(repeated) == first
    assert_one_line(repeated, 0, 'was requested before: this command changed nothing')
    write_files(cluster.directory, script=SCRIPT + '# another\n')
    assert_one_line(
        run_in_process(cluster, *words, file['script']), 5, 'exists, but was requested with other user-data'
    )
    write_files(cluster.directory, script=SCRIPT)
    assert_one_line(
        run_in_process(cluster, *words, file['script'], '--ssh-key', file['other']),
        5,
        'exists, but was requested with other ssh keys',
    )
    other_words = ['web2' if word == 'web1' else word for word in words]
    assert_one_line(
        run_in_process(cluster, *other_words, file['script']), 5, 'exists, but was requested with the name web1'
    )
    if read_record(cluster, first[1]) is None:
        assert read_lasting_keys(cluster).keys() >= before.keys()
    wait_address(cluster, first[1])
    assert list(read_allocations(cluster)) == [first[1]]


def test_failed_instance_keeps_its_name_until_it_is_reused(cluster: Control, compute: Ecompute) -> None:
    # The claim differs from the request, so the compute refuses to build.
    compute.pause()
    failed = place(cluster, SMALL_QUERY, '--name', 'web1')[1]
    cluster.placement.call('DELETE', f'/allocations/{failed}')
    compute.resume()
    wait_state(cluster, failed, 'error')
    assert_one_line(cluster.eschedule('web1'), 1, 'web1: failed at stage scheduled')
    name = read_lasting_keys(cluster)['/names/web1']
    assert name.lease == read_lasting_keys(cluster)[f'/instances/{compute.uuid}/{failed}'].lease != 0
    second = place(cluster, SMALL_QUERY, '--name', 'web1')[1]
    address = wait_address(cluster, second)
    assert cluster.eschedule('web1').stdout == f'{address}\n'
    assert_one_line(cluster.eschedule('destroy', failed), 0, 'its record is removed')
    assert cluster.eschedule('web1').stdout == f'{address}\n'


def test_destroy_before_the_build_frees_the_name_only_when_done(cluster: Control, compute: Ecompute) -> None:
    compute.pause()
    instance = place(cluster, SMALL_QUERY, '--name', 'web1')[1]
    assert_one_line(cluster.eschedule('destroy', 'web1'), 0, 'web1: destroy accepted')
    refused = cluster.eschedule(SMALL_QUERY, '--name', 'web1')
    assert_one_line(refused, 5, f'name taken by instance {instance}, which is being destroyed')
    compute.resume()
    wait_until(lambda: cluster.etcd.get('/names/web1') is None, 20, 'its name is free')


def test_forgotten_compute_frees_its_names(cluster: Control) -> None:
    compute = cluster.ecompute()
    boot(cluster, SMALL_QUERY, '--name', 'web1')
    compute.kill()
    cluster.etcd.delete(f'/computes/{compute.uuid}')  # its lease would expire in half a minute
    assert_one_line(cluster.eschedule('destroy', 'web1'), 0, 'once this compute is no longer silent')
    assert cluster.eschedule('host', 'forget', '--fenced', compute.uuid).code == 0
    assert cluster.etcd.list_keys('/names/') == []


@pytest.mark.parametrize(
    ('option', 'content', 'says'),
    [
        ('--user-data', b'#' * 262145, 'has 262145 bytes; the limit is 262144 (256 KiB)'),
        ('--user-data', b'#!/bin/sh\n\xff\xfe canary', 'line 2: is neither text in UTF-8 nor gzip'),
        ('--ssh-key', f'{KEY}\n-----BEGIN OPENSSH PRIVATE KEY-----\ncanary\n'.encode(), 'line 2: is a private key'),
        ('--ssh-key', b'canary', 'line 1: is not an OpenSSH public key'),
        ('--ssh-key', KEY[:40].encode(), 'line 1: is only a part of a public key'),
        ('--ssh-key', (KEY + '\n').encode() * 400, 'the limit is 32768 (32 KiB)'),
    ],
)
def test_invalid_key_and_user_data_files_are_refused(cluster: Control, option: str, content: bytes, says: str) -> None:
    file = write_files(cluster.directory, given=content)['given']
    message = assert_one_line(run_in_process(cluster, SMALL_QUERY, option, file), 2, file, says)
    assert 'canary' not in message
    assert KEY.split()[1][:20] not in message
    assert read_lasting_keys(cluster) == {}


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


def test_unrecognised_user_data_is_delivered_with_a_warning(cluster: Control, compute: Ecompute) -> None:
    file = write_files(cluster.directory, data='packages: [canary]\n')
    done = cluster.eschedule(SMALL_QUERY, '--user-data', file['data'])
    _, instance = parse_notice(done)
    message = assert_one_line(done, 0, file['data'], 'does not begin with #cloud-config')
    assert 'canary' not in message
    wait_address(cluster, instance)
    assert read_guest_data(compute)[instance]['user_data'] == 'packages: [canary]\n'


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
