"""What waits in a queue under a uuid that was used before, as another client may put it: refused, or destroyed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ecomp.model.record import ERROR, GONE, Failure, Record, from_json, to_json
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import settled
from tests.kit.invariants import allocations, everything
from tests.kit.servers import until
from tests.kit.story import SMALL, called, logs, one_line, place, reached
from tests.scenario.queued import queue, waiting

SHARED = ('/names/web1', '/groups/web', '/quotas/shop')
WORDS = ('--project', 'shop', '--name', 'web1', '--group', 'web', '--policy', 'affinity')


def used(control: Control) -> int:
    """How many instances the quota counts."""
    shown = called(control, 'quota', 'show', 'shop', '-f', 'json')
    return int(json.loads(shown.stdout)['used'].get('instances', 0))


def with_past(control: Control, compute: str, state: str) -> tuple[str, Record]:
    """An instance that waits with a name, a group and a quota, and has a past on the compute; and that record."""
    assert called(control, 'quota', 'set', 'shop', 'instances=5').code == 0
    instance = queue(control, *WORDS)
    past = Record(instance, compute, state, resources={'VCPU': 1}, user_id='u', project_id='shop')
    past = past if state == GONE else replace(past, error=Failure('image', 'not found', 'nothing is left'))
    key = f'/instances/{compute or "none"}/{instance}'
    control.etcd.put(key, to_json(past), control.etcd.grant())
    return instance, past


def shares_nothing(control: Control) -> bool:
    return used(control) == 0 and not {'/names/web1', '/groups/web'} & everything(control).keys()


@pytest.fixture
def compute(small: Control) -> Ecompute:
    return small.ecompute(queues=True)


@pytest.mark.parametrize('state', [GONE, ERROR])
def test_a_uuid_that_was_used_on_the_compute_is_refused(small: Control, compute: Ecompute, state: str) -> None:
    compute.pause()
    instance, past = with_past(small, compute.uuid, state)
    compute.resume()
    until(lambda: waiting(small) == [], 20, 'it is refused')
    assert logs(compute, ' ERROR ', instance, 'Fix: use another uuid')
    assert shares_nothing(small)
    assert allocations(small) == {}
    after = everything(small)[f'/instances/{compute.uuid}/{instance}']
    found = from_json(after.value)
    assert (found.state, found.error, after.lease > 0) == (state, past.error, True)
    assert 'Fix: use another uuid' in (found.fault or '')
    assert 'Fix: use another uuid' in called(small, 'show', instance).stdout
    reached(small, queue(small), 'active')
    settled(small, compute)


def test_a_uuid_that_lives_on_the_compute_is_taken_out_of_the_queue_alone(small: Control, compute: Ecompute) -> None:
    assert called(small, 'quota', 'set', 'shop', 'instances=5').code == 0
    _, instance = place(small, SMALL.replace('VCPU:1', 'VCPU:2'), *WORDS)
    reached(small, instance, 'active')
    compute.pause()
    shared = [small.etcd.get(each) for each in SHARED]
    other = queue(small)
    value = json.loads(small.etcd.get(f'/queues/small/{other}') or '')
    small.etcd.put(f'/queues/small/{instance}', json.dumps({**value, 'instance': instance, 'project_id': 'shop'}))
    compute.resume()
    until(lambda: waiting(small) == [], 20, 'it is refused')
    assert logs(compute, ' ERROR ', instance, 'Fix: use another uuid')
    assert [small.etcd.get(each) for each in SHARED] == shared
    assert allocations(small)[instance] == {compute.uuid: {'VCPU': 2, 'DISK_GB': 1, 'MEMORY_MB': 128}}
    reached(small, instance, 'active')
    settled(small, compute)


@pytest.mark.parametrize(('where', 'state'), [('a compute', GONE), ('a compute', ERROR), ('', GONE)])
def test_a_destroy_takes_it_out_of_its_queue(small: Control, where: str, state: str) -> None:
    instance, past = with_past(small, where and small.ecompute().uuid, state)
    key = small.etcd.record_key(instance)
    one_line(called(small, 'destroy', instance), 0, instance, 'taken out of its queue')
    assert waiting(small) == []
    assert shares_nothing(small)
    assert small.etcd.get(key) == to_json(past).encode()
    if state == GONE:
        one_line(called(small, 'destroy', instance), 4, instance, 'gone')
