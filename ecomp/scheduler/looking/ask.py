"""Asking placement while etcd is being asked."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecomp.conf import PlacementConfig
    from ecomp.model.choose import Offer
    from ecomp.placement.client import Placement, Slow

    Backend = Future[tuple[Placement, Offer]]


FRESH = 2.0
"""Seconds between placement's being asked and the attempt's being there, at most: after more it is asked again. So
whoever disables a compute knows after that time of everybody who was told before that there is room on it."""


def ask_placement(config: PlacementConfig, query: str | None, slow: Slow) -> Backend:
    """Placement, and what it offers for a query; the future raises what that raises. `slow` is as Placement has it.

    Query None: nothing is asked yet, and the offer is empty and never fresh.

    Nearly all of what a claim takes is imports and waiting. What this one needs is imported first, and not beside what
    etcd needs: then placement is at it while that is imported.
    """
    from ecomp.model.choose import Offer
    from ecomp.placement.allocations import candidates
    from ecomp.placement.client import Placement

    future: Backend = Future()

    def ask() -> None:
        try:
            placement = Placement(config, slow=slow)
            future.set_result((placement, Offer(()) if query is None else candidates(placement, query)))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask, name='candidates', daemon=True).start()
    return future
