"""All that waits in the queues, and which of it a compute takes next. Pure."""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import NamedTuple

from ecomp.model import keys
from ecomp.model.allocation import NEEDED
from ecomp.model.explain import Provider, miss
from ecomp.model.flavor import Flavor
from ecomp.model.group import Group
from ecomp.model.query import parse
from ecomp.model.queue import QueueEntry, marked_by, parse_waiting
from ecomp.model.status import DISABLED

LONGEST = 0.2
"""Seconds a full compute waits before it takes a request; one with free room waits the share of them it has used."""
JITTER, EACH, MOST = 0.02, 0.002, 2.0
"""Seconds within which computes of equal load wait at random: EACH for every compute, at least JITTER, at most MOST.

EACH is the time in which etcd tells every compute that one was faster, so of a thousand only a few go for the same."""
WIDEST = 64
"""Requests at the front of a queue among which a compute chooses, at most."""


class Place(NamedTuple):
    """A waiting request, and etcd's revision that put it in the queue."""

    revision: int
    waiting: QueueEntry


class InvalidEntry(NamedTuple):
    """A key that holds no request that can be read, so no compute takes it."""

    revision: int


@dataclass(frozen=True)
class Backlog:
    """The queues at one moment.

    `places` are the requests that wait and that no compute is taking, by key, oldest first; `flavors` are theirs, by
    query. `marks` has what each compute is taking, {key: (the mark's revision, the request, or None if it is gone)}.
    `has_more` says that a place is new since the backlog before. From the other fields the next backlog is made: the
    keys that were read, what they hold, which are marks, and how many places there are of each query.
    """

    places: Mapping[str, Place] = field(default_factory=dict)
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    marks: Mapping[str, Mapping[str, tuple[int, Place | None]]] = field(default_factory=dict)
    has_more: bool = False
    state: Mapping[str, keys.StoredValue] = field(default_factory=dict, repr=False)
    parsed: Mapping[str, Place | InvalidEntry] = field(default_factory=dict, repr=False)
    takers: frozenset[str] = field(default=frozenset(), repr=False)
    counts: Mapping[str, int] = field(default_factory=dict, repr=False)


def backlog_of(state: Mapping[str, keys.StoredValue], before: Backlog) -> Backlog:
    """The backlog in `state`, the keys under /queues/. Only keys that changed since `before` are read.

    10,000 waiting requests are at least 20,000 events, each compute gets them, and each brings all keys.
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
            parsed[key] = Place(revision, waiting) if isinstance(waiting, QueueEntry) else InvalidEntry(revision)
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


def _version(written: keys.StoredValue) -> tuple[int, int]:
    """What tells one value of a key from another; a value that was too long to be kept may be kept later."""
    return written.revision, len(written.value)


def _in_order(places: dict[str, Place], added: int) -> dict[str, Place]:
    """The places by revision. The `added` ones are last, and in order unless a taker gave an older one back."""
    last = list(islice(reversed(places.values()), added + 1))
    if all(later.revision > earlier.revision for later, earlier in pairwise(last)):
        return places
    return dict(sorted(places.items(), key=lambda item: item[1].revision))


def _marks(
    state: Mapping[str, keys.StoredValue], takers: Iterable[str], parsed: Mapping[str, Place | InvalidEntry]
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
    """Whether the provider has room for one instance of the flavor now, by placement's own rules."""
    return DISABLED not in provider.traits and not miss(parse(flavor.query), provider).failures


def subscribed(flavors: Mapping[str, Flavor], provider: Provider, known: Mapping[str, bool]) -> dict[str, bool]:
    """{query: whether the provider may take it now} of the flavors that requests wait for; `known` answers are kept.

    Other flavors are not looked at: there may be tens of thousands.
    """
    return {query: known[query] if query in known else fits(flavor, provider) for query, flavor in flavors.items()}


def next_of(
    places: Iterable[Place], takes: Mapping[str, bool], passed_over: Container[str], among: int, rng: random.Random
) -> Place | None:
    """A place chosen at random from the first `among` that `takes` allows; None if there is none.

    Instances in `passed_over` are left out.
    """
    fit = (
        each for each in places if takes.get(each.waiting.flavor.query) and each.waiting.instance not in passed_over
    )
    first = list(islice(fit, among))
    return rng.choice(first) if first else None


def widened(among: int, won: bool) -> int:
    """The next `among` of next_of(): half of it after this compute `won` a place, twice as many after another did."""
    return max(among // 2, 1) if won else min(among * 2, WIDEST)


def patience(provider: Provider, group: Group | None, computes: int, rng: random.Random) -> float:
    """Seconds this compute waits before it takes a request, so that computes with more room take it first.

    It waits longer the more of its scarcest class is used, and LONGEST more where a soft `group` prefers others. Equal
    ones differ by chance, by more the more `computes` there are: an idle one draws from all of that time, a full one
    from its end.
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
