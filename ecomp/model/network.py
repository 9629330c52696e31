"""What guests are plugged into. Apart from model.guest, for whoever reads a configuration needs no more of a guest."""

from __future__ import annotations

from typing import NamedTuple

MOST_INTERFACES = 8
"""How many a guest can have."""


class Attachment(NamedTuple):
    """What an interface is plugged into: `kind` is `network` (libvirt's, by name) or `bridge` (the host's)."""

    kind: str
    name: str


DEFAULT_NETWORKS = (Attachment('network', 'default'),)
