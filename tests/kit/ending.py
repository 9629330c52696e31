"""Checks that etcd and placement agree whenever nothing is in work. Pure.

None of ecomp's reading code is used: its mistakes must not hide themselves.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

STATES = {'scheduled', 'building', 'active', 'stopped', 'destroying', 'gone', 'error'}
TERMINAL_STATES = {'gone', 'error'}
LIVING_STATES = {'active', 'stopped'}
FAMILIES = ('hosts', 'queues', 'instances', 'requests', 'booted', 'names', 'computes', 'groups', 'quotas')

# The allocations of placement: {consumer: {provider: {class: amount}}}.
Allocations = Mapping[str, Mapping[str, Mapping[str, int]]]


class StoredValue(NamedTuple):
    """The value of an etcd key, and the lease it is bound to (0: none)."""

    value: bytes
    lease: int


def find_contradictions(
    etcd: Mapping[str, StoredValue],
    allocations: Allocations,
    capacity: Mapping[str, Mapping[str, int]],
    foreign: Collection[str] = (),
    away: Collection[str] = (),
) -> list[str]:
    """List every contradiction in all of etcd and in placement's allocations and capacities.

    `foreign` are subjects outside ecomp, which are not checked.
    `away` are computes that do not work now: their unfinished requests stay unfinished.
    """
    allocations = {consumer: each for consumer, each in allocations.items() if consumer not in foreign}
    under = {family: _select_prefix(etcd, f'/{family}/') for family in FAMILIES}
    places = under['instances']
    # An instance has two records if one compute refused it and another has it: the living one counts.
    ended = {path for path, stored in places.items() if stored.lease}
    ended_first = sorted(places, key=lambda path: path not in ended)
    under['instances'] = {path.rpartition('/')[2]: places[path] for path in ended_first}
    records = {name: json.loads(stored.value) for name, stored in under['instances'].items() if name not in foreign}
    paths = [(*path.partition('/')[::2], stored) for path, stored in under['hosts'].items()]
    requested = [(compute, name) for compute, name, _ in paths if name not in foreign]
    violations: list[str] = []

    recorded = [path.rpartition('/')[2] for path in places if path not in ended]
    violations += [f'{name}: has {recorded.count(name)} records' for name in records if recorded.count(name) > 1]
    for path, stored in places.items():
        directory, name = path.rpartition('/')[::2]
        compute = json.loads(stored.value)['compute'] if name in records else None
        if compute is not None and directory not in ('', compute or 'none'):
            violations.append(f'{name}: the record of compute {compute} is below {directory}')
    names = [name for _, name in requested]
    violations += [
        f'{name}: is requested of {names.count(name)} computes' for name in set(names) if names.count(name) > 1
    ]
    alive = {name for name, record in records.items() if record['state'] not in TERMINAL_STATES}
    # A request that its compute has not read yet is an instance, too.
    instances = alive | (set(names) - set(records))
    # The unfinished requests of a compute that went away stay as they are until it returns.
    halted = {name for compute, name in requested if compute in away and _get_state(records, name) not in LIVING_STATES}
    # A queued request is in one queue only. Only a compute with a taker key may hold an allocation for it.
    being_taken = {path.removesuffix('/taker').partition('/')[2] for path in under['queues'] if path.endswith('/taker')}
    queued = [path.partition('/')[2] for path in under['queues'] if not path.endswith('/taker')]
    waiting = set(queued) - set(foreign)
    violations += [f'{name}: waits in {queued.count(name)} queues' for name in waiting if queued.count(name) > 1]
    violations += [f'{name}: waits, and is requested of a compute' for name in waiting & set(names)]
    violations += [f'{name}: waits, and has a record' for name in waiting & set(records)]
    violations += [f'{name}: is being taken, and does not wait' for name in being_taken - set(queued) - set(foreign)]
    # An attempt in flight may hold its allocation already.
    in_flight = {
        name
        for key, stored in under['requests'].items()
        if key not in foreign
        for name in map(str, json.loads(stored.value)['instances'])
    }
    violations += [
        f'{name}: allocation without an instance'
        for name in allocations.keys() - instances - halted - in_flight - being_taken
    ]
    violations += [f'{name}: instance without an allocation' for name in instances - allocations.keys() - halted]
    violations += [f'{name}: request without an instance' for name in set(names) - instances]
    violations += [f'{name}: instance without a request' for name in instances - set(names)]
    for compute, name in requested:
        if name not in halted | in_flight:  # the claim of a resize grows before its request
            violations += _check_request(
                name, compute, json.loads(under['hosts'][f'{compute}/{name}'].value), allocations, records
            )

    for name, record in records.items():
        violations += _check_record(name, record, under['instances'][name].lease)
    for name, stored in under['booted'].items():
        address = (records.get(name, {}).get('addresses') or [{'address': None}])[0]['address']
        if name in foreign:
            continue
        if name not in alive:
            violations.append(f'{name}: an address, and no living instance')
        elif stored.value.decode() != address:
            violations.append(f'{name}: /booted says {stored.value.decode()}, its record {address}')
    for name, stored in under['names'].items():
        violations += _check_name(name, stored, records, instances | waiting, foreign)
    for name in alive:
        display_name = records[name].get('name')
        if display_name and display_name not in {*under['names'], *foreign}:
            violations.append(f'{name}: is called {display_name}, and there is no such name')
    requests = [(compute, name, json.loads(stored.value)) for compute, name, stored in paths if name not in foreign]
    requests += [
        ('', path.partition('/')[2], json.loads(stored.value))
        for path, stored in under['queues'].items()
        if path.partition('/')[2] in waiting
    ]
    for name, stored in under['groups'].items():
        if name not in foreign and not set(foreign) & set(json.loads(stored.value)['members']):
            violations += _check_group(name, json.loads(stored.value), requests)
    # Foreign requests of a project may have been counted or not.
    foreign_projects = {_parse_project(stored) for _, name, stored in paths if name in foreign}
    for project, stored in under['quotas'].items():
        if project not in {*foreign, *foreign_projects}:
            violations += _check_quota(project, json.loads(stored.value), requests)
    violations += [
        f'/requests/{name}: without a lease'
        for name, stored in under['requests'].items()
        if not stored.lease and name not in foreign
    ]
    takers = {name: stored for name, stored in under['queues'].items() if name.endswith('/taker')}
    violations += [f'{name}: a mark without a lease' for name, stored in takers.items() if not stored.lease]
    unleased = {name for name, stored in under['computes'].items() if not stored.lease} - set(foreign)
    violations += [f'{name}: /computes without a lease' for name in unleased]
    return [*violations, *_check_capacity(allocations, capacity, foreign)]


def _select_prefix(etcd: Mapping[str, StoredValue], prefix: str) -> dict[str, StoredValue]:
    return {key.removeprefix(prefix): stored for key, stored in etcd.items() if key.startswith(prefix)}


def _parse_project(stored: StoredValue) -> str | None:
    try:
        return str(json.loads(stored.value).get('project_id'))
    except (ValueError, AttributeError, RecursionError):
        return None


def _get_state(records: Mapping[str, dict[str, Any]], name: str) -> str | None:
    return records.get(name, {}).get('state')


def _check_capacity(
    allocations: Allocations, capacity: Mapping[str, Mapping[str, int]], foreign: Collection[str]
) -> Iterator[str]:
    used: dict[tuple[str, str], int] = {}
    for by_provider in allocations.values():
        for provider, resources in by_provider.items():
            for name, amount in resources.items():
                used[provider, name] = used.get((provider, name), 0) + amount
    for (provider, name), amount in used.items():
        capacity_amount = capacity.get(provider, {}).get(name, 0)
        if provider in capacity and provider not in foreign and amount > capacity_amount:
            yield f'{provider}: {amount} {name} are claimed, and it has {capacity_amount}'


def _check_request(
    name: str, compute: str, request: dict[str, Any], allocations: Allocations, records: Mapping[str, dict[str, Any]]
) -> list[str]:
    violations = []
    requested = {provider: allocation['resources'] for provider, allocation in request['allocations'].items()}
    if requested and requested != allocations.get(name, {}):
        violations.append(f'{name}: requested {requested}, held {allocations.get(name)}')
    if name in records and records[name]['compute'] != compute:
        violations.append(f'{name}: requested of {compute}, its record is of {records[name]["compute"]}')
    return violations


def _check_name(
    name: str,
    stored: StoredValue,
    records: Mapping[str, dict[str, Any]],
    living: Collection[str],
    foreign: Collection[str],
) -> list[str]:
    instance = json.loads(stored.value)['instance'] if name not in foreign else ''
    if name in foreign or instance in foreign:
        return []
    failed = _get_state(records, instance) == 'error' and stored.lease
    if instance not in living and not failed:
        return [f'{name}: a name, and no living instance']
    if instance in records and not failed and (records[instance].get('name') != name or stored.lease):
        return [f'{name}: a name of {instance}, which is called {records[instance].get("name")}']
    return []


# (compute, instance, request) of each request; the compute of a queued request is ''.
Requests = list[tuple[str, str, dict[str, Any]]]


def _check_group(name: str, group: dict[str, Any], requests: Requests) -> list[str]:
    members = {
        instance: compute for compute, instance, request in requests if (request.get('group') or {}).get('name') == name
    }
    violations = (
        [] if group['members'] == members else [f'group {name}: has {group["members"]}, asked for are {members}']
    )
    computes = [compute for compute in members.values() if compute]
    is_affinity = group['policy'] == 'affinity'
    if group['strict'] and len(set(computes)) != (min(len(computes), 1) if is_affinity else len(computes)):
        violations.append(f'group {name}: is strict {group["policy"]}, and on {computes}')
    return violations


def _check_quota(project: str, quota: dict[str, Any], requests: Requests) -> list[str]:
    used: Counter[str] = Counter()
    for _, _, request in requests:
        if request['project_id'] == project:
            used.update({**_count_amounts(request), 'instances': 1})
    counted = {name: amount for name, amount in used.items() if amount}
    return [] if quota['used'] == counted else [f'quota {project}: counts {quota["used"]}, asked for is {counted}']


def _count_amounts(request: dict[str, Any]) -> dict[str, int]:
    # A tombstone counts for the amounts of its former request.
    if 'flavor' in request:
        pairs = (amount_text.split(':') for amount_text in parse_qs(request['query'])['resources'][0].split(','))
        return {name: int(amount) for name, amount in pairs}
    amounts: Counter[str] = Counter(request.get('resources', {}))
    for amount_text in request['allocations'].values():
        amounts.update(amount_text['resources'])
    return dict(amounts)


def _check_record(name: str, record: dict[str, Any], lease: int) -> list[str]:
    violations = []
    state = record['state']
    if record['instance'] != name or record['version'] != 1 or state not in STATES:
        violations.append(f'{name}: not a legal record: {record}')
    if (state == 'error') != (record['error'] is not None):
        violations.append(f'{name}: {state}, with error {record["error"]}')
    if state == 'error' and 'started' in record['stages']:
        violations.append(f'{name}: in error after it was active')
    if (state in TERMINAL_STATES) != bool(lease):
        violations.append(f'{name}: {state}, on lease {lease}')
    if state == 'active' and not {'scheduled', 'image', 'disk', 'started'} <= set(record['stages']):
        violations.append(f'{name}: active, with stages {record["stages"]}')
    return violations
