"""The pull queue: requests wait by their flavor, and computes take what they have room for.

What waits and is odd, or changed by somebody else, is in test_queue_odd.py.
"""

from __future__ import annotations

import json
import re
import socket
import uuid

from tests.kit.commands import Control, write_config
from tests.kit.hands import settled
from tests.kit.invariants import allocations, everything
from tests.kit.servers import until
from tests.kit.story import IMAGE, SMALL, addressed, called, logs, one_line, place, reached
from tests.kit.tuned import tuned
from tests.scenario.queued import TOY, leaves_it, overheard, queue, waiting


def test_taken_by_a_compute_that_asks_for_work(small: Control) -> None:
    compute = small.ecompute(queues=True)
    done = small.eschedule('--queue', '--flavor', 'small', IMAGE, '--name', 'web1', '--wait')
    instance, address = re.fullmatch(r'QUEUED INSTANCE (\S+)\n(\S+)\n', done.stdout).groups()  # type: ignore[union-attr]
    assert address == addressed(small, instance)
    found = reached(small, instance, 'active')
    assert (found['compute'], found['name'], found['image'], found['query']) == (compute.uuid, 'web1', IMAGE, SMALL)
    assert {'requested', 'scheduled', 'started'} <= set(found['stages'])
    assert allocations(small) == {instance: {compute.uuid: {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}}}
    assert logs(compute, f'took instance {instance} from the queue of flavor small')
    assert waiting(small) == []
    settled(small, compute)


def test_what_waits_is_seen_everywhere(small: Control) -> None:
    compute = small.ecompute()  # which asks for no work
    instance = queue(small, '--name', 'web1')
    assert small.eschedule('list').stdout.splitlines()[1].split()[:5] == [instance, 'web1', 'queued', '-', '-']
    for word in (instance, instance[:8], 'web1'):
        shown = json.loads(small.eschedule('show', word, '-f', 'json').stdout)
        assert (shown['state'], shown['query'], shown['image']) == ('queued', SMALL, json.loads(
            everything(small)[f'/queues/small/{instance}'].value)['image'])  # fmt: skip
    assert ' queued ' in small.eschedule('timeline', 'web1').stdout
    # The last line of each, for each says too that nobody takes from queues.
    unserved = 'eschedule: web1 waits in a queue, and no compute takes from queues: `queues: True` in the compute.yaml'
    asked = small.eschedule('web1')
    assert (asked.code, asked.stdout) == (6, '')
    assert 'no address yet: queued, waiting for: a compute to take it' in asked.stderr
    waited = small.eschedule('wait', 'web1', '--timeout', '0.2')
    assert waited.code == 6
    assert waited.stderr.endswith('web1: 0.2 s are up, still waiting for: a compute to take it; it goes on\n')
    for said in (asked, waited, small.eschedule('list'), small.eschedule('audit')):
        assert [line for line in said.stderr.splitlines() if line.startswith(unserved)], said
    assert 'waits      it waits in a queue, and no compute takes' in small.eschedule('show', 'web1').stdout
    doctor = small.eschedule('doctor', '-f', 'json')
    assert [each['cure'] for each in json.loads(doctor.stdout)['findings'] if each['check'] == 'queue'] == [
        '`queues: True` in the compute.yaml of one has it do so'
    ]
    assert small.eschedule('list', '--state', 'active').stderr == ''
    one_line(small.eschedule('stop', 'web1'), 5, 'waits for a compute to take it')
    # Its name and its uuid are taken.
    one_line(small.eschedule(SMALL, '--name', 'web1'), 5, f'is the name of instance {instance}')
    one_line(small.eschedule('--queue', '--flavor', 'small', '--name', 'web1'), 5, 'is the name of instance')
    one_line(small.eschedule(SMALL, '--uuid', instance, '--name', 'web1'), 5, 'waits in a queue')
    assert allocations(small) == {}
    settled(small, compute)


def test_why_it_waits(small: Control) -> None:
    asked = small.eschedule('--queue', '--flavor', 'small', '--name', 'web1')
    assert asked.code == 0, asked
    assert asked.stderr == (
        'eschedule: it waits: no compute takes from queues: `queues: True` in the compute.yaml of one has it do so\n'
    )
    first, none, query = 'web1 waits in the queue of flavor small since 2', 'no compute takes from queues', SMALL
    lines = small.eschedule('why', 'web1').stdout.splitlines()
    assert lines[0].startswith(first)
    assert lines[0].endswith(', and is the next of it')
    assert [lines[1], lines[2][: len(none)], len(lines)] == [f'it asked for {query}', none, 3]

    compute = small.ecompute(queues=True)
    reached(small, record_of(small, 'web1'), 'active')
    assert small.eschedule('--count', '3', SMALL).code == 0
    full = small.eschedule('--queue', '--flavor', 'small', '--name', 'web2')
    assert (full.code, full.stderr) == (0, '')
    queue(small, '--name', 'web3')
    lines = small.eschedule('why', 'web3').stdout.splitlines()
    assert lines[0].endswith(', behind 1 other')
    host, lack = socket.gethostname(), 'VCPU short by 1 (free 0 of 4); MEMORY_MB short by 128 (free 0 of 512)'
    assert lines[1:] == [f'it asked for {query}', f'{host}: {lack}']
    told = json.loads(small.eschedule('why', 'web3', '-f', 'json').stdout)['waits']
    lacks = {'compute': compute.uuid, 'host': host, 'lacks': lack}
    assert told == {
        'flavor': 'small', 'since': told['since'], 'before': 1, 'taker': None, 'claimed_on': None, 'computes': [lacks],
    }  # fmt: skip
    assert small.eschedule('destroy', '--wait', 'web1', 'web2', 'web3').code == 0


def record_of(control: Control, name: str) -> str:
    """The uuid of who is called so."""
    return str(json.loads(control.eschedule('show', name, '-f', 'json').stdout)['instance'])


def test_cancelled(small: Control) -> None:
    instance = queue(small, '--name', 'web1')
    done = small.eschedule('destroy', '--wait', 'web1')
    assert done.code == 0
    assert done.stderr.splitlines() == [
        'eschedule: web1: taken out of its queue, nothing of it was begun', 'eschedule: web1: gone'
    ]  # fmt: skip
    assert [key for key in everything(small) if key.startswith(('/queues/', '/names/'))] == []
    assert reached(small, instance, 'gone')['compute'] == ''
    assert small.eschedule('list', '--all').stdout.splitlines()[1].split()[:5] == [instance, 'web1', 'gone', '-', '-']
    one_line(small.eschedule('destroy', instance), 4, 'gone since')
    one_line(small.eschedule('--queue', '--flavor', 'small', '--uuid', instance), 5, 'a uuid is never used twice')
    one_line(small.eschedule(SMALL, '--uuid', instance), 5, 'a uuid is never used twice')
    compute = small.ecompute(queues=True)
    settled(small, compute)


def test_the_same_again_changes_nothing(small: Control) -> None:
    instance = str(uuid.uuid4())
    words = '--queue', '--flavor', 'small', '--uuid', instance, '--name', 'web1'
    assert small.eschedule(*words).stdout == f'QUEUED INSTANCE {instance}\n'
    before = small.etcd.get(f'/queues/small/{instance}')
    again = small.eschedule(*words)
    assert again.stdout == f'QUEUED INSTANCE {instance}\n'
    one_line(again, 0, 'requested before', 'nothing is changed')
    assert small.etcd.get(f'/queues/small/{instance}') == before
    assert small.etcd.keys('/requests/') == []
    other = '--queue', '--flavor', 'small', '--uuid', instance
    one_line(small.eschedule(*other, '--name', 'web2'), 5, 'exists, by the name web1')
    one_line(small.eschedule(*words, 'http://images.invalid/another.qcow2'), 5, 'exists, asked for by')
    compute = small.ecompute(queues=True)
    reached(small, instance, 'active')
    taken = small.eschedule(*words)
    assert taken.stdout == f'NOTIFIED TARGET, {compute.uuid}, OF INSTANCE {instance}\n'
    one_line(taken, 0, f'{instance} was requested before: nothing is changed')
    (told,) = json.loads(small.eschedule(*words, '-f', 'json').stdout)
    assert told == {'instance': instance, 'compute': compute.uuid, 'host': socket.gethostname(), 'name': 'web1'}
    settled(small, compute)


def test_user_data_rides_by_its_hash(small: Control) -> None:
    (small.directory / 'user-data').write_text('#cloud-config\n')
    compute = small.ecompute(queues=True)
    instance = queue(small, '--user-data', str(small.directory / 'user-data'))
    reached(small, instance, 'active')
    request = json.loads(everything(small)[f'/hosts/{compute.uuid}/{instance}'].value)
    assert small.etcd.keys('/user-data/') == [f'/user-data/{request["user_data_sha256"]}']
    assert 'user_data' not in request
    settled(small, compute)


def test_what_is_asked_wrongly(small: Control) -> None:
    for words, said in {
        (SMALL,): 'give a --flavor',
        (SMALL, '--flavor', 'small'): 'takes no query on top',
        ('--flavor', 'small', '--on', 'hv1'): '--on does not go with --queue',
        ('--flavor', 'small', '--weigh', 'pack'): '--weigh does not go with --queue',
        ('--flavor', 'small', '--count', '2'): '--count does not go with --queue',
        ('--flavor', 'half'): 'flavor half asks for no MEMORY_MB, DISK_GB',
        ('--flavor', 'here'): f"no compute sees it: eschedule flavor set here '{SMALL}'",
    }.items():
        assert small.eschedule('flavor', 'set', 'half', 'resources=VCPU:1').code == 0
        write_config(small.schedule_yaml, small.etcd.endpoint, small.placement.url, flavors={'here': SMALL})
        one_line(small.eschedule('--queue', *words), 2, said)
    one_line(small.eschedule('--queue', '--flavor', 'none'), 4, 'none: no such flavor')
    one_line(small.eschedule('list', '--queue'), 2, '--queue does not go with this form')
    assert waiting(small) == []


def test_only_what_fits_is_taken_and_the_oldest_first(small: Control) -> None:
    assert small.eschedule('flavor', 'set', 'large', SMALL.replace('VCPU:1', 'VCPU:3')).code == 0
    assert small.eschedule('flavor', 'set', 'fast', f'{SMALL}&required=CUSTOM_NEVER').code == 0
    never = queue(small, '--flavor', 'fast')
    large, another = queue(small, '--flavor', 'large'), queue(small, '--flavor', 'large')
    few = [queue(small), queue(small)]
    compute = small.ecompute(queues=True)  # with room for four
    reached(small, large, 'active')
    reached(small, few[0], 'active')
    assert set(waiting(small)) == {never, another, few[1]}
    # What leaves makes room for what has waited longest and fits.
    assert small.eschedule('destroy', '--wait', large).code == 0
    reached(small, another, 'active')
    assert set(waiting(small)) == {never, few[1]}
    other = small.ecompute(queues=True)
    reached(small, few[1], 'active')
    assert waiting(small) == [never]
    assert small.eschedule('destroy', never).code == 0
    settled(small, compute, other)


def test_one_that_placement_refuses_holds_up_no_other(small: Control) -> None:
    """Its project's id is longer than placement takes: another client has put it there."""
    poison = str(uuid.uuid4())
    value = {
        **{'version': 1, 'instance': poison, 'flavor': 'small', 'query': SMALL, 'image': IMAGE},
        **{'user_id': 'u', 'project_id': 'p' * 300, 'stages': {'requested': '2026-11-21T08:00:00.000Z'}},
    }
    small.etcd.put(f'/queues/small/{poison}', json.dumps(value))
    good = [queue(small) for _ in range(3)]
    compute = small.ecompute(queues=True)
    for each in good:
        reached(small, each, 'active')
    assert 'placement refuses its claim' in reached(small, poison, 'error')['error']['reason']
    one_line(small.eschedule(poison), 1, 'placement refuses its claim')
    assert logs(compute, ' ERROR ', poison, 'placement refuses its claim')
    assert small.eschedule('destroy', poison).code == 0
    settled(small, compute)


def test_placed_and_taken_side_by_side(small: Control) -> None:
    compute = small.ecompute(queues=True)
    pushed = [place(small)[1] for _ in range(3)]
    taken, waits = queue(small), queue(small)
    reached(small, taken, 'active')
    assert waiting(small) == [waits]
    assert small.eschedule('destroy', pushed[0]).code == 0
    reached(small, waits, 'active')
    settled(small, compute)


def test_a_compute_that_is_disabled_takes_nothing(small: Control) -> None:
    """From the moment that `host disable` has returned, however lately the compute looked; and again once enabled."""
    with overheard(small) as (placement, asked):
        # That it looks again within 20 s is shown in less.
        compute = tuned(small, TOY, numbers={'queue.BELIEVED': 2}, placement=placement, queues=True)
        addressed(small, queue(small))  # so it has just looked, and knows of room for more
        assert called(small, 'host', 'disable', compute.uuid).code == 0
        asked.clear()
        instance = queue(small)
        leaves_it(small, asked, compute, instance)
        other = small.ecompute(queues=True)
        assert reached(small, instance, 'active')['compute'] == other.uuid
        other.stop()
        assert called(small, 'host', 'enable', compute.uuid).code == 0
        again = queue(small)
        until(lambda: waiting(small) == [], 40, 'it has looked again, and takes it')
        assert reached(small, again, 'active')['compute'] == compute.uuid
        other.start()
        settled(small, compute, other)
