"""What one more compute costs etcd and placement: daemons of their own, as in life, of two numbers.

    python bench/slopes.py [ROUNDS] [--json] [--few 30] [--many 120] [--seconds 60]

bench/thousand.py has its computes in two processes, which share a lease, a watch and their idle questions: cheaper for
etcd and placement than a thousand machines. Here each is an `ecompute --fake` with `queues: true`. A figure is what the
many took more than the few, for each of the more: idle for --seconds, and by requests, pushed and pulled in turn for
ROUNDS rounds of ten. Nothing of it is time: the daemons have two cores between them. Needs what singles.py needs.
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

from bench.cluster import Counting, Postgres, Use, use_of  # noqa: E402
from bench.comparison import FLAVOR, IMAGE, QUERY, UUID  # noqa: E402
from bench.result import Result, arguments, asked, figure, tell  # noqa: E402
from tests.kit.commands import Ecompute, eschedule, write_config  # noqa: E402
from tests.kit.servers import Etcd, until  # noqa: E402

ROOM = 'VCPU:100,DISK_GB:100,MEMORY_MB:12800'
TEN = 10
AT_ONCE = 4
"""Daemons that are started at the same time."""
SETTLED = 150.0
"""Seconds in which each looks for the first time at what it has."""
WAYS = {'pushed': [QUERY, IMAGE], 'pulled': ['--queue', '--flavor', FLAVOR, IMAGE]}


class Fleet:
    """Servers, and daemons that are added to them. `found` has what was measured of each number of daemons."""

    def __init__(self, at_exit: ExitStack) -> None:
        self._at_exit, enter = at_exit, at_exit.enter_context
        directory = Path(enter(TemporaryDirectory(prefix='ecomp-bench-')))
        self.etcd, self.postgres = enter(Etcd()), enter(Postgres())
        self.placement = enter(Counting(self.postgres.url))
        self.servers = {'etcd': self.etcd, 'placement': self.placement, 'postgres': self.postgres}
        self.config = write_config(directory / 'schedule.yaml', self.etcd.endpoint, self.placement.url)
        self.daemons: list[Ecompute] = []

    def grow(self, number: int) -> None:
        """Start daemons until there are so many, and let them come to rest."""
        while len(self.daemons) < number:
            some = [
                Ecompute(self.etcd.endpoint, self.placement.computes_url, ROOM, queues=True)
                for _ in range(min(AT_ONCE, number - len(self.daemons)))
            ]
            for each in some:
                self._at_exit.callback(each.close)
                each.launch()
            for each in some:
                each.wait_ready()
            self.daemons += some
        time.sleep(SETTLED)

    def idle(self, seconds: float) -> dict[str, float]:
        """What they take when nothing is asked: by name, in seconds of processor, MB, and calls."""
        before, calls = self._uses(), self._calls()
        time.sleep(seconds)
        after = self._uses()
        found = {f'{name}, % of a core': 100 * (after[name].cpu - before[name].cpu) / seconds for name in after}
        found |= {f'{name}, MB': after[name].memory for name in after}
        return found | {'calls a minute': (self._calls() - calls) * 60 / seconds}

    def placing(self, way: str, rounds: int) -> dict[str, float]:
        """What a request takes: milliseconds of processor of each server."""
        before = self._uses()
        for _ in range(rounds):
            for _ in range(TEN):
                done = eschedule(self.config, *WAYS[way])
                assert done.code == 0, done
                (instance,) = UUID.findall(done.stdout)
                until(lambda: self.etcd.keys(f'/booted/{instance}'), 60, 'it has its address')  # noqa: B023
        after = self._uses()
        return {
            f'{way}, {name}, ms of processor': 1000 * (after[name].cpu - before[name].cpu) / (rounds * TEN)
            for name in after
        }

    def _uses(self) -> dict[str, Use]:
        return {name: use_of(server.pid) for name, server in self.servers.items()}

    def _calls(self) -> int:
        return sum(self.placement.counts()['computes'].values())


def measure(numbers: tuple[int, int], seconds: float, rounds: int) -> Iterator[Result]:
    """Each figure of the few, and the slope."""
    found: list[Mapping[str, float]] = []
    with ExitStack() as at_exit:
        fleet = Fleet(at_exit)
        for number in numbers:
            fleet.grow(number)
            if not found:
                assert eschedule(fleet.config, 'flavor', 'set', FLAVOR, QUERY).code == 0
            each = fleet.idle(seconds)
            for way in WAYS:
                each |= fleet.placing(way, rounds)
            found.append(each)
    few, many = numbers
    for name, value in found[0].items():
        slope = (found[1][name] - value) / (many - few)
        counts = {f'of {few}': round(value, 3), f'of {many}': round(found[1][name], 3)}
        yield figure('slopes', f'one more compute: {name}', [slope], None, unit='', counts=counts)


def main() -> None:
    """See the module."""
    parser = arguments(__doc__, 6)
    parser.add_argument('--few', type=int, default=30)
    parser.add_argument('--many', type=int, default=120)
    parser.add_argument('--seconds', type=float, default=60.0)
    options = asked(parser)
    for each in measure((options.few, options.many), options.seconds, options.rounds):
        tell(each, options.json)


if __name__ == '__main__':
    main()
