"""What must hold whenever nothing is in work: etcd and placement tell one story. Pure.

From values as the servers themselves gave them, without ecomp's own reading code: its mistakes must not hide
themselves.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qs

STATES = {'scheduled', 'building', 'active', 'stopped', 'destroying', 'gone', 'error'}
ENDED = {'gone', 'error'}
LIVING = {'active', 'stopped'}
FAMILIES = ('hosts', 'queues', 'instances', 'requests', 'booted', 'names', 'computes', 'groups', 'quotas')

Held = Mapping[str, Mapping[str, Mapping[str, int]]]
"""What placement says is claimed: {consumer: {provider: {class: amount}}}."""


class Kept(NamedTuple):
    value: bytes
    lease: int


def ending(
    etcd: Mapping[str, Kept],
    held: Held,
    capacity: Mapping[str, Mapping[str, int]],
    foreign: Collection[str] = (),
    away: Collection[str] = (),
) -> list[str]:
    """Everything that does not hold in all of etcd, and in all of placement's claims and totals.

    `foreign` are the subjects (instances, consumers, names, groups, projects, computes) that are not ours; `away` the
    computes that do not work now: what they are at stays as it is.
    """
    held = {consumer: each for consumer, each in held.items() if consumer not in foreign}
    under = {family: _under(etcd, f'/{family}/') for family in FAMILIES}
    places = under['instances']
    # Of what a compute refused that another has there are two: the one that lives counts.
    ended = {path for path, kept in places.items() if kept.lease}
    order = sorted(places, key=lambda path: path not in ended)
    under['instances'] = {path.rpartition('/')[2]: places[path] for path in order}
    records = {name: json.loads(kept.value) for name, kept in under['instances'].items() if name not in foreign}
    paths = [(*path.partition('/')[::2], kept) for path, kept in under['hosts'].items()]
    wished = [(compute, name) for compute, name, _ in paths if name not in foreign]
    found: list[str] = []

    recorded = [path.rpartition('/')[2] for path in places if path not in ended]
    found += [f'{name}: has {recorded.count(name)} records' for name in records if recorded.count(name) > 1]
    for path, kept in places.items():
        where, name = path.rpartition('/')[::2]
        compute = json.loads(kept.value)['compute'] if name in records else None
        if compute is not None and where not in ('', compute or 'none'):
            found.append(f'{name}: the record of compute {compute} is below {where}')
    names = [name for _, name in wished]
    found += [f'{name}: is requested of {names.count(name)} computes' for name in set(names) if names.count(name) > 1]
    alive = {name for name, record in records.items() if record['state'] not in ENDED}
    # A request its compute has not read yet is an instance, too.
    instances = alive | (set(names) - set(records))
    # What a compute was at when it went away waits for it, with whatever is done of it.
    halted = {name for compute, name in wished if compute in away and _state(records, name) not in LIVING}
    # What waits is whole in one queue; only who has marked it may hold something for it.
    marks = {path.removesuffix('/taker').partition('/')[2] for path in under['queues'] if path.endswith('/taker')}
    queued = [path.partition('/')[2] for path in under['queues'] if not path.endswith('/taker')]
    waiting = set(queued) - set(foreign)
    found += [f'{name}: waits in {queued.count(name)} queues' for name in waiting if queued.count(name) > 1]
    found += [f'{name}: waits, and is requested of a compute' for name in waiting & set(names)]
    found += [f'{name}: waits, and has a record' for name in waiting & set(records)]
    found += [f'{name}: is being taken, and does not wait' for name in marks - set(queued) - set(foreign)]
    # An eschedule at work may have its claim already.
    at_it = {name for key, kept in under['requests'].items() if key not in foreign for name in _announced(kept)}
    found += [f'{name}: allocation without an instance' for name in held.keys() - instances - halted - at_it - marks]
    found += [f'{name}: instance without an allocation' for name in instances - held.keys() - halted]
    found += [f'{name}: request without an instance' for name in set(names) - instances]
    found += [f'{name}: instance without a request' for name in instances - set(names)]
    for compute, name in wished:
        if name not in halted:
            found += _compare(name, compute, json.loads(under['hosts'][f'{compute}/{name}'].value), held, records)

    for name, record in records.items():
        found += _record(name, record, under['instances'][name].lease)
    for name, kept in under['booted'].items():
        address = (records.get(name, {}).get('addresses') or [{'address': None}])[0]['address']
        if name in foreign:
            continue
        if name not in alive:
            found.append(f'{name}: an address, and no living instance')
        elif kept.value.decode() != address:
            found.append(f'{name}: /booted says {kept.value.decode()}, its record {address}')
    for name, kept in under['names'].items():
        found += _name(name, kept, records, instances | waiting, foreign)
    for name in alive:
        called = records[name].get('name')
        if called and called not in {*under['names'], *foreign}:
            found.append(f'{name}: is called {called}, and there is no such name')
    asked = [(compute, name, json.loads(kept.value)) for compute, name, kept in paths if name not in foreign]
    asked += [
        ('', path.partition('/')[2], json.loads(kept.value))
        for path, kept in under['queues'].items()
        if path.partition('/')[2] in waiting
    ]
    for name, kept in under['groups'].items():
        if name not in foreign and not set(foreign) & set(json.loads(kept.value)['members']):
            found += _group(name, json.loads(kept.value), asked)
    # What others asked for in a project may have been counted, or not.
    others = {_project(kept) for _, name, kept in paths if name in foreign}
    for project, kept in under['quotas'].items():
        if project not in {*foreign, *others}:
            found += _quota(project, json.loads(kept.value), asked)
    found += [f'/requests/{name}: without a lease' for name, kept in under['requests'].items()
              if not kept.lease and name not in foreign]
    takers = {name: kept for name, kept in under['queues'].items() if name.endswith('/taker')}
    found += [f'{name}: a mark without a lease' for name, kept in takers.items() if not kept.lease]
    without = {name for name, kept in under['computes'].items() if not kept.lease} - set(foreign)
    found += [f'{name}: /computes without a lease' for name in without]
    return [*found, *_full(held, capacity, foreign)]


def _under(etcd: Mapping[str, Kept], prefix: str) -> dict[str, Kept]:
    return {key.removeprefix(prefix): kept for key, kept in etcd.items() if key.startswith(prefix)}


def _project(kept: Kept) -> str | None:
    try:
        return str(json.loads(kept.value).get('project_id'))
    except (ValueError, AttributeError, RecursionError):
        return None


def _state(records: Mapping[str, dict[str, Any]], name: str) -> str | None:
    return records.get(name, {}).get('state')


def _announced(kept: Kept) -> list[str]:
    return [str(name) for name in json.loads(kept.value)['instances']]


def _full(held: Held, capacity: Mapping[str, Mapping[str, int]], foreign: Collection[str]) -> Iterator[str]:
    used: dict[tuple[str, str], int] = {}
    for each in held.values():
        for provider, resources in each.items():
            for name, amount in resources.items():
                used[provider, name] = used.get((provider, name), 0) + amount
    for (provider, name), amount in used.items():
        most = capacity.get(provider, {}).get(name, 0)
        if provider in capacity and provider not in foreign and amount > most:
            yield f'{provider}: {amount} {name} are claimed, and it has {most}'


def _compare(
    name: str, compute: str, request: dict[str, Any], held: Held, records: Mapping[str, dict[str, Any]]
) -> list[str]:
    found = []
    asked = {provider: each['resources'] for provider, each in request['allocations'].items()}
    if asked and asked != held.get(name, {}):
        found.append(f'{name}: requested {asked}, held {held.get(name)}')
    if name in records and records[name]['compute'] != compute:
        found.append(f'{name}: requested of {compute}, its record is of {records[name]["compute"]}')
    return found


def _name(
    name: str, kept: Kept, records: Mapping[str, dict[str, Any]], there: Collection[str], foreign: Collection[str]
) -> list[str]:
    whose = json.loads(kept.value)['instance'] if name not in foreign else ''
    if name in foreign or whose in foreign:
        return []
    failed = _state(records, whose) == 'error' and kept.lease
    if whose not in there and not failed:
        return [f'{name}: a name, and no living instance']
    if whose in records and not failed and (records[whose].get('name') != name or kept.lease):
        return [f'{name}: a name of {whose}, which is called {records[whose].get("name")}']
    return []


Asked = list[tuple[str, str, dict[str, Any]]]
"""Each request with its compute, which is '' while it waits, and its instance."""


def _group(name: str, group: dict[str, Any], asked: Asked) -> list[str]:
    members = {each: compute for compute, each, request in asked if (request.get('group') or {}).get('name') == name}
    found = [] if group['members'] == members else [f'group {name}: has {group["members"]}, asked for are {members}']
    on = [compute for compute in members.values() if compute]
    together = group['policy'] == 'affinity'
    if group['strict'] and len(set(on)) != (min(len(on), 1) if together else len(on)):
        found.append(f'group {name}: is strict {group["policy"]}, and on {on}')
    return found


def _quota(project: str, quota: dict[str, Any], asked: Asked) -> list[str]:
    used: Counter[str] = Counter()
    for _, _, request in asked:
        if request['project_id'] == project:
            used.update({**_amounts(request), 'instances': 1})
    counted = {name: amount for name, amount in used.items() if amount}
    return [] if quota['used'] == counted else [f'quota {project}: counts {quota["used"]}, asked for is {counted}']


def _amounts(request: dict[str, Any]) -> dict[str, int]:
    """What a request is for: allocated; or, one to be destroyed, what it was; or, one that waits, what it asks for."""
    if 'flavor' in request:
        pairs = (each.split(':') for each in parse_qs(request['query'])['resources'][0].split(','))
        return {name: int(amount) for name, amount in pairs}
    amounts: Counter[str] = Counter(request.get('resources', {}))
    for each in request['allocations'].values():
        amounts.update(each['resources'])
    return dict(amounts)


def _record(name: str, record: dict[str, Any], lease: int) -> list[str]:
    found = []
    state = record['state']
    if record['instance'] != name or record['version'] != 1 or state not in STATES:
        found.append(f'{name}: not a legal record: {record}')
    if (state == 'error') != (record['error'] is not None):
        found.append(f'{name}: {state}, with error {record["error"]}')
    if state == 'error' and 'started' in record['stages']:
        found.append(f'{name}: in error after it was active')
    if (state in ENDED) != bool(lease):
        found.append(f'{name}: {state}, on lease {lease}')
    if state == 'active' and not {'scheduled', 'image', 'disk', 'started'} <= set(record['stages']):
        found.append(f'{name}: active, with stages {record["stages"]}')
    return found
