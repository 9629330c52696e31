"""The cost of tens of thousands of flavors for a compute that takes few of them.

This is the "permutations" question of pull. One `ecompute --fake` with queues; flavors in etcd, and waiting requests,
each of its own flavor that does not fit the compute. Then requests that fit, one at a time.

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
from result import Result, arguments, asked, make_result, tell

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ecomp.conf import EtcdConfig
from ecomp.model import keys
from ecomp.model.flavor import Flavor
from ecomp.model.queue import QueueEntry
from ecomp.model.stored import encode
from ecomp.store.client import Put, Store
from tests.kit.commands import Ecompute
from tests.kit.servers import Etcd, PlacementServer, wait_until

# Numbers of flavors and of waiting requests.
CELLS = ((0, 0), (30000, 0), (30000, 3000), (30000, 30000))
ROOM = 'VCPU:1000,DISK_GB:1000,MEMORY_MB:100000'
IDLE, TRANSACTION_SIZE = 10.0, 100
SMALL = Flavor('small', {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64})


def make_large_flavor(number: int) -> Flavor:
    """Make a flavor that no compute has room for."""
    return Flavor(f'large-{number}', {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 200_000 + number})


def make_waiting_request(flavor: Flavor) -> Put:
    """Make the put of one more waiting request."""
    entry = QueueEntry(str(uuid.uuid4()), flavor, image='http://bench.invalid/x', user_id='bench', project_id='bench')
    return Put(entry.key, encode(entry))


def put_all(store: Store, puts: Iterator[Put]) -> None:
    """Write the puts, TRANSACTION_SIZE in each transaction."""
    while batch := list(islice(puts, TRANSACTION_SIZE)):
        assert store.commit([], batch) is not None


def measure_cell(flavor_count: int, request_count: int, take_count: int) -> Iterator[Result]:
    """Measure one cell."""
    with Etcd() as etcd, PlacementServer() as placement:
        store = Store(EtcdConfig((etcd.endpoint,)))
        all_flavors = (SMALL, *(make_large_flavor(each) for each in range(flavor_count)))
        put_all(store, (Put(keys.flavor(each.name), encode(each)) for each in all_flavors))
        put_all(store, (make_waiting_request(make_large_flavor(each)) for each in range(request_count)))
        with Ecompute(etcd.endpoint, placement.url, ROOM, queues=True) as compute:
            process = psutil.Process(compute.pid)

            def used() -> float:
                times = process.cpu_times()
                return times.user + times.system

            def take() -> float:
                put = make_waiting_request(SMALL)
                all_flavors = keys.request(compute.uuid, keys.get_last_part(put.key))
                began = time.monotonic()
                assert store.commit([], [put]) is not None
                wait_until(lambda: store.get(all_flavors) is not None, 60, 'it is taken')
                return time.monotonic() - began

            first = take()
            time.sleep(IDLE / 2)
            before = used()
            time.sleep(IDLE)
            idle = (used() - before) / IDLE
            before = used()
            seconds = [take() for _ in range(take_count)]
            each = (used() - before) / take_count
            memory = process.memory_info().rss / 1e6
        store.close()
    workload = f'{flavor_count:,} flavors, {request_count:,} waiting'
    yield make_result('many-flavors', f'{workload}: the first is taken', [first], None)
    used_by_each = {'ms of its processor': each * 1000}
    yield make_result('many-flavors', f'{workload}: one more is taken', seconds, None, counts=used_by_each)
    yield make_result('many-flavors', f'{workload}: idle', [idle * 100], None, unit='% of a core')
    yield make_result('many-flavors', f'{workload}: memory', [memory], None, unit='MB')


def main() -> None:
    options = asked(arguments(__doc__, 10))
    for many, waits in CELLS[:2] if options.quick else CELLS:
        for result in measure_cell(many, waits, options.rounds):
            tell(result, options.json)


if __name__ == '__main__':
    main()
