"""F3, F4, F26, F36 (libvirt): workers killed or frozen at each step, and requests that arrive then."""

from __future__ import annotations

import os
import signal
import uuid

import pytest

from tests.kit.hands import some
from tests.kit.hypervisor import Hypervisor, held
from tests.kit.lab import running
from tests.kit.servers import until
from tests.kit.slow_images import SlowImages

BUILD_FAILPOINTS = ('image-part', 'image-ready', 'disk-created', 'domain-defined', 'domain-started')
DESTROY_FAILPOINTS = ('domain-destroyed', 'domain-undefined', 'disk-deleted')


def new_image() -> str:
    """Return the name of an image that no cache has yet."""
    return f'idle.raw?{uuid.uuid4()}'


def death(host: Hypervisor, pid: int) -> str:
    """Wait for the log line in which ecompute reports the end of a worker; return it."""
    return until(lambda: ''.join(host.lines(f'worker {pid} ended')[:1]), 5, f'the end of worker {pid} is noticed')


@pytest.mark.parametrize('step', some(BUILD_FAILPOINTS, 'domain-started'))
def test_killed_while_building(host: Hypervisor, step: str) -> None:
    """F3: kill -9 of a worker at a step of a build, once: the next one builds it (libvirt)."""
    host.restart(f'{step}:kill:1')
    instance = host.place(new_image())
    record = host.reached(instance, 'active')
    assert host.fired == [step]
    assert record['attempts'] == 1
    assert len(host.lines('worker', 'ended with -9')) == 1
    host.settled()


@pytest.mark.parametrize('step', some(DESTROY_FAILPOINTS, 'domain-destroyed'))
def test_killed_while_destroying(host: Hypervisor, step: str) -> None:
    """F3: kill -9 of a worker at a step of a destroy, once: the next one completes it (libvirt)."""
    host.restart(f'{step}:kill:1')
    instance = host.running()
    host.ask_destroy(instance)
    host.reached(instance, 'gone')
    assert host.fired == [step]
    assert len(host.lines('worker', 'ended with -9')) == 1
    host.nothing_of(instance)
    host.settled()


@pytest.mark.parametrize('step', some(BUILD_FAILPOINTS[:-2]))
def test_killed_by_every_build(host: Hypervisor, step: str) -> None:
    """F3: every worker that builds it is killed: after three it is in error, and nothing is left (libvirt)."""
    host.restart(f'{step}:kill')
    instance = host.place(new_image())
    record = host.reached(instance, 'error')
    assert host.fired == [step] * 3
    assert record['attempts'] == 3
    assert 'worker process ended in the middle of it (-9), 3 times' in record['error']['reason']
    host.nothing_of(instance)
    host.settled()


def test_killed_by_every_build_once_there_is_a_domain(host: Hypervisor) -> None:
    """F3: every worker is killed once the domain is defined: the domain is started, not built again (libvirt)."""
    host.restart('domain-defined:kill')
    instance = host.place(new_image())
    record = host.reached(instance, 'active')
    assert host.fired == ['domain-defined']
    assert record['attempts'] == 1
    host.ask_destroy(instance)
    host.reached(instance, 'gone')
    host.nothing_of(instance)
    host.settled()


@pytest.mark.slow
def test_killed_by_every_destroy(host: Hypervisor) -> None:
    """F3: every worker that destroys it is killed: repeated without limit, while others are built (libvirt)."""
    host.restart('domain-undefined:kill')
    instance = host.running()
    host.ask_destroy(instance)
    until(lambda: len(host.fired) > 3, 60, 'four workers have died of it')
    assert host.record(instance)['state'] == 'destroying'
    other = host.running()
    host.restart()
    host.reached(instance, 'gone')
    host.nothing_of(instance)
    assert host.record(other)['attempts'] == 0
    host.settled()


def test_killed_in_a_download(host: Hypervisor, slow_images: SlowImages) -> None:
    """F3: kill -9 of a worker during a download: noticed soon, the tasks of others are not affected (libvirt)."""
    instance = host.place(slow_images.url(new_image()))
    pid = host.downloader()
    other = host.place(slow_images.url(new_image()))
    until(lambda: len(list((host.state / 'images').glob('*.part'))) == 2, 30, 'both are downloading')
    os.kill(pid, signal.SIGKILL)
    death(host, pid)
    host.reached(instance, 'building', attempts=1)
    slow_images.go_on()
    assert host.reached(other, 'active')['attempts'] == 0
    assert host.reached(instance, 'active')['attempts'] == 1
    host.settled()


def test_all_killed_at_once(host: Hypervisor) -> None:
    """F3: kill -9 of every worker, repeatedly, during builds and destroys: each completes as requested (libvirt)."""
    surviving, doomed = host.running(), host.running()
    before = host.qemu(surviving)
    building = host.place()
    host.ask_destroy(doomed)
    for _ in range(3):
        killed = until(host.workers, 30, 'there are workers')
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        for pid in killed:
            death(host, pid)
    # An instance that lost three workers is in error and has left nothing.
    until(lambda: host.record(building).get('state') in ('active', 'error'), 60, 'the build ends')
    host.reached(doomed, 'gone')
    host.nothing_of(doomed)
    assert host.qemu(surviving) == before
    host.settled()


def test_frozen_in_a_download(host: Hypervisor, slow_images: SlowImages) -> None:
    """F3: SIGSTOP of a worker in a build: others are built and destroyed, SIGCONT completes it (libvirt)."""
    instance = host.place(slow_images.url(new_image()))
    pid = host.downloader()
    os.kill(pid, signal.SIGSTOP)
    slow_images.go_on()
    other = host.running()
    host.ask_destroy(other)
    host.reached(other, 'gone')
    assert host.record(instance)['state'] == 'building'
    os.kill(pid, signal.SIGCONT)
    assert host.reached(instance, 'active')['attempts'] == 0
    host.settled()


@pytest.mark.parametrize('step', some((*BUILD_FAILPOINTS, 'domain-destroyed'), 'domain-defined'))
def test_ecompute_killed_meanwhile(host: Hypervisor, step: str) -> None:
    """F4: kill -9 of ecompute while a worker is frozen in a step: it dies too, its lock is free (libvirt)."""
    destroyed = step in DESTROY_FAILPOINTS
    host.restart(f'{step}:stop:1')
    instance = host.running() if destroyed else host.place(new_image())
    if destroyed:
        host.ask_destroy(instance)
    pid = host.frozen_at(step)
    workers = host.workers()
    assert pid in workers
    assert not host.is_free(instance)
    host.kill()
    until(lambda: not any(running(worker) for worker in workers), 10, 'the workers end with it')
    # A process whose first thread has ended may have other threads that still run.
    until(lambda: host.is_free(instance), 10, 'its lock is free')
    assert len(host.qemus()) == (step == 'domain-started')
    host.restart()
    host.reached(instance, 'gone' if destroyed else 'active')
    assert host.qemus() == ([] if destroyed else [instance])
    if destroyed:
        host.nothing_of(instance)
    host.settled()


def test_a_worker_that_lives_on(host: Hypervisor) -> None:
    """F4: a process that still works on an instance keeps ecompute's workers from it (libvirt)."""
    with held(host, instance := str(uuid.uuid4())):
        host.place('idle.raw', '--uuid', instance)
        host.reached(instance, 'building')
        assert host.running()
        assert host.record(instance)['state'] == 'building'
        assert set(host.qemus()) == set(host.lab.domains(host.name))
        assert instance not in host.qemus()
    host.reached(instance, 'active')
    host.settled()


@pytest.mark.slow
def test_destroyed_while_building(host: Hypervisor) -> None:
    """F26: destroy while the worker is frozen at each step of its build: after SIGCONT undone and gone (libvirt)."""
    steps = list(BUILD_FAILPOINTS[1:])  # a complete download is kept: a build is cancelled after it
    others = [host.running() for _ in steps]
    host.restart(','.join(f'{step}:stop:1' for step in steps))
    for number, step in enumerate(steps, 1):
        instance = host.place(new_image())
        pid = host.frozen_at(step)
        assert len(host.fired) == number, 'a build that is stopped goes no further'
        host.ask_destroy(instance, others[-1])
        host.reached(others.pop(), 'gone')  # by then the worker has got the cancellation
        assert host.record(instance)['state'] == 'building'
        os.kill(pid, signal.SIGCONT)
        host.reached(instance, 'gone')
        host.nothing_of(instance)
    assert host.fired == steps
    host.settled()


@pytest.mark.parametrize('step', some(('disk-created', 'domain-started', 'domain-destroyed')))
def test_asked_to_stop_meanwhile(host: Hypervisor, step: str) -> None:
    """F36: SIGTERM of ecompute while a worker is frozen: a build undoes itself, a destroy completes (libvirt)."""
    destroyed = step in DESTROY_FAILPOINTS
    host.restart(f'{step}:stop:1')
    instance = host.running() if destroyed else host.place(new_image())
    if destroyed:
        host.ask_destroy(instance)
    pid = host.frozen_at(step)
    os.kill(host.pid, signal.SIGTERM)
    until(lambda: host.lines('reserved all VCPU'), 30, 'nothing is scheduled here any more')
    assert host.is_running
    os.kill(pid, signal.SIGCONT)
    host.ended()
    assert host.lines('stopping; the guests go on')
    assert not host.lines('ERROR')
    # A step that cannot be undone any longer is complete; all others left nothing.
    remaining = [instance] if step == 'domain-started' else []
    assert host.qemus() == remaining
    assert list(host.lab.domains(host.name)) == remaining
    assert host.disk(instance).exists() == bool(remaining)
    assert host.record(instance)['state'] == {'disk-created': 'building', 'domain-started': 'active'}.get(step, 'gone')
    host.restart()
    host.reached(instance, 'gone' if destroyed else 'active')
    host.settled()


@pytest.mark.slow
def test_asked_to_stop_in_a_download(host: Hypervisor, slow_images: SlowImages) -> None:
    """F36: SIGINT of ecompute in a download: it ends with the next bytes, and nothing is left (libvirt)."""
    instance = host.place(slow_images.url(new_image()))
    host.downloader()
    os.kill(host.pid, signal.SIGINT)
    until(lambda: host.lines('reserved all VCPU'), 30, 'nothing is scheduled here any more')
    slow_images.go_on()
    host.ended()
    assert not list((host.state / 'images').glob('*.part'))
    assert not host.disk(instance).exists()
    assert host.record(instance)['state'] == 'building'
    host.restart()
    host.reached(instance, 'active')
    host.settled()
