"""etcd clients behind roles: while roles change, and with another compute's certificate."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip('cryptography', reason="pip install '.[lab]'")

from ecomp.errors import Denied
from ecomp.model import keys
from ecomp.store.client import Put, Unchanged
from ecomp.store.presence import Presence
from tests.functional.present import start_and_stop
from tests.kit.behind_roles import EtcdWithRoles, start_etcd_with_roles
from tests.kit.process import start_process
from tests.kit.secured import certify
from tests.kit.servers import PlacementServer, make_environment, wait_until


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[EtcdWithRoles]:
    with start_etcd_with_roles(tmp_path) as roles_cloud:
        yield roles_cloud


def test_presence_is_written_only_with_own_certificate(cloud: EtcdWithRoles) -> None:
    cloud.enable()
    lost: list[str] = []
    first, second = (keys.compute(cloud.computes[f'compute-hv{number}']) for number in (1, 2))
    foreign = Presence(cloud.stores['compute-hv1'], second, {'token': 'a'}, lost.append)
    for write in (foreign.check, foreign.start):
        with pytest.raises(Denied, match=f'compute-hv1/client.crt write {second}: its role does not allow that'):
            write()
    assert cloud.stores['operator-ann'].get(second) is None
    alive = Presence(cloud.stores['compute-hv1'], first, {'token': 'a'}, lost.append)
    alive.check()
    assert cloud.stores['operator-ann'].get(first) is None
    with start_and_stop(alive):
        assert cloud.stores['operator-ann'].get(first) is not None
    assert cloud.stores['operator-ann'].get(first) is None
    assert lost == []


def test_no_request_fails_while_roles_change(cloud: EtcdWithRoles) -> None:
    """A request that etcd receives before a role change and applies after it is sent again."""
    cloud.enable()
    errors: list[Exception] = []
    commits, stop = [0, 0, 0], threading.Event()

    def work(number: int) -> None:
        store, key = cloud.open_store('compute-hv1'), f'/hosts/{cloud.computes["compute-hv1"]}/{number}'
        while not stop.is_set():
            try:
                entry = store.get(key)
                assert store.commit([Unchanged(key, entry.revision if entry else 0)], [Put(key, 'x')])
                commits[number] += 1
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(commits))]
    for thread in threads:
        thread.start()
    try:
        certify(cloud.certs, cloud.etcd.port, tuple(f'n{number}' for number in range(4)))
        cloud.enable()
        cloud.disable()
        cloud.enable()
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert errors == []
    assert all(commits)


def make_ecompute_command(cloud: EtcdWithRoles, compute: str, placement: PlacementServer) -> list[str]:
    """Return the command of a fake ecompute that uses the certificate of compute-hv1."""
    state = str(cloud.certs / 'compute-hv1/state')
    config = cloud.write_config('compute-hv1', placement.url, uuid=compute, state=state)
    inventory = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'
    return [sys.executable, '-m', 'ecomp.compute', '--config', str(config), '--fake', inventory]


def test_ecompute_without_its_role_waits(cloud: EtcdWithRoles, own_placement: PlacementServer) -> None:
    """It logs the refusal once, retries with a back-off, and its request stays in etcd."""
    cloud.enable()
    compute = cloud.computes['compute-hv1']
    log = cloud.certs / 'compute-hv1/log'
    with log.open('w') as output:
        child = start_process(
            make_ecompute_command(cloud, compute, own_placement),
            cloud.certs,
            make_environment(),
            output.fileno(),
            output.fileno(),
        )
    try:
        wait_until(lambda: 'ready: ' in log.read_text(), 20, 'it is ready')
        path = cloud.certs / 'compute-hv1/compute.yaml'
        path.write_text(path.read_text().replace(compute, str(uuid.uuid4())))
        cloud.enable()
        config = cloud.write_config('scheduler-shell', own_placement.url)
        command = [sys.executable, '-m', 'ecomp.schedule', '--config', str(config)]
        command += ['resources=VCPU:1,DISK_GB:1,MEMORY_MB:256', 'http://images.example/x.img']
        result = subprocess.run(command, capture_output=True, text=True, env=make_environment(), timeout=80)
        assert result.stdout.startswith(f'NOTIFIED TARGET, {compute}, OF INSTANCE '), result
        wait_until(lambda: 'does not let' in log.read_text(), 20, 'it says that it may not')
        jiffies_before = _read_jiffies(child.pid)
        time.sleep(5)
        assert _read_jiffies(child.pid) - jiffies_before < 100  # of 500
        refusals = [line for line in log.read_text().splitlines() if 'does not let' in line]
        assert len(refusals) == 1
        assert 'client.crt write /instances/' in refusals[0]
        assert 'Traceback' not in log.read_text()
        assert cloud.stores['operator-ann'].count(keys.request_prefix(compute)) == 1
    finally:
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0


def _read_jiffies(pid: int) -> int:
    """Return the processor time of a process in hundredths of a second, see proc(5)."""
    return sum(map(int, Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[11:13]))


def test_ecompute_with_certificate_of_another_compute_exits(
    cloud: EtcdWithRoles, own_placement: PlacementServer
) -> None:
    """It prints one line, and exits before it creates a provider that no compute serves."""
    cloud.enable()
    own, other_compute = cloud.certs / 'compute-hv1', cloud.computes['compute-hv2']
    command = make_ecompute_command(cloud, other_compute, own_placement)
    started_at = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, env=make_environment(), timeout=80)
    assert time.monotonic() - started_at < 60
    assert result.returncode == 1
    message = f'etcd at localhost:{cloud.etcd.port} does not let {own}/client.crt write {keys.compute(other_compute)}: '
    assert result.stderr.splitlines()[-1].startswith(f'ecompute: {message}')
    assert 'Traceback' not in result.stderr
    assert own_placement.call('GET', '/resource_providers')['resource_providers'] == []
    assert cloud.stores['operator-ann'].snapshot('/').entries.keys() == {'/cluster'}
