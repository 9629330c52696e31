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
from typing import NamedTuple

from tests.kit.course import Course, Life, object_of
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
    """Who has ended in good order leaves no attempt's key behind."""
    codes: dict[int, set[int | None]] = {}
    for ask in history.asks:
        codes.setdefault(ask.pid, set()).add(ask.code)
    for key, kept in etcd.items():
        pid = object_of(kept).get('pid') if key.startswith('/requests/') else None
        if pid in codes and codes[pid] <= CERTAIN and key.split('/')[2] not in history.by_hand:
            yield f'{key}: is left by an eschedule that ended with {codes[pid]}'
