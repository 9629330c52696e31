"""The history that the judge is given is what the servers hold: etcd change by change, placement by its database."""

from __future__ import annotations

import contextlib
import sqlite3
import uuid
from collections.abc import Iterator

import pytest

from ecomp.store.client import Put
from tests.kit.commands import Control
from tests.kit.ending import Kept
from tests.kit.history import Change
from tests.kit.journal import JOURNAL, own
from tests.kit.judging import is_broken
from tests.kit.servers import Etcd, PlacementServer, b64
from tests.kit.store_client import connected
from tests.kit.story import SMALL, place, reached
from tests.kit.witness import Compacted, Revisions, judged


@pytest.fixture
def journal() -> Iterator[None]:
    JOURNAL.begin()
    yield
    JOURNAL.end()


def test_each_change_since_the_beginning_is_read_once(own_etcd: Etcd) -> None:
    own_etcd.put('/earlier', 'here')
    revisions = Revisions(own_etcd.ask)
    revisions.begin()
    assert revisions.before == {'/earlier': Kept(b'here', 0)}
    assert (revisions.read_on(), revisions.changes) == (2, [])

    lease = int(own_etcd.call('lease/grant', {'TTL': 60})['ID'])
    own_etcd.call('kv/put', {'key': b64('/mark'), 'value': b64('x'), 'lease': lease})
    puts = [{'requestPut': {'key': b64(key), 'value': b64('1')}} for key in ('/a', '/b')]
    own_etcd.call('kv/txn', {'success': puts})
    assert revisions.read_on() == 4
    own_etcd.delete('/earlier')
    own_etcd.call('lease/revoke', {'ID': lease})
    assert revisions.read_on() == 6
    assert revisions.changes == [
        Change(3, '/mark', Kept(b'x', lease)),
        *(Change(4, key, Kept(b'1', 0)) for key in ('/a', '/b')),
        Change(5, '/earlier', None),
        Change(6, '/mark', None),
    ]


def test_what_etcd_has_forgotten_is_said(own_etcd: Etcd) -> None:
    revisions = Revisions(own_etcd.ask)
    revisions.begin()
    for _ in range(3):
        own_etcd.put('/a', 'x')
    own_etcd.compact()
    with pytest.raises(Compacted, match='before revision 4'):
        revisions.read_on()


def test_claims_are_what_placement_says(own_placement: PlacementServer) -> None:
    database = own_placement.database
    provider, idle = own_placement.make_provider(VCPU=4, DISK_GB=9), own_placement.make_provider(VCPU=2)
    assert (database.allocations(), database.capacities()) == ({}, {})
    consumer = str(uuid.uuid4())
    body = {
        'allocations': {provider: {'resources': {'VCPU': 3, 'DISK_GB': 1}}},
        'project_id': 'p',
        'user_id': 'u',
        'consumer_generation': None,
        'consumer_type': 'INSTANCE',
    }
    own_placement.call('PUT', f'/allocations/{consumer}', body)
    held = {consumer: {provider: own_placement.allocations(consumer)[provider]}}
    assert held == {consumer: {provider: {'VCPU': 3, 'DISK_GB': 1}}}
    assert (database.allocations(), database.capacities()) == (held, {provider: {'VCPU': 4, 'DISK_GB': 9}})
    assert idle not in database.capacities()

    # What is made smaller afterwards may be less than what is claimed.
    with contextlib.closing(sqlite3.connect(database.path)) as opened, opened:
        opened.execute("UPDATE inventories SET total = 1, updated_at = '2999-01-01' WHERE total = 4")
    assert (database.allocations(), database.capacities()) == (held, {provider: {'DISK_GB': 9}})


@pytest.mark.usefixtures('journal')  # before the cluster
@pytest.mark.unaudited('its record is made wrong')
def test_a_test_is_judged_by_what_it_left(cluster: Control) -> None:
    compute = cluster.ecompute()
    _, instance = place(cluster)
    reached(cluster, instance, 'active')
    judged(cluster.watched)
    assert not is_broken(cluster.watched)
    # Not by the journal's etcd, as somebody else would.
    key, value = cluster.etcd.record_key(instance), cluster.etcd.record(instance)
    assert value is not None
    with connected(cluster.etcd.endpoint) as store:
        store.commit([], [Put(key, value.decode().replace('"active"', '"building"'))])
    with pytest.raises(AssertionError, match=f'{instance}: active, then building'):
        judged(cluster.watched)
    assert is_broken(cluster.watched)
    assert [each.words for each in JOURNAL.asks] == [(SMALL,)]
    assert [each.uuid for each in JOURNAL.computes] == [compute.uuid]
    assert JOURNAL.leave(cluster.watched)  # or it would be judged once more when it ends


@pytest.mark.usefixtures('journal')
def test_what_a_test_writes_itself_is_its_own(own_etcd: Etcd, own_placement: PlacementServer) -> None:
    own_etcd.put('/hosts/compute/first', '{}')
    own_etcd.delete('/queues/flavor/second/taker')
    own_etcd.get('/instances/nobody')
    third = {'requestPut': {'key': b64('/names/third'), 'value': b64('{}')}}
    own_etcd.call('kv/txn', {'success': [third]})
    own_placement.allocations(str(uuid.uuid4()))
    provider = own_placement.make_provider(VCPU=1)
    assert JOURNAL.by_hand == {'first', 'second', 'third', provider}


@pytest.mark.usefixtures('journal')
def test_the_words_of_an_eschedule_are_written_down_without_its_configuration() -> None:
    words = own(['sh', '-c', 'exec', 'python', '-m', 'ecomp.schedule', '--config', '/x/schedule.yaml', 'list'])
    assert words is not None
    JOURNAL.ended(words, 0, ('out', ''), 0.0, 7)
    assert [(each.words, each.code, each.stdout, each.pid) for each in JOURNAL.asks] == [(('list',), 0, 'out', 7)]
    assert own(['python', '-m', 'ecomp.compute']) is None
