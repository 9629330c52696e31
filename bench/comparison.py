"""Three ways to place and their costs: pushed one at a time or in sets, or pulled.

    python bench/comparison.py [--computes 10,100] [--requesters 1,8,32] [--ways one,sets,command,pull]
                               [--requests N] [--results FILE] [--quick] [--json]
    python bench/comparison.py --plot           bench/comparison.svg and the table, from the results

Each line of the results is a cell: a number of computes, of requesters, and a way. A cell in the results is not
measured again, so an interrupted run continues; --json, for bench/run, measures all and keeps nothing. `command` is
`one` with a real `eschedule` process for each request; the others run eschedule's main() in started processes that have
loaded its modules. Needs '.[lab,test]', psycopg2-binary, PostgreSQL and, for --plot, matplotlib.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TOP), str(TOP / 'md_server')]

from bench.result import make_result, tell  # noqa: E402

RESULTS, PLOT = Path(__file__).with_name('comparison.jsonl'), Path(__file__).with_name('comparison.svg')
WAYS = ('one', 'command', 'sets', 'pull')
QUERY, FLAVOR, IMAGE = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:128', 'bench', 'http://images.invalid/bench.qcow2'
# Of each way, the same in every panel.
COLORS = {'one': 'tab:blue', 'command': 'tab:orange', 'sets': 'tab:green', 'pull': 'tab:red'}
SET = 10
# Minimum number of requests to a full cluster; each requester makes at least one.
REFUSALS = 8
UUID = re.compile('[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$', re.MULTILINE)
Row = dict[str, Any]


def calculate_vcpus(computes: int) -> int:
    """Return the VCPU of each compute: 800 in all, but at least four each."""
    return max(4, 800 // computes)


def make_arguments(way: str) -> list[str]:
    """Make eschedule's arguments for a way."""
    if way == 'pull':
        return ['--queue', '--flavor', FLAVOR, IMAGE]
    return [QUERY, IMAGE, *(['--count', str(SET)] if way == 'sets' else [])]


# A requester process


def run_requester(config: str, way: str) -> None:
    """Print `ready`; for each number on stdin, place that often and print each result.

    A result is [start, end, code, stdout].
    """
    arguments = ['--config', config, *make_arguments(way)]
    ask = _make_process_caller(arguments) if way == 'command' else _make_main_caller(arguments)
    print('ready', flush=True)
    for line in sys.stdin:
        results = []
        for _ in range(int(line)):
            start = time.monotonic()
            code, output = ask()
            results.append([start, time.monotonic(), code, output])
        print(json.dumps(results), flush=True)


def _make_process_caller(arguments: Sequence[str]) -> Callable[[], tuple[int, str]]:
    eschedule = str(Path(sys.executable).with_name('eschedule'))

    def ask() -> tuple[int, str]:
        result = subprocess.run([eschedule, *arguments], capture_output=True, text=True, check=False)
        return result.returncode, result.stdout

    return ask


def _make_main_caller(arguments: Sequence[str]) -> Callable[[], tuple[int, str]]:
    import ecomp.placement.http_client
    import ecomp.scheduler.placing.create
    import ecomp.scheduler.placing.explain
    import ecomp.store.http2_client  # noqa: F401  (loaded before the measurements)
    from ecomp import schedule

    def ask() -> tuple[int, str]:
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(io.StringIO()):
            code = schedule.main(arguments)
        return code, out.getvalue()

    return ask


class Requesters:
    """A number of requester processes, started and ready."""

    def __init__(self, count: int, config: Path, way: str) -> None:
        from tests.kit.servers import make_environment

        again = [sys.executable, __file__, '--requester', str(config), way]
        self._processes = [
            subprocess.Popen(again, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=make_environment())
            for _ in range(count)
        ]
        for process in self._processes:
            assert process.stdout is not None
            assert process.stdout.readline() == 'ready\n'

    def place(self, times: int) -> list[list[Any]]:
        """Make `times` requests in all, divided among the processes and started concurrently."""
        share, rest = divmod(times, len(self._processes))
        for number, child in enumerate(self._processes):
            assert child.stdin is not None
            child.stdin.write(f'{share + (number < rest)}\n')
            child.stdin.flush()
        return [answer for child in self._processes if child.stdout for answer in json.loads(child.stdout.readline())]

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait()


# Measuring


def measure(cluster: Any, requesters: int, way_name: str, requests: int) -> Row:
    """Measure a cell: place, get refusals with no room, and empty the cluster."""
    processes = Requesters(requesters, cluster.schedule_yaml, way_name)
    try:
        before = cluster.placement.read_counts()
        results = processes.place(requests // (SET if way_name == 'sets' else 1))
        instances, latencies = set[str](), list[float]()
        placed = [(began, UUID.findall(output)) for began, _, code, output in results if code == 0]
        for _, uuids in placed:
            instances |= set(uuids)
        cluster.wait_for(instances, 900)
        after = cluster.placement.read_counts()
        for began, uuids in placed:
            latencies += [cluster.seen[instance][0] - began for instance in uuids]
        seconds = max(cluster.seen[each][0] for each in instances) - min(began for began, *_ in results)
        row = {
            'placed': len(instances),
            'failed': sorted(code for *_, code, _ in results if code),
            'per_second': round(len(instances) / seconds, 1),
            **{f'p{n}': round(_percentile(latencies, n), 3) for n in (50, 95)},
            'calls': _calculate_calls(before, after, len(instances)),
            'balance': round(cluster.calculate_imbalance(instances), 3),
        }
        if way_name != 'pull':
            row['full'] = _measure_refusals(cluster, processes, requesters)
    finally:
        processes.close()
    _destroy_all(cluster, instances)
    return row


def _measure_refusals(cluster: Any, asking: Requesters, requesters: int) -> Row:
    """Measure requests to a cluster without any room."""
    fillers = cluster.fill()
    before = cluster.placement.read_counts()
    results = asking.place(max(requesters, REFUSALS))
    after = cluster.placement.read_counts()
    cluster.release(fillers)
    durations = [ended - began for began, ended, *_ in results]
    return {
        'codes': sorted({code for *_, code, _ in results}),
        **{f'p{n}': round(_percentile(durations, n), 3) for n in (50, 95)},
        'calls': _calculate_calls(before, after, len(results)),
    }


def _calculate_calls(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]], count: int
) -> Row:
    """Return the calls per item, without the computes' upkeep, which requests do not cause."""
    differences = {f'{who} {kind}': after[who][kind] - before[who][kind] for who in after for kind in after[who]}
    return {name: round(calls / count, 2) for name, calls in differences.items() if calls and name != 'computes upkeep'}


def _percentile(values: Sequence[float], percent: int) -> float:
    return sorted(values)[min(len(values) * percent // 100, len(values) - 1)]


def _destroy_all(cluster: Any, instances: set[str]) -> None:
    from tests.kit.commands import run_eschedule_process
    from tests.kit.servers import wait_until

    uuids = sorted(instances)
    for start in range(0, len(uuids), 500):
        result = run_eschedule_process(cluster.schedule_yaml, 'destroy', *uuids[start : start + 500], timeout=600)
        assert result.code == 0, result.stderr[-500:]
    wait_until(lambda: not cluster.current_requests, 600, 'every instance is gone')


def run(options: argparse.Namespace) -> None:
    """Measure the requested cells that are not in the results."""
    from bench.cluster import Cluster
    from tests.kit.commands import run_eschedule_process

    ways = options.ways
    for computes in options.computes:
        # Computes with queues form a separate cluster: their extra calls must not affect the other figures.
        for cluster_ways, settings in (([way for way in ways if way != 'pull'], {}), (['pull'], {'queues': True})):
            have = {_get_cell(row) for row in read_results(options.results)}
            cells = [(computes, number, way) for way in cluster_ways if way in ways for number in options.requesters]
            cells = [cell for cell in cells if cell not in have]
            if not cells:
                continue
            with Cluster(computes, calculate_vcpus(computes), **settings) as cluster:
                if settings:
                    done = run_eschedule_process(cluster.schedule_yaml, 'flavor', 'set', FLAVOR, QUERY)
                    assert done.code == 0, done
                for _, number, way in cells:
                    row = {'computes': computes, 'requesters': number, 'way': way}
                    row |= measure(cluster, number, way, options.requests)
                    row['load'] = round(os.getloadavg()[0], 1)
                    with options.results.open('a') as results:
                        results.write(json.dumps(row) + '\n')
                    if options.json:
                        counts = {name: row[name] for name in ('p50', 'p95', 'balance')}
                        workload = f'{computes:,} computes, {number} requesters, {way}'
                        rate = make_result(
                            'comparison', workload, [row['per_second']], None, unit='a second', counts=counts
                        )
                        tell(rate, True)
                    else:
                        print(json.dumps(row), flush=True)


def read_results(path: Path) -> list[Row]:
    """Read the results so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _get_cell(row: Row) -> tuple[int, int, str]:
    return row['computes'], row['requesters'], row['way']


# Showing


def render_table(rows: Sequence[Row]) -> Iterator[str]:
    """Render the results in Markdown.

    Calls are all calls of placement, but for a refusal only the requesters'.
    """
    names = ['computes', 'requesters', 'way', 'a second', 'p50', 'p95', 'calls', 'claims', '409', '5xx', 'balance']
    names += ['refusal', 'its calls', 'load']
    yield f'| {" | ".join(names)} |'
    yield '|---' * len(names) + '|'
    for row in rows:
        full = row.get('full')
        refusal = f'{full["p50"]:.2f} s | {_sum_calls(full["calls"], "", ("asking",)):.1f}' if full else 'waits | -'
        yield (
            f'| {row["computes"]} | {row["requesters"]} | {row["way"]} | {row["per_second"]:.1f} '
            f'| {row["p50"]:.2f} s | {row["p95"]:.2f} s | {_sum_calls(row["calls"], ""):.2f} '
            f'| {_sum_calls(row["calls"], "claims"):.2f} | {_sum_calls(row["calls"], "409"):.2f} '
            f'| {_sum_calls(row["calls"], "5xx"):.2f} '
            f'| {100 * row["balance"]:.0f} | {refusal} | {row["load"]:.0f} |'
        )


def _sum_calls(calls: Mapping[str, float], kind: str, by: Sequence[str] = ('asking', 'computes')) -> float:
    """Sum the calls of one kind, or of all with ''; an answer's status is not a call."""
    kinds = (kind,) if kind else ('candidates', 'claims', 'held', 'upkeep')
    return sum(calls.get(f'{client} {name}', 0) for client in by for name in kinds)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Plot rates and times until placed by requesters, a column for each number of computes."""
    import matplotlib

    matplotlib.use('svg')
    matplotlib.rcParams |= {'svg.fonttype': 'none', 'svg.hashsalt': 'ecomp', 'font.size': 8}
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    sizes = sorted({row['computes'] for row in rows})
    figure, axes = pyplot.subplots(2, len(sizes), figsize=(3 * len(sizes), 4.5), squeeze=False, layout='constrained')
    for column, size in enumerate(sizes):
        above, below = axes[0][column], axes[1][column]
        above.set_title(f'{size} computes')
        for way in WAYS:
            mine = sorted((row for row in rows if row['computes'] == size and row['way'] == way), key=_get_cell)
            if not mine:
                continue
            color, at = COLORS[way], [row['requesters'] for row in mine]
            above.plot(at, [row['per_second'] for row in mine], marker='o', markersize=3, color=color)
            below.plot(at, [row['p50'] for row in mine], marker='o', markersize=3, color=color)
            below.plot(at, [row['p95'] for row in mine], linestyle=':', color=color)
        for axis in (above, below):
            axis.set_xscale('log', base=2)
            axis.set_xticks([1, 8, 32], ['1', '8', '32'])
            axis.grid(alpha=0.3)
        above.set_ylim(bottom=0)
        below.set_yscale('log')
        below.set_xlabel('requesters')
    axes[0][0].set_ylabel('instances a second')
    axes[1][0].set_ylabel('s until placed: p50, p95 dotted')
    # Above the panels: inside one it would cover the curves.
    ways = [Line2D([], [], color=COLORS[way], marker='o', markersize=3, label=way) for way in WAYS]
    figure.legend(handles=ways, loc='outside upper center', ncols=len(ways), frameon=False)
    figure.savefig(path, metadata={'Date': None})


def parse_numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(',')]


def parse_ways(text: str) -> list[str]:
    """Parse `one,pull`."""
    if wrong := set(text.split(',')) - set(WAYS):
        raise argparse.ArgumentTypeError(f'{", ".join(wrong)}: the ways are {", ".join(WAYS)}')
    return text.split(',')


def main() -> None:
    if sys.argv[1:2] == ['--requester']:
        return run_requester(*sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--computes', type=parse_numbers, default=[10, 100, 1000])
    parser.add_argument('--requesters', type=parse_numbers, default=[1, 8, 32])
    parser.add_argument('--ways', type=parse_ways, default=list(WAYS))
    parser.add_argument('--requests', type=int, default=80, help='instances in each cell')
    parser.add_argument('--results', type=Path, default=RESULTS)
    parser.add_argument('--quick', action='store_true', help='10 computes, 40 requests a cell, and nothing is kept')
    parser.add_argument('--json', action='store_true', help='a line of JSON for each cell, and nothing is kept')
    parser.add_argument('--plot', action='store_true')
    options = parser.parse_args()
    if options.plot:
        rows = sorted({_get_cell(row): row for row in read_results(options.results)}.values(), key=_get_cell)
        plot(rows, PLOT)
        print('\n'.join(render_table(rows)))
        return None
    if options.quick:
        options.computes, options.requesters, options.requests = [10], [1, 8], 40
        options.results = Path(os.devnull)
    elif options.json:
        options.results = Path(os.devnull)
    return run(options)


if __name__ == '__main__':
    main()
