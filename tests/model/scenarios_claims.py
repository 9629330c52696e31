"""Claims and who may release them: two eschedules at one uuid, the claim keeper, sets."""

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
    """The placement server crashes in the middle of a claim, and the command is repeated."""
    cloud.host(A)
    command = cloud.creates('eschedule 1', U, resume=True)

    def check() -> list[str]:
        refused = isinstance(command.outcome, Conflict)
        return [f'refused, and nobody else is at it: {command.outcome}'] if refused else []

    return check


def orphan_consumer_taken_over(cloud: Cloud) -> None:
    """Two eschedules create one uuid; one's claim is half done when the other begins."""
    cloud.host(A)
    cloud.creates_twice(U)


def late_release(cloud: Cloud) -> None:
    """An eschedule releases its claim late while its --uuid is created again; room for one."""
    _late_releases(cloud, 1, room=1)


def _late_releases(cloud: Cloud, number: int, room: int) -> None:
    cloud.host(A, room=room)
    cloud.claimed(U, A)
    for index in range(1, number + 1):
        cloud.abandons(f'eschedule {index}', U, U)
    cloud.creates(f'eschedule {number + 1}', U, resume=True)


def late_release_ample(cloud: Cloud) -> None:
    """The same with room for more, and a message may be lost."""
    _late_releases(cloud, 1, room=4)


def release_beside_resume(cloud: Cloud) -> None:
    """The same, and no message is lost."""
    late_release_ample(cloud)


def late_releases(cloud: Cloud) -> None:
    """Two late releases of one claim while its --uuid is created again.

    Between them the generation may start again.
    """
    _late_releases(cloud, 2, room=4)


def late_releases_of_the_last(cloud: Cloud) -> None:
    """The same with room for only one instance."""
    _late_releases(cloud, 2, room=1)


def lost_delivery(cloud: Cloud) -> None:
    """A delivery may get no answer while a second eschedule creates the same uuid."""
    cloud.host(A)
    cloud.creates_twice(U)


def late_delivery(cloud: Cloud) -> Check:
    """A write may reach etcd after its eschedule has given up: what it reported stays true."""
    cloud.host(A)
    command = cloud.creates('eschedule', U)

    def check() -> list[str]:
        is_delivered = any(key.startswith(keys.HOSTS) for key in cloud.etcd.entries)
        refused = isinstance(command.outcome, Conflict)
        return ['said that nothing was delivered, and it was'] if refused and is_delivered else []

    return check


def unconfirmed(cloud: Cloud) -> Check:
    """A request that has no claim, as a manual write may leave it, is not built."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    allocations.release_once(cloud.placement, U, allocations.consumer(cloud.placement, U))
    cloud.may_fail.add(U)
    cloud.works(A, '', host.rounds(2, host.plan))

    def check() -> list[str]:
        return ['it was built'] if host.hypervisor.guests() else []

    return check


def claim_keeper(cloud: Cloud) -> None:
    """An orphaned claim on A is due for release when its --uuid is created again."""
    host = cloud.host(A)
    cloud.claimed(U, A)
    host.keep_claims()
    cloud.world.clock += 61.0
    cloud.works(A, 'looking at claims', host.keep_claims)
    cloud.creates('eschedule', U, resume=True)


def one_uuid_twice(cloud: Cloud) -> None:
    """Two eschedules create one uuid with ample room; one may be killed, or a message lost."""
    cloud.hosts(A, B)
    cloud.creates_twice(U)


def one_uuid_of_two_sizes(cloud: Cloud) -> None:
    """Two eschedules create one uuid on one compute; the second requests more."""
    cloud.host(A)
    cloud.creates('eschedule 1', U, resume=True, seed=1)
    cloud.creates('eschedule 2', U, resume=True, seed=2, query=LARGER)


def set_twice(cloud: Cloud) -> None:
    """Two eschedules create one set of two, with room for one instance on each of two computes."""
    cloud.hosts(A, B, room=1)
    cloud.is_ample = False  # while the other eschedule holds the claims
    for number in (1, 2):
        cloud.creates(f'eschedule {number}', S, resume=True, seed=number, count=2, minimum=2)


def set_against_single(cloud: Cloud) -> None:
    """A set of two with a minimum of one competes with a single instance; the quota is two."""
    cloud.hosts(A, B, room=1)
    cloud.limited(2)
    cloud.is_ample = False
    cloud.creates('the set', S, seed=1, count=2, minimum=1)
    cloud.creates('the single one', U, seed=2)


def last_place(cloud: Cloud) -> Check:
    """Two eschedules compete for the last place; one gets it."""
    cloud.host(A, room=1)
    cloud.is_ample = False
    commands = cloud.creates('eschedule 1', U, seed=1), cloud.creates('eschedule 2', V, seed=2)
    return lambda: has_last_place(cloud, *commands)


def has_last_place(cloud: Cloud, *commands: Actor) -> list[str]:
    """Return a violation if no command got the last place although no message was lost."""
    is_free = not any(isinstance(command.outcome, dict) for command in commands)
    return ['neither has the last place, and nothing failed'] if cloud.is_unharmed and is_free else []


def killed_and_again(cloud: Cloud) -> None:
    """An eschedule may be killed; its --uuid is created again while the keeper checks."""
    host = cloud.host(A, room=1)
    cloud.is_ample = False  # while the other eschedule holds the claim
    cloud.creates_twice(U)
    cloud.works(A, 'looking at claims', host.rounds(2, host.keep_claims))


def one_place_twice(cloud: Cloud) -> None:
    """Two eschedules create one uuid, with room for it only: neither reports no capacity."""
    cloud.host(A, room=1)
    cloud.creates_twice(U)


def interrupted(cloud: Cloud) -> None:
    """Ctrl-C at any moment of a create while another one creates the same uuid."""
    cloud.host(A, room=1)
    cloud.creates_twice(U)


def foreign_claim(cloud: Cloud) -> Check:
    """A consumer that is not an instance: only the keeper releases it, after two checks."""
    host = cloud.host(A)
    cloud.claimed(V, A)
    cloud.works(A, 'looking at claims', host.rounds(2, host.keep_claims))
    cloud.creates('eschedule', U)

    def check() -> list[str]:
        has_waited = any(step.fate == 'a minute passes' for step in cloud.world.steps)
        return ['released after one look'] if not has_waited and V not in cloud.model.held else []

    return check


def claim_of_the_dead(cloud: Cloud) -> Check:
    """An attempt's owner dies: the keeper releases its claim after two checks, a minute apart."""
    host = cloud.host(A)
    cloud.claimed(U, A)
    cloud.announced(U)
    lease = cloud.etcd.entries[keys.attempt(U)].lease
    cloud.works(A, 'looking at claims', host.rounds(3, host.keep_claims, lambda: cloud.world.sleep(61.0)))
    cloud.act('the lease of the dead', lambda: ModelStore(cloud.etcd).revoke(lease), mortal=False)
    return lambda: _released_early(cloud, 'the lease of the dead')


def claim_of_a_removed_request(cloud: Cloud) -> Check:
    """The same for a request that is deleted manually before it is built."""
    host = cloud.host(A)
    cloud.delivered(U, A)
    cloud.works(A, 'looking at claims', host.rounds(3, host.keep_claims, lambda: cloud.world.sleep(61.0)))
    manual_store = ModelStore(cloud.etcd)
    cloud.act('somebody', lambda: manual_store.commit([], [Delete(keys.request(A, U))]), mortal=False)
    return lambda: _released_early(cloud, 'somebody')


def _released_early(cloud: Cloud, who: str) -> list[str]:
    """Return a violation if a claim was released within a minute of its justification."""
    places = [(step.actor, step.call.where if step.call else '') for step in cloud.world.steps]
    end = next((number for number, (actor, _) in enumerate(places) if actor == who), len(places))
    is_early = U not in cloud.model.held and 'clock' not in [where for _, where in places[end : _release(cloud)]]
    return ['its claim is released, and within the last minute somebody stood behind it'] if is_early else []


def _release(cloud: Cloud) -> int:
    """Return the index of the step that releases a claim."""
    calls = (step.call for step in cloud.world.steps)
    return next(number for number, call in enumerate(calls) if call and call.where == 'placement' and call.writes)


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
