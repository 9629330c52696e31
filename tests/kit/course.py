"""Replays a history: etcd by revision, and the lifecycle of each instance. Pure.

As in tests/kit/history.py, which judges the result, none of ecomp's reading code is used.
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
# The states that may follow each state, besides itself.
AFTERWARDS = {
    'scheduled': {'building', 'active', 'stopped', 'error', 'destroying', 'gone'},
    'building': {'active', 'stopped', 'error', 'destroying', 'gone'},
    'active': {'stopped', 'destroying', 'gone'},
    'stopped': {'active', 'destroying', 'gone'},
    'destroying': {'gone'},
    'gone': set(),
    'error': set(),
}


class Delivery(NamedTuple):
    """A request written to a compute.

    `by_eschedule`: the same transaction deleted its attempt's key.
    """

    revision: int
    compute: str
    by_eschedule: bool


@dataclass
class Life:
    """The lifecycle of one instance.

    Attributes:
        deliveries: the requests written for it.
        queued_revisions: revisions at which it was queued.
        state: state of its last record, even after that record was removed.
        failure_count: how often it changed to error.
        tombstone_revision: revision of its first tombstone, 0 if there is none.
    """

    deliveries: list[Delivery] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    state: str | None = None
    failed: int = 0
    tombstone: int = 0
    # True if it existed when the history began.
    earlier: bool = False


class Course:
    """Replays etcd's history; collects the violations of single revisions, and all lifecycles."""

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
        """Replay every revision, and return etcd at the end."""
        for key, stored in self._history.before.items():
            self._take(key, stored)
        for name in {*self._hosts, *self._queues, *self._records}:
            life = self._life(name)
            life.earlier, life.state = True, self._records.get(name, {}).get('state')
            life.tombstone = int(any(not request.get('allocations') for request in self._hosts.get(name, {}).values()))
        for revision, changes in groupby(self._history.changes, lambda each: each.revision):
            self._step(revision, list(changes))
        return self._etcd

    def record(self, instance: str) -> dict[str, Any] | None:
        return self._records.get(instance)

    def waits(self, instance: str) -> bool:
        """True if the instance is queued, or requested of a compute that is away."""
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
        requests_by_family = {'hosts': self._hosts, 'queues': self._queues}
        match key.split('/')[1:]:
            case ['hosts' | 'queues' as family, place, instance]:
                by_place = requests_by_family[family].setdefault(instance, {})
                by_place.pop(place, None)
                if kept is not None:
                    by_place[place] = object_of(kept)
                elif not by_place:
                    del requests_by_family[family][instance]
            case ['instances', *_, instance]:
                # ecomp 1.0 uses another key. A record moves from there in one revision.
                if kept is not None:
                    self._records[instance], self._places[instance] = object_of(kept), key
                elif self._places.get(instance) == key:
                    del self._records[instance], self._places[instance]

    def _step(self, revision: int, changes: Sequence[Change]) -> None:
        """Check one revision: each change against the state before, then the combined result."""
        removed = {change.key for change in changes if change.kept is None}
        by_eschedule = any(key.startswith('/requests/') for key in removed)
        before = {change.key: self._etcd.get(change.key) for change in changes}
        for change in changes:
            self._take(change.key, change.kept)
        for key, stored in ((change.key, change.kept) for change in changes):
            previous = before[key]
            match key.split('/')[1:]:
                case ['hosts', compute, instance]:
                    self._request(revision, compute, instance, previous, stored, by_eschedule)
                case ['queues', _, instance]:
                    if stored is not None and previous is None:
                        self._life(instance).queued.append(revision)
                    self._once(revision, instance)
                    self._named(revision, instance, object_of(stored))
                case ['instances', instance] if stored is None and self._places.get(instance) not in (None, key):
                    continue  # moved below its compute's key
                case ['instances', *place, instance]:
                    if place and stored is not None and place[0] != (object_of(stored).get('compute') or 'none'):
                        self._say(revision, f'is recorded below {place[0]} by another compute', instance)
                    previous = previous or before.get(f'/instances/{instance}')
                    tombstone = any(path.endswith(f'/{instance}') for path in removed if path.startswith('/hosts/'))
                    self._record(revision, instance, previous, stored, tombstone)
                case ['names', name]:
                    holder = str(object_of(previous).get('instance'))
                    new_holder = str(object_of(stored).get('instance'))
                    if holder != new_holder and (holder in self._hosts or holder in self._queues):
                        self._say(revision, f'the name {name} is taken from it, which lives', holder, name)
                case ['requests', instance] | ['queues', _, instance, 'taker']:
                    if stored is not None and not stored.lease:
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
        """Check a written or removed record.

        `request_removed`: the same transaction removed its request.
        """
        life, earlier_record = self._life(instance), object_of(was)
        if kept is None:
            if earlier_record.get('state') not in ENDED and not (unasked and life.tombstone):
                self._say(revision, f'its record went while it was {earlier_record.get("state")}', instance)
            elif earlier_record.get('state') not in ENDED:
                life.state = 'gone'  # a full etcd refuses the final record
            return
        record = object_of(kept)
        state, compute = str(record.get('state')), str(record.get('compute'))
        if was is not None and state != life.state and state not in AFTERWARDS.get(str(life.state), set()):
            self._say(revision, f'{life.state}, then {state}', instance)
        is_found_disk = state == 'stopped' and record.get('fault')  # a disk of this name existed before the request
        if was is None and (life.state == 'gone' or not (state in FIRST or is_found_disk)):
            self._say(revision, f'{life.state or "nothing"}, then {state}', instance)
        if was is not None and str(earlier_record.get('compute')) != compute:
            self._say(revision, f'moves from compute {earlier_record.get("compute")} to {compute}', instance)
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
        value = json.loads(kept.value) if kept is not None else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
