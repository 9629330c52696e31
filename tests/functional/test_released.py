"""What is noted of a claim before it is released."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import UnknownOutcome
from ecomp.model import keys
from ecomp.placement import allocations
from ecomp.placement.allocations import claim
from ecomp.store import sharing
from ecomp.store.client import Delete, Exists, Put, Snapshot, Store, Unchanged
from ecomp.store.sharing import highest_released, note_released, released_to_json
from tests.functional.cloud import SMALL, Cloud, new

pytestmark = pytest.mark.fast


class Lossy(Store):
    """An etcd whose first `times` answers are lost."""

    times = 0

    def commit(
        self, conditions: Sequence[Unchanged | Exists], operations: Sequence[Put | Delete], fenced: bool = True
    ) -> int | None:
        written = super().commit(conditions, operations, fenced)
        self.times -= 1
        if self.times >= 0:
            raise UnknownOutcome('no answer', 'etcd')
        return written


@pytest.fixture
def lossy(cloud: Cloud) -> Iterator[Lossy]:
    with closing(Lossy(EtcdConfig((cloud.etcd.endpoint,)))) as store:
        yield store


def test_the_highest_number_stays_for_an_hour(cloud: Cloud) -> None:
    one, other, third, fourth = (digits + new()[2:] for digits in ('00', '00', '00', 'f0'))
    assert highest_released(cloud.store, [one]) == 0
    note_released(cloud.store, {one: 4, other: 2, fourth: 3})
    note_released(cloud.store, {one: 3})
    note_released(cloud.store, {})
    asked = ([one], [other], [third], [fourth], [other, third], [third, fourth], [fourth, one], [])
    assert [highest_released(cloud.store, each) for each in asked] == [4, 2, 0, 3, 2, 3, 4, 0]
    found = cloud.store.snapshot(keys.RELEASED).entries
    assert [each.key for each in found.values() if one in each.key] == []
    for each in found.values():
        assert sharing.NOTE_SECONDS - 60 < cloud.store.keep_alive(each.lease) <= sharing.NOTE_SECONDS


@pytest.fixture
def no_garbage(junk: str) -> Iterator[None]:
    """What other tests left is not collected just where a deep value has no room for it: pytest takes that for ours."""
    if len(junk) > 1000:
        gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures('no_garbage')
@pytest.mark.parametrize(
    'junk', ['', 'seven', '7', '[]', '{}', '[' * 9999, '{"generations": 7}', '{"generations": {"%s": %s}}']
)
@pytest.mark.parametrize('number', ['"7"', '-1', '0', 'true', '7.0', '1' + 5000 * '0', 'null', '1e999', '{}'])
def test_what_nobody_of_ours_wrote_is_nothing(cloud: Cloud, junk: str, number: str) -> None:
    instance = new()
    cloud.etcd.put(keys.released(instance, 1), junk % (instance, number) if '%' in junk else junk)
    assert highest_released(cloud.store, [instance]) == highest_released(cloud.store, [instance, new()]) == 0
    note_released(cloud.store, {instance: 2})
    assert highest_released(cloud.store, [instance]) == 2


@pytest.mark.parametrize('number', [51, 1000, 10**100])
def test_a_number_that_somebody_wrote_costs_no_call_for_each_below_it(cloud: Cloud, number: int) -> None:
    """A compute was at one request for minutes, and at no other one of its queues."""
    compute, instance = cloud.compute(), new()
    cloud.etcd.put(keys.released(instance, 1), released_to_json({instance: number}))
    above = partial(highest_released, cloud.store, [instance])
    claim(cloud.placement, {instance: {compute: SMALL}}, 'u', 'p', lambda: None, above)
    assert allocations.consumer(cloud.placement, instance).generation == sharing.MAX_NOTED + 1 == 51


def test_as_much_as_somebody_wrote_is_not_held_at_once(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """150 MB there took a compute from 106 to 269 MiB."""
    instance, real = new(), cloud.store.snapshot
    note_released(cloud.store, {instance: 4})
    held: list[Snapshot] = []
    monkeypatch.setattr(cloud.store, 'snapshot', lambda *words, **more: held.append(real(*words, **more)) or held[-1])
    assert highest_released(cloud.store, [instance]) == highest_released(cloud.store, [instance, new()]) == 4
    assert [len(each.entries) for each in held] == [0, 0]


def test_an_answer_that_is_lost_is_asked_for_again(cloud: Cloud, lossy: Lossy) -> None:
    instance = new()
    lossy.times = sharing.NOTE_TRIES - 1
    note_released(lossy, {instance: 3})
    assert highest_released(cloud.store, [instance]) == 3
    lossy.times = sharing.NOTE_TRIES
    with pytest.raises(UnknownOutcome):
        note_released(lossy, {instance: 4})
