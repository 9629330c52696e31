"""Log in to a guest with real ssh: an sshd in a network namespace, with a fake record."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from ecomp.cli.terminal import make_timestamp
from ecomp.model import keys
from ecomp.model.host import StoredHostname
from ecomp.model.order import NameOwner, Request
from ecomp.model.record import Interface, Record
from ecomp.model.states import ACTIVE, BUILDING, STAGES, STOPPED
from ecomp.model.stored import encode
from ecomp.model.user_data import GuestFailure
from tests.functional.cloud import IMAGE, make_uuid
from tests.kit.commands import Command, Result, write_config
from tests.kit.lab import make_lab_name
from tests.kit.servers import TOP, Etcd, make_environment, wait_until

SSHD = shutil.which('sshd', path='/usr/sbin:/usr/local/sbin:/usr/bin')
ADDRESS = '10.66.0.2'
UNADDRESSED = (Interface('default', '52:54:00:00:00:01'),)

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or SSHD is None, reason='sshd in a namespace: root, openssh-server')


@dataclass
class SshGuest:
    etcd: Etcd
    home: Path
    config: Path
    space: str
    record: Record
    private: Path
    sshd: subprocess.Popen[bytes] | None = None

    def make_key(self, name: str) -> str:
        path = self.home / name
        subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', path], check=True, timeout=60)
        return ' '.join(path.with_suffix('.pub').read_text().split()[:2])

    def start_sshd(self, name: str) -> None:
        self.close()
        log = self.home / f'sshd-{name}.log'
        settings = {
            'ListenAddress': ADDRESS, 'HostKey': self.home / name,
            'AuthorizedKeysFile': self.private.with_suffix('.pub'), 'StrictModes': 'no',
            'UsePAM': 'no', 'PermitRootLogin': 'yes', 'PidFile': 'none',
        }  # fmt: skip
        conf = self.home / 'sshd_config'
        conf.write_text(''.join(f'{name} {value}\n' for name, value in settings.items()))
        Path('/run/sshd').mkdir(exist_ok=True)
        command = ['ip', 'netns', 'exec', self.space, str(SSHD), '-D', '-e', '-f', str(conf)]
        with log.open('wb') as stderr:
            self.sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=stderr)
        wait_until(lambda: 'Server listening' in log.read_text(), 30, 'sshd listens')

    def write_record(self, record: Record) -> None:
        self.etcd.put_record(encode(record))

    def run_eschedule(self, *words: str) -> Result:
        """Run eschedule in its own process, because it becomes another program."""
        command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(self.config), *words]
        with Command(command, TOP, {'HOME': str(self.home)}) as process:
            return process.wait(60)

    def run_ssh(self, *words: str) -> Result:
        return self.run_eschedule('ssh', self.record.instance, '-i', str(self.private), *words)

    def close(self) -> None:
        if self.sshd is not None:
            self.sshd.terminate()
            self.sshd.wait(20)


@pytest.fixture
def guest(etcd: Etcd, tmp_path: Path) -> Iterator[SshGuest]:
    namespace, instance, compute = make_lab_name('enter'), make_uuid(), make_uuid()
    for command in (['netns', 'add', namespace], ['-n', namespace, 'link', 'set', 'lo', 'up'],
                    ['-n', namespace, 'address', 'add', f'{ADDRESS}/32', 'dev', 'lo']):  # fmt: skip
        subprocess.run(['ip', *command], check=True, timeout=60)
    console = tmp_path / f'state/console/{instance}.log'
    console.parent.mkdir(parents=True)
    reach = f'ip netns exec {namespace} env REACHED={{host}}'
    # eschedule's ssh runs as root here, as the guest's sshd does.
    config = write_config(tmp_path / 'schedule.yaml', etcd.endpoint, 'http://127.0.0.1:1', reach=reach, ssh_user='root')
    record = Record(
        instance, compute, ACTIVE, image=IMAGE, console=f'hv1:{console}',
        addresses=(Interface('default', '52:54:00:00:00:01', ADDRESS, 'lease'),),
        stages={'requested': 't', 'started': 't', 'addressed': 't'},
    )  # fmt: skip
    etcd.put(keys.compute(compute), '{}', etcd.grant())
    etcd.put(keys.request(compute, instance), encode(Request(instance, {}, image=IMAGE)))
    ssh_guest = SshGuest(etcd, tmp_path, config, namespace, record, tmp_path / 'id')
    try:
        ssh_guest.make_key('id')
        ssh_guest.write_record(record)
        yield ssh_guest
    finally:
        ssh_guest.close()
        etcd.delete(keys.compute(compute))
        subprocess.run(['ip', 'netns', 'del', namespace], check=True, timeout=60)


def test_reported_host_key_is_trusted_and_another_is_refused(guest: SshGuest) -> None:
    pinned = guest.make_key('host')
    guest.write_record(replace(guest.record, host_keys=(pinned,)))
    guest.start_sshd('host')
    result = guest.run_ssh('--', 'echo $SSH_CONNECTION; exit 7')
    assert (result.code, result.stdout.split()[2:], result.stderr) == (7, [ADDRESS, '22'], '')
    assert guest.run_ssh('--', 'printf', '%s|', 'a  b', '$HOME', "it's").stdout == "a  b|$HOME|it's|"
    # With a user's name, and with plain ssh and the output of --print-config.
    other_user = guest.run_eschedule(
        'ssh', f'nobody-here@{guest.record.instance}', '-i', str(guest.private), '--', 'true'
    )
    assert (other_user.code, 'nobody-here@' in other_user.stderr) == (255, True)
    lines = guest.run_eschedule('ssh', '--print-config').stdout
    assert f'Host {guest.record.instance}\n    HostName {ADDRESS}\n    User root\n' in lines
    (guest.home / 'ssh_config').write_text(lines)
    ssh = ['ssh', '-F', guest.home / 'ssh_config', '-i', guest.private, guest.record.instance, 'echo in']
    manual = subprocess.run(ssh, env=make_environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (manual.returncode, manual.stdout) == (0, b'in\n'), manual
    # Another machine answers at its address.
    guest.make_key('another')
    guest.start_sshd('another')
    for words in ((), ('--accept-new',)):
        failed_login = guest.run_ssh(*words, '--', 'echo in')
        assert (failed_login.code, failed_login.stdout) == (255, '')
        assert 'Host key verification failed' in failed_login.stderr
    assert subprocess.run(ssh, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 255


def test_concurrent_commands_write_known_hosts_atomically(guest: SshGuest) -> None:
    """Each process writes the same known_hosts file, which ssh may be reading."""
    guest.write_record(replace(guest.record, host_keys=(guest.make_key('host'),)))
    known_hosts = guest.home / '.cache/ecomp/known_hosts' / guest.record.instance
    for _ in range(4):
        known_hosts.unlink(missing_ok=True)
        with ThreadPoolExecutor(4) as threads:
            results = list(threads.map(lambda _: guest.run_eschedule('ssh', '--print-config'), range(4)))
        # stderr may say that instances of other tests are left out.
        assert [item for item in results if item.code != 0 or 'failed' in item.stderr] == []
        assert known_hosts.read_text().count('\n') == 1
        before = known_hosts.stat().st_ino
        assert guest.run_eschedule('ssh', '--print-config').code == 0
        assert known_hosts.stat().st_ino == before, 'it is there already'
    assert [item.name for item in known_hosts.parent.iterdir() if not keys.is_uuid(item.name)] == []


def test_guest_without_reported_key_needs_accept_new(guest: SshGuest) -> None:
    guest.make_key('host')
    guest.start_sshd('host')
    guest.write_record(replace(guest.record, stages={**guest.record.stages, 'ready': 't'}))
    result = guest.run_ssh('--', 'true')
    reason = 'the guest has not reported its host keys, so ssh cannot verify the guest'
    fix = 'Fix: give --accept-new, which accepts the first key that the guest shows'
    assert result == (1, '', f'eschedule: {guest.record.instance}: {reason}. {fix}\n')
    assert guest.run_eschedule('ssh', '--print-config', guest.record.instance).code == 1
    all_guests = guest.run_eschedule('ssh', '--print-config')
    assert (all_guests.code, guest.record.instance in all_guests.stdout) == (0, False)
    assert 'no entries for these guests, because their host keys are unknown: ' in all_guests.stderr
    assert guest.run_ssh('--accept-new', '--', 'true').code == 0
    assert guest.run_ssh('--', 'true').code == 0, 'from then on it is known'
    guest.make_key('another')
    guest.start_sshd('another')
    assert guest.run_ssh('--', 'true').code == 255
    assert guest.run_ssh('--accept-new', '--', 'true').code == 255
    guest.write_record(replace(guest.record, stages={**guest.record.stages, 'ready': 't'}, rebuilt='1606754775'))
    assert guest.run_ssh('--', 'true').code == 1, 'the key that was accepted is of the guest before the rebuild'
    assert guest.run_ssh('--accept-new', '--', 'true').code == 0


@pytest.mark.parametrize('words', [['ssh'], ['ssh', '--print-config']])
@pytest.mark.parametrize(
    ('changed', 'lacks'),
    [
        ({}, 'not ready yet: active, waiting for cloud-init to finish'),
        ({'addresses': UNADDRESSED, 'stages': dict.fromkeys(STAGES[:-2], 't')}, 'no address yet: active, waiting for '
         'its DHCP lease'),
        ({'state': BUILDING, 'addresses': UNADDRESSED, 'stages': dict.fromkeys(STAGES[:2], 't')}, 'not started yet: '
         'building, waiting for its image'),
    ],
)  # fmt: skip
def test_booting_guest_is_refused_with_advice_to_wait(
    guest: SshGuest, words: list[str], changed: dict[str, Any], lacks: str
) -> None:
    instance = guest.record.instance
    guest.write_record(
        replace(guest.record, **{'stages': {**dict.fromkeys(STAGES[:-1], 't'), 'started': make_timestamp()}, **changed})
    )
    result = guest.run_eschedule(*words, instance)
    hint = f'Try: eschedule wait {instance} --for ready'
    assert result == (6, '', f'eschedule: {instance}: {lacks}. {hint}\n')


@pytest.mark.parametrize(
    'changed',
    [
        {'cloud_init': GuestFailure('final', 'no key could be made')},
        {'stages': {'requested': 't', 'started': '2026-01-31T12:00:00.000Z', 'addressed': 't'}},
    ],
)
def test_guest_that_cannot_report_a_key_is_advised_accept_new(guest: SshGuest, changed: dict[str, Any]) -> None:
    guest.write_record(
        replace(guest.record, **{'stages': {**guest.record.stages, 'started': make_timestamp()}, **changed})
    )
    result = guest.run_ssh('--', 'true')
    assert result.code == 1
    assert 'give --accept-new' in result.stderr


def test_ssh_config_uses_a_name_only_for_its_owner(guest: SshGuest) -> None:
    """A compromised compute can write any name into the records of its own instances."""
    instance, other, name = guest.record.instance, make_uuid(), f'web-{make_uuid()[:8]}'
    forged = replace(guest.record, instance=other, compute=make_uuid(), name=name, host_keys=(guest.make_key('other'),))
    for record in (replace(guest.record, name=name, host_keys=(guest.make_key('host'),)), forged):
        request = encode(Request(record.instance, {}, image=IMAGE))
        guest.etcd.put(keys.request(record.compute, record.instance), request)
        guest.write_record(record)
    guest.etcd.put(keys.name(name), encode(NameOwner(instance)))
    printed = guest.run_eschedule('ssh', '--print-config').stdout
    hosts = {line for line in printed.splitlines() if line.startswith('Host ')}
    assert {f'Host {name}', f'Host {other}'} <= hosts
    assert f'Host {instance}' not in hosts
    assert guest.run_eschedule('ssh', '--print-config', name).stdout.startswith(f'Host {name}\n')
    assert guest.run_eschedule('ssh', '--print-config', other).stdout.startswith(f'Host {other}\n')
    # The uuid of another instance is not accepted as a name.
    guest.write_record(replace(forged, name=instance))
    guest.etcd.put(keys.name(instance), encode(NameOwner(other)))
    assert guest.run_eschedule('ssh', '--print-config', other).stdout.startswith(f'Host {other}\n')


def test_ssh_config_does_not_use_a_guest_name_that_is_a_host_name(guest: SshGuest) -> None:
    """Otherwise ssh to that host would loop through itself, for each guest there."""
    instance, name = guest.record.instance, f'hv-{make_uuid()[:8]}'
    guest.write_record(replace(guest.record, name=name, host_keys=(guest.make_key('host'),)))
    guest.etcd.put(keys.name(name), encode(NameOwner(instance)))
    assert guest.run_eschedule('ssh', '--print-config', instance).stdout.startswith(f'Host {name}\n')
    other = make_uuid()
    guest.etcd.put(keys.hostname(other), encode(StoredHostname(name)))
    try:
        assert guest.run_eschedule('ssh', '--print-config', name).stdout.startswith(f'Host {instance}\n')
    finally:
        guest.etcd.delete(keys.hostname(other))
    # The guest's own host, whose name is not in etcd.
    guest.write_record(replace(guest.record, name=name, console=f'{name}:/x', host_keys=(guest.make_key('another'),)))
    assert guest.run_eschedule('ssh', '--print-config', name).stdout.startswith(f'Host {instance}\n')


@pytest.mark.parametrize('name', ['localhost', 'ip6-localhost', socket.gethostname().partition('.')[0].lower()])
def test_ssh_config_does_not_use_names_of_the_local_machine(guest: SshGuest, name: str) -> None:
    instance = guest.record.instance
    guest.write_record(replace(guest.record, name=name, host_keys=(guest.make_key('host'),)))
    guest.etcd.put(keys.name(name), encode(NameOwner(instance)))
    assert guest.run_eschedule('ssh', '--print-config', name).stdout.startswith(f'Host {instance}\n')


def test_guest_on_a_bridge_is_reached_directly(guest: SshGuest) -> None:
    bridged = guest.record.addresses[0]._replace(source='arp', address='127.0.0.1')
    guest.write_record(
        replace(guest.record, host_keys=(guest.make_key('host'),), addresses=(*guest.record.addresses, bridged))
    )
    lines = guest.run_eschedule('ssh', '--print-config', guest.record.instance).stdout
    assert 'HostName 127.0.0.1\n' in lines
    assert 'ProxyCommand none\n' in lines


@pytest.mark.parametrize(
    ('changes', 'code', 'said'),
    [
        ({'state': STOPPED}, 5, 'is stopped'),
        ({'addresses': ()}, 6, 'no address yet'),
        (
            {'addresses': (Interface('default', 'x', '-oProxyCommand=id', 'lease'),)},
            1,
            'the address in its record is malformed',
        ),
        ({'console': '-oProxyCommand=id:/x'}, 1, 'the name of its host is unknown'),
    ],
)
def test_unusable_record_is_refused(guest: SshGuest, changes: dict[str, object], code: int, said: str) -> None:
    guest.write_record(replace(guest.record, host_keys=(guest.make_key('host'),), **changes))  # type: ignore[arg-type]
    result = guest.run_ssh('--', 'true')
    assert (result.code, result.stdout, result.stderr.count('\n')) == (code, '', 1)
    assert said in result.stderr


def test_log_prints_and_follows_the_console_file(guest: SshGuest) -> None:
    file = Path((guest.record.console or '').partition(':')[2])
    instance = guest.record.instance
    assert guest.run_eschedule('log', instance) == (
        4,
        '',
        f'eschedule: {instance}: its console log on hv1 does not exist yet\n',
    )
    Path(f'{file}.0').write_text('first\n')
    file.write_bytes(b'\x1b[0;32m  OK  \x1b[0m sshd\r\nlogin: \x9b\x07\xe2\x80\xae')
    result = guest.run_eschedule('log', instance)
    assert (result.code, result.stdout) == (0, 'first\n  OK   sshd\nlogin: \ufffd\\x07\\u202e\n')
    assert guest.run_eschedule('log', instance, '-n', '2').stdout == '  OK   sshd\nlogin: \ufffd\\x07\\u202e\n'
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(guest.config), 'log', instance, '-f', '-n', '1']
    with Command(command, TOP) as process:
        with file.open('ab', buffering=0) as console:
            console.write(b'\n')
            wait_until(lambda: 'login: ' in process.stdout, 30, 'the last line')
            console.write(b'Welcome\n')
            wait_until(lambda: process.stdout.endswith('Welcome\n'), 30, 'what comes')
        process.send_signal(signal.SIGINT)
        end_result = process.wait(30)
    assert (end_result.code, end_result.stderr) == (0, '')
    guest.write_record(replace(guest.record, console='hv1:/etc/shadow'))
    assert guest.run_eschedule('log', instance).stderr.endswith('its record names a file that is not its console\n')
    guest.write_record(replace(guest.record, console=None))
    assert guest.run_eschedule('log', instance).code == guest.run_eschedule('console', instance).code == 4


def test_console_runs_virsh_on_the_guests_host(guest: SshGuest) -> None:
    bin = guest.home / 'bin'
    bin.mkdir()
    (bin / 'virsh').write_text('#!/bin/sh\necho "$REACHED: $*"\n')
    (bin / 'virsh').chmod(0o755)
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(guest.config), 'console', guest.record.instance]
    with Command(command, TOP, {'PATH': f'{bin}:{os.environ["PATH"]}'}) as process:
        result = process.wait(60)
    assert (result.code, result.stdout) == (0, f'hv1: -c qemu:///system console {guest.record.instance}\n')


def test_wait_that_times_out_prints_the_last_console_lines(guest: SshGuest) -> None:
    file, instance = Path((guest.record.console or '').partition(':')[2]), guest.record.instance
    file.write_text(''.join(f'line {number}\r\n' for number in range(9)))
    result = guest.run_eschedule('wait', instance, '--for', 'ready', '--timeout', '0')
    assert result.code == 6
    lines = [line.removeprefix('eschedule: ') for line in result.stderr.splitlines()]
    assert lines[:-1] == [f'console of {instance}: line {number}' for number in range(4, 9)]
    for reach in ('sh -c "sleep 600 & sleep 600" {host}', 'no-such-program {host}', 'false {host}'):
        write_config(guest.config, guest.etcd.endpoint, 'http://127.0.0.1:1', reach=reach)
        result = guest.run_eschedule('wait', instance, '--for', 'ready', '--timeout', '0')
        assert (result.code, result.stderr.count('\n')) == (6, 1)
