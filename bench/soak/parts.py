"""The processes of a soak's cluster that faults end and freeze: how to start and probe them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ecomp.lab import machine, state
from ecomp.lab.hosts import LabHost
from ecomp.lab.machine import ServerProcess
from tests.kit.commands import Ecompute


class Part:
    """A process that should run.

    `code()` is its exit code if it is a child of this process and has ended.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.armed: dict[str, str] = {}
        self.changed_at = 0.0
        self.expected_end = False
        self.is_ready = False
        self.fault: int | None = None

    def pid(self) -> int | None:
        """Return its process id, or None once it has ended."""
        raise NotImplementedError

    def launch(self) -> None:
        """Start it with the failpoints in `armed`."""
        raise NotImplementedError

    def ready(self) -> bool:
        """Probe if it is ready."""
        raise NotImplementedError

    def code(self) -> int | None:
        return None

    def send(self, number: int) -> bool:
        """Send it a signal; return False if it has ended."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, number)
        return pid is not None


class ComputePart(Part):
    """An ecompute, fake or real; it is ready once its log reports that."""

    def __init__(self, name: str, log: Path) -> None:
        super().__init__(name)
        self.log = log
        self._log_offset = 0

    def mark_log(self) -> None:
        """Ignore everything that the log contains so far."""
        self._log_offset = self.log.stat().st_size if self.log.exists() else 0

    def ready(self) -> bool:
        pid = self.pid()
        if pid is None or not self.log.exists():
            return False
        with self.log.open('rb') as file:
            file.seek(self._log_offset)
            return f' {pid} ready: '.encode() in file.read()


class FakeServer(Ecompute):
    """An Ecompute with failpoints."""

    armed: Mapping[str, str] = {}

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.armed}


class FakePart(ComputePart):
    def __init__(self, name: str, server: FakeServer) -> None:
        super().__init__(name, server.log)
        self.server = server

    def pid(self) -> int | None:
        return self.server.pid if self.server.is_running else None

    def launch(self) -> None:
        self.mark_log()
        self.server.armed = self.armed
        self.server.launch()

    def code(self) -> int | None:
        process = self.server._process
        return process.poll() if process else None


class LabPart(Part):
    """One of the lab's own processes, started as elab starts it."""

    def __init__(
        self, lab: state.Lab, name: str, start: Callable[[], ServerProcess], ready: Callable[[ServerProcess], bool]
    ) -> None:
        super().__init__(name)
        self._lab = lab
        self._start = start
        self._ready = ready

    def pid(self) -> int | None:
        process = self._lab.find_running(self.name)
        return process.pid if process else None

    def launch(self) -> None:
        self._lab.record_process(self.name, self._start())

    def ready(self) -> bool:
        process = self._lab.find_running(self.name)
        return process is not None and self._ready(process)


class HostPart(ComputePart):
    """The ecompute of a real host."""

    def __init__(self, host: LabHost) -> None:
        super().__init__(f'{host.name} ecompute', host.log)
        self.host = host

    def pid(self) -> int | None:
        process = self.host.lab.find_running(self.name)
        return process.pid if process else None

    def launch(self) -> None:
        self.mark_log()
        config = str(self.host.directory / 'compute.yaml')
        command = self.host.make_command([sys.executable, '-m', 'ecomp.compute', '--config', config])
        self.host.lab.record_process(self.name, machine.start(self.name, command, self.log, self.armed))
