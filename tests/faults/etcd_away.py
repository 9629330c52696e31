"""Observe computes and eschedule while etcd is away: log lines, processor time and refusals."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.kit.commands import Control, Ecompute
from tests.kit.servers import SLOWDOWN_FACTOR, Etcd
from tests.kit.story import assert_one_line, find_log_lines

LOST_MESSAGE = 'trying again until it is back'


def read_cpu_seconds(stat: Path) -> tuple[float, float]:
    """Return the processor seconds in user mode and in the kernel of a process or thread: proc(5)."""
    fields = stat.read_text().rpartition(')')[2].split()
    return int(fields[11]) / os.sysconf('SC_CLK_TCK'), int(fields[12]) / os.sysconf('SC_CLK_TCK')


def read_cpu_by_thread(compute: Ecompute) -> dict[str, tuple[float, float]]:
    """Return the processor times of a whole compute and of each of its threads."""
    process = Path(f'/proc/{compute.pid}')
    used = {'all': read_cpu_seconds(process / 'stat')}
    for task in (process / 'task').iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            used[f'{task.name} {(task / "comm").read_text().strip()}'] = read_cpu_seconds(task / 'stat')
    return used


def measure_cpu_share(compute: Ecompute, seconds: float = 10.0) -> float:
    """Measure the share of a core that a compute uses; print which threads used it.

    The wait is the measuring period, not a synchronisation.
    """
    before, began = read_cpu_by_thread(compute), time.monotonic()
    threading.Event().wait(seconds)
    after, took = read_cpu_by_thread(compute), time.monotonic() - began
    spent = {
        name: [round(now - then, 2) for now, then in zip(used, before.get(name, (0.0, 0.0)), strict=True)]
        for name, used in after.items()
    }
    busy = {name: times for name, times in spent.items() if any(times)}
    sys.stdout.write(f'{took:.1f} s, load {os.getloadavg()[0]:.1f}, used: {busy}\n{compute.tail_log()}\n')
    return sum(spent['all']) / took


def count_logged(compute: Ecompute, *words: str) -> int:
    """Count the log lines of a compute that contain all these words."""
    return len(find_log_lines(compute, *words))


def count_etcd_back(compute: Ecompute) -> int:
    """Count how often a compute has logged that etcd is back."""
    return count_logged(compute, ' INFO ', 'etcd at ', 'is back')


def assert_refused(control: Control, etcd: Etcd, *words: str, within: float = 20.0) -> None:
    """Assert that eschedule ends in time with exit 7 and one line that names etcd."""
    began = time.monotonic()
    assert_one_line(control.eschedule(*words), 7, 'etcd at ')
    assert time.monotonic() - began < SLOWDOWN_FACTOR * within
    assert etcd


def run_while_frozen(compute: Ecompute, action: Callable[[], object]) -> None:
    """Do something that a compute notices only afterwards: it is frozen until then."""
    compute.pause()
    try:
        action()
    finally:
        compute.resume()
