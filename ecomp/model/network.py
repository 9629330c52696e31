"""What guests are plugged into. Apart from model.guest, for whoever reads a configuration needs no more of a guest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

MOST_INTERFACES = 8
"""Interfaces of a guest; a configuration with more is refused."""


class Attachment(NamedTuple):
    """What an interface is plugged into: `kind` is `network` (libvirt's, by name) or `bridge` (the host's)."""

    kind: str
    name: str


METADATA_ADDRESS = '169.254.169.254'
"""Where guests look for a metadata server: EC2's, and link-local, so that no router knows it."""

DEFAULT_NETWORKS = (Attachment('network', 'default'),)

METRIC = 100
"""The metric of the first interface's routes, as networkd and NetworkManager have it; the next ones have multiples."""


def network_config(macs: Sequence[str]) -> dict[str, Any] | None:
    """What cloud-init is told of the interfaces with these MACs: DHCP on each, and the first one's routes come first.

    None for a single one, on which every image asks DHCP by itself. Netplan's version 2, which cloud-init hands on to
    netplan or translates; it finds the interfaces by their MACs, so that the keys need not be their names.
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
