"""Find instances by uuid, uuid prefix or name: their record, request or queue entry."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import Conflict, EcompError, NotFound, Unreadable, UsageError, put_before_fix
from ecomp.model import keys
from ecomp.model.host import EntriesByCompute, group_by_instance
from ecomp.model.order import InvalidRequest, Order, Request, parse_request
from ecomp.model.record import CHANGEABLE, Record, from_json, make_scheduled_record
from ecomp.model.states import GONE
from ecomp.model.text import MIN_PREFIX_DIGITS, is_name, join_some, make_printable, parse_uuid_prefix
from ecomp.shared.names import parse_name_owner
from ecomp.shared.places import KeyIndex, find_by_listing, resolve_places
from ecomp.store.client import Entry, Store

if TYPE_CHECKING:
    from ecomp.model.queue import QueueEntry


# Instances or computes that an error names.
MAX_NAMES_IN_ERROR = 5


class InstanceEntries(NamedTuple):
    """An instance's record, made from its request or queue entry if need be, and its entries.

    In a queue only `queue_entry` is set, and `record_entry` if the uuid was used before.
    """

    record: Record
    record_entry: Entry | None
    request_entry: Entry | None
    queue_entry: Entry | None = None

    @property
    def request(self) -> Request | None:
        """The current request, or None if it is missing or malformed."""
        if self.request_entry is None:
            return None
        request = parse_request(self.record.compute, self.request_entry.key, self.request_entry.value)
        return request if isinstance(request, Request) else None

    @property
    def order(self) -> Order | None:
        """The order of the request or queue entry, but with the record's values."""
        order: Request | QueueEntry | InvalidRequest | None = self.request
        if self.queue_entry is not None:
            from ecomp.model.queue import parse_queue_entry  # imported late, as in read_queued_record()

            order = parse_queue_entry(self.queue_entry.key, self.queue_entry.value)
        if order is None or isinstance(order, InvalidRequest):
            return None
        recorded = {name: value for name, value in self.record.copy_recorded_fields().items() if value}
        recorded |= {name: value for name in CHANGEABLE if (value := getattr(order, name)) is not None}
        # A record lacks the policy of its group.
        return Order(**order.copy_fields(**{**recorded, 'group': order.group or recorded.get('group')}))

    @property
    def name(self) -> str | None:
        """The current name: its compute copies a new one into the record later."""
        return (self.request and self.request.name) or self.record.name

    @property
    def is_destroying(self) -> bool:
        request = self.request
        return request is not None and request.is_tombstone


def resolve(store: Store, argument: str, key_index: KeyIndex | None = None) -> str:
    """Return the uuid of the instance that an argument (uuid, name or uuid prefix) means.

    Raises:
        NotFound: there is no such instance. A whole uuid is not checked.
        UsageError: several uuids begin with the prefix.
        Conflict: the name's key refers to an instance that has another name.
    """
    if keys.is_uuid(argument):
        return argument
    if is_name(argument) and (entry := store.get(keys.name(argument))) is not None:
        _require_name(store, argument, instance := parse_name_owner(entry), key_index)
        return instance
    prefix = parse_uuid_prefix(argument)
    if prefix is None:
        advice = f' (give at least the first {MIN_PREFIX_DIGITS} digits of a uuid)'
        short = advice if len(argument) < MIN_PREFIX_DIGITS else ''
        raise NotFound(f'{argument}: no living instance has this name{short}')
    recorded = map(keys.get_last_part, store.snapshot(keys.INSTANCES, keys_only=True).entries)
    # Next, instances that no compute has taken or seen yet. In this order one that moves is read twice, not missed.
    queued = filter(None, map(_parse_queue_key, store.snapshot(keys.QUEUES, keys_only=True).entries))
    requests = filter(_is_request_key, store.snapshot(keys.HOSTS, keys_only=True).entries)
    candidates = [*recorded, *queued, *map(keys.get_last_part, requests)]
    uuids = {each for each in candidates if each.startswith(prefix) and keys.is_uuid(each)}
    if not uuids:
        raise NotFound(f'{argument}: no living instance has this name, and no uuid begins with it')
    if len(uuids) > 1:
        some = join_some(sorted(uuids), MAX_NAMES_IN_ERROR)
        raise UsageError(f'{argument}: {len(uuids)} uuids of instances begin with it: {some}. Fix: give more digits')
    return uuids.pop()


def _require_name(store: Store, name: str, instance: str, key_index: KeyIndex | None) -> None:
    try:
        entries = find(store, instance, key_index)
    except Unreadable:
        return
    if entries is None or name in (actual := entries.name, entries.record.name):
        return
    actual_name = f'is called {make_printable(actual)}' if actual else 'has no name'
    # Any compute may write the key of any name.
    mismatch = f'{keys.name(name)} refers to instance {instance}, which {actual_name}'
    raise Conflict(f'{mismatch} (`eschedule check` reports such keys). Fix: give the uuid of the right instance')


def find(store: Store, instance: str, key_index: KeyIndex | None = None) -> InstanceEntries | None:
    """Find an instance by its whole uuid, also one that is gone.

    `key_index` has the keys of all instances, read a moment ago. An instance that it lacks is searched for and added.

    Raises:
        Unreadable: the record is malformed.
    """
    queue_entry, places = find_keys(store, instance, key_index)
    if queue_entry is not None:
        return InstanceEntries(read_queued_record(queue_entry), None, None, queue_entry)
    if key_index is not None and places.compute:
        key_index.add_missing_request_key(instance, places.compute)
    return from_places(places)


def find_keys(store: Store, instance: str, key_index: KeyIndex | None) -> tuple[Entry | None, EntriesByCompute[Entry]]:
    """Find an instance's entry in a queue or, if there is none, its keys below computes."""
    is_indexed = key_index is not None and bool(key_index.requests or key_index.records)
    places = find_by_listing(store, instance, key_index if is_indexed else None)
    # An instance that ended in its queue is below no compute, and never elsewhere.
    if places.request is not None or (is_indexed and places.record is not None):
        return None, places
    # The queues before the requests: an instance that moves in between is found in the requests.
    queue_entry = find_queue_entry(store, instance)
    if queue_entry is None and places.record is None:
        places = find_by_listing(store, instance)
    return queue_entry, places


def find_queue_entry(store: Store, instance: str) -> Entry | None:
    queues = store.snapshot(keys.QUEUES, keys_only=True).entries
    queue_keys = [key for key in queues if _parse_queue_key(key) == instance]
    return next((entry for entry in map(store.get, queue_keys) if entry is not None), None)


def from_places(places: EntriesByCompute[Entry]) -> InstanceEntries | None:
    if places.record is None:
        return from_request(places)
    return InstanceEntries(read_record(places.record), places.record, places.request)


def from_request(places: EntriesByCompute[Entry]) -> InstanceEntries | None:
    """Make an instance's record, and its entries, from its request alone, even a malformed one."""
    if places.request is None:
        return None
    return InstanceEntries(make_scheduled_record(places.request.key, places.request.value), None, places.request)


def is_known(store: Store, instance: str, key_index: KeyIndex | None = None) -> bool:
    """Return whether etcd has any trace of the instance, even a malformed one."""
    try:
        return find(store, instance, key_index) is not None
    except Unreadable:
        return True


def find_living(store: Store, instance: str, key_index: KeyIndex | None = None) -> InstanceEntries:
    """Find an instance that is not gone, though perhaps in error, or raise NotFound."""
    entries = find(store, instance, key_index)
    if entries is None:
        raise NotFound(f'{instance}: no such instance')
    if entries.record.state == GONE:
        raise NotFound(f'{instance}: has been gone since {entries.record.stages.get("gone", "an unknown time")}')
    return entries


def list_records(store: Store, with_gone: bool) -> tuple[list[Record], list[EcompError]]:
    """Read all instances, sorted by request time, and the errors of malformed records.

    One with only a request is `scheduled`, with a fault if that is invalid. One in a queue is `queued`.
    """
    # In this order an instance that moves on is read twice, and counts where it was read last.
    queued = store.snapshot(keys.QUEUES).entries
    records = {uuid: read_queued_record(entry) for key, entry in queued.items() if (uuid := _parse_queue_key(key))}
    errors: list[EcompError] = []
    # Keys only: a request may be large (user-data), and few of their values are needed.
    requests = [item for item in store.snapshot(keys.HOSTS, keys_only=True).entries.items() if _is_request_key(item[0])]
    entries = [*requests, *store.snapshot(keys.INSTANCES).entries.items()]
    try:
        places_by_instance = resolve_places(store, entries)
    except EcompError as error:  # placement is unreachable
        clause = '; of two requests for one instance, the older one is shown'
        errors.append(EcompError(put_before_fix(str(error), clause)))
        places_by_instance = group_by_instance(entries)
    for instance, places in places_by_instance.items():
        try:
            if places.record is not None:
                records[instance] = read_record(places.record)
            elif places.request is not None and (request := store.get(places.request.key)) is not None:
                records[instance] = make_scheduled_record(request.key, request.value)
        except EcompError as error:
            errors.append(error)
    shown = [record for record in records.values() if with_gone or record.state != GONE]
    return sorted(shown, key=lambda each: (each.stages.get('requested', ''), each.instance)), errors


def read_record(entry: Entry) -> Record:
    try:
        if entry.dropped_bytes:
            raise ValueError(f'its value is too large: {entry.dropped_bytes} bytes')
        compute, instance = keys.parse_record_key(entry.key)
        return from_json(entry.value, instance, compute)
    except ValueError as error:
        # The cure is to delete the key: its compute writes it again.
        raise Unreadable(make_printable(entry.key, 100), error) from error


def read_queued_record(entry: Entry) -> Record:
    # Its imports take 5 % of a claim's time, and a claim rarely needs them.
    from ecomp.model.queue import make_queued_record

    return make_queued_record(entry.key, entry.value)


def _parse_queue_key(key: str) -> str | None:
    flavor_and_instance = keys.parse_queue_key(key)
    return flavor_and_instance[1] if flavor_and_instance and keys.is_uuid(flavor_and_instance[1]) else None


def _is_request_key(key: str) -> bool:
    return key.count('/') == 3 and keys.is_uuid(keys.get_last_part(key))
