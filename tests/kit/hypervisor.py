"""A real host of the fault tests: its ecompute with failpoints, workers, QEMUs, libvirtd."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ecomp.files import InstanceLocks, get_search_path
from ecomp.lab import machine, state
from ecomp.lab.hosts import LabHost
from tests.kit.boot_sectors import make_boot_disk
from tests.kit.lab import Lab, is_alive
from tests.kit.process import is_stopped
from tests.kit.servers import wait_until
from tests.kit.tuned import make_patched_program
from tests.kit.warm import WarmProcess

SMALL_QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
HOST_INVENTORY = {'VCPU': 12, 'MEMORY_MB': 2048, 'DISK_GB': 40}
# Seconds within which everything but a periodic check happens, on a machine that is busy with other tests.
REACTION_SECONDS = 60.0
# Python's traceback in a worker whose ecompute was killed while starting it; none of our code has run yet.
STILLBORN_TRACEBACK = re.compile(r'Traceback .*\n(?:  .*\n)*.*spawn_main\n(?:  .*\n)+EOFError: Ran out of input\n')
# Seconds within which a process that logs a traceback has written all of its lines.
LOG_FLUSH_SECONDS = 20.0
# The beginning of a line that ecompute or its metadata server logs.
LOG_LINE_START = re.compile(r'\d{4}-\d\d-\d\dT')
_numbers = itertools.count(1)


def drop_stillborn_tracebacks(text: str) -> str:
    # The lines of a match may be interleaved with those of an ecompute started afterwards.
    lines = text.splitlines(keepends=True)
    remaining, count = STILLBORN_TRACEBACK.subn('', ''.join(line for line in lines if not LOG_LINE_START.match(line)))
    if not count or 'Traceback' in remaining:
        return text
    return ''.join(line for line in lines if LOG_LINE_START.match(line)) + remaining


class Hypervisor:
    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.directory = lab.directory / name
        self.state = self.directory / 'state'
        self.compute = ''
        self.armed_failpoint, self.is_tuned = '', False
        self._fired_path = self.directory / 'fired-0'
        self._log_offset = 0

    # ecompute

    def launch(self, failpoint: str = '', *options: str, numbers: Mapping[str, float] | None = None) -> None:
        """Start ecompute without waiting. For `numbers` see tests/kit/tuned.py."""
        host = self._load_host()
        self.armed_failpoint, self.is_tuned = failpoint, bool(numbers)
        self._fired_path = self.directory / f'fired-{next(_numbers)}'
        paths = {'PATH': get_search_path(), 'PYTHONPATH': machine.make_python_path()}
        env = {**os.environ, **paths, 'ECOMP_FAILPOINT': failpoint, 'ECOMP_FAILPOINT_FIRED': str(self._fired_path)}
        self._log_offset = host.log.stat().st_size if host.log.exists() else 0
        config = str(self.directory / 'compute.yaml')
        program = ['-c', make_patched_program(numbers or {})] if self.is_tuned else ['-m', 'ecomp.compute']
        command = [sys.executable, *program, '--config', config, *options]
        with host.log.open('ab') as log:
            # In virtlogd's namespaces, because virtlogd outlives libvirtd.
            inside = host.lab.processes[f'{self.name} virtlogd'].pid
            pid = WarmProcess(command, self.directory, env, log.fileno(), log.fileno(), inside).pid
        host.lab.record_process(
            self._process_name, machine.ServerProcess(self._process_name, pid, machine.read_start_time(pid) or 0)
        )

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.is_running, f'ecompute of {self.name} ended while starting:\n{self.read_log()[-2000:]}'
            return f' {self.pid} ready: ' in self.read_log()

        wait_until(ready, REACTION_SECONDS, f'ecompute of {self.name} is ready')

    def restart(self, failpoint: str = '', numbers: Mapping[str, float] | None = None) -> None:
        self.kill()
        self.launch(failpoint, numbers=numbers)
        self.wait_ready()

    def ensure_unarmed(self) -> None:
        exhausted = [f'{name}:{action}:1' for name in self.fired_failpoints for action in ('kill', 'stop')]
        if not self.is_running or self.is_tuned or set(filter(None, self.armed_failpoint.split(','))) - set(exhausted):
            self.restart()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.is_running:
            os.kill(self.pid, number)
            self.wait_ended()

    def wait_ended(self) -> None:
        wait_until(lambda: not self.is_running, REACTION_SECONDS, f'ecompute of {self.name} ends')

    @property
    def pid(self) -> int:
        return self.lab.read_ecompute_pid(self.name)

    @property
    def is_running(self) -> bool:
        return is_alive(self.pid)

    def mark_log(self) -> None:
        """Make read_log() begin here, until the next start."""
        self._log_offset = self._load_host().log.stat().st_size

    def read_log(self) -> str:
        """Return ecompute's log since its start or mark_log(). It must not contain a traceback."""
        deadline = time.monotonic() + LOG_FLUSH_SECONDS
        while re.search('Traceback|unexpected error', text := self._read_log_text()):
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        return text

    def _read_log_text(self) -> str:
        with self._load_host().log.open('rb') as file:
            file.seek(self._log_offset)
            return drop_stillborn_tracebacks(file.read().decode(errors='replace'))

    def find_log_lines(self, *words: str) -> list[str]:
        return [line for line in self.read_log().splitlines() if all(word in line for word in words)]

    def count_losses(self, backend: str) -> tuple[int, int]:
        lost = self.find_log_lines(backend, 'trying again until it is back')
        back = [line for line in self.find_log_lines(backend, 'is back') if 'trying again' not in line]
        return len(lost), len(back)

    # Its failpoints

    @property
    def fired_failpoints(self) -> list[str]:
        return [name for name, _ in self._read_firings()]

    def wait_frozen_at(self, failpoint: str) -> int:
        """Wait until a process has frozen itself at the failpoint, and return its pid."""

        def find_frozen() -> int:
            pids = [pid for name, pid in self._read_firings() if name == failpoint and is_stopped(pid)]
            return pids[-1] if pids else 0

        return wait_until(
            find_frozen, REACTION_SECONDS, f'somebody is frozen at {failpoint}; fired: {self.fired_failpoints}'
        )

    def _read_firings(self) -> list[tuple[str, int]]:
        if not self._fired_path.exists():
            return []
        lines = [line.split() for line in self._fired_path.read_text().splitlines()]
        return [(name, int(pid)) for name, pid in lines]

    # Its workers

    def list_workers(self) -> list[int]:
        with contextlib.suppress(OSError):
            children = Path(f'/proc/{self.pid}/task/{self.pid}/children').read_text().split()
            return [int(pid) for pid in children if b'spawn_main' in Path(f'/proc/{pid}/cmdline').read_bytes()]
        return []

    def wait_downloader(self) -> int:
        """Wait for a worker that has downloaded part of an image, and return its pid."""

        def find_downloader() -> int:
            for pid in self.list_workers():
                with contextlib.suppress(OSError):
                    for descriptor in Path(f'/proc/{pid}/fd').iterdir():
                        with contextlib.suppress(OSError):
                            if os.readlink(descriptor).endswith('.part') and os.stat(descriptor).st_size:
                                return pid
            return 0

        return wait_until(find_downloader, REACTION_SECONDS, f'a worker of {self.name} is downloading')

    def is_free(self, instance: str) -> bool:
        def fail() -> None:
            raise BlockingIOError

        try:
            with InstanceLocks(self.state).hold(instance, fail):
                return True
        except BlockingIOError:
            return False

    # libvirt and QEMU

    def find_qemu(self, instance: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.directory / f'run/qemu/{instance}.pid').read_text())
            if instance.encode() in Path(f'/proc/{pid}/cmdline').read_bytes() and is_alive(pid):
                return pid
        return 0

    def list_qemus(self) -> list[str]:
        """List the instance of each running QEMU. One with two QEMUs is listed twice."""
        instances = []
        namespace = self._load_host().lab.layout.get_namespace(self.name)
        for pid in machine.run(['ip', 'netns', 'pids', namespace]).split():
            with contextlib.suppress(OSError):
                arguments = Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0')
                if arguments[0].endswith(b'qemu-system-x86_64') and b'-uuid' in arguments and is_alive(int(pid)):
                    instances.append(arguments[arguments.index(b'-uuid') + 1].decode())
        return instances

    @property
    def libvirtd_pid(self) -> int:
        return self._load_host().lab.processes[f'{self.name} libvirtd'].pid

    def kill_libvirtd(self, number: int = signal.SIGKILL) -> None:
        pid = self.libvirtd_pid
        os.kill(pid, number)
        wait_until(lambda: not is_alive(pid), REACTION_SECONDS, f'libvirtd of {self.name} ends')

    def start_libvirtd(self) -> None:
        host = self._load_host()
        host.start_libvirt()
        host.wait_libvirt()

    def virsh(self, *words: str) -> str:
        return self.lab.virsh(self.name, *words)

    def crash(self) -> None:
        """Kill everything on the host, guests and daemons included, and remove its network."""
        host = self._load_host()
        namespace = host.lab.layout.get_namespace(self.name)

        def kill_all() -> bool:
            pids = [int(pid) for pid in machine.run(['ip', 'netns', 'pids', namespace]).split() if is_alive(int(pid))]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        wait_until(kill_all, REACTION_SECONDS, f'all of {self.name} has ended')
        # Removing the namespace also drops what is below /run: elab up recreates both.
        machine.remove_namespaces([namespace], None)

    # Instances

    @property
    def query(self) -> str:
        return f'{SMALL_QUERY}&in_tree={self.compute}'

    def place(self, image: str = 'idle.raw', *words: str) -> str:
        url = image if '://' in image else self.lab.make_url(image)
        host, instance = self.lab.place(self.query, url, *words)
        assert host == self.name, instance
        return instance

    def start_instance(self) -> str:
        instance = self.place()
        self.wait_state(instance, 'active')
        return instance

    def read_record(self, instance: str) -> dict[str, Any]:
        value = self.lab.read_record(instance)
        return dict(json.loads(value)) if value else {}

    def wait_state(self, instance: str, state: str, seconds: float = REACTION_SECONDS, **fields: Any) -> dict[str, Any]:
        expected = {'state': state, **fields}
        record: dict[str, Any] = {}

        def is_reached() -> bool:
            record.clear()
            record.update(self.read_record(instance))
            return expected.items() <= record.items()

        try:
            wait_until(is_reached, seconds, f'{instance} is {expected}')
        except AssertionError as error:
            raise AssertionError(f'{error}; it is {record}\n{self.read_log()[-3000:]}') from None
        return record

    def request_destroy(self, *instances: str) -> None:
        result = self.lab.eschedule('destroy', *instances)
        assert result.code == 0, result

    def request_action(self, action: str, instance: str) -> None:
        result = self.lab.eschedule(action, instance)
        assert result.code == 0, result

    def read_allocation(self, instance: str) -> dict[str, int]:
        allocations = self.lab.get_placement(f'/allocations/{instance}')['allocations']
        return dict(allocations.get(self.compute, {}).get('resources', {}))

    def get_disk_path(self, instance: str) -> Path:
        return self.state / 'images' / f'{instance}.qcow2'

    def assert_removed(self, instance: str) -> None:
        """Assert that nothing of an instance is left in any plane, and that its lock is free."""
        assert instance not in self.lab.list_domains(self.name)
        assert instance not in self.list_qemus()
        assert not self.get_disk_path(instance).exists()
        assert not list(self.state.glob(f'seeds/{instance}*'))
        assert not (self.state / f'console/{instance}.log').exists()
        assert not any(instance in path.read_text() for path in (self.state / 'metadata').glob('*.json'))
        assert instance not in self.virsh('net-dumpxml', 'default') + self.virsh('net-dumpxml', 'default', '--inactive')
        assert self.lab.get_placement(f'/allocations/{instance}')['allocations'] == {}
        assert self.lab.read_etcd(f'/hosts/{self.compute}/{instance}') == {}
        assert self.lab.read_etcd(f'/booted/{instance}') == {}
        assert self.is_free(instance)

    def check_settled(self) -> None:
        self.lab.check()
        instances = self.list_qemus()
        assert len(instances) == len(set(instances)), f'two QEMUs of one instance: {instances}'

    def reset(self) -> None:
        for pid in (*self.list_workers(), self.libvirtd_pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if not is_alive(self.libvirtd_pid):
            self.start_libvirtd()
        self.ensure_unarmed()
        requested = [key.rsplit('/', 1)[1] for key in self.lab.read_etcd(f'/hosts/{self.compute}/')]
        self.lab.destroy(*requested)
        records = self.lab.read_etcd('/instances/')
        self.lab.destroy(*(key.rsplit('/', 1)[1] for key in records if json.loads(records[key])['state'] == 'error'))

    @property
    def _process_name(self) -> str:
        return f'{self.name} ecompute'

    def _load_host(self) -> LabHost:
        # Load it each time: elab, a separate process, rewrites it.
        return LabHost(state.load(self.lab.name), self.name)


@contextlib.contextmanager
def hold_lock(host: Hypervisor, instance: str) -> Iterator[None]:
    """Hold an instance's lock in this process, as an orphaned worker would."""
    with InstanceLocks(host.state).hold(instance, lambda: None):
        yield


def put_image(host: Hypervisor, name: str, sector: bytes) -> str:
    (host.lab.directory / 'images' / name).write_bytes(make_boot_disk(sector))
    return name
