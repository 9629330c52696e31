"""F25, F26, F28, F31 and the bounds on real hosts: what is foreign stays, what is destroyed goes."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from ecomp.agent.images.download import TIMEOUT
from tests.kit.hands import some
from tests.kit.hypervisor import SOON, Hypervisor
from tests.kit.servers import until
from tests.kit.slow_images import SlowImages
from tests.kit.use import Use

WORKER_FAILPOINTS = ['image-part', 'image-ready', 'disk-created', 'domain-defined', 'domain-started']
FOREIGN = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>32</memory>
<os><type arch='x86_64'>hvm</type></os></domain>"""


# One at a time: whether the worker hears of the destroy before its next step is the race that is meant.
@pytest.mark.parametrize('step', some(WORKER_FAILPOINTS, 'domain-started'))
def test_destroyed_at_a_step_of_the_worker(host: Hypervisor, step: str) -> None:
    """F26: a destroy that comes while the worker is at any of its steps: gone, and nothing of it is left (libvirt)"""
    host.restart(f'{step}:stop:1')
    instance = host.place(f'{host.lab.url("idle.raw")}?{uuid.uuid4()}')
    frozen = host.frozen_at(step)
    host.ask_destroy(instance)
    os.kill(frozen, signal.SIGCONT)
    host.reached(instance, 'gone')
    host.nothing_of(instance)
    assert host.fired == [step]
    host.running()


@pytest.mark.slow
def test_destroyed_while_its_image_stalls(host: Hypervisor, slow_images: SlowImages) -> None:
    """F26: a destroy while the image's server is silent: it does not wait for the server (libvirt)"""
    instance = host.place(slow_images.url(f'idle.raw?{uuid.uuid4()}'))
    host.downloader()
    host.ask_destroy(instance)
    other = host.running()  # nobody else waits for it
    host.reached(instance, 'gone', TIMEOUT[1] / 2)
    host.nothing_of(instance)
    assert host.record(other)['state'] == 'active'
    assert list((host.state / 'images').glob('*.part')) == []


def test_foreign_domains(host: Hypervisor) -> None:
    """F25: domains that somebody else made with an instance's uuid and name: refused, and not touched (libvirt)"""
    alike, other, named = (str(uuid.uuid4()) for _ in range(3))
    foreign = {'foreign': alike, named: other}
    try:
        for name, its_uuid in foreign.items():
            definition = host.directory / 'foreign.xml'
            definition.write_text(FOREIGN.format(name=name, uuid=its_uuid))
            host.virsh('define', str(definition))
        before = [host.virsh('dumpxml', name) for name in foreign]
        for instance in (alike, named):
            host.place('idle.raw', '--uuid', instance)
        for instance in (alike, named):
            failed = host.reached(instance, 'error')
            assert failed['error']['stage'] == 'started'
            assert 'not made by ecompute: not touched' in failed['error']['reason']
            assert host.held(instance) == {}
            assert not host.disk(instance).exists()
        # What fails before that, and what is destroyed meanwhile, ends as it would without them.
        missing, stalled = str(uuid.uuid4()), str(uuid.uuid4())
        for name in (missing, stalled):
            foreign |= {f'{name}-x': name}
            definition.write_text(FOREIGN.format(name=f'{name}-x', uuid=name))
            host.virsh('define', str(definition))
        before = [host.virsh('dumpxml', name) for name in foreign]
        host.place('missing.raw', '--uuid', missing)
        failed = host.reached(missing, 'error')
        assert (failed['error']['stage'], 'HTTP 404' in failed['error']['reason']) == ('image', True)
        host.restart('disk-created:stop:1')
        host.place('idle.raw', '--uuid', stalled)
        frozen = host.frozen_at('disk-created')
        host.ask_destroy(stalled)
        os.kill(frozen, signal.SIGCONT)
        host.reached(stalled, 'gone')
        for name in (missing, stalled):
            assert host.held(name) == {}
            assert not host.disk(name).exists()
        assert [host.virsh('dumpxml', name) for name in foreign] == before
        # Nor when they run, and the instances are destroyed.
        host.virsh('start', named)
        host.lab.destroy(alike, named)
        assert host.virsh('domstate', named).strip() == 'running'
        host.virsh('destroy', named)
    finally:
        for name in set(foreign) & set(host.lab.domains(host.name)):
            host.virsh('undefine', name)


def test_a_foreign_volume(host: Hypervisor) -> None:
    """F25: a volume of the instance's name, in another pool and in ours: neither is touched nor built over (libvirt)"""
    instance = str(uuid.uuid4())
    elsewhere = host.directory / 'lib/images' / f'{instance}.qcow2'
    elsewhere.write_bytes(b"somebody else's")
    host.place('idle.raw', '--uuid', instance)
    host.reached(instance, 'active')
    host.lab.destroy(instance)
    assert elsewhere.read_bytes() == b"somebody else's"
    elsewhere.unlink()
    # In the pool of our own, under a name that only we give: older than what etcd knows, kept until it is destroyed.
    planted = str(uuid.uuid4())
    host.disk(planted).write_bytes(b'of an instance that etcd has forgotten')
    host.place('idle.raw', '--uuid', planted)
    host.reached(planted, 'stopped', fault='its domain is gone, its disk is there')
    assert host.disk(planted).read_bytes() == b'of an instance that etcd has forgotten'
    host.lab.destroy(planted)
    host.nothing_of(planted)


def test_a_request_removed_by_hand(host: Hypervisor) -> None:
    """F28: the request of a running guest removed by hand: domain, disk and claim stay, and are reported (libvirt)"""
    instance = host.running()
    pid = host.qemu(instance)
    key = f'/hosts/{host.compute}/{instance}'
    value = host.lab.etcd(key)[key]
    delete(host, key)
    until(lambda: host.lines(instance, 'unmanaged'), SOON, 'it is reported')
    other = host.running()
    assert len(host.lines(instance, 'unmanaged')) == 1
    assert (host.qemu(instance), host.disk(instance).exists()) == (pid, True)
    assert host.held(instance)
    host.lab.put(key, value.decode())  # as it was: managed again
    host.lab.destroy(instance, other)
    host.nothing_of(instance)


def delete(host: Hypervisor, key: str) -> None:
    """Remove an etcd key, as an operator would."""
    own = host.lab.operator
    certs = [f'--cacert={own}/ca.crt', f'--cert={own}/client.crt', f'--key={own}/client.key']
    done = subprocess.run(
        ['etcdctl', f'--endpoints=https://{host.lab.facts["etcd"]}', *certs, 'del', key],
        env={**os.environ, 'ETCDCTL_API': '3'},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == '1', done


def round_of(host: Hypervisor, count: int) -> None:
    """`count` guests made and destroyed, several at a time."""
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: host.running(), range(count)))
    host.lab.destroy(*made)


def flat(host: Hypervisor, warm: int, count: int) -> None:
    """What ecompute and its workers have open is the same after `warm` guests and after `count` more."""
    host.restart()
    round_of(host, warm)
    before = Use.of(host.pid)
    workers = host.workers()
    for left in range(count, 0, -5):
        round_of(host, min(left, 5))
    after = Use.of(host.pid)
    assert host.workers() == workers
    assert after.processes == before.processes
    assert abs(after.descriptors - before.descriptors) <= 4, (before, after)
    assert abs(after.threads - before.threads) <= 4, (before, after)
    assert abs(after.connections - before.connections) <= 4, (before, after)
    assert after.memory - before.memory <= 16, (before, after)


@pytest.mark.slow
def test_5_guests(host: Hypervisor) -> None:
    """Bounds: descriptors, threads, processes and memory are flat over 5 real guests made and destroyed (libvirt)"""
    flat(host, 2, 5)


@pytest.mark.slow
def test_30_guests(host: Hypervisor) -> None:
    """Bounds: descriptors, threads, processes and memory are flat over 30 real guests made and destroyed (libvirt)"""
    flat(host, 10, 30)


@pytest.mark.slow
@pytest.mark.parametrize('limit', ['nofile=64', 'as'])
def test_limits(host: Hypervisor, limit: str) -> None:
    """F31: 64 descriptors, or little more memory than it has, for ecompute and its workers: it works (libvirt)"""
    host.restart()
    host.running()
    for pid in (host.pid, *host.workers()):
        what = limit
        if limit == 'as':
            with open(f'/proc/{pid}/statm') as file:
                has = int(file.read().split()[0]) * os.sysconf('SC_PAGE_SIZE')
            what = f'as={has + 64 * 2**20}'
        subprocess.run(['prlimit', f'--pid={pid}', f'--{what}'], check=True)
    for instance in [host.place() for _ in range(3)]:
        host.reached(instance, 'active')
