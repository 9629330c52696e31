"""Find an instance's request and record by its uuid: below which compute they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial

from ecomp.model import keys
from ecomp.model.host import EntriesByCompute, group_by_instance
from ecomp.model.record import from_json as record_from_json
from ecomp.model.states import ERROR, GONE
from ecomp.store.client import Entry, Store


class KeyIndex:
    """The keys of many instances at the time of the listing, see read_index().

    Nothing in etcd says below which compute an instance's keys are. With an index, several look-ups share one listing.
    """

    def __init__(
        self, requests: Mapping[str, Sequence[str]], records: Callable[[], Mapping[str, Sequence[str]]] = dict
    ) -> None:
        self.requests = dict(requests)
        self._list_records = records

    def add_missing_request_key(self, instance: str, compute: str) -> None:
        self.requests.setdefault(instance, [keys.request(compute, instance)])

    @cached_property
    def records(self) -> Mapping[str, Sequence[str]]:
        return self._list_records()


def has_unfinished_record(store: Store, instance: str) -> bool:
    """Return whether a record of the instance is unfinished, or raise ValueError."""
    key_index = read_index(store)
    # All records, whichever computes have a request; with requests, also records written since the listing.
    record_keys = {*_list_record_keys(key_index, instance), *key_index.records.get(instance, ())}
    places = group_by_instance(store.read(sorted(record_keys)).items()).get(instance) or EntriesByCompute()
    records = [record_from_json(entry.value) for entry in places.records.values()]
    return any(record.state not in (GONE, ERROR) for record in records)


def read_index(store: Store) -> KeyIndex:
    """List the keys of all requests, and those of all records once `records` is read."""
    # Requests before records: an instance that ends in between is seen twice rather than missed.
    return KeyIndex(_list_keys_by_instance(store, keys.HOSTS), partial(_list_keys_by_instance, store, keys.INSTANCES))


def _list_keys_by_instance(store: Store, family: str) -> Mapping[str, Sequence[str]]:
    keys_by_instance: dict[str, list[str]] = {}
    for key in store.snapshot(family, keys_only=True).entries:
        # Other keys below a compute are of no instance, even if their last part is a uuid.
        if key.count('/') == 3:
            keys_by_instance.setdefault(keys.get_last_part(key), []).append(key)
    return keys_by_instance


def find_by_listing(store: Store, instance: str, key_index: KeyIndex | None = None) -> EntriesByCompute[Entry]:
    """Find the instance's keys below computes, in a new listing or an earlier index.

    Queues are not read. An instance that leaves its queue after the listing is missed, unless its queue was read first.
    """
    key_index = read_index(store) if key_index is None else key_index
    # Since the listing a record may have been written and its request deleted. With a request, no other record counts.
    request_keys = key_index.requests.get(instance, ())
    if request_keys:
        own_keys = [*request_keys, *_list_record_keys(key_index, instance)]
    else:
        # The records were listed after the requests: the instance may have left its queue in between.
        own_keys = [*key_index.records.get(instance, ())]
        own_keys += [keys.request(compute, instance) for compute, _ in map(keys.parse_record_key, own_keys) if compute]
    if not own_keys:
        return EntriesByCompute()
    return resolve_places(store, store.read(sorted(own_keys)).items()).get(instance) or EntriesByCompute()


def resolve_places(store: Store, entries: Iterable[tuple[str, Entry]]) -> dict[str, EntriesByCompute[Entry]]:
    """Group entries by instance, and mark requests without a claim if an instance has several."""
    places_by_instance = group_by_instance(entries)
    if store.claims is not None:
        claims = cache(store.claims)
        for instance, places in places_by_instance.items():
            places.mark_claimless(instance, claims)
    return places_by_instance


def _list_record_keys(key_index: KeyIndex, instance: str) -> list[str]:
    return [keys.record(key.split('/')[2], instance) for key in key_index.requests.get(instance, ())]
