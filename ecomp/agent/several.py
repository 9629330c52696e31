"""Many pretended computes in one process: begun side by side, ended side by side, with one ear for all of them."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple

from ecomp.agent.daemon import Daemon
from ecomp.agent.queues import Reader
from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.store.guard import Guard
from ecomp.store.shared_follower import SharedFollower

log = logging.getLogger(__name__)

AT_ONCE = 16
"""As many as placement's session keeps connections; each waits for placement and for the disk, mostly."""


class Ears(NamedTuple):
    """What follows etcd for all of them; None, and each compute follows by itself. `reader`: of the queues."""

    reader: Reader
    hosts: SharedFollower | None = None
    audits: SharedFollower | None = None
    queues: SharedFollower | None = None


def listen(config: EtcdConfig, guard: Guard, queues: bool, at_exit: ExitStack) -> Ears:
    """Follow all computes' requests, and audits, and with `queues` those; ended by `at_exit`."""
    hosts = SharedFollower(config, keys.HOSTS, len(keys.host_prefix(str(uuid.UUID(int=0)))), guard)
    audits = SharedFollower(config, keys.AUDIT, len(keys.AUDIT))
    waiting = SharedFollower(config, keys.QUEUES, len(keys.QUEUES), guard) if queues else None
    for each in (hosts, audits, waiting):
        if each is not None:
            each.start()
            at_exit.callback(each.stop)
    return Ears(Reader(), hosts, audits, waiting)


def begin(count: int, start: Callable[[int, ExitStack], Daemon], at_exit: ExitStack) -> list[Daemon]:
    """What start(number, stack) made of 1, 2, … `count`, in order. `at_exit` closes all the stacks, some at a time.

    Where one fails, or a signal comes, no further one is begun, and the error is raised when those under way are
    through.
    """
    began = time.monotonic()
    stacks = [ExitStack() for _ in range(count)]
    at_exit.callback(_end, stacks)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix='start') as threads:
        begun = [threads.submit(start, number, stack) for number, stack in enumerate(stacks, 1)]
        try:
            daemons = [each.result() for each in begun]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    log.info('%d computes are ready, after %.1f s', count, time.monotonic() - began)
    return daemons


def _end(stacks: Sequence[ExitStack]) -> None:
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix='end') as threads:
        ended = [threads.submit(stack.close) for stack in stacks[1:]]
        stacks[0].close()  # in the main thread, for it is the first one that hears of signals
    for each in ended:
        each.result()
    log.info('%d computes are stopped, after %.1f s', len(stacks), time.monotonic() - began)
