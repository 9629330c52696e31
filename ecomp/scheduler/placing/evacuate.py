"""Evacuate a dead compute: place each of its guests again from its request.

One transaction writes a tombstone at the old key, and the new request. It compares the old request and the silence of
the compute, so a guest moves exactly once, whoever repeats the command. The attempt protects the claims until then.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ecomp.errors import Conflict, NotFound, PlacementRefusal, TooManyOperations, Unreadable, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import Allocations, find_compute, sum_resources
from ecomp.model.assign import Lot, Planner
from ecomp.model.choose import SPREAD, STRATEGIES, Candidate, Offer
from ecomp.model.group import AFFINITY
from ecomp.model.host import EntriesByCompute, describe_silent_fix, group_by_instance
from ecomp.model.order import InvalidRequest, Request, get_holdings, make_request, parse_request
from ecomp.model.query import list_trees, read_limit
from ecomp.model.stack import Place
from ecomp.placement import allocations
from ecomp.placement.allocations import Requester
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.session import MAX_PLACES_AHEAD, UNCHANGED, OldInstance, Scheduler, Session, require_ended
from ecomp.scheduler.queries.find import from_places
from ecomp.scheduler.queries.stacks import find_next_place, make_move
from ecomp.shared.attempts import find_needed, is_alive, list_leased, read_silence_condition
from ecomp.shared.names import Change, Excluded, change_charge, load_groups, merge_changes
from ecomp.shared.notes import note_released
from ecomp.shared.places import KeyIndex, read_index
from ecomp.store.client import Entry, Store, Unchanged

ADOPTED = 'it is adopted: its disks and its definition are only on its host'
PROTECTED = 'it is protected. Try: --include-protected'
Places = Mapping[str, EntriesByCompute[Entry]]  # by instance


class Evacuee(NamedTuple):
    """A guest on a compute, whose request is no tombstone."""

    compute: str
    request: Request | InvalidRequest


class Move(NamedTuple):
    """The new place of a guest or, without a `candidate`, the `reason` why there is none."""

    guest: Evacuee
    candidate: Candidate | None
    reason: str = ''
    # False if there may be a place nevertheless.
    is_known: bool = True


def plan_moves(
    planner: Planner,
    guests: Iterable[Evacuee],
    dead: Collection[str],
    ahead: int | None = None,
    with_protected: bool = True,
) -> list[Move]:
    """Return where each guest would go if these computes, with all guests on them, were dead.

    All guests of a group that has to be on one compute move, or none. For `ahead` see Planner.assign().
    """
    moves, of_lots, by_instance = list[Move](), dict[Lot, list[str]](), dict[str, Evacuee]()
    for guest in guests:
        if refusal := _find_refusal(planner, guest.request, dead, with_protected):
            moves.append(Move(guest, None, *refusal))
            continue
        request = guest.request
        assert isinstance(request, Request)  # others are refused
        by_instance[request.instance] = guest
        lot = Lot(request.query or '', request.group, _get_strategy(request), ())
        of_lots.setdefault(lot, []).append(request.instance)
    lots = list[Lot]()
    for lot, instances in of_lots.items():
        group = planner.get_group(lot.membership, dead) if lot.membership else None
        is_united = group is not None and group.is_undecided
        if group and is_united and (staying := _find_staying_member(planner, group.name, dead, by_instance)):
            reason = f'group {group.name} has to stay together, and its member {staying} does not move'
            moves += [Move(by_instance[each], None, reason) for each in instances]
        else:
            lots.append(lot._replace(instances=tuple(instances), minimum=None if is_united else 0))
    # No quota is checked: it counts a guest wherever the guest is.
    assignment = planner.assign(lots, dead=dead, ahead=ahead)
    for instance in (each for lot in lots for each in lot.instances):
        candidate = assignment.candidates.get(instance)
        moves.append(Move(by_instance[instance], candidate, assignment.reasons.get(instance, '')))
    return moves


def _get_strategy(request: Request) -> str:
    # A compute that took a request from a queue did not weigh.
    return request.why.weigh if request.why and request.why.weigh in STRATEGIES else SPREAD


def _find_staying_member(planner: Planner, group: str, dead: Collection[str], moving: Collection[str]) -> str:
    members = planner.groups[group].members if group in planner.groups else {}
    return next((each for each, compute in members.items() if compute in dead and each not in moving), '')


def _find_refusal(
    planner: Planner, request: Request | InvalidRequest, dead: Collection[str], with_protected: bool
) -> tuple[str, bool] | None:
    """Return why a request cannot be placed at all, and whether that is known."""
    if isinstance(request, InvalidRequest):
        return f'not known: {request.reason}', False
    if request.is_adopted:
        return ADOPTED, True
    if request.is_protected and not with_protected:
        return PROTECTED, True
    if not (query := request.query):
        return 'not known: its request has no query', False
    if trees := set(dead).intersection(list_trees(query)):
        return f'its query allows only {min(trees)} (in_tree=, or --on)', True
    if query in planner.refusals:
        return planner.refusals[query], True
    limit = read_limit(query) if 'limit' in query else None
    if limit and len(planner.offers[query].candidates) >= int(limit):
        return f'not known: limit={limit} in its query hides candidates', False
    return None


def read_moves(
    store: Store, placement: Placement, alive: Collection[str], computes: Sequence[str] | None = None
) -> tuple[Mapping[str, Sequence[Evacuee]], Planner]:
    """Read the guests of these computes, or of all, and make the planner of their moves."""
    guests: dict[str, list[Evacuee]] = {}

    def collect(entry: Entry) -> None:  # returns None, so no entry is kept
        compute, _, instance = entry.key.removeprefix(keys.HOSTS).partition('/')
        if keys.is_uuid(instance):
            request = parse_request(compute, entry.key, entry.value, entry.dropped_bytes)
            if isinstance(request, InvalidRequest) or not request.is_tombstone:
                guests.setdefault(compute, []).append(Evacuee(compute, request))

    for prefix in [keys.HOSTS] if computes is None else map(keys.request_prefix, computes):
        store.snapshot(prefix, transform=collect)
    everyone = [guest for of_compute in guests.values() for guest in of_compute]
    valid = [(compute, request) for compute, request in everyone if not isinstance(request, InvalidRequest)]
    groups, malformed = load_groups(store, {request.group.name for _, request in valid if request.group})
    if malformed:
        raise Unreadable(keys.group(min(malformed)), ValueError('it is not a valid group'))
    queries = (request.query for compute, request in valid if compute not in list_trees(request.query or ''))
    offers, refusals = _read_offers(placement, dict.fromkeys(filter(None, queries)))
    # The same random choices each time, so that an unchanged cluster gives the same plan.
    return guests, Planner(offers, groups, alive, random.Random(0), refusals, list_leased(store, keys.TROUBLES))


def _read_offers(placement: Placement, queries: Iterable[str]) -> tuple[dict[str, Offer], dict[str, str]]:
    offers, refusals = dict[str, Offer](), dict[str, str]()
    for query in queries:
        try:
            offers[query] = allocations.read_candidates(placement, query)
        except PlacementRefusal as error:
            refusals[query] = str(error)
    return offers, refusals


# Plans of all guests that have not moved, each after a lost race for room.
MAX_ROUNDS = 5
# Transactions for a guest, each after its request changed, or an answer was lost.
MAX_TRIES = 5
# Guests whose keys are read at once; the attempt's lease is refreshed after them.
MAX_GUESTS_PER_READ = 10
# Another uuid for a stack's entry is this much further at most, at random: a compute cannot occupy all of them.
MAX_INCARNATION_STEP = 2**16
# Errors for which a guest stays, and others move.
REFUSALS = (Conflict, TooManyOperations, Unreadable, UsageError)


class Evacuated(NamedTuple):
    """What became of a guest: its replacement on a compute, or the reason why it stays."""

    instance: str
    name: str | None
    replaced_by: str = ''
    compute: str = ''
    reason: str = ''


class _Replacement(NamedTuple):
    """What replaces a guest: its uuid, its place in a stack, and an earlier attempt's claim."""

    request: Request
    instance: str
    place: Place | None
    claim: Candidate | None


def require_silence(store: Store, compute: str, display_name: str) -> Unchanged:
    """Return the condition that the compute stays silent, or raise Conflict if it is alive."""
    silent = read_silence_condition(store, compute)
    if silent is None:
        cure = f'switch the machine off, and repeat the command once `eschedule hosts` shows {display_name} as silent'
        raise Conflict(f'{display_name}: its ecompute is alive, and its guests may run. Fix: {cure}')
    return silent


def evacuate(
    scheduler: Scheduler, compute: str, display_name: str, report: Callable[[Evacuated], None], with_protected: bool
) -> list[str]:
    """Place again each guest of a compute that the operator has fenced and disabled.

    `report` gets the outcome of each guest. Then the claims on the compute that no request owns are released. The
    consumers of these are returned.
    """
    require_silence(scheduler.store, compute, display_name)
    session = Session(scheduler, keys.derive_uuid(compute, 'evacuate'), (), Requester('', ''))
    evacuation = _Evacuation(session, compute, display_name, report, with_protected)
    session.after_undo = evacuation.describe_moved
    with session.open():
        evacuation.move_all()
    session.undo()  # claims for guests that were destroyed or changed in the meantime
    with suppress(NotFound):  # `host forget` came first
        return _release_orphans(scheduler.store, session.placement, compute)
    return []


def _release_orphans(store: Store, placement: Placement, compute: str) -> list[str]:
    def find_kept(holding: Mapping[str, Allocations]) -> Collection[str]:
        return holding if is_alive(store, compute) else find_needed(store, holding, compute)

    # Placement first: a claim that is delivered later has its key in etcd by then.
    consumers = allocations.read_provider_allocations(placement, compute)
    requested = map(keys.get_last_part, store.snapshot(keys.request_prefix(compute), keys_only=True).entries)
    orphans = consumers.keys() - set(requested)
    results = allocations.release(placement, orphans, find_kept, partial(note_released, store))
    return [consumer for consumer, is_released in results.items() if is_released]


@dataclass
class _Evacuation:
    """One evacuation, whose mappings are by the old instance."""

    session: Session
    compute: str
    display_name: str
    report: Callable[[Evacuated], None]
    with_protected: bool
    planner: Planner = field(init=False)
    guests: Mapping[str, Evacuee] = field(init=False)
    replacements: dict[str, _Replacement] = field(default_factory=dict)
    # Why guests stay.
    reasons: dict[str, str] = field(default_factory=dict)
    departures: set[str] = field(default_factory=set)

    def describe_moved(self) -> str:
        return f'{len(self.departures)} instances were evacuated before' if self.departures else ''

    def move_all(self) -> None:
        self._read_guests()
        self._choose_replacements()
        if self.replacements:
            self._announce()
        failpoint('evacuation-announced')
        for _ in range(MAX_ROUNDS):
            if not (chosen := self._plan()):
                break
            self._move(chosen)
            requested = self.session.store.snapshot(keys.request_prefix(self.compute), keys_only=True).entries
            if self.departures.issuperset(map(keys.get_last_part, requested)):
                return
            self._read_guests()  # also those that an attempt in flight has delivered since
        self._release_adopted()
        for old, guest in self.guests.items():
            reason = self.reasons.get(old, 'its new place was taken, or it was changed. Try: the same command again')
            self.report(Evacuated(old, get_holdings(guest.request).name, reason=reason))

    def _release_adopted(self) -> None:
        from ecomp.scheduler.changes.change import destroy  # few hosts have such guests

        for old, guest in self.guests.items():
            if isinstance(guest.request, Request) and guest.request.is_adopted:
                with suppress(*REFUSALS, NotFound):
                    destroy(self.session.store, old, releases=True)
                    self.reasons[old] = f'{ADOPTED}. It is released, and is not managed any more'

    def _read_guests(self) -> None:
        session = self.session
        guests, self.planner = read_moves(session.store, session.placement, session.read_alive(), [self.compute])
        self.guests = {guest.request.instance: guest for guest in guests.get(self.compute, ())}

    def _choose_replacements(self) -> None:
        index = read_index(self.session.store)
        user_data = self.session.store.snapshot(keys.USER_DATA, keys_only=True).entries
        for old, (_, request) in self.guests.items():
            if isinstance(request, InvalidRequest) or request.is_adopted:
                continue  # the plan says why it stays
            try:
                if request.user_data_sha256 and keys.user_data(request.user_data_sha256) not in user_data:
                    raise Conflict('its user-data is no longer in etcd. Fix: destroy it, and create it again')
                if len(index.requests.get(old, ())) > 1:
                    raise Conflict('several computes have a request for it. Try: eschedule check')
                place = find_next_place(self.session.store, request, self.compute)
                new = place.instance if place else keys.derive_uuid(old, 'evacuated')
                self.replacements[old] = _Replacement(request, new, place, None)
            except REFUSALS as error:
                self.reasons[old] = str(error)
        claimed_here = allocations.read_provider_allocations(self.session.placement, self.compute)
        consumers = {each.instance for each in self.replacements.values()} | self.replacements.keys() - claimed_here
        holders = allocations.read_consumers(self.session.placement, consumers)
        claims = {uuid: each.allocations for uuid, each in holders.items()}
        for old, replacement in list(self.replacements.items()):
            del self.replacements[old]
            try:
                if (claimed_on := find_compute(claims.get(old, {}))) not in ('', self.compute):
                    host = self.session.get_display_name(claimed_on)
                    raise Conflict(f'it is claimed on {host}, which may run it. Try: eschedule check')
                self.replacements[old] = self._take_claim(replacement, claims[replacement.instance], index)
            except REFUSALS as error:
                self.reasons[old] = str(error)

    def _take_claim(self, replacement: _Replacement, claim: Allocations, index: KeyIndex) -> _Replacement:
        """Return the replacement with an earlier attempt's claim, or with another uuid if need be."""
        while True:
            instance, claimed_on = replacement.instance, find_compute(claim)
            is_listed = instance in index.requests or instance in index.records
            if claimed_on and claimed_on != self.compute:
                host, problem = self.session.get_display_name(claimed_on), f'its replacement {instance} is claimed on'
                if claimed_on not in self.session.read_alive():
                    cure = describe_silent_fix(host, '')
                    raise Conflict(f'{problem} {host}, which is silent and may run it. Fix: {cure}')
                if is_listed:
                    raise Conflict(f'{problem} {host}, as after a restore of etcd. Try: eschedule check')
                self.session.foreign.add(instance)
                return replacement._replace(claim=Candidate(claimed_on, claim, None))
            if not claimed_on and not is_listed:
                return replacement
            # Only etcd has this uuid, where any compute may write it, or its claim is on the evacuated compute, which
            # is off (rule: shown-not-acted-on).
            place, step = replacement.place, self.session.scheduler.rng.randint(1, MAX_INCARNATION_STEP)
            place = place and place._replace(incarnation=place.incarnation + step)
            instance = place.instance if place else keys.make_uuid(os.urandom(16))
            replacement = replacement._replace(instance=instance, place=place)
            claim = allocations.read_consumer(self.session.placement, instance).allocations

    def _announce(self) -> None:
        self.session.instances = [each.instance for each in self.replacements.values()]
        outcome = self.describe_moved() or UNCHANGED
        other, owner = f'{self.display_name}: another evacuation', self.session.scheduler.owner
        self.session.announce(None, partial(require_ended, other, owner, outcome=outcome))

    def _plan(self) -> dict[str, Candidate]:
        """Return {guest: where to place it again}, and note in `reasons` why the others stay."""
        guests = [
            guest for old, guest in self.guests.items()
            if old in self.replacements or isinstance(guest.request, InvalidRequest)
        ]  # fmt: skip
        # The places of older attempts are left to them, without waiting for their end: the host is dead.
        ahead = min(self.session.count_in_flight()[0], MAX_PLACES_AHEAD)
        planned = plan_moves(self.planner, guests, [self.compute], ahead or None, self.with_protected)
        moves = {move.guest.request.instance: move for move in planned}
        self.reasons |= {old: move.reason for old, move in moves.items() if move.candidate is None}
        claims = {old: self.replacements[old].claim for old in moves.keys() & self.replacements.keys()}
        chosen = {old: each for old, move in moves.items() if (each := claims.get(old) or move.candidate) is not None}
        for unit in self._list_units(chosen):
            if len({chosen[old].compute for old in unit}) > 1:
                why = 'its group has to stay together, and an earlier attempt has claimed a place elsewhere'
                for old in unit:
                    self.reasons[old] = f'{why}. Try: the same command in two minutes'
                    del chosen[old]
        return chosen

    def _move(self, targets: Mapping[str, Candidate]) -> None:
        by_requester: dict[Requester, dict[str, Candidate]] = {}
        for old, candidate in targets.items():
            request, instance, *_ = self.replacements[old]
            requester = Requester(request.user_id, request.project_id)
            by_requester.setdefault(requester, {})[instance] = candidate
        claimed = set[str]()
        for requester, candidates in by_requester.items():
            self.session.store.keep_alive(self.session.lease)
            claimed |= self.session.claim(candidates, requester)
        failpoint('evacuation-claimed')
        waiting = [
            unit for unit in self._list_units(targets)
            if all(self.replacements[old].instance in claimed for old in unit)
        ]  # fmt: skip
        for _ in range(MAX_TRIES):
            unsettled = list[Sequence[str]]()
            for start in range(0, len(waiting), MAX_GUESTS_PER_READ):
                unsettled += self._deliver_some(waiting[start : start + MAX_GUESTS_PER_READ], targets)
            waiting = unsettled

    def _list_units(self, guests: Iterable[str]) -> list[Sequence[str]]:
        units: dict[tuple[str, str], list[str]] = {}
        for old in guests:
            group = self.replacements[old].request.group
            # A group that has to stay together is one unit, so that a host that comes back does not split it.
            is_united = group is not None and group.strict and group.policy == AFFINITY
            units.setdefault((group.name, '') if group and is_united else ('', old), []).append(old)
        return list(units.values())

    def _deliver_some(self, units: Sequence[Sequence[str]], targets: Mapping[str, Candidate]) -> list[Sequence[str]]:
        """Deliver the replacements of these units, and return the units to try again."""
        silent = require_silence(self.session.store, self.compute, self.display_name)
        if not self.session.is_attempt_ours():  # deliver() deletes the attempt's key to settle an unknown outcome
            self._announce()
        guests = [old for unit in units for old in unit]
        own_keys = [key(self.compute, old) for old in guests for key in (keys.request, keys.record)]
        places = group_by_instance(self.session.store.read(own_keys).items())
        return [unit for unit in units if not self._settle(unit, targets, places, silent)]

    def _settle(self, unit: Sequence[str], targets: Mapping[str, Candidate], places: Places, silent: Unchanged) -> bool:
        """Deliver a unit's claimed replacements, or return False to try the same places again."""
        deliveries, removals, computes = list[tuple[str, Request]](), list[OldInstance](), dict[Place, str]()
        resized = list[tuple[Request, Request]]()
        try:
            for old in unit:
                planned, new, place, _ = self.replacements[old]
                entries = from_places(places[old]) if old in places else None
                request = entries.request if entries is not None else None
                if request is not None and request.replaced_by == new:
                    self._report_moved(old, targets[old])  # the answer of its delivery was lost
                if entries is None or request is None or request.is_tombstone:
                    continue  # it has moved, or was destroyed in the meantime
                if request.is_protected and not self.with_protected:
                    raise Conflict(PROTECTED)
                if (request.query, request.group, request.stack) != (planned.query, planned.group, planned.stack):
                    return True
                deliveries.append((targets[old].compute, self._make_request(request, targets[old], new, place)))
                resized += [(request, deliveries[-1][1])] if request.resize else []
                removals.append(OldInstance('', entries, is_replaced=True, replaced_by=new))
                computes |= {place: targets[old].compute} if place else {}
            if not deliveries:
                return True

            def make_own_change() -> Change:
                # What they hold until a change of size has taken effect, which it has in a new guest.
                changes = [make_move(self.session.store, computes, silent)]
                for project in {old.project_id for old, _ in resized}:
                    pairs = [(old.resources, new.resources) for old, new in resized if old.project_id == project]
                    sums = map(sum_resources, zip(*pairs, strict=True))
                    changes.append(change_charge(self.session.store, project, *sums))
                return merge_changes(*changes)

            revision = 0
            with suppress(Excluded):  # others of the group came first
                revision = self.session.deliver(deliveries, make_own_change, removals, ends_attempt=False)
            if revision:
                failpoint('evacuated')
                for _, request in deliveries:
                    self._report_moved(str(request.replaces), targets[str(request.replaces)])
                return True
            self._require_unused(deliveries)
            return False
        except REFUSALS as error:
            self.reasons |= dict.fromkeys(unit, str(error))
            return True

    def _require_unused(self, deliveries: Sequence[tuple[str, Request]]) -> None:
        for compute, request in deliveries:
            new = request.instance
            if self.session.store.get(keys.request(compute, new)) is not None:
                # A create has this uuid, and its claim is not ours to move or to release.
                self.session.movable.discard(new)
                del self.replacements[str(request.replaces)]
                raise Conflict(f'instance {new} exists already. Try: eschedule check')

    def _make_request(self, request: Request, candidate: Candidate, instance: str, place: Place | None) -> Request:
        scheduler, weigh = self.session.scheduler, request.why.weigh if request.why else SPREAD
        stages = {'requested': str(scheduler.owner['since']), 'scheduled': scheduler.now()}
        stack = place or request.stack
        changes = {'instance': instance, 'replaces': request.instance, 'stack': stack, 'stages': stages}
        return make_request(request, candidate, weigh, len(self.session.read_alive()), **changes)

    def _report_moved(self, old: str, candidate: Candidate) -> None:
        request, new, *_ = self.replacements[old]
        self.session.attempted.remove(new)
        self.departures.add(old)
        self.report(Evacuated(old, request.name, new, candidate.compute))
