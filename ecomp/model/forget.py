"""What keeps a compute from being forgotten, and what remains of one that may be. Pure."""

from __future__ import annotations

from collections.abc import Collection

from ecomp.model import keys
from ecomp.model.audit import CHECKS
from ecomp.model.finding import Finding
from ecomp.model.host import LIVE_STATES, MAX_QUOTED_INSTANCES
from ecomp.model.record import DESTROYING
from ecomp.model.text import join_some
from ecomp.model.world import World


def find_obstacle(world: World, compute: str, display_name: str, fenced: bool) -> str | None:
    """Return why a compute must not be forgotten, and the cure; None if it may be.

    Unless the machine is fenced, it may run the instances with a claim on it (rule: claim-stays).
    """
    if compute in world.living_computes:
        host = world.named_computes.find_hostname(compute)
        return f'it is alive{f" on {host}" if host else ""}. Fix: stop its ecompute'
    consumers, there = set(world.planes.list_consumers(compute)), world.find_inhabitants(compute)
    if there.living:
        cure = 'destroy all instances there, and repeat the command'
        return f'it still has {_format_instances(there.living, world)}. Fix: {cure}'
    if attempted := consumers & world.attempted:
        cure = f'repeat the command when the attempt has finished, or {keys.ATTEMPT_SECONDS} s after its eschedule died'
        return f'an attempt to place {_format_instances(attempted, world)} there is still running. Fix: {cure}'
    if unreadable := (there.destroyed | consumers) & world.malformed_records.keys():
        have = 'have malformed records' if len(unreadable) > 1 else 'has a malformed record'
        return f'{_format_instances(unreadable, world)} {have}. Try: eschedule list'
    for consumer in sorted(consumers):
        homes, record = [*world.requests_by_compute.get(consumer, {})], world.records.get(consumer)
        homes += [record.compute] if record and record.state in (*LIVE_STATES, DESTROYING) else []
        if others := [home for home in homes if home != compute]:
            home = f'{world.format_instance(consumer)} belongs to compute {world.named_computes.format_name(others[0])}'
            return f'instance {home}, but has a claim on this compute. Fix: destroy that instance'
    # After a restore of both planes, a compute may run a queued request without a claim.
    may_run_queued = compute in world.planes.providers and world.select_prefix(keys.QUEUES)
    if (consumers or may_run_queued) and not fenced:
        may_run = f'holds claims and may run {_join(consumers, world)}' if consumers else 'may run queued requests'
        return f'it {may_run}. Fix: {CHECKS["compute-silent"].manual_repair.replace("<host>", display_name)}'
    return None


def find_leftovers(world: World, compute: str) -> list[Finding]:
    """Find what has to be repaired once this compute, which may be forgotten, does not exist.

    Each sentence says what its repair has done.
    """
    there = world.find_inhabitants(compute)

    def make(code: str, name: str, sentence: str) -> Finding:
        compared = keys.request(compute, name), keys.record(compute, name), keys.compute(compute)
        return Finding(code, name, sentence, compute, keys=compared)

    destroyed = 'its accepted destroy is completed: its claim and its keys are removed, and its state is gone'
    stray = 'removed: no compute carries out this request'
    orphaned = 'its claim is released: no request owns it'
    orphans = set(world.planes.list_consumers(compute)) - there.destroyed
    return [
        *(make('allocation-orphaned', each, f'{each}: {destroyed}') for each in sorted(there.destroyed)),
        *(make('request-ended', each, f'{keys.request(compute, each)}: {stray}') for each in sorted(there.stray)),
        *(Finding('allocation-orphaned', each, f'{each}: {orphaned}', compute) for each in sorted(orphans)),
    ]


def _format_instances(instances: Collection[str], world: World) -> str:
    return f'instance{"s" if len(instances) > 1 else ""} {_join(instances, world)}'


def _join(instances: Collection[str], world: World) -> str:
    return join_some([world.format_instance(each) for each in sorted(instances)], MAX_QUOTED_INSTANCES)
