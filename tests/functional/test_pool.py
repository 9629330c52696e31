"""Test the worker pool, its builds that share images, and the number of calls of a build."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from ecomp.agent.images.cache import FakeImages
from ecomp.agent.instance.build import Build, Cancelled, Destroy, WorkerDied
from ecomp.agent.instance.pool import InlineRunner, JobEvent
from ecomp.errors import BuildFailed, EcompError
from ecomp.files import InstanceLocks
from ecomp.model import keys
from ecomp.model.order import Request, SetOrder
from ecomp.model.record import Progress
from ecomp.model.states import ACTIVE
from ecomp.model.stored import encode
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import MAX_INSTANCES_PER_CALL
from ecomp.store.client import Delete, Put, Store
from ecomp.virt.fake import FakeHypervisor
from tests.functional import stand_in
from tests.functional.cloud import IMAGE, RESOURCES, Cloud, make_uuid
from tests.functional.tended import ALL_STAGES, COMPUTE, TendedPool, make_job, make_shared_image_job
from tests.functional.toy import ToyCompute
from tests.kit.image_server import serve_images
from tests.kit.servers import SLOWDOWN_FACTOR, make_environment, wait_until
from tests.kit.warm import CONTEXT

# The worker pool with real processes: jobs whose worker fails or is killed, and cancelled jobs.
#
# The workers run the real loop with the jobs of stand_in.py. The test's main thread tends the pool, as ecompute's does.


PARENT_SCRIPT = """
import os, sys
from pathlib import Path
from ecomp.agent.instance.pool import Workers
from ecomp.agent.instance.pool import WorkerSettings
from ecomp.compute_conf import ComputeConfig
from tests.functional import stand_in, tended

if __name__ == '__main__':
    state = Path(sys.argv[1])
    settings = WorkerSettings(ComputeConfig(state=state), os.getpid(), tended.LIMITS, False)
    pool = Workers(2, settings, stand_in.run_worker)
    pool.run(tended.make_job('stubborn', sys.argv[2]))
    while True:
        pool.tend(60)
"""


def is_dead(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_worker_does_jobs_one_after_another(pool: TendedPool) -> None:
    first, second = make_job('good'), make_job('good')
    results = [pool.submit(work) for work in (first, second)]
    assert [pool.wait_for_result(work) for work in results] == [ALL_STAGES, ALL_STAGES]
    assert pool.wait_for_pid(first) == pool.wait_for_pid(second) != os.getpid()
    assert pool.list_guests() == {first.spec.instance, second.spec.instance}
    assert pool.wait_for_result(pool.submit(Destroy(first.spec.instance, COMPUTE))) == []
    assert pool.list_guests() == {second.spec.instance}


def test_stages_are_reported_when_they_are_reached(pool: TendedPool) -> None:
    work = make_job('good')
    stages = pool.pool.run(work)
    reports: list[JobEvent] = []
    reading = ThreadPoolExecutor(1)
    for stage in ALL_STAGES:
        following = reading.submit(next, stages)
        pool.tend_until(following.done, f'{stage} is told')
        reports.append(following.result())
    assert reports == ALL_STAGES
    reading.shutdown()


def test_build_failure_is_reported_and_the_worker_survives(pool: TendedPool) -> None:
    failing = make_job('fails')
    error = pool.wait_for_error(pool.submit(failing))
    assert isinstance(error, BuildFailed)
    assert (error.stage, error.reason) == ('image', 'it was told to')
    good = make_job('good')
    assert pool.wait_for_result(pool.submit(good)) == ALL_STAGES
    assert pool.wait_for_pid(failing) == pool.wait_for_pid(good)
    assert pool.list_guests() == {good.spec.instance}


def test_unexpected_error_fails_only_its_job(pool: TendedPool) -> None:
    breaking = make_job('breaks')
    error = pool.wait_for_error(pool.submit(breaking))
    assert type(error) is EcompError
    assert str(error) == 'ZeroDivisionError: nobody thought of it'
    good = make_job('good')
    assert pool.wait_for_result(pool.submit(good)) == ALL_STAGES
    assert pool.wait_for_pid(breaking) == pool.wait_for_pid(good)


def test_killed_worker_fails_its_job_and_is_replaced(pool_of_two: TendedPool) -> None:
    killed, neighbour = make_job('stubborn'), make_job('stubborn')
    killed_result, neighbour_result = pool_of_two.submit(killed), pool_of_two.submit(neighbour)
    pid = pool_of_two.wait_for_pid(killed)
    assert pool_of_two.wait_for_pid(neighbour) != pid
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    error = pool_of_two.wait_for_error(killed_result)
    assert time.monotonic() - began < SLOWDOWN_FACTOR * 1.0
    assert isinstance(error, WorkerDied)
    assert 'ended during the job (exit code -9)' in str(error)
    # A new worker replaced it, and the other worker was not affected.
    assert pool_of_two.wait_for_result(pool_of_two.submit(make_job('good'))) == ALL_STAGES
    assert not neighbour_result.done()
    (pool_of_two.directory / 'go').touch()
    assert pool_of_two.wait_for_result(neighbour_result) == ALL_STAGES


def test_worker_killed_while_idle_is_replaced(pool: TendedPool) -> None:
    first = make_job('good')
    pool.wait_for_result(pool.submit(first))
    pid = pool.wait_for_pid(first)
    os.kill(pid, signal.SIGKILL)
    # The next tend notices the death. Without it, the next job would go to the dead worker and fail.
    pool.tend_until(lambda: pid not in [worker.process.pid for worker in pool.pool._workers], 'the worker is gone')
    second = make_job('good')
    assert pool.wait_for_result(pool.submit(second)) == ALL_STAGES
    assert pool.wait_for_pid(second) != pool.wait_for_pid(first)


def test_every_job_of_repeatedly_killed_workers_fails(pool_of_two: TendedPool) -> None:
    jobs = [make_job('waits') for _ in range(6)]
    handed = [pool_of_two.submit(queued_job) for queued_job in jobs]
    for work, future in zip(jobs, handed, strict=True):
        os.kill(pool_of_two.wait_for_pid(work), signal.SIGKILL)
        assert isinstance(pool_of_two.wait_for_error(future), WorkerDied)


def test_worker_ignores_terminal_signals(pool: TendedPool) -> None:
    # Ctrl-C signals the terminal's whole process group; closing the terminal sends SIGHUP.
    work = make_job('stubborn')
    handed = pool.submit(work)
    pid = pool.wait_for_pid(work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    (pool.directory / 'go').touch()
    assert pool.wait_for_result(handed) == ALL_STAGES


def test_queued_build_is_cancelled_immediately(pool: TendedPool) -> None:
    active_job, queued_job = make_job('stubborn'), make_job('good')
    handed = pool.submit(active_job)
    pool.wait_for_pid(active_job)
    queued_result = pool.submit(queued_job)
    pool.tend_until(lambda: len(pool.pool._waiting) == 1, 'the second job waits')
    pool.pool.cancel(queued_job.spec.instance)
    assert isinstance(pool.wait_for_error(queued_result), Cancelled)
    (pool.directory / 'go').touch()
    assert pool.wait_for_result(handed) == ALL_STAGES
    assert not (pool.directory / f'{queued_job.spec.instance}.pid').exists()


def test_cancelled_build_undoes_itself(pool: TendedPool) -> None:
    work = make_job('waits')
    handed = pool.submit(work)
    pool.wait_for_pid(work)
    for _ in range(3):  # the planner repeats it, too
        pool.pool.cancel(work.spec.instance)
    assert isinstance(pool.wait_for_error(handed), Cancelled)
    assert pool.list_guests() == set()
    # The cancellation does not affect a later job of the same instance.
    next_job = make_job('good', work.spec.instance)
    assert pool.wait_for_result(pool.submit(next_job)) == ALL_STAGES


def test_cancelling_all_builds_prevents_later_builds(pool: TendedPool) -> None:
    """Check that destroys are still carried out."""
    active_job, queued_job, later_job = make_job('waits'), make_job('good'), make_job('good')
    handed = [pool.submit(active_job)]
    pool.wait_for_pid(active_job)
    handed.append(pool.submit(queued_job))
    pool.tend_until(lambda: len(pool.pool._waiting) == 1, 'the second job waits')
    pool.pool.cancel(None)
    handed.append(pool.submit(later_job))
    assert [type(pool.wait_for_error(result)) for result in handed] == [Cancelled] * 3
    assert pool.wait_for_result(pool.submit(Destroy(later_job.instance, COMPUTE))) == []


def test_late_cancellation_affects_no_other_job(pool: TendedPool) -> None:
    work, next_job = make_job('good'), make_job('waits')
    assert pool.wait_for_result(pool.submit(work)) == ALL_STAGES
    pool.pool.cancel(work.spec.instance)
    pool.pool.cancel(str(uuid.uuid4()))
    handed = pool.submit(next_job)
    pool.wait_for_pid(next_job)
    (pool.directory / 'go').touch()
    assert pool.wait_for_result(handed) == ALL_STAGES


def test_destroy_waits_for_no_build_and_is_not_cancelled(pool: TendedPool) -> None:
    build, instance = make_job('stubborn'), str(uuid.uuid4())
    handed = pool.submit(build)
    pool.wait_for_pid(build)
    destroying = pool.submit(Destroy(instance, COMPUTE))
    pool.pool.cancel(instance)
    assert pool.wait_for_result(destroying) == []
    assert not handed.done()
    (pool.directory / 'go').touch()
    assert pool.wait_for_result(handed) == ALL_STAGES


def test_wake_ends_a_tend(pool: TendedPool) -> None:
    pool.pool.tend(0)
    for _ in range(100_000):  # more than the pipe holds
        pool.pool.waker.wake()
    began = time.monotonic()
    pool.pool.tend(60)
    assert time.monotonic() - began < SLOWDOWN_FACTOR * 10


def test_stop_ends_all_workers(tmp_path: Path) -> None:
    tended = TendedPool(tmp_path, 2)
    jobs = [make_job('good'), make_job('good')]
    for handed in [tended.submit(process) for process in jobs]:
        tended.wait_for_result(handed)
    workers = [worker.process.pid or 0 for worker in tended.pool._workers]
    assert len(workers) == 3, 'two, and one for destroys'
    tended.close()
    assert all(is_dead(pid) for pid in workers)


def test_stop_during_a_job_ends_its_worker(tmp_path: Path) -> None:
    tended = TendedPool(tmp_path, 1)
    work = make_job('waits')
    handed = tended.submit(work)
    pid = tended.wait_for_pid(work)
    began = time.monotonic()
    tended.pool.stop()
    assert time.monotonic() - began < SLOWDOWN_FACTOR * 10
    assert is_dead(pid)
    assert isinstance(handed.exception(10), WorkerDied)
    assert tended.list_guests() == set()


def test_job_fails_if_workers_cannot_start(tmp_path: Path) -> None:
    tended = TendedPool(tmp_path, 1, stand_in.fail_to_start)
    handed = tended.submit(make_job('good'))
    assert isinstance(tended.wait_for_error(handed), WorkerDied)
    tended.close()


def _list_worker_pids(parent: int) -> list[int]:
    children = psutil.Process(parent).children(recursive=True)
    return [process.pid for process in children if 'spawn_main' in ' '.join(process.cmdline())]


def test_workers_die_with_a_killed_parent(tmp_path: Path) -> None:
    instance = str(uuid.uuid4())
    (tmp_path / 'parent.py').write_text(PARENT_SCRIPT)
    command = [sys.executable, str(tmp_path / 'parent.py'), str(tmp_path), instance]
    with subprocess.Popen(command, env=make_environment()) as parent:
        try:
            wait_until((tmp_path / f'{instance}.pid').exists, 30, 'a worker is in the middle of a job')
            wait_until(lambda: len(_list_worker_pids(parent.pid)) == 3, 30, 'two workers, and one for destroys')
            workers = _list_worker_pids(parent.pid)
        finally:
            parent.kill()
    wait_until(lambda: all(is_dead(pid) for pid in workers), 5, 'the workers die with their parent')


# The pool without processes


def test_inline_pool_runs_jobs_in_the_caller() -> None:
    hypervisor = FakeHypervisor()
    inline = InlineRunner(hypervisor, FakeImages())
    work = make_job('good')
    assert list(inline.run(work)) == ALL_STAGES
    assert set(hypervisor.list_guests()) == {work.spec.instance}
    assert list(inline.run(Destroy(work.spec.instance, COMPUTE))) == []
    assert hypervisor.list_guests() == {}
    inline.cancel(work.spec.instance)
    with pytest.raises(Cancelled):
        inline.run(work)
    assert hypervisor.list_guests() == {}
    assert list(inline.run(work)) == ALL_STAGES
    inline.waker.wake()
    inline.tend(60)


def test_blocked_destroys_do_not_block_another(pool: TendedPool) -> None:
    """Check four blocked destroys, which stand for a QEMU that is slow to end."""
    locks, instances = InstanceLocks(pool.directory), [str(uuid.uuid4()) for _ in range(4)]
    with ExitStack() as holding:
        for instance in instances:
            holding.enter_context(locks.hold(instance, lambda: None))
        waiting = [pool.submit(Destroy(instance, COMPUTE)) for instance in instances]
        assert pool.wait_for_result(pool.submit(Destroy(str(uuid.uuid4()), COMPUTE))) == []
        assert not any(future.done() for future in waiting)
    assert [pool.wait_for_result(future) for future in waiting] == [[]] * 4


def test_killed_worker_fails_all_its_destroys(pool: TendedPool) -> None:
    locks, instances = InstanceLocks(pool.directory), [str(uuid.uuid4()) for _ in range(3)]
    with ExitStack() as holding:
        for instance in instances:
            holding.enter_context(locks.hold(instance, lambda: None))
        waiting = [pool.submit(Destroy(instance, COMPUTE)) for instance in instances]
        pool.tend_until(
            lambda: sum(len(pool_worker.tickets) for pool_worker in pool.pool._workers) == 3, 'all are in work'
        )
        for worker in list(pool.pool._workers):
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGKILL)
        assert [type(pool.wait_for_error(future)) for future in waiting] == [WorkerDied] * 3
    assert pool.wait_for_result(pool.submit(Destroy(instances[0], COMPUTE))) == []


def test_frozen_worker_with_a_large_job_blocks_nothing(pool_of_two: TendedPool) -> None:
    """Check a seed that exceeds the pipe's buffer: handing in and cancelling must not block."""
    first, second, last = (pool_of_two.submit(make_job('good')) for _ in range(3))
    for future in (first, second, last):
        pool_of_two.wait_for_result(future)
    frozen = [worker.process.pid for worker in pool_of_two.pool._workers if not worker.is_stop_only]
    for pid in frozen:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    large = [make_job('good') for _ in frozen]
    handed = [
        pool_of_two.submit(Build(replace(large_job.spec, seed={'user-data': os.urandom(2**21)}), large_job.image))
        for large_job in large
    ]
    pool_of_two.tend_until(
        lambda: all(worker.tickets for worker in pool_of_two.pool._workers if not worker.is_stop_only),
        'both have a job',
    )
    destroyed = str(uuid.uuid4())
    assert pool_of_two.wait_for_result(pool_of_two.submit(Destroy(destroyed, COMPUTE))) == [], 'others work'
    pool_of_two.pool.cancel(large[0].instance)
    for pid in frozen:
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
    assert isinstance(pool_of_two.wait_for_error(handed[0]), Cancelled | None)
    assert pool_of_two.wait_for_result(handed[1]) == ALL_STAGES


@pytest.mark.parametrize('error', [BlockingIOError(11, 'no process left'), RuntimeError("can't start new thread")])
def test_failed_worker_start_is_retried(
    pool: TendedPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """A temporary limit on processes is logged once."""
    process_type, failures = CONTEXT.Process, [error] * 3
    real = process_type.start

    def start(process: BaseProcess) -> None:
        if failures:
            raise failures.pop()
        real(process)

    monkeypatch.setattr(process_type, 'start', start)
    descriptors = len(os.listdir('/proc/self/fd'))
    while failures:
        pool.pool.tend(0.05)
    wait_until(lambda: len(os.listdir('/proc/self/fd')) <= descriptors + 2, 20, 'nothing is left open of those')
    assert pool.wait_for_result(pool.submit(make_job('good'))) == ALL_STAGES
    assert caplog.text.count('a worker cannot be started') == 1


# The worker pool and images: builds that wait for a download, and builds that need not wait.


LOCK_HOLDER_SCRIPT = """
import sys, time
from pathlib import Path
from ecomp.files import InstanceLocks

with InstanceLocks(Path(sys.argv[1])).hold(sys.argv[2], lambda: None):
    print('held', flush=True)
    time.sleep(60)
"""


def start_builds_of_one_image(tended: TendedPool, kind: str, count: int) -> list[Future[list[JobEvent]]]:
    handed = [tended.submit(make_shared_image_job(kind)) for _ in range(count)]
    tended.tend_until((tended.directory / f'{kind}.pid').exists, 'somebody fetches it')
    tended.tend_until(lambda: len(tended.pool._waiting) == count - 1, 'the others wait')
    return handed


def test_builds_waiting_for_an_image_block_no_other_build(pool_of_two: TendedPool) -> None:
    handed = start_builds_of_one_image(pool_of_two, 'comes', 5)
    (pool_of_two.directory / 'comes.pid').unlink()
    # There are two workers, so another image can be fetched concurrently.
    assert pool_of_two.wait_for_result(pool_of_two.submit(make_job('good'))) == ALL_STAGES
    assert pool_of_two.wait_for_result(pool_of_two.submit(make_shared_image_job('good'))) == ALL_STAGES
    assert not (pool_of_two.directory / 'comes.pid').exists()
    (pool_of_two.directory / 'go').touch()
    for future in handed:
        reports = pool_of_two.wait_for_result(future)
        assert reports[0] == Progress('image', 34, 600), 'also those that wait are told how far it is'
        assert [news for news in reports if not isinstance(news, Progress)] == ALL_STAGES


def test_slow_downloads_do_not_block_builds_of_cached_images(
    pool_of_two: TendedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that both workers get replacements until their downloads are finished."""
    monkeypatch.setattr('ecomp.agent.instance.pool.MAX_EXTRA_WORKERS', 8)
    drips = [make_job('comes'), make_job('comes')]
    handed = [pool_of_two.submit(drip) for drip in drips]
    busy = {pool_of_two.wait_for_pid(drip) for drip in drips}
    for _ in range(3):
        work = make_job('good')
        assert pool_of_two.wait_for_result(pool_of_two.submit(work)) == ALL_STAGES
        assert pool_of_two.wait_for_pid(work) not in busy
    assert not any(future.done() for future in handed)
    assert len(pool_of_two.pool._workers) <= 3 + len(drips)
    (pool_of_two.directory / 'go').touch()
    for future in handed:
        assert pool_of_two.wait_for_result(future)[-3:] == ALL_STAGES
    pool_of_two.tend_until(lambda: len(pool_of_two.pool._workers) == 3, 'there are as many as before')
    pool_of_two.tend_until(lambda: not pool_of_two.pool._dismissed, 'the others have ended')
    assert len([worker for worker in pool_of_two.pool._workers if worker.is_stop_only]) == 1


def test_builds_of_a_cached_image_share_one_server_check(tmp_path: Path) -> None:
    tended = TendedPool(tmp_path, 2, stand_in.run_downloading_worker)
    with serve_images(b'\0' * 510 + b'\x55\xaa') as web:
        web.headers = {'etag': '"1"'}
        for count in (1, 6):
            before = web.requests.count('good')
            handed = [
                tended.submit(replace(make_shared_image_job('good'), image=web.url + 'good')) for _ in range(count)
            ]
            wait_until(lambda all_of_them=count: len(tended.pool._waiting) == all_of_them, 20, 'all are handed in')
            for future in handed:
                assert [news for news in tended.wait_for_result(future) if isinstance(news, str)] == ALL_STAGES
        assert web.requests.count('good') == before + 1
        tended.close()


def test_number_of_extra_workers_for_downloads_is_limited(
    pool_of_two: TendedPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('ecomp.agent.instance.pool.MAX_EXTRA_WORKERS', 1)
    drips = [make_job('comes') for _ in range(4)]
    handed = [pool_of_two.submit(drip) for drip in drips]
    for drip in drips[:3]:
        pool_of_two.wait_for_pid(drip)
    assert len(pool_of_two.pool._workers) == 3 + 1
    assert pool_of_two.wait_for_result(pool_of_two.submit(Destroy(str(uuid.uuid4()), COMPUTE))) == []
    assert not (pool_of_two.directory / f'{drips[3].instance}.pid').exists()
    (pool_of_two.directory / 'go').touch()
    for future in handed:
        assert pool_of_two.wait_for_result(future)[-3:] == ALL_STAGES


def test_download_failure_fails_all_waiting_builds(pool_of_two: TendedPool) -> None:
    handed = start_builds_of_one_image(pool_of_two, 'stalls', 5)
    (pool_of_two.directory / 'stalls.pid').unlink()
    (pool_of_two.directory / 'go').touch()
    for future in handed:
        error = pool_of_two.wait_for_error(future)
        assert isinstance(error, BuildFailed)
        assert (error.stage, error.reason) == ('image', 'it was told to, later')
    assert not (pool_of_two.directory / 'stalls.pid').exists(), 'nobody has tried again'
    assert pool_of_two.list_guests() == set()


def test_download_of_a_killed_worker_is_repeated_by_another(pool_of_two: TendedPool) -> None:
    handed = start_builds_of_one_image(pool_of_two, 'comes', 3)
    path = pool_of_two.directory / 'comes.pid'
    pid = int(path.read_text())
    path.unlink()
    os.kill(pid, signal.SIGKILL)
    pool_of_two.tend_until(path.exists, 'somebody else fetches it')
    (pool_of_two.directory / 'go').touch()
    outcomes = [pool_of_two.wait_for_error(future) for future in handed]
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ['NoneType', 'NoneType', 'WorkerDied']


def test_build_blocked_by_a_lock_does_not_block_its_image(pool_of_two: TendedPool) -> None:
    blocked = make_shared_image_job('good')
    with subprocess.Popen(
        [sys.executable, '-c', LOCK_HOLDER_SCRIPT, str(pool_of_two.directory), blocked.instance],
        env=make_environment(),
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        waiting = pool_of_two.submit(blocked)
        pool_of_two.tend_until(lambda: not pool_of_two.pool._waiting, 'a worker has it')
        assert pool_of_two.wait_for_result(pool_of_two.submit(make_shared_image_job('good'))) == ALL_STAGES
        assert not waiting.done()
        holder.kill()
    assert pool_of_two.wait_for_result(waiting) == ALL_STAGES


# The exact number of calls to placement and etcd of a set, a build and a destroy.
#
# Change a number here together with the code that changes it, and give the reason in the commit.


# Each call of one of these methods is one call to etcd.
STORE_METHODS = ('get', 'read', 'snapshot', 'count', 'read_revision', 'commit', 'grant', 'keep_alive', 'revoke')


@pytest.fixture
def call_counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Provide a counter of calls, with keys like `etcd get` and `placement PUT /allocations`."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def count_calls(server: str, kind: type, name: str, label: Callable[..., str]) -> None:
        real = getattr(kind, name)

        @functools.wraps(real)
        def call(self: Any, *args: Any, **named: Any) -> Any:
            with lock:
                counts[f'{server} {label(*args)}'] += 1
            return real(self, *args, **named)

        monkeypatch.setattr(kind, name, call)

    count_calls('placement', Placement, 'get', lambda path: f'GET /{path.split("/")[1].split("?")[0]}')
    count_calls('placement', Placement, 'write', lambda method, path, _: f'{method} /{path.split("/")[1]}')
    for name in STORE_METHODS:
        count_calls('etcd', Store, name, lambda *_, name=name: name)
    return counts


def count_calls_of_due_tasks(toy_compute: ToyCompute, call_counts: Counter[str]) -> Counter[str]:
    """Count the calls of due tasks without planning: one step plans all instances together."""
    work = toy_compute.plan()
    call_counts.clear()
    for task in work:
        toy_compute.planner.begin(task)
        toy_compute.planner.carry_out(task)
    assert work
    return Counter(call_counts)


@pytest.mark.parametrize(('count', 'claims'), [(MAX_INSTANCES_PER_CALL, 1), (2 * MAX_INSTANCES_PER_CALL, 2)])
def test_number_of_calls_to_place_a_set(cloud: Cloud, call_counts: Counter[str], count: int, claims: int) -> None:
    computes = {cloud.make_compute(VCPU=16, MEMORY_MB=1024, DISK_GB=16) for _ in range(10)}
    aggregate = make_uuid()  # only these: other tests' computes are in the same placement
    for compute in computes:
        path = f'/resource_providers/{compute}'
        body = {'aggregates': [aggregate], 'resource_provider_generation': cloud.placement.get(path)['generation']}
        cloud.placement.write('PUT', f'{path}/aggregates', body)
    owner_and_size = {'user_id': 'a', 'project_id': 'b', 'count': count, 'minimum': count}
    order = SetOrder(make_uuid(), query=f'{RESOURCES}&member_of={aggregate}', image=IMAGE, **owner_and_size)
    call_counts.clear()
    placed = cloud.create_all(order)
    assert Counter(outcome.compute for outcome in placed.values()) == dict.fromkeys(computes, count // 10)
    # In order: quota, lease, attempt, computes, troubles, other attempts, facts, quota again, delivery, lease.
    assert call_counts == {
        **{'placement GET /allocation_candidates': 1, 'placement POST /allocations': claims},
        **{'etcd get': 2, 'etcd grant': 1, 'etcd snapshot': 3, 'etcd read': 1, 'etcd commit': 2, 'etcd revoke': 1},
    }


def test_number_of_calls_of_a_build_and_a_destroy(
    toy_compute: ToyCompute, cloud: Cloud, call_counts: Counter[str]
) -> None:
    instance = toy_compute.place()
    # One query for the claim (rule: confirmed-claim). The record: missing, then building with addresses, image, disk,
    # active.
    assert count_calls_of_due_tasks(toy_compute, call_counts) == {
        'placement GET /allocations': 1,
        'etcd get': 1,
        'etcd commit': 4,
    }
    assert toy_compute.read_record(instance).state == 'active'
    tombstone = Request(instance, {}, image=None, user_id='me', project_id='us')
    assert cloud.store.commit([], [Put(keys.request(toy_compute.compute, instance), encode(tombstone))])
    # The claim's generation and release; records: destroying, then gone on a lease; the project's quota.
    assert count_calls_of_due_tasks(toy_compute, call_counts) == {
        **{'placement GET /allocations': 1, 'placement PUT /allocations': 1},
        **{'etcd get': 1, 'etcd grant': 1, 'etcd commit': 2},
    }
    assert cloud.store.get(keys.request(toy_compute.compute, instance)) is None


def test_recheck_reads_all_records_in_one_call(
    toy_compute: ToyCompute, cloud: Cloud, call_counts: Counter[str]
) -> None:
    instances = {toy_compute.place() for _ in range(5)}
    for _ in range(2):
        toy_compute.step()
    call_counts.clear()
    toy_compute.planner.recheck()
    assert call_counts == {'etcd snapshot': 1}
    removed = instances.pop()
    cloud.store.commit([], [Delete(keys.record(toy_compute.compute, removed))])
    toy_compute.planner.recheck()
    call_counts.clear()
    # The deleted record counts as never written, so the build writes it again.
    assert toy_compute.step() == [f'build {removed}']
    assert toy_compute.read_record(removed).state == ACTIVE
