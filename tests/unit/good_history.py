"""A history without a violation, step by step, for a test to break."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from tests.kit.ending import StoredValue
from tests.kit.history import Change, CommandRun, History

ONE, TWO = (f'{number}0000000-0000-4000-8000-000000000000' for number in (1, 2))
ALIVE, DOOMED, BROKEN, QUEUED, TAKEN, REFUSED, OTHER = (f'{n}aaaaaaa-0000-4000-8000-000000000000' for n in range(1, 8))
SIZE = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
IMAGE = 'http://images.invalid/i.qcow2'
CAPACITY = {'VCPU': 4, 'DISK_GB': 10, 'MEMORY_MB': 512}
LEASE = 7
STAGES = dict.fromkeys(('requested', 'scheduled', 'image', 'disk', 'started'), 'T')


def encode(**facts: Any) -> str:
    return json.dumps({'version': 1, **facts})


def encode_request(compute: str, instance: str, **more: Any) -> str:
    facts = {'image': IMAGE, 'project_id': 'web', **more}
    return encode(instance=instance, allocations={compute: {'resources': SIZE}}, **facts)


def encode_tombstone(instance: str, project: str = 'web') -> str:
    return encode(instance=instance, allocations={}, image=None, resources=SIZE, project_id=project)


def encode_queued(instance: str, **more: Any) -> str:
    return encode(instance=instance, flavor='small', query=QUERY, project_id='web', **more)


def encode_record(compute: str, instance: str, state: str, **more: Any) -> str:
    stages = STAGES if state in ('active', 'stopped') else {'scheduled': 'T'}
    return encode(instance=instance, compute=compute, state=state, stages=stages, **{'error': None, **more})


def format_notice(compute: str, instance: str) -> str:
    return f'NOTIFIED TARGET, {compute}, OF INSTANCE {instance}\n'


def ask_create(code: int | None, stdout: str = '', *words: str, pid: int = 0) -> CommandRun:
    return CommandRun((*words, QUERY), code, stdout, '', pid=pid)


def ask_destroy(instance: str, answer: str = 'destroy accepted; it carries it out') -> CommandRun:
    return CommandRun(('destroy', instance), 0, '', f'eschedule: {instance}: {answer}\n')


@dataclass
class Story:
    """A history that a test writes; each step is one revision."""

    asks: list[CommandRun] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    allocations: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)

    def step(self, *keys: tuple[str, str | None] | tuple[str, str | None, int]) -> None:
        """Write one transaction; each key is (key, value or None, and optionally a lease)."""
        revision = len({change.revision for change in self.changes}) + 1
        for key, text, *lease in keys:
            stored = None if text is None else StoredValue(text.encode(), lease[0] if lease else 0)
            self.changes.append(Change(revision, key, stored))

    def start_attempt(self, instance: str, pid: int = 9) -> None:
        """Write the attempt of an eschedule in flight."""
        self.step((f'/requests/{instance}', encode(instances=[instance], pid=pid), LEASE))

    def deliver(self, compute: str, instance: str, **more: Any) -> None:
        """Write the attempt, the claim and the delivery of a request."""
        self.start_attempt(instance)
        self.allocations[instance] = {compute: SIZE}
        named: list[tuple[str, str]] = []
        if 'name' in more:
            named = [(f'/names/{more["name"]}', encode(instance=instance))]
        self.step(
            (f'/hosts/{compute}/{instance}', encode_request(compute, instance, **more)),
            *named,
            (f'/requests/{instance}', None),
        )

    def write_records(self, compute: str, instance: str, *states: str, **more: Any) -> None:
        """Write the instance's record in each of these states."""
        for state in states:
            self.step((f'/instances/{instance}', encode_record(compute, instance, state, **more)))

    def finish(self, compute: str, instance: str, state: str = 'gone', **more: Any) -> None:
        """Write the final record, and delete the request and the claim."""
        self.allocations.pop(instance, None)
        last = encode_record(compute, instance, state, **more)
        self.step((f'/hosts/{compute}/{instance}', None), (f'/instances/{instance}', last, LEASE))

    def build_history(self) -> History:
        capacity = {ONE: CAPACITY, TWO: CAPACITY}
        whole = History(tuple(self.asks), {}, self.changes, self.allocations, capacity)
        return replace(whole, **self.overrides)


def make_good_story() -> Story:
    """Return a story with one instance of each outcome, a name, a group and a quota."""
    story = Story()
    group = {'name': 'apart', 'policy': 'anti-affinity', 'strict': True}
    story.deliver(ONE, ALIVE, name='web1', group=group)
    story.step(('/groups/apart', encode(policy='anti-affinity', strict=True, members={ALIVE: ONE})))
    story.asks.append(ask_create(0, format_notice(ONE, ALIVE)))
    story.write_records(ONE, ALIVE, 'building', 'building', 'active', 'stopped', 'active', name='web1')
    story.deliver(TWO, DOOMED)
    story.asks.append(ask_create(0, format_notice(TWO, DOOMED), '--uuid', DOOMED))
    story.write_records(TWO, DOOMED, 'scheduled', 'building')
    story.step((f'/hosts/{TWO}/{DOOMED}', encode_tombstone(DOOMED)))
    story.asks.append(ask_destroy(DOOMED))
    story.write_records(TWO, DOOMED, 'destroying')
    story.finish(TWO, DOOMED)
    story.deliver(TWO, BROKEN)
    story.asks.append(ask_create(1, format_notice(TWO, BROKEN), '--wait'))
    story.finish(TWO, BROKEN, 'error', error={'reason': 'HTTP 404'})
    for instance in (QUEUED, TAKEN):
        story.step((f'/queues/small/{instance}', encode_queued(instance)))
        story.asks.append(CommandRun(('--queue', '--flavor', 'small'), 0, f'QUEUED INSTANCE {instance}\n', ''))
    story.step((f'/queues/small/{TAKEN}/taker', encode(compute=ONE), LEASE))
    story.allocations[TAKEN] = {ONE: SIZE}
    story.step(
        (f'/queues/small/{TAKEN}', None),
        (f'/queues/small/{TAKEN}/taker', None),
        (f'/hosts/{ONE}/{TAKEN}', encode_request(ONE, TAKEN)),
    )
    story.write_records(ONE, TAKEN, 'building', 'active')
    story.asks.append(ask_create(3, 'NO ALLOCATIONS LEFT\n', '--uuid', REFUSED))
    used = {name: 3 * amount for name, amount in SIZE.items()}
    story.step(('/quotas/web', encode(limits={'instances': 9}, used={**used, 'instances': 3})))
    return story
