"""A follower on a real etcd: it sees each change, whatever becomes of etcd or of the way to it."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from ecomp.store.client import Delete, Put, Store
from tests.functional.following import Following
from tests.kit.servers import PATIENCE, Etcd, until


def test_a_follower_sees_what_is_there_then_each_change(etcd: Etcd, store: Store, prefix: str) -> None:
    a, b = prefix + 'a', prefix + 'b'
    store.commit([], [Put(a, '1')])
    with Following(etcd.endpoint, prefix) as seen:
        seen.sees({a: b'1'}, 'what was there before')
        store.commit([], [Put(b, '1'), Put(prefix[:-1] + '0', 'beside it')])
        seen.sees({a: b'1', b: b'1'}, 'a put')
        store.commit([], [Put(a, '2'), Delete(b)])
        seen.sees({a: b'2'}, 'a change and a delete in one transaction')
        store.commit([], [Delete(a)])
        seen.sees({}, 'the last delete')
        lease = store.grant(60)
        store.commit([], [Put(b, 'leased', lease)])
        seen.sees({b: b'leased'}, 'a leased key')
        store.revoke(lease)
        seen.sees({}, 'the end of its lease')
    assert seen.states[:2] == [{a: b'1'}, {a: b'1', b: b'1'}]


def test_a_follower_is_told_of_nothing_when_nothing_happens(etcd: Etcd, prefix: str) -> None:
    with Following(etcd.endpoint, prefix) as seen, Following(etcd.endpoint, prefix, resync=0.1) as relisting:
        until(lambda: len(relisting.states) > 5, 10, 'a follower with a short resync lists again')
        assert seen.states == [{}]


def test_a_key_that_is_no_text_is_no_end(etcd: Etcd, prefix: str) -> None:
    with Following(etcd.endpoint, prefix) as seen:
        seen.sees({}, 'nothing')
        etcd.put(prefix + 'a', b'\xff\xfe')
        etcd.call('kv/put', {'key': 'L3Rlc3Qv//8=', 'value': ''})  # /test/\xff\xff
        etcd.put(prefix + 'b', '')
        seen.sees({prefix + 'a': b'\xff\xfe', prefix + 'b': b''}, 'keys and values that are no text')


def test_a_killed_etcd_is_followed_again_and_said_once(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, 'ecomp.store.watch')
    own_etcd.put('/t/a', '1')
    with Following(own_etcd.endpoint, '/t/') as seen:
        seen.sees({'/t/a': b'1'}, 'the beginning')
        for value in ('2', '3'):
            caplog.clear()
            own_etcd.kill()
            until(lambda: caplog.records, 10, 'the loss is logged')
            used, began = time.process_time(), time.monotonic()
            threading.Event().wait(3.0)  # a measurement, not a synchronisation
            share = (time.process_time() - used) / (time.monotonic() - began)
            own_etcd.start()
            own_etcd.put('/t/a', value)
            seen.sees({'/t/a': value.encode()}, 'a change after the restart')
            assert [record.levelname for record in caplog.records] == ['WARNING', 'INFO']
            assert own_etcd.endpoint in caplog.messages[0]
            assert 'is back' in caplog.messages[1]
            assert share < 0.05


def test_an_etcd_that_ends_in_peace_is_followed_again(own_etcd: Etcd) -> None:
    """It says so before it hangs up, and what it says then is no reason to ask it otherwise from then on."""
    with Following(own_etcd.endpoint, '/t/') as seen:
        for value in ('1', '2', '3'):
            own_etcd.put('/t/a', value)
            seen.sees({'/t/a': value.encode()}, 'a change')
            own_etcd.stop()
            own_etcd.start()


def test_a_frozen_etcd_is_noticed_and_followed_again(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, 'ecomp.store.watch')
    with Following(own_etcd.endpoint, '/t/') as seen:
        seen.sees({}, 'the beginning')
        own_etcd.pause()
        until(lambda: caplog.records, 25, 'the follower notices that nobody answers')
        own_etcd.resume()
        until(own_etcd.is_ready, 10, 'etcd is awake')
        own_etcd.put('/t/a', '1')
        seen.sees({'/t/a': b'1'}, 'a change after it')
        assert [record.levelname for record in caplog.records] == ['WARNING', 'INFO']


def test_a_short_freeze_loses_nothing(own_etcd: Etcd) -> None:
    with Following(own_etcd.endpoint, '/t/') as seen:
        seen.sees({}, 'the beginning')
        own_etcd.pause()
        threading.Timer(0.5, own_etcd.resume).start()
        own_etcd.put('/t/a', '1')  # answered when it is awake
        seen.sees({'/t/a': b'1'}, 'a change made while it was frozen')


def test_stop_does_not_wait(own_etcd: Etcd) -> None:
    def stopped(state: str, seen: Following) -> None:
        began = time.monotonic()
        seen.follower.stop()
        assert time.monotonic() - began < PATIENCE * 3, state

    Following(own_etcd.endpoint, '/t/').follower.stop()  # never started
    seen = Following(own_etcd.endpoint, '/t/').__enter__()
    stopped('before it saw anything', seen)
    seen = Following(own_etcd.endpoint, '/t/').__enter__()
    seen.sees({}, 'the beginning')
    stopped('watching', seen)
    seen = Following(own_etcd.endpoint, '/t/').__enter__()
    seen.sees({}, 'the beginning')
    own_etcd.pause()
    stopped('watching a frozen etcd', seen)
    stopped('listing a frozen etcd', Following(own_etcd.endpoint, '/t/').__enter__())
    own_etcd.resume()
    own_etcd.kill()
    stopped('etcd is gone', Following(own_etcd.endpoint, '/t/').__enter__())
