"""Test eschedule's waits for a stage and for the end of an instance, on a real etcd."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import pytest

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError, NotFound, StillGoing, Unreachable
from ecomp.model import keys
from ecomp.model.record import ACTIVE, BUILDING, DESTROYING, ERROR, GONE, WAITS_FOR, Failure, Progress, Record, to_json
from ecomp.scheduler.changing import wait as wait_module
from ecomp.scheduler.changing.wait import Deadline, Wait, Whereabouts, wait_for_stage, wait_until_gone
from ecomp.store.client import Delete, Put, Store
from ecomp.store.sharing import Index
from tests.functional.cloud import IMAGE, Cloud, new
from tests.kit.servers import PATIENCE, free_port, until


@pytest.fixture
def told() -> list[str]:
    return []


@contextmanager
def begin_wait(told: list[str], *call: Any) -> Iterator[Future[Any]]:
    """Start a wait in another thread, and yield once etcd has answered it.

    Before that answer, the wait cannot report the stage that it waits for.
    """
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(*call)
        until(
            lambda: any(not message.startswith('waiting for: etcd to') for message in told), 10, 'etcd has answered it'
        )
        yield waiting


def test_a_stage_is_waited_for_as_it_happens(cloud: Cloud, told: list[str]) -> None:
    instance = new()
    record = Record(instance, new(), BUILDING, image=IMAGE, stages={'requested': 't', 'scheduled': 't'})
    config = EtcdConfig((cloud.etcd.endpoint,))

    def is_waiting_for(what: str) -> bool:
        return any(f'waiting for: {what}' in message for message in told)

    with begin_wait(told, wait_for_stage, Wait(config, instance, Deadline(30), told.append), 'addressed') as waiting:
        for stage in ('image', 'disk', 'started', 'addressed'):
            record = record.at(ACTIVE, 't', stage)
            cloud.etcd.put_record(to_json(record))
            if stage != 'addressed':
                until(partial(is_waiting_for, _after(stage)), 10, f'{stage} is seen')
        assert waiting.result(PATIENCE * 10) == record


def test_an_end_is_seen_behind_rubbish_at_the_older_place(cloud: Cloud, told: list[str]) -> None:
    """Check an instance that ended before the wait began.

    No request is left then that would tell which record counts.
    """
    instance = new()
    cloud.etcd.put(keys.old_record(instance), 'rubbish')
    cloud.etcd.put_record(to_json(Record(instance, new(), GONE, stages={'gone': 'now'})))
    wait_until_gone(Wait(EtcdConfig((cloud.etcd.endpoint,)), instance, Deadline(5), told.append))


def test_how_far_a_download_is_is_told(cloud: Cloud, told: list[str]) -> None:
    instance = new()
    record = Record(instance, new(), BUILDING, image=IMAGE, stages={'requested': 't', 'scheduled': 't'})
    config = EtcdConfig((cloud.etcd.endpoint,))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_stage, Wait(config, instance, Deadline(30), told.append), 'started')
        progress = Progress('image', 34_000_000, 600_000_000)
        cloud.etcd.put_record(to_json(replace(record, progress=progress)))
        until(
            lambda: any(message.startswith('waiting for: image, 34 of 600 MB, ') for message in told), 10, 'it is told'
        )
        cloud.etcd.put_record(to_json(record.at(ACTIVE, 't', 'image', 'disk', 'started')))
        assert waiting.result(PATIENCE * 10).progress is None


def _after(stage: str) -> str:
    return WAITS_FOR[{'image': 'disk', 'disk': 'started', 'started': 'addressed'}[stage]]


def test_several_are_waited_for_under_one_deadline(cloud: Cloud, told: list[str]) -> None:
    config, deadline = EtcdConfig((cloud.etcd.endpoint,)), Deadline(0.5)
    existing, compute = new(), new()
    cloud.etcd.put_record(to_json(Record(existing, compute, ACTIVE, image=IMAGE, stages={'started': 't'})))
    with pytest.raises(StillGoing, match=r'0\.5 s are up'):
        wait_for_stage(Wait(config, new(), deadline, told.append), 'started')
    assert deadline.spent >= 0.5
    # The deadline has passed: each further instance is still checked once.
    assert wait_for_stage(Wait(config, existing, deadline, told.append), 'started').instance == existing
    stages = dict.fromkeys(('requested', 'scheduled', 'image', 'disk', 'started'), 't')
    cloud.etcd.put_record(to_json(Record(existing, compute, ACTIVE, image=IMAGE, stages=stages)))
    with pytest.raises(StillGoing, match='DHCP lease; it goes on'):
        wait_for_stage(Wait(config, existing, deadline, told.append), 'addressed')


def test_a_record_that_goes_ends_a_wait(cloud: Cloud, told: list[str]) -> None:
    instance, config = new(), EtcdConfig((cloud.etcd.endpoint,))
    cloud.etcd.put_record(to_json(Record(instance, new(), ACTIVE, image=IMAGE)))
    with begin_wait(told, wait_for_stage, Wait(config, instance, Deadline(30), told.append), 'started') as waiting:
        cloud.etcd.delete(cloud.etcd.record_key(instance))
        with pytest.raises(NotFound, match='its record was removed'):
            waiting.result(PATIENCE * 20)


def test_a_wait_ends_when_there_is_nothing_to_wait_for(cloud: Cloud, told: list[str]) -> None:
    config = EtcdConfig((cloud.etcd.endpoint,))
    failed, gone, slow = new(), new(), new()
    error = Failure('image', 'HTTP 404', 'nothing is left')
    cloud.etcd.put_record(to_json(Record(failed, new(), ERROR, image=IMAGE, error=error)))
    cloud.etcd.put_record(to_json(Record(gone, new(), GONE, image=IMAGE)))
    with pytest.raises(EcompError, match='failed at stage image: HTTP 404') as caught:
        wait_for_stage(Wait(config, failed, Deadline(10), told.append), 'started')
    assert caught.value.exit_code == 1
    with pytest.raises(NotFound, match='destroyed while waiting'):
        wait_for_stage(Wait(config, gone, Deadline(10), told.append), 'started')
    began = time.monotonic()
    with pytest.raises(StillGoing, match=r'0\.3 s are up, still waiting for: its compute to take it'):
        wait_for_stage(Wait(config, slow, Deadline(0.3), told.append), 'started')
    assert time.monotonic() - began < PATIENCE * 5


def test_a_wait_on_an_etcd_that_is_away_says_so(told: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    config = EtcdConfig((f'127.0.0.1:{free_port()}',), timeout=1.0)
    with pytest.raises(StillGoing, match=r': 0\.5 s are up, and etcd did not answer; it goes on$'):
        wait_for_stage(Wait(config, new(), Deadline(0.5), told.append), 'started')
    # The wait does not know the instance's stage, so it reports only etcd.
    assert told
    assert {message.partition(',')[0] for message in told} == {'waiting for: etcd to answer'}


def test_an_end_is_waited_for(cloud: Cloud, told: list[str]) -> None:
    gone, removed, compute = new(), new(), new()
    config = EtcdConfig((cloud.etcd.endpoint,))
    for instance in (gone, removed):
        told.clear()
        cloud.etcd.put_record(to_json(Record(instance, compute, ACTIVE, image=IMAGE)))
        with begin_wait(told, wait_until_gone, Wait(config, instance, Deadline(30), told.append)) as waiting:
            if instance == gone:
                cloud.etcd.put_record(to_json(Record(gone, compute, GONE, image=IMAGE)))
            else:  # the record of a failed instance is removed immediately
                cloud.etcd.delete(cloud.etcd.record_key(removed))
            waiting.result(PATIENCE * 20)
    wait_until_gone(Wait(config, new(), Deadline(30), told.append))


def test_one_that_waits_in_a_queue_is_followed_to_its_compute(cloud: Cloud, told: list[str]) -> None:
    instance, compute = new(), new()
    config, queue_key = EtcdConfig((cloud.etcd.endpoint,)), keys.queue('small', instance)
    cloud.etcd.put(queue_key, '{}')
    with begin_wait(told, wait_for_stage, Wait(config, instance, Deadline(30), told.append), 'started') as waiting:
        request, record = keys.request(compute, instance), Record(instance, compute, ACTIVE, image=IMAGE)
        cloud.store.commit([], [Delete(queue_key), Put(request, '{}')])
        cloud.etcd.put_record(to_json(record.at(ACTIVE, 't', 'started')))
        assert waiting.result(PATIENCE * 20).compute == compute
    cloud.etcd.delete(request)


def test_one_that_moves_while_etcd_is_away_is_found_again(cloud: Cloud) -> None:
    instance, compute = new(), new()
    queue_key, request = keys.queue('small', instance), keys.request(compute, instance)
    cloud.etcd.put(queue_key, '{}')
    with Whereabouts(EtcdConfig((cloud.etcd.endpoint,)), instance) as whereabouts:
        assert whereabouts.look() == (True, None)
        cloud.store.commit([], [Delete(queue_key), Put(request, '{}')])
        real, whereabouts._find = whereabouts._find, _unreachable  # type: ignore[method-assign]
        until(lambda: whereabouts.look() == (False, None), 10, 'it is seen to be gone, and not found')
        whereabouts._find = real  # type: ignore[method-assign]
        cloud.etcd.put_record(to_json(Record(instance, compute, ACTIVE, image=IMAGE)))
        until(lambda: whereabouts.look()[1] is not None, 10, 'it is found')
    cloud.etcd.delete(request)


@pytest.mark.parametrize('state', [ACTIVE, GONE])
@pytest.mark.parametrize('has_written', [True, False])
def test_who_waits_from_the_queue_on_hears_the_compute_that_took_it(
    cloud: Cloud, told: list[str], has_written: bool, state: str
) -> None:
    """Check that the record of a compute without the claim is ignored.

    The wait once failed with "its record was removed" (exit status 4) if the taker had not written a record yet.
    """
    config, instance, other, taker = EtcdConfig((cloud.etcd.endpoint,)), new(), new(), new()
    foreign, record = (Record(instance, compute, BUILDING, image=IMAGE) for compute in (other, taker))
    cloud.etcd.put(keys.request(other, instance), '{}')
    cloud.etcd.put(keys.record(other, instance), to_json(foreign))
    wait = Wait(config, instance, Deadline(30), told.append, claims=lambda each: [instance] if each == taker else [])
    with begin_wait(told, wait_for_stage, wait, 'started') as waiting:
        cloud.etcd.put(keys.request(taker, instance), '{}')
        if has_written:
            cloud.etcd.put(keys.record(taker, instance), to_json(record))
        cloud.etcd.put(keys.record(other, instance), to_json(foreign.at(state, 't', 'started')))
        time.sleep(1.5)
        assert not waiting.done()
        record = record.at(ACTIVE, 't', 'started')
        cloud.etcd.put(keys.record(taker, instance), to_json(record))
        assert waiting.result(PATIENCE * 10) == record
    removed(cloud, instance, other, taker)


def test_nobody_is_believed_of_two_while_placement_does_not_answer(cloud: Cloud, told: list[str]) -> None:
    config, instance, other, taker = EtcdConfig((cloud.etcd.endpoint,)), new(), new(), new()
    foreign, record = (Record(instance, host, BUILDING, image=IMAGE) for host in (other, taker))
    cloud.etcd.put(keys.request(other, instance), '{}')
    cloud.etcd.put(keys.record(other, instance), to_json(foreign))
    is_away = threading.Event()
    is_away.set()

    def list_claims(compute: str) -> list[str]:
        if is_away.is_set():
            raise Unreachable('placement cannot be reached', 'placement at http://localhost:8080/')
        return [instance] if compute == taker else []

    wait = Wait(config, instance, Deadline(30), told.append, claims=list_claims)
    with begin_wait(told, wait_for_stage, wait, 'started') as waiting:
        cloud.etcd.put(keys.request(taker, instance), '{}')
        cloud.etcd.put(keys.record(taker, instance), to_json(record))
        cloud.etcd.put(keys.record(other, instance), to_json(foreign.at(ACTIVE, 't', 'started')))
        until(lambda: told[-1].startswith('waiting for: placement to answer'), 10, 'it says whom it waits for')
        is_away.clear()
        record = record.at(ACTIVE, 't', 'started')
        cloud.etcd.put(keys.record(taker, instance), to_json(record))
        assert waiting.result(PATIENCE * 10) == record
    removed(cloud, instance, other, taker)


def removed(cloud: Cloud, instance: str, *computes: str) -> None:
    """Delete the instance's requests and records of these computes."""
    for compute in computes:
        cloud.etcd.delete(keys.request(compute, instance))
        cloud.etcd.delete(keys.record(compute, instance))


def test_who_waits_for_a_destroy_hears_its_end_though_another_is_asked_by_nobody(cloud: Cloud, told: list[str]) -> None:
    """Check stale keys of a compute that holds no claim of the instance."""
    config, instance, other, owner = EtcdConfig((cloud.etcd.endpoint,)), new(), new(), new()
    request, record = keys.request(owner, instance), Record(instance, owner, DESTROYING, image=IMAGE)
    for compute in (owner, other):
        cloud.etcd.put(keys.request(compute, instance), '{}')
        cloud.etcd.put(keys.record(compute, instance), to_json(replace(record, compute=compute)))
    claims = {owner: [instance]}
    wait = Wait(config, instance, Deadline(30), told.append, claims=lambda each: claims.get(each, []))
    with begin_wait(told, wait_until_gone, wait) as waiting:
        claims.clear()
        gone = to_json(record.at(GONE, 't', 'gone'))
        cloud.store.commit([], [Delete(request), Put(keys.record(owner, instance), gone)])
        waiting.result(PATIENCE * 10)
    removed(cloud, instance, other, owner)


def test_it_says_that_placement_does_not_answer_where_that_is_asked(cloud: Cloud, told: list[str]) -> None:
    def raise_unreachable(_: str) -> NoReturn:
        raise Unreachable('placement cannot be reached', 'placement at http://localhost:8080/')

    config, instance, computes = EtcdConfig((cloud.etcd.endpoint,), timeout=1), new(), (new(), new())
    for compute in computes:
        cloud.etcd.put(keys.request(compute, instance), '{}')
    with pytest.raises(StillGoing, match='and placement did not answer'):
        wait_for_stage(Wait(config, instance, Deadline(0.2), told.append, claims=raise_unreachable), 'started')
    assert told[0].startswith('waiting for: placement to answer')
    for compute in computes:
        cloud.etcd.delete(keys.request(compute, instance))


def test_of_many_each_is_looked_for_where_it_was(
    cloud: Cloud, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, instance, compute = EtcdConfig((cloud.etcd.endpoint,)), new(), new()
    started = Record(instance, compute, ACTIVE, image=IMAGE).at(ACTIVE, 't', 'started')
    cloud.etcd.put_record(to_json(started))
    located, mislocated = (Index({instance: [keys.request(host, instance)]}) for host in (compute, new()))
    assert wait_for_stage(Wait(config, instance, Deadline(5), told.append, among=mislocated), 'started') == started
    monkeypatch.setattr(Store, 'snapshot', _unreachable)
    monkeypatch.setattr(wait_module, 'Follower', _unreachable)
    assert wait_for_stage(Wait(config, instance, Deadline(5), told.append, among=located), 'started') == started


def _unreachable(*_: object) -> NoReturn:
    raise Unreachable('etcd is away')


def test_no_thread_is_left(cloud: Cloud, told: list[str]) -> None:
    before = threading.active_count()
    instance = new()
    cloud.etcd.put_record(to_json(Record(instance, new(), ACTIVE, image=IMAGE)))
    with pytest.raises(StillGoing):
        wait_until_gone(Wait(EtcdConfig((cloud.etcd.endpoint,)), instance, Deadline(0.1), told.append))
    until(lambda: threading.active_count() <= before, 5, 'as many threads as before')
