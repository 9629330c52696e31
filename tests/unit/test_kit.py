"""Tools of the tests: the history judge, and the filter for tracebacks in a host's log."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.kit.ending import Kept
from tests.kit.history import Ask, judge
from tests.kit.hypervisor import without_stillborn
from tests.unit.good_history import (
    BROKEN,
    DOOMED,
    LEASE,
    LIVES,
    ONE,
    OTHER,
    QUERY,
    REFUSED,
    SIZE,
    TAKEN,
    TWO,
    WAITS,
    Story,
    create,
    destroy,
    good,
    notified,
    record,
    request,
    tombstone,
    value,
    waiting,
)

# The history judge: a good history passes, and each violation is reported alone.


def wrong(story: Story) -> list[str]:
    verdict = judge(story.history())
    return [*verdict.never, *verdict.still]


def test_a_good_history_passes() -> None:
    assert wrong(good()) == []
    assert wrong(Story()) == []


def put(*keys: tuple[str, str | None] | tuple[str, str | None, int]) -> Callable[[Story], None]:
    return lambda story: story.step(*keys)


def answered(number: int, **facts: Any) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        story.asks[number] = story.asks[number]._replace(**facts)

    return change


def silent(story: Story, *, building: bool) -> None:
    """Deliver a request that is never carried out, or only begun."""
    story.delivered(ONE, OTHER, project_id='other')
    story.asks.append(create(0, notified(ONE, OTHER)))
    if building:
        story.built(ONE, OTHER, 'building')


def untold(story: Story, *asks: Ask) -> None:
    """Deliver a request that no command reported."""
    story.delivered(ONE, OTHER, project_id='other')
    story.built(ONE, OTHER, 'building', 'active')
    story.asks.extend(asks)


def twice(story: Story) -> None:
    story.delivered(ONE, OTHER, project_id='other')
    story.step((f'/hosts/{ONE}/{OTHER}', None), (f'/instances/{OTHER}', record(ONE, OTHER, 'gone'), LEASE))
    story.delivered(ONE, OTHER, project_id='other')
    story.asks.append(create(0, notified(ONE, OTHER)))
    story.ended(ONE, OTHER)


def on_two(story: Story) -> None:
    story.step((f'/hosts/{TWO}/{LIVES}', request(TWO, LIVES, name='web1')))
    story.step((f'/hosts/{TWO}/{LIVES}', None))


def named(story: Story) -> None:
    """Deliver a second instance with the name of another one."""
    story.delivered(TWO, OTHER, project_id='other', name='web1')
    story.built(TWO, OTHER, 'building', name='web1')
    story.step(('/names/web1', value(instance=LIVES)))
    story.ended(TWO, OTHER, 'error', error={'reason': 'r'}, name='web1')


def destroyed(story: Story, said: str) -> None:
    story.asks.append(destroy(LIVES, said))


def leftover(code: int | None) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        story.announced(OTHER, pid=77)
        story.asks.append(create(code, pid=77))

    return change


def claimed(instance: str, *computes: str, **more: int) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        story.held[instance] = {compute: {**SIZE, **more} for compute in computes}

    return change


def released(instance: str) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        del story.held[instance]

    return change


def after(*steps: Callable[[Story], None]) -> Callable[[Story], None]:
    def change(story: Story) -> None:
        for step in steps:
            step(story)

    return change


WRONG: list[tuple[Sequence[str], Callable[[Story], None]]] = [
    # Commands and their results
    (['was never delivered', 'is not begun at the end'], lambda story: story.asks.append(
        create(0, notified(ONE, OTHER)))),
    (['was never delivered', 'is not begun at the end'], lambda story: story.asks.append(
        Ask(('--queue', '--flavor', 'small'), 0, f'QUEUED INSTANCE {OTHER}\n', ''))),
    (['was never delivered', 'is not begun at the end'], lambda story: story.asks.append(
        create(0, json.dumps([{'instance': OTHER, 'compute': ONE}]), '-f', 'json'))),
    (['was delivered to'], answered(0, stdout=notified(TWO, LIVES))),
    (['was delivered 2 times'], twice),
    (['none of them that it was there'], lambda story: story.asks.append(create(0, notified(ONE, LIVES)))),
    (['was refused and delivered'], answered(1, code=3, stdout='')),
    (['was refused and delivered'], answered(1, code=5, stdout='')),
    (['of which nobody was told'], untold),
    (['of which nobody was told'], lambda story: untold(story, create(3))),
    (['of which nobody was told'], lambda story: untold(story, Ask(('list',), 7, '', ''))),
    (['is not begun at the end'], lambda story: silent(story, building=False)),
    (['is building at the end'], lambda story: silent(story, building=True)),
    (['is active at the end'], lambda story: destroyed(story, 'destroy accepted, it carries it out')),
    (['is active at the end'], lambda story: destroyed(story, 'is being destroyed on x already')),
    (['is active at the end'], lambda story: destroyed(story, 'gone')),
    (['is left by an eschedule that ended with {0}'], leftover(0)),
    (['is left by an eschedule that ended with {3}'], leftover(3)),
    # Records
    (['gone, then active', 'is active after its destroy', 'not asked for it', 'instance without a request',
      'instance without an allocation', 'is active at the end'],
     put((f'/instances/{DOOMED}', record(TWO, DOOMED, 'active')))),
    (['gone, then building', 'is building after its destroy', 'not asked for it', 'instance without a request',
      'instance without an allocation', 'is building at the end', 'is building at the end'],
     put((f'/instances/{DOOMED}', None), (f'/instances/{DOOMED}', record(TWO, DOOMED, 'building')))),
    (['active, then building', 'is building at the end'],
     put((f'/instances/{LIVES}', record(ONE, LIVES, 'building', name='web1')))),
    (['active, then error'], after(
        put((f'/instances/{TAKEN}', record(ONE, TAKEN, 'error', error={'reason': 'r'}))),
        put((f'/instances/{TAKEN}', record(ONE, TAKEN, 'error', error={'reason': 'r'}), LEASE),
            (f'/hosts/{ONE}/{TAKEN}', None)),
        put(('/quotas/web', value(used={**{name: 2 * each for name, each in SIZE.items()}, 'instances': 2}))),
        released(TAKEN))),
    (['nothing, then stopped'], after(
        lambda story: story.delivered(ONE, OTHER, project_id='other'),
        lambda story: story.built(ONE, OTHER, 'stopped'), lambda story: story.asks.append(create(None)))),
    (['nothing, then active'], after(
        lambda story: story.delivered(ONE, OTHER, project_id='other'),
        lambda story: story.built(ONE, OTHER, 'active'), lambda story: story.asks.append(create(None)))),
    (['moves from compute', 'on a compute that is not asked', 'its record is of'],
     put((f'/instances/{TAKEN}', record(TWO, TAKEN, 'active')))),
    (['is in error without a reason'],
     put((f'/instances/{BROKEN}', record(TWO, BROKEN, 'error', error={}), LEASE))),
    (['its record went while it was active'], after(
        put((f'/instances/{TAKEN}', None)), put((f'/instances/{TAKEN}', record(ONE, TAKEN, 'building'))),
        put((f'/instances/{TAKEN}', record(ONE, TAKEN, 'active'))))),
    (['its request went while it was active', 'was delivered 2 times'], after(
        put((f'/hosts/{ONE}/{TAKEN}', None)), put((f'/hosts/{ONE}/{TAKEN}', request(ONE, TAKEN))))),
    (['its request went, and no record says', 'is not begun at the end', 'allocation without an instance'], after(
        lambda story: silent(story, building=False), put((f'/hosts/{ONE}/{OTHER}', None)))),
    (['is asked for again after its destroy', 'request without an instance', 'held None'],
     put((f'/hosts/{TWO}/{DOOMED}', request(TWO, DOOMED, project_id='other')))),
    # Places of an instance
    (['is requested of 2 computes at once', 'was delivered 2 times'], on_two),
    (['waits in 1 queues, and is requested of 1'], after(
        put((f'/queues/small/{TAKEN}', waiting(TAKEN))), put((f'/queues/small/{TAKEN}', None)))),
    (['waits in 2 queues', 'waits in 2 queues', 'quota web'],
     put((f'/queues/large/{WAITS}', waiting(WAITS)))),
    (['is on no lease', 'without a lease'], put((f'/requests/{OTHER}', value(instances=[OTHER], pid=5)))),
    (['is on no lease', 'without a lease'], put((f'/queues/small/{WAITS}/taker', value(compute=ONE)))),
    (['is being taken, and does not wait'], put((f'/queues/small/{OTHER}/taker', value(compute=ONE), LEASE))),
    # Names, groups, quotas
    (['the name web1 is taken from it', 'the name web1 is taken from it', 'nobody was told'], named),
    (['is delivered as web2, which is not its name'], after(
        put((f'/hosts/{ONE}/{OTHER}', request(ONE, OTHER, name='web2', project_id='other'))),
        claimed(OTHER, ONE),
        put((f'/instances/{OTHER}', record(ONE, OTHER, 'building'))),
        put((f'/instances/{OTHER}', record(ONE, OTHER, 'active'))))),
    (['the name web1 is taken', 'there is no such name'], put(('/names/web1', None))),
    (['a name, and no living instance'], put(('/names/web9', value(instance=DOOMED)))),
    (['group apart: has'], put(('/groups/apart', value(policy='anti-affinity', strict=True, members={})))),
    (['quota web: counts'], put(('/quotas/web', value(limits={}, used={'VCPU': 9})))),
    # Claims
    (['instance without an allocation', 'held None'], released(LIVES)),
    (['held'], claimed(LIVES, ONE, VCPU=2)),
    (['held'], claimed(LIVES, TWO)),
    (['held'], claimed(LIVES, ONE, TWO)),
    (['allocation without an instance'], claimed(DOOMED, TWO)),
    (['allocation without an instance'], claimed(WAITS, TWO)),
    (['5 VCPU are claimed, and it has 4', 'held'], claimed(LIVES, ONE, VCPU=4)),
    (['/computes without a lease'], put((f'/computes/{ONE}', value(hostname='h')))),
]


@pytest.mark.parametrize(('words', 'change'), WRONG, ids=[f'{n} {words[0][:40]}' for n, (words, _) in enumerate(WRONG)])
def test_what_is_wrong_is_found_and_it_alone(words: Sequence[str], change: Callable[[Story], None]) -> None:
    story = good()
    change(story)
    violations = wrong(story)
    unmatched = list(violations)
    for phrase in words:
        matching = [line for line in unmatched if phrase in line]
        assert matching, (phrase, violations)
        unmatched.remove(matching[0])
    assert unmatched == [], violations


# No violation


def test_whose_answer_was_lost_may_have_been_delivered() -> None:
    for code in (None, -9, 7, 1):
        story = good()
        untold(story, create(code))
        assert wrong(story) == []


def test_a_set_that_was_refused_is_told_from_one_that_was_placed() -> None:
    member = str(uuid.uuid5(uuid.UUID(REFUSED), '2'))
    story = good()
    story.delivered(ONE, member, project_id='other')
    story.built(ONE, member, 'building', 'active')
    story.asks.append(create(3, '', '--count', '2', '--uuid', REFUSED))
    assert 'was refused and delivered' in ' '.join(wrong(story))
    story.asks[-1] = create(7, '', '--count=2', f'--uuid={REFUSED}')
    assert wrong(story) == []


def test_what_a_compute_that_is_away_has_waits() -> None:
    for building in (False, True):
        story = good()
        silent(story, building=building)
        story.more['away'] = {ONE}
        assert wrong(story) == []
    story.step((f'/hosts/{ONE}/{OTHER}', tombstone(OTHER, project='other')))
    story.asks.append(destroy(OTHER))
    story.built(ONE, OTHER, 'destroying')
    story.held.pop(OTHER)
    assert wrong(story) == []


def test_what_was_there_before_may_be_told_again_and_destroyed() -> None:
    again = Ask(
        (QUERY,), 0, notified(ONE, LIVES), f'eschedule: {LIVES} was requested before: nothing is changed\n'
    )
    story = Story([again, again, destroy(LIVES)])
    keys = (
        (f'/hosts/{ONE}/{LIVES}', request(ONE, LIVES)),
        (f'/instances/{LIVES}', record(ONE, LIVES, 'active')),
    )
    story.more['before'] = {key: Kept(text.encode(), 0) for key, text in keys}
    story.held[LIVES] = {ONE: SIZE}
    assert ['is active at the end' in line for line in wrong(story)] == [True]
    story.step((f'/hosts/{ONE}/{LIVES}', tombstone(LIVES)))
    story.built(ONE, LIVES, 'destroying')
    story.ended(ONE, LIVES)
    assert wrong(story) == []


def test_one_that_failed_may_be_removed_and_its_uuid_used_again() -> None:
    story = good()
    story.step((f'/instances/{BROKEN}', None))
    story.asks.append(destroy(BROKEN, 'its record is removed; nothing else was left of it'))
    story.delivered(ONE, BROKEN, project_id='other')
    story.built(ONE, BROKEN, 'building', 'active')
    story.asks.append(create(0, notified(ONE, BROKEN), '--uuid', BROKEN))
    assert [line for line in wrong(story) if 'is active at the end' not in line] == []


def test_what_is_there_before_it_is_asked_for_may_be_stopped() -> None:
    story = good()
    story.delivered(ONE, OTHER, project_id='other')
    story.built(ONE, OTHER, 'stopped', fault='its disk is there')
    story.asks.append(create(None))
    assert not [line for line in wrong(story) if 'then' in line]


def test_a_full_etcd_keeps_no_record_of_an_end() -> None:
    story = good()
    story.step((f'/hosts/{ONE}/{TAKEN}', tombstone(TAKEN)))
    story.asks.append(destroy(TAKEN))
    story.step((f'/instances/{TAKEN}', None), (f'/hosts/{ONE}/{TAKEN}', None))
    del story.held[TAKEN]
    assert ['quota web' in line for line in wrong(story)] == [True]


def test_of_what_was_written_by_hand_nothing_is_said() -> None:
    story = good()
    story.step((f'/hosts/{ONE}/{OTHER}', '{"allocations": 5'))
    story.step((f'/instances/{OTHER}', '[]'), ('/names/theirs', '7'), ('/requests/' + OTHER, 'x'))
    story.held[OTHER] = {ONE: {'VCPU': 90}}
    story.more['by_hand'] = {OTHER, 'theirs'}
    assert wrong(story) == []


def test_an_ask_knows_what_it_asked_for() -> None:
    assert create(0).is_create
    assert Ask(('--wait', 'http://i/x', '--flavor', 's'), 0, '', '').is_create
    assert not Ask(('plan', QUERY), 0, '', '').is_create
    assert not Ask(('flavor', 'set', 'small', QUERY), 0, '', '').is_create
    assert not Ask(('destroy', LIVES), 0, '', '').is_create
    assert create(0, '', '--uuid', LIVES.upper()).asked == {LIVES}
    assert create(0, '', '--uuid', 'junk').asked == set()


# Tracebacks in a host's log: those of workers whose ecompute was killed as it started them are ignored.


STILLBORN = """\
Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/usr/lib/python3.11/multiprocessing/spawn.py", line 122, in spawn_main
{between}    exitcode = _main(fd, parent_sentinel)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^
EOFError: Ran out of input
"""
LINE = '2026-11-24T17:15:38.644+00:00 INFO 23140 compute ec74ac85, state in /x, ecomp 1.0.0\n'
REAL = """\
2026-11-24T17:15:38.556+00:00 ERROR 23140 unexpected error while planning; trying again
Traceback (most recent call last):
  File "planner.py", line 1, in step
KeyError: 'x'
"""


HALF = STILLBORN.format(between=LINE).removesuffix('EOFError: Ran out of input\n')


@pytest.mark.parametrize(
    ('log', 'left'),
    [
        (LINE + STILLBORN.format(between='') + LINE, LINE + LINE),
        (LINE + STILLBORN.format(between=LINE), LINE + LINE),  # the next ecompute's log lines are in between
        (REAL, REAL),
        # The whole log is kept.
        (REAL + STILLBORN.format(between=LINE), REAL + STILLBORN.format(between=LINE)),
        (HALF, HALF),  # kept until the traceback is complete
    ],
)
def test_a_workers_whose_ecompute_was_killed_as_it_started_it_is_left_out_and_no_other(log: str, left: str) -> None:
    assert without_stillborn(log) == left
