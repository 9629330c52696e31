"""footprint: an idle ecompute against bare Python with libvirt; many in one process.

One process after another is measured for ROUNDS rounds; figures are medians. Memory is USS, the pages of no other
process; PSS would divide a library among all processes that run. A second process like the floor runs throughout, so
that the libraries of bare Python and libvirt are shared pages on both sides. One ecompute is a lab's, on libvirt, with
certificates and without guests: its own process is compared, its workers and mdserver are reported beside it. Those
with guests are fakes. Targets: at most 2 x the floor's USS, less than 0.3 % of a core, no etcd write except the lease's
renewal (which writes no key); for many: started in 30 s, less than 10 % of a core.

    python bench/footprint.py [ROUNDS] [--quick] [--json] [--seconds 10] [--many 1000]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType
from typing import NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.cluster import ECOMPUTE, Computes, CountedPlacement, Postgres
from bench.lab import Lab
from bench.result import Result, arguments, asked, make_result, paired, tell
from tests.kit.commands import Ecompute, run_eschedule_process, write_config
from tests.kit.servers import Etcd, wait_until

ROOM = 'VCPU:100,DISK_GB:100,MEMORY_MB:12800'
SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
GUESTS = 50
# Seconds after which the hint is published: it is renewed with the lease, every ten seconds.
HINT_SECONDS = 25.0
# Seconds for the first periodic check of many computes.
SETTLE_SECONDS = 60.0
FLOOR = "import libvirt, time; c = libvirt.open('test:///default'); print('ready', flush=True); time.sleep(86400)"


class Installed(Ecompute):
    """`ecompute`, started cold (see ECOMPUTE)."""

    def command(self) -> list[str]:
        """The command without Python's own arguments."""
        return [ECOMPUTE, *super().command()[3:]]


class Use(NamedTuple):
    """The use of a process: MiB of USS, processor seconds so far, threads."""

    uss: float
    processor: float
    threads: int


def measure_use(pid: int) -> Use:
    """Measure a process now."""
    process = psutil.Process(pid)
    times = process.cpu_times()
    return Use(process.memory_full_info().uss / 2**20, times.user + times.system, process.num_threads())


class Watched(NamedTuple):
    """A process in the rounds: MiB of USS, percent of a core, maximum of threads."""

    uss: list[float]
    shares: list[float]
    threads: int


def watch(pid: int, seconds: float, rounds: int) -> Watched:
    """Measure a process for `rounds` rounds of `seconds`."""
    uss, shares, threads = [], [], 0
    for _ in range(rounds):
        start, before = time.monotonic(), measure_use(pid)
        time.sleep(seconds)
        after = measure_use(pid)
        shares.append(100 * (after.processor - before.processor) / (time.monotonic() - start))
        uss.append(after.uss)
        threads = max(threads, after.threads)
    return Watched(uss, shares, threads)


def read_revision(etcd: Etcd) -> int:
    """Read etcd's revision, which each write increments."""
    return int(etcd.call('kv/range', {'key': 'Lw=='})['header']['revision'])


def measure(rounds: int, seconds: float, many: int) -> Iterator[Result]:
    """Measure each process."""
    with ExitStack() as at_exit:
        enter = at_exit.enter_context
        directory = Path(enter(tempfile.TemporaryDirectory(prefix='ecomp-bench-')))
        etcd, placement = enter(Etcd()), enter(CountedPlacement(enter(Postgres()).url))
        config = write_config(directory / 'schedule.yaml', etcd.endpoint, placement.url)
        enter(run_bare_python())
        with run_bare_python() as floor:
            bare = watch(floor, seconds, rounds).uss

        def measure_process(
            name: str, pid: int, counts: Mapping[str, float] = MappingProxyType({})
        ) -> Iterator[Result]:
            watched = watch(pid, seconds, rounds)
            yield paired('footprint', f'{name}: memory', watched.uss, bare, 2.0, unit='MiB', counts=counts)
            # A clock tick is 0.1 % of a round.
            yield make_result('footprint', f'{name}: idle', [mean(watched.shares)], 0.3, unit='% of a core')

        with Installed(etcd.endpoint, placement.computes_url, ROOM) as compute:
            time.sleep(HINT_SECONDS)
            yield from measure_process('0 guests', compute.pid)
            result = run_eschedule_process(config, SMALL, '--count', str(GUESTS))
            assert result.code == 0, result
            wait_until(lambda: len(etcd.list_keys('/booted/')) == GUESTS, 120, 'all have their addresses')
            time.sleep(HINT_SECONDS)
            before = read_revision(etcd)
            yield from measure_process(f'{GUESTS} pretended guests', compute.pid)
            writes = read_revision(etcd) - before
            yield make_result('footprint', f'etcd writes in {rounds * seconds:g} s', [writes], 0, unit='writes')
        with Lab('bench-footprint').up() as lab:
            time.sleep(HINT_SECONDS)
            child_memory = [
                measure_use(child.pid).uss for child in psutil.Process(lab.ecompute).children(recursive=True)
            ]
            counts = {'other processes of it': len(child_memory), 'MiB of theirs': round(sum(child_memory), 1)}
            yield from measure_process('on libvirt, 0 guests', lab.ecompute, counts)
        if many:
            settings = write_config(directory / 'compute.yaml', etcd.endpoint, placement.computes_url, queues=True)
            start = time.monotonic()
            process = enter(Computes(settings, many, ROOM))
            yield make_result('footprint', f'{many:,} with queues: start', [time.monotonic() - start], 30.0)
            time.sleep(SETTLE_SECONDS)
            before, calls = read_revision(etcd), placement.read_counts()['computes']
            many_watched = watch(process.pid, seconds, rounds)
            new_calls = sum(number - calls[name] for name, number in placement.read_counts()['computes'].items())
            counts = {'threads': many_watched.threads, 'MiB': round(median(many_watched.uss), 1)}
            counts |= {'etcd writes': read_revision(etcd) - before, 'calls of placement': new_calls}
            idle = f'{many:,} with queues: idle'
            yield make_result('footprint', idle, many_watched.shares, 10.0, unit='% of a core', counts=counts)


@contextmanager
def run_bare_python() -> Iterator[int]:
    """Run the floor's process and yield its pid."""
    with subprocess.Popen([sys.executable, '-c', FLOOR], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == 'ready\n'
            yield process.pid
        finally:
            process.kill()


def main() -> None:
    parser = arguments(__doc__, 12)
    parser.add_argument('--seconds', type=float, default=10.0)
    parser.add_argument('--many', type=int, default=1000, help='0: none')
    options = asked(parser)
    if options.quick:
        options.rounds, options.many = min(options.rounds, 2), 0  # rounds are not shorter: a clock tick is 0.1 % of one
    for result in measure(options.rounds, options.seconds, options.many):
        tell(result, options.json)


if __name__ == '__main__':
    main()
