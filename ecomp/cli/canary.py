"""`eschedule doctor --canary`: a small guest on every host is booted, entered and destroyed, on all of them at once."""

from __future__ import annotations

import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ecomp.cli.command import Context
from ecomp.cli.create import read_ssh_keys, who
from ecomp.cli.enter import last_lines, why_not_entered
from ecomp.cli.options import refuse_as_usage
from ecomp.cli.terminal import Live, now
from ecomp.errors import EcompError, NoCapacity, NotFound, OverQuota, StillGoing, UnknownOutcome
from ecomp.model.canary import BOOTED, ENTERED, READY, SMALL, Canary, check_names_no_host, how_far, line
from ecomp.model.choose import Offer
from ecomp.model.host import UP, Host
from ecomp.model.image import check_image
from ecomp.model.order import SetOrder
from ecomp.model.query import check_query, on_one
from ecomp.model.record import SCHEDULED, WAITS_FOR, waits_for
from ecomp.placement.allocations import candidates
from ecomp.placement.client import Placement
from ecomp.scheduler.changing.change import destroy, remove
from ecomp.scheduler.changing.wait import Deadline, Wait, wait_for_stage, wait_until_gone
from ecomp.scheduler.looking.find import find
from ecomp.scheduler.looking.hosts import no_such
from ecomp.scheduler.operating.sharing import with_flavor
from ecomp.scheduler.placing.create import create
from ecomp.scheduler.placing.explain import lacking
from ecomp.scheduler.placing.place import check_complete

AT_ONCE = 64
"""How many canaries there are at a time; of more hosts the others wait for one that is gone."""
TICK = 1.0
"""Seconds between two updates of the line on the terminal."""
GRACE = 3.0
"""Seconds after an interrupt in which another one changes nothing: timeout(1) sends two, and by then each canary's
compute is asked to destroy it."""
INTERRUPTED = 'interrupted'
NO_DATA = b'#cloud-config\n{}\n'
"""A canary's user-data: what other guests are given may tell the world that they are there."""


class Plan(NamedTuple):
    """What each canary is: what it asks for, its image and keys, the stage that it is to reach.

    `not_asked` says why nobody is to enter it, '' where somebody is.
    """

    query: str
    image: str
    keys: tuple[str, ...] | None
    stage: str
    not_asked: str


def plan(do: Context) -> Plan:
    """What was typed, before anybody is asked. UsageError."""
    query, *image = do.words
    plan = Plan(
        query or ('' if do.options.flavor else SMALL),
        image[0] if image else do.config.image,
        read_ssh_keys(files) if (files := do.options.ssh_key or do.config.ssh_keys) else None,
        do.options.stage or READY,
        '' if do.options.stage in (None, READY) else f'--for {do.options.stage} was asked for',
    )
    with refuse_as_usage():
        check_image(plan.image)
        check_query(plan.query, needs_resources=do.options.flavor is None)
        check_names_no_host(plan.query)
    if not plan.keys and not do.options.identity:
        without = 'there is no ssh key: name one with --ssh-key'
        plan = plan._replace(stage=do.options.stage or BOOTED, not_asked=without)
    return plan


class Interrupted(EcompError):
    """Whoever waited does not any more. Raised by the function that is told how a wait goes on."""


def fly(do: Context, plan: Plan, canary: Canary, go_on: Callable[[], None]) -> Canary:
    """What came of a canary that has its uuid and its name; it is gone then, or Canary.left says why not.

    `go_on` is called about once a second, and raises Interrupted where it is to be ended.
    """
    instance, query, unknown = canary.instance or '', on_one(plan.query, canary.compute), False
    try:
        go_on()
        _place(do, plan, canary, query)
        canary = _boot(do, plan, canary, instance, go_on)
    except NoCapacity as error:
        why = _lacks(do, query, canary.compute, error)
        return canary._replace(instance=None, name=None, reached=None, why=why)
    except Exception as error:
        unknown = isinstance(error, UnknownOutcome)
        canary = _broken(do, canary, instance, error)
    return canary._replace(left=_destroyed(do, instance, canary.why if unknown else ''))


def _place(do: Context, plan: Plan, canary: Canary, query: str) -> None:
    wanted = SetOrder(
        canary.instance or '',
        image=plan.image,
        user_id=do.config.user_id,
        project_id=do.config.project_id,
        query=query,
        stages={'requested': now()},
        name=canary.name,
        ssh_keys=plan.keys,
        user_data=NO_DATA,
    )
    backend: Future[tuple[Placement, Offer]] = Future()
    backend.set_result((do.placement, candidates(do.placement, query)))
    create(do.store, backend, wanted, who(wanted), False, random.Random(), now)


def _boot(do: Context, plan: Plan, canary: Canary, instance: str, go_on: Callable[[], None]) -> Canary:
    """Wait for it, and enter it where somebody is to and can; how far it came."""
    began = time.monotonic()
    wait = Wait(do.config.etcd, instance, Deadline(do.options.patience), lambda _: go_on(), claims=do.claims)
    record = wait_for_stage(wait, plan.stage)
    go_on()  # the wait asks once a second, and may have ended before it did
    canary = canary._replace(reached=plan.stage, seconds=time.monotonic() - began, why=plan.not_asked)
    if not plan.not_asked and not record.host_keys:
        return canary._replace(why='its guest has not said which host keys it has')
    if not plan.not_asked:
        failed = why_not_entered(do, instance, go_on)
        if failed:
            return canary._replace(seconds=None, why=failed, broken=ENTERED)
        canary = canary._replace(reached=ENTERED, seconds=time.monotonic() - began)
    return canary


def _broken(do: Context, canary: Canary, instance: str, error: Exception) -> Canary:
    """The same with how far it came, and why no further."""
    found = None
    with suppress(EcompError):
        found = find(do.store, instance)
    record = found.record if found else None
    reached, stage = how_far(record)
    why = str(error).removeprefix(f'{instance}: ') or type(error).__name__
    canary = canary._replace(reached=reached, seconds=None, why=why)
    if isinstance(error, Interrupted):
        return canary
    if isinstance(error, StillGoing):
        waits = WAITS_FOR[SCHEDULED] if stage == SCHEDULED else waits_for(record)
        canary = canary._replace(why=f'{do.options.patience:g} s are up, still waiting for: {waits}')
        for line in last_lines(do, record) if record else ():
            do.out.say(f"{canary.name}'s console: {line}")
    return canary._replace(broken=stage)


def _lacks(do: Context, query: str, compute: str, error: NoCapacity) -> str:
    """Why there is no room for it there."""
    if not isinstance(error, OverQuota):
        with suppress(EcompError, ValueError):
            return lacking(do.placement, query, do.computes, [compute]).get(compute) or str(error)
    return str(error)


def _destroyed(do: Context, instance: str, otherwise: str) -> str:
    """Destroy it, and wait until it is gone; why something of it may be left, '' if nothing is.

    `otherwise` is said where it is not there, for whether it was placed is not known.
    """
    try:
        destroy(do.store, instance)
        deadline = Deadline(do.options.patience)
        wait_until_gone(Wait(do.config.etcd, instance, deadline, lambda _: None, claims=do.claims))
        remove(do.store, find(do.store, instance))
    except NotFound:
        return otherwise
    except Exception as error:
        return str(error).removeprefix(f'{instance}: ') or type(error).__name__
    return ''


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
        only = options.on and do.compute(options.on)
        there = [each for each in hosts if not only or each.compute == only]
        if options.on and not there:
            raise no_such(options.on, do.computes)
        for each in reversed(there):
            canary = Canary(each.compute, each.hostname, do.computes.called(each.compute))
            if each.state == UP:
                self._todo.append(canary)
            else:
                self._found[each.compute] = canary._replace(why=f'it is {each.state}')
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
