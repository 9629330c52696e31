"""Read the whole cluster from etcd and placement: its hosts, their facts and its metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Set
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ecomp.errors import EcompError, Unreadable
from ecomp.metrics import Samples
from ecomp.model import keys, status
from ecomp.model.allocation import GIB, MIB
from ecomp.model.facts import Facts, parse_facts, sum_usage
from ecomp.model.host import CLOSED, ORPHANED, SILENT, Host, ProviderSummary
from ecomp.model.listing import Absences
from ecomp.model.states import QUEUED, SCHEDULED
from ecomp.model.text import make_printable
from ecomp.model.world import Planes, World, list_hosts
from ecomp.scheduler.queries.computes import read_last_seen
from ecomp.shared.names import load_all, load_quota
from ecomp.store.client import Store

if TYPE_CHECKING:
    from ecomp.placement.client import Placement

CLUSTER_METRICS = {
    'ecomp_cluster_hosts': ('gauge', 'Computes, by the states of `eschedule hosts`.', 'state'),
    'ecomp_cluster_hosts_troubled': ('gauge', 'Living computes that report that they cannot build.', ''),
    'ecomp_cluster_instances': ('gauge', 'Instances, by the states of `eschedule list`.', 'state'),
    'ecomp_cluster_capacity': ('gauge', 'What a compute can allocate.', 'compute host class unit'),
    'ecomp_cluster_used': ('gauge', 'What is allocated on a compute.', 'compute host class unit'),
    'ecomp_cluster_queued_requests': ('gauge', 'Requests in the queue of a flavor.', 'flavor'),
    'ecomp_cluster_quota_limit': ('gauge', 'The limit of a project.', 'project class unit'),
    'ecomp_cluster_quota_used': ('gauge', 'What the instances of a project with limits use.', 'project class unit'),
    'ecomp_cluster_unreadable_values': ('gauge', 'Malformed values in etcd, which do not count.', ''),
}


def read_world(store: Store, planes: Planes | None = None) -> World:
    """Read all computes, requests and records from etcd, and add them to what `planes` has."""
    providers, etcd = (planes.providers, dict(planes.etcd)) if planes else ({}, {})
    # Names first: a compute that is forgotten in between then leaves a name too many, and no name is missing.
    # Requests before records: an instance that ends in between is then read twice, not missed.
    for prefix in (keys.HOSTNAMES, keys.COMPUTES, keys.HOSTS, keys.INSTANCES, keys.TROUBLES):
        etcd |= store.snapshot(prefix).entries
    return World(Planes(providers, etcd), cache(store.claims) if store.claims else None)


def read_hosts(
    store: Store, placement: Placement, world: World | None = None
) -> tuple[list[Host], tuple[EcompError, ...]]:
    """Read all computes, and an error for each malformed record."""
    from ecomp.placement import providers  # imported late here and below: most commands use etcd only

    world = world or read_world(store)
    names = providers.read_provider_names(placement)
    uuids = {*world.living_computes, *world.requests_at, *(uuid for uuid, name in names.items() if uuid == name)}
    shares = {
        compute: facts.replace_usage(sum_usage(compute, world.requests_at.get(compute, {}).values())).rooms
        for compute, facts in read_facts(store).facts.items()
        if compute in uuids and not facts.problem
    }
    if others := (uuids & names.keys()) - shares.keys():
        shares |= providers.read_rooms(placement, others)
    having = {trait: providers.find_with_trait(placement, trait) for trait in status.STATUS_TRAITS}
    marks = {uuid: frozenset(trait for trait in having if uuid in having[trait]) for uuid in shares}
    in_placement = {uuid: ProviderSummary(names.get(uuid, uuid), each, marks[uuid]) for uuid, each in shares.items()}
    hosts = list_hosts(world, in_placement)
    last_seen = read_last_seen(store, [host.compute for host in hosts if host.state in (SILENT, ORPHANED)])
    malformed = ((world.get_record_key(instance), reason) for instance, reason in world.malformed_records.items())
    errors = tuple(Unreadable(make_printable(key, 100), reason) for key, reason in malformed)
    return [host._replace(last_seen=last_seen.get(host.compute)) for host in hosts], errors


def read_metrics(store: Store, placement: Placement) -> tuple[Samples, list[EcompError]]:
    """Read the samples of CLUSTER_METRICS, and an error for each malformed value."""
    # The queues first: an instance that leaves one in between is read twice, and counts where it was read last.
    queue_keys = map(keys.parse_queue_key, store.snapshot(keys.QUEUES, keys_only=True).entries)
    queued = {instance: flavor for flavor, instance in filter(None, queue_keys)}
    quotas, quota_errors = load_all(store, keys.QUOTAS, load_quota)
    world = read_world(store)
    hosts, record_errors = read_hosts(store, placement, world)
    errors = [*record_errors, *quota_errors]
    states = _count_states(world, hosts, queued.keys())
    counts = {'hosts': Counter(host.state for host in hosts), 'instances': states}
    counts['queued_requests'] = Counter(queued.values())
    samples: Samples = {
        f'ecomp_cluster_{name}': {(label,): count for label, count in sorted(counted.items())}
        for name, counted in counts.items()
    }
    for field in ('capacity', 'used'):
        amounts = ({name: getattr(room, field) for name, room in host.rooms.items()} for host in hosts)
        computes = ((host.compute, host.hostname or host.compute) for host in hosts)
        samples[f'ecomp_cluster_{field}'] = _label_amounts(zip(computes, amounts, strict=True))
    samples['ecomp_cluster_quota_limit'] = _label_amounts(((quota.project,), quota.limits) for quota in quotas)
    samples['ecomp_cluster_quota_used'] = _label_amounts(((quota.project,), quota.used) for quota in quotas)
    samples['ecomp_cluster_hosts_troubled'] = {(): sum(host.trouble is not None for host in hosts)}
    return samples | {'ecomp_cluster_unreadable_values': {(): len(errors)}}, errors


def _count_states(world: World, hosts: Iterable[Host], queued: Set[str]) -> Counter[str]:
    away = {host.compute: host.state for host in hosts if host.state in (CLOSED, SILENT)}
    destroyed = {name for compute in away for name in world.find_inhabitants(compute).destroyed}
    states = Counter(Absences(away, destroyed).get_state(record) for record in world.records.values())
    recorded = {*world.records, *world.malformed_records}
    requested = set(filter(keys.is_uuid, world.requests_by_compute)) - recorded
    states.update({SCHEDULED: len(requested), QUEUED: len(queued - requested - recorded)})
    return states


def _label_amounts(rows: Iterable[tuple[tuple[str, ...], Mapping[str, float]]]) -> dict[tuple[str, ...], float]:
    units = {'MEMORY_MB': ('bytes', MIB), 'DISK_GB': ('bytes', GIB)}
    samples = {}
    for labels, amounts in rows:
        for name, amount in sorted(amounts.items()):
            unit, factor = units.get(name, ('units', 1))
            samples[*labels, name, unit] = amount * factor
    return samples


class ReportedFacts(NamedTuple):
    """What living computes publish, and the lease of each, which is the presence's."""

    facts: Mapping[str, Facts]
    leases: Mapping[str, int]


def read_facts(store: Store) -> ReportedFacts:
    entries = {keys.get_last_part(key): each for key, each in store.snapshot(keys.FACTS).entries.items() if each.lease}
    leases = {compute: entry.lease for compute, entry in entries.items()}
    return ReportedFacts({compute: parse_facts(entry.value) for compute, entry in entries.items()}, leases)
