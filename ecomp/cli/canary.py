"""Boot, enter and destroy a small guest on every host for `eschedule doctor --canary`."""

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

# Canaries in flight at a time. Each further host waits until an earlier canary is destroyed.
AT_ONCE = 64
TICK = 1.0
# Seconds after an interrupt in which another one is ignored: timeout(1) sends two. By then the destroy of every canary
# is requested.
GRACE = 3.0
INTERRUPTED = 'interrupted'
# A canary's user-data: the default one might report the guest to the outside world.
NO_DATA = b'#cloud-config\n{}\n'


class Plan(NamedTuple):
    """The query, image, ssh keys and stage that all canaries of a command share.

    `keys` None means those of mdserver.conf. `not_entered_reason` says why no canary is logged in to, '' if each is.
    """

    query: str
    image: str
    keys: tuple[str, ...] | None
    stage: str
    not_asked: str


def plan(do: Context) -> Plan:
    """Read the plan without asking a server; UsageError if an argument or key file is invalid."""
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
        reason = 'there is no ssh key: name one with --ssh-key'
        plan = plan._replace(stage=do.options.stage or BOOTED, not_asked=reason)
    return plan


class Interrupted(EcompError):
    """The user has interrupted the command; raised by the callback of each wait."""


def fly(do: Context, plan: Plan, canary: Canary, go_on: Callable[[], None]) -> Canary:
    """Place, boot, enter and destroy a canary that has a uuid and a name; return the result.

    Every Exception becomes part of the result. `check_interrupted` is called about once a second, and may raise
    Interrupted.
    """
    instance, query, is_outcome_unknown = canary.instance or '', on_one(plan.query, canary.compute), False
    try:
        go_on()
        _place(do, plan, canary, query)
        canary = _boot(do, plan, canary, instance, go_on)
    except NoCapacity as error:
        reason = _lacks(do, query, canary.compute, error)
        return canary._replace(instance=None, name=None, reached=None, why=reason)
    except Exception as error:
        is_outcome_unknown = isinstance(error, UnknownOutcome)
        canary = _broken(do, canary, instance, error)
    return canary._replace(left=_destroyed(do, instance, canary.why if is_outcome_unknown else ''))


def _place(do: Context, plan: Plan, canary: Canary, query: str) -> None:
    order = SetOrder(
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
    create(do.store, backend, order, who(order), False, random.Random(), now)


def _boot(do: Context, plan: Plan, canary: Canary, instance: str, go_on: Callable[[], None]) -> Canary:
    """Wait for the stage and log in if planned; raise the wait's EcompError if it fails."""
    started = time.monotonic()
    wait = Wait(do.config.etcd, instance, Deadline(do.options.patience), lambda _: go_on(), claims=do.claims)
    record = wait_for_stage(wait, plan.stage)
    go_on()  # the wait calls this once a second and may have returned before the first call
    canary = canary._replace(reached=plan.stage, seconds=time.monotonic() - started, why=plan.not_asked)
    if not plan.not_asked and not record.host_keys:
        return canary._replace(why='its guest has not said which host keys it has')
    if not plan.not_asked:
        failure = why_not_entered(do, instance, go_on)
        if failure:
            return canary._replace(seconds=None, why=failure, broken=ENTERED)
        canary = canary._replace(reached=ENTERED, seconds=time.monotonic() - started)
    return canary


def _broken(do: Context, canary: Canary, instance: str, error: Exception) -> Canary:
    """Return the canary with its last stage and why it failed; at a timeout print its console."""
    entries = None
    with suppress(EcompError):
        entries = find(do.store, instance)
    record = entries.record if entries else None
    reached, stage = how_far(record)
    reason = str(error).removeprefix(f'{instance}: ') or type(error).__name__
    canary = canary._replace(reached=reached, seconds=None, why=reason)
    if isinstance(error, Interrupted):
        return canary
    if isinstance(error, StillGoing):
        waits = WAITS_FOR[SCHEDULED] if stage == SCHEDULED else waits_for(record)
        canary = canary._replace(why=f'{do.options.patience:g} s are up, still waiting for: {waits}')
        for console_line in last_lines(do, record) if record else ():
            do.out.say(f"{canary.name}'s console: {console_line}")
    return canary._replace(broken=stage)


def _lacks(do: Context, query: str, compute: str, error: NoCapacity) -> str:
    """Return what the compute lacks for the query, or the error's text if that is unknown."""
    if not isinstance(error, OverQuota):
        with suppress(EcompError, ValueError):
            return lacking(do.placement, query, do.computes, [compute]).get(compute) or str(error)
    return str(error)


def _destroyed(do: Context, instance: str, otherwise: str) -> str:
    """Destroy a canary, wait until it is gone, and return '' or why something may be left.

    Never raises an Exception. It returns `reason_if_absent` if etcd has no such instance: '' unless the outcome of the
    placement is unknown.
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
    def __init__(self, do: Context, plan: Plan) -> None:
        self._do = do
        self._plan = plan
        self._todo: list[Canary] = []
        self._placed: dict[str, Canary] = {}
        self._found: dict[str, Canary] = {}
        self._interrupts: list[float] = []
        self._news = threading.Event()

    @property
    def interrupted(self) -> bool:
        return bool(self._interrupts)

    def fly(self, hosts: Sequence[Host]) -> list[Canary]:
        """Run a canary on each host that is up, or only on that of --on, and return all results.

        Before the first canary it raises NotFound for an unknown flavor or --on, UsageError for an incomplete or
        invalid query, and the errors of etcd and placement.
        """
        ctx, options = self._do, self._do.options
        if options.flavor is not None:
            query = with_flavor(ctx.config, lambda: ctx.store, options.flavor, self._plan.query)
            self._plan = self._plan._replace(query=query)
        # Check the query first: an error in it is no finding about a host.
        for candidate in candidates(ctx.placement, self._plan.query).candidates:
            check_complete(candidate)
        only_compute = options.on and ctx.compute(options.on)
        selected_hosts = [host for host in hosts if not only_compute or host.compute == only_compute]
        if options.on and not selected_hosts:
            raise no_such(options.on, ctx.computes)
        for host in reversed(selected_hosts):
            canary = Canary(host.compute, host.hostname, ctx.computes.called(host.compute))
            if host.state == UP:
                self._todo.append(canary)
            else:
                self._found[host.compute] = canary._replace(why=f'it is {host.state}')
        self._begin([host.compute for host in selected_hosts])
        unfinished = {
            compute: entry._replace(why=INTERRUPTED, left=INTERRUPTED) for compute, entry in self._placed.items()
        }
        results = {**unfinished, **self._found}
        return [results[host.compute] for host in selected_hosts if host.compute in results]

    def _begin(self, computes: Sequence[str]) -> None:
        threads = [threading.Thread(target=self._work, name='canary', daemon=True) for _ in self._todo[:AT_ONCE]]
        with _heard(lambda: self._interrupts.append(time.monotonic())), Live() as show_status:
            for thread in threads:
                thread.start()
            self._wait(computes, show_status)

    def _wait(self, computes: Sequence[str], tell: Callable[[str], None]) -> None:
        """Print each result when it arrives, until all are there or a second interrupt comes."""
        reported = set[str]()
        started = time.monotonic()
        is_interrupt_reported = False
        while True:
            self._news.clear()
            if self.interrupted and not is_interrupt_reported:
                is_interrupt_reported = True
                self._do.out.say(f'interrupted: the canaries are being destroyed; again, in {GRACE:g} s, leaves them')
            for compute in [key for key in computes if key in self._found and key not in reported]:
                self._do.out.say(line(self._found[compute]))
                reported.add(compute)
            if len(reported) == len(computes) or (
                self.interrupted and self._interrupts[-1] > self._interrupts[0] + GRACE
            ):
                return
            tell(f'{len(computes) - len(reported)} canaries under way, {time.monotonic() - started:.0f} s')
            self._news.wait(TICK)

    def _work(self) -> None:
        with suppress(IndexError):  # another thread popped the last canary
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
        """Raise Interrupted after an interrupt; the threads call this while they wait."""
        if self.interrupted:
            raise Interrupted(INTERRUPTED)


@contextmanager
def _heard(hear: Callable[[], None]) -> Iterator[None]:
    """Call `on_signal` for SIGINT, SIGTERM and SIGHUP; ignored ones (nohup) stay ignored."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    replaced = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, lambda *_: hear())
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
