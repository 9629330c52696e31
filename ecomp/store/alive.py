"""Whether a compute is alive: its key on a lease says so (rule 12). On none it would say so for ever: nobody is."""

from __future__ import annotations

from ecomp.model import keys
from ecomp.store.client import Store, Unchanged


def is_alive(store: Store, compute: str) -> bool:
    """Whether a compute is alive now."""
    return silence(store, compute) is None


def silence(store: Store, compute: str) -> Unchanged | None:
    """The condition that a compute stays silent; None for one that is alive.

    Its revision is that of the key on no lease that is there, 0 where there is none.
    """
    entry = store.get(keys.compute(compute))
    if entry is not None and entry.lease:
        return None
    return Unchanged(keys.compute(compute), entry.revision if entry is not None else 0)
