"""Requests and allocations written without ecomp, as a foreign client would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.kit.commands import Control
from tests.kit.story import IMAGE

RESOURCES = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 128}


def make_request(compute: str, instance: str, **amounts: int) -> dict[str, Any]:
    allocations = {compute: {'resources': {**RESOURCES, **amounts}}}
    return {'allocations': allocations, 'instance': instance, 'image': IMAGE, 'user_id': 'u', 'project_id': 'p'}


def put_claim(control: Control, instance: str, *computes: str, amounts: Mapping[str, int] = RESOURCES) -> None:
    body = {
        'allocations': {compute: {'resources': amounts} for compute in computes},
        'user_id': 'u',
        'project_id': 'p',
        'consumer_generation': None,
        'consumer_type': 'INSTANCE',
    }
    control.placement.call('PUT', f'/allocations/{instance}', body)
