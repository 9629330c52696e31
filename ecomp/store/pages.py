"""A list in pages of which none is too long: first of few keys, then of more as long as they are small.

etcd takes 1.5 MiB for each key (its --max-request-bytes), and limits a page by the number of its keys alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ecomp.errors import EcompError
from ecomp.store.messages import Range

MOST, FEWEST = 500, 10
"""Keys of a page. FEWEST fit into a message, whatever they are."""
MOST_NAMES = 5000
"""Keys of a page that has no values. etcd counts all keys of the range at each page, however few it is to tell."""
EASY = 4 * 1024**2
"""Bytes of a page that is not meant to be longer."""


class TooLong(EcompError):
    """What etcd answers is longer than the longest message that is taken."""


def pages(ask: Callable[[Any], Any], start: bytes, end: bytes, keys_only: bool) -> Iterator[Any]:
    """Each page of what is from `start` to `end`, all at one revision. Errors: those of `ask`."""
    limit, most, revision = (MOST, MOST_NAMES, 0) if keys_only else (FEWEST, MOST, 0)
    while True:
        try:
            reply = ask(Range(start, end, limit, revision, keys_only))
        except TooLong:
            if limit == FEWEST:
                raise
            limit = FEWEST
            continue
        yield reply
        if not reply.more:
            return
        revision, start = revision or reply.header.revision, reply.kvs[-1].key + b'\0'
        size = sum(len(kv.key) + len(kv.value) for kv in reply.kvs)
        limit = max(min(limit * 4, limit * EASY // max(size, 1), most), FEWEST)
