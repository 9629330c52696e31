"""Commands that take guests over which ecomp did not create, and give them back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ecomp.cli.command import DOCUMENT_OPTIONS, LISTING_OPTIONS, Command, Context, Outcomes
from ecomp.cli.options import Options, find_table_problems, parse_any_instances, parse_host_and_domains
from ecomp.cli.selection import SELECTORS, find_conflicts, select_instances
from ecomp.cli.tables import UUID, Column, Listing, Row
from ecomp.cli.terminal import make_timestamp
from ecomp.errors import Conflict, EcompError, NotFound, Unreachable, put_before_fix
from ecomp.model.foreign import ForeignGuest, HostForeign
from ecomp.model.host import Computes
from ecomp.model.text import check_name, is_name, join_some


def print_foreign_guests(ctx: Context, computes: Sequence[str]) -> int:
    """Print the guests that ecomp did not create, adopted or not, and whether each fits."""
    from ecomp.placement.providers import read_inventory
    from ecomp.scheduler.placing.adopt import read_foreign

    hosts, problems = read_foreign(ctx.store, computes)
    inventories = dict[str, Mapping[str, Any]]()
    for compute in (each for each, foreign in hosts.items() if foreign.guests):
        with suppress(NotFound):  # then nothing fits
            inventories[compute] = read_inventory(ctx.placement, compute)
    omitted = {compute: foreign.omitted for compute, foreign in hosts.items() if foreign.omitted}
    problems = {name: f'{number} more guests are not listed' for name, number in omitted.items()} | problems
    errors = [EcompError(f'{ctx.computes.format_name(compute)}: {text}') for compute, text in sorted(problems.items())]
    return ctx.show(make_foreign_listing(hosts, inventories, ctx.computes), errors)


def make_foreign_listing(
    hosts: Mapping[str, HostForeign], inventories: Mapping[str, Mapping[str, Any]], computes: Computes
) -> Listing:
    """List the guests of each compute, each with what its host lacks for it."""
    from ecomp.scheduler.placing.adopt import find_lacking

    rows = []
    for compute, foreign in hosts.items():
        for guest in foreign.guests:
            host, adopted = computes.format_name(compute), guest.adopted_by == compute
            # What a running guest uses is reserved until it is adopted.
            lacking = find_lacking(inventories.get(compute, {}), guest.size, guest.size if guest.is_running else {})
            fits = None if adopted else not lacking
            amounts = [guest.size.get(name) for name in ('VCPU', 'MEMORY_MB', 'DISK_GB')]
            fit = 'adopted' if adopted else ', '.join(f'no {name}' for name in lacking) or 'yes'
            cells = [guest.name, guest.state, *amounts, fit, host, join_some(guest.disks, 3), guest.instance]
            named = {'instance': guest.instance, 'name': guest.name, 'state': guest.state, 'compute': compute}
            facts = {'resources': dict(guest.size), 'disks': list(guest.disks), 'adopted': adopted, 'fits': fits}
            rows.append(Row(cells, {**named, 'host': computes.find_hostname(compute), **facts}))
    names = ('NAME', 'STATE', 'VCPU', 'MEMORY_MB', 'DISK_GB', 'FITS', 'HOST')
    return Listing([*map(Column, names), Column('DISKS', rank=2), Column('UUID', 1, UUID)], rows)


def _adopt_or_list(ctx: Context) -> int:
    from ecomp.scheduler.placing.adopt import read_foreign

    compute = ctx.resolve_compute(ctx.words[0])
    host = ctx.computes.format_name(compute)
    if compute not in ctx.computes.living:
        raise Conflict(f'{host}: its ecompute is not alive. Fix: start ecompute there')
    if not ctx.words[1:] and not ctx.options.all:
        return print_foreign_guests(ctx, [compute])
    listed = read_foreign(ctx.store, [compute])[0][compute].guests
    words = ctx.words[1:] or [guest.instance for guest in listed if guest.adopted_by != compute]
    chosen = {word: guest for word in words for guest in listed if word in (guest.name, guest.instance)}
    missing = next((word for word in words if word not in chosen), None)
    guests = [] if missing else [*{guest.instance: guest for guest in chosen.values()}.values()]
    # Also without guests: this ends an adoption that was killed.
    code = _adopt_guests(ctx, compute, host, guests)
    if missing:
        again = f'{ctx.command_prefix} adopt {ctx.words[0]}'
        raise NotFound(f'{missing}: {host} has no guest of this name or uuid to adopt. Try: {again}')
    return code


def _adopt_guests(ctx: Context, compute: str, host: str, guests: Sequence[ForeignGuest]) -> int:
    import random

    from ecomp.cli.input import describe_owner
    from ecomp.model.choose import Offer
    from ecomp.scheduler.placing.adopt import Adoptee, adopt
    from ecomp.scheduler.placing.session import Scheduler

    adoptees = [Adoptee(guest, ctx.options.name or _reserve_name(ctx, guest)) for guest in guests]
    owner = describe_owner(make_timestamp())
    scheduler = Scheduler(ctx.store, lambda: (ctx.placement, Offer(())), owner, random.Random(), make_timestamp)
    project = ctx.options.project or ctx.config.project_id
    outcomes = Outcomes(ctx, [guest.name for guest in guests], instance=None)

    def report(guest: ForeignGuest, sentence: str) -> None:
        outcomes.report(guest.name, f'{guest.name}: {sentence}', instance=guest.instance)

    again = ' '.join([ctx.command_prefix, ctx.name, *ctx.words, *(['--all'] if ctx.options.all else [])])
    try:
        adopt(scheduler, compute, host, adoptees, ctx.config.user_id, project, report)
    except Unreachable as error:
        advice = f'. Try: {again}, which continues; until then {host} may stay disabled'
        raise type(error)(put_before_fix(str(error), advice), error.backend) from error
    except KeyboardInterrupt:
        ctx.out.say(f'interrupted: {host} may stay disabled. Try: {again}, which continues')
        return EcompError.exit_code
    return outcomes.finish()


def _reserve_name(ctx: Context, guest: ForeignGuest) -> str | None:
    """Reserve the name of the domain, or print why that is impossible and return None."""
    from ecomp.scheduler.placing.claim import reserve_names

    reason = 'this is not a valid name of an instance'
    if is_name(guest.name):
        try:
            reserve_names(ctx.store, {guest.instance: guest.name})
            return guest.name
        except Conflict:
            reason = 'this is the name of another instance'
    ctx.out.say(f'{guest.name}: {reason}, so the instance gets no name. Try: --name')
    return None


def _release_guests(ctx: Context) -> int:
    from ecomp.scheduler.changes.change import destroy

    select_instances(ctx)
    outcomes = Outcomes(ctx, ctx.words, instance=None)

    def submit(word: str) -> None:
        instance = ctx.resolve_instance(word, ctx.instance_index)
        outcomes.report(word, instance=instance)
        sentence = destroy(ctx.store, instance, ctx.instance_index, releases=True)
        ctx.name_computes()
        outcomes.report(word, sentence)

    return outcomes.run(submit)


def _find_adopt_problems(name: str, words: Sequence[str], options: Options) -> Iterator[str]:
    if options.all and words[1:]:
        yield f'{name}: give either guests or --all'
    if options.all or words[1:]:
        yield from find_table_problems(options, 'is accepted only for the list of guests')
    if options.name is not None:
        if len(words) != 2:
            yield f'{name}: --name needs exactly one guest'
        try:
            check_name(options.name)
        except ValueError as error:
            yield f'--name: {error}'


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('adopt', 'adopt <host> [DOMAIN…]', 'manage guests that ecomp did not create',
            'Without DOMAIN and --all, list the guests on a host that ecomp did not create, and whether each fits. '
            'Otherwise claim these guests in placement with their real sizes, and manage them from now on: they are '
            'listed, stopped, started, entered and counted. Nothing of a guest changes but a mark in its metadata: it '
            'keeps running, its uuid is the uuid of its instance, and its name is kept if it is a valid one. ecomp '
            'never deletes, moves, rebuilds or filters an adopted guest; `eschedule release` gives it back. DISK_GB '
            'counts the disks on the file system of the host\'s state directory. Meanwhile the host is disabled. If '
            'the command is interrupted, repeat it: it continues.',
            parse_host_and_domains, _adopt_or_list,
            {'name': 'name of the instance, for one guest. Default: the name of the domain, if it is valid and free',
             'project': '', 'all': 'adopt all guests of the host that are not adopted', **LISTING_OPTIONS},
            (3, 4, 5), find_problems=_find_adopt_problems, example='eschedule adopt hv1 db1 web1'),
    Command('release', 'release [<id>…]', 'stop managing an adopted guest, which runs on',
            'Give an adopted guest back: its claim, its keys and its mark go, and its domain stays as it is. It can be '
            'adopted again. The host does this immediately or, if it is down, once it is up again.',
            parse_any_instances, _release_guests, {**DOCUMENT_OPTIONS, **SELECTORS}, (4, 5),
            find_problems=find_conflicts, example='eschedule release db1'),
)
