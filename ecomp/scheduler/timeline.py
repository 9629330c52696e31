"""How long each stage of an instance took: bars on one scale, percentiles, JSON. Pure: records to text.

A stage takes from the one before it to itself, by the times in the record. The first two are told by the clock of
eschedule's machine and the others by the compute's: where those differ a time may be negative, and is shown so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from ecomp.model.json_object import dump
from ecomp.model.record import ERROR, STAGES, Record
from ecomp.model.text import printable
from ecomp.scheduler.show import table

WIDTH = 60
"""Characters of the longest bar."""
PERCENTILES = {'p50': 0.5, 'p95': 0.95}
TOTAL = 'total'


class Reached(NamedTuple):
    """A stage: when, seconds after the first one, and seconds it took (None: it is the first)."""

    stage: str
    time: str
    at: float
    took: float | None


def reached(record: Record) -> list[Reached]:
    """The stages an instance has reached, in their order; last, if it failed, `error`."""
    known = [(stage, _seconds(record.stages[stage])) for stage in (*STAGES, ERROR) if stage in record.stages]
    times = [(stage, when) for stage, when in known if when is not None]
    first = before = times[0][1] if times else 0.0
    found = []
    for number, (stage, when) in enumerate(times):
        found.append(Reached(stage, record.stages[stage], when - first, when - before if number else None))
        before = when
    return found


def percentiles(timelines: Sequence[Sequence[Reached]]) -> dict[str, dict[str, float]]:
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


def as_timeline(records: Sequence[Record], form: str) -> str:
    """Each instance's stages as bars on one scale, of several also the percentiles; or all of it as JSON."""
    timelines = [reached(each) for each in records]
    if form == 'json':
        return _as_json(records, timelines)
    longest = max((stage.at for each in timelines for stage in each), default=0.0)
    parts = [_drawn(record, each, longest) for record, each in zip(records, timelines, strict=True)]
    end = _words(longest)
    parts[-1] += f'\n{"":21}0 s{end:>{WIDTH - 1}}'
    if len(records) > 1:
        rows = [
            (stage, str(each['instances']), *(_words(each[name]) for name in PERCENTILES))
            for stage, each in percentiles(timelines).items()
        ]
        parts.append(table([('STAGE', 'INSTANCES', *(name.upper() for name in PERCENTILES)), *rows]))
    return '\n\n'.join(parts)


def _drawn(record: Record, stages: Sequence[Reached], longest: float) -> str:
    first = printable(f'  {stages[0].stage} {stages[0].time}') if stages else ''
    lines = [f'{record.instance}  {record.state}{first}']
    at = {each.stage: each for each in stages}
    for stage in (*STAGES[1:], *([ERROR] if ERROR in at else [])):
        if stage not in at:
            lines.append(f'{stage:9}{"-":>10}')
        elif (took := at[stage].took) is not None:
            lines.append(f'{stage:9}{_words(took):>10}  |{_bar(at[stage].at - took, at[stage].at, longest):{WIDTH}}|')
    return '\n'.join(lines)


def _bar(begin: float, end: float, longest: float) -> str:
    """At least one character, where it belongs on the scale; none for what ended before it began."""
    if end < begin or longest <= 0:
        return ''
    left = min(max(int(begin / longest * WIDTH), 0), WIDTH - 1)
    right = min(max(round(end / longest * WIDTH), left + 1), WIDTH)
    return ' ' * left + '=' * (right - left)


def _as_json(records: Sequence[Record], timelines: Sequence[Sequence[Reached]]) -> str:
    instances = [
        {
            'instance': record.instance,
            'state': record.state,
            'stages': [
                {
                    'stage': each.stage,
                    'time': each.time,
                    'at': round(each.at, 3),
                    'seconds': None if each.took is None else round(each.took, 3),
                }
                for each in stages
            ],
        }
        for record, stages in zip(records, timelines, strict=True)
    ]
    rounded = {
        stage: {name: round(value, 3) for name, value in each.items()} for stage, each in percentiles(timelines).items()
    }
    return dump({'instances': instances, 'percentiles': rounded}, indent=2)


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
