"""Guests of one compute, and how to build them."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from ecomp.model.guest import GuestSpec
from ecomp.virt import Hypervisor

COMPUTE = str(uuid4())
# Two instances whose first interfaces have the same MAC.
SAME_MAC_INSTANCES = ('b2ce0428-5a5b-5790-9cf1-e323d61c5671', '17ef515d-10f3-5f88-b7e6-c65f2d4f1409')
# A domain that was not made by ecompute.
FOREIGN_DOMAIN_XML = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
<os><type>hvm</type></os></domain>"""
MakeSpec = Callable[[], GuestSpec]


def build(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.create_disk(spec)
    hypervisor.start(spec)
