"""Properties that must hold in a cloud at rest.

They are read from the models; only the last one uses the product's audit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ecomp.errors import EcompError, NoCapacity, UsageError
from ecomp.model import status
from ecomp.scheduler.operations.audit import audit
from tests.model.cloud import SIZE, Cloud
from tests.model.invariants import ENTRY, list_resources

Json = dict[str, Any]


class Facts:
    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        families: dict[str, dict[str, Json]] = {}
        for key, entry in cloud.etcd.entries.items():
            family, _, rest = key[1:].partition('/')
            value = json.loads(entry.value) if entry.value[:1] == b'{' else {'text': entry.value.decode()}
            families.setdefault(family, {})[rest] = {**value, '': entry}
        self.families = families
        hosts = ((path.partition('/'), value) for path, value in families.get('hosts', {}).items())
        self.requests: list[tuple[str, str, Json]] = [(compute, name, value) for (compute, _, name), value in hosts]
        # A record below the compute with the request overrides one that another process wrote. A record by a compute of
        # this cloud overrides one by an unknown compute. Malformed records are ignored.
        requested = {f'{compute}/{name}' for compute, name, _ in self.requests}
        recorded = [item for item in families.get('instances', {}).items() if 'compute' in item[1]]
        recorded.sort(key=lambda each: (each[0] in requested, each[1]['compute'] in cloud.computes))
        self.records = {path.rpartition('/')[2]: value for path, value in recorded}
        queues = families.get('queues', {}).items()
        self.waiting = {path.rpartition('/')[2]: value for path, value in queues if not path.endswith('/taker')}
        self.held = cloud.model.held
        self.dead_computes = {uuid for uuid, compute in cloud.computes.items() if compute.is_dead}
        self.living = {name: each for name, each in self.records.items() if each['state'] in ('active', 'stopped')}

    def format_name(self, instance: str) -> str:
        return self.cloud.world.names.get(instance, instance)


def find_violations(cloud: Cloud) -> list[str]:
    facts = Facts(cloud)
    return [violation for rule in RULES for violation in rule(facts)]


def check_acknowledged(facts: Facts) -> Iterator[str]:
    """A NOTIFIED instance is requested of the reported compute, or has ended: none is stuck."""
    requested = {(instance, compute) for compute, instance, _ in facts.requests}
    for instance, compute in facts.cloud.collect_placements().items():
        record = facts.records.get(instance)
        if (instance, compute) not in requested and (record is None or record['state'] not in ('gone', 'error')):
            yield f'{facts.format_name(instance)} was NOTIFIED, and nobody is asked for it'
    for instance, record in facts.records.items():
        if record['state'] == 'error' and instance not in facts.cloud.allowed_to_fail:
            yield f'{facts.format_name(instance)} ends in error: {record["error"]["reason"]}'
        elif (
            record['state'] not in ('active', 'stopped', 'gone', 'error')
            and record['compute'] not in facts.dead_computes
        ):
            yield f'{facts.format_name(instance)} is {record["state"]} for ever'


def check_refusals(facts: Facts) -> Iterator[str]:
    """No command is refused although there is room."""
    for command in facts.cloud.commands:
        outcome = command.actor.outcome
        is_refused = isinstance(outcome, NoCapacity | UsageError)
        if facts.cloud.has_ample_room and is_refused and not _may_all_have_expired(facts.cloud):
            yield f'{command.actor.name} is refused, with room for it: {outcome}'


def _may_all_have_expired(cloud: Cloud) -> bool:
    # If all leases expired, a create may be refused correctly.
    expired = {step.fate for step in cloud.world.steps if step.call is None and 'lease of compute' in step.fate}
    return len(expired) >= len(cloud.computes)


def check_requests(facts: Facts) -> Iterator[str]:
    """An instance has at most one request, which is carried out, and no attempt stays."""
    for instance, number in Counter(instance for _, instance, _ in facts.requests).items():
        if number > 1:
            yield f'{facts.format_name(instance)} is requested of {number} computes'
    for compute, instance, request in facts.requests:
        record = facts.records.get(instance)
        if compute in facts.dead_computes:
            if compute not in facts.cloud.model.providers:
                yield f'{facts.format_name(instance)} is requested of a compute that was forgotten'
        elif not request['allocations']:
            yield f'{facts.format_name(instance)} is to be destroyed, and is not'
        elif record is None or record['state'] not in ('active', 'stopped') or record['compute'] != compute:
            yield f'{facts.format_name(instance)} is requested of {facts.format_name(compute)} and does not live there'
        elif any(record.get(field) != request.get(field) for field in ('name', 'protected')):
            yield f'the record of {facts.format_name(instance)} lacks a change of its request'
        elif record.get('rebuilt', '0') != str(request.get('rebuild', 0)):
            yield f'the last rebuild of {facts.format_name(instance)} is not recorded as done'
        if instance in facts.waiting:
            yield f'{facts.format_name(instance)} waits, and is requested of a compute'
    for name in facts.families.get('requests', {}):
        yield f'somebody is at {facts.format_name(name)} for ever'
    for path in facts.families.get('queues', {}):
        if path.endswith('/taker'):
            yield f'{path} is taken for ever'


def check_claims(facts: Facts) -> Iterator[str]:
    """Claims and requests agree, and no provider is used above its capacity."""
    requested = {
        instance: {provider: allocation['resources'] for provider, allocation in request['allocations'].items()}
        for _, instance, request in facts.requests
    }
    for instance, resources in requested.items():
        if resources and facts.held.get(instance, {}) != resources:
            yield f'{facts.format_name(instance)} is requested, and holds {_format(facts, facts.held.get(instance))}'
    for consumer, held in facts.held.items():
        if consumer not in requested and not facts.dead_computes.issuperset(held):
            yield f'the claim of {facts.format_name(consumer)} is leaked: {_format(facts, held)}'
    for provider, model_provider in facts.cloud.model.providers.items():
        for kind in model_provider.inventories:
            if facts.cloud.model.get_usage(provider, kind) > facts.cloud.model.get_capacity(provider, kind):
                yield f'more {kind} of {facts.format_name(provider)} is held than there is'


def check_guests(facts: Facts) -> Iterator[str]:
    """Each living instance has one guest, on its compute, and nothing else has a guest there."""
    for uuid, compute in facts.cloud.computes.items():
        living_here = {name for name, record in facts.living.items() if record['compute'] == uuid}
        if compute.is_dead:
            continue
        guests_here = compute.hypervisor.list_guests()
        for name in compute.hypervisor.recreated:
            yield f'{facts.format_name(name)} ran on {facts.format_name(uuid)}, and its disk was made anew'
        for name in guests_here.keys() - living_here:
            yield f'{facts.format_name(name)} is a guest on {facts.format_name(uuid)} that nobody asks for'
        for name in living_here:
            guest = guests_here.get(name)
            if guest is None or not guest.disk or guest.running != (facts.living[name]['state'] == 'active'):
                yield f'{facts.format_name(name)} is {facts.living[name]["state"]}, and its guest is not'
            elif guest.rebuilt and 'rebuilt' in facts.living[name] and facts.living[name].get('host_keys'):
                yield f'the record of {facts.format_name(name)} has host keys of the guest before'
        for reservation in compute.hypervisor.list_reservations().values():
            if reservation.instance not in living_here:
                yield f'{facts.format_name(reservation.instance)} has an address reserved, and does not live there'
    for name, record in facts.living.items():
        booted = facts.families.get('booted', {}).get(name, {}).get('text')
        if (
            record['compute'] not in facts.dead_computes
            and booted != (record['addresses'] or [{'address': None}])[0]['address']
        ):
            yield f'/booted says {booted} of {facts.format_name(name)}, its record something else'
    for name in facts.families.get('booted', {}).keys() - facts.living.keys():
        yield f'/booted speaks of {facts.format_name(name)}, which does not live'


def check_shared(facts: Facts) -> Iterator[str]:
    """Names, groups and quotas match the instances that are requested or queued."""
    # What an evacuated instance had is its replacement's.
    requests = [each for each in facts.requests if not each[2].get('replaced_by')]
    owners = {instance: (compute, request) for compute, instance, request in requests}
    owners |= {instance: ('', request) for instance, request in facts.waiting.items()}
    requested_names = {request['name']: instance for instance, (_, request) in owners.items() if request.get('name')}
    names = {name: value['instance'] for name, value in facts.families.get('names', {}).items() if not value[''].lease}
    if names != requested_names:
        yield f'the names are {_format(facts, names)}, and called so are {_format(facts, requested_names)}'
    members: dict[str, dict[str, str]] = {}
    for instance, (compute, request) in owners.items():
        if request.get('group'):
            members.setdefault(request['group']['name'], {})[instance] = compute
    groups = facts.families.get('groups', {})
    if {name: group['members'] for name, group in groups.items()} != members:
        yield f'the groups have {_format(facts, groups)}, and members are {_format(facts, members)}'
    for name, group in groups.items():
        computes = [compute for compute in group['members'].values() if compute]
        if group['strict'] and len(set(computes)) != (
            min(len(computes), 1) if group['policy'] == 'affinity' else len(computes)
        ):
            yield f'group {name} is strict {group["policy"]}, and is on {_format(facts, computes)}'
    for project, quota in facts.families.get('quotas', {}).items():
        used: Counter[str] = Counter()
        for _, request in owners.values():
            if request['project_id'] == project:
                (held,) = list_resources(request[''].value).values() or [request.get('resources') or SIZE]
                used.update({**held, 'instances': 1})
        if Counter(quota['used']) != used:
            yield f'the quota counts {quota["used"]}, and there are {used["instances"]} instances'
        exceeded = [name for name, limit in quota['limits'].items() if quota['used'].get(name, 0) > limit]
        if exceeded and facts.cloud.has_quota_from_start:
            yield f'the quota is exceeded: {quota}'


def check_queues(facts: Facts) -> Iterator[str]:
    """An instance that fits somewhere does not stay in its queue."""
    model = facts.cloud.model
    for instance, request in facts.waiting.items():
        for uuid, compute in facts.cloud.computes.items():
            is_full = uuid in model.providers and model.get_usage(uuid, 'VCPU') >= model.get_capacity(uuid, 'VCPU')
            is_disabled = uuid not in model.providers or status.DISABLED in model.providers[uuid].traits
            # While another compute holds a claim, the instance waits until that one is back or forgotten
            # (rule: claim-stays).
            is_claimed = not facts.held.get(instance, {}).keys() <= {uuid}
            if not (
                compute.is_dead or is_disabled or is_full or is_claimed or _is_excluded_by_group(facts, request, uuid)
            ):
                yield f'{facts.format_name(instance)} waits for ever, and {facts.format_name(uuid)} has room'


def check_audit(facts: Facts) -> Iterator[str]:
    try:
        report = audit(facts.cloud.store, facts.cloud.placement, is_now=True)
    except EcompError as error:
        yield f'the audit fails: {error}'
        return
    for finding in report.findings:
        if finding.code == 'compute-silent':
            continue  # this compute is dead for good in the scenario, and is not forgotten
        if finding.code == 'stack-mismatch' and ENTRY in facts.cloud.invariants.exempt:
            continue  # etcd is restored to before a delivery, and the next apply completes the stack's key
        yield f'the audit finds {finding.code} of {facts.format_name(finding.subject)}: {finding.sentence}'


def _is_excluded_by_group(facts: Facts, request: Json, compute: str) -> bool:
    group = facts.families.get('groups', {}).get((request.get('group') or {}).get('name', ''))
    if group is None or not group['strict']:
        return False
    computes = {member_compute for member_compute in group['members'].values() if member_compute}
    return bool(computes) and (compute in computes) != (group['policy'] == 'affinity')


def _format(facts: Facts, value: object) -> str:
    text = str(value)
    for uuid, name in facts.cloud.world.names.items():
        text = text.replace(uuid, name)
    return text


RULES: list[Callable[[Facts], Iterator[str]]] = [
    *(check_acknowledged, check_refusals, check_requests, check_claims, check_guests, check_shared, check_queues),
    check_audit,
]
