"""Rules 10 and 13: after a restore of etcd, or of etcd and placement, no instance is built a second time."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable

import pytest

from tests.faults.etcds import SavedSnapshot, Snapshot, restore_placement, save_placement
from tests.faults.restored import ask, called, domains, queue, stopped
from tests.kit.commands import Control, Ecompute
from tests.kit.hands import accept, settled
from tests.kit.servers import Etcd, until
from tests.kit.story import logged, logs, notified, reached

STRANGE = 'is not the one this compute knew'
Kind = Callable[[Etcd], Snapshot]
NEW, BEFORE = 'never ran', 'off since before the backup'
HISTORIES = pytest.mark.parametrize(
    ('kind', 'history'),
    [
        (SavedSnapshot, NEW),
        (SavedSnapshot, BEFORE),
        pytest.param(Snapshot, NEW, marks=pytest.mark.slow),
        pytest.param(Snapshot, BEFORE, marks=pytest.mark.slow),
    ],
)


def other(control: Control, history: str) -> Callable[[], Ecompute]:
    """Return how a second compute is begun, which has stopped by now, or never ran."""
    if history == NEW:
        return lambda: control.ecompute(queues=True)
    second = stopped(control.ecompute(queues=True))

    def start_again() -> Ecompute:
        second.start()
        return second

    return start_again


def taken_and_restored(
    control: Control, kind: Kind, history: str
) -> tuple[str, Ecompute, Callable[[], Ecompute], Snapshot]:
    """An instance that runs on one compute, how another is begun, and the snapshot of etcd in which it waits."""
    first = stopped(control.ecompute(queues=True))
    begin_second = other(control, history)
    instance = queue(control)
    older = kind(control.etcd)
    first.start()
    reached(control, instance, 'active')
    assert domains(first) == {instance: 1}
    return instance, first, begin_second, older


@HISTORIES
@pytest.mark.history_broken('etcd is restored from an older copy')
def test_a_compute_without_history_takes_nothing_that_runs(own_control: Control, kind: Kind, history: str) -> None:
    """R1: U waits in the restored queue, and runs: another compute leaves it alone (fake)"""
    instance, first, begin_second, older = taken_and_restored(own_control, kind, history)
    older.restore()
    second = begin_second()
    words = ('left alone', first.uuid) if history == NEW else (instance, f'is claimed on compute {first.uuid}')
    logs(second, *words)
    until(lambda: logged(first, STRANGE), 30, 'the first compute sees what happened')
    until(lambda: own_control.etcd.keys(f'/computes/{first.uuid}') == [], 60, 'its lease ends')
    assert domains(first, second) == {instance: 1}
    why = own_control.eschedule('why', instance)
    assert f'claimed on {called(first)}, which is silent' in why.stdout, why
    for command in (['list', '-f', 'csv'], ['show', instance], ['wait', instance, '--timeout', '1']):
        said = own_control.eschedule(*command)
        assert f'claimed on {called(first)}' in said.stdout + said.stderr, said
    audited = own_control.eschedule('audit', '-f', 'json')
    assert audited.code == 8, audited
    assert [each['code'] for each in json.loads(audited.stdout)] == ['compute-silent'], audited
    accept(first)
    reached(own_control, instance, 'active')
    assert domains(first, second) == {instance: 1}
    assert own_control.etcd.get(f'/accepted/{first.uuid}')
    settled(own_control, first, second)


@pytest.mark.parametrize('waits', [False, True], ids=['at-once', 'silent'])
@pytest.mark.history_broken('etcd is restored from an older copy')
def test_the_same_command_places_nothing_that_runs(own_control: Control, waits: bool) -> None:
    """R2: the command with --uuid, asked again after the restore, says where the instance is claimed (fake)"""
    first, second = own_control.ecompute(), own_control.ecompute()
    stopped(second)
    older = SavedSnapshot(own_control.etcd)
    instance = str(uuid.uuid4())
    notified(ask(own_control, instance))
    reached(own_control, instance, 'active')
    older.restore()
    second.start()
    if waits:
        until(lambda: own_control.etcd.keys(f'/computes/{first.uuid}') == [], 60, 'the lease of the first ends')
    done = ask(own_control, instance)
    if waits:
        assert done.code == 5, done
        said = done.stderr
        order = ['silent and may be running it', 'wait', 'accept-new-etcd', 'another uuid', 'host forget']
        assert [said.find(each) for each in order] == sorted(said.find(each) for each in order), said
        assert min(said.find(each) for each in order) >= 0, said
        audited = own_control.eschedule('audit')
        assert audited.code == 8, audited
        refused = own_control.eschedule('host', 'forget', first.uuid)
        assert refused.code == 5, refused
        assert '--fenced' in refused.stderr, refused
    else:  # its presence is in the snapshot: it gets the request, and keeps it
        assert notified(done)[0] == first.uuid, done
    assert domains(first, second) == {instance: 1}
    accept(first)
    reached(own_control, instance, 'active')
    again = ask(own_control, instance)
    assert notified(again)[0] == first.uuid, again
    assert domains(first, second) == {instance: 1}
    settled(own_control, first, second)


@pytest.mark.history_broken('etcd and placement are restored from older copies')
def test_both_restored(own_control: Control) -> None:
    """Neither etcd nor placement knows that U was taken: a new compute waits for silent ones, restarted too (fake)"""
    first = stopped(own_control.ecompute(queues=True))
    instance = queue(own_control)
    save_placement(own_control)
    older = SavedSnapshot(own_control.etcd)
    first.start()
    reached(own_control, instance, 'active')
    older.restore()
    restore_placement(own_control)
    second = own_control.ecompute(queues=True)
    logs(second, 'left alone', first.uuid)
    second.restart()
    logs(second, 'left alone', first.uuid, number=2)
    assert domains(first, second) == {instance: 1}
    why = own_control.eschedule('why', instance)
    assert f'{called(first)} is silent' in why.stdout, why
    later = queue(own_control)  # who saw a request come takes it
    reached(own_control, later, 'active')
    accept(first)
    reached(own_control, instance, 'active')
    assert domains(first, second) == {instance: 1, later: 1}
    settled(own_control, first, second)


@pytest.mark.parametrize('kind', [SavedSnapshot, pytest.param(Snapshot, marks=pytest.mark.slow)])
@pytest.mark.parametrize('sees_claim', [True, False])
@pytest.mark.history_broken('etcd is restored from an older copy')
def test_destroyed_in_a_restored_queue(own_control: Control, kind: Kind, sees_claim: bool) -> None:
    """R3: what was destroyed as it waited in a restored queue does not live on when its compute is back (fake)"""
    first = own_control.ecompute(queues=True)
    assert own_control.eschedule('quota', 'set', 'q', 'instances=3').code == 0
    stopped(first)
    instance = queue(own_control, '--name', 'web', '--project', 'q')
    older = kind(own_control.etcd)
    first.start()
    reached(own_control, instance, 'active')
    stopped(first)
    older.restore()
    if not sees_claim:
        own_control.placement.stop()
    done = own_control.eschedule('destroy', instance)
    assert done.code == 0, done
    if sees_claim:
        assert 'holds a claim for it' in done.stderr, done
        assert 'when it is back: it is silent now' in done.stderr, done
    else:
        assert 'not known' in done.stderr, done
        own_control.placement.start()
    accept(first)
    reached(own_control, instance, 'gone')
    until(lambda: domains(first) == {}, 30, 'its guest is gone')
    assert json.loads(own_control.etcd.get('/quotas/q') or b'')['used'] == {}
    assert own_control.etcd.keys('/names/') == []
    settled(own_control, first)
