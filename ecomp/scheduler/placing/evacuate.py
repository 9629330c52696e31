"""Evacuate a dead compute: place each of its guests anew from its request, one transaction each.

The transaction writes a tombstone at the old key and the new request. It compares the old request and the silence of
the compute: that makes it exactly once, whoever repeats the command. The attempt protects the claims until then.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from ecomp.errors import Conflict, NotFound, PlacementRefusal, Unreadable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Allocations, find_compute
from ecomp.model.choose import SPREAD, Candidate, Offer, PlacementReason
from ecomp.model.host import EntriesByCompute, group_by_instance
from ecomp.model.moves import Guest, MovePlanner
from ecomp.model.order import InvalidRequest, Request, SetOrder, get_holdings, parse_request
from ecomp.model.query import list_trees
from ecomp.model.stack import Place
from ecomp.placement.allocations import (
    Consumer,
    read_candidates,
    read_consumer,
    read_consumers,
    read_provider_allocations,
    release,
)
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import announce
from ecomp.scheduler.placing.create import UNCHANGED, Attempt
from ecomp.scheduler.placing.stack import Removal, check_previous, deliver_with_removals
from ecomp.scheduler.queries.find import from_places
from ecomp.scheduler.queries.stacks import find_next_place, make_move
from ecomp.store.client import (
    Entry,
    Store,
    Unchanged,
    find_requested_instances,
    is_alive,
    read_silence_condition,
)
from ecomp.store.sharing import load_groups, note_released, read_index


def read_moves(
    store: Store, placement: Placement, alive: Collection[str], computes: Sequence[str] | None = None
) -> tuple[Mapping[str, Sequence[Guest]], MovePlanner]:
    """Read the guests of these computes (None: of all), by compute, and make the planner for all of them.

    Placement is asked once for each query. Guests in error or gone have no request. Raises Unreadable for a malformed
    group, and errors of the backends.
    """
    guests: dict[str, list[Guest]] = {}

    def collect(entry: Entry) -> None:  # returns None, so no entry is kept
        compute, _, instance = entry.key.removeprefix(keys.HOSTS).partition('/')
        if keys.is_uuid(instance):
            request = parse_request(compute, entry.key, entry.value, entry.dropped)
            if isinstance(request, InvalidRequest) or not request.is_tombstone:
                guests.setdefault(compute, []).append(Guest(compute, request))

    for prefix in [keys.HOSTS] if computes is None else map(keys.request_prefix, computes):
        store.snapshot(prefix, transform=collect)
    valid = [
        (compute, guest.request) for compute, of_compute in guests.items() for guest in of_compute
        if not isinstance(guest.request, InvalidRequest)
    ]  # fmt: skip
    groups, malformed = load_groups(store, {request.group.name for _, request in valid if request.group})
    if malformed:
        raise Unreadable(keys.group(min(malformed)), ValueError('it is not a valid group'))
    offers, refusals = dict[str, Offer](), dict[str, str]()
    for query in {request.query: None for compute, request in valid if compute not in list_trees(request.query or '')}:
        try:
            offers |= {query: read_candidates(placement, query)} if query else {}
        except PlacementRefusal as error:
            refusals[query or ''] = str(error)
    # The same random choices each time, so that an unchanged cluster gives the same plan.
    return guests, MovePlanner(offers, refusals, groups, alive, random.Random(0))


# Plans of all guests that have not moved, each after a lost race for room.
MAX_ROUNDS = 5
# Transactions for a guest, each after its request changed, or an answer was lost.
MAX_TRIES = 5
# Guests whose keys are read at once; the attempt's lease is refreshed after them.
MAX_GUESTS_PER_READ = 10


class Evacuated(NamedTuple):
    """What became of a guest: its replacement and that one's compute or, with these empty, why it stays."""

    instance: str
    name: str | None
    replaced_by: str = ''
    compute: str = ''
    reason: str = ''


class _Replacement(NamedTuple):
    """What replaces a guest with this request: its uuid, its place in its stack, and an earlier attempt's claim."""

    request: Request
    instance: str
    place: Place | None
    claim: Candidate | None


def check_silent(store: Store, compute: str, display_name: str) -> Unchanged:
    """Return the condition that the compute stays silent; Conflict if it is alive."""
    silent = read_silence_condition(store, compute)
    if silent is None:
        cure = f'switch the machine off, and repeat the command once `eschedule hosts` shows {display_name} as silent'
        raise Conflict(f'{display_name}: its ecompute is alive, and its guests may run. Fix: {cure}')
    return silent


def evacuate(  # noqa: PLR0913
    store: Store,
    placement: Placement,
    compute: str,
    display_name: str,
    owner: Mapping[str, object],
    rng: random.Random,
    now: Callable[[], str],
    report: Callable[[Evacuated], None],
) -> list[str]:
    """Place each guest of a compute anew that the operator has fenced and disabled; `report` gets each outcome.

    Then release the claims on the compute that no request owns, and return their consumers. `owner`, `now`: see
    create(). Raises Conflict if the compute is alive or another evacuation is in flight, and as create().
    """
    check_silent(store, compute, display_name)
    order, lease = SetOrder(keys.derive_uuid(compute, 'evacuate')), store.grant(keys.ATTEMPT_SECONDS)
    attempt = _Evacuation(
        store, Future(), order, True, rng, None, lambda _: None, lease, set(),
        compute=compute, display_name=display_name, owner=owner, now=now, report=report,
    )  # fmt: skip
    attempt.placement = placement
    with attempt.undo_on_error():
        attempt.move_all()
    attempt.undo()  # claims for guests that were destroyed or changed in the meantime
    with suppress(NotFound):  # `host forget` came first
        return _release_orphans(store, placement, compute)
    return []


def _release_orphans(store: Store, placement: Placement, compute: str) -> list[str]:
    """Release the claims on a silent compute without a request, an attempt or a queue entry; return the consumers."""

    def find_needed(holding: Mapping[str, Consumer]) -> Collection[str]:
        if is_alive(store, compute):
            return holding
        elsewhere = {consumer for consumer, held in holding.items() if compute not in held.allocations}
        return elsewhere | find_requested_instances(store, {name: held.allocations for name, held in holding.items()})

    # Placement first: a claim that is delivered later has its key in etcd by then.
    consumers = read_provider_allocations(placement, compute)
    requested = map(keys.get_last_part, store.snapshot(keys.request_prefix(compute), keys_only=True).entries)
    results = release(placement, consumers.keys() - set(requested), find_needed, partial(note_released, store))
    return [consumer for consumer, is_released in results.items() if is_released]


@dataclass
class _Evacuation(Attempt):
    """The attempt of one evacuation: it claims for all guests that move, and delivers them one by one.

    `guests`, `replacements` and `reasons` (why guests stay) are by the old instance; `moved` are old instances.
    """

    compute: str = field(kw_only=True)
    display_name: str = field(kw_only=True)
    owner: Mapping[str, object] = field(kw_only=True)
    now: Callable[[], str] = field(kw_only=True)
    report: Callable[[Evacuated], None] = field(kw_only=True)
    alternative: str = ''  # the uuid follows from the old instance
    planner: MovePlanner = field(init=False)
    guests: Mapping[str, Guest] = field(init=False)
    replacements: dict[str, _Replacement] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)

    def undo(self) -> str:
        """Undo as Attempt does; if instances were moved, return how many."""
        outcome = super().undo()
        return self._describe_moved() or outcome

    def _describe_moved(self) -> str:
        return f'{len(self.moved)} instances were evacuated before' if self.moved else ''

    def move_all(self) -> None:
        """Move the guests that can be placed, and report the others. A lost race is repeated with a new plan."""
        self._read_guests()
        self._choose_replacements()
        if self.replacements:
            self._announce()
        failpoint('evacuation-announced')
        for _ in range(MAX_ROUNDS):
            if not (chosen := self._plan()):
                break
            self._move(chosen)
            requested = self.store.snapshot(keys.request_prefix(self.compute), keys_only=True).entries
            if self.moved.issuperset(map(keys.get_last_part, requested)):
                return
            self._read_guests()  # also those that an attempt in flight has delivered since
        for old, guest in self.guests.items():
            reason = self.reasons.get(old, 'its place was taken, or it changed, in the meantime. Try: repeat this')
            self.report(Evacuated(old, get_holdings(guest.request).name, reason=reason))

    def _read_guests(self) -> None:
        guests, self.planner = read_moves(self.store, self.placement, self.read_alive(), [self.compute])
        self.guests = {guest.request.instance: guest for guest in guests.get(self.compute, ())}

    def _choose_replacements(self) -> None:
        """Choose the uuid of each new instance, or note why the guest stays."""
        index, user_data = read_index(self.store), self.store.snapshot(keys.USER_DATA, keys_only=True).entries
        for old, (_, request) in self.guests.items():
            if isinstance(request, InvalidRequest):
                continue  # the plan says why it stays
            try:
                if request.user_data_sha256 and keys.user_data(request.user_data_sha256) not in user_data:
                    raise Conflict('its user-data is no longer in etcd. Fix: destroy it, and create it again')
                if len(index.requests.get(old, ())) > 1:
                    raise Conflict('several computes have a request for it. Try: eschedule audit')
                place = find_next_place(self.store, request)
                new = place.instance if place else keys.derive_uuid(old, 'evacuated')
                if new in index.requests or new in index.records:
                    again = f'instance {new} replaces it already, as after a restore of etcd'
                    raise Conflict(f'{again}. Try: eschedule audit')
                self.replacements[old] = _Replacement(request, new, place, None)
            except (Conflict, Unreadable) as error:
                self.reasons[old] = str(error)
        claims = read_consumers(self.placement, [each.instance for each in self.replacements.values()])
        for old, replacement in self.replacements.items():
            self.replacements[old] = self._take_claim(replacement, claims[replacement.instance].allocations)

    def _take_claim(self, replacement: _Replacement, held: Allocations) -> _Replacement:
        """Add an earlier attempt's claim; change the uuid while that is on a silent compute, which may run it."""
        while (claimed_on := find_compute(held)) and claimed_on not in self.read_alive():
            place = replacement.place and replacement.place._replace(incarnation=replacement.place.incarnation + 1)
            instance = place.instance if place else keys.make_uuid(os.urandom(16))
            replacement = replacement._replace(instance=instance, place=place)
            held = read_consumer(self.placement, instance).allocations
        if not claimed_on:
            return replacement
        self.foreign.add(replacement.instance)
        return replacement._replace(claim=Candidate(claimed_on, held, None))

    def _announce(self) -> None:
        """Write the attempt's key; Conflict if another evacuation of the compute is in flight."""
        instances = [each.instance for each in self.replacements.values()]
        value = {'version': 1, 'instances': instances, 'query': None, **self.owner}
        outcome = self._describe_moved() or UNCHANGED
        check = partial(check_previous, f'{self.display_name}: another evacuation', self.owner, outcome=outcome)
        self.revision = announce(self.store, self.lease, self.order.instance, value, True, check)

    def _plan(self) -> dict[str, Candidate]:
        """Choose a candidate for each guest with a replacement, an earlier claim first; note why others stay."""
        guests = [
            guest for old, guest in self.guests.items()
            if old in self.replacements or isinstance(guest.request, InvalidRequest)
        ]  # fmt: skip
        moves = {move.guest.request.instance: move for move in self.planner.plan_moves(guests, [self.compute])}
        self.reasons |= {old: move.reason for old, move in moves.items() if move.candidate is None}
        claims = {old: self.replacements[old].claim for old in moves.keys() & self.replacements.keys()}
        return {old: each for old, move in moves.items() if (each := claims.get(old) or move.candidate) is not None}

    def _move(self, chosen: Mapping[str, Candidate]) -> None:
        """Claim these candidates, and deliver what was claimed."""
        by_owner: dict[tuple[str, str], dict[str, Candidate]] = {}
        for old, candidate in chosen.items():
            request, instance, *_ = self.replacements[old]
            by_owner.setdefault((request.user_id, request.project_id), {})[instance] = candidate
        claimed = set[str]()
        for (user, project), candidates in by_owner.items():
            self.store.keep_alive(self.lease)
            self.attempted += [instance for instance in candidates if instance not in self.attempted]
            claimer = replace(self.claimer, user_id=user, project_id=project, foreign=self.foreign)
            claimed |= claimer.claim_what_fits(candidates)
        failpoint('evacuation-claimed')
        waiting = [old for old in chosen if self.replacements[old].instance in claimed]
        for _ in range(MAX_TRIES):
            settled = set[str]()
            for start in range(0, len(waiting), MAX_GUESTS_PER_READ):
                settled |= self._deliver_some(
                    {old: chosen[old] for old in waiting[start : start + MAX_GUESTS_PER_READ]}
                )
            waiting = [old for old in waiting if old not in settled]

    def _deliver_some(self, chosen: Mapping[str, Candidate]) -> set[str]:
        """Deliver claimed replacements; return the guests that moved or stay, without those to be tried again.

        Conflict if the compute is alive again, or another evacuation took over; UnknownOutcome.
        """
        silent = check_silent(self.store, self.compute, self.display_name)
        if not self.is_attempt_ours():  # deliver() deletes the attempt's key to settle an unknown outcome
            self._announce()
        own_keys = [key(self.compute, old) for old in chosen for key in (keys.request, keys.record)]
        read = self.store.read([*own_keys, *map(keys.old_record, chosen)])
        places = group_by_instance(read.items())
        return {old for old, candidate in chosen.items() if self._settle(old, candidate, places.get(old), silent)}

    def _settle(
        self, old: str, candidate: Candidate, places: EntriesByCompute[Entry] | None, silent: Unchanged
    ) -> bool:
        """Deliver a guest's replacement, unless the guest has changed, or its group or its name do not allow it.

        Return False if the transaction's conditions did not hold. UnknownOutcome.
        """
        replacement = self.replacements[old]
        planned, new, place, _ = replacement
        try:
            entries = from_places(places) if places is not None else None
            request = entries.request if entries is not None else None
            if request is not None and request.replaced_by == new:
                self._report_moved(replacement, candidate)  # the answer of its delivery was lost
                return True
            if entries is None or request is None or request.is_tombstone:
                return True  # it was destroyed in the meantime
            if (request.query, request.group, request.stack) != (planned.query, planned.group, planned.stack):
                return True
            weigh = request.why.weigh if request.why else SPREAD
            why = PlacementReason(weigh, candidate.weight, len(self.read_alive()))
            stages = {'requested': str(self.owner['since']), 'scheduled': self.now()}
            fields = request.copy_fields(instance=new, replaces=old, stack=place or request.stack, stages=stages)
            is_delivered = deliver_with_removals(
                self.store,
                [(candidate.compute, Request(allocations=candidate.allocations, why=why, **fields))],
                self.condition,
                [Removal('', entries, is_replaced=True, replaced_by=new)],
                partial(make_move, self.store, place, candidate.compute, silent),
                ends_attempt=False,
            )
        except (Conflict, Unreadable, UsageError) as error:  # of its name, its group or its stack
            self.reasons[old] = str(error)
            return True
        if is_delivered:
            failpoint('evacuated')
            self._report_moved(replacement, candidate)
        elif self.store.get(keys.request(candidate.compute, new)) is not None:
            # A create has this uuid, and its claim is not ours to move or to release.
            self.movable.discard(new)
            self.reasons[old] = f'instance {new} exists already. Try: eschedule audit'
            del self.replacements[old]
            return True
        return bool(is_delivered)

    def _report_moved(self, replacement: _Replacement, candidate: Candidate) -> None:
        request, new, *_ = replacement
        self.attempted.remove(new)
        self.moved.add(request.instance)
        self.report(Evacuated(request.instance, request.name, new, candidate.compute))
