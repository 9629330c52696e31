"""An instance by its uuid alone, though its keys lie below the uuid of its compute.

Nothing in etcd says which compute that is. The living ones are asked for first, 64 in one transaction; only what none
of them has costs a list of every key.
"""

from __future__ import annotations

from ecomp.model import keys
from ecomp.model.places import Places, sort
from ecomp.store.client import Entry, Store


def places(store: Store, instance: str) -> Places[Entry]:
    """Where it is, empty if it is nowhere. What waits in a queue meanwhile may have been there before."""
    return near(store, instance) or listed(store, instance)


def near(store: Store, instance: str) -> Places[Entry] | None:
    """Where it is, if a living compute has it; None where that is not known."""
    there = store.snapshot(keys.COMPUTES, keys_only=True).entries
    alive = {compute for compute in map(keys.last, there) if keys.is_uuid(compute)}
    both = [key for each in sorted(alive) for key in (keys.host(each, instance), keys.record(each, instance))]
    found = sort(store.read([*both, keys.old_record(instance)]).items()).get(instance)
    return found if found is not None and found.compute in alive else None


def listed(store: Store, instance: str) -> Places[Entry]:
    """Where it is, empty if it is nowhere, by the names of all keys. Look at the queues before this."""
    # Requests before records: what ends meanwhile is then seen twice rather than not at all.
    names = [key for family in (keys.HOSTS, keys.INSTANCES) for key in store.snapshot(family, keys_only=True).entries]
    mine = [key for key in names if keys.last(key) == instance]
    # A record may be written, and its request go, since the names were read.
    records = [keys.record(key.split('/')[2], instance) for key in mine if key.startswith(keys.HOSTS)]
    return sort(store.read(sorted({*mine, *records})).items()).get(instance) or Places()
