"""The cluster of a soak: a lab's control plane and hosts, fake ecomputes, and proxies.

A part that a fault keeps stopped is in `down`; restart_parts() restarts every other part that ends, as an init system
would. Only the main thread may call restart_parts(), begin() and end(): the fakes die with the thread that started
them.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import yaml

from bench.soak.history import History
from bench.soak.parts import ComputePart, FakePart, FakeServer, HostPart, LabPart, Part
from bench.soak.plan import Size
from ecomp.lab import certs, control, machine, state
from ecomp.lab.hosts import LabHost
from ecomp.lab.machine import ServerProcess
from ecomp.lab.network import ETCD_PORT, PLACEMENT_PORT
from tests.kit.boot_sectors import HALT, make_boot_disk
from tests.kit.commands import write_config
from tests.kit.lab import Lab
from tests.kit.proxy import Proxy
from tests.kit.servers import wait_until

FAKE_VCPUS = 3
# Guests for which all real hosts together have room.
MAX_GUESTS = 6
# Fakes that are started concurrently.
MAX_CONCURRENT_STARTS = 4
# Seconds before a part that ended by itself is restarted.
RESTART_DELAY_SECONDS = 1.0
# Seconds within which a process has to end after SIGTERM.
MAX_STOP_SECONDS = 90.0


class Cluster:
    """A running cluster; close() removes all of it."""

    def __init__(self, name: str, size: Size, directory: Path, history: History) -> None:
        self.size = size
        self.directory = directory
        self.history = history
        self.parts: dict[str, Part] = {}
        self.down: set[str] = set()
        self.stack = contextlib.ExitStack()
        try:
            # A lab has at least one host; with `hosts` 0 it is not used. A lab that fails to start removes itself.
            self.lab_driver = Lab(name, max(size.hosts, 1))
            self.stack.callback(self.lab_driver.close)
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        self.lab = state.load(self.lab_driver.name)
        layout, data = self.lab.layout, self.lab.directory / 'control'
        images = self.lab.directory / 'images'
        (images / 'idle.raw').write_bytes(make_boot_disk(HALT))
        self._start_control(data)
        self.proxies = {
            'etcd': self.stack.enter_context(Proxy(ETCD_PORT, str(layout.control))),
            'placement': self.stack.enter_context(Proxy(PLACEMENT_PORT, str(layout.control))),
        }
        self.direct = f'{layout.control}:{ETCD_PORT}', f'http://{layout.control}:{PLACEMENT_PORT}'
        self.proxied = self.proxies['etcd'].address, f'http://{self.proxies["placement"].address}'
        image = {'image': layout.images + 'idle.raw'}
        self.schedules = {
            False: write_config(self.directory / 'direct.yaml', *self.direct, **image),
            True: write_config(self.directory / 'proxied.yaml', *self.proxied, **image),
        }
        # The lab's own audit reads this configuration, too.
        write_config(self.lab.directory / 'schedule.yaml', *self.direct, **image)
        self.hosts = [LabHost(self.lab, name) for name in self.lab.hosts[: self.size.hosts]]
        for host in self.hosts:
            self._prepare_host(host)
        self.fakes: list[FakePart] = []
        for number in range(1, self.size.fakes + 1):
            self._start_fake(number)
        self._wait_ready(0)

    def _start_control(self, data: Path) -> None:
        """Restart etcd and placement on the same data without TLS.

        The proxies can find the request to lose only in plain text.
        """
        certs.disable_roles(self.lab.certs, lambda _: None)  # without TLS there are no users
        address, prefix = self.lab.address, self.lab.make_command_prefix('control')
        machine.terminate(self.lab.processes[name] for name in ('stunnel', 'placement', 'etcd'))
        etcd = control.make_etcd_server(data, [address, control.LOCALHOST], ETCD_PORT)
        servers = [etcd, *control.make_placement_servers(data, address, PLACEMENT_PORT, None)]
        for server in servers:
            self.lab.record_process(server.name, server.start(prefix))
        for server in servers:
            server.wait(self.lab.processes[server.name])
            self._add(LabPart(self.lab, server.name, partial(server.start, prefix), server.is_ready))

    def _prepare_host(self, host: LabHost) -> None:
        """Give a host its share of the guests and restart its ecompute with that inventory."""
        path = host.directory / 'compute.yaml'
        room = -(-MAX_GUESTS // self.size.hosts)
        settings = yaml.safe_load(path.read_text())
        settings['etcd'] = {'endpoints': [self.direct[0]], 'insecure': True}
        settings['placement'] = {'endpoint': self.direct[1], 'insecure': True}
        settings['inventory'] = {'VCPU': room, 'MEMORY_MB': 1024, 'DISK_GB': 2 * room}
        path.write_text(yaml.safe_dump(settings))
        name = f'{host.name} libvirtd'

        def start() -> ServerProcess:
            host.start_libvirt()
            return self.lab.processes[name]

        self._add(LabPart(self.lab, name, start, lambda _: host.is_libvirt_ready()))
        part = HostPart(host)
        part.send(signal.SIGTERM)
        wait_until(lambda: part.pid() is None, 60, f'{part.name} ends')
        self._add(part)
        self._launch(part)

    def _start_fake(self, number: int) -> None:
        # Every fifth connects through the proxies.
        endpoints = self.proxied if number % 5 == 0 else self.direct
        inventory = f'VCPU:{FAKE_VCPUS},DISK_GB:30,MEMORY_MB:4096'
        directory = self.directory / f'fake{number}'
        part = FakePart(f'fake{number}', FakeServer(*endpoints, inventory, directory))
        self.stack.callback(part.server.close)
        self.fakes.append(part)
        self._add(part)
        self._launch(part)
        self._wait_ready(MAX_CONCURRENT_STARTS - 1)

    def _add(self, part: Part) -> None:
        self.parts[part.name] = part
        part.is_ready = part.pid() is not None

    def _launch(self, part: Part) -> None:
        part.launch()
        part.changed_at = time.monotonic()
        part.is_ready = False
        part.expected_end = False

    def _wait_ready(self, max_not_ready: int) -> None:
        def are_ready() -> bool:
            self.restart_parts()
            return sum(not part.is_ready for part in self.parts.values()) <= max_not_ready

        wait_until(are_ready, 120, f'all parts but {max_not_ready} are ready')

    # Queries of the other modules

    def get_computes(self) -> dict[str, dict[str, object]]:
        """Return {uuid: {name, slots, real}} for every compute."""
        fakes = {fake.server.uuid: {'name': fake.name, 'slots': FAKE_VCPUS, 'real': False} for fake in self.fakes}
        room = -(-MAX_GUESTS // max(self.size.hosts, 1))
        return fakes | {
            self.lab_driver.read_compute(host.name): {'name': host.name, 'slots': room, 'real': True}
            for host in self.hosts
        }

    def get_compute_parts(self) -> dict[str, ComputePart]:
        """Return {uuid: part} for every compute."""
        hosts = {self.lab_driver.read_compute(host.name): self.parts[f'{host.name} ecompute'] for host in self.hosts}
        parts = {fake.server.uuid: fake for fake in self.fakes} | hosts
        return {uuid: part for uuid, part in parts.items() if isinstance(part, ComputePart)}

    def list_qemus(self, host: LabHost) -> list[tuple[str, int]]:
        """Return (instance, pid) for every QEMU of a host."""
        processes = []
        for path in sorted((host.directory / 'run/qemu').glob('*.pid')):
            with contextlib.suppress(OSError, ValueError):
                pid = int(path.read_text())
                if path.stem.encode() in Path(f'/proc/{pid}/cmdline').read_bytes():
                    processes.append((path.stem, pid))
        return processes

    def list_workers(self, host: LabHost) -> list[int]:
        """Return the worker processes of a host's ecompute."""
        pid = self.parts[f'{host.name} ecompute'].pid()
        with contextlib.suppress(OSError):
            children = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
            return [int(child) for child in children if b'spawn_main' in Path(f'/proc/{child}/cmdline').read_bytes()]
        return []

    def restart_parts(self) -> None:
        """Restart the parts that ended and are not in `down`, and note the parts that became ready."""
        for part in self.parts.values():
            if part.name in self.down:
                self._end_stuck(part)
                continue
            if part.pid() is None:
                if time.monotonic() - part.changed_at > RESTART_DELAY_SECONDS:
                    if not part.expected_end:
                        self.history.write('exit', part=part.name, code=part.code(), ready=part.is_ready)
                    self._launch(part)
            elif part.expected_end:
                self._end_stuck(part)
            elif not part.is_ready and part.ready():
                part.is_ready = True
                if part.fault is not None:
                    self.history.write('recovered', id=part.fault, seconds=round(time.monotonic() - part.changed_at, 3))
                    part.fault = None

    def _end_stuck(self, part: Part) -> None:
        if part.expected_end and part.pid() is not None and time.monotonic() - part.changed_at > MAX_STOP_SECONDS:
            self.history.write('stuck', part=part.name)
            part.send(signal.SIGKILL)

    def restore_all(self) -> None:
        """End all faults and wait until every part is ready."""
        for proxy in self.proxies.values():
            proxy.come_back()
        for host in self.hosts:
            self.set_link(host, 'up')
        for part in self.parts.values():
            part.send(signal.SIGCONT)
        self.down.clear()
        self._wait_ready(0)

    def set_link(self, host: LabHost, state: str) -> None:
        """Cut a host from the lab's LAN (`down`), or reconnect it (`up`)."""
        space = self.lab.layout.get_namespace('control')
        subprocess.run(['ip', '-n', space, 'link', 'set', host.name, state], check=True, timeout=10)

    def close(self) -> None:
        """Remove the cluster and keep the logs."""
        for part in self.parts.values():
            part.send(signal.SIGCONT)
            if isinstance(part, HostPart) and part.log.exists():
                shutil.copy(part.log, self.directory / f'{part.host.name}.log')
        self.stack.close()
