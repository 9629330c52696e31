"""Restarts: computes by signals and kill -9, etcd and placement under a running compute."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

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
    place,
    read_reserved,
    require_record,
    wait_address,
    wait_log_lines,
    wait_state,
)


def start_refused(compute: Ecompute) -> Result:
    compute.launch()
    assert compute._process is not None
    return Result(compute._process.wait(30), '', compute.log.read_text())


def read_error_line(result: Result) -> str:
    assert 'Traceback' not in result.stderr, result
    lines = [line for line in result.stderr.splitlines() if line.startswith('ecompute: ')]
    assert len(lines) == 1, result
    return lines[0]


def test_signal_closes_the_host_until_the_next_start(cluster: Control, compute: Ecompute) -> None:
    _, guest = place(cluster)
    _, destroyed = place(cluster)
    address = wait_address(cluster, guest)
    wait_address(cluster, destroyed)
    # In flight while it ends: delivered, and not seen yet.
    compute.pause()
    _, delivered = place(cluster)

    assert compute.stop(signal.SIGTERM) == 0

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


def test_stopping_while_the_control_plane_is_away(own_control: Control, compute: Ecompute) -> None:
    boot(own_control)
    own_control.etcd.kill()
    own_control.placement.kill()
    assert compute.stop() == 0
    assert wait_log_lines(compute, 'VCPU cannot be reserved')
    own_control.etcd.start()
    own_control.placement.start()
    compute.start()


def test_rebooted_host_starts_no_guest_before_it_has_read_its_requests(own_control: Control, compute: Ecompute) -> None:
    """Guests wait while etcd is away, and one that was destroyed is never started."""
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
