"""A lab's hosts, what killed commands leave of it, and its route."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ecomp.compute_conf import load_compute
from ecomp.errors import UsageError
from ecomp.lab import guest, machine, state
from ecomp.model.cluster import describe_vulnerabilities
from tests.kit.lab import get_json, make_lab_name
from tests.kit.servers import make_environment, wait_until

ROOT = Path('/var/lib/elab')
NAME = make_lab_name('f')


def describe_missing() -> str:
    try:
        machine.require_root('a lab')
        programs = {**machine.CONTROL_PROGRAMS, **machine.SECURE_PROGRAMS, **machine.HOST_PROGRAMS, **guest.PROGRAMS}
        machine.require(programs, ['placement', 'waitress', 'libvirt'])
    except UsageError as error:
        return str(error)
    return ''


def make_command(*words: str) -> list[str]:
    return [sys.executable, '-m', 'ecomp.lab.elab', *words]


def run_elab(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(
        make_command(*words),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env=make_environment(),
        timeout=200,
    )
    assert result.returncode == code, f'elab {words}: {result.returncode}\n{result.stdout}{result.stderr}'
    return result


def read_lab_json(name: str) -> dict[str, Any]:
    path = ROOT / name / 'lab.json'
    return dict(json.loads(path.read_text())) if path.exists() else {}


def list_traces(name: str, link: str) -> list[str]:
    """List a lab's files, namespaces, interfaces, routes, mounts and processes on this machine."""
    lines = [str(path) for path in (ROOT / name,) if path.exists()]
    if link in {
        read_lab_json(path.parent.name).get('link') for path in ROOT.glob('*/lab.json') if path.parent.name != name
    }:
        link = 'none'  # the number of this link has been reused by another lab
    commands = (['ip', 'netns', 'list'], ['ip', '-o', 'link', 'show'], ['ip', 'route', 'show', 'table', 'all'])
    for listing in commands:
        output = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
        lines += [line for line in output if f'elab-{name}-' in line or link in line.replace('@', ' ').split()]
    lines += [line for line in Path('/proc/self/mountinfo').read_text().splitlines() if f'elab-{name}-' in line]
    for process in Path('/proc').glob('[0-9]*'):
        try:
            command_line = (process / 'cmdline').read_bytes().replace(b'\0', b' ').decode(errors='replace')
        except OSError:
            continue
        if f'{ROOT}/{name}/' in command_line:
            lines.append(f'{process.name}: {command_line}')
    return lines


# `elab up`, `status`, `exec`, `guest` and `down`, on this machine and with guests that really boot.


FIX_FOR_NO_ANSWER = f'end the processes that hang, and run `elab up --name {NAME}`\n'


def fetch(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ''


@pytest.fixture(scope='module')
def lab() -> Iterator[dict[str, Any]]:
    if reason := describe_missing():
        pytest.skip(reason)
    try:
        run_elab('up', '--name', NAME, '--hosts', '1')
        yield read_lab_json(NAME)
    finally:
        run_elab('down', '--name', NAME)


def run_in_host(*words: str, code: int = 0) -> str:
    return run_elab('exec', '--name', NAME, 'hv1', *words, code=code).stdout


def test_host_has_its_own_libvirt_network_and_ecompute(lab: dict[str, Any]) -> None:
    assert run_in_host('hostname').strip() == 'hv1'
    assert run_in_host('virsh', '-c', 'qemu:///system', 'list', '--name').strip() == ''
    assert 'Active:         yes' in run_in_host('virsh', '-c', 'qemu:///system', 'net-info', 'default')
    assert '169.254.169.254/32' in run_in_host('ip', '-o', 'address', 'show', 'virbr0')
    rows = [line.split() for line in run_elab('status', '--name', NAME).stdout.splitlines()]
    assert [row[0] for row in rows] == ['PLACE', 'etcd', 'placement', 'stunnel', 'images', 'dhcp', 'hv1']
    assert all(row[2].startswith('ready') for row in rows[1:])
    # The machine reaches the control plane, for eschedule.
    certs = ROOT / NAME / 'certs/operator-lab'
    assert get_json(f'{lab["placement"]}/', certs)['versions'][0]['max_version'] == '1.39'
    assert get_json(f'https://{lab["etcd"]}/health', certs)['health'] == 'true'
    hosts = [sys.executable, '-m', 'ecomp.schedule', 'hosts']
    assert subprocess.run(hosts, cwd=ROOT / NAME, env=make_environment(), capture_output=True).returncode == 0
    # Clients without a certificate get no answer.
    for where in (lab['placement'], f'http://{lab["etcd"]}', f'https://{lab["etcd"]}'):
        assert fetch(f'{where}/version') == ''
    # Known vulnerabilities of this etcd are logged once, at the start.
    log = (ROOT / NAME / 'hv1/ecompute.log').read_text()
    warning = describe_vulnerabilities(get_json(f'https://{lab["etcd"]}/version', certs)['etcdserver'])
    assert log.count(' WARNING ') == log.count(f' {warning}\n') == (warning is not None)


@pytest.mark.usefixtures('lab')
def test_qemu_can_open_the_kvm_of_a_host() -> None:
    """Otherwise libvirt probes QEMU again for each guest, for up to a minute."""
    qemu = 'setpriv --reuid=libvirt-qemu --regid=libvirt-qemu --init-groups'
    run_in_host('sh', '-c', f'[ ! -e /dev/kvm ] || {qemu} test -w /dev/kvm')


@pytest.mark.usefixtures('lab')
def test_host_has_no_route_out() -> None:
    assert 'default' not in run_in_host('ip', 'route', 'show', 'table', 'all').split()
    result = run_elab('exec', '--name', NAME, 'hv1', 'busybox', 'ping', '-c1', '-W1', '192.0.2.1', code=1)
    assert 'Network is unreachable' in result.stderr


@pytest.mark.usefixtures('lab')
def test_second_up_starts_only_ended_processes() -> None:
    before = read_lab_json(NAME)['processes']
    victim = before['hv1 ecompute']['pid']
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: machine.read_start_time(victim) is None, 10, 'ecompute is gone')
    assert 'hv1' in run_elab('status', '--name', NAME, code=1).stderr

    run_elab('up', '--name', NAME)

    after = read_lab_json(NAME)['processes']
    assert [name for name in after if after[name] != before[name]] == ['hv1 ecompute']
    run_elab('status', '--name', NAME)


def run_etcdctl(lab: dict[str, Any], user: str, *words: str) -> tuple[int, str]:
    certs = ROOT / NAME / 'certs' / user
    argv = ['etcdctl', f'--endpoints=https://{lab["etcd"]}', f'--cacert={certs}/ca.crt', f'--cert={certs}/client.crt']
    argv += [f'--key={certs}/client.key', *words]
    environ = {**make_environment(), 'ETCDCTL_API': '3'}
    result = subprocess.run(argv, capture_output=True, text=True, env=environ, timeout=30)
    return result.returncode, result.stdout + result.stderr


def list_hosts_with_role(lab: dict[str, Any], *hosts: str) -> list[str]:
    """Return the hosts whose ecompute may write its own key, but no other key and no flavor."""
    hosts_with_role = []
    for host in hosts:
        user, compute = f'compute-{host}', (ROOT / NAME / host / 'state/uuid').read_text().strip()
        keys = f'/hosts/{compute}/x', f'/hosts/{compute}0/x', '/flavors/x'
        if ['permission denied' in run_etcdctl(lab, user, 'del', key)[1] for key in keys] == [False, True, True]:
            hosts_with_role.append(host)
    return hosts_with_role


@pytest.mark.usefixtures('lab')
def test_exec_returns_output_and_exit_code() -> None:
    assert run_elab('exec', '--name', NAME, 'control', 'sh', '-c', 'echo out; exit 7', code=7).stdout == 'out\n'
    assert 'it has control, hv1' in run_elab('exec', '--name', NAME, 'hv9', 'true', code=4).stderr
    assert 'missing argument: the command' in run_elab('exec', '--name', NAME, 'hv1', code=2).stderr


@pytest.mark.usefixtures('lab')
@pytest.mark.slow
def test_removing_one_of_two_labs_keeps_the_other() -> None:
    names = [f'{NAME}a', f'{NAME}b']
    try:
        processes = [
            subprocess.Popen(make_command('up', '--name', n, '--hosts', '1'), env=make_environment()) for n in names
        ]
        assert [process.wait(180) for process in processes] == [0, 0]
        assert len({read_lab_json(name)['network'] for name in (*names, NAME)}) == 3
        for name in names:
            run_elab('status', '--name', name)
        link = read_lab_json(names[0])['link']
        run_elab('down', '--name', names[0])
        assert list_traces(names[0], link) == []
        run_elab('status', '--name', names[1])
        run_elab('status', '--name', NAME)
    finally:
        for name in names:
            run_elab('down', '--name', name)


def test_ecompute_is_limited_to_its_role(lab: dict[str, Any]) -> None:
    assert list_hosts_with_role(lab, 'hv1') == ['hv1']
    config, original = (ROOT / NAME / path / 'compute.yaml' for path in ('hv1', 'certs/compute-hv1'))
    assert load_compute(config).uuid == load_compute(original).uuid
    # The user of the lab's schedule.yaml may write everything.
    assert run_etcdctl(lab, 'operator-lab', 'put', '/flavors/x', 'x')[0] == 0
    assert run_etcdctl(lab, 'operator-lab', 'del', '/flavors/x')[0] == 0
    log = (ROOT / NAME / 'hv1/ecompute.log').read_text()
    assert 'does not let' not in log


@pytest.mark.usefixtures('lab')
def test_status_blames_a_frozen_etcd_and_not_the_computes() -> None:
    pid = read_lab_json(NAME)['processes']['etcd']['pid']
    os.kill(pid, signal.SIGSTOP)
    try:
        result = run_elab('status', '--name', NAME, code=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    states = {row[0]: row[2] for row in (line.split(maxsplit=2) for line in result.stdout.splitlines()[1:])}
    assert states['etcd'] == f'no answer (pid {pid})'
    assert states['hv1'].startswith('unknown: ecompute runs')
    assert result.stderr == f'no answer: etcd. Fix: {FIX_FOR_NO_ANSWER}'


@pytest.mark.usefixtures('lab')
def test_status_reports_a_frozen_libvirtd_without_waiting_for_it() -> None:
    pid = read_lab_json(NAME)['processes']['hv1 libvirtd']['pid']
    os.kill(pid, signal.SIGSTOP)
    try:
        result = run_elab('status', '--name', NAME, code=1)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert f'no answer: libvirtd (pid {pid}, see {ROOT / NAME}/hv1/libvirtd.log)' in result.stdout
    assert result.stderr == f'no answer: hv1. Fix: {FIX_FOR_NO_ANSWER}'


@pytest.mark.usefixtures('lab')
def test_up_makes_placement_use_a_new_certificate() -> None:
    certs = ROOT / NAME / 'certs'
    before, address = read_lab_json(NAME)['processes'], read_lab_json(NAME)['placement'].removeprefix('https://')

    def read_certificate() -> str:
        client = f'{certs}/operator-lab/client'
        words = ['openssl', 's_client', '-connect', address, '-cert', f'{client}.crt', '-key', f'{client}.key']
        reply = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)
        return reply.stdout.partition('-----BEGIN')[2].partition('-----END')[0].strip('- \n')

    assert read_certificate() in (certs / 'placement/server.crt').read_text()
    (certs / 'placement/server.crt').unlink()
    run_elab('up', '--name', NAME)
    new = (certs / 'placement/server.crt').read_text()
    wait_until(lambda: (now := read_certificate()) and now in new, 20, 'the new certificate is shown')
    assert read_lab_json(NAME)['processes'] == before


def test_roles_follow_a_new_uuid_and_a_new_host(lab: dict[str, Any]) -> None:
    config, new_uuid = ROOT / NAME / 'hv1/compute.yaml', str(uuid.uuid4())
    old_uuid = load_compute(config).uuid or ''
    config.write_text(config.read_text().replace(old_uuid, new_uuid))
    pid = read_lab_json(NAME)['processes']['hv1 ecompute']['pid']
    os.kill(pid, signal.SIGTERM)
    wait_until(lambda: machine.read_start_time(pid) is None, 30, 'ecompute is gone')
    full_inventory = load_compute(config).inventory or {}
    assert 'hv1: inventory reduced' in run_elab('up', '--name', NAME, '--hosts', '2').stderr
    configs = [load_compute(ROOT / NAME / host / 'compute.yaml') for host in ('hv1', 'hv2')]
    assert [host_config.queues for host_config in configs] == [True, False]
    assert sum((host_config.inventory or {})['MEMORY_MB'] for host_config in configs) <= full_inventory['MEMORY_MB']
    assert (ROOT / NAME / 'hv1/state/uuid').read_text().strip() == new_uuid
    assert list_hosts_with_role(lab, 'hv1', 'hv2') == ['hv1', 'hv2']
    assert 'permission denied' in run_etcdctl(lab, 'compute-hv1', 'del', f'/hosts/{old_uuid}/x')[1]
    rows = [line.split() for line in run_elab('status', '--name', NAME).stdout.splitlines()]
    assert [row[0] for row in rows][-2:] == ['hv1', 'hv2']


def test_down_removes_the_lab_and_keeps_other_processes(lab: dict[str, Any]) -> None:
    bystander = subprocess.Popen(['sleep', '600'], cwd=ROOT / NAME)
    try:
        run_elab('down', '--name', NAME)
        assert list_traces(NAME, lab['link']) == []
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# Leftovers of a killed `elab up`, of an earlier elab, and of manual mounts are reported and removed.


@pytest.mark.skipif(bool(describe_missing()), reason=describe_missing())
def test_lab_of_another_elab_version_can_be_removed() -> None:
    name = f'{NAME}old'
    (ROOT / name).mkdir(parents=True)
    (ROOT / name / 'lab.json').write_text('{"version": 1}')
    try:
        errors = run_elab('up', '--name', name, code=1).stderr
        fix = f'`elab down --name {name}`, then `elab up --name {name}`\n'
        assert f'has format version 1, but this elab supports only version 2. Fix: {fix}' in errors
    finally:
        run_elab('down', '--name', name)
    assert not (ROOT / name).exists()


@pytest.mark.skipif(bool(describe_missing()), reason=describe_missing())
def test_lab_killed_at_its_start_has_a_status() -> None:
    """Only lab.json exists: status reports all processes as down, and creates nothing."""
    name = f'{NAME}new'
    try:
        with machine.hold_lock(ROOT / name):
            state.load_or_create(name, 1)
        rows = run_elab('status', '--name', name, code=1).stdout.splitlines()
        assert [row.split()[2] for row in rows[1:]] == ['down'] * 5 + ['down:']
        assert [path.name for path in (ROOT / name).iterdir()] == ['lab.json']
    finally:
        run_elab('down', '--name', name)


DAEMONS = 'libvirtd', 'ecompute'


@pytest.mark.skipif(bool(describe_missing()), reason=describe_missing())
@pytest.mark.parametrize(
    'moment',
    ['nothing', 'control', 'etcd', *(pytest.param(f'hv1 {each}', marks=pytest.mark.slow) for each in DAEMONS)],
)
def test_down_removes_what_a_killed_up_has_made(moment: str) -> None:
    name = f'{NAME}k'

    def is_reached() -> bool:
        if moment == 'nothing':
            return (ROOT / name).exists()
        if moment == 'control':
            return Path(f'/run/netns/elab-{name}-control').exists()
        return moment in read_lab_json(name).get('processes', {})

    process = subprocess.Popen(
        make_command('up', '--name', name, '--hosts', '1'), env=make_environment(), stderr=subprocess.PIPE
    )
    try:
        wait_until(is_reached, 60, f'{moment} is there')
        process.kill()
        process.wait()
        link = read_lab_json(name).get('link', 'none')
    finally:
        process.kill()
        process.communicate()
        run_elab('down', '--name', name)

    assert list_traces(name, link) == []
    run_elab('down', '--name', name)  # no lab is not an error


@pytest.mark.skipif(bool(describe_missing()), reason=describe_missing())
def test_down_unmounts_a_file_system_in_use_and_keeps_its_files(tmp_path: Path) -> None:
    name = f'{NAME}m'
    mounted = ROOT / name / 'hv1/images'
    mounted.mkdir(parents=True)
    for each in ('mine', 'inner'):
        (tmp_path / each).mkdir()
    subprocess.run(['mount', '--bind', tmp_path, mounted], check=True)
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64k', 'none', mounted / 'inner'], check=True)
    with subprocess.Popen(['sleep', 'infinity'], cwd=mounted / 'inner') as user:
        try:
            messages = run_elab('down', '--name', name).stderr.splitlines()
            assert not (ROOT / name).exists()
        finally:
            user.kill()
            subprocess.run(['umount', '--quiet', '--lazy', mounted / 'inner', mounted], check=False)
            shutil.rmtree(ROOT / name, ignore_errors=True)
    assert messages[-3:-1] == [f'{mounted}/inner: unmounted', f'{mounted}: unmounted']
    assert sorted(path.name for path in tmp_path.iterdir()) == ['inner', 'mine']


# The route to a lab, in a new network namespace: an existing route is not replaced.


ROUTE_SCRIPT = """\
set -e
ip link add tun0 type bridge
ip link set tun0 up
ip route add {route}
exec "$@"
"""
ENSURE_SCRIPT = """\
from ipaddress import IPv4Network
from ecomp.errors import Conflict
from ecomp.lab import machine
from ecomp.lab.network import Layout

def ensured(*_):
    raise SystemExit('nothing is in the way')

machine._ensure_namespace = ensured
try:
    machine.ensure_control(Layout('one', IPv4Network('10.200.0.0/16')))
except Conflict as error:
    print(error)
"""
CONFLICT_MESSAGE = (
    "this machine has another route, by {by}, to the lab's network 10.200.0.0/16. Fix: remove that route, or run "
    '`elab down --name one`; then run `elab up --name one` again\n'
)


@pytest.mark.skipif(os.geteuid() != 0, reason='only root makes a network namespace')
@pytest.mark.parametrize(
    ('route', 'by'),
    [
        ('10.200.0.0/16 dev tun0', 'tun0'), ('10.200.0.0/16 dev tun0 metric 50', 'tun0'),
        ('blackhole 10.200.0.0/16', 'blackhole'), ('10.0.0.0/8 dev tun0', None), ('10.201.0.0/16 dev tun0', None),
    ],
)  # fmt: skip
def test_conflicting_route_is_reported_and_kept(route: str, by: str | None, tmp_path: Path) -> None:
    command = [
        'unshare',
        '--net',
        'sh',
        '-c',
        ROUTE_SCRIPT.format(route=route),
        'sh',
        sys.executable,
        '-c',
        ENSURE_SCRIPT,
    ]
    result = subprocess.run(command, cwd=tmp_path, env=make_environment(), capture_output=True, text=True, check=False)
    expected = ('', 'nothing is in the way\n') if by is None else (CONFLICT_MESSAGE.format(by=by), '')
    assert (result.stdout, result.stderr) == expected
