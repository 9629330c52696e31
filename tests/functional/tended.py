"""A worker pool of real processes that a test's main thread tends, and jobs for it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from ecomp.agent.images.cache import CacheLimits
from ecomp.agent.instance.build import Build
from ecomp.agent.instance.pool import Job, JobEvent, Workers, WorkerSettings
from ecomp.compute_conf import ComputeConfig
from ecomp.model.guest import BaseImage, GuestSpec
from ecomp.virt.fake import FakeHypervisor
from tests.functional import stand_in
from tests.kit import warm
from tests.kit.servers import wait_until

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
ALL_STAGES = ['image', 'disk', 'started']
LIMITS = CacheLimits(2**40, 2**40)


def make_job(word: str, instance: str | None = None) -> Build:
    instance = instance or str(uuid.uuid4())
    spec = GuestSpec(instance, COMPUTE, 1, 64, 1, BaseImage('', '', 0), 'qemu')
    return Build(spec, f'http://test/{word}?instance={instance}')


def make_shared_image_job(word: str) -> Build:
    spec = GuestSpec(str(uuid.uuid4()), COMPUTE, 1, 64, 1, BaseImage('', '', 0), 'qemu')
    return Build(spec, f'http://test/{word}')


class TendedPool:
    def __init__(self, directory: Path, size: int, entry: Callable[..., None] = stand_in.run_worker) -> None:
        self.directory = directory
        settings = WorkerSettings(ComputeConfig(state=directory), warm.get_server_pid(), LIMITS, False)
        self.pool = Workers(size, settings, entry)
        # A spawned worker would take half a second to import its modules.
        self.pool._context = warm.CONTEXT  # type: ignore[assignment]
        self._threads = ThreadPoolExecutor(8)

    def submit(self, work: Job) -> Future[list[JobEvent]]:
        return self._threads.submit(lambda: list(self.pool.run(work)))

    def tend_until(self, condition: Callable[[], object], description: str, seconds: float = 20.0) -> None:
        def tend_once() -> object:
            self.pool.tend(0.05)
            return condition()

        wait_until(tend_once, seconds, description)

    def wait_for_result(self, work: Future[list[JobEvent]]) -> list[JobEvent]:
        self.tend_until(work.done, 'the job ends')
        return work.result()

    def wait_for_error(self, work: Future[list[JobEvent]]) -> BaseException | None:
        self.tend_until(work.done, 'the job ends')
        return work.exception()

    def wait_for_pid(self, work: Build) -> int:
        path = self.directory / f'{work.spec.instance}.pid'
        self.tend_until(path.exists, 'the job is in work')
        return int(path.read_text())

    def list_guests(self) -> set[str]:
        hypervisor = FakeHypervisor(self.directory)
        hypervisor.prepare()
        return set(hypervisor.list_guests())

    def close(self) -> None:
        (self.directory / 'go').touch()
        self.pool.stop()
        self._threads.shutdown(cancel_futures=True)


@pytest.fixture
def no_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace no worker that is downloading, so that the order of jobs does not depend on time."""
    monkeypatch.setattr('ecomp.agent.instance.pool.MAX_EXTRA_WORKERS', 0)


@pytest.fixture
def pool(tmp_path: Path, no_replacements: None) -> Iterator[TendedPool]:
    del no_replacements
    with closing(TendedPool(tmp_path, 1)) as tended:
        yield tended


@pytest.fixture
def pool_of_two(tmp_path: Path, no_replacements: None) -> Iterator[TendedPool]:
    del no_replacements
    with closing(TendedPool(tmp_path, 2)) as tended:
        yield tended
