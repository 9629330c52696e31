"""The lease of a process: its keys are on one until the last of them stops, and each that loses its key ends alone."""

from __future__ import annotations

from ecomp.store.client import Delete, Store
from ecomp.store.presence import SECONDS, Lease, Presence
from tests.functional.present import presence, start_and_stop
from tests.kit.servers import Etcd, until
from tests.kit.store_client import connected


def shared(store: Store, prefix: str, number: int, lost: list[str]) -> tuple[Lease, list[Presence]]:
    """So many, each with a fence of its own; they are started."""
    lease, made = Lease(store, SECONDS), list[Presence]()
    for each in range(number):
        who = {'hostname': 'h', 'since': 'today', 'token': f'of-{each}'}
        made.append(Presence(store.beside(), f'{prefix}{each}', who, lost.append, lease))
        made[-1].start()
    return lease, made


def leases(store: Store, prefix: str) -> dict[str, int]:
    return {key.removeprefix(prefix): each.lease for key, each in store.snapshot(prefix).entries.items()}


def test_those_of_a_process_share_a_lease_until_the_last_has_stopped(store: Store, prefix: str) -> None:
    lost: list[str] = []
    _, (first, second, third) = shared(store, prefix, 3, lost)
    there = leases(store, prefix)
    assert there.keys() == set('012')
    assert len(set(there.values())) == 1
    second.stop()
    assert leases(store, prefix).keys() == set('02')
    first.stop()
    third.stop()
    assert (leases(store, prefix), lost) == ({}, [])
    assert store.keep_alive(there['0']) == 0


def test_a_lost_lease_is_replaced_by_one_for_all(store: Store, prefix: str) -> None:
    lost: list[str] = []
    _, made = shared(store, prefix, 5, lost)
    before = leases(store, prefix)
    store.revoke(before['0'])
    made[3].look()  # one of them is told
    until(lambda: leases(store, prefix).keys() == before.keys(), 20, 'all are there again')
    after = leases(store, prefix)
    assert len(set(after.values())) == 1
    assert after['0'] != before['0']
    assert {each.lease for each in made} == {after['0']}
    for each in made:
        each.stop()
    assert (leases(store, prefix), lost) == ({}, [])


def test_one_that_is_somebody_else_s_by_now_ends_alone(etcd: Etcd, store: Store, prefix: str) -> None:
    lost: list[str] = []
    _, (first, second) = shared(store, prefix, 2, lost)
    store.commit([], [Delete(f'{prefix}0')], fenced=False)
    with connected(etcd.endpoint) as others, start_and_stop(presence(others, f'{prefix}0', 'theirs')):
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
    _, made = shared(store, prefix, 2, lost)
    made[1].on_computes(store.snapshot(prefix).entries)
    store.commit([], [Delete(f'{prefix}1')], fenced=False)
    made[1].on_computes(store.snapshot(prefix).entries)
    until(lambda: '1' in leases(store, prefix), 5, 'the key is there again, long before a third of its lease')
    for each in made:
        each.stop()
    assert lost == []
