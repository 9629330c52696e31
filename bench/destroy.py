"""destroy: ten instances at once, against bare libvirt-python (guests.py).

Our side begins with the transaction of the tombstones and ends when the last request's key is gone, which ecompute
removes after domain, disk and claim. The floor destroys and undefines the domain and deletes the volume, a thread each.
Target: at most 1.15.

    python bench/destroy.py [ROUNDS] [--quick] [--json]            (as root; it makes a lab of its own and removes it)
"""

from __future__ import annotations

from collections.abc import Iterator

from guests import Bench, prepare
from lab import Lab, main
from result import Result, paired

LAB = Lab('benchx')
COUNT = 10
TARGET = 1.15


def measure(rounds: int, images: str) -> Iterator[Result]:
    """Measure on the lab host."""
    bench = Bench(LAB, images)

    def ours(count: int) -> float:
        instances, _ = bench.start(count)
        bench.wait_active(instances)
        seconds = bench.destroy(instances)
        bench.check_gone(instances)
        return seconds

    def floor(count: int) -> float:
        instances, _ = bench.start_bare(count)
        return bench.destroy_bare(instances)

    ours(1), floor(1)  # the first of each fetches the image and warms caches
    pairs = [(ours(COUNT), floor(COUNT)) for _ in range(rounds)]
    yield paired('destroy', f'{COUNT} at once', [pair[0] for pair in pairs], [pair[1] for pair in pairs], TARGET)
    bench.close()


if __name__ == '__main__':
    main(LAB, measure, lambda: prepare(LAB), 12, quick=3)
