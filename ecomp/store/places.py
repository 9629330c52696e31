"""An instance by its uuid alone, though its keys lie below the uuid of its compute.

Nothing in etcd says which compute that is. The living ones are asked for first, 64 in one transaction; only what none
of them has costs a list of every key. Whoever asks for many instances makes that list once, see index().
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial

from ecomp.model import keys
from ecomp.model.host import Places, by_instance
from ecomp.model.record import ERROR, GONE
from ecomp.store.client import Entry, Store


class Index:
    """The keys of many instances, as they were when they were listed."""

    def __init__(
        self, requests: Mapping[str, Sequence[str]], records: Callable[[], Mapping[str, Sequence[str]]] = dict
    ) -> None:
        """`requests` is {instance: its keys below /hosts/}, `records` lists those below /instances/ likewise.

        That is called once, when somebody asks for an instance that is not in `requests`.
        """
        self.requests = requests
        self._list_records = records

    @cached_property
    def records(self) -> Mapping[str, Sequence[str]]:
        """{instance: its keys below /instances/}."""
        return self._list_records()


def places(store: Store, instance: str) -> Places[Entry]:
    """Find the instance's keys, wherever they are; empty if there are none.

    Queues are not looked at: what waits in one meanwhile may have been there before.
    """
    return near(store, instance) or listed(store, instance)


def near(store: Store, instance: str, among: Index | None = None) -> Places[Entry] | None:
    """Find the instance's keys where they were, or among the living computes'; None if none of these has it.

    `among`: an index made before this, None for none.
    """
    if among is not None:
        at = listed(store, instance, among)
        # What went out of its queue is below no compute, and nowhere else ever.
        if at.compute or at.record_key == keys.record('', instance):
            return at
    there = store.snapshot(keys.COMPUTES, keys_only=True).entries
    alive = {keys.last(key) for key, each in there.items() if each.lease and keys.is_uuid(keys.last(key))}
    both = [key for each in sorted(alive) for key in (keys.request(each, instance), keys.record(each, instance))]
    found = _judged(store, instance, store.read([*both, keys.old_record(instance)]))
    return found if found is not None and found.compute in alive else None


def lives(store: Store, instance: str) -> bool:
    """Whether any compute has a record of it that says so. ValueError for one that cannot be understood."""
    from ecomp.model.record import from_json  # seldom asked

    among = index(store)
    # All of them, wherever it is asked for; and where it is asked for also what was not there yet.
    mine = {*_records_of(among, instance), *among.records.get(instance, ())}
    at = by_instance(store.read(sorted(mine)).items()).get(instance) or Places()
    records = [from_json(each.value) for each in at.records.values()]
    return any(each.state not in (GONE, ERROR) for each in records)


def index(store: Store) -> Index:
    """List the names of all requests, and of all records once they are asked for.

    10,000 names take a tenth of a second, most of it reading the answer.
    """
    # Requests before records: what ends meanwhile is then seen twice rather than not at all.
    return Index(_names(store, keys.HOSTS), partial(_names, store, keys.INSTANCES))


def _names(store: Store, family: str) -> Mapping[str, Sequence[str]]:
    found: dict[str, list[str]] = {}
    for key in store.snapshot(family, keys_only=True).entries:
        # What a compute puts elsewhere below its own uuid is of no instance, whatever its last part says.
        if (parts := key.count('/')) == 3 or (parts == 2 and family == keys.INSTANCES):
            found.setdefault(keys.last(key), []).append(key)
    return found


def listed(store: Store, instance: str, among: Index | None = None) -> Places[Entry]:
    """Find the instance's keys by listing the names of all keys. Look at the queues before this.

    `among`: an index made before this; where the instance was not in it, or has no such key any more, none is found.
    """
    among = index(store) if among is None else among
    # A record may be written, and its request go, since the names were read. Where it is asked for no other one counts.
    asked = among.requests.get(instance, ())
    mine = [*asked, *_records_of(among, instance)] if asked else among.records.get(instance, ())
    return _judged(store, instance, store.read(sorted(mine))) or Places() if mine else Places()


def _judged(store: Store, instance: str, found: Mapping[str, Entry]) -> Places[Entry] | None:
    return everywhere(store, found.items()).get(instance)


def everywhere(store: Store, found: Iterable[tuple[str, Entry]]) -> dict[str, Places[Entry]]:
    """by_instance(); of what several computes are asked for, the one that holds its claim is believed.

    Which one that is nobody is asked by a store without `claims`. Errors: those of placement.
    """
    there = by_instance(found)
    if store.claims is not None:
        claims = cache(store.claims)
        for instance, at in there.items():
            at.judge(instance, claims)
    return there


def _records_of(among: Index, instance: str) -> list[str]:
    """The keys at which the computes that are asked for it have its record, or will."""
    asked = among.requests.get(instance, ())
    return [*(keys.record(key.split('/')[2], instance) for key in asked), keys.old_record(instance)]
