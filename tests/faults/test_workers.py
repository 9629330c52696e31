"""F3, F4, F26, F36: workers killed or frozen at each step, and requests that arrive then."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from tests.kit.hands import mark_slow_steps
from tests.kit.hypervisor import Hypervisor, hold_lock
from tests.kit.lab import is_alive
from tests.kit.servers import wait_until
from tests.kit.slow_images import SlowImages

BUILD_FAILPOINTS = ('image-part', 'image-ready', 'disk-created', 'domain-defined', 'domain-started')
DESTROY_FAILPOINTS = ('domain-destroyed', 'domain-undefined', 'disk-deleted')


def make_image_name() -> str:
    return f'idle.raw?{uuid.uuid4()}'


@pytest.mark.parametrize('step', mark_slow_steps(BUILD_FAILPOINTS))
def test_worker_killed_during_a_build(host: Hypervisor, step: str) -> None:
    """F3: kill -9 of a worker at a step of a build, once: the next one builds it (libvirt)."""
    host.restart(f'{step}:kill:1')
    instance = host.place(make_image_name())
    record = host.wait_state(instance, 'active')
    assert host.fired_failpoints == [step]
    assert record['attempts'] == 1
    assert len(host.find_log_lines('worker', 'ended with exit code -9')) == 1
    host.check_settled()


@pytest.mark.parametrize('step', mark_slow_steps(DESTROY_FAILPOINTS))
def test_worker_killed_during_a_destroy(host: Hypervisor, step: str) -> None:
    """F3: kill -9 of a worker at a step of a destroy, once: the next one completes it (libvirt)."""
    host.restart(f'{step}:kill:1')
    instance = host.start_instance()
    host.request_destroy(instance)
    host.wait_state(instance, 'gone')
    assert host.fired_failpoints == [step]
    assert len(host.find_log_lines('worker', 'ended with exit code -9')) == 1
    host.assert_removed(instance)
    host.check_settled()


@pytest.mark.parametrize('step', mark_slow_steps(BUILD_FAILPOINTS[:-2]))
def test_every_worker_of_a_build_killed(host: Hypervisor, step: str) -> None:
    """F3: every worker that builds it is killed: after three in error, nothing left (libvirt)."""
    host.restart(f'{step}:kill')
    instance = host.place(make_image_name())
    record = host.wait_state(instance, 'error')
    assert host.fired_failpoints == [step] * 3
    assert record['attempts'] == 3
    assert (
        '3 attempts failed; the last one: its worker process ended during the job (exit code -9)'
        in record['error']['reason']
    )
    host.assert_removed(instance)
    host.check_settled()


@pytest.mark.slow
def test_every_worker_killed_once_a_domain_is_defined(host: Hypervisor) -> None:
    """F3: every worker is killed with a domain defined: it is started, not rebuilt (libvirt)."""
    host.restart('domain-defined:kill')
    instance = host.place(make_image_name())
    record = host.wait_state(instance, 'active')
    assert host.fired_failpoints == ['domain-defined']
    assert record['attempts'] == 1
    host.request_destroy(instance)
    host.wait_state(instance, 'gone')
    host.assert_removed(instance)
    host.check_settled()


@pytest.mark.slow
def test_every_worker_of_a_destroy_killed(host: Hypervisor) -> None:
    """F3: every worker that destroys it is killed: repeated, while others are built (libvirt)."""
    host.restart('domain-undefined:kill')
    instance = host.start_instance()
    host.request_destroy(instance)
    wait_until(lambda: len(host.fired_failpoints) > 3, 60, 'four workers have died of it')
    assert host.read_record(instance)['state'] == 'destroying'
    other = host.start_instance()
    host.restart()
    host.wait_state(instance, 'gone')
    host.assert_removed(instance)
    assert host.read_record(other)['attempts'] == 0
    host.check_settled()


@pytest.mark.parametrize('step', mark_slow_steps((*BUILD_FAILPOINTS, 'domain-destroyed')))
def test_ecompute_killed_while_a_worker_is_frozen(host: Hypervisor, step: str) -> None:
    """F4: kill -9 of ecompute while a worker is frozen: it dies too, its lock is free (libvirt)."""
    destroyed = step in DESTROY_FAILPOINTS
    host.restart(f'{step}:stop:1')
    instance = host.start_instance() if destroyed else host.place(make_image_name())
    if destroyed:
        host.request_destroy(instance)
    pid = host.wait_frozen_at(step)
    workers = host.list_workers()
    assert pid in workers
    assert not host.is_free(instance)
    host.kill()
    wait_until(lambda: not any(is_alive(worker) for worker in workers), 10, 'the workers end with it')
    # A process whose first thread has ended may have other threads that still run.
    wait_until(lambda: host.is_free(instance), 10, 'its lock is free')
    assert len(host.list_qemus()) == (step == 'domain-started')
    host.restart()
    host.wait_state(instance, 'gone' if destroyed else 'active')
    assert host.list_qemus() == ([] if destroyed else [instance])
    if destroyed:
        host.assert_removed(instance)
    host.check_settled()


@pytest.mark.slow
def test_surviving_process_keeps_its_instance_locked(host: Hypervisor) -> None:
    """F4: a process that still works on an instance keeps ecompute's workers from it (libvirt)."""
    with hold_lock(host, instance := str(uuid.uuid4())):
        host.place('idle.raw', '--uuid', instance)
        host.wait_state(instance, 'building')
        assert host.start_instance()
        assert host.read_record(instance)['state'] == 'building'
        assert set(host.list_qemus()) == set(host.lab.list_domains(host.name))
        assert instance not in host.list_qemus()
    host.wait_state(instance, 'active')
    host.check_settled()


@pytest.mark.parametrize('step', mark_slow_steps(('disk-created', 'domain-started', 'domain-destroyed')))
def test_ecompute_stopped_while_a_worker_is_frozen(host: Hypervisor, step: str) -> None:
    """F36: SIGTERM of ecompute while a worker is frozen: undone, or completed (libvirt)."""
    destroyed = step in DESTROY_FAILPOINTS
    host.restart(f'{step}:stop:1')
    instance = host.start_instance() if destroyed else host.place(make_image_name())
    if destroyed:
        host.request_destroy(instance)
    pid = host.wait_frozen_at(step)
    os.kill(host.pid, signal.SIGTERM)
    wait_until(lambda: host.find_log_lines('reserved all VCPU'), 30, 'nothing is scheduled here any more')
    assert host.is_running
    os.kill(pid, signal.SIGCONT)
    host.wait_ended()
    assert host.find_log_lines('stopping; guests keep running')
    assert not host.find_log_lines('ERROR')
    # A step that cannot be undone any longer is complete; all others left nothing.
    remaining = [instance] if step == 'domain-started' else []
    assert host.list_qemus() == remaining
    assert list(host.lab.list_domains(host.name)) == remaining
    assert host.get_disk_path(instance).exists() == bool(remaining)
    assert host.read_record(instance)['state'] == {'disk-created': 'building', 'domain-started': 'active'}.get(
        step, 'gone'
    )
    host.restart()
    host.wait_state(instance, 'gone' if destroyed else 'active')
    host.check_settled()


@pytest.mark.slow
def test_ecompute_stopped_during_a_download(host: Hypervisor, slow_images: SlowImages) -> None:
    """F36: SIGINT of ecompute in a download: it ends with the next bytes (libvirt)."""
    instance = host.place(slow_images.make_url(make_image_name()))
    host.wait_downloader()
    os.kill(host.pid, signal.SIGINT)
    wait_until(lambda: host.find_log_lines('reserved all VCPU'), 30, 'nothing is scheduled here any more')
    slow_images.release()
    host.wait_ended()
    assert not list((host.state / 'images').glob('*.part'))
    assert not host.get_disk_path(instance).exists()
    assert host.read_record(instance)['state'] == 'building'
    host.restart()
    host.wait_state(instance, 'active')
    host.check_settled()
