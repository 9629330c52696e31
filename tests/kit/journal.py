"""A journal of the running test: its commands, its own writes, and the servers it used."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tests.kit.history import CommandRun

if TYPE_CHECKING:
    from tests.kit.commands import Ecompute
    from tests.kit.witness import Witness

WRITE_CALLS = {'kv/put', 'kv/deleterange'}
WRITE_OPERATIONS = 'requestPut', 'request_put', 'requestDeleteRange', 'request_delete_range'


class Journal:
    """Written by any thread. It is empty while no judged test runs."""

    def __init__(self) -> None:
        self._open = False
        self.end()

    def begin(self) -> None:
        self.end()
        self._open = True

    def end(self) -> None:
        self._open = False
        self.runs: list[CommandRun] = []
        self.manual_subjects: set[str] = set()
        self.foreign: set[str] = set()
        self.computes: list[Ecompute] = []
        self.witnesses: list[Witness] = []

    def add_witness(self, witness: Witness) -> None:
        if self._open:
            witness.begin()
            self.witnesses.append(witness)

    def remove_witness(self, witness: Witness) -> bool:
        """Remove a witness. Return True if the running test had it."""
        was_witness = witness in self.witnesses
        if was_witness:
            self.witnesses.remove(witness)
        return was_witness

    def add_compute(self, compute: Ecompute) -> None:
        if self._open:
            self.computes.append(compute)

    def add_run(self, words: Sequence[str], code: int | None, output: tuple[str, str], began: float, pid: int) -> None:
        if self._open:
            arguments = tuple(words[2:] if words[:1] == ['--config'] else words)
            self.runs.append(CommandRun(arguments, code, *output, began, time.monotonic(), pid))

    def record_write(self, path: str, body: Mapping[str, Any]) -> None:
        """Record the subjects of a call of etcd's gateway, which is a write of the test's own."""
        # Before a compaction the witnesses read what it would remove.
        for witness in self.witnesses if path == 'kv/compaction' else ():
            with suppress(OSError):  # an etcd that is down compacts nothing
                witness.read_new()
        writes = [body] if path in WRITE_CALLS else []
        for operation in body.get('success', []) if path == 'kv/txn' else ():
            writes += [operation[name] for name in WRITE_OPERATIONS if name in operation]
        for operation in writes if self._open else ():
            if 'range_end' not in operation:
                self.manual_subjects |= _parse_subjects(base64.b64decode(operation['key']).decode(errors='replace'))

    def record_claim(self, method: str, path: str, body: Mapping[str, Any] | None) -> None:
        if self._open and method != 'GET' and path.startswith(('/allocations', '/resource_providers/')):
            self.manual_subjects |= {path.split('/')[2]} if path.count('/') > 1 else set(body or ())


def parse_eschedule_arguments(command: Sequence[str]) -> list[str] | None:
    """Return the arguments of an eschedule command, from --config on, or None for others."""
    module = 'ecomp.schedule'
    return list(command[list(command).index(module) + 1 :]) if module in command else None


def _parse_subjects(key: str) -> set[str]:
    parts = key.removesuffix('/taker').split('/')
    return {parts[-1]} if len(parts) > 2 else set()


JOURNAL = Journal()
