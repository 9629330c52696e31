"""Make or remove one guest, step by step. Every step that leaves something has its undo on the next line."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from ecomp.agent.images.cache import Images
from ecomp.errors import BuildFailed, Conflict, EcompError
from ecomp.failpoints import failpoint
from ecomp.model.guest import GuestSpec
from ecomp.model.record import Progress
from ecomp.virt import Hypervisor


class WorkerDied(EcompError):
    """The job's worker process ended in the middle of it."""


class Cancelled(Exception):
    """A destroy was asked for while building: the build has undone itself."""


@dataclass(frozen=True)
class Build:
    """A guest to make. The spec's base is filled in when the image is there.

    `since` is when it was asked for here, which all processes of a boot call the same.
    """

    spec: GuestSpec
    image: str
    since: float = field(default_factory=time.monotonic, compare=False)

    @property
    def instance(self) -> str:
        return self.spec.instance


@dataclass(frozen=True)
class Step:
    """Something done to a guest of this compute in one step."""

    instance: str
    compute: str

    def carry_out(self, hypervisor: Hypervisor) -> None:
        """Do it. Errors: those of the hypervisor."""
        raise NotImplementedError


class Destroy(Step):
    """A guest's removal, with its disk. Nothing there is success."""

    def carry_out(self, hypervisor: Hypervisor) -> None:
        """Remove the domain, then its disk: never pull a disk from under a guest that may still write."""
        hypervisor.destroy(self.instance, self.compute)
        failpoint('domain-undefined')
        hypervisor.delete_disk(self.instance)
        failpoint('disk-deleted')


class Resume(Step):
    """A start of a guest as it is defined."""

    def carry_out(self, hypervisor: Hypervisor) -> None:
        hypervisor.resume(self.instance, self.compute)


class Shutdown(Step):
    """A question to a guest to turn itself off."""

    def carry_out(self, hypervisor: Hypervisor) -> None:
        hypervisor.shutdown(self.instance, self.compute)


class SwitchOff(Step):
    """A guest's power cut; its domain stays defined, its disk is kept."""

    def carry_out(self, hypervisor: Hypervisor) -> None:
        hypervisor.switch_off(self.instance, self.compute)


class Forget(Step):
    """The removal of what is left of a guest whose domain and disk are gone: its console log."""

    def carry_out(self, hypervisor: Hypervisor) -> None:
        """Remove the log, unless the guest came back."""
        if self.instance not in hypervisor.guests():
            hypervisor.delete_disk(self.instance)


ENDING = (Destroy, Shutdown, SwitchOff)
"""Jobs that take something away: they are short, and do not wait for builds."""
MOST_ENDS = 5
"""Of them one worker does at once: libvirt serves no more calls of a connection, and looks every 200 ms for a QEMU's
end."""
Job = Build | Step
News = str | Progress
"""What is told of a job: a stage is reached, or how far it is."""


def carry_out(
    job: Job,
    hypervisor: Hypervisor,
    images: Images,
    report: Callable[[News], None],
    checkpoint: Callable[[], None],
) -> None:
    """Do a job of any kind. A build: image, disk, domain; returns when the domain runs, else nothing of it is left.

    A guest that runs already is taken as it is (the same request again, after a restart). `report` gets
    each stage reached and the progress to it, `checkpoint` raises Cancelled if the build is to stop.
    Errors: BuildFailed, Cancelled, Conflict, Unreachable; those of a step.
    """
    if isinstance(job, Step):
        job.carry_out(hypervisor)
        return
    instance, spec = job.spec.instance, job.spec
    if hypervisor.runs(instance):
        report('started')
        return
    with ExitStack() as undo:
        checkpoint()
        failed: BuildFailed | None = None
        with images.held(job.image, checkpoint, lambda *bytes: report(Progress('image', *bytes)), job.since) as bases:
            # The undo comes first: a step that fails halfway leaves something too, and removing nothing is fine.
            undo.callback(hypervisor.delete_disk, instance)
            for base in bases:
                if base is None:
                    checkpoint()
                    hypervisor.delete_disk(instance)
                    continue
                failpoint('image-ready')
                checkpoint()
                spec, failed = replace(job.spec, base=base), None
                try:
                    hypervisor.create_disk(spec)
                except BuildFailed as error:
                    failed = error  # what counts is what becomes of the last one
        report('image')
        if failed is not None:
            raise failed
        failpoint('disk-created')
        if spec.seed is not None:
            checkpoint()
            hypervisor.create_seed(instance, spec.seed)
            failpoint('seed-written')
        report('disk')
        checkpoint()
        try:
            hypervisor.start(spec)
        except Conflict:
            raise  # a domain somebody else made: not ours to undo
        except BaseException:
            hypervisor.destroy(instance, spec.compute)
            raise
        undo.callback(hypervisor.destroy, instance, spec.compute)
        checkpoint()
        failpoint('domain-started')
        report('started')
        undo.pop_all()
