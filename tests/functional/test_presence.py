"""Test the presence key and its lease: ownership, loss, recovery and published facts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from ecomp import backends
from ecomp.conf import EtcdConfig, PlacementConfig
from ecomp.errors import Conflict, NoSpace, Unreachable
from ecomp.store.client import RENEWED, Delete, Put, Store, Unchanged
from ecomp.store.presence import SECONDS, Lease, Presence, hashed
from tests.functional.present import presence, start_and_stop
from tests.kit.etcd_proxy import GrpcProxy
from tests.kit.servers import PATIENCE, Etcd, PlacementServer, until
from tests.kit.store_client import connected, read_entry

# Ownership and lifetime of the presence key on a real etcd.


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
    for act in (stranger.check, stranger.start):
        with pytest.raises(Conflict, match='held by another ecompute, on host-of-mine since today'):
            act()
    restarted = presence(store, key, 'mine')
    restarted.check()
    restarted.start()
    killed.stop()  # its lease no longer holds the key
    assert store.get(key) is not None
    restarted.stop()
    stranger.start()
    stranger.stop()


def of_a_copy(store: Store, key: str, name: str, lost: list[str], **more: str) -> Presence:
    """Make one of several presences with the same token, as a copied state directory has."""
    return Presence(store, key, {'hostname': name, 'since': f'when-{name}', 'token': 'mine', **more}, lost.append)


def test_of_two_with_the_same_token_the_first_is_told_and_writes_nothing_any_more(
    etcd: Etcd, store: Store, prefix: str
) -> None:
    """Check two computes with a copied state directory.

    Neither key is a remainder of the other process, so this is not a restart.
    """
    key, lost, second_lost = prefix + 'c', list[str](), list[str]()
    with start_and_stop(of_a_copy(store, key, 'first', lost)) as first, connected(etcd.endpoint) as other_store:
        with start_and_stop(of_a_copy(other_store, key, 'second', second_lost)):
            first.look()
            until(lambda: lost, 10, 'it is told')
            assert 'held by another ecompute, on second since when-second' in lost[0]
            assert 'copy' in lost[0]
            with pytest.raises(Unreachable, match='is not as we put it'):
                store.commit([], [Put(prefix + 'x', '1')])
            assert other_store.commit([], [Put(prefix + 'x', '2')])
        assert second_lost == []
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
    """Check that the previous boot's lease expires, while the lease of a live copy does not."""
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    original = of_a_copy(store, key, 'original', lost, boot='one')
    original.start()
    copy = of_a_copy(store, key, 'copy', lost, boot='another')
    for act in (copy.check, copy.start):
        with pytest.raises(Conflict, match='on original since when-original: one state directory is a copy'):
            act()
    same_boot = of_a_copy(store, key, 'original', [], boot='one')
    same_boot.check()
    original._stopped.set()  # like a kill: the lease is neither refreshed nor revoked
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
    """Check that a key with the plain token, as 1.0 wrote it, still counts as the same owner."""
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
    """Check that one such write does not make a compute read-only permanently."""
    monkeypatch.setattr('ecomp.store.presence.SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    foreign = Put(key, json.dumps({'token': 'theirs', 'hostname': 'elsewhere', 'since': 'now'}))
    store.commit([], [foreign])
    alive = presence(store, key, 'mine', lost)
    alive.start()
    for _ in range(2):
        written = store.commit([], [foreign], fenced=False)
        until(lambda written=written: (store.get(key) or foreign).revision > written, 10, 'it is put again')  # type: ignore[misc]
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
        # The new lease is refreshed: the key outlives the lease's duration.
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
        other_lease = store.grant(60)
        # Another compute takes the key; then the late owner's lease ends.
        store.commit(
            [], [Put(key, json.dumps({'token': 'theirs', 'hostname': 'elsewhere', 'since': 'now'}), other_lease)]
        )
        store.revoke(entry.lease)
        until(lambda: lost, 10, 'it is told')
    assert len(lost) == 1
    assert 'held by another ecompute, on elsewhere' in lost[0]
    assert json.loads(read_entry(store, key).value)['token'] == 'theirs'
    store.revoke(other_lease)


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
        with connected(etcd.endpoint) as other_store:
            other_store.revoke(entry.lease)
            with start_and_stop(presence(other_store, key, 'theirs')):
                with pytest.raises(Unreachable, match='is not as we put it'):
                    store.commit([], [Put(prefix + 'x', '3')])
                until(lambda: lost, 5, 'it is told at once')
                assert 'held by another ecompute, on host-of-theirs' in lost[0]
                with pytest.raises(Unreachable):
                    store.commit([], [Put(prefix + 'x', '4')])
                assert other_store.commit([], [Put(prefix + 'x', '5')])


def test_who_only_overslept_puts_the_key_again_and_goes_on(
    store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.store.client.RENEWED', 30.0)  # this test does not check the speed
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)):
        store.revoke(read_entry(store, key).lease)
        # Concurrent writes restore the key without waiting for its next refresh.
        with ThreadPoolExecutor(8) as threads:
            written = [threads.submit(store.commit, [], [Put(f'{prefix}{number}', '1')]) for number in range(8)]
            assert all(future.result(PATIENCE * 10) for future in written)
        assert store.get(key) is not None
        assert not lost


def test_who_cannot_put_the_key_again_writes_nothing_meanwhile(store: Store, prefix: str) -> None:
    key = prefix + 'c'
    alive = presence(store, key, 'mine')
    alive.start()
    alive.stop()  # so the key is not restored
    began = time.monotonic()
    with pytest.raises(Unreachable, match='is not as we put it'):
        store.commit([], [Put(prefix + 'x', '1')])
    assert time.monotonic() - began >= RENEWED
    assert store.get(prefix + 'x') is None


@contextmanager
def full(etcd: Etcd) -> Iterator[None]:
    """Raise etcd's NOSPACE alarm, which makes it behave as if it were out of space."""
    member = etcd.call('cluster/member/list', {})['members'][0]['ID']
    alarm = {'memberID': member, 'alarm': 'NOSPACE'}
    etcd.call('maintenance/alarm', {**alarm, 'action': 'ACTIVATE'})
    yield
    etcd.call('maintenance/alarm', {**alarm, 'action': 'DEACTIVATE'})


def test_who_overslept_and_finds_etcd_full_may_delete_as_long_as_nobody_has_the_key(own_etcd: Etcd) -> None:
    lost: list[str] = []
    with connected(own_etcd.endpoint) as store, connected(own_etcd.endpoint) as other_store:
        alive = presence(store, '/c', 'mine', lost)
        alive.start()
        for path in ('/x', '/y', '/z'):
            store.commit([], [Put(path, '1')])
        entry = read_entry(store, '/c')
        with full(own_etcd):
            store.revoke(entry.lease)
            assert store.commit([], [Delete('/x')])
            assert store.commit([Unchanged('/y', 1)], [Delete('/y')]) is None, 'conditions count as ever'
            with pytest.raises(NoSpace):
                store.commit([], [Put('/x', '2')])
        # Once there is room, the key is restored before anything else is written.
        alive.look()
        until(lambda: store.get('/c'), 10, 'its key is there')
        assert store.commit([], [Put('/x', '2')])

        # No deletion is possible while another compute has the key.
        entry = read_entry(store, '/c')
        alive._stopped.set()  # frozen
        alive.look()
        store.revoke(entry.lease)
        with start_and_stop(presence(other_store, '/c', 'theirs')):
            with full(own_etcd), pytest.raises(Unreachable, match='is not as we put it'):
                store.commit([], [Delete('/z')])
            assert other_store.get('/z') is not None
    assert lost == []


# A lost presence key is restored once it is free; the compute is read-only until then.


MINE = {'hostname': 'h', 'since': 'today', 'token': 'mine'}


@pytest.fixture
def grpc_proxy(etcd: Etcd) -> Iterator[GrpcProxy]:
    with GrpcProxy(etcd.endpoint) as started:
        yield started


@pytest.mark.parametrize('token', ['theirs', hashed('mine')], ids=['another', 'a-copy'])
def test_a_key_that_was_overwritten_is_put_again_once_it_is_free(
    etcd: Etcd, store: Store, prefix: str, token: str
) -> None:
    """Check that a write on a short lease makes a compute read-only only until the lease ends."""
    key, lost, recovered = prefix + 'c', list[str](), list[bool]()
    with start_and_stop(Presence(store, key, MINE, lost.append, on_back=lambda: recovered.append(True))) as alive:
        with connected(etcd.endpoint) as other_store:
            lease = other_store.grant(60)
            other_store.commit(
                [], [Put(key, json.dumps({'token': token, 'hostname': 'elsewhere', 'since': 'now'}), lease)]
            )
            alive.look()
            until(lambda: lost, 10, 'it is told')
            with pytest.raises(Unreachable):
                store.commit([], [Put(prefix + 'x', '1')])
            alive.look()
            other_store.revoke(lease)
        alive.on_computes({})
        until(lambda: recovered, 10, 'the key is its own again')
        assert store.commit([], [Put(prefix + 'x', '2')])
        assert json.loads(read_entry(store, key).value)['token'] == hashed('mine')
        assert len(lost) == len(recovered) == 1
    assert store.get(key) is None


def test_what_is_to_be_said_does_not_hide_that_the_key_is_its_own_again(store: Store, prefix: str) -> None:
    lost, recovered = list[str](), list[bool]()
    with start_and_stop(
        Presence(store, prefix + 'c', MINE, lost.append, on_back=lambda: recovered.append(True))
    ) as alive:
        alive.lapse('its lease was not renewed')
        alive.say(kind='fake')
        alive.keep()
        assert (len(lost), recovered) == (1, [True])


class Unrenewed(Store):
    """A store whose lease renewals fail while `fails` is set; all other calls work."""

    fails = False

    def keep_alive(self, lease: int) -> int:
        if self.fails:
            raise Unreachable('etcd at somewhere cannot be reached: context canceled', 'etcd at somewhere')
        return super().keep_alive(lease)


def test_a_lease_that_is_not_renewed_is_told_of_and_replaced(etcd: Etcd, prefix: str) -> None:
    lost, recovered, key = list[str](), list[bool](), prefix + 'c'
    with closing(Unrenewed(EtcdConfig((etcd.endpoint,)))) as store:
        lease = Lease(store, 1)
        with start_and_stop(Presence(store, key, MINE, lost.append, lease, on_back=lambda: recovered.append(True))):
            store.fails = True
            until(lambda: lost, 20, 'it is told')
            until(lambda: store.get(key) is None, 20, 'the lease has ended')
            assert 'etcd answers, and has not renewed the lease' in lost[0]
            assert 'context canceled. Fix: ' in lost[0]
            store.fails = False
            until(lambda: recovered, 20, 'it is alive again')
            assert store.get(key) is not None
            assert len(lost) == 1


def test_behind_a_grpc_proxy_a_lease_is_renewed(grpc_proxy: GrpcProxy, placement: PlacementServer) -> None:
    """Check a proxy that cancels a renewal whose stream is half closed before the answer."""
    with connected(grpc_proxy.endpoint) as store:
        lease = store.grant(60)
        assert [store.keep_alive(lease) for _ in range(3)] == [60, 60, 60]
        store.revoke(lease)
        assert store.keep_alive(lease) == 0
    config = EtcdConfig((grpc_proxy.endpoint,)), PlacementConfig(placement.url)
    assert backends.look(*config, None, 'compute.yaml').no_etcd == ''


def test_check_says_that_no_lease_is_renewed(
    etcd: Etcd, placement: PlacementServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, 'Store', Unrenewed)
    monkeypatch.setattr(Unrenewed, 'fails', True)
    config = EtcdConfig((etcd.endpoint,)), PlacementConfig(placement.url)
    problem = backends.look(*config, None, 'compute.yaml').no_etcd
    assert 'answers, but renews no lease, so no compute can live' in problem


# Additional facts in the presence key: written with a renewal, and not taken for a copy's write.


def test_what_else_there_is_to_say_is_put_at_a_renewal_and_only_when_it_is_another(
    etcd: Etcd, store: Store, prefix: str
) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)) as alive:

        def there() -> dict[str, object]:
            return json.loads(etcd.get(key) or b'{}')

        original = read_entry(store, key)
        for room in (1, 2):
            alive.say(room=room)
            alive.look()
            until(lambda room=room: there().get('room') == room, 10, 'it is said')
        entry = read_entry(store, key)
        assert (entry.lease, entry.created) == (original.lease, original.created)
        assert there()['hostname'] == 'host-of-mine'
        for _ in range(3):
            renewed = store.keep_alive(entry.lease)
            alive.look()
            assert renewed
        # Later writes pass the fence, and the unchanged facts were not written again.
        assert store.commit([], [Put(prefix + 'x', '1')])
        assert store.get(key) == entry
        alive.say(room=None)
        alive.look()
        until(lambda: there()['room'] is None, 10, 'it is not said any more')
        assert lost == []


def test_what_is_written_while_it_says_more_is_written(etcd: Etcd, store: Store, prefix: str) -> None:
    key, lost, number = prefix + 'c', list[str](), 0
    with start_and_stop(presence(store, key, 'mine', lost)) as alive:
        with ThreadPoolExecutor(4) as pool:
            for number in range(20):
                alive.say(room=number)
                alive.look()
                written = [pool.submit(store.commit, [], [Put(f'{prefix}{number}/{index}', 'x')]) for index in range(4)]
                assert all(future.result(PATIENCE) for future in written)
        until(lambda: json.loads(etcd.get(key) or b'{}').get('room') == number, 10, 'the last is said')
        assert lost == []


def test_one_that_said_more_and_does_not_know_whether_it_got_there_is_no_copy(
    etcd: Etcd, store: Store, prefix: str
) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(presence(store, key, 'mine', lost)) as alive:
        entry = read_entry(store, key)
        # The write arrived, but its answer was lost.
        landed = json.dumps({**json.loads(entry.value), 'room': 7})
        with connected(etcd.endpoint) as other_store:
            assert other_store.commit([Unchanged(key, entry.revision)], [Put(key, landed, entry.lease)])
        alive.say(room=8)
        alive.look()
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


# A process's shared lease lasts until its last compute stops. A compute that loses its key fails alone.


def shared(store: Store, prefix: str, number: int, lost: list[str]) -> tuple[Lease, list[Presence]]:
    """Start `number` presences on one lease, each with its own fence."""
    lease, presences = Lease(store, SECONDS), list[Presence]()
    for index in range(number):
        facts = {'hostname': 'h', 'since': 'today', 'token': f'of-{index}'}
        presences.append(Presence(store.beside(), f'{prefix}{index}', facts, lost.append, lease))
        presences[-1].start()
    return lease, presences


def leases(store: Store, prefix: str) -> dict[str, int]:
    return {key.removeprefix(prefix): entry.lease for key, entry in store.snapshot(prefix).entries.items()}


def test_those_of_a_process_share_a_lease_until_the_last_has_stopped(store: Store, prefix: str) -> None:
    lost: list[str] = []
    _, (first, second, third) = shared(store, prefix, 3, lost)
    leases_by_name = leases(store, prefix)
    assert leases_by_name.keys() == set('012')
    assert len(set(leases_by_name.values())) == 1
    second.stop()
    assert leases(store, prefix).keys() == set('02')
    first.stop()
    third.stop()
    assert (leases(store, prefix), lost) == ({}, [])
    assert store.keep_alive(leases_by_name['0']) == 0


def test_a_lost_lease_is_replaced_by_one_for_all(store: Store, prefix: str) -> None:
    lost: list[str] = []
    _, presences = shared(store, prefix, 5, lost)
    before = leases(store, prefix)
    store.revoke(before['0'])
    presences[3].look()  # one check is enough
    until(lambda: leases(store, prefix).keys() == before.keys(), 20, 'all are there again')
    after = leases(store, prefix)
    assert len(set(after.values())) == 1
    assert after['0'] != before['0']
    assert {alive.lease for alive in presences} == {after['0']}
    for alive in presences:
        alive.stop()
    assert (leases(store, prefix), lost) == ({}, [])


def test_one_that_is_somebody_else_s_by_now_ends_alone(etcd: Etcd, store: Store, prefix: str) -> None:
    lost: list[str] = []
    _, (first, second) = shared(store, prefix, 2, lost)
    store.commit([], [Delete(f'{prefix}0')], fenced=False)
    with connected(etcd.endpoint) as other_store, start_and_stop(presence(other_store, f'{prefix}0', 'theirs')):
        first.look()
        until(lambda: lost, 20, 'it is told')
        store.revoke(second.lease)
        second.look()
        until(lambda: '1' in leases(store, prefix), 20, 'the other one is put again')
        first.stop()
        assert leases(store, prefix).keys() == set('01'), 'what is theirs stays'
    second.stop()
    assert len(lost) == 1


def test_who_hears_that_the_key_is_gone_puts_it_again_at_once(store: Store, prefix: str) -> None:
    lost: list[str] = []
    _, presences = shared(store, prefix, 2, lost)
    presences[1].on_computes(store.snapshot(prefix).entries)
    store.commit([], [Delete(f'{prefix}1')], fenced=False)
    presences[1].on_computes(store.snapshot(prefix).entries)
    until(lambda: '1' in leases(store, prefix), 5, 'the key is there again, long before a third of its lease')
    for alive in presences:
        alive.stop()
    assert lost == []
