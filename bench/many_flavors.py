"""How much tens of thousands of flavors cost a compute that takes few of them: the "permutations" question of pull.

One `ecompute --fake` with queues; flavors in etcd, and requests that wait, each of a flavor of its own that the compute
has no room for. Then one at a time that it has room for.

    python bench/many_flavors.py [ROUNDS] [--quick] [--json]
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import psutil
from result import Result, arguments, asked, figure, tell

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ecomp.conf import EtcdConfig
from ecomp.model import flavor as flavors
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.queue import QueueEntry
from ecomp.model.queue import to_json as waiting_to_json
from ecomp.store.client import Put, Store
from tests.kit.commands import Ecompute
from tests.kit.servers import Etcd, PlacementServer, until

CELLS = ((0, 0), (30000, 0), (30000, 3000), (30000, 30000))
"""Flavors, and requests that wait."""
ROOM = 'VCPU:1000,DISK_GB:1000,MEMORY_MB:100000'
IDLE, AT_ONCE = 10.0, 100
SMALL = Flavor('small', {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64})


def large(number: int) -> Flavor:
    """One that nothing here has room for."""
    return Flavor(f'large-{number}', {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 200_000 + number})


def waiting(flavor: Flavor) -> Put:
    """One more request that waits with it."""
    found = QueueEntry(str(uuid.uuid4()), flavor, image='http://bench.invalid/x', user_id='bench', project_id='bench')
    return Put(found.key, waiting_to_json(found))


def put_all(store: Store, puts: Iterator[Put]) -> None:
    """Write them, so many in each transaction."""
    while some := list(islice(puts, AT_ONCE)):
        assert store.commit([], some) is not None


def cell(many: int, waits: int, takes: int) -> Iterator[Result]:
    """What it costs with so many."""
    with Etcd() as etcd, PlacementServer() as placement:
        store = Store(EtcdConfig((etcd.endpoint,)))
        there = (SMALL, *(large(each) for each in range(many)))
        put_all(store, (Put(keys.flavor(each.name), flavors.to_json(each)) for each in there))
        put_all(store, (waiting(large(each)) for each in range(waits)))
        with Ecompute(etcd.endpoint, placement.url, ROOM, queues=True) as compute:
            process = psutil.Process(compute.pid)

            def used() -> float:
                times = process.cpu_times()
                return times.user + times.system

            def take() -> float:
                put = waiting(SMALL)
                there = keys.request(compute.uuid, keys.last(put.key))
                began = time.monotonic()
                assert store.commit([], [put]) is not None
                until(lambda: store.get(there) is not None, 60, 'it is taken')
                return time.monotonic() - began

            first = take()
            time.sleep(IDLE / 2)
            before = used()
            time.sleep(IDLE)
            idle = (used() - before) / IDLE
            before = used()
            taken = [take() for _ in range(takes)]
            each = (used() - before) / takes
            memory = process.memory_info().rss / 1e6
        store.close()
    where = f'{many:,} flavors, {waits:,} waiting'
    yield figure('many-flavors', f'{where}: the first is taken', [first], None)
    used_by_each = {'ms of its processor': each * 1000}
    yield figure('many-flavors', f'{where}: one more is taken', taken, None, counts=used_by_each)
    yield figure('many-flavors', f'{where}: idle', [idle * 100], None, unit='% of a core')
    yield figure('many-flavors', f'{where}: memory', [memory], None, unit='MB')


def main() -> None:
    """See the module."""
    options = asked(arguments(__doc__, 10))
    for many, waits in CELLS[:2] if options.quick else CELLS:
        for each in cell(many, waits, options.rounds):
            tell(each, options.json)


if __name__ == '__main__':
    main()
