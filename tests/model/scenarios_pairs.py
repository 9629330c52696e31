"""Rare combinations: `clear`, a complete `audit --fix`, flavors, quotas, manual changes."""

from __future__ import annotations

import uuid
from contextlib import suppress

from ecomp.errors import Conflict, NotFound
from ecomp.model import keys
from ecomp.model.group import Membership
from ecomp.scheduler.changing.change import Cleared, clear, destroy
from ecomp.scheduler.operating.audit import fix
from ecomp.scheduler.operating.sharing import delete_flavor
from ecomp.store.client import Delete
from tests.model.acting import SHAKY, Actor, Bounds, Call
from tests.model.cloud import LARGER, TOGETHER, A, B, Cloud, S, U, V
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, within
from tests.model.invariants import CLAIM, NAME
from tests.model.scenarios_operators import ends, forgets, forgetting, sets


def active(cloud: Cloud, instance: str = U, name: str | None = 'web', group: Membership | None = None) -> Compute:
    """Deliver an instance to A and build it."""
    host = cloud.computes.get(A) or cloud.host(A)
    cloud.delivered(instance, A, name, group)
    host.plan(3)
    return host


def clears(cloud: Cloud) -> Actor:
    return cloud.act('clear', lambda: clear(ModelStore(cloud.etcd)), command='clear')


def fixes_all(cloud: Cloud, times: int = 1) -> Actor:
    """Add an `audit --fix` with its checks."""

    def run() -> list[str]:
        lines: list[str] = []
        for _ in range(times):
            fix(ModelStore(cloud.etcd), cloud.placement, lines.append, 61.0)
        return lines

    return cloud.act('audit --fix', run, mortal=False, command='fix')


def cleared_and_used_again(cloud: Cloud) -> None:
    """An instance is destroyed, its record cleared, and its uuid created again, at any moment."""
    host = active(cloud)
    cloud.host(B)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan, host.keep_claims))
    clears(cloud)
    cloud.creates('eschedule', U, resume=True, weigh='first')


def frozen_forget_and_used_again(cloud: Cloud) -> None:
    """Two commands forget a dead compute; its last uuid is cleared and created again."""
    host = active(cloud)
    cloud.host(B)
    cloud.etcd.end(host.presence.lease)
    host.is_dead = True
    destroy(cloud.store, U)

    run_forget = forgetting(cloud, A)
    cloud.act('host forget 1', run_forget, command='forget', about=(A,))
    second = cloud.act('host forget 2', run_forget, command='forget', about=(A,))

    def clear_later() -> Cleared:
        cloud.world.wait('the second to end', lambda: not second.is_at_it)
        return clear(ModelStore(cloud.etcd))

    cleared = cloud.act('clear', clear_later, mortal=False, command='clear')
    command = cloud.creates('eschedule', U, resume=True)
    command.ready = lambda: not cleared.is_at_it


def cleared_beside_queue(cloud: Cloud) -> None:
    """A queued instance is destroyed, cleared and queued again, while it is taken."""
    cloud.host(A)
    place = cloud.waiting(U, 'web')
    cloud.takes(A, place)
    cloud.destroys('destroy', U)
    clears(cloud)
    cloud.enqueues('eschedule --queue', U, resume=True)


def cleared_and_asked_for_more(cloud: Cloud) -> None:
    """A queued instance is destroyed and cleared while it is taken, and created larger."""
    cloud.host(A)
    cloud.takes(A, cloud.waiting(U))
    destroyed = cloud.destroys('destroy', U)
    cleared = clears(cloud)
    cleared.ready = lambda: not destroyed.is_at_it
    create = cloud.creates('eschedule', U, resume=True, query=LARGER)
    create.ready = lambda: not cleared.is_at_it


def fix_beside_a_life(cloud: Cloud) -> None:
    """`audit --fix` with its checks, during a create and the destroy of another instance."""
    cloud.limited(5)
    host = active(cloud, group=TOGETHER)
    fixes_all(cloud)
    cloud.creates('eschedule', V, name='db', group=TOGETHER)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(3, host.plan))


def fix_beside_a_queue(cloud: Cloud) -> None:
    """The same while an instance is queued, taken and destroyed."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.waiting(U, 'web', TOGETHER)
    fixes_all(cloud)
    cloud.works(A, 'taking', host.rounds(2, host.hear_queues, host.pull, host.plan))
    cloud.destroys('destroy', U)


def claim_removed_by_hand(cloud: Cloud) -> None:
    """The claim of an active instance is deleted manually, then repaired or destroyed."""
    host = active(cloud)
    cloud.exempt(CLAIM, 'somebody deletes the claim of what lives')
    cloud.is_ample = False
    cloud.model.held.pop(U)
    cloud.model.rows.pop(U)
    cloud.is_astray = True
    fixes_all(cloud)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan, host.keep_claims))


def claim_removed_in_a_build(cloud: Cloud) -> None:
    """The claim of an instance is deleted manually during its build."""
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    cloud.exempt(CLAIM, 'somebody deletes the claim after placement has confirmed it')
    cloud.may_fail |= {U}
    cloud.is_astray = True

    def remove() -> None:
        cloud.model.held.pop(U, None)
        cloud.model.rows.pop(U, None)
        cloud.model.writes += 1

    call = Call('libvirt', ('somebody deletes the claim', U), writes=True)
    cloud.act('somebody', lambda: cloud.world.call(call, remove), mortal=False)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.creates('eschedule', V)

    def fix_again() -> None:
        fix(cloud.store, cloud.placement, lambda _: None)

    cloud.act('audit --fix later', lambda: None, again=fix_again)


def names_removed_by_hand(cloud: Cloud) -> None:
    """Name and group of an active instance are deleted and repaired during its destroy."""
    host = active(cloud, group=TOGETHER)
    cloud.exempt(NAME, 'somebody deletes the name of what lives')
    cloud.store.commit([], [Delete(keys.name('web')), Delete(keys.group('g'))])
    cloud.is_astray = True
    fixes_all(cloud)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.creates('eschedule', V, group=TOGETHER)
    sets(cloud, 'quota set', 'instances=5')


def request_removed_by_hand(cloud: Cloud) -> Check:
    """The request of an active instance is deleted manually while the instance is destroyed."""
    host = active(cloud, group=TOGETHER)
    store = ModelStore(cloud.etcd)
    cloud.act('somebody', lambda: store.commit([], [Delete(keys.request(A, U))]), mortal=False)
    cloud.works(A, '', host.rounds(2, host.plan, host.planner.recheck, host.keep_claims))
    cloud.destroys('destroy', U)

    def check() -> list[str]:
        if keys.request(A, U) not in cloud.etcd.entries:
            with suppress(NotFound, Conflict):
                destroy(cloud.store, U)
        return []

    return check


def quota_goes_and_comes(cloud: Cloud) -> None:
    """A quota is removed and set again, during a set and a destroy."""
    cloud.limited(5)
    host = active(cloud)
    cloud.host(B)
    sets(cloud, 'quota set none', 'instances=none')
    sets(cloud, 'quota set', 'instances=4')
    cloud.creates('the set', S, count=2, minimum=1)
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(2, host.plan))


def quota_lowered_beside_a_set(cloud: Cloud) -> None:
    """A quota is lowered while a set is delivered and a queued instance is taken."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.is_ample = cloud.is_limited = False
    cloud.waiting(U, 'web')
    sets(cloud, 'quota set', 'instances=2')
    cloud.creates('the set', S, count=2, minimum=1)
    cloud.works(A, 'taking', host.rounds(2, host.hear_queues, host.pull))


def flavor_commands(cloud: Cloud) -> None:
    """A flavor is deleted and set again during a queue, a take and a destroy."""
    host = cloud.host(A)
    cloud.waiting(V)
    store = ModelStore(cloud.etcd)

    def reset_flavor() -> None:
        delete_flavor(store, 'small')
        cloud.flavor()

    cloud.act('flavor delete, and set', reset_flavor, mortal=False)
    cloud.enqueues('eschedule --queue', U)
    cloud.works(A, 'taking', host.rounds(2, host.hear_queues, host.pull, lambda: cloud.world.sleep(6.0)))
    cloud.destroys('destroy', V)


def queue_forget_and_destroy(cloud: Cloud) -> None:
    """A queued instance is destroyed while the compute with its claim is forgotten."""
    cloud.hosts(A, B)
    cloud.limited(5)
    place = cloud.waiting(U, 'web', TOGETHER)
    cloud.claimed(U, A)
    forgets(cloud, A, ends(cloud, A))
    cloud.destroys('destroy', U)
    cloud.takes(B, place)


def queue_and_direct_name(cloud: Cloud) -> None:
    """One name is requested in a queue and directly, and the queued instance is destroyed."""
    host = cloud.host(A)
    cloud.waiting(U, 'web')
    cloud.is_ample = False
    cloud.creates('eschedule', V, name='web')
    cloud.works(A, 'taking', host.rounds(1, host.hear_queues, host.pull))
    cloud.destroys('destroy', U)


def queues_off(cloud: Cloud) -> Check:
    """A compute dies in a take and restarts without queues: the claim is released."""
    host = cloud.host(A, room=1)
    cloud.is_ample = False
    cloud.waiting(U)
    taker = cloud.works(A, 'taking', host.rounds(1, host.hear_queues, host.pull))

    def come_back() -> None:
        cloud.world.wait('the taker to end', lambda: not taker.is_at_it)
        host.takes = False
        host.restart()
        host.pull = host.hear_queues = lambda: False  # type: ignore[method-assign, assignment]
        host.rounds(3, host.plan, host.keep_claims, lambda: cloud.world.sleep(61.0))()

    cloud.act('A without queues', come_back, mortal=False)

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
    cloud.hosts(A, B)
    cloud.limited(5)
    cloud.creates('the set', S, resume=True, seed=1, count=2, minimum=2)
    cloud.creates('its first', FIRST_OF_S, resume=True, seed=2)


def set_and_its_member_built(cloud: Cloud) -> Check:
    """The same while both computes build: the instance never has two guests."""
    set_and_its_member(cloud)
    hosts = [cloud.computes[compute] for compute in (A, B)]
    for host in hosts:
        cloud.works(host.uuid, '', host.rounds(2, host.plan, lambda: cloud.world.sleep(1.0)))

    def check() -> list[str]:
        for host in hosts * 3:
            host.do(host.plan)
        computes = [host.uuid for host in hosts if FIRST_OF_S in host.hypervisor.guests()]
        return [f'one instance is a guest on {len(computes)} computes'] if len(computes) > 1 else []

    return check


def set_and_its_member_in_a_queue(cloud: Cloud) -> None:
    """The same where that instance is queued and taken."""
    cloud.hosts(A, B)
    cloud.limited(5)
    host = cloud.computes[B]
    cloud.creates('the set', S, resume=True, seed=1, count=2, minimum=2)
    cloud.enqueues('eschedule --queue', FIRST_OF_S, resume=True)
    cloud.works(B, 'taking', host.rounds(2, host.hear_queues, host.pull))


SCENARIOS = [
    *within(
        Bounds(2, 0),
        *(set_and_its_member, set_and_its_member_in_a_queue, set_and_its_member_built, frozen_forget_and_used_again),
        *(fix_beside_a_life, fix_beside_a_queue, claim_removed_by_hand, names_removed_by_hand),
    ),
    *within(
        SHAKY,
        *(cleared_and_used_again, cleared_beside_queue, claim_removed_in_a_build, request_removed_by_hand),
        *(quota_goes_and_comes, quota_lowered_beside_a_set, flavor_commands, queue_forget_and_destroy),
        queue_and_direct_name,
    ),
    *within(Bounds(1, 0), cleared_and_asked_for_more),
    *within(Bounds(1, 1, kills=1), queues_off),
]
