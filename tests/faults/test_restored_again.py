"""Rules 10 and 13 after a restore: an attempt that fails, an etcd that restarts, a host that comes back."""

from __future__ import annotations

import json
import signal
import time
import uuid
from collections.abc import Callable

import pytest
import yaml

from ecomp.model.order import member
from tests.faults.etcds import SavedSnapshot, restore_placement, save_placement
from tests.faults.restored import QUERY, ask, domains, queue, stopped
from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import Eschedule, accept, guests
from tests.kit.servers import until
from tests.kit.story import IMAGE, logged, logs, notified, reached

BROKEN = pytest.mark.history_broken('etcd is restored from an older copy')
APART = ('--group', 'g', '--policy', 'anti-affinity')


def interrupt(control: Control, instance: str) -> Result:
    """Ask again and press Ctrl-C once it is claimed."""
    with Eschedule(control, QUERY, IMAGE, '--uuid', instance, failpoint='claimed:stop') as again:
        again.stopped_at('claimed')
        again.send(signal.SIGINT)
        again.go_on()
        return again.end()


def exceed_quota(control: Control, instance: str) -> Result:
    """Ask again, for a project whose restored quota has no room left."""
    done = ask(control, instance, '--project', 'q')
    assert done.code == 3, done
    assert control.eschedule('quota', 'set', 'q', 'instances=5').code == 0
    return done


@BROKEN
@pytest.mark.parametrize(('fail', 'words'), [(interrupt, ()), (exceed_quota, ('--project', 'q'))])
def test_a_failed_attempt_keeps_the_claim_of_a_guest_that_runs(
    own_control: Control, fail: Callable[[Control, str], Result], words: tuple[str, ...]
) -> None:
    """The presence of A is in the snapshot, so U is placed there again; undo leaves the claim (fake)"""
    first, second = own_control.ecompute(), own_control.ecompute()
    stopped(second)
    assert own_control.eschedule('quota', 'set', 'q', 'instances=1').code == 0
    ended, instance = str(uuid.uuid4()), str(uuid.uuid4())
    notified(ask(own_control, ended, '--project', 'q'))
    reached(own_control, ended, 'active')
    older = SavedSnapshot(own_control.etcd)
    assert own_control.eschedule('destroy', '--wait', ended).code == 0
    notified(ask(own_control, instance, *words))
    reached(own_control, instance, 'active')
    older.restore()
    fail(own_control, instance)
    assert own_control.placement.allocations(instance).keys() == {first.uuid}
    second.start()
    until(lambda: own_control.etcd.keys(f'/computes/{first.uuid}') == [], 90, 'the lease of the first ends')
    done = ask(own_control, instance, *words)
    assert done.code == 5, done
    assert domains(first, second)[instance] == 1


@BROKEN
def test_a_claim_that_was_taken_over_is_not_moved_for_its_group(own_control: Control) -> None:
    """Another member of an anti-affinity group comes to A before the delivery; U stays claimed on A (fake)"""
    first, second = own_control.ecompute(), own_control.ecompute()
    stopped(second)
    older = SavedSnapshot(own_control.etcd)
    instance, other = str(uuid.uuid4()), str(uuid.uuid4())
    notified(ask(own_control, instance, *APART))
    reached(own_control, instance, 'active')
    older.restore()
    second.start()
    with Eschedule(own_control, QUERY, IMAGE, '--uuid', instance, *APART, failpoint='claimed:stop:1') as again:
        again.stopped_at('claimed')
        assert own_control.eschedule('host', 'disable', second.uuid).code == 0
        ask(own_control, other, *APART)
        assert own_control.eschedule('host', 'enable', second.uuid).code == 0
        again.go_on()
        done = again.end()
    assert own_control.placement.allocations(instance).keys() == {first.uuid}, done
    assert domains(first, second)[instance] == 1


@BROKEN
def test_a_set_that_starts_again_on_another_compute_leaves_a_guest_that_runs_on_its_own(own_control: Control) -> None:
    """A member runs on A, which is filled before the other is claimed; the set does not move to B (fake)"""
    first, second = own_control.ecompute(), own_control.ecompute()
    stopped(second)
    older = SavedSnapshot(own_control.etcd)
    whole = str(uuid.uuid4())
    instance = member(whole, 1)
    notified(ask(own_control, instance))
    reached(own_control, instance, 'active')
    older.restore()
    second.start()
    words = (QUERY, IMAGE, '--uuid', whole, '--count', '2', '--group', 'g', '--policy', 'affinity')
    with Eschedule(own_control, *words, failpoint='claimed-some:stop:1') as again:
        again.stopped_at('claimed-some')
        assert own_control.eschedule('host', 'disable', second.uuid).code == 0
        notified(own_control.eschedule('resources=VCPU:3,DISK_GB:1,MEMORY_MB:16', IMAGE))
        assert own_control.eschedule('host', 'enable', second.uuid).code == 0
        again.go_on()
        done = again.end()
    assert done.code == 5, done
    assert own_control.placement.allocations(instance).keys() == {first.uuid}
    assert domains(first, second)[instance] == 1


@pytest.mark.slow
def test_a_restored_key_proves_nothing_however_often_etcd_restarts(own_control: Control) -> None:
    """Etcd and placement are restored; each restart of etcd gives the key of A its whole time again (fake)"""
    first = own_control.ecompute()
    instance = queue(own_control)
    save_placement(own_control)
    older = SavedSnapshot(own_control.etcd)
    options = yaml.safe_load(first.config.read_text())
    first.config.write_text(yaml.safe_dump({**options, 'queues': True}))
    first.restart()
    reached(own_control, instance, 'active')
    older.restore()
    restore_placement(own_control)
    second = own_control.ecompute(queues=True)
    logs(second, 'left alone', first.uuid)
    began, restarts = time.monotonic(), [25.0, 50.0]
    while (spent := time.monotonic() - began) < 75.0:
        if restarts and spent > restarts[0]:
            restarts.pop(0)
            own_control.etcd.restart()
        assert domains(first, second) == {instance: 1}, spent
        time.sleep(0.5)


def boot(compute: Ecompute) -> None:
    """Have the machine of a compute boot: its guests are off."""
    path = compute.directory / 'state/fake.json'
    path.write_text(json.dumps([{**each, 'running': False} for each in json.loads(path.read_text())]))
    (compute.directory / 'state/boot').write_text(f'{uuid.uuid4()}\n')


@pytest.mark.parametrize('is_started_first', [False, True], ids=['accepts', 'starts and accepts'])
def test_a_host_that_was_forgotten_and_comes_back_starts_nothing_that_runs_elsewhere(
    own_control: Control, is_started_first: bool
) -> None:
    """A was off and was forgotten with --fenced, B runs U; A boots and accepts the restored etcd (fake)"""
    first = stopped(own_control.ecompute(queues=True))
    instance = queue(own_control)
    older = SavedSnapshot(own_control.etcd)
    first.start()
    reached(own_control, instance, 'active')
    stopped(first)
    older.restore()
    until(lambda: own_control.etcd.keys(f'/computes/{first.uuid}') == [], 60, 'its lease ends')
    assert own_control.eschedule('host', 'forget', first.uuid, '--fenced').code == 0
    second = own_control.ecompute(queues=True)
    reached(own_control, instance, 'active')
    boot(first)
    if is_started_first:
        first.start()
        until(lambda: logged(first, 'unmanaged'), 30, 'the first keeps its guest')
        assert not guests(first)[instance]['running']
    accept(first)
    until(lambda: logged(first, f'claimed on compute {second.uuid}'), 30, 'the first leaves it alone')
    until(lambda: logged(first, 'unmanaged'), 30, 'the first says what it has')
    assert not guests(first)[instance]['running']
    assert guests(second)[instance]['running']
