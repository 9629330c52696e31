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
from ecomp.scheduler.looking.hosts import compute_of
from ecomp.scheduler.operating.flavors import with_flavor

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
        self._said: set[str] = set()
        self._news, self._stop, self._began = threading.Event(), threading.Event(), time.monotonic()

    @property
    def interrupted(self) -> bool:
        """Whether Ctrl-C has ended them early."""
        return self._stop.is_set()

    def fly(self, hosts: Sequence[Host]) -> list[Canary]:
        """One on each host that is up, or on that of --on alone; what came of each.

        Errors, before the first is placed: those of etcd and placement, of the query, the flavor and --on.
        """
        do, options = self._do, self._do.options
        if options.flavor is not None:
            query = with_flavor(do.config, lambda: do.store, options.flavor, self._plan.query)
            self._plan = self._plan._replace(query=query)
        candidates(do.placement, self._plan.query)  # what placement refuses is no fault of a host
        only = options.on and compute_of(do.store, lambda: do.placement, options.on)
        there = [
            Canary(each.compute, each.hostname, do.computes.called(each.compute), why=_why_none(each))
            for each in hosts
            if not only or each.compute == only
        ]
        self._found |= {each.compute: each for each in there if each.why}
        self._todo += [each for each in reversed(there) if not each.why]
        self._begin([each.compute for each in there])
        left = {compute: each._replace(why=INTERRUPTED, left=INTERRUPTED) for compute, each in self._placed.items()}
        found = {**left, **self._found}
        return [found[each.compute] for each in there if each.compute in found]

    def _begin(self, computes: Sequence[str]) -> None:
        threads = [threading.Thread(target=self._work, name='canary', daemon=True) for _ in self._todo[:AT_ONCE]]
        with _heard(), Live() as tell:
            try:
                for thread in threads:
                    thread.start()
                self._wait(computes, tell)
            except KeyboardInterrupt:
                self._stop.set()
                self._do.out.say('interrupted: the canaries are being destroyed; once more leaves them')
                self._end(computes, tell, time.monotonic() + GRACE)

    def _end(self, computes: Sequence[str], tell: Callable[[str], None], until: float) -> None:
        """Wait for those that are being destroyed, or until that is interrupted, too, after this time."""
        while True:
            try:
                self._work()  # what no thread has begun with comes to nothing
                self._wait(computes, tell)
                return
            except KeyboardInterrupt:
                if time.monotonic() > until:
                    return

    def _wait(self, computes: Sequence[str], tell: Callable[[str], None]) -> None:
        """Say what came of each as it comes, until it is known of all."""
        while True:
            self._news.clear()
            for compute in [each for each in computes if each in self._found and each not in self._said]:
                self._said.add(compute)
                self._do.out.say(line(self._found[compute]))
            if len(self._said) == len(computes):
                return
            tell(f'{len(computes) - len(self._said)} canaries under way, {time.monotonic() - self._began:.0f} s')
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
        """Ctrl-C is heard by the main thread alone; this is how the others hear of it."""
        if self.interrupted:
            raise Interrupted(INTERRUPTED)


def _why_none(host: Host) -> str:
    """Why no canary is for a host, '' if one is."""
    return '' if host.state == UP else f'it is {host.state}'


@contextmanager
def _heard() -> Iterator[None]:
    """A kill, or a terminal that is closed, ends the canaries as Ctrl-C does; what is ignored, by nohup, stays so."""
    heard = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) == signal.SIG_DFL]
    for each in heard:
        signal.signal(each, signal.default_int_handler)
    try:
        yield
    finally:
        for each in heard:
            signal.signal(each, signal.SIG_DFL)
