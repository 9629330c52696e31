"""Claims and who may release them: eschedules, the claim keeper, sets, sampled computes."""

from __future__ import annotations

from ecomp.errors import Conflict
from ecomp.model import keys
from ecomp.placement import allocations
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.decommission import disable
from ecomp.store.client import Delete
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.cloud import LARGER_QUERY, A, B, C, Cloud, S, U, V
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios


def orphan_consumer(cloud: Cloud) -> Check:
    """The placement server crashes in the middle of a claim, and the command is repeated."""
    cloud.add_host(A)
    command = cloud.add_create('eschedule 1', U, resume=True)

    def check() -> list[str]:
        refused = isinstance(command.outcome, Conflict)
        return [f'refused, and nobody else is at it: {command.outcome}'] if refused else []

    return check


def orphan_consumer_taken_over(cloud: Cloud) -> None:
    """Two eschedules create one uuid, and one's claim is half done when the other begins."""
    cloud.add_host(A)
    cloud.add_two_creates(U)


def late_release(cloud: Cloud) -> None:
    """An eschedule releases its claim late while its --uuid is created again, with room for one."""
    _add_late_releases(cloud, 1, room=1)


def _add_late_releases(cloud: Cloud, releases: int, room: int) -> None:
    cloud.add_host(A, room=room)
    cloud.claim(U, A)
    for index in range(1, releases + 1):
        cloud.add_abandon(f'eschedule {index}', U, U)
    cloud.add_create(f'eschedule {releases + 1}', U, resume=True)


def late_release_ample(cloud: Cloud) -> None:
    """The same with room for more, and a message may be lost."""
    _add_late_releases(cloud, 1, room=4)


def release_beside_resume(cloud: Cloud) -> None:
    """The same, and no message is lost."""
    late_release_ample(cloud)


def late_releases(cloud: Cloud) -> None:
    """Two late releases of one claim while its --uuid is created again.

    Between them the generation may start again.
    """
    _add_late_releases(cloud, 2, room=4)


def late_releases_of_the_last(cloud: Cloud) -> None:
    """The same with room for only one instance."""
    _add_late_releases(cloud, 2, room=1)


def lost_delivery(cloud: Cloud) -> None:
    """A delivery may get no answer while a second eschedule creates the same uuid."""
    cloud.add_host(A)
    cloud.add_two_creates(U)


def late_delivery(cloud: Cloud) -> Check:
    """A write may reach etcd after its eschedule has given up: what it reported stays true."""
    cloud.add_host(A)
    command = cloud.add_create('eschedule', U)

    def check() -> list[str]:
        is_delivered = any(key.startswith(keys.HOSTS) for key in cloud.etcd.entries)
        refused = isinstance(command.outcome, Conflict)
        return ['said that nothing was delivered, and it was'] if refused and is_delivered else []

    return check


def unconfirmed(cloud: Cloud) -> Check:
    """A request that has no claim, as a manual write may leave it, is not built."""
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    allocations.release_once(cloud.placement, U, allocations.read_consumer(cloud.placement, U))
    cloud.allowed_to_fail.add(U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))

    def check() -> list[str]:
        return ['it was built'] if host.hypervisor.list_guests() else []

    return check


def claim_keeper(cloud: Cloud) -> None:
    """An orphaned claim on A is due for release when its --uuid is created again."""
    host = cloud.add_host(A)
    cloud.claim(U, A)
    host.reconcile()
    cloud.world.clock += 61.0
    cloud.add_compute_actor(A, 'looking at claims', host.reconcile)
    cloud.add_create('eschedule', U, resume=True)


def one_uuid_twice(cloud: Cloud) -> None:
    """Two eschedules create one uuid with ample room, and one may be killed, or a message lost."""
    cloud.add_hosts(A, B)
    cloud.add_two_creates(U)


def one_uuid_of_two_sizes(cloud: Cloud) -> None:
    """Two eschedules create one uuid on one compute, and the second requests more."""
    cloud.add_host(A)
    cloud.add_create('eschedule 1', U, resume=True, seed=1)
    cloud.add_create('eschedule 2', U, resume=True, seed=2, query=LARGER_QUERY)


def set_twice(cloud: Cloud) -> None:
    """Two eschedules create one set of two, with room for one instance on each of two computes."""
    cloud.add_hosts(A, B, room=1)
    cloud.has_ample_room = False  # while the other eschedule holds the claims
    for number in (1, 2):
        cloud.add_create(f'eschedule {number}', S, resume=True, seed=number, count=2, minimum=2)


def set_against_single(cloud: Cloud) -> None:
    """A set of two with a minimum of one competes with an instance in a quota of two."""
    cloud.add_hosts(A, B, room=1)
    cloud.set_instance_limit(2)
    cloud.has_ample_room = False
    cloud.add_create('the set', S, seed=1, count=2, minimum=1)
    cloud.add_create('the single one', U, seed=2)


def last_place(cloud: Cloud) -> Check:
    """Two eschedules compete for the last place, and one gets it."""
    cloud.add_host(A, room=1)
    cloud.has_ample_room = False
    commands = cloud.add_create('eschedule 1', U, seed=1), cloud.add_create('eschedule 2', V, seed=2)
    return lambda: check_last_place(cloud, *commands)


def check_last_place(cloud: Cloud, *commands: Actor) -> list[str]:
    """Return a violation if no command got the last place although no message was lost."""
    is_free = not any(isinstance(command.outcome, dict) for command in commands)
    return ['neither has the last place, and nothing failed'] if cloud.is_unharmed and is_free else []


def killed_and_again(cloud: Cloud) -> None:
    """An eschedule may be killed, and its --uuid is created again while the keeper checks."""
    host = cloud.add_host(A, room=1)
    cloud.has_ample_room = False  # while the other eschedule holds the claim
    cloud.add_two_creates(U)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(2, host.reconcile))


def one_place_twice(cloud: Cloud) -> None:
    """Two eschedules create one uuid, with room for it only: neither reports no capacity."""
    cloud.add_host(A, room=1)
    cloud.add_two_creates(U)


def interrupted(cloud: Cloud) -> None:
    """Ctrl-C at any moment of a create while another one creates the same uuid."""
    cloud.add_host(A, room=1)
    cloud.add_two_creates(U)


def foreign_claim(cloud: Cloud) -> Check:
    """A consumer that is not an instance: only the keeper releases it, after two checks."""
    host = cloud.add_host(A)
    cloud.claim(V, A)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(2, host.reconcile))
    cloud.add_create('eschedule', U)

    def check() -> list[str]:
        has_waited = any(step.fate == 'a minute passes' for step in cloud.world.steps)
        return ['released after one look'] if not has_waited and V not in cloud.model.held else []

    return check


def claim_of_the_dead(cloud: Cloud) -> Check:
    """An attempt's owner dies: the keeper releases its claim after two checks, a minute apart."""
    host = cloud.add_host(A)
    cloud.claim(U, A)
    cloud.announce_attempt(U)
    lease = cloud.etcd.entries[keys.attempt(U)].lease
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(3, host.reconcile, lambda: cloud.world.sleep(61.0)))
    cloud.add_actor('the lease of the dead', lambda: ModelStore(cloud.etcd).revoke(lease), mortal=False)
    return lambda: _check_release_time(cloud, 'the lease of the dead')


def claim_of_a_removed_request(cloud: Cloud) -> Check:
    """The same for a request that is deleted manually before it is built."""
    host = cloud.add_host(A)
    cloud.deliver(U, A)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(3, host.reconcile, lambda: cloud.world.sleep(61.0)))
    manual_store = ModelStore(cloud.etcd)
    cloud.add_actor('somebody', lambda: manual_store.commit([], [Delete(keys.request(A, U))]), mortal=False)
    return lambda: _check_release_time(cloud, 'somebody')


def _check_release_time(cloud: Cloud, actor_name: str) -> list[str]:
    """Return a violation if a claim was released within a minute of its justification."""
    places = [(step.actor, step.call.service if step.call else '') for step in cloud.world.steps]
    end = next((number for number, (actor, _) in enumerate(places) if actor == actor_name), len(places))
    is_early = U not in cloud.model.held and 'clock' not in [at for _, at in places[end : _find_release_step(cloud)]]
    return ['its claim is released, and within the last minute somebody stood behind it'] if is_early else []


def _find_release_step(cloud: Cloud) -> int:
    calls = (step.call for step in cloud.world.steps)
    return next(number for number, call in enumerate(calls) if call and call.service == 'placement' and call.writes)


ONE_LOST_MESSAGE = Bounds(2, 1, requests=1, answers=1)
SCENARIOS = [
    *make_scenarios(Bounds(1, 2, halves=1, kills=1), orphan_consumer),
    *make_scenarios(Bounds(2, 1, halves=1), orphan_consumer_taken_over),
    *make_scenarios(
        Bounds(2, 0),
        *(late_release, release_beside_resume, late_releases, late_releases_of_the_last, claim_keeper),
        *(one_uuid_of_two_sizes, one_place_twice),
    ),
    *make_scenarios(ONE_LOST_MESSAGE, late_release_ample),
    *make_scenarios(Bounds(2, 2, answers=1, expiries=1), lost_delivery),
    *make_scenarios(Bounds(2, 1, late=1), late_delivery),
    *make_scenarios(SINGLE_FAULT, unconfirmed, one_uuid_twice, set_against_single, last_place),
    *make_scenarios(Bounds(2, 1, answers=1), set_twice),
    *make_scenarios(Bounds(2, 2, kills=1, expiries=1, minutes=1), killed_and_again),
    *make_scenarios(Bounds(2, 1, interrupts=1), interrupted),
    *make_scenarios(Bounds(2, 2, minutes=2), foreign_claim),
    *make_scenarios(Bounds(3, 0), claim_of_the_dead, claim_of_a_removed_request),
]


# Creates in a large cluster that query sampled computes first, by wrong facts.


EMPTY = {'VCPU': [4, 0], 'MEMORY_MB': [9, 0], 'DISK_GB': [9, 0]}
HALF = {'VCPU': [4, 2], 'MEMORY_MB': [9, 4], 'DISK_GB': [9, 4]}
FULL = {'VCPU': [4, 4], 'MEMORY_MB': [9, 9], 'DISK_GB': [9, 9]}


def sample_against_all(cloud: Cloud) -> Check:
    """Two creates compete for the last place, and only one of them samples computes."""
    cloud.add_host(A, room=1)
    cloud.publish_facts(A, EMPTY)
    cloud.has_ample_room = False
    commands = cloud.add_create('eschedule 1', U, seed=1, large=0), cloud.add_create('eschedule 2', V, seed=2)
    return lambda: check_last_place(cloud, *commands)


def sample_by_stale_facts(cloud: Cloud) -> Check:
    """One full compute publishes that it is empty, an empty one the reverse: the room is found."""
    cloud.add_hosts(A, B, room=1)
    cloud.deliver(V, A)
    cloud.publish_facts(A, EMPTY)
    cloud.publish_facts(B, FULL)
    command = cloud.add_create('eschedule', U, large=0)
    return lambda: _check_placement(cloud, command.outcome, B)


def sample_by_malformed_facts(cloud: Cloud) -> None:
    """One of three computes has malformed facts, one has none, and one is half full."""
    cloud.add_hosts(A, B)
    cloud.add_host(C)
    cloud.publish_facts(A, {'VCPU': 'much'})
    cloud.publish_facts(B, HALF)
    cloud.add_create('eschedule', U, large=0)


def sample_and_dead_compute(cloud: Cloud) -> None:
    """The queried compute may die at any moment, and the same --uuid is created again."""
    cloud.may_freeze_computes = True
    for compute in (A, B):
        host = cloud.add_host(compute)
        cloud.publish_facts(compute, EMPTY)
        cloud.add_compute_actor(compute, '', host.repeat(2, host.plan))
    cloud.add_create('eschedule', U, large=0)


def sample_and_disable(cloud: Cloud) -> Check:
    """The compute with the most room is disabled: a later query about it places nothing there."""
    cloud.add_hosts(A, B)
    cloud.publish_facts(A, EMPTY)
    cloud.publish_facts(B, HALF)
    placement: Placement = cloud.placement
    disable(placement, A, 'A')
    command = cloud.add_create('eschedule', U, large=0)
    return lambda: _check_placement(cloud, command.outcome, B)


def sample_beside_a_set(cloud: Cloud) -> None:
    """A create that samples computes and a set compete for two places, in a quota of two."""
    for compute in (A, B):
        cloud.add_host(compute, room=1)
        cloud.publish_facts(compute, EMPTY)
    cloud.set_instance_limit(2)
    cloud.has_ample_room = False
    cloud.add_create('the set', S, seed=1, count=2, minimum=1)
    cloud.add_create('the single one', U, seed=2, large=0)


def sample_while_facts_are_published(cloud: Cloud) -> Check:
    """A compute publishes facts while etcd's answers may be lost: its fence stays valid."""
    host = cloud.add_host(A)
    problems: set[str] = set()

    def check_fence() -> None:
        entry = cloud.etcd.entries.get(keys.compute(A))
        fence_revision = host.store.fence.condition.revision if host.store.fence else 0
        if cloud.is_unharmed and (entry is None or entry.revision != fence_revision):
            problems.add('its fence is not as it put it')

    def publish(room: object) -> None:
        cloud.publish_facts(A, room)
        check_fence()  # immediately, because the next publication may repair it

    publish(EMPTY)
    cloud.add_create('eschedule', U, large=0)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_compute_actor(A, 'saying what is left', lambda: publish(HALF))

    def check() -> list[str]:
        check_fence()
        return sorted(problems)

    return check


def _check_placement(cloud: Cloud, outcome: object, compute: str) -> list[str]:
    if not cloud.is_unharmed:
        return []
    is_placed = isinstance(outcome, dict) and outcome[U].compute == compute
    return [] if is_placed else [f'it is not placed where there is room: {outcome}']


SCENARIOS += [
    *make_scenarios(
        SINGLE_FAULT,
        sample_against_all,
        sample_by_stale_facts,
        sample_by_malformed_facts,
        sample_and_disable,
        sample_beside_a_set,
    ),
    *make_scenarios(Bounds(2, 2, kills=1, expiries=1), sample_and_dead_compute),
    *make_scenarios(Bounds(2, 1, answers=1), sample_while_facts_are_published),
]
