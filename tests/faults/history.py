"""The history of a soak: JSON lines, each written as it happens, so that a run that crashed leaves one.

Every line has `t` (seconds of the run's own monotonic clock) and `what`:

    plan       seed, size, computes {uuid: {name, slots, real}}: once, the first
    ask        id, client, kind, argv, and what of the plan matters later: instance (if known), image, frozen, …
    answer     id, code (negative: ended by that signal, None: hung and killed), stdout, stderr, seconds
    skip       number of an operation that could not be asked (the create it is about had no uuid), or of a fault
    fault      id, kind, target, seconds; `over` ends it; `recovered` says how long its part took from then on
    exit       part, code, ready: an ecompute, etcd … that ended without any fault; `stuck`: one that did not end
    change     revision, key, value (None: removed), lease: every change of etcd, in order
    state      instance, state, compute: of these, what a record says anew
    process    compute, pid, fds, threads, rss (MiB), when (start, end)
    quiet      after: the seconds until nothing was in work any more; left: what was all the same
    final      all planes, and what the audit found: once, the last
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class History:
    """Written by any thread."""

    def __init__(self, path: Path) -> None:
        self._file = path.open('w', encoding='utf-8')
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._ids = iter(range(1, 2**62))

    def now(self) -> float:
        """Seconds since the history was begun."""
        return time.monotonic() - self._began

    def next_id(self) -> int:
        """A number no other line has as its id."""
        with self._lock:
            return next(self._ids)

    def write(self, what: str, **facts: Any) -> None:
        """Add a line."""
        with self._lock:
            line = {'t': round(self.now(), 3), 'what': what, **facts}
            self._file.write(json.dumps(line) + '\n')
            self._file.flush()

    def close(self) -> None:
        """Nothing is written any more."""
        self._file.close()


def read(path: Path) -> list[Line]:
    """The lines of a history; a last one that was cut off by a crash is left out."""
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith('\n')]
