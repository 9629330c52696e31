"""`eschedule apply FILE`: exactly the instances of a file."""

from __future__ import annotations

import os
import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from ecomp.cli.command import LISTING_OPTIONS, Command, Context
from ecomp.cli.create import report_refusal
from ecomp.cli.input import STDIN, describe_owner
from ecomp.cli.options import TABLE, Options, parse_file
from ecomp.cli.selection import MAX_NAMES_IN_QUESTION, confirm_destroy
from ecomp.cli.stack_file import StackFile, load_stack_file
from ecomp.cli.tables import UUID, Column, Listing, Row
from ecomp.cli.terminal import LiveLine, make_timestamp
from ecomp.errors import Conflict, NoCapacity, NotFound, StillGoing, Unreachable, UsageError, put_before_fix
from ecomp.model import apply as plan
from ecomp.model import keys
from ecomp.model.host import NO_COMPUTES, ComputeNames, describe_silent_fix
from ecomp.model.keys import make_uuid
from ecomp.model.query import read_amounts
from ecomp.model.record import Record, describe_failure, parse_or_none
from ecomp.model.stack import Stack
from ecomp.model.states import ERROR, SCHEDULED, STAGES, STOPPED
from ecomp.model.text import format_suggestion, join_some, make_printable
from ecomp.scheduler.placing import offer, session
from ecomp.scheduler.placing import stack as placing
from ecomp.scheduler.queries import stacks
from ecomp.store.client import describe_user

COLUMNS = (
    Column('NAME', min_width=12), Column('ACTION'), Column('STATE', rank=1), Column('ADDRESS', rank=3),
    Column('HOST', rank=2), Column('INSTANCE', kind=UUID), Column('REASON', min_width=20, folds=True),
)  # fmt: skip
# What differs from the file.
_UNLIKE = (plan.DIFFERS, plan.REPLACE, plan.RESIZE)
_CURE = re.compile(r'\. (Fix|Try): ')
_DESCRIPTIONS = {
    plan.CREATE: 'new',
    plan.KEEP: 'as the file asks',
    plan.REPLACE: 'replaced',
    plan.RESIZE: 'resized (processors and memory when they start: eschedule reboot)',
    plan.DESTROY: 'destroyed',
    plan.SURPLUS: 'not in the file (--prune destroys them)',
    plan.DIFFERS: 'different',
    plan.FAILED: 'in error (--replace MEMBER replaces them)',
    plan.TAKEN: 'with the name of another instance',
    plan.ENDING: 'being destroyed',
    plan.STAYS: 'on a silent host, unchanged',
}


@dataclass
class _Apply:
    """One run of apply.

    `targets` are the members and entries that --replace names, ALL_MEMBERS with --replace-all.
    `silent_computes` has, by entry, the compute of each instance that stays because it may still run there.
    `new_instances` has uuids by entry. `computes` and `outcomes` are by instance.
    """

    ctx: Context
    file: StackFile
    targets: Collection[str] | None = ()
    state: stacks.StackState = field(init=False)
    steps: Sequence[plan.Action] = ()
    prune_steps: Sequence[plan.Action] = ()
    effect: str = 'nothing was changed'
    silent_computes: dict[str, str] = field(default_factory=dict)
    new_instances: dict[str, str] = field(default_factory=dict)
    computes: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, Record] = field(default_factory=dict)

    @property
    def records(self) -> dict[str, Record]:
        """The last known record of each instance."""
        return {entries.record.instance: entries.record for entries in self.state.entries.values()} | self.outcomes

    @property
    def failed_entries(self) -> set[str]:
        """The entries whose instance was in error after --wait."""
        failed = {instance for instance, record in self.outcomes.items() if record.state == ERROR}
        return {step.entry for step in self.steps if self.new_instances.get(step.entry, step.instance) in failed}

    def read_and_plan(self) -> None:
        prune, names = self.ctx.options.prune, [each.order.name or '' for each in self.file.instances.values()]
        state = self.state = stacks.read_stack(self.ctx.store, self.file.name, names)
        # A replacement gets the name that the instance has, also if --destroy-first reads the stack again without it.
        desired = plan.keep_names(self.file.instances, state.current)
        self.file = replace(self.file, instances=desired)
        steps = plan.plan_steps(desired, state.current, state.owners, self.targets, prune, self.ctx.options.resize)
        if replaced := [step.entry for step in steps if step.action in (plan.REPLACE, plan.DESTROY)]:
            self.silent_computes |= stacks.find_silent_computes(self.ctx.store, self.ctx.placement, state, replaced)
        steps = [self._keep_if_silent(step) for step in steps]
        self.steps = [step for step in steps if step.action != plan.ENDING or step.entry in desired]
        pruned = (plan.DESTROY, plan.ENDING) if prune else ()
        self.prune_steps = [step for step in steps if step.action in pruned and step.entry not in desired]
        self.ctx.display_names |= {step.instance: step.name for step in steps if step.instance and step.name}

    def _keep_if_silent(self, step: plan.Action) -> plan.Action:
        if step.entry not in self.silent_computes or step.action not in (plan.REPLACE, plan.DESTROY, plan.DIFFERS):
            return step
        host = self.ctx.name_computes().format_name(self.silent_computes[step.entry])
        reason = f'its host {host} is silent, and may run it. Fix: {describe_silent_fix(host, "")}'
        return step._replace(action=plan.STAYS, reasons=[*step.reasons, reason])

    def select(self, *actions: str) -> list[plan.Action]:
        return [step for step in self.steps if step.action in actions]


def _apply(ctx: Context) -> int:
    ctx.connect()
    file = load_stack_file(ctx, ctx.words[0])
    run = _Apply(ctx, file, _parse_targets(ctx.options, file))
    run.read_and_plan()
    if not run.select(plan.TAKEN):
        _report_origin(run)
        _require_transaction_size(run)
    if ctx.options.dry_run:
        return _preview(run)
    if run.select(plan.TAKEN):
        return _report_taken_names(run)
    if not _wait_for_ends(run, run.select(plan.ENDING)):
        return StillGoing.exit_code
    removed = run.select(plan.REPLACE, plan.DESTROY)
    if run.select(plan.REPLACE) and not ctx.options.yes and (code := _preview_places(run)):
        return code
    confirm_destroy(ctx, [step.name or step.instance for step in removed])
    if removed and not ctx.options.yes:
        run.read_and_plan()  # during the question a host may have become silent
        if {each.instance for each in run.select(plan.REPLACE, plan.DESTROY)} - {each.instance for each in removed}:
            raise Conflict(f'stack {file.name}: changed before the question was answered. Try: the same command again')
    try:
        return _change_and_report(run)
    except KeyboardInterrupt:
        doubt = f'interrupted: the change of stack {file.name} may be carried out'
        raise StillGoing(f'{doubt}. Try: the same command again') from None


def _describe_origin(ctx: Context) -> str:
    path = ctx.words[0]
    return f'{describe_user()}:{path if path == STDIN else os.path.abspath(path)}'


def _report_origin(run: _Apply) -> None:
    if run.state.stack is None:
        run.ctx.out.say(f'stack {run.file.name} is new')
    previous = run.state.stack.applied_from if run.state.stack else ''
    surplus = run.select(plan.DESTROY if run.ctx.options.prune else plan.SURPLUS)  # without protected ones
    if surplus and previous not in ('', _describe_origin(run.ctx)):
        origin = make_printable(f'stack {run.file.name}: was last applied from {previous}', 400)
        names = join_some([step.name or step.instance for step in surplus], MAX_NAMES_IN_QUESTION)
        effect = ', which --prune destroys' if run.ctx.options.prune else ''
        run.ctx.out.say(f'{origin}; this file lacks {names}{effect}')


def _require_transaction_size(run: _Apply) -> None:
    orders = [run.file.instances[step.entry].order for step in run.select(plan.CREATE, plan.REPLACE)]
    removed = run.select(plan.DESTROY) if run.ctx.options.destroy_first else run.select(plan.REPLACE, plan.DESTROY)
    placing.require_transaction_size(run.ctx.store, run.file.name, orders, len(removed))


def _change_and_report(run: _Apply) -> int:
    ctx = run.ctx
    if ctx.options.destroy_first and (replaced := run.select(plan.REPLACE)):
        run.targets = ()
        if not _destroy_first(run, replaced, 'replaced'):
            return StillGoing.exit_code
    if run.state.is_stale:
        _make_change(run, ())
        run.read_and_plan()
    if code := _carry_out(run):
        return code
    _resize(run)
    code = 0 if ctx.options.wait is None else _wait_for_stage(run)
    _report(run)
    # Others have a reason that says what to do.
    if differing := [step for step in run.select(plan.DIFFERS) if not any(map(_CURE.search, step.reasons))]:
        resizable = sum(step.can_resize for step in differing)
        keeping = f'--resize for {resizable} of them, which keep their disks, ' if resizable else ''
        fixes = f'give {keeping}--replace MEMBER or --replace-all to destroy and recreate them, or correct the file'
        ctx.out.say(f'stack {run.file.name}: {len(differing)} of its instances differ. Fix: {fixes}')
    ends = () if ctx.options.wait is None or code else run.prune_steps
    code = code or plan.find_exit_code(run.steps)
    return code if _wait_for_ends(run, ends) else StillGoing.exit_code


def _resize(run: _Apply) -> None:
    """Resize each instance, or make its step DIFFERS, with the reason, if it is refused."""
    from ecomp.scheduler.placing.modify import resize

    ctx, owner = run.ctx, describe_owner(make_timestamp())
    if (steps := run.select(plan.RESIZE)) and not run.select(*plan.CHANGES):  # otherwise it is written by now
        placing.write_stack(ctx.store, _make_change(run, ()).stack, run.state.revision)
    for step in steps:
        amounts = read_amounts(run.file.instances[step.entry].order.query or '')
        try:
            resize(ctx.store, ctx.placement, step.instance, amounts, owner)
        except (NoCapacity, Conflict, NotFound, UsageError) as error:
            refused = step._replace(action=plan.DIFFERS, reasons=[*step.reasons, str(error)], can_resize=False)
            run.steps = [refused if each is step else each for each in run.steps]


def _destroy_first(run: _Apply, steps: Sequence[plan.Action], what: str) -> bool:
    """Destroy these instances, wait and plan again, or print why not and return False."""
    if removed := [step._replace(action=plan.DESTROY) for step in steps if step.action != plan.ENDING]:
        placing.remove_instances(run.ctx.store, _make_change(run, removed))
        run.effect = f'the {what} instances were destroyed'
    return _wait_for_ends(run, steps, is_needed=True)


def _report_taken_names(run: _Apply) -> int:
    _report(run)
    problem = f'stack {run.file.name}: names taken by other instances: {len(run.select(plan.TAKEN))}; {run.effect}'
    run.ctx.out.say(f'{problem}. Fix: give other names in the file, or first destroy the instances that have these')
    return Conflict.exit_code


def _carry_out(run: _Apply) -> int:
    """Create, replace and destroy in one step, or prune first if that may make room."""
    ctx = run.ctx
    if run.select(plan.TAKEN):  # since the first check
        return _report_taken_names(run)
    if not run.select(*plan.CHANGES):
        return 0
    backend = offer.ask_placement(ctx.config.placement, None, ctx.slow_notice)
    change = _make_change(run, run.select(*plan.CHANGES))
    owner = describe_owner(make_timestamp())
    try:
        scheduler = session.Scheduler(ctx.store, backend.result, owner, random.Random(), make_timestamp)
        run.computes = placing.apply_change(scheduler, change)
    except NoCapacity as error:
        if _may_prune_first(run, error):
            destroyed = run.select(plan.DESTROY)
            if not _destroy_first(run, run.prune_steps, 'pruned'):
                return StillGoing.exit_code
            code = _carry_out(run)
            run.steps = [*run.steps, *destroyed]  # for the report
            return code
        return _report_no_room(run, error, backend, change)
    return 0


def _make_change(run: _Apply, steps: Sequence[plan.Action], preview: bool = False) -> placing.StackChange:
    """Make the change of these steps, and set `run.new_instances`.

    Except for a preview, a stack that is new or stale is first written to etcd.
    """
    state, stack = run.state, run.state.stack or Stack(run.file.name, make_uuid(os.urandom(16)))
    stack = stack._replace(applied_from=_describe_origin(run.ctx))
    is_due = state.stack is None or state.is_stale
    if is_due:
        stacks.require_known_claims(run.ctx.store, run.ctx.placement, stack.name, run.ctx.computes)
    revision = state.revision if preview or not is_due else placing.write_stack(run.ctx.store, stack, state.revision)
    new = {step.entry: run.file.instances[step.entry] for step in steps if step.action in (plan.CREATE, plan.REPLACE)}
    old = [step for step in steps if step.action in (plan.REPLACE, plan.DESTROY)]
    removals = [session.OldInstance(each.entry, state.entries[each.entry], each.action == plan.REPLACE) for each in old]
    order = plan.make_stack_order(stack, new, {'requested': make_timestamp()}) if new else None
    used = {desired.order.user_data_sha256 for desired in new.values()}
    user_data = [shared for sha256, shared in run.file.user_data.items() if sha256 in used]
    places = [each.stack for each in order.orders.values()] if order else []
    run.new_instances = {place.entry_name: place.instance for place in places if place}
    return placing.StackChange(stack, revision, order, removals, user_data, is_new=state.stack is None)


def _preview(run: _Apply) -> int:
    if not run.select(plan.TAKEN) and run.select(plan.CREATE, plan.REPLACE) and (code := _preview_places(run)):
        return code
    _report(run, is_preview=True)
    return plan.find_exit_code(run.steps, dry_run=True)


def _preview_places(run: _Apply) -> int:
    """Choose places without claiming them, or report a refusal and return its exit code."""
    ctx = run.ctx
    if ctx.options.destroy_first and run.select(plan.REPLACE):
        ctx.out.say('whether there is room is known only after the replaced instances are destroyed')
        return 0
    backend = offer.ask_placement(ctx.config.placement, None, ctx.slow_notice)
    change = _make_change(run, run.select(plan.CREATE, plan.REPLACE), preview=True)
    try:
        run.computes = placing.preview_change(ctx.store, backend, change, random.Random())
    except NoCapacity as error:
        if not _may_prune_first(run, error):
            return _report_no_room(run, error, backend, change)
    return 0


def _may_prune_first(run: _Apply, error: NoCapacity) -> bool:
    """Return whether --prune destroys anything, and if so print that this may make room."""
    names = join_some([step.name or step.instance for step in run.prune_steps], MAX_NAMES_IN_QUESTION)
    if names:
        run.ctx.out.say(put_before_fix(str(error), f'; --prune destroys {names} first, and then there may be room'))
    return bool(names)


def _parse_targets(options: Options, file: StackFile) -> Collection[str] | None:
    if options.replace_all:
        return plan.ALL_MEMBERS
    replaced = [member for text in options.replace or () for member in text.split(',')]
    for member in replaced:
        if member not in (known := [*file.members, *file.instances]):
            raise UsageError(f'--replace: the file has no member {member!r:.80}{format_suggestion(member, known)}')
    return replaced


def _wait_for_ends(run: _Apply, steps: Sequence[plan.Action], is_needed: bool = False) -> bool:
    """Wait until these instances are gone and plan again, or print why not and return False.

    Without --wait, --destroy-first and `is_needed` it does not wait.
    """
    from ecomp.scheduler.changes.wait import Deadline, Wait, wait_until_gone

    ctx = run.ctx
    if not steps:
        return True
    names = join_some([step.name or step.instance for step in steps], MAX_NAMES_IN_QUESTION)
    if ctx.options.wait is None and not ctx.options.destroy_first and not is_needed:
        ctx.out.say(f'{names}: still being destroyed; nothing was changed. Try: the same command with --wait')
        return False
    deadline = Deadline(ctx.options.wait_seconds)
    try:
        for step in steps:
            with LiveLine() as show_status:
                wait_until_gone(Wait(ctx.config.etcd, step.instance, deadline, show_status, claims=ctx.read_claims))
    except (StillGoing, KeyboardInterrupt) as error:
        ctx.out.say(f'{error or f"interrupted: {names}: still being destroyed"}. Try: the same command')
        return False
    run.read_and_plan()
    return True


def _report_no_room(run: _Apply, error: NoCapacity, backend: offer.Backend, change: placing.StackChange) -> int:
    from ecomp.scheduler.placing.explain import Refusal, report_reasons

    ctx = run.ctx
    if run.select(plan.REPLACE):
        kept = 'its place and its share of the quota'
        ctx.out.say(f'a replaced instance keeps {kept} until the new one is placed. Try: --destroy-first')
    if not isinstance(error, placing.MembersRefused) or change.order is None:
        return report_refusal(ctx, error)
    order = change.order.orders[error.instances[0]]

    def explain(say: Callable[[str], None]) -> None:
        def say_unless_about_count(line: str) -> None:
            if not line.startswith('Try: --count'):  # an option of create
                say(line)

        refusal = Refusal(order.query or '', places=error.places)
        report_reasons(ctx.store, backend, refusal, order.group, say_unless_about_count)

    return report_refusal(ctx, error, explain)


def _report(run: _Apply, is_preview: bool = False) -> None:
    ctx = run.ctx
    kept = [step for step in run.select(plan.KEEP) if step.instance not in run.outcomes]
    shown = [step for step in run.steps if ctx.form != TABLE or step not in kept]
    naming = ctx.name_computes() if shown else NO_COMPUTES
    # Before the first apply a stack has no epoch, so the uuids of its instances are not known.
    rows = [_make_row(run, step, naming, not (is_preview and run.state.stack is None)) for step in shown]
    if rows or ctx.form != TABLE or ctx.options.columns:
        ctx.show(Listing(list(COLUMNS), rows, {'stack': run.file.name, 'instances': [row.value for row in rows]}))
    _print_summary(run, is_preview)


def _print_summary(run: _Apply, is_preview: bool) -> None:
    failed = run.failed_entries
    counts = Counter('failed' if step.entry in failed else _DESCRIPTIONS[step.action] for step in run.steps)
    summary = ', '.join(f'{counts[text]} {text}' for text in (*_DESCRIPTIONS.values(), 'failed') if counts[text])
    would = 'would have ' if is_preview or (run.select(plan.TAKEN) and run.select(*plan.CHANGES, plan.RESIZE)) else ''
    run.ctx.out.say(f'stack {run.file.name}: {would}{summary or "no instances"}')
    requests = [run.state.current[step.entry].request for step in run.select(plan.KEEP)]
    if pending := sum(request is not None and request.resize is not None for request in requests):
        run.ctx.out.say(f'{pending} of them get their new size when they start. Try: eschedule reboot')
    differing = [(step.member, reason) for step in run.select(*_UNLIKE) for reason in step.reasons]
    for (member, reason), count in Counter(differing).items():
        run.ctx.out.say(f'{member}{f" ({count})" if count > 1 else ""}: {reason}')


def _make_row(run: _Apply, step: plan.Action, naming: ComputeNames, has_uuids: bool) -> Row:
    instance = run.new_instances.get(step.entry, step.instance)
    record, reasons = run.records.get(instance), list(step.reasons)
    compute = run.computes.get(instance) or (record.compute if record else '')
    is_failed = step.entry in run.failed_entries
    if record and is_failed:
        reasons = [describe_failure(record).partition(': ')[2]]
    value: dict[str, Any] = {
        'member': step.member,
        'number': int(step.entry.rpartition('/')[2]),
        'name': step.name,
        'action': step.action,
        'instance': instance or None if has_uuids else None,
        'replaced': step.instance if step.action == plan.REPLACE else None,
        'state': record and (record.state if instance in run.outcomes else step.state),
        'address': record and record.address,
        'compute': compute or None,
        'host': naming.find_hostname(compute),
        'reasons': reasons,
    }
    # In a table what differs is printed once for all instances of a member.
    is_shared = run.ctx.form == TABLE and step.action in _UNLIKE and not is_failed
    cells = [*(value[field] for field in ('name', 'action', 'state', 'address')), naming.format_name(compute) or None]
    return Row([*cells, value['instance'], None if is_shared else '; '.join(reasons) or None], value)


def _wait_for_stage(run: _Apply) -> int:
    """Wait for the new and the kept instances, and set `run.outcomes` to their records."""
    from ecomp.cli.waiting import wait_for_new

    ctx = run.ctx
    kept = {step.instance: step.name for step in run.select(plan.KEEP, plan.RESIZE) if step.state != STOPPED}
    new = {run.new_instances[step.entry]: step.name for step in run.select(plan.CREATE, plan.REPLACE)}
    ctx.display_names |= {instance: name for instance, name in {**kept, **new}.items() if name}
    places = {instance: record.compute for instance, record in run.records.items()} | run.computes
    places = {each: places[each] for each in (*new, *kept)}
    outcomes = wait_for_new(ctx, places, puts_addresses=False)
    with suppress(Unreachable):  # the wait has reported this
        read = ctx.store.read([keys.record(compute, each) for each, compute in places.items()])
        records = {keys.get_last_part(key): parse_or_none(entry.value) for key, entry in read.items()}
        run.outcomes = {each: records.get(each) or Record(each, on, SCHEDULED) for each, on in places.items()}
    if outcomes.exit_code == StillGoing.exit_code:
        ctx.out.say(f'stack {run.file.name}: not all instances have reached the stage. Try: the same command')
    return outcomes.exit_code


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('apply', 'apply FILE', 'create the missing instances of a file',
            'Read a file of instances, a stack, and create those that do not exist: all of them or none. Instances '
            'that exist and are as the file asks are kept, so the command can be repeated as often as you like; a '
            'command that was killed is continued by the next one. FILE is YAML, - is standard input; paths in it are '
            'relative to FILE. An instance that differs from the file, is in error, or is on a silent host, which may '
            'still run it, is kept and reported (exit 5); --replace destroys and recreates those that differ or are in '
            'error. Instances that the file no longer has are kept, unless you give --prune. More than about 60 '
            'instances need an etcd that takes more than 128 operations in a transaction; docker.sh and elab start '
            'one that takes 2048.',
            parse_file, _apply,
            {'dry_run': '', 'prune': '', 'replace': '', 'replace_all': '', 'resize': '', 'destroy_first': '', 'yes': '',
             'wait': 'return once the instances of the file have reached STAGE: ' + ', '.join(STAGES) + '; without '
             'STAGE, addressed. Default: return once they are placed', 'timeout': '', **LISTING_OPTIONS},
            (3, 4, 5, 6, 8), example='eschedule apply shop.yaml --wait'),
)
