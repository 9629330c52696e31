"""What instances share, names, groups and quotas: changed only inside transactions that deliver or remove (rule 7).

A name belongs to one living instance. One that failed is still found by it, on its record's lease, until somebody else
takes the name. What outlives a claim is here, too, its generation, and how an instance is found by its uuid alone.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import TypeVar

from ecomp.errors import Conflict, EcompError, NoSpace, StrangeEtcd, UnknownOutcome, Unreadable
from ecomp.model import keys
from ecomp.model.allocation import Resources, summed
from ecomp.model.group import LARGEST, Group, Membership, allowed, settle
from ecomp.model.group import from_json as group_from_json
from ecomp.model.group import to_json as group_to_json
from ecomp.model.host import Places, by_instance
from ecomp.model.json_object import dump, load_if_object
from ecomp.model.order import name_to_json, named
from ecomp.model.quota import Quota, charge
from ecomp.model.quota import from_json as quota_from_json
from ecomp.model.quota import to_json as quota_to_json
from ecomp.model.record import ERROR, GONE, KEPT, Record
from ecomp.model.record import from_json as record_from_json
from ecomp.model.record import to_json as record_to_json
from ecomp.store.client import AT_ONCE, Delete, Entry, Exists, Put, Store, Unchanged

Shared = TypeVar('Shared', Group, Quota)

Change = tuple[list[Unchanged], list[Put | Delete]]
"""What a transaction compares, and does, about what is shared."""

TRIES = 100
"""How often a transaction is tried that others win; each time one of them has got through."""
LONGEST = 0.05
"""Seconds between two tries, at most."""


class Excluded(Exception):
    """Others were faster: only the instances in `kept` may still be where they are."""

    def __init__(self, kept: Collection[str]) -> None:
        super().__init__()
        self.kept = kept


def holder(entry: Entry) -> str:
    """The instance a name's key is about. Unreadable."""
    try:
        return named(entry.value)
    except ValueError as error:
        raise Unreadable(entry.key, error) from error


def freed(store: Store, name: str | None, instance: str, lease: int = 0) -> Change:
    """Let go of an instance's name: it goes, or stays on the `lease` of the record of one that failed.

    Nothing at all where the name is another's by now, or nobody's.
    """
    entry = store.get(keys.name(name)) if name else None
    if entry is None or not _is_of(entry, instance):
        return [], []
    change: Put | Delete = Put(entry.key, entry.value.decode(), lease) if lease else Delete(entry.key)
    return [Unchanged(entry.key, entry.revision)], [change]


def given_back(store: Store, name: str | None, instance: str) -> Change | None:
    """Give a living instance the name it had, where that is nobody's or a failed one's; None where it is another's."""
    entry = store.get(keys.name(name)) if name else None
    if name is None or (entry is not None and not entry.lease and _is_of(entry, instance)):
        return [], []
    if entry is not None and not entry.lease:
        return None
    key = keys.name(name)
    return [Unchanged(key, entry.revision if entry else 0)], [Put(key, name_to_json(instance))]


def group(store: Store, name: str) -> tuple[Group | None, Unchanged]:
    """A group, None if there is none, and the condition that this is still so. Unreadable."""
    return _read(store, keys.group(name), lambda value: group_from_json(name, value))


def groups(store: Store, names: Iterable[str]) -> tuple[dict[str, Group], set[str]]:
    """Those of these groups that there are, by name, and the names of those that cannot be read; 128 at a time."""
    found: dict[str, Group] = {}
    unreadable = set[str]()
    wanted = sorted(map(keys.group, names))
    for first in range(0, len(wanted), AT_ONCE):  # somebody may have made all of them as large as etcd takes
        for key, entry in store.read(wanted[first : first + AT_ONCE]).items():
            name = key.removeprefix(keys.GROUPS)
            try:
                found[name] = group_from_json(name, entry.value)
            except ValueError:
                unreadable.add(name)
    return found, unreadable


def quota(store: Store, project: str) -> tuple[Quota | None, Unchanged]:
    """A project's quota, None if it has none, and the condition that this is still so. Unreadable."""
    return _read(store, keys.quota(project), lambda value: quota_from_json(project, value))


def every(
    store: Store, prefix: str, read: Callable[[Store, str], tuple[Shared | None, Unchanged]]
) -> tuple[list[Shared], list[EcompError]]:
    """All groups or quotas, by name, and what is wrong with those that cannot be read."""
    found: list[Shared] = []
    unreadable: list[EcompError] = []
    for key in sorted(store.snapshot(prefix, keys_only=True).entries):
        try:
            each, _ = read(store, key.removeprefix(prefix))
            found += [each] if each is not None else []
        except Unreadable as error:
            unreadable.append(error)
    return found, unreadable


def joined(store: Store, wanted: Membership | None, places: Mapping[str, str]) -> Change:
    """Join the group: {instance: compute, or '' for one that waits in a queue}.

    Errors: Excluded, UsageError (nobody has said what it is), Conflict (it is another, or full).
    """
    if wanted is None:
        return [], []
    there, unchanged = group(store, wanted.name)
    theirs = settle(there, wanted)
    kept = allowed(theirs, places)
    if len(kept) < len(places):
        raise Excluded(kept)
    now = theirs.with_members(places)
    if len(now.members) > LARGEST:
        raise Conflict(f'group {wanted.name} has {len(theirs.members)} members, and {LARGEST} at most: take another')
    return [unchanged], [put_group(now)]


def charged(store: Store, project: str, resources: Mapping[str, Resources]) -> Change:
    """Count what these instances have in the project's quota, if there is one. Errors: Excluded."""
    counted, unchanged = quota(store, project)
    if counted is None:
        return [unchanged], []  # one that is made this moment counts what is there
    charges = {instance: charge(each) for instance, each in resources.items()}
    kept: list[str] = []
    for instance in charges:
        if counted.excess(summed(charges[each] for each in (*kept, instance))):
            raise Excluded(kept)
        kept.append(instance)
    return [unchanged], [put_quota(counted.with_used(summed(charges.values())))]


def recharged(store: Store, project: str, resources: Resources) -> Change:
    """Count what a living instance has in the project's quota, whatever that allows by now: it is where it is."""
    counted, unchanged = quota(store, project)
    return [unchanged], [] if counted is None else [put_quota(counted.with_used(charge(resources)))]


def together(*changes: Change) -> Change:
    """Join several changes of a transaction into one."""
    conditions: list[Unchanged] = []
    operations: list[Put | Delete] = []
    for unchanged, change in changes:
        conditions += unchanged
        operations += change
    return conditions, operations


def put_quota(found: Quota) -> Put:
    """The write of a quota's key."""
    return Put(keys.quota(found.project), quota_to_json(found))


def write_end(
    store: Store,
    record: Record,
    conditions: Sequence[Unchanged | Exists],
    removed: Iterable[str],
    shares: bool = True,
    seconds: int | None = None,
) -> int | None:
    """Write an instance's last record, on a lease, and let go of all it shared, unless `shares` is False.

    `removed`: the other keys that go; `seconds`: of the lease, None: as long as any such record is kept.

    By its name an instance in error is found as long as its record is there.
    The new revision; None where it is one of `conditions` that does not hold. Errors: those of the store.
    """
    key = keys.record(record.compute, record.instance)
    # Only the record of an instance in error is on a lease before its end.
    before = store.get(key) if record.state == GONE and record.error is not None else None
    lease = store.grant(seconds or KEPT[record.state])
    put = Put(key, record_to_json(record), lease)
    named = lease if record.state == ERROR else 0
    shared = partial(ended, store, record, named) if shares else unshared
    written = commit_with(store, conditions, [put, *map(Delete, removed)], shared, lease)
    if written is not None and before is not None:
        quietly_revoke(store, before.lease)
    return written


def unshared() -> Change:
    """No change of what is shared."""
    return [], []


def quietly_revoke(store: Store, lease: int) -> None:
    """Revoke a lease that no key needs any more, unless it is 0; if etcd cannot be reached, it ends by itself."""
    if lease:
        with suppress(EcompError):
            store.revoke(lease)


def ended(store: Store, record: Record, lease: int = 0) -> Change:
    """Let go of all that an instance shared: its name (kept on the `lease` of one that failed), group and quota.

    A group or quota that cannot be read is left as it is: what ends is not to wait for somebody to mend it. What failed
    has given its share of a quota back by then; a destroy of it, put by hand, does not once more.
    """
    conditions, operations = freed(store, record.name, record.instance, lease)
    with suppress(Unreadable):
        theirs, unchanged = group(store, record.group.name) if record.group else (None, None)
        if theirs is not None and unchanged is not None and record.instance in theirs.members:
            conditions.append(unchanged)
            operations.append(put_group(theirs.without(record.instance)))
    with suppress(Unreadable):
        counted, unchanged = quota(store, record.project_id)
        conditions.append(unchanged)  # one that is made this moment counts what is there
        if counted is not None and not (record.state == GONE and record.error is not None):
            operations.append(put_quota(counted.without_used(charge(record.resources))))
    return conditions, operations


def rejoined(store: Store, wanted: Membership | None, instance: str, compute: str) -> Change:
    """See that a living instance is in its group, whatever that says by now: it is where it is."""
    if wanted is None:
        return [], []
    there, unchanged = group(store, wanted.name)
    if there is not None and there.members.get(instance) == compute:
        return [], []
    now = there or Group(wanted.name, wanted.policy or '', bool(wanted.strict))
    return [unchanged], [put_group(now.with_members({instance: compute}))]


def commit_with(
    store: Store,
    conditions: Sequence[Unchanged | Exists],
    operations: Sequence[Put | Delete],
    shared: Callable[[], Change],
    lease: int = 0,
) -> int | None:
    """Commit, with a change of what others change too, made anew as long as it is that which they change.

    The new revision; None where it is one of `conditions` that does not hold. Errors: those of the store, of `shared`.
    `lease` was granted for this transaction: it is revoked if nothing was written.
    """
    try:
        mine, change = shared()
        for _ in range(TRIES):
            written = store.commit([*conditions, *mine], [*operations, *change])
            if written is not None:
                return written
            before = mine
            mine, change = shared()
            if mine == before:
                break
            time.sleep(random.uniform(0, LONGEST))
    except Exception as error:
        # These may have been carried out: etcd is found strange by what it answers, after that.
        if not isinstance(error, UnknownOutcome | NoSpace | StrangeEtcd):
            quietly_revoke(store, lease)
        raise
    quietly_revoke(store, lease)
    return None


def put_group(found: Group) -> Put | Delete:
    """The write of a group's key, or its deletion where nobody is in the group."""
    key = keys.group(found.name)
    return Put(key, group_to_json(found)) if found.members else Delete(key)


def _read(store: Store, key: str, parse: Callable[[bytes], Shared]) -> tuple[Shared | None, Unchanged]:
    entry = store.get(key)
    if entry is None:
        return None, Unchanged(key, 0)
    try:
        return parse(entry.value), Unchanged(key, entry.revision)
    except ValueError as error:
        raise Unreadable(key, error) from error


def _is_of(entry: Entry, instance: str) -> bool:
    try:
        return named(entry.value) == instance
    except ValueError:
        return False


NOTE_SECONDS = 3600
"""Seconds for which the generation of a released claim is noted. A release that was sent longer ago than this is not on
its way any more."""
NOTE_TRIES = 3
"""How often a note is sent of which no answer comes; then UnknownOutcome."""
MAX_NOTED = 50
"""A generation above this counts as this one: each step up to it is a call to placement, and others wait for it.

Whoever writes a larger one by hand gets there, and who claims and releases one instance 50 times within the hour: from
then on a late release could meet the number of another claim again.
"""


def note_released(store: Store, generations: Mapping[str, int]) -> None:
    """Note that claims of these generations are released next: {instance: generation}, at most 128 of them.

    Nothing is noted in an etcd that is full: what is claimed may go all the same, and nobody can announce a new claim.
    Errors: Unreachable, UnknownOutcome: nothing may be released then.
    """
    if not generations:
        return
    with suppress(NoSpace):
        _write_note(store, generations)


def _write_note(store: Store, generations: Mapping[str, int]) -> None:
    lease = store.grant(NOTE_SECONDS)
    by_key: dict[str, dict[str, int]] = {}
    for instance, generation in generations.items():
        by_key.setdefault(keys.released(instance, lease), {})[instance] = generation
    puts = [Put(key, released_to_json(theirs), lease) for key, theirs in by_key.items()]
    for left in reversed(range(NOTE_TRIES)):
        try:
            store.commit([], puts)
            return
        except UnknownOutcome:  # written twice it says the same
            if not left:
                raise


def highest_released(store: Store, instances: Collection[str]) -> int:
    """The highest generation that is noted for any of these; 0 if none is. Asked after something was claimed."""
    prefixes = {keys.released_prefix(each) for each in instances}
    found = 0

    def look(noted: Entry) -> None:  # nothing is kept: somebody may have put as much there as etcd takes
        nonlocal found
        theirs = released_from_json(noted.value)
        found = max([found, *(theirs.get(name, 0) for name in instances)])

    store.snapshot(prefixes.pop() if len(prefixes) == 1 else keys.RELEASED, keep=look)
    return found


def released_to_json(generations: Mapping[str, int]) -> str:
    """The generation that a claim had when it was released, so that the next claim of the same instance gets a higher
    one.

    Placement counts a consumer's generation from 1 again once it holds nothing. Somebody who read it before that, and
    releases by it late, could meet the same number at another claim. So whoever releases a claim notes its generation
    first, and whoever claims for an instance that others may have claimed for goes on until it is above what is noted.

    Each note is a key of its own, on a lease of its own: nobody has to read or compare anything to write one. It has
    {"version", "generations": {instance: number}}, of instances that begin with the key's 2 digits.
    """
    return dump({'version': 1, 'generations': dict(generations)})


def released_from_json(value: bytes) -> dict[str, int]:
    """What a key says: {instance: generation}; nothing where nobody of ours wrote it."""
    found = load_if_object(value).get('generations')
    entries = found.items() if isinstance(found, dict) else ()
    return {name: min(number, MAX_NOTED) for name, number in entries if type(number) is int and number > 0}


class Index:
    """The keys of many instances, as they were when they were listed.

    Nothing in etcd says which compute an instance's keys lie below. The living ones are asked for first, 64 in one
    transaction; only what none of them has costs a list of every key. Whoever asks for many instances makes that list
    once, see index().
    """

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


def find_places(store: Store, instance: str) -> Places[Entry]:
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
    among = index(store)
    # All of them, wherever it is asked for; and where it is asked for also what was not there yet.
    mine = {*_records_of(among, instance), *among.records.get(instance, ())}
    at = by_instance(store.read(sorted(mine)).items()).get(instance) or Places()
    records = [record_from_json(each.value) for each in at.records.values()]
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
