"""Where an instance goes: planned, and then done."""

from __future__ import annotations

import json
import socket
from collections import Counter

from tests.commands import Control
from tests.scenario.story import IMAGE, NOTIFIED, SMALL, one_line, place

TOY = 'VCPU:8,DISK_GB:100,MEMORY_MB:4096'


def target(cluster: Control, *words: str) -> str:
    """The compute that an instance is placed on."""
    done = cluster.eschedule(SMALL, IMAGE, *words)
    found = NOTIFIED.match(done.stdout)
    assert done.code == 0, done
    assert found, done
    return found[1]


def planned(cluster: Control, *words: str) -> list[str]:
    done = cluster.eschedule('plan', SMALL, '-f', 'json', *words)
    assert done.code == 0, done
    return [each['compute'] for each in json.loads(done.stdout)]


def test_instances_are_spread_and_packed_as_asked(cluster: Control) -> None:
    computes = [cluster.ecompute(TOY).uuid for _ in range(3)]
    # Each goes to one that has fewest, and none is left out.
    assert Counter(target(cluster) for _ in range(6)) == dict.fromkeys(computes, 2)
    fullest = target(cluster, '--on', computes[1])
    assert fullest == computes[1]
    assert [target(cluster, '--weigh', 'pack') for _ in range(3)] == [fullest] * 3
    assert {target(cluster) for _ in range(2)} == set(computes) - {fullest}


def test_the_plan_is_what_then_happens(cluster: Control) -> None:
    sizes = ('VCPU:8,DISK_GB:100,MEMORY_MB:4096', 'VCPU:2,DISK_GB:100,MEMORY_MB:4096', TOY)
    computes = [cluster.ecompute(size).uuid for size in sizes]
    for number in (0, 0, 2):
        place(cluster, SMALL, '--on', computes[number])
    expected = [computes[number] for number in (2, 0, 1)]
    before = cluster.placement.consumers(computes[2])
    assert planned(cluster) == expected
    assert planned(cluster, '--weigh', 'pack') == expected[::-1]
    assert cluster.placement.consumers(computes[2]) == before, 'nothing is claimed'
    assert target(cluster) == expected[0]
    lines = cluster.eschedule('plan', SMALL, '--weigh=pack').stdout.splitlines()
    assert lines[0].split() == ['COMPUTE', 'HOST', 'WEIGHT', *(
        word for name in ('VCPU', 'MEMORY_MB', 'DISK_GB') for word in (name, 'USED/CAPACITY')
    )]  # fmt: skip
    assert lines[1].split()[:4] == [computes[1], socket.gethostname(), '0.50', '0/2']
    done = cluster.eschedule('plan', SMALL.replace('VCPU:1', 'VCPU:9'))
    assert (done.code, done.stdout) == (3, 'NO ALLOCATIONS LEFT\n')


def test_a_host_is_named_by_what_it_is_called(cluster: Control) -> None:
    one = cluster.ecompute(TOY).uuid
    assert target(cluster, '--on', socket.gethostname()) == one
    two = cluster.ecompute(TOY).uuid
    done = cluster.eschedule(SMALL, IMAGE, '--on', socket.gethostname())
    both = ', '.join(sorted([one, two]))
    assert f'{socket.gethostname()} is the host name of 2 computes, give the uuid: {both}' in one_line(done, 2)
    done = cluster.eschedule('plan', SMALL, '--on', 'nowhere')
    assert done.code == 4
    assert 'nowhere: no compute of this host name is up' in done.stderr
