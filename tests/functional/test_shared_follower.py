"""One follower for many prefixes, on a real etcd: each part sees its own, as a follower of its own would."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from ecomp.errors import EcompError
from ecomp.store.client import Delete, Entry, Put, Store
from ecomp.store.shared_follower import Part, SharedFollower
from tests.functional.store_client import config
from tests.kit.proxy import Proxy
from tests.kit.servers import until


class Hearing:
    """A part, and what it was told."""

    def __init__(self, shared: SharedFollower, prefix: str) -> None:
        self.states: list[dict[str, bytes]] = []
        self.lost: list[EcompError] = []
        self.back: list[bool] = []
        self.part = Part(shared, prefix, self._on_state, self.lost.append, lambda: self.back.append(True))
        self.part.start()

    def _on_state(self, state: Mapping[str, Entry]) -> None:
        self.states.append({key: entry.value for key, entry in state.items()})

    def sees(self, wanted: dict[str, bytes]) -> None:
        until(lambda: self.states[-1:] == [wanted], 15, f'{wanted} is seen, last {self.states[-1:]}')


@pytest.fixture
def shared(etcd_proxy: Proxy, prefix: str) -> Iterator[SharedFollower]:
    made = SharedFollower(config(etcd_proxy.address, 2.0), prefix, len(prefix + 'a/'))
    made.start()
    yield made
    made.stop()


def test_each_part_sees_its_own_and_nothing_else(shared: SharedFollower, store: Store, prefix: str) -> None:
    a, b, nobody = prefix + 'a/1', prefix + 'b/1', prefix + 'c/1'
    store.commit([], [Put(a, '1'), Put(nobody, '1')])
    one, two = Hearing(shared, prefix + 'a/'), Hearing(shared, prefix + 'b/')
    one.sees({a: b'1'})
    two.sees({})
    store.commit([], [Put(b, '1'), Put(a, '2')])
    one.sees({a: b'2'})
    two.sees({b: b'1'})
    store.commit([], [Delete(b), Put(nobody, '2')])
    two.sees({})
    late, twin = Hearing(shared, prefix + 'c/'), Hearing(shared, prefix + 'a/')
    late.sees({nobody: b'2'})
    twin.sees({a: b'2'})
    one.part.stop()
    store.commit([], [Delete(a)])
    twin.sees({})
    assert one.states[-1] == {a: b'2'}
    assert [state for state in two.states if state] == [{b: b'1'}]


def test_what_changed_while_etcd_was_away_is_seen_once_it_is_back(
    shared: SharedFollower, etcd_proxy: Proxy, store: Store, prefix: str
) -> None:
    a, b = prefix + 'a/1', prefix + 'b/1'
    store.commit([], [Put(a, '1'), Put(b, '1')])
    one, two = Hearing(shared, prefix + 'a/'), Hearing(shared, prefix + 'b/')
    one.sees({a: b'1'})
    two.sees({b: b'1'})
    etcd_proxy.go_away()
    for each in (one, two):
        until(lambda each=each: each.lost, 30, 'each is told of the loss')
    late = Hearing(shared, prefix + 'a/')
    assert len(late.lost) == 1
    store.commit([], [Delete(a), Put(b, '2')])
    etcd_proxy.come_back()
    one.sees({})
    late.sees({})
    two.sees({b: b'2'})
    assert [each.back for each in (one, two, late)] == [[True]] * 3
    assert [len(each.lost) for each in (one, two, late)] == [1] * 3
