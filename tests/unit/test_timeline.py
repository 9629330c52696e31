"""How long each stage took: as it is drawn, letter by letter, and as JSON."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ecomp.cli.history import WIDTH, drawn, percentiles, timeline, timeline_to_dict
from ecomp.cli.tables import Look
from ecomp.model.record import ACTIVE, BUILDING, ERROR, STAGES, Record

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
FAST, SLOW = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a', 'e9bedb97-917a-4f4e-9a69-8ad21840267f'

REACHED = list(STAGES[: STAGES.index('addressed') + 1])


def stages(*seconds: float) -> dict[str, str]:
    """The first stages, each so many seconds after the first one."""
    return {stage: f'2026-01-31T12:00:{at:06.3f}Z' for stage, at in zip(STAGES, (0.0, *seconds), strict=False)}


def record(instance: str = FAST, state: str = ACTIVE, *seconds: float) -> Record:
    told = stages(*(seconds or (0.165, 0.19, 0.203, 0.534, 7.191)))
    return Record(instance, COMPUTE, state, image='http://h/i', stages=told)


ONE = """\
d578fb7c-7787-4e73-b69a-a7b3ef9bf73a  active  requested 2026-01-31T12:00:00.000Z
scheduled   0.165 s  |=                                                           |
image       0.025 s  | =                                                          |
disk        0.013 s  | =                                                          |
started     0.331 s  | ===                                                        |
addressed   6.657 s  |    ========================================================|
ready             -
                     0 s                                                    7.191 s"""

TWO = """\
d578fb7c-7787-4e73-b69a-a7b3ef9bf73a  active  requested 2026-01-31T12:00:00.000Z
scheduled   0.165 s  |=                                                           |
image       0.025 s  |=                                                           |
disk        0.013 s  |=                                                           |
started     0.331 s  |=                                                           |
addressed   6.657 s  | =============                                              |
ready             -

e9bedb97-917a-4f4e-9a69-8ad21840267f  building  requested 2026-01-31T12:00:00.000Z
scheduled   0.200 s  |=                                                           |
image      30.000 s  |============================================================|
disk              -
started           -
addressed         -
ready             -
                     0 s                                                   30.200 s

STAGE      INSTANCES  P50      P95
scheduled  2          0.165 s  0.200 s
image      2          0.025 s  30.000 s
disk       1          0.013 s  0.013 s
started    1          0.331 s  0.331 s
addressed  1          6.657 s  6.657 s
total      1          7.191 s  7.191 s"""

FAILED = """\
d578fb7c-7787-4e73-b69a-a7b3ef9bf73a  error  requested 2026-01-31T12:00:00.000Z
scheduled   0.500 s  |===============                                             |
image             -
disk              -
started           -
addressed         -
ready             -
error       1.500 s  |               =============================================|
                     0 s                                                    2.000 s"""


def test_one_is_drawn() -> None:
    assert drawn([record()], Look()) == ONE


def test_several_are_drawn_on_one_scale() -> None:
    assert drawn([record(), record(SLOW, BUILDING, 0.2, 30.2)], Look()) == TWO


def test_what_failed_is_drawn_up_to_there() -> None:
    failed = record(FAST, ERROR, 0.5)
    failed = replace(failed, stages={**failed.stages, 'error': '2026-01-31T12:00:02.000Z', 'gone': 'later'})
    assert drawn([failed], Look()) == FAILED


@pytest.mark.parametrize('told', [{}, {'requested': 'yesterday'}, {'scheduled': '2026-01-31T12:00:00Z'}, stages(0.0)])
def test_with_little_or_nothing_to_draw_it_is_drawn_all_the_same(told: dict[str, str]) -> None:
    lines = drawn([replace(record(), stages=told)], Look()).splitlines()
    assert lines[0].startswith(f'{FAST}  active')
    assert [line.split()[0] for line in lines[1:-1]] == [stage for stage in STAGES[1:] if stage not in told] or told
    assert '=' not in ''.join(lines)


def test_clocks_that_differ_are_not_hidden() -> None:
    later = {'image': '2026-01-31T11:59:59.900', 'disk': '2026-01-31T12:00:01Z'}
    lines = drawn([replace(record(), stages={**stages(0.2), **later})], Look()).splitlines()
    assert lines[2] == f'image      -0.300 s  |{"":{WIDTH}}|'
    assert lines[3].startswith('disk        1.100 s  |=====')


@pytest.mark.parametrize('width', [40, 80, 132])
def test_on_a_terminal_it_is_as_wide_as_that(width: int) -> None:
    lines = drawn([record(), record(SLOW, BUILDING, 0.2, 30.2)], Look(width=width)).splitlines()
    assert max(map(len, lines)) == max(width, len('e9bedb97  building  requested 2026-01-31T12:00:00.000Z'))
    assert {len(line) for line in lines if line.endswith('|')} == {width}
    assert f'image      30.000 s  |{"=" * (width - 23)}|' in lines


def test_percentiles_are_of_the_nearest_rank() -> None:
    timelines = [timeline(record(FAST, ACTIVE, float(number))) for number in range(1, 41)]
    assert percentiles(timelines) == {
        'scheduled': {'instances': 40, 'p50': 20.0, 'p95': 38.0},
        'total': {'instances': 40, 'p50': 20.0, 'p95': 38.0},
    }
    assert percentiles([timeline(replace(record(), stages={}))]) == {}


def test_json_has_the_same() -> None:
    told = timeline_to_dict([record(), record(SLOW, BUILDING, 0.2)])
    first, second = told['instances']
    assert (first['instance'], first['state']) == (FAST, 'active')
    assert [each['stage'] for each in first['stages']] == REACHED
    assert first['stages'][0] == {
        'stage': 'requested', 'time': '2026-01-31T12:00:00.000Z', 'at': 0.0, 'seconds': None
    }  # fmt: skip
    assert first['stages'][-1]['at'] == 7.191
    assert first['stages'][-1]['seconds'] == 6.657
    assert [each['stage'] for each in second['stages']] == ['requested', 'scheduled']
    assert told['percentiles']['total'] == {'instances': 1, 'p50': 7.191, 'p95': 7.191}
    assert set(told['percentiles']) == {*REACHED[1:], 'total'}
