"""cycle: instances created and destroyed on one pretended compute, the last tenth of them against the first.

Each round is a set of ten, created and waited for, and its destroy, waited for: by eschedule's main() in this process.
The figure is the ratio of the medians of the last and the first tenth's rounds. Aim: at most 1.1, and memory flat
after the first fifth.

    python bench/cycle.py [ROUNDS]       100 rounds
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ecomp import schedule
from tests.kit.commands import Ecompute, write_config
from tests.kit.servers import Etcd, PlacementServer
from tests.kit.use import Use

AT_ONCE = 10
ROOM = 'VCPU:64,DISK_GB:1000,MEMORY_MB:100000'
SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
UUID = re.compile('[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}$', re.MULTILINE)


def asked(*words: str) -> str:
    """What eschedule says."""
    out, said = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(said):
        code = schedule.main(list(words))
    assert code == 0, (words, code, out.getvalue(), said.getvalue())
    return out.getvalue()


def measure(rounds: int) -> None:
    """Print the ratio, and what the compute has in memory."""
    with (
        tempfile.TemporaryDirectory(prefix='ecomp-bench-') as directory,
        Etcd() as etcd,
        PlacementServer() as placement,
        Ecompute(etcd.endpoint, placement.url, ROOM) as compute,
    ):
        config = str(write_config(Path(directory) / 'schedule.yaml', etcd.endpoint, placement.url))
        seconds, uses = list[float](), list[Use]()
        for _ in range(rounds):
            began = time.monotonic()
            made = asked('--config', config, SMALL, '--count', str(AT_ONCE), '--wait')
            instances = sorted(set(UUID.findall(made)))
            assert len(instances) == AT_ONCE, made
            asked('--config', config, 'destroy', '--wait', *instances)
            seconds.append(time.monotonic() - began)
            uses.append(Use.of(compute.pid))
        tenth = max(rounds // 10, 1)
        first, last = median(seconds[:tenth]), median(seconds[-tenth:])
        print(f'{rounds * AT_ONCE} instances: {first / AT_ONCE * 1000:.0f} ms each in the first tenth, '
              f'{last / AT_ONCE * 1000:.0f} in the last: {last / first:.2f} x; load {os.getloadavg()[0]:.1f}')
        settled, end = uses[rounds // 5], uses[-1]
        print(f'memory {settled.memory:.1f} MiB after a fifth, {end.memory:.1f} at the end; threads {settled.threads}, '
              f'{end.threads}; descriptors {settled.descriptors}, {end.descriptors}')


if __name__ == '__main__':
    measure(int(sys.argv[1]) if sys.argv[1:] else 100)
