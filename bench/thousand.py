"""A thousand fake computes on this machine: their cost and what breaks first.

    python bench/thousand.py [--quick] [--json] [--computes 1000] [--instances 10000] [--churn 600] [--results FILE]
    python bench/thousand.py --plot           bench/thousand.svg and the tables, from the results

The computes register; a third of --instances is placed one at a time, a third in sets of ten and a third by the queue;
as many are replaced within --churn seconds; a tenth of the computes is killed and restarted; all instances are
destroyed, and the audit must find nothing. Each line of the results is a phase: counts, duration, and the processor (of
one core) and memory of each part. Needs '.[lab,test]', psycopg2-binary, PostgreSQL and, for --plot, matplotlib.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.result import make_result, tell  # noqa: E402
from bench.thousand_page import PARTS, SHOWN_KEYS, Row, draw  # noqa: E402

if TYPE_CHECKING:
    from bench.cluster import Use

RESULTS, PLOT = Path(__file__).with_name('thousand.jsonl'), Path(__file__).with_name('thousand.svg')
QUERY, FLAVOR, IMAGE = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:128', 'bench', 'http://images.invalid/bench.qcow2'
SET_SIZE = 10
REQUESTERS = 8
# Room for instances, relative to their number.
ROOM_FACTOR = 4 / 3
# Seconds between two measurements of the parts.
SAMPLE_SECONDS = 2.0
UUID = re.compile('[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$', re.MULTILINE)


class CommandResult(NamedTuple):
    """The result of one eschedule: start and end (monotonic seconds), exit code and output."""

    began: float
    ended: float
    code: int
    stdout: str
    stderr: str


def run_requester() -> None:
    """Print `ready`; run eschedule for each line of stdin, print its CommandResult."""
    import ecomp.placement.client
    import ecomp.scheduler.placing.create
    import ecomp.scheduler.placing.explain  # noqa: F401  (loaded before the measurements)
    from ecomp import schedule

    print('ready', flush=True)
    for line in sys.stdin:
        out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
        with redirect_stdout(out), redirect_stderr(err):
            code = schedule.main(json.loads(line))
        print(
            json.dumps(CommandResult(began, time.monotonic(), code, out.getvalue(), err.getvalue()[-500:])), flush=True
        )


class Requester:
    """A process that runs run_requester()."""

    def __init__(self, config: Path) -> None:
        from tests.kit.servers import make_environment

        self._config = config
        self.process = subprocess.Popen(
            [sys.executable, __file__, '--requester'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=make_environment(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == 'ready\n'

    def run(self, *words: str) -> CommandResult:
        """Run `eschedule words`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(['--config', str(self._config), *words]) + '\n')
        self.process.stdin.flush()
        return CommandResult(*json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Thousand:
    """The cluster: nine tenths of its computes in one process, a tenth in another.

    The latter is killed; its state outlives the kill.
    """

    def __init__(self, computes: int, instances: int) -> None:
        self.tenth = max(computes // 10, 1)
        self.count = computes
        self.vcpus = max(4, round(ROOM_FACTOR * instances / computes))
        # When a compute was first seen with each instance's request, in monotonic seconds.
        self.placed: dict[str, float] = {}
        self.current_requests: Mapping[str, Any] = {}
        # Processor seconds of killed computes.
        self.ended_cpu_seconds = 0.0
        self._at_exit = ExitStack()

    def __enter__(self) -> Self:
        from bench.cluster import Computes, CountedPlacement, Postgres
        from ecomp.conf import EtcdConfig
        from ecomp.model import keys
        from ecomp.store.watch import Follower
        from tests.kit.commands import write_config
        from tests.kit.servers import Etcd

        enter = self._at_exit.enter_context
        try:
            self.directory = Path(enter(tempfile.TemporaryDirectory(prefix='ecomp-bench-')))
            self.etcd, self.postgres = enter(Etcd()), enter(Postgres())
            self.placement = enter(CountedPlacement(self.postgres.url))
            endpoint = self.etcd.endpoint
            config = write_config(self.directory / 'schedule.yaml', endpoint, self.placement.url)
            self._config = config
            follower = Follower(EtcdConfig((endpoint,)), [(keys.HOSTS, self._on_state)])
            follower.start()
            self._at_exit.callback(follower.stop)
            self.requesters: list[Requester] = []
            for _ in range(REQUESTERS):
                requester_ = Requester(config)
                self._at_exit.callback(requester_.close)
                self.requesters.append(requester_)
            inventory = f'VCPU:{self.vcpus},DISK_GB:{self.vcpus},MEMORY_MB:{self.vcpus * 128}'
            self.processes = []
            for name, count in (('most', self.count - self.tenth), ('tenth', self.tenth)):
                settings: dict[str, Any] = {'queues': True, 'state': str(self.directory / name)}
                path = write_config(self.directory / f'{name}.yaml', endpoint, self.placement.computes_url, **settings)
                process = Computes(path, count, inventory)
                self._at_exit.callback(process.close)
                self.processes.append(process)
        except BaseException:
            self._at_exit.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit.close()

    def run_all(self, commands: Sequence[Sequence[str]]) -> list[CommandResult]:
        """Run all commands, each as soon as one of the REQUESTERS is free."""
        free = deque(self.requesters)

        def ask(words: Sequence[str]) -> CommandResult:
            requester_ = free.popleft()
            try:
                return requester_.run(*words)
            finally:
                free.append(requester_)

        with ThreadPoolExecutor(len(self.requesters)) as threads:
            return list(threads.map(ask, commands))

    def count_alive(self) -> int:
        """Count the computes with a presence."""
        return len(self.etcd.list_keys('/computes/'))

    def measure_use(self) -> dict[str, Use]:
        """Measure the use of each part, over all its processes."""
        from bench.cluster import measure_use

        pids = {name: [getattr(self, name).pid] for name in ('etcd', 'placement', 'postgres')}
        pids['computes'] = [process.pid for process in self.processes if process.is_running]
        pids['requesters'] = [requester_.process.pid for requester_ in self.requesters]
        uses = {part: measure_use(*pids[part]) for part in PARTS}
        computes = uses['computes']
        return {**uses, 'computes': computes._replace(cpu=computes.cpu + self.ended_cpu_seconds)}

    def kill_the_tenth(self) -> None:
        """Kill (SIGKILL) the process with a tenth of the computes."""
        from bench.cluster import measure_use

        tenth = self.processes[1]
        self.ended_cpu_seconds += measure_use(tenth.pid).cpu
        tenth.kill()

    def _on_state(self, state: Mapping[str, Any]) -> None:
        now = time.monotonic()
        for key in state.keys() - self.current_requests.keys():
            self.placed.setdefault(key.rpartition('/')[2], now)
        self.current_requests = state


class Phases:
    """The rows of the results, each with the use of the parts in its phase."""

    def __init__(self, cluster: Thousand, results: Path, as_json: bool) -> None:
        self._cluster, self._results, self._as_json = cluster, results, as_json

    @contextmanager
    def measure_phase(self, name: str) -> Iterator[Row]:
        """Measure a phase; the block may add to the row."""
        cluster, row, start = self._cluster, Row(), time.monotonic()
        before, calls = cluster.measure_use(), cluster.placement.read_counts()
        peaks = {part: use.memory for part, use in before.items()}
        finished = threading.Event()

        def look() -> None:
            while not finished.wait(SAMPLE_SECONDS):
                for part, use in cluster.measure_use().items():
                    peaks[part] = max(peaks[part], use.memory)

        sampler = threading.Thread(target=look, name='looking', daemon=True)
        sampler.start()
        try:
            yield row
        finally:
            finished.set()
            sampler.join()
        seconds = time.monotonic() - start
        after, total = cluster.measure_use(), cluster.placement.read_counts()
        row = {'phase': name, 'computes': cluster.count, 'seconds': round(seconds, 1), **row}
        row['cpu'] = {part: round((after[part].cpu - before[part].cpu) / seconds, 3) for part in PARTS}
        row['memory'] = {part: round(peaks[part]) for part in PARTS}
        kinds = {f'{who} {kind}': total[who][kind] - calls[who][kind] for who in total for kind in total[who]}
        row['calls'] = {kind: number for kind, number in kinds.items() if number}
        row['load'] = round(os.getloadavg()[0], 1)
        with self._results.open('a') as file:
            file.write(json.dumps(row) + '\n')
        counts = {f'{part} % of a core': round(100 * row['cpu'][part]) for part in PARTS}
        counts |= {key: row[key] for key in SHOWN_KEYS if key in row}
        workload = f'{cluster.count:,} computes: {name}'
        tell(make_result('thousand', workload, [seconds], None, counts=counts), self._as_json)


def place_all(cluster: Thousand, row: Row, commands: Sequence[Sequence[str]], seconds: float) -> list[str]:
    """Run commands that place, wait until computes have all requests, and return the instances."""
    from tests.kit.servers import wait_until

    start = time.monotonic()
    results = cluster.run_all(commands)
    placements = [(result.began, UUID.findall(result.stdout)) for result in results if result.code == 0]
    instances = [instance for _, some in placements for instance in some]
    wait_until(
        lambda: all(instance in cluster.placed for instance in instances), seconds, 'all requests are with a compute'
    )
    delays = sorted(cluster.placed[instance] - began for began, some in placements for instance in some)
    last = max((cluster.placed[instance] for instance in instances), default=start)
    row |= {'asked': len(commands), 'placed': len(instances), 'per_second': round(len(instances) / (last - start), 1)}
    row |= {f'p{n}': round(delays[min(len(delays) * n // 100, len(delays) - 1)], 3) for n in (50, 95) if delays}
    row['failed'] = sorted({f'{result.code}: {result.stderr.strip()[-200:]}' for result in results if result.code})[:5]
    return instances


def run(cluster: Thousand, phases: Phases, instances: int, churn: float, rng: random.Random) -> None:
    """Run all phases in order."""
    from tests.kit.servers import wait_until

    with phases.measure_phase('start') as row:
        for process in cluster.processes:
            process.launch()
        for process in cluster.processes:
            process.wait_ready()
        wait_until(lambda: cluster.count_alive() == cluster.count, 600, 'all computes are alive')
    with phases.measure_phase('idle'):
        time.sleep(min(churn / 10, 60))
    done = cluster.run_all([['flavor', 'set', FLAVOR, QUERY]])
    assert done[0].code == 0, done
    third = instances // 3
    living: list[str] = []
    with phases.measure_phase('singles') as row:
        living += place_all(cluster, row, [[QUERY, IMAGE]] * third, 3600)
    with phases.measure_phase('sets') as row:
        living += place_all(cluster, row, [[QUERY, IMAGE, '--count', str(SET_SIZE)]] * (third // SET_SIZE), 3600)
    with phases.measure_phase('pull') as row:
        living += place_all(cluster, row, [['--queue', '--flavor', FLAVOR, IMAGE]] * third, 3600)
    with phases.measure_phase('churn') as row:
        _churn(cluster, row, living, churn, rng)
    with phases.measure_phase('a tenth killed') as row:
        _kill_a_tenth(cluster, row)
    with phases.measure_phase('destroy') as row:
        living = sorted({key.rpartition('/')[2] for key in cluster.current_requests})
        parts = [living[first : first + 100] for first in range(0, len(living), 100)]
        results = cluster.run_all([['destroy', *part] for part in parts])
        row |= {'destroyed': len(living), 'failed': sorted({result.code for result in results} - {0})}
        wait_until(lambda: not cluster.current_requests, 1800, 'every instance is gone')
    with phases.measure_phase('audit') as row:
        (audited,) = cluster.run_all([['check']])
        row |= {'code': audited.code, 'said': audited.stderr.strip()[-300:], 'found': audited.stdout[:2000]}


def _churn(cluster: Thousand, row: Row, living: list[str], seconds: float, rng: random.Random) -> None:
    """Replace all instances in tens, evenly over `seconds` or as fast as possible."""
    rng.shuffle(living)
    old_sets = [living[first : first + SET_SIZE] for first in range(0, len(living), SET_SIZE)]
    start, late = time.monotonic(), 0.0
    results, new_instances = list[CommandResult](), list[str]()
    for first in range(0, len(old_sets), REQUESTERS // 2):
        batch = old_sets[first : first + REQUESTERS // 2]
        due = start + seconds * first / len(old_sets)
        time.sleep(max(due - time.monotonic(), 0.0))
        late = max(late, time.monotonic() - due)
        commands = [*(['destroy', *old] for old in batch), *([QUERY, IMAGE, '--count', str(SET_SIZE)] for _ in batch)]
        batch_results = cluster.run_all(commands)
        results += batch_results
        new_instances += [instance for result in batch_results for instance in UUID.findall(result.stdout)]
    durations = sorted(result.ended - result.began for result in results)
    row |= {'replaced': len(new_instances), 'late': round(late, 1), 'p50': round(durations[len(durations) // 2], 3)}
    row |= {'p95': round(durations[len(durations) * 95 // 100], 3)}
    row['failed'] = sorted({f'{result.code}: {result.stderr.strip()[-200:]}' for result in results if result.code})[:5]


def _kill_a_tenth(cluster: Thousand, row: Row) -> None:
    """Kill a tenth of the computes, place, restart it, and wait until it has its requests."""
    from tests.kit.servers import wait_until

    tenth = cluster.processes[1]
    killed = time.monotonic()
    cluster.kill_the_tenth()
    results = cluster.run_all([[QUERY, IMAGE]] * cluster.tenth)
    row['codes meanwhile'] = sorted({result.code for result in results})
    wait_until(lambda: cluster.count_alive() == cluster.count - cluster.tenth, 120, 'the killed are seen as dead')
    row['dead after'] = round(time.monotonic() - killed, 1)
    start = time.monotonic()
    tenth.launch()
    tenth.wait_ready()
    wait_until(lambda: cluster.count_alive() == cluster.count, 600, 'all computes are alive again')
    row['alive again after'] = round(time.monotonic() - start, 1)
    instances = [name for result in results for name in UUID.findall(result.stdout)]
    wait_until(
        lambda: all(uuid in cluster.placed for uuid in instances), 600, 'what was asked meanwhile is with a compute'
    )


def main() -> None:
    if sys.argv[1:2] == ['--requester']:
        return run_requester()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--computes', type=int, default=1000)
    parser.add_argument('--instances', type=int, default=10_000)
    parser.add_argument('--churn', type=float, default=600.0, help='seconds in which all instances are replaced once')
    parser.add_argument('--results', type=Path, default=RESULTS)
    parser.add_argument('--quick', action='store_true', help='30 computes, 90 instances, and nothing is kept')
    parser.add_argument('--json', action='store_true', help='a line of JSON for each phase')
    parser.add_argument('--plot', action='store_true')
    options = parser.parse_args()
    if options.plot:
        draw(options.results, PLOT)
        return None
    if options.quick:
        options.computes, options.instances, options.churn, options.results = 30, 90, 10.0, Path(os.devnull)
    elif options.results.exists():
        options.results.unlink()
    with Thousand(options.computes, options.instances) as cluster:
        phases = Phases(cluster, options.results, options.json)
        return run(cluster, phases, options.instances, options.churn, random.Random(1))


if __name__ == '__main__':
    main()
