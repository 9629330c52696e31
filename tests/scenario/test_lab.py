"""A lab with real hypervisors, and its guests.

The usual run boots few kernels, and each guest of it tells several stories: other boots are slow. Where a domain is
enough, its disk boots nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ecomp.agent.host.metadata import SERVER_UID
from ecomp.model.guest import make_network_config
from tests.kit.boot_sectors import HALT, make_boot_disk
from tests.kit.lab import BOOT_SECONDS, NOTIFIED_PATTERN, Lab, is_alive, is_serving, make_lab_name
from tests.kit.lab_fixtures import SSH_KEY
from tests.kit.servers import wait_until

# Real hypervisors: three hosts, with placement, build and destroy checked in libvirt, etcd and placement.


QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
# Too small for the guest's kernel: for disks that boot nothing.
SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'


def test_defaults_work_without_configuration(tmp_path: Path) -> None:
    """The defaults use fixed ports on localhost, so the test has its own network namespace."""
    space = make_lab_name('defaults')
    inside = ['ip', 'netns', 'exec', space, sys.executable, '-m']
    processes: list[subprocess.Popen[bytes]] = []

    def start(*words: str) -> None:
        with (tmp_path / f'{words[0]}.log').open('wb') as log:
            processes.append(subprocess.Popen([*inside, *words], cwd=tmp_path, stdout=log, stderr=log))

    def has_logged(module: str, words: str) -> bool:
        return words in (tmp_path / f'{module}.log').read_text()

    subprocess.run(['ip', 'netns', 'add', space], check=True)
    try:
        subprocess.run(['ip', '-n', space, 'link', 'set', 'lo', 'up'], check=True)
        start('ecomp.lab.elab', 'control')
        wait_until(
            lambda: has_logged('ecomp.lab.elab', 'placement http://localhost:8080'), 60, 'etcd and placement are ready'
        )
        start('ecomp.compute', '--fake', 'VCPU:1,DISK_GB:1,MEMORY_MB:64')
        wait_until(lambda: has_logged('ecomp.compute', ' ready: '), 30, 'ecompute is ready')
        eschedule = [*inside, 'ecomp.schedule', SMALL, '--wait']
        placed = subprocess.run(eschedule, cwd=tmp_path, capture_output=True, text=True)
        assert placed.returncode == 0, placed
        assert NOTIFIED_PATTERN.match(placed.stdout), placed
    finally:
        codes = []
        for process in reversed(processes):
            process.send_signal(signal.SIGINT)
            codes.append(process.wait(30))
        subprocess.run(['ip', 'netns', 'delete', space], check=True)
    assert codes == [0, 0], [path.read_text() for path in tmp_path.glob('*.log')]


def test_failed_build_leaves_nothing(lab: Lab) -> None:
    """Cases: an image that does not exist, one that is not a disk, and a full disk."""
    (lab.directory / 'images/page.qcow2').write_text('<!DOCTYPE html><title>not a disk</title>')
    pid = lab.read_ecompute_pid('hv3')
    images = lab.get_state_directory('hv3') / 'images'
    # The directory is full in the mount namespace of the workers only.
    mount = ['nsenter', '-t', str(pid), '-m']
    subprocess.run([*mount, 'mount', '-t', 'tmpfs', '-o', 'size=1m', 'tmpfs', str(images)], check=True)
    (lab.directory / 'images/large.raw').write_bytes(make_boot_disk(HALT) + os.urandom(2**22))
    cases = {
        'missing.qcow2': ('hv1', 'image', 'HTTP 404'),
        'page.qcow2': ('hv2', 'image', 'not a disk image'),
        'large.raw': ('hv3', 'image', 'No space left'),
    }
    try:
        for name, (host, stage, reason) in cases.items():
            query = f'{SMALL}&in_tree={lab.read_compute(host)}'
            done = lab.eschedule(query, lab.make_url(name), '--wait=started')
            instance = NOTIFIED_PATTERN.match(done.stdout)[2]  # type: ignore[index]
            assert done.code == 1
            assert f'failed at stage {stage}' in done.stderr
            result = lab.eschedule(instance)
            assert result.code == 1
            assert reason in result.stderr
            assert result.stdout == ''
            assert lab.get_placement(f'/allocations/{instance}')['allocations'] == {}
            assert not lab.read_etcd(f'/hosts/{lab.read_compute(host)}/{instance}')
            assert instance not in lab.list_domains(host)
            assert instance not in lab.list_disks(host)
            lab.check()
            assert lab.eschedule('destroy', instance).code == 0
            assert lab.read_record(instance) is None
            assert lab.eschedule(instance).code == 4
    finally:
        subprocess.run([*mount, 'umount', str(images)], check=True)
    _, instance = lab.place(f'{SMALL}&in_tree={lab.read_compute("hv3")}', lab.make_url('large.raw'), '--wait=started')
    assert _read_state(lab, instance) == 'active'


def _read_state(lab: Lab, instance: str) -> str:
    """Read the record from etcd: a command for each check would take more CPU than the guests."""
    return str(json.loads(lab.read_record(instance) or b'{}').get('state', ''))


# Small guests that really boot: their metadata by network and disk, their addresses, and their failures.


OTHER_KEY = 'ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEB other@lab'
SCRIPT = '#!/bin/sh\n# canary\necho "ecomp-guest: ran on $(hostname)"\nexit 3\n'


def test_guest_boots_with_its_metadata_stops_and_is_destroyed(lab: Lab) -> None:
    """One guest gets its data from mdserver.conf, and one beside it has its own."""
    host, instance = lab.place(QUERY, lab.make_url('guest.qcow2'), '--wait=started')
    own_guest = place_with_own_data(lab, host)
    # Its address is known before it boots, which takes seconds, and stays.
    (interface,) = _show_record(lab, instance)['addresses']
    address = interface['expected']
    if interface['address'] is None:
        result = lab.eschedule(instance)
        assert (result.code, result.stdout) in ((6, ''), (0, f'{address}\n'))
        assert lab.eschedule('show', instance).stdout.count(address) == 1
    assert lab.eschedule('wait', '--for', 'ready', instance).stdout == f'{address}\n'
    assert is_serving(address)
    record = _show_record(lab, instance)
    assert record['addresses'] == [{**interface, 'address': address, 'source': 'lease'}]
    assert record['console'] == f'{host}:{lab.get_state_directory(host)}/console/{instance}.log'
    assert record['state'] == 'active'
    stages = ['requested', 'scheduled', 'image', 'disk', 'started', 'addressed', 'ready']
    assert sorted(record['stages'], key=record['stages'].__getitem__) == stages

    wait_until(lambda: 'ecomp-guest: phoned' in lab.read_console(host, instance), 10, 'it has said so')
    reported = lab.wait_guest_facts(host, instance)
    assert reported['phoned'] == [f'http://169.254.169.254/phone-home/{instance}/']
    assert (reported['hostname'], reported['instance-id']) == ([f'vm-{instance[:8]}'], [instance])
    assert SSH_KEY in reported['key']
    assert any('#!/bin/sh' in line for line in reported['user-data'])
    assert reported['disk'] == [str(2**30)]
    assert f'eth0 {address}' in reported['address']
    # The metadata server runs as an unprivileged user, who cannot open the files that it serves.
    children = psutil.Process(lab.read_ecompute_pid(host)).children()
    assert [set(process.uids()) for process in children if 'mdserver.server' in process.cmdline()] == [
        {int(SERVER_UID)}
    ]
    own_data = lab.wait_guest_facts(host, own_guest)
    assert (own_data['instance-id'], own_data['hostname'], own_data['key']) == ([own_guest], ['web1'], [OTHER_KEY])
    assert own_data['user-data'] == SCRIPT.splitlines()
    assert any('"local-hostname": "web1"' in line for line in own_data['seed'])
    wait_until(
        lambda: 'ecomp-guest: ran on web1' in lab.read_console(host, own_guest), BOOT_SECONDS, 'its user-data was run'
    )
    assert lab.eschedule('web1').stdout == f'{lab.wait_address(own_guest)}\n'
    assert 'canary' not in lab.read_log(host)

    # That guest's user-data fails after its last line: it is reported, and the guest keeps running.
    problem = 'cloud-init failed at stage modules-final: user-data ended with 3; the guest keeps running'
    failed = lab.eschedule('wait', 'web1', '--for', 'ready')
    assert (failed.code, problem in failed.stderr) == (1, True), failed
    record = _show_record(lab, 'web1')
    assert (record['state'], 'ready' in record['stages']) == ('active', False)
    assert record['cloud_init'] == {'stage': 'modules-final', 'reason': 'user-data ended with 3'}
    assert is_serving(lab.wait_address('web1'))
    wait_until(lambda: 'ecomp-guest: phoned' in lab.read_console(host, own_guest), 10, 'it has said so')
    assert 'ecomp-guest: ran on web1' in lab.eschedule('log', 'web1').stdout.splitlines()
    assert lab.eschedule('log', 'web1', '-n', '1').stdout.startswith('ecomp-guest: phoned ')
    # The small guest has neither host keys nor an sshd.
    refused = lab.eschedule('ssh', 'web1')
    assert (refused.code, 'ssh cannot verify the guest' in refused.stderr) == (1, True)
    own_address = lab.wait_address('web1')
    assert is_leased(lab, host, own_address)
    lab.destroy('web1')
    assert not is_leased(lab, host, own_address)
    assert not lab.read_etcd('/names/')

    assert lab.list_domains(host)[instance] == 'running'
    compute = lab.read_compute(host)
    allocated = lab.get_placement(f'/allocations/{instance}')['allocations']
    assert allocated[compute]['resources'] == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 256}
    assert lab.read_etcd(f'/booted/{instance}') == {f'/booted/{instance}': address.encode()}
    assert list(lab.read_etcd(f'/hosts/{compute}/')) == [f'/hosts/{compute}/{instance}']
    assert f'INSTANTIATE INSTANCE {instance} WITH IMAGE {lab.make_url("guest.qcow2")}' in lab.read_log(host)
    lab.check()

    # The guest reacts to its power button.
    assert lab.eschedule('stop', '--wait', instance).code == 0
    assert lab.virsh(host, 'domstate', '--reason', instance).strip() == 'shut off (shutdown)'
    lab.check()

    assert is_leased(lab, host, address)
    assert lab.eschedule('destroy', '--wait', instance).code == 0
    assert not is_leased(lab, host, address)
    assert instance not in lab.list_domains(host)
    assert instance not in lab.list_disks(host)
    assert lab.get_placement(f'/allocations/{instance}')['allocations'] == {}
    assert not lab.read_etcd(f'/hosts/{compute}/')
    assert not lab.read_etcd('/booted/')


def is_leased(lab: Lab, host: str, address: str) -> bool:
    return f' {address}/' in lab.virsh(host, 'net-dhcp-leases', 'default')


def place_with_own_data(lab: Lab, host: str) -> str:
    (lab.directory / 'key.pub').write_text(OTHER_KEY + '\n')
    (lab.directory / 'user-data').write_text(SCRIPT)
    options = ['--name', 'web1', '--ssh-key', str(lab.directory / 'key.pub')]
    options += ['--user-data', str(lab.directory / 'user-data')]
    return lab.place(f'{QUERY}&in_tree={lab.read_compute(host)}', lab.make_url('guest.qcow2'), *options)[1]


@pytest.mark.slow
def test_address_stays_when_daemons_restart_and_the_guest_is_reset_or_rebooted(lab: Lab) -> None:
    host, instance = lab.place(QUERY, lab.make_url('guest.qcow2'), '--wait=ready')
    address = lab.wait_address(instance)
    # The host may hear of it before the guest's console does.
    wait_until(lambda: 'ecomp-guest: phoned' in lab.read_console(host, instance), BOOT_SECONDS, 'it says so')
    before = lab.wait_guest_facts(host, instance)
    allocated = lab.get_placement(f'/allocations/{instance}')['allocations']
    processes = json.loads((lab.directory / 'lab.json').read_text())['processes']
    libvirtd = int(processes[f'{host} libvirtd']['pid'])
    os.kill(libvirtd, signal.SIGTERM)
    wait_until(lambda: not is_alive(libvirtd), 30, 'libvirtd ends')
    lab.stop_ecompute(host, signal.SIGKILL)
    lab.start_ecomputes()
    lab.virsh(host, 'reset', instance)
    wait_until(
        lambda: lab.read_console(host, instance).count('ecomp-guest: phoned') == 2, BOOT_SECONDS, 'it boots again'
    )
    assert lab.wait_guest_facts(host, instance) == {name: 2 * values for name, values in before.items()}
    assert lab.read_etcd(f'/booted/{instance}') == {f'/booted/{instance}': address.encode()}

    # Each boot has its own address and readiness; a wait after a reboot waits for that boot.
    assert lab.eschedule('reboot', instance).code == 0
    assert lab.eschedule('wait', instance, '--for', 'ready', timeout=300).stdout == f'{address}\n'
    assert is_serving(address)
    assert lab.get_placement(f'/allocations/{instance}')['allocations'] == allocated
    (boot,) = _show_record(lab, instance)['boots']
    stages = boot['stages']
    assert (boot['reason'], list(stages)) == ('reboot', ['started', 'addressed', 'ready'])
    assert boot['previous_stop'] < stages['started'] < stages['addressed'] < stages['ready']
    lab.check()


@pytest.mark.slow
def test_resized_guest_sees_its_processors_and_memory_and_keeps_its_address(lab: Lab) -> None:
    script = lab.directory / 'size'
    script.write_text('#!/bin/sh\necho "size $(nproc) $(sed -n "s/MemTotal: *//p" /proc/meminfo)" >/dev/ttyS0\n')
    query, image = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:192', lab.make_url('guest.qcow2')
    host, instance = lab.place(query, image, '--user-data', str(script), '--wait=ready')
    address = lab.wait_address(instance)

    def read_sizes(count: int) -> list[tuple[int, int]]:
        found = wait_until(
            lambda: len(each := re.findall(r'size (\d+) (\d+) kB', lab.read_console(host, instance))) == count and each,
            BOOT_SECONDS,
            f'boot {count}',
        )
        return [(int(vcpus), int(kilobytes) // 1024) for vcpus, kilobytes in found]

    for boots, *words in ((1, 'resources=VCPU:2,MEMORY_MB:320', '--restart'), (2, 'resources=VCPU:1,MEMORY_MB:192')):
        read_sizes(boots)
        assert lab.eschedule('resize', instance, *words).code == 0
    # What the guest does itself gives it nothing.
    lab.virsh(host, 'reset', instance)
    read_sizes(3)
    assert lab.eschedule('reboot', instance, '--wait').code == 0
    vcpus, megabytes = zip(*read_sizes(4), strict=True)
    assert vcpus == (1, 2, 2, 1)
    # A kernel keeps some 30 MiB for itself.
    assert [round(each / 64 + 0.5) * 64 for each in megabytes] == [192, 320, 320, 192], megabytes
    assert lab.eschedule('wait', instance, '--for', 'ready').stdout == f'{address}\n'
    assert is_serving(address)
    lab.check()


@pytest.mark.slow
def test_unresized_disk_bridge_and_configured_uuid(lab: Lab) -> None:
    host, own_uuid = 'hv2', str(uuid.uuid4())
    config = lab.directory / host / 'compute.yaml'
    before = config.read_text()
    lab.stop_ecompute(host)
    config.write_text(yaml.safe_dump({**yaml.safe_load(before), 'resize': False, 'bridge': 'br0', 'uuid': own_uuid}))
    try:
        lab.start_ecomputes()
        assert lab.read_compute(host) == own_uuid
        placed, instance = lab.place(f'{QUERY}&in_tree={own_uuid}', lab.make_url('guest.qcow2'))
        assert placed == host
        lab.wait_address(instance)
        reported = lab.wait_guest_facts(host, instance)
        assert int(reported['disk'][0]) < 2**30
        macs = [interface['mac'] for interface in _show_record(lab, instance)['addresses']]
        assert json.loads('\n'.join(reported['network-config'])) == make_network_config(macs)
        interfaces = {line.split()[0]: line.split()[1] for line in reported['address']}
        assert set(interfaces) == {'eth0', 'eth1'}
        record = json.loads(lab.eschedule('show', instance, '-f', 'json').stdout)
        assert record['addresses'][0]['address'] == interfaces['eth0']
        assert [interface['network'] for interface in record['addresses']] == ['default', 'br0']
        wait_until(lambda: is_serving(interfaces['eth1']), 30, 'the bridged interface answers')
        assert record['addresses'][1]['expected'] is None, 'the LAN has a DHCP server of its own'
        lab.run_on(host, 'busybox', 'ping', '-c', '1', interfaces['eth1'])
        wait_until(lambda: _show_record(lab, instance)['addresses'][1]['address'], 30, 'the bridged address is found')
        mac = record['addresses'][1]['mac']
        shown = lab.eschedule('show', instance).stdout
        assert f'interface 1  {interfaces["eth1"]} ({mac} on br0, by arp)' in shown
        assert lab.wait_address(instance) == interfaces['eth0']
        lab.destroy(instance)
    finally:
        lab.stop_ecompute(host)
        config.write_text(before)
        (lab.get_state_directory(host) / 'uuid').unlink()
        lab.start_ecomputes()
        assert lab.eschedule('host', 'forget', '--fenced', own_uuid).code == 0  # else it is shown as closed


@pytest.mark.slow
def test_guest_on_bridges_alone_gets_metadata_from_its_disk(lab: Lab) -> None:
    """On bridges of a LAN alone a disk holds all metadata, and the guest does not phone home."""
    host = 'hv3'
    lab.run_on(host, 'ip', 'link', 'add', 'br1', 'type', 'bridge')
    lab.run_on(host, 'ip', 'link', 'set', 'br1', 'up')
    try:
        with lab.change_config(host, metadata='iso', networks=[{'bridge': 'br0'}, {'bridge': 'br1'}]) as in_tree:
            instance = lab.place(f'{QUERY}&{in_tree}', lab.make_url('guest.qcow2'), '--name', 'lan1', '--wait=started')[
                1
            ]
            reported = lab.wait_guest_facts(host, instance)
            assert (reported['instance-id'], reported['hostname'], reported['key']) == ([instance], ['lan1'], [SSH_KEY])
            macs = [interface['mac'] for interface in _show_record(lab, instance)['addresses']]
            assert len(macs) == 2
            assert json.loads('\n'.join(reported['network-config'])) == make_network_config(macs)
            wait_until(
                lambda: 'user-data ran' in lab.read_console(host, instance), BOOT_SECONDS, 'its user-data was run'
            )
            assert 'phone' not in lab.read_console(host, instance)
            assert lab.list_seeds(host) == {instance}
            serials = [entry.get('name') for entry in lab.read_domain(host, instance).iterfind('sysinfo/system/entry')]
            assert serials == ['uuid'], 'it is not told to ask the network'
        # A guest keeps its disk after compute.yaml has changed.
        assert lab.eschedule('stop', '--wait', instance).code == 0
        assert lab.eschedule('start', '--wait', instance).code == 0
        wait_until(lambda: lab.read_console(host, instance).count('user-data ran') == 2, BOOT_SECONDS, 'it boots again')
        lab.destroy(instance)
        assert lab.list_seeds(host) == set()
    finally:
        lab.run_on(host, 'ip', 'link', 'del', 'br1')


def _show_record(lab: Lab, instance: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(lab.eschedule('show', instance, '-f', 'json').stdout)
    return record


# The guest agent: it reports the address on a bridge, and a silent one delays nothing.


AGENT_QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:192'
# The part of qemu-guest-agent that libvirt uses: https://qemu.readthedocs.io/en/latest/interop/qemu-ga-ref.html
AGENT = """\
#!/bin/sh
for each in /sys/class/virtio-ports/*; do
    [ "$(cat $each/name)" = org.qemu.guest_agent.0 ] && port=/dev/${each##*/}
done
mac=$(cat /sys/class/net/eth1/address)
interface() {
    address=$(ip -4 -o addr show eth1 | sed 's/.*inet \\([0-9.]*\\).*/\\1/')
    echo '{"name": "eth1", "hardware-address": "'$mac'", "ip-addresses": [{"ip-address-type": "ipv4",' \\
        '"ip-address": "'$address'", "prefix": 24}]}'
}
agent() {
    exec 3<>$port
    while :; do
        while IFS= read -r line <&3; do
            case $line in
            *guest-sync*) echo '{"return": '$(echo "$line" | sed 's/.*"id": *\\([0-9]*\\).*/\\1/')'}' >&3 ;;
            *guest-network-get-interfaces*) echo '{"return": ['$(interface)']}' >&3; echo 'ecomp-guest: agent asked' ;;
            esac
        done
        sleep 1
    done
}
agent &
"""
SILENT_AGENT = AGENT.replace('agent() {', 'agent() {\n    exec 3<>$port; echo "ecomp-guest: silent agent"; sleep 3600')


def place_guest(lab: Lab, in_tree: str, name: str, script: str) -> str:
    file = lab.directory / f'{name}.sh'
    file.write_text(script)
    _, instance = lab.place(
        f'{AGENT_QUERY}&{in_tree}', lab.make_url('guest.qcow2'), '--name', name, '--user-data', str(file)
    )
    lab.wait_address(instance)
    return instance


def read_bridged_interface(lab: Lab, instance: str) -> dict[str, str | None]:
    record = json.loads(lab.eschedule('show', instance, '-f', 'json').stdout)
    interface: dict[str, str | None] = record['addresses'][1]
    return interface


@pytest.mark.slow
def test_guest_agent_reports_address_on_a_bridge(lab: Lab) -> None:
    with lab.change_config('hv1', bridge='br0') as in_tree:
        silent = place_guest(lab, in_tree, 'silent', SILENT_AGENT)
        wait_until(
            lambda: 'ecomp-guest: silent agent' in lab.read_console('hv1', silent),
            BOOT_SECONDS,
            'it opened its channel',
        )
        talking = place_guest(lab, in_tree, 'talking', AGENT)
        reported = dict(line.split() for line in lab.wait_guest_facts('hv1', talking)['address'])
        wait_until(lambda: read_bridged_interface(lab, talking)['address'], 60, 'its address is known')
        interface = read_bridged_interface(lab, talking)
        assert (interface['address'], interface['source']) == (reported['eth1'], 'agent')
        assert f'({interface["mac"]} on br0, by agent)' in lab.eschedule('show', talking).stdout
        assert 'ecomp-guest: agent asked' in lab.read_console('hv1', talking)
        assert read_bridged_interface(lab, silent)['address'] is None

        # Stopping, which may ask the agent first, does not wait for a silent one.
        assert lab.eschedule('stop', '--wait', silent).code == 0
        assert lab.virsh('hv1', 'domstate', '--reason', silent).strip() == 'shut off (shutdown)'
        lab.destroy(silent, talking)
        lab.check()
