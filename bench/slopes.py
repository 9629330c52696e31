"""The cost of one more compute for etcd and placement, by two numbers of daemons.

    python bench/slopes.py [ROUNDS] [--json] [--few 30] [--many 120] [--seconds 60]

bench/thousand.py has its computes in two processes, which share a lease, a watch and their idle queries: cheaper for
etcd and placement than a thousand machines. Here each is an `ecompute --fake` with `queues: true`. A figure is the
difference of many and few, divided by the number of additional daemons: idle for --seconds, and for requests, pushed
and pulled in turn for ROUNDS rounds of ten. Times are not measured: the daemons share two cores. Needs what singles.py
needs.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.cluster import CountedPlacement, Postgres, Use, measure_use  # noqa: E402
from bench.comparison import FLAVOR, IMAGE, QUERY, UUID  # noqa: E402
from bench.result import Result, arguments, asked, make_result, tell  # noqa: E402
from tests.kit.commands import Ecompute, run_eschedule_process, write_config  # noqa: E402
from tests.kit.servers import Etcd, wait_until  # noqa: E402

ROOM = 'VCPU:100,DISK_GB:100,MEMORY_MB:12800'
ROUND_SIZE = 10
# Daemons that are started concurrently.
MAX_CONCURRENT_STARTS = 4
# Seconds for the first periodic check of each daemon.
SETTLE_SECONDS = 150.0
WAYS = {'pushed': [QUERY, IMAGE], 'pulled': ['--queue', '--flavor', FLAVOR, IMAGE]}


class Fleet:
    """The servers, and the daemons that are added to them."""

    def __init__(self, at_exit: ExitStack) -> None:
        self._at_exit, enter = at_exit, at_exit.enter_context
        directory = Path(enter(TemporaryDirectory(prefix='ecomp-bench-')))
        self.etcd, self.postgres = enter(Etcd()), enter(Postgres())
        self.placement = enter(CountedPlacement(self.postgres.url))
        self.servers = {'etcd': self.etcd, 'placement': self.placement, 'postgres': self.postgres}
        self.config = write_config(directory / 'schedule.yaml', self.etcd.endpoint, self.placement.url)
        self.daemons: list[Ecompute] = []

    def grow(self, number: int) -> None:
        """Start daemons up to this number, and wait until they are idle."""
        while len(self.daemons) < number:
            batch = [
                Ecompute(self.etcd.endpoint, self.placement.computes_url, ROOM, queues=True)
                for _ in range(min(MAX_CONCURRENT_STARTS, number - len(self.daemons)))
            ]
            for daemon in batch:
                self._at_exit.callback(daemon.close)
                daemon.launch()
            for daemon in batch:
                daemon.wait_ready()
            self.daemons += batch
        time.sleep(SETTLE_SECONDS)

    def measure_idle(self, seconds: float) -> dict[str, float]:
        """Measure the idle use of the servers: percent of a core, MB and calls, by name."""
        before, calls = self._measure_uses(), self._count_calls()
        time.sleep(seconds)
        after = self._measure_uses()
        figures = {f'{name}, % of a core': 100 * (after[name].cpu - before[name].cpu) / seconds for name in after}
        figures |= {f'{name}, MB': after[name].memory for name in after}
        return figures | {'calls a minute': (self._count_calls() - calls) * 60 / seconds}

    def measure_placing(self, way: str, rounds: int) -> dict[str, float]:
        """Measure the processor milliseconds of each server for one request."""
        before = self._measure_uses()
        for _ in range(rounds):
            for _ in range(ROUND_SIZE):
                result = run_eschedule_process(self.config, *WAYS[way])
                assert result.code == 0, result
                (instance,) = UUID.findall(result.stdout)
                wait_until(lambda: self.etcd.list_keys(f'/booted/{instance}'), 60, 'it has its address')  # noqa: B023
        after = self._measure_uses()
        return {
            f'{way}, {name}, ms of processor': 1000 * (after[name].cpu - before[name].cpu) / (rounds * ROUND_SIZE)
            for name in after
        }

    def _measure_uses(self) -> dict[str, Use]:
        return {name: measure_use(server.pid) for name, server in self.servers.items()}

    def _count_calls(self) -> int:
        return sum(self.placement.read_counts()['computes'].values())


def measure(numbers: tuple[int, int], seconds: float, rounds: int) -> Iterator[Result]:
    """Yield the slope of each figure, with its values for few and many."""
    measurements: list[Mapping[str, float]] = []
    with ExitStack() as at_exit:
        fleet = Fleet(at_exit)
        for number in numbers:
            fleet.grow(number)
            if not measurements:
                assert run_eschedule_process(fleet.config, 'flavor', 'set', FLAVOR, QUERY).code == 0
            figures = fleet.measure_idle(seconds)
            for way in WAYS:
                figures |= fleet.measure_placing(way, rounds)
            measurements.append(figures)
    few, many = numbers
    for name, value in measurements[0].items():
        slope = (measurements[1][name] - value) / (many - few)
        counts = {f'of {few}': round(value, 3), f'of {many}': round(measurements[1][name], 3)}
        yield make_result('slopes', f'one more compute: {name}', [slope], None, unit='', counts=counts)


def main() -> None:
    parser = arguments(__doc__, 6)
    parser.add_argument('--few', type=int, default=30)
    parser.add_argument('--many', type=int, default=120)
    parser.add_argument('--seconds', type=float, default=60.0)
    options = asked(parser)
    for result in measure((options.few, options.many), options.seconds, options.rounds):
        tell(result, options.json)


if __name__ == '__main__':
    main()
