"""Flavors: made by an operator, asked for by name, also in a plan and a set."""

from __future__ import annotations

import json

from tests.kit.commands import Control, eschedule, write_config
from tests.kit.story import IMAGE, SMALL, notified, one_line, reached, record


def test_made_listed_asked_for_and_removed(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:8,DISK_GB:100,MEMORY_MB:4096')
    one_line(cluster.eschedule('flavor', 'set', 'tiny', SMALL), 0, 'flavor tiny: made')
    one_line(cluster.eschedule('flavor', 'set', 'tiny', f'{SMALL}&required=!MISC_SHARES_VIA_AGGREGATE'), 0, 'changed')
    (line,) = cluster.eschedule('flavor', 'list').stdout.splitlines()[1:]
    assert line.split() == ['tiny', 'VCPU:1,DISK_GB:1,MEMORY_MB:128', '!MISC_SHARES_VIA_AGGREGATE', 'etcd']
    for words in (('--flavor', 'tiny'), ('--flavor', 'tiny', 'http://images.invalid/a=b.qcow2')):
        target, instance = notified(cluster.eschedule(*words))
        assert target == compute.uuid
        assert reached(cluster, instance, 'active')['resources'] == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
        assert record(cluster, instance)['query'] == f'{SMALL}&required=!MISC_SHARES_VIA_AGGREGATE'
    _, instance = notified(cluster.eschedule('resources=VCPU:2', IMAGE, '--flavor', 'tiny'))
    assert reached(cluster, instance, 'active')['resources']['VCPU'] == 2
    assert len(cluster.eschedule('--flavor', 'tiny', '--count', '2').stdout.splitlines()) == 2
    planned = json.loads(cluster.eschedule('plan', '--flavor', 'tiny', '-f', 'json').stdout)
    assert planned[0]['asked'] == {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}
    one_line(cluster.eschedule('flavor', 'delete', 'tiny'), 0, 'removed')
    one_line(cluster.eschedule('--flavor', 'tiny'), 4, 'tiny: no such flavor')
    one_line(cluster.eschedule('flavor', 'delete', 'tiny'), 4, 'no such flavor')


def test_schedule_yaml_comes_first(cluster: Control) -> None:
    cluster.ecompute('VCPU:8,DISK_GB:100,MEMORY_MB:4096')
    one_line(cluster.eschedule('flavor', 'set', 'small', SMALL.replace('VCPU:1', 'VCPU:7')), 0, 'made')
    flavors = {'flavors': {'small': SMALL, 'none': f'{SMALL}&required=HW_CPU_X86_AVX512F'}}
    write_config(cluster.schedule_yaml, cluster.etcd.endpoint, cluster.placement.url, **flavors)
    listed = json.loads(cluster.eschedule('flavor', 'list', '-f', 'json').stdout)
    assert [(each['name'], each['source'], each['resources']['VCPU']) for each in listed] == [
        ('none', 'schedule.yaml', 1),
        ('small', 'schedule.yaml', 1),
    ]
    _, instance = notified(cluster.eschedule('--flavor', 'small'))
    assert reached(cluster, instance, 'active')['resources']['VCPU'] == 1
    refused = cluster.eschedule('--flavor', 'none')
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    assert 'lacks HW_CPU_X86_AVX512F' in refused.stderr
    nowhere = 'etcd.invalid:1', 'http://placement.invalid'
    bad = write_config(cluster.directory / 'bad.yaml', *nowhere, flavors={'bad': 'x'})
    one_line(eschedule(bad, 'list'), 2, 'bad.yaml', 'flavors: bad', 'nothing else')


def test_what_is_asked_wrongly(cluster: Control) -> None:
    one_line(cluster.eschedule('flavor', 'set', 'tiny'), 2, 'give a name and what it asks for')
    one_line(cluster.eschedule('flavor', 'set', 'a/b', SMALL), 2, 'is no name of a flavor')
    one_line(cluster.eschedule('flavor', 'delete'), 2, 'which flavor?')
    one_line(cluster.eschedule('http://images.invalid/x'), 2, 'neither a command nor an instance')
    one_line(cluster.eschedule('list', '--flavor', 'tiny'), 2, '--flavor does not go with this form')
    one_line(cluster.eschedule('plan'), 2, 'give a placement query')
    cluster.etcd.put('/flavors/odd', '{"version": 7}')
    one_line(cluster.eschedule('--flavor', 'odd'), 1, '/flavors/odd', 'etcdctl del /flavors/odd')
    assert cluster.eschedule('flavor', 'set', 'tiny', SMALL).code == 0
    listed = cluster.eschedule('flavor', 'list')
    one_line(listed, 1, '/flavors/odd')
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ['FLAVOR', 'tiny'], 'the others are shown'
