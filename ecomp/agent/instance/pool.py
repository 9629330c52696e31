"""Where jobs run: worker processes, each on its own pipe and watched by its sentinel, or the calling thread (`Inline`).

A worker is long-lived and spawned, never forked: libvirt does not survive a fork. It has its own libvirt connection and
never talks to etcd or placement.

Messages to a worker: ('job', number, Job), ('cancel', number). From it: ('begun', number), ('waits', number) while
another process works on the same instance, ('news', number, News), ('done', number), ('failed', number, exception).

Not multiprocessing.Pool, which never reports a job whose worker was killed. Any thread submits jobs; only the thread
that calls tend(), the main thread, starts processes, reads from them and reaps them, because a worker's parent-death
signal follows the thread that started it.
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
from pathlib import Path
from typing import Any

from ecomp import log as logs
from ecomp.agent.images import inspection
from ecomp.agent.images.cache import CacheLimits, ImageCache, Images
from ecomp.agent.images.connections import Reach
from ecomp.agent.instance.build import ENDING, MOST_ENDS, Build, Cancelled, Job, News, WorkerDied, carry_out
from ecomp.agent.turns import Waker
from ecomp.errors import BuildFailed, EcompError
from ecomp.files import InstanceLocks
from ecomp.model.backoff import Backoff
from ecomp.model.record import Progress
from ecomp.virt import Hypervisor


class Inline:
    """Workers without processes, for the fake hypervisor: a job runs in the thread that asks for it."""

    def __init__(self, hypervisor: Hypervisor, images: Images) -> None:
        self._hypervisor = hypervisor
        self._images = images
        self.waker = Waker()
        self._cancelled: set[str | None] = set()

    def run(self, job: Job) -> Iterator[News]:
        news: list[News] = []
        try:
            carry_out(job, self._hypervisor, self._images, news.append, lambda: self._checkpoint(job.instance))
        finally:
            if isinstance(job, Build):
                self._cancelled.discard(job.instance)
        return iter(news)

    def cancel(self, instance: str | None) -> None:
        self._cancelled.add(instance)

    def allow(self) -> None:
        self._cancelled.discard(None)

    def tend(self, timeout: float) -> None:
        """Wait as Workers do: there is nobody to look after."""
        wait([self.waker.reader], timeout)
        self.waker.clear()

    def stop(self) -> None:
        self.waker.close()

    def _checkpoint(self, instance: str) -> None:
        if self._cancelled & {None, instance}:
            raise Cancelled


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """What a worker needs to know, small enough to be pickled."""

    state: Path
    local_images: Path | None
    parent: int
    limits: CacheLimits
    filters: bool
    """Whether guests are to be filtered, as the parent found."""
    reach: Reach = Reach()
    hold_addresses: bool = False


def main(pipe: Connection, settings: WorkerSettings) -> None:
    """A worker on libvirt."""
    prepare(settings)
    # What loads slowly is loaded before there is a job that would wait for it.
    from ecomp.virt.libvirt_host import Libvirt

    control, hold_addresses = settings.reach.control, settings.hold_addresses
    hypervisor: Hypervisor = Libvirt(
        settings.state, control=control, filters=settings.filters, hold_addresses=hold_addresses
    )
    directory = hypervisor.image_directory()
    assert directory is not None  # only the fake has none, and it has no workers
    images = ImageCache(directory, inspection.inspect, settings.local_images, settings.limits, settings.reach)
    images.sweep()  # it may take the place of one that was killed
    work(pipe, hypervisor, images, InstanceLocks(settings.state))


def prepare(settings: WorkerSettings) -> None:
    """What a worker process does first. It dies with its parent, however that dies."""
    # Else a worker goes on building after its parent was killed with -9, beside the next ecompute's.
    inspection.die_with(settings.parent)
    # Ctrl-C goes to the whole terminal's group, as does its end; when to stop is the parent's business.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logs.configure()


def work(pipe: Connection, hypervisor: Hypervisor, images: Images, locks: InstanceLocks) -> None:
    """Carry jobs out until the pipe ends: those of ENDING side by side, each other one alone."""
    desk = Desk(pipe, hypervisor, images, locks)
    with ThreadPoolExecutor(MOST_ENDS, thread_name_prefix='ending') as threads:
        while True:
            try:
                message = pipe.recv()
            except EOFError:
                break
            if message[0] == 'job':
                _, number, job = message
                if isinstance(job, ENDING):
                    threads.submit(desk.answer, number, job)
                else:
                    desk.answer(number, job)
    hypervisor.close()


class Desk:
    """Where the jobs of a worker are carried out. Several threads may be at it with jobs of ENDING."""

    def __init__(self, pipe: Connection, hypervisor: Hypervisor, images: Images, locks: InstanceLocks) -> None:
        self._pipe = pipe
        self._hypervisor = hypervisor
        self._images = images
        self._locks = locks
        self._sending = threading.Lock()

    def answer(self, number: int, job: Job) -> None:
        """Carry it out, and tell how it went."""
        waited = False

        def checkpoint() -> None:
            # What ends is not cancelled, and may not take from the pipe what is for others.
            while not isinstance(job, ENDING) and self._pipe.poll():
                message = self._pipe.recv()
                if message == ('cancel', number):
                    raise Cancelled

        def wait() -> None:
            nonlocal waited
            if not waited:
                waited = True
                self._tell('waits', number)
            checkpoint()

        try:
            self._tell('begun', number)
            with self._locks.held(job.instance, wait):
                carry_out(job, self._hypervisor, self._images, partial(self._tell, 'news', number), checkpoint)
        except (EcompError, Cancelled) as error:
            self._tell('failed', number, error)
        except Exception as error:  # a defect of ours: this job fails, the worker goes on
            log.exception('unexpected error in a job of instance %s', job.instance)
            self._tell('failed', number, EcompError(f'{type(error).__name__}: {error}'))
        else:
            self._tell('done', number)

    def _tell(self, *message: Any) -> None:
        with self._sending:
            self._pipe.send(message)


YOUNG = 5.0
"""Seconds of a worker's life: one that ends sooner would end so again, and the next is put off."""
FIRST_DELAY, LAST_DELAY = 0.1, 10.0
"""Seconds for which a worker is put off after one that ended young, or could not be started: at first, and at most."""
DOWNLOADS = 2.0
"""Seconds after which a build whose image is not there yet is one that downloads it."""
MOST_LENT = 8
"""Workers beyond the pool's size, each in the place of one that downloads."""
Entry = Callable[[Connection, WorkerSettings], None]
"""What a worker process runs; it is imported anew there."""


@dataclass(eq=False)
class _Ticket:
    number: int
    job: Job
    told: queue.SimpleQueue[tuple[str, Any]] = field(default_factory=queue.SimpleQueue)
    cancelled: bool = False
    fetches: str | None = None
    """The image a worker may be fetching for it."""
    begun: float = math.inf

    def is_build_of(self, instance: str | None) -> bool:
        return isinstance(self.job, Build) and instance in (None, self.job.instance)

    @property
    def image(self) -> str | None:
        return self.job.image if isinstance(self.job, Build) else None

    def news(self) -> Iterator[News]:
        while True:
            kind, what = self.told.get()
            if kind == 'news':
                # Whoever reads writes it to etcd, which may be slow: old figures do not hold up what matters.
                if not isinstance(what, Progress) or self.told.empty():
                    yield what
            elif kind == 'failed':
                raise what
            else:
                return


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    started: float
    ends_only: bool
    to_send: queue.SimpleQueue[tuple[Any, ...] | None] = field(default_factory=queue.SimpleQueue)
    tickets: dict[int, _Ticket] = field(default_factory=dict)

    def downloads_at(self) -> float:
        """When its job is, or will be, one that downloads; never, if it has its image."""
        return min((each.begun + DOWNLOADS for each in self.tickets.values() if each.fetches), default=math.inf)

    def send_all(self) -> None:
        """Send what is in `to_send`, until None: then the pipe is closed, which ends a worker after its job.

        A thread's, for a worker that is frozen reads nothing, and a job may be larger than what its pipe holds.
        """
        while (message := self.to_send.get()) is not None:
            with suppress(OSError):  # it has died; its sentinel reports the job
                self.pipe.send(message)
        self.pipe.close()


class Workers:
    """`size` worker processes, a job each, and one more for ENDING alone, MOST_ENDS at once: a slow download must not
    keep a guest from going, nor one that takes its time to end the next.

    What does not fit waits in order, ENDING first. Builds of an image that a worker is fetching wait for that download
    and share its outcome; other builds do not wait for it. Where there are such, another worker takes the place of each
    that downloads, so that servers that drip hold up nobody whose image is here.

    `waker` ends a tend() at once, also from a signal handler.
    """

    def __init__(self, size: int, settings: WorkerSettings, entry: Entry = main) -> None:
        self._entry = entry
        self._context = multiprocessing.get_context('spawn')
        self._settings = settings
        self._size = size + 1
        self.waker = Waker()
        self._lock = threading.Lock()
        self._waiting: deque[_Ticket] = deque()
        self._workers: list[_Worker] = []
        self._dismissed: list[SpawnProcess] = []
        self._numbers = iter(range(1, 2**62))
        self._start_at, self._backoff = 0.0, Backoff(FIRST_DELAY, LAST_DELAY)
        self._lacks = self._ends_builds = False

    def run(self, job: Job) -> Iterator[News]:
        """Carry the job out; yields each stage reached and its progress, ends when it is done, raises what it raised.

        How far it is may be left out where the next news is there already. WorkerDied: the worker was killed.
        """
        with self._lock:
            ticket = _Ticket(next(self._numbers), job)
            self._waiting.append(ticket)
        if self._ends_builds:  # else whoever says so from now on finds it waiting
            self.cancel(None)
        self.waker.wake()
        return ticket.news()

    def cancel(self, instance: str | None) -> None:
        """Let a build of this instance stop at its next step and undo itself; None: every one from now on."""
        with self._lock:
            self._ends_builds |= instance is None
            for ticket in list(self._waiting):
                if ticket.is_build_of(instance):
                    self._waiting.remove(ticket)
                    ticket.told.put(('failed', Cancelled()))
            for worker in self._workers:
                for at_it in worker.tickets.values():
                    if at_it.is_build_of(instance) and not at_it.cancelled:
                        at_it.cancelled = True
                        worker.to_send.put(('cancel', at_it.number))

    def allow(self) -> None:
        """Make builds again after cancel(None)."""
        self._ends_builds = False

    def tend(self, timeout: float) -> None:
        """Start what is missing, hand out jobs, hear results, notice deaths. The main thread's work.

        Takes `timeout` seconds at most, or until it is woken.
        """
        now = time.monotonic()
        self._hand_out()
        wanted, look_again = self._wanted(now)
        timeout = max(0.0, min(timeout, look_again - now))
        if len(self._workers) < wanted and now < self._start_at:
            timeout = min(timeout, self._start_at - now)
        else:
            while len(self._workers) < wanted and self._starts():
                pass
        self._hand_out()
        sentinels = {worker.process.sentinel: worker for worker in self._workers}
        pipes = {worker.pipe: worker for worker in self._workers}
        ready = wait([self.waker.reader, *pipes, *sentinels], timeout)
        self.waker.clear()
        for each in ready:
            if isinstance(each, Connection):
                self._hear(pipes[each])
        for each in ready:
            if isinstance(each, int) and each in sentinels:
                self._bury(sentinels[each])
        self._hand_out()

    def stop(self) -> None:
        """End the workers when their jobs are done."""
        for worker in self._workers:
            worker.to_send.put(None)
        for process in [*self._dismissed, *(worker.process for worker in self._workers)]:
            process.join()
        with self._lock:
            left = [*self._waiting, *(each for worker in self._workers for each in worker.tickets.values())]
            self._waiting.clear()
            self._workers.clear()
        for ticket in left:  # else the thread that waits for it would keep this process from ending
            ticket.told.put(('failed', WorkerDied('the pool was stopped')))
        self.waker.close()

    def _wanted(self, now: float) -> tuple[int, float]:
        """How many workers there should be, and when that may be more; those too many that are idle are dismissed."""
        with self._lock:
            times = [worker.downloads_at() for worker in self._workers]
            lent = min(len([each for each in times if each <= now]), MOST_LENT)
            idle = [each for each in self._workers if not each.tickets and not each.ends_only]
            for worker in idle[: max(0, len(self._workers) - self._size - lent)]:
                self._workers.remove(worker)
                worker.to_send.put(None)
                self._dismissed.append(worker.process)
            self._dismissed = [each for each in self._dismissed if each.exitcode is None]
            waits = any(each.image not in self._fetched() for each in self._waiting if not isinstance(each.job, ENDING))
        return self._size + (lent if waits else 0), min((t for t in times if t > now), default=math.inf)

    def _fetched(self) -> set[str | None]:
        return {each.fetches for worker in self._workers for each in worker.tickets.values()} - {None}

    def _starts(self) -> bool:
        """Start one; False, and a line, where the machine has no process or descriptor left for it: soon again."""
        try:
            self._start()
        except (OSError, RuntimeError) as error:
            if not self._lacks:
                log.error('a worker cannot be started: %s; trying again', error)
            self._lacks = True
            self._put_off()
            return False
        self._lacks = False
        return True

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=self._entry, args=(theirs, self._settings), name='ecompute worker', daemon=True
        )
        worker = _Worker(process, ours, time.monotonic(), ends_only=False)
        sender = threading.Thread(target=worker.send_all, name='to a worker', daemon=True)
        try:
            sender.start()
            process.start()
        except BaseException:
            worker.to_send.put(None)
            if not sender.is_alive():
                ours.close()
            raise
        finally:
            theirs.close()
        with self._lock:
            # The last one, so that of two idle ones the other is asked first.
            is_last = len(self._workers) >= self._size - 1
            worker.ends_only = is_last and not any(each.ends_only for each in self._workers)
            self._workers.append(worker)

    def _put_off(self) -> None:
        self._start_at = time.monotonic() + self._backoff.next()

    def _hand_out(self) -> None:
        with self._lock:
            for worker in self._workers:
                room = MOST_ENDS if worker.ends_only else 1
                while len(worker.tickets) < room and (ticket := self._next(worker)) is not None:
                    self._waiting.remove(ticket)
                    worker.tickets[ticket.number] = ticket
                    ticket.fetches = ticket.image
                    worker.to_send.put(('job', ticket.number, ticket.job))

    def _next(self, worker: _Worker) -> _Ticket | None:
        ending = next((each for each in self._waiting if isinstance(each.job, ENDING)), None)
        if ending is not None or worker.ends_only:
            return ending
        fetched = self._fetched()
        return next((each for each in self._waiting if each.image not in fetched), None)

    def _hear(self, worker: _Worker) -> None:
        try:
            while worker.pipe.poll():
                kind, number, *more = worker.pipe.recv()
                ticket, what = worker.tickets.get(number), more[0] if more else None
                if ticket is None:
                    continue
                with self._lock:
                    self._share(ticket, kind, what)
                    if kind == 'begun':
                        ticket.begun = time.monotonic()
                    elif kind == 'waits' or isinstance(what, str):
                        ticket.fetches = None
                    elif kind != 'news':
                        del worker.tickets[number]
                if kind not in ('begun', 'waits'):
                    ticket.told.put((kind, what))
        except (EOFError, ConnectionError):
            return  # its sentinel says the same

    def _share(self, ticket: _Ticket, kind: str, what: object) -> None:
        """How far an image is, or why it cannot be had, is told to all builds that wait for the same."""
        failed = kind == 'failed' and isinstance(what, BuildFailed) and what.stage == 'image'
        if ticket.fetches is None or not (failed or isinstance(what, Progress)):
            return
        for other in [each for each in self._waiting if each.image == ticket.fetches]:
            other.told.put((kind, what))
            if failed:
                self._waiting.remove(other)

    def _bury(self, worker: _Worker) -> None:
        self._hear(worker)  # it may have answered just before it ended
        worker.process.join()
        with self._lock:
            self._workers.remove(worker)
            left = list(worker.tickets.values())
            worker.tickets.clear()
        code = worker.process.exitcode
        worker.to_send.put(None)
        log.error('worker %s ended with %s; a new one takes its place', worker.process.pid, code)
        # One that dies young would die again: not at once, or starting workers is all that is done here.
        if time.monotonic() - worker.started < YOUNG:
            self._put_off()
        else:
            self._backoff.reset()
            self._start_at = 0.0
        for ticket in left:
            ticket.told.put(('failed', WorkerDied(f'its worker process ended in the middle of it ({code})')))


Runner = Inline | Workers
"""Where jobs are carried out."""
