"""Tools of the tests: the history judge, the filter for tracebacks in a host's log, and the start of a lab."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from ecomp.lab import machine
from tests.kit import lab as labs
from tests.kit.history import CommandRun, judge
from tests.kit.hypervisor import drop_stillborn_tracebacks
from tests.unit.good_history import (
    ALIVE,
    BROKEN,
    DOOMED,
    LEASE,
    ONE,
    OTHER,
    QUEUED,
    REFUSED,
    SIZE,
    TAKEN,
    TWO,
    Story,
    ask_create,
    ask_destroy,
    encode,
    encode_queued,
    encode_record,
    encode_request,
    format_notice,
    make_good_story,
)

# The history judge: a good history passes, and each violation is reported alone.


def list_violations(story: Story) -> list[str]:
    verdict = judge(story.build_history())
    return [*verdict.permanent, *verdict.pending]


def test_good_history_has_no_violation() -> None:
    assert list_violations(make_good_story()) == []
    assert list_violations(Story()) == []


def write(*keys: tuple[str, str | None] | tuple[str, str | None, int]) -> Callable[[Story], None]:
    return lambda story: story.step(*keys)


def replace_ask(number: int, **facts: Any) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        story.asks[number] = story.asks[number]._replace(**facts)

    return change


def deliver_to_silent_compute(story: Story, *, building: bool) -> None:
    """Deliver a request that is never carried out, or only begun."""
    story.deliver(ONE, OTHER, project_id='other')
    story.asks.append(ask_create(0, format_notice(ONE, OTHER)))
    if building:
        story.write_records(ONE, OTHER, 'building')


def deliver_unreported(story: Story, *asks: CommandRun) -> None:
    """Deliver a request that no command reported."""
    story.deliver(ONE, OTHER, project_id='other')
    story.write_records(ONE, OTHER, 'building', 'active')
    story.asks.extend(asks)


def deliver_twice(story: Story) -> None:
    story.deliver(ONE, OTHER, project_id='other')
    story.step((f'/hosts/{ONE}/{OTHER}', None), (f'/instances/{OTHER}', encode_record(ONE, OTHER, 'gone'), LEASE))
    story.deliver(ONE, OTHER, project_id='other')
    story.asks.append(ask_create(0, format_notice(ONE, OTHER)))
    story.finish(ONE, OTHER)


def request_on_two_computes(story: Story) -> None:
    story.step((f'/hosts/{TWO}/{ALIVE}', encode_request(TWO, ALIVE, name='web1')))
    story.step((f'/hosts/{TWO}/{ALIVE}', None))


def deliver_with_taken_name(story: Story) -> None:
    """Deliver a second instance with the name of another one."""
    story.deliver(TWO, OTHER, project_id='other', name='web1')
    story.write_records(TWO, OTHER, 'building', name='web1')
    story.step(('/names/web1', encode(instance=ALIVE)))
    story.finish(TWO, OTHER, 'error', error={'reason': 'r'}, name='web1')


def append_destroy(story: Story, answer: str) -> None:
    story.asks.append(ask_destroy(ALIVE, answer))


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
    (
        ['was never delivered', 'is not begun at the end'],
        lambda story: story.asks.append(ask_create(0, format_notice(ONE, OTHER))),
    ),
    (['was delivered to'], replace_ask(0, stdout=format_notice(TWO, ALIVE))),
    (['was delivered 2 times'], deliver_twice),
    (['none of them that it was there'], lambda story: story.asks.append(ask_create(0, format_notice(ONE, ALIVE)))),
    (['was refused and delivered'], replace_ask(1, code=3, stdout='')),
    (['of which nobody was told'], deliver_unreported),
    (['is not begun at the end'], lambda story: deliver_to_silent_compute(story, building=False)),
    (['is building at the end'], lambda story: deliver_to_silent_compute(story, building=True)),
    (['is active at the end'], lambda story: append_destroy(story, 'destroy accepted; it carries it out')),
    (['is left by an eschedule that ended with {0}'], leave_attempt(0)),
    # Records
    (
        [
            'gone, then active',
            'is active after its destroy',
            'not asked for it',
            'instance without a request',
            'instance without an allocation',
            'is active at the end',
        ],
        write((f'/instances/{DOOMED}', encode_record(TWO, DOOMED, 'active'))),
    ),
    (
        ['active, then building', 'is building at the end'],
        write((f'/instances/{ALIVE}', encode_record(ONE, ALIVE, 'building', name='web1'))),
    ),
    (
        ['active, then error'],
        combine(
            write((f'/instances/{TAKEN}', encode_record(ONE, TAKEN, 'error', error={'reason': 'r'}))),
            write(
                (f'/instances/{TAKEN}', encode_record(ONE, TAKEN, 'error', error={'reason': 'r'}), LEASE),
                (f'/hosts/{ONE}/{TAKEN}', None),
            ),
            write(('/quotas/web', encode(used={**{name: 2 * each for name, each in SIZE.items()}, 'instances': 2}))),
            release(TAKEN),
        ),
    ),
    (
        ['nothing, then stopped'],
        combine(
            lambda story: story.deliver(ONE, OTHER, project_id='other'),
            lambda story: story.write_records(ONE, OTHER, 'stopped'),
            lambda story: story.asks.append(ask_create(None)),
        ),
    ),
    (
        ['moves from compute', 'on a compute that is not asked', 'its record is of'],
        write((f'/instances/{TAKEN}', encode_record(TWO, TAKEN, 'active'))),
    ),
    (
        ['is in error without a reason'],
        write((f'/instances/{BROKEN}', encode_record(TWO, BROKEN, 'error', error={}), LEASE)),
    ),
    (
        ['its record went while it was active'],
        combine(
            write((f'/instances/{TAKEN}', None)),
            write((f'/instances/{TAKEN}', encode_record(ONE, TAKEN, 'building'))),
            write((f'/instances/{TAKEN}', encode_record(ONE, TAKEN, 'active'))),
        ),
    ),
    (
        ['its request went while it was active', 'was delivered 2 times'],
        combine(write((f'/hosts/{ONE}/{TAKEN}', None)), write((f'/hosts/{ONE}/{TAKEN}', encode_request(ONE, TAKEN)))),
    ),
    (
        ['its request went, and no record says', 'is not begun at the end', 'allocation without an instance'],
        combine(lambda story: deliver_to_silent_compute(story, building=False), write((f'/hosts/{ONE}/{OTHER}', None))),
    ),
    (
        ['is asked for again after its destroy', 'request without an instance', 'held None'],
        write((f'/hosts/{TWO}/{DOOMED}', encode_request(TWO, DOOMED, project_id='other'))),
    ),
    # Places of an instance
    (['is requested of 2 computes at once', 'was delivered 2 times'], request_on_two_computes),
    (
        ['waits in 1 queues, and is requested of 1'],
        combine(write((f'/queues/small/{TAKEN}', encode_queued(TAKEN))), write((f'/queues/small/{TAKEN}', None))),
    ),
    (
        ['waits in 2 queues', 'waits in 2 queues', 'quota web'],
        write((f'/queues/large/{QUEUED}', encode_queued(QUEUED))),
    ),
    (['is on no lease', 'without a lease'], write((f'/requests/{OTHER}', encode(instances=[OTHER], pid=5)))),
    (['is being taken, and does not wait'], write((f'/queues/small/{OTHER}/taker', encode(compute=ONE), LEASE))),
    # Names, groups, quotas
    (['the name web1 is taken from it', 'the name web1 is taken from it', 'nobody was told'], deliver_with_taken_name),
    (
        ['is delivered as web2, which is not its name'],
        combine(
            write((f'/hosts/{ONE}/{OTHER}', encode_request(ONE, OTHER, name='web2', project_id='other'))),
            claim(OTHER, ONE),
            write((f'/instances/{OTHER}', encode_record(ONE, OTHER, 'building'))),
            write((f'/instances/{OTHER}', encode_record(ONE, OTHER, 'active'))),
        ),
    ),
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
]


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


# No violation


def test_refused_set_must_not_be_delivered() -> None:
    member = str(uuid.uuid5(uuid.UUID(REFUSED), '2'))
    story = make_good_story()
    story.deliver(ONE, member, project_id='other')
    story.write_records(ONE, member, 'building', 'active')
    story.asks.append(ask_create(3, '', '--count', '2', '--uuid', REFUSED))
    assert 'was refused and delivered' in ' '.join(list_violations(story))
    story.asks[-1] = ask_create(7, '', '--count=2', f'--uuid={REFUSED}')
    assert list_violations(story) == []


# Tracebacks in a host's log: those of workers whose ecompute was killed as it started them are ignored.


STILLBORN = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 122, in spawn_main
{between}    exitcode = _main(fd, parent_sentinel)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^
EOFError: Ran out of input
"""
LOGGED = '2026-11-24T17:15:38.644+00:00 INFO 23140 compute ec74ac85, state in /x, ecomp 1.0.0\n'
FAILURE = """\
2026-11-24T17:15:38.556+00:00 ERROR 23140 unexpected error while planning; trying again
Traceback (most recent call last):
  File "planner.py", line 1, in step
KeyError: 'x'
"""


INCOMPLETE = STILLBORN.format(between=LOGGED).removesuffix('EOFError: Ran out of input\n')


@pytest.mark.parametrize(
    ('log', 'expected'),
    [
        (LOGGED + STILLBORN.format(between='') + LOGGED, LOGGED + LOGGED),
        (LOGGED + STILLBORN.format(between=LOGGED), LOGGED + LOGGED),  # the next ecompute's log lines are in between
        (FAILURE, FAILURE),
        # The whole log is kept.
        (FAILURE + STILLBORN.format(between=LOGGED), FAILURE + STILLBORN.format(between=LOGGED)),
        (INCOMPLETE, INCOMPLETE),  # kept until the traceback is complete
    ],
)
def test_only_tracebacks_of_stillborn_workers_are_removed(log: str, expected: str) -> None:
    assert drop_stillborn_tracebacks(log) == expected


# A lab that does not start


@pytest.mark.parametrize('failures', [1, 2])
def test_failed_start_of_a_lab_is_reported_and_repeated_once(
    failures: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    reason = 'the second host ended'

    def run_elab(lab: labs.Lab, command: str, *_: str) -> None:
        steps.append(command)
        if command == 'down':
            shutil.rmtree(lab.directory)
        assert command != 'up' or steps.count('up') > failures, reason

    monkeypatch.setattr(labs, 'LABS_ROOT', root)
    monkeypatch.setattr(labs.Lab, 'run_elab', run_elab)
    monkeypatch.setattr(machine, 'run', lambda _: '[]')
    end = pytest.raises(AssertionError, match=reason) if failures == 2 else nullcontext()
    with pytest.warns(UserWarning, match=f'lab one is started again, because: {reason}'), end:
        labs.Lab('one', 1, lambda _: steps.append('prepare'))
    assert steps == [*['prepare', 'up', 'down'] * failures, *['prepare', 'up'] * (2 - failures)]
