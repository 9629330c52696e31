"""cycle, with real guests: 30 are made and destroyed one after another; does it slow down?

The cost of a guest must not grow with the number of earlier ones: neither the time from the request's put to the
running domain, nor that until nothing is left, each relative to bare libvirt at that moment (guests.py), nor the memory
of ecompute and its workers. The floor is the median of the first tenth, and a ratio is one later guest's to that.
Target: at most 1.1.

    python bench/cycle_real.py [GUESTS] [--quick] [--json]         (as root; it makes a lab of its own and removes it)
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from statistics import median

import psutil
from guests import Bench, prepare
from lab import Lab, main
from result import Result, paired

LAB = Lab('benchc')
TARGET = 1.1


def measure_memory() -> float:
    """Measure the memory of ecompute and its workers in MB (USS)."""
    pid = json.loads((LAB.directory / 'lab.json').read_text())['processes']['hv1 ecompute']['pid']
    parent = psutil.Process(pid)
    return sum(process.memory_full_info().uss for process in (parent, *parent.children(recursive=True))) / 1e6


def measure(guests: int, images: str) -> Iterator[Result]:
    """Measure on the lab host."""
    bench = Bench(LAB, images)

    def cycle() -> tuple[float, float, float]:
        instances, started = bench.start(1)
        bench.wait_active(instances)
        gone = bench.destroy(instances)
        bench.check_gone(instances)
        bare, started_bare = bench.start_bare(1)
        return started / started_bare, gone / bench.destroy_bare(bare), measure_memory()

    cycle()  # the first fetches the image and warms caches
    cycles = [cycle() for _ in range(guests)]
    first = max(1, guests // 10)
    for workload, unit, values in zip(
        ('put to started', 'destroy to gone', 'memory of ecompute and its workers'),
        ('x libvirt', 'x libvirt', 'MB'),
        zip(*cycles, strict=True),
        strict=True,
    ):
        floor = median(values[:first])
        later = values[first:]
        yield paired('cycle', f'{guests} real guests, {workload}', later, [floor] * len(later), TARGET, unit=unit)
    bench.close()


if __name__ == '__main__':
    main(LAB, measure, lambda: prepare(LAB), 30, quick=10)
