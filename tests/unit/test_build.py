"""Jobs of a worker: a build completes or leaves nothing behind, whichever step fails."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ecomp.agent.instance.build import (
    Build,
    Cancelled,
    Destroy,
    Forget,
    Job,
    News,
    Resume,
    Shutdown,
    SwitchOff,
    carry_out,
)
from ecomp.errors import BuildFailed, EcompError
from ecomp.model.guest import BaseImage, Guest, GuestSpec
from ecomp.model.record import Progress
from ecomp.virt.fake import FakeHypervisor

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
BASE = BaseImage('/base.qcow2', 'qcow2', 0)
JOB = Build(GuestSpec(INSTANCE, COMPUTE, 1, 256, 1, BaseImage('', '', 0), 'qemu'), 'http://h/i')
TOLD = replace(JOB, spec=replace(JOB.spec, seed={'meta-data': b'{}', 'user-data': b''}))
STEPS = ('image', 'create_disk', 'create_seed', 'start')
ALL = [Progress('image', 1, 2), 'image', 'disk', 'started']


class Recording(FakeHypervisor):
    """A fake hypervisor that records calls and fails after a chosen step."""

    def __init__(self, fails_at: str = '') -> None:
        super().__init__()
        self.fails_at = fails_at
        self.bases: list[BaseImage | None] = [BASE]
        self.asked: list[str] = []
        self.spec: GuestSpec | None = None

    @contextmanager
    def held(
        self, url: str, checkpoint: Callable[[], None], tell: Callable[[int, int | None], None], since: float
    ) -> Iterator[Iterator[BaseImage | None]]:
        """Stand in for the image cache."""
        self._did('image')
        assert (url, since) == (JOB.image, JOB.since)
        checkpoint()
        tell(1, 2)
        yield iter(self.bases)
        self.asked.append('let go')

    def create_disk(self, spec: GuestSpec) -> None:
        super().create_disk(spec)
        self._did('create_disk')

    def create_seed(self, instance: str, files: Mapping[str, bytes]) -> None:
        assert self.guests()[instance].disk, 'by its overlay an instance is known to be here'
        super().create_seed(instance, files)
        self._did('create_seed')

    def start(self, spec: GuestSpec) -> None:
        self.spec = spec
        super().start(spec)
        self._did('start')

    def destroy(self, instance: str, compute: str) -> None:
        super().destroy(instance, compute)
        self.asked.append('destroy')

    def delete_disk(self, instance: str) -> None:
        assert not self.guests().get(instance, Guest(instance, None, False, False, False)).running
        super().delete_disk(instance)
        self.asked.append('delete_disk')

    def _did(self, step: str) -> None:
        self.asked.append(step)
        if step == self.fails_at:
            raise BuildFailed(step, 'it was told to')


def made(hypervisor: Recording, checkpoint: Callable[[], None] = lambda: None, job: Build = JOB) -> list[News]:
    events: list[News] = []
    carry_out(job, hypervisor, hypervisor, events.append, checkpoint)
    return events


def test_it_is_made_in_order() -> None:
    hypervisor = Recording()
    assert made(hypervisor) == ALL
    # The base volume must not be evicted before the overlay exists.
    assert hypervisor.asked == ['image', 'create_disk', 'let go', 'start']
    assert hypervisor.guests()[INSTANCE].running
    assert hypervisor.spec is not None
    assert hypervisor.spec.base == BASE


def test_a_disk_on_what_is_not_the_image_any_more_is_made_anew_on_what_is() -> None:
    hypervisor = Recording()
    hypervisor.bases = [replace(BASE, path='/older.qcow2'), None, BASE]
    assert made(hypervisor) == ALL
    # The new base volume may need the space of the old one, so no overlay may use the old one then.
    assert hypervisor.asked == ['image', 'create_disk', 'delete_disk', 'create_disk', 'let go', 'start']
    assert hypervisor.spec is not None
    assert hypervisor.spec.base == BASE


class Large(Recording):
    """A hypervisor that cannot create disks on /large.qcow2."""

    def create_disk(self, spec: GuestSpec) -> None:
        if spec.base.path == '/large.qcow2':
            raise BuildFailed('disk', 'the image is larger than DISK_GB')
        super().create_disk(spec)


@pytest.mark.parametrize(
    ('bases', 'fails'),
    [
        (['/large.qcow2', None, '/small.qcow2'], False),
        (['/small.qcow2', None, '/large.qcow2'], True),
        (['/large.qcow2'], True),
    ],
)
def test_it_fails_for_what_the_image_is_and_not_for_what_it_was(bases: list[str | None], fails: bool) -> None:
    hypervisor, events = Large(), list[News]()
    hypervisor.bases = [path and replace(BASE, path=path) for path in bases]
    if fails:
        with pytest.raises(BuildFailed, match='larger'):
            carry_out(JOB, hypervisor, hypervisor, events.append, lambda: None)
        assert hypervisor.guests() == {}
    else:
        carry_out(JOB, hypervisor, hypervisor, events.append, lambda: None)
    assert events == (ALL[:2] if fails else ALL), 'the image is there, whatever comes of the disk'


def test_what_it_is_told_is_on_a_disk_before_it_starts() -> None:
    hypervisor = Recording()
    assert made(hypervisor, job=TOLD) == ALL
    assert hypervisor.asked == ['image', 'create_disk', 'let go', 'create_seed', 'start']
    assert hypervisor.seeds() == {INSTANCE}
    assert hypervisor.spec is not None
    assert hypervisor.spec.seed == TOLD.spec.seed
    assert "b'{}'" not in repr(TOLD), 'user-data may be secret'
    Destroy(INSTANCE, COMPUTE).carry_out(hypervisor)
    assert hypervisor.seeds() == set()


@pytest.mark.parametrize('step', STEPS)
def test_a_step_that_fails_leaves_nothing(step: str) -> None:
    hypervisor = Recording(fails_at=step)
    with pytest.raises(BuildFailed, match='it was told to'):
        made(hypervisor, job=TOLD)
    assert hypervisor.guests() == {}
    assert hypervisor.seeds() == set()


@pytest.mark.parametrize('look', range(6))
def test_a_build_that_is_cancelled_at_any_look_leaves_nothing(look: int) -> None:
    hypervisor = Recording()
    looks = iter(range(100))

    def checkpoint() -> None:
        if next(looks) == look:
            raise Cancelled

    with pytest.raises(Cancelled):
        made(hypervisor, checkpoint, TOLD)
    assert hypervisor.guests() == {}
    assert hypervisor.seeds() == set()


def test_it_is_looked_for_a_destroy_between_all_steps() -> None:
    hypervisor, call_counts = Recording(), []
    made(hypervisor, lambda: call_counts.append(len(hypervisor.asked)), TOLD)
    assert sorted(set(call_counts)) == [0, 1, 3, 4, 5]


def test_a_guest_that_runs_is_taken_as_it_is() -> None:
    hypervisor = Recording()
    made(hypervisor)
    hypervisor.asked.clear()
    assert made(hypervisor) == ['started']
    assert hypervisor.asked == []


def test_half_of_one_is_made_anew() -> None:
    hypervisor = Recording()
    hypervisor.create_disk(JOB.spec)
    assert made(hypervisor) == ALL


def test_the_domain_goes_before_its_disk() -> None:
    hypervisor = Recording()
    made(hypervisor)
    hypervisor.asked.clear()
    Destroy(INSTANCE, COMPUTE).carry_out(hypervisor)
    assert hypervisor.asked == ['destroy', 'delete_disk']
    assert hypervisor.guests() == {}
    Destroy(INSTANCE, COMPUTE).carry_out(hypervisor)  # a second destroy succeeds, too


@pytest.mark.parametrize('there', [False, True])
def test_what_is_left_of_one_without_a_trace_goes_unless_it_came_back(there: bool) -> None:
    hypervisor = Recording()
    if there:
        made(hypervisor, job=TOLD)
    else:
        FakeHypervisor.create_seed(hypervisor, INSTANCE, {})
    hypervisor.asked.clear()
    carry_out(Forget(INSTANCE, COMPUTE), hypervisor, hypervisor, lambda _: None, lambda: None)
    assert hypervisor.asked == ([] if there else ['delete_disk'])
    assert hypervisor.seeds() == ({INSTANCE} if there else set())
    assert bool(hypervisor.guests()) == there


def test_its_power_is_switched_and_nothing_of_it_goes() -> None:
    hypervisor = Recording()
    made(hypervisor)
    hypervisor.asked.clear()
    for job, running in ((Shutdown, False), (Resume, True), (SwitchOff, False), (SwitchOff, False), (Resume, True)):
        carry_out(job(INSTANCE, COMPUTE), hypervisor, hypervisor, lambda _: None, lambda: None)
        assert hypervisor.guests()[INSTANCE] == Guest(INSTANCE, COMPUTE, True, running, True)
    assert hypervisor.asked == []


@pytest.mark.parametrize('error', [BuildFailed('disk', 'no room'), Cancelled(), EcompError('x')])
def test_errors_come_whole_out_of_a_worker(error: BuildFailed) -> None:
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is type(error)
    assert (str(unpickled), vars(unpickled)) == (str(error), vars(error))


@pytest.mark.parametrize(
    'job', [JOB, TOLD, *(kind(INSTANCE, COMPUTE) for kind in (Destroy, Resume, Shutdown, SwitchOff, Forget))]
)
def test_jobs_go_whole_into_a_worker(job: Job) -> None:
    assert pickle.loads(pickle.dumps(job)) == job
