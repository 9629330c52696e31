"""Collects the history of one etcd and one placement for the judge.

All is read from the servers themselves. A watch of etcd returns the changes since the beginning of the test.
Placement's allocations are read from its database: over HTTP each provider would cost two requests.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from http.client import HTTPResponse
from typing import Any

from tests.kit.ending import Kept
from tests.kit.gateway import Reply
from tests.kit.history import Change, History, Verdict, judge
from tests.kit.journal import JOURNAL
from tests.kit.placement_database import PlacementDatabase
from tests.kit.process import is_stopped
from tests.kit.servers import Server, b64, until

# Sends a JSON object to a path of etcd's gateway, and returns the answer, to be read line by line.
Ask = Callable[[str, Mapping[str, Any]], Reply | HTTPResponse]
# Seconds until work in progress at a test's end has finished.
SOON = 20.0
EVERYTHING = {'key': b64(b'\0'), 'range_end': b64(b'\0')}


class Compacted(Exception):
    """Part of the history has been compacted away in etcd."""


class Revisions:
    """The changes in an etcd since a revision, up to the latest read_new()."""

    def __init__(self, ask: Ask, since: int = 0) -> None:
        self._ask = ask
        self.before: dict[str, Kept] = {}
        self.changes: list[Change] = []
        self.revision = since

    def begin(self) -> None:
        """Start the history now, with the current keys as its beginning."""
        answer = self._call('kv/range', EVERYTHING)
        self.before = dict(map(kept_of, answer.get('kvs', [])))
        self.changes, self.revision = [], int(answer['header']['revision'])

    def read_on(self) -> int:
        """Read the changes since the last call, and return the revision reached.

        Raises:
            CompactedError: etcd has compacted or lost some of them.
            OSError: etcd cannot be reached.
        """
        latest = int(self._call('kv/range', {'key': b64('x'), 'count_only': True})['header']['revision'])
        if latest < self.revision:
            raise Compacted(f'etcd was at revision {self.revision}, and is at {latest}')
        if latest == self.revision:
            return latest
        request = {'create_request': {**EVERYTHING, 'start_revision': self.revision + 1}}
        with self._ask('watch', request) as answer:
            while self.revision < latest:
                result = json.loads(answer.readline())['result']
                if result.get('canceled'):
                    raise Compacted(f'etcd has forgotten all before revision {result.get("compact_revision")}')
                for event in result.get('events', []):
                    (key, stored), self.revision = kept_of(event['kv']), int(event['kv']['mod_revision'])
                    self.changes.append(Change(self.revision, key, None if event.get('type') == 'DELETE' else stored))
        return self.revision

    def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._ask(path, body) as answer:
            return dict(json.loads(answer.read()))


class Watched:
    """The history of one etcd and one placement.

    It reads placement's database, and can tell if the compute of a uuid works.
    """

    def __init__(
        self, ask: Ask, database: PlacementDatabase, works: Callable[[str], bool | None], *servers: Server
    ) -> None:
        self._revisions = Revisions(ask)
        self._database, self._works, self._servers = database, works, servers

    def begin(self) -> None:
        self._revisions.begin()

    def read_on(self) -> None:
        self._revisions.read_on()

    def mend(self) -> None:
        """Start or resume the servers, which the test may have stopped: judging needs them."""
        for server in self._servers:
            if server.is_running:
                server.resume()
            else:
                server.start()

    def history(self) -> History:
        """Return the history so far, with the commands of the running test.

        Raises:
            CompactedError: etcd has compacted or lost part of it.
            OSError: etcd cannot be reached.
        """
        self._revisions.read_on()
        etcd = dict(self._revisions.before)
        for change in self._revisions.changes:
            etcd[change.key] = change.kept or Kept(b'', 0)
        computes = {key.split('/')[2] for key in etcd if key.startswith('/hosts/')}
        alive = {key.split('/')[2] for key, stored in etcd.items() if key.startswith('/computes/') and stored.value}
        away = {compute for compute in computes if compute not in alive or self._works(compute) is False}
        return History(
            tuple(JOURNAL.asks), self._revisions.before, self._revisions.changes,
            self._database.allocations(), self._database.capacities(), away,
            frozenset(JOURNAL.by_hand), frozenset(JOURNAL.foreign),
        )


def judged(watched: Watched) -> None:
    """Wait until the history has no violations.

    Raises:
        AssertionError: it has some.
    """
    watched.mend()
    verdicts = [Verdict([], ['not looked'])]

    def clean() -> bool:
        verdicts[0] = judge(watched.history())
        return bool(verdicts[0].never) or not verdicts[0].still

    try:
        until(clean, SOON, 'all that was asked for has come to its end')
    except AssertionError as error:
        raise AssertionError('\n'.join([str(error), *verdicts[0].still])) from None
    assert not verdicts[0].never, '\n'.join(['its history has:', *verdicts[0].never, *verdicts[0].still])


def started_here(compute: str) -> bool | None:
    """True if an ecompute of the running test with this uuid works; None if it has none."""
    started = [ecompute for ecompute in JOURNAL.computes if ecompute.uuid == compute]
    return any(ecompute.is_running and not is_stopped(ecompute.pid) for ecompute in started) if started else None


def process_works(pid: int) -> bool:
    return os.path.exists(f'/proc/{pid}') and not is_stopped(pid)


def kept_of(found: Mapping[str, Any]) -> tuple[str, Kept]:
    """Parse a key and its value as etcd's gateway encodes them."""
    key = base64.b64decode(found['key']).decode(errors='replace')
    return key, Kept(base64.b64decode(found.get('value', '')), int(found.get('lease', 0)))
