"""A worker process: takes one job after another from its pipe and tells how it went.

Long-lived and spawned, never forked: gRPC and libvirt do not survive a fork (FACTS: 9 of 30 children hung). It has
a libvirt connection of its own and never speaks to etcd or placement.

Messages to it: ('job', number, Job), ('cancel', number). From it: ('begun', number), ('waits', number) for another
process that is at the same instance, ('news', number, News), ('done', number), ('failed', number, exception).
"""

from __future__ import annotations

import logging
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ecomp import log as logs
from ecomp.agent.images import inspection
from ecomp.agent.images.cache import CacheLimits, ImageCache
from ecomp.agent.images.reach import Reach
from ecomp.agent.instance.build import ENDING, MOST_ENDS, Cancelled, Images, Job, carry_out
from ecomp.agent.locks import InstanceLocks
from ecomp.agent.parent import die_with
from ecomp.errors import EcompError
from ecomp.virt import Hypervisor

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
    from ecomp.agent.images import remote  # noqa: F401
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
    die_with(settings.parent)
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
