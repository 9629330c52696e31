"""One follower of many prefixes, on a real etcd: each callback sees its own, as a follower of its own would."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

import pytest

from ecomp.errors import EcompError
from ecomp.store.client import Delete, Put, Store
from ecomp.store.watch import Follower
from tests.functional.following import Hearing
from tests.kit.proxy import Proxy
from tests.kit.servers import Etcd, until
from tests.kit.store_client import config


class Following:
    """A follower, and what was said of etcd."""

    def __init__(self, endpoint: str, prefixes: Sequence[str], resync: float = 60.0) -> None:
        self.lost: list[EcompError] = []
        self.back: list[bool] = []
        self.heard = [Hearing() for _ in prefixes]
        subscriptions = [(prefix, each.on_state) for prefix, each in zip(prefixes, self.heard, strict=True)]
        told = {'on_lost': self.lost.append, 'on_back': lambda: self.back.append(True)}
        self.follower = Follower(config(endpoint, 2.0), subscriptions, resync, **told)  # type: ignore[arg-type]
        self.follower.start()


@pytest.fixture
def follow(etcd_proxy: Proxy) -> Iterator[Callable[..., Following]]:
    made: list[Following] = []

    def start(*prefixes: str, resync: float = 60.0) -> Following:
        made.append(Following(etcd_proxy.address, prefixes, resync))
        return made[-1]

    yield start
    for each in made:
        each.follower.stop()


def test_each_sees_its_own_and_nothing_else(follow: Callable[..., Following], store: Store, prefix: str) -> None:
    a, b, nobody = prefix + 'a/1', prefix + 'b/1', prefix + 'c/1'
    store.commit([], [Put(a, '1'), Put(nobody, '1')])
    one, two, twin, late = follow(prefix + 'a/', prefix + 'b/', prefix + 'a/', prefix + 'd/').heard
    one.sees({a: b'1'})
    two.sees({})
    store.commit([], [Put(b, '1'), Put(a, '2')])
    one.sees({a: b'2'})
    two.sees({b: b'1'})
    store.commit([], [Delete(b), Put(nobody, '2')])
    two.sees({})
    twin.sees({a: b'2'})
    store.commit([], [Delete(a)])
    one.sees({})
    twin.sees({})
    assert one.states == twin.states == [{a: b'1'}, {a: b'2'}, {}]
    assert two.states == [{}, {b: b'1'}, {}]
    assert late.states == [{}]


def test_every_change_of_many_prefixes_between_list_and_watch_is_seen(
    follow: Callable[..., Following], store: Store, prefix: str
) -> None:
    names = [f'{prefix}{number:03d}/' for number in range(50)]
    following = follow(*names, resync=0.2)
    for value in range(10):
        for name in names:
            store.commit([], [Put(f'{name}x', str(value))])
    for name, each in zip(names, following.heard, strict=True):
        each.sees({f'{name}x': b'9'})
        shown = [int(state[f'{name}x']) for state in each.states if state]
        assert shown == sorted(shown)


def test_what_changed_while_etcd_was_away_is_seen_once_it_is_back(
    follow: Callable[..., Following], etcd_proxy: Proxy, store: Store, prefix: str
) -> None:
    a, b = prefix + 'a/1', prefix + 'b/1'
    store.commit([], [Put(a, '1'), Put(b, '1')])
    following = follow(prefix + 'a/', prefix + 'b/')
    one, two = following.heard
    one.sees({a: b'1'})
    two.sees({b: b'1'})
    etcd_proxy.go_away()
    until(lambda: following.lost, 30, 'it is told of the loss')
    store.commit([], [Delete(a), Put(b, '2')])
    etcd_proxy.come_back()
    one.sees({})
    two.sees({b: b'2'})
    assert (len(following.lost), following.back) == (1, [True])


def test_one_prefix_s_history_is_gone(own_etcd: Etcd, caplog: pytest.LogCaptureFixture) -> None:
    """What is compacted before a watch begins ends the watches of all, and all are listed anew."""
    caplog.set_level(logging.DEBUG, 'ecomp.store.watch')
    with Proxy(own_etcd.port) as proxy:
        own_etcd.put('/t/a/1', '1')
        own_etcd.put('/t/b/1', '1')
        following = Following(proxy.address, ['/t/a/', '/t/b/'])
        one, two = following.heard
        two.sees({'/t/b/1': b'1'})
        proxy.go_away()
        own_etcd.put('/t/a/1', '2')
        own_etcd.delete('/t/b/1')
        own_etcd.compact()
        proxy.come_back()
        one.sees({'/t/a/1': b'2'})
        two.sees({})
        own_etcd.put('/t/b/2', '3')
        two.sees({'/t/b/2': b'3'})
        following.follower.stop()
