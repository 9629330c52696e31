"""Restarts: computes by signals and kill -9, etcd and placement under a running compute."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import guests
from tests.kit.invariants import check, everything
from tests.kit.servers import until
from tests.kit.story import (
    SMALL,
    addressed,
    at_once,
    boot,
    boot_all,
    known,
    log_of,
    logged,
    logs,
    notified,
    one_line,
    place,
    reached,
    record,
    reserved,
)
from tests.kit.tuned import tuned


def refused_start(compute: Ecompute) -> Result:
    """Launch an ecompute that must refuse to start; return its result, with its log as stderr."""
    compute.launch()
    assert compute._process is not None
    return Result(compute._process.wait(30), '', compute.log.read_text())


def complaint(result: Result) -> str:
    """Return the one line of stderr that ecompute prints beside its log."""
    assert 'Traceback' not in result.stderr, result
    lines = [line for line in result.stderr.splitlines() if line.startswith('ecompute: ')]
    assert len(lines) == 1, result
    return lines[0]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_the_host_and_the_next_start_opens_it(cluster: Control, compute: Ecompute, number: int) -> None:
    _, guest = place(cluster)
    _, destroyed = place(cluster)
    address = addressed(cluster, guest)
    addressed(cluster, destroyed)
    # In flight while it ends: delivered, and not seen yet.
    compute.pause()
    _, delivered = place(cluster)

    assert compute.stop(number) == 0

    assert reserved(cluster, compute.uuid) == 4
    assert f'/computes/{compute.uuid}' not in everything(cluster)
    refused = cluster.eschedule(SMALL)
    assert refused.stdout == 'NO ALLOCATIONS LEFT\n'
    assert refused.code == 3
    one_line(cluster.eschedule('destroy', destroyed), 0, 'destroy accepted', 'silent now')
    assert cluster.eschedule(guest).stdout == f'{address}\n'  # the guests keep running
    check(cluster)

    compute.start()

    assert reserved(cluster, compute.uuid) == 0
    reached(cluster, delivered, 'active')
    reached(cluster, destroyed, 'gone')
    guest_record = known(cluster, guest)
    assert guest_record['state'] == 'active'
    assert guest_record['addresses'][0]['address'] == address
    assert len(logs(compute, 'INSTANTIATE', guest)) == 1
    assert logs(compute, 'resource provider', compute.uuid, 'is there, with usages')
    place(cluster)


def test_killed_at_any_moment_nothing_is_lost_or_doubled(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:64,DISK_GB:64,MEMORY_MB:65536')
    instances: list[str] = []
    destroyed: list[str] = []
    for _ in range(3):
        results = at_once(cluster, [[SMALL]] * 3, width=3)
        placed = [notified(result)[1] for result in results]
        instances += placed[1:]
        destroyed += placed[:1]
        assert cluster.eschedule('destroy', placed[0]).code == 0
        # The compute is killed right after the requests, which are unseen, half done or done.
        compute.kill()
        _, unseen = place(cluster)
        instances.append(unseen)
        compute.start()
    for instance in instances:
        reached(cluster, instance, 'active')
    for instance in destroyed:
        reached(cluster, instance, 'gone')
    check(cluster, compute)
    log_of(compute)


def test_the_same_state_directory_twice(cluster: Control, tmp_path: Path) -> None:
    first = cluster.ecompute()
    state = str(first.directory / 'state')
    second = tuned(cluster, start=False, directory=tmp_path / 'second', state=state, uuid=first.uuid)
    refused = refused_start(second)
    assert refused.code == 5
    line = complaint(refused)
    assert state in line
    assert f'pid {first.pid}' in line
    place(cluster)  # the first is not disturbed
    check(cluster, first)


def test_the_same_uuid_in_another_state_directory(cluster: Control, tmp_path: Path) -> None:
    first = cluster.ecompute()
    holder = json.loads(everything(cluster)[f'/computes/{first.uuid}'].value)
    before = cluster.placement.inventory(first.uuid)
    inventory = 'VCPU:99,DISK_GB:1,MEMORY_MB:1'
    second = tuned(cluster, inventory, start=False, directory=tmp_path / 'second', uuid=first.uuid)
    refused = refused_start(second)
    assert refused.code == 5
    line = complaint(refused)
    for word in (first.uuid, holder['hostname'], holder['since'], 'uuid:'):
        assert word in line
    assert cluster.placement.inventory(first.uuid) == before
    place(cluster)
    check(cluster, first)
    # After the first has stopped in order, the second may use its uuid.
    first.stop()
    second.start()
    second.stop()


def test_placement_killed_and_back(own_control: Control) -> None:
    compute = own_control.ecompute()
    before = boot(own_control)
    # The request is claimed and delivered; placement is gone before the compute can confirm it.
    compute.pause()
    _, delivered = place(own_control)
    one_line(own_control.eschedule('destroy', before), 0, 'accepted')
    own_control.placement.kill()
    compute.resume()

    until(lambda: logged(compute, 'placement', 'trying again'), 20, 'the loss is logged')
    one_line(own_control.eschedule(SMALL), 7, 'placement', own_control.placement.url)
    assert own_control.etcd.keys('/requests/') == []
    # A lack of answers neither builds nor fails the instance.
    assert (record(own_control, delivered) or {}).get('state') in (None, 'scheduled')
    assert own_control.eschedule('list').code == 0
    own_control.placement.start()

    addressed(own_control, delivered)
    reached(own_control, before, 'gone')
    until(lambda: logged(compute, 'placement', 'is back'), 20, 'the return is logged')
    check(own_control, compute)
    ends = ['until it is back' in line for line in logged(compute, 'placement', 'is back')]
    assert ends == [True, False], log_of(compute)
    assert compute.stop() == 0


def test_stopping_while_the_control_plane_is_away(own_control: Control, compute: Ecompute) -> None:
    boot(own_control)
    own_control.etcd.kill()
    own_control.placement.kill()
    assert compute.stop() == 0
    assert logs(compute, 'could not reserve VCPU')
    own_control.etcd.start()
    own_control.placement.start()
    compute.start()


@pytest.mark.parametrize('away', ['etcd', 'placement'])
def test_a_start_without_a_backend(own_control: Control, away: str) -> None:
    backend = {'etcd': own_control.etcd, 'placement': own_control.placement}[away]
    address = {'etcd': own_control.etcd.endpoint, 'placement': own_control.placement.url}[away]
    backend.kill()
    compute = Ecompute(own_control.etcd.endpoint, own_control.placement.url, directory=own_control.directory / 'one')
    refused = refused_start(compute)
    assert refused.code == 7
    line = complaint(refused)
    assert away in line
    assert address in line
    assert 'cannot be reached' in line
    backend.start()
    assert own_control.etcd.keys('/computes/') == []
    providers = own_control.placement.call('GET', '/resource_providers')['resource_providers']
    assert providers == []
    # The command that failed works now.
    with compute:
        place(own_control)
        check(own_control, compute)


def test_who_loses_its_uuid_to_another_only_watches(cluster: Control, compute: Ecompute) -> None:
    boot(cluster)
    other_presence = json.dumps({'hostname': 'other', 'version': '1', 'since': 'now', 'token': 'theirs'})
    cluster.etcd.put(f'/computes/{compute.uuid}', other_presence, cluster.etcd.grant())
    until(lambda: logged(compute, 'on other since now', 'this one only watches'), 20, 'it notices')
    before = {key: value for key, value in everything(cluster).items() if key.startswith('/instances/')}
    _, unseen = place(cluster)
    assert compute.stop(signal.SIGINT) == 0
    after = {key: value for key, value in everything(cluster).items() if key.startswith('/instances/')}
    assert after == before, 'it wrote nothing more'
    assert json.loads(everything(cluster)[f'/computes/{compute.uuid}'].value)['token'] == 'theirs'
    assert reserved(cluster, compute.uuid) == 0, 'nor closed what is not its own any more'
    # The key of the other compute is gone: requests of that time are carried out.
    cluster.etcd.delete(f'/computes/{compute.uuid}')
    compute.start()
    addressed(cluster, unseen)


def test_a_compute_whose_state_directory_was_copied(cluster: Control, tmp_path: Path) -> None:
    """For example a cloned machine image: one of the two only watches."""
    original = cluster.ecompute()
    guest = boot(cluster)
    original.stop()
    directory = tmp_path / 'copy'
    shutil.copytree(original.directory / 'state', directory / 'state')
    original.start()
    copy = cluster.ecompute(directory=directory, uuid=original.uuid)
    until(lambda: logged(original, 'one state directory is a copy of the other', 'only watches'), 40, 'it notices')
    new_guests = boot_all(cluster, 3)
    assert guests(original).keys() == {guest}
    assert guests(copy).keys() == {guest, *new_guests}
    assert original.stop() == 0
    assert reserved(cluster, copy.uuid) == 0, 'it closes nothing that is the other one\'s'
    check(cluster, copy)
