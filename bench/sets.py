"""A set of a hundred against its minimum of raw calls: one GET, one POST, one transaction.

    python bench/sets.py [ROUNDS] [--quick] [--json] [--computes 10,1000] [--count 100]

Both sides run in turn in this process, on open connections, and each is cleared afterwards. The raw calls write as many
bytes under as many keys, but they choose nothing, and leave no trace by which a killed attempt could be cleaned up.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.comparison import IMAGE, QUERY, parse_numbers  # noqa: E402
from bench.result import Result, arguments, asked, make_result, paired, tell  # noqa: E402
from bench.singles import INSTANCE_RESOURCES, FakeCluster  # noqa: E402
from ecomp.conf import EtcdConfig  # noqa: E402
from ecomp.model import keys  # noqa: E402
from ecomp.model.order import Request, SetOrder  # noqa: E402
from ecomp.model.stored import encode  # noqa: E402
from ecomp.placement import allocations  # noqa: E402
from ecomp.placement.client import Placement  # noqa: E402
from ecomp.scheduler.placing.create import create  # noqa: E402
from ecomp.scheduler.placing.session import Scheduler  # noqa: E402
from ecomp.store.client import Delete, Put, Store  # noqa: E402

ATTEMPT_OWNER = {'host': 'here', 'pid': 1}


def make_order(count: int) -> SetOrder:
    """Make the order."""
    fields = {'user_id': 'u', 'project_id': 'p', 'stages': {'requested': '2030-01-01T00:00:00Z'}}
    return SetOrder(str(uuid.uuid4()), query=QUERY, image=IMAGE, count=count, minimum=count, **fields)


def place_by_eschedule(store: Store, placement: Placement, order: SetOrder) -> dict[str, str]:
    """Place as eschedule does; return {instance: compute}."""
    answer = placement, allocations.read_candidates(placement, QUERY)
    scheduler = Scheduler(store, lambda: answer, ATTEMPT_OWNER, random.Random(), lambda: '2030-01-01T00:00:01Z')
    candidates = create(scheduler, order, resume=False)
    return {instance: candidate.compute for instance, candidate in candidates.items()}


def place_by_calls(store: Store, placement: Placement, order: SetOrder) -> dict[str, str]:
    """Place by raw calls, one instance on each candidate in turn; return {instance: compute}."""
    candidates = placement.get(f'/allocation_candidates?{QUERY}')['allocation_requests']
    computes = [next(iter(each['allocations'])) for each in candidates]
    where = {instance: computes[number % len(computes)] for number, instance in enumerate(order.instances)}
    owner = {'user_id': 'u', 'project_id': 'p', 'consumer_generation': None, 'consumer_type': 'INSTANCE'}
    bodies = {each: {'allocations': {at: {'resources': INSTANCE_RESOURCES}}, **owner} for each, at in where.items()}
    placement.write('POST', '/allocations', dict(sorted(bodies.items(), key=lambda each: where[each[0]])))
    requests = {
        each: Request(allocations={at: INSTANCE_RESOURCES}, **order.orders[each].copy_fields())
        for each, at in where.items()
    }
    store.commit([], [Put(keys.request(where[each], each), encode(request)) for each, request in requests.items()])
    return where


def release_all(cluster: FakeCluster, store: Store, where: dict[str, str]) -> None:
    """Remove the requests and allocations."""
    store.commit([], [Delete(keys.request(compute, instance)) for instance, compute in where.items()])
    for instance in where:
        cluster.placement.call('DELETE', f'/allocations/{instance}')


def measure(cluster: FakeCluster, count: int, rounds: int) -> Iterator[Result]:
    """Measure both sides in turn."""
    store, placement = Store(EtcdConfig((cluster.etcd.endpoint,))), Placement(cluster.placement.url)
    times: dict[Any, list[float]] = {place_by_eschedule: [], place_by_calls: []}
    for turn in range(rounds + 1):
        for side in (place_by_eschedule, place_by_calls) if turn % 2 else (place_by_calls, place_by_eschedule):
            order = make_order(count)
            order.instances  # noqa: B018  the uuids are made before the measurement
            start = time.monotonic()
            where = side(store, placement, order)
            times[side].append(time.monotonic() - start)
            release_all(cluster, store, where)
    store.close()
    mine, floor = times[place_by_eschedule][1:], times[place_by_calls][1:]
    workload = f'{count} at once, {cluster.size:,} computes'
    yield paired('sets', workload, mine, floor, 1.15)
    rates = [count / seconds for seconds in mine]
    yield make_result('sets', f'{workload}, a second', rates, 100, unit='a second', at_least=True)


def main() -> None:
    parser = arguments(__doc__, 12)
    parser.add_argument('--computes', type=parse_numbers, default=[10, 1000])
    parser.add_argument('--count', type=int, default=100)
    options = asked(parser)
    for size in options.computes:
        with FakeCluster(size) as cluster:
            for result in measure(cluster, options.count, options.rounds):
                tell(result, options.json)


if __name__ == '__main__':
    main()
