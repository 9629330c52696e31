"""`eschedule events`: the history that etcd keeps, and changes as they happen."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Sequence

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, read_revision
from tests.kit.servers import wait_until
from tests.kit.story import SMALL_QUERY, assert_one_line, boot, place


def strip_times(lines: str) -> list[str]:
    """Strip the times from lines of events."""
    return [line.split(maxsplit=1)[1] for line in lines.splitlines()]


def is_subsequence(lines: Sequence[str], *expected: str) -> bool:
    """True if the lines contain the expected ones in this order."""
    remaining = iter(lines)
    return all(line in remaining for line in expected)


def test_events_lists_the_history_in_order(cluster: Control, compute: Ecompute) -> None:
    placed = cluster.eschedule(SMALL_QUERY, '--name', 'web1', '--wait')
    assert placed.code == 0, placed
    instance = boot(cluster)
    assert cluster.eschedule('reboot', 'web1', '--wait').code == 0
    assert cluster.eschedule('wait', 'web1').code == 0  # for its address, which it gets after it is active
    assert cluster.eschedule('destroy', 'web1', '--wait').code == 0

    done = cluster.eschedule('events')
    assert done.code == 0, done
    assert_one_line(done, 0, 'printing all events')
    words = strip_times(done.stdout)
    of_web1 = [line.removeprefix('web1: ') for line in words if line.startswith('web1: ')]
    address = placed.stdout.splitlines()[-1]
    assert is_subsequence(
        of_web1, 'name taken', f'address {address} on default', 'reboot accepted', 'stopped', 'active',
        'boot 2: reboot', f'has its address {address} again', 'destroy accepted', 'destroying', 'gone',
        'name released',
    ), of_web1  # fmt: skip
    assert any(line.startswith('compute ') and ' came up, ecomp ' in line for line in words)

    alone = cluster.eschedule('events', instance, '-f', 'json')
    events = [json.loads(line) for line in alone.stdout.splitlines()]
    assert {event['instance'] for event in events} == {instance}
    assert [event['revision'] for event in events] == sorted(event['revision'] for event in events)
    assert events[0]['compute'] == compute.uuid
    fields = {'revision', 'time', 'not_before', 'not_after', 'kind', 'instance', 'name', 'compute', 'says'}
    assert all(set(event) == fields for event in events)
    nobody = str(uuid.uuid4())  # etcd's history includes earlier tests
    nothing = cluster.eschedule('events', nobody)
    assert (nothing.code, nothing.stdout) == (4, '')
    assert f'{nobody}: no event in the history that etcd keeps' in nothing.stderr


def test_events_watch_prints_changes_until_ctrl_c(cluster: Control, compute: Ecompute) -> None:
    before = boot(cluster)
    for form in ('table', 'json'):
        lines = cluster.eschedule('events', before, '-f', form).stdout.splitlines()
        last = cluster.eschedule('events', before, '-f', form, '-n', '2')
        assert_one_line(last, 0, 'printing the last 2 of all events')
        assert last.stdout.splitlines() == lines[-2:]
    with Eschedule(cluster, 'events', '--watch', '-n', '1') as watching:
        wait_until(lambda: watching.stdout, 20, 'the last change is told')
        compute.pause()
        _, new_instance = place(cluster)
        wait_until(
            lambda: f'{new_instance}: request accepted, for ' in watching.stdout, 20, 'it is told when it happens'
        )
        assert f'{new_instance}: active' not in watching.stdout
        compute.resume()
        wait_until(lambda: f'{new_instance}: active' in watching.stdout, 20, 'and what comes of it')
        watching.send_signal(signal.SIGINT)
        ended = watching.wait(20)
    assert_one_line(ended, 0, 'printing the last 1 of all events')


@pytest.mark.usefixtures('compute')
def test_events_after_compaction_name_the_first_kept_revision(own_control: Control) -> None:
    instance = boot(own_control)
    assert f'{instance}: active' in strip_times(own_control.eschedule('events', instance).stdout)
    compacted = read_revision(own_control)
    own_control.etcd.compact()
    assert own_control.eschedule('stop', '--wait', instance).code == 0
    done = own_control.eschedule('events', instance)
    assert_one_line(done, 0, f'printing the events since revision {compacted}; etcd keeps no older ones')
    words = strip_times(done.stdout)
    assert is_subsequence(words, f'{instance}: stop accepted', f'{instance}: stopped'), words
    assert f'{instance}: active' not in words
