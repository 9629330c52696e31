"""The pool of workers, its images, and how builds are counted."""

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

# The worker pool with real processes: what becomes of a job whose worker fails, is killed, is cancelled, is orphaned.
#
# The workers run the real loop; what they do in it is in stand_in.py. The test's main thread tends, as ecompute's does.
# Builds of images that are fetched are in test_pool_images.py.


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
    done = [pool.hand_in(each) for each in (first, second)]
    assert [pool.result(each) for each in done] == [ALL, ALL]
    assert pool.pid(first) == pool.pid(second) != os.getpid()
    assert pool.guests() == {first.spec.instance, second.spec.instance}
    assert pool.result(pool.hand_in(Destroy(first.spec.instance, COMPUTE))) == []
    assert pool.guests() == {second.spec.instance}


def test_stages_are_told_as_they_are_reached(pool: Tended) -> None:
    work = job('good')
    stages = pool.pool.run(work)
    told: list[News] = []
    reading = ThreadPoolExecutor(1)
    for stage in ALL:
        next_one = reading.submit(next, stages)
        pool.tend_until(next_one.done, f'{stage} is told')
        told.append(next_one.result())
    assert told == ALL
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
    handed, other = pair.hand_in(killed), pair.hand_in(neighbour)
    pid = pair.pid(killed)
    assert pair.pid(neighbour) != pid
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    error = pair.error(handed)
    assert time.monotonic() - began < PATIENCE * 1.0
    assert isinstance(error, WorkerDied)
    assert 'ended in the middle of it (-9)' in str(error)
    # A new one took its place, and the neighbour never noticed.
    assert pair.result(pair.hand_in(job('good'))) == ALL
    assert not other.done()
    (pair.directory / 'go').touch()
    assert pair.result(other) == ALL


def test_a_worker_killed_while_it_has_nothing_to_do_is_replaced(pool: Tended) -> None:
    first = job('good')
    pool.result(pool.hand_in(first))
    pid = pool.pid(first)
    os.kill(pid, signal.SIGKILL)
    # Noticed at the next tend, whoever has a job by then: a job given to a dead worker would be told to have died.
    pool.tend_until(lambda: gone(pid), 'the worker is gone')
    pool.pool.tend(0)
    second = job('good')
    assert pool.result(pool.hand_in(second)) == ALL
    assert pool.pid(second) != pool.pid(first)


def test_kill_after_kill_every_job_is_told(pair: Tended) -> None:
    jobs = [job('waits') for _ in range(6)]
    handed = [pair.hand_in(each) for each in jobs]
    for work, future in zip(jobs, handed, strict=True):
        os.kill(pair.pid(work), signal.SIGKILL)
        assert isinstance(pair.error(future), WorkerDied)


def test_a_signal_that_ends_others_does_not_end_a_worker(pool: Tended) -> None:
    # Ctrl-C goes to the whole group of the terminal, and SIGHUP when that is closed.
    work = job('stubborn')
    handed = pool.hand_in(work)
    pid = pool.pid(work)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    (pool.directory / 'go').touch()
    assert pool.result(handed) == ALL


def test_a_build_that_waits_its_turn_is_cancelled_at_once(pool: Tended) -> None:
    running, waiting = job('stubborn'), job('good')
    handed = pool.hand_in(running)
    pool.pid(running)
    later = pool.hand_in(waiting)
    pool.tend_until(lambda: len(pool.pool._waiting) == 1, 'the second job waits')
    pool.pool.cancel(waiting.spec.instance)
    assert isinstance(pool.error(later), Cancelled)
    (pool.directory / 'go').touch()
    assert pool.result(handed) == ALL
    assert not (pool.directory / f'{waiting.spec.instance}.pid').exists()


def test_a_running_build_is_cancelled_and_has_undone_itself(pool: Tended) -> None:
    work = job('waits')
    handed = pool.hand_in(work)
    pool.pid(work)
    for _ in range(3):  # asked again and again, as the planner does
        pool.pool.cancel(work.spec.instance)
    assert isinstance(pool.error(handed), Cancelled)
    assert pool.guests() == set()
    # What was meant for one job does not hit the next, of the same instance.
    again = job('good', work.spec.instance)
    assert pool.result(pool.hand_in(again)) == ALL


def test_once_all_builds_are_cancelled_none_begins(pool: Tended) -> None:
    """Nor one that is handed in later; what is to be destroyed is destroyed."""
    running, waiting, late = job('waits'), job('good'), job('good')
    handed = [pool.hand_in(running)]
    pool.pid(running)
    handed.append(pool.hand_in(waiting))
    pool.tend_until(lambda: len(pool.pool._waiting) == 1, 'the second job waits')
    pool.pool.cancel(None)
    handed.append(pool.hand_in(late))
    assert [type(pool.error(each)) for each in handed] == [Cancelled] * 3
    assert pool.result(pool.hand_in(Destroy(late.instance, COMPUTE))) == []


def test_a_cancel_that_comes_too_late_hits_nobody(pool: Tended) -> None:
    work, next_one = job('good'), job('waits')
    assert pool.result(pool.hand_in(work)) == ALL
    pool.pool.cancel(work.spec.instance)
    pool.pool.cancel(str(uuid.uuid4()))
    handed = pool.hand_in(next_one)
    pool.pid(next_one)
    (pool.directory / 'go').touch()
    assert pool.result(handed) == ALL


def test_a_destroy_waits_for_no_build_and_is_never_cancelled(pool: Tended) -> None:
    running, instance = job('stubborn'), str(uuid.uuid4())
    handed = pool.hand_in(running)
    pool.pid(running)
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
    for handed in [tended.hand_in(each) for each in jobs]:
        tended.result(handed)
    workers = psutil.Process().children()
    pids = [each.pid for each in workers if 'spawn_main' in ' '.join(each.cmdline())]
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
    return [each.pid for each in children if 'spawn_main' in ' '.join(each.cmdline())]


# Without processes


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
    """What holds up one end, as a QEMU that takes its time, holds up no other: nor do four."""
    locks, held = InstanceLocks(pool.directory), [str(uuid.uuid4()) for _ in range(4)]
    with ExitStack() as holding:
        for each in held:
            holding.enter_context(locks.held(each, lambda: None))
        waiting = [pool.hand_in(Destroy(each, COMPUTE)) for each in held]
        assert pool.result(pool.hand_in(Destroy(str(uuid.uuid4()), COMPUTE))) == []
        assert not any(each.done() for each in waiting)
    assert [pool.result(each) for each in waiting] == [[]] * 4


def test_a_worker_killed_amid_several_ends_fails_them_all(pool: Tended) -> None:
    locks, held = InstanceLocks(pool.directory), [str(uuid.uuid4()) for _ in range(3)]
    with ExitStack() as holding:
        for each in held:
            holding.enter_context(locks.held(each, lambda: None))
        waiting = [pool.hand_in(Destroy(each, COMPUTE)) for each in held]
        pool.tend_until(lambda: sum(len(each.tickets) for each in pool.pool._workers) == 3, 'all are in work')
        for worker in list(pool.pool._workers):
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGKILL)
        assert [type(pool.error(each)) for each in waiting] == [WorkerDied] * 3
    assert pool.result(pool.hand_in(Destroy(held[0], COMPUTE))) == []


def test_a_frozen_worker_is_not_waited_for_however_large_its_job(pair: Tended) -> None:
    """A seed may be larger than what a pipe holds; whoever hands jobs in, or cancels one, is not held up either."""
    first, second, last = (pair.hand_in(job('good')) for _ in range(3))
    for each in (first, second, last):
        pair.result(each)
    frozen = [worker.process.pid for worker in pair.pool._workers if not worker.ends_only]
    for pid in frozen:
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
    large = [job('good') for _ in frozen]
    handed = [
        pair.hand_in(Build(replace(each.spec, seed={'user-data': os.urandom(2**21)}), each.image)) for each in large
    ]
    pair.tend_until(lambda: all(each.tickets for each in pair.pool._workers if not each.ends_only), 'both have a job')
    gone = str(uuid.uuid4())
    assert pair.result(pair.hand_in(Destroy(gone, COMPUTE))) == [], 'others work'
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
    """As where a limit is reached for a while: said once."""
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


# The worker pool and images: who waits for a download, who does not, and what becomes of those that wait.


HOLDER = """
import sys, time
from pathlib import Path
from ecomp.files import InstanceLocks

with InstanceLocks(Path(sys.argv[1])).held(sys.argv[2], lambda: None):
    print('held', flush=True)
    time.sleep(60)
"""


def fetching(tended: Tended, word: str, count: int) -> list[Future[list[News]]]:
    """`count` builds of one image, of which one worker is fetching it and all others wait."""
    handed = [tended.hand_in(same(word)) for _ in range(count)]
    tended.tend_until((tended.directory / f'{word}.pid').exists, 'somebody fetches it')
    tended.tend_until(lambda: len(tended.pool._waiting) == count - 1, 'the others wait')
    return handed


def test_builds_that_wait_for_one_image_keep_no_other_build_waiting(pair: Tended) -> None:
    handed = fetching(pair, 'comes', 5)
    (pair.directory / 'comes.pid').unlink()
    # There are two workers, and another image is fetched beside it.
    assert pair.result(pair.hand_in(job('good'))) == ALL
    assert pair.result(pair.hand_in(same('good'))) == ALL
    assert not (pair.directory / 'comes.pid').exists()
    (pair.directory / 'go').touch()
    for each in handed:
        told = pair.result(each)
        assert told[0] == Progress('image', 34, 600), 'also those that wait are told how far it is'
        assert [news for news in told if not isinstance(news, Progress)] == ALL


def test_downloads_keep_no_build_of_what_is_here_waiting(pair: Tended, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that drip, and there are two workers: others take their places, and go again when the two are back."""
    monkeypatch.setattr('ecomp.agent.instance.pool.MOST_LENT', 8)
    drips = [job('comes'), job('comes')]
    handed = [pair.hand_in(each) for each in drips]
    busy = {pair.pid(each) for each in drips}
    for _ in range(3):
        work = job('good')
        assert pair.result(pair.hand_in(work)) == ALL
        assert pair.pid(work) not in busy
    assert not any(each.done() for each in handed)
    assert len(pair.pool._workers) <= 3 + len(drips)
    (pair.directory / 'go').touch()
    for each in handed:
        assert pair.result(each)[-3:] == ALL
    pair.tend_until(lambda: len(pair.pool._workers) == 3, 'there are as many as before')
    pair.tend_until(lambda: not pair.pool._dismissed, 'the others have ended')
    assert len([each for each in pair.pool._workers if each.ends_only]) == 1


def test_a_cached_image_is_built_while_servers_drip(tmp_path: Path) -> None:
    """The same with the real cache, and a server that does so."""
    tended = Tended(tmp_path, 2, stand_in.downloading)
    with serving(b'\0' * 510 + b'\x55\xaa') as web:
        cached = replace(job('good'), image=web.url + 'good')
        assert [each for each in tended.result(tended.hand_in(cached)) if isinstance(each, str)] == ALL
        drips = [replace(job('drip'), image=f'{web.url}drip?{number}') for number in range(2)]
        handed = [tended.hand_in(each) for each in drips]
        tended.tend_until(lambda: web.asked.count('drip') == 2, 'both drip')
        again = replace(job('good'), image=web.url + 'good')
        assert [each for each in tended.result(tended.hand_in(again)) if isinstance(each, str)] == ALL
        assert not any(each.done() for each in handed)
        for each in drips:
            tended.pool.cancel(each.instance)
        assert [type(tended.error(each)) for each in handed] == [Cancelled, Cancelled]
        assert tended.guests() == {cached.instance, again.instance}
        tended.close()


def test_many_builds_of_a_cached_image_ask_its_server_once(tmp_path: Path) -> None:
    """One after the other they waited for a server that takes its time, each for an answer of its own."""
    tended = Tended(tmp_path, 2, stand_in.downloading)
    with serving(b'\0' * 510 + b'\x55\xaa') as web:
        web.says = {'etag': '"1"'}
        for count in (1, 6):
            before = web.asked.count('good')
            handed = [tended.hand_in(replace(same('good'), image=web.url + 'good')) for _ in range(count)]
            until(lambda all_of_them=count: len(tended.pool._waiting) == all_of_them, 20, 'all are handed in')
            for each in handed:
                assert [news for news in tended.result(each) if isinstance(news, str)] == ALL
        assert web.asked.count('good') == before + 1
        tended.close()


def test_so_many_downloads_have_workers_and_no_more(pair: Tended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('ecomp.agent.instance.pool.MOST_LENT', 1)
    drips = [job('comes') for _ in range(4)]
    handed = [pair.hand_in(each) for each in drips]
    for each in drips[:3]:
        pair.pid(each)
    assert len(pair.pool._workers) == 3 + 1
    assert pair.result(pair.hand_in(Destroy(str(uuid.uuid4()), COMPUTE))) == []
    assert not (pair.directory / f'{drips[3].instance}.pid').exists()
    (pair.directory / 'go').touch()
    for each in handed:
        assert pair.result(each)[-3:] == ALL


def test_why_an_image_cannot_be_had_is_told_to_all_who_wait_for_it(pair: Tended) -> None:
    handed = fetching(pair, 'stalls', 5)
    (pair.directory / 'stalls.pid').unlink()
    (pair.directory / 'go').touch()
    for each in handed:
        error = pair.error(each)
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
    outcomes = [pair.error(each) for each in handed]
    assert sorted(type(each).__name__ for each in outcomes) == ['NoneType', 'NoneType', 'WorkerDied']


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
    kept = same('good')
    with subprocess.Popen(
        [sys.executable, '-c', HOLDER, str(pair.directory), kept.instance], env=environment(), stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        waiting = pair.hand_in(kept)
        pair.tend_until(lambda: not pair.pool._waiting, 'a worker has it')
        assert pair.result(pair.hand_in(same('good'))) == ALL
        assert not waiting.done()
        holder.kill()
    assert pair.result(waiting) == ALL


# What a set, a build and a destroy cost, exactly: questions to placement, operations at etcd.
#
# A figure here is changed with what makes it cheaper or dearer, and with the reason in the commit.


ETCD = ('get', 'read', 'snapshot', 'count', 'revision', 'commit', 'grant', 'keep_alive', 'revoke')
"""What asks etcd, once each."""


def said(name: str, *_: object) -> str:
    return name


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each thing was asked since the counter was cleared: `etcd get`, `placement PUT /allocations`."""
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
    """What was asked for what is to be done now, planning left out: that is once for all there is."""
    work = one.planned()
    asked.clear()
    for each in work:
        one.planner.begin(each)
        one.planner.carry_out(each)
    assert work
    return Counter(asked)


@pytest.mark.parametrize(('count', 'claims'), [(BLOCK, 1), (2 * BLOCK, 2)])
def test_a_set_asks_this_much(cloud: Cloud, asked: Counter[str], count: int, claims: int) -> None:
    computes = {cloud.compute(VCPU=16, MEMORY_MB=1024, DISK_GB=16) for _ in range(10)}
    aggregate = new()  # of these alone: others' computes are in the same placement
    for each in computes:
        path = f'/resource_providers/{each}'
        body = {'aggregates': [aggregate], 'resource_provider_generation': cloud.placement.get(path)['generation']}
        cloud.placement.write('PUT', f'{path}/aggregates', body)
    who = {'user_id': 'a', 'project_id': 'b', 'count': count, 'minimum': count}
    wanted = SetOrder(new(), query=f'{RESOURCES}&member_of={aggregate}', image=IMAGE, **who)
    asked.clear()
    placed = cloud.create_all(wanted)
    assert Counter(each.compute for each in placed.values()) == dict.fromkeys(computes, count // 10)
    # The quota, a lease, the attempt, the computes, who else is at it, the quota once more, the delivery, the lease.
    assert asked == {
        **{'placement GET /allocation_candidates': 1, 'placement POST /allocations': claims},
        **{'etcd get': 2, 'etcd grant': 1, 'etcd snapshot': 2, 'etcd commit': 2, 'etcd revoke': 1},
    }


def test_a_build_and_a_destroy_ask_this_much(one: Toy, cloud: Cloud, asked: Counter[str]) -> None:
    instance = one.place()
    # Rule 2's question; the record: there is none, building with its addresses, its image, its disk, active.
    assert carried_out(one, asked) == {'placement GET /allocations': 1, 'etcd read': 1, 'etcd commit': 4}
    assert one.record(instance).state == 'active'
    tombstone = Request(instance, {}, image=None, user_id='me', project_id='us')
    assert cloud.store.commit([], [Put(keys.request(one.compute, instance), to_json(tombstone))])
    # The claim's generation and its release; the record: destroying, and gone, on a lease; its project's quota.
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
    # It is as if nothing of it had been written: so it is written again.
    assert one.step() == [f'build {removed}']
    assert one.record(removed).state == ACTIVE
