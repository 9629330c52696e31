"""destroy: ten at once, until domain, disk, claim and keys are gone, against bare libvirt-python (guests.py).

Ours begins with the transaction that asks for it and ends when the last request's key is gone, which ecompute removes
after all else. The floor destroys and undefines the domain and deletes the volume, a thread each. Target: at most 1.15.

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


def inside(rounds: int, images: str) -> Iterator[Result]:
    """The measuring itself, on the lab host."""
    bench = Bench(LAB, images)

    def ours(count: int) -> float:
        instances, _ = bench.start(count)
        bench.settle(instances)
        seconds = bench.destroy(instances)
        bench.check_gone(instances)
        return seconds

    def floor(count: int) -> float:
        instances, _ = bench.start_bare(count)
        return bench.destroy_bare(instances)

    ours(1), floor(1)  # the first of each fetches the image and warms caches
    taken = [(ours(COUNT), floor(COUNT)) for _ in range(rounds)]
    yield paired('destroy', f'{COUNT} at once', [each[0] for each in taken], [each[1] for each in taken], TARGET)
    bench.close()


if __name__ == '__main__':
    main(LAB, inside, lambda: prepare(LAB), 12, quick=3)
