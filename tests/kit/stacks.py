"""Stacks for tests: their files, and what became of them."""

from __future__ import annotations

import json
import uuid
from typing import Any

from tests.kit.commands import Control
from tests.kit.story import IMAGE

QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'


def write_stack(control: Control, members: dict[str, Any], name: str = 'shop') -> str:
    # JSON is YAML, too.
    path = control.directory / f'{uuid.uuid4()}.yaml'
    defaults = {'query': QUERY, 'image': IMAGE}
    instances = {member: {**defaults, **values} for member, values in members.items()}
    path.write_text(json.dumps({'stack': name, 'instances': instances}))
    return str(path)


def list_instances(control: Control) -> dict[str, str]:
    result = control.eschedule('list', '-f', 'json')
    assert result.code == 0, result
    records = [record for record in json.loads(result.stdout) if record['state'] not in ('destroying', 'gone')]
    names = [record['name'] for record in records]
    assert len(set(names)) == len(names), names
    return {record['name']: record['instance'] for record in records}


def list_states(control: Control, state: str) -> list[str]:
    records = json.loads(control.eschedule('list', '-f', 'json').stdout)
    return [record['instance'] for record in records if record['state'] == state]
