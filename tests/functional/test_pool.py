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
from functools import partial
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from ecomp.agent.images.cache import FakeImages
from ecomp.agent.instance.build import Build, Cancelled, Destroy, WorkerDied
from ecomp.agent.instance.pool import Inline, News
from ecomp.errors import BuildFailed, EcompError
from ecomp.files import InstanceLocks
from ecomp.model import keys
from ecomp.model.order import Request, SetOrder, to_json
from ecomp.model.record import ACTIVE, Progress
from ecomp.placement.client import Placement
from ecomp.scheduler.placing.claim import BLOCK
from ecomp.store.client import Delete, Put, Store
from ecomp.virt.fake import FakeHypervisor
from tests.functional import stand_in
from tests.functional.cloud import IMAGE, RESOURCES, Cloud, new
from tests.functional.tended import ALL, COMPUTE, Tended, job, same
from tests.functional.toy import Toy
from tests.kit.image_server import serving
from tests.kit.servers import PATIENCE, environment, until

# The worker pool with real processes: jobs whose worker fails, is killed, is cancelled or is orphaned.
#
# The workers run the real loop with the jobs of stand_in.py. The test's main thread tends the pool, as ecompute's does.

PARENT = """
import os, sys
from pathlib import Path
from ecomp.agent.instance.pool import Workers
from ecomp.agent.instance.pool import WorkerSettings
from tests.functional import stand_in, tended

if __name__ == '__main__':
    state = Path(sys.argv[1])
    pool = Workers(2, WorkerSettings(state, None, os.getpid(), tended.LIMITS, False), stand_in.entry)
    pool.run(tended.job('stubborn', sys.argv[2]))
    while True:
        pool.tend(60)
"""


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_jobs_are_done_one_after_another_by_the_same_worker(pool: Tended) -> None:
    first, second = job('good'), job('good')
    results = [pool.hand_in(work) for work in (first, second)]
    assert [pool.result(work) for work in results] == [ALL, ALL]
    assert pool.pid(first) == pool.pid(second) != os.getpid()
    assert pool.guests() == {first.spec.instance, second.spec.instance}
    assert pool.result(pool.hand_in(Destroy(first.spec.instance, COMPUTE))) == []
    assert pool.guests() == {second.spec.instance}


def test_stages_are_told_as_they_are_reached(pool: Tended) -> None:
    work = job('good')
    stages = pool.pool.run(work)
    reports: list[News] = []
    reading = ThreadPoolExecutor(1)
    for stage in ALL:
        following = reading.submit(next, stages)
        pool.tend_until(following.done, f'{stage} is told')
        reports.append(following.result())
    assert reports == ALL
    reading.shutdown()


def test_a_failure_comes_whole_and_the_worker_goes_on(pool: Tended) -> None:
    failing = job('fails')
    error = pool.error(pool.hand_in(failing))
    assert isinstance(error, BuildFailed)
    assert (error.stage, error.reason) == ('image', 'it was told to')
    good = job('good')
    assert pool.result(pool.hand_in(good)) == ALL
    assert pool.pid(failing) == pool.pid(good)
    assert pool.guests() == {good.spec.instance}


def test_an_error_nobody_thought_of_fails_the_job_alone(pool: Tended) -> None:
    breaking = job('breaks')
    error = pool.error(pool.hand_in(breaking))
    assert type(error) is EcompError
    assert str(error) == 'ZeroDivisionError: nobody thought of it'
    good = job('good')
    assert pool.result(pool.hand_in(good)) == ALL
    assert pool.pid(breaking) == pool.pid(good)


def test_a_killed_worker_s_job_is_told_at_once_and_the_next_is_done(pair: Tended) -> None:
    killed, neighbour = job('stubborn'), job('stubborn')
    killed_result, neighbour_result = pair.hand_in(killed), pair.hand_in(neighbour)
    pid = pair.pid(killed)
    assert pair.pid(neighbour) != pid
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    error = pair.error(killed_result)
    assert time.monotonic() - began < PATIENCE * 1.0
    assert isinstance(error, WorkerDied)
    assert 'ended in the middle of it (-9)' in str(error)
    # A new worker replaced it, and the other worker was not affected.
    assert pair.result(pair.hand_in(job('good'))) == ALL
    assert not neighbour_result.done()
    (pair.directory / 'go').touch()
    assert pair.result(neighbour_result) == ALL


def test_a_worker_killed_while_it_has_nothing_to_do_is_replaced(pool: Tended) -> None:
    first = job('good')
    pool.result(pool.hand_in(first))
    pid = pool.pid(first)
    os.kill(pid, signal.SIGKILL)
    # The next tend notices the death. Without it, the next job would go to the dead worker and fail.
    pool.tend_until(lambda: gone(pid), 'the worker is gone')
    pool.pool.tend(0)
    second = job('good')
    assert pool.result(pool.hand_in(second)) == ALL
    assert pool.pid(second) != pool.pid(first)


def test_kill_after_kill_every_job_is_told(pair: Tended) -> None:
    jobs = [job('waits') for _ in range(6)]
    handed = [pair.hand_in(queued_job) for queued_job in jobs]
    for work, future in zip(jobs, handed, strict=True):
        os.kill(pair.pid(work), signal.SIGKILL)
        assert isinstance(pair.error(future), WorkerDied)


def test_a_signal_that_ends_others_does_not_end_a_worker(pool: Tended) -> None:
    # Ctrl-C signals the terminal's whole process group; closing the terminal sends SIGHUP.
    work = job('stubborn')
    handed = pool.hand_in(work)
    pid = pool.pid(work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    (pool.directory / 'go').touch()
    assert pool.result(handed) == ALL


def test_a_build_that_waits_its_turn_is_cancelled_at_once(pool: Tended) -> None:
    active_job, queued_job = job('stubborn'), job('good')
    handed = pool.hand_in(active_job)
    pool.pid(active_job)
    queued_result = pool.hand_in(queued_job)
    pool.tend_until(lambda: len(pool.pool._waiting) == 1, 'the second job waits')
    pool.pool.cancel(queued_job.spec.instance)
    assert isinstance(pool.error(queued_result), Cancelled)
    (pool.directory / 'go').touch()
    assert pool.result(handed) == ALL
    assert not (pool.directory / f'{queued_job.spec.instance}.pid').exists()


def test_a_running_build_is_cancelled_and_has_undone_itself(pool: Tended) -> None:
    work = job('waits')
    handed = pool.hand_in(work)
    pool.pid(work)
    for _ in range(3):  # the planner repeats it, too
        pool.pool.cancel(work.spec.instance)
    assert isinstance(pool.error(handed), Cancelled)
    assert pool.guests() == set()
    # The cancellation does not affect a later job of the same instance.
    next_job = job('good', work.spec.instance)
    assert pool.result(pool.hand_in(next_job)) == ALL


def test_once_all_builds_are_cancelled_none_begins(pool: Tended) -> None:
    """Check that destroys are still carried out."""
    active_job, queued_job, later_job = job('waits'), job('good'), job('good')
    handed = [pool.hand_in(active_job)]
    pool.pid(active_job)
    handed.append(pool.hand_in(queued_job))
    pool.tend_until(lambda: len(pool.pool._waiting) == 1, 'the second job waits')
    pool.pool.cancel(None)
    handed.append(pool.hand_in(later_job))
    assert [type(pool.error(result)) for result in handed] == [Cancelled] * 3
    assert pool.result(pool.hand_in(Destroy(later_job.instance, COMPUTE))) == []


def test_a_cancel_that_comes_too_late_hits_nobody(pool: Tended) -> None:
    work, next_job = job('good'), job('waits')
    assert pool.result(pool.hand_in(work)) == ALL
    pool.pool.cancel(work.spec.instance)
    pool.pool.cancel(str(uuid.uuid4()))
    handed = pool.hand_in(next_job)
    pool.pid(next_job)
    (pool.directory / 'go').touch()
    assert pool.result(handed) == ALL


def test_a_destroy_waits_for_no_build_and_is_never_cancelled(pool: Tended) -> None:
    build, instance = job('stubborn'), str(uuid.uuid4())
    handed = pool.hand_in(build)
    pool.pid(build)
    destroying = pool.hand_in(Destroy(instance, COMPUTE))
    pool.pool.cancel(instance)
    assert pool.result(destroying) == []
    assert not handed.done()
    (pool.directory / 'go').touch()
    assert pool.result(handed) == ALL


def test_wake_ends_a_tend(pool: Tended) -> None:
    pool.pool.tend(0)
    for _ in range(100_000):  # more than the pipe holds
        pool.pool.waker.wake()
    began = time.monotonic()
    pool.pool.tend(60)
    assert time.monotonic() - began < PATIENCE * 10


def test_stop_ends_all_workers(tmp_path: Path) -> None:
    tended = Tended(tmp_path, 2)
    jobs = [job('good'), job('good')]
    for handed in [tended.hand_in(process) for process in jobs]:
        tended.result(handed)
    workers = psutil.Process().children()
    pids = [process.pid for process in workers if 'spawn_main' in ' '.join(process.cmdline())]
    assert len(pids) == 3, 'two, and one for destroys'
    tended.close()
    assert all(gone(pid) for pid in pids)


def test_stop_in_the_middle_of_a_job_ends_too(tmp_path: Path) -> None:
    tended = Tended(tmp_path, 1)
    work = job('waits')
    handed = tended.hand_in(work)
    pid = tended.pid(work)
    began = time.monotonic()
    tended.pool.stop()
    assert time.monotonic() - began < PATIENCE * 10
    assert gone(pid)
    assert isinstance(handed.exception(10), WorkerDied)
    assert tended.guests() == set()


def test_a_job_for_workers_that_cannot_start_is_told(tmp_path: Path) -> None:
    tended = Tended(tmp_path, 1, stand_in.broken)
    handed = tended.hand_in(job('good'))
    assert isinstance(tended.error(handed), WorkerDied)
    tended.close()


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    instance = str(uuid.uuid4())
    (tmp_path / 'parent.py').write_text(PARENT)
    command = [sys.executable, str(tmp_path / 'parent.py'), str(tmp_path), instance]
    with subprocess.Popen(command, env=environment()) as parent:
        try:
            until((tmp_path / f'{instance}.pid').exists, 30, 'a worker is in the middle of a job')
            until(lambda: len(_workers(parent.pid)) == 3, 30, 'two workers, and one for destroys')
            workers = _workers(parent.pid)
        finally:
            parent.kill()
    until(lambda: all(gone(pid) for pid in workers), 5, 'the workers die with their parent')


def _workers(parent: int) -> list[int]:
    children = psutil.Process(parent).children(recursive=True)
    return [process.pid for process in children if 'spawn_main' in ' '.join(process.cmdline())]


# The pool without processes


def test_pretended_jobs_run_where_they_are_asked_for() -> None:
    hypervisor = FakeHypervisor()
    inline = Inline(hypervisor, FakeImages())
    work = job('good')
    assert list(inline.run(work)) == ALL
    assert set(hypervisor.guests()) == {work.spec.instance}
    assert list(inline.run(Destroy(work.spec.instance, COMPUTE))) == []
    assert hypervisor.guests() == {}
    inline.cancel(work.spec.instance)
    with pytest.raises(Cancelled):
        inline.run(work)
    assert hypervisor.guests() == {}
    assert list(inline.run(work)) == ALL
    inline.waker.wake()
    inline.tend(60)
    inline.stop()


def test_once_all_pretended_builds_are_cancelled_none_begins() -> None:
    hypervisor = FakeHypervisor()
    inline = Inline(hypervisor, FakeImages())
    inline.cancel(None)
    for _ in range(2):
        with pytest.raises(Cancelled):
            list(inline.run(job('good')))
    assert hypervisor.guests() == {}
    inline.stop()


def test_ends_go_side_by_side(pool: Tended) -> None:
    """Check four blocked destroys, which stand for a QEMU that is slow to end."""
    locks, instances = InstanceLocks(pool.directory), [str(uuid.uuid4()) for _ in range(4)]
    with ExitStack() as holding:
        for instance in instances:
            holding.enter_context(locks.held(instance, lambda: None))
        waiting = [pool.hand_in(Destroy(instance, COMPUTE)) for instance in instances]
        assert pool.result(pool.hand_in(Destroy(str(uuid.uuid4()), COMPUTE))) == []
        assert not any(future.done() for future in waiting)
    assert [pool.result(future) for future in waiting] == [[]] * 4


def test_a_worker_killed_amid_several_ends_fails_them_all(pool: Tended) -> None:
    locks, instances = InstanceLocks(pool.directory), [str(uuid.uuid4()) for _ in range(3)]
    with ExitStack() as holding:
        for instance in instances:
            holding.enter_context(locks.held(instance, lambda: None))
        waiting = [pool.hand_in(Destroy(instance, COMPUTE)) for instance in instances]
        pool.tend_until(
            lambda: sum(len(pool_worker.tickets) for pool_worker in pool.pool._workers) == 3, 'all are in work'
        )
        for worker in list(pool.pool._workers):
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGKILL)
        assert [type(pool.error(future)) for future in waiting] == [WorkerDied] * 3
    assert pool.result(pool.hand_in(Destroy(instances[0], COMPUTE))) == []


def test_a_frozen_worker_is_not_waited_for_however_large_its_job(pair: Tended) -> None:
    """Check a seed that exceeds the pipe's buffer: handing in and cancelling must not block."""
    first, second, last = (pair.hand_in(job('good')) for _ in range(3))
    for future in (first, second, last):
        pair.result(future)
    frozen = [worker.process.pid for worker in pair.pool._workers if not worker.ends_only]
    for pid in frozen:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    large = [job('good') for _ in frozen]
    handed = [
        pair.hand_in(Build(replace(large_job.spec, seed={'user-data': os.urandom(2**21)}), large_job.image))
        for large_job in large
    ]
    pair.tend_until(
        lambda: all(worker.tickets for worker in pair.pool._workers if not worker.ends_only), 'both have a job'
    )
    destroyed = str(uuid.uuid4())
    assert pair.result(pair.hand_in(Destroy(destroyed, COMPUTE))) == [], 'others work'
    pair.pool.cancel(large[0].instance)
    for pid in frozen:
        assert pid is not None
        os.kill(pid, signal.SIGCONT)
    assert isinstance(pair.error(handed[0]), Cancelled | None)
    assert pair.result(handed[1]) == ALL


@pytest.mark.parametrize('error', [BlockingIOError(11, 'no process left'), RuntimeError("can't start new thread")])
def test_a_worker_that_cannot_be_started_is_tried_again(
    pool: Tended, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    """Check a temporary limit on processes; it is logged once."""
    real, failures = SpawnProcess.start, [error] * 3

    def start(process: SpawnProcess) -> None:
        if failures:
            raise failures.pop()
        real(process)

    monkeypatch.setattr(SpawnProcess, 'start', start)
    descriptors = len(os.listdir('/proc/self/fd'))
    while failures:
        pool.pool.tend(0.05)
    until(lambda: len(os.listdir('/proc/self/fd')) <= descriptors + 2, 20, 'nothing is left open of those')
    assert pool.result(pool.hand_in(job('good'))) == ALL
    assert caplog.text.count('a worker cannot be started') == 1


# The worker pool and images: builds that wait for a download, and builds that need not wait.


HOLDER = """
import sys, time
from pathlib import Path
from ecomp.files import InstanceLocks

with InstanceLocks(Path(sys.argv[1])).held(sys.argv[2], lambda: None):
    print('held', flush=True)
    time.sleep(60)
"""


def fetching(tended: Tended, word: str, count: int) -> list[Future[list[News]]]:
    """Hand in `count` builds of one image: one worker fetches it, and the other builds wait."""
    handed = [tended.hand_in(same(word)) for _ in range(count)]
    tended.tend_until((tended.directory / f'{word}.pid').exists, 'somebody fetches it')
    tended.tend_until(lambda: len(tended.pool._waiting) == count - 1, 'the others wait')
    return handed


def test_builds_that_wait_for_one_image_keep_no_other_build_waiting(pair: Tended) -> None:
    handed = fetching(pair, 'comes', 5)
    (pair.directory / 'comes.pid').unlink()
    # There are two workers, so another image can be fetched concurrently.
    assert pair.result(pair.hand_in(job('good'))) == ALL
    assert pair.result(pair.hand_in(same('good'))) == ALL
    assert not (pair.directory / 'comes.pid').exists()
    (pair.directory / 'go').touch()
    for future in handed:
        reports = pair.result(future)
        assert reports[0] == Progress('image', 34, 600), 'also those that wait are told how far it is'
        assert [news for news in reports if not isinstance(news, Progress)] == ALL


def test_downloads_keep_no_build_of_what_is_here_waiting(pair: Tended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that both workers get replacements until their downloads are finished."""
    monkeypatch.setattr('ecomp.agent.instance.pool.MOST_LENT', 8)
    drips = [job('comes'), job('comes')]
    handed = [pair.hand_in(drip) for drip in drips]
    busy = {pair.pid(drip) for drip in drips}
    for _ in range(3):
        work = job('good')
        assert pair.result(pair.hand_in(work)) == ALL
        assert pair.pid(work) not in busy
    assert not any(future.done() for future in handed)
    assert len(pair.pool._workers) <= 3 + len(drips)
    (pair.directory / 'go').touch()
    for future in handed:
        assert pair.result(future)[-3:] == ALL
    pair.tend_until(lambda: len(pair.pool._workers) == 3, 'there are as many as before')
    pair.tend_until(lambda: not pair.pool._dismissed, 'the others have ended')
    assert len([worker for worker in pair.pool._workers if worker.ends_only]) == 1


def test_a_cached_image_is_built_while_servers_drip(tmp_path: Path) -> None:
    """Check slow downloads with the real image cache and a slow server."""
    tended = Tended(tmp_path, 2, stand_in.downloading)
    with serving(b'\0' * 510 + b'\x55\xaa') as web:
        cached = replace(job('good'), image=web.url + 'good')
        assert [news for news in tended.result(tended.hand_in(cached)) if isinstance(news, str)] == ALL
        drips = [replace(job('drip'), image=f'{web.url}drip?{number}') for number in range(2)]
        handed = [tended.hand_in(drip) for drip in drips]
        tended.tend_until(lambda: web.asked.count('drip') == 2, 'both drip')
        repeated = replace(job('good'), image=web.url + 'good')
        assert [news for news in tended.result(tended.hand_in(repeated)) if isinstance(news, str)] == ALL
        assert not any(future.done() for future in handed)
        for drip in drips:
            tended.pool.cancel(drip.instance)
        assert [type(tended.error(future)) for future in handed] == [Cancelled, Cancelled]
        assert tended.guests() == {cached.instance, repeated.instance}
        tended.close()


def test_many_builds_of_a_cached_image_ask_its_server_once(tmp_path: Path) -> None:
    tended = Tended(tmp_path, 2, stand_in.downloading)
    with serving(b'\0' * 510 + b'\x55\xaa') as web:
        web.says = {'etag': '"1"'}
        for count in (1, 6):
            before = web.asked.count('good')
            handed = [tended.hand_in(replace(same('good'), image=web.url + 'good')) for _ in range(count)]
            until(lambda all_of_them=count: len(tended.pool._waiting) == all_of_them, 20, 'all are handed in')
            for future in handed:
                assert [news for news in tended.result(future) if isinstance(news, str)] == ALL
        assert web.asked.count('good') == before + 1
        tended.close()


def test_so_many_downloads_have_workers_and_no_more(pair: Tended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.agent.instance.pool.MOST_LENT', 1)
    drips = [job('comes') for _ in range(4)]
    handed = [pair.hand_in(drip) for drip in drips]
    for drip in drips[:3]:
        pair.pid(drip)
    assert len(pair.pool._workers) == 3 + 1
    assert pair.result(pair.hand_in(Destroy(str(uuid.uuid4()), COMPUTE))) == []
    assert not (pair.directory / f'{drips[3].instance}.pid').exists()
    (pair.directory / 'go').touch()
    for future in handed:
        assert pair.result(future)[-3:] == ALL


def test_why_an_image_cannot_be_had_is_told_to_all_who_wait_for_it(pair: Tended) -> None:
    handed = fetching(pair, 'stalls', 5)
    (pair.directory / 'stalls.pid').unlink()
    (pair.directory / 'go').touch()
    for future in handed:
        error = pair.error(future)
        assert isinstance(error, BuildFailed)
        assert (error.stage, error.reason) == ('image', 'it was told to, later')
    assert not (pair.directory / 'stalls.pid').exists(), 'nobody has tried again'
    assert pair.guests() == set()


def test_a_killed_fetch_is_another_s_turn(pair: Tended) -> None:
    handed = fetching(pair, 'comes', 3)
    path = pair.directory / 'comes.pid'
    pid = int(path.read_text())
    path.unlink()
    os.kill(pid, signal.SIGKILL)
    pair.tend_until(path.exists, 'somebody else fetches it')
    (pair.directory / 'go').touch()
    outcomes = [pair.error(future) for future in handed]
    assert sorted(type(outcome).__name__ for outcome in outcomes) == ['NoneType', 'NoneType', 'WorkerDied']


def test_a_build_that_waits_for_its_image_is_cancelled_at_once(pair: Tended) -> None:
    first, second = same('comes'), same('comes')
    handed = pair.hand_in(first)
    pair.tend_until((pair.directory / 'comes.pid').exists, 'it is fetched')
    later = pair.hand_in(second)
    pair.tend_until(lambda: len(pair.pool._waiting) == 1, 'the second waits')
    pair.pool.cancel(second.instance)
    assert isinstance(pair.error(later), Cancelled)
    (pair.directory / 'go').touch()
    assert pair.result(handed)[-3:] == ALL


def test_a_build_kept_waiting_by_another_process_keeps_nobody_from_its_image(pair: Tended) -> None:
    blocked = same('good')
    with subprocess.Popen(
        [sys.executable, '-c', HOLDER, str(pair.directory), blocked.instance], env=environment(), stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        waiting = pair.hand_in(blocked)
        pair.tend_until(lambda: not pair.pool._waiting, 'a worker has it')
        assert pair.result(pair.hand_in(same('good'))) == ALL
        assert not waiting.done()
        holder.kill()
    assert pair.result(waiting) == ALL


# The exact number of calls to placement and etcd of a set, a build and a destroy.
#
# Change a number here together with the code that changes it, and give the reason in the commit.


# Each call of one of these methods is one call to etcd.
ETCD = ('get', 'read', 'snapshot', 'count', 'revision', 'commit', 'grant', 'keep_alive', 'revoke')


def said(name: str, *_: object) -> str:
    return name


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Provide a counter of calls, with keys like `etcd get` and `placement PUT /allocations`."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def counted(of: str, kind: type, name: str, what: Callable[..., str]) -> None:
        real = getattr(kind, name)

        @functools.wraps(real)
        def call(self: Any, *given: Any, **named: Any) -> Any:
            with lock:
                counts[f'{of} {what(*given)}'] += 1
            return real(self, *given, **named)

        monkeypatch.setattr(kind, name, call)

    counted('placement', Placement, 'get', lambda path: f'GET /{path.split("/")[1].split("?")[0]}')
    counted('placement', Placement, 'write', lambda method, path, _: f'{method} /{path.split("/")[1]}')
    for name in ETCD:
        counted('etcd', Store, name, partial(said, name))
    return counts


def carried_out(one: Toy, asked: Counter[str]) -> Counter[str]:
    """Carry out the due tasks, and return the number of calls.

    Planning is not counted: one step plans all instances together.
    """
    work = one.planned()
    asked.clear()
    for task in work:
        one.planner.begin(task)
        one.planner.carry_out(task)
    assert work
    return Counter(asked)


@pytest.mark.parametrize(('count', 'claims'), [(BLOCK, 1), (2 * BLOCK, 2)])
def test_a_set_asks_this_much(cloud: Cloud, asked: Counter[str], count: int, claims: int) -> None:
    computes = {cloud.compute(VCPU=16, MEMORY_MB=1024, DISK_GB=16) for _ in range(10)}
    aggregate = new()  # only these: other tests' computes are in the same placement
    for compute in computes:
        path = f'/resource_providers/{compute}'
        body = {'aggregates': [aggregate], 'resource_provider_generation': cloud.placement.get(path)['generation']}
        cloud.placement.write('PUT', f'{path}/aggregates', body)
    owner_and_size = {'user_id': 'a', 'project_id': 'b', 'count': count, 'minimum': count}
    order = SetOrder(new(), query=f'{RESOURCES}&member_of={aggregate}', image=IMAGE, **owner_and_size)
    asked.clear()
    placed = cloud.create_all(order)
    assert Counter(outcome.compute for outcome in placed.values()) == dict.fromkeys(computes, count // 10)
    # In order: quota, lease, attempt, computes, other attempts, quota again, delivery, lease.
    assert asked == {
        **{'placement GET /allocation_candidates': 1, 'placement POST /allocations': claims},
        **{'etcd get': 2, 'etcd grant': 1, 'etcd snapshot': 2, 'etcd commit': 2, 'etcd revoke': 1},
    }


def test_a_build_and_a_destroy_ask_this_much(one: Toy, cloud: Cloud, asked: Counter[str]) -> None:
    instance = one.place()
    # Rule 2: one query for the claim. The record: missing, then building with addresses, image, disk, active.
    assert carried_out(one, asked) == {'placement GET /allocations': 1, 'etcd read': 1, 'etcd commit': 4}
    assert one.record(instance).state == 'active'
    tombstone = Request(instance, {}, image=None, user_id='me', project_id='us')
    assert cloud.store.commit([], [Put(keys.request(one.compute, instance), to_json(tombstone))])
    # The claim's generation and release; records: destroying, then gone on a lease; the project's quota.
    assert carried_out(one, asked) == {
        **{'placement GET /allocations': 1, 'placement PUT /allocations': 1},
        **{'etcd get': 1, 'etcd grant': 1, 'etcd commit': 2},
    }
    assert cloud.store.get(keys.request(one.compute, instance)) is None


def test_records_that_are_read_again_ask_once_for_all_of_them(one: Toy, cloud: Cloud, asked: Counter[str]) -> None:
    instances = {one.place() for _ in range(5)}
    for _ in range(2):
        one.step()
    asked.clear()
    one.planner.recheck()
    assert asked == {'etcd snapshot': 1}
    removed = instances.pop()
    cloud.store.commit([], [Delete(keys.record(one.compute, removed))])
    one.planner.recheck()
    asked.clear()
    # The deleted record counts as never written, so the build writes it again.
    assert one.step() == [f'build {removed}']
    assert one.record(removed).state == ACTIVE
