"""What a compute says in its key besides that it is alive: put when the key is renewed, and no sign of a copy."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecomp.store.client import Put, Store, Unchanged
from tests.functional.present import presence, start_and_stop
from tests.kit.servers import PATIENCE, Etcd, until
from tests.kit.store_client import connected, read_entry


def test_what_else_there_is_to_say_is_put_at_a_renewal_and_only_when_it_is_another(
    etcd: Etcd, store: Store, prefix: str
) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)) as says:

        def there() -> dict[str, object]:
            return json.loads(etcd.get(key) or b'{}')

        first = read_entry(store, key)
        for room in (1, 2):
            says.say(room=room)
            says.look()
            until(lambda room=room: there().get('room') == room, 10, 'it is said')
        entry = read_entry(store, key)
        assert (entry.lease, entry.created) == (first.lease, first.created)
        assert there()['hostname'] == 'host-of-mine'
        for _ in range(3):
            renewed = store.keep_alive(entry.lease)
            says.look()
            assert renewed
        # What is written now is written by who it is, and nothing has changed that key since.
        assert store.commit([], [Put(prefix + 'x', '1')])
        assert store.get(key) == entry
        says.say(room=None)
        says.look()
        until(lambda: there()['room'] is None, 10, 'it is not said any more')
        assert lost == []


def test_what_is_written_while_it_says_more_is_written(etcd: Etcd, store: Store, prefix: str) -> None:
    key, lost, number = prefix + 'c', list[str](), 0
    with start_and_stop(presence(store, key, 'mine', lost)) as says:
        with ThreadPoolExecutor(4) as pool:
            for number in range(20):
                says.say(room=number)
                says.look()
                written = [pool.submit(store.commit, [], [Put(f'{prefix}{number}/{each}', 'x')]) for each in range(4)]
                assert all(each.result(PATIENCE) for each in written)
        until(lambda: json.loads(etcd.get(key) or b'{}').get('room') == number, 10, 'the last is said')
        assert lost == []


def test_one_that_said_more_and_does_not_know_whether_it_got_there_is_no_copy(
    etcd: Etcd, store: Store, prefix: str
) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)) as says:
        entry = read_entry(store, key)
        # It got there, and we were not told.
        landed = json.dumps({**json.loads(entry.value), 'room': 7})
        with connected(etcd.endpoint) as other:
            assert other.commit([Unchanged(key, entry.revision)], [Put(key, landed, entry.lease)])
        says.say(room=8)
        says.look()
        until(lambda: json.loads(etcd.get(key) or b'{}').get('room') == 8, 10, 'it is put again')
        assert store.commit([], [Put(prefix + 'x', '1')])
        assert lost == []


def test_what_is_said_later_is_put_with_the_next_renewal(
    store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 3)
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)) as alive:
        assert store.get(key) is not None
        alive.say(room={'VCPU': [4, 50]})

        def said() -> bool:
            entry = store.get(key)
            return entry is not None and json.loads(entry.value).get('room') == {'VCPU': [4, 50]}

        assert not said()
        until(said, 20, 'it says so')
        assert store.commit([], [Put(prefix + 'x', '1')]), 'and its fence is the new one'
        alive.say(room={'VCPU': [4, 25]})
        alive.look()
    assert lost == []
