"""Commands for operators of computes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ecomp.cli.command import DOCUMENT_OPTIONS, LISTING_OPTIONS, Command, Context, Outcomes, make_wait_options
from ecomp.cli.options import TABLE, Options, parse_any_computes, parse_computes
from ecomp.cli.tables import STATE, TIME, UUID, Column, Listing, Row, make_sort_key
from ecomp.cli.terminal import LiveLine, make_timestamp
from ecomp.errors import Conflict, EcompError, NoCapacity, NotFound, StillGoing, Unreachable, UsageError, put_before_fix
from ecomp.model import keys
from ecomp.model.allocation import REQUIRED_CLASSES, Room
from ecomp.model.choose import Offer
from ecomp.model.host import CLOSED, DISABLED, Computes, Host
from ecomp.model.order import START, STOP, get_holdings
from ecomp.model.states import STAGES
from ecomp.scheduler.queries import computes
from ecomp.scheduler.queries import hosts as queries
from ecomp.scheduler.queries.find import list_records, read_record

if TYPE_CHECKING:
    from ecomp.scheduler.changes.wait import Deadline
    from ecomp.scheduler.placing.create import RankedCompute
    from ecomp.scheduler.placing.evacuate import Evacuated, Move

GREEDY_NOTE = 'They were placed one after the other, as `evacuate` does: in another order more may fit'
COMPUTE_COLUMN = Column('COMPUTE', rank=2, kind=UUID)


def _list_hosts(ctx: Context) -> int:
    requested, code = ctx.find_each(ctx.resolve_compute)
    hosts, unreadable = queries.read_hosts(ctx.store, ctx.placement)
    if not ctx.words:
        return ctx.show(make_host_listing(hosts), unreadable)
    selected = [host for host in hosts if host.compute in requested]
    for missing in dict.fromkeys(requested):
        if missing not in {host.compute for host in selected}:
            ctx.out.say(f'{missing}: no host has this name or uuid. Try: {ctx.command_prefix} hosts')
            code = code or NotFound.exit_code
    if not selected:
        return code
    listing_code = ctx.show(make_host_listing(selected), unreadable, is_single=len(ctx.words) == 1)
    if ctx.form == TABLE and not ctx.options.columns and not ctx.options.sort:
        from ecomp.cli.inspect import make_record_listing

        present = {instance for host in selected for instance in host.instances}
        records = [record for record in list_records(ctx.store, with_gone=False)[0] if record.instance in present]
        ctx.out.put('' if records else '\nno instances')
        if records:
            absences = computes.read_absences(ctx.store, lambda: ctx.placement, ctx.computes, records, ctx.out.say)
            ctx.show(make_record_listing(records, ctx.computes, absences))
    return code or listing_code


def _change_host_status(ctx: Context) -> int:
    """Enable or drain the given hosts, or none of them if one is unknown."""
    from ecomp.scheduler.operations import decommission

    outcomes, changed_guests = Outcomes(ctx, ctx.words, compute=None), set[str]()

    def find(word: str) -> None:
        outcomes.report(word, compute=ctx.resolve_compute(word))
        decommission.require_provider(ctx.placement, outcomes.results[word]['compute'], word)

    def change_guests(word: str, action: str) -> Collection[str]:
        ctx.name_computes()
        target, report = outcomes.results[word]['compute'], partial(outcomes.report, word)
        return decommission.change_guests(ctx.store, target, action, changed_guests, report)

    def change(word: str) -> bool:
        target = outcomes.results[word]['compute']
        if ctx.name == 'host enable':
            outcomes.report(word, decommission.enable(ctx.store, ctx.placement, target, word))
        else:
            outcomes.report(word, decommission.disable(ctx.placement, target, word))
            for line in decommission.list_inhabitants(ctx.store, ctx.placement, target, word):
                outcomes.report(word, line)
        if ctx.options.stop:
            change_guests(word, STOP)
        if ctx.options.start and change_guests(word, START):
            raise Conflict(f'{word}: some guests are not started, as reported above. Try: eschedule list')
        return True

    def wait(word: str, deadline: Deadline) -> None:
        target = outcomes.results[word]['compute']
        stop = partial(change_guests, word, STOP) if ctx.options.stop else None
        with LiveLine() as show_status:
            decommission.wait_until_drained(ctx.store, ctx.placement, target, word, deadline, show_status, stop)
        outcomes.report(word, f'{word}: no {"guest runs" if stop else "instances remain"}')

    outcomes.process_each(list(ctx.words), find)
    if outcomes.exit_code:
        outcomes.finish()
    else:
        outcomes.run(change, wait, f'{ctx.name} --wait' + ' --stop' * ctx.options.stop)
    return max((result['error']['code'] for result in outcomes.results.values() if result['error']), default=0)


def _forget_hosts(ctx: Context) -> int:
    from ecomp.scheduler.operations.forget import forget

    outcomes = Outcomes(ctx, ctx.words, compute=None)

    def forget_one(word: str) -> None:
        target = ctx.resolve_compute(word)
        outcomes.report(word, compute=target)
        try:
            report, fenced = partial(outcomes.report, word), ctx.options.fenced
            forget(ctx.store, ctx.placement, target, word, make_timestamp, report, fenced)
        except Unreachable as error:
            problem = f'{word}: only what is reported above was removed (repeat the command to remove the rest)'
            raise type(error)(f'{problem}: {error}', error.backend) from error

    return outcomes.run(forget_one)


def _print_plan(ctx: Context) -> int:
    from ecomp.scheduler.placing.evacuate import plan_moves, read_moves

    dead = list(dict.fromkeys(map(ctx.resolve_compute, ctx.words)))
    for compute in dead:
        computes.require_compute(ctx.computes, lambda: ctx.placement, compute)
    guests, planner = read_moves(ctx.store, ctx.placement, ctx.computes.living, dead or None)
    if dead:
        everyone = [guest for compute in dead for guest in guests.get(compute, ())]
        moves = plan_moves(planner, everyone, dead, with_protected=ctx.options.include_protected)
        listing = make_move_listing(moves, ctx.computes)
    else:
        names = {compute: ctx.computes.format_name(compute) for compute in (*ctx.computes.living, *guests)}
        ordered = sorted(names, key=lambda compute: make_sort_key(names[compute]))
        plans = {compute: plan_moves(planner, guests.get(compute, ()), [compute]) for compute in ordered}
        moves = [move for plan in plans.values() for move in plan]
        listing = make_absorption_listing(plans, ctx.computes)
    ctx.show(listing)
    if count := sum(move.candidate is None for move in moves):
        ctx.out.say(f'{count} of {len(moves)} guests would have no place. {GREEDY_NOTE}')
    return NoCapacity.exit_code if count else 0


def _find_evacuate_problems(name: str, words: Sequence[str], options: Options) -> Iterator[str]:
    if options.each and (words or not options.dry_run):
        yield f'{name}: --each needs --dry-run, and no host'
    elif options.dry_run and not words and not options.each:
        yield f'{name}: missing argument: one or more hosts, by name or uuid, or --each'
    elif len(words) != 1 and not options.dry_run:
        yield f'{name}: needs exactly one host, by name or uuid'


def _evacuate(ctx: Context) -> int:
    from ecomp.cli.selection import confirm_destroy
    from ecomp.scheduler.placing.evacuate import plan_moves, read_moves, require_silence

    if ctx.options.dry_run:
        return _print_plan(ctx)
    target = ctx.resolve_compute(ctx.words[0])
    computes.require_compute(ctx.computes, lambda: ctx.placement, target)
    if not ctx.options.fenced:
        cure = 'switch the machine off, and give --fenced; --dry-run prints the plan'
        raise UsageError(f'{ctx.name}: guests that still run on {ctx.words[0]} would run twice. Fix: {cure}')
    host = ctx.computes.format_name(target)
    require_silence(ctx.store, target, host)
    if computes.read_absent_states(ctx.placement, [target]).get(target) == CLOSED:
        ctx.out.say(f'{host}: its ecompute was stopped cleanly, and its guests run on unless the machine is off')
    guests, planner = read_moves(ctx.store, ctx.placement, ctx.computes.living, [target])
    moves = plan_moves(planner, guests.get(target, ()), [target], with_protected=ctx.options.include_protected)
    lost = [move.guest.request for move in moves if move.candidate is not None]
    if lost:
        ctx.out.say(f'{len(lost)} {"disks" if lost[1:] else "disk"} on {host} {"are" if lost[1:] else "is"} lost')
    confirm_destroy(ctx, [get_holdings(request).name or request.instance for request in lost])
    outcomes, code = _move_guests(ctx, target, host)
    code = _wait_and_report(ctx, host, outcomes, code)
    return code or (NoCapacity.exit_code if any(outcome.reason for outcome in outcomes) else 0)


def _move_guests(ctx: Context, target: str, host: str) -> tuple[list[Evacuated], int]:
    """Disable and evacuate a host, print each outcome, and return them with an exit code."""
    import random

    from ecomp.cli.input import describe_owner
    from ecomp.scheduler.operations.decommission import disable
    from ecomp.scheduler.placing.evacuate import evacuate
    from ecomp.scheduler.placing.session import Scheduler

    outcomes: list[Evacuated] = []
    again = f'Try: {ctx.command_prefix} evacuate {ctx.words[0]} --fenced --yes'

    def report(outcome: Evacuated) -> None:
        outcomes.append(outcome)
        new = f'evacuated to {ctx.computes.format_name(outcome.compute)} as {outcome.replaced_by}'
        ctx.out.say(f'{outcome.name or outcome.instance}: {f"stays: {outcome.reason}" if outcome.reason else new}')

    try:
        ctx.out.say(disable(ctx.placement, target, host))
        owner, offer = describe_owner(make_timestamp()), Offer(())
        scheduler = Scheduler(ctx.store, lambda: (ctx.placement, offer), owner, random.Random(), make_timestamp)
        for consumer in evacuate(scheduler, target, host, report, ctx.options.include_protected):
            ctx.out.say(f'{consumer}: its claim on {host} is released: no request owns it')
    except KeyboardInterrupt:
        ctx.out.say(f'interrupted: guests of {host} may not be evacuated yet. {again}')
        return outcomes, StillGoing.exit_code
    except EcompError as error:  # what was evacuated before is printed
        ctx.out.say(put_before_fix(ctx.out.format_error(error), f'. {again}'))
        return outcomes, error.exit_code
    return outcomes, 0


def _wait_and_report(ctx: Context, host: str, outcomes: Sequence[Evacuated], code: int) -> int:
    from ecomp.cli.waiting import wait_for_new

    moved = {outcome.replaced_by: outcome for outcome in outcomes if not outcome.reason}
    statuses = Outcomes(ctx, ())
    if moved and not code and ctx.options.wait is not None:
        places = {instance: outcome.compute for instance, outcome in moved.items()}
        statuses = wait_for_new(ctx, places, puts_addresses=False)
    elif moved:
        ctx.out.say(f'{host}: {len(moved)} evacuated. Try: {ctx.command_prefix} list')
    if outcomes or not code:
        ctx.show(make_evacuation_listing(outcomes, statuses.results, ctx.computes))
    for instance, outcome in moved.items() if ctx.options.wait is not None else ():
        with suppress(EcompError):
            record = ctx.store.get(keys.record(outcome.compute, instance))
            for key in read_record(record).host_keys if record is not None else ():
                ctx.out.say(f'{outcome.name or instance}: ssh host key {key}')
    return code or statuses.exit_code


def make_host_listing(hosts: Sequence[Host]) -> Listing:
    """List computes, each with what is used of each resource class, and with its capacity."""
    # Classes that every guest needs come before those that only some computes have.
    classes = [*REQUIRED_CLASSES, *sorted({name for host in hosts for name in host.rooms} - set(REQUIRED_CLASSES))]
    columns = [COMPUTE_COLUMN, Column('HOST', min_width=8), Column('STATE', kind=STATE), Column('INSTANCES', 1)]
    rows = []
    for host in hosts:
        shares = [_format_share(host.rooms.get(name)) for name in classes]
        state = f'{host.state}, disabled' if host.is_disabled and host.state != DISABLED else host.state
        state += f', cannot build: {host.trouble.reasons[0]}' if host.trouble else ''
        cells = [host.compute, host.hostname or None, state, len(host.instances)]
        rows.append(Row([*cells, *shares, host.facts.version, host.facts.kind, host.last_seen], _host_to_dict(host)))
    # Usually no host is silent; then the table has no such column.
    last_seen = Column('LAST SEEN', 1, kind=TIME, wide=not any(host.last_seen for host in hosts))
    return Listing([*columns, *_make_share_columns(classes), Column('VERSION', 4), Column('KIND', 3), last_seen], rows)


def make_plan_listing(ranked: Sequence[RankedCompute]) -> Listing:
    """List the computes that would be tried, in that order, each with its weight and instances."""
    classes = [*REQUIRED_CLASSES, *sorted({name for item in ranked for name in item.amounts} - set(REQUIRED_CLASSES))]
    columns = [COMPUTE_COLUMN, Column('HOST', min_width=8), Column('WEIGHT', 1)]
    rows = []
    for item in ranked:
        shares = [_format_share(item.rooms.get(name)) for name in classes]
        weight = None if item.weight is None else f'{item.weight:.2f}'
        cells = [item.compute, item.hostname or None, weight, *shares, item.instance_count]
        rows.append(Row(cells, _ranked_to_dict(item)))
    return Listing([*columns, *_make_share_columns(classes), Column('INSTANCES')], rows)


def _make_share_columns(classes: Sequence[str]) -> list[Column]:
    return [Column(f'{name} USED/CAPACITY', rank=1 if name in REQUIRED_CLASSES else 3, short=name) for name in classes]


def make_move_listing(moves: Sequence[Move], naming: Computes) -> Listing:
    """List guests by name, with the compute where each is, and its new one or why it has none."""
    called, find_hostname, rows = naming.format_name, naming.find_hostname, []
    for move in moves:
        request, old, new = move.guest.request, move.guest.compute, move.candidate and move.candidate.compute
        name, reason = get_holdings(request).name, naming.replace_uuids(move.reason) or None
        guest = {'compute': old, 'host': find_hostname(old), 'instance': request.instance, 'name': name}
        place = {'new_compute': new, 'new_host': find_hostname(new or '')}
        fits = {'fits': bool(new) if move.is_known else None, 'reason': reason}
        rows.append(Row([name, request.instance, called(old), new and called(new), reason], {**guest, **place, **fits}))
    columns = [Column('NAME'), Column('INSTANCE', 1, UUID), Column('FROM'), Column('TO'), Column('REASON', folds=True)]
    return Listing(columns, sorted(rows, key=lambda row: tuple(map(make_sort_key, row.cells))))


def make_evacuation_listing(
    outcomes: Sequence[Evacuated], statuses: Mapping[str, Mapping[str, Any]], naming: Computes
) -> Listing:
    """List evacuated guests by name, with their new instances or why they stay."""
    rows = []
    for old, name, new, compute, reason in sorted(outcomes, key=lambda each: make_sort_key(each.name)):
        place = {'replaced_by': new or None, 'compute': compute or None, 'host': naming.find_hostname(compute)}
        address, reason = statuses.get(new, {}).get('address'), naming.replace_uuids(reason)
        cells = [name, old, new or None, naming.format_name(compute) or None, address, reason or None]
        rows.append(Row(cells, {'instance': old, 'name': name, **place, 'address': address, 'reason': reason or None}))
    columns = [Column('NAME'), Column('OLD', 2, UUID), Column('INSTANCE', 1, UUID), Column('HOST')]
    return Listing([*columns, Column('ADDRESS', 2), Column('REASON', folds=True)], rows)


def make_absorption_listing(plans: Mapping[str, Sequence[Move]], naming: Computes) -> Listing:
    """List for each compute how many of its guests would fit elsewhere."""
    rows = []
    for compute, moves in plans.items():
        unplaced = make_move_listing([move for move in moves if move.candidate is None], naming).rows
        reason = None
        if unplaced:
            name, instance, *_, sentence = unplaced[0].cells
            reason = f'{name or instance}: {sentence}' + (f' ({len(unplaced) - 1} more)' if unplaced[1:] else '')
        counts = {'guests': len(moves), 'fit': len(moves) - len(unplaced)}
        unknown = {'unknown': sum(not move.is_known for move in moves)}
        named = {'compute': compute, 'host': naming.find_hostname(compute)}
        cells = [naming.format_name(compute), *counts.values(), reason]
        rows.append(Row(cells, {**named, **counts, **unknown, 'reason': reason}))
    return Listing([Column('HOST'), Column('GUESTS'), Column('FIT'), Column('REASON', folds=True)], rows)


def _format_share(share: Room | None) -> str | None:
    excess = f' ({share.over} too many)' if share and share.over else ''
    return None if share is None else f'{share.used}/{share.capacity}{excess}'


def _ranked_to_dict(ranked: RankedCompute) -> dict[str, object]:
    rooms = _rooms_to_dict(ranked.rooms, 'used', 'capacity')
    host = {'compute': ranked.compute, 'host': ranked.hostname, 'hostname': ranked.hostname, 'weight': ranked.weight}
    asked = dict(sorted(ranked.amounts.items()))
    return {**host, 'asked': asked, 'resources': rooms, 'instances': ranked.instance_count}


def _rooms_to_dict(rooms: Mapping[str, Room], *fields: str) -> dict[str, object]:
    return {name: {field: getattr(room, field) for field in fields} for name, room in sorted(rooms.items())}


def _host_to_dict(host: Host) -> dict[str, object]:
    shares = _rooms_to_dict(host.rooms, 'used', 'free', 'capacity', 'over')
    fields = {field: getattr(host, field) for field in ('compute', 'hostname', 'state', 'last_seen')}
    trouble = str(host.trouble) if host.trouble else None
    counts = {'trouble': trouble, 'disabled': host.is_disabled, 'instances': len(host.instances)}
    reported_fields = {field: getattr(host.facts, field) for field in ('version', 'kind', 'queues')}
    return {**fields, **counts, 'host': host.hostname, **reported_fields, 'resources': shares}


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('hosts', 'hosts [<host>…]', 'list computes: state, instances, use',
            'List all computes, or the given ones and then their instances, one per line: uuid, host name, state, '
            'number of instances, and the use and capacity of each resource class (memory in MiB, disk in GiB); for a '
            'compute that is up, also the version of its ecompute and the kind of its guests (kvm, qemu, fake). The '
            'state is `up`, `disabled` (up, but gets no new instances), `closed` (its ecompute was stopped), `silent` '
            '(its ecompute died or cannot reach etcd) or `orphaned` (only its provider in placement is left). LAST '
            'SEEN is when a silent one was last alive. `up, cannot build: …` says why new instances go to other '
            'computes first. With -f json: only the computes.',
            parse_any_computes, _list_hosts, LISTING_OPTIONS, (4, 5), example='eschedule hosts hv1'),
    Command('host drain', 'host drain <host>…', 'disable a compute and list its instances',
            'Place no new instances on a compute until `eschedule host enable`, and list the instances there, which '
            'keep running. The command destroys and moves nothing: the owners of the instances do that. With --stop it '
            'shuts the guests down, for maintenance.',
            parse_computes, _change_host_status,
            {**make_wait_options('no instance is on the compute or requested there (with --stop: no guest runs there)'),
             'stop': '', **DOCUMENT_OPTIONS}, (4, 5, 6), example='eschedule host drain hv1 --wait --timeout 3600'),
    Command('host enable', 'host enable <host>…', 'place new instances on a compute again',
            'Place new instances on a compute again.',
            parse_computes, _change_host_status, {'start': '', **DOCUMENT_OPTIONS}, (4, 5),
            example='eschedule host enable hv1 --start'),
    Command('host forget', 'host forget <host>…', 'remove a compute that never comes back',
            'Remove a compute that never comes back: its resource provider in placement, claims without a request, '
            'the keys of instances whose destroy was accepted, and its host name. The command is refused while the '
            'compute is alive, and while it has instances: destroy those first. Without --fenced, it is also refused '
            'if placement has claims on the compute, because its guests may still run, or if any request waits in a '
            'queue, because after a restore of etcd and placement the guest of that request may already run on the '
            'compute. If the command is interrupted, repeat it: it continues.',
            parse_computes, _forget_hosts, {'fenced': '', **DOCUMENT_OPTIONS}, (4, 5),
            example='eschedule host forget hv3 --fenced'),
    Command('evacuate', 'evacuate <host>…', 'recreate the guests of a dead host elsewhere',
            'Recreate each guest of a dead host on another one: a new instance of the same name, query, image, keys, '
            'user-data, group, project and stack. Its DISK IS LOST, and its image boots again. The host is disabled '
            'first. The command is refused while the ecompute of the host is alive. A guest that has no place '
            'elsewhere stays as it was, and so does one with --on or in_tree=; the reason is printed (exit 3). If the '
            'host comes back, it destroys what was replaced. If the command is interrupted, repeat it: it continues. '
            'With --dry-run it prints where each guest of one or more hosts would go, also before they die, or why it '
            'would not fit (exit 3; also if that is not known); with --each a line for each host. The choice is '
            'greedy, one guest after the other: if a guest does not fit, another placement of all may still exist.',
            parse_any_computes, _evacuate,
            {'fenced': 'confirm that the machine is off: guests that still run there would run twice',
             'dry_run': 'print where the guests of these hosts would go if all of them died; change nothing',
             'each': '', 'include_protected': '', 'yes': '',
             'wait': 'return once every new instance has reached STAGE: ' + ', '.join(STAGES) + '; without STAGE, '
             'addressed. From `ready` on the new ssh host keys are printed. Default: return once all are placed',
             'timeout': '', **LISTING_OPTIONS},
            (3, 4, 5, 6), example='eschedule evacuate hv2 --fenced', find_problems=_find_evacuate_problems),
)
