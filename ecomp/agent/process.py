"""The computes of one process: one, or `--count` fake ones, for which it follows etcd."""

from __future__ import annotations

import logging
import resource
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ecomp.agent.compute import Compute, Environment, count_workers, now
from ecomp.agent.host.claims import GenerationReader
from ecomp.agent.host.provider import check_names
from ecomp.agent.host.state import Identity, KnownEtcd, check_or_adopt
from ecomp.agent.images.cache import measure_cache
from ecomp.agent.instance.build import MAX_CONCURRENT_STOPS
from ecomp.agent.jobs import FailureLog, ScheduledJob, Threads
from ecomp.agent.planner import PLAN_INTERVAL_SECONDS
from ecomp.agent.queue import Queues
from ecomp.compute_conf import ComputeConfig, explain_unsafe_metrics
from ecomp.conf import list_cleartext_hosts, list_exposed_secrets
from ecomp.errors import EcompError, UsageError
from ecomp.files import write_durably
from ecomp.metrics import TALLY, Samples, make_text
from ecomp.model import keys
from ecomp.model.cluster import KnownCluster, describe_vulnerabilities
from ecomp.model.guest import Usage
from ecomp.model.host import collect_changed_requests
from ecomp.model.order import MAX_REQUEST_BYTES
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, SCHEDULED, STAGES, STOPPED, Record
from ecomp.placement.client import Placement
from ecomp.placement.http_client import MAX_IDLE_CONNECTIONS
from ecomp.store.client import Guard, Store
from ecomp.store.presence import LEASE_SECONDS, PresenceLease
from ecomp.store.watch import Follower, Subscription
from ecomp.store.watch import State as Entries
from ecomp.systemd import Service

if TYPE_CHECKING:
    from ecomp.virt.fake import Fake

log = logging.getLogger(__name__)
ready = logging.getLogger('ecomp.ready')

Item = TypeVar('Item')

# Computes that start or stop concurrently: the number of connections that the placement client keeps.
MAX_CONCURRENT_COMPUTES = MAX_IDLE_CONNECTIONS
# The first queries to placement are spread over this time for each compute, but not over more than a minute.
SPREAD_SECONDS_PER_COMPUTE = 0.1
# (limit, need of one compute, need of each further one, unit, where to raise it)
REQUIRED_LIMITS = (
    # Each further compute needs descriptors for its locks and its waker's pipe.
    (resource.RLIMIT_NOFILE, 256, 8, 'file descriptors', 'ulimit -n, or LimitNOFILE= of its unit'),
    # Each thread reserves 72 MiB for stack and heap; each further compute needs memory for its state.
    (resource.RLIMIT_AS, 2 * 1024**3, 1024**2, 'bytes of address space', 'ulimit -v, or LimitAS= of its unit'),
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
    'ecomp_findings': ('gauge', 'What the checks of this host found, by the codes of `eschedule audit`.', 'code'),
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
    """Writes the metrics of a process's computes to `path`, in a thread that nothing waits for.

    Only the guests' usage and the cached images are looked up; all else is in memory.
    """

    def __init__(self, path: Path, computes: Sequence[Compute], threads: Threads) -> None:
        """Schedule a write as soon as possible, and one every METRICS_INTERVAL_SECONDS, until stop()."""
        self._path, self._computes = path, computes
        self._lock, self._is_stopped = threading.Lock(), False
        self._failures = FailureLog()  # of its own, because its recovery is no reason to repeat tasks
        self._job = ScheduledJob(threads, threads.metrics, self._run)
        # In a counter that appears with its first event, Prometheus sees no increase.
        for stage in ('scheduled', 'image', 'disk', 'started'):
            TALLY.add('ecomp_build_failures_total', stage, amount=0)
        for stage in STAGES[2:]:
            TALLY.observe('ecomp_stage_duration_seconds', stage, 0, count=0)
        self._job.schedule()

    def stop(self) -> None:
        """Write no more, and remove the file: one that stays behind tells that its ecompute did not end cleanly."""
        self._job.cancel()
        with self._lock, suppress(OSError):
            self._is_stopped = True
            self._path.unlink(missing_ok=True)

    def _run(self) -> float:
        next_due = time.monotonic() + METRICS_INTERVAL_SECONDS
        self._failures.attempt('writing the metrics', self._write, lambda: self._is_stopped)
        return next_due

    def _write(self) -> None:
        """Write the file, unless stopped; EcompError if that fails."""
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
        """Return the samples of METRICS as they are now; a failure to read the guests' usage is reported."""
        samples, records, usage = TALLY.copy_samples(), dict[str, Record | None](), dict[str, Usage]()
        for compute in self._computes:
            records |= compute.list_records()
            # An unreachable libvirt is one failure for the compute's plans and for this.
            failures, read = compute.daemon.planner.failures, compute.host.hypervisor.read_usage
            usage |= failures.attempt('reading the usage of guests', read, lambda: self._is_stopped) or {}
        states = Counter(record.state if record else SCHEDULED for record in records.values())
        samples['ecomp_instances'] = {(s,): states[s] for s in (SCHEDULED, BUILDING, ACTIVE, STOPPED, DESTROYING)}
        found = Counter(finding.code for compute in self._computes for finding in compute.upkeep.report.findings)
        samples['ecomp_findings'] = {(code,): count for code, count in found.items()}
        samples['ecomp_read_only'] = {(): any(compute.daemon.read_only for compute in self._computes)}
        samples['ecomp_troubled'] = {(): any(compute.troubles.reasons for compute in self._computes)}
        samples['ecomp_vm_info'] = {(vm, (record and record.name) or ''): 1 for vm, record in records.items()}
        for field in Usage._fields:
            used = {(vm,): getattr(usage[vm], field) for vm in records.keys() & usage}
            samples[f'ecomp_vm_{field}'] = {labels: amount for labels, amount in used.items() if amount is not None}
        directory = self._computes[0].host.hypervisor.get_image_directory()
        if directory is not None:
            samples |= {f'ecomp_image_cache_{name}': {(): size} for name, size in measure_cache(directory).items()}
        return samples


@dataclass(eq=False)
class Process:
    """All computes of the process: call register(), then run(); `at_exit` stops them, also after an error.

    `count` is the number of fake computes, or None for one, fake or not. `accepts_new_etcd`: see Environment.
    """

    config: ComputeConfig
    fake: Fake | None
    count: int | None
    accepts_new_etcd: bool
    service: Service
    at_exit: ExitStack

    def __post_init__(self) -> None:
        """Make what the computes share, threads and queues; register() makes the computes."""
        self._started_at = time.monotonic()
        self._computes: list[Compute] = []
        self._end_following = ExitStack()
        self._presence_state: Entries = {}
        self._requests: Entries | None = None
        self._requests_by_compute: dict[str, Entries] = {}
        self._threads = Threads(
            self.count or 1, 2 * count_workers(self.config) + (2 if self.fake else MAX_CONCURRENT_STOPS)
        )
        self._queues = Queues()

    def register(self) -> None:
        """Lock the state directory, recognise etcd or adopt a first one, and register each compute.

        Raises UsageError if a system limit is too low; errors of Identity, KnownEtcd, backends and Compute.register().
        """
        config, at_exit = self.config, self.at_exit
        _check_limits(self.count or 1)
        # First, because only the holder of its lock may read or write the files there.
        self._state = Identity(config.state)
        at_exit.callback(self._state.close)
        etcd_file = KnownEtcd(config.state)
        remembered = KnownCluster() if self.accepts_new_etcd else etcd_file.load()
        self._guard = Guard(remembered, etcd_file.schedule_write)
        self._store = Store(config.etcd, self._guard)
        at_exit.callback(self._store.close)
        placement = Placement(config.placement)
        at_exit.callback(placement.close)
        familiar = check_or_adopt(self._guard, self._store, now())
        self._queues.start_revision = revision = self._guard.known_cluster.revision
        self._queues.term = lambda: self._guard.known_cluster.term
        # A compute that remembers no etcd knows nothing older than now, like one that accepts a new etcd.
        first_seen = etcd_file.read_first_seen() if remembered.identity else revision
        self._queues.first_seen_revision = first_seen
        spread = min(SPREAD_SECONDS_PER_COMPUTE * (self.count or 0), PLAN_INTERVAL_SECONDS)
        lease = PresenceLease(self._store, LEASE_SECONDS)
        self._environment = Environment(
            fake=self.fake,
            accepts_new_etcd=self.accepts_new_etcd,
            first_seen_revision=first_seen,
            is_familiar_etcd=familiar,
            guard=self._guard,
            placement=placement,
            spread_seconds=spread,
            threads=self._threads,
            lease=lease,
            queues=self._queues,
            generations=GenerationReader(placement, reads_all=self.count is not None),
            checks_names=self.count is None,
        )
        if self.count is not None and familiar:
            check_names(placement, config.traits, config.inventory or ())  # once for all of them
        if not self.fake:
            _warn_of_insecure_setup(config, self._store)
        if self.count is not None:
            for name in ('ecomp.compute', 'ecomp.agent.compute', 'ecomp.agent.host.provider'):
                logging.getLogger(name).setLevel(logging.WARNING)  # a thousand computes would log the same
        at_exit.callback(self._threads.close)
        # Callbacks run in reverse: the computes stop before the follower.
        at_exit.callback(etcd_file.stop)
        at_exit.callback(self._end_following.close)
        at_exit.callback(self._stop_computes)
        _run_each(self._register_one, range(1, (self.count or 1) + 1))
        # Last, so that after a kill before this the next start finds the same unfamiliar etcd.
        if familiar:
            etcd_file.save_first_seen(first_seen)
            etcd_file.start()

    def run(self) -> None:
        """Start each compute (raising its errors), follow etcd, and tend workers in the main thread until end_soon().

        An unfamiliar etcd is not followed. Systemd is notified when ready, while alive and at the end.
        """
        self._computes[0].host.runner.waker.wake_on_signals()
        _run_each(Compute.start, self._computes)
        requests: list[Subscription] = [(keys.HOSTS, self._on_hosts)]
        if self.count is None:
            requests = [(keys.request_prefix(compute.uuid), compute.on_requests) for compute in self._computes]
        if self.config.queues:
            # In this order, because the queues are judged by the other two.
            requests += [(keys.ACCEPTED, self._queues.on_accepted), (keys.COMPUTES, self._on_computes)]
            requests.append((keys.QUEUES, self._on_queues))
        elif self.count is None:
            requests.append((keys.compute(self._computes[0].uuid), self._on_computes))
        else:
            requests.append((keys.COMPUTES, self._on_computes))
        requests.append((keys.AUDIT, self._on_questions))
        if self._environment.is_familiar_etcd:
            follower = Follower(
                self.config.etcd,
                requests,
                guard=self._guard,
                on_lost=self._on_lost,
                on_back=self._on_back,
                max_value_bytes=MAX_REQUEST_BYTES,
            )
            follower.start()
            self._end_following.callback(follower.stop)
        if self.config.metrics is not None:
            self.at_exit.callback(MetricsWriter(self.config.metrics, self._computes, self._threads).stop)
        for compute in self._computes if self._environment.is_familiar_etcd else ():
            ready.info('ready: %s', compute if self.count is None else f'compute {compute.uuid}, {compute}')
        if self.count is not None:
            log.info('ready computes: %d, after %.1f s', self.count, time.monotonic() - self._started_at)
        self.service.notify_ready(self._make_status())
        self._computes[0].daemon.run(self.service.notify_alive)
        self.service.notify_stopping('tasks in flight finish; guests keep running')

    def _make_status(self) -> str:
        """Return the status line for systemd.

        It has the guests' type and the inventory, or the number of computes; or else, that etcd is unfamiliar.
        """
        if not self._environment.is_familiar_etcd:
            return 'read-only: etcd is not the one this compute knew. Try: journalctl -u ecompute'
        return f'{len(self._computes)} computes' if self.count is not None else str(self._computes[0])

    def end_soon(self) -> None:
        """Let run() return soon. Safe in a signal handler."""
        for compute in self._computes:
            compute.daemon.stop()

    def _register_one(self, number: int) -> None:
        """Make and register the compute `number` (from 1); with `count` its state directory is <state>/<number>."""
        config, state, store = self.config, self._state, self._store
        with ExitStack() as stack:
            if self.count is not None:
                config = replace(config, state=config.state / str(number))
                state = Identity(config.state)
                stack.callback(state.close)
                # A store of its own, because its own presence fences its writes (rule: single-owner).
                store = store.copy_without_fence()
            compute = Compute(config, state, store, self._environment, stack.pop_all())
        self._computes.append(compute)
        compute.register()

    def _on_hosts(self, state: Entries) -> None:
        """Pass each compute its requests if they changed, and the first time; to pass all of a thousand is slow."""
        before, self._requests = self._requests, state
        changed = collect_changed_requests(before or {}, state, self._requests_by_compute)
        for compute, requests in changed.items():
            if requests:
                self._requests_by_compute[compute] = requests
            else:
                self._requests_by_compute.pop(compute, None)  # or writers of ever new names would fill the memory
        for candidate in self._computes:
            if before is None or candidate.uuid in changed:
                candidate.on_requests(changed.get(candidate.uuid, {}))

    def _on_computes(self, state: Entries) -> None:
        """Count the takers (with `queues:`), and pass presence keys to computes whose own changed or is missing."""
        if self.config.queues:
            self._queues.on_computes(state)
        before, self._presence_state = self._presence_state, state
        for compute in self._computes:
            key = keys.compute(compute.uuid)
            if state.get(key) is not before.get(key) or key not in state:
                compute.on_computes(state)

    def _on_queues(self, state: Entries) -> None:
        if self._queues.on_queues(state):
            for compute in self._computes:
                compute.wake_taker('requests are queued')

    def _on_questions(self, state: Entries) -> None:
        for compute in self._computes:
            compute.upkeep.on_questions(state)

    def _on_lost(self, error: EcompError) -> None:
        for compute in self._computes:
            compute.on_lost(error)

    def _on_back(self) -> None:
        for compute in self._computes:
            compute.on_back()

    def _stop_computes(self) -> None:
        """Stop all computes concurrently, the first in this thread; then raise the first error."""
        started_at = time.monotonic()
        with ThreadPoolExecutor(MAX_CONCURRENT_COMPUTES, thread_name_prefix='end') as threads:
            futures = [threads.submit(compute.stop) for compute in self._computes[1:]]
            for compute in self._computes[:1]:
                compute.stop()  # in the main thread, whose waker gets the signals
        for future in futures:
            future.result()
        if self.count is not None:
            log.info('stopped computes: %d, after %.1f s', len(self._computes), time.monotonic() - started_at)


def _check_limits(compute_count: int) -> None:
    """Raise UsageError if a soft limit is too low for this many computes: a library or thread would fail later."""
    for limit, base, further, unit, where in REQUIRED_LIMITS:
        minimum = base + further * (compute_count - 1)
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < minimum:
            raise UsageError(f'this process is limited to {soft} {unit}, but needs {minimum}. Fix: increase {where}')


def _run_each(work: Callable[[Item], None], items: Sequence[Item]) -> None:
    """Call `work` for all items concurrently; for a single one in this thread, which is the parent of workers.

    An item's error is noticed once the items before it are finished, an exception of a signal immediately. Then no call
    is started, and the error is raised after the calls in flight.
    """
    if len(items) == 1:
        work(items[0])
        return
    with ThreadPoolExecutor(MAX_CONCURRENT_COMPUTES, thread_name_prefix='start') as threads:
        futures = [threads.submit(work, item) for item in items]
        try:
            for future in futures:
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _warn_of_insecure_setup(config: ComputeConfig, store: Store) -> None:
    """Log a warning for each plain-text backend, exposed secret file and, unless ignored, a vulnerable etcd."""
    for host in list_cleartext_hosts(config.etcd, config.placement):
        text = 'requests to %s are sent in plain text: anyone on the network path can read and change them'
        log.warning(f'{text}. Fix: use TLS, and remove `insecure: true`', host)
    for path in list_exposed_secrets(config.etcd, config.placement):
        log.warning('%s can be read or changed by every user of this machine. Fix: chmod o= %s', path, path)
    with suppress(EcompError):  # the next use of etcd reports the error
        warning = describe_vulnerabilities(store.read_version())
        if warning and 'etcd-version' not in config.ignore_warnings:
            log.warning('%s', warning)
