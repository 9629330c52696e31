"""Offers: which computes are woken for a queued request, and when each may take it."""

from __future__ import annotations

import math
import time

import pytest

from ecomp.agent.queue import Offers
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.queue import INITIAL_TAKERS, WIDEN_SECONDS, QueueEntry, taker_to_json, to_json
from ecomp.store.client import Entry

SMALL = Flavor('small', {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1})
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
        entry = QueueEntry(instance, SMALL, image='http://i/i', user_id='u', project_id='p', stages={})
        self.queues[entry.key] = Entry(entry.key, to_json(entry).encode(), 10 + len(self.queues))
        self.deliver_queues()
        return entry.key

    def put_taker_key(self, key: str, compute: str) -> None:
        self.queues[keys.taker(key)] = Entry(keys.taker(key), taker_to_json(compute).encode(), 50, 1)
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
