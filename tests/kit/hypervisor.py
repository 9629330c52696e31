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

from ecomp.files import InstanceLocks, search_path
from ecomp.lab import machine, state
from ecomp.lab.hosts import LabHost
from tests.kit.boot_sectors import boot_disk
from tests.kit.lab import Lab, running
from tests.kit.process import is_stopped
from tests.kit.servers import until
from tests.kit.tuned import patched
from tests.kit.warm import Warm

SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
ROOM = {'VCPU': 12, 'MEMORY_MB': 2048, 'DISK_GB': 40}
# Seconds within which everything but a periodic check happens, on a machine that is busy with other tests.
SOON = 60.0
# Python's traceback in a worker whose ecompute was killed while starting it; none of our code has run yet.
STILLBORN = re.compile(r'Traceback .*\n(?:  .*\n)*.*spawn_main\n(?:  .*\n)+EOFError: Ran out of input\n')
# Seconds within which a process that logs a traceback has written all of its lines.
WRITTEN = 20.0
# The beginning of a line that ecompute or its metadata server logs.
LOGGED = re.compile(r'\d{4}-\d\d-\d\dT')
_numbers = itertools.count(1)


def without_stillborn(text: str) -> str:
    """Remove the matches of STILLBORN_TRACEBACK from a log.

    Their lines may be interleaved with those of an ecompute started afterwards.
    """
    lines = text.splitlines(keepends=True)
    remaining, count = STILLBORN.subn('', ''.join(line for line in lines if not LOGGED.match(line)))
    if not count or 'Traceback' in remaining:
        return text
    return ''.join(line for line in lines if LOGGED.match(line)) + remaining


class Hypervisor:
    """One host of a lab, whose ecompute is started here, with or without failpoints."""

    def __init__(self, lab: Lab, name: str) -> None:
        self.lab = lab
        self.name = name
        self.directory = lab.directory / name
        self.state = self.directory / 'state'
        self.compute = ''
        self.armed, self.tuned = '', False
        self._fired = self.directory / 'fired-0'
        self._from = 0

    # ecompute

    def launch(
        self, failpoint: str = '', *options: str, numbers: Mapping[str, float] | None = None, trace: Path | None = None
    ) -> None:
        """Start ecompute, armed with `failpoint` (see ecomp.failpoints), without waiting.

        For `numbers` and `trace` see tests/kit/tuned.py.
        """
        host = self._host()
        self.armed, self.tuned = failpoint, bool(numbers or trace)
        self._fired = self.directory / f'fired-{next(_numbers)}'
        paths = {'PATH': search_path(), 'PYTHONPATH': machine.python_path()}
        env = {**os.environ, **paths, 'ECOMP_FAILPOINT': failpoint, 'ECOMP_FAILPOINT_FIRED': str(self._fired)}
        self._from = host.log.stat().st_size if host.log.exists() else 0
        config = str(self.directory / 'compute.yaml')
        program = ['-c', patched(numbers or {}, trace)] if self.tuned else ['-m', 'ecomp.compute']
        command = [sys.executable, *program, '--config', config, *options]
        with host.log.open('ab') as log:
            # In virtlogd's namespaces, because virtlogd outlives libvirtd.
            inside = host.lab.processes[f'{self.name} virtlogd'].pid
            pid = Warm(command, self.directory, env, log.fileno(), log.fileno(), inside).pid
        host.lab.remember(self._ecompute, machine.Process(self._ecompute, pid, machine.started_at(pid) or 0))

    def wait_ready(self) -> None:
        def ready() -> bool:
            assert self.is_running, f'ecompute of {self.name} ended while starting:\n{self.said()[-2000:]}'
            return f' {self.pid} ready: ' in self.said()

        until(ready, SOON, f'ecompute of {self.name} is ready')

    def restart(self, failpoint: str = '', numbers: Mapping[str, float] | None = None) -> None:
        self.kill()
        self.launch(failpoint, numbers=numbers)
        self.wait_ready()

    def plain(self) -> None:
        """Make sure that ecompute runs and no failpoint will kill or freeze it."""
        exhausted = [f'{name}:{action}:1' for name in self.fired for action in ('kill', 'stop')]
        if not self.is_running or self.tuned or set(filter(None, self.armed.split(','))) - set(exhausted):
            self.restart()

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.is_running:
            os.kill(self.pid, number)
            self.ended()

    def ended(self) -> None:
        until(lambda: not self.is_running, SOON, f'ecompute of {self.name} ends')

    @property
    def pid(self) -> int:
        return self.lab.ecompute_pid(self.name)

    @property
    def is_running(self) -> bool:
        return running(self.pid)

    def mark(self) -> None:
        """Make read_log() begin here, until the next start."""
        self._from = self._host().log.stat().st_size

    def said(self) -> str:
        """Return ecompute's log since its start or mark_log(); it must not contain a traceback."""
        deadline = time.monotonic() + WRITTEN
        while re.search('Traceback|unexpected error', text := self._said()):
            assert time.monotonic() < deadline, text
            time.sleep(0.1)
        return text

    def _said(self) -> str:
        with self._host().log.open('rb') as file:
            file.seek(self._from)
            return without_stillborn(file.read().decode(errors='replace'))

    def lines(self, *words: str) -> list[str]:
        return [line for line in self.said().splitlines() if all(word in line for word in words)]

    def losses(self, what: str) -> tuple[int, int]:
        """Count the log lines that report `backend` lost, and those that report it back."""
        lost = self.lines(what, 'trying again until it is back')
        back = [line for line in self.lines(what, 'is back') if 'trying again' not in line]
        return len(lost), len(back)

    # Its failpoints

    @property
    def fired(self) -> list[str]:
        return [name for name, _ in self._firings()]

    def frozen_at(self, failpoint: str) -> int:
        """Wait until a process has frozen itself at the failpoint, and return its pid."""

        def find_frozen() -> int:
            pids = [pid for name, pid in self._firings() if name == failpoint and is_stopped(pid)]
            return pids[-1] if pids else 0

        return until(find_frozen, SOON, f'somebody is frozen at {failpoint}; fired: {self.fired}')

    def _firings(self) -> list[tuple[str, int]]:
        if not self._fired.exists():
            return []
        lines = [line.split() for line in self._fired.read_text().splitlines()]
        return [(name, int(pid)) for name, pid in lines]

    # Its workers

    def workers(self) -> list[int]:
        with contextlib.suppress(OSError):
            children = Path(f'/proc/{self.pid}/task/{self.pid}/children').read_text().split()
            return [int(pid) for pid in children if b'spawn_main' in Path(f'/proc/{pid}/cmdline').read_bytes()]
        return []

    def downloader(self) -> int:
        """Wait for a worker that has downloaded part of an image, and return its pid."""

        def find_downloader() -> int:
            for pid in self.workers():
                with contextlib.suppress(OSError):
                    for descriptor in Path(f'/proc/{pid}/fd').iterdir():
                        with contextlib.suppress(OSError):
                            if os.readlink(descriptor).endswith('.part') and os.stat(descriptor).st_size:
                                return pid
            return 0

        return until(find_downloader, SOON, f'a worker of {self.name} is downloading')

    def is_free(self, instance: str) -> bool:
        def fail() -> None:
            raise BlockingIOError

        try:
            with InstanceLocks(self.state).held(instance, fail):
                return True
        except BlockingIOError:
            return False

    # libvirt and QEMU

    def qemu(self, instance: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            pid = int((self.directory / f'run/qemu/{instance}.pid').read_text())
            if instance.encode() in Path(f'/proc/{pid}/cmdline').read_bytes() and running(pid):
                return pid
        return 0

    def qemus(self) -> list[str]:
        """List the instance of each running QEMU; an instance with two QEMUs is listed twice."""
        instances = []
        namespace = self._host().lab.layout.namespace(self.name)
        for pid in machine.run(['ip', 'netns', 'pids', namespace]).split():
            with contextlib.suppress(OSError):
                arguments = Path(f'/proc/{pid}/cmdline').read_bytes().split(b'\0')
                if arguments[0].endswith(b'qemu-system-x86_64') and b'-uuid' in arguments and running(int(pid)):
                    instances.append(arguments[arguments.index(b'-uuid') + 1].decode())
        return instances

    @property
    def libvirtd(self) -> int:
        return self._host().lab.processes[f'{self.name} libvirtd'].pid

    def end_libvirtd(self, number: int = signal.SIGKILL) -> None:
        pid = self.libvirtd
        os.kill(pid, number)
        until(lambda: not running(pid), SOON, f'libvirtd of {self.name} ends')

    def start_libvirtd(self) -> None:
        host = self._host()
        host.start_libvirt()
        host.wait_libvirt()

    def virsh(self, *words: str) -> str:
        return self.lab.virsh(self.name, *words)

    def crash(self) -> None:
        """Kill everything on the host, guests and daemons included, and remove its network."""
        host = self._host()
        namespace = host.lab.layout.namespace(self.name)

        def kill_all() -> bool:
            pids = [int(pid) for pid in machine.run(['ip', 'netns', 'pids', namespace]).split() if running(int(pid))]
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not pids

        until(kill_all, SOON, f'all of {self.name} has ended')
        # Removing the namespace also drops what is below /run: elab up recreates both.
        machine.remove([namespace], None)

    # Instances

    @property
    def query(self) -> str:
        return f'{SMALL}&in_tree={self.compute}'

    def place(self, image: str = 'idle.raw', *words: str) -> str:
        """Request an instance on this host without waiting, and return its uuid.

        `image` is a file of the lab or a URL.
        """
        url = image if '://' in image else self.lab.url(image)
        host, instance = self.lab.place(self.query, url, *words)
        assert host == self.name, instance
        return instance

    def running(self) -> str:
        instance = self.place()
        self.reached(instance, 'active')
        return instance

    def record(self, instance: str) -> dict[str, Any]:
        value = self.lab.record(instance)
        return dict(json.loads(value)) if value else {}

    def reached(self, instance: str, state: str, seconds: float = SOON, **fields: Any) -> dict[str, Any]:
        expected = {'state': state, **fields}
        record: dict[str, Any] = {}

        def is_reached() -> bool:
            record.clear()
            record.update(self.record(instance))
            return expected.items() <= record.items()

        try:
            until(is_reached, seconds, f'{instance} is {expected}')
        except AssertionError as error:
            raise AssertionError(f'{error}; it is {record}\n{self.said()[-3000:]}') from None
        return record

    def ask_destroy(self, *instances: str) -> None:
        result = self.lab.eschedule('destroy', *instances)
        assert result.code == 0, result

    def ask(self, action: str, instance: str) -> None:
        result = self.lab.eschedule(action, instance)
        assert result.code == 0, result

    def held(self, instance: str) -> dict[str, int]:
        allocations = self.lab.placement(f'/allocations/{instance}')['allocations']
        return dict(allocations.get(self.compute, {}).get('resources', {}))

    def disk(self, instance: str) -> Path:
        return self.state / 'images' / f'{instance}.qcow2'

    def nothing_of(self, instance: str) -> None:
        """Assert that nothing of an instance is left in any plane, and that its lock is free."""
        assert instance not in self.lab.domains(self.name)
        assert instance not in self.qemus()
        assert not self.disk(instance).exists()
        assert not list(self.state.glob(f'seeds/{instance}*'))
        assert not (self.state / f'console/{instance}.log').exists()
        assert not any(instance in path.read_text() for path in (self.state / 'metadata').glob('*.json'))
        assert instance not in self.virsh('net-dumpxml', 'default') + self.virsh('net-dumpxml', 'default', '--inactive')
        assert self.lab.placement(f'/allocations/{instance}')['allocations'] == {}
        assert self.lab.etcd(f'/hosts/{self.compute}/{instance}') == {}
        assert self.lab.etcd(f'/booted/{instance}') == {}
        assert self.is_free(instance)

    def settled(self) -> None:
        """Assert that all planes agree, the audit is clean, and each guest has one QEMU."""
        self.lab.check()
        instances = self.qemus()
        assert len(instances) == len(set(instances)), f'two QEMUs of one instance: {instances}'

    def clear(self) -> None:
        """Restore the state before the test: an empty host whose ecompute has no failpoints."""
        for pid in (*self.workers(), self.libvirtd):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        if not running(self.libvirtd):
            self.start_libvirtd()
        self.plain()
        requested = [key.rsplit('/', 1)[1] for key in self.lab.etcd(f'/hosts/{self.compute}/')]
        self.lab.destroy(*requested)
        records = self.lab.etcd('/instances/')
        self.lab.destroy(*(key.rsplit('/', 1)[1] for key in records if json.loads(records[key])['state'] == 'error'))

    @property
    def _ecompute(self) -> str:
        return f'{self.name} ecompute'

    def _host(self) -> LabHost:
        # Load it each time: elab, a separate process, rewrites it.
        return LabHost(state.load(self.lab.name), self.name)


@contextlib.contextmanager
def held(host: Hypervisor, instance: str) -> Iterator[None]:
    """Hold an instance's lock in this process, as an orphaned worker would."""
    with InstanceLocks(host.state).held(instance, lambda: None):
        yield


def put_image(host: Hypervisor, name: str, sector: bytes) -> str:
    (host.lab.directory / 'images' / name).write_bytes(boot_disk(sector))
    return name
