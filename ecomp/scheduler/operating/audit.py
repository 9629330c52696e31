"""`eschedule audit`: read all planes, compare them, and say only what two looks agree on.

Each look asks every compute what it has, by a key on a lease; each answers below a key of its own, on its own lease.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ecomp.errors import EcompError, NotFound
from ecomp.model import keys
from ecomp.model.audit import audit as compare
from ecomp.model.backoff import Backoff
from ecomp.model.computes import Computes
from ecomp.model.digest import Digest, from_pages
from ecomp.model.findings import Finding, Revisions, confirmed
from ecomp.model.json_object import dump
from ecomp.model.planes import FAMILIES, KeyValue, Planes, ProviderState, World, involved
from ecomp.model.quota import INSTANCES
from ecomp.placement import allocations, providers
from ecomp.placement.client import Placement
from ecomp.store.client import AT_ONCE as MOST
from ecomp.store.client import Delete, Put, Store, Unchanged

LEASE_SECONDS = 180
"""Seconds for which the question and the answers of an audit that is killed stay in etcd."""
HEARD_SECONDS, ANSWER_SECONDS = 5.0, 120.0
"""Seconds a compute may take to say that it heard, and then to say all: ten thousand domains take libvirt long."""
FIRST_DELAY, LAST_DELAY = 0.01, 0.25
AGAIN_SECONDS = 1.5
"""Seconds between the two looks of one audit."""
SIGHTINGS_SECONDS = keys.ATTEMPT_SECONDS
"""Seconds from one audit of --fix to the other (rule 4): the life of an attempt's lease."""
LOOKS = 4
"""Looks in one audit, at most: two that heard the same computes do."""
AT_ONCE = 8
"""Threads that ask placement about its providers."""
PAGE_DIGITS = 9
"""At most, of a page's number: what has more is no page of a digest."""
LONGEST_PROJECT = 255
"""Characters of a project's id at most: placement takes no more, and not none."""
"""The exit code of an audit that found something."""

Tell = Callable[[str], None]


class Report(NamedTuple):
    """What one audit saw. `revisions` are those of its first and last look at etcd; `etcd` is the last.

    `away` says of each compute that was not compared whether it is closed or silent; `unserved` that something waits in
    a queue, and nobody takes from it; `known` is what computes are called; `stalled` are those that said that they
    heard, and gave no answer.
    """

    findings: list[Finding]
    compared: str
    away: dict[str, str]
    unserved: str | None
    known: Computes
    revisions: tuple[Revisions, Revisions]
    etcd: dict[str, KeyValue]
    stalled: frozenset[str]


def audit(
    store: Store, placement: Placement, again: float = AGAIN_SECONDS, stalled: frozenset[str] = frozenset()
) -> Report:
    """One audit. Only if a look finds something it looks again, `again` seconds later: both must have found it.

    `stalled` are computes that heard just now and gave no answer, for which it does not wait as long again.
    """
    first = last = _look(store, placement, stalled)
    found, etcd = compare(first), first.etcd
    for _ in range(LOOKS - 1 if found else 0):
        time.sleep(again)
        stalled |= last.stalled
        before, last = last, _look(store, placement, stalled)
        etcd = _etcd(store)
        revisions = [involved(each) for each in (before.etcd, last.etcd, etcd)]
        found = confirmed(compare(before), compare(last), revisions)
        if before.digests.keys() == last.digests.keys():
            break  # else one of them knew less: what it did not see may be there
    world = World(last)
    consumers = sum(1 for held in world.held.values() if not world.computes.isdisjoint(held))
    living = sum(world.is_living(each) for each in world.records)
    counted = zip((len(last.digests), living, consumers), ('compute', 'living instance', 'allocation'), strict=True)
    computes, instances, claims = (f'{number} {name}' + ('' if number == 1 else 's') for number, name in counted)
    compared = f'{computes}, {instances} and {claims} were compared'
    seen, stalled = (involved(first.etcd), involved(etcd)), stalled | last.stalled
    return Report(found, compared, world.away(), world.unserved(), world.known, seen, dict(etcd), stalled)


@contextmanager
def asking(store: Store) -> Iterator[tuple[str, int]]:
    """A name for an audit and its lease: with the block ends what was asked, and what was answered is removed."""
    lease, name = store.grant(LEASE_SECONDS), str(uuid.uuid4())
    try:
        yield name, lease
    finally:
        with suppress(EcompError):  # then it runs out by itself
            store.revoke(lease)
            left = [key for key in store.snapshot(keys.DIGESTS, keys_only=True).entries if f'/{name}/' in key]
            for first in range(0, len(left), MOST):
                store.commit([], [Delete(key) for key in left[first : first + MOST]])


def answers(
    store: Store, audit: str, computes: set[str], heard: str, answered: str, stalled: Collection[str] = ()
) -> set[str]:
    """Wait for each compute's part `answered`; those that gave it.

    Who does not put part `heard` soon is given up, and so is who was `stalled` before, whatever it puts.
    """
    began, backoff = time.monotonic(), Backoff(FIRST_DELAY, LAST_DELAY)
    while True:
        there = store.snapshot(keys.DIGESTS, keys_only=True).entries
        done = {compute for compute in computes if keys.digest(audit, compute, answered) in there}
        going = {compute for compute in computes.difference(stalled) if keys.digest(audit, compute, heard) in there}
        spent = time.monotonic() - began
        if done >= computes or spent > ANSWER_SECONDS or (spent > HEARD_SECONDS and done >= going):
            return done
        time.sleep(backoff.next())


def _look(store: Store, placement: Placement, stalled: Collection[str]) -> Planes:
    """All planes. etcd first: what changes later is then seen by its revision in the next look."""
    etcd = _etcd(store)
    # Who is alive for ever, by a key without a lease, is not waited for.
    alive = {keys.last(key) for key, kept in etcd.items() if key.startswith(keys.COMPUTES) and kept.lease}
    with ThreadPoolExecutor(AT_ONCE) as threads, asking(store) as (name, lease):
        # First the computes are asked: they work while placement is read.
        value = dump({'version': 1})
        if store.commit([Unchanged(keys.audit(name), 0)], [Put(keys.audit(name), value, lease)]) is None:
            raise EcompError(f'{keys.audit(name)} is there already')
        held = dict(threads.map(lambda each: _provider(placement, *each), providers.names(placement).items()))
        answered = answers(store, name, alive, 'heard', '0', stalled)
        late = alive - answered
        there = store.snapshot(keys.DIGESTS, keys_only=True).entries if late else {}
        stalled_now = frozenset(each for each in late if keys.digest(name, each, 'heard') in there)
        digests: dict[str, Digest] = {}
        mute = dict.fromkeys(late, 'it does not answer: frozen, killed this minute, or too old?')
        for compute in sorted(answered):
            pages = store.snapshot(keys.digest_prefix(name, compute)).entries
            numbered = sorted((int(keys.last(key)), each.value) for key, each in pages.items() if _is_page(key))
            try:
                digests[compute] = from_pages([value for _, value in numbered])
            except ValueError as error:
                mute[compute] = str(error)
    usages = {project: _usage(placement, project) for project in _projects(etcd)}
    states = {each: found for each, found in held.items() if found is not None}
    return Planes(states, etcd, digests, mute, usages, stalled_now)


def _projects(etcd: Mapping[str, KeyValue]) -> list[str]:
    """The projects that have a quota; what placement would refuse to be asked about is none, whatever its key says."""
    named = (key.removeprefix(keys.QUOTAS) for key in etcd if key.startswith(keys.QUOTAS))
    return [project for project in named if 0 < len(project) <= LONGEST_PROJECT]


def _usage(placement: Placement, project: str) -> dict[str, int]:
    """What placement counts for a project, as a quota counts it."""
    count, used = providers.project_usages(placement, project)
    return {**used, **({INSTANCES: count} if count else {})}


def _etcd(store: Store) -> dict[str, KeyValue]:
    return {
        key: KeyValue(entry.value, entry.revision, entry.lease, entry.created)
        for family in FAMILIES
        for key, entry in store.snapshot(family).entries.items()
    }


def _provider(placement: Placement, provider: str, name: str) -> tuple[str, ProviderState | None]:
    try:
        inventory = providers.inventory(placement, provider)
        return provider, ProviderState(name, inventory, allocations.of_provider(placement, provider))
    except NotFound:
        return provider, None  # removed this moment


def _is_page(key: str) -> bool:
    # A compute may write any key there, and of 5,000 digits Python makes no number.
    number = keys.last(key)
    return number.isascii() and number.isdecimal() and len(number) <= PAGE_DIGITS
