"""Lost answers: others use or undo a write's effect before its sender reads it back.

An actor that waits for a state costs no preemption, so that an effect is consumed within few.
"""

from __future__ import annotations

from collections.abc import Callable

from ecomp.model import keys
from ecomp.model.order import parse_request
from ecomp.model.record import from_json
from ecomp.model.states import ACTIVE, GONE
from tests.model.acting import Actor, Bounds
from tests.model.applying import OTHER_IMAGE, add_apply, make_file, run_apply
from tests.model.cloud import AFFINITY, A, B, Cloud, S, U, V
from tests.model.compute import Compute
from tests.model.explorer import make_scenarios
from tests.model.scenarios_evacuated import add_evacuation, die
from tests.model.scenarios_pairs import FIRST_OF_S, add_clear, make_active


def _is_in_state(cloud: Cloud, *states: str) -> bool:
    entry = cloud.etcd.entries.get(keys.record(A, U))
    return entry is not None and from_json(entry.value).state in states


def _is_destroyed(cloud: Cloud) -> bool:
    entry = cloud.etcd.entries.get(keys.request(A, U))
    return entry is not None and bool(getattr(parse_request(A, entry.key, entry.value), 'is_tombstone', False))


def _start_when(actor: Actor, condition: Callable[[], bool], *others: Actor) -> None:
    """Start an actor, which loses no message, when the condition holds or cannot come to hold."""
    actor.mortal = False
    was_met: list[bool] = []

    def is_ready() -> bool:
        if condition() or not any(other.is_active for other in others):
            was_met.append(True)
        return bool(was_met)

    actor.is_ready = is_ready


def _add_build(cloud: Cloud, host: Compute, first: Actor, takes: bool = False) -> Actor:
    build = cloud.add_compute_actor(A, 'building', host.repeat(3, host.take_and_build if takes else host.plan))
    _start_when(build, lambda: any(key.startswith((keys.HOSTS, keys.QUEUES)) for key in cloud.etcd.entries), first)
    return build


def _add_life(cloud: Cloud, host: Compute, first: Actor, takes: bool = False) -> None:
    """Add the whole life of U on A: it is built, destroyed and removed."""
    build, destroy = _add_build(cloud, host, first, takes), cloud.add_destroy('destroy', U)
    _start_when(destroy, lambda: _is_in_state(cloud, ACTIVE), first, build)
    end = cloud.add_compute_actor(A, 'ending', host.repeat(2, host.plan))
    _start_when(end, lambda: _is_destroyed(cloud), first, build, destroy)


def delivery_unanswered(cloud: Cloud) -> None:
    """A delivered instance is built, and destroyed, before its eschedule reads it back."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    _add_life(cloud, host, cloud.add_create('eschedule', U, name='web', group=AFFINITY))


def delivery_unanswered_and_stopped(cloud: Cloud) -> None:
    """A delivered instance is built, and its request rewritten, before it is read back."""
    host = cloud.add_host(A)
    create = cloud.add_create('eschedule', U, name='web')
    build = _add_build(cloud, host, create)
    _start_when(cloud.add_power('stop', U, 'stop'), lambda: _is_in_state(cloud, ACTIVE), create, build)


def enqueue_unanswered(cloud: Cloud) -> None:
    """A queued request is taken, built and destroyed before its eschedule reads it back."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    _add_life(cloud, host, cloud.add_enqueue('eschedule --queue', U), takes=True)


def take_unanswered(cloud: Cloud) -> None:
    """A queued request that was moved is destroyed before its taker reads it back."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    taker = cloud.add_take(A, cloud.enqueue_request(U, 'web', AFFINITY))
    _add_life(cloud, host, taker)


def take_unanswered_beside_another(cloud: Cloud) -> None:
    """Two computes take a queued request, which is destroyed."""
    cloud.add_hosts(A, B)
    place = cloud.enqueue_request(U, 'web')
    for compute in (A, B):
        cloud.add_take(compute, place)
    cloud.add_destroy('destroy', U).mortal = False


def destroy_unanswered(cloud: Cloud) -> None:
    """A destroyed instance is gone, and its record removed, before it is read back."""
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    destroy = cloud.add_destroy('destroy', U)
    end = cloud.add_compute_actor(A, 'ending', host.repeat(2, host.plan))
    _start_when(end, lambda: _is_destroyed(cloud), destroy)
    _start_when(add_clear(cloud), lambda: _is_in_state(cloud, GONE), destroy, end)


def destroy_unanswered_beside_stop(cloud: Cloud) -> None:
    """An instance is stopped and destroyed."""
    host = make_active(cloud)
    cloud.add_destroy('destroy', U)
    cloud.add_power('stop', U, 'stop')
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan)).mortal = False


def stop_unanswered_beside_reboot(cloud: Cloud) -> None:
    """An instance is stopped, and rebooted before the first eschedule reads back."""
    host = make_active(cloud)
    cloud.add_power('stop', U, 'stop')
    cloud.add_power('reboot', U, 'reboot').mortal = False
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan)).mortal = False


def dequeue_unanswered(cloud: Cloud) -> None:
    """A queued request is destroyed twice while it is taken."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    for number in (1, 2):
        cloud.add_destroy(f'destroy {number}', U)
    cloud.add_compute_actor(A, 'taking', host.take_and_build).mortal = False


def end_unanswered(cloud: Cloud) -> None:
    """The record of an end is removed, and its uuid used again, before it is read back."""
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    destroy = cloud.add_destroy('destroy', U)
    destroy.mortal = False
    end = cloud.add_compute_actor(A, 'ending', host.repeat(3, host.plan))
    clear = add_clear(cloud)
    _start_when(clear, lambda: _is_in_state(cloud, GONE), destroy, end)
    again = cloud.add_create('eschedule', U, resume=True, name='web')
    _start_when(again, lambda: clear.done, destroy, end, clear)


def resume_unanswered(cloud: Cloud) -> None:
    """One uuid is created twice, while one of the attempts reads back."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(5)
    cloud.add_two_creates(U)


def set_unanswered_beside_its_member(cloud: Cloud) -> None:
    """A set, and a create of one of its instances, while one of the attempts reads back."""
    cloud.add_hosts(A, B)
    cloud.set_instance_limit(5)
    cloud.add_create('the set', S, resume=True, seed=1, count=2, minimum=2)
    cloud.add_create('its first', FIRST_OF_S, resume=True, seed=2).mortal = False


def apply_unanswered(cloud: Cloud) -> None:
    """A stack is applied twice."""
    cloud.set_instance_limit(5)
    cloud.add_hosts(A, B)
    file = make_file('db/1', 'web/1')
    for number in (1, 2):
        add_apply(cloud, f'apply {number}', file)


def replace_unanswered(cloud: Cloud) -> None:
    """A member of a stack is replaced, and built, before the apply reads it back."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    run_apply(cloud, make_file('web/1'))
    host.plan(3)
    add_apply(cloud, 'apply', make_file('web/1', image=OTHER_IMAGE), replace_all=True)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan)).mortal = False


def evacuation_unanswered(cloud: Cloud) -> None:
    """A guest is evacuated while it is destroyed, and its replacement is built on B."""
    die(cloud, (U, 'web'), (V, 'db')).is_dead = True
    host = cloud.computes[B]
    add_evacuation(cloud, 'evacuate')
    cloud.add_destroy('destroy', U).mortal = False
    cloud.add_compute_actor(B, '', host.repeat(2, host.plan)).mortal = False


ONE_LOST = Bounds(1, 1, requests=1, answers=1, late=1)
USED = Bounds(1, 1, answers=1, late=1)
TWO_LOST = Bounds(1, 2, requests=1, answers=2, late=1, reads=1)
SCENARIOS = [
    *make_scenarios(
        USED,
        *(delivery_unanswered, delivery_unanswered_and_stopped, enqueue_unanswered, take_unanswered),
        *(destroy_unanswered, end_unanswered),
    ),
    *make_scenarios(
        TWO_LOST,
        *(
            take_unanswered_beside_another,
            destroy_unanswered_beside_stop,
            stop_unanswered_beside_reboot,
            dequeue_unanswered,
        ),
        resume_unanswered,
    ),
    *make_scenarios(ONE_LOST, apply_unanswered, replace_unanswered, set_unanswered_beside_its_member),
    *make_scenarios(ONE_LOST._replace(reads=1), evacuation_unanswered),
]
