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
from ecomp.model.record import WAIT_REASONS, Failure, Progress, Record
from ecomp.model.states import ACTIVE, BUILDING, DESTROYING, ERROR, GONE
from ecomp.model.stored import encode
from ecomp.scheduler.changes.wait import Deadline, InstanceReader, Wait, wait_for_stage, wait_until_gone
from ecomp.shared.places import KeyIndex
from ecomp.store.client import Delete, Put, Store
from tests.functional.cloud import IMAGE, Cloud, make_uuid
from tests.kit.servers import SLOWDOWN_FACTOR, free_port, wait_until


@pytest.fixture
def messages() -> list[str]:
    return []


@contextmanager
def begin_wait(messages: list[str], *call: Any) -> Iterator[Future[Any]]:
    """Start a wait, and yield when etcd has answered it: before, it can report no stage."""
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(*call)
        wait_until(
            lambda: any(not message.startswith('waiting for etcd to') for message in messages),
            10,
            'etcd has answered it',
        )
        yield waiting


def test_wait_reports_each_stage(cloud: Cloud, messages: list[str]) -> None:
    instance = make_uuid()
    record = Record(instance, make_uuid(), BUILDING, image=IMAGE, stages={'requested': 't', 'scheduled': 't'})
    config = EtcdConfig((cloud.etcd.endpoint,))

    def is_waiting_for(event: str) -> bool:
        return any(f'waiting for {event}' in message for message in messages)

    with begin_wait(
        messages, wait_for_stage, Wait(config, instance, Deadline(30), messages.append), 'addressed'
    ) as waiting:
        for stage, next_stage in {'image': 'disk', 'disk': 'started', 'started': 'addressed', 'addressed': ''}.items():
            record = record.enter_state(ACTIVE, 't', stage)
            cloud.etcd.put_record(encode(record))
            if next_stage:
                wait_until(partial(is_waiting_for, WAIT_REASONS[next_stage]), 10, f'{stage} is seen')
        assert waiting.result(SLOWDOWN_FACTOR * 10) == record


def test_wait_reports_the_progress_of_a_download(cloud: Cloud, messages: list[str]) -> None:
    instance = make_uuid()
    record = Record(instance, make_uuid(), BUILDING, image=IMAGE, stages={'requested': 't', 'scheduled': 't'})
    config = EtcdConfig((cloud.etcd.endpoint,))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait_for_stage, Wait(config, instance, Deadline(30), messages.append), 'started')
        progress = Progress('image', 34_000_000, 600_000_000)
        cloud.etcd.put_record(encode(replace(record, progress=progress)))
        wait_until(
            lambda: any(message.startswith('waiting for image, 34 of 600 MB, ') for message in messages),
            10,
            'it is told',
        )
        cloud.etcd.put_record(encode(record.enter_state(ACTIVE, 't', 'image', 'disk', 'started')))
        assert waiting.result(SLOWDOWN_FACTOR * 10).progress is None


def test_waits_share_one_deadline(cloud: Cloud, messages: list[str]) -> None:
    config, deadline = EtcdConfig((cloud.etcd.endpoint,)), Deadline(0.5)
    existing, compute = make_uuid(), make_uuid()
    cloud.etcd.put_record(encode(Record(existing, compute, ACTIVE, image=IMAGE, stages={'started': 't'})))
    with pytest.raises(StillGoing, match=r'timed out after 0\.5 s'):
        wait_for_stage(Wait(config, make_uuid(), deadline, messages.append), 'started')
    assert deadline.elapsed >= 0.5
    # The deadline has passed: each further instance is still checked once.
    assert wait_for_stage(Wait(config, existing, deadline, messages.append), 'started').instance == existing
    stages = dict.fromkeys(('requested', 'scheduled', 'image', 'disk', 'started'), 't')
    cloud.etcd.put_record(encode(Record(existing, compute, ACTIVE, image=IMAGE, stages=stages)))
    with pytest.raises(StillGoing, match=r'\(the operation continues\), still waiting for its DHCP lease$'):
        wait_for_stage(Wait(config, existing, deadline, messages.append), 'addressed')


def test_removed_record_ends_a_wait(cloud: Cloud, messages: list[str]) -> None:
    instance, config = make_uuid(), EtcdConfig((cloud.etcd.endpoint,))
    cloud.etcd.put_record(encode(Record(instance, make_uuid(), ACTIVE, image=IMAGE)))
    with begin_wait(
        messages, wait_for_stage, Wait(config, instance, Deadline(30), messages.append), 'started'
    ) as waiting:
        cloud.etcd.delete(cloud.etcd.find_record_key(instance))
        with pytest.raises(NotFound, match='its record was removed'):
            waiting.result(SLOWDOWN_FACTOR * 20)


def test_wait_ends_on_failure_on_destroy_and_at_the_deadline(cloud: Cloud, messages: list[str]) -> None:
    config = EtcdConfig((cloud.etcd.endpoint,))
    failed, gone, slow = make_uuid(), make_uuid(), make_uuid()
    error = Failure('image', 'HTTP 404', 'nothing is left')
    cloud.etcd.put_record(encode(Record(failed, make_uuid(), ERROR, image=IMAGE, error=error)))
    cloud.etcd.put_record(encode(Record(gone, make_uuid(), GONE, image=IMAGE)))
    with pytest.raises(EcompError, match='failed at stage image: HTTP 404') as caught:
        wait_for_stage(Wait(config, failed, Deadline(10), messages.append), 'started')
    assert caught.value.exit_code == 1
    with pytest.raises(NotFound, match='destroyed during the wait'):
        wait_for_stage(Wait(config, gone, Deadline(10), messages.append), 'started')
    began = time.monotonic()
    with pytest.raises(
        StillGoing,
        match=r'timed out after 0\.3 s \(the operation continues\), still waiting for its compute to accept',
    ):
        wait_for_stage(Wait(config, slow, Deadline(0.3), messages.append), 'started')
    assert time.monotonic() - began < SLOWDOWN_FACTOR * 5


def test_wait_reports_an_unreachable_etcd(messages: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    config = EtcdConfig((f'127.0.0.1:{free_port()}',), timeout=1.0)
    with pytest.raises(
        StillGoing, match=r': timed out after 0\.5 s \(the operation continues\), and etcd did not answer$'
    ):
        wait_for_stage(Wait(config, make_uuid(), Deadline(0.5), messages.append), 'started')
    # The wait does not know the instance's stage, so it reports only etcd.
    assert messages
    assert {message.partition(',')[0] for message in messages} == {'waiting for etcd to answer'}


def test_wait_for_the_end_of_an_instance(cloud: Cloud, messages: list[str]) -> None:
    gone, removed, compute = make_uuid(), make_uuid(), make_uuid()
    config = EtcdConfig((cloud.etcd.endpoint,))
    for instance in (gone, removed):
        messages.clear()
        cloud.etcd.put_record(encode(Record(instance, compute, ACTIVE, image=IMAGE)))
        with begin_wait(messages, wait_until_gone, Wait(config, instance, Deadline(30), messages.append)) as waiting:
            if instance == gone:
                cloud.etcd.put_record(encode(Record(gone, compute, GONE, image=IMAGE)))
            else:  # the record of a failed instance is removed immediately
                cloud.etcd.delete(cloud.etcd.find_record_key(removed))
            waiting.result(SLOWDOWN_FACTOR * 20)
    wait_until_gone(Wait(config, make_uuid(), Deadline(30), messages.append))


def test_instance_that_moves_during_an_etcd_outage_is_found(cloud: Cloud) -> None:
    instance, compute = make_uuid(), make_uuid()
    queue_key, request = keys.queue('small', instance), keys.request(compute, instance)
    cloud.etcd.put(queue_key, '{}')
    with InstanceReader(EtcdConfig((cloud.etcd.endpoint,)), instance) as whereabouts:
        assert whereabouts.read() == (True, None)
        cloud.store.commit([], [Delete(queue_key), Put(request, '{}')])
        real, whereabouts._find_key = whereabouts._find_key, _raise_unreachable  # type: ignore[method-assign]
        wait_until(lambda: whereabouts.read() == (False, None), 10, 'it is seen to be gone, and not found')
        whereabouts._find_key = real  # type: ignore[method-assign]
        cloud.etcd.put_record(encode(Record(instance, compute, ACTIVE, image=IMAGE)))
        wait_until(lambda: whereabouts.read()[1] is not None, 10, 'it is found')
    cloud.etcd.delete(request)


@pytest.mark.parametrize('state', [ACTIVE, GONE])
@pytest.mark.parametrize('has_written', [True, False])
def test_wait_from_the_queue_follows_the_compute_with_the_claim(
    cloud: Cloud, messages: list[str], has_written: bool, state: str
) -> None:
    """The wait once failed with "its record was removed" before the taker wrote a record."""
    config, instance, other, taker = EtcdConfig((cloud.etcd.endpoint,)), make_uuid(), make_uuid(), make_uuid()
    foreign, record = (Record(instance, compute, BUILDING, image=IMAGE) for compute in (other, taker))
    cloud.etcd.put(keys.request(other, instance), '{}')
    cloud.etcd.put(keys.record(other, instance), encode(foreign))
    wait = Wait(
        config, instance, Deadline(30), messages.append, claims=lambda each: [instance] if each == taker else []
    )
    with begin_wait(messages, wait_for_stage, wait, 'started') as waiting:
        cloud.etcd.put(keys.request(taker, instance), '{}')
        if has_written:
            cloud.etcd.put(keys.record(taker, instance), encode(record))
        cloud.etcd.put(keys.record(other, instance), encode(foreign.enter_state(state, 't', 'started')))
        time.sleep(1.5)
        assert not waiting.done()
        record = record.enter_state(ACTIVE, 't', 'started')
        cloud.etcd.put(keys.record(taker, instance), encode(record))
        assert waiting.result(SLOWDOWN_FACTOR * 10) == record
    remove_keys(cloud, instance, other, taker)


def test_two_records_are_not_trusted_until_placement_answers(cloud: Cloud, messages: list[str]) -> None:
    config, instance, other, taker = EtcdConfig((cloud.etcd.endpoint,)), make_uuid(), make_uuid(), make_uuid()
    foreign, record = (Record(instance, host, BUILDING, image=IMAGE) for host in (other, taker))
    cloud.etcd.put(keys.request(other, instance), '{}')
    cloud.etcd.put(keys.record(other, instance), encode(foreign))
    is_away = threading.Event()
    is_away.set()

    def list_claims(compute: str) -> list[str]:
        if is_away.is_set():
            raise Unreachable('placement cannot be reached', 'placement at http://localhost:8080/')
        return [instance] if compute == taker else []

    wait = Wait(config, instance, Deadline(30), messages.append, claims=list_claims)
    with begin_wait(messages, wait_for_stage, wait, 'started') as waiting:
        cloud.etcd.put(keys.request(taker, instance), '{}')
        cloud.etcd.put(keys.record(taker, instance), encode(record))
        cloud.etcd.put(keys.record(other, instance), encode(foreign.enter_state(ACTIVE, 't', 'started')))
        wait_until(lambda: messages[-1].startswith('waiting for placement to answer'), 10, 'it says whom it waits for')
        is_away.clear()
        record = record.enter_state(ACTIVE, 't', 'started')
        cloud.etcd.put(keys.record(taker, instance), encode(record))
        assert waiting.result(SLOWDOWN_FACTOR * 10) == record
    remove_keys(cloud, instance, other, taker)


def remove_keys(cloud: Cloud, instance: str, *computes: str) -> None:
    for compute in computes:
        cloud.etcd.delete(keys.request(compute, instance))
        cloud.etcd.delete(keys.record(compute, instance))


def test_wait_for_a_destroy_ignores_a_compute_without_a_claim(cloud: Cloud, messages: list[str]) -> None:
    config, instance, other, owner = EtcdConfig((cloud.etcd.endpoint,)), make_uuid(), make_uuid(), make_uuid()
    request, record = keys.request(owner, instance), Record(instance, owner, DESTROYING, image=IMAGE)
    for compute in (owner, other):
        cloud.etcd.put(keys.request(compute, instance), '{}')
        cloud.etcd.put(keys.record(compute, instance), encode(replace(record, compute=compute)))
    claims = {owner: [instance]}
    wait = Wait(config, instance, Deadline(30), messages.append, claims=lambda each: claims.get(each, []))
    with begin_wait(messages, wait_until_gone, wait) as waiting:
        claims.clear()
        gone = encode(record.enter_state(GONE, 't', 'gone'))
        cloud.store.commit([], [Delete(request), Put(keys.record(owner, instance), gone)])
        waiting.result(SLOWDOWN_FACTOR * 10)
    remove_keys(cloud, instance, other, owner)


def test_wait_reports_an_unreachable_placement(cloud: Cloud, messages: list[str]) -> None:
    def raise_unreachable(_: str) -> NoReturn:
        raise Unreachable('placement cannot be reached', 'placement at http://localhost:8080/')

    config, instance, computes = EtcdConfig((cloud.etcd.endpoint,), timeout=1), make_uuid(), (make_uuid(), make_uuid())
    for compute in computes:
        cloud.etcd.put(keys.request(compute, instance), '{}')
    with pytest.raises(StillGoing, match='and placement did not answer'):
        wait_for_stage(Wait(config, instance, Deadline(0.2), messages.append, claims=raise_unreachable), 'started')
    assert messages[0].startswith('waiting for placement to answer')
    for compute in computes:
        cloud.etcd.delete(keys.request(compute, instance))


def test_wait_with_an_index_takes_one_read(cloud: Cloud, messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    config, instance, compute = EtcdConfig((cloud.etcd.endpoint,)), make_uuid(), make_uuid()
    started = Record(instance, compute, ACTIVE, image=IMAGE).enter_state(ACTIVE, 't', 'started')
    cloud.etcd.put_record(encode(started))
    located, mislocated = (KeyIndex({instance: [keys.request(host, instance)]}) for host in (compute, make_uuid()))
    assert (
        wait_for_stage(Wait(config, instance, Deadline(5), messages.append, key_index=mislocated), 'started') == started
    )
    monkeypatch.setattr(Store, 'snapshot', _raise_unreachable)
    assert wait_for_stage(Wait(config, instance, Deadline(5), messages.append, key_index=located), 'started') == started


def _raise_unreachable(*_: object) -> NoReturn:
    raise Unreachable('etcd is away')


def test_wait_leaves_no_thread_behind(cloud: Cloud, messages: list[str]) -> None:
    before = threading.active_count()
    instance = make_uuid()
    cloud.etcd.put_record(encode(Record(instance, make_uuid(), ACTIVE, image=IMAGE)))
    with pytest.raises(StillGoing):
        wait_until_gone(Wait(EtcdConfig((cloud.etcd.endpoint,)), instance, Deadline(0.1), messages.append))
    wait_until(lambda: threading.active_count() <= before, 5, 'as many threads as before')
