"""A history without a violation, step by step, for a test to break."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from tests.kit.ending import Kept
from tests.kit.history import Ask, Change, History

ONE, TWO = (f'{number}0000000-0000-4000-8000-000000000000' for number in (1, 2))
LIVES, DOOMED, BROKEN, WAITS, TAKEN, REFUSED, OTHER = (f'{n}aaaaaaa-0000-4000-8000-000000000000' for n in range(1, 8))
SIZE = {'VCPU': 1, 'DISK_GB': 1, 'MEMORY_MB': 64}
QUERY = 'resources=VCPU:1,DISK_GB:1,MEMORY_MB:64'
IMAGE = 'http://images.invalid/i.qcow2'
ROOM = {'VCPU': 4, 'DISK_GB': 10, 'MEMORY_MB': 512}
LEASE = 7
STAGES = dict.fromkeys(('requested', 'scheduled', 'image', 'disk', 'started'), 'T')


def value(**facts: Any) -> str:
    return json.dumps({'version': 1, **facts})


def request(compute: str, instance: str, **more: Any) -> str:
    facts = {'image': IMAGE, 'project_id': 'web', **more}
    return value(instance=instance, allocations={compute: {'resources': SIZE}}, **facts)


def tombstone(instance: str, project: str = 'web') -> str:
    return value(instance=instance, allocations={}, image=None, resources=SIZE, project_id=project)


def waiting(instance: str, **more: Any) -> str:
    return value(instance=instance, flavor='small', query=QUERY, project_id='web', **more)


def record(compute: str, instance: str, state: str, **more: Any) -> str:
    stages = STAGES if state in ('active', 'stopped') else {'scheduled': 'T'}
    return value(instance=instance, compute=compute, state=state, stages=stages, **{'error': None, **more})


def notified(compute: str, instance: str) -> str:
    return f'NOTIFIED TARGET, {compute}, OF INSTANCE {instance}\n'


def create(code: int | None, stdout: str = '', *words: str, pid: int = 0) -> Ask:
    return Ask((*words, QUERY), code, stdout, '', pid=pid)


def destroy(instance: str, said: str = 'destroy accepted, it carries it out') -> Ask:
    return Ask(('destroy', instance), 0, '', f'eschedule: {instance}: {said}\n')


@dataclass
class Story:
    """A history that a test writes; each step is one revision."""

    asks: list[Ask] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    held: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)

    def step(self, *keys: tuple[str, str | None] | tuple[str, str | None, int]) -> None:
        """Write one transaction; each key is (key, value or None, and optionally a lease)."""
        revision = len({change.revision for change in self.changes}) + 1
        for key, text, *lease in keys:
            stored = None if text is None else Kept(text.encode(), lease[0] if lease else 0)
            self.changes.append(Change(revision, key, stored))

    def announced(self, instance: str, pid: int = 9) -> None:
        """Write the attempt of an eschedule in flight."""
        self.step((f'/requests/{instance}', value(instances=[instance], pid=pid), LEASE))

    def delivered(self, compute: str, instance: str, **more: Any) -> None:
        """Write the attempt, the claim and the delivery of a request."""
        self.announced(instance)
        self.held[instance] = {compute: SIZE}
        named: list[tuple[str, str]] = []
        if 'name' in more:
            named = [(f'/names/{more["name"]}', value(instance=instance))]
        self.step((f'/hosts/{compute}/{instance}', request(compute, instance, **more)), *named,
                  (f'/requests/{instance}', None))

    def built(self, compute: str, instance: str, *states: str, **more: Any) -> None:
        """Write the instance's record in each of these states."""
        for state in states:
            self.step((f'/instances/{instance}', record(compute, instance, state, **more)))

    def ended(self, compute: str, instance: str, state: str = 'gone', **more: Any) -> None:
        """Write the final record, and delete the request and the claim."""
        self.held.pop(instance, None)
        last = record(compute, instance, state, **more)
        self.step((f'/hosts/{compute}/{instance}', None), (f'/instances/{instance}', last, LEASE))

    def history(self) -> History:
        capacity = {ONE: ROOM, TWO: ROOM}
        whole = History(tuple(self.asks), {}, self.changes, self.held, capacity)
        return replace(whole, **self.more)


def good() -> Story:
    """Return a story with one instance of each outcome, a name, a group and a quota."""
    story = Story()
    group = {'name': 'apart', 'policy': 'anti-affinity', 'strict': True}
    story.delivered(ONE, LIVES, name='web1', group=group)
    story.step(('/groups/apart', value(policy='anti-affinity', strict=True, members={LIVES: ONE})))
    story.asks.append(create(0, notified(ONE, LIVES)))
    story.built(ONE, LIVES, 'building', 'building', 'active', 'stopped', 'active', name='web1')
    story.delivered(TWO, DOOMED)
    story.asks.append(create(0, notified(TWO, DOOMED), '--uuid', DOOMED))
    story.built(TWO, DOOMED, 'scheduled', 'building')
    story.step((f'/hosts/{TWO}/{DOOMED}', tombstone(DOOMED)))
    story.asks.append(destroy(DOOMED))
    story.built(TWO, DOOMED, 'destroying')
    story.ended(TWO, DOOMED)
    story.delivered(TWO, BROKEN)
    story.asks.append(create(1, notified(TWO, BROKEN), '--wait'))
    story.ended(TWO, BROKEN, 'error', error={'reason': 'HTTP 404'})
    for instance in (WAITS, TAKEN):
        story.step((f'/queues/small/{instance}', waiting(instance)))
        story.asks.append(Ask(('--queue', '--flavor', 'small'), 0, f'QUEUED INSTANCE {instance}\n', ''))
    story.step((f'/queues/small/{TAKEN}/taker', value(compute=ONE), LEASE))
    story.held[TAKEN] = {ONE: SIZE}
    story.step((f'/queues/small/{TAKEN}', None), (f'/queues/small/{TAKEN}/taker', None),
               (f'/hosts/{ONE}/{TAKEN}', request(ONE, TAKEN)))
    story.built(ONE, TAKEN, 'building', 'active')
    story.asks.append(create(3, 'NO ALLOCATIONS LEFT\n', '--uuid', REFUSED))
    used = {name: 3 * amount for name, amount in SIZE.items()}
    story.step(('/quotas/web', value(limits={'instances': 9}, used={**used, 'instances': 3})))
    return story
