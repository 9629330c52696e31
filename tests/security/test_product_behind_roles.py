"""The product with roles: all commands work, and no process is refused its own keys."""

from __future__ import annotations

import json
import socket
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")
pytest.importorskip('placement', reason="pip install '.[lab]'")

from ecomp.errors import Denied
from ecomp.placement.client import Placement
from ecomp.scheduler.operating import audit
from ecomp.store.client import Delete, Put
from tests.kit.servers import PlacementServer, until
from tests.kit.story import IMAGE, NOBODY, SMALL, SOON, one_line
from tests.security.product import OPERATOR, SCHEDULER, Product, product

ONE = 'compute-hv1'
TWO = 'compute-hv2'
HUGE = 'resources=VCPU:640,DISK_GB:1,MEMORY_MB:128'
CURE = '`elab certs DIR --enable` has to run again'


@pytest.fixture(scope='module')
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    directory = tmp_path_factory.mktemp('product')
    with PlacementServer(directory / 'placement') as placement, product(directory, placement) as started:
        started.does('flavor', 'set', 'small', SMALL, user=OPERATOR)
        yield started


@pytest.fixture(autouse=True)
def _well(cloud: Product) -> Iterator[None]:
    yield
    cloud.is_well()


def mended(cloud: Product, told: list[str]) -> list[str]:
    """Run a scheduler's audit --fix, collect its `messages`, and return the remaining codes."""
    with closing(cloud.cloud.store(SCHEDULER)) as store, closing(Placement(cloud.placement.url)) as client:
        report = audit.fix(store, client, told.append, apart=0.2)
    return [finding.code for finding in report.findings]


# What each role must be able to do.


def test_an_instance_and_all_that_is_asked_of_it(cloud: Product, tmp_path: Path) -> None:
    data = tmp_path / 'user-data'
    data.write_text('#!/bin/sh\n')
    compute, instance = cloud.place(SMALL, IMAGE, '--name', 'web', '--user-data', str(data))
    address = cloud.does('wait', 'web')
    assert cloud.does(instance) == address
    assert cloud.does('wait', 'web', '--for', 'addressed')
    assert instance in cloud.does('list')
    assert compute in cloud.does('show', 'web')
    for command in ('why', 'timeline'):
        assert cloud.does(command, 'web')
    assert compute in cloud.does('plan', SMALL, '--on', compute)
    for power, state in (('stop', 'stopped'), ('start', 'active'), ('reboot', 'active'), ('stop', 'stopped')):
        cloud.does(power, '--wait', 'web')
        cloud.reached(instance, state)
    cloud.does('destroy', '--wait', 'web')
    assert instance not in cloud.does('list')
    assert instance in cloud.does('list', '--all')
    assert cloud.entries('/names/') == {}


def test_a_set_in_a_group(cloud: Product, tmp_path: Path) -> None:
    data = tmp_path / 'user-data'
    data.write_text('#!/bin/sh\necho set\n')
    words = ['--count', '4', '--min', '2', '--group', 'apart', '--policy', 'anti-affinity', '--name', 'many']
    placed = json.loads(cloud.does(SMALL, *words, '--soft', '--user-data', str(data), '-f', 'json'))
    instances = [item['instance'] for item in placed]
    assert {item['compute'] for item in placed} == {item.uuid for item in cloud.computes.values()}
    cloud.does('wait', *instances)
    assert 'apart' in cloud.does('group', 'list')
    group = cloud.does('group', 'show', 'apart')
    assert all(item in group for item in instances)
    assert 'apart' in cloud.does('group', 'show', 'apart', user=OPERATOR)
    cloud.does('destroy', '--wait', *instances)
    assert cloud.entries('/groups/') == {}


def test_a_queue(cloud: Product, tmp_path: Path) -> None:
    data = tmp_path / 'user-data'
    data.write_text('#!/bin/sh\necho queue\n')
    output = cloud.does('--queue', '--flavor', 'small', '--name', 'q', '--user-data', str(data), '--wait', IMAGE)
    instance = output.split()[2]
    assert cloud.record(instance)['compute'] in {compute.uuid for compute in cloud.computes.values()}
    cloud.does('destroy', '--wait', 'q')
    cloud.does('flavor', 'set', 'huge', HUGE, user=OPERATOR)
    assert 'huge' in cloud.does('flavor', 'list')
    queued = cloud.does('--queue', '--flavor', 'huge', '--name', 'h').split()[2]
    assert cloud.does('show', 'h', '-f', 'json')
    assert cloud.record(queued)['state'] == ''
    cloud.does('destroy', '--wait', 'h')
    cloud.does('flavor', 'delete', 'huge', user=OPERATOR)
    assert cloud.entries('/queues/') == {}


def test_one_in_error_is_destroyed(cloud: Product) -> None:
    compute = cloud.computes[ONE]
    compute.pause()
    instance = cloud.does(SMALL, '--on', compute.uuid, '--name', 'failed').split()[-1]
    cloud.placement.call('DELETE', f'/allocations/{instance}')
    compute.resume()
    cloud.reached(instance, 'error')
    one_line(cloud.asks('failed'), 1, 'failed at stage')
    assert 'its record is removed' in cloud.asks('destroy', 'failed').stderr
    assert cloud.record(instance)['state'] == ''


def test_quotas(cloud: Product) -> None:
    cloud.does('quota', 'set', 'few', 'instances=1', user=OPERATOR)
    _, instance = cloud.place(SMALL, '--project', 'few')
    assert 'few' in cloud.does('quota', 'list')
    assert '1' in cloud.does('quota', 'show', 'few')
    refused = cloud.asks(SMALL, '--project', 'few')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    cloud.does('destroy', '--wait', instance)
    assert ' 0' in cloud.does('quota', 'show', 'few')


def test_an_audit_that_mends(cloud: Product) -> None:
    """The function of the command, which itself takes a minute, with a scheduler's certificate."""
    compute = cloud.computes[TWO]
    _, instance = cloud.place(SMALL, '--on', compute.uuid, '--name', 'kept')
    images = compute.directory / 'state/images'
    images.mkdir(exist_ok=True)
    (images / 'base-0123.part').write_bytes(b'half')
    name = json.dumps({'version': 1, 'instance': NOBODY})
    planted = [Put(f'/booted/{NOBODY}', '10.1.1.1'), Put('/names/nobody', name), Delete('/names/kept')]
    cloud.operator.commit([], planted)
    findings = [('booted-orphaned', NOBODY), ('name-missing', instance), ('name-orphaned', 'nobody')]
    assert sorted(cloud.audit()) == sorted([*findings, ('part-orphaned', compute.uuid)])
    messages: list[str] = []
    assert mended(cloud, messages) == [], messages
    assert len(messages) == 5, messages
    assert not (images / 'base-0123.part').exists()
    assert cloud.audit(OPERATOR) == []
    cloud.does('destroy', '--wait', 'kept')


def test_a_host_comes_and_goes(cloud: Product) -> None:
    compute = cloud.another('hv3')
    assert compute.uuid in cloud.does('hosts')
    living = cloud.place(SMALL, '--on', compute.uuid)[1]
    cloud.does('host', 'disable', compute.uuid, user=OPERATOR)
    assert cloud.asks(SMALL, '--on', compute.uuid).code == 3
    cloud.does('host', 'enable', compute.uuid, user=OPERATOR)
    cloud.does('host', 'drain', compute.uuid, user=OPERATOR)
    cloud.does('destroy', '--wait', living)
    cloud.does('host', 'drain', '--wait', compute.uuid, user=OPERATOR)
    cloud.does('host', 'enable', compute.uuid, user=OPERATOR)
    dying = cloud.place(SMALL, '--on', compute.uuid, '--name', 'dying')[1]
    compute.kill()
    one_line(cloud.asks('host', 'forget', compute.uuid, user=OPERATOR), 5, 'is not forgotten')
    entry = cloud.operator.get(f'/computes/{compute.uuid}')
    assert entry is not None
    cloud.operator.revoke(entry.lease)  # as its expiry would
    assert 'when it is back' in cloud.asks('destroy', dying).stderr
    cloud.does('host', 'forget', '--fenced', compute.uuid, user=OPERATOR)
    assert compute.uuid not in cloud.does('hosts')
    assert cloud.entries(f'/hosts/{compute.uuid}/') == cloud.entries('/names/') == {}
    assert cloud.record(dying)['state'] == 'gone'


def test_whoever_is_killed_goes_on(cloud: Product) -> None:
    compute = cloud.computes[ONE]
    instance = cloud.place(SMALL, '--on', compute.uuid, '--name', 'kept')[1]
    compute.kill()
    waiting = cloud.does(SMALL, '--on', compute.uuid).split()[-1]
    compute.start()
    cloud.reached(waiting, 'active')
    cloud.cloud.etcd.kill()
    cloud.cloud.etcd.start()
    until(lambda: cloud.asks('list').code == 0, SOON, 'etcd is back')
    after = cloud.place(SMALL, '--on', compute.uuid)[1]
    cloud.does('stop', '--wait', 'kept')
    cloud.does('start', '--wait', 'kept')
    compute.restart()
    cloud.does('destroy', '--wait', instance, waiting, after)


# What each role must not do.


def test_what_a_scheduler_may_not(cloud: Product) -> None:
    """The error is one line, with the fix."""
    before = cloud.kept()
    for words in (('flavor', 'set', 'small', 'resources=VCPU:9'), ('flavor', 'delete', 'small')):
        output = one_line(cloud.asks(*words), 1, 'write /flavors/small: it is for another certificate', CURE)
        assert f'{SCHEDULER}/client.crt' in output
    for key in ('/cluster', f'/computes/{cloud.computes[ONE].uuid}', '/flavors/new'):
        for words in (('put', key, 'x'), ('del', key)):
            code, output = cloud.cloud.etcdctl(SCHEDULER, *words)
            assert (code != 0, 'permission denied' in output) == (True, True), (words, output)
    assert cloud.kept() == before


def test_eschedule_with_a_compute_s_certificate_claims_nothing(cloud: Product) -> None:
    before = cloud.placement.database.allocations()
    one_line(cloud.asks(SMALL, user=ONE), 1, 'write /requests/', 'it is for another certificate', CURE)
    assert cloud.placement.database.allocations() == before
    assert cloud.asks('list', user=ONE).code == 0


# A compromised compute.


@pytest.fixture
def victim(cloud: Product) -> Iterator[str]:
    """An instance on the other compute, with a name, a group and a quota."""
    cloud.does('quota', 'set', 'theirs', 'instances=5', user=OPERATOR)
    group = ['--group', 'theirs', '--policy', 'affinity']
    words = ['--on', cloud.computes[TWO].uuid, '--name', 'victim', '--project', 'theirs', *group]
    instance = cloud.place(SMALL, *words)[1]
    yield instance
    cloud.does('destroy', '--wait', instance)


def test_it_forges_what_is_of_others(cloud: Product, victim: str) -> None:
    """Keys of other computes and of operators, with our client and with etcdctl."""
    other, new = cloud.computes[TWO].uuid, str(uuid.uuid4())
    keys = [f'/instances/{below}{victim}' for below in (f'{other}/', '', 'none/')]
    keys += [f'/hosts/{other}/{victim}', f'/hosts/{other}/{new}', f'/computes/{other}', f'/digests/{other}/{new}/0']
    keys += [f'/audit/{new}/{other}', '/cluster', '/flavors/small', f'/requests/{victim}', '/user-data/ab']
    shown, before = cloud.does('show', 'victim'), cloud.kept()
    guests = (cloud.computes[TWO].directory / 'state/fake.json').read_text()
    for key in keys:
        for words in (('put', key, '{}'), ('del', key)):
            code, output = cloud.cloud.etcdctl(ONE, *words)
            assert (code != 0, 'permission denied' in output) == (True, True), (words, output)
        for write in (Put(key, '{}'), Delete(key)):
            with pytest.raises(Denied, match=key):
                cloud.cloud.stores[ONE].commit([], [write])
    assert cloud.kept() == before
    assert cloud.does('show', 'victim') == shown
    assert cloud.audit() == []
    assert (cloud.computes[TWO].directory / 'state/fake.json').read_text() == guests


def codes(cloud: Product) -> list[str]:
    return sorted(code for code, _ in cloud.audit())


def test_it_forges_an_address(cloud: Product, victim: str) -> None:
    """Only clients of 2019 read this key."""
    address, own = cloud.does('victim'), cloud.cloud.stores[ONE]
    own.commit([], [Put(f'/booted/{victim}', '10.66.66.66')])
    assert cloud.does('victim') == address
    assert cloud.audit() == [('booted-differs', victim)]
    own.commit([], [Put(f'/booted/{victim}', address.strip())])


def test_it_takes_a_name_a_group_and_a_count(cloud: Product, victim: str) -> None:
    before = {key: entry.value for key, entry in cloud.entries('/').items()}
    own = cloud.cloud.stores[ONE]
    quota = Put('/quotas/theirs', json.dumps({**json.loads(before['/quotas/theirs']), 'used': {}}))
    own.commit([], [Delete('/names/victim'), Delete('/groups/theirs'), quota])
    assert victim in cloud.does('show', victim)
    assert codes(cloud) == ['group-missing', 'name-missing', 'quota-differs']
    assert mended(cloud, []) == []
    after = cloud.entries('/')
    for key in ('/names/victim', '/groups/theirs', '/quotas/theirs'):
        assert json.loads(after[key].value) == json.loads(before[key]), key


def test_it_has_a_name_lead_elsewhere(cloud: Product, victim: str) -> None:
    """Otherwise `destroy other` would destroy the victim."""
    own, other = cloud.cloud.stores[ONE], cloud.place(SMALL, '--name', 'other')[1]
    nameless = cloud.place(SMALL)[1]
    for instance, reason in ((victim, 'is called victim'), (nameless, 'has no name')):
        own.commit([], [Put('/names/other', json.dumps({'version': 1, 'instance': instance}))])
        for words in (('destroy', 'other'), ('other',), ('stop', 'other'), ('show', 'other')):
            one_line(cloud.asks(*words), 5, f'/names/other leads to instance {instance}, which {reason}: say the uuid')
        assert cloud.record(instance)['state'] == 'active'
        assert other in cloud.does('show', other)
        assert codes(cloud) == ['name-missing', 'name-orphaned']
    assert mended(cloud, []) == ['name-missing']
    assert mended(cloud, []) == []
    cloud.does('destroy', '--wait', 'other', nameless)


def test_it_empties_a_queue_and_fills_it(cloud: Product) -> None:
    """The removed request is unknown, as it was stored nowhere else; the forged one is built."""
    cloud.does('flavor', 'set', 'huge', HUGE, user=OPERATOR)
    queued, forged = cloud.does('--queue', '--flavor', 'huge').split()[2], str(uuid.uuid4())
    value = cloud.entries('/queues/')[f'/queues/huge/{queued}'].value.decode()
    value = value.replace(queued, forged).replace('huge', 'small').replace('640', '1')
    own = cloud.cloud.stores[ONE]
    own.commit([], [Delete(f'/queues/huge/{queued}'), Put(f'/queues/small/{forged}', value)])
    one_line(cloud.asks('show', queued), 4, 'no such instance')
    cloud.reached(forged, 'active')
    cloud.does('destroy', '--wait', forged)
    cloud.does('flavor', 'delete', 'huge', user=OPERATOR)


@pytest.mark.parametrize('state', ['active', 'gone'])
def test_it_says_that_it_has_the_victim(cloud: Product, victim: str, state: str) -> None:
    """It may add a tombstone, too: the compute that was asked first is trusted."""
    own, compute = cloud.cloud.stores[ONE], cloud.computes[ONE].uuid
    shown, address, allocation = cloud.does('show', 'victim'), cloud.does('victim'), cloud.placement.allocations(victim)
    record = json.dumps({**cloud.record(victim), 'compute': compute, 'state': state})
    request = cloud.entries('/hosts/')[f'/hosts/{cloud.computes[TWO].uuid}/{victim}'].value.decode()
    tombstone = json.dumps({**json.loads(request), 'allocations': {}, 'image': None})
    keys = f'/instances/{compute}/{victim}', f'/hosts/{compute}/{victim}'
    own.commit([], [Put(keys[0], record)])
    assert (cloud.does('show', 'victim'), cloud.does('victim')) == (shown, address)
    assert codes(cloud) == ['record-doubled'] * (state == 'active')
    own.commit([], [Put(keys[1], tombstone)])
    until(lambda: cloud.operator.get(keys[1]) is None, SOON, 'its ecompute has ended what it has not')
    assert (cloud.does('show', victim), cloud.does(victim)) == (shown, address)
    assert cloud.placement.allocations(victim) == allocation
    own.commit([], [Delete(keys[0])])
    # Its ecompute has released the shared keys (name, group membership, quota); /booted needs a manual repair.
    assert mended(cloud, []) == ['booted-differs'] * (state == 'active')
    own.commit([], [Put(f'/booted/{victim}', address.strip())])
    assert (cloud.does('show', 'victim'), cloud.does('victim')) == (shown, address)


@pytest.mark.parametrize('state', ['active', 'gone'])
def test_it_says_so_before_another_is_asked(cloud: Product, state: str) -> None:
    """The uuid of a queued request is public: the compute that holds its allocation is trusted."""
    forger, owner = (cloud.computes[user] for user in (ONE, TWO))
    forger.pause()
    owner.pause()
    name = f'waits-{state}'
    instance = cloud.does('--queue', '--flavor', 'small', '--name', name).split()[2]
    common = {'version': 1, 'instance': instance, 'user_id': 'u', 'project_id': 'p', 'name': name, 'image': IMAGE}
    request = {**common, 'allocations': {forger.uuid: {'resources': {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}}}}
    address = {'network': 'lan', 'mac': '52:54:00:00:00:01', 'address': '10.66.66.66'}
    record = {**common, 'compute': forger.uuid, 'state': state, 'stages': {}, 'addresses': [address]}
    keys = f'/hosts/{forger.uuid}/{instance}', f'/instances/{forger.uuid}/{instance}'
    cloud.cloud.stores[ONE].commit([], [Put(keys[0], json.dumps(request)), Put(keys[1], json.dumps(record))])
    owner.resume()
    own = f'/instances/{owner.uuid}/{instance}'
    until(lambda: (stored := cloud.operator.get(own)) and b'"addressed"' in stored.value, SOON, 'the other has made it')
    assert cloud.does(name).strip() not in ('', '10.66.66.66')
    assert cloud.does('wait', name).strip() not in ('', '10.66.66.66')
    for words in (('show', name), ('list', '--wide')):
        output = cloud.does(*words)
        assert (owner.uuid in output, forger.uuid in output) == (True, False), output
    # The compute that claims to have it does not answer the audit.
    doubled = {'request-doubled', *['record-doubled'] * (state == 'active')}
    assert doubled <= set(mended(cloud, [])) <= {*doubled, 'compute-mute'}
    assert {f'/hosts/{owner.uuid}/{instance}', f'/names/{name}'} <= cloud.entries().keys()
    cloud.does('destroy', name)
    until(lambda: cloud.operator.get(f'/hosts/{owner.uuid}/{instance}') is None, SOON, 'the other has destroyed it')
    assert instance not in cloud.placement.database.allocations()
    forger.resume()
    until(lambda: cloud.operator.get(keys[0]) is None, SOON, 'its ecompute has ended what it has not')
    cloud.operator.commit([], [Delete(keys[1])])


def test_whoever_places_may_hear_what_happened(cloud: Product, victim: str) -> None:
    words = [line.split(maxsplit=1)[1] for line in cloud.does('events', 'victim').splitlines()]
    # Both computes of this cluster have the same host name.
    host = f'{socket.gethostname()} ({cloud.computes[TWO].uuid})'
    assert words[:1] == [f'victim: request accepted, for {host}']
    assert 'victim: active' in words
    assert victim not in ''.join(words)


def test_it_writes_what_was_released(cloud: Product, victim: str) -> None:
    """These notes are about released claims: nothing else changes, and new notes are written."""
    own = cloud.cloud.stores[ONE]
    ended = cloud.place(SMALL)[1]
    cloud.does('destroy', '--wait', ended)
    own.commit([], [Delete(key) for key in cloud.entries('/released/')])
    own.commit([], [Put(f'/released/{victim[:2]}/1', '{}', own.grant(60))])
    assert cloud.audit() == []
    cloud.does('destroy', '--wait', cloud.place(SMALL)[1])
