"""The attempt that says somebody is at it, and the one transaction that delivers.

Whoever holds the attempt may deliver: the transaction compares its key and drops it. So nothing is delivered twice, and
once it is known to be gone nothing is delivered late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from ecomp.errors import Conflict, EcompError, UnknownOutcome
from ecomp.model import keys
from ecomp.model.guest_data import SharedUserData
from ecomp.model.instance import Request, announced, to_json
from ecomp.model.json_object import dump
from ecomp.store.client import Delete, Put, Store, Unchanged
from ecomp.store.requests import withdraw
from ecomp.store.sharing import Change, commit_with

log = logging.getLogger(__name__)

LEASE_SECONDS = keys.ATTEMPT_SECONDS
"""Seconds for which a dead eschedule's attempt says that somebody is at it."""

USER_DATA_SECONDS = 7 * 24 * 3600
"""Seconds for which a set's user-data stays, for computes that are away: as long as the record of what failed."""


class Delivery(NamedTuple):
    """One request, and the compute it goes to."""

    compute: str
    request: Request


class DeliveryOutcome(NamedTuple):
    """The compute that got the request. `again`: it had been delivered before, and nothing was changed."""

    compute: str
    again: bool = False


def announce(store: Store, lease: int, attempt: str, value: Mapping[str, object], resume: bool) -> int:
    """Put the attempt; its revision. One that is there is taken over only if `resume`: the user gave the uuid."""
    key, text = keys.attempt(attempt), dump(value)
    for _ in range(3):
        before = store.get(key) if resume else None
        if before is not None:
            log.warning('%s: another eschedule is or was at it: taking over', attempt)
        try:
            revision = store.commit([Unchanged(key, before.revision if before else 0)], [Put(key, text, lease)])
        except UnknownOutcome:
            written = store.get(key)
            revision = written.revision if written and written.lease == lease else None
        if revision:
            if resume:
                _check_alone(store, attempt, value, revision)
            return revision
        resume = True
    raise Conflict(f'{attempt}: other eschedules are at this uuid all the time')


def _check_alone(store: Store, attempt: str, value: Mapping[str, object], revision: int) -> None:
    """Conflict if one that was here before is at some of these instances by another key: a set, or one of a set.

    Asked before it is looked what was delivered: of two each sees the other's key, or what it has delivered.
    """
    mine = announced(keys.attempt(attempt), dump(value).encode())
    for key, entry in store.snapshot(keys.ATTEMPTS).entries.items():
        is_older = entry.lease and entry.revision < revision and key != keys.attempt(attempt)
        if is_older and mine & announced(key, entry.value):
            raise Conflict(f'{attempt}: an eschedule at {keys.last(key)} is at it: try again when that has ended')


def deliver(
    store: Store,
    deliveries: Sequence[Delivery],
    attempt: str,
    revision: int,
    user_data: SharedUserData | None,
    joining: Callable[[], Change],
) -> bool:
    """Deliver all in one transaction: True once the computes have them, False if certainly none has.

    `attempt` is the uuid of our attempt, `revision` that of its key. What `joining` says of names, group and quota is
    in the same transaction. `user_data` is what they refer to.
    Errors: those of `joining`, and then none has been delivered.
    """
    attempt_key = keys.attempt(attempt)
    conditions = [Unchanged(attempt_key, revision)]
    written, granted = put_user_data(store, user_data)
    operations: list[Put | Delete] = [Delete(attempt_key), *written]
    for each in deliveries:
        instance = each.request.instance
        conditions.append(Unchanged(keys.record(each.compute, instance), 0))
        operations.append(Put(keys.request(each.compute, instance), to_json(each.request)))
    try:
        return commit_with(store, conditions, operations, joining, granted) is not None
    except UnknownOutcome as error:
        first = deliveries[0]
        instance = first.request.instance
        try:
            if withdraw(store, attempt_key, revision):
                return False
            # All or none: what became of one became of each.
            if store.get(keys.request(first.compute, instance)) is not None:
                return True
            from ecomp.model.places import by_instance  # seldom asked

            # The record of another compute is of what another eschedule of this uuid delivered.
            there = store.read([keys.record(first.compute, instance), keys.old_record(instance)])
            return any(first.compute in each.records for each in by_instance(there.items()).values())
        except EcompError:
            raise UnknownOutcome(f'{error}; whether {attempt} was delivered is not known') from error


def put_user_data(store: Store, data: SharedUserData | None) -> tuple[list[Put], int]:
    """The write of user-data that requests refer to, and the lease granted for it: 0 if the content has one already."""
    if data is None:
        return [], 0
    key = keys.user_data(data.sha256)
    there = store.snapshot(key, keys_only=True).entries.get(key)
    if there is not None and there.lease and store.keep_alive(there.lease) >= USER_DATA_SECONDS:
        return [Put(key, data.text, there.lease)], 0
    lease = store.grant(USER_DATA_SECONDS)
    return [Put(key, data.text, lease)], lease
