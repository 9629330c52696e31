"""What tasks are carried out with: the control plane, and the host."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from ecomp.agent.host.metadata import GuestData
from ecomp.agent.instance.runner import Runner
from ecomp.errors import BuildFailed, EcompError, Unreachable
from ecomp.model import keys
from ecomp.model.allocation import total
from ecomp.model.guest import BaseImage, GuestSpec
from ecomp.model.guest_data import shared_user_data
from ecomp.model.instance import Invalid, Request, Shares, parse_request, shares
from ecomp.model.network import Attachment
from ecomp.placement.allocations import Consumer
from ecomp.placement.client import Placement
from ecomp.store.client import Store
from ecomp.virt import Hypervisor


def with_shares(store: Store, compute: str, wish: Invalid) -> Invalid:
    """The request that is refused with what it shares, which may be in a value that was not kept: that is read once."""
    entry = store.get(keys.request(compute, wish.instance)) if wish.shares == Shares() else None
    return wish if entry is None else wish._replace(shares=shares(parse_request(compute, entry.key, entry.value)))


def aside(ask: Callable[[], Consumer]) -> Future[Consumer]:
    """Have this asked by a thread of its own, or by this one where none can be started; the future has its errors."""
    future: Future[Consumer] = Future()

    def tell() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    try:
        threading.Thread(target=tell, name='confirm', daemon=True).start()
    except RuntimeError:
        tell()
    return future


def answer(asked: Future[Consumer]) -> Consumer:
    """What placement said. Unreachable for whatever else it answers: it is no reason to end a build, and waited for."""
    try:
        return asked.result()
    except Unreachable:
        raise
    except EcompError as error:
        raise Unreachable(str(error)) from error


@dataclass(frozen=True)
class ControlPlane:
    """etcd and placement, as the compute of this uuid has them. `now` gives ISO 8601 times.

    `aside` has placement asked while something else is done.
    """

    compute: str
    store: Store
    placement: Placement
    now: Callable[[], str]
    aside: Callable[[Callable[[], Consumer]], Future[Consumer]] = aside


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


@dataclass(frozen=True)
class Shape:
    """What this compute gives every guest. `hostname` is where its console log is.

    `seed` says what is on the NoCloud disk of the guest with a MAC, BuildFailed; None where guests get no such disk.
    """

    virt_type: str
    resize: bool
    networks: tuple[Attachment, ...]
    hostname: str
    seed: Callable[[str], Mapping[str, bytes]] | None = None

    def spec(self, compute: str, request: Request) -> GuestSpec:
        """The guest to make of a request to this compute; its base, its addresses and its seed are not known yet."""
        asked = total(request.allocations)
        return GuestSpec(
            instance=request.instance,
            compute=compute,
            vcpus=asked['VCPU'],
            memory_mb=asked['MEMORY_MB'],
            disk_gb=asked['DISK_GB'] if self.resize else None,
            base=BaseImage('', '', 0),
            virt_type=self.virt_type,
            networks=self.networks,
        )


def with_user_data(store: Store, request: Request) -> Request:
    """The request with the user-data that it shares with the others of its set. BuildFailed where that is gone."""
    if request.user_data_sha256 is None:
        return request
    entry = store.get(keys.user_data(request.user_data_sha256))
    if entry is None:
        raise BuildFailed('scheduled', 'its user-data is not in etcd any more: that of a set is kept for a week')
    try:
        return replace(request, user_data=shared_user_data(entry.value, request.user_data_sha256))
    except ValueError as error:
        raise BuildFailed('scheduled', f'its user-data, {entry.key}: {error}') from error
