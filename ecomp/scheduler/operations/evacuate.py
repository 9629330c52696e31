"""Evacuate a dead compute: place each of its guests anew from its request, one transaction each.

The transaction writes a tombstone at the old key and the new request. It compares the old request and the silence of
the compute: that makes it exactly once, whoever repeats the command. The attempt only protects the claims until then.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from ecomp.errors import Conflict, EcompError, Unreachable, Unreadable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import find_compute
from ecomp.model.choose import SPREAD, Candidate, PlacementReason
from ecomp.model.moves import Guest
from ecomp.model.order import InvalidRequest, Request, SetOrder, get_holdings
from ecomp.model.stack import Place
from ecomp.placement.allocations import Consumer, read_consumer, read_provider_allocations, release
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.decommission import disable
from ecomp.scheduler.operations.moves import MoveSurvey, read_moves
from ecomp.scheduler.placing.claim import announce
from ecomp.scheduler.placing.create import Attempt
from ecomp.scheduler.placing.stack import Removal, check_previous, deliver_with_removals
from ecomp.scheduler.queries.find import find
from ecomp.scheduler.queries.stacks import find_next_place, make_move
from ecomp.store.client import Store, Unchanged, find_requested_instances, is_alive, read_silence_condition
from ecomp.store.sharing import Change, KeyIndex, merge_changes, note_released, read_index

# Plans of all guests that have not moved, each after a lost race for room.
MAX_ROUNDS = 5
# Transactions for a guest, each after its request changed, or an answer was lost.
MAX_TRIES = 5


class Evacuated(NamedTuple):
    """What became of a guest: its replacement and that one's compute or, with these empty, why it stays."""

    instance: str
    name: str | None
    replaced_by: str = ''
    compute: str = ''
    reason: str = ''


class _Replacement(NamedTuple):
    """The uuid of a new instance, its place in its stack, and the claim of an earlier attempt for it."""

    instance: str
    place: Place | None
    claim: Candidate | None


def check_silent(store: Store, compute: str, display_name: str) -> Unchanged:
    """Return the condition that the compute stays silent; Conflict if it is alive."""
    silent = read_silence_condition(store, compute)
    if silent is None:
        cure = f'switch the machine off, and repeat the command when `eschedule hosts` shows {display_name} as silent'
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
    """Disable a compute that the operator has fenced, and place each of its guests anew; `report` gets each outcome.

    Then release the claims on the compute that no request owns, and return their consumers. `owner` and `now`: see
    create(). Raises Conflict if the compute is alive or another evacuation is in flight, NotFound, errors of the
    backends, and UnknownOutcome.
    """
    silent = check_silent(store, compute, display_name)
    disable(placement, compute, display_name)
    order, lease = SetOrder(keys.derive_uuid(compute, 'evacuate')), store.grant(keys.ATTEMPT_SECONDS)
    attempt = _Evacuation(
        store, Future(), order, True, rng, None, lambda _: None, lease, set(),
        compute=compute, display_name=display_name, silent=silent, owner=owner, now=now, report=report,
    )  # fmt: skip
    attempt.placement = placement
    with attempt.undo_on_error():
        attempt.move_all()
    attempt.undo()  # claims for guests that were destroyed in the meantime
    return _release_orphans(store, placement, compute)


def _release_orphans(store: Store, placement: Placement, compute: str) -> list[str]:
    """Release the claims on a silent compute without a request, an attempt or a queue entry; return the consumers."""
    prefix = keys.request_prefix(compute)
    # Placement first: a claim that is delivered later has its key in etcd by then.
    consumers = read_provider_allocations(placement, compute)
    requested = {key.removeprefix(prefix) for key in store.snapshot(prefix, keys_only=True).entries}

    def find_needed(holding: Mapping[str, Consumer]) -> Collection[str]:
        if is_alive(store, compute):
            return holding
        elsewhere = {consumer for consumer, held in holding.items() if compute not in held.allocations}
        return elsewhere | find_requested_instances(store, {name: held.allocations for name, held in holding.items()})

    results = release(placement, consumers.keys() - requested, find_needed, partial(note_released, store))
    return [consumer for consumer, is_released in results.items() if is_released]


@dataclass
class _Evacuation(Attempt):
    """The attempt of one evacuation: it claims for all guests that move, and delivers them one by one.

    `replacements` is by the old instance, and so are `reasons`, of guests that stay.
    """

    compute: str = field(kw_only=True)
    display_name: str = field(kw_only=True)
    silent: Unchanged = field(kw_only=True)
    owner: Mapping[str, object] = field(kw_only=True)
    now: Callable[[], str] = field(kw_only=True)
    report: Callable[[Evacuated], None] = field(kw_only=True)
    alternative: str = ''  # the uuid follows from the old instance
    replacements: dict[str, _Replacement] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    foreign: set[str] = field(default_factory=set)
    survey: MoveSurvey = field(init=False)
    moved_count: int = 0

    def undo(self) -> str:
        """Undo as Attempt does; if instances were moved, return how many."""
        outcome = super().undo()
        return f'{self.moved_count} instances were evacuated before' if self.moved_count else outcome

    def move_all(self) -> None:
        """Move the guests that can be placed, and report the others. A lost race is repeated with a new plan."""
        self._choose_replacements(self._read_guests())
        if self.replacements:
            self._announce()
        failpoint('evacuation-announced')
        earlier = {old: each.claim for old, each in self.replacements.items() if each.claim is not None}
        self.foreign |= {self.replacements[old].instance for old in earlier}
        if earlier:
            self._move(earlier)
            self._read_guests()
        for old in earlier:
            del self.replacements[old]  # its claim is not moved (rule 13)
            self.reasons.setdefault(old, 'another attempt holds a claim for it. Try: the same command in two minutes')
        for _ in range(MAX_ROUNDS):
            chosen = self._plan()
            is_done = self._move(chosen)
            self._read_guests()
            if is_done:
                break
        for guest in self.survey.guests.get(self.compute, ()):
            instance = guest.request.instance
            reason = self.reasons.get(
                instance, 'other attempts took every candidate first. Try: the same command again'
            )
            self.report(Evacuated(instance, get_holdings(guest.request).name, reason=reason))

    def _read_guests(self) -> Sequence[Guest]:
        self.survey = read_moves(self.store, self.placement, self.read_alive(), [self.compute])
        return self.survey.guests.get(self.compute, ())

    def _choose_replacements(self, guests: Sequence[Guest]) -> None:
        """Choose the uuid of each new instance, or note why the guest stays."""
        index, user_data = read_index(self.store), self.store.snapshot(keys.USER_DATA, keys_only=True).entries
        for guest in guests:
            request = guest.request
            if isinstance(request, InvalidRequest):
                continue  # the plan says why it stays
            try:
                sha256 = request.user_data_sha256
                if sha256 is not None and keys.user_data(sha256) not in user_data:
                    raise Conflict('its user-data is no longer in etcd. Fix: destroy it, and create it again')
                if len(index.requests.get(request.instance, ())) > 1:
                    raise Conflict('several computes have a request for it. Try: eschedule audit')
                self.replacements[request.instance] = self._choose_replacement(request, index)
            except Unreachable:
                raise
            except EcompError as error:
                self.reasons[request.instance] = str(error)

    def _choose_replacement(self, request: Request, index: KeyIndex) -> _Replacement:
        """Choose a uuid without a claim on a silent compute, which may run the instance; Conflict if it was used."""
        place = find_next_place(self.store, request)
        instance = place.instance if place else keys.derive_uuid(request.instance, 'evacuated')
        if instance in index.requests or instance in index.records:
            raise Conflict(f'instance {instance} replaces it already, as after a restore of etcd. Try: eschedule audit')
        while True:
            held = read_consumer(self.placement, instance).allocations
            claimed_on = find_compute(held)
            if not claimed_on or claimed_on in self.read_alive():
                return _Replacement(instance, place, Candidate(claimed_on, held, None) if claimed_on else None)
            place = place and place._replace(incarnation=place.incarnation + 1)
            instance = place.instance if place else keys.make_uuid(os.urandom(16))

    def _announce(self) -> None:
        """Write the attempt's key; Conflict if another evacuation of the compute is in flight."""
        instances = [each.instance for each in self.replacements.values()]
        value = {'version': 1, 'instances': instances, 'query': None, **self.owner}
        check = partial(check_previous, f'{self.display_name}: another evacuation', self.owner)
        self.revision = announce(self.store, self.lease, self.order.instance, value, True, check)

    def _plan(self) -> dict[str, Candidate]:
        """Choose a candidate for each guest with a replacement; note the reasons of those that stay."""
        guests = [
            guest for guest in self.survey.guests.get(self.compute, ())
            if guest.request.instance in self.replacements or isinstance(guest.request, InvalidRequest)
        ]  # fmt: skip
        moves = self.survey.planner.plan_moves(guests, [self.compute])
        self.reasons |= {move.guest.request.instance: move.reason for move in moves if move.candidate is None}
        return {move.guest.request.instance: move.candidate for move in moves if move.candidate is not None}

    def _move(self, chosen: Mapping[str, Candidate]) -> bool:
        """Claim these candidates by old instance, and deliver what was claimed; return True if nothing was refused."""
        guests = self.survey.guests.get(self.compute, ())
        requests = {guest.request.instance: guest.request for guest in guests if isinstance(guest.request, Request)}
        by_owner: dict[tuple[str, str], dict[str, Candidate]] = {}
        for old, candidate in chosen.items():
            owner = requests[old].user_id, requests[old].project_id
            by_owner.setdefault(owner, {})[self.replacements[old].instance] = candidate
        claimed = set[str]()
        for (user, project), candidates in by_owner.items():
            self.store.keep_alive(self.lease)
            self.attempted += [instance for instance in candidates if instance not in self.attempted]
            claimer = replace(self.claimer, user_id=user, project_id=project, foreign=self.foreign)
            claimed |= claimer.claim_what_fits(candidates)
        if claimed:
            failpoint('evacuation-claimed')
        results = [
            self.replacements[old].instance in claimed and self._move_one(requests[old], candidate)
            for old, candidate in chosen.items()
        ]
        return all(results)

    def _move_one(self, planned: Request, candidate: Candidate) -> bool:
        """Deliver the replacement of a guest, which is claimed; return False if a plan after this one may move it.

        Conflict if the compute is alive again, or another evacuation took over; UnknownOutcome.
        """
        old, (new, place, _) = planned.instance, self.replacements[planned.instance]

        def make_own_change() -> Change:
            return merge_changes(([self.silent], []), make_move(self.store, planned.stack, place, candidate.compute))

        for _ in range(MAX_TRIES):
            self.store.keep_alive(self.lease)
            try:
                entries = find(self.store, old, KeyIndex({old: [keys.request(self.compute, old)]}))
                request = entries.request if entries is not None and entries.record.compute == self.compute else None
                if entries is None or request is None or request.is_tombstone:
                    return True  # it was destroyed in the meantime
                if (request.query, request.group, request.stack) != (planned.query, planned.group, planned.stack):
                    return False
                weigh = request.why.weigh if request.why else SPREAD
                stages = {'requested': str(self.owner['since']), 'scheduled': self.now()}
                moved = Request(
                    allocations=candidate.allocations,
                    why=PlacementReason(weigh, candidate.weight, len(self.read_alive())),
                    **request.copy_fields(instance=new, replaces=old, stack=place or request.stack, stages=stages),
                )
                is_delivered = deliver_with_removals(
                    self.store,
                    [(candidate.compute, moved)],
                    self.condition,
                    [Removal('', entries, is_replaced=True, replaced_by=new)],
                    make_own_change,
                    ends_attempt=False,
                )
            except (Conflict, Unreadable, UsageError) as error:  # of its name, its group or its stack
                self.reasons[old] = str(error)
                return True
            if is_delivered:
                failpoint('evacuated')
                self.attempted.remove(new)
                self.moved_count += 1
                self.report(Evacuated(old, moved.name, new, candidate.compute))
                return True
            check_silent(self.store, self.compute, self.display_name)
            if not self.is_attempt_ours():  # an unknown outcome was settled by deleting the attempt's key
                self._announce()
        return False
