"""What the test that runs now has done so far: its commands, what it wrote by hand, and where it did so."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tests.kit.history import Ask

if TYPE_CHECKING:
    from tests.kit.commands import Ecompute
    from tests.kit.witness import Watched

WRITES = {'kv/put', 'kv/deleterange'}
TRANSACTED = 'requestPut', 'request_put', 'requestDeleteRange', 'request_delete_range'


class Journal:
    """Written by any thread; empty while no test that is judged runs."""

    def __init__(self) -> None:
        self._open = False
        self.end()

    def begin(self) -> None:
        self.end()
        self._open = True

    def end(self) -> None:
        self._open = False
        self.asks: list[Ask] = []
        self.by_hand: set[str] = set()
        self.foreign: set[str] = set()
        self.computes: list[Ecompute] = []
        self.witnesses: list[Watched] = []

    def made(self, witness: Watched) -> None:
        """The test has an etcd and a placement of this history; it begins with this."""
        if self._open:
            witness.begin()
            self.witnesses.append(witness)

    def leave(self, witness: Watched) -> bool:
        """Whether it was a witness until now, while the test goes on; it is no more."""
        there = witness in self.witnesses
        if there:
            self.witnesses.remove(witness)
        return there

    def runs(self, compute: Ecompute) -> None:
        if self._open:
            self.computes.append(compute)

    def ended(self, words: Sequence[str], code: int | None, said: tuple[str, str], began: float, pid: int) -> None:
        if self._open:
            given = tuple(words[2:] if words[:1] == ['--config'] else words)
            self.asks.append(Ask(given, code, *said, began, time.monotonic(), pid))

    def wrote(self, path: str, body: Mapping[str, Any]) -> None:
        """A call of etcd's gateway beside ecomp; what is written so is the test's own.

        What it is to forget is read first.
        """
        for witness in self.witnesses if path == 'kv/compaction' else ():
            with suppress(OSError):  # of an etcd that is down, nothing is forgotten
                witness.read_on()
        writes = [body] if path in WRITES else []
        for each in body.get('success', []) if path == 'kv/txn' else ():
            writes += [each[name] for name in TRANSACTED if name in each]
        for each in writes if self._open else ():
            if 'range_end' not in each:
                self.by_hand |= _subjects(base64.b64decode(each['key']).decode(errors='replace'))

    def claimed(self, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        """The same of a request to placement."""
        if self._open and method != 'GET' and path.startswith(('/allocations', '/resource_providers/')):
            self.by_hand |= {path.split('/')[2]} if path.count('/') > 1 else set(body or ())


def own(command: Sequence[str]) -> list[str] | None:
    """The words of an eschedule, --config at their head, in a command as it is started; None for any other."""
    module = 'ecomp.schedule'
    return list(command[list(command).index(module) + 1 :]) if module in command else None


def _subjects(key: str) -> set[str]:
    """What a key is about: of /hosts/<compute>/<instance> the instance, of others the first part that says it."""
    parts = key.removesuffix('/taker').split('/')
    return {parts[-1]} if len(parts) > 2 else set()


JOURNAL = Journal()
