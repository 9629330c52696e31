"""What waits in the queues, and which of it a compute takes next. Pure.

All computes that take from queues are put in an order that is another one for each request (rendezvous hashing: each
reckons it for itself, and one that comes or goes moves no others). The first few may take it at once, twice as many a
moment later, and so on until it is all of them: nothing waits for long for those that are dead, full or mistaken. It
is a hint and no lock: two that see different computes alive may both go for a request, and one mark of theirs holds.
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

    JSON: version, instance, flavor, and the fields of an order (ecomp.model.order), of which query is the flavor's as
    it was then: that is what is claimed, whatever becomes of the flavor. It is never written again: its revision is its
    place in the queue. Below it, at …/taker, is the mark of the compute that is taking it: {"version", "compute"}.
    """

    flavor: Flavor

    def __post_init__(self) -> None:
        """What it asks for is what its flavor asks for."""
        object.__setattr__(self, 'query', self.flavor.query)

    @property
    def key(self) -> str:
        """Where it waits."""
        return keys.queue(self.flavor.name, self.instance)

    @property
    def resources(self) -> Resources:
        """What it will have."""
        return self.flavor.resources

    def request(self, compute: str, now: str) -> Request:
        """What the compute that took it is asked for."""
        stages = {**self.stages, 'scheduled': now}
        allocations = {compute: dict(self.flavor.resources)}
        return Request(allocations=allocations, why=Why(QUEUE, None, 1), **self.parts(stages=stages))


def to_json(waiting: QueueEntry) -> str:
    """The value of the request's key."""
    place = {'instance': waiting.instance, 'flavor': waiting.flavor.name, 'query': waiting.flavor.query}
    return dump({'version': VERSION, **place, **dump_fields(waiting)})


def parse_waiting(key: str, value: bytes) -> QueueEntry | Invalid:
    """The request at a key in the queues, or the reason it is none: then nobody takes it."""
    try:
        return _parse(key, value)
    except ValueError as error:
        return Invalid(keys.last(key), printable(str(error))[:REASON_LIMIT], _shares(value))
    except RecursionError:  # a reason quotes what is wrong
        return Invalid(keys.last(key), 'the request is nested too deeply')


def _shares(value: bytes) -> Shares:
    """What one that is refused was queued with: whoever queued it has counted it, whatever became of it since."""
    found, data = shares_in(value)
    with suppress(ValueError, RecursionError):  # a reason quotes what is wrong
        resources = parse_flavor('x', _needed(data, 'query')).resources
        return found._replace(project_id=_needed(data, 'project_id'), resources=resources)
    return found


def _parse(key: str, value: bytes) -> QueueEntry:
    place = keys.queued(key)
    if place is None or not keys.is_uuid(place[1]):
        raise ValueError(f'{key[:200]!r} is not {keys.QUEUES}<flavor>/<uuid>')
    check_request_size(value)
    data = load_object(value)
    version = data.get('version')
    if not is_version(version, VERSION):
        raise ValueError(f'version {version!r} of a waiting request is not known here: {VERSION} is')
    told = data.get('flavor'), data.get('instance')
    if told != place:
        raise ValueError(f'its key says {"/".join(place)}, and it says {told[0]!r} and {told[1]!r}')
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
    if not is_text(text):  # placement fails over it each time, and all that waits would wait for that
        raise ValueError(f'{name}: {text[:40]!r} is no text')
    return text


def record_of(key: str, value: bytes) -> Record:
    """What there is to show of a request that waits: no compute has a record of it."""
    waiting = parse_waiting(key, value)
    if isinstance(waiting, Invalid):
        refused = refused_record('', waiting, '')
        return replace(refused, state=QUEUED, stages={}, fault=f'nobody takes it: {waiting.reason}')
    return Record(compute='', state=QUEUED, resources=waiting.resources, **recorded(waiting))


def mark_to_json(compute: str) -> str:
    """The value of a taker's key."""
    return dump({'version': VERSION, 'compute': compute})


def marked_by(value: bytes) -> str | None:
    """The compute that a taker's key is of; None if it makes no sense."""
    compute = load_if_object(value).get('compute')
    return compute if isinstance(compute, str) else None


FIRST = 4
"""Computes that may take a request as soon as they hear of it."""
WIDER = 0.25
"""Seconds after which twice as many may: of a thousand the last after 2 s, of ten thousand after 3."""
ODD, WORD = 0x9E3779B97F4A7C15, 2**64 - 1
"""A multiplier that mixes, and all bits of a score."""


@dataclass(frozen=True)
class Takers:
    """The living computes that take from queues: the point of each, and what it hinted that it has left, if it did.

    `said`: the values that this was made from, by key. How many have room is reckoned once for each amount, for each
    compute of a process asks for that whenever it chooses something.
    """

    points: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, host.Hint] = field(default_factory=dict)
    said: Mapping[str, keys.StoredValue] = field(default_factory=dict, repr=False)
    _with_room: dict[tuple[tuple[str, int], ...], int] = field(default_factory=dict, repr=False, compare=False)

    def with_room(self, resources: Resources) -> int:
        """How many have room for so much, or hinted nothing."""
        asked = tuple(sorted(resources.items()))
        if asked not in self._with_room:
            full = sum(not host.fits(each, resources) for each in self.left.values())
            self._with_room[asked] = len(self.points) - full
        return self._with_room[asked]

    def has_room(self, compute: str, resources: Resources) -> bool:
        """Whether it hinted that it has so much left; True where it hinted nothing."""
        hint = self.left.get(compute)
        return hint is None or host.fits(hint, resources)


def takers_of(state: Mapping[str, keys.StoredValue], before: Takers) -> Takers:
    """The takers in what is below /computes/. Only values that changed since `before` are read."""
    points, left = dict(before.points), dict(before.left)
    gone = before.said.keys() - state.keys()
    touched = [key for key, each in state.items() if before.said.get(key) is not each]
    for key in (*gone, *touched):
        points.pop(keys.last(key), None)
        left.pop(keys.last(key), None)
    for key in touched:
        compute, said = keys.last(key), load_if_object(state[key].value)
        if said.get('queues') is True and state[key].lease:
            points[compute] = before.points.get(compute) or point(compute)
            hinted = host.parse_room_hint(said.get('room'))
            if hinted is not None:
                left[compute] = hinted
    return Takers(points, left, dict(state))


def order(instance: str, resources: Resources, takers: Takers) -> dict[str, int]:
    """{compute: its place in the order in which they may take this request}, from 0; those without room are last."""
    at, full = point(instance), set[str]()
    if takers.left:
        full = {compute for compute in takers.left if not takers.has_room(compute, resources)}
    scored = sorted((compute in full, ((at ^ each) * ODD & WORD), compute) for compute, each in takers.points.items())
    return {compute: number for number, (*_, compute) in enumerate(scored)}


def opens_after(number: int) -> float:
    """Seconds after a request was heard of from which the compute with this place in the order may take it."""
    return WIDER * (number // FIRST).bit_length()


def takers_allowed(seconds: float, takers: int) -> int:
    """How many of so many takers may take a request that was heard of so many seconds ago."""
    widened = min(int(seconds / WIDER + 1e-6), 64)
    return max(min(FIRST << widened, takers), 1)


def point(name: str) -> int:
    """Where a uuid lies: 64 bits."""
    import hashlib  # not for eschedule: slow to load

    return int.from_bytes(hashlib.blake2b(name.encode(errors='surrogatepass'), digest_size=8).digest())


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
        if (old := known.get(key)) is not entry and (old is None or keys.version(old) != keys.version(entry))
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
    fit = (each for each in places if takes.get(each.waiting.flavor.query) and each.waiting.instance not in passed_over)
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
