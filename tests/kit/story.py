"""Helpers of the scenario tests with fake guests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.kit import commands
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.servers import wait_until

# Four of them fill an ecompute --fake 'VCPU:4,DISK_GB:10,MEMORY_MB:512'.
SMALL_QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:128'
IMAGE = 'http://images.invalid/small.qcow2'
# A uuid that exists nowhere.
UNKNOWN_UUID = '5ca1ab1e-0000-4000-8000-000000000000'
REACTION_SECONDS = 20.0

NOTIFIED_PATTERN = re.compile(r'NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})\n')


def place(control: Control, *words: str) -> tuple[str, str]:
    return parse_notice(control.eschedule(*(words or (SMALL_QUERY,))))


def boot(control: Control, *words: str) -> str:
    _, instance = place(control, *words)
    wait_address(control, instance)
    return instance


def boot_all(control: Control, count: int) -> list[str]:
    instances = [place(control)[1] for _ in range(count)]
    for instance in instances:
        wait_address(control, instance)
    return instances


def run_in_process(control: Control, *words: str) -> Result:
    return commands.run_in_process(control.schedule_yaml, *words)


def parse_notice(result: Result) -> tuple[str, str]:
    assert result.code == 0, result
    notice = NOTIFIED_PATTERN.fullmatch(result.stdout)
    assert notice, result
    return notice[1], notice[2]


def run_concurrently(control: Control, commands: Sequence[Sequence[str]], width: int = 6) -> list[Result]:
    with ThreadPoolExecutor(width) as threads:
        return list(threads.map(lambda words: control.eschedule(*words), commands))


def read_record(control: Control, instance: str) -> dict[str, Any] | None:
    value = control.etcd.read_record(instance)
    return None if value is None else dict(json.loads(value))


def require_record(control: Control, instance: str) -> dict[str, Any]:
    stored = read_record(control, instance)
    assert stored is not None, instance
    return stored


def wait_state(control: Control, instance: str, state: str) -> dict[str, Any]:
    def find_record() -> dict[str, Any]:
        stored = read_record(control, instance) or {}
        return stored if stored.get('state') == state else {}

    return wait_until(find_record, REACTION_SECONDS, f'{instance} is {state}; it is {read_record(control, instance)}')


def wait_address(control: Control, instance: str) -> str:
    return wait_until(
        lambda: control.etcd.get(f'/booted/{instance}'), REACTION_SECONDS, f'{instance} has an address'
    ).decode()


def assert_one_line(result: Result, code: int, *words: str, command: str = 'eschedule') -> str:
    """Assert that a command failed with one line on stderr, and return that line."""
    assert result.code == code, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result
    assert lines[0].startswith(f'{command}: '), result
    assert 'Traceback' not in result.stdout, result
    for word in words:
        assert word in lines[0], (word, result)
    return lines[0]


def read_log(compute: Ecompute) -> list[str]:
    lines = compute.log.read_text().splitlines()
    for line in lines:
        assert not re.search('Traceback|unexpected error', line), line
    return lines


def find_log_lines(compute: Ecompute, *words: str) -> list[str]:
    return [line for line in read_log(compute) if all(word in line for word in words)]


def wait_log_lines(compute: Ecompute, *words: str, number: int = 1) -> list[str]:
    # An ecompute may log an action after others can see its effect.
    def find_lines() -> list[str]:
        lines = find_log_lines(compute, *words)
        return lines if len(lines) >= number else []

    try:
        return wait_until(find_lines, REACTION_SECONDS, f'compute {compute.uuid} logs {words}')
    except AssertionError as error:
        error.add_note('\n'.join(read_log(compute)[-40:]))
        raise


def read_reserved(control: Control, compute: str) -> int:
    return int(control.placement.read_inventory(compute)['VCPU']['reserved'])
