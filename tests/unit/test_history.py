"""Events from changes of etcd's keys, and the duration of each stage."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from docs.shapes import SHAPES
from ecomp.cli.history import WIDTH, Lines, drawn, percentiles, timeline, timeline_to_dict
from ecomp.cli.tables import Look
from ecomp.model import flavor, group, keys, queue, quota
from ecomp.model import order as requests
from ecomp.model.events import KINDS, LONGEST, Change, as_object, told
from ecomp.model.flavor import parse_flavor
from ecomp.model.guest import GuestFailure
from ecomp.model.order import Power, Request, name_to_json
from ecomp.model.queue import QueueEntry, mark_to_json
from ecomp.model.record import (
    ACTIVE,
    BUILDING,
    ERROR,
    GONE,
    SCHEDULED,
    STAGES,
    Failure,
    Interface,
    Progress,
    Record,
    to_json,
)
from ecomp.store.history import ANSWERS, ASKING, FULL, _Past

# Events of a change of etcd's keys. A change without news has none.


EVENT = Draft202012Validator(SHAPES['events'])
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
OTHER = 'e9bedb97-917a-4f4e-9a69-8ad21840267f'
COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
POWER = Power('reboot', OTHER)
SMALL = parse_flavor('small', 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1')
ASKED = Request(
    INSTANCE, {COMPUTE: {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}}, image='http://h/i', user_id='u', project_id='p',
    name='web1',
)  # fmt: skip
WAITING = QueueEntry(
    INSTANCE, SMALL, image='http://h/i', user_id='u', project_id='p', name='web1', stages={'requested': 'T'}
)
MAC = '52:54:00:00:00:01'


def at(minute: int) -> str:
    return f'2026-01-31T12:{minute:02}:00.000Z'


NEW = Record(INSTANCE, COMPUTE, SCHEDULED, image='http://h/i', name='web1', stages={'requested': at(0)})
BUILT = replace(NEW, addresses=(Interface('default', MAC),)).at(BUILDING, at(1), 'image', 'disk')
RUNS = BUILT.at(ACTIVE, at(2), 'started').on('created', at(2))
THERE = replace(RUNS, addresses=(Interface('default', MAC, '10.0.0.1', 'lease'),)).has('addressed', at(3))
READY = THERE.has('ready', at(4))
OFF = READY.off(at(5))
AGAIN = OFF.on('reboot', at(6))


def host(compute: str) -> str:
    return {COMPUTE: 'hv1'}.get(compute, compute)


def says(*changes: Change) -> list[str]:
    return [event.says for event in told(changes, host)]


def recorded(before: Record | None, after: Record | None, is_known: bool = True) -> Change:
    values = (to_json(item).encode() if item else None for item in (before, after))
    return Change(keys.record(COMPUTE, INSTANCE), *values, 7, is_known)


def requested(before: Request | None, after: Request | None) -> Change:
    values = (requests.to_json(item).encode() if item else None for item in (before, after))
    return Change(keys.request(COMPUTE, INSTANCE), *values, 7)


FAILED = NEW.at(ERROR, at(1), 'error')
RECORDS: list[tuple[Record | None, Record | None, list[str], str]] = [
    (None, NEW, ['scheduled on hv1'], at(0)),
    (NEW, NEW.at(BUILDING, at(1)), ['building'], ''),
    (NEW.at(BUILDING, at(1)), BUILT.at(BUILDING, at(1)), ['building: image', 'building: disk'], at(1)),
    (BUILT, replace(BUILT, progress=Progress('image', 1, 2)), [], ''),
    (BUILT, RUNS, ['active'], at(2)),
    (RUNS, THERE, ['address 10.0.0.1 on default'], at(3)),
    (THERE, READY, ['ready'], at(4)),
    (READY, replace(READY, power=POWER.at('asked')), ['its guest was asked to turn itself off'], ''),
    (THERE, replace(THERE, cloud_init=GuestFailure('init', 'no')), ['cloud-init failed at stage init: no'], ''),
    (READY, OFF, ['stopped'], at(5)),
    (OFF, replace(OFF, power=POWER.at('off')), ['is off, and about to be started'], ''),
    (OFF, AGAIN, ['active', 'boot 2: reboot'], at(6)),
    (AGAIN, AGAIN.has('addressed', at(7)), ['has its address 10.0.0.1 again'], at(7)),
    (AGAIN, AGAIN.has('ready', at(8)), ['ready'], at(8)),
    (READY, replace(READY, fault='its disk is gone'), ['fault: its disk is gone'], ''),
    (replace(READY, fault='its disk is gone'), READY, ['is over: its disk is gone'], ''),
    (BUILT, replace(BUILT, attempts=1), ['attempt 1 failed'], ''),
    (NEW, replace(FAILED, error=Failure('image', 'HTTP 404', 'x')), ['error: at stage image: HTTP 404'], at(1)),
    (READY, READY.at('destroying', at(9)), ['destroying'], ''),
    (READY, READY.at(GONE, at(9), 'gone'), ['gone'], at(9)),
    (READY, None, ['its record is gone'], ''),
    (READY, READY, [], ''),
]


@pytest.mark.parametrize(('before', 'after', 'words', 'time'), RECORDS)
def test_what_a_record_says_anew(
    before: Record | None, after: Record | None, words: list[str], time: str
) -> None:
    events = told([recorded(before, after)], host)
    assert [event.says for event in events] == words
    assert {event.time for event in events} <= {time}
    assert {(event.revision, event.kind, event.instance, event.compute) for event in events} <= {
        (7, 'instance', INSTANCE, COMPUTE)
    }


def test_of_what_etcd_forgot_the_past_it_is_told_what_is() -> None:
    assert says(recorded(None, READY, is_known=False)) == ['active on hv1']
    assert says(Change(keys.request(COMPUTE, INSTANCE), None, requests.to_json(ASKED).encode(), 7, False)) == []
    assert says(Change(keys.name('web1'), None, name_to_json(INSTANCE).encode(), 7, False)) == []


def test_a_record_of_another_than_its_key_says_is_none() -> None:
    for key in (keys.record(COMPUTE, OTHER), keys.record(OTHER, INSTANCE)):
        assert says(Change(key, None, to_json(READY).encode(), 7)) == ['its record cannot be read']


def test_what_1_0_wrote_moves_without_a_word() -> None:
    value = to_json(READY).encode()
    assert says(Change(keys.old_record(INSTANCE), value, None, 7), recorded(READY, READY)) == []


def test_what_is_asked_of_a_compute() -> None:
    tombstone = replace(ASKED, allocations={}, image=None)
    assert says(requested(None, ASKED)) == ['request accepted, for hv1']
    assert says(requested(ASKED, replace(ASKED, power=POWER))) == ['reboot accepted']
    assert says(requested(ASKED, tombstone)) == ['destroy accepted']
    assert says(requested(tombstone, replace(tombstone, left={'VCPU': 1}))) == []
    assert says(requested(ASKED, None)) == []
    wrong = Change(keys.request(COMPUTE, INSTANCE), None, b'{}', 7)
    assert says(wrong) == [
        'its request to hv1 cannot be understood: the request lacks allocations, instance, image'
    ]


def test_a_queue_is_told_of_from_the_request_to_its_taking() -> None:
    place, value = keys.queue('small', INSTANCE), queue.to_json(WAITING).encode()
    mark = mark_to_json(COMPUTE).encode()
    assert says(Change(place, None, value, 7)) == ['queue small: waits']
    assert says(Change(keys.taker(place), None, mark, 7)) == ['queue small: hv1 is taking it']
    moved = says(
        Change(keys.taker(place), mark, None, 7), Change(place, value, None, 7), requested(None, ASKED)
    )
    assert moved == ['queue small: taken by hv1', 'request accepted, for hv1']
    assert says(Change(place, value, None, 7)) == ['queue small: left, and nobody has it']
    (bad,) = says(Change(place, None, b'{}', 7))
    assert bad.startswith('queue small: waits, and nobody takes it: version None')


def alive(**said: Any) -> bytes:
    return json.dumps({'hostname': 'hv9', 'version': '1.1.0', 'since': at(1), 'token': 'x', **said}).encode()


def test_a_compute_comes_and_goes() -> None:
    key = keys.compute(COMPUTE)
    (came,) = told([Change(key, None, alive(), 7)], host)
    assert (came.kind, came.compute, came.says) == ('compute', COMPUTE, 'compute hv9 came up, ecomp 1.1.0')
    assert came.time == at(1)
    assert says(Change(key, alive(), alive(), 7)) == []
    assert says(Change(key, alive(), alive(since=at(2)), 7)) == [
        'compute hv9 is up, ecomp 1.1.0'
    ]
    assert says(Change(key, alive(), None, 7)) == ['compute hv9 went away']
    assert says(Change(key, None, b'[]', 7)) == ['compute hv1 came up']


def test_names_groups_quotas_and_flavors() -> None:
    name, other = (name_to_json(instance).encode() for instance in (INSTANCE, OTHER))
    assert says(Change(keys.name('web1'), None, name, 7)) == ['is called so now']
    assert says(Change(keys.name('web1'), name, None, 7)) == ['gave its name back']
    (moved,) = told([Change(keys.name('web1'), name, other, 7)], host)
    assert (moved.instance, moved.name) == (OTHER, 'web1')
    web = group.Group('web', 'affinity', True, {INSTANCE: COMPUTE})
    more = replace(web, members={INSTANCE: COMPUTE, OTHER: COMPUTE})
    written = [group.to_json(item).encode() for item in (web, more)]
    assert says(Change(keys.group('web'), None, written[0], 7)) == ['group web: strict affinity']
    assert says(Change(keys.group('web'), *written, 7)) == []
    assert says(Change(keys.group('web'), written[1], None, 7)) == ['group web: removed']
    limits = [quota.to_json(quota.Quota('p', {'VCPU': 5}, {'VCPU': used})).encode() for used in (1, 2)]
    assert says(Change(keys.quota('p'), None, limits[0], 7)) == ['quota p: VCPU 5']
    assert says(Change(keys.quota('p'), *limits, 7)) == []
    assert says(Change(keys.flavor('small'), None, flavor.to_json(SMALL).encode(), 7)) == [
        f'flavor small: {SMALL.query}'
    ]


def test_the_changes_of_one_revision_share_what_is_known_of_its_time() -> None:
    delivered = [Change(keys.name('web1'), None, name_to_json(INSTANCE).encode(), 7), recorded(None, NEW)]
    assert {event.time for event in told(delivered, host)} == {at(0)}
    stopped = requested(ASKED, replace(ASKED, power=POWER))
    assert [event.time for event in told([stopped], host)] == ['']
    assert [event.time for event in told([stopped], host, at(9))] == [at(9)]
    # A tombstone repeats the times of the instance that it destroys.
    destroyed = requested(ASKED, replace(ASKED, allocations={}, image=None, stages={'addressed': at(3)}))
    assert [event.time for event in told([destroyed], host, at(9))] == [at(9)]


def test_a_line_has_the_time_the_name_and_the_words() -> None:
    lines = Lines()
    first, second = told([recorded(None, NEW)], host) + told(
        [requested(ASKED, replace(ASKED, power=POWER))], host
    )
    assert lines.line(first) == f'{at(0)}  web1: scheduled on hv1'
    assert lines.line(second) == f'{at(0)}~ web1: reboot accepted'
    # A taker key has no name: the name of an earlier event is used.
    (mark,) = told([Change(keys.taker(keys.queue('q', INSTANCE)), None, mark_to_json(COMPUTE).encode(), 8)], host)
    assert lines.line(mark) == f'{at(0)}~ web1: queue q: hv1 is taking it'
    assert Lines().line(mark).endswith(f'~ {INSTANCE}: queue q: hv1 is taking it')
    assert as_object(mark) == {
        'revision': 8, 'time': None, 'kind': 'queue', 'instance': INSTANCE, 'name': None, 'compute': COMPUTE,
        'says': 'queue q: hv1 is taking it',
    }  # fmt: skip


VALUES = [b'', b'\xff', b'[]', b'{}', b'[' * 9999, b'{"version": 1}', b'{"version": 9, "state": "active"}']
families = st.sampled_from(
    [keys.HOSTS, keys.INSTANCES, keys.QUEUES, keys.NAMES, keys.COMPUTES, keys.GROUPS, keys.QUOTAS, keys.FLAVORS,
     keys.CLUSTER, keys.BOOTED, keys.RELEASED, '/', '']
)  # fmt: skip
values = (
    st.none()
    | st.sampled_from([*VALUES, alive(hostname=7, version=[], since={})])
    | st.binary(max_size=40)
)


rests = st.text(max_size=20) | st.sampled_from(['a/b', '/', 'a/b/taker', INSTANCE])


@given(families, rests, values, values, st.booleans())
def test_whatever_stands_in_etcd_it_is_told_or_passed_over(
    family: str, rest: str, before: bytes | None, after: bytes | None, is_known: bool
) -> None:
    for event in told([Change(family + rest, before, after, 7, is_known)], host):
        assert event.kind in KINDS
        assert len(event.says) <= LONGEST
        EVENT.validate(json.loads(json.dumps(as_object(event))))
        assert '\n' not in Lines().line(event)


# The duration of each stage, as an exact chart and as JSON.


FAST = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
SLOW = 'e9bedb97-917a-4f4e-9a69-8ad21840267f'

REACHED = list(STAGES[: STAGES.index('addressed') + 1])


def stages(*seconds: float) -> dict[str, str]:
    """Return the times of the first stages, at these seconds after the first one."""
    return {stage: f'2026-01-31T12:00:{second:06.3f}Z' for stage, second in zip(STAGES, (0.0, *seconds), strict=False)}


def record(instance: str = FAST, state: str = ACTIVE, *seconds: float) -> Record:
    times = stages(*(seconds or (0.165, 0.19, 0.203, 0.534, 7.191)))
    return Record(instance, COMPUTE, state, image='http://h/i', stages=times)


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

FAILED_EARLY = """\
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
    assert drawn([failed], Look()) == FAILED_EARLY


@pytest.mark.parametrize(
    'told', [{}, {'requested': 'yesterday'}, {'scheduled': '2026-01-31T12:00:00Z'}, stages(0.0)]
)
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
    result = timeline_to_dict([record(), record(SLOW, BUILDING, 0.2)])
    first, second = result['instances']
    assert (first['instance'], first['state']) == (FAST, 'active')
    assert [entry['stage'] for entry in first['stages']] == REACHED
    assert first['stages'][0] == {
        'stage': 'requested', 'time': '2026-01-31T12:00:00.000Z', 'at': 0.0, 'seconds': None
    }  # fmt: skip
    assert first['stages'][-1]['at'] == 7.191
    assert first['stages'][-1]['seconds'] == 6.657
    assert [entry['stage'] for entry in second['stages']] == ['requested', 'scheduled']
    assert result['percentiles']['total'] == {'instances': 1, 'p50': 7.191, 'p95': 7.191}
    assert set(result['percentiles']) == {*REACHED[1:], 'total'}


# The end of the past. Old versions of etcd answer WatchProgress too early, so the changes must confirm the answer.


NOW = 5000


def answer(header: int = NOW, **fields: Any) -> Any:
    """Make an answer to WatchProgress, or another answer with these fields."""
    nothing = {'events': [], 'created': False, 'canceled': False, 'fragment': False}
    return SimpleNamespace(header=SimpleNamespace(revision=header), **(nothing | fields))


def changes(first: int, count: int, header: int = NOW, fragment: bool = False) -> Any:
    events = [SimpleNamespace(kv=SimpleNamespace(mod_revision=revision)) for revision in range(first, first + count)]
    return answer(header, events=events, fragment=fragment)


BEGUN = answer(created=True)


def heard(*replies: Any, known: bool = False, apart: float = ASKING) -> tuple[bool, bool]:
    """Return (is_told, is_quiet) of a past after these answers."""
    past = _Past(NOW, known)
    for number, reply in enumerate(replies):
        past.hear(reply, 100 + number * apart)
    return past.is_told, past.is_quiet


@pytest.mark.parametrize(
    ('replies', 'is_told'),
    [
        ([BEGUN], False),
        ([BEGUN, answer()], False),
        ([BEGUN, changes(2, 10)], False),
        ([BEGUN, changes(2, 10), answer()], True),
        ([BEGUN, changes(2, 10), answer(NOW - 1)], False),
        ([BEGUN, changes(2, 10, NOW - 1), answer()], False),
        ([BEGUN, answer(), changes(2, 10)], False),
        ([BEGUN, changes(2, FULL), answer()], False),
        ([BEGUN, changes(2, FULL - 1), answer()], True),
        ([BEGUN, changes(2, FULL), answer(), changes(FULL + 2, 1), answer()], True),
        # In fragments: the second one begins within a revision.
        ([BEGUN, changes(2, 600, fragment=True), changes(601, 401), answer()], False),
        ([BEGUN, changes(2, 600, fragment=True), changes(601, 400), answer()], True),
        ([BEGUN, changes(2, 600, fragment=True), answer()], False),
    ],
)
def test_it_is_told_where_the_changes_and_the_answer_both_say_so(replies: list[Any], is_told: bool) -> None:
    assert heard(*replies)[0] is is_told


BEFORE = [answer()] * (ANSWERS - 1)


@pytest.mark.parametrize(
    ('replies', 'how', 'is_quiet'),
    [
        (BEFORE, {}, False),
        ([*BEFORE, answer()], {}, True),
        ([answer()] * 50, {'apart': 0.001}, False),  # a frozen etcd answers all in a burst, which counts once
        ([answer(NOW - 1)] * 50, {}, False),
        # A change restarts the quiet period. A past with a known change is not quiet before that change.
        ([*BEFORE, changes(2, FULL), *BEFORE], {}, False),
        ([*BEFORE, changes(2, FULL), *BEFORE, answer()], {}, True),
        ([answer()] * 50, {'known': True}, False),
        ([changes(2, FULL), *BEFORE, answer()], {'known': True}, True),
    ],
)
def test_silence_alone_is_no_quiet(replies: list[Any], how: dict[str, Any], is_quiet: bool) -> None:
    assert heard(BEGUN, *replies, **how) == (False, is_quiet)
