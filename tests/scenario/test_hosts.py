"""eschedule hosts: computes that are up, closed, silent or orphaned, and what each plane knows of them."""

from __future__ import annotations

import socket
import uuid

from ecomp import __version__
from tests.kit.commands import Control
from tests.kit.invariants import check
from tests.kit.servers import until
from tests.kit.sharing import hosts, silence, states
from tests.kit.story import NOBODY, SMALL, addressed, boot_all, one_line, place, reached


def test_up_closed_silent_and_orphaned(cluster: Control) -> None:
    up, closed, silent, orphaned = (cluster.ecompute() for _ in range(4))
    for compute in (up, closed, silent):
        addressed(cluster, place(cluster, f'{SMALL}&in_tree={compute.uuid}')[1])
    assert set(states(cluster).values()) == {'up'}
    until(lambda: cluster.etcd.keys(f'/hostnames/{orphaned.uuid}'), 30, 'it has written down its name')
    closed.stop()
    silence(cluster, silent)
    silence(cluster, orphaned)

    name = socket.gethostname()
    shown = hosts(cluster)
    assert {compute: (each['state'], each['hostname'], each['instances']) for compute, each in shown.items()} == {
        up.uuid: ('up', name, 1),
        closed.uuid: ('closed', name, 1),
        silent.uuid: ('silent', name, 1),
        orphaned.uuid: ('orphaned', name, 0),
    }
    assert shown[up.uuid]['resources'] == {
        'VCPU': {'used': 1, 'free': 3, 'capacity': 4, 'over': 0},
        'DISK_GB': {'used': 1, 'free': 9, 'capacity': 10, 'over': 0},
        'MEMORY_MB': {'used': 128, 'free': 384, 'capacity': 512, 'over': 0},
    }
    assert shown[closed.uuid]['resources']['VCPU'] == {'used': 1, 'free': 0, 'capacity': 0, 'over': 0}

    table = cluster.eschedule('hosts')
    assert (table.code, table.stderr) == (0, '')
    head, *lines = table.stdout.splitlines()
    assert ' '.join(head.split()) == (
        'COMPUTE HOST STATE INSTANCES VCPU USED/CAPACITY MEMORY_MB USED/CAPACITY DISK_GB USED/CAPACITY VERSION KIND'
    )
    assert sorted(line.split() for line in lines) == sorted(
        [
            [up.uuid, name, 'up', '1', '1/4', '128/512', '1/10', __version__, 'fake'],
            [closed.uuid, name, 'closed', '1', '1/0', '128/512', '1/10', '-', '-'],
            [silent.uuid, name, 'silent', '1', '1/4', '128/512', '1/10', '-', '-'],
            [orphaned.uuid, name, 'orphaned', '0', '0/4', '0/512', '0/10', '-', '-'],
        ]
    )
    # They are what they were as soon as they are back.
    for compute in (closed, silent, orphaned):
        compute.start()
    assert set(states(cluster).values()) == {'up'}
    check(cluster, up, closed, silent, orphaned)


def test_what_only_one_plane_knows_is_shown_too(cluster: Control) -> None:
    other = str(uuid.uuid4())
    cluster.placement.call('POST', '/resource_providers', {'uuid': other, 'name': 'nova-compute-7'})
    cluster.placement.make_provider(DISK_GB=1000)
    assert hosts(cluster) == {}
    assert cluster.eschedule('hosts').stdout.splitlines()[1:] == []

    alive, requested = str(uuid.uuid4()), str(uuid.uuid4())
    cluster.etcd.put(f'/computes/{alive}', '{"hostname": "hv9"}', cluster.etcd.grant())
    # Who is on no lease is nobody.
    cluster.etcd.put(f'/computes/{(nobody := str(uuid.uuid4()))}', '{"hostname": "hv8"}')
    cluster.etcd.put(f'/hosts/{requested}/{NOBODY}', 'not JSON')
    line = f'{alive} hv9 up 0 - - - - -\n{requested} - silent 1 - - - - -'
    shown = cluster.eschedule('hosts').stdout
    assert [each.split() for each in shown.splitlines()[1:]] == [each.split() for each in line.splitlines()]
    cluster.etcd.delete(f'/hosts/{requested}/{NOBODY}')
    for each in (alive, nobody):
        cluster.etcd.delete(f'/computes/{each}')


def test_more_claimed_than_there_is(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:4,DISK_GB:10,MEMORY_MB:512')
    instances = boot_all(cluster, 3)
    compute.stop()
    compute.inventory = 'VCPU:2,DISK_GB:10,MEMORY_MB:256'
    compute.start()

    def line() -> str:
        return ' '.join(cluster.eschedule('hosts').stdout.splitlines()[1].split())

    assert ' up 3 3/2 (1 too many) 384/256 (128 too many) 3/10 ' in line()
    assert hosts(cluster)[compute.uuid]['resources']['VCPU'] == {'used': 3, 'free': 0, 'capacity': 2, 'over': 1}
    assert cluster.eschedule('destroy', '--wait', instances[0]).code == 0
    assert ' up 2 2/2 256/256 2/10 ' in line()
    check(cluster, compute)


def test_a_record_that_cannot_be_read_is_named_with_its_cure_and_the_rest_is_shown(cluster: Control) -> None:
    compute = cluster.ecompute()
    instance, other = boot_all(cluster, 2)
    cluster.etcd.put(f'/instances/{compute.uuid}/{instance}', '{"version": 99}')
    cure = f'etcdctl del /instances/{compute.uuid}/{instance}'
    for command, shown in (('hosts', compute.uuid), ('list', other)):
        result = cluster.eschedule(command)
        one_line(result, 1, f'/instances/{compute.uuid}/{instance}: ', 'version 99', cure)
        assert shown in result.stdout
    # The cure does: what the compute has is written down anew.
    cluster.etcd.delete(cluster.etcd.record_key(instance))
    compute.restart()
    reached(cluster, instance, 'active')
    assert cluster.eschedule('list').code == 0
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check(cluster, compute)
