"""A lab for the scenario tests: real hypervisors, a real guest image, all planes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import ssl
import sys
import urllib.request
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import yaml

from ecomp.lab import elab, machine, state
from ecomp.lab.hosts import LabHost
from ecomp.lab.network import CONTROL
from tests.kit.audit import wait_audit_clean
from tests.kit.capabilities import keep_capabilities, provide_capabilities
from tests.kit.commands import Command, Result, run_eschedule
from tests.kit.gateway import Reply
from tests.kit.journal import JOURNAL
from tests.kit.placement_database import PlacementDatabase
from tests.kit.qemu_starts import note_qemu_starts
from tests.kit.servers import TOP, b64, wait_until
from tests.kit.witness import Witness, is_process_working

LABS_ROOT = Path('/var/lib/elab')
NOTIFIED_PATTERN = re.compile(r'NOTIFIED TARGET, (\S+), OF INSTANCE (\S+)')
# Seconds an emulated guest may take to get its address on a machine that is busy with other tests.
BOOT_SECONDS = 120.0


def make_lab_name(purpose: str) -> str:
    # tests/run finds leftover labs by this name.
    return f't{os.environ.get("ECOMP_TESTS", "")}-{purpose}{os.getpid()}'


class Lab:
    def __init__(self, name: str, hosts: int, prepare: Callable[[Path], None] = lambda _: None) -> None:
        """Start the lab. If that fails, warn of the reason, and start it once more.

        Before each start, `prepare` puts or mounts files in the lab's directory.
        """
        self.name = name
        self.is_audited = False
        try:
            self._start(hosts, prepare)
        except Exception as error:
            warnings.warn(f'lab {name} is started again, because: {error}', stacklevel=2)
            self._start(hosts, prepare)
        self.operator = self.directory / 'certs/operator-lab'
        self.facts = json.loads((self.directory / 'lab.json').read_text())
        self.hosts = [f'hv{number}' for number in range(1, hosts + 1)]
        self.witness = Witness(
            self.call_etcd, PlacementDatabase(self.directory / CONTROL / 'placement.sqlite'), self.is_working
        )

    def _start(self, hosts: int, prepare: Callable[[Path], None]) -> None:
        with machine.hold_lock(LABS_ROOT / self.name):
            self.directory = state.load_or_create(self.name, hosts).directory
        try:
            prepare(self.directory)
            for number in range(1, hosts + 1):
                provide_capabilities(self.directory / f'hv{number}/cache', 'lab')
            # Keep etcd's and placement's files in memory: writing them through to a disk is most of their cost.
            (self.directory / CONTROL).mkdir(parents=True)
            machine.run(['mount', '-t', 'tmpfs', 'tmpfs', str(self.directory / CONTROL)])
            self.run_elab('up', '--hosts', str(hosts))
            keep_capabilities(self.directory / 'hv1/cache', 'lab')
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        note_qemu_starts(self.directory)
        self.run_elab('down')

    def run_elab(self, command: str, *words: str) -> str:
        command_line = [sys.executable, '-m', 'ecomp.lab.elab', command, '--name', self.name, *words]
        with Command(command_line, TOP) as process:
            result = process.wait(600)
        assert result.code == 0, f'elab {command} {words}: {result.stdout}{result.stderr}'
        return result.stdout

    def run_on(self, host: str, *command: str) -> str:
        return machine.run(LabHost(state.load(self.name), host).make_command(list(command)))

    def virsh(self, host: str, *words: str) -> str:
        return self.run_on(host, 'virsh', '-q', '-c', 'qemu:///system', *words)

    def eschedule(self, *words: str, timeout: float = 300.0) -> Result:
        return run_eschedule(self.directory / 'schedule.yaml', *words, timeout=timeout)

    def make_url(self, name: str) -> str:
        return str(self.facts['images']) + name

    def place(self, query: str, *words: str) -> tuple[str, str]:
        result = self.eschedule(query, *words)
        notice = NOTIFIED_PATTERN.match(result.stdout)
        assert result.code == 0, result
        assert notice, result
        return self.find_host(notice[1]), notice[2]

    def read_compute(self, host: str) -> str:
        return (self.get_state_directory(host) / 'uuid').read_text().strip()

    def find_host(self, compute: str) -> str:
        return next(host for host in self.hosts if self.read_compute(host) == compute)

    def get_state_directory(self, host: str) -> Path:
        return self.directory / host / 'state'

    def read_log(self, host: str) -> str:
        return (self.directory / host / 'ecompute.log').read_text()

    def read_console(self, host: str, instance: str) -> str:
        log = self.get_state_directory(host) / 'console' / f'{instance}.log'
        return log.read_text(errors='replace') if log.exists() else ''

    def wait_guest_facts(self, host: str, instance: str) -> dict[str, list[str]]:
        """Wait until our small guest has reported everything, and return it: {fact: values}."""
        wait_until(
            lambda: 'ecomp-guest: ready' in self.read_console(host, instance),
            BOOT_SECONDS,
            f'{instance} says all about itself',
        )
        facts: dict[str, list[str]] = {}
        for line in self.read_console(host, instance).splitlines():
            if line.startswith('ecomp-guest: '):
                name, _, value = line.removeprefix('ecomp-guest: ').strip().partition(' ')
                facts.setdefault(name, []).append(value)
        return facts

    def wait_address(self, instance: str) -> str:
        def find_address() -> str:
            result = self.eschedule(instance)
            assert result.code in (0, 6), result
            return result.stdout.strip()

        return wait_until(find_address, BOOT_SECONDS, f'{instance} has an address')

    def list_domains(self, host: str) -> dict[str, str]:
        """Return {name: state} of a host's domains. Uncommon states are libvirt's numbers."""
        import libvirt

        from ecomp.virt.connection import IgnoredErrors

        state_names = {libvirt.VIR_DOMAIN_RUNNING: 'running', libvirt.VIR_DOMAIN_SHUTOFF: 'shut off'}
        with self._open_libvirt(host) as connection:
            states = {}
            for domain in connection.listAllDomains():
                with IgnoredErrors(libvirt.VIR_ERR_NO_DOMAIN):  # removed after it was listed
                    states[domain.name()] = domain.state()[0]
        return {name: state_names.get(state, str(state)) for name, state in states.items()}

    def read_domain(self, host: str, instance: str) -> ET.Element:
        with self._open_libvirt(host) as connection:
            return ET.fromstring(connection.lookupByName(instance).XMLDesc())

    @contextlib.contextmanager
    def _open_libvirt(self, host: str) -> Iterator[Any]:
        import libvirt

        # Use the socket's path, which works from outside: a process in the host's namespaces for each query costs more.
        with closing(
            libvirt.open(f'qemu+unix:///system?socket={self.directory}/{host}/run/libvirt-sock')
        ) as connection:
            yield connection

    def list_disks(self, host: str) -> set[str]:
        paths = (self.get_state_directory(host) / 'images').glob('*.qcow2')
        return {path.stem for path in paths if not path.name.startswith('base-')}

    def list_seeds(self, host: str) -> set[str]:
        return {path.stem for path in (self.get_state_directory(host) / 'seeds').glob('*.iso')}

    def get_placement(self, path: str) -> dict[str, Any]:
        return get_json(self.facts['placement'] + path, self.operator)

    def put_claim(self, instance: str, body: Mapping[str, Any]) -> None:
        certs = self.operator
        curl = ['curl', '-sS', '--fail', '--cacert', f'{certs}/ca.crt', '--cert', f'{certs}/client.crt']
        headers = ['content-type: application/json', f'x-auth-token: {(certs / "token").read_text().strip()}']
        headers += ['openstack-api-version: placement 1.39']
        options = [word for header in headers for word in ('-H', header)]
        url = f'{self.facts["placement"]}/allocations/{instance}'
        machine.run([*curl, '--key', f'{certs}/client.key', *options, '-X', 'PUT', '-d', json.dumps(body), url])

    def call_etcd(self, path: str, body: Mapping[str, Any]) -> Reply:
        return Reply(self.facts['etcd'], path, body, certs=self.operator)

    def is_working(self, compute: str) -> bool | None:
        """True if the ecompute of this uuid runs, None if it is on no host of this lab."""
        host = next((host for host in self.hosts if self.read_compute(host) == compute), None)
        return None if host is None else is_process_working(self.read_ecompute_pid(host))

    def read_etcd(self, prefix: str) -> dict[str, bytes]:
        start = prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])
        with self.call_etcd('kv/range', {'key': b64(start), 'range_end': b64(end)}) as answer:
            entries = json.loads(answer.read()).get('kvs', [])
        return {base64.b64decode(kv['key']).decode(): base64.b64decode(kv.get('value', '')) for kv in entries}

    def read_record(self, instance: str) -> bytes | None:
        values = [value for key, value in self.read_etcd('/instances/').items() if key.endswith(f'/{instance}')]
        return values[0] if values else None

    def put_key(self, key: str, value: str) -> None:
        body = {'key': b64(key), 'value': b64(value)}
        JOURNAL.record_write('kv/put', body)
        self.call_etcd('kv/put', body).close()

    def read_pid(self, process: str) -> int:
        facts = json.loads((self.directory / 'lab.json').read_text())
        return int(facts['processes'][process]['pid'])

    def read_ecompute_pid(self, host: str) -> int:
        return self.read_pid(f'{host} ecompute')

    def stop_ecompute(self, host: str, number: int = signal.SIGINT) -> None:
        self.stop_process(f'{host} ecompute', number)

    def stop_process(self, process: str, number: int = signal.SIGKILL) -> None:
        pid = self.read_pid(process)
        os.kill(pid, number)
        wait_until(lambda: not is_alive(pid), 60, f'{process} ends')

    def start_ecomputes(self) -> None:
        # elab up starts what is missing.
        self.run_elab('up')

    def wipe_etcd(self) -> None:
        self.stop_process('etcd')
        shutil.rmtree(self.directory / CONTROL / 'etcd')
        elab.start_control(state.load(self.name))

    @contextlib.contextmanager
    def change_config(self, host: str, **settings: Any) -> Iterator[str]:
        """Restart a host's ecompute with more settings, and restore them afterwards.

        It yields `in_tree=…`, which places an instance on this host.
        """
        config = self.directory / host / 'compute.yaml'
        before = config.read_text()
        self.stop_ecompute(host)
        config.write_text(yaml.safe_dump({**yaml.safe_load(before), **settings}))
        try:
            self.start_ecomputes()
            yield f'in_tree={self.read_compute(host)}'
        finally:
            self.stop_ecompute(host)
            config.write_text(before)
            self.start_ecomputes()

    def list_disagreements(self) -> list[str]:
        """List where libvirt, disks, placement and etcd disagree. Nothing may be in work."""
        problems = []
        records = {key.rsplit('/', 1)[1]: json.loads(value) for key, value in self.read_etcd('/instances/').items()}
        living = {name: record for name, record in records.items() if record['state'] not in ('gone', 'error')}
        requested = {tuple(key.split('/')[2:4]) for key in self.read_etcd('/hosts/')}
        booted = {key.rsplit('/', 1)[1] for key in self.read_etcd('/booted/')}
        problems += [f'{name}: request in work' for name in self.read_etcd('/requests/')]
        problems += [f'{name}: has an address and is not living' for name in booted - living.keys()]
        for host in self.hosts:
            compute = self.read_compute(host)
            expected = {name for name, record in living.items() if record['compute'] == compute}
            stopped = {name for name in expected if living[name]['state'] == 'stopped'}
            domains, disks = self.list_domains(host), self.list_disks(host)
            allocations = self.get_placement(f'/resource_providers/{compute}/allocations')['allocations']
            data = {
                json.loads(path.read_text())['instance']
                for path in (self.get_state_directory(host) / 'metadata').glob('*.json')
            }
            planes = {
                'domains': {n for n, state in domains.items() if state == ('shut off' if n in stopped else 'running')},
                'disks': disks,
                'allocations': set(allocations),
                'requests': {name for owner, name in requested if owner == compute},
                'guest data': data,
                'consoles': {path.stem for path in (self.get_state_directory(host) / 'console').glob('*.log')},
            }
            mismatches = {plane: actual for plane, actual in planes.items() if actual != expected}
            problems += [f'{host}: {plane} are {actual}, instances {expected}' for plane, actual in mismatches.items()]
            problems += self._check_sizes(host, allocations)
            partial_files = [path.name for path in self.get_state_directory(host).glob('*/*.part')]
            problems += [f'{host}: left over {name}' for name in partial_files]
            problems += [f'{host}: left over seed of {name}' for name in self.list_seeds(host) - expected]
        return problems

    def _check_sizes(self, host: str, allocations: dict[str, Any]) -> list[str]:
        problems = []
        for instance, allocation in allocations.items():
            domain = self.read_domain(host, instance)
            size = {'VCPU': int(domain.findtext('vcpu', '0')), 'MEMORY_MB': int(domain.findtext('memory', '0')) // 1024}
            claimed = {name: allocation['resources'][name] for name in size}
            if claimed != size:
                problems.append(f'{instance}: {claimed} claimed, its domain is {size}')
        return problems

    def check(self) -> None:
        problems: list[list[str]] = [[]]

        def agree() -> bool:
            problems[0] = self.list_disagreements()
            return not problems[0]

        try:
            wait_until(agree, 30, 'libvirt, disks, placement and etcd agree')
        except AssertionError as error:
            raise AssertionError('\n'.join([str(error), *problems[0]])) from None
        wait_audit_clean(self)

    def destroy(self, *instances: str) -> None:
        if instances:
            result = self.eschedule('destroy', '--wait', *instances)
            assert result.code == 0, result


def get_json(url: str, certs: Path) -> dict[str, Any]:
    context = ssl.create_default_context(cafile=str(certs / 'ca.crt'))
    context.load_cert_chain(certs / 'client.crt', certs / 'client.key')
    token = (certs / 'token').read_text().strip()
    headers = {'x-auth-token': token, 'openstack-api-version': 'placement 1.39'}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        value: dict[str, Any] = json.load(answer)
    return value


def is_alive(pid: int) -> bool:
    # A process holds its locks until its last thread has ended, so a zombie with threads counts as alive.
    try:
        state = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
        return state != 'Z' or len(os.listdir(f'/proc/{pid}/task')) > 1
    except OSError:
        return False


def is_serving(address: str) -> bool:
    try:
        with urllib.request.urlopen(f'http://{address}/', timeout=2) as answer:
            return b'ecomp-guest' in answer.read(1000)
    except OSError:
        return False
