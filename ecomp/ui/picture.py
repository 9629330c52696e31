"""What etcd holds, as small rows for the page of `eschedule ui`. Pure.

hosts      compute: [name, state, the state in words, {class: [held by its requests or null, capacity or null]}]
instances  instance: [compute, name, state, [VCPU, MEMORY_MB, DISK_GB], stack, group, project, problem, revision of it]
findings   number: [compute, code, level, subject, sentence, what repairs it]
events     number: [time, subject, text, who asked for it]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from ecomp.model import keys
from ecomp.model.allocation import REQUIRED_CLASSES
from ecomp.model.audit import parse_report
from ecomp.model.events import Change, make_events
from ecomp.model.facts import NO_FACTS, Facts, parse_facts, sum_usage
from ecomp.model.finding import Finding
from ecomp.model.host import DISABLED, SILENT, UP, Computes, EntriesByCompute, group_by_instance, parse_computes
from ecomp.model.listing import Absences, is_on_host
from ecomp.model.order import InvalidRequest, Request, parse_request
from ecomp.model.queue import make_queued_record
from ecomp.model.record import Record, describe_wait, from_json, make_scheduled_record
from ecomp.model.states import GONE, QUEUED, UNKNOWN
from ecomp.model.status import STATUS_TRAITS
from ecomp.model.text import make_printable
from ecomp.model.trouble import parse_trouble

Entries = Mapping[str, keys.StoredValue]
Row = Sequence[Any]
Tables = dict[str, Mapping[str, Row]]
INSTANCE_PREFIXES = (keys.HOSTS, keys.QUEUES, keys.INSTANCES)
COMPUTE_PREFIXES = (keys.FACTS, keys.TROUBLES, keys.FINDINGS)
EVENT_PREFIXES = (keys.STACKS, keys.FLAVORS, keys.GROUPS, keys.QUOTAS)
PREFIXES = (keys.HOSTNAMES, keys.COMPUTES, *COMPUTE_PREFIXES, *INSTANCE_PREFIXES, *EVENT_PREFIXES)
TROUBLED = 'troubled'  # the state of a living host that reports a trouble
MAX_EVENTS = 20


def _make_short(text: object) -> str:
    return make_printable(str(text or ''), 300)


class Picture:
    """The rows of all tables, remade only where the keys or the host of a row have changed."""

    def __init__(self) -> None:
        self.newest_revision, self._computes = 0, Computes()
        self._entries: Entries = {}
        self._keys: dict[str, set[str]] = {}  # by instance
        self._requests: dict[str, dict[str, Request | InvalidRequest]] = {}  # by compute and instance
        self._facts: dict[str, Facts] = {}  # also of silent hosts, which publish nothing any more
        self._hosts, self._instances, self._events = dict[str, Row](), dict[str, Row](), dict[str, Row]()
        self._findings: dict[str, list[Row]] = {}  # by compute

    @property
    def tables(self) -> Tables:
        findings = {f'{of}/{number}': row for of, rows in self._findings.items() for number, row in enumerate(rows)}
        return Tables(hosts={**self._hosts}, instances={**self._instances}, findings=findings, events={**self._events})

    def update(self, states: Mapping[str, Entries], now: str) -> None:
        """Update all rows from {prefix: entries}, with the ISO time `now` for new events."""
        before, self._entries = self._entries, {key: each for state in states.values() for key, each in state.items()}
        # A follower keeps the entry of a key that has not changed.
        changed = [key for key, entry in self._entries.items() if before.get(key) is not entry]
        changed += before.keys() - self._entries.keys()
        for key in changed:
            self._index_key(key)
        instances = {keys.get_queued_instance(key) for key in changed if key.startswith(INSTANCE_PREFIXES)}
        computes = {key.split('/')[2] for key in changed if key.startswith((*COMPUTE_PREFIXES, keys.HOSTS))}
        if any(key.startswith((keys.HOSTNAMES, keys.COMPUTES)) for key in changed):
            computes |= self._update_computes(parse_computes(states[keys.COMPUTES], states[keys.HOSTNAMES]))
            # A silent host makes its instances unknown, and what is queued waits for hosts.
            instances |= {key for key, row in self._instances.items() if row[0] in computes or row[2] == QUEUED}
        for instance in filter(keys.is_uuid, instances):
            computes |= self._update_instance(instance)
        for compute in filter(keys.is_uuid, computes):
            self._update_host(compute)
        self._keys = {instance: owned for instance, owned in self._keys.items() if owned}
        if self.newest_revision:
            self.add_events(_make_changes(before, self._entries, changed), now)
        self.newest_revision = max((entry.revision for entry in self._entries.values()), default=0)

    def _index_key(self, key: str) -> None:
        compute, instance, entry = key.split('/')[2], keys.get_queued_instance(key), self._entries.get(key)
        if key.startswith(INSTANCE_PREFIXES):
            owned = self._keys.setdefault(instance, set())
            (owned.add if entry else owned.discard)(key)
        if key == keys.request(compute, instance):
            requests = self._requests.setdefault(compute, {})
            requests.pop(instance, None)
            if entry is not None:
                requests[instance] = parse_request(compute, key, entry.value)

    def _update_computes(self, new: Computes) -> set[str]:
        """Take over the computes, and return those whose name or presence differs."""
        former, self._computes = self._computes, new
        renamed = {compute for compute, _ in former.display_names.items() ^ new.display_names.items()}
        return renamed | (former.living.keys() ^ new.living.keys())

    def add_events(self, changes: Iterable[Change], now: str) -> None:
        """Append events, or with '' as `now` replace all events by them, and keep MAX_EVENTS."""
        self._events = self._events if now else {}
        newest = sorted(changes, key=lambda change: change.revision)[-5 * MAX_EVENTS :]  # few have no event
        for _, group in groupby(newest, lambda change: change.revision):
            for event in make_events(list(group), self._computes.format_name):
                if event.kind != 'name':
                    name = self._instances.get(event.instance, ('', event.name or event.instance[:8]))[1]
                    row = event.time or now, *map(_make_short, (name, event.says, event.by))
                    self._events[str(int(max(self._events, key=int, default='0')) + 1)] = row
        self._events = dict([*self._events.items()][-MAX_EVENTS:])

    def _update_instance(self, instance: str) -> set[str]:
        """Make or remove the row of an instance, and return the computes where it is and was."""
        former, record = self._instances.pop(instance, None), self._read_record(instance)
        if record is None or record.state == GONE:
            return {former[0]} if former else set()
        compute, request = record.compute, self._requests.get(record.compute, {}).get(instance)
        is_silent = is_on_host(record) and compute not in self._computes.living
        is_tombstone = isinstance(request, Request) and request.is_tombstone
        absences = Absences({compute: SILENT} if is_silent else {}, [instance] * is_tombstone)
        state, newest = absences.get_state(record), max(self._entries[key].revision for key in self._keys[instance])
        problems = [record.error, record.fault, absences.explain_state(record, self._computes.format_name(compute))]
        if state == QUEUED:
            reason = self._computes.no_taker_reason or f'waits for {describe_wait(record)}'
            problems = [f'since {record.stages.get("requested", "?")}: {reason}']
        name, stack = record.name or instance[:8], record.stack and record.stack.name
        texts = stack, record.group_name, record.project_id, '; '.join(map(str, filter(None, problems)))
        amounts = [record.resources.get(name, 0) for name in REQUIRED_CLASSES]
        self._instances[instance] = compute, name, state, amounts, *map(_make_short, texts), newest
        return {compute, former[0] if former else compute}

    def _read_record(self, instance: str) -> Record | None:
        """Make an instance's record as `list` does, None without keys, with a fault if malformed."""
        entries = {key: entry for key in self._keys[instance] if (entry := self._entries.get(key))}
        places = group_by_instance(entries.items()).get(instance, EntriesByCompute())
        if (queue_key := next(filter(keys.parse_queue_key, entries), None)) and places.request is None:
            return make_queued_record(queue_key, entries[queue_key].value)
        if places.record is None:
            key = keys.request(places.compute, instance)
            return make_scheduled_record(key, places.request.value) if places.request else None
        try:
            return from_json(places.record.value, instance, keys.parse_record_key(places.record_key or '')[0])
        except ValueError as error:
            return Record(instance, places.compute, UNKNOWN, fault=f'its record is malformed: {error}')

    def _update_host(self, compute: str) -> None:
        """Make or remove the row and the findings of a host."""
        requests, is_living = self._requests.get(compute, {}), compute in self._computes.living
        is_listed = is_living or requests or compute in self._computes.stored_hostnames
        if not is_listed and all(row[0] != compute for row in self._instances.values()):
            for table in (self._hosts, self._findings, self._facts):
                table.pop(compute, None)
            return
        published, trouble, report = (self._entries.get(prefix + compute) for prefix in COMPUTE_PREFIXES)
        if published is not None:
            self._facts[compute] = parse_facts(published.value)
        facts, held = self._facts.get(compute, NO_FACTS), sum_usage(compute, requests.values())
        capacities = {name: facts.room.get(name, [None])[0] for name in {*facts.room, *held}}
        is_sure = all(isinstance(each, Request) for each in requests.values())  # too large a value was dropped
        rooms = {name: (held.get(name, 0) if is_sure else None, each) for name, each in capacities.items()}
        state = words = UP if is_living else SILENT
        if is_living and STATUS_TRAITS.intersection(facts.traits):
            state, words = DISABLED, f'{DISABLED}, draining' if requests else DISABLED
        if is_living and trouble is not None and trouble.lease:
            state, words = TROUBLED, f'{words}, cannot build: {parse_trouble(trouble.value)}'
        self._hosts[compute] = self._computes.format_name(compute), state, _make_short(words), rooms
        self._findings[compute] = list(self._make_finding_rows(compute, report))

    def _make_finding_rows(self, compute: str, report: keys.StoredValue | None) -> Iterator[Row]:
        try:
            found = parse_report(compute, report.value).findings if report and report.lease else ()
        except ValueError as error:
            found = (Finding('compute-mute', compute, f'its report is malformed: {error}', compute),)
        for item in found:
            name = self._instances.get(item.subject, ('', self._computes.replace_uuids(item.subject)))[1]
            sentence = self._computes.replace_uuids(item.sentence.replace(item.subject, name))
            # Its compute may report any text as the subject of a command.
            shown = item.subject if keys.is_uuid(item.subject) else '<instance>'
            cure = item.how.replace('<instance>', shown) or 'eschedule check --fix'
            yield item.compute, item.code, item.level, *map(_make_short, (name, sentence, cure))


def find_changes(before: Tables, after: Tables) -> dict[str, Any]:
    """Return {table: {key: new row, or None if removed}} of the rows that differ."""
    changes = {}
    for name, rows in after.items():
        old = before.get(name, {})
        changes[name] = {key: rows.get(key) for key in {**old, **rows} if rows.get(key) != old.get(key)}
    return {name: rows for name, rows in changes.items() if rows}


def _make_changes(before: Entries, after: Entries, changed_keys: Sequence[str]) -> Iterator[Change]:
    # A follower does not tell when a key was deleted. A queued request is deleted by its delivery.
    revisions = {keys.get_queued_instance(key): after[key].revision for key in changed_keys if key in after}
    newest = max(revisions.values(), default=0)
    for key in changed_keys:
        old, new = before.get(key), after.get(key)
        revision = new.revision if new else revisions.get(keys.get_queued_instance(key), newest + 1)
        yield Change(key, old.value if old else None, new.value if new else None, revision)
