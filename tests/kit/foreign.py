"""Guests that ecomp did not create, on fake computes."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from tests.kit.commands import Control, Ecompute

ROOMY = 'VCPU:40,DISK_GB:100,MEMORY_MB:8192'


def make_foreign(name: str, is_running: bool = True, **more: Any) -> dict[str, Any]:
    size = {'VCPU': 1, 'MEMORY_MB': 64}
    return {'instance': str(uuid.uuid4()), 'name': name, 'is_running': is_running, 'size': size, **more}


def write_foreign(compute: Ecompute, *guests: Mapping[str, Any]) -> None:
    """Give the guests to a compute that is not running."""
    state = compute.directory / 'state'
    state.mkdir(exist_ok=True)
    (state / 'fake-foreign.json').write_text(json.dumps(guests))


def start_with_foreign(control: Control, *guests: Mapping[str, Any], inventory: str = ROOMY) -> Ecompute:
    compute = Ecompute(control.etcd.endpoint, control.placement.url, inventory)
    write_foreign(compute, *guests)
    return control.at_exit.enter_context(compute)


def read_foreign(compute: Ecompute) -> dict[str, dict[str, Any]]:
    rows = json.loads((compute.directory / 'state/fake-foreign.json').read_text())
    return {row['name']: row for row in rows}


def list_marked(compute: Ecompute) -> set[str]:
    return {name for name, row in read_foreign(compute).items() if row.get('adopted_by')}
