"""Begin and end each fault of a soak.

Every signal goes to the pid of a process that the soak started.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from bench.soak.cluster import Cluster
from bench.soak.parts import ComputePart, Part
from bench.soak.plan import Fault
from bench.soak.planes import ChangeWatcher
from ecomp.lab.hosts import LabHost
from tests.kit.gateway import Reply

# Ends a fault and returns the facts for its line in the history.
End = Callable[[], dict[str, object]]


class Faults:
    """The faults of one run; only the main thread may use them."""

    def __init__(self, cluster: Cluster, watcher: ChangeWatcher) -> None:
        self._cluster = cluster
        self._watcher = watcher
        self._history = cluster.history
        self._open: dict[int, End] = {}

    def begin(self, fault: Fault) -> bool:
        """Begin a fault if the state of its target allows it; return True if end() is to be called."""
        result = self._begin(fault)
        facts = {'kind': fault.kind, 'target': fault.target, 'seconds': fault.seconds}
        if result is None:
            self._history.write('skip', fault=fault.number, **facts)
            return False
        details, end = result
        self._history.write('fault', id=fault.number, **facts, **details)
        if end is not None:
            self._open[fault.number] = end
        return end is not None

    def end(self, fault: Fault) -> None:
        """End a fault; the cluster restarts the part that was down."""
        details = self._open.pop(fault.number)()
        self._history.write('over', id=fault.number, **details)

    def is_failpoint_reached(self, fault: Fault) -> bool:
        """Return True if the fault's failpoint was reached, so that the wait may end."""
        return bool(fault.place) and _has_fired(self._fired_path(fault))

    def _fired_path(self, fault: Fault) -> Path:
        return self._cluster.directory / f'fired-{fault.number}'

    def _begin(self, fault: Fault) -> tuple[dict[str, object], End | None] | None:
        kind, cluster = fault.kind, self._cluster
        if kind.startswith('fake-'):
            return self._begin_process_fault(fault, cluster.parts[fault.target])
        if kind in ('etcd-kill', 'etcd-freeze', 'placement-kill', 'placement-freeze'):
            return self._begin_process_fault(fault, cluster.parts[fault.target])
        if kind == 'etcd-compact':
            return self._compact_etcd()
        if kind == 'cut':
            return self._cut_proxies()
        if kind == 'etcd-answer-lost':
            return self._lose_answer('etcd', b'/hosts/')
        if kind == 'placement-answer-lost':
            return self._lose_answer('placement', b'PUT /allocations/')
        host = next(candidate for candidate in cluster.hosts if candidate.name == fault.target)
        if kind.startswith('libvirtd-'):
            return self._begin_process_fault(fault, cluster.parts[f'{host.name} libvirtd'])
        if kind == 'partition':
            cluster.set_link(host, 'down')
            return {}, lambda: self._restore_link(host)
        if kind == 'worker-kill':
            return self._kill_one(fault, [(str(pid), pid) for pid in cluster.list_workers(host)])
        if kind == 'qemu-kill':
            return self._kill_one(fault, cluster.list_qemus(host))
        return self._begin_process_fault(fault, cluster.parts[f'{host.name} ecompute'])

    def _begin_process_fault(self, fault: Fault, part: Part) -> tuple[dict[str, object], End] | None:
        pid = part.pid()
        if pid is None or not part.is_ready or part.name in self._cluster.down:
            return None
        action = fault.kind.rpartition('-')[2]
        if action == 'freeze':
            part.send(signal.SIGSTOP)
            return {'pid': pid}, lambda: self._thaw(fault, part)
        self._cluster.down.add(part.name)
        part.expected_end = True
        part.changed_at = time.monotonic()
        part.send(signal.SIGTERM if action == 'term' else signal.SIGKILL)
        if action != 'failpoint':
            return {'pid': pid}, lambda: self._allow_restart(fault, part)
        return self._restart_armed(fault, part)

    def _thaw(self, fault: Fault, part: Part) -> dict[str, object]:
        part.send(signal.SIGCONT)
        if not isinstance(part, ComputePart):  # a server is probed; an ecompute's log reported readiness long ago
            part.is_ready = False
            part.fault = fault.number
            part.changed_at = time.monotonic()
        return {}

    def _allow_restart(self, fault: Fault, part: Part) -> dict[str, object]:
        self._cluster.down.discard(part.name)
        part.fault = fault.number
        return {}

    def _restart_armed(self, fault: Fault, part: Part) -> tuple[dict[str, object], End]:
        """Restart a process that is being killed, so that it dies at the fault's failpoint."""
        fired = self._fired_path(fault)
        deadline = time.monotonic() + 5
        while part.pid() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        part.armed = {'ECOMP_FAILPOINT': f'{fault.place}:kill:1', 'ECOMP_FAILPOINT_FIRED': str(fired)}
        part.launch()

        def end() -> dict[str, object]:
            part.armed = {}
            part.send(signal.SIGKILL)
            self._allow_restart(fault, part)
            return {'fired': _has_fired(fired)}

        return {'place': fault.place}, end

    def _kill_one(self, fault: Fault, processes: list[tuple[str, int]]) -> tuple[dict[str, object], None] | None:
        if not processes:
            return None
        name, pid = processes[fault.pick % len(processes)]
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        return {'pid': pid, 'instance': name}, None

    def _cut_proxies(self) -> tuple[dict[str, object], End]:
        proxies = self._cluster.proxies.values()
        for proxy in proxies:
            proxy.go_away()

        def end() -> dict[str, object]:
            for proxy in proxies:
                proxy.come_back()
            return {}

        return {}, end

    def _lose_answer(self, server: str, pattern: bytes) -> tuple[dict[str, object], None]:
        """Carry out the next request with `pattern` through the proxy and drop its answer."""
        times: list[float] = []

        def is_applied() -> bool:
            times.append(time.monotonic())
            return times[-1] - times[0] > 0.3

        self._cluster.proxies[server].lose_answer(pattern, is_applied)
        return {}, None

    def _restore_link(self, host: LabHost) -> dict[str, object]:
        self._cluster.set_link(host, 'up')
        return {}

    def _compact_etcd(self) -> tuple[dict[str, object], None] | None:
        try:
            revision = self._watcher.write_new_changes()  # write the changes before they are compacted
            Reply(self._cluster.direct[0], 'kv/compaction', {'revision': revision, 'physical': True}, 2.0).close()
        except (OSError, ValueError):
            return None
        return {'revision': revision}, None


def _has_fired(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0
