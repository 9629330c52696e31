"""Clusters of machines that boot, as the pages of docs/howto describe them."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit.booted import GATEWAY, PAGE, BootedMachine, Lan, explain_missing, read_page_packages, start_lan
from tests.kit.servers import TOP, Server, wait_until

BLOCK = re.compile(r'<!-- typed on: (\w+) -->\n```sh\n(.*?)```', re.DOTALL)
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
NOTIFIED = re.compile(r'NOTIFIED TARGET, (\S+), OF INSTANCE (\S+)')
# Seconds that an emulated guest may take on a busy machine.
BOOT_SECONDS = 600
# For bash: print the reply of an address to a GET of a path.
GET_SCRIPT = r"""exec 3<>"/dev/tcp/$1/80"; printf 'GET %s HTTP/1.0\r\n\r\n' "$2" >&3; timeout 5 cat <&3"""
METADATA = '169.254.169.254'


class ImageServer(Server):
    name = 'images'

    def __init__(self, machines: Lan, directory: Path) -> None:
        super().__init__(directory)
        self._machines = machines
        self.served = directory / 'served'
        self.served.mkdir()
        self.go = directory / 'go'

    def command(self) -> list[str]:
        program = ['-m', 'tests.kit.slow_images', GATEWAY, '80', str(self.served), str(self.go)]
        return self._machines.outer_machine.wrap_command([sys.executable, *program], TOP)

    def is_ready(self) -> bool:
        return 'ready' in self.tail_log()


@dataclass
class Cluster:
    control: BootedMachine
    hypervisors: dict[str, BootedMachine]
    images: ImageServer
    # The directory of eschedule on the control host.
    bin: str = '/opt/ecomp/bin'

    def eschedule(self, *words: str) -> str:
        return self.control.run('env', '-C', '/', f'{self.bin}/eschedule', *words)

    def place(self, name: str, host: str, image: str = 'guest.qcow2', *options: str, query: str = QUERY) -> str:
        output = self.eschedule(query, f'http://{GATEWAY}/{image}', '--name', name, '--on', host, *options)
        match = NOTIFIED.match(output)
        assert match, output
        return match[2]

    def wait(self, stage: str, *names: str) -> None:
        self.eschedule('wait', *names, '--for', stage, '--timeout', str(BOOT_SECONDS))

    def destroy(self, *names: str) -> None:
        self.eschedule('destroy', '--wait', *names)
        self.check_cluster()

    def check_cluster(self) -> None:
        """Check that eschedule finds only what the page announces: an old version of etcd."""
        done = self.control.run_unchecked('env', '-C', '/', f'{self.bin}/eschedule', 'check', '-f', 'json')
        assert [finding['code'] for finding in json.loads(done.stdout)] == ['etcd-version'], done
        assert done.returncode == 0, done

    def show_record(self, name: str) -> dict[str, Any]:
        return dict(json.loads(self.eschedule('show', name, '-f', 'json')))

    def read_states(self) -> dict[str, str]:
        return {row['host']: row['state'] for row in json.loads(self.eschedule('hosts', '-f', 'json'))}

    def wait_up(self, *hosts: str) -> None:
        wait_until(lambda: {self.read_states().get(host) for host in hosts} == {'up'}, 60, f'{hosts} are up')

    def is_answering(self, name: str) -> bool:
        guest_record = self.show_record(name)
        address = guest_record['addresses'][0]['address']
        reply = (
            self.hypervisors[guest_record['host']].run_unchecked('bash', '-c', GET_SCRIPT, 'bash', address, '/').stdout
        )
        return 'ecomp-guest' in reply

    def wait_ready_again(self, name: str) -> None:
        """Wait until a guest is ready again, whose host restarted it after a first reboot."""

        def is_ready_again() -> bool:
            last = self.show_record(name)['boots'][-1]
            return last['reason'] == 'host reboot' and 'ready' in last['stages']

        wait_until(is_ready_again, BOOT_SECONDS / 4, f'{name} is ready again')
        shown = self.show_record(name)
        assert (shown['state'], shown['fault'], shown['boots'][-1]['number']) == ('active', None, 2)
        assert self.is_answering(name)

    def read_console(self, name: str) -> str:
        host, _, path = self.show_record(name)['console'].partition(':')
        return self.hypervisors[host].run('cat', path)


def read_unit(booted: BootedMachine, name: str) -> dict[str, str]:
    lines = booted.run('systemctl', 'show', name).splitlines()
    return {key: value for key, _, value in (line.partition('=') for line in lines)}


def read_service_pid(booted: BootedMachine, name: str) -> int:
    properties = read_unit(booted, f'{name}.service')
    expected = {'Type': 'notify', 'ActiveState': 'active', 'SubState': 'running', 'UnitFileState': 'enabled'}
    assert {key: properties[key] for key in expected} == expected, booted.run('journalctl', '-u', name, '-n', '50')
    assert count_filters(booted, properties['MainPID']) > count_filters(booted, '1'), 'its system calls are filtered'
    return int(properties['MainPID'])


def count_filters(booted: BootedMachine, pid: str) -> int:
    """Return the number of seccomp filters, of which the machine, a container, has some."""
    status = booted.run('cat', f'/proc/{pid}/status')
    return int(status.partition('Seccomp_filters:')[2].split()[0])


def serves_metadata(hypervisor: BootedMachine) -> bool:
    return 'HTTP/1.' in hypervisor.run('bash', '-c', GET_SCRIPT, 'bash', METADATA, '/')


def read_guest_pids(hypervisor: BootedMachine) -> dict[str, int]:
    names = hypervisor.run('virsh', '-q', 'list', '--name').split()
    return {name: int(hypervisor.run('cat', f'/run/libvirt/qemu/{name}.pid')) for name in names}


def read_blocks(machine: str, page: Path = PAGE) -> list[str]:
    return [text for place, text in BLOCK.findall(page.read_text()) if place == machine]


@contextmanager
def boot_cluster(
    hosts: Mapping[str, str], release: str, directory: Path, images: Mapping[str, Path]
) -> Iterator[Cluster]:
    """Boot machines of a Debian release with nothing installed, and serve images to them."""
    assert not explain_missing(), explain_missing()
    with start_lan(hosts) as machines:
        server = ImageServer(machines, directory)
        for name, path in images.items():
            shutil.copyfile(path, server.served / name)
        server.go.touch()
        with server:
            control, *hypervisors = (machines.boot(name, release, read_page_packages()) for name in hosts)
            yield Cluster(control, {hypervisor.name: hypervisor for hypervisor in hypervisors}, server)
