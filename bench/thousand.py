"""A thousand pretended computes on this machine: what they cost, what each part takes, and what breaks first.

    python bench/thousand.py [--quick] [--json] [--computes 1000] [--instances 10000] [--churn 600] [--results FILE]
    python bench/thousand.py --plot           bench/thousand.svg and the tables, from the results

They register; --instances are placed, a third each one at a time, in sets of ten and by the queue; as many as there are
are then replaced, which is to take --churn seconds; a tenth of the computes is killed and started again; all is
destroyed, and the audit has to find nothing. Each line of the results is a phase: how many, how long, and the processor
(of one core) and memory of each part. Needs '.[lab,test]', psycopg2-binary, PostgreSQL and, for --plot, matplotlib.
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

from bench.result import figure, tell  # noqa: E402
from bench.thousand_page import PARTS, TOLD, Row, draw  # noqa: E402

if TYPE_CHECKING:
    from bench.cluster import Use

RESULTS, PLOT = Path(__file__).with_name('thousand.jsonl'), Path(__file__).with_name('thousand.svg')
QUERY, FLAVOR, IMAGE = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:128', 'bench', 'http://images.invalid/bench.qcow2'
SET = 10
REQUESTERS = 8
SPARE = 4 / 3
"""How much more room there is than instances."""
EVERY = 2.0
"""Seconds between two looks at what the parts take."""
UUID = re.compile('[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$', re.MULTILINE)


class Asked(NamedTuple):
    """What came of one eschedule: when it began and ended (monotonic seconds), its exit code and what it printed."""

    began: float
    ended: float
    code: int
    stdout: str
    stderr: str


def requester() -> None:
    """Say `ready`; for each line of stdin, an eschedule's arguments as JSON, run its main() and print an Asked."""
    import ecomp.placement.client
    import ecomp.scheduler.placing.create
    import ecomp.scheduler.placing.explain  # noqa: F401  (loaded before anything is measured)
    from ecomp import schedule

    print('ready', flush=True)
    for line in sys.stdin:
        out, err, began = io.StringIO(), io.StringIO(), time.monotonic()
        with redirect_stdout(out), redirect_stderr(err):
            code = schedule.main(json.loads(line))
        print(json.dumps(Asked(began, time.monotonic(), code, out.getvalue(), err.getvalue()[-500:])), flush=True)


class Requester:
    """One of those processes."""

    def __init__(self, config: Path) -> None:
        from tests.kit.servers import environment

        self._config = config
        self.process = subprocess.Popen(
            [sys.executable, __file__, '--requester'],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == 'ready\n'

    def ask(self, *words: str) -> Asked:
        """Run `eschedule words`."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(['--config', str(self._config), *words]) + '\n')
        self.process.stdin.flush()
        return Asked(*json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Thousand:
    """The cluster: nine tenths of its computes in one process, and a tenth in another, whose state outlives a kill."""

    def __init__(self, computes: int, instances: int) -> None:
        self.tenth = max(computes // 10, 1)
        self.count = computes
        self.vcpus = max(4, round(SPARE * instances / computes))
        self.placed: dict[str, float] = {}
        """When each instance's request was first seen with a compute, in monotonic seconds."""
        self.there: Mapping[str, Any] = {}
        self.ended = 0.0
        """Processor seconds of computes that were killed."""
        self._at_exit = ExitStack()

    def __enter__(self) -> Self:
        from bench.cluster import Computes, Counting, Postgres
        from ecomp.conf import EtcdConfig
        from ecomp.model import keys
        from ecomp.store.watch import Follower
        from tests.kit.commands import write_config
        from tests.kit.servers import Etcd

        enter = self._at_exit.enter_context
        try:
            self.directory = Path(enter(tempfile.TemporaryDirectory(prefix='ecomp-bench-')))
            self.etcd, self.postgres = enter(Etcd()), enter(Postgres())
            self.placement = enter(Counting(self.postgres.url))
            at = self.etcd.endpoint
            config = write_config(self.directory / 'schedule.yaml', at, self.placement.url)
            self._config = config
            follower = Follower(EtcdConfig((at,)), [(keys.HOSTS, self._on_state)])
            follower.start()
            self._at_exit.callback(follower.stop)
            self.requesters: list[Requester] = []
            for _ in range(REQUESTERS):
                each = Requester(config)
                self._at_exit.callback(each.close)
                self.requesters.append(each)
            plenty = f'VCPU:{self.vcpus},DISK_GB:{self.vcpus},MEMORY_MB:{self.vcpus * 128}'
            self.processes = []
            for name, count in (('most', self.count - self.tenth), ('tenth', self.tenth)):
                settings: dict[str, Any] = {'queues': True, 'state': str(self.directory / name)}
                path = write_config(self.directory / f'{name}.yaml', at, self.placement.computes_url, **settings)
                process = Computes(path, count, plenty)
                self._at_exit.callback(process.close)
                self.processes.append(process)
        except BaseException:
            self._at_exit.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._at_exit.close()

    def ask_all(self, commands: Sequence[Sequence[str]]) -> list[Asked]:
        """Run all of these, REQUESTERS at a time, each as soon as one of them is free."""
        free = deque(self.requesters)

        def ask(words: Sequence[str]) -> Asked:
            each = free.popleft()
            try:
                return each.ask(*words)
            finally:
                free.append(each)

        with ThreadPoolExecutor(len(self.requesters)) as threads:
            return list(threads.map(ask, commands))

    def alive(self) -> int:
        """How many computes have a life."""
        return len(self.etcd.keys('/computes/'))

    def use(self) -> dict[str, Use]:
        """What each part has taken, of all its processes."""
        from bench.cluster import use_of

        pids = {name: [getattr(self, name).pid] for name in ('etcd', 'placement', 'postgres')}
        pids['computes'] = [each.pid for each in self.processes if each.is_running]
        pids['requesters'] = [each.process.pid for each in self.requesters]
        found = {part: use_of(*pids[part]) for part in PARTS}
        computes = found['computes']
        return {**found, 'computes': computes._replace(cpu=computes.cpu + self.ended)}

    def kill_the_tenth(self) -> None:
        """Kill -9 the process that has it."""
        from bench.cluster import use_of

        tenth = self.processes[1]
        self.ended += use_of(tenth.pid).cpu
        tenth.kill()

    def _on_state(self, state: Mapping[str, Any]) -> None:
        now = time.monotonic()
        for key in state.keys() - self.there.keys():
            self.placed.setdefault(key.rpartition('/')[2], now)
        self.there = state


class Phases:
    """The rows, each with what the parts took while it lasted."""

    def __init__(self, cluster: Thousand, results: Path, as_json: bool) -> None:
        self._cluster, self._results, self._as_json = cluster, results, as_json

    @contextmanager
    def phase(self, name: str) -> Iterator[Row]:
        """A phase; what it puts into the row stands beside what was measured."""
        cluster, row, began = self._cluster, Row(), time.monotonic()
        before, calls = cluster.use(), cluster.placement.counts()
        most = {part: each.memory for part, each in before.items()}
        over = threading.Event()

        def look() -> None:
            while not over.wait(EVERY):
                for part, each in cluster.use().items():
                    most[part] = max(most[part], each.memory)

        looking = threading.Thread(target=look, name='looking', daemon=True)
        looking.start()
        try:
            yield row
        finally:
            over.set()
            looking.join()
        seconds = time.monotonic() - began
        after, counted = cluster.use(), cluster.placement.counts()
        row = {'phase': name, 'computes': cluster.count, 'seconds': round(seconds, 1), **row}
        row['cpu'] = {part: round((after[part].cpu - before[part].cpu) / seconds, 3) for part in PARTS}
        row['memory'] = {part: round(most[part]) for part in PARTS}
        kinds = {f'{who} {kind}': counted[who][kind] - calls[who][kind] for who in counted for kind in counted[who]}
        row['calls'] = {kind: number for kind, number in kinds.items() if number}
        row['load'] = round(os.getloadavg()[0], 1)
        with self._results.open('a') as file:
            file.write(json.dumps(row) + '\n')
        counts = {f'{part} % of a core': round(100 * row['cpu'][part]) for part in PARTS}
        counts |= {what: row[what] for what in TOLD if what in row}
        workload = f'{cluster.count:,} computes: {name}'
        tell(figure('thousand', workload, [seconds], None, counts=counts), self._as_json)


def placing(cluster: Thousand, row: Row, commands: Sequence[Sequence[str]], seconds: float) -> list[str]:
    """Run commands that place, and wait until all that was taken is with a compute; the instances."""
    from tests.kit.servers import until

    began = time.monotonic()
    asked = cluster.ask_all(commands)
    found = [(each.began, UUID.findall(each.stdout)) for each in asked if each.code == 0]
    instances = [instance for _, some in found for instance in some]
    until(lambda: all(each in cluster.placed for each in instances), seconds, 'all requests are with a compute')
    took = sorted(cluster.placed[instance] - start for start, some in found for instance in some)
    last = max((cluster.placed[instance] for instance in instances), default=began)
    row |= {'asked': len(commands), 'placed': len(instances), 'per_second': round(len(instances) / (last - began), 1)}
    row |= {f'p{n}': round(took[min(len(took) * n // 100, len(took) - 1)], 3) for n in (50, 95) if took}
    row['failed'] = sorted({f'{each.code}: {each.stderr.strip()[-200:]}' for each in asked if each.code})[:5]
    return instances


def run(cluster: Thousand, phases: Phases, instances: int, churn: float, rng: random.Random) -> None:
    """All phases, in order."""
    from tests.kit.servers import until

    with phases.phase('start') as row:
        for process in cluster.processes:
            process.launch()
        for process in cluster.processes:
            process.wait_ready()
        until(lambda: cluster.alive() == cluster.count, 600, 'all computes are alive')
    with phases.phase('idle'):
        time.sleep(min(churn / 10, 60))
    done = cluster.ask_all([['flavor', 'set', FLAVOR, QUERY]])
    assert done[0].code == 0, done
    third = instances // 3
    living: list[str] = []
    with phases.phase('singles') as row:
        living += placing(cluster, row, [[QUERY, IMAGE]] * third, 3600)
    with phases.phase('sets') as row:
        living += placing(cluster, row, [[QUERY, IMAGE, '--count', str(SET)]] * (third // SET), 3600)
    with phases.phase('pull') as row:
        living += placing(cluster, row, [['--queue', '--flavor', FLAVOR, IMAGE]] * third, 3600)
    with phases.phase('churn') as row:
        _churn(cluster, row, living, churn, rng)
    with phases.phase('a tenth killed') as row:
        _kill_a_tenth(cluster, row)
    with phases.phase('destroy') as row:
        living = sorted({key.rpartition('/')[2] for key in cluster.there})
        parts = [living[first : first + 100] for first in range(0, len(living), 100)]
        asked = cluster.ask_all([['destroy', *some] for some in parts])
        row |= {'destroyed': len(living), 'failed': sorted({each.code for each in asked} - {0})}
        until(lambda: not cluster.there, 1800, 'every instance is gone')
    with phases.phase('audit') as row:
        (audited,) = cluster.ask_all([['audit']])
        row |= {'code': audited.code, 'said': audited.stderr.strip()[-300:], 'found': audited.stdout[:2000]}


def _churn(cluster: Thousand, row: Row, living: list[str], seconds: float, rng: random.Random) -> None:
    """Replace as many as there are, in tens, evenly over so many seconds or as fast as it goes."""
    rng.shuffle(living)
    olds = [living[first : first + SET] for first in range(0, len(living), SET)]
    began, late = time.monotonic(), 0.0
    asked, news = list[Asked](), list[str]()
    for first in range(0, len(olds), REQUESTERS // 2):
        some = olds[first : first + REQUESTERS // 2]
        due = began + seconds * first / len(olds)
        time.sleep(max(due - time.monotonic(), 0.0))
        late = max(late, time.monotonic() - due)
        both = [*(['destroy', *old] for old in some), *([QUERY, IMAGE, '--count', str(SET)] for _ in some)]
        said = cluster.ask_all(both)
        asked += said
        news += [instance for each in said for instance in UUID.findall(each.stdout)]
    took = sorted(each.ended - each.began for each in asked)
    row |= {'replaced': len(news), 'late': round(late, 1), 'p50': round(took[len(took) // 2], 3)}
    row |= {'p95': round(took[len(took) * 95 // 100], 3)}
    row['failed'] = sorted({f'{each.code}: {each.stderr.strip()[-200:]}' for each in asked if each.code})[:5]


def _kill_a_tenth(cluster: Thousand, row: Row) -> None:
    """Kill the tenth, place while it is away, start it again, and wait until it does what it was asked meanwhile."""
    from tests.kit.servers import until

    tenth = cluster.processes[1]
    killed = time.monotonic()
    cluster.kill_the_tenth()
    meanwhile = cluster.ask_all([[QUERY, IMAGE]] * cluster.tenth)
    row['codes meanwhile'] = sorted({each.code for each in meanwhile})
    until(lambda: cluster.alive() == cluster.count - cluster.tenth, 120, 'the killed are seen as dead')
    row['dead after'] = round(time.monotonic() - killed, 1)
    began = time.monotonic()
    tenth.launch()
    tenth.wait_ready()
    until(lambda: cluster.alive() == cluster.count, 600, 'all computes are alive again')
    row['alive again after'] = round(time.monotonic() - began, 1)
    instances = [name for each in meanwhile for name in UUID.findall(each.stdout)]
    until(lambda: all(each in cluster.placed for each in instances), 600, 'what was asked meanwhile is with a compute')


def main() -> None:
    """See the module."""
    if sys.argv[1:2] == ['--requester']:
        return requester()
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
