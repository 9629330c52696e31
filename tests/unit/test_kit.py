"""Tools of the tests: the history judge, and the plugin of tests/run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.kit.ending import StoredValue
from tests.kit.history import Change, CommandRun, History, judge
from tests.kit.plan import FOLDERS, PARTS, TESTS, find_part
from tests.kit.servers import make_environment

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
    """A history that a test writes, with one revision for each step."""

    asks: list[CommandRun] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    allocations: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)

    def step(self, *keys: tuple[str, str | None] | tuple[str, str | None, int]) -> None:
        """Write one transaction of tuples (key, value or None, and optionally a lease)."""
        revision = len({change.revision for change in self.changes}) + 1
        for key, text, *lease in keys:
            stored = None if text is None else StoredValue(text.encode(), lease[0] if lease else 0)
            self.changes.append(Change(revision, key, stored))

    def start_attempt(self, instance: str, pid: int = 9) -> None:
        self.step((f'/requests/{instance}', encode(instances=[instance], pid=pid), LEASE))

    def deliver(self, compute: str, instance: str, **more: Any) -> None:
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
        for state in states:
            self.step((f'/instances/{compute}/{instance}', encode_record(compute, instance, state, **more)))

    def finish(self, compute: str, instance: str, state: str = 'gone', **more: Any) -> None:
        self.allocations.pop(instance, None)
        last = encode_record(compute, instance, state, **more)
        self.step((f'/hosts/{compute}/{instance}', None), (f'/instances/{compute}/{instance}', last, LEASE))

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
    tombstone = encode(instance=DOOMED, allocations={}, image=None, resources=SIZE, project_id='web')
    story.step((f'/hosts/{TWO}/{DOOMED}', tombstone))
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


# The history judge: a good history passes, and each violation is reported alone.


def list_violations(story: Story) -> list[str]:
    verdict = judge(story.build_history())
    return [*verdict.permanent, *verdict.pending]


def test_good_history_has_no_violation() -> None:
    assert list_violations(make_good_story()) == []
    assert list_violations(Story()) == []


def write(*keys: tuple[str, str | None] | tuple[str, str | None, int]) -> Callable[[Story], None]:
    return lambda story: story.step(*keys)


def write_record(compute: str, instance: str, state: str, *lease: int, **more: Any) -> Callable[[Story], None]:
    return write((f'/instances/{compute}/{instance}', encode_record(compute, instance, state, **more), *lease))


def replace_ask(number: int, **facts: Any) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        story.asks[number] = story.asks[number]._replace(**facts)

    return change


def deliver_to_silent_compute(story: Story, *, building: bool) -> None:
    story.deliver(ONE, OTHER, project_id='other')
    story.asks.append(ask_create(0, format_notice(ONE, OTHER)))
    if building:
        story.write_records(ONE, OTHER, 'building')


def deliver_unreported(story: Story, *asks: CommandRun) -> None:
    story.deliver(ONE, OTHER, project_id='other')
    story.write_records(ONE, OTHER, 'building', 'active')
    story.asks.extend(asks)


def deliver_twice(story: Story) -> None:
    story.deliver(ONE, OTHER, project_id='other')
    story.step((f'/hosts/{ONE}/{OTHER}', None), (f'/instances/{ONE}/{OTHER}', encode_record(ONE, OTHER, 'gone'), LEASE))
    story.deliver(ONE, OTHER, project_id='other')
    story.asks.append(ask_create(0, format_notice(ONE, OTHER)))
    story.finish(ONE, OTHER)


def request_on_two_computes(story: Story) -> None:
    story.step((f'/hosts/{TWO}/{ALIVE}', encode_request(TWO, ALIVE, name='web1')))
    story.step((f'/hosts/{TWO}/{ALIVE}', None))


def deliver_with_taken_name(story: Story) -> None:
    story.deliver(TWO, OTHER, project_id='other', name='web1')
    story.write_records(TWO, OTHER, 'building', name='web1')
    story.step(('/names/web1', encode(instance=ALIVE)))
    story.finish(TWO, OTHER, 'error', error={'reason': 'r'}, name='web1')


def leave_attempt(code: int | None) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        story.start_attempt(OTHER, pid=77)
        story.asks.append(ask_create(code, pid=77))

    return change


def claim(instance: str, *computes: str, **more: int) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        story.allocations[instance] = {compute: {**SIZE, **more} for compute in computes}

    return change


def release(instance: str) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        del story.allocations[instance]

    return change


def combine(*steps: Callable[[Story], None]) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        for step in steps:
            step(story)

    return change


CASES: list[tuple[Sequence[str], Callable[[Story], None]]] = [
    # Commands and their results
    (['was never delivered', 'is not begun at the end'],
     lambda story: story.asks.append(ask_create(0, format_notice(ONE, OTHER)))),
    (['was delivered to'], replace_ask(0, stdout=format_notice(TWO, ALIVE))),
    (['was delivered 2 times'], deliver_twice),
    (['none of them that it was there'], lambda story: story.asks.append(ask_create(0, format_notice(ONE, ALIVE)))),
    (['was refused and delivered'], replace_ask(1, code=3, stdout='')),
    (['of which nobody was told'], deliver_unreported),
    (['is not begun at the end'], lambda story: deliver_to_silent_compute(story, building=False)),
    (['is building at the end'], lambda story: deliver_to_silent_compute(story, building=True)),
    (['is active at the end'],
     lambda story: story.asks.append(ask_destroy(ALIVE, 'destroy accepted; it carries it out'))),
    (['is left by an eschedule that ended with {0}'], leave_attempt(0)),
    # Records
    (['gone, then active', 'is active after its destroy', 'not asked for it', 'instance without a request',
      'instance without an allocation', 'is active at the end'],
     write_record(TWO, DOOMED, 'active')),
    (['active, then building', 'is building at the end'], write_record(ONE, ALIVE, 'building', name='web1')),
    (
        ['active, then error'],
        combine(
            write_record(ONE, TAKEN, 'error', error={'reason': 'r'}),
            write(
                (f'/instances/{ONE}/{TAKEN}', encode_record(ONE, TAKEN, 'error', error={'reason': 'r'}), LEASE),
                (f'/hosts/{ONE}/{TAKEN}', None),
            ),
            write(('/quotas/web', encode(used={**{name: 2 * each for name, each in SIZE.items()}, 'instances': 2}))),
            release(TAKEN),
        ),
    ),
    (['nothing, then stopped'], combine(
        lambda story: story.deliver(ONE, OTHER, project_id='other'),
        lambda story: story.write_records(ONE, OTHER, 'stopped'), lambda story: story.asks.append(ask_create(None)))),
    (['is recorded below', 'is below', 'on a compute that is not asked', 'its record is of'],
     write((f'/instances/{ONE}/{TAKEN}', encode_record(TWO, TAKEN, 'active')))),
    (['is in error without a reason'], write_record(TWO, BROKEN, 'error', LEASE, error={})),
    (['its record went while it was active'], combine(
        write((f'/instances/{ONE}/{TAKEN}', None)), write_record(ONE, TAKEN, 'building'),
        write_record(ONE, TAKEN, 'active'))),
    (['its request went while it was active', 'was delivered 2 times'],
     combine(write((f'/hosts/{ONE}/{TAKEN}', None)), write((f'/hosts/{ONE}/{TAKEN}', encode_request(ONE, TAKEN))))),
    (['its request went, and no record says', 'is not begun at the end', 'allocation without an instance'],
     combine(lambda story: deliver_to_silent_compute(story, building=False), write((f'/hosts/{ONE}/{OTHER}', None)))),
    (['is asked for again after its destroy', 'request without an instance', 'held None'],
     write((f'/hosts/{TWO}/{DOOMED}', encode_request(TWO, DOOMED, project_id='other')))),
    # Places of an instance
    (['is requested of 2 computes at once', 'was delivered 2 times'], request_on_two_computes),
    (['waits in 1 queues, and is requested of 1'],
     combine(write((f'/queues/small/{TAKEN}', encode_queued(TAKEN))), write((f'/queues/small/{TAKEN}', None)))),
    (['waits in 2 queues', 'waits in 2 queues', 'quota web'],
     write((f'/queues/large/{QUEUED}', encode_queued(QUEUED)))),
    (['is on no lease', 'without a lease'], write((f'/requests/{OTHER}', encode(instances=[OTHER], pid=5)))),
    (['is being taken, and does not wait'], write((f'/queues/small/{OTHER}/taker', encode(compute=ONE), LEASE))),
    # Names, groups, quotas
    (['the name web1 is taken from it', 'the name web1 is taken from it', 'nobody was told'], deliver_with_taken_name),
    (['is delivered as web2, which is not its name'], combine(
        write((f'/hosts/{ONE}/{OTHER}', encode_request(ONE, OTHER, name='web2', project_id='other'))),
        claim(OTHER, ONE), write_record(ONE, OTHER, 'building'), write_record(ONE, OTHER, 'active'))),
    (['the name web1 is taken', 'there is no such name'], write(('/names/web1', None))),
    (['a name, and no living instance'], write(('/names/web9', encode(instance=DOOMED)))),
    (['group apart: has'], write(('/groups/apart', encode(policy='anti-affinity', strict=True, members={})))),
    (['quota web: counts'], write(('/quotas/web', encode(limits={}, used={'VCPU': 9})))),
    # Claims
    (['instance without an allocation', 'held None'], release(ALIVE)),
    (['held'], claim(ALIVE, ONE, VCPU=2)),
    (['allocation without an instance'], claim(DOOMED, TWO)),
    (['5 VCPU are claimed, and it has 4', 'held'], claim(ALIVE, ONE, VCPU=4)),
    (['/computes without a lease'], write((f'/computes/{ONE}', encode(hostname='h')))),
]  # fmt: skip


@pytest.mark.parametrize(('words', 'change'), CASES, ids=[f'{n} {words[0][:40]}' for n, (words, _) in enumerate(CASES)])
def test_violation_is_reported_alone(words: Sequence[str], change: Callable[[Story], None]) -> None:
    story = make_good_story()
    change(story)
    violations = list_violations(story)
    unmatched = list(violations)
    for phrase in words:
        matching = [line for line in unmatched if phrase in line]
        assert matching, (phrase, violations)
        unmatched.remove(matching[0])
    assert unmatched == [], violations


def test_refused_set_must_not_be_delivered() -> None:
    member = str(uuid.uuid5(uuid.UUID(REFUSED), '2'))
    story = make_good_story()
    story.deliver(ONE, member, project_id='other')
    story.write_records(ONE, member, 'building', 'active')
    story.asks.append(ask_create(3, '', '--count', '2', '--uuid', REFUSED))
    assert 'was refused and delivered' in ' '.join(list_violations(story))
    story.asks[-1] = ask_create(7, '', '--count=2', f'--uuid={REFUSED}')
    assert list_violations(story) == []


# The plugin of tests/run: forbidden skips, and its parts.


def run_pytest(directory: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    (directory / 'test_them.py').write_text(text)
    (directory / 'pytest.ini').write_text('[pytest]\nmarkers =\n    slow\n    fast\n    long\n')
    command = [sys.executable, '-m', 'pytest', '-p', 'tests.kit.plan', '-p', 'no:cacheprovider', *words]
    return subprocess.run(command, cwd=directory, env=make_environment(), capture_output=True, text=True, check=False)


@pytest.mark.long
def test_nothing_skipped_turns_skips_into_failures(tmp_path: Path) -> None:
    (tmp_path / 'test_gone.py').write_text('import pytest\npytest.importorskip("nothing_of_that_name")\n')
    text = """
import pytest

def test_one():
    pytest.skip('no root')

@pytest.mark.skip(reason='not here')
def test_two():
    pass
"""
    assert '3 skipped' in run_pytest(tmp_path, text).stdout
    refused = run_pytest(tmp_path, text, '--nothing-skipped', '--continue-on-collection-errors')
    assert refused.returncode == 1, refused.stdout
    # A mark and an importorskip of a module skip before the test runs, so they count as errors.
    assert '1 failed, 2 errors' in refused.stdout
    assert refused.stdout.count('skipped, where nothing may be') >= 3


def test_each_part_of_all_is_known_to_the_script_and_has_files() -> None:
    listed = re.search(r'^PARTS=\((.*)\)$', (TESTS / 'run').read_text(), re.MULTILINE)
    assert listed is not None
    assert listed[1].split() == [*FOLDERS, *PARTS]
    assert [file for files in PARTS.values() for file in files if not (TESTS / file).exists()] == []
    assert {path.parent.name for path in TESTS.glob('*/test_*.py')} == set(FOLDERS)
    assert find_part(TESTS / 'faults/test_soak.py') == 'kills'
    assert find_part(TESTS / 'faults/test_etcd.py') == 'faults'
