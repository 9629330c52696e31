"""From a placement query to requests delivered to computes: of one instance, or of a set.

1 put /requests on a lease; 2 ask for candidates; 3 claim; 4 deliver in one transaction that also drops the
request key. Killed after any of them, what is left is datable and undone by the computes (rule 4).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import cache
from typing import TYPE_CHECKING

from ecomp.errors import Conflict, EcompError, NoCapacity, UnknownOutcome, Unreachable
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.choose import Candidate, Offer, Why
from ecomp.model.instance import Request
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.looking.ask import FRESH
from ecomp.scheduler.placing.claim import Claimer, abandon
from ecomp.scheduler.placing.deliver import LEASE_SECONDS, Delivery, announce, deliver, quietly_revoke
from ecomp.scheduler.placing.joining import Terms, take_names, terms_of, together
from ecomp.scheduler.placing.place import Placer
from ecomp.scheduler.placing.set_order import DeliveryOutcome, SetOrder, before, check_size
from ecomp.store.client import Store
from ecomp.store.released import highest
from ecomp.store.requests import in_line
from ecomp.store.sharing import Change, Excluded, charged, joined

if TYPE_CHECKING:
    from ecomp.model.computes import Computes

log = logging.getLogger(__name__)

UNCHANGED, UNDONE = 'nothing was changed', 'nothing was placed, and its claim is released'
"""What is left of a request that did not get through."""


def create(
    store: Store,
    backend: Future[tuple[Placement, Offer]],
    wanted: SetOrder,
    who: Mapping[str, object],
    resume: bool,
    rng: random.Random,
    now: Callable[[], str],
    large: int | None = None,
    sized: Callable[[int], None] = lambda _: None,
) -> dict[str, DeliveryOutcome]:
    """Place the instances; those that are placed, in order.

    `backend` brings placement and the candidates, asked for while etcd is being asked; but where there are more than
    `large` computes a few of these are asked about first. None: that is not expected, and not looked at. `who` (host,
    pid) says in etcd who is at it; `resume` is True for a uuid the user gave, which may have a past. `sized` is told
    how many computes there are, where that was seen.
    Errors: NoCapacity, PlacementRefusal, UsageError (the set is too large for etcd), Conflict (the uuid or the name is
    used otherwise), Unreachable.
    """
    check_size(wanted)
    try:
        there = before(store, wanted) if resume else {}
        if there:
            return there
        terms = _terms(store, wanted)
        take_names(store, wanted.instances)  # said before anything is claimed for one of them
        lease = store.grant(LEASE_SECONDS)
    except Unreachable as error:
        raise _with(error, UNCHANGED) from error
    tried: list[str] = []
    earlier: list[str] = []  # those that may hold what an earlier eschedule claimed

    def still_ours() -> bool:
        store.keep_alive(lease)  # whoever is at it for long is alive, or would not ask
        at_it = store.get(keys.attempt(wanted.instance))
        return at_it is not None and at_it.revision == revision

    def look_again() -> Offer:
        store.keep_alive(lease)
        return allocations.candidates(placement, wanted.query or '')

    def released(instances: Collection[str]) -> int:
        return highest(store, instances) if resume else 0  # nobody has heard of a uuid that was made here

    @cache
    def known() -> Computes:
        from ecomp.scheduler.looking.hosts import computes  # seldom needed

        return computes(store)

    def called(compute: str) -> str:
        return known().called(compute)

    def is_ours(compute: str) -> bool:
        return compute in known().remembered

    def living() -> list[str]:
        found = store.snapshot(keys.COMPUTES, keys_only=True).entries
        sized(len(found))
        return [keys.last(key) for key, entry in found.items() if entry.lease]

    def line() -> tuple[int, int]:
        return in_line(store.snapshot(keys.ATTEMPTS), revision)

    try:
        value = {'version': 1, 'instances': list(wanted.instances), 'query': wanted.query, **who}
        revision = announce(store, lease, wanted.instance, value, resume)
        # Delivered since we looked? From here on nobody else can: a delivery needs the key we hold now.
        there = before(store, wanted) if resume else {}
        if there:
            quietly_revoke(store, lease)
            return there
        alive = living() if large is None else None
        announced = time.monotonic()
        placement, offer = backend.result()
        failpoint('announced')
        claimer = Claimer(placement, wanted.user_id, wanted.project_id, still_ours, released, called)
        placer, placed, of = None, dict[str, Candidate](), 0
        if large is not None and not resume:
            from ecomp.scheduler.placing.few import Few  # for large clusters

            few = Few(claimer, wanted, rng, tried)
            placed, of = few.place(store, terms, large), few.of
        if not placed:
            alive = living() if alive is None else alive
            placer = Placer(claimer, look_again, line, alive, is_ours, wanted, rng, tried)
            if announced - offer.asked > FRESH:
                offer = look_again()  # who waits for a compute to be drained waits no longer than that for us
        if resume and placer is not None and placer.room(offer, terms) < wanted.minimum:
            from ecomp.scheduler.placing.earlier import left_behind  # for those who resume

            # The room that is missing may be what an earlier eschedule of this uuid claimed and left.
            earlier += wanted.instances
            placed = placer.take_over(left_behind(placement, wanted, placer.alive, terms.group))
            if len(placed) < wanted.minimum:
                offer = look_again()  # it may have been released since placement was asked, and be free by now
        while True:
            try:
                placed = placer.place(offer, terms, placed) if placer is not None else placed
            except NoCapacity:
                if resume:  # the room that is missing may be what another one has claimed for the same instances
                    claimer.check(wanted.instance)
                raise
            failpoint('claimed')
            try:
                among = placer.of if placer is not None else of
                delivered = _deliver(store, wanted, terms, placed, among, revision, now())
                _undo_quietly(store, placement, set(tried) - placed.keys(), wanted.instance, revision)
                return delivered
            except Excluded as lost:
                # Of its group or its project others were delivered first, and what we hold may not be where it is.
                log.debug('%s: others were faster, %d of %d may stay', wanted.instance, len(lost.kept), len(placed))
                placed = {instance: placed[instance] for instance in lost.kept}
                terms, offer = _terms(store, wanted), look_again()
                placer = placer or Placer(claimer, look_again, line, living(), is_ours, wanted, rng, tried)
    except UnknownOutcome:
        raise  # nothing is released while it is not known what was written (rule 1)
    except BaseException as error:
        left = UNCHANGED
        if tried or earlier:
            left = _undo(store, placement, {*tried, *earlier}, wanted.instance, revision)
            failpoint('undone')
        quietly_revoke(store, lease)
        if isinstance(error, Unreachable):
            raise _with(error, left) from error
        if left not in (UNCHANGED, UNDONE):
            log.warning('%s', left)
        raise


def _terms(store: Store, wanted: SetOrder) -> Terms:
    return terms_of(store, wanted.group, wanted.project_id, wanted.instances)


def _deliver(
    store: Store,
    wanted: SetOrder,
    terms: Terms,
    placed: Mapping[str, Candidate],
    of: int,
    revision: int,
    scheduled: str,
) -> dict[str, DeliveryOutcome]:
    """Deliver what is placed, of so many candidates. Errors: Excluded, Conflict."""
    group = None if terms.group is None else terms.group.membership
    decided = {'group': group, 'stages': {**wanted.stages, 'scheduled': scheduled}}

    def request(instance: str, candidate: Candidate) -> Request:
        why = Why(wanted.weigh, candidate.weight, of)
        return Request(allocations=candidate.allocations, why=why, **wanted.orders[instance].parts(**decided))

    requests = {instance: request(instance, candidate) for instance, candidate in placed.items()}

    def joining() -> Change:
        return together(
            take_names(store, {instance: each.name for instance, each in requests.items()}),
            joined(store, group, {instance: candidate.compute for instance, candidate in placed.items()}),
            charged(store, wanted.project_id, {instance: each.resources for instance, each in requests.items()}),
        )

    deliveries = [Delivery(placed[instance].compute, each) for instance, each in requests.items()]
    if not deliver(store, deliveries, wanted.instance, revision, wanted.shared, joining):
        why = 'the connection broke, this eschedule was too slow, or another one took it over'
        raise Conflict(f'{wanted.instance}: not delivered, and undone: {why}')
    failpoint('delivered')
    return {each.request.instance: DeliveryOutcome(each.compute) for each in deliveries}


def _undo(store: Store, placement: Placement, tried: Iterable[str], request: str, revision: int) -> str:
    """Release the claims; what is left of them, in one sentence."""
    try:
        if abandon(store, placement, tried, request, revision):
            return UNDONE
        return f'{request}: its claim stays: somebody else is at it, or this eschedule was too slow to release it'
    except EcompError as error:
        log.debug('the claim of %s could not be released: %s', request, error)
        return (
            f'{request} is not placed: the computes release its claim within minutes, '
            f'or the same command with --uuid {request} takes it over'
        )


def _undo_quietly(store: Store, placement: Placement, instances: Collection[str], request: str, revision: int) -> None:
    """Release the claims of a set that are not needed: it is delivered, and what cannot be done the computes do."""
    if instances:
        log.debug('%s', _undo(store, placement, instances, request, revision))


def _with(error: Unreachable, state: str) -> Unreachable:
    """The same error, that also says what state the request is in."""
    return type(error)(f'{error}; {state}', error.backend)
