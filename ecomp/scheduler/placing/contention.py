"""Many eschedules at once, and hardly two after the same place: the first places are left to those who began before us.

Etcd is asked who is placing instances, and placement only then. So everybody who began before us is counted, or is
done by then, and placement does not offer what it holds. One that is counted, and claims before placement answers, is
allowed for twice: a place stays free that we could have had.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ecomp.model.choose import Offer

SCARCE = 64
"""With fewer places left behind ours, they may have been taken since placement was asked."""
LOOKS = 8
"""How often placement is asked again while there may be no place left for us and none of those ahead gets on: one that
was killed is ahead for a minute."""
PAUSE = 0.1
"""Seconds before each of these looks, at most, and half of it at least."""
MOST = 300
"""Places that are left to others at most: they are reckoned one by one."""


class Contention:
    """Our place among those who place instances now.

    `read` says how many instances are being placed by those who began before us, and by those who began after us.
    """

    def __init__(self, read: Callable[[], tuple[int, int]], ask: Callable[[], Offer], rng: random.Random) -> None:
        self._read, self._ask, self._rng = read, ask, rng
        self._fresh, self._looks, self._fewest = False, LOOKS, MOST
        ahead, self._behind = read()
        self.ahead = min(ahead, MOST)

    @property
    def is_alone(self) -> bool:
        """Whether nobody else is placing instances."""
        return self.ahead + self._behind == 0

    def look(self) -> Offer:
        """Ask placement for the candidates anew."""
        ahead, self._behind = self._read()
        self.ahead = min(ahead, MOST)
        self._fresh = True
        return self._ask()

    def should_look(self, spare: int) -> bool:
        """Whether to look before claiming, when so many places are left behind those ahead and ours; it may wait."""
        if not self._fresh:  # placement was asked before anybody knew of us
            return spare < SCARCE and not self.is_alone
        if spare >= 0 or not self.ahead:
            return False
        self._looks = LOOKS if self.ahead < self._fewest else self._looks - 1
        self._fewest = min(self.ahead, self._fewest)
        if self._looks:
            time.sleep(self._rng.uniform(PAUSE / 2, PAUSE))
        return self._looks > 0
