"""What must hold whenever nothing is in work: etcd, placement and the fakes' guests tell one story.

Asked of the servers themselves, without ecomp's own reading code: its mistakes must not hide themselves.
"""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from collections.abc import Collection
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from tests.kit.audit import audit_clean
from tests.kit.commands import Control, Ecompute
from tests.kit.servers import until

STATES = {'scheduled', 'building', 'active', 'stopped', 'destroying', 'gone', 'error'}
ENDED = {'gone', 'error'}
REQUEST_LEASE = 60
PATIENCE = 20.0


class Kept(NamedTuple):
    """One etcd key."""

    value: bytes
    lease: int


def everything(control: Control) -> dict[str, Kept]:
    """All of etcd, at one revision."""
    every = base64.b64encode(b'\0').decode()
    found = control.etcd.call('kv/range', {'key': every, 'range_end': every}).get('kvs', [])
    return {
        base64.b64decode(each['key']).decode(): Kept(
            base64.b64decode(each.get('value', '')), int(each.get('lease', 0))
        )
        for each in found
    }


def allocations(control: Control) -> dict[str, dict[str, dict[str, int]]]:
    """All of placement's allocations: {consumer: {provider: {class: amount}}}."""
    return control.placement.database.allocations()


def violations(
    control: Control, computes: Collection[Ecompute] = (), foreign: Collection[str] = (), dead: Collection[int] = ()
) -> list[str]:
    """Everything that does not hold now. `computes`: whose fake guests to compare, too.

    `foreign` are consumers and instances the test made beside ecomp; `dead` are the pids of eschedules it killed, whose
    request keys may wait for their lease.
    """
    etcd = everything(control)
    held = {consumer: each for consumer, each in allocations(control).items() if consumer not in foreign}
    families = ('hosts', 'queues', 'instances', 'requests', 'booted', 'names', 'computes', 'groups', 'quotas')
    under = {prefix: _under(etcd, f'/{prefix}/') for prefix in families}
    records = {name: json.loads(kept.value) for name, kept in under['instances'].items() if name not in foreign}
    paths = [path.partition('/') for path in under['hosts']]
    wished = [(compute, name) for compute, _, name in paths if name not in foreign]
    found: list[str] = []

    names = [name for _, name in wished]
    found += [f'{name}: is requested of {names.count(name)} computes' for name in set(names) if names.count(name) > 1]
    alive = {name for name, record in records.items() if record['state'] not in ENDED}
    # A request its compute has not read yet is an instance, too.
    instances = alive | (set(names) - set(records))
    # What waits is whole in one queue; only who has marked it may hold something for it.
    marks = [path.removesuffix('/taker').partition('/')[2] for path in under['queues'] if path.endswith('/taker')]
    queued = [path.partition('/')[2] for path in under['queues'] if not path.endswith('/taker')]
    waiting = set(queued) - set(foreign)
    found += [f'{name}: waits in {queued.count(name)} queues' for name in waiting if queued.count(name) > 1]
    found += [f'{name}: waits, and is requested of a compute' for name in waiting & set(names)]
    found += [f'{name}: waits, and has a record' for name in waiting & set(records)]
    found += [f'{name}: is being taken, and does not wait' for name in set(marks) - set(queued)]
    # An eschedule at work may have its claim already.
    at_it = {name for kept in under['requests'].values() for name in json.loads(kept.value)['instances']}
    found += [f'{name}: allocation without an instance' for name in held.keys() - instances - at_it - set(marks)]
    found += [f'{name}: instance without an allocation' for name in instances - held.keys()]
    found += [f'{name}: request without an instance' for name in set(names) - instances]
    found += [f'{name}: instance without a request' for name in instances - set(names)]
    for compute, name in wished:
        found += _compare(name, compute, json.loads(under['hosts'][f'{compute}/{name}'].value), held, records)

    for name, record in records.items():
        found += _record(name, record, under['instances'][name].lease)
    for name, kept in under['booted'].items():
        address = _address(records.get(name, {}))
        if name not in alive:
            found.append(f'{name}: an address, and no living instance')
        elif kept.value.decode() != address:
            found.append(f'{name}: /booted says {kept.value.decode()}, its record {address}')
    for name, kept in under['names'].items():
        whose = json.loads(kept.value)['instance']
        ended = records.get(whose, {}).get('state') == 'error' and kept.lease
        if whose in foreign:
            continue
        if whose not in instances | waiting and not ended:
            found.append(f'{name}: a name, and no living instance')
        elif whose in alive and (records[whose].get('name') != name or kept.lease):
            found.append(f'{name}: a name of {whose}, which is called {records[whose].get("name")}')
    for name in alive:
        called = records[name].get('name')
        if called and called not in under['names']:
            found.append(f'{name}: is called {called}, and there is no such name')
    asked = [(compute, name, json.loads(under['hosts'][f'{compute}/{name}'].value)) for compute, name in wished]
    asked += [
        ('', path.partition('/')[2], json.loads(kept.value))
        for path, kept in under['queues'].items()
        if path.partition('/')[2] in waiting
    ]
    for name, kept in under['groups'].items():
        found += _group(name, json.loads(kept.value), asked)
    for project, kept in under['quotas'].items():
        found += _quota(project, json.loads(kept.value), asked)
    for name, kept in under['requests'].items():
        found += _request(control, name, kept, dead)
    takers = {name: kept for name, kept in under['queues'].items() if name.endswith('/taker')}
    found += [f'{name}: a mark without a lease' for name, kept in takers.items() if not kept.lease]
    found += [f'{name}: /computes without a lease' for name, kept in under['computes'].items() if not kept.lease]
    for each in computes:
        found += _guests(each, records, foreign)
    return found


def check(
    control: Control,
    *computes: Ecompute,
    foreign: Collection[str] = (),
    dead: Collection[int] = (),
    unaudited: str = '',
) -> None:
    """Wait until all of it holds, and then until ecomp's own audit finds nothing but `foreign`.

    AssertionError with what does not, after a while. `unaudited` is why the audit has to find something now.
    """
    found = [['not looked']]

    def hold() -> bool:
        found[0] = violations(control, computes, foreign, dead)
        return not found[0]

    try:
        until(hold, PATIENCE, 'etcd, placement and the guests agree')
    except AssertionError as error:
        raise AssertionError('\n'.join([str(error), *found[0]])) from None
    if not unaudited:
        audit_clean(control, foreign=foreign)


def _under(etcd: dict[str, Kept], prefix: str) -> dict[str, Kept]:
    return {key.removeprefix(prefix): kept for key, kept in etcd.items() if key.startswith(prefix)}


def _compare(
    name: str,
    compute: str,
    request: dict[str, Any],
    held: dict[str, dict[str, dict[str, int]]],
    records: dict[str, dict[str, Any]],
) -> list[str]:
    found = []
    asked = {provider: each['resources'] for provider, each in request['allocations'].items()}
    if asked and asked != held.get(name, {}):
        found.append(f'{name}: requested {asked}, held {held.get(name)}')
    if name in records and records[name]['compute'] != compute:
        found.append(f'{name}: requested of {compute}, its record is of {records[name]["compute"]}')
    return found


Asked = list[tuple[str, str, dict[str, Any]]]
"""Each request with its instance and its compute, which is '' while it waits."""


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


def _request(control: Control, name: str, kept: Kept, dead: Collection[int]) -> list[str]:
    if not kept.lease:
        return [f'/requests/{name}: without a lease']
    left = int(control.etcd.call('lease/timetolive', {'ID': kept.lease}).get('grantedTTL', 0))
    pid = json.loads(kept.value)['pid']
    if left > REQUEST_LEASE:
        return [f'/requests/{name}: on a lease of {left} s']
    if pid not in dead and not os.path.exists(f'/proc/{pid}'):
        return [f'/requests/{name}: its eschedule {pid} has ended']
    return []


def _guests(compute: Ecompute, records: dict[str, dict[str, Any]], foreign: Collection[str]) -> list[str]:
    path = compute.directory / 'state' / 'fake.json'
    there = {guest['instance']: guest for guest in json.loads(path.read_text())} if path.exists() else {}
    here = {name: record for name, record in records.items() if record['compute'] == compute.uuid}
    wanted = {name for name, record in here.items() if record['state'] == 'active'}
    stopped = {name for name, record in here.items() if record['state'] == 'stopped'}
    running = {name for name, guest in there.items() if guest['running']}
    found = [f'{name}: a guest nobody asks for' for name in there.keys() - wanted - stopped - set(foreign)]
    found += [f'{name}: stopped, and its guest runs' for name in stopped & running]
    return found + [f'{name}: active, and no guest runs' for name in wanted - running]


def _address(record: dict[str, Any]) -> str | None:
    addresses = record.get('addresses')
    return addresses[0]['address'] if addresses else None
