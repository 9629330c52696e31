"""A list in pages: how many there are, and that each key is in one of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ecomp.store.connection import EASY, TooLong, pages
from ecomp.store.messages import Range


class Etcd:
    """Answers as etcd does, of this many keys with values of this many bytes; no answer is longer than `longest`."""

    def __init__(self, count: int, size: int, longest: int) -> None:
        self.keys = [f'/instances/{number:032x}/{number:032x}'.encode() for number in range(count)]
        self.size, self.longest = size, longest
        self.asked: list[int] = []

    def ask(self, wanted: Range) -> Any:
        """A page. TooLong."""
        self.asked.append(wanted.limit)
        assert wanted.revision in (0, 7)
        assert (wanted.revision == 7) == (wanted.key > self.keys[0])
        there = [key for key in self.keys if wanted.key <= key < wanted.end]
        value = b'' if wanted.keys_only else b'.' * self.size
        kvs = [SimpleNamespace(key=key, value=value) for key in there[: wanted.limit]]
        if sum(len(each.key) + len(each.value) for each in kvs) > self.longest:
            raise TooLong('too long')
        return SimpleNamespace(header=SimpleNamespace(revision=7), kvs=kvs, more=len(there) > len(kvs))


@pytest.mark.parametrize(
    ('count', 'size', 'keys_only', 'asked'),
    [
        pytest.param(20_000, 2000, True, [500, 2000, 5000, 5000, 5000, 5000], id='names'),
        pytest.param(1500, 200, False, [10, 40, 160, 500, 500, 500], id='small values'),
        pytest.param(30, EASY // 20, False, [10, 19, 19], id='larger ones'),
        pytest.param(25, EASY, False, [10, 10, 10], id='large ones'),
    ],
)
def test_each_key_is_in_one_page(count: int, size: int, keys_only: bool, asked: list[int]) -> None:
    etcd = Etcd(count, size, 64 * 1024**2)
    found = [kv.key for page in pages(etcd.ask, b'/instances/', b'/instances0', keys_only) for kv in page.kvs]
    assert found == etcd.keys
    assert etcd.asked == asked


def test_a_page_that_is_too_long_is_asked_for_in_the_smallest_ones() -> None:
    etcd = Etcd(40, 100, 20 * 200)
    found = [kv.key for page in pages(etcd.ask, b'/instances/', b'/instances0', False) for kv in page.kvs]
    assert found == etcd.keys
    assert etcd.asked == [10, 40, 10, 40], 'all that is left, in vain, and after a small page once more'
    etcd = Etcd(40, 100, 10)
    with pytest.raises(TooLong):
        list(pages(etcd.ask, b'/instances/', b'/instances0', False))
    assert etcd.asked == [10]
