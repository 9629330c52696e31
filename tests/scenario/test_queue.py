"""Queues: waiting requests, uuids with a past, malformed values, and load."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ecomp.model.record import ERROR, GONE, Failure, Record, from_json, to_json
from tests.kit.commands import Control, Ecompute, write_config
from tests.kit.hands import ArmedEcompute, check_settled, expire_key, read_guests, wait_killed_at
from tests.kit.invariants import read_allocations, read_lasting_keys
from tests.kit.servers import b64, wait_until
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    assert_one_line,
    place,
    read_record,
    require_record,
    run_in_process,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import TunedEcompute, make_tuned
from tests.scenario.queued import TOY, enqueue_request, expect_not_taken, list_waiting, record_placement_calls

# The pull queue: requests wait in the queue of their flavor, and computes take those that they have room for.


def test_queued_request_is_taken_by_a_compute(small_cluster: Control) -> None:
    compute = small_cluster.ecompute(queues=True)
    done = small_cluster.eschedule('--queue', '--flavor', 'small', IMAGE, '--name', 'web1', '--wait')
    instance, address = re.fullmatch(r'QUEUED INSTANCE (\S+)\n(\S+)\n', done.stdout).groups()  # type: ignore[union-attr]
    assert address == wait_address(small_cluster, instance)
    active_record = wait_state(small_cluster, instance, 'active')
    assert (active_record['compute'], active_record['name'], active_record['image'], active_record['query']) == (
        compute.uuid,
        'web1',
        IMAGE,
        SMALL_QUERY,
    )
    assert {'requested', 'scheduled', 'started'} <= set(active_record['stages'])
    assert read_allocations(small_cluster) == {instance: {compute.uuid: {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}}
    assert wait_log_lines(compute, f'took instance {instance} from the queue of flavor small')
    assert list_waiting(small_cluster) == []
    check_settled(small_cluster, compute)


def test_queued_request_is_shown_by_every_command(small_cluster: Control) -> None:
    compute = small_cluster.ecompute()  # takes nothing from queues
    instance = enqueue_request(small_cluster, '--name', 'web1')
    assert small_cluster.eschedule('list').stdout.splitlines()[1].split()[:5] == [instance, 'web1', 'queued', '-', '-']
    for word in (instance, instance[:8], 'web1'):
        shown = json.loads(small_cluster.eschedule('show', word, '-f', 'json').stdout)
        assert (shown['state'], shown['query'], shown['image']) == ('queued', SMALL_QUERY, json.loads(
            read_lasting_keys(small_cluster)[f'/queues/small/{instance}'].value)['image'])  # fmt: skip
    assert ' queued ' in small_cluster.eschedule('timeline', 'web1').stdout
    # The last line of each; each also reports that no compute takes queued requests.
    unserved = 'eschedule: web1 waits in a queue, but no compute takes queued requests. Fix: set `queues: True` in the'
    query_result = small_cluster.eschedule('web1')
    assert (query_result.code, query_result.stdout) == (6, '')
    assert 'no address yet: queued, waiting for a compute to take it' in query_result.stderr
    wait_result = small_cluster.eschedule('wait', 'web1', '--timeout', '0.2')
    assert wait_result.code == 6
    assert wait_result.stderr.endswith(
        'web1: timed out after 0.2 s (the operation continues), still waiting for a compute to take it\n'
    )
    for result in (query_result, wait_result, small_cluster.eschedule('list'), small_cluster.eschedule('audit')):
        assert [line for line in result.stderr.splitlines() if line.startswith(unserved)], result
    assert 'waits      it waits in a queue, but no compute takes' in small_cluster.eschedule('show', 'web1').stdout
    doctor = small_cluster.eschedule('doctor', '-f', 'json')
    assert [finding['cure'] for finding in json.loads(doctor.stdout)['findings'] if finding['check'] == 'queue'] == [
        'set `queues: True` in the compute.yaml of a host, and restart its ecompute'
    ]
    assert small_cluster.eschedule('list', '--state', 'active').stderr == ''
    assert_one_line(small_cluster.eschedule('stop', 'web1'), 5, 'is queued: no compute has taken it yet')
    # Its name and its uuid are in use.
    assert_one_line(small_cluster.eschedule(SMALL_QUERY, '--name', 'web1'), 5, f'name taken by instance {instance}')
    assert_one_line(
        small_cluster.eschedule('--queue', '--flavor', 'small', '--name', 'web1'), 5, 'name taken by instance'
    )
    assert_one_line(small_cluster.eschedule(SMALL_QUERY, '--uuid', instance, '--name', 'web1'), 5, 'waits in a queue')
    assert read_allocations(small_cluster) == {}
    check_settled(small_cluster, compute)


def test_why_explains_a_waiting_request(small_cluster: Control) -> None:
    queued = small_cluster.eschedule('--queue', '--flavor', 'small', '--name', 'web1')
    assert queued.code == 0, queued
    assert queued.stderr == (
        'eschedule: web1 waits in a queue, but no compute takes queued requests. Fix: set `queues: True` in the '
        'compute.yaml of a host, and restart its ecompute\n'
    )
    first, no_taker, query = (
        'web1 has waited in the queue of flavor small since 2',
        'no compute takes queued requests',
        SMALL_QUERY,
    )
    lines = small_cluster.eschedule('why', 'web1').stdout.splitlines()
    assert lines[0].startswith(first)
    assert lines[0].endswith(', and is next')
    assert [lines[1], lines[2][: len(no_taker)], len(lines)] == [f'it requested {query}', no_taker, 3]

    compute = small_cluster.ecompute(queues=True)
    wait_state(small_cluster, find_instance(small_cluster, 'web1'), 'active')
    assert small_cluster.eschedule('--count', '3', SMALL_QUERY).code == 0
    queued_behind = small_cluster.eschedule('--queue', '--flavor', 'small', '--name', 'web2')
    assert (queued_behind.code, queued_behind.stderr) == (0, '')
    enqueue_request(small_cluster, '--name', 'web3')
    lines = small_cluster.eschedule('why', 'web3').stdout.splitlines()
    assert lines[0].endswith(', behind 1 other')
    host, lack = socket.gethostname(), 'VCPU short by 1 (free 0 of 4); MEMORY_MB short by 128 (free 0 of 512)'
    assert lines[1:] == [f'it requested {query}', f'{host}: {lack}']
    waits = json.loads(small_cluster.eschedule('why', 'web3', '-f', 'json').stdout)['waits']
    lacks = {'compute': compute.uuid, 'host': host, 'lacks': lack}
    assert waits == {
        'flavor': 'small', 'since': waits['since'], 'before': 1, 'taker': None, 'claimed_on': None, 'computes': [lacks],
    }  # fmt: skip
    assert small_cluster.eschedule('destroy', '--wait', 'web1', 'web2', 'web3').code == 0


def find_instance(control: Control, name: str) -> str:
    """Return the uuid of the instance with this name."""
    return str(json.loads(control.eschedule('show', name, '-f', 'json').stdout)['instance'])


def test_destroy_cancels_a_queued_request(small_cluster: Control) -> None:
    instance = enqueue_request(small_cluster, '--name', 'web1')
    done = small_cluster.eschedule('destroy', '--wait', 'web1')
    assert done.code == 0
    assert done.stderr.splitlines() == [
        'eschedule: web1: removed from its queue; nothing was started', 'eschedule: web1: gone'
    ]  # fmt: skip
    assert [key for key in read_lasting_keys(small_cluster) if key.startswith(('/queues/', '/names/'))] == []
    assert wait_state(small_cluster, instance, 'gone')['compute'] == ''
    assert small_cluster.eschedule('list', '--all').stdout.splitlines()[1].split()[:5] == [
        instance,
        'web1',
        'gone',
        '-',
        '-',
    ]
    assert_one_line(small_cluster.eschedule('destroy', instance), 4, 'gone since')
    assert_one_line(
        small_cluster.eschedule('--queue', '--flavor', 'small', '--uuid', instance), 5, 'a uuid is never used twice'
    )
    assert_one_line(small_cluster.eschedule(SMALL_QUERY, '--uuid', instance), 5, 'a uuid is never used twice')
    compute = small_cluster.ecompute(queues=True)
    check_settled(small_cluster, compute)


def test_repeated_queued_request_changes_nothing(small_cluster: Control) -> None:
    instance = str(uuid.uuid4())
    words = '--queue', '--flavor', 'small', '--uuid', instance, '--name', 'web1'
    assert small_cluster.eschedule(*words).stdout == f'QUEUED INSTANCE {instance}\n'
    before = small_cluster.etcd.get(f'/queues/small/{instance}')
    second = small_cluster.eschedule(*words)
    assert second.stdout == f'QUEUED INSTANCE {instance}\n'
    assert_one_line(second, 0, 'requested before', 'this command changed nothing')
    assert small_cluster.etcd.get(f'/queues/small/{instance}') == before
    assert small_cluster.etcd.list_keys('/requests/') == []
    other = '--queue', '--flavor', 'small', '--uuid', instance
    assert_one_line(
        small_cluster.eschedule(*other, '--name', 'web2'), 5, 'exists, but was requested with the name web1'
    )
    assert_one_line(
        small_cluster.eschedule(*words, 'http://images.invalid/another.qcow2'),
        5,
        'exists, but was requested with query',
    )
    compute = small_cluster.ecompute(queues=True)
    wait_state(small_cluster, instance, 'active')
    repeated = small_cluster.eschedule(*words)
    assert repeated.stdout == f'NOTIFIED TARGET, {compute.uuid}, OF INSTANCE {instance}\n'
    assert_one_line(repeated, 0, f'{instance} was requested before: this command changed nothing')
    (document,) = json.loads(small_cluster.eschedule(*words, '-f', 'json').stdout)
    assert document == {'instance': instance, 'compute': compute.uuid, 'host': socket.gethostname(), 'name': 'web1'}
    check_settled(small_cluster, compute)


def test_queued_user_data_is_stored_once_by_its_hash(small_cluster: Control) -> None:
    (small_cluster.directory / 'user-data').write_text('#cloud-config\n')
    compute = small_cluster.ecompute(queues=True)
    instance = enqueue_request(small_cluster, '--user-data', str(small_cluster.directory / 'user-data'))
    wait_state(small_cluster, instance, 'active')
    request = json.loads(read_lasting_keys(small_cluster)[f'/hosts/{compute.uuid}/{instance}'].value)
    assert small_cluster.etcd.list_keys('/user-data/') == [f'/user-data/{request["user_data_sha256"]}']
    assert 'user_data' not in request
    check_settled(small_cluster, compute)


def test_wrong_queue_options_are_refused(small_cluster: Control) -> None:
    for words, message in {
        (SMALL_QUERY,): '--queue needs --flavor',
        (SMALL_QUERY, '--flavor', 'small'): 'a query is not accepted with --queue',
        ('--flavor', 'small', '--on', 'hv1'): '--on is not accepted with --queue',
        ('--flavor', 'small', '--weigh', 'pack'): '--weigh is not accepted with --queue',
        ('--flavor', 'small', '--count', '2'): '--count is not accepted with --queue',
        ('--flavor', 'half'): 'flavor half lacks MEMORY_MB, DISK_GB',
        ('--flavor', 'here'): f"which no compute reads. Fix: eschedule flavor set here '{SMALL_QUERY}'",
    }.items():
        assert small_cluster.eschedule('flavor', 'set', 'half', 'resources=VCPU:1').code == 0
        write_config(
            small_cluster.schedule_yaml,
            small_cluster.etcd.endpoint,
            small_cluster.placement.url,
            flavors={'here': SMALL_QUERY},
        )
        assert_one_line(small_cluster.eschedule('--queue', *words), 2, message)
    assert_one_line(small_cluster.eschedule('--queue', '--flavor', 'none'), 4, 'none: no such flavor')
    assert_one_line(small_cluster.eschedule('list', '--queue'), 2, '--queue is not accepted by this command')
    assert list_waiting(small_cluster) == []


def test_oldest_fitting_request_is_taken_first(small_cluster: Control) -> None:
    assert small_cluster.eschedule('flavor', 'set', 'large', SMALL_QUERY.replace('VCPU:1', 'VCPU:3')).code == 0
    assert small_cluster.eschedule('flavor', 'set', 'fast', f'{SMALL_QUERY}&required=CUSTOM_NEVER').code == 0
    never = enqueue_request(small_cluster, '--flavor', 'fast')
    large, another = (
        enqueue_request(small_cluster, '--flavor', 'large'),
        enqueue_request(small_cluster, '--flavor', 'large'),
    )
    small_ones = [enqueue_request(small_cluster), enqueue_request(small_cluster)]
    compute = small_cluster.ecompute(queues=True)  # with room for four
    wait_state(small_cluster, large, 'active')
    wait_state(small_cluster, small_ones[0], 'active')
    assert set(list_waiting(small_cluster)) == {never, another, small_ones[1]}
    # A removed instance makes room for the oldest request that fits.
    assert small_cluster.eschedule('destroy', '--wait', large).code == 0
    wait_state(small_cluster, another, 'active')
    assert set(list_waiting(small_cluster)) == {never, small_ones[1]}
    other = small_cluster.ecompute(queues=True)
    wait_state(small_cluster, small_ones[1], 'active')
    assert list_waiting(small_cluster) == [never]
    assert small_cluster.eschedule('destroy', never).code == 0
    check_settled(small_cluster, compute, other)


def test_request_that_placement_refuses_does_not_block_others(small_cluster: Control) -> None:
    """Its project's id is longer than placement allows: another client wrote it."""
    poison = str(uuid.uuid4())
    value = {
        **{'version': 1, 'instance': poison, 'flavor': 'small', 'query': SMALL_QUERY, 'image': IMAGE},
        **{'user_id': 'u', 'project_id': 'p' * 300, 'stages': {'requested': '2026-11-21T08:00:00.000Z'}},
    }
    small_cluster.etcd.put(f'/queues/small/{poison}', json.dumps(value))
    valid = [enqueue_request(small_cluster) for _ in range(3)]
    compute = small_cluster.ecompute(queues=True)
    for instance in valid:
        wait_state(small_cluster, instance, 'active')
    assert 'placement refuses its claim' in wait_state(small_cluster, poison, 'error')['error']['reason']
    assert_one_line(small_cluster.eschedule(poison), 1, 'placement refuses its claim')
    assert wait_log_lines(compute, ' ERROR ', poison, 'placement refuses its claim')
    assert small_cluster.eschedule('destroy', poison).code == 0
    check_settled(small_cluster, compute)


def test_placed_and_queued_instances_share_a_compute(small_cluster: Control) -> None:
    compute = small_cluster.ecompute(queues=True)
    placed_first = [place(small_cluster)[1] for _ in range(3)]
    taken_first, waiting_one = enqueue_request(small_cluster), enqueue_request(small_cluster)
    wait_state(small_cluster, taken_first, 'active')
    assert list_waiting(small_cluster) == [waiting_one]
    assert small_cluster.eschedule('destroy', placed_first[0]).code == 0
    wait_state(small_cluster, waiting_one, 'active')
    check_settled(small_cluster, compute)


def test_disabled_compute_takes_nothing(small_cluster: Control) -> None:
    """The disable counts even just after a check of the traits; enabled, it takes again."""
    with record_placement_calls(small_cluster) as (placement, requested_paths):
        # The compute checks again within 20 s; the test shortens that.
        compute = make_tuned(
            small_cluster, TOY, numbers={'queue.MAX_ROOM_AGE_SECONDS': 2}, placement=placement, queues=True
        )
        wait_address(
            small_cluster, enqueue_request(small_cluster)
        )  # so it has just checked its traits and knows that it has room
        assert run_in_process(small_cluster, 'host', 'disable', compute.uuid).code == 0
        requested_paths.clear()
        instance = enqueue_request(small_cluster)
        expect_not_taken(small_cluster, requested_paths, compute, instance)
        other = small_cluster.ecompute(queues=True)
        assert wait_state(small_cluster, instance, 'active')['compute'] == other.uuid
        other.stop()
        assert run_in_process(small_cluster, 'host', 'enable', compute.uuid).code == 0
        next_request = enqueue_request(small_cluster)
        wait_until(lambda: list_waiting(small_cluster) == [], 40, 'it has looked again, and takes it')
        assert wait_state(small_cluster, next_request, 'active')['compute'] == compute.uuid
        other.start()
        check_settled(small_cluster, compute, other)


# A queued request whose uuid was used before, as another client may write it: it is refused or destroyed.


SHARED_KEYS = ('/names/web1', '/groups/web', '/quotas/shop')
SHARED_OPTIONS = ('--project', 'shop', '--name', 'web1', '--group', 'web', '--policy', 'affinity')


def read_used_instances(control: Control) -> int:
    """Return the number of instances that the quota counts."""
    shown = run_in_process(control, 'quota', 'show', 'shop', '-f', 'json')
    return int(json.loads(shown.stdout)['used'].get('instances', 0))


def queue_with_record(control: Control, compute: str, state: str) -> tuple[str, Record]:
    """Queue a request with a name, a group and a quota, whose uuid has a record on the compute.

    Returns the instance and that record.
    """
    assert run_in_process(control, 'quota', 'set', 'shop', 'instances=5').code == 0
    instance = enqueue_request(control, *SHARED_OPTIONS)
    past = Record(instance, compute, state, resources={'VCPU': 1}, user_id='u', project_id='shop')
    past = past if state == GONE else replace(past, error=Failure('image', 'not found', 'nothing is left'))
    key = f'/instances/{compute or "none"}/{instance}'
    control.etcd.put(key, to_json(past), control.etcd.grant())
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


def test_queued_uuid_of_an_active_instance_leaves_only_the_queue(small_cluster: Control, compute: Ecompute) -> None:
    assert run_in_process(small_cluster, 'quota', 'set', 'shop', 'instances=5').code == 0
    _, instance = place(small_cluster, SMALL_QUERY.replace('VCPU:1', 'VCPU:2'), *SHARED_OPTIONS)
    wait_state(small_cluster, instance, 'active')
    compute.pause()
    shared = [small_cluster.etcd.get(key) for key in SHARED_KEYS]
    other = enqueue_request(small_cluster)
    value = json.loads(small_cluster.etcd.get(f'/queues/small/{other}') or '')
    small_cluster.etcd.put(
        f'/queues/small/{instance}', json.dumps({**value, 'instance': instance, 'project_id': 'shop'})
    )
    compute.resume()
    wait_until(lambda: list_waiting(small_cluster) == [], 20, 'it is refused')
    assert wait_log_lines(compute, ' ERROR ', instance, 'Fix: use another uuid')
    assert [small_cluster.etcd.get(key) for key in SHARED_KEYS] == shared
    assert read_allocations(small_cluster)[instance] == {compute.uuid: {'VCPU': 2, 'DISK_GB': 1, 'MEMORY_MB': 128}}
    wait_state(small_cluster, instance, 'active')
    check_settled(small_cluster, compute)


@pytest.mark.parametrize(('where', 'state'), [('a compute', GONE), ('a compute', ERROR), ('', GONE)])
def test_destroy_of_a_queued_uuid_with_a_record(small_cluster: Control, where: str, state: str) -> None:
    instance, past = queue_with_record(small_cluster, where and small_cluster.ecompute().uuid, state)
    key = small_cluster.etcd.find_record_key(instance)
    assert_one_line(run_in_process(small_cluster, 'destroy', instance), 0, instance, 'removed from its queue')
    assert list_waiting(small_cluster) == []
    assert has_no_shared_keys(small_cluster)
    assert small_cluster.etcd.get(key) == to_json(past).encode()
    if state == GONE:
        assert_one_line(run_in_process(small_cluster, 'destroy', instance), 4, instance, 'gone')


# The pull queue with stale taker keys, malformed values, and changes during a take.


# Seconds for which a compute of these tests trusts its own room and traits.
TRUST_SECONDS = 0.5


def test_request_with_a_stale_taker_key_is_taken_later(small_cluster: Control) -> None:
    instance = enqueue_request(small_cluster)
    taker_key = json.dumps({'version': 1, 'compute': str(uuid.uuid4())})
    lease = small_cluster.etcd.call('lease/grant', {'TTL': 3600})['ID']
    key = f'/queues/small/{instance}/taker'
    small_cluster.etcd.call('kv/put', {'key': b64(key), 'value': b64(taker_key), 'lease': lease})
    compute = small_cluster.ecompute(queues=True)
    later = enqueue_request(small_cluster)
    wait_state(small_cluster, later, 'active')
    assert read_record(small_cluster, instance) is None
    expire_key(small_cluster, key)
    wait_state(small_cluster, instance, 'active')
    check_settled(small_cluster, compute)


def test_malformed_queued_requests_block_no_other(small_cluster: Control) -> None:
    names = [str(uuid.uuid4()) for _ in range(3)]
    small_cluster.etcd.put(f'/queues/small/{names[0]}', 'no request')
    small_cluster.etcd.put(f'/queues/small/{names[1]}', json.dumps({'version': 99}))
    small_cluster.etcd.put(
        f'/queues/none/{names[2]}', json.dumps({'version': 1, 'instance': names[2], 'flavor': 'small'})
    )
    small_cluster.etcd.put('/queues/small/not-a-uuid', '{}')
    compute = small_cluster.ecompute(queues=True)
    wait_state(small_cluster, enqueue_request(small_cluster), 'active')
    listed = small_cluster.eschedule('list')
    assert listed.code == 0
    assert sum(' queued ' in line for line in listed.stdout.splitlines()) == 3
    assert 'no compute takes it: not JSON' in small_cluster.eschedule('show', names[0]).stdout
    for name in names:
        assert small_cluster.eschedule('destroy', name).code == 0
    small_cluster.etcd.delete('/queues/small/not-a-uuid')
    wait_until(lambda: small_cluster.etcd.list_keys('/queues/') == [], 10, 'all of them are gone')
    check_settled(small_cluster, compute)


def test_queued_requests_obey_groups_and_quotas(small_cluster: Control) -> None:
    assert run_in_process(small_cluster, 'quota', 'set', 'shop', 'instances=4').code == 0
    words = ('--project', 'shop', '--group', 'web', '--policy', 'anti-affinity')
    instances = [enqueue_request(small_cluster, *words) for _ in range(3)]
    # A request counts from the moment it waits, and the first member defines the group even before it is placed.
    assert (
        json.loads(run_in_process(small_cluster, 'quota', 'show', 'shop', '-f', 'json').stdout)['used']['instances']
        == 3
    )
    assert_one_line(
        run_in_process(small_cluster, '--queue', '--flavor', 'small', '--group', 'web', '--soft'),
        5,
        'strict anti-affinity',
    )
    assert_one_line(
        run_in_process(small_cluster, '--queue', '--flavor', 'small', '--group', 'new'), 2, 'group new does not exist'
    )
    enqueue_request(small_cluster, '--project', 'shop')
    refused = run_in_process(small_cluster, '--queue', '--flavor', 'small', '--project', 'shop')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert (
        'the quota of project shop does not allow this request: instances: limit 4, used 4, requested 1'
        in refused.stderr
    )
    first_compute, second_compute = small_cluster.ecompute(TOY, queues=True), small_cluster.ecompute(TOY, queues=True)
    allocated = wait_until(
        lambda: len(list_waiting(small_cluster)) == 1 and read_allocations(small_cluster), 30, 'all but one are taken'
    )
    assert allocated
    (waiting_one,) = list_waiting(small_cluster)
    assert waiting_one in instances
    group_members = json.loads(run_in_process(small_cluster, 'group', 'show', 'web', '-f', 'json').stdout)['members']
    compute_of = {member['instance']: member['compute'] for member in group_members}
    assert {compute_of[instance] for instance in instances if instance != waiting_one} == {
        first_compute.uuid,
        second_compute.uuid,
    }
    assert compute_of[waiting_one] is None
    # The end of one member lets the next be taken; a cancelled request leaves group and quota.
    first = next(instance for instance in instances if instance != waiting_one)
    assert run_in_process(small_cluster, 'destroy', '--wait', first).code == 0
    wait_until(lambda: list_waiting(small_cluster) == [], 30, 'the last one is taken')
    wait_address(small_cluster, waiting_one)
    last = enqueue_request(small_cluster, '--project', 'shop', '--group', 'web')
    assert run_in_process(small_cluster, 'destroy', last).code == 0
    assert (
        json.loads(run_in_process(small_cluster, 'quota', 'show', 'shop', '-f', 'json').stdout)['used']['instances']
        == 3
    )
    assert last not in run_in_process(small_cluster, 'group', 'show', 'web').stdout
    assert (
        'it waited in a queue, and this compute took the request'
        in run_in_process(small_cluster, 'why', waiting_one).stdout
    )
    check_settled(small_cluster, first_compute, second_compute)


@pytest.mark.unaudited('the audit finds the key that is planted here')
def test_malformed_group_blocks_only_its_members(small_cluster: Control) -> None:
    blocked = enqueue_request(small_cluster, '--group', 'web', '--policy', 'affinity')
    small_cluster.etcd.put('/groups/web', '{"version": 99}')
    other = enqueue_request(small_cluster)
    small_cluster.ecompute(queues=True)
    wait_address(small_cluster, other)
    assert list_waiting(small_cluster) == [blocked]
    assert_one_line(
        run_in_process(small_cluster, '--queue', '--flavor', 'small', '--group', 'web'), 1, '/groups/web', 'etcdctl del'
    )
    audit_result = run_in_process(small_cluster, 'audit')
    assert (audit_result.code, audit_result.stdout.count('group-unreadable')) == (8, 1), audit_result
    # After the printed cure the request is taken.
    small_cluster.etcd.delete('/groups/web')
    wait_address(small_cluster, blocked)
    assert blocked in run_in_process(small_cluster, 'group', 'show', 'web').stdout


@pytest.mark.unaudited('the audit finds those that wait in vain')
def test_requests_of_removed_flavors_block_no_other(small_cluster: Control) -> None:
    compute = small_cluster.ecompute(queues=True)
    for _ in range(3):  # a fuller compute waits longer before it takes
        wait_address(small_cluster, place(small_cluster)[1])
    flavors = [f'old-{number}' for number in range(20)]
    compute.pause()  # so that it finds all of them without their flavors
    for flavor in flavors:
        assert run_in_process(small_cluster, 'flavor', 'set', flavor, SMALL_QUERY).code == 0
        enqueue_request(small_cluster, '--flavor', flavor)
        words = 'no compute takes the 1 request in its queue. Fix: set the flavor again, or destroy the instances'
        assert_one_line(
            run_in_process(small_cluster, 'flavor', 'delete', flavor), 0, f'flavor {flavor}: removed', words
        )
    valid = enqueue_request(small_cluster)
    compute.resume()
    wait_state(small_cluster, valid, 'active')
    assert len(list_waiting(small_cluster)) == len(flavors)
    audit_result = run_in_process(small_cluster, 'audit')
    assert (audit_result.code, audit_result.stdout.count('queued-flavorless')) == (8, len(flavors)), audit_result
    # With its flavor set again, the oldest of them is taken as soon as there is room.
    assert run_in_process(small_cluster, 'destroy', '--wait', valid).code == 0
    last = list_waiting(small_cluster)
    assert run_in_process(small_cluster, 'flavor', 'set', flavors[0], SMALL_QUERY).code == 0
    wait_until(lambda: len(list_waiting(small_cluster)) < len(last), 20, 'one is taken')
    (taken_instance,) = set(last) - set(list_waiting(small_cluster))
    wait_address(small_cluster, taken_instance)


def test_one_request_makes_one_compute_query_placement(small_cluster: Control) -> None:
    """Otherwise a thousand waiting computes would each query placement for one request."""
    with record_placement_calls(small_cluster) as (placement, requested_paths):
        computes = [make_tuned(small_cluster, TOY, placement=placement, queues=True) for _ in range(6)]
        trait_paths = {f'/resource_providers/{taker.uuid}/traits' for taker in computes}
        requested_paths.clear()
        instance = enqueue_request(small_cluster)
        wait_address(small_cluster, instance)
        active_record = require_record(small_cluster, instance)
        assert set(requested_paths) & trait_paths == {f'/resource_providers/{active_record["compute"]}/traits'}
        check_settled(small_cluster, *computes)


def test_take_checks_the_current_traits(small_cluster: Control) -> None:
    """A compute that was disabled unseen notices before it takes, and another one takes."""
    with record_placement_calls(small_cluster) as (placement, requested_paths):
        disabled_compute = make_tuned(
            small_cluster, TOY, numbers={'queue.MAX_ROOM_AGE_SECONDS': TRUST_SECONDS}, placement=placement, queues=True
        )
        wait_address(small_cluster, enqueue_request(small_cluster))  # it has read its traits
        time.sleep(2 * TRUST_SECONDS)  # until it no longer trusts them
        trait = f'/resource_providers/{disabled_compute.uuid}/traits'
        current = small_cluster.placement.call('GET', trait)
        generation = current['resource_provider_generation']
        body = {'traits': ['COMPUTE_STATUS_DISABLED', *current['traits']], 'resource_provider_generation': generation}
        small_cluster.placement.call('PUT', trait, body)
        requested_paths.clear()
        instance = enqueue_request(small_cluster)
        expect_not_taken(small_cluster, requested_paths, disabled_compute, instance)
        other = small_cluster.ecompute(TOY, queues=True)
        wait_address(small_cluster, instance)
        active_record = require_record(small_cluster, instance)
        assert active_record['compute'] == other.uuid
        check_settled(small_cluster, disabled_compute, other)


# Many requests in a queue, and many computes that take them, half of which are killed while they do.


INVENTORY = 'VCPU:16,DISK_GB:100,MEMORY_MB:16384'
FAILPOINTS = 'marked', 'taken', 'moved'
LONG_SECONDS = 600.0

SMALL_LOAD = pytest.param(4, 32, id='few')
LARGE_LOAD = pytest.param(50, 500, id='many', marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


def make_computes(control: Control, count: int) -> list[TunedEcompute]:
    """Make computes that take from queues, without starting them."""
    return [make_tuned(control, INVENTORY, start=False, queues=True) for _ in range(count)]


def start_computes(computes: Sequence[ArmedEcompute]) -> None:
    """Start the computes, four at a time."""
    for first in range(0, len(computes), 4):
        batch = computes[first : first + 4]
        # No threads here: a process that a thread starts would end together with the thread.
        for taker in batch:
            taker.launch()
        for taker in batch:
            taker.wait_ready()


def enqueue_requests(control: Control, count: int) -> set[str]:
    """Queue this many requests; return their uuids."""
    return {enqueue_request(control) for _ in range(count)}


def read_states(control: Control) -> dict[str, str]:
    """Return the state of each instance in etcd; settled() checks that none is in two places."""
    queued, scheduled, recorded = {}, {}, {}
    for key, stored in read_lasting_keys(control).items():
        family, name = key.split('/')[1], key.rsplit('/', 1)[1]
        if family == 'instances':
            recorded[name] = json.loads(stored.value)['state']
        elif family == 'hosts':
            scheduled[name] = 'scheduled'
        elif family == 'queues' and name != 'taker':
            queued[name] = 'queued'
    return queued | scheduled | recorded


def measure_imbalance(control: Control, computes: Sequence[ArmedEcompute]) -> float:
    """Return the difference between the largest and the smallest share of used VCPU."""
    used = Counter(provider for held in read_allocations(control).values() for provider in held)
    shares = [used[taker.uuid] / 16 for taker in computes]
    return max(shares) - min(shares)


@pytest.mark.slow
@pytest.mark.parametrize(('count', 'requests'), [SMALL_LOAD, LARGE_LOAD])
def test_requests_are_taken_though_half_the_computes_are_killed(
    small_cluster: Control, count: int, requests: int
) -> None:
    all_computes = make_computes(small_cluster, count)
    dying = all_computes[: count // 2]
    for number, victim in enumerate(dying):
        victim.failpoint = f'{FAILPOINTS[number % len(FAILPOINTS)]}:kill'
    start_computes(all_computes)
    instances = enqueue_requests(small_cluster, requests)
    for victim in dying:
        wait_killed_at(victim, victim.failpoint.removesuffix(':kill'), LONG_SECONDS)
        victim.failpoint = ''
    start_computes(dying)
    wait_until(lambda: set(read_states(small_cluster).values()) == {'active'}, LONG_SECONDS, 'all are active')
    assert read_states(small_cluster).keys() == instances
    held = read_allocations(small_cluster)
    assert held.keys() == instances
    assert all(len(providers) == 1 for providers in held.values())
    check_settled(small_cluster, *all_computes)
    all_guests = [instance for taker in all_computes for instance in read_guests(taker)]
    assert sorted(all_guests) == sorted(instances), 'each has one guest, on one compute'


def test_idle_compute_takes_before_a_nearly_full_one(small_cluster: Control) -> None:
    both_computes = make_computes(small_cluster, 2)
    start_computes(both_computes)
    full, idle = both_computes
    done = run_in_process(small_cluster, SMALL_QUERY, '--count', '15', '--on', full.uuid)
    assert done.code == 0, done
    # One after the other, so that both can take each; the full one waits nearly 0.2 s longer.
    for _ in range(4):
        (instance,) = enqueue_requests(small_cluster, 1)
        assert wait_state(small_cluster, instance, 'active')['compute'] == idle.uuid
    check_settled(small_cluster, *both_computes)


# The final balance depends on waits of a few ms, which a busy machine does not keep.
@pytest.mark.slow
@pytest.mark.parametrize(('count', 'requests'), [SMALL_LOAD, LARGE_LOAD])
def test_queue_balances_like_spread(small_cluster: Control, count: int, requests: int) -> None:
    """The pull queue must balance about as well as eschedule's own spread under the same load."""
    all_computes = make_computes(small_cluster, count)
    start_computes(all_computes)
    for _ in range(requests):
        assert run_in_process(small_cluster, SMALL_QUERY).code == 0
    spread_imbalance = measure_imbalance(small_cluster, all_computes)
    # Ten at a time: more would exceed what this single-threaded placement answers in time.
    wait_until(lambda: set(read_states(small_cluster).values()) == {'active'}, LONG_SECONDS, 'all of them are active')
    placed = sorted(read_allocations(small_cluster))
    for first in range(0, len(placed), 10):
        assert (
            run_in_process(
                small_cluster, 'destroy', '--wait', '--timeout', str(LONG_SECONDS), *placed[first : first + 10]
            ).code
            == 0
        )

    instances = enqueue_requests(small_cluster, requests)

    # Poll etcd and not placement, which is busy.
    wait_until(
        lambda: Counter(read_states(small_cluster).values())['active'] == requests,
        LONG_SECONDS,
        'all of them are active',
    )
    assert read_allocations(small_cluster).keys() == instances
    queue_imbalance = measure_imbalance(small_cluster, all_computes)
    sys.stdout.write(
        f'\n{count} computes, {requests} requests: spread {spread_imbalance:.3f}, pull {queue_imbalance:.3f}\n'
    )
    assert queue_imbalance <= spread_imbalance + 0.2
    check_settled(small_cluster, *all_computes)
