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
import time
import urllib.request
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

import ecomp.agent
from ecomp.lab.control import etcd_healthy, placement_answers
from ecomp.model.order import Request, to_json
from tests.kit.commands import Control, Ecompute, run
from tests.kit.ear import Ear
from tests.kit.hands import settled
from tests.kit.hypervisor import Hypervisor
from tests.kit.invariants import check, everything
from tests.kit.many import Many
from tests.kit.servers import TOP, Etcd, environment, free_port, until
from tests.kit.story import IMAGE, SMALL, addressed, called, notified, one_line, place, reached, record, reserved
from tests.kit.tuned import patched, tuned
from tests.scenario.queued import overheard, queue

# The load of idle computes: threads of their process, calls to placement, operations of etcd.


# Length of a periodic check's interval in these tests, in place of a minute.
MINUTE = 0.5
MINUTES = 12
# Maximum number of periods, of INTERVALS each, that are measured.
TIMES = 4


def done(etcd: Etcd) -> Counter[str]:
    """Return etcd's own count of requests: {'KV/Range': …, 'Lease/LeaseKeepAlive': …}."""
    with urllib.request.urlopen(f'http://{etcd.endpoint}/metrics', timeout=10) as answer:
        text = answer.read().decode()
    rows = re.findall(
        r'^grpc_server_started_total\{grpc_method="(\w+)",grpc_service="etcdserverpb\.(\w+)".*\} (\d+)',
        text,
        re.MULTILINE,
    )
    return Counter({f'{service}/{method}': int(number) for method, service, number in rows})


@pytest.mark.parametrize('queues', [False, True])
def test_a_minute_of_one_is_one_question_and_no_write(cluster: Control, queues: bool) -> None:
    with overheard(cluster) as (placement, requested_paths):
        numbers = {'EVERY': MINUTE, 'NAMED': 1000, 'host.claims.BELIEVED': 1000}
        compute = tuned(cluster, numbers=numbers, placement=placement, queues=queues)
        addressed(cluster, notified(cluster.eschedule(SMALL))[1])
        provider = f'/resource_providers/{compute.uuid}'
        until(lambda: requested_paths[-4:] == [provider] * 4, 40, 'nothing has changed for a while')
        # Late work of a slow machine (the guest's last stage, a lease) falls into the first period; repeated writes
        # fall into every period.
        excess = [more_than_a_question(cluster.etcd, requested_paths, provider)]
        while excess[-1] and len(excess) < TIMES:
            excess.append(more_than_a_question(cluster.etcd, requested_paths, provider))
        assert not excess[-1], excess


def more_than_a_question(etcd: Etcd, asked: list[str], provider: str) -> Counter[str]:
    """Return the operations of INTERVALS beyond queries of the provider and lease renewals."""
    asked.clear()
    before = done(etcd)
    until(lambda: len(asked) >= MINUTES, 400, f'{MINUTES} minutes have passed')
    increase = done(etcd) - before + Counter(set(asked) - {provider})
    del increase['KV/Range'], increase['Lease/LeaseKeepAlive']
    return increase


def test_what_is_claimed_or_changed_is_looked_at(cluster: Control) -> None:
    with overheard(cluster) as (placement, requested_paths):
        numbers = {'EVERY': MINUTE, 'host.claims.BELIEVED': 1000}
        compute = tuned(cluster, numbers=numbers, placement=placement)
        provider = f'/resource_providers/{compute.uuid}'
        until(lambda: requested_paths[-4:] == [provider] * 4, 40, 'nothing has changed for a while')
        generation = cluster.placement.call('GET', provider)['generation']
        body = {'traits': ['COMPUTE_NODE'], 'resource_provider_generation': generation}
        cluster.placement.call('PUT', f'{provider}/traits', body)
        requested_paths.clear()
        until(
            lambda: {f'{provider}/allocations', f'{provider}/traits'} <= set(requested_paths),
            20,
            'all of it is looked at',
        )
        until(lambda: requested_paths[-4:] == [provider] * 4, 40, 'and then no more')


def threads(pid: int) -> int:
    return len(list(Path(f'/proc/{pid}/task').iterdir()))


def test_of_many_the_threads_are_as_those_of_a_few(cluster: Control) -> None:
    counts = []
    for count in (16, 64):
        many = Many(cluster, count, queues=True, state=f'state-{count}')
        many.start()
        for instance in [notified(cluster.eschedule(SMALL))[1] for _ in range(2)]:
            addressed(cluster, instance)
        counts.append(threads(many.pid))
        assert many.stop() == 0
    few_threads, many_threads = counts
    assert many_threads < 64, f'{few_threads} of 16 computes, {many_threads} of 64'


def test_an_idle_minute_of_many_is_one_question_for_all(cluster: Control) -> None:
    with overheard(cluster) as (placement, requested_paths):
        many = Many(cluster, 20, placement=placement, queues=True)
        many.start()
        computes = many.computes

        def have_published() -> bool:
            return all(b'"room"' in (cluster.etcd.get(f'/computes/{compute}') or b'') for compute in computes)

        until(have_published, 30, 'each has said what room it has, once')
        requested_paths.clear()
        before, cluster_key = done(cluster.etcd), cluster.etcd.get('/cluster')
        time.sleep(12)  # one renewal, and a fifth of a minute
        increase = done(cluster.etcd) - before
        assert increase['Lease/LeaseKeepAlive'] <= 2, 'one lease for all of them'
        assert increase['KV/Txn'] == increase['Lease/LeaseGrant'] == increase['KV/Put'] == 0
        assert set(requested_paths) <= {'/resource_providers'}, 'and none for each'
        assert len(computes) == 20
        assert cluster.etcd.get('/cluster') == cluster_key


# No command leaves a lease without a key in etcd: thousands of them would fill its memory for a day or a week.


# With the kit's patience factor it is shorter than the shortest lease of a command: 60 s of an attempt.
WAIT_SECONDS = 10.0


def leases_without_a_key(control: Control) -> set[str]:
    """Return the leases that have no key."""
    empty_leases = set()
    for lease in control.etcd.call('lease/leases', {}).get('leases', []):
        lease_state = control.etcd.call('lease/timetolive', {'ID': lease['ID'], 'keys': True})
        if int(lease_state.get('TTL', 0)) > 0 and not lease_state.get('keys'):
            empty_leases.add(lease['ID'])
    return empty_leases


@contextlib.contextmanager
def no_lease_left(control: Control) -> Iterator[None]:
    """Check that the block leaves no additional leases without a key."""
    before = leases_without_a_key(control)
    yield
    until(lambda: leases_without_a_key(control) <= before, WAIT_SECONDS, 'no lease without a key is left')


def fail(control: Control, compute: str, name: str = 'failed') -> str:
    """Make an instance in error, which keeps its name on its record's lease."""
    instance = str(uuid.uuid4())
    control.etcd.put(f'/hosts/{compute}/{instance}', json.dumps({'name': name}))
    reached(control, instance, 'error')
    return instance


@pytest.fixture
def user_data(tmp_path: Path) -> str:
    path = tmp_path / 'user-data'
    path.write_text('#!/bin/sh\n')
    return str(path)


def test_a_create_leaves_no_lease_without_a_key(small: Control, user_data: str) -> None:
    compute, instance = small.ecompute(), str(uuid.uuid4())
    with no_lease_left(small):
        for _ in range(2):
            assert called(small, '--uuid', instance, SMALL).code == 0
        assert called(small, '--count', '2', '--user-data', user_data, SMALL).code == 0
        assert called(small, '--count', '2', '--user-data', user_data, SMALL).code == 3
    settled(small, compute)


@pytest.mark.parametrize('words', [('--flavor', 'small', '--queue', IMAGE), ('--count', '2', SMALL, IMAGE)])
def test_the_same_user_data_stays_on_one_lease(small: Control, user_data: str, words: tuple[str, ...]) -> None:
    small.ecompute('VCPU:8,DISK_GB:10,MEMORY_MB:1024')
    with no_lease_left(small):
        for _ in range(3):
            assert called(small, '--user-data', user_data, *words).code == 0
    assert len(small.etcd.keys('/user-data/')) == 1


def test_user_data_on_a_short_lease_gets_one_of_its_own(small: Control, user_data: str) -> None:
    key = f'/user-data/{sha256(Path(user_data).read_bytes()).hexdigest()}'
    small.etcd.put(key, 'somebody else wrote this', small.etcd.grant(60))
    small.ecompute()
    assert called(small, '--count', '2', '--user-data', user_data, SMALL).code == 0
    lease_state = small.etcd.call('lease/timetolive', {'ID': everything(small)[key].lease})
    assert int(lease_state['TTL']) > 3600


def test_clear_ends_the_leases_of_what_it_removes(small: Control) -> None:
    compute = small.ecompute()
    with no_lease_left(small):
        instances = [place(small, SMALL)[1] for _ in range(2)]
        for instance_uuid in instances:
            addressed(small, instance_uuid)
        assert called(small, 'destroy', '--wait', *instances).code == 0
        fail(small, compute.uuid)
        compute.stop()
        assert called(small, 'destroy', queue(small)).code == 0
        assert called(small, 'clear').code == 0
    assert small.etcd.keys('/instances/') == []


def test_a_destroy_of_what_failed_ends_its_lease(small: Control) -> None:
    compute = small.ecompute()
    with no_lease_left(small):
        assert called(small, 'destroy', fail(small, compute.uuid)).code == 0
        # Another client writes the tombstone: the record becomes gone, on a lease of its own.
        instance = fail(small, compute.uuid)
        small.etcd.put(f'/hosts/{compute.uuid}/{instance}', to_json(Request(instance, {}, user_id='u', project_id='p')))
        reached(small, instance, 'gone')


def test_an_audit_leaves_no_lease_without_a_key(small: Control) -> None:
    compute = small.ecompute()
    with no_lease_left(small):
        settled(small, compute)


def test_a_host_that_is_forgotten_leaves_no_lease_without_a_key(small: Control) -> None:
    compute = small.ecompute()
    with no_lease_left(small):
        instance = place(small, SMALL)[1]
        addressed(small, instance)
        failed = fail(small, compute.uuid)
        compute.kill()
        small.etcd.call('lease/revoke', {'ID': everything(small)[f'/computes/{compute.uuid}'].lease})
        for instance_uuid in (instance, failed):
            assert called(small, 'destroy', instance_uuid).code == 0
        assert called(small, 'host', 'forget', '--fenced', compute.uuid).code == 0


# The threads of a running ecompute are in the table of ecomp.agent's docstring, and each name in it exists.


# Threads of every ecompute that carries out requests.
ALWAYS = frozenset(
    {
        *('turns', 'planner_N', 'build_N', 'task_N', 'minute_N', 'presence', 'audits_N', 'follow /hosts/'),
        *('follow /audit/', 'known etcd', 'etcd'),
    }
)
WITH_LIBVIRT = frozenset({'libvirt-events', 'libvirt-open', 'libvirt-reopen', 'to a worker', 'scrub', 'Thread-N'})


STARTS = ('Thread', 'ThreadPoolExecutor')
# Callables that start threads; for some modules there are more.
STARTERS = {'turns.py': ('Thread', 'TurnThreads')}


def named() -> set[str]:
    """Return the names in the table."""
    return set(re.findall(r'^    (\S.*?)  +\S', ecomp.agent.__doc__ or '', re.MULTILINE))


def met(trace: Path) -> set[str]:
    """Return the names in a trace, in the form of the table."""
    names = (re.sub('[0-9a-f]{8}-[0-9a-f-]{27}/', '', line) for line in trace.read_text().splitlines())
    return {re.sub(r'^Thread-\d+.*', 'Thread-N', re.sub(r'_\d+$', '_N', name)) for name in names}


class Traced(Many):
    """Fake computes that record the name of each thread that they start."""

    @property
    def trace(self) -> Path:
        return self.directory / 'threads'

    def command(self) -> list[str]:
        """Return the command that starts them with the recording patch."""
        python, _, _, *words = super().command()
        return [python, '-c', patched({}, self.trace), *words]


def test_pretended_computes_that_take_from_queues(cluster: Control) -> None:
    many = Traced(cluster, 2, queues=True)
    many.start()
    _, instance = notified(cluster.eschedule(SMALL))
    addressed(cluster, instance)
    assert cluster.eschedule('flavor', 'set', 'small', SMALL).code == 0
    reached(cluster, cluster.eschedule('--queue', '--flavor', 'small').stdout.split()[-1], 'active')
    until(lambda: met(many.trace) >= ALWAYS, 90, 'each of them was started')
    assert many.stop() == 0
    assert met(many.trace) == {*ALWAYS, 'confirm', 'queues_N', 'start_N', 'end_N'}
    assert met(many.trace) <= named()


def test_a_machine_s(host: Hypervisor, tmp_path: Path) -> None:
    trace = tmp_path / 'threads'
    host.kill()
    host.launch(trace=trace)
    host.wait_ready()
    host.ask_destroy(host.running())
    until(lambda: met(trace) >= ALWAYS | WITH_LIBVIRT, 90, 'each of them was started')
    assert met(trace) <= named()


def test_every_thread_that_the_product_starts_is_in_the_map() -> None:
    names = set()
    for room in ('agent', 'store', 'virt'):
        for path in (TOP / 'ecomp' / room).rglob('*.py'):
            if path.name == 'history.py':
                continue  # for eschedule alone: `events`
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(STARTERS.get(path.name, STARTS)):
                    arguments = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                    name = arguments.get('name') or arguments.get('thread_name_prefix')
                    if path.name == 'turns.py' and ast.unparse(node.func) == 'TurnThreads':
                        name = ast.unparse(node.args[0])
                    elif path.name == 'turns.py' and name != "'turns'":
                        continue  # one of TurnThreads, identified by that name
                    assert name, f'{path}:{node.lineno}: a thread without a name'
                    names.add(name.lstrip('f').strip("'").partition('{')[0])
    documented = {re.sub('_N$', '', documented_name) for documented_name in named()}
    assert {
        name for name in names if not any(documented_name.startswith(name) for documented_name in documented)
    } == set()
    matched = {
        documented_name for documented_name in documented if any(documented_name.startswith(name) for name in names)
    }
    assert documented - matched == {'main', 'Thread-N'}


# `ecompute --fake … --count N`: many fake computes in one process, each like one with its own process.


TOY = 'VCPU:4,DISK_GB:10,MEMORY_MB:512'


def test_five_in_one_process(cluster: Control) -> None:
    many = Many(cluster, 5)
    many.start()
    computes = many.computes
    assert len(computes) == 5
    log = many.log.read_text()
    assert set(re.findall(' ready: compute ([0-9a-f-]{36}), ', log)) == computes
    assert len(log.splitlines()) == 6  # a line for each, and one for all

    done = cluster.eschedule(SMALL, '--count', '20', '-f', 'json')
    assert done.code == 0, done
    placed = {row['instance']: row['compute'] for row in json.loads(done.stdout)}
    assert Counter(placed.values()) == dict.fromkeys(computes, 4)
    for instance, compute in placed.items():
        assert reached(cluster, instance, 'active')['compute'] == compute
        addressed(cluster, instance)
    refused = cluster.eschedule(SMALL)
    assert (refused.code, refused.stdout) == (3, 'NO ALLOCATIONS LEFT\n')
    check(cluster)
    assert cluster.eschedule('destroy', '--wait', *placed).code == 0

    assert many.stop() == 0
    assert many.computes == set()
    assert [reserved(cluster, compute) for compute in computes] == [4] * 5
    assert '5 computes are stopped' in many.last_words()
    assert list(cluster.directory.glob('ecompute-fake-*')) == []


@pytest.mark.slow
def test_killed_and_started_again_they_are_the_same(cluster: Control) -> None:
    many = Many(cluster, 5, state='state')
    many.start()
    computes = many.computes
    placed = dict(reversed(notified(cluster.eschedule(SMALL))) for _ in range(6))
    for instance in placed:
        addressed(cluster, instance)
    many.pause()
    # These requests are for computes that do not run now.
    unseen = notified(cluster.eschedule(SMALL))[1]
    destroyed, *remaining = placed
    assert cluster.eschedule('destroy', destroyed).code == 0
    many.kill()
    many.start()
    assert many.computes == computes
    addressed(cluster, unseen)
    until(
        lambda: (last_record := record(cluster, destroyed)) is None or last_record['state'] == 'gone',
        20,
        f'{destroyed} is gone',
    )
    for instance in remaining:
        assert reached(cluster, instance, 'active')['compute'] == placed[instance]
    assert {path.name for path in (cluster.directory / 'state').iterdir() if path.is_dir()} == set('12345')
    check(cluster)
    # A smaller count starts the first of them; the others come back with the larger count.
    assert many.stop() == 0
    many.count = 2
    many.start()
    first_computes = many.computes
    assert len(first_computes) == 2
    assert first_computes < computes
    assert many.stop() == 0
    many.count = 5
    many.start()
    assert many.computes == computes
    check(cluster)


@pytest.mark.slow
def test_they_take_from_queues(cluster: Control) -> None:
    many = Many(cluster, 5, queues=True)
    many.start()
    assert cluster.eschedule('flavor', 'set', 'small', SMALL).code == 0
    queued = [cluster.eschedule('--queue', '--flavor', 'small').stdout.split()[-1] for _ in range(15)]
    count_by_compute = Counter(reached(cluster, instance, 'active')['compute'] for instance in queued)
    assert count_by_compute.keys() <= many.computes
    assert max(count_by_compute.values()) <= 4
    check(cluster)
    assert cluster.eschedule('destroy', '--wait', *queued).code == 0


def test_two_processes_do_not_share_a_state(cluster: Control) -> None:
    many = Many(cluster, 2, state='state')
    many.start()
    second = run('ecomp.compute', '--fake', TOY, '--count', '2', directory=cluster.directory)
    one_line(second, 5, 'state', str(many.pid), command='ecompute')
    assert len(many.computes) == 2


@pytest.mark.parametrize(
    ('words', 'says'),
    [
        (['--count', '2'], '--count goes with --fake'),
        (['--fake', TOY, '--count', '2'], '--count 2: `uuid:` in the configuration names one compute'),
        (['--fake', TOY, '--count', '0'], "'0' is no number from 1 to "),
        (['--fake', TOY, '--count', 'many'], "'many' is no number from 1 to "),
        (['--fake', TOY, '--count'], '--count'),
    ],
)
def test_what_does_not_go_together(tmp_path: Path, words: list[str], says: str) -> None:
    (tmp_path / 'compute.yaml').write_text('uuid: 5ca1ab1e-0000-4000-8000-000000000000\n')
    one_line(run('ecomp.compute', *words, directory=tmp_path), 2, says, command='ecompute')


# Each daemon as a systemd service: it alone reports that it is ready, alive and stopping.


WATCHDOG = 1.0
BEAT = ['WATCHDOG=1']


class Served(Ecompute):
    """An ecompute with a notification socket."""

    ear: Ear

    def environment(self) -> dict[str, str]:
        """Return the environment, with the variables that systemd sets."""
        return {**super().environment(), **self.ear.environment(WATCHDOG)}


@pytest.fixture
def ear() -> Iterator[Ear]:
    with Ear() as started:
        yield started


def begun(control: Control, ear: Ear) -> Served:
    """Start a fake ecompute as a service."""
    compute = Served(control.etcd.endpoint, control.placement.url)
    compute.ear = ear
    return control.at_exit.enter_context(compute)


@pytest.mark.fast
def test_an_ecompute_is_ready_lives_and_ends(cluster: Control, ear: Ear) -> None:
    compute = begun(cluster, ear)
    ready = ear.heard()
    assert ready == (compute.pid, ['READY=1', ready[1][1]])
    assert ready[1][1].startswith('STATUS=pretended guests with VCPU 4 (0 reserved)')
    assert reserved(cluster, compute.uuid) == 0, 'by then requests may come'
    addressed(cluster, place(cluster)[1])
    assert [ear.heard() for _ in range(4)] == [(compute.pid, BEAT)] * 4, 'its workers say nothing'
    compute.pause()
    ear.forget()
    assert ear.is_silent(3 * WATCHDOG), 'the loop is frozen, so nothing says that it turns'
    compute.resume()
    assert ear.heard() == (compute.pid, BEAT)
    assert compute.stop() == 0
    assert ear.until('STOPPING=1')[0] == compute.pid
    assert ear.is_silent(0)


def test_an_ecompute_lives_while_etcd_and_placement_are_away(own_control: Control, ear: Ear) -> None:
    compute = begun(own_control, ear)
    assert ear.heard()[1][0] == 'READY=1'
    own_control.etcd.pause()
    own_control.placement.pause()
    ear.forget()
    assert [ear.heard(2 * WATCHDOG) for _ in range(12)] == [(compute.pid, BEAT)] * 12
    own_control.etcd.resume()
    own_control.placement.resume()


def test_an_ecompute_that_cannot_start_is_never_ready(tmp_path: Path, ear: Ear) -> None:
    port = free_port()
    compute = Served(f'127.0.0.1:{port}', f'http://127.0.0.1:{port}', directory=tmp_path)
    compute.ear = ear
    assert compute.launch()._process is not None
    assert compute._process.wait(60) == 7
    compute.close()
    assert ear.is_silent(0)


@contextmanager
def running(*words: str, ear: Ear, cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python command as a service."""
    env = environment() | ear.environment(WATCHDOG)
    with (cwd / 'log').open('wb') as log:
        process = subprocess.Popen([sys.executable, *words], cwd=cwd, env=env, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_metadata_server_is_ready_when_it_listens(tmp_path: Path, ear: Ear) -> None:
    port = free_port()
    words = [str(TOP / 'md_server/mdserver/server.py'), '--listen', f'127.0.0.1:{port}', '--guests', str(tmp_path)]
    with running(*words, ear=ear, cwd=tmp_path) as process:
        assert ear.heard() == (process.pid, ['READY=1'])
        connection = http.client.HTTPConnection('127.0.0.1', port, timeout=10)
        connection.request('GET', '/')
        assert connection.getresponse().status == 200
        process.terminate()
        assert process.wait(20) == 0


def test_a_control_host_is_ready_when_both_answer(tmp_path: Path, ear: Ear) -> None:
    etcd, placement = free_port(), free_port()
    words = ['-m', 'ecomp.lab.elab', 'control', '--etcd-port', str(etcd), '--placement-port', str(placement)]
    with running(*words, ear=ear, cwd=tmp_path) as process:
        # etcd and stunnel get NOTIFY_SOCKET, too, but must not report for the whole.
        assert ear.heard(60) == (process.pid, ['READY=1', 'STATUS=etcd and placement answer at 127.0.0.1'])
        assert etcd_healthy(f'http://127.0.0.1:{etcd}')
        assert placement_answers(f'http://127.0.0.1:{placement}')
        assert [ear.heard() for _ in range(3)] == [(process.pid, BEAT)] * 3
        process.send_signal(signal.SIGTERM)
        assert ear.until('STOPPING=1')[0] == process.pid
        assert process.wait(20) == 0
