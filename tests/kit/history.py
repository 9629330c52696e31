"""The history judge: what commands said, and all that etcd held meanwhile, against the promises. Pure.

A History is values: each eschedule that was run with its words and its answer, etcd as it was at the beginning and
every change of it since, placement's claims at the end. judge() says what of it must not be, one line each. Nothing of
ecomp's own reading code is used: its mistakes must not hide themselves.

What somebody wrote by hand (`by_hand`: instances, names, groups, projects, computes) is theirs: nothing is said of it.
What holds at the end is in tests/kit/ending.py.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from tests.kit.ending import ENDED, Held, Kept, ending

NOTIFIED = re.compile(r'^NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})$', re.M)
QUEUED = re.compile(r'^QUEUED INSTANCE ([0-9a-f-]{36})$', re.M)
CANARY = re.compile(r'\bcanary-([0-9a-f]{8})\b')
ACCEPTED = re.compile(r'^eschedule: ([0-9a-f-]{36}): (?:destroy accepted|is being destroyed)', re.M)
GONE = re.compile(r'^eschedule: ([0-9a-f-]{36}): (?:gone$|taken out of its queue|its record is removed)', re.M)
REFUSED = {2, 3, 5}
"""Exit codes that say that nothing was placed."""
CERTAIN = {0, *REFUSED}
"""Exit codes after which it is known what was placed: that it was answered, or nothing."""
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


class Ask(NamedTuple):
    """One eschedule: its words, how it ended (`code` negative: by that signal; None: never) and what it said.

    `began` and `ended` are seconds of a monotonic clock.
    """

    words: tuple[str, ...]
    code: int | None
    stdout: str
    stderr: str
    began: float = 0.0
    ended: float = 0.0
    pid: int = 0

    def __str__(self) -> str:
        return f'eschedule {" ".join(self.words)[:200]} (exit {self.code}, {self.ended - self.began:.1f} s)'

    @property
    def is_create(self) -> bool:
        """Whether it asks for instances, by what its words look like."""
        is_query = any('resources' in word and '=' in word for word in self.words)
        return (is_query or self.named('--flavor') is not None) and not {'plan', 'flavor', 'doctor'} & set(self.words)

    def named(self, option: str) -> str | None:
        """The value of an option, None where it is not given."""
        for word, after in zip(self.words, (*self.words[1:], ''), strict=True):
            if word == option:
                return after
            if word.startswith(f'{option}='):
                return word.partition('=')[2]
        return None

    @property
    def asked(self) -> set[str]:
        """The instances it asked for, where it gave their uuid."""
        given = self.named('--uuid')
        try:
            whole, count = uuid.UUID(given or ''), int(self.named('--count') or 1)
        except ValueError:
            return set()
        return {str(whole)} if count == 1 else {str(uuid.uuid5(whole, str(number))) for number in range(1, count + 1)}

    @property
    def placed(self) -> dict[str, str]:
        """The instances it said are placed, and where: {instance: compute}, '' for a queue."""
        if not self.is_create:
            return {}
        found = {instance: compute for compute, instance in NOTIFIED.findall(self.stdout)}
        found |= dict.fromkeys(QUEUED.findall(self.stdout), '')
        if self.stdout.startswith('['):
            told = json.loads(self.stdout) if self.stdout.rstrip().endswith(']') else []
            found |= {each['instance']: each.get('compute', '') for each in told}
        return found

    @property
    def canaries(self) -> set[str]:
        """The beginnings of the uuids of the canaries it told of."""
        return set(CANARY.findall(self.stdout + self.stderr)) if '--canary' in self.words else set()


class Change(NamedTuple):
    """One key as etcd had it from a revision on; `kept` None: it was removed."""

    revision: int
    key: str
    kept: Kept | None


@dataclass(frozen=True)
class History:
    """All of it. `changes` are in etcd's order; `held` and `capacity` are placement's at the end.

    `away` are the computes that do not work at the end: what they are to do waits. `foreign` are consumers and
    instances that have a claim or a record beside ecomp.
    """

    asks: Sequence[Ask] = ()
    before: Mapping[str, Kept] = field(default_factory=dict)
    changes: Sequence[Change] = ()
    held: Held = field(default_factory=dict)
    capacity: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    away: Collection[str] = ()
    by_hand: Collection[str] = ()
    foreign: Collection[str] = ()


class Verdict(NamedTuple):
    """A line for each promise that is broken: for good, or as long as what is in work has not come to its end."""

    never: list[str]
    still: list[str]


def judge(history: History) -> Verdict:
    """What must not be in this history; nothing: all promises are kept."""
    course = Course(history)
    etcd = course.run()
    excepted = {*history.by_hand, *history.foreign}
    last = ending(etcd, history.held, history.capacity, excepted, history.away)
    return Verdict(
        [*course.wrong, *_answers(history, course)], [*_fates(history, course), *_left(history, etcd), *last]
    )


class Delivery(NamedTuple):
    """A request came to a compute. `by_eschedule`: its request key went in the same transaction."""

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
        """Its record as it is at the end of what was run."""
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
        """Have the key as it is from now on, in all of our books."""
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
                    there[where] = _object(kept)
                elif not there:
                    del books[family][instance]
            case ['instances', *_, instance]:
                # ecomp 1.0 has it at another key, and it moves from there in one revision.
                if kept is not None:
                    self._records[instance], self._places[instance] = _object(kept), key
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
                    self._named(revision, instance, _object(kept))
                case ['instances', instance] if kept is None and self._places.get(instance) not in (None, key):
                    continue  # moved below its compute
                case ['instances', *where, instance]:
                    if where and kept is not None and where[0] != (_object(kept).get('compute') or 'none'):
                        self._say(revision, f'is recorded below {where[0]} by another compute', instance)
                    was = was or before.get(f'/instances/{instance}')
                    tombstone = any(each.endswith(f'/{instance}') for each in removed if each.startswith('/hosts/'))
                    self._record(revision, instance, was, kept, tombstone)
                case ['names', name]:
                    holder, now = str(_object(was).get('instance')), str(_object(kept).get('instance'))
                    if holder != now and (holder in self._hosts or holder in self._queues):
                        self._say(revision, f'the name {name} is taken from it, which lives', holder, name)
                case ['requests', instance] | ['queues', _, instance, 'taker']:
                    if kept is not None and not kept.lease:
                        self._say(revision, 'is on no lease', instance)

    def _once(self, revision: int, instance: str) -> None:
        """It is in one place at a time."""
        computes, queues = self._hosts.get(instance, {}), self._queues.get(instance, {})
        if len(computes) > 1:
            self._say(revision, f'is requested of {len(computes)} computes at once', instance)
        if len(queues) > 1 or (queues and computes):
            self._say(revision, f'waits in {len(queues)} queues, and is requested of {len(computes)}', instance)

    def _named(self, revision: int, instance: str, request: Mapping[str, Any]) -> None:
        name = request.get('name')
        if name and _object(self._etcd.get(f'/names/{name}')).get('instance') != instance:
            self._say(revision, f'is delivered as {name}, which is not its name', instance, str(name))

    def _request(
        self, revision: int, compute: str, instance: str, was: Kept | None, kept: Kept | None, by_eschedule: bool
    ) -> None:
        """The key of a request was written or removed."""
        life, record, request = self._life(instance), self._records.get(instance), _object(kept)
        self._once(revision, instance)
        if kept is None:
            state = record.get('state') if record and record.get('compute') == compute else None
            if state is not None and state not in ENDED:
                self._say(revision, f'its request went while it was {state}', instance)
            if record is None and life.state not in ENDED and _object(was).get('allocations'):
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
        life, earlier = self._life(instance), _object(was)
        if kept is None:
            if earlier.get('state') not in ENDED and not (unasked and life.tombstone):
                self._say(revision, f'its record went while it was {earlier.get("state")}', instance)
            elif earlier.get('state') not in ENDED:
                life.state = 'gone'  # a full etcd takes no record of an end
            return
        record = _object(kept)
        state, compute = str(record.get('state')), str(record.get('compute'))
        if was is not None and state != life.state and state not in AFTERWARDS.get(str(life.state), set()):
            self._say(revision, f'{life.state}, then {state}', instance)
        found = state == 'stopped' and record.get('fault')  # a disk of this name was there before the request
        if was is None and (life.state == 'gone' or not (state in FIRST or found)):
            self._say(revision, f'{life.state or "nothing"}, then {state}', instance)
        if was is not None and str(earlier.get('compute')) != compute:
            self._say(revision, f'moves from compute {earlier.get("compute")} to {compute}', instance)
        if state == 'error' and not _reason(record):
            self._say(revision, 'is in error without a reason', instance)
        if state not in ENDED and compute not in self._hosts.get(instance, {}):
            self._say(revision, f'is {state} on a compute that is not asked for it', instance)
        if life.tombstone and state not in ('destroying', 'gone') and state != life.state:
            self._say(revision, f'is {state} after its destroy was accepted', instance)
        life.failed += state == 'error' and life.state != 'error'
        life.state = state


def _answers(history: History, course: Course) -> Iterator[str]:
    """What was answered is what was done."""
    certain: dict[str, list[Ask]] = {}
    for ask in history.asks:
        for instance, compute in ask.placed.items():
            life = course.lives.get(instance, Life())
            if instance in history.by_hand or life.earlier:
                continue
            if not life.deliveries and not life.queued:
                yield f'{instance}: was never delivered: {ask}'
            elif compute and compute not in {each.compute for each in life.deliveries}:
                yield f'{instance}: was delivered to {life.deliveries}: {ask}'
        for instance in ask.asked if ask.is_create else ():
            certain.setdefault(instance, []).append(ask)
    for instance, life in course.lives.items():
        if instance not in history.by_hand and len(life.deliveries) > 1 + life.failed:
            yield f'{instance}: was delivered {len(life.deliveries)} times: {life.deliveries}'
    new: dict[str, list[Ask]] = {}
    for ask in history.asks:
        for instance in ask.placed:
            if f'{instance} was requested before' not in ask.stderr:
                new.setdefault(instance, []).append(ask)
    for instance, asks in new.items():
        if len(asks) > 1 + course.lives.get(instance, Life()).failed:
            yield f'{instance}: was placed, say {len(asks)}, and none of them that it was there before: {asks[1]}'
    told = {instance for ask in history.asks for instance in ask.placed}
    named = {each for ask in history.asks for each in ask.canaries}
    told |= {instance for instance in course.lives if instance[:8] in named}
    unsure = [ask for ask in history.asks if ask.is_create and ask.code not in CERTAIN]
    untold: dict[int, list[str]] = {}
    for instance, life in course.lives.items():
        revisions = [*(each.revision for each in life.deliveries if each.by_eschedule), *life.queued]
        if instance in told or instance in history.by_hand or not revisions:
            continue
        asks = certain.get(instance, [])
        if asks and all(ask.code in REFUSED for ask in asks):
            yield f'{instance}: was refused and delivered: {asks[0]}'
        elif not asks:
            untold.setdefault(revisions[0], []).append(instance)
    free = [ask for ask in unsure if not ask.asked and not ask.placed]
    if len(untold) > len(free):
        yield f'{len(untold)} deliveries of which nobody was told, and {len(free)} asks without an answer: {untold}'


def _fates(history: History, course: Course) -> Iterator[str]:
    """What was acknowledged has come to one of its ends, or waits for a compute that is away."""
    for ask in history.asks:
        for instance in set(ask.placed) - set(history.by_hand):
            life = course.lives.get(instance, Life())
            if life.state not in ('active', 'stopped', *ENDED) and not course.waits(instance):
                yield f'{instance}: is {life.state or "not begun"} at the end: {ask}'
        destroyed = {*ACCEPTED.findall(ask.stderr), *GONE.findall(ask.stderr)} if 'destroy' in ask.words else ()
        for instance in set(destroyed) - set(history.by_hand):
            life = course.lives.get(instance, Life())
            waits = instance not in GONE.findall(ask.stderr) and course.waits(instance)
            record = course.record(instance)
            if not waits and (record is not None or life.state not in ENDED) and life.state != 'gone':
                yield f'{instance}: is {life.state} at the end: {ask}'


def _left(history: History, etcd: Mapping[str, Kept]) -> Iterator[str]:
    """Who has ended in good order leaves no request key behind."""
    codes: dict[int, set[int | None]] = {}
    for ask in history.asks:
        codes.setdefault(ask.pid, set()).add(ask.code)
    for key, kept in etcd.items():
        pid = _object(kept).get('pid') if key.startswith('/requests/') else None
        if pid in codes and codes[pid] <= CERTAIN and key.split('/')[2] not in history.by_hand:
            yield f'{key}: is left by an eschedule that ended with {codes[pid]}'


def _reason(record: Mapping[str, Any]) -> str:
    error = record.get('error')
    return str(error.get('reason') or '') if isinstance(error, dict) else ''


def _object(kept: Kept | None) -> dict[str, Any]:
    """The JSON object in a key, {} where there is none."""
    try:
        found = json.loads(kept.value) if kept is not None else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
