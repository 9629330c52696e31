"""A presence key that was lost, to whomever, is put again once it is free: its compute is read-only until then."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing

import pytest

from ecomp import backends
from ecomp.conf import EtcdConfig, PlacementConfig
from ecomp.errors import Unreachable
from ecomp.store.client import Put, Store
from ecomp.store.presence import Lease, Presence, hashed
from tests.functional.present import start_and_stop
from tests.kit.etcd_proxy import GrpcProxy
from tests.kit.servers import Etcd, PlacementServer, until
from tests.kit.store_client import connected, read_entry

MINE = {'hostname': 'h', 'since': 'today', 'token': 'mine'}


@pytest.fixture
def grpc_proxy(etcd: Etcd) -> Iterator[GrpcProxy]:
    with GrpcProxy(etcd.endpoint) as started:
        yield started


@pytest.mark.parametrize('token', ['theirs', hashed('mine')], ids=['another', 'a-copy'])
def test_a_key_that_was_overwritten_is_put_again_once_it_is_free(
    etcd: Etcd, store: Store, prefix: str, token: str
) -> None:
    """S5: one put on a short lease made a compute read-only until it was restarted."""
    key, lost, back = prefix + 'c', list[str](), list[bool]()
    with start_and_stop(Presence(store, key, MINE, lost.append, on_back=lambda: back.append(True))) as alive:
        with connected(etcd.endpoint) as others:
            lease = others.grant(60)
            others.commit([], [Put(key, json.dumps({'token': token, 'hostname': 'elsewhere', 'since': 'now'}), lease)])
            alive.look()
            until(lambda: lost, 10, 'it is told')
            with pytest.raises(Unreachable):
                store.commit([], [Put(prefix + 'x', '1')])
            alive.look()
            others.revoke(lease)
        alive.on_computes({})
        until(lambda: back, 10, 'the key is its own again')
        assert store.commit([], [Put(prefix + 'x', '2')])
        assert json.loads(read_entry(store, key).value)['token'] == hashed('mine')
        assert len(lost) == len(back) == 1
    assert store.get(key) is None


def test_what_is_to_be_said_does_not_hide_that_the_key_is_its_own_again(store: Store, prefix: str) -> None:
    lost, back = list[str](), list[bool]()
    with start_and_stop(Presence(store, prefix + 'c', MINE, lost.append, on_back=lambda: back.append(True))) as alive:
        alive.lapse('its lease was not renewed')
        alive.say(kind='fake')
        alive.keep()
        assert (len(lost), back) == (1, [True])


class Unrenewed(Store):
    """An etcd that renews no lease while `fails`, and answers all else."""

    fails = False

    def keep_alive(self, lease: int) -> int:
        if self.fails:
            raise Unreachable('etcd at somewhere cannot be reached: context canceled', 'etcd at somewhere')
        return super().keep_alive(lease)


def test_a_lease_that_is_not_renewed_is_told_of_and_replaced(etcd: Etcd, prefix: str) -> None:
    """F1: the class, whatever the reason is that renewals alone fail."""
    lost, back, key = list[str](), list[bool](), prefix + 'c'
    with closing(Unrenewed(EtcdConfig((etcd.endpoint,)))) as store:
        lease = Lease(store, 1)
        with start_and_stop(Presence(store, key, MINE, lost.append, lease, on_back=lambda: back.append(True))):
            store.fails = True
            until(lambda: lost, 20, 'it is told')
            until(lambda: store.get(key) is None, 20, 'the lease has ended')
            assert 'etcd answers, and has not renewed the lease' in lost[0]
            assert 'context canceled. Fix: ' in lost[0]
            store.fails = False
            until(lambda: back, 20, 'it is alive again')
            assert store.get(key) is not None
            assert len(lost) == 1


def test_behind_a_grpc_proxy_a_lease_is_renewed(grpc_proxy: GrpcProxy, placement: PlacementServer) -> None:
    """F1: the proxy cancels a renewal whose stream is half closed before it has answered."""
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
    """F1: ecompute --check and doctor see what would make a compute silent."""
    monkeypatch.setattr(backends, 'Store', Unrenewed)
    monkeypatch.setattr(Unrenewed, 'fails', True)
    config = EtcdConfig((etcd.endpoint,)), PlacementConfig(placement.url)
    said = backends.look(*config, None, 'compute.yaml').no_etcd
    assert 'answers, but renews no lease, so no compute can live' in said
