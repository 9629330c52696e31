"""Exponential back-off between retries."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Delays before retries: `initial_seconds`, then doubled up to `max_seconds`."""

    initial_seconds: float
    max_seconds: float
    delay_seconds: float = 0.0  # the last one, or 0

    def next(self) -> float:
        self.delay_seconds = min(max(2 * self.delay_seconds, self.initial_seconds), self.max_seconds)
        return self.delay_seconds

    def reset(self) -> None:
        self.delay_seconds = 0.0
