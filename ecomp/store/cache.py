"""What a follower keeps of what it reads: no value that is too large, and of all together no more than it has room for.

Of what is dropped the key and its revision are kept: what is asked of whom is seen, and a smaller value counts again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from ecomp.model.text import printable
from ecomp.store.client import Entry

log = logging.getLogger(__name__)

MOST = 64 * 1024**2
"""Bytes of all that is kept. Ten thousand requests without user-data are 20 MB."""
PART = 64
"""Bytes that each comma of a value counts for besides: read, a part of it is an object, however short it is written."""
SMALL = 4096
"""Bytes of a value for which there is as much room again: a destroy is one of these, and is to be heard also where all
else is full."""
NAMED = 100
"""Keys that are named when they are dropped; of more it is said once that there are more."""
KEYS, LONGEST = 100_000, 16 * 1024
"""Keys that are kept, and bytes of one: beyond that there is no trace of it, for nobody of ours writes so many."""


class Cache:
    """One follower's: keep() for all of a list, end(); then keep() and forget() for each event.

    What is kept by now, and is in the next list unchanged, stays: it does not matter where in the list it stands.
    """

    def __init__(self, largest: int, most: int) -> None:
        self._largest, self._most = largest, most
        self.entries: dict[str, Entry] = {}
        """All of that, by key."""
        self._size = 0
        self._told: set[str] = set()

    def end(self, listed: Iterable[str]) -> None:
        """End a list: drop what is not among these keys."""
        for key in self.entries.keys() - set(listed):
            self.forget(key)
        self._told &= self.entries.keys()

    def keep(self, entry: Entry) -> Entry | None:
        """The entry as it is kept; None if nothing of it is."""
        known = self.entries.get(entry.key)
        if known is not None and (known.revision, known.value) == (entry.revision, entry.value):
            return known
        size = len(entry.value)
        if known is not None:
            self._size -= _weight(known.value)
        elif self._has_no_room(entry.key):
            self._tell(entry.key, size)
            return None
        else:
            self._size += len(entry.key)
        room = self._most if size > SMALL else 2 * self._most
        fits = size <= self._largest and self._size + _weight(entry.value) <= room
        kept = entry if fits else replace(entry, value=b'', dropped=size)
        if not fits:
            self._tell(entry.key, size)
        self.entries[entry.key] = kept
        self._size += _weight(kept.value)
        return kept

    def forget(self, key: str) -> None:
        """Drop a key that was deleted."""
        known = self.entries.pop(key, None)
        if known is not None:
            self._size -= len(known.key) + _weight(known.value)

    def _has_no_room(self, key: str) -> bool:
        return len(self.entries) >= KEYS or len(key) > LONGEST or self._size + len(key) > 2 * self._most

    def _tell(self, key: str, size: int) -> None:
        if key in self._told or len(self._told) > NAMED:
            return
        self._told.add(key)
        if len(self._told) > NAMED:
            log.warning('more values than these %d are too large, and are not kept', NAMED)
        elif size > self._largest:
            log.warning('%s has %d bytes, and %d is the limit: not kept', printable(key, 200), size, self._largest)
        else:
            log.warning('%s has %d bytes, and there is no room for it: not kept', printable(key, 200), size)


def _weight(value: bytes) -> int:
    return len(value) + PART * value.count(b',')
