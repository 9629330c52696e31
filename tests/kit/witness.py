"""Collects the history of one etcd and one placement, for the judge: from the servers themselves, and cheaply.

etcd is asked for what changed by a watch from the revision where the test began; placement's claims are read from its
database, for by HTTP each provider would be two requests.
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

Ask = Callable[[str, Mapping[str, Any]], Reply | HTTPResponse]
"""Sends a JSON object to a path of etcd's gateway; the answer, to be read line by line."""
SOON = 20.0
"""Seconds until what is in work at a test's end has come to its end."""
EVERYTHING = {'key': b64(b'\0'), 'range_end': b64(b'\0')}


class Compacted(Exception):
    """etcd has forgotten some of the history."""


class Revisions:
    """What changed in an etcd since a revision, read as far as it was asked for."""

    def __init__(self, ask: Ask, since: int = 0) -> None:
        self._ask = ask
        self.before: dict[str, Kept] = {}
        self.changes: list[Change] = []
        self.revision = since

    def begin(self) -> None:
        """From now on: all that is there is what was before."""
        answer = self._call('kv/range', EVERYTHING)
        self.before = dict(map(kept_of, answer.get('kvs', [])))
        self.changes, self.revision = [], int(answer['header']['revision'])

    def read_on(self) -> int:
        """Read what changed since the last look; the revision up to which all is known. Compacted, OSError."""
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
                    (key, kept), self.revision = kept_of(event['kv']), int(event['kv']['mod_revision'])
                    self.changes.append(Change(self.revision, key, None if event.get('type') == 'DELETE' else kept))
        return self.revision

    def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._ask(path, body) as answer:
            return dict(json.loads(answer.read()))


class Watched:
    """One etcd and one placement (its database), and whether the computes of this or that uuid work."""

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
        """See that the servers run, whatever the test left of them: else nobody could say what became of it all."""
        for each in self._servers:
            if each.is_running:
                each.resume()
            else:
                each.start()

    def history(self) -> History:
        """All of it up to now, with what the running test has done. Compacted, OSError."""
        self._revisions.read_on()
        etcd = dict(self._revisions.before)
        for each in self._revisions.changes:
            etcd[each.key] = each.kept or Kept(b'', 0)
        computes = {key.split('/')[2] for key in etcd if key.startswith('/hosts/')}
        alive = {key.split('/')[2] for key, kept in etcd.items() if key.startswith('/computes/') and kept.value}
        away = {each for each in computes if each not in alive or self._works(each) is False}
        return History(
            tuple(JOURNAL.asks), self._revisions.before, self._revisions.changes,
            self._database.allocations(), self._database.capacities(), away,
            frozenset(JOURNAL.by_hand), frozenset(JOURNAL.foreign),
        )


def judged(watched: Watched) -> None:
    """Return once nothing is to be said of its history; AssertionError with what is."""
    watched.mend()
    found = [Verdict([], ['not looked'])]

    def clean() -> bool:
        found[0] = judge(watched.history())
        return bool(found[0].never) or not found[0].still

    try:
        until(clean, SOON, 'all that was asked for has come to its end')
    except AssertionError as error:
        raise AssertionError('\n'.join([str(error), *found[0].still])) from None
    assert not found[0].never, '\n'.join(['its history has:', *found[0].never, *found[0].still])


def started_here(compute: str) -> bool | None:
    """Whether the ecompute of this uuid works, where the running test has started it; None: nobody knows."""
    ours = [each for each in JOURNAL.computes if each.uuid == compute]
    return any(each.is_running and not is_stopped(each.pid) for each in ours) if ours else None


def process_works(pid: int) -> bool:
    return os.path.exists(f'/proc/{pid}') and not is_stopped(pid)


def kept_of(found: Mapping[str, Any]) -> tuple[str, Kept]:
    """A key as etcd's gateway tells it."""
    key = base64.b64decode(found['key']).decode(errors='replace')
    return key, Kept(base64.b64decode(found.get('value', '')), int(found.get('lease', 0)))
