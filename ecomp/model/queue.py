"""The queues: what waits, and how long a compute waits before it takes a request. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from ecomp.model import keys
from ecomp.model.allocation import REQUIRED_CLASSES, Provider, Resources, list_missing_classes
from ecomp.model.choose import FROM_QUEUE, PlacementReason
from ecomp.model.explain import find_miss
from ecomp.model.flavor import Flavor, parse_flavor
from ecomp.model.image import check_image
from ecomp.model.json_object import load_object
from ecomp.model.order import ORDER_FIELDS, Holdings, InvalidRequest, Order, Request, parse_holdings, refuse_big_request
from ecomp.model.parsers import NONEMPTY, TEXT, UUID, format_reason, parse_part, text
from ecomp.model.query import parse_query
from ecomp.model.record import Record, make_refused_record
from ecomp.model.states import QUEUED
from ecomp.model.status import DISABLED
from ecomp.model.stored import Field, decode_lenient, lenient, parse_fields, require_same, require_version, stored

_FIELDS = dict.fromkeys(('instance', 'flavor', 'query'), Field(UUID)) | ORDER_FIELDS
_FIELDS |= dict.fromkeys(('user_id', 'project_id', 'query'), Field(NONEMPTY))
_FIELDS['image'] = Field(text(check_image))
_FIELDS['flavor'] = Field(lambda flavor: flavor, write=lambda flavor: flavor.name)


@stored(1, 'queued request', **_FIELDS)
@dataclass(frozen=True)
class QueueEntry(Order):
    """An order that waits for a compute: the value of /queues/<flavor>/<instance>.

    Its query is the flavor's at the time of the request, and a later change of the flavor does not change it. If the
    flavor is removed, no compute takes the request. The value is never written again, so its revision is its position
    in the queue.
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
        """Return the request for the compute that took it, scheduled at ISO time `now`."""
        stages = {**self.stages, 'scheduled': now}
        allocations = {compute: dict(self.flavor.resources)}
        why = PlacementReason(FROM_QUEUE, None, 1)
        return Request(allocations=allocations, why=why, **self.copy_fields(stages=stages))


def parse_queue_entry(key: str, value: bytes) -> QueueEntry | InvalidRequest:
    """Parse a queued request, or return why it is malformed, so that no compute takes it."""
    try:
        return _parse_entry(key, value)
    except ValueError as error:
        return InvalidRequest(keys.get_last_part(key), format_reason(error), _parse_queue_holdings(value))


def _parse_queue_holdings(value: bytes) -> Holdings:
    holdings, data = parse_holdings(value)
    with suppress(ValueError):
        resources = parse_flavor('x', NONEMPTY(data.get('query'))).resources
        return holdings._replace(project_id=NONEMPTY(data.get('project_id')), resources=resources)
    return holdings


def _parse_entry(key: str, value: bytes) -> QueueEntry:
    place = keys.parse_queue_key(key)
    if place is None or not keys.is_uuid(place[1]):
        raise ValueError(f'its key {key[:200]!r} must have the form {keys.QUEUES}<flavor>/<uuid>')
    refuse_big_request(value)
    data = load_object(value)
    require_version(data, 1, 'queued request')
    require_same('flavor', data.get('flavor'), place[0])
    require_same('instance', data.get('instance'), place[1])
    flavor = parse_flavor(place[0], parse_part('query', NONEMPTY, data.get('query')))
    entry = parse_fields(QueueEntry, data, flavor=flavor)
    if lacking := list_missing_classes(entry.resources):
        raise ValueError(f'its flavor lacks {", ".join(lacking)}, which every guest needs')
    return entry


def make_queued_record(key: str, value: bytes) -> Record:
    """Return the record to show for a queued request, with a fault if it is malformed."""
    entry = parse_queue_entry(key, value)
    if isinstance(entry, InvalidRequest):
        refused = make_refused_record('', entry, '')
        return replace(refused, state=QUEUED, stages={}, fault=f'no compute takes it: {entry.reason}')
    return Record(compute='', state=QUEUED, resources=entry.resources, **entry.copy_recorded_fields())


@stored(1, 'taker', compute=lenient(TEXT))
class QueueTaker(NamedTuple):
    """The value of a taker key: the compute, which may be any text, or None if malformed."""

    compute: str | None = None


# Seconds that a full compute waits before it takes a request; another waits the share of this that it has used.
MAX_LOAD_DELAY_SECONDS = 0.2
# Computes wait at random within JITTER_PER_COMPUTE_SECONDS times their number, from MIN_JITTER_SECONDS to
# MAX_JITTER_SECONDS: as long as etcd needs to notify every compute that another was faster, so that few compete.
MIN_JITTER_SECONDS = 0.02
JITTER_PER_COMPUTE_SECONDS = 0.005
MAX_JITTER_SECONDS = 5.0


def get_max_jitter(compute_count: int) -> float:
    return min(max(JITTER_PER_COMPUTE_SECONDS * compute_count, MIN_JITTER_SECONDS), MAX_JITTER_SECONDS)


def choose_delay(provider: Provider, compute_count: int, rng: random.Random) -> float:
    """Choose the seconds that a compute waits, longer the fuller its scarcest class."""
    inventories = [each for name, each in provider.inventories.items() if name in REQUIRED_CLASSES]
    shares = [each.used / each.capacity if each.capacity > 0 else 1.0 for each in inventories]
    # So emptier computes go first.
    used_share = min(max(shares, default=1.0), 1.0)
    return MAX_LOAD_DELAY_SECONDS * used_share + rng.uniform(0.0, get_max_jitter(compute_count))


class WaitingEntry(NamedTuple):
    revision: int  # of the creation of its key
    entry: QueueEntry


@dataclass(frozen=True)
class Backlog:
    """The queues at one revision."""

    # What waits and is not being taken, by key, oldest first.
    entries: Mapping[str, WaitingEntry] = field(default_factory=dict)
    # By compute, {key of the request: revision of the taker key}.
    takers: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    has_new: bool = False  # an entry is new or released since the previous backlog
    state: Mapping[str, keys.StoredValue] = field(default_factory=dict, repr=False)
    # All requests, and the compute of each taker key; None if malformed.
    parsed: Mapping[str, WaitingEntry | str | None] = field(default_factory=dict, repr=False)

    @cached_property
    def flavors(self) -> Mapping[str, Flavor]:
        """The flavors of the waiting requests, by query."""
        return {place.entry.flavor.query: place.entry.flavor for place in self.entries.values()}

    @cached_property
    def names(self) -> Set[str]:
        """All instances and flavors in the queues."""
        places = [place.entry for place in self.parsed.values() if isinstance(place, WaitingEntry)]
        return {entry.instance for entry in places} | {entry.flavor.name for entry in places}


def update_backlog(state: Mapping[str, keys.StoredValue], previous: Backlog) -> Backlog:
    """Return the backlog in `state`, the keys below /queues/, and parse only changed ones."""

    def identify(entry: keys.StoredValue) -> tuple[int, int]:
        return entry.revision, len(entry.value)  # a value that was dropped as too large has length 0

    # Only changed keys are parsed: 10,000 queued requests cause 20,000 events on each compute, each with all keys.
    old = previous.state
    changed = [key for key, value in state.items() if old.get(key) is not value]
    changed = [key for key in changed if key not in old or identify(old[key]) != identify(state[key])]
    removed = old.keys() - state.keys()
    parsed, entries, has_new = dict(previous.parsed), dict(previous.entries), False
    for key in removed:
        del parsed[key]
    parsed |= {key: _parse_content(key, state[key]) for key in changed}
    for key in {each.removesuffix(keys.TAKER) for each in (*changed, *removed)}:
        place, before = parsed.get(key), entries.pop(key, None)
        if isinstance(place, WaitingEntry) and keys.taker(key) not in parsed:  # a malformed taker key blocks it, too
            entries[key], has_new = place, has_new or place != before
    if has_new:
        entries = dict(sorted(entries.items(), key=lambda item: item[1].revision))
    takers: dict[str, dict[str, int]] = {}
    for key in [key for key, content in parsed.items() if isinstance(content, str)]:
        takers.setdefault(str(parsed[key]), {})[key.removesuffix(keys.TAKER)] = state[key].revision
    return Backlog(entries, takers, has_new, state, parsed)


def _parse_content(key: str, raw: keys.StoredValue) -> WaitingEntry | str | None:
    if keys.parse_queue_key(key) is not None:
        entry = parse_queue_entry(key, raw.value)
        return WaitingEntry(raw.revision, entry) if isinstance(entry, QueueEntry) else None
    return decode_lenient(QueueTaker, raw.value).compute if key.endswith(keys.TAKER) else None


def can_take(flavor: Flavor, provider: Provider) -> bool:
    return DISABLED not in provider.traits and not find_miss(parse_query(flavor.query), provider).failures
