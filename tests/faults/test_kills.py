"""Each failpoint with each fault: the story of its process (kill_stories.py) converges.

Where a dead process's lease must expire, it is revoked, and the claim keeper's checks use a clock of the test.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from ecomp.failpoints import FAILPOINT_STATES
from tests.faults.kill_stories import (
    COMMAND_STORIES,
    COMPUTE_STORIES,
    LAST_FAILPOINTS,
    Scene,
    Work,
)
from tests.faults.table import HERE, OTHER_STORIES, STORY_FAILPOINTS, find_armed_failpoints
from tests.kit.audit import run_audit
from tests.kit.commands import Control, Ecompute, write_config
from tests.kit.gate import Gate
from tests.kit.hands import (
    Eschedule,
    check_claims_twice,
    expire_attempts,
    expire_key,
    read_guests,
    restart_unarmed,
    wait_killed_at,
)
from tests.kit.invariants import check_invariants, read_lasting_keys
from tests.kit.servers import SLOWDOWN_FACTOR, wait_until
from tests.kit.story import SMALL_QUERY, read_reserved, wait_state

Cases = Collection[tuple[str, str]]
# Of the other faults, which the model checker injects at every call, too, the usual run has these cases.
USUAL_COMMANDS = {('create', 'claimed')}
USUAL_FREEZES = {
    *USUAL_COMMANDS,
    ('set a quota', 'quota-counted'),
    ('apply', 'stack-claimed'),
    ('evacuate', 'evacuated'),
}
USUAL_WORK = {('build', 'disk-created'), ('take', 'taken')}


def choose_cases(stories: Iterable[str], usual: Cases | None = None, without: Cases = ()) -> pytest.MarkDecorator:
    """Return the parameters `story` and `step`. All cases but the `usual` ones are slow."""
    cases = [(story, step) for story in stories for step in STORY_FAILPOINTS[story] if (story, step) not in without]
    marked: list[Any] = [
        pytest.param(*case, marks=[] if usual is None or case in usual else [pytest.mark.slow]) for case in cases
    ]
    return pytest.mark.parametrize(('story', 'step'), marked)


@pytest.mark.fast
def test_every_failpoint_has_a_story() -> None:
    reached = {step for steps in STORY_FAILPOINTS.values() for step in steps}
    assert STORY_FAILPOINTS.keys() == {*COMMAND_STORIES, *COMPUTE_STORIES}
    assert reached | OTHER_STORIES.keys() == FAILPOINT_STATES.keys()
    for step, module in OTHER_STORIES.items():
        assert step in find_armed_failpoints(HERE / module), f'{module} does not arm {step}'


# eschedule


def complete(cluster: Control, scene: Scene) -> None:
    result = cluster.eschedule(*scene.words)
    assert result.code in scene.codes, result
    scene.check()
    check_invariants(cluster, *scene.living)


def release_orphans(cluster: Control, scene: Scene) -> None:
    expire_attempts(cluster)
    for compute in scene.living:
        check_claims_twice(cluster, compute, read_guests(compute))


@pytest.mark.parametrize('story', COMMAND_STORIES)
def test_command_killed_at_each_failpoint_in_turn(cluster: Control, story: str) -> None:
    """F1, F38, F39: kill -9 of eschedule at each failpoint in turn: then as requested (fake)."""
    scene = COMMAND_STORIES[story](cluster)
    for step in STORY_FAILPOINTS[story]:
        with scene.begin(cluster, 'kill', step) as eschedule:
            eschedule.assert_killed_at(step)
    complete(cluster, scene)


@choose_cases(COMMAND_STORIES, USUAL_COMMANDS)
def test_killed_command_is_completed_by_a_repeat(cluster: Control, story: str, step: str) -> None:
    """F1, F38, F39: kill -9 of eschedule at each failpoint: repeated, as requested (fake)."""
    scene = COMMAND_STORIES[story](cluster)
    with scene.begin(cluster, 'kill', step) as eschedule:
        eschedule.assert_killed_at(step)
    if not scene.leaves_a_finding:
        check_invariants(cluster, *scene.living, dead=[eschedule.pid])
    complete(cluster, scene)


@choose_cases(COMMAND_STORIES, USUAL_COMMANDS)
def test_nothing_is_left_of_a_killed_command(cluster: Control, story: str, step: str) -> None:
    """F1: kill -9 of eschedule at each failpoint: no claim once its lease expired (fake)."""
    scene = COMMAND_STORIES[story](cluster)
    with scene.begin(cluster, 'kill', step) as eschedule:
        eschedule.assert_killed_at(step)
    release_orphans(cluster, scene)
    if not scene.leaves_a_finding:
        check_invariants(cluster, *scene.living)
    complete(cluster, scene)


@choose_cases(COMMAND_STORIES, USUAL_FREEZES)
def test_frozen_command_is_no_finding_and_repeats_nothing(cluster: Control, story: str, step: str) -> None:
    """F1, F39: eschedule frozen at each failpoint: no finding, and both end as one (fake)."""
    scene = COMMAND_STORIES[story](cluster)
    with scene.begin(cluster, 'stop:1', step) as eschedule:
        eschedule.wait_frozen_at(step)
        assert scene.leaves_a_finding or run_audit(cluster) == []
        other = cluster.eschedule(*scene.words)
        assert other.code in {*scene.codes, 5}, other
        eschedule.resume()
        first = eschedule.wait()
        assert first.code in {*scene.codes, 5}, first
    assert min(first.code, other.code) == 0, (first, other)
    complete(cluster, scene)


@pytest.mark.parametrize('is_repeated', [False, True])
@choose_cases(COMMAND_STORIES, USUAL_COMMANDS)
def test_command_frozen_beyond_its_lease_changes_nothing_late(
    cluster: Control, story: str, step: str, is_repeated: bool
) -> None:
    """F1: eschedule frozen beyond its lease at each failpoint: as requested (fake)."""
    scene = COMMAND_STORIES[story](cluster)
    with scene.begin(cluster, 'stop:1', step) as eschedule:
        eschedule.wait_frozen_at(step)
        release_orphans(cluster, scene)
        if is_repeated:
            other = cluster.eschedule(*scene.words)
            assert other.code in scene.codes, other
        eschedule.resume()
        first = eschedule.wait()
        assert first.code in {*scene.codes, 1, 5}, first  # 1: the lease of an evacuation expired
    complete(cluster, scene)


@choose_cases(COMMAND_STORIES, USUAL_COMMANDS)
def test_interrupted_command_is_completed_by_a_repeat(cluster: Control, story: str, step: str) -> None:
    """F1: Ctrl-C of eschedule at each failpoint: it ends, and a repeat completes it (fake)."""
    scene = COMMAND_STORIES[story](cluster)
    with scene.begin(cluster, 'stop:1', step) as eschedule:
        eschedule.wait_frozen_at(step)
        eschedule.send_signal(signal.SIGINT)
        eschedule.resume()
        result = eschedule.wait()
        assert result.code in {*scene.codes, 1, 5, 6}, result
    assert cluster.etcd.list_keys('/requests/') == []
    complete(cluster, scene)


@choose_cases(COMMAND_STORIES, USUAL_COMMANDS, without=[(s, step) for s in COMMAND_STORIES for step in LAST_FAILPOINTS])
def test_command_that_loses_an_answer_is_completed(cluster: Control, story: str, step: str) -> None:
    """F15: the answer to eschedule's call after each failpoint is lost (fake)."""
    scene = COMMAND_STORIES[story](cluster)
    with Gate(cluster.etcd.port) as etcd, Gate(cluster.placement.port) as placement:
        config = write_config(cluster.directory / 'gates.yaml', f'127.0.0.1:{etcd.port}', placement.url)
        with scene.begin(cluster, 'stop:1', step, config=config) as eschedule:
            eschedule.wait_frozen_at(step)
            for gate in (etcd, placement):
                gate.hold(b'')
            eschedule.resume()
            wait_until(lambda: etcd.held.is_set() or placement.held.is_set(), 30, 'an answer is held')
            for gate in (etcd, placement):
                gate.break_connections()
            result = eschedule.wait()
            assert result.code in {*scene.codes, 5, 7}, result
    complete(cluster, scene)


@pytest.mark.slow
def test_claim_of_a_killed_eschedule_is_released(cluster: Control, compute: Ecompute, instance: str) -> None:
    """F1: kill -9 of eschedule with its claim: two checks after its lease, no claim (fake)."""
    with Eschedule(cluster, SMALL_QUERY, '--uuid', instance, failpoint='claimed:kill') as eschedule:
        eschedule.assert_killed_at('claimed')
    wait_until(lambda: not cluster.etcd.list_keys('/requests/'), 90, 'the lease of the dead eschedule ends')
    lapsed = time.monotonic()
    assert cluster.placement.read_allocations(instance)
    wait_until(lambda: not cluster.placement.read_allocations(instance), 260, 'its claim is released')
    assert time.monotonic() - lapsed >= 55, 'not before two looks'
    assert [key for key in read_lasting_keys(cluster) if instance in key] == []
    check_invariants(cluster, compute)


# ecompute


@pytest.mark.parametrize('story', COMPUTE_STORIES)
def test_compute_killed_at_each_failpoint_in_turn(cluster: Control, story: str) -> None:
    """F2, F38, F40: kill -9 of ecompute at each failpoint, with more work: done once (fake)."""
    steps = STORY_FAILPOINTS[story]
    work = COMPUTE_STORIES[story](cluster, len(steps))
    for step in steps:
        work.start('kill', step)
        wait_killed_at(work.compute, step)
    continue_work(cluster, work)


@pytest.mark.parametrize('story', COMPUTE_STORIES)
def test_compute_frozen_at_each_failpoint_in_turn(cluster: Control, story: str) -> None:
    """F5, F40: ecompute frozen beyond its lease at each failpoint: done once (fake)."""
    steps = set(STORY_FAILPOINTS[story])
    work = COMPUTE_STORIES[story](cluster, 1)
    work.start('stop:1', *steps)
    presence = f'/computes/{work.compute.uuid}'
    for number in range(1, len(steps) + 1):
        steps.remove(work.compute.wait_frozen(number))
        if cluster.etcd.get(presence) is not None:
            expire_key(cluster, presence)
        work.compute.resume()
    if story == 'end':
        wait_until(lambda: not work.compute.is_running, 30, 'it ends')
    continue_work(cluster, work)


def continue_work(cluster: Control, work: Work) -> None:
    if not work.compute.is_running:
        restart_unarmed(work.compute)
    work.check()
    check_invariants(cluster, work.compute)


@choose_cases([story for story in COMPUTE_STORIES if story != 'end'], USUAL_WORK)
def test_stopped_compute_continues_its_work(cluster: Control, story: str, step: str) -> None:
    """F36, F40: SIGTERM or SIGINT of ecompute at each failpoint: it continues later (fake)."""
    work = COMPUTE_STORIES[story](cluster, 1)
    work.start('stop:1', step)
    compute, steps = work.compute, STORY_FAILPOINTS[story]
    compute.wait_frozen_at(step)
    os.kill(compute.pid, (signal.SIGTERM, signal.SIGINT)[steps.index(step) % 2])  # pending until it is continued
    compute.resume()
    assert compute._process is not None
    assert compute._process.wait(SLOWDOWN_FACTOR * 20) == 0, compute.tail_log()
    if story != 'start':  # one that did not get ready has nothing to close
        assert cluster.etcd.get(f'/computes/{compute.uuid}') is None
        assert read_reserved(cluster, compute.uuid) == 12
    continue_work(cluster, work)


@choose_cases(['build', 'take'], USUAL_WORK)
def test_instance_destroyed_in_its_build_leaves_nothing(cluster: Control, story: str, step: str) -> None:
    """F26, F40: a destroy at each step of a build or a take: gone, nothing is left (fake)."""
    work = COMPUTE_STORIES[story](cluster, 1)
    work.compute.failpoint = f'{step}:stop:1'
    work.compute.start()
    instance = work.begin()
    work.compute.wait_frozen_at(step)
    assert cluster.eschedule('destroy', instance).code == 0
    work.compute.resume()
    wait_state(cluster, instance, 'gone')
    wait_until(lambda: read_guests(work.compute) == {}, 20, 'no guest is left')
    check_invariants(cluster, work.compute)
