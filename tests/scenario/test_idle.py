"""What computes cost that have nothing to do: threads of their process, calls to placement, operations of etcd."""

from __future__ import annotations

import re
import time
import urllib.request
from collections import Counter
from pathlib import Path

import pytest

from tests.kit.commands import Control
from tests.kit.many import Many
from tests.kit.servers import Etcd, until
from tests.kit.story import SMALL, addressed, notified
from tests.kit.tuned import tuned
from tests.scenario.queued import overheard

MINUTE = 0.5
"""Seconds of a compute's minute here."""
MINUTES = 12
TIMES = 4
"""How often so many minutes are looked at, at most."""


def done(etcd: Etcd) -> Counter[str]:
    """How often etcd was asked, by its own count: {'KV/Range': …, 'Lease/LeaseKeepAlive': …}."""
    with urllib.request.urlopen(f'http://{etcd.endpoint}/metrics', timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'^grpc_server_started_total\{grpc_method="(\w+)",grpc_service="etcdserverpb\.(\w+)".*\} (\d+)',
                       text, re.MULTILINE)
    return Counter({f'{service}/{method}': int(number) for method, service, number in found})


@pytest.mark.parametrize('queues', [False, True])
def test_a_minute_of_one_is_one_question_and_no_write(cluster: Control, queues: bool) -> None:
    with overheard(cluster) as (placement, asked):
        numbers = {'EVERY': MINUTE, 'NAMED': 1000, 'host.claims.BELIEVED': 1000}
        compute = tuned(cluster, numbers=numbers, placement=placement, queues=queues)
        addressed(cluster, notified(cluster.eschedule(SMALL))[1])
        provider = f'/resource_providers/{compute.uuid}'
        until(lambda: asked[-4:] == [provider] * 4, 40, 'nothing has changed for a while')
        # What a slow machine is late with (the guest's last stage, a lease) falls into the first minutes; what is
        # written again and again falls into all of them.
        beyond = [more_than_a_question(cluster.etcd, asked, provider)]
        while beyond[-1] and len(beyond) < TIMES:
            beyond.append(more_than_a_question(cluster.etcd, asked, provider))
        assert not beyond[-1], beyond


def more_than_a_question(etcd: Etcd, asked: list[str], provider: str) -> Counter[str]:
    """What is done in so many minutes, beyond asking for the provider and renewing the lease every ten seconds."""
    asked.clear()
    before = done(etcd)
    until(lambda: len(asked) >= MINUTES, 400, f'{MINUTES} minutes have passed')
    more = done(etcd) - before + Counter(set(asked) - {provider})
    del more['KV/Range'], more['Lease/LeaseKeepAlive']
    return more


def test_what_is_claimed_or_changed_is_looked_at(cluster: Control) -> None:
    with overheard(cluster) as (placement, asked):
        numbers = {'EVERY': MINUTE, 'host.claims.BELIEVED': 1000}
        compute = tuned(cluster, numbers=numbers, placement=placement)
        provider = f'/resource_providers/{compute.uuid}'
        until(lambda: asked[-4:] == [provider] * 4, 40, 'nothing has changed for a while')
        generation = cluster.placement.call('GET', provider)['generation']
        body = {'traits': ['COMPUTE_NODE'], 'resource_provider_generation': generation}
        cluster.placement.call('PUT', f'{provider}/traits', body)
        asked.clear()
        until(lambda: {f'{provider}/allocations', f'{provider}/traits'} <= set(asked), 20, 'all of it is looked at')
        until(lambda: asked[-4:] == [provider] * 4, 40, 'and then no more')


def threads(pid: int) -> int:
    return len(list(Path(f'/proc/{pid}/task').iterdir()))


def test_of_many_the_threads_are_as_those_of_a_few(cluster: Control) -> None:
    found = []
    for count in (16, 64):
        many = Many(cluster, count, queues=True, state=f'state-{count}')
        many.start()
        for instance in [notified(cluster.eschedule(SMALL))[1] for _ in range(2)]:
            addressed(cluster, instance)
        found.append(threads(many.pid))
        assert many.stop() == 0
    few, more = found
    assert more < 64, f'{few} of 16 computes, {more} of 64'


def test_an_idle_minute_of_many_is_one_question_for_all(cluster: Control) -> None:
    with overheard(cluster) as (placement, asked):
        many = Many(cluster, 20, placement=placement, queues=True)
        many.start()
        computes = many.computes

        def said() -> bool:
            return all(b'"room"' in (cluster.etcd.get(f'/computes/{each}') or b'') for each in computes)

        until(said, 30, 'each has said what room it has, once')
        asked.clear()
        before, began = done(cluster.etcd), cluster.etcd.get('/cluster')
        time.sleep(12)  # one renewal, and a fifth of a minute
        more = done(cluster.etcd) - before
        assert more['Lease/LeaseKeepAlive'] <= 2, 'one lease for all of them'
        assert more['KV/Txn'] == more['Lease/LeaseGrant'] == more['KV/Put'] == 0
        assert set(asked) <= {'/resource_providers'}, 'and none for each'
        assert len(computes) == 20
        assert cluster.etcd.get('/cluster') == began
