"""Evacuations of a dead host: two at once, repeated, and beside other changes of instances."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import cast

from ecomp.agent.planner import Work
from ecomp.errors import Conflict, StillGoing, Unreachable
from ecomp.model import keys
from ecomp.model.choose import Offer
from ecomp.model.group import Group, Membership
from ecomp.model.order import Request, parse_request
from ecomp.model.stored import encode
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.decommission import disable
from ecomp.scheduler.operations.sharing import set_limits
from ecomp.scheduler.placing.evacuate import Evacuated, evacuate, require_silence
from ecomp.scheduler.placing.session import Scheduler
from ecomp.store.client import Delete, Put
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.applying import OTHER_IMAGE, add_apply, make_file, run_apply
from tests.model.cloud import AFFINITY, ANTI_AFFINITY, A, B, C, Cloud, U, V
from tests.model.compute import Compute
from tests.model.etcd import ModelStore
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import WHOLE, is_living_request
from tests.model.scenarios_operators import make_forget
from tests.model.virtual import HOST, NOW, find_pid

WEB = 'web/1'
# Fields of a request that its replacement has, too.
ORDER_FIELDS = ('query', 'image', 'name', 'group', 'user_id', 'project_id')


def die(cloud: Cloud, *names: tuple[str, str], group: Membership = ANTI_AFFINITY) -> Compute:
    """Return A, which has run these instances {uuid, name}, and whose power has failed.

    The first instance has a group.
    """
    cloud.set_instance_limit(5)
    host, *_ = cloud.add_hosts(A, B)
    members = [instance for instance, _ in names][: None if group == AFFINITY else 1]
    for instance, name in names:
        cloud.deliver(instance, A, name, group if instance in members else None)
    # deliver() counts one instance and one member only
    value = Group(group.name, group.policy or '', bool(group.strict), dict.fromkeys(members, A))
    cloud.store.commit([], [Put(keys.group(group.name), encode(value))])
    set_limits(cloud.store, 'p', ['instances=5'])
    host.plan(4)
    lose_power(cloud, host)
    return host


def lose_power(cloud: Cloud, host: Compute) -> None:
    host.hypervisor.lose_power(A)
    host.disk.files['boot_id'] = 'second'
    cloud.etcd.end_lease(host.presence.lease)


def run_evacuation(cloud: Cloud) -> list[Evacuated]:
    outcomes: list[Evacuated] = []
    owner = {'host': HOST, 'pid': find_pid(), 'since': NOW}
    store = ModelStore(cloud.etcd)
    answer = cast(Placement, cloud.placement), Offer(())
    require_silence(store, A, 'A')
    disable(cloud.placement, A, 'A')
    scheduler = Scheduler(store, lambda: answer, owner, random.Random(1), lambda: NOW)
    evacuate(scheduler, A, 'A', outcomes.append, with_protected=False)
    return outcomes


def add_evacuation(cloud: Cloud, name: str, *earlier: Actor, on_start: Callable[[], None] = lambda: None) -> Actor:
    """Add an evacuation of A that begins, after `on_start`, once the earlier actors have ended."""

    def work() -> tuple[Evacuated, ...]:
        on_start()
        return tuple(run_evacuation(cloud))

    actor = cloud.add_actor(name, work, retry=work, command='evacuate', subjects=(A,))
    actor.is_ready = lambda: not any(each.is_active for each in earlier)

    def note(operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            if isinstance(operation, Put) and operation.key.startswith(keys.ATTEMPTS) and cloud.world.current is actor:
                instances = json.loads(operation.value)['instances']
                actor.subjects = (*actor.subjects, *instances)
                cloud.world.names |= {instance: f'new {number}' for number, instance in enumerate(instances, 1)}

    cloud.etcd.listeners.append(note)
    return actor


def add_return(cloud: Cloud, host: Compute, on_restart: Callable[[], None] = lambda: None) -> Actor:
    def come_back() -> None:
        host.restart()
        on_restart()
        host.repeat(2, host.planner.retry_now, host.plan)()

    return cloud.add_actor('A again', come_back, process=A, subjects=(A,))


def _check_once(cloud: Cloud, *evacuations: Actor) -> Check:
    """Return a check: of each name one instance lives at most, and none was replaced twice.

    None was replaced on a living host.
    """
    wrong: list[str] = []
    cloud.world.state_parts.append(lambda: tuple(wrong))

    def note(operations: Sequence[Put | Delete]) -> None:
        for operation in operations:
            is_request = isinstance(operation, Put) and operation.key.startswith(keys.request_prefix(A))
            if is_request and json.loads(operation.value).get('replaced_by') and keys.compute(A) in cloud.etcd.entries:
                wrong.append(f'{operation.key} is replaced on a living host')

    cloud.etcd.listeners.append(note)

    def check() -> list[str]:
        requests = [
            request
            for key, entry in cloud.etcd.entries.items()
            if key.startswith(keys.HOSTS) and is_living_request(entry)
            if isinstance(request := parse_request(key.split('/')[2], key, entry.value), Request)
        ]
        names = Counter(request.name for request in requests)
        living = {request.instance for request in requests}
        problems = [f'{count} living instances are called {name}' for name, count in names.items() if count > 1]
        problems += [f'{each.instance} and {each.replaces} live' for each in requests if each.replaces in living]
        # After an unknown outcome both may report the same replacement.
        moved = {(each.instance, each.replaced_by) for each in _list_moved(*evacuations)}
        counts = Counter(instance for instance, _ in moved)
        problems += [f'{instance} was evacuated {count} times' for instance, count in counts.items() if count > 1]
        return [*problems, *wrong]

    return check


def _list_moved(*evacuations: Actor) -> list[Evacuated]:
    outcomes = [actor.outcome for actor in evacuations if isinstance(actor.outcome, tuple)]
    return [each for outcome in outcomes for each in outcome if each.replaced_by]


def evacuated_twice(cloud: Cloud) -> Check:
    """Two evacuations of one host at once: each instance moves once."""
    die(cloud, (U, 'web'), (V, 'db'))
    evacuations = [add_evacuation(cloud, f'evacuate {number}') for number in (1, 2)]
    return _check_once(cloud, *evacuations)


def evacuation_repeated(cloud: Cloud) -> Check:
    """Two guests are evacuated, and a killed command is repeated: nothing stays."""
    host = die(cloud, (U, 'web'), (V, 'db'))
    host.is_dead = True
    first = add_evacuation(cloud, 'evacuate')
    again = add_evacuation(cloud, 'evacuate again', first)
    check_once = _check_once(cloud, first, again)

    def check() -> list[str]:
        stays = [each for each in (U, V) if is_living_request(cloud.etcd.entries[keys.request(A, each)])]
        is_due = again.done and not isinstance(again.outcome, Unreachable)
        return check_once() + [f'{cloud.world.names[each]} stays' for each in stays if is_due]

    return check


def evacuated_while_its_host_returns(cloud: Cloud) -> Check:
    """The host comes back in the middle of its evacuation: an instance lives there or elsewhere."""
    host = die(cloud, (U, 'web'), (V, 'db'))
    evacuation = add_evacuation(cloud, 'evacuate')
    add_return(cloud, host)
    return _check_once(cloud, evacuation)


def evacuated_and_back(cloud: Cloud) -> Check:
    """A host is back, and freezes until its guest is evacuated: the guest stays off."""
    host = die(cloud, (U, 'web'))
    evacuation = add_evacuation(cloud, 'evacuate')
    replaced_starts: list[str] = []
    cloud.world.state_parts.append(lambda: tuple(replaced_starts))
    resume = host.hypervisor.start_existing

    def start_existing(instance: str, compute: str) -> None:
        entry = cloud.etcd.entries.get(keys.request(A, instance))
        if entry is None or not is_living_request(entry):
            replaced_starts.append(f'{cloud.world.names[instance]} is started after it was replaced')
        resume(instance, compute)

    def freeze() -> None:
        carry_out = host.planner.carry_out

        def carry_out_late(work: Work) -> None:
            if evacuation.is_active:
                cloud.etcd.end_lease(host.presence.lease)
                cloud.world.wait('the evacuation to end', lambda: not evacuation.is_active)
            carry_out(work)

        host.planner.carry_out = carry_out_late  # type: ignore[method-assign]

    host.hypervisor.start_existing = start_existing  # type: ignore[method-assign]
    add_return(cloud, host, freeze)
    return lambda: replaced_starts


def evacuated_beside_destroy(cloud: Cloud) -> Check:
    """An instance is destroyed while its host is evacuated: that is accepted, or it moves."""
    die(cloud, (U, 'web'))
    evacuation = add_evacuation(cloud, 'evacuate')
    destroy = cloud.add_destroy('destroy', U)
    check_once = _check_once(cloud, evacuation)

    def check() -> list[str]:
        is_accepted = 'destroy accepted' in str(destroy.outcome) and bool(_list_moved(evacuation))
        return check_once() + ['U was destroyed, and has moved'] * is_accepted

    return check


def evacuated_beside_forget(cloud: Cloud) -> Check:
    """The host is forgotten while it is evacuated, and never comes back."""
    host = die(cloud, (U, 'web'))
    host.is_dead = True
    evacuation = add_evacuation(cloud, 'evacuate')
    run_forget = make_forget(cloud, A)
    cloud.add_actor('host forget', run_forget, retry=run_forget, command='forget', subjects=(A,))
    return _check_once(cloud, evacuation)


def evacuated_beside_replace(cloud: Cloud) -> Check:
    """An apply replaces an instance while its host is evacuated: its entry has one instance."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    run_apply(cloud, make_file(WEB))
    host.plan(4)
    cloud.add_hosts(B)
    cloud.exempt(WHOLE, 'an evacuation delivers the instances of a stack one by one')
    # The host fails as late as that: an apply that knows it to be silent replaces nothing on it.
    evacuation = add_evacuation(cloud, 'evacuate', on_start=lambda: lose_power(cloud, host))
    may_fail = (Conflict, StillGoing)
    add_apply(cloud, 'apply', make_file(WEB, image=OTHER_IMAGE), may_fail, replace_all=True)
    return _check_once(cloud, evacuation)


def evacuated_beside_create_of_its_room(cloud: Cloud) -> Check:
    """The last room elsewhere is wanted by the evacuation and by a create."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    cloud.add_host(B, room=1)
    cloud.has_ample_room = False
    cloud.deliver(U, A, 'web')
    host.plan(4)
    lose_power(cloud, host)
    evacuation = add_evacuation(cloud, 'evacuate')
    cloud.add_create('eschedule', V)
    return _check_once(cloud, evacuation)


def evacuated_beside_create_of_its_replacement(cloud: Cloud) -> Check:
    """A create with --uuid uses the uuid that an evacuation chooses: one of them gets it."""
    die(cloud, (U, 'web'))
    replacement = keys.derive_uuid(U, 'evacuated')
    cloud.world.names[replacement] = 'new 1'
    evacuation = add_evacuation(cloud, 'evacuate')
    create = cloud.add_create('eschedule', replacement, resume=True)
    check_once = _check_once(cloud, evacuation)

    def check() -> list[str]:
        is_created = isinstance(create.outcome, dict) and bool(_list_moved(evacuation))
        return check_once() + ['new 1 was created, and has replaced U'] * is_created

    return check


def evacuated_beside_resume(cloud: Cloud) -> Check:
    """A create is repeated during an evacuation: it is not NOTIFIED once it has moved."""
    die(cloud, (U, 'web'))
    evacuation = add_evacuation(cloud, 'evacuate')
    create = cloud.add_create('eschedule', U, resume=True, name='web', group=ANTI_AFFINITY)
    check_once = _check_once(cloud, evacuation)
    was_moved_before: list[bool] = []
    cloud.world.state_parts.append(lambda: tuple(was_moved_before))

    def note(operations: Sequence[Put | Delete]) -> None:
        is_move = any('"replaced_by"' in operation.value for operation in operations if isinstance(operation, Put))
        if is_move and not was_moved_before:
            was_moved_before.append(not any(step.actor == create.name for step in cloud.world.steps))

    cloud.etcd.listeners.append(note)

    def check() -> list[str]:
        is_wrong = was_moved_before == [True] and isinstance(create.outcome, dict)
        return check_once() + ['U was NOTIFIED after it had moved'] * is_wrong

    return check


def _add_take_of_queued(cloud: Cloud, group: Membership | None = None) -> Callable[[], list[str]]:
    """Queue V, and let B take it. Return a check that V is either queued or requested, once."""
    cloud.add_take(B, cloud.enqueue_request(V, 'db', group))

    def check() -> list[str]:
        places = [key for key in cloud.etcd.entries if key.startswith((keys.HOSTS, keys.QUEUES))]
        count = sum(keys.get_last_part(key) == V for key in places)
        return [f'V is queued or requested {count} times'] * (count != 1)

    return check


def _check_moved(cloud: Cloud, evacuation: Actor) -> list[str]:
    """Return a problem if U stays, and the evacuation has ended without an error."""
    outcomes = evacuation.outcome if isinstance(evacuation.outcome, tuple) else ()
    stays = [each for each in outcomes if each.reason]
    return [f'{cloud.world.names[each.instance]} stays, and has room elsewhere: {each.reason}' for each in stays]


def evacuated_beside_a_queue(cloud: Cloud) -> Check:
    """A host takes a queued request into room that the evacuation wants."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    cloud.deliver(U, A, 'web')
    host.plan(4)
    cloud.add_hosts(B, C, room=1)
    lose_power(cloud, host)
    cloud.has_ample_room = False
    check_queued = _add_take_of_queued(cloud)
    evacuation = add_evacuation(cloud, 'evacuate')
    check_once = _check_once(cloud, evacuation)
    return lambda: [*check_once(), *check_queued(), *_check_moved(cloud, evacuation)]


def evacuated_group_of_a_queue(cloud: Cloud) -> Check:
    """A guest is evacuated while a host takes another one of its group, which stays apart."""
    cloud.set_instance_limit(5)
    host = cloud.add_host(A)
    cloud.enqueue_request(U, 'web', ANTI_AFFINITY)
    host.take_and_build(4)
    before = json.loads(cloud.etcd.entries[keys.request(A, U)].value)
    cloud.add_host(B)
    cloud.add_host(C, room=1)  # the evacuation prefers B, which has more room even with V
    lose_power(cloud, host)
    check_queued = _add_take_of_queued(cloud, ANTI_AFFINITY)
    evacuation = add_evacuation(cloud, 'evacuate')
    check_once = _check_once(cloud, evacuation)

    def check_order() -> list[str]:
        moved = [keys.request(each.compute, each.replaced_by) for each in _list_moved(evacuation)]
        values = [json.loads(cloud.etcd.entries[key].value) for key in moved if key in cloud.etcd.entries]
        wrong = {name for value in values for name in ORDER_FIELDS if value.get(name) != before.get(name)}
        return [f'the replacement has another {name}' for name in sorted(wrong)]

    return lambda: [*check_once(), *check_queued(), *check_order(), *_check_moved(cloud, evacuation)]


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        *(evacuated_twice, evacuated_beside_forget, evacuated_beside_replace),
        *(evacuated_beside_create_of_its_room, evacuated_beside_create_of_its_replacement, evacuated_beside_resume),
        *(evacuated_beside_a_queue, evacuated_group_of_a_queue),
    ),
    *make_scenarios(SINGLE_FAULT._replace(interrupts=1), evacuated_beside_destroy),
    *make_scenarios(Bounds(1, 1, kills=1, requests=1, answers=1, reads=1), evacuation_repeated),
    *make_scenarios(Bounds(2, 1, kills=1, expiries=1), evacuated_while_its_host_returns),
    *make_scenarios(Bounds(1, 0), evacuated_and_back),
]
