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
from ecomp.cli.history import MAX_BAR_WIDTH, EventFormatter, _select_since, draw_timeline
from ecomp.cli.tables import OutputStyle
from ecomp.model import group, keys, quota, stack
from ecomp.model.events import KINDS, MAX_TEXT_CHARACTERS, Change, event_to_dict, make_events
from ecomp.model.flavor import parse_flavor
from ecomp.model.order import NameOwner, PowerAction, Request
from ecomp.model.queue import QueueEntry, QueueTaker
from ecomp.model.record import Failure, Interface, Progress, Record
from ecomp.model.states import ACTIVE, BUILDING, ERROR, GONE, SCHEDULED, STAGES
from ecomp.model.status import DISABLED_BY_OPERATOR
from ecomp.model.stored import decode, encode
from ecomp.model.user_data import GuestFailure
from ecomp.store import history
from ecomp.store.history import MAX_ANSWER_REVISIONS, REQUIRED_PROGRESS_ANSWERS, _PastProgress

EVENT = Draft202012Validator(SHAPES['events'])
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
OTHER = 'e9bedb97-917a-4f4e-9a69-8ad21840267f'
COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
POWER = PowerAction('reboot', OTHER)
SMALL = parse_flavor('small', 'resources=VCPU:1,MEMORY_MB:256,DISK_GB:1')
REQUEST = Request(
    INSTANCE, {COMPUTE: {'VCPU': 1, 'MEMORY_MB': 256, 'DISK_GB': 1}}, image='http://h/i', user_id='u', project_id='p',
    name='web1',
)  # fmt: skip
QUEUED = QueueEntry(
    INSTANCE, SMALL, image='http://h/i', user_id='u', project_id='p', name='web1', stages={'requested': 'T'}
)
MAC = '52:54:00:00:00:01'


def time_at(minute: int) -> str:
    return f'2026-01-31T12:{minute:02}:00.000Z'


NEW = Record(INSTANCE, COMPUTE, SCHEDULED, image='http://h/i', name='web1', stages={'requested': time_at(0)})
BUILT = replace(NEW, addresses=(Interface('default', MAC),)).enter_state(BUILDING, time_at(1), 'image', 'disk')
RUNNING = BUILT.enter_state(ACTIVE, time_at(2), 'started').mark_running('created', time_at(2))
ADDRESSED = replace(RUNNING, addresses=(Interface('default', MAC, '10.0.0.1', 'lease'),)).mark_stage(
    'addressed', time_at(3)
)
READY = ADDRESSED.mark_stage('ready', time_at(4))
STOPPED = READY.mark_off(time_at(5))
RESTARTED = STOPPED.mark_running('reboot', time_at(6))


def name_host(compute: str) -> str:
    return {COMPUTE: 'hv1'}.get(compute, compute)


def describe(*changes: Change) -> list[str]:
    return [event.says for event in make_events(changes, name_host)]


def change_record(before: Record | None, after: Record | None, is_known: bool = True) -> Change:
    values = (encode(item).encode() if item else None for item in (before, after))
    return Change(keys.record(COMPUTE, INSTANCE), *values, 7, is_known)


def change_request(before: Request | None, after: Request | None) -> Change:
    values = (encode(item).encode() if item else None for item in (before, after))
    return Change(keys.request(COMPUTE, INSTANCE), *values, 7)


FAILED = NEW.enter_state(ERROR, time_at(1), 'error')
RECORD_CASES: list[tuple[Record | None, Record | None, list[str], str]] = [
    (None, NEW, ['scheduled on hv1'], ''),
    (None, BUILT, ['building on hv1', 'building: image', 'building: disk'], ''),
    (NEW, NEW.enter_state(BUILDING, time_at(1)), ['building'], ''),
    (
        NEW.enter_state(BUILDING, time_at(1)),
        BUILT.enter_state(BUILDING, time_at(1)),
        ['building: image', 'building: disk'],
        time_at(1),
    ),
    (BUILT, replace(BUILT, progress=Progress('image', 1, 2)), [], ''),
    (BUILT, RUNNING, ['active'], time_at(2)),
    (RUNNING, ADDRESSED, ['address 10.0.0.1 on default'], time_at(3)),
    (ADDRESSED, READY, ['ready'], time_at(4)),
    (READY, replace(READY, power=POWER.format_phase('asked')), ['guest shutdown requested'], ''),
    (ADDRESSED, replace(ADDRESSED, cloud_init=GuestFailure('init', 'no')), ['cloud-init failed at stage init: no'], ''),
    (READY, STOPPED, ['stopped'], time_at(5)),
    (STOPPED, replace(STOPPED, power=POWER.format_phase('off')), ['guest is off, and will be started'], ''),
    (STOPPED, RESTARTED, ['active', 'boot 2: reboot'], time_at(6)),
    (RESTARTED, RESTARTED.mark_stage('addressed', time_at(7)), ['has its address 10.0.0.1 again'], time_at(7)),
    (RESTARTED, RESTARTED.mark_stage('ready', time_at(8)), ['ready'], time_at(8)),
    (READY, replace(READY, fault='its disk is gone'), ['fault: its disk is gone'], ''),
    (replace(READY, fault='its disk is gone'), READY, ['fault cleared: its disk is gone'], ''),
    (BUILT, replace(BUILT, attempts=1), ['attempt 1 failed'], ''),
    (NEW, replace(FAILED, error=Failure('image', 'HTTP 404', 'x')), ['error: at stage image: HTTP 404'], time_at(1)),
    (READY, READY.enter_state('destroying', time_at(9)), ['destroying'], ''),
    (READY, READY.enter_state(GONE, time_at(9), 'gone'), ['gone'], time_at(9)),
    (READY, None, ['record deleted'], ''),
    (READY, READY, [], ''),
]


@pytest.mark.parametrize(('before', 'after', 'words', 'time'), RECORD_CASES)
def test_changed_record_yields_its_events(
    before: Record | None, after: Record | None, words: list[str], time: str
) -> None:
    events = make_events([change_record(before, after)], name_host)
    assert [event.says for event in events] == words
    assert {event.time for event in events} <= {time}
    assert {(event.revision, event.kind, event.instance, event.compute) for event in events} <= {
        (7, 'instance', INSTANCE, COMPUTE)
    }


def test_compacted_change_yields_the_present_state() -> None:
    assert describe(change_record(None, READY, is_known=False)) == ['active on hv1']
    assert describe(Change(keys.request(COMPUTE, INSTANCE), None, encode(REQUEST).encode(), 7, False)) == []
    assert describe(Change(keys.name('web1'), None, encode(NameOwner(INSTANCE)).encode(), 7, False)) == []


def test_record_at_the_wrong_key_is_malformed() -> None:
    for key in (keys.record(COMPUTE, OTHER), keys.record(OTHER, INSTANCE)):
        assert describe(Change(key, None, encode(READY).encode(), 7)) == ['record is malformed']


def test_changed_request_yields_its_events() -> None:
    tombstone = replace(REQUEST, allocations={}, image=None)
    assert describe(change_request(None, REQUEST)) == ['request accepted, for hv1']
    assert describe(change_request(REQUEST, replace(REQUEST, power=POWER))) == ['reboot accepted']
    assert describe(change_request(REQUEST, tombstone)) == ['destroy accepted']
    assert describe(change_request(tombstone, replace(tombstone, former_resources={'VCPU': 1}))) == []
    assert describe(change_request(REQUEST, None)) == []
    wrong = Change(keys.request(COMPUTE, INSTANCE), None, b'{}', 7)
    assert describe(wrong) == ['request to hv1 is malformed: instance is missing']


def test_queued_request_yields_events_until_taken() -> None:
    place, value = keys.queue('small', INSTANCE), encode(QUEUED).encode()
    mark = encode(QueueTaker(COMPUTE)).encode()
    assert describe(Change(place, None, value, 7)) == ['queue small: waits']
    assert describe(Change(keys.taker(place), None, mark, 7)) == ['queue small: hv1 is taking it']
    moved = describe(
        Change(keys.taker(place), mark, None, 7), Change(place, value, None, 7), change_request(None, REQUEST)
    )
    assert moved == ['queue small: taken by hv1', 'request accepted, for hv1']
    assert describe(Change(place, value, None, 7)) == ['queue small: removed, not taken']
    (bad,) = describe(Change(place, None, b'{}', 7))
    assert bad.startswith('queue small: waits, but no compute takes it: flavor: None differs')


def make_presence(**fields: Any) -> bytes:
    return json.dumps({'hostname': 'hv9', 'version': '1.1.0', 'since': time_at(1), 'token': 'x', **fields}).encode()


def test_presence_yields_events_of_a_compute() -> None:
    key = keys.compute(COMPUTE)
    (came,) = make_events([Change(key, None, make_presence(), 7)], name_host)
    text = f'compute hv9 came up, ecomp 1.1.0, running since {time_at(1)}'
    # Its lease may have expired, and the process that began at this time is back.
    assert (came.kind, came.compute, came.says, came.time) == ('compute', COMPUTE, text, '')
    assert describe(Change(key, make_presence(), make_presence(), 7)) == []
    assert describe(Change(key, make_presence(), make_presence(since=time_at(2)), 7)) == [
        f'compute hv9 is up, ecomp 1.1.0, running since {time_at(2)}'
    ]
    assert describe(Change(key, make_presence(), None, 7)) == ['compute hv9 stopped, or lost its lease']
    assert describe(Change(key, None, b'[]', 7)) == ['compute hv1 came up']


def test_names_groups_quotas_and_flavors_yield_events() -> None:
    name, other = (encode(NameOwner(instance)).encode() for instance in (INSTANCE, OTHER))
    assert describe(Change(keys.name('web1'), None, name, 7)) == ['name taken']
    assert describe(Change(keys.name('web1'), name, None, 7)) == ['name released']
    (moved,) = make_events([Change(keys.name('web1'), name, other, 7)], name_host)
    assert (moved.instance, moved.name) == (OTHER, 'web1')
    web = group.Group('web', 'affinity', True, {INSTANCE: COMPUTE})
    more = replace(web, members={INSTANCE: COMPUTE, OTHER: COMPUTE})
    written = [encode(item).encode() for item in (web, more)]
    assert describe(Change(keys.group('web'), None, written[0], 7)) == ['group web: strict affinity']
    assert describe(Change(keys.group('web'), *written, 7)) == []
    assert describe(Change(keys.group('web'), written[1], None, 7)) == ['group web: removed']
    limits = [encode(quota.Quota('p', {'VCPU': 5}, {'VCPU': used})).encode() for used in (1, 2)]
    assert describe(Change(keys.quota('p'), None, limits[0], 7)) == ['quota p: VCPU 5']
    assert describe(Change(keys.quota('p'), *limits, 7)) == []
    assert describe(Change(keys.flavor('small'), None, encode(SMALL).encode(), 7)) == [f'flavor small: {SMALL.query}']


def test_stack_yields_its_creation_deliveries_and_ends() -> None:
    key, new = keys.stack('shop'), stack.Stack('shop', OTHER)
    both = new.with_delivered({new.make_place('db/1'): COMPUTE, new.make_place('web/1'): COMPUTE})
    replaced = both.with_ended(['db/1']).with_delivered({both.make_place('web/1'): COMPUTE})
    empty, delivered, changed, restored = (
        encode(each).encode() for each in (new, both, replaced, both._replace(floor=9))
    )
    (created,) = make_events([Change(key, None, empty, 7)], name_host)
    assert (created.kind, created.instance, created.says) == ('stack', '', 'stack shop: created')
    assert describe(Change(key, empty, delivered, 7)) == ['stack shop: db/1, web/1 delivered']
    assert describe(Change(key, delivered, changed, 7)) == ['stack shop: web/1 delivered', 'stack shop: db/1 ended']
    assert describe(Change(key, delivered, delivered, 7)) == []
    assert describe(Change(key, None, restored, 7)) == ['stack shop: restored from its requests']
    assert describe(Change(key, None, delivered, 7, is_known=False)) == []
    assert describe(Change(key, b'{}', None, 7)) == ['stack shop: removed']
    (malformed,) = describe(Change(key, empty, b'{"version": 99}', 7))
    assert malformed.startswith('stack shop: malformed: format version 99')
    many = new.with_delivered({new.make_place(f'web/{number}'): COMPUTE for number in range(1, 301)})
    (text,) = describe(Change(key, empty, encode(many).encode(), 7))
    assert text.endswith('web/10 and 290 more delivered')


def test_events_of_one_revision_share_its_time() -> None:
    requested = change_request(None, replace(REQUEST, stages={'scheduled': time_at(0)}))
    delivered = [Change(keys.name('web1'), None, encode(NameOwner(INSTANCE)).encode(), 7), requested]
    assert [event.time for event in make_events(delivered, name_host)] == [time_at(0)] * 2
    stopped = change_request(REQUEST, replace(REQUEST, power=POWER))
    assert [event.time for event in make_events([stopped], name_host)] == ['']
    assert [event.time for event in make_events([add_written_at(stopped, time_at(9))], name_host)] == [time_at(9)]
    # A tombstone repeats the times of the instance that it destroys.
    destroyed = change_request(REQUEST, replace(REQUEST, allocations={}, image=None, stages={'addressed': time_at(3)}))
    assert [event.time for event in make_events([destroyed], name_host)] == ['']
    assert [event.time for event in make_events([add_written_at(destroyed, time_at(9))], name_host)] == [time_at(9)]
    # A writer that does not know `written_at` keeps the time of an earlier power action.
    old = add_written_at(change_request(None, REQUEST), time_at(8)).after
    assert [event.time for event in make_events([add_written_at(stopped, time_at(8), old)], name_host)] == ['']


def add_written_at(change: Change, time: str, before: bytes | None = None) -> Change:
    assert change.after is not None
    value = {**json.loads(change.after), 'written_at': time, 'by': 'ann'}
    return change._replace(after=json.dumps(value).encode(), before=before or change.before)


def test_limits_and_flavors_have_the_time_at_which_they_were_set() -> None:
    small = Change(keys.flavor('small'), None, encode(SMALL).encode(), 7)
    limits = [encode(quota.Quota('p', {'VCPU': number})).encode() for number in (1, 2)]
    for change in (small, Change(keys.quota('p'), *limits, 7)):
        (undated,) = make_events([change], name_host)
        (dated,) = make_events([add_written_at(change, time_at(9))], name_host)
        assert (undated.time, dated.time) == ('', time_at(9))
        assert make_events([add_written_at(change._replace(before=change.after), time_at(9))], name_host) == []


def test_times_that_were_written_before_are_not_those_of_the_event() -> None:
    # The record is new, or etcd has compacted the state before: a stage may have been reached long before this change.
    for is_known in (True, False):
        (event, *_) = make_events([change_record(None, READY, is_known)], name_host)
        assert event.time == ''


def test_line_of_an_event_has_time_name_and_text() -> None:
    lines = EventFormatter()
    first, second = make_events([change_record(BUILT, RUNNING)], name_host) + make_events(
        [change_request(REQUEST, replace(REQUEST, power=POWER))], name_host
    )
    assert lines.format_line(first) == f'{time_at(2)} web1: active'
    assert lines.format_line(second) == 'revision 7               web1: reboot accepted'
    # A taker key has no name: the name of an earlier event is used.
    (mark,) = make_events(
        [Change(keys.taker(keys.queue('q', INSTANCE)), None, encode(QueueTaker(COMPUTE)).encode(), 8)], name_host
    )
    assert lines.format_line(mark).endswith(' web1: queue q: hv1 is taking it')
    assert EventFormatter().format_line(mark).endswith(f' {INSTANCE}: queue q: hv1 is taking it')
    assert event_to_dict(mark) == {
        'revision': 8, 'time': None, 'kind': 'queue', 'instance': INSTANCE, 'name': None, 'compute': COMPUTE,
        'says': 'queue q: hv1 is taking it', 'by': None,
    }  # fmt: skip


ODD_VALUES = [b'', b'\xff', b'[]', b'{}', b'[' * 9999, b'{"version": 1}', b'{"version": 9, "state": "active"}']
families = st.sampled_from(
    [keys.HOSTS, keys.INSTANCES, keys.QUEUES, keys.NAMES, keys.COMPUTES, keys.GROUPS, keys.QUOTAS, keys.FLAVORS,
     keys.STACKS, keys.CLUSTER, keys.BOOTED, keys.RELEASED, '/', '']
)  # fmt: skip
values = (
    st.none() | st.sampled_from([*ODD_VALUES, make_presence(hostname=7, version=[], since={})]) | st.binary(max_size=40)
)


rests = st.text(max_size=20) | st.sampled_from(['a/b', '/', 'a/b/taker', INSTANCE])


@given(families, rests, values, values, st.booleans())
def test_any_change_yields_valid_events_or_none(
    family: str, rest: str, before: bytes | None, after: bytes | None, is_known: bool
) -> None:
    for event in make_events([Change(family + rest, before, after, 7, is_known)], name_host):
        assert event.kind in KINDS
        assert len(event.says) <= MAX_TEXT_CHARACTERS
        EVENT.validate(json.loads(json.dumps(event_to_dict(event))))
        assert '\n' not in EventFormatter().format_line(event)


def test_evacuation_has_a_line_with_both_instances_and_its_writer() -> None:
    gone = replace(REQUEST, allocations={}, image=None, replaced_by=OTHER)
    evacuated = add_written_at(change_request(REQUEST, gone), time_at(9))
    other = replace(REQUEST, instance=OTHER, replaces=INSTANCE)
    new = Change(keys.request(COMPUTE, OTHER), None, encode(other).encode(), 7)
    events, lines = make_events([evacuated, new], name_host), EventFormatter()
    assert [lines.format_line(event)[25:] for event in events] == [
        'web1: evacuated from hv1 (d578fb7c → e9bedb97), by ann',
        'web1 (e9bedb97): request accepted, for hv1, in place of d578fb7c, by ann',
    ]


def test_apply_says_what_replaces_an_instance_and_its_file() -> None:
    new = stack.Stack('shop', OTHER, applied_from='ann@desk:/home/ann/shop.yaml')
    first, second = new.make_place('db/1', 1), new.make_place('db/1', 2)
    old = replace(REQUEST, stack=first)
    gone = change_request(old, replace(old, allocations={}, image=None))
    other = replace(REQUEST, instance=second.instance, stack=second)
    delivered = Change(keys.request(COMPUTE, second.instance), None, encode(other).encode(), 7)
    values = [encode(each).encode() for each in (new, new.with_delivered({second: COMPUTE}))]
    applied = add_written_at(Change(keys.stack('shop'), *values, 7), time_at(9))
    assert describe(gone, delivered, applied) == [
        f'replaced by a new one (d578fb7c → {second.instance[:8]})',
        'request accepted, for hv1',
        'stack shop: applied shop.yaml: db/1 delivered',
    ]


def test_evacuation_of_a_stacks_instance_is_no_apply() -> None:
    new = stack.Stack('shop', OTHER, applied_from='ann@desk:/home/ann/shop.yaml')
    values = [encode(each).encode() for each in (new, new.with_delivered({new.make_place('db/1', 1): COMPUTE}))]
    applied = add_written_at(Change(keys.stack('shop'), values[1], values[0], 7), time_at(9)).after
    assert describe(Change(keys.stack('shop'), applied, values[1], 7)) == ['stack shop: db/1 delivered']
    # Nor is a destroy, which keeps the time of the apply.
    delivered = decode(stack.Stack, applied or b'', name='shop').with_delivered({new.make_place('db/1', 1): COMPUTE})
    ended = encode(delivered.with_ended(['db/1'])).encode()
    assert describe(Change(keys.stack('shop'), applied, ended, 7)) == ['stack shop: db/1 ended']


def test_operations_of_hosts_have_their_lines() -> None:
    plain, disabled = (
        json.dumps({'version': 1, 'room': {}, 'traits': traits}).encode() for traits in ([], [DISABLED_BY_OPERATOR])
    )
    drained = replace(REQUEST, power=PowerAction('stop', OTHER, 'drain'))
    assert describe(Change(keys.facts(COMPUTE), plain, disabled, 7)) == ['compute hv1 disabled']
    assert describe(Change(keys.facts(COMPUTE), disabled, plain, 7)) == ['compute hv1 enabled']
    assert describe(Change(keys.facts(COMPUTE), None, disabled, 7)) == ['compute hv1 is disabled']
    assert describe(Change(keys.hostname(COMPUTE), b'{"hostname": "hv7"}', None, 7)) == ['compute hv7 forgotten']
    assert describe(Change(keys.acceptance(COMPUTE), None, b'9', 7)) == ['compute hv1 accepted the new etcd']
    assert describe(change_request(REQUEST, drained)) == ['stop accepted, to drain hv1']


def test_writer_is_short_and_printable() -> None:
    change = add_written_at(change_request(REQUEST, replace(REQUEST, power=POWER)), time_at(9))
    assert change.after is not None
    for by, shown in (('\x1b[31m\n', '\\x1b[31m\\n'), ('x' * 900, 'x' * 80 + '…'), (7, ''), (None, '')):
        value = json.dumps({**json.loads(change.after), 'by': by}).encode()
        assert [event.by for event in make_events([change._replace(after=value)], name_host)] == [shown]


def test_since_keeps_undated_events_beside_later_ones() -> None:
    events = [('', 'a'), ('1', 'b'), ('', 'c'), ('5', 'd'), ('2', 'e'), ('', 'f')]
    assert ''.join(line for _, line in _select_since(iter(events), '3')) == 'cdef'
    assert ''.join(line for _, line in _select_since(iter(events[:3]), '3')) == 'c'


# The duration of each stage, as an exact chart.


def make_stages(*seconds: float) -> dict[str, str]:
    return {stage: f'2026-01-31T12:00:{second:06.3f}Z' for stage, second in zip(STAGES, (0.0, *seconds), strict=False)}


def make_record(state: str = ACTIVE, *seconds: float) -> Record:
    times = make_stages(*(seconds or (0.165, 0.19, 0.203, 0.534, 7.191)))
    return Record('d578fb7c-7787-4e73-b69a-a7b3ef9bf73a', COMPUTE, state, image='http://h/i', stages=times)


def test_chart_shows_negative_durations() -> None:
    later = {'image': '2026-01-31T11:59:59.900', 'disk': '2026-01-31T12:00:01Z'}
    lines = draw_timeline(replace(make_record(), stages={**make_stages(0.2), **later}), OutputStyle()).splitlines()
    assert lines[2] == f'image      -0.300 s  |{"":{MAX_BAR_WIDTH}}|'
    assert lines[3].startswith('disk        1.100 s  |=====')


@pytest.mark.parametrize('width', [40, 80, 132])
def test_chart_is_as_wide_as_the_terminal(width: int) -> None:
    lines = draw_timeline(make_record(BUILDING, 0.2, 30.2), OutputStyle(width=width)).splitlines()
    assert max(map(len, lines)) == max(width, len('d578fb7c  building  requested 2026-01-31T12:00:00.000Z'))
    assert {len(line) for line in lines if line.endswith('|')} == {width}
    assert f'image      30.000 s  |{"=" * (width - 23)}|' in lines


# The end of the past. Old versions of etcd answer WatchProgress too early, so the changes must confirm the answer.


NOW = 5000


def make_answer(header: int = NOW, **fields: Any) -> Any:
    nothing = {'events': [], 'created': False, 'canceled': False, 'fragment': False}
    return SimpleNamespace(header=SimpleNamespace(revision=header), **(nothing | fields))


def make_changes(first: int, count: int, header: int = NOW, fragment: bool = False) -> Any:
    events = [SimpleNamespace(kv=SimpleNamespace(mod_revision=revision)) for revision in range(first, first + count)]
    return make_answer(header, events=events, fragment=fragment)


CREATED = make_answer(created=True)


def hear_all(*replies: Any, known: bool = False, apart: float = history.PROGRESS_INTERVAL_SECONDS) -> tuple[bool, bool]:
    past = _PastProgress(NOW, known)
    for number, reply in enumerate(replies):
        past.record_reply(reply, 100 + number * apart)
    return past.is_complete, past.is_quiet


@pytest.mark.parametrize(
    ('replies', 'is_told'),
    [
        ([CREATED], False),
        ([CREATED, make_answer()], False),
        ([CREATED, make_changes(2, 10)], False),
        ([CREATED, make_changes(2, 10), make_answer()], True),
        ([CREATED, make_changes(2, 10), make_answer(NOW - 1)], False),
        ([CREATED, make_changes(2, 10, NOW - 1), make_answer()], False),
        ([CREATED, make_answer(), make_changes(2, 10)], False),
        ([CREATED, make_changes(2, MAX_ANSWER_REVISIONS), make_answer()], False),
        ([CREATED, make_changes(2, MAX_ANSWER_REVISIONS - 1), make_answer()], True),
        (
            [
                CREATED,
                make_changes(2, MAX_ANSWER_REVISIONS),
                make_answer(),
                make_changes(MAX_ANSWER_REVISIONS + 2, 1),
                make_answer(),
            ],
            True,
        ),
        # In fragments: the second one begins within a revision.
        ([CREATED, make_changes(2, 600, fragment=True), make_changes(601, 401), make_answer()], False),
        ([CREATED, make_changes(2, 600, fragment=True), make_changes(601, 400), make_answer()], True),
        ([CREATED, make_changes(2, 600, fragment=True), make_answer()], False),
    ],
)
def test_past_is_told_after_all_changes_and_an_answer(replies: list[Any], is_told: bool) -> None:
    assert hear_all(*replies)[0] is is_told


TOO_FEW_ANSWERS = [make_answer()] * (REQUIRED_PROGRESS_ANSWERS - 1)


@pytest.mark.parametrize(
    ('replies', 'how', 'is_quiet'),
    [
        (TOO_FEW_ANSWERS, {}, False),
        ([*TOO_FEW_ANSWERS, make_answer()], {}, True),
        ([make_answer()] * 50, {'apart': 0.001}, False),  # a frozen etcd answers all in a burst, which counts once
        ([make_answer(NOW - 1)] * 50, {}, False),
        # A change restarts the quiet period. A past with a known change is not quiet before that change.
        ([*TOO_FEW_ANSWERS, make_changes(2, MAX_ANSWER_REVISIONS), *TOO_FEW_ANSWERS], {}, False),
        ([*TOO_FEW_ANSWERS, make_changes(2, MAX_ANSWER_REVISIONS), *TOO_FEW_ANSWERS, make_answer()], {}, True),
        ([make_answer()] * 50, {'known': True}, False),
        ([make_changes(2, MAX_ANSWER_REVISIONS), *TOO_FEW_ANSWERS, make_answer()], {'known': True}, True),
    ],
)
def test_past_is_quiet_after_enough_spaced_answers(replies: list[Any], how: dict[str, Any], is_quiet: bool) -> None:
    assert hear_all(CREATED, *replies, **how) == (False, is_quiet)
