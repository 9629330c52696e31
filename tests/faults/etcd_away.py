"""What is seen of computes and of eschedule while etcd is away: what is said, how little they do, what stays."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.kit.commands import Control, Ecompute
from tests.kit.servers import PATIENCE, Etcd
from tests.kit.story import logged, one_line

LOST = 'trying again until it is back'


def ticks(stat: Path) -> tuple[float, float]:
    """Seconds of processor time for itself and in the kernel, of a process or a thread: proc(5)."""
    fields = stat.read_text().rpartition(')')[2].split()
    return int(fields[11]) / os.sysconf('SC_CLK_TCK'), int(fields[12]) / os.sysconf('SC_CLK_TCK')


def cpu(compute: Ecompute) -> dict[str, tuple[float, float]]:
    """The same of a compute: of all of it, and of each of its threads."""
    process = Path(f'/proc/{compute.pid}')
    used = {'all': ticks(process / 'stat')}
    for each in (process / 'task').iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            used[f'{each.name} {(each / "comm").read_text().strip()}'] = ticks(each / 'stat')
    return used


def share_while_away(compute: Ecompute, seconds: float = 10.0) -> float:
    """The share of a core it uses; a measurement, not a synchronisation. What used it is printed, for who wonders."""
    before, began = cpu(compute), time.monotonic()
    threading.Event().wait(seconds)
    after, took = cpu(compute), time.monotonic() - began
    spent = {
        name: [round(now - then, 2) for now, then in zip(used, before.get(name, (0.0, 0.0)), strict=True)]
        for name, used in after.items()
    }
    busy = {name: each for name, each in spent.items() if any(each)}
    sys.stdout.write(f'{took:.1f} s, load {os.getloadavg()[0]:.1f}, used: {busy}\n{compute.last_words()}\n')
    return sum(spent['all']) / took


def said(compute: Ecompute, *words: str) -> int:
    """How often it has said this."""
    return len(logged(compute, *words))


def said_back(compute: Ecompute) -> int:
    """How often it has said that etcd is back."""
    return said(compute, ' INFO ', 'etcd at ', 'is back')


def is_refused(control: Control, etcd: Etcd, *words: str, within: float = 20.0) -> None:
    """eschedule ends in time with exit 7 and one line that names etcd."""
    began = time.monotonic()
    one_line(control.eschedule(*words), 7, 'etcd at ')
    assert time.monotonic() - began < PATIENCE * within
    assert etcd


def frozen(compute: Ecompute, deed: Callable[[], object]) -> None:
    """Do something that it sees only afterwards."""
    compute.pause()
    try:
        deed()
    finally:
        compute.resume()
