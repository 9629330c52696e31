"""Restarts: computes by signals and kill -9, etcd and placement under a running compute."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute, Result
from tests.kit.hands import read_guests
from tests.kit.invariants import check_invariants, read_lasting_keys
from tests.kit.servers import wait_until
from tests.kit.sharing import kill_and_lapse
from tests.kit.story import (
    SMALL_QUERY,
    assert_one_line,
    boot,
    boot_all,
    find_log_lines,
    parse_notice,
    place,
    read_log,
    read_record,
    read_reserved,
    require_record,
    run_concurrently,
    wait_address,
    wait_log_lines,
    wait_state,
)
from tests.kit.tuned import make_tuned


def start_refused(compute: Ecompute) -> Result:
    """Launch an ecompute that must refuse to start; return its result, with its log as stderr."""
    compute.launch()
    assert compute._process is not None
    return Result(compute._process.wait(30), '', compute.log.read_text())


def read_error_line(result: Result) -> str:
    """Return the one line of stderr that ecompute prints beside its log."""
    assert 'Traceback' not in result.stderr, result
    lines = [line for line in result.stderr.splitlines() if line.startswith('ecompute: ')]
    assert len(lines) == 1, result
    return lines[0]


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
def test_signal_closes_the_host_until_the_next_start(cluster: Control, compute: Ecompute, number: int) -> None:
    _, guest = place(cluster)
    _, destroyed = place(cluster)
    address = wait_address(cluster, guest)
    wait_address(cluster, destroyed)
    # In flight while it ends: delivered, and not seen yet.
    compute.pause()
    _, delivered = place(cluster)

    assert compute.stop(number) == 0

    assert read_reserved(cluster, compute.uuid) == 4
    assert f'/computes/{compute.uuid}' not in read_lasting_keys(cluster)
    refused = cluster.eschedule(SMALL_QUERY)
    assert refused.stdout == 'NO ALLOCATIONS LEFT\n'
    assert refused.code == 3
    assert_one_line(
        cluster.eschedule('destroy', destroyed), 0, 'destroy accepted', 'once this compute is no longer silent'
    )
    assert cluster.eschedule(guest).stdout == f'{address}\n'  # the guests keep running
    check_invariants(cluster)

    compute.start()

    assert read_reserved(cluster, compute.uuid) == 0
    wait_state(cluster, delivered, 'active')
    wait_state(cluster, destroyed, 'gone')
    guest_record = require_record(cluster, guest)
    assert guest_record['state'] == 'active'
    assert guest_record['addresses'][0]['address'] == address
    assert len(wait_log_lines(compute, 'INSTANTIATE', guest)) == 1
    assert wait_log_lines(compute, 'resource provider', compute.uuid, 'exists, with usages')
    place(cluster)


def test_kills_at_any_moment_lose_and_double_nothing(cluster: Control) -> None:
    compute = cluster.ecompute('VCPU:64,DISK_GB:64,MEMORY_MB:65536')
    instances: list[str] = []
    destroyed: list[str] = []
    for _ in range(3):
        results = run_concurrently(cluster, [[SMALL_QUERY]] * 3, width=3)
        placed = [parse_notice(result)[1] for result in results]
        instances += placed[1:]
        destroyed += placed[:1]
        assert cluster.eschedule('destroy', placed[0]).code == 0
        # The compute is killed right after the requests, which are unseen, half done or done.
        compute.kill()
        _, unseen = place(cluster)
        instances.append(unseen)
        compute.start()
    for instance in instances:
        wait_state(cluster, instance, 'active')
    for instance in destroyed:
        wait_state(cluster, instance, 'gone')
    check_invariants(cluster, compute)
    read_log(compute)


def test_second_ecompute_in_one_state_directory_is_refused(cluster: Control, tmp_path: Path) -> None:
    first = cluster.ecompute()
    state = str(first.directory / 'state')
    second = make_tuned(cluster, start=False, directory=tmp_path / 'second', state=state, uuid=first.uuid)
    refused = start_refused(second)
    assert refused.code == 5
    line = read_error_line(refused)
    assert state in line
    assert f'pid {first.pid}' in line
    place(cluster)  # the first is not disturbed
    check_invariants(cluster, first)


def test_second_ecompute_with_one_uuid_is_refused(cluster: Control, tmp_path: Path) -> None:
    first = cluster.ecompute()
    holder = json.loads(read_lasting_keys(cluster)[f'/computes/{first.uuid}'].value)
    before = cluster.placement.read_inventory(first.uuid)
    inventory = 'VCPU:99,DISK_GB:1,MEMORY_MB:1'
    second = make_tuned(cluster, inventory, start=False, directory=tmp_path / 'second', uuid=first.uuid)
    refused = start_refused(second)
    assert refused.code == 5
    line = read_error_line(refused)
    for word in (first.uuid, holder['hostname'], holder['since'], 'uuid:'):
        assert word in line
    assert cluster.placement.read_inventory(first.uuid) == before
    place(cluster)
    check_invariants(cluster, first)
    # After the first has stopped in order, the second may use its uuid.
    first.stop()
    second.start()
    second.stop()


def test_compute_waits_for_a_killed_placement(own_control: Control) -> None:
    compute = own_control.ecompute()
    before = boot(own_control)
    # The request is claimed and delivered; placement is gone before the compute can confirm it.
    compute.pause()
    _, delivered = place(own_control)
    assert_one_line(own_control.eschedule('destroy', before), 0, 'accepted')
    own_control.placement.kill()
    compute.resume()

    wait_until(lambda: find_log_lines(compute, 'placement', 'trying again'), 20, 'the loss is logged')
    assert_one_line(own_control.eschedule(SMALL_QUERY), 7, 'placement', own_control.placement.url)
    assert own_control.etcd.list_keys('/requests/') == []
    # A lack of answers neither builds nor fails the instance.
    assert (read_record(own_control, delivered) or {}).get('state') in (None, 'scheduled')
    assert own_control.eschedule('list').code == 0
    own_control.placement.start()

    wait_address(own_control, delivered)
    wait_state(own_control, before, 'gone')
    wait_until(lambda: find_log_lines(compute, 'placement', 'is back'), 20, 'the return is logged')
    check_invariants(own_control, compute)
    ends = ['until it is back' in line for line in find_log_lines(compute, 'placement', 'is back')]
    assert ends == [True, False], read_log(compute)
    assert compute.stop() == 0


def test_stopping_while_the_control_plane_is_away(own_control: Control, compute: Ecompute) -> None:
    boot(own_control)
    own_control.etcd.kill()
    own_control.placement.kill()
    assert compute.stop() == 0
    assert wait_log_lines(compute, 'VCPU cannot be reserved')
    own_control.etcd.start()
    own_control.placement.start()
    compute.start()


@pytest.mark.parametrize('away', ['etcd', 'placement'])
def test_start_without_a_backend_is_refused(own_control: Control, away: str) -> None:
    backend = {'etcd': own_control.etcd, 'placement': own_control.placement}[away]
    address = {'etcd': own_control.etcd.endpoint, 'placement': own_control.placement.url}[away]
    backend.kill()
    compute = Ecompute(own_control.etcd.endpoint, own_control.placement.url, directory=own_control.directory / 'one')
    refused = start_refused(compute)
    assert refused.code == 7
    line = read_error_line(refused)
    assert away in line
    assert address in line
    assert 'cannot be reached' in line
    backend.start()
    assert own_control.etcd.list_keys('/computes/') == []
    providers = own_control.placement.call('GET', '/resource_providers')['resource_providers']
    assert providers == []
    # The command that failed works now.
    with compute:
        place(own_control)
        check_invariants(own_control, compute)


def test_rebooted_host_starts_no_guest_before_it_has_read_its_requests(own_control: Control, compute: Ecompute) -> None:
    """Check that guests wait while etcd is away, and that one that was destroyed is never started."""
    destroyed, kept = boot_all(own_control, 2)
    kill_and_lapse(own_control, compute)
    assert own_control.eschedule('destroy', destroyed).code == 0
    state = compute.directory / 'state'
    guests = [{**guest, 'running': False} for guest in read_guests(compute).values()]
    (state / 'fake.json').write_text(json.dumps(guests))
    (state / 'boot').write_text('an earlier boot\n')
    own_control.etcd.kill()
    refused = start_refused(compute)
    assert refused.code == 7
    assert all(word in read_error_line(refused) for word in ('etcd', 'no guest is started before it answers. Try: '))
    assert not any(guest['running'] for guest in read_guests(compute).values())
    own_control.etcd.start()
    compute.start()
    wait_until(lambda: read_guests(compute)[kept]['running'], 30, 'the guest that is kept runs')
    wait_state(own_control, destroyed, 'gone')
    assert find_log_lines(compute, f'START INSTANCE {destroyed}') == []
    check_invariants(own_control, compute)


def test_compute_that_loses_its_uuid_only_watches(cluster: Control, compute: Ecompute) -> None:
    boot(cluster)
    other_presence = json.dumps({'hostname': 'other', 'version': '1', 'since': 'now', 'token': 'theirs'})
    cluster.etcd.put(f'/computes/{compute.uuid}', other_presence, cluster.etcd.grant())
    wait_until(
        lambda: find_log_lines(compute, 'on other since now', 'this compute is read-only from now on'), 20, 'it notices'
    )
    before = {key: value for key, value in read_lasting_keys(cluster).items() if key.startswith('/instances/')}
    _, unseen = place(cluster)
    assert compute.stop(signal.SIGINT) == 0
    after = {key: value for key, value in read_lasting_keys(cluster).items() if key.startswith('/instances/')}
    assert after == before, 'it wrote nothing more'
    assert json.loads(read_lasting_keys(cluster)[f'/computes/{compute.uuid}'].value)['token'] == 'theirs'
    assert read_reserved(cluster, compute.uuid) == 0, 'nor closed what is not its own any more'
    # The key of the other compute is gone: requests of that time are carried out.
    cluster.etcd.delete(f'/computes/{compute.uuid}')
    compute.start()
    wait_address(cluster, unseen)


def test_copied_state_directory_doubles_nothing(cluster: Control, tmp_path: Path) -> None:
    """For example a cloned machine image: one of the two only watches."""
    original = cluster.ecompute()
    guest = boot(cluster)
    original.stop()
    directory = tmp_path / 'copy'
    shutil.copytree(original.directory / 'state', directory / 'state')
    original.start()
    copy = cluster.ecompute(directory=directory, uuid=original.uuid)
    wait_until(
        lambda: find_log_lines(
            original, 'one state directory is a copy of the other', 'this compute is read-only from now on'
        ),
        40,
        'it notices',
    )
    new_guests = boot_all(cluster, 3)
    assert read_guests(original).keys() == {guest}
    assert read_guests(copy).keys() == {guest, *new_guests}
    assert original.stop() == 0
    assert read_reserved(cluster, copy.uuid) == 0, "it closes nothing that is the other one's"
    check_invariants(cluster, copy)
