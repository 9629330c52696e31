"""The history of a soak: JSON lines, each written when it happens, so that a crashed run leaves a history too.

Every line has `t` (seconds of the run's own monotonic clock) and `what`:

    plan       seed, size, computes {uuid: {name, slots, real}}: once, the first line
    ask        id, client, kind, argv, and parts of the plan that matter later: instance (if known), image, frozen, …
    answer     id, code (negative: ended by that signal, None: hung and killed), stdout, stderr, seconds
    skip       number of a fault, or of an operation that could not be sent (its create had no uuid)
    fault      id, kind, target, seconds; `over` ends it; `recovered` gives the seconds that its part took after that
    exit       part, code, ready: an ecompute, etcd … that ended without a fault; `stuck`: one that did not end
    change     revision, key, value (None: removed), lease: every change of etcd, in order
    state      instance, state, compute: the changes that show a new state in a record
    process    compute, pid, fds, threads, rss (MiB), when (start, end)
    quiet      after: the seconds until no work was in progress; left: the work still in progress then
    final      all planes, and the findings of the audit: once, the last line
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class History:
    """Writes a history; any thread may call it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open('w', encoding='utf-8')
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._ids = iter(range(1, 2**62))

    def now(self) -> float:
        """Return the seconds since the history was begun."""
        return time.monotonic() - self._began

    def next_id(self) -> int:
        """Return a number that no other line has as its id."""
        with self._lock:
            return next(self._ids)

    def write(self, what: str, **facts: Any) -> None:
        """Add a line."""
        with self._lock:
            line = {'t': round(self.now(), 3), 'what': what, **facts}
            self._file.write(json.dumps(line) + '\n')
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_history(path: Path) -> list[Line]:
    """Read the lines of a history, except a last line that a crash cut off."""
    lines = path.read_text(encoding='utf-8').splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith('\n')]
