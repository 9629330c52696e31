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
from ecomp.scheduler.operating.audit import audit
from tests.model.cloud import Cloud

Json = dict[str, Any]


class Facts:
    """The contents of etcd, of placement and of the hosts."""

    def __init__(self, cloud: Cloud) -> None:
        self.cloud = cloud
        families: dict[str, dict[str, Json]] = {}
        for key, entry in cloud.etcd.entries.items():
            family, _, rest = key[1:].partition('/')
            value = json.loads(entry.value) if entry.value[:1] == b'{' else {'text': entry.value.decode()}
            families.setdefault(family, {})[rest] = {**value, '': entry}
        self.under = families
        hosts = ((path.partition('/'), value) for path, value in families.get('hosts', {}).items())
        self.asked: list[tuple[str, str, Json]] = [(compute, name, value) for (compute, _, name), value in hosts]
        # A record by the instance's own compute overrides one that another process wrote. A record by a compute of this
        # cloud overrides one by an unknown compute. Malformed records are ignored.
        readable = [item for item in families.get('instances', {}).items() if 'compute' in item[1]]
        recorded = sorted(readable, key=lambda each: each[0].startswith(each[1]['compute']))
        recorded.sort(key=lambda each: each[1]['compute'] in cloud.computes)
        self.records = {path.rpartition('/')[2]: value for path, value in recorded}
        queues = families.get('queues', {}).items()
        self.waiting = {path.rpartition('/')[2]: value for path, value in queues if not path.endswith('/taker')}
        self.held = cloud.model.held
        self.dead = {uuid for uuid, compute in cloud.computes.items() if compute.is_dead}
        self.living = {
            name: record for name, record in self.records.items() if record['state'] in ('active', 'stopped')
        }

    def called(self, instance: str) -> str:
        return self.cloud.world.names.get(instance, instance)


def violations(cloud: Cloud) -> list[str]:
    facts = Facts(cloud)
    return [violation for rule in RULES for violation in rule(facts)]


def acknowledged(facts: Facts) -> Iterator[str]:
    """A NOTIFIED instance is requested of the reported compute, or has ended; none is stuck."""
    requested = {(instance, compute) for compute, instance, _ in facts.asked}
    for instance, compute in facts.cloud.told().items():
        record = facts.records.get(instance)
        if (instance, compute) not in requested and (record is None or record['state'] not in ('gone', 'error')):
            yield f'{facts.called(instance)} was NOTIFIED, and nobody is asked for it'
    for instance, record in facts.records.items():
        if record['state'] == 'error' and instance not in facts.cloud.may_fail:
            yield f'{facts.called(instance)} ends in error: {record["error"]["reason"]}'
        elif record['state'] not in ('active', 'stopped', 'gone', 'error') and record['compute'] not in facts.dead:
            yield f'{facts.called(instance)} is {record["state"]} for ever'


def answered(facts: Facts) -> Iterator[str]:
    """No command is refused although there is room."""
    for command in facts.cloud.commands:
        outcome = command.actor.outcome
        is_refused = isinstance(outcome, NoCapacity | UsageError)
        if facts.cloud.is_ample and is_refused and not _may_all_be_silent(facts.cloud):
            yield f'{command.actor.name} is refused, with room for it: {outcome}'


def _may_all_be_silent(cloud: Cloud) -> bool:
    """True if all computes' leases expired: then a create may be refused correctly."""
    expired = {step.fate for step in cloud.world.steps if step.call is None and 'lease of compute' in step.fate}
    return len(expired) >= len(cloud.computes)


def requests(facts: Facts) -> Iterator[str]:
    """An instance has at most one request, which is carried out; no attempt stays."""
    for instance, number in Counter(instance for _, instance, _ in facts.asked).items():
        if number > 1:
            yield f'{facts.called(instance)} is requested of {number} computes'
    for compute, instance, request in facts.asked:
        record = facts.records.get(instance)
        if compute in facts.dead:
            if compute not in facts.cloud.model.providers:
                yield f'{facts.called(instance)} is requested of a compute that was forgotten'
        elif not request['allocations']:
            yield f'{facts.called(instance)} is to be destroyed, and is not'
        elif record is None or record['state'] not in ('active', 'stopped') or record['compute'] != compute:
            yield f'{facts.called(instance)} is requested of {facts.called(compute)} and does not live there'
        if instance in facts.waiting:
            yield f'{facts.called(instance)} waits, and is requested of a compute'
    for name in facts.under.get('requests', {}):
        yield f'somebody is at {facts.called(name)} for ever'
    for path in facts.under.get('queues', {}):
        if path.endswith('/taker'):
            yield f'{path} is taken for ever'


def claims(facts: Facts) -> Iterator[str]:
    """Claims and requests agree, and no provider is used above its capacity."""
    requested = {
        instance: {provider: allocation['resources'] for provider, allocation in request['allocations'].items()}
        for _, instance, request in facts.asked
    }
    for instance, resources in requested.items():
        if resources and facts.held.get(instance, {}) != resources:
            yield f'{facts.called(instance)} is requested, and holds {_named(facts, facts.held.get(instance))}'
    for consumer, held in facts.held.items():
        if consumer not in requested and not facts.dead.issuperset(held):
            yield f'the claim of {facts.called(consumer)} is leaked: {_named(facts, held)}'
    for provider, model_provider in facts.cloud.model.providers.items():
        for kind in model_provider.inventories:
            if facts.cloud.model.used(provider, kind) > facts.cloud.model.capacity(provider, kind):
                yield f'more {kind} of {facts.called(provider)} is held than there is'


def guests(facts: Facts) -> Iterator[str]:
    """Each living instance has one guest, on its compute; nothing else has a guest there."""
    for uuid, compute in facts.cloud.computes.items():
        living_here = {name for name, record in facts.living.items() if record['compute'] == uuid}
        if compute.is_dead:
            continue
        guests_here = compute.hypervisor.guests()
        for name in compute.hypervisor.remade:
            yield f'{facts.called(name)} ran on {facts.called(uuid)}, and its disk was made anew'
        for name in guests_here.keys() - living_here:
            yield f'{facts.called(name)} is a guest on {facts.called(uuid)} that nobody asks for'
        for name in living_here:
            guest = guests_here.get(name)
            if guest is None or not guest.disk or guest.running != (facts.living[name]['state'] == 'active'):
                yield f'{facts.called(name)} is {facts.living[name]["state"]}, and its guest is not'
        for reservation in compute.hypervisor.reservations().values():
            if reservation.instance not in living_here:
                yield f'{facts.called(reservation.instance)} has an address reserved, and does not live there'
    for name, record in facts.living.items():
        booted = facts.under.get('booted', {}).get(name, {}).get('text')
        if record['compute'] not in facts.dead and booted != (record['addresses'] or [{'address': None}])[0]['address']:
            yield f'/booted says {booted} of {facts.called(name)}, its record something else'
    for name in facts.under.get('booted', {}).keys() - facts.living.keys():
        yield f'/booted speaks of {facts.called(name)}, which does not live'


def shared(facts: Facts) -> Iterator[str]:
    """Names, groups and quotas match the instances that are requested or queued."""
    owners = {instance: (compute, request) for compute, instance, request in facts.asked}
    owners |= {instance: ('', request) for instance, request in facts.waiting.items()}
    requested_names = {request['name']: instance for instance, (_, request) in owners.items() if request.get('name')}
    names = {name: value['instance'] for name, value in facts.under.get('names', {}).items() if not value[''].lease}
    if names != requested_names:
        yield f'the names are {_named(facts, names)}, and called so are {_named(facts, requested_names)}'
    members: dict[str, dict[str, str]] = {}
    for instance, (compute, request) in owners.items():
        if request.get('group'):
            members.setdefault(request['group']['name'], {})[instance] = compute
    groups = facts.under.get('groups', {})
    if {name: group['members'] for name, group in groups.items()} != members:
        yield f'the groups have {_named(facts, groups)}, and members are {_named(facts, members)}'
    for name, group in groups.items():
        computes = [compute for compute in group['members'].values() if compute]
        if group['strict'] and len(set(computes)) != (
            min(len(computes), 1) if group['policy'] == 'affinity' else len(computes)
        ):
            yield f'group {name} is strict {group["policy"]}, and is on {_named(facts, computes)}'
    for project, quota in facts.under.get('quotas', {}).items():
        used: Counter[str] = Counter()
        for _, request in owners.values():
            if request['project_id'] == project:
                used.update({'VCPU': 1, 'MEMORY_MB': 1, 'DISK_GB': 1, 'instances': 1})
        if Counter(quota['used']) != used:
            yield f'the quota counts {quota["used"]}, and there are {used["instances"]} instances'
        exceeded = [name for name, limit in quota['limits'].items() if quota['used'].get(name, 0) > limit]
        if exceeded and facts.cloud.is_limited:
            yield f'the quota is exceeded: {quota}'


def waits(facts: Facts) -> Iterator[str]:
    """An instance that fits somewhere does not stay in its queue."""
    model = facts.cloud.model
    for instance, request in facts.waiting.items():
        for uuid, compute in facts.cloud.computes.items():
            is_full = uuid in model.providers and model.used(uuid, 'VCPU') >= model.capacity(uuid, 'VCPU')
            is_disabled = uuid not in model.providers or status.DISABLED in model.providers[uuid].traits
            # While another compute holds a claim, the instance waits until that compute is back or forgotten (rule 13).
            is_claimed = not facts.held.get(instance, {}).keys() <= {uuid}
            if not (compute.is_dead or is_disabled or is_full or is_claimed or _is_kept_off(facts, request, uuid)):
                yield f'{facts.called(instance)} waits for ever, and {facts.called(uuid)} has room'


def audited(facts: Facts) -> Iterator[str]:
    try:
        report = audit(facts.cloud.store, facts.cloud.placement)
    except EcompError as error:
        yield f'the audit fails: {error}'
        return
    for finding in report.findings:
        if finding.code == 'compute-silent':
            continue  # this compute is dead for good in the scenario, and is not forgotten
        yield f'the audit finds {finding.code} of {facts.called(finding.subject)}: {finding.sentence}'


def _is_kept_off(facts: Facts, request: Json, compute: str) -> bool:
    group = facts.under.get('groups', {}).get((request.get('group') or {}).get('name', ''))
    if group is None or not group['strict']:
        return False
    computes = {member_compute for member_compute in group['members'].values() if member_compute}
    return bool(computes) and (compute in computes) != (group['policy'] == 'affinity')


def _named(facts: Facts, what: object) -> str:
    text = str(what)
    for uuid, name in facts.cloud.world.names.items():
        text = text.replace(uuid, name)
    return text


RULES: list[Callable[[Facts], Iterator[str]]] = [
    *(acknowledged, answered, requests, claims, guests, shared, waits, audited),
]
