"""A lab for the stories: real hypervisors, a real guest image, and ways to look at all planes from outside."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import signal
import ssl
import sys
import urllib.request
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from ecomp.errors import EcompError
from ecomp.lab import machine, state
from ecomp.lab.hosts import LabHost
from ecomp.lab.network import CONTROL
from tests.kit.audit import audit_clean
from tests.kit.commands import Command, Result, asked
from tests.kit.gateway import Reply
from tests.kit.journal import JOURNAL
from tests.kit.placement_database import PlacementDatabase
from tests.kit.servers import TOP, b64, until
from tests.kit.witness import Watched, process_works

ROOT = Path('/var/lib/elab')
NOTIFIED = re.compile(r'NOTIFIED TARGET, (\S+), OF INSTANCE (\S+)')
BOOT = 120.0
"""Seconds an emulated guest may take to its address while the machine is busy with others."""


def lab_name(what: str) -> str:
    """A name for a lab of this process: tests/run finds by it what was left up."""
    return f't{os.environ.get("ECOMP_TESTS", "")}-{what}{os.getpid()}'


def begun(name: str, hosts: int) -> Path:
    """The directory of a lab of which nothing but lab.json is there, so that something may be put or mounted in it."""
    with state.locked(ROOT / name):
        return state.load_or_create(name, hosts).directory


class Lab:
    """One lab, made by `elab up` and removed by close(). Everything is asked of the servers themselves."""

    def __init__(self, name: str, hosts: int) -> None:
        self.name = name
        self.audited = False
        self.directory = begun(name, hosts)
        self.operator = self.directory / 'certs/operator-lab'
        self._memory = self.directory / CONTROL
        self._memory.mkdir(parents=True)
        try:
            # etcd and placement write through to a disk, which costs more than all else they do.
            machine.run(['mount', '-t', 'tmpfs', 'tmpfs', str(self._memory)])
            self.elab('up', '--hosts', str(hosts))
        except BaseException:
            self.close()
            raise
        self.facts = json.loads((self.directory / 'lab.json').read_text())
        self.hosts = [f'hv{number}' for number in range(1, hosts + 1)]
        self.watched = Watched(self.ask, PlacementDatabase(self.directory / CONTROL / 'placement.sqlite'), self.works)

    def close(self) -> None:
        with contextlib.suppress(EcompError):  # it was not mounted yet
            machine.run(['umount', '-l', str(self._memory)])
        self.elab('down')

    def elab(self, command: str, *words: str) -> str:
        elab = [sys.executable, '-m', 'ecomp.lab.elab', command, '--name', self.name, *words]
        with Command(elab, TOP) as under_way:
            done = under_way.end(600)
        assert done.code == 0, f'elab {command} {words}: {done.stdout}{done.stderr}'
        return done.stdout

    def inside(self, host: str, *command: str) -> str:
        """Run a command on a host, as `elab exec` does; its standard output."""
        return machine.run(LabHost(state.load(self.name), host).command(list(command)))

    def virsh(self, host: str, *words: str) -> str:
        return self.inside(host, 'virsh', '-q', '-c', 'qemu:///system', *words)

    def eschedule(self, *words: str, timeout: float = 300.0) -> Result:
        return asked(self.directory / 'schedule.yaml', *words, timeout=timeout)

    def url(self, name: str) -> str:
        return str(self.facts['images']) + name

    def place(self, query: str, *words: str) -> tuple[str, str]:
        done = self.eschedule(query, *words)
        found = NOTIFIED.match(done.stdout)
        assert done.code == 0, done
        assert found, done
        return self.host_of(found[1]), found[2]

    def compute(self, host: str) -> str:
        return (self.state(host) / 'uuid').read_text().strip()

    def host_of(self, compute: str) -> str:
        return next(host for host in self.hosts if self.compute(host) == compute)

    def state(self, host: str) -> Path:
        return self.directory / host / 'state'

    def log(self, host: str) -> str:
        return (self.directory / host / 'ecompute.log').read_text()

    def console(self, host: str, instance: str) -> str:
        log = self.state(host) / 'console' / f'{instance}.log'
        return log.read_text(errors='replace') if log.exists() else ''

    def told(self, host: str, instance: str) -> dict[str, list[str]]:
        """What our small guest said of itself: {fact: values}, once it has said all."""
        until(lambda: 'ecomp-guest: ready' in self.console(host, instance), BOOT, f'{instance} says all about itself')
        facts: dict[str, list[str]] = {}
        for line in self.console(host, instance).splitlines():
            if line.startswith('ecomp-guest: '):
                name, _, value = line.removeprefix('ecomp-guest: ').strip().partition(' ')
                facts.setdefault(name, []).append(value)
        return facts

    def addressed(self, instance: str) -> str:
        def asked() -> str:
            done = self.eschedule(instance)
            assert done.code in (0, 6), done
            return done.stdout.strip()

        return until(asked, BOOT, f'{instance} has an address')

    def domains(self, host: str) -> dict[str, str]:
        """{name: state} of all domains on a host; what is neither running nor off is its number in libvirt."""
        import libvirt

        words = {libvirt.VIR_DOMAIN_RUNNING: 'running', libvirt.VIR_DOMAIN_SHUTOFF: 'shut off'}
        with self._libvirt(host) as connection:
            states = {each.name(): each.state()[0] for each in connection.listAllDomains()}
        return {name: words.get(state, str(state)) for name, state in states.items()}

    def domain(self, host: str, instance: str) -> ET.Element:
        with self._libvirt(host) as connection:
            return ET.fromstring(connection.lookupByName(instance).XMLDesc())

    @contextlib.contextmanager
    def _libvirt(self, host: str) -> Iterator[Any]:
        import libvirt

        # By its socket, which is a file out here too: a process in the host's namespaces for each question costs more.
        connection = libvirt.open(f'qemu+unix:///system?socket={self.directory}/{host}/run/libvirt-sock')
        try:
            yield connection
        finally:
            connection.close()

    def disks(self, host: str) -> set[str]:
        found = (self.state(host) / 'images').glob('*.qcow2')
        return {path.stem for path in found if not path.name.startswith('base-')}

    def seeds(self, host: str) -> set[str]:
        return {path.stem for path in (self.state(host) / 'seeds').glob('*.iso')}

    def placement(self, path: str) -> dict[str, Any]:
        return get_json(self.facts['placement'] + path, self.operator)

    def put_claim(self, instance: str, body: Mapping[str, Any]) -> None:
        own = self.operator
        curl = ['curl', '-sS', '--fail', '--cacert', f'{own}/ca.crt', '--cert', f'{own}/client.crt']
        headers = ['content-type: application/json', f'x-auth-token: {(own / "token").read_text().strip()}']
        headers += ['openstack-api-version: placement 1.39']
        words = [word for header in headers for word in ('-H', header)]
        url = f'{self.facts["placement"]}/allocations/{instance}'
        machine.run([*curl, '--key', f'{own}/client.key', *words, '-X', 'PUT', '-d', json.dumps(body), url])

    def ask(self, path: str, body: Mapping[str, Any]) -> Reply:
        return Reply(self.facts['etcd'], path, body, certs=self.operator)

    def works(self, compute: str) -> bool | None:
        """Whether the ecompute of this uuid runs; None: it is of no host here."""
        host = next((host for host in self.hosts if self.compute(host) == compute), None)
        return None if host is None else process_works(self.ecompute_pid(host))

    def etcd(self, prefix: str) -> dict[str, bytes]:
        start = prefix.encode()
        end = start[:-1] + bytes([start[-1] + 1])
        with self.ask('kv/range', {'key': b64(start), 'range_end': b64(end)}) as answer:
            found = json.loads(answer.read()).get('kvs', [])
        return {base64.b64decode(kv['key']).decode(): base64.b64decode(kv.get('value', '')) for kv in found}

    def record(self, instance: str) -> bytes | None:
        found = [value for key, value in self.etcd('/instances/').items() if key.endswith(f'/{instance}')]
        return found[0] if found else None

    def put(self, key: str, value: str) -> None:
        body = {'key': b64(key), 'value': b64(value)}
        JOURNAL.wrote('kv/put', body)
        self.ask('kv/put', body).close()

    def ecompute_pid(self, host: str) -> int:
        facts = json.loads((self.directory / 'lab.json').read_text())
        return int(facts['processes'][f'{host} ecompute']['pid'])

    def stop_ecompute(self, host: str, number: int = signal.SIGINT) -> None:
        pid = self.ecompute_pid(host)
        os.kill(pid, number)
        until(lambda: not running(pid), 60, f'the ecompute of {host} ends')

    def start_ecomputes(self) -> None:
        """Start what has been stopped: elab up does what is missing."""
        self.elab('up')

    @contextlib.contextmanager
    def configured(self, host: str, **settings: Any) -> Iterator[str]:
        """A host whose compute.yaml says this, too: `in_tree=…`, which places an instance there."""
        config = self.directory / host / 'compute.yaml'
        before = config.read_text()
        self.stop_ecompute(host)
        config.write_text(yaml.safe_dump({**yaml.safe_load(before), **settings}))
        try:
            self.start_ecomputes()
            yield f'in_tree={self.compute(host)}'
        finally:
            self.stop_ecompute(host)
            config.write_text(before)
            self.start_ecomputes()

    def disagreements(self) -> list[str]:
        """Where libvirt, the disks, placement and etcd tell different stories. Nothing may be in work."""
        found = []
        records = {key.rsplit('/', 1)[1]: json.loads(value) for key, value in self.etcd('/instances/').items()}
        living = {name: each for name, each in records.items() if each['state'] not in ('gone', 'error')}
        wished = {tuple(key.split('/')[2:4]) for key in self.etcd('/hosts/')}
        booted = {key.rsplit('/', 1)[1] for key in self.etcd('/booted/')}
        found += [f'{name}: request in work' for name in self.etcd('/requests/')]
        found += [f'{name}: has an address and is not living' for name in booted - living.keys()]
        for host in self.hosts:
            compute = self.compute(host)
            here = {name for name, each in living.items() if each['compute'] == compute}
            off = {name for name in here if living[name]['state'] == 'stopped'}
            domains, disks = self.domains(host), self.disks(host)
            held = self.placement(f'/resource_providers/{compute}/allocations')['allocations']
            data = {json.loads(path.read_text())['instance'] for path in (self.state(host) / 'metadata').glob('*.json')}
            planes = {
                'domains': {n for n, state in domains.items() if state == ('shut off' if n in off else 'running')},
                'disks': disks,
                'allocations': set(held),
                'requests': {name for owner, name in wished if owner == compute},
                'guest data': data,
                'consoles': {path.stem for path in (self.state(host) / 'console').glob('*.log')},
            }
            wrong = {plane: there for plane, there in planes.items() if there != here}
            found += [f'{host}: {plane} are {there}, instances {here}' for plane, there in wrong.items()]
            found += self._sizes(host, held)
            parts = [path.name for path in self.state(host).glob('*/*.part')]
            found += [f'{host}: left over {name}' for name in parts]
            found += [f'{host}: left over seed of {name}' for name in self.seeds(host) - here]
        return found

    def _sizes(self, host: str, held: dict[str, Any]) -> list[str]:
        found = []
        for instance, each in held.items():
            domain = self.domain(host, instance)
            size = {'VCPU': int(domain.findtext('vcpu', '0')), 'MEMORY_MB': int(domain.findtext('memory', '0')) // 1024}
            claimed = {name: each['resources'][name] for name in size}
            if claimed != size:
                found.append(f'{instance}: {claimed} claimed, its domain is {size}')
        return found

    def check(self) -> None:
        """All planes agree, soon, and ecomp's own audit finds nothing."""
        seen: list[list[str]] = [[]]

        def agree() -> bool:
            seen[0] = self.disagreements()
            return not seen[0]

        try:
            until(agree, 30, 'libvirt, disks, placement and etcd agree')
        except AssertionError as error:
            raise AssertionError('\n'.join([str(error), *seen[0]])) from None
        audit_clean(self)

    def destroy(self, *instances: str) -> None:
        if instances:
            done = self.eschedule('destroy', '--wait', *instances)
            assert done.code == 0, done


def get_json(url: str, certs: Path) -> dict[str, Any]:
    """What etcd or placement answers to a GET of whoever has the certificate and the token in this directory."""
    context = ssl.create_default_context(cafile=str(certs / 'ca.crt'))
    context.load_cert_chain(certs / 'client.crt', certs / 'client.key')
    token = (certs / 'token').read_text().strip()
    headers = {'x-auth-token': token, 'openstack-api-version': 'placement 1.39'}
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    with opener.open(urllib.request.Request(url, headers=headers), timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def running(pid: int) -> bool:
    """True while a process lives (a zombie does not), or a thread of it: until the last has ended, it has its locks."""
    try:
        state = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]
        return state != 'Z' or len(os.listdir(f'/proc/{pid}/task')) > 1
    except OSError:
        return False


def answers(address: str) -> bool:
    """True if the guest's own little server answers, which is asked from this machine through the lab."""
    try:
        with urllib.request.urlopen(f'http://{address}/', timeout=2) as answer:
            return b'ecomp-guest' in answer.read(1000)
    except OSError:
        return False
