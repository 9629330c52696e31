"""Pairs of a command and what happened to its hosts: nothing runs twice.

The hosts are restored with etcd, silent or returning, have a strict group, or lie.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from ecomp.errors import ClaimedElsewhere, Conflict, NoCapacity, StillGoing
from ecomp.model import keys
from ecomp.model.order import NameOwner, Request, parse_request
from ecomp.model.stack import Stack
from ecomp.model.stored import decode, encode
from ecomp.store.client import Delete, Put
from tests.model.acting import SINGLE_FAULT, Actor, Bounds
from tests.model.applying import OTHER_IMAGE, STACK, add_apply, add_destroy_file, make_file, run_apply
from tests.model.cloud import AFFINITY, A, B, C, Cloud, U, V
from tests.model.compute import Compute
from tests.model.explorer import Check, make_scenarios
from tests.model.invariants import DELIVERY, ENTRY, NAME, WHOLE, is_living_request
from tests.model.scenarios_evacuated import add_evacuation, add_return, die, lose_power, run_evacuation
from tests.model.scenarios_losses import restore_etcd

DB, WEB = 'db/1', 'web/1'
FILE = make_file(DB, WEB)
REFUSALS = (ClaimedElsewhere, Conflict, NoCapacity, StillGoing)


def _check_nothing_runs_twice(cloud: Cloud) -> Check:
    """Return a check: each guest runs once, and none is delivered while a host away runs it.

    A host is away if it is silent, or has not accepted the etcd.
    """
    names: dict[str, str] = {}
    wrong: list[str] = []
    cloud.world.state_parts.append(lambda: tuple(wrong))

    def list_running(*hosts: Compute) -> list[str]:
        guests = [(name, guest) for host in hosts for name, guest in host.hypervisor.list_guests().items()]
        return [names.get(instance, instance) for instance, guest in guests if guest.running]

    def note(operations: Sequence[Put | Delete]) -> None:
        away = [
            host for host in cloud.machines if host.is_read_only or keys.compute(host.uuid) not in cloud.etcd.entries
        ]
        for operation in operations:
            if not isinstance(operation, Put) or not operation.key.startswith(keys.HOSTS):
                continue
            request, instance = json.loads(operation.value), keys.get_last_part(operation.key)
            if request.get('name') and request['allocations']:
                is_new = instance not in names
                names[instance] = request['name']
                if is_new and names[instance] in list_running(*away) and cloud.world.current in commands:
                    wrong.append(f'{names[instance]} is delivered, and a host that is away runs it')

    for key, entry in cloud.etcd.entries.items():
        if key.startswith(keys.HOSTS):
            names[keys.get_last_part(key)] = str(json.loads(entry.value).get('name'))
    commands: list[Actor] = [actor for actor in cloud.world.actors if actor.command or actor.retry]
    cloud.etcd.listeners.append(note)

    def check() -> list[str]:
        twice = [name for name, count in Counter(list_running(*cloud.machines)).items() if count > 1]
        return [*wrong, *(f'{name} runs twice' for name in twice)]

    return check


def _restore(
    cloud: Cloud, saved: dict[str, keys.StoredValue], *hosts: Compute, is_silent: bool, ends_inconsistent: bool = False
) -> None:
    """Restore etcd. These hosts have not accepted it, and are silent or have their keys back."""
    restore_etcd(cloud, saved)  # type: ignore[arg-type]
    cloud.exempt(DELIVERY, 'etcd is restored to before a delivery')
    cloud.exempt(WHOLE, 'a compute that accepts a restored etcd writes the request again')
    cloud.exempt(ENTRY, 'the restored key does not name what a compute publishes')
    cloud.exempt(NAME, 'a compute publishes the replacement of an instance that is requested again')
    cloud.has_ample_room = False
    cloud.ends_inconsistent = ends_inconsistent
    for host in hosts:
        host.is_read_only = host.republishes = True
        if is_silent:
            cloud.etcd.end_lease(host.presence.lease)


def _add_acceptance(cloud: Cloud, *hosts: Compute) -> None:
    """Have an operator accept the etcd on these hosts once the actors so far have ended."""
    others = list(cloud.world.actors)

    def accept() -> None:
        cloud.world.wait('the others to end', lambda: not any(actor.is_active for actor in others))
        for host in hosts:
            host.is_read_only = False
            host.restart()
            host.plan(3)

    cloud.add_actor('the hosts, accepting', accept, mortal=False)


def _applied_first(cloud: Cloud, is_silent: bool) -> Check:
    cloud.set_instance_limit(9)
    hosts = cloud.add_hosts(A, B)
    saved = dict(cloud.etcd.entries)
    run_apply(cloud, FILE)
    for host in hosts:
        host.plan(3)
    check = _check_nothing_runs_twice(cloud)
    _restore(cloud, saved, *hosts, is_silent=is_silent)
    new = cloud.add_host(C)
    add_apply(cloud, 'apply', FILE, may_fail=REFUSALS)
    cloud.add_compute_actor(C, '', new.repeat(2, new.plan))
    _add_acceptance(cloud, *hosts)
    return check


def first_apply_after_a_restore(cloud: Cloud) -> Check:
    """A first apply is repeated after a restore to before it, while its hosts are silent."""
    return _applied_first(cloud, is_silent=True)


def first_apply_as_presences_are_back(cloud: Cloud) -> Check:
    """The same while the presences of its hosts are back with their full leases."""
    return _applied_first(cloud, is_silent=False)


def apply_after_a_refused_one(cloud: Cloud) -> Check:
    """A refused apply has left a key without entries in a wiped etcd: the file is applied."""
    cloud.set_instance_limit(9)
    hosts = cloud.add_hosts(A, B)
    run_apply(cloud, FILE)
    for host in hosts:
        host.plan(3)
    key = keys.stack(STACK)
    old = decode(Stack, cloud.etcd.entries[key].value, name=STACK)
    empty = old._replace(epoch=U, entries={})
    cloud.exempt(ENTRY, 'the key is lost')
    cloud.store.commit([], [Put(key, encode(empty))])
    check = _check_nothing_runs_twice(cloud)
    apply = add_apply(cloud, 'apply', FILE)

    def check_adopted() -> list[str]:
        kept = isinstance(apply.outcome, dict) and set(apply.outcome) == set(old.list_instances().values())
        is_due = apply.done and not apply.dead and cloud.is_unharmed
        return [*check(), *(['the stack does not get its instances back'] if is_due and not kept else [])]

    return check_adopted


def _add_dead_host(cloud: Cloud) -> None:
    """Add A, which has run an instance of a stack and another one, and is dead for good."""
    cloud.set_instance_limit(9)
    host = cloud.add_host(A)
    run_apply(cloud, make_file(WEB))
    cloud.deliver(U, A, 'plain')
    host.plan(4)
    lose_power(cloud, host)
    host.is_dead = True


def _evacuated_again(cloud: Cloud, is_silent: bool) -> Check:
    _add_dead_host(cloud)
    saved = dict(cloud.etcd.entries)
    target = cloud.add_host(B)
    cloud.exempt(WHOLE, 'an evacuation delivers the instances of a stack one by one')
    run_evacuation(cloud)
    target.plan(4)
    check = _check_nothing_runs_twice(cloud)
    _restore(cloud, saved, target, is_silent=is_silent, ends_inconsistent=True)
    new = cloud.add_host(C)
    add_evacuation(cloud, 'evacuate again')
    cloud.add_compute_actor(C, '', new.repeat(2, new.plan))
    _add_acceptance(cloud, target)
    return check


def evacuated_again_after_a_restore(cloud: Cloud) -> Check:
    """An evacuation is repeated after a restore to before it: the replacements' host is silent."""
    return _evacuated_again(cloud, is_silent=True)


def evacuated_again_as_a_presence_is_back(cloud: Cloud) -> Check:
    """The same while the presence of that host is back with its full lease."""
    return _evacuated_again(cloud, is_silent=False)


def _add_silent(cloud: Cloud, add_command: Callable[[], Actor]) -> Check:
    """Have a host of a stack be silent, with its guests running, until a command has ended."""
    cloud.set_instance_limit(9)
    host = cloud.add_host(A)
    run_apply(cloud, FILE)
    host.plan(3)
    other = cloud.add_host(B)
    cloud.etcd.end_lease(host.presence.lease)
    host.is_read_only = True
    cloud.exempt(DELIVERY, 'what a silent host may run stays')
    command = add_command()
    check = _check_nothing_runs_twice(cloud)
    cloud.add_compute_actor(B, '', other.repeat(2, other.plan))

    def come_back() -> None:
        cloud.world.wait('the command to end', lambda: not command.is_active)
        host.is_read_only = False
        host.restart()
        host.plan(3)

    cloud.add_actor('A, back', come_back, mortal=False)
    return check


def replaced_on_a_silent_host(cloud: Cloud) -> Check:
    """An apply replaces the instances of a stack, which a silent host runs."""
    file = make_file(DB, WEB, image=OTHER_IMAGE)
    return _add_silent(cloud, lambda: add_apply(cloud, 'apply --replace', file, REFUSALS, replace_all=True))


def pruned_on_a_silent_host(cloud: Cloud) -> Check:
    """An apply prunes an instance that a silent host runs, and has another one with its name."""
    file = make_file(WEB, image=OTHER_IMAGE)
    return _add_silent(cloud, lambda: add_apply(cloud, 'apply --prune', file, REFUSALS, prune=True, replace_all=True))


def destroyed_on_a_silent_host(cloud: Cloud) -> Check:
    """The instances of a file, on a silent host, are destroyed once that host is back."""
    check = _add_silent(cloud, lambda: add_destroy_file(cloud, 'destroy --file', FILE))

    def check_gone() -> list[str]:
        guests = [each for host in cloud.machines for each in host.hypervisor.list_guests()]
        is_due = cloud.is_unharmed and bool(guests)
        return [*check(), *(['a destroyed instance runs'] if is_due else [])]

    return check_gone


def replaced_as_its_host_returns(cloud: Cloud) -> Check:
    """A host without power comes back while an apply replaces its instances."""
    cloud.set_instance_limit(9)
    host = cloud.add_host(A)
    run_apply(cloud, FILE)
    host.plan(3)
    cloud.add_host(B)
    lose_power(cloud, host)
    cloud.exempt(DELIVERY, 'what a silent host may run stays')
    add_apply(cloud, 'apply --replace', make_file(DB, WEB, image=OTHER_IMAGE), REFUSALS, replace_all=True)
    check = _check_nothing_runs_twice(cloud)
    add_return(cloud, host)
    return lambda: [problem for problem in check() if 'delivered' in problem]


def group_evacuated_as_its_host_returns(cloud: Cloud) -> Check:
    """The host of a strict group comes back after a killed evacuation: it is on one host."""
    host = die(cloud, (U, 'web'), (V, 'db'), group=AFFINITY)
    evacuation = add_evacuation(cloud, 'evacuate')
    add_return(cloud, host).is_ready = lambda: not evacuation.is_active

    def check() -> list[str]:
        entries = cloud.etcd.entries.items()
        computes = {
            key.split('/')[2] for key, entry in entries if key.startswith(keys.HOSTS) and is_living_request(entry)
        }
        outcomes = evacuation.outcome if isinstance(evacuation.outcome, tuple) else ()
        stays = [f'{each.name} stays, and has room elsewhere: {each.reason}' for each in outcomes if each.reason]
        return [*stays, *(['a group that has to stay together is split'] if len(computes) > 1 else [])]

    return check


# A compute that lies


def _forge_request(cloud: Cloud, compute: str, source: str, instance: str, **fields: object) -> None:
    """Write, as that compute may, a request for `instance` like the one at the key `source`."""
    entry = cloud.etcd.entries[source]
    request = parse_request(source.split('/')[2], source, entry.value)
    assert isinstance(request, Request)
    resources = next(iter(request.allocations.values()))
    cloud.ends_inconsistent = True
    for rule in (DELIVERY, ENTRY, NAME, WHOLE):
        cloud.exempt(rule, 'a compute forges a request')
    forged = replace(request, instance=instance, allocations={compute: resources}, **fields)  # type: ignore[arg-type]
    cloud.store.commit([], [Put(keys.request(compute, instance), encode(forged))])


def apply_beside_a_forged_replacement(cloud: Cloud) -> Check:
    """A compute claims to have the next instance of an entry: the stack keeps its own one."""
    cloud.set_instance_limit(9)
    host = cloud.add_host(A)
    run_apply(cloud, make_file(WEB))
    host.plan(3)
    cloud.add_host(B)
    own = decode(Stack, cloud.etcd.entries[keys.stack(STACK)].value, name=STACK)
    place = own.make_place(WEB)
    (instance,) = own.list_instances().values()
    _forge_request(cloud, B, keys.request(A, instance), place.instance, stack=place)
    cloud.store.commit([], [Put(keys.name('s-web-1'), encode(NameOwner(place.instance)))])
    add_apply(cloud, 'apply', make_file(WEB), may_fail=REFUSALS)

    def check() -> list[str]:
        current = decode(Stack, cloud.etcd.entries[keys.stack(STACK)].value, name=STACK)
        return ['the stack adopts what a compute claims to have'] if current.entries != own.entries else []

    return check


def evacuated_beside_forged_keys(cloud: Cloud) -> Check:
    """A living compute has a key at the uuid of each replacement: the guests move all the same."""
    _add_dead_host(cloud)
    cloud.add_host(B)
    own = decode(Stack, cloud.etcd.entries[keys.stack(STACK)].value, name=STACK)
    for instance in (own.make_place(WEB).instance, keys.derive_uuid(U, 'evacuated')):
        cloud.store.commit([], [Put(keys.record(B, instance), '{}')])
    cloud.ends_inconsistent = True
    cloud.exempt(WHOLE, 'an evacuation delivers the instances of a stack one by one')
    evacuation = add_evacuation(cloud, 'evacuate')

    def check() -> list[str]:
        outcomes = evacuation.outcome if isinstance(evacuation.outcome, tuple) else ()
        return [f'{each.name} stays: {each.reason}' for each in outcomes if each.reason]

    return check


def evacuated_with_forged_requests(cloud: Cloud) -> Check:
    """A dead, lying host has a request for another host's entry: the stack keeps its own."""
    cloud.set_instance_limit(9)
    host = cloud.add_host(B)
    run_apply(cloud, make_file(WEB))
    host.plan(3)
    liar = cloud.add_host(A)
    own = decode(Stack, cloud.etcd.entries[keys.stack(STACK)].value, name=STACK)
    (instance,), place = own.list_instances().values(), own.make_place(WEB)
    _forge_request(cloud, A, keys.request(B, instance), place.instance, stack=place, name=None)
    lose_power(cloud, liar)
    liar.is_dead = True
    cloud.add_host(C)
    add_evacuation(cloud, 'evacuate')

    def check() -> list[str]:
        current = decode(Stack, cloud.etcd.entries[keys.stack(STACK)].value, name=STACK)
        return ['the stack adopts what a compute claims to have'] if current.entries != own.entries else []

    return check


SCENARIOS = [
    *make_scenarios(
        SINGLE_FAULT,
        *(first_apply_after_a_restore, first_apply_as_presences_are_back, apply_after_a_refused_one),
        *(evacuated_again_after_a_restore, evacuated_again_as_a_presence_is_back),
        *(replaced_on_a_silent_host, pruned_on_a_silent_host, destroyed_on_a_silent_host, replaced_as_its_host_returns),
    ),
    *make_scenarios(Bounds(0, 1, kills=1), group_evacuated_as_its_host_returns),
    *make_scenarios(
        Bounds(1, 0), apply_beside_a_forged_replacement, evacuated_beside_forged_keys, evacuated_with_forged_requests
    ),
]
