"""Count what happens in this process, and write metrics by prometheus_client."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ecomp.errors import Unreachable
from ecomp.model.text import make_printable

# Upper limits of a histogram's buckets: from an answer of etcd to the download of a large image.
BUCKETS_SECONDS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 120.0, 600.0)
# What each kind of metric adds to its name and to its labels, for each of its samples.
SAMPLES = {'gauge': {'': ''}, 'counter': {'_total': ''}, 'histogram': {'_bucket': ' le', '_count': '', '_sum': ''}}
# {name of a sample: {values of its labels: number}}
Samples = dict[str, Mapping[tuple[str, ...], float]]
# {name of a metric: (kind, help, names of its labels)}
Families = Mapping[str, tuple[str, str, str]]


class Tally:
    """The samples that a process counts. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._samples = defaultdict[str, dict[tuple[str, ...], float]](lambda: defaultdict(float))

    def add(self, sample: str, *labels: str, amount: float = 1) -> None:
        with self._lock:
            self._samples[sample][labels] += amount

    def observe(self, histogram: str, label: str, seconds: float, count: int = 1) -> None:
        """Count `count` events of this duration, where 0 only makes the series exist."""
        with self._lock:
            for limit in (*BUCKETS_SECONDS, float('inf')):
                amount = count if seconds <= limit else 0
                self.add(f'{histogram}_bucket', label, str(limit).replace('inf', '+Inf'), amount=amount)
            self.add(f'{histogram}_count', label, amount=count)
            self.add(f'{histogram}_sum', label, amount=count * max(seconds, 0.0))  # the clock may be set back

    @contextmanager
    def measure(self, backend: str) -> Iterator[None]:
        """Observe the duration of a call, and set the backend as down if it raises Unreachable."""
        started_at, is_up = time.monotonic(), True
        try:
            yield
        except Unreachable:
            is_up = False
            raise
        finally:
            with self._lock:
                self.observe('ecomp_backend_call_duration_seconds', backend, time.monotonic() - started_at)
                self._samples['ecomp_backend_up'][backend,] = is_up

    def copy_samples(self) -> Samples:
        with self._lock:
            return {name: dict(values) for name, values in self._samples.items()}


# One for the process, because a process writes one file of metrics for all its computes.
TALLY = Tally()


def make_text(families: Families, samples: Samples) -> str:
    """Return the metrics in Prometheus' text format, without timestamps."""
    from prometheus_client import CollectorRegistry, Metric, generate_latest

    class Collector:
        def collect(self) -> Iterator[Metric]:
            for name, (kind, text, labels) in families.items():
                metric = Metric(name, text, kind)
                for suffix, further in SAMPLES[kind].items():
                    # A counter without labels is 0 before its first event.
                    default: Mapping[tuple[str, ...], float] = {(): 0} if kind == 'counter' and not labels else {}
                    found = samples.get(name + suffix, default)
                    # Names in etcd may be text that UTF-8 cannot encode; no two samples may have the same labels.
                    printable = {tuple(map(make_printable, values)): number for values, number in found.items()}
                    for values, number in printable.items():
                        named = dict(zip((labels + further).split(), values, strict=True))
                        metric.add_sample(name + suffix, named, number)
                yield metric

    registry = CollectorRegistry(auto_describe=False)  # the library's own has metrics of its process
    registry.register(Collector())
    return generate_latest(registry).decode()
