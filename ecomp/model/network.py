"""What guests are plugged into. Apart from model.guest, for whoever reads a configuration needs no more of a guest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_INTERFACES = 8
"""How many a guest can have."""


class Attachment(NamedTuple):
    """What an interface is plugged into: `kind` is `network` (libvirt's, by name) or `bridge` (the host's)."""

    kind: str
    name: str


DEFAULT_NETWORKS = (Attachment('network', 'default'),)

METRIC = 100
"""Of the first interface's routes; what networkd and NetworkManager give a first one, too."""


def network_config(macs: Sequence[str]) -> dict[str, Any] | None:
    """What cloud-init is told of a guest's interfaces, in order: DHCP on each, and the first one's routes come first.

    None for a single one, with which every image does the same by itself. Netplan's version 2, which cloud-init hands
    on to netplan or translates; it finds the interfaces by their MACs, so that the keys need not be their names.
    Sources: cloud-init's "Networking config version 2" and network_state.py (22.4 to 25.1), netplan-yaml(5).
    """
    if len(macs) < 2:
        return None
    ethernets: dict[str, Any] = {}
    for number, mac in enumerate(macs):
        ethernets[f'eth{number}'] = {
            'match': {'macaddress': mac},
            'dhcp4': True,
            # Two default routes of one metric are two of which any may be taken.
            'dhcp4-overrides': {'route-metric': METRIC * (number + 1)},
            # A network without DHCP is not waited for.
            **({'optional': True} if number else {}),
        }
    return {'version': 2, 'ethernets': ethernets}
