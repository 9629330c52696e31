"""Names, groups and quotas, which instances share and only deliveries and removals change (rule: change-with-delivery).

A name belongs to one living instance. A failed instance keeps its name, on its record's lease, until another one takes
it. Also here: notes of released claims' generations, and finding an instance's keys by its uuid.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, cached_property, partial
from typing import TypeVar

from ecomp.errors import Conflict, EcompError, NoSpace, StrangeEtcd, UnknownOutcome, Unreachable, Unreadable
from ecomp.model import keys
from ecomp.model.allocation import Resources, sum_resources
from ecomp.model.group import MAX_MEMBERS, Group, Membership, filter_admitted, resolve_group
from ecomp.model.guest import SharedUserData
from ecomp.model.host import EntriesByCompute, group_by_instance
from ecomp.model.json_object import dump, load_object_or_empty
from ecomp.model.order import NameOwner, Request
from ecomp.model.quota import Quota, make_charge
from ecomp.model.record import ERROR, GONE, RETENTION_SECONDS, Record
from ecomp.model.record import from_json as record_from_json
from ecomp.model.stored import decode, decode_at, encode
from ecomp.store.client import (
    MAX_TRANSACTION_OPERATIONS,
    Delete,
    Entry,
    Exists,
    Put,
    Settlement,
    Store,
    Touch,
    Unchanged,
    retry_until_committed,
)

Shared = TypeVar('Shared', Group, Quota)

# The conditions and operations on shared keys in one transaction.
Change = tuple[list[Unchanged], list[Put | Delete]]

# Tries of a transaction; each one that fails means that another succeeded.
MAX_TRIES = 100
MAX_PAUSE_SECONDS = 0.05


class Excluded(Exception):
    """A group's rule or a quota now excludes some of the instances; only `admitted` may still be placed there."""

    def __init__(self, admitted: Collection[str]) -> None:
        super().__init__()
        self.admitted = admitted


def parse_name_holder(entry: Entry) -> str:
    """Return the instance that a name's key belongs to; Unreadable if the value is malformed."""
    return decode_at(entry.key, NameOwner, entry.value).instance


def release_name(store: Store, name: str | None, instance: str, record_lease: int = 0) -> Change:
    """Return the change that deletes an instance's name, or moves it to its record's lease.

    `record_lease` is that of an instance that failed, which is found by its name while its record is kept; 0 deletes
    the name. The change is empty without a name, or if its key is missing, malformed or another instance's.
    """
    entry = store.get(keys.name(name)) if name else None
    if entry is None or not _is_held_by(entry, instance):
        return [], []
    operation: Put | Delete = Put(entry.key, entry.value.decode(), record_lease) if record_lease else Delete(entry.key)
    return [Unchanged(entry.key, entry.revision)], [operation]


def restore_name(store: Store, name: str | None, instance: str) -> Change | None:
    """Return the change that restores an instance's name; None if another living one has it.

    The change is empty without a name, or if the instance has it. A name on a failed instance's lease is taken over.
    """
    entry = store.get(keys.name(name)) if name else None
    if name is None or (entry is not None and not entry.lease and _is_held_by(entry, instance)):
        return [], []
    if entry is not None and not entry.lease:
        return None
    key = keys.name(name)
    return [Unchanged(key, entry.revision if entry else 0)], [Put(key, encode(NameOwner(instance)))]


def load_group(store: Store, name: str) -> tuple[Group | None, Unchanged]:
    """Return a group, or None, and the condition that it stays so; raise Unreadable."""
    return _read(store, keys.group(name), Group, name=name)


def load_groups(store: Store, names: Iterable[str]) -> tuple[dict[str, Group], set[str]]:
    """Return the groups that exist, by name, and the names of unreadable ones."""
    groups_by_name: dict[str, Group] = {}
    unreadable = set[str]()
    group_keys = sorted(map(keys.group, names))
    for start in range(0, len(group_keys), MAX_TRANSACTION_OPERATIONS):  # each value may be as large as etcd allows
        for key, entry in store.read(group_keys[start : start + MAX_TRANSACTION_OPERATIONS]).items():
            name = key.removeprefix(keys.GROUPS)
            try:
                groups_by_name[name] = decode(Group, entry.value, name=name)
            except ValueError:
                unreadable.add(name)
    return groups_by_name, unreadable


def load_quota(store: Store, project: str) -> tuple[Quota | None, Unchanged]:
    """Return a project's quota, or None, and the condition that it stays so; raise Unreadable."""
    return _read(store, keys.quota(project), Quota, project=project)


def load_all(
    store: Store, prefix: str, load: Callable[[Store, str], tuple[Shared | None, Unchanged]]
) -> tuple[list[Shared], list[EcompError]]:
    """Return all groups or quotas, sorted by name, and an error for each unreadable one."""
    values: list[Shared] = []
    errors: list[EcompError] = []
    for key in sorted(store.snapshot(prefix, keys_only=True).entries):
        try:
            value, _ = load(store, key.removeprefix(prefix))
            values += [value] if value is not None else []
        except Unreadable as error:
            errors.append(error)
    return values, errors


def join_group(
    store: Store,
    membership: Membership | None,
    places: Mapping[str, str],
    replaced: Collection[str] = (),
) -> Change:
    """Return the change that adds instances to their group; empty without a membership.

    `places` is {instance: compute, or '' if queued}.
    Raises Excluded if the group's rule forbids some of them, UsageError for a new group without a policy, Conflict for
    another policy or a full group, and Unreadable.
    """
    if membership is None:
        return [], []
    existing, unchanged = load_group(store, membership.name)
    settled = resolve_group(existing, membership).without_members(*replaced)
    admitted = filter_admitted(settled, places)
    if len(admitted) < len(places):
        raise Excluded(admitted)
    extended = settled.with_members(places)
    if len(extended.members) > MAX_MEMBERS:
        limit = f'has {len(settled.members)} members, and the limit is {MAX_MEMBERS}'
        raise Conflict(f'group {membership.name}: {limit}. Fix: use another group')
    return [unchanged], [make_group_operation(extended)]


def charge_quota(store: Store, project: str, resources: Mapping[str, Resources]) -> Change:
    """Return the change that charges the project's quota for {instance: resources}.

    Without a quota the change only has the condition that there is none. Raises Unreadable, or Excluded, which admits
    the instances before the first one that does not fit.
    """
    current, unchanged = load_quota(store, project)
    if current is None:
        return [unchanged], []  # a quota that is set concurrently counts all requests itself
    charges = {instance: make_charge(amounts) for instance, amounts in resources.items()}
    admitted: list[str] = []
    for instance in charges:
        if current.list_excesses(sum_resources(charges[name] for name in (*admitted, instance))):
            raise Excluded(admitted)
        admitted.append(instance)
    return [unchanged], [make_quota_put(current.add_used(sum_resources(charges.values())))]


def recharge_quota(store: Store, project: str, resources: Resources) -> Change:
    """Return the change of charge_quota() for a living instance, which no limit excludes; raise Unreadable."""
    current, unchanged = load_quota(store, project)
    return [unchanged], [] if current is None else [make_quota_put(current.add_used(make_charge(resources)))]


def merge_changes(*changes: Change) -> Change:
    """Merge several changes into one."""
    conditions: list[Unchanged] = []
    operations: list[Put | Delete] = []
    for change_conditions, change_operations in changes:
        conditions += change_conditions
        operations += change_operations
    return conditions, operations


def make_quota_put(new_quota: Quota) -> Put:
    """Return the write that creates or replaces the quota's key, without a condition."""
    return Put(keys.quota(new_quota.project), encode(new_quota))


def write_final_record(
    store: Store,
    record: Record,
    conditions: Sequence[Unchanged | Exists],
    removed_keys: Sequence[str],
    release_shared: bool = True,
    lease_seconds: int | None = None,
) -> int | None:
    """Write an instance's final record, on a lease, and release the keys it shared.

    `removed_keys` are deleted, too. The first one settles a lost answer, so `conditions` compare it. Without
    `release_shared` the shared keys stay. The lease lasts `lease_seconds` (None: as long as records of this state are
    kept), and so does the name of an instance in the state error. The lease of an earlier record in the state error is
    revoked. For result and errors see commit_with_shared().
    """
    key = keys.record(record.compute, record.instance)
    # Before its end, only the record of an instance in the state error is on a lease.
    error_record = store.get(key) if record.state == GONE and record.error is not None else None
    lease = store.grant(lease_seconds or RETENTION_SECONDS[record.state])
    put = Put(key, encode(record), lease)
    name_lease = lease if record.state == ERROR else 0
    make_change = partial(release_shared_keys, store, record, name_lease) if release_shared else make_empty_change
    settlement = Settlement(Touch(removed_keys[0]))
    written = commit_with_shared(store, conditions, [put, *map(Delete, removed_keys)], make_change, lease, settlement)
    if written is not None and error_record is not None:
        try_revoke(store, error_record.lease)
    return written


def make_empty_change() -> Change:
    """Return a change without conditions and writes."""
    return [], []


def try_revoke(store: Store, lease: int) -> None:
    """Revoke a lease that is no longer needed, unless it is 0; on an error it just expires."""
    if lease:
        with suppress(EcompError):
            store.revoke(lease)


# Seconds for which a set's user-data stays once no compute refreshes it: for hosts that are away.
USER_DATA_SECONDS = 30 * 24 * 3600


def prepare_user_data(store: Store, user_data: SharedUserData | None) -> tuple[list[Put], int]:
    """Refresh the lease of user-data's key or grant one; return the write ([] for None), and the lease granted or 0."""
    if user_data is None:
        return [], 0
    key = keys.user_data(user_data.sha256)
    existing = _refresh_user_data(store, key)[1]
    if existing:
        return [Put(key, user_data.text, existing)], 0
    lease = store.grant(USER_DATA_SECONDS)
    return [Put(key, user_data.text, lease)], lease


def keep_user_data(store: Store, sha256: str, contents: Iterable[bytes]) -> None:
    """Refresh the lease of user-data; if it is missing or its lease shorter, put that of `contents` with this hash."""
    condition, existing = _refresh_user_data(store, keys.user_data(sha256))
    copies = map(SharedUserData.from_bytes, () if existing else contents)
    copy = next((copy for copy in copies if copy.sha256 == sha256), None)
    if copy is None:
        return
    lease, revision = store.grant(USER_DATA_SECONDS), None
    try:
        revision = store.commit([condition], [Put(condition.key, copy.text, lease)])
    finally:
        if revision is None:  # another compute was faster, or our role does not allow it
            try_revoke(store, lease)


def _refresh_user_data(store: Store, key: str) -> tuple[Unchanged, int]:
    entry = store.snapshot(key, keys_only=True).entries.get(key)
    if entry is None:
        return Unchanged(key, 0), 0
    is_kept = entry.lease and store.keep_alive(entry.lease) >= USER_DATA_SECONDS
    return Unchanged(key, entry.revision), entry.lease if is_kept else 0


def release_shared_keys(store: Store, record: Record, record_lease: int = 0) -> Change:
    """Return the change that releases an instance's name, group slot and quota charge.

    For `record_lease` see release_name(). A malformed group or quota is left as it is, so that the end need not wait
    for a repair. A failed instance has already released its charge, so a manual request to destroy it releases none.
    That of an evacuated one has moved to its replacement.
    """
    conditions, operations = release_name(store, record.name, record.instance, record_lease)
    with suppress(Unreadable):
        members_group, unchanged = load_group(store, record.group.name) if record.group else (None, None)
        if members_group is not None and unchanged is not None and record.instance in members_group.members:
            conditions.append(unchanged)
            operations.append(make_group_operation(members_group.without_members(record.instance)))
    with suppress(Unreadable):
        current, unchanged = load_quota(store, record.project_id)
        conditions.append(unchanged)  # a quota that is set concurrently counts all requests itself
        is_released = record.replaced_by is not None or (record.state == GONE and record.error is not None)
        if current is not None and not is_released:
            operations.append(make_quota_put(current.subtract_used(make_charge(record.resources))))
    return conditions, operations


def rejoin_group(store: Store, membership: Membership | None, instance: str, compute: str) -> Change:
    """Return the change that makes an instance a group's member on `compute`, against any rule; raise Unreadable."""
    if membership is None:
        return [], []
    existing, unchanged = load_group(store, membership.name)
    if existing is not None and existing.members.get(instance) == compute:
        return [], []
    target = existing or Group(membership.name, membership.policy or '', bool(membership.strict))
    return [unchanged], [make_group_operation(target.with_members({instance: compute}))]


def commit_with_shared(
    store: Store,
    conditions: Sequence[Unchanged | Exists],
    operations: Sequence[Put | Delete],
    make_change: Callable[[], Change],
    lease: int = 0,
    settlement: Settlement | None = None,
) -> int | None:
    """Commit with a change of shared keys, which is made again while those keys change.

    Returns the new revision; None if one of `conditions` does not hold or after MAX_TRIES. Raises errors of the store
    and of `make_change`. `lease`, granted for this transaction, is revoked if certainly nothing was written.
    """
    if lease and settlement is not None:
        settlement = settlement._replace(find_commit=partial(_find_on_lease, lease, settlement.find_commit))
    try:
        shared_conditions, shared_operations = make_change()
        for _ in range(MAX_TRIES):
            written = store.commit([*conditions, *shared_conditions], [*operations, *shared_operations], settlement)
            if written is not None:
                return written
            previous = shared_conditions
            shared_conditions, shared_operations = make_change()
            if shared_conditions == previous:
                break
            time.sleep(random.uniform(0, MAX_PAUSE_SECONDS))
    except Exception as error:
        # After these errors the transaction may have been committed: etcd may be found strange by its answer.
        if not isinstance(error, UnknownOutcome | NoSpace | StrangeEtcd):
            try_revoke(store, lease)
        raise
    try_revoke(store, lease)
    return None


def _find_on_lease(
    lease: int, find_commit: Callable[[Mapping[str, Entry]], int | None], entries: Mapping[str, Entry]
) -> int | None:
    # A shared key that has changed since hides a commit, but no other transaction writes on its lease.
    revisions = [each.revision for each in entries.values() if each.lease == lease]
    return min(revisions) if revisions else find_commit(entries)


def find_delivery(compute: str, request: Request, entries: Mapping[str, Entry]) -> int | None:
    """Return the revision of the delivered request, or of the record of its build; None if it was not delivered.

    All or none are delivered: one of a transaction's requests stands for all.
    """
    written = entries.get(keys.request(compute, request.instance))
    if written is not None:
        # A create with the uuid that an evacuation chose is another instance.
        is_ours = load_object_or_empty(written.value).get('replaces') == request.replaces
        return written.revision if is_ours else None
    record = entries.get(keys.record(compute, request.instance))
    return record.revision if record is not None else None


def make_group_operation(new_group: Group) -> Put | Delete:
    """Return the write of a group's key, or its deletion if it has no members."""
    key = keys.group(new_group.name)
    return Put(key, encode(new_group)) if new_group.members else Delete(key)


def _read(store: Store, key: str, kind: type[Shared], **given: str) -> tuple[Shared | None, Unchanged]:
    entry = store.get(key)
    if entry is None:
        return None, Unchanged(key, 0)
    return decode_at(key, kind, entry.value, **given), Unchanged(key, entry.revision)


def _is_held_by(entry: Entry, instance: str) -> bool:
    try:
        return decode(NameOwner, entry.value).instance == instance
    except ValueError:
        return False


# Seconds that the generation of a released claim is noted; no release sent earlier is still on its way.
NOTE_SECONDS = 3600
# Tries to write a note whose answer is lost; then UnknownOutcome.
MAX_NOTE_TRIES = 3
# A higher noted generation counts as this: each step up to it is a call to placement, for which others wait. It is
# reached by a manual write, or by 50 claims and releases of an instance within the hour; from then on a late release
# could meet the number of another claim again.
MAX_NOTED_GENERATION = 50


def note_released(store: Store, generations: Mapping[str, int]) -> None:
    """Note the generations, {instance: generation}, of at most 128 claims to be released next.

    Notes last NOTE_SECONDS. A full etcd gets none: the claims may be released nevertheless, since no attempt can be
    announced there. Raises Unreachable or UnknownOutcome: then nothing may be released.
    """
    if not generations:
        return
    with suppress(NoSpace):
        lease = store.grant(NOTE_SECONDS)
        by_key: dict[str, dict[str, int]] = {}
        for instance, generation in generations.items():
            by_key.setdefault(keys.released_claims(instance, lease), {})[instance] = generation
        puts = [Put(key, released_to_json(noted), lease) for key, noted in by_key.items()]
        # Writing the note twice does no harm.
        lost = Unreachable('the release of a claim could not be noted', 'etcd')
        retry_until_committed(lambda: store.commit([], puts), lost, MAX_NOTE_TRIES)


def read_highest_released(store: Store, instances: Collection[str]) -> int:
    """Return the highest released generation noted for these instances; 0 if none.

    It is at most MAX_NOTED_GENERATION. Call this after a claim, and repeat the claim until its generation is higher.
    """
    prefixes = {keys.released_claims_prefix(instance) for instance in instances}
    highest = 0

    def inspect(noted: Entry) -> None:  # returns None, so no entry is kept: each may be as large as etcd allows
        nonlocal highest
        generations = released_from_json(noted.value)
        highest = max([highest, *(generations.get(name, 0) for name in instances)])

    store.snapshot(prefixes.pop() if len(prefixes) == 1 else keys.RELEASED, transform=inspect)
    return highest


def released_to_json(generations: Mapping[str, int]) -> str:
    """Encode the generations of released claims, {instance: generation}, as a note.

    Placement counts the generation of a consumer from 1 again once the consumer has no allocation. A process that read
    the generation earlier, and releases late, could release a later claim with the same number. So the generation is
    noted before a claim is released, and a new claim for the instance is repeated until its generation is higher.

    Each note is a key on its own lease, so writing one needs no read and no comparison. It holds {"version",
    "generations"} for the instances whose uuids begin with the 2 digits in the key.
    """
    return dump({'version': 1, 'generations': dict(generations)})


def released_from_json(value: bytes) -> dict[str, int]:
    """Decode a note: {instance: generation}, without those below 1, capped at MAX_NOTED_GENERATION; {} if invalid."""
    generations = load_object_or_empty(value).get('generations')
    entries = generations.items() if isinstance(generations, dict) else ()
    return {name: min(number, MAX_NOTED_GENERATION) for name, number in entries if type(number) is int and number > 0}


class KeyIndex:
    """The keys of many instances at the time of the listing, see read_index().

    Nothing in etcd says below which compute an instance's keys are. Without an index lookups read the keys at
    living computes, 64 a transaction, and list all keys only if none is there. With an index they share one listing. An
    empty index remembers what a look-up found.
    """

    def __init__(
        self, requests: Mapping[str, Sequence[str]], records: Callable[[], Mapping[str, Sequence[str]]] = dict
    ) -> None:
        """Take {instance: keys below /hosts/} and a function that lists those below /instances/."""
        self.requests = dict(requests)
        self._list_records = records

    def remember(self, instance: str, compute: str) -> None:
        """Note below which compute the keys of an instance are that was not listed."""
        self.requests.setdefault(instance, [keys.request(compute, instance)])

    @cached_property
    def records(self) -> Mapping[str, Sequence[str]]:
        """{instance: its keys below /instances/}, listed when this is first read."""
        return self._list_records()


# In a cluster of more living computes, placement is asked which of them has the instance's claim.
MAX_SEARCHED_COMPUTES = MAX_TRANSACTION_OPERATIONS // 2


def find_places(store: Store, instance: str) -> EntriesByCompute[Entry]:
    """Find the instance's keys below any compute; empty if none. It may leave a queue, so read the queues first."""
    return find_at_living_computes(store, instance) or find_by_listing(store, instance)


def find_at_living_computes(
    store: Store, instance: str, key_index: KeyIndex | None = None
) -> EntriesByCompute[Entry] | None:
    """Find the instance's keys by an earlier index or at living computes; None if elsewhere or absent."""
    if key_index is not None:
        places = find_by_listing(store, instance, key_index)
        # An instance that ended in its queue is below no compute, and never elsewhere.
        if places.compute or places.record:
            return places
    presences = store.snapshot(keys.COMPUTES, keys_only=True).entries
    alive = {
        keys.get_last_part(key)
        for key, entry in presences.items()
        if entry.lease and keys.is_uuid(keys.get_last_part(key))
    }
    claimant = store.find_claim(instance) if store.find_claim is not None and len(alive) > MAX_SEARCHED_COMPUTES else ''
    for hosts in [[claimant], sorted(alive)] if claimant in alive else [sorted(alive)]:
        possible = [key for host in hosts for key in (keys.request(host, instance), keys.record(host, instance))]
        living_places = _resolve_instance(store, instance, store.read(possible))
        if living_places is not None:
            return living_places if living_places.compute in alive else None
    return None


def has_unfinished_record(store: Store, instance: str) -> bool:
    """Return whether the instance has a record in a state other than gone or error; ValueError if malformed."""
    key_index = read_index(store)
    # All records, whichever computes have a request; with requests, also records written since the listing.
    record_keys = {*_list_record_keys(key_index, instance), *key_index.records.get(instance, ())}
    places = group_by_instance(store.read(sorted(record_keys)).items()).get(instance) or EntriesByCompute()
    records = [record_from_json(entry.value) for entry in places.records.values()]
    return any(record.state not in (GONE, ERROR) for record in records)


def read_index(store: Store) -> KeyIndex:
    """List the keys of all requests (10,000 take 0.1 s); those of records when `records` is first read."""
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
    """Find the instance's keys in a new listing or an earlier index; empty if none. Callers read the queues first."""
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
    return _resolve_instance(store, instance, store.read(sorted(own_keys))) or EntriesByCompute()


def _resolve_instance(store: Store, instance: str, entries: Mapping[str, Entry]) -> EntriesByCompute[Entry] | None:
    return resolve_places(store, entries.items()).get(instance)


def resolve_places(store: Store, entries: Iterable[tuple[str, Entry]]) -> dict[str, EntriesByCompute[Entry]]:
    """Group entries by instance; if several computes have a request, mark those without a claim.

    Only a store with `claims` asks placement for that, and raises its errors.
    """
    places_by_instance = group_by_instance(entries)
    if store.claims is not None:
        claims = cache(store.claims)
        for instance, places in places_by_instance.items():
            places.mark_claimless(instance, claims)
    return places_by_instance


def _list_record_keys(key_index: KeyIndex, instance: str) -> list[str]:
    return [keys.record(key.split('/')[2], instance) for key in key_index.requests.get(instance, ())]
