"""The command top: what hosts and guests use now."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from ecomp.cli.command import Command, Context, select_options
from ecomp.cli.inspect import FILTERS, INSTANCE_COLUMN
from ecomp.cli.options import PROMETHEUS, TABLE, Options, parse_any_computes
from ecomp.cli.selection import make_filter
from ecomp.cli.tables import Column, Listing, Row, make_sort_key, render_listing
from ecomp.cli.terminal import Drawing, is_terminal, make_style, redraw
from ecomp.metrics import make_text
from ecomp.model.allocation import GIB, MIB
from ecomp.model.record import Record
from ecomp.model.states import ACTIVE
from ecomp.model.usage import HOST
from ecomp.scheduler.operations.usage import Use, UseReader
from ecomp.scheduler.queries.find import list_records
from ecomp.scheduler.queries.hosts import CLUSTER_METRICS, read_metrics

HOST_FIELDS = ('cpus', 'load', 'memory_used_bytes', 'memory_bytes', 'disk_used_bytes', 'disk_bytes')
SIZES = (('memory', MIB), ('disk', GIB))
RATES = ('disk_read_bytes_per_second', 'disk_written_bytes_per_second')


def _print_metrics(ctx: Context) -> int:
    samples, errors = read_metrics(ctx.store, ctx.placement)
    ctx.draw(make_text(CLUSTER_METRICS, samples).rstrip())
    for error in errors:
        ctx.out.say(str(error))
    return 0


def _find_top_problems(name: str, words: Sequence[str], options: Options) -> Iterator[str]:
    fields = ('name', 'group', 'project', 'stack', 'columns', 'no_header', 'wide')
    if options.format == PROMETHEUS and (words or any(getattr(options, field) for field in fields)):
        yield f'{name}: -f prometheus prints the whole cluster. Fix: leave out hosts and other options'


def _top(ctx: Context) -> int:
    if ctx.form == PROMETHEUS:
        return _print_metrics(ctx)
    ctx.connect()

    selected, code = ctx.find_each(ctx.resolve_compute)
    if code:
        return code
    reader, record_filter = UseReader(ctx.store, selected), make_filter(ctx)

    def make_drawing() -> Drawing:
        use, (records, errors), style = reader.read(), list_records(ctx.store, with_gone=False), make_style(ctx.options)
        hosts, guests = make_host_listing(use, records), make_guest_listing(use, record_filter.select(records))
        document = {name: [row.value for row in each.rows] for name, each in (('hosts', hosts), ('guests', guests))}
        text = render_listing(guests._replace(document=document), style)
        if style.form == TABLE and not style.columns:
            text = f'{render_listing(hosts, style)}\n\n{text}'
        reasons = sorted(f'{use.computes.format_name(compute)}: {reason}' for compute, reason in use.reasons.items())
        return Drawing(text, [*map(str, errors), *reasons])

    if ctx.options.format is None and is_terminal(sys.stdout):
        redraw(make_drawing, ctx.out.draw)
        return 0
    reader.read()  # rates need two measurements
    drawing = make_drawing()
    ctx.draw(drawing.table)
    for message in drawing.messages:
        ctx.out.say(message)
    return 0


def make_host_listing(use: Use, records: Sequence[Record]) -> Listing:
    """List what hosts use, and count the instances of `records` that run on each."""
    rows = []
    running = Counter(each.compute for each in records if each.instance in use.measurements.get(each.compute, ()))
    for compute, used in use.measurements.items():
        amounts, name = used.get(HOST, {}), use.computes.format_name(compute)
        value = _make_common_fields(use, compute, amounts.get('cpu_seconds_per_second'))
        value |= {field: amounts.get(field) for field in HOST_FIELDS}
        value['guests'] = running[compute] if used else None
        memory, disk = (_format_share(value[f'{of}_used_bytes'], value[f'{of}_bytes'], unit) for of, unit in SIZES)
        cells = [name, value['cpu_percent'], value['cpus'], value['load'], memory, disk, value['guests']]
        rows.append(Row(cells, value))
    names = ('HOST', 'CPU %', 'CPUS', 'LOAD', 'MEMORY MiB', 'DISK GiB', 'GUESTS')
    return Listing(list(map(Column, names)), _sort(rows))


def make_guest_listing(use: Use, records: Sequence[Record]) -> Listing:
    """List the guests that their host measured, and active ones that it did not measure."""
    rows = []
    for record in records:
        used = use.measurements.get(record.compute)
        if used is None or (record.instance not in used and record.state != ACTIVE):
            continue
        amounts, limit = used.get(record.instance, {}), record.resources.get('MEMORY_MB', 0) * MIB or None
        value: dict[str, Any] = {'instance': record.instance, 'name': record.name or None}
        value |= _make_common_fields(use, record.compute, amounts.get('vcpu_seconds_per_second'))
        memory = amounts.get('resident_memory_bytes')
        value |= {'memory_used_bytes': memory, 'memory_bytes': limit, **{rate: amounts.get(rate) for rate in RATES}}
        rates = [None if value[rate] is None else round(value[rate] / 1024) for rate in RATES]
        cells = [record.name or None, value['cpu_percent'], _format_share(memory, limit, MIB), *rates]
        rows.append(Row([*cells, use.computes.format_name(record.compute), record.instance], value))
    names = ('NAME', 'CPU %', 'MEMORY MiB', 'READ KiB/s', 'WRITTEN KiB/s', 'HOST')
    return Listing([*map(Column, names), INSTANCE_COLUMN._replace(rank=1)], _sort(rows))


def _make_common_fields(use: Use, compute: str, cpus: float | None) -> dict[str, Any]:
    percent = None if cpus is None else round(100 * cpus, 1)
    return {'compute': compute, 'host': use.computes.find_hostname(compute), 'cpu_percent': percent}


def _sort(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: ((cpu := row.cells[1]) is None, -float(cpu or 0), make_sort_key(row.cells[0])))


def _format_share(amount: float | None, total: float | None, unit: int) -> str | None:
    return None if amount is None or total is None else f'{round(amount / unit)}/{round(total / unit)}'


# fmt: off
COMMANDS: Sequence[Command] = (
    Command('top', 'top [<host>…]', 'show what hosts and guests use now',
            'Show what hosts and guests use now, those that use most CPU first (100 % is one CPU). DISK is that of the '
            'state directory. Default: all hosts. On a terminal the tables are drawn again every few seconds, until '
            'Ctrl-C (exit 0); elsewhere, or with -f, they are printed once, after two measurements. A `-` is not '
            'known; stderr reports which hosts do not answer. `-f csv`, `-f value` and -c print only guests. Hosts '
            'measure only while a `top` runs. Memory beyond the size of a guest (231/128) is used by QEMU itself. `-f '
            'prometheus` prints metrics of the whole cluster instead: computes and instances by state, capacity and '
            'use of each compute, queued requests, and quotas. All are gauges: what happens on a host is in the file '
            'that its ecompute writes (`metrics:` in compute.yaml). docs/howto/monitor.md shows how to collect both. '
            'Malformed values in etcd are reported on stderr and counted; the command succeeds.',
            parse_any_computes, _top,
            {**{field: FILTERS[field] for field in ('name', 'group', 'project', 'stack')},
             **select_options('format columns no_header wide')}, (4, 5), example='eschedule top hv1',
            find_problems=_find_top_problems),
)
