"""Run jobs in worker processes (Workers), or in the calling thread (InlineRunner).

Messages to a worker: ('job', number, Job), ('cancel', number). From it: ('begun', number), ('waits', number) while
another process works on the same instance, ('news', number, JobEvent), ('done', number), ('failed', number, exception).
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import queue
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from ecomp import log as logs
from ecomp.agent.images import inspection
from ecomp.agent.images.cache import CacheLimits, ImageCache, Images
from ecomp.agent.images.child import die_with_parent
from ecomp.agent.images.sources import make_egress_policy
from ecomp.agent.instance import build
from ecomp.agent.instance.build import MAX_CONCURRENT_STOPS, STOPPING_STEPS, Build, Cancelled, Job, JobEvent
from ecomp.agent.jobs import Waker
from ecomp.compute_conf import ComputeConfig
from ecomp.errors import BuildFailed, EcompError
from ecomp.files import InstanceLocks
from ecomp.metrics import TALLY
from ecomp.model.backoff import Backoff
from ecomp.model.record import Progress
from ecomp.virt import Hypervisor


class InlineRunner:
    """Runs jobs in the calling thread, for the fake hypervisor."""

    def __init__(self, hypervisor: Hypervisor, images: Images) -> None:
        self._hypervisor, self._images = hypervisor, images
        self.waker = Waker()
        self._cancelled: set[str | None] = set()

    def run(self, job: Job) -> Iterator[JobEvent]:
        news: list[JobEvent] = []
        try:
            build.carry_out(job, self._hypervisor, self._images, news.append, lambda: self._checkpoint(job.instance))
        finally:
            if isinstance(job, Build):
                self._cancelled.discard(job.instance)
        return iter(news)

    def cancel(self, instance: str | None) -> None:
        self._cancelled.add(instance)

    def allow_builds(self) -> None:
        self._cancelled.discard(None)

    def tend(self, timeout: float) -> None:
        wait([self.waker.reader], timeout)
        self.waker.clear()

    def _checkpoint(self, instance: str) -> None:
        if self._cancelled & {None, instance}:
            raise Cancelled


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of a worker process, which are pickled."""

    config: ComputeConfig
    parent_pid: int
    limits: CacheLimits
    # The parent process found that guests are to be filtered.
    has_filters: bool


def main(pipe: Connection, settings: WorkerSettings) -> None:
    """Run a worker: execute jobs on libvirt until the pipe is closed."""
    prepare(settings)
    # Load slow modules before the first job, which would have to wait for them.
    from ecomp.virt.libvirt_host import Libvirt

    config, egress = settings.config, make_egress_policy(settings.config)
    control, has_filters, hold = egress.control_endpoints, settings.has_filters, config.hold_addresses
    hypervisor = Libvirt(config.state, control_endpoints=control, has_filters=has_filters, hold_addresses=hold)
    directory = hypervisor.get_image_directory()
    images = ImageCache(directory, inspection.inspect, config.images, settings.limits, egress)
    images.sweep()  # this worker may replace one that was killed
    run_jobs(pipe, hypervisor, images, InstanceLocks(config.state))


def prepare(settings: WorkerSettings) -> None:
    """Make this worker die with its parent, ignore SIGINT, SIGTERM and SIGHUP, and log."""
    # Without this a worker continues its build after its parent was killed with SIGKILL, beside the next ecompute's.
    die_with_parent(settings.parent_pid)
    # A terminal signals its whole process group, but only the parent decides when to stop.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.configure()


def run_jobs(pipe: Connection, hypervisor: Hypervisor, images: Images, locks: InstanceLocks) -> None:
    """Run jobs until the pipe closes, STOPPING_STEPS in threads, then close `hypervisor`."""
    desk = JobExecutor(pipe, hypervisor, images, locks)
    with ThreadPoolExecutor(MAX_CONCURRENT_STOPS, thread_name_prefix='ending') as threads, suppress(EOFError):
        while True:
            message = pipe.recv()
            if message[0] == 'job':
                _, number, job = message
                if isinstance(job, STOPPING_STEPS):
                    threads.submit(desk.execute, number, job)
                else:
                    desk.execute(number, job)
    hypervisor.close()


class JobExecutor:
    """Runs a worker's jobs, also in several threads, and reports them through the pipe."""

    def __init__(self, pipe: Connection, hypervisor: Hypervisor, images: Images, locks: InstanceLocks) -> None:
        self._pipe, self._hypervisor, self._images, self._locks = pipe, hypervisor, images, locks
        self._sending = threading.Lock()

    def execute(self, number: int, job: Job) -> None:
        """Run a job under its instance's lock, and send its events and its end or error."""
        has_reported = False

        def checkpoint() -> None:
            # STOPPING_STEPS are not cancelled, and their threads must not read messages that are for other jobs.
            while not isinstance(job, STOPPING_STEPS) and self._pipe.poll():
                message = self._pipe.recv()
                if message == ('cancel', number):
                    raise Cancelled

        def report_waiting() -> None:
            nonlocal has_reported
            if not has_reported:
                has_reported = True
                self._send('waits', number)
            checkpoint()

        try:
            self._send('begun', number)
            with self._locks.hold(job.instance, report_waiting):
                build.carry_out(job, self._hypervisor, self._images, partial(self._send, 'news', number), checkpoint)
        except (EcompError, Cancelled) as error:
            self._send('failed', number, error)
        except Exception as error:  # a defect in ecomp: this job fails, the worker continues
            log.exception('unexpected error in a job of instance %s', job.instance)
            self._send('failed', number, EcompError(f'{type(error).__name__}: {error}'))
        else:
            self._send('done', number)

    def _send(self, *message: Any) -> None:
        with self._sending:
            self._pipe.send(message)


# A worker that ends within this time is likely to end so again, so the next start is deferred.
MIN_LIFETIME_SECONDS = 5.0
# Delays of the next start after a worker ended young or could not be started: the first one, and the longest.
FIRST_DELAY_SECONDS = 0.1
MAX_DELAY_SECONDS = 10.0
# A build that has no image after this time counts as downloading it.
DOWNLOAD_AFTER_SECONDS = 2.0
# Workers beyond the pool's size, one for each that downloads: slow servers must not delay builds whose image is here.
MAX_EXTRA_WORKERS = 8
# The main function of a worker process, which imports it itself because it is spawned.
WorkerMain = Callable[[Connection, WorkerSettings], None]


@dataclass(eq=False)
class _Ticket:
    """A submitted job, which a worker began at `began_at` (monotonic, inf before that)."""

    number: int
    job: Job
    events: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)
    is_cancelled: bool = False
    # The image that a worker may be downloading for this job.
    image_in_flight: str | None = None
    began_at: float = math.inf

    def is_build_of(self, instance: str | None) -> bool:
        return isinstance(self.job, Build) and instance in (None, self.job.instance)

    @property
    def image(self) -> str | None:
        return self.job.image if isinstance(self.job, Build) else None

    def iter_events(self) -> Iterator[JobEvent]:
        """Yield the job's events, but no outdated progress, and raise what the job raised."""
        while True:
            kind, payload = self.events.get()
            if kind == 'news':
                # The reader writes each event to etcd, which may be slow: skip progress that is outdated.
                if not isinstance(payload, Progress) or self.events.empty():
                    yield payload
            elif kind == 'failed':
                raise payload
            else:
                return


@dataclass(eq=False)
class _Worker:
    """A worker process, our end of its pipe, and its jobs in flight by number."""

    process: SpawnProcess
    pipe: Connection
    started_at: float  # monotonic
    is_stop_only: bool  # gets only STOPPING_STEPS
    outbox: queue.SimpleQueue[tuple[Any, ...] | None] = field(default_factory=queue.SimpleQueue)
    tickets: dict[int, _Ticket] = field(default_factory=dict)

    def send_all(self) -> None:
        """Send the messages of `outbox`, and at None close the pipe, which ends the worker."""
        while (message := self.outbox.get()) is not None:
            with suppress(OSError):  # the worker has died: _reap() fails its jobs
                self.pipe.send(message)
        self.pipe.close()


# Not a multiprocessing.Pool, which never reports a job whose worker was killed.
class Workers:
    """Worker processes: `size` run any jobs, one at a time, and one more only STOPPING_STEPS.

    The last one stops guests while the others download. Jobs start in order, STOPPING_STEPS first. Builds of an image
    that a worker is downloading wait for it and share its outcome. While other jobs are queued, an extra worker makes
    up for each that downloads. `waker` interrupts tend(), even in a signal handler. Only tend() needs the main thread.
    """

    def __init__(self, size: int, settings: WorkerSettings, entry: WorkerMain = main) -> None:
        self._entry = entry
        # Spawned: libvirt does not survive a fork. A worker has its own libvirt connection, none to etcd or placement.
        self._context = multiprocessing.get_context('spawn')
        self._settings, self._size = settings, size + 1
        self.waker = Waker()
        self._lock = threading.Lock()
        self._waiting: deque[_Ticket] = deque()
        self._workers: list[_Worker] = []
        self._dismissed: list[SpawnProcess] = []
        self._numbers = iter(range(1, 2**62))
        self._start_at, self._backoff = 0.0, Backoff(FIRST_DELAY_SECONDS, MAX_DELAY_SECONDS)
        self._cannot_start = self._cancels_builds = False

    def run(self, job: Job) -> Iterator[JobEvent]:
        """Submit a job, and return an iterator over its events that raises what the job raised.

        It also raises WorkerDied if the worker died or the pool stopped, and Cancelled after cancel().
        """
        with self._lock:
            ticket = _Ticket(next(self._numbers), job)
            self._waiting.append(ticket)
        if self._cancels_builds:  # a later cancel(None) finds the job in the queue
            self.cancel(None)
        self.waker.wake()
        return ticket.iter_events()

    def cancel(self, instance: str | None) -> None:
        """Cancel an instance's build, or with None every build until allow_builds()."""
        with self._lock:
            self._cancels_builds |= instance is None
            for ticket in list(self._waiting):
                if ticket.is_build_of(instance):
                    self._waiting.remove(ticket)
                    ticket.events.put(('failed', Cancelled()))
            for worker in self._workers:
                for in_flight in worker.tickets.values():
                    if in_flight.is_build_of(instance) and not in_flight.is_cancelled:
                        in_flight.is_cancelled = True
                        worker.outbox.put(('cancel', in_flight.number))

    def allow_builds(self) -> None:
        self._cancels_builds = False

    def tend(self, timeout: float) -> None:
        """Start, feed, read and reap workers once, waiting at most `timeout` seconds for an event."""
        # Only the main thread calls this: a parent-death signal follows the thread that started the process.
        now = time.monotonic()
        self._assign_jobs()
        worker_count, grows_at = self._adjust_size(now)
        timeout = max(0.0, min(timeout, grows_at - now))
        if len(self._workers) < worker_count and now < self._start_at:
            timeout = min(timeout, self._start_at - now)
        else:
            while len(self._workers) < worker_count and self._try_start():
                pass
        self._assign_jobs()
        sentinels = {worker.process.sentinel: worker for worker in self._workers}
        pipes = {worker.pipe: worker for worker in self._workers}
        ready = wait([self.waker.reader, *pipes, *sentinels], timeout)
        self.waker.clear()
        for source in ready:
            if isinstance(source, Connection):
                self._receive(pipes[source])
        for source in ready:
            if isinstance(source, int) and source in sentinels:
                self._reap(sentinels[source])
        self._assign_jobs()

    def stop(self) -> None:
        """Stop the workers, and wait until they have finished jobs in flight and undone builds."""
        for worker in self._workers:
            worker.outbox.put(None)
        for process in [*self._dismissed, *(worker.process for worker in self._workers)]:
            process.join()
        with self._lock:
            unfinished = [*self._waiting, *(running for worker in self._workers for running in worker.tickets.values())]
            self._waiting.clear()
            self._workers.clear()
        for ticket in unfinished:  # otherwise the thread that waits for it would keep this process alive
            ticket.events.put(('failed', build.WorkerDied('the pool of workers was stopped')))

    def _adjust_size(self, now: float) -> tuple[int, float]:
        """Dismiss surplus idle workers, and return the target size and when (monotonic) it may grow."""
        with self._lock:
            # A job that has no image by these times counts as downloading it.
            in_flight = [ticket for worker in self._workers for ticket in worker.tickets.values()]
            times = [ticket.began_at + DOWNLOAD_AFTER_SECONDS for ticket in in_flight if ticket.image_in_flight]
            extra = min(len([moment for moment in times if moment <= now]), MAX_EXTRA_WORKERS)
            idle = [candidate for candidate in self._workers if not candidate.tickets and not candidate.is_stop_only]
            for worker in idle[: max(0, len(self._workers) - self._size - extra)]:
                self._workers.remove(worker)
                worker.outbox.put(None)
                self._dismissed.append(worker.process)
            self._dismissed = [process for process in self._dismissed if process.exitcode is None]
            queued = [ticket for ticket in self._waiting if not isinstance(ticket.job, STOPPING_STEPS)]
            waits = any(ticket.image not in self._list_images_in_flight() for ticket in queued)
        return self._size + (extra if waits else 0), min((t for t in times if t > now), default=math.inf)

    def _list_images_in_flight(self) -> set[str | None]:
        return {ticket.image_in_flight for worker in self._workers for ticket in worker.tickets.values()} - {None}

    def _try_start(self) -> bool:
        """Start a worker, or log the first of several failures and defer the next try."""
        try:
            self._start()
        except (OSError, RuntimeError) as error:
            if not self._cannot_start:
                log.error('a worker cannot be started: %s; trying again', error)
            self._cannot_start = True
            self._defer_start()
            return False
        self._cannot_start = False
        return True

    def _start(self) -> None:
        parent_end, child_end = self._context.Pipe()
        args = child_end, self._settings
        process = self._context.Process(target=self._entry, args=args, name='ecompute worker', daemon=True)
        worker = _Worker(process, parent_end, time.monotonic(), is_stop_only=False)
        # In its own thread: a frozen worker reads nothing, and a job may be larger than the pipe's buffer.
        sender = threading.Thread(target=worker.send_all, name='to a worker', daemon=True)
        try:
            sender.start()
            process.start()
        except BaseException:
            worker.outbox.put(None)
            if not sender.is_alive():
                parent_end.close()
            raise
        finally:
            child_end.close()
        with self._lock:
            # It is the last of the list, so that an idle worker of the other kind gets a job first.
            is_last = len(self._workers) >= self._size - 1
            worker.is_stop_only = is_last and not any(other.is_stop_only for other in self._workers)
            self._workers.append(worker)

    def _defer_start(self) -> None:
        self._start_at = time.monotonic() + self._backoff.next()

    def _assign_jobs(self) -> None:
        with self._lock:
            for worker in self._workers:
                # Several stops run concurrently, because one may be slow.
                room = MAX_CONCURRENT_STOPS if worker.is_stop_only else 1
                while len(worker.tickets) < room and (ticket := self._find_next(worker)) is not None:
                    self._waiting.remove(ticket)
                    worker.tickets[ticket.number] = ticket
                    ticket.image_in_flight = ticket.image
                    worker.outbox.put(('job', ticket.number, ticket.job))

    def _find_next(self, worker: _Worker) -> _Ticket | None:
        stopping = next((ticket for ticket in self._waiting if isinstance(ticket.job, STOPPING_STEPS)), None)
        if stopping is not None or worker.is_stop_only:
            return stopping
        in_flight = self._list_images_in_flight()
        return next((ticket for ticket in self._waiting if ticket.image not in in_flight), None)

    def _receive(self, worker: _Worker) -> None:
        try:
            while worker.pipe.poll():
                kind, number, *rest = worker.pipe.recv()
                ticket, payload = worker.tickets.get(number), rest[0] if rest else None
                if ticket is None:
                    continue
                with self._lock:
                    self._share_download(ticket, kind, payload)
                    if kind == 'begun':
                        ticket.began_at = time.monotonic()
                    elif kind == 'waits' or isinstance(payload, str):
                        ticket.image_in_flight = None
                    elif kind != 'news':
                        del worker.tickets[number]
                if kind not in ('begun', 'waits'):
                    ticket.events.put((kind, payload))
        except (EOFError, ConnectionError):
            return  # its sentinel reports its death, too

    def _share_download(self, ticket: _Ticket, kind: str, payload: object) -> None:
        """Pass a download's progress or failure on to queued builds of its image, under the lock."""
        failed = kind == 'failed' and isinstance(payload, BuildFailed) and payload.stage == 'image'
        if ticket.image_in_flight is None or not (failed or isinstance(payload, Progress)):
            return
        for other in [queued for queued in self._waiting if queued.image == ticket.image_in_flight]:
            other.events.put((kind, payload))
            if failed:
                self._waiting.remove(other)

    def _reap(self, worker: _Worker) -> None:
        """Remove a dead worker and fail its jobs, and delay its successor if it died young."""
        self._receive(worker)  # its last messages may still be in the pipe
        worker.process.join()
        with self._lock:
            self._workers.remove(worker)
            unfinished = list(worker.tickets.values())
            worker.tickets.clear()
        code = worker.process.exitcode
        TALLY.add('ecomp_worker_deaths_total')
        worker.outbox.put(None)
        log.error('worker %s ended with exit code %s; a new worker replaces it', worker.process.pid, code)
        # A worker that died young would die again: defer its successor, or this loop does nothing but start workers.
        if time.monotonic() - worker.started_at < MIN_LIFETIME_SECONDS:
            self._defer_start()
        else:
            self._backoff.reset()
            self._start_at = 0.0
        for ticket in unfinished:
            error = build.WorkerDied(f'its worker process ended during the job (exit code {code})')
            ticket.events.put(('failed', error))


Runner = InlineRunner | Workers
