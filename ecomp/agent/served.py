"""How guests come by their metadata: that a server answers them, for as long as ecompute runs, and what a disk has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ecomp.agent.metadata import ADDRESS, MetadataServer, seed
from ecomp.conf import ComputeConfig

if TYPE_CHECKING:
    from ecomp.virt.libvirt_host import Libvirt

log = logging.getLogger(__name__)


def keep_served(
    libvirt: Libvirt, state: Path, directory: Path, wanted: bool, at_exit: ExitStack
) -> Callable[[], None]:
    """See that a metadata server answers; what keeps it so. `directory` may have its mdserver.conf.

    Where no bridge is libvirt's none can be served, which is said if it is `wanted`.
    """
    bridge = libvirt.bridge_name()
    if bridge is None:
        if wanted:
            none = 'networks: none of them is a network whose bridge libvirt made'
            log.warning('%s: no metadata is served; `metadata: iso` puts it on a disk', none)
        return lambda: None
    server = MetadataServer(state / 'metadata', directory, bridge)
    # One that was killed left the address where it was: with this file it is ours to take off.
    mark = state / 'metadata-address'
    ours = mark.exists()

    def ensure() -> None:
        nonlocal ours
        if not libvirt.metadata_address_present():
            ours = True
            with suppress(OSError):  # a full disk
                mark.touch()
            libvirt.ensure_metadata_address()
            log.info("put %s on the guests' bridge", ADDRESS)
        server.ensure()

    def take_off() -> None:
        if ours:
            libvirt.remove_metadata_address()
            mark.unlink(missing_ok=True)

    at_exit.callback(take_off)
    at_exit.callback(server.stop)
    ensure()
    return ensure


def nocloud(config: ComputeConfig, is_served: Callable[[], bool]) -> Callable[[str], Mapping[str, bytes]] | None:
    """What says what is on a guest's NoCloud disk; None where guests get none. `is_served`: metadata is served here."""
    if config.metadata == 'network':
        return None
    return lambda mac: seed(config.state / 'metadata', config.directory, mac, phones_home=is_served())
