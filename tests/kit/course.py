"""Replays a history: etcd by revision, and the lifecycle of each instance. Pure.

As in tests/kit/history.py, which judges the result, none of ecomp's reading code is used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.kit.ending import TERMINAL_STATES, StoredValue

if TYPE_CHECKING:
    from tests.kit.history import Change, History

FIRST_STATES = {'scheduled', 'building', 'destroying', 'gone', 'error'}
# The states that may follow each state, besides itself.
NEXT_STATES = {
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
class Lifecycle:
    """The lifecycle of one instance.

    Attributes:
        deliveries: the requests written for it.
        queued_revisions: revisions at which it was queued.
        state: state of its last record, even after that record was removed.
        failure_count: how often it changed to error.
        tombstone_revision: revision of its first tombstone, 0 if there is none.
    """

    deliveries: list[Delivery] = field(default_factory=list)
    queued_revisions: list[int] = field(default_factory=list)
    state: str | None = None
    failure_count: int = 0
    tombstone_revision: int = 0
    # True if it existed when the history began.
    existed_before: bool = False


class HistoryReplay:
    """Replays etcd's history; collects the violations of single revisions, and all lifecycles."""

    def __init__(self, history: History) -> None:
        self.violations: list[str] = []
        self.lifecycles: dict[str, Lifecycle] = {}
        self._history = history
        self._etcd: dict[str, StoredValue] = {}
        self._hosts: dict[str, dict[str, dict[str, Any]]] = {}
        self._queues: dict[str, dict[str, dict[str, Any]]] = {}
        self._records: dict[str, dict[str, Any]] = {}
        self._record_keys: dict[str, str] = {}

    def replay(self) -> Mapping[str, StoredValue]:
        """Replay every revision, and return etcd at the end."""
        for key, stored in self._history.before.items():
            self._apply_change(key, stored)
        for name in {*self._hosts, *self._queues, *self._records}:
            life = self._get_lifecycle(name)
            life.existed_before, life.state = True, self._records.get(name, {}).get('state')
            life.tombstone_revision = int(
                any(not request.get('allocations') for request in self._hosts.get(name, {}).values())
            )
        for revision, changes in groupby(self._history.changes, lambda each: each.revision):
            self._check_revision(revision, list(changes))
        return self._etcd

    def get_record(self, instance: str) -> dict[str, Any] | None:
        return self._records.get(instance)

    def is_waiting(self, instance: str) -> bool:
        """True if the instance is queued, or requested of a compute that is away."""
        computes = self._hosts.get(instance, {})
        return instance in self._queues or any(compute in self._history.away for compute in computes)

    def _get_lifecycle(self, instance: str) -> Lifecycle:
        return self.lifecycles.setdefault(instance, Lifecycle())

    def _report(self, revision: int, text: str, *subjects: str) -> None:
        line = f'{", ".join(subjects)}: {text}, at revision {revision}'
        if not set(subjects) & set(self._history.manual_subjects) and line not in self.violations[-4:]:
            self.violations.append(line)

    def _apply_change(self, key: str, stored: StoredValue | None) -> None:
        if stored is None:
            self._etcd.pop(key, None)
        else:
            self._etcd[key] = stored
        requests_by_family = {'hosts': self._hosts, 'queues': self._queues}
        match key.split('/')[1:]:
            case ['hosts' | 'queues' as family, place, instance]:
                by_place = requests_by_family[family].setdefault(instance, {})
                by_place.pop(place, None)
                if stored is not None:
                    by_place[place] = parse_object(stored)
                elif not by_place:
                    del requests_by_family[family][instance]
            case ['instances', *_, instance]:
                # ecomp 1.0 uses another key. A record moves from there in one revision.
                if stored is not None:
                    self._records[instance], self._record_keys[instance] = parse_object(stored), key
                elif self._record_keys.get(instance) == key:
                    del self._records[instance], self._record_keys[instance]

    def _check_revision(self, revision: int, changes: Sequence[Change]) -> None:
        """Check one revision: each change against the state before, then the combined result."""
        removed = {change.key for change in changes if change.stored is None}
        by_eschedule = any(key.startswith('/requests/') for key in removed)
        before = {change.key: self._etcd.get(change.key) for change in changes}
        for change in changes:
            self._apply_change(change.key, change.stored)
        for key, stored in ((change.key, change.stored) for change in changes):
            previous = before[key]
            match key.split('/')[1:]:
                case ['hosts', compute, instance]:
                    self._check_request(revision, compute, instance, previous, stored, by_eschedule)
                case ['queues', _, instance]:
                    if stored is not None and previous is None:
                        self._get_lifecycle(instance).queued_revisions.append(revision)
                    self._check_single_place(revision, instance)
                    self._check_name(revision, instance, parse_object(stored))
                case ['instances', instance] if stored is None and self._record_keys.get(instance) not in (None, key):
                    continue  # moved below its compute's key
                case ['instances', *place, instance]:
                    if place and stored is not None and place[0] != (parse_object(stored).get('compute') or 'none'):
                        self._report(revision, f'is recorded below {place[0]} by another compute', instance)
                    previous = previous or before.get(f'/instances/{instance}')
                    tombstone = any(path.endswith(f'/{instance}') for path in removed if path.startswith('/hosts/'))
                    self._check_record(revision, instance, previous, stored, tombstone)
                case ['names', name]:
                    holder = str(parse_object(previous).get('instance'))
                    new_holder = str(parse_object(stored).get('instance'))
                    # A replacement takes the name over in the revision that asks for the end of its predecessor.
                    is_replaced = any(
                        change.key.startswith('/hosts/') and change.key.endswith(holder) for change in changes
                    )
                    if holder != new_holder and not is_replaced and (holder in self._hosts or holder in self._queues):
                        self._report(revision, f'the name {name} is taken from it, which lives', holder, name)
                case ['requests', instance] | ['queues', _, instance, 'taker']:
                    if stored is not None and not stored.lease:
                        self._report(revision, 'is on no lease', instance)

    def _check_single_place(self, revision: int, instance: str) -> None:
        computes, queues = self._hosts.get(instance, {}), self._queues.get(instance, {})
        if len(computes) > 1:
            self._report(revision, f'is requested of {len(computes)} computes at once', instance)
        if len(queues) > 1 or (queues and computes):
            self._report(revision, f'waits in {len(queues)} queues, and is requested of {len(computes)}', instance)

    def _check_name(self, revision: int, instance: str, request: Mapping[str, Any]) -> None:
        name = request.get('name')
        if name and parse_object(self._etcd.get(f'/names/{name}')).get('instance') != instance:
            self._report(revision, f'is delivered as {name}, which is not its name', instance, str(name))

    def _check_request(
        self,
        revision: int,
        compute: str,
        instance: str,
        previous: StoredValue | None,
        stored: StoredValue | None,
        by_eschedule: bool,
    ) -> None:
        life, record, request = self._get_lifecycle(instance), self._records.get(instance), parse_object(stored)
        self._check_single_place(revision, instance)
        if stored is None:
            state = record.get('state') if record and record.get('compute') == compute else None
            if state is not None and state not in TERMINAL_STATES:
                self._report(revision, f'its request went while it was {state}', instance)
            if record is None and life.state not in TERMINAL_STATES and parse_object(previous).get('allocations'):
                self._report(revision, 'its request went, and no record says what became of it', instance)
        elif not request.get('allocations'):
            life.tombstone_revision = life.tombstone_revision or revision
        elif life.tombstone_revision:
            self._report(revision, 'is asked for again after its destroy was accepted', instance)
        elif previous is None:
            life.deliveries.append(Delivery(revision, compute, by_eschedule))
            self._check_name(revision, instance, request)

    def _check_record(
        self,
        revision: int,
        instance: str,
        previous: StoredValue | None,
        stored: StoredValue | None,
        request_removed: bool,
    ) -> None:
        """Check a written or removed record.

        `request_removed`: the same transaction removed its request.
        """
        life, earlier_record = self._get_lifecycle(instance), parse_object(previous)
        if stored is None:
            if earlier_record.get('state') not in TERMINAL_STATES and not (request_removed and life.tombstone_revision):
                self._report(revision, f'its record went while it was {earlier_record.get("state")}', instance)
            elif earlier_record.get('state') not in TERMINAL_STATES:
                life.state = 'gone'  # a full etcd refuses the final record
            return
        record = parse_object(stored)
        state, compute = str(record.get('state')), str(record.get('compute'))
        if previous is not None and state != life.state and state not in NEXT_STATES.get(str(life.state), set()):
            self._report(revision, f'{life.state}, then {state}', instance)
        is_found_disk = state == 'stopped' and record.get('fault')  # a disk of this name existed before the request
        if previous is None and (life.state == 'gone' or not (state in FIRST_STATES or is_found_disk)):
            self._report(revision, f'{life.state or "nothing"}, then {state}', instance)
        if previous is not None and str(earlier_record.get('compute')) != compute:
            self._report(revision, f'moves from compute {earlier_record.get("compute")} to {compute}', instance)
        error = record.get('error')
        if state == 'error' and not (isinstance(error, dict) and error.get('reason')):
            self._report(revision, 'is in error without a reason', instance)
        if state not in TERMINAL_STATES and compute not in self._hosts.get(instance, {}):
            self._report(revision, f'is {state} on a compute that is not asked for it', instance)
        if life.tombstone_revision and state not in ('destroying', 'gone') and state != life.state:
            self._report(revision, f'is {state} after its destroy was accepted', instance)
        life.failure_count += state == 'error' and life.state != 'error'
        life.state = state


def parse_object(stored: StoredValue | None) -> dict[str, Any]:
    try:
        value = json.loads(stored.value) if stored is not None else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
