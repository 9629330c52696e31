"""One stream for many: what several in one process follow under a common prefix (`ecompute --count`).

A stream costs a connection's channel, three threads and some wakes a second, whether anything happens or not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ecomp.conf import EtcdConfig
from ecomp.errors import EcompError
from ecomp.model.instance import SIZE_LIMIT
from ecomp.model.json_object import VALUE_LIMIT
from ecomp.store.client import Entry
from ecomp.store.guard import Guard
from ecomp.store.watch import Follower, State


class SharedFollower:
    """Follows `prefix`, and hands each of its parts what is under that one's own prefix.

    All parts' prefixes have `length`. Each hears of all that is under `prefix`, so it is for those who are most of it.
    """

    def __init__(
        self, config: EtcdConfig, prefix: str, length: int, guard: Guard | None = None, largest: int = VALUE_LIMIT
    ) -> None:
        told = (self._on_lost, self._on_back)
        self._follower = Follower(config, prefix, self._on_state, 60.0, guard, *told, largest)
        self._length = length
        self._lock = threading.Lock()
        self._whole: State | None = None
        self._states: dict[str, dict[str, Entry]] = {}
        self._parts: dict[str, list[Part]] = {}
        self._lost: EcompError | None = None

    def start(self) -> None:
        """Begin. Parts may be added and taken away later."""
        self._follower.start()

    def stop(self) -> None:
        """End, and wait for the thread."""
        self._follower.stop()

    def add(self, part: Part) -> None:
        """It hears at once what is known, and then of every change."""
        with self._lock:
            self._parts.setdefault(part.prefix, []).append(part)
            if self._lost is not None:
                part.on_lost(self._lost)
            if self._whole is not None:
                part.on_state(self._states.get(part.prefix, {}))

    def remove(self, part: Part) -> None:
        """It hears nothing more. One that was never added is fine."""
        with self._lock:
            parts = self._parts.get(part.prefix, [])
            if part in parts:
                parts.remove(part)

    def _on_state(self, whole: State) -> None:
        with self._lock:
            first, before, self._whole = self._whole is None, self._whole or {}, whole
            changed: dict[str, set[str]] = {prefix: set() for prefix in self._parts} if first else {}
            for key, entry in whole.items():
                if (old := before.get(key)) is not entry and old != entry:
                    changed.setdefault(key[: self._length], set()).add(key)
            for key in before.keys() - whole.keys():
                changed.setdefault(key[: self._length], set()).add(key)
            for prefix, touched in changed.items():
                # A new one each time: who was handed the last one may be reading it.
                state = {key: each for key, each in self._states.get(prefix, {}).items() if key not in touched}
                self._states[prefix] = state | {key: whole[key] for key in touched if key in whole}
                for part in self._parts.get(prefix, []):
                    part.on_state(self._states[prefix])
                if not self._states[prefix]:
                    del self._states[prefix]

    def _on_lost(self, error: EcompError) -> None:
        with self._lock:
            self._lost = error
            for part in self._all():
                part.on_lost(error)

    def _on_back(self) -> None:
        with self._lock:
            self._lost = None
            for part in self._all():
                part.on_back()

    def _all(self) -> list[Part]:
        return [part for parts in self._parts.values() for part in parts]


class Part:
    """A Follower of `prefix`, as far as start() and stop() go, that leans on a shared one. Its calls must be quick."""

    def __init__(
        self,
        shared: SharedFollower,
        prefix: str,
        on_state: Callable[[State], None],
        on_lost: Callable[[EcompError], None],
        on_back: Callable[[], None],
    ) -> None:
        self._shared = shared
        self.prefix = prefix
        self.on_state, self.on_lost, self.on_back = on_state, on_lost, on_back

    def start(self) -> None:
        """Begin; on_state is called soon."""
        self._shared.add(self)

    def stop(self) -> None:
        """End."""
        self._shared.remove(self)


def following(
    config: EtcdConfig,
    guard: Guard | None,
    shared: SharedFollower | None,
    prefix: str,
    on_state: Callable[[State], None],
    on_lost: Callable[[EcompError], None],
    on_back: Callable[[], None],
    largest: int = SIZE_LIMIT,
) -> Follower | Part:
    """A follower of the prefix of its own or, where there is one, a part of the shared one: of requests."""
    if shared is not None:
        return Part(shared, prefix, on_state, on_lost, on_back)
    return Follower(config, prefix, on_state, 60.0, guard, on_lost, on_back, largest)
