"""Claims: who holds what, and who may give it away. Two eschedules at one uuid, the claim keeper, sets."""

from __future__ import annotations

from ecomp.errors import Conflict
from ecomp.model import keys
from ecomp.placement import allocations
from ecomp.store.client import Delete
from tests.model.acting import SHAKY, Actor, Bounds
from tests.model.cloud import LARGER, A, B, Cloud, S, U, V
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, within


def orphan_consumer(cloud: Cloud) -> Check:
    """placement ends between its two transactions of a claim, and the same command is given again, with --uuid."""
    cloud.host(A)
    command = cloud.creates('eschedule 1', U, resume=True)

    def check() -> list[str]:
        refused = isinstance(command.outcome, Conflict)
        return [f'refused, and nobody else is at it: {command.outcome}'] if refused else []

    return check


def orphan_consumer_taken_over(cloud: Cloud) -> None:
    """Two eschedules at one uuid, of which one's claim is in its first half when the other one comes."""
    cloud.host(A)
    cloud.creates_twice(U)


def late_release(cloud: Cloud) -> None:
    """An eschedule that could not deliver undoes its claim while the same --uuid is asked again; room for one alone."""
    _late_releases(cloud, 1, room=1)


def _late_releases(cloud: Cloud, number: int, room: int) -> None:
    cloud.host(A, room=room)
    cloud.claimed(U, A)
    for each in range(1, number + 1):
        cloud.abandons(f'eschedule {each}', U, U)
    cloud.creates(f'eschedule {number + 1}', U, resume=True)


def late_release_ample(cloud: Cloud) -> None:
    """The same with room for more, and a message that may be lost."""
    _late_releases(cloud, 1, room=4)


def release_beside_resume(cloud: Cloud) -> None:
    """The same, and nothing is lost."""
    late_release_ample(cloud)


def late_releases(cloud: Cloud) -> None:
    """Two late releases of one claim, so that placement may count from 1 again between them; the same --uuid."""
    _late_releases(cloud, 2, room=4)


def late_releases_of_the_last(cloud: Cloud) -> None:
    """The same with room for one alone."""
    _late_releases(cloud, 2, room=1)


def lost_delivery(cloud: Cloud) -> None:
    """An eschedule's delivery may have no answer, and it may be asked again beside it."""
    cloud.host(A)
    cloud.creates_twice(U)


def late_delivery(cloud: Cloud) -> Check:
    """Whatever an eschedule sends to etcd may arrive after it has given up: what it says then is so for good."""
    cloud.host(A)
    command = cloud.creates('eschedule', U)

    def check() -> list[str]:
        there = any(key.startswith(keys.HOSTS) for key in cloud.etcd.entries)
        refused = isinstance(command.outcome, Conflict)
        return ['said that nothing was delivered, and it was'] if refused and there else []

    return check


def unconfirmed(cloud: Cloud) -> Check:
    """A request without a claim, as somebody may write one: it is not built."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    allocations.release_once(cloud.placement, U, allocations.consumer(cloud.placement, U))
    cloud.may_fail.add(U)
    cloud.works(A, '', host.rounds(2, host.plan))

    def check() -> list[str]:
        return ['it was built'] if host.hypervisor.guests() else []

    return check


def claim_keeper(cloud: Cloud) -> None:
    """A claim that is left on A is due to be released when the same --uuid is asked again."""
    host = cloud.host(A)
    cloud.claimed(U, A)
    host.keep_claims()
    cloud.world.clock += 61.0
    cloud.works(A, 'looking at claims', host.keep_claims)
    cloud.creates('eschedule', U, resume=True)


def one_uuid_twice(cloud: Cloud) -> None:
    """Two eschedules at one uuid, with room for many; either may die, and a message may be lost."""
    cloud.hosts(A, B)
    cloud.creates_twice(U)


def one_uuid_of_two_sizes(cloud: Cloud) -> None:
    """Two eschedules at one uuid, of which the second asks for more; one compute."""
    cloud.host(A)
    cloud.creates('eschedule 1', U, resume=True, seed=1)
    cloud.creates('eschedule 2', U, resume=True, seed=2, query=LARGER)


def set_twice(cloud: Cloud) -> None:
    """Two eschedules at the uuid of a set of two, with room for one on each of two computes."""
    cloud.hosts(A, B, room=1)
    cloud.is_ample = False  # while the other one holds it
    for number in (1, 2):
        cloud.creates(f'eschedule {number}', S, resume=True, seed=number, count=2, minimum=2)


def set_against_single(cloud: Cloud) -> None:
    """A set of two, of which one will do, against a single one that takes the room of one of them; a quota of two."""
    cloud.hosts(A, B, room=1)
    cloud.limited(2)
    cloud.is_ample = False
    cloud.creates('the set', S, seed=1, count=2, minimum=1)
    cloud.creates('the single one', U, seed=2)


def last_place(cloud: Cloud) -> Check:
    """Two requests for the last place: one of them has it."""
    cloud.host(A, room=1)
    cloud.is_ample = False
    both = cloud.creates('eschedule 1', U, seed=1), cloud.creates('eschedule 2', V, seed=2)
    return lambda: has_last_place(cloud, *both)


def has_last_place(cloud: Cloud, *commands: Actor) -> list[str]:
    """Whether one of them has it, where nothing was lost."""
    nobody = not any(isinstance(each.outcome, dict) for each in commands)
    return ['neither has the last place, and nothing failed'] if cloud.is_unharmed and nobody else []


def killed_and_again(cloud: Cloud) -> None:
    """An eschedule may be killed; the same --uuid is asked again at any time, and once more, beside the keeper."""
    host = cloud.host(A, room=1)
    cloud.is_ample = False  # while the other one holds it
    cloud.creates_twice(U)
    cloud.works(A, 'looking at claims', host.rounds(2, host.keep_claims))


def one_place_twice(cloud: Cloud) -> None:
    """Two eschedules at one uuid, and room for it alone: neither is told that there is none."""
    cloud.host(A, room=1)
    cloud.creates_twice(U)


def interrupted(cloud: Cloud) -> None:
    """Ctrl-C at any moment of a create, beside another one at the same uuid."""
    cloud.host(A, room=1)
    cloud.creates_twice(U)


def foreign_claim(cloud: Cloud) -> Check:
    """A consumer that is nobody's instance holds something, and is released by the keeper alone, after two looks."""
    host = cloud.host(A)
    cloud.claimed(V, A)
    cloud.works(A, 'looking at claims', host.rounds(2, host.keep_claims))
    cloud.creates('eschedule', U)

    def check() -> list[str]:
        minute = any(step.fate == 'a minute passes' for step in cloud.world.steps)
        return ['released after one look'] if not minute and V not in cloud.model.held else []

    return check


def claim_of_the_dead(cloud: Cloud) -> Check:
    """Whoever is at a claim dies while the keeper looks: released after two looks that saw nobody, a minute apart."""
    host = cloud.host(A)
    cloud.claimed(U, A)
    cloud.announced(U)
    lease = cloud.etcd.entries[keys.attempt(U)].lease
    cloud.works(A, 'looking at claims', host.rounds(3, host.keep_claims, lambda: cloud.world.sleep(61.0)))
    cloud.act('the lease of the dead', lambda: ModelStore(cloud.etcd).revoke(lease), mortal=False)
    return lambda: _released_early(cloud, 'the lease of the dead')


def claim_of_a_removed_request(cloud: Cloud) -> Check:
    """The same of a request that somebody removes by hand before it is built."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    cloud.works(A, 'looking at claims', host.rounds(3, host.keep_claims, lambda: cloud.world.sleep(61.0)))
    by_hand = ModelStore(cloud.etcd)
    cloud.act('somebody', lambda: by_hand.commit([], [Delete(keys.request(A, U))]), mortal=False)
    return lambda: _released_early(cloud, 'somebody')


def _released_early(cloud: Cloud, who: str) -> list[str]:
    """Whether the keeper released a claim less than a minute after somebody stood behind it."""
    told = [(step.actor, step.call.where if step.call else '') for step in cloud.world.steps]
    end = next((number for number, (actor, _) in enumerate(told) if actor == who), len(told))
    early = U not in cloud.model.held and 'clock' not in [where for _, where in told[end : _release(cloud)]]
    return ['its claim is released, and within the last minute somebody stood behind it'] if early else []


def _release(cloud: Cloud) -> int:
    """Which step it is that releases a claim."""
    calls = (step.call for step in cloud.world.steps)
    return next(number for number, each in enumerate(calls) if each and each.where == 'placement' and each.writes)


LOST = Bounds(2, 1, requests=1, answers=1)
SCENARIOS = [
    *within(Bounds(1, 2, halves=1, kills=1), orphan_consumer),
    *within(Bounds(2, 1, halves=1), orphan_consumer_taken_over),
    *within(
        Bounds(2, 0),
        *(late_release, release_beside_resume, late_releases, late_releases_of_the_last, claim_keeper),
        *(one_uuid_of_two_sizes, one_place_twice),
    ),
    *within(LOST, late_release_ample),
    *within(Bounds(2, 2, answers=1, expiries=1), lost_delivery),
    *within(Bounds(2, 1, late=1), late_delivery),
    *within(SHAKY, unconfirmed, one_uuid_twice, set_against_single, last_place),
    *within(Bounds(2, 1, answers=1), set_twice),
    *within(Bounds(2, 2, kills=1, expiries=1, minutes=1), killed_and_again),
    *within(Bounds(2, 1, interrupts=1), interrupted),
    *within(Bounds(2, 2, minutes=2), foreign_claim),
    *within(Bounds(3, 0), claim_of_the_dead, claim_of_a_removed_request),
]
