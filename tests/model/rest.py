"""Leave a cloud alone: killed processes' leases expire, and computes work until at rest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress

from ecomp.errors import Conflict, EcompError, NoCapacity, NotFound, Unreachable
from ecomp.model import keys
from ecomp.model.order import SetOrder
from ecomp.model.states import ERROR, GONE
from ecomp.scheduler.changes.change import destroy
from ecomp.scheduler.placing.modify import protect
from tests.model.cloud import Cloud
from tests.model.compute import Compute
from tests.model.properties import find_violations

# Rounds of a minute each. A cloud that is not at rest after these never comes to rest.
MAX_MINUTES = 20
# Seconds. Leases up to this belong to attempts in flight; longer ones belong to records that are kept.
MAX_ATTEMPT_LEASE_SECONDS = 180


def check_left_alone(cloud: Cloud) -> list[str]:
    return next((problems for problems in _run_stages(cloud) if problems), [])


def _run_stages(cloud: Cloud) -> Iterator[list[str]]:
    yield [f'unexpected error: {error}' for error in cloud.world.unexpected_errors]
    yield settle(cloud)
    if cloud.ends_inconsistent:
        return
    if not list_retries(cloud):
        yield find_violations(cloud)
    yield repeat_commands(cloud)
    yield settle(cloud)
    yield find_violations(cloud)
    destroy_all(cloud)
    yield settle(cloud)
    restart_all(cloud)
    yield settle(cloud)
    yield find_violations(cloud)
    yield find_leftovers(cloud)
    yield find_remembered(cloud)
    yield [f'unexpected error: {error}' for error in cloud.world.unexpected_errors]


def make_fingerprint(cloud: Cloud) -> int:
    """Return a hash of everything that decides what happens when the cloud is left alone.

    Who wrote a value, and in which order, does not count.
    An actor that is part of a compute continues to run, so its whole history counts.
    """
    commands = {command.actor for command in cloud.commands}
    actors = [
        (each.dead, each.done, repr(each.outcome) if each in commands else each.history) for each in cloud.world.actors
    ]
    etcd = [(entry.key, entry.value, entry.lease) for _, entry in sorted(cloud.etcd.entries.items())]
    hosts = [(*compute.hypervisor.summarize(), *compute.disk.files.items()) for compute in cloud.computes.values()]
    leases = tuple(sorted(cloud.etcd.leases))
    return hash((repr(actors), repr(etcd), leases, repr(hosts), cloud.model.make_fingerprint(), cloud.world.clock))


def settle(cloud: Cloud) -> list[str]:
    """Run minutes until two in a row without a write. Return what fails or writes for ever."""
    killed = {actor.process for actor in cloud.world.actors if actor.dead}
    for actor in cloud.world.actors:
        actor.dead = not actor.done
    for compute in cloud.computes.values():
        if killed & {compute.process, compute.uuid} and not compute.is_dead:
            compute.restart()
    renewed = {host.presence.lease for host in cloud.computes.values() if not host.is_dead}
    owners = {actor.name for actor in cloud.world.actors}
    for lease, grant in list(cloud.etcd.leases.items()):
        if grant.owner in owners and grant.seconds <= MAX_ATTEMPT_LEASE_SECONDS and lease not in renewed:
            cloud.etcd.end_lease(lease)
    quiet_minutes = 0
    for _ in range(MAX_MINUTES):
        before = cloud.etcd.revision, cloud.model.writes
        errors = [error for host in cloud.computes.values() if not host.is_dead for error in _run_minute(host)]
        cloud.world.clock += 61.0
        quiet_minutes = quiet_minutes + 1 if before == (cloud.etcd.revision, cloud.model.writes) else 0
        if quiet_minutes == 2:
            return [f'at rest, and something fails for ever: {error}' for error in errors]
    return [f'does not come to rest: after {MAX_MINUTES} minutes something is still written every minute']


def repeat_commands(cloud: Cloud) -> list[str]:
    """Repeat, with --uuid, the commands whose outcome the user does not know."""
    problems = []
    for command in cloud.find_unknown_outcomes():
        name = cloud.world.names.get(command.order.instance, command.order.instance)
        try:
            cloud.create(command.order, resume=True)
        except Conflict as error:
            if not is_refusal_lasting(cloud, command.order):
                problems.append(f'{name}: asked for again with --uuid, and refused for no reason that lasts: {error}')
        except NoCapacity as error:
            if cloud.has_ample_room:
                problems.append(
                    f'{name}: asked for again with --uuid, there is "no capacity", with room for it: {error}'
                )
        except EcompError as error:
            problems.append(f'{name}: asked for again with --uuid: {error}')
    for retry in list_retries(cloud):
        with suppress(Conflict, NotFound):  # a refusal with its reason, or everything was done already
            retry()
    return problems


def is_refusal_lasting(cloud: Cloud, order: SetOrder) -> bool:
    entries = cloud.etcd.entries
    instance, name = order.instance, entries.get(keys.name(order.name or ''))
    if name is not None and instance.encode() not in name.value:
        return True
    names = {
        keys.get_last_part(key): json.loads(entry.value) for key, entry in entries.items() if key.startswith(keys.NAMES)
    }
    own_names = {name for name, held in names.items() if held.get('instance') == instance}
    if own_names - {order.name}:
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


def list_retries(cloud: Cloud) -> list[Callable[[], object]]:
    return [
        actor.retry
        for actor in cloud.world.actors
        if actor.retry is not None
        and (cloud.starts_inconsistent or actor.dead or isinstance(actor.outcome, Unreachable))
    ]


def destroy_all(cloud: Cloud) -> None:
    requested = {key: entry for key, entry in cloud.etcd.entries.items() if key.startswith(keys.HOSTS)}
    adopted = {keys.get_last_part(key) for key, entry in requested.items() if b'"adopted"' in entry.value}
    for key in (key for key, entry in requested.items() if b'"protected": true' in entry.value):
        with suppress(Conflict):  # it is being destroyed
            protect(cloud.store, keys.get_last_part(key), is_protected=False)
    queued = [key for key in cloud.etcd.entries if key.startswith(keys.QUEUES) and not key.endswith(keys.TAKER)]
    for instance in map(keys.get_last_part, [*requested, *queued]):
        try:
            destroy(cloud.store, instance, releases=instance in adopted)
        except NotFound:
            continue


def find_leftovers(cloud: Cloud) -> list[str]:
    dead = {uuid for uuid, compute in cloud.computes.items() if compute.is_dead}
    permanent = (keys.COMPUTES, keys.INSTANCES, keys.FLAVORS, keys.QUOTAS, keys.STACKS)
    # Keys that belong to a dead compute, or to its instances, stay until the compute is forgotten.
    unreachable = {
        keys.get_last_part(key)
        for key in cloud.etcd.entries
        if key.startswith(tuple(map(keys.request_prefix, dead)) or '-')
    }
    leftovers = [
        f'all is destroyed, and {key} is left'
        for key, entry in cloud.etcd.entries.items()
        if not key.startswith(permanent) and not entry.lease
        if not any(name in key or name.encode() in entry.value for name in (*dead, *unreachable))
    ]
    for each, held in cloud.model.held.items():
        leftovers += [f'all is destroyed, and {each} holds something of {provider}' for provider in held.keys() - dead]
    for compute in cloud.computes.values():
        if not compute.is_dead:
            leftovers += [f'all is destroyed, and {each} is a guest' for each in compute.hypervisor.list_guests()]
            leftovers += [f'all is destroyed, and {mac} is reserved' for mac in compute.hypervisor.list_reservations()]
    return leftovers


def restart_all(cloud: Cloud) -> None:
    for compute in cloud.computes.values():
        if not compute.is_dead:
            compute.restart()


def find_remembered(cloud: Cloud) -> list[str]:
    return [
        f'{cloud.world.names.get(instance, instance)} has ended, and is remembered on {cloud.world.names[uuid]}'
        for uuid, compute in cloud.computes.items()
        for instance in compute.list_remembered()
        if not compute.is_dead
    ]


def _run_minute(compute: Compute) -> list[EcompError]:
    if compute.is_dead:
        return []
    compute.planner.retry_now()
    errors = compute.run_all(
        *(compute.keep_presence, compute.plan, compute.reconcile, compute.planner.recheck, compute.measure),
        *(compute.read_requests, compute.read_queues, compute.pull),
    )
    if compute.has_queued:  # a request that it has just tried is checked again a moment later
        compute.world.clock += 1.0
        errors += compute.run_all(compute.read_queues, compute.pull)
    return errors
