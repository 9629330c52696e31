"""What tasks are carried out with: the control plane, and the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.instance.pool import Runner
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from ecomp.virt import Hypervisor


@dataclass(frozen=True)
class ControlPlane:
    """etcd and placement, as the compute of this uuid has them. `now` gives ISO 8601 times."""

    compute: str
    store: Store
    placement: Placement
    now: Callable[[], str]


@dataclass(frozen=True)
class Host:
    """The hypervisor, what carries out jobs on it, and what the metadata server is told of guests.

    `look_after` is called every minute; `serves_metadata` says whether a guest here could ask a metadata server.
    """

    hypervisor: Hypervisor
    runner: Runner
    guest_data: GuestData
    look_after: Callable[[], None] = lambda: None
    serves_metadata: Callable[[], bool] = lambda: False
