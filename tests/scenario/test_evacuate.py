"""`eschedule evacuate` on real etcd and placement: what moves, what stays, a host's return."""

from __future__ import annotations

import json
import socket
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ecomp.model import keys
from ecomp.store.client import describe_user
from tests.kit.by_hand import put_claim
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hypervisor import Hypervisor
from tests.kit.invariants import check_invariants, read_allocations
from tests.kit.lab import BOOT_SECONDS, Lab, is_serving
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse
from tests.kit.stacks import write_stack
from tests.kit.story import IMAGE, wait_state
from tests.kit.tuned import make_tuned

SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
LARGE = 'resources=VCPU:6,DISK_GB:1,MEMORY_MB:64'
ROOMY = 'VCPU:18,DISK_GB:40,MEMORY_MB:2048'


def create(control: Control, name: str, *words: str, query: str = SMALL) -> list[str]:
    result = control.eschedule(query, IMAGE, '--name', name, '--project', 'shop', '-f', 'json', *words)
    assert result.code == 0, result
    instances = [str(row['instance']) for row in json.loads(result.stdout)]
    for instance in instances:
        wait_state(control, instance, 'active')
    return instances


def evacuate(control: Control, compute: Ecompute, *words: str) -> Result:
    return control.eschedule('evacuate', compute.uuid, '--fenced', '--yes', '-f', 'json', *words)


def read_rows(result: Result) -> dict[str, dict[str, Any]]:
    return {row['name']: row for row in json.loads(result.stdout)}


def read_value(control: Control, key: str) -> Any:
    value = control.etcd.get(key)
    return None if value is None else json.loads(value)


def read_used(control: Control) -> dict[str, int]:
    return dict(read_value(control, keys.quota('shop'))['used'])


def test_guests_of_a_dead_host_are_placed_anew_and_the_host_that_returns_destroys_the_old_ones(
    cluster: Control,
) -> None:
    dead = cluster.ecompute(ROOMY)
    assert cluster.eschedule('quota', 'set', 'shop', 'instances=20').code == 0
    old = {'web': create(cluster, 'web')[0], 'big': create(cluster, 'big', query=LARGE)[0]}
    old |= dict(
        zip(
            ('near-1', 'near-2'),
            create(cluster, 'near', '--count', '2', '--group', 'near', '--policy', 'affinity'),
            strict=True,
        )
    )
    apart = ('--group', 'apart', '--policy', 'anti-affinity')
    old['apart1'] = create(cluster, 'apart1', *apart)[0]
    old['pinned'] = create(cluster, 'pinned', '--on', dead.uuid)[0]
    user_data = cluster.directory / 'user-data'
    user_data.write_text('#cloud-config\n')
    create(cluster, 'data', '--count', '2', '--user-data', str(user_data))
    shop = write_stack(cluster, {'db': {}, 'web': {'count': 2}})
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    others = [cluster.ecompute('VCPU:5,DISK_GB:40,MEMORY_MB:2048') for _ in range(2)]
    create(cluster, 'apart2', '--on', others[0].uuid, *apart)
    used, stack = read_used(cluster), read_value(cluster, keys.stack('shop'))
    orphan = str(uuid.uuid4())
    kill_and_lapse(cluster, dead)
    put_claim(cluster, orphan, dead.uuid)
    (key,) = cluster.etcd.list_keys(keys.USER_DATA)
    cluster.etcd.delete(key)

    plan = cluster.eschedule('evacuate', dead.uuid, '--dry-run', '-f', 'json')
    result = evacuate(cluster, dead, '--wait')

    assert (plan.code, result.code) == (3, 3), result
    rows = read_rows(result)
    staying = {'big', 'pinned', 'data-1', 'data-2'}
    assert {name for name, row in rows.items() if row['reason']} == staying
    assert rows['data-1']['reason'].startswith('its user-data is no longer in etcd')
    assert rows['pinned']['reason'].startswith('its query allows only')
    moved = {name: row for name, row in rows.items() if row['replaced_by']}
    assert moved.keys() == {'web', 'near-1', 'near-2', 'apart1', 'shop-db', 'shop-web-1', 'shop-web-2'}
    assert all(row['address'] for row in moved.values())
    for name, row in moved.items():
        compute, instance, former = row['compute'], row['replaced_by'], row['instance']
        request, tombstone = (
            read_value(cluster, key) for key in (keys.request(compute, instance), keys.request(dead.uuid, former))
        )
        assert compute in {other.uuid for other in others}
        assert (request['name'], request['replaces']) == (name, former)
        assert (tombstone['allocations'], tombstone['replaced_by']) == ({}, instance)
        assert read_value(cluster, keys.name(name))['instance'] == instance
        assert wait_state(cluster, instance, 'active')['replaces'] == former
        assert ['replaces', former] in map(str.split, cluster.eschedule('show', instance).stdout.splitlines())
        if not name.startswith('shop-'):
            assert former == old[name]
            assert instance == str(uuid.uuid5(uuid.UUID(former), 'evacuated'))
    assert moved['near-1']['compute'] == moved['near-2']['compute']
    assert moved['apart1']['compute'] == others[1].uuid
    assert orphan not in read_allocations(cluster)
    assert read_used(cluster) == used
    members = read_value(cluster, keys.group('near'))['members']
    assert members == {moved[name]['replaced_by']: moved[name]['compute'] for name in ('near-1', 'near-2')}
    entries = read_value(cluster, keys.stack('shop'))['entries']
    assert {name: entry['incarnation'] for name, entry in entries.items()} == dict.fromkeys(stack['entries'], 2)
    unchanged = cluster.eschedule('apply', shop, '--dry-run', '-f', 'json')
    assert unchanged.code == 0, unchanged
    assert {row['action'] for row in json.loads(unchanged.stdout)['instances']} == {'keep'}

    audit = cluster.eschedule('check', '-f', 'json')
    codes = [finding['code'] for finding in json.loads(audit.stdout) if finding['level'] == 'error']
    assert codes == ['compute-silent'], audit
    again = evacuate(cluster, dead)

    assert (again.code, read_rows(again).keys()) == (3, staying), again
    assert f'instance {moved["web"]["replaced_by"]} replaces it' in cluster.eschedule('destroy', old['web']).stderr
    dead.start()
    for row in moved.values():
        wait_state(cluster, row['instance'], 'gone')
    assert read_used(cluster) == used
    for name, row in moved.items():
        assert read_value(cluster, keys.name(name))['instance'] == row['replaced_by']
    assert read_value(cluster, keys.stack('shop'))['entries'] == entries
    assert wait_until(
        lambda: (
            dead.uuid
            not in {
                c
                for held in (read_allocations(cluster).get(row['instance'], {}) for row in moved.values())
                for c in held
            }
        ),
        20,
        'released',
    )
    assert cluster.eschedule('host', 'enable', dead.uuid).code == 0
    check_invariants(cluster, dead, *others)


def make_host(control: Control, vcpus: int = 8) -> str:
    """Make a compute of keys that nobody keeps, and return its uuid."""
    compute = control.placement.make_provider(VCPU=vcpus, MEMORY_MB=1024, DISK_GB=20)
    control.etcd.put(keys.compute(compute), json.dumps({'token': 'x', 'hostname': compute}), control.etcd.grant())
    return compute


def test_events_tell_what_people_did_in_an_evening(cluster: Control) -> None:
    dead = cluster.ecompute(ROOMY)
    host = socket.gethostname()  # of both, so the uuid is shown, too
    old = create(cluster, 'evening')[0]
    # It reads each second, not each minute, whether it is disabled.
    other = make_tuned(cluster, ROOMY, numbers={'PLAN_INTERVAL_SECONDS': 1})
    shop = write_stack(cluster, {'front': {}})
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    first = read_value(cluster, keys.name('shop-front'))['instance']
    larger = write_stack(cluster, {'front': {'query': LARGE}})
    assert cluster.eschedule('apply', larger, '--replace', 'front', '--yes', '--wait').code == 0
    second = read_value(cluster, keys.name('shop-front'))['instance']
    assert cluster.eschedule('host', 'drain', other.uuid).code == 0
    wait_until(
        lambda: f'compute {host} ({other.uuid}) disabled' in cluster.eschedule('events').stdout,
        30,
        'facts are published',
    )
    assert cluster.eschedule('host', 'enable', other.uuid).code == 0
    kill_and_lapse(cluster, dead)
    moved = read_rows(evacuate(cluster, dead, '--wait'))
    assert cluster.eschedule('host', 'forget', dead.uuid, '--fenced').code == 0

    lines = [line[25:] for line in cluster.eschedule('events').stdout.splitlines()]

    new, by = moved['evening']['replaced_by'], f', by {describe_user()}'
    expected = [
        f'stack shop: applied {Path(shop).name}: created{by}',
        f'shop-front: replaced by a new one ({first[:8]} → {second[:8]}){by}',
        f'compute {host} ({other.uuid}) disabled',
        f'evening: evacuated from {host} ({dead.uuid}) ({old[:8]} → {new[:8]}){by}',
        f'compute {host} forgotten',
    ]
    lines = lines[lines.index(expected[0]) :]  # etcd's history includes earlier tests
    assert [line for line in lines if line in expected] == expected, lines
    assert cluster.eschedule('destroy', new, '--wait').code == 0
    gone = cluster.eschedule('events', 'evening', '--since', '1h')
    assert (gone.code, f'evening ({new[:8]}): destroy accepted{by}' in gone.stdout) == (0, True), gone
    of_other = cluster.eschedule('events', '--host', other.uuid, '-f', 'json').stdout.splitlines()
    assert {json.loads(line)['compute'] for line in of_other} == {other.uuid}


@pytest.mark.unaudited('its computes are keys that no ecompute keeps')
def test_evacuation_needs_a_silent_host_and_is_alone(cluster: Control) -> None:
    compute = make_host(cluster)
    make_host(cluster)
    assert cluster.eschedule(SMALL, IMAGE, '--name', 'web', '--on', compute).code == 0
    attempt = keys.attempt(str(uuid.uuid5(uuid.UUID(compute), 'evacuate')))
    before = read_allocations(cluster)

    assert cluster.eschedule('evacuate', compute).code == 2
    assert cluster.eschedule('evacuate', compute, '--fenced', '--yes').code == 5
    cluster.etcd.delete(keys.compute(compute))
    [instance] = before
    [key] = cluster.etcd.list_keys(keys.request_prefix(compute))
    cluster.etcd.put(key, json.dumps({**read_value(cluster, key), 'query': SMALL}))
    unconfirmed = cluster.eschedule('evacuate', compute, '--fenced')
    cluster.etcd.put(attempt, json.dumps({'instances': [], 'host': 'other', 'pid': 1}), cluster.etcd.grant())
    busy = cluster.eschedule('evacuate', compute, '--fenced', '--yes')

    assert (unconfirmed.code, unconfirmed.stdout) == (2, ''), unconfirmed
    assert '1 disk on' in unconfirmed.stderr
    assert (busy.code, busy.stdout) == (5, ''), busy
    assert 'another evacuation is running, as process 1 on other' in busy.stderr
    assert read_allocations(cluster) == before
    assert read_value(cluster, key)['instance'] == instance
    cluster.etcd.delete(attempt)
    assert cluster.eschedule('evacuate', compute, '--fenced', '--yes').code == 0


# A claim stops a command (rule: shown-not-acted-on)


def test_first_apply_is_refused_while_a_silent_host_has_an_unknown_claim(cluster: Control) -> None:
    """After a restore of etcd it may be the claim of the stack that is applied."""
    silent, living = cluster.ecompute(ROOMY), cluster.ecompute(ROOMY)
    kill_and_lapse(cluster, silent)
    foreign = str(uuid.uuid4())  # on a shared disk, which is no host
    put_claim(cluster, foreign, cluster.placement.make_provider(DISK_GB=10), amounts={'DISK_GB': 1})
    assert cluster.eschedule('apply', write_stack(cluster, {'web': {}}, 'other'), '--wait').code == 0
    assert cluster.eschedule('destroy', '--stack', 'other', '--yes', '--wait').code == 0
    cluster.placement.call('DELETE', f'/allocations/{foreign}')
    unknown = str(uuid.uuid4())
    put_claim(cluster, unknown, silent.uuid)
    shop = write_stack(cluster, {'db': {}})
    for words in ((shop,), (shop, '--dry-run')):
        refused = cluster.eschedule('apply', *words)
        assert refused.code == 5, refused
        assert f'has the claim of {unknown}, which etcd does not know' in refused.stderr
        assert '--accept-new-etcd' in refused.stderr
        assert cluster.etcd.list_keys('/stacks/') == ['/stacks/other']
    assert cluster.eschedule('host', 'forget', silent.uuid, '--fenced').code == 0
    assert cluster.eschedule('apply', shop, '--wait').code == 0
    check_invariants(cluster, living)


def test_host_that_becomes_silent_during_the_question_keeps_its_instance(
    cluster: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = cluster.ecompute(ROOMY)
    pinned = {'db': {'query': f'{SMALL}&in_tree={silent.uuid}'}}
    assert cluster.eschedule('apply', write_stack(cluster, pinned), '--wait').code == 0
    living = cluster.ecompute(ROOMY)
    before = set(cluster.etcd.list_keys(keys.HOSTS))
    monkeypatch.setattr('ecomp.cli.apply.confirm_destroy', lambda *_: kill_and_lapse(cluster, silent))
    result = cluster.eschedule('apply', write_stack(cluster, {'db': {}}), '--replace-all', '-f', 'json')
    assert (result.code, json.loads(result.stdout)['instances'][0]['action']) == (5, 'stays'), result
    assert set(cluster.etcd.list_keys(keys.HOSTS)) == before
    silent.start()
    check_invariants(cluster, silent, living)


def test_guest_stays_while_its_replacement_is_claimed_on_a_silent_host(cluster: Control) -> None:
    """The claim may be that of an earlier evacuation, which a restored etcd does not know."""
    dead = cluster.ecompute(ROOMY)
    web, own = create(cluster, 'web')[0], create(cluster, 'own')[0]
    silent, living = cluster.ecompute(ROOMY), cluster.ecompute(ROOMY)
    for host in (dead, silent):
        kill_and_lapse(cluster, host)
    put_claim(cluster, keys.derive_uuid(web, 'evacuated'), silent.uuid)
    result = evacuate(cluster, dead)
    assert result.code == 3, result
    rows = read_rows(result)
    assert 'which is silent and may run it. Fix: wait, or start ecompute on' in rows['web']['reason']
    assert rows['own']['replaced_by'], 'the others go on'
    assert cluster.eschedule('host', 'forget', silent.uuid, '--fenced').code == 0
    assert evacuate(cluster, dead).code == 0
    wait_state(cluster, rows['own']['replaced_by'], 'active')
    dead.start()
    wait_state(cluster, own, 'gone')
    check_invariants(cluster, dead, living)


# A host of a lab dies with all its processes, is evacuated, and comes back.


BOOTING = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:256'
IDLE = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
PRESENCE_SECONDS = 60.0


def count_domains(lab: Lab) -> Counter[str]:
    return Counter(name for host in lab.hosts for name in lab.list_domains(host))


@pytest.mark.slow
def test_evacuated_guests_answer_on_their_new_hosts_and_none_lives_twice(lab: Lab) -> None:
    """A host is crashed with a guest that serves and an idle one, and then boots again."""
    host, old = lab.place(BOOTING, lab.make_url('guest.qcow2'), '--name', 'web')
    compute = lab.read_compute(host)
    _, idle = lab.place(f'{IDLE}&in_tree={compute}', lab.make_url('idle.raw'), '--name', 'pinned', '--wait=started')
    other = next(name for name in lab.hosts if name != host)
    _, kept = lab.place(f'{IDLE}&in_tree={lab.read_compute(other)}', lab.make_url('idle.raw'), '--wait=started')
    address = lab.wait_address(old)
    wait_until(lambda: is_serving(address), BOOT_SECONDS, 'the guest serves')
    dead = Hypervisor(lab, host)
    dead.compute = compute
    refused = lab.eschedule('evacuate', host, '--fenced', '--yes')
    assert refused.code == 5, refused
    assert 'is alive' in refused.stderr

    dead.crash()
    wait_until(lambda: f'/computes/{compute}' not in lab.read_etcd('/computes/'), PRESENCE_SECONDS, 'it is silent')
    shown = json.loads(lab.eschedule('list', '--state', 'unknown', '-f', 'json').stdout)
    assert {row['name']: row['state'] for row in shown} == {'web': 'active', 'pinned': 'active'}
    result = lab.eschedule('evacuate', host, '--fenced', '--yes', '--wait', '-f', 'json')

    assert result.code == 3, result  # the pinned one stays
    rows = {row['name']: row for row in json.loads(result.stdout)}
    new = rows['web']['replaced_by']
    assert new == str(uuid.uuid5(uuid.UUID(old), 'evacuated'))
    assert (rows['pinned']['instance'], rows['pinned']['replaced_by']) == (idle, None)
    new_address = lab.eschedule('web').stdout.strip()
    assert new_address == rows['web']['address']
    wait_until(lambda: is_serving(new_address), BOOT_SECONDS, 'the guest serves on its new host')
    assert new in lab.list_domains(rows['web']['host'])

    (dead.state / 'boot').write_text(f'{uuid.uuid4()}\n')
    lab.start_ecomputes()
    wait_until(lambda: old not in lab.list_domains(host), 60, 'the host that is back destroys what was replaced')
    dead.wait_state(idle, 'active')
    assert lab.eschedule('host', 'enable', host).code == 0
    assert count_domains(lab) == Counter([new, idle, kept])
    assert is_serving(new_address)
    assert kept in lab.list_domains(other)
    lab.check()
