"""Queued requests: format, order, who may take one and when, and hints of free room."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys, queue
from ecomp.model.allocation import Inventory
from ecomp.model.choose import Why
from ecomp.model.explain import Provider
from ecomp.model.flavor import Flavor
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group, Membership
from ecomp.model.host import Left, living_in, parse_room_hint, room_hint, share_left
from ecomp.model.host import fits as fits_there
from ecomp.model.order import SIZE_LIMIT, Invalid, Shares, parse_request
from ecomp.model.order import to_json as request_to_json
from ecomp.model.queue import (
    FIRST,
    JITTER,
    LONGEST,
    MOST,
    WIDER,
    Backlog,
    Place,
    QueueEntry,
    Takers,
    backlog_of,
    fits,
    mark_to_json,
    marked_by,
    next_of,
    opens_after,
    order,
    parse_waiting,
    patience,
    record_of,
    subscribed,
    takers_allowed,
    takers_of,
    to_json,
    widened,
)
from ecomp.model.record import QUEUED, STATES
from ecomp.model.status import DISABLED
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


def changed(**fields: Any) -> bytes:
    """Return the value of WAITING with these fields changed."""
    return json.dumps({**json.loads(to_json(WAITING)), **fields}).encode()


def refused(value: bytes) -> Invalid:
    result = parse_waiting(WAITING.key, value)
    assert isinstance(result, Invalid)
    return result


def test_what_is_written_is_read() -> None:
    assert parse_waiting(WAITING.key, to_json(WAITING).encode()) == WAITING
    ungrouped = QueueEntry(INSTANCE, SMALL, image=IMAGE, user_id='u', project_id='p')
    assert parse_waiting(ungrouped.key, to_json(ungrouped).encode()) == ungrouped
    grouped = replace(ungrouped, group=Membership('web', ANTI_AFFINITY, True))
    assert parse_waiting(grouped.key, to_json(grouped).encode()) == grouped
    request = grouped.request(COMPUTE, 'now')
    assert (request.group, request.why) == (grouped.group, Why('queue', None, 1))
    assert set(json.loads(to_json(ungrouped))) == {
        'version', 'instance', 'flavor', 'query', 'image', 'user_id', 'project_id', 'stages'
    }  # fmt: skip


def test_what_a_taker_makes_of_it_is_a_request() -> None:
    request = WAITING.request(COMPUTE, 'now')
    assert parse_request(COMPUTE, keys.request(COMPUTE, INSTANCE), request_to_json(request).encode()) == request
    assert (request.allocations, request.query) == ({COMPUTE: SIZE}, WAITING.flavor.query)
    assert request.stages == {'requested': 'then', 'scheduled': 'now'}
    assert (request.name, request.ssh_keys, request.user_data_sha256) == ('web1', ('ssh-ed25519 AAAA',), 'f' * 64)


@pytest.mark.parametrize(
    ('value', 'said'),
    [
        (b'', 'not JSON'),
        (b'[]', 'expected a JSON object'),
        (b'\xff', 'not text in UTF-8'),
        (b'[' * 100_000, 'nested too deeply'),
        (b' ' * (SIZE_LIMIT + 1), 'the limit is'),
        (changed(version=2), 'version 2 of a waiting request is not known here'),
        (changed(version=True), 'version True'),
        (changed(instance=COMPUTE), f"its key says small/{INSTANCE}, and it says 'small' and '{COMPUTE}'"),
        (changed(flavor='large'), "and it says 'large'"),
        (changed(query=None), 'lacks query'),
        (changed(query='resources=VCPU:1'), 'no MEMORY_MB, DISK_GB'),
        (changed(query='resources=VCPU:1&in_tree=x'), 'a flavor has resources'),
        (changed(query=7), 'query: expected text'),
        (changed(image=None), 'lacks image'),
        (changed(image='ftp://x/y'), 'ftp'),
        (changed(user_id=''), 'lacks user_id'),
        (changed(project_id=[]), 'project_id: expected text'),
        (changed(stages=[]), 'stages: expected an object of times'),
        (changed(name='no name'), 'is no host name'),
        (changed(ssh_keys='x'), 'ssh_keys: expected a list'),
        (changed(user_data_sha256='x'), 'expected 64 hexadecimal digits'),
    ],
)
def test_what_cannot_be_understood_has_a_reason(value: bytes, said: str) -> None:
    result = parse_waiting(WAITING.key, value)
    assert isinstance(result, Invalid)
    assert said in result.reason
    shown = record_of(WAITING.key, value)
    assert (shown.instance, shown.state, shown.compute) == (INSTANCE, QUEUED, '')
    assert said in (shown.fault or '')


def test_what_cannot_be_understood_says_what_it_shares_as_far_as_it_can_be_told() -> None:
    group = {'name': 'g', 'policy': ANTI_AFFINITY, 'strict': True}
    newer = changed(version=2, group=group)
    assert refused(newer).shares == Shares('web1', 'g', 'a project', SIZE)
    shown = record_of(WAITING.key, newer)
    assert (shown.name, shown.group_name, shown.project_id, shown.resources) == ('web1', 'g', 'a project', SIZE)
    assert refused(changed(query='x', name=3, group=group)).shares == Shares(None, 'g')
    assert refused(b'[').shares == Shares()


@pytest.mark.parametrize('place', ['small', 'small/', '/x', 'small/a/b', 'small/x'])
def test_a_key_that_is_none(place: str) -> None:
    assert isinstance(parse_waiting(keys.QUEUES + place, to_json(WAITING).encode()), Invalid)


@given(st.binary(max_size=300))
def test_nothing_breaks_the_parser(value: bytes) -> None:
    assert isinstance(parse_waiting(WAITING.key, value), Invalid)


def test_what_is_shown_of_it() -> None:
    shown = record_of(WAITING.key, to_json(WAITING).encode())
    assert (shown.state, shown.compute, shown.name, shown.query) == ('queued', '', 'web1', WAITING.flavor.query)
    assert shown.resources == SIZE
    assert QUEUED not in STATES, 'no record in etcd says so'


def test_keys_of_the_queues() -> None:
    key, mark = WAITING.key, keys.taker(WAITING.key)
    assert key == f'/queues/small/{INSTANCE}'
    assert keys.queued(key) == ('small', INSTANCE)
    assert keys.queued(mark) is None
    assert keys.in_queue(key) == keys.in_queue(mark) == INSTANCE
    assert marked_by(mark_to_json(COMPUTE).encode()) == COMPUTE
    for rubbish in (b'no mark', b'[]', b'{}', b'{"compute": 1}', b'\xff', b'[' * 100_000):
        assert marked_by(rubbish) is None


# The backlog of all queues, and the request that a compute takes.


def provider(used: int = 0, traits: tuple[str, ...] = (), **totals: int) -> Provider:
    whole = {'VCPU': 4, 'MEMORY_MB': 512, 'DISK_GB': 10, **totals}
    usage = {name: amount * used for name, amount in SIZE.items()}
    return Provider(COMPUTE, {name: Inventory(total, used=usage.get(name, 0)) for name, total in whole.items()}, traits)


# Backlogs


def state(waiting: Iterable[Place], **marks: str) -> dict[str, Entry]:
    """Return the entries of these requests, youngest first.

    `marks` maps f<revision of a request> to the compute of its taker key.
    """
    waiting = list(waiting)
    entries = {}
    for revision, entry in reversed(waiting):
        entries[entry.key] = Entry(entry.key, to_json(entry).encode(), revision)
        if f'f{revision}' in marks:
            key = keys.taker(entry.key)
            entries[key] = Entry(key, mark_to_json(marks[f'f{revision}']).encode(), revision + 1000)
    return entries


def test_a_backlog_is_in_order_and_says_who_takes_what() -> None:
    one, two, three = waiting = places(SMALL, LARGE, SMALL)
    backlog = backlog_of(state(waiting, f2=COMPUTE), Backlog())
    assert list(backlog.places.items()) == [(place.waiting.key, place) for place in (one, three)]
    assert backlog.flavors == {SMALL.query: SMALL}
    assert backlog.marks == {COMPUTE: {two.waiting.key: (1002, two)}}
    assert backlog.has_more


def test_a_backlog_has_more_when_somebody_could_take_what_nobody_could_before() -> None:
    waiting = places(SMALL, SMALL)
    whole = backlog_of(state(waiting), Backlog())
    assert not backlog_of(state(waiting), whole).has_more
    marked = backlog_of(state(waiting, f1=COMPUTE), whole)
    assert not marked.has_more
    assert backlog_of(state(waiting), marked).has_more, 'it was given back'
    assert not backlog_of(state(waiting[1:]), marked).has_more, 'it was taken'
    assert backlog_of(state(places(SMALL, SMALL, LARGE)), whole).has_more
    # Cancelled and queued again.
    queued_again = [waiting[0], Place(9, waiting[1].waiting)]
    assert backlog_of(state(queued_again), whole).has_more


def test_a_backlog_reads_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, parsed_keys = places(SMALL, LARGE, FAST), list[str]()
    parse = queue.parse_waiting
    monkeypatch.setattr(queue, 'parse_waiting', lambda key, value: [parsed_keys.append(key), parse(key, value)][1])
    backlog = backlog_of(state(waiting[:2]), Backlog())
    backlog = backlog_of(state(waiting), backlog)
    backlog = backlog_of(state([waiting[0], Place(9, waiting[1].waiting), waiting[2]]), backlog)
    requeued = waiting[1].waiting.key
    assert sorted(parsed_keys) == sorted([*(place.waiting.key for place in waiting), requeued])
    assert [place.revision for place in backlog.places.values()] == [1, 3, 9]


CHANGE = st.tuples(st.sampled_from(['put', 'other', 'junk', 'delete', 'mark', 'scrawl', 'unmark']), st.integers(0, 5))


@given(st.lists(st.lists(CHANGE, max_size=4), max_size=12))
def test_a_backlog_made_from_the_one_before_is_the_same_as_one_made_anew(steps: list[list[tuple[str, int]]]) -> None:
    entries, revision, backlog = dict[str, Entry](), 0, Backlog()
    candidates = places(SMALL, LARGE, SMALL, FAST, SMALL, LARGE)
    for changes in steps:
        for change, number in changes:
            revision += 1
            key, request = candidates[number].waiting.key, to_json(candidates[number].waiting)
            values = {'put': request, 'other': request.replace('i.qcow2', 'j.qcow2'), 'junk': '{}'}
            marks = {'mark': mark_to_json(COMPUTE), 'scrawl': '[]'}
            if change in values:
                entries[key] = Entry(key, values[change].encode(), revision)
            elif change in marks:
                entries[keys.taker(key)] = Entry(keys.taker(key), marks[change].encode(), revision)
            else:
                entries.pop(key if change == 'delete' else keys.taker(key), None)
        before, backlog = backlog, backlog_of(dict(entries), backlog)
        rebuilt = backlog_of(dict(entries), Backlog())
        assert list(backlog.places.items()) == list(rebuilt.places.items())
        assert (backlog.flavors, backlog.marks, backlog.counts) == (rebuilt.flavors, rebuilt.marks, rebuilt.counts)
        assert backlog.has_more == any(before.places.get(key) is not place for key, place in backlog.places.items())


def test_what_an_event_is_not_about_is_not_looked_at() -> None:
    """With 10,000 queued requests, reading all of them for each event would load every compute."""
    accessed: list[str] = []

    class Watched(Entry):
        def __getattribute__(self, name: str) -> Any:
            if name in ('revision', 'value'):
                accessed.append(super().__getattribute__('key'))
            return super().__getattribute__(name)

    waiting = places(*[SMALL] * 100)
    entries = {key: Watched(key, entry.value, entry.revision) for key, entry in state(waiting).items()}
    backlog = backlog_of(dict(entries), Backlog())
    assert len(set(accessed)) == 100
    accessed.clear()
    mark = keys.taker(waiting[7].waiting.key)
    entries[mark] = Watched(mark, mark_to_json(COMPUTE).encode(), 1000)
    backlog = backlog_of(dict(entries), backlog)
    assert set(accessed) == {mark}
    assert len(backlog.places) == 99


def test_what_makes_no_sense_is_in_nobodys_way() -> None:
    (good,) = places(SMALL)
    key = keys.taker(good.waiting.key)
    entries = {
        '/queues/small/no-uuid': Entry('/queues/small/no-uuid', b'{}', 1),
        f'/queues/small/{INSTANCE}': Entry('', b'no request', 2),
        f'/queues/small/{INSTANCE}/taker': Entry('', mark_to_json(COMPUTE).encode(), 3),
        '/queues/': Entry('', b'', 4),
        **state([good]),
    }
    backlog = backlog_of(entries, Backlog())
    assert list(backlog.places.values()) == [good]
    assert backlog.marks == {COMPUTE: {f'/queues/small/{INSTANCE}': (3, None)}}
    for rubbish in (b'', b'[]', b'{"compute": ["x"]}', b'{"compute": null}'):
        marked = backlog_of({**entries, key: Entry(key, rubbish, 5)}, backlog)
        assert (marked.places, set(marked.marks)) == ({}, {COMPUTE}), 'whoever it is: somebody is at it'


# The request that a compute takes


def places(*flavors: Flavor) -> list[Place]:
    return [
        Place(
            number,
            QueueEntry(f'{number:08}-0000-4000-8000-000000000000', flavor, image=IMAGE, user_id='u', project_id='p'),
        )
        for number, flavor in enumerate(flavors, 1)
    ]


def flavors(waiting: Iterable[Place]) -> dict[str, Flavor]:
    return {place.waiting.flavor.query: place.waiting.flavor for place in waiting}


LARGE = Flavor('large', {**SIZE, 'VCPU': 3})
FAST = Flavor('fast', SIZE, ('CUSTOM_FAST',))
SLOW = Flavor('slow', SIZE, (), ('CUSTOM_FAST',))


@pytest.mark.parametrize(
    ('there', 'taken'),
    [
        (provider(), 2),
        (provider(used=1), 2),
        (provider(used=2), 3),
        (provider(used=4), None),
        (provider(traits=('CUSTOM_FAST',)), 1),
        (provider(used=2, traits=('CUSTOM_FAST',)), 1),
        (provider(traits=('CUSTOM_FAST', DISABLED)), None),
        (provider(MEMORY_MB=64), None),
        (Provider(COMPUTE), None),
    ],
)
def test_the_oldest_that_fits(there: Provider, taken: int | None) -> None:
    waiting = places(FAST, LARGE, SMALL, SLOW)
    takes = subscribed(flavors(waiting), there, {})
    place = first_of(waiting, takes)
    assert (place.revision if place else None) == taken
    assert takes == {flavor.query: fits(flavor, there) for flavor in (FAST, LARGE, SMALL, SLOW)}
    assert subscribed(flavors(waiting[:1]), there, {FAST.query: True, LARGE.query: True}) == {FAST.query: True}


def test_what_is_passed_over_and_what_is_not_taken() -> None:
    waiting = places(SMALL, SMALL, LARGE)
    takes = subscribed(flavors(waiting), provider(), {})
    assert first_of(waiting, takes, [waiting[0].waiting.instance]) == waiting[1]
    assert first_of(waiting, takes | {SMALL.query: False}) == waiting[2]
    assert first_of(waiting, takes, [place.waiting.instance for place in waiting]) is None
    assert first_of([], {}) is None


def test_who_loses_races_looks_further_back() -> None:
    waiting, rng = places(SMALL, LARGE, *[SMALL] * 200), random.Random(2026)
    takes = subscribed(flavors(waiting), provider(), {}) | {LARGE.query: False}
    window, windows = 1, []
    for _ in range(10):
        picked = [next_of(waiting, takes, (), window, rng) for _ in range(2000)]
        revisions = {place.revision for place in picked if place}
        assert revisions == {1, *range(3, window + 2)}  # all of the first ones that fit, and no others
        windows.append(window)
        window = widened(window, False)
    assert windows == [1, 2, 4, 8, 16, 32, 64, 64, 64, 64]
    for _ in range(6):
        assert window > 1
        window = widened(window, True)
    assert widened(window, True) == window == 1


def first_of(waiting: list[Place], takes: dict[str, bool], passed_over: Sequence[str] = ()) -> Place | None:
    return next_of(waiting, takes, passed_over, 1, random.Random())


@given(st.lists(st.integers(1, 5), max_size=12))
def test_what_is_taken_one_after_the_other_fits_together(amounts: list[int]) -> None:
    room, waiting, taken_places = provider(), places(*(Flavor(f'f{n}', {**SIZE, 'VCPU': n}) for n in amounts)), []
    while (chosen := first_of(waiting, subscribed(flavors(waiting), room, {}))) is not None:
        taken_places.append(chosen)
        waiting.remove(chosen)
        before, room = room, room.less([chosen.waiting.flavor.resources])
        assert not any(fits(place.waiting.flavor, room) and not fits(place.waiting.flavor, before) for place in waiting)
    assert sum(place.waiting.flavor.resources['VCPU'] for place in taken_places) <= 4
    assert len(taken_places) <= 4
    assert not any(fits(place.waiting.flavor, room) for place in waiting)


def test_patience_grows_with_the_load() -> None:
    rng = random.Random(1)
    waits = [patience(provider(used=used), None, 1, rng) for used in range(5)]
    assert waits == sorted(waits)
    assert 0 <= waits[0] <= JITTER
    assert LONGEST <= waits[4] <= LONGEST + JITTER
    # The scarcest class counts, a class that no guest needs does not, and more than full counts as full.
    assert patience(provider(used=3, MEMORY_MB=384), None, 1, rng) >= LONGEST
    assert patience(provider(used=9), None, 1, rng) <= LONGEST + JITTER
    spare = provider(CUSTOM_X=0)
    assert patience(spare, None, 1, rng) <= JITTER


@pytest.mark.parametrize('computes', [1, 10, 30, 100, 300, 1000])
def test_of_many_equal_ones_a_few_go_for_it_at_once_and_the_first_waits_no_longer(computes: int) -> None:
    rng, concurrent, shortest = random.Random(2026), [], []
    for _ in range(100):
        waits = sorted(patience(provider(), None, computes, rng) for _ in range(computes))
        concurrent.append(sum(wait <= waits[0] + 0.01 for wait in waits))  # before they learn that it is taken
        shortest.append(waits[0])
    assert sum(concurrent) / len(concurrent) <= 8
    assert sum(shortest) / len(shortest) <= 0.015


def test_among_many_the_idlest_still_goes_first() -> None:
    rng = random.Random(1)
    half = [patience(provider(used=2), None, 1000, rng) for _ in range(1000)]
    assert min(half) >= LONGEST / 2 + MOST / 2
    assert {patience(provider(used=4), None, 10_000, rng) for _ in range(10)} == {LONGEST + MOST}


def test_whom_a_soft_group_prefers_goes_first() -> None:
    rng = random.Random(1)
    here, elsewhere = {INSTANCE: COMPUTE}, {INSTANCE: 'b8756be5-0000-4000-8000-000000000000'}
    for policy, first, later in ((AFFINITY, here, elsewhere), (ANTI_AFFINITY, elsewhere, here)):
        assert patience(provider(), Group('web', policy, False, first), 1, rng) <= JITTER
        assert patience(provider(), Group('web', policy, False, later), 1, rng) >= LONGEST
        assert patience(provider(), Group('web', policy, False), 1, rng) <= JITTER


# Computes that may take a queued request immediately, and those that may later.


ONE = {'VCPU': 1, 'MEMORY_MB': 64}


def computes(number: int) -> list[str]:
    return [f'c{index}' for index in range(number)]


def state_text(**said: object) -> dict[str, Entry]:
    """Return the entries below /computes/ with these values."""
    values = {keys.compute(name): json.dumps(text).encode() for name, text in said.items()}
    return {key: Entry(key, value, 7, 1) for key, value in values.items()}


def alive(*names: str, **room: object) -> Takers:
    """Return Takers of these computes, some with hints of their room."""
    with_hints = {name: {'queues': True, 'room': hint} for name, hint in room.items()}
    return takers_of(state_text(**{name: {'queues': True} for name in names}, **with_hints), Takers())


def first(instance: str, takers: Takers) -> set[str]:
    return {compute for compute, number in order(instance, ONE, takers).items() if number < FIRST}


def test_each_request_is_another_few_s_and_none_is_everybody_s() -> None:
    takers = alive(*computes(100))
    chosen = Counter(compute for number in range(1000) for compute in first(f'instance {number}', takers))
    assert chosen.keys() == set(computes(100))
    # The mean is 40; the limits are about four standard deviations away.
    assert 15 < min(chosen.values()) <= max(chosen.values()) < 66
    assert len({frozenset(first(f'instance {number}', takers)) for number in range(100)}) > 95


@given(st.integers(5, 60), st.integers(0, 59), st.uuids())
def test_one_that_dies_moves_no_other(number: int, dead: int, instance: object) -> None:
    """Processes that see it alive and processes that do not agree on all other computes."""
    living = computes(number)
    before = order(str(instance), ONE, alive(*living))
    dead_compute = living[dead % number]
    after = order(str(instance), ONE, alive(*(compute for compute in living if compute != dead_compute)))
    assert list(after) == [compute for compute in before if compute != dead_compute]


def test_who_has_no_room_is_asked_last_and_who_says_nothing_has_some() -> None:
    full, some = {'VCPU': [4, 10], 'MEMORY_MB': [512, 100]}, {'VCPU': [4, 25], 'MEMORY_MB': [512, 13]}
    takers = alive('unknown', full=full, some=some, none={'VCPU': [4, 100]}, odd='all of it')
    assert [takers.has_room(name, ONE) for name in ('unknown', 'full', 'some', 'none', 'odd')] == [
        *(True, False, True, False, True),
    ]
    for instance in computes(20):
        assert set(list(order(instance, ONE, takers))[-2:]) == {'full', 'none'}


def test_only_the_living_that_take_from_queues_count() -> None:
    entries = state_text(a={'queues': True}, b={'queues': False}, c={}, d=7)
    entries['/computes/e'] = Entry('/computes/e', b'not JSON', 7, 1)
    entries['/computes/f'] = Entry('/computes/f', b'{"queues": true}', 7)  # without a lease it is not alive
    takers = takers_of(entries, Takers())
    assert takers.points.keys() == {'a'}
    # One compute is added, one changes its value, one is removed.
    entries |= state_text(b={'queues': True}, g={'queues': True, 'room': {'VCPU': [1, 0]}})
    del entries['/computes/a']
    takers = takers_of(entries, takers)
    assert (takers.points.keys(), dict(takers.left)) == ({'b', 'g'}, {'g': {'VCPU': Left(1, 0)}})
    assert takers == takers_of(entries, Takers())


def test_what_did_not_change_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = state_text(**{name: {'queues': True} for name in computes(50)})
    takers = takers_of(entries, Takers())
    parsed: list[object] = []
    monkeypatch.setattr(queue, 'load_if_object', lambda value: parsed.append(value) or json.loads(value))
    updated = takers_of({**entries, **state_text(c7={'queues': False}, new={'queues': True})}, takers)
    assert len(parsed) == 2
    assert updated.points.keys() == {*computes(50), 'new'} - {'c7'}


def test_circles_grow_until_they_are_all() -> None:
    opened = [opens_after(position) for position in (0, FIRST - 1, FIRST, 2 * FIRST, 4 * FIRST)]
    assert opened == [0, 0, WIDER, 2 * WIDER, 3 * WIDER]
    assert opens_after(999) <= 2.0
    assert opens_after(9_999) <= 3.0
    allowed = [takers_allowed(seconds, 100) for seconds in (0.0, WIDER, 2 * WIDER, 3600.0)]
    assert allowed == [FIRST, 2 * FIRST, 4 * FIRST, 100]
    assert takers_allowed(0.0, 0) == 1


@given(st.integers(1, 5000), st.integers(0, 20))
def test_how_many_may_take_it_and_which_is_one_rule(takers: int, widened: int) -> None:
    seconds = widened * WIDER
    assert sum(opens_after(number) <= seconds for number in range(takers)) == takers_allowed(seconds, takers)


def test_so_many_have_room_and_who_says_nothing_counts() -> None:
    takers = alive('a', 'b', c={'VCPU': [4, 25], 'MEMORY_MB': [512, 13]}, d={'VCPU': [4, 0], 'MEMORY_MB': [512, 100]})
    for _ in range(2):
        assert takers.with_room(ONE) == 3
        assert takers.with_room({**ONE, 'VCPU': 2}) == 2
    assert takers_of(state_text(a={'queues': True}), takers).with_room(ONE) == 1, 'of others it is another number'


# A compute's hint of its free room, and its use.


INVENTORY = {
    'VCPU': {'total': 4, 'reserved': 1, 'allocation_ratio': 2.0},
    'MEMORY_MB': {'total': 8000, 'reserved': 0},
    'DISK_GB': {'total': 3, 'reserved': 3},
}


def test_what_is_left_is_what_was_not_given() -> None:
    assert room_hint(INVENTORY, []) == {'DISK_GB': [0, 0], 'MEMORY_MB': [8000, 100], 'VCPU': [6, 100]}
    allocated = [{'VCPU': 1, 'MEMORY_MB': 1}, {'VCPU': 2, 'MEMORY_MB': 7998}]
    assert room_hint(INVENTORY, allocated) == {'DISK_GB': [0, 0], 'MEMORY_MB': [8000, 1], 'VCPU': [6, 50]}
    assert room_hint(INVENTORY, [{'VCPU': 9, 'VGPU': 1}])['VCPU'] == [6, -50]


@pytest.mark.parametrize(('name', 'capacity'), [('DISK_GB', 0), ('MEMORY_MB', 8000)])
def test_where_more_is_given_than_there_is_that_is_said_however_little_it_is(name: str, capacity: int) -> None:
    for more in (1, 11, 10**12):
        hint = parse_room_hint(room_hint(INVENTORY, [{name: capacity + more}]))
        assert hint is not None
        assert hint[name].hundredths < 0
        assert not fits_there(hint, {name: 1})


@pytest.mark.parametrize('used', range(7))
def test_what_is_free_is_never_said_not_to_be(used: int) -> None:
    hint = parse_room_hint(room_hint(INVENTORY, [{'VCPU': used}]))
    assert hint is not None
    for vcpus in range(1, 7):
        assert fits_there(hint, {'VCPU': vcpus}) == (used + vcpus <= 6)
    for amount in range(1, 8000, 7):
        hint = parse_room_hint(room_hint(INVENTORY, [{'MEMORY_MB': 8000 - amount}]))
        assert hint is not None
        assert fits_there(hint, {'MEMORY_MB': amount})
        assert not fits_there(hint, {'MEMORY_MB': amount + 80})


def test_the_class_with_least_counts() -> None:
    hint = {'VCPU': Left(4, 50), 'MEMORY_MB': Left(1000, 80), 'DISK_GB': Left(0, 0)}
    assert share_left(hint, {'VCPU': 1, 'MEMORY_MB': 100, 'DISK_GB': 1}) == 0.25
    assert share_left(hint, {'MEMORY_MB': 100}) == 0.7
    assert share_left(hint, {'VCPU': 3}) == 0
    assert not fits_there(hint, {'VGPU': 1})
    assert not fits_there({'VCPU': Left(4, -25)}, {'VCPU': 1})


@pytest.mark.parametrize('rubbish', [
    None, 5, 'x', [], {}, {'VCPU': 4}, {'VCPU': [4]}, {'VCPU': [4, 101]}, {'VCPU': [-4, 10]}, {'VCPU': [4, 1.5]},
    {'VCPU': [True, 1]}, {'VCPU': [4, True]}, {'VCPU': [4, None]}, {'VCPU': [10**40, 1]}, {'VCPU': [4, -(10**20)]},
    {'v cpu': [4, 4]}, {'A' * 300: [4, 4]}, {f'CUSTOM_{each}': [1, 1] for each in range(100)},
])  # fmt: skip
def test_rubbish_is_no_hint(rubbish: object) -> None:
    assert parse_room_hint(rubbish) is None
    living = living_in(json.dumps({'hostname': 'hv1', 'token': 'x', 'room': rubbish}).encode())
    assert (living.hostname, living.room) == ('hv1', None)


def test_a_living_compute_s_value_has_it() -> None:
    living = living_in(json.dumps({'hostname': 'hv1', 'room': room_hint(INVENTORY, [])}).encode())
    assert living.room == {'VCPU': Left(6, 100), 'MEMORY_MB': Left(8000, 100), 'DISK_GB': Left(0, 0)}
