"""Query placement for candidates in a thread, while the modules for etcd are loaded."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

from ecomp.model.choose import Offer

if TYPE_CHECKING:
    from ecomp.conf import PlacementConfig
    from ecomp.placement.client import Placement, SlowAnswerReport

Backend: TypeAlias = 'Future[tuple[Placement, Offer]]'


def ask_placement(config: PlacementConfig, query: str | None, slow: SlowAnswerReport) -> Backend:
    """Return a future of a client of placement and its offer, which is empty without a query."""
    # Imports and waiting take most of a claim's time. Placement's modules come first, so that placement answers while
    # those for etcd are imported.
    from ecomp.placement.allocations import read_candidates
    from ecomp.placement.client import Placement

    future: Backend = Future()

    def ask() -> None:
        try:
            placement = Placement(config, slow=slow)
            future.set_result((placement, Offer(()) if query is None else read_candidates(placement, query)))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=ask, name='candidates', daemon=True).start()
    return future
