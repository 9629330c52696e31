"""Invariants while nothing is in work: etcd, placement and the fake guests agree.

All state is read from the servers themselves; the rules are in tests/kit/ending.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

from tests.kit.audit import wait_audit_clean
from tests.kit.commands import Control, Ecompute
from tests.kit.ending import StoredValue, find_contradictions
from tests.kit.servers import wait_until
from tests.kit.witness import ALL_KEYS, parse_entry

REQUEST_LEASE_SECONDS = 60
PATIENCE_SECONDS = 20.0


def read_lasting_keys(control: Control) -> dict[str, StoredValue]:
    """Read all of etcd at one revision, without values that change by themselves.

    These are notes of released claims, which expire, and what living computes publish.
    """
    entries = dict(map(parse_entry, control.etcd.call('kv/range', ALL_KEYS).get('kvs', [])))
    published = ('/released/', '/facts/', '/troubles/', '/findings/')
    return {key: stored for key, stored in entries.items() if not (key.startswith(published) and stored.lease)}


def read_allocations(control: Control) -> dict[str, dict[str, dict[str, int]]]:
    return control.placement.database.read_allocations()


def list_violations(
    control: Control, computes: Collection[Ecompute] = (), foreign: Collection[str] = (), dead: Collection[int] = ()
) -> list[str]:
    """List the invariants that are violated now.

    The guests of the fake `computes` are compared, too. `foreign` was made by the test outside ecomp.
    `dead` are pids of killed eschedules, whose attempts may wait for their lease to expire.
    """
    etcd = read_lasting_keys(control)
    database = control.placement.database
    problems = find_contradictions(etcd, database.read_allocations(), database.read_capacities(), foreign)
    for key, stored in etcd.items():
        if key.startswith('/requests/') and stored.lease:
            problems += _check_request(control, key, stored, dead)
    records = {
        key.rpartition('/')[2]: json.loads(stored.value)
        # An instance has two records if one compute refused it and another has it: the living one counts.
        for key, stored in sorted(etcd.items(), key=lambda each: not each[1].lease)
        if key.startswith('/instances/') and key.rpartition('/')[2] not in foreign
    }
    for compute in computes:
        problems += _check_guests(compute, records, foreign)
    return problems


def check_invariants(
    control: Control,
    *computes: Ecompute,
    foreign: Collection[str] = (),
    dead: Collection[int] = (),
    unaudited: str = '',
) -> None:
    """Wait until all invariants hold and ecomp's audit finds nothing but `foreign`.

    `unaudited` is the reason why the audit is skipped.
    """
    problems = [['not looked']]

    def hold() -> bool:
        problems[0] = list_violations(control, computes, foreign, dead)
        return not problems[0]

    try:
        wait_until(hold, PATIENCE_SECONDS, 'etcd, placement and the guests agree')
    except AssertionError as error:
        raise AssertionError('\n'.join([str(error), *problems[0]])) from None
    if not unaudited:
        wait_audit_clean(control, foreign=foreign)


def _check_request(control: Control, key: str, stored: StoredValue, dead: Collection[int]) -> list[str]:
    lease_seconds = int(control.etcd.call('lease/timetolive', {'ID': stored.lease}).get('grantedTTL', 0))
    pid = json.loads(stored.value)['pid']
    if lease_seconds > REQUEST_LEASE_SECONDS:
        return [f'{key}: on a lease of {lease_seconds} s']
    if pid not in dead and not os.path.exists(f'/proc/{pid}'):
        return [f'{key}: its eschedule {pid} has ended']
    return []


def _check_guests(compute: Ecompute, records: dict[str, dict[str, Any]], foreign: Collection[str]) -> list[str]:
    path, theirs = (compute.directory / 'state' / name for name in ('fake.json', 'fake-foreign.json'))
    guests = {guest['instance']: guest for guest in json.loads(path.read_text())} if path.exists() else {}
    for guest in json.loads(theirs.read_text()) if theirs.exists() else ():
        if guest.get('adopted_by'):
            guests[guest['instance']] = {**guest, 'running': guest['is_running']}
    records_here = {name: record for name, record in records.items() if record['compute'] == compute.uuid}
    active = {name for name, record in records_here.items() if record['state'] == 'active'}
    stopped = {name for name, record in records_here.items() if record['state'] == 'stopped'}
    running = {name for name, guest in guests.items() if guest['running']}
    problems = [f'{name}: a guest nobody asks for' for name in guests.keys() - active - stopped - set(foreign)]
    problems += [f'{name}: stopped, and its guest runs' for name in stopped & running]
    return problems + [f'{name}: active, and no guest runs' for name in active - running]
