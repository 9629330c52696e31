"""A compute's tasks in threads, a placement that is restored, and commands that only read."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from ecomp.agent.host.claims import Generations
from ecomp.errors import EcompError, NotFound
from ecomp.model import keys
from ecomp.scheduler.changing.change import destroy
from ecomp.scheduler.looking.find import all_records, find
from ecomp.scheduler.operating.audit import fix
from ecomp.scheduler.operating.sharing import limit
from ecomp.store.client import Delete, Put
from tests.model.acting import SHAKY, Bounds, Call
from tests.model.cloud import NAMES, TOGETHER, A, B, Cloud, U, V
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, within
from tests.model.invariants import CLAIM
from tests.model.scenarios_operators import forgets
from tests.model.scenarios_pairs import active, clears, fixes_all
from tests.model.scenarios_registered import registration
from tests.model.scenarios_strangers import by_hand
from tests.model.world import World


class Lock:
    """A lock between actors. A real lock would block the one thread that runs all of them."""

    def __init__(self, world: World) -> None:
        self._world, self._is_held = world, False

    def __enter__(self) -> None:
        if self._is_held:
            self._world.wait('a lock', lambda: not self._is_held)
        self._is_held = True

    def __exit__(self, *_: object) -> None:
        self._is_held = False


def threaded(cloud: Cloud, host: Compute, steps: int, *also: Callable[[], object]) -> Callable[[], None]:
    """Return a compute's planning with a thread for each task."""
    host.memory._lock = Lock(cloud.world)  # type: ignore[assignment]

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
                cloud.act(name, partial(planner.carry_out, task), process=process)
            host.do(*also)
            cloud.world.sleep(1.0)

    return plan


def built_in_threads(cloud: Cloud) -> None:
    """Two instances are built concurrently and one is destroyed during its build."""
    host = cloud.host(A)
    cloud.limited(5)
    cloud.delivered(U, A, 'web', TOGETHER)
    cloud.delivered(V, A, 'db')
    limit(cloud.store, 'p', ['instances=5'])
    cloud.works(A, 'planning', threaded(cloud, host, 4, host.planner.recheck))
    cloud.destroys('destroy', U)


def ended_in_threads(cloud: Cloud) -> None:
    """One instance is destroyed and one stopped in threads, and a record is deleted manually."""
    cloud.limited(5)
    host = active(cloud, group=TOGETHER)
    active(cloud, V, 'db')
    limit(cloud.store, 'p', ['instances=5'])
    cloud.destroys('destroy', U)
    cloud.powers('stop', V, 'stop')
    cloud.works(A, 'planning', threaded(cloud, host, 4, host.planner.recheck))
    by_hand(cloud, 'somebody', Delete(keys.record(A, V)))


def request_removed_in_threads(cloud: Cloud) -> None:
    """A request is deleted manually during its build; leftovers are destroyed later."""
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    cloud.may_fail.add(U)
    by_hand(cloud, 'somebody', Delete(keys.request(A, U)))
    cloud.works(A, 'planning', threaded(cloud, host, 4, host.planner.recheck))
    cloud.is_astray = True

    def clean_up() -> None:
        with suppress(NotFound):
            destroy(cloud.store, U)
        host.plan()
        fix(cloud.store, cloud.placement, lambda _: None)

    cloud.act('later', lambda: None, again=clean_up)


def request_spoilt_and_mended(cloud: Cloud) -> None:
    """A request becomes malformed and is repaired before its build."""
    host = cloud.host(A)
    cloud.delivered(U, A, 'web')
    cloud.may_fail.add(U)
    key = keys.request(A, U)
    valid = cloud.etcd.entries[key].value.decode()
    by_hand(cloud, 'somebody', Put(key, '{'), Put(key, valid))
    cloud.works(A, 'planning', threaded(cloud, host, 4, host.planner.recheck))


def keeper_with_generations(cloud: Cloud) -> Check:
    """The keeper uses the generation and followed requests, which lag behind."""
    cloud.limited(5)
    host = active(cloud)
    generations = Generations(cloud.placement, several=False)
    followed: set[str] = set()

    def follow() -> None:
        followed.clear()
        followed.update(map(keys.last, host.store.snapshot(keys.request_prefix(A)).entries))

    def keep() -> None:
        generation = generations.of(A)
        host.keeper.look(host.hypervisor.guests(), cloud.world.read_clock(), generation, set(followed))

    cloud.world.prints.append(lambda: tuple(sorted(followed)))
    host.keep_claims = keep  # type: ignore[method-assign]
    cloud.works(A, 'following', host.rounds(3, follow, lambda: cloud.world.sleep(1.0)))
    cloud.works(A, 'looking at claims', host.rounds(3, keep, lambda: cloud.world.sleep(61.0)))
    cloud.works(A, '', host.rounds(2, host.plan))
    cloud.creates('eschedule', V, name='db')
    cloud.destroys('destroy', U)

    def follow_and_keep() -> None:
        follow()
        keep()

    def check() -> list[str]:
        host.keep_claims = follow_and_keep  # type: ignore[method-assign]
        return []

    return check


def placement_restored(cloud: Cloud) -> None:
    """A restore of placement to before U was created, during another create and a destroy."""
    cloud.limited(5)
    host = cloud.host(A)
    saved = copy.deepcopy((cloud.model.providers, cloud.model.rows, cloud.model.held))
    active(cloud)
    cloud.exempt(CLAIM, 'placement is restored to before U had its claim')
    cloud.is_astray = True
    cloud.is_ample = False
    cloud.may_fail |= {U, V}

    def restore_placement() -> None:
        cloud.model.providers, cloud.model.rows, cloud.model.held = copy.deepcopy(saved)
        cloud.model.writes += 1

    call = Call('libvirt', ('placement is restored', U), writes=True)
    cloud.act('somebody', lambda: cloud.world.call(call, restore_placement), mortal=False)
    cloud.creates('eschedule', V, name='db')
    cloud.destroys('destroy', U)
    cloud.works(A, '', host.rounds(3, host.plan, host.keep_claims))
    cloud.act('later', lambda: None, again=lambda: fix(cloud.store, cloud.placement, lambda _: None))


def frozen_taker_forgotten(cloud: Cloud) -> Check:
    """A frozen taker is forgotten; another one takes, then the first continues."""
    cloud.hosts(A, B)
    host = cloud.computes[A]
    place = cloud.waiting(U, 'web')
    cloud.takes(A, place)

    def freeze() -> None:
        cloud.world.call(Call('libvirt', ('the lease ends of', A), writes=True), lambda: None)
        cloud.etcd.end(host.presence.lease)

    silent = cloud.act('time', freeze, mortal=False)
    forgets(cloud, A, silent)
    cloud.takes(B, place)

    def check() -> list[str]:
        own_registration = registration(cloud, host)
        own_registration.keep(lambda: False)
        host.do(host.look_after_presence)
        return []

    return check


def asked_of_two(cloud: Cloud) -> Check:
    """A second compute is requested to run A's instance: it refuses, and no harm is done."""
    cloud.limited(5)
    host = active(cloud, group=TOGETHER)
    other = cloud.host(B)
    value = json.loads(cloud.etcd.entries[keys.request(A, U)].value)
    value['allocations'] = {B: value['allocations'][A]}
    by_hand(cloud, 'somebody', Put(keys.request(B, U), json.dumps(value)))
    cloud.works(B, '', other.rounds(2, other.plan))
    cloud.works(A, '', host.rounds(1, host.plan))

    def check() -> list[str]:
        for compute in (host, other) * 3:
            compute.do(compute.plan)
        name, group = cloud.etcd.entries.get(keys.name('web')), cloud.etcd.entries.get(keys.group('g'))
        problems = [] if name and not name.lease else ['the name of what lives was let go of']
        if group is None or U not in json.loads(group.value)['members']:
            problems.append('what lives was taken out of its group')
        if json.loads(cloud.etcd.entries[keys.quota('p')].value)['used'].get('instances') != 1:
            problems.append('its share of the quota was given back')
        cloud.store.commit([], [Delete(keys.record(B, U))])  # so that only A reports on U
        return problems

    return check


def looked_at(cloud: Cloud) -> Check:
    """Both list and find show an instance at every moment of its life."""
    host = cloud.host(A)
    cloud.waiting(U, 'web')
    missed: list[str] = []
    store = ModelStore(cloud.etcd)

    def check_list() -> None:
        records, errors = all_records(store, with_gone=True)
        if U not in {record.instance for record in records} or errors:
            missed.append(f'not in the list: {errors}')

    def check_find() -> None:
        if find(store, U) is None:
            missed.append('not found')

    for number in range(2):
        cloud.act(f'list {number}', check_list, mortal=False)
        cloud.act(f'find {number}', check_find, mortal=False)
    cloud.works(A, '', host.rounds(2, host.hear_queues, host.pull, host.plan))
    cloud.destroys('destroy', U)

    def check() -> list[str]:
        errors = [actor.outcome for actor in cloud.world.actors if isinstance(actor.outcome, EcompError)]
        unexpected = [str(error) for error in errors if not isinstance(error, NotFound)]
        return [*missed, *unexpected]

    return check


def everybody(cloud: Cloud) -> None:
    """A queue, creates, destroys, clear, the keeper and `audit --fix` on two computes."""
    hosts = [cloud.host(compute) for compute in (A, B)]
    cloud.limited(5)
    cloud.waiting(U, 'web', TOGETHER)
    cloud.creates('eschedule', V, name='db', group=TOGETHER)
    for host in hosts:
        cloud.works(host.uuid, '', host.rounds(3, host.hear_queues, host.pull, host.plan, host.keep_claims))
    cloud.destroys('destroy', U)
    clears(cloud)
    fixes_all(cloud)
    cloud.is_ample = False


SCENARIOS = [
    *within(
        SHAKY,
        built_in_threads, ended_in_threads, request_removed_in_threads, request_spoilt_and_mended, everybody,
    ),
    *within(Bounds(2, 0), keeper_with_generations, placement_restored, frozen_taker_forgotten, asked_of_two, looked_at),
]
