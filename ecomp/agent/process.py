"""The computes of one process (one, or `--count` pretended ones), and what follows etcd for all of them."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from ecomp.agent.compute import Compute, Environment, now, workers
from ecomp.agent.host.claims import Generations
from ecomp.agent.host.provider import check_names
from ecomp.agent.host.state import Identity, KnownEtcd, is_familiar
from ecomp.agent.instance.build import MOST_ENDS
from ecomp.agent.planner import EVERY
from ecomp.agent.queue import Offers
from ecomp.agent.turns import Threads, Turn
from ecomp.compute_conf import ComputeConfig
from ecomp.conf import in_clear, open_secrets
from ecomp.errors import EcompError, UsageError
from ecomp.model import keys
from ecomp.model.cluster import KnownCluster, holes
from ecomp.model.host import changed_hosts
from ecomp.model.order import SIZE_LIMIT
from ecomp.placement.by_http import POOL
from ecomp.placement.client import Placement
from ecomp.store.client import Guard, Store
from ecomp.store.presence import SECONDS, Lease
from ecomp.store.watch import Follower, Subscription
from ecomp.store.watch import State as Entries
from ecomp.systemd import Service

log = logging.getLogger(__name__)
ready = logging.getLogger('ecomp.ready')

Each = TypeVar('Each')

AT_ONCE = POOL
"""Computes that begin or end at a time: as many as placement's session keeps connections."""
SPREAD = 0.1
"""Seconds that each of many computes adds to those over which they begin to ask placement; a minute at most."""
NEEDED = (
    # And each of many pretended computes, for its locks and its waker's pipe.
    (resource.RLIMIT_NOFILE, 256, 8, 'file descriptors', 'ulimit -n, or LimitNOFILE= of its unit'),
    # Threads, which are reserved 8 MiB of it each and 64 MiB for what they allocate; what each of many knows.
    (resource.RLIMIT_AS, 2 * 1024**3, 1024**2, 'bytes of address space', 'ulimit -v, or LimitAS= of its unit'),
)


@dataclass(eq=False)
class Process:
    """All of it: register(), then run(). `at_exit` ends what was begun, also where one of these fails.

    `count` is how many pretended computes there are; None: one, of this machine or, with `fake`, a pretended one.
    `accept`: etcd is another one, and is to be told what lives here. `service` is what systemd knows it as. Errors:
    those of Compute, and those of a start.
    """

    config: ComputeConfig
    fake: bool
    count: int | None
    accept: bool
    service: Service
    at_exit: ExitStack

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        self._computes: list[Compute] = []
        self._followers: list[Follower] = []
        self._alive: Entries = {}
        self._asked: Entries | None = None
        self._asked_of: dict[str, Entries] = {}
        self._threads = Threads(self.count or 1, 2 * workers(self.config) + (2 if self.fake else MOST_ENDS))
        self._widening = Turn(self._threads, self._threads.plans, lambda: self._offers.widen())
        self._offers = Offers(self._widening.at)

    def register(self) -> None:
        """Take the state directory, see that etcd is the one we knew, and register each compute."""
        config, at_exit = self.config, self.at_exit
        _check_limits(self.count or 1)
        # First, for whoever has it is the only one that reads or writes what is remembered there.
        self._state = Identity(config.state)
        at_exit.callback(self._state.close)
        known = KnownEtcd(config.state)
        before = KnownCluster() if self.accept else known.load()
        self._guard = Guard(before, known.note)
        self._store = Store(config.etcd, self._guard)
        at_exit.callback(self._store.close)
        placement = Placement(config.placement)
        at_exit.callback(placement.close)
        familiar = is_familiar(self._guard, self._store, now())
        self._offers.began_at = now_at = self._guard.known.revision
        self._offers.term = lambda: self._guard.known.term
        accepted = now_at if self.accept else known.accepted()
        # Like one that accepts, a compute that remembers no etcd knows nothing of what is older than this moment.
        first_seen = max(accepted, known.first_seen()) if before.identity else now_at
        spread = min(SPREAD * (self.count or 0), EVERY)
        lease, audits = Lease(self._store, SECONDS), Store(config.etcd)
        at_exit.callback(audits.close)
        self._environment = Environment(
            fake=self.fake,
            accept=self.accept,
            accepted=accepted,
            first_seen=first_seen,
            familiar=familiar,
            guard=self._guard,
            placement=placement,
            spread=spread,
            threads=self._threads,
            lease=lease,
            offers=self._offers,
            generations=Generations(placement, several=self.count is not None),
            audits=audits,
            checks_names=self.count is None,
        )
        if self.count is not None and familiar:
            check_names(placement, config.traits, config.inventory or ())  # once for all of them
        if not self.fake:
            _warn_of_holes(config, self._store)
        if self.count is not None:
            for name in ('ecomp.compute', 'ecomp.agent.compute', 'ecomp.agent.host.provider'):
                logging.getLogger(name).setLevel(logging.WARNING)  # of each of a thousand it would say the same
        at_exit.callback(self._threads.close)
        # The computes end first: whoever follows for them only tells them what they do not do any more.
        at_exit.callback(known.stop)
        at_exit.callback(self._stop_followers)
        at_exit.callback(self._stop_computes)
        _each(self._register_one, range(1, (self.count or 1) + 1))
        # Not before: killed until now, the next start is to find the same strange etcd.
        if familiar:
            known.note_first_seen(first_seen, all(each.has_noted_acceptance for each in self._computes))
            known.start()

    def run(self) -> None:
        """Have each compute begin, tell them what is asked of them, and work until end_soon(). For the main thread."""
        self._computes[0].host.runner.waker.wake_on_signals()
        _each(Compute.start, self._computes)
        requests: list[Subscription] = [(keys.HOSTS, self._on_hosts)]
        if self.count is None:
            requests = [(keys.request_prefix(each.uuid), each.on_requests) for each in self._computes]
        if self.config.queues:
            # In this order: what waits is judged by the other two.
            requests += [(keys.ACCEPTED, self._offers.on_accepted), (keys.COMPUTES, self._on_computes)]
            requests.append((keys.QUEUES, self._offers.on_queues))
        elif self.count is None:
            requests.append((keys.compute(self._computes[0].uuid), self._on_computes))
        else:
            requests.append((keys.COMPUTES, self._on_computes))
        # A stream of its own, without a guard: audits are answered whatever etcd this is. That it is away is said by
        # the other one.
        audits: list[Subscription] = [(keys.AUDIT, self._on_audits)]
        self._followers.append(Follower(self.config.etcd, audits, on_lost=lambda _: None, on_back=lambda: None))
        if self._environment.familiar:
            follower = Follower(
                self.config.etcd,
                requests,
                guard=self._guard,
                on_lost=self._on_lost,
                on_back=self._on_back,
                largest=SIZE_LIMIT,
            )
            self._followers.append(follower)
        for follower in self._followers:
            follower.start()
        for each in self._computes if self._environment.familiar else ():
            ready.info('ready: %s', each if self.count is None else f'compute {each.uuid}, {each}')
        if self.count is not None:
            log.info('%d computes are ready, after %.1f s', self.count, time.monotonic() - self._began)
        self.service.ready(self._status())
        self._computes[0].daemon.run(self.service.alive)
        self.service.stopping('what is in work comes to an end; the guests go on')

    def _status(self) -> str:
        if not self._environment.familiar:
            return 'only watches: this is not the etcd that it knew (see the log)'
        return f'{len(self._computes)} computes' if self.count is not None else str(self._computes[0])

    def end_soon(self) -> None:
        """End run(). Safe in a signal handler."""
        for each in self._computes:
            each.daemon.stop()

    def _register_one(self, number: int) -> None:
        config, state, store = self.config, self._state, self._store
        with ExitStack() as opened:
            if self.count is not None:
                config = replace(config, state=config.state / str(number))
                state = Identity(config.state)
                opened.callback(state.close)
                # Its own, for what it may write is fenced by its own presence (rule 9).
                store = store.beside()
            compute = Compute(config, state, store, self._environment, opened.pop_all())
        self._computes.append(compute)
        compute.register()

    def _on_hosts(self, state: Entries) -> None:
        """Tell each of many what is asked of it, if that changed: a list of its own for each would take a second."""
        before, self._asked = self._asked, state
        changed = changed_hosts(before or {}, state, self._asked_of)
        for compute, asked in changed.items():
            if asked:
                self._asked_of[compute] = asked
            else:
                self._asked_of.pop(compute, None)  # whoever writes there may use ever new names
        for each in self._computes:
            if before is None or each.uuid in changed:
                each.on_requests(changed.get(each.uuid, {}))

    def _on_computes(self, state: Entries) -> None:
        if self.config.queues:
            self._offers.on_computes(state)
        before, self._alive = self._alive, state
        for each in self._computes:
            key = keys.compute(each.uuid)
            if state.get(key) is not before.get(key) or key not in state:
                each.on_computes(state)

    def _on_audits(self, state: Entries) -> None:
        for each in self._computes:
            each.answerer.on_audits(state)

    def _on_lost(self, error: EcompError) -> None:
        for each in self._computes:
            each.on_lost(error)

    def _on_back(self) -> None:
        for each in self._computes:
            each.on_back()

    def _stop_followers(self) -> None:
        for each in self._followers:
            each.stop()

    def _stop_computes(self) -> None:
        began = time.monotonic()
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix='end') as threads:
            ended = [threads.submit(each.stop) for each in self._computes[1:]]
            for each in self._computes[:1]:
                each.stop()  # in the main thread, for it is the first one that hears of signals
        for future in ended:
            future.result()
        if self.count is not None:
            log.info('%d computes are stopped, after %.1f s', len(self._computes), time.monotonic() - began)


def _check_limits(computes: int) -> None:
    """UsageError naming the limit that is too low for so many: with less a library aborts, or a thread is missing."""
    for limit, alone, each, what, where in NEEDED:
        least = alone + each * (computes - 1)
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY and soft < least:
            raise UsageError(f'limited to {soft} {what}, and {least} are needed: raise the limit ({where})')


def _each(work: Callable[[Each], None], of: Sequence[Each]) -> None:
    """Do this for each, side by side; of one alone in this thread, whose child its worker processes have to be.

    Where one fails, or a signal comes, no further one is begun, and the error is raised when those under way are
    through.
    """
    if len(of) == 1:
        work(of[0])
        return
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix='start') as threads:
        begun = [threads.submit(work, each) for each in of]
        try:
            for future in begun:
                future.result()
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise


def _warn_of_holes(config: ComputeConfig, store: Store) -> None:
    for host in in_clear(config.etcd, config.placement):
        log.warning('%s is asked in plain text: whoever is on the way there can do everything (insecure)', host)
    for path in open_secrets(config.etcd, config.placement):
        log.warning('%s can be read or changed by every user of this machine. Fix: chmod o= %s', path, path)
    with suppress(EcompError):  # what it is about is said by whoever needs etcd
        if warning := holes(store.version()):
            log.warning('%s', warning)
