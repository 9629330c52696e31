"""Test the presence key and its lease: ownership, loss, recovery and published facts."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ecomp import backends
from ecomp.agent.process import ComputeProcess
from ecomp.compute_conf import ComputeConfig
from ecomp.conf import EtcdConfig, PlacementConfig
from ecomp.errors import Conflict, Denied, Unreachable
from ecomp.model import keys
from ecomp.shared.presence import Presence, hash_token
from ecomp.store.client import FENCE_RENEWAL_SECONDS, Delete, Put, Store, Unchanged
from ecomp.systemd import Service
from ecomp.virt.fake import Fake
from tests.functional.cloud import Cloud
from tests.functional.present import make_presence, start_and_stop
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd, PlacementServer, Server, free_port, is_healthy, wait_until
from tests.kit.store_client import open_store, read_entry


class GrpcProxy(Server):
    name = 'grpc-proxy'

    def __init__(self, etcd: str) -> None:
        super().__init__()
        self._etcd = etcd
        self.endpoint = f'127.0.0.1:{free_port()}'

    def command(self) -> list[str]:
        return ['etcd', 'grpc-proxy', 'start', f'--endpoints={self._etcd}', f'--listen-addr={self.endpoint}']

    def is_ready(self) -> bool:
        return is_healthy(f'http://{self.endpoint}')


def test_same_token_takes_over_and_another_is_refused(store: Store, prefix: str) -> None:
    key = prefix + 'c'
    killed = make_presence(store, key, 'mine')
    killed.start()
    stranger = make_presence(store, key, 'theirs')
    for act in (stranger.check, stranger.start):
        with pytest.raises(Conflict, match='held by another ecompute, on host-of-mine since today'):
            act()
    restarted = make_presence(store, key, 'mine')
    restarted.check()
    restarted.start()
    killed.stop()  # its lease no longer holds the key
    assert store.get(key) is not None
    restarted.stop()
    stranger.start()
    stranger.stop()


def make_copy_presence(store: Store, key: str, name: str, lost: list[str], **facts: str) -> Presence:
    """Make one of several presences with the same token, as a copied state directory has."""
    return Presence(store, key, {'hostname': name, 'since': f'when-{name}', 'token': 'mine', **facts}, lost.append)


def test_second_compute_with_the_same_token_fences_the_first(etcd: Etcd, store: Store, prefix: str) -> None:
    """Check a copied state directory: neither key remains from the other process."""
    key, lost, second_lost = prefix + 'c', list[str](), list[str]()
    with (
        start_and_stop(make_copy_presence(store, key, 'first', lost)) as first,
        open_store(etcd.endpoint) as other_store,
    ):
        with start_and_stop(make_copy_presence(other_store, key, 'second', second_lost)):
            first.schedule_check()
            wait_until(lambda: lost, 10, 'it is told')
            assert 'held by another ecompute, on second since when-second' in lost[0]
            assert 'copy' in lost[0]
            with pytest.raises(Unreachable, match='expired or was changed: nothing is written'):
                store.commit([], [Put(prefix + 'x', '1')])
            assert other_store.commit([], [Put(prefix + 'x', '2')])
        assert second_lost == []
    assert len(lost) == 1


def test_own_value_rewritten_outside_ecomp_is_not_taken_for_a_copy(etcd: Etcd, store: Store, prefix: str) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(make_copy_presence(store, key, 'first', lost)) as alive:
        before = read_entry(store, key)
        for value in (before.value, b'{"token": "mine"}'):
            etcd.put(key, value)
            alive.schedule_check()

            def is_restored() -> bool:
                entry = store.get(key)
                return entry is not None and entry.lease != 0 and entry.value == before.value

            wait_until(is_restored, 10, 'it is put right')
    assert lost == []


def test_start_after_a_boot_waits_for_the_old_lease(store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the previous boot's lease expires, while the lease of a live copy does not."""
    monkeypatch.setattr('ecomp.shared.presence.LEASE_SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    original = make_copy_presence(store, key, 'original', lost, boot='one')
    original.start()
    copy = make_copy_presence(store, key, 'copy', lost, boot='another')
    for act in (copy.check, copy.start):
        with pytest.raises(Conflict, match='on original since when-original: one state directory is a copy'):
            act()
    same_boot = make_copy_presence(store, key, 'original', [], boot='one')
    same_boot.check()
    original._stop_event.set()  # like a kill: the lease is neither refreshed nor revoked
    original.schedule_check()
    copy.start()
    copy.stop()
    assert lost == []


@pytest.mark.parametrize('value', ['', 'not JSON', '[]', '{}', 'null', '7'])
def test_key_without_an_owner_is_taken(store: Store, prefix: str, value: str) -> None:
    store.commit([], [Put(prefix + 'c', value)])
    with start_and_stop(make_presence(store, prefix + 'c', 'mine')):
        pass
    assert store.get(prefix + 'c') is None


def test_owner_with_incomplete_facts_is_respected(store: Store, prefix: str) -> None:
    lease = store.grant(60)
    store.commit([], [Put(prefix + 'c', '{"token": "theirs"}', lease)])
    with pytest.raises(Conflict, match=r'on \? since \?'):
        make_presence(store, prefix + 'c', 'mine').check()
    store.revoke(lease)


def test_token_is_stored_as_a_hash(store: Store, prefix: str) -> None:
    alive = make_presence(store, prefix + 'c', 'mine')
    alive.start()
    assert b'mine' not in read_entry(store, prefix + 'c').value.replace(b'host-of-mine', b'')
    with pytest.raises(Conflict):
        make_presence(store, prefix + 'c', 'yours').check()
    alive.stop()


def test_key_without_a_lease_is_overwritten(store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that one such write does not make a compute read-only permanently."""
    monkeypatch.setattr('ecomp.shared.presence.LEASE_SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    foreign = Put(key, json.dumps({'token': 'theirs', 'hostname': 'elsewhere', 'since': 'now'}))
    store.commit([], [foreign])
    alive = make_presence(store, key, 'mine', lost)
    alive.start()
    for _ in range(2):
        written = store.commit([], [foreign], use_fence=False)
        wait_until(lambda written=written: (store.get(key) or foreign).revision > written, 10, 'it is put again')  # type: ignore[misc]
    assert lost == []
    alive.stop()


def test_lost_lease_is_replaced(store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.shared.presence.LEASE_SECONDS', 1)
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(make_presence(store, key, 'mine', lost)):
        entry = read_entry(store, key)
        store.revoke(entry.lease)
        wait_until(lambda: store.get(key), 10, 'the key is there again')
        assert read_entry(store, key).lease != entry.lease
        # The new lease is refreshed: the key outlives the lease's duration.
        threading.Event().wait(4.0)
        assert store.get(key) is not None
    assert lost == []


def test_owner_that_lost_the_key_cannot_write(etcd: Etcd, store: Store, prefix: str) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(make_presence(store, key, 'mine', lost)):
        assert store.commit([], [Put(prefix + 'x', '1')])
        assert store.commit([Unchanged(prefix + 'x', 1)], [Put(prefix + 'x', '2')]) is None
        entry = read_entry(store, key)
        with open_store(etcd.endpoint) as other_store:
            other_store.revoke(entry.lease)
            with start_and_stop(make_presence(other_store, key, 'theirs')):
                with pytest.raises(Unreachable, match='expired or was changed: nothing is written'):
                    store.commit([], [Put(prefix + 'x', '3')])
                wait_until(lambda: lost, 5, 'it is told at once')
                assert 'held by another ecompute, on host-of-theirs' in lost[0]
                with pytest.raises(Unreachable):
                    store.commit([], [Put(prefix + 'x', '4')])
                assert other_store.commit([], [Put(prefix + 'x', '5')])


def test_owner_with_an_expired_lease_restores_the_key_and_writes(
    store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.store.client.FENCE_RENEWAL_SECONDS', 30.0)  # this test does not check the speed
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(make_presence(store, key, 'mine', lost)):
        store.revoke(read_entry(store, key).lease)
        # Concurrent writes restore the key without waiting for its next refresh.
        with ThreadPoolExecutor(8) as threads:
            written = [threads.submit(store.commit, [], [Put(f'{prefix}{number}', '1')]) for number in range(8)]
            assert all(future.result(SLOWDOWN_FACTOR * 10) for future in written)
        assert store.get(key) is not None
        assert not lost


def test_write_fails_while_the_key_is_not_restored(store: Store, prefix: str) -> None:
    key = prefix + 'c'
    alive = make_presence(store, key, 'mine')
    alive.start()
    alive.stop()  # so the key is not restored
    began = time.monotonic()
    with pytest.raises(Unreachable, match='expired or was changed: nothing is written'):
        store.commit([], [Put(prefix + 'x', '1')])
    assert time.monotonic() - began >= FENCE_RENEWAL_SECONDS
    assert store.get(prefix + 'x') is None


# A lost presence key is restored once it is free; the compute is read-only until then.


FACTS = {'hostname': 'h', 'since': 'today', 'token': 'mine'}


@pytest.fixture
def grpc_proxy(etcd: Etcd) -> Iterator[GrpcProxy]:
    with GrpcProxy(etcd.endpoint) as started:
        yield started


@pytest.mark.parametrize('token', ['theirs', hash_token('mine')], ids=['another', 'a-copy'])
def test_overwritten_key_is_restored_once_it_is_free(etcd: Etcd, store: Store, prefix: str, token: str) -> None:
    """Check that a write on a short lease makes a compute read-only only until the lease ends."""
    key, lost, recovered = prefix + 'c', list[str](), list[bool]()
    with start_and_stop(Presence(store, key, FACTS, lost.append, on_back=lambda: recovered.append(True))) as alive:
        with open_store(etcd.endpoint) as other_store:
            lease = other_store.grant(60)
            other_store.commit(
                [], [Put(key, json.dumps({'token': token, 'hostname': 'elsewhere', 'since': 'now'}), lease)]
            )
            alive.schedule_check()
            wait_until(lambda: lost, 10, 'it is told')
            with pytest.raises(Unreachable):
                store.commit([], [Put(prefix + 'x', '1')])
            alive.schedule_check()
            other_store.revoke(lease)
        alive.on_computes({})
        wait_until(lambda: recovered, 10, 'the key is its own again')
        assert store.commit([], [Put(prefix + 'x', '2')])
        assert json.loads(read_entry(store, key).value)['token'] == hash_token('mine')
        assert len(lost) == len(recovered) == 1
    assert store.get(key) is None


class UnrenewingStore(Store):
    fails = False

    def keep_alive(self, lease: int) -> int:
        if self.fails:
            raise Unreachable('etcd at somewhere cannot be reached: context canceled', 'etcd at somewhere')
        return super().keep_alive(lease)


def test_unrenewed_lease_is_reported_and_replaced(etcd: Etcd, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.shared.presence.LEASE_SECONDS', 1)
    lost, recovered, key = list[str](), list[bool](), prefix + 'c'
    with closing(UnrenewingStore(EtcdConfig((etcd.endpoint,)))) as store:
        presence = Presence(store, key, FACTS, lost.append, on_back=lambda: recovered.append(True))
        with start_and_stop(presence):
            store.fails = True
            wait_until(lambda: lost, 20, 'it is told')
            wait_until(lambda: store.get(key) is None, 20, 'the lease has ended')
            assert 'etcd answers, but has not renewed the lease' in lost[0]
            assert 'context canceled. Fix: ' in lost[0]
            store.fails = False
            wait_until(lambda: recovered, 20, 'it is alive again')
            assert store.get(key) is not None
            assert len(lost) == 1


def test_unexpected_errors_end_no_renewal(store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = list[str]()
    presence = UnthreadedPresence(store, prefix + 'c', FACTS, lost.append)
    with start_and_stop(presence), monkeypatch.context() as patch:
        # As for a process that may start no thread for a new connection, for longer than its lease lasts.
        patch.setattr('ecomp.shared.presence.LEASE_SECONDS', 0)
        for name in ('get', 'keep_alive'):
            patch.setattr(store, name, lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
        presence.renew_and_check()
    assert lost == []


def test_lease_is_renewed_behind_a_grpc_proxy(grpc_proxy: GrpcProxy, placement: PlacementServer) -> None:
    """Check a proxy that cancels a renewal whose stream is half closed before the answer."""
    with open_store(grpc_proxy.endpoint) as store:
        lease = store.grant(60)
        assert [store.keep_alive(lease) for _ in range(3)] == [60, 60, 60]
        store.revoke(lease)
        assert store.keep_alive(lease) == 0
    config = EtcdConfig((grpc_proxy.endpoint,)), PlacementConfig(placement.url)
    assert backends.probe_backends(*config, None, 'compute.yaml').etcd_failure is None


def test_check_reports_that_leases_are_not_renewed(
    etcd: Etcd, placement: PlacementServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backends, 'Store', UnrenewingStore)
    monkeypatch.setattr(UnrenewingStore, 'fails', True)
    config = EtcdConfig((etcd.endpoint,)), PlacementConfig(placement.url)
    problem = backends.probe_backends(*config, None, 'compute.yaml').etcd_failure
    assert 'answers, but does not renew leases, so no compute can stay alive' in str(problem)


# Other keys on the lease of the presence.


def test_other_keys_are_kept_on_the_lease_of_the_presence(store: Store, prefix: str) -> None:
    lost, key, facts, trouble = list[str](), prefix + 'c', prefix + 'facts', prefix + 'trouble'
    store.commit([], [Put(trouble, 'of an earlier process')])
    with start_and_stop(make_presence(store, key, 'mine', lost)) as alive:
        original = read_entry(store, key)
        for value in ('1', '2'):
            alive.publish(facts, value)
            alive.publish(trouble, None, is_urgent=True)
            alive.schedule_check()
            wait_until(
                lambda value=value: read_values(store, prefix) == {'c': original.value, 'facts': value.encode()},
                10,
                'it is published',
            )
        assert read_entry(store, key) == original, 'the presence itself, which every commit compares, is not changed'
        assert read_entry(store, facts).lease == original.lease

        store.revoke(original.lease)
        alive.schedule_check()
        wait_until(lambda: read_values(store, prefix).get('facts') == b'2', 10, 'it is published')
        assert read_entry(store, facts).lease == alive.lease != original.lease
    assert (read_values(store, prefix), lost) == ({}, [])


def test_unchanged_key_is_not_written_again(store: Store, prefix: str) -> None:
    with start_and_stop(make_presence(store, prefix + 'c', 'mine')) as alive:
        alive.publish(prefix + 'facts', '1', is_urgent=True)
        wait_until(lambda: 'facts' in read_values(store, prefix), 10, 'it is published')
        entry = read_entry(store, prefix + 'facts')
        alive.publish(prefix + 'facts', '1', is_urgent=True)
        alive.publish(prefix + 'other', '1', is_urgent=True)
        wait_until(lambda: 'other' in read_values(store, prefix), 10, 'it is published')
        assert read_entry(store, prefix + 'facts') == entry


def test_late_write_of_an_older_value_is_corrected(store: Store, prefix: str) -> None:
    with start_and_stop(make_presence(store, prefix + 'c', 'mine')) as alive:
        alive.publish(prefix + 'trouble', None)
        alive.publish(prefix + 'facts', 'new')
        alive.ensure_published()
        for name in ('trouble', 'facts'):  # of which no answer came
            assert store.commit([], [Put(prefix + name, 'old', alive.lease)])
        alive.ensure_published()
        assert {name: read_values(store, prefix).get(name) for name in ('trouble', 'facts')} == {
            'trouble': None,
            'facts': b'new',
        }


def test_key_that_roles_deny_is_reported_once(
    store: Store, prefix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = Store.commit

    def deny(self: Store, conditions: object, operations: list[Put], **options: bool) -> object:
        if any(each.key.endswith('facts') for each in operations):
            raise Denied('etcd does not let this certificate write it')
        return commit(self, conditions, operations, **options)

    monkeypatch.setattr(Store, 'commit', deny)
    with start_and_stop(make_presence(store, prefix + 'c', 'mine')) as alive:
        for _ in range(3):
            alive.publish(prefix + 'facts', '1')
            alive.publish(prefix + 'other', '1')
            alive.ensure_published()
        assert read_values(store, prefix).keys() == {'c', 'other'}
        monkeypatch.setattr(Store, 'commit', commit)
        alive.ensure_published()
        assert read_values(store, prefix).keys() == {'c', 'other', 'facts'}, 'its role allows it now'
    assert [each.getMessage() for each in caplog.records] == [
        f'{prefix}facts is not published: etcd does not let this certificate write it'
    ]


# Two leases without keys show when a process was last alive.


class UnthreadedPresence(Presence):
    def _start_thread(self) -> None:
        pass


def ensure_life_leases(store: Store, known_leases: tuple[int, ...] = ()) -> tuple[int, ...]:
    return Presence(store, 'unused', FACTS, lambda _: None).ensure_life_leases(known_leases)


def read_ages(store: Store, leases: Iterable[int]) -> list[int | None]:
    return [store.read_lease_age(lease) for lease in leases]


def test_first_life_lease_is_renewed_and_the_anchor_is_not(store: Store, prefix: str) -> None:
    lost = list[str]()
    presence = UnthreadedPresence(store, prefix + 'c', FACTS, lost.append)
    presence.start()
    leases = presence.ensure_life_leases(())
    wait_until(lambda: (store.read_lease_age(leases[0]) or 0) >= 2, 20, 'both are older')
    presence.renew_and_check()
    age, anchor_age = read_ages(store, leases)
    assert (age or 0) <= 1 < 2 <= (anchor_age or 0)

    # The next process goes on with them, and renews the first one: the time before its start is no time of silence.
    wait_until(lambda: (store.read_lease_age(leases[0]) or 0) >= 2, 20, 'both are older')
    assert ensure_life_leases(store, leases) == leases
    assert (store.read_lease_age(leases[0]) or 0) <= 1
    # Leases that are gone are replaced.
    store.revoke(leases[1])
    others = ensure_life_leases(store, leases)
    assert len({*leases, *others}) == 4
    # If the renewed one is gone, the next check of the host's name gets others.
    store.revoke(leases[0])
    presence.renew_and_check()
    assert len({*presence.ensure_life_leases(leases), *leases, *others}) == 6
    assert lost == []
    store.revoke(presence.lease)


def test_process_that_lost_its_presence_does_not_seem_alive(etcd: Etcd, store: Store, prefix: str) -> None:
    key, lost = prefix + 'c', list[str]()
    presence = UnthreadedPresence(store, key, FACTS, lost.append)
    presence.start()
    leases = presence.ensure_life_leases(())
    store.commit([], [Delete(key)], use_fence=False)
    with open_store(etcd.endpoint) as other_store, start_and_stop(make_presence(other_store, key, 'theirs')):
        wait_until(lambda: (store.read_lease_age(leases[0]) or 0) >= 2, 20, 'it is older')
        presence.renew_and_check()
        assert len(lost) == 1
        assert (store.read_lease_age(leases[0]) or 0) >= 2


def test_restart_of_etcd_makes_both_life_leases_equally_old() -> None:
    with Etcd() as own_etcd, open_store(own_etcd.endpoint) as store:
        leases = ensure_life_leases(store)
        wait_until(lambda: (store.read_lease_age(leases[1]) or 0) >= 3, 20, 'the anchor is older')
        store.keep_alive(leases[0])
        age, anchor_age = read_ages(store, leases)
        assert (anchor_age or 0) - (age or 0) >= 2
        own_etcd.restart()
        age, anchor_age = wait_until(lambda: read_ages(store, leases), 20, 'etcd answers')
        assert None not in (age, anchor_age)
        assert abs((anchor_age or 0) - (age or 0)) <= 1


def read_values(store: Store, prefix: str) -> dict[str, bytes]:
    return {key.removeprefix(prefix): entry.value for key, entry in store.snapshot(prefix).entries.items()}


def test_start_that_fails_leaves_no_presence(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name == 'presence':
            raise RuntimeError("can't start new thread")
        real(thread)

    monkeypatch.setattr(threading.Thread, 'start', start)
    backends = EtcdConfig((cloud.etcd.endpoint,)), PlacementConfig(cloud.server.url)
    config = ComputeConfig(etcd=backends[0], placement=backends[1], state=tmp_path, inventory={'VCPU': 1})
    with ExitStack() as at_exit:
        process = ComputeProcess(config, Fake('', None), False, Service(), at_exit)
        process.register()
        with pytest.raises(RuntimeError, match='new thread'):
            process.run()
    assert cloud.store.snapshot(keys.COMPUTES).entries == {}


def test_stop_leaves_the_key_of_another_owner(etcd: Etcd, store: Store, prefix: str) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(Presence(store, key, FACTS, lost.append)) as first:
        store.commit([], [Delete(key)], use_fence=False)
        with open_store(etcd.endpoint) as other_store, start_and_stop(make_presence(other_store, key, 'theirs')):
            first.schedule_check()
            wait_until(lambda: lost, 20, 'it is told')
            first.stop()
            assert read_values(store, prefix).keys() == {'c'}
    assert len(lost) == 1


def test_watched_deletion_of_the_key_restores_it_immediately(store: Store, prefix: str) -> None:
    key, lost = prefix + 'c', list[str]()
    with start_and_stop(Presence(store, key, FACTS, lost.append)) as presence:
        presence.on_computes(store.snapshot(prefix).entries)
        store.commit([], [Delete(key)], use_fence=False)
        presence.on_computes(store.snapshot(prefix).entries)
        wait_until(lambda: store.get(key), 5, 'the key is there again, long before a third of its lease')
    assert lost == []
