"""A lab: its network, state, processes, removal, guest image, ssh key and placement server."""

from __future__ import annotations

import base64
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mdserver import conf

from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.lab import guest, machine, state
from ecomp.lab.elab import main
from ecomp.lab.hosts import mdserver_conf
from ecomp.lab.machine import Process
from ecomp.lab.network import (
    CONTROL,
    DNSMASQ,
    MOST_HOSTS,
    SECOND_OCTETS,
    Layout,
    check_name,
    choose_network,
    host_names,
    network_xml,
    routed_networks,
    share,
)
from ecomp.lab.placement_server import Application, known, named
from ecomp.model.guest import METADATA_ADDRESS
from tests.unit.lab_root import make_lab

# A lab's names and addresses, and the choice of a free network.


UUID = '8f14e45f-ceea-567f-a2b1-6d2b3c4d5e6f'


def test_everything_follows_from_the_name_and_the_network() -> None:
    layout = Layout('lab', IPv4Network('10.200.0.0/16'))

    assert layout.link == 'elab200'
    assert layout.namespace('hv2') == 'elab-lab-hv2'
    assert layout.machine == IPv4Address('10.200.0.1')
    assert layout.etcd == '10.200.0.2:2379'
    assert layout.placement == 'https://10.200.0.2:8080'
    assert layout.images == 'http://10.200.0.2/'
    assert layout.address('hv2') == IPv4Address('10.200.0.12')
    assert layout.guests('hv2') == IPv4Network('10.200.2.0/24')
    assert layout.mac(CONTROL) == '02:e1:ab:c8:00:00'
    assert layout.mac('hv2') == '02:e1:ab:c8:00:02'


@pytest.mark.parametrize('number', [min(SECOND_OCTETS), 200, max(SECOND_OCTETS)])
def test_nothing_of_a_full_lab_overlaps_and_names_fit_the_kernel(number: int) -> None:
    layout = Layout('x' * 32, IPv4Network(f'10.{number}.0.0/16'))
    hosts = host_names(MOST_HOSTS)

    networks = [layout.lan, *map(layout.guests, hosts)]
    assert len(set(networks)) == len(networks)
    assert all(network.subnet_of(layout.network) for network in networks)
    # The DHCP server of the LAN leases .100 to .250.
    addresses = [layout.machine, layout.control, *map(layout.address, hosts)]
    assert len(set(addresses)) == len(addresses)
    assert all(address in layout.lan and int(address) & 255 < 100 for address in addresses)
    assert all(len(name) <= 15 for name in (layout.link, *hosts))
    assert len(layout.namespace(hosts[-1])) <= 255


@pytest.mark.parametrize('name', ['lab', 'a', '0', 'a-b', 'x' * 32])
def test_names_of_labs(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize('name', ['', '-a', 'a-', 'A', 'a/b', '..', 'a b', 'a.b', 'ä', 'x' * 33, 'a\n'])
def test_what_is_no_name_of_a_lab(name: str) -> None:
    with pytest.raises(UsageError, match='a lab is named'):
        check_name(name)


def test_the_first_free_network_is_chosen() -> None:
    used = [IPv4Network('10.200.0.0/16'), IPv4Network('10.201.7.0/24'), IPv4Network('192.168.0.0/16')]

    assert choose_network([]) == IPv4Network('10.200.0.0/16')
    assert choose_network(used) == IPv4Network('10.202.0.0/16')


@given(st.sets(st.sampled_from(SECOND_OCTETS), max_size=len(SECOND_OCTETS) - 1))
def test_a_chosen_network_is_nobodys(numbers: set[int]) -> None:
    used = [IPv4Network(f'10.{number}.3.0/24') for number in numbers]

    chosen = choose_network(used)

    assert not any(chosen.overlaps(other) for other in used)


def test_a_machine_that_routes_all_there_is_has_no_room_for_a_lab() -> None:
    with pytest.raises(EcompError, match='no free network'):
        choose_network([IPv4Network(f'10.{number}.0.0/16') for number in SECOND_OCTETS])


def test_a_vpn_to_everywhere_leaves_room_for_a_lab() -> None:
    wide = ('0.0.0.0/1', '128.0.0.0/1', '8.0.0.0/5', '10.0.0.0/8', '10.200.0.0/15', '10.202.9.0/24')
    routes: list[dict[str, object]] = [{'dst': network, 'dev': 'tun0'} for network in wide]

    assert choose_network(routed_networks(routes)) == IPv4Network('10.203.0.0/16')


def test_routes_as_iproute2_writes_them() -> None:
    routes: list[dict[str, object]] = [
        {'dst': 'default', 'gateway': '192.0.2.1', 'dev': 'eth0'},
        {'dst': '0.0.0.0/0', 'dev': 'tun0'},
        {'dst': '10.8.0.0/24', 'dev': 'tun0'},
        {'type': 'local', 'dst': '10.9.0.1', 'dev': 'eth1'},
    ]

    assert routed_networks(routes) == [IPv4Network('10.8.0.0/24'), IPv4Network('10.9.0.1/32')]


def test_the_network_of_a_host_is_open_and_carries_the_metadata_address() -> None:
    root = ET.fromstring(network_xml(IPv4Network('10.200.3.0/24'), UUID))

    assert [(child.tag, child.text, child.attrib) for child in root] == [
        ('name', 'default', {}),
        ('uuid', UUID, {}),
        ('forward', None, {'mode': 'open'}),
        ('bridge', None, {'name': 'virbr0', 'stp': 'off', 'delay': '0'}),
        ('dns', None, {'enable': 'no'}),
        ('ip', None, {'address': '10.200.3.1', 'netmask': '255.255.255.0'}),
        ('ip', None, {'address': METADATA_ADDRESS, 'netmask': '255.255.255.255'}),
        (f'{{{DNSMASQ}}}options', None, {}),
    ]
    assert [option.attrib for option in root.iter(f'{{{DNSMASQ}}}option')] == [{'value': 'dhcp-ignore=tag:!known'}]
    ranges = root.findall('ip/dhcp/range')
    assert [address_range.attrib for address_range in ranges] == [{'start': '10.200.3.2', 'end': '10.200.3.254'}]


def test_a_host_gets_its_share_and_never_nothing() -> None:
    assert share(16, 65536, 300, 2) == {'VCPU': 8, 'MEMORY_MB': 32768, 'DISK_GB': 150}
    assert share(2, 2048, 5, 8) == {'VCPU': 4, 'MEMORY_MB': 512, 'DISK_GB': 1}


# A lab's saved state, its processes and its lock.


def ended(directory: Path, script: str) -> Process:
    """Run a shell script in place of a server, to its end."""
    process = machine.start('server', ['sh', '-c', script], directory / 'log')
    while machine.alive(process):
        pass
    return process


def test_a_lab_is_read_back_as_it_was_saved(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, hosts=2, etcd=Process('etcd', 4711, 99))

    assert state.load('one', tmp_path) == lab
    assert [saved_lab.layout.name for saved_lab in state.all_labs(tmp_path)] == ['one']
    assert lab.places == ['control', 'hv1', 'hv2']


def test_no_lab(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no lab 'other'"):
        state.load('other', tmp_path)


def test_processes_of_another_boot_are_forgotten(tmp_path: Path) -> None:
    make_lab(tmp_path, hosts=2, etcd=Process('etcd', 4711, 99))
    written = tmp_path / 'one/lab.json'
    written.write_text(json.dumps({**json.loads(written.read_text()), 'boot': 'another'}))

    assert state.load('one', tmp_path).processes == {}


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    make_lab(tmp_path)
    written = tmp_path / 'one/lab.json'
    written.write_text(json.dumps({**json.loads(written.read_text()), 'version': 99}))

    assert state.all_labs(tmp_path) == []
    with pytest.raises(EcompError, match='version 99'):
        state.load('one', tmp_path)


def test_a_pid_that_was_used_again_is_not_ours() -> None:
    me = os.getpid()
    started = machine.started_at(me)
    assert started is not None

    assert machine.alive(Process('me', me, started))
    assert not machine.alive(Process('an earlier one', me, started - 1))
    machine.end([Process('an earlier one', me, started - 1)])  # does not end this process


def test_a_process_that_only_waits_to_be_reaped_has_ended() -> None:
    child = subprocess.Popen(['true'])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert machine.started_at(child.pid) is None
    child.wait()


def test_a_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = 'trap "" TERM; echo ready; while :; do sleep 0.1; done'
    process = machine.start('stubborn', ['sh', '-c', script], tmp_path / 'log')
    machine.wait_for('stubborn', lambda: 'ready' in machine.last_line(tmp_path / 'log'), process, tmp_path / 'log', 10)

    machine.end([process], patience=0.1)

    assert not machine.alive(process)


def test_a_server_that_ends_while_starting_is_reported_with_its_last_word(tmp_path: Path) -> None:
    log = tmp_path / 'log'
    process = machine.start('server', ['sh', '-c', 'echo no such port >&2; sleep 0.1'], log)

    with pytest.raises(EcompError, match='server ended while starting: no such port'):
        machine.wait_for('server', lambda: False, process, log, 10)


def test_a_server_that_ended_is_none_whoever_answers_in_its_place(tmp_path: Path) -> None:
    process = ended(tmp_path, 'echo port is taken')

    with pytest.raises(EcompError, match=r'has its place \(elab down ends that\): port is taken'):
        machine.wait_for('server', lambda: True, process, tmp_path / 'log', 10)


def test_no_server_runs_that_nobody_has_written_down(tmp_path: Path) -> None:
    """An unrecorded server, left when elab up is killed, would block the port of the next one."""
    processes: list[Process] = []

    def interrupted(_: str, process: Process) -> None:
        processes.append(process)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.start('server', ['touch', 'file'], tmp_path / 'log', remember=interrupted)
    while machine.alive(processes[0]):
        pass
    assert not (tmp_path / 'file').exists()


def test_a_server_reads_nothing_of_who_started_it(tmp_path: Path) -> None:
    ended(tmp_path, 'cat; readlink /proc/$$/fd/0')
    assert machine.last_line(tmp_path / 'log') == '/dev/null'


def test_a_failing_program_is_reported_with_its_last_word() -> None:
    with pytest.raises(EcompError, match=r'failed \(3\): second'):
        machine.run(['sh', '-c', 'echo first >&2; echo second >&2; exit 3'])
    with pytest.raises(EcompError, match='cannot be run'):
        machine.run(['/no/such/program'])


def test_a_program_that_does_not_end_is_given_up() -> None:
    with pytest.raises(EcompError, match=r'sleep 600 has not ended after 0.1 s'):
        machine.run(['sleep', '600'], seconds=0.1)


def test_everything_that_is_missing_is_named_at_once() -> None:
    with pytest.raises(UsageError, match='apt-get install --no-install-recommends a b; missing in .*: no_such_module'):
        machine.require({'no-such-1': 'b', 'no-such-2': 'a', 'no-such-3': 'b', 'sh': 'dash'}, ['no_such_module', 'os'])
    machine.require({'sh': 'dash'}, ['os'])
    # libvirt's package is compiled at installation, so a host with etcd and placement only must not need it.
    for modules, extras in ((['no_placement'], 'lab'), (['no_placement', 'libvirt'], 'hypervisor,lab')):
        with pytest.raises(UsageError) as caught:
            machine.require({}, modules)
        assert str(caught.value).endswith(f"; pip install '.[{extras}]'")


def test_one_at_a_time_has_a_directory_also_when_it_is_removed_meanwhile(tmp_path: Path) -> None:
    directory, order = tmp_path / 'lab', []

    def other() -> None:
        with state.locked(directory):
            order.append('second')
            assert directory.is_dir()

    with state.locked(directory):
        thread = threading.Thread(target=other)
        thread.start()
        order.append('first')
        directory.rmdir()
    thread.join(10)

    assert order == ['first', 'second']


# `elab down` removes what the lab has made and nothing else.


@pytest.mark.usefixtures('as_root')
def test_a_lab_behind_a_link_is_removed_with_the_link(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, foreign = root.parent / 'there', root.parent / 'somebodys'
    for place, link in ((target, root / 'one'), (foreign, root / 'two')):
        place.mkdir()
        link.symlink_to(place)
    make_lab(root)
    for place in (target, foreign):
        (place / 'images').mkdir()
        (place / 'images/file').write_text('')
    (target / 'link').symlink_to(foreign)
    for name in ('one', 'two'):
        assert main(['down', '--name', name]) == 0
        assert f'lab {name} is gone' in capsys.readouterr().err
    assert not root.exists()
    assert not target.exists()
    assert (foreign / 'images/file').exists()


@pytest.mark.usefixtures('as_root')
@pytest.mark.parametrize('linked', [False, True])
def test_what_is_mounted_in_a_lab_is_said_before_anything_ends(
    linked: bool, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`elab down` must report the mount before it removes any file in it."""
    directory = root.parent / 'my disk' if linked else root / 'one'
    if linked:
        directory.mkdir()
        (root / 'one').symlink_to(directory)
    make_lab(root)
    (directory / 'images').mkdir()
    (directory / 'images/mine').write_text('')
    monkeypatch.setattr(machine, 'end_processes', lambda *_: pytest.fail('something was ended'))
    monkeypatch.setattr(state, 'MOUNTINFO', root.parent / 'mountinfo')
    line = '25 1 0:22 / {} rw,relatime shared:1 - ext4 /dev/sdb1 rw\n'
    outside = [root.parent, Path('/'), directory, directory.with_name(f'{directory.name}2') / 'x']
    mounts = [line.format(str(mount_point).replace(' ', '\\040')) for mount_point in (*outside, directory / 'images')]
    state.MOUNTINFO.write_text(''.join(mounts))
    assert main(['down', '--name', 'one']) == 1
    reason = f'{root}/one cannot be removed whole ({directory}/images is a mount)'
    message = f'elab: {reason}: unmount what is mounted there, and say elab down again\n'
    assert capsys.readouterr() == ('', message)
    assert (directory / 'images/mine').exists()
    monkeypatch.setattr(machine, 'end_processes', lambda *_: None)
    state.MOUNTINFO.write_text(''.join(mounts[:-1]))
    assert main(['down', '--name', 'one']) == 0
    assert not directory.exists()


@pytest.mark.usefixtures('as_root')
def test_a_down_that_was_killed_is_gone_on_with_behind_a_link(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lab.json the next `elab down` would not recognize the rest as a lab."""
    target = root.parent / 'there'
    target.mkdir()
    (root / 'one').symlink_to(target)
    make_lab(root)
    for name in ('control', 'images', 'zoo'):
        (target / name).mkdir()
    remove = shutil.rmtree

    def killed(path: Path) -> None:
        remove(path)
        raise KeyboardInterrupt

    for _ in range(3):
        monkeypatch.setattr(shutil, 'rmtree', killed)
        assert main(['down', '--name', 'one']) == 1
        assert (target / 'lab.json').exists()
    monkeypatch.setattr(shutil, 'rmtree', remove)
    assert main(['down', '--name', 'one']) == 0
    assert not target.exists()


# The small guest: its archive, and the check for static programs.


FILES = [
    ('bin', stat.S_IFDIR | 0o755, b''),
    ('dev', stat.S_IFDIR | 0o755, b''),
    ('dev/console', stat.S_IFCHR | 0o600, b'5,1'),
    ('bin/one', stat.S_IFREG | 0o755, b'#!/bin/sh\n'),
    ('bin/a-longer-name', stat.S_IFREG | 0o644, bytes(range(256)) * 3 + b'x'),
]


def test_the_archive_is_what_cpio_takes_for_one(tmp_path: Path) -> None:
    busybox = Path('/bin/busybox')
    if not busybox.exists():
        pytest.skip('busybox is not installed: apt-get install busybox-static')
    packed = guest.archive(FILES)

    listed = subprocess.run([busybox, 'cpio', '-tv'], input=packed, capture_output=True, check=True).stdout.decode()
    lines = [line.split() for line in listed.splitlines()]
    assert [(line[0], line[-1]) for line in lines] == [
        ('drwxr-xr-x', 'bin'),
        ('drwxr-xr-x', 'dev'),
        ('crw-------', 'dev/console'),
        ('-rwxr-xr-x', 'bin/one'),
        ('-rw-r--r--', 'bin/a-longer-name'),
    ]
    subprocess.run([busybox, 'cpio', '-id', 'bin/*'], input=packed, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / 'bin/a-longer-name').read_bytes() == FILES[-1][2]
    assert (tmp_path / 'bin/one').stat().st_mode & 0o777 == 0o755


def test_the_archive_is_the_same_every_time() -> None:
    assert guest.archive(FILES) == guest.archive(FILES)
    assert len(guest.archive(FILES)) % 4 == 0


def test_a_program_with_libraries_is_not_static() -> None:
    assert not guest.is_static(Path(sys.executable).read_bytes())
    assert not guest.is_static(b'#!/bin/sh\n')


@pytest.mark.parametrize('script', [guest.INIT, guest.ON_LEASE, guest.POWER_BUTTON])
def test_the_scripts_are_shell(script: str) -> None:
    subprocess.run(['sh', '-n'], input=script.encode(), check=True)
    assert script.startswith('#!/bin/')


# The ssh key for a lab's guests: the first valid one in ~/.ssh.


def line(kind: str) -> str:
    """Return a line of a .pub file with a key of this type."""
    blob = b''.join(len(part).to_bytes(4, 'big') + part for part in (kind.encode(), bytes(32)))
    return f'{kind} {base64.b64encode(blob).decode()}'


KEY = line('ssh-ed25519')
PUTTY = f'---- BEGIN SSH2 PUBLIC KEY ----\nComment: "me"\n{KEY.split()[1]}\n---- END SSH2 PUBLIC KEY ----\n'
ODD = {
    'certificate': line('ssh-ed25519-cert-v01@openssh.com').encode(), 'putty': PUTTY.encode(),
    'latin-1': f'{KEY} J\xfcrgen'.encode('latin-1'), 'empty': b'', 'words': b'two words\n', 'cut': KEY[:-8].encode(),
}  # fmt: skip


@pytest.mark.parametrize('odd', [*ODD, 'dangling', 'directory'])
def test_what_is_no_key_for_a_guest_is_passed_over(
    odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('HOME', str(tmp_path))
    monkeypatch.delenv('SUDO_USER', raising=False)
    first = tmp_path / '.ssh/a.pub'
    first.parent.mkdir()
    (tmp_path / 'user-data').write_text('#!/bin/sh\n')
    if odd == 'dangling':
        first.symlink_to('none')
    elif odd == 'directory':
        first.mkdir()
    else:
        first.write_bytes(ODD[odd])

    def given() -> tuple[tuple[str, str], ...]:
        path = tmp_path / 'mdserver.conf'
        path.write_text(mdserver_conf())
        return conf.load(path).public_keys

    assert given() == ()
    (tmp_path / '.ssh/b.pub').write_text(f'{KEY} me@here 100%\nand more\n')
    assert given() == (('default', f'{KEY} me@here 100%'),)


# The lab's placement server: accepted Host headers and tokens.


def echo(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer like an application, with the identity that placement would see."""
    start_response('200 OK', [])
    return [repr(sorted((name, value) for name, value in environ.items() if name.startswith('HTTP_X'))).encode()]


def asked(application: Application, **environ: str) -> tuple[str, bytes]:
    """Return the status and the body of the answer."""
    statuses: list[str] = []
    body = b''.join(application(environ, lambda status, _headers: statuses.append(status)))
    return statuses[0], body


def test_by_its_own_names_and_by_no_other() -> None:
    application = named(echo, ('localhost', '127.0.0.1', '::1', '10.0.0.5'))
    for host in ('localhost', 'LocalHost:8080', '127.0.0.1:1', '[::1]:8080', '10.0.0.5'):
        assert asked(application, HTTP_HOST=host)[0] == '200 OK', host
    assert asked(application)[0] == '200 OK'  # no Host header: not a browser
    application = named(echo, ('localhost', '127.0.0.1'))
    refused = '421 Misdirected Request', b'placement answers here by localhost and 127.0.0.1 alone\n'
    for host in ('', 'evil.example', 'localhost.evil.example', '[', 'localhost@evil', '127.0.0.1.x'):
        assert asked(application, HTTP_HOST=host) == refused, host


def test_who_says_the_word_is_the_administrator_and_nobody_s_else(tmp_path: Path) -> None:
    token = tmp_path / 'token'
    token.write_text('the-word\n')
    application = known(echo, token)
    headers = {'HTTP_X_ROLES': 'admin', 'HTTP_X_USER_ID': 'root', 'HTTP_X_AUTH_TOKEN': 'the-word'}
    assert asked(application, **headers) == ('200 OK', b"[('HTTP_X_AUTH_TOKEN', 'admin')]")
    for wrong_token in ('admin', '', 'the-wor', 'the-word ', 'é'):
        assert asked(application, **{**headers, 'HTTP_X_AUTH_TOKEN': wrong_token})[0] == '401 Unauthorized'
    assert asked(application)[0] == '401 Unauthorized'
    token.write_text('another')
    assert asked(application, **headers)[0] == '401 Unauthorized'
    for nothing in (b'', b'\n'):
        token.write_bytes(nothing)
        for wrong_token in ('', ' ', 'admin'):
            assert asked(application, **{**headers, 'HTTP_X_AUTH_TOKEN': wrong_token})[0] == '401 Unauthorized'
        assert asked(application)[0] == '401 Unauthorized'
    token.unlink()
    assert asked(application)[0] == '401 Unauthorized'
