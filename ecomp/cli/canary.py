"""Boot, enter and destroy a small guest on every host for `eschedule doctor --canary`."""

from __future__ import annotations

import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ecomp.cli.command import Context
from ecomp.cli.create import describe_owner, read_ssh_keys
from ecomp.cli.enter import check_login, read_last_lines
from ecomp.cli.options import convert_to_usage_error
from ecomp.cli.terminal import LiveLine, make_timestamp
from ecomp.errors import EcompError, NoCapacity, NotFound, OverQuota, StillGoing, UnknownOutcome
from ecomp.model.canary import (
    BOOTED,
    DEFAULT_QUERY,
    ENTERED,
    READY,
    Canary,
    check_names_no_host,
    find_stages,
    format_line,
)
from ecomp.model.host import UP, Host
from ecomp.model.image import check_image
from ecomp.model.order import SetOrder
from ecomp.model.query import check_query, restrict_to_compute
from ecomp.model.record import SCHEDULED, WAIT_REASONS, describe_wait
from ecomp.placement.allocations import read_candidates
from ecomp.scheduler.changes.change import destroy, remove_if_finished
from ecomp.scheduler.changes.wait import Deadline, Wait, wait_for_stage, wait_until_gone
from ecomp.scheduler.operations.sharing import apply_flavor
from ecomp.scheduler.placing.create import create
from ecomp.scheduler.placing.explain import find_shortfalls
from ecomp.scheduler.placing.session import Scheduler, check_complete
from ecomp.scheduler.queries.find import find
from ecomp.scheduler.queries.hosts import make_no_such_compute

# Canaries in flight at a time. Each further host waits until an earlier canary is destroyed.
MAX_CONCURRENT_CANARIES = 64
STATUS_UPDATE_SECONDS = 1.0
# Seconds in which a second interrupt is ignored (timeout(1) sends two), and in which every destroy is requested.
INTERRUPT_GRACE_SECONDS = 3.0
INTERRUPTED = 'interrupted'
# A canary's user-data: the default one might report the guest to the outside world.
EMPTY_USER_DATA = b'#cloud-config\n{}\n'


class CanaryPlan(NamedTuple):
    """What all canaries share. `keys` None: those of mdserver.conf. `not_entered_reason`: '' if a login is planned."""

    query: str
    image: str
    keys: tuple[str, ...] | None
    stage: str
    not_entered_reason: str


def parse_plan(ctx: Context) -> CanaryPlan:
    """Read the plan without asking a server; UsageError if an argument or key file is invalid.

    By default `stage` is READY with a key or --identity, else BOOTED. Only READY with one of them has a login.
    """
    query, *image = ctx.words
    plan = CanaryPlan(
        query or ('' if ctx.options.flavor else DEFAULT_QUERY),
        image[0] if image else ctx.config.image,
        read_ssh_keys(files) if (files := ctx.options.ssh_key or ctx.config.ssh_keys) else None,
        ctx.options.stage or READY,
        '' if ctx.options.stage in (None, READY) else f'--for {ctx.options.stage} ends the test before the login',
    )
    with convert_to_usage_error():
        check_image(plan.image)
        check_query(plan.query, needs_resources=ctx.options.flavor is None)
        check_names_no_host(plan.query)
    if not plan.keys and not ctx.options.identity:
        reason = 'no ssh key was given (--ssh-key)'
        plan = plan._replace(stage=ctx.options.stage or BOOTED, not_entered_reason=reason)
    return plan


class Interrupted(EcompError):
    """The user has interrupted the command; raised by the callback of each wait."""


def run_canary(ctx: Context, plan: CanaryPlan, canary: Canary, check_interrupted: Callable[[], None]) -> Canary:
    """Place, boot, enter and destroy a canary that has a uuid and a name; return the result.

    Every Exception becomes part of the result. Without capacity the result has no instance, no name and no `reached`.
    `check_interrupted` is called about once a second until the destroy, and may raise Interrupted.
    """
    instance, query, is_outcome_unknown = canary.instance or '', restrict_to_compute(plan.query, canary.compute), False
    try:
        check_interrupted()
        _place_canary(ctx, plan, canary, query)
        canary = _boot_and_enter(ctx, plan, canary, instance, check_interrupted)
    except NoCapacity as error:
        reason = _explain_no_capacity(ctx, query, canary.compute, error)
        return canary._replace(instance=None, name=None, reached=None, reason=reason)
    except Exception as error:
        is_outcome_unknown = isinstance(error, UnknownOutcome)
        canary = _record_failure(ctx, canary, instance, error)
    return canary._replace(leftover_reason=_destroy_canary(ctx, instance, canary.reason if is_outcome_unknown else ''))


def _place_canary(ctx: Context, plan: CanaryPlan, canary: Canary, query: str) -> None:
    """Place the canary; errors of create() and of the query to placement are raised."""
    order = SetOrder(
        canary.instance or '',
        image=plan.image,
        user_id=ctx.config.user_id,
        project_id=ctx.config.project_id,
        query=query,
        stages={'requested': make_timestamp()},
        name=canary.name,
        ssh_keys=plan.keys,
        user_data=EMPTY_USER_DATA,
    )
    owner, offer = describe_owner(order.stages['requested']), read_candidates(ctx.placement, query)
    scheduler = Scheduler(ctx.store, lambda: (ctx.placement, offer), owner, random.Random(), make_timestamp)
    create(scheduler, order, resume=False)


def _boot_and_enter(
    ctx: Context, plan: CanaryPlan, canary: Canary, instance: str, check_interrupted: Callable[[], None]
) -> Canary:
    """Wait for the plan's stage, log in if planned, and return what the canary reached.

    `seconds` counts from this call. If the login fails, `seconds` is None, `failed_stage` is ENTERED. Without reported
    host keys the login is skipped, and `reason` says so. Raises errors of the wait, check_login(), `check_interrupted`.
    """
    started = time.monotonic()
    wait = Wait(
        ctx.config.etcd,
        instance,
        Deadline(ctx.options.wait_seconds),
        lambda _: check_interrupted(),
        claims=ctx.read_claims,
    )
    record = wait_for_stage(wait, plan.stage)
    check_interrupted()  # the wait calls this once a second and may have returned before the first call
    canary = canary._replace(reached=plan.stage, seconds=time.monotonic() - started, reason=plan.not_entered_reason)
    if not plan.not_entered_reason and not record.host_keys:
        return canary._replace(reason='the guest has not reported its host keys')
    if not plan.not_entered_reason:
        failure = check_login(ctx, instance, check_interrupted)
        if failure:
            return canary._replace(seconds=None, reason=failure, failed_stage=ENTERED)
        canary = canary._replace(reached=ENTERED, seconds=time.monotonic() - started)
    return canary


def _record_failure(ctx: Context, canary: Canary, instance: str, error: Exception) -> Canary:
    """Return the canary with its last stage (`requested` if unreadable) and failure; at a timeout print its console."""
    entries = None
    with suppress(EcompError):
        entries = find(ctx.store, instance)
    record = entries.record if entries else None
    reached, stage = find_stages(record)
    reason = str(error).removeprefix(f'{instance}: ') or type(error).__name__
    canary = canary._replace(reached=reached, seconds=None, reason=reason)
    if isinstance(error, Interrupted):
        return canary  # `failed_stage` stays '', because nothing is wrong with the host
    if isinstance(error, StillGoing):
        waits = WAIT_REASONS[SCHEDULED] if stage == SCHEDULED else describe_wait(record)
        canary = canary._replace(reason=f'timed out after {ctx.options.wait_seconds:g} s, still waiting for {waits}')
        for console_line in read_last_lines(ctx, record) if record else ():
            ctx.out.say(f'console of {canary.name}: {console_line}')
    return canary._replace(failed_stage=stage)


def _explain_no_capacity(ctx: Context, query: str, compute: str, error: NoCapacity) -> str:
    """Ask placement what the compute lacks for the query; return that, or the error's text if unknown or OverQuota."""
    if not isinstance(error, OverQuota):
        with suppress(EcompError, ValueError):
            return find_shortfalls(ctx.store, query, ctx.computes, [compute]).get(compute) or str(error)
    return str(error)


def _destroy_canary(ctx: Context, instance: str, reason_if_absent: str) -> str:
    """Destroy a canary, wait until it is gone, and return '' or why something may be left.

    It waits --timeout seconds at most. A gone canary's record is removed. It never raises an Exception. If etcd has no
    such instance, it returns `reason_if_absent`.
    """
    try:
        destroy(ctx.store, instance)
        deadline = Deadline(ctx.options.wait_seconds)
        wait_until_gone(Wait(ctx.config.etcd, instance, deadline, lambda _: None, claims=ctx.read_claims))
        remove_if_finished(ctx.store, find(ctx.store, instance))
    except NotFound:
        return reason_if_absent
    except Exception as error:
        return str(error).removeprefix(f'{instance}: ') or type(error).__name__
    return ''


class Canaries:
    """The canaries of one `doctor --canary`, in MAX_CONCURRENT_CANARIES threads at most; run() starts them."""

    def __init__(self, ctx: Context, plan: CanaryPlan) -> None:
        self._ctx = ctx
        self._plan = plan
        self._pending: list[Canary] = []
        self._in_flight: dict[str, Canary] = {}
        self._results: dict[str, Canary] = {}
        self._interrupt_times: list[float] = []
        self._result_event = threading.Event()

    @property
    def is_interrupted(self) -> bool:
        return bool(self._interrupt_times)

    def run(self, hosts: Sequence[Host]) -> list[Canary]:
        """Run a canary on each host that is up, or only on that of --on; print and return all results.

        The results are in the order of `hosts`; that of a host that is not up has only a reason. After an interrupt no
        canary starts, and those in flight are destroyed. A second interrupt leaves them, with `leftover_reason`; hosts
        without a canary may then have no result. Before the first canary it raises NotFound for an unknown flavor,
        UsageError for an incomplete or invalid query, resolve_compute()'s errors for --on, and etcd's and placement's.
        """
        ctx, options = self._ctx, self._ctx.options
        if options.flavor is not None:
            query = apply_flavor(ctx.config, lambda: ctx.store, options.flavor, self._plan.query)
            self._plan = self._plan._replace(query=query)
        # Check the query first: an error in it is no finding about a host.
        for candidate in read_candidates(ctx.placement, self._plan.query).candidates:
            check_complete(candidate)
        only_compute = options.on and ctx.resolve_compute(options.on)
        selected_hosts = [host for host in hosts if not only_compute or host.compute == only_compute]
        if options.on and not selected_hosts:
            raise make_no_such_compute(options.on, ctx.computes)
        for host in reversed(selected_hosts):
            canary = Canary(host.compute, host.hostname, ctx.computes.format_name(host.compute))
            if host.state == UP:
                self._pending.append(canary)
            else:
                self._results[host.compute] = canary._replace(reason=f'the host is {host.state}')
        self._run_threads([host.compute for host in selected_hosts])
        unfinished = {
            compute: entry._replace(reason=INTERRUPTED, leftover_reason=INTERRUPTED)
            for compute, entry in self._in_flight.items()
        }
        results = {**unfinished, **self._results}
        return [results[host.compute] for host in selected_hosts if host.compute in results]

    def _run_threads(self, computes: Sequence[str]) -> None:
        """Run pending canaries in daemon threads and print their results, until all are there or a second interrupt."""
        threads = [
            threading.Thread(target=self._run_pending, name='canary', daemon=True)
            for _ in self._pending[:MAX_CONCURRENT_CANARIES]
        ]
        with _catch_signals(lambda: self._interrupt_times.append(time.monotonic())), LiveLine() as show_status:
            for thread in threads:
                thread.start()
            self._report_results(computes, show_status)

    def _report_results(self, computes: Sequence[str], show_status: Callable[[str], None]) -> None:
        """Print results as they arrive until all are there, or an interrupt INTERRUPT_GRACE_SECONDS after the first."""
        reported = set[str]()
        started = time.monotonic()
        is_interrupt_reported = False
        while True:
            self._result_event.clear()
            if self.is_interrupted and not is_interrupt_reported:
                is_interrupt_reported = True
                self._ctx.out.say(
                    f'interrupted: the canaries are being destroyed. '
                    f'To exit before they are destroyed, interrupt again in {INTERRUPT_GRACE_SECONDS:g} s or later'
                )
            for compute in [key for key in computes if key in self._results and key not in reported]:
                self._ctx.out.say(format_line(self._results[compute]))
                reported.add(compute)
            if len(reported) == len(computes) or (
                self.is_interrupted and self._interrupt_times[-1] > self._interrupt_times[0] + INTERRUPT_GRACE_SECONDS
            ):
                return
            count = len(computes) - len(reported)
            show_status(f'{count} unfinished canar{"y" if count == 1 else "ies"}, {time.monotonic() - started:.0f} s')
            self._result_event.wait(STATUS_UPDATE_SECONDS)

    def _run_pending(self) -> None:
        """Run pending canaries until none is left; after an interrupt, only mark them INTERRUPTED."""
        with suppress(IndexError):  # another thread popped the last canary
            while self._pending:
                canary = self._pending.pop()
                if self.is_interrupted:
                    canary = canary._replace(reason=INTERRUPTED)
                else:
                    instance = str(uuid.uuid4())
                    canary = canary._replace(instance=instance, name=f'canary-{instance[:8]}', reached='requested')
                    self._in_flight[canary.compute] = canary
                    canary = run_canary(self._ctx, self._plan, canary, self._check_interrupted)
                self._results[canary.compute] = canary
                self._result_event.set()

    def _check_interrupted(self) -> None:
        """Raise Interrupted after an interrupt; the threads call this while they wait."""
        if self.is_interrupted:
            raise Interrupted(INTERRUPTED)


@contextmanager
def _catch_signals(on_signal: Callable[[], None]) -> Iterator[None]:
    """Within the block only call `on_signal` for SIGINT, SIGTERM and SIGHUP; ignored signals (nohup) stay ignored."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    replaced = {number: handler for number, handler in handlers.items() if handler != signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, lambda *_: on_signal())
    try:
        yield
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler)
