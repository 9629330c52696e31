"""What must hold whenever nothing is in work: etcd, placement and the fakes' guests tell one story.

Asked of the servers themselves; the rules are in tests/kit/ending.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from typing import Any

from tests.kit.audit import audit_clean
from tests.kit.commands import Control, Ecompute
from tests.kit.ending import Kept, ending
from tests.kit.servers import until
from tests.kit.witness import EVERYTHING, kept_of

REQUEST_LEASE = 60
PATIENCE = 20.0


def everything(control: Control) -> dict[str, Kept]:
    """All of etcd, at one revision, but for the notes of released claims: each is on a lease and ends by itself.

    Nor with what the living hint of their room: that follows what they were asked for, within ten seconds.
    """
    there = dict(map(kept_of, control.etcd.call('kv/range', EVERYTHING).get('kvs', [])))
    stay = {key: kept for key, kept in there.items() if not (key.startswith('/released/') and kept.lease)}
    lives = {key: kept for key, kept in stay.items() if key.startswith('/computes/') and kept.lease}
    return {**stay, **{key: Kept(without_room(kept.value), kept.lease) for key, kept in lives.items()}}


def without_room(life: bytes) -> bytes:
    """What a living compute says of itself, but for what it has left."""
    said = json.loads(life)
    return json.dumps({name: each for name, each in said.items() if name != 'room'}).encode()


def allocations(control: Control) -> dict[str, dict[str, dict[str, int]]]:
    return control.placement.database.allocations()


def violations(
    control: Control, computes: Collection[Ecompute] = (), foreign: Collection[str] = (), dead: Collection[int] = ()
) -> list[str]:
    """Everything that does not hold now. `computes`: whose fake guests to compare, too.

    `foreign` are consumers and instances the test made beside ecomp; `dead` are the pids of eschedules it killed, whose
    request keys may wait for their lease.
    """
    etcd = everything(control)
    database = control.placement.database
    found = ending(etcd, database.allocations(), database.capacities(), foreign)
    for key, kept in etcd.items():
        if key.startswith('/requests/') and kept.lease:
            found += _request(control, key, kept, dead)
    records = {
        key.rpartition('/')[2]: json.loads(kept.value)
        # Of what a compute refused that another has there are two: the one that lives counts.
        for key, kept in sorted(etcd.items(), key=lambda each: not each[1].lease)
        if key.startswith('/instances/') and key.rpartition('/')[2] not in foreign
    }
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


def _request(control: Control, key: str, kept: Kept, dead: Collection[int]) -> list[str]:
    left = int(control.etcd.call('lease/timetolive', {'ID': kept.lease}).get('grantedTTL', 0))
    pid = json.loads(kept.value)['pid']
    if left > REQUEST_LEASE:
        return [f'{key}: on a lease of {left} s']
    if pid not in dead and not os.path.exists(f'/proc/{pid}'):
        return [f'{key}: its eschedule {pid} has ended']
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
