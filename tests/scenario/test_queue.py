"""Queues: waiting requests, uuids with a past, malformed values, and load.

Words of commands are in tests/golden, races and lost messages in tests/functional/test_queues.py and tests/model.
"""

from __future__ import annotations

import json
import re
import socket
import uuid
from dataclasses import replace

import pytest

from ecomp.model.record import Failure, Record, from_json
from ecomp.model.states import ERROR, GONE
from ecomp.model.stored import encode
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import check_settled
from tests.kit.invariants import read_allocations, read_lasting_keys
from tests.kit.servers import wait_until
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    assert_one_line,
    run_in_process,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.scenario.queued import enqueue_request, list_waiting

# The pull queue: requests wait in the queue of their flavor, and computes take those that they have room for.


def test_queued_request_is_taken_by_a_compute(small_cluster: Control) -> None:
    (small_cluster.directory / 'user-data').write_text('#cloud-config\n')
    compute = small_cluster.ecompute(queues=True)
    user_data = ('--user-data', str(small_cluster.directory / 'user-data'))
    words = ('--queue', '--flavor', 'small', '--uuid', str(uuid.uuid4()), IMAGE, '--name', 'web1', *user_data)
    done = small_cluster.eschedule(*words, '--wait')
    instance, address = re.fullmatch(r'QUEUED INSTANCE (\S+)\n(\S+)\n', done.stdout).groups()  # type: ignore[union-attr]
    assert address == wait_address(small_cluster, instance)
    record = wait_state(small_cluster, instance, 'active')
    expected = {'compute': compute.uuid, 'name': 'web1', 'image': IMAGE, 'query': SMALL_QUERY}
    assert expected.items() <= record.items()
    assert {'requested', 'scheduled', 'started'} <= set(record['stages'])
    assert read_allocations(small_cluster) == {instance: {compute.uuid: {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}}
    assert wait_log_lines(compute, f'took instance {instance} from the queue of flavor small')
    request = json.loads(read_lasting_keys(small_cluster)[f'/hosts/{compute.uuid}/{instance}'].value)
    assert small_cluster.etcd.list_keys('/user-data/') == [f'/user-data/{request["user_data_sha256"]}']
    assert 'user_data' not in request
    repeated = small_cluster.eschedule(*words)
    assert repeated.stdout == f'NOTIFIED TARGET, {compute.uuid}, OF INSTANCE {instance}\n'
    assert_one_line(repeated, 0, f'{instance} was requested before: this command changed nothing')

    # A full host is named as the reason, with the number of those that wait before.
    assert small_cluster.eschedule('--count', '3', SMALL_QUERY).code == 0
    for name in ('web2', 'web3'):
        enqueue_request(small_cluster, '--name', name)
    host, lack = socket.gethostname(), 'VCPU short by 1 (free 0 of 4); MEMORY_MB short by 128 (free 0 of 512)'
    assert f'{host}: {lack}' in small_cluster.eschedule('why', 'web3').stdout.splitlines()
    waits = json.loads(small_cluster.eschedule('why', 'web3', '-f', 'json').stdout)['waits']
    lacks = {'compute': compute.uuid, 'host': host, 'lacks': lack}
    assert (waits['flavor'], waits['before'], waits['computes']) == ('small', 1, [lacks])
    assert small_cluster.eschedule('destroy', '--wait', 'web1', 'web2', 'web3').code == 0
    check_settled(small_cluster, compute)


# A queued request whose uuid was used before, as another client may write it: it is refused or destroyed.


SHARED_OPTIONS = ('--project', 'shop', '--name', 'web1', '--group', 'web', '--policy', 'affinity')


def read_used_instances(control: Control) -> int:
    shown = run_in_process(control, 'quota', 'shop', '-f', 'json')
    return int(json.loads(shown.stdout)['used'].get('instances', 0))


def queue_with_record(control: Control, compute: str, state: str) -> tuple[str, Record]:
    """Queue a request with a name, group and quota, and write a record of its uuid."""
    assert run_in_process(control, 'quota', 'set', 'shop', 'instances=5').code == 0
    instance = enqueue_request(control, *SHARED_OPTIONS)
    past = Record(instance, compute, state, resources={'VCPU': 1}, user_id='u', project_id='shop')
    past = past if state == GONE else replace(past, error=Failure('image', 'not found', 'nothing is left'))
    key = f'/instances/{compute or "none"}/{instance}'
    control.etcd.put(key, encode(past), control.etcd.grant())
    return instance, past


def has_no_shared_keys(control: Control) -> bool:
    return read_used_instances(control) == 0 and not {'/names/web1', '/groups/web'} & read_lasting_keys(control).keys()


@pytest.fixture
def compute(small_cluster: Control) -> Ecompute:
    return small_cluster.ecompute(queues=True)


@pytest.mark.parametrize('state', [GONE, ERROR])
def test_queued_uuid_with_a_record_on_the_compute_is_refused(
    small_cluster: Control, compute: Ecompute, state: str
) -> None:
    compute.pause()
    instance, past = queue_with_record(small_cluster, compute.uuid, state)
    compute.resume()
    wait_until(lambda: list_waiting(small_cluster) == [], 20, 'it is refused')
    assert wait_log_lines(compute, ' ERROR ', instance, 'Fix: use another uuid')
    assert has_no_shared_keys(small_cluster)
    assert read_allocations(small_cluster) == {}
    after = read_lasting_keys(small_cluster)[f'/instances/{compute.uuid}/{instance}']
    last_record = from_json(after.value)
    assert (last_record.state, last_record.error, after.lease > 0) == (state, past.error, True)
    assert 'Fix: use another uuid' in (last_record.fault or '')
    assert 'Fix: use another uuid' in run_in_process(small_cluster, 'show', instance).stdout
    wait_state(small_cluster, enqueue_request(small_cluster), 'active')
    check_settled(small_cluster, compute)


def test_request_that_placement_refuses_does_not_block_others(small_cluster: Control) -> None:
    """Other clients wrote a project's id that is too long, and malformed requests."""
    poison = str(uuid.uuid4())
    value = {
        **{'version': 1, 'instance': poison, 'flavor': 'small', 'query': SMALL_QUERY, 'image': IMAGE},
        **{'user_id': 'u', 'project_id': 'p' * 300, 'stages': {'requested': '2026-11-21T08:00:00.000Z'}},
    }
    small_cluster.etcd.put(f'/queues/small/{poison}', json.dumps(value))
    malformed = {str(uuid.uuid4()): text for text in ('no request', '{"version": 99}')}
    for instance, text in malformed.items():
        small_cluster.etcd.put(f'/queues/small/{instance}', text)
    small_cluster.etcd.put('/queues/small/not-a-uuid', '{}')
    valid = [enqueue_request(small_cluster) for _ in range(3)]
    compute = small_cluster.ecompute(queues=True)
    for instance in valid:
        wait_state(small_cluster, instance, 'active')
    assert 'placement refuses its claim' in wait_state(small_cluster, poison, 'error')['error']['reason']
    assert wait_log_lines(compute, ' ERROR ', poison, 'placement refuses its claim')
    listed = small_cluster.eschedule('list', '--state', 'queued', '-f', 'value', '-c', 'instance').stdout.split()
    assert set(listed) == malformed.keys()
    assert small_cluster.eschedule('destroy', poison, *malformed).code == 0
    small_cluster.etcd.delete('/queues/small/not-a-uuid')
    check_settled(small_cluster, compute)
