"""The process of a compute, what it follows in etcd, and its metrics."""

from __future__ import annotations

import logging
import resource
import signal
import threading
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ecomp.agent.compute import Compute, now
from ecomp.agent.host.state import Identity, KnownEtcd, verify_or_adopt
from ecomp.agent.images.cache import measure_cache
from ecomp.agent.jobs import FailureLog, Loop
from ecomp.agent.queue import Queues
from ecomp.compute_conf import ComputeConfig, explain_unsafe_metrics
from ecomp.conf import list_cleartext_hosts, list_exposed_secrets
from ecomp.errors import EcompError, UsageError
from ecomp.files import write_durably
from ecomp.metrics import TALLY, Samples, make_text
from ecomp.model import keys
from ecomp.model.cluster import KnownCluster, describe_vulnerabilities
from ecomp.model.guest import Usage
from ecomp.model.order import MAX_REQUEST_BYTES
from ecomp.model.states import ACTIVE, BUILDING, DESTROYING, SCHEDULED, STAGES, STOPPED
from ecomp.placement.client import Placement
from ecomp.store.client import Guard, Store
from ecomp.store.watch import Follower, Subscription
from ecomp.store.watch import State as Entries
from ecomp.systemd import Service

if TYPE_CHECKING:
    from ecomp.virt.fake import Fake

log = logging.getLogger(__name__)
ready = logging.getLogger('ecomp.ready')

# (limit, need, unit, where to raise it)
REQUIRED_LIMITS = (
    (resource.RLIMIT_NOFILE, 256, 'file descriptors', 'ulimit -n, or LimitNOFILE= of its unit'),
    # Each thread reserves 72 MiB for stack and heap.
    (resource.RLIMIT_AS, 2 * 1024**3, 'bytes of address space', 'ulimit -v, or LimitAS= of its unit'),
)

METRICS_INTERVAL_SECONDS = 15.0
METRICS = {
    'ecomp_read_only': ('gauge', 'Whether this ecompute is read-only, and so starts nothing.', ''),
    'ecomp_troubled': ('gauge', 'Whether this ecompute reports that it cannot build.', ''),
    'ecomp_instances': ('gauge', 'Instances of this ecompute.', 'state'),
    'ecomp_stage_duration_seconds': ('histogram', 'Time from one stage of an instance to the next.', 'stage'),
    'ecomp_builds': ('counter', 'Builds that made an instance active.', ''),
    'ecomp_build_failures': ('counter', 'Builds that failed in this stage.', 'stage'),
    'ecomp_worker_deaths': ('counter', 'Worker processes that ended unexpectedly.', ''),
    'ecomp_findings': ('gauge', 'What the checks of this host found, by the codes of `eschedule check`.', 'code'),
    'ecomp_claims_released': ('counter', 'Claims that were released because no request owned them.', ''),
    'ecomp_backend_up': ('gauge', 'Whether the last call to this backend was answered.', 'backend'),
    'ecomp_backend_call_duration_seconds': ('histogram', 'Time of a call, with its repetitions.', 'backend'),
    'ecomp_image_cache_images': ('gauge', 'Images in the cache.', ''),
    'ecomp_image_cache_bytes': ('gauge', 'Size of the image cache, with downloads.', ''),
    'ecomp_image_cache_bad_images': ('gauge', 'Images in the cache whose content has changed.', ''),
    'ecomp_vm_info': ('gauge', 'The name of an instance, by its uuid.', 'vm name'),
    'ecomp_vm_vcpu_seconds': ('counter', 'Time for which the vCPUs of a guest ran.', 'vm'),
    'ecomp_vm_resident_memory_bytes': ('gauge', "Memory of the host that a guest's QEMU uses.", 'vm'),
    'ecomp_vm_disk_read_bytes': ('counter', 'Bytes that a guest read from its disks.', 'vm'),
    'ecomp_vm_disk_written_bytes': ('counter', 'Bytes that a guest wrote to its disks.', 'vm'),
}


class MetricsWriter:
    """Writes a compute's metrics to `path` in a thread, until stop() removes the file."""

    def __init__(self, path: Path, compute: Compute) -> None:
        self._path, self._compute = path, compute
        self._lock, self._is_stopped = threading.Lock(), False
        self._failures = FailureLog()  # of its own, because its recovery is no reason to repeat tasks
        self._loop = Loop('metrics', self._run)
        # In a counter that appears with its first event, Prometheus sees no increase.
        for stage in ('scheduled', 'image', 'disk', 'started'):
            TALLY.add('ecomp_build_failures_total', stage, amount=0)
        for stage in STAGES[2:]:
            TALLY.observe('ecomp_stage_duration_seconds', stage, 0, count=0)
        self._loop.schedule()

    def stop(self) -> None:
        self._loop.stop()
        # A file that stays behind shows that its ecompute did not end cleanly.
        with self._lock, suppress(OSError):
            self._is_stopped = True
            self._path.unlink(missing_ok=True)

    def _run(self) -> float:
        next_due = time.monotonic() + METRICS_INTERVAL_SECONDS
        self._failures.attempt('writing the metrics', self._write, is_moot=lambda: self._is_stopped)
        return next_due

    def _write(self) -> None:
        if problem := explain_unsafe_metrics(self._path):
            raise EcompError(str(problem))
        text = make_text(METRICS, self.collect())
        try:
            with self._lock:
                if not self._is_stopped:
                    write_durably(self._path, text, 0o644)
        except OSError as error:
            cure = 'Fix: make room there, or correct `metrics:` in compute.yaml'
            raise EcompError(f'metrics cannot be written to {self._path}: {error.strerror}. {cure}') from error

    def collect(self) -> Samples:
        samples, compute = TALLY.copy_samples(), self._compute
        records, hypervisor = compute.list_records(), compute.host.hypervisor
        # An unreachable libvirt is one failure for the compute's plans and for this.
        attempt = compute.daemon.planner.failures.attempt
        usage = attempt('reading the usage of guests', hypervisor.read_usage, is_moot=lambda: self._is_stopped) or {}
        states = Counter(record.state if record else SCHEDULED for record in records.values())
        samples['ecomp_instances'] = {(s,): states[s] for s in (SCHEDULED, BUILDING, ACTIVE, STOPPED, DESTROYING)}
        found = Counter(finding.code for finding in compute.upkeep.report.findings)
        samples['ecomp_findings'] = {(code,): count for code, count in found.items()}
        samples['ecomp_read_only'] = {(): compute.daemon.read_only}
        samples['ecomp_troubled'] = {(): bool(compute.troubles.reasons)}
        samples['ecomp_vm_info'] = {(vm, (record and record.name) or ''): 1 for vm, record in records.items()}
        for field in Usage._fields:
            used = {(vm,): getattr(usage[vm], field) for vm in records.keys() & usage}
            samples[f'ecomp_vm_{field}'] = {labels: amount for labels, amount in used.items() if amount is not None}
        if (directory := hypervisor.get_image_directory()) is not None:
            samples |= {f'ecomp_image_cache_{name}': {(): size} for name, size in measure_cache(directory).items()}
        return samples


@dataclass(eq=False)
class ComputeProcess:
    """The compute of this process: call register(), then run(), and close `at_exit`."""

    config: ComputeConfig
    fake: Fake | None
    accepts_new_etcd: bool
    service: Service
    at_exit: ExitStack

    def register(self) -> None:
        """Lock the state directory, recognise etcd or adopt a first one, and register the compute."""
        config, at_exit = self.config, self.at_exit
        _require_limits()
        # First, because only the holder of its lock may read or write the files there.
        state = Identity(config.state)
        at_exit.callback(state.close)
        etcd_file = KnownEtcd(config.state)
        remembered = KnownCluster() if self.accepts_new_etcd else etcd_file.load()
        self._guard = guard = Guard(remembered, etcd_file.schedule_write)
        store = Store(config.etcd, guard)
        at_exit.callback(store.close)
        placement = Placement(config.placement)
        at_exit.callback(placement.close)
        familiar = verify_or_adopt(guard, store, now())
        known = guard.known_cluster
        if not self.fake:
            _warn_of_insecure_setup(config, store)
        # Callbacks run in reverse: the compute stops before the follower.
        at_exit.callback(etcd_file.stop)
        self._end_following = at_exit.enter_context(ExitStack())
        self._compute = Compute(
            config=config,
            identity=state,
            store=store,
            guard=guard,
            placement=placement,
            queues=Queues(known.revision, known.first_seen_revision),
            fake=self.fake,
            accepts_new_etcd=self.accepts_new_etcd,
            is_familiar_etcd=familiar,
        )
        at_exit.callback(self._compute.stop)
        self._compute.register()
        # Last, so that after a kill before this the next start finds the same unfamiliar etcd.
        if familiar:
            etcd_file.start()

    def run(self) -> None:
        """Start the compute, follow etcd, and tend workers in the main thread until end_soon()."""
        compute, status = self._compute, str(self._compute)
        compute.host.runner.waker.wake_on_signals()
        self.at_exit.callback(signal.set_wakeup_fd, -1)
        compute.start()
        if compute.is_familiar_etcd:
            self._follow()
            ready.info('ready: %s', status)
        else:
            status = 'read-only: etcd is not the one that this compute used before. Try: journalctl -u ecompute'
        if self.config.metrics is not None:
            self.at_exit.callback(MetricsWriter(self.config.metrics, compute).stop)
        self.service.notify_ready(status)
        compute.daemon.run(self.service.notify_alive)
        self.service.notify_stopping('tasks in flight finish; guests keep running')

    def end_soon(self) -> None:
        """Let run() return soon, also from a signal handler."""
        self._compute.daemon.stop()

    def _follow(self) -> None:
        compute = self._compute
        requests: list[Subscription] = [(keys.request_prefix(compute.uuid), compute.on_requests)]
        if self.config.queues:
            # In this order, because the queues are judged by the other two.
            requests += [(keys.ACCEPTED, compute.queues.on_accepted), (keys.COMPUTES, self._on_computes)]
            requests.append((keys.QUEUES, self._on_queues))
        else:
            requests.append((keys.compute(compute.uuid), compute.on_computes))
        requests.append((keys.AUDIT, compute.upkeep.on_questions))
        follower = Follower(
            self.config.etcd,
            requests,
            guard=self._guard,
            on_lost=compute.on_lost,
            on_back=compute.on_back,
            max_value_bytes=MAX_REQUEST_BYTES,
        )
        follower.start()
        self._end_following.callback(follower.stop)

    def _on_computes(self, state: Entries) -> None:
        self._compute.queues.on_computes(state)
        self._compute.on_computes(state)

    def _on_queues(self, state: Entries) -> None:
        if self._compute.queues.on_queues(state):
            self._compute.wake_taker('requests are queued')


def _require_limits() -> None:
    for limit, minimum, unit, where in REQUIRED_LIMITS:
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < minimum:
            raise UsageError(f'this process is limited to {soft} {unit}, but needs {minimum}. Fix: increase {where}')


def _warn_of_insecure_setup(config: ComputeConfig, store: Store) -> None:
    for host in list_cleartext_hosts(config.etcd, config.placement):
        text = 'requests to %s are sent in plain text: anyone on the network path can read and change them'
        log.warning(f'{text}. Fix: use TLS, and remove `insecure: true`', host)
    for path in list_exposed_secrets(config.etcd, config.placement):
        log.warning('%s can be read or changed by every user of this machine. Fix: chmod o= %s', path, path)
    with suppress(EcompError):  # the next use of etcd reports the error
        warning = describe_vulnerabilities(store.read_version())
        if warning and 'etcd-version' not in config.ignore_warnings:
            log.warning('%s', warning)
