"""From a placement query to a request delivered to one compute.

1 put /requests on a lease; 2 ask for candidates; 3 claim; 4 deliver in one transaction that also drops the
request key. Killed after any of them, what is left is datable and undone by the computes (rule 4).
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from ecomp.errors import Conflict, EcompError, GenerationConflict, NoCapacity, UnknownOutcome, Unreachable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Allocations, missing, total
from ecomp.model.choose import choose
from ecomp.model.instance import Request, name_to_json, to_json
from ecomp.model.record import ERROR, GONE
from ecomp.placement import allocations as ledger
from ecomp.placement.client import Placement
from ecomp.scheduler.claim import abandon, claim
from ecomp.scheduler.find import Found, find, read_record
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.store.names import holder

log = logging.getLogger(__name__)

LEASE_SECONDS = 60
"""How long a dead eschedule's request key says that somebody is at it."""

UNCHANGED, UNDONE = 'nothing was changed', 'nothing was placed, and its claim is released'
"""What is left of a request that did not get through."""

READ_BACKS = 3
"""Just after a cut gRPC hands one call in five to the connection that broke."""


@dataclass(frozen=True)
class Wanted:
    """What the user asked for. `ssh_keys` and `user_data` None: those of the compute's mdserver.conf."""

    instance: str
    query: str
    image: str
    user_id: str
    project_id: str
    requested: str
    name: str | None = None
    ssh_keys: tuple[str, ...] | None = field(default=None, repr=False)
    user_data: bytes | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Delivered:
    """The compute that got the request. `again`: it had been delivered before, and nothing was changed."""

    compute: str
    again: bool = False


def create(
    store: Store,
    backend: Future[tuple[Placement, list[Allocations]]],
    wanted: Wanted,
    who: Mapping[str, object],
    resume: bool,
    rng: random.Random,
    now: Callable[[], str],
) -> Delivered:
    """Place one instance.

    `backend` brings placement and the candidates, asked for while etcd is being asked; `who` (host, pid) says in
    etcd who is at it; `resume` is True for a uuid the user gave, which may have a past.
    Errors: NoCapacity, PlacementRefusal, Conflict (the uuid or the name is used otherwise), Unreachable.
    """
    try:
        found = find(store, wanted.instance) if resume else None
        if found is not None:
            return _same(found, wanted)
        _free_name(store, wanted.name, wanted.instance)  # said before anything is claimed for it
        lease = store.grant(LEASE_SECONDS)
    except Unreachable as error:
        raise _with(error, UNCHANGED) from error
    claimed = False

    def still_ours() -> bool:
        at_it = store.get(keys.request(wanted.instance))
        return at_it is not None and at_it.revision == revision

    try:
        revision = _announce(store, lease, wanted, who, resume)
        if resume:
            # Delivered since we looked? From here on nobody else can: a delivery needs the key we hold now.
            found = find(store, wanted.instance)
            if found is not None:
                same = _same(found, wanted)
                _quietly_revoke(store, lease)
                return same
        failpoint('announced')
        alive = [keys.last(key) for key in store.snapshot(keys.COMPUTES, keys_only=True).entries]
        placement, candidates = backend.result()
        choice = choose(candidates, alive, rng)
        if resume and not choice.tries and abandon(store, placement, wanted.instance, revision):
            # The room that is missing may be what an earlier eschedule of this uuid claimed and left.
            choice = choose(ledger.candidates(placement, wanted.query), alive, rng)
        for provider in choice.skipped:
            log.warning('compute %s is not alive: skipped', provider)
        for compute, allocations in choice.tries:
            _check(allocations)
            claimed = True
            try:
                claim(placement, wanted.instance, allocations, wanted.user_id, wanted.project_id, still_ours)
            except (NoCapacity, GenerationConflict) as error:
                log.warning('compute %s: %s', compute, error)
                continue
            failpoint('claimed')
            request = Request(
                instance=wanted.instance,
                allocations=allocations,
                image=wanted.image,
                user_id=wanted.user_id,
                project_id=wanted.project_id,
                query=wanted.query,
                stages={'requested': wanted.requested, 'scheduled': now()},
                name=wanted.name,
                ssh_keys=wanted.ssh_keys,
                user_data=wanted.user_data,
            )
            if _deliver(store, request, compute, revision):
                failpoint('delivered')
                return Delivered(compute)
            why = 'the connection broke, this eschedule was too slow, or another one took it over'
            raise Conflict(f'{wanted.instance}: not delivered, and undone: {why}')
        if claimed:
            raise NoCapacity('every candidate was taken meanwhile')
        raise NoCapacity(_why_none(choice.skipped, alive))
    except UnknownOutcome:
        raise  # nothing is released while it is not known what was written (rule 1)
    except BaseException as error:
        left = UNCHANGED
        if claimed:
            left = _undo(store, placement, wanted.instance, revision)
            failpoint('undone')
        _quietly_revoke(store, lease)
        if isinstance(error, Unreachable):
            raise _with(error, left) from error
        if left not in (UNCHANGED, UNDONE):
            log.warning('%s', left)
        raise


def _announce(store: Store, lease: int, wanted: Wanted, who: Mapping[str, object], resume: bool) -> int:
    """Put the request key; its revision. A key that is there is taken over only for a uuid the user gave."""
    key = keys.request(wanted.instance)
    value = json.dumps({'version': 1, 'instances': [wanted.instance], 'query': wanted.query, **who})
    for _ in range(3):
        before = store.get(key) if resume else None
        if before is not None:
            log.warning('%s: another eschedule is or was at it: taking over', wanted.instance)
        try:
            revision = store.commit([Unchanged(key, before.revision if before else 0)], [Put(key, value, lease)])
        except UnknownOutcome:
            written = store.get(key)
            revision = written.revision if written and written.lease == lease else None
        if revision:
            return revision
        resume = True
    raise Conflict(f'{wanted.instance}: other eschedules are at this uuid all the time')


def _deliver(store: Store, request: Request, compute: str, revision: int) -> bool:
    """Deliver, once: True when the compute has the request, False when it is known not to. Conflict: its name is gone.

    The name becomes its own in the same transaction, or nothing does.
    """
    request_key, host_key = keys.request(request.instance), keys.host(compute, request.instance)
    record_key = keys.instance(request.instance)
    conditions = [Unchanged(request_key, revision), Unchanged(host_key, 0), Unchanged(record_key, 0)]
    operations: list[Put | Delete] = [Put(host_key, to_json(request)), Delete(request_key)]
    try:
        for _ in range(READ_BACKS):
            before = _free_name(store, request.name, request.instance)
            if before is None:
                return store.commit(conditions, operations) is not None
            put = Put(before.key, name_to_json(request.instance))
            if store.commit([*conditions, before], [*operations, put]) is not None:
                return True
            if _free_name(store, request.name, request.instance) == before:
                break  # it was not for the name
        return False
    except UnknownOutcome as error:
        try:
            if _withdraw(store, request_key, revision):
                return False
            if store.get(host_key) is not None:
                return True
            # The record of another compute is of what another eschedule of this uuid delivered.
            record = store.get(record_key)
            return record is not None and read_record(record).compute == compute
        except EcompError:
            raise UnknownOutcome(f'{error}; whether {request.instance} was delivered is not known') from error


def _free_name(store: Store, name: str | None, wanted: str) -> Unchanged | None:
    """The condition that a name is as free as it is now; None for no name. Conflict if another living one has it."""
    if name is None:
        return None
    key = keys.name(name)
    entry = store.get(key)
    if entry is None:
        return Unchanged(key, 0)
    # A delivery puts both, so the instance of a name that is there was there before we looked.
    instance = holder(entry)
    found = find(store, instance) if instance != wanted else None
    if found is not None and found.record.state not in (GONE, ERROR):
        cure = 'it is being destroyed: try again then' if found.is_destroying else 'take another, or destroy it first'
        raise Conflict(f'{name}: is the name of instance {instance}: {cure}')
    return Unchanged(key, entry.revision)


def _withdraw(store: Store, request_key: str, revision: int) -> bool:
    """Make a delivery impossible; False when it is too late, or it had become so before.

    Our request key is dropped by the delivery alone (or its lease), so while it is there and unchanged nothing was
    delivered; but a delivery still on its way could land after a mere look. Moving the key ourselves prevents that.
    """
    for left in reversed(range(READ_BACKS)):
        try:
            return store.commit([Unchanged(request_key, revision)], [Delete(request_key)]) is not None
        except UnknownOutcome:
            if not left:
                raise
    return False


def _undo(store: Store, placement: Placement, instance: str, revision: int) -> str:
    """Release the claim; what is left of it, in one sentence."""
    try:
        if abandon(store, placement, instance, revision):
            return UNDONE
        return f'{instance}: its claim is not ours any more and stays'
    except EcompError as error:
        log.debug('the claim of %s could not be released: %s', instance, error)
        return (
            f'{instance} is not placed: the computes release its claim within minutes, '
            f'or the same command with --uuid {instance} takes it over'
        )


def _with(error: Unreachable, state: str) -> Unreachable:
    """The same error, that also says what state the request is in."""
    return type(error)(f'{error}; {state}', error.backend)


def _quietly_revoke(store: Store, lease: int) -> None:
    try:
        store.revoke(lease)
    except EcompError as error:
        log.debug('the request key goes with its lease: %s', error)


def _check(allocations: Allocations) -> None:
    lacking = missing(total(allocations))
    if lacking:
        raise UsageError(f'the query asks for no {", ".join(lacking)}: a guest needs VCPU, MEMORY_MB and DISK_GB')


def _same(found: Found, wanted: Wanted) -> Delivered:
    """An instance of this uuid exists: nothing is changed if it is the same one, Conflict if not."""
    record = found.record
    if record.state == GONE:
        raise Conflict(f'{wanted.instance}: gone since {record.stages.get("gone")}; a uuid is never used twice')
    if record.state == ERROR:
        raise Conflict(f'{wanted.instance}: it failed; destroy it and ask with another uuid')
    if found.is_destroying:
        raise Conflict(f'{wanted.instance}: it is being destroyed; a uuid is never used twice')
    if (record.query, record.image) != (wanted.query, wanted.image):
        raise Conflict(f'{wanted.instance}: exists, asked for by {record.query!r} with image {record.image}')
    if found.name != wanted.name:
        raise Conflict(f'{wanted.instance}: exists, {f"by the name {found.name}" if found.name else "without a name"}')
    request = found.request
    if request is not None and request.user_data != wanted.user_data:
        raise Conflict(f'{wanted.instance}: exists, with other user-data')
    if request is not None and request.ssh_keys != wanted.ssh_keys:
        raise Conflict(f'{wanted.instance}: exists, with other ssh keys')
    return Delivered(record.compute, again=True)


def _why_none(skipped: object, alive: list[str]) -> str:
    if skipped:
        return 'placement names computes, but none of them is alive'
    if not alive:
        return 'no compute is alive: is ecompute running anywhere?'
    return 'placement names no provider with that much free and all that is required'
