"""How long to wait before something is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Seconds before the next try: `first`, then twice as many each time, up to `last`."""

    first: float
    last: float
    delay: float = 0.0

    def next(self) -> float:
        """How long now."""
        self.delay = min(max(2 * self.delay, self.first), self.last)
        return self.delay

    def reset(self) -> None:
        """It worked."""
        self.delay = 0.0
