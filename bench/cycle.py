"""cycle: create and destroy instances on a fake compute; does it slow down?

Each round creates a set of ten, waits, destroys it and waits, by eschedule's main() in this process. The result is the
ratio of the median times of the last and first tenth of the rounds. Target: at most 1.1, and constant memory after the
first fifth.

    python bench/cycle.py [ROUNDS] [--quick] [--json]       100 rounds
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.result import Result, arguments, asked, paired, tell
from ecomp import schedule
from tests.kit.commands import Ecompute, write_config
from tests.kit.servers import Etcd, PlacementServer
from tests.kit.use import ResourceUse

SET_SIZE = 10
ROOM = 'VCPU:64,DISK_GB:1000,MEMORY_MB:100000'
SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
UUID = re.compile('[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$', re.MULTILINE)


def run_eschedule(*words: str) -> str:
    """Run eschedule, which must succeed, and return its stdout."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = schedule.main(list(words))
    assert code == 0, (words, code, out.getvalue(), err.getvalue())
    return out.getvalue()


def measure(rounds: int) -> Iterator[Result]:
    """Measure the ratio of times and the compute's memory."""
    with (
        tempfile.TemporaryDirectory(prefix='ecomp-bench-') as directory,
        Etcd() as etcd,
        PlacementServer() as placement,
        Ecompute(etcd.endpoint, placement.url, ROOM) as compute,
    ):
        config = str(write_config(Path(directory) / 'schedule.yaml', etcd.endpoint, placement.url))
        seconds, uses = list[float](), list[ResourceUse]()
        for _ in range(rounds):
            start = time.monotonic()
            output = run_eschedule('--config', config, SMALL, '--count', str(SET_SIZE), '--wait')
            instances = sorted(set(UUID.findall(output)))
            assert len(instances) == SET_SIZE, output
            run_eschedule('--config', config, 'destroy', '--wait', *instances)
            seconds.append(time.monotonic() - start)
            uses.append(ResourceUse.measure(compute.pid))
        tenth = max(rounds // 10, 1)
        workload = f'{rounds * SET_SIZE:,} pretended instances'
        yield paired('cycle', f'{workload}: the last tenth against the first', seconds[-tenth:], seconds[:tenth], 1.1)
        settled, end = uses[rounds // 5], uses[-1]
        counts = {'threads': end.threads - settled.threads, 'descriptors': end.descriptors - settled.descriptors}
        yield paired('cycle', f'{workload}: memory at the end against that after a fifth', [end.memory],
                     [settled.memory], 1.05, unit='MiB', counts=counts)  # fmt: skip


def main() -> None:
    options = asked(arguments(__doc__, 100, 20))
    for result in measure(options.rounds):
        tell(result, options.json)


if __name__ == '__main__':
    main()
