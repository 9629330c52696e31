"""How long each stage of an instance took: bars on one scale, and percentiles. Pure: records to text.

A stage takes from the one before it to itself, by the times in the record. Of a later boot than the first there are
only those that come with each. The first two are told by the clock of
eschedule's machine and the others by the compute's: where those differ a time may be negative, and is shown so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple

from ecomp.cli.tables import LEAST, Column, Listing, Look, Row, rendered, short_uuids
from ecomp.model.boots import STAGES as BOOT_STAGES
from ecomp.model.boots import Boot, numbered
from ecomp.model.record import ERROR, STAGES, Record
from ecomp.model.text import printable

WIDTH = 60
"""Characters of the longest bar where there is no terminal."""
BESIDE = 23
"""Characters of a line beside its bar: the stage, the seconds, and a | on either side."""
PERCENTILES = {'p50': 0.5, 'p95': 0.95}
TOTAL = 'total'


class StageTime(NamedTuple):
    """A stage: when, seconds after the first one, and seconds it took (None: it is the first)."""

    stage: str
    time: str
    at: float
    took: float | None


def reached(record: Record, number: int | None = None) -> list[StageTime]:
    """The stages of one boot of an instance, the last one for None, in their order; last, if it failed, `error`."""
    boot = numbered(record.known_boots, number)
    stages = record.stages if boot is None else boot.stages
    if boot is not None and boot.number == 1:
        stages = {**{name: time for name, time in record.stages.items() if name not in BOOT_STAGES}, **stages}
    known = [(stage, _seconds(stages[stage])) for stage in (*STAGES, ERROR) if stage in stages]
    times = [(stage, when) for stage, when in known if when is not None]
    first = before = times[0][1] if times else 0.0
    found = []
    for number, (stage, when) in enumerate(times):
        found.append(StageTime(stage, stages[stage], when - first, when - before if number else None))
        before = when
    return found


def percentiles(timelines: Sequence[Sequence[StageTime]]) -> dict[str, dict[str, float]]:
    """{stage: {'instances': how many reached it, 'p50': seconds, …}}, by nearest rank.

    `total` is from the first stage to the last one that any of them has reached.
    """
    samples: dict[str, list[float]] = {stage: [] for stage in (*STAGES, ERROR)}
    for each in timelines:
        for stage in each:
            if stage.took is not None:
                samples[stage.stage].append(stage.took)
    last = next((stage for stage in reversed(STAGES) if samples[stage]), None)
    samples[TOTAL] = [stage.at for each in timelines for stage in each if stage.stage == last]
    return {
        stage: {'instances': len(took), **{name: _percentile(took, part) for name, part in PERCENTILES.items()}}
        for stage, took in samples.items()
        if took
    }


def drawn(records: Sequence[Record], look: Look, number: int | None = None) -> str:
    """The stages of each instance's boot of this number, the last one for None, as bars on one scale.

    It is as wide as the terminal. Of several also the percentiles.
    """
    boots, timelines = _of_boot(records, number)
    longest = max((stage.at for each in timelines for stage in each), default=0.0)
    width = WIDTH if look.width is None else max(look.width - BESIDE, LEAST)
    short = {} if look.width is None else short_uuids(record.instance for record in records)
    parts = [
        _bars(short.get(record.instance, record.instance), record, boot, stages, longest, width)
        for record, boot, stages in zip(records, boots, timelines, strict=True)
    ]
    end = _words(longest)
    parts[-1] += f'\n{"":21}0 s{end:>{width - 1}}'
    if len(records) > 1:
        columns = [Column(name) for name in ('STAGE', 'INSTANCES', *(name.upper() for name in PERCENTILES))]
        rows = [
            Row((stage, int(each['instances']), *(_words(each[name]) for name in PERCENTILES)))
            for stage, each in percentiles(timelines).items()
        ]
        parts.append(rendered(Listing(columns, rows), Look(width=look.width)))
    return '\n\n'.join(parts)


def _bars(
    called: str, record: Record, boot: Boot | None, stages: Sequence[StageTime], longest: float, width: int
) -> str:
    first = printable(f'  {stages[0].stage} {stages[0].time}') if stages else ''
    is_later = boot is not None and boot.number > 1
    which = printable(f'  boot {boot.number}, {boot.reason}') if boot is not None and is_later else ''
    lines = [f'{called}  {record.state}{which}{first}']
    at = {each.stage: each for each in stages}
    of_all = [stage for stage in STAGES[1:] if not is_later or stage in BOOT_STAGES[1:]]
    for stage in (*of_all, *([ERROR] if ERROR in at else [])):
        if stage not in at:
            lines.append(f'{stage:9}{"-":>10}')
        elif (took := at[stage].took) is not None:
            bar = _bar(at[stage].at - took, at[stage].at, longest, width)
            lines.append(f'{stage:9}{_words(took):>10}  |{bar:{width}}|')
    return '\n'.join(lines)


def _bar(begin: float, end: float, longest: float, width: int) -> str:
    """At least one character, where it belongs on the scale; none for what ended before it began."""
    if end < begin or longest <= 0:
        return ''
    left = min(max(int(begin / longest * width), 0), width - 1)
    right = min(max(round(end / longest * width), left + 1), width)
    return ' ' * left + '=' * (right - left)


def to_dict(records: Sequence[Record], number: int | None = None) -> dict[str, Any]:
    """The same, as users see it in JSON: seconds to the millisecond."""
    boots, timelines = _of_boot(records, number)

    def as_dict(each: StageTime) -> dict[str, object]:
        took = None if each.took is None else round(each.took, 3)
        return {'stage': each.stage, 'time': each.time, 'at': round(each.at, 3), 'seconds': took}

    instances = [
        {
            **{'instance': record.instance, 'state': record.state},
            **{'boot': boot.number if boot else None, 'reason': boot.reason if boot else None},
            'stages': [as_dict(each) for each in stages],
        }
        for record, boot, stages in zip(records, boots, timelines, strict=True)
    ]
    rounded = {
        stage: {name: round(value, 3) for name, value in each.items()} for stage, each in percentiles(timelines).items()
    }
    return {'instances': instances, 'percentiles': rounded}


def _of_boot(
    records: Sequence[Record], number: int | None
) -> tuple[list[Boot | None], list[list[StageTime]]]:
    """The boot of this number of each, and its stages."""
    return [numbered(each.known_boots, number) for each in records], [reached(each, number) for each in records]


def _percentile(values: Sequence[float], part: float) -> float:
    return sorted(values)[math.ceil(part * len(values)) - 1]


def _seconds(time: str) -> float | None:
    try:
        when = datetime.fromisoformat(time)
    except ValueError:
        return None  # whoever wrote the request wrote that, too
    return (when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()


def _words(seconds: float) -> str:
    return f'{seconds:.3f} s'
