"""What becomes of a cloud that is left alone: the leases of the dead end, computes go on until nothing is done."""

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

ROUNDS = 20
"""A minute each. What has not come to rest by then never does."""
SHORT = 180
"""Seconds: leases of what is under way. Longer ones are of what is kept."""


def left_alone(cloud: Cloud) -> list[str]:
    """Leave it alone, ask once more for what nobody knows the end of, and in the end destroy all: what is wrong."""
    return next((wrong for wrong in _stages(cloud) if wrong), [])


def _stages(cloud: Cloud) -> Iterator[list[str]]:
    yield [f'unexpected error: {each}' for each in cloud.world.surprises]
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
    yield [f'unexpected error: {each}' for each in cloud.world.surprises]


def fingerprint(cloud: Cloud) -> int:
    """What decides how it goes on when it is left alone: who wrote what, and in which order, does not.

    Of whoever is a part of a compute its whole history does, for that goes on.
    """
    commands = {each.actor for each in cloud.commands}
    actors = [
        (each.dead, each.done, repr(each.outcome) if each in commands else each.history) for each in cloud.world.actors
    ]
    etcd = [(each.key, each.value, each.lease) for _, each in sorted(cloud.etcd.entries.items())]
    hosts = [
        (*each.hypervisor.guests().items(), *each.hypervisor.reservations().items(), *each.disk.files.items())
        for each in cloud.computes.values()
    ]
    leases = tuple(sorted(cloud.etcd.leases))
    return hash((repr(actors), repr(etcd), leases, repr(hosts), cloud.model.shape(), cloud.world.clock))


def settle(cloud: Cloud) -> list[str]:
    """Until nobody writes anything for two minutes; what is still done after ROUNDS of them."""
    killed = {actor.process for actor in cloud.world.actors if actor.dead}
    for actor in cloud.world.actors:
        actor.dead = not actor.done
    for compute in cloud.computes.values():
        if killed & {compute.process, compute.uuid} and not compute.is_dead:
            compute.restart()
    kept = {each.presence.lease for each in cloud.computes.values() if not each.is_dead}
    owners = {actor.name for actor in cloud.world.actors}
    for lease, each in list(cloud.etcd.leases.items()):
        if each.owner in owners and each.seconds <= SHORT and lease not in kept:
            cloud.etcd.end(lease)
    quiet = 0
    for _ in range(ROUNDS):
        before = cloud.etcd.revision, cloud.model.writes
        failed = [error for each in cloud.computes.values() if not each.is_dead for error in _minute(each)]
        cloud.world.clock += 61.0
        quiet = quiet + 1 if before == (cloud.etcd.revision, cloud.model.writes) else 0
        if quiet == 2:
            return [f'at rest, and something fails for ever: {error}' for error in failed]
    return [f'does not come to rest: after {ROUNDS} minutes something is still written every minute']


def ask_again(cloud: Cloud) -> list[str]:
    """The same commands with --uuid, where the user was told to, or could not be told anything."""
    wrong = []
    for command in cloud.unknown():
        name = cloud.world.names.get(command.wanted.instance, command.wanted.instance)
        try:
            cloud.create(command.wanted, resume=True)
        except Conflict as error:
            if not has_past(cloud, command.wanted):
                wrong.append(f'{name}: asked for again with --uuid, and refused for no reason that lasts: {error}')
        except NoCapacity as error:
            if cloud.is_ample:
                wrong.append(f'{name}: asked for again with --uuid, there is "no capacity", with room for it: {error}')
        except EcompError as error:
            wrong.append(f'{name}: asked for again with --uuid: {error}')
    for again in to_be_repeated(cloud):
        with suppress(Conflict, NotFound):  # it says why not, or all of it was done
            again()
    return wrong


def has_past(cloud: Cloud, wanted: SetOrder) -> bool:
    """Whether who asks for it again is refused for a reason: it ended, ends or waits, or is called otherwise.

    Its name may be another's, too.
    """
    entries = cloud.etcd.entries
    instance, name = wanted.instance, entries.get(keys.name(wanted.name or ''))
    if name is not None and instance.encode() not in name.value:
        return True
    names = {keys.last(key): json.loads(each.value) for key, each in entries.items() if key.startswith(keys.NAMES)}
    called = {name for name, held in names.items() if held.get('instance') == instance}
    if called - {wanted.name}:
        return True
    records = [each for key, each in entries.items() if key.startswith(keys.INSTANCES) and key.endswith(instance)]
    record = records[0] if records else None
    if record is not None and json.loads(record.value)['state'] in (GONE, ERROR):
        return True
    there = [each for key, each in entries.items() if key.endswith(f'/{instance}')]
    waits = any(each.key.startswith(keys.QUEUES) for each in there)
    return waits or any(
        each.key.startswith(keys.HOSTS) and not json.loads(each.value)['allocations'] for each in there
    )


def to_be_repeated(cloud: Cloud) -> list[Callable[[], object]]:
    """What operators are told to do once more; or have to anyway, where something was astray."""
    return [
        actor.again
        for actor in cloud.world.actors
        if actor.again is not None and (cloud.is_astray or actor.dead or isinstance(actor.outcome, Unreachable))
    ]


def destroy_all(cloud: Cloud) -> None:
    asked = [keys.last(key) for key in cloud.etcd.entries if key.startswith(keys.HOSTS)]
    waiting = [key for key in cloud.etcd.entries if key.startswith(keys.QUEUES) and not key.endswith(keys.TAKER)]
    for instance in [*asked, *map(keys.last, waiting)]:
        try:
            destroy(cloud.store, instance)
        except NotFound:
            continue


def nothing_left(cloud: Cloud) -> list[str]:
    dead = {uuid for uuid, compute in cloud.computes.items() if compute.is_dead}
    kept = (keys.COMPUTES, keys.INSTANCES, keys.FLAVORS, keys.QUOTAS)
    # Of what was on a compute that is dead nobody has taken anything away yet.
    out = {keys.last(key) for key in cloud.etcd.entries if key.startswith(tuple(map(keys.request_prefix, dead)) or '-')}
    left = [
        f'all is destroyed, and {key} is left'
        for key, entry in cloud.etcd.entries.items()
        if not key.startswith(kept) and not entry.lease
        if not any(each in key or each.encode() in entry.value for each in (*dead, *out))
    ]
    for consumer, held in cloud.model.held.items():
        left += [f'all is destroyed, and {consumer} holds something of {each}' for each in held.keys() - dead]
    for compute in cloud.computes.values():
        if not compute.is_dead:
            left += [f'all is destroyed, and {each} is a guest' for each in compute.hypervisor.guests()]
            left += [f'all is destroyed, and {each} is reserved' for each in compute.hypervisor.reservations()]
    return left


def restart_all(cloud: Cloud) -> None:
    for compute in cloud.computes.values():
        if not compute.is_dead:
            compute.restart()


def nothing_remembered(cloud: Cloud) -> list[str]:
    """What ended is not remembered by a state directory any more, at the latest once its compute was started again."""
    return [
        f'{cloud.world.names.get(each, each)} has ended, and is remembered on {cloud.world.names[uuid]}'
        for uuid, compute in cloud.computes.items()
        for each in compute.remembered()
        if not compute.is_dead
    ]


def _minute(compute: Compute) -> list[EcompError]:
    if compute.is_dead:
        return []
    compute.planner.works_again()
    failed = compute.do(
        *(compute.look_after_presence, compute.plan, compute.keep_claims, compute.planner.recheck),
        *(compute.hear_hosts, compute.hear_queues, compute.pull),
    )
    if compute.knows_of_waiting:  # what it was just at it looks at again a moment later
        compute.world.clock += 1.0
        failed += compute.do(compute.hear_queues, compute.pull)
    return failed
