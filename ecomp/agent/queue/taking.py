"""Take one request out of its queue: mark it, claim it against ourselves, move it to our own /hosts key.

The mark is on our lease, and the move compares it: whoever was frozen for longer than its lease moves nothing. A claim
that a dead attempt left on another compute is released by that compute, and by nobody else (rule 13).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

from ecomp.agent.instance.instances import ControlPlane
from ecomp.agent.instance.records import older_record, revision_of
from ecomp.errors import Conflict, EcompError, UnknownOutcome
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.allocation import compute_of
from ecomp.model.instance import to_json
from ecomp.model.pull import Place
from ecomp.model.queue import QueueEntry, mark_to_json, marked_by
from ecomp.model.record import ERROR, GONE, KEPT, Failure, new_record
from ecomp.model.record import to_json as record_to_json
from ecomp.placement.allocations import Consumer, consumer
from ecomp.placement.claiming import claim, release
from ecomp.store.client import Delete, Exists, Put, Unchanged
from ecomp.store.released import highest, note
from ecomp.store.requests import in_requests, withdraw
from ecomp.store.sharing import Excluded, commit_with, ended, joined, unshared, write_end

log = logging.getLogger(__name__)


class Taker:
    """Takes for one compute, one request at a time. `lease` is the lease that says that the compute is alive."""

    def __init__(self, control: ControlPlane, lease: Callable[[], int]) -> None:
        self.compute = control.compute
        self.store = control.store
        self.placement = control.placement
        self.now = control.now
        self.lease = lease

    def take(self, place: Place, marked: int = 0, still_fits: Callable[[], bool] = lambda: True) -> bool:
        """Take it; False if somebody else was faster, or it was cancelled: nothing of it is left here then.

        `marked` is the revision of our own mark, if an earlier attempt left one; `still_fits` is asked once there is a
        mark. Errors: NoCapacity (placement has no room here), PlacementRefusal (it takes no such claim), Unreachable,
        Conflict, GenerationConflict: it waits again, and what may be claimed for it is released by let_go(), or used by
        this compute's next take; ClaimedElsewhere: another compute holds a claim for it, and nothing is claimed here.
        """
        waiting = place.waiting
        mark = self._mark(place, marked)
        if mark is None:
            return False
        failpoint('marked')
        moved = False
        try:
            if not still_fits():
                raise Conflict(f'{waiting.instance}: does not fit here any more')
            self._claim(waiting, mark)
            failpoint('taken')
            moved, mark = self._move(place, mark)
        except Conflict as error:
            log.debug('%s', error)
        except EcompError:
            self._give_back_if_possible(waiting.key, mark)
            raise
        if moved:
            failpoint('moved')
            return True
        try:
            self.let_go(waiting.instance)
        finally:
            self._give_back_if_possible(waiting.key, mark)
        return False

    def refuse(self, place: Place, reason: str) -> bool:
        """End one in error that no compute can take, with the reason; False if somebody is at it, or it is not there.

        The record of one that ended here before says the reason as its fault; what lives here stays as it is.
        Where another compute holds a claim for it nothing is done. Errors: Unreachable and its like; asked again it is
        done, or found done.
        """
        waiting, now = place.waiting, self.now()
        if compute_of(consumer(self.placement, waiting.instance).allocations) not in ('', self.compute):
            return False
        key, own = waiting.key, self._own(waiting.instance)
        there = self.store.read(own)
        record = new_record(self.compute, waiting.request(self.compute, now), now)
        conditions = [Unchanged(key, place.revision), Unchanged(keys.taker(key), 0)]
        conditions += [Unchanged(each, revision_of(there.get(each))) for each in own]
        if not there:
            failure = Failure('scheduled', reason, 'nothing was made of it')
            record = replace(record.at(ERROR, now, 'error'), error=failure)
            return write_end(self.store, record, conditions, [key]) is not None
        operations, shared = list[Put | Delete]([Delete(key)]), unshared
        past = older_record(there.get(own[0]), self.compute, waiting.instance)
        if past is not None and past.state in KEPT and own[1] not in there:  # what lives keeps what it shares
            operations.append(Put(own[0], record_to_json(replace(past, fault=reason)), there[own[0]].lease))
            shared = partial(ended, self.store, record.at(GONE, now))
        return commit_with(self.store, conditions, operations, shared) is not None

    def is_used(self, instance: str) -> bool:
        """Whether this compute has or had the instance: no take of it can succeed, and a claim would change its own."""
        return bool(self.store.read(self._own(instance)))

    def _own(self, instance: str) -> list[str]:
        return [keys.record(self.compute, instance), keys.request(self.compute, instance)]

    def give_back(self, queue_key: str, mark: int) -> bool:
        """Take our mark away, so that others may take the request; False if it was not there any more as it was."""
        return withdraw(self.store, keys.taker(queue_key), mark)

    def let_go(self, instance: str) -> bool:
        """Release what this compute holds for a request that it does not take after all; True if nothing is held."""

        def wanted(holding: Mapping[str, Consumer]) -> Collection[str]:
            if self.compute not in holding[instance].allocations:
                return holding
            # Its uuid may have been asked for again meanwhile: whoever is at it holds what it has taken over from us.
            if instance in in_requests(self.store.snapshot(keys.ATTEMPTS)):
                return holding
            return () if self.store.get(keys.request(self.compute, instance)) is None else holding

        return bool(release(self.placement, [instance], wanted, partial(note, self.store))[instance])

    def _mark(self, place: Place, marked: int, is_taken: bool = True) -> int | None:
        """Put our mark; its revision, None if the request is not there any more or somebody else has marked it.

        `is_taken` False: not to take it.
        """
        queue_key, lease = place.waiting.key, self.lease()
        key = keys.taker(queue_key)
        conditions: list[Unchanged | Exists] = [Unchanged(queue_key, place.revision), Unchanged(key, marked)]
        if is_taken:  # of a flavor that is not there nobody takes
            conditions.append(Exists(keys.flavor(place.waiting.flavor.name)))
        try:
            return self.store.commit(conditions, [Put(key, mark_to_json(self.compute), lease)])
        except UnknownOutcome:
            entry = self.store.get(key)
            ours = entry is not None and entry.lease == lease and marked_by(entry.value) == self.compute
            return entry.revision if entry is not None and ours and entry.revision != marked else None

    def _claim(self, waiting: QueueEntry, mark: int) -> None:
        key = keys.taker(waiting.key)

        def check() -> None:
            entry = self.store.get(key)
            if entry is None or entry.revision != mark:
                raise Conflict(f'{waiting.instance}: somebody else is taking it, or it was cancelled')

        wanted = {waiting.instance: {self.compute: waiting.flavor.resources}}
        above = partial(highest, self.store, wanted)
        claim(self.placement, wanted, waiting.user_id, waiting.project_id, check, above)

    def _move(self, place: Place, mark: int) -> tuple[bool, int]:
        """Deliver it to ourselves, once: True when it is, False when it is known that it is not; and our mark then."""
        waiting = place.waiting
        queue_key, instance = waiting.key, waiting.instance
        mark_key, request_key = keys.taker(queue_key), keys.request(self.compute, instance)
        conditions = [
            *(Unchanged(queue_key, place.revision), Unchanged(mark_key, mark)),
            *(Unchanged(keys.record(self.compute, instance), 0), Unchanged(request_key, 0)),
        ]
        request = to_json(waiting.request(self.compute, self.now()))
        operations: list[Put | Delete] = [Delete(queue_key), Delete(mark_key), Put(request_key, request)]
        try:
            written = commit_with(
                self.store,
                conditions,
                operations,
                lambda: joined(self.store, waiting.group, {instance: self.compute}),
            )
            return written is not None, mark
        except Excluded as error:
            raise Conflict(f'{instance}: its group allows it here no more') from error
        except UnknownOutcome:
            # A move that is still on its way could land after a mere look: without its mark as it was it cannot.
            again = self._mark(place, mark, is_taken=False)
            if again is not None:
                return False, again
            if self.give_back(queue_key, mark):
                return False, mark
            return self.store.get(request_key) is not None, mark

    def _give_back_if_possible(self, queue_key: str, mark: int) -> None:
        try:
            self.give_back(queue_key, mark)
        except EcompError as error:
            log.debug('the mark at %s is looked at again, or goes with our lease: %s', queue_key, error)
