"""Queues: waiting requests, uuids with a past, malformed values, and load.

Words of commands are in tests/golden, races and lost messages in tests/functional/test_queues.py and tests/model.
"""

from __future__ import annotations

import json
import re
import socket
import uuid
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ecomp.model.record import Failure, Record, from_json
from ecomp.model.states import ERROR, GONE
from ecomp.model.stored import encode
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import ArmedEcompute, check_settled, read_guests, wait_killed_at
from tests.kit.invariants import read_allocations, read_lasting_keys
from tests.kit.servers import wait_until
from tests.kit.sharing import read_members, read_usage
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    assert_one_line,
    require_record,
    run_in_process,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import TunedEcompute, make_tuned
from tests.scenario.queued import TOY, enqueue_request, expect_not_taken, list_waiting, record_placement_calls

# The pull queue: requests wait in the queue of their flavor, and computes take those that they have room for.


def test_waiting_request_is_shown_by_every_command_and_can_be_cancelled(small_cluster: Control) -> None:
    idle = small_cluster.ecompute()  # takes nothing from queues
    instance = enqueue_request(small_cluster, '--name', 'web1')
    assert small_cluster.eschedule('list').stdout.splitlines()[1].split()[:5] == [instance, 'web1', 'queued', '-', '-']
    for word in (instance, instance[:8], 'web1'):
        shown = json.loads(small_cluster.eschedule('show', word, '-f', 'json').stdout)
        assert (shown['state'], shown['query']) == ('queued', SMALL_QUERY)
    # Each reports that no compute takes queued requests.
    unserved = 'eschedule: web1 waits in a queue, but no compute takes queued requests. Fix: set `queues: True` in the'
    results = [small_cluster.eschedule(*words) for words in (['web1'], ['wait', 'web1', '--timeout', '0.2'])]
    assert [result.code for result in results] == [6, 6]
    for result in (*results, small_cluster.eschedule('list')):
        assert [line for line in result.stderr.splitlines() if line.startswith(unserved)], result
    assert 'it waits in a queue, but no compute takes' in small_cluster.eschedule('show', 'web1').stdout
    assert 'no compute takes queued requests' in small_cluster.eschedule('why', 'web1').stdout
    findings = json.loads(small_cluster.eschedule('check', '-f', 'json').stdout)
    assert [f'eschedule: {each["sentence"]}. Fix: {each["how"]}' for each in findings if each['code'] == 'queue']
    assert_one_line(small_cluster.eschedule('stop', 'web1'), 5, 'is queued: no compute has taken it yet')
    # Its name and its uuid are in use.
    for words in ((SMALL_QUERY,), ('--queue', '--flavor', 'small')):
        assert_one_line(small_cluster.eschedule(*words, '--name', 'web1'), 5, 'name taken by instance')
    assert_one_line(small_cluster.eschedule(SMALL_QUERY, '--uuid', instance, '--name', 'web1'), 5, 'waits in a queue')
    assert read_allocations(small_cluster) == {}

    assert small_cluster.eschedule('destroy', '--wait', 'web1').code == 0
    assert [key for key in read_lasting_keys(small_cluster) if key.startswith(('/queues/', '/names/'))] == []
    assert wait_state(small_cluster, instance, 'gone')['compute'] == ''
    for words in ((SMALL_QUERY,), ('--queue', '--flavor', 'small')):
        assert_one_line(small_cluster.eschedule(*words, '--uuid', instance), 5, 'a uuid is never used twice')
    check_settled(small_cluster, idle)


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


# A new compute takes older requests once etcd has run for 70 s with a compute: it may have been restored.
TRUSTING = {'.shared.presence.MAX_UNPROVEN_SECONDS': 0}


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
    other = make_tuned(small_cluster, numbers=TRUSTING, queues=True)
    wait_state(small_cluster, small_ones[1], 'active')
    assert list_waiting(small_cluster) == [never]
    assert small_cluster.eschedule('destroy', never).code == 0
    check_settled(small_cluster, compute, other)


def test_disabled_compute_takes_nothing(small_cluster: Control) -> None:
    """The disable counts even just after a take, and after an enable it takes again."""
    with record_placement_calls(small_cluster) as (placement, requested_paths):
        # The compute checks again within 20 s; the test shortens that.
        numbers = {'queue.DISABLED_INTERVAL_SECONDS': 2}
        compute = make_tuned(small_cluster, TOY, numbers=numbers, placement=placement, queues=True)
        wait_address(
            small_cluster, enqueue_request(small_cluster)
        )  # so it has just checked its traits and knows that it has room
        assert run_in_process(small_cluster, 'host', 'drain', compute.uuid).code == 0
        requested_paths.clear()
        instance = enqueue_request(small_cluster)
        expect_not_taken(small_cluster, requested_paths, compute, instance)
        other = make_tuned(small_cluster, numbers=TRUSTING, queues=True)
        assert wait_state(small_cluster, instance, 'active')['compute'] == other.uuid
        other.stop()
        assert run_in_process(small_cluster, 'host', 'enable', compute.uuid).code == 0
        next_request = enqueue_request(small_cluster)
        wait_until(lambda: list_waiting(small_cluster) == [], 40, 'it has looked again, and takes it')
        assert wait_state(small_cluster, next_request, 'active')['compute'] == compute.uuid
        other.start()
        check_settled(small_cluster, compute, other)


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


def test_queued_requests_obey_groups_and_quotas(small_cluster: Control) -> None:
    assert run_in_process(small_cluster, 'quota', 'set', 'shop', 'instances=4').code == 0
    words = ('--project', 'shop', '--group', 'web', '--policy', 'anti-affinity')
    instances = [enqueue_request(small_cluster, *words) for _ in range(3)]
    # A request counts from the moment it waits, and the first member defines the group even before it is placed.
    assert read_usage(small_cluster, 'shop')['instances'] == 3
    queue = ('--queue', '--flavor', 'small')
    assert_one_line(run_in_process(small_cluster, *queue, '--group', 'web', '--soft'), 5, 'strict anti-affinity')
    enqueue_request(small_cluster, '--project', 'shop')
    refused = run_in_process(small_cluster, *queue, '--project', 'shop')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert 'instances: limit 4, used 4, requested 1' in refused.stderr
    computes = [make_tuned(small_cluster, TOY, numbers=TRUSTING, queues=True) for _ in range(2)]
    wait_until(
        lambda: len(list_waiting(small_cluster)) == 1 and read_allocations(small_cluster), 30, 'all but one are taken'
    )
    (waiting,) = list_waiting(small_cluster)
    taken = [instance for instance in instances if instance != waiting]
    members = read_members(small_cluster, 'web')
    assert {members[instance] for instance in taken} == {compute.uuid for compute in computes}
    assert (len(taken), members[waiting]) == (2, '')
    # The end of one member lets the next be taken; a cancelled request leaves group and quota.
    assert run_in_process(small_cluster, 'destroy', '--wait', taken[0]).code == 0
    wait_until(lambda: list_waiting(small_cluster) == [], 30, 'the last one is taken')
    wait_address(small_cluster, waiting)
    last = enqueue_request(small_cluster, '--project', 'shop', '--group', 'web')
    assert run_in_process(small_cluster, 'destroy', last).code == 0
    assert read_usage(small_cluster, 'shop')['instances'] == 3
    assert last not in read_members(small_cluster, 'web')
    why = run_in_process(small_cluster, 'why', waiting).stdout
    assert 'it waited in a queue, and this compute took the request' in why
    check_settled(small_cluster, *computes)


def test_one_request_makes_one_compute_query_placement(small_cluster: Control) -> None:
    """Otherwise a thousand waiting computes would each query placement for one request."""
    with record_placement_calls(small_cluster) as (placement, requested_paths):
        computes = [make_tuned(small_cluster, TOY, placement=placement, queues=True) for _ in range(6)]
        trait_paths = {f'/resource_providers/{taker.uuid}/traits' for taker in computes}
        # They have read their providers then.
        wait_until(lambda: len(small_cluster.etcd.list_keys('/facts/')) == len(computes), 20, 'all publish facts')
        requested_paths.clear()
        instance = enqueue_request(small_cluster)
        wait_address(small_cluster, instance)
        active_record = require_record(small_cluster, instance)
        assert set(requested_paths) & trait_paths == {f'/resource_providers/{active_record["compute"]}/traits'}
        check_settled(small_cluster, *computes)


# Many requests in a queue, and many computes that take them, half of which are killed while they do.


INVENTORY = 'VCPU:16,DISK_GB:100,MEMORY_MB:16384'
FAILPOINTS = 'marked', 'taken', 'moved'
LONG_SECONDS = 600.0

SMALL_LOAD = pytest.param(4, 32, id='few')
LARGE_LOAD = pytest.param(50, 500, id='many', marks=[pytest.mark.slow, pytest.mark.timeout(1800)])


def make_computes(control: Control, count: int) -> list[TunedEcompute]:
    return [make_tuned(control, INVENTORY, start=False, queues=True) for _ in range(count)]


def start_computes(computes: Sequence[ArmedEcompute]) -> None:
    for first in range(0, len(computes), 4):
        batch = computes[first : first + 4]
        # No threads here: a process that a thread starts would end together with the thread.
        for taker in batch:
            taker.launch()
        for taker in batch:
            taker.wait_ready()


def enqueue_requests(control: Control, count: int) -> set[str]:
    return {enqueue_request(control) for _ in range(count)}


def read_states(control: Control) -> dict[str, str]:
    """Return the state of each instance in etcd: settled() checks that none is in two places."""
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


@pytest.mark.slow
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
