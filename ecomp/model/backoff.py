"""How long to wait before something is tried again."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Backoff:
    """Seconds to wait before the next try: `first`, then twice as many each time, up to `last`."""

    first: float
    last: float
    delay: float = 0.0

    def next(self) -> float:
        """The seconds to wait now."""
        self.delay = min(max(2 * self.delay, self.first), self.last)
        return self.delay

    def reset(self) -> None:
        """Begin with `first` again, after a try that worked."""
        self.delay = 0.0
