"""The wait of a command for several instances, with one deadline, and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ecomp.cli.command import EMPTY_STATUS, Context, Outcomes, extract_status
from ecomp.cli.options import TABLE
from ecomp.cli.terminal import LiveLine
from ecomp.errors import StillGoing
from ecomp.model import keys
from ecomp.model.order import PowerAction
from ecomp.model.record import Record
from ecomp.model.states import STAGES
from ecomp.model.text import make_printable
from ecomp.scheduler.changes.wait import Deadline, SilenceDetector, Wait, wait_for_stage
from ecomp.scheduler.queries.computes import describe_if_silent
from ecomp.shared.attempts import is_alive
from ecomp.shared.places import KeyIndex

ADDRESSED = 'addressed'


def wait_and_report(
    ctx: Context,
    outcomes: Outcomes,
    resolve: Callable[[str], tuple[str, PowerAction | None]],
    instance_index: KeyIndex | None,
    puts_addresses: bool = True,
) -> None:
    """Wait until each word's instance has reached the stage of --for or --wait, or ADDRESSED.

    All instances share one deadline, at which the last console lines are printed.
    Only the table form prints an address. The caller prints the document of other forms.
    `resolve` returns the uuid for a word, and the power change to wait for.
    Without `puts_addresses`, the caller prints the addresses of the table form, too.
    """
    stage = ctx.options.stage or ctx.options.wait or ADDRESSED
    silence = SilenceDetector(lambda compute: describe_if_silent(ctx.store, ctx.placement, compute))

    def print_console(record: Record) -> None:
        from ecomp.cli.enter import read_last_lines

        for line in read_last_lines(ctx, record):
            ctx.out.say(f'console of {record.name or record.instance}: {line}')

    def wait(word: str, deadline: Deadline) -> None:
        def record_status(record: Record) -> None:
            outcomes.report(word, '', **extract_status(record))

        instance, power = resolve(word)
        with LiveLine() as show_status:
            callbacks = record_status, print_console, ctx.read_claims, silence
            wait_state = Wait(ctx.etcd_config, instance, deadline, show_status, instance_index, *callbacks)
            record = wait_for_stage(wait_state, stage, power)
        is_old = ctx.name == 'wait' and not is_alive(ctx.store, record.compute)
        if is_old and (host := describe_if_silent(ctx.store, ctx.placement, record.compute)):
            raise StillGoing(f'{instance}: reached {stage}, but its host {host}. Try: eschedule hosts')
        if ctx.form == TABLE and puts_addresses and record.address and STAGES.index(stage) >= STAGES.index(ADDRESSED):
            ctx.out.put(make_printable(record.address or ''))

    outcomes.wait(list(outcomes.results), wait, 'wait', '' if stage == ADDRESSED else f' --for {stage}')


def wait_for_new(ctx: Context, compute_by_instance: Mapping[str, str], puts_addresses: bool = True) -> Outcomes:
    """Wait for new instances, each with its compute, or with '' if it is in a queue."""
    outcomes = Outcomes(ctx, list(compute_by_instance), **EMPTY_STATUS)
    index = KeyIndex({each: [keys.request(on, each)] for each, on in compute_by_instance.items() if on})
    wait_and_report(ctx, outcomes, lambda instance: (instance, None), index, puts_addresses)
    return outcomes
