"""All that waits in the queues, and which of it a compute takes next. Pure."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple, Protocol

from ecomp.model import keys
from ecomp.model.allocation import NEEDED
from ecomp.model.explain import Provider, miss
from ecomp.model.flavor import Flavor
from ecomp.model.group import Group
from ecomp.model.query import parse
from ecomp.model.queue import Waiting, marked_by, parse_waiting
from ecomp.model.status import DISABLED

LONGEST = 0.2
"""Seconds a full compute waits before it takes anything."""
JITTER, EACH, MOST = 0.02, 0.002, 2.0
"""Seconds by which equal ones differ: so many, more if that is less than EACH for each compute there is, up to MOST.

EACH is the time in which etcd tells all of them that one was faster: so of a thousand only a few are after the same."""
WIDEST = 64
"""How far from the front of its queue a request may be, at most, that is taken."""


class Written(Protocol):
    """A key's value, and the revision that wrote it."""

    @property
    def value(self) -> bytes: ...
    @property
    def revision(self) -> int: ...


class Place(NamedTuple):
    """A waiting request, and the revision that put it in the queue."""

    revision: int
    waiting: Waiting


class Nonsense(NamedTuple):
    """What nobody can understand, and so nobody takes."""

    revision: int


@dataclass(frozen=True)
class Backlog:
    """The queues at one moment.

    `places`: what waits and nobody takes, by its key, oldest first; `flavors`: theirs, by their queries; `marks`: by
    compute what it has marked, {key: (the mark's revision, what is marked or None)}; `has_more`: something is among
    the places that was not before. The rest is what the next one is made from: what was read, which keys are marks, and
    how many places there are of each query.
    """

    places: Mapping[str, Place] = field(default_factory=dict)
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    marks: Mapping[str, Mapping[str, tuple[int, Place | None]]] = field(default_factory=dict)
    has_more: bool = False
    state: Mapping[str, Written] = field(default_factory=dict, repr=False)
    parsed: Mapping[str, Place | Nonsense] = field(default_factory=dict, repr=False)
    takers: frozenset[str] = field(default=frozenset(), repr=False)
    counts: Mapping[str, int] = field(default_factory=dict, repr=False)


def backlog_of(state: Mapping[str, Written], before: Backlog) -> Backlog:
    """What the keys under /queues/ say. Each event brings all of them: only what was not so `before` is looked at.

    10,000 that wait are 20,000 events at least, and each compute hears them.
    """
    known = before.state
    touched = [
        key
        for key, entry in state.items()
        if (old := known.get(key)) is not entry and (old is None or _version(old) != _version(entry))
    ]
    new = sum(key not in known for key in touched)
    gone = known.keys() - state.keys() if len(state) < len(known) + new else set()
    parsed, takers = dict(before.parsed), set(before.takers - gone)
    for key in gone:
        parsed.pop(key, None)
    for key in touched:
        if keys.queued(key) is not None:
            waiting = parse_waiting(key, state[key].value)
            revision = state[key].revision
            parsed[key] = Place(revision, waiting) if isinstance(waiting, Waiting) else Nonsense(revision)
        elif key.endswith(keys.TAKER):
            takers.add(key)
    places, flavors, counts = dict(before.places), dict(before.flavors), dict(before.counts)
    added = []
    for key in {each.removesuffix(keys.TAKER) for each in (*touched, *gone)}:
        was, said = places.get(key), parsed.get(key)
        now = said if isinstance(said, Place) and keys.taker(key) not in takers else None
        if was is now:
            continue
        if was is not None:
            query = places.pop(key).waiting.flavor.query
            counts[query] -= 1
            if not counts[query]:
                del counts[query], flavors[query]
        if now is not None:
            added.append(now)
    for place in sorted(added, key=lambda each: each.revision):
        flavor = place.waiting.flavor
        places[place.waiting.key], flavors[flavor.query] = place, flavor
        counts[flavor.query] = counts.get(flavor.query, 0) + 1
    marks, has_more = _marks(state, takers, parsed), bool(added)
    return Backlog(_in_order(places, len(added)), flavors, marks, has_more, state, parsed, frozenset(takers), counts)


def _version(written: Written) -> tuple[int, int]:
    """What tells it from another one: a value that was too much to be kept may be kept later."""
    return written.revision, len(written.value)


def _in_order(places: dict[str, Place], added: int) -> dict[str, Place]:
    """By revision. What was `added` is last, and mostly youngest; what was given back is older."""
    last = list(islice(reversed(places.values()), added + 1))
    if all(later.revision > earlier.revision for later, earlier in pairwise(last)):
        return places
    return dict(sorted(places.items(), key=lambda item: item[1].revision))


def _marks(
    state: Mapping[str, Written], takers: Iterable[str], parsed: Mapping[str, Place | Nonsense]
) -> dict[str, dict[str, tuple[int, Place | None]]]:
    marks: dict[str, dict[str, tuple[int, Place | None]]] = {}
    for key in takers:
        queue_key = key.removesuffix(keys.TAKER)
        marked, compute = parsed.get(queue_key), marked_by(state[key].value)
        if compute is not None:
            place = marked if isinstance(marked, Place) else None
            marks.setdefault(compute, {})[queue_key] = state[key].revision, place
    return marks


def fits(flavor: Flavor, provider: Provider) -> bool:
    """Whether the provider may take one of it now, by placement's own rules."""
    return DISABLED not in provider.traits and not miss(parse(flavor.query), provider).failures


def subscribed(flavors: Mapping[str, Flavor], provider: Provider, known: Mapping[str, bool]) -> dict[str, bool]:
    """Of each query that somebody waits with, whether the provider may take it now; as `known` where that is there.

    A flavor nobody waits for is not looked at: there may be tens of thousands.
    """
    return {query: known[query] if query in known else fits(flavor, provider) for query, flavor in flavors.items()}


def next_of(
    places: Iterable[Place], takes: Mapping[str, bool], passed_over: Container[str], among: int, rng: random.Random
) -> Place | None:
    """Any of the first `among` (1: the first) that may be taken, of those that are not `passed_over` (instances)."""
    fit = (
        each for each in places if takes.get(each.waiting.flavor.query) and each.waiting.instance not in passed_over
    )
    first = list(islice(fit, among))
    return rng.choice(first) if first else None


def widened(among: int, won: bool) -> int:
    """Among how many of the first to choose after going for one: twice as many if somebody was faster, else half."""
    return max(among // 2, 1) if won else min(among * 2, WIDEST)


def patience(provider: Provider, group: Group | None, computes: int, rng: random.Random) -> float:
    """Seconds a compute lets the others go first: the more, the more of its scarcest class is used.

    Of a soft `group` those that it prefers go first whatever they have. The more `computes` there are the more they
    differ: of many idle ones the first waits no longer for that; loaded ones do, up to MOST: idler ones may be near.
    """
    shares = [
        each.used / each.capacity if each.capacity > 0 else 1.0
        for name, each in provider.inventories.items()
        if name in NEEDED
    ]
    share = min(max(shares, default=1.0), 1.0)
    preferred = group is None or group.preference(provider.uuid) >= max([0, *map(group.preference, group.on)])
    later = 0.0 if preferred else LONGEST
    return later + LONGEST * share + min(max(EACH * computes, JITTER), MOST) * rng.uniform(share, 1.0)
