"""Helpers of the scenario tests with fake guests."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.kit import commands
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.servers import until

# Four of them fill an ecompute --fake 'VCPU:4,DISK_GB:10,MEMORY_MB:512'.
SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:128'
IMAGE = 'http://images.invalid/small.qcow2'
# A uuid that exists nowhere.
NOBODY = '5ca1ab1e-0000-4000-8000-000000000000'
SOON = 20.0

NOTIFIED = re.compile(r'NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})\n')


def place(control: Control, *words: str) -> tuple[str, str]:
    """Place an instance, SMALL_QUERY by default, and return its compute and its uuid."""
    return notified(control.eschedule(*(words or (SMALL,))))


def boot(control: Control, *words: str) -> str:
    """Place an instance as place() does, wait for its address, and return its uuid."""
    _, instance = place(control, *words)
    addressed(control, instance)
    return instance


def boot_all(control: Control, count: int) -> list[str]:
    """Place `count` instances, then wait for the address of each, and return their uuids."""
    instances = [place(control)[1] for _ in range(count)]
    for instance in instances:
        addressed(control, instance)
    return instances


def called(control: Control, *words: str) -> Result:
    return commands.called(control.schedule_yaml, *words)


def notified(result: Result) -> tuple[str, str]:
    """Return the compute and the instance that a successful eschedule printed, and only that."""
    assert result.code == 0, result
    notice = NOTIFIED.fullmatch(result.stdout)
    assert notice, result
    return notice[1], notice[2]


def at_once(control: Control, commands: Sequence[Sequence[str]], width: int = 6) -> list[Result]:
    """Run several eschedules concurrently, `width` at a time."""
    with ThreadPoolExecutor(width) as threads:
        return list(threads.map(lambda words: control.eschedule(*words), commands))


def record(control: Control, instance: str) -> dict[str, Any] | None:
    value = control.etcd.record(instance)
    return None if value is None else dict(json.loads(value))


def known(control: Control, instance: str) -> dict[str, Any]:
    """Return the instance's record, which must exist."""
    stored = record(control, instance)
    assert stored is not None, instance
    return stored


def reached(control: Control, instance: str, state: str) -> dict[str, Any]:
    def find_record() -> dict[str, Any]:
        stored = record(control, instance) or {}
        return stored if stored.get('state') == state else {}

    return until(find_record, SOON, f'{instance} is {state}; it is {record(control, instance)}')


def addressed(control: Control, instance: str) -> str:
    return until(lambda: control.etcd.get(f'/booted/{instance}'), SOON, f'{instance} has an address').decode()


def one_line(result: Result, code: int, *words: str, command: str = 'eschedule') -> str:
    """Assert that a command failed with `code` and one line on stderr.

    The line must contain `words`, and is returned.
    """
    assert result.code == code, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result
    assert lines[0].startswith(f'{command}: '), result
    assert 'Traceback' not in result.stdout, result
    for word in words:
        assert word in lines[0], (word, result)
    return lines[0]


def log_of(compute: Ecompute) -> list[str]:
    """Return an ecompute's log lines, among them no traceback and no internal error."""
    lines = compute.log.read_text().splitlines()
    for line in lines:
        assert not re.search('Traceback|unexpected error', line), line
    return lines


def logged(compute: Ecompute, *words: str) -> list[str]:
    return [line for line in log_of(compute) if all(word in line for word in words)]


def logs(compute: Ecompute, *words: str, number: int = 1) -> list[str]:
    """Wait for `number` lines in an ecompute's log that contain all words, and return them.

    It may log an action after others can see the effect.
    """

    def find_lines() -> list[str]:
        lines = logged(compute, *words)
        return lines if len(lines) >= number else []

    return until(find_lines, SOON, f'compute {compute.uuid} logs {words}')


def reserved(control: Control, compute: str) -> int:
    return int(control.placement.inventory(compute)['VCPU']['reserved'])
