"""Jobs of a worker: a build completes or leaves nothing behind, whichever step fails."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import pytest

from ecomp.agent.instance import build
from ecomp.agent.instance.build import Build, Cancelled, Destroy, JobEvent, Resume, Shutdown, SwitchOff, carry_out
from ecomp.errors import BuildFailed, EcompError
from ecomp.model.guest import BaseImage, Guest, GuestSpec
from ecomp.model.record import Progress
from ecomp.virt.fake import FakeHypervisor

COMPUTE = 'b8756be5-a30d-4311-920c-0ad996367a8e'
INSTANCE = 'd578fb7c-7787-4e73-b69a-a7b3ef9bf73a'
BASE = BaseImage('/base.qcow2', 'qcow2', 0)
JOB = Build(GuestSpec(INSTANCE, COMPUTE, 1, 256, 1, BaseImage('', '', 0), 'qemu'), 'http://h/i')
SEEDED_JOB = replace(JOB, spec=replace(JOB.spec, seed={'meta-data': b'{}', 'user-data': b''}))
STEPS = ('image', 'create_disk', 'create_seed', 'start')
ALL_EVENTS = [Progress('image', 1, 2), 'image', 'disk', 'started']


class Recording(FakeHypervisor):
    def __init__(self, fails_at: str = '') -> None:
        super().__init__()
        self.fails_at = fails_at
        self.calls: list[str] = []
        self.spec: GuestSpec | None = None

    @contextmanager
    def hold(
        self, url: str, checkpoint: Callable[[], None], tell: Callable[[int, int | None], None], since: float
    ) -> Iterator[BaseImage]:
        """Stand in for the image cache."""
        self._record_step('image')
        assert (url, since) == (JOB.image, JOB.requested_at)
        checkpoint()
        tell(1, 2)
        yield BASE
        self.calls.append('let go')

    def create_disk(self, spec: GuestSpec) -> None:
        super().create_disk(spec)
        self._record_step('create_disk')

    def create_seed(self, instance: str, files: Mapping[str, bytes]) -> None:
        assert self.list_guests()[instance].disk, 'by its overlay an instance is known to be here'
        super().create_seed(instance, files)
        self._record_step('create_seed')

    def start(self, spec: GuestSpec) -> None:
        self.spec = spec
        super().start(spec)
        self._record_step('start')

    def destroy(self, instance: str, compute: str) -> None:
        super().destroy(instance, compute)
        self.calls.append('destroy')

    def delete_disk(self, instance: str) -> None:
        assert not self.list_guests().get(instance, Guest(instance, None, False, False, False)).running
        super().delete_disk(instance)
        self.calls.append('delete_disk')

    def _record_step(self, step: str) -> None:
        self.calls.append(step)
        if step == self.fails_at:
            raise BuildFailed(step, 'it was told to')


def run_build(hypervisor: Recording, checkpoint: Callable[[], None] = lambda: None, job: Build = JOB) -> list[JobEvent]:
    events: list[JobEvent] = []
    carry_out(job, hypervisor, hypervisor, events.append, checkpoint)
    return events


def test_build_runs_its_steps_in_order() -> None:
    hypervisor = Recording()
    assert run_build(hypervisor) == ALL_EVENTS
    # The base volume must not be evicted before the overlay exists.
    assert hypervisor.calls == ['image', 'create_disk', 'let go', 'start']
    assert hypervisor.list_guests()[INSTANCE].running
    assert hypervisor.spec is not None
    assert hypervisor.spec.base == BASE


def test_seed_is_created_before_the_guest_starts() -> None:
    hypervisor = Recording()
    assert run_build(hypervisor, job=SEEDED_JOB) == ALL_EVENTS
    assert hypervisor.calls == ['image', 'create_disk', 'let go', 'create_seed', 'start']
    assert hypervisor.list_seeds() == {INSTANCE}
    assert hypervisor.spec is not None
    assert hypervisor.spec.seed == SEEDED_JOB.spec.seed
    assert "b'{}'" not in repr(SEEDED_JOB), 'user-data may be secret'
    Destroy(INSTANCE, COMPUTE).carry_out(hypervisor)
    assert hypervisor.list_seeds() == set()


REBUILD = replace(JOB, spec=replace(SEEDED_JOB.spec, rebuilt=7), is_rebuild=True)


def make_built() -> Recording:
    hypervisor = Recording()
    run_build(hypervisor, job=SEEDED_JOB)
    hypervisor.calls.clear()
    return hypervisor


def test_rebuild_removes_the_disk_once_it_has_the_image() -> None:
    hypervisor = make_built()
    assert run_build(hypervisor, job=REBUILD) == ALL_EVENTS
    assert hypervisor.calls == ['image', 'delete_disk', 'create_disk', 'let go', 'create_seed', 'start']
    assert hypervisor.list_guests() == {INSTANCE: Guest(INSTANCE, COMPUTE, True, True, True, rebuilt=7)}


@pytest.mark.parametrize('step', STEPS)
def test_failing_rebuild_leaves_no_disk_that_the_old_domain_could_start_with(step: str) -> None:
    hypervisor = make_built()
    before = hypervisor.list_guests()[INSTANCE]
    hypervisor.fails_at = step
    with pytest.raises(BuildFailed, match='it was told to'):
        run_build(hypervisor, job=REBUILD)
    guest = hypervisor.list_guests()[INSTANCE]
    if step == 'image':
        assert guest == before
    elif step == 'start':  # the new domain is defined by then
        assert (guest.defined, guest.disk, guest.rebuilt) == (True, True, 7)
    else:
        assert (guest.defined, guest.running, guest.disk, guest.rebuilt) == (True, False, False, 0)


@pytest.mark.parametrize('step', STEPS)
def test_failing_step_leaves_nothing_behind(step: str) -> None:
    hypervisor = Recording(fails_at=step)
    with pytest.raises(BuildFailed, match='it was told to'):
        run_build(hypervisor, job=SEEDED_JOB)
    assert hypervisor.list_guests() == {}
    assert hypervisor.list_seeds() == set()


@pytest.mark.parametrize('cancelled_checkpoint', range(6))
def test_build_cancelled_at_any_checkpoint_leaves_nothing_behind(cancelled_checkpoint: int) -> None:
    hypervisor = Recording()
    looks = iter(range(100))

    def checkpoint() -> None:
        if next(looks) == cancelled_checkpoint:
            raise Cancelled

    with pytest.raises(Cancelled):
        run_build(hypervisor, checkpoint, SEEDED_JOB)
    assert hypervisor.list_guests() == {}
    assert hypervisor.list_seeds() == set()


def test_checkpoint_is_called_between_all_steps() -> None:
    hypervisor, call_counts = Recording(), []
    run_build(hypervisor, lambda: call_counts.append(len(hypervisor.calls)), SEEDED_JOB)
    assert sorted(set(call_counts)) == [0, 1, 3, 4, 5]


def test_build_leaves_a_running_guest_unchanged() -> None:
    hypervisor = Recording()
    run_build(hypervisor)
    hypervisor.calls.clear()
    assert run_build(hypervisor) == ['started']
    assert hypervisor.calls == []


def test_incomplete_guest_is_rebuilt() -> None:
    hypervisor = Recording()
    hypervisor.create_disk(JOB.spec)
    assert run_build(hypervisor) == ALL_EVENTS


def test_destroy_removes_the_domain_before_its_disk() -> None:
    hypervisor = Recording()
    run_build(hypervisor)
    hypervisor.calls.clear()
    Destroy(INSTANCE, COMPUTE).carry_out(hypervisor)
    assert hypervisor.calls == ['destroy', 'delete_disk']
    assert hypervisor.list_guests() == {}
    Destroy(INSTANCE, COMPUTE).carry_out(hypervisor)  # a second destroy succeeds, too


@pytest.mark.parametrize('guest_exists', [False, True])
def test_forget_removes_leftovers_unless_the_guest_exists(guest_exists: bool) -> None:
    hypervisor = Recording()
    if guest_exists:
        run_build(hypervisor, job=SEEDED_JOB)
    else:
        FakeHypervisor.create_seed(hypervisor, INSTANCE, {})
    hypervisor.calls.clear()
    carry_out(build.RemoveLeftovers(INSTANCE, COMPUTE), hypervisor, hypervisor, lambda _: None, lambda: None)
    assert hypervisor.calls == ([] if guest_exists else ['delete_disk'])
    assert hypervisor.list_seeds() == ({INSTANCE} if guest_exists else set())
    assert bool(hypervisor.list_guests()) == guest_exists


def test_power_jobs_switch_the_guest_and_remove_nothing() -> None:
    hypervisor = Recording()
    run_build(hypervisor)
    hypervisor.calls.clear()
    for job, running in ((Shutdown, False), (Resume, True), (SwitchOff, False), (SwitchOff, False), (Resume, True)):
        carry_out(job(INSTANCE, COMPUTE), hypervisor, hypervisor, lambda _: None, lambda: None)
        assert hypervisor.list_guests()[INSTANCE] == Guest(INSTANCE, COMPUTE, True, running, True)
    assert hypervisor.calls == []


@pytest.mark.parametrize('error', [BuildFailed('image', 'no room', is_host_fault=True), Cancelled(), EcompError('x')])
def test_errors_survive_pickling(error: BuildFailed) -> None:
    unpickled = pickle.loads(pickle.dumps(error))
    assert type(unpickled) is type(error)
    assert (str(unpickled), vars(unpickled)) == (str(error), vars(error))
