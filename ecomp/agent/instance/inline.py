"""Jobs without worker processes, and images without servers: for the fake hypervisor."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import wait

from ecomp.agent.instance.build import Build, Cancelled, Images, Job, News, carry_out
from ecomp.agent.instance.waker import Waker
from ecomp.model.guest import BaseImage
from ecomp.virt import Hypervisor


class Inline:
    """A Runner without processes, for the fake hypervisor: a job runs in the thread that asks for it."""

    def __init__(self, hypervisor: Hypervisor, images: Images) -> None:
        self._hypervisor = hypervisor
        self._images = images
        self._waker = Waker()
        self._cancelled: set[str | None] = set()

    def run(self, job: Job) -> Iterator[News]:
        news: list[News] = []
        try:
            carry_out(job, self._hypervisor, self._images, news.append, lambda: self._checkpoint(job.instance))
        finally:
            if isinstance(job, Build):
                self._cancelled.discard(job.instance)
        return iter(news)

    def cancel(self, instance: str | None) -> None:
        self._cancelled.add(instance)

    def allow(self) -> None:
        self._cancelled.discard(None)

    def tend(self, timeout: float) -> None:
        """See Runner: there is nobody to look after."""
        wait([self._waker.reader], timeout)
        self._waker.clear()

    def wake(self) -> None:
        self._waker.wake()

    def wake_on_signals(self) -> None:
        self._waker.wake_on_signals()

    def stop(self) -> None:
        self._waker.close()

    def _checkpoint(self, instance: str) -> None:
        if self._cancelled & {None, instance}:
            raise Cancelled


class FakeImages:
    """Images for the fake hypervisor: every URL is there, and empty."""

    @contextmanager
    def held(
        self, url: str, checkpoint: Callable[[], None], tell: Callable[[int, int | None], None], since: float
    ) -> Iterator[Iterator[BaseImage | None]]:
        """A base image of no size."""
        del tell, since
        checkpoint()
        yield iter([BaseImage(url, 'qcow2', 0)])
