"""Waiting: for a stage, for the end, not longer than asked, and with the reason when it is in vain."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from tests.commands import Control, Result
from tests.scenario.invariants import check
from tests.scenario.story import SMALL, addressed, notified, one_line, place, reached, record
from tests.servers import environment, until


@contextmanager
def waiting_for(control: Control, instance: str) -> Iterator[subprocess.Popen[str]]:
    """An eschedule that waits for a new instance, which has been delivered."""
    words = ['--config', str(control.schedule_yaml), '--uuid', instance, '--wait', SMALL]
    with subprocess.Popen(
        [sys.executable, '-m', 'ecomp.schedule', *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    ) as process:
        try:
            until(lambda: any(key.endswith(instance) for key in control.etcd.keys('/hosts/')), 20, 'it is delivered')
            yield process
        finally:
            process.kill()


def test_wait_for_each_stage(cluster: Control) -> None:
    compute = cluster.ecompute()
    for words, printed in ((['--wait'], True), (['--wait=addressed'], True), (['--wait=started'], None)):
        done = cluster.eschedule(*words, SMALL)
        first, *rest = done.stdout.splitlines()
        _, instance = notified(Result(done.code, f'{first}\n', done.stderr))
        assert done.stderr == ''  # the live line is for a terminal
        found = record(cluster, instance)
        assert found is not None
        assert found['state'] == 'active'
        # A fake has its address at once, so it may be there for `started`, too.
        assert rest == [addressed(cluster, instance)] or (printed is None and rest == [])
    check(cluster, compute)


def test_a_wait_ends_in_time_and_the_work_goes_on(cluster: Control) -> None:
    compute = cluster.ecompute()
    compute.pause()
    for seconds in ('0', '1'):
        done = cluster.eschedule('--wait', '--timeout', seconds, SMALL)
        _, instance = notified(Result(0, done.stdout, ''))
        line = one_line(done, 6, instance, f'{seconds} s are up', 'still waiting for', 'it goes on')
        assert 'did not answer' not in line
        one_line(cluster.eschedule(instance), 6, instance, 'no address yet', 'scheduled')
    in_vain = cluster.eschedule('destroy', '--wait', '--timeout', '0', instance)
    assert in_vain.code == 6
    accepted, late = in_vain.stderr.splitlines()
    assert 'destroy accepted' in accepted
    assert 'its compute to destroy it' in late
    compute.resume()
    reached(cluster, instance, 'gone')
    check(cluster, compute)


def test_an_interrupted_wait_stops_nothing(cluster: Control) -> None:
    compute = cluster.ecompute()
    compute.pause()
    instance = str(uuid.uuid4())
    with waiting_for(cluster, instance) as waiting:
        assert waiting.stdout is not None
        assert notified(Result(0, waiting.stdout.readline(), '')) == (compute.uuid, instance)
        waiting.send_signal(signal.SIGINT)
        out, err = waiting.communicate(timeout=30)
        one_line(Result(waiting.returncode, out, err), 1, 'interrupted')
    compute.resume()
    addressed(cluster, instance)
    check(cluster, compute)


def test_a_wait_of_nothing_for_what_is_done_already(cluster: Control) -> None:
    compute = cluster.ecompute()
    _, instance = place(cluster)
    address = addressed(cluster, instance)
    done = cluster.eschedule('--uuid', instance, '--wait', '--timeout', '0', SMALL)
    assert (done.code, done.stdout.splitlines()[1:]) == (0, [address])
    check(cluster, compute)


def test_waiting_for_what_fails(cluster: Control) -> None:
    compute = cluster.ecompute()
    compute.pause()
    instance = str(uuid.uuid4())
    with waiting_for(cluster, instance) as waiting:
        # Somebody takes its allocation away: it must not be built any more.
        cluster.placement.call('DELETE', f'/allocations/{instance}')
        compute.resume()
        out, err = waiting.communicate(timeout=30)
    reason = 'placement holds no allocation'
    one_line(Result(waiting.returncode, out, err), 1, instance, 'failed at stage scheduled', reason)
    failed = cluster.eschedule(instance)
    one_line(failed, 1, instance, 'failed at stage scheduled', reason)
    assert failed.stdout == ''
    shown = json.loads(cluster.eschedule('show', '-f', 'json', instance).stdout)
    assert (shown['state'], shown['error']['stage']) == ('error', 'scheduled')
    check(cluster, compute)


def test_waiting_for_what_is_destroyed(cluster: Control) -> None:
    compute = cluster.ecompute()
    compute.pause()
    instance = str(uuid.uuid4())
    with waiting_for(cluster, instance) as waiting:
        assert cluster.eschedule('destroy', instance).code == 0
        compute.resume()
        out, err = waiting.communicate(timeout=30)
    one_line(Result(waiting.returncode, out, err), 4, instance, 'destroyed while waiting')
    check(cluster, compute)
