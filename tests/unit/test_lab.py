"""A lab: its network, state, processes, removal, guest image, ssh key and placement server."""

from __future__ import annotations

import base64
import json
import os
import shutil
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

from ecomp.errors import EcompError, UsageError
from ecomp.lab import fakes, guest, machine, state
from ecomp.lab.elab import main
from ecomp.lab.hosts import render_mdserver_conf
from ecomp.lab.machine import ServerProcess
from ecomp.lab.network import (
    CONTROL,
    DNSMASQ,
    MAX_HOSTS,
    SECOND_OCTETS,
    Layout,
    choose_network,
    parse_routed_networks,
    render_network_xml,
)
from ecomp.lab.placement_server import Application, cache_schema_checks, require_token, restrict_hosts
from ecomp.model.guest import METADATA_ADDRESS
from tests.unit.lab_root import make_lab

UUID = '8f14e45f-ceea-567f-a2b1-6d2b3c4d5e6f'


def test_layout_derives_all_names_and_addresses() -> None:
    layout = Layout('lab', IPv4Network('10.200.0.0/16'))

    assert layout.link == 'elab200'
    assert layout.get_namespace('hv2') == 'elab-lab-hv2'
    assert layout.machine == IPv4Address('10.200.0.1')
    assert layout.images == 'http://10.200.0.2/'
    assert layout.get_address('hv2') == IPv4Address('10.200.0.12')
    assert layout.get_guest_network('hv2') == IPv4Network('10.200.2.0/24')
    assert layout.get_mac(CONTROL) == '02:e1:ab:c8:00:00'
    assert layout.get_mac('hv2') == '02:e1:ab:c8:00:02'


@pytest.mark.parametrize('number', [min(SECOND_OCTETS), 200, max(SECOND_OCTETS)])
def test_full_lab_has_distinct_addresses_and_short_names(number: int) -> None:
    layout = Layout('x' * 32, IPv4Network(f'10.{number}.0.0/16'))
    hosts = [f'hv{number}' for number in range(1, MAX_HOSTS + 1)]

    networks = [layout.lan, *map(layout.get_guest_network, hosts)]
    assert len(set(networks)) == len(networks)
    assert all(network.subnet_of(layout.network) for network in networks)
    # The DHCP server of the LAN leases .100 to .250.
    addresses = [layout.machine, layout.control, *map(layout.get_address, hosts)]
    assert len(set(addresses)) == len(addresses)
    assert all(address in layout.lan and int(address) & 255 < 100 for address in addresses)
    assert all(len(name) <= 15 for name in (layout.link, *hosts))
    assert len(layout.get_namespace(hosts[-1])) <= 255


@given(st.sets(st.sampled_from(SECOND_OCTETS), max_size=len(SECOND_OCTETS) - 1))
def test_chosen_network_overlaps_no_used_one(numbers: set[int]) -> None:
    used = [IPv4Network(f'10.{number}.3.0/24') for number in numbers]

    chosen = choose_network(used)

    assert not any(chosen.overlaps(other) for other in used)


def test_choose_network_fails_without_a_free_network() -> None:
    with pytest.raises(EcompError, match='no free network'):
        choose_network([IPv4Network(f'10.{number}.0.0/16') for number in SECOND_OCTETS])


def test_wide_routes_of_a_vpn_are_ignored() -> None:
    wide = ('0.0.0.0/1', '128.0.0.0/1', '8.0.0.0/5', '10.0.0.0/8', '10.200.0.0/15', '10.202.9.0/24')
    routes: list[dict[str, object]] = [{'dst': network, 'dev': 'tun0'} for network in wide]

    assert choose_network(parse_routed_networks(routes)) == IPv4Network('10.203.0.0/16')


def test_network_xml_is_open_and_has_the_metadata_address() -> None:
    root = ET.fromstring(render_network_xml(IPv4Network('10.200.3.0/24'), UUID))

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


# A lab's saved state, its processes and its lock.


def run_to_end(directory: Path, script: str) -> ServerProcess:
    process = machine.start('server', ['sh', '-c', script], directory / 'log')
    while machine.is_alive(process):
        pass
    return process


def test_saved_lab_is_loaded_unchanged(tmp_path: Path) -> None:
    lab = make_lab(tmp_path, hosts=2, etcd=ServerProcess('etcd', 4711, 99))

    assert state.load('one', tmp_path) == lab
    assert [saved_lab.layout.name for saved_lab in state.list_labs(tmp_path)] == ['one']
    assert lab.hosts == ['hv1', 'hv2']
    assert lab.placement == 'https://10.33.0.2:8080'


def test_processes_of_another_boot_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('XDG_STATE_HOME', str(tmp_path))
    fake = state.FakeLab(
        directory=fakes.find_root() / 'two',
        host_count=3,
        processes={'etcd': ServerProcess('etcd', 4711, 99)},
        etcd_port=1,
        placement_port=2,
        size='VCPU:1',
    )
    fake.directory.mkdir(parents=True)
    fake.save()
    make_lab(tmp_path, hosts=2, etcd=ServerProcess('etcd', 4711, 99))
    for written in (tmp_path / 'one/lab.json', tmp_path / 'elab/two/lab.json'):
        written.write_text(json.dumps({**json.loads(written.read_text()), 'boot': 'another'}))

    assert state.load('one', tmp_path).processes == {}
    assert [fake.processes for fake in fakes.list_all()] == [{}]


def test_reused_pid_is_not_the_recorded_process() -> None:
    me = os.getpid()
    started = machine.read_start_time(me)
    assert started is not None

    assert machine.is_alive(ServerProcess('me', me, started))
    assert not machine.is_alive(ServerProcess('an earlier one', me, started - 1))
    machine.terminate([ServerProcess('an earlier one', me, started - 1)])  # does not end this process


def test_zombie_process_counts_as_ended() -> None:
    child = subprocess.Popen(['true'])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)

    assert machine.read_start_time(child.pid) is None
    child.wait()


def test_process_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    script = 'trap "" TERM; echo ready; while :; do sleep 0.1; done'
    process = machine.start('stubborn', ['sh', '-c', script], tmp_path / 'log')
    machine.wait_for(
        'stubborn', lambda: 'ready' in machine.read_last_line(tmp_path / 'log'), process, tmp_path / 'log', 10
    )

    machine.terminate([process], timeout_seconds=0.1)

    assert not machine.is_alive(process)


def test_server_that_dies_at_start_is_reported_with_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / 'log'
    process = machine.start('server', ['sh', '-c', 'echo no such port >&2; sleep 0.1'], log)

    with pytest.raises(EcompError, match='server ended while starting: no such port'):
        machine.wait_for('server', lambda: False, process, log, 10)


def test_dead_server_is_not_replaced_by_another_on_its_port(tmp_path: Path) -> None:
    process = run_to_end(tmp_path, 'echo port is taken')

    with pytest.raises(
        EcompError, match=r'another server answers in its place: port is taken \(.*\)\. Try: elab down$'
    ):
        machine.wait_for('server', lambda: True, process, tmp_path / 'log', 10)


def test_server_does_not_run_before_it_is_recorded(tmp_path: Path) -> None:
    """An unrecorded server, left when elab up is killed, would block the port of the next one."""
    processes: list[ServerProcess] = []

    def record_and_interrupt(_: str, process: ServerProcess) -> None:
        processes.append(process)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        machine.start('server', ['touch', 'file'], tmp_path / 'log', record_process=record_and_interrupt)
    while machine.is_alive(processes[0]):
        pass
    assert not (tmp_path / 'file').exists()


def test_server_has_stdin_from_dev_null(tmp_path: Path) -> None:
    run_to_end(tmp_path, 'cat; readlink /proc/$$/fd/0')
    assert machine.read_last_line(tmp_path / 'log') == '/dev/null'


def test_failing_program_is_reported_with_its_last_line() -> None:
    with pytest.raises(EcompError, match='failed with exit code 3: second'):
        machine.run(['sh', '-c', 'echo first >&2; echo second >&2; exit 3'])
    with pytest.raises(EcompError, match='cannot be run'):
        machine.run(['/no/such/program'])


def test_program_is_stopped_after_its_timeout() -> None:
    with pytest.raises(EcompError, match=r'sleep 600 has not ended after 0.1 s'):
        machine.run(['sleep', '600'], timeout_seconds=0.1)


MISSING_PATTERN = (
    'missing programs: no-such-1, no-such-2, no-such-3; missing modules in .*: no_such_module. '
    'Fix: apt-get install --no-install-recommends a b && pip install'
)


def test_require_names_everything_missing() -> None:
    with pytest.raises(UsageError, match=MISSING_PATTERN):
        machine.require({'no-such-1': 'b', 'no-such-2': 'a', 'no-such-3': 'b', 'sh': 'dash'}, ['no_such_module', 'os'])
    machine.require({'sh': 'dash'}, ['os'])
    # libvirt's package is compiled at installation, so a host with etcd and placement only must not need it.
    for modules, extras in ((['no_placement'], 'lab'), (['no_placement', 'libvirt'], 'hypervisor,lab')):
        with pytest.raises(UsageError) as caught:
            machine.require({}, modules)
        assert str(caught.value).endswith(f". Fix: pip install '.[{extras}]'")


def test_lock_survives_concurrent_removal_of_its_directory(tmp_path: Path) -> None:
    directory, order = tmp_path / 'lab', []

    def other() -> None:
        with machine.hold_lock(directory):
            order.append('second')
            assert directory.is_dir()

    with machine.hold_lock(directory):
        thread = threading.Thread(target=other)
        thread.start()
        order.append('first')
        directory.rmdir()
    thread.join(10)

    assert order == ['first', 'second']


# `elab down` removes what the lab has made and nothing else.


@pytest.mark.usefixtures('fake_root')
def test_down_removes_a_linked_lab_with_its_link(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
        assert f'lab {name} is removed' in capsys.readouterr().err
    assert not root.exists()
    assert not target.exists()
    assert (foreign / 'images/file').exists()


@pytest.mark.usefixtures('fake_root')
def test_down_removes_no_file_while_a_mount_in_the_lab_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """That each mount is removed, the inner one first, is in tests/functional/test_lab_hosts.py."""
    directory = root.parent / 'my disk'
    directory.mkdir()
    (root / 'one').symlink_to(directory)
    make_lab(root)
    (directory / 'images').mkdir()
    (directory / 'images/mine').write_text('')
    monkeypatch.setattr(state, 'MOUNTINFO', root.parent / 'mountinfo')
    line = '25 1 0:22 / {} rw,relatime shared:1 - ext4 /dev/sdb1 rw\n'
    outside = [root.parent, Path('/'), directory, directory.with_name(f'{directory.name}2') / 'x']
    mounts = [line.format(str(each).replace(' ', '\\040')) for each in (*outside, directory / 'images')]
    state.MOUNTINFO.write_text(''.join(mounts))
    commands: list[list[str]] = []

    def refuse(command: list[str]) -> str:
        commands.append(command)
        raise EcompError('umount failed')

    monkeypatch.setattr(machine, 'run', refuse)
    assert main(['down', '--name', 'one']) == 1
    reason = f'{root}/one cannot be removed completely: {directory}/images is a mount: umount failed'
    fix = 'unmount what is mounted below that directory, and run `elab down` again'
    assert capsys.readouterr().err.splitlines()[-1] == f'elab: {reason}. Fix: {fix}'
    assert commands == [['umount', '--lazy', f'{directory}/images']]
    assert (directory / 'images/mine').exists()


@pytest.mark.usefixtures('fake_root')
def test_interrupted_down_of_a_linked_lab_is_resumed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lab.json the next `elab down` would not recognize the rest as a lab."""
    target = root.parent / 'there'
    target.mkdir()
    (root / 'one').symlink_to(target)
    make_lab(root)
    for name in ('control', 'images', 'zoo'):
        (target / name).mkdir()
    remove = shutil.rmtree

    def remove_and_interrupt(path: Path) -> None:
        remove(path)
        raise KeyboardInterrupt

    for _ in range(3):
        monkeypatch.setattr(shutil, 'rmtree', remove_and_interrupt)
        assert main(['down', '--name', 'one']) == 1
        assert (target / 'lab.json').exists()
    monkeypatch.setattr(shutil, 'rmtree', remove)
    assert main(['down', '--name', 'one']) == 0
    assert not target.exists()


# The small guest: the check for static programs.


def test_program_with_libraries_is_not_static() -> None:
    assert not guest.is_static(Path(sys.executable).read_bytes())
    assert not guest.is_static(b'#!/bin/sh\n')


# The ssh key for a lab's guests: the first valid one in ~/.ssh.


def make_key_line(kind: str) -> str:
    blob = b''.join(len(part).to_bytes(4, 'big') + part for part in (kind.encode(), bytes(32)))
    return f'{kind} {base64.b64encode(blob).decode()}'


KEY = make_key_line('ssh-ed25519')
PUTTY = f'---- BEGIN SSH2 PUBLIC KEY ----\nComment: "me"\n{KEY.split()[1]}\n---- END SSH2 PUBLIC KEY ----\n'
INVALID_KEYS = {
    'certificate': make_key_line('ssh-ed25519-cert-v01@openssh.com').encode(), 'putty': PUTTY.encode(),
    'latin-1': f'{KEY} J\xfcrgen'.encode('latin-1'), 'empty': b'', 'words': b'two words\n', 'cut': KEY[:-8].encode(),
}  # fmt: skip


@pytest.mark.parametrize('odd', [*INVALID_KEYS, 'dangling', 'directory'])
def test_invalid_ssh_keys_are_skipped(odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        first.write_bytes(INVALID_KEYS[odd])

    def read_keys() -> tuple[tuple[str, str], ...]:
        path = tmp_path / 'mdserver.conf'
        path.write_text(render_mdserver_conf())
        return conf.load(path).public_keys

    assert read_keys() == ()
    (tmp_path / '.ssh/b.pub').write_text(f'{KEY} me@here 100%\nand more\n')
    assert read_keys() == (('default', f'{KEY} me@here 100%'),)


# The lab's placement server: accepted Host headers and tokens.


def echo_identity(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    start_response('200 OK', [])
    return [repr(sorted((name, value) for name, value in environ.items() if name.startswith('HTTP_X'))).encode()]


def send_request(application: Application, **environ: str) -> tuple[str, bytes]:
    statuses: list[str] = []
    body = b''.join(application(environ, lambda status, _headers: statuses.append(status)))
    return statuses[0], body


def test_placement_answers_only_to_its_own_names() -> None:
    application = restrict_hosts(echo_identity, ('localhost', '127.0.0.1', '::1', '10.0.0.5'))
    for host in ('localhost', 'LocalHost:8080', '127.0.0.1:1', '[::1]:8080', '10.0.0.5'):
        assert send_request(application, HTTP_HOST=host)[0] == '200 OK', host
    assert send_request(application)[0] == '200 OK'  # no Host header: not a browser
    application = restrict_hosts(echo_identity, ('localhost', '127.0.0.1'))
    refused = '421 Misdirected Request', b'placement accepts only these host names here: localhost and 127.0.0.1\n'
    for host in ('', 'evil.example', 'localhost.evil.example', '[', 'localhost@evil', '127.0.0.1.x'):
        assert send_request(application, HTTP_HOST=host) == refused, host


def test_placement_accepts_only_the_token_in_its_file(tmp_path: Path) -> None:
    token = tmp_path / 'token'
    token.write_text('the-word\n')
    application = require_token(echo_identity, token)
    headers = {'HTTP_X_ROLES': 'admin', 'HTTP_X_USER_ID': 'root', 'HTTP_X_AUTH_TOKEN': 'the-word'}
    assert send_request(application, **headers) == ('200 OK', b"[('HTTP_X_AUTH_TOKEN', 'admin')]")
    for wrong_token in ('admin', '', 'the-wor', 'the-word ', 'é'):
        assert send_request(application, **{**headers, 'HTTP_X_AUTH_TOKEN': wrong_token})[0] == '401 Unauthorized'
    assert send_request(application)[0] == '401 Unauthorized'
    token.write_text('another')
    assert send_request(application, **headers)[0] == '401 Unauthorized'
    for nothing in (b'', b'\n'):
        token.write_bytes(nothing)
        for wrong_token in ('', ' ', 'admin'):
            assert send_request(application, **{**headers, 'HTTP_X_AUTH_TOKEN': wrong_token})[0] == '401 Unauthorized'
        assert send_request(application)[0] == '401 Unauthorized'
    token.unlink()
    assert send_request(application)[0] == '401 Unauthorized'


# The lab's placement checks each schema once, and every request against its schema.


jsonschema = pytest.importorskip('jsonschema', reason="placement is not installed: pip install '.[lab]'")

WHOLE_NUMBER = {'type': 'integer', 'minimum': 1}


@pytest.fixture
def checked_schemas(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    validator = jsonschema.validators.validator_for({})
    check, schemas = validator.check_schema, []

    def record_schema(schema: Any, *rest: Any, **named: Any) -> None:
        schemas.append(schema)
        check(schema, *rest, **named)

    monkeypatch.setattr(validator, 'check_schema', record_schema)
    cache_schema_checks()
    return schemas


def test_schema_is_checked_at_its_first_use_only(checked_schemas: list[Any]) -> None:
    for _ in range(3):
        jsonschema.validate(3, WHOLE_NUMBER)
    assert checked_schemas == [WHOLE_NUMBER]
    jsonschema.validate('x', {'type': 'string'})
    assert checked_schemas == [WHOLE_NUMBER, {'type': 'string'}]


@pytest.mark.usefixtures('checked_schemas')
def test_invalid_data_is_refused_each_time() -> None:
    for _ in range(2):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(0, WHOLE_NUMBER)


@pytest.mark.usefixtures('checked_schemas')
def test_invalid_schema_is_refused_each_time() -> None:
    nonsense = {'type': 'no such type'}
    for _ in range(2):
        with pytest.raises(jsonschema.SchemaError):
            jsonschema.validate(3, nonsense)
