"""F5, F6, F36: ecompute frozen, killed, started twice, and asked to stop in the middle of something."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import BIG, Eschedule, guests, lapse, revision, settled, start_again
from tests.kit.invariants import everything
from tests.kit.process import is_stopped
from tests.kit.servers import PATIENCE, until
from tests.kit.story import SMALL, addressed, boot, known, log_of, logged, place, reached, reserved
from tests.kit.tuned import tuned

ENDS_WITHIN = 20.0


def said(compute: Ecompute) -> list[str]:
    """What an ecompute said on its way out, beside its log's lines."""
    lines = [line for line in log_of(compute) if not re.match(r'\d{4}-\d\d-\d\dT', line)]
    assert all(line.startswith('ecompute: ') for line in lines), lines
    return lines


@contextlib.contextmanager
def frozen(control: Control, compute: Ecompute, really: bool) -> Iterator[Callable[[], None]]:
    """An ecompute that is frozen, and what lets its lease end meanwhile: 61 s, or a word to etcd instead of them."""
    presence, began = f'/computes/{compute.uuid}', time.monotonic()

    def time_passes() -> None:
        if really:
            until(lambda: time.monotonic() - began > 61, 70, 'a minute has passed')
            assert control.etcd.get(presence) is None
        else:
            lapse(control, presence)

    compute.pause()
    yield time_passes
    assert is_stopped(compute.pid)
    compute.resume()


REALLY = pytest.mark.parametrize('really', [False, pytest.param(True, marks=pytest.mark.slow)])


@REALLY
def test_frozen_while_requests_arrive(cluster: Control, compute: Ecompute, really: bool) -> None:
    """F5: SIGSTOP of ecompute for longer than its lease, while creates and destroys arrive (fake)"""
    kept, doomed = place(cluster)[1], place(cluster)[1]
    before = addressed(cluster, kept)
    addressed(cluster, doomed)
    with frozen(cluster, compute, really) as time_passes:
        new, never = place(cluster)[1], place(cluster)[1]
        assert cluster.eschedule('destroy', doomed, never).code == 0
        time_passes()
        assert cluster.eschedule(SMALL).code == 3
    addressed(cluster, new)
    reached(cluster, doomed, 'gone')
    reached(cluster, never, 'gone')
    until(lambda: cluster.etcd.get(f'/computes/{compute.uuid}'), 20, 'it says again that it is alive')
    assert addressed(cluster, kept) == before
    assert guests(compute).keys() == {kept, new}


@REALLY
def test_frozen_while_another_takes_its_uuid(cluster: Control, tmp_path: Path, really: bool) -> None:
    """F5: SIGSTOP of ecompute until another one has its uuid: on CONT it writes nothing any more (fake)"""
    compute = cluster.ecompute()
    with frozen(cluster, compute, really) as time_passes:
        _, instance = place(cluster)
        time_passes()
        other = cluster.ecompute(directory=tmp_path / 'other', uuid=compute.uuid)
        addressed(cluster, instance)
        before = revision(cluster, f'/instances/{compute.uuid}/{instance}')
    until(lambda: logged(compute, 'this one only watches'), 20, 'it notices')
    assert revision(cluster, f'/instances/{compute.uuid}/{instance}') == before, 'the late one wrote'
    assert guests(compute) == {}
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    assert compute.stop() == 0
    assert reserved(cluster, compute.uuid) == 0, 'nor does it close what is not its own any more'
    settled(cluster, other)


CODES = {
    signal.SIGKILL: {-signal.SIGKILL},
    signal.SIGTERM: {0},
    signal.SIGINT: {0},
    # Until the daemon runs nobody has anything to say at a hang-up: that is as good as a kill.
    signal.SIGHUP: {0, -signal.SIGHUP},
}


@pytest.mark.slow
def test_a_storm_of_signals(cluster: Control) -> None:
    """F6: 20 times kill -9, SIGTERM, SIGHUP or SIGINT at a random moment, while creates and destroys arrive (fake)"""
    rng = random.Random(6)
    compute = cluster.ecompute(BIG)
    placed = [place(cluster)[1]]
    doomed: list[str] = []
    moment = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        for round_ in range(20):
            number = rng.choice(list(CODES))
            asked = thread.submit(cluster.eschedule, SMALL) if compute.is_ready() else None
            moment.wait(rng.uniform(0.0, 0.4))  # never set: the moment is the fault
            numbers = [number, *rng.choices([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], k=rng.randrange(3))]
            for each in numbers:
                compute._signal(each)
            until(lambda: not compute.is_running, 30, 'it ends')
            assert compute._process is not None
            assert compute._process.returncode in set().union(*(CODES[each] for each in numbers)), (round_, numbers)
            if asked is not None and (result := asked.result()).code == 0:
                placed.append(result.stdout.split()[-1])
            else:
                assert asked is None or asked.result().code == 3, asked.result()
            if rng.random() < 0.3 and len(placed) > 1:
                doomed.append(placed.pop())
                assert cluster.eschedule('destroy', doomed[-1]).code == 0
            if rng.random() < 0.5:
                compute.start()
            else:
                compute.launch()
                until(lambda: logged(compute, f' {compute.pid} compute '), 20, 'it has begun')
    if not compute.is_running:
        compute.launch()
    compute.wait_ready()
    assert len(placed) + len(doomed) > 4, 'some requests were to arrive meanwhile'
    for instance in placed:
        addressed(cluster, instance)
    for instance in doomed:
        reached(cluster, instance, 'gone')
    assert set(said(compute)) <= {'ecompute: stopped while starting'}
    settled(cluster, compute)


def refused(compute: Ecompute) -> str:
    """The one line of an ecompute that refused to start because somebody else is here."""
    assert compute._process is not None
    assert compute._process.wait(PATIENCE * 30) == 5, compute.last_words()
    (line,) = said(compute)
    return line


@pytest.mark.parametrize('shared', ['state directory', 'uuid'])
def test_two_started_at_the_same_moment(cluster: Control, tmp_path: Path, shared: str) -> None:
    """F6: two ecomputes of one state directory, or of one uuid, started at once: one works, one refuses (fake)"""
    state = {'state': str(tmp_path / 'state')} if shared == 'state directory' else {}
    first = tuned(cluster, start=False, directory=tmp_path / '1', **state)
    second = tuned(cluster, start=False, directory=tmp_path / '2', uuid=first.uuid, **state)
    for each in (first, second):
        each.launch()
    until(lambda: not (first.is_running and second.is_running), 30, 'one of them refuses')
    loser, winner = (first, second) if not first.is_running else (second, first)
    line = refused(loser)
    assert (str(tmp_path / 'state') if state else first.uuid) in line
    winner.wait_ready()
    assert json.loads(cluster.etcd.get(f'/computes/{first.uuid}') or b'{}')['token']
    instance = boot(cluster)
    # Again, now that it has work; and nothing of the living one is touched.
    before = everything(cluster), cluster.placement.inventory(first.uuid)
    loser.log.unlink()
    loser.launch()
    assert first.uuid in refused(loser) or state
    assert (everything(cluster), cluster.placement.inventory(first.uuid)) == before
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    settled(cluster, *([] if state else [winner]))


IN_WORK = ('building', 'disk-created', 'domain-started', 'destroying', 'released')
SIGNALS = itertools.cycle([signal.SIGINT, signal.SIGTERM])
ALTERNATELY = list(zip(IN_WORK, SIGNALS, strict=False))
OTHERWISE = [pytest.param(step, next(SIGNALS), marks=pytest.mark.slow) for step in IN_WORK]


@pytest.mark.parametrize(('step', 'number'), [*ALTERNATELY, *OTHERWISE])
def test_stopped_in_the_middle(cluster: Control, step: str, number: int) -> None:
    """F36: SIGINT or SIGTERM in a build or a destroy: it ends in time, closes the host, and goes on next time (fake)"""
    compute = tuned(cluster, failpoint=f'{step}:stop:1')
    with Eschedule(cluster, SMALL) as eschedule:
        instance = eschedule.end().stdout.split()[-1]
    destroyed = step in ('destroying', 'released')
    if destroyed:
        addressed(cluster, instance)
        assert cluster.eschedule('destroy', instance).code == 0
    compute.stopped_at(step)
    os.kill(compute.pid, number)  # it is there when the process goes on
    compute.resume()
    assert compute._process is not None
    assert compute._process.wait(PATIENCE * ENDS_WITHIN) == 0
    assert reserved(cluster, compute.uuid) == 4
    assert cluster.etcd.get(f'/computes/{compute.uuid}') is None
    assert said(compute) == []
    found = known(cluster, instance)
    assert found['state'] in (('destroying', 'gone') if destroyed else ('building', 'active'))
    start_again(compute)
    assert reserved(cluster, compute.uuid) == 0
    reached(cluster, instance, 'gone' if destroyed else 'active')
    settled(cluster, compute)
