"""Running daemons: load when idle, leases, threads, many computes in a process, systemd."""

from __future__ import annotations

import ast
import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import ecomp.agent
from ecomp.lab.control import is_etcd_healthy, is_placement_ready
from ecomp.model.order import Request
from ecomp.model.stored import encode
from tests.kit.commands import Control, Ecompute
from tests.kit.ear import NotifySocket
from tests.kit.hands import check_settled
from tests.kit.invariants import read_lasting_keys
from tests.kit.servers import TOP, Etcd, free_port, make_environment, wait_until
from tests.kit.sharing import kill_and_lapse
from tests.kit.story import (
    IMAGE,
    SMALL_QUERY,
    parse_notice,
    place,
    read_reserved,
    run_in_process,
    wait_address,
    wait_state,
)
from tests.kit.tuned import make_tuned
from tests.scenario.queued import enqueue_request, list_waiting, record_placement_calls

# The load of idle computes: threads of their process, calls to placement, operations of etcd.


# Length of a periodic check's interval in these tests, in place of a minute.
INTERVAL_SECONDS = 0.5
INTERVALS = 12
# Maximum number of periods, of INTERVALS each, that are measured.
MAX_MEASUREMENTS = 4


def count_etcd_requests(etcd: Etcd) -> Counter[str]:
    """Return etcd's own count of requests: {'KV/Range': …, 'Lease/LeaseKeepAlive': …}."""
    with urllib.request.urlopen(f'http://{etcd.endpoint}/metrics', timeout=10) as answer:
        text = answer.read().decode()
    rows = re.findall(
        r'^grpc_server_started_total\{grpc_method="(\w+)",grpc_service="etcdserverpb\.(\w+)".*\} (\d+)',
        text,
        re.MULTILINE,
    )
    return Counter({f'{service}/{method}': int(number) for method, service, number in rows})


def test_idle_compute_sends_one_query_a_minute_and_writes_nothing(cluster: Control) -> None:
    with record_placement_calls(cluster) as (placement, requested_paths):
        numbers = {
            'PLAN_INTERVAL_SECONDS': INTERVAL_SECONDS,
            'HOSTNAME_CHECK_MINUTES': 1000,
            'host.claims.MAX_SKIPPED_CHECKS': 1000,
        }
        compute = make_tuned(cluster, numbers=numbers, placement=placement, queues=True)
        wait_address(cluster, parse_notice(cluster.eschedule(SMALL_QUERY))[1])
        provider = f'/resource_providers/{compute.uuid}'
        wait_until(lambda: requested_paths[-4:] == [provider] * 4, 40, 'nothing has changed for a while')
        # Late work of a slow machine (the guest's last stage, a lease) falls into the first period; repeated writes
        # fall into every period.
        excess = [count_excess(cluster.etcd, requested_paths, provider)]
        while excess[-1] and len(excess) < MAX_MEASUREMENTS:
            excess.append(count_excess(cluster.etcd, requested_paths, provider))
        assert not excess[-1], excess


def count_excess(etcd: Etcd, requested_paths: list[str], provider: str) -> Counter[str]:
    """Return the operations of INTERVALS beyond queries of the provider and lease renewals."""
    requested_paths.clear()
    before = count_etcd_requests(etcd)
    wait_until(lambda: len(requested_paths) >= INTERVALS, 400, f'{INTERVALS} minutes have passed')
    increase = count_etcd_requests(etcd) - before + Counter(set(requested_paths) - {provider})
    del increase['KV/Range'], increase['Lease/LeaseKeepAlive']
    return increase


# No command leaves a lease without a key in etcd: thousands of them would fill its memory for a day or a week.


# With the kit's patience factor it is shorter than the shortest lease of a command: 60 s of an attempt.
WAIT_SECONDS = 10.0


def list_leases_without_key(control: Control) -> set[str]:
    empty_leases = set()
    for lease in control.etcd.call('lease/leases', {}).get('leases', []):
        lease_state = control.etcd.call('lease/timetolive', {'ID': lease['ID'], 'keys': True})
        if int(lease_state.get('TTL', 0)) > 0 and not lease_state.get('keys'):
            empty_leases.add(lease['ID'])
    return empty_leases


@contextlib.contextmanager
def expect_no_lease_left(control: Control) -> Iterator[None]:
    before = list_leases_without_key(control)
    yield
    wait_until(lambda: list_leases_without_key(control) <= before, WAIT_SECONDS, 'no lease without a key is left')


def make_failed(control: Control, compute: str, name: str = 'failed') -> str:
    """Make an instance in error, which keeps its name on its record's lease."""
    instance = str(uuid.uuid4())
    control.etcd.put(f'/hosts/{compute}/{instance}', json.dumps({'name': name}))
    wait_state(control, instance, 'error')
    return instance


@pytest.fixture
def user_data(tmp_path: Path) -> str:
    path = tmp_path / 'user-data'
    path.write_text('#!/bin/sh\n')
    return str(path)


def test_creates_leave_no_lease_without_a_key(small_cluster: Control, user_data: str) -> None:
    """Also what is refused, repeated or queued."""
    compute, instance = small_cluster.ecompute(), str(uuid.uuid4())
    queue = ('--user-data', user_data, '--flavor', 'small', '--queue', IMAGE)
    with expect_no_lease_left(small_cluster):
        for _ in range(2):
            assert run_in_process(small_cluster, '--uuid', instance, SMALL_QUERY).code == 0
        for code in (0, 3):
            words = ('--count', '2', '--user-data', user_data, SMALL_QUERY)
            assert run_in_process(small_cluster, *words).code == code
        for _ in range(2):
            assert run_in_process(small_cluster, *queue).code == 0
    (key,) = small_cluster.etcd.list_keys('/user-data/')
    # On a lease that is too short, user-data moves to a longer one.
    small_cluster.etcd.put(key, small_cluster.etcd.get(key) or b'', small_cluster.etcd.grant(60))
    assert run_in_process(small_cluster, *queue).code == 0
    lease_state = small_cluster.etcd.call('lease/timetolive', {'ID': read_lasting_keys(small_cluster)[key].lease})
    assert int(lease_state['TTL']) > 3600
    assert run_in_process(small_cluster, 'destroy', *list_waiting(small_cluster)).code == 0
    check_settled(small_cluster, compute)


def test_ends_leave_no_lease_without_a_key(small_cluster: Control) -> None:
    """Destroy of guests, failed and queued instances, clear, an audit, and host forget."""
    compute = small_cluster.ecompute()
    with expect_no_lease_left(small_cluster):
        instances = [place(small_cluster, SMALL_QUERY)[1] for _ in range(2)]
        for instance in instances:
            wait_address(small_cluster, instance)
        check_settled(small_cluster, compute)
        assert run_in_process(small_cluster, 'destroy', instances[0], '--wait').code == 0
        assert run_in_process(small_cluster, 'destroy', make_failed(small_cluster, compute.uuid)).code == 0
        # Another client writes the tombstone: the record becomes gone, on a lease of its own.
        failed = make_failed(small_cluster, compute.uuid)
        tombstone = encode(Request(failed, {}, user_id='u', project_id='p'))
        small_cluster.etcd.put(f'/hosts/{compute.uuid}/{failed}', tombstone)
        wait_state(small_cluster, failed, 'gone')
        failed = make_failed(small_cluster, compute.uuid)
        assert run_in_process(small_cluster, 'destroy', enqueue_request(small_cluster)).code == 0
        kill_and_lapse(small_cluster, compute)
        assert run_in_process(small_cluster, 'destroy', instances[1], failed).code == 0
        assert run_in_process(small_cluster, 'host', 'forget', '--fenced', compute.uuid).code == 0
        assert run_in_process(small_cluster, 'destroy', '--state', 'gone,error', '--yes').code == 0
    assert small_cluster.etcd.list_keys('/instances/') == []


# The threads of a running ecompute are in the table of ecomp.agent's docstring, and each name in it exists.


# Callables that start threads. The last two, which are in jobs.py, take the name as their first argument.
THREAD_STARTERS = ('Thread', 'ThreadPoolExecutor', 'Loop', 'run_aside')


def read_documented_names() -> set[str]:
    return set(re.findall(r'^    (\S.*?)  +\S', ecomp.agent.__doc__ or '', re.MULTILINE))


def test_every_thread_in_the_source_is_documented() -> None:
    names = set()
    for room in ('agent', 'store', 'shared', 'virt'):
        for path in (TOP / 'ecomp' / room).rglob('*.py'):
            if path.name in ('history.py', 'jobs.py'):
                continue  # for eschedule alone: `events`; or named by who calls it
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).split('.')[-1] in THREAD_STARTERS:
                    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    name = arguments.get('name') or arguments.get('thread_name_prefix')
                    if ast.unparse(node.func) in THREAD_STARTERS[2:]:
                        name = ast.unparse(node.args[0])
                    assert name, f'{path}:{node.lineno}: a thread without a name'
                    names.add(name.lstrip('f').strip("'").partition('{')[0])
    documented = {re.sub('_N$', '', documented_name) for documented_name in read_documented_names()}
    assert {
        name for name in names if not any(documented_name.startswith(name) for documented_name in documented)
    } == set()
    matched = {
        documented_name for documented_name in documented if any(documented_name.startswith(name) for name in names)
    }
    assert documented - matched == {'main', 'Thread-N'}


# Each daemon as a systemd service: it alone reports that it is ready, alive and stopping.


WATCHDOG_SECONDS = 1.0
HEARTBEAT = ['WATCHDOG=1']


class ServiceCompute(Ecompute):
    ear: NotifySocket

    def environment(self) -> dict[str, str]:
        return {**super().environment(), **self.ear.make_environment(WATCHDOG_SECONDS)}


@pytest.fixture
def ear() -> Iterator[NotifySocket]:
    with NotifySocket() as started:
        yield started


def start_service(control: Control, ear: NotifySocket) -> ServiceCompute:
    compute = ServiceCompute(control.etcd.endpoint, control.placement.url)
    compute.ear = ear
    return control.at_exit.enter_context(compute)


def test_ecompute_reports_ready_alive_and_stopping(cluster: Control, ear: NotifySocket) -> None:
    compute = start_service(cluster, ear)
    ready = ear.receive()
    assert ready == (compute.pid, ['READY=1', ready[1][1]])
    assert ready[1][1].startswith('STATUS=fake guests with VCPU 4 (0 reserved)')
    assert read_reserved(cluster, compute.uuid) == 0, 'by then requests may come'
    wait_address(cluster, place(cluster)[1])
    assert [ear.receive() for _ in range(4)] == [(compute.pid, HEARTBEAT)] * 4, 'its workers say nothing'
    compute.pause()
    ear.discard()
    assert ear.is_silent(3 * WATCHDOG_SECONDS), 'the loop is frozen, so nothing says that it turns'
    compute.resume()
    assert ear.receive() == (compute.pid, HEARTBEAT)
    assert compute.stop() == 0
    assert ear.receive_until('STOPPING=1')[0] == compute.pid
    assert ear.is_silent(0)


def test_ecompute_reports_alive_while_the_backends_are_frozen(own_control: Control, ear: NotifySocket) -> None:
    compute = start_service(own_control, ear)
    assert ear.receive()[1][0] == 'READY=1'
    own_control.etcd.pause()
    own_control.placement.pause()
    ear.discard()
    assert [ear.receive(2 * WATCHDOG_SECONDS) for _ in range(12)] == [(compute.pid, HEARTBEAT)] * 12
    own_control.etcd.resume()
    own_control.placement.resume()


def test_ecompute_that_cannot_start_is_never_ready(tmp_path: Path, ear: NotifySocket) -> None:
    port = free_port()
    compute = ServiceCompute(f'127.0.0.1:{port}', f'http://127.0.0.1:{port}', directory=tmp_path)
    compute.ear = ear
    assert compute.launch()._process is not None
    assert compute._process.wait(60) == 7
    compute.close()
    assert ear.is_silent(0)


@contextmanager
def run_service(*words: str, ear: NotifySocket, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = make_environment() | ear.make_environment(WATCHDOG_SECONDS)
    with (cwd / 'log').open('wb') as log:
        process = subprocess.Popen([sys.executable, *words], cwd=cwd, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_metadata_server_is_ready_when_it_listens(tmp_path: Path, ear: NotifySocket) -> None:
    port = free_port()
    words = [str(TOP / 'md_server/mdserver/server.py'), '--listen', f'127.0.0.1:{port}', '--guests', str(tmp_path)]
    with run_service(*words, ear=ear, cwd=tmp_path) as process:
        assert ear.receive() == (process.pid, ['READY=1'])
        connection = http.client.HTTPConnection('127.0.0.1', port, timeout=10)
        connection.request('GET', '/')
        assert connection.getresponse().status == 200
        process.terminate()
        assert process.wait(20) == 0


def test_control_host_is_ready_when_etcd_and_placement_answer(tmp_path: Path, ear: NotifySocket) -> None:
    etcd, placement = free_port(), free_port()
    words = ['-m', 'ecomp.lab.elab', 'control', '--etcd-port', str(etcd), '--placement-port', str(placement)]
    with run_service(*words, ear=ear, cwd=tmp_path) as process:
        # etcd and stunnel get NOTIFY_SOCKET, too, but must not report for the whole.
        assert ear.receive(60) == (process.pid, ['READY=1', 'STATUS=etcd and placement answer at 127.0.0.1'])
        assert is_etcd_healthy(f'http://127.0.0.1:{etcd}')
        assert is_placement_ready(f'http://127.0.0.1:{placement}')
        assert [ear.receive() for _ in range(3)] == [(process.pid, HEARTBEAT)] * 3
        process.send_signal(signal.SIGTERM)
        assert ear.receive_until('STOPPING=1')[0] == process.pid
        assert process.wait(20) == 0
