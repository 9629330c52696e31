"""The queues: what waits, and which compute takes which request next. Pure.

Each request has its own order of the computes that take from queues, by rendezvous hashing: every compute calculates it
locally, and one that starts or stops does not change the order of the others. The first few may take the request
immediately, twice as many after WIDEN_SECONDS, and so on, so none waits long for dead, full or mistaken computes. The
order is a hint, not a lock: two that see different presences may compete, and one taker key wins.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import NamedTuple

from ecomp.model import keys
from ecomp.model.allocation import REQUIRED_CLASSES, Resources, list_missing_classes
from ecomp.model.choose import FROM_QUEUE, PlacementReason
from ecomp.model.explain import Provider, find_miss
from ecomp.model.flavor import Flavor, parse_flavor
from ecomp.model.group import Group
from ecomp.model.image import check_image
from ecomp.model.json_object import load_object, load_object_or_empty
from ecomp.model.order import ORDER_FIELDS, Holdings, InvalidRequest, Order, Request, check_request_size, parse_holdings
from ecomp.model.parsers import NONEMPTY, TEXT, UUID, format_reason, parse_part, text
from ecomp.model.query import parse_query
from ecomp.model.record import QUEUED, Record, extract_recorded_fields, make_refused_record
from ecomp.model.status import DISABLED
from ecomp.model.stored import Field, check_version, decode_lenient, lenient, parse_fields, require_same, stored

_FIELDS = dict.fromkeys(('instance', 'flavor', 'query'), Field(UUID)) | ORDER_FIELDS
_FIELDS |= dict.fromkeys(('user_id', 'project_id', 'query'), Field(NONEMPTY))
_FIELDS['image'] = Field(text(check_image))
_FIELDS['flavor'] = Field(lambda flavor: flavor, write=lambda flavor: flavor.name)


@stored(1, 'queued request', **_FIELDS)
@dataclass(frozen=True)
class QueueEntry(Order):
    """An order that waits for a compute: the value of /queues/<flavor>/<instance>.

    Its query is the flavor's at the time of the request; a later change of the flavor does not change it. If the flavor
    is removed, no compute takes the request. The value is never written again, so its revision is its position in the
    queue.
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

    def make_request(self, compute: str, now: str) -> Request:
        """Return the request for the compute that took it, with the stage `scheduled` at `now` (ISO)."""
        stages = {**self.stages, 'scheduled': now}
        allocations = {compute: dict(self.flavor.resources)}
        return Request(
            allocations=allocations, why=PlacementReason(FROM_QUEUE, None, 1), **self.copy_fields(stages=stages)
        )


def parse_queue_entry(key: str, value: bytes) -> QueueEntry | InvalidRequest:
    """Parse a queued request; if malformed, return the reason and what it holds, and no compute takes it."""
    try:
        return _parse_entry(key, value)
    except ValueError as error:
        return InvalidRequest(keys.get_last_part(key), format_reason(error), _parse_queue_holdings(value))


def _parse_queue_holdings(value: bytes) -> Holdings:
    """Parse what a malformed queued request holds; its quota charge only if project and query can be parsed."""
    holdings, data = parse_holdings(value)
    with suppress(ValueError):
        resources = parse_flavor('x', NONEMPTY(data.get('query'))).resources
        return holdings._replace(project_id=NONEMPTY(data.get('project_id')), resources=resources)
    return holdings


def _parse_entry(key: str, value: bytes) -> QueueEntry:
    """Parse a queued request; ValueError with the reason if it is malformed."""
    place = keys.parse_queue_key(key)
    if place is None or not keys.is_uuid(place[1]):
        raise ValueError(f'its key {key[:200]!r} must have the form {keys.QUEUES}<flavor>/<uuid>')
    check_request_size(value)
    data = load_object(value)
    check_version(data, 1, 'queued request')
    require_same('flavor', data.get('flavor'), place[0])
    require_same('instance', data.get('instance'), place[1])
    entry = parse_fields(
        QueueEntry, data, flavor=parse_flavor(place[0], parse_part('query', NONEMPTY, data.get('query')))
    )
    if lacking := list_missing_classes(entry.resources):
        raise ValueError(f'its flavor lacks {", ".join(lacking)}, which every guest needs')
    return entry


def make_queued_record(key: str, value: bytes) -> Record:
    """Return a record, of compute '', to show for a queued request; a malformed one has the reason as its fault."""
    entry = parse_queue_entry(key, value)
    if isinstance(entry, InvalidRequest):
        refused = make_refused_record('', entry, '')
        return replace(refused, state=QUEUED, stages={}, fault=f'no compute takes it: {entry.reason}')
    return Record(compute='', state=QUEUED, resources=entry.resources, **extract_recorded_fields(entry))


@stored(1, 'taker', compute=lenient(TEXT))
class QueueTaker(NamedTuple):
    """The value of a taker key: the compute, any text, or None if it is malformed."""

    compute: str | None = None


INITIAL_TAKERS = 4
# Seconds until twice as many may take it: the last of a thousand after 2 s, of ten thousand after 3 s.
WIDEN_SECONDS = 0.25
# A multiplier that mixes the bits of a score, and the mask of its 64 bits.
HASH_MULTIPLIER = 0x9E3779B97F4A7C15
HASH_MASK = 2**64 - 1


@dataclass(frozen=True)
class Takers:
    """The living computes that take from queues: the hash of each, and all presences by key.

    The number with room is cached for each amount, because every compute of a process needs it for each choice.
    """

    hashes: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, keys.StoredValue] = field(default_factory=dict, repr=False)
    _room_counts: dict[tuple[tuple[str, int], ...], int] = field(default_factory=dict, repr=False, compare=False)

    def count_with_room(self, resources: Resources) -> int:
        """Return how many takers there are."""
        amounts = tuple(sorted(resources.items()))
        if amounts not in self._room_counts:
            self._room_counts[amounts] = len(self.hashes)
        return self._room_counts[amounts]


def update_takers(state: Mapping[str, keys.StoredValue], previous: Takers) -> Takers:
    """Return the takers below /computes/ (on a lease, `queues` true); only values that changed are parsed."""
    points = dict(previous.hashes)
    removed = previous.values.keys() - state.keys()
    changed = [key for key, stored in state.items() if previous.values.get(key) is not stored]
    for key in (*removed, *changed):
        points.pop(keys.get_last_part(key), None)
    for key in changed:
        compute, data = keys.get_last_part(key), load_object_or_empty(state[key].value)
        if data.get('queues') is True and state[key].lease:
            points[compute] = previous.hashes.get(compute) or hash_uuid(compute)
    return Takers(points, dict(state))


def rank_takers(instance: str, takers: Takers) -> dict[str, int]:
    """Return {compute: its rank, from 0, among the takers of this request}."""
    uuid_hash = hash_uuid(instance)
    scored = sorted(
        (((uuid_hash ^ other) * HASH_MULTIPLIER & HASH_MASK), compute) for compute, other in takers.hashes.items()
    )
    return {compute: rank for rank, (*_, compute) in enumerate(scored)}


def get_opening_seconds(rank: int) -> float:
    """Return the seconds after which the compute of this rank may take a request: 0.0 for the first INITIAL_TAKERS."""
    return WIDEN_SECONDS * (rank // INITIAL_TAKERS).bit_length()


def count_allowed_takers(seconds: float, taker_count: int) -> int:
    """Return how many takers, at least 1, may take a request first seen `seconds` ago; these must not be negative."""
    doublings = min(int(seconds / WIDEN_SECONDS + 1e-6), 64)
    return max(min(INITIAL_TAKERS << doublings, taker_count), 1)


def hash_uuid(uuid: str) -> int:
    """Return a 64-bit hash of a uuid."""
    import hashlib  # imported here because it is slow to load, and eschedule does not need it

    return int.from_bytes(hashlib.blake2b(uuid.encode(errors='surrogatepass'), digest_size=8).digest())


# Seconds that a full compute waits before it takes a request; another waits the share of this that it has used.
MAX_LOAD_DELAY_SECONDS = 0.2
# Computes of equal load wait at random within JITTER_PER_COMPUTE_SECONDS times their number, from MIN_JITTER_SECONDS to
# MAX_JITTER_SECONDS: as long as etcd needs to notify every compute that another was faster, so that few compete.
MIN_JITTER_SECONDS = 0.02
JITTER_PER_COMPUTE_SECONDS = 0.002
MAX_JITTER_SECONDS = 2.0
# Requests at the front of a queue among which a compute chooses, at most.
MAX_CHOICES = 64


class WaitingEntry(NamedTuple):
    """A queued request, and the etcd revision of its creation."""

    revision: int
    entry: QueueEntry


class InvalidEntry(NamedTuple):
    """A key in the queues with a malformed request; no compute takes it."""

    revision: int


@dataclass(frozen=True)
class Backlog:
    """The queues at one revision.

    `entries` are the requests that wait and are not being taken, by key, oldest first; `flavors` are theirs, by query.
    `taken` has what each compute takes: {key: (revision of the taker key, request or None if it is gone or malformed)}.
    `has_new`: an entry is new or released since the previous backlog. The other fields serve to make the next one.
    """

    entries: Mapping[str, WaitingEntry] = field(default_factory=dict)
    flavors: Mapping[str, Flavor] = field(default_factory=dict)
    taken: Mapping[str, Mapping[str, tuple[int, WaitingEntry | None]]] = field(default_factory=dict)
    has_new: bool = False
    state: Mapping[str, keys.StoredValue] = field(default_factory=dict, repr=False)
    parsed_entries: Mapping[str, WaitingEntry | InvalidEntry] = field(default_factory=dict, repr=False)
    taker_keys: frozenset[str] = field(default=frozenset(), repr=False)
    counts_by_query: Mapping[str, int] = field(default_factory=dict, repr=False)


def update_backlog(state: Mapping[str, keys.StoredValue], previous: Backlog) -> Backlog:
    """Return the backlog in `state`, the keys below /queues/; `previous` is Backlog() at first.

    Only changed keys are parsed: 10,000 queued requests cause 20,000 events on each compute, each with all keys.
    """
    old_state = previous.state
    changed = [
        key
        for key, entry in state.items()
        if (old := old_state.get(key)) is not entry
        and (old is None or keys.get_value_id(old) != keys.get_value_id(entry))
    ]
    added_count = sum(key not in old_state for key in changed)
    removed = old_state.keys() - state.keys() if len(state) < len(old_state) + added_count else set()
    parsed, takers = dict(previous.parsed_entries), set(previous.taker_keys - removed)
    for key in removed:
        parsed.pop(key, None)
    for key in changed:
        if keys.parse_queue_key(key) is not None:
            waiting = parse_queue_entry(key, state[key].value)
            revision = state[key].revision
            parsed[key] = WaitingEntry(revision, waiting) if isinstance(waiting, QueueEntry) else InvalidEntry(revision)
        elif key.endswith(keys.TAKER):
            takers.add(key)
    places, flavors, counts = dict(previous.entries), dict(previous.flavors), dict(previous.counts_by_query)
    added = []
    for key in {each.removesuffix(keys.TAKER) for each in (*changed, *removed)}:
        old_place, value = places.get(key), parsed.get(key)
        new_place = value if isinstance(value, WaitingEntry) and keys.taker(key) not in takers else None
        if old_place is new_place:
            continue
        if old_place is not None:
            query = places.pop(key).entry.flavor.query
            counts[query] -= 1
            if not counts[query]:
                del counts[query], flavors[query]
        if new_place is not None:
            added.append(new_place)
    for place in sorted(added, key=lambda each: each.revision):
        flavor = place.entry.flavor
        places[place.entry.key], flavors[flavor.query] = place, flavor
        counts[flavor.query] = counts.get(flavor.query, 0) + 1
    marks, has_more = _group_by_taker(state, takers, parsed), bool(added)
    return Backlog(
        _sort_by_revision(places, len(added)), flavors, marks, has_more, state, parsed, frozenset(takers), counts
    )


def _sort_by_revision(entries: dict[str, WaitingEntry], added: int) -> dict[str, WaitingEntry]:
    """Return the entries sorted by revision; only the last `added` may be out of order, for released ones are older."""
    tail = list(islice(reversed(entries.values()), added + 1))
    if all(later.revision > earlier.revision for later, earlier in pairwise(tail)):
        return entries
    return dict(sorted(entries.items(), key=lambda item: item[1].revision))


def _group_by_taker(
    state: Mapping[str, keys.StoredValue],
    taker_keys: Iterable[str],
    parsed_entries: Mapping[str, WaitingEntry | InvalidEntry],
) -> dict[str, dict[str, tuple[int, WaitingEntry | None]]]:
    """Return `taken` of a Backlog, without malformed taker keys; these, too, block their entry."""
    marks: dict[str, dict[str, tuple[int, WaitingEntry | None]]] = {}
    for key in taker_keys:
        queue_key = key.removesuffix(keys.TAKER)
        entry, compute = parsed_entries.get(queue_key), decode_lenient(QueueTaker, state[key].value).compute
        if compute is not None:
            place = entry if isinstance(entry, WaitingEntry) else None
            marks.setdefault(compute, {})[queue_key] = state[key].revision, place
    return marks


def can_take(flavor: Flavor, provider: Provider) -> bool:
    """Return whether the provider is enabled and satisfies the flavor, by placement's rules."""
    return DISABLED not in provider.traits and not find_miss(parse_query(flavor.query), provider).failures


def check_flavors(
    flavors: Mapping[str, Flavor], provider: Provider, known_answers: Mapping[str, bool]
) -> dict[str, bool]:
    """Return {query: whether the provider can take it} of `flavors`, those that requests wait for.

    Those in `known_answers`, of the same state of the provider, are not checked: there may be tens of thousands.
    """
    return {
        query: known_answers[query] if query in known_answers else can_take(flavor, provider)
        for query, flavor in flavors.items()
    }


def choose_next(
    entries: Iterable[WaitingEntry],
    allowed_queries: Mapping[str, bool],
    excluded_instances: Container[str],
    limit: int,
    rng: random.Random,
) -> WaitingEntry | None:
    """Return a random one of the first `limit` entries allowed and not excluded, or None."""
    eligible = (
        place
        for place in entries
        if allowed_queries.get(place.entry.flavor.query) and place.entry.instance not in excluded_instances
    )
    first = list(islice(eligible, limit))
    return rng.choice(first) if first else None


def adjust_limit(limit: int, has_won: bool) -> int:
    """Return the next `limit` of choose_next(): half after a win, else twice; 1 to MAX_CHOICES."""
    return max(limit // 2, 1) if has_won else min(limit * 2, MAX_CHOICES)


def choose_delay(provider: Provider, group: Group | None, compute_count: int, rng: random.Random) -> float:
    """Return the seconds that this compute waits, so that computes with more room take first.

    It grows with the used share of the scarcest class, by up to MAX_LOAD_DELAY_SECONDS, and by all of that constant if
    `group` prefers other computes. The random part is from the used share of its maximum to that maximum, which grows
    with `compute_count`.
    """
    shares = [
        inventory.used / inventory.capacity if inventory.capacity > 0 else 1.0
        for name, inventory in provider.inventories.items()
        if name in REQUIRED_CLASSES
    ]
    used_share = min(max(shares, default=1.0), 1.0)
    is_preferred = group is None or group.get_preference(provider.uuid) >= max(
        [0, *map(group.get_preference, group.member_counts)]
    )
    group_delay = 0.0 if is_preferred else MAX_LOAD_DELAY_SECONDS
    return (
        group_delay
        + MAX_LOAD_DELAY_SECONDS * used_share
        + min(max(JITTER_PER_COMPUTE_SECONDS * compute_count, MIN_JITTER_SECONDS), MAX_JITTER_SECONDS)
        * rng.uniform(used_share, 1.0)
    )
