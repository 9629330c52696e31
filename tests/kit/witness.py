"""Collects the history of one etcd and one placement for the judge.

Allocations are read from placement's database: over HTTP each provider would cost two requests.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Mapping
from http.client import HTTPResponse
from typing import Any

from tests.kit.ending import StoredValue
from tests.kit.gateway import Reply
from tests.kit.history import Change, History, Verdict, judge
from tests.kit.journal import JOURNAL
from tests.kit.placement_database import PlacementDatabase
from tests.kit.process import is_stopped
from tests.kit.servers import Server, b64, wait_until

# Sends a JSON object to a path of etcd's gateway, and returns the answer, to be read line by line.
CallGateway = Callable[[str, Mapping[str, Any]], Reply | HTTPResponse]
# Seconds until work in progress at a test's end has finished.
SETTLE_SECONDS = 20.0
ALL_KEYS = {'key': b64(b'\0'), 'range_end': b64(b'\0')}


class CompactedError(Exception):
    """Part of the history has been compacted away in etcd."""


class RevisionReader:
    def __init__(self, ask: CallGateway, since: int = 0) -> None:
        self._ask = ask
        self.before: dict[str, StoredValue] = {}
        self.changes: list[Change] = []
        self.revision = since

    def begin(self) -> None:
        answer = self._call('kv/range', ALL_KEYS)
        self.before = dict(map(parse_entry, answer.get('kvs', [])))
        self.changes, self.revision = [], int(answer['header']['revision'])

    def read_new(self) -> int:
        """Read the changes since the last call, and return the revision reached.

        Raises:
            CompactedError: etcd has compacted or lost some of them.
            OSError: etcd cannot be reached.
        """
        latest = int(self._call('kv/range', {'key': b64('x'), 'count_only': True})['header']['revision'])
        if latest < self.revision:
            raise CompactedError(f'etcd was at revision {self.revision}, and is at {latest}')
        if latest == self.revision:
            return latest
        request = {'create_request': {**ALL_KEYS, 'start_revision': self.revision + 1}}
        with self._ask('watch', request) as answer:
            while self.revision < latest:
                result = json.loads(answer.readline())['result']
                if result.get('canceled'):
                    raise CompactedError(f'etcd has forgotten all before revision {result.get("compact_revision")}')
                for event in result.get('events', []):
                    (key, stored), self.revision = parse_entry(event['kv']), int(event['kv']['mod_revision'])
                    self.changes.append(Change(self.revision, key, None if event.get('type') == 'DELETE' else stored))
        return self.revision

    def _call(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with self._ask(path, body) as answer:
            return dict(json.loads(answer.read()))


class Witness:
    def __init__(
        self, ask: CallGateway, database: PlacementDatabase, works: Callable[[str], bool | None], *servers: Server
    ) -> None:
        self._revisions = RevisionReader(ask)
        self._database, self._works, self._servers = database, works, servers

    def begin(self) -> None:
        self._revisions.begin()

    def read_new(self) -> None:
        self._revisions.read_new()

    def restore_servers(self) -> None:
        # Judging needs the servers, which the test may have stopped.
        for server in self._servers:
            if server.is_running:
                server.resume()
            else:
                server.start()

    def history(self) -> History:
        """Return the history so far, with the commands of the running test."""
        self._revisions.read_new()
        etcd = dict(self._revisions.before)
        for change in self._revisions.changes:
            etcd[change.key] = change.stored or StoredValue(b'', 0)
        computes = {key.split('/')[2] for key in etcd if key.startswith('/hosts/')}
        alive = {key.split('/')[2] for key, stored in etcd.items() if key.startswith('/computes/') and stored.value}
        away = {compute for compute in computes if compute not in alive or self._works(compute) is False}
        return History(
            tuple(JOURNAL.runs),
            self._revisions.before,
            self._revisions.changes,
            self._database.read_allocations(),
            self._database.read_capacities(),
            away,
            frozenset(JOURNAL.manual_subjects),
            frozenset(JOURNAL.foreign),
        )


def require_clean(witness: Witness) -> None:
    witness.restore_servers()
    verdicts = [Verdict([], ['not looked'])]

    def clean() -> bool:
        verdicts[0] = judge(witness.history())
        return bool(verdicts[0].permanent) or not verdicts[0].pending

    try:
        wait_until(clean, SETTLE_SECONDS, 'all that was asked for has come to its end')
    except AssertionError as error:
        raise AssertionError('\n'.join([str(error), *verdicts[0].pending])) from None
    assert not verdicts[0].permanent, '\n'.join(['its history has:', *verdicts[0].permanent, *verdicts[0].pending])


def is_working_here(compute: str) -> bool | None:
    """True if the test's ecompute with this uuid works, None if it has none."""
    started = [ecompute for ecompute in JOURNAL.computes if ecompute.uuid == compute]
    return any(ecompute.is_running and not is_stopped(ecompute.pid) for ecompute in started) if started else None


def is_process_working(pid: int) -> bool:
    return os.path.exists(f'/proc/{pid}') and not is_stopped(pid)


def parse_entry(entry: Mapping[str, Any]) -> tuple[str, StoredValue]:
    key = base64.b64decode(entry['key']).decode(errors='replace')
    return key, StoredValue(base64.b64decode(entry.get('value', '')), int(entry.get('lease', 0)))
