"""Forget a compute that is gone for good: make the repairs of a cluster without it."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ecomp.errors import Conflict
from ecomp.failpoints import failpoint
from ecomp.model import keys
from ecomp.model.audit import CHECKS
from ecomp.model.finding import Finding
from ecomp.model.host import LIVE_STATES, MAX_QUOTED_INSTANCES, is_ours
from ecomp.model.states import DESTROYING
from ecomp.model.text import join_some
from ecomp.model.world import Planes, ProviderState, World
from ecomp.placement import providers
from ecomp.placement.client import Placement
from ecomp.scheduler.operations.audit import Repairs, StaleFindingError, read_provider
from ecomp.scheduler.operations.decommission import make_not_found
from ecomp.scheduler.queries.hosts import read_world
from ecomp.shared.attempts import is_alive, read_silence_condition
from ecomp.store.client import Delete, Store, retry_until_committed

# Tries to forget a compute, each after a new read of both planes.
MAX_TRIES = 5


def forget(  # noqa: PLR0913
    store: Store,
    placement: Placement,
    compute: str,
    display_name: str,
    now: Callable[[], str],
    report: Callable[[str], None],
    fenced: bool = False,
) -> None:
    """Remove a compute from placement and etcd, and report a sentence for each removal.

    `fenced` says that the operator confirms that the machine is off for good. Nothing checks that.
    """

    def try_once() -> World | None:
        world = _read_planes(store, placement, compute)
        if (reason := find_obstacle(world, compute, display_name, fenced)) is not None:
            raise Conflict(f'compute {display_name} is not forgotten: {reason}')
        findings, provider = find_leftovers(world, compute), world.planes.providers.get(compute)
        if not findings and compute not in world.named_computes.stored_hostnames:
            if provider is None and world.get_value(keys.compute(compute)) is None:
                raise make_not_found(display_name)
            if provider is not None and provider.allocations is None:
                raise make_not_found(display_name, provider.name)
        if is_alive(store, compute):
            return None
        repairs = Repairs(store, placement, world, now())
        for finding in findings:
            try:
                repairs.repair(finding)
            except StaleFindingError:
                # Undecodable bytes of a key are read as this character, with which the key cannot be found again.
                if '\ufffd' in finding.subject and store.get(finding.keys[0]) is None:
                    prefix = keys.request_prefix(compute)
                    raise Conflict(
                        f'compute {display_name} is not forgotten: a key below {prefix} is not UTF-8 (`etcdctl get '
                        f'--keys-only --prefix {prefix} | cat -v` shows the key). Fix: remove the key with etcdctl'
                    ) from None
                return None
            report(finding.sentence)
        return world

    lost = Conflict(f'compute {display_name}: other processes keep changing it. Try: the same command again')
    provider = retry_until_committed(try_once, lost, MAX_TRIES).planes.providers.get(compute)
    # The provider goes after the repairs, and the host name last: after a kill the command continues.
    failpoint('host-emptied')
    _unregister(store, placement, provider, compute, display_name, report)
    # The compute may have started after the last read; it registers its provider at its start only.
    if is_alive(store, compute):
        raise Conflict(f'compute {display_name} was started while it was being forgotten. Fix: restart its ecompute')


def _unregister(
    store: Store,
    placement: Placement,
    provider: ProviderState | None,
    compute: str,
    label: str,
    report: Callable[[str], None],
) -> None:
    if provider is not None and provider.allocations is not None:
        try:
            providers.delete_provider(placement, compute)
        except Conflict as error:
            raise Conflict(f'compute {label}: its resource provider stays: {error}') from error
        report(f'{label}: its resource provider is removed')
    failpoint('host-unregistered')
    # The name last: until then the command can be repeated with it.
    silent, name = read_silence_condition(store, compute), store.get(keys.hostname(compute))
    last_keys = [entry.key for entry in (silent, name) if entry is not None and entry.revision]
    if silent is not None and last_keys and store.commit([silent], list(map(Delete, last_keys))) is not None:
        if silent.revision:
            report(f'{silent.key}: removed: it had no lease')
        if name is not None and provider is None:
            report(f'{label}: its host name is removed')


def _read_planes(store: Store, placement: Placement, compute: str) -> World:
    # Placement first: a claim that is delivered later has its key in etcd by then. /hosts last: requests move there.
    name = providers.read_provider_name(placement, compute)
    state = read_provider(placement, compute, name) if name is not None else None
    if state is not None and not is_ours(compute, state.name, state.inventory or ()):
        state = state._replace(allocations=None)
    pending = {**store.snapshot(keys.ATTEMPTS).entries, **store.snapshot(keys.QUEUES, keys_only=True).entries}
    return read_world(store, Planes({} if state is None else {compute: state}, pending))


def find_obstacle(world: World, compute: str, display_name: str, fenced: bool) -> str | None:
    """Return why a compute must not be forgotten, and the cure (rule: claim-stays)."""
    if compute in world.living_computes:
        host = world.named_computes.find_hostname(compute)
        return f'it is alive{f" on {host}" if host else ""}. Fix: stop its ecompute'
    consumers, there = set(world.planes.list_consumers(compute)), world.find_inhabitants(compute)
    if there.living:
        cure = 'destroy all instances there, and repeat the command'
        return f'it still has {_format_instances(there.living, world)}. Fix: {cure}'
    if attempted := consumers & world.attempted:
        cure = f'repeat the command when that process has finished, or {keys.ATTEMPT_SECONDS} s after it was killed'
        return f'another process is still placing {_format_instances(attempted, world)} there. Fix: {cure}'
    if unreadable := (there.destroyed | consumers) & world.malformed_records.keys():
        have = 'have malformed records' if len(unreadable) > 1 else 'has a malformed record'
        return f'{_format_instances(unreadable, world)} {have}. Try: eschedule list'
    homes = filter(None, (_describe_home_elsewhere(world, each, compute) for each in sorted(consumers)))
    if elsewhere := next(homes, ''):
        return f'instance {elsewhere}, but has a claim on this compute. Fix: destroy that instance'
    # After a restore of both planes, a compute may run a queued request without a claim.
    may_run_queued = compute in world.planes.providers and world.select_prefix(keys.QUEUES)
    if (consumers or may_run_queued) and not fenced:
        may_run = f'holds claims and may run {_join(consumers, world)}' if consumers else 'may run queued requests'
        return f'it {may_run}. Fix: {CHECKS["compute-silent"].manual_repair.replace("<host>", display_name)}'
    return None


def _describe_home_elsewhere(world: World, instance: str, compute: str) -> str:
    homes, record = [*world.requests_by_compute.get(instance, {})], world.records.get(instance)
    homes += [record.compute] if record and record.state in (*LIVE_STATES, DESTROYING) else []
    home = next((home for home in homes if home != compute), '')
    sentence = f'{world.format_instance(instance)} belongs to compute {world.named_computes.format_name(home)}'
    return sentence if home else ''


def find_leftovers(world: World, compute: str) -> list[Finding]:
    """Find the destroys to complete, and requests and claims to remove, for a forgotten compute."""
    there = world.find_inhabitants(compute)

    def make(code: str, name: str, sentence: str) -> Finding:
        compared = keys.request(compute, name), keys.record(compute, name), keys.compute(compute)
        return Finding(code, name, sentence, compute, keys=compared)

    destroyed = 'its accepted destroy is completed: its claim and its keys are removed, and its record has state gone'
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
