"""Whoever reads a history hears how it ends: by each way to etcd."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from ecomp.model.events import Change
from ecomp.store.client import Put
from ecomp.store.history import History
from tests.kit.servers import Etcd, until
from tests.kit.store_client import config, connected
from tests.kit.store_client import each_way_to_etcd as each_way_to_etcd

FIRST, LAST = 2, 5
"""The revisions that are ours. One more is another's."""


@pytest.fixture(scope='module')
def stalling() -> Iterator[Etcd]:
    """An etcd with a past, to be frozen and woken."""
    with Etcd() as etcd:
        with connected(etcd.endpoint) as store:
            for number in range(FIRST, LAST + 1):
                store.commit([], [Put(f'/names/{number % 50}', 'x' * 200)])
        assert etcd.put('somebody-else', '1') == LAST + 1
        yield etcd


class Reading:
    """A thread that reads a history to its end; whoever waits for that has a limit."""

    def __init__(self, history: History, on_first: Any = None) -> None:
        self.told: list[list[Change]] = []
        self.ended: str | Exception = ''
        self._history, self._on_first = history, on_first
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for changes in self._history:
                self.told.append(changes)
                if len(self.told) == 1 and self._on_first:
                    self._on_first()
            self.ended = 'at the end'
        except Exception as error:
            self.ended = error
        finally:
            self._history.close()

    @property
    def revisions(self) -> list[int]:
        return [changes[0].revision for changes in self.told]

    def end(self, seconds: float = 20.0) -> str | Exception:
        return until(lambda: self.ended, seconds, f'it ends, after {len(self.told)} revisions')


@pytest.mark.parametrize('follow', [False, True])
def test_no_end_of_the_thread_that_hears_goes_unnoticed(stalling: Etcd, follow: bool) -> None:
    class Junk:
        """A watch that has a fault of ours."""

        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError('a fault')

        def cancel(self) -> None:
            """Nothing is there to end."""

    history = History(config(stalling.endpoint), follow, print)
    history._store.watch = lambda *_: Junk()  # type: ignore[method-assign]
    ended = Reading(history).end(5)
    assert isinstance(ended, RuntimeError), ended
