"""A compute's tasks in threads, a placement that is restored, and commands that only read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ecomp.errors import EcompError, NotFound
from ecomp.model import keys
from ecomp.placement.providers import read_generation
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.operations.audit import fix
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.scheduler.queries.find import find, list_records
from ecomp.store.client import Delete, Put
from tests.model.acting import SINGLE_FAULT, Bounds, Call
from tests.model.cloud import AFFINITY, NAMES, A, B, Cloud, U, V
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import CLAIM
from tests.model.scenarios_operators import add_forget
from tests.model.scenarios_pairs import add_clear, add_complete_fix, make_active
from tests.model.scenarios_registered import make_registration
from tests.model.scenarios_strangers import add_manual_writes
from tests.model.world import World


class ActorLock:
    """A lock between actors. A real lock would block the one thread that runs all of them."""

    def __init__(self, world: World) -> None:
        self._world, self._is_held = world, False

    def __enter__(self) -> None:
        if self._is_held:
            self._world.wait('a lock', lambda: not self._is_held)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


def make_threaded_planning(cloud: Cloud, host: Compute, steps: int, *also: Callable[[], object]) -> Callable[[], None]:
    """Return a compute's planning with a thread for each task."""
    host.memory._lock = ActorLock(cloud.world)  # type: ignore[assignment]

    def plan() -> None:
        for number in range(steps):
            planner, process = host.planner, host.process
            try:
                tasks = planner.step(host.store.snapshot(keys.request_prefix(host.uuid)).entries)
            except EcompError:
                tasks = []
            for task in tasks:
                planner.begin(task)
                name = f'A, its {task.task.kind.value} of {NAMES[task.instance]} ({number})'
                cloud.add_actor(name, partial(planner.carry_out, task), process=process)
            host.run_all(*also)
            cloud.world.sleep(1.0)

    return plan


def built_in_threads(cloud: Cloud) -> None:
    """Two instances are built concurrently and one is destroyed during its build."""
    host = cloud.add_host(A)
    cloud.set_instance_limit(5)
    cloud.deliver(U, A, 'web', AFFINITY)
    cloud.deliver(V, A, 'db')
    set_limits(cloud.store, 'p', ['instances=5'])
    cloud.add_compute_actor(A, 'planning', make_threaded_planning(cloud, host, 4, host.planner.recheck))
    cloud.add_destroy('destroy', U)


def ended_in_threads(cloud: Cloud) -> None:
    """One instance is destroyed and one stopped in threads, and a record is deleted manually."""
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    make_active(cloud, V, 'db')
    set_limits(cloud.store, 'p', ['instances=5'])
    cloud.add_destroy('destroy', U)
    cloud.add_power('stop', V, 'stop')
    cloud.add_compute_actor(A, 'planning', make_threaded_planning(cloud, host, 4, host.planner.recheck))
    add_manual_writes(cloud, 'somebody', Delete(keys.record(A, V)))


def request_removed_in_threads(cloud: Cloud) -> None:
    """A request is deleted manually during its build, and leftovers are destroyed later."""
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    cloud.allowed_to_fail.add(U)
    add_manual_writes(cloud, 'somebody', Delete(keys.request(A, U)))
    cloud.add_compute_actor(A, 'planning', make_threaded_planning(cloud, host, 4, host.planner.recheck))
    cloud.starts_inconsistent = True

    def clean_up() -> None:
        with suppress(NotFound):
            destroy(cloud.store, U)
        host.plan()
        fix(cloud.store, cloud.placement, lambda _: None)

    cloud.add_actor('later', lambda: None, retry=clean_up)


def request_malformed_and_repaired(cloud: Cloud) -> None:
    """A request becomes malformed and is repaired before its build."""
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    cloud.allowed_to_fail.add(U)
    key = keys.request(A, U)
    valid = cloud.etcd.entries[key].value.decode()
    add_manual_writes(cloud, 'somebody', Put(key, '{'), Put(key, valid))
    cloud.add_compute_actor(A, 'planning', make_threaded_planning(cloud, host, 4, host.planner.recheck))


def keeper_with_generations(cloud: Cloud) -> Check:
    """The keeper uses the generation and followed requests, which lag behind."""
    cloud.set_instance_limit(5)
    host = make_active(cloud)
    followed: set[str] = set()

    def follow() -> None:
        followed.clear()
        followed.update(map(keys.get_last_part, host.store.snapshot(keys.request_prefix(A)).entries))

    def keep() -> None:
        generation = read_generation(cloud.placement, A)
        host.keeper.reconcile(host.hypervisor.list_guests(), cloud.world.read_clock(), generation, set(followed))

    cloud.world.state_parts.append(lambda: tuple(sorted(followed)))
    host.reconcile = keep  # type: ignore[method-assign]
    cloud.add_compute_actor(A, 'following', host.repeat(3, follow, lambda: cloud.world.sleep(1.0)))
    cloud.add_compute_actor(A, 'looking at claims', host.repeat(3, keep, lambda: cloud.world.sleep(61.0)))
    cloud.add_compute_actor(A, '', host.repeat(2, host.plan))
    cloud.add_create('eschedule', V, name='db')
    cloud.add_destroy('destroy', U)

    def follow_and_keep() -> None:
        follow()
        keep()

    def check() -> list[str]:
        host.reconcile = follow_and_keep  # type: ignore[method-assign]
        return []

    return check


def placement_restored(cloud: Cloud) -> None:
    """A restore of placement to before U was created, during another create and a destroy."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    saved = copy.deepcopy((cloud.model.providers, cloud.model.rows, cloud.model.held))
    make_active(cloud)
    cloud.exempt(CLAIM, 'placement is restored to before U had its claim')
    cloud.starts_inconsistent = True
    cloud.has_ample_room = False
    cloud.allowed_to_fail |= {U, V}

    def restore_placement() -> None:
        cloud.model.providers, cloud.model.rows, cloud.model.held = copy.deepcopy(saved)
        cloud.model.writes += 1

    call = Call('libvirt', ('placement is restored', U), writes=True)
    cloud.add_actor('somebody', lambda: cloud.world.call(call, restore_placement), mortal=False)
    cloud.add_create('eschedule', V, name='db')
    cloud.add_destroy('destroy', U)
    cloud.add_compute_actor(A, '', host.repeat(3, host.plan, host.reconcile))
    cloud.add_actor('later', lambda: None, retry=lambda: fix(cloud.store, cloud.placement, lambda _: None))


def frozen_taker_forgotten(cloud: Cloud) -> Check:
    """A frozen taker is forgotten, and another one takes, then the first continues."""
    cloud.add_hosts(A, B)
    host = cloud.computes[A]
    place = cloud.enqueue_request(U, 'web')
    cloud.add_take(A, place)

    def freeze() -> None:
        cloud.world.call(Call('libvirt', ('the lease ends of', A), writes=True), lambda: None)
        cloud.etcd.end_lease(host.presence.lease)

    silent = cloud.add_actor('time', freeze, mortal=False)
    add_forget(cloud, A, silent)
    cloud.add_take(B, place)

    def check() -> list[str]:
        own_registration = make_registration(cloud, host)
        own_registration.ensure_registered(lambda: False)
        host.run_all(host.keep_presence)
        return []

    return check


def requested_of_two(cloud: Cloud) -> Check:
    """A second compute is requested to run A's instance: it refuses, and no harm is done."""
    cloud.set_instance_limit(5)
    host = make_active(cloud, group=AFFINITY)
    other = cloud.add_host(B)
    value = json.loads(cloud.etcd.entries[keys.request(A, U)].value)
    value['allocations'] = {B: value['allocations'][A]}
    add_manual_writes(cloud, 'somebody', Put(keys.request(B, U), json.dumps(value)))
    cloud.add_compute_actor(B, '', other.repeat(2, other.plan))
    cloud.add_compute_actor(A, '', host.repeat(1, host.plan))

    def check() -> list[str]:
        for compute in (host, other) * 3:
            compute.run_all(compute.plan)
        name, group = cloud.etcd.entries.get(keys.name('web')), cloud.etcd.entries.get(keys.group('g'))
        problems = [] if name and not name.lease else ['the name of what lives was let go of']
        if group is None or U not in json.loads(group.value)['members']:
            problems.append('what lives was taken out of its group')
        if json.loads(cloud.etcd.entries[keys.quota('p')].value)['used'].get('instances') != 1:
            problems.append('its share of the quota was given back')
        cloud.store.commit([], [Delete(keys.record(B, U))])  # so that only A reports on U
        return problems

    return check


def listed_and_found(cloud: Cloud) -> Check:
    """Both list and find show an instance at every moment of its life."""
    host = cloud.add_host(A)
    cloud.enqueue_request(U, 'web')
    missed: list[str] = []
    store = ModelStore(cloud.etcd)

    def check_list() -> None:
        records, errors = list_records(store, with_gone=True)
        if U not in {record.instance for record in records} or errors:
            missed.append(f'not in the list: {errors}')

    def check_find() -> None:
        if find(store, U) is None:
            missed.append('not found')

    for number in range(2):
        cloud.add_actor(f'list {number}', check_list, mortal=False)
        cloud.add_actor(f'find {number}', check_find, mortal=False)
    cloud.add_compute_actor(A, '', host.repeat(2, host.read_queues, host.pull, host.plan))
    cloud.add_destroy('destroy', U)

    def check() -> list[str]:
        errors = [actor.outcome for actor in cloud.world.actors if isinstance(actor.outcome, EcompError)]
        unexpected = [str(error) for error in errors if not isinstance(error, NotFound)]
        return [*missed, *unexpected]

    return check


def all_commands(cloud: Cloud) -> None:
    """A queue, creates, destroys, clear, the keeper and `check --fix` on two computes."""
    hosts = [cloud.add_host(compute) for compute in (A, B)]
    cloud.set_instance_limit(5)
    cloud.enqueue_request(U, 'web', AFFINITY)
    cloud.add_create('eschedule', V, name='db', group=AFFINITY)
    for host in hosts:
        cloud.add_compute_actor(host.uuid, '', host.repeat(3, host.read_queues, host.pull, host.plan, host.reconcile))
    cloud.add_destroy('destroy', U)
    add_clear(cloud)
    add_complete_fix(cloud)
    cloud.has_ample_room = False


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        built_in_threads,
        ended_in_threads,
        request_removed_in_threads,
        request_malformed_and_repaired,
        all_commands,
    ),
    *make_scenarios(
        Bounds(2, 0),
        keeper_with_generations,
        placement_restored,
        frozen_taker_forgotten,
        requested_of_two,
        listed_and_found,
    ),
]
