"""A placement client that is closed after use, and a small guest's claim with it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager

from ecomp.placement import allocations
from ecomp.placement.client import Placement

USER = 'a-user'
PROJECT = 'a-project'
SMALL = {'VCPU': 1, 'MEMORY_MB': 64, 'DISK_GB': 1}


@contextmanager
def open_client(url: str, timeout: tuple[float, float] = (3.0, 20.0)) -> Iterator[Placement]:
    with closing(Placement(url, timeout)) as client:
        yield client


def make_uuid() -> str:
    return str(uuid.uuid4())


def claim(client: Placement, instance: str, provider: str, generation: int | None = None, **amounts: int) -> None:
    allocations.replace_allocations(client, instance, {provider: amounts or SMALL}, USER, PROJECT, generation)
