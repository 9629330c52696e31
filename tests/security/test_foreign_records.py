"""A record is believed only of the compute that its key names: who is taken over ends no guest of others."""

from __future__ import annotations

import json
from uuid import uuid4

import pytest

from ecomp.model import keys
from ecomp.store.sharing import index, listed
from tests.kit.commands import Control
from tests.kit.hands import guests
from tests.kit.invariants import check
from tests.kit.servers import Etcd, until
from tests.kit.store_client import connected
from tests.kit.story import SMALL, addressed, logs, one_line, place, reached, record
from tests.kit.tuned import tuned

STATES = ('active', 'stopped', 'building', 'destroying', 'error', 'gone')
OTHER = '66666666-0000-4000-8000-000000000000'
QUERY = 'VCPU:8,DISK_GB:10,MEMORY_MB:1024'


def forge(cluster: Control, instance: str, state: str, key: str) -> None:
    """As whoever may write to etcd does: the instance is another compute's, and its address another one's."""
    value = {**(record(cluster, instance) or {}), 'compute': OTHER, 'state': state}
    cluster.etcd.put(key, json.dumps(value))
    cluster.etcd.put(f'/booted/{instance}', '10.66.66.66')


@pytest.mark.parametrize('down', [False, True])
@pytest.mark.parametrize('place_of', ['/instances/{}', f'/instances/{OTHER}/{{}}'], ids=['older', 'below another'])
def test_what_others_say_of_a_guest_is_not_believed(cluster: Control, down: bool, place_of: str) -> None:
    """Within a minute the victim's own compute dropped its request and gave its claim away (ENEMY 2)."""
    compute = tuned(cluster, QUERY, numbers={'EVERY': 1})
    instances = [place(cluster, SMALL, '--name', f'n{number}')[1] for number, _ in enumerate(STATES)]
    before = {each: (addressed(cluster, each), cluster.placement.allocations(each)) for each in instances}
    running, records = guests(compute), {each: cluster.etcd.record(each) for each in instances}
    if down:
        compute.stop()
    for instance, state in zip(instances, STATES, strict=True):
        forge(cluster, instance, state, place_of.format(instance))
    if down:
        compute.start()
    also = addressed(cluster, place(cluster, SMALL)[1])  # by then it has looked
    for instance, (address, held) in before.items():
        assert cluster.eschedule(instance).stdout == f'{address}\n' != f'{also}\n'
        assert f'compute      {compute.uuid}' in cluster.eschedule('show', instance).stdout
        assert cluster.placement.allocations(instance) == held
        assert cluster.etcd.get(f'/hosts/{compute.uuid}/{instance}') is not None
        assert cluster.etcd.get(f'/instances/{compute.uuid}/{instance}') == records[instance]
    assert guests(compute).items() >= running.items()
    found = cluster.eschedule('audit')
    assert found.code == 8
    assert found.stdout.count('record-doubled') == 4
    assert found.stdout.count('booted-differs') == 6
    for number, instance in enumerate(instances):
        assert cluster.eschedule('destroy', '--wait', f'n{number}').code == 0
        until(lambda instance=instance: instance not in guests(compute), 20, 'it is gone')  # type: ignore[misc]
        cluster.etcd.delete(place_of.format(instance))
        reached(cluster, instance, 'gone')
    check(cluster, compute)


def test_what_is_deeper_below_a_compute_is_of_no_instance(etcd: Etcd) -> None:
    """Seventy keys of a megabyte that end in an instance kept everybody from showing and from destroying it."""
    instance, compute = str(uuid4()), str(uuid4())
    good = [keys.request(compute, instance), keys.record(compute, instance), keys.old_record(instance)]
    forged = [f'/{family}/{OTHER}/{part}/{instance}' for family in ('hosts', 'instances') for part in ('', '1', '1/2')]
    for key in (*good, *forged, f'/hosts/{instance}'):
        etcd.put(key, 'x')
    with connected(etcd.endpoint) as store:
        among = index(store)
        assert {*among.requests[instance], *among.records[instance]} == set(good)
        assert listed(store, instance).requests.keys() == {compute}
    for key in (*good, *forged, f'/hosts/{instance}'):
        etcd.delete(key)


def test_one_in_its_own_place_is_not_read(cluster: Control) -> None:
    """Who has the right to write there may break it, and nothing is done by what it says."""
    compute = tuned(cluster, QUERY, numbers={'EVERY': 1})
    instance = place(cluster, SMALL)[1]
    address, held = addressed(cluster, instance), cluster.placement.allocations(instance)
    key = cluster.etcd.record_key(instance)
    forge(cluster, instance, 'gone', key)
    logs(compute, key, f'a record of compute {OTHER}')
    one_line(cluster.eschedule('show', instance), 1, f'etcdctl del {key}')
    assert cluster.placement.allocations(instance) == held
    assert guests(compute)[instance]['running']
    # The cure does.
    cluster.etcd.delete(key)
    compute.restart()
    reached(cluster, instance, 'active')
    # A guest that is there already is adopted first, and asked for its addresses then.
    until(lambda: addressed(cluster, instance) == address, 20, 'its own address is back')
    forge(cluster, instance, 'gone', key)
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)


def test_rubbish_in_the_older_place_holds_nothing_up(cluster: Control) -> None:
    """Whoever may write there could keep an instance from being made, and from being destroyed."""
    compute = tuned(cluster, QUERY, numbers={'EVERY': 1})
    compute.pause()
    made = []
    for value in ('', 'null', '{"version": 2}', '[' * 50_000):
        made.append(place(cluster, SMALL)[1])
        cluster.etcd.put(f'/instances/{made[-1]}', value)
    compute.resume()
    for instance in made:
        key = f'/instances/{compute.uuid}/{instance}'
        until(lambda key=key: b'"active"' in (cluster.etcd.get(key) or b''), 20, 'it is active')  # type: ignore[misc]
        assert cluster.eschedule('destroy', '--wait', instance).code == 0
        cluster.etcd.delete(f'/instances/{instance}')
    check(cluster, compute)


def test_what_ecomp_1_0_has_written_is_read_and_moves(cluster: Control) -> None:
    """For one version: its records lie below no compute, and their own compute takes them there as it starts."""
    compute = tuned(cluster, QUERY, numbers={'EVERY': 1})
    instances = [place(cluster, SMALL, '--name', name)[1] for name in ('stays', 'stops', 'ends')]
    before = {each: addressed(cluster, each) for each in instances}
    compute.stop()
    for each in instances:
        cluster.etcd.put(f'/instances/{each}', cluster.etcd.record(each) or b'')
        cluster.etcd.delete(f'/instances/{compute.uuid}/{each}')
    assert [cluster.eschedule(name).stdout.strip() for name in ('stays', 'stops', 'ends')] == list(before.values())
    compute.start()
    stays, stops, ends = instances
    assert cluster.eschedule('stop', '--wait', 'stops').code == 0
    assert cluster.eschedule('destroy', '--wait', 'ends').code == 0
    moved = {f'/instances/{compute.uuid}/{each}' for each in instances}
    until(lambda: set(cluster.etcd.keys('/instances/')) == moved, 20, 'all are below their compute')
    assert guests(compute).keys() == {stays, stops}
    assert cluster.eschedule('list').stdout.count('active') == 1
    assert cluster.eschedule('audit').code == 0
    for name in ('stays', 'stops'):
        assert cluster.eschedule('destroy', '--wait', name).code == 0
    assert all(key.startswith(f'/instances/{compute.uuid}/') for key in cluster.etcd.keys('/instances/'))
    check(cluster, compute)
