"""Take requests from the queues for one compute.

A take puts the taker key, reads this compute's room, claims on its provider, and moves the request to its /hosts key.
The taker key is on the presence's lease and the move compares it, so a compute frozen beyond its lease moves nothing.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice

from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.instance.records import get_revision
from ecomp.agent.jobs import Deferrals, FailureLog, Loop
from ecomp.errors import ClaimedElsewhere, Conflict, EcompError, NoCapacity, NotFound, PlacementRefusal, UsageError
from ecomp.failpoints import failpoint
from ecomp.model import keys, queue
from ecomp.model.allocation import Inventory, Provider, find_compute, sum_resources
from ecomp.model.cluster import find_accepted_revision
from ecomp.model.flavor import Flavor
from ecomp.model.group import MAX_MEMBERS, Group, Membership, resolve_group
from ecomp.model.host import PresenceFacts, is_ours, list_unproven
from ecomp.model.parsers import MAX_REASON_CHARACTERS
from ecomp.model.queue import Backlog, QueueEntry, QueueTaker, WaitingEntry
from ecomp.model.record import Failure, make_record, parse_or_none
from ecomp.model.states import ERROR, GONE, RETENTION_SECONDS
from ecomp.model.status import DISABLED
from ecomp.model.stored import decode_lenient, encode
from ecomp.model.text import join_some
from ecomp.placement import allocations, providers
from ecomp.placement.allocations import Requester, claim, read_consumer, release
from ecomp.placement.client import Placement
from ecomp.placement.providers import read_provider
from ecomp.shared import ends, notes
from ecomp.shared.attempts import NOT_QUEUED, find_needed
from ecomp.shared.names import Excluded, commit_with_shared, join_group, load_groups, make_empty_change, merge_changes
from ecomp.shared.presence import are_presences_proven
from ecomp.store.client import Delete, Exists, Put, Settlement, Store, Unchanged
from ecomp.store.watch import State

log = logging.getLogger(__name__)

SILENT_CACHE_SECONDS = 5.0


class Queues:
    """What a process knows of the queues, and of the computes that may take."""

    def __init__(self, start_revision: int = 0, first_seen_revision: int = 0) -> None:
        self.backlog: Backlog | None = None  # None before the queues were read
        self.taker_count = 0  # living computes that take from queues
        self.accepted_revision = 0  # the highest revision at which any compute accepted this etcd
        # etcd's revision when this process started, and that at which this host first saw or accepted etcd.
        self.start_revision, self.first_seen_revision = start_revision, first_seen_revision
        self._presences: State = {}
        self._takers: Mapping[str, bool] = {}
        self._silent, self._silent_read_at = list[str](), -math.inf

    # The follower's thread calls on_…().
    def on_computes(self, state: State) -> None:
        self._takers = {
            key: self._takers[key]
            if self._presences.get(key) is stored
            else bool(stored.lease and decode_lenient(PresenceFacts, stored.value).queues)
            for key, stored in state.items()
        }
        self._presences, self.taker_count = state, sum(self._takers.values())

    def on_accepted(self, state: State) -> None:
        self.accepted_revision = find_accepted_revision(state.values())

    def on_queues(self, state: State) -> bool:
        """Replace the queues, and return whether there may be new requests to take."""
        is_first, self.backlog = self.backlog is None, queue.update_backlog(state, self.backlog or Backlog())
        return is_first or self.backlog.has_new

    def find_silent(self, store: Store, placement: Placement) -> list[str]:
        """Return the computes that are not proven alive, cached for SILENT_CACHE_SECONDS."""
        now = time.monotonic()
        if now - self._silent_read_at > SILENT_CACHE_SECONDS:
            names, is_proven = providers.read_provider_names(placement), are_presences_proven(store)
            silent_uuids = list_unproven(names, self._presences, self.start_revision, is_proven)
            shares = providers.read_rooms(placement, silent_uuids) if silent_uuids else {}
            silent = [uuid for uuid in silent_uuids if is_ours(uuid, uuid, shares.get(uuid, {}))]
            if silent and silent != self._silent:
                shown = join_some(silent, 3)
                log.info('older queued requests are not taken: their guests may run on silent computes: %s', shown)
            self._silent, self._silent_read_at = silent, now
        return self._silent


TAKING = 'taking requests from the queues'
# While queued requests do not fit, the room is read at this interval, at the shorter one if the compute is disabled.
ROOM_INTERVAL_SECONDS = 60.0
DISABLED_INTERVAL_SECONDS = 10.0
# Requests whose groups are read together.
MAX_CANDIDATES = 64
# What a taker notes about a request: another compute holds a claim for it, it was refused, a take failed, or computes
# that its group prefers were left time to take it.
CLAIMED_ELSEWHERE, REFUSED, LOST, YIELDED = 'claimed elsewhere', 'refused', 'lost', 'yielded'


@dataclass(eq=False)
class Taker:
    """Takes requests for one compute, one at a time.

    Only on_hosts() and choose_delay() are thread-safe. After an error of take_next(), mark_room_stale() must be called.
    """

    control: ControlPlane
    get_lease: Callable[[], int]
    queues: Queues
    # Whether this compute may write now.
    may_take: Callable[[], bool]
    # The room of this compute until it is first read.
    initial_inventory: Mapping[str, Inventory]
    # The instances with a domain or disk.
    list_guests: Callable[[], Collection[str]]
    can_build: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self.compute, self._store = self.control.compute, self.control.store
        self._placement, self._now = self.control.placement, self.control.now
        # Instances, and flavors, that could not be taken, until they are tried again.
        self.deferrals = Deferrals()
        self._rng = random.Random()
        # The instances of this compute's requests, and those that we move there ourselves.
        self._instances, self._moves = set[str](), set[str]()
        self._notes: set[tuple[str, str]] = set()
        # Without traits and usage, which are read before a take.
        self._room, self._is_room_stale = Provider(self.compute, self.initial_inventory), False
        self._next_room_read, self._fits_by_query = -math.inf, dict[str, bool]()

    def choose_delay(self) -> float:
        # Longer the fuller this compute is, so that emptier computes go first, and at random, so that few compete.
        return queue.choose_delay(self._room, self.queues.taker_count, self._rng)

    def on_hosts(self, state: State) -> bool:
        """Note this compute's requests, and return whether any came or went that we did not move."""
        before, self._instances = self._instances, {keys.get_last_part(key) for key in state}
        changed = (self._instances ^ before) - self._moves
        self._moves -= self._instances
        self._is_room_stale = self._is_room_stale or bool(changed)
        return bool(changed)

    def mark_room_stale(self) -> None:
        self._is_room_stale = True

    def get_due_time(self) -> float:
        """Return when (monotonic) to call take_next() again if nothing changes, or inf."""
        backlog = self.queues.backlog
        if backlog is None or not self.may_take() or not self.can_build():
            return math.inf
        room_due = self._next_room_read if not all(map(self._fits, backlog.flavors.values())) else math.inf
        return min([room_due, *self.deferrals.get_deferred(time.monotonic()).values()])

    def take_next(self) -> bool:
        """Take the oldest request that fits, and return whether to take again."""
        backlog = self.queues.backlog
        if backlog is None or not self.may_take():
            return False
        self.deferrals.cancel_all_but(backlog.names)
        self._notes = {note for note in self._notes if note[0] in backlog.names}
        self._clear_taker_keys(backlog)
        if not self.can_build():
            return False
        if self._is_room_stale and backlog.entries:
            self._read_room(backlog)
            return True  # the delay depends on the room
        place, now = self._choose(backlog), time.monotonic()
        if place is None and self.get_due_time() <= now:  # a request does not fit
            self._read_room(backlog)
            return True
        if place is not None:
            self._try(place)
        return place is not None

    def _clear_taker_keys(self, backlog: Backlog) -> None:
        """Release the claims, and delete the taker keys, that our dead attempts left."""
        deferred = self.deferrals.get_deferred(time.monotonic())
        for key, revision in backlog.takers.get(self.compute, {}).items():
            instance = keys.get_last_part(key)
            # Not what was just tried, because the followed state may be stale.
            if instance not in deferred:
                self.deferrals.defer(instance)
                self._release_dead_claims([instance])
                self._try_delete_taker_key(key, revision)

    def _release_dead_claims(self, instances: Collection[str]) -> set[str]:
        # Only its own compute releases the claim of a dead attempt (rule: claim-stays).
        guests = self.list_guests() if instances else ()
        # If an instance has a guest, the state directory was lost: a new build finds the guest.
        return {each for each in instances if each not in guests and self.release_claim(each)}

    def _read_room(self, backlog: Backlog) -> None:
        """Release the claims that dead attempts left here, then read this compute's room."""
        self._is_room_stale = False
        try:
            held = allocations.read_provider_allocations(self._placement, self.compute)
        except NotFound:  # the periodic check registers the provider again
            held = {}
        waiting = [place.entry.instance for place in backlog.entries.values()]
        for instance in self._release_dead_claims([each for each in waiting if each in held]):
            log.info('released an old claim of instance %s in placement: its request is still queued', instance)
            held.pop(instance)
        used = sum_resources(held.values())
        provider = read_provider(self._placement, self.compute, traits=True, aggregates=False, used=used)
        provider = provider or Provider(self.compute)
        if provider != self._room:
            self._room, self._fits_by_query = provider, {}
        interval = DISABLED_INTERVAL_SECONDS if DISABLED in provider.traits else ROOM_INTERVAL_SECONDS
        self._next_room_read = time.monotonic() + interval * self._rng.uniform(0.8, 1.0)

    def _fits(self, flavor: Flavor) -> bool:
        if flavor.query not in self._fits_by_query:
            self._fits_by_query[flavor.query] = queue.can_take(flavor, self._room)
        return self._fits_by_query[flavor.query]

    def _choose(self, backlog: Backlog) -> WaitingEntry | None:
        """Return the first waiting request that may be taken now, and defer those that may not."""
        fitting = {query for query, flavor in backlog.flavors.items() if self._fits(flavor)}
        while fitting:
            deferred = self.deferrals.get_deferred(time.monotonic())
            fits = (place for place in backlog.entries.values() if place.entry.flavor.query in fitting)
            due = (each for each in fits if deferred.keys().isdisjoint((each.entry.instance, each.entry.flavor.name)))
            if not (candidates := list(islice(due, MAX_CANDIDATES))):
                break
            names = {place.entry.group.name for place in candidates if place.entry.group is not None}
            groups, unreadable = load_groups(self._store, names)
            for place in candidates:
                instance, own = place.entry.instance, place.entry.group
                group = groups.get(own.name) if own is not None else None
                # An audit reports a malformed group; other requests must not wait for it.
                is_allowed = own is None or (own.name not in unreadable and self._is_allowed(instance, own, group))
                if not is_allowed or self._is_held_elsewhere(instance) or self._may_run_elsewhere(place):
                    self.deferrals.defer(instance)
                elif not self._yields(instance, group):
                    return place
        return None

    def _is_held_elsewhere(self, instance: str) -> bool:
        # A silent compute keeps its claim (rule: claim-stays). Placement is read only if such a claim ended a take.
        note = instance, CLAIMED_ELSEWHERE
        if note not in self._notes:
            return False  # a take finds out: its claim expects that nothing is held
        if find_compute(read_consumer(self._placement, instance).allocations) in ('', self.compute):
            self._notes.discard(note)
        return note in self._notes

    def _may_run_elsewhere(self, place: WaitingEntry) -> bool:
        is_old = place.revision <= max(self.queues.first_seen_revision, self.queues.accepted_revision)
        return is_old and bool(self.queues.find_silent(self._store, self._placement))  # one may have taken it

    def _is_allowed(self, instance: str, membership: Membership, group: Group | None) -> bool:
        try:
            merged = resolve_group(group, membership)
            return merged.explain_exclusion(self.compute) is None and len({*merged.members, instance}) <= MAX_MEMBERS
        except EcompError as error:  # the group was recreated with another policy, which excludes this request
            log.debug('%s', error)
            return False

    def _yields(self, instance: str, group: Group | None) -> bool:
        """Defer the request once, and return True, if its group prefers other computes."""
        best = max([0, *map(group.get_preference, group.member_counts)]) if group is not None else 0
        note = instance, YIELDED
        if group is None or group.get_preference(self.compute) >= best or note in self._notes:
            return False
        self._notes.add(note)
        self.deferrals.defer(instance, queue.MAX_LOAD_DELAY_SECONDS + queue.get_max_jitter(self.queues.taker_count))
        return True

    def _try(self, place: WaitingEntry) -> None:
        """Take the request, or note why not and defer it or its flavor."""
        instance, flavor = place.entry.instance, place.entry.flavor
        self.deferrals.defer(instance)  # also if it is taken, because the followed state may be stale

        def still_fits() -> bool:
            if self._store.read(self._list_own_keys(instance)):
                raise UsageError('this uuid was used on this compute before. Fix: use another uuid')
            # A claim checks the room, but not the traits.
            traits = providers.read_names(self._placement, self.compute, providers.TRAITS)
            if traits != self._room.traits:
                self._room, self._fits_by_query = self._room._replace(traits=traits), {}
            self._is_room_stale = self._is_room_stale or DISABLED in traits  # an operator who enables it waits
            return self._fits(flavor)

        self._moves.add(instance)
        is_taken = False
        try:
            is_taken = self.take(place, still_fits)
            # Most likely another compute was faster, but not twice.
            if not is_taken and (instance, LOST) in self._notes and self._store.get(keys.flavor(flavor.name)) is None:
                self.deferrals.defer(flavor.name)
        except ClaimedElsewhere as error:
            log.info('a queued request is not taken: %s', error)
            self._notes.add((instance, CLAIMED_ELSEWHERE))
        except NoCapacity as error:
            log.debug('%s: %s', instance, error)
            self._is_room_stale = True
            self.deferrals.defer(flavor.name)
        except PlacementRefusal as error:
            self._on_refusal(place, f'placement refuses its claim: {error}')
        except UsageError as error:
            self._on_refusal(place, str(error))
        finally:
            if not is_taken:
                self._moves.discard(instance)
                self._notes.add((instance, LOST))
        if is_taken:
            self._room = self._room.with_usage([flavor.resources])
            # Queries that did not fit fit still less; the others are checked again.
            self._fits_by_query = {query: False for query, fits in self._fits_by_query.items() if not fits}
            log.info('took instance %s from the queue of flavor %s', instance, flavor.name)

    def _on_refusal(self, place: WaitingEntry, reason: str) -> None:
        """Note a request's first refusal, and end the request in error at its second."""
        self._is_room_stale = True
        instance, reason = place.entry.instance, reason[:MAX_REASON_CHARACTERS]
        if (instance, REFUSED) not in self._notes:  # placement may lack our provider, which the next read finds out
            self._notes.add((instance, REFUSED))
        elif self.refuse(place, reason):
            log.error('instance %s is not taken from its queue: %s', instance, reason)

    def take(self, place: WaitingEntry, still_fits: Callable[[], bool] = lambda: True) -> bool:
        """Take the request, or return False if it lost a race or no longer fits this compute.

        Raises:
            NoCapacity: placement has no room here.
            PlacementRefusal: placement never accepts this claim.
            ClaimedElsewhere: another compute holds a claim. Nothing is claimed here.
        """
        waiting, key = place.entry, keys.taker(place.entry.key)
        conditions = Unchanged(waiting.key, place.revision), Unchanged(key, 0), Exists(keys.flavor(waiting.flavor.name))
        put = Put(key, encode(QueueTaker(self.compute)), self.get_lease())
        mark = self._store.commit([*conditions], [put], Settlement())
        if mark is None:
            return False
        failpoint('marked')
        moved = False
        try:
            if not still_fits():
                raise Conflict(f'{waiting.instance}: its request no longer fits on this compute')
            self._claim(waiting, mark)
            failpoint('taken')
            moved = self._move(place, mark)
        except Conflict as error:
            log.debug('%s', error)
        except EcompError:
            # The next read of the room releases a claim that was made.
            self._try_delete_taker_key(waiting.key, mark)
            raise
        if moved:
            failpoint('moved')
            return True
        try:
            self.release_claim(waiting.instance)
        finally:
            self._try_delete_taker_key(waiting.key, mark)
        return False

    def refuse(self, place: WaitingEntry, reason: str) -> bool:
        """End a queued request in error, or return False if it has changed or another takes it."""
        waiting, now = place.entry, self._now()
        if find_compute(read_consumer(self._placement, waiting.instance).allocations) not in ('', self.compute):
            return False
        key, own = waiting.key, self._list_own_keys(waiting.instance)
        stored = self._store.read(own)
        record = make_record(self.compute, waiting.make_request(self.compute, now), now)
        conditions = [Unchanged(key, place.revision), Unchanged(keys.taker(key), 0)]
        conditions += [Unchanged(own_key, get_revision(stored.get(own_key))) for own_key in own]
        if not stored:
            failure = Failure('scheduled', reason, 'nothing remains')
            record = replace(record.enter_state(ERROR, now, 'error'), error=failure)
            return ends.write_final_record(self._store, record, conditions, [key]) is not None
        # An instance that ended here keeps its record, with the reason as its fault. A living one's is not changed.
        operations, shared = list[Put | Delete]([Delete(key)]), make_empty_change
        old = parse_or_none(stored[own[0]].value, waiting.instance, self.compute) if own[0] in stored else None
        # Others keep their name, group and quota.
        if old is not None and old.state in RETENTION_SECONDS and own[1] not in stored:
            operations.append(Put(own[0], encode(replace(old, fault=reason)), stored[own[0]].lease))
            shared = partial(ends.release_shared_keys, self._store, record.enter_state(GONE, now))
        return commit_with_shared(self._store, conditions, operations, shared) is not None

    def _list_own_keys(self, instance: str) -> list[str]:
        return [keys.record(self.compute, instance), keys.request(self.compute, instance)]

    def release_claim(self, instance: str) -> bool:
        """Release our claim for a request that is not taken, and return whether no claim is left."""
        # A claim stays if it is elsewhere or changes, or if an attempt in flight or a request on this compute needs it.
        placement, store = self._placement, self._store
        note = partial(notes.note_released, store)
        # A new order may use the uuid again, and its attempt then takes over our claim.
        results = release(placement, [instance], lambda each: find_needed(store, each, self.compute, NOT_QUEUED), note)
        return bool(results[instance])

    def _claim(self, waiting: QueueEntry, taker_revision: int) -> None:
        key = keys.taker(waiting.key)

        def check() -> None:
            entry = self._store.get(key)
            if entry is None or entry.revision != taker_revision:
                raise Conflict(f'{waiting.instance}: another compute is taking its request, or it was cancelled')

        new_claims = {waiting.instance: {self.compute: waiting.flavor.resources}}
        above = partial(notes.read_highest_released, self._store, new_claims)
        requester = Requester(waiting.user_id, waiting.project_id)
        claim(self._placement, new_claims, requester, check, above)

    def _move(self, place: WaitingEntry, taker_revision: int) -> bool:
        waiting, instance = place.entry, place.entry.instance
        deliveries = [(self.compute, waiting.make_request(self.compute, self._now()))]
        mark = Unchanged(keys.taker(waiting.key), taker_revision)
        own = [Unchanged(waiting.key, place.revision), Unchanged(keys.request(self.compute, instance), 0)]
        join = partial(join_group, self._store, waiting.group, {instance: self.compute})
        try:
            leave = Delete(waiting.key)
            return ends.deliver(self._store, deliveries, mark, None, lambda: merge_changes((own, [leave]), join())) > 0
        except Excluded as error:
            raise Conflict(f'{instance}: its group no longer allows this compute') from error

    def _try_delete_taker_key(self, queue_key: str, taker_revision: int) -> None:
        key = keys.taker(queue_key)
        try:
            self._store.commit([Unchanged(key, taker_revision)], [Delete(key)], Settlement(Delete(key)))
        except EcompError as error:
            log.debug('the taker key of %s is checked again later, or removed with its lease: %s', queue_key, error)


class TakeLoop:
    """Runs the taker of one compute, from the first wake_up() to stop()."""

    def __init__(self, taker: Taker, failures: FailureLog) -> None:
        self._taker = taker
        self._failures, self._deferrals = failures, Deferrals()
        self._next_take = math.inf  # when (monotonic) the compute may take, if it was woken
        self._loop = Loop('queues', self._run)
        self.stop = self._loop.join  # before this `may_take` must return False, or the take in flight goes on

    def wake_up(self, reason: str) -> None:
        """Schedule a take after this compute's delay, unless one is scheduled, from any thread."""
        if self._next_take == math.inf:
            log.debug('woken: %s', reason)
            self._next_take = time.monotonic() + self._taker.choose_delay()
            try:
                self._loop.schedule(self._next_take)
            except RuntimeError:
                self._next_take = math.inf  # or no later wake-up would start the thread
                raise

    def on_hosts(self, state: State) -> None:
        if self._taker.on_hosts(state):
            self.wake_up('the room of this compute changed')

    def _run(self) -> float:
        # New requests do not shorten the back-off after a failure.
        for due in (self._deferrals.get_due_time(TAKING), self._next_take):
            if time.monotonic() < due < math.inf:
                return due
        self._next_take = math.inf
        has_tried = self._failures.attempt(TAKING, self._taker.take_next)
        if has_tried is None:
            self._taker.mark_room_stale()
            return self._deferrals.defer(TAKING)
        self._deferrals.cancel(TAKING)
        if has_tried:
            self.wake_up('more requests may be queued')
        return self._taker.get_due_time()
