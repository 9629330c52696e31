"""Into a guest by real ssh: a real sshd in a network namespace is the guest, and only its record says it is one."""

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

from ecomp.cli.command import Context, Invocation
from ecomp.cli.enter import why_not_entered
from ecomp.cli.options import Options
from ecomp.cli.terminal import now
from ecomp.conf import load_schedule
from ecomp.errors import StillGoing
from ecomp.model import keys
from ecomp.model import order as requests
from ecomp.model.guest import GuestFailure
from ecomp.model.host import to_json as hostname_to_json
from ecomp.model.order import Request
from ecomp.model.record import ACTIVE, BUILDING, STAGES, STOPPED, Interface, Record, to_json
from ecomp.schedule import terminal
from tests.functional.cloud import IMAGE, new
from tests.kit.commands import Command, Result, write_config
from tests.kit.servers import TOP, Etcd, environment, until

SSHD = shutil.which('sshd', path='/usr/sbin:/usr/local/sbin:/usr/bin')
ADDRESS = '10.66.0.2'
UNADDRESSED = (Interface('default', '52:54:00:00:00:01'),)

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or SSHD is None, reason='sshd in a namespace: root, openssh-server')


@dataclass
class Guest:
    """A record, the sshd that it leads to, and eschedule beside them."""

    etcd: Etcd
    home: Path
    config: Path
    space: str
    record: Record
    private: Path
    sshd: subprocess.Popen[bytes] | None = None

    def key(self, name: str) -> str:
        """Make a host key; what is public of it."""
        path = self.home / name
        subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f', path], check=True, timeout=60)
        return ' '.join(path.with_suffix('.pub').read_text().split()[:2])

    def answer_with(self, name: str) -> None:
        """Start sshd with this host key, in place of the one that runs."""
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
        until(lambda: 'Server listening' in log.read_text(), 30, 'sshd listens')

    def write(self, record: Record) -> None:
        """Put the record where its compute would."""
        self.etcd.put_record(to_json(record))

    def eschedule(self, *words: str) -> Result:
        """eschedule, a process of its own: it becomes another program."""
        command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(self.config), *words]
        with Command(command, TOP, {'HOME': str(self.home)}) as under_way:
            return under_way.end(60)

    def ssh(self, *words: str) -> Result:
        """`eschedule ssh` with the key that opens the guest."""
        return self.eschedule('ssh', self.record.instance, '-i', str(self.private), *words)

    def close(self) -> None:
        """End sshd."""
        if self.sshd is not None:
            self.sshd.terminate()
            self.sshd.wait(20)


@pytest.fixture
def guest(etcd: Etcd, tmp_path: Path) -> Iterator[Guest]:
    space, instance, compute = f'tenter{os.getpid()}', new(), new()
    for command in (['netns', 'add', space], ['-n', space, 'link', 'set', 'lo', 'up'],
                    ['-n', space, 'address', 'add', f'{ADDRESS}/32', 'dev', 'lo']):  # fmt: skip
        subprocess.run(['ip', *command], check=True, timeout=60)
    console = tmp_path / f'state/console/{instance}.log'
    console.parent.mkdir(parents=True)
    reach = f'ip netns exec {space} env REACHED={{host}}'
    # eschedule's ssh is root's here, as its guest's sshd is.
    config = write_config(tmp_path / 'schedule.yaml', etcd.endpoint, 'http://127.0.0.1:1', reach=reach, ssh_user='root')
    record = Record(
        instance, compute, ACTIVE, image=IMAGE, console=f'hv1:{console}',
        addresses=(Interface('default', '52:54:00:00:00:01', ADDRESS, 'lease'),),
        stages={'requested': 't', 'started': 't', 'addressed': 't'},
    )  # fmt: skip
    etcd.put(keys.request(compute, instance), requests.to_json(Request(instance, {}, image=IMAGE)))
    made = Guest(etcd, tmp_path, config, space, record, tmp_path / 'id')
    try:
        made.key('id')
        made.write(record)
        yield made
    finally:
        made.close()
        subprocess.run(['ip', 'netns', 'del', space], check=True, timeout=60)


def test_the_key_it_said_is_believed_and_another_is_refused(guest: Guest) -> None:
    pinned = guest.key('host')
    guest.write(replace(guest.record, host_keys=(pinned,)))
    guest.answer_with('host')
    done = guest.ssh('--', 'echo $SSH_CONNECTION; exit 7')
    assert (done.code, done.stdout.split()[2:], done.stderr) == (7, [ADDRESS, '22'], '')
    assert guest.ssh('--', 'printf', '%s|', 'a  b', '$HOME', "it's").stdout == "a  b|$HOME|it's|"
    # By the name of a user, and by what ssh itself reads.
    other = guest.eschedule('ssh', f'nobody-here@{guest.record.instance}', '-i', str(guest.private), '--', 'true')
    assert (other.code, 'nobody-here@' in other.stderr) == (255, True)
    lines = guest.eschedule('ssh-config').stdout
    assert f'Host {guest.record.instance}\n    HostName {ADDRESS}\n    User root\n' in lines
    (guest.home / 'ssh_config').write_text(lines)
    ssh = ['ssh', '-F', guest.home / 'ssh_config', '-i', guest.private, guest.record.instance, 'echo in']
    by_hand = subprocess.run(ssh, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, timeout=60)
    assert (by_hand.returncode, by_hand.stdout) == (0, b'in\n'), by_hand
    # Somebody else answers at its address, on the way there.
    guest.key('another')
    guest.answer_with('another')
    for words in ((), ('--accept-new',)):
        refused = guest.ssh(*words, '--', 'echo in')
        assert (refused.code, refused.stdout) == (255, '')
        assert 'Host key verification failed' in refused.stderr
    assert subprocess.run(ssh, stdin=subprocess.DEVNULL, capture_output=True, timeout=60).returncode == 255


def test_several_at_once_enter_it_by_the_keys_it_said(guest: Guest) -> None:
    """Each writes the same file of host keys; ssh may be reading it."""
    guest.write(replace(guest.record, host_keys=(guest.key('host'),)))
    known = guest.home / '.cache/ecomp/known_hosts' / guest.record.instance
    for _ in range(4):
        known.unlink(missing_ok=True)
        with ThreadPoolExecutor(4) as threads:
            done = list(threads.map(lambda _: guest.eschedule('ssh-config'), range(4)))
        # Of instances of other tests it may say that they are left out.
        assert [each for each in done if each.code != 0 or 'failed' in each.stderr] == []
        assert known.read_text().count('\n') == 1
        before = known.stat().st_ino
        assert guest.eschedule('ssh-config').code == 0
        assert known.stat().st_ino == before, 'it is there already'
    assert [each.name for each in known.parent.iterdir() if not keys.is_uuid(each.name)] == []


def test_a_canary_is_entered_by_the_key_it_said_alone_and_nothing_of_that_is_kept(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('HOME', str(guest.home))
    guest.write(replace(guest.record, host_keys=(guest.key('host'),)))
    asked = Options(identity=str(guest.private))
    do = Context(terminal(), load_schedule(guest.config), Invocation('doctor', (), asked))
    ticks: list[int] = []
    guest.answer_with('host')
    assert why_not_entered(do, guest.record.instance, lambda: ticks.append(1)) == ''
    assert ticks
    guest.key('another')
    guest.answer_with('another')
    refused = why_not_entered(do, guest.record.instance, lambda: None)
    assert refused == 'ssh ended with 255: Host key verification failed.'
    assert list((guest.home / '.cache/ecomp/known_hosts').iterdir()) == []

    def end() -> None:
        raise StillGoing('enough')

    with pytest.raises(StillGoing):
        why_not_entered(do, guest.record.instance, end)
    do.close()


def test_one_that_never_said_it_is_entered_on_the_users_own_word(guest: Guest) -> None:
    guest.key('host')
    guest.answer_with('host')
    guest.write(replace(guest.record, stages={**guest.record.stages, 'ready': 't'}))
    refused = guest.ssh('--', 'true')
    why = 'its guest has not reported its host keys, so it is unverified'
    cure = 'Fix: --accept-new accepts the key that it shows first'
    assert refused == (1, '', f'eschedule: {guest.record.instance}: {why}. {cure}\n')
    assert guest.eschedule('ssh-config', guest.record.instance).code == 1
    all_of_them = guest.eschedule('ssh-config')
    assert (all_of_them.code, guest.record.instance in all_of_them.stdout) == (0, False)
    assert 'left out, for what host keys they have is not known: ' in all_of_them.stderr
    assert guest.ssh('--accept-new', '--', 'true').code == 0
    assert guest.ssh('--', 'true').code == 0, 'from then on it is known'
    guest.key('another')
    guest.answer_with('another')
    assert guest.ssh('--', 'true').code == 255
    assert guest.ssh('--accept-new', '--', 'true').code == 255


@pytest.mark.parametrize('words', [['ssh'], ['ssh-config']])
@pytest.mark.parametrize(
    ('changed', 'lacks'),
    [
        ({}, 'not ready yet: active, waiting for: cloud-init to finish'),
        ({'addresses': UNADDRESSED, 'stages': dict.fromkeys(STAGES[:-2], 't')}, 'no address yet: active, waiting for: '
         'DHCP lease'),
        ({'state': BUILDING, 'addresses': UNADDRESSED, 'stages': dict.fromkeys(STAGES[:2], 't')}, 'not started yet: '
         'building, waiting for: its image'),
    ],
)  # fmt: skip
def test_a_guest_that_boots_is_waited_for_and_no_unknown_key_is_advised(
    guest: Guest, words: list[str], changed: dict[str, Any], lacks: str
) -> None:
    instance = guest.record.instance
    guest.write(replace(guest.record, **{'stages': {**dict.fromkeys(STAGES[:-1], 't'), 'started': now()}, **changed}))
    refused = guest.eschedule(*words, instance)
    cure = f'Try: eschedule wait {instance} --for ready'
    assert refused == (6, '', f'eschedule: {instance}: {lacks}. {cure}\n')


@pytest.mark.parametrize(
    'changed',
    [
        {'cloud_init': GuestFailure('final', 'no key could be made')},
        {'stages': {'requested': 't', 'started': '2026-01-31T12:00:00.000Z', 'addressed': 't'}},
    ],
)
def test_a_guest_that_will_report_no_key_is_entered_by_the_first_it_shows(
    guest: Guest, changed: dict[str, Any]
) -> None:
    guest.write(replace(guest.record, **{'stages': {**guest.record.stages, 'started': now()}, **changed}))
    refused = guest.ssh('--', 'true')
    assert refused.code == 1
    assert 'Fix: --accept-new' in refused.stderr


def test_ssh_reads_a_name_of_the_instance_alone_that_has_it(guest: Guest) -> None:
    """A compute that is taken over writes what it likes into the records of its own instances."""
    instance, other, name = guest.record.instance, new(), f'web-{new()[:8]}'
    theirs = replace(guest.record, instance=other, compute=new(), name=name, host_keys=(guest.key('other'),))
    for each in (replace(guest.record, name=name, host_keys=(guest.key('host'),)), theirs):
        asked = requests.to_json(Request(each.instance, {}, image=IMAGE))
        guest.etcd.put(keys.request(each.compute, each.instance), asked)
        guest.write(each)
    guest.etcd.put(keys.name(name), requests.name_to_json(instance))
    hosts = {line for line in guest.eschedule('ssh-config').stdout.splitlines() if line.startswith('Host ')}
    assert {f'Host {name}', f'Host {other}'} <= hosts
    assert f'Host {instance}' not in hosts
    assert guest.eschedule('ssh-config', name).stdout.startswith(f'Host {name}\n')
    assert guest.eschedule('ssh-config', other).stdout.startswith(f'Host {other}\n')
    # Another's uuid is no name, though it stands there.
    guest.write(replace(theirs, name=instance))
    guest.etcd.put(keys.name(instance), requests.name_to_json(other))
    assert guest.eschedule('ssh-config', other).stdout.startswith(f'Host {other}\n')


def test_a_guest_of_a_host_s_name_does_not_take_it_from_the_host(guest: Guest) -> None:
    """ssh would go to that host by itself, without end, for this guest and for each other one there."""
    instance, name = guest.record.instance, f'hv-{new()[:8]}'
    guest.write(replace(guest.record, name=name, host_keys=(guest.key('host'),)))
    guest.etcd.put(keys.name(name), requests.name_to_json(instance))
    assert guest.eschedule('ssh-config', instance).stdout.startswith(f'Host {name}\n')
    other = new()
    guest.etcd.put(keys.hostname(other), hostname_to_json(name))
    try:
        assert guest.eschedule('ssh-config', name).stdout.startswith(f'Host {instance}\n')
    finally:
        guest.etcd.delete(keys.hostname(other))
    # Its own host, which etcd has forgotten.
    guest.write(replace(guest.record, name=name, console=f'{name}:/x', host_keys=(guest.key('another'),)))
    assert guest.eschedule('ssh-config', name).stdout.startswith(f'Host {instance}\n')


@pytest.mark.parametrize('name', ['localhost', 'ip6-localhost', socket.gethostname().partition('.')[0].lower()])
def test_a_guest_does_not_take_a_name_of_the_machine_one_sits_at(guest: Guest, name: str) -> None:
    instance = guest.record.instance
    guest.write(replace(guest.record, name=name, host_keys=(guest.key('host'),)))
    guest.etcd.put(keys.name(name), requests.name_to_json(instance))
    assert guest.eschedule('ssh-config', name).stdout.startswith(f'Host {instance}\n')


def test_on_a_bridge_it_is_reached_directly(guest: Guest) -> None:
    seen = replace(guest.record.addresses[0], source='arp', address='127.0.0.1')
    guest.write(replace(guest.record, host_keys=(guest.key('host'),), addresses=(*guest.record.addresses, seen)))
    lines = guest.eschedule('ssh-config', guest.record.instance).stdout
    assert 'HostName 127.0.0.1\n' in lines
    assert 'ProxyCommand none\n' in lines


@pytest.mark.parametrize(
    ('changes', 'code', 'said'),
    [
        ({'state': STOPPED}, 5, 'is stopped'),
        ({'addresses': ()}, 6, 'no address yet'),
        ({'addresses': (Interface('default', 'x', '-oProxyCommand=id', 'lease'),)}, 1, 'no address that is one'),
        ({'console': '-oProxyCommand=id:/x'}, 1, 'the name of its host is not known'),
    ],
)
def test_what_a_record_says_is_looked_at(guest: Guest, changes: dict[str, object], code: int, said: str) -> None:
    guest.write(replace(guest.record, host_keys=(guest.key('host'),), **changes))  # type: ignore[arg-type]
    done = guest.ssh('--', 'true')
    assert (done.code, done.stdout, done.stderr.count('\n')) == (code, '', 1)
    assert said in done.stderr


def test_the_console_is_read_where_it_is(guest: Guest) -> None:
    file = Path((guest.record.console or '').partition(':')[2])
    instance = guest.record.instance
    assert guest.eschedule('log', instance) == (4, '', f'eschedule: {instance}: its console on hv1 has nothing yet\n')
    Path(f'{file}.0').write_text('first\n')
    file.write_bytes(b'\x1b[0;32m  OK  \x1b[0m sshd\r\nlogin: \x9b\x07\xe2\x80\xae')
    done = guest.eschedule('log', instance)
    assert (done.code, done.stdout) == (0, 'first\n  OK   sshd\nlogin: \ufffd\\x07\\u202e\n')
    assert guest.eschedule('log', instance, '-n', '2').stdout == '  OK   sshd\nlogin: \ufffd\\x07\\u202e\n'
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(guest.config), 'log', instance, '-f', '-n', '1']
    with Command(command, TOP) as following:
        with file.open('ab', buffering=0) as more:
            more.write(b'\n')
            until(lambda: 'login: ' in following.stdout, 30, 'the last line')
            more.write(b'Welcome\n')
            until(lambda: following.stdout.endswith('Welcome\n'), 30, 'what comes')
        following.send(signal.SIGINT)
        ended = following.end(30)
    assert (ended.code, ended.stderr) == (0, '')
    guest.write(replace(guest.record, console='hv1:/etc/shadow'))
    assert guest.eschedule('log', instance).stderr.endswith('its record names another file than its console\n')
    guest.write(replace(guest.record, console=None))
    assert guest.eschedule('log', instance).code == guest.eschedule('console', instance).code == 4


def test_a_console_is_virshs_on_its_host(guest: Guest) -> None:
    bin = guest.home / 'bin'
    bin.mkdir()
    (bin / 'virsh').write_text('#!/bin/sh\necho "$REACHED: $*"\n')
    (bin / 'virsh').chmod(0o755)
    command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(guest.config), 'console', guest.record.instance]
    with Command(command, TOP, {'PATH': f'{bin}:{os.environ["PATH"]}'}) as under_way:
        done = under_way.end(60)
    assert (done.code, done.stdout) == (0, f'hv1: -c qemu:///system console {guest.record.instance}\n')


def test_a_wait_whose_time_is_up_says_the_consoles_last_lines_and_never_hangs(guest: Guest) -> None:
    file, instance = Path((guest.record.console or '').partition(':')[2]), guest.record.instance
    file.write_text(''.join(f'line {number}\r\n' for number in range(9)))
    done = guest.eschedule('wait', instance, '--for', 'ready', '--timeout', '0')
    assert done.code == 6
    said = [line.removeprefix('eschedule: ') for line in done.stderr.splitlines()]
    assert said[:-1] == [f"{instance}'s console: line {number}" for number in range(4, 9)]
    for reach in ('sh -c "sleep 600 & sleep 600" {host}', 'no-such-program {host}', 'false {host}'):
        write_config(guest.config, guest.etcd.endpoint, 'http://127.0.0.1:1', reach=reach)
        done = guest.eschedule('wait', instance, '--for', 'ready', '--timeout', '0')
        assert (done.code, done.stderr.count('\n')) == (6, 1)
