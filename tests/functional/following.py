"""Record the states that a follower of etcd reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from ecomp.store.client import Entry
from ecomp.store.watch import Follower
from tests.kit.servers import wait_until
from tests.kit.store_client import make_config


class StateRecorder:
    """A callback that records the reported states."""

    def __init__(self) -> None:
        self.states: list[dict[str, bytes]] = []

    def on_state(self, state: Mapping[str, Entry]) -> None:
        self.states.append({key: entry.value for key, entry in state.items()})

    def wait_for_state(self, expected: dict[str, bytes], description: str = 'what is there') -> None:
        wait_until(
            lambda: self.states[-1:] == [expected], 15, f'{description}: {expected} is seen, last {self.states[-1:]}'
        )


class RecordingFollower(StateRecorder):
    """A follower of one prefix that runs while its context is entered."""

    def __init__(self, endpoint: str, prefix: str, resync: float = 60.0, timeout: float = 2.0, **options: Any) -> None:
        super().__init__()
        self.follower = Follower(make_config(endpoint, timeout), [(prefix, self.on_state)], resync, **options)

    def __enter__(self) -> Self:
        self.follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.follower.stop()
