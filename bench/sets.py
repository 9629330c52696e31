"""A set of a hundred against the raw calls that it cannot do without: one GET, one POST, one transaction.

    python bench/sets.py [ROUNDS] [--quick] [--json] [--computes 10,1000] [--count 100]

Both are done by turns in this process, on kept connections, and each is cleared away after it. The raw calls put as
many bytes under as many keys; they decide nothing, and leave nobody told what to do if they are killed.
"""

from __future__ import annotations

import random
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.comparison import IMAGE, QUERY, numbers  # noqa: E402
from bench.result import Result, arguments, asked, figure, paired, tell  # noqa: E402
from bench.singles import EACH, Pretended  # noqa: E402
from ecomp.conf import EtcdConfig  # noqa: E402
from ecomp.model import keys  # noqa: E402
from ecomp.model.choose import Offer  # noqa: E402
from ecomp.model.order import Request, SetOrder, to_json  # noqa: E402
from ecomp.placement import allocations  # noqa: E402
from ecomp.placement.client import Placement  # noqa: E402
from ecomp.scheduler.placing.create import create  # noqa: E402
from ecomp.store.client import Delete, Put, Store  # noqa: E402

WHO = {'host': 'here', 'pid': 1}


def ordered(count: int) -> SetOrder:
    """What is asked for."""
    more = {'user_id': 'u', 'project_id': 'p', 'stages': {'requested': '2030-01-01T00:00:00Z'}}
    return SetOrder(str(uuid.uuid4()), query=QUERY, image=IMAGE, count=count, minimum=count, **more)


def ours(store: Store, placement: Placement, wanted: SetOrder) -> dict[str, str]:
    """What eschedule does: {instance: compute}."""
    backend: Future[tuple[Placement, Offer]] = Future()
    backend.set_result((placement, allocations.candidates(placement, QUERY)))
    done = create(store, backend, wanted, WHO, False, random.Random(), lambda: '2030-01-01T00:00:01Z')
    return {instance: each.compute for instance, each in done.items()}


def raw(store: Store, placement: Placement, wanted: SetOrder) -> dict[str, str]:
    """The same by hand: the next computes that are named, one instance each."""
    offered = placement.get(f'/allocation_candidates?{QUERY}')['allocation_requests']
    named = [next(iter(each['allocations'])) for each in offered]
    where = {instance: named[number % len(named)] for number, instance in enumerate(wanted.instances)}
    who = {'user_id': 'u', 'project_id': 'p', 'consumer_generation': None, 'consumer_type': 'INSTANCE'}
    bodies = {each: {'allocations': {at: {'resources': EACH}}, **who} for each, at in where.items()}
    placement.write('POST', '/allocations', dict(sorted(bodies.items(), key=lambda each: where[each[0]])))
    requests = {each: Request(allocations={at: EACH}, **wanted.orders[each].parts()) for each, at in where.items()}
    store.commit([], [Put(keys.request(where[each], each), to_json(request)) for each, request in requests.items()])
    return where


def clear(cluster: Pretended, store: Store, where: dict[str, str]) -> None:
    """Nothing of it is left."""
    store.commit([], [Delete(keys.request(compute, instance)) for instance, compute in where.items()])
    for instance in where:
        cluster.placement.call('DELETE', f'/allocations/{instance}')


def measure(cluster: Pretended, count: int, rounds: int) -> Iterator[Result]:
    """Both, by turns."""
    store, placement = Store(EtcdConfig((cluster.etcd.endpoint,))), Placement(cluster.placement.url)
    took: dict[Any, list[float]] = {ours: [], raw: []}
    for turn in range(rounds + 1):
        for way in (ours, raw) if turn % 2 else (raw, ours):
            wanted = ordered(count)
            wanted.instances  # noqa: B018  the uuids are made before either begins
            began = time.monotonic()
            where = way(store, placement, wanted)
            took[way].append(time.monotonic() - began)
            clear(cluster, store, where)
    store.close()
    mine, theirs = took[ours][1:], took[raw][1:]
    workload = f'{count} at once, {cluster.size:,} computes'
    yield paired('sets', workload, mine, theirs, 1.15)
    rates = [count / seconds for seconds in mine]
    yield figure('sets', f'{workload}, a second', rates, 100, unit='a second', at_least=True)


def main() -> None:
    """See the module."""
    parser = arguments(__doc__, 12)
    parser.add_argument('--computes', type=numbers, default=[10, 1000])
    parser.add_argument('--count', type=int, default=100)
    options = asked(parser)
    for size in options.computes:
        with Pretended(size) as cluster:
            for each in measure(cluster, options.count, options.rounds):
                tell(each, options.json)


if __name__ == '__main__':
    main()
