"""A worker process for tests of the pool: the real loop with scripted images.

The hypervisor is a fake. The script is the word in http://test/<word>: `good`, `fails` (BuildFailed), `breaks` (an
unexpected error), `waits` (until it is cancelled), `stubborn` (until the file `go` exists, cancelled or not), `comes`
(as stubborn, and reports progress), `stalls` (as comes, and then fails). Each writes its pid to `<instance>.pid`, with
the instance from `?instance=`, or to `<word>.pid` without one.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from ecomp.agent.images import inspection
from ecomp.agent.images.cache import ImageCache
from ecomp.agent.instance.pool import WorkerSettings, prepare, run_jobs
from ecomp.errors import BuildFailed
from ecomp.files import InstanceLocks
from ecomp.model.guest import BaseImage
from ecomp.virt import Hypervisor
from ecomp.virt.fake import FakeHypervisor
from tests.kit.images import LOOPBACK_REACH

MAX_WAIT_SECONDS = 60.0


class ScriptedImages:
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @contextmanager
    def hold(
        self, url: str, checkpoint: Callable[[], None], tell: Callable[[int, int | None], None], since: float
    ) -> Iterator[BaseImage]:
        del since
        parts = urlsplit(url)
        instance = parse_qs(parts.query).get('instance', [parts.path.strip('/')])[0]
        (self._directory / f'{instance}.pid.part').write_text(str(os.getpid()))
        (self._directory / f'{instance}.pid.part').rename(self._directory / f'{instance}.pid')
        word = parts.path.strip('/')
        if word == 'fails':
            raise BuildFailed('image', 'it was told to')
        if word == 'breaks':
            raise ZeroDivisionError('nobody thought of it')
        deadline = time.monotonic() + MAX_WAIT_SECONDS
        while word in ('waits', 'stubborn', 'comes', 'stalls') and time.monotonic() < deadline:
            if word == 'waits':
                checkpoint()
            if word in ('comes', 'stalls'):
                tell(34, 600)
            if (self._directory / 'go').exists():
                break
            time.sleep(0.02)
        if word == 'stalls':
            raise BuildFailed('image', 'it was told to, later')
        yield BaseImage('/base', 'qcow2', 0)


class SharedHypervisor:
    """A fake hypervisor that all workers share: each call loads its state from disk."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with (self._directory / 'hypervisor.lock').open('w') as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                hypervisor = FakeHypervisor(self._directory)
                hypervisor.prepare()
                return getattr(hypervisor, name)(*args)

        return call


def run_worker(pipe: Connection, settings: WorkerSettings) -> None:
    """Run a scripted worker, in place of ecomp.agent.instance.pool.main."""
    prepare(settings)
    state = settings.config.state
    run_jobs(pipe, cast(Hypervisor, SharedHypervisor(state)), ScriptedImages(state), InstanceLocks(state))


def run_downloading_worker(pipe: Connection, settings: WorkerSettings) -> None:
    prepare(settings)
    state = settings.config.state
    images = ImageCache(state / 'images', inspection.inspect, None, settings.limits, LOOPBACK_REACH)
    run_jobs(pipe, cast(Hypervisor, SharedHypervisor(state)), images, InstanceLocks(state))


def fail_to_start(pipe: Connection, settings: WorkerSettings) -> None:
    del pipe, settings
    raise SystemExit(3)
