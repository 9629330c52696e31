"""Rare combinations of two and three commands, such as `clear` and a complete `check --fix`."""

from __future__ import annotations

import uuid
from contextlib import suppress

from ecomp.errors import Conflict, NotFound
from ecomp.model import keys
from ecomp.model.group import Membership
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.operations.audit import fix
from ecomp.scheduler.operations.sharing import delete_flavor
from ecomp.store.client import Delete
from tests.kit.removal import ClearResult, clear
from tests.model import scenarios_operators
from tests.model.acting import SINGLE_FAULT, Actor, Bounds, Call
from tests.model.cloud import AFFINITY, ANTI_AFFINITY, LARGER_QUERY, A, B, Cloud, S, U, V, W
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import CLAIM, NAME
from tests.model.scenarios_operators import add_compute_end, add_drain, add_forget, add_keeper, add_quota_set


def make_active(cloud: Cloud, instance: str = U, name: str | None = 'web', group: Membership | None = None) -> Compute:
    host = cloud.computes.get(A) or cloud.add_host(A)
    cloud.deliver(instance, A, name, group)
    host.plan(3)
    return host


def add_clear(cloud: Cloud) -> Actor:
    return cloud.add_actor('clear', lambda: clear(ModelStore(cloud.etcd)), command='clear')


def add_complete_fix(cloud: Cloud, times: int = 1) -> Actor:
    def run() -> list[str]:
        lines: list[str] = []
        for _ in range(times):
            fix(ModelStore(cloud.etcd), cloud.placement, lines.append, 61.0)
        return lines

    return cloud.add_actor('audit --fix', run, mortal=False, command='fix')


def cleared_and_reused(cloud: Cloud) -> None:
    """An instance is destroyed, its record cleared, and its uuid created again, at any moment."""
    host = make_active(cloud)
    cloud.add_host(B)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, host.reconcile))
    add_clear(cloud)
    cloud.add_create('eschedule', U, resume=True, weigh='first')


def frozen_forget_and_reused(cloud: Cloud) -> None:
    """Two commands forget a dead compute, and its last uuid is cleared and created again."""
    host = make_active(cloud)
    cloud.add_host(B)
    cloud.etcd.end_lease(host.presence.lease)
    host.is_dead = True
    destroy(cloud.store, U)

    run_forget = scenarios_operators.make_forget(cloud, A)
    cloud.add_actor('host forget 1', run_forget, command='forget', subjects=(A,))
    second = cloud.add_actor('host forget 2', run_forget, command='forget', subjects=(A,))

    def clear_later() -> ClearResult:
        cloud.world.wait('the second to end', lambda: not second.is_active)
        return clear(ModelStore(cloud.etcd))

    cleared = cloud.add_actor('clear', clear_later, mortal=False, command='clear')
    command = cloud.add_create('eschedule', U, resume=True)
    command.is_ready = lambda: not cleared.is_active


def cleared_beside_queue(cloud: Cloud) -> None:
    """A queued instance is destroyed, cleared and queued again, while it is taken."""
    cloud.add_host(A)
    place = cloud.enqueue_request(U, 'web')
    cloud.add_take(A, place)
    cloud.add_destroy('destroy', U)
    add_clear(cloud)
    cloud.add_enqueue('eschedule --queue', U, resume=True)


def cleared_and_created_larger(cloud: Cloud) -> None:
    """A queued instance is destroyed and cleared while it is taken, and created larger."""
    cloud.add_host(A)
    cloud.add_take(A, cloud.enqueue_request(U))
    destroyed = cloud.add_destroy('destroy', U)
    cleared = add_clear(cloud)
    cleared.is_ready = lambda: not destroyed.is_active
    create = cloud.add_create('eschedule', U, resume=True, query=LARGER_QUERY)
    create.is_ready = lambda: not cleared.is_active


def fix_beside_create_and_destroy(cloud: Cloud) -> None:
    """`check --fix` with its checks, during a create and the destroy of another instance."""
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    add_complete_fix(cloud)
    cloud.add_create('eschedule', V, name='db', group=AFFINITY)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))


def fix_beside_a_queue(cloud: Cloud) -> None:
    """The same while an instance is queued, taken and destroyed."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    add_complete_fix(cloud)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.read_queues, host.pull, host.plan))
    cloud.add_destroy('destroy', U)


def claim_deleted(cloud: Cloud) -> None:
    """An active instance's claim is deleted, then repaired by its host or destroyed."""
    host = make_active(cloud)
    cloud.exempt(CLAIM, 'somebody deletes the claim of what lives')
    cloud.has_ample_room = False
    cloud.model.held.pop(U)
    cloud.model.rows.pop(U)
    cloud.starts_inconsistent = True
    cloud.add_compute_actor(A, 'repairing', host.claim_again)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, host.reconcile))


def claim_deleted_in_a_build(cloud: Cloud) -> None:
    """The claim of an instance is deleted manually during its build."""
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    cloud.exempt(CLAIM, 'somebody deletes the claim after placement has confirmed it')
    cloud.allowed_to_fail |= {U}
    cloud.starts_inconsistent = True

    def remove() -> None:
        cloud.model.held.pop(U, None)
        cloud.model.rows.pop(U, None)
        cloud.model.writes += 1

    call = Call('libvirt', ('somebody deletes the claim', U), writes=True)
    cloud.add_actor('somebody', lambda: cloud.world.call(call, remove), mortal=False)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_create('eschedule', V)

    def fix_again() -> None:
        fix(cloud.store, cloud.placement, lambda _: None)

    cloud.add_actor('audit --fix later', lambda: None, retry=fix_again)


def names_deleted(cloud: Cloud) -> None:
    """Name and group of an active instance are deleted and repaired during its destroy."""
    host = make_active(cloud, group=AFFINITY)
    cloud.exempt(NAME, 'somebody deletes the name of what lives')
    cloud.store.commit([], [Delete(keys.name('web')), Delete(keys.group('g'))])
    cloud.starts_inconsistent = True
    add_complete_fix(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_create('eschedule', V, group=AFFINITY)
    add_quota_set(cloud, 'quota set', 'instances=5')


def request_deleted(cloud: Cloud) -> Check:
    """The request of an active instance is deleted manually while the instance is destroyed."""
    host = make_active(cloud, group=AFFINITY)
    store = ModelStore(cloud.etcd)
    cloud.add_actor('somebody', lambda: store.commit([], [Delete(keys.request(A, U))]), mortal=False)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, host.planner.recheck, host.reconcile))
    cloud.add_destroy('destroy', U)

    def check() -> list[str]:
        if keys.request(A, U) not in cloud.etcd.entries:
            with suppress(NotFound, Conflict):
                destroy(cloud.store, U)
        return []

    return check


def quota_removed_and_set(cloud: Cloud) -> None:
    """A quota is removed and set again, during a set and a destroy."""
    cloud.set_instance_limit(5)
    host = make_active(cloud)
    cloud.add_host(B)
    add_quota_set(cloud, 'quota set none', 'instances=none')
    add_quota_set(cloud, 'quota set', 'instances=4')
    cloud.add_create('the set', S, count=2, minimum=1)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def quota_lowered_beside_a_set(cloud: Cloud) -> None:
    """A quota is lowered while a set is delivered and a queued instance is taken."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.has_ample_room = cloud.has_quota_from_start = False
    cloud.enqueue_request(U, 'web')
    add_quota_set(cloud, 'quota set', 'instances=2')
    cloud.add_create('the set', S, count=2, minimum=1)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.read_queues, host.pull))


def flavor_commands(cloud: Cloud) -> None:
    """A flavor is deleted and set again during a queue, a take and a destroy."""
    host = cloud.add_host(A)
    cloud.enqueue_request(V)
    store = ModelStore(cloud.etcd)

    def reset_flavor() -> None:
        delete_flavor(store, 'small')
        cloud.set_flavor()

    cloud.add_actor('flavor delete, and set', reset_flavor, mortal=False)
    cloud.add_enqueue('eschedule --queue', U)
    cloud.add_compute_actor(A, 'taking', host.repeat(2, host.read_queues, host.pull, lambda: cloud.world.sleep(6.0)))
    cloud.add_destroy('destroy', V)


def queue_forget_and_destroy(cloud: Cloud) -> None:
    """A queued instance is destroyed while the compute with its claim is forgotten."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(5)
    place = cloud.enqueue_request(U, 'web', AFFINITY)
    cloud.claim(U, A)
    add_forget(cloud, A, add_compute_end(cloud, A))
    cloud.add_destroy('destroy', U)
    cloud.add_take(B, place)


def queue_and_direct_name(cloud: Cloud) -> None:
    """One name is requested in a queue and directly, and the queued instance is destroyed."""
    host = cloud.add_host(A)
    cloud.enqueue_request(U, 'web')
    cloud.has_ample_room = False
    cloud.add_create('eschedule', V, name='web')
    cloud.add_compute_actor(A, 'taking', host.repeat(1, host.read_queues, host.pull))
    cloud.add_destroy('destroy', U)


def queues_off(cloud: Cloud) -> Check:
    """A compute dies in a take and restarts without queues: the claim is released."""
    host = cloud.add_host(A, room=1)
    cloud.has_ample_room = False
    cloud.enqueue_request(U)
    taker = cloud.add_compute_actor(A, 'taking', host.repeat(1, host.read_queues, host.pull))

    def come_back() -> None:
        cloud.world.wait('the taker to end', lambda: not taker.is_active)
        host.takes_from_queues = False
        host.restart()
        host.pull = host.read_queues = lambda: False  # type: ignore[method-assign, assignment]
        host.repeat(3, host.plan, host.reconcile, lambda: cloud.world.sleep(61.0))()

    cloud.add_actor('A without queues', come_back, mortal=False)

    def check() -> list[str]:
        is_queued = any(key.startswith(keys.QUEUES) for key in cloud.etcd.entries)
        problems = ['A holds for ever what it does not take'] if is_queued and U in cloud.model.held else []
        if is_queued and not problems:
            destroy(cloud.store, U)
        return problems

    return check


FIRST_OF_S = str(uuid.uuid5(uuid.UUID(S), '1'))


def set_and_its_member(cloud: Cloud) -> None:
    """A set, and a create of one of its instances: that is one instance on one compute."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(5)
    cloud.add_create('the set', S, resume=True, seed=1, count=2, minimum=2)
    cloud.add_create('its first', FIRST_OF_S, resume=True, seed=2)


def set_and_its_member_built(cloud: Cloud) -> Check:
    """The same while both computes build: the instance never has two guests."""
    set_and_its_member(cloud)
    hosts = [cloud.computes[compute] for compute in (A, B)]
    for host in hosts:
        cloud.add_compute_actor(host.uuid, '', host.repeat(2, host.plan, lambda: cloud.world.sleep(1.0)))

    def check() -> list[str]:
        for host in hosts * 3:
            host.run_all(host.plan)
        computes = [host.uuid for host in hosts if FIRST_OF_S in host.hypervisor.list_guests()]
        return [f'one instance is a guest on {len(computes)} computes'] if len(computes) > 1 else []

    return check


def set_and_its_member_in_a_queue(cloud: Cloud) -> None:
    """The same where that instance is queued and taken."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(5)
    host = cloud.computes[B]
    cloud.add_create('the set', S, resume=True, seed=1, count=2, minimum=2)
    cloud.add_enqueue('eschedule --queue', FIRST_OF_S, resume=True)
    cloud.add_compute_actor(B, 'taking', host.repeat(2, host.read_queues, host.pull))


SCENARIOS = [
    *make_scenarios(
        Bounds(2, 0),
        *(set_and_its_member, set_and_its_member_in_a_queue, set_and_its_member_built, frozen_forget_and_reused),
        *(fix_beside_create_and_destroy, fix_beside_a_queue, claim_deleted, names_deleted),
    ),
    *make_scenarios(
        SINGLE_FAULT,
        *(cleared_and_reused, cleared_beside_queue, claim_deleted_in_a_build, request_deleted),
        *(quota_removed_and_set, quota_lowered_beside_a_set, flavor_commands, queue_forget_and_destroy),
        queue_and_direct_name,
    ),
    *make_scenarios(Bounds(1, 0), cleared_and_created_larger),
    *make_scenarios(Bounds(1, 1, kills=1), queues_off),
]


# Three concurrent commands: a third one acts on what the other two leave to each other.


def keeper_drain_and_create(cloud: Cloud) -> None:
    """An orphaned claim on A is due, A is drained, and the claim's --uuid created again."""
    host = cloud.add_host(A)
    cloud.add_host(B)
    cloud.claim(U, A)
    host.reconcile()
    cloud.world.clock += 61.0
    cloud.add_compute_actor(A, 'looking at claims', host.reconcile)
    cloud.add_create('eschedule', U, resume=True)
    add_drain(cloud, A)


def keeper_drain_and_other_create(cloud: Cloud) -> None:
    """The same where another uuid is created, and the keeper checks twice."""
    host = cloud.add_host(A)
    cloud.has_ample_room = False
    cloud.claim(V, A)
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(2, host.reconcile))
    cloud.add_create('eschedule', U, asks_first=True)
    add_drain(cloud, A)


def keeper_destroy_and_resume(cloud: Cloud) -> None:
    """A compute releases a claim while its uuid is created again and destroyed."""
    host = cloud.add_host(A)
    add_keeper(cloud, U)
    cloud.add_create('eschedule', U, resume=True)
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))


def keeper_taking_and_destroy(cloud: Cloud) -> None:
    """A compute releases a now queued instance's claim, as it is taken and destroyed."""
    cloud.add_host(A)
    add_keeper(cloud, U)
    cloud.add_take(A, cloud.enqueue_request(U))
    cloud.add_destroy('destroy', U)


def quota_two_creates_and_destroy(cloud: Cloud) -> None:
    """A project's first quota is set during two creates and a destroy."""
    host = cloud.add_host(A)
    cloud.has_ample_room, cloud.has_quota_from_start = False, False
    cloud.deliver(W, A)
    host.plan(3)
    add_quota_set(cloud, 'quota set', 'instances=5')
    for number, instance in enumerate((U, V), 1):
        cloud.add_create(f'eschedule {number}', instance, seed=number)
    cloud.add_destroy('destroy', W)
    cloud.add_compute_actor(A, '', host.repeat(1, host.plan))


def group_forget_and_drain(cloud: Cloud) -> None:
    """A member's dead host is forgotten, the other host drained, while one joins the group."""
    cloud.add_hosts(A, B)
    cloud.has_ample_room = False
    cloud.deliver(V, A, group=ANTI_AFFINITY)
    silent = add_compute_end(cloud, A)
    cloud.add_destroy('destroy', V)
    add_forget(cloud, A, silent)
    cloud.add_create('eschedule', U, group=ANTI_AFFINITY)
    add_drain(cloud, B)


def group_with_two_policies(cloud: Cloud) -> None:
    """Two creates make one group with different policies, and one of the hosts is drained."""
    cloud.add_hosts(A, B)
    cloud.has_ample_room = False
    cloud.add_create('eschedule 1', U, seed=1, group=ANTI_AFFINITY)
    cloud.add_create('eschedule 2', V, seed=2, group=Membership('g', 'affinity', True))
    add_drain(cloud, A)


def forget_and_taker(cloud: Cloud) -> None:
    """A taker ends with a claim and is forgotten, and another one takes, and is restarted."""
    cloud.add_hosts(A, B)
    place = cloud.enqueue_request(U)
    cloud.claim(U, A)
    add_forget(cloud, A, add_compute_end(cloud, A))
    other = cloud.computes[B]
    taker = cloud.add_take(B, place)

    def restart() -> None:
        cloud.world.wait('the taker to be killed', lambda: taker.dead)
        other.restart()
        other.repeat(2, other.read_queues, other.pull)()

    cloud.add_actor('B again', restart, process=B)


def late_release_keeper_and_resume(cloud: Cloud) -> None:
    """An eschedule and the keeper release a claim as its uuid is created again."""
    host = cloud.add_host(A)
    cloud.claim(U, A)
    host.reconcile()
    cloud.world.clock += 61.0
    cloud.add_abandon('eschedule 2', U, U)
    cloud.add_compute_actor(A, 'looking at claims', host.reconcile)
    cloud.add_create('eschedule 3', U, resume=True)


SCENARIOS += [
    *make_scenarios(
        Bounds(2, 0),
        keeper_drain_and_create,
        group_forget_and_drain,
        group_with_two_policies,
        late_release_keeper_and_resume,
    ),
    *make_scenarios(Bounds(2, 2, minutes=2), keeper_drain_and_other_create),
    *make_scenarios(SINGLE_FAULT, keeper_destroy_and_resume, keeper_taking_and_destroy, forget_and_taker),
    *make_scenarios(Bounds(2, 1, answers=1), quota_two_creates_and_destroy),
]
