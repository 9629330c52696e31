"""Queued requests: format, order, hints of free room, and which computes are woken and may take one when."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.agent.queue import Offers
from ecomp.model import keys, queue
from ecomp.model.allocation import Inventory
from ecomp.model.choose import PlacementReason
from ecomp.model.explain import Provider
from ecomp.model.flavor import Flavor
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group, Membership
from ecomp.model.order import MAX_REQUEST_BYTES, Holdings, InvalidRequest, parse_request
from ecomp.model.queue import (
    INITIAL_TAKERS,
    MAX_JITTER_SECONDS,
    MAX_LOAD_DELAY_SECONDS,
    MIN_JITTER_SECONDS,
    WIDEN_SECONDS,
    Backlog,
    QueueEntry,
    QueueTaker,
    Takers,
    WaitingEntry,
    adjust_limit,
    can_take,
    check_flavors,
    choose_delay,
    choose_next,
    count_allowed_takers,
    get_opening_seconds,
    make_queued_record,
    parse_queue_entry,
    rank_takers,
    update_backlog,
    update_takers,
)
from ecomp.model.record import QUEUED
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
    INSTANCE,
    Flavor('small', SIZE, ('T_A',), ('T_B',)),
    image=IMAGE,
    user_id='a user',
    project_id='a project',
    stages={'requested': 'then'},
    name='web1',
    ssh_keys=('ssh-ed25519 AAAA',),
    user_data_sha256='f' * 64,
)


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
    """Return the entries of these requests, youngest first.

    `marks` maps f<revision of a request> to the compute of its taker key.
    """
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
    assert backlog.taken == {COMPUTE: {two.entry.key: (1002, two)}}
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
        assert (backlog.flavors, backlog.taken, backlog.counts_by_query) == (
            rebuilt.flavors,
            rebuilt.taken,
            rebuilt.counts_by_query,
        )
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
    assert backlog.taken == {COMPUTE: {f'/queues/small/{INSTANCE}': (3, None)}}
    for rubbish in (b'', b'[]', b'{"compute": ["x"]}', b'{"compute": null}'):
        marked = update_backlog({**entries, key: Entry(key, rubbish, 5)}, backlog)
        assert (marked.entries, set(marked.taken)) == ({}, {COMPUTE}), 'whoever it is: somebody is at it'


def make_places(*flavors: Flavor) -> list[WaitingEntry]:
    return [
        WaitingEntry(
            number,
            QueueEntry(f'{number:08}-0000-4000-8000-000000000000', flavor, image=IMAGE, user_id='u', project_id='p'),
        )
        for number, flavor in enumerate(flavors, 1)
    ]


def collect_flavors(waiting: Iterable[WaitingEntry]) -> dict[str, Flavor]:
    return {place.entry.flavor.query: place.entry.flavor for place in waiting}


LARGE = Flavor('large', {**SIZE, 'VCPU': 3})
FAST = Flavor('fast', SIZE, ('CUSTOM_FAST',))
SLOW = Flavor('slow', SIZE, (), ('CUSTOM_FAST',))


@pytest.mark.parametrize(
    ('taker', 'revision'),
    [
        (make_provider(), 2),
        (make_provider(used=1), 2),
        (make_provider(used=2), 3),
        (make_provider(used=4), None),
        (make_provider(traits=('CUSTOM_FAST',)), 1),
        (make_provider(used=2, traits=('CUSTOM_FAST',)), 1),
        (make_provider(traits=('CUSTOM_FAST', DISABLED)), None),
        (make_provider(MEMORY_MB=64), None),
        (Provider(COMPUTE), None),
    ],
)
def test_oldest_fitting_request_is_taken(taker: Provider, revision: int | None) -> None:
    waiting = make_places(FAST, LARGE, SMALL, SLOW)
    takes = check_flavors(collect_flavors(waiting), taker, {})
    place = find_first(waiting, takes)
    assert (place.revision if place else None) == revision
    assert takes == {flavor.query: can_take(flavor, taker) for flavor in (FAST, LARGE, SMALL, SLOW)}
    assert check_flavors(collect_flavors(waiting[:1]), taker, {FAST.query: True, LARGE.query: True}) == {
        FAST.query: True
    }


def test_skipped_and_unfit_requests_are_not_taken() -> None:
    waiting = make_places(SMALL, SMALL, LARGE)
    takes = check_flavors(collect_flavors(waiting), make_provider(), {})
    assert find_first(waiting, takes, [waiting[0].entry.instance]) == waiting[1]
    assert find_first(waiting, takes | {SMALL.query: False}) == waiting[2]
    assert find_first(waiting, takes, [place.entry.instance for place in waiting]) is None
    assert find_first([], {}) is None


def test_lost_races_widen_the_window() -> None:
    waiting, rng = make_places(SMALL, LARGE, *[SMALL] * 200), random.Random(2026)
    takes = check_flavors(collect_flavors(waiting), make_provider(), {}) | {LARGE.query: False}
    window, windows = 1, []
    for _ in range(10):
        picked = [choose_next(waiting, takes, (), window, rng) for _ in range(2000)]
        revisions = {place.revision for place in picked if place}
        assert revisions == {1, *range(3, window + 2)}  # all of the first ones that fit, and no others
        windows.append(window)
        window = adjust_limit(window, False)
    assert windows == [1, 2, 4, 8, 16, 32, 64, 64, 64, 64]
    for _ in range(6):
        assert window > 1
        window = adjust_limit(window, True)
    assert adjust_limit(window, True) == window == 1


def find_first(
    waiting: list[WaitingEntry], takes: dict[str, bool], passed_over: Sequence[str] = ()
) -> WaitingEntry | None:
    return choose_next(waiting, takes, passed_over, 1, random.Random())


def test_patience_grows_with_the_load() -> None:
    rng = random.Random(1)
    waits = [choose_delay(make_provider(used=used), None, 1, rng) for used in range(5)]
    assert waits == sorted(waits)
    assert 0 <= waits[0] <= MIN_JITTER_SECONDS
    assert MAX_LOAD_DELAY_SECONDS <= waits[4] <= MAX_LOAD_DELAY_SECONDS + MIN_JITTER_SECONDS
    # The scarcest class counts, a class that no guest needs does not, and more than full counts as full.
    assert choose_delay(make_provider(used=3, MEMORY_MB=384), None, 1, rng) >= MAX_LOAD_DELAY_SECONDS
    assert choose_delay(make_provider(used=9), None, 1, rng) <= MAX_LOAD_DELAY_SECONDS + MIN_JITTER_SECONDS
    spare = make_provider(CUSTOM_X=0)
    assert choose_delay(spare, None, 1, rng) <= MIN_JITTER_SECONDS


@pytest.mark.parametrize('computes', [1, 30, 300])
def test_few_of_many_equal_computes_try_concurrently(computes: int) -> None:
    rng, concurrent, shortest = random.Random(2026), [], []
    for _ in range(100):
        waits = sorted(choose_delay(make_provider(), None, computes, rng) for _ in range(computes))
        concurrent.append(sum(wait <= waits[0] + 0.01 for wait in waits))  # before they learn that it is taken
        shortest.append(waits[0])
    assert sum(concurrent) / len(concurrent) <= 8
    assert sum(shortest) / len(shortest) <= 0.015


def test_idlest_of_many_computes_is_first() -> None:
    rng = random.Random(1)
    half = [choose_delay(make_provider(used=2), None, 1000, rng) for _ in range(1000)]
    assert min(half) >= MAX_LOAD_DELAY_SECONDS / 2 + MAX_JITTER_SECONDS / 2
    assert {choose_delay(make_provider(used=4), None, 10_000, rng) for _ in range(10)} == {
        MAX_LOAD_DELAY_SECONDS + MAX_JITTER_SECONDS
    }


def test_compute_preferred_by_a_soft_group_is_first() -> None:
    rng = random.Random(1)
    here, elsewhere = {INSTANCE: COMPUTE}, {INSTANCE: 'b8756be5-0000-4000-8000-000000000000'}
    for policy, first, later in ((AFFINITY, here, elsewhere), (ANTI_AFFINITY, elsewhere, here)):
        assert choose_delay(make_provider(), Group('web', policy, False, first), 1, rng) <= MIN_JITTER_SECONDS
        assert choose_delay(make_provider(), Group('web', policy, False, later), 1, rng) >= MAX_LOAD_DELAY_SECONDS
        assert choose_delay(make_provider(), Group('web', policy, False), 1, rng) <= MIN_JITTER_SECONDS


# Computes that may take a queued request immediately, and those that may later.


ONE = {'VCPU': 1, 'MEMORY_MB': 64}


def name_computes(number: int) -> list[str]:
    return [f'c{index}' for index in range(number)]


def make_compute_entries(**texts: object) -> dict[str, Entry]:
    values = {keys.compute(name): json.dumps(text).encode() for name, text in texts.items()}
    return {key: Entry(key, value, 7, 1) for key, value in values.items()}


def make_takers(*names: str) -> Takers:
    return update_takers(make_compute_entries(**{name: {'queues': True} for name in names}), Takers())


def get_first_computes(instance: str, takers: Takers) -> set[str]:
    return {compute for compute, number in rank_takers(instance, takers).items() if number < INITIAL_TAKERS}


def test_first_computes_differ_per_request() -> None:
    takers = make_takers(*name_computes(100))
    chosen = Counter(compute for number in range(1000) for compute in get_first_computes(f'instance {number}', takers))
    assert chosen.keys() == set(name_computes(100))
    # The mean is 40; the limits are about four standard deviations away.
    assert 15 < min(chosen.values()) <= max(chosen.values()) < 66
    assert len({frozenset(get_first_computes(f'instance {number}', takers)) for number in range(100)}) > 95


@given(st.integers(5, 60), st.integers(0, 59), st.uuids())
def test_dead_compute_moves_no_other(number: int, dead: int, instance: object) -> None:
    """Processes that see it alive and processes that do not agree on all other computes."""
    living = name_computes(number)
    before = rank_takers(str(instance), make_takers(*living))
    dead_compute = living[dead % number]
    after = rank_takers(str(instance), make_takers(*(compute for compute in living if compute != dead_compute)))
    assert list(after) == [compute for compute in before if compute != dead_compute]


def test_takers_are_living_computes_that_take_from_queues() -> None:
    entries = make_compute_entries(a={'queues': True}, b={'queues': False}, c={}, d=7)
    entries['/computes/e'] = Entry('/computes/e', b'not JSON', 7, 1)
    entries['/computes/f'] = Entry('/computes/f', b'{"queues": true}', 7)  # without a lease it is not alive
    takers = update_takers(entries, Takers())
    assert takers.hashes.keys() == {'a'}
    # One compute is added, one changes its value, one is removed.
    entries |= make_compute_entries(b={'queues': True}, g={'queues': True})
    del entries['/computes/a']
    takers = update_takers(entries, takers)
    assert takers.hashes.keys() == {'b', 'g'}
    assert takers == update_takers(entries, Takers())


def test_takers_update_parses_only_changed_values(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = make_compute_entries(**{name: {'queues': True} for name in name_computes(50)})
    takers = update_takers(entries, Takers())
    parsed: list[object] = []
    monkeypatch.setattr(queue, 'load_object_or_empty', lambda value: parsed.append(value) or json.loads(value))
    updated = update_takers({**entries, **make_compute_entries(c7={'queues': False}, new={'queues': True})}, takers)
    assert len(parsed) == 2
    assert updated.hashes.keys() == {*name_computes(50), 'new'} - {'c7'}


def test_circles_grow_until_all_computes_are_included() -> None:
    opened = [
        get_opening_seconds(position)
        for position in (0, INITIAL_TAKERS - 1, INITIAL_TAKERS, 2 * INITIAL_TAKERS, 4 * INITIAL_TAKERS)
    ]
    assert opened == [0, 0, WIDEN_SECONDS, 2 * WIDEN_SECONDS, 3 * WIDEN_SECONDS]
    assert get_opening_seconds(999) <= 2.0
    assert get_opening_seconds(9_999) <= 3.0
    allowed = [count_allowed_takers(seconds, 100) for seconds in (0.0, WIDEN_SECONDS, 2 * WIDEN_SECONDS, 3600.0)]
    assert allowed == [INITIAL_TAKERS, 2 * INITIAL_TAKERS, 4 * INITIAL_TAKERS, 100]
    assert count_allowed_takers(0.0, 0) == 1


# Offers: which computes are woken for a queued request, and when each may take it.


SMALL_FLAVOR = Flavor('small', {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1})
COMPUTES = [f'c{number}' for number in range(64)]


class Scene:
    """The offers of one process under a fake clock, with its computes `here` and all `alive`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: list[str], alive: list[str]) -> None:
        self.now = 100.0
        self.woken = list[str]()
        self.wake_times = list[float]()
        monkeypatch.setattr(time, 'monotonic', lambda: self.now)
        self.offers = Offers(self.wake_times.append)
        for each in here:
            self.offers.add(each, lambda _, each=each: self.woken.append(each))  # type: ignore[misc]
        self.queues: dict[str, Entry] = {}
        self.set_alive(alive)
        self.deliver_queues()

    def set_alive(self, alive: list[str]) -> None:
        entries = (Entry(keys.compute(compute), b'{"queues": true}', 1, 1) for compute in alive)
        self.offers.on_computes({entry.key: entry for entry in entries})

    def enqueue(self, instance: str = '720d910e-8174-4dd6-a60b-a6d688df6d7b') -> str:
        entry = QueueEntry(instance, SMALL_FLAVOR, image='http://i/i', user_id='u', project_id='p', stages={})
        self.queues[entry.key] = Entry(entry.key, encode(entry).encode(), 10 + len(self.queues))
        self.deliver_queues()
        return entry.key

    def put_taker_key(self, key: str, compute: str) -> None:
        self.queues[keys.taker(key)] = Entry(keys.taker(key), encode(QueueTaker(compute)).encode(), 50, 1)
        self.deliver_queues()

    def deliver_queues(self) -> None:
        self.woken.clear()
        self.offers.on_queues(dict(self.queues))

    def advance(self, seconds: float) -> float:
        self.woken.clear()
        self.now += seconds
        return self.offers.wake_more()

    def get_open_computes(self, key: str) -> set[str]:
        assert self.offers.backlog is not None
        place = self.offers.backlog.entries[key]
        return {compute for compute in COMPUTES if self.offers.is_open(place, compute)}


def test_offer_doubles_until_all_computes_are_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.enqueue()
    assert scene.get_open_computes(key) == set(scene.woken)
    sizes, wakes = [len(scene.woken)], [scene.wake_times[-1]]
    while wakes[-1] < math.inf:
        before = scene.get_open_computes(key)
        wakes.append(scene.advance(WIDEN_SECONDS))
        assert before < scene.get_open_computes(key) == set(scene.woken)
        sizes.append(len(scene.woken))
    assert sizes == [INITIAL_TAKERS, 2 * INITIAL_TAKERS, 4 * INITIAL_TAKERS, 8 * INITIAL_TAKERS, len(COMPUTES)]
    assert wakes[:-1] == [100.0 + WIDEN_SECONDS * number for number in range(1, 5)]


def test_processes_agree_on_the_first_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = [Scene(monkeypatch, [compute], COMPUTES) for compute in COMPUTES]
    for scene in scenes:
        scene.enqueue()
    assert sum(len(scene.woken) for scene in scenes) == INITIAL_TAKERS


def test_taken_request_wakes_no_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    scene.put_taker_key(scene.enqueue(), 'another')
    assert scene.advance(WIDEN_SECONDS) == math.inf
    assert scene.woken == []


def test_returned_request_is_offered_from_the_start_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The taker died and its taker key expired; which computes tried before is unknown."""
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.enqueue()
    first_computes = set(scene.woken)
    scene.put_taker_key(key, 'another')
    scene.advance(30.0)
    del scene.queues[keys.taker(key)]
    scene.deliver_queues()
    assert set(scene.woken) == first_computes == scene.get_open_computes(key)


def test_compute_not_seen_alive_is_woken_last(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, ['unseen'], COMPUTES[:16])
    scene.enqueue()
    assert scene.woken == []
    for _ in range(2):
        scene.advance(WIDEN_SECONDS)
    assert scene.woken == ['unseen']


def test_owner_of_a_taker_key_is_woken_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.enqueue()
    scene.put_taker_key(key, 'c7')
    assert scene.woken == ['c7']
    scene.enqueue('820d910e-8174-4dd6-a60b-a6d688df6d7b')
    assert 'c7' not in scene.woken or len(scene.woken) == INITIAL_TAKERS


def test_request_queued_before_the_start_is_open_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = before.enqueue()
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    scene.offers = Offers(lambda _: None)
    scene.offers.add('c7', lambda _: scene.woken.append('c7'))
    scene.set_alive(COMPUTES)
    scene.queues = before.queues
    scene.deliver_queues()
    assert scene.woken == ['c7']
    assert scene.get_open_computes(key) == set(COMPUTES)


def test_request_is_tried_by_one_compute_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.enqueue()
    place = scene.offers.backlog.entries[key]  # type: ignore[union-attr]
    open_computes = scene.get_open_computes(key)
    assert scene.offers.begin_take(place)
    assert not scene.offers.begin_take(place)
    assert scene.get_open_computes(key) == set()
    scene.offers.end_take(place, is_taken=False)
    assert scene.get_open_computes(key) == open_computes
    scene.advance(0.0)
    assert set(scene.woken) == open_computes, 'it is left to the others, and they are told'
    assert scene.offers.begin_take(place)
    scene.offers.end_take(place, is_taken=True)
    assert scene.get_open_computes(key) == set(), 'also until etcd has told of it'


def test_request_given_up_wakes_all_open_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.enqueue()
    place = scene.offers.backlog.entries[key]  # type: ignore[union-attr]
    assert scene.advance(3600.0) == math.inf
    assert scene.offers.begin_take(place)
    scene.offers.end_take(place, is_taken=False)
    scene.advance(0.0)
    assert set(scene.woken) == set(COMPUTES)
