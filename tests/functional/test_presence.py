"""The key that says a compute is alive, on a real etcd: whose it is, and for how long."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from ecomp.errors import Conflict, NoSpace, Unreachable
from ecomp.store.client import RENEWED, Delete, Put, Store, Unchanged
from ecomp.store.presence import Presence
from tests.functional.present import presence, start_and_stop
from tests.kit.servers import PATIENCE, Etcd, until
from tests.kit.store_client import connected, read_entry


def test_presence_is_there_until_it_stops(etcd: Etcd, store: Store, prefix: str) -> None:
    key = prefix + 'c'
    with start_and_stop(presence(store, key, 'mine')):
        entry = read_entry(store, key)
        assert json.loads(entry.value)['hostname'] == 'host-of-mine'
        assert entry.lease
    assert etcd.get(key) is None


def test_the_same_token_takes_over_at_once_and_another_is_refused(store: Store, prefix: str) -> None:
    key = prefix + 'c'
    killed = presence(store, key, 'mine')
    killed.start()
    stranger = presence(store, key, 'theirs')
    for deed in (stranger.check, stranger.start):
        with pytest.raises(Conflict, match='held by another ecompute, on host-of-mine since today'):
            deed()
    restarted = presence(store, key, 'mine')
    restarted.check()
    restarted.start()
    killed.stop()  # its lease has no key any more
    assert store.get(key) is not None
    restarted.stop()
    stranger.start()
    stranger.stop()


def of_a_copy(store: Store, key: str, name: str, lost: list[str], **more: str) -> Presence:
    """One of several that have the same token."""
    return Presence(store, key, {'hostname': name, 'since': f'when-{name}', 'token': 'mine', **more}, lost.append)


def test_of_two_with_the_same_token_the_first_is_told_and_writes_nothing_any_more(
    etcd: Etcd, store: Store, prefix: str
) -> None:
    """Its state directory was copied: neither is what the other has left behind."""
    key, lost, theirs_lost = prefix + 'c', list[str](), list[str]()
    with start_and_stop(of_a_copy(store, key, 'first', lost)) as first, connected(etcd.endpoint) as others:
        with start_and_stop(of_a_copy(others, key, 'second', theirs_lost)):
            first.look()
            until(lambda: lost, 10, 'it is told')
            assert 'held by another ecompute, on second since when-second' in lost[0]
            assert 'copy' in lost[0]
            with pytest.raises(Unreachable, match='is not as we put it'):
                store.commit([], [Put(prefix + 'x', '1')])
            assert others.commit([], [Put(prefix + 'x', '2')])
        assert theirs_lost == []
    assert len(lost) == 1


def test_its_own_value_put_again_by_hand_is_no_copy_s(etcd: Etcd, store: Store, prefix: str) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(of_a_copy(store, key, 'first', lost)) as alive:
        before = read_entry(store, key)
        for value in (before.value, b'{"token": "mine"}'):
            etcd.put(key, value)
            alive.look()

            def right() -> bool:
                entry = store.get(key)
                return entry is not None and entry.lease != 0 and entry.value == before.value

            until(right, 10, 'it is put right')
    assert lost == []


def test_after_a_boot_the_lease_is_waited_for(store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy's does not end; that of the machine's last boot does."""
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    original = of_a_copy(store, key, 'original', lost, boot='one')
    original.start()
    copy = of_a_copy(store, key, 'copy', lost, boot='another')
    for deed in (copy.check, copy.start):
        with pytest.raises(Conflict, match='on original since when-original: one state directory is a copy'):
            deed()
    same_boot = of_a_copy(store, key, 'original', [], boot='one')
    same_boot.check()
    original._stopped.set()  # killed: nobody refreshes it, nor takes it away
    original.look()
    copy.start()
    copy.stop()
    assert lost == []


@pytest.mark.parametrize('value', ['', 'not JSON', '[]', '{}', 'null', '7'])
def test_a_key_without_an_owner_is_taken(store: Store, prefix: str, value: str) -> None:
    store.commit([], [Put(prefix + 'c', value)])
    with start_and_stop(presence(store, prefix + 'c', 'mine')):
        pass
    assert store.get(prefix + 'c') is None


def test_an_owner_of_whom_little_is_known_is_one(store: Store, prefix: str) -> None:
    lease = store.grant(60)
    store.commit([], [Put(prefix + 'c', '{"token": "theirs"}', lease)])
    with pytest.raises(Conflict, match=r'on \? since \?'):
        presence(store, prefix + 'c', 'mine').check()
    store.revoke(lease)


def test_etcd_is_not_told_the_token(store: Store, prefix: str) -> None:
    """Whoever reads it is none the wiser; and who put it as it is, as 1.0 did, is the same one all the same."""
    alive = presence(store, prefix + 'c', 'mine')
    lease = store.grant(60)
    store.commit([], [Put(prefix + 'c', '{"token": "mine"}', lease)])
    alive.start()
    assert b'mine' not in read_entry(store, prefix + 'c').value.replace(b'host-of-mine', b'')
    with pytest.raises(Conflict):
        presence(store, prefix + 'c', 'yours').check()
    alive.stop()
    store.revoke(lease)


def test_who_is_on_no_lease_is_nobody(store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One put of another token made a compute read-only for good (ENEMY 2)."""
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    theirs = Put(key, json.dumps({'token': 'theirs', 'hostname': 'elsewhere', 'since': 'now'}))
    store.commit([], [theirs])
    alive = presence(store, key, 'mine', lost)
    alive.start()
    for _ in range(2):
        written = store.commit([], [theirs], fenced=False)
        until(lambda written=written: (store.get(key) or theirs).revision > written, 10, 'it is put again')  # type: ignore[misc]
    assert lost == []
    alive.stop()


def test_a_lost_lease_is_replaced(store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)):
        entry = read_entry(store, key)
        store.revoke(entry.lease)
        until(lambda: store.get(key), 10, 'the key is there again')
        assert read_entry(store, key).lease != entry.lease
        # It is refreshed: it stays for longer than its lease alone would.
        threading.Event().wait(4.0)
        assert store.get(key) is not None
    assert lost == []


def test_a_look_does_not_wait_for_the_next_refresh(store: Store, prefix: str) -> None:
    with start_and_stop(presence(store, prefix + 'c', 'mine')) as alive:
        store.revoke(read_entry(store, prefix + 'c').lease)
        alive.look()
        until(lambda: store.get(prefix + 'c'), 5, 'the key is there again, long before a third of its lease')


def test_who_comes_back_too_late_is_told_once(store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)):
        entry = read_entry(store, key)
        other = store.grant(60)
        # Another one takes the key; then the late one's lease ends.
        store.commit([], [Put(key, json.dumps({'token': 'theirs', 'hostname': 'elsewhere', 'since': 'now'}), other)])
        store.revoke(entry.lease)
        until(lambda: lost, 10, 'it is told')
    assert len(lost) == 1
    assert 'held by another ecompute, on elsewhere' in lost[0]
    assert json.loads(read_entry(store, key).value)['token'] == 'theirs'
    store.revoke(other)


def test_presence_outlives_an_etcd_that_was_away(own_etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
    lost: list[str] = []
    with connected(own_etcd.endpoint, timeout=0.5) as store:
        with start_and_stop(presence(store, '/c', 'mine', lost)):
            own_etcd.kill()
            threading.Event().wait(1.5)  # at least two refreshes fail
            own_etcd.start()
            own_etcd.delete('/c')
            own_etcd.call('lease/revoke', {'ID': _lease(own_etcd)})
            until(lambda: own_etcd.get('/c'), 15, 'it puts its key again')
        assert own_etcd.get('/c') is None
    assert lost == []


def _lease(etcd: Etcd) -> str:
    return str(etcd.call('lease/leases', {})['leases'][0]['ID'])


def test_who_lost_the_key_writes_nothing_any_more(etcd: Etcd, store: Store, prefix: str) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)):
        assert store.commit([], [Put(prefix + 'x', '1')])
        assert store.commit([Unchanged(prefix + 'x', 1)], [Put(prefix + 'x', '2')]) is None
        entry = read_entry(store, key)
        with connected(etcd.endpoint) as others:
            others.revoke(entry.lease)
            with start_and_stop(presence(others, key, 'theirs')):
                with pytest.raises(Unreachable, match='is not as we put it'):
                    store.commit([], [Put(prefix + 'x', '3')])
                until(lambda: lost, 5, 'it is told at once')
                assert 'held by another ecompute, on host-of-theirs' in lost[0]
                with pytest.raises(Unreachable):
                    store.commit([], [Put(prefix + 'x', '4')])
                assert others.commit([], [Put(prefix + 'x', '5')])


def test_who_only_overslept_puts_the_key_again_and_goes_on(
    store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.store.client.RENEWED', 30.0)  # how fast is not what is asked here
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)):
        store.revoke(read_entry(store, key).lease)
        # Without waiting for its next refresh, and several at once.
        with ThreadPoolExecutor(8) as threads:
            written = [threads.submit(store.commit, [], [Put(f'{prefix}{number}', '1')]) for number in range(8)]
            assert all(each.result(PATIENCE * 10) for each in written)
        assert store.get(key) is not None
        assert not lost


def test_who_cannot_put_the_key_again_writes_nothing_meanwhile(store: Store, prefix: str) -> None:
    key = prefix + 'c'
    alive = presence(store, key, 'mine')
    alive.start()
    alive.stop()  # so nobody puts it again
    began = time.monotonic()
    with pytest.raises(Unreachable, match='is not as we put it'):
        store.commit([], [Put(prefix + 'x', '1')])
    assert time.monotonic() - began >= RENEWED
    assert store.get(prefix + 'x') is None


@contextmanager
def full(etcd: Etcd) -> Iterator[None]:
    """An etcd that says it is out of space, which is all it takes for it to behave so."""
    member = etcd.call('cluster/member/list', {})['members'][0]['ID']
    alarm = {'memberID': member, 'alarm': 'NOSPACE'}
    etcd.call('maintenance/alarm', {**alarm, 'action': 'ACTIVATE'})
    yield
    etcd.call('maintenance/alarm', {**alarm, 'action': 'DEACTIVATE'})


def test_who_overslept_and_finds_etcd_full_may_delete_as_long_as_nobody_has_the_key(own_etcd: Etcd) -> None:
    lost: list[str] = []
    with connected(own_etcd.endpoint) as store, connected(own_etcd.endpoint) as others:
        late = presence(store, '/c', 'mine', lost)
        late.start()
        for each in ('/x', '/y', '/z'):
            store.commit([], [Put(each, '1')])
        entry = read_entry(store, '/c')
        with full(own_etcd):
            store.revoke(entry.lease)
            assert store.commit([], [Delete('/x')])
            assert store.commit([Unchanged('/y', 1)], [Delete('/y')]) is None, 'conditions count as ever'
            with pytest.raises(NoSpace):
                store.commit([], [Put('/x', '2')])
        # As soon as there is room: its key first.
        late.look()
        until(lambda: store.get('/c'), 10, 'its key is there')
        assert store.commit([], [Put('/x', '2')])

        # And not at all where another one has put it.
        entry = read_entry(store, '/c')
        late._stopped.set()  # frozen
        late.look()
        store.revoke(entry.lease)
        with start_and_stop(presence(others, '/c', 'theirs')):
            with full(own_etcd), pytest.raises(Unreachable, match='is not as we put it'):
                store.commit([], [Delete('/z')])
            assert others.get('/z') is not None
    assert lost == []
