"""The course of a history: etcd from revision to revision, and what became of each uuid. Pure.

As in tests/kit/history.py, which judges it, nothing of ecomp's own reading code is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.kit.ending import ENDED, Kept

if TYPE_CHECKING:
    from tests.kit.history import Change, History

FIRST = {'scheduled', 'building', 'destroying', 'gone', 'error'}
AFTERWARDS = {
    'scheduled': {'building', 'active', 'stopped', 'error', 'destroying', 'gone'},
    'building': {'active', 'stopped', 'error', 'destroying', 'gone'},
    'active': {'stopped', 'destroying', 'gone'},
    'stopped': {'active', 'destroying', 'gone'},
    'destroying': {'gone'},
    'gone': set(),
    'error': set(),
}
"""The states that may follow each, beside itself."""


class Delivery(NamedTuple):
    """A request came to a compute. `by_eschedule`: its attempt's key went in the same transaction."""

    revision: int
    compute: str
    by_eschedule: bool


@dataclass
class Life:
    """What became of one uuid. `state` is its record's last one, also when that is not there any more."""

    deliveries: list[Delivery] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    state: str | None = None
    failed: int = 0
    tombstone: int = 0
    earlier: bool = False
    """Whether it was there when the history began."""


class Course:
    """etcd's history from revision to revision: what no revision may show, and the lives of all instances."""

    def __init__(self, history: History) -> None:
        self.wrong: list[str] = []
        self.lives: dict[str, Life] = {}
        self._history = history
        self._etcd: dict[str, Kept] = {}
        self._hosts: dict[str, dict[str, dict[str, Any]]] = {}
        self._queues: dict[str, dict[str, dict[str, Any]]] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._places: dict[str, str] = {}

    def run(self) -> Mapping[str, Kept]:
        """Look at every revision in turn; etcd at the end."""
        for key, kept in self._history.before.items():
            self._take(key, kept)
        for name in {*self._hosts, *self._queues, *self._records}:
            life = self._life(name)
            life.earlier, life.state = True, self._records.get(name, {}).get('state')
            life.tombstone = int(any(not each.get('allocations') for each in self._hosts.get(name, {}).values()))
        for revision, changes in groupby(self._history.changes, lambda each: each.revision):
            self._step(revision, list(changes))
        return self._etcd

    def record(self, instance: str) -> dict[str, Any] | None:
        return self._records.get(instance)

    def waits(self, instance: str) -> bool:
        """Whether it is in a queue, or a compute that is away has its request and no record that says more."""
        computes = self._hosts.get(instance, {})
        return instance in self._queues or any(compute in self._history.away for compute in computes)

    def _life(self, instance: str) -> Life:
        return self.lives.setdefault(instance, Life())

    def _say(self, revision: int, text: str, *about: str) -> None:
        line = f'{", ".join(about)}: {text}, at revision {revision}'
        if not set(about) & set(self._history.by_hand) and line not in self.wrong[-4:]:
            self.wrong.append(line)

    def _take(self, key: str, kept: Kept | None) -> None:
        if kept is None:
            self._etcd.pop(key, None)
        else:
            self._etcd[key] = kept
        books = {'hosts': self._hosts, 'queues': self._queues}
        match key.split('/')[1:]:
            case ['hosts' | 'queues' as family, where, instance]:
                there = books[family].setdefault(instance, {})
                there.pop(where, None)
                if kept is not None:
                    there[where] = object_of(kept)
                elif not there:
                    del books[family][instance]
            case ['instances', *_, instance]:
                # ecomp 1.0 has it at another key, and it moves from there in one revision.
                if kept is not None:
                    self._records[instance], self._places[instance] = object_of(kept), key
                elif self._places.get(instance) == key:
                    del self._records[instance], self._places[instance]

    def _step(self, revision: int, changes: Sequence[Change]) -> None:
        """One revision: each change against what was before, then what all of them together have made."""
        removed = {each.key for each in changes if each.kept is None}
        by_eschedule = any(key.startswith('/requests/') for key in removed)
        before = {each.key: self._etcd.get(each.key) for each in changes}
        for each in changes:
            self._take(each.key, each.kept)
        for key, kept in ((each.key, each.kept) for each in changes):
            was = before[key]
            match key.split('/')[1:]:
                case ['hosts', compute, instance]:
                    self._request(revision, compute, instance, was, kept, by_eschedule)
                case ['queues', _, instance]:
                    if kept is not None and was is None:
                        self._life(instance).queued.append(revision)
                    self._once(revision, instance)
                    self._named(revision, instance, object_of(kept))
                case ['instances', instance] if kept is None and self._places.get(instance) not in (None, key):
                    continue  # moved below its compute
                case ['instances', *where, instance]:
                    if where and kept is not None and where[0] != (object_of(kept).get('compute') or 'none'):
                        self._say(revision, f'is recorded below {where[0]} by another compute', instance)
                    was = was or before.get(f'/instances/{instance}')
                    tombstone = any(each.endswith(f'/{instance}') for each in removed if each.startswith('/hosts/'))
                    self._record(revision, instance, was, kept, tombstone)
                case ['names', name]:
                    holder, now = str(object_of(was).get('instance')), str(object_of(kept).get('instance'))
                    if holder != now and (holder in self._hosts or holder in self._queues):
                        self._say(revision, f'the name {name} is taken from it, which lives', holder, name)
                case ['requests', instance] | ['queues', _, instance, 'taker']:
                    if kept is not None and not kept.lease:
                        self._say(revision, 'is on no lease', instance)

    def _once(self, revision: int, instance: str) -> None:
        computes, queues = self._hosts.get(instance, {}), self._queues.get(instance, {})
        if len(computes) > 1:
            self._say(revision, f'is requested of {len(computes)} computes at once', instance)
        if len(queues) > 1 or (queues and computes):
            self._say(revision, f'waits in {len(queues)} queues, and is requested of {len(computes)}', instance)

    def _named(self, revision: int, instance: str, request: Mapping[str, Any]) -> None:
        name = request.get('name')
        if name and object_of(self._etcd.get(f'/names/{name}')).get('instance') != instance:
            self._say(revision, f'is delivered as {name}, which is not its name', instance, str(name))

    def _request(
        self, revision: int, compute: str, instance: str, was: Kept | None, kept: Kept | None, by_eschedule: bool
    ) -> None:
        life, record, request = self._life(instance), self._records.get(instance), object_of(kept)
        self._once(revision, instance)
        if kept is None:
            state = record.get('state') if record and record.get('compute') == compute else None
            if state is not None and state not in ENDED:
                self._say(revision, f'its request went while it was {state}', instance)
            if record is None and life.state not in ENDED and object_of(was).get('allocations'):
                self._say(revision, 'its request went, and no record says what became of it', instance)
        elif not request.get('allocations'):
            life.tombstone = life.tombstone or revision
        elif life.tombstone:
            self._say(revision, 'is asked for again after its destroy was accepted', instance)
        elif was is None:
            life.deliveries.append(Delivery(revision, compute, by_eschedule))
            self._named(revision, instance, request)

    def _record(self, revision: int, instance: str, was: Kept | None, kept: Kept | None, unasked: bool) -> None:
        """A record was written or removed; `unasked`: its request went in the same transaction."""
        life, earlier = self._life(instance), object_of(was)
        if kept is None:
            if earlier.get('state') not in ENDED and not (unasked and life.tombstone):
                self._say(revision, f'its record went while it was {earlier.get("state")}', instance)
            elif earlier.get('state') not in ENDED:
                life.state = 'gone'  # a full etcd takes no record of an end
            return
        record = object_of(kept)
        state, compute = str(record.get('state')), str(record.get('compute'))
        if was is not None and state != life.state and state not in AFTERWARDS.get(str(life.state), set()):
            self._say(revision, f'{life.state}, then {state}', instance)
        found = state == 'stopped' and record.get('fault')  # a disk of this name was there before the request
        if was is None and (life.state == 'gone' or not (state in FIRST or found)):
            self._say(revision, f'{life.state or "nothing"}, then {state}', instance)
        if was is not None and str(earlier.get('compute')) != compute:
            self._say(revision, f'moves from compute {earlier.get("compute")} to {compute}', instance)
        error = record.get('error')
        if state == 'error' and not (isinstance(error, dict) and error.get('reason')):
            self._say(revision, 'is in error without a reason', instance)
        if state not in ENDED and compute not in self._hosts.get(instance, {}):
            self._say(revision, f'is {state} on a compute that is not asked for it', instance)
        if life.tombstone and state not in ('destroying', 'gone') and state != life.state:
            self._say(revision, f'is {state} after its destroy was accepted', instance)
        life.failed += state == 'error' and life.state != 'error'
        life.state = state


def object_of(kept: Kept | None) -> dict[str, Any]:
    try:
        found = json.loads(kept.value) if kept is not None else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
