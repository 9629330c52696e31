"""Queued requests: format, order, how long a compute waits for one, and hints of free room."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.jobs import FailureLog, Loop
from ecomp.agent.queue import Queues, TakeLoop, Taker
from ecomp.model import keys
from ecomp.model.allocation import Inventory, Provider
from ecomp.model.choose import PlacementReason
from ecomp.model.flavor import Flavor
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group, Membership
from ecomp.model.order import MAX_REQUEST_BYTES, Holdings, InvalidRequest, parse_request
from ecomp.model.queue import (
    MAX_LOAD_DELAY_SECONDS,
    MIN_JITTER_SECONDS,
    Backlog,
    QueueEntry,
    QueueTaker,
    WaitingEntry,
    choose_delay,
    make_queued_record,
    parse_queue_entry,
    update_backlog,
)
from ecomp.model.states import QUEUED
from ecomp.model.status import DISABLED
from ecomp.model.stored import encode
from ecomp.store.client import Entry

# Queued requests, as they are written and read.


INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
SIZE = {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}
SMALL = Flavor('small', SIZE)
IMAGE = 'http://images.example/i.qcow2'
WAITING = QueueEntry(
    INSTANCE, Flavor('small', SIZE, ('T_A',), ('T_B',)), image=IMAGE, user_id='a user', project_id='a project',
    stages={'requested': 'then'}, name='web1', ssh_keys=('ssh-ed25519 AAAA',), user_data_sha256='f' * 64,
)  # fmt: skip


def change_value(**fields: Any) -> bytes:
    return json.dumps({**json.loads(encode(WAITING)), **fields}).encode()


def parse_refused(value: bytes) -> InvalidRequest:
    result = parse_queue_entry(WAITING.key, value)
    assert isinstance(result, InvalidRequest)
    return result


def test_queue_entry_round_trips() -> None:
    assert parse_queue_entry(WAITING.key, encode(WAITING).encode()) == WAITING
    ungrouped = QueueEntry(INSTANCE, SMALL, image=IMAGE, user_id='u', project_id='p')
    assert parse_queue_entry(ungrouped.key, encode(ungrouped).encode()) == ungrouped
    grouped = replace(ungrouped, group=Membership('web', ANTI_AFFINITY, True))
    assert parse_queue_entry(grouped.key, encode(grouped).encode()) == grouped
    request = grouped.make_request(COMPUTE, 'now')
    assert (request.group, request.why) == (grouped.group, PlacementReason('queue', None, 1))
    assert set(json.loads(encode(ungrouped))) == {
        'version', 'instance', 'flavor', 'query', 'image', 'user_id', 'project_id', 'stages'
    }  # fmt: skip


def test_taker_turns_an_entry_into_a_request() -> None:
    request = WAITING.make_request(COMPUTE, 'now')
    assert parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), encode(request).encode()) == request
    assert (request.allocations, request.query) == ({COMPUTE: SIZE}, WAITING.flavor.query)
    assert request.stages == {'requested': 'then', 'scheduled': 'now'}
    assert (request.name, request.ssh_keys, request.user_data_sha256) == ('web1', ('ssh-ed25519 AAAA',), 'f' * 64)


@pytest.mark.parametrize(
    ('value', 'reason'),
    [
        (b'[' * 100_000, 'nested too deeply'),
        (b' ' * (MAX_REQUEST_BYTES + 1), 'the limit is'),
        (change_value(flavor='large'), "flavor: 'large' differs from 'small' in its key"),
        (change_value(query='resources=VCPU:1'), 'lacks MEMORY_MB, DISK_GB'),
        (change_value(query='resources=VCPU:1&in_tree=x'), 'a flavor accepts only resources='),
        (change_value(user_data_sha256='x'), 'expected 64 hexadecimal digits'),
    ],
)
def test_malformed_entry_is_refused_with_a_reason(value: bytes, reason: str) -> None:
    """Other values are in tests/security/fields.txt."""
    assert reason in parse_refused(value).reason
    shown = make_queued_record(WAITING.key, value)
    assert (shown.instance, shown.state, shown.compute) == (INSTANCE, QUEUED, '')
    assert reason in (shown.fault or '')


def test_malformed_entry_reports_its_valid_shares() -> None:
    group = {'name': 'g', 'policy': ANTI_AFFINITY, 'strict': True}
    newer = change_value(version=2, group=group)
    assert parse_refused(newer).holdings == Holdings('web1', 'g', 'a project', SIZE)
    shown = make_queued_record(WAITING.key, newer)
    assert (shown.name, shown.group_name, shown.project_id, shown.resources) == ('web1', 'g', 'a project', SIZE)
    assert parse_refused(change_value(query='x', name=3, group=group)).holdings == Holdings(None, 'g')
    assert parse_refused(b'[').holdings == Holdings()


@pytest.mark.parametrize('place', ['small', 'small/', '/x', 'small/a/b', 'small/x'])
def test_invalid_key_is_refused(place: str) -> None:
    assert isinstance(parse_queue_entry(keys.QUEUES + place, encode(WAITING).encode()), InvalidRequest)


# The backlog of all queues, and the request that a compute takes.


def make_provider(used: int = 0, traits: tuple[str, ...] = (), **totals: int) -> Provider:
    whole = {'VCPU': 4, 'MEMORY_MB': 512, 'DISK_GB': 10, **totals}
    usage = {name: amount * used for name, amount in SIZE.items()}
    return Provider(COMPUTE, {name: Inventory(total, used=usage.get(name, 0)) for name, total in whole.items()}, traits)


def make_entries(waiting: Iterable[WaitingEntry], **marks: str) -> dict[str, Entry]:
    """Return the entries, where `marks` maps f<revision> to the compute of its taker key."""
    waiting = list(waiting)
    entries = {}
    for revision, entry in reversed(waiting):
        entries[entry.key] = Entry(entry.key, encode(entry).encode(), revision)
        if f'f{revision}' in marks:
            key = keys.taker(entry.key)
            entries[key] = Entry(key, encode(QueueTaker(marks[f'f{revision}'])).encode(), revision + 1000)
    return entries


def test_backlog_is_in_order_and_lists_takers() -> None:
    one, two, three = waiting = make_places(SMALL, LARGE, SMALL)
    backlog = update_backlog(make_entries(waiting, f2=COMPUTE), Backlog())
    assert list(backlog.entries.items()) == [(place.entry.key, place) for place in (one, three)]
    assert backlog.flavors == {SMALL.query: SMALL}
    assert backlog.takers == {COMPUTE: {two.entry.key: 1002}}
    assert backlog.names == {*(place.entry.instance for place in waiting), 'small', 'large'}
    assert backlog.has_new


def test_backlog_has_more_if_a_request_became_available() -> None:
    waiting = make_places(SMALL, SMALL)
    whole = update_backlog(make_entries(waiting), Backlog())
    assert not update_backlog(make_entries(waiting), whole).has_new
    marked = update_backlog(make_entries(waiting, f1=COMPUTE), whole)
    assert not marked.has_new
    assert update_backlog(make_entries(waiting), marked).has_new, 'it was given back'
    assert not update_backlog(make_entries(waiting[1:]), marked).has_new, 'it was taken'
    assert update_backlog(make_entries(make_places(SMALL, SMALL, LARGE)), whole).has_new
    # Cancelled and queued again.
    queued_again = [waiting[0], WaitingEntry(9, waiting[1].entry)]
    assert update_backlog(make_entries(queued_again), whole).has_new


CHANGE = st.tuples(st.sampled_from(['put', 'other', 'junk', 'delete', 'mark', 'scrawl', 'unmark']), st.integers(0, 5))


@given(st.lists(st.lists(CHANGE, max_size=4), max_size=12))
def test_updated_backlog_equals_a_rebuilt_one(steps: list[list[tuple[str, int]]]) -> None:
    entries, revision, backlog = dict[str, Entry](), 0, Backlog()
    candidates = make_places(SMALL, LARGE, SMALL, FAST, SMALL, LARGE)
    for changes in steps:
        for change, number in changes:
            revision += 1
            key, request = candidates[number].entry.key, encode(candidates[number].entry)
            values = {'put': request, 'other': request.replace('i.qcow2', 'j.qcow2'), 'junk': '{}'}
            marks = {'mark': encode(QueueTaker(COMPUTE)), 'scrawl': '[]'}
            if change in values:
                entries[key] = Entry(key, values[change].encode(), revision)
            elif change in marks:
                entries[keys.taker(key)] = Entry(keys.taker(key), marks[change].encode(), revision)
            else:
                entries.pop(key if change == 'delete' else keys.taker(key), None)
        before, backlog = backlog, update_backlog(dict(entries), backlog)
        rebuilt = update_backlog(dict(entries), Backlog())
        assert list(backlog.entries.items()) == list(rebuilt.entries.items())
        assert (backlog.flavors, backlog.takers, backlog.names) == (rebuilt.flavors, rebuilt.takers, rebuilt.names)
        assert backlog.has_new == any(before.entries.get(key) is not place for key, place in backlog.entries.items())


def test_backlog_update_reads_only_changed_entries() -> None:
    """With 10,000 queued requests, reading all of them for each event would load every compute."""
    accessed: list[str] = []

    class Watched(Entry):
        def __getattribute__(self, name: str) -> Any:
            if name in ('revision', 'value'):
                accessed.append(super().__getattribute__('key'))
            return super().__getattribute__(name)

    waiting = make_places(*[SMALL] * 100)
    entries = {key: Watched(key, entry.value, entry.revision) for key, entry in make_entries(waiting).items()}
    backlog = update_backlog(dict(entries), Backlog())
    assert len(set(accessed)) == 100
    accessed.clear()
    mark = keys.taker(waiting[7].entry.key)
    entries[mark] = Watched(mark, encode(QueueTaker(COMPUTE)).encode(), 1000)
    backlog = update_backlog(dict(entries), backlog)
    assert set(accessed) == {mark}
    assert len(backlog.entries) == 99


def test_malformed_entries_do_not_block_others() -> None:
    (good,) = make_places(SMALL)
    key = keys.taker(good.entry.key)
    entries = {
        '/queues/small/no-uuid': Entry('/queues/small/no-uuid', b'{}', 1),
        f'/queues/small/{INSTANCE}': Entry('', b'no request', 2),
        f'/queues/small/{INSTANCE}/taker': Entry('', encode(QueueTaker(COMPUTE)).encode(), 3),
        '/queues/': Entry('', b'', 4),
        **make_entries([good]),
    }
    backlog = update_backlog(entries, Backlog())
    assert list(backlog.entries.values()) == [good]
    assert backlog.takers == {COMPUTE: {f'/queues/small/{INSTANCE}': 3}}
    for rubbish in (b'', b'[]', b'{"compute": ["x"]}', b'{"compute": null}'):
        marked = update_backlog({**entries, key: Entry(key, rubbish, 5)}, backlog)
        assert (marked.entries, set(marked.takers)) == ({}, {COMPUTE}), 'whoever it is: somebody is at it'


def test_value_that_was_dropped_as_too_large_is_queued_once_it_fits() -> None:
    state = make_entries(make_places(SMALL))
    ((key, entry),) = state.items()
    dropped = update_backlog({key: replace(entry, value=b'', dropped_bytes=2000)}, Backlog())
    assert dropped.entries == {}
    assert update_backlog(state, dropped).entries.keys() == {key}


def make_places(*flavors: Flavor) -> list[WaitingEntry]:
    return [
        WaitingEntry(
            number,
            QueueEntry(f'{number:08}-0000-4000-8000-000000000000', flavor, image=IMAGE, user_id='u', project_id='p'),
        )
        for number, flavor in enumerate(flavors, 1)
    ]


def make_taker(room: Provider) -> Taker:
    control = ControlPlane(COMPUTE, cast(Any, None), cast(Any, None), lambda: 'now')
    taker = Taker(control, lambda: 1, Queues(), lambda: True, {}, set)
    taker._room = room
    return taker


LARGE = Flavor('large', {**SIZE, 'VCPU': 3})
FAST = Flavor('fast', SIZE, ('CUSTOM_FAST',))
SLOW = Flavor('slow', SIZE, (), ('CUSTOM_FAST',))


@pytest.mark.parametrize(('room', 'revision'), [
    (make_provider(), 2), (make_provider(used=1), 2), (make_provider(used=2), 3),
    (make_provider(used=4), None), (make_provider(traits=('CUSTOM_FAST',)), 1),
    (make_provider(used=2, traits=('CUSTOM_FAST',)), 1), (make_provider(traits=('CUSTOM_FAST', DISABLED)), None),
    (make_provider(MEMORY_MB=64), None), (Provider(COMPUTE), None),
])  # fmt: skip
def test_oldest_fitting_request_is_taken(room: Provider, revision: int | None) -> None:
    waiting = make_places(FAST, LARGE, SMALL, SLOW)
    place = make_taker(room)._choose(update_backlog(make_entries(waiting), Backlog()))
    assert (place.revision if place else None) == revision


def test_deferred_requests_and_flavors_are_not_taken() -> None:
    waiting = make_places(SMALL, SMALL, LARGE)
    backlog, taker = update_backlog(make_entries(waiting), Backlog()), make_taker(make_provider())
    for deferred, place in zip((waiting[0].entry.instance, 'small', 'large'), (*waiting[1:], None), strict=True):
        taker.deferrals.defer(deferred)
        assert taker._choose(backlog) == place


def test_compute_that_cannot_take_is_not_due_before_its_room_is_read_again() -> None:
    taker = make_taker(make_provider(used=4))
    assert taker.get_due_time() == math.inf
    taker.queues.on_queues({})
    assert not taker.take_next()
    assert taker.get_due_time() == math.inf
    taker._next_room_read = 10.0**9
    taker.queues.on_queues(make_entries(make_places(SMALL)))
    assert not taker.take_next()
    assert taker.get_due_time() == 10.0**9
    taker.may_take = lambda: False
    assert taker.get_due_time() == math.inf


def test_woken_compute_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moments: list[float] = []
    monkeypatch.setattr(Loop, 'schedule', lambda _, moment: moments.append(moment))
    loop, began = TakeLoop(make_taker(make_provider(used=4)), FailureLog()), time.monotonic()
    for _ in range(3):
        loop.wake_up('requests are queued')
    (moment,) = moments
    assert moment >= began + MAX_LOAD_DELAY_SECONDS


def test_compute_that_found_no_thread_takes_when_it_is_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started, real, refusals = threading.Event(), threading.Thread.start, [1]

    def start(thread: threading.Thread) -> None:
        if thread.name == 'queues' and refusals:
            refusals.pop()
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, 'start', start)
    taker = make_taker(make_provider())
    monkeypatch.setattr(taker, 'take_next', started.set)
    loop = TakeLoop(taker, FailureLog())
    with pytest.raises(RuntimeError):
        loop.wake_up('requests are queued')
    loop.wake_up('requests are queued')
    assert started.wait(20)
    loop.stop()


def test_patience_grows_with_the_load() -> None:
    rng = random.Random(1)
    waits = [choose_delay(make_provider(used=used), 1, rng) for used in range(5)]
    assert waits == sorted(waits)
    assert 0 <= waits[0] <= MIN_JITTER_SECONDS
    assert MAX_LOAD_DELAY_SECONDS <= waits[4] <= MAX_LOAD_DELAY_SECONDS + MIN_JITTER_SECONDS
    # The scarcest class counts, a class that no guest needs does not, and more than full counts as full.
    assert choose_delay(make_provider(used=3, MEMORY_MB=384), 1, rng) >= MAX_LOAD_DELAY_SECONDS
    assert choose_delay(make_provider(used=9), 1, rng) <= MAX_LOAD_DELAY_SECONDS + MIN_JITTER_SECONDS
    spare = make_provider(CUSTOM_X=0)
    assert choose_delay(spare, 1, rng) <= MIN_JITTER_SECONDS


@pytest.mark.parametrize('computes', [1, 30, 300])
def test_few_of_many_equal_computes_try_concurrently(computes: int) -> None:
    rng, concurrent, shortest = random.Random(2026), [], []
    for _ in range(100):
        waits = sorted(choose_delay(make_provider(), computes, rng) for _ in range(computes))
        concurrent.append(sum(wait <= waits[0] + 0.01 for wait in waits))  # before they learn that it is taken
        shortest.append(waits[0])
    assert sum(concurrent) / len(concurrent) <= 8
    assert sum(shortest) / len(shortest) <= 0.015


def test_idlest_of_many_computes_is_first() -> None:
    rng = random.Random(1)
    idle, half = ([choose_delay(make_provider(used=used), 1000, rng) for _ in range(500)] for used in (0, 2))
    assert min(idle) < 0.05 < min(half)
    assert min(half) >= MAX_LOAD_DELAY_SECONDS / 2


def test_compute_leaves_time_to_those_that_a_soft_group_prefers() -> None:
    here, elsewhere = {INSTANCE: COMPUTE}, {INSTANCE: 'b8756be5-0000-4000-8000-000000000000'}
    for policy, first, later in ((AFFINITY, here, elsewhere), (ANTI_AFFINITY, elsewhere, here)):
        taker = make_taker(make_provider())
        assert not taker._yields(INSTANCE, Group('web', policy, False, first))
        assert not taker._yields(INSTANCE, Group('web', policy, False))
        assert [taker._yields(INSTANCE, Group('web', policy, False, later)) for _ in range(2)] == [True, False]
        assert taker.deferrals.get_due_time(INSTANCE) > time.monotonic() + MAX_LOAD_DELAY_SECONDS / 2


def test_living_computes_that_take_are_counted() -> None:
    taking = b'{"queues": true}'
    values = {'a': (taking, 1), 'b': (b'{"queues": false}', 1), 'c': (b'{}', 1), 'd': (b'7', 1), 'e': (b'not JSON', 1)}
    values['f'] = (taking, 0)  # without a lease it is not alive
    state = {
        keys.compute(name): Entry(keys.compute(name), value, 7, lease=lease) for name, (value, lease) in values.items()
    }
    queues = Queues()
    queues.on_computes(state)
    assert queues.taker_count == 1
    changed = {keys.compute(name): Entry(keys.compute(name), taking, 8, lease=1) for name in 'bg'}
    queues.on_computes({**state, **changed})
    assert queues.taker_count == 3
    queues.on_computes(changed)
    assert queues.taker_count == 2
