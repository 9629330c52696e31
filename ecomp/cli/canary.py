"""`eschedule doctor --canary`: a small guest on every host is booted, entered and destroyed, on all of them at once."""

from __future__ import annotations

import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from ecomp.cli.command import Context
from ecomp.cli.flight import Interrupted, Plan, fly
from ecomp.cli.terminal import Live
from ecomp.model.canary import Canary, line
from ecomp.model.host import UP, Host
from ecomp.placement.allocations import candidates
from ecomp.scheduler.looking.hosts import compute_of, no_such
from ecomp.scheduler.operating.flavors import with_flavor
from ecomp.scheduler.placing.place import check_complete

AT_ONCE = 64
"""How many canaries there are at a time; of more hosts the others wait for one that is gone."""
TICK = 1.0
"""Seconds between two updates of the line on the terminal."""
GRACE = 3.0
"""Seconds after an interrupt in which another one changes nothing: timeout(1) sends two, and by then each canary's
compute is asked to destroy it."""
INTERRUPTED = 'interrupted'


class Canaries:
    """The canaries of one command."""

    def __init__(self, do: Context, plan: Plan) -> None:
        self._do, self._plan = do, plan
        self._todo: list[Canary] = []
        self._placed: dict[str, Canary] = {}
        self._found: dict[str, Canary] = {}
        self._interrupts: list[float] = []
        self._news = threading.Event()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has ended them early."""
        return bool(self._interrupts)

    def fly(self, hosts: Sequence[Host]) -> list[Canary]:
        """One on each host that is up, or on that of --on alone; what came of each.

        Errors, before the first is placed: those of etcd and placement, of the query, the flavor and --on.
        """
        do, options = self._do, self._do.options
        if options.flavor is not None:
            query = with_flavor(do.config, lambda: do.store, options.flavor, self._plan.query)
            self._plan = self._plan._replace(query=query)
        # What is wrong with the query is no fault of a host.
        for asked in candidates(do.placement, self._plan.query).candidates:
            check_complete(asked)
        only = options.on and compute_of(do.store, lambda: do.placement, options.on)
        there = [
            Canary(each.compute, each.hostname, do.computes.called(each.compute), why=_why_none(each))
            for each in hosts
            if not only or each.compute == only
        ]
        if options.on and not there:
            raise no_such(options.on, do.computes)
        self._found |= {each.compute: each for each in there if each.why}
        self._todo += [each for each in reversed(there) if not each.why]
        self._begin([each.compute for each in there])
        left = {compute: each._replace(why=INTERRUPTED, left=INTERRUPTED) for compute, each in self._placed.items()}
        found = {**left, **self._found}
        return [found[each.compute] for each in there if each.compute in found]

    def _begin(self, computes: Sequence[str]) -> None:
        threads = [threading.Thread(target=self._work, name='canary', daemon=True) for _ in self._todo[:AT_ONCE]]
        with _heard(lambda: self._interrupts.append(time.monotonic())), Live() as tell:
            for thread in threads:
                thread.start()
            self._wait(computes, tell)

    def _wait(self, computes: Sequence[str], tell: Callable[[str], None]) -> None:
        """Say what came of each as it comes, until it is known of all, or nobody waits for them any more."""
        said, began, told = set[str](), time.monotonic(), False
        while True:
            self._news.clear()
            if self.interrupted and not told:
                told = True
                self._do.out.say(f'interrupted: the canaries are being destroyed; again, in {GRACE:g} s, leaves them')
            for compute in [each for each in computes if each in self._found and each not in said]:
                self._do.out.say(line(self._found[compute]))
                said.add(compute)
            if len(said) == len(computes) or (self.interrupted and self._interrupts[-1] > self._interrupts[0] + GRACE):
                return
            tell(f'{len(computes) - len(said)} canaries under way, {time.monotonic() - began:.0f} s')
            self._news.wait(TICK)

    def _work(self) -> None:
        with suppress(IndexError):  # another thread took the last one
            while self._todo:
                canary = self._todo.pop()
                if self.interrupted:
                    canary = canary._replace(why=INTERRUPTED)
                else:
                    instance = str(uuid.uuid4())
                    canary = canary._replace(instance=instance, name=f'canary-{instance[:8]}', reached='requested')
                    self._placed[canary.compute] = canary
                    canary = fly(self._do, self._plan, canary, self._go_on)
                self._found[canary.compute] = canary
                self._news.set()

    def _go_on(self) -> None:
        """How the threads hear of an interrupt, in their waits."""
        if self.interrupted:
            raise Interrupted(INTERRUPTED)


def _why_none(host: Host) -> str:
    """Why no canary is for a host, '' if one is."""
    return '' if host.state == UP else f'it is {host.state}'


@contextmanager
def _heard(hear: Callable[[], None]) -> Iterator[None]:
    """Call `hear` for Ctrl-C, a kill and a terminal that is closed: none of them ends anything by itself.

    What is ignored stays so, by nohup for one.
    """
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    taken = {each: handler for each, handler in before.items() if handler != signal.SIG_IGN}
    for each in taken:
        signal.signal(each, lambda *_: hear())
    try:
        yield
    finally:
        for each, handler in taken.items():
            signal.signal(each, handler)
