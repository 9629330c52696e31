"""Who is alive, what is being placed, and which claims are needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from ecomp.model import keys
from ecomp.model.order import Request, parse_attempt_instances, parse_request
from ecomp.store.client import Snapshot, Store, Unchanged

# Seconds from the query to placement until the attempt is announced, at most; after more, placement is queried again.
# So this long after a compute was disabled, every attempt whose offer contains it has been announced.
MAX_OFFER_AGE_SECONDS = 2.0


def is_alive(store: Store, compute: str) -> bool:
    """Return whether the compute has a presence key on a lease, regardless of its writer."""
    return read_silence_condition(store, compute) is None


def read_silence_condition(store: Store, compute: str) -> Unchanged | None:
    """Return the condition that a silent compute stays silent, or None if it is alive."""
    entry = store.get(keys.compute(compute))
    return None if entry and entry.lease else Unchanged(keys.compute(compute), entry.revision if entry else 0)


def list_leased(store: Store, prefix: str) -> list[str]:
    """Return the last parts of the keys below a prefix that are on a lease."""
    entries = store.snapshot(prefix, keys_only=True).entries
    return [keys.get_last_part(key) for key, entry in entries.items() if entry.lease]


# Which queued requests need a claim: all of them, those that a compute takes now, or none.
QUEUED = 'queued'
TAKEN = 'taken'
NOT_QUEUED = ''


def read_pending_instances(store: Store, queued: str = QUEUED, own_attempt: Unchanged | None = None) -> set[str]:
    """Return the instances in attempts, except `own_attempt`, and, as `queued` says, in queues."""
    # Attempts before queues: an order that is delivered to a queue in between is seen twice rather than missed.
    attempts = store.snapshot(keys.ATTEMPTS)
    if own_attempt is not None:
        others = {key: each for key, each in attempts.entries.items() if (key, each.revision) != own_attempt}
        attempts = attempts._replace(entries=others)
    placing = list_attempted_instances(attempts)
    if queued == NOT_QUEUED:
        return placing
    entries = store.snapshot(keys.QUEUES, keys_only=True).entries.items()
    # A taker's key counts only while it has a lease. A compute that takes an instance later also claims it later.
    waiting = [key for key, entry in entries if (entry.lease if key.endswith(keys.TAKER) else queued == QUEUED)]
    return placing.union(map(keys.get_queued_instance, waiting))


def find_needed(
    store: Store,
    holding: Mapping[str, Collection[str]],
    compute: str = '',
    queued: str = QUEUED,
    own_attempt: Unchanged | None = None,
    make_keys: Sequence[Callable[[str, str], str]] = (keys.request,),
) -> set[str]:
    """Return those instances of `holding` whose claims must stay.

    `holding` is {instance: providers that it holds}. A claim is needed while its instance has another attempt in
    flight, waits in a queue (see QUEUED), or has one of `make_keys` on a compute that it holds. With `compute`, claims
    elsewhere are left to those computes.
    """
    elsewhere = {instance for instance, providers in holding.items() if compute and compute not in providers}
    pending = read_pending_instances(store, queued, own_attempt)
    # Requests move from /requests and /queues to /hosts, so /hosts is read last: otherwise some would be missed.
    names = {make(each, instance): instance for instance in holding for each in holding[instance] for make in make_keys}
    found = store.read(list(names)) if names else {}
    return elsewhere | pending.intersection(holding) | {names[key] for key in found}


def read_settled_request(store: Store, compute: str, instance: str) -> Request | None:
    """Return the request unless it is malformed or a tombstone, or an attempt is in flight."""
    # Attempts before requests, as in find_needed().
    if instance in read_pending_instances(store, NOT_QUEUED):
        return None
    entry = store.get(keys.request(compute, instance))
    request = parse_request(compute, entry.key, entry.value) if entry is not None else None
    return request if isinstance(request, Request) and not request.is_tombstone else None


def list_attempted_instances(snapshot: Snapshot) -> set[str]:
    """Return the uuids of the instances and sets in attempts."""
    # A key without a lease is not ecomp's.
    attempts = ((key, entry.value) for key, entry in snapshot.entries.items() if entry.lease)
    return {instance for key, value in attempts for instance in parse_attempt_instances(key, value)}


def count_placements_before_and_after(snapshot: Snapshot, revision: int) -> tuple[int, int]:
    """Count the instances in leased attempts before `revision`, and in those after it."""
    before = after = 0
    for entry in snapshot.entries.values():
        # The key of a set ends in the uuid of the set, which is no instance.
        instances = parse_attempt_instances(entry.key, entry.value) - {keys.get_last_part(entry.key)}
        count = len(instances) or 1 if entry.lease else 0  # a malformed attempt counts as one instance
        before += count if entry.revision < revision else 0
        after += count if entry.revision > revision else 0
    return before, after
