"""A follower on a real etcd: it sees each change, whatever becomes of etcd or of the way to it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import pytest

from ecomp.store.client import Delete, Entry, Put, Store
from ecomp.store.watch import Follower
from tests.kit.proxy import Proxy
from tests.kit.servers import PATIENCE, Etcd, until
from tests.kit.store_client import config


class Seen:
    """What a follower was told, and a follower that tells it."""

    def __init__(self, endpoint: str, prefix: str, resync: float = 60.0, timeout: float = 2.0) -> None:
        self.states: list[dict[str, bytes]] = []
        self.follower = Follower(config(endpoint, timeout), [(prefix, self._on_state)], resync)

    def __enter__(self) -> Seen:
        self.follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.stop()

    def _on_state(self, state: Mapping[str, Entry]) -> None:
        self.states.append({key: entry.value for key, entry in state.items()})

    @property
    def now(self) -> dict[str, bytes]:
        return self.states[-1] if self.states else {'nothing': b'yet'}

    def sees(self, what: str, wanted: dict[str, bytes], seconds: float = 15.0) -> None:
        until(lambda: self.now == wanted, seconds, f'{what}: {wanted}, last seen {self.now}')


def test_a_follower_sees_what_is_there_then_each_change(etcd: Etcd, store: Store, prefix: str) -> None:
    a, b = prefix + 'a', prefix + 'b'
    store.commit([], [Put(a, '1')])
    with Seen(etcd.endpoint, prefix) as seen:
        seen.sees('what was there before', {a: b'1'})
        store.commit([], [Put(b, '1'), Put(prefix[:-1] + '0', 'beside it')])
        seen.sees('a put', {a: b'1', b: b'1'})
        store.commit([], [Put(a, '2'), Delete(b)])
        seen.sees('a change and a delete in one transaction', {a: b'2'})
        store.commit([], [Delete(a)])
        seen.sees('the last delete', {})
        lease = store.grant(60)
        store.commit([], [Put(b, 'leased', lease)])
        seen.sees('a leased key', {b: b'leased'})
        store.revoke(lease)
        seen.sees('the end of its lease', {})
    assert seen.states[:2] == [{a: b'1'}, {a: b'1', b: b'1'}]


def test_every_change_between_the_list_and_the_watch_is_seen(etcd: Etcd, store: Store, prefix: str) -> None:
    key = prefix + 'x'
    numbers = iter(range(10**9))
    with Seen(etcd.endpoint, prefix, resync=0.05) as seen:
        for _ in range(200):
            store.commit([], [Put(key, str(next(numbers)))])
        seen.sees('the last of many', {key: b'199'})
    shown = [int(state[key]) for state in seen.states if state]
    assert shown == sorted(shown)


def test_a_follower_is_told_of_nothing_when_nothing_happens(etcd: Etcd, prefix: str) -> None:
    with Seen(etcd.endpoint, prefix) as seen, Seen(etcd.endpoint, prefix, resync=0.1) as relisting:
        until(lambda: len(relisting.states) > 5, 10, 'a follower with a short resync lists again')
        assert seen.states == [{}]


def test_a_key_that_is_no_text_is_no_end(etcd: Etcd, prefix: str) -> None:
    with Seen(etcd.endpoint, prefix) as seen:
        seen.sees('nothing', {})
        etcd.put(prefix + 'a', b'\xff\xfe')
        etcd.call('kv/put', {'key': 'L3Rlc3Qv//8=', 'value': ''})  # /test/\xff\xff
        etcd.put(prefix + 'b', '')
        seen.sees('keys and values that are no text', {prefix + 'a': b'\xff\xfe', prefix + 'b': b''})


def test_a_killed_etcd_is_followed_again_and_said_once(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, 'ecomp.store.watch')
    own_etcd.put('/t/a', '1')
    with Seen(own_etcd.endpoint, '/t/') as seen:
        seen.sees('the beginning', {'/t/a': b'1'})
        for value in ('2', '3'):
            caplog.clear()
            own_etcd.kill()
            until(lambda: caplog.records, 10, 'the loss is logged')
            used, began = time.process_time(), time.monotonic()
            threading.Event().wait(3.0)  # a measurement, not a synchronisation
            share = (time.process_time() - used) / (time.monotonic() - began)
            own_etcd.start()
            own_etcd.put('/t/a', value)
            seen.sees('a change after the restart', {'/t/a': value.encode()})
            assert [record.levelname for record in caplog.records] == ['WARNING', 'INFO']
            assert own_etcd.endpoint in caplog.messages[0]
            assert 'is back' in caplog.messages[1]
            assert share < 0.05


def test_an_etcd_that_ends_in_peace_is_followed_again(own_etcd: Etcd) -> None:
    """It says so before it hangs up, and what it says then is no reason to ask it otherwise from then on."""
    with Seen(own_etcd.endpoint, '/t/') as seen:
        for value in ('1', '2', '3'):
            own_etcd.put('/t/a', value)
            seen.sees('a change', {'/t/a': value.encode()})
            own_etcd.stop()
            own_etcd.start()


def test_a_frozen_etcd_is_noticed_and_followed_again(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, 'ecomp.store.watch')
    with Seen(own_etcd.endpoint, '/t/') as seen:
        seen.sees('the beginning', {})
        own_etcd.pause()
        until(lambda: caplog.records, 25, 'the follower notices that nobody answers')
        own_etcd.resume()
        until(own_etcd.is_ready, 10, 'etcd is awake')
        own_etcd.put('/t/a', '1')
        seen.sees('a change after it', {'/t/a': b'1'})
        assert [record.levelname for record in caplog.records] == ['WARNING', 'INFO']


def test_a_short_freeze_loses_nothing(own_etcd: Etcd) -> None:
    with Seen(own_etcd.endpoint, '/t/') as seen:
        seen.sees('the beginning', {})
        own_etcd.pause()
        threading.Timer(0.5, own_etcd.resume).start()
        own_etcd.put('/t/a', '1')  # answered when it is awake
        seen.sees('a change made while it was frozen', {'/t/a': b'1'})


def test_what_was_compacted_while_away_is_listed_anew(own_etcd: Etcd) -> None:
    with Proxy(own_etcd.port) as proxy, Seen(proxy.address, '/t/') as seen:
        own_etcd.put('/t/a', '1')
        seen.sees('the beginning', {'/t/a': b'1'})
        proxy.go_away()
        own_etcd.put('/t/a', '2')
        own_etcd.delete('/t/a')
        own_etcd.put('/t/b', '3')
        own_etcd.compact()
        proxy.come_back()
        seen.sees('the present, of which no history is left', {'/t/b': b'3'})
        own_etcd.put('/t/c', '4')
        seen.sees('a change after it', {'/t/b': b'3', '/t/c': b'4'})


def test_stop_does_not_wait(own_etcd: Etcd) -> None:
    def stopped(state: str, seen: Seen) -> None:
        began = time.monotonic()
        seen.follower.stop()
        assert time.monotonic() - began < PATIENCE * 3, state

    Seen(own_etcd.endpoint, '/t/').follower.stop()  # never started
    seen = Seen(own_etcd.endpoint, '/t/').__enter__()
    stopped('before it saw anything', seen)
    seen = Seen(own_etcd.endpoint, '/t/').__enter__()
    seen.sees('the beginning', {})
    stopped('watching', seen)
    seen = Seen(own_etcd.endpoint, '/t/').__enter__()
    seen.sees('the beginning', {})
    own_etcd.pause()
    stopped('watching a frozen etcd', seen)
    stopped('listing a frozen etcd', Seen(own_etcd.endpoint, '/t/').__enter__())
    own_etcd.resume()
    own_etcd.kill()
    stopped('etcd is gone', Seen(own_etcd.endpoint, '/t/').__enter__())
