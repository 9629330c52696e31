"""Build or remove one guest, step by step, and undo the steps of a build that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ecomp.agent.images.cache import Images
from ecomp.errors import EcompError
from ecomp.failpoints import failpoint
from ecomp.model.guest import GuestSpec
from ecomp.model.record import Progress
from ecomp.virt import Hypervisor
from ecomp.virt.image import determine_capacity


class WorkerDied(EcompError):
    """The job's worker process died before the job finished."""


class Cancelled(Exception):
    """The build was cancelled, by a changed request or stop_builds(), and undone or never begun."""


@dataclass(frozen=True)
class Build:
    """A guest to build from the image at the URL `image`."""

    spec: GuestSpec
    image: str
    # All processes share this monotonic clock.
    requested_at: float = field(default_factory=time.monotonic, compare=False)
    is_rebuild: bool = False  # in place of a guest of which nothing is kept

    @property
    def instance(self) -> str:
        return self.spec.instance


@dataclass(frozen=True)
class Step:
    """An operation on one guest, which a worker carries out."""

    instance: str
    compute: str

    def carry_out(self, hypervisor: Hypervisor) -> None:
        raise NotImplementedError


class Destroy(Step):
    """Removes a guest's domain, disk, seed and console log, where they exist."""

    def carry_out(self, hypervisor: Hypervisor) -> None:
        # First the domain, because a running guest may still write to its disk.
        hypervisor.destroy(self.instance, self.compute)
        failpoint('domain-undefined')
        hypervisor.delete_disk(self.instance)
        failpoint('disk-deleted')


class Resume(Step):
    def carry_out(self, hypervisor: Hypervisor) -> None:
        hypervisor.start_existing(self.instance, self.compute)


class Shutdown(Step):
    def carry_out(self, hypervisor: Hypervisor) -> None:
        hypervisor.shutdown(self.instance, self.compute)


class SwitchOff(Step):
    def carry_out(self, hypervisor: Hypervisor) -> None:
        hypervisor.switch_off(self.instance, self.compute)


class RemoveLeftovers(Step):
    """Deletes the seed and console log of a guest whose domain and disk are still gone."""

    def carry_out(self, hypervisor: Hypervisor) -> None:
        if self.instance not in hypervisor.list_guests():
            hypervisor.delete_disk(self.instance)


@dataclass(frozen=True)
class Resize(Step):
    """Changes what a domain is defined for, and lets its disk grow."""

    spec: GuestSpec

    def carry_out(self, hypervisor: Hypervisor) -> None:
        hypervisor.resize(self.spec)
        failpoint('domain-resized')


# Steps that stop or remove a guest: they are short, and do not wait for builds.
STOPPING_STEPS = (Destroy, Shutdown, SwitchOff)
# For one worker: libvirt serves no more calls of a connection at a time, and polls every 200 ms for the end of QEMU.
MAX_CONCURRENT_STOPS = 5
Job = Build | Step
# A running job's event: the name of a stage that it has reached, or its progress within a stage.
JobEvent = str | Progress


def carry_out(
    job: Job, hypervisor: Hypervisor, images: Images, report: Callable[[JobEvent], None], checkpoint: Callable[[], None]
) -> None:
    """Run a job, and undo the steps of a build that fails.

    A build returns once the domain runs. It calls `checkpoint`, which may raise Cancelled to end it, before each step
    and while it waits for the image. A rebuild removes nothing before it has the image.

    Raises:
        BuildFailed: the guest cannot be built.
        Conflict: a domain or volume of its name is not ecomp's, or is another compute's.
        EcompError: the hypervisor is unreachable, or the image could not be inspected.
    """
    if isinstance(job, Step):
        job.carry_out(hypervisor)
        return
    instance, spec = job.spec.instance, job.spec
    if not job.is_rebuild and hypervisor.is_running(instance):
        report('started')
        return
    with ExitStack() as undo:
        checkpoint()
        with images.hold(
            job.image, checkpoint, lambda *bytes: report(Progress('image', *bytes)), job.requested_at
        ) as base:
            report('image')
            failpoint('image-ready')
            checkpoint()
            spec = replace(spec, base=base)
            if job.is_rebuild:
                determine_capacity(spec)  # raises BuildFailed if the disk cannot hold the image
                hypervisor.switch_off(instance, spec.compute)
                hypervisor.delete_disk(instance)
                failpoint('disk-removed')
            # Registered before the step: one that fails halfway leaves something, and removing nothing is harmless.
            undo.callback(hypervisor.delete_disk, instance)
            hypervisor.create_disk(spec)
        failpoint('disk-created')
        if spec.seed is not None:
            checkpoint()
            hypervisor.create_seed(instance, spec.seed)
            failpoint('seed-written')
        report('disk')
        checkpoint()
        if job.is_rebuild:
            undo.pop_all()  # from here on a user can start what there is
        else:  # a domain that is not ecomp's is left alone
            undo.callback(hypervisor.destroy, instance, spec.compute)
        hypervisor.start(spec)
        checkpoint()
        failpoint('domain-started')
        report('started')
        undo.pop_all()
