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
from ecomp.scheduler.operations import audit
from ecomp.store.client import Delete, Put
from tests.kit.servers import PlacementServer, wait_until
from tests.kit.story import IMAGE, REACTION_SECONDS, SMALL_QUERY, UNKNOWN_UUID, assert_one_line
from tests.security.product import OPERATOR, SCHEDULER, Product, start_product

FIRST_USER = 'compute-hv1'
SECOND_USER = 'compute-hv2'
HUGE_QUERY = 'resources=VCPU:640,DISK_GB:1,MEMORY_MB:128'
ENABLE_HINT = 'run `elab certs DIR --enable` again'


@pytest.fixture(scope='module')
def cloud(tmp_path_factory: pytest.TempPathFactory, usual_placement: type[PlacementServer]) -> Iterator[Product]:
    directory = tmp_path_factory.mktemp('product')
    with usual_placement(directory / 'placement') as placement, start_product(directory, placement) as started:
        started.run_successfully('flavor', 'set', 'small', SMALL_QUERY, user=OPERATOR)
        yield started


@pytest.fixture(autouse=True)
def _check_well(cloud: Product) -> Iterator[None]:
    yield
    cloud.assert_well()


def fix_audit(cloud: Product, messages: list[str]) -> list[str]:
    with closing(cloud.cloud.open_store(SCHEDULER)) as store, closing(Placement(cloud.placement.url)) as client:
        report = audit.fix(store, client, messages.append, interval_seconds=0.2)
    return [finding.code for finding in report.findings]


# What each role must be able to do.


def test_scheduler_runs_all_commands_of_an_instance(cloud: Product, tmp_path: Path) -> None:
    data = tmp_path / 'user-data'
    data.write_text('#!/bin/sh\n')
    compute, instance = cloud.place(SMALL_QUERY, IMAGE, '--name', 'web', '--user-data', str(data))
    address = cloud.run_successfully('wait', 'web')
    assert cloud.run_successfully(instance) == address
    assert cloud.run_successfully('wait', 'web', '--for', 'addressed')
    assert instance in cloud.run_successfully('list')
    assert compute in cloud.run_successfully('show', 'web')
    for command in (['why'], ['show', '--timeline']):
        assert cloud.run_successfully(*command, 'web')
    assert compute in cloud.run_successfully('create', '--dry-run', SMALL_QUERY, '--on', compute)
    for power, state in (('stop', 'stopped'), ('start', 'active'), ('reboot', 'active'), ('stop', 'stopped')):
        cloud.run_successfully(power, '--wait', 'web')
        cloud.wait_state(instance, state)
    cloud.run_successfully('destroy', '--wait', 'web')
    assert instance not in cloud.run_successfully('list')
    assert instance in cloud.run_successfully('list', '--all')
    assert cloud.read_entries('/names/') == {}


def test_scheduler_places_a_set_in_a_group(cloud: Product, tmp_path: Path) -> None:
    data = tmp_path / 'user-data'
    data.write_text('#!/bin/sh\necho set\n')
    words = ['--count', '4', '--min', '2', '--group', 'apart', '--policy', 'anti-affinity', '--name', 'many']
    placed = json.loads(cloud.run_successfully(SMALL_QUERY, *words, '--soft', '--user-data', str(data), '-f', 'json'))
    instances = [item['instance'] for item in placed]
    assert {item['compute'] for item in placed} == {item.uuid for item in cloud.computes.values()}
    cloud.run_successfully('wait', *instances)
    assert 'apart' in cloud.run_successfully('group')
    group = cloud.run_successfully('group', 'apart')
    assert all(item in group for item in instances)
    assert 'apart' in cloud.run_successfully('group', 'apart', user=OPERATOR)
    cloud.run_successfully('destroy', '--wait', *instances)
    assert cloud.read_entries('/groups/') == {}


def test_scheduler_uses_a_queue(cloud: Product, tmp_path: Path) -> None:
    data = tmp_path / 'user-data'
    data.write_text('#!/bin/sh\necho queue\n')
    output = cloud.run_successfully(
        '--queue', '--flavor', 'small', '--name', 'q', '--user-data', str(data), '--wait', IMAGE
    )
    instance = output.split()[2]
    assert cloud.read_record(instance)['compute'] in {compute.uuid for compute in cloud.computes.values()}
    cloud.run_successfully('destroy', '--wait', 'q')
    cloud.run_successfully('flavor', 'set', 'huge', HUGE_QUERY, user=OPERATOR)
    assert 'huge' in cloud.run_successfully('flavor')
    queued = cloud.run_successfully('--queue', '--flavor', 'huge', '--name', 'h').split()[2]
    assert cloud.run_successfully('show', 'h', '-f', 'json')
    assert cloud.read_record(queued)['state'] == ''
    cloud.run_successfully('destroy', '--wait', 'h')
    cloud.run_successfully('flavor', 'delete', 'huge', user=OPERATOR)
    assert cloud.read_entries('/queues/') == {}


def test_scheduler_destroys_a_failed_instance(cloud: Product) -> None:
    compute = cloud.computes[FIRST_USER]
    compute.pause()
    instance = cloud.run_successfully(SMALL_QUERY, '--on', compute.uuid, '--name', 'failed').split()[-1]
    cloud.placement.call('DELETE', f'/allocations/{instance}')
    compute.resume()
    cloud.wait_state(instance, 'error')
    assert_one_line(cloud.run_eschedule('failed'), 1, 'failed at stage')
    assert 'its record is removed' in cloud.run_eschedule('destroy', 'failed').stderr
    assert cloud.read_record(instance)['state'] == ''


def test_operator_sets_a_quota_that_schedulers_obey(cloud: Product) -> None:
    cloud.run_successfully('quota', 'set', 'few', 'instances=1', user=OPERATOR)
    _, instance = cloud.place(SMALL_QUERY, '--project', 'few')
    assert 'few' in cloud.run_successfully('quota')
    assert '1' in cloud.run_successfully('quota', 'few')
    refused = cloud.run_eschedule(SMALL_QUERY, '--project', 'few')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    cloud.run_successfully('destroy', '--wait', instance)
    assert ' 0' in cloud.run_successfully('quota', 'few')


def test_scheduler_fixes_audit_findings(cloud: Product) -> None:
    """The function of the command, which itself takes a minute, with a scheduler's certificate."""
    compute = cloud.computes[SECOND_USER]
    _, instance = cloud.place(SMALL_QUERY, '--on', compute.uuid, '--name', 'kept')
    name = json.dumps({'version': 1, 'instance': UNKNOWN_UUID})
    planted = [Put(f'/booted/{UNKNOWN_UUID}', '10.1.1.1'), Put('/names/nobody', name), Delete('/names/kept')]
    cloud.operator.commit([], planted)
    findings = [('booted-orphaned', UNKNOWN_UUID), ('name-missing', instance), ('name-orphaned', 'nobody')]
    assert sorted(cloud.list_findings()) == findings
    messages: list[str] = []
    assert fix_audit(cloud, messages) == [], messages
    assert len(messages) == 4, messages
    assert cloud.list_findings(OPERATOR) == []
    cloud.run_successfully('destroy', '--wait', 'kept')


def test_operator_adds_drains_and_forgets_a_host(cloud: Product) -> None:
    compute = cloud.add_compute('hv3')
    assert compute.uuid in cloud.run_successfully('hosts')
    living = cloud.place(SMALL_QUERY, '--on', compute.uuid)[1]
    cloud.run_successfully('host', 'drain', compute.uuid, user=OPERATOR)
    assert cloud.run_eschedule(SMALL_QUERY, '--on', compute.uuid).code == 3
    cloud.run_successfully('host', 'enable', compute.uuid, user=OPERATOR)
    cloud.run_successfully('host', 'drain', compute.uuid, user=OPERATOR)
    cloud.run_successfully('destroy', '--wait', living)
    cloud.run_successfully('host', 'drain', '--wait', compute.uuid, user=OPERATOR)
    cloud.run_successfully('host', 'enable', compute.uuid, user=OPERATOR)
    dying = cloud.place(SMALL_QUERY, '--on', compute.uuid, '--name', 'dying')[1]
    compute.kill()
    assert_one_line(cloud.run_eschedule('host', 'forget', compute.uuid, user=OPERATOR), 5, 'is not forgotten')
    entry = cloud.operator.get(f'/computes/{compute.uuid}')
    assert entry is not None
    cloud.operator.revoke(entry.lease)  # as its expiry would
    assert 'once this compute is no longer silent' in cloud.run_eschedule('destroy', dying).stderr
    cloud.run_successfully('host', 'forget', '--fenced', compute.uuid, user=OPERATOR)
    assert compute.uuid not in cloud.run_successfully('hosts')
    assert cloud.read_entries(f'/hosts/{compute.uuid}/') == cloud.read_entries('/names/') == {}
    assert cloud.read_record(dying)['state'] == 'gone'


def test_killed_ecompute_and_etcd_continue(cloud: Product) -> None:
    compute = cloud.computes[FIRST_USER]
    instance = cloud.place(SMALL_QUERY, '--on', compute.uuid, '--name', 'kept')[1]
    compute.kill()
    waiting = cloud.run_successfully(SMALL_QUERY, '--on', compute.uuid).split()[-1]
    compute.start()
    cloud.wait_state(waiting, 'active')
    cloud.cloud.etcd.kill()
    cloud.cloud.etcd.start()
    wait_until(lambda: cloud.run_eschedule('list').code == 0, REACTION_SECONDS, 'etcd is back')
    after = cloud.place(SMALL_QUERY, '--on', compute.uuid)[1]
    cloud.run_successfully('stop', '--wait', 'kept')
    cloud.run_successfully('start', '--wait', 'kept')
    compute.restart()
    cloud.run_successfully('destroy', '--wait', instance, waiting, after)


# What each role must not do.


def test_scheduler_cannot_write_keys_of_other_roles(cloud: Product) -> None:
    """The error is one line, with the fix."""
    before = cloud.read_lasting_values()
    for words in (('flavor', 'set', 'small', 'resources=VCPU:9'), ('flavor', 'delete', 'small')):
        output = assert_one_line(
            cloud.run_eschedule(*words), 1, 'write /flavors/small: its role does not allow that', ENABLE_HINT
        )
        assert f'{SCHEDULER}/client.crt' in output
    for key in ('/cluster', f'/computes/{cloud.computes[FIRST_USER].uuid}', '/flavors/new'):
        for words in (('put', key, 'x'), ('del', key)):
            code, output = cloud.cloud.etcdctl(SCHEDULER, *words)
            assert (code != 0, 'permission denied' in output) == (True, True), (words, output)
    assert cloud.read_lasting_values() == before


def test_eschedule_with_a_compute_certificate_claims_nothing(cloud: Product) -> None:
    before = cloud.placement.database.read_allocations()
    assert_one_line(
        cloud.run_eschedule(SMALL_QUERY, user=FIRST_USER),
        1,
        'write /requests/',
        'its role does not allow that',
        ENABLE_HINT,
    )
    assert cloud.placement.database.read_allocations() == before
    assert cloud.run_eschedule('list', user=FIRST_USER).code == 0


# A compromised compute.


@pytest.fixture
def victim(cloud: Product) -> Iterator[str]:
    cloud.run_successfully('quota', 'set', 'theirs', 'instances=5', user=OPERATOR)
    group = ['--group', 'theirs', '--policy', 'affinity']
    words = ['--on', cloud.computes[SECOND_USER].uuid, '--name', 'victim', '--project', 'theirs', *group]
    instance = cloud.place(SMALL_QUERY, *words)[1]
    yield instance
    cloud.run_successfully('destroy', '--wait', instance)


def test_compute_cannot_forge_keys_of_others(cloud: Product, victim: str) -> None:
    """Keys of other computes and of operators, with our client and with etcdctl."""
    other, new = cloud.computes[SECOND_USER].uuid, str(uuid.uuid4())
    keys = [f'/instances/{below}/{victim}' for below in (other, 'none')]
    keys += [f'/hosts/{other}/{victim}', f'/hosts/{other}/{new}', f'/computes/{other}', f'/findings/{other}']
    keys += [f'/audit/{new}/{other}', '/cluster', '/flavors/small', f'/requests/{victim}']
    shown, before = cloud.run_successfully('show', 'victim'), cloud.read_lasting_values()
    guests = (cloud.computes[SECOND_USER].directory / 'state/fake.json').read_text()
    for key in keys:
        for words in (('put', key, '{}'), ('del', key)):
            code, output = cloud.cloud.etcdctl(FIRST_USER, *words)
            assert (code != 0, 'permission denied' in output) == (True, True), (words, output)
        for write in (Put(key, '{}'), Delete(key)):
            with pytest.raises(Denied, match=key):
                cloud.cloud.stores[FIRST_USER].commit([], [write])
    assert cloud.read_lasting_values() == before
    assert cloud.run_successfully('show', 'victim') == shown
    assert cloud.list_findings() == []
    assert (cloud.computes[SECOND_USER].directory / 'state/fake.json').read_text() == guests


def list_codes(cloud: Product) -> list[str]:
    return sorted(code for code, _ in cloud.list_findings())


def test_forged_address_is_ignored_and_audited(cloud: Product, victim: str) -> None:
    """Only clients of 2019 read this key."""
    address, own = cloud.run_successfully('victim'), cloud.cloud.stores[FIRST_USER]
    own.commit([], [Put(f'/booted/{victim}', '10.66.66.66')])
    assert cloud.run_successfully('victim') == address
    assert cloud.list_findings() == [('booted-differs', victim)]
    own.commit([], [Put(f'/booted/{victim}', address.strip())])


def test_removed_name_group_and_quota_are_audited_and_fixed(cloud: Product, victim: str) -> None:
    before = {key: entry.value for key, entry in cloud.read_entries('/').items()}
    own = cloud.cloud.stores[FIRST_USER]
    quota = Put('/quotas/theirs', json.dumps({**json.loads(before['/quotas/theirs']), 'used': {}}))
    own.commit([], [Delete('/names/victim'), Delete('/groups/theirs'), quota])
    assert victim in cloud.run_successfully('show', victim)
    assert list_codes(cloud) == ['group-missing', 'name-missing', 'quota-differs']
    assert fix_audit(cloud, []) == []
    after = cloud.read_entries('/')
    for key in ('/names/victim', '/groups/theirs', '/quotas/theirs'):
        values = [json.loads(before[key]), json.loads(after[key].value)]
        for value in values:
            for stamp in ('written_at', 'by'):  # of the latest write of a quota by eschedule
                value.pop(stamp, None)
        assert values[0] == values[1], key


def test_forged_name_of_another_instance_is_refused(cloud: Product, victim: str) -> None:
    """Otherwise `destroy other` would destroy the victim."""
    own, other = cloud.cloud.stores[FIRST_USER], cloud.place(SMALL_QUERY, '--name', 'other')[1]
    nameless = cloud.place(SMALL_QUERY)[1]
    for instance, reason in ((victim, 'is called victim'), (nameless, 'has no name')):
        own.commit([], [Put('/names/other', json.dumps({'version': 1, 'instance': instance}))])
        for words in (('destroy', 'other'), ('other',), ('stop', 'other'), ('show', 'other')):
            assert_one_line(
                cloud.run_eschedule(*words), 5, f'/names/other refers to instance {instance}, which {reason} ('
            )
        assert cloud.read_record(instance)['state'] == 'active'
        assert other in cloud.run_successfully('show', other)
        assert list_codes(cloud) == ['name-missing', 'name-orphaned']
    assert fix_audit(cloud, []) == ['name-missing']
    assert fix_audit(cloud, []) == []
    cloud.run_successfully('destroy', '--wait', 'other', nameless)


def test_compute_can_remove_and_add_queued_requests(cloud: Product) -> None:
    """The removed request is unknown, as nothing else stored it, and the forged one is built."""
    cloud.run_successfully('flavor', 'set', 'huge', HUGE_QUERY, user=OPERATOR)
    queued, forged = cloud.run_successfully('--queue', '--flavor', 'huge').split()[2], str(uuid.uuid4())
    value = cloud.read_entries('/queues/')[f'/queues/huge/{queued}'].value.decode()
    value = value.replace(queued, forged).replace('huge', 'small').replace('640', '1')
    own = cloud.cloud.stores[FIRST_USER]
    own.commit([], [Delete(f'/queues/huge/{queued}'), Put(f'/queues/small/{forged}', value)])
    assert_one_line(cloud.run_eschedule('show', queued), 4, 'no such instance')
    cloud.wait_state(forged, 'active')
    cloud.run_successfully('destroy', '--wait', forged)
    cloud.run_successfully('flavor', 'delete', 'huge', user=OPERATOR)


@pytest.mark.parametrize('state', ['active', 'gone'])
def test_forged_record_of_a_requested_instance_is_ignored(cloud: Product, victim: str, state: str) -> None:
    """It may add a tombstone, too: the compute that was asked first is trusted."""
    own, compute = cloud.cloud.stores[FIRST_USER], cloud.computes[FIRST_USER].uuid
    shown, address, allocation = (
        cloud.run_successfully('show', 'victim'),
        cloud.run_successfully('victim'),
        cloud.placement.read_allocations(victim),
    )
    record = json.dumps({**cloud.read_record(victim), 'compute': compute, 'state': state})
    request = cloud.read_entries('/hosts/')[f'/hosts/{cloud.computes[SECOND_USER].uuid}/{victim}'].value.decode()
    tombstone = json.dumps({**json.loads(request), 'allocations': {}, 'image': None})
    keys = f'/instances/{compute}/{victim}', f'/hosts/{compute}/{victim}'
    own.commit([], [Put(keys[0], record)])
    assert (cloud.run_successfully('show', 'victim'), cloud.run_successfully('victim')) == (shown, address)
    assert list_codes(cloud) == ['record-doubled'] * (state == 'active')
    own.commit([], [Put(keys[1], tombstone)])
    wait_until(lambda: cloud.operator.get(keys[1]) is None, REACTION_SECONDS, 'its ecompute has ended what it has not')
    assert (cloud.run_successfully('show', victim), cloud.run_successfully(victim)) == (shown, address)
    assert cloud.placement.read_allocations(victim) == allocation
    own.commit([], [Delete(keys[0])])
    # Its ecompute has released the shared keys (name, group membership, quota); /booted needs a manual repair.
    assert fix_audit(cloud, []) == ['booted-differs'] * (state == 'active')
    own.commit([], [Put(f'/booted/{victim}', address.strip())])
    assert (cloud.run_successfully('show', 'victim'), cloud.run_successfully('victim')) == (shown, address)


@pytest.mark.parametrize('state', [pytest.param('active', marks=pytest.mark.slow), 'gone'])
def test_forged_record_of_a_queued_instance_is_ignored(cloud: Product, state: str) -> None:
    """The uuid of a queued request is public: the compute that holds its allocation is trusted."""
    forger, owner = (cloud.computes[user] for user in (FIRST_USER, SECOND_USER))
    forger.pause()
    owner.pause()
    name = f'waits-{state}'
    instance = cloud.run_successfully('--queue', '--flavor', 'small', '--name', name).split()[2]
    common = {'version': 1, 'instance': instance, 'user_id': 'u', 'project_id': 'p', 'name': name, 'image': IMAGE}
    request = {**common, 'allocations': {forger.uuid: {'resources': {'VCPU': 1, 'MEMORY_MB': 128, 'DISK_GB': 1}}}}
    address = {'network': 'lan', 'mac': '52:54:00:00:00:01', 'address': '10.66.66.66'}
    record = {**common, 'compute': forger.uuid, 'state': state, 'stages': {}, 'addresses': [address]}
    keys = f'/hosts/{forger.uuid}/{instance}', f'/instances/{forger.uuid}/{instance}'
    cloud.cloud.stores[FIRST_USER].commit([], [Put(keys[0], json.dumps(request)), Put(keys[1], json.dumps(record))])
    owner.resume()
    own = f'/instances/{owner.uuid}/{instance}'
    wait_until(
        lambda: (stored := cloud.operator.get(own)) and b'"addressed"' in stored.value,
        REACTION_SECONDS,
        'the other has made it',
    )
    assert cloud.run_successfully(name).strip() not in ('', '10.66.66.66')
    assert cloud.run_successfully('wait', name).strip() not in ('', '10.66.66.66')
    for words in (('show', name), ('list', '--wide')):
        output = cloud.run_successfully(*words)
        assert (owner.uuid in output, forger.uuid in output) == (True, False), output
    # The compute that claims to have it is frozen.
    doubled = {'request-doubled', *['record-doubled'] * (state == 'active')}
    assert doubled <= set(fix_audit(cloud, [])) <= {*doubled, 'compute-mute'}
    assert {f'/hosts/{owner.uuid}/{instance}', f'/names/{name}'} <= cloud.read_entries().keys()
    cloud.run_successfully('destroy', name)
    wait_until(
        lambda: cloud.operator.get(f'/hosts/{owner.uuid}/{instance}') is None,
        REACTION_SECONDS,
        'the other has destroyed it',
    )
    assert instance not in cloud.placement.database.read_allocations()
    forger.resume()
    wait_until(lambda: cloud.operator.get(keys[0]) is None, REACTION_SECONDS, 'its ecompute has ended what it has not')
    cloud.operator.commit([], [Delete(keys[1])])


def test_scheduler_reads_events(cloud: Product, victim: str) -> None:
    words = [line.split(maxsplit=1)[1] for line in cloud.run_successfully('events', 'victim').splitlines()]
    # Both computes of this cluster have the same host name.
    host = f'{socket.gethostname()} ({cloud.computes[SECOND_USER].uuid})'
    assert words[:1] == [f'victim: request accepted, for {host}']
    assert 'victim: active' in words
    assert victim not in ''.join(words)


def test_forged_release_notes_do_no_harm(cloud: Product, victim: str) -> None:
    """These notes are about released claims: nothing else changes, and new notes are written."""
    own = cloud.cloud.stores[FIRST_USER]
    ended = cloud.place(SMALL_QUERY)[1]
    cloud.run_successfully('destroy', '--wait', ended)
    own.commit([], [Delete(key) for key in cloud.read_entries('/released/')])
    own.commit([], [Put(f'/released/{victim[:2]}/1', '{}', own.grant(60))])
    assert cloud.list_findings() == []
    cloud.run_successfully('destroy', '--wait', cloud.place(SMALL_QUERY)[1])
