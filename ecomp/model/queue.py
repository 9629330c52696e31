"""The queues: what waits, and which compute takes which request next. Pure.

Each request has its own order of the living computes that take from queues, by rendezvous hashing: every compute
calculates it locally, and one that starts or stops does not change the order of the others. The first few may take the
request immediately, twice as many after WIDEN_SECONDS, and so on, so none waits long for dead, full or mistaken
computes. The order is a hint, not a lock: two that see different presences may compete, and one taker key wins.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

from ecomp.model import host, keys
from ecomp.model.allocation import NEEDED, Resources, missing
from ecomp.model.choose import QUEUE, Why
from ecomp.model.explain import Provider, miss
from ecomp.model.flavor import Flavor, parse_flavor
from ecomp.model.group import Group
from ecomp.model.image import check_image
from ecomp.model.json_object import dump, is_text, is_version, load_if_object, load_object
from ecomp.model.order import (
    REASON_LIMIT,
    Invalid,
    Order,
    Request,
    Shares,
    check_request_size,
    dump_fields,
    parse_fields,
    shares_in,
    text_field,
)
from ecomp.model.query import parse
from ecomp.model.record import QUEUED, Record, recorded, refused_record
from ecomp.model.status import DISABLED
from ecomp.model.text import printable

VERSION = 1


@dataclass(frozen=True)
class QueueEntry(Order):
    """An order that waits for a compute: the value of /queues/<flavor>/<instance>.

    JSON: version, instance, flavor, and the fields of an order (ecomp.model.order). Its query is the flavor's at the
    time, and is what will be claimed even if the flavor changes. The value is never written again, so its revision is
    its position in the queue. The taker key below it has {"version", "compute"}.
    """

    flavor: Flavor

    def __post_init__(self) -> None:
        object.__setattr__(self, 'query', self.flavor.query)

    @property
    def key(self) -> str:
        return keys.queue(self.flavor.name, self.instance)

    @property
    def resources(self) -> Resources:
        return self.flavor.resources

    def request(self, compute: str, now: str) -> Request:
        """Return the request for the compute that took it; `now` is an ISO time."""
        stages = {**self.stages, 'scheduled': now}
        allocations = {compute: dict(self.flavor.resources)}
        return Request(allocations=allocations, why=Why(QUEUE, None, 1), **self.parts(stages=stages))


def to_json(waiting: QueueEntry) -> str:
    """Return the value of the queued request's key."""
    own_fields = {'instance': waiting.instance, 'flavor': waiting.flavor.name, 'query': waiting.flavor.query}
    return dump({'version': VERSION, **own_fields, **dump_fields(waiting)})


def parse_waiting(key: str, value: bytes) -> QueueEntry | Invalid:
    """Parse a queued request; if malformed, return the reason, and no compute takes it."""
    try:
        return _parse(key, value)
    except ValueError as error:
        return Invalid(keys.last(key), printable(str(error))[:REASON_LIMIT], _shares(value))
    except RecursionError:  # from repr() in a reason, which quotes the value
        return Invalid(keys.last(key), 'the request is nested too deeply')


def _shares(value: bytes) -> Shares:
    """Parse what a malformed queued request holds; its quota was charged when it was queued."""
    holdings, data = shares_in(value)
    with suppress(ValueError, RecursionError):  # RecursionError: from repr() in a reason
        resources = parse_flavor('x', _needed(data, 'query')).resources
        return holdings._replace(project_id=_needed(data, 'project_id'), resources=resources)
    return holdings


def _parse(key: str, value: bytes) -> QueueEntry:
    place = keys.queued(key)
    if place is None or not keys.is_uuid(place[1]):
        raise ValueError(f'{key[:200]!r} is not {keys.QUEUES}<flavor>/<uuid>')
    check_request_size(value)
    data = load_object(value)
    version = data.get('version')
    if not is_version(version, VERSION):
        raise ValueError(f'version {version!r} of a waiting request is not known here: {VERSION} is')
    named_place = data.get('flavor'), data.get('instance')
    if named_place != place:
        raise ValueError(f'its key says {"/".join(place)}, and it says {named_place[0]!r} and {named_place[1]!r}')
    flavor = parse_flavor(place[0], _needed(data, 'query'))
    lacking = missing(flavor.resources)
    if lacking:
        raise ValueError(f'its flavor has no {", ".join(lacking)}: a guest needs all of them')
    check_image(_needed(data, 'image'))
    for name in ('user_id', 'project_id'):
        _needed(data, name)
    return QueueEntry(place[1], flavor, **parse_fields(data))


def _needed(data: Mapping[str, Any], name: str) -> str:
    text = text_field(data, name)
    if not text:
        raise ValueError(f'the request lacks {name}')
    if not is_text(text):  # placement would fail on it each time, and delay the other requests
        raise ValueError(f'{name}: {text[:40]!r} is no text')
    return text


def record_of(key: str, value: bytes) -> Record:
    """Return a record to show for a queued request, which no compute has recorded."""
    entry = parse_waiting(key, value)
    if isinstance(entry, Invalid):
        refused = refused_record('', entry, '')
        return replace(refused, state=QUEUED, stages={}, fault=f'nobody takes it: {entry.reason}')
    return Record(compute='', state=QUEUED, resources=entry.resources, **recorded(entry))


def mark_to_json(compute: str) -> str:
    """Return the value of a taker key."""
    return dump({'version': VERSION, 'compute': compute})


def marked_by(value: bytes) -> str | None:
    """Return the compute in the value of a taker key; None if malformed."""
    compute = load_if_object(value).get('compute')
    return compute if isinstance(compute, str) else None


FIRST = 4
# Seconds until twice as many may take it: the last of a thousand after 2 s, of ten thousand after 3 s.
WIDER = 0.25
# A multiplier that mixes the bits of a score, and the mask of its 64 bits.
ODD = 0x9E3779B97F4A7C15
WORD = 2**64 - 1


@dataclass(frozen=True)
class Takers:
    """The living computes that take from queues: the hash of each, and its hint if it has one.

    `values` are the presences this was made from, by key. The number of computes with room is cached for each amount,
    because every compute of a process needs it for each choice.
    """

    points: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, host.Hint] = field(default_factory=dict)
    said: Mapping[str, keys.StoredValue] = field(default_factory=dict, repr=False)
    _with_room: dict[tuple[tuple[str, int], ...], int] = field(default_factory=dict, repr=False, compare=False)

    def with_room(self, resources: Resources) -> int:
        """Return how many takers have room for the resources, or have no hint."""
        amounts = tuple(sorted(resources.items()))
        if amounts not in self._with_room:
            full_count = sum(not host.fits(hint, resources) for hint in self.left.values())
            self._with_room[amounts] = len(self.points) - full_count
        return self._with_room[amounts]

    def has_room(self, compute: str, resources: Resources) -> bool:
        """Return whether a compute has room by its hint; True without a hint."""
        hint = self.left.get(compute)
        return hint is None or host.fits(hint, resources)


def takers_of(state: Mapping[str, keys.StoredValue], before: Takers) -> Takers:
    """Return the takers below /computes/; only values that changed since `previous` are parsed."""
    points, hints = dict(before.points), dict(before.left)
    removed = before.said.keys() - state.keys()
    changed = [key for key, stored in state.items() if before.said.get(key) is not stored]
    for key in (*removed, *changed):
        points.pop(keys.last(key), None)
        hints.pop(keys.last(key), None)
    for key in changed:
        compute, data = keys.last(key), load_if_object(state[key].value)
        if data.get('queues') is True and state[key].lease:
            points[compute] = before.points.get(compute) or point(compute)
            hint = host.parse_room_hint(data.get('room'))
            if hint is not None:
                hints[compute] = hint
    return Takers(points, hints, dict(state))


def order(instance: str, resources: Resources, takers: Takers) -> dict[str, int]:
    """Return {compute: its rank, from 0, among the takers of this request}; full ones are last."""
    uuid_hash, full = point(instance), set[str]()
    if takers.left:
        full = {compute for compute in takers.left if not takers.has_room(compute, resources)}
    scored = sorted(
        (compute in full, ((uuid_hash ^ other) * ODD & WORD), compute) for compute, other in takers.points.items()
    )
    return {compute: rank for rank, (*_, compute) in enumerate(scored)}


def opens_after(number: int) -> float:
    """Return the seconds after which the compute of this rank may take a request it has seen."""
    return WIDER * (number // FIRST).bit_length()


def takers_allowed(seconds: float, takers: int) -> int:
    """Return how many takers may take a request that was first seen so many seconds ago."""
    doublings = min(int(seconds / WIDER + 1e-6), 64)
    return max(min(FIRST << doublings, takers), 1)


def point(name: str) -> int:
    """Return a 64-bit hash of a uuid."""
    import hashlib  # imported here because it is slow to load, and eschedule does not need it

    return int.from_bytes(hashlib.blake2b(name.encode(errors='surrogatepass'), digest_size=8).digest())


# Seconds that a full compute waits before it takes a request; another waits the share of this that it has used.
LONGEST = 0.2
# Computes of equal load wait at random within JITTER_PER_COMPUTE_SECONDS times their number, but not less than
# MIN_JITTER_SECONDS and not more than MAX_JITTER_SECONDS. etcd needs so long to notify every compute that another was
# faster, so of a thousand only a few compete for a request.
JITTER = 0.02
EACH = 0.002
MOST = 2.0
# Requests at the front of a queue among which a compute chooses, at most.
WIDEST = 64


class Place(NamedTuple):
    """A queued request, and the etcd revision of its creation."""

    revision: int
    waiting: QueueEntry


class InvalidEntry(NamedTuple):
    """A key in the queues with a malformed request; no compute takes it."""

    revision: int


@dataclass(frozen=True)
class Backlog:
    """The queues at one revision.

    `entries` are the requests that wait and are not being taken, by key, oldest first; `flavors` are theirs, by query.
    `taken` has what each compute takes: {key: (revision of the taker key, request or None if it is gone or malformed)}.
    `has_new`: an entry was added since the previous backlog. The other fields serve to make the next one.
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
    """Return the backlog in `state`, the keys below /queues/.

    Only keys that changed since `previous` are parsed: 10,000 queued requests cause 20,000 events or more on each
    compute, and each event brings all keys.
    """
    old_state = before.state
    changed = [
        key
        for key, entry in state.items()
        if (old := old_state.get(key)) is not entry and (old is None or keys.version(old) != keys.version(entry))
    ]
    added_count = sum(key not in old_state for key in changed)
    removed = old_state.keys() - state.keys() if len(state) < len(old_state) + added_count else set()
    parsed, takers = dict(before.parsed), set(before.takers - removed)
    for key in removed:
        parsed.pop(key, None)
    for key in changed:
        if keys.queued(key) is not None:
            waiting = parse_waiting(key, state[key].value)
            revision = state[key].revision
            parsed[key] = Place(revision, waiting) if isinstance(waiting, QueueEntry) else InvalidEntry(revision)
        elif key.endswith(keys.TAKER):
            takers.add(key)
    places, flavors, counts = dict(before.places), dict(before.flavors), dict(before.counts)
    added = []
    for key in {each.removesuffix(keys.TAKER) for each in (*changed, *removed)}:
        old_place, value = places.get(key), parsed.get(key)
        new_place = value if isinstance(value, Place) and keys.taker(key) not in takers else None
        if old_place is new_place:
            continue
        if old_place is not None:
            query = places.pop(key).waiting.flavor.query
            counts[query] -= 1
            if not counts[query]:
                del counts[query], flavors[query]
        if new_place is not None:
            added.append(new_place)
    for place in sorted(added, key=lambda each: each.revision):
        flavor = place.waiting.flavor
        places[place.waiting.key], flavors[flavor.query] = place, flavor
        counts[flavor.query] = counts.get(flavor.query, 0) + 1
    marks, has_more = _marks(state, takers, parsed), bool(added)
    return Backlog(_in_order(places, len(added)), flavors, marks, has_more, state, parsed, frozenset(takers), counts)


def _in_order(places: dict[str, Place], added: int) -> dict[str, Place]:
    """Return entries by revision: the `added` ones are last, but a released one may be older."""
    tail = list(islice(reversed(places.values()), added + 1))
    if all(later.revision > earlier.revision for later, earlier in pairwise(tail)):
        return places
    return dict(sorted(places.items(), key=lambda item: item[1].revision))


def _marks(
    state: Mapping[str, keys.StoredValue], takers: Iterable[str], parsed: Mapping[str, Place | InvalidEntry]
) -> dict[str, dict[str, tuple[int, Place | None]]]:
    marks: dict[str, dict[str, tuple[int, Place | None]]] = {}
    for key in takers:
        queue_key = key.removesuffix(keys.TAKER)
        entry, compute = parsed.get(queue_key), marked_by(state[key].value)
        if compute is not None:
            place = entry if isinstance(entry, Place) else None
            marks.setdefault(compute, {})[queue_key] = state[key].revision, place
    return marks


def fits(flavor: Flavor, provider: Provider) -> bool:
    """Return whether the provider has room for one instance of a flavor, by placement's rules."""
    return DISABLED not in provider.traits and not miss(parse(flavor.query), provider).failures


def subscribed(flavors: Mapping[str, Flavor], provider: Provider, known: Mapping[str, bool]) -> dict[str, bool]:
    """Return {query: whether the provider can take it} of the flavors that requests wait for.

    Answers in `known_answers` are kept. Other flavors are not checked: there may be tens of thousands.
    """
    return {query: known[query] if query in known else fits(flavor, provider) for query, flavor in flavors.items()}


def next_of(
    places: Iterable[Place], takes: Mapping[str, bool], passed_over: Container[str], among: int, rng: random.Random
) -> Place | None:
    """Return a random one of the first `limit` entries that are allowed, or None."""
    eligible = (
        place for place in places if takes.get(place.waiting.flavor.query) and place.waiting.instance not in passed_over
    )
    first = list(islice(eligible, among))
    return rng.choice(first) if first else None


def widened(among: int, won: bool) -> int:
    """Return the next `limit` of choose_next(): half after winning an entry, otherwise twice."""
    return max(among // 2, 1) if won else min(among * 2, WIDEST)


def patience(provider: Provider, group: Group | None, computes: int, rng: random.Random) -> float:
    """Return the seconds that this compute waits, so that computes with more room take first.

    It grows with the used share of the scarcest class, by up to MAX_LOAD_DELAY_SECONDS, and by as much again if a soft
    `group` prefers other computes. The random part grows with the number of computes: an idle one draws from all of it,
    a full one from its end.
    """
    shares = [
        inventory.used / inventory.capacity if inventory.capacity > 0 else 1.0
        for name, inventory in provider.inventories.items()
        if name in NEEDED
    ]
    used_share = min(max(shares, default=1.0), 1.0)
    is_preferred = group is None or group.preference(provider.uuid) >= max([0, *map(group.preference, group.on)])
    group_delay = 0.0 if is_preferred else LONGEST
    return group_delay + LONGEST * used_share + min(max(EACH * computes, JITTER), MOST) * rng.uniform(used_share, 1.0)
