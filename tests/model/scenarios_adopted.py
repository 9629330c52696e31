"""Guests that ecomp did not create are adopted and released, beside other changes."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import cast

from ecomp.errors import NoCapacity, NotFound
from ecomp.model import keys, status
from ecomp.model.choose import Offer
from ecomp.model.foreign import ForeignGuest
from ecomp.placement.client import Placement
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.placing.adopt import Adoptee, adopt, read_foreign
from ecomp.scheduler.placing.session import Scheduler
from tests.model.acting import SINGLE_FAULT, Actor, Bounds, Call
from tests.model.cloud import LARGER_QUERY, SIZE, A, B, Cloud, U, V, W
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import FOREIGN
from tests.model.scenarios_evacuated import add_evacuation, add_return, lose_power
from tests.model.scenarios_losses import restore_etcd
from tests.model.scenarios_operators import add_compute_end, add_forget
from tests.model.scenarios_registered import retry
from tests.model.virtual import HOST, NOW, find_pid

DOMAINS = {U: ForeignGuest(U, 'mail', True, size=SIZE), V: ForeignGuest(V, 'db', True, size=SIZE)}


def add_guests(cloud: Cloud, *instances: str, room: int = 3) -> Compute:
    host = cloud.add_host(A, room)
    host.set_foreign(*(DOMAINS[instance] for instance in instances))
    return host


def run_adoption(cloud: Cloud, *instances: str) -> None:
    store, answer = ModelStore(cloud.etcd), (cast(Placement, cloud.placement), Offer(()))
    owner = {'host': HOST, 'pid': find_pid(), 'since': NOW}
    listed = {guest.instance: guest for guest in read_foreign(store, [A])[0][A].guests}
    if missing := set(instances) - listed.keys():
        raise NotFound(f'A has no guest {missing}')
    scheduler = Scheduler(store, lambda: answer, owner, random.Random(1), lambda: NOW)
    adoptees = [Adoptee(listed[instance], listed[instance].name) for instance in instances]
    adopt(scheduler, A, 'A', adoptees, 'u', 'p', lambda _guest, _sentence: None)


def add_adoption(cloud: Cloud, name: str, *instances: str, earlier: Actor | None = None) -> Actor:
    """Add an adoption, which begins once the earlier actor has ended."""

    def work() -> None:
        run_adoption(cloud, *instances)

    actor = cloud.add_actor(name, work, retry=work, subjects=instances)
    if earlier is not None:
        actor.is_ready = lambda: not earlier.is_active
    return actor


def add_release(cloud: Cloud, instance: str) -> Actor:
    def work() -> str:
        return destroy(ModelStore(cloud.etcd), instance, releases=True)

    return cloud.add_actor('release', work, retry=work, command='destroy', subjects=(instance,))


def _list_running(host: Compute) -> list[ForeignGuest]:
    """Return the domains of others as libvirt's autostart leaves them."""
    return [guest._replace(is_running=True) for guest in host.hypervisor.list_foreign().values()]


def _adopt_now(cloud: Cloud, host: Compute, *instances: str) -> None:
    run_adoption(cloud, *instances)
    host.plan(2)
    host.measure()


def _check_adopted(cloud: Cloud, *instances: str) -> list[str]:
    """Check that these are requested and claimed, and that A is enabled and reserves nothing."""
    provider, names = cloud.model.providers[A], cloud.world.names
    problems = ['A stays disabled'] if status.DISABLED in provider.traits else []
    for instance in instances:
        if keys.request(A, instance) not in cloud.etcd.entries or A not in cloud.model.held.get(instance, {}):
            problems.append(f'{names[instance]} is not adopted')
    return problems


def _make_check(cloud: Cloud, adoption: Actor, *instances: str, others: Sequence[str] = ()) -> Check:
    """Return a check: the adoption adopts all if it succeeds, and is not refused for room."""

    def check() -> list[str]:
        if isinstance(adoption.outcome, NoCapacity):
            return [f'{adoption.name} is refused, with room for it: {adoption.outcome}']
        # What another one left that was killed, its own repetition mends.
        is_harmed = any(step.fate and step.actor in others for step in cloud.world.steps)
        is_done = adoption.done and adoption.outcome is None and not is_harmed
        return _check_adopted(cloud, *instances) if is_done else []

    return check


def adopted_and_repeated(cloud: Cloud) -> Check:
    """Two guests are adopted, and a killed or interrupted command is repeated and adopts them."""
    host = add_guests(cloud, U, V)
    cloud.set_instance_limit(5)
    first = add_adoption(cloud, 'adopt', U, V)
    again = add_adoption(cloud, 'adopt again', U, V, earlier=first)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    return _make_check(cloud, again, U, V)


def adopted_and_interrupted(cloud: Cloud) -> Check:
    """The same with Ctrl-C, whose undo enables the host."""
    add_guests(cloud, U, V)
    first = add_adoption(cloud, 'adopt', U, V)
    return _make_check(cloud, add_adoption(cloud, 'adopt again', U, V, earlier=first), U, V)


def adopted_twice(cloud: Cloud) -> Check:
    """Two adoptions of one guest at once, and one of them of another guest, too."""
    host = add_guests(cloud, U, V)
    both, single = add_adoption(cloud, 'adopt --all', U, V), add_adoption(cloud, 'adopt mail', U)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    checks = [_make_check(cloud, both, U, V, others=[single.name]), _make_check(cloud, single, U, others=[both.name])]
    return lambda: [problem for check in checks for problem in check() or ()]


def adopted_beside_a_create(cloud: Cloud) -> Check:
    """A create needs the room that the guest uses: nobody gets it."""
    host = add_guests(cloud, U, room=2)
    cloud.has_ample_room = False
    adoption = add_adoption(cloud, 'adopt', U)
    cloud.add_create('eschedule', W, query=LARGER_QUERY)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    return _make_check(cloud, adoption, U)


def adopted_and_forgotten(cloud: Cloud) -> None:
    """The compute ends and is forgotten during an adoption."""
    add_guests(cloud, U)
    add_adoption(cloud, 'adopt', U)
    add_forget(cloud, A, add_compute_end(cloud, A))


def adopted_and_evacuated(cloud: Cloud) -> Check:
    """The host of two guests, one adopted, is evacuated after a power loss: both run on."""
    host = add_guests(cloud, U, V)
    cloud.add_host(B)
    _adopt_now(cloud, host, U)
    lose_power(cloud, host)
    evacuation = add_evacuation(cloud, 'evacuate')
    add_return(cloud, host, lambda: host.hypervisor.set_foreign(*_list_running(host)))

    def check() -> list[str]:
        moved = evacuation.outcome if isinstance(evacuation.outcome, tuple) else ()
        return ['an adopted guest is replaced' for each in moved if each.replaced_by]

    return check


def adopted_guest_vanishes(cloud: Cloud) -> None:
    """Its owner undefines a guest while it is adopted."""
    host = add_guests(cloud, U, V)
    cloud.allowed_to_fail.add(U)
    add_adoption(cloud, 'adopt', U, V)
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan, lambda: cloud.world.sleep(61.0)))

    def undefine() -> None:
        cloud.world.call(Call('libvirt', ('somebody undefines', U), writes=True), lambda: None)
        host.hypervisor.set_foreign(host.hypervisor.list_foreign()[V])

    cloud.add_actor('virsh undefine', undefine, mortal=False)


def released_and_adopted_again(cloud: Cloud) -> Check:
    """A guest is released, beside a create that needs its room, and adopted again."""
    host = add_guests(cloud, U, room=2)
    cloud.has_ample_room = False
    _adopt_now(cloud, host, U)
    release = add_release(cloud, U)
    cloud.add_create('eschedule', W, query=LARGER_QUERY)
    again = add_adoption(cloud, 'adopt', U, earlier=release)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))
    return _make_check(cloud, again, U)


def released_beside_an_adoption(cloud: Cloud) -> None:
    """An adopted guest is released while an adoption names it and another one."""
    host = add_guests(cloud, U, V)
    _adopt_now(cloud, host, U)
    add_adoption(cloud, 'adopt --all', U, V)
    add_release(cloud, U)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))


def released_and_stopped(cloud: Cloud) -> None:
    """A guest is stopped and released at once."""
    host = add_guests(cloud, U)
    cloud.set_instance_limit(5)
    _adopt_now(cloud, host, U)
    add_release(cloud, U)
    cloud.add_power('stop', U, 'stop')
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan))


def _restore(cloud: Cloud, is_released: bool, with_placement: bool) -> Compute:
    """Adopt U, perhaps release it, and restore etcd or both planes to before the last of these."""
    host = add_guests(cloud, U, V)
    saved, copied = dict(cloud.etcd.entries), copy.deepcopy((cloud.model.rows, cloud.model.held))
    _adopt_now(cloud, host, U)
    if is_released:
        saved, copied = dict(cloud.etcd.entries), copy.deepcopy((cloud.model.rows, cloud.model.held))
        destroy(cloud.store, U, releases=True)
        host.plan(3)
    restore_etcd(cloud, saved)
    if with_placement:
        cloud.exempt(FOREIGN, 'placement is restored to another time than the host')
        cloud.model.rows, cloud.model.held = copied
        cloud.model.writes += 1
    host.is_read_only = True

    def accept() -> None:
        host.is_read_only, host.republishes = False, True
        retry(3, host.restart)
        for _ in range(4):
            host.run_all(host.plan, host.reconcile, host.measure)
            cloud.world.sleep(31.0)

    cloud.add_actor('A, accepting', accept, process=A)
    return host


def adopted_after_the_snapshot(cloud: Cloud) -> Check:
    """An adoption is newer than etcd, and its claim is there: the compute publishes it again."""
    host = _restore(cloud, is_released=False, with_placement=False)
    accept = cloud.world.actors[0]

    def check() -> list[str]:
        is_adopted = keys.request(A, U) in cloud.etcd.entries and host.hypervisor.list_foreign()[U].adopted_by == A
        return [] if is_adopted or not accept.done else ['U is claimed, and not published again']

    return check


def adopted_after_both_snapshots(cloud: Cloud) -> Check:
    """An adoption is newer than etcd and placement: its mark goes."""
    host = _restore(cloud, is_released=False, with_placement=True)
    accept = cloud.world.actors[0]
    return lambda: ['its mark stays'] if accept.done and host.hypervisor.list_foreign()[U].adopted_by else []


def released_after_the_snapshot(cloud: Cloud) -> Check:
    """A release is newer than etcd: the instance is gone, and the guest runs on without a mark."""
    host = _restore(cloud, is_released=True, with_placement=False)
    return lambda: ['it has a mark'] if host.hypervisor.list_foreign()[U].adopted_by else []


def released_after_both_snapshots(cloud: Cloud) -> Check:
    """A release is newer than etcd and placement: the instance lives again, or is gone."""
    host = _restore(cloud, is_released=True, with_placement=True)
    return lambda: ['it has a mark'] if host.hypervisor.list_foreign()[U].adopted_by else []


SCENARIOS = [
    *make_scenarios(Bounds(2, 1, interrupts=1), adopted_and_interrupted),
    *make_scenarios(
        SINGLE_FAULT,
        *(adopted_and_repeated, adopted_twice),
        *(adopted_beside_a_create, adopted_and_forgotten, adopted_and_evacuated, adopted_guest_vanishes),
        *(released_and_adopted_again, released_and_stopped, released_beside_an_adoption, adopted_after_the_snapshot),
        *(adopted_after_both_snapshots, released_after_the_snapshot, released_after_both_snapshots),
    ),
]
