"""ecompute killed, frozen or signalled at every step."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kit.commands import Control, Ecompute
from tests.kit.hands import (
    check_settled,
    expire_key,
    mark_slow_steps,
    read_guests,
    read_revision,
    restart_unarmed,
    wait_killed_at,
)
from tests.kit.hypervisor import Hypervisor
from tests.kit.invariants import read_lasting_keys
from tests.kit.process import is_stopped
from tests.kit.servers import SLOWDOWN_FACTOR, wait_until
from tests.kit.story import (
    boot,
    find_log_lines,
    place,
    read_log,
    read_reserved,
    wait_address,
    wait_state,
)
from tests.kit.tuned import make_tuned

# F2: ecompute killed at every step of a build, a destroy, its start and its end; the next start continues.


DESTROY_FAILPOINTS = (
    *('destroying', 'domain-undefined', 'disk-deleted', 'removed', 'forgotten', 'unreserved', 'released', 'ended'),
)


def test_killed_between_end_in_etcd_and_in_state_directory(cluster: Control) -> None:
    """F2: kill -9 between the ends in etcd and on disk: the next start frees the address (fake)."""
    # Between the two checks for a vanished guest.
    intervals = {'host.claims.CONFIRMATION_SECONDS': 0.5, 'planner.CONFIRMATION_SECONDS': 0.5}
    armed = make_tuned(cluster, numbers=intervals)
    instance = boot(cluster)
    armed.kill()
    (armed.directory / 'state/fake.json').write_text('[]')
    armed.failpoint = 'ended:kill'
    armed.launch()  # it may end before it is ready
    wait_killed_at(armed, 'ended')
    restart_unarmed(armed)
    assert wait_state(cluster, instance, 'gone')
    state = armed.directory / 'state'
    assert json.loads((state / 'fake-reserved.json').read_text()) == {}
    assert 'ended' in json.loads((state / f'instances/{instance}.json').read_text())
    check_settled(cluster, armed)


@pytest.mark.slow
def test_killed_after_it_added_the_metadata_address(host: Hypervisor) -> None:
    """F2: kill -9 after adding 169.254.169.254: the next ecompute removes it (libvirt)."""
    address, bridge = '169.254.169.254/32', ('dev', 'virbr0')

    def has_address() -> bool:
        return address in host.lab.run_elab('exec', host.name, 'ip', 'addr', 'show', *bridge)

    def terminate() -> None:
        host.kill(signal.SIGTERM)

    # The lab's network has this address itself.
    terminate()
    assert has_address(), 'what is not ours stays'
    host.lab.run_elab('exec', host.name, 'ip', 'addr', 'del', address, *bridge)
    try:
        host.restart()
        assert has_address()
        host.kill()
        assert has_address()
        host.restart()
        terminate()
        assert not has_address()
        assert not (host.state / 'metadata-address').exists()
    finally:
        host.lab.run_elab('exec', host.name, 'ip', 'addr', 'replace', address, *bridge)


@pytest.mark.slow
def test_restarted_network_gets_the_metadata_address(host: Hypervisor) -> None:
    """F28: the network restarted outside ecomp: 169.254.169.254 is soon added again (libvirt)."""
    address, bridge = '169.254.169.254/32', ('dev', 'virbr0')

    def has_address() -> bool:
        return address in host.lab.run_elab('exec', host.name, 'ip', 'addr', 'show', *bridge)

    definition = host.lab.virsh(host.name, 'net-dumpxml', 'default')
    without = re.sub(r"<ip address='169\.254\.169\.254'.*?</ip>", '', definition, flags=re.DOTALL)
    assert without != definition
    xml = host.state / 'network.xml'
    try:
        xml.write_text(without)
        host.lab.virsh(host.name, 'net-define', str(xml))
        host.lab.virsh(host.name, 'net-destroy', 'default')
        host.lab.virsh(host.name, 'net-start', 'default')
        wait_until(has_address, 10, 'the address is there again')
    finally:
        host.kill(signal.SIGTERM)
        xml.write_text(definition)
        host.lab.virsh(host.name, 'net-define', str(xml))
        host.lab.virsh(host.name, 'net-destroy', 'default')
        host.lab.virsh(host.name, 'net-start', 'default')
        xml.unlink()
        host.restart()


REAL_HOST_STEPS = ('building', 'reserved', 'built', 'removed', 'forgotten')


@pytest.mark.parametrize('step', mark_slow_steps(REAL_HOST_STEPS, 'built'))
def test_killed_on_a_real_host(host: Hypervisor, step: str) -> None:
    """F2: kill -9 at a step: the next start completes it, with one QEMU or none (libvirt)."""
    destroyed = step in DESTROY_FAILPOINTS
    host.restart(f'{step}:kill')
    instance = host.start_instance() if destroyed else host.place()
    if destroyed:
        host.request_destroy(instance)
    host.wait_ended()
    assert host.fired_failpoints == [step]
    before = host.find_qemu(instance)
    assert bool(before) == (step == 'built')
    host.restart()
    host.wait_state(instance, 'gone' if destroyed else 'active')
    assert host.list_qemus() == ([] if destroyed else [instance])
    assert before in (0, host.find_qemu(instance)), 'one that runs is taken as it is'
    if destroyed:
        host.assert_removed(instance)
    host.check_settled()


# F5, F6, F36: ecompute frozen, killed, started twice, and stopped during work.


def read_final_lines(compute: Ecompute) -> list[str]:
    """Return the lines that an ecompute printed at its end, apart from its log lines."""
    lines = [line for line in read_log(compute) if not re.match(r'\d{4}-\d\d-\d\dT', line)]
    assert all(line.startswith('ecompute: ') for line in lines), lines
    return lines


@contextlib.contextmanager
def freeze(control: Control, compute: Ecompute, really: bool) -> Iterator[Callable[[], None]]:
    """Freeze an ecompute, and yield a function that lets its lease expire.

    With `really` that takes 61 s, otherwise etcd revokes the lease.
    """
    presence, began = f'/computes/{compute.uuid}', time.monotonic()

    def expire_lease() -> None:
        if really:
            wait_until(lambda: time.monotonic() - began > 61, 70, 'a minute has passed')
            assert control.etcd.get(presence) is None
        else:
            expire_key(control, presence)

    compute.pause()
    yield expire_lease
    assert is_stopped(compute.pid)
    compute.resume()


EXPIRY_MODES = pytest.mark.parametrize('really', [False, pytest.param(True, marks=pytest.mark.slow)])


@EXPIRY_MODES
def test_frozen_while_another_compute_takes_its_uuid(cluster: Control, tmp_path: Path, really: bool) -> None:
    """F5: SIGSTOP of ecompute until another has its uuid: it writes nothing more (fake)."""
    compute = cluster.ecompute()
    with freeze(cluster, compute, really) as expire_lease:
        _, instance = place(cluster)
        expire_lease()
        other = cluster.ecompute(directory=tmp_path / 'other', uuid=compute.uuid)
        wait_address(cluster, instance)
        before = read_revision(cluster, f'/instances/{compute.uuid}/{instance}')
    wait_until(lambda: find_log_lines(compute, 'this compute is read-only from now on'), 20, 'it notices')
    assert read_revision(cluster, f'/instances/{compute.uuid}/{instance}') == before, 'the late one wrote'
    assert read_guests(compute) == {}
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    assert compute.stop() == 0
    assert read_reserved(cluster, compute.uuid) == 0, 'nor does it close what is not its own any more'
    check_settled(cluster, other)


def read_refusal(compute: Ecompute) -> str:
    """Return the one line of an ecompute that refused to start because another one runs."""
    assert compute._process is not None
    assert compute._process.wait(SLOWDOWN_FACTOR * 30) == 5, compute.tail_log()
    (line,) = read_final_lines(compute)
    return line


@pytest.mark.parametrize('shared', ['state directory', 'uuid'])
def test_two_ecomputes_started_together(cluster: Control, tmp_path: Path, shared: str) -> None:
    """F6: two ecomputes of one directory or uuid: one runs, one refuses (fake)."""
    state = {'state': str(tmp_path / 'state')} if shared == 'state directory' else {}
    first = make_tuned(cluster, start=False, directory=tmp_path / '1', **state)
    second = make_tuned(cluster, start=False, directory=tmp_path / '2', uuid=first.uuid, **state)
    for compute in (first, second):
        compute.launch()
    wait_until(lambda: not (first.is_running and second.is_running), 30, 'one of them refuses')
    loser, winner = (first, second) if not first.is_running else (second, first)
    line = read_refusal(loser)
    assert (str(tmp_path / 'state') if state else first.uuid) in line
    winner.wait_ready()
    assert json.loads(cluster.etcd.get(f'/computes/{first.uuid}') or b'{}')['token']
    instance = boot(cluster)
    # Once more while the winner has work: nothing of the running one changes.
    before = read_lasting_keys(cluster), cluster.placement.read_inventory(first.uuid)
    loser.log.unlink()
    loser.launch()
    assert first.uuid in read_refusal(loser) or state
    assert (read_lasting_keys(cluster), cluster.placement.read_inventory(first.uuid)) == before
    assert cluster.eschedule('destroy', '--wait', instance).code == 0
    check_settled(cluster, *([] if state else [winner]))
