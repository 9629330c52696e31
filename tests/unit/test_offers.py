"""Offers: which computes are woken for a queued request, and when each may take it."""

from __future__ import annotations

import math
import time

import pytest

from ecomp.agent.queue import Offers
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.queue import FIRST, WIDER, QueueEntry, mark_to_json, to_json
from ecomp.store.client import Entry

SMALL = Flavor('small', {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1})
COMPUTES = [f'c{number}' for number in range(64)]


class Scene:
    """The offers of one process under a fake clock, with its computes `here` and all `alive`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, here: list[str], alive: list[str]) -> None:
        self.now = 100.0
        self.told = list[str]()
        self.wakes = list[float]()
        monkeypatch.setattr(time, 'monotonic', lambda: self.now)
        self.offers = Offers(self.wakes.append)
        for each in here:
            self.offers.add(each, lambda _, each=each: self.told.append(each))  # type: ignore[misc]
        self.queues: dict[str, Entry] = {}
        self.computes(alive)
        self.hear()

    def computes(self, alive: list[str]) -> None:
        entries = (Entry(keys.compute(compute), b'{"queues": true}', 1, 1) for compute in alive)
        self.offers.on_computes({entry.key: entry for entry in entries})

    def put(self, instance: str = '720d910e-8174-4dd6-a60b-a6d688df6d7b') -> str:
        entry = QueueEntry(instance, SMALL, image='http://i/i', user_id='u', project_id='p', stages={})
        self.queues[entry.key] = Entry(entry.key, to_json(entry).encode(), 10 + len(self.queues))
        self.hear()
        return entry.key

    def mark(self, key: str, compute: str) -> None:
        self.queues[keys.taker(key)] = Entry(keys.taker(key), mark_to_json(compute).encode(), 50, 1)
        self.hear()

    def hear(self) -> None:
        self.told.clear()
        self.offers.on_queues(dict(self.queues))

    def later(self, seconds: float) -> float:
        self.told.clear()
        self.now += seconds
        return self.offers.widen()

    def open_to(self, key: str) -> set[str]:
        assert self.offers.backlog is not None
        place = self.offers.backlog.places[key]
        return {compute for compute in COMPUTES if self.offers.is_open(place, compute)}


def test_the_first_few_are_told_and_then_twice_as_many_until_it_is_all(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.put()
    assert scene.open_to(key) == set(scene.told)
    sizes, wakes = [len(scene.told)], [scene.wakes[-1]]
    while wakes[-1] < math.inf:
        before = scene.open_to(key)
        wakes.append(scene.later(WIDER))
        assert before < scene.open_to(key) == set(scene.told)
        sizes.append(len(scene.told))
    assert sizes == [FIRST, 2 * FIRST, 4 * FIRST, 8 * FIRST, len(COMPUTES)]
    assert wakes[:-1] == [100.0 + WIDER * number for number in range(1, 5)]


def test_another_process_means_the_same_few(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = [Scene(monkeypatch, [compute], COMPUTES) for compute in COMPUTES]
    for scene in scenes:
        scene.put()
    assert sum(len(scene.told) for scene in scenes) == FIRST


def test_what_is_taken_meanwhile_is_told_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    scene.mark(scene.put(), 'another')
    assert scene.later(WIDER) == math.inf
    assert scene.told == []


def test_one_that_is_given_back_is_offered_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The taker died and its taker key expired; which computes tried before is unknown."""
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.put()
    first_computes = set(scene.told)
    scene.mark(key, 'another')
    scene.later(30.0)
    del scene.queues[keys.taker(key)]
    scene.hear()
    assert set(scene.told) == first_computes == scene.open_to(key)


def test_one_that_nobody_sees_alive_takes_what_is_left_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, ['unseen'], COMPUTES[:16])
    scene.put()
    assert scene.told == []
    for _ in range(2):
        scene.later(WIDER)
    assert scene.told == ['unseen']


def test_whose_mark_is_there_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.put()
    scene.mark(key, 'c7')
    assert scene.told == ['c7']
    scene.put('820d910e-8174-4dd6-a60b-a6d688df6d7b')
    assert 'c7' not in scene.told or len(scene.told) == FIRST


def test_what_waits_already_is_everybody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = before.put()
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    scene.offers = Offers(lambda _: None)
    scene.offers.add('c7', lambda _: scene.told.append('c7'))
    scene.computes(COMPUTES)
    scene.queues = before.queues
    scene.hear()
    assert scene.told == ['c7']
    assert scene.open_to(key) == set(COMPUTES)


def test_two_of_a_process_do_not_go_for_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.put()
    place = scene.offers.backlog.places[key]  # type: ignore[union-attr]
    open_computes = scene.open_to(key)
    assert scene.offers.begin(place)
    assert not scene.offers.begin(place)
    assert scene.open_to(key) == set()
    scene.offers.end(place, taken=False)
    assert scene.open_to(key) == open_computes
    scene.later(0.0)
    assert set(scene.told) == open_computes, 'it is left to the others, and they are told'
    assert scene.offers.begin(place)
    scene.offers.end(place, taken=True)
    assert scene.open_to(key) == set(), 'also until etcd has told of it'


def test_what_is_left_by_one_is_told_to_all_that_may(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(monkeypatch, COMPUTES, COMPUTES)
    key = scene.put()
    place = scene.offers.backlog.places[key]  # type: ignore[union-attr]
    assert scene.later(3600.0) == math.inf
    assert scene.offers.begin(place)
    scene.offers.end(place, taken=False)
    scene.later(0.0)
    assert set(scene.told) == set(COMPUTES)
