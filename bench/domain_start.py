"""domain-start: from the request to the running domain, against bare libvirt-python.

The floor is in guests.py. One instance, and ten requested in one transaction, which end with the last; the filters are
on. Both sides end at libvirt's `started` event and run in turn on one lab host. Targets: at most 1.05 for one, 1.1 for
ten.

    python bench/domain_start.py [ROUNDS] [--quick] [--json]       (as root; it makes a lab of its own and removes it)

With as few rounds as --quick, only one instance.
"""

from __future__ import annotations

from collections.abc import Iterator

from guests import Bench, prepare
from lab import Lab, main
from result import QUICK_ROUNDS, Result, paired

LAB = Lab('benchd')
TARGETS = {1: 1.05, 10: 1.1}


def measure(rounds: int, images: str) -> Iterator[Result]:
    """Measure on the lab host."""
    bench = Bench(LAB, images)

    def ours(count: int) -> float:
        instances, seconds = bench.start(count)
        bench.wait_active(instances)
        bench.destroy(instances)
        bench.check_gone(instances)
        return seconds

    def floor(count: int) -> float:
        instances, seconds = bench.start_bare(count)
        bench.destroy_bare(instances)
        return seconds

    ours(1), floor(1)  # the first of each fetches the image and warms caches
    for count, target in TARGETS.items():
        if rounds <= QUICK_ROUNDS and count > 1:
            break  # they take a minute
        pairs = [(ours(count), floor(count)) for _ in range(rounds)]
        mine, floors = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        yield paired('domain-start', 'one' if count == 1 else f'{count} at once', mine, floors, target)
    bench.close()


if __name__ == '__main__':
    main(LAB, measure, lambda: prepare(LAB), 12)
