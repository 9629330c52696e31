"""What waits in the queues, read whole; and which of it a compute takes."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecomp.model import keys, queue
from ecomp.model.allocation import Inventory
from ecomp.model.explain import Provider
from ecomp.model.flavor import Flavor
from ecomp.model.group import AFFINITY, ANTI_AFFINITY, Group
from ecomp.model.queue import (
    JITTER,
    LONGEST,
    MOST,
    Backlog,
    Place,
    QueueEntry,
    backlog_of,
    fits,
    mark_to_json,
    next_of,
    patience,
    subscribed,
    to_json,
    widened,
)
from ecomp.model.status import DISABLED
from ecomp.store.client import Entry

INSTANCE, COMPUTE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a', 'b8756be5-a30d-4311-920c-0ad996367a8e'
SIZE = {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}
SMALL = Flavor('small', SIZE)
IMAGE = 'http://images.example/i.qcow2'


def provider(used: int = 0, traits: tuple[str, ...] = (), **totals: int) -> Provider:
    whole = {'VCPU': 4, 'MEMORY_MB': 512, 'DISK_GB': 10, **totals}
    taken = {name: amount * used for name, amount in SIZE.items()}
    return Provider(COMPUTE, {name: Inventory(total, used=taken.get(name, 0)) for name, total in whole.items()}, traits)


# What waits


def state(waiting: Iterable[Place], **marks: str) -> dict[str, Entry]:
    """As etcd has it, youngest first; `marks`: f<revision of what is marked>=the compute."""
    waiting = list(waiting)
    found = {}
    for at, each in reversed(waiting):
        found[each.key] = Entry(each.key, to_json(each).encode(), at)
        if f'f{at}' in marks:
            key = keys.taker(each.key)
            found[key] = Entry(key, mark_to_json(marks[f'f{at}']).encode(), at + 1000)
    return found


def test_a_backlog_is_in_order_and_says_who_takes_what() -> None:
    one, two, three = waiting = places(SMALL, LARGE, SMALL)
    backlog = backlog_of(state(waiting, f2=COMPUTE), Backlog())
    assert list(backlog.places.items()) == [(each.waiting.key, each) for each in (one, three)]
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
    # Cancelled and asked for again.
    anew = [waiting[0], Place(9, waiting[1].waiting)]
    assert backlog_of(state(anew), whole).has_more


def test_a_backlog_reads_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, read = places(SMALL, LARGE, FAST), list[str]()
    parse = queue.parse_waiting
    monkeypatch.setattr(queue, 'parse_waiting', lambda key, value: [read.append(key), parse(key, value)][1])
    backlog = backlog_of(state(waiting[:2]), Backlog())
    backlog = backlog_of(state(waiting), backlog)
    backlog = backlog_of(state([waiting[0], Place(9, waiting[1].waiting), waiting[2]]), backlog)
    again = waiting[1].waiting.key
    assert sorted(read) == sorted([*(each.waiting.key for each in waiting), again])
    assert [each.revision for each in backlog.places.values()] == [1, 3, 9]


CHANGE = st.tuples(st.sampled_from(['put', 'other', 'junk', 'delete', 'mark', 'scrawl', 'unmark']), st.integers(0, 5))


@given(st.lists(st.lists(CHANGE, max_size=4), max_size=12))
def test_a_backlog_made_from_the_one_before_is_the_same_as_one_made_anew(steps: list[list[tuple[str, int]]]) -> None:
    there, revision, backlog = dict[str, Entry](), 0, Backlog()
    some = places(SMALL, LARGE, SMALL, FAST, SMALL, LARGE)
    for changes in steps:
        for what, number in changes:
            revision += 1
            key, request = some[number].waiting.key, to_json(some[number].waiting)
            values = {'put': request, 'other': request.replace('i.qcow2', 'j.qcow2'), 'junk': '{}'}
            marks = {'mark': mark_to_json(COMPUTE), 'scrawl': '[]'}
            if what in values:
                there[key] = Entry(key, values[what].encode(), revision)
            elif what in marks:
                there[keys.taker(key)] = Entry(keys.taker(key), marks[what].encode(), revision)
            else:
                there.pop(key if what == 'delete' else keys.taker(key), None)
        before, backlog = backlog, backlog_of(dict(there), backlog)
        anew = backlog_of(dict(there), Backlog())
        assert list(backlog.places.items()) == list(anew.places.items())
        assert (backlog.flavors, backlog.marks, backlog.counts) == (anew.flavors, anew.marks, anew.counts)
        assert backlog.has_more == any(before.places.get(key) is not each for key, each in backlog.places.items())


def test_what_an_event_is_not_about_is_not_looked_at() -> None:
    """Of 10,000 that wait each event would cost every compute as much as reading all of them."""
    looked: list[str] = []

    class Watched(Entry):
        def __getattribute__(self, name: str) -> Any:
            if name in ('revision', 'value'):
                looked.append(super().__getattribute__('key'))
            return super().__getattribute__(name)

    waiting = places(*[SMALL] * 100)
    there = {key: Watched(key, entry.value, entry.revision) for key, entry in state(waiting).items()}
    backlog = backlog_of(dict(there), Backlog())
    assert len(set(looked)) == 100
    looked.clear()
    mark = keys.taker(waiting[7].waiting.key)
    there[mark] = Watched(mark, mark_to_json(COMPUTE).encode(), 1000)
    backlog = backlog_of(dict(there), backlog)
    assert set(looked) == {mark}
    assert len(backlog.places) == 99


def test_what_makes_no_sense_is_in_nobodys_way() -> None:
    (good,) = places(SMALL)
    key = keys.taker(good.waiting.key)
    found = {
        '/queues/small/no-uuid': Entry('/queues/small/no-uuid', b'{}', 1),
        f'/queues/small/{INSTANCE}': Entry('', b'no request', 2),
        f'/queues/small/{INSTANCE}/taker': Entry('', mark_to_json(COMPUTE).encode(), 3),
        '/queues/': Entry('', b'', 4),
        **state([good]),
    }
    backlog = backlog_of(found, Backlog())
    assert list(backlog.places.values()) == [good]
    assert backlog.marks == {COMPUTE: {f'/queues/small/{INSTANCE}': (3, None)}}
    for rubbish in (b'', b'[]', b'{"compute": ["x"]}', b'{"compute": null}'):
        marked = backlog_of({**found, key: Entry(key, rubbish, 5)}, backlog)
        assert (marked.places, set(marked.marks)) == ({}, {COMPUTE}), 'whoever it is: somebody is at it'


# Who takes what


def places(*flavors: Flavor) -> list[Place]:
    return [
        Place(
            number,
            QueueEntry(f'{number:08}-0000-4000-8000-000000000000', flavor, image=IMAGE, user_id='u', project_id='p'),
        )
        for number, flavor in enumerate(flavors, 1)
    ]


def flavors(waiting: Iterable[Place]) -> dict[str, Flavor]:
    return {each.waiting.flavor.query: each.waiting.flavor for each in waiting}


LARGE, FAST = Flavor('large', {**SIZE, 'VCPU': 3}), Flavor('fast', SIZE, ('CUSTOM_FAST',))
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
    found = first_of(waiting, takes)
    assert (found.revision if found else None) == taken
    assert takes == {each.query: fits(each, there) for each in (FAST, LARGE, SMALL, SLOW)}
    assert subscribed(flavors(waiting[:1]), there, {FAST.query: True, LARGE.query: True}) == {FAST.query: True}


def test_what_is_passed_over_and_what_is_not_taken() -> None:
    waiting = places(SMALL, SMALL, LARGE)
    takes = subscribed(flavors(waiting), provider(), {})
    assert first_of(waiting, takes, [waiting[0].waiting.instance]) == waiting[1]
    assert first_of(waiting, takes | {SMALL.query: False}) == waiting[2]
    assert first_of(waiting, takes, [each.waiting.instance for each in waiting]) is None
    assert first_of([], {}) is None


def test_who_loses_races_looks_further_back() -> None:
    waiting, rng = places(SMALL, LARGE, *[SMALL] * 200), random.Random(2026)
    takes = subscribed(flavors(waiting), provider(), {}) | {LARGE.query: False}
    among, seen = 1, []
    for _ in range(10):
        picked = [next_of(waiting, takes, (), among, rng) for _ in range(2000)]
        found = {each.revision for each in picked if each}
        assert found == {1, *range(3, among + 2)}  # all of the first that fit, and no other
        seen.append(among)
        among = widened(among, False)
    assert seen == [1, 2, 4, 8, 16, 32, 64, 64, 64, 64]
    for _ in range(6):
        assert among > 1
        among = widened(among, True)
    assert widened(among, True) == among == 1


def first_of(waiting: list[Place], takes: dict[str, bool], passed_over: Sequence[str] = ()) -> Place | None:
    return next_of(waiting, takes, passed_over, 1, random.Random())


@given(st.lists(st.integers(1, 5), max_size=12))
def test_what_is_taken_one_after_the_other_fits_together(amounts: list[int]) -> None:
    left, waiting, taken = provider(), places(*(Flavor(f'f{each}', {**SIZE, 'VCPU': each}) for each in amounts)), []
    while (found := first_of(waiting, subscribed(flavors(waiting), left, {}))) is not None:
        taken.append(found)
        waiting.remove(found)
        before, left = left, left.less([found.waiting.flavor.resources])
        assert not any(fits(each.waiting.flavor, left) and not fits(each.waiting.flavor, before) for each in waiting)
    assert sum(each.waiting.flavor.resources['VCPU'] for each in taken) <= 4
    assert len(taken) <= 4
    assert not any(fits(each.waiting.flavor, left) for each in waiting)


def test_patience_grows_with_the_load() -> None:
    rng = random.Random(1)
    waits = [patience(provider(used=each), None, 1, rng) for each in range(5)]
    assert waits == sorted(waits)
    assert 0 <= waits[0] <= JITTER
    assert LONGEST <= waits[4] <= LONGEST + JITTER
    # The scarcest class counts, what no guest needs does not, and too much is no more than full.
    assert patience(provider(used=3, MEMORY_MB=384), None, 1, rng) >= LONGEST
    assert patience(provider(used=9), None, 1, rng) <= LONGEST + JITTER
    spare = provider(CUSTOM_X=0)
    assert patience(spare, None, 1, rng) <= JITTER


@pytest.mark.parametrize('computes', [1, 10, 30, 100, 300, 1000])
def test_of_many_equal_ones_a_few_go_for_it_at_once_and_the_first_waits_no_longer(computes: int) -> None:
    rng, met, waited = random.Random(2026), [], []
    for _ in range(100):
        waits = sorted(patience(provider(), None, computes, rng) for _ in range(computes))
        met.append(sum(each <= waits[0] + 0.01 for each in waits))  # before they hear of it
        waited.append(waits[0])
    assert sum(met) / len(met) <= 8
    assert sum(waited) / len(waited) <= 0.015


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
