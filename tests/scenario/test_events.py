"""`eschedule events`: the history that etcd keeps, and changes as they happen."""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Sequence

import pytest

from ecomp.conf import EtcdConfig
from ecomp.store.history import History
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import Eschedule, revision
from tests.kit.servers import Etcd, until
from tests.kit.story import SMALL, boot, one_line, place


def told(lines: str) -> list[str]:
    """Strip the times from lines of events."""
    return [line.split(maxsplit=1)[1] for line in lines.splitlines()]


def in_order(found: Sequence[str], *wanted: str) -> bool:
    """True if the lines contain the expected ones in this order."""
    remaining = iter(found)
    return all(line in remaining for line in wanted)


def test_what_happened_is_told_in_its_order(cluster: Control, compute: Ecompute) -> None:
    placed = cluster.eschedule(SMALL, '--name', 'web1', '--wait')
    assert placed.code == 0, placed
    instance = boot(cluster)
    assert cluster.eschedule('reboot', 'web1', '--wait').code == 0
    assert cluster.eschedule('wait', 'web1').code == 0  # for its address, which it gets after it is active
    assert cluster.eschedule('destroy', 'web1', '--wait').code == 0

    done = cluster.eschedule('events')
    assert done.code == 0, done
    one_line(done, 0, 'all that ever happened')
    words = told(done.stdout)
    of_web1 = [line.removeprefix('web1: ') for line in words if line.startswith('web1: ')]
    address = placed.stdout.splitlines()[-1]
    assert in_order(
        of_web1, 'is called so now', f'address {address} on default', 'reboot accepted', 'stopped', 'active',
        'boot 2: reboot', f'has its address {address} again', 'destroy accepted', 'destroying', 'gone',
        'gave its name back',
    ), of_web1  # fmt: skip
    assert any(line.startswith('compute ') and ' came up, ecomp ' in line for line in words)

    alone = cluster.eschedule('events', instance, '-f', 'json')
    events = [json.loads(line) for line in alone.stdout.splitlines()]
    assert {event['instance'] for event in events} == {instance}
    assert [event['revision'] for event in events] == sorted(event['revision'] for event in events)
    assert events[0]['compute'] == compute.uuid
    assert all(set(event) == {'revision', 'time', 'kind', 'instance', 'name', 'compute', 'says'} for event in events)
    nobody = str(uuid.uuid4())  # etcd's history includes earlier tests
    nothing = cluster.eschedule('events', nobody)
    assert (nothing.code, nothing.stdout) == (4, '')
    assert f'{nobody}: nothing of it is in what etcd keeps' in nothing.stderr


def test_what_happens_is_told_until_ctrl_c(cluster: Control, compute: Ecompute) -> None:
    before = boot(cluster)
    with Eschedule(cluster, 'events', '--watch') as watching:
        until(lambda: f'{before}: active' in watching.stdout, 20, 'what happened before is told')
        compute.pause()
        _, new_instance = place(cluster)
        until(lambda: f'{new_instance}: request accepted, for ' in watching.stdout, 20, 'it is told when it happens')
        assert f'{new_instance}: active' not in watching.stdout
        compute.resume()
        until(lambda: f'{new_instance}: active' in watching.stdout, 20, 'and what comes of it')
        watching.send(signal.SIGINT)
        ended = watching.end(20)
    one_line(ended, 0, 'all that ever happened')


@pytest.mark.usefixtures('compute')
def test_the_last_changes_alone(cluster: Control) -> None:
    instance = boot(cluster)
    for form in ('table', 'json'):
        lines = cluster.eschedule('events', instance, '-f', form).stdout.splitlines()
        last = cluster.eschedule('events', instance, '-f', form, '-n', '2')
        one_line(last, 0, 'the last 2 of all that ever happened')
        assert last.stdout.splitlines() == lines[-2:]
        assert cluster.eschedule('events', '-f', form, '-n', '0').stdout == ''
    with Eschedule(cluster, 'events', instance, '-n', '1', '--watch') as watching:
        until(lambda: watching.stdout, 20, 'the last change')
        assert cluster.eschedule('stop', '--wait', instance).code == 0
        until(lambda: f'{instance}: stopped' in watching.stdout, 20, 'what happens')
        watching.send(signal.SIGINT)
        ended = watching.end(20)
    one_line(ended, 0, 'all that ever happened')
    after = cluster.eschedule('events', instance).stdout.splitlines()
    assert told(ended.stdout) == told('\n'.join(after[-len(ended.stdout.splitlines()) :]))


@pytest.mark.usefixtures('compute')
def test_what_etcd_compacted_is_said_and_what_it_keeps_is_told(own_control: Control) -> None:
    instance = boot(own_control)
    assert f'{instance}: active' in told(own_control.eschedule('events', instance).stdout)
    compacted = revision(own_control)
    own_control.etcd.compact()
    assert own_control.eschedule('stop', '--wait', instance).code == 0
    done = own_control.eschedule('events', instance)
    one_line(done, 0, f'what happened since revision {compacted}; etcd keeps no more')
    words = told(done.stdout)
    assert in_order(words, f'{instance}: stop accepted', f'{instance}: stopped'), words
    assert f'{instance}: active' not in words


def test_an_etcd_that_is_away_is_said_and_heard_again(own_etcd: Etcd) -> None:
    messages: list[str] = []
    history = History(EtcdConfig((own_etcd.endpoint,), timeout=1.0), True, messages.append)
    own_etcd.put('/names/a', '1')
    changes_by_revision = iter(history)
    try:
        assert [change.key for change in next(changes_by_revision)] == ['/names/a']
        own_etcd.kill()
        own_etcd.start()
        own_etcd.put('/names/b', '1')
        own_etcd.put('/names/a', '2')
        changes = [change for _ in range(2) for change in next(changes_by_revision)]
        assert [(change.key, change.before, change.after) for change in changes] == [
            ('/names/b', None, b'1'),
            ('/names/a', b'1', b'2'),
        ]
        assert not history.is_past
    finally:
        changes_by_revision.close()  # type: ignore[attr-defined]
        history.close()
    assert history.since == 1


def test_another_s_keys_do_not_hold_up_the_end(own_etcd: Etcd) -> None:
    """The last revision belongs to a foreign key, so etcd's progress report ends the history."""
    own_etcd.put('/names/a', '1')
    own_etcd.put('somebody-else', '1')
    history = History(EtcdConfig((own_etcd.endpoint,)), False, print)
    try:
        assert [change.key for changes in history for change in changes] == ['/names/a']
    finally:
        history.close()
