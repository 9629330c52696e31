"""Exponential back-off between retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Delays before retries: `initial_seconds`, then doubled each time up to `max_seconds`."""

    first: float
    last: float
    delay: float = 0.0

    def next(self) -> float:
        """Advance to the next delay and return it, in seconds."""
        self.delay = min(max(2 * self.delay, self.first), self.last)
        return self.delay

    def reset(self) -> None:
        """Start again with the initial delay, after a successful try."""
        self.delay = 0.0
