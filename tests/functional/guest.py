"""Guests of one compute, and how they are built."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

from ecomp.model.guest import GuestSpec
from ecomp.virt import Hypervisor

COMPUTE = str(uuid4())
MakeSpec = Callable[[], GuestSpec]


def build(hypervisor: Hypervisor, spec: GuestSpec) -> None:
    hypervisor.create_disk(spec)
    hypervisor.start(spec)
