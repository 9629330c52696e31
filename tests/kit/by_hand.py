"""Requests and allocations written without ecomp, as a foreign client would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.kit.commands import Control
from tests.kit.story import IMAGE

ROOM = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}


def request(compute: str, instance: str, **room: int) -> dict[str, Any]:
    allocations = {compute: {'resources': {**ROOM, **room}}}
    return {'allocations': allocations, 'instance': instance, 'image': IMAGE, 'user_id': 'u', 'project_id': 'p'}


def claim(control: Control, instance: str, *computes: str, room: Mapping[str, int] = ROOM) -> None:
    body = {
        'allocations': {compute: {'resources': room} for compute in computes},
        'user_id': 'u',
        'project_id': 'p',
        'consumer_generation': None,
        'consumer_type': 'INSTANCE',
    }
    control.placement.call('PUT', f'/allocations/{instance}', body)
