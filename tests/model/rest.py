"""Leave a cloud alone: killed processes' leases expire, and computes work until at rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress

from ecomp.errors import Conflict, EcompError, NoCapacity, NotFound, Unreachable
from ecomp.model import keys
from ecomp.model.order import SetOrder
from ecomp.model.record import ERROR, GONE
from ecomp.scheduler.changing.change import destroy
from tests.model.cloud import Cloud
from tests.model.compute import Compute
from tests.model.properties import violations

# Rounds of a minute each. A cloud that is not at rest after these never comes to rest.
ROUNDS = 20
# Seconds. Leases up to this belong to attempts in flight; longer ones belong to records that are kept.
SHORT = 180


def left_alone(cloud: Cloud) -> list[str]:
    """Let the cloud rest, repeat unknown commands, destroy everything; return the violations."""
    return next((problems for problems in _stages(cloud) if problems), [])


def _stages(cloud: Cloud) -> Iterator[list[str]]:
    yield [f'unexpected error: {error}' for error in cloud.world.surprises]
    yield settle(cloud)
    if not to_be_repeated(cloud):
        yield violations(cloud)
    yield ask_again(cloud)
    yield settle(cloud)
    yield violations(cloud)
    destroy_all(cloud)
    yield settle(cloud)
    restart_all(cloud)
    yield settle(cloud)
    yield violations(cloud)
    yield nothing_left(cloud)
    yield nothing_remembered(cloud)
    yield [f'unexpected error: {error}' for error in cloud.world.surprises]


def fingerprint(cloud: Cloud) -> int:
    """Return a hash of everything that decides what happens when the cloud is left alone.

    Who wrote a value, and in which order, does not count. An actor that is part of a compute continues to run, so its
    whole history counts.
    """
    commands = {command.actor for command in cloud.commands}
    actors = [
        (actor.dead, actor.done, repr(actor.outcome) if actor in commands else actor.history)
        for actor in cloud.world.actors
    ]
    etcd = [(entry.key, entry.value, entry.lease) for _, entry in sorted(cloud.etcd.entries.items())]
    hosts = [
        (
            *compute.hypervisor.guests().items(),
            *compute.hypervisor.reservations().items(),
            *compute.disk.files.items(),
        )
        for compute in cloud.computes.values()
    ]
    leases = tuple(sorted(cloud.etcd.leases))
    return hash((repr(actors), repr(etcd), leases, repr(hosts), cloud.model.shape(), cloud.world.clock))


def settle(cloud: Cloud) -> list[str]:
    """Run minutes until two in a row without a write; return what fails or writes for ever."""
    killed = {actor.process for actor in cloud.world.actors if actor.dead}
    for actor in cloud.world.actors:
        actor.dead = not actor.done
    for compute in cloud.computes.values():
        if killed & {compute.process, compute.uuid} and not compute.is_dead:
            compute.restart()
    renewed = {host.presence.lease for host in cloud.computes.values() if not host.is_dead}
    owners = {actor.name for actor in cloud.world.actors}
    for lease, grant in list(cloud.etcd.leases.items()):
        if grant.owner in owners and grant.seconds <= SHORT and lease not in renewed:
            cloud.etcd.end(lease)
    quiet_minutes = 0
    for _ in range(ROUNDS):
        before = cloud.etcd.revision, cloud.model.writes
        errors = [error for host in cloud.computes.values() if not host.is_dead for error in _minute(host)]
        cloud.world.clock += 61.0
        quiet_minutes = quiet_minutes + 1 if before == (cloud.etcd.revision, cloud.model.writes) else 0
        if quiet_minutes == 2:
            return [f'at rest, and something fails for ever: {error}' for error in errors]
    return [f'does not come to rest: after {ROUNDS} minutes something is still written every minute']


def ask_again(cloud: Cloud) -> list[str]:
    """Repeat, with --uuid, the commands whose outcome the user does not know."""
    problems = []
    for command in cloud.unknown():
        name = cloud.world.names.get(command.wanted.instance, command.wanted.instance)
        try:
            cloud.create(command.wanted, resume=True)
        except Conflict as error:
            if not has_past(cloud, command.wanted):
                problems.append(f'{name}: asked for again with --uuid, and refused for no reason that lasts: {error}')
        except NoCapacity as error:
            if cloud.is_ample:
                problems.append(
                    f'{name}: asked for again with --uuid, there is "no capacity", with room for it: {error}'
                )
        except EcompError as error:
            problems.append(f'{name}: asked for again with --uuid: {error}')
    for retry in to_be_repeated(cloud):
        with suppress(Conflict, NotFound):  # a refusal with its reason, or everything was done already
            retry()
    return problems


def has_past(cloud: Cloud, wanted: SetOrder) -> bool:
    """True if there is a lasting reason to refuse the order when it is repeated with --uuid.

    The instance has ended, is being destroyed or is queued, it has another name, or its name belongs to another
    instance.
    """
    entries = cloud.etcd.entries
    instance, name = wanted.instance, entries.get(keys.name(wanted.name or ''))
    if name is not None and instance.encode() not in name.value:
        return True
    names = {keys.last(key): json.loads(entry.value) for key, entry in entries.items() if key.startswith(keys.NAMES)}
    own_names = {name for name, held in names.items() if held.get('instance') == instance}
    if own_names - {wanted.name}:
        return True
    records = [entry for key, entry in entries.items() if key.startswith(keys.INSTANCES) and key.endswith(instance)]
    record = records[0] if records else None
    if record is not None and json.loads(record.value)['state'] in (GONE, ERROR):
        return True
    instance_entries = [entry for key, entry in entries.items() if key.endswith(f'/{instance}')]
    is_queued = any(entry.key.startswith(keys.QUEUES) for entry in instance_entries)
    return is_queued or any(
        entry.key.startswith(keys.HOSTS) and not json.loads(entry.value)['allocations'] for entry in instance_entries
    )


def to_be_repeated(cloud: Cloud) -> list[Callable[[], object]]:
    """Return the commands that operators repeat, after an interruption or as a repair."""
    return [
        actor.again
        for actor in cloud.world.actors
        if actor.again is not None and (cloud.is_astray or actor.dead or isinstance(actor.outcome, Unreachable))
    ]


def destroy_all(cloud: Cloud) -> None:
    requested = [keys.last(key) for key in cloud.etcd.entries if key.startswith(keys.HOSTS)]
    queued = [key for key in cloud.etcd.entries if key.startswith(keys.QUEUES) and not key.endswith(keys.TAKER)]
    for instance in [*requested, *map(keys.last, queued)]:
        try:
            destroy(cloud.store, instance)
        except NotFound:
            continue


def nothing_left(cloud: Cloud) -> list[str]:
    dead = {uuid for uuid, compute in cloud.computes.items() if compute.is_dead}
    permanent = (keys.COMPUTES, keys.INSTANCES, keys.FLAVORS, keys.QUOTAS)
    # Keys that belong to a dead compute, or to its instances, stay until the compute is forgotten.
    unreachable = {
        keys.last(key) for key in cloud.etcd.entries if key.startswith(tuple(map(keys.request_prefix, dead)) or '-')
    }
    leftovers = [
        f'all is destroyed, and {key} is left'
        for key, entry in cloud.etcd.entries.items()
        if not key.startswith(permanent) and not entry.lease
        if not any(name in key or name.encode() in entry.value for name in (*dead, *unreachable))
    ]
    for consumer, held in cloud.model.held.items():
        leftovers += [
            f'all is destroyed, and {consumer} holds something of {provider}' for provider in held.keys() - dead
        ]
    for compute in cloud.computes.values():
        if not compute.is_dead:
            leftovers += [f'all is destroyed, and {instance} is a guest' for instance in compute.hypervisor.guests()]
            leftovers += [f'all is destroyed, and {mac} is reserved' for mac in compute.hypervisor.reservations()]
    return leftovers


def restart_all(cloud: Cloud) -> None:
    for compute in cloud.computes.values():
        if not compute.is_dead:
            compute.restart()


def nothing_remembered(cloud: Cloud) -> list[str]:
    """Check that no state directory remembers an ended instance after a restart."""
    return [
        f'{cloud.world.names.get(instance, instance)} has ended, and is remembered on {cloud.world.names[uuid]}'
        for uuid, compute in cloud.computes.items()
        for instance in compute.remembered()
        if not compute.is_dead
    ]


def _minute(compute: Compute) -> list[EcompError]:
    if compute.is_dead:
        return []
    compute.planner.works_again()
    errors = compute.do(
        *(compute.look_after_presence, compute.plan, compute.keep_claims, compute.planner.recheck),
        *(compute.hear_hosts, compute.hear_queues, compute.pull),
    )
    if compute.knows_of_waiting:  # a request that it has just tried is checked again a moment later
        compute.world.clock += 1.0
        errors += compute.do(compute.hear_queues, compute.pull)
    return errors
