"""What the stories with pretended guests say in one word each."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.kit import commands
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.servers import until

SMALL = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:128'
"""Four of them fill an ecompute --fake 'VCPU:4,DISK_GB:10,MEMORY_MB:512'."""
IMAGE = 'http://images.invalid/small.qcow2'
NOBODY = '5ca1ab1e-0000-4000-8000-000000000000'
"""A uuid that exists nowhere."""
SOON = 20.0

NOTIFIED = re.compile(r'NOTIFIED TARGET, ([0-9a-f-]{36}), OF INSTANCE ([0-9a-f-]{36})\n')


def place(control: Control, *words: str) -> tuple[str, str]:
    """Place an instance (SMALL unless `words` say otherwise): its compute and its uuid."""
    return notified(control.eschedule(*(words or (SMALL,))))


def boot(control: Control, *words: str) -> str:
    """Place an instance (see place()) and wait until its address is known; its uuid."""
    _, instance = place(control, *words)
    addressed(control, instance)
    return instance


def boot_all(control: Control, count: int) -> list[str]:
    """Place `count` instances, and then wait until the address of each is known; their uuids."""
    instances = [place(control)[1] for _ in range(count)]
    for each in instances:
        addressed(control, each)
    return instances


def called(control: Control, *words: str) -> Result:
    return commands.called(control.schedule_yaml, *words)


def notified(result: Result) -> tuple[str, str]:
    """The compute and the instance a successful eschedule printed, and that it printed just this."""
    assert result.code == 0, result
    found = NOTIFIED.fullmatch(result.stdout)
    assert found, result
    return found[1], found[2]


def at_once(control: Control, commands: Sequence[Sequence[str]], width: int = 6) -> list[Result]:
    """All the eschedules, `width` at a time."""
    with ThreadPoolExecutor(width) as threads:
        return list(threads.map(lambda words: control.eschedule(*words), commands))


def record(control: Control, instance: str) -> dict[str, Any] | None:
    value = control.etcd.record(instance)
    return None if value is None else dict(json.loads(value))


def known(control: Control, instance: str) -> dict[str, Any]:
    """The instance's record, which there is."""
    found = record(control, instance)
    assert found is not None, instance
    return found


def reached(control: Control, instance: str, state: str) -> dict[str, Any]:
    def there() -> dict[str, Any]:
        found = record(control, instance) or {}
        return found if found.get('state') == state else {}

    return until(there, SOON, f'{instance} is {state}; it is {record(control, instance)}')


def addressed(control: Control, instance: str) -> str:
    return until(lambda: control.etcd.get(f'/booted/{instance}'), SOON, f'{instance} has an address').decode()


def one_line(result: Result, code: int, *words: str, command: str = 'eschedule') -> str:
    """The one line on stderr of a command that ended with `code`; each of `words` is in it."""
    assert result.code == code, result
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result
    assert lines[0].startswith(f'{command}: '), result
    assert 'Traceback' not in result.stdout, result
    for word in words:
        assert word in lines[0], (word, result)
    return lines[0]


def log_of(compute: Ecompute) -> list[str]:
    """An ecompute's log so far, line by line; there is never a traceback in it, nor the words for a defect."""
    lines = compute.log.read_text().splitlines()
    for line in lines:
        assert not re.search('Traceback|unexpected error', line), line
    return lines


def logged(compute: Ecompute, *words: str) -> list[str]:
    return [line for line in log_of(compute) if all(word in line for word in words)]


def logs(compute: Ecompute, *words: str, number: int = 1) -> list[str]:
    """The lines of an ecompute's log that have all of these words, once there are so many: it may log what it did
    after others can see it."""

    def there() -> list[str]:
        found = logged(compute, *words)
        return found if len(found) >= number else []

    return until(there, SOON, f'compute {compute.uuid} logs {words}')


def reserved(control: Control, compute: str) -> int:
    return int(control.placement.inventory(compute)['VCPU']['reserved'])
