"""Select instances by options, as `list` does, instead of naming them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ecomp.cli.command import Context
from ecomp.cli.options import Options
from ecomp.cli.tables import make_sort_key
from ecomp.cli.terminal import ask, is_terminal
from ecomp.errors import EcompError, NotFound, UsageError
from ecomp.model.host import Computes
from ecomp.model.listing import Absences, RecordFilter
from ecomp.model.record import Record
from ecomp.model.states import ERROR, GONE
from ecomp.model.text import join_some

MAX_NAMES_IN_QUESTION = 20

SELECTORS: Mapping[str, str] = {
    'name': 'select the instances whose name matches this quoted pattern: * is any text, ? any one character',
    'stack': 'select the instances of this stack',
    'group': 'select the members of this group',
    'host': 'select the instances on this compute: its uuid or host name',
    'state': 'select the instances in this state; repeatable, or several with commas between them',
    'every': '',
}


def make_filter(ctx: Context) -> RecordFilter:
    """Make the filter that the options describe, or raise NotFound for an unknown stack."""
    options = ctx.options
    compute = None if options.host is None else ctx.resolve_compute(options.host)
    if options.stack is not None:
        from ecomp.scheduler.queries.stacks import load_stack

        if load_stack(ctx.store, options.stack).stack is None:
            raise NotFound(f'{options.stack}: no such stack. Try: eschedule stack')
    return RecordFilter(options.states, compute, options.project, options.group, options.name, options.stack)


def select_records(
    ctx: Context, record_filter: RecordFilter, records: Iterable[Record], computes: Computes, errors: list[EcompError]
) -> tuple[list[Record], Absences]:
    """Return the records that pass the filter, and the absences of their hosts.

    What is uncertain about these hosts is appended to `errors`.
    """
    from ecomp.scheduler.queries.computes import read_absences

    candidates = record_filter._replace(states=None).select(records)
    absences = read_absences(
        ctx.store, lambda: ctx.placement, computes, candidates, lambda text: errors.append(EcompError(text))
    )
    return record_filter.select(candidates, absences), absences


def has_selectors(options: Options) -> bool:
    return any(getattr(options, field) not in (None, False) for field in SELECTORS)


def find_conflicts(name: str, words: Sequence[str], options: Options) -> Iterator[str]:
    """Yield what is wrong unless exactly one is given: words, selectors or a file."""
    is_selected = has_selectors(options) or options.file is not None
    if words and is_selected:
        yield f'{name}: give either instances, or options that select them'
    if not words and not is_selected:
        yield f'{name}: missing argument: one or more instances, by name or uuid, or an option such as --stack'
    if options.file is not None and has_selectors(options):
        yield f'{name}: --file cannot be combined with other selections'


def sort_records(records: Iterable[Record]) -> list[Record]:
    """Sort by the time of the request, instances of one request by name."""
    return sorted(records, key=lambda each: (each.stages.get('requested', ''), make_sort_key(each.name), each.instance))


def _read_selection(ctx: Context) -> list[Record]:
    """Read the records that the options select, print read errors, or raise NotFound for none."""
    from ecomp.scheduler.queries.find import list_records

    record_filter = make_filter(ctx)
    with_gone = ctx.name == 'destroy' and GONE in (record_filter.states or ())
    records, errors = list_records(ctx.store, with_gone)
    left_out = (GONE, ERROR) if ctx.options.every else () if with_gone else (GONE,)
    if record_filter.states is None:
        matches = record_filter.select(records)
    else:
        matches, _ = select_records(ctx, record_filter, records, ctx.computes, errors)
    for error in errors:
        ctx.out.say(str(error))
    selected = sort_records(record for record in matches if record.state not in left_out)
    if not selected:
        raise NotFound(f'{ctx.name}: no instance is selected. Try: eschedule list with the same options')
    return selected


def _read_file_records(ctx: Context, path: str) -> list[Record]:
    from ecomp.cli.stack_file import load_stack_file
    from ecomp.scheduler.queries.stacks import read_stack

    file = load_stack_file(ctx, path)
    entries = read_stack(ctx.store, file.name).entries
    selected = sort_records(entries[name].record for name in file.instances if name in entries)
    if not selected:  # no error, so that a `destroy --file` can be repeated
        ctx.out.say(f'stack {file.name}: no instance of this file exists')
    return selected


def select_instances(ctx: Context) -> list[Record]:
    """Replace ctx.words by the instances that options select, and return their records.

    If no option selects, ctx.words stay, and the result is []. A --file without instances leaves no words.
    Other options that match nothing raise NotFound.
    """
    if not has_selectors(ctx.options) and ctx.options.file is None:
        return []
    selected = _read_selection(ctx) if ctx.options.file is None else _read_file_records(ctx, ctx.options.file)
    ctx.words = tuple(record.instance for record in selected)
    ctx.display_names |= {record.instance: record.name for record in selected if record.name}
    return selected


def confirm_destroy(ctx: Context, names: Sequence[str], verb: str = 'Destroy') -> None:
    """Ask before instances are destroyed, unless --yes, and raise EcompError without a `y`."""
    if ctx.options.yes or not names:
        return
    count = f'{len(names)} instance{"s" if len(names) > 1 else ""}'
    listed = join_some(names, MAX_NAMES_IN_QUESTION)
    if not is_terminal(sys.stdin):
        raise UsageError(f'{ctx.name}: would destroy {count}, with their disks: {listed}. Fix: confirm with --yes')
    if ask(f'{verb} {count}, with their disks: {listed}? [y/N] ') != 'y':
        raise EcompError('nothing was changed')
